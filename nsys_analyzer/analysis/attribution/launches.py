"""Finds the API call that launched each GPU operation, and leaves out operations whose times contradict their launch.

An operation and its launch have the same process and correlation ID. The nodes of a CUDA graph belong to the ranges in
which the nodes were captured, since a replay does not open these ranges again. A warning reports the operations that
are left out.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from nsys_analyzer.analysis.intervals import NONE, count_times_inside, is_in_any_range
from nsys_analyzer.trace import schema
from nsys_analyzer.trace.arrays import OFF_AXIS, Axis, Bools, Ints, SmallInts, distinct, distinct_rows, take_or_default
from nsys_analyzer.trace.columns import (
    BEGIN_CAPTURE,
    END_CAPTURE,
    LAUNCH,
    Launches,
    Operations,
    match_launches,
    place_correlation_ids,
    process_of,
    search_keys,
)  # fmt: skip
from nsys_analyzer.trace.metadata import CUDA, HIP
from nsys_analyzer.trace.time_checks import ExcludedRows, TimedRows, describe_excluded_rows, timed_calls
from nsys_analyzer.trace.trace import Trace

#: The times of an operation are wrong if it starts more than this before its launch, since the clocks of GPU and CPU
#: differ by less on every platform.
_CLOCK_ERROR_NS = 100_000_000
#: On platforms that synchronize the clocks of GPU and CPU, the times of an operation are wrong if it starts more than
#: this before its launch.
_SYNCHRONIZED_ERROR_NS = 1_000_000
#: If more than this share of the operations exceeds ``_SYNCHRONIZED_ERROR_NS``, ``_CLOCK_ERROR_NS`` is used instead.
_MAX_EARLY_SHARE = 0.01
_PLATFORMS_WITH_SYNCHRONIZED_CLOCKS = (CUDA, HIP)
#: The clock of a device is behind the CPU's clock if at least this share of the device's operations starts before their
#: launch.
_LATE_CLOCK_QUANTILE = 0.75
#: The offset of a clock that is behind is estimated as this quantile of the times from launch to start. The minimum is
#: not used, since a few times may be broken.
_OFFSET_QUANTILE = 0.1
#: The end of a call that lasts longer than ``_LONG_CALL_NS`` is wrong if ``_MIN_CALLS_INSIDE_WRONG_CALL`` or more other
#: calls of the same thread start before this end.
_LONG_CALL_NS, _MIN_CALLS_INSIDE_WRONG_CALL = 10_000_000, 100
#: Matches API calls whose work may start while earlier work on the same stream still runs: launches of graphs, and
#: launches that allow programmatic dependent launch.
_OVERLAPPING_LAUNCHES = re.compile("LaunchKernelEx|GraphLaunch")
#: Profilers round times, so an operation may end up to this much after the start of the next operation on its stream.
_ROUNDING_NS = 2_000
#: The maximum number of instantiations from the capture of a CUDA graph's node to its replay. Graphs nest a few levels
#: deep.
_MAX_INSTANTIATIONS = 8


def find_dropped_launches(launches: Launches, *launch: Any) -> Bools:
    """Returns True for each kernel launch whose GPU operation is missing in the capture.

    The record of such an operation was dropped, or the capture ended before it. A launch that a CUDA graph captures
    runs nothing, so it does not count. A driver call inside the runtime call that launched the kernel does not count
    either; both calls have the same correlation ID.

    Args:
        launch: one or several arrays with the index of the launch of each operation, -1 without a launch.

    Returns:
        Shape (launches,).
    """
    is_matched = np.zeros(len(launches.start) + 1, np.bool_)  # index -1 writes to an extra last entry, which is cut off
    for indices in launch:
        is_matched[indices] = True
    is_matched = is_matched[:-1]
    is_dropped: Bools = (launches.call == LAUNCH) & ~is_matched
    if is_dropped.any():
        _, correlation_keys = place_correlation_ids(launches)
        is_dropped[is_dropped] = ~np.isin(correlation_keys[is_dropped], correlation_keys[is_matched])
        is_dropped &= ~_is_in_graph_capture(launches)
    return is_dropped


def _is_in_graph_capture(launches: Launches) -> Bools:
    """Returns True for each call that starts while its process captures a CUDA graph; shape (launches,)."""
    processes = process_of(launches.thread)
    captured_processes, start, end = [], [], []
    for process in distinct(processes):
        begins, ends = (
            np.sort(launches.start[(processes == process) & (launches.call == call)])
            for call in (BEGIN_CAPTURE, END_CAPTURE)
        )
        next_end = np.searchsorted(ends, begins, side="right")
        has_end = next_end < len(ends)
        captured_processes.append(np.full(has_end.sum(), process))
        start.append(begins[has_end])
        end.append(ends[next_end[has_end]])
    captured_process, begin, stop = (np.concatenate(column) for column in (captured_processes, start, end))
    return is_in_any_range(captured_process, begin, stop, processes, launches.start)


@dataclass(frozen=True)
class GraphCaptures:
    """Where the nodes of CUDA graphs were captured.

    Attributes:
        operation: shape (replayed,), the index of each operation whose graph node has a known capture.
        thread: shape (replayed,), the thread that captured the node.
        time: shape (replayed,), the time at which the node was captured, ns.
    """

    operation: Ints
    thread: Ints
    time: Ints


def find_graph_captures(trace: Trace) -> GraphCaptures:
    """Finds where the graph node of each replayed operation was captured."""
    operations, nodes = trace.operations, trace.graph_nodes
    replayed_operations = np.flatnonzero(operations.graph_node != 0)
    if not len(nodes.node):
        return GraphCaptures(nodes.node, nodes.thread, nodes.start)
    process = process_of(nodes.thread)
    axis = Axis(process, nodes.node)
    key = axis.place(process, nodes.node)
    original = np.where(nodes.original != 0, axis.place(process, nodes.original), OFF_AXIS)
    # A node that an instantiation cloned has two rows: one for its creation, and one that names its original. The row
    # that names the original comes first in this order.
    order = np.lexsort((nodes.start, original == OFF_AXIS, key))
    key, original = key[order], original[order]
    first_captured_as: Ints = np.arange(len(key))
    for _ in range(_MAX_INSTANTIATIONS):
        position, has_original = search_keys(key, original[first_captured_as])
        first_captured_as = np.where(has_original, position, first_captured_as)
    position, is_known = search_keys(
        key, axis.place(operations.process[replayed_operations], operations.graph_node[replayed_operations])
    )
    creation_row = order[first_captured_as[position[is_known]]]
    return GraphCaptures(replayed_operations[is_known], nodes.thread[creation_row], nodes.start[creation_row])


def exclude_impossible_times(trace: Trace) -> tuple[Trace, SmallInts, Ints, Ints]:
    """Leaves out operations that start before their launch, and corrects ends of calls and operations that are wrong.

    Returns:
        The corrected trace.
        The launch of each remaining operation, -1 without a launch; shape (operations,).
        The offset of the clock of each operation's device from the CPU's clock: ns, 0 or negative; shape (operations,).
        The launches of the operations that were left out, by this function or when the trace was read.
    """
    operations = trace.operations
    launch = match_launches(operations, trace.launches)
    unmeasured = match_launches(trace.untimed_operations, trace.launches) if trace.untimed_operations else launch[:0]
    wait = measure_launch_waits(operations.start, trace.launches.start, launch)
    clock_offset = _estimate_clock_offsets(operations, launch, wait)
    wait -= clock_offset
    is_early = wait < -_SYNCHRONIZED_ERROR_NS
    are_few = np.count_nonzero(is_early) <= max(1, _MAX_EARLY_SHARE * np.count_nonzero(launch != NONE))
    if not are_few or trace.metadata.platform not in _PLATFORMS_WITH_SYNCHRONIZED_CLOCKS:
        is_early = wait < -_CLOCK_ERROR_NS
    if trace.metadata.profiler == "nsys":
        trace = _exclude_wrong_call_ends(trace)
    if is_early.any():
        left_out = (*trace.left_out, *_describe_left_out(operations, "a start before the launch", is_early))
        unmeasured = np.concatenate([unmeasured, launch[is_early]])
        trace = replace(trace, operations=operations.select(~is_early), left_out=left_out)
        launch, clock_offset = launch[~is_early], clock_offset[~is_early]
    if trace.metadata.platform == CUDA:
        trace = _shorten_to_next_start(trace, launch)
    return trace, launch, clock_offset, np.unique(unmeasured[unmeasured != NONE])


def measure_launch_waits(start: Ints, called: Ints, launch: SmallInts) -> Ints:
    """Returns the time from the launch of each operation to its start, ns; 0 for an operation without a launch.

    Args:
        start: shape (operations,), the start of each operation on the GPU's clock, ns.
        called: shape (launches,), the start of each API call on the CPU's clock, ns.
        launch: shape (operations,), the index of the launch of each operation, -1 without a launch.
    """
    return np.where(launch == NONE, 0, start - take_or_default(called, launch, 0))


def _estimate_clock_offsets(operations: Operations, launch: SmallInts, wait: Ints) -> Ints:
    """Returns how far the clock of each operation's GPU is ahead of the CPU's clock, ns; shape (operations,).

    The result is negative if most operations of the GPU start before their launch. Otherwise it is 0.
    """
    if not (wait < -_CLOCK_ERROR_NS).any():
        return np.broadcast_to(np.int64(0), len(wait))
    offset = np.zeros(len(wait), np.int64)
    launched_operations = np.flatnonzero(launch != NONE)
    process, device = operations.process[launched_operations], operations.device[launched_operations].astype(np.int64)
    clocks = Axis(process, device).place(process, device)
    for clock in distinct(clocks):
        operations_on_device = launched_operations[clocks == clock]
        quantiles = np.quantile(wait[operations_on_device], [_OFFSET_QUANTILE, _LATE_CLOCK_QUANTILE], method="higher")
        low_wait_ns, usual_wait_ns = quantiles.tolist()
        offset[operations_on_device] = int(low_wait_ns) if usual_wait_ns < 0 else 0
    return offset


def _shorten_to_next_start(trace: Trace, launch: SmallInts) -> Trace:
    """Ends each operation no later than the next operation on its stream starts.

    A stream usually runs one operation at a time. However, two operations may overlap if a CUDA graph or a programmatic
    dependent launch starts the second operation. If the launch of the second operation was not recorded, they may
    overlap as well.
    """
    operations, count = trace.operations, len(trace.operations)
    may_overlap = np.array([*(bool(_OVERLAPPING_LAUNCHES.search(name)) for name in trace.launches.names), True])
    may_overlap = may_overlap[take_or_default(trace.launches.name, launch, NONE)] | (operations.graph_node != 0)
    stream = distinct_rows(operations.process, operations.device, operations.context, operations.stream)[1]
    order = np.lexsort((operations.start, stream))
    position = np.where(may_overlap[order], count, np.arange(count))
    next_operation = np.append(np.minimum.accumulate(position[::-1])[::-1], [count, count])[1 : count + 1]
    next_start = np.append(operations.start[order], np.iinfo(np.int64).max)[next_operation]
    next_start[np.append(stream[order], NONE)[next_operation] != stream[order]] = np.iinfo(np.int64).max
    start, end = operations.start[order], operations.end[order]
    is_late = (end - _ROUNDING_NS > next_start) & (next_start > start)
    if not is_late.any():
        return trace
    ends, is_wrong = operations.end.copy(), np.zeros(count, np.bool_)
    ends[order[is_late]], is_wrong[order[is_late]] = next_start[is_late], True
    rows = _describe_left_out(operations, "an end after the next start on their stream", is_wrong)
    left_out = (*trace.left_out, *(replace(row, is_shortened=True) for row in rows))
    return replace(trace, operations=replace(operations, end=ends), left_out=left_out)


def _exclude_wrong_call_ends(trace: Trace) -> Trace:
    """Sets the end of a long API call to its start if its thread makes many other calls before the recorded end.

    Such an end was recorded wrongly, because a thread makes one call at a time.
    """
    calls = trace.launches
    long_calls = np.flatnonzero(calls.end - calls.start > _LONG_CALL_NS)
    if not len(long_calls):
        return trace
    calls_inside = count_times_inside(
        calls.thread, calls.start, calls.thread[long_calls], calls.start[long_calls] + 1, calls.end[long_calls]
    )
    is_wrong = np.zeros(len(calls), np.bool_)
    is_wrong[long_calls] = calls_inside >= _MIN_CALLS_INSIDE_WRONG_CALL
    if not is_wrong.any():
        return trace
    ends = np.where(is_wrong, calls.start, calls.end)
    rows = describe_excluded_rows(
        timed_calls(calls, calls.end), "an end after many later calls", is_wrong, only_end_excluded=True
    )
    return replace(trace, launches=replace(calls, end=ends), left_out=(*trace.left_out, *rows))


def _describe_left_out(operations: Operations, reason: str, wrong: Bools) -> list[ExcludedRows]:
    """Describes the operations that are left out, grouped by table and process."""
    left_out: list[ExcludedRows] = []
    for kind, table in enumerate(schema.OPERATIONS_BY_KIND):
        rows = TimedRows(table, operations.start, operations.end, operations.process, operations.describe)
        left_out += describe_excluded_rows(rows, reason, wrong & (operations.kind == kind))
    return left_out
