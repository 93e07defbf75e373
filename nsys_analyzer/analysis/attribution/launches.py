"""The API call that launched each GPU operation: matched by process and correlation ID, one launch each."""

from __future__ import annotations

import numpy as np

from nsys_analyzer.analysis.intervals.axis import Axis
from nsys_analyzer.analysis.intervals.timeline import any_open
from nsys_analyzer.trace.arrays import Bools, Ints, distinct
from nsys_analyzer.trace.columns import BEGIN_CAPTURE, END_CAPTURE, LAUNCH, Launches, Operations, process_of


def match_launches(operations: Operations, launches: Launches) -> Ints:
    """Shape (operations,): the index of each operation's launch, -1 without a launch row.

    A correlation ID is unique within one process. Where several calls have one (a runtime call and the driver call
    inside it), the launch is the earliest.
    """
    if not len(launches.start):
        return np.full(len(operations), -1, np.int64)
    axis, keys = _axis(launches)
    order = np.lexsort((launches.start, keys))
    ordered = keys[order]
    wanted = axis.place(operations.process, operations.correlation)
    found = np.searchsorted(ordered, wanted).clip(max=len(ordered) - 1)  # the first of equals is the earliest
    return np.where(ordered[found] == wanted, order[found], -1)


def dropped_launches(launches: Launches, launch: Ints) -> Bools:
    """Shape (launches,): True for a kernel launch without a GPU operation: dropped records, or a cut-off capture.

    A launch while its process captures a graph runs nothing and is not counted; nor is a driver call inside the
    runtime call that launched the kernel, which has the same correlation ID. ``launch`` is that of each operation.
    """
    matched = np.zeros(len(launches.start), np.bool_)
    matched[launch[launch >= 0]] = True
    dropped: Bools = (launches.call == LAUNCH) & ~matched
    if dropped.any():
        _, keys = _axis(launches)
        dropped[dropped] = ~np.isin(keys[dropped], keys[matched])
        dropped &= ~_in_capture(launches)
    return dropped


def _in_capture(launches: Launches) -> Bools:
    """True for the calls while their process captures a graph: from a begin to the next end, on any thread."""
    process = process_of(launches.thread)
    group, start, end = [], [], []
    for one in distinct(process):
        begins, ends = (
            np.sort(launches.start[(process == one) & (launches.call == call)]) for call in (BEGIN_CAPTURE, END_CAPTURE)
        )
        closing = np.searchsorted(ends, begins, side="right")
        closed = closing < len(ends)
        group.append(np.full(closed.sum(), one))
        start.append(begins[closed])
        end.append(ends[closing[closed]])
    return any_open(np.concatenate(group), np.concatenate(start), np.concatenate(end), process, launches.start)


def _axis(launches: Launches) -> tuple[Axis, Ints]:
    """The axis of (process, correlation ID), and the place of each launch on it."""
    process = process_of(launches.thread)
    axis = Axis(process, launches.correlation)
    return axis, axis.place(process, launches.correlation)
