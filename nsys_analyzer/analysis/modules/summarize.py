"""From an attributed trace to the time of each module."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from nsys_analyzer.analysis.intervals.timeline import NONE
from nsys_analyzer.analysis.modules.calls import Calls, Path, find_calls
from nsys_analyzer.analysis.modules.module import BACKWARD, FORWARD, Module, Modules, Work
from nsys_analyzer.analysis.modules.places import Places
from nsys_analyzer.analysis.ranges.instances import AttributedTrace
from nsys_analyzer.analysis.ranges.phases import STEP
from nsys_analyzer.trace.arrays import Ints
from nsys_analyzer.trace.columns import KERNEL

_NS_PER_MS = 1e6


def summarize_modules(attributed: AttributedTrace, process: int) -> Modules | None:
    """The time of each module of one process, mean of a step; None where no range names a module.

    Counted are the kernels of measured phases: those of backward phases as backward, all others as forward. Optimizers
    are no part of a module.
    """
    calls = find_calls(attributed)
    if calls is None:
        return None
    operations, instances = attributed.trace.operations, attributed.instances
    leaf, _ = attributed.instance_pair
    counted = instances.measured & (instances.process == process)
    counted &= instances.phase != instances.phases.index("optimizer")
    chosen = np.flatnonzero((operations.kind == KERNEL) & np.append(counted, False)[leaf])
    call = Places(attributed, calls).of_operations(chosen)
    if not (call != NONE).any():
        return None
    backward = instances.phase[leaf[chosen]] == instances.phases.index("backward")
    module = np.append(calls.path, len(calls.paths))[call]
    group = np.where(backward, BACKWARD, FORWARD) + 2 * module
    shape = len(calls.paths) + 1, 2
    ns = np.bincount(group, (operations.end - operations.start)[chosen], shape[0] * 2).astype(np.int64).reshape(shape)
    launches = np.bincount(group, minlength=shape[0] * 2).reshape(shape)
    per, units = _units(attributed, process)
    first = np.full(len(calls.paths), np.iinfo(np.int64).max)
    np.minimum.at(first, calls.path, attributed.trace.ranges.start[calls.range])
    tree = _Tree(calls, first, ns, launches, units)
    return Modules(
        calls.source, per, tuple(tree.modules()), *(tree.work(ns[-1], launches[-1], way) for way in range(2))
    )


def _units(attributed: AttributedTrace, process: int) -> tuple[str, int]:
    """What figures are a mean of: steps, else forward passes."""
    instances = attributed.instances
    for name in (STEP, "forward"):
        of_phase = instances.phase == instances.phases.index(name)
        if count := int((instances.measured & (instances.process == process) & of_phase).sum()):
            return name, count
    return "capture", 1


class _Tree:
    """The modules that are called, each below the innermost one whose path its own begins with."""

    def __init__(self, calls: Calls, first: Ints, ns: Ints, launches: Ints, units: int) -> None:
        """``first`` is the first call of each module; ``ns`` and ``launches`` have shape (modules + 1, 2)."""
        self._calls, self._units = calls, units
        self._ns, self._launches = ns, launches
        self._inside: dict[Path, list[int]] = {}
        known = set(calls.paths)
        for code in np.argsort(first, kind="stable").tolist():
            self._inside.setdefault(_around(calls.paths[code], known), []).append(code)

    def modules(self, around: Path = (), depth: int = 0) -> Iterator[Module]:
        """The modules inside another one, each with those inside it behind it."""
        for code in self._inside.get(around, ()):
            path = self._calls.paths[code]
            below = self._below(code)
            own = self._ns[code] / self._units / _NS_PER_MS
            ns, launches = self._ns[below].sum(axis=0), self._launches[below].sum(axis=0)
            if launches.any():
                yield Module(
                    path=".".join(path),
                    label=".".join(path[len(around) :]),
                    kind=self._calls.kinds[code],
                    depth=depth,
                    forward=self.work(ns, launches, FORWARD),
                    backward=self.work(ns, launches, BACKWARD),
                    own_forward_ms=float(own[FORWARD]),
                    own_backward_ms=float(own[BACKWARD]),
                )
                yield from self.modules(path, depth + 1)

    def work(self, ns: Ints, launches: Ints, way: int) -> Work:
        """Sums of both directions as the work in one of them."""
        return Work(int(ns[way]) / self._units / _NS_PER_MS, int(launches[way]) / self._units)

    def _below(self, code: int) -> Sequence[int]:
        """A module and all inside it."""
        return [code, *(one for child in self._inside.get(self._calls.paths[code], ()) for one in self._below(child))]


def _around(path: Path, known: set[Path]) -> Path:
    """The path of the innermost module around one; empty for the outermost."""
    shorter = (path[:length] for length in range(len(path) - 1, 0, -1))
    return next((one for one in shorter if one in known), ())
