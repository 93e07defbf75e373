"""The time and the FLOPs of each module of a model, and modules of one kind beside each other as one: its layers.

FLOPs were counted while the program ran, or follow from the sizes of operators' inputs where a trace has them: a matmul
of (m, k) and (k, n) is 2·m·k·n, a fused attention of B·H heads, N queries and M keys 4·B·H·N·M·d_head, and twice that
backward: what computes its scores again is no work of the model.
"""

from __future__ import annotations

import json
import math
import re
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import numpy as np

from nsys_analyzer.analysis.intervals import NONE, Timeline
from nsys_analyzer.analysis.kernels.class_rules import COMMUNICATION
from nsys_analyzer.analysis.ranges.calls import Calls, Path, Places, find_calls, parents, path_of
from nsys_analyzer.analysis.ranges.instances import AttributedTrace
from nsys_analyzer.analysis.ranges.phases import ATTENTION_PARTS, OTHER_STEP, STEP
from nsys_analyzer.configuration import CountedFlops
from nsys_analyzer.trace.arrays import Bools, Ints, distinct, distinct_rows, named
from nsys_analyzer.trace.columns import KERNEL, Operators, process_of

#: The two directions in which a module works, in the order of ``DIRECTIONS``'s codes.
DIRECTIONS = ("forward", "backward")
FORWARD, BACKWARD = range(2)
#: The number that tells layers apart: ``layers.0``, a range ``block 0``, the place of a call ``Linear[0]``.
_NUMBER = re.compile(r"(?:(?<![^.])|(?<=[\s_\-\[a-z]))\d+(?=\]?$)")
#: A layer that takes longer or less than the others' median by more than this is an outlier, among so many at least: of
#: two there is no telling which.
_FAR, _FEWEST = 0.2, 3


@dataclass(frozen=True)
class Work:
    """Kernels in one direction: total kernel time in ms and launches, mean of a step; FLOPs, None where not known."""

    ms: float
    launches: float
    flops: float | None = None

    @property
    def flops_per_s(self) -> float | None:
        """Returns FLOPs per second of kernel time."""
        return self.flops / (self.ms / 1e3) if self.flops and self.ms else None


@dataclass(frozen=True)
class Module:
    """One module, or several of one kind that lie beside each other.

    Attributes:
        path: its words joined by dots, the model's class first.
        label: the part of the path below the module around it.
        kind: its class, empty where that is not known.
        depth: modules around it.
        count: how many modules it stands for; their work is added up.
        forward, backward: with all modules inside.
        own_forward_ms, own_backward_ms: without them.
        line: file and line of its class's ``forward`` in the program, empty where that is not known.
    """

    path: str
    label: str
    kind: str
    depth: int
    forward: Work
    backward: Work
    own_forward_ms: float
    own_backward_ms: float
    count: int = 1
    line: str = ""

    @property
    def ms(self) -> float:
        """Returns the kernel time in both directions."""
        return self.forward.ms + self.backward.ms


@dataclass(frozen=True)
class Modules:
    """The modules of one process of a capture.

    Attributes:
        source: what wrote the ranges, in words.
        per: the unit of the figures: one "step", one "forward", or the "capture".
        modules: each behind the one that it lies in, siblings in the order of their first calls.
        outside_forward, outside_backward: kernels of no module.
        communication_forward, communication_backward: collectives, which are of no module: a bucket of gradients is of
            many.
        forward_ms, backward_ms: kernel time of all passes; forward with whatever is neither backward nor an optimizer.
        forward_coverage, backward_coverage: the share of it, collectives left out, that belongs to a module; None
            without any.
        softmax_backward: of all attention, one backward pass; None where none is known.
    """

    source: str
    per: str
    modules: tuple[Module, ...]
    outside_forward: Work
    outside_backward: Work
    communication_forward: Work
    communication_backward: Work
    softmax_backward: Work | None = None
    forward_ms: float = field(init=False)
    backward_ms: float = field(init=False)
    forward_coverage: float | None = field(init=False)
    backward_coverage: float | None = field(init=False)

    def __post_init__(self) -> None:
        """Fills the sums of both directions."""
        for name in DIRECTIONS:
            outside, communication = getattr(self, f"outside_{name}").ms, getattr(self, f"communication_{name}").ms
            inside = sum(getattr(module, name).ms for module in self.modules if not module.depth)
            ms = inside + outside + communication
            computing = ms - communication
            vars(self)[f"{name}_ms"] = ms
            vars(self)[f"{name}_coverage"] = 1 - outside / computing if computing else None


