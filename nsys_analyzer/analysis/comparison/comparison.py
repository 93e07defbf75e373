"""The figures of a comparison."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from nsys_analyzer.analysis.comparison.change import Change
from nsys_analyzer.analysis.findings.finding import Finding
from nsys_analyzer.analysis.summary.summary import Summary
from nsys_analyzer.text import Words

Verdict = Literal["faster", "slower", "no change", "unclear"]
PartKind = Literal["compute", "exposed copies", "exposed communication", "idle"]
#: A change of the step that is looked for where no other is named, as a share of it.
THRESHOLD = 0.05


@dataclass(frozen=True)
class Side:
    """What stands on one side of a comparison: a run, or several of one program, whose figures are means over them."""

    runs: tuple[Summary, ...]

    @property
    def title(self) -> str:
        """The name of the run, and of several how many there are."""
        more = f" and {len(self.runs) - 1} more" if len(self.runs) > 1 else ""
        return f"{self.runs[0].title}{more}"


@dataclass(frozen=True)
class Difference:
    """What both sides say of themselves, and say otherwise: a key of the manifest, or ``matmul precision``."""

    key: str
    before: str
    after: str


@dataclass(frozen=True)
class KernelChange:
    """A kernel of a step, or two that stand for each other; a name is None where a side has none.

    ``before_launches`` and ``after_launches`` are means of a step.
    """

    before_name: str | None
    after_name: str | None
    before_launches: float
    after_launches: float
    change: Change


@dataclass(frozen=True)
class PartChange:
    """A part of the step on the GPU, mean ms: a kernel class that computes, exposed copies, idle time of a cause.

    ``kernels`` are those of the class, the largest change first; their changes add up to its.
    """

    kind: PartKind
    name: str
    change: Change
    kernels: tuple[KernelChange, ...] = ()


@dataclass(frozen=True)
class StepChange:
    """The step under the profiler.

    Attributes:
        wall: its length.
        busy: the GPU's work in it, median.
        parts: the largest change first; they add up to the change of its length.
        before_launches, after_launches: kernels and fills a step.
    """

    wall: Change
    busy: Change
    parts: tuple[PartChange, ...]
    before_launches: float
    after_launches: float

    def of_kind(self, kind: PartKind) -> Iterable[PartChange]:
        """The parts of a kind."""
        return (part for part in self.parts if part.kind == kind)


@dataclass(frozen=True)
class PhaseChange:
    """A phase of both sides, medians; ``unprofiled`` is None where a side was not timed without the profiler.

    ``synchronized`` tells whether its GPU work ends inside it on both sides: only then does ``wall`` hold its work.
    """

    phase: str
    unprofiled: Change | None
    wall: Change
    busy: Change
    before_kernels: float
    after_kernels: float
    synchronized: bool


@dataclass(frozen=True)
class FindingChange:
    """A finding of one side or both; None where a side has it not."""

    before: Finding | None
    after: Finding | None

    @property
    def one(self) -> Finding:
        """As it is now, or was."""
        found = self.after or self.before
        assert found
        return found

    @property
    def status(self) -> Literal["gone", "new", "changed", "stays"]:
        """``changed`` where both sides have it, and the intervals of what it saves have nothing in common."""
        if self.before is None or self.after is None:
            return "new" if self.after else "gone"
        apart = (
            self.before.saves_ms_high < self.after.saves_ms_low or self.after.saves_ms_high < self.before.saves_ms_low
        )
        return "changed" if apart else "stays"


@dataclass(frozen=True)
class Comparison:
    """Two sides, and what changed from one to the other.

    Attributes:
        differences: what the sides say otherwise of themselves.
        step: None where a side has no step.
        unprofiled: the step without the profiler; None where a side was not timed so.
        findings: those of most runs of a side, with medians of what they save; None where a side's cannot be told.
        cautions: reasons against comparing them, which ``--force`` overrode.
        same: whether both sides are the same capture.
    """

    before: Side
    after: Side
    differences: tuple[Difference, ...]
    step: StepChange | None
    unprofiled: Change | None
    phases: tuple[PhaseChange, ...]
    findings: tuple[FindingChange, ...] | None
    cautions: tuple[Words, ...] = ()
    same: bool = False

    @property
    def headline(self) -> Change | None:
        """The change that the verdict is about: of the step without the profiler where it was timed, else under it."""
        return self.unprofiled or (self.step.wall if self.step else None)

    @property
    def is_slowed_on_one_side(self) -> bool:
        """Whether the profiler hides what one side alone does, and nothing else tells its times."""
        hidden = {
            any(run.step and run.step.profiler_overhead_ms for run in one.runs) for one in (self.before, self.after)
        }
        return self.unprofiled is None and len(hidden) > 1

    def verdict(self, threshold: float = THRESHOLD) -> Verdict:
        """Whether the step changed; ``unclear`` where a change of this share would not have been seen."""
        change = self.headline
        if self.same:
            return "no change"
        if change is None or change.low_share is None or change.high_share is None:
            return "unclear"
        if change.is_change:
            return "slower" if change.ms > 0 else "faster"
        return "no change" if max(-change.low_share, change.high_share) <= threshold else "unclear"

    def is_slower_by(self, share: float) -> bool:
        """Whether the step is slower by more than this share of it.

        Its change is more than chance, and the best estimate of it is above the limit. The lower end of the interval
        would let pass what is above the limit by less than the interval's width.
        """
        change = self.headline
        return change is not None and change.is_change and change.ms > share * change.before_ms
