"""The kernel attribution check: every kernel is counted once, in count and in time, and no figure is impossible."""

from __future__ import annotations

from nsys_analyzer.analysis.attribution.causality import CLOCK_ERROR_NS
from nsys_analyzer.analysis.ranges.phases import OTHER_STEP, STEP
from nsys_analyzer.analysis.summary.statistics import Stats
from nsys_analyzer.analysis.summary.summary import CaptureSummary
from nsys_analyzer.errors import NsysAnalyzerError

_ROUNDING = 1e-6


def check_attribution(summary: CaptureSummary) -> None:
    """Checks that every kernel is counted once, that no part holds more than its whole, and that times can be true.

    Raises:
        NsysAnalyzerError: a check fails: the figures are wrong.
    """
    coverage, whole = summary.coverage, summary.whole
    if coverage is None or whole is None:
        return
    leaves = [phase for phase in summary.phases if phase.phase not in (STEP, OTHER_STEP)]
    in_leaves = sum(phase.kernels_per_instance * phase.instances for phase in leaves)
    by_name = sum(row.ms_per_instance for row in whole.kernels)
    laws = {
        "attributed + unattributed kernels are all kernels": coverage.attributed + coverage.unattributed
        == sum(coverage.how.values())
        == whole.kernels_per_instance + coverage.in_warmup,
        "their times add up": _equal(coverage.attributed_ms + coverage.unattributed_ms, coverage.kernel_ms),
        "the kernels by name and those of warm-up take the time of all": _equal(
            by_name + coverage.warmup_ms, coverage.kernel_ms
        ),
        "phases hold no more than the ranges": in_leaves <= coverage.in_phases + _ROUNDING
        and coverage.in_warmup <= coverage.in_phases <= coverage.attributed + coverage.in_warmup,
        "phases hold no more than the whole capture": sum(phase.gpu_ms * phase.instances for phase in leaves)
        <= whole.gpu_ms * (1 + _ROUNDING) + _ROUNDING,
        "busy time fits into the span": all(_fits(p.gpu_busy_ms, p.gpu_span_ms) for p in (*summary.phases, whole)),
        "spans and wall times fit into the capture": all(
            clock.max is None or clock.max <= coverage.extent_ms + _ROUNDING
            for phase in (*summary.phases, whole)
            for clock in (phase.gpu_span_ms, phase.wall_ms)
        ),
        "no operation starts before its launch": (coverage.shortest_wait_ms or 0.0) >= -CLOCK_ERROR_NS / 1e6,
    }
    broken = [law for law, holds in laws.items() if not holds]
    if broken:
        raise NsysAnalyzerError(f"{summary.title}: it does not hold that {broken[0]}", "Please report this capture")


def _equal(one: float, other: float) -> bool:
    return abs(one - other) <= _ROUNDING * max(1.0, abs(other))


def _fits(part: Stats, whole: Stats) -> bool:
    return part.max is None or whole.max is None or part.max <= whole.max + _ROUNDING
