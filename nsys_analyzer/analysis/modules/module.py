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
        softmax_backward: of all attention, one backward pass; None where none is known.
    """

    source: str
    per: str
    modules: tuple[Module, ...]
    outside_forward: Work
    outside_backward: Work
    softmax_backward: Work | None = None

    @property
    def forward_ms(self) -> float:
        """Kernel time of all forward passes, losses and whatever else is neither backward nor an optimizer."""
        return self.outside_forward.ms + sum(one.forward.ms for one in self.modules if not one.depth)

    @property
    def backward_ms(self) -> float:
        """Kernel time of the backward passes."""
        return self.outside_backward.ms + sum(one.backward.ms for one in self.modules if not one.depth)

    @property
    def forward_coverage(self) -> float | None:
        """The share of it that belongs to a module; None without any."""
        return 1 - self.outside_forward.ms / self.forward_ms if self.forward_ms else None

    @property
    def backward_coverage(self) -> float | None:
        """The same of the backward passes."""
        return 1 - self.outside_backward.ms / self.backward_ms if self.backward_ms else None
