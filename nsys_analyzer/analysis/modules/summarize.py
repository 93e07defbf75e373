"""From an attributed trace to the time of each module."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from nsys_analyzer.analysis.intervals.timeline import NONE, Timeline
from nsys_analyzer.analysis.kernels.classes import COMMUNICATION
from nsys_analyzer.analysis.modules.calls import Calls, Path, find_calls
from nsys_analyzer.analysis.modules.module import BACKWARD, DIRECTIONS, FORWARD, Module, Modules, Work
from nsys_analyzer.analysis.modules.places import Places
from nsys_analyzer.analysis.modules.shapes import counted_operators
from nsys_analyzer.analysis.ranges.instances import AttributedTrace
from nsys_analyzer.analysis.ranges.phases import ATTENTION_PARTS, OTHER_STEP, STEP
from nsys_analyzer.trace.arrays import Bools, Ints
from nsys_analyzer.trace.columns import KERNEL, process_of

_NS_PER_MS = 1e6
_WAYS = len(DIRECTIONS)


class _Sums(NamedTuple):
    """Sums over all units, by module and direction; behind the modules come what is of none, and collectives."""

    ns: Ints
    launches: Ints
    flops: Ints


def summarize_modules(attributed: AttributedTrace, process: int) -> Modules | None:
    """The time of each module of one process, mean of a step; None where no range names a module.

    Counted are the kernels of measured phases: those of backward phases as backward, all others as forward. Optimizers
    are no part of a module.
    """
    calls = find_calls(attributed)
    if calls is None:
        return None
    trace = attributed.trace
    per, units, counted = _units(attributed, process)
    is_backward = attributed.instances.phase == attributed.instances.phases.index("backward")
    # Of each instance of a phase; the last entry serves what is in none.
    direction = np.append(np.where(counted, np.where(is_backward, BACKWARD, FORWARD), NONE), NONE)
    of_kernel = direction[attributed.instance_pair[0]]
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
    sums = _Sums(ns, launches, _flops(attributed, calls, places, direction))
    tree = _Tree(calls, trace.ranges.start[calls.range], sums, units)
    outside, communication = (
        [tree.work([len(calls.paths) + more], one) for one in (FORWARD, BACKWARD)] for more in (0, 1)
    )
    softmax = (way == BACKWARD) & _is_softmax(attributed, calls, call, classes)
    found = Work(int(duration[softmax].sum()) / _NS_PER_MS, int(softmax.sum()))
    passes = int((direction[:-1] == BACKWARD).sum())
    a_pass = Work(found.ms / passes, found.launches / passes) if found.launches else None
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
        softmax_backward=a_pass,
    )


def _flops(attributed: AttributedTrace, calls: Calls, places: Places, direction: Ints) -> Ints:
    """The FLOPs of the operators with sizes, by module and direction; ``direction`` is that of each instance."""
    instances = attributed.instances
    operators, flops = counted_operators(attributed.trace.operators)
    started = attributed.trace.operators.select(operators)
    phases = Timeline(instances.process, instances.start, instances.end, latest=True)
    way = direction[phases.at(process_of(started.thread), started.start)]
    counted = (way != NONE) & ~attributed.in_warmup(process_of(started.thread), started.start)
    module = np.append(calls.path, len(calls.paths))[places.of_operators(operators[counted])]
    return _by_module(calls, module, way[counted], flops[counted])


def _is_softmax(attributed: AttributedTrace, calls: Calls, call: Ints, classes: Any) -> Bools:
    """Which kernels are of attention's softmax: by the range around it in forward, else by name inside attention."""
    part = np.append(attributed.roles.codes(ATTENTION_PARTS)[calls.range], NONE)[call]
    by_range: Bools = part == ATTENTION_PARTS.index("softmax")
    by_name: Bools = (part == ATTENTION_PARTS.index("attention")) & (classes == "softmax")
    return by_range if by_range.any() else by_name


def _units(attributed: AttributedTrace, process: int) -> tuple[str, int, Bools]:
    """What figures are a mean of, how many these are, and the instances of phases that count.

    Units are measured steps that hold phases, else forward passes.
    """
    instances = attributed.instances
    is_unit = {name: instances.phase == instances.phases.index(name) for name in (STEP, "forward")}
    mine = instances.measured & (instances.process == process)
    counted = mine.copy()
    for name in ("optimizer", STEP, OTHER_STEP):
        counted &= instances.phase != instances.phases.index(name)
    steps = np.flatnonzero(mine & is_unit[STEP])
    lines = Timeline(instances.process[steps], instances.start[steps], instances.end[steps], latest=True)
    in_step = ~is_unit[STEP] & (instances.phase != instances.phases.index(OTHER_STEP))
    in_step &= lines.at(instances.process, instances.start) != NONE
    if in_step.any():
        return STEP, len(steps), counted & in_step
    forwards = int((mine & is_unit["forward"]).sum())
    return ("forward", forwards, counted) if forwards else ("capture", 1, counted)


def _by_module(calls: Calls, module: Ints, way: Ints, values: Ints) -> Ints:
    """Sums (exact below 2**53), shape (modules + 2, directions)."""
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
        known = set(calls.paths)
        for code in np.argsort(first, kind="stable").tolist():
            self._inside.setdefault(_around(calls.paths[code], known), []).append(code)

    def modules(self, around: Path = (), depth: int = 0) -> Iterator[Module]:
        """The modules inside another one that launch something, each with those inside it behind it."""
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
        """The work of some modules in one direction."""
        ns, launches, flops = (int(values[modules, way].sum()) / self._units for values in self._sums)
        return Work(ns / _NS_PER_MS, launches, flops or None)

    def _below(self, code: int) -> Sequence[int]:
        """A module and all inside it."""
        return [code, *(one for child in self._inside.get(self._calls.paths[code], ()) for one in self._below(child))]


def _around(path: Path, known: set[Path]) -> Path:
    """The path of the innermost module around one; empty for the outermost."""
    shorter = (path[:length] for length in range(len(path) - 1, 0, -1))
    return next((one for one in shorter if one in known), ())
