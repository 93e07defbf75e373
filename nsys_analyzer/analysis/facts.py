"""Defines facts: what a person has to know about figures, as an id and values without words.

A fact is a warning about a capture, an assumption behind a rate, or the reason for a status. Its sentence is in
``report/facts.py``, below the same id. A new fact needs its id here, its sentence there, and the place that finds it.
"""

from __future__ import annotations

from abc import ABC
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

from nsys_analyzer.text import StrOrText, Text

FactId = Literal[
    # the capture lacks something
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
    # unprofiled times
    "row_chosen_by_kernels", "rows_without_owner", "rows_differ", "untrusted_time", "deviation_above_mean",
    "gpu_busy_longer", "profiled_shorter",
    # rates and FLOPs
    "flops_of_first_rank", "whole_model_on_each_gpu", "no_whole_steps", "uncounted_operators",
    "several_passes_per_step", "skipped_scores", "skipped_convolution_work", "too_few_matmuls", "rate_above_peak",
]  # fmt: skip


class Fact:
    """A fact by its id, with the values that its sentence needs.

    It is not a dataclass, because msgspec would write one as an object. JSON has its sentence instead.
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

    class FactOrText(ABC):  # noqa: B024 - a name for both
        """The type that msgspec writes as text, and reads as the sentence of a fact."""

    for _kind in (Fact, str, Text):
        FactOrText.register(_kind)
