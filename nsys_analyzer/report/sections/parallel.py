"""Writes what a report says about pipelines, and about groups of ranks that exchange data slowly."""

from __future__ import annotations

from typing import TYPE_CHECKING

from nsys_analyzer.report.units import format_count, format_ms
from nsys_analyzer.text import Text, list_first, phrase, rounded, rounded_percent

if TYPE_CHECKING:
    from nsys_analyzer.analysis.ranks.run import Pipeline, SlowLink


def describe_slow_link(link: SlowLink) -> Text:
    """Returns the sentences on a group of ranks that transfers data for longer than other groups."""
    return phrase(
        "{} exchange data slowly: their transfers take {} times as long as equal transfers of other groups of ranks, "
        "which adds {} to a step. `nvidia-smi topo -m` and `nvidia-smi nvlink --status` show the links of each GPU.",
        list_first(link.ranks).capitalize(), rounded(link.ratio), format_ms(link.later_ms),
    )  # fmt: skip


def describe_slow_rank_of_stage(pipeline: Pipeline) -> str:
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
        f"{format_count(pipeline.micro_batches, 'micro-batch')} per step ({schedule}{chunks}). Under the profiler, a "
        f"stage only waits for other stages in {rounded_percent(pipeline.bubble_share)} of a step (bubble). If all "
        f"stages took equally long, this share would be {rounded_percent(pipeline.equal_stages_share)}. Stage "
        f"{pipeline.longest_stage} is the longest: its own time is {format_ms(longest.own_ms)} per step, and that of "
        f"the shortest stage is {format_ms(shortest_ms)}. Twice as many micro-batches of half the size would save at "
        f"most {format_ms(pipeline.saves_ms)} per step, if the smaller kernels were as efficient."
    )
