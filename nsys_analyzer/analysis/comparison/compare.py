"""From two sides to their comparison."""

from __future__ import annotations

import math
import statistics
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import TypeAlias

from nsys_analyzer.analysis.comparison.change import (
    CPU_SPREAD,
    GPU_SPREAD,
    PAUSES_SPREAD,
    Change,
    Figure,
    Order,
)
from nsys_analyzer.analysis.comparison.comparability import differences, reasons_against
from nsys_analyzer.analysis.comparison.comparison import (
    Comparison,
    FindingChange,
    KernelChange,
    PartChange,
    PartKind,
    PhaseChange,
    Side,
    StepChange,
)
from nsys_analyzer.analysis.comparison.kernels import match_kernels
from nsys_analyzer.analysis.findings.finding import Finding
from nsys_analyzer.analysis.ranges.phases import OTHER_STEP, STEP
from nsys_analyzer.analysis.steps.step import KernelTime, StepSummary
from nsys_analyzer.analysis.summary.summary import PhaseSummary, Summary

#: A part of the step: its kind, and the class or the cause.
_Key: TypeAlias = "tuple[PartKind, str]"
#: A kernel's name and class.
_Kernel: TypeAlias = "tuple[str, str]"
_NO_KERNEL = KernelTime("", "", 0.0, 0.0, None)


def compare(before: Side, after: Side, cpu_spread: float = CPU_SPREAD) -> Comparison:
    """What changed from one side to the other.

    Args:
        before, after: the sides.
        cpu_spread: by how much the time that the GPU waits for the program differs from run to run, a standard
            deviation as a share of that time. Where a side has several runs, these tell it.
    """
    spread = Spread(cpu_spread)
    return Comparison(
        before,
        after,
        differences(before, after),
        _step_change(before, after, spread),
        _unprofiled(before, after, STEP, spread),
        tuple(_phase_changes(before, after, spread)),
        _findings(before, after),
        reasons_against(before, after),
        _is_same(before, after),
    )


@dataclass(frozen=True)
class Spread:
    """By how much figures of one program differ from run to run, standard deviations in ms.

    The GPU's work differs little, the time that it waits for the program much.
    """

    cpu: float

    def of(self, gpu_ms: float, waiting_ms: float, pauses_ms: float = 0.0) -> float:
        """Of a time that is the GPU's in one part, the program's in another, and of pauses between queued work."""
        return math.hypot(GPU_SPREAD * gpu_ms, PAUSES_SPREAD * pauses_ms, self.cpu * max(waiting_ms, 0.0))

    def of_step(self, step: StepSummary, ms: float) -> float:
        """Of a median step that takes so long, whether or not under the profiler."""
        compute, pauses = step.usual_compute_ms, step.own_pauses_ms
        return self.of(compute, ms - compute - pauses, pauses)

    def of_busy(self, step: StepSummary) -> float:
        """Of the GPU's work in a median step."""
        compute = step.usual_compute_ms
        return self.of(compute, step.median_busy_ms - compute)

    def of_phase(self, phase: PhaseSummary, ms: float, busy_ms: float) -> float:
        """Of a phase that takes so long; one that nobody waits for lasts as long as launching takes."""
        return self.of(busy_ms, ms - busy_ms) if phase.synchronized else self.of(0.0, ms)

    @staticmethod
    def of_kernels(step: StepSummary, ms: float) -> float:
        """Of some kernels of a step, which differ more than all together: as if by chance of each."""
        return GPU_SPREAD * math.sqrt(ms * step.compute_ms)


def _step_change(before: Side, after: Side, spread: Spread) -> StepChange | None:
    steps = _steps(before), _steps(after)
    if not all(steps):
        return None
    orders = (
        _order([one.wall_values_ms for one in side] for side in steps),
        _order([one.busy_values_ms for one in side] for side in steps),
    )
    wall, busy = (
        _changed(([figure(step, spread) for step in side] for side in steps), order)
        for figure, order in zip((_wall, _busy), orders, strict=True)
    )
    parts = [[_parts(step, spread) for step in side] for side in steps]
    kernels = _kernel_changes(*steps, orders[1])
    keys = dict.fromkeys(chain.from_iterable(part for side in parts for part in side))
    changes = [
        PartChange(
            *key,
            _changed((_with_nothing(key, *one) for one in zip(steps, parts, strict=True)), orders[key[0] == "compute"]),
            tuple(one for kernel_class, one in kernels if key == ("compute", kernel_class)),
        )
        for key in keys
    ]
    launches = (sum(step.launches for step in side) / len(side) for side in steps)
    return StepChange(wall, busy, tuple(sorted(changes, key=lambda part: -abs(part.change.ms))), *launches)


