"""Finds the API calls, the pauses and the operations of one process, and the causes of its devices' idle time.

The calls of all threads that launch work are treated as one sequence, since only one of these threads runs at a time:
Python has a global interpreter lock, and the main thread waits while autograd's thread works.

Every nanosecond of a device's idle time has one cause. The cause of a gap depends on the operation that ends the gap.
If this operation was launched before the gap began, it was in the device's queue, and the program did not delay it.
Otherwise, the program launched it late, and the cause is what the program did before the launch: it was in a blocking
call when the device ran out of work, it was in the allocator or another slow call, it worked on the CPU, or it launched
slowly.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Literal, get_args

import numpy as np

from nsys_analyzer.analysis.intervals import LONG_AGO, NONE, Cover, Timeline, find_overlaps
from nsys_analyzer.analysis.kernels.class_rules import COMMUNICATION, FILLS, UNKNOWN
from nsys_analyzer.analysis.ranges.instances import AttributedTrace
from nsys_analyzer.analysis.steps.anatomy import (
    COMMUNICATING,
    COMPUTE,
    COPYING,
    Anatomy,
    Gaps,
    dissect_steps,
    find_latest_earlier_ends,
)
from nsys_analyzer.analysis.steps.profiler_cost import find_profiler_busy_times
from nsys_analyzer.analysis.steps.windows import Windows, mask_instances
from nsys_analyzer.trace.arrays import Bools, Ints, distinct, take_or_default
from nsys_analyzer.trace.columns import (
    ALLOCATE,
    BETWEEN_DEVICES,
    COPY,
    FREE,
    INTO_HOST,
    MEMCPY,
    MEMSET,
    ON_DEVICE,
    OTHER_CALL,
    SYNCHRONIZE,
    Columns,
    Launches,
    process_of,
)
from nsys_analyzer.trace.phase_names import (
    OTHER_STEP,
    REQUEST_RANGE,
    STEP,
    map_by_shape,
    normalize_name,
    parse_served_step,
)

Cause = Literal[
    "sync", "allocator", "copy", "launch", "host", "data", "communication", "unrecorded", "profiler", "unknown"
]
CAUSES: tuple[Cause, ...] = get_args(Cause)
_SYNC, _ALLOCATOR, _COPY, _LAUNCH, _HOST, _DATA, _COMMUNICATION, _UNRECORDED, _PROFILER, _UNKNOWN = range(len(CAUSES))

#: The phase name of GPU work that was launched outside all phases.
OUTSIDE_PHASES = "outside the phases"
#: The approximate number of operations in a block of steps that is dissected at once. The block is large enough for
#: numpy to be efficient, and small enough for the processor's cache.
OPERATIONS_PER_BLOCK = 50_000
#: A pause of the program is a time of at least this length without API calls, ns.
PAUSE_NS = 100_000
#: An API call that copies counts as a blocking call if it takes longer than this, ns.
_BLOCKING_COPY_NS = 15_000
#: A gap between two queued operations is a pause of the device itself if it is at most this long, ns. Most such gaps
#: take about a microsecond.
_MAX_DEVICE_PAUSE_NS = 10_000
#: A call waits for unrecorded work if it ends at least this long after all recorded work has ended, ns.
_UNRECORDED_WAIT_NS = 1_000_000
#: The maximum difference between the clocks of two threads, or of CPU and GPU, ns.
CLOCK_SKEW_NS = 3_000

#: A range loads batches if its name contains one of these words, or a verb and a noun as in ``get_batch``.
_LOADING_WORDS = (
    "data", "dataset", "dataloader", "dataloading", "loader", "loading", "fetch", "fetching", "prefetch", "minibatch",
)  # fmt: skip
_LOADING_VERBS = ("get", "next", "load", "collate", "read")
_LOADED_NOUNS = ("batch", "batches", "input", "inputs", "sample", "samples")
#: Matches the start of a word that names a part of the model. A range whose name contains such a word does not load
#: batches. Examples are ``BatchNorm2d``, ``DistributedDataParallel.forward``, ``input_proj`` and ``fetch_expert_3``,
#: which loads weights.
_MODEL_WORD = re.compile(r"norm|parallel|embed|proj|layer|forward|backward|loss|weight|param|expert|kv|w[a-z]?\d*$")
#: Matches the name of a Python function as PyTorch's profiler writes it with stacks.
_PYTHON_FUNCTION = re.compile(r"(?:.*/)?(?P<file>[^/]*)\.py\(\d+\): (?P<function>.*)")
#: Words in the names of Python files that load batches. "loader" is missing, since such a file may load something else.
_LOADING_FILE_WORDS = frozenset(("data", "dataset", "datasets", "dataloader", "datamodule"))


def is_loading(name: str) -> bool:
    """Checks whether the name of a range says that the range contains the input pipeline."""
    if function := _PYTHON_FUNCTION.fullmatch(name):
        in_loading_file = not _LOADING_FILE_WORDS.isdisjoint(normalize_name(function["file"]).split())
        return in_loading_file or is_loading(function["function"])
    words = set(normalize_name(name).split())
    loads_batch = not words.isdisjoint(_LOADING_VERBS) and not words.isdisjoint(_LOADED_NOUNS)
    names_model = any(_MODEL_WORD.match(word) for word in words)
    return (loads_batch or not words.isdisjoint(_LOADING_WORDS)) and not names_model


@dataclass(frozen=True)
class Stretches(Columns):
    """Stretches of time with one cause each, in order. The stretches do not overlap.

    Attributes:
        start, end: the start and end of each stretch, ns.
        cause: the index of the cause in ``CAUSES``.
        range: the code of the name of the program's innermost range. It is ``NONE`` outside of ranges, and in the range
            of a step without an inner range.
        api: the code of the name of the API call that the program executes, ``NONE`` if it executes none.
    """

    end: Ints
    cause: Ints
    range: Ints
    api: Ints


@dataclass(frozen=True)
class IdleStretches(Stretches):
    """The stretches in which a device idles, in order. A gap is divided where its cause changes.

    Attributes:
        step: the index of the step that contains the stretch.
        begins: True for the stretches that are counted as gaps. If a pause or a call of the program covers several
            stretches, only the first stretch is counted.
        is_device_pause: True for short pauses of the device between two queued operations.
    """

    step: Ints
    begins: Bools
    is_device_pause: Bools


class ProcessWork:
    """The work of a process: its GPU operations, the API calls of the threads that launch them, and what delays these.

    Attributes:
        devices: for each device, the indices of the process's operations on the device.
        classes: the names of the kernel classes.
        class_code: shape (operations,), the index in ``classes`` of the class of each operation of the trace.
        activity: shape (operations,), ``COMPUTE``, ``COPYING`` or ``COMMUNICATING`` for each operation of the trace.
        launched_at: shape (operations,), when each operation of the trace was launched, ns; ``LONG_AGO`` if unknown.
        phases: the names of the phases.
        phase: shape (operations + 1,), the index in ``phases`` of the phase of each operation of the trace. The last
            entry, which the index -1 selects, is ``OUTSIDE_PHASES``.
        calls: the API calls of the threads that launch work, without calls inside other calls.
        launch_index: shape (calls,), the index of each call in the trace's launches; ``NONE`` for an added call.
        waiting_calls: the indices of the calls that wait for the GPU: synchronizations and blocking copies.
        slow_calls: the indices of other calls that take long, such as a call that loads a CUDA module.
        allocating_calls: the indices of the calls that allocate or free device memory.
        ranges: the indices of the program's ranges, without the ranges of autograd's threads.
        unrecorded_wait_ns: shape (calls,), the time at the end of each call in which the call still waits although all
            recorded work has ended, ns.
        profiler_busy: the times in which the profiler delayed the program, as the profiler records them.
        delays: the program's pauses, its time in the allocator, in slow calls and in waits for unrecorded work, and the
            profiler's own work. The cause of a part of a pause is "data" if the program loads a batch in it. The names
            of ranges show this. If no range has such a name, it is inferred for parts outside of ranges that precede a
            copy to the device, except at the end of a step.
    """

    def __init__(self, attributed: AttributedTrace, process: int, windows: Windows) -> None:
        self.attributed, self.process = attributed, process
        self._parts: dict[int, tuple[Windows, Ints]] = {}  # the first dissected steps of each device, and their parts
        index = np.flatnonzero(attributed.trace.operations.process == process).astype(np.int32)
        device_of = attributed.trace.operations.device[index]
        self.devices = {device: index[device_of == device] for device in distinct(device_of).tolist()}
        self._classify_operations()
        self._find_calls(int(windows.start[0]) if windows.source == "pass" else None)
        ranges = attributed.trace.ranges
        # The ranges of autograd's threads are operators. The other ranges show what the program does.
        is_engine = np.isin(ranges.thread, attributed.attribution.engine_threads)
        self.ranges = np.flatnonzero((process_of(ranges.thread) == process) & ~is_engine)
        thread, start, end = (column[self.ranges] for column in (ranges.thread, ranges.start, ranges.end))
        self._open_ranges = Timeline(process_of(thread), start, end, innermost=True)
        # The ranges of steps and requests do not show what the program does inside them.
        is_request = np.array([*map(bool, map_by_shape(ranges.names, REQUEST_RANGE.fullmatch)), False])[ranges.name]
        is_step_or_request = (attributed.roles.has_role(STEP, OTHER_STEP) | is_request)[self.ranges]
        self._range_codes = np.append(np.where(is_step_or_request, NONE, ranges.name[self.ranges]), NONE)
        self.delays = self._find_delays(int(windows.start[0]), int(windows.end[-1]))

    def _classify_operations(self) -> None:
        """Finds the class, the activity, the launch time and the phase of each operation."""
        operations, kernels = self.attributed.trace.operations, self.attributed.kernels
        self.classes = tuple(dict.fromkeys((*kernels.classes, FILLS, UNKNOWN)))
        code = {name: i for i, name in enumerate(self.classes)}
        code_of_kernel = np.array([*(code[name] for name in kernels.classes), code[UNKNOWN]], np.int32)
        self.class_code = code_of_kernel[kernels.code]
        memory = slice(operations.of_kind(MEMCPY).start, operations.of_kind(MEMSET).stop)
        self.class_code[memory][kernels.code[memory] == NONE] = code[FILLS]
        self.activity = np.full(len(operations), COMPUTE, np.int8)
        self.activity[operations.of_kind(MEMCPY)] = COPYING
        self.activity[self.class_code == code.get(COMMUNICATION, NONE)] = COMMUNICATING
        has_launch, time = self.attributed.attribution.thread != NONE, self.attributed.attribution.time
        self.launched_at = time if has_launch.all() else np.where(has_launch, time, LONG_AGO)
        instances = self.attributed.instances
        self.phases = (*instances.phases, OUTSIDE_PHASES)
        phase_of_instance = np.append(instances.phase, len(instances.phases)).astype(np.int32)
        self.phase = phase_of_instance[np.append(self.attributed.instances_of_operations[0], NONE)]

    def _find_calls(self, begin: int | None) -> None:
        """Finds the calls of the threads that launch work, and which of these calls wait, take long or allocate.

        Args:
            begin: the start of the capture if the whole capture is one step, ns, else None. A call of length 0 is added
                at this time, so that the time before the first call counts as a pause after a call.
        """
        launches = self.attributed.trace.launches
        threads = distinct(take_or_default(launches.thread, self.attributed.attribution.launch, NONE))
        index = np.flatnonzero(np.isin(launches.thread, threads[process_of(threads) == self.process])).astype(np.int32)
        index = index[np.lexsort((-launches.end[index], launches.start[index]))]
        index = index[~_lie_inside_calls(launches.select(index))]
        calls = launches.select(index)
        if begin is not None and (calls.start[:1] > begin).any():
            opening = {"start": begin, "end": begin, "call": OTHER_CALL, "correlation": NONE}
            columns = calls.columns()
            columns = {name: np.insert(column, 0, opening.get(name, column[0])) for name, column in columns.items()}
            index, calls = np.insert(index, 0, NONE), replace(calls, **columns)
        self.launch_index, self.calls = index, calls
        duration = calls.end - calls.start
        is_waiting = (calls.call == SYNCHRONIZE) | ((calls.call == COPY) & (duration > _BLOCKING_COPY_NS))
        # If another thread makes a call during this call, the program does not wait.
        is_waiting &= np.append(calls.start, np.iinfo(np.int64).max)[1:] >= calls.end - CLOCK_SKEW_NS
        is_allocating = np.isin(calls.call, (ALLOCATE, FREE))
        is_slow = ~np.isin(calls.call, (SYNCHRONIZE, COPY)) & ~is_allocating & (duration >= PAUSE_NS)
        self.waiting_calls, self.allocating_calls = np.flatnonzero(is_waiting), np.flatnonzero(is_allocating)
        self.slow_calls = np.flatnonzero(is_slow)
        self.profiler_busy = find_profiler_busy_times(self.attributed.trace, self.process, distinct(calls.thread))
        operations = self.attributed.trace.operations
        ends = np.sort(operations.end[operations.process == self.process])
        last_end = np.append(LONG_AGO, ends)[np.searchsorted(ends, calls.end + CLOCK_SKEW_NS, side="right")]
        last_end = np.clip(last_end, calls.start, calls.end)
        wait_after_work = calls.end - last_end - self.profiler_busy.covered_within(last_end, calls.end)
        is_unrecorded = is_waiting & (calls.call == SYNCHRONIZE) & (wait_after_work >= _UNRECORDED_WAIT_NS)
        self.unrecorded_wait_ns = np.where(is_unrecorded, wait_after_work, 0)

    def _find_delays(self, first: int, last: int) -> Stretches:
        """Finds the stretches between two times in which the program pauses, allocates, or executes a slow call."""
        pairs = zip(self._find_pauses(first, last), self._find_delaying_calls(), strict=True)
        start, end, *columns = (np.concatenate(pair) for pair in pairs)
        # Remove the profiler's own work from these stretches, and add it as stretches of its own.
        position, start, end = self.profiler_busy.find_gaps(start, end)
        profiler_busy, no_codes = self.profiler_busy, np.full(len(self.profiler_busy.start), NONE)
        profiler = (profiler_busy.start, profiler_busy.end, np.full_like(no_codes, _PROFILER), no_codes, no_codes)
        program = (start, end, *(column[position] for column in columns))
        columns = [np.concatenate(pair) for pair in zip(program, profiler, strict=True)]
        return Stretches(*columns).select(np.argsort(columns[0], kind="stable"))

    def _find_delaying_calls(self) -> tuple[Ints, Ints, Ints, Ints, Ints]:
        """Returns the calls that allocate, are slow, or wait for unrecorded work, as the columns of ``Stretches``."""
        calls, unrecorded_waits = self.calls, np.flatnonzero(self.unrecorded_wait_ns)
        index = np.unique(np.concatenate([self.allocating_calls, self.slow_calls, unrecorded_waits]))
        # If two threads execute such calls at the same time, the common time counts for the first call only.
        begin = np.where(self.unrecorded_wait_ns > 0, calls.end - self.unrecorded_wait_ns, calls.start)[index]
        begin = np.maximum(begin, find_latest_earlier_ends(calls.end[index]))
        index, begin = index[calls.end[index] > begin], begin[calls.end[index] > begin]
        is_slow, is_unrecorded = np.isin(index, self.slow_calls), np.isin(index, unrecorded_waits)
        cause = np.select([is_slow, is_unrecorded], [_LAUNCH, _UNRECORDED], _ALLOCATOR)
        ranges, apis = self.find_range_codes(calls.start[index]), calls.name[index].astype(np.int64)
        return begin, calls.end[index], cause, ranges, apis

    def _find_pauses(self, first: int, last: int) -> tuple[Ints, Ints, Ints, Ints, Ints]:
        """Finds the pauses between two times, and divides each pause where its innermost range changes.

        Returns the columns of ``Stretches``.
        """
        calls, ranges = self.calls, self.attributed.trace.ranges
        latest_end = np.maximum.accumulate(calls.end)
        start, end = np.append(first, latest_end), np.append(calls.start, last)
        is_pause = (end - start >= PAUSE_NS) & bool(len(calls))
        start, end = start[is_pause], end[is_pause]
        edges = distinct(np.concatenate([ranges.start[self.ranges], ranges.end[self.ranges]]))
        in_pause = np.searchsorted(start, edges) > np.searchsorted(end, edges, side="right")
        begin = np.sort(np.concatenate([start, edges[in_pause]]))
        pause, name = np.searchsorted(start, begin, side="right") - 1, self.find_range_codes(begin)
        changes = np.append(True, (np.diff(pause) != 0) | (np.diff(name) != 0))[: len(begin)]
        begin, pause, name = begin[changes], pause[changes], name[changes]
        part_end = np.minimum(np.append(begin[1:], last), end[pause])
        loads = np.array([*map_by_shape(ranges.names, is_loading), False])[name]
        # Loading is inferred from copies only if no range shows it. It is not inferred for a serving engine, which
        # copies the tokens of requests to the device before a step.
        if not (loads.any() or any(map_by_shape(ranges.names, parse_served_step))):
            precedes_batch = self._precede_batch_copy(start, end)[pause]
            loads = (name == NONE) & precedes_batch & (part_end - begin >= PAUSE_NS)
        return begin, part_end, np.where(loads, _DATA, _HOST), name, np.full(len(name), NONE)

    def _precede_batch_copy(self, start: Ints, end: Ints) -> Bools:
        """Returns True for each pause after which a batch is copied to the device; shape (pauses,).

        The value is False for a pause in which the range of a step ends.
        """
        attributed, operations = self.attributed, self.attributed.trace.operations
        to_device = (operations.kind == MEMCPY) & ~np.isin(operations.copy, (*INTO_HOST, ON_DEVICE, BETWEEN_DEVICES))
        copies = attributed.attribution.launch[to_device]
        # Calls of the kind OTHER_CALL only query something, such as whether a stream is captured.
        acting_calls = np.flatnonzero(self.calls.call != OTHER_CALL)
        next_call = np.append(acting_calls, NONE)[np.searchsorted(acting_calls, np.searchsorted(self.calls.start, end))]
        next_launch = np.append(self.launch_index, NONE)[next_call]
        copies_next = (next_call != NONE) & np.isin(next_launch, copies[copies != NONE])
        instances = attributed.instances
        is_step = mask_instances(attributed, self.process, STEP, OTHER_STEP)
        step_starts, step_ends = np.sort(instances.start[is_step]), np.sort(instances.end[is_step])
        middle_time = (start + end) // 2
        ended_by_middle = np.searchsorted(step_ends, middle_time, side="right")
        in_step = np.searchsorted(step_starts, middle_time, side="right") > ended_by_middle
        step_ends_inside = np.searchsorted(step_ends, end, side="right") > np.searchsorted(step_ends, middle_time)
        precedes: Bools = copies_next & ~(in_step & step_ends_inside)
        return precedes

    def find_innermost_ranges(self, time: Ints) -> Ints:
        """Returns the index of the program's innermost range at each time, ``NONE`` outside of ranges."""
        return np.append(self.ranges, NONE)[self._open_ranges.open_at(np.full(len(time), self.process), time)]

    def find_range_codes(self, time: Ints) -> Ints:
        """Returns the code of the name of the innermost range at each time.

        The code is ``NONE`` outside of ranges, and if the innermost range is that of a step or a request.
        """
        return self._range_codes[self._open_ranges.open_at(np.full(len(time), self.process), time)]

    def measure_loading(self, start: Ints, end: Ints) -> tuple[Ints, Ints]:
        """Measures the time in which the program loads a batch in each stretch [start, end), and finds the range.

        If the program loads a batch in a stretch, the range is that of the longest part in which it does so. Otherwise,
        it is the range of the longest delay.

        Returns:
            The loading time in each stretch, ns, and the code of the range's name, or ``NONE``.
        """
        stretch, part, part_start, part_end = find_overlaps(self.delays.start, self.delays.end, start, end)
        loads, duration = self.delays.cause[part] == _DATA, part_end - part_start
        order = np.lexsort((duration, loads, stretch))
        range_code = self.find_range_codes((start + end) // 2)
        range_code[stretch[order]] = self.delays.range[part[order]]  # of equal indices, the last assignment remains
        return np.bincount(stretch[loads], duration[loads], len(start)).astype(np.int64), range_code

    def measure_parts(self, windows: Windows, device: int) -> Ints:
        """Returns the parts of each step on a device, as in ``Anatomy.parts``; shape (4, steps), ns.

        The steps are not dissected again if they are the first steps that were dissected on this device.
        """
        if device not in self._parts or self._parts[device][0] is not windows:
            return np.hstack([anatomy.parts for _, anatomy in self.dissect_blocks(windows, device)])
        return self._parts[device][1]

    def dissect_blocks(self, windows: Windows, device: int) -> Iterator[tuple[Windows, Anatomy]]:
        """Dissects steps on a device. Yields blocks of steps with about ``OPERATIONS_PER_BLOCK`` operations each."""
        operations, index = self.attributed.trace.operations, self.devices[device]
        start = operations.start[index]
        if (start[1:] < start[:-1]).any():
            index = index[np.argsort(start, kind="stable")]
            start = operations.start[index]
        low = np.searchsorted(np.maximum.accumulate(operations.end[index]), windows.start, side="right")
        # The operation after the last window is needed too, since it ends the last gap.
        high = np.minimum(np.searchsorted(start, windows.end) + 1, len(index))
        block, parts = (np.cumsum(high - low) - 1) // OPERATIONS_PER_BLOCK, []
        for number in np.unique(block).tolist():
            operations_in_block = np.flatnonzero(block == number)
            steps = windows.select(operations_in_block)
            nearby_operations = index[int(low[operations_in_block].min()) : int(high[operations_in_block].max())]
            anatomy = dissect_steps(steps, operations, nearby_operations, self.activity)
            parts.append(anatomy.parts)
            yield steps, anatomy
        self._parts.setdefault(device, (windows, np.hstack(parts)))

    def find_idle_stretches(self, windows: Windows, device: int) -> IdleStretches:
        """Finds the stretches in which a device idles in the given steps, with their causes."""
        gaps = (anatomy.gaps for _, anatomy in self.dissect_blocks(windows, device))
        parts = [self.find_idle_causes(gaps_of_block).columns().values() for gaps_of_block in gaps]
        return IdleStretches(*map(np.concatenate, zip(*parts, strict=True)))

    def find_idle_causes(self, gaps: Gaps) -> IdleStretches:
        """Finds the causes of the gaps in which a device is idle."""
        # The device waits for the program until the launch of the operation that ends the gap. A slow launch, such as
        # that of a graph, delays the operation until the launching call returns.
        is_known, launches = gaps.next_operation != NONE, self.attributed.trace.launches
        launch = np.where(is_known, self.launched_at[gaps.next_operation], gaps.end)
        slow_launch_end = np.zeros(len(launches) + 1, np.int64)
        slow_launch_end[self.launch_index[self.slow_calls]] = self.calls.end[self.slow_calls]
        launch_of_next = self.attributed.attribution.launch[gaps.next_operation]
        launch = np.maximum(launch, np.where(is_known, slow_launch_end[launch_of_next], 0))
        is_queued = is_known & (launch <= gaps.start - CLOCK_SKEW_NS)
        late_until = np.where(is_queued, gaps.start, np.clip(launch, gaps.start, gaps.end))
        # Before `late_until`, the cause of the idle time is the cause of the stretch of `self.delays`, if there is one.
        gap, part, start, end = find_overlaps(self.delays.start, self.delays.end, gaps.start, late_until)
        delays = self.delays.select(part)
        # The cause of the remaining idle time is the call that waits when the gap begins, or the launch.
        waiting = self.waiting_calls
        last_wait = np.searchsorted(self.calls.start[waiting], gaps.start + CLOCK_SKEW_NS, side="right") - 1
        waits = (last_wait >= 0) & (np.append(self.calls.end[waiting], 0)[last_wait] + CLOCK_SKEW_NS >= gaps.start)
        is_copy = np.append(self.calls.call[waiting] != SYNCHRONIZE, False)[last_wait]
        is_collective = is_known & (self.activity[gaps.next_operation] == COMMUNICATING)
        is_device_pause = is_queued & (gaps.end - gaps.start <= _MAX_DEVICE_PAUSE_NS)
        cause = np.select(
            [is_device_pause, is_queued & is_collective, is_queued, waits & is_copy, waits, is_known],
            [_LAUNCH, _COMMUNICATION, _UNKNOWN, _COPY, _SYNC, _LAUNCH],
            _UNKNOWN,
        )
        call = np.where(waits & ~is_queued, np.append(waiting, NONE)[last_wait], NONE)
        has_call = call != NONE
        range_code, api_code = np.full((2, len(call)), NONE)
        range_code[has_call] = self.find_range_codes(self.calls.start[call[has_call]])
        api_code[has_call] = self.calls.name[call[has_call]]
        gap_of_rest, *bounds = Cover.from_intervals(start, end).find_gaps(gaps.start, gaps.end)
        first_of_part, first_of_rest = (
            np.append(True, gap_of_part[1:] != gap_of_part[:-1])[: len(gap_of_part)]
            for gap_of_part in (part, gap_of_rest)
        )
        no_pause = np.zeros(len(gap), np.bool_)
        delayed_parts = (start, end, delays.cause, delays.range, delays.api, gaps.step[gap], first_of_part, no_pause)
        cause, range_code, api_code, step, is_pause = (
            column[gap_of_rest] for column in (cause, range_code, api_code, gaps.step, is_device_pause)
        )
        remaining_parts = (*bounds, cause, range_code, api_code, step, first_of_rest, is_pause)
        columns = [np.concatenate(pair) for pair in zip(delayed_parts, remaining_parts, strict=True)]
        return IdleStretches(*columns).select(np.argsort(columns[0], kind="stable"))


def _lie_inside_calls(calls: Launches) -> Bools:
    """Returns True for each call that lies inside another call of its thread, such as a call of the driver.

    A call of length 0 at the end of another call, as a coarse clock may record it, does not count as inside.

    Args:
        calls: the calls, sorted by start; of two calls with the same start, the longer call comes first.
    """
    is_inside = np.zeros(len(calls), np.bool_)
    for thread in distinct(calls.thread):
        index = np.flatnonzero(calls.thread == thread)
        latest_end = np.maximum.accumulate(calls.end[index])
        is_inside[index[1:]] = (calls.end[index[1:]] <= latest_end[:-1]) & (calls.start[index[1:]] < latest_end[:-1])
    return is_inside
