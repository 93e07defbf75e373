"""Modules of one kind that lie beside each other, as one: the layers of a model."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from nsys_analyzer.analysis.modules.module import Module, Work

#: The number that tells layers apart: ``layers.0``, a range ``block 0``, the place of a call ``Linear[0]``.
_NUMBER = re.compile(r"(?:(?<![^.])|(?<=[\s_\-\[a-z]))\d+(?=\]?$)")
#: A layer that takes longer or less than the others' median by more than this is odd.
_ODD = 0.2
#: Alike are at least so many.
_LEAST = 2


@dataclass(frozen=True)
class Odd:
    """A layer that differs: its path, its time, and the median of all its kind, ms."""

    path: str
    ms: float
    median_ms: float


@dataclass(frozen=True)
class Folded:
    """Modules with those of one kind as one, and the odd ones among these."""

    modules: tuple[Module, ...]
    odd: tuple[Odd, ...]


def fold_modules(modules: Sequence[Module]) -> Folded:
    """Folds the modules beside each other that differ in a number of their label alone, and in nothing inside them."""
    odd: list[Odd] = []
    folded = tuple(_folded(_trees(modules), odd))
    return Folded(folded, tuple(odd))


@dataclass(frozen=True)
class _Node:
    module: Module
    inside: tuple[_Node, ...]

    @property
    def key(self) -> tuple[object, ...]:
        """Equal for modules that may be folded."""
        inside = tuple((one.module.label, one.key) for one in self.inside)
        return _starred(self), self.module.kind, inside


def _trees(modules: Sequence[Module]) -> tuple[_Node, ...]:
    """The outermost modules, each with those inside."""
    found, start = [], 0
    while start < len(modules):
        depth = modules[start].depth
        end = next((i for i in range(start + 1, len(modules)) if modules[i].depth <= depth), len(modules))
        found.append(_Node(modules[start], _trees(modules[start + 1 : end])))
        start = end
    return tuple(found)


def _folded(nodes: Sequence[_Node], odd: list[Odd], around: str = "") -> Iterator[Module]:
    groups: dict[tuple[object, ...], list[_Node]] = {}
    for node in nodes:
        groups.setdefault(node.key, []).append(node)
    for alike in groups.values():
        if len(alike) < _LEAST:
            for node in alike:
                path = f"{around}.{node.module.label}" if around else node.module.label
                yield replace(node.module, path=path)
                yield from _folded(node.inside, odd, path)
            continue
        odd += _odd(alike, around)
        merged = _merged(alike)
        path = f"{around}.{merged.module.label}" if around else merged.module.label
        yield replace(merged.module, path=path)
        yield from _folded(merged.inside, odd, path)


def _odd(alike: Sequence[_Node], around: str) -> Iterator[Odd]:
    """Those that differ; inside layers that are folded, each is the mean of its own in all of them."""
    times = [node.module.ms / node.module.count for node in alike]
    typical = float(np.median(times))
    for node, ms in zip(alike, times, strict=True):
        if len(alike) > _LEAST and abs(ms - typical) > _ODD * typical:
            yield Odd(f"{around}.{node.module.label}" if around else node.module.label, ms, typical)


def _merged(alike: Sequence[_Node]) -> _Node:
    """Modules of one kind as one, and what lies inside them in the same way."""
    first = alike[0].module
    module = replace(
        first,
        label=_starred(alike[0]) if len({node.module.label for node in alike}) > 1 else first.label,
        forward=_added([node.module.forward for node in alike]),
        backward=_added([node.module.backward for node in alike]),
        own_forward_ms=sum(node.module.own_forward_ms for node in alike),
        own_backward_ms=sum(node.module.own_backward_ms for node in alike),
        count=sum(node.module.count for node in alike),
    )
    return _Node(module, tuple(map(_merged, zip(*(node.inside for node in alike), strict=True))))


def _starred(node: _Node) -> str:
    """The label of a layer with a star for its number; of modules that hold no others nothing says they are alike."""
    is_layer = node.inside or not node.module.kind
    return _NUMBER.sub("*", node.module.label) if is_layer else node.module.label


def _added(works: Sequence[Work]) -> Work:
    flops = [work.flops for work in works]
    known = None if None in flops else sum(one for one in flops if one is not None)
    return Work(sum(work.ms for work in works), sum(work.launches for work in works), known)