@dataclass(frozen=True)
class Outlier:
    """A layer that differs: its path, its time, and the median of all its kind, ms."""

    path: str
    ms: float
    median_ms: float


def fold_modules(modules: Sequence[Module]) -> tuple[tuple[Module, ...], tuple[Outlier, ...]]:
    """Folds the modules beside each other that differ in a number of their label alone, and in nothing inside them.

    Returns:
        The modules with those of one kind as one, and the outliers among these.
    """
    outliers: list[Outlier] = []
    folded = tuple(_fold(_trees(modules), outliers))
    return folded, tuple(outliers)


@dataclass(frozen=True)
class _Node:
    module: Module
    inside: tuple[_Node, ...]

    @property
    def starred(self) -> str:
        """The label of a layer with a star for its number.

        Of modules that hold no others and have a class nothing says that they are alike.
        """
        is_layer = self.inside or not self.module.kind
        return _NUMBER.sub("*", self.module.label) if is_layer else self.module.label

    @property
    def key(self) -> tuple[object, ...]:
        """Equal for modules that may be folded."""
        return self.starred, self.module.kind, tuple((node.module.label, node.key) for node in self.inside)


def _trees(modules: Sequence[Module]) -> tuple[_Node, ...]:
    """Returns the outermost modules, each with those inside."""
    trees, start = [], 0
    while start < len(modules):
        depth = modules[start].depth
        end = next((i for i in range(start + 1, len(modules)) if modules[i].depth <= depth), len(modules))
        trees.append(_Node(modules[start], _trees(modules[start + 1 : end])))
        start = end
    return tuple(trees)


def _fold(nodes: Sequence[_Node], outliers: list[Outlier], prefix: str = "") -> Iterator[Module]:
    """Yields modules with those that are alike as one; ``prefix`` is the path around them and a dot."""
    groups: dict[tuple[object, ...], list[_Node]] = {}
    for node in nodes:
        groups.setdefault(node.key, []).append(node)
    for alike in groups.values():
        outliers += _outliers(alike, prefix)
        merged = _merged(alike)
        path = prefix + merged.module.label
        yield replace(merged.module, path=path)
        yield from _fold(merged.inside, outliers, f"{path}.")


def _outliers(alike: Sequence[_Node], prefix: str) -> Iterator[Outlier]:
    """Yields those that differ; inside layers that are folded, each is the mean of its own in all of them."""
    times = [node.module.ms / node.module.count for node in alike]
    typical = float(np.median(times))
    for node, ms in zip(alike, times, strict=True):
        if len(alike) >= _FEWEST and abs(ms - typical) > _FAR * typical:
            yield Outlier(prefix + node.module.label, ms, typical)


def _merged(alike: Sequence[_Node]) -> _Node:
    """Returns modules of one kind as one, and what lies inside them in the same way."""
    first = alike[0].module
    module = replace(
        first,
        label=alike[0].starred if len({node.module.label for node in alike}) > 1 else first.label,
        forward=_sum([node.module.forward for node in alike]),
        backward=_sum([node.module.backward for node in alike]),
        own_forward_ms=sum(node.module.own_forward_ms for node in alike),
        own_backward_ms=sum(node.module.own_backward_ms for node in alike),
        count=sum(node.module.count for node in alike),
    )
    return _Node(module, tuple(map(_merged, zip(*(node.inside for node in alike), strict=True))))


