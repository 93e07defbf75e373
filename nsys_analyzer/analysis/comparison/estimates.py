"""Estimates the times of a run, with their spread between runs, and checks them against budgets."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, TypeAlias

import msgspec

from nsys_analyzer.analysis.comparison.change import CPU_SPREAD, GPU_SPREAD, PAUSES_SPREAD, Change, Estimate
from nsys_analyzer.analysis.comparison.comparison import Budget, BudgetUnit, BudgetVerdict, PartKind, Side
from nsys_analyzer.analysis.kernels.classes import known_classes
from nsys_analyzer.analysis.steps.step import StepSummary
from nsys_analyzer.analysis.summary.summary import PhaseSummary, Summary
from nsys_analyzer.errors import ConfigurationError
from nsys_analyzer.system.strict_json import read_toml
from nsys_analyzer.trace.phase_names import STEP

#: A part of the step: its kind, and its kernel class or cause.
PartKey: TypeAlias = "tuple[PartKind, str]"
BudgetLimit = Annotated[float, msgspec.Meta(ge=0)]
_BUDGET_EXAMPLE = "step_ms = 40, or [classes_ms] and below it matmul = 25"
_LAUNCHES_BUDGET, _MEMORY_BUDGET, _ENERGY_BUDGET = "launches", "peak memory", "energy"
_UNIT_OF_BUDGET: dict[str, BudgetUnit] = {_LAUNCHES_BUDGET: "count", _MEMORY_BUDGET: "bytes", _ENERGY_BUDGET: "J"}
#: The standard deviation of the energy of a step between runs of one program, as a share. It is assumed: the power of
#: a GPU grows by a few percent with its temperature.
_ENERGY_SPREAD = 0.02


@dataclass(frozen=True)
class RunSpread:
    """Estimates the standard deviation of a program's times from run to run, in ms.

    The GPU's work varies little. The time in which the GPU waits for the program varies much.

    Attributes:
        cpu: the standard deviation of the time that the GPU waits for the program, as a share of that time.
    """

    cpu: float

    def of(self, gpu_ms: float, waiting_ms: float, pauses_ms: float = 0.0) -> float:
        """Estimates the spread of a time that consists of GPU work, waiting for the program, and pauses of the GPU."""
        return math.hypot(GPU_SPREAD * gpu_ms, PAUSES_SPREAD * pauses_ms, self.cpu * max(waiting_ms, 0.0))

    def of_step(self, step: StepSummary, ms: float) -> float:
        """Estimates the spread of a median step of the given length, with or without the profiler."""
        compute, pauses = step.usual_compute_ms, step.own_pauses_ms
        return self.of(compute, ms - compute - pauses, pauses)

    def of_busy(self, step: StepSummary) -> float:
        """Estimates the spread of the GPU's work in a median step."""
        compute = step.usual_compute_ms
        return self.of(compute, step.median_busy_ms - compute)

    @staticmethod
    def of_kernels(step: StepSummary, ms: float) -> float:
        """Estimates the spread of the kernels that take ``ms`` of a step, assuming that kernels vary independently."""
        return GPU_SPREAD * math.sqrt(ms * step.compute_ms)


def estimate_step(step: StepSummary, spread: RunSpread) -> Estimate:
    """Returns the length of a run's step under the profiler."""
    estimate = replace(Estimate.of_values(step.wall_values_ms, step.instances), ms=step.total_ms)
    return estimate.with_run_error(spread.of_step(step, estimate.ms))


def estimate_parts(step: StepSummary, spread: RunSpread) -> dict[PartKey, Estimate]:
    """Returns the parts of a step, which add up to its mean length."""
    n = step.instances
    parts: dict[PartKey, Estimate] = {}
    for kernels in step.classes:
        estimate = Estimate.of_mean(kernels.ms, kernels.std_ms, n)
        parts["compute", kernels.kernel_class] = estimate.with_run_error(spread.of_kernels(step, kernels.ms))
    if ms := step.exposed_copy_ms:
        estimate = Estimate.of_mean(ms, step.exposed_copy_std_ms, n)
        parts["exposed copies", ""] = estimate.with_run_error(spread.of(0.0, ms))
    if ms := step.exposed_communication_ms:
        estimate = Estimate.of_mean(ms, step.exposed_communication_std_ms, n)
        parts["exposed communication", ""] = estimate.with_run_error(spread.of(0.0, ms))
    for cause in step.causes:
        pauses_ms = step.own_pauses_ms if cause.cause == "launch" else 0.0
        estimate = Estimate.of_mean(cause.ms, cause.std_ms, n)
        parts["idle", cause.cause] = estimate.with_run_error(spread.of(0.0, cause.ms - pauses_ms, pauses_ms))
    return parts


def estimate_phase(phase: PhaseSummary, spread: RunSpread) -> Estimate:
    """Returns the length of a run's phase under the profiler."""
    # If the program does not wait for the GPU work of a phase, the phase lasts as long as launching the work.
    estimate = Estimate.of_values(phase.wall_values_ms, phase.instances)
    busy_ms = Estimate.of_values(phase.busy_values_ms).ms if phase.synchronized else 0.0
    return estimate.with_run_error(spread.of(busy_ms, estimate.ms - busy_ms))


