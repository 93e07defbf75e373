"""Measures the memory of a GPU at a moment: the blocks in use, and the unused memory of the allocator."""

from __future__ import annotations

import numpy as np

from nsys_analyzer.analysis.memory.account import MemoryMoment
from nsys_analyzer.analysis.memory.blocks import MemoryBlocks
from nsys_analyzer.analysis.memory.phases import PHASES, UNKNOWN, PhasesOfEvents
from nsys_analyzer.analysis.memory.places import Places
from nsys_analyzer.trace.arrays import Ints
from nsys_analyzer.trace.memory_snapshot import (
    SEGMENT_ALLOCATION,
    SEGMENT_FREE,
    SEGMENT_MAP,
    SEGMENT_UNMAP,
    MemoryEvents,
    MemorySnapshot,
)
from nsys_analyzer.trace.schema import NS_PER_MS


def measure_moment(
    snapshot: MemorySnapshot,
    events: MemoryEvents,
    blocks: MemoryBlocks,
    times: PhasesOfEvents,
    event: int,
    places: Places,
) -> MemoryMoment:
    """Returns the memory of a GPU after an event; ``BEFORE`` stands for the moment before the first event."""
    live = blocks.select(blocks.in_use(event))
    segment_starts, segment_sizes = find_segments(snapshot, events, event)
    block_starts = np.sort(live.address)
    block_sizes = live.size_bytes[np.argsort(live.address)]
    segment_of_block = np.searchsorted(segment_starts, block_starts, "right") - 1
    if len(segment_starts):
        segment_ends = segment_starts + segment_sizes
        is_inside = (segment_of_block >= 0) & (block_starts + block_sizes <= segment_ends[segment_of_block])
    else:
        segment_ends, is_inside = segment_starts, np.zeros(len(block_starts), bool)
    block_starts, block_sizes = block_starts[is_inside], block_sizes[is_inside]
    used = np.zeros(len(segment_starts), np.int64)
    np.add.at(used, segment_of_block[is_inside], block_sizes)
    # Inside of segments, pieces without a block begin where a segment begins or a block ends. In order of addresses,
    # each such start is followed by the start of a block or the end of a segment.
    piece_starts = np.sort(np.concatenate([segment_starts, block_starts + block_sizes]))
    piece_ends = np.sort(np.concatenate([block_starts, segment_ends]))
    has_times = event >= 0 and times.source is not None
    phase, step = (int(column[event]) if has_times else UNKNOWN for column in (times.phase, times.step))
    return MemoryMoment(
        float(events.time_ns[event] - events.time_ns[0]) / NS_PER_MS if event >= 0 else 0.0,
        PHASES[phase] if phase != UNKNOWN else None,
        step if step != UNKNOWN else None,
        places.find(int(events.stack[event]) if event >= 0 else 0),
        int(live.size_bytes.sum()),
        int(segment_sizes.sum()),
        int(np.maximum(segment_sizes - used, 0)[used > 0].sum()),
        int(segment_sizes[used == 0].sum()),
        int((piece_ends - piece_starts).max(initial=0)),
    )


def find_segments(snapshot: MemorySnapshot, events: MemoryEvents, event: int) -> tuple[Ints, Ints]:
    """Returns the addresses and sizes of the segments of a GPU after an event, in order of addresses.

    The snapshot contains the segments at the end, so the later changes are undone.
    """
    device = int(events.device[0]) if len(events) else -1
    rows = snapshot.segments.device == device if len(events) else np.ones(len(snapshot.segments.device), bool)
    sizes = dict(
        zip(snapshot.segments.address[rows].tolist(), snapshot.segments.size_bytes[rows].tolist(), strict=True)
    )
    changes = np.flatnonzero(
        np.isin(events.action, (SEGMENT_ALLOCATION, SEGMENT_MAP, SEGMENT_FREE, SEGMENT_UNMAP))
        & (np.arange(len(events)) > event)
    )
    for change in changes[::-1].tolist():
        address, size = int(events.address[change]), int(events.size_bytes[change])
        if events.action[change] in (SEGMENT_FREE, SEGMENT_UNMAP):
            sizes[address] = size
        elif sizes.get(address) == size:
            del sizes[address]
        else:  # an expandable segment also contains memory that was mapped before or after
            start = max((start for start in sizes if start <= address < start + sizes[start]), default=None)
            if start is not None:
                end = start + sizes.pop(start)
                pieces = ((start, address), (address + size, end))
                sizes |= {first: last - first for first, last in pieces if last > first}
    ordered = sorted(sizes.items())
    return np.array([address for address, _ in ordered], np.int64), np.array([size for _, size in ordered], np.int64)
