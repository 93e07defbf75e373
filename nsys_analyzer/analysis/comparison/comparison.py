"""The sides of a comparison and its figures; what the sides say otherwise of themselves, and what forbids it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Literal

from nsys_analyzer.analysis.comparison.change import Change
from nsys_analyzer.analysis.findings.finding import Finding
from nsys_analyzer.analysis.summary.summary import Summary
from nsys_analyzer.text import StrOrText, phrase
from nsys_analyzer.trace.metadata import CPU
from nsys_analyzer.trace.phase_names import STEP

Verdict = Literal["faster", "slower", "no change", "unclear"]
BudgetUnit = Literal["ms", "count", "bytes"]
BudgetVerdict = Literal["kept", "exceeded", "above, perhaps by chance", "not known"]
PartKind = Literal["compute", "exposed copies", "exposed communication", "idle"]
#: A change of the step that is looked for where no other is named, as a share of it.
DEFAULT_THRESHOLD = 0.05
#: What makes another program of a run, by the key of the report's JSON; then the dimensions that the model stands for.
_WORK = ("model", "context_length", "batch_size", "mode")
_DIMENSIONS = ("d_model", "d_ff", "num_layers", "num_heads", "vocab_size")
#: What people change, to see what it gains.
_OPTIONS = ("precision", "attention", "compile", "cuda_graph", "optimizer", "device")
#: All of a configuration: runs of one that is the same in every key are runs of one program.
CONFIGURATION = (*_WORK, *_OPTIONS)
#: What differs by itself between machines and days.
_VERSIONS = ("torch", "cuda", "driver", "nsys", "host_cpu", "git_commit")
#: A matmul precision that stands for a run, as a share of the matmul time.
_MOSTLY = 0.5
#: A class with this share of the compute is large; so much may its factor differ from that of all large ones, which
#: says something of the work from so much on.
_LARGE, _ALIKE, _OTHER_WORK = 0.1, 1.2, 1.3
#: The class whose work is the same for any batch.
OPTIMIZER = "optimizer"
#: Steps that no name tells are the same work where neither has so many times the matmuls of the other.
_AS_MANY = 1.1
_STATUS = {
    "oom": "ran out of memory",
    "partial": "is partial: a range has no end, or kernels of it are missing",
    "no_kernels": "holds no kernel",
    "failed": "failed",
    "timeout": "was stopped after its time limit",
    "not_profiled": "was not profiled",
}


@dataclass(frozen=True)
class Side:
    """What stands on one side of a comparison: a run, or several of one program, whose figures are means over them."""

    runs: tuple[Summary, ...]

    @property
    def title(self) -> str:
        """Returns the name of the run, and of several how many there are."""
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
        """Returns the parts of a kind."""
        return (part for part in self.parts if part.kind == kind)

    @property
    def common_factor(self) -> float | None:
        """Returns after ÷ before of all large compute classes where it is about one and the same, and not about 1.

        The optimizer's does not count: its work is the same for any batch.
        """
        changes = [part.change for part in self.of_kind("compute") if part.name != OPTIMIZER]
        least = _LARGE * max(sum(one.before_ms for one in changes), sum(one.after_ms for one in changes))
        large = [one for one in changes if max(one.before_ms, one.after_ms) > least]
        if len(large) < 2 or not all(one.before_ms and one.after_ms for one in large):
            return None
        factor = sum(one.after_ms for one in large) / sum(one.before_ms for one in large)
        factors = [one.after_ms / one.before_ms / factor for one in large]
        alike = max(factors) < _ALIKE and min(factors) > 1 / _ALIKE
        return factor if alike and not 1 / _OTHER_WORK < factor < _OTHER_WORK else None


@dataclass(frozen=True)
class PhaseChange:
    """A phase of both sides, medians; ``unprofiled`` is None where a side was not timed without the profiler.

    ``synchronized`` tells whether its GPU work ends inside it on both sides: only then does ``wall`` hold its work.
    """

    phase: str
    unprofiled: Change | None
    wall: Change
    busy: Change
    synchronized: bool


@dataclass(frozen=True)
class FindingChange:
    """A finding of one side or both; None where a side has it not."""

    before: Finding | None
    after: Finding | None

    @property
    def finding(self) -> Finding:
        """Returns it as it is now, or was."""
        finding = self.after or self.before
        assert finding
        return finding

    @property
    def status(self) -> Literal["gone", "new", "changed", "stays"]:
        """Returns ``changed`` where both sides have it, and the intervals of what it saves have nothing in common."""
        if self.before is None or self.after is None:
            return "new" if self.after else "gone"
        apart = (
            self.before.saves_ms_high < self.after.saves_ms_low or self.after.saves_ms_high < self.before.saves_ms_low
        )
        return "changed" if apart else "stays"


@dataclass(frozen=True)
class Budget:
    """The most that a run may take of something in a step, and what it takes; None where that is not known."""

    what: str
    unit: BudgetUnit
    most: float
    value: float | None
    verdict: BudgetVerdict


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
        budgets: what ``after`` takes of those that were given.
    """

    before: Side
    after: Side
    differences: tuple[Difference, ...]
    step: StepChange | None
    unprofiled: Change | None
    phases: tuple[PhaseChange, ...]
    findings: tuple[FindingChange, ...] | None
    cautions: tuple[StrOrText, ...] = ()
    same: bool = False
    budgets: tuple[Budget, ...] = ()

    def __repr__(self) -> str:
        """Returns one line: a session or a notebook shows it."""
        change = self.headline
        step = f", step {change.before_ms:.2f} → {change.after_ms:.2f} ms" if change else ""
        return f"<Comparison {self.before.title} → {self.after.title}: {self.verdict()}{step}>"

    @property
    def headline(self) -> Change | None:
        """Returns the verdict's change: that of the step without the profiler where it was timed, else under it."""
        return self.unprofiled or (self.step.wall if self.step else None)

    @property
    def is_of_other_conditions(self) -> bool:
        """Returns whether the sides ran on other hardware, or were timed in other ways."""
        first, *others = (*self.before.runs, *self.after.runs)
        return any(reason for run in others for reason in _other_conditions(first, run))

    @property
    def is_slowed_on_one_side(self) -> bool:
        """Returns whether the profiler hides what one side alone does, and nothing else tells its times."""
        hidden = {
            any(run.step and run.step.profiler_overhead_ms for run in one.runs) for one in (self.before, self.after)
        }
        return self.unprofiled is None and len(hidden) > 1

    def verdict(self, threshold: float = DEFAULT_THRESHOLD) -> Verdict:
        """Returns whether the step changed; ``unclear`` where a change of this share would not have been seen."""
        change = self.headline
        if self.same:
            return "no change"
        if change is None or change.low_share is None or change.high_share is None:
            return "unclear"
        if change.is_change:
            return "slower" if change.ms > 0 else "faster"
        return "no change" if max(-change.low_share, change.high_share) <= threshold else "unclear"

    def is_slower_by(self, share: float) -> bool:
        """Returns whether the step is slower by more than this share of it.

        Its change is more than chance, and the best estimate of it is above the limit. The lower end of the interval
        would let pass what is above the limit by less than the interval's width.
        """
        change = self.headline
        return change is not None and change.is_change and change.ms > share * change.before_ms


