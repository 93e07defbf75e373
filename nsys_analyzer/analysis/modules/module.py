"""The figures of modules."""

from __future__ import annotations

from dataclasses import dataclass

#: The two directions in which a module works, in the order of ``DIRECTIONS``'s codes.
DIRECTIONS = ("forward", "backward")
FORWARD, BACKWARD = range(2)


@dataclass(frozen=True)
class Work:
    """Kernels in one direction: total kernel time in ms and launches, mean of a step; FLOPs, None where not known."""

    ms: float
    launches: float
    flops: float | None = None

    @property
    def flops_per_s(self) -> float | None:
        """FLOPs per second of kernel time."""
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
        """Kernel time in both directions."""
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

    @property
    def forward_ms(self) -> float:
        """Kernel time of all forward passes, losses and whatever else is neither backward nor an optimizer."""
        inside = sum(one.forward.ms for one in self.modules if not one.depth)
        return inside + self.outside_forward.ms + self.communication_forward.ms

    @property
    def backward_ms(self) -> float:
        """Kernel time of the backward passes."""
        inside = sum(one.backward.ms for one in self.modules if not one.depth)
        return inside + self.outside_backward.ms + self.communication_backward.ms

    @property
    def forward_coverage(self) -> float | None:
        """The share of it, collectives left out, that belongs to a module; None without any."""
        return _coverage(self.forward_ms - self.communication_forward.ms, self.outside_forward.ms)

    @property
    def backward_coverage(self) -> float | None:
        """The same of the backward passes."""
        return _coverage(self.backward_ms - self.communication_backward.ms, self.outside_backward.ms)


def _coverage(all_ms: float, outside_ms: float) -> float | None:
    return 1 - outside_ms / all_ms if all_ms else None
