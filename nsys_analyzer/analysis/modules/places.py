"""The call of a module that a moment of a thread belongs to: the one open then or, in backward, that of the forward.

An operator of a backward pass carries the sequence number of the operator of the forward pass that it differentiates,
and belongs to the call around that one.
"""

from __future__ import annotations

import re
from functools import cached_property

import numpy as np

from nsys_analyzer.analysis.attribution.attribution import timeline
from nsys_analyzer.analysis.intervals.timeline import NONE, Timeline
from nsys_analyzer.analysis.modules.calls import Calls, is_call
from nsys_analyzer.analysis.ranges.instances import AttributedTrace
from nsys_analyzer.trace.arrays import Ints
from nsys_analyzer.trace.columns import process_of

#: What autograd's engine runs: the operators of a backward pass.
_OF_BACKWARD = re.compile(
    r"autograd::engine::evaluate_function.*|(?:torch::autograd::)?\w*(?:Backward\d*|AccumulateGrad)"
)
#: Adding up a gradient follows the operator that computed it, and is part of its work.
_ACCUMULATES = re.compile(r".*AccumulateGrad")


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
        return self._call_of_range[np.append(index, NONE)[lines.at(thread, time)]]

    @cached_property
    def _open(self) -> tuple[Timeline, Ints]:
        return timeline(self._attributed.trace.ranges, self._mask, latest=True)

    def _by_sequence(self, thread: Ints, time: Ints) -> Ints:
        """The call around the forward operator of the backward one that is open at each (thread, time)."""
        found = np.full(len(thread), NONE, np.int64)
        operators = self._attributed.trace.operators
        names = operators.names
        backward = np.array([*(bool(_OF_BACKWARD.fullmatch(name)) for name in names), False])[operators.name]
        if not len(thread) or not backward.any():
            return found
        number = self._numbers(backward)
        index = np.flatnonzero(backward & (number != NONE))
        lines = Timeline(operators.thread[index], operators.start[index], operators.end[index], latest=True)
        inside = np.append(index, NONE)[lines.at(thread, time)]
        known = np.flatnonzero(inside != NONE)
        forward = self._forward_operators(backward, process_of(thread[known]), number[inside[known]], time[known])
        hit = forward != NONE
        found[known[hit]] = self._at(operators.thread[forward[hit]], operators.start[forward[hit]])
        return found

    def _numbers(self, backward: Ints) -> Ints:
        """The sequence number of each operator; what adds up gradients has that of the node before it."""
        operators = self._attributed.trace.operators
        adds = np.array([*(bool(_ACCUMULATES.fullmatch(name)) for name in operators.names), False])[operators.name]
        number = np.where(adds, NONE, operators.sequence)
        mine = np.flatnonzero(backward)
        mine = mine[np.lexsort((operators.start[mine], operators.thread[mine]))]
        known = np.where(number[mine] != NONE, np.arange(len(mine)), NONE)
        last = np.maximum.accumulate(known)
        before = np.where((last != NONE) & (operators.thread[mine] == operators.thread[mine[last]]), mine[last], NONE)
        number = np.append(number, NONE)
        number[mine] = np.where(adds[mine], number[before], number[mine])
        return number[:-1]

    def _forward_operators(self, backward: Ints, process: Ints, number: Ints, time: Ints) -> Ints:
        """The operator that made the node of each number: the last one before that carries it, -1 for none."""
        operators = self._attributed.trace.operators
        index = np.flatnonzero(~backward & (operators.sequence >= 0))
        keys = np.stack([process_of(operators.thread[index]), operators.sequence[index]])
        distinct, key = np.unique(keys, axis=1, return_inverse=True)
        key = key.ravel()
        order = np.lexsort((operators.start[index], key))
        index, key = index[order], key[order]
        wanted = np.full(len(number), NONE, np.int64)
        place = {pair: code for code, pair in enumerate(zip(*distinct.tolist(), strict=True))}
        pairs, of_pair = np.unique(np.stack([process, number]), axis=1, return_inverse=True)
        wanted = np.array([place.get(pair, NONE) for pair in zip(*pairs.tolist(), strict=True)], np.int64)[
            of_pair.ravel()
        ]
        # Moments of one key lie behind each other: the operators of a key that started before, counted.
        rank = np.argsort(np.argsort(np.concatenate([operators.start[index], time]), kind="stable"), kind="stable")
        span = len(rank) + 1
        at = np.searchsorted(key * span + rank[: len(index)], wanted * span + rank[len(index) :]) - 1
        hit = (at >= 0) & (wanted != NONE)
        hit[hit] = key[at[hit]] == wanted[hit]
        return np.where(hit, index[np.where(hit, at, 0)] if len(index) else NONE, NONE)
