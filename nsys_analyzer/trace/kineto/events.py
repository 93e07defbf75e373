"""Defines the events of Kineto traces: the kinds that are read, their fields, and the rows of integers for them."""

from __future__ import annotations

from collections.abc import Sequence
from decimal import Decimal, DecimalException
from typing import Annotated, TypeAlias, TypeVar

import msgspec
import numpy as np
import numpy.typing as npt

from nsys_analyzer.trace.arrays import Bools, Ints
from nsys_analyzer.trace.phase_names import MODULE_RANGE_PREFIX

#: A device ordinal, a rank or a version.
Int32 = Annotated[int, msgspec.Meta(ge=-(2**31), le=2**31 - 1)]
#: An integer that fits into a column of a table.
Int64 = Annotated[int, msgspec.Meta(ge=-(2**63) + 1, le=2**63 - 1)]
#: A number of bytes, elements or processors.
Size = Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)]

_Axes: TypeAlias = tuple[Size, Size, Size]
#: The grid and the block of a kernel, the registers of a thread, and the shared memory of a block, bytes.
KernelSizes: TypeAlias = tuple[_Axes, _Axes, Size, Size]

#: The ID of a process or a thread in a trace: any number, or any text.
TrackId: TypeAlias = int | str | None
#: A process and its thread, or for GPU operations a device and its stream.
Track: TypeAlias = tuple[TrackId, TrackId]
#: The events of one kind in the file's order: a structured array of integers with the columns of ``COLUMNS``.
Rows: TypeAlias = npt.NDArray[np.void]

#: The kind of operators and ranges in traces of PyTorch up to 1.12, which writes both in one category.
OLD_OPERATOR = "old operator"
#: The kind of events of devices that are not supported.
OTHER_DEVICE = "other device"

#: Kineto's categories (``libkineto::ActivityType``) by kind of event, in lower case. Categories of PyTorch up to 1.12
#: are last. ``trace`` is the span of the recording. Waits (``cuda_sync``), counters and most Python functions are not
#: read.
_CATEGORIES_OF_KIND = {
    "kernel": "kernel",
    "memcpy": "gpu_memcpy memcpy",
    "memset": "gpu_memset memset",
    "runtime": "cuda_runtime cuda_driver privateuse1_runtime privateuse1_driver runtime",
    "range": "user_annotation",
    "operator": "cpu_op",
    "overhead": "overhead trace",
    OLD_OPERATOR: "operator",
    OTHER_DEVICE: "xpu_runtime xpu_driver mtia_runtime mtia_ccp_events hpu_op glow_runtime",
}
_KIND_OF_CATEGORY = {name: kind for kind, names in _CATEGORIES_OF_KIND.items() for name in names.split()}

_EVENT_FIELDS = ("name", "track", "start", "end")
_CALL_FIELDS = (*_EVENT_FIELDS, "correlation")


def _make_columns(*names: str) -> np.dtype[np.void]:
    narrow = ("name", "track", "device", "forward_thread", "arguments", "sizes")
    return np.dtype([(name, np.int32 if name in narrow else np.int64) for name in names])


#: The columns of every event: the codes of its name and its track, and its start and end in ns. An event without a time
#: names a thread.
EVENT = _make_columns(*_EVENT_FIELDS)
#: The ID of the graph node is 0 for an operation outside CUDA graphs. ``sizes`` is the code of a text: the grid, the
#: block, the registers of a thread and the shared memory of a block of a kernel.
_OPERATION_COLUMNS = _make_columns(
    *_CALL_FIELDS, "device", "context", "stream", "graph_node", "bytes", "continues", "sizes"
)
#: ``arguments`` is the code of the text that describes the arguments, or -1.
_OPERATOR_COLUMNS = _make_columns(*_EVENT_FIELDS, "sequence", "forward_thread", "arguments")
#: The columns of the kinds of events that have more columns than ``EVENT``.
COLUMNS = {
    **dict.fromkeys(("kernel", "memcpy", "memset"), _OPERATION_COLUMNS),
    **dict.fromkeys(("operator", OLD_OPERATOR), _OPERATOR_COLUMNS),
    "runtime": _make_columns(*_CALL_FIELDS),  # the correlation ID is 0 if the trace has none
    # The collective that a kernel carries out: name, message size of one rank (or -1), number of ranks (or 0).
    "collective": _make_columns("name", "correlation", "bytes", "ranks"),
    # Bytes that PyTorch's allocator allocated (positive) or freed (negative). Device -1 is the host.
    "memory": _make_columns(*_EVENT_FIELDS, "bytes", "device", "allocated"),
}


