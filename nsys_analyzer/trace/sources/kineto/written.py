"""An event as a PyTorch profiler writes it: which are kept, as what, and which are refused."""

from __future__ import annotations

from collections import defaultdict
from decimal import Decimal
from typing import Any, Generic, TypeVar

import msgspec

from nsys_analyzer.trace.sources.kineto.events import (
    Allocation,
    Call,
    Event,
    GpuOperation,
    Int32,
    Int64,
    Name,
    Size,
    ThreadName,
)
from nsys_analyzer.trace.sources.kineto.legacy import ARROW, LEGACY_ON_GPU, UNSORTED, is_arrow, legacy_kind
from nsys_analyzer.trace.sources.kineto.refused import BadEventError, RefusedEvents, reason

ON_MTIA = "MTIA"
"""The kind of what ran on an MTIA, before it is told whether it is a kernel or a copy."""

GPU_RANGE = "gpu range"
"""The kind of a range as Kineto draws it on the GPU's timeline."""

#: What Kineto calls the kinds of event that are kept (``libkineto::ActivityType``); the capitalised names are those of
#: PyTorch before 1.11, which calls a range of ``record_function`` an "Operator", too. Waits (``cuda_sync``), the
#: profiler's own work (``overhead``), counters and Python functions are not kept.
_CATEGORIES = {
    "kernel": "kernel Kernel",
    "memcpy": "gpu_memcpy Memcpy",
    "memset": "gpu_memset Memset",
    "runtime": "cuda_runtime cuda_driver Runtime xpu_runtime xpu_driver privateuse1_runtime privateuse1_driver"
    " glow_runtime hpu_op mtia_runtime",
    ON_MTIA: "mtia_ccp_events",
    "range": "user_annotation",
    GPU_RANGE: "gpu_user_annotation",
    "operator": "cpu_op",
    UNSORTED: "Operator",
}
_KINDS = {category: kind for kind, categories in _CATEGORIES.items() for category in categories.split()}
_ANYTHING = "any"
"""The kind of what cannot be told to be of one."""

_FARTHEST_US = Decimal(2**62) / 1000
_LONGEST_NS = 24 * 3600 * 10**9
"""A day: no recording takes one."""

_NULL = msgspec.Raw(b"null")


class _Written(msgspec.Struct):
    """An event of any kind."""

    ph: str | None = None
    cat: str | None = None
    name: str | None = None
    pid: Name | None = None
    tid: Name | None = None
    ts: Decimal | None = None
    dur: Decimal | None = None
    id: msgspec.Raw = _NULL  # of use in arrows alone; elsewhere it may be anything
    args: msgspec.Raw = msgspec.Raw(b"{}")


class _CallArguments(msgspec.Struct, gc=False):
    correlation: Int64 = 0


class _GpuArguments(msgspec.Struct, gc=False, rename={"in_device": "inDevice", "in_context": "inContext"}):
    """The arguments of a GPU operation; those of a copy between GPUs may say ``in`` which it was made."""

    correlation: Int64 = 0
    device: Int32 | None = None
    in_device: Int32 | None = None
    context: Int64 | None = None
    in_context: Int64 | None = None
    stream: Int64 | None = None
    bytes: Size | None = None
    size: Size | None = None
    graph_node: Int64 | None = msgspec.field(name="graph node id", default=None)
    direction: str | None = None


class _MemoryArguments(msgspec.Struct, gc=False):
    device_type: Int64 = msgspec.field(name="Device Type", default=0)  # c10::DeviceType: 0 is the CPU
    device: Int32 = msgspec.field(name="Device Id", default=0)
    size: Int64 = msgspec.field(name="Bytes", default=0)
    address: Int64 = msgspec.field(name="Addr", default=0)
    reserved: Int64 | None = msgspec.field(name="Total Reserved", default=None)
    allocated: Int64 | None = msgspec.field(name="Total Allocated", default=None)


class _ThreadArguments(msgspec.Struct, gc=False):
    name: str = ""


_Form = TypeVar("_Form", bound=msgspec.Struct)


class _ArgumentReader(Generic[_Form]):
    """Reads the arguments of one kind of event, each as far as it can be what its name says.

    Those that the event can do without have None for a default. A null is as good as none.
    """

    _by_name = msgspec.json.Decoder(dict[str, msgspec.Raw])

    def __init__(self, form: type[_Form]) -> None:
        self._form = form
        self._decoder = msgspec.json.Decoder(form)
        self._fields = [
            (field.name, field.encode_name, field.default is None, msgspec.json.Decoder(field.type, strict=False))
            for field in msgspec.structs.fields(form)
        ]

    def read(self, written: msgspec.Raw, unreadable: list[str]) -> _Form:
        """The arguments; the names of those that cannot be read, and are left out, are added to ``unreadable``.

        Raises:
            BadEventError: one without which the event says nothing cannot be read.
            msgspec.ValidationError: they are no object.
        """
        try:
            return self._decoder.decode(written)
        except msgspec.ValidationError:
            return self._one_by_one({} if written == _NULL else self._by_name.decode(written), unreadable)

    def _one_by_one(self, written: dict[str, msgspec.Raw], unreadable: list[str]) -> _Form:
        """The arguments where one has another form: numbers may be texts ("1") or have a point (1.0)."""
        found = {}
        for name, key, is_optional, decoder in self._fields:
            if written.get(key, _NULL) == _NULL:
                continue
            try:
                found[name] = decoder.decode(written[key])
            except msgspec.ValidationError as error:
                if not is_optional:
                    raise BadEventError(reason(error, key)) from error
                unreadable.append(key)
        return self._form(**found)


