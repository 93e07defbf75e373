"""Makes a study from the trace: selects a few consecutive steps, and finds what their calls and operations waited for.

The work of all devices of the process is replayed, and the figures are those of one device. What a call or an operation
waited for in the trace is what it waits for in the replay.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np

from nsys_analyzer.analysis.intervals import LONG_AGO, NONE, Cover
from nsys_analyzer.analysis.steps.anatomy import shares_of
from nsys_analyzer.analysis.steps.groups import Steps
from nsys_analyzer.analysis.steps.process import PAUSE_NS, ProcessWork
from nsys_analyzer.analysis.steps.profiler_cost import recording_costs
from nsys_analyzer.analysis.steps.replay import MIN_STEPS, Replay, Run, preceding_on_stream
from nsys_analyzer.analysis.steps.study import (
    DEVICE_SHIFT,
    RangeSpans,
    StudiedCalls,
    StudiedGroup,
    StudiedPieces,
    Study,
)
from nsys_analyzer.analysis.steps.windows import Windows
from nsys_analyzer.trace.arrays import Bools, Floats, Ints, SmallInts, dense_codes
from nsys_analyzer.trace.columns import (
    COPY,
    DEVICE_TO_PAGEABLE,
    FREE,
    OTHER_COPY,
    PAGEABLE_TO_DEVICE,
    SYNCHRONIZE,
    Launches,
    pid_of,
)
from nsys_analyzer.trace.schema import NS_PER_MS

#: The most steps that are studied, and the most calls that they have together.
_MAX_STEPS, _MAX_CALLS = 10, 15_000
#: Studied steps may differ in their mean from the length of a step by this share. Then more steps are preferred.
_TYPICAL_STEPS_TOLERANCE = 0.03
#: A copy, a free or a launch may have waited if it took at least this long, ns.
_MIN_BLOCKING_NS = 20_000
#: The driver's queue holds 1,024 launches. A long call may have waited for room if about so many were in it.
_FULL_QUEUE_LAUNCHES = 1_000
#: The shortest time that a synchronization takes, ns.
_MIN_SYNCHRONIZATION_NS = 4_000
#: The clocks of CPU and GPU, and of two threads, differ by up to this, ns.
_CLOCK_SKEW_NS = 3_000
#: An operation that waits for another stream starts at most this long after the awaited operation ends, ns.
_MAX_JOIN_GAP_NS = 10_000
#: If no operation shows it: the time from a launch to its start on an idle GPU, and between two queued operations, ns.
_DEFAULT_LATENCY_NS, _DEFAULT_SPACING_NS = 6_000, 1_000
#: Names of calls that make a stream wait for an event, and of calls that record an event.
_WAIT_EVENT = re.compile("(cuda|cu|hip)StreamWaitEvent")
_RECORD_EVENT = re.compile("(cuda|cu|hip)EventRecord")


def study_groups(work: ProcessWork, steps: Steps, device: int) -> Study | None:
    """Studies the measured steps, and the steps of each other group by themselves; see ``study_steps``."""
    study = study_steps(work, steps, device)
    if not study:
        return None
    groups = []
    for name, group in steps.unmeasured_groups:
        if of_group := study_steps(work, group, device):
            groups.append(StudiedGroup(name, len(group.windows), group.length_ms, of_group))
    return replace(study, other_groups=tuple(groups))


def study_steps(work: ProcessWork, steps: Steps, device: int, windows: Windows | None = None) -> Study | None:
    """Studies some of the steps; returns None if no launch is known.

    Args:
        work: the calls and the operations of the process. Its other devices are replayed as well.
        steps: the steps of the process.
        device: the device whose work is shown.
        windows: the steps to study; by default a few consecutive steps whose mean is close to the length of a step.
    """
    windows = _select_windows(steps, work.calls.start) if windows is None else windows
    calls = _find_calls(work, steps, windows)
    operations = _find_operations(work, device, calls) if calls else None
    if calls is None or operations is None:
        return None
    min_cost_ns, max_cost_ns = recording_costs(work.attributed.as_recorded, work.process, calls.start, calls.next_start)
    replay = _make_replay(work, calls, operations, max_cost_ns, is_single_pass=windows.source == "pass")
    attributed = work.attributed
    kernels, ranges = attributed.kernels, attributed.trace.ranges
    leaf_phases = np.unique(ranges.name[attributed.roles.is_leaf_phase]).tolist()
    callers = [
        attributed.trace.torch_callers.get((work.process, number), "") for number in calls.table.correlation.tolist()
    ]
    caller_codes = {text: code for code, text in enumerate(dict.fromkeys(("", *callers)))}
    return Study(
        replay=replay,
        windows=windows,
        calls=_describe_calls(work, calls, np.array([caller_codes[text] for text in callers], np.int64)),
        pieces=_describe_operations(work, operations),
        spans=_find_spans(work, calls),
        kernels=kernels.names,
        classes=kernels.classes,
        phases=work.phases,
        apis=calls.table.names,
        callers=tuple(caller_codes),
        ranges=ranges.names,
        phase_ranges=frozenset(ranges.names[code] for code in leaf_phases),
        measured_ns=_measured_ns(replay, windows, calls, operations),
        min_cost_share=float(min_cost_ns.sum() / max_cost_ns.sum()) if max_cost_ns.any() else 1.0,
        gpu=attributed.trace.metadata.gpu(pid_of(work.process), device),
        group=steps.names[steps.positions[0]],
    )


# --- which steps, calls and operations are studied


def _select_windows(steps: Steps, call_starts: Ints) -> Windows:
    """Returns consecutive measured steps, as many as may be studied, whose mean is closest to the length of a step."""
    windows = steps.windows
    if len(windows) >= MIN_STEPS:  # the time from the last step to the next one is not known
        windows = windows.select(windows.cpu_start < steps.recorded.cpu_start[-1])
    first_calls, end_calls = (
        np.searchsorted(call_starts, windows.cpu_start),
        np.searchsorted(call_starts, windows.cpu_end),
    )
    calls_per_step = max(1, int(np.median(end_calls - first_calls)))
    is_apart = windows.cpu_start[1:] != windows.cpu_end[:-1]
    sequences = np.split(np.arange(len(windows)), np.flatnonzero(is_apart) + 1)
    max_steps = min(int(np.clip(_MAX_CALLS // calls_per_step, 1, _MAX_STEPS)), max(map(len, sequences)))
    total_ms = np.append(0, np.cumsum(windows.end - windows.start)) / NS_PER_MS
    best = (np.inf, 0, 0)  # difference of the mean, first step, number of steps
    for count in range(max_steps, min(max_steps, MIN_STEPS) - 1, -1):
        first = np.concatenate(
            [sequence[: len(sequence) - count + 1] for sequence in sequences if len(sequence) >= count]
        )
        difference = np.abs((total_ms[first + count] - total_ms[first]) / count - steps.length_ms)
        from_middle = np.abs(first + count / 2 - len(windows) / 2)  # of equal ones, the one in the middle is taken
        closest = int(np.lexsort((from_middle, difference.round(6)))[0])
        best = min(best, (float(difference[closest]), int(first[closest]), count))
        if best[0] <= _TYPICAL_STEPS_TOLERANCE * steps.length_ms:
            break
    _, start, count = best
    return windows.select(np.arange(start, start + count))


@dataclass(frozen=True)
class _Calls:
    """The calls of the studied steps.

    Attributes:
        table: the calls, shape (calls,). A call that waited for unrecorded work ends when the recorded work has ended.
        positions: where they are among the calls of the process.
        unrecorded_ns: shape (calls,), the time that was cut from the end of each call.
        next_start: shape (calls,), the start of the next call; at last the end of the steps.
        first_call: shape (steps + 1,), the first call of each step, and the end of the last step.
        delays_ns: the times from the beginning of the steps to the first call, and from their end to ``next_start``.
    """

    table: Launches
    positions: slice
    unrecorded_ns: Ints
    next_start: Ints
    first_call: Ints
    delays_ns: tuple[int, int]

    @property
    def start(self) -> Ints:
        """Returns the start of each call."""
        return self.table.start

    @property
    def end(self) -> Ints:
        """Returns the end of each call."""
        return self.table.end

    @property
    def idle_ns(self) -> Ints:
        """Returns the time from the end of each call to the next call, ns."""
        idle_ns: Ints = np.maximum(self.next_start - self.end, 0)
        return idle_ns


def _find_calls(work: ProcessWork, steps: Steps, windows: Windows) -> _Calls | None:
    """Returns the calls of the steps, or None if there are less than two."""
    bounds = np.append(windows.cpu_start, windows.cpu_end[-1:])
    first_call = np.searchsorted(work.calls.start, bounds)
    low, high = int(first_call[0]), int(first_call[-1])
    if high - low < 2:
        return None
    unrecorded_ns = work.unrecorded_ns[low:high]
    table = work.calls.select(slice(low, high))
    table = replace(table, end=table.end - unrecorded_ns)
    step_follows = bool(np.isin(bounds[-1], steps.recorded.cpu_start))
    end = work.calls.start[high] if step_follows and high < len(work.calls) else max(bounds[-1], table.end[-1])
    if not np.isin(bounds[-1], steps.windows.cpu_start):
        # The next step is not measured. The time to its first call is assumed to be that of the first studied step.
        end = max(min(end, bounds[-1] + table.start[0] - bounds[0]), table.end[-1])
    return _Calls(
        table,
        slice(low, high),
        unrecorded_ns,
        np.append(table.start[1:], end),
        first_call - low,
        (table.start[0] - bounds[0], end - bounds[-1]),
    )


@dataclass(frozen=True)
class _Operations:
    """The operations that the studied calls launched, on all devices of the process, in the order of their launches.

    Every column has the shape (operations,).

    Attributes:
        index: index into the operations of the trace.
        stream: code of the device and the stream, see ``DEVICE_SHIFT``.
        launch: position of the call that launched each operation.
        start, end: ns.
        is_pageable: whether the operation copies from or to pageable memory.
        exposed_ns: the part of the duration that no other operation hides; 0 on other devices.
        earlier_stream, earlier_end: streams and ends of operations that were launched before these steps.
        stream_ready: shape (streams,), when each stream, in the order of codes, ended its work before these steps.
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


