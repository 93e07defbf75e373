"""An event as a PyTorch profiler writes it: which are kept, as what, and which are refused."""

from __future__ import annotations

from collections import defaultdict
from decimal import Decimal
from typing import Any

import msgspec

from nsys_analyzer.capture.kineto_arguments import ArgumentReader, OfCall, OfMemory, OfThread, OnGpu
from nsys_analyzer.capture.kineto_events import Allocation, Call, Event, GpuOperation, Name, ThreadName
from nsys_analyzer.capture.kineto_left_out import BadEventError, LeftOut, reason
from nsys_analyzer.capture.kineto_legacy import ARROW, LEGACY_ON_GPU, UNSORTED, is_arrow, legacy_kind

ON_MTIA = "MTIA"
"""The kind of what ran on an MTIA, before it is told whether it is a kernel or a copy."""

GPU_RANGE = "gpu range"
"""The kind of a range as Kineto draws it on the GPU's timeline."""

#: What Kineto calls the kinds of event that are kept (``libkineto::ActivityType``); the capitalised names are those of
#: PyTorch before 1.11, which calls a range of ``record_function`` an "Operator", too. Waits (``cuda_sync``), the
#: profiler's own work (``overhead``), counters and Python functions are not kept.
_KINDS = {
    "kernel": "kernel",
    "Kernel": "kernel",
    "gpu_memcpy": "memcpy",
    "Memcpy": "memcpy",
    "gpu_memset": "memset",
    "Memset": "memset",
    "cuda_runtime": "runtime",
    "cuda_driver": "runtime",
    "Runtime": "runtime",
    "xpu_runtime": "runtime",
    "xpu_driver": "runtime",
    "privateuse1_runtime": "runtime",
    "privateuse1_driver": "runtime",
    "glow_runtime": "runtime",
    "hpu_op": "runtime",
    "mtia_runtime": "runtime",
    "mtia_ccp_events": ON_MTIA,
    "user_annotation": "range",
    "gpu_user_annotation": GPU_RANGE,
    "cpu_op": "operator",
    "Operator": UNSORTED,
}
_ANYTHING = "any"
"""The kind of what cannot be told to be of one."""

_Place = tuple[str, str, Name, Name]

_FARTHEST_US = Decimal(2**62) / 1000
_LONGEST_NS = 24 * 3600 * 10**9
"""A day: no recording takes one."""


class _Written(msgspec.Struct):
    """An event of any kind."""

    ph: str | None = None
    cat: str | None = None
    name: str | None = None
    pid: Name | None = None
    tid: Name | None = None
    ts: Decimal | None = None
    dur: Decimal | None = None
    id: msgspec.Raw = msgspec.Raw(b"null")  # of use in arrows alone; elsewhere it may be anything
    args: msgspec.Raw = msgspec.Raw(b"{}")


_on_gpu = ArgumentReader(OnGpu)
_of_call = ArgumentReader(OfCall)
_of_memory = ArgumentReader(OfMemory)
_of_thread = ArgumentReader(OfThread)
_name = msgspec.json.Decoder(Name)
_one = msgspec.json.Decoder(_Written, strict=False)  # a process or thread may be 1.0
_many = msgspec.json.Decoder(list[_Written])
_encode = msgspec.json.Encoder(decimal_format="number").encode
_WITH_ARGUMENTS = ("kernel", "memcpy", "memset", "runtime", "memory", "thread", ON_MTIA)


