"""The figures of a capture's steps: the parts of a step, the causes of idle time, and the queue of launches."""

from __future__ import annotations

import re
from dataclasses import dataclass, field, fields, replace
from statistics import median
from typing import TYPE_CHECKING, Annotated, Literal, TypeAlias, TypeVar

import msgspec

from nsys_analyzer.analysis.statistics import Stats
from nsys_analyzer.analysis.steps.groups import StepGroup
from nsys_analyzer.analysis.steps.lines import Line
from nsys_analyzer.analysis.steps.process import Cause
from nsys_analyzer.analysis.steps.windows import StepSource
from nsys_analyzer.text import StrOrText, Text

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

#: The name of the phase in which a program without a GPU loads batches.
INPUT_PHASE = "input"
#: The name of the part of the critical path in which the program runs and no GPU work is critical.
PROGRAM_PART = "program"
#: The names of the parts of a step that hooks measure, but that are not phases because the GPU does little work in
#: them.
PARTS_OUTSIDE_PHASES = ("data", "zero_grad", "evaluation")
#: Matches the word "step", except in an option, a call, a name, or "optimizer step".
_STEP_WORD = re.compile(r"(?<![-.\w])(?<!optimizer )(s|S)tep(s?)\b(?![(=_])")


#: A time in ms. The upper limit is more than ten years.
Ms: TypeAlias = Annotated[float, msgspec.Meta(ge=0, le=1e12)]
TimesMs: TypeAlias = Annotated[tuple[Ms, ...], msgspec.Meta(min_length=1)]


_Narrow = TypeVar("_Narrow", bound="DataclassInstance")


def narrow_to_base(value: object, kind: type[_Narrow]) -> _Narrow:
    """Returns a copy of ``value`` as an object of its base class ``kind``, with the fields of ``kind`` only."""
    return kind(**{column.name: getattr(value, column.name) for column in fields(kind) if column.init})


@dataclass(frozen=True)
class Parts:
    """The four parts of a stretch of a device's time in a step, ms. The parts add up to the length of the stretch."""

    compute_ms: Ms
    exposed_copy_ms: Ms
    exposed_communication_ms: Ms
    idle_ms: Ms

    @property
    def total_ms(self) -> float:
        """Returns the length of the stretch, ms."""
        return self.compute_ms + self.exposed_copy_ms + self.exposed_communication_ms + self.idle_ms


class ClassTime(msgspec.Struct, frozen=True):
    """The mean compute time of one kernel class in a step, ms. Kernels that overlap share the time equally."""

    kernel_class: str = msgspec.field(name="class")
    ms: Ms
    std_ms: Ms | None = None


class KernelTime(msgspec.Struct, frozen=True):
    """The mean compute time of one kernel in a step, and its mean number of launches.

    The times of all kernels of a class add up to the time of the class. The name is empty for fills, and for CUDA
    graphs whose kernels are unknown. The operator is the one that launches the kernel most often; it is empty if it is
    unknown.
    """

    name: str
    kernel_class: str = msgspec.field(name="class")
    launches: float
    ms: Ms
    std_ms: Ms | None
    operator: str = ""


@dataclass(frozen=True)
class PhaseParts(Parts):
    """The parts of a device's time in one phase of a step. A gap belongs to the phase of the next operation."""

    phase: str


@dataclass(frozen=True)
class IdleTime:
    """The mean idle time per step of one cause in one range and one API call.

    Attributes:
        range, api: the range and the API call that the program executes during the idle time; None if there is none.
        ms: the idle time, ms.
        gaps: the mean number of gaps in a step.
        lines: the lines of the program that it executes during the gaps, if its stacks were sampled.
    """

    cause: Cause
    range: str | None
    api: str | None
    ms: float
    gaps: float
    lines: tuple[Line, ...] = ()


@dataclass(frozen=True)
class CauseTime:
    """The mean idle time per step of one cause in all ranges and API calls, ms."""

    cause: Cause
    ms: Ms
    std_ms: Ms | None


class OnPath(msgspec.Struct, frozen=True, omit_defaults=True):
    """A part of the critical path of a step. The parts add up to the length of the step.

    Attributes:
        where: "GPU" for work of a kernel class, of copies or of collectives; "idle" for the idle time of a cause; "CPU"
            for the program while the GPU does work that is not critical.
        part: the kernel class, "copies", the cause of the idle time, or "program".
        ms: the mean time of the part in a step, ms.
        device: the GPU that does the work, if it is not the GPU that computes most; else None.
    """

    where: Literal["GPU", "idle", "CPU"]
    part: str
    ms: Ms
    device: int | None = None


@dataclass(frozen=True)
class DeviceSteps(Parts):
    """The parts of the steps on one device.

    Attributes:
        device: the number of the device in CUDA.
        classes: the compute time by kernel class, the longest first.
        phases: the parts of each phase.
        idle_by_cause: the idle time by cause, range and API call, the longest first.
    """

    device: int
    classes: tuple[ClassTime, ...]
    phases: tuple[PhaseParts, ...]
    idle_by_cause: tuple[IdleTime, ...]


@dataclass(frozen=True, kw_only=True)
class DissectedSteps(DeviceSteps):
    """The parts of the steps on one device, with all figures that a comparison needs.

    Standard deviations are those over the steps, and None for a single step.

    Attributes:
        kernels: the compute time by kernel, the longest first.
        causes: the idle time by cause, the longest first.
        busy_values_ms: the time in which the GPU works in each step, or in an evenly spread sample of the steps.
        own_pauses_ms: the idle time in short pauses of the device between two queued operations. The program does not
            cause these pauses.
    """

    kernels: tuple[KernelTime, ...] = ()
    causes: tuple[CauseTime, ...] = ()
    busy_values_ms: TimesMs
    exposed_copy_std_ms: Ms | None = None
    exposed_communication_std_ms: Ms | None = None
    own_pauses_ms: Ms = 0.0


