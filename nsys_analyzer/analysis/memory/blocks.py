"""Finds the blocks of memory of a recording, each from its allocation to its release."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from nsys_analyzer.trace.arrays import Bools, Ints
from nsys_analyzer.trace.memory_snapshot import ALLOCATION, FREE, MemoryEvents, MemorySnapshot

#: PyTorch's allocator rounds each size up to a multiple of this number of bytes.
ROUNDING_BYTES = 512
#: The index of the event that allocated a block, if the block is older than the first event.
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
        """Returns True for each block that is in use after an event."""
        used: Bools = (self.allocated <= event) & (self.released > event)
        return used


def find_blocks(snapshot: MemorySnapshot, events: MemoryEvents, device: int) -> MemoryBlocks:
    """Returns the blocks of a GPU from its events.

    A block ends when the allocator can reuse its memory. With several streams, this is later than the release by the
    program. Events contain requested sizes. The snapshot contains the real sizes of the blocks that are in use at the
    end; the sizes of the other blocks are rounded as the allocator does.
    """
    changes = np.flatnonzero((events.action == ALLOCATION) | (events.action == FREE)).astype(np.int32)
    changes = changes[np.argsort(events.address[changes], kind="stable")]
    address, is_free = events.address[changes], events.action[changes] == FREE
    # The next event at the address of an allocation is its release, or an allocation after a release that was not
    # recorded. A release without an allocation before it belongs to a block from before the recording.
    same = address[1:] == address[:-1]
    early = changes[is_free & ~np.insert(same & ~is_free[:-1], 0, False)]
    following = np.where(np.append(same, False), np.append(changes[1:], changes[:1]), np.int32(len(events)))[~is_free]
    allocated = changes[~is_free]
    order = np.argsort(allocated)
    allocated, released = allocated[order], following[order]
    requested = events.size_bytes[allocated]
    size_bytes = _round_up(requested)
    # The blocks that the snapshot itself contains are in use at the end. Some of them have no event.
    live = snapshot.live_blocks.select(snapshot.live_blocks.device == device)
    is_last = np.flatnonzero(released == len(events))
    _, row, live_row = np.intersect1d(events.address[allocated[is_last]], live.address, return_indices=True)
    size_bytes[is_last[row]] = live.size_bytes[live_row]
    unseen = live.select(np.delete(np.arange(len(live.address)), live_row))
    counts = (len(unseen.address), len(early))
    return MemoryBlocks(
        address=np.concatenate([unseen.address, events.address[early], events.address[allocated]]),
        size_bytes=np.concatenate([unseen.size_bytes, _round_up(events.size_bytes[early]), size_bytes]),
        requested_bytes=np.concatenate([unseen.requested_bytes, events.size_bytes[early], requested]),
        allocated=np.concatenate([np.full(sum(counts), BEFORE, np.int32), allocated]),
        released=np.concatenate([np.full(counts[0], len(events), np.int32), early, released]),
        stack=np.concatenate([unseen.stack.astype(np.int32), np.zeros(counts[1], np.int32), events.stack[allocated]]),
    )


def measure_levels(blocks: MemoryBlocks, events: int) -> Ints:
    """Returns the bytes in use before the first event and after each event."""
    changes = np.zeros(events + 2, np.int64)
    np.add.at(changes, blocks.allocated + 1, blocks.size_bytes)
    np.add.at(changes, blocks.released + 1, -blocks.size_bytes)
    levels: Ints = np.cumsum(changes[:-1])
    return levels


def _round_up(size_bytes: Ints) -> Ints:
    rounded: Ints = -(-size_bytes // ROUNDING_BYTES) * ROUNDING_BYTES
    return rounded
