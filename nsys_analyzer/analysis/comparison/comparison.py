"""The sides of a comparison, their changes, how their settings differ, and the obstacles to comparing them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Literal

import msgspec

from nsys_analyzer.analysis.comparison.change import Change
from nsys_analyzer.analysis.findings.finding import Finding
from nsys_analyzer.analysis.summary.summary import Summary
from nsys_analyzer.trace.metadata import CPU
from nsys_analyzer.trace.phase_names import STEP

Verdict = Literal["faster", "slower", "no change", "unclear"]
BudgetUnit = Literal["ms", "count", "bytes", "J"]
BudgetVerdict = Literal["kept", "exceeded", "above, perhaps by chance", "not known"]
PartKind = Literal["compute", "exposed copies", "exposed communication", "idle"]
ObstacleKind = Literal[
    "not analysed", "no step", "hardware", "timing", "setting", "modules", "kind of step", "work of a step",
]  # fmt: skip
#: The change of the step that a comparison looks for if no other limit is given, as a share of the step.
DEFAULT_THRESHOLD = 0.05
#: The keys of the settings that define the work of a run, and the dimensions that a model name stands for.
_WORK_KEYS = ("model", "context_length", "batch_size", "mode")
_DIMENSION_KEYS = ("d_model", "d_ff", "num_layers", "num_heads", "vocab_size")
#: The keys of the settings that people change to make a program faster.
_OPTION_KEYS = ("precision", "attention", "compile", "cuda_graph", "optimizer", "device")
#: The keys of the whole configuration. Runs with an equal value of every key are runs of one program.
CONFIGURATION = (*_WORK_KEYS, *_OPTION_KEYS)
#: The keys of the versions and commits, which differ between machines and days.
_VERSION_KEYS = ("torch", "cuda", "driver", "nsys", "host_cpu", "git_commit")
#: A precision with a larger share of the matmul time is the precision of the run.
_MAIN_PRECISION_SHARE = 0.5
#: A kernel class is large if it has more than this share of the compute time.
_LARGE_CLASS_SHARE = 0.1
#: Large classes change by a common factor if their factors differ from each other by less than the first ratio. The
#: common factor shows that the work differs if it differs from 1 by more than the second ratio.
_COMMON_FACTOR_TOLERANCE, _OTHER_WORK_FACTOR = 1.2, 1.3
#: The kernel class whose work does not depend on the batch size.
OPTIMIZER_CLASS = "optimizer"
#: Steps without a name are assumed to do equal work if their numbers of matmuls differ by at most this factor.
_SAME_WORK_FACTOR = 1.1


@dataclass(frozen=True)
class Side:
    """One side of a comparison: a run, or several runs of one program whose figures are averaged."""

    runs: tuple[Summary, ...]

    @property
    def title(self) -> str:
        """Returns the name of the first run, and the number of further runs."""
        suffix = f" and {len(self.runs) - 1} more" if len(self.runs) > 1 else ""
        return f"{self.runs[0].title}{suffix}"


@dataclass(frozen=True)
class Difference:
    """A setting or version that both sides record and that differs, by its key in the manifest."""

    key: str
    before: str
    after: str


@dataclass(frozen=True)
class Obstacle:
    """A reason against comparing runs. ``report.sections.comparison`` writes its sentence.

    Attributes:
        kind: what the reason is about.
        runs: the run that cannot be compared with any other, or the two runs that cannot be compared with each other.
        difference: the setting that differs; None unless ``kind`` is "setting".
    """

    kind: ObstacleKind
    runs: tuple[Summary, ...]
    difference: Difference | None = None


@dataclass(frozen=True)
class KernelChange:
    """The change of a kernel's time in a step, or of the time of two kernels that do the same work.

    Attributes:
        before_name, after_name: the name of the kernel on each side; None if a side has no such kernel.
        before_launches, after_launches: the mean number of launches per step.
        change: the change of the time.
    """

    before_name: str | None
    after_name: str | None
    before_launches: float
    after_launches: float
    change: Change


@dataclass(frozen=True)
class PartChange:
    """The change of a part of the step: compute of a kernel class, exposed copies, or idle time of a cause.

    Attributes:
        kind, name: the kind of the part, and its kernel class or cause.
        change: the change of the mean time per step.
        kernels: the kernels of the class, the largest change first. Their changes add up to the change of the class.
    """

    kind: PartKind
    name: str
    change: Change
    kernels: tuple[KernelChange, ...] = ()


@dataclass(frozen=True)
class StepChange:
    """The change of the step under the profiler.

    Attributes:
        wall: the length of the step.
        busy: the GPU's work in the step, median.
        parts: the parts of the step, the largest change first. Their changes add up to the change of the step's length.
        before_launches, after_launches: the number of kernels and fills per step.
    """

    wall: Change
    busy: Change
    parts: tuple[PartChange, ...]
    before_launches: float
    after_launches: float

    @property
    def common_factor(self) -> float | None:
        """Returns the factor by which all large compute classes change, if they agree and it is not about 1, else None.

        Such a factor indicates another batch size. The optimizer is left out, because its work does not depend on the
        batch size.
        """
        changes = [part.change for part in self.parts if part.kind == "compute" and part.name != OPTIMIZER_CLASS]
        threshold_ms = _LARGE_CLASS_SHARE * max(
            sum(change.before_ms for change in changes), sum(change.after_ms for change in changes)
        )
        large_changes = [change for change in changes if max(change.before_ms, change.after_ms) > threshold_ms]
        if len(large_changes) < 2 or not all(change.before_ms and change.after_ms for change in large_changes):
            return None
        factor = sum(change.after_ms for change in large_changes) / sum(change.before_ms for change in large_changes)
        factors = [change.after_ms / change.before_ms / factor for change in large_changes]
        are_alike = max(factors) < _COMMON_FACTOR_TOLERANCE and min(factors) > 1 / _COMMON_FACTOR_TOLERANCE
        return factor if are_alike and not 1 / _OTHER_WORK_FACTOR < factor < _OTHER_WORK_FACTOR else None


@dataclass(frozen=True)
class PhaseChange:
    """The change of a phase that both sides have, medians.

    Attributes:
        unprofiled: the time without the profiler; None if it was not measured on both sides.
        wall: the time under the profiler. It contains the GPU's work only if the phase is ``synchronized``.
        busy: the GPU's work.
        synchronized: whether the GPU's work ends inside the phase on both sides.
    """

    phase: str
    unprofiled: Change | None
    wall: Change
    busy: Change
    synchronized: bool


@dataclass(frozen=True)
class OperatorChange:
    """The change of the kernel time of an operator in a step, or of two operators that differ in their shapes only.

    Attributes:
        operator: the name of the operator, such as ``aten::mm``.
        before_shapes, after_shapes: the shapes and types of its tensors; None if a side has no such operator.
        before_calls, after_calls: the mean number of calls per step.
        before_ms, after_ms: the mean kernel time per step, ms.
        ms: the difference of the times, ms.
    """

    operator: str
    before_shapes: str | None
    after_shapes: str | None
    before_calls: float
    after_calls: float
    before_ms: float
    after_ms: float
    ms: float


@dataclass(frozen=True)
class FindingChange:
    """A finding of one side or of both sides; None for a side that does not have the finding."""

    before: Finding | None
    after: Finding | None

    @property
    def finding(self) -> Finding:
        """Returns the finding of the side ``after``, or of the side ``before`` if ``after`` does not have it."""
        finding = self.after or self.before
        assert finding
        return finding

    @property
    def status(self) -> Literal["gone", "new", "changed", "stays"]:
        """Returns how the finding changed; "changed" means that the intervals of its two savings do not overlap."""
        if self.before is None or self.after is None:
            return "new" if self.after else "gone"
        are_disjoint = (
            self.before.saves_ms_high < self.after.saves_ms_low or self.after.saves_ms_high < self.before.saves_ms_low
        )
        return "changed" if are_disjoint else "stays"


class Budget(msgspec.Struct, frozen=True):
    """The limit of a quantity per step, and its value in a run; None if the value is not known."""

    quantity: str = msgspec.field(name="what")
    unit: BudgetUnit
    limit: float = msgspec.field(name="most")
    value: float | None
    verdict: BudgetVerdict


@dataclass(frozen=True)
class Comparison:
    """Two sides, and what changed from one to the other.

    Attributes:
        differences: the settings and versions that differ.
        step: the step under the profiler; None if a side has no step.
        unprofiled: the step without the profiler; None if it was not measured on both sides.
        phases: the phases that all runs have.
        findings: the findings of most runs of a side, with median savings; None if a side has no known findings.
        operators: the operators whose kernel time differs, the largest change first; None if the operators of a side
            are not known.
        cautions: the reasons against comparing the sides. They are compared nevertheless if ``--force`` is given.
        same: whether both sides are the same capture.
        budgets: the given budgets, with the values of ``after``.
        joules: the energy of a step without the profiler, whose fields are in J instead of ms; None if it was not
            measured on both sides.
    """

    before: Side
    after: Side
    differences: tuple[Difference, ...]
    step: StepChange | None
    unprofiled: Change | None
    phases: tuple[PhaseChange, ...]
    findings: tuple[FindingChange, ...] | None
    operators: tuple[OperatorChange, ...] | None = None
    cautions: tuple[Obstacle, ...] = ()
    same: bool = False
    budgets: tuple[Budget, ...] = ()
    joules: Change | None = None

    def __repr__(self) -> str:
        """Returns one line of text, which an interactive session or a notebook displays."""
        change = self.headline
        step = f", step {change.before_ms:.2f} → {change.after_ms:.2f} ms" if change else ""
        return f"<Comparison {self.before.title} → {self.after.title}: {self.verdict()}{step}>"

    @property
    def headline(self) -> Change | None:
        """Returns the change that the verdict is based on: without the profiler if it was measured, else under it."""
        return self.unprofiled or (self.step.wall if self.step else None)

    @property
    def conditions_differ(self) -> bool:
        """Returns whether the sides ran on different hardware, or were timed in different ways."""
        return any(obstacle.kind in ("hardware", "timing") for obstacle in self.cautions)

    @property
    def is_slowed_on_one_side(self) -> bool:
        """Returns whether the profiler lengthens the step of only one side, and unprofiled times are unknown."""
        is_slowed = {
            any(run.step and run.step.profiler_overhead_ms for run in side.runs) for side in (self.before, self.after)
        }
        return self.unprofiled is None and len(is_slowed) > 1

    def verdict(self, threshold: float = DEFAULT_THRESHOLD) -> Verdict:
        """Returns whether the step changed; "unclear" if a change by ``threshold`` could not have been detected."""
        change = self.headline
        if self.same:
            return "no change"
        if change is None or change.low_share is None or change.high_share is None:
            return "unclear"
        if change.is_change:
            return "slower" if change.ms > 0 else "faster"
        return "no change" if max(-change.low_share, change.high_share) <= threshold else "unclear"

    def is_slower_by(self, share: float) -> bool:
        """Returns whether the step is slower by more than this share, by the best estimate, and not only by chance.

        The lower end of the interval need not exceed the share. Otherwise, a change that exceeds the share by less than
        half the width of the interval would not be reported.
        """
        change = self.headline
        return change is not None and change.is_change and change.ms > share * change.before_ms


# --- the settings of the sides


def find_setting(run: Summary, key: str) -> Any:
    """Returns the value of a key in a run's configuration or manifest; None if the run does not record it."""
    value = getattr(run.configuration, "model_name" if key == "model" else key, None)
    return getattr(run.run, key, None) if value is None else value


