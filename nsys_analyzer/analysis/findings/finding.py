"""The types of findings: the steps that rules look at, the candidates that they yield, and what is reported."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Literal, NamedTuple

import numpy as np
import numpy.typing as npt

from nsys_analyzer.analysis.facts import FactOrText
from nsys_analyzer.analysis.steps.lines import Line
from nsys_analyzer.analysis.steps.replay import Replay, run_together
from nsys_analyzer.analysis.steps.step import StepSummary
from nsys_analyzer.analysis.steps.study import Study
from nsys_analyzer.text import StrOrText
from nsys_analyzer.trace.arrays import Bools, Floats, Ints
from nsys_analyzer.trace.schema import NS_PER_MS

_BACKWARD_KERNEL = re.compile("(?i)backward|_bwd")
#: This many callers of a finding's API calls are named, those with most calls.
_MAX_CALLERS = 3
#: A share for each operation of the GPU, shape (operations,).
Shares = npt.NDArray[np.floating[Any]]
#: A change of the replayed steps.
Change = Callable[[Replay], Replay]


@dataclass(frozen=True)
class Place:
    """Where a timeline shows a finding: idle time of a cause, or kernels of a class, of a phase, or of a name."""

    kind: Literal["idle", "class", "phase", "kernel"]
    name: str


@dataclass(frozen=True, kw_only=True)
class Finding:
    """One thing that slows a step down.

    Attributes:
        id: its key in JSON.
        title: the finding in a few words.
        saves_ms_low, saves_ms_high: the bounds of the saving per step, ms, if only this is changed and no profiler
            runs. ``derivation`` names their assumptions.
        step_ms: the length of a step without the profiler.
        left_after_all_ms: the length of a step after this finding and those before it in the list. Savings overlap:
            they are replayed together, never added.
        evidence: what was seen, one sentence each.
        derivation: how the saving was derived.
        remedy: lines of PyTorch code to try.
        disproof: an experiment that would show that the finding is wrong.
        place: where a timeline shows it; None if it has no place there.
        lines: the lines of the program that it is about, if stacks were sampled.
        saves_ms: the middle of the interval before it was limited to the time of its cause, but not more than its
            upper end.
        left_ms: the length of a step after this finding alone.
        share_of_step: ``saves_ms`` as a share of a step.
    """

    id: str
    title: str
    saves_ms_low: float
    saves_ms_high: float
    step_ms: float
    left_after_all_ms: float
    evidence: tuple[StrOrText, ...]
    derivation: StrOrText
    remedy: tuple[str, ...]
    disproof: StrOrText
    place: Place | None = None
    lines: tuple[Line, ...] = ()
    saves_ms: float = math.nan
    left_ms: float = field(init=False)
    share_of_step: float = field(init=False)

    def __post_init__(self) -> None:
        """Computes the figures that follow from the interval."""
        middle_ms = (self.saves_ms_low + self.saves_ms_high) / 2 if math.isnan(self.saves_ms) else self.saves_ms
        saves_ms = min(max(middle_ms, self.saves_ms_low), self.saves_ms_high)
        share = saves_ms / self.step_ms if self.step_ms else 0.0
        vars(self).update(saves_ms=saves_ms, left_ms=self.step_ms - saves_ms, share_of_step=share)


@dataclass(frozen=True)
class FindingFigures:
    """The figures behind a finding, which the report puts into words: the base of one type for each rule."""


@dataclass(frozen=True)
class FindingTexts(FindingFigures):
    """The sentences of a finding, as attributes of ``Finding``; the finding of a plugin brings its own."""

    title: str
    evidence: tuple[StrOrText, ...]
    derivation: StrOrText
    remedy: tuple[str, ...]
    disproof: StrOrText


@dataclass(frozen=True, kw_only=True)
class FindingWithFigures(Finding):
    """A finding as the analysis makes it: with its figures, and with empty sentences, which the report writes.

    Attributes:
        figures: the figures that the sentences name.
        is_torch: whether the program uses PyTorch, whose functions a remedy may name.
        is_pass: whether the capture is one pass of the program, so that sentences name no step.
        is_serving: whether an engine serves requests, whose options a remedy may name.
    """

    title: str = ""
    evidence: tuple[StrOrText, ...] = ()
    derivation: StrOrText = ""
    remedy: tuple[str, ...] = ()
    disproof: StrOrText = ""
    figures: FindingFigures
    is_torch: bool = True
    is_pass: bool = False
    is_serving: bool = False


@dataclass(frozen=True)
class Diagnosis:
    """The causes that make the steps of a capture long, the largest saving first.

    Attributes:
        step_ms_low, step_ms_high: the interval of a step's length without the profiler; equal if that was timed.
        profiled_ms: the length of a step under the profiler.
        busy_ms: the GPU's work in a step, which no change of the program's own time makes shorter.
        replay_error: the length of the replayed steps ÷ that of the recorded ones − 1.
        is_timed: whether the step was timed without the profiler.
        profiler_overhead_ms: the least and the most that the profiler adds to a step, if it adds so much that it hides
            what the program does; else None.
        doubt: the reason why no saving can be derived; None if findings can be trusted.
    """

    step_ms_low: float
    step_ms_high: float
    profiled_ms: float
    busy_ms: float
    replay_error: float
    is_timed: bool
    profiler_overhead_ms: tuple[float, float] | None
    findings: tuple[Finding, ...]
    doubt: MissingReason | None = None

    @property
    def step_ms(self) -> float:
        """Returns the estimated length of a step without the profiler: the middle of its interval."""
        return (self.step_ms_low + self.step_ms_high) / 2


class Caller(NamedTuple):
    """A function of PyTorch that API calls are made for, and the number of these calls in a step."""

    name: str
    calls: float


@dataclass(frozen=True)
class StepsToExplain:
    """The steps of a capture, in which each rule looks for its finding.

    Attributes:
        summary: the figures of the steps under the profiler.
        study: a few of them in full detail.
        baselines: replays of these without the profiler, by the least and by the most that it may have cost.
        scale: the length of a step ÷ that of the replayed steps.
        step_ms: the estimated length of a step without the profiler: the middle of its interval.
        is_torch: whether the program uses PyTorch, whose functions a remedy may name.
        is_timed: whether the step was timed without the profiler.
        longest_step_ms: the upper end of the interval of ``step_ms``, if that is an estimate.
        warned_lines: the lines of which PyTorch warned that they wait for the GPU, and how often in a step.
    """

    summary: StepSummary
    study: Study
    baselines: tuple[Replay, ...]
    scale: float
    step_ms: float
    is_torch: bool = True
    is_timed: bool = False
    longest_step_ms: float = 0.0
    warned_lines: Mapping[str, int] = field(default_factory=dict)

    @property
    def trains(self) -> bool:
        """Returns whether phases or names of kernels show a backward pass or an optimizer."""
        study = self.study
        in_training = study.in_phase("backward", "optimizer") | study.of_class("optimizer")
        return bool((in_training | study.kernel_matches(_BACKWARD_KERNEL)).any()) and not self.summary.kind

    @cached_property
    def waited_ns(self) -> Floats:
        """Returns the waiting time of each call in the recorded steps, ns, shape (calls,)."""
        replay = self.study.replay  # all candidates share this replay
        waited: Floats = np.diff(run_together([replay])[0][0]) - replay.cpu_ns
        return waited

    @property
    def idle_share(self) -> float:
        """Returns the share of a step without the profiler in which the GPU has nothing to do."""
        return max(1 - self.study.busy_ms / self.step_ms, 0.0) if self.step_ms else 0.0

    def recurring(self, operations: Bools) -> Bools:
        """Returns these operations, or none if only the last of several steps has any: they come after the loop."""
        last = int(self.study.replay.first_call[-2])
        recurs = self.study.steps == 1 or bool((self.study.replay.launch[operations] < last).any())
        return operations & recurs

    def paused_ms(self, pause_ns: Floats | Ints) -> float:
        """Returns the sum of pauses in a profiled step, ms, scaled to the step's length."""
        total_ms = float(pause_ns.sum()) / self.study.steps / NS_PER_MS
        measured_ms = self.study.measured_ns / NS_PER_MS
        return total_ms * self.summary.length_ms / measured_ms if measured_ms else total_ms

    def off_cpu_share(self, pauses: Bools) -> float | None:
        """Returns the share of the pauses after some calls in which the thread is on no CPU; None if not recorded."""
        recorded = pauses & (self.study.calls.off_cpu_ns >= 0)
        if not recorded.any():
            return None
        return float(self.study.calls.off_cpu_ns[recorded].sum() / self.study.replay.pause_ns[recorded].sum())

    def callers_of(self, calls: Bools) -> tuple[Caller, ...]:
        """Returns the functions of PyTorch that make most of some calls; none if no backtrace shows any."""
        counts = Counter(self.study.callers[code] for code in self.study.calls.caller[calls].tolist())
        counts.pop("", None)
        return tuple(Caller(name, count / self.study.steps) for name, count in counts.most_common(_MAX_CALLERS))


