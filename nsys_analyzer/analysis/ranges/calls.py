"""Finds the calls of modules among the ranges of a trace, with their paths and the GPU operations of each.

Four kinds of ranges name a module:

- ``nn.Module: GPT/h.0.attn: Attention``, written by ``run --modules``, contains the path of the module. The module
  ranges of vLLM and SGLang are read as ranges of this kind.
- ``nn.Module: Linear_3`` is written by PyTorch's profiler. The path follows from the nesting and order of calls.
- ``torch.nn.modules.Module.__call__`` is written by nsys's ``--pytorch=functions-trace``. The path also follows from
  the nesting and order of calls.
- The program's own ranges inside its phases count as modules if some ranges are numbered, such as ``block 3``, or if
  operators have sequence numbers, which show the range of each operation of a backward pass.
"""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from nsys_analyzer.analysis.attribution.attribution import find_autograd_threads, make_timeline
from nsys_analyzer.analysis.intervals import NONE, Timeline, is_in_any_range
from nsys_analyzer.analysis.ranges.instances import AttributedTrace
from nsys_analyzer.trace.arrays import Ints, distinct, mask_by_name
from nsys_analyzer.trace.columns import Operators, Ranges, process_of
from nsys_analyzer.trace.phase_names import MODULE_RANGE_WITH_PATH, UNKNOWN_MODULE_CLASS, is_framework_name

#: The names in a module's path, the outermost module first.
ModulePath = tuple[str, ...]

#: Match the ranges of module calls: by PyTorch's profiler, and by nsys; the range of the called ``forward`` by nsys.
_PROFILER_CALL = re.compile(r"nn\.Module: (?P<kind>[^:]+?)_\d+")
_NSYS_CALL = re.compile(r"torch\.nn\.modules\.Module\.__call__")
_NSYS_FORWARD = re.compile(r"torch\.nn\.modules\.\w+\.forward")
#: Matches numbered ranges that programs put around the layers of a model.
_NUMBERED_BLOCK = re.compile(r"(?i)(?:\w*block|layer|stage|decoder|encoder|h)s?[\s._-]*\d+")
#: The maximum depth of nested modules. A deeper call counts as part of the call around it. Most models have ten levels.
_MAX_DEPTH = 100
#: Matches the operators in which autograd runs a node of its graph.
AUTOGRAD_NODE = re.compile(
    r"(?:autograd::engine::evaluate_function: .*|(?:torch::autograd::)?(?:\w*Backward\w*|AccumulateGrad|CopySlices))"
)
_CHECKPOINT_NODE = re.compile(r".*\bCheckpointFunctionBackward")
#: Matches the nodes that only accumulate a gradient. Such a node counts as part of the previous node on its thread.
_ACCUMULATION_NODE = re.compile(r".*AccumulateGrad")


@dataclass(frozen=True)
class ModuleCalls:
    """The calls of modules in a trace.

    Attributes:
        range: shape (calls,), the index of the call's range in the trace's ranges.
        path: shape (calls,), the index in ``paths`` of the path of the called module.
        paths: the path of each module.
        kinds: the class of each module, empty if the class is unknown.
        source: what wrote the ranges, such as "the program's own ranges".
    """

    range: Ints
    path: Ints
    paths: tuple[ModulePath, ...]
    kinds: tuple[str, ...]
    source: str


