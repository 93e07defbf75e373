"""Reads a Chrome trace of PyTorch's profiler (Kineto): the events worth keeping, by kind.

A trace of a million events is a text of 200 MB and more, and most of it is of no use here (flow arrows, Python
stacks, arguments of operators). So it is read a piece at a time, and its events condensed to a few columns.
"""

from __future__ import annotations

import codecs
import gzip
import json
import os
import re
import zlib
from collections import Counter, defaultdict
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from decimal import Decimal, InvalidOperation
from itertools import compress
from pathlib import Path
from typing import IO, Any

import msgspec
import numpy as np

from nsys_analyzer.errors import TraceError
from nsys_analyzer.text import visible
from nsys_analyzer.trace.kineto.events import (
    COLUMNS,
    EVENT,
    GPU_RANGE,
    OLD_OPERATOR,
    OTHER_DEVICE,
    UNREADABLE,
    Event,
    Numbers,
    Place,
    Properties,
    Rows,
    as_number,
    collectives_of,
    decode_many,
    decode_one,
    encode,
    kind_of,
    rows_of,
    times_of,
)

RECORD = "Record it with torch.profiler and export_chrome_trace(), or with: nsys-analyze run --profiler torch"
"""The hint for a file that is no trace of PyTorch's profiler."""

AGAIN = "Copy it again, or record it again"
"""The hint for a trace that is damaged."""

_GZIP_MAGIC = b"\x1f\x8b"
_PIECE = 1 << 20
"""Bytes that are read at once; a few thousand events."""

_LONGEST_VALUE = 4 << 20
"""Characters of the longest event or property that is read: an object of two characters takes 64 bytes of memory.
Kineto's longest values are below a hundredth.
"""

MOST_EXPANDED = 200
"""How many times larger than its file a compressed trace may be: those of Kineto expand 10 to 30 times, 50 with deep
indentation, and deflate can do 1,000.
"""

_ALWAYS_READ = 64 << 20
"""Bytes that are read however few they were compressed to."""

_WHITE_SPACE = re.compile(r"[ \t\n\r]*")
_BETWEEN = re.compile(r"\}[ \t\n\r]*(?=,[ \t\n\r]*\{)")
_PART_OF_NUMBER = re.compile(r"[-+.0-9eE]*")
_NEAR_THE_END = 1 << 16
"""Characters at the end of the buffer in which the end of an event is looked for."""

_MOST_WAITING = 4096
"""Events read one by one that are condensed at once."""

_ON_A_GPU = ("kernel", "memcpy", "memset")
_BACKWARD = re.compile(r"Backward\d*$")


@dataclass(frozen=True)
class KinetoTrace:
    """The events of a trace by kind, times in ns since the first of them.

    Attributes:
        events: kinds are ``kernel``, ``memcpy``, ``memset``, ``runtime``, ``range``, ``operator``, ``memory``,
            ``thread``; ``collective``, what kernels say of theirs; and ``gpu range``, a range on the GPU's timeline,
            where the trace holds nothing of the CPU.
        texts, places: those of the numbers in the events.
        remarks: warnings about what could not be read.
        on_cpu: whether it holds nothing of a GPU.
    """

    path: Path
    properties: Properties
    events: dict[str, Rows]
    texts: list[str]
    places: list[Place]
    remarks: list[str]
    on_cpu: bool

    def of(self, kind: str) -> Rows:
        """Returns the events of a kind."""
        return self.events.get(kind, np.empty(0, COLUMNS.get(kind, EVENT)))

    @property
    def operations(self) -> Rows:
        """The GPU operations: kernels, copies and fills."""
        return np.concatenate([self.of(kind) for kind in _ON_A_GPU])


