"""The figures of a capture's steps: what fills them, why the GPU idles, how far ahead of it the program runs."""

from __future__ import annotations

import re
from dataclasses import dataclass, field, fields, replace
from statistics import median
from typing import TYPE_CHECKING, Annotated, Literal, TypeAlias, TypeVar

import msgspec

from nsys_analyzer.analysis.statistics import Stats
from nsys_analyzer.analysis.steps.lines import Line
from nsys_analyzer.analysis.steps.process import Cause
from nsys_analyzer.analysis.steps.windows import Source, StepGroup
from nsys_analyzer.text import StrOrText, Text

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

#: The loading of batches, in a program without a GPU.
INPUT = "input"
#: What is on the critical path where no work of the GPU is.
PROGRAM = "program"
#: Parts of a step that hooks time, but that are no phases, because the GPU does little in them.
UNPHASED = ("data", "zero_grad", "evaluation")
#: The word, but not in an option, a call, a name, or "optimizer step".
_WORD = re.compile(r"(?<![-.\w])(?<!optimizer )(s|S)tep(s?)\b(?![(=_])")


#: Ten years are 3e11 ms.
Ms: TypeAlias = Annotated[float, msgspec.Meta(ge=0, le=1e12)]
Values: TypeAlias = Annotated[tuple[Ms, ...], msgspec.Meta(min_length=1)]


_Narrow = TypeVar("_Narrow", bound="DataclassInstance")


def narrowed(value: object, kind: type[_Narrow]) -> _Narrow:
    """The value as what it inherits from: with the fields of that alone."""
    return kind(**{one.name: getattr(value, one.name) for one in fields(kind) if one.init})


@dataclass(frozen=True)
class Parts:
    """What fills a stretch of a device's time in a step, ms: the four parts add up to it."""

    compute_ms: Ms
    exposed_copy_ms: Ms
    exposed_communication_ms: Ms
    idle_ms: Ms

    @property
    def total_ms(self) -> float:
        """The stretch itself."""
        return self.compute_ms + self.exposed_copy_ms + self.exposed_communication_ms + self.idle_ms


class ClassTime(msgspec.Struct, frozen=True):
    """The compute of one kernel class in a step, mean ms; of kernels that overlap, a moment is that of the first."""

    kernel_class: str = msgspec.field(name="class")
    ms: Ms
    std_ms: Ms | None = None


class KernelTime(msgspec.Struct, frozen=True):
    """The compute of one kernel in a step, and how often it starts: means. The kernels of a class add up to it.

    Fills, and graphs whose kernels are not known, have no name.
    """

    name: str
    kernel_class: str = msgspec.field(name="class")
    launches: float
    ms: Ms
    std_ms: Ms | None


@dataclass(frozen=True)
class PhaseParts(Parts):
    """The device's time of one phase in a step; a gap is of the phase whose work ends it."""

    phase: str


@dataclass(frozen=True)
class IdleTime:
    """The idle time of one cause in a step, mean: its range and API call where it has one, its gaps and its lines."""

    cause: Cause
    range: str | None
    api: str | None
    ms: float
    gaps: float
    lines: tuple[Line, ...] = ()


@dataclass(frozen=True)
class CauseTime:
    """The idle time of one cause in a step, mean ms, whatever the range and the API call."""

    cause: Cause
    ms: Ms
    std_ms: Ms | None


class OnPath(msgspec.Struct, frozen=True, omit_defaults=True):
    """A part of the critical path of a step, mean ms: the parts add up to the step.

    Attributes:
        where: "GPU" for work of a kernel class (of copies, of collectives), "idle" for the idle time of a cause, "CPU"
            for what the program does while the GPU's work delays nothing.
        device: another GPU whose work it is, while the one that computes most is idle; None for the latter's own time.
    """

    where: Literal["GPU", "idle", "CPU"]
    part: str
    ms: Ms
    device: int | None = None