class Events:
    """The events of a trace as they are read: those that are kept, by kind, and those left out.

    Attributes:
        found: the events of each kind, times in ns as they are written.
        left_out: those that cannot be what they say.
        any_phase: whether anything had a "ph", as every event of a Chrome trace has.

    """

    def __init__(self) -> None:
        self.found: dict[str, list[Event]] = defaultdict(list)
        self.left_out = LeftOut()
        self.any_phase = False
        self._known: dict[Any, Any] = {}  # one copy of each name and ID: most occur thousands of times

    def add_all(self, text: str) -> bool:
        """Add events from the text of some, ``{…}, {…}``; False, and none added, where one of them needs a closer look.

        One that cannot be read hides the others: then each is to be given to :meth:`add`.
        """
        try:
            events = _many.decode(f"[{text}]")
        except (msgspec.MsgspecError, UnicodeEncodeError, RecursionError):
            return False
        for event in events:
            self._add(event)
        return True

    def add(self, value: Any) -> None:
        """Add an event from the value of its JSON, or count it among those left out."""
        if not isinstance(value, dict):
            self.leave_out("no object")
            return
        name = value.get("name")
        kind = _kind(*(value.get(key) for key in ("ph", "cat", "name", "pid")))
        if kind is None:
            self.any_phase = self.any_phase or value.get("ph") is not None
            return
        wanted = {key: value[key] for key in _Written.__struct_fields__ if key in value}
        if kind not in _WITH_ARGUMENTS:
            wanted.pop("args", None)
        try:
            event = _one.decode(_encode(wanted))
        except (msgspec.MsgspecError, UnicodeEncodeError, RecursionError) as error:
            self.left_out.add(kind, reason(error), name)
        else:
            self._add(event)

    def leave_out(self, why: str) -> None:
        """Count an event of which nothing is known, not even the kind, among those left out."""
        self.left_out.add(_ANYTHING, why, None)

    def _add(self, written: _Written) -> None:
        self.any_phase = self.any_phase or written.ph is not None
        kind = _kind(written.ph, written.cat, written.name, written.pid)
        if kind is None:
            return
        unreadable: list[str] = []
        try:
            event = self._event(kind, written, unreadable)
        except (BadEventError, msgspec.ValidationError) as error:
            self.left_out.add(kind, reason(error), written.name)
        else:
            self.found[kind].append(event)
            for argument in unreadable:
                self.left_out.add_argument(kind, argument)

    def _event(self, kind: str, written: _Written, unreadable: list[str]) -> Event:
        """The event that is kept; the names of its arguments that cannot be read join ``unreadable``.

        Raises:
            BadEventError, msgspec.ValidationError: it cannot be what it says.
        """
        if kind == "thread":
            return ThreadName(*self._place(kind, written), 0, 0, _of_thread.read(written.args, unreadable).name)
        start = _nanoseconds(written.ts, "time")
        if kind == "memory":
            return _allocation(self._place(kind, written), start, written.args, unreadable)
        if kind == ARROW:
            return Call(*self._place(kind, written), start, start, _arrow(written.id) + 1)  # 0 is no correlation
        length = _nanoseconds(written.dur, "duration")
        if not 0 <= length <= _LONGEST_NS:
            raise BadEventError("a negative duration" if length < 0 else "a duration of more than a day")
        place = self._place(kind, written)
        if kind in ("kernel", "memcpy", "memset", ON_MTIA):
            return _operation(place, start, start + length, written.args, unreadable)
        if kind == "runtime":
            return Call(*place, start, start + length, _of_call.read(written.args, unreadable).correlation)
        if kind in (GPU_RANGE, LEGACY_ON_GPU):
            _number(written.tid)  # a stream, or a device
        return Event(*place, start, start + length)

    def _place(self, kind: str, written: _Written) -> _Place:
        """The kind, name, process and thread of an event."""
        name, pid, tid = written.name, written.pid, written.tid
        if name is None or pid is None or tid is None:
            raise BadEventError(f"no {'name' if name is None else 'pid' if pid is None else 'tid'}")
        known = self._known
        return kind, known.setdefault(name, name), known.setdefault(pid, pid), known.setdefault(tid, tid)


def _kind(phase: Any, category: Any, name: Any, process: Any) -> str | None:
    """The kind of an event, None where it is of no use; flow arrows, Python functions and counters are of none."""
    if phase is None:
        return None
    if not isinstance(phase, str) or not isinstance(category, str | None):
        return _ANYTHING
    if phase == "X":
        return _KINDS.get(category) if category is not None else legacy_kind(process)
    if phase == "i" and name == "[memory]":
        return "memory"
    if phase == "M" and name == "thread_name":
        return "thread"
    return ARROW if is_arrow(phase, category) else None


def _operation(place: _Place, start: int, end: int, arguments: msgspec.Raw, unreadable: list[str]) -> GpuOperation:
    """What ran on a GPU; its process is the device and its thread the stream, where the arguments say nothing else."""
    told = _on_gpu.read(arguments, unreadable)
    device, context, stream = told.device, told.context, told.stream
    if device is None:
        device = told.in_device if told.in_device is not None else _ordinal(place[2])
    return GpuOperation(
        *place,
        start,
        end,
        told.correlation,
        device,
        _number(place[3]) if stream is None else stream,
        (told.in_context or 0) if context is None else context,
        (told.size or 0) if told.bytes is None else told.bytes,
        told.graph_node or None,
        told.direction,
    )


def _allocation(place: _Place, start: int, arguments: msgspec.Raw, unreadable: list[str]) -> Allocation:
    told = _of_memory.read(arguments, unreadable)
    device = told.device if told.device_type else None
    return Allocation(*place, start, start, told.size, told.address, device, told.reserved, told.allocated)


def _ordinal(process: Name) -> int:
    """The device that stands where the process belongs; 0 where it is a text."""
    if isinstance(process, str):
        return 0
    if not 0 <= process < 2**31:
        raise BadEventError("no device")
    return process


def _arrow(written: msgspec.Raw) -> int:
    """The number of an arrow."""
    try:
        return _number(_name.decode(written))
    except msgspec.ValidationError as error:
        raise BadEventError(reason(error, "id")) from error


def _number(told: Name | None) -> int:
    if not isinstance(told, int) or not -(2**62) < told < 2**62:
        raise BadEventError("a text, or nothing, where a number belongs")
    return told


def _nanoseconds(microseconds: Decimal | None, what: str) -> int:
    if microseconds is None:
        raise BadEventError(f"no {what}")
    if not microseconds.is_finite() or not -_FARTHEST_US < microseconds < _FARTHEST_US:
        raise BadEventError(f"an impossible {what}")
    return round(microseconds * 1000)