def _find_operations(work: ProcessWork, device: int, calls: _Calls) -> _Operations | None:
    """Returns the operations that the calls launched, or None if they launched nothing on the device."""
    attributed, table = work.attributed, work.attributed.trace.operations
    call_of_launch = np.full(len(attributed.trace.launches) + 1, NONE, np.int32)
    call_of_launch[work.launch_index[calls.positions]] = np.arange(len(calls.table))
    call_of_launch[NONE] = NONE
    call_of_operation = call_of_launch[attributed.attribution.launch]
    of_process = np.concatenate(list(work.devices.values()))
    streams = _stream_codes(table.stream[of_process], table.device[of_process], device)
    is_studied = call_of_operation[of_process] != NONE
    index, stream = of_process[is_studied], streams[is_studied]
    on_device = index[stream >> DEVICE_SHIFT == 0]
    if not len(on_device):
        return None
    on_device = on_device[np.argsort(table.start[on_device], kind="stable")]
    exposed_ns = np.zeros(len(table))
    exposed_ns[on_device] = shares_of(table.start[on_device], table.end[on_device], work.activity[on_device])
    order = np.lexsort((table.start[index], call_of_operation[index]))
    order = order[table.end[index[order]] > table.start[index[order]]]
    index, stream = index[order], stream[order]
    start = table.start[index]
    launched_at = work.launched_at[of_process]
    is_earlier = ~is_studied & (launched_at < calls.start[0]) & (launched_at > LONG_AGO)
    stream_ready = []
    for code in np.unique(stream):
        precedes = (streams == code) & (table.start[of_process] < start[stream == code].min())
        stream_ready.append(table.end[of_process[precedes]].max(initial=LONG_AGO))
    return _Operations(
        index,
        stream,
        call_of_operation[index].astype(np.int64),
        start,
        table.end[index],
        np.isin(table.copy[index], (PAGEABLE_TO_DEVICE, DEVICE_TO_PAGEABLE)),
        exposed_ns[index],
        streams[is_earlier],
        table.end[of_process[is_earlier]],
        np.array(stream_ready),
    )


