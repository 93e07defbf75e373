"""Which ranges each GPU operation belongs to: those open at the moment its launch starts.

On the launching thread that is the thread's own stack. A thread with nothing open of a phase (autograd's
``pt_autograd_N``) inherits the stack of the thread that waits for it, its own ranges nested below. Nothing is
attributed by GPU time, and nothing by the launching thread alone.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from nsys_analyzer.analysis.forest import NONE, Forest, build_forest
from nsys_analyzer.analysis.graphs import captured_nodes
from nsys_analyzer.analysis.launches import match_launches
from nsys_analyzer.analysis.phases import STEP, PhaseNames
from nsys_analyzer.trace.arrays import Bools, Ints
from nsys_analyzer.trace.trace import GRAPH, Ranges, Trace, process_of

#: How an operation was attributed, in the order of ``Attribution.how``'s codes.
HOW = ("none", "same thread", "other thread", "graph")
UNATTRIBUTED, SAME_THREAD, OTHER_THREAD, GRAPH_REPLAY = range(4)

_AUTOGRAD_THREAD = "pt_autograd"


class RangeRoles:
    """What each range of a trace is: a phase, a step, warm-up, a part of attention, or none of these."""

    def __init__(self, ranges: Ranges, names: PhaseNames) -> None:
        self.names = names
        self._key_of_name = [names.key_of(name) for name in ranges.names]
        self._name = ranges.name

    def mask(self, *keys: str) -> Bools:
        """Shape (ranges,): True for the ranges whose role is one of these keys."""
        chosen = np.array([key in keys for key in self._key_of_name], np.bool_)
        return chosen[self._name] if len(chosen) else np.zeros(len(self._name), np.bool_)

    @cached_property
    def leaf(self) -> Bools:
        """True for the ranges of a phase other than the step."""
        return self.mask(*self.names.leaf_phases)

    @cached_property
    def any_phase(self) -> Bools:
        """True for the ranges of a phase, the step included."""
        return self.leaf | self.mask(STEP)


@dataclass(frozen=True)
class Attribution:
    """The ranges of each operation, as nodes of one forest of all threads.

    Attributes:
        forest: the forest of ranges by thread.
        launch: shape (operations,), index of the launch, or -1.
        outer: the node inherited from another thread, or -1.
        own: the node open on the launching thread, or -1; it nests below ``outer``.
        captured: the node open where a graph's node was captured, or -1; it nests below both.
        how: code into ``HOW``.
        ambiguous: True where several threads of the process had phases open.

    """

    forest: Forest
    launch: Ints
    outer: Ints
    own: Ints
    captured: Ints
    how: Ints
    ambiguous: Bools

    def enclosing(self, table: Ints) -> Ints:
        """The range each operation has in a node table, looked up in the inherited stack first, then its own.

        Args:
            table: shape (nodes,), such as ``forest.outermost(phases)``.

        Returns:
            Shape (operations,): index of a range, or -1.

        """
        return self._first_of(table, self.outer, self.own)

    def innermost(self, table: Ints) -> Ints:
        """The same, looked up from the inside: the graph's capture, the own stack, the inherited one."""
        return self._first_of(table, self.captured, self.own, self.outer)

    def _first_of(self, table: Ints, *stacks: Ints) -> Ints:
        result = np.full(len(self.own), NONE, np.int64)
        for nodes in stacks if len(table) else ():
            found = np.where(nodes == NONE, NONE, table[nodes])
            result = np.where(result == NONE, found, result)
        return np.where(result == NONE, NONE, self.forest.range_of[result]) if len(table) else result


def attribute(trace: Trace, roles: RangeRoles) -> Attribution:
    """Attributes every operation of a trace to the ranges open when it was launched."""
    operations, launches = trace.operations, trace.launches
    forest = build_forest(trace.ranges.thread, trace.ranges.start, trace.ranges.end)
    launch = match_launches(operations, launches)
    known = launch != -1
    thread, time = launches.thread[launch[known]], launches.start[launch[known]]
    own = forest.node_at(thread, time)
    outer, ambiguous = _inherited(trace, roles, forest, own, thread, time)
    replayed = (operations.kind == GRAPH) | (operations.graph_node != 0)
    spread = _Spread(known)
    own_all, outer_all = spread(own, NONE), spread(outer, NONE)
    how = np.select(
        [(own_all == NONE) & (outer_all == NONE), replayed, outer_all != NONE],
        [UNATTRIBUTED, GRAPH_REPLAY, OTHER_THREAD],
        SAME_THREAD,
    )
    captured = captured_nodes(trace, forest)
    return Attribution(forest, launch, outer_all, own_all, captured, how, spread(ambiguous, fill=False))


