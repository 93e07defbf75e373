"""Compares two sides: the step and its parts, kernels, phases and findings."""

from __future__ import annotations

import re
import statistics
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import chain, zip_longest
from typing import TypeAlias, TypeVar

from nsys_analyzer.analysis.comparison.change import CPU_SPREAD, Change, Estimate, SerialCorrelation
from nsys_analyzer.analysis.comparison.comparison import (
    Comparison,
    FindingChange,
    KernelChange,
    OperatorChange,
    PartChange,
    PhaseChange,
    Side,
    StepChange,
    compare_settings,
    find_obstacles,
)
from nsys_analyzer.analysis.comparison.estimates import (
    RunSpread,
    estimate_joules,
    estimate_parts,
    estimate_phase,
    estimate_phase_busy,
    estimate_step,
    estimate_unprofiled,
)
from nsys_analyzer.analysis.findings.finding import Finding
from nsys_analyzer.analysis.kernels.class_rules import MATMUL
from nsys_analyzer.analysis.operators.account import OperatorRow, fold_rows
from nsys_analyzer.analysis.steps.step import KernelTime, StepSummary
from nsys_analyzer.analysis.summary.summary import PhaseSummary, Summary
from nsys_analyzer.trace.phase_names import OTHER_STEP, STEP

#: The name and the class of a kernel.
_KernelKey: TypeAlias = "tuple[str, str]"
_Timed = TypeVar("_Timed", StepSummary, PhaseSummary)
#: The layout in the names of cuBLAS and CUTLASS: whether each operand, and with a third letter the result, is
#: transposed (t) or not (n). For example ``sm80_xmma_gemm_f32f32_f32f32_f32_tn_n_tilesize64x64x8`` and
#: ``nvjet_sm90_tst_96x64_64x10_1x2_h_bz_TNN``.
_MATMUL_LAYOUT = re.compile(r"_([nt]{2})[nt]?(?![a-z0-9])", re.IGNORECASE)
#: A size in the description of an operator's shapes.
_SIZE = re.compile(r"\d+")


def compare(before: Side, after: Side, cpu_spread: float = CPU_SPREAD) -> Comparison:
    """Returns what changed from one side to the other.

    Args:
        before, after: the sides.
        cpu_spread: the standard deviation from run to run of the time in which the GPU waits for the program, as a
            share of that time. It is not used for a side with several runs, whose own variation is measured.
    """
    spread = RunSpread(cpu_spread)
    return Comparison(
        before,
        after,
        compare_settings(before, after),
        _compare_steps(before, after, spread),
        _compare_unprofiled(before, after, STEP, spread),
        tuple(_compare_phases(before, after, spread)),
        _compare_findings(before, after),
        _compare_operators(before, after),
        find_obstacles(before, after),
        [*map(_make_fingerprint, before.runs)] == [*map(_make_fingerprint, after.runs)],
        joules=_compare_joules(before, after),
    )


def _make_fingerprint(run: Summary) -> tuple[object, ...]:
    """Returns figures that identify a capture: no two runs agree in all of them."""
    phases = [(phase.phase, phase.wall_values_ms, phase.busy_values_ms) for phase in run.phases]
    return run.pid, run.configuration, run.run, run.step, phases, run.unprofiled


# --- the step