def _stream_codes(stream: Ints, device: SmallInts, studied_device: int) -> Ints:
    """Returns a code for each stream of each device: streams of two devices may have the same number."""
    numbers: Ints = stream.astype(np.int64)
    if (numbers >> DEVICE_SHIFT).any():  # AMD's numbers are addresses
        numbers = dense_codes(numbers)[1].astype(np.int64)
    codes: Ints = numbers + ((device.astype(np.int64) - studied_device) << DEVICE_SHIFT)
    return codes


# --- what they waited for


def _make_replay(
    work: ProcessWork, calls: _Calls, operations: _Operations, max_cost_ns: Floats, *, is_single_pass: bool
) -> Replay:
    """Makes the replay: what each call and each operation waited for, and the time that it needed by itself."""
    waits = _find_waits(calls.table, operations)
    # If another thread goes on meanwhile, the program does not wait.
    awaited = np.where(calls.next_start < calls.end - _CLOCK_SKEW_NS, NONE, waits.awaited)
    begin = np.where((awaited != NONE) | waits.is_blocked, calls.end, calls.start)
    cpu_ns = np.maximum(calls.next_start - begin, 0)
    # If the profiler works inside a launch, the operation is launched that much later.
    profiler_in_launch = work.profiler_busy.covered_within(calls.start, calls.end)[operations.launch]
    launched_at = calls.start[operations.launch] + profiler_in_launch
    joined = _find_joins(calls.table, operations)
    delays = _find_delays(operations, launched_at, joined)
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
        profiler_ns=max_cost_ns,
        pause_ns=np.where(calls.idle_ns >= PAUSE_NS, calls.idle_ns, 0).astype(np.float64),
        stream=operations.stream,
        joined=joined,
        join_gap_ns=delays.join_gap_ns,
        is_single_pass=is_single_pass,
        noted_ns=work.profiler_busy.covered_within(calls.next_start - cpu_ns, calls.next_start).astype(np.float64),
    )


