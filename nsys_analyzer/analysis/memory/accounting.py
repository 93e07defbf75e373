"""Accounts for the memory of a GPU: the peak and what fills it, and what grows from step to step."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from nsys_analyzer.analysis.memory.account import MemoryAccount, MemoryGrowth, MemoryPhase
from nsys_analyzer.analysis.memory.blocks import MemoryBlocks, find_blocks, measure_levels
from nsys_analyzer.analysis.memory.moments import measure_moment
from nsys_analyzer.analysis.memory.out_of_memory import explain_failures
from nsys_analyzer.analysis.memory.parts import categorize, sum_lines, sum_parts
from nsys_analyzer.analysis.memory.phases import UNKNOWN, PhasesOfEvents, find_phases
from nsys_analyzer.analysis.memory.places import Places
from nsys_analyzer.errors import CannotAnswerError
from nsys_analyzer.trace.memory_snapshot import ALLOCATION, OUT_OF_MEMORY, MemoryEvents, MemorySnapshot

_RECORD_EVENTS = "torch.cuda.memory._record_memory_history()"
#: Memory grows if blocks of at least this number of steps, without the last step, are in use at the end.
_LEAST_GROWING_STEPS = 3
#: Memory grows if a step adds at least this share of the memory in use at the end. The scalars of a log add less.
_LEAST_GROWTH_SHARE = 0.001


def account_memory(
    snapshot: MemorySnapshot, phases: Sequence[MemoryPhase] | None = None, *, device_used_bytes: int | None = None
) -> MemoryAccount:
    """Returns the account of the memory of the GPU with the most events.

    Args:
        snapshot: the snapshot.
        phases: the phases of the steps, if they are known. Otherwise they are inferred from the stacks.
        device_used_bytes: the memory of the GPU that all processes used when the snapshot was written, if it is known.

    Raises:
        CannotAnswerError: the snapshot contains no memory.
    """
    devices = snapshot.events.device if len(snapshot.events) else snapshot.segments.device
    if not len(devices):
        raise CannotAnswerError(f"{snapshot.path.name} contains no memory", _RECORD_EVENTS)
    device = int(np.bincount(devices).argmax())
    is_of_device = snapshot.events.device == device
    events = snapshot.events if is_of_device.all() else snapshot.events.select(is_of_device)
    blocks, places = find_blocks(snapshot, events, device), Places(snapshot)
    times = find_phases(snapshot, events, phases or [MemoryPhase(*phase) for phase in snapshot.phases] or None)
    failures = np.flatnonzero(events.action == OUT_OF_MEMORY).tolist()
    categories = categorize(blocks, times, places, failures)
    peak_event = int(measure_levels(blocks, len(events)).argmax()) - 1
    live = blocks.in_use(peak_event)
    growth = find_growth(blocks, events, times, places)
    reserved_at_end = int(snapshot.segments.size_bytes[snapshot.segments.device == device].sum())
    return MemoryAccount(
        device,
        len(events),
        times.steps,
        times.source,
        measure_moment(snapshot, events, blocks, times, peak_event, places),
        sum_parts(blocks.select(live), categories[live]),
        sum_lines(blocks.select(live), categories[live], places),
        growth,
        tuple(explain_failures(snapshot, events, blocks, categories, times, growth, places)),
        None if device_used_bytes is None else device_used_bytes - reserved_at_end,
    )


def find_growth(
    blocks: MemoryBlocks, events: MemoryEvents, times: PhasesOfEvents, places: Places
) -> tuple[MemoryGrowth, ...]:
    """Returns the lines whose blocks of most steps are still in use at the end, the line with the most memory first.

    The end is the first failed allocation, or else the last allocation. Later events do not count, because a program
    releases everything when it ends.
    """
    if times.steps is None or times.steps <= _LEAST_GROWING_STEPS:
        return ()
    failures, allocations = (np.flatnonzero(events.action == kind) for kind in (OUT_OF_MEMORY, ALLOCATION))
    end = int((failures if len(failures) else allocations[::-1])[0])
    step = np.where(blocks.allocated >= 0, times.step[np.maximum(blocks.allocated, 0)], UNKNOWN)
    is_left = blocks.in_use(end) & (step >= 0) & (step < times.step[end])
    leftovers, step = blocks.select(is_left), step[is_left]
    place_of_block = places.of_stack[leftovers.stack]
    rows = []
    for place in np.unique(place_of_block).tolist():
        is_here = place_of_block == place
        bytes_of_step = np.bincount(step[is_here], leftovers.size_bytes[is_here])
        bytes_of_step = bytes_of_step[bytes_of_step > 0]
        # A cache that is full holds blocks of a few steps, and releases the oldest.
        if len(bytes_of_step) >= max(_LEAST_GROWING_STEPS, times.steps / 2):
            per_step, held_bytes = int(np.median(bytes_of_step)), int(bytes_of_step.sum())
            rows.append(MemoryGrowth(places.places[place], per_step, len(bytes_of_step), held_bytes))
    in_use_bytes = int(blocks.size_bytes[blocks.in_use(end)].sum())
    is_relevant = sum(row.bytes_per_step for row in rows) >= _LEAST_GROWTH_SHARE * in_use_bytes
    return tuple(sorted(rows, key=lambda row: -row.held_bytes)) if is_relevant else ()