_call_arguments = _ArgumentReader(_CallArguments)
_gpu_arguments = _ArgumentReader(_GpuArguments)
_memory_arguments = _ArgumentReader(_MemoryArguments)
_thread_arguments = _ArgumentReader(_ThreadArguments)
_name = msgspec.json.Decoder(Name)
_one = msgspec.json.Decoder(_Written, strict=False)  # a process or thread may be 1.0
_many = msgspec.json.Decoder(list[_Written])
_encode = msgspec.json.Encoder(decimal_format="number").encode
_WITH_ARGUMENTS = ("kernel", "memcpy", "memset", "runtime", "memory", "thread", ON_MTIA)


class Events:
    """The events of a trace as they are read: those that are kept, by kind, and those left out.

    Attributes:
        found: the events of each kind, times in ns as they are written.
        refused: those that cannot be what they say.
        any_phase: whether anything had a "ph", as every event of a Chrome trace has.
    """

    def __init__(self) -> None:
        self.found: dict[str, list[Any]] = defaultdict(list)
        self.refused = RefusedEvents()
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
            self.refused.add(kind, reason(error), value.get("name"))
        else:
            self._add(event)

    def leave_out(self, why: str) -> None:
        """Count an event of which nothing is known, not even the kind, among those left out."""
        self.refused.add(_ANYTHING, why, None)

    def _add(self, written: _Written) -> None:
        self.any_phase = self.any_phase or written.ph is not None
        kind = _kind(written.ph, written.cat, written.name, written.pid)
        if kind is None:
            return
        unreadable: list[str] = []
        try:
            event = self._event(kind, written, unreadable)
        except (BadEventError, msgspec.ValidationError) as error:
            self.refused.add(kind, reason(error), written.name)
        else:
            self.found[kind].append(event)
            for argument in unreadable:
                self.refused.add_argument(kind, argument)

    def _event(self, kind: str, written: _Written, unreadable: list[str]) -> Event:
        """The event that is kept; the names of its arguments that cannot be read are added to ``unreadable``.

        Raises:
            BadEventError, msgspec.ValidationError: it cannot be what it says.
        """
        start = 0 if kind == "thread" else _nanoseconds(written.ts, "time")
        length = 0 if kind in ("thread", "memory", ARROW) else _nanoseconds(written.dur, "duration")
        if not 0 <= length <= _LONGEST_NS:
            raise BadEventError("a negative duration" if length < 0 else "a duration of more than a day")
        event = (kind, *self._place(written), start, start + length)
        if kind == "thread":
            return ThreadName(*event, _thread_arguments.read(written.args, unreadable).name)
        if kind == "memory":
            told = _memory_arguments.read(written.args, unreadable)
            device = told.device if told.device_type else None
            return Allocation(*event, told.size, told.address, device, told.reserved, told.allocated)
        if kind == ARROW:
            return Call(*event, _arrow(written.id) + 1)  # 0 is no correlation
        if kind in ("kernel", "memcpy", "memset", ON_MTIA):
            return _operation(event, _gpu_arguments.read(written.args, unreadable))
        if kind == "runtime":
            return Call(*event, _call_arguments.read(written.args, unreadable).correlation)
        if kind in (GPU_RANGE, LEGACY_ON_GPU):
            _number(written.tid)  # a stream, or a device
        return Event(*event)

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
    if not isinstance(phase, str) or not isinstance(category, str | None):
        return _ANYTHING
    if phase == "X":
        return _KINDS.get(category) if category is not None else legacy_kind(process)
    if phase == "i" and name == "[memory]":
        return "memory"
    if phase == "M" and name == "thread_name":
        return "thread"
    return ARROW if is_arrow(phase, category) else None


def _operation(event: tuple[str, str, Name, Name, int, int], told: _GpuArguments) -> GpuOperation:
    """A GPU operation; its process is the device and its thread the stream, where the arguments say nothing else."""
    device, context, stream = told.device, told.context, told.stream
    if device is None:
        device = told.in_device if told.in_device is not None else _ordinal(event[2])
    return GpuOperation(
        *event,
        told.correlation,
        device,
        _number(event[3]) if stream is None else stream,
        (told.in_context or 0) if context is None else context,
        (told.size or 0) if told.bytes is None else told.bytes,
        told.graph_node or None,
        told.direction,
    )


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