# --- what the sides say of themselves


def setting_of(run: Summary, key: str) -> Any:
    """Returns what a run says of itself under a key of its configuration or manifest; None where it says nothing."""
    known = getattr(run.configuration, "model_name" if key == "model" else key, None)
    return getattr(run.run, key, None) if known is None else known


def compare_settings(before: Side, after: Side) -> tuple[Difference, ...]:
    """Returns what both sides know, and say otherwise: first what was asked for, then versions."""
    runs = before.runs[0], after.runs[0]
    asked = list(differing_settings(*runs, (*_WORK, *_DIMENSIONS, *_OPTIONS)))
    # Of most of the matmul time; empty where no precision has so much.
    precisions = [
        next((name for name, share in run.precisions.items() if share > _MOSTLY and name != "unknown"), "")
        for run in runs
    ]
    if all(precisions) and precisions[0] != precisions[1] and all(known.key != "precision" for known in asked):
        asked.append(Difference("matmul precision", *precisions))
    return (*asked, *differing_settings(*runs, _VERSIONS))


def differing_settings(before: Summary, after: Summary, keys: Iterable[str], unknown: str = "") -> Iterator[Difference]:
    """Yields the keys under which two runs say otherwise; with a word for ``unknown``, also what one leaves out."""
    words = {None: unknown, True: "on", False: "off"}
    for key in keys:
        values = setting_of(before, key), setting_of(after, key)
        if values[0] != values[1] and (unknown or None not in values):
            texts = (words[value] if value is None or isinstance(value, bool) else str(value) for value in values)
            yield Difference(key, *texts)