def _with_nothing(key: _Key, steps: list[StepSummary], parts: list[dict[_Key, Figure]]) -> list[Figure]:
    """A part of the steps of some runs; a run without it has 0 in each step."""
    return [part.get(key, Figure.nothing(step.instances)) for step, part in zip(steps, parts, strict=True)]


def _changed(sides: Iterable[Sequence[Figure]], order: Order | None = None) -> Change:
    """The change of a figure of two sides, of which each has that of its runs."""
    before, after = map(Figure.of_runs, sides)
    return Change.of(before, after, order)


def _order(sides: Iterable[Sequence[Sequence[float]]]) -> Order | None:
    """What the order of instances says, where each side is a single run; several runs tell their error themselves."""
    runs = [run for side in sides for run in side]
    return Order.of(*runs) if len(runs) == len(("before", "after")) else None


def _steps(side: Side) -> list[StepSummary]:
    return [run.step for run in side.runs if run.step]


def _wall(step: StepSummary, spread: Spread) -> Figure:
    if sum(group.measured for group in step.groups) > 1:  # the length is the mean of groups, and no median
        figure = Figure.of_mean(step.total_ms, statistics.stdev(step.wall_values_ms), step.instances)
    else:
        figure = replace(Figure.of_values(step.wall_values_ms, step.instances), ms=step.total_ms)
    return figure.between_runs(spread.of_step(step, figure.ms))


def _busy(step: StepSummary, spread: Spread) -> Figure:
    return Figure.of_values(step.busy_values_ms, step.instances).between_runs(spread.of_busy(step))


def _parts(step: StepSummary, spread: Spread) -> dict[_Key, Figure]:
    """The parts of a step, which add up to its mean duration."""
    exposed: list[tuple[PartKind, float, float | None]] = [
        ("exposed copies", step.exposed_copy_ms, step.exposed_copy_std_ms),
        ("exposed communication", step.exposed_communication_ms, step.exposed_communication_std_ms),
    ]
    found: dict[_Key, Figure] = {}
    for one in step.classes:
        figure = Figure.of_mean(one.ms, one.std_ms, step.instances)
        found["compute", one.kernel_class] = figure.between_runs(spread.of_kernels(step, one.ms))
    for kind, ms, std_ms in exposed:
        if ms:
            found[kind, ""] = Figure.of_mean(ms, std_ms, step.instances).between_runs(spread.of(0.0, ms))
    for cause in step.causes:
        own = step.own_pauses_ms if cause.cause == "launch" else 0.0
        figure = Figure.of_mean(cause.ms, cause.std_ms, step.instances)
        found["idle", cause.cause] = figure.between_runs(spread.of(0.0, cause.ms - own, own))
    return found


def _kernel_changes(
    before: list[StepSummary], after: list[StepSummary], order: Order | None
) -> list[tuple[str, KernelChange]]:
    """Every kernel that computes with its class, the largest change first."""
    tables = _kernels(before), _kernels(after)
    merged = [[kernel for kernel, _ in table.values()] for table in tables]
    changes = []
    for pair in match_kernels(*merged):
        figures = [
            table[_key(one)][1] if one else Figure.of_runs([Figure.nothing(step.instances) for step in side])
            for side, table, one in zip((before, after), tables, pair, strict=True)
        ]
        was, now = (one or _NO_KERNEL for one in pair)
        before_name, after_name = (one.name if one else None for one in pair)
        change = Change.of(figures[0], figures[1], order)
        changes.append(
            (
                was.kernel_class or now.kernel_class,
                KernelChange(before_name, after_name, was.launches, now.launches, change),
            )
        )
    return sorted(changes, key=lambda one: -abs(one[1].change.ms))


def _kernels(steps: list[StepSummary]) -> dict[_Kernel, tuple[KernelTime, Figure]]:
    """The kernels of some runs, each with its means over them."""
    tables = [{_key(one): one for one in step.kernels} for step in steps]
    found: dict[_Kernel, tuple[KernelTime, Figure]] = {}
    for key in dict.fromkeys(chain.from_iterable(tables)):
        figures, launches = [], 0.0
        for table, step in zip(tables, steps, strict=True):
            one, n = table.get(key), step.instances
            launches += one.launches / len(steps) if one else 0.0
            figure = Figure.of_mean(one.ms, one.std_ms, n) if one else Figure.nothing(n)
            figures.append(figure.between_runs(Spread.of_kernels(step, figure.ms)))
        pooled = Figure.of_runs(figures)
        found[key] = KernelTime(*key, launches, pooled.ms, None), pooled
    return found


