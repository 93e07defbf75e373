"""What fills each step on one device: compute by class, exposed copies, exposed communication, idle time.

The four parts of a step add up to it exactly, in nanoseconds. An operation counts as far as it lies in the step on the
GPU's timeline. Where several streams work at the same time, compute comes before copies, and copies come before
communication. Compute operations that overlap share the time equally.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from nsys_analyzer.analysis.intervals import LONG_AGO, NONE, find_overlaps
from nsys_analyzer.analysis.steps.windows import Windows
from nsys_analyzer.trace.arrays import Codes, Floats, Integers, Ints
from nsys_analyzer.trace.columns import Operations

#: What an operation does. An activity hides those after it while both run.
COMPUTE, COPYING, COMMUNICATING = ACTIVITIES = range(3)


@dataclass(frozen=True)
class Fragments:
    """The operations of one device, cut at the bounds of the steps, in the order of their starts.

    Attributes:
        operation: index into the operations of the trace.
        step: position of the step that holds the fragment.
        start, end: ns.
        activity: what the operation does.
        share: the time in which it runs and nothing hides it, ns. Fragments of the same activity share the time.
    """

    operation: Ints
    step: Ints
    start: Ints
    end: Ints
    activity: Codes
    share: Floats


@dataclass(frozen=True)
class Gaps:
    """The times of the steps at which a device has nothing to do, in order.

    Attributes:
        start, end: ns.
        step: position of the step that holds the gap.
        next_operation: index of the operation that follows on the device, ``NONE`` if there is none.
    """

    start: Ints
    end: Ints
    step: Ints
    next_operation: Ints


@dataclass(frozen=True)
class Anatomy:
    """What fills each step on one device.

    Attributes:
        parts: shape (4, steps), ns: compute, exposed copies, exposed communication, idle. They add up to the steps.
        fragments: the work in the steps.
        gaps: the idle time in the steps.
    """

    parts: Ints
    fragments: Fragments
    gaps: Gaps


def dissect(windows: Windows, operations: Operations, index: Integers, activity: Codes) -> Anatomy:
    """Returns the anatomy of the steps on one device.

    Args:
        windows: the steps.
        operations: the operations of the trace.
        index: the indices of the device's operations, in the order of their starts.
        activity: shape (operations,), what each operation of the trace does.
    """
    # The parts of an operation that spans several steps have to be sorted again.
    cut = find_overlaps(windows.start, windows.end, operations.start[index], operations.end[index])
    order = np.argsort(cut[2], kind="stable")
    position, step, start, end = (column[order] for column in cut)
    operation = index[position].astype(np.int64)
    share = shares_of(start, end, activity[operation])
    fragments = Fragments(operation, step, start, end, activity[operation], share)
    key = fragments.activity.astype(np.int64) * len(windows) + fragments.step
    work_ns = np.rint(np.bincount(key, share, len(ACTIVITIES) * len(windows))).astype(np.int64)
    work_ns = work_ns.reshape(len(ACTIVITIES), -1)
    idle_ns = windows.length - work_ns.sum(axis=0)
    return Anatomy(np.vstack([work_ns, idle_ns]), fragments, _find_gaps(windows, fragments, operations, index))


def shares_of(start: Ints, end: Ints, activity: Codes) -> Floats:
    """Returns the time of each operation in which nothing hides it, ns; the starts are in order.

    All arrays have the shape (operations,). Operations of the same activity that overlap share the time.
    """
    if (start[1:] >= end[:-1]).all():
        return (end - start).astype(np.float64)
    shares = np.zeros(len(start))
    time, position = np.unique(np.concatenate([start, end]), return_inverse=True)
    first, last = position[: len(start)], position[len(start) :]
    free_ns = np.diff(time, append=time[-1:])  # from each time to the next one; 0 where something hides the rest
    for code in ACTIVITIES:
        does = activity == code
        change = np.bincount(first[does], minlength=len(time)) - np.bincount(last[does], minlength=len(time))
        running = np.cumsum(change)
        share_until = np.append(0, np.cumsum(free_ns / np.maximum(running, 1)))
        shares[does] = share_until[last[does]] - share_until[first[does]]
        free_ns[running > 0] = 0
    return shares


def latest_end_before(end: Ints) -> Ints:
    """Returns the latest end of the intervals before each interval, far in the past for the first one."""
    return np.append(np.int64(LONG_AGO), np.maximum.accumulate(end))[:-1]


def _find_gaps(windows: Windows, fragments: Fragments, operations: Operations, index: Integers) -> Gaps:
    """Finds every gap of every step: before its first work, between its work, and after its last work."""
    steps = np.arange(len(windows))
    # Each step opens with an empty interval at its start and closes with one at its end.
    no_operation = np.full(len(windows), NONE)
    start = np.concatenate([windows.start, fragments.start, windows.end])
    end = np.concatenate([windows.start, fragments.end, windows.end])
    step = np.concatenate([steps, fragments.step, steps])
    tie_order = np.repeat([0, 1, 2], [len(windows), len(fragments.start), len(windows)])
    operation = np.concatenate([no_operation, fragments.operation, no_operation])
    order = np.lexsort((tie_order, start, step))
    start, end, step, operation = start[order], end[order], step[order], operation[order]
    latest_end = np.maximum.accumulate(end) if len(end) else end
    gap = np.flatnonzero((start[1:] > latest_end[:-1]) & (step[1:] == step[:-1])) + 1
    next_operation = operation[gap]
    at_step_end = next_operation == NONE  # what comes next on the device is in a later step
    following = np.searchsorted(operations.start[index], start[gap][at_step_end])
    next_operation[at_step_end] = np.append(index, NONE)[following]
    return Gaps(latest_end[gap - 1], start[gap], step[gap], next_operation)
