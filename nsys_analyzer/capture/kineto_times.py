"""The times of a trace: from the first event on, without those that lie far from all others."""

from __future__ import annotations

import numpy as np

from nsys_analyzer.capture.kineto_events import Event
from nsys_analyzer.capture.kineto_left_out import LeftOut

_APART_NS = 24 * 3600 * 10**9
"""A day between two events: one of them has a clock of its own, or no time at all (0)."""

_OF_THE_MOST = 0.25
"""Groups of events a day apart, as ranks whose clocks count from each one's start, are kept from this share of the
largest on.
"""


def leave_out_strays(events: dict[str, list[Event]], left_out: LeftOut) -> None:
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
            left_out.add(kind, "a time more than a day from the others", event.name)
        events[kind] = [event for event in events[kind] if not is_stray(event)]
        if not events[kind]:
            del events[kind]


def count_from_the_first(events: dict[str, list[Event]]) -> None:
    """Make the start of the first event 0, in place."""
    origin = min(event.start for event in _timed(events))
    for event in _timed(events):
        event.start -= origin
        event.end -= origin


def _timed(events: dict[str, list[Event]]) -> list[Event]:
    """The events that have a time: a thread's name has none."""
    return [event for kind, found in events.items() if kind != "thread" for event in found]
