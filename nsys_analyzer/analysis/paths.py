"""The names of the ranges around each operation, outermost first."""

from __future__ import annotations

import numpy as np

from nsys_analyzer.analysis.attribution import Attribution
from nsys_analyzer.analysis.forest import Forest, build_forest
from nsys_analyzer.analysis.timeline import NONE
from nsys_analyzer.trace.arrays import Ints
from nsys_analyzer.trace.trace import Trace

SEPARATOR = " / "


def range_paths(trace: Trace, attribution: Attribution) -> tuple[Ints, list[str]]:
    """The range path of each operation.

    Returns:
        Codes of shape (operations,), and the paths they stand for; the first is the empty path.
    """
    ranges, captures = trace.ranges, attribution.captures
    forest = build_forest(ranges.thread, ranges.start, ranges.end)
    node_path, names = _node_paths(trace, forest)
    captured = np.full(len(attribution.launch), NONE, np.int64)
    captured[captures.operation] = forest.node_at(captures.thread, captures.time)
    stacks = [forest.node_at(thread, attribution.time) for thread in (attribution.inherited, attribution.thread)]
    parts = [_of(node_path, nodes) for nodes in (*stacks, captured)]
    width = len(names)
    combined = (parts[0] * width + parts[1]) * width + parts[2]
    unique, codes = np.unique(combined, return_inverse=True)
    # Different combinations may read the same; a categorical's categories must not.
    texts = [_join(names, int(code), width) for code in unique]
    paths = ["", *sorted(set(texts) - {""})]
    position = {text: i for i, text in enumerate(paths)}
    recode = np.array([position[text] for text in texts], np.int64)
    return recode[codes] if len(codes) else codes, paths


def _of(node_path: Ints, nodes: Ints) -> Ints:
    """Path code of each node, 0 (the empty path) for none."""
    return np.where(nodes == NONE, 0, node_path[nodes]) if len(node_path) else np.zeros(len(nodes), np.int64)


def _node_paths(trace: Trace, forest: Forest) -> tuple[Ints, list[str]]:
    """A path code for each node, level by level, and the paths; nodes with the same names share a code."""
    width = len(trace.ranges.names)
    result = np.zeros(len(forest.parent), np.int64)
    paths = [""]
    for nodes in forest.by_level():
        above = np.where(forest.parent[nodes] == NONE, 0, result[forest.parent[nodes]])
        key, codes = np.unique(above * width + trace.ranges.name[forest.range_of[nodes]], return_inverse=True)
        result[nodes] = len(paths) + codes
        paths += [_below(paths[k // width], trace.ranges.names[k % width]) for k in key.tolist()]
    return result, paths


def _below(path: str, name: str) -> str:
    return f"{path}{SEPARATOR}{name}" if path else name


def _join(names: list[str], combined: int, width: int) -> str:
    """The path of a combination of inherited, own and captured stack.

    A capture's stack repeats names of the replay's (step, forward): what it adds stands below their last one.
    """
    outer, own, captured = names[combined // width**2], names[combined // width % width], names[combined % width]
    stack = [name for name in (outer, own) if name]
    seen = set(SEPARATOR.join(stack).split(SEPARATOR))
    added = captured.split(SEPARATOR) if captured else []
    last = max((i for i, name in enumerate(added) if name in seen), default=-1)
    return SEPARATOR.join([*stack, *added[last + 1 :]])
