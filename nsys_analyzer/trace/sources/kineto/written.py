"""An event as a PyTorch profiler writes it: which are kept, as what, and which are refused."""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Callable
from decimal import Decimal
from typing import Any

import msgspec

from nsys_analyzer.text import visible
from nsys_analyzer.trace.phase_names import MODULE_CALL
from nsys_analyzer.trace.sources.kineto.events import (
    Allocation,
    Call,
    Event,
    GpuOperation,
    Int32,
    Int64,
    Name,
    Operator,
    Properties,
    Size,
)
from nsys_analyzer.trace.sources.kineto.legacy import ARROW, LEGACY_ON_CPU, LEGACY_ON_GPU, is_arrow, legacy_kind

GPU_RANGE = "gpu range"
"""The kind of a range that Kineto draws on the GPU's timeline."""

_ON_MTIA = "MTIA"
#: What an MTIA does for its queues beside running kernels and moving data.
_MTIA_QUEUE = ("event_record", "event_wait")

#: What Kineto calls the kinds of event that are kept (``libkineto::ActivityType``). Waits (``cuda_sync``), the
#: profiler's own work (``overhead``), counters and Python functions are not kept, but for calls of modules.
_CATEGORIES = {
    "kernel": "kernel",
    "memcpy": "gpu_memcpy",
    "memset": "gpu_memset",
    "runtime": "cuda_runtime cuda_driver xpu_runtime xpu_driver privateuse1_runtime privateuse1_driver"
    " glow_runtime hpu_op mtia_runtime",
    _ON_MTIA: "mtia_ccp_events",
    "range": "user_annotation",
    GPU_RANGE: "gpu_user_annotation",
    "operator": "cpu_op",
}
_KINDS = {category: kind for kind, categories in _CATEGORIES.items() for category in categories.split()}
_UNKNOWN = "any"
"""The kind of an event whose kind cannot be read."""

_OPERATORS = ("operator", LEGACY_ON_CPU)
_ON_A_GPU = ("kernel", "memcpy", "memset", _ON_MTIA)
_WITHOUT_DURATION = ("memory", "thread", ARROW)
_FARTHEST_US = Decimal(2**61) / 1000  # the difference of two such times, and a duration more, fit into 64 bits
_FARTHEST_BACK_US = -_FARTHEST_US

_AT = re.compile(r" - at `\$\.(?P<place>.*)`$")
_LONGEST_NAME = 60


class _Arguments(
    msgspec.Struct,
    gc=False,
    rename={
        "in_device": "inDevice",
        "graph_node": "graph node id",
        "device_type": "Device Type",
        "memory_device": "Device Id",
        "size": "Bytes",
        "allocated": "Total Allocated",
        "sequence": "Sequence number",
        "forward_thread": "Fwd thread id",
        "shapes": "Input Dims",
    },
):
    """The arguments that are of use: of GPU operations and API calls, memory (capital letters), threads, operators."""

    correlation: Int64 | None = None
    device: Int32 | None = None
    in_device: Int32 | None = None  # of a copy between GPUs
    stream: Int64 | str | None = None  # AMD's calls have an address
    graph_node: Int64 | None = None
    bytes: Size | None = None
    direction: str | None = None  # of a copy of an MTIA
    device_type: Int64 = 0  # c10::DeviceType: 0 is the CPU
    memory_device: Int32 = 0
    size: Int64 = 0
    allocated: Int64 | None = None
    name: str = ""
    sequence: Int64 = -1
    forward_thread: Int32 = 0
    shapes: msgspec.Raw = msgspec.Raw()  # as it is written: a few hundred texts serve all operators


#: The arguments that an event can do without: where one cannot be read, it is as if it were not there.
_OF_GPU = ("device", "inDevice", "stream", "graph node id", "bytes", "direction")
_OPTIONAL = (*_OF_GPU, "Total Allocated", "Sequence number", "Fwd thread id", "Input Dims")
#: The arguments that each kind of event uses.
_USED = {
    **dict.fromkeys(_ON_A_GPU, ("correlation", *_OF_GPU)),
    "runtime": ("correlation",),
    "memory": ("Device Type", "Device Id", "Bytes", "Total Allocated"),
    "thread": ("name",),
    "operator": ("Sequence number", "Fwd thread id", "Input Dims"),
}
#: The sizes of tensors, or of lists of tensors; anything else is none.
_SHAPES = re.compile(r"\[(?:\[[\d\[\], ]*\])?\]")


class _Written(msgspec.Struct):
    """An event of any kind."""

    ph: str | None = None
    cat: str | None = None
    name: str | None = None
    pid: Name | None = None
    tid: Name | None = None
    ts: Decimal | None = None
    dur: Decimal | None = None
    id: Name | None = None
    args: _Arguments | None = None


_NO_ARGUMENTS = _Arguments()
#: Not strict: a number may be a text ("1") or have a point (1.0).
_one = msgspec.json.Decoder(_Written, strict=False)
_many = msgspec.json.Decoder(list[_Written], strict=False)
_arguments = msgspec.json.Decoder(_Arguments, strict=False)
_encode = msgspec.json.Encoder(decimal_format="number").encode
_UNREADABLE = (msgspec.MsgspecError, UnicodeEncodeError, RecursionError)