@dataclass(frozen=True)
class _Waits:
    """What each call waited for; every column has the shape (calls,).

    Attributes:
        awaited: the last operation that the call waited for, or ``NONE``.
        min_wait_ns: the shortest time that the call takes.
        return_ns: the time from the end of the awaited operation to the end of the call.
        is_blocked: whether the call waited for room in a queue that was full of work from before these steps. In the
            replay nothing runs before the steps, so nothing is awaited.
    """

    awaited: Ints
    min_wait_ns: Floats
    return_ns: Floats
    is_blocked: Bools


def _find_waits(calls: Launches, operations: _Operations) -> _Waits:
    """Finds the operation that each call waited for.

    A synchronization, a long copy and a long free wait for the operation of any stream that ended last before the call
    did. A long copy from or to pageable memory ends with its own operation. Any other long call waits if the driver's
    queue is full.
    """
    stream, launch, end = operations.stream, operations.launch, operations.end
    duration, positions = calls.end - calls.start, np.arange(len(calls))
    is_long = duration > _MIN_BLOCKING_NS
    awaited, queued = np.full(len(calls), NONE), dict[int, Ints]()  # queued: launches of each device without an end yet
    for device in np.unique(stream >> DEVICE_SHIFT).tolist():
        earlier_ends = np.sort(operations.earlier_end[operations.earlier_stream >> DEVICE_SHIFT == device])
        queued[device] = len(earlier_ends) - np.searchsorted(earlier_ends, calls.start, side="right")
    for code in np.unique(stream).tolist():
        on_stream = np.flatnonzero(stream == code)
        latest_end = np.maximum.accumulate(end[on_stream])
        newest = np.searchsorted(launch[on_stream], positions, side="right") - 1  # launched by the call or before it
        last_ended = np.searchsorted(latest_end, calls.end + _CLOCK_SKEW_NS, side="right") - 1
        last = np.minimum(newest, last_ended)
        is_later = (last >= 0) & ((awaited == NONE) | (end[on_stream[last]] > end[awaited]))
        awaited = np.where(is_later, on_stream[last], awaited)
        queued[code >> DEVICE_SHIFT] += newest + 1 - np.searchsorted(latest_end, calls.start, side="right")
    ran_meanwhile = (awaited >= 0) & (np.append(end, 0)[awaited] >= calls.start)
    synchronizes = (calls.call == SYNCHRONIZE) & (awaited >= 0)
    blocks = np.isin(calls.call, (COPY, FREE)) & ran_meanwhile & is_long
    # A copy of pageable memory goes through a buffer of the driver: the call ends a little before or after the copy.
    own_copy = np.full(len(calls), NONE)
    own_copy[launch[operations.is_pageable]] = np.flatnonzero(operations.is_pageable)
    is_pageable = (calls.call == COPY) & (own_copy != NONE) & is_long
    is_pageable &= np.append(end, 0)[own_copy] - calls.end < duration // 2
    awaited = np.where(is_pageable, own_copy, awaited)
    awaited_end, ran_meanwhile = np.append(end, 0)[awaited], ran_meanwhile | is_pageable
    is_queue_full = np.max(list(queued.values()), axis=0) >= _FULL_QUEUE_LAUNCHES
    waits_for_room = ~is_pageable & is_long & is_queue_full
    waits = synchronizes | blocks | (waits_for_room & ran_meanwhile) | is_pageable
    until_end = np.where(is_pageable, calls.end - awaited_end, np.maximum(calls.end - awaited_end, 0))
    shortest = np.minimum(duration, _MIN_SYNCHRONIZATION_NS)
    return _Waits(
        awaited=np.where(waits, awaited, NONE),
        min_wait_ns=np.where(ran_meanwhile, shortest, duration).astype(np.float64),
        return_ns=np.where(ran_meanwhile, until_end, shortest).astype(np.float64),
        is_blocked=waits_for_room & ~ran_meanwhile,
    )


