"""Finds what each block of memory is for, and adds up the blocks by category and by line."""

from __future__ import annotations

from collections.abc import Sequence
from typing import get_args

import numpy as np

from nsys_analyzer.analysis.memory.account import MemoryCategory, MemoryLine, MemoryPart
from nsys_analyzer.analysis.memory.blocks import BEFORE, MemoryBlocks
from nsys_analyzer.analysis.memory.phases import BACKWARD, FORWARD, OPTIMIZER, UNKNOWN, PhasesOfEvents
from nsys_analyzer.analysis.memory.places import Places
from nsys_analyzer.trace.arrays import Bools, Ints

CATEGORIES: tuple[MemoryCategory, ...] = get_args(MemoryCategory)
(WEIGHTS, GRADIENTS, OPTIMIZER_STATE, ACTIVATIONS, TEMPORARIES, KEPT, HELD, UNKNOWN_USE) = range(len(CATEGORIES))
#: The largest number of state tensors per weight: Adam has two.
_MOST_STATES_PER_WEIGHT = 2


def categorize(blocks: MemoryBlocks, times: PhasesOfEvents, places: Places, failures: Sequence[int]) -> Ints:
    """Returns the category of each block, an index of ``CATEGORIES``, from when it is allocated and released.

    - Activations begin in forward and end in backward. The program may keep a result of its step until the next
      forward has replaced it.
    - Gradients begin in backward and live while the optimizer runs.
    - Optimizer state begins in the optimizer and lives longer than its step.
    - Temporaries end in the phase in which they begin.
    - Memory that a forward or backward pass leaves behind is kept by the program.
    - Blocks older than the first step are weights and optimizer state if they have the sizes of gradients.
    """
    is_early = blocks.allocated == BEFORE
    categories = np.where(is_early, np.int8(HELD), np.int8(UNKNOWN_USE))
    if times.source is None or not len(times.phase):
        return categories
    last_event = len(times.phase) - 1
    phase = np.where(is_early, np.int32(UNKNOWN), times.phase[np.maximum(blocks.allocated, 0)])
    step = np.where(is_early, np.int32(UNKNOWN), times.step[np.maximum(blocks.allocated, 0)])
    is_released = blocks.released <= last_event
    end_phase = times.phase[np.minimum(blocks.released, last_event)]
    if times.steps is None:  # only forward passes, or only a part of a step
        categories[~is_early & is_released & (phase == end_phase)] = TEMPORARIES
        return categories
    # The events at which the phases of each step begin. A phase that a step does not have begins at its end.
    first_backward, first_optimizer = (_find_starts(times, kind) for kind in (BACKWARD, OPTIMIZER))
    next_step = np.minimum(step + 1, times.steps - 1)
    # A block of the last step that is not released is still needed. A block of the step before may be, until the
    # backward pass of the last step has begun.
    is_replaced = (blocks.released > first_backward[next_step]) & (first_backward[next_step] <= last_event)
    is_left_behind = is_replaced & (step < times.steps - 1)
    is_forward, is_backward, is_in_optimizer = (phase == kind for kind in (FORWARD, BACKWARD, OPTIMIZER))
    categories[is_forward] = ACTIVATIONS
    # With several passes in a step, a temporary ends before the backward pass that follows it.
    backward_starts = np.flatnonzero(np.diff(times.phase == BACKWARD, prepend=False) & (times.phase == BACKWARD))
    following_backward = np.append(backward_starts, last_event + 1)[np.searchsorted(backward_starts, blocks.allocated)]
    pass_ends = np.where(first_backward[step] > blocks.allocated, first_backward[step], following_backward)
    categories[is_forward & (blocks.released < pass_ends)] = TEMPORARIES
    # When an allocation fails, the error ends the forward pass, and releases the activations that it still needed.
    for failure in failures:
        categories[is_forward & blocks.in_use(failure) & (step == times.step[failure])] = ACTIVATIONS
    categories[is_forward & is_left_behind] = KEPT
    is_in_use_for_optimizer = (blocks.released > first_optimizer[step]) & (first_optimizer[step] <= last_event)
    categories[is_backward] = TEMPORARIES
    categories[is_backward & is_in_use_for_optimizer] = GRADIENTS
    categories[is_backward & is_left_behind & (step > 0)] = KEPT
    categories[is_in_optimizer] = TEMPORARIES
    categories[is_in_optimizer & (~is_released | (blocks.released > first_backward[next_step]))] = OPTIMIZER_STATE
    _find_unfinished_gradients(blocks, categories, is_backward & ~is_released & (first_optimizer[step] > last_event))
    # It is not known yet whether blocks of the last step but one are kept. They are if earlier steps kept equal blocks.
    undecided = is_forward & ~is_released & (step == times.steps - 2) & (categories == ACTIVATIONS)
    keys, kept_keys = (
        blocks.stack[rows].astype(np.int64) * (1 << 44) + blocks.size_bytes[rows]
        for rows in (undecided, categories == KEPT)
    )
    categories[np.flatnonzero(undecided)[np.isin(keys, kept_keys)]] = KEPT
    is_lasting = is_forward & (step == 0) & ~places.in_module[blocks.stack] & (categories == KEPT)
    categories[step == UNKNOWN] = HELD
    is_in_last_step = blocks.released > np.searchsorted(times.step, times.steps - 1)
    _find_weights(blocks, categories, ((step == UNKNOWN) | is_lasting) & is_in_last_step, step)
    return categories


