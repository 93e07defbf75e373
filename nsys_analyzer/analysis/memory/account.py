"""Defines the account of a GPU's memory: its peak, what fills it, what grows, and why memory ran out."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

#: What a block of memory is for, in the order of the tables.
#:
#: - ``held``: allocated before the recording and not attributed to weights or optimizer state
#: - ``kept``: allocated by a forward or backward pass, and not released at the end of the step
#: - ``temporaries``: allocated and released inside one phase
MemoryCategory = Literal[
    "weights", "gradients", "optimizer state", "activations", "temporaries", "kept", "held", "unknown"
]


@dataclass(frozen=True)
class MemoryPhase:
    """A phase of a step (forward, backward or optimizer), on the clock of the snapshot. The first step has number 0."""

    name: str
    step: int
    start_ns: int
    end_ns: int


@dataclass(frozen=True)
class MemoryPlace:
    """A line of the program that allocates memory.

    Attributes:
        line: the innermost line outside of PyTorch, as ``file:line (function)``; empty if it is unknown.
        called_from: the innermost line of the user's own files that leads to ``line``, if it is another line.
    """

    line: str
    called_from: str = ""


@dataclass(frozen=True)
class MemoryPart:
    """The memory of a category at the peak."""

    category: MemoryCategory
    bytes: int
    blocks: int


@dataclass(frozen=True)
class MemoryLine:
    """The memory at the peak that a line allocated in a category."""

    category: MemoryCategory
    place: MemoryPlace
    bytes: int
    blocks: int
    largest_bytes: int


@dataclass(frozen=True)
class MemoryMoment:
    """The memory of a GPU at a moment.

    Attributes:
        time_ms: the time since the first event of the recording.
        phase, step: the phase and the step of the moment; None if they are unknown. The first recorded step is 0.
        allocated_bytes: the sum of the blocks in use.
        reserved_bytes: the memory that the allocator has reserved: the blocks in use and unused memory.
        fragmented_bytes: unused memory of segments in which blocks are in use.
        cached_bytes: unused memory of segments without a block in use.
        largest_free_bytes: the largest contiguous unused piece of a segment.
    """

    time_ms: float
    phase: str | None
    step: int | None
    place: MemoryPlace
    allocated_bytes: int
    reserved_bytes: int
    fragmented_bytes: int
    cached_bytes: int
    largest_free_bytes: int


@dataclass(frozen=True)
class MemoryGrowth:
    """Memory that a line allocates in every step and that is not released.

    Attributes:
        bytes_per_step: the median of the bytes that a step adds.
        steps: the number of steps whose blocks are still in use at the end.
        held_bytes: the total size of the blocks of these steps, bytes.
    """

    place: MemoryPlace
    bytes_per_step: int
    steps: int
    held_bytes: int


#: A change that would have made an allocation succeed. ``expandable_segments`` is a setting of the allocator.
RemedyKind = Literal["growth", "limit", "expandable_segments", "batch", "checkpointing"]


@dataclass(frozen=True)
class MemoryRemedy:
    """A change that would have made room for an allocation that failed.

    Attributes:
        bytes: the memory that the change frees; None if it is unknown.
        is_enough: whether the allocation would have succeeded after the change, as far as the snapshot shows.
        places: the lines that the change affects.
    """

    kind: RemedyKind
    bytes: int | None
    is_enough: bool
    places: tuple[MemoryPlace, ...] = ()


@dataclass(frozen=True)
class OutOfMemory:
    """An allocation that failed.

    Attributes:
        requested_bytes: the size of the allocation.
        device_free_bytes: the free memory of the GPU.
        is_limited: whether the GPU had enough free memory, so that a limit of the process stopped the allocation.
        moment: the memory before the failure.
        parts: what filled the memory at this moment.
        remedies: the changes that would have helped, the most useful change first.
    """

    requested_bytes: int
    device_free_bytes: int
    is_limited: bool
    moment: MemoryMoment
    parts: tuple[MemoryPart, ...]
    remedies: tuple[MemoryRemedy, ...]


@dataclass(frozen=True)
class MemoryAccount:
    """The account of a GPU's memory during a recording.

    Attributes:
        device: the number of the GPU.
        events: the number of recorded events.
        steps: the number of recorded steps; None if they are unknown.
        phases_from: the source of the phases: ranges or stacks; None if the phases are unknown.
        parts: what fills the peak. The bytes add up to ``peak.allocated_bytes``.
        lines: the lines that allocated the memory at the peak, those with the most bytes first.
        growth: the memory that grows from step to step, the largest growth first.
        outside_bytes: the memory of the GPU that other processes, CUDA and NCCL use, and not PyTorch's allocator. None
            if it is unknown.
    """

    device: int
    events: int
    steps: int | None
    phases_from: Literal["ranges", "stacks"] | None
    peak: MemoryMoment
    parts: tuple[MemoryPart, ...]
    lines: tuple[MemoryLine, ...]
    growth: tuple[MemoryGrowth, ...]
    out_of_memory: tuple[OutOfMemory, ...]
    outside_bytes: int | None = None

    def bytes_of(self, category: MemoryCategory) -> int:
        """Returns the bytes of a category at the peak."""
        return sum(part.bytes for part in self.parts if part.category == category)
