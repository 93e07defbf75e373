"""The calls of modules among the ranges of a trace: the path of each, and the kernels and operators of each.

Four kinds of range name a module. ``nn.Module: GPT/h.0.attn: Attention`` is that of ``run --modules`` and holds the
path. ``nn.Module: Linear_3`` is PyTorch's profiler's and ``torch.nn.modules.Module.__call__`` that of nsys's
``--pytorch=functions-trace``: their paths follow from how they nest and from their order. Else the program's own ranges
inside its phases are taken, where some are numbered (``block 3``) or operators tell which range a backward pass is of.
"""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from nsys_analyzer.analysis.attribution.attribution import autograd_threads, timeline
from nsys_analyzer.analysis.intervals.timeline import NONE, Timeline, any_open
from nsys_analyzer.analysis.ranges.instances import AttributedTrace
from nsys_analyzer.analysis.ranges.phases import is_framework_name
from nsys_analyzer.trace.arrays import Bools, Ints, distinct
from nsys_analyzer.trace.columns import Operators, Ranges, process_of
from nsys_analyzer.trace.phase_names import MODULE_WITH_PATH

#: The words of a path, outermost first.
Path = tuple[str, ...]

_OF_PROFILER = re.compile(r"nn\.Module: (?P<kind>[^:]+?)_\d+")
_OF_NSYS = re.compile(r"torch\.nn\.modules\.Module\.__call__")
_FORWARD_OF_NSYS = re.compile(r"torch\.nn\.modules\.(?P<kind>\w+)\.forward")
_BLOCK = re.compile(r"(?i)(?:\w*block|layer|stage|decoder|encoder|h)s?[\s._-]*\d+")
_OF_HOOKS = "the ranges of nsys-analyze run --modules"
#: What a module is called of which nsys wrote no class.
_NO_KIND = "Module"
#: A node of autograd's graph as it runs, and one that only adds up a gradient: it is part of the work before it.
_NODE = re.compile(
    r"(?:autograd::engine::evaluate_function: .*|(?:torch::autograd::)?(?:\w*Backward\w*|AccumulateGrad|CopySlices))"
)
_CHECKPOINT = re.compile(r".*\bCheckpointFunctionBackward")
_ADDS_UP = re.compile(r".*AccumulateGrad")


@dataclass(frozen=True)
class Calls:
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


def find_calls(attributed: AttributedTrace) -> Calls | None:
    """Finds the calls of modules in a trace; None where no range names one."""
    names = attributed.trace.ranges.names
    if any(MODULE_WITH_PATH.fullmatch(name) for name in names):
        return _with_paths(attributed.trace.ranges)
    if any(_OF_PROFILER.fullmatch(name) for name in names):
        return _of_profiler(attributed.trace.ranges)
    if any(_OF_NSYS.fullmatch(name) for name in names):
        return _of_nsys(attributed.trace.ranges)
    operators = attributed.trace.operators
    if any(map(_BLOCK.fullmatch, names)) or (operators.sequence >= 0).any():
        return _of_program(attributed)
    return None


def _with_paths(ranges: Ranges) -> Calls:
    matches = [MODULE_WITH_PATH.fullmatch(name) for name in ranges.names]
    index, name = _ranges_named(ranges, [match is not None for match in matches])
    used, code = np.unique(name, return_inverse=True)
    named = [match for i in used.tolist() if (match := matches[i])]
    kinds = tuple(match["kind"] for match in named)
    return Calls(index, code, tuple(path_of(match["path"]) for match in named), kinds, _OF_HOOKS)


def path_of(text: str) -> Path:
    """Splits a path as hooks write it, ``GPT/h.0.attn``, into its words."""
    return tuple(re.split(r"[/.]", text))


def _ranges_named(ranges: Ranges, names: list[bool]) -> tuple[Ints, Ints]:
    """Selects the ranges with some of the names: their indices, and the code of the name of each."""
    index = np.flatnonzero(np.array([*names, False])[ranges.name])
    return index, ranges.name[index]


def _of_profiler(ranges: Ranges) -> Calls:
    kinds = [match["kind"] if (match := _OF_PROFILER.fullmatch(name)) else "" for name in ranges.names]
    index, name = _ranges_named(ranges, [kind != "" for kind in kinds])
    kind = [kinds[i] for i in name.tolist()]
    return _by_nesting(ranges, index, kind, "the module calls that PyTorch's profiler wrote", numbered=True)


def _of_nsys(ranges: Ranges) -> Calls:
    """Finds calls whose class is that of the ``forward`` right inside, where nsys wrote one."""
    index, _ = _ranges_named(ranges, [_OF_NSYS.fullmatch(name) is not None for name in ranges.names])
    kinds = [match["kind"] if (match := _FORWARD_OF_NSYS.fullmatch(name)) else "" for name in ranges.names]
    inner, name = _ranges_named(ranges, [kind != "" for kind in kinds])
    both = np.concatenate([index, inner])
    parent = parents(ranges.thread[both], ranges.start[both], ranges.end[both])
    kind_of_call = {int(p): kinds[n] for p, n in zip(parent[len(index) :], name.tolist(), strict=True)}
    kind = [kind_of_call.get(call, _NO_KIND) for call in range(len(index))]
    return _by_nesting(ranges, index, kind, "the module calls that nsys wrote", numbered=True)