def _sum(works: Sequence[Work]) -> Work:
    """Adds up some work; its FLOPs are known where all are."""
    flops = [work.flops for work in works if work.flops is not None]
    total_flops = sum(flops) if len(flops) == len(works) else None
    return Work(sum(work.ms for work in works), sum(work.launches for work in works), total_flops)


_NS_PER_MS = 1e6
_WAYS = len(DIRECTIONS)
#: The phases, by the names of counted FLOPs, whose work is backward's: a forward pass that runs again is, too.
_BACKWARD_PHASES = ("backward", "recomputed")
#: The kinds of fused attention, as ATen calls them behind ``aten::_scaled_dot_product_``.
_FUSED_ATTENTIONS = ("flash_attention", "flash_attention_for_cpu", "efficient_attention", "cudnn_attention")
#: More FLOPs than this no operator has, and fewer fit 64 bits.
_MOST_FLOPS = 2**62


class _Sums(NamedTuple):
    """Sums over all units, by module and direction; behind the modules come what is of none, and collectives."""

    ns: Ints
    launches: Ints
    flops: Ints


def summarize_modules(attributed: AttributedTrace, process: int, *, by_ranges: bool = True) -> Modules | None:
    """Sums up the time of each module of one process, mean of a step; None where no range names a module.

    Where ranges do not tell the steps (``by_ranges``), as one of the profiler around several does not, the figures are
    those of a forward pass.

    Counted are the kernels of measured phases: those of backward phases as backward, all others as forward. Optimizers
    are no part of a module.
    """
    calls = find_calls(attributed)
    if calls is None:
        return None
    trace = attributed.trace
    per, units, counted = _units(attributed, process, by_ranges=by_ranges)
    is_backward = attributed.instances.phase == attributed.instances.phases.index("backward")
    # Of each instance of a phase; the last entry serves what is in none.
    direction = np.append(np.where(counted, np.where(is_backward, BACKWARD, FORWARD), NONE), NONE)
    leaf, step = attributed.instance_pair
    of_kernel = direction[np.where(leaf == NONE, step, leaf)]
    kernels = np.flatnonzero((trace.operations.kind == KERNEL) & (of_kernel != NONE))
    places = Places(attributed, calls)
    call = places.of_operations(kernels)
    if not (call != NONE).any():
        return None
    way, duration = of_kernel[kernels], (trace.operations.end - trace.operations.start)[kernels]
    module = np.append(calls.path, len(calls.paths))[call]
    classes = np.array(attributed.kernels.classes, np.str_)[attributed.kernels.code[kernels]]
    module[classes == COMMUNICATION] = len(calls.paths) + 1
    ns, launches = (_by_module(calls, module, way, values) for values in (duration, np.ones_like(duration)))
    sums = _Sums(ns, launches, _flops_by_module(attributed, calls, places, direction))
    tree = _Tree(calls, trace.ranges.start[calls.range], sums, units)
    outside, communication = (
        [tree.work([len(calls.paths) + more], direction) for direction in (FORWARD, BACKWARD)] for more in (0, 1)
    )
    softmax = (way == BACKWARD) & _is_softmax(attributed, calls, call, classes)
    softmax_ms, softmax_launches = int(duration[softmax].sum()) / _NS_PER_MS, int(softmax.sum())
    passes = int((direction[:-1] == BACKWARD).sum())
    modules = tuple(tree.modules())
    if not modules:  # but for collectives
        return None
    return Modules(
        source=calls.source,
        per=per,
        modules=modules,
        outside_forward=outside[FORWARD],
        outside_backward=outside[BACKWARD],
        communication_forward=communication[FORWARD],
        communication_backward=communication[BACKWARD],
        softmax_backward=Work(softmax_ms / passes, softmax_launches / passes) if softmax_launches else None,
    )


