"""The stack of ranges open at any moment, as a forest that is looked up in one vectorised search.

Push/pop ranges of one thread nest; start/end ranges, and ranges of several threads taken together, may cross.
A crossing range is cut where an enclosing one ends, so that the pieces nest and "opened last" stays innermost.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from nsys_analyzer.analysis.axis import Axis
from nsys_analyzer.analysis.timeline import NONE
from nsys_analyzer.trace.arrays import Bools, Ints


@dataclass(frozen=True)
class Forest:
    """Nested pieces of ranges, grouped (by thread or by process).

    Attributes:
        range_of: shape (nodes,), the range each node is (a piece of).
        parent: shape (nodes,), the enclosing node or -1. A parent's index may be above its child's.
        level: shape (nodes,), 0 for a root.
        groups: the group IDs, sorted.
        times, segment_group, innermost: the boundaries of all groups in order, and the node that is innermost
            from each boundary to the next (-1: none open).

    """

    range_of: Ints
    parent: Ints
    level: Ints
    groups: Ints
    times: Ints
    segment_group: Ints
    innermost: Ints

    def node_at(self, group: Ints, time: Ints) -> Ints:
        """The innermost node open at each (group, time): ``start <= time < end``; -1 where none is."""
        if not len(self.times) or not len(time):
            return np.full(len(time), NONE, np.int64)
        boundary_group = self.groups[self.segment_group]
        axis = Axis(boundary_group, self.times)
        place = axis.place(group, time)
        segment = np.searchsorted(axis.place(boundary_group, self.times), place, side="right") - 1
        inside = (segment >= 0) & (boundary_group[segment] == group)
        return np.where(inside, self.innermost[segment], NONE)

    def by_level(self) -> list[Ints]:
        """The nodes of each level, roots first: the order in which a property is handed down."""
        order = np.argsort(self.level, kind="stable")
        return np.split(order, np.cumsum(np.bincount(self.level))[:-1]) if len(order) else []


def build_forest(group: Ints, start: Ints, end: Ints) -> Forest:
    """Builds the forest of ranges; a range of no length holds no moment and has no node.

    Args:
        group: shape (ranges,), the thread or process of each range.
        start, end: shape (ranges,), ns.

    """
    range_of = np.flatnonzero(end > start)
    groups, code = np.unique(group[range_of], return_inverse=True)
    pieces = (code.astype(np.int64), start[range_of], end[range_of])
    order, push, partner = _match(*pieces)
    crossing = np.unique(pieces[0][order[push] % len(range_of)][_crossed(order, push, partner, len(range_of))])
    if len(crossing):
        mask = np.isin(pieces[0], crossing)
        cut = [_cut(range_of[members], start, end) for c in crossing for members in [np.flatnonzero(pieces[0] == c)]]
        extra_range, extra_start, extra_end = (np.concatenate(part) for part in zip(*cut, strict=True))
        extra_code = np.searchsorted(groups, group[extra_range])
        range_of = np.concatenate([range_of[~mask], extra_range])
        pieces = (
            np.concatenate([pieces[0][~mask], extra_code]),
            np.concatenate([pieces[1][~mask], extra_start]),
            np.concatenate([pieces[2][~mask], extra_end]),
        )
        order, push, partner = _match(*pieces)
    return _assemble(range_of, groups, pieces, order, push, partner)


def _match(code: Ints, start: Ints, end: Ints) -> tuple[Ints, Ints, Ints]:
    """Sorts pushes and pops and pairs them last in, first out.

    Returns:
        order: shape (2n,), piece index for a push, n + piece index for a pop, in time order within each group
            (at one moment pops first; the longer of two that start together is the outer one).
        push, partner: shape (n,), positions in ``order`` of each push and of the pop that closes it.

    """
    n = len(start)
    index = np.arange(n)
    is_push = np.repeat([True, False], n)
    tie_length = np.concatenate([-end, -start])
    tie_index = np.concatenate([index, -index])
    times, codes = np.concatenate([start, end]), np.concatenate([code, code])
    order = np.lexsort((tie_index, tie_length, is_push, times, codes))
    pushes = is_push[order]
    level = np.cumsum(np.where(pushes, 1, -1)) + ~pushes  # a push's depth after it, a pop's before it
    by_level = np.argsort(level, kind="stable")
    return order, by_level[0::2], by_level[1::2]


def _crossed(order: Ints, push: Ints, partner: Ints, n: int) -> Bools:
    crossed: Bools = order[push] != order[partner] - n
    return crossed


def _cut(ranges: Ints, start: Ints, end: Ints) -> tuple[Ints, Ints, Ints]:
    """Cuts the crossing ranges of one group into nested pieces: (range, start, end) of each.

    A loop over ranges, not over kernels, and only for groups whose ranges cross.
    """
    events = sorted(
        [(int(start[r]), 1, -int(end[r]), int(r)) for r in ranges]
        + [(int(end[r]), 0, -int(start[r]), int(r)) for r in ranges]
    )
    pieces: list[tuple[int, int, int, int]] = []  # opened, depth, range, closed
    stack: list[tuple[int, int]] = []
    for time, is_push, _, this in events:
        if is_push:
            stack.append((this, time))
            continue
        position = next(i for i, (r, _) in enumerate(stack) if r == this)
        closing = enumerate(stack[position:], position)
        pieces += [(opened, depth, r, time) for depth, (r, opened) in closing if opened < time]
        stack[position:] = [(r, time) for r, _ in stack[position + 1 :]]
    # Outer before inner: the order tells apart pieces that were cut at one moment and end at another.
    columns = np.array(sorted(pieces), np.int64).reshape(-1, 4)
    return columns[:, 2], columns[:, 0], columns[:, 3]


def _assemble(
    range_of: Ints, groups: Ints, pieces: tuple[Ints, Ints, Ints], order: Ints, push: Ints, partner: Ints
) -> Forest:
    """Parents, levels and the innermost node of every segment, from matched pushes and pops."""
    n = len(range_of)
    code, start, end = pieces
    piece = order[push]
    position = np.empty(n, np.int64)
    position[piece] = push
    level = np.empty(n, np.int64)
    is_push = order < n
    level[order[is_push]] = np.cumsum(np.where(is_push, 1, -1))[is_push] - 1
    # Pushes by (level, position); the parent is the last push one level up before this one.
    keys = level[piece] * (2 * n) + push
    found = np.searchsorted(keys, (level - 1) * (2 * n) + position) - 1
    parent = np.where(level > 0, piece[found] if n else found, NONE)
    innermost = np.empty(2 * n, np.int64)
    innermost[push] = piece
    innermost[partner] = parent[piece]
    is_pop = order >= n
    times = np.where(is_pop, end[order % n], start[order % n]) if n else order
    return Forest(range_of, parent, level, groups, times, code[order % n] if n else order, innermost)