def _compare_steps(before: Side, after: Side, spread: RunSpread) -> StepChange | None:
    """Returns the change of the step under the profiler and of its parts; None if a side has no step."""
    sides = [[run.step for run in side.runs if run.step] for side in (before, after)]
    if not all(sides):
        return None

    def estimate_busy(step: StepSummary) -> Estimate:
        """Estimates the time in which the GPU works in a step."""
        return Estimate.of_values(step.busy_values_ms, step.instances).with_run_error(spread.of_busy(step))

    wall, wall_correlation = _compare_times(
        sides, lambda step: step.wall_values_ms, lambda step: estimate_step(step, spread)
    )
    busy, busy_correlation = _compare_times(sides, lambda step: step.busy_values_ms, estimate_busy)
    kernels = _compare_kernels(sides, busy_correlation)
    parts_of_sides = [[(step, estimate_parts(step, spread)) for step in side] for side in sides]
    changes = []
    for key in dict.fromkeys(key for side in parts_of_sides for _, parts_of_step in side for key in parts_of_step):
        kind, name = key
        # A run without the part has 0 in each step.
        estimates = [
            [parts_of_step.get(key, Estimate.zero(step.instances)) for step, parts_of_step in side]
            for side in parts_of_sides
        ]
        change = _compare_estimates(estimates, busy_correlation if kind == "compute" else wall_correlation)
        kernels_of_class = tuple(kernel for kernel_class, kernel in kernels if key == ("compute", kernel_class))
        changes.append(PartChange(kind, name, change, kernels_of_class))
    launches = (sum(step.launches for step in side) / len(side) for side in sides)
    return StepChange(wall, busy, tuple(sorted(changes, key=lambda part: -abs(part.change.ms))), *launches)


def _compare_estimates(sides: Iterable[Sequence[Estimate]], correlation: SerialCorrelation | None = None) -> Change:
    """Returns the change between two sides. Each side has the estimates of its runs, whose mean is compared."""
    before, after = map(Estimate.of_runs, sides)
    return Change.of(before, after, correlation)


def _compare_times(
    sides: Sequence[Sequence[_Timed]],
    values: Callable[[_Timed], Sequence[float]],
    estimate: Callable[[_Timed], Estimate],
) -> tuple[Change, SerialCorrelation | None]:
    """Returns the change of a time of steps or of a phase, and the serial correlation of its instances.

    The correlation is used only if each side is a single run. The error of several runs follows from their variation.
    """
    runs = [values(run) for side in sides for run in side]
    correlation = SerialCorrelation.of(*runs) if len(runs) == len(sides) else None
    return _compare_estimates(([estimate(run) for run in side] for side in sides), correlation), correlation


# --- kernels


def _compare_kernels(
    sides: Sequence[Sequence[StepSummary]], correlation: SerialCorrelation | None
) -> list[tuple[str, KernelChange]]:
    """Returns the changes of all computing kernels, each with the kernel's class, the largest change first."""
    tables = [_average_kernels(side) for side in sides]
    changes = []
    for pair in match_kernels(*([kernel for kernel, _ in table.values()] for table in tables)):
        estimates = [
            table[kernel.name, kernel.kernel_class][1]
            if kernel
            else Estimate.of_runs([Estimate.zero(step.instances) for step in side])
            for side, table, kernel in zip(sides, tables, pair, strict=True)
        ]
        before, after = ((kernel.name, kernel.launches) if kernel else (None, 0.0) for kernel in pair)
        kernel_class = next(kernel.kernel_class for kernel in pair if kernel)
        change = Change.of(estimates[0], estimates[1], correlation)
        changes.append((kernel_class, KernelChange(before[0], after[0], before[1], after[1], change)))
    return sorted(changes, key=lambda change: -abs(change[1].change.ms))


def _average_kernels(steps: Sequence[StepSummary]) -> dict[_KernelKey, tuple[KernelTime, Estimate]]:
    """Returns each kernel of the given runs, with the mean of its time over the runs."""
    tables = [{(kernel.name, kernel.kernel_class): kernel for kernel in step.kernels} for step in steps]
    means: dict[_KernelKey, tuple[KernelTime, Estimate]] = {}
    for key in dict.fromkeys(chain.from_iterable(tables)):
        estimates, launches, operator = [], 0.0, ""
        for table, step in zip(tables, steps, strict=True):
            kernel, n = table.get(key), step.instances
            operator = operator or (kernel.operator if kernel else "")
            launches += kernel.launches / len(steps) if kernel else 0.0
            estimate = Estimate.of_mean(kernel.ms, kernel.std_ms, n) if kernel else Estimate.zero(n)
            estimates.append(estimate.with_run_error(RunSpread.of_kernels(step, estimate.ms)))
        mean_estimate = Estimate.of_runs(estimates)
        means[key] = KernelTime(*key, launches, mean_estimate.ms, None, operator), mean_estimate
    return means


