"""Finds the work that each call and each operation waited for, and makes a replay from these dependencies.

In the replay, a call or an operation waits for the same work as in the trace.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

import numpy as np

from nsys_analyzer.analysis.intervals import LONG_AGO, NONE
from nsys_analyzer.analysis.steps.process import CLOCK_SKEW_NS, PAUSE_NS, ProcessWork
from nsys_analyzer.analysis.steps.replay import MIN_STEPS, Replay, find_previous_on_stream
from nsys_analyzer.analysis.steps.study import DEVICE_SHIFT
from nsys_analyzer.trace.arrays import Bools, Floats, Ints
from nsys_analyzer.trace.columns import COPY, FREE, SYNCHRONIZE, Launches

#: A call that copies, frees or launches may have waited for the GPU if it took longer than this, ns.
_MIN_BLOCKING_NS = 20_000
#: A long call may have waited for room in the driver's queue if the queue contained at least this number of launches.
#: It has room for 1,024 launches.
_FULL_QUEUE_LAUNCHES = 1_000
#: The assumed duration of a synchronization that does not have to wait, ns.
_MIN_SYNCHRONIZATION_NS = 4_000
#: An operation that waits for another stream starts at most this long after the awaited operation ends, ns.
_MAX_JOIN_GAP_NS = 10_000
#: The assumed time from a launch to the start of its operation on an idle GPU, ns, if no operation shows this time.
_DEFAULT_LATENCY_NS = 6_000
#: The assumed time between two queued operations, ns, if no operations show this time.
_DEFAULT_SPACING_NS = 1_000
#: Match the names of API calls that make a stream wait for an event, and that record an event on a stream.
_WAIT_EVENT = re.compile("(cuda|cu|hip)StreamWaitEvent")
_RECORD_EVENT = re.compile("(cuda|cu|hip)EventRecord")


@dataclass(frozen=True)
class LaunchingCalls:
    """The calls of the studied steps.

    Attributes:
        table: the calls. A call that waited for unrecorded work is shortened: it ends when the recorded work has ended.
        positions: the indices of these calls among the calls of the process.
        unrecorded_wait_ns: shape (calls,), the time by which each call is shortened, ns.
        next_start: shape (calls,), the start of the next call; for the last call, the end of the steps.
        first_call: shape (steps + 1,), the index of the first call of each step, and of the first call after the steps.
        delays_ns: the time from the start of the first step to its first call, and from the end of the last step to the
            last value of ``next_start``, ns.
    """

    table: Launches
    positions: slice
    unrecorded_wait_ns: Ints
    next_start: Ints
    first_call: Ints
    delays_ns: tuple[int, int]

    @property
    def idle_ns(self) -> Ints:
        """Returns the time from the end of each call to the start of the next call, ns."""
        idle_ns: Ints = np.maximum(self.next_start - self.table.end, 0)
        return idle_ns


@dataclass(frozen=True)
class LaunchedOperations:
    """The operations that the studied calls launched, on all devices of the process, in the order of their launches.

    Columns have the shape (operations,) unless stated otherwise.

    Attributes:
        index: the index of each operation in the operations of the trace.
        stream: the code of the device and the stream, see ``DEVICE_SHIFT``.
        launch: the index of the call that launched each operation.
        start, end: the start and end of each operation, ns.
        is_pageable: True if the operation copies from or to pageable memory.
        exposed_ns: the part of the duration that no other operation hides, ns; 0 on other devices than the studied one.
        earlier_stream, earlier_end: shape (earlier operations,), the code of the stream and the end of each operation
            that was launched before these steps.
        stream_ready: shape (streams,), the end of the work on each stream before these steps, ns, in the order of the
            codes of the streams.
    """

    index: Ints
    stream: Ints
    launch: Ints
    start: Ints
    end: Ints
    is_pageable: Bools
    exposed_ns: Floats
    earlier_stream: Ints
    earlier_end: Ints
    stream_ready: Ints


def make_replay(
    work: ProcessWork,
    calls: LaunchingCalls,
    operations: LaunchedOperations,
    max_cost_ns: Floats,
    *,
    is_single_pass: bool,
) -> Replay:
    """Makes a replay of steps: finds the dependencies and the durations of each call and each operation.

    Args:
        work: the calls and the operations of the process.
        calls: the calls of the steps.
        operations: the operations that these calls launched.
        max_cost_ns: shape (calls,), the upper bound of the profiler's cost from each call to the next call, ns.
        is_single_pass: whether the calls are a single pass, which is not repeated, instead of steps of a loop.
    """
    table = calls.table
    waits = _find_waits(table, operations)
    # If another thread makes a call during this call, the program does not wait.
    awaited = np.where(calls.next_start < table.end - CLOCK_SKEW_NS, NONE, waits.awaited)
    begin = np.where((awaited != NONE) | waits.is_blocked, table.end, table.start)
    cpu_ns = np.maximum(calls.next_start - begin, 0)
    profiler_work_ns = work.profiler_busy.covered_within(calls.next_start - cpu_ns, calls.next_start)
    # The profiler's own work inside a launching call delays the launch of the operation.
    profiler_in_launch = work.profiler_busy.covered_within(table.start, table.end)[operations.launch]
    launched_at = table.start[operations.launch] + profiler_in_launch
    joined = _find_joins(table, operations)
    delays = _find_delays(operations, launched_at, joined, is_repeated=len(calls.first_call) <= MIN_STEPS)
    return Replay(
        cpu_ns=cpu_ns.astype(np.float64),
        min_wait_ns=waits.min_wait_ns,
        awaited=awaited,
        return_ns=waits.return_ns,
        launch=operations.launch,
        latency_ns=delays.latency_ns + profiler_in_launch,
        spacing_ns=delays.spacing_ns,
        work_ns=(operations.end - operations.start).astype(np.float64),
        first_call=calls.first_call,
        max_profiler_ns=max_cost_ns,
        pause_ns=np.where(calls.idle_ns >= PAUSE_NS, calls.idle_ns, 0).astype(np.float64),
        stream=operations.stream,
        joined=joined,
        join_gap_ns=delays.join_gap_ns,
        is_single_pass=is_single_pass,
        profiler_work_ns=profiler_work_ns.astype(np.float64),
    )


@dataclass(frozen=True)
class _Waits:
    """The operation that each call waited for. Every column has the shape (calls,).

    Attributes:
        awaited: the index of the last operation that the call waited for, or ``NONE``.
        min_wait_ns: the shortest time that the call takes, ns.
        return_ns: the time from the end of the awaited operation to the end of the call, ns.
        is_blocked: True if the call waited for work from before these steps, or for room in a queue that was full of
            it. In the replay, nothing runs before the steps, so such a call does not wait.
    """

    awaited: Ints
    min_wait_ns: Floats
    return_ns: Floats
    is_blocked: Bools


def _find_waits(calls: Launches, operations: LaunchedOperations) -> _Waits:
    """Finds the operation that each call waited for.

    A synchronization, a long copy or a long free waits for the operation of any stream that ended last before the end
    of the call. A long copy from or to pageable memory waits for its own operation. Any other long call waits only if
    the driver's queue is full.
    """
    stream, launch, end = operations.stream, operations.launch, operations.end
    duration, positions = calls.end - calls.start, np.arange(len(calls))
    is_long = duration > _MIN_BLOCKING_NS
    awaited = np.full(len(calls), NONE)
    queue_lengths = dict[int, Ints]()  # for each device, the number of launches in its queue at the start of each call
    for device in np.unique(stream >> DEVICE_SHIFT).tolist():
        earlier_ends = np.sort(operations.earlier_end[operations.earlier_stream >> DEVICE_SHIFT == device])
        queue_lengths[device] = len(earlier_ends) - np.searchsorted(earlier_ends, calls.start, side="right")
    for stream_code in np.unique(stream).tolist():
        operations_on_stream = np.flatnonzero(stream == stream_code)
        latest_end = np.maximum.accumulate(end[operations_on_stream])
        last_launched = np.searchsorted(launch[operations_on_stream], positions, side="right") - 1
        last_ended = np.searchsorted(latest_end, calls.end + CLOCK_SKEW_NS, side="right") - 1
        last_operation = np.minimum(last_launched, last_ended)
        is_later = (last_operation >= 0) & (
            (awaited == NONE) | (end[operations_on_stream[last_operation]] > end[awaited])
        )
        awaited = np.where(is_later, operations_on_stream[last_operation], awaited)
        ended_count = np.searchsorted(latest_end, calls.start, side="right")
        queue_lengths[stream_code >> DEVICE_SHIFT] += last_launched + 1 - ended_count
    ran_during_call = (awaited >= 0) & (np.append(end, 0)[awaited] >= calls.start)
    synchronizes = (calls.call == SYNCHRONIZE) & (awaited >= 0)
    blocks = np.isin(calls.call, (COPY, FREE)) & ran_during_call & is_long
    # A copy of pageable memory uses a buffer of the driver, so the call ends shortly before or after the operation.
    own_copy = np.full(len(calls), NONE)
    own_copy[launch[operations.is_pageable]] = np.flatnonzero(operations.is_pageable)
    is_pageable = (calls.call == COPY) & (own_copy != NONE) & is_long
    is_pageable &= np.append(end, 0)[own_copy] - calls.end < duration // 2
    awaited = np.where(is_pageable, own_copy, awaited)
    awaited_end, ran_during_call = np.append(end, 0)[awaited], ran_during_call | is_pageable
    is_queue_full = np.max(list(queue_lengths.values()), axis=0) >= _FULL_QUEUE_LAUNCHES
    waits_for_room = ~is_pageable & is_long & is_queue_full
    is_only_earlier_work = (calls.call == SYNCHRONIZE) & (awaited == NONE)
    waits_for_earlier_work = is_only_earlier_work & (calls.start < operations.earlier_end.max(initial=LONG_AGO))
    waits = synchronizes | blocks | (waits_for_room & ran_during_call) | is_pageable
    until_end = np.where(is_pageable, calls.end - awaited_end, np.maximum(calls.end - awaited_end, 0))
    shortest_ns = np.minimum(duration, _MIN_SYNCHRONIZATION_NS)
    return _Waits(
        awaited=np.where(waits, awaited, NONE),
        min_wait_ns=np.where(ran_during_call, shortest_ns, duration).astype(np.float64),
        return_ns=np.where(ran_during_call, until_end, shortest_ns).astype(np.float64),
        is_blocked=(waits_for_room & ~ran_during_call) | waits_for_earlier_work,
    )


def _find_joins(calls: Launches, operations: LaunchedOperations) -> Ints:
    """Finds the operation of another stream that each operation waits for (a join), or ``NONE``.

    The names of calls show which calls make a stream wait for an event, but not which stream waits. The next operation
    that is launched after such a call is assumed to wait. Of the operations of other streams that were launched before
    it, it waits for the operation that ended last before its start. If an event was recorded just before the call, it
    is likely that another stream than the main stream waits. An operation on the main stream is then assumed to wait
    only if it starts as soon as the awaited operation ends, and if nothing else delayed it.
    """
    stream, launch, start, end = operations.stream, operations.launch, operations.start, operations.end
    waits, records = (
        np.flatnonzero(np.array([bool(pattern.match(name)) for name in calls.names])[calls.name])
        for pattern in (_WAIT_EVENT, _RECORD_EVENT)
    )
    joined = np.full(len(launch), NONE, np.int64)
    # For each call that waits for an event: the first operation that is launched after the call.
    waiting_operation = np.searchsorted(launch, waits, side="right")
    waits, waiting_operation = (
        waits[waiting_operation < len(launch)],
        waiting_operation[waiting_operation < len(launch)],
    )
    previous_launch = np.where(waiting_operation > 0, launch[waiting_operation - 1], 0)
    records_between = np.searchsorted(records, waits) > np.searchsorted(records, previous_launch)
    streams, counts = np.unique(stream, return_counts=True)
    on_main_stream = stream[waiting_operation] == streams[counts.argmax()]
    is_certain = np.zeros(len(launch), np.bool_)
    is_certain[waiting_operation[~(records_between & on_main_stream)]] = True
    for stream_code in streams.tolist():
        operations_on_stream = np.flatnonzero(stream == stream_code)
        latest_end = np.maximum.accumulate(end[operations_on_stream])
        ended_count = np.searchsorted(latest_end, start[waiting_operation] + CLOCK_SKEW_NS, side="right")
        last_operation = np.append(operations_on_stream, NONE)[
            np.minimum(np.searchsorted(operations_on_stream, waiting_operation), ended_count) - 1
        ]
        joins = (last_operation != NONE) & (stream[waiting_operation] != stream_code)
        joins &= end[last_operation] > np.where(
            joined[waiting_operation] != NONE, end[joined[waiting_operation]], LONG_AGO
        )
        joined[waiting_operation[joins]] = last_operation[joins]
    joined_end, previous_operation = end[joined], find_previous_on_stream(stream)
    starts_at_once = start - joined_end <= _MAX_JOIN_GAP_NS
    is_stream_free = (previous_operation < 0) | (end[previous_operation] < joined_end)
    is_delayed_by_join = (calls.start[launch] < joined_end) & is_stream_free
    return np.where(is_certain | (starts_at_once & is_delayed_by_join), joined, NONE)


@dataclass(frozen=True)
class _Delays:
    """The shortest times from the end of a dependency to the start of each operation. Columns: shape (operations,).

    Attributes:
        latency_ns: the time from the launch to the start, ns.
        spacing_ns: the time from the end of the previous work on the stream to the start, ns.
        join_gap_ns: the time from the end of the joined operation on another stream to the start, ns.
    """

    latency_ns: Floats
    spacing_ns: Floats
    join_gap_ns: Floats


def _find_delays(operations: LaunchedOperations, launched_at: Ints, joined: Ints, *, is_repeated: bool) -> _Delays:
    """Finds the shortest delay from each dependency of an operation to the operation's start.

    An operation has three dependencies: its launch, the previous operation of its stream, and the operation of another
    stream that it waits for. One of them determined the operation's start in the trace: its delay is the recorded one.
    The delay of each other dependency is at most the median delay of the operations whose start was determined by a
    dependency of the same kind. Unless the steps are repeated, the latency of the first operation on a stream contains
    its wait for the work from before these steps.
    """
    start, end, stream = operations.start, operations.end, operations.stream
    previous_operation = find_previous_on_stream(stream)
    stream_ready = operations.stream_ready[np.searchsorted(np.unique(stream), stream)]
    stream_end = np.where(previous_operation >= 0, end[previous_operation], np.maximum(stream_ready, launched_at))
    joined_end = np.where(joined >= 0, end[joined], LONG_AGO)
    previous_end = np.maximum(stream_end, joined_end)
    # Timestamps that count from 1970 are too large for exact floats, so differences of integers are computed first.
    latency, spacing, join_gap = start - launched_at, start - stream_end, start - joined_end
    on_idle_gpu = (launched_at > previous_end) & (start > launched_at)
    usual_latency = np.median(latency[on_idle_gpu]) if on_idle_gpu.any() else _DEFAULT_LATENCY_NS
    is_delayed_by_join = (joined_end > stream_end) & (joined_end - launched_at >= usual_latency)
    is_delayed_by_launch = (spacing > 0) & (previous_end - launched_at < usual_latency)
    is_delayed_by_stream = ~is_delayed_by_launch & ~is_delayed_by_join & (spacing > 0)
    usual_spacing = np.median(spacing[is_delayed_by_stream]) if is_delayed_by_stream.any() else _DEFAULT_SPACING_NS
    usual_join_gap = np.median(join_gap[is_delayed_by_join]) if is_delayed_by_join.any() else _DEFAULT_SPACING_NS
    earlier_work_ns = np.where((previous_operation < 0) & (not is_repeated), stream_ready - launched_at, 0)
    return _Delays(
        np.maximum(np.where(is_delayed_by_launch, latency, usual_latency), earlier_work_ns).astype(np.float64),
        np.where(is_delayed_by_launch | is_delayed_by_join, np.minimum(spacing, usual_spacing), spacing).astype(
            np.float64
        ),
        np.where(is_delayed_by_join, join_gap, np.minimum(join_gap, usual_join_gap)).astype(np.float64),
    )
