"""Captures as one trace for ui.perfetto.dev (``.pftrace``): threads, the GPUs' streams, idle time and memory."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from nsys_analyzer.analysis.attribution.processes import Process, is_on_cpu
from nsys_analyzer.analysis.intervals import NONE
from nsys_analyzer.analysis.kernels.labels import make_short_labels
from nsys_analyzer.analysis.ranges.instances import AttributedTrace
from nsys_analyzer.analysis.steps.process import CAUSES, ProcessWork
from nsys_analyzer.analysis.steps.tracks import memory_levels
from nsys_analyzer.analysis.steps.windows import find_steps
from nsys_analyzer.export.frame import operation_frame
from nsys_analyzer.export.perfetto_packets import (
    MARK,
    Arguments,
    Kind,
    Slices,
    Strings,
    Track,
    combinations,
    compressed,
    counter_packets,
    first_packet,
    slice_packets,
)
from nsys_analyzer.export.writing import Capture
from nsys_analyzer.report.evidence import CAUSE_WORDS
from nsys_analyzer.trace import schema
from nsys_analyzer.trace.arrays import Integers, Ints, distinct, distinct_rows
from nsys_analyzer.trace.columns import (
    ALLOCATE,
    BEGIN_CAPTURE,
    COPY,
    COPY_KINDS,
    END_CAPTURE,
    FILL,
    FREE,
    KERNEL,
    LAUNCH,
    LAUNCH_GRAPH,
    MEMCPY,
    OPERATION_KINDS,
    OTHER_CALL,
    PROCESS_MASK,
    SYNCHRONIZE,
    Operations,
    Ranges,
    pid_of,
    process_of,
)
from nsys_analyzer.trace.metadata import CPU

if TYPE_CHECKING:
    import pandas as pd

_NEAR = 256
_PACKED_BYTES = 1 << 20
#: The categories of API calls.
_CALLS = {
    OTHER_CALL: "other call", LAUNCH: "launch", BEGIN_CAPTURE: "graph capture", END_CAPTURE: "graph capture",
    ALLOCATE: "allocate", FREE: "free", SYNCHRONIZE: "synchronize", COPY: "copy call", FILL: "fill call",
    LAUNCH_GRAPH: "graph launch",
}  # fmt: skip
#: Other calls are shown from this duration on, ns: they block the program, such as one that loads a module.
_BLOCKS_NS = 20_000
#: What the details of an operation say, columns of the table of operations.
_TEXTS = ("class", "phase", "range_path", "operator", "precision", "copy")
_NUMBERS = ("launch_latency_ns", "thread_blocks", "bytes", "instance", "correlation_id")
_FIRST_SYNTHETIC = 1 << 24  # above every process ID of Linux


def write(captures: Sequence[Capture], path: Path) -> None:
    """Writes the captures, those of all ranks of a run on one clock."""
    strings, ids = Strings(), Ids()
    packets = (packet for capture in captures for packet in packets_of(capture, strings, ids))
    with path.open("wb") as file:
        file.write(first_packet())
        file.writelines(_packed(packets))


def is_ours(path: Path) -> bool:
    """Returns whether a file is a trace that was written here."""
    with path.open("rb") as file:
        return MARK in file.read(_NEAR)


def _packed(packets: Iterable[bytes]) -> Iterator[bytes]:
    """Yields the packets in compressed ones, in their order, several small ones together."""
    some = bytearray()
    for packet in packets:
        some += packet
        if len(some) >= _PACKED_BYTES:
            yield compressed(bytes(some))
            some.clear()
    yield compressed(bytes(some))


class Ids:
    """What must be unique in a file of several captures: tracks, flows, and the numbers of processes and threads.

    Two machines may have processes of one ID: the second one gets a number that no system gives.
    """

    def __init__(self) -> None:
        self.tracks = count(1)
        self.flows = 1
        self._used: set[int] = {0}
        self._free = count(_FIRST_SYNTHETIC)

    def system(self, wanted: int) -> int:
        """Returns the process or thread ID that is wanted, or another one where it is taken."""
        chosen = next(self._free) if wanted in self._used else wanted
        self._used.add(chosen)
        return chosen


def packets_of(capture: Capture, strings: Strings, ids: Ids) -> Iterator[bytes]:
    """Yields the packets of a capture; the first ones describe its tracks.

    Args:
        capture: the capture, which is read here.
        strings, ids: those of the file.
    """
    attributed = capture.read()
    before = capture.first_ns(attributed)  # Perfetto's times have no sign
    view = _View(capture if before >= 0 else capture.later_by(-before), attributed, strings, ids)
    parts = [*view.threads(), *view.streams(), *view.idle()]
    counters = list(view.memory())
    yield from (track.packet() for track in view.tracks)
    yield strings.packet()
    for slices in parts:
        yield from slice_packets(slices)
    for track, time, value in counters:
        yield from counter_packets(track, time, value)


class _View:
    """A capture as it is laid out on tracks."""

    def __init__(self, capture: Capture, attributed: AttributedTrace, strings: Strings, ids: Ids) -> None:
        self.capture, self.attributed, self.strings, self.ids = capture, attributed, strings, ids
        self.trace = attributed.trace
        self.tracks: list[Track] = []
        self.processes = {one.global_pid: one for one in capture.processes(attributed)}
        self._process_tracks: dict[int, tuple[int, int]] = {}
        self._gpu_tracks: dict[tuple[int, int], int] = {}
        self.labels = make_short_labels(attributed.trace.operations.names)

    def _time(self, time: Ints) -> Ints:
        return self.capture.shared(time)

    def _track(self, name: str, **more: Any) -> int:
        track = Track(next(self.ids.tracks), name, **more)
        self.tracks.append(track)
        return track.id

    def _process(self, process: int) -> tuple[int, int]:
        """Returns the track of a process, and its ID in the file."""
        if process not in self._process_tracks:
            pid = pid_of(process)
            number = self.ids.system(pid)
            known = self.processes.get(process, Process(process, pid, ""))
            name = known.label or self.capture.path.name
            name = name if number == pid else f"{name} (pid {pid})"  # the page says the number beside it
            self._process_tracks[process] = self._track(name, process=number), number
        return self._process_tracks[process]

    def _gpu(self, process: int, device: int) -> int:
        """Returns the track that those of a device are below."""
        key = process, device
        if key not in self._gpu_tracks:
            gpu = self.trace.metadata.gpu(pid_of(process), device)
            name = CPU if gpu and gpu.is_cpu else f"GPU {device}" + (f" ({gpu.name})" if gpu else "")
            self._gpu_tracks[key] = self._track(name, parent=self._process(process)[0], ordered=True)
        return self._gpu_tracks[key]

    def threads(self) -> Iterator[Slices]:
        """Yields the ranges, operators and calls of each thread."""
        trace, launches = self.trace, self.trace.launches
        operators = [trace.operators] if schema.OPERATORS.key in trace.tables else []  # else they are ranges, too
        launching = np.zeros(len(launches), np.bool_)  # the calls that operations were launched by
        launch = self.attributed.attribution.launch
        launching[launch[launch != NONE]] = True
        long = launches.end - launches.start >= _BLOCKS_NS
        shown = launching | long | (launches.call != OTHER_CALL)
        calls, flows = launches.select(shown), np.where(launching, self.ids.flows + np.arange(len(launches)), 0)[shown]
        names = [name.partition("_v")[0] for name in calls.names]
        listed = [self._ranges(trace.ranges, "range"), *(self._ranges(one, "operator") for one in operators)]
        categories = [_CALLS[call] for call in range(len(_CALLS))]
        listed.append(
            (
                calls.thread,
                calls.start,
                calls.end,
                self.strings.by_code(Kind.NAME, calls.name, names),
                self.strings.by_code(Kind.CATEGORY, calls.call, categories),
                flows,
            )
        )
        thread, start, end, name, category, flow = (np.concatenate(columns) for columns in zip(*listed, strict=True))
        if len(thread):
            track = self._laid_out(thread, start, end, self._thread)
            yield Slices(self._time(start), self._time(end), track, name, category, flow)

    def _ranges(self, ranges: Ranges, category: str) -> tuple[Ints, ...]:
        """Returns the columns of ranges; what is a phase is of the category of phases."""
        named = np.full(len(ranges), self.strings.of(Kind.CATEGORY, category))
        if ranges is self.trace.ranges:
            named[self.attributed.roles.is_phase_or_step] = self.strings.of(Kind.CATEGORY, "phase")
        name = self.strings.by_code(Kind.NAME, ranges.name, ranges.names)
        return ranges.thread, ranges.start, ranges.end, name, named, np.zeros(len(ranges), np.int64)

    def _thread(self, thread: int) -> dict[str, Any]:
        """Returns what describes the track of a thread."""
        process, number = process_of(np.array([thread])).tolist()[0], thread & ~PROCESS_MASK
        _, pid = self._process(process)
        is_main = number == pid_of(process)
        name = self.trace.metadata.thread_names.get(thread) or ("main thread" if is_main else f"thread {number}")
        # The main thread has the ID of its process.
        return {"name": name, "thread": (pid, pid if is_main else self.ids.system(number))}

    def _laid_out(self, group: Integers, start: Ints, end: Ints, described: Any, *, nested: bool = True) -> Ints:
        """Returns the track of each slice, one for every lane of every group, which ``described`` describes."""
        track = np.zeros(len(group), np.int64)
        order = np.argsort(group, kind="stable")
        keys, first = np.unique(group[order], return_index=True)
        for key, index in zip(keys.tolist(), np.split(order, first[1:]), strict=True):
            description = described(key)
            lane = lanes(start[index], end[index], nested=nested)
            tracks = [self._track(**description)]
            for number in range(1, int(lane.max()) + 1):
                parent = description.get("parent", tracks[0])
                more = {"place": description["place"]} if "place" in description else {}
                tracks.append(self._track(f"{description['name']} ({number + 1})", parent=parent, **more))
            track[index] = np.array(tracks)[lane]
        return track

    def streams(self) -> Iterator[Slices]:
        """Yields the operations of each stream, and what leads to them from their launches."""
        operations, launch = self.trace.operations, self.attributed.attribution.launch
        if not len(operations):
            return
        frame = operation_frame(self.attributed)
        owner = np.searchsorted(distinct(operations.process), operations.process)
        first, group = distinct_rows(owner, operations.device, operations.stream)

        def described(code: int) -> dict[str, Any]:
            columns = operations.process, operations.device, operations.stream
            process, device, stream = (int(column[first[code]]) for column in columns)
            return {"name": f"stream {stream}", "parent": self._gpu(process, device), "place": code}

        track = self._laid_out(group, operations.start, operations.end, described, nested=False)
        flow = np.where(launch == NONE, 0, self.ids.flows + launch.astype(np.int64))
        self.ids.flows += len(self.trace.launches)
        yield Slices(
            self._time(operations.start),
            self._time(operations.end),
            track,
            self._names(operations),
            self._by_category(frame["class"], Kind.CATEGORY),
            flow,
            self._arguments(frame),
        )

    def _names(self, operations: Operations) -> Ints:
        """Returns what operations are called: kernels by their short labels."""
        labels = [self.labels[name] for name in operations.names]
        names = self.strings.by_code(Kind.NAME, operations.name, labels)
        others = np.flatnonzero(operations.kind != KERNEL)
        copies = self.strings.by_code(
            Kind.NAME, operations.copy[others], [f"{OPERATION_KINDS[MEMCPY]} {one}" for one in COPY_KINDS]
        )
        kinds = self.strings.by_code(Kind.NAME, operations.kind[others], OPERATION_KINDS)
        names[others] = np.where(operations.kind[others] == MEMCPY, copies, kinds)
        return names

    def _arguments(self, frame: pd.DataFrame) -> Arguments:
        texts = {key: self._by_category(frame[key], Kind.VALUE) for key in _TEXTS if frame[key].notna().any()}
        operations = self.trace.operations
        shortened = np.array([*(self.labels[name] != name for name in operations.names), False])
        full = np.where(shortened[operations.name], operations.name, NONE)
        texts["full_name"] = self.strings.by_code(Kind.VALUE, full, operations.names)
        numbers = {}
        for key in _NUMBERS:
            column = frame[key]
            present = column.notna().to_numpy(np.bool_)
            if present.any():
                numbers[self.strings.of(Kind.ARGUMENT, key)] = column.fillna(0).to_numpy(np.int64), present
        return Arguments(*combinations(self.strings, texts), numbers)

    def _by_category(self, column: pd.Series[Any], kind: Kind) -> Ints:
        """Returns the IDs of the texts of a categorical column; an empty text is none."""
        codes, categories = column.cat.codes.to_numpy(np.int64), list(column.cat.categories)
        empty = categories.index("") if "" in categories else NONE
        return self.strings.by_code(kind, np.where(codes == empty, NONE, codes), categories)

    def idle(self) -> Iterator[Slices]:
        """Yields the idle time of each device in the steps, by cause."""
        words: Sequence[str] = [CAUSE_WORDS[cause] for cause in CAUSES]
        for process in self.processes:
            if is_on_cpu(self.trace, process):  # where operators stand for kernels, nothing idles
                continue
            steps = find_steps(self.attributed, process)
            if steps is None:
                continue
            work = ProcessWork(self.attributed, process, steps.every)
            for device in work.devices:
                idle = work.find_idle(steps.every, device)
                if len(idle):
                    track = self._track("idle", parent=self._gpu(process, device), place=-1)
                    name = self.strings.by_code(Kind.NAME, idle.cause, words)
                    category = np.full(len(name), self.strings.of(Kind.CATEGORY, "idle"))
                    times = self._time(idle.start), self._time(idle.end)
                    yield Slices(*times, np.full(len(name), track), name, category, np.zeros(len(name), np.int64))

    def memory(self) -> Iterator[tuple[int, Ints, Ints]]:
        """Yields the device memory in use of each process for which it was recorded: track, times, bytes."""
        uses = self.trace.memory
        if uses is None:
            return
        what = "of tensors" if self.trace.metadata.profiler == "torch" else "allocated"
        for process in np.unique(uses.process).tolist():
            events, level = memory_levels(uses, process)
            track = self._track(f"GPU memory {what}", parent=self._process(process)[0], counts_bytes=True)
            yield track, self._time(events.start), level[1:]


def lanes(start: Ints, end: Ints, *, nested: bool) -> Ints:
    """Finds the lane of each slice, from 0: in a lane none crosses another, or overlaps it if not ``nested``.

    A slice comes into the first lane that can take it, those that begin first and, of these, last longest first.
    """
    order = np.lexsort((-end, start))
    lane = np.zeros(len(start), np.int64)
    first, last = start[order], end[order]
    if (first[1:] >= last[:-1]).all():
        return lane
    stacks: list[list[int]] = [[]]  # of each lane, the ends of what is open
    found = []
    for begun, ended in zip(first.tolist(), last.tolist(), strict=True):
        number = 0
        while True:
            stack = stacks[number]
            while stack and stack[-1] <= begun:
                stack.pop()
            if not stack or (nested and stack[-1] >= ended):
                break
            number += 1
            if number == len(stacks):
                stacks.append([])
        stack.append(ended)
        found.append(number)
    lane[order] = found
    return lane
