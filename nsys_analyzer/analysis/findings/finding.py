"""The types of findings: the steps that rules examine, the candidates that rules yield, and the reported findings."""

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

from nsys_analyzer.analysis.facts import Fact
from nsys_analyzer.analysis.operators.account import StepAccount
from nsys_analyzer.analysis.operators.pricing import PricedOperators
from nsys_analyzer.analysis.operators.shape_reasons import Reason
from nsys_analyzer.analysis.steps.lines import Line
from nsys_analyzer.analysis.steps.replay import Replay, replay_ranks
from nsys_analyzer.analysis.steps.step import StepSummary
from nsys_analyzer.analysis.steps.study import Study
from nsys_analyzer.configuration import Run
from nsys_analyzer.text import StrOrText
from nsys_analyzer.trace.arrays import Bools, Floats, Ints
from nsys_analyzer.trace.schema import NS_PER_MS

#: Matches the names of kernels of a backward pass.
_BACKWARD_KERNEL = re.compile("(?i)backward|_bwd")
#: The maximum number of callers of API calls that a finding names.
_MAX_CALLERS = 3
#: For each operation, a share of its work from 0 to 1, shape (operations,).
WorkShares = npt.NDArray[np.floating[Any]]
#: A function that changes a replay of steps.
ReplayChange = Callable[[Replay], Replay]


@dataclass(frozen=True)
class Place:
    """What a timeline highlights for a finding: the idle time of a cause, or the kernels of a class, phase or name."""

    kind: Literal["idle", "class", "phase", "kernel"]
    name: str


@dataclass(frozen=True, kw_only=True)
class Finding:
    """A cause that makes steps longer, and the time that a step would save without it.

    Attributes:
        id: the key of the finding in JSON.
        title: the finding in a few words.
        saves_ms_low, saves_ms_high: the bounds of the saving per step without the profiler, ms, if only this cause is
            removed. ``derivation`` names the assumptions for both bounds.
        step_ms: the length of a step without the profiler, ms.
        left_after_all_ms: the length of a step after this finding and all findings before it in the list were fixed,
            ms. Savings overlap, so they are replayed together and never added.
        evidence: the observations in the capture, one sentence each.
        derivation: how the saving was derived.
        remedy: lines of PyTorch code to try.
        disproof: an experiment that would show that the finding is wrong.
        place: what a timeline highlights for the finding; None if it highlights nothing.
        lines: the lines of the program that cause the finding, if stacks were sampled.
        saves_ms: the estimated saving per step, ms: the middle of the interval before the interval was limited
            to the time of the cause, but at most ``saves_ms_high``.
        saves_joules: the bounds of the energy that a fix saves per step; None if the energy of a step was not measured.
        left_ms: the length of a step after only this finding was fixed, ms.
        share_of_step: ``saves_ms`` as a share of ``step_ms``.
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
    saves_joules: tuple[float, float] | None = None
    left_ms: float = field(init=False)
    share_of_step: float = field(init=False)

    def __post_init__(self) -> None:
        """Computes ``saves_ms``, ``left_ms`` and ``share_of_step`` from the interval."""
        middle_ms = (self.saves_ms_low + self.saves_ms_high) / 2 if math.isnan(self.saves_ms) else self.saves_ms
        saves_ms = min(max(middle_ms, self.saves_ms_low), self.saves_ms_high)
        share = saves_ms / self.step_ms if self.step_ms else 0.0
        vars(self).update(saves_ms=saves_ms, left_ms=self.step_ms - saves_ms, share_of_step=share)


@dataclass(frozen=True)
class FindingFigures:
    """The base class of a finding's figures, from which a report makes sentences. Each rule has its own subclass."""


@dataclass(frozen=True)
class FindingTexts(FindingFigures):
    """The sentences of a finding of a plugin. The attributes are those of ``Finding``."""

    title: str
    evidence: tuple[StrOrText, ...]
    derivation: StrOrText
    remedy: tuple[str, ...]
    disproof: StrOrText