def _key(kernel: KernelTime) -> _Kernel:
    return kernel.name, kernel.kernel_class


def _unprofiled(before: Side, after: Side, phase: str, spread: Spread) -> Change | None:
    """The change of a phase's time without the profiler."""
    sides = []
    for side in (before, after):
        figures = [figure for run in side.runs if (figure := _timed(run, phase, spread))]
        if not figures:
            return None
        sides.append(figures)
    return _changed(sides)


def _timed(run: Summary, name: str, spread: Spread) -> Figure | None:
    stats = run.unprofiled.trusted(name) if run.unprofiled else None
    if stats is None or stats.typical is None:
        return None
    figure, phase = Figure.of_stats(stats), run.phase(name)
    if name == STEP and run.step:
        return figure.between_runs(spread.of_step(run.step, figure.ms))
    busy = Figure.of_values(phase.busy_values_ms).ms if phase else 0.0
    return figure.between_runs(spread.of(busy, figure.ms - busy))  # timed as it is: synchronized


def _phase_changes(before: Side, after: Side, spread: Spread) -> Iterator[PhaseChange]:
    """The phases that every run has, but the step."""
    runs = (*before.runs, *after.runs)
    for name in (one.phase for one in runs[0].phases if one.phase not in (STEP, OTHER_STEP)):
        if all(run.phase(name) for run in runs):
            phases = [[phase for run in side.runs if (phase := run.phase(name))] for side in (before, after)]
            orders = (
                _order([phase.wall_values_ms for phase in side] for side in phases),
                _order([phase.busy_values_ms for phase in side] for side in phases),
            )
            wall, busy = (
                _changed(([figure(phase, spread) for phase in side] for side in phases), order)
                for figure, order in zip((_phase_wall, _phase_busy), orders, strict=True)
            )
            kernels = [sum(phase.kernels_per_instance for phase in side) / len(side) for side in phases]
            synchronized = all(phase.synchronized for side in phases for phase in side)
            unprofiled = _unprofiled(before, after, name, spread)
            yield PhaseChange(name, unprofiled, wall, busy, kernels[0], kernels[1], synchronized)


def _phase_wall(phase: PhaseSummary, spread: Spread) -> Figure:
    figure = Figure.of_values(phase.wall_values_ms, phase.instances)
    return figure.between_runs(spread.of_phase(phase, figure.ms, Figure.of_values(phase.busy_values_ms).ms))


def _phase_busy(phase: PhaseSummary, spread: Spread) -> Figure:
    figure = Figure.of_values(phase.busy_values_ms, phase.instances)
    return figure.between_runs(spread.of(figure.ms, 0.0))


def _findings(before: Side, after: Side) -> tuple[FindingChange, ...] | None:
    """The findings of both sides: gone, new, changed, then those that stay; the largest saving first."""
    tables = _found(before), _found(after)
    if tables[0] is None or tables[1] is None:
        return None
    keys = dict.fromkeys((*tables[0], *tables[1]))
    found = [FindingChange(tables[0].get(key), tables[1].get(key)) for key in keys]
    order = ("gone", "new", "changed", "stays")
    return tuple(sorted(found, key=lambda one: (order.index(one.status), -one.one.saves_ms_high)))


def _found(side: Side) -> dict[str, Finding] | None:
    """The findings that most of a side's runs have, with medians over these of what each saves.

    Runs that cannot tell findings do not count; None where none can.
    """
    told = [run.findings for run in side.runs if run.findings is not None]
    by_id: defaultdict[str, list[Finding]] = defaultdict(list)
    for one in chain.from_iterable(told):
        by_id[one.id].append(one)
    common = {key: _typical(same) for key, same in by_id.items() if 2 * len(same) > len(told)}
    return common if told else None


def _typical(same: Sequence[Finding]) -> Finding:
    """A finding of several runs as one, with the medians of what it saves."""
    low = statistics.median(one.saves_ms_low for one in same)
    high = statistics.median(one.saves_ms_high for one in same)
    return replace(same[0], saves_ms_low=low, saves_ms_high=high)


def _is_same(before: Side, after: Side) -> bool:
    """Whether one capture stands on both sides, by whatever name."""
    return [*map(_figures, before.runs)] == [*map(_figures, after.runs)]


def _figures(run: Summary) -> tuple[object, ...]:
    """What no two runs have in common."""
    phases = [(one.phase, one.wall_values_ms, one.busy_values_ms) for one in run.phases]
    return run.pid, run.configuration, run.run, run.step, phases, run.unprofiled