def _find_starts(times: PhasesOfEvents, phase: int) -> Ints:
    """Returns the first event of a phase in each step, or the first event of the next step if there is none."""
    steps = np.arange(times.steps or 0)
    starts: Ints = np.append(np.searchsorted(times.step, steps), len(times.step))
    events = np.flatnonzero(times.phase == phase)
    place = np.searchsorted(events, starts[:-1])
    firsts = np.append(events, len(times.step))[place]
    result: Ints = np.minimum(firsts, starts[1:])
    return result


def _find_unfinished_gradients(blocks: MemoryBlocks, categories: Ints, is_unfinished: Bools) -> None:
    """Distinguishes gradients from temporaries in an unfinished backward pass, by the sizes of earlier gradients."""
    is_gradient = np.isin(blocks.requested_bytes, blocks.requested_bytes[categories == GRADIENTS])
    categories[is_unfinished] = np.where(is_gradient, GRADIENTS, UNKNOWN_USE)[is_unfinished]


def _find_weights(blocks: MemoryBlocks, categories: Ints, is_candidate: Bools, step: Ints) -> None:
    """Finds weights and optimizer state among the oldest blocks: a weight and its gradient have equal sizes."""
    is_gradient = categories == GRADIENTS
    categories[is_candidate] = HELD
    if not is_gradient.any():
        return
    fullest_step = np.bincount(step[is_gradient]).argmax()
    sizes, counts = np.unique(blocks.requested_bytes[is_gradient & (step == fullest_step)], return_counts=True)
    states = blocks.requested_bytes[categories == OPTIMIZER_STATE]
    for size, count in zip(sizes.tolist(), counts.tolist(), strict=True):
        rows = np.flatnonzero(is_candidate & (blocks.requested_bytes == size))
        categories[rows[:count]] = WEIGHTS
        if size not in states:
            categories[rows[count : (1 + _MOST_STATES_PER_WEIGHT) * count]] = OPTIMIZER_STATE


def sum_parts(blocks: MemoryBlocks, categories: Ints) -> tuple[MemoryPart, ...]:
    """Returns the size and the number of the blocks of each category with blocks, in the order of categories."""
    counts = np.bincount(categories, minlength=len(CATEGORIES))
    return tuple(
        MemoryPart(CATEGORIES[i], int(blocks.size_bytes[categories == i].sum()), int(counts[i]))
        for i in np.flatnonzero(counts).tolist()
    )


def sum_lines(blocks: MemoryBlocks, categories: Ints, places: Places) -> tuple[MemoryLine, ...]:
    """Returns the memory of each category and line, the line with the most bytes first."""
    keys, row_of_block = np.unique(places.of_stack[blocks.stack] * len(CATEGORIES) + categories, return_inverse=True)
    rows = []
    for row, key in enumerate(keys.tolist()):
        sizes = blocks.size_bytes[row_of_block == row]
        place, category = divmod(key, len(CATEGORIES))
        rows.append(
            MemoryLine(CATEGORIES[category], places.places[place], int(sizes.sum()), len(sizes), int(sizes.max()))
        )
    return tuple(sorted(rows, key=lambda row: -row.bytes))
