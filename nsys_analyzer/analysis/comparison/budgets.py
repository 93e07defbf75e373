"""Budgets: the most that a step, its phases, its kernels and its memory may take, and what they do take."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

import msgspec

from nsys_analyzer.analysis.comparison.change import CPU_SPREAD, Change, Estimate
from nsys_analyzer.analysis.comparison.compare import (
    RunSpread,
    estimate_parts,
    phase_busy,
    phase_wall,
    step_wall,
    unprofiled_estimate,
)
from nsys_analyzer.analysis.comparison.comparison import Budget, BudgetUnit, BudgetVerdict, Side
from nsys_analyzer.analysis.kernels.classes import known_classes
from nsys_analyzer.analysis.summary.summary import Summary
from nsys_analyzer.errors import ConfigurationError
from nsys_analyzer.system.strict_json import read_toml
from nsys_analyzer.trace.phase_names import STEP

Most = Annotated[float, msgspec.Meta(ge=0)]
_EXAMPLE = "step_ms = 40, or [classes_ms] and below it matmul = 25"
_LAUNCHES, _MEMORY = "launches", "peak memory"


class Budgets(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The most that each run may take in a step; of phases and of kernel classes by their names."""

    step_ms: Most | None = None
    launches: Most | None = None
    peak_memory_gib: Most | None = None
    phases_ms: dict[str, Most] = {}
    classes_ms: dict[str, Most] = {}


def read_budgets(path: Path) -> Budgets:
    """Returns what a TOML file says.

    Raises:
        ConfigurationError: it says something else.
    """
    budgets = read_toml(path, Budgets, _EXAMPLE)
    if unknown := budgets.classes_ms.keys() - known_classes():
        hint = f"There are: {', '.join(known_classes())}"
        raise ConfigurationError(f"{path}: there is no kernel class {min(unknown)!r}", hint)
    return budgets


def check_budgets(budgets: Budgets, side: Side, cpu_spread: float = CPU_SPREAD) -> Iterator[Budget]:
    """Yields each budget with what the runs of a side take of it.

    Of steps and phases that is the time without the profiler, where all of the runs were timed so.
    """
    spread = RunSpread(cpu_spread)
    of_timed = all(unprofiled_estimate(run, STEP, spread) for run in side.runs)
    most = {
        STEP: budgets.step_ms,
        _LAUNCHES: budgets.launches,
        _MEMORY: budgets.peak_memory_gib and budgets.peak_memory_gib * 2**30,
        **budgets.phases_ms,
        **{_of_class(name): ms for name, ms in budgets.classes_ms.items()},
    }
    of_runs = [_figures(run, spread, of_timed=of_timed) for run in side.runs]
    for what, limit in most.items():
        unit: BudgetUnit = "count" if what == _LAUNCHES else "bytes" if what == _MEMORY else "ms"
        if limit is not None and all(what in figures for figures in of_runs):
            figure = Estimate.of_runs([figures[what] for figures in of_runs])
            is_more = Change.of(Estimate(limit, None, 0.0), figure).is_change
            verdict: BudgetVerdict = (
                "kept" if figure.ms <= limit else "exceeded" if is_more else "above, perhaps by chance"
            )
            yield Budget(what, unit, limit, figure.ms, verdict)
        elif limit is not None:
            yield Budget(what, unit, limit, None, "not known")


def _of_class(name: str) -> str:
    return f"compute: {name}"


def _figures(run: Summary, spread: RunSpread, *, of_timed: bool) -> dict[str, Estimate]:
    """Returns all that a budget may be of, in one run."""
    figures: dict[str, Estimate] = {}
    if of_timed and run.unprofiled:
        times = {name: unprofiled_estimate(run, name, spread) for name in run.unprofiled.phases}
        figures = {name: figure for name, figure in times.items() if figure}
    elif run.step:
        figures = {
            p.phase: (phase_wall if p.synchronized else phase_busy)(p, spread) for p in run.phases if p.instances
        }
        figures[STEP] = step_wall(run.step, spread)
    if run.step:
        parts = estimate_parts(run.step, spread)
        figures |= {_of_class(one): parts.get(("compute", one), Estimate(0.0, None, 0.0)) for one in known_classes()}
        figures[_LAUNCHES] = Estimate(run.step.launches, None, 0.0)
    if run.unprofiled and run.unprofiled.peak_memory_bytes:
        figures[_MEMORY] = Estimate(run.unprofiled.peak_memory_bytes, None, 0.0)
    return figures
