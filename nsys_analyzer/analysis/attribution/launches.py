"""The API call that launched each GPU operation: matched by process and correlation ID, one launch each."""

from __future__ import annotations

from typing import Any

import numpy as np

from nsys_analyzer.analysis.intervals import NONE, Axis, any_open
from nsys_analyzer.trace.arrays import Bools, Ints, SmallInts, blocks, distinct
from nsys_analyzer.trace.columns import BEGIN_CAPTURE, END_CAPTURE, LAUNCH, Launches, Operations, process_of

_SPARSE = 4  # a table by key may be this many times longer than the calls


def match_launches(operations: Operations, launches: Launches) -> SmallInts:
    """Shape (operations,): the index of each operation's launch, -1 without a launch row.

    A correlation ID is unique within one process. Where several calls have one (a runtime call and the driver call
    inside it), the launch is the earliest.
    """
    found = np.full(len(operations), NONE, np.int32)
    if not len(launches.start):
        return found
    axis, keys = _axis(launches)
    earliest = _Earliest(keys, launches.start)
    for block in blocks(len(found)):
        found[block] = earliest.at(axis.place(operations.process[block], operations.correlation[block]))
    return found


class _Earliest:
    """The earliest of the calls that have a key (a place on an axis).

    Correlation IDs are counted up, so that a table by key is little longer than the calls; where it is not, they are
    sorted.
    """

    def __init__(self, keys: Ints, start: Ints) -> None:
        self._first = int(keys.min())
        length = int(keys.max()) - self._first + 1
        self._is_table = length <= _SPARSE * len(keys)
        if not self._is_table:
            self._call = np.lexsort((start, keys)).astype(np.int32)
            self._keys = keys[self._call]
            return
        self._call = np.full(length, NONE, np.int32)
        in_order = (start[1:] >= start[:-1]).all()
        order = None if in_order else np.argsort(start, kind="stable")
        for block in reversed([*blocks(len(keys))]):  # of several calls the one that is written last counts
            later = np.arange(*block.indices(len(keys))) if order is None else order[block]
            self._call[keys[later[::-1]] - self._first] = later[::-1]

    def at(self, key: Ints) -> SmallInts:
        """The call of each key, -1 without one."""
        if self._is_table:
            position = key - self._first
            known = (position >= 0) & (position < len(self._call))
            return np.where(known, self._call[np.where(known, position, 0)], NONE)
        found = np.searchsorted(self._keys, key).clip(max=len(self._keys) - 1)  # the first of equals is the earliest
        return np.where(self._keys[found] == key, self._call[found], NONE)


def dropped_launches(launches: Launches, *launch: Any) -> Bools:
    """Shape (launches,): True for a kernel launch without a GPU operation: dropped records, or a cut-off capture.

    A launch while its process captures a graph runs nothing and is not counted; nor is a driver call inside the
    runtime call that launched the kernel, which has the same correlation ID. ``launch`` is that of each operation, in
    one array or several.
    """
    matched = np.zeros(len(launches.start) + 1, np.bool_)  # the last entry serves operations without a launch
    for some in launch:
        matched[some] = True
    matched = matched[:-1]
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
    axis = Axis(process_of(distinct(launches.thread)), launches.correlation)
    return axis, axis.place(process_of(launches.thread), launches.correlation)