def read_kineto(path: Path) -> KinetoTrace:
    """Reads a Chrome trace of PyTorch's profiler, plain or compressed with gzip.

    An event that cannot be what it says is left out; the trace's remarks say so.

    Raises:
        TraceError: no such file, truncated, not JSON, another tool's trace, of a device that is not read, or nothing in
            it to analyse.
    """
    read = _Events(path)
    with opened(path) as file:
        written = _read(JsonText(path, file), read)
    events, left_out = read.finished()
    properties, remarks = Properties(), left_out.copy()
    try:
        properties = msgspec.json.decode(encode(written), type=Properties)
    except UNREADABLE as error:
        remarks.append(f"The trace's properties are ignored: {error}")
    if "range" in events or "operator" in events:
        events.pop(GPU_RANGE, None)  # it repeats the CPU's
    because = f": {left_out[0]}" if left_out else ""
    timed = [rows for kind, rows in events.items() if kind not in ("thread", "collective")]
    if not timed:
        raise TraceError(f"{path} holds no events of PyTorch's profiler of 1.8 or later{because}", RECORD)
    on_cpu = not set(events) & set(_ON_A_GPU)
    if on_cpu and "operator" not in events:
        hint = "Record again with activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]"
        raise TraceError(f"{path} holds neither operators nor kernels{because}", hint)
    first = min(int(rows["start"].min()) for rows in timed)
    for rows in timed:
        rows["start"] -= first
        rows["end"] -= first
    texts = list(read.numbers.texts)
    places = [(as_number(pid), as_number(tid)) for pid, tid in read.numbers.places]
    return KinetoTrace(path, properties, events, texts, places, remarks, on_cpu)


#: What rocprofv3 writes all of its JSON below.
_OF_ROCPROFV3 = "rocprofiler-sdk-tool"


def _read(text: JsonText, events: _Events) -> dict[str, Any]:
    """Reads a trace: the events into ``events``; returns the properties that are of use as they are written."""
    if not text.next():
        raise TraceError(f"{text.path} is empty", RECORD)
    properties: dict[str, Any] = {}
    has_events = False
    if text.take("["):  # a bare array of events
        _read_events(text, events)
        has_events = True
    elif not text.take("{"):
        text.value()
    else:
        while text.next() != "}":
            key = text.value()
            if not isinstance(key, str) or not text.take(":"):
                raise text.broken("no property")
            if key == _OF_ROCPROFV3:
                raise TraceError(f"{text.path} is of rocprofv3, whose JSON is not read", RECORD)
            if key == "traceEvents" and text.take("["):
                _read_events(text, events)
                has_events = True
            else:
                value = text.value()
                if key in Properties.__struct_encode_fields__ and value is not None:
                    properties[key] = value
            if not text.take(",") and text.next() != "}":
                raise text.broken("neither a comma nor a closing brace")
        text.take("}")
    if text.next():
        raise text.broken("extra data")
    if not has_events:
        raise TraceError(f"{text.path} is JSON, but no trace of PyTorch's profiler: it has no traceEvents", RECORD)
    return properties


def _read_events(text: JsonText, events: _Events) -> None:
    """Reads an array of events to its end: many at once, or one by one beside those that msgspec cannot read."""
    one_by_one_until = 0
    while text.next() != "]":
        several = text.objects() if text.position >= one_by_one_until else ""
        if several and events.add_all(several):
            text.at += len(several)
        else:
            one_by_one_until = max(one_by_one_until, text.position + (len(several) or len(text.buffer) - text.at))
            events.add(text.value())
        if not text.take(",") and text.next() != "]":
            raise text.broken("neither a comma nor a closing bracket")
    text.take("]")