_NO_LIST, _ZERO = msgspec.Raw(b"[]"), msgspec.Raw(b"0")


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
        "shapes": "Input Dims",
        "types": "Input type",
        "strides": "Input Strides",
        "values": "Concrete Inputs",
        "registers": "registers per thread",
        "shared_bytes": "shared memory",
    },
):
    """The arguments of an event that are read."""

    correlation: Int64 | None = None
    device: Int32 | None = None
    in_device: Int32 | None = None  # for a copy between GPUs
    context: Int64 | None = None
    stream: int | str | None = None  # an address on AMD's GPUs
    graph_node: Int64 | None = None
    bytes: Size | None = None
    device_type: Int64 = 0  # c10::DeviceType: 0 is the CPU
    memory_device: Int32 = 0
    size: Int64 = 0
    allocated: Int64 = -1
    name: str = ""
    sequence: Int64 = -1
    forward_thread: Int32 = 0
    collective: str | None = None  # for a kernel of a collective
    in_elements: Size = 0
    out_elements: Size = 0
    dtype: str = ""
    group_size: Size = 0
    shapes: msgspec.Raw = _NO_LIST  # of the arguments of an operator; these lists are decoded once for equal texts
    types: msgspec.Raw = _NO_LIST
    strides: msgspec.Raw = _NO_LIST
    values: msgspec.Raw = _NO_LIST
    grid: msgspec.Raw = _NO_LIST  # of a kernel
    block: msgspec.Raw = _NO_LIST
    registers: msgspec.Raw = _ZERO
    shared_bytes: msgspec.Raw = _ZERO


class Event(msgspec.Struct, gc=False):
    """An event of any kind. Its times are raw text, because the times of many events are parsed at once."""

    ph: str | None = None
    cat: str | None = None
    name: str | None = None
    pid: TrackId = None
    tid: TrackId = None
    args: Arguments | None = None
    ts: msgspec.Raw = msgspec.Raw()
    dur: msgspec.Raw = msgspec.Raw()


_NO_ARGUMENTS = Arguments()


def classify_event(phase: object, category: object, name: object) -> str | None:
    """Returns the kind of an event; None if the event is not read, such as a flow arrow or a counter."""
    if phase == "X":
        if category == "python_function":  # from the profiler's Python tracer
            return "range" if str(name).startswith(MODULE_RANGE_PREFIX) else None
        return _KIND_OF_CATEGORY.get(str(category).lower())
    if phase == "i" and name == "[memory]":
        return "memory"
    return "thread" if phase == "M" and name == "thread_name" else None


_Value = TypeVar("_Value")


class _CodesInOrder(dict[_Value, int]):
    """Assigns codes to values: consecutive integers from 0, in the order in which the values are first looked up."""

    def __missing__(self, value: _Value) -> int:
        self[value] = code = len(self)
        return code


class TraceCodes:
    """The codes by which the rows of a trace refer to its texts and tracks."""

    def __init__(self) -> None:
        self.texts = _CodesInOrder[str]()
        self.tracks = _CodesInOrder[Track]()


def read_times(kind: str, events: Sequence[Event]) -> tuple[Ints, Ints, Bools]:
    """Returns the starts and ends (ns) of events of one kind, and the mask of the events with valid times."""
    if kind == "thread":  # the name of a thread has no time
        zeros = np.zeros(len(events), np.int64)
        return zeros, zeros, np.ones(len(events), np.bool_)
    starts, are_timed = to_nanoseconds([bytes(event.ts) for event in events])
    if kind == "memory":
        return starts, starts, are_timed
    durations, have_durations = to_nanoseconds([bytes(event.dur) for event in events])
    return starts, starts + durations, are_timed & have_durations & (durations >= 0)


