"""Reads a Chrome trace of a PyTorch profiler (Kineto, or the older autograd profiler): the events worth keeping.

A trace of a million events is a text of 200 MB and more, and most of it is of no use here (flow arrows, Python
stacks, arguments of operators). So each event is condensed to a small tuple as soon as it is parsed.
"""

from __future__ import annotations

import gzip
import json
import re
import sys
import zlib
from collections import defaultdict
from decimal import Decimal
from pathlib import Path
from typing import Any

from nsys_analyzer.capture.kineto_events import Event, KinetoTrace
from nsys_analyzer.capture.kineto_legacy import ARROW, UNSORTED, is_arrow, legacy_kind, sort_legacy
from nsys_analyzer.errors import TraceError

_GZIP_MAGIC = b"\x1f\x8b"
_RECORD = "Record it with torch.profiler and export_chrome_trace(), or with: nsys-analyze run --profiler torch"
_AGAIN = "Copy it again, or record it again"

_ON_MTIA = "on an MTIA"
_GPU_RANGE = "gpu range"
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
    "mtia_ccp_events": _ON_MTIA,
    "user_annotation": "range",
    "gpu_user_annotation": _GPU_RANGE,
    "cpu_op": "operator",
    "Operator": UNSORTED,
}
_BACKWARD = re.compile(r"Backward\d*$")
_WITH_ARGUMENTS = ("kernel", "memcpy", "memset", "runtime", "memory", "thread", _ON_MTIA)
#: What an MTIA does for its queues beside running kernels and moving data.
_MTIA_QUEUE = ("event_record", "event_wait")


def read_kineto(path: Path) -> KinetoTrace:
    """Read a Chrome trace of PyTorch's profiler, plain or compressed with gzip; an object or a bare array of events.

    Raises:
        TraceError: no such file, truncated, not JSON, another tool's trace, or nothing in it to analyse.
    """
    properties = _parsed(path, _text(path))
    listed = properties.pop("traceEvents", None)
    if not isinstance(listed, list):
        raise TraceError(f"{path} is JSON, but no trace of PyTorch's profiler: it has no traceEvents", _RECORD)
    events: dict[str, list[Event]] = defaultdict(list)
    for event in listed:
        if isinstance(event, Event):
            events[event.kind].append(event)
    remarks = sort_legacy(events)
    _sort_out(events)
    on_mtia = _sort_mtia(events)
    if "range" in events or "operator" in events:
        events.pop(_GPU_RANGE, None)  # it repeats the CPU's
    if not (set(events) - {"thread"}):
        raise TraceError(f"{path} is a Chrome trace, but not of PyTorch's profiler", _RECORD)
    if not (set(events) & {"kernel", "memcpy", "memset", "operator"}):
        raise TraceError(
            f"{path} holds neither operators nor kernels",
            "Record again with activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]",
        )
    return KinetoTrace(path, properties, _from_the_first(events), on_mtia, remarks)


def _sort_out(events: dict[str, list[Event]]) -> None:
    """Tell operators from ranges where one category holds both: an operator's name has a namespace (``aten::mm``).

    But for autograd's (``MmBackward``), and for ``detach`` beside ``aten::detach``.
    """
    unsorted = events.pop(UNSORTED, [])
    names = {event.name for event in unsorted}
    for event in unsorted:
        is_operator = "::" in event.name or f"aten::{event.name}" in names or _BACKWARD.search(event.name)
        kind = "operator" if is_operator else "range"
        events[kind].append(event._replace(kind=kind))


def _sort_mtia(events: dict[str, list[Event]]) -> bool:
    """Sort what ran on an MTIA into kernels and copies, and say whether anything did."""
    found = events.pop(_ON_MTIA, [])
    for event in found:
        if event.name not in _MTIA_QUEUE:
            kind = "memcpy" if "direction" in event.arguments else "kernel"
            events[kind].append(event._replace(kind=kind))
    return bool(found)


def _from_the_first(events: dict[str, list[Event]]) -> dict[str, list[Event]]:
    """The events, with times from the start of the first of them."""
    origin = min(event.start for kind, found in events.items() if kind != "thread" for event in found)
    return {
        kind: [event._replace(start=event.start - origin, end=event.end - origin) for event in found]
        for kind, found in events.items()
    }


def _text(path: Path) -> str:
    try:
        content = path.read_bytes()
        if content.startswith(_GZIP_MAGIC):
            content = gzip.decompress(content)
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise TraceError(f"{path} is damaged or truncated ({error})", _AGAIN) from error
    except OSError as error:
        raise TraceError(f"{path}: {error.strerror}", "Give the path of a .json or .json.gz trace") from error
    return content.decode("utf-8-sig", errors="replace")


def _parsed(path: Path, text: str) -> dict[str, Any]:
    if not text.strip():
        raise TraceError(f"{path} is empty", _RECORD)
    try:
        # Floats stay texts, for a double does not hold the nanoseconds of a time since 1970.
        parsed = json.loads(_closed(text), object_hook=_condensed, parse_float=str, strict=False)
    except (ValueError, RecursionError) as error:
        raise TraceError(f"{path} is not JSON, or only a part of it ({error})", _AGAIN) from error
    except (KeyError, TypeError, AttributeError, ArithmeticError) as error:
        raise TraceError(f"{path} holds an event unlike those of PyTorch's profiler ({error!r})", _RECORD) from error
    if isinstance(parsed, list) and any(one is None or isinstance(one, Event) for one in parsed):
        return {"traceEvents": parsed}
    if not isinstance(parsed, dict):
        raise TraceError(f"{path} is JSON, but no trace of PyTorch's profiler: it has no traceEvents", _RECORD)
    return parsed


def _closed(text: str) -> str:
    """The text, with the closing bracket that the Chrome format lets a bare array of events go without."""
    if not text.lstrip().startswith("["):
        return text
    text = text.rstrip()
    return text if text.endswith("]") else f"{text.removesuffix(',')}]"


def _condensed(value: dict[str, Any]) -> dict[str, Any] | Event | None:
    """Reduces an event to a tuple, or to None where it is of no use; any other JSON object stays as it is."""
    phase = value.get("ph")
    if phase is None:
        return value
    name = value.get("name")
    if phase == "X":
        kind = _KINDS.get(value["cat"]) if "cat" in value else legacy_kind(value.get("pid"))
        return _event(kind, value) if kind else None
    if phase == "i" and name == "[memory]":
        return _event("memory", value)
    if phase == "M" and name == "thread_name":
        return _event("thread", value)
    return _event(ARROW, value) if is_arrow(value) else None


def _event(kind: str, value: dict[str, Any]) -> Event:
    start = _nanoseconds(value.get("ts", 0) if kind == "thread" else value["ts"])
    duration = _nanoseconds(value.get("dur", 0))
    kept = value.get("args", {}) if kind in _WITH_ARGUMENTS else {"id": value["id"]} if kind == ARROW else {}
    return Event(kind, sys.intern(value["name"]), value["pid"], value["tid"], start, start + max(duration, 0), kept)


def _nanoseconds(microseconds: int | str) -> int:
    if isinstance(microseconds, int):
        return microseconds * 1000
    whole, _, fraction = microseconds.partition(".")
    if len(fraction) <= 3 and fraction.isdigit():
        return int(whole + fraction.ljust(3, "0"))
    return round(Decimal(microseconds) * 1000)