def _find_joins(calls: Launches, operations: _Operations) -> Ints:
    """Finds the operation of another stream that each operation waits for, ``NONE`` for none, from the calls' names.

    After a call that makes a stream wait for an event, the next launched operation is taken to be the one that waits.
    It waits for the operation of another stream that was launched before the call and ended last before its own start.
    If an event was recorded just before the call, a side stream probably waits instead of the main stream. Then the
    join is dropped, unless the operation starts as soon as the awaited one ends and nothing else delayed it.
    """
    stream, launch, start, end = operations.stream, operations.launch, operations.start, operations.end
    waits, records = (
        np.flatnonzero(np.array([bool(pattern.match(name)) for name in calls.names])[calls.name])
        for pattern in (_WAIT_EVENT, _RECORD_EVENT)
    )
    joined = np.full(len(launch), NONE, np.int64)
    waiting = np.searchsorted(launch, waits, side="right")  # the operation after each call that waits for an event
    waits, waiting = waits[waiting < len(launch)], waiting[waiting < len(launch)]
    previous_launch = np.where(waiting > 0, launch[waiting - 1], 0)
    records_between = np.searchsorted(records, waits) > np.searchsorted(records, previous_launch)
    streams, counts = np.unique(stream, return_counts=True)
    on_main_stream = stream[waiting] == streams[counts.argmax()]
    is_certain = np.zeros(len(launch), np.bool_)
    is_certain[waiting[~(records_between & on_main_stream)]] = True
    for code in streams.tolist():
        on_stream = np.flatnonzero(stream == code)
        latest_end = np.maximum.accumulate(end[on_stream])
        ended = np.searchsorted(latest_end, start[waiting] + _CLOCK_SKEW_NS, side="right")
        last = np.append(on_stream, NONE)[np.minimum(np.searchsorted(on_stream, waiting), ended) - 1]
        joins = (last != NONE) & (stream[waiting] != code)
        joins &= end[last] > np.where(joined[waiting] != NONE, end[joined[waiting]], LONG_AGO)
        joined[waiting[joins]] = last[joins]
    joined_end, preceding = end[joined], preceding_on_stream(stream)
    starts_at_once = start - joined_end <= _MAX_JOIN_GAP_NS
    is_delayed_by_join = (calls.start[launch] < joined_end) & ((preceding < 0) | (end[preceding] < joined_end))
    return np.where(is_certain | (starts_at_once & is_delayed_by_join), joined, NONE)


@dataclass(frozen=True)
class _Delays:
    """The shortest times from what an operation waits for to its start, ns; every column has shape (operations,)."""

    latency_ns: Floats
    spacing_ns: Floats
    join_gap_ns: Floats


def _find_delays(operations: _Operations, launched_at: Ints, joined: Ints) -> _Delays:
    """Finds how long after its launch, after its stream's previous work, and after its joined work each one can start.

    Each operation was delayed by one of the three: that time is taken from the trace. The other two are at most the
    median over the operations that were delayed by them.
    """
    start, end, stream = operations.start, operations.end, operations.stream
    preceding = preceding_on_stream(stream)
    ready = operations.stream_ready[np.searchsorted(np.unique(stream), stream)]
    stream_end = np.where(preceding >= 0, end[preceding], np.maximum(ready, launched_at))
    joined_end = np.where(joined >= 0, end[joined], LONG_AGO)
    previous_end = np.maximum(stream_end, joined_end)
    # Times of a clock that counts from 1970 are too large for exact floats, so differences of integers are compared.
    latency, spacing, join_gap = start - launched_at, start - stream_end, start - joined_end
    on_idle_gpu = (launched_at > previous_end) & (start > launched_at)
    usual_latency = np.median(latency[on_idle_gpu]) if on_idle_gpu.any() else _DEFAULT_LATENCY_NS
    by_join = (joined_end > stream_end) & (joined_end - launched_at >= usual_latency)
    by_launch = (spacing > 0) & (previous_end - launched_at < usual_latency)
    by_stream = ~by_launch & ~by_join & (spacing > 0)
    usual_spacing = np.median(spacing[by_stream]) if by_stream.any() else _DEFAULT_SPACING_NS
    usual_join_gap = np.median(join_gap[by_join]) if by_join.any() else _DEFAULT_SPACING_NS
    return _Delays(
        np.where(by_launch, np.maximum(latency, 0), usual_latency).astype(np.float64),
        np.where(by_launch | by_join, np.minimum(spacing, usual_spacing), spacing).astype(np.float64),
        np.where(by_join, join_gap, np.minimum(join_gap, usual_join_gap)).astype(np.float64),
    )


