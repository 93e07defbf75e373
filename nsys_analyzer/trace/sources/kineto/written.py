"""An event as a PyTorch profiler writes it: its fields, its kind, and why it cannot be read."""

from __future__ import annotations

import re
from decimal import Decimal
from typing import Any

import msgspec

from nsys_analyzer.text import visible
from nsys_analyzer.trace.phase_names import MODULE_CALL
from nsys_analyzer.trace.sources.kineto.events import Int32, Int64, Name, Properties, Size
from nsys_analyzer.trace.sources.kineto.legacy import ARROW, LEGACY_ON_CPU, is_arrow, legacy_kind

GPU_RANGE = "gpu range"
"""The kind of a range that Kineto draws on the GPU's timeline."""

ON_MTIA = "MTIA"
"""The kind of what ran on an MTIA: a kernel or a copy."""

#: What Kineto calls the kinds of event that are kept (``libkineto::ActivityType``). Waits (``cuda_sync``), the
#: profiler's own work (``overhead``), counters and Python functions are not kept, but for calls of modules.
_CATEGORIES = {
    "kernel": "kernel",
    "memcpy": "gpu_memcpy",
    "memset": "gpu_memset",
    "runtime": "cuda_runtime cuda_driver xpu_runtime xpu_driver privateuse1_runtime privateuse1_driver"
    " glow_runtime hpu_op mtia_runtime",
    ON_MTIA: "mtia_ccp_events",
    "range": "user_annotation",
    GPU_RANGE: "gpu_user_annotation",
    "operator": "cpu_op",
}
KINDS = {category: kind for kind, categories in _CATEGORIES.items() for category in categories.split()}
"""The kinds of complete events ("X") by their categories."""

UNKNOWN = "any"
"""The kind of an event whose kind cannot be read."""

OPERATORS = ("operator", LEGACY_ON_CPU)
ON_A_GPU = ("kernel", "memcpy", "memset", ON_MTIA)

_AT = re.compile(r" - at `\$\.(?P<place>.*)`$")
_LONGEST_NAME = 60


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
        "shapes": "Input Dims",
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
    collective: str | None = None  # of a kernel that carries one out
    in_elements: Size = 0
    out_elements: Size = 0
    dtype: str = ""
    group_size: Size = 0
    shapes: msgspec.Raw = msgspec.Raw()  # as it is written: a few hundred texts serve all operators


#: Of a message whose size is not known.
UNKNOWN_SIZE = -1
#: Bytes of an element, by what PyTorch calls its type.
_ELEMENT = {
    **dict.fromkeys(("Byte", "Char", "Bool", "Float8_e4m3fn", "Float8_e5m2", "Float8_e4m3fnuz", "Float8_e5m2fnuz"), 1),
    **dict.fromkeys(("Half", "BFloat16", "Short"), 2),
    **dict.fromkeys(("Float", "Int"), 4),
    **dict.fromkeys(("Double", "Long", "ComplexFloat"), 8),
    "ComplexDouble": 16,
}


def message_bytes(arguments: Arguments) -> int:
    """The message of a collective as NCCL counts it, -1 where it is not known.

    PyTorch counts the elements that a rank puts in and gets out. NCCL counts what one rank has of a gathered or
    scattered tensor, and what passes between two of an all-to-all.
    """
    name = (arguments.collective or "").lower()
    element = _ELEMENT.get(arguments.dtype, 0)
    sizes = [elements * element for elements in (arguments.in_elements, arguments.out_elements) if elements]
    if not element or not sizes:
        return UNKNOWN_SIZE
    if "all_to_all" in name or "alltoall" in name:
        return max(sizes) // arguments.group_size if arguments.group_size else UNKNOWN_SIZE
    return min(sizes) if "gather" in name or "scatter" in name else max(sizes)


#: The arguments that an event can do without: where one cannot be read, it is as if it were not there.
_OF_GPU = ("device", "inDevice", "stream", "graph node id", "bytes", "direction")
_OF_COLLECTIVE = ("Collective name", "In msg nelems", "Out msg nelems", "dtype", "Group size")
_OPTIONAL = (*_OF_GPU, *_OF_COLLECTIVE, "Total Allocated", "Sequence number", "Fwd thread id", "Input Dims")
#: The arguments that each kind of event uses.
_USED = {
    **dict.fromkeys(ON_A_GPU, ("correlation", *_OF_GPU)),
    "kernel": ("correlation", *_OF_GPU, *_OF_COLLECTIVE),
    "runtime": ("correlation",),
    "memory": ("Device Type", "Device Id", "Bytes", "Total Allocated"),
    "thread": ("name",),
    "operator": ("Sequence number", "Fwd thread id", "Input Dims"),
}


