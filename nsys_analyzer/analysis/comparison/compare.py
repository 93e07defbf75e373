"""From two sides to their comparison."""

from __future__ import annotations

import math
import re
import statistics
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import chain, zip_longest
from typing import TypeAlias, TypeVar

from nsys_analyzer.analysis.comparison.change import (
    CPU_SPREAD,
    GPU_SPREAD,
    PAUSES_SPREAD,
    Change,
    Estimate,
    SerialCorrelation,
)
from nsys_analyzer.analysis.comparison.comparison import (
    Comparison,
    FindingChange,
    KernelChange,
    PartChange,
    PartKind,
    PhaseChange,
    Side,
    StepChange,
    compare_settings,
    reasons_against,
)
from nsys_analyzer.analysis.findings.finding import Finding
from nsys_analyzer.analysis.kernels.class_rules import MATMUL
from nsys_analyzer.analysis.steps.step import KernelTime, StepSummary
from nsys_analyzer.analysis.summary.summary import PhaseSummary, Summary
from nsys_analyzer.trace.phase_names import OTHER_STEP, STEP

#: A part of the step: its kind, and the class or the cause.
_Key: TypeAlias = "tuple[PartKind, str]"
#: A kernel's name and class.
_Kernel: TypeAlias = "tuple[str, str]"
_Clocked = TypeVar("_Clocked", StepSummary, PhaseSummary)
#: Whether each operand is transposed (t) or not (n), and with a third letter the result, in the names of cuBLAS and
#: CUTLASS: ``sm80_xmma_gemm_f32f32_f32f32_f32_tn_n_tilesize64x64x8``, ``nvjet_sm90_tst_96x64_64x10_1x2_h_bz_TNN``.
_LAYOUT = re.compile(r"_([nt]{2})[nt]?(?![a-z0-9])", re.IGNORECASE)


def compare(before: Side, after: Side, cpu_spread: float = CPU_SPREAD) -> Comparison:
    """Returns what changed from one side to the other.

    Args:
        before, after: the sides.
        cpu_spread: by how much the time that the GPU waits for the program differs from run to run, a standard
            deviation as a share of that time. Where a side has several runs, these tell it.
    """
    spread = RunSpread(cpu_spread)
    return Comparison(
        before,
        after,
        compare_settings(before, after),
        _step_change(before, after, spread),
        _unprofiled(before, after, STEP, spread),
        tuple(_phase_changes(before, after, spread)),
        _findings(before, after),
        reasons_against(before, after),
        [*map(_figures, before.runs)] == [*map(_figures, after.runs)],
    )


def _figures(run: Summary) -> tuple[object, ...]:
    """Returns what no two runs have in common, so that one capture is known by whatever name."""
    phases = [(phase.phase, phase.wall_values_ms, phase.busy_values_ms) for phase in run.phases]
    return run.pid, run.configuration, run.run, run.step, phases, run.unprofiled


@dataclass(frozen=True)
class RunSpread:
    """By how much figures of one program differ from run to run, standard deviations in ms.

    The GPU's work differs little, the time that it waits for the program much.
    """

    cpu: float

    def of(self, gpu_ms: float, waiting_ms: float, pauses_ms: float = 0.0) -> float:
        """Returns that of a time that is the GPU's in one part, the program's in another, and of pauses between."""
        return math.hypot(GPU_SPREAD * gpu_ms, PAUSES_SPREAD * pauses_ms, self.cpu * max(waiting_ms, 0.0))

    def of_step(self, step: StepSummary, ms: float) -> float:
        """Returns that of a median step that takes so long, whether or not under the profiler."""
        compute, pauses = step.usual_compute_ms, step.own_pauses_ms
        return self.of(compute, ms - compute - pauses, pauses)

    def of_busy(self, step: StepSummary) -> float:
        """Returns that of the GPU's work in a median step."""
        compute = step.usual_compute_ms
        return self.of(compute, step.median_busy_ms - compute)

    @staticmethod
    def of_kernels(step: StepSummary, ms: float) -> float:
        """Returns that of some kernels of a step, which differ more than all together: as if by chance of each."""
        return GPU_SPREAD * math.sqrt(ms * step.compute_ms)