class BadEventError(Exception):
    """An event that cannot be what it says; its text is the reason."""


class Events:
    """The events of a trace as they are read: those that are kept, by kind, and those left out.

    ``any_phase`` is whether anything had a "ph", as every event of a Chrome trace has.
    """

    def __init__(self) -> None:
        self.found: dict[str, list[Any]] = defaultdict(list)
        self.any_phase = self.on_mtia = False
        self._known: dict[Any, Any] = {}  # one copy of each name and ID: most occur thousands of times
        self._shapes = {"": ""}  # as they are written, and as they are kept
        self._refused: dict[str, Counter[str]] = defaultdict(Counter)
        self._first_refused: dict[str, str] = {}
        self._unread: Counter[tuple[str, str]] = Counter()

    def add_all(self, text: str) -> bool:
        """Adds events from the text of several, ``{…}, {…}``; False, and none, where :meth:`add` must take each."""
        try:
            events = _many.decode(f"[{text}]")
        except _UNREADABLE:
            return False
        for event in events:
            self._add(event)
        return True

    def add(self, value: Any) -> None:
        """Adds an event from the value of its JSON, or counts it among those left out."""
        if not isinstance(value, dict):
            self._refuse(_UNKNOWN, "no object", None)
            return
        kind = _kind(*(value.get(key) for key in ("ph", "cat", "name", "pid")))
        if kind is None:
            self.any_phase = self.any_phase or value.get("ph") is not None
            return
        used = {key: value[key] for key in _Written.__struct_fields__ if key in value}
        if kind not in _USED or (kind == "operator" and not isinstance(used.get("args"), dict)):
            used.pop("args", None)
        elif isinstance(used.get("args"), dict):
            used["args"] = self._readable(kind, used["args"])
        if kind != ARROW:
            used.pop("id", None)
        try:
            event = _one.decode(_encode(used))
        except _UNREADABLE as error:
            self._refuse(kind, _reason(error), value.get("name"))
        else:
            self._add(event)

    def _readable(self, kind: str, arguments: dict[str, Any]) -> dict[str, Any]:
        """The arguments that a kind of event uses, without the optional ones that cannot be read."""
        used = {key: arguments[key] for key in _USED[kind] if arguments.get(key) is not None}
        for key in used.keys() & _OPTIONAL:
            try:
                _arguments.decode(_encode({key: used[key]}))
            except _UNREADABLE:
                del used[key]
                self._unread[kind, key] += 1
        return used

    def leave_out(self, is_bad: Callable[[Event], bool], why: str) -> None:
        """Takes out the events for which ``is_bad`` holds, and counts them."""
        for kind in [kind for kind in self.found if kind != "thread"]:
            for event in filter(is_bad, self.found[kind]):
                self._refuse(kind, why, event.name)
            self.found[kind] = [event for event in self.found[kind] if not is_bad(event)]
            if not self.found[kind]:
                del self.found[kind]

    def remarks(self) -> list[str]:
        """A warning for each kind of which events were left out, and for each argument that could not be read."""
        unread = (
            f"{count:,} events of the kind {kind} have a `{key}` that cannot be read"
            for (kind, key), count in self._unread.items()
        )
        return [*(self._remark(kind, reasons) for kind, reasons in self._refused.items()), *unread]

    def _remark(self, kind: str, reasons: Counter[str]) -> str:
        count = reasons.total()
        why = ", ".join(f"{text} ({times:,})" for text, times in reasons.most_common())
        return (
            f"Left out: {count:,} of {count + len(self.found.get(kind, ())):,} events of the kind {kind}, "
            f"which cannot be what the trace says: {why}; the first is {self._first_refused[kind]}"
        )

    def _refuse(self, kind: str, why: str, name: object) -> None:
        self._first_refused.setdefault(kind, _shown(name))
        self._refused[kind][why] += 1

    def _add(self, written: _Written) -> None:
        self.any_phase = self.any_phase or written.ph is not None
        kind = _kind(written.ph, written.cat, written.name, written.pid)
        if kind is None:
            return
        try:
            event = self._event(kind, written)
        except BadEventError as error:
            self._refuse(kind, str(error), written.name)
        else:
            if kind == _ON_MTIA:
                self.on_mtia = True
                if event.name in _MTIA_QUEUE:
                    return
            self.found[event.kind].append(event)

    def _event(self, kind: str, written: _Written) -> Event:
        name, pid, tid = self._place(written)
        start = end = 0 if kind == "thread" else _nanoseconds(written.ts, "time")
        if kind not in _WITHOUT_DURATION:
            end += _nanoseconds(written.dur, "duration")
        if end < start:
            raise BadEventError("a negative duration")
        args = written.args or _NO_ARGUMENTS
        if kind in _OPERATORS:
            shapes = self._shapes_of(args.shapes)
            return Operator(kind, name, pid, tid, start, end, args.sequence, args.forward_thread, shapes)
        if kind == "thread":
            return Event(kind, args.name, pid, tid, start, end)
        if kind == "memory":
            device = args.memory_device if args.device_type else None
            return Allocation(kind, name, pid, tid, start, end, args.size, device, args.allocated)
        if kind == ARROW:
            return Call(kind, name, pid, tid, start, end, _number(written.id) + 1)  # 0 is no correlation
        if kind == "runtime":
            return Call(kind, name, pid, tid, start, end, args.correlation or 0)
        if kind in _ON_A_GPU:
            if kind == _ON_MTIA:
                kind = "kernel" if args.direction is None else "memcpy"
            place = (args.correlation or 0, _device(args, pid), self._stream(kind, args.stream, tid))
            return GpuOperation(kind, name, pid, tid, start, end, *place, args.graph_node or None, args.bytes or 0)
        if kind in (GPU_RANGE, LEGACY_ON_GPU):
            _number(tid)  # a stream, or a device
        return Event(kind, name, pid, tid, start, end)

    def _shapes_of(self, written: msgspec.Raw) -> str:
        """The sizes of an operator's inputs on one line, one copy of each text; empty where there are none."""
        text = str(written, "utf-8")
        if (known := self._shapes.get(text)) is None:
            line = "".join(text.split()).replace(",", ", ")
            known = self._shapes[text] = line if _SHAPES.fullmatch(line) else ""
        return known

    def _stream(self, kind: str, told: int | str | None, tid: Name) -> int:
        """The stream of a GPU operation; where no argument says it, the number in the thread's place."""
        if isinstance(told, str) and not told.isdecimal():
            self._unread[kind, "stream"] += 1
            told = None
        return _number(tid) if told is None else int(told)

    def _place(self, written: _Written) -> tuple[str, Name, Name]:
        """The name, process and thread of an event."""
        name, pid, tid = written.name, written.pid, written.tid
        if name is None or pid is None or tid is None:
            raise BadEventError(f"no {'name' if name is None else 'pid' if pid is None else 'tid'}")
        known = self._known
        return known.setdefault(name, name), known.setdefault(pid, pid), known.setdefault(tid, tid)


