"""The figures of modules, and modules of one kind that lie beside each other as one: the layers of a model."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

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


@dataclass(frozen=True)
class Folded:
    """Modules with those of one kind as one, and the outliers among these."""

    modules: tuple[Module, ...]
    outliers: tuple[Outlier, ...]


def fold_modules(modules: Sequence[Module]) -> Folded:
    """Folds the modules beside each other that differ in a number of their label alone, and in nothing inside them."""
    outliers: list[Outlier] = []
    folded = tuple(_fold(_trees(modules), outliers))
    return Folded(folded, tuple(outliers))


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