# --- the step


def _step_change(before: Side, after: Side, spread: RunSpread) -> StepChange | None:
    sides = [[run.step for run in side.runs if run.step] for side in (before, after)]
    if not all(sides):
        return None

    def busy_of(step: StepSummary) -> Estimate:
        return Estimate.of_values(step.busy_values_ms, step.instances).with_run_error(spread.of_busy(step))

    wall, wall_order = _clock_changed(sides, lambda step: step.wall_values_ms, lambda step: step_wall(step, spread))
    busy, busy_order = _clock_changed(sides, lambda step: step.busy_values_ms, busy_of)
    kernels = _kernel_changes(sides, busy_order)
    parts = [[(step, estimate_parts(step, spread)) for step in side] for side in sides]
    changes = []
    for key in dict.fromkeys(key for side in parts for _, of_step in side for key in of_step):
        kind, name = key
        # A run without the part has 0 in each step.
        figures = [[of_step.get(key, Estimate.nothing(step.instances)) for step, of_step in side] for side in parts]
        change = _changed(figures, busy_order if kind == "compute" else wall_order)
        of_class = tuple(each for kernel_class, each in kernels if key == ("compute", kernel_class))
        changes.append(PartChange(kind, name, change, of_class))
    launches = (sum(step.launches for step in side) / len(side) for side in sides)
    return StepChange(wall, busy, tuple(sorted(changes, key=lambda part: -abs(part.change.ms))), *launches)


def step_wall(step: StepSummary, spread: RunSpread) -> Estimate:
    """Returns the length of a run's steps under the profiler."""
    figure = replace(Estimate.of_values(step.wall_values_ms, step.instances), ms=step.total_ms)
    return figure.with_run_error(spread.of_step(step, figure.ms))


def _changed(sides: Iterable[Sequence[Estimate]], order: SerialCorrelation | None = None) -> Change:
    """Returns the change of a figure of two sides, of which each has that of its runs."""
    before, after = map(Estimate.of_runs, sides)
    return Change.of(before, after, order)


def _clock_changed(
    sides: Sequence[Sequence[_Clocked]],
    values: Callable[[_Clocked], Sequence[float]],
    figure: Callable[[_Clocked], Estimate],
) -> tuple[Change, SerialCorrelation | None]:
    """Returns the change of a clock of steps or of a phase, and what the order of its instances says.

    It says something where each side is a single run; several runs tell their error themselves.
    """
    runs = [values(run) for side in sides for run in side]
    order = SerialCorrelation.of(*runs) if len(runs) == len(sides) else None
    return _changed(([figure(run) for run in side] for side in sides), order), order


def estimate_parts(step: StepSummary, spread: RunSpread) -> dict[_Key, Estimate]:
    """Returns the parts of a step, which add up to its mean duration."""
    n = step.instances
    parts: dict[_Key, Estimate] = {}
    for kernels in step.classes:
        figure = Estimate.of_mean(kernels.ms, kernels.std_ms, n)
        parts["compute", kernels.kernel_class] = figure.with_run_error(spread.of_kernels(step, kernels.ms))
    if ms := step.exposed_copy_ms:
        figure = Estimate.of_mean(ms, step.exposed_copy_std_ms, n)
        parts["exposed copies", ""] = figure.with_run_error(spread.of(0.0, ms))
    if ms := step.exposed_communication_ms:
        figure = Estimate.of_mean(ms, step.exposed_communication_std_ms, n)
        parts["exposed communication", ""] = figure.with_run_error(spread.of(0.0, ms))
    for cause in step.causes:
        own = step.own_pauses_ms if cause.cause == "launch" else 0.0
        figure = Estimate.of_mean(cause.ms, cause.std_ms, n)
        parts["idle", cause.cause] = figure.with_run_error(spread.of(0.0, cause.ms - own, own))
    return parts


