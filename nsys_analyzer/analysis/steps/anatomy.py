"""What fills each step on one device: compute by class, exposed copies, exposed communication, idle.

The four parts of a step add up to it exactly, in nanoseconds. Work is clipped to the step on the GPU's timeline. Where
several streams work at once, compute comes before copies, and these before communication; of compute that overlaps,
each operation has an equal share of a moment.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from nsys_analyzer.analysis.intervals import find_overlaps
from nsys_analyzer.analysis.steps.windows import Windows
from nsys_analyzer.trace.arrays import Codes, Floats, Integers, Ints
from nsys_analyzer.trace.columns import Operations

#: What an operation does, in the order in which one hides the other.
COMPUTE, COPYING, COMMUNICATING = ACTIVITIES = range(3)


@dataclass(frozen=True)
class Fragments:
    """The operations of one device cut at the bounds of the steps, in the order of their starts.

    Attributes:
        operation: index into the operations.
        window: the step that each lies in.
        share: ns in which it works and nothing that hides it does, shared with others of its rank.
    """

    operation: Ints
    window: Ints
    start: Ints
    end: Ints
    rank: Codes
    share: Floats


@dataclass(frozen=True)
class Gaps:
    """The stretches of the steps in which a device has nothing to do, in order; ``next`` is the operation behind each.

    ``next`` is -1 where nothing follows on the device.
    """

    start: Ints
    end: Ints
    window: Ints
    next: Ints


@dataclass(frozen=True)
class Anatomy:
    """What fills each step on one device.

    Attributes:
        parts: shape (4, steps), ns: compute, exposed copies, exposed communication, idle; they add up to the steps.
    """

    parts: Ints
    fragments: Fragments
    gaps: Gaps


def dissect(windows: Windows, operations: Operations, chosen: Integers, rank: Codes) -> Anatomy:
    """Returns the anatomy of the steps on one device.

    Args:
        windows: the steps.
        operations: those of the trace.
        chosen: the indices of the device's operations, in the order of their starts.
        rank: shape (operations,), ``COMPUTE``, ``COPYING`` or ``COMMUNICATING`` for each of all operations.
    """
    fragments = _fragments(windows, operations, chosen, rank)
    key = fragments.rank.astype(np.int64) * len(windows) + fragments.window
    shares = np.bincount(key, fragments.share, len(ACTIVITIES) * len(windows))
    works = np.rint(shares).astype(np.int64).reshape(len(ACTIVITIES), -1)
    idle = windows.end - windows.start - works.sum(axis=0)
    return Anatomy(np.vstack([works, idle]), fragments, _gaps(windows, fragments, operations, chosen))


def _fragments(windows: Windows, operations: Operations, chosen: Integers, rank: Codes) -> Fragments:
    parts = find_overlaps(windows.start, windows.end, operations.start[chosen], operations.end[chosen])
    order = np.argsort(parts[2], kind="stable")  # the later parts of what spans several steps
    index, window, start, end = (column[order] for column in parts)
    operation = chosen[index].astype(np.int64)
    return Fragments(operation, window, start, end, rank[operation], shares_of(start, end, rank[operation]))


def shares_of(start: Ints, end: Ints, rank: Codes) -> Floats:
    """Shape (operations,): the share of each in the moments in which nothing hides it, ns; the starts are in order."""
    if (start[1:] >= end[:-1]).all():
        return (end - start).astype(np.float64)
    shares = np.zeros(len(start))
    time, place = np.unique(np.concatenate([start, end]), return_inverse=True)
    first, last = place[: len(start)], place[len(start) :]
    left = np.diff(time, append=time[-1:])  # of the moments from each time on, those that nothing hides
    for one in ACTIVITIES:
        mine = rank == one
        count = np.cumsum(np.bincount(first[mine], minlength=len(time)) - np.bincount(last[mine], minlength=len(time)))
        until = np.append(0, np.cumsum(left / np.maximum(count, 1)))
        shares[mine] = until[last[mine]] - until[first[mine]]
        left[count > 0] = 0
    return shares


def reached_before(end: Ints) -> Ints:
    """The latest end of the intervals before each; far in the past for the first."""
    return np.append(np.int64(-(2**62)), np.maximum.accumulate(end))[:-1]


def _gaps(windows: Windows, fragments: Fragments, operations: Operations, chosen: Integers) -> Gaps:
    """Every gap of every step: before its first work, between work, and behind its last."""
    steps = np.arange(len(windows))
    # Each step opens with an empty interval at its start and closes with one at its end.
    start = np.concatenate([windows.start, fragments.start, windows.end])
    end = np.concatenate([windows.start, fragments.end, windows.end])
    window = np.concatenate([steps, fragments.window, steps])
    place = np.concatenate([np.full(len(windows), 0), np.full(len(fragments.start), 1), np.full(len(windows), 2)])
    owner = np.concatenate([np.full(len(windows), -1), fragments.operation, np.full(len(windows), -1)])
    order = np.lexsort((place, start, window))
    start, end, window, owner, place = start[order], end[order], window[order], owner[order], place[order]
    reached = np.maximum.accumulate(end) if len(end) else end
    gap = np.flatnonzero((start[1:] > reached[:-1]) & (window[1:] == window[:-1])) + 1
    following = owner[gap]
    behind = following == -1  # the gap ends with its step: what comes next on the device is behind it
    following[behind] = np.append(chosen, -1)[np.searchsorted(operations.start[chosen], start[gap][behind])]
    return Gaps(reached[gap - 1], start[gap], window[gap], following)
