"""Reads a Chrome trace of a PyTorch profiler (Kineto, or the older autograd profiler): the events worth keeping.

A trace of a million events is a text of 200 MB and more, and most of it is of no use here (flow arrows, Python
stacks, arguments of operators). So it is read a piece at a time, and each event condensed to a small record.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np

from nsys_analyzer.errors import TraceError
from nsys_analyzer.trace.sources.kineto.events import PROPERTIES, Event, KinetoTrace, read_properties
from nsys_analyzer.trace.sources.kineto.json_text import RECORD, JsonText, TooDeepError, opened
from nsys_analyzer.trace.sources.kineto.legacy import UNSORTED, sort_legacy
from nsys_analyzer.trace.sources.kineto.refused import RefusedEvents
from nsys_analyzer.trace.sources.kineto.written import GPU_RANGE, ON_MTIA, Events
from nsys_analyzer.trace.sources.made import Fingerprint

_NOT_OURS = "is a Chrome trace, but not of PyTorch's profiler"
_BACKWARD = re.compile(r"Backward\d*$")
#: What an MTIA does for its queues beside running kernels and moving data.
_MTIA_QUEUE = ("event_record", "event_wait")
_APART_NS = 24 * 3600 * 10**9
"""A day between two events: one of them has a clock of its own, or no time at all (0)."""

_OF_THE_MOST = 0.25
"""Groups of events a day apart, as ranks whose clocks count from each one's start, are kept from this share of the
largest on.
"""


def read_kineto(path: Path) -> KinetoTrace:
    """Read a Chrome trace of PyTorch's profiler, plain or compressed with gzip; an object or a bare array of events.

    An event that cannot be what it says is left out, a property or an argument ignored; the trace's remarks say so.

    Raises:
        TraceError: no such file, truncated, not JSON, another tool's trace, or nothing in it to analyse.
    """
    read = Events()
    with opened(path) as file:
        fingerprint = Fingerprint.of(file)
        properties, ignored = read_properties(_read(JsonText(path, file), read))
    events = read.found
    _leave_out_strays(events, read.refused)
    refused = read.refused.remarks({kind: len(found) for kind, found in events.items()})
    remarks = (*ignored, *refused, *read.refused.argument_remarks(), *sort_legacy(events))
    _sort_out(events)
    on_mtia = _sort_mtia(events)
    if "range" in events or "operator" in events:
        events.pop(GPU_RANGE, None)  # it repeats the CPU's
    if not (set(events) - {"thread"}):
        what = f"holds only events unlike those of PyTorch's profiler: {refused[0]}" if refused else _NOT_OURS
        raise TraceError(f"{path} {what}", RECORD)
    if not (set(events) & {"kernel", "memcpy", "memset", "operator"}):
        what = "holds neither operators nor kernels"
        if refused:
            raise TraceError(f"{path} {what}: {refused[0]}", RECORD)
        raise TraceError(f"{path} {what}", "Record again with activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]")
    _count_from_the_first(events)
    return KinetoTrace(path, fingerprint, properties, events, on_mtia, remarks)


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


def _sort_out(events: dict[str, list[Any]]) -> None:
    """Tell operators from ranges where one category holds both: an operator's name has a namespace (``aten::mm``).

    But for autograd's (``MmBackward``), and for ``detach`` beside ``aten::detach``.
    """
    unsorted = events.pop(UNSORTED, [])
    names = {event.name for event in unsorted}
    for event in unsorted:
        is_operator = "::" in event.name or f"aten::{event.name}" in names or _BACKWARD.search(event.name)
        event.kind = "operator" if is_operator else "range"
        events[event.kind].append(event)


def _sort_mtia(events: dict[str, list[Any]]) -> bool:
    """Sort what ran on an MTIA into kernels and copies, and say whether anything did."""
    found = events.pop(ON_MTIA, [])
    for event in found:
        if event.name not in _MTIA_QUEUE:
            event.kind = "memcpy" if event.direction is not None else "kernel"
            events[event.kind].append(event)
    return bool(found)


def _leave_out_strays(events: dict[str, list[Any]], refused: RefusedEvents) -> None:
    """Take out the events that start a day and more from all but a few others, in place."""
    starts = np.sort(np.array([event.start for event in _timed(events)], np.int64))
    if not len(starts) or int(starts[-1]) - int(starts[0]) < _APART_NS:
        return
    firsts = np.flatnonzero(np.diff(starts, prepend=starts[0]) >= _APART_NS)
    groups = np.split(starts, firsts)
    largest = max(map(len, groups))
    strays = [(int(group[0]), int(group[-1])) for group in groups if len(group) < _OF_THE_MOST * largest]

    def is_stray(event: Event) -> bool:
        return any(low <= event.start <= high for low, high in strays)

    for kind in [kind for kind in events if kind != "thread"]:
        for event in filter(is_stray, events[kind]):
            refused.add(kind, "a time more than a day from the others", event.name)
        events[kind] = [event for event in events[kind] if not is_stray(event)]
        if not events[kind]:
            del events[kind]


def _count_from_the_first(events: dict[str, list[Any]]) -> None:
    """Make the start of the first event 0, in place."""
    origin = min(event.start for event in _timed(events))
    for event in _timed(events):
        event.start -= origin
        event.end -= origin


def _timed(events: dict[str, list[Any]]) -> list[Event]:
    """The events that have a time: a thread's name has none."""
    return [event for kind, found in events.items() if kind != "thread" for event in found]
