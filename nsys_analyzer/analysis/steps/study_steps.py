"""Makes a study from the trace: selects a few consecutive steps, and describes their calls and operations.

The replay contains the work on all devices of the process. The figures are those of one device.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from nsys_analyzer.analysis.intervals import LONG_AGO, NONE, Cover
from nsys_analyzer.analysis.kernels.class_rules import COMMUNICATION
from nsys_analyzer.analysis.steps.anatomy import measure_exposed_ns
from nsys_analyzer.analysis.steps.dependencies import LaunchedOperations, LaunchingCalls, make_replay
from nsys_analyzer.analysis.steps.groups import Steps
from nsys_analyzer.analysis.steps.process import PAUSE_NS, ProcessWork
from nsys_analyzer.analysis.steps.profiler_cost import RecordedEvents
from nsys_analyzer.analysis.steps.replay import MIN_STEPS, ReplayedTimes
from nsys_analyzer.analysis.steps.study import (
    DEVICE_SHIFT,
    RangeSpans,
    StudiedCalls,
    StudiedGroup,
    StudiedOperations,
    Study,
)
from nsys_analyzer.analysis.steps.windows import Windows
from nsys_analyzer.trace.arrays import Ints, dense_codes
from nsys_analyzer.trace.columns import DEVICE_TO_PAGEABLE, OTHER_COPY, PAGEABLE_TO_DEVICE, pid_of
from nsys_analyzer.trace.schema import NS_PER_MS

#: The maximum number of studied steps, and of calls in all of them.
_MAX_STEPS, _MAX_CALLS = 10, 15_000
#: The maximum number of calls if the steps contain collectives. The ranks of a run are replayed in the steps that are
#: studied on all of them.
_MAX_CALLS_OF_RANK = 60_000
#: The largest number of steps is studied whose mean length differs from the length of a step by at most this share.
_TYPICAL_STEPS_TOLERANCE = 0.03


def study_groups(work: ProcessWork, steps: Steps, device: int) -> Study | None:
    """Makes a study of the measured steps, and a study of each other group of steps; see ``study_steps``."""
    study = study_steps(work, steps, device)
    if not study:
        return None
    groups = []
    for name, group in steps.unmeasured_groups:
        if study_of_group := study_steps(work, group, device):
            groups.append(StudiedGroup(name, len(group.windows), group.length_ms, study_of_group))
    return replace(study, other_groups=tuple(groups))


def study_steps(work: ProcessWork, steps: Steps, device: int, windows: Windows | None = None) -> Study | None:
    """Makes a study of some of the steps. Returns None if the steps launch nothing on the device.

    Args:
        work: the calls and the operations of the process. The replay contains the work on all of its devices.
        steps: the steps of the process.
        device: the device that is studied.
        windows: the steps to study. By default, these are a few consecutive steps whose mean length is close to the
            length of a step.
    """
    max_calls = _MAX_CALLS_OF_RANK if COMMUNICATION in work.attributed.kernels.classes else _MAX_CALLS
    windows = _select_windows(steps, work.calls.start, max_calls) if windows is None else windows
    calls = _find_calls(work, steps, windows)
    operations = _find_operations(work, device, calls) if calls else None
    if calls is None or operations is None:
        return None
    events = RecordedEvents(work.attributed.as_recorded, work.process)
    min_cost_ns, max_cost_ns = events.bound_costs(calls.table.start, calls.next_start)
    replay = make_replay(work, calls, operations, max_cost_ns, is_single_pass=windows.source == "pass")
    if replay.steps >= MIN_STEPS:
        call_starts = np.append(calls.table.start, calls.next_start[-1])
        recorded_times = ReplayedTimes(call_starts, np.append(operations.end, operations.stream_ready.max()))
        profiled_step_ns = float(replay.step_lengths_ns(recorded_times)[1:].mean())
    else:  # measured from the first call of the steps to the first call after the steps
        first_delay_ns, end_delay_ns = calls.delays_ns
        profiled_step_ns = float(windows.length.sum() + end_delay_ns - first_delay_ns) / replay.steps
    attributed = work.attributed
    kernels, ranges = attributed.kernels, attributed.trace.ranges
    leaf_phases = np.unique(ranges.name[attributed.roles.is_leaf_phase]).tolist()
    correlation_ids, torch_callers = calls.table.correlation.tolist(), attributed.trace.torch_callers
    callers = [torch_callers.get((work.process, correlation_id), "") for correlation_id in correlation_ids]
    caller_codes = {text: code for code, text in enumerate(dict.fromkeys(("", *callers)))}
    index, table = operations.index, attributed.trace.operations
    kernel = kernels.code[index]
    return Study(
        replay=replay,
        windows=windows,
        calls=_describe_calls(work, calls, np.array([caller_codes[text] for text in callers], np.int64)),
        operations=StudiedOperations(
            start=operations.start,
            trace_index=index,
            kind=table.kind[index],
            size=table.size[index],
            copy=np.where(kernel == NONE, table.copy[index], OTHER_COPY),
            kernel=kernel,
            phase=work.phase[index],
            attention_part=attributed.find_attention_parts(index),
            duration_ns=operations.end - operations.start,
            exposed_ns=operations.exposed_ns,
            resource=table.resource[index],
        ),
        spans=_find_spans(work, calls),
        kernels=kernels.names,
        classes=kernels.classes,
        phases=work.phases,
        apis=calls.table.names,
        callers=tuple(caller_codes),
        ranges=ranges.names,
        phase_ranges=frozenset(ranges.names[code] for code in leaf_phases),
        profiled_step_ns=profiled_step_ns,
        min_cost_share=float(min_cost_ns.sum() / max_cost_ns.sum()) if max_cost_ns.any() else 1.0,
        gpu=attributed.trace.metadata.gpu(pid_of(work.process), device),
        resources=table.resources,
        group=steps.group_names[steps.positions[0]],
    )


# --- which steps, calls and operations are studied


def _select_windows(steps: Steps, call_starts: Ints, max_calls: int) -> Windows:
    """Selects consecutive measured steps whose mean length is close to the length of a step.

    The largest number of steps whose mean length is close enough is selected. If no number of steps has such a mean,
    the steps with the closest mean length are selected.
    """
    windows = steps.windows
    if len(windows) >= MIN_STEPS:  # the last step is left out, because the time until its next step is unknown
        windows = windows.select(windows.cpu_start < steps.recorded.cpu_start[-1])
    call_counts = np.searchsorted(call_starts, windows.cpu_end) - np.searchsorted(call_starts, windows.cpu_start)
    calls_per_step = max(1, int(np.median(call_counts)))
    begins_sequence = windows.cpu_start[1:] != windows.cpu_end[:-1]
    sequences = np.split(np.arange(len(windows)), np.flatnonzero(begins_sequence) + 1)
    max_steps = min(int(np.clip(max_calls // calls_per_step, 1, _MAX_STEPS)), max(map(len, sequences)))
    total_ms = np.append(0, np.cumsum(windows.end - windows.start)) / NS_PER_MS
    best_choice = (np.inf, 0, 0)  # difference of the mean, first step, number of steps
    for count in range(max_steps, min(max_steps, MIN_STEPS) - 1, -1):
        long_sequences = [sequence for sequence in sequences if len(sequence) >= count]
        first = np.concatenate([sequence[: len(sequence) - count + 1] for sequence in long_sequences])
        difference_ms = np.abs((total_ms[first + count] - total_ms[first]) / count - steps.length_ms)
        # Of equally close blocks, the one nearest to the middle is chosen.
        distance_from_middle = np.abs(first + count / 2 - len(windows) / 2)
        closest_block = int(np.lexsort((distance_from_middle, difference_ms.round(6)))[0])
        best_choice = min(best_choice, (float(difference_ms[closest_block]), int(first[closest_block]), count))
        if best_choice[0] <= _TYPICAL_STEPS_TOLERANCE * steps.length_ms:
            break
    _, start, count = best_choice
    return windows.select(np.arange(start, start + count))


def _find_calls(work: ProcessWork, steps: Steps, windows: Windows) -> LaunchingCalls | None:
    """Returns the calls of the steps, or None if there are fewer than two calls."""
    bounds = np.append(windows.cpu_start, windows.cpu_end[-1:])
    first_call = np.searchsorted(work.calls.start, bounds)
    low, high = int(first_call[0]), int(first_call[-1])
    if high - low < 2:
        return None
    unrecorded_wait_ns = work.unrecorded_wait_ns[low:high]
    table = work.calls.select(slice(low, high))
    table = replace(table, end=table.end - unrecorded_wait_ns)
    step_follows = bool(np.isin(bounds[-1], steps.recorded.cpu_start))
    end = work.calls.start[high] if step_follows and high < len(work.calls) else max(bounds[-1], table.end[-1])
    if not np.isin(bounds[-1], steps.windows.cpu_start):
        # The next step is not measured. The time from its start to its first call is assumed to be that of the first
        # studied step.
        end = max(min(end, bounds[-1] + table.start[0] - bounds[0]), table.end[-1])
    return LaunchingCalls(
        table,
        slice(low, high),
        unrecorded_wait_ns,
        np.append(table.start[1:], end),
        first_call - low,
        (table.start[0] - bounds[0], end - bounds[-1]),
    )


def _find_operations(work: ProcessWork, device: int, calls: LaunchingCalls) -> LaunchedOperations | None:
    """Returns the operations that the given calls launched, or None if the calls launched nothing on the device."""
    attributed, table = work.attributed, work.attributed.trace.operations
    call_of_launch = np.full(len(attributed.trace.launches) + 1, NONE, np.int32)
    call_of_launch[work.launch_index[calls.positions]] = np.arange(len(calls.table))
    call_of_launch[NONE] = NONE
    call_of_operation = call_of_launch[attributed.attribution.launch]
    process_operations = np.concatenate(list(work.devices.values()))
    # Add the device to the code of each stream, because streams of two devices may have the same number.
    streams: Ints = table.stream[process_operations].astype(np.int64)
    if (streams >> DEVICE_SHIFT).any():  # stream IDs of AMD GPUs are addresses, which need more than 32 bits
        streams = dense_codes(streams)[1].astype(np.int64)
    streams = streams + ((table.device[process_operations].astype(np.int64) - device) << DEVICE_SHIFT)
    is_studied = call_of_operation[process_operations] != NONE
    index, stream = process_operations[is_studied], streams[is_studied]
    operations_on_device = index[stream >> DEVICE_SHIFT == 0]
    if not len(operations_on_device):
        return None
    operations_on_device = operations_on_device[np.argsort(table.start[operations_on_device], kind="stable")]
    exposed_ns = np.zeros(len(table))
    exposed_ns[operations_on_device] = measure_exposed_ns(
        table.start[operations_on_device], table.end[operations_on_device], work.activity[operations_on_device]
    )
    order = np.lexsort((table.start[index], call_of_operation[index]))
    order = order[table.end[index[order]] > table.start[index[order]]]
    index, stream = index[order], stream[order]
    start = table.start[index]
    launched_at = work.launched_at[process_operations]
    is_earlier = ~is_studied & (launched_at < calls.table.start[0]) & (launched_at > LONG_AGO)
    stream_ready = []
    for stream_code in np.unique(stream):
        is_before_steps = (streams == stream_code) & (
            table.start[process_operations] < start[stream == stream_code].min()
        )
        stream_ready.append(table.end[process_operations[is_before_steps]].max(initial=LONG_AGO))
    return LaunchedOperations(
        index,
        stream,
        call_of_operation[index].astype(np.int64),
        start,
        table.end[index],
        np.isin(table.copy[index], (PAGEABLE_TO_DEVICE, DEVICE_TO_PAGEABLE)),
        exposed_ns[index],
        streams[is_earlier],
        table.end[process_operations[is_earlier]],
        np.array(stream_ready),
    )


# --- descriptions of calls


def _describe_calls(work: ProcessWork, calls: LaunchingCalls, caller: Ints) -> StudiedCalls:
    """Describes each call, and the time until the next call."""
    idle_start, off_cpu_of_threads = np.minimum(calls.table.end, calls.next_start), work.attributed.trace.off_cpu
    loading_ns, pause_range = work.measure_loading(idle_start, calls.next_start)
    # The thread of the next call may have no CPU in the time before that call.
    next_thread = np.append(calls.table.thread[1:], calls.table.thread[-1:])
    off_cpu_ns = np.full(len(calls.table), np.nan)
    for thread in set(off_cpu_of_threads).intersection(np.unique(next_thread).tolist()):
        is_on_thread = next_thread == thread
        off_cpu = Cover.from_intervals(*off_cpu_of_threads[thread])
        off_cpu_ns[is_on_thread] = off_cpu.covered_within(idle_start[is_on_thread], calls.next_start[is_on_thread])
    return StudiedCalls(
        start=calls.table.start,
        kind=calls.table.call,
        api=calls.table.name,
        caller=caller,
        range=work.find_range_codes(calls.table.start),
        pause_range=pause_range,
        loading_ns=np.where(calls.idle_ns >= PAUSE_NS, loading_ns, 0),
        unrecorded_wait_ns=calls.unrecorded_wait_ns,
        off_cpu_ns=off_cpu_ns,
    )


def _find_spans(work: ProcessWork, calls: LaunchingCalls) -> RangeSpans:
    """Finds the calls inside each of the program's ranges."""
    ranges = work.attributed.trace.ranges
    name, start, end = ranges.name[work.ranges], ranges.start[work.ranges], ranges.end[work.ranges]
    middles = np.maximum.accumulate((np.maximum(calls.table.end, calls.table.start) + calls.next_start) // 2)
    bounds = [np.searchsorted(times, edges) for times in (calls.table.start, middles) for edges in (start, end)]
    has_calls = (bounds[0] < bounds[1]) | (bounds[2] < bounds[3])
    return RangeSpans(*(column[has_calls] for column in (name, *bounds)))