@dataclass(frozen=True)
class Candidate:
    """A possible finding, before its saving is known.

    Attributes:
        id: its key in JSON.
        figures: the figures that the report puts into words, or the texts of a plugin.
        changes: the step without it, under the assumptions that save least and most; one change for one assumption.
        place: where a timeline shows it; None if it has no place there.
        operations: the GPU's work that it is about, shape (operations,), whose launches have lines; None: the work of
            its place.
    """

    id: str
    figures: FindingFigures
    changes: tuple[Change, ...]
    place: Place | None = None
    operations: Bools | None = None

    def find_lines(self, study: Study) -> tuple[Line, ...]:
        """Returns the lines of the program that it is about."""
        kind, name = (self.place.kind, self.place.name) if self.place else ("", "")
        if self.operations is not None:
            return study.lines_of(self.operations)
        if kind == "class":
            return study.lines_of(study.of_class(name))
        return study.lines_of(study.in_phase(name)) if kind == "phase" else study.lines.get(name, ())

    @property
    def saves_cpu_time(self) -> bool:
        """Returns whether the CPU's own time is saved, which differs more from run to run than the GPU's work."""
        return self.place is not None and self.place.kind == "idle"

    @property
    def is_general_cause(self) -> bool:
        """Returns whether it is the general cause of idle time, waiting for launches, which explains what is left."""
        return self.place == Place("idle", "launch")

    @property
    def is_specific_cause(self) -> bool:
        """Returns whether it is a specific cause of idle time, such as the loading of batches."""
        return self.saves_cpu_time and not self.is_general_cause