def find_module_calls(attributed: AttributedTrace) -> ModuleCalls | None:
    """Finds the calls of modules in a trace; returns None if no range names a module."""
    ranges = attributed.trace.ranges
    index = np.flatnonzero(mask_by_name(ranges, MODULE_RANGE_WITH_PATH.fullmatch))
    if len(index):
        used_names, path = np.unique(ranges.name[index], return_inverse=True)
        matches = [match for i in used_names.tolist() if (match := MODULE_RANGE_WITH_PATH.fullmatch(ranges.names[i]))]
        paths = tuple(split_module_path(match["path"]) for match in matches)
        kinds = tuple(match["kind"] for match in matches)
        is_by_engine = all(kind == UNKNOWN_MODULE_CLASS for kind in kinds)
        source = "the layers that an engine marked" if is_by_engine else "the ranges of nsys-analyze run --modules"
        return ModuleCalls(index, path, paths, kinds, source)
    index = np.flatnonzero(mask_by_name(ranges, _PROFILER_CALL.fullmatch))
    if len(index):
        kind = [match["kind"] if (match := _PROFILER_CALL.fullmatch(name)) else "" for name in ranges.names]
        kinds_of_calls = [kind[i] for i in ranges.name[index].tolist()]
        source = "the module calls that PyTorch's profiler wrote"
        return _derive_paths_from_nesting(ranges, index, kinds_of_calls, source, numbered=True)
    index = np.flatnonzero(mask_by_name(ranges, _NSYS_CALL.fullmatch))
    if len(index):
        # The class of the called module follows from the range of its ``forward`` directly inside the call, if there is
        # one.
        forward = np.flatnonzero(mask_by_name(ranges, _NSYS_FORWARD.fullmatch))
        rows = np.concatenate([index, forward])
        parent = find_parents(ranges.thread[rows], ranges.start[rows], ranges.end[rows])[len(index) :]
        classes = [ranges.names[i].split(".")[-2] for i in ranges.name[forward].tolist()]
        class_of_call = dict(zip(parent.tolist(), classes, strict=True))
        kinds_of_calls = [class_of_call.get(call, UNKNOWN_MODULE_CLASS) for call in range(len(index))]
        source = "the module calls that nsys wrote"
        return _derive_paths_from_nesting(ranges, index, kinds_of_calls, source, numbered=True)
    operators = attributed.trace.operators
    if not any(map(_NUMBERED_BLOCK.fullmatch, ranges.names)) and not (operators.sequence >= 0).any():
        return None
    # A range that the program opened in one of its phases is taken for a call of a module, except in a backward pass.
    roles, operator_names = attributed.roles, {operators.names[code] for code in distinct(operators.name)}
    is_call = mask_by_name(ranges, lambda name: not (is_framework_name(name) or name in operator_names))
    is_call &= ~roles.is_phase_or_step & ~roles.has_role("warmup")
    phases = ranges.select(roles.is_leaf_phase & ~roles.has_role("backward"))
    is_call &= is_in_any_range(phases.thread, phases.start, phases.end, ranges.thread, ranges.start)
    index = np.flatnonzero(is_call)
    if not len(index):
        return None
    range_names = [ranges.names[i] for i in ranges.name[index].tolist()]
    return _derive_paths_from_nesting(ranges, index, range_names, "the program's own ranges", numbered=False)


def split_module_path(text: str) -> ModulePath:
    """Splits the path of a module in a range's name, such as ``GPT/h.0.attn``, into the names of modules."""
    return tuple(re.split(r"[/.]", text))[:_MAX_DEPTH]


def _derive_paths_from_nesting(
    ranges: Ranges, index: Ints, names: list[str], source: str, *, numbered: bool
) -> ModuleCalls:
    """Makes the path of each call: the path of the surrounding call, followed by the name of the call.

    Args:
        index: the indices of the ranges that are calls.
        names: the name of each call.
        numbered: if True, calls with the same name inside one call are numbered in the order of their start.
    """
    parent = find_parents(ranges.thread[index], ranges.start[index], ranges.end[index])
    order = np.lexsort((-ranges.end[index], ranges.start[index], ranges.thread[index]))
    path_of_call: dict[int, ModulePath] = {-1: ()}
    counters: dict[int, Counter[str]] = {}
    for call in order.tolist():
        parent_call, name = int(parent[call]), names[call]
        # All outermost calls of one name call the same model, so they are not numbered.
        if numbered and parent_call >= 0:
            counter = counters.setdefault(parent_call, Counter())
            counter[name] += 1
            name = f"{name}[{counter[name] - 1}]"
        path_of_call[call] = (*path_of_call[parent_call], name)[:_MAX_DEPTH]
    paths = sorted({path for call, path in path_of_call.items() if call >= 0})
    code = {path: i for i, path in enumerate(paths)}
    kinds = tuple(path[-1].partition("[")[0] for path in paths) if numbered else ("",) * len(paths)
    path_codes = np.array([code[path_of_call[call]] for call in range(len(index))], np.int64)
    return ModuleCalls(index, path_codes, tuple(paths), kinds, source)


def find_parents(group: Ints, start: Ints, end: Ints) -> Ints:
    """Returns the index of the innermost range of the same group around each range, or -1; shape (ranges,)."""
    parent = np.full(len(start), -1, np.int64)
    stack: list[int] = []
    groups, ends = group.tolist(), end.tolist()
    for child in np.lexsort((-end, start, group)).tolist():
        while stack and (groups[stack[-1]] != groups[child] or ends[stack[-1]] < ends[child]):
            stack.pop()
        if stack:
            parent[child] = stack[-1]
        stack.append(child)
    return parent


