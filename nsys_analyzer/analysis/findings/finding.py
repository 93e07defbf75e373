"""What findings are looked for in, what a rule yields, and what is told: the types of findings."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from nsys_analyzer.analysis.steps.lines import Line
from nsys_analyzer.analysis.steps.replay import Replay, run_together
from nsys_analyzer.analysis.steps.step import StepSummary
from nsys_analyzer.analysis.steps.study import Study
from nsys_analyzer.text import StrOrText, plural, rounded_percent
from nsys_analyzer.trace.arrays import Bools, Floats, Ints
from nsys_analyzer.trace.schema import NS_PER_MS

_BACKWARD = re.compile("(?i)backward|_bwd")
#: Callers that are named.
_CALLERS = 3
#: A share for each piece of the GPU's work, shape (pieces,).
Shares = npt.NDArray[np.floating[Any]]
#: A change of the steps.
Change = Callable[[Replay], Replay]


@dataclass(frozen=True)
class Place:
    """Where a timeline shows a finding: idle time of a cause, or kernels of a class, of a phase, or of a name."""

    kind: Literal["idle", "class", "phase", "kernel"]
    name: str


@dataclass(frozen=True)
class Finding:
    """One thing that slows a step down.

    Attributes:
        id: its key in JSON.
        title: what it is, in a few words.
        saves_ms_low, saves_ms_high: what a step would be shorter by, ms, if this alone were changed and no profiler
            ran: an interval, whose ends rest on the assumptions that ``derivation`` names.
        step_ms: the step without the profiler.
        saves_ms: the middle of the interval before it was limited to the time of its cause, but not more than its
            upper end; ``share_of_step`` is this saving as a share of a step.
        left_ms: what a step takes after this finding alone.
        left_after_all_ms: what a step takes after this finding and those before it in the list. Savings overlap: they
            are replayed together, never added.
        evidence: what was seen, a sentence each.
        remedy: lines of PyTorch.
        disproof: what would show that the finding is wrong.
        place: where a timeline shows it; None where it is seen nowhere.
        lines: of the program, where its stacks were sampled.
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
        """Fills what follows from the interval."""
        middle_ms = (self.saves_ms_low + self.saves_ms_high) / 2 if math.isnan(self.saves_ms) else self.saves_ms
        saves_ms = min(max(middle_ms, self.saves_ms_low), self.saves_ms_high)
        share = saves_ms / self.step_ms if self.step_ms else 0.0
        vars(self).update(saves_ms=saves_ms, left_ms=self.step_ms - saves_ms, share_of_step=share)


@dataclass(frozen=True)
class Diagnosis:
    """What slows the steps of a capture down, the largest saving first.

    Attributes:
        step_ms_low, step_ms_high: what a step takes without the profiler; equal where that was timed.
        profiled_ms: the length of a step under the profiler.
        busy_ms: the GPU's work in a step, which no change of the program's own time makes shorter.
        replay_error: the length of the replayed steps ÷ that of the recorded ones − 1.
        is_timed: whether the step was timed without the profiler.
        profiler_overhead_ms: the least and the most that the profiler adds to a step, if it adds so much that it hides
            what the program does; else None.
        doubt: why nothing is looked for, empty where findings can be trusted.
    """

    step_ms_low: float
    step_ms_high: float
    profiled_ms: float
    busy_ms: float
    replay_error: float
    is_timed: bool
    profiler_overhead_ms: tuple[float, float] | None
    findings: tuple[Finding, ...]
    doubt: str = ""

    @property
    def step_ms(self) -> float:
        """A step without the profiler: the middle."""
        return (self.step_ms_low + self.step_ms_high) / 2


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
    """

    summary: StepSummary
    study: Study
    baselines: tuple[Replay, ...]
    scale: float
    step_ms: float
    is_torch: bool = True
    is_timed: bool = False
    longest_step_ms: float = 0.0

    @property
    def trains(self) -> bool:
        """Whether a backward pass or an optimizer is seen, by the phases or the names of kernels."""
        study = self.study
        seen = study.in_phase("backward", "optimizer") | study.of_class("optimizer") | study.named(_BACKWARD)
        return bool(seen.any()) and not self.summary.kind

    @cached_property
    def waited_ns(self) -> Floats:
        """How long each call waits in the recorded steps, ns; all candidates share this replay. Shape (calls,)."""
        replay = self.study.replay
        waited: Floats = np.diff(run_together([replay])[0][0]) - replay.after
        return waited

    @property
    def inside(self) -> str:
        """The words " inside the step", or none if the capture is one pass."""
        return "" if self.summary.is_pass else " inside the step"

    def recurring(self, pieces: Bools) -> Bools:
        """Returns these pieces, or none if only the last of several steps has any: then they come after the loop."""
        last = int(self.study.replay.first_call[-2])
        recurs = self.study.steps == 1 or bool((self.study.replay.launch[pieces] < last).any())
        return pieces & recurs

    def paused_ms(self, pause_ns: Floats | Ints) -> float:
        """Returns the sum of pauses in a profiled step, ms, scaled to the step's length."""
        total_ms = float(pause_ns.sum()) / self.study.steps / NS_PER_MS
        return (
            total_ms * self.summary.length_ms / (self.study.measured_ns / NS_PER_MS)
            if self.study.measured_ns
            else total_ms
        )

    def off_cpu(self, pauses: Bools) -> tuple[str, ...]:
        """Says for how much of the pauses behind some calls the program has no CPU, where that was noted."""
        known = pauses & (self.study.off_cpu >= 0)
        if not known.any():
            return ()
        share = self.study.off_cpu[known].sum() / self.study.replay.pause[known].sum()
        why = "it sleeps, or waits for a file, a lock, another process or a free core"
        return (f"For {rounded_percent(share)} of this time its thread is on no CPU: {why}.",)

    @property
    def idle_share(self) -> float:
        """The share of a step without the profiler in which the GPU has nothing to do."""
        return max(1 - self.study.busy_ms / self.step_ms, 0.0) if self.step_ms else 0.0

    def called_by(self, calls: Bools) -> tuple[str, ...]:
        """Says what of PyTorch some calls were made for, in a sentence; none where no backtrace says it."""
        callers = Counter(self.study.caller[index] for index in np.flatnonzero(calls).tolist())
        callers.pop("", None)
        said = (f"{name} ({count / self.study.steps:.3g} a step)" for name, count in callers.most_common(_CALLERS))
        return (f"Those with a backtrace come from {', '.join(said)}.",) if callers else ()