class _Events:
    """The events of a trace as they are read: those that are kept, by kind, and how many are left out."""

    def __init__(self, path: Path) -> None:
        self.numbers = Numbers()
        self._path = path
        self._kept: dict[str, list[Rows]] = defaultdict(list)
        self._left_out: Counter[str] = Counter()
        self._first_left_out: dict[str, str] = {}
        self._waiting: list[Event] = []

    def add_all(self, text: str) -> bool:
        """Adds events from the text of several, ``{…}, {…}``; False, and none, where :meth:`add` must take each."""
        try:
            events = decode_many(text)
        except UNREADABLE:
            return False
        self._condense()
        self._waiting = events
        self._condense()
        return True

    def add(self, value: Any) -> None:
        """Adds an event from the value of its JSON, or counts it among those left out."""
        if not isinstance(value, dict):
            self._leave_out("unknown", None)
        elif kind := kind_of(value.get("ph"), value.get("cat"), value.get("name")):
            try:
                self._waiting.append(decode_one(value))
            except UNREADABLE:
                self._leave_out(kind, value.get("name"))
            if len(self._waiting) == _MOST_WAITING:
                self._condense()

    def finished(self) -> tuple[dict[str, Rows], list[str]]:
        """Returns the rows of each kind, and a warning for each kind of which events were left out."""
        self._condense()
        events = {kind: np.concatenate(self._kept.pop(kind)) for kind in tuple(self._kept)}
        remarks = [
            f"Left out: {count:,} of {count + len(events.get(kind, ())):,} events of the kind {kind}, which have no "
            f"time, or hold what cannot be read; the first is {self._first_left_out[kind]}"
            for kind, count in self._left_out.items()
        ]
        if OLD_OPERATOR in events:
            self._sort_old_operators(events)
        return events, remarks

    def _leave_out(self, kind: str, name: object, count: int = 1) -> None:
        self._first_left_out.setdefault(kind, f'"{visible(name[:60])}"' if isinstance(name, str) else "without a name")
        self._left_out[kind] += count

    def _condense(self) -> None:
        """Condenses the events that wait to rows."""
        by_kind: dict[str, list[Event]] = defaultdict(list)
        for event in self._waiting:
            if kind := kind_of(event.ph, event.cat, event.name):
                by_kind[kind].append(event)
        self._waiting = []
        for kind, events in by_kind.items():
            if kind == OTHER_DEVICE:
                hint = "Traces of NVIDIA's and AMD's GPUs are read, and those of CPUs"
                raise TraceError(f"{self._path} is of a device that is not read ({events[0].cat})", hint)
            starts, ends, are_timed = times_of(kind, events)
            if not are_timed.all():
                self._leave_out(kind, events[int(are_timed.argmin())].name, int((~are_timed).sum()))
                events = list(compress(events, are_timed.tolist()))
            rows = rows_of(kind, events, self.numbers)
            rows["start"], rows["end"] = starts[are_timed], ends[are_timed]
            if kind == "kernel" and len(collectives := collectives_of(rows, events, self.numbers)):
                self._kept["collective"].append(collectives)
            if len(rows):
                self._kept[kind].append(rows)

    def _sort_old_operators(self, events: dict[str, Rows]) -> None:
        """Parts operators from ranges by their names, in place."""
        rows, texts = events.pop(OLD_OPERATOR), list(self.numbers.texts)
        names = {texts[number]: number for number in np.unique(rows["name"]).tolist()}
        operators = [
            number
            for name, number in names.items()
            if "::" in name or f"aten::{name}" in names or _BACKWARD.search(name)
        ]
        are_operators = np.isin(rows["name"], operators)
        for kind, some in (("operator", rows[are_operators]), ("range", rows[~are_operators])):
            if len(some):
                columns = COLUMNS.get(kind, EVENT)
                there = events.get(kind, np.empty(0, columns))
                events[kind] = np.concatenate([there, some[list(columns.names or ())].astype(columns)])


# --- the text of a trace, read in pieces: JSON of any size in the memory of a few megabytes


def _integer(text: str) -> int | Decimal:
    """Returns an integer; a decimal where no column can hold it, because converting a million digits takes minutes."""
    return int(text) if len(text) < 20 else Decimal(text)


def _fraction(text: str) -> Decimal | str:
    """Returns a decimal; the text where the exponent is too large for one."""
    try:
        return Decimal(text)
    except InvalidOperation:
        return text


#: Accepts what profilers have written besides JSON: control characters in texts, NaN and Infinity. Numbers with a
#: fraction become decimals, because a double cannot hold the nanoseconds of a time since 1970.
_TOLERANT = json.JSONDecoder(parse_float=_fraction, parse_int=_integer, parse_constant=str, strict=False)


