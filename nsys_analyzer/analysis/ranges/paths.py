"""The names of the ranges around each operation, outermost first."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain, islice

import numpy as np

from nsys_analyzer.analysis.attribution.attribution import Attribution
from nsys_analyzer.analysis.intervals import NONE, Axis, holds_any
from nsys_analyzer.trace.arrays import Ints, dense_codes, distinct, distinct_rows
from nsys_analyzer.trace.columns import Ranges
from nsys_analyzer.trace.trace import Trace

SEPARATOR = " / "
#: Of a stack deeper than twice this, the outermost and the innermost ranges are named, and dots stand between.
_NAMED_AT_AN_END = 32
_DOTS = "…"

Stack = tuple[int, ...]


def range_paths(trace: Trace, attribution: Attribution) -> tuple[Ints, list[str]]:
    """The range path of each operation: codes of shape (operations,), and the paths; the first is the empty one."""
    ranges, captures = trace.ranges, attribution.captures
    captured = np.full((2, len(attribution.launch)), NONE, np.int64)
    captured[:, captures.operation] = captures.thread, captures.time
    thread = np.concatenate([attribution.inherited, attribution.thread, captured[0]])
    time = np.concatenate([attribution.time, attribution.time, captured[1]])
    of_moment, stacks = open_stacks(ranges, thread, time)
    three_of = of_moment.reshape(3, len(attribution.launch))
    first, codes = distinct_rows(*three_of)
    # Different combinations may read the same; a categorical's categories must not.
    texts = [
        SEPARATOR.join(_path(ranges, *(stacks[code] for code in three))) for three in three_of[:, first].T.tolist()
    ]
    paths, recode = np.unique(np.array(["", *texts], np.object_), return_inverse=True)
    return recode[1:][codes], paths.tolist()


def open_stacks(ranges: Ranges, thread: Ints, time: Ints) -> tuple[Ints, list[Stack]]:
    """The ranges open on each (thread, time), in the order in which they were opened, the longer of two first.

    Returns:
        Codes of shape (moments,), and the stacks they stand for, as indices of ranges; the first is the empty one. A
        stack that is too deep to be read holds its two ends, with ``NONE`` between them.
    """
    # A range without a moment in it need not be opened: most operators launch nothing.
    index = np.flatnonzero(holds_any(thread, time, ranges.thread, ranges.start, ranges.end))
    held = ranges.select(index)
    axis = Axis(held.thread, held.start, held.end)
    opened, closed = axis.place(held.thread, held.start), axis.place(held.thread, held.end)
    boundaries = distinct(np.concatenate([opened, closed]))
    # What is open is the same from one boundary to the next; before the first one, and off the axis: NONE.
    segment = np.searchsorted(boundaries, axis.place(thread, time), side="right") - 1
    used, codes = dense_codes(segment)
    at = boundaries[used[used != NONE]].tolist()
    order = np.lexsort((index, -closed, opened))
    stacks: dict[Stack, int] = {(): 0}
    sweep = _sweep(index[order].tolist(), opened[order].tolist(), closed[order].tolist(), at)
    found = [*[0] * (len(used) - len(at)), *(stacks.setdefault(stack, len(stacks)) for stack in sweep)]
    return np.array(found, np.int64)[codes], list(stacks)


def _sweep(index: list[int], opened: list[int], closed: list[int], boundaries: list[int]) -> Iterator[Stack]:
    """The stack at each of some boundaries, in their order; the ranges come in the order in which they open."""
    closing = sorted(range(len(index)), key=closed.__getitem__)
    stack: dict[int, None] = {}  # in the order in which they were opened, whatever is closed in between
    next_open = next_close = 0
    for boundary in boundaries:
        while next_open < len(index) and opened[next_open] <= boundary:
            stack[index[next_open]] = None
            next_open += 1
        while next_close < len(closing) and closed[closing[next_close]] <= boundary:
            del stack[index[closing[next_close]]]
            next_close += 1
        yield _ends(stack)


def _ends(stack: dict[int, None]) -> Stack:
    if len(stack) <= 2 * _NAMED_AT_AN_END:
        return tuple(stack)
    innermost = list(islice(reversed(stack), _NAMED_AT_AN_END))
    return (*islice(stack, _NAMED_AT_AN_END), NONE, *reversed(innermost))


def _path(ranges: Ranges, outer: Stack, launching: Stack, captured: Stack) -> list[str]:
    """The names of a combination of the inherited, the launching and the captured stack.

    A capture's stack repeats names of the replay's (step, forward): what it adds stands below their last one.
    """
    stack = [_name(ranges, one) for one in chain(outer, launching)]
    seen, added = set(stack), [_name(ranges, one) for one in captured]
    last = max((i for i, name in enumerate(added) if name in seen), default=-1)
    return [*stack, *added[last + 1 :]]


def _name(ranges: Ranges, index: int) -> str:
    return _DOTS if index == NONE else ranges.names[ranges.name[index]]
