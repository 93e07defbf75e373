"""Defines facts: warnings, assumptions behind a rate, reasons why something is missing, and changes of a question.

A fact consists of an ID and values. ``report/facts.py`` contains the sentence for each ID. A new fact needs an ID in
this file, a sentence in ``report/facts.py``, and the code that finds the fact.
"""

from __future__ import annotations

from abc import ABC
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

from nsys_analyzer.text import StrOrText, Text

FactId = Literal[
    # data that the capture lacks
    "stale_export", "out_of_memory", "allocation_failed", "no_kernels", "no_kernels_in_torch_trace", "no_range_table",
    "no_ranges_in_torch_trace", "no_api_calls", "no_api_calls_in_torch_trace", "unreadable",
    # rows, ranges and kernels that figures leave out
    "open_phase", "rows_left_out", "partial_instances", "unnamed_kernels", "opaque_graphs", "kernels_without_launch",
    "lost_launches", "warmup_kernels", "open_warmup",
    # phases and steps
    "repeating_ranges", "missing_range", "no_phase_names", "phase_without_work", "phase_only_in_warmup",
    "inferred_phases", "uneven_phase", "insufficient_phases", "unrecorded_work", "steps_without_backward",
    "step_ranges_without_backward", "unlike_steps", "late_gpu_work", "nested_phases", "crossing_phases",
    "ambiguous_kernels",
    # the machine, the program and its configuration
    "several_gpus", "unknown_rank", "tf32_matmuls", "model_contradicted", "not_annotated", "profiler_message",
    "clock_limited",
    # unprofiled times
    "row_chosen_by_kernels", "rows_without_owner", "rows_differ", "untrusted_time", "deviation_above_mean",
    "gpu_busy_longer", "profiled_shorter",
    # rates and FLOPs
    "flops_of_first_rank", "whole_model_on_each_gpu", "no_whole_steps", "uncounted_operators",
    "several_passes_per_step", "skipped_scores", "skipped_convolution_work", "too_few_matmuls", "rate_above_peak",
    # why no saving can be derived from a replay
    "earlier_work", "replay_differs", "cold_start", "captures_graphs", "findings_out_of_memory",
    # why some or all findings are missing for another reason
    "ran_on_cpu", "no_capture", "only_launches_recorded", "no_recorded_kernel", "idle_steps",
    "no_replay_without_api_calls", "too_few_api_calls", "hidden_in_graphs", "one_of_many_ranks",
    # the changes of a what-if question
    "changed_class", "changed_range", "changed_operator", "pinned_copies", "changed_launches", "ranks_on_time",
    "faster_network", "more_ranks", "checkpointed", "changed_batch", "micro_batches", "other_optimizer",
]  # fmt: skip


class Fact:
    """The ID of a fact, and the values that its sentence contains.

    This class is not a dataclass, since msgspec would write a dataclass as an object. In JSON, a fact is a sentence.
    """

    def __init__(self, fact_id: FactId, /, **values: Any) -> None:
        self.id, self.values = fact_id, values

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Fact) and (self.id, self.values) == (other.id, other.values)

    def __hash__(self) -> int:
        return hash((self.id, *self.values))

    def __repr__(self) -> str:
        return f"Fact({self.id!r}, {self.values!r})"


if TYPE_CHECKING:
    FactOrText: TypeAlias = Fact | StrOrText
else:

    class FactOrText(ABC):  # noqa: B024 - only `isinstance` uses this class
        """The type that msgspec writes as text, and reads as the sentence of a fact."""

    for _type in (Fact, str, Text):
        FactOrText.register(_type)
