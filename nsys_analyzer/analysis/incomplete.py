"""Instances of phases that a capture shows in part only."""

from __future__ import annotations

import numpy as np

from nsys_analyzer.trace.arrays import Bools, Ints
from nsys_analyzer.trace.columns import LAUNCH, Launches, Ranges, process_of
from nsys_analyzer.trace.trace import Trace


def incomplete_instances(trace: Trace, lost: Ints, process: Ints, picked: Ranges) -> Bools:
    """Instances that lack kernels they launched, or that end with an allocation that failed."""
    launched = trace.launches.select(trace.launches.call == LAUNCH)
    lacking = _count(trace.launches.select(lost), process, picked.start, picked.end) > 0
    failed = trace.failed_allocations
    if not len(failed.start):
        return lacking
    last_failure = _last_before(failed, process, picked.end)
    fatal = (last_failure >= picked.start) & (_count(launched, process, last_failure, picked.end) == 0)
    incomplete: Bools = lacking | fatal
    return incomplete


def _count(calls: Launches, process: Ints, start: Ints, end: Ints) -> Ints:
    """How many of the calls of a process start in each interval."""
    return _rank(calls, process, end) - _rank(calls, process, start)


def _rank(calls: Launches, process: Ints, time: Ints) -> Ints:
    result = np.zeros(len(time), np.int64)
    for one in np.unique(process) if len(calls.start) else ():
        mine = np.sort(calls.start[process_of(calls.thread) == one])
        result[process == one] = np.searchsorted(mine, time[process == one])
    return result


def _last_before(calls: Launches, process: Ints, time: Ints) -> Ints:
    """The start of the last call of a process before a time; far in the past where there is none."""
    result = np.full(len(time), -(2**62), np.int64)
    for one in np.unique(process):
        mine = np.sort(calls.start[process_of(calls.thread) == one])
        at = np.searchsorted(mine, time) - 1
        hit = (process == one) & (at >= 0)
        result[hit] = mine[at[hit]]
    return result
