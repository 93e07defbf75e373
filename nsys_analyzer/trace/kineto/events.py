"""Events as Kineto writes them: their fields, the kinds that are kept, and the row of integers that is kept of each."""

from __future__ import annotations

from collections.abc import Sequence
from decimal import Decimal, DecimalException
from typing import Annotated, TypeAlias, TypeVar

import msgspec
import numpy as np
import numpy.typing as npt

from nsys_analyzer.trace.arrays import Bools, Ints
from nsys_analyzer.trace.phase_names import MODULE_RANGE_PREFIX

Int32 = Annotated[int, msgspec.Meta(ge=-(2**31), le=2**31 - 1)]
"""An ordinal: of a device, a rank; a version."""
Int64 = Annotated[int, msgspec.Meta(ge=-(2**63) + 1, le=2**63 - 1)]
"""The range of a column of integers."""
Size = Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)]
"""A number of bytes or of processors."""

Name: TypeAlias = int | str | None
"""The ID of a process or a thread in a trace: any number, or any text."""
Place: TypeAlias = tuple[Name, Name]
"""A process and a thread of it; a device and a stream on a GPU."""
Rows: TypeAlias = npt.NDArray[np.void]
"""The events of one kind: a structured array of integers, in the file's order, with the columns of ``COLUMNS``."""

OLD_OPERATOR = "old operator"
"""The kind of an operator or a range as PyTorch up to 1.12 wrote them, in one category."""
OTHER_DEVICE = "other device"
"""The kind of what only devices do that are not read."""

#: What Kineto calls the kinds of event that are kept (``libkineto::ActivityType``), in small letters; the names of
#: PyTorch up to 1.12 last; ``trace`` is the span of the recording. Waits (``cuda_sync``), counters and Python functions
#: are not kept, but for calls of modules.
_CATEGORIES = {
    "kernel": "kernel",
    "memcpy": "gpu_memcpy memcpy",
    "memset": "gpu_memset memset",
    "runtime": "cuda_runtime cuda_driver privateuse1_runtime privateuse1_driver runtime",
    "range": "user_annotation",
    "operator": "cpu_op",
    "noted": "overhead trace",
    OLD_OPERATOR: "operator",
    OTHER_DEVICE: "xpu_runtime xpu_driver mtia_runtime mtia_ccp_events hpu_op glow_runtime",
}
_KINDS = {category: kind for kind, categories in _CATEGORIES.items() for category in categories.split()}

_EVENT = ("name", "place", "start", "end")
_CALL = (*_EVENT, "correlation")


def _columns(*names: str) -> np.dtype[np.void]:
    narrow = ("name", "place", "device", "forward_thread")
    return np.dtype([(name, np.int32 if name in narrow else np.int64) for name in names])


#: Of every event: the numbers of its name and of its place (process and thread; device and stream on a GPU) among
#: those of the trace, its start and end in ns. A thread's name is an event of that name, without a time.
EVENT = _columns(*_EVENT)
#: The node of a graph is 0 for an operation outside graphs.
_OPERATION = _columns(*_CALL, "device", "context", "stream", "graph_node", "bytes", "continues")
_OPERATOR = _columns(*_EVENT, "sequence", "forward_thread")
COLUMNS = {
    **dict.fromkeys(("kernel", "memcpy", "memset"), _OPERATION),
    **dict.fromkeys(("operator", OLD_OPERATOR), _OPERATOR),
    "runtime": _columns(*_CALL),  # the correlation ID is 0 where the trace has none
    # What a kernel says of its collective: its name, the message of one rank in bytes or -1, ranks of its group or 0.
    "collective": _columns("name", "correlation", "bytes", "ranks"),
    # Bytes that PyTorch's allocator allocated, or freed (negative); of the host where the device is -1.
    "memory": _columns(*_EVENT, "bytes", "device", "allocated"),
}
"""The columns of the kinds that have more than ``EVENT``."""


class Arguments(
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
        "collective": "Collective name",
        "in_elements": "In msg nelems",
        "out_elements": "Out msg nelems",
        "group_size": "Group size",
    },
):
    """The arguments that are of use: of GPU operations and API calls, memory (capital letters), threads, operators."""

    correlation: Int64 | None = None
    device: Int32 | None = None
    in_device: Int32 | None = None  # of a copy between GPUs
    context: Int64 | None = None
    stream: int | str | None = None  # AMD's have an address
    graph_node: Int64 | None = None
    bytes: Size | None = None
    device_type: Int64 = 0  # c10::DeviceType: 0 is the CPU
    memory_device: Int32 = 0
    size: Int64 = 0
    allocated: Int64 = -1
    name: str = ""
    sequence: Int64 = -1
    forward_thread: Int32 = 0
    collective: str | None = None  # of a kernel that carries one out
    in_elements: Size = 0
    out_elements: Size = 0
    dtype: str = ""
    group_size: Size = 0


