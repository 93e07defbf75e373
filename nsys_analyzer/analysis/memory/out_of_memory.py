"""Explains failed allocations: the requested size, the free memory, and the changes that would have helped."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from nsys_analyzer.analysis.memory.account import (
    MemoryGrowth,
    MemoryLine,
    MemoryMoment,
    MemoryPart,
    MemoryRemedy,
    OutOfMemory,
)
from nsys_analyzer.analysis.memory.blocks import MemoryBlocks
from nsys_analyzer.analysis.memory.moments import measure_moment
from nsys_analyzer.analysis.memory.parts import sum_lines, sum_parts
from nsys_analyzer.analysis.memory.phases import PhasesOfEvents
from nsys_analyzer.analysis.memory.places import Places
from nsys_analyzer.trace.arrays import Ints
from nsys_analyzer.trace.memory_snapshot import OUT_OF_MEMORY, MemoryEvents, MemorySnapshot

#: The largest number of failures that are explained. A program that catches the error may fail many times.
_MOST_FAILURES = 3
#: The largest number of lines that a remedy names.
_MOST_PLACES = 3


def explain_failures(
    snapshot: MemorySnapshot,
    events: MemoryEvents,
    blocks: MemoryBlocks,
    categories: Ints,
    times: PhasesOfEvents,
    growth: tuple[MemoryGrowth, ...],
    places: Places,
) -> Iterator[OutOfMemory]:
    """Yields the first allocations that failed, with their reasons."""
    for event in np.flatnonzero(events.action == OUT_OF_MEMORY)[:_MOST_FAILURES].tolist():
        requested, device_free = int(events.size_bytes[event]), int(events.address[event])
        moment = measure_moment(snapshot, events, blocks, times, event, places)
        live = blocks.in_use(event)
        parts = sum_parts(blocks.select(live), categories[live])
        lines = sum_lines(blocks.select(live), categories[live], places)
        is_limited = device_free >= requested
        missing = requested if is_limited else requested - device_free
        remedies = find_remedies(snapshot, requested, missing, is_limited, moment, parts, lines, growth)
        yield OutOfMemory(requested, device_free, is_limited, moment, parts, tuple(remedies))


def find_remedies(
    snapshot: MemorySnapshot,
    requested: int,
    missing: int,
    is_limited: bool,
    moment: MemoryMoment,
    parts: tuple[MemoryPart, ...],
    lines: tuple[MemoryLine, ...],
    growth: tuple[MemoryGrowth, ...],
) -> Iterator[MemoryRemedy]:
    """Yields the changes that would have made the allocation succeed, the most useful change first.

    Args:
        snapshot: the snapshot.
        requested: the bytes of the allocation.
        missing: the part of ``requested`` that the GPU, or the limit of the process, did not have.
        is_limited: whether a limit of the process stopped the allocation.
        moment, parts, lines: the memory at the failure.
        growth: the memory that grows from step to step.
    """
    if growth:
        held_bytes = sum(row.held_bytes for row in growth)
        yield MemoryRemedy(
            "growth", held_bytes, held_bytes >= missing, tuple(row.place for row in growth[:_MOST_PLACES])
        )
        if held_bytes >= missing:  # anything else only delays the failure by a few steps
            return
    unused = moment.fragmented_bytes + moment.cached_bytes
    if unused and unused + requested - missing >= requested and not snapshot.settings.get("expandable_segments"):
        yield MemoryRemedy("expandable_segments", unused, True)
    activations = sum(part.bytes for part in parts if part.category == "activations")
    if activations:
        # The allocation that failed is itself smaller with a smaller batch.
        yield MemoryRemedy("batch", activations // 2, activations // 2 + requested // 2 >= missing)
        largest = [line for line in lines if line.category == "activations"][:_MOST_PLACES]
        saved = sum(line.bytes for line in largest)
        yield MemoryRemedy("checkpointing", saved, saved >= missing, tuple(line.place for line in largest))
    if is_limited:
        yield MemoryRemedy("limit", None, True)