@dataclass(frozen=True)
class Candidate:
    """Something that may slow a step down.

    Attributes:
        changes: the step without it, under the assumptions that save least and most; of one assumption, one change.
        pieces: the GPU's work that it is about, whose launches have lines; None: that of its place.
        the rest: as of ``Finding``.
    """

    id: str
    title: str
    changes: tuple[Change, ...]
    evidence: tuple[StrOrText, ...]
    derivation: StrOrText
    remedy: tuple[str, ...]
    disproof: StrOrText
    place: Place | None = None
    pieces: Bools | None = None

    def lines(self, study: Study) -> tuple[Line, ...]:
        """Returns the lines of the program that it is about."""
        kind, name = (self.place.kind, self.place.name) if self.place else ("", "")
        if self.pieces is not None:
            return study.lines_of(self.pieces)
        if kind == "class":
            return study.lines_of(study.of_class(name))
        return study.lines_of(study.in_phase(name)) if kind == "phase" else study.lines.get(name, ())

    @property
    def of_cpu(self) -> bool:
        """Whether the CPU's own time is saved: idle time, which differs from run to run by more than the GPU's work."""
        return self.place is not None and self.place.kind == "idle"

    @property
    def explained(self) -> bool:
        """Whether it is the general cause of idle time, waiting for launches: what the specific ones leave."""
        return self.place == Place("idle", "launch")

    @property
    def explains(self) -> bool:
        """Whether it is a specific cause of idle time, such as the loading of batches."""
        return self.of_cpu and not self.explained


Rule = Callable[[StepsToExplain], Iterator[Candidate]]


def saved_work(share: Shares) -> Change:
    """Returns a change that saves a share of the work of each piece."""
    kept = (1 - share).astype(np.float64)
    return lambda replay: replay.with_work(kept)


def saved_launches(steps: StepsToExplain, share: Shares) -> Change:
    """Returns a change that saves a share of the work of each piece, and as much of the call before it.

    A call that launches several, a CUDA graph, keeps its time. None saves more than what launching takes as a rule:
    what else the program does before the next call stays.
    """
    replay = steps.study.replay
    many = np.bincount(replay.launch, minlength=len(steps.study.call))
    alone = many[replay.launch] == 1
    after = np.ones(len(steps.study.call))
    after[replay.launch[alone]] = 1 - share[alone]
    work, most = (1 - share).astype(np.float64), replay.launching_ns
    return lambda replay: replay.with_launching(after, most).with_work(work)


def percent_between(shares: tuple[float, float]) -> str:
    """Writes the bounds of a share: 30 % to 80 %."""
    return " to ".join(map(rounded_percent, shares))


def listed(names: Sequence[str], most: int = 3) -> str:
    """Lists the distinct names, the first ones of many."""
    distinct = list(dict.fromkeys(name for name in names if name))
    more = f" and {len(distinct) - most} more" if len(distinct) > most else ""
    return ", ".join(distinct[:most]) + more


def times(number: float, noun: str) -> str:
    """Writes a number of things a step: 148 calls, 1 call, 0.5 calls."""
    written = f"{number:,.0f}" if number >= 10 or number == round(number) else f"{number:,.1f}"
    return f"{written} {plural(1 if written == '1' else number, noun)}"
