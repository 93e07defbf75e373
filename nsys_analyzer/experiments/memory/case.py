"""Case and figures of the experiment ``memory``."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TypeAlias

from nsys_analyzer.analysis.transformer.models import ModelSize, find_model
from nsys_analyzer.errors import ConfigurationError
from nsys_analyzer.experiments.model import CaseTarget, Row, option

#: Time in ms, and the bytes allocated from then on.
Point: TypeAlias = tuple[float, int]


@dataclass(frozen=True)
class MemoryCase:
    """One configuration of the transformer.

    Raises:
        ConfigurationError: no step to warm up, or none to measure.

    """

    device: str
    model: str = option("small", "small, medium, large, xl, 2.7B, xl-2026 or 10B")
    num_layers: int = option(0, "in place of the model's; 0 is its own", least=0, cpu=2)
    context_length: int = option(256, "tokens")
    batch_size: int = option(4, "batch size", cpu=1)
    mode: str = option("train", "forward under no_grad, or all phases of a step", ("forward", "train"))
    precision: str = option("fp32", "bf16 is autocast", ("fp32", "tf32", "bf16"))
    warmup_steps: int = option(3, "steps before the measured ones; the first makes the optimizer's moments", cpu=1)
    steps: int = option(5, "steps timed without a recorder", cpu=2)
    snapshot: str = option("", "file for the allocator's snapshot, on a GPU; empty for none")

    def __post_init__(self) -> None:
        if self.steps < 1 or self.warmup_steps < 1:
            raise ConfigurationError("steps and warmup_steps must be at least 1")

    @property
    def size(self) -> ModelSize:
        """The model's dimensions."""
        model = find_model(self.model)
        return replace(model, num_layers=self.num_layers or model.num_layers)

    @property
    def trains(self) -> bool:
        """Whether it is a full training step."""
        return self.mode == "train"


@dataclass(frozen=True)
class PhaseMemory:
    """Memory in one phase: at its start, peak and end, with the number of allocations and frees in it."""

    name: str
    start_ms: float
    end_ms: float
    start_bytes: int
    peak_bytes: int
    end_bytes: int
    allocations: int
    frees: int
    allocated_bytes: int


@dataclass(frozen=True)
class PhaseFigures(PhaseMemory):
    """Memory and times of one phase.

    Attributes:
        counted_peak_bytes: the peak as the allocator counts it; None on a CPU.
        teeth: falls of the curve by a tenth of its height or more.
        device_calls_ms: the time up to the calls of the driver.
        wall_ms, issue_ms: medians without a recorder: to the synchronized end, and until all work was issued.
        allocator_ms: upper bound of the issue time in the allocator.
        cold_ms: of a step with an empty allocator cache; None on a CPU.

    """

    counted_peak_bytes: int | None
    teeth: int
    rise_bytes_per_ms: float | None
    fall_bytes_per_ms: float | None
    device_allocations: int
    device_frees: int
    device_calls_ms: float | int
    wall_ms: float
    issue_ms: float
    allocator_ms: float
    cold_ms: float | None = None


@dataclass(frozen=True)
class Holder:
    """Allocations of one size by one line in one phase; ``at_peak`` of them were alive at the step's peak."""

    source: str
    phase: str
    bytes: int
    count: int
    at_peak: int
    code: str = ""


@dataclass(frozen=True)
class SavedLine:
    """Tensors and bytes that a line of a layer saves for backward, means of the layers."""

    source: str
    code: str
    tensors: float
    bytes: float


@dataclass
class MemoryFigures:
    """Memory of the recorded step.

    Attributes:
        parameter_bytes, logits_bytes, residual_bytes: by their shapes; residual is the residual stream.
        layer_saves_by_shapes_bytes: saved for backward by a layer, by the shapes.
        step_ms: the sum of the phases' medians, without a recorder.
        cold_device_calls, cold_step_ms: of a step with an empty allocator cache.
        cached_call_us: one allocation and free of a residual stream from the cache.
        base_bytes: allocated before the step.
        requested_peak_bytes and the three after it: as the allocator counts.
        timeline_ms_bytes: time since the step began, and bytes from then on.
        residual_seen_bytes: the residual stream as it was recorded.
        kept_bytes, layer_saves_bytes: allocated in forward and alive at its end: all, and that of a layer.

    """

    parameter_bytes: int | None = None
    logits_bytes: int | None = None
    residual_bytes: int | None = None
    layer_saves_by_shapes_bytes: int | None = None
    moment_bytes: int | None = None
    step_ms: float | None = None
    cold_device_calls: int | None = None
    cold_step_ms: float | None = None
    cached_call_us: float | None = None
    base_bytes: int | None = None
    step_peak_bytes: int | None = None
    forward_peak_bytes: int | None = None
    loss_peak_bytes: int | None = None
    backward_peak_bytes: int | None = None
    optimizer_peak_bytes: int | None = None
    requested_peak_bytes: int | None = None
    allocated_peak_bytes: int | None = None
    reserved_peak_bytes: int | None = None
    inactive_split_peak_bytes: int | None = None
    timeline_ms_bytes: list[Point] | None = None
    phases: list[PhaseFigures] | None = None
    largest: list[Holder] | None = None
    residual_seen_bytes: int | None = None
    kept_bytes: int | None = None
    layer_saves_bytes: float | int | None = None
    layer_saves: list[SavedLine] | None = None


TARGET = CaseTarget("profiling_targets.memory_history", MemoryCase, MemoryFigures)
MemoryRow: TypeAlias = Row[MemoryCase, MemoryFigures]


def run_name(row: MemoryRow) -> str:
    """A row in a sentence: ``small 256 train fp32``; ``small-L2`` with two layers in place of the model's own."""
    case = row.case
    layers = f"-L{case.num_layers}" if case.num_layers else ""
    return f"{case.model}{layers} {case.context_length} {case.mode} {case.precision}"