@dataclass(frozen=True)
class LaunchLatency:
    """The median and the 90th percentile of the time from a launch to the start of its operation, µs."""

    median: float
    p90: float


@dataclass(frozen=True)
class Queue:
    """The median and the maximum number of launches in the GPU's queue, waiting or running, when a launch is added."""

    median: float
    max: int


@dataclass(frozen=True)
class UnprofiledStep:
    """The length of a step without the profiler, ms.

    Attributes:
        low, high: the bounds of the estimated length; both are the measured length if it was measured.
        timed: whether the length was measured.
        in_recorded_process: whether the recorded process measured the length, outside of the capture range.
    """

    low: float
    high: float
    timed: bool
    in_recorded_process: bool = False


@dataclass(frozen=True, kw_only=True)
class StepSummary(DissectedSteps):
    """The steps of a process, with the figures of the device that computes most.

    Attributes:
        instances: the number of measured steps.
        source: what shows where the steps begin and end.
        unit: a clause that says what counts as a step.
        kind: "prefill", "decode" or "mixed" if a serving engine marks its steps so; else empty.
        batch: the median number of sequences in a step of an engine; None if the engine does not record it.
        on_gpu_timeline: whether steps begin and end with the GPU's work, because the program runs far ahead of the GPU.
        length_ms: the length of a step under the profiler, ms. The parts of a step are scaled to add up to it.
        wall_ms: statistics of the lengths of the measured steps.
        wall_values_ms: the length of each step, or of an evenly spread sample of the steps.
        groups: the groups of similar steps, including the groups that are not measured.
        passes: the mean number of times that each phase begins in a step; also that of the ranges "data", "zero_grad"
            and "evaluation".
        devices: the parts of the steps on every device that the process uses.
        launch_latency_us: the time from launches to the starts of operations; None if it is unknown.
        queue: the length of the GPU's queue of launches; None if it is unknown.
        unprofiled_ms: the length of a step without the profiler; None if it is unknown.
        busy_share: the share of the step's reported length in which the GPU works; on a CPU, in which operators run.
        profiler_overhead_ms: the lower and the upper bound of the profiler's cost in a step, if this cost is so large
            that the program's own speed is unknown; else None.
        lines: the lines at which the program spends most time in a step, if its stacks were sampled.
        critical_path: the parts of the critical path; empty if the steps cannot be replayed.
    """

    instances: int
    source: StepSource
    unit: str
    kind: str = ""
    batch: float | None = None
    on_gpu_timeline: bool = False
    length_ms: float
    wall_ms: Stats
    wall_values_ms: TimesMs
    groups: tuple[StepGroup, ...] = ()
    passes: dict[str, float] = field(default_factory=dict)
    devices: tuple[DeviceSteps, ...] = ()
    launch_latency_us: LaunchLatency | None = None
    queue: Queue | None = None
    unprofiled_ms: UnprofiledStep | None = None
    busy_share: float | None = None
    profiler_overhead_ms: tuple[float, float] | None = None
    lines: tuple[Line, ...] = ()
    critical_path: tuple[OnPath, ...] = ()

    @property
    def reported_ms(self) -> float:
        """Returns the length of a step as reports give it, ms.

        This is the length without the profiler, or the middle of its estimated bounds. If it is unknown, it is the
        length under the profiler.
        """
        unprofiled = self.unprofiled_ms
        return (unprofiled.low + unprofiled.high) / 2 if unprofiled else self.length_ms

    @property
    def is_pass(self) -> bool:
        """Returns whether the whole capture counts as one step, because nothing in it shows where steps begin."""
        return self.source == "pass"

    @property
    def is_inferred(self) -> bool:
        """Returns whether the steps are inferred, because no range and no phase shows where they begin and end."""
        return self.source in ("repetition", "said", "pass")

    @property
    def median_busy_ms(self) -> float:
        """Returns the median time in a step in which the GPU works, ms."""
        return median(self.busy_values_ms)

    @property
    def usual_compute_ms(self) -> float:
        """Returns the compute time of a usual step, ms: the smaller of the mean compute time and the median busy time.

        One step that computes ten times as long as the other steps raises the mean, but hardly changes the median.
        """
        return min(self.compute_ms, self.median_busy_ms)

    @property
    def launches(self) -> float:
        """Returns the mean number of kernels and fills that start in a step."""
        return sum(kernel.launches for kernel in self.kernels)

    @property
    def matmuls(self) -> float:
        """Returns the mean number of matmuls that start in a step."""
        return sum(kernel.launches for kernel in self.kernels if kernel.kernel_class == "matmul")

    def adapt_to_pass(self, words: StrOrText) -> StrOrText:
        """Returns a sentence about a step, with "pass" instead of "step" if the whole capture counts as one step."""
        return replace_step_by_pass(words) if self.is_pass else words

    def idle_of(self, *causes: Cause) -> float:
        """Returns the mean idle time of the given causes in a step, ms."""
        return sum(row.ms for row in self.idle_by_cause if row.cause in causes)


def replace_step_by_pass(text: StrOrText) -> StrOrText:
    """Returns a sentence with "pass" instead of "step". Code, options and names are not changed."""
    if isinstance(text, str):
        return _STEP_WORD.sub(lambda word: ("P" if word[1] == "S" else "p") + ("asses" if word[2] else "ass"), text)
    spans = (
        span if span.kind == "code" else replace(span, text=str(replace_step_by_pass(span.text))) for span in text.spans
    )
    return Text(tuple(spans))