# --- kernels


def _kernel_changes(
    sides: Sequence[Sequence[StepSummary]], order: SerialCorrelation | None
) -> list[tuple[str, KernelChange]]:
    """Returns every kernel that computes with its class, the largest change first."""
    tables = [_kernels(side) for side in sides]
    changes = []
    for pair in match_kernels(*([kernel for kernel, _ in table.values()] for table in tables)):
        figures = [
            table[kernel.name, kernel.kernel_class][1]
            if kernel
            else Estimate.of_runs([Estimate.nothing(step.instances) for step in side])
            for side, table, kernel in zip(sides, tables, pair, strict=True)
        ]
        before, after = ((kernel.name, kernel.launches) if kernel else (None, 0.0) for kernel in pair)
        kernel_class = next(kernel.kernel_class for kernel in pair if kernel)
        change = Change.of(figures[0], figures[1], order)
        changes.append((kernel_class, KernelChange(before[0], after[0], before[1], after[1], change)))
    return sorted(changes, key=lambda change: -abs(change[1].change.ms))


def _kernels(steps: Sequence[StepSummary]) -> dict[_Kernel, tuple[KernelTime, Estimate]]:
    """Returns the kernels of some runs, each with its means over them."""
    tables = [{(kernel.name, kernel.kernel_class): kernel for kernel in step.kernels} for step in steps]
    means: dict[_Kernel, tuple[KernelTime, Estimate]] = {}
    for key in dict.fromkeys(chain.from_iterable(tables)):
        figures, launches = [], 0.0
        for table, step in zip(tables, steps, strict=True):
            kernel, n = table.get(key), step.instances
            launches += kernel.launches / len(steps) if kernel else 0.0
            figure = Estimate.of_mean(kernel.ms, kernel.std_ms, n) if kernel else Estimate.nothing(n)
            figures.append(figure.with_run_error(RunSpread.of_kernels(step, figure.ms)))
        pooled = Estimate.of_runs(figures)
        means[key] = KernelTime(*key, launches, pooled.ms, None), pooled
    return means


def match_kernels(
    before: Sequence[KernelTime], after: Sequence[KernelTime]
) -> tuple[tuple[KernelTime | None, KernelTime | None], ...]:
    """Returns every kernel of both runs once: paired by name and class, then by class, layout and launches a step.

    A matmul in another precision, or of another tile, is another kernel by name. It is launched as often, and has the
    same operands transposed: others than the gradient of its input or of its weight. Of several such kernels the
    longest of both runs are a pair. The grid is no measure of the shape: persistent kernels have about a block for each
    multiprocessor, whatever the shape, and a tile, or a split of the sum, changes that of the others.

    What one run has no kernel for is None.
    """
    left = {(kernel.name, kernel.kernel_class): kernel for kernel in after}
    named = [(kernel, left.pop((kernel.name, kernel.kernel_class), None)) for kernel in before]
    by_work: dict[object, tuple[list[KernelTime], list[KernelTime]]] = defaultdict(lambda: ([], []))
    for place, kernels in enumerate(([one for one, same in named if not same], left.values())):
        for kernel in sorted(kernels, key=lambda kernel: -kernel.ms):
            match = _LAYOUT.search(kernel.name) if kernel.kernel_class == MATMUL else None
            layout = match[1].lower() if match else ""
            by_work[kernel.kernel_class, layout, round(kernel.launches, 2)][place].append(kernel)
    return (*(pair for pair in named if pair[1]), *(pair for both in by_work.values() for pair in zip_longest(*both)))


# --- phases, times without the profiler, findings


