"""The time that the profiler adds to each phase, and where it shows."""

from __future__ import annotations

from collections.abc import Sequence

from nsys_analyzer.analysis.summary.summary import CaptureSummary, PhaseSummary
from nsys_analyzer.report.units import signed_percent

#: A share of its time by which the profiler must lengthen a phase before its cost is said to show.
_COSTLY = 0.05


def overhead(capture: CaptureSummary, phases: Sequence[PhaseSummary]) -> str:
    """Profiled against unprofiled time of these phases in a sentence, and why they differ."""
    costs = _costs(capture, phases)
    if costs:
        figures = ", ".join(f"{name} {signed_percent(cost)}" for name, cost in costs.items())
        return f"Time under the profiler against the time without it: {figures}; {_reason(capture, phases, costs)}."
    if not any(phase.python_ms for phase in phases):
        return "The CSV has no timing, or no single one, for this configuration."
    if capture.unprofiled and capture.unprofiled.doubts:
        return "The unprofiled timing cannot be right (see the warnings), so it is compared with nothing."
    if capture.ranges_on_gpu:
        return "The trace has ranges of the GPU alone, so the unprofiled timing has nothing to be compared with."
    return "Nothing synchronises under the profiler, so the unprofiled timing has nothing to be compared with."


def _costs(capture: CaptureSummary, phases: Sequence[PhaseSummary]) -> dict[str, float]:
    """Wall ÷ python − 1 of each phase that has both, and of forward and backward together; no doubtful times."""
    unprofiled = capture.unprofiled
    if unprofiled is None:
        return {}
    compared = [(phase.phase, phase.wall_ms.typical) for phase in phases if capture.is_timed(phase)]
    both = [capture.phase(name) for name in ("forward", "loss", "backward")]
    if both[-1] and capture.is_timed(both[-1]):
        compared.append(("forward+backward", sum(phase.wall_ms.typical or 0.0 for phase in both if phase)))
    python = {name: unprofiled.trusted_ms(name) for name, _ in compared}
    return {name: wall / time - 1 for name, wall in compared if wall and (time := python[name])}


def _reason(capture: CaptureSummary, phases: Sequence[PhaseSummary], costs: dict[str, float]) -> str:
    if max(costs.values()) <= 0:
        return "no cost of tracing shows"
    if not any(_exceeds_spread(phase) for phase in phases) and "forward+backward" not in costs:
        return "the times spread by more than they differ, so no cost of tracing can be told"
    if capture.on_cpu:
        return "tracing adds a cost to every operator"
    if max(costs.values()) <= _COSTLY:
        return "the GPU's work hides most of what tracing adds on the CPU"
    return "tracing adds a cost to every API call and range; a GPU with queued work hides it"


def _exceeds_spread(phase: PhaseSummary) -> bool:
    """Whether the two times of a phase differ by more than their deviations together."""
    python, wall = phase.python_ms, phase.wall_ms
    if python is None or python.mean is None or wall.mean is None:
        return False
    return abs(wall.mean - python.mean) > (python.std or 0.0) + (wall.std or 0.0)