def _flops_by_module(attributed: AttributedTrace, calls: Calls, places: Places, direction: Ints) -> Ints:
    """Sums up the FLOPs of operators with sizes, by module and direction; ``direction`` is that of each instance."""
    instances = attributed.instances
    operators, flops = counted_operators(attributed.trace.operators)
    started = attributed.trace.operators.select(operators)
    phases = Timeline(instances.process, instances.start, instances.end, latest=True)
    way = direction[phases.at(process_of(started.thread), started.start)]
    counted = (way != NONE) & ~attributed.in_warmup(process_of(started.thread), started.start)
    module = np.append(calls.path, len(calls.paths))[places.of_operators(operators[counted])]
    return _by_module(calls, module, way[counted], flops[counted])


def _is_softmax(attributed: AttributedTrace, calls: Calls, call: Ints, classes: Any) -> Bools:
    """Marks the kernels of attention's softmax: by the range around it in forward, else by name inside attention."""
    part = np.append(attributed.roles.codes(ATTENTION_PARTS)[calls.range], NONE)[call]
    by_range: Bools = part == ATTENTION_PARTS.index("softmax")
    by_name: Bools = (part == ATTENTION_PARTS.index("attention")) & (classes == "softmax")
    return by_range if by_range.any() else by_name


def _units(attributed: AttributedTrace, process: int, *, by_ranges: bool) -> tuple[str, int, Bools]:
    """Returns what figures are a mean of, how many these are, and the instances of phases that count.

    Units are measured steps, else forward passes. A step without phases, as of an engine that serves, counts whole.
    """
    instances = attributed.instances
    is_unit = {name: instances.phase == instances.phases.index(name) for name in (STEP, "forward")}
    mine = instances.measured & (instances.process == process)
    counted = mine.copy()
    for name in ("optimizer", STEP, OTHER_STEP):
        counted &= instances.phase != instances.phases.index(name)
    steps = np.flatnonzero(mine & is_unit[STEP])
    lines = Timeline(instances.process[steps], instances.start[steps], instances.end[steps], latest=True)
    step = lines.at(instances.process, instances.start)
    in_step = counted & (step != NONE)
    if len(steps) and by_ranges:
        in_step[np.delete(steps, distinct(step[in_step]))] = True
        return STEP, len(steps), in_step
    forwards = int((mine & is_unit["forward"]).sum())
    return ("forward", forwards, counted) if forwards else ("capture", 1, counted)


def _by_module(calls: Calls, module: Ints, way: Ints, values: Ints) -> Ints:
    """Returns sums (exact below 2**53), shape (modules + 2, directions)."""
    size = (len(calls.paths) + 2) * _WAYS
    return np.bincount(module * _WAYS + way, values, size).astype(np.int64).reshape(-1, _WAYS)


class _Tree:
    """The modules that are called, each below the innermost one whose path its own begins with."""

    def __init__(self, calls: Calls, started: Ints, sums: _Sums, units: int) -> None:
        """``started`` are the times of the calls."""
        self._calls, self._sums, self._units = calls, sums, units
        first = np.full(len(calls.paths), np.iinfo(np.int64).max)
        np.minimum.at(first, calls.path, started)
        self._inside: dict[Path, list[int]] = {}
        paths = set(calls.paths)
        for code in np.argsort(first, kind="stable").tolist():
            path = calls.paths[code]
            shorter = (path[:length] for length in range(len(path) - 1, 0, -1))
            around = next((other for other in shorter if other in paths), ())  # empty for the outermost
            self._inside.setdefault(around, []).append(code)

    def modules(self, around: Path = (), depth: int = 0) -> Iterator[Module]:
        """Yields the modules inside another one that launch something, each with those inside it behind it."""
        for code in self._inside.get(around, ()):
            path, below = self._calls.paths[code], self._below(code)
            if self._sums.launches[below].any():
                own = self._sums.ns[code] / self._units / _NS_PER_MS
                yield Module(
                    path=".".join(path),
                    label=".".join(path[len(around) :]),
                    kind=self._calls.kinds[code],
                    depth=depth,
                    forward=self.work(below, FORWARD),
                    backward=self.work(below, BACKWARD),
                    own_forward_ms=float(own[FORWARD]),
                    own_backward_ms=float(own[BACKWARD]),
                )
                yield from self.modules(path, depth + 1)

    def work(self, modules: Sequence[int], way: int) -> Work:
        """Returns the work of some modules in one direction."""
        ns, launches, flops = (int(values[modules, way].sum()) / self._units for values in self._sums)
        return Work(ns / _NS_PER_MS, launches, flops or None)

    def _below(self, code: int) -> Sequence[int]:
        """Returns a module and all inside it."""
        inside = self._inside.get(self._calls.paths[code], ())
        return [code, *(below for child in inside for below in self._below(child))]


