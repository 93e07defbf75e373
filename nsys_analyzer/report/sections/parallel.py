"""Writes what a report says about pipelines, and about groups of ranks that exchange data slowly."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from nsys_analyzer.report.model import Field, Table, make_table
from nsys_analyzer.report.units import format_count, format_ms
from nsys_analyzer.text import Text, join_names, phrase, rounded, rounded_percent

if TYPE_CHECKING:
    from nsys_analyzer.analysis.ranks.run import ParallelRun, Pipeline, SlowLink, Stage

#: The most ranks that a sentence or a cell names.
_MAX_NAMED_RANKS = 8


def describe_slow_link(link: SlowLink) -> Text:
    """Returns the sentences on a group of ranks that transfers data for longer than other groups."""
    return phrase(
        "{} exchange data slowly: the transfers take {} times as long as the same transfers of other groups, {} more "
        "per step. Compare their links with the others: `nvidia-smi topo -m`, `nvidia-smi nvlink --status`.",
        _name_ranks(link.ranks).capitalize(), rounded(link.ratio), format_ms(link.later_ms),
    )  # fmt: skip


def describe_slow_stage(pipeline: Pipeline) -> str:
    """Returns the sentence on a rank that is slower than the ranks that run the same stage in other replicas."""
    return (
        f"{pipeline.slow_rank.capitalize()} is slower than the other ranks of stage {pipeline.slow_rank_stage}, by "
        f"{format_ms(pipeline.slow_rank_ms)} of own time per step under the profiler."
    )


def describe_pipeline(pipeline: Pipeline) -> str:
    """Returns the sentences on the schedule, the bubble and the longest stage of a pipeline."""
    stages, longest = pipeline.stages, pipeline.stages[pipeline.longest_stage - 1]
    schedule = "its schedule is not known" if pipeline.schedule == "unknown" else f"schedule: {pipeline.schedule}"
    chunks = f", {pipeline.chunks} chunks of layers per stage" if pipeline.chunks > 1 else ""
    replicas = f" (in {len(longest.ranks)} replicas)" if len(longest.ranks) > 1 else ""
    shortest_ms = min(stage.own_ms for stage in stages)
    return (
        f"The pipeline{replicas} has {format_count(len(stages), 'stage')} and "
        f"{format_count(pipeline.micro_batches, 'micro-batch')} per step ({schedule}{chunks}). Under "
        f"the profiler, a stage only waits for other stages in {rounded_percent(pipeline.bubble_share)} of a step "
        f"(bubble). If all stages took equally long, this would be {rounded_percent(pipeline.equal_stages_share)}. "
        f"Stage {pipeline.longest_stage} is the longest: its own time is {format_ms(longest.own_ms)} per step, and the "
        f"shortest stage has {format_ms(shortest_ms)}. Twice as many micro-batches of half the size would save "
        f"at most {format_ms(pipeline.saves_ms)} per step, if smaller kernels were as efficient."
    )


def tabulate_stages(run: ParallelRun, pipeline: Pipeline) -> Table:
    """Returns the table of the stages of a pipeline."""
    rows = [*enumerate(pipeline.stages, 1)]
    return make_table(_STAGE_FIELDS, rows, "The stages of the pipeline, ms per step:", capture=run.name)


def _name_ranks(labels: Sequence[str]) -> str:
    """Returns the labels of ranks in words: "rank 2 and rank 3"."""
    more = [f"{len(labels) - _MAX_NAMED_RANKS} more"] if len(labels) > _MAX_NAMED_RANKS else []
    return join_names([*labels[:_MAX_NAMED_RANKS], *more])


_STAGE_FIELDS: tuple[Field[tuple[int, Stage]], ...] = (
    Field("stage", "text", lambda row: str(row[0])),
    Field("ranks", "text", lambda row: _name_ranks(row[1].ranks)),
    Field("own time", "ms", lambda row: row[1].own_ms),
    Field("bubble", "ms", lambda row: row[1].bubble_ms),
)
