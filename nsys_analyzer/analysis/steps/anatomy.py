"""Divides each step on one device into compute, exposed copies, exposed communication and idle time.

The four parts of a step add up exactly to its length in nanoseconds. An operation counts only while it runs between the
start and the end of the step. If several streams work at the same time, the time counts as compute if one of them
computes, else as a copy if one of them copies, else as communication. Compute operations that overlap share the time
equally.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from nsys_analyzer.analysis.intervals import LONG_AGO, NONE, find_overlaps
from nsys_analyzer.analysis.steps.windows import Windows
from nsys_analyzer.trace.arrays import Codes, Floats, Integers, Ints
from nsys_analyzer.trace.columns import Operations

#: The activities of operations. If operations of two activities run at the same time, the first of these activities
#: hides the other activity: the time counts for the first activity only.
COMPUTE, COPYING, COMMUNICATING = ACTIVITIES = range(3)


@dataclass(frozen=True)
class Fragments:
    """Fragments of one device's operations, sorted by start. An operation is divided at the start and end of each step.

    Each column has the shape (fragments,).

    Attributes:
        operation: the index in the operations of the trace.
        step: the index of the step that contains the fragment.
        start, end: the start and end of the fragment, ns.
        activity: the activity of the operation.
        exposed_ns: the time in which the fragment runs and is not hidden, ns. Fragments of the same activity that
            overlap share the time equally.
    """

    operation: Ints
    step: Ints
    start: Ints
    end: Ints
    activity: Codes
    exposed_ns: Floats


@dataclass(frozen=True)
class Gaps:
    """The gaps between the operations of a device in the steps, in order. Each column has the shape (gaps,).

    Attributes:
        start, end: the start and end of the gap, ns.
        step: the index of the step that contains the gap.
        next_operation: the index of the next operation on the device, ``NONE`` if there is none.
    """

    start: Ints
    end: Ints
    step: Ints
    next_operation: Ints


@dataclass(frozen=True)
class Anatomy:
    """The parts, the work and the gaps of each step on one device.

    Attributes:
        parts: shape (4, steps), the compute, exposed copies, exposed communication and idle time of each step, ns. They
            add up to the length of the step.
        fragments: the work in the steps.
        gaps: the idle time in the steps.
    """

    parts: Ints
    fragments: Fragments
    gaps: Gaps


def dissect_steps(windows: Windows, operations: Operations, index: Integers, activity: Codes) -> Anatomy:
    """Returns the anatomy of the steps on one device.

    Args:
        windows: the steps.
        operations: the operations of the trace.
        index: the indices of the device's operations, sorted by start.
        activity: shape (operations,), the activity of each operation of the trace.
    """
    # An operation that spans several steps makes several fragments, so the fragments have to be sorted again.
    overlaps = find_overlaps(windows.start, windows.end, operations.start[index], operations.end[index])
    order = np.argsort(overlaps[2], kind="stable")
    position, step, start, end = (column[order] for column in overlaps)
    operation = index[position].astype(np.int64)
    exposed_ns = measure_exposed_ns(start, end, activity[operation])
    fragments = Fragments(operation, step, start, end, activity[operation], exposed_ns)
    part_of_step = fragments.activity.astype(np.int64) * len(windows) + fragments.step
    work_ns = np.rint(np.bincount(part_of_step, exposed_ns, len(ACTIVITIES) * len(windows))).astype(np.int64)
    work_ns = work_ns.reshape(len(ACTIVITIES), -1)
    idle_ns = windows.length - work_ns.sum(axis=0)
    return Anatomy(np.vstack([work_ns, idle_ns]), fragments, _find_gaps(windows, fragments, operations, index))


def measure_exposed_ns(start: Ints, end: Ints, activity: Codes) -> Floats:
    """Returns the time in which each operation runs and is not hidden, ns.

    All arrays have the shape (operations,), and must be sorted by start. Operations of the same activity that overlap
    share the time equally.
    """
    if (start[1:] >= end[:-1]).all():
        return (end - start).astype(np.float64)
    exposed_ns = np.zeros(len(start))
    time, position = np.unique(np.concatenate([start, end]), return_inverse=True)
    start_position, end_position = position[: len(start)], position[len(start) :]
    # For each element of ``time``: the time to the next element, or 0 if an activity earlier in ``ACTIVITIES`` runs.
    free_ns = np.diff(time, append=time[-1:])
    for activity_code in ACTIVITIES:
        has_activity = activity == activity_code
        start_counts = np.bincount(start_position[has_activity], minlength=len(time))
        running_count = np.cumsum(start_counts - np.bincount(end_position[has_activity], minlength=len(time)))
        share_until = np.append(0, np.cumsum(free_ns / np.maximum(running_count, 1)))
        exposed_ns[has_activity] = share_until[end_position[has_activity]] - share_until[start_position[has_activity]]
        free_ns[running_count > 0] = 0
    return exposed_ns


def find_latest_earlier_ends(end: Ints) -> Ints:
    """Returns, for each interval, the latest end of the earlier intervals; ``LONG_AGO`` for the first interval."""
    return np.append(np.int64(LONG_AGO), np.maximum.accumulate(end))[:-1]


def _find_gaps(windows: Windows, fragments: Fragments, operations: Operations, index: Integers) -> Gaps:
    """Finds the gaps of every step: before its first operation, between operations, and after its last operation."""
    steps = np.arange(len(windows))
    # Add an empty interval at the start and at the end of each step, so that every gap lies between two intervals.
    no_operations = np.full(len(windows), NONE)
    start = np.concatenate([windows.start, fragments.start, windows.end])
    end = np.concatenate([windows.start, fragments.end, windows.end])
    step = np.concatenate([steps, fragments.step, steps])
    tie_order = np.repeat([0, 1, 2], [len(windows), len(fragments.start), len(windows)])
    operation = np.concatenate([no_operations, fragments.operation, no_operations])
    order = np.lexsort((tie_order, start, step))
    start, end, step, operation = start[order], end[order], step[order], operation[order]
    latest_end = np.maximum.accumulate(end) if len(end) else end
    gap = np.flatnonzero((start[1:] > latest_end[:-1]) & (step[1:] == step[:-1])) + 1
    next_operation = operation[gap]
    at_step_end = next_operation == NONE  # no operation of the step follows on the device
    next_index = np.searchsorted(operations.start[index], start[gap][at_step_end])
    next_operation[at_step_end] = np.append(index, NONE)[next_index]
    return Gaps(latest_end[gap - 1], start[gap], step[gap], next_operation)
