"""Where the nodes of CUDA graphs were captured: inside ranges that a replay does not open again."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from nsys_analyzer.analysis.intervals import OFF_AXIS, Axis
from nsys_analyzer.trace.arrays import Bools, Ints
from nsys_analyzer.trace.columns import process_of
from nsys_analyzer.trace.trace import Trace

_INSTANTIATIONS = 8  # a graph of graphs is instantiated a few levels deep at the most


@dataclass(frozen=True)
class Captures:
    """The thread and the time, ns, at which the graph nodes of some operations (indices) were created."""

    operation: Ints
    thread: Ints
    time: Ints


def find_captures(trace: Trace) -> Captures:
    """Finds when each operation of a graph replay was captured."""
    operations, nodes = trace.operations, trace.graph_nodes
    replayed = np.flatnonzero(operations.graph_node != 0)
    if not len(nodes.node):
        return Captures(nodes.node, nodes.thread, nodes.start)
    process = process_of(nodes.thread)
    axis = Axis(process, nodes.node)
    key = axis.place(process, nodes.node)
    original = np.where(nodes.original != 0, axis.place(process, nodes.original), OFF_AXIS)
    # A node cloned by instantiation has a row for its creation and one that names its original: that one first.
    order = np.lexsort((nodes.start, original == OFF_AXIS, key))
    key, original = key[order], original[order]
    source: Ints = np.arange(len(key))  # of each node the one that it was first captured as
    for _ in range(_INSTANTIATIONS):
        found, has_original = _find(key, original[source])
        source = np.where(has_original, found, source)
    found, hit = _find(key, axis.place(operations.process[replayed], operations.graph_node[replayed]))
    created = order[source[found[hit]]]
    return Captures(replayed[hit], nodes.thread[created], nodes.start[created])


def _find(keys: Ints, wanted: Ints) -> tuple[Ints, Bools]:
    found = np.searchsorted(keys, wanted).clip(max=len(keys) - 1)
    return found, keys[found] == wanted
