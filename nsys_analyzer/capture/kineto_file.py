"""Reads a Chrome trace of a PyTorch profiler (Kineto, or the older autograd profiler): the events worth keeping.

A trace of a million events is a text of 200 MB and more, and most of it is of no use here (flow arrows, Python
stacks, arguments of operators). So it is read a piece at a time, and each event condensed to a small record.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, cast

from nsys_analyzer.capture.kineto_events import Event, GpuOperation, KinetoTrace
from nsys_analyzer.capture.kineto_legacy import UNSORTED, sort_legacy
from nsys_analyzer.capture.kineto_origin import Source
from nsys_analyzer.capture.kineto_properties import PROPERTIES, read_properties
from nsys_analyzer.capture.kineto_text import RECORD, JsonText, TooDeepError, opened
from nsys_analyzer.capture.kineto_times import count_from_the_first, leave_out_strays
from nsys_analyzer.capture.kineto_written import GPU_RANGE, ON_MTIA, Events
from nsys_analyzer.errors import TraceError

_NOT_OURS = "is a Chrome trace, but not of PyTorch's profiler"
_BACKWARD = re.compile(r"Backward\d*$")
#: What an MTIA does for its queues beside running kernels and moving data.
_MTIA_QUEUE = ("event_record", "event_wait")


def read_kineto(path: Path) -> KinetoTrace:
    """Read a Chrome trace of PyTorch's profiler, plain or compressed with gzip; an object or a bare array of events.

    An event that cannot be what it says is left out, a property or an argument ignored; the trace's remarks say so.

    Raises:
        TraceError: no such file, truncated, not JSON, another tool's trace, or nothing in it to analyse.
    """
    read = Events()
    with opened(path) as file:
        source = Source.of(file)
        properties, ignored = read_properties(_read(JsonText(path, file), read))
    events = read.found
    leave_out_strays(events, read.left_out)
    left_out = read.left_out.remarks({kind: len(found) for kind, found in events.items()})
    remarks = (*ignored, *left_out, *read.left_out.argument_remarks(), *sort_legacy(events))
    _sort_out(events)
    on_mtia = _sort_mtia(events)
    if "range" in events or "operator" in events:
        events.pop(GPU_RANGE, None)  # it repeats the CPU's
    if not (set(events) - {"thread"}):
        what = f"holds only events unlike those of PyTorch's profiler: {left_out[0]}" if left_out else _NOT_OURS
        raise TraceError(f"{path} {what}", RECORD)
    if not (set(events) & {"kernel", "memcpy", "memset", "operator"}):
        what = "holds neither operators nor kernels"
        if left_out:
            raise TraceError(f"{path} {what}: {left_out[0]}", RECORD)
        raise TraceError(f"{path} {what}", "Record again with activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]")
    count_from_the_first(events)
    return KinetoTrace(path, source, properties, events, on_mtia, remarks)


def _read(text: JsonText, events: Events) -> dict[str, Any]:
    """Read a trace: the events into ``events``, and the properties that are of use as they are written."""
    if not text.next():
        raise TraceError(f"{text.path} is empty", RECORD)
    properties: dict[str, Any] = {}
    is_trace = False
    if text.take("["):
        _read_events(text, events, may_end=True)
        is_trace = events.any_phase
    elif text.take("{"):
        is_trace = _read_members(text, events, properties)
    else:
        text.skip()
    if text.next():
        raise text.broken("extra data")
    if not is_trace:
        raise TraceError(f"{text.path} is JSON, but no trace of PyTorch's profiler: it has no traceEvents", RECORD)
    return properties


def _read_members(text: JsonText, events: Events, properties: dict[str, Any]) -> bool:
    """Read the members of the object that a trace is, and say whether its events are among them."""
    has_events = False
    more = not text.take("}")
    while more:
        key = text.value()
        if not isinstance(key, str) or not text.take(":"):
            raise text.broken("no property")
        if key == "traceEvents" and text.take("["):
            _read_events(text, events)
            has_events = True
        elif key in PROPERTIES:
            properties[key] = text.value()
        else:
            text.skip()
        more = text.take(",")
        if not more and not text.take("}"):
            raise text.broken("neither a comma nor a closing brace")
    return has_events


def _read_events(text: JsonText, events: Events, *, may_end: bool = False) -> None:
    """Read an array to its closing bracket, which the Chrome format lets a bare array of events go without.

    Many events at once, as far as all of them are what they should be; those that stand beside others one by one.
    """
    one_by_one_until = 0
    while not text.take("]"):
        if may_end and not text.next():
            return
        several = text.objects() if text.position >= one_by_one_until else ""
        if several and events.add_all(several):
            text.at += len(several)
        else:
            if text.position >= one_by_one_until:
                one_by_one_until = text.position + (len(several) or len(text.buffer) - text.at)
            _read_event(text, events)
        if not text.take(",") and text.next() != "]" and not (may_end and not text.next()):
            raise text.broken("neither a comma nor a closing bracket")


def _read_event(text: JsonText, events: Events) -> None:
    try:
        event = text.value()
    except TooDeepError:
        text.skip()
        events.leave_out("nested too deep")
    else:
        events.add(event)


def _sort_out(events: dict[str, list[Event]]) -> None:
    """Tell operators from ranges where one category holds both: an operator's name has a namespace (``aten::mm``).

    But for autograd's (``MmBackward``), and for ``detach`` beside ``aten::detach``.
    """
    unsorted = events.pop(UNSORTED, [])
    names = {event.name for event in unsorted}
    for event in unsorted:
        is_operator = "::" in event.name or f"aten::{event.name}" in names or _BACKWARD.search(event.name)
        event.kind = "operator" if is_operator else "range"
        events[event.kind].append(event)


def _sort_mtia(events: dict[str, list[Event]]) -> bool:
    """Sort what ran on an MTIA into kernels and copies, and say whether anything did."""
    found = cast("list[GpuOperation]", events.pop(ON_MTIA, []))
    for event in found:
        if event.name not in _MTIA_QUEUE:
            event.kind = "memcpy" if event.direction is not None else "kernel"
            events[event.kind].append(event)
    return bool(found)
