"""The calls of modules among the ranges of a trace: the path of each, and the kernels and operators of each.

Four kinds of range name a module. ``nn.Module: GPT/h.0.attn: Attention`` is that of ``run --modules`` and holds the
path; the marks of vLLM and SGLang are read as it. ``nn.Module: Linear_3`` is PyTorch's profiler's and
``torch.nn.modules.Module.__call__`` that of nsys's ``--pytorch=functions-trace``: their paths follow from how they nest
and from their order. Else the program's own ranges inside its phases are taken, where some are numbered (``block 3``)
or operators tell which range a backward pass is of.
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
from nsys_analyzer.analysis.ranges.phases import is_framework_name
from nsys_analyzer.trace.arrays import Ints, distinct, mask_by_name
from nsys_analyzer.trace.columns import Operators, Ranges, process_of
from nsys_analyzer.trace.phase_names import MODULE_RANGE_WITH_PATH, UNKNOWN_MODULE_CLASS

#: The words of a path, outermost first.
Path = tuple[str, ...]

_OF_PROFILER = re.compile(r"nn\.Module: (?P<kind>[^:]+?)_\d+")
_OF_NSYS = re.compile(r"torch\.nn\.modules\.Module\.__call__")
_FORWARD_OF_NSYS = re.compile(r"torch\.nn\.modules\.\w+\.forward")
_BLOCK = re.compile(r"(?i)(?:\w*block|layer|stage|decoder|encoder|h)s?[\s._-]*\d+")
#: Modules are nested some ten deep; what lies deeper than this is part of the one around it.
_DEEPEST = 100
#: A node of autograd's graph as it runs, and one that only adds up a gradient: it is part of the work before it.
_NODE = re.compile(
    r"(?:autograd::engine::evaluate_function: .*|(?:torch::autograd::)?(?:\w*Backward\w*|AccumulateGrad|CopySlices))"
)
_CHECKPOINT = re.compile(r".*\bCheckpointFunctionBackward")
_ADDS_UP = re.compile(r".*AccumulateGrad")


@dataclass(frozen=True)
class ModuleCalls:
    """The calls of modules in a trace.

    Attributes:
        range: shape (calls,), index into the trace's ranges.
        path: shape (calls,), code into ``paths``.
        paths, kinds: the path of each module and its class, empty where that is not known.
        source: what wrote the ranges, in words.
    """

    range: Ints
    path: Ints
    paths: tuple[Path, ...]
    kinds: tuple[str, ...]
    source: str


def find_module_calls(attributed: AttributedTrace) -> ModuleCalls | None:
    """Finds the calls of modules in a trace; None where no range names one."""
    ranges = attributed.trace.ranges
    index = np.flatnonzero(mask_by_name(ranges, MODULE_RANGE_WITH_PATH.fullmatch))
    if len(index):
        used, path = np.unique(ranges.name[index], return_inverse=True)
        matches = [match for i in used.tolist() if (match := MODULE_RANGE_WITH_PATH.fullmatch(ranges.names[i]))]
        paths, kinds = (
            tuple(split_module_path(match["path"]) for match in matches),
            tuple(match["kind"] for match in matches),
        )
        by_engine = all(kind == UNKNOWN_MODULE_CLASS for kind in kinds)
        source = "the layers that an engine marked" if by_engine else "the ranges of nsys-analyze run --modules"
        return ModuleCalls(index, path, paths, kinds, source)
    index = np.flatnonzero(mask_by_name(ranges, _OF_PROFILER.fullmatch))
    if len(index):
        kind = [match["kind"] if (match := _OF_PROFILER.fullmatch(name)) else "" for name in ranges.names]
        kind_of_call = [kind[i] for i in ranges.name[index].tolist()]
        return _by_nesting(ranges, index, kind_of_call, "the module calls that PyTorch's profiler wrote", numbered=True)
    index = np.flatnonzero(mask_by_name(ranges, _OF_NSYS.fullmatch))
    if len(index):
        return _by_nesting(
            ranges, index, _kinds_of_nsys(ranges, index), "the module calls that nsys wrote", numbered=True
        )
    if any(map(_BLOCK.fullmatch, ranges.names)) or (attributed.trace.operators.sequence >= 0).any():
        return _of_program(attributed)
    return None


def split_module_path(text: str) -> Path:
    """Splits a path as hooks write it, ``GPT/h.0.attn``, into its words."""
    return tuple(re.split(r"[/.]", text))[:_DEEPEST]


def _kinds_of_nsys(ranges: Ranges, calls: Ints) -> list[str]:
    """Returns the class of each call: that of the ``forward`` right inside, where nsys wrote one."""
    inner = np.flatnonzero(mask_by_name(ranges, _FORWARD_OF_NSYS.fullmatch))
    both = np.concatenate([calls, inner])
    parent = find_parents(ranges.thread[both], ranges.start[both], ranges.end[both])[len(calls) :]
    classes = [ranges.names[i].split(".")[-2] for i in ranges.name[inner].tolist()]
    kind_of_call = dict(zip(parent.tolist(), classes, strict=True))
    return [kind_of_call.get(call, UNKNOWN_MODULE_CLASS) for call in range(len(calls))]


def _of_program(attributed: AttributedTrace) -> ModuleCalls | None:
    """Takes the program's own ranges inside its forward passes, and wherever else it is not in a backward pass."""
    ranges, roles, every = attributed.trace.ranges, attributed.roles, attributed.trace.operators
    operators = {every.names[code] for code in distinct(every.name)}
    called = mask_by_name(ranges, lambda name: not (is_framework_name(name) or name in operators))
    called &= ~roles.is_phase_or_step & ~roles.mask("warmup")
    phases = ranges.select(roles.is_leaf_phase & ~roles.mask("backward"))
    called &= is_in_any_range(phases.thread, phases.start, phases.end, ranges.thread, ranges.start)
    index = np.flatnonzero(called)
    names = [ranges.names[i] for i in ranges.name[index].tolist()]
    return _by_nesting(ranges, index, names, "the program's own ranges", numbered=False) if names else None