class Event(msgspec.Struct, gc=False):
    """An event of any kind, its times as they are written: those of many are read at once."""

    ph: str | None = None
    cat: str | None = None
    name: str | None = None
    pid: Name = None
    tid: Name = None
    args: Arguments | None = None
    ts: msgspec.Raw = msgspec.Raw()
    dur: msgspec.Raw = msgspec.Raw()


_NO_ARGUMENTS = Arguments()


def kind_of(phase: object, category: object, name: object) -> str | None:
    """Returns the kind of an event, None where it is not used, as flow arrows and counters are not."""
    if phase == "X":
        if category == "python_function":  # as the profiler's tracer of Python saw it
            return "range" if str(name).startswith(MODULE_RANGE_PREFIX) else None
        return _KINDS.get(str(category).lower())
    if phase == "i" and name == "[memory]":
        return "memory"
    return "thread" if phase == "M" and name == "thread_name" else None


_Value = TypeVar("_Value")


class _Numbered(dict[_Value, int]):
    """A number for each value, from 0 on, in the order in which they were first asked for."""

    def __missing__(self, value: _Value) -> int:
        self[value] = number = len(self)
        return number


class Numbers:
    """The texts and places of a trace, by whose numbers its rows name them."""

    def __init__(self) -> None:
        self.texts = _Numbered[str]()
        self.places = _Numbered[Place]()


def times_of(kind: str, events: Sequence[Event]) -> tuple[Ints, Ints, Bools]:
    """Returns when some events of a kind start and end, ns, and of which of them a trace can say so."""
    if kind == "thread":  # its name has no time
        none = np.zeros(len(events), np.int64)
        return none, none, np.ones(len(events), np.bool_)
    starts, are_timed = nanoseconds([bytes(event.ts) for event in events])
    if kind == "memory":
        return starts, starts, are_timed
    durations, have_lengths = nanoseconds([bytes(event.dur) for event in events])
    return starts, starts + durations, are_timed & have_lengths & (durations >= 0)


def rows_of(kind: str, events: Sequence[Event], numbers: Numbers) -> Rows:
    """Returns the rows of some events of a kind, all but their times."""
    rows = np.zeros(len(events), COLUMNS.get(kind, EVENT))
    arguments = [event.args or _NO_ARGUMENTS for event in events]
    rows["place"] = [numbers.places[event.pid, event.tid] for event in events]
    if kind == "thread":
        rows["name"] = [numbers.texts[each.name] for each in arguments]
        return rows
    rows["name"] = [numbers.texts[event.name or ""] for event in events]
    if kind == "memory":
        rows["bytes"] = [each.size for each in arguments]
        rows["device"] = [each.memory_device if each.device_type else -1 for each in arguments]
        rows["allocated"] = [each.allocated for each in arguments]
    elif kind in ("operator", OLD_OPERATOR):
        rows["sequence"] = [each.sequence for each in arguments]
        rows["forward_thread"] = [each.forward_thread for each in arguments]
    elif kind == "runtime":
        rows["correlation"] = [each.correlation or 0 for each in arguments]
    elif COLUMNS.get(kind) is _OPERATION:
        pairs = list(zip(arguments, events, strict=True))
        rows["correlation"] = [each.correlation or 0 for each in arguments]
        rows["device"] = [
            _ordinal(32, args.in_device, event.pid) if args.device is None else args.device for args, event in pairs
        ]
        rows["stream"] = [_ordinal(64, args.stream, event.tid) for args, event in pairs]
        rows["context"] = [args.context or 0 for args in arguments]
        rows["graph_node"] = [args.graph_node or 0 for args in arguments]
        rows["bytes"] = [args.bytes or 0 for args in arguments]
    return rows


def collectives_of(rows: Rows, events: Sequence[Event], numbers: Numbers) -> Rows:
    """Returns what some kernels say of the collectives that they carry out."""
    carrying = [index for index, event in enumerate(events) if event.args and event.args.collective]
    collectives = np.zeros(len(carrying), COLUMNS["collective"])
    arguments = [events[index].args or _NO_ARGUMENTS for index in carrying]
    collectives["correlation"] = rows["correlation"][carrying]
    collectives["name"] = [numbers.texts[each.collective or ""] for each in arguments]
    collectives["bytes"] = [_message_bytes(each) for each in arguments]
    collectives["ranks"] = [each.group_size for each in arguments]
    return collectives