class JsonText:
    """A position ``at`` in the text of a file, and as much of the text, ``buffer``, as the value there needs.

    Every method that reads raises TraceError where the file is not JSON or expands too much.
    """

    def __init__(self, path: Path, file: IO[bytes]) -> None:
        self.path = path
        self.buffer = ""
        self.at = 0
        self._dropped = 0
        self._pieces = _pieces(path, file)

    @property
    def position(self) -> int:
        """The position in the file's text."""
        return self._dropped + self.at

    def next(self) -> str:
        """Returns the character that follows white space, not yet taken; empty at the end of the file."""
        while True:
            if space := _WHITE_SPACE.match(self.buffer, self.at):
                self.at = space.end()
            if self.at < len(self.buffer) or not self._read_on():
                return self.buffer[self.at : self.at + 1]

    def take(self, character: str) -> bool:
        """Takes a character if it is the next one, and returns whether it was."""
        is_next = self.next() == character
        self.at += is_next
        return is_next

    def objects(self) -> str:
        """Returns several objects of an array, up to the last end of one that is in memory; not yet taken.

        The end may lie inside a text or a nested object: then a decoder refuses the result.
        """
        if len(self.buffer) - self.at < _PIECE // 2:
            self._read_on()
        ends = [match.end() for match in _BETWEEN.finditer(self.buffer, max(self.at, len(self.buffer) - _NEAR_THE_END))]
        return self.buffer[self.at : ends[-1]] if ends else ""

    def value(self) -> Any:
        """Takes the value that begins here: fractions as decimals, NaN and Infinity as texts."""
        self.next()
        while True:
            try:
                value, end = _TOLERANT.raw_decode(self.buffer, self.at)
            except json.JSONDecodeError as error:
                if not self._read_twice_as_much():
                    raise self.broken(error.msg, self._dropped + error.pos) from error
            except RecursionError as error:
                raise self.broken("nested too deep") from error
            else:
                may_go_on = _PART_OF_NUMBER.fullmatch(self.buffer, end)
                if not may_go_on or not self._read_twice_as_much():
                    self.at = end
                    return value

    def _read_twice_as_much(self) -> bool:
        """Reads on, for a value that goes on beyond the buffer; False at the end of the file, or if it is too long."""
        remaining = len(self.buffer) - self.at
        if remaining > _LONGEST_VALUE or not self._read_on():
            return False
        while len(self.buffer) < min(2 * remaining, _LONGEST_VALUE) and self._read_on():
            pass
        return True

    def _read_on(self) -> bool:
        """Reads another piece and drops the text before the position; False at the end of the file."""
        piece = next(self._pieces, None)
        if piece is None:
            return False
        self._dropped += self.at
        self.buffer = self.buffer[self.at :] + piece
        self.at = 0
        return True

    def broken(self, what: str, position: int | None = None) -> TraceError:
        """Returns the error for what is not JSON, at a position in the file's text, or at the present one."""
        where = f"character {self.position if position is None else position:,}"
        limit = f"a value of more than {_LONGEST_VALUE >> 20} MiB"
        return TraceError(f"{self.path} is not JSON, or only a part of it, or has {limit} ({what} at {where})", AGAIN)


@contextmanager
def opened(path: Path) -> Iterator[IO[bytes]]:
    """Opens a trace for reading; raises TraceError, in the block, too, where it cannot be read to its end."""
    try:
        if path.exists() and not path.is_file():
            raise TraceError(f"{path} is no file that can be read to its end", "Give the path of a .json or .json.gz")
        with path.open("rb") as file:
            yield file
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise TraceError(f"{path} is damaged or truncated ({error})", AGAIN) from error
    except OSError as error:
        raise TraceError(f"{path}: {error.strerror}", "Give the path of a .json or .json.gz trace") from error


def _pieces(path: Path, file: IO[bytes]) -> Iterator[str]:
    """Returns the text of a file, plain or compressed with gzip, a piece at a time."""
    is_packed = file.read(len(_GZIP_MAGIC)) == _GZIP_MAGIC
    file.seek(0)
    most = max(_ALWAYS_READ, MOST_EXPANDED * os.fstat(file.fileno()).st_size)
    decoder = codecs.getincrementaldecoder("utf-8-sig")(errors="replace")
    with gzip.open(file) if is_packed else nullcontext(file) as stream:
        while piece := stream.read(_PIECE):
            most -= len(piece)
            if most < 0:
                raise TraceError(
                    f"{path} expands more than {MOST_EXPANDED} times, as no recorded trace does",
                    f"If you trust it, unpack it and give the .json: gunzip -k {path.name}",
                )
            yield decoder.decode(piece)
    yield decoder.decode(b"", final=True)
