"""Slices of tracks: what lies beside what, as a track can show it."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from nsys_analyzer.export.perfetto.protobuf import Parts
from nsys_analyzer.trace.arrays import Bools, Ints, SmallInts

#: Layers of slices inside each other that are looked at one by one.
_LAYERS = 100


@dataclass(frozen=True)
class Arguments:
    """What the details of slices say.

    Attributes:
        texts: the text arguments of each distinct combination, encoded, and ``combination`` that of each slice.
        numbers: by the ID of an argument's name, its value for each slice, and where there is one.
    """

    texts: Parts
    combination: SmallInts
    numbers: dict[int, tuple[Ints, Bools]]


@dataclass(frozen=True)
class Slices:
    """Slices of one or more tracks; each array has shape (slices,).

    Attributes:
        start, end: ns.
        track: the ID of its track.
        name, category: IDs of strings.
        flow: the ID of what leads from a launch to its operations, 0 for none.
    """

    start: Ints
    end: Ints
    track: Ints
    name: Ints
    category: Ints
    flow: Ints
    arguments: Arguments | None = field(default=None)

    def __len__(self) -> int:
        return len(self.start)


def lanes(start: Ints, end: Ints, *, nested: bool) -> Ints:
    """The number of the lane of each slice, from 0: in a lane none crosses another, or overlaps it if not ``nested``.

    A slice comes into the first lane that can take it, those that begin first and, of these, last longest first.
    """
    order = np.lexsort((-end, start))
    lane = np.zeros(len(start), np.int64)
    first, last = start[order], end[order]
    if (first[1:] >= last[:-1]).all() or (nested and _are_nested(first, last)):
        return lane
    stacks: list[list[int]] = [[]]  # of each lane, the ends of what is open
    found = []
    for begun, ended in zip(first.tolist(), last.tolist(), strict=True):
        number = 0
        while not _takes(stacks[number], begun, ended, nested):
            number += 1
            if number == len(stacks):
                stacks.append([])
        stacks[number].append(ended)
        found.append(number)
    lane[order] = found
    return lane


def _are_nested(first: Ints, last: Ints) -> bool:
    """Whether it is known that no slices cross, in the order of :func:`lanes`: layer by layer from outside."""
    for _ in range(_LAYERS):
        if not len(first):
            return True
        reached = np.maximum.accumulate(np.append(first[0] - 1, last))[:-1]
        outer = last > reached  # what ends no later than one that began before it lies inside
        if (first[outer][1:] < last[outer][:-1]).any():
            return False
        first, last = first[~outer], last[~outer]
    return False


def _takes(stack: list[int], begun: int, ended: int, nested: bool) -> bool:
    """Whether a lane can take a slice, what has ended in it until then removed."""
    while stack and stack[-1] <= begun:
        stack.pop()
    return not stack or (nested and stack[-1] >= ended)
