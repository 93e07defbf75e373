"""The API call that launched each GPU operation, and the operations whose times contradict it.

A launch is matched by process and correlation ID, one each. The nodes of a CUDA graph were captured inside ranges that
a replay does not open again. What contradicts its launch or its stream is left out of every figure, with a warning.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from nsys_analyzer.analysis.intervals import NONE, OFF_AXIS, Axis, count_moments, is_in_any_range
from nsys_analyzer.trace import schema
from nsys_analyzer.trace.arrays import Bools, Ints, SmallInts, distinct, distinct_rows, take_or_default
from nsys_analyzer.trace.columns import BEGIN_CAPTURE, END_CAPTURE, LAUNCH, Launches, Operations, process_of
from nsys_analyzer.trace.metadata import CUDA, HIP
from nsys_analyzer.trace.time_checks import ExcludedRows, TimedRows, describe_excluded_rows, timed_calls
from nsys_analyzer.trace.trace import Trace


def match_launches(operations: Operations, launches: Launches) -> SmallInts:
    """Shape (operations,): the index of each operation's launch, -1 without a launch row.

    A correlation ID is unique within one process. Where several calls have one (a runtime call and the driver call
    inside it), the launch is the earliest.
    """
    if not len(launches):
        return np.full(len(operations), NONE, np.int32)
    axis, keys = _axis(launches)
    order = np.lexsort((launches.start, keys))
    found, known = _find(keys[order], axis.place(operations.process, operations.correlation))
    return np.where(known, order[found], NONE).astype(np.int32)


def find_dropped_launches(launches: Launches, *launch: Any) -> Bools:
    """Shape (launches,): True for a kernel launch without a GPU operation: dropped records, or a cut-off capture.

    A launch while its process captures a graph runs nothing and is not counted; nor is a driver call inside the
    runtime call that launched the kernel, which has the same correlation ID. ``launch`` is that of each operation, in
    one array or several.
    """
    matched = np.zeros(len(launches.start) + 1, np.bool_)  # the last entry serves operations without a launch
    for some in launch:
        matched[some] = True
    matched = matched[:-1]
    dropped: Bools = (launches.call == LAUNCH) & ~matched
    if dropped.any():
        _, keys = _axis(launches)
        dropped[dropped] = ~np.isin(keys[dropped], keys[matched])
        dropped &= ~_in_capture(launches)
    return dropped


def _in_capture(launches: Launches) -> Bools:
    """True for the calls while their process captures a graph: from a begin to the next end, on any thread."""
    process = process_of(launches.thread)
    group, start, end = [], [], []
    for one in distinct(process):
        begins, ends = (
            np.sort(launches.start[(process == one) & (launches.call == call)]) for call in (BEGIN_CAPTURE, END_CAPTURE)
        )
        closing = np.searchsorted(ends, begins, side="right")
        closed = closing < len(ends)
        group.append(np.full(closed.sum(), one))
        start.append(begins[closed])
        end.append(ends[closing[closed]])
    return is_in_any_range(np.concatenate(group), np.concatenate(start), np.concatenate(end), process, launches.start)


def _axis(launches: Launches) -> tuple[Axis, Ints]:
    """The axis of (process, correlation ID), and the place of each launch on it."""
    axis = Axis(process_of(distinct(launches.thread)), launches.correlation)
    return axis, axis.place(process_of(launches.thread), launches.correlation)


_INSTANTIATIONS = 8  # a graph of graphs is instantiated a few levels deep at the most


@dataclass(frozen=True)
class GraphCaptures:
    """The thread and the time, ns, at which the graph nodes of some operations (indices) were created."""

    operation: Ints
    thread: Ints
    time: Ints


def find_captures(trace: Trace) -> GraphCaptures:
    """Finds when each operation of a graph replay was captured."""
    operations, nodes = trace.operations, trace.graph_nodes
    replayed = np.flatnonzero(operations.graph_node != 0)
    if not len(nodes.node):
        return GraphCaptures(nodes.node, nodes.thread, nodes.start)
    process = process_of(nodes.thread)
    axis = Axis(process, nodes.node)
    key = axis.place(process, nodes.node)
    original = np.where(nodes.original != 0, axis.place(process, nodes.original), OFF_AXIS)
    # A node cloned by instantiation has a row for its creation and one that names its original: that one first.
    order = np.lexsort((nodes.start, original == OFF_AXIS, key))
    key, original = key[order], original[order]
    source: Ints = np.arange(len(key))  # of each node the one that it was first captured as
    for _ in range(_INSTANTIATIONS):
        found, has_original = _find(key, original[source])
        source = np.where(has_original, found, source)
    found, hit = _find(key, axis.place(operations.process[replayed], operations.graph_node[replayed]))
    created = order[source[found[hit]]]
    return GraphCaptures(replayed[hit], nodes.thread[created], nodes.start[created])


def _find(keys: Ints, wanted: Ints) -> tuple[Ints, Bools]:
    """The first place of each wanted key among keys in order, and whether it is there."""
    found = np.searchsorted(keys, wanted).clip(max=len(keys) - 1)
    return found, keys[found] == wanted


#: How far an operation may lie before its launch, besides what nearly all of its device do: clocks drift.
CLOCK_ERROR_NS = 100_000_000
#: How far a few may, where all others lie behind theirs, and how few these are; on devices whose clocks are read
#: together with the CPU's.
_FEW_ERROR_NS, _FEW = 1_000_000, 0.01
_IN_STEP = (CUDA, HIP)
#: The share of a device's operations that may be broken where the difference of its clock is estimated from them, and
#: the share that starts before its launch where its clock is behind.
_BROKEN, _NEARLY_ALL = 0.1, 0.75
#: A call that lasts longer than this has a wrong end if this many calls of the same thread begin inside it.
_LONG_CALL_NS, _CALLS_INSIDE_WRONG_CALL = 10_000_000, 100
#: Calls whose work may begin while the work before it on the same stream still runs.
_MAY_OVERLAP = re.compile("LaunchKernelEx|GraphLaunch")
#: Profilers round times: one operation may end up to this much after the start of the next.
_ROUNDED_NS = 2_000


def leave_out_contradictions(trace: Trace) -> tuple[Trace, SmallInts, Ints, Ints]:
    """Leaves out operations that start before their launch, and ends of calls and operations that cannot be true.

    Returns:
        The trace; of each operation left its launch, -1 for none, and by how much the clock of its device is behind the
        CPU's, ns below zero; and the launches of the operations that were left out, here and when the trace was read.
    """
    operations = trace.operations
    launch = match_launches(operations, trace.launches)
    unmeasured = match_launches(trace.untimed, trace.launches) if trace.untimed else launch[:0]
    wait = measure_launch_waits(operations.start, trace.launches.start, launch)
    behind = _behind(operations, launch, wait)
    wait -= behind
    before = wait < -_FEW_ERROR_NS
    few = np.count_nonzero(before) <= max(1, _FEW * np.count_nonzero(launch != NONE))
    early = before if few and trace.metadata.platform in _IN_STEP else wait < -CLOCK_ERROR_NS
    if trace.metadata.profiler == "nsys":
        trace = _with_ends_of_calls(trace)
    if early.any():
        left_out = (*trace.left_out, *_left_out(operations, "a start before the launch", early))
        unmeasured = np.concatenate([unmeasured, launch[early]])
        trace = replace(trace, operations=operations.select(~early), left_out=left_out)
        launch, behind = launch[~early], behind[~early]
    if trace.metadata.platform == CUDA:
        trace = _with_possible_ends(trace, launch)
    return trace, launch, behind, np.unique(unmeasured[unmeasured != NONE])


def measure_launch_waits(start: Ints, called: Ints, launch: SmallInts) -> Ints:
    """From each launch to the start of its operation, ns, each by its own clock; 0 without a launch."""
    return np.where(launch == NONE, 0, start - take_or_default(called, launch, 0))


def _behind(operations: Operations, launch: SmallInts, wait: Ints) -> Ints:
    """Shape (operations,): below zero for a device most of whose operations start before their launch."""
    if not (wait < -CLOCK_ERROR_NS).any():
        return np.broadcast_to(np.int64(0), len(wait))
    found = np.zeros(len(wait), np.int64)
    launched = np.flatnonzero(launch != NONE)
    process, device = operations.process[launched], operations.device[launched].astype(np.int64)
    clock = Axis(process, device).place(process, device)
    for one in distinct(clock):
        mine = launched[clock == one]
        behind, most = np.quantile(wait[mine], [_BROKEN, _NEARLY_ALL], method="higher").tolist()
        found[mine] = int(behind) if most < 0 else 0
    return found


def _with_possible_ends(trace: Trace, launch: SmallInts) -> Trace:
    """Ends each operation at the start of the next one of its stream if it lasts longer: they run one by one.

    The next one may begin earlier if a graph or a programmatic launch starts it, or if its launch was not recorded.
    """
    operations, count = trace.operations, len(trace.operations)
    may_overlap = np.array([*(bool(_MAY_OVERLAP.search(name)) for name in trace.launches.names), True])
    may_overlap = may_overlap[take_or_default(trace.launches.name, launch, NONE)] | (operations.graph_node != 0)
    stream = distinct_rows(operations.process, operations.device, operations.context, operations.stream)[1]
    order = np.lexsort((operations.start, stream))
    place = np.where(may_overlap[order], count, np.arange(count))
    following = np.append(np.minimum.accumulate(place[::-1])[::-1], [count, count])[1 : count + 1]
    next_start = np.append(operations.start[order], np.iinfo(np.int64).max)[following]
    next_start[np.append(stream[order], NONE)[following] != stream[order]] = np.iinfo(np.int64).max
    start, end = operations.start[order], operations.end[order]
    late = (end - _ROUNDED_NS > next_start) & (next_start > start)
    if not late.any():
        return trace
    ends, wrong = operations.end.copy(), np.zeros(count, np.bool_)
    ends[order[late]], wrong[order[late]] = next_start[late], True
    rows = _left_out(operations, "an end behind the next start of their stream", wrong)
    left_out = (*trace.left_out, *(replace(row, cut=True) for row in rows))
    return replace(trace, operations=replace(operations, end=ends), left_out=left_out)


def _with_ends_of_calls(trace: Trace) -> Trace:
    """Takes the end from each API call that lasts while its own thread makes very many others."""
    calls = trace.launches
    wrong = np.flatnonzero(calls.end - calls.start > _LONG_CALL_NS)
    thread, start, end = calls.thread[wrong], calls.start[wrong], calls.end[wrong]
    wrong = (
        wrong[count_moments(calls.thread, calls.start, thread, start + 1, end) >= _CALLS_INSIDE_WRONG_CALL]
        if len(wrong)
        else wrong
    )
    if not len(wrong):
        return trace
    ends, why = calls.end.copy(), np.zeros(len(calls), np.bool_)
    ends[wrong], why[wrong] = calls.start[wrong], True
    rows = describe_excluded_rows(
        timed_calls(calls, calls.end), "an end after many later calls", why, starts_count=True
    )
    return replace(trace, launches=replace(calls, end=ends), left_out=(*trace.left_out, *rows))


def _left_out(operations: Operations, why: str, wrong: Bools) -> list[ExcludedRows]:
    found: list[ExcludedRows] = []
    for kind, table in enumerate(schema.OPERATIONS_BY_KIND):
        of_kind = wrong & (operations.kind == kind)
        rows = TimedRows(table, operations.start, operations.end, operations.process, operations.called)
        found += describe_excluded_rows(rows, why, of_kind)
    return found
