"""The figures of a capture's steps: what fills them, why the GPU idles, how far ahead of it the program runs."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace

from nsys_analyzer.analysis.steps.groups import StepGroup
from nsys_analyzer.analysis.steps.idle import Cause
from nsys_analyzer.analysis.steps.lanes import Lane
from nsys_analyzer.analysis.steps.study import Study
from nsys_analyzer.analysis.steps.windows import Source
from nsys_analyzer.analysis.summary.statistics import Stats
from nsys_analyzer.text import Text, Words

#: Phases of the GPU's time that no phase's range has launched.
OUTSIDE = "outside the phases"
#: The loading of batches, in a program without a GPU.
INPUT = "input"
#: The word, but not in an option, a call, a name, or "optimizer step".
_WORD = re.compile(r"(?<![-.\w])(?<!optimizer )(s|S)tep(s?)\b(?![(=_])")


@dataclass(frozen=True)
class Parts:
    """What fills a stretch of a device's time in a step, ms: the four parts add up to it."""

    compute_ms: float
    exposed_copy_ms: float
    exposed_communication_ms: float
    idle_ms: float

    @property
    def total_ms(self) -> float:
        """The stretch itself."""
        return self.compute_ms + self.exposed_copy_ms + self.exposed_communication_ms + self.idle_ms


@dataclass(frozen=True)
class ClassTime:
    """The compute of one kernel class in a step, mean ms; of kernels that overlap, a moment is that of the first."""

    kernel_class: str
    ms: float
    std_ms: float | None = None


@dataclass(frozen=True)
class KernelTime:
    """The compute of one kernel in a step, and how often it starts: means. The kernels of a class add up to it."""

    name: str
    kernel_class: str
    launches: float
    ms: float
    std_ms: float | None


@dataclass(frozen=True)
class PhaseParts:
    """The device's time of one phase in a step; a gap is of the phase whose work ends it."""

    phase: str
    parts: Parts


@dataclass(frozen=True)
class IdleTime:
    """The idle time of one cause in a step, mean: its range and API call where it has one, and its gaps."""

    cause: Cause
    range: str
    api: str
    ms: float
    gaps: float


@dataclass(frozen=True)
class CauseTime:
    """The idle time of one cause in a step, mean ms, whatever the range and the API call."""

    cause: Cause
    ms: float
    std_ms: float | None


@dataclass(frozen=True)
class DeviceSteps:
    """The steps on one device, which is numbered as CUDA does.

    Standard deviations are those over the steps, None of a single one.

    Attributes:
        kernels: those that compute, longest first.
        causes: the idle time by cause alone, longest first.
        busy_values_ms: the GPU's work in each step, as of ``StepSummary.values_ms``.
        copy_std_ms, communication_std_ms: of the exposed parts.
        own_pauses_ms: the idle time in short pauses between operations that are both queued, which no program delays.
    """

    device: int
    parts: Parts
    classes: tuple[ClassTime, ...]
    phases: tuple[PhaseParts, ...]
    idle: tuple[IdleTime, ...]
    kernels: tuple[KernelTime, ...] = ()
    causes: tuple[CauseTime, ...] = ()
    busy_values_ms: tuple[float, ...] = ()
    copy_std_ms: float | None = None
    communication_std_ms: float | None = None
    own_pauses_ms: float = 0.0


@dataclass(frozen=True)
class StepSummary:
    """The steps of a process.

    Attributes:
        instances: how many steps.
        source: what bounds them; ``unit`` says it in words.
        on_gpu: whether they are bounded by the GPU's work, which the program runs ahead of.
        length_ms: the length of a step, profiled: the one that is said, and to which all parts are scaled.
        wall_ms: statistics of those that are measured.
        groups: the steps that are alike, those that are not measured among them.
        cut: how many steps more the capture holds a part of.
        devices: every device that the process uses.
        launch_latency_us: from a launch to the start of its operation, of median and 90th percentile.
        queue: how many launches wait or run when another one is added, median and most.
        lanes: one step of median duration as it passed.
        study: some of the steps in detail, None where no launch is known.
        values_ms: the duration of each step; of very many steps those of some, evenly spread.
    """

    instances: int
    source: Source
    unit: str
    on_gpu: bool
    length_ms: float
    wall_ms: Stats
    groups: tuple[StepGroup, ...]
    devices: tuple[DeviceSteps, ...]
    launch_latency_us: tuple[float, float] | None = None
    queue: tuple[float, int] | None = None
    lanes: tuple[Lane, ...] = ()
    study: Study | None = None
    values_ms: tuple[float, ...] = ()
    cut: int = 0

    @property
    def is_pass(self) -> bool:
        """Whether the capture is one pass, since nothing tells its steps."""
        return self.source == "pass"

    def in_words(self, words: Words) -> Words:
        """A sentence about a step; about a pass, where the capture is one."""
        if not self.is_pass:
            return words
        if isinstance(words, str):
            return _WORD.sub(lambda found: ("P" if found[1] == "S" else "p") + ("asses" if found[2] else "ass"), words)
        spans = (one if one.kind == "code" else replace(one, text=str(self.in_words(one.text))) for one in words.spans)
        return Text(tuple(spans))

    @property
    def main(self) -> DeviceSteps:
        """The device that computes most."""
        return max(self.devices, key=lambda one: one.parts.compute_ms)

    def idle_ms(self, *causes: Cause) -> float:
        """The idle time of these causes in a step, mean ms."""
        return sum(row.ms for row in self.main.idle if row.cause in causes)