#: Bytes of an element, by what PyTorch calls its type.
_ELEMENT = {
    **dict.fromkeys(("Byte", "Char", "Bool", "Float8_e4m3fn", "Float8_e5m2", "Float8_e4m3fnuz", "Float8_e5m2fnuz"), 1),
    **dict.fromkeys(("Half", "BFloat16", "Short"), 2),
    **dict.fromkeys(("Float", "Int"), 4),
    **dict.fromkeys(("Double", "Long", "ComplexFloat"), 8),
    "ComplexDouble": 16,
}


def _message_bytes(arguments: Arguments) -> int:
    """Returns the message of a collective as NCCL counts it, -1 where it is not known.

    PyTorch counts the elements that a rank puts in and gets out. NCCL counts what one rank has of a gathered or
    scattered tensor, and what passes between two of an all-to-all.
    """
    name = (arguments.collective or "").lower()
    element = _ELEMENT.get(arguments.dtype, 0)
    sizes = [elements * element for elements in (arguments.in_elements, arguments.out_elements) if elements]
    if not element or not sizes or max(sizes) >= 2**63:
        return -1
    if "all_to_all" in name or "alltoall" in name:
        return max(sizes) // arguments.group_size if arguments.group_size else -1
    return min(sizes) if "gather" in name or "scatter" in name else max(sizes)


def as_number(name: Name) -> Name:
    """Returns an ID as a number where it is written as the text of one, as PyTorch up to 1.12 wrote threads."""
    return int(name) if isinstance(name, str) and name.isdecimal() and len(name) < 20 else name


def _ordinal(bits: int, *places: Name) -> int:
    """Returns the first ID that is a number of this many bits, signed or unsigned; 0 if none is."""
    for place in places:
        number = as_number(place)
        if isinstance(number, int) and -(2 ** (bits - 1)) <= number < 2**bits:
            return number - 2**bits if number >= 2 ** (bits - 1) else number
    return 0


_LIMIT_NS = 2**61  # the difference of two such times, and a duration more, fit into 64 bits


def nanoseconds(microseconds: Sequence[bytes]) -> tuple[Ints, Bools]:
    """Returns times in ns from numbers of a JSON in us, half to even, and which of them a trace can have.

    A double cannot hold the nanoseconds of a time since 1970, so they are read as integers.
    """
    digits = b",".join(microseconds).replace(b".", b"")
    as_kineto_writes = all(each[-4:-3] == b"." and len(each) < 20 for each in microseconds)
    if as_kineto_writes and not digits.translate(None, b"0123456789-,"):
        numbers = np.fromstring(digits, np.int64, sep=",")
        return numbers, np.ones(len(numbers), np.bool_)
    times = [_one_time(each) for each in microseconds]
    return np.array([ns or 0 for ns in times], np.int64), np.array([ns is not None for ns in times], np.bool_)


def _one_time(written: bytes) -> int | None:
    try:
        microseconds = Decimal(written.decode().strip('"'))
    except DecimalException:  # absent, or no number
        return None
    possible = microseconds.is_finite() and -_LIMIT_NS // 1000 < microseconds < _LIMIT_NS // 1000
    return round(microseconds * 1000) if possible else None


class Device(msgspec.Struct, rename={"memory": "totalGlobalMem", "sms": "numSms"}):
    """A GPU of the machine, as Kineto lists it."""

    id: Int32
    name: str | None = None
    memory: Size | None = None
    sms: Size | None = None


class Distributed(msgspec.Struct):
    """The rank of the process in its group."""

    rank: Int32 | None = None
    world_size: Int32 | None = None


class Properties(msgspec.Struct):
    """The properties of a trace that are read, those of our recorder last; None where the trace does not have one."""

    device_properties: tuple[Device, ...] = msgspec.field(name="deviceProperties", default=())
    distributed: Distributed | None = msgspec.field(name="distributedInfo", default=None)
    torch_version: str | int | float | None = None
    cuda_driver_version: Int32 | None = None
    hip_driver_version: Int32 | None = None
    hip_runtime_version: Int32 | None = None
    roctracer_version: str | int | float | None = None
    driver_version: str | int | float | None = None
    cpu: str | int | float | None = None
    os: str | int | float | None = None
