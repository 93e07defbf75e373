"""Reads a memory snapshot of PyTorch, which ``torch.cuda.memory._dump_snapshot`` writes.

A snapshot is a pickle, and a pickle can call any function of Python. So only containers, texts and numbers are
admitted.
A snapshot of 1 GB has ten million events, whose dictionaries would need 10 GB. So the events become columns while the
file is read.
"""

from __future__ import annotations

import gc
import lzma
import pickle
import re
import zlib
from array import array
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from gzip import BadGzipFile, GzipFile
from operator import itemgetter
from pathlib import Path
from typing import IO, Any, NamedTuple, NoReturn, cast

import numpy as np

from nsys_analyzer.errors import TraceError
from nsys_analyzer.trace.arrays import Bools, Ints
from nsys_analyzer.trace.sources import find_files_beside

#: What an event can be. An event of another kind has the code ``len(ACTIONS)``.
ACTIONS = (
    "alloc", "free_requested", "free_completed", "segment_alloc", "segment_free", "segment_map", "segment_unmap", "oom",
)  # fmt: skip
ALLOCATION, FREE_REQUEST, FREE, SEGMENT_ALLOCATION, SEGMENT_FREE, SEGMENT_MAP, SEGMENT_UNMAP, OUT_OF_MEMORY = range(
    len(ACTIONS)
)
_ACTION_CODES = {name: code for code, name in enumerate(ACTIONS)}
#: The largest ratio of a snapshot's size to its compressed size, and the size up to which the ratio does not matter.
_MAX_EXPANSION, _ALWAYS_READ_BYTES = 500, 256 << 20
#: The largest piece that is read at once. Python writes pieces of 64 KiB.
_MAX_PIECE_BYTES = 256 << 20
_RECORD_HINT = "Write a snapshot with torch.cuda.memory._dump_snapshot(PATH)"
_NS_PER_US = 1_000
#: The suffix of the snapshots that ``nsys-analyze run`` keeps beside a capture.
SNAPSHOT_SUFFIX = ".memory.pickle.gz"
#: The key of the phases that ``nsys-analyze run`` adds to a snapshot.
PHASES_KEY = "nsys_analyze_phases"


class Frame(NamedTuple):
    """A line of the program in a stack."""

    function: str
    file: str
    line: int


class Annotation(NamedTuple):
    """A range of PyTorch's profiler that was open while memory was recorded, such as ``Optimizer.step#AdamW.step``."""

    name: str
    start_ns: int
    end_ns: int


@dataclass(frozen=True)
class MemoryEvents:
    """The events of the allocator in the order in which they occurred, as columns.

    Attributes:
        action: an index of ``ACTIONS``.
        device: the number of the GPU.
        address: the address of the memory. For ``OUT_OF_MEMORY``, the free memory of the GPU in bytes.
        size_bytes: the requested bytes.
        time_ns: the time since 1970.
        stack: an index of ``MemorySnapshot.stacks``.
    """

    action: Ints
    device: Ints
    address: Ints
    size_bytes: Ints
    time_ns: Ints
    stack: Ints

    def __len__(self) -> int:
        return len(self.action)

    def select(self, rows: Bools | Ints | slice) -> MemoryEvents:
        """Returns the events in the given rows."""
        return MemoryEvents(*(getattr(self, name)[rows] for name in self.__dataclass_fields__))


@dataclass(frozen=True)
class Segments:
    """The memory that the allocator holds when the snapshot is written, as columns. A segment contains blocks."""

    device: Ints
    address: Ints
    size_bytes: Ints


@dataclass(frozen=True)
class LiveBlocks:
    """The blocks in use when the snapshot is written, as columns: what was requested, and with rounding."""

    device: Ints
    address: Ints
    size_bytes: Ints
    requested_bytes: Ints
    stack: Ints

    def select(self, rows: Bools | Ints) -> LiveBlocks:
        """Returns the blocks in the given rows."""
        return LiveBlocks(*(getattr(self, name)[rows] for name in self.__dataclass_fields__))


