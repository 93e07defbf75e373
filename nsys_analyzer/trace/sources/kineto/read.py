"""Reads a Chrome trace of a PyTorch profiler (Kineto, or the older autograd profiler): the events worth keeping.

A trace of a million events is a text of 200 MB and more, and most of it is of no use here (flow arrows, Python
stacks, arguments of operators). So it is read a piece at a time, and its events condensed to a few columns.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np

from nsys_analyzer.errors import TraceError
from nsys_analyzer.trace.sources.kineto.events import KinetoTrace, Properties, Rows
from nsys_analyzer.trace.sources.kineto.json_text import RECORD, JsonText, opened
from nsys_analyzer.trace.sources.kineto.kept import Events
from nsys_analyzer.trace.sources.kineto.legacy import sort_legacy
from nsys_analyzer.trace.sources.kineto.operators import make_kernels
from nsys_analyzer.trace.sources.kineto.written import GPU_RANGE, read_properties

#: Events that start so far apart are of two clocks, or of a clock that was set.
_APART_NS = 24 * 3600 * 10**9
#: Those of a clock that has fewer events than this share of the other's are strays.
_OF_THE_MOST = 0.25
_STRAY = "a time more than a day from the others"


def read_kineto(path: Path) -> KinetoTrace:
    """Reads a Chrome trace of PyTorch's profiler, plain or compressed with gzip; an object or a bare array of events.

    An event that cannot be what it says is left out, a property ignored; the trace's remarks say so.

    Raises:
        TraceError: no such file, truncated, not JSON, another tool's trace, or nothing in it to analyse.
    """
    read = Events()
    with opened(path) as file:
        status = os.fstat(file.fileno())
        properties, ignored = read_properties(_read(JsonText(path, file), read))
    read.finish()
    _leave_out_strays(read)
    events, numbers = read.found, read.numbers
    refused = read.remarks()
    remarks = [*ignored, *refused, *sort_legacy(events, list(numbers.texts), list(numbers.places))]
    if "range" in events or "operator" in events:
        events.pop(GPU_RANGE, None)  # it repeats the CPU's
    because = f": {refused[0]}" if refused else ""
    if not any(len(rows) for rows in _timed(events)):
        raise TraceError(f"{path} holds no events of PyTorch's profiler{because}", RECORD)
    if not (set(events) & {"kernel", "memcpy", "memset", "operator"}):
        hint = "Record again with activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]"
        raise TraceError(f"{path} holds neither operators nor kernels{because}", hint)
    on_cpu = not set(events) & {"kernel", "memcpy", "memset"}
    if on_cpu:
        remarks += make_kernels(events, numbers.texts)
        if properties.device_properties:
            remarks.append(
                "The machine has a GPU, and the trace holds nothing that ran there: the times are those of the CPU"
            )
    _count_from_the_first(events)
    texts, places = list(numbers.texts), list(numbers.places)
    return KinetoTrace(path, status, properties, events, texts, places, remarks, on_mtia=read.on_mtia, on_cpu=on_cpu)


def _read(text: JsonText, events: Events) -> dict[str, Any]:
    """Reads a trace: the events into ``events``; returns the properties that are of use as they are written."""
    if not text.next():
        raise TraceError(f"{text.path} is empty", RECORD)
    properties: dict[str, Any] = {}
    is_trace = False
    if text.take("["):
        _read_events(text, events, ends=("]", ""))  # a bare array may go without its bracket, in the Chrome format
        is_trace = events.any_phase
    elif text.take("{"):
        is_trace = _read_members(text, events, properties)
    else:
        text.value()
    if text.next():
        raise text.broken("extra data")
    if not is_trace:
        raise TraceError(f"{text.path} is JSON, but no trace of PyTorch's profiler: it has no traceEvents", RECORD)
    return properties


def _read_members(text: JsonText, events: Events, properties: dict[str, Any]) -> bool:
    """Reads the members of the object that a trace is, and returns whether its events are among them."""
    has_events = False
    while text.next() != "}":
        key = text.value()
        if not isinstance(key, str) or not text.take(":"):
            raise text.broken("no property")
        if key == "traceEvents" and text.take("["):
            _read_events(text, events, ends=("]",))
            has_events = True
        else:
            value = text.value()
            if key in Properties.__struct_encode_fields__:
                properties[key] = value
        if not text.take(",") and text.next() != "}":
            raise text.broken("neither a comma nor a closing brace")
    text.take("}")
    return has_events


def _read_events(text: JsonText, events: Events, ends: tuple[str, ...]) -> None:
    """Reads an array of events to its end: many at once, or one by one beside those that msgspec cannot read."""
    one_by_one_until = 0
    while text.next() not in ends:
        several = text.objects() if text.position >= one_by_one_until else ""
        if several and events.add_all(several):
            text.at += len(several)
        else:
            one_by_one_until = max(one_by_one_until, text.position + (len(several) or len(text.buffer) - text.at))
            events.add(text.value())
        if not text.take(",") and text.next() not in ends:
            raise text.broken("neither a comma nor a closing bracket")
    text.take("]")


def _leave_out_strays(read: Events) -> None:
    """Takes out the events that start a day and more from all but a few others, in place."""
    starts = np.sort(np.concatenate([np.empty(0, np.int64), *(rows["start"] for rows in _timed(read.found))]))
    groups = np.split(starts, np.flatnonzero(np.diff(starts) >= _APART_NS) + 1)
    largest = max(map(len, groups))
    strays = [(int(group[0]), int(group[-1])) for group in groups if len(group) < _OF_THE_MOST * largest]
    if strays:
        read.leave_out(lambda start: np.any([(low <= start) & (start <= high) for low, high in strays], 0), _STRAY)


def _timed(events: dict[str, Rows]) -> list[Rows]:
    """The events that have a time, which a thread's name has not."""
    return [rows for kind, rows in events.items() if kind != "thread"]


def _count_from_the_first(events: dict[str, Rows]) -> None:
    """Makes the start of the first event 0, in place."""
    timed = _timed(events)
    origin = min(rows["start"].min() for rows in timed if len(rows))
    for rows in timed:
        rows["start"] -= origin
        rows["end"] -= origin