def _by_nesting(ranges: Ranges, index: Ints, names: list[str], source: str, *, numbered: bool) -> ModuleCalls:
    """Makes calls whose path is that of the call around and their own name; ``numbered`` in the order of its calls."""
    parent = find_parents(ranges.thread[index], ranges.start[index], ranges.end[index])
    order = np.lexsort((-ranges.end[index], ranges.start[index], ranges.thread[index]))
    path_of_call: dict[int, Path] = {-1: ()}
    seen: dict[int, Counter[str]] = {}
    for call in order.tolist():
        around, name = int(parent[call]), names[call]
        if numbered and around >= 0:  # of the models, each call is one of the same model
            times = seen.setdefault(around, Counter())
            times[name] += 1
            name = f"{name}[{times[name] - 1}]"
        path_of_call[call] = (*path_of_call[around], name)[:_DEEPEST]
    paths = sorted({path for call, path in path_of_call.items() if call >= 0})
    code = {path: i for i, path in enumerate(paths)}
    kinds = tuple(path[-1].partition("[")[0] for path in paths) if numbered else ("",) * len(paths)
    codes = np.array([code[path_of_call[call]] for call in range(len(index))], np.int64)
    return ModuleCalls(index, codes, tuple(paths), kinds, source)


def find_parents(group: Ints, start: Ints, end: Ints) -> Ints:
    """Returns, shape (ranges,), the innermost other range of its group around each, -1 for none."""
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
    """The call that a moment of a thread belongs to: the one open then or, in backward, that of the forward.

    An operator of a backward pass carries the sequence number of the operator of the forward pass that it
    differentiates, and belongs to the call around that one.
    """

    def __init__(self, attributed: AttributedTrace, calls: ModuleCalls) -> None:
        self._attributed, self._calls = attributed, calls
        ranges = attributed.trace.ranges
        self._mask = np.zeros(len(ranges), np.bool_)
        self._mask[calls.range] = True
        self._call_of_range = np.full(len(ranges) + 1, NONE, np.int64)  # the last entry serves index -1
        self._call_of_range[calls.range] = np.arange(len(calls.range))

    def calls_of_operations(self, operations: Ints) -> Ints:
        """Returns the call that each of some GPU operations belongs to, -1 for none."""
        attribution = self._attributed.attribution
        call = self._call_of_range[attribution.find_innermost(self._mask, operations)]
        lacking = np.flatnonzero(call == NONE)
        thread, time = attribution.thread[operations[lacking]], attribution.time[operations[lacking]]
        call[lacking] = self._by_sequence(thread, time)
        return call

    def _at(self, thread: Ints, time: Ints) -> Ints:
        lines, index = self._open
        call: Ints = self._call_of_range[np.append(index, NONE)[lines.open_at(thread, time)]]
        return call

    @cached_property
    def _open(self) -> tuple[Timeline, Ints]:
        return make_timeline(self._attributed.trace.ranges, self._mask, latest=True)

    def _by_sequence(self, thread: Ints, time: Ints) -> Ints:
        """Returns the call around the operator that made the node which runs at each (thread, time)."""
        call = np.full(len(thread), NONE, np.int64)
        nodes, forward = self._nodes, self._forward
        if not len(thread) or not len(nodes) or not len(forward):
            return call
        running = Timeline(nodes.thread, nodes.start, nodes.end, latest=True).open_at(thread, time)
        # A checkpoint's node runs a backward pass of its own, over nodes that this thread has numbered.
        index = np.flatnonzero(mask_by_name(nodes, _CHECKPOINT.fullmatch))
        around = Timeline(nodes.thread[index], nodes.start[index], nodes.end[index], latest=False).open_at(thread, time)
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
            call[mine] = self._at(made.thread[last], made.start[last])
        return call

    @cached_property
    def _nodes(self) -> Operators:
        """The nodes of autograd as they run, and what the engine opens around each.

        The engine's range has the number of the node inside, what adds up a gradient that of the node before it.
        """
        operators = self._attributed.trace.operators
        nodes = operators.select(mask_by_name(operators, _NODE.fullmatch))
        nodes = nodes.select(np.lexsort((-nodes.end, nodes.start, nodes.thread)))
        if not len(nodes):
            return nodes
        inside = np.append(nodes.start[1:] < nodes.end[:-1], False) & (np.roll(nodes.thread, -1) == nodes.thread)
        number = np.where(inside & (nodes.sequence < 0), np.roll(nodes.sequence, -1), nodes.sequence)
        last = np.maximum.accumulate(np.where(number >= 0, np.arange(len(nodes)), NONE))
        is_numbered = (
            (last != NONE)
            & (nodes.thread == nodes.thread[last])
            & ((number >= 0) | mask_by_name(nodes, _ADDS_UP.fullmatch))
        )
        return replace(nodes, sequence=np.where(is_numbered, number[last], NONE)).select(is_numbered)

    @cached_property
    def _forward(self) -> Operators:
        """What makes nodes, in order of start: operators with a number on a thread that is not autograd's own."""
        operators = self._attributed.trace.operators
        makes = (operators.sequence >= 0) & ~mask_by_name(operators, _NODE.fullmatch)
        makes &= ~np.isin(operators.thread, find_autograd_threads(self._attributed.trace))
        makers = operators.select(makes)
        return makers.select(np.argsort(makers.start, kind="stable"))