class _Spread:
    """Puts values of the operations that have a launch back into an array of all operations."""

    def __init__(self, known: Bools) -> None:
        self._known = known

    def __call__(self, values: Any, fill: Any) -> Any:
        if self._known.all():
            return values
        result = np.full(len(self._known), fill, values.dtype)
        result[self._known] = values
        return result


def _inherited(
    trace: Trace, roles: RangeRoles, forest: Forest, own: Ints, thread: Ints, time: Ints
) -> tuple[Ints, Bools]:
    """The node inherited from another thread for each launch (-1: none), and whether the choice was ambiguous."""
    autograd = np.isin(thread, autograd_threads(trace))
    has_phase = (own != NONE) & (forest.outermost(roles.any_phase)[own] != NONE) if len(forest.parent) else own != NONE
    lacking = np.flatnonzero(autograd | ~has_phase)
    outer, ambiguous = np.full(len(own), NONE, np.int64), np.zeros(len(own), np.bool_)
    if not len(lacking) or not len(trace.ranges):
        return outer, ambiguous
    thread, time, process = thread[lacking], time[lacking], process_of(thread[lacking])
    bare = (own[lacking] == NONE) | autograd[lacking]
    waiting = waiting_range(trace, roles, process, time, bare)
    inherits = waiting != NONE
    outer[lacking] = np.where(inherits, forest.node_at(trace.ranges.thread[waiting], time), NONE)
    ambiguous[lacking] = inherits & (_threads_in_phase(trace, roles, process, time) > 1)
    return outer, ambiguous


def autograd_threads(trace: Trace) -> Ints:
    """The global thread IDs of PyTorch's autograd engine, known by the names it gives its threads."""
    named = trace.metadata.thread_names.items()
    return np.array([thread for thread, name in named if name.startswith(_AUTOGRAD_THREAD)], np.int64)


def waiting_range(trace: Trace, roles: RangeRoles, process: Ints, time: Ints, bare: Bools) -> Ints:
    """The range whose thread a launch inherits from, or -1.

    Of the phases open in the process: the one in backward, else the one opened last, else the step opened
    last. With no phase open, a launch from a bare thread takes the range opened last, whatever its name.
    """
    waiting = np.full(len(time), NONE, np.int64)
    from_others = ~np.isin(trace.ranges.thread, autograd_threads(trace))
    preferences = (roles.mask("backward"), roles.leaf, roles.any_phase, np.ones(len(trace.ranges), np.bool_))
    for rank, chosen in enumerate(preferences):
        open_for = (waiting == NONE) & (bare | (rank < len(preferences) - 1))
        candidates = np.flatnonzero(chosen & from_others)
        if not len(candidates) or not open_for.any():
            continue
        found = _opened_last(trace.ranges, candidates, process[open_for], time[open_for])
        waiting[open_for] = found
    return waiting


def _opened_last(ranges: Ranges, candidates: Ints, process: Ints, time: Ints) -> Ints:
    """Of the candidate ranges open in a process at a time, the one opened last, or -1."""
    forest = build_forest(process_of(ranges.thread[candidates]), ranges.start[candidates], ranges.end[candidates])
    node = forest.node_at(process, time)
    return np.where(node == NONE, NONE, candidates[forest.range_of[node]]) if len(forest.range_of) else node


def _threads_in_phase(trace: Trace, roles: RangeRoles, process: Ints, time: Ints) -> Ints:
    """How many threads of a process have a phase open at a time, autograd's own not counted."""
    count = np.zeros(len(time), np.int64)
    chosen = roles.any_phase & ~np.isin(trace.ranges.thread, autograd_threads(trace))
    for thread in np.unique(trace.ranges.thread[chosen]):
        phases = trace.ranges.select(chosen & (trace.ranges.thread == thread))
        forest = build_forest(process_of(phases.thread), phases.start, phases.end)
        count += forest.node_at(process, time) != NONE
    return count