class CallFinder:
    """Finds the call of a module that an operation belongs to.

    An operation belongs to the call that is open at its launch. In a backward pass no call is open. An operator of the
    backward pass has the sequence number of the forward operator that it differentiates, so an operation that it
    launches belongs to the call around this forward operator.
    """

    def __init__(self, attributed: AttributedTrace, calls: ModuleCalls) -> None:
        self._attributed = attributed
        ranges = attributed.trace.ranges
        self._is_call = np.zeros(len(ranges), np.bool_)
        self._is_call[calls.range] = True
        self._call_of_range = np.full(len(ranges) + 1, NONE, np.int64)  # index -1 selects the last entry
        self._call_of_range[calls.range] = np.arange(len(calls.range))

    def find_calls(self, operations: Ints) -> Ints:
        """Returns the index of the call that each of ``operations`` belongs to, or -1."""
        attribution = self._attributed.attribution
        call = self._call_of_range[attribution.find_innermost(self._is_call, operations)]
        without_call = np.flatnonzero(call == NONE)
        thread, time = attribution.thread[operations[without_call]], attribution.time[operations[without_call]]
        call[without_call] = self._find_calls_by_sequence(thread, time)
        return call

    def _find_open_calls(self, thread: Ints, time: Ints) -> Ints:
        """Returns the index of the innermost call that is open at each (thread, time), or -1."""
        timeline, index = self._timeline
        call: Ints = self._call_of_range[np.append(index, NONE)[timeline.open_at(thread, time)]]
        return call

    @cached_property
    def _timeline(self) -> tuple[Timeline, Ints]:
        return make_timeline(self._attributed.trace.ranges, self._is_call, innermost=True)

    def _find_calls_by_sequence(self, thread: Ints, time: Ints) -> Ints:
        """Returns the call around the forward operator whose backward node runs at each (thread, time), or -1."""
        call = np.full(len(thread), NONE, np.int64)
        nodes, forward = self._backward_nodes, self._forward_operators
        if not len(thread) or not len(nodes) or not len(forward):
            return call
        running = Timeline(nodes.thread, nodes.start, nodes.end, innermost=True).open_at(thread, time)
        # The node of a checkpoint runs a nested backward pass. The sequence numbers of the nodes in this backward pass
        # come from this thread, so the number of the checkpoint's node is used instead.
        index = np.flatnonzero(mask_by_name(nodes, _CHECKPOINT_NODE.fullmatch))
        checkpoints = Timeline(nodes.thread[index], nodes.start[index], nodes.end[index], innermost=False)
        open_checkpoint = checkpoints.open_at(thread, time)
        running = np.where(open_checkpoint == NONE, running, np.append(index, NONE)[open_checkpoint])
        for process in distinct(process_of(forward.thread)):
            node_makers = forward.select(process_of(forward.thread) == process)
            node_makers = node_makers.select(
                node_makers.thread == Counter(node_makers.thread.tolist()).most_common(1)[0][0]
            )
            moments = np.flatnonzero((running != NONE) & (process_of(thread) == process))
            sequence_number = nodes.sequence[running[moments]]
            # Find the last forward operator that started before the moment and has at most the node's sequence number.
            count_by_number = np.searchsorted(node_makers.sequence, sequence_number, side="right")
            count = np.minimum(count_by_number, np.searchsorted(node_makers.start, time[moments]))
            moments, last_maker = moments[count > 0], count[count > 0] - 1
            call[moments] = self._find_open_calls(node_makers.thread[last_maker], node_makers.start[last_maker])
        return call

    @cached_property
    def _backward_nodes(self) -> Operators:
        """Returns the operators that run the nodes of autograd's graph, and the engine's operators around them.

        An operator of the engine gets the sequence number of the node inside it. A node that accumulates a gradient
        gets the number of the previous node on its thread.
        """
        operators = self._attributed.trace.operators
        nodes = operators.select(mask_by_name(operators, AUTOGRAD_NODE.fullmatch))
        nodes = nodes.select(np.lexsort((-nodes.end, nodes.start, nodes.thread)))
        if not len(nodes):
            return nodes
        has_inner = np.append(nodes.start[1:] < nodes.end[:-1], False) & (np.roll(nodes.thread, -1) == nodes.thread)
        sequence_number = np.where(has_inner & (nodes.sequence < 0), np.roll(nodes.sequence, -1), nodes.sequence)
        last_numbered = np.maximum.accumulate(np.where(sequence_number >= 0, np.arange(len(nodes)), NONE))
        is_accumulation = mask_by_name(nodes, _ACCUMULATION_NODE.fullmatch)
        is_numbered = (
            (last_numbered != NONE)
            & (nodes.thread == nodes.thread[last_numbered])
            & ((sequence_number >= 0) | is_accumulation)
        )
        return replace(nodes, sequence=np.where(is_numbered, sequence_number[last_numbered], NONE)).select(is_numbered)

    @cached_property
    def _forward_operators(self) -> Operators:
        """Returns the forward operators, sorted by start. Each has a sequence number and creates a backward node."""
        operators = self._attributed.trace.operators
        makes_node = (operators.sequence >= 0) & ~mask_by_name(operators, AUTOGRAD_NODE.fullmatch)
        makes_node &= ~np.isin(operators.thread, find_autograd_threads(self._attributed.trace))
        node_makers = operators.select(makes_node)
        return node_makers.select(np.argsort(node_makers.start, kind="stable"))