def compare_settings(before: Side, after: Side) -> tuple[Difference, ...]:
    """Returns the settings and then the versions that both sides record and that differ."""
    runs = before.runs[0], after.runs[0]
    settings = list(find_differing_settings(*runs, (*_WORK_KEYS, *_DIMENSION_KEYS, *_OPTION_KEYS)))
    # The precision of most of the matmul time; empty if no precision has a majority.
    precisions = [
        next(
            (name for name, share in run.precisions.items() if share > _MAIN_PRECISION_SHARE and name != "unknown"), ""
        )
        for run in runs
    ]
    if all(precisions) and precisions[0] != precisions[1] and all(row.key != "precision" for row in settings):
        settings.append(Difference("matmul precision", *precisions))
    return (*settings, *find_differing_settings(*runs, _VERSION_KEYS))


def find_differing_settings(
    before: Summary, after: Summary, keys: Iterable[str], unknown: str = ""
) -> Iterator[Difference]:
    """Yields the settings that differ.

    Args:
        before, after: the runs.
        keys: the keys of the settings.
        unknown: the word for a setting that only one run records. If it is empty, such settings are left out.
    """
    words = {None: unknown, True: "on", False: "off"}
    for key in keys:
        values = find_setting(before, key), find_setting(after, key)
        if values[0] != values[1] and (unknown or None not in values):
            texts = (words[value] if value is None or isinstance(value, bool) else str(value) for value in values)
            yield Difference(key, *texts)


