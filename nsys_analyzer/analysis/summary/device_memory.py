"""Device memory as a profiler sees it: what was there when the measured steps began, and what changed in them."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from nsys_analyzer.analysis.ranges.instances import AttributedTrace
from nsys_analyzer.trace.arrays import Ints
from nsys_analyzer.trace.columns import MemoryUses

_TORCH = "torch"


@dataclass(frozen=True)
class DeviceMemory:
    """Memory of one process over the measured phases, from the first one's start to the last one's end.

    Attributes:
        of_tensors: whether PyTorch's allocator was recorded, tensor by tensor, in place of the driver: cudaMalloc.
        before_bytes, peak_bytes: in use at the start, and at most.
        allocations, frees: their number inside.
        allocated_bytes: the sum of the allocations inside.
    """

    of_tensors: bool
    before_bytes: int
    peak_bytes: int
    allocations: int
    frees: int
    allocated_bytes: int


def device_memory(attributed: AttributedTrace, process: int) -> DeviceMemory | None:
    """The device memory of a process; None where it was not recorded, or no phase was measured."""
    uses, instances = attributed.trace.memory, attributed.instances
    mine = instances.measured & (instances.process == process)
    if uses is None or not mine.any():
        return None
    own = uses.select(uses.process == process)
    own = own.select(np.argsort(own.start, kind="stable"))
    alive = _alive(own)
    start, end = instances.start[mine].min(), instances.end[mine].max()
    inside = (own.start >= start) & (own.start <= end)
    before = alive[np.searchsorted(own.start, start)]
    handed_out = own.bytes[inside & (own.bytes > 0)]
    return DeviceMemory(
        attributed.trace.metadata.profiler == _TORCH,
        int(before),
        int(max(before, alive[1:][inside].max(initial=0))),
        len(handed_out),
        int(inside.sum()) - len(handed_out),
        int(handed_out.sum()),
    )


def _alive(uses: MemoryUses) -> Ints:
    """Shape (events + 1,): bytes in use before the first event and after each, as its pool says or as they add up."""
    level = np.where(uses.alive >= 0, uses.alive, uses.bytes.cumsum())
    first = level[0] - uses.bytes[0] if len(uses) else 0
    return np.concatenate([[first], level])