@dataclass(frozen=True, kw_only=True)
class FindingWithFigures(Finding):
    """A finding as the analysis returns it: with figures, and with empty sentences, which a report writes.

    Attributes:
        figures: the figures that the sentences contain.
        is_torch: whether the program uses PyTorch, so that a remedy may name functions of PyTorch.
        is_pass: whether the whole capture counts as one step, so that sentences say "pass" instead of "step".
        is_serving: whether an engine serves requests, so that a remedy may name options of the engine.
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
    """The findings of a capture, and the lengths of a step that they are based on.

    Attributes:
        step_ms_low, step_ms_high: the interval of the length of a step without the profiler, ms; both are the measured
            length if another process measured it.
        profiled_ms: the length of a step under the profiler, ms.
        busy_ms: the time in a step in which the GPU works, ms. Changes of the program's own time do not shorten it.
        replay_error: the length of the replayed steps divided by the length of the recorded steps, minus 1.
        is_timed: whether the length of a step was measured without the profiler.
        profiler_overhead_ms: the lower and the upper bound of the profiler's cost in a step, ms, if this cost is so
            large that the program's own speed is unknown; else None.
        findings: the findings, the largest saving first.
        doubt: the reason why no saving can be derived; None if findings can be trusted.
        account: the parts of a step above its attainable length; None if no operator has an attainable time.
        in_recorded_process: whether the length of a step was measured in the recorded process, without the profiler.
    """

    step_ms_low: float
    step_ms_high: float
    profiled_ms: float
    busy_ms: float
    replay_error: float
    is_timed: bool
    profiler_overhead_ms: tuple[float, float] | None
    findings: tuple[Finding, ...]
    doubt: Fact | None = None
    account: StepAccount | None = None
    in_recorded_process: bool = False

    @property
    def step_ms(self) -> float:
        """Returns the estimated length of a step without the profiler, ms: the middle of the interval."""
        return (self.step_ms_low + self.step_ms_high) / 2


class Caller(NamedTuple):
    """A function of PyTorch that makes API calls, and the mean number of these calls per step."""

    name: str
    calls: float


@dataclass(frozen=True)
class StepsToExplain:
    """The steps of a capture, in which each rule looks for a finding.

    Attributes:
        summary: the figures of the steps under the profiler.
        study: a few steps in full detail.
        baselines: replays of the studied steps without the profiler, which differ in the assumed cost of the profiler.
        scale: the ratio of the length of a step to the length of a replayed step.
        step_ms: the estimated length of a step without the profiler, ms: the middle of its interval.
        is_torch: whether the program uses PyTorch, so that a remedy may name functions of PyTorch.
        is_timed: whether the length of a step was measured without the profiler.
        longest_step_ms: the upper end of the interval of ``step_ms``, ms.
        operators: the calls of PyTorch's operators with their attainable times; None if they are unknown.
        reasons: the calls of operators whose time has each reason, by the reason; see ``find_reasons``.
        run: the manifest of the capture; an empty manifest if there is none.
        step_spread: the relative standard deviation of the steps that the recorded process made without the profiler.
    """

    summary: StepSummary
    study: Study
    baselines: tuple[Replay, ...]
    scale: float
    step_ms: float
    is_torch: bool = True
    is_timed: bool = False
    longest_step_ms: float = 0.0
    operators: PricedOperators | None = None
    reasons: Mapping[Reason, Bools] = field(default_factory=dict)
    run: Run = field(default_factory=Run)
    step_spread: float = 0.0

    @property
    def has_data_flow(self) -> bool:
        """Returns whether it is known which operators read the results of which other operators."""
        return self.operators is not None and bool(self.operators.calls.reads)

    @property
    def trains(self) -> bool:
        """Returns whether phases or kernels show a backward pass or an optimizer, and no engine serves requests."""
        study = self.study
        in_training = study.in_phase("backward", "optimizer") | study.of_class("optimizer")
        return bool((in_training | study.kernel_matches(_BACKWARD_KERNEL)).any()) and not self.summary.kind

    @cached_property
    def waited_ns(self) -> Floats:
        """Returns the time that each call waits in the replay of the recorded steps, ns, shape (calls,)."""
        replay = self.study.replay
        waited: Floats = np.diff(replay_ranks([replay])[0][0]) - replay.cpu_ns
        return waited

    @property
    def idle_share(self) -> float:
        """Returns the share of a step in which the GPU is idle, without the profiler."""
        return max(1 - self.study.busy_ms / self.step_ms, 0.0) if self.step_ms else 0.0

    def without_work_after_loop(self, operations: Bools) -> Bools:
        """Returns the mask of operations, all False if each of them is in the last of several steps.

        Such operations are assumed to run after the loop.
        """
        last_step_start = int(self.study.replay.first_call[-2])
        recurs = self.study.steps == 1 or bool((self.study.replay.launch[operations] < last_step_start).any())
        return operations & recurs

    def pause_ms_per_step(self, pause_ns: Floats | Ints) -> float:
        """Returns the total length of the given pauses per profiled step, ms.

        The studied steps differ a little from the mean step, so the total is scaled to the length of the mean step.
        """
        total_ms = float(pause_ns.sum()) / self.study.steps / NS_PER_MS
        measured_ms = self.study.profiled_step_ns / NS_PER_MS
        return total_ms * self.summary.length_ms / measured_ms if measured_ms else total_ms

    def off_cpu_share(self, pauses: Bools) -> float | None:
        """Returns the share of the pauses after the given calls in which the thread runs on no CPU; None if unknown."""
        recorded = pauses & (self.study.calls.off_cpu_ns >= 0)
        if not recorded.any():
            return None
        return float(self.study.calls.off_cpu_ns[recorded].sum() / self.study.replay.pause_ns[recorded].sum())

    def callers_of(self, calls: Bools) -> tuple[Caller, ...]:
        """Returns the PyTorch functions that backtraces show as the callers of most of the given API calls."""
        counts = Counter(self.study.callers[code] for code in self.study.calls.caller[calls].tolist())
        counts.pop("", None)
        return tuple(Caller(name, count / self.study.steps) for name, count in counts.most_common(_MAX_CALLERS))


@dataclass(frozen=True)
class Candidate:
    """A possible finding, before its saving is computed.

    Attributes:
        id: the key of the finding in JSON.
        figures: the figures from which a report makes sentences, or the sentences of a plugin.
        changes: the changes that remove the cause: first under the assumption with which it saves least, last under
            the assumption with which it saves most. With a single assumption, there is one change.
        place: what a timeline highlights for the finding; None if it highlights nothing.
        operations: shape (operations,), True for the GPU work that the finding is about; None for the work of
            ``place``.
        lines: the lines of the program that cause the finding; empty if they follow from ``operations`` or ``place``.
        idle_causes: the causes of the idle time that the changes can remove; empty for the cause of ``place``.
        is_symptom: whether the finding says that work is slow without a reason, so that any other finding about this
            work explains more.
        is_redundant: whether the finding is about work that a step does not need. Launching this work is then no cause
            of its own.
        is_common: whether programs without a fault have this cause as well, so that the finding is reported only if it
            saves much.
        saves_launches: whether the finding says which launches are not needed, so that they are no general cause.
    """

    id: str
    figures: FindingFigures
    changes: tuple[ReplayChange, ...]
    place: Place | None = None
    operations: Bools | None = None
    lines: tuple[Line, ...] = ()
    idle_causes: frozenset[str] = frozenset()
    is_symptom: bool = False
    is_redundant: bool = False
    is_common: bool = False
    saves_launches: bool = False

    def find_lines(self, steps: StepsToExplain) -> tuple[Line, ...]:
        """Returns the lines of the program that launch the finding's work or cause its idle time."""
        study, operators = steps.study, steps.operators
        lines = self.lines
        if not lines and operators and self.operations is not None:
            lines = operators.lines_of(operators.measure_ns(self.operations))
        elif not lines and operators and self.is_general_cause:
            lines = operators.lines_of(operators.measure_launching_ns())
        if lines:
            return lines
        kind, name = (self.place.kind, self.place.name) if self.place else ("", "")
        if self.operations is not None:
            return study.lines_of(self.operations)
        if kind == "class":
            return study.lines_of(study.of_class(name))
        return study.lines_of(study.in_phase(name)) if kind == "phase" else study.lines.get(name, ())

    @property
    def saves_cpu_time(self) -> bool:
        """Returns whether the changes save the CPU's own time, which varies more between runs than the GPU's work."""
        return self.place is not None and self.place.kind == "idle"

    @property
    def is_general_cause(self) -> bool:
        """Returns whether the GPU waits for launches: the general cause, for idle time that has no other cause."""
        return self.place == Place("idle", "launch")

    @property
    def is_specific_cause(self) -> bool:
        """Returns whether the cause is a specific cause of idle time, such as the loading of batches."""
        return self.saves_cpu_time and not self.is_general_cause


