"""Reads a PyTorch profiler (Kineto) Chrome trace: the events worth keeping, each as a small tuple.

A trace of a million events is a text of 200 MB and more, and most of it is of no use here (flow arrows, Python
stacks, arguments of operators). So each event is condensed as soon as it is parsed.
"""

from __future__ import annotations

import gzip
import json
import re
import sys
import zlib
from collections import defaultdict
from dataclasses import dataclass, field
from decimal import Decimal
from pathlib import Path
from typing import Any, NamedTuple

from nsys_analyzer.errors import TraceError

_GZIP_MAGIC = b"\x1f\x8b"
_RECORD = "Record it with torch.profiler and export_chrome_trace(), or with: nsys-analyze run --profiler torch"
_AGAIN = "Copy it again, or record it again"

_UNSORTED = "operator or range"
#: What Kineto calls the kinds of event that are kept; the capitalised names are those of PyTorch before 1.11, which
#: calls a range of ``record_function`` an "Operator", too.
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
    "user_annotation": "range",
    "cpu_op": "operator",
    "Operator": _UNSORTED,
}
_BACKWARD = re.compile(r"Backward\d*$")
_WITH_ARGUMENTS = ("kernel", "memcpy", "memset", "runtime")


class Event(NamedTuple):
    """One event: its name, process and thread (device and stream on a GPU) as written, start and end in ns."""

    kind: str
    name: str
    pid: Any
    tid: Any
    start: int
    end: int
    arguments: dict[str, Any]


@dataclass(frozen=True)
class KinetoTrace:
    """The events of a trace by kind, times in ns since the first of them, and the trace's own properties.

    Kinds: ``kernel``, ``memcpy``, ``memset``, ``runtime``, ``range``, ``operator``, ``memory``, ``thread``.
    """

    path: Path
    properties: dict[str, Any]
    events: dict[str, list[Event]] = field(default_factory=dict)

    def of(self, *kinds: str) -> list[Event]:
        """The events of one or more kinds, in the file's order within a kind."""
        return [event for kind in kinds for event in self.events.get(kind, ())]

    @property
    def has_gpu(self) -> bool:
        """Whether anything ran on a GPU."""
        return bool(self.of("kernel", "memcpy", "memset"))


def read_kineto(path: Path) -> KinetoTrace:
    """Read a Chrome trace of ``torch.profiler``, plain or compressed with gzip.

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
    _sort_out(events)
    if not (set(events) - {"thread"}):
        raise TraceError(f"{path} is a Chrome trace, but not of PyTorch's profiler", _RECORD)
    if not (set(events) & {"kernel", "memcpy", "memset", "operator"}):
        raise TraceError(
            f"{path} holds neither operators nor kernels",
            "Record again with activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]",
        )
    return KinetoTrace(path, properties, _from_the_first(events))


def _sort_out(events: dict[str, list[Event]]) -> None:
    """Tell operators from ranges where one category holds both: an operator's name has a namespace (``aten::mm``).

    But for autograd's (``MmBackward``), and for ``detach`` beside ``aten::detach``.
    """
    unsorted = events.pop(_UNSORTED, [])
    names = {event.name for event in unsorted}
    for event in unsorted:
        is_operator = "::" in event.name or f"aten::{event.name}" in names or _BACKWARD.search(event.name)
        kind = "operator" if is_operator else "range"
        events[kind].append(event._replace(kind=kind))


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
        parsed = json.loads(text, object_hook=_condensed, parse_float=str, strict=False)
    except (ValueError, RecursionError) as error:
        raise TraceError(f"{path} is not JSON, or only a part of it ({error})", _AGAIN) from error
    except (KeyError, TypeError, AttributeError, ArithmeticError) as error:
        raise TraceError(f"{path} holds an event unlike those of PyTorch's profiler ({error!r})", _RECORD) from error
    if not isinstance(parsed, dict):
        raise TraceError(f"{path} is JSON, but no trace of PyTorch's profiler: it has no traceEvents", _RECORD)
    return parsed


def _condensed(value: dict[str, Any]) -> dict[str, Any] | Event | None:
    """What is kept of a JSON object: an event as a tuple, None for an event of no use, anything else as it is."""
    phase = value.get("ph")
    if phase is None:
        return value
    name = value.get("name")
    if phase == "X":
        kind = _KINDS.get(value.get("cat", ""))
        return _event(kind, value) if kind else None
    if phase == "i" and name == "[memory]":
        return _event("memory", value)
    return _event("thread", value) if phase == "M" and name == "thread_name" else None


def _event(kind: str, value: dict[str, Any]) -> Event:
    start = _nanoseconds(value.get("ts", 0) if kind == "thread" else value["ts"])
    duration = _nanoseconds(value.get("dur", 0))
    kept = value.get("args", {}) if kind in _WITH_ARGUMENTS or kind in ("memory", "thread") else {}
    return Event(kind, sys.intern(value["name"]), value["pid"], value["tid"], start, start + max(duration, 0), kept)


def _nanoseconds(microseconds: int | str) -> int:
    if isinstance(microseconds, int):
        return microseconds * 1000
    whole, _, fraction = microseconds.partition(".")
    if len(fraction) <= 3 and fraction.isdigit():
        return int(whole + fraction.ljust(3, "0"))
    return round(Decimal(microseconds) * 1000)
