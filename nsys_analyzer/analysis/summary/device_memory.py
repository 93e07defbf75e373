"""Device memory as a profiler sees it: what was there when the measured steps began, and what changed in them."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from nsys_analyzer.analysis.ranges.instances import AttributedTrace
from nsys_analyzer.trace.arrays import Ints
from nsys_analyzer.trace.columns import MemoryUses


@dataclass(frozen=True)
class DeviceMemory:
    """Memory of one process over the measured phases, from the first one's start to the last one's end.

    ``of_tensors``: PyTorch's allocator was recorded, tensor by tensor, in place of the driver (cudaMalloc).
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
    events, alive = memory_levels(uses, process)
    start, end = instances.start[mine].min(), instances.end[mine].max()
    inside = (events.start >= start) & (events.start <= end)
    before = alive[np.searchsorted(events.start, start)]
    handed_out = events.bytes[inside & (events.bytes > 0)]
    return DeviceMemory(
        attributed.trace.metadata.profiler == "torch",
        int(before),
        int(max(before, alive[1:][inside].max(initial=0))),
        len(handed_out),
        int(inside.sum()) - len(handed_out),
        int(handed_out.sum()),
    )


def memory_levels(uses: MemoryUses, process: int) -> tuple[MemoryUses, Ints]:
    """The events of a process in order, and the bytes in use before the first one and after each: shape (events + 1,).

    They are what the pool of each says, or what the events add up to.
    """
    events = uses.select(uses.process == process)
    events = events.select(np.argsort(events.start, kind="stable"))
    level = np.where(events.alive >= 0, events.alive, events.bytes.cumsum())
    return events, np.concatenate([level[:1] - events.bytes[:1] if len(events) else [0], level])
