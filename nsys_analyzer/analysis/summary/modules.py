"""The time and the FLOPs of each module of a model, and modules of one kind beside each other as one: its layers.

FLOPs were counted while the program ran.
"""

from __future__ import annotations

import re
import statistics
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import takewhile
from typing import NamedTuple

import numpy as np

from nsys_analyzer.analysis.intervals import NONE, Timeline
from nsys_analyzer.analysis.kernels.class_rules import COMMUNICATION
from nsys_analyzer.analysis.ranges.calls import CallFinder, ModuleCalls, Path, find_module_calls, split_module_path
from nsys_analyzer.analysis.ranges.instances import AttributedTrace
from nsys_analyzer.analysis.ranges.phases import OTHER_STEP, STEP
from nsys_analyzer.configuration import CountedFlops
from nsys_analyzer.trace.arrays import Bools, Ints, distinct
from nsys_analyzer.trace.columns import KERNEL
from nsys_analyzer.trace.schema import NS_PER_MS

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

    def holds(self, other: Module) -> bool:
        """Returns whether a module behind this one may lie in it."""
        return other.depth > self.depth


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
    """

    source: str
    per: str
    modules: tuple[Module, ...]
    outside_forward: Work
    outside_backward: Work
    communication_forward: Work
    communication_backward: Work
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

    Of modules that hold no others and have a class nothing says that they are alike.

    Returns:
        The modules with those of one kind as one, and the outliers among these.
    """
    groups: dict[_Kind, list[Module]] = {}
    around: list[_Kind] = []
    for place, module in enumerate(modules):
        behind = takewhile(module.holds, modules[place + 1 :])
        inside = tuple((one.path[len(module.path) :], one.kind) for one in behind)
        label = _NUMBER.sub("*", module.label) if inside or not module.kind else module.label
        del around[module.depth :]
        around.append(_Kind(around[-1] if around else None, label, module.kind, inside))
        groups.setdefault(around[-1], []).append(module)
    folded: dict[_Kind | None, Module] = {}
    outliers: list[Outlier] = []
    for kind, alike in groups.items():
        outer, several = folded.get(kind.around), len({one.label for one in alike}) > 1
        label = kind.label if several else alike[0].label
        folded[kind] = replace(
            alike[0],
            path=f"{outer.path}.{label}" if outer else label,
            label=label,
            forward=_sum([one.forward for one in alike]),
            backward=_sum([one.backward for one in alike]),
            own_forward_ms=sum(one.own_forward_ms for one in alike),
            own_backward_ms=sum(one.own_backward_ms for one in alike),
            count=len(alike),
        )
        typical = statistics.median(one.ms for one in alike)
        if several and len(alike) >= _FEWEST:
            outliers += [Outlier(one.path, one.ms, typical) for one in alike if abs(one.ms - typical) > _FAR * typical]
    return tuple(folded.values()), tuple(outliers)


class _Kind(NamedTuple):
    """What modules that are folded have in common: a label without its number, a class, paths and classes inside."""

    around: _Kind | None
    label: str
    kind: str
    inside: tuple[tuple[str, str], ...]


def _sum(works: Sequence[Work]) -> Work:
    """Adds up some work; its FLOPs are known where all are."""
    flops = [work.flops for work in works if work.flops is not None]
    total_flops = sum(flops) if len(flops) == len(works) else None
    return Work(sum(work.ms for work in works), sum(work.launches for work in works), total_flops)


_WAYS = len(DIRECTIONS)
#: The phases, by the names of counted FLOPs, whose work is backward's: a forward pass that runs again is, too.
_BACKWARD_PHASES = ("backward", "recomputed")


def summarize_modules(attributed: AttributedTrace, process: int, *, by_ranges: bool = True) -> Modules | None:
    """Sums up the time of each module of one process, mean of a step; None where no range names a module.

    Where ranges do not tell the steps (``by_ranges``), as one of the profiler around several does not, the figures are
    those of a forward pass.

    Counted are the kernels of measured phases: those of backward phases as backward, all others as forward. Optimizers
    are no part of a module.
    """
    calls = find_module_calls(attributed)
    if calls is None:
        return None
    trace = attributed.trace
    per, units, counted = _units(attributed, process, by_ranges=by_ranges)
    is_backward = attributed.instances.phase == attributed.instances.phases.index("backward")
    # Of each instance of a phase; the last entry serves what is in none.
    direction = np.append(np.where(counted, np.where(is_backward, BACKWARD, FORWARD), NONE), NONE)
    leaf, step = attributed.instances_of_operations
    of_kernel = direction[np.where(leaf == NONE, step, leaf)]
    kernels = np.flatnonzero((trace.operations.kind == KERNEL) & (of_kernel != NONE))
    call = CallFinder(attributed, calls).calls_of_operations(kernels)
    if not (call != NONE).any():
        return None
    way, duration = of_kernel[kernels], (trace.operations.end - trace.operations.start)[kernels]
    module = np.append(calls.path, len(calls.paths))[call]
    classes = np.array(attributed.kernels.classes, np.str_)[attributed.kernels.code[kernels]]
    module[classes == COMMUNICATION] = len(calls.paths) + 1
    launched = 1 - trace.operations.continues[kernels].astype(np.int64)
    key, size = module * _WAYS + way, (len(calls.paths) + 2) * _WAYS
    columns = (np.bincount(key, values, size) for values in (duration, launched))  # exact below 2**53
    sums = [column.astype(np.int64).reshape(-1, _WAYS) for column in columns]
    tree = _Tree(calls, trace.ranges.start[calls.range], sums, units)
    outside, communication = (
        [tree.work([len(calls.paths) + more], direction) for direction in (FORWARD, BACKWARD)] for more in (0, 1)
    )
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
    )


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
    step = lines.open_at(instances.process, instances.start)
    in_step = counted & (step != NONE)
    if len(steps) and by_ranges:
        in_step[np.delete(steps, distinct(step[in_step]))] = True
        return STEP, len(steps), in_step
    forwards = int((mine & is_unit["forward"]).sum())
    return ("forward", forwards, counted) if forwards else ("capture", 1, counted)


class _Tree:
    """The modules that are called, each below the innermost one whose path its own begins with."""

    def __init__(self, calls: ModuleCalls, started: Ints, sums: Sequence[Ints], units: int) -> None:
        """``started`` are the times of the calls, ``sums`` ns and launches of all units, by module and direction.

        Behind the modules come what is of none, and collectives.
        """
        (self._ns, self._launches), self._calls, self._units = sums, calls, units
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
            if self._launches[below].any():
                own = self._ns[code] / self._units / NS_PER_MS
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
        ns, launches = (int(values[modules, way].sum()) / self._units for values in (self._ns, self._launches))
        return Work(ns / NS_PER_MS, launches)

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
        words = split_module_path(name.rpartition(": ")[0])
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
