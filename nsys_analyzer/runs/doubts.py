"""Unprofiled times that cannot be right: each with the reason, so that no verdict rests on it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from nsys_analyzer.analysis.summary.statistics import Stats
from nsys_analyzer.analysis.summary.summary import CaptureSummary, PhaseSummary

#: The phases that a time of several covers, where the capture has no range for it.
_PARTS = {
    "forward+backward": ("forward", "loss", "backward"),
    "step": ("forward", "loss", "backward", "optimizer"),
}
#: A share by which the same work may differ between two runs, whose clocks do.
_TOLERANCE = 0.03


def doubts_of(capture: CaptureSummary, times: Mapping[str, Stats]) -> dict[str, tuple[str, ...]]:
    """The reasons against each phase's unprofiled time, from the capture of the same run; only phases with any."""
    found = {phase: tuple(_reasons(stats, _profiled(capture, phase), capture)) for phase, stats in times.items()}
    return {phase: reasons for phase, reasons in found.items() if reasons}


def _profiled(capture: CaptureSummary, name: str) -> Sequence[PhaseSummary]:
    """The phase under the profiler, or the phases that make it; empty where one of these is not there."""
    if phase := capture.phase(name):
        return [phase]
    parts = [capture.phase(part) for part in _PARTS.get(name, ()) if part != "loss" or capture.phase("loss")]
    return [part for part in parts if part] if all(parts) else []


def _reasons(python: Stats, profiled: Sequence[PhaseSummary], capture: CaptureSummary) -> Iterator[str]:
    if python.mean is None:
        return
    if python.std is not None and python.std > python.mean:
        yield f"its deviation, {python.std:.3f} ms, is above its mean, as where warm-up is among the measured steps"
    if not profiled:
        return
    busy, wall = (_sum([getattr(phase, clock) for phase in profiled]) for clock in ("gpu_busy_ms", "wall_ms"))
    if not capture.on_cpu and _is_less(python, busy):
        cause = "another run, another unit, or the device was not synchronised"
        yield f"the GPU is busy for longer, {busy.mean:.3f} ms ({cause})"
    if all(map(capture.is_timed, profiled)) and _is_less(wall, python):
        yield f"under the profiler it takes less, {wall.mean:.3f} ms (another run, or another unit)"


def _sum(clocks: Sequence[Stats]) -> Stats:
    """The clocks of phases that follow each other as one, their deviations added."""
    return Stats(None, sum(clock.mean or 0.0 for clock in clocks), sum(clock.std or 0.0 for clock in clocks))


def _is_less(one: Stats, other: Stats) -> bool:
    """Whether a time is less than another by more than both deviations and the clocks explain."""
    if not one.mean or not other.mean:
        return False
    return other.mean - one.mean > (one.std or 0.0) + (other.std or 0.0) + _TOLERANCE * other.mean