def _kind(phase: Any, category: Any, name: Any, process: Any) -> str | None:
    """The kind of an event, None where it is not used, as flow arrows, Python functions and counters are not."""
    if phase is None:
        return None
    if not isinstance(phase, str) or not (category is None or isinstance(category, str)):
        return _UNKNOWN
    if phase == "X":
        if category is None:
            return legacy_kind(process)
        return _KINDS.get(category) or ("range" if _is_module_call(category, name) else None)
    if phase == "i" and name == "[memory]":
        return "memory"
    if phase == "M" and name == "thread_name":
        return "thread"
    return ARROW if is_arrow(phase, category) else None


def _is_module_call(category: str, name: Any) -> bool:
    """Whether an event is the call of a module, as the profiler's tracer of Python saw it."""
    return category == "python_function" and isinstance(name, str) and name.startswith(MODULE_CALL)


def _device(args: _Arguments, process: Name) -> int:
    """The device of a GPU operation; where no argument says it, the number in the process's place, 0 for a text."""
    if args.device is not None:
        return args.device
    if args.in_device is not None:
        return args.in_device
    if isinstance(process, str):
        return 0
    if not 0 <= process < 2**31:
        raise BadEventError("no device")
    return process


def _number(value: Name | None) -> int:
    if not isinstance(value, int) or not -(2**62) < value < 2**62:
        raise BadEventError("a text, or nothing, where a number belongs")
    return value


def _nanoseconds(microseconds: Decimal | None, what: str) -> int:
    if microseconds is None:
        raise BadEventError(f"no {what}")
    if not microseconds.is_finite() or not _FARTHEST_BACK_US < microseconds < _FARTHEST_US:
        raise BadEventError(f"an impossible {what}")
    return round(microseconds * 1000)


def _reason(error: Exception) -> str:
    """Why a value was refused, in a few words: "args.correlation: expected int, got str"."""
    if isinstance(error, UnicodeEncodeError):
        return "a text that is no Unicode"
    if isinstance(error, RecursionError):
        return "nested too deep"
    place, what = _AT.search(str(error)), _AT.sub("", str(error)).replace("`", "")
    return f"{place['place']}: {what[:1].lower()}{what[1:]}" if place else what


def _shown(name: object) -> str:
    """A name on one line and not too long."""
    if not isinstance(name, str):
        return "without a name"
    text = visible(name[:_LONGEST_NAME])
    return f'"{text}"' if len(name) <= _LONGEST_NAME else f'"{text}…"'


def read_properties(written: dict[str, Any]) -> tuple[Properties, list[str]]:
    """The properties of a trace, and a warning for each that cannot be what it should."""
    properties, remarks = Properties(), []
    for name, key in zip(Properties.__struct_fields__, Properties.__struct_encode_fields__, strict=True):
        if written.get(key) is not None:
            try:
                one = msgspec.json.decode(msgspec.json.encode({key: written[key]}), type=Properties)
            except _UNREADABLE as error:
                remarks.append(f"The trace's {key} is ignored: {_reason(error)}")
            else:
                setattr(properties, name, getattr(one, name))
    return properties, remarks