def make_rows(kind: str, events: Sequence[Event], codes: TraceCodes) -> Rows:
    """Returns the rows of events of one kind, without their times."""
    rows = np.zeros(len(events), COLUMNS.get(kind, EVENT))
    arguments = [event.args or _NO_ARGUMENTS for event in events]
    rows["track"] = [codes.tracks[event.pid, event.tid] for event in events]
    if kind == "thread":
        rows["name"] = [codes.texts[args.name] for args in arguments]
        return rows
    rows["name"] = [codes.texts[event.name or ""] for event in events]
    if kind == "memory":
        rows["bytes"] = [args.size for args in arguments]
        rows["device"] = [args.memory_device if args.device_type else -1 for args in arguments]
        rows["allocated"] = [args.allocated for args in arguments]
    elif kind in ("operator", OLD_OPERATOR):
        rows["sequence"] = [args.sequence for args in arguments]
        rows["forward_thread"] = [args.forward_thread for args in arguments]
        rows["arguments"] = [_find_arguments_code(args, codes) for args in arguments]
    elif kind == "runtime":
        rows["correlation"] = [args.correlation or 0 for args in arguments]
    elif COLUMNS.get(kind) is _OPERATION_COLUMNS:
        pairs = list(zip(arguments, events, strict=True))
        rows["correlation"] = [args.correlation or 0 for args in arguments]
        rows["device"] = [
            _first_integer(32, args.in_device, event.pid) if args.device is None else args.device
            for args, event in pairs
        ]
        rows["stream"] = [_first_integer(64, args.stream, event.tid) for args, event in pairs]
        rows["context"] = [args.context or 0 for args in arguments]
        rows["graph_node"] = [args.graph_node or 0 for args in arguments]
        rows["bytes"] = [args.bytes or 0 for args in arguments]
        if kind == "kernel":
            rows["sizes"] = [
                codes.texts[_join_texts(args.grid, args.block, args.registers, args.shared_bytes)] for args in arguments
            ]
    return rows


def _find_arguments_code(arguments: Arguments, codes: TraceCodes) -> int:
    """Returns the code of the text that ``trace.operator_shapes`` parses, or -1 if the trace contains no shapes."""
    if arguments.shapes is _NO_LIST:
        return -1
    return codes.texts[_join_texts(arguments.shapes, arguments.types, arguments.strides, arguments.values)]


def _join_texts(*texts: msgspec.Raw) -> str:
    """Returns the JSON array of the given JSON texts."""
    return f"[{','.join(bytes(text).decode() for text in texts)}]"


def make_collective_rows(rows: Rows, events: Sequence[Event], codes: TraceCodes) -> Rows:
    """Returns the collectives that the given kernels carry out, with the columns of ``COLUMNS["collective"]``.

    Args:
        rows: the rows of the kernels.
        events: the events of the kernels.
        codes: the codes of the trace, for the collectives' names.
    """
    index = [i for i, event in enumerate(events) if event.args and event.args.collective]
    collectives = np.zeros(len(index), COLUMNS["collective"])
    arguments = [events[i].args or _NO_ARGUMENTS for i in index]
    collectives["correlation"] = rows["correlation"][index]
    collectives["name"] = [codes.texts[args.collective or ""] for args in arguments]
    collectives["bytes"] = [_find_message_bytes(args) for args in arguments]
    collectives["ranks"] = [args.group_size for args in arguments]
    return collectives


#: Bytes of an element, by PyTorch's names of data types.
_ELEMENT_BYTES = {
    **dict.fromkeys(("Byte", "Char", "Bool", "Float8_e4m3fn", "Float8_e5m2", "Float8_e4m3fnuz", "Float8_e5m2fnuz"), 1),
    **dict.fromkeys(("Half", "BFloat16", "Short"), 2),
    **dict.fromkeys(("Float", "Int"), 4),
    **dict.fromkeys(("Double", "Long", "ComplexFloat"), 8),
    "ComplexDouble": 16,
}


