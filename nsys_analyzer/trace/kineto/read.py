"""Reads a Chrome trace of PyTorch's profiler (Kineto), and returns the relevant events by kind.

A trace with a million events has 200 MB or more, and most of it is irrelevant: flow arrows, Python stacks, and
arguments of operators. So the text is decoded in pieces, and the events are reduced to a few columns.
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
    Properties,
    Rows,
    TraceCodes,
    Track,
    classify_event,
    make_collective_rows,
    make_rows,
    parse_track_id,
    read_times,
)

#: The hint for a file that is not a trace of PyTorch's profiler.
RECORD_HINT = "Record it with torch.profiler and export_chrome_trace(), or with: nsys-analyze run --profiler torch"

#: The hint for a damaged trace.
RECORD_AGAIN_HINT = "Copy it again, or record it again"

_GZIP_MAGIC = b"\x1f\x8b"
#: The approximate size of the pieces in which a trace is decoded. A piece contains a few thousand events.
_PIECE_BYTES = 1 << 20

#: The maximum ratio of a trace's size to its compressed size. Kineto's traces expand 10 to 30 times, and 50 times with
#: deep indentation. Deflate can reach 1,000.
MAX_EXPANSION = 200

#: A trace up to this size is read regardless of its compression ratio.
_ALWAYS_READ_BYTES = 64 << 20

# The JSON of profilers may contain control characters in texts, decimal commas of some locales, values such as NaN, and
# backslashes that escape nothing. Inside a JSON text, a backslash always precedes '":'.

_CONTROL_CHARACTERS = bytes(code if code >= 0x20 else 0x20 for code in range(256))
_DECIMAL_COMMA = re.compile(rb'("(?<!\\")\s*:\s*-?\d+),(\d+(?:[eE][-+]?\d+)?)(?=\s*[,}])')
_NAN_OR_INFINITY = re.compile(rb"([:\[, ])-?(?:[nN]a[nN](?:\(\w*\))?|[iI]nf(?:inity)?)(?=\s*[,\]}])")
_BACKSLASH = re.compile(rb'\\(?:["\\/bfnrt]|u[0-9a-fA-F]{4})|\\')
_BYTE_OFFSET = re.compile(r"\(byte (\d+)\)")
_EVENT_SEPARATOR = re.compile(rb"\}\s*,\s*(?=\{)")

_GPU_KINDS = ("kernel", "memcpy", "memset")
#: The prefixes of API calls that start work on a GPU. A trace may contain such calls without the GPU operations.
_LAUNCH_PREFIXES = (*CALL_PREFIXES[LAUNCH], *CALL_PREFIXES[LAUNCH_GRAPH], *CALL_PREFIXES[COPY], *CALL_PREFIXES[FILL])
_BACKWARD_NODE = re.compile(r"Backward\d*$")
_DECODE_ERRORS = (msgspec.MsgspecError, UnicodeDecodeError, RecursionError)


@dataclass(frozen=True)
class KinetoTrace:
    """The events of a trace by kind, with times in ns since the first event.

    Attributes:
        path: the file.
        properties: the properties of the trace.
        events: rows by kind: ``kernel``, ``memcpy``, ``memset``, ``runtime``, ``range``, ``operator``, ``memory``,
            ``thread``, ``overhead``, and ``collective`` for the collectives of kernels.
        texts, tracks: the texts and tracks to which the codes in the events refer.
        remarks: warnings about parts of the trace that could not be read.
        on_cpu: whether the trace contains neither GPU operations nor API calls that start some.
    """

    path: Path
    properties: Properties
    events: dict[str, Rows]
    texts: list[str]
    tracks: list[Track]
    remarks: list[str]
    on_cpu: bool

    def of(self, kind: str) -> Rows:
        """Returns the rows of the events of a kind."""
        return self.events.get(kind, np.empty(0, COLUMNS.get(kind, EVENT)))

    @property
    def operations(self) -> Rows:
        """The rows of the GPU operations: kernels, copies and memsets."""
        return np.concatenate([self.of(kind) for kind in _GPU_KINDS])


def read_kineto(path: Path) -> KinetoTrace:
    """Reads a Chrome trace of PyTorch's profiler, plain or compressed with gzip.

    Invalid events are left out, and the trace's ``remarks`` report them.

    Raises:
        TraceError: the file is missing, truncated, not JSON, a trace of another tool or of an unsupported device, or
            contains nothing to analyze.
    """
    content, remarks = _read_text(path), list[str]()
    try:
        members = _decode_members(content)
    except _DECODE_ERRORS:
        content, remarks = _repair_json(content)
        try:
            members = _decode_members(content)
        except _DECODE_ERRORS as error:
            raise _invalid_json_error(path, content, error) from error
    array = memoryview(members.pop("traceEvents", b""))
    if bytes(array[:1]) != b"[":
        raise TraceError(f"{path} is JSON, but not a trace of PyTorch's profiler: it has no traceEvents", RECORD_HINT)
    collector = _EventCollector(path)
    incomplete = b""
    for piece in _split_events(array):
        incomplete = b"" if collector.add(incomplete + piece) else incomplete + piece
    events, left_out = collector.finish()
    properties = Properties()
    remarks += left_out
    try:
        properties = msgspec.json.decode(msgspec.json.encode(members), type=Properties)
    except _DECODE_ERRORS as error:
        remarks.append(f"The trace's properties are ignored: {error}")
    reason = f": {left_out[0]}" if left_out else ""
    timed_rows = [rows for kind, rows in events.items() if kind not in ("thread", "collective")]
    if not set(events) - {"thread", "overhead"}:
        raise TraceError(f"{path} has no events of PyTorch's profiler of 1.8 or later{reason}", RECORD_HINT)
    texts = list(collector.codes.texts)
    api_names = [texts[code] for code in np.unique(events["runtime"]["name"])] if "runtime" in events else []
    on_cpu = not set(events) & set(_GPU_KINDS) and not any(name.startswith(_LAUNCH_PREFIXES) for name in api_names)
    if on_cpu and "operator" not in events:
        hint = "Record again with activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]"
        raise TraceError(f"{path} has neither operators nor kernels{reason}", hint)
    first = min(int(rows["start"].min()) for rows in timed_rows)
    for rows in timed_rows:
        rows["start"] -= first
        rows["end"] -= first
    tracks = [(parse_track_id(pid), parse_track_id(tid)) for pid, tid in collector.codes.tracks]
    return KinetoTrace(path, properties, events, texts, tracks, remarks, on_cpu)


def _read_text(path: Path) -> bytes | bytearray:
    """Returns the text of a trace as valid UTF-8. It reads in pieces, because a read of N bytes allocates N bytes."""
    content, decoder = bytearray(), getincrementaldecoder("utf-8-sig")("replace")
    try:
        if path.exists() and not path.is_file():
            raise TraceError(f"{path} is not a regular file", "Give the path of a .json or .json.gz")
        with path.open("rb") as file:
            is_compressed = file.read(len(_GZIP_MAGIC)) == _GZIP_MAGIC
            max_bytes = max(_ALWAYS_READ_BYTES, MAX_EXPANSION * file.seek(0, 2))
            file.seek(0)
            with gzip.open(file) if is_compressed else nullcontext(file) as stream:
                while (piece := stream.read(_PIECE_BYTES)) and len(content) <= max_bytes:
                    content += decoder.decode(piece.translate(_CONTROL_CHARACTERS)).encode()
                content += decoder.decode(b"", final=True).encode()
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise TraceError(f"{path} is damaged or truncated ({error})", RECORD_AGAIN_HINT) from error
    except OSError as error:
        raise TraceError(f"{path}: {error.strerror}", "Give the path of a .json or .json.gz trace") from error
    if is_compressed and len(content) > max_bytes:
        raise TraceError(
            f"{path} expands more than {MAX_EXPANSION} times, more than any recorded trace",
            f"If you trust it, unpack it and give the .json: gunzip -k {path.name}",
        )
    if not content or content.isspace():
        raise TraceError(f"{path} is empty", RECORD_HINT)
    return content


def _decode_members(content: bytes | bytearray) -> dict[str, msgspec.Raw]:
    """Returns the members of the JSON object. If the file is an array, the array is the list of events."""
    if re.match(rb"\s*\[", content):
        return {"traceEvents": msgspec.json.decode(content, type=msgspec.Raw)}
    return msgspec.json.decode(content, type=dict[str, msgspec.Raw])


def _repair_json(content: bytes | bytearray) -> tuple[bytes, list[str]]:
    """Corrects PyTorch's known JSON faults, and returns the text with a warning if the correction was a guess."""
    counts = Counter[str]()

    def escape(match: re.Match[bytes]) -> bytes:
        """Returns a valid escape sequence unchanged, and escapes a single backslash."""
        if len(match[0]) > 1:
            return match[0]
        counts["backslashes"] += 1
        return rb"\\"

    content, counts["decimal commas"] = _DECIMAL_COMMA.subn(rb"\1.\2", content)
    content = _BACKSLASH.sub(escape, _NAN_OR_INFINITY.sub(rb"\1null", content))
    faults = " and ".join(f"{count:,} {fault}" for fault, count in counts.items() if count)
    remark = f"The trace is not valid JSON and was repaired: it has {faults} in wrong places"
    return content, [remark] if faults else []


