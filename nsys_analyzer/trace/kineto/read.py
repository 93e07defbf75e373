"""Reads a Chrome trace of PyTorch's profiler (Kineto): the events worth keeping, by kind.

A trace of a million events is a text of 200 MB and more, and most of it is of no use here (flow arrows, Python
stacks, arguments of operators). So its events are decoded a piece of it at a time, and condensed to a few columns.
"""

from __future__ import annotations

import gzip
import re
import zlib
from codecs import getincrementaldecoder
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from itertools import compress
from pathlib import Path

import msgspec
import numpy as np

from nsys_analyzer.errors import TraceError
from nsys_analyzer.text import visible
from nsys_analyzer.trace.columns import CALL_PREFIXES, COPY, FILL, LAUNCH, LAUNCH_GRAPH
from nsys_analyzer.trace.kineto.events import (
    COLUMNS,
    EVENT,
    OLD_OPERATOR,
    OTHER_DEVICE,
    Event,
    Numbers,
    Place,
    Properties,
    Rows,
    as_number,
    collectives_of,
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
"""Bytes of a text whose events are decoded at once; a few thousand events."""

MOST_EXPANDED = 200
"""How many times larger than its file a compressed trace may be: those of Kineto expand 10 to 30 times, 50 with deep
indentation, and deflate can do 1,000.
"""

_ALWAYS_READ = 64 << 20
"""Bytes that are read however few they were compressed to."""

#: What profilers have written that is no JSON: control characters in texts, the decimal commas of some locales, values
#: such as NaN, and backslashes that escape nothing. A text in JSON cannot contain '":' without a backslash before it.
_CONTROL_CHARACTERS = bytes(code if code >= 0x20 else 0x20 for code in range(256))
_DECIMAL_COMMA = re.compile(rb'("(?<!\\")\s*:\s*-?\d+),(\d+(?:[eE][-+]?\d+)?)(?=\s*[,}])')
_NO_NUMBER = re.compile(rb"([:\[, ])-?(?:[nN]a[nN](?:\(\w*\))?|[iI]nf(?:inity)?)(?=\s*[,\]}])")
_BACKSLASH = re.compile(rb'\\(?:["\\/bfnrt]|u[0-9a-fA-F]{4})|\\')
_PLACE = re.compile(r"\(byte (\d+)\)")
_BETWEEN = re.compile(rb"\}\s*,\s*(?=\{)")

_ON_A_GPU = ("kernel", "memcpy", "memset")
#: Calls that put work on a GPU: what they launched may be missing from a trace.
_LAUNCHING = (*CALL_PREFIXES[LAUNCH], *CALL_PREFIXES[LAUNCH_GRAPH], *CALL_PREFIXES[COPY], *CALL_PREFIXES[FILL])
_BACKWARD = re.compile(r"Backward\d*$")
_UNREADABLE = (msgspec.MsgspecError, UnicodeDecodeError, RecursionError)


@dataclass(frozen=True)
class KinetoTrace:
    """The events of a trace by kind, times in ns since the first of them.

    Attributes:
        events: kinds are ``kernel``, ``memcpy``, ``memset``, ``runtime``, ``range``, ``operator``, ``memory``,
            ``thread``, ``noted``; and ``collective``, what kernels say of theirs.
        texts, places: those of the numbers in the events.
        remarks: warnings about what could not be read.
        on_cpu: whether it holds nothing of a GPU, nor a call that puts work on one.
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
    content, remarks = _content(path), list[str]()
    try:
        written = _members(content)
    except _UNREADABLE:
        content, remarks = _repaired(content)
        try:
            written = _members(content)
        except _UNREADABLE as error:
            raise _no_json(path, content, error) from error
    array = memoryview(written.pop("traceEvents", b""))
    if bytes(array[:1]) != b"[":
        raise TraceError(f"{path} is JSON, but no trace of PyTorch's profiler: it has no traceEvents", RECORD)
    read = _Events(path)
    rest = b""
    for piece in _pieces(array):
        rest = b"" if read.add(rest + piece) else rest + piece
    events, left_out = read.finished()
    properties = Properties()
    remarks += left_out
    try:
        properties = msgspec.json.decode(msgspec.json.encode(written), type=Properties)
    except _UNREADABLE as error:
        remarks.append(f"The trace's properties are ignored: {error}")
    because = f": {left_out[0]}" if left_out else ""
    timed = [rows for kind, rows in events.items() if kind not in ("thread", "collective")]
    if not set(events) - {"thread", "noted"}:
        raise TraceError(f"{path} holds no events of PyTorch's profiler of 1.8 or later{because}", RECORD)
    texts = list(read.numbers.texts)
    called = [texts[number] for number in np.unique(events["runtime"]["name"])] if "runtime" in events else []
    on_cpu = not set(events) & set(_ON_A_GPU) and not any(name.startswith(_LAUNCHING) for name in called)
    if on_cpu and "operator" not in events:
        hint = "Record again with activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]"
        raise TraceError(f"{path} holds neither operators nor kernels{because}", hint)
    first = min(int(rows["start"].min()) for rows in timed)
    for rows in timed:
        rows["start"] -= first
        rows["end"] -= first
    places = [(as_number(pid), as_number(tid)) for pid, tid in read.numbers.places]
    return KinetoTrace(path, properties, events, texts, places, remarks, on_cpu)


def _content(path: Path) -> bytes | bytearray:
    """Returns the text of a trace as valid UTF-8. It is read in pieces: a read of N bytes takes N bytes of memory."""
    content, decoder = bytearray(), getincrementaldecoder("utf-8-sig")("replace")
    try:
        if path.exists() and not path.is_file():
            raise TraceError(f"{path} is no file that can be read to its end", "Give the path of a .json or .json.gz")
        with path.open("rb") as file:
            is_packed = file.read(len(_GZIP_MAGIC)) == _GZIP_MAGIC
            most = max(_ALWAYS_READ, MOST_EXPANDED * file.seek(0, 2))
            file.seek(0)
            with gzip.open(file) if is_packed else nullcontext(file) as stream:
                while (piece := stream.read(_PIECE)) and len(content) <= most:
                    content += decoder.decode(piece.translate(_CONTROL_CHARACTERS)).encode()
                content += decoder.decode(b"", final=True).encode()
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise TraceError(f"{path} is damaged or truncated ({error})", AGAIN) from error
    except OSError as error:
        raise TraceError(f"{path}: {error.strerror}", "Give the path of a .json or .json.gz trace") from error
    if is_packed and len(content) > most:
        raise TraceError(
            f"{path} expands more than {MOST_EXPANDED} times, as no recorded trace does",
            f"If you trust it, unpack it and give the .json: gunzip -k {path.name}",
        )
    if not content or content.isspace():
        raise TraceError(f"{path} is empty", RECORD)
    return content


def _members(content: bytes | bytearray) -> dict[str, msgspec.Raw]:
    """Returns the members of an object's text. A bare array holds the events, and becomes the only member."""
    if re.match(rb"\s*\[", content):
        return {"traceEvents": msgspec.json.decode(content, type=msgspec.Raw)}
    return msgspec.json.decode(content, type=dict[str, msgspec.Raw])


def _repaired(content: bytes | bytearray) -> tuple[bytes, list[str]]:
    """Returns a text that is no JSON with PyTorch's known faults corrected, and a warning if that was a guess."""
    counts = Counter[str]()

    def escaped(match: re.Match[bytes]) -> bytes:
        if len(match[0]) > 1:
            return match[0]
        counts["backslashes"] += 1
        return rb"\\"

    content, counts["decimal commas"] = _DECIMAL_COMMA.subn(rb"\1.\2", content)
    content = _BACKSLASH.sub(escaped, _NO_NUMBER.sub(rb"\1null", content))
    faults = " and ".join(f"{count:,} {fault}" for fault, count in counts.items() if count)
    remark = f"The trace is no valid JSON, and was read all the same: {faults} stand where none may"
    return content, [remark] if faults else []


def _no_json(path: Path, content: bytes | bytearray, error: Exception) -> TraceError:
    """Returns the error for a text that is no JSON: cut off, or wrong at a place that it shows."""
    place = _PLACE.search(str(error))
    if not place or content.lstrip()[:1] not in (b"{", b"["):
        return TraceError(f"{path} is not JSON, or only a part of it ({error})", AGAIN)
    around = content[max(0, int(place[1]) - 30) : int(place[1]) + 20].decode(errors="replace")
    return TraceError(
        f"{path} is not JSON, or only a part of it ({error}): …{visible(around)}…",
        "If a new recording has the same fault, PyTorch writes it: set LC_ALL=C, and record without with_stack",
    )


def _pieces(array: memoryview) -> Iterator[bytes]:
    """Yields the text of an array in pieces, each up to what looks like the end of an event."""
    at, end = 1, len(array) - 1
    while at < end:
        between = _BETWEEN.search(array, at + _PIECE, end)
        until = between.end() if between else end
        yield bytes(array[at:until])
        at = until


class _Head(msgspec.Struct):
    ph: object = None
    cat: object = None
    name: object = None


#: Not strict: a number may be a text ("1") or have a point (1.0).
_one = msgspec.json.Decoder(Event, strict=False)
_many = msgspec.json.Decoder(list[Event], strict=False)


class _Events:
    """The events of a trace as they are read: those that are kept, by kind, and how many are left out."""

    def __init__(self, path: Path) -> None:
        self.numbers = Numbers()
        self._path = path
        self._kept: dict[str, list[Rows]] = defaultdict(list)
        self._left_out: Counter[str] = Counter()
        self._first_left_out: dict[str, str] = {}

    def add(self, text: bytes) -> bool:
        """Adds events from the text of several, ``{…}, {…},``; False, and none, where it ends inside of one."""
        array = b"[%b]" % text.rstrip(b", ")
        try:
            self._condense(_many.decode(array))
        except _UNREADABLE:
            try:
                each = msgspec.json.decode(array, type=list[msgspec.Raw])
            except _UNREADABLE:
                return False
            self._condense([event for one in each if (event := self._decoded(one))])
        return True

    def _decoded(self, written: msgspec.Raw) -> Event | None:
        """Returns an event; None, and counts it, where a value of it is of another type."""
        try:
            return _one.decode(written)
        except _UNREADABLE:
            try:
                head = msgspec.json.decode(written, type=_Head)
            except _UNREADABLE:
                self._leave_out("unknown", None)
            else:
                if kind := kind_of(head.ph, head.cat, head.name):
                    self._leave_out(kind, head.name)
        return None

    def finished(self) -> tuple[dict[str, Rows], list[str]]:
        """Returns the rows of each kind, and a warning for each kind of which events were left out."""
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

    def _condense(self, several: Sequence[Event]) -> None:
        """Condenses events to rows."""
        by_kind: dict[str, list[Event]] = defaultdict(list)
        for event in several:
            if kind := kind_of(event.ph, event.cat, event.name):
                by_kind[kind].append(event)
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