def _of_program(attributed: AttributedTrace) -> Calls | None:
    """Takes the program's own ranges inside its forward passes, and wherever else it is not in a backward pass."""
    ranges, roles = attributed.trace.ranges, attributed.roles
    every = attributed.trace.operators
    operators = {every.names[code] for code in distinct(every.name)}
    own = [not (is_framework_name(name) or name in operators) for name in ranges.names]
    called = np.array([*own, False])[ranges.name] & ~roles.any_phase & ~roles.mask("warmup")
    phases = ranges.select(roles.leaf & ~roles.mask("backward"))
    called &= any_open(phases.thread, phases.start, phases.end, ranges.thread, ranges.start)
    index = np.flatnonzero(called)
    if not len(index):
        return None
    names = [ranges.names[i] for i in ranges.name[index].tolist()]
    return _by_nesting(ranges, index, names, "the program's own ranges", numbered=False)


def _by_nesting(ranges: Ranges, index: Ints, names: list[str], source: str, *, numbered: bool) -> Calls:
    """Makes calls whose path is that of the call around and their own name; ``numbered`` in the order of its calls."""
    parent = parents(ranges.thread[index], ranges.start[index], ranges.end[index])
    order = np.lexsort((-ranges.end[index], ranges.start[index], ranges.thread[index]))
    path_of_call: dict[int, Path] = {-1: ()}
    seen: dict[int, Counter[str]] = {}
    for call in order.tolist():
        around, name = int(parent[call]), names[call]
        if numbered and around >= 0:  # of the models, each call is one of the same model
            times = seen.setdefault(around, Counter())
            times[name] += 1
            name = f"{name}[{times[name] - 1}]"
        path_of_call[call] = (*path_of_call[around], name)
    paths = sorted({path for call, path in path_of_call.items() if call >= 0})
    code = {path: i for i, path in enumerate(paths)}
    kinds = tuple(path[-1].partition("[")[0] for path in paths) if numbered else ("",) * len(paths)
    codes = np.array([code[path_of_call[call]] for call in range(len(index))], np.int64)
    return Calls(index, codes, tuple(paths), kinds, source)


def parents(group: Ints, start: Ints, end: Ints) -> Ints:
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


class Places:
    """The call that a moment of a thread belongs to: the one open then or, in backward, that of the forward.

    An operator of a backward pass carries the sequence number of the operator of the forward pass that it
    differentiates, and belongs to the call around that one.
    """

    def __init__(self, attributed: AttributedTrace, calls: Calls) -> None:
        self._attributed, self._calls = attributed, calls
        ranges = attributed.trace.ranges
        self._mask = np.zeros(len(ranges), np.bool_)
        self._mask[calls.range] = True
        self._call_of_range = np.full(len(ranges) + 1, NONE, np.int64)  # the last entry serves index -1
        self._call_of_range[calls.range] = np.arange(len(calls.range))

    def of_operations(self, operations: Ints) -> Ints:
        """Returns the call that each of some GPU operations belongs to, -1 for none."""
        attribution = self._attributed.attribution
        call = self._call_of_range[attribution.innermost(self._mask, operations)]
        lacking = np.flatnonzero(call == NONE)
        thread, time = attribution.thread[operations[lacking]], attribution.time[operations[lacking]]
        call[lacking] = self._by_sequence(thread, time)
        return call

    def of_operators(self, operators: Ints) -> Ints:
        """Returns the call that each of some operators of PyTorch belongs to, -1 for none."""
        every = self._attributed.trace.operators
        thread, time = every.thread[operators], every.start[operators]
        call = self._at(thread, time)
        lacking = np.flatnonzero(call == NONE)
        call[lacking] = self._by_sequence(thread[lacking], time[lacking])
        return call

    def _at(self, thread: Ints, time: Ints) -> Ints:
        lines, index = self._open
        call: Ints = self._call_of_range[np.append(index, NONE)[lines.at(thread, time)]]
        return call

    @cached_property
    def _open(self) -> tuple[Timeline, Ints]:
        return timeline(self._attributed.trace.ranges, self._mask, latest=True)

    def _by_sequence(self, thread: Ints, time: Ints) -> Ints:
        """Returns the call around the operator that made the node which runs at each (thread, time)."""
        call = np.full(len(thread), NONE, np.int64)
        nodes, forward = self._nodes, self._forward
        if not len(thread) or not len(nodes) or not len(forward):
            return call
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
            call[mine] = self._at(made.thread[last], made.start[last])
        return call

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
        is_numbered = (last != NONE) & (nodes.thread == nodes.thread[last]) & ((number >= 0) | _named(nodes, _ADDS_UP))
        return replace(nodes, sequence=np.where(is_numbered, number[last], NONE)).select(is_numbered)

    @cached_property
    def _forward(self) -> Operators:
        """What makes nodes, in order of start: operators with a number on a thread that is not autograd's own."""
        operators = self._attributed.trace.operators
        makes = (operators.sequence >= 0) & ~_named(operators, _NODE)
        makes &= ~np.isin(operators.thread, autograd_threads(self._attributed.trace))
        makers = operators.select(makes)
        return makers.select(np.argsort(makers.start, kind="stable"))


def _named(operators: Operators, pattern: re.Pattern[str]) -> Bools:
    """Marks the operators whose name matches."""
    matches = np.array([*(bool(pattern.fullmatch(name)) for name in operators.names), False])
    named: Bools = matches[operators.name]
    return named