def _invalid_json_error(path: Path, content: bytes | bytearray, error: Exception) -> TraceError:
    """Returns the error for a text that is not JSON. It quotes the text around the fault if the position is known."""
    offset = _BYTE_OFFSET.search(str(error))
    if not offset or content.lstrip()[:1] not in (b"{", b"["):
        return TraceError(f"{path} is not JSON, or only a part of it ({error})", RECORD_AGAIN_HINT)
    excerpt = content[max(0, int(offset[1]) - 30) : int(offset[1]) + 20].decode(errors="replace")
    return TraceError(
        f"{path} is not JSON, or only a part of it ({error}): …{visible(excerpt)}…",
        "If a new recording has the same fault, PyTorch causes it: set LC_ALL=C, and record without with_stack",
    )


def _split_events(array: memoryview) -> Iterator[bytes]:
    """Yields the text of an array in pieces, each of which probably ends at the end of an event."""
    start, end = 1, len(array) - 1
    while start < end:
        separator = _EVENT_SEPARATOR.search(array, start + _PIECE_BYTES, end)
        piece_end = separator.end() if separator else end
        yield bytes(array[start:piece_end])
        start = piece_end


class _EventHead(msgspec.Struct):
    """The fields of an event that decide its kind, of any type."""

    ph: object = None
    cat: object = None
    name: object = None


