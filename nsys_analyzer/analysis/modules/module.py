"""The figures of modules."""

from __future__ import annotations

from dataclasses import dataclass, field

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
            inside = sum(getattr(one, name).ms for one in self.modules if not one.depth)
            ms = inside + outside + communication
            computing = ms - communication
            vars(self)[f"{name}_ms"] = ms
            vars(self)[f"{name}_coverage"] = 1 - outside / computing if computing else None