@dataclass(frozen=True)
class MemorySnapshot:
    """A memory snapshot.

    Attributes:
        stacks: for each stack, its frames as indices of ``frames``, the innermost first. The first stack is empty.
        settings: the settings of the allocator, such as ``expandable_segments``.
    """

    path: Path
    events: MemoryEvents
    segments: Segments
    live_blocks: LiveBlocks
    frames: tuple[Frame, ...]
    stacks: tuple[tuple[int, ...], ...]
    settings: Mapping[str, str | int | float]
    annotations: tuple[Annotation, ...]
    #: The phases that ``nsys-analyze run`` recorded: the name, the number of the step, the start and the end, ns.
    phases: tuple[tuple[str, int, int, int], ...] = ()

    def list_frames(self, stack: int) -> list[Frame]:
        """Returns the frames of a stack, the innermost first."""
        return [self.frames[frame] for frame in self.stacks[stack]]


def read_snapshot(path: Path) -> MemorySnapshot:
    """Reads a memory snapshot, plain or compressed with gzip, xz or zstd.

    Raises:
        TraceError: the file is missing, damaged, no snapshot, or contains something other than data.
    """
    if path.exists() and not path.is_file():  # opening a named pipe blocks until a process writes
        raise TraceError(f"{path} is not a regular file", _RECORD_HINT)
    try:
        with _open_plain(path) as file, _without_garbage_collection():
            unpickler = _SnapshotUnpickler(_HookedFile(file, path.stat().st_size))
            document, columns = unpickler.load(), unpickler.columns
            del unpickler  # it refers to the empty dictionaries of all events
            if not isinstance(document, dict) or not {"segments", "device_traces"} <= document.keys():
                raise TraceError(f"{path} is no memory snapshot of PyTorch", _RECORD_HINT)
            return _make_snapshot(path, document, columns)
    except _UnsafePickleError as error:
        raise TraceError(
            f"{path} is refused: it is a pickle that {error}, which could run any code", _RECORD_HINT
        ) from None
    except FileNotFoundError:
        raise TraceError(f"{path} does not exist") from None
    except (pickle.UnpicklingError, EOFError, BadGzipFile, lzma.LZMAError, zlib.error, RecursionError, LookupError,
            TypeError, ValueError, AttributeError, OverflowError) as error:  # fmt: skip
        raise TraceError(
            f"{path} is damaged or is no memory snapshot of PyTorch: {error or type(error).__name__}", _RECORD_HINT
        ) from error


def find_snapshot_files(capture: Path) -> list[Path]:
    """Returns the snapshots that belong to a capture, including those of its ranks."""
    return find_files_beside(capture, rf"(_rank\d+)?{re.escape(SNAPSHOT_SUFFIX)}")


class _UnsafePickleError(Exception):
    """A pickle contains something other than containers, texts and numbers."""