# --- the obstacles to a comparison


def find_obstacles(before: Side, after: Side) -> tuple[Obstacle, ...]:
    """Returns why two sides cannot be compared; nothing if they can be compared."""
    first_run, *later_runs = runs = (*before.runs, *after.runs)
    obstacles_of_runs = (obstacle for run in runs for obstacle in find_run_obstacles(run))
    obstacles_of_pairs = (obstacle for run in later_runs for obstacle in _find_pair_obstacles(first_run, run))
    return (*obstacles_of_runs, *obstacles_of_pairs)


def find_run_obstacles(run: Summary) -> Iterator[Obstacle]:
    """Yields why a run cannot be compared with any other run; nothing if it can be compared."""
    if run.status == "not_profiled" and run.unprofiled and run.unprofiled.trusted_ms(STEP):
        return  # a run without a capture has only unprofiled times to compare
    if run.status != "ok":
        yield Obstacle("not analysed", (run,))
    elif run.step is None:
        yield Obstacle("no step", (run,))


def find_timing_methods(run: Summary) -> frozenset[str]:
    """Returns how the steps of a run were timed: the name of the profiler, and "none" for unprofiled times."""
    methods = {run.profiler} if run.step and run.profiler else set()
    return frozenset(methods | ({"none"} if run.unprofiled and run.unprofiled.trusted_ms(STEP) else set()))