Rule = Callable[[StepsToExplain], Iterator[Candidate]]


def distinct_names(names: Sequence[str]) -> tuple[str, ...]:
    """Returns the distinct names in order, without empty ones."""
    return tuple(dict.fromkeys(filter(None, names)))


def saved_work(share: Shares) -> Change:
    """Returns a change that removes a share of the work of each operation."""
    remaining = (1 - share).astype(np.float64)
    return lambda replay: replay.with_work(remaining)


def saved_launches(steps: StepsToExplain, share: Shares) -> Change:
    """Returns a change that removes a share of the work of each operation, and the same share of its launch.

    A call that launches several operations, such as a CUDA graph, keeps its time. No launch saves more than launching
    usually takes: what the program does before the next call stays.
    """
    replay = steps.study.replay
    launched = np.bincount(replay.launch, minlength=len(steps.study.calls.kind))
    is_alone = launched[replay.launch] == 1
    after = np.ones(len(steps.study.calls.kind))
    after[replay.launch[is_alone]] = 1 - share[is_alone]
    remaining, usual_ns = (1 - share).astype(np.float64), replay.launching_ns
    return lambda replay: replay.with_launching(after, usual_ns).with_work(remaining)


# --- the reasons why findings are missing, a type for each; ``report/finding_texts`` puts them into words ---


@dataclass(frozen=True)
class MissingReason:
    """The reason why some findings of a capture are missing, or all of them: the base of a type for each reason."""


# The steps were replayed, but no saving can be derived.


@dataclass(frozen=True)
class EarlierWork(MissingReason):
    """The steps contain GPU work that was launched before them."""


@dataclass(frozen=True)
class ReplayDiffers(MissingReason):
    """The replayed steps are longer or shorter than the recorded ones; ``error`` is the ratio of their lengths − 1."""

    error: float


@dataclass(frozen=True)
class ColdStart(MissingReason):
    """The only pass starts up the program.

    Attributes:
        start_up_ms: the time of the calls that start it up.
        total_ms: the time of all calls.
        calls: the calls that start it up and the time of each, ms, the longest first.
    """

    start_up_ms: float
    total_ms: float
    calls: tuple[tuple[str, float], ...]


@dataclass(frozen=True)
class RecordsGraphs(MissingReason):
    """The program captures CUDA graphs, and captured operations do not run during the capture."""


@dataclass(frozen=True)
class OutOfMemory(MissingReason):
    """The program ran out of memory; ``message`` says where, and is empty if that is unknown."""

    message: FactOrText


# The steps cannot be replayed, or not all of the capture is known.


@dataclass(frozen=True)
class RanOnCpu(MissingReason):
    """The program ran on the CPU, where no findings are looked for."""


@dataclass(frozen=True)
class NoCapture(MissingReason):
    """There is no capture of the run; ``message`` says why, if that is known."""

    message: FactOrText | None


@dataclass(frozen=True)
class LostKernels(MissingReason):
    """This many launches of kernels were recorded, but none of the kernels."""

    launches: int


@dataclass(frozen=True)
class NoKernels(MissingReason):
    """No kernel was recorded; ``by_torch`` tells whether PyTorch's profiler made the capture."""

    by_torch: bool


@dataclass(frozen=True)
class IdleSteps(MissingReason):
    """Nothing runs on the GPU during the steps."""


@dataclass(frozen=True)
class NoApiCalls(MissingReason):
    """The trace has no API calls; ``by_torch`` tells whether PyTorch's profiler made the capture."""

    by_torch: bool


@dataclass(frozen=True)
class TooFewCalls(MissingReason):
    """The capture holds too few API calls of whole steps."""


@dataclass(frozen=True)
class HiddenInGraphs(MissingReason):
    """Kernels inside CUDA graphs were not recorded; ``share`` is their share of the GPU's compute time."""

    share: float