@contextmanager
def _without_garbage_collection() -> Iterator[None]:
    """Stops the search for unused cycles, which would visit millions of objects again and again."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


@contextmanager
def _open_plain(path: Path) -> Iterator[IO[bytes]]:
    """Opens a file and decompresses it according to its first bytes."""
    with path.open("rb") as file:
        magic = file.read(6)
        file.seek(0)
        if magic.startswith(b"\x1f\x8b"):
            with GzipFile(fileobj=file) as stream:
                yield cast(IO[bytes], stream)
        elif magic == b"\xfd7zXZ\x00":
            with lzma.LZMAFile(file) as xz_stream:
                yield cast(IO[bytes], xz_stream)
        elif magic.startswith(b"\x28\xb5\x2f\xfd"):
            import pyarrow as pa

            try:
                yield cast(IO[bytes], pa.CompressedInputStream(pa.PythonFile(file), "zstd"))
            except OSError as error:
                raise EOFError(str(error)) from error
        else:
            yield file


# --- events become columns while the file is read
#
# Python's unpickler returns a document only as a whole. But Python writes a pickle in frames of 64 KiB, which begin and
# end between two instructions. So two kinds of instructions are added to what the unpickler reads. Behind the
# instruction that makes the list of events, the list is passed to `persistent_load`. At the end of each frame,
# `persistent_load` is called again: it moves the events that are complete into columns. The list and its dictionaries
# are then empty, and need little memory. If a file has no frames, all events are moved at the end.

_FRAME, _FRAME_LENGTH_BYTES = b"\x95", 8
_EVENTS_LIST = re.compile(rb"device_traces\x94\]\x94\(?(?:\]\x94)+")
_LONGEST_LIST_START = 64
#: Duplicates the top of the stack, passes it to `persistent_load`, and drops the result.
_PASS_LIST = b"2Q0"
#: Passes 0 to `persistent_load`, and drops the result.
_MOVE_EVENTS = b"K\x00Q0"


class _HookedFile:
    """A pickle with the added instructions, for an unpickler."""

    def __init__(self, file: IO[bytes], size_on_disk: int) -> None:
        self._file = file
        self._most_bytes = max(_ALWAYS_READ_BYTES, _MAX_EXPANSION * size_on_disk)
        self._read_bytes = 0
        self._is_length_next = False
        self._frame = b""
        self._end_of_last_frame = b""
        self._has_list = False

    def read(self, size: int) -> bytes:
        """Returns the next bytes. A frame is read as its instruction, its length and its content."""
        if self._frame and size == len(self._frame):
            frame, self._frame = self._frame, b""
            return frame
        data = self._read(size)
        if self._is_length_next and size == _FRAME_LENGTH_BYTES:
            self._frame = self._add_instructions(self._read(int.from_bytes(data, "little")))
            data = len(self._frame).to_bytes(_FRAME_LENGTH_BYTES, "little")
        self._is_length_next = size == 1 and data == _FRAME
        return data

    def readline(self) -> bytes:
        """Returns the next line, for the instructions of the oldest pickles."""
        return self._file.readline(_MAX_PIECE_BYTES)

    def _read(self, size: int) -> bytes:
        self._read_bytes += size
        if size > _MAX_PIECE_BYTES or self._read_bytes > self._most_bytes:
            raise ValueError("it contains an impossible size")
        data = self._file.read(size)
        if len(data) < size:
            raise EOFError("it ends too early")
        return data

    def _add_instructions(self, frame: bytes) -> bytes:
        if not self._has_list:
            searched = self._end_of_last_frame + frame
            if match := _EVENTS_LIST.search(searched):
                self._has_list = True
                position = match.end() - len(self._end_of_last_frame)
                frame = frame[:position] + _PASS_LIST + frame[position:]
            self._end_of_last_frame = searched[-_LONGEST_LIST_START:]
        return frame + _MOVE_EVENTS if self._has_list else frame


class _SnapshotUnpickler(pickle.Unpickler):
    """An unpickler that admits only containers, texts and numbers, and moves events into columns."""

    def __init__(self, file: _HookedFile) -> None:
        super().__init__(file)
        self.columns = _EventColumns()

    def find_class(self, module: str, name: str) -> NoReturn:
        """Refuses every class and function."""
        raise _UnsafePickleError(f"names {module}.{name}")

    def persistent_load(self, pid: Any) -> None:
        """Takes the list of events, and later moves its events."""
        if type(pid) is list:
            self.columns.events_list = pid
        elif pid == 0:
            self.columns.move_events(self.columns.events_list)
        else:
            raise _UnsafePickleError("refers to objects outside of it")


class _StackCode(int):
    """The code of a stack, in the list that contained the frames of the stack."""


class _EventColumns:
    """The columns of events, and the frames and stacks to which they refer."""

    def __init__(self) -> None:
        self.events_list: list[Any] = []
        self.action, self.stack = array("b"), array("i")
        self.address, self.size, self.time_us = array("Q"), array("q"), array("q")
        self.frames: dict[Frame, int] = {}
        self.stacks: dict[tuple[int, ...], _StackCode] = {(): _StackCode(0)}
        # Frames and stacks by the identity of the objects of the pickle, which the dictionary keeps alive.
        self._frame_of_object: dict[int, tuple[int, Any]] = {}
        self._stack_of_objects: dict[tuple[int, ...], _StackCode] = {}

    def move_events(self, events: list[Any]) -> None:
        """Moves the events from a list into the columns."""
        batch = events[:]
        events.clear()
        if not batch:
            return
        try:
            columns = zip(*map(_GET_FIELDS, batch), strict=True)
        except KeyError:  # an event without a stack or, for `oom`, with another key in place of the address
            columns = zip(*(_GET_FIELDS(_complete_event(event)) for event in batch), strict=True)
        actions, addresses, sizes, times, frame_lists = columns
        self.action.extend([_ACTION_CODES.get(action, len(ACTIONS)) for action in actions])
        self.address.extend(addresses)
        self.size.extend(sizes)
        self.time_us.extend(times)
        self.stack.extend(map(self.encode_stack, frame_lists))
        for event in batch:
            event.clear()

    def encode_stack(self, frames: list[Any]) -> int:
        """Returns the code of a stack, and replaces the frames in the list by the code, because events share lists."""
        if not frames:
            return 0
        if type(frames[0]) is _StackCode:
            return frames[0]
        objects = tuple(map(id, frames))
        code = self._stack_of_objects.get(objects)
        if code is None:
            stack = tuple(map(self._encode_frame, frames))
            code = self.stacks.setdefault(stack, _StackCode(len(self.stacks)))
            self._stack_of_objects[objects] = code
        frames[:] = (code,)
        return code

    def _encode_frame(self, frame: dict[str, Any]) -> int:
        if id(frame) not in self._frame_of_object:
            key = Frame(str(frame["name"]), str(frame["filename"]), int(frame["line"]))
            self._frame_of_object[id(frame)] = self.frames.setdefault(key, len(self.frames)), frame
        return self._frame_of_object[id(frame)][0]


_GET_FIELDS: Callable[[Any], tuple[Any, ...]] = itemgetter("action", "addr", "size", "time_us", "frames")


def _complete_event(event: dict[str, Any]) -> dict[str, Any]:
    return {"addr": event.get("device_free", 0), "time_us": 0, "frames": []} | event


def _make_snapshot(path: Path, document: dict[str, Any], columns: _EventColumns) -> MemorySnapshot:
    """Returns the snapshot that a document and the columns of its events describe."""
    traces = document["device_traces"]
    device = array("b")
    # The events that were moved while the file was read are those of the list that was passed to the unpickler.
    for number, trace in sorted(enumerate(traces), key=lambda pair: pair[1] is not columns.events_list):
        columns.move_events(trace)
        device.extend([number] * (len(columns.action) - len(device)))
    segment_rows, block_rows = [], []
    for segment in document["segments"]:
        number, address = segment["device"], segment["address"]
        segment_rows.append((number, address, segment["total_size"]))
        for block in segment["blocks"]:
            if block["state"] != "inactive":
                size, frames = block["size"], block.get("frames") or []
                row = (number, block.get("address", address), size, block.get("requested_size", size))
                block_rows.append((*row, columns.encode_stack(frames)))
            address += block["size"]
    events = MemoryEvents(
        _to_ints(columns.action), _to_ints(device), _to_ints(columns.address), _to_ints(columns.size),
        _to_ints(columns.time_us) * _NS_PER_US, _to_ints(columns.stack),
    )  # fmt: skip
    settings = document.get("allocator_settings") or {}
    return MemorySnapshot(
        path,
        events,
        Segments(*np.array(segment_rows, np.int64).reshape(-1, 3).T),
        LiveBlocks(*np.array(block_rows, np.int64).reshape(-1, 5).T),
        tuple(columns.frames),
        tuple(columns.stacks),
        {str(name): value for name, value in settings.items() if isinstance(value, str | int | float)},
        tuple(_pair_annotations(document.get("external_annotations") or ())),
        tuple((str(name), int(step), int(start), int(end)) for name, step, start, end in document.get(PHASES_KEY, ())),
    )


def _to_ints(column: array[int]) -> Ints:
    """Returns a column without copying it, or as signed integers, which addresses fit into."""
    values = np.frombuffer(column, dtype=np.dtype(column.typecode)) if column else np.empty(0, column.typecode)
    return cast(Ints, values.view(np.int64) if column.typecode == "Q" else values)


def _pair_annotations(marks: Iterable[Mapping[str, Any]]) -> Iterator[Annotation]:
    """Yields the ranges from the marks of their starts and ends."""
    starts: dict[str, list[int]] = {}
    for mark in marks:
        time_ns = int(mark["time_us"]) * _NS_PER_US
        if mark["stage"] == "START":
            starts.setdefault(str(mark["name"]), []).append(time_ns)
        elif starts.get(str(mark["name"])):
            yield Annotation(str(mark["name"]), starts[str(mark["name"])].pop(), time_ns)