def with_flops(modules: Modules, counted: CountedFlops) -> Modules:
    """Returns the modules of steps with the FLOPs that were counted in one step, those of the modules inside included.

    A forward pass that runs again in backward is work of backward.
    """
    if modules.per != "step":
        return modules
    flops: dict[str, dict[str, float]] = {way: defaultdict(float) for way in DIRECTIONS}
    for name, by_phase in counted.modules.items():
        words = path_of(name.rpartition(": ")[0])
        for phase, count in by_phase.items():
            way = flops["backward" if phase in _BACKWARD_PHASES else "forward"]
            for length in range(1, len(words) + 1):
                way[".".join(words[:length])] += count

    def with_counted(module: Module) -> Module:
        forward, backward = (direction.get(module.path) for direction in flops.values())
        return replace(
            module,
            forward=module.forward if forward is None else replace(module.forward, flops=forward),
            backward=module.backward if backward is None else replace(module.backward, flops=backward),
        )

    return replace(modules, modules=tuple(map(with_counted, modules.modules)))


def counted_operators(operators: Operators) -> tuple[Ints, Ints]:
    """Finds the operators with known FLOPs, and these; of one that calls another of them (a cast) the inner one."""
    has_formula = named(operators, _FORMULAS.__contains__)
    index = np.flatnonzero(has_formula & (operators.shapes >= 0))
    around = parents(operators.thread[index], operators.start[index], operators.end[index])
    index = np.delete(index, np.unique(around[around >= 0]))
    name, shapes = operators.name[index], operators.shapes[index]
    first, pair = distinct_rows(name, shapes)
    pairs = zip(name[first].tolist(), shapes[first].tolist(), strict=True)
    flops = [_flops(operators.names[code], operators.shape_texts[shape]) for code, shape in pairs]
    return index, np.array(flops, np.int64)[pair]


def _flops(name: str, sizes: str) -> int:
    """Returns the FLOPs of an operator with inputs of these sizes; 0 where they are not those of the operator."""
    try:
        flops = _FORMULAS[name](json.loads(sizes))
    except (IndexError, RecursionError, TypeError, ValueError):
        return 0
    return flops if 0 <= flops < _MOST_FLOPS else 0


def _matmul(left: Sequence[int], right: Sequence[int]) -> int:
    *batch, rows, inner = map(int, left)
    *_, same, columns = map(int, right)
    return 2 * math.prod(batch) * rows * inner * columns if inner == same else 0


def _attention(query: Sequence[int], key: Sequence[int]) -> int:
    batch, heads, queries, d_head = map(int, query)
    return 4 * batch * heads * queries * int(key[-2]) * d_head


#: The FLOPs of an operator by the sizes of its inputs; the first input of a fused attention's backward is a gradient.
_FORMULAS: Mapping[str, Callable[[Sequence[Sequence[int]]], int]] = {
    "aten::mm": lambda sizes: _matmul(sizes[0], sizes[1]),
    "aten::bmm": lambda sizes: _matmul(sizes[0], sizes[1]),
    "aten::addmm": lambda sizes: _matmul(sizes[1], sizes[2]),
    "aten::baddbmm": lambda sizes: _matmul(sizes[1], sizes[2]),
    **{f"aten::_scaled_dot_product_{name}": lambda sizes: _attention(*sizes[:2]) for name in _FUSED_ATTENTIONS},
    **{
        f"aten::_scaled_dot_product_{name}_backward": lambda sizes: 2 * _attention(*sizes[1:3])
        for name in _FUSED_ATTENTIONS
    },
}
