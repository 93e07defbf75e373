"""The figures of a capture's steps: what fills them, why the GPU idles, how far ahead of it the program runs."""

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
from nsys_analyzer.analysis.steps.windows import Source
from nsys_analyzer.text import StrOrText, Text

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

#: The name of the loading of batches among the phases of a program without a GPU.
INPUT = "input"
#: The name of the program on the critical path, where no work of the GPU is on it.
PROGRAM = "program"
#: Parts of a step that hooks time. They are not phases, because the GPU does little in them.
UNPHASED = ("data", "zero_grad", "evaluation")
#: The word "step", except in an option, a call, a name, or "optimizer step".
_STEP_WORD = re.compile(r"(?<![-.\w])(?<!optimizer )(s|S)tep(s?)\b(?![(=_])")


#: A time in ms. Ten years are 3e11 ms.
Ms: TypeAlias = Annotated[float, msgspec.Meta(ge=0, le=1e12)]
Values: TypeAlias = Annotated[tuple[Ms, ...], msgspec.Meta(min_length=1)]


_Narrow = TypeVar("_Narrow", bound="DataclassInstance")


def narrow(value: object, kind: type[_Narrow]) -> _Narrow:
    """Returns the value as a type that it inherits from, with the fields of that type alone."""
    return kind(**{column.name: getattr(value, column.name) for column in fields(kind) if column.init})


@dataclass(frozen=True)
class Parts:
    """The four parts of a stretch of a device's time in a step, ms: they add up to it."""

    compute_ms: Ms
    exposed_copy_ms: Ms
    exposed_communication_ms: Ms
    idle_ms: Ms

    @property
    def total_ms(self) -> float:
        """Returns the length of the stretch, ms."""
        return self.compute_ms + self.exposed_copy_ms + self.exposed_communication_ms + self.idle_ms


class ClassTime(msgspec.Struct, frozen=True):
    """The compute time of one kernel class in a step, mean ms. Kernels that overlap share the time equally."""

    kernel_class: str = msgspec.field(name="class")
    ms: Ms
    std_ms: Ms | None = None


class KernelTime(msgspec.Struct, frozen=True):
    """The compute time of one kernel in a step, and how often it starts: means. The kernels of a class add up to it.

    Fills, and graphs whose kernels are unknown, have no name.
    """

    name: str
    kernel_class: str = msgspec.field(name="class")
    launches: float
    ms: Ms
    std_ms: Ms | None


@dataclass(frozen=True)
class PhaseParts(Parts):
    """The device's time of one phase in a step. A gap belongs to the phase of the work that ends it."""

    phase: str


@dataclass(frozen=True)
class IdleTime:
    """The idle time of one cause in a step, mean.

    Attributes:
        range, api: the range and the API call in which the program is; None if there is none.
        gaps: the number of gaps in a step.
        lines: the lines of the program, if its stacks were sampled.
    """

    cause: Cause
    range: str | None
    api: str | None
    ms: float
    gaps: float
    lines: tuple[Line, ...] = ()


@dataclass(frozen=True)
class CauseTime:
    """The idle time of one cause in a step over all ranges and API calls, mean ms."""

    cause: Cause
    ms: Ms
    std_ms: Ms | None


class OnPath(msgspec.Struct, frozen=True, omit_defaults=True):
    """A part of the critical path of a step, mean ms: the parts add up to the step.

    Attributes:
        where: "GPU" for work of a kernel class, of copies or of collectives; "idle" for the idle time of a cause; "CPU"
            for what the program does while the GPU's work delays nothing.
        part: the kernel class, "copies", the cause of the idle time, or ``PROGRAM``.
        device: another GPU that works while the GPU that computes most is idle; None for the time of the latter.
    """

    where: Literal["GPU", "idle", "CPU"]
    part: str
    ms: Ms
    device: int | None = None


@dataclass(frozen=True)
class DeviceSteps(Parts):
    """The steps on one device.

    Attributes:
        device: its number in CUDA.
        idle_by_cause: the idle time by cause, range and API call, longest first.
    """

    device: int
    classes: tuple[ClassTime, ...]
    phases: tuple[PhaseParts, ...]
    idle_by_cause: tuple[IdleTime, ...]


@dataclass(frozen=True, kw_only=True)
class DissectedSteps(DeviceSteps):
    """The steps on one device with all figures that a comparison needs.

    Standard deviations are taken over the steps, and are None for a single step.

    Attributes:
        kernels: the kernels that compute, longest first.
        causes: the idle time by cause alone, longest first.
        busy_values_ms: the GPU's work in each step; if there are very many steps, in some of them, evenly spread.
        own_pauses_ms: the idle time in short pauses between operations that are both queued. No program delays them.
    """

    kernels: tuple[KernelTime, ...] = ()
    causes: tuple[CauseTime, ...] = ()
    busy_values_ms: Values
    exposed_copy_std_ms: Ms | None = None
    exposed_communication_std_ms: Ms | None = None
    own_pauses_ms: Ms = 0.0


