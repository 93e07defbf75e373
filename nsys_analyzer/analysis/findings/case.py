"""What findings are looked for in, and what is found before it is ranked."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from nsys_analyzer.analysis.findings.finding import Place
from nsys_analyzer.analysis.steps.replay import Floats, Replay
from nsys_analyzer.analysis.steps.step import StepSummary
from nsys_analyzer.analysis.steps.study import Study
from nsys_analyzer.analysis.transformer.models import Configuration
from nsys_analyzer.text import Words, plural
from nsys_analyzer.trace.arrays import Bools, Ints
from nsys_analyzer.trace.columns import SYNCHRONIZE

#: A range with less of the time than this is not worth a word.
_MINOR = 0.1
#: Callers that are named.
_CALLERS = 3
#: A change of the steps.
Change = Callable[[Replay], Replay]


@dataclass(frozen=True)
class Case:
    """The steps of a capture.

    Attributes:
        baselines: the steps without the profiler, by the least and by the most that it may have cost.
        scale: the length of a step ÷ that of the replayed steps.
        step_ms: what a step takes without the profiler, the middle of both.
    """

    step: StepSummary
    study: Study
    configuration: Configuration | None
    baselines: tuple[Replay, ...]
    scale: float
    step_ms: float

    def ms(self, pieces: Bools) -> float:
        """The work of some pieces in a step, ms."""
        return self.study.ms(pieces)

    def paused_ms(self, calls: Bools) -> float:
        """The pauses behind some calls in a profiled step, ms, scaled to its length."""
        total_ms = float(self.study.replay.pause[calls].sum()) / self.study.steps / 1e6
        return total_ms * self.step.length_ms / (self.study.measured_ns / 1e6) if self.study.measured_ns else total_ms

    def copying(self, copies: Bools) -> Bools:
        """The calls that launched some copies, and the synchronizations directly behind them."""
        calls = self.calls_of(copies)
        copying: Bools = calls | (np.append(False, calls[:-1]) & (self.study.call == SYNCHRONIZE))
        return copying

    @property
    def idle_share(self) -> float:
        """The share of a step without the profiler in which the GPU has nothing to do."""
        return max(1 - self.study.busy_ms / self.step_ms, 0.0) if self.step_ms else 0.0

    def called_by(self, calls: Bools) -> tuple[str, ...]:
        """A sentence on what of PyTorch some calls were made for, none where no backtrace says it."""
        callers = Counter(self.study.caller[index] for index in np.flatnonzero(calls).tolist())
        callers.pop("", None)
        said = (f"{name} ({count / self.study.steps:.3g} a step)" for name, count in callers.most_common(_CALLERS))
        return (f"Those with a backtrace come from {', '.join(said)}.",) if callers else ()

    def calls_of(self, pieces: Bools) -> Bools:
        """The calls that launched some pieces."""
        calls = np.zeros(len(self.study.call), np.bool_)
        calls[self.study.replay.launch[pieces]] = True
        return calls


@dataclass(frozen=True)
class Candidate:
    """Something that may slow a step down.

    Attributes:
        changes: the step without it, under the assumptions that save least and most; of one assumption, one change.
        of_cpu: what is saved is the CPU's own time, which differs from run to run by more than the GPU's.
        explains, explained: a cause of idle time that is specific, and one that is what the specific ones leave.
        the rest: as of ``Finding``.
    """

    id: str
    title: str
    changes: tuple[Change, ...]
    evidence: tuple[Words, ...]
    derivation: Words
    remedy: tuple[str, ...]
    disproof: Words
    of_cpu: bool = False
    explains: bool = False
    explained: bool = False
    place: Place | None = None


Rule = Callable[[Case], Iterator[Candidate]]


def saved_work(share: npt.NDArray[np.floating[Any]]) -> Change:
    """A change that saves a share of the work of each piece, shape (pieces,)."""
    kept = (1 - share).astype(np.float64)
    return lambda replay: replay.with_work(kept)


def shorter_pauses(calls: Bools, ns: float) -> Change:
    """A change that leaves at most so much time behind some calls."""
    return lambda replay: replay.with_pauses(calls, ns)


def saved_launches(case: Case, share: npt.NDArray[np.floating[Any]]) -> Change:
    """A change that saves a share of the work of each piece, shape (pieces,), and as much of the call before it.

    A call that launches several, a CUDA graph, keeps its time. None saves more than what launching takes as a rule:
    what else the program does before the next call stays.
    """
    replay = case.study.replay
    many = np.bincount(replay.launch, minlength=len(case.study.call))
    alone = many[replay.launch] == 1
    after = np.ones(len(case.study.call))
    after[replay.launch[alone]] = 1 - share[alone]
    work, most = (1 - share).astype(np.float64), replay.launching_ns
    return lambda replay: replay.with_launching(after, most).with_work(work)


def less_of(share: npt.NDArray[np.floating[Any]], calls: Bools, kept: float) -> Change:
    """A change that saves a share of the work of each piece, and keeps that share of the time behind some calls."""
    work, after = (1 - share).astype(np.float64), np.where(calls, kept, 1.0)
    return lambda replay: replay.with_launching(after).with_work(work)


def three(value: float) -> str:
    """A number in three digits or more, without an exponent."""
    return f"{value:,.0f}" if value >= 1000 else f"{value:.3g}"


def by_time(codes: Ints, ns: Floats, ranges: Sequence[str], most: int = 3) -> str:
    """The ranges in which the most of some time passes, by the codes of their names, "no range" for -1."""
    total = {code: float(ns[codes == code].sum()) for code in np.unique(codes).tolist()}
    longest = sorted(total, key=lambda code: -total[code])
    listed_ = [code for code in longest if total[code] >= _MINOR * sum(total.values())][:most]
    return ", ".join(f"the range {ranges[code]}" if code >= 0 else "no range" for code in listed_)


def listed(names: Sequence[str], most: int = 3) -> str:
    """The distinct names, the first ones of many."""
    distinct = list(dict.fromkeys(name for name in names if name))
    more = f" and {len(distinct) - most} more" if len(distinct) > most else ""
    return ", ".join(distinct[:most]) + more


def times(number: float, noun: str) -> str:
    """A number of things a step: 148 calls, 1 call, 0.5 calls."""
    written = f"{number:,.0f}" if number >= 10 or number == round(number) else f"{number:,.1f}"
    return f"{written} {plural(1 if written == '1' else number, noun)}"