def estimate_phase_busy(phase: PhaseSummary, spread: RunSpread) -> Estimate:
    """Estimates the time in which the GPU works in a phase of a run."""
    estimate = Estimate.of_values(phase.busy_values_ms, phase.instances)
    return estimate.with_run_error(spread.of(estimate.ms, 0.0))


def estimate_unprofiled(run: Summary, name: str, spread: RunSpread) -> Estimate | None:
    """Returns the time of a run's phase without the profiler; None if it was not measured."""
    stats = run.unprofiled.trusted(name) if run.unprofiled else None
    if stats is None or stats.typical is None:
        return None
    estimate, phase = Estimate.of_stats(stats), run.phase(name)
    if name == STEP and run.step:
        return estimate.with_run_error(spread.of_step(run.step, estimate.ms))
    busy_ms = Estimate.of_values(phase.busy_values_ms).ms if phase else 0.0
    # The time of a phase includes its GPU work, because programs synchronize before they read the clock.
    return estimate.with_run_error(spread.of(busy_ms, estimate.ms - busy_ms))


def estimate_joules(run: Summary) -> Estimate | None:
    """Returns the energy of a run's step in J; None if it was not measured.

    The largest error by the updates of the counter counts as two standard errors.
    """
    energy = run.energy
    if energy is None:
        return None
    return Estimate(energy.joules, energy.steps, energy.error_joules / 2, _ENERGY_SPREAD * energy.joules)


# --- budgets


class Budgets(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The upper limits of the quantities of a step. Limits of phases and of kernel classes are keyed by name."""

    step_ms: BudgetLimit | None = None
    launches: BudgetLimit | None = None
    peak_memory_gib: BudgetLimit | None = None
    step_joules: BudgetLimit | None = None
    phases_ms: dict[str, BudgetLimit] = {}
    classes_ms: dict[str, BudgetLimit] = {}


def read_budgets(path: Path) -> Budgets:
    """Reads budgets from a TOML file.

    Raises:
        ConfigurationError: the file cannot be read, or contains an unknown key or an invalid value.
    """
    budgets = read_toml(path, Budgets, _BUDGET_EXAMPLE)
    if unknown_classes := budgets.classes_ms.keys() - known_classes():
        hint = f"There are: {', '.join(known_classes())}"
        raise ConfigurationError(f"{path}: there is no kernel class {min(unknown_classes)!r}", hint)
    return budgets


def check_budgets(budgets: Budgets, side: Side, cpu_spread: float = CPU_SPREAD) -> Iterator[Budget]:
    """Yields each budget with its value, which is the mean over the runs of a side.

    The value of the step or of a phase is the time without the profiler if it was measured for all runs.
    """
    spread = RunSpread(cpu_spread)
    are_timed = all(estimate_unprofiled(run, STEP, spread) for run in side.runs)
    limits = {
        STEP: budgets.step_ms,
        _LAUNCHES_BUDGET: budgets.launches,
        _MEMORY_BUDGET: budgets.peak_memory_gib and budgets.peak_memory_gib * 2**30,
        _ENERGY_BUDGET: budgets.step_joules,
        **budgets.phases_ms,
        **{_name_class_budget(name): ms for name, ms in budgets.classes_ms.items()},
    }
    estimates_by_run = [_estimate_quantities(run, spread, use_unprofiled=are_timed) for run in side.runs]
    for quantity, limit in limits.items():
        unit = _UNIT_OF_BUDGET.get(quantity, "ms")
        if limit is not None and all(quantity in estimates for estimates in estimates_by_run):
            estimate = Estimate.of_runs([estimates[quantity] for estimates in estimates_by_run])
            is_exceeded = Change.of(Estimate(limit, None, 0.0), estimate).is_change
            verdict: BudgetVerdict = (
                "kept" if estimate.ms <= limit else "exceeded" if is_exceeded else "above, perhaps by chance"
            )
            yield Budget(quantity, unit, limit, estimate.ms, verdict)
        elif limit is not None:
            yield Budget(quantity, unit, limit, None, "not known")


def _name_class_budget(kernel_class: str) -> str:
    return f"compute: {kernel_class}"


def _estimate_quantities(run: Summary, spread: RunSpread, *, use_unprofiled: bool) -> dict[str, Estimate]:
    """Returns every quantity of a run that a budget can limit."""
    estimates: dict[str, Estimate] = {}
    if use_unprofiled and run.unprofiled:
        times = {name: estimate_unprofiled(run, name, spread) for name in run.unprofiled.phases}
        estimates = {name: estimate for name, estimate in times.items() if estimate}
    elif run.step:
        estimates = {
            phase.phase: (estimate_phase if phase.synchronized else estimate_phase_busy)(phase, spread)
            for phase in run.phases
            if phase.instances
        }
        estimates[STEP] = estimate_step(run.step, spread)
    if run.step:
        parts = estimate_parts(run.step, spread)
        zero_estimate = Estimate(0.0, None, 0.0)
        estimates |= {_name_class_budget(name): parts.get(("compute", name), zero_estimate) for name in known_classes()}
        estimates[_LAUNCHES_BUDGET] = Estimate(run.step.launches, None, 0.0)
    if run.unprofiled and run.unprofiled.peak_memory_bytes:
        estimates[_MEMORY_BUDGET] = Estimate(run.unprofiled.peak_memory_bytes, None, 0.0)
    if joules := estimate_joules(run):
        estimates[_ENERGY_BUDGET] = joules
    return estimates
