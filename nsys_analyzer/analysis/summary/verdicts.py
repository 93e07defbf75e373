"""GPU busy ÷ wall: whether a phase keeps the GPU busy, or the GPU waits for the CPU.

A profiler slows the CPU, not the kernels: GPU busy is taken from the trace, wall time from an unprofiled run. Without
one, busy ÷ profiled wall is the lower bound, and busy ÷ (wall − the profiler's estimated cost) about the upper one.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:  # the help of `bench` imports this module, and must not wait for numpy
    from nsys_analyzer.analysis.summary.profiler_cost import ProfilerCost
    from nsys_analyzer.analysis.summary.summary import CaptureSummary, PhaseSummary

#: From this share of the wall on, busy, a phase is GPU-bound; from this share on, idle, the GPU waits for the CPU.
GPU_BOUND, IDLE = 0.9, 0.3
#: An unprofiled time that is shorter than GPU busy by more than this was not of the same work.
_TOLERANCE = 0.02

Verdict = Literal["GPU-bound", "GPU waits", "neither", "undecided"]


@dataclass(frozen=True)
class BusyShare:
    """GPU busy ÷ wall of one phase.

    Attributes:
        unprofiled: whether the wall time is of an unprofiled run.
        low, high: the share; equal where the wall time is unprofiled. ``high`` is 1 where nothing bounds it.
    """

    busy_ms: float
    wall_ms: float
    unprofiled: bool
    low: float
    high: float
    profiler_cost: ProfilerCost | None = None

    @property
    def verdict(self) -> Verdict:
        """The verdict of both ends of the share; "undecided" where these differ."""
        low, high = _verdict(self.low), _verdict(self.high)
        return low if low == high else "undecided"

    @property
    def profiler_ms(self) -> float | None:
        """The most that the profiler can have added: its estimated cost, and never more than the GPU was idle."""
        high = self.profiler_cost.high_ms if self.profiler_cost else None
        return None if high is None else min(high, self.wall_ms - self.busy_ms)


def busy_share(capture: CaptureSummary, phase: PhaseSummary) -> BusyShare | None:
    """The share of one phase's time in which the GPU works; None on a CPU, and without a wall time that measures it."""
    busy, wall = phase.gpu_busy_ms.median, phase.wall_ms.median
    if capture.on_cpu or busy is None:
        return None
    unprofiled = capture.unprofiled.trusted_ms(phase.phase) if capture.unprofiled else None
    if unprofiled and busy <= unprofiled * (1 + _TOLERANCE):
        share = min(busy / unprofiled, 1.0)
        return BusyShare(busy, unprofiled, True, share, share)
    if not capture.is_timed(phase) or not wall:
        return None
    cost = phase.profiler_cost
    without = max(wall - cost.high_ms, busy) if cost and cost.high_ms is not None else busy
    low, high = min(busy / wall, 1.0), min(busy / without, 1.0) if without else 0.0
    return BusyShare(min(busy, wall), wall, False, low, high, cost)


def _verdict(share: float) -> Verdict:
    if share >= GPU_BOUND:
        return "GPU-bound"
    return "GPU waits" if 1 - share >= IDLE else "neither"
