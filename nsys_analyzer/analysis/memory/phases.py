"""Finds the phase and the step of each event of a memory snapshot: from ranges, or from the stacks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from nsys_analyzer.analysis.memory.account import MemoryPhase
from nsys_analyzer.analysis.memory.places import is_of_torch, list_python_frames
from nsys_analyzer.trace.arrays import Integers
from nsys_analyzer.trace.memory_snapshot import ALLOCATION, Frame, MemoryEvents, MemorySnapshot

#: The phases, and their codes. ``UNKNOWN`` is the code of an event between phases.
PHASES = ("forward", "backward", "optimizer")
FORWARD, BACKWARD, OPTIMIZER = range(len(PHASES))
UNKNOWN = -1
#: The code of each range that is a phase. Other ranges, such as ranges around steps, contain these ranges.
_PHASE_CODES = {name: code for code, name in enumerate(PHASES)} | {"loss": FORWARD}
#: The range of PyTorch's profiler around a step of an optimizer.
_OPTIMIZER_RANGE = "Optimizer.step#"
#: The file and the name of the functions in a stack that runs the backward pass on the calling thread.
_BACKWARD_CALLS = (
    ("torch/autograd/graph.py", "_engine_run_backward"),
    ("torch/autograd/__init__.py", "backward"),
    ("torch/_tensor.py", "backward"),
)


@dataclass(frozen=True)
class PhasesOfEvents:
    """The phase and the step of each event.

    Attributes:
        phase: an index of ``PHASES``, or ``UNKNOWN``.
        step: the index of the step; ``UNKNOWN`` if there are no steps.
        steps: the number of steps; None if they are unknown.
        source: how the phases are known.
    """

    phase: Integers
    step: Integers
    steps: int | None
    source: Literal["ranges", "stacks"] | None


def find_phases(snapshot: MemorySnapshot, events: MemoryEvents, ranges: Sequence[MemoryPhase] | None) -> PhasesOfEvents:
    """Returns the phase and the step of each event.

    Args:
        snapshot: the snapshot.
        events: the events of one GPU.
        ranges: the phases of the steps from ranges of the program; without ranges, the stacks determine the phases.
    """
    if parts := sorted((part for part in ranges or () if part.name in _PHASE_CODES), key=lambda part: part.start_ns):
        return _find_phases_from_ranges(events, parts)
    phases_of_stacks = np.array(
        [find_phase_of_stack(snapshot.list_frames(i)) for i in range(len(snapshot.stacks))], np.int8
    )
    phase = np.where(events.action == ALLOCATION, phases_of_stacks[events.stack], np.int8(UNKNOWN))
    for annotation in snapshot.annotations:
        if annotation.name.startswith(_OPTIMIZER_RANGE):
            first, end = np.searchsorted(events.time_ns, (annotation.start_ns, annotation.end_ns))
            # An optimizer that updates in place allocates nothing, so the range also marks the event before it.
            phase[max(first - 1, 0) if end == first else first : max(end, first, 1)] = OPTIMIZER
    is_known = phase != UNKNOWN
    if not is_known.any() or not (phases_of_stacks[1:] != UNKNOWN).any():
        unknown = np.full(len(events), UNKNOWN)
        return PhasesOfEvents(unknown, unknown, None, None)
    # An event without a known phase, such as a release, belongs to the phase of the event before it.
    filled = phase[np.maximum.accumulate(np.where(is_known, np.arange(len(phase), dtype=np.int32), is_known.argmax()))]
    # A step begins with the first forward after an optimizer or, in a recording without one, after a backward pass.
    last = OPTIMIZER if (filled == OPTIMIZER).any() else BACKWARD
    starts = np.append(0, np.flatnonzero(np.diff(filled)) + 1)
    is_new_step, has_ended = np.zeros(len(filled), np.int8), False
    for start in starts.tolist():
        if has_ended and filled[start] == FORWARD:
            is_new_step[start], has_ended = 1, False
        has_ended = has_ended or filled[start] == last
    step = np.cumsum(is_new_step, dtype=np.int32)
    has_steps = (filled == last).any()
    return PhasesOfEvents(
        filled, step if has_steps else np.full(len(step), UNKNOWN), int(step[-1]) + 1 if has_steps else None, "stacks"
    )


def _find_phases_from_ranges(events: MemoryEvents, parts: Sequence[MemoryPhase]) -> PhasesOfEvents:
    phase, step = np.full(len(events), UNKNOWN, np.int8), np.full(len(events), UNKNOWN, np.int32)
    for part, following in zip(parts, [*parts[1:], parts[-1]], strict=True):
        first, end, next_first = np.searchsorted(events.time_ns, (part.start_ns, part.end_ns, following.start_ns))
        phase[first:] = _PHASE_CODES[part.name]
        step[first:] = part.step
        if following.step != part.step:  # work between two steps, such as copying a batch
            phase[end:next_first], step[end:] = FORWARD, following.step
    return PhasesOfEvents(phase, step, parts[-1].step + 1, "ranges")


def find_phase_of_stack(frames: Sequence[Frame]) -> int:
    """Returns the phase to which a stack belongs.

    Autograd runs the backward pass of a GPU on a separate thread, which has no frames of Python. If this thread calls
    a Python function, the outermost frame belongs to PyTorch.
    """
    frames = list_python_frames(frames)
    if not frames or is_of_torch(frames[-1]):
        return BACKWARD
    if any("torch/optim/" in frame.file and frame.function != "zero_grad" for frame in frames):
        return OPTIMIZER
    if any(frame.function == name and frame.file.endswith(file) for frame in frames for file, name in _BACKWARD_CALLS):
        return BACKWARD
    return FORWARD