@dataclass(frozen=True)
class LaunchLatency:
    """The time from a launch to the start of its operation, µs: median and 90th percentile."""

    median: float
    p90: float


@dataclass(frozen=True)
class Queue:
    """The number of launches that wait or run when another one is added."""

    median: float
    max: int


@dataclass(frozen=True)
class UnprofiledStep:
    """The length of a step without the profiler, ms: the same figure twice if it was timed, else an estimate."""

    low: float
    high: float
    timed: bool


@dataclass(frozen=True, kw_only=True)
class StepSummary(DissectedSteps):
    """The steps of a process, with the figures of the device that computes most.

    Attributes:
        instances: the number of measured steps.
        source: what shows where they begin and end.
        unit: the same in words.
        kind: "prefill", "decode" or "mixed" if an engine that serves requests says so; else empty.
        batch: the number of sequences in a step of an engine, median; None if the engine does not say it.
        on_gpu_timeline: whether the steps are bounded by the GPU's work, because the program runs ahead of the GPU.
        length_ms: the length of a step under the profiler. All parts are scaled to it.
        wall_ms: statistics of the lengths of the measured steps.
        wall_values_ms: the length of each step; if there are very many steps, of some of them, evenly spread.
        groups: the groups of steps that are alike, including the groups that are not measured.
        passes: how often each phase, and each range of ``UNPHASED``, begins in a step, mean.
        devices: every device that the process uses.
        unprofiled_ms: the length of a step without the profiler; None if it is unknown.
        busy_share: the GPU's work as a share of the step's reported length; on a CPU, the work of operators.
        profiler_overhead_ms: the least and the most that the profiler takes of a step, if that hides the program.
        lines: the lines at which the program is longest in a step, if its stacks were sampled.
        critical_path: the parts of the time that the end of a step waits for; empty if the steps cannot be replayed.
    """

    instances: int
    source: Source
    unit: str
    kind: str = ""
    batch: float | None = None
    on_gpu_timeline: bool = False
    length_ms: float
    wall_ms: Stats
    wall_values_ms: Values
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
        """Returns the one length that a report gives, ms: without the profiler if known, the middle of an estimate."""
        unprofiled = self.unprofiled_ms
        return (unprofiled.low + unprofiled.high) / 2 if unprofiled else self.length_ms

    @property
    def is_pass(self) -> bool:
        """Returns whether the whole capture counts as one step, because nothing shows its steps."""
        return self.source == "pass"

    @property
    def is_inferred(self) -> bool:
        """Returns whether the steps are inferred, because no range and no phase bounds them."""
        return self.source in ("repetition", "said", "pass")

    @property
    def median_busy_ms(self) -> float:
        """Returns the median of the GPU's work in a step, ms."""
        return median(self.busy_values_ms)

    @property
    def usual_compute_ms(self) -> float:
        """Returns the compute time of most steps, ms: the mean, but no more than the GPU's work in the median step.

        One step that computes ten times as long as the others raises the mean, and does not change the median step.
        """
        return min(self.compute_ms, self.median_busy_ms)

    @property
    def launches(self) -> float:
        """Returns the number of kernels and fills that start in a step, mean."""
        return sum(kernel.launches for kernel in self.kernels)

    @property
    def matmuls(self) -> float:
        """Returns the number of matmuls that start in a step, mean."""
        return sum(kernel.launches for kernel in self.kernels if kernel.kernel_class == "matmul")

    def adapt_to_pass(self, words: StrOrText) -> StrOrText:
        """Returns a sentence about a step, or the same about a pass if the capture is one."""
        return name_pass(words) if self.is_pass else words

    def idle_of(self, *causes: Cause) -> float:
        """Returns the idle time of these causes in a step, mean ms."""
        return sum(row.ms for row in self.idle_by_cause if row.cause in causes)


def name_pass(text: StrOrText) -> StrOrText:
    """Returns a sentence about a step as one about a pass. Code, options and names stay."""
    if isinstance(text, str):
        return _STEP_WORD.sub(lambda word: ("P" if word[1] == "S" else "p") + ("asses" if word[2] else "ass"), text)
    spans = (span if span.kind == "code" else replace(span, text=str(name_pass(span.text))) for span in text.spans)
    return Text(tuple(spans))