def _phase_changes(before: Side, after: Side, spread: RunSpread) -> Iterator[PhaseChange]:
    """Yields the phases that every run has, but the step."""
    for name in (phase.phase for phase in before.runs[0].phases if phase.phase not in (STEP, OTHER_STEP)):
        sides = [[phase for run in side.runs if (phase := run.phase(name))] for side in (before, after)]
        if all(len(phases) == len(side.runs) for phases, side in zip(sides, (before, after), strict=True)):
            wall, _ = _clock_changed(sides, lambda phase: phase.wall_values_ms, lambda phase: phase_wall(phase, spread))
            busy, _ = _clock_changed(sides, lambda phase: phase.busy_values_ms, lambda phase: phase_busy(phase, spread))
            synchronized = all(phase.synchronized for side in sides for phase in side)
            unprofiled = _unprofiled(before, after, name, spread)
            yield PhaseChange(name, unprofiled, wall, busy, synchronized)


def phase_wall(phase: PhaseSummary, spread: RunSpread) -> Estimate:
    """Returns the length of a run's phase under the profiler."""
    # One that nobody waits for lasts as long as launching takes.
    figure = Estimate.of_values(phase.wall_values_ms, phase.instances)
    busy_ms = Estimate.of_values(phase.busy_values_ms).ms if phase.synchronized else 0.0
    return figure.with_run_error(spread.of(busy_ms, figure.ms - busy_ms))


def phase_busy(phase: PhaseSummary, spread: RunSpread) -> Estimate:
    """Returns the GPU's work in a run's phase."""
    figure = Estimate.of_values(phase.busy_values_ms, phase.instances)
    return figure.with_run_error(spread.of(figure.ms, 0.0))


def _unprofiled(before: Side, after: Side, phase: str, spread: RunSpread) -> Change | None:
    """Returns the change of a phase's time without the profiler; None where a side was not timed so."""
    sides = [
        [figure for run in side.runs if (figure := unprofiled_estimate(run, phase, spread))] for side in (before, after)
    ]
    return _changed(sides) if all(sides) else None


def unprofiled_estimate(run: Summary, name: str, spread: RunSpread) -> Estimate | None:
    """Returns a phase of a run without the profiler; None where it was not timed so."""
    stats = run.unprofiled.trusted(name) if run.unprofiled else None
    if stats is None or stats.typical is None:
        return None
    figure, phase = Estimate.of_stats(stats), run.phase(name)
    if name == STEP and run.step:
        return figure.with_run_error(spread.of_step(run.step, figure.ms))
    busy = Estimate.of_values(phase.busy_values_ms).ms if phase else 0.0
    return figure.with_run_error(spread.of(busy, figure.ms - busy))  # timed as it is: synchronized


def _findings(before: Side, after: Side) -> tuple[FindingChange, ...] | None:
    """Returns the findings of both sides: gone, new, changed, then those that stay; the largest saving first."""
    tables = _common_findings(before), _common_findings(after)
    if tables[0] is None or tables[1] is None:
        return None
    changes = [FindingChange(tables[0].get(key), tables[1].get(key)) for key in dict.fromkeys((*tables[0], *tables[1]))]
    order = ("gone", "new", "changed", "stays")
    return tuple(sorted(changes, key=lambda change: (order.index(change.status), -change.finding.saves_ms_high)))


def _common_findings(side: Side) -> dict[str, Finding] | None:
    """Returns the findings that most of a side's runs have, with medians over these of what each saves.

    Runs that cannot tell findings do not count; None where none can.
    """
    of_runs = [run.findings for run in side.runs if run.findings is not None]
    by_id: defaultdict[str, list[Finding]] = defaultdict(list)
    for finding in chain.from_iterable(of_runs):
        by_id[finding.id].append(finding)
    common = {}
    for key, same in by_id.items():
        if 2 * len(same) > len(of_runs):
            common[key] = replace(
                same[0],
                saves_ms_low=statistics.median(finding.saves_ms_low for finding in same),
                saves_ms_high=statistics.median(finding.saves_ms_high for finding in same),
                saves_ms=statistics.median(finding.saves_ms for finding in same),
            )
    return common if of_runs else None
