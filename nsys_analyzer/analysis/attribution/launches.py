"""Which API call launched each GPU operation: matched by process and correlation ID, one launch each."""

from __future__ import annotations

import numpy as np

from nsys_analyzer.analysis.intervals.axis import Axis
from nsys_analyzer.analysis.intervals.timeline import any_open
from nsys_analyzer.trace.arrays import Bools, Ints, distinct
from nsys_analyzer.trace.columns import BEGIN_CAPTURE, END_CAPTURE, LAUNCH, Launches, Operations, process_of


def match_launches(operations: Operations, launches: Launches) -> Ints:
    """The launch of each operation.

    A correlation ID is unique within one process only, so the process is part of the key. Where one pair has
    more than one row (a runtime call and the driver call inside it), the launch is the earliest.

    Returns:
        Shape (operations,): index into ``launches``, -1 where the operation has no launch row.
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
    """Kernel launches that have no GPU operation: activity records the profiler dropped, or a cut-off capture.

    A launch while its process captures a graph runs nothing and is not counted; nor is a driver call inside the
    runtime call that launched the kernel, which has the same correlation ID.

    Args:
        launches: the API calls.
        launch: the launch of each operation, as :func:`match_launches` gives it.

    Returns:
        Shape (launches,): True for a call that launches a kernel none of the operations belongs to.
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
    """True for the calls while their process captures a graph: any thread may launch into a capture.

    A begin without a later end, or an end without a begin, covers nothing.
    """
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
