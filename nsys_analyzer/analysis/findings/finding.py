"""A finding: what slows a step down, what removing it saves, what to type, and what would disprove it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from nsys_analyzer.text import Words


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
        saves_ms: the middle of the interval; ``share_of_step`` is it as a share of a step.
        left_ms: what a step takes after this finding alone.
        left_after_all_ms: what a step takes after this finding and those before it in the list. Savings overlap: they
            are replayed together, never added.
        evidence: what was seen, a sentence each.
        remedy: lines of PyTorch.
        disproof: what would show that the finding is wrong.
        place: where a timeline shows it; None where it is seen nowhere.
    """

    id: str
    title: str
    saves_ms_low: float
    saves_ms_high: float
    step_ms: float
    left_after_all_ms: float
    evidence: tuple[Words, ...]
    derivation: Words
    remedy: tuple[str, ...]
    disproof: Words
    place: Place | None = None
    saves_ms: float = field(init=False)
    left_ms: float = field(init=False)
    share_of_step: float = field(init=False)

    def __post_init__(self) -> None:
        """Fills what follows from the interval."""
        saves_ms = (self.saves_ms_low + self.saves_ms_high) / 2
        share = saves_ms / self.step_ms if self.step_ms else 0.0
        vars(self).update(saves_ms=saves_ms, left_ms=self.step_ms - saves_ms, share_of_step=share)


@dataclass(frozen=True)
class Diagnosis:
    """What slows the steps of a capture down, the largest saving first.

    Attributes:
        step_ms_low, step_ms_high: what a step takes without the profiler; equal where that was timed.
        profiled_ms: the length of a step under the profiler.
        busy_ms: the GPU's work in a step, which no change of the program's own time makes shorter.
        error: the replayed steps ÷ the recorded ones − 1.
        timed: whether the step was timed without the profiler.
        overhead_ms: the least and the most that the profiler takes of a step, where that hides the program; else None.
        doubt: why nothing is looked for, empty where findings can be trusted.
    """

    step_ms_low: float
    step_ms_high: float
    profiled_ms: float
    busy_ms: float
    error: float
    timed: bool
    overhead_ms: tuple[float, float] | None
    findings: tuple[Finding, ...]
    doubt: str = ""

    @property
    def step_ms(self) -> float:
        """A step without the profiler: the middle."""
        return (self.step_ms_low + self.step_ms_high) / 2
