"""The call of a module that a moment of a thread belongs to: the one open then or, in backward, that of the forward.

An operator of a backward pass carries the sequence number of the operator of the forward pass that it differentiates,
and belongs to the call around that one.
"""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import replace
from functools import cached_property

import numpy as np

from nsys_analyzer.analysis.attribution.attribution import autograd_threads, timeline
from nsys_analyzer.analysis.intervals.timeline import NONE, Timeline
from nsys_analyzer.analysis.modules.calls import Calls, is_call
from nsys_analyzer.analysis.ranges.instances import AttributedTrace
from nsys_analyzer.trace.arrays import Bools, Ints, distinct
from nsys_analyzer.trace.columns import Operators, process_of

#: A node of autograd's graph as it runs, and one that only adds up a gradient: it is part of the work before it.
_NODE = re.compile(
    r"(?:autograd::engine::evaluate_function: .*|(?:torch::autograd::)?(?:\w*Backward\w*|AccumulateGrad|CopySlices))"
)
_CHECKPOINT = re.compile(r".*\bCheckpointFunctionBackward")
_ADDS_UP = re.compile(r".*AccumulateGrad")


class Places:
    """The calls of modules in a trace by moment."""

    def __init__(self, attributed: AttributedTrace, calls: Calls) -> None:
        self._attributed, self._calls = attributed, calls
        ranges = attributed.trace.ranges
        self._mask = is_call(calls, len(ranges))
        self._call_of_range = np.full(len(ranges) + 1, NONE, np.int64)  # the last entry serves index -1
        self._call_of_range[calls.range] = np.arange(len(calls.range))

    def of_operations(self, operations: Ints) -> Ints:
        """The call that each of some GPU operations belongs to, -1 for none."""
        attribution = self._attributed.attribution
        found = self._call_of_range[attribution.innermost(self._mask, operations)]
        lacking = np.flatnonzero(found == NONE)
        thread, time = attribution.thread[operations[lacking]], attribution.time[operations[lacking]]
        found[lacking] = self._by_sequence(thread, time)
        return found

    def of_operators(self, operators: Ints) -> Ints:
        """The call that each of some operators of PyTorch belongs to, -1 for none."""
        every = self._attributed.trace.operators
        thread, time = every.thread[operators], every.start[operators]
        found = self._at(thread, time)
        lacking = np.flatnonzero(found == NONE)
        found[lacking] = self._by_sequence(thread[lacking], time[lacking])
        return found

    def _at(self, thread: Ints, time: Ints) -> Ints:
        lines, index = self._open
        found: Ints = self._call_of_range[np.append(index, NONE)[lines.at(thread, time)]]
        return found

    @cached_property
    def _open(self) -> tuple[Timeline, Ints]:
        return timeline(self._attributed.trace.ranges, self._mask, latest=True)

    def _by_sequence(self, thread: Ints, time: Ints) -> Ints:
        """The call around the operator that made the node which runs at each (thread, time)."""
        found = np.full(len(thread), NONE, np.int64)
        nodes, forward = self._nodes, self._forward
        if not len(thread) or not len(nodes) or not len(forward):
            return found
        running = Timeline(nodes.thread, nodes.start, nodes.end, latest=True).at(thread, time)
        # A checkpoint's node runs a backward pass of its own, over nodes that this thread has numbered.
        index = np.flatnonzero(_named(nodes, _CHECKPOINT))
        around = Timeline(nodes.thread[index], nodes.start[index], nodes.end[index], latest=False).at(thread, time)
        running = np.where(around == NONE, running, np.append(index, NONE)[around])
        for process in distinct(process_of(forward.thread)):
            made = forward.select(process_of(forward.thread) == process)
            made = made.select(made.thread == Counter(made.thread.tolist()).most_common(1)[0][0])
            mine = np.flatnonzero((running != NONE) & (process_of(thread) == process))
            number = nodes.sequence[running[mine]]
            last = np.minimum(
                np.searchsorted(made.sequence, number, side="right"), np.searchsorted(made.start, time[mine])
            )
            mine, last = mine[last > 0], last[last > 0] - 1
            found[mine] = self._at(made.thread[last], made.start[last])
        return found

    @cached_property
    def _nodes(self) -> Operators:
        """The nodes of autograd as they run, and what the engine opens around each.

        The engine's range has the number of the node inside, what adds up a gradient that of the node before it.
        """
        operators = self._attributed.trace.operators
        nodes = operators.select(_named(operators, _NODE))
        nodes = nodes.select(np.lexsort((-nodes.end, nodes.start, nodes.thread)))
        if not len(nodes):
            return nodes
        inside = np.append(nodes.start[1:] < nodes.end[:-1], False) & (np.roll(nodes.thread, -1) == nodes.thread)
        number = np.where(inside & (nodes.sequence < 0), np.roll(nodes.sequence, -1), nodes.sequence)
        last = np.maximum.accumulate(np.where(number >= 0, np.arange(len(nodes)), NONE))
        known = (last != NONE) & (nodes.thread == nodes.thread[last]) & ((number >= 0) | _named(nodes, _ADDS_UP))
        return replace(nodes, sequence=np.where(known, number[last], NONE)).select(known)

    @cached_property
    def _forward(self) -> Operators:
        """What makes nodes, in order of start: operators with a number on a thread that is not autograd's own."""
        operators = self._attributed.trace.operators
        makes = (operators.sequence >= 0) & ~_named(operators, _NODE)
        makes &= ~np.isin(operators.thread, autograd_threads(self._attributed.trace))
        found = operators.select(makes)
        return found.select(np.argsort(found.start, kind="stable"))


def _named(operators: Operators, pattern: re.Pattern[str]) -> Bools:
    """True for the operators whose name matches."""
    matches = np.array([*(bool(pattern.fullmatch(name)) for name in operators.names), False])
    chosen: Bools = matches[operators.name]
    return chosen