Rule = Callable[[StepsToExplain], Iterator[Candidate]]


def distinct_names(names: Sequence[str]) -> tuple[str, ...]:
    """Returns the distinct names in order, without empty names."""
    return tuple(dict.fromkeys(filter(None, names)))


def saved_work(share: WorkShares) -> ReplayChange:
    """Returns a change that removes the given share of each operation's work."""
    remaining = (1 - share).astype(np.float64)
    return lambda replay: replay.scale_work(remaining)


def saved_launches(
    steps: StepsToExplain, share: WorkShares, work_share: WorkShares | None = None, *, is_limited: bool = True
) -> ReplayChange:
    """Returns a change that removes the given share of each operation's launch and of its work.

    A call that launches several operations, such as that of a CUDA graph, is not shortened.

    Args:
        steps: the steps.
        share: the share of each operation's launch.
        work_share: the share of each operation's work; by default ``share``.
        is_limited: whether a call saves at most the usual time of a launch, because the program's own work before the
            next call remains.
    """
    replay = steps.study.replay
    launched = np.bincount(replay.launch, minlength=len(steps.study.calls.kind))
    is_alone = launched[replay.launch] == 1
    launch_factor = np.ones(len(steps.study.calls.kind))
    launch_factor[replay.launch[is_alone]] = 1 - share[is_alone]
    work_factor = (1 - (share if work_share is None else work_share)).astype(np.float64)
    limit_ns = replay.median_launch_ns if is_limited else np.inf
    return lambda replay: replay.scale_launches(launch_factor, limit_ns).scale_work(work_factor)
