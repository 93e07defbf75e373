"""What a comparison reads of a capture: the keys of a report's JSON, whether from a file or of a capture just read."""

from __future__ import annotations

from statistics import median
from typing import Annotated, Any, TypeAlias

import msgspec

from nsys_analyzer.analysis.attribution.processes import label_of_pid
from nsys_analyzer.analysis.steps.idle import Cause
from nsys_analyzer.analysis.summary.statistics import Stats

#: Ten years are 3e11 ms.
_Ms: TypeAlias = Annotated[float, msgspec.Meta(ge=0, le=1e12)]
_Values: TypeAlias = Annotated[tuple[_Ms, ...], msgspec.Meta(min_length=1)]
_CLASS = msgspec.field(name="class")


class RecordedClass(msgspec.Struct, frozen=True):
    """The compute of a kernel class in a step, mean ms."""

    ms: _Ms
    std_ms: _Ms | None
    kernel_class: str = _CLASS


class RecordedKernel(msgspec.Struct, frozen=True):
    """The compute of a kernel in a step; fills and graphs without kernels have no name."""

    name: str
    launches: float
    ms: _Ms
    std_ms: _Ms | None
    kernel_class: str = _CLASS


class RecordedCause(msgspec.Struct, frozen=True):
    """The idle time of one cause in a step, mean ms."""

    cause: Cause
    ms: _Ms
    std_ms: _Ms | None


class RecordedGroup(msgspec.Struct, frozen=True):
    """Steps that are alike; see ``analysis.steps.groups``."""

    steps: int
    measured: bool


class RecordedStep(msgspec.Struct, frozen=True):
    """The steps of a capture, on the device that computes most; see ``analysis.steps.step``."""

    instances: int
    source: str
    unit: str
    wall_ms: Stats
    wall_values_ms: _Values
    busy_values_ms: _Values
    compute_ms: _Ms
    exposed_copy_ms: _Ms
    exposed_communication_ms: _Ms
    idle_ms: _Ms
    exposed_copy_std_ms: _Ms | None
    exposed_communication_std_ms: _Ms | None
    own_pauses_ms: _Ms
    classes: tuple[RecordedClass, ...]
    causes: tuple[RecordedCause, ...]
    kernels: tuple[RecordedKernel, ...]
    groups: tuple[RecordedGroup, ...] = ()
    profiler_overhead_ms: tuple[_Ms, _Ms] | None = None

    @property
    def parts_ms(self) -> float:
        """All parts together: the length of a step."""
        return self.compute_ms + self.exposed_copy_ms + self.exposed_communication_ms + self.idle_ms

    @property
    def median_busy_ms(self) -> float:
        """The GPU's work in a step, median."""
        return median(self.busy_values_ms)

    @property
    def usual_compute_ms(self) -> float:
        """The compute of most steps: the mean, but no more than the GPU's work in the median step.

        A step that computes ten times as long as the others makes the mean longer, and a median step no longer.
        """
        return min(self.compute_ms, self.median_busy_ms)

    @property
    def launches(self) -> float:
        """Kernels and fills that start in a step, mean."""
        return sum(one.launches for one in self.kernels)

    @property
    def matmuls(self) -> float:
        """Matmuls that start in a step, mean."""
        return sum(one.launches for one in self.kernels if one.kernel_class == "matmul")

    @property
    def is_found(self) -> bool:
        """Whether no name tells the steps."""
        return self.source in ("repetition", "said", "pass")


class RecordedPhase(msgspec.Struct, frozen=True):
    """A phase of a capture over its measured instances."""

    phase: str
    instances: int
    kernels_per_instance: float
    wall_values_ms: tuple[_Ms, ...]
    busy_values_ms: tuple[_Ms, ...]
    synchronized: bool

    def __post_init__(self) -> None:
        if self.instances and not (self.wall_values_ms and self.busy_values_ms):
            raise ValueError(f"the phase {self.phase} has instances without a time")


class RecordedFinding(msgspec.Struct, frozen=True):
    """A finding of a capture, and what removing it saves."""

    id: str
    title: str
    saves_ms_low: float
    saves_ms_high: float


class RecordedTimes(msgspec.Struct, frozen=True):
    """Times of phases without the profiler; ``doubts`` says which cannot be right."""

    phases: dict[str, Stats] = {}
    doubts: dict[str, tuple[str, ...]] = {}

    def trusted(self, phase: str) -> Stats | None:
        """The times of a phase; None where it was not timed or is in doubt."""
        stats = None if self.doubts.get(phase) else self.phases.get(phase)
        return stats if stats and stats.typical else None


class Recorded(msgspec.Struct, frozen=True):
    """One process of one capture, as a report's JSON holds it.

    Attributes:
        configuration, run: what the report says of its configuration, and its manifest; the keys are those of the JSON.
        precisions: shares of the matmul time by precision.
    """

    name: str
    process: str | None
    rank: int | None
    source: str
    status: str
    message: str | None
    gpu: str | None
    configuration: dict[str, Any] | None
    run: dict[str, Any] | None
    precisions: dict[str, float]
    phases: tuple[RecordedPhase, ...]
    step: RecordedStep | None
    findings: tuple[RecordedFinding, ...] | None
    unprofiled: RecordedTimes | None
    pid: int | None = None

    @property
    def shares_gpu(self) -> bool:
        """Whether only its ID tells the process from others of its capture, on the same GPU."""
        return self.pid is not None and self.process == label_of_pid(self.pid)

    @property
    def title(self) -> str:
        """The name, with the process where there are several."""
        return f"{self.name} {self.process or ''}".strip()

    def phase(self, name: str) -> RecordedPhase | None:
        """A phase by name, if it has a measured instance."""
        return next((one for one in self.phases if one.phase == name and one.instances), None)