def match_kernels(
    before: Sequence[KernelTime], after: Sequence[KernelTime]
) -> tuple[tuple[KernelTime | None, KernelTime | None], ...]:
    """Pairs the kernels of both runs by name and class, then by class, operator, layout and launches per step.

    A matmul in another precision or with another tile is a kernel with another name, but it is launched equally often
    and has the same layout. The layout (which operands are transposed) distinguishes a matmul from the matmuls of its
    gradients. If several kernels match, they are paired in the order of their times. The grid is not compared: a
    persistent kernel has about one block per multiprocessor for any shape, and other grids depend on the tile and on
    the split of the sum.

    The operators that launch the kernels are compared if both runs know their operators. A kernel without a counterpart
    is paired with None.
    """
    has_operators = all(any(kernel.operator for kernel in kernels) for kernels in (before, after))
    unpaired = {(kernel.name, kernel.kernel_class): kernel for kernel in after}
    pairs_by_name = [(kernel, unpaired.pop((kernel.name, kernel.kernel_class), None)) for kernel in before]
    kernels_by_work: dict[object, tuple[list[KernelTime], list[KernelTime]]] = defaultdict(lambda: ([], []))
    for side, kernels in enumerate(([kernel for kernel, same in pairs_by_name if not same], unpaired.values())):
        for kernel in sorted(kernels, key=lambda kernel: -kernel.ms):
            match = _MATMUL_LAYOUT.search(kernel.name) if kernel.kernel_class == MATMUL else None
            layout, operator = match[1].lower() if match else "", kernel.operator if has_operators else ""
            kernels_by_work[kernel.kernel_class, operator, layout, round(kernel.launches, 2)][side].append(kernel)
    pairs = (pair for kernels in kernels_by_work.values() for pair in zip_longest(*kernels))
    return (*(pair for pair in pairs_by_name if pair[1]), *pairs)


# --- operators


def _compare_operators(before: Side, after: Side) -> tuple[OperatorChange, ...] | None:
    """Returns the operators whose kernel time differs, the largest change first; None if a side has no account.

    Operators are paired by name and shapes. A remaining operator may have other shapes on the other side: it is paired
    with the most similar shapes of an operator with the same name and number of calls. Lines are not compared, because
    they move when a program is edited.
    """
    counts, tables = [], []
    for side in (before, after):
        accounts = [run.account for run in side.runs if run.account]
        rows = fold_rows((row for account in accounts for row in account.operators), _operator_key)
        counts.append(len(accounts))
        tables.append({_operator_key(row): row for row in rows})
    if not all(counts):
        return None
    operator_pairs: list[tuple[OperatorRow | None, OperatorRow | None]] = []
    operator_pairs += [(tables[0].pop(key), tables[1].pop(key)) for key in [*tables[0]] if key in tables[1]]
    unpaired = sorted(tables[1].values(), key=lambda row: -row.ms)
    for row in sorted(tables[0].values(), key=lambda row: -row.ms):
        calls = row.calls / counts[0]
        similar_rows = [
            other for other in unpaired if (other.operator, other.calls / counts[1]) == (row.operator, calls)
        ]
        counterpart = max(similar_rows, key=lambda other: _count_equal_sizes(row, other), default=None)
        operator_pairs.append((row, counterpart))
        unpaired = [other for other in unpaired if other is not counterpart]
    operator_pairs += [(None, row) for row in unpaired]
    changes = []
    for first, second in operator_pairs:
        before_ms, after_ms = first.ms / counts[0] if first else 0.0, second.ms / counts[1] if second else 0.0
        changes.append(
            OperatorChange(
                operator=next(row.operator for row in (first, second) if row),
                before_shapes=first.shapes if first else None,
                after_shapes=second.shapes if second else None,
                before_calls=first.calls / counts[0] if first else 0.0,
                after_calls=second.calls / counts[1] if second else 0.0,
                before_ms=before_ms,
                after_ms=after_ms,
                ms=after_ms - before_ms,
            )
        )
    return tuple(sorted((change for change in changes if change.ms), key=lambda change: -abs(change.ms)))