class _Event(msgspec.Struct, gc=False):
    """An event of any kind, without its times."""

    ph: str | None = None
    cat: str | None = None
    name: str | None = None
    pid: Name | None = None
    tid: Name | None = None
    id: Name | None = None
    args: Arguments | None = None


class Written(_Event, gc=False):
    """An event, its times as they are written, empty where they are not: those of many are read at once."""

    ts: msgspec.Raw = msgspec.Raw()
    dur: msgspec.Raw = msgspec.Raw()


class _Checked(_Event, gc=False):
    """An event whose times are numbers."""

    ts: Decimal | None = None
    dur: Decimal | None = None


#: Not strict: a number may be a text ("1") or have a point (1.0).
_one = msgspec.json.Decoder(Written, strict=False)
_many = msgspec.json.Decoder(list[Written], strict=False)
_checked = msgspec.json.Decoder(_Checked, strict=False)
_arguments = msgspec.json.Decoder(Arguments, strict=False)
_FIELDS = ("ph", "cat", "name", "pid", "tid", "ts", "dur", "id", "args")
"""The fields of an event, in the order in which they are checked."""
_encode = msgspec.json.Encoder(decimal_format="number").encode
UNREADABLE = (msgspec.MsgspecError, UnicodeEncodeError, RecursionError)
"""What is raised where a value is not of its type."""


def decode_many(text: str) -> list[Written]:
    """The events of a text ``{…}, {…}``; raises one of ``UNREADABLE`` where any of them cannot be read."""
    return _many.decode(f"[{text}]")


def decode_one(used: dict[str, Any]) -> Written:
    """An event from its fields as :func:`used_of` returns them; raises one of ``UNREADABLE``."""
    text = _encode(used)
    _checked.decode(text)
    return _one.decode(text)


def used_of(kind: str, event: dict[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """The fields of an event that its kind uses, without the optional arguments that cannot be read; and those."""
    used = {key: event[key] for key in _FIELDS if key in event}
    unread: list[str] = []
    if kind not in _USED or (kind == "operator" and not isinstance(used.get("args"), dict)):
        used.pop("args", None)
    elif isinstance(used.get("args"), dict):
        used["args"], unread = _readable(kind, used["args"])
    if kind != ARROW:
        used.pop("id", None)
    return used, unread


def _readable(kind: str, arguments: dict[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """The arguments that a kind of event uses, without the optional ones that cannot be read; and those."""
    used = {key: arguments[key] for key in _USED[kind] if arguments.get(key) is not None}
    unread = []
    for key in [key for key in _OPTIONAL if key in used]:
        try:
            _arguments.decode(_encode({key: used[key]}))
        except UNREADABLE:
            del used[key]
            unread.append(key)
    return used, unread


def time_of(field: str, written: msgspec.Raw) -> Decimal | None:
    """The time of the field ``ts`` or ``dur``, None for null; raises one of ``UNREADABLE``."""
    found: Decimal | None = getattr(_checked.decode(b'{"%s": %s}' % (field.encode(), written)), field)
    return found


def kind_of(phase: Any, category: Any, name: Any, process: Any) -> str | None:
    """The kind of an event, None where it is not used, as flow arrows, Python functions and counters are not."""
    if phase is None:
        return None
    if not isinstance(phase, str) or not (category is None or isinstance(category, str)):
        return UNKNOWN
    if phase == "X":
        if category is None:
            return legacy_kind(process)
        return KINDS.get(category) or ("range" if _is_module_call(category, name) else None)
    if phase == "i" and name == "[memory]":
        return "memory"
    if phase == "M" and name == "thread_name":
        return "thread"
    return ARROW if is_arrow(phase, category) else None


def _is_module_call(category: str, name: Any) -> bool:
    """Whether an event is the call of a module, as the profiler's tracer of Python saw it."""
    return category == "python_function" and isinstance(name, str) and name.startswith(MODULE_CALL)


def reason(error: Exception) -> str:
    """Why a value was refused, in a few words: "args.correlation: expected int, got str"."""
    if isinstance(error, UnicodeEncodeError):
        return "a text that is no Unicode"
    if isinstance(error, RecursionError):
        return "nested too deep"
    place, what = _AT.search(str(error)), _AT.sub("", str(error)).replace("`", "")
    return f"{place['place']}: {what[:1].lower()}{what[1:]}" if place else what


def shown(name: object) -> str:
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
            except UNREADABLE as error:
                remarks.append(f"The trace's {key} is ignored: {reason(error)}")
            else:
                setattr(properties, name, getattr(one, name))
    return properties, remarks