# --- what they are


def _describe_calls(work: ProcessWork, calls: _Calls, caller: Ints) -> StudiedCalls:
    """Returns what each call is, and what the program does after it."""
    loading_ns, pause_range = work.pauses_between(np.minimum(calls.end, calls.next_start), calls.next_start)
    return StudiedCalls(
        start=calls.start,
        kind=calls.table.call,
        api=calls.table.name,
        caller=caller,
        range=work.ranges_at(calls.start),
        pause_range=pause_range,
        loading_ns=np.where(calls.idle_ns >= PAUSE_NS, loading_ns, 0),
        unrecorded_ns=calls.unrecorded_ns,
        off_cpu_ns=_off_cpu_ns(work.attributed.trace.off_cpu, calls),
    )


def _off_cpu_ns(off_cpu_of_threads: Mapping[int, tuple[Ints, Ints]], calls: _Calls) -> Floats:
    """Returns the time after each call in which the thread of the next call has no CPU, ns; NaN if unknown."""
    thread = np.append(calls.table.thread[1:], calls.table.thread[-1:])
    off_cpu_ns = np.full(len(calls.table), np.nan)
    for code in set(off_cpu_of_threads).intersection(np.unique(thread).tolist()):
        on_thread = thread == code
        begin, end = np.minimum(calls.end, calls.next_start)[on_thread], calls.next_start[on_thread]
        off_cpu_ns[on_thread] = Cover.from_intervals(*off_cpu_of_threads[code]).covered_within(begin, end)
    return off_cpu_ns


def _describe_operations(work: ProcessWork, operations: _Operations) -> StudiedPieces:
    """Returns what each operation is."""
    index, attributed = operations.index, work.attributed
    table, kernel = attributed.trace.operations, attributed.kernels.code[index]
    return StudiedPieces(
        start=operations.start,
        operation=index,
        kind=table.kind[index],
        size=table.size[index],
        copy=np.where(kernel == NONE, table.copy[index], OTHER_COPY),
        kernel=kernel,
        phase=work.phase[index],
        attention_part=attributed.find_attention_parts(index),
        duration_ns=operations.end - operations.start,
        exposed_ns=operations.exposed_ns,
    )


def _find_spans(work: ProcessWork, calls: _Calls) -> RangeSpans:
    """Finds the calls that each of the program's ranges holds."""
    ranges = work.attributed.trace.ranges
    name, start, end = ranges.name[work.ranges], ranges.start[work.ranges], ranges.end[work.ranges]
    middles = np.maximum.accumulate((np.maximum(calls.end, calls.start) + calls.next_start) // 2)
    bounds = [np.searchsorted(times, edges) for times in (calls.start, middles) for edges in (start, end)]
    holds_any = (bounds[0] < bounds[1]) | (bounds[2] < bounds[3])
    return RangeSpans(*(column[holds_any] for column in (name, *bounds)))


def _measured_ns(replay: Replay, windows: Windows, calls: _Calls, operations: _Operations) -> float:
    """Returns the mean length of the steps in the trace, ns, counted as in a replay."""
    if replay.steps >= MIN_STEPS:
        call_starts = np.append(calls.start, calls.next_start[-1])
        recorded = Run(call_starts, np.append(operations.end, operations.stream_ready.max()))
        return float(replay.step_lengths_ns(recorded)[1:].mean())
    # From the first call of the steps to the first call after them.
    first_delay_ns, end_delay_ns = calls.delays_ns
    return float(windows.length.sum() + end_delay_ns - first_delay_ns) / replay.steps
