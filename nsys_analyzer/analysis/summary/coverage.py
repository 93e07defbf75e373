"""The kernel attribution check: every kernel is counted once, in count and in time, and no figure is impossible."""

from __future__ import annotations

import math
from functools import partial

from nsys_analyzer.analysis.attribution.causality import CLOCK_ERROR_NS
from nsys_analyzer.analysis.summary.statistics import Stats
from nsys_analyzer.analysis.summary.summary import CaptureSummary
from nsys_analyzer.errors import NsysAnalyzerError

_ROUNDING = 1e-6
_equal = partial(math.isclose, rel_tol=_ROUNDING, abs_tol=_ROUNDING)


def check_attribution(summary: CaptureSummary) -> None:
    """Checks that every kernel is counted once, that no part holds more than its whole, and that times can be true.

    Raises:
        NsysAnalyzerError: a check fails: the figures are wrong.
    """
    coverage, whole = summary.coverage, summary.whole
    if coverage is None or whole is None:
        return
    in_leaves = sum(phase.kernels_per_instance * phase.instances for phase in summary.leaf_phases)
    gpu_ms_in_leaves = sum(phase.gpu_ms * phase.instances for phase in summary.leaf_phases)
    by_name_ms = sum(row.ms_per_instance for row in whole.kernels)
    phases = (*summary.phases, whole)
    laws = {
        "attributed + unattributed kernels are all kernels": coverage.attributed + coverage.unattributed
        == sum(coverage.how.values())
        == whole.kernels_per_instance + coverage.in_warmup,
        "their times add up": _equal(coverage.attributed_ms + coverage.unattributed_ms, coverage.kernel_ms),
        "kernels by name and in warm-up take the time of all": _equal(
            by_name_ms + coverage.warmup_ms, coverage.kernel_ms
        ),
        "phases hold no more than the ranges": in_leaves <= coverage.in_phases + _ROUNDING
        and coverage.in_warmup <= coverage.in_phases <= coverage.attributed + coverage.in_warmup,
        "phases hold no more than the whole capture": gpu_ms_in_leaves <= whole.gpu_ms * (1 + _ROUNDING) + _ROUNDING,
        "busy time fits into the span": all(_fits(phase.gpu_busy_ms, phase.gpu_span_ms.max) for phase in phases),
        "spans fit into the capture": all(_fits(phase.gpu_span_ms, coverage.extent_ms) for phase in phases),
        "wall times fit into the capture": all(_fits(phase.wall_ms, coverage.extent_ms) for phase in phases),
        "no operation starts before its launch": (coverage.shortest_wait_ms or 0.0) >= -CLOCK_ERROR_NS / 1e6,
    }
    broken = [law for law, holds in laws.items() if not holds]
    if broken:
        raise NsysAnalyzerError(f"{summary.title}: it does not hold that {broken[0]}", "Please report this capture")


def _fits(part: Stats, whole_ms: float | None) -> bool:
    return part.max is None or whole_ms is None or part.max <= whole_ms + _ROUNDING