def _count_equal_sizes(row: OperatorRow, other: OperatorRow) -> int:
    """Returns the number of sizes that two descriptions of shapes have in common, by position."""
    sizes = zip(_SIZE.findall(row.shapes), _SIZE.findall(other.shapes), strict=False)
    return sum(size == other_size for size, other_size in sizes)


def _operator_key(row: OperatorRow) -> tuple[str, str]:
    return row.operator, row.shapes


# --- phases, times without the profiler, findings


def _compare_phases(before: Side, after: Side, spread: RunSpread) -> Iterator[PhaseChange]:
    """Yields the phases that every run has, except the step."""
    for name in (phase.phase for phase in before.runs[0].phases if phase.phase not in (STEP, OTHER_STEP)):
        sides = [[phase for run in side.runs if (phase := run.phase(name))] for side in (before, after)]
        if all(len(phases) == len(side.runs) for phases, side in zip(sides, (before, after), strict=True)):
            wall, _ = _compare_times(
                sides, lambda phase: phase.wall_values_ms, lambda phase: estimate_phase(phase, spread)
            )
            busy, _ = _compare_times(
                sides, lambda phase: phase.busy_values_ms, lambda phase: estimate_phase_busy(phase, spread)
            )
            synchronized = all(phase.synchronized for side in sides for phase in side)
            unprofiled = _compare_unprofiled(before, after, name, spread)
            yield PhaseChange(name, unprofiled, wall, busy, synchronized)


def _compare_unprofiled(before: Side, after: Side, phase: str, spread: RunSpread) -> Change | None:
    """Returns the change of a phase's time without the profiler; None if it was not measured on both sides."""
    sides = [
        [estimate for run in side.runs if (estimate := estimate_unprofiled(run, phase, spread))]
        for side in (before, after)
    ]
    return _compare_estimates(sides) if all(sides) else None


def _compare_joules(before: Side, after: Side) -> Change | None:
    """Returns the change of the energy of a step; None if it was not measured for all runs of both sides."""
    sides = [[estimate for run in side.runs if (estimate := estimate_joules(run))] for side in (before, after)]
    are_known = all(len(side) == len(runs) for side, runs in zip(sides, (before.runs, after.runs), strict=True))
    return _compare_estimates(sides) if are_known else None


def _compare_findings(before: Side, after: Side) -> tuple[FindingChange, ...] | None:
    """Compares the findings of both sides. Findings that are gone come first, then new, changed and unchanged ones."""
    tables = _find_common_findings(before), _find_common_findings(after)
    if tables[0] is None or tables[1] is None:
        return None
    changes = [FindingChange(tables[0].get(key), tables[1].get(key)) for key in dict.fromkeys((*tables[0], *tables[1]))]
    order = ("gone", "new", "changed", "stays")
    return tuple(sorted(changes, key=lambda change: (order.index(change.status), -change.finding.saves_ms_high)))


def _find_common_findings(side: Side) -> dict[str, Finding] | None:
    """Returns the findings that more than half of a side's runs have, with the median of their savings.

    Runs whose findings are not known are left out. Returns None if no run has known findings.
    """
    findings_by_run = [run.findings for run in side.runs if run.findings is not None]
    findings_by_id: defaultdict[str, list[Finding]] = defaultdict(list)
    for finding in chain.from_iterable(findings_by_run):
        findings_by_id[finding.id].append(finding)
    common_findings = {}
    for key, equal_findings in findings_by_id.items():
        if 2 * len(equal_findings) > len(findings_by_run):
            common_findings[key] = replace(
                equal_findings[0],
                saves_ms_low=statistics.median(finding.saves_ms_low for finding in equal_findings),
                saves_ms_high=statistics.median(finding.saves_ms_high for finding in equal_findings),
                saves_ms=statistics.median(finding.saves_ms for finding in equal_findings),
            )
    return common_findings if findings_by_run else None
