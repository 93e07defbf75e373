"""The timeline of the steps: ranges, blocking calls, the work of each stream, and the idle time of each device."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import filterfalse
from typing import Literal

import numpy as np

from nsys_analyzer.analysis.attribution.attribution import PATH_SEPARATOR, make_range_paths
from nsys_analyzer.analysis.attribution.processes import runs_on_cpu
from nsys_analyzer.analysis.intervals import NONE
from nsys_analyzer.analysis.ranges.calls import CallFinder, ModuleCalls, find_module_calls
from nsys_analyzer.analysis.steps.groups import Steps
from nsys_analyzer.analysis.steps.lines import find_hottest_stacks
from nsys_analyzer.analysis.steps.process import CAUSES, ProcessWork
from nsys_analyzer.analysis.steps.study_steps import study_steps
from nsys_analyzer.analysis.steps.windows import Windows
from nsys_analyzer.trace.arrays import Bools, Integers, Ints, distinct_rows
from nsys_analyzer.trace.columns import (
    COPY_KINDS,
    MEMCPY,
    OPERATION_KINDS,
    PROCESS_MASK,
    MemoryUses,
    pid_of,
    process_of,
)
from nsys_analyzer.trace.phase_names import REQUEST_RANGE
from nsys_analyzer.trace.stacks import StackFrame

#: The approximate maximum number of operations in the tracks of a page. If a capture has more operations, only steps
#: around a step of median length are shown.
MAX_OPERATIONS_OF_TRACKS = 1_000_000
#: The thread ID of the track of requests, whose ranges belong to no thread.
_REQUESTS_THREAD = ~PROCESS_MASK

#: The unit of the values of a ``Level``.
LevelUnit = Literal["%", "MHz", "B/s"]

TrackKind = Literal["ranges", "calls", "lines", "stream", "idle"]


@dataclass(frozen=True)
class Track:
    """A row of a timeline: the boxes of one thread, stream or device, sorted by start.

    Attributes:
        title: the name of the thread, stream or device, such as "GPU stream 7".
        kind: "ranges" for nested ranges; "calls" for API calls that wait, take long or allocate; "lines" for sampled
            lines, each nested in the line that called it; "stream" for the GPU's work; "idle" for the GPU's idle time.
        start: shape (boxes,), the time from ``Tracks.origin_ns`` to the start of each box, ns.
        duration: shape (boxes,), the duration of each box, ns.
        name: shape (boxes,), the index of the name in ``Tracks.names``; for idle time, the name of the program's range.
        group: shape (boxes,), the index in ``Tracks.groups`` of the kernel class, or of the cause of idle time.
        depth: shape (boxes,), the row of the track that each box is drawn in, below the boxes that contain it.
    """

    title: str
    kind: TrackKind
    start: Ints
    duration: Ints
    name: Ints
    group: Ints
    depth: Ints


@dataclass(frozen=True)
class Stream(Track):
    """The GPU's work on one stream.

    Attributes:
        operation: shape (boxes,), the index of each operation in the trace.
        phase, module, path: shape (boxes,), indices into ``Tracks.phases``, ``Tracks.modules`` and ``Tracks.paths``:
            the phase and module of each operation, and the ranges around its launch. The first text of each is empty.
        wait: shape (boxes,), the time from the launch of each operation to its start, ns; -1 if the launch is unknown.
        thread: shape (boxes,), the index of the thread that launched each operation among the threads with a range
            track, or -1.
        critical: shape (boxes,), True if the operation is on the critical path of the steps.
    """

    operation: Ints
    phase: Ints
    module: Ints
    path: Ints
    wait: Ints
    thread: Ints
    critical: Bools


@dataclass(frozen=True)
class IdleTrack(Track):
    """The stretches in which a device is idle.

    Attributes:
        stack: shape (boxes,), the index in ``Tracks.stacks`` of the stack that was sampled most often in each stretch;
            0 if no stack was sampled.
    """

    stack: Ints


@dataclass(frozen=True)
class Level:
    """A lane with a value that changes over time, such as the active SMs.

    Attributes:
        title: what the value is.
        unit: the unit of the values.
        time: shape (values,), the time from ``Tracks.origin_ns`` at which each value begins, ns.
        value: shape (values,), the values; -1 while nothing was measured.
    """

    title: str
    unit: LevelUnit
    time: Ints
    value: Ints


@dataclass(frozen=True)
class Tracks:
    """The tracks of one process of a capture.

    Attributes:
        origin_ns: the time on the capture's clock that is the origin of all tracks, ns.
        duration_ns: the time from the origin to the end of the last step, ns.
        global_pid: the global ID of the process.
        steps: the start and end of each measured step, ns since the origin.
        on_cpu: whether the streams contain operators that run on the CPU, because the program does not use a GPU.
        left_out: a clause such as "5 of 40 steps are shown"; empty if all steps are shown.
        tracks: the tracks in the order in which a page shows them.
        names, groups, phases, modules, paths: the texts that the columns of tracks refer to by index.
        stacks: the lines of the program in each stack, the innermost line first. The first stack is empty.
        memory: the times at which the memory in use changes, ns since the origin, and the bytes in use from each time
            on. Both are empty if memory was not recorded.
        levels: the lanes of hardware counters.
    """

    origin_ns: int
    duration_ns: int
    global_pid: int
    steps: tuple[tuple[int, int], ...]
    on_cpu: bool
    left_out: str
    tracks: tuple[Track, ...]
    names: tuple[str, ...]
    groups: tuple[str, ...]
    phases: tuple[str, ...]
    modules: tuple[str, ...]
    paths: tuple[str, ...]
    stacks: tuple[tuple[str, ...], ...]
    memory: tuple[Ints, Ints]
    levels: tuple[Level, ...] = ()


def record_tracks(work: ProcessWork, steps: Steps, max_operations: int) -> Tracks:
    """Returns the tracks of the measured steps of a process.

    If the steps have more than about ``max_operations`` operations, only consecutive steps around a step of median
    length are included.
    """
    windows, operations = steps.windows, sum(map(len, work.devices.values()))
    count, left_out = max(1, len(windows) * max_operations // max(operations, 1)), ""
    if count < len(windows):
        left_out = f"{count:,} of {len(windows):,} steps are shown"
        first_step = min(max(windows.median_position - count // 2, 0), len(windows) - count)
        windows = windows.select(np.arange(first_step, first_step + count))
    return _TrackMaker(work, windows, steps).make_tracks(left_out)


class _TextTable:
    """A table of distinct texts. The code of a text is its index in the table."""

    def __init__(self, *first_names: str) -> None:
        self._code = {text: code for code, text in enumerate(first_names)}

    def codes(self, texts: Sequence[str], index: Integers) -> Ints:
        """Returns the code of ``texts[i]`` for each ``i`` of ``index``, and adds new texts to the table."""
        used_codes, position = np.unique(index, return_inverse=True)
        code = [self._code.setdefault(texts[number], len(self._code)) for number in used_codes.tolist()]
        return np.array(code, np.int64)[position.ravel()]

    @property
    def texts(self) -> tuple[str, ...]:
        """Returns all texts that have a code, in the order of their codes."""
        return tuple(self._code)


class _TrackMaker:
    """Makes the tracks that a timeline shows for one process."""

    def __init__(self, work: ProcessWork, windows: Windows, steps: Steps) -> None:
        self.work, self.windows, self.steps = work, windows, steps
        self.attributed, self.process = work.attributed, work.process
        self.stacks: tuple[tuple[StackFrame, ...], ...] = ((),)
        self.start, self.end = int(windows.start[0]), int(windows.end[-1])
        self.names, self.groups = _TextTable(""), _TextTable("")
        self.modules, self.paths = _TextTable(""), _TextTable("")
        operations = self.attributed.trace.operations
        in_steps = (operations.process == self.process) & (operations.end > self.start) & (operations.start < self.end)
        index = np.flatnonzero(in_steps)
        self.index = index[np.argsort(operations.start[index], kind="stable")]
        self.devices = np.unique(operations.device[self.index]).tolist()

    def make_tracks(self, left_out: str) -> Tracks:
        """Returns all tracks: those of the CPU threads that launch work, of the devices, and of the other threads."""
        on_cpu = runs_on_cpu(self.attributed.trace, self.process)
        threads, launching_threads, other_threads = self._make_range_tracks()
        tracks = [*launching_threads, *([] if on_cpu else [self._make_call_track()]), *self._make_line_tracks()]
        tracks += self._make_streams(threads, on_cpu=on_cpu)
        tracks += [self._make_idle_track(device) for device in self.devices if not on_cpu]
        windows = self.windows
        bounds = zip((windows.start - self.start).tolist(), (windows.end - self.start).tolist(), strict=True)
        return Tracks(
            origin_ns=self.start,
            duration_ns=self.end - self.start,
            global_pid=self.process,
            steps=() if windows.source == "pass" else tuple(bounds),
            on_cpu=on_cpu,
            left_out=left_out,
            tracks=tuple(track for track in (*tracks, *other_threads) if len(track.start)),
            names=self.names.texts,
            groups=self.groups.texts,
            phases=("", *self.attributed.instances.phases),
            modules=self.modules.texts,
            paths=self.paths.texts,
            stacks=tuple(tuple(map(_describe_frame, frames)) for frames in self.stacks),
            memory=self._find_memory_in_use(),
        )

    def _make_track(
        self, title: str, kind: TrackKind, start: Ints, end: Ints, name: Ints, group: Ints | None = None
    ) -> Track:
        """Makes a track of boxes. Boxes may be nested, except for the kind "idle"."""
        zeros = np.zeros(len(start), np.int64)
        depth = zeros if kind == "idle" else _find_depths(start, end)
        duration = np.maximum(end - start, 0)
        return Track(title, kind, start - self.start, duration, name, zeros if group is None else group, depth)

    def _make_range_tracks(self) -> tuple[Ints, list[Track], list[Track]]:
        """Makes the range track of each thread.

        Returns:
            The threads with ranges, the main thread first; the tracks of threads that launch work; the other tracks.
        """
        trace = self.attributed.trace
        tables = [trace.ranges, trace.operators] if trace.metadata.profiler == "torch" else [trace.ranges]
        tables = [table.select(process_of(table.thread) == self.process) for table in tables]
        tables = [table.select((table.end > self.start) & (table.start < self.end)) for table in tables]
        thread = np.concatenate([table.thread for table in tables])
        start, end = (np.concatenate([getattr(table, column) for table in tables]) for column in ("start", "end"))
        name = np.concatenate([self.names.codes(table.names, table.name) for table in tables])
        if self.steps.marks:  # requests get a track of their own, because they overlap and last for many steps
            requests = [code for code, text in enumerate(self.names.texts) if REQUEST_RANGE.fullmatch(text)]
            thread = np.where(np.isin(name, requests), self.process | _REQUESTS_THREAD, thread)
        threads, counts = np.unique(thread, return_counts=True)
        is_main = threads & ~PROCESS_MASK == pid_of(self.process)
        launches = is_main | np.isin(threads, self.attributed.attribution.thread[self.index])
        threads = threads[np.lexsort((-counts, ~launches, ~is_main))]
        titles = self._make_titles(threads)
        tracks = []
        for thread_id, title in zip(threads.tolist(), titles, strict=True):
            ranges_on_thread = np.flatnonzero(thread == thread_id)
            ranges_on_thread = ranges_on_thread[np.lexsort((-end[ranges_on_thread], start[ranges_on_thread]))]
            tracks.append(
                self._make_track(
                    title, "ranges", start[ranges_on_thread], end[ranges_on_thread], name[ranges_on_thread]
                )
            )
        count = int(launches.sum())
        return threads, tracks[:count], tracks[count:]

    def _make_titles(self, threads: Ints) -> list[str]:
        """Returns the title of each thread's track. If several threads have the same name, titles contain the ID."""
        names, thread_ids = list[str](), (threads & ~PROCESS_MASK).tolist()
        for thread, thread_id in zip(threads.tolist(), thread_ids, strict=True):
            if thread_id == _REQUESTS_THREAD:
                names.append("requests")
            elif thread_id == pid_of(thread):  # the main thread has the ID of its process
                names.append("main thread")
            else:
                names.append(f"thread {self.attributed.trace.metadata.thread_names.get(thread) or thread_id}")
        return [
            f"CPU: {name} {thread_id}" if names.count(name) > 1 else f"CPU: {name}"
            for name, thread_id in zip(names, thread_ids, strict=True)
        ]

    def _make_call_track(self) -> Track:
        """Makes the track of the API calls that wait, take long or allocate."""
        work = self.work
        index = np.unique(np.concatenate([work.waiting_calls, work.slow_calls, work.allocating_calls]))
        calls = work.calls.select(index)
        calls = calls.select((calls.end > self.start) & (calls.start < self.end))
        names = self.names.codes([name.partition("_v")[0] for name in calls.names], calls.name)
        return self._make_track("CPU: blocking calls", "calls", calls.start, calls.end, names)

    def _make_line_tracks(self) -> Iterator[Track]:
        """Yields a track of the program's sampled lines. A box covers consecutive samples with the same line."""
        stacks = self.attributed.trace.stacks.get(self.process)
        if stacks is None:
            return
        samples = np.flatnonzero((stacks.sampled > self.start) & (stacks.requested < self.end))
        samples = samples[np.argsort(stacks.requested[samples], kind="stable")]
        start = stacks.requested[samples]
        end = np.minimum(np.append(start[1:], self.end), stacks.sampled[samples] + stacks.period_ns)
        boxes: list[tuple[int, int, str]] = []
        open_boxes: list[tuple[int, int, str]] = []  # sorted from the outermost line to the innermost line
        for begin, finish, stack in zip(start.tolist(), end.tolist(), stacks.stack[samples].tolist(), strict=True):
            lines = [_describe_frame(frame) for frame in reversed(stacks.stacks[stack])]
            pairs = enumerate(zip(open_boxes, lines, strict=False))
            differing_depths = (depth for depth, (box, line) in pairs if box[2] != line or box[1] < begin)
            common_depth = next(differing_depths, min(len(open_boxes), len(lines)))
            boxes += open_boxes[common_depth:]
            open_boxes = [(first, finish, line) for first, _, line in open_boxes[:common_depth]]
            open_boxes += [(begin, finish, line) for line in lines[common_depth:]]
        boxes += open_boxes
        boxes.sort(key=lambda box: (box[0], -box[1]))  # a caller comes before the lines that it calls
        begins, ends = (np.array([box[side] for box in boxes], np.int64) for side in (0, 1))
        line_codes = self.names.codes([box[2] for box in boxes], np.arange(len(boxes)))
        yield self._make_track("CPU: sampled lines", "lines", begins, ends, line_codes)

    def _make_streams(self, threads: Ints, *, on_cpu: bool) -> Iterator[Stream]:
        """Yields a track of the work of each stream of each device."""
        operations, attribution = self.attributed.trace.operations, self.attributed.attribution
        path_codes, paths = make_range_paths(self.attributed.trace, attribution)
        if self.steps.marks:
            names_of_paths = [path.split(PATH_SEPARATOR) for path in paths]
            without_requests = (filterfalse(REQUEST_RANGE.fullmatch, names) for names in names_of_paths)
            paths = list(map(PATH_SEPARATOR.join, without_requests))
        track_of_thread = {thread: position for position, thread in enumerate(threads.tolist())}
        is_critical = np.zeros(len(operations), np.bool_)
        has_gpu = bool(self.devices) and not on_cpu
        if has_gpu and (study := study_steps(self.work, self.steps, self.devices[0], self.windows)):
            is_critical[study.critical_operations] = True
        phase = np.append(self.attributed.instances.phase, NONE)[self.attributed.instances_of_operations[0]] + 1
        devices, streams = operations.device[self.index], operations.stream[self.index]
        first_of_stream, code = distinct_rows(devices, streams)
        for number, (device, stream) in enumerate(
            zip(devices[first_of_stream].tolist(), streams[first_of_stream].tolist(), strict=True)
        ):
            index = self.index[code == number]
            start, end = operations.start[index], operations.end[index]
            waits = np.maximum(self.attributed.measure_launch_waits(index), 0)
            launching_tracks = [track_of_thread.get(thread, NONE) for thread in attribution.thread[index].tolist()]
            yield Stream(
                "CPU: operators" if on_cpu else f"{self._name_gpu(device)} stream {stream}",
                "stream",
                start - self.start,
                np.maximum(end - start, 0),
                self._name_operations(index),
                self.groups.codes(self.work.classes, self.work.class_code[index]),
                _find_depths(start, end),
                operation=index,
                phase=phase[index],
                module=self._find_modules(index),
                path=self.paths.codes(paths, path_codes[index]),
                wait=np.where(attribution.launch[index] != NONE, waits, NONE),
                thread=np.array(launching_tracks, np.int64),
                critical=is_critical[index],
            )

    def _name_gpu(self, device: int) -> str:
        """Returns the name of a device, with its number if the process uses several devices."""
        return f"GPU {device}" if len(self.devices) > 1 else "GPU"

    def _make_idle_track(self, device: int) -> IdleTrack:
        """Makes the track of a device's idle time: the cause of each stretch, and the program's range and stack."""
        idle_stretches, ranges = self.work.find_idle_stretches(self.windows, device), self.attributed.trace.ranges
        range_codes = np.append(ranges.name, len(ranges.names))[
            self.work.find_innermost_ranges((idle_stretches.start + idle_stretches.end) // 2)
        ]
        names, causes = (
            self.names.codes((*ranges.names, ""), range_codes),
            self.groups.codes(CAUSES, idle_stretches.cause),
        )
        track = self._make_track(
            f"{self._name_gpu(device)} idle", "idle", idle_stretches.start, idle_stretches.end, names, causes
        )
        stack = np.zeros(len(idle_stretches), np.int64)
        if stacks := self.attributed.trace.stacks.get(self.process):
            stack, self.stacks = find_hottest_stacks(stacks, idle_stretches.start, idle_stretches.end)
        return IdleTrack(**vars(track), stack=stack)

    def _name_operations(self, index: Ints) -> Ints:
        """Returns the code of each operation's name. The name of a copy or fill consists of its kind and size."""
        table = self.attributed.trace.operations
        kind, size, copy = table.kind[index], table.size[index], table.copy[index]
        names, code = list(table.names), table.name[index].astype(np.int64)
        descriptions: dict[str, int] = {}
        for i in np.flatnonzero(code == NONE).tolist():
            description = OPERATION_KINDS[kind[i]] + (f" {COPY_KINDS[copy[i]]}" if kind[i] == MEMCPY else "")
            description += f", {size[i]:,} bytes" if size[i] else ""
            code[i] = len(names) + descriptions.setdefault(description, len(descriptions))
        return self.names.codes([*names, *descriptions], code)

    def _find_modules(self, index: Ints) -> Ints:
        """Returns the code of the path of each operation's module. Without a module, the path is empty."""
        if self._module_calls is None:
            return np.zeros(len(index), np.int64)
        calls, finder = self._module_calls
        code = np.append(calls.path, len(calls.paths))[finder.find_calls(index)]
        return self.modules.codes([*(".".join(path) for path in calls.paths), ""], code)

    @cached_property
    def _module_calls(self) -> tuple[ModuleCalls, CallFinder] | None:
        """Returns the calls of modules and their ``CallFinder``, or None if no range names a module."""
        calls = find_module_calls(self.attributed)
        return (calls, CallFinder(self.attributed, calls)) if calls else None

    def _find_memory_in_use(self) -> tuple[Ints, Ints]:
        """Returns the times at which the device memory in use changes, ns since the origin, and the bytes in use.

        The first time is the origin.
        """
        memory_uses, no_times = self.attributed.trace.memory, np.empty(0, np.int64)
        if memory_uses is None:
            return no_times, no_times
        events, bytes_after = measure_memory_levels(memory_uses, self.process)
        first_event = np.searchsorted(events.start, self.start, side="right")
        index_in_steps = np.flatnonzero((events.start > self.start) & (events.start < self.end))
        bytes_in_use = np.append(bytes_after[first_event], bytes_after[index_in_steps + 1])
        times = np.append(0, events.start[index_in_steps] - self.start)
        return (times, bytes_in_use) if bytes_in_use.any() else (no_times, no_times)


def _describe_frame(frame: StackFrame) -> str:
    """Returns a text with the file, line and function of a frame."""
    return f"{frame.file}:{frame.line} in {frame.function}"


def _find_depths(start: Ints, end: Ints) -> Ints:
    """Returns the index of the first free row for each interval, below the rows of the intervals that contain it.

    The intervals must be sorted by start. If two intervals have the same start, the longer interval comes first.
    """
    depths = np.zeros(len(start), np.int64)
    if (start[1:] >= end[:-1]).all():  # if no intervals overlap, as on most streams, all have depth 0
        return depths
    row_ends: list[int] = []
    for i, (begin, finish) in enumerate(zip(start.tolist(), end.tolist(), strict=True)):
        while row_ends and row_ends[-1] <= begin:
            row_ends.pop()
        depth = depths[i] = next((row for row, row_end in enumerate(row_ends) if row_end <= begin), len(row_ends))
        row_ends[depth : depth + 1] = [finish]
    return depths


def measure_memory_levels(memory_uses: MemoryUses, process: int) -> tuple[MemoryUses, Ints]:
    """Returns the memory events of a process, sorted by time, and the bytes in use before and after each event.

    The bytes have the shape (events + 1,). They are the bytes that the allocator reports as in use, if it reports them.
    Otherwise, they are the sums of the sizes of the events.
    """
    events = memory_uses.select(memory_uses.process == process)
    events = events.select(np.argsort(events.start, kind="stable"))
    bytes_after = np.where(events.alive >= 0, events.alive, events.bytes.cumsum())
    return events, np.concatenate([bytes_after[:1] - events.bytes[:1] if len(events) else [0], bytes_after])