def reasons_against(before: Side, after: Side) -> tuple[StrOrText, ...]:
    """Returns why two sides cannot be compared, a sentence each; none where they can."""
    first, *others = runs = (*before.runs, *after.runs)
    of_runs = (reason for run in runs for reason in reasons_against_run(run))
    of_pairs = (reason for run in others for reason in _reasons_against_pair(first, run))
    return tuple(dict.fromkeys((*of_runs, *of_pairs)))


def reasons_against_run(run: Summary) -> Iterator[StrOrText]:
    """Yields why a run cannot be compared with any other, a sentence each; none where it can."""
    if run.status == "not_profiled" and run.unprofiled and run.unprofiled.trusted_ms(STEP):
        return  # its times alone are compared
    if run.status != "ok":
        said = f" ({run.message})" if run.message else ""
        yield f"{run.title} {_STATUS.get(run.status, run.status)}{said}"
    elif run.step is None:
        yield f"{run.title} holds no step that ran on a GPU"


def _other_conditions(one: Summary, other: Summary) -> Iterator[StrOrText]:
    """Yields what else than the program differs between two runs."""
    first, last = sorted((one.hardware, other.hardware))
    if first and first != last and not (first == CPU and last.startswith(CPU)):  # of one the processor is not known
        yield f"{one.title} is of {one.hardware}, {other.title} of {other.hardware}"
    clocks = [timing_methods(run) for run in (one, other)]
    if all(clocks) and clocks[0].isdisjoint(clocks[1]):
        how = [" and ".join(sorted(names)) for names in clocks]
        yield f"{one.title} was timed {how[0]}, {other.title} {how[1]}"


def timing_methods(run: Summary) -> set[str]:
    """Returns how the steps of a run were timed."""
    under = {f"under {run.profiler}"} if run.step and run.profiler else set()
    return under | ({"without a profiler"} if run.unprofiled and run.unprofiled.trusted_ms(STEP) else set())


def _reasons_against_pair(one: Summary, other: Summary) -> Iterator[StrOrText]:
    """Yields why two runs cannot be compared with each other."""
    yield from _other_conditions(one, other)
    for difference in differing_settings(one, other, (*_WORK, *_DIMENSIONS)):
        what = difference.key.replace("_", " ")
        yield f"The {what} of {one.title} is {difference.before}, that of {other.title} {difference.after}"
    # Those whose FLOPs were counted while the program ran, by their paths and classes.
    modules = [set(run.run.flops.modules) if run.run and run.run.flops else set() for run in (one, other)]
    if all(modules) and modules[0].isdisjoint(modules[1]):
        yield f"The models of {one.title} and {other.title} have no module in common"
    if not one.step or not other.step:
        return
    few, many = sorted((one.step.matmuls, other.step.matmuls))
    if one.step.source != other.step.source:
        yield phrase(
            "Their steps are not the same: of {} {}; of {} {}", one.title, one.step.unit, other.title, other.step.unit
        )
    elif one.step.is_found and many > _AS_MANY * few:
        yield phrase(
            "{} has {:,.0f} matmuls in {}, {} has {:,.0f} in {}, and nothing names what a step is (`--step RANGE`, "
            "`--steps N`)",
            one.title, one.step.matmuls, one.step.unit, other.title, other.step.matmuls, other.step.unit,
        )  # fmt: skip