#: The decoders are not strict, because PyTorch may write an integer as a text ("1") or with a decimal point (1.0).
_event_decoder = msgspec.json.Decoder(Event, strict=False)
_events_decoder = msgspec.json.Decoder(list[Event], strict=False)


class _EventCollector:
    """Collects the rows of a trace's events by kind, and counts the invalid events that are left out."""

    def __init__(self, path: Path) -> None:
        self.codes = TraceCodes()
        self._path = path
        self._rows: dict[str, list[Rows]] = defaultdict(list)
        self._left_out: Counter[str] = Counter()
        self._first_left_out: dict[str, str] = {}

    def add(self, text: bytes) -> bool:
        """Adds the events of a text ``{…}, {…},``; returns False and adds none if the text ends inside an event."""
        array = b"[%b]" % text.rstrip(b", ")
        try:
            self._add_rows(_events_decoder.decode(array))
        except _DECODE_ERRORS:
            try:
                raw_events = msgspec.json.decode(array, type=list[msgspec.Raw])
            except _DECODE_ERRORS:
                return False
            self._add_rows([event for raw in raw_events if (event := self._decode_event(raw))])
        return True

    def _decode_event(self, raw: msgspec.Raw) -> Event | None:
        """Decodes an event. Returns None, and counts the event as left out, if one of its values has a wrong type."""
        try:
            return _event_decoder.decode(raw)
        except _DECODE_ERRORS:
            try:
                head = msgspec.json.decode(raw, type=_EventHead)
            except _DECODE_ERRORS:
                self._leave_out("unknown", None)
            else:
                if kind := classify_event(head.ph, head.cat, head.name):
                    self._leave_out(kind, head.name)
        return None

    def finish(self) -> tuple[dict[str, Rows], list[str]]:
        """Returns the rows of each kind, and a warning for each kind with events that were left out."""
        events = {kind: np.concatenate(self._rows.pop(kind)) for kind in tuple(self._rows)}
        remarks = [
            f"Left out: {count:,} of {count + len(events.get(kind, ())):,} events of the kind {kind}, which have no "
            f"time or invalid values; the first is {self._first_left_out[kind]}"
            for kind, count in self._left_out.items()
        ]
        if OLD_OPERATOR in events:
            self._separate_old_operators(events)
        return events, remarks

    def _leave_out(self, kind: str, name: object, count: int = 1) -> None:
        """Counts events of a kind that are left out. ``name`` is the name of the first one."""
        self._first_left_out.setdefault(kind, f'"{visible(name[:60])}"' if isinstance(name, str) else "without a name")
        self._left_out[kind] += count

    def _add_rows(self, new_events: Sequence[Event]) -> None:
        """Adds the rows of events with valid times, and counts the other events as left out."""
        by_kind: dict[str, list[Event]] = defaultdict(list)
        for event in new_events:
            if kind := classify_event(event.ph, event.cat, event.name):
                by_kind[kind].append(event)
        for kind, events in by_kind.items():
            if kind == OTHER_DEVICE:
                hint = "Supported are traces of NVIDIA's and AMD's GPUs, and of CPUs"
                raise TraceError(f"{self._path} is from an unsupported device ({events[0].cat})", hint)
            starts, ends, are_timed = read_times(kind, events)
            if not are_timed.all():
                self._leave_out(kind, events[int(are_timed.argmin())].name, int((~are_timed).sum()))
                events = list(compress(events, are_timed.tolist()))
            rows = make_rows(kind, events, self.codes)
            rows["start"], rows["end"] = starts[are_timed], ends[are_timed]
            if kind == "kernel" and len(collectives := make_collective_rows(rows, events, self.codes)):
                self._rows["collective"].append(collectives)
            if len(rows):
                self._rows[kind].append(rows)

    def _separate_old_operators(self, events: dict[str, Rows]) -> None:
        """Replaces the rows of the kind ``OLD_OPERATOR`` by operators and ranges, which their names tell apart."""
        rows, texts = events.pop(OLD_OPERATOR), list(self.codes.texts)
        code_of = {texts[code]: code for code in np.unique(rows["name"]).tolist()}
        operators = [
            code
            for name, code in code_of.items()
            if "::" in name or f"aten::{name}" in code_of or _BACKWARD_NODE.search(name)
        ]
        is_operator_event = np.isin(rows["name"], operators)
        for kind, separated in (("operator", rows[is_operator_event]), ("range", rows[~is_operator_event])):
            if len(separated):
                columns = COLUMNS.get(kind, EVENT)
                rows_before = events.get(kind, np.empty(0, columns))
                events[kind] = np.concatenate([rows_before, separated[list(columns.names or ())].astype(columns)])