def _find_message_bytes(arguments: Arguments) -> int:
    """Returns the message size of a collective as NCCL counts it; -1 if unknown.

    PyTorch writes the input elements and the output elements of a rank. NCCL counts one rank's part of a tensor that is
    gathered or scattered. For an all-to-all, NCCL counts the elements that one rank sends to one other rank.
    """
    name = (arguments.collective or "").lower()
    element = _ELEMENT_BYTES.get(arguments.dtype, 0)
    sizes = [elements * element for elements in (arguments.in_elements, arguments.out_elements) if elements]
    if not element or not sizes or max(sizes) >= 2**63:
        return -1
    if "all_to_all" in name or "alltoall" in name:
        return max(sizes) // arguments.group_size if arguments.group_size else -1
    return min(sizes) if "gather" in name or "scatter" in name else max(sizes)


def parse_track_id(track_id: TrackId) -> TrackId:
    """Returns a track's ID as an integer if it is a text of digits. PyTorch up to 1.12 writes thread IDs as texts."""
    if isinstance(track_id, str) and track_id.isdecimal() and len(track_id) < 20:
        return int(track_id)
    return track_id


def _first_integer(bits: int, *ids: TrackId) -> int:
    """Returns the first ID that is an integer of at most ``bits`` bits, as a signed integer; 0 without such an ID."""
    for track_id in ids:
        number = parse_track_id(track_id)
        if isinstance(number, int) and -(2 ** (bits - 1)) <= number < 2**bits:
            return number - 2**bits if number >= 2 ** (bits - 1) else number
    return 0


_MAX_TIME_NS = 2**61  # the difference of two such times plus a duration fits into 64 bits


def to_nanoseconds(microseconds: Sequence[bytes]) -> tuple[Ints, Bools]:
    """Converts JSON numbers in µs to integers in ns, and returns them with the mask of the valid times.

    The digits are read as integers, because a float cannot represent a time since 1970 to the nanosecond.
    """
    digits = b",".join(microseconds).replace(b".", b"")
    has_kineto_format = all(number[-4:-3] == b"." and len(number) < 20 for number in microseconds)
    if has_kineto_format and not digits.translate(None, b"0123456789-,"):
        times = np.fromstring(digits, np.int64, sep=",")
        return times, np.ones(len(times), np.bool_)
    times_or_none = [_parse_time(number) for number in microseconds]
    are_valid = np.array([ns is not None for ns in times_or_none], np.bool_)
    return np.array([ns or 0 for ns in times_or_none], np.int64), are_valid


def _parse_time(number: bytes) -> int | None:
    """Returns a JSON number in µs as ns, rounded half to even; None if it is missing or no possible time."""
    try:
        microseconds = Decimal(number.decode().strip('"'))
    except DecimalException:  # missing, or not a number
        return None
    is_valid = microseconds.is_finite() and -_MAX_TIME_NS // 1000 < microseconds < _MAX_TIME_NS // 1000
    return round(microseconds * 1000) if is_valid else None


class Device(
    msgspec.Struct,
    rename={
        "memory": "totalGlobalMem",
        "sms": "numSms",
        "compute_capability": "computeMajor",
        "registers_per_sm": "regsPerMultiprocessor",
        "shared_bytes_per_sm": "sharedMemPerMultiprocessor",
        "threads_per_sm": "maxThreadsPerMultiprocessor",
        "warp_size": "warpSize",
    },
):
    """A GPU in Kineto's list of the machine's GPUs."""

    id: Int32
    name: str | None = None
    memory: Size | None = None
    sms: Size | None = None
    compute_capability: Size | None = None
    registers_per_sm: Size | None = None
    shared_bytes_per_sm: Size | None = None
    threads_per_sm: Size | None = None
    warp_size: Size | None = None


class Distributed(msgspec.Struct):
    """The rank of the traced process, and the number of ranks of its run."""

    rank: Int32 | None = None
    world_size: Int32 | None = None


class Properties(msgspec.Struct):
    """The properties of a trace that are read. A property that is missing from the trace is None.

    The torch recorder adds ``torch_version``, ``driver_version`` and ``cpu``.
    """

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
