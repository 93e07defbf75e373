"""From an attributed trace to the tracks of a process."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cached_property

import numpy as np

from nsys_analyzer.analysis.attribution.attribution import range_paths
from nsys_analyzer.analysis.attribution.processes import is_on_cpu
from nsys_analyzer.analysis.intervals.timeline import NONE
from nsys_analyzer.analysis.ranges.calls import Calls, Places, find_calls
from nsys_analyzer.analysis.ranges.instances import AttributedTrace
from nsys_analyzer.analysis.steps.groups import find_steps
from nsys_analyzer.analysis.steps.host import Host, find_host
from nsys_analyzer.analysis.steps.idle import CAUSES
from nsys_analyzer.analysis.steps.lanes import thread_title
from nsys_analyzer.analysis.steps.summarize import View
from nsys_analyzer.analysis.steps.windows import Windows
from nsys_analyzer.analysis.summary.statistics import memory_levels
from nsys_analyzer.analysis.tracks.tracks import Stream, Track, Tracks
from nsys_analyzer.trace.arrays import Integers, Ints, distinct, distinct_rows
from nsys_analyzer.trace.columns import COPIES, KINDS, MEMCPY, PROCESS_MASK, pid_of, process_of


def record_tracks(attributed: AttributedTrace, process: int, most: int) -> Tracks | None:
    """The measured steps of a process by its global ID; None where nothing of it ran on a device.

    ``most``: the operations that are shown, about.
    """
    steps = find_steps(attributed, process)
    if steps is None:
        return None
    windows, operations = steps.windows, int((attributed.trace.operations.process == process).sum())
    shown = _some_of(windows, operations, most)
    left_out = f"{len(shown):,} of {len(windows):,} steps are shown" if len(shown) < len(windows) else ""
    return _Recorder(attributed, process, shown, in_steps=windows.source != "pass").tracks(left_out)


def _some_of(windows: Windows, operations: int, most: int) -> Windows:
    """All steps, or consecutive ones around that of median duration."""
    count = max(1, len(windows) * most // max(operations, 1))
    if count >= len(windows):
        return windows
    middle = int(np.argsort(windows.end - windows.start, kind="stable")[(len(windows) - 1) // 2])
    first = min(max(middle - count // 2, 0), len(windows) - count)
    return windows.select(np.arange(first, first + count))


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
    """What the tracks of one process are made from; ``in_steps`` tells whether the windows are steps."""

    def __init__(self, attributed: AttributedTrace, process: int, windows: Windows, *, in_steps: bool) -> None:
        self.attributed, self.process, self.windows, self.in_steps = attributed, process, windows, in_steps
        self.start, self.end = int(windows.start[0]), int(windows.end[-1])
        self._on_cpu = is_on_cpu(attributed.trace, process)
        self.names, self.groups, self.modules, self.paths = _Texts(""), _Texts(""), _Texts(""), _Texts("")
        operations = attributed.trace.operations
        seen = (operations.process == process) & (operations.end > self.start) & (operations.start < self.end)
        shown = np.flatnonzero(seen)
        self.shown = shown[np.argsort(operations.start[shown], kind="stable")]

    def tracks(self, left_out: str) -> Tracks:
        """All tracks: the CPU's threads that launch work, the device's, and the other threads."""
        host = find_host(self.attributed, self.process, (self.start, self.end))
        view = View(self.attributed, self.windows, self.windows, host)
        threads, working, others = self._ranges()
        tracks = [*working, *([] if self._on_cpu else self._calls(host)), *self._streams(view, threads)]
        if not self._on_cpu:
            tracks += [self._idle(view, device) for device in self._devices]
        tracks += others
        bounds = zip((self.windows.start - self.start).tolist(), (self.windows.end - self.start).tolist(), strict=True)
        return Tracks(
            origin_ns=self.start,
            duration_ns=self.end - self.start,
            global_pid=self.process,
            steps=tuple(bounds) if self.in_steps else (),
            on_cpu=self._on_cpu,
            left_out=left_out,
            tracks=tuple(track for track in tracks if len(track.start)),
            names=self.names.all,
            groups=self.groups.all,
            phases=("", *self.attributed.instances.phases),
            modules=self.modules.all,
            paths=self.paths.all,
            memory=self._memory(),
        )

    @cached_property
    def _devices(self) -> list[int]:
        found: list[int] = distinct(self.attributed.trace.operations.device[self.shown]).tolist()
        return found

    def _title_of(self, device: int, stream: int) -> str:
        if self._on_cpu:
            return "CPU: operators"
        return f"GPU {device} stream {stream}" if len(self._devices) > 1 else f"GPU stream {stream}"

    def _spans(self, start: Ints, end: Ints) -> tuple[Ints, Ints]:
        """The starts since the origin, and the durations."""
        return start - self.start, np.maximum(end - start, 0)

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
        threads, counts = np.unique(thread, return_counts=True)
        is_main = threads & ~PROCESS_MASK == pid_of(self.process)
        works = is_main | np.isin(threads, self.attributed.attribution.thread[self.shown])
        threads = threads[np.lexsort((-counts, ~works, ~is_main))]
        titles = self._titles(threads)
        tracks = []
        for one, title in zip(threads.tolist(), titles, strict=True):
            mine = np.flatnonzero(thread == one)
            mine = mine[np.lexsort((-end[mine], start[mine]))]
            spans = self._spans(start[mine], end[mine])
            plain = np.zeros(len(mine), np.int64)
            tracks.append(Track(title, "ranges", *spans, name[mine], plain, _depths(start[mine], end[mine])))
        working = int(works.sum())
        return threads, tracks[:working], tracks[working:]

    def _titles(self, threads: Ints) -> list[str]:
        """What each thread is called; those of one name have their IDs, too."""
        if self.attributed.trace.metadata.ranges_on_gpu:
            return ["ranges on the GPU"] * len(threads)
        titles = [thread_title(self.attributed, one) for one in threads.tolist()]
        own = (threads & ~PROCESS_MASK).tolist()
        return [
            f"CPU: {one} {tid}" if titles.count(one) > 1 else f"CPU: {one}"
            for one, tid in zip(titles, own, strict=True)
        ]

    def _calls(self, host: Host) -> Iterator[Track]:
        """The API calls that wait, take long or allocate."""
        chosen = np.union1d(np.union1d(host.waiting, host.slow), host.allocating)
        calls = host.calls.select(chosen)
        calls = calls.select((calls.end > self.start) & (calls.start < self.end))
        if not len(calls):
            return
        names = [name.partition("_v")[0] for name in calls.names]
        plain = np.zeros(len(calls), np.int64)
        spans = self._spans(calls.start, calls.end)
        depths = _depths(calls.start, calls.end)
        yield Track("CPU: blocking calls", "calls", *spans, self.names.codes(names, calls.name), plain, depths)

    def _streams(self, view: View, threads: Ints) -> Iterator[Stream]:
        """The work of each stream of each device."""
        operations, attribution = self.attributed.trace.operations, self.attributed.attribution
        path_codes, paths = range_paths(self.attributed.trace, attribution)
        place = {thread: i for i, thread in enumerate(threads.tolist())}
        devices, streams = operations.device[self.shown], operations.stream[self.shown]
        first, code = distinct_rows(devices, streams)
        for number, (device, stream) in enumerate(zip(devices[first].tolist(), streams[first].tolist(), strict=True)):
            mine = self.shown[code == number]
            spans = self._spans(operations.start[mine], operations.end[mine])
            launched = attribution.launch[mine] != NONE
            yield Stream(
                self._title_of(device, stream),
                "stream",
                *spans,
                self._names_of(mine),
                self.groups.codes(view.classes, view.label[mine]),
                _depths(operations.start[mine], operations.end[mine]),
                phase=np.append(self.attributed.instances.phase, NONE)[self.attributed.instance_pair[0][mine]] + 1,
                module=self._modules_of(mine),
                path=self.paths.codes(paths, path_codes[mine]),
                wait=np.where(launched, np.maximum(self.attributed.wait(mine), 0), NONE),
                thread=np.array([place.get(one, NONE) for one in attribution.thread[mine].tolist()], np.int64),
            )

    def _names_of(self, operations: Ints) -> Ints:
        """The names of kernels, and of other operations what they are and how many bytes they move."""
        table = self.attributed.trace.operations
        kind, size, copy = table.kind[operations], table.size[operations], table.copy[operations]
        names, code = list(table.names), table.name[operations].astype(np.int64)
        others = np.flatnonzero(code == NONE)
        said: dict[str, int] = {}
        for one in others.tolist():
            what = f"{KINDS[kind[one]]} {COPIES[copy[one]]}" if kind[one] == MEMCPY else KINDS[kind[one]]
            text = f"{what}, {size[one]:,} bytes" if size[one] else what
            code[one] = len(names) + said.setdefault(text, len(said))
        return self.names.codes([*names, *said], code)

    def _modules_of(self, operations: Ints) -> Ints:
        """The paths of the modules, the empty one for what is of none."""
        if self._places is None:
            return np.zeros(len(operations), np.int64)
        calls, places = self._places
        code = np.append(calls.path, len(calls.paths))[places.of_operations(operations)]
        return self.modules.codes([*(".".join(path) for path in calls.paths), ""], code)

    @cached_property
    def _places(self) -> tuple[Calls, Places] | None:
        calls = find_calls(self.attributed)
        return (calls, Places(self.attributed, calls)) if calls else None

    def _idle(self, view: View, device: int) -> Track:
        """The stretches in which a device idles, each with its cause and the range that the program was in."""
        operations = self.attributed.trace.operations
        chosen = np.flatnonzero((operations.process == self.process) & (operations.device == device))
        start, end, cause = view.idle(chosen.astype(np.int32))
        around = view.host.innermost((start + end) // 2)
        ranges = view.host.ranges
        return Track(
            f"GPU {device} idle" if len(self._devices) > 1 else "GPU idle",
            "idle",
            *self._spans(start, end),
            self.names.codes((*ranges.names, ""), np.append(ranges.name, len(ranges.names))[around]),
            self.groups.codes(CAUSES, cause),
            np.zeros(len(start), np.int64),
        )

    def _memory(self) -> tuple[Ints, Ints]:
        """The device's memory in use, at the start and from each change on."""
        uses = self.attributed.trace.memory
        nothing = np.empty(0, np.int64)
        if uses is None:
            return nothing, nothing
        events, level = memory_levels(uses, self.process)
        first = np.searchsorted(events.start, self.start, side="right")
        inside = np.flatnonzero((events.start > self.start) & (events.start < self.end))
        bytes_in_use = np.append(level[first], level[inside + 1])
        # What was allocated before the steps is a level line.
        return (
            (np.append(0, events.start[inside] - self.start), bytes_in_use)
            if bytes_in_use.any()
            else (nothing, nothing)
        )


def _depths(start: Ints, end: Ints) -> Ints:
    """How many intervals lie around each; they come in order of start, of two the longer first."""
    depths = np.zeros(len(start), np.int64)
    if (start[1:] >= end[:-1]).all():  # as on most streams
        return depths
    opened: list[int] = []
    for one, (begin, finish) in enumerate(zip(start.tolist(), end.tolist(), strict=True)):
        while opened and opened[-1] <= begin:
            opened.pop()
        depths[one] = len(opened)
        opened.append(finish)
    return depths
