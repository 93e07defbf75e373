"""Exports captures as one trace for ui.perfetto.dev (``.pftrace``): threads, GPU streams, idle time and memory."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from nsys_analyzer.analysis.attribution.processes import Process, runs_on_cpu
from nsys_analyzer.analysis.intervals import NONE
from nsys_analyzer.analysis.kernels.labels import make_short_labels
from nsys_analyzer.analysis.ranges.instances import AttributedTrace
from nsys_analyzer.analysis.steps.groups import find_steps
from nsys_analyzer.analysis.steps.process import CAUSES, ProcessWork
from nsys_analyzer.analysis.steps.tracks import measure_memory_levels
from nsys_analyzer.export.frame import operation_frame
from nsys_analyzer.export.perfetto_packets import (
    MARK,
    Arguments,
    Slices,
    StringKind,
    Strings,
    Track,
    compress_packets,
    counter_packets,
    find_combinations,
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

#: A file of this module contains ``MARK`` within this many bytes from its start.
_MARK_DISTANCE_BYTES = 256
#: Packets are compressed in groups of at least this many bytes.
_GROUP_BYTES = 1 << 20
#: The category of each kind of API call.
_CALL_CATEGORIES = {
    OTHER_CALL: "other call", LAUNCH: "launch", BEGIN_CAPTURE: "graph capture", END_CAPTURE: "graph capture",
    ALLOCATE: "allocate", FREE: "free", SYNCHRONIZE: "synchronize", COPY: "copy call", FILL: "fill call",
    LAUNCH_GRAPH: "graph launch",
}  # fmt: skip
#: A call of the kind ``OTHER_CALL`` is shown if it takes at least this long, because such a call blocks the program,
#: for example to load a module.
_MIN_BLOCKING_NS = 20_000
#: The columns of the table of GPU operations whose values Perfetto shows as details of an operation.
_TEXT_COLUMNS = ("class", "phase", "range_path", "operator", "precision", "copy")
_NUMBER_COLUMNS = ("launch_latency_ns", "thread_blocks", "bytes", "instance", "correlation_id")
#: The first ID for a process or thread whose own ID is in use. It is larger than any process ID of Linux.
_FIRST_REPLACEMENT_ID = 1 << 24


def write(captures: Sequence[Capture], path: Path) -> None:
    """Writes the captures into one Perfetto trace."""
    strings, ids = Strings(), Ids()
    group = bytearray()
    with path.open("wb") as file:
        file.write(first_packet())
        for capture in captures:
            for packet in make_packets(capture, strings, ids):
                group += packet
                if len(group) >= _GROUP_BYTES:
                    file.write(compress_packets(bytes(group)))
                    group.clear()
        file.write(compress_packets(bytes(group)))


def is_ours(path: Path) -> bool:
    """Checks whether this tool wrote a file as a Perfetto trace."""
    with path.open("rb") as file:
        return MARK in file.read(_MARK_DISTANCE_BYTES)


class Ids:
    """Assigns IDs of tracks, flows, processes and threads that are unique in the Perfetto trace.

    Processes of different machines may have the same ID. The second one then gets an ID that no system assigns.
    """

    def __init__(self) -> None:
        self.tracks = count(1)
        self.flows = 1
        self._used: set[int] = {0}
        self._replacement_ids = count(_FIRST_REPLACEMENT_ID)

    def reserve(self, system_id: int) -> int:
        """Returns the given ID of a process or thread, or a replacement if the ID is in use, and marks it as used."""
        unique_id = next(self._replacement_ids) if system_id in self._used else system_id
        self._used.add(unique_id)
        return unique_id


def make_packets(capture: Capture, strings: Strings, ids: Ids) -> Iterator[bytes]:
    """Yields the packets of a capture. The first packets describe the capture's tracks.

    Args:
        capture: the capture, which this function reads.
        strings: the strings of the Perfetto trace.
        ids: the IDs that are used in the Perfetto trace.
    """
    attributed = capture.read()
    start_ns = capture.start_ns(attributed)
    # Times in a Perfetto trace are unsigned.
    layout = _TrackLayout(capture if start_ns >= 0 else capture.shifted(-start_ns), attributed, strings, ids)
    all_slices = [*layout.lay_out_threads(), *layout.lay_out_streams(), *layout.lay_out_idle()]
    counters = list(layout.lay_out_memory())
    yield from (track.packet() for track in layout.tracks)
    yield strings.packet()
    for slices in all_slices:
        yield from slice_packets(slices)
    for track, time, value in counters:
        yield from counter_packets(track, time, value)


class _TrackLayout:
    """Arranges the ranges, API calls, operations, idle times and memory of a capture on tracks."""

    def __init__(self, capture: Capture, attributed: AttributedTrace, strings: Strings, ids: Ids) -> None:
        self.capture, self.attributed, self.strings, self.ids = capture, attributed, strings, ids
        self.trace = attributed.trace
        self.tracks: list[Track] = []
        self.processes = {process.global_pid: process for process in capture.processes(attributed)}
        self._process_tracks: dict[int, tuple[int, int]] = {}
        self._gpu_tracks: dict[tuple[int, int], int] = {}
        self.labels = make_short_labels(attributed.trace.operations.names)

    def _add_track(self, name: str, **attributes: Any) -> int:
        """Adds a track to the trace, and returns the track's ID."""
        track = Track(next(self.ids.tracks), name, **attributes)
        self.tracks.append(track)
        return track.id

    def _get_process_track(self, process: int) -> tuple[int, int]:
        """Returns the track of a process, and the ID of the process in the Perfetto trace."""
        if process not in self._process_tracks:
            pid = pid_of(process)
            unique_pid = self.ids.reserve(pid)
            name = self.processes.get(process, Process(process, pid, "")).label or self.capture.path.name
            name = name if unique_pid == pid else f"{name} (pid {pid})"  # Perfetto shows the unique ID beside the name
            self._process_tracks[process] = self._add_track(name, process=unique_pid), unique_pid
        return self._process_tracks[process]

    def _get_gpu_track(self, process: int, device: int) -> int:
        """Returns the track of a GPU, which is the parent of the tracks of its streams."""
        key = process, device
        if key not in self._gpu_tracks:
            gpu = self.trace.metadata.gpu(pid_of(process), device)
            name = CPU if gpu and gpu.is_cpu else f"GPU {device}" + (f" ({gpu.name})" if gpu else "")
            self._gpu_tracks[key] = self._add_track(name, parent=self._get_process_track(process)[0], ordered=True)
        return self._gpu_tracks[key]

    def lay_out_threads(self) -> Iterator[Slices]:
        """Yields the ranges, operators and API calls of all threads as slices."""
        trace, launches = self.trace, self.trace.launches
        # Without this table, the operators are among the ranges.
        operators = [trace.operators] if schema.OPERATORS.key in trace.tables else []
        has_launched = np.zeros(len(launches), np.bool_)
        launch = self.attributed.attribution.launch
        has_launched[launch[launch != NONE]] = True
        is_long = launches.end - launches.start >= _MIN_BLOCKING_NS
        is_shown = has_launched | is_long | (launches.call != OTHER_CALL)
        calls = launches.select(is_shown)
        flows = np.where(has_launched, self.ids.flows + np.arange(len(launches)), 0)[is_shown]
        api_names = [name.partition("_v")[0] for name in calls.names]
        tables = [self._to_slices(trace.ranges, "range"), *(self._to_slices(table, "operator") for table in operators)]
        categories = [_CALL_CATEGORIES[call] for call in range(len(_CALL_CATEGORIES))]
        tables.append(
            (
                calls.thread,
                calls.start,
                calls.end,
                self.strings.get_ids(StringKind.NAME, calls.name, api_names),
                self.strings.get_ids(StringKind.CATEGORY, calls.call, categories),
                flows,
            )
        )
        thread, start, end, name, category, flow = (np.concatenate(columns) for columns in zip(*tables, strict=True))
        if len(thread):
            track = self._assign_tracks(thread, start, end, self._describe_thread_track)
            times = self.capture.to_common_clock(start), self.capture.to_common_clock(end)
            yield Slices(*times, track, name, category, flow)

    def _to_slices(self, ranges: Ranges, category: str) -> tuple[Ints, ...]:
        """Returns ranges as the columns of slices. The ranges of phases and steps have the category "phase"."""
        category_ids = np.full(len(ranges), self.strings.get_id(StringKind.CATEGORY, category))
        if ranges is self.trace.ranges:
            category_ids[self.attributed.roles.is_phase_or_step] = self.strings.get_id(StringKind.CATEGORY, "phase")
        name = self.strings.get_ids(StringKind.NAME, ranges.name, ranges.names)
        return ranges.thread, ranges.start, ranges.end, name, category_ids, np.zeros(len(ranges), np.int64)

    def _describe_thread_track(self, thread: int) -> dict[str, Any]:
        """Returns the attributes of the track of a thread."""
        process, tid = process_of(np.array([thread])).tolist()[0], thread & ~PROCESS_MASK
        _, pid = self._get_process_track(process)
        is_main = tid == pid_of(process)
        name = self.trace.metadata.thread_names.get(thread) or ("main thread" if is_main else f"thread {tid}")
        # On Linux, the ID of the main thread equals the ID of its process.
        return {"name": name, "thread": (pid, pid if is_main else self.ids.reserve(tid))}

    def _assign_tracks(
        self, group: Integers, start: Ints, end: Ints, describe: Callable[[int], dict[str, Any]], *, nested: bool = True
    ) -> Ints:
        """Adds tracks for groups of slices, and returns the track of each slice.

        Slices that overlap are on different tracks of their group. ``describe`` returns the attributes of a group's
        track.
        """
        track = np.zeros(len(group), np.int64)
        order = np.argsort(group, kind="stable")
        keys, first = np.unique(group[order], return_index=True)
        for key, index in zip(keys.tolist(), np.split(order, first[1:]), strict=True):
            attributes = describe(key)
            lane = assign_lanes(start[index], end[index], nested=nested)
            tracks = [self._add_track(**attributes)]
            for number in range(1, int(lane.max()) + 1):
                parent = attributes.get("parent", tracks[0])
                position = {"position": attributes["position"]} if "position" in attributes else {}
                tracks.append(self._add_track(f"{attributes['name']} ({number + 1})", parent=parent, **position))
            track[index] = np.array(tracks)[lane]
        return track

    def lay_out_streams(self) -> Iterator[Slices]:
        """Yields the operations of all streams as slices. A flow connects each operation with its launch."""
        operations, launch = self.trace.operations, self.attributed.attribution.launch
        if not len(operations):
            return
        frame = operation_frame(self.attributed)
        process_code = np.searchsorted(distinct(operations.process), operations.process)
        first_of_stream, group = distinct_rows(process_code, operations.device, operations.stream)

        def describe_stream_track(code: int) -> dict[str, Any]:
            """Returns the attributes of the track of a stream."""
            columns = operations.process, operations.device, operations.stream
            process, device, stream = (int(column[first_of_stream[code]]) for column in columns)
            return {"name": f"stream {stream}", "parent": self._get_gpu_track(process, device), "position": code}

        track = self._assign_tracks(group, operations.start, operations.end, describe_stream_track, nested=False)
        flow = np.where(launch == NONE, 0, self.ids.flows + launch.astype(np.int64))
        self.ids.flows += len(self.trace.launches)
        yield Slices(
            self.capture.to_common_clock(operations.start),
            self.capture.to_common_clock(operations.end),
            track,
            self._make_names(operations),
            self._get_text_ids(frame["class"], StringKind.CATEGORY),
            flow,
            self._make_arguments(frame),
        )

    def _make_names(self, operations: Operations) -> Ints:
        """Returns the ID of each operation's name. The name of a kernel is its short label."""
        labels = [self.labels[name] for name in operations.names]
        names = self.strings.get_ids(StringKind.NAME, operations.name, labels)
        copies_and_fills = np.flatnonzero(operations.kind != KERNEL)
        copy_names = [f"{OPERATION_KINDS[MEMCPY]} {direction}" for direction in COPY_KINDS]
        copies = self.strings.get_ids(StringKind.NAME, operations.copy[copies_and_fills], copy_names)
        kinds = self.strings.get_ids(StringKind.NAME, operations.kind[copies_and_fills], OPERATION_KINDS)
        names[copies_and_fills] = np.where(operations.kind[copies_and_fills] == MEMCPY, copies, kinds)
        return names

    def _make_arguments(self, frame: pd.DataFrame) -> Arguments:
        """Returns the details that Perfetto shows for each operation."""
        text_columns = [key for key in _TEXT_COLUMNS if frame[key].notna().any()]
        texts = {key: self._get_text_ids(frame[key], StringKind.VALUE) for key in text_columns}
        operations = self.trace.operations
        is_shortened = np.array([*(self.labels[name] != name for name in operations.names), False])
        full_name = np.where(is_shortened[operations.name], operations.name, NONE)
        texts["full_name"] = self.strings.get_ids(StringKind.VALUE, full_name, operations.names)
        numbers = {}
        for key in _NUMBER_COLUMNS:
            column = frame[key]
            has_value = column.notna().to_numpy(np.bool_)
            if has_value.any():
                numbers[self.strings.get_id(StringKind.ARGUMENT, key)] = column.fillna(0).to_numpy(np.int64), has_value
        return Arguments(*find_combinations(self.strings, texts), numbers)

    def _get_text_ids(self, column: pd.Series[Any], kind: StringKind) -> Ints:
        """Returns the ID of the text in each row of a categorical column; 0 for a missing or empty text."""
        codes, categories = column.cat.codes.to_numpy(np.int64), list(column.cat.categories)
        empty_code = categories.index("") if "" in categories else NONE
        return self.strings.get_ids(kind, np.where(codes == empty_code, NONE, codes), categories)

    def lay_out_idle(self) -> Iterator[Slices]:
        """Yields the idle times of each GPU within the steps as slices, which are named after the causes."""
        words: Sequence[str] = [CAUSE_WORDS[cause] for cause in CAUSES]
        for process in self.processes:
            if runs_on_cpu(self.trace, process):  # without a GPU, there are only operators, and no idle time
                continue
            steps = find_steps(self.attributed, process)
            if steps is None:
                continue
            work = ProcessWork(self.attributed, process, steps.recorded)
            for device in work.devices:
                idle_stretches = work.find_idle_stretches(steps.recorded, device)
                if len(idle_stretches):
                    track = self._add_track("idle", parent=self._get_gpu_track(process, device), position=-1)
                    name = self.strings.get_ids(StringKind.NAME, idle_stretches.cause, words)
                    category = np.full(len(name), self.strings.get_id(StringKind.CATEGORY, "idle"))
                    times = (
                        self.capture.to_common_clock(idle_stretches.start),
                        self.capture.to_common_clock(idle_stretches.end),
                    )
                    yield Slices(*times, np.full(len(name), track), name, category, np.zeros(len(name), np.int64))

    def lay_out_memory(self) -> Iterator[tuple[int, Ints, Ints]]:
        """Yields the track, the times and the bytes in use of the device memory of each process."""
        memory_uses = self.trace.memory
        if memory_uses is None:
            return
        suffix = "of tensors" if self.trace.metadata.profiler == "torch" else "allocated"
        for process in np.unique(memory_uses.process).tolist():
            events, level = measure_memory_levels(memory_uses, process)
            process_track, _ = self._get_process_track(process)
            track = self._add_track(f"GPU memory {suffix}", parent=process_track, counts_bytes=True)
            yield track, self.capture.to_common_clock(events.start), level[1:]


def assign_lanes(start: Ints, end: Ints, *, nested: bool) -> Ints:
    """Returns the lane of each slice, counted from 0. The slices of a lane do not overlap.

    If ``nested``, a slice may contain other slices of its lane. The slices are assigned in order of start, longer
    slices first. Each slice gets the first lane in which it overlaps no other slice.
    """
    order = np.lexsort((-end, start))
    lane = np.zeros(len(start), np.int64)
    sorted_start, sorted_end = start[order], end[order]
    if (sorted_start[1:] >= sorted_end[:-1]).all():
        return lane
    open_ends: list[list[int]] = [[]]  # for each lane, the ends of its open slices
    lane_numbers = []
    for slice_start, slice_end in zip(sorted_start.tolist(), sorted_end.tolist(), strict=True):
        number = 0
        while True:
            ends = open_ends[number]
            while ends and ends[-1] <= slice_start:
                ends.pop()
            if not ends or (nested and ends[-1] >= slice_end):
                break
            number += 1
            if number == len(open_ends):
                open_ends.append([])
        ends.append(slice_end)
        lane_numbers.append(number)
    lane[order] = lane_numbers
    return lane