@dataclass(frozen=True)
class DeviceSteps(Parts):
    """The steps on one device, which is numbered as CUDA does.

    Attributes:
        idle_by_cause: the idle time by cause, range and API call, longest first.
    """

    device: int
    classes: tuple[ClassTime, ...]
    phases: tuple[PhaseParts, ...]
    idle_by_cause: tuple[IdleTime, ...]


@dataclass(frozen=True, kw_only=True)
class DissectedSteps(DeviceSteps):
    """The steps on one device with all that a comparison needs.

    Standard deviations are those over the steps, None of a single one.

    Attributes:
        kernels: those that compute, longest first.
        causes: the idle time by cause alone, longest first.
        busy_values_ms: the GPU's work in each step; of very many steps those of some, evenly spread.
        own_pauses_ms: the idle time in short pauses between operations that are both queued, which no program delays.
    """

    kernels: tuple[KernelTime, ...] = ()
    causes: tuple[CauseTime, ...] = ()
    busy_values_ms: Values
    exposed_copy_std_ms: Ms | None = None
    exposed_communication_std_ms: Ms | None = None
    own_pauses_ms: Ms = 0.0


@dataclass(frozen=True)
class LaunchLatency:
    """From a launch to the start of its operation, µs: the median, and what the slowest tenth exceeds."""

    median: float
    p90: float


@dataclass(frozen=True)
class Queue:
    """How many launches wait or run when another one is added."""

    median: float
    max: int


@dataclass(frozen=True)
class UnprofiledStep:
    """What a step takes without the profiler, ms: one figure where that was timed, else an estimate between two."""

    low: float
    high: float
    timed: bool


@dataclass(frozen=True, kw_only=True)
class StepSummary(DissectedSteps):
    """The steps of a process, with the figures of the device that computes most.

    Attributes:
        instances: how many steps.
        source: what bounds them; ``unit`` says it in words.
        kind: what they do where an engine that serves requests says it: "prefill", "decode" or "mixed"; else empty.
        batch: how many sequences the steps of an engine have, median; None where that is not said.
        on_gpu_timeline: whether they are bounded by the GPU's work, which the program runs ahead of.
        length_ms: the length of a step, profiled: the one that is said, and to which all parts are scaled.
        wall_ms: statistics of those that are measured.
        wall_values_ms: the duration of each step; of very many steps those of some, evenly spread.
        groups: the steps that are alike, those that are not measured among them.
        passes: how often each phase, and each range of ``UNPHASED``, begins in a step, mean.
        devices: every device that the process uses.
        unprofiled_ms: None where nothing tells it.
        busy_share: the GPU's work, or on a CPU the operators', as a share of the step's reported length.
        profiler_overhead_ms: the least and the most that the profiler takes of a step, where it hides the program.
        lines: those of the program at which it is longest in a step, where its stacks were sampled.
        critical_path: what the end of a step waits for, by part; empty where no replay of the steps tells it.
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
    def said_ms(self) -> float:
        """The one length that a report says: without the profiler where that is known, the middle of an estimate."""
        known = self.unprofiled_ms
        return (known.low + known.high) / 2 if known else self.length_ms

    @property
    def is_pass(self) -> bool:
        """Whether the capture is one pass, since nothing tells its steps."""
        return self.source == "pass"

    @property
    def is_found(self) -> bool:
        """Whether no name tells the steps."""
        return self.source in ("repetition", "said", "pass")

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

    def in_words(self, words: StrOrText) -> StrOrText:
        """Returns a sentence about a step, or the same about a pass if the capture is one."""
        return name_pass(words) if self.is_pass else words

    def idle_of(self, *causes: Cause) -> float:
        """The idle time of these causes in a step, mean ms."""
        return sum(row.ms for row in self.idle_by_cause if row.cause in causes)


def name_pass(text: StrOrText) -> StrOrText:
    """Returns a sentence about a step as one about a pass; code, options and names stay."""
    if isinstance(text, str):
        return _WORD.sub(lambda word: ("P" if word[1] == "S" else "p") + ("asses" if word[2] else "ass"), text)
    spans = (span if span.kind == "code" else replace(span, text=str(name_pass(span.text))) for span in text.spans)
    return Text(tuple(spans))