def _find_pair_obstacles(first: Summary, second: Summary) -> Iterator[Obstacle]:
    """Yields why two runs cannot be compared with each other."""
    pair = first, second
    first_hardware, second_hardware = sorted((first.hardware, second.hardware))
    # "CPU" without a model name may be any processor.
    if (
        first_hardware
        and first_hardware != second_hardware
        and not (first_hardware == CPU and second_hardware.startswith(CPU))
    ):
        yield Obstacle("hardware", pair)
    methods = [find_timing_methods(run) for run in pair]
    if all(methods) and methods[0].isdisjoint(methods[1]):
        yield Obstacle("timing", pair)
    for difference in find_differing_settings(first, second, (*_WORK_KEYS, *_DIMENSION_KEYS)):
        yield Obstacle("setting", pair, difference)
    # Programs whose counted modules have no name in common are different programs.
    modules = [set(run.run.flops.modules) if run.run and run.run.flops else set() for run in pair]
    if all(modules) and modules[0].isdisjoint(modules[1]):
        yield Obstacle("modules", pair)
    if not first.step or not second.step:
        return
    fewer_matmuls, more_matmuls = sorted((first.step.matmuls, second.step.matmuls))
    if first.step.source != second.step.source:
        yield Obstacle("kind of step", pair)
    elif first.step.is_inferred and more_matmuls > _SAME_WORK_FACTOR * fewer_matmuls:
        yield Obstacle("work of a step", pair)
