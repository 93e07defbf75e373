"""Instances of phases that a capture shows in part only."""

from __future__ import annotations

from nsys_analyzer.analysis.timeline import count_within, last_before
from nsys_analyzer.trace.arrays import Bools, Ints
from nsys_analyzer.trace.columns import LAUNCH, Launches, Ranges, process_of
from nsys_analyzer.trace.trace import Trace


def incomplete_instances(trace: Trace, lost: Ints, process: Ints, picked: Ranges) -> Bools:
    """Instances that lack kernels they launched, or that end with an allocation that failed."""
    lacking: Bools = _starting_in(trace.launches.select(lost), process, picked.start, picked.end) > 0
    failed = trace.failed_allocations
    if not len(failed.start):
        return lacking
    launched = trace.launches.select(trace.launches.call == LAUNCH)
    last_failure = last_before(process_of(failed.thread), failed.start, process, picked.end)
    fatal = (last_failure >= picked.start) & (_starting_in(launched, process, last_failure, picked.end) == 0)
    incomplete: Bools = lacking | fatal
    return incomplete


def _starting_in(calls: Launches, process: Ints, start: Ints, end: Ints) -> Ints:
    """How many of the calls of a process start in each interval."""
    return count_within(process_of(calls.thread), calls.start, process, start, end)
