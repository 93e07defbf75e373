"""What happened in the steps, moment by moment: ranges, calls that block, each stream's work, and why devices idle."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

import numpy as np

from nsys_analyzer.analysis.attribution.attribution import PATH_SEPARATOR, make_range_paths
from nsys_analyzer.analysis.attribution.processes import is_on_cpu
from nsys_analyzer.analysis.intervals import NONE
from nsys_analyzer.analysis.ranges.calls import CallFinder, ModuleCalls, find_module_calls
from nsys_analyzer.analysis.ranges.instances import AttributedTrace
from nsys_analyzer.analysis.steps.lines import hottest_stacks
from nsys_analyzer.analysis.steps.process import CAUSES, ProcessWork
from nsys_analyzer.analysis.steps.study import study_steps
from nsys_analyzer.analysis.steps.windows import Steps, Windows, find_steps
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

#: Operations that a page shows; of longer captures as many steps around the median one as have about so many in all.
MOST_OPERATIONS = 1_000_000
#: The ID that stands for a thread of the ranges of requests.
_REQUESTS = ~PROCESS_MASK

Kind = Literal["ranges", "calls", "lines", "stream", "idle"]


@dataclass(frozen=True)
class Track:
    """The boxes of one thread, stream or device, in order of start.

    Attributes:
        title: what it is of, such as "GPU stream 7".
        kind: "ranges" lie inside each other, "calls" block or allocate, "lines" are those that were sampled, each
            inside the one that called it, "stream" is the GPU's work, "idle" its gaps.
        start, duration: shape (boxes,), ns; the start since ``Tracks.origin_ns``.
        name: shape (boxes,), code into ``Tracks.names``; of idle time the range that the program was in.
        group: shape (boxes,), code into ``Tracks.groups``: the kernel class, or the cause of idle time.
        depth: shape (boxes,), the row of the track that each lies in: below the ranges around it.
    """

    title: str
    kind: Kind
    start: Ints
    duration: Ints
    name: Ints
    group: Ints
    depth: Ints


@dataclass(frozen=True)
class Stream(Track):
    """The GPU's work on one stream.

    Attributes:
        phase, module, path: shape (boxes,), codes into ``Tracks.phases``, ``Tracks.modules`` and ``Tracks.paths``: the
            phase and module that each belongs to, and the ranges around its launch; the first of each is empty.
        wait: shape (boxes,), from its launch to its start, ns; -1 where the launch is not known.
        thread: shape (boxes,), position among the tracks of the ranges of the thread that launched it, -1 for none.
        critical: shape (boxes,), True for what is on the critical path of the steps.
    """

    phase: Ints
    module: Ints
    path: Ints
    wait: Ints
    thread: Ints
    critical: Bools


@dataclass(frozen=True)
class IdleTrack(Track):
    """The stretches in which a device is idle; ``stack`` is a code into ``Tracks.stacks``, 0 where none was sampled."""

    stack: Ints


@dataclass(frozen=True)
class Tracks:
    """The tracks of one process of a capture.

    Attributes:
        origin_ns: the moment 0 of all tracks, on the capture's clock.
        duration_ns: from there to the end of the last step.
        global_pid: the process.
        steps: start and end of each measured step, ns since the origin.
        on_cpu: whether the streams hold operators that compute on the CPU, as of a program without a GPU.
        left_out: in words, which steps are not shown; empty where all are.
        names, groups, phases, modules, paths: the texts of the codes.
        stacks: the lines of the program in each stack, the innermost first; the first one has none.
        memory: time in ns since the origin and bytes in use from then on; empty where that was not recorded.
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


