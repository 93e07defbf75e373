"""Finds the blocks of memory of a recording, each from its allocation to its release."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from nsys_analyzer.trace.arrays import Bools, Ints
from nsys_analyzer.trace.memory_snapshot import ALLOCATION, FREE, MemorySnapshot

#: The allocator gives out memory in multiples of this size.
_ROUNDING_BYTES = 512
#: The order of a block that is allocated before the first event, and of one that is released after the last event.
BEFORE = -1


@dataclass(frozen=True)
class MemoryBlocks:
    """Blocks of memory, as columns, in the order of their allocation.

    Attributes:
        size_bytes: the bytes in use, with the allocator's rounding.
        requested_bytes: the bytes that the program asked for.
        allocated: the event of the allocation; ``BEFORE`` if it is older than the recording.
        released: the event of the release; the number of events if there is none.
        stack: the stack of the allocation, an index of ``MemorySnapshot.stacks``; 0 if it is unknown.
    """

    address: Ints
    size_bytes: Ints
    requested_bytes: Ints
    allocated: Ints
    released: Ints
    stack: Ints

    def __len__(self) -> int:
        return len(self.address)

    def select(self, rows: Bools | Ints) -> MemoryBlocks:
        """Returns the blocks in the given rows."""
        return MemoryBlocks(*(getattr(self, name)[rows] for name in self.__dataclass_fields__))

    def in_use(self, event: int) -> Bools:
        """Tells which blocks are in use after an event."""
        used: Bools = (self.allocated <= event) & (self.released > event)
        return used


def find_blocks(snapshot: MemorySnapshot, device: int) -> MemoryBlocks:
    """Returns the blocks of a GPU. The events that they refer to are those of the GPU, in order.

    A block ends when the allocator can use its memory again. With several streams, this is later than the program's
    release of it. The allocator reports what was requested. A block that is in use at the end has its real size; the
    size of the others is rounded as the allocator does.
    """
    events = snapshot.events.select(snapshot.events.device == device)
    changes = np.flatnonzero((events.action == ALLOCATION) | (events.action == FREE))
    changes = changes[np.argsort(events.address[changes], kind="stable")]
    address, is_free = events.address[changes], events.action[changes] == FREE
    # The event after an allocation at the same address is its release. A release without an allocation before it
    # belongs to a block from before the recording.
    same = address[1:] == address[:-1]
    is_released = np.append(same & is_free[1:], False) & ~is_free
    from_before = is_free & ~np.insert(same & ~is_free[:-1], 0, False)
    starts = np.flatnonzero(~is_free)
    allocated = changes[starts]
    following = np.append(changes[1:], 0)
    released = np.where(is_released[starts], following[starts], len(events))
    requested = events.size_bytes[allocated]
    size_bytes = _round_up(requested)
    early = changes[from_before]
    # The blocks that the snapshot itself contains are in use at the end. Some of them have no event.
    live = snapshot.live_blocks.select(snapshot.live_blocks.device == device)
    is_last = np.flatnonzero(released == len(events))
    _, row, live_row = np.intersect1d(events.address[allocated[is_last]], live.address, return_indices=True)
    size_bytes[is_last[row]] = live.size_bytes[live_row]
    unseen = live.select(np.delete(np.arange(len(live.address)), live_row))
    counts = (len(unseen.address), len(early))
    blocks = MemoryBlocks(
        address=np.concatenate([unseen.address, events.address[early], events.address[allocated]]),
        size_bytes=np.concatenate([unseen.size_bytes, _round_up(events.size_bytes[early]), size_bytes]),
        requested_bytes=np.concatenate([unseen.requested_bytes, events.size_bytes[early], requested]),
        allocated=np.concatenate([np.full(sum(counts), BEFORE), allocated]),
        released=np.concatenate([np.full(counts[0], len(events)), early, released]),
        stack=np.concatenate([unseen.stack, np.zeros(counts[1], np.int64), events.stack[allocated]]),
    )
    return blocks.select(np.argsort(blocks.allocated, kind="stable"))


def measure_levels(blocks: MemoryBlocks, events: int) -> Ints:
    """Returns the bytes in use before the first event and after each event."""
    changes = np.zeros(events + 2, np.int64)
    np.add.at(changes, blocks.allocated + 1, blocks.size_bytes)
    np.add.at(changes, blocks.released + 1, -blocks.size_bytes)
    levels: Ints = np.cumsum(changes[:-1])
    return levels


def _round_up(size_bytes: Ints) -> Ints:
    rounded: Ints = -(-size_bytes // _ROUNDING_BYTES) * _ROUNDING_BYTES
    return rounded
