"""The calls of modules among the ranges of a trace, and the path of each.

Four kinds of range name a module. ``nn.Module: GPT/h.0.attn: Attention`` is that of ``run --modules`` and holds the
path. ``nn.Module: Linear_3`` is PyTorch's profiler's and ``torch.nn.modules.Module.__call__`` that of nsys's
``--pytorch=functions-trace``: their paths follow from how they nest and from their order. Else the program's own ranges
inside its phases are taken, where some are numbered (``block 3``) or operators tell which range a backward pass is of.
"""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass

import numpy as np

from nsys_analyzer.analysis.intervals.timeline import any_open
from nsys_analyzer.analysis.ranges.instances import AttributedTrace
from nsys_analyzer.analysis.ranges.phases import is_framework_name
from nsys_analyzer.trace.arrays import Bools, Ints, distinct
from nsys_analyzer.trace.columns import Ranges
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
    """The calls of modules in a trace; None where no range names one."""
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
    index, name = _chosen(ranges, [match is not None for match in matches])
    used, code = np.unique(name, return_inverse=True)
    found = [match for i in used.tolist() if (match := matches[i])]
    kinds = tuple(match["kind"] for match in found)
    return Calls(index, code, tuple(path_of(match["path"]) for match in found), kinds, _OF_HOOKS)


def path_of(text: str) -> Path:
    """The words of a path as hooks write it: ``GPT/h.0.attn``."""
    return tuple(re.split(r"[/.]", text))


def _chosen(ranges: Ranges, names: list[bool]) -> tuple[Ints, Ints]:
    """The ranges with some of the names: their indices, and the code of the name of each."""
    index = np.flatnonzero(np.array([*names, False])[ranges.name])
    return index, ranges.name[index]


def _of_profiler(ranges: Ranges) -> Calls:
    kinds = [match["kind"] if (match := _OF_PROFILER.fullmatch(name)) else "" for name in ranges.names]
    index, name = _chosen(ranges, [kind != "" for kind in kinds])
    kind = [kinds[i] for i in name.tolist()]
    return _by_nesting(ranges, index, kind, "the module calls that PyTorch's profiler wrote", numbered=True)


def _of_nsys(ranges: Ranges) -> Calls:
    """A call's class is that of the ``forward`` right inside, where nsys wrote one."""
    index, _ = _chosen(ranges, [_OF_NSYS.fullmatch(name) is not None for name in ranges.names])
    kinds = [match["kind"] if (match := _FORWARD_OF_NSYS.fullmatch(name)) else "" for name in ranges.names]
    inner, name = _chosen(ranges, [kind != "" for kind in kinds])
    both = np.concatenate([index, inner])
    parent = parents(ranges.thread[both], ranges.start[both], ranges.end[both])
    kind_of_call = {int(p): kinds[n] for p, n in zip(parent[len(index) :], name.tolist(), strict=True)}
    kind = [kind_of_call.get(call, _NO_KIND) for call in range(len(index))]
    return _by_nesting(ranges, index, kind, "the module calls that nsys wrote", numbered=True)


def _of_program(attributed: AttributedTrace) -> Calls | None:
    """The program's own ranges inside its forward passes, and wherever else it is not in a backward pass."""
    ranges, roles = attributed.trace.ranges, attributed.roles
    every = attributed.trace.operators
    operators = {every.names[code] for code in distinct(every.name)}
    own = [not (is_framework_name(name) or name in operators) for name in ranges.names]
    chosen = np.array([*own, False])[ranges.name] & ~roles.any_phase & ~roles.mask("warmup")
    phases = ranges.select(roles.leaf & ~roles.mask("backward"))
    chosen &= any_open(phases.thread, phases.start, phases.end, ranges.thread, ranges.start)
    index = np.flatnonzero(chosen)
    if not len(index):
        return None
    names = [ranges.names[i] for i in ranges.name[index].tolist()]
    return _by_nesting(ranges, index, names, "the program's own ranges", numbered=False)


def _by_nesting(ranges: Ranges, index: Ints, names: list[str], source: str, *, numbered: bool) -> Calls:
    """Calls whose path is that of the call around them and their own name; ``numbered`` in the order of its calls."""
    parent = parents(ranges.thread[index], ranges.start[index], ranges.end[index])
    order = np.lexsort((-ranges.end[index], ranges.start[index], ranges.thread[index]))
    path_of: dict[int, Path] = {-1: ()}
    seen: dict[int, Counter[str]] = {}
    for call in order.tolist():
        around, name = int(parent[call]), names[call]
        if numbered and around >= 0:  # of the models, each call is one of the same model
            times = seen.setdefault(around, Counter())
            times[name] += 1
            name = f"{name}[{times[name] - 1}]"
        path_of[call] = (*path_of[around], name)
    paths = sorted({path for call, path in path_of.items() if call >= 0})
    code = {path: i for i, path in enumerate(paths)}
    kinds = tuple(path[-1].partition("[")[0] for path in paths) if numbered else ("",) * len(paths)
    return Calls(index, np.array([code[path_of[i]] for i in range(len(index))], np.int64), tuple(paths), kinds, source)


def parents(group: Ints, start: Ints, end: Ints) -> Ints:
    """Shape (ranges,): the innermost other range of its group around each, -1 for none."""
    parent = np.full(len(start), -1, np.int64)
    stack: list[int] = []
    groups, ends = group.tolist(), end.tolist()
    for one in np.lexsort((-end, start, group)).tolist():
        while stack and (groups[stack[-1]] != groups[one] or ends[stack[-1]] < ends[one]):
            stack.pop()
        if stack:
            parent[one] = stack[-1]
        stack.append(one)
    return parent


def is_call(calls: Calls, ranges: int) -> Bools:
    """True for the ranges, of so many, that are calls."""
    mask = np.zeros(ranges, np.bool_)
    mask[calls.range] = True
    return mask