def record_tracks(attributed: AttributedTrace, process: int, most: int) -> Tracks | None:
    """Records the measured steps of a process by its global ID; None where nothing of it ran on a device.

    ``most``: the operations that are shown, about: of more, those of consecutive steps around the median one.
    """
    steps = find_steps(attributed, process)
    if steps is None:
        return None
    windows, operations = steps.windows, int((attributed.trace.operations.process == process).sum())
    count, left_out = max(1, len(windows) * most // max(operations, 1)), ""
    if count < len(windows):
        left_out = f"{count:,} of {len(windows):,} steps are shown"
        first = min(max(windows.median - count // 2, 0), len(windows) - count)
        windows = windows.select(np.arange(first, first + count))
    return _Recorder(attributed, process, windows, steps).tracks(left_out)


class _Texts:
    """Texts by their codes, each once."""

    def __init__(self, *first: str) -> None:
        self._code = {text: code for code, text in enumerate(first)}

    def codes(self, texts: Sequence[str], index: Integers) -> Ints:
        """The code of the text at each index."""
        used, position = np.unique(index, return_inverse=True)
        code = [self._code.setdefault(texts[i], len(self._code)) for i in used.tolist()]
        return np.array(code, np.int64)[position.ravel()]

    @property
    def all(self) -> tuple[str, ...]:
        return tuple(self._code)


class _Recorder:
    """What the tracks of one process are made from."""

    def __init__(self, attributed: AttributedTrace, process: int, windows: Windows, steps: Steps) -> None:
        self.attributed, self.process, self.windows, self.steps = attributed, process, windows, steps
        self.work = ProcessWork(attributed, process, windows)
        self.stacks: tuple[tuple[StackFrame, ...], ...] = ((),)
        self.start, self.end = int(windows.start[0]), int(windows.end[-1])
        self.names, self.groups, self.modules, self.paths = _Texts(""), _Texts(""), _Texts(""), _Texts("")
        operations = attributed.trace.operations
        seen = (operations.process == process) & (operations.end > self.start) & (operations.start < self.end)
        shown = np.flatnonzero(seen)
        self.shown = shown[np.argsort(operations.start[shown], kind="stable")]
        self.devices = np.unique(operations.device[self.shown]).tolist()

    def tracks(self, left_out: str) -> Tracks:
        """Returns all tracks: the CPU's threads that launch work, the device's, and the other threads."""
        on_cpu = is_on_cpu(self.attributed.trace, self.process)
        threads, working, others = self._ranges()
        tracks = [*working, *([] if on_cpu else self._calls()), *self._lines(), *self._streams(threads, on_cpu)]
        tracks += [self._idle(device) for device in self.devices if not on_cpu]
        windows = self.windows
        bounds = zip((windows.start - self.start).tolist(), (windows.end - self.start).tolist(), strict=True)
        return Tracks(
            origin_ns=self.start,
            duration_ns=self.end - self.start,
            global_pid=self.process,
            steps=() if windows.source == "pass" else tuple(bounds),
            on_cpu=on_cpu,
            left_out=left_out,
            tracks=tuple(track for track in (*tracks, *others) if len(track.start)),
            names=self.names.all,
            groups=self.groups.all,
            phases=("", *self.attributed.instances.phases),
            modules=self.modules.all,
            paths=self.paths.all,
            stacks=tuple(tuple(map(_line, one)) for one in self.stacks),
            memory=self._memory(),
        )

    def _track(self, title: str, kind: Kind, start: Ints, end: Ints, name: Ints, group: Ints | None = None) -> Track:
        """Returns a track of boxes, idle time or what may lie inside each other."""
        plain = np.zeros(len(start), np.int64)
        depths = plain if kind == "idle" else _depths(start, end)
        lasting = np.maximum(end - start, 0)
        return Track(title, kind, start - self.start, lasting, name, plain if group is None else group, depths)

    def _ranges(self) -> tuple[Ints, list[Track], list[Track]]:
        """The threads with ranges, the main one first; the tracks of those that launch work, and of the others."""
        trace = self.attributed.trace
        tables = [trace.ranges, trace.operators] if trace.metadata.profiler == "torch" else [trace.ranges]
        shown = [
            one.select((one.end > self.start) & (one.start < self.end) & (process_of(one.thread) == self.process))
            for one in tables
        ]
        thread = np.concatenate([one.thread for one in shown])
        start, end = (np.concatenate([getattr(one, column) for one in shown]) for column in ("start", "end"))
        name = np.concatenate([self.names.codes(one.names, one.name) for one in shown])
        if self.steps.marks:  # requests last over many steps and each other
            request = [code for code, text in enumerate(self.names.all) if REQUEST_RANGE.fullmatch(text)]
            thread = np.where(np.isin(name, request), self.process | _REQUESTS, thread)
        threads, counts = np.unique(thread, return_counts=True)
        is_main = threads & ~PROCESS_MASK == pid_of(self.process)
        works = is_main | np.isin(threads, self.attributed.attribution.thread[self.shown])
        threads = threads[np.lexsort((-counts, ~works, ~is_main))]
        titles = self._titles(threads)
        tracks = []
        for one, title in zip(threads.tolist(), titles, strict=True):
            mine = np.flatnonzero(thread == one)
            mine = mine[np.lexsort((-end[mine], start[mine]))]
            tracks.append(self._track(title, "ranges", start[mine], end[mine], name[mine]))
        working = int(works.sum())
        return threads, tracks[:working], tracks[working:]

    def _titles(self, threads: Ints) -> list[str]:
        """What each thread is called; those of one name have their IDs, too."""
        titles = [_thread_title(self.attributed, one) for one in threads.tolist()]
        own = (threads & ~PROCESS_MASK).tolist()
        return [
            f"CPU: {one} {tid}" if titles.count(one) > 1 else f"CPU: {one}"
            for one, tid in zip(titles, own, strict=True)
        ]

    def _calls(self) -> Iterator[Track]:
        """Yields the track of the API calls that wait, take long or allocate."""
        work = self.work
        calls = work.calls.select(np.unique(np.concatenate([work.waiting, work.slow, work.allocating])))
        calls = calls.select((calls.end > self.start) & (calls.start < self.end))
        names = [name.partition("_v")[0] for name in calls.names]
        yield self._track("CPU: blocking calls", "calls", calls.start, calls.end, self.names.codes(names, calls.name))

    def _lines(self) -> Iterator[Track]:
        """Yields the track of the program's sampled lines; a line lasts as long as samples in a row find it."""
        sampled = self.attributed.trace.stacks.get(self.process)
        if sampled is None:
            return
        samples = np.flatnonzero((sampled.sampled > self.start) & (sampled.requested < self.end))
        samples = samples[np.argsort(sampled.requested[samples], kind="stable")]
        start = sampled.requested[samples]
        end = np.minimum(np.append(start[1:], self.end), sampled.sampled[samples] + sampled.period_ns)
        boxes: list[tuple[int, int, str]] = []
        lasting: list[tuple[int, int, str]] = []
        for begin, finish, stack in zip(start.tolist(), end.tolist(), sampled.stack[samples].tolist(), strict=True):
            lines = [_line(frame) for frame in reversed(sampled.stacks[stack])]
            pairs = enumerate(zip(lasting, lines, strict=False))
            differing = (i for i, (box, line) in pairs if box[2] != line or box[1] < begin)
            same = next(differing, min(len(lasting), len(lines)))
            boxes += lasting[same:]
            lasting = [(first, finish, line) for first, _, line in lasting[:same]]
            lasting += [(begin, finish, line) for line in lines[same:]]
        boxes += lasting
        boxes.sort(key=lambda box: (box[0], -box[1]))  # a line stays behind the one that called it
        begins, ends = (np.array([box[side] for box in boxes], np.int64) for side in (0, 1))
        names = self.names.codes([box[2] for box in boxes], np.arange(len(boxes)))
        yield self._track("CPU: sampled lines", "lines", begins, ends, names)

    def _streams(self, threads: Ints, on_cpu: bool) -> Iterator[Stream]:
        """Yields the work of each stream of each device."""
        operations, attribution = self.attributed.trace.operations, self.attributed.attribution
        path_codes, paths = make_range_paths(self.attributed.trace, attribution)
        if self.steps.marks:
            around = [path.split(PATH_SEPARATOR) for path in paths]
            paths = [
                PATH_SEPARATOR.join(name for name in names if not REQUEST_RANGE.fullmatch(name)) for names in around
            ]
        place = {thread: i for i, thread in enumerate(threads.tolist())}
        critical = np.zeros(len(operations), np.bool_)
        study = (
            None if on_cpu or not self.devices else study_steps(self.work, self.steps, self.devices[0], self.windows)
        )
        if study:
            critical[study.critical] = True
        devices, streams = operations.device[self.shown], operations.stream[self.shown]
        first, code = distinct_rows(devices, streams)
        for number, (device, stream) in enumerate(zip(devices[first].tolist(), streams[first].tolist(), strict=True)):
            mine = self.shown[code == number]
            start, end = operations.start[mine], operations.end[mine]
            yield Stream(
                "CPU: operators" if on_cpu else f"{self._gpu(device)} stream {stream}",
                "stream",
                start - self.start,
                np.maximum(end - start, 0),
                self._names_of(mine),
                self.groups.codes(self.work.classes, self.work.label[mine]),
                _depths(start, end),
                phase=np.append(self.attributed.instances.phase, NONE)[self.attributed.instances_of_operations[0][mine]]
                + 1,
                module=self._modules_of(mine),
                path=self.paths.codes(paths, path_codes[mine]),
                wait=np.where(
                    attribution.launch[mine] != NONE, np.maximum(self.attributed.measure_launch_waits(mine), 0), NONE
                ),
                thread=np.array([place.get(thread, NONE) for thread in attribution.thread[mine].tolist()], np.int64),
                critical=critical[mine],
            )

    def _gpu(self, device: int) -> str:
        return f"GPU {device}" if len(self.devices) > 1 else "GPU"

    def _idle(self, device: int) -> IdleTrack:
        """Returns the stretches in which a device idles, each with its cause, and where the program was."""
        idle, ranges = self.work.find_idle(self.windows, device), self.attributed.trace.ranges
        around = np.append(ranges.name, len(ranges.names))[self.work.innermost((idle.start + idle.end) // 2)]
        names, causes = self.names.codes((*ranges.names, ""), around), self.groups.codes(CAUSES, idle.cause)
        track = self._track(f"{self._gpu(device)} idle", "idle", idle.start, idle.end, names, causes)
        stack = np.zeros(len(idle), np.int64)
        if sampled := self.attributed.trace.stacks.get(self.process):
            stack, self.stacks = hottest_stacks(sampled, idle.start, idle.end)
        return IdleTrack(**vars(track), stack=stack)

    def _names_of(self, operations: Ints) -> Ints:
        """The names of kernels, and of other operations what they are and how many bytes they move."""
        table = self.attributed.trace.operations
        kind, size, copy = table.kind[operations], table.size[operations], table.copy[operations]
        names, code = list(table.names), table.name[operations].astype(np.int64)
        others = np.flatnonzero(code == NONE)
        said: dict[str, int] = {}
        for one in others.tolist():
            what = (
                f"{OPERATION_KINDS[kind[one]]} {COPY_KINDS[copy[one]]}"
                if kind[one] == MEMCPY
                else OPERATION_KINDS[kind[one]]
            )
            text = f"{what}, {size[one]:,} bytes" if size[one] else what
            code[one] = len(names) + said.setdefault(text, len(said))
        return self.names.codes([*names, *said], code)

    def _modules_of(self, operations: Ints) -> Ints:
        """The paths of the modules, the empty one for what is of none."""
        if self._places is None:
            return np.zeros(len(operations), np.int64)
        calls, places = self._places
        code = np.append(calls.path, len(calls.paths))[places.calls_of_operations(operations)]
        return self.modules.codes([*(".".join(path) for path in calls.paths), ""], code)

    @cached_property
    def _places(self) -> tuple[ModuleCalls, CallFinder] | None:
        calls = find_module_calls(self.attributed)
        return (calls, CallFinder(self.attributed, calls)) if calls else None

    def _memory(self) -> tuple[Ints, Ints]:
        """Returns the device's memory in use, at the start and from each change on."""
        uses, nothing = self.attributed.trace.memory, np.empty(0, np.int64)
        if uses is None:
            return nothing, nothing
        events, level = memory_levels(uses, self.process)
        first = np.searchsorted(events.start, self.start, side="right")
        inside = np.flatnonzero((events.start > self.start) & (events.start < self.end))
        bytes_in_use = np.append(level[first], level[inside + 1])
        # What was allocated before the steps is a level line.
        since = np.append(0, events.start[inside] - self.start)
        return (since, bytes_in_use) if bytes_in_use.any() else (nothing, nothing)


def _line(frame: StackFrame) -> str:
    return f"{frame.file}:{frame.line} in {frame.function}"


def _depths(start: Ints, end: Ints) -> Ints:
    """The row of each interval, the first that is free: below those around it; in order of start, the longer first."""
    depths = np.zeros(len(start), np.int64)
    if (start[1:] >= end[:-1]).all():  # as on most streams
        return depths
    opened: list[int] = []
    for one, (begin, finish) in enumerate(zip(start.tolist(), end.tolist(), strict=True)):
        while opened and opened[-1] <= begin:
            opened.pop()
        depth = depths[one] = next((row for row, last in enumerate(opened) if last <= begin), len(opened))
        opened[depth : depth + 1] = [finish]
    return depths


def _thread_title(attributed: AttributedTrace, thread: int) -> str:
    """What a thread is called: the main one has the ID of its process."""
    own = thread & ~PROCESS_MASK
    if own == _REQUESTS:
        return "requests"
    if own == pid_of(thread):
        return "main thread"
    return f"thread {attributed.trace.metadata.thread_names.get(thread) or own}"


def memory_levels(uses: MemoryUses, process: int) -> tuple[MemoryUses, Ints]:
    """The events of a process in order, and the bytes in use before the first one and after each: shape (events + 1,).

    They are what the pool of each says, or what the events add up to.
    """
    events = uses.select(uses.process == process)
    events = events.select(np.argsort(events.start, kind="stable"))
    level = np.where(events.alive >= 0, events.alive, events.bytes.cumsum())
    return events, np.concatenate([level[:1] - events.bytes[:1] if len(events) else [0], level])
