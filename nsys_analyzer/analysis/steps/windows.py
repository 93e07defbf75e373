"""The steps of a process: by ranges, by PyTorch's profiler, by optimizer steps, or by what repeats."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

import numpy as np

from nsys_analyzer.analysis.intervals.timeline import NONE
from nsys_analyzer.analysis.ranges.instances import AttributedTrace
from nsys_analyzer.analysis.ranges.phases import OTHER_STEP, STEP
from nsys_analyzer.trace.arrays import Bools, Ints, SmallInts
from nsys_analyzer.trace.columns import KERNEL

Source = Literal["range", "profiler_step", "period"]

_PROFILER_STEP = "ProfilerStep#"
#: GPU work that ends later than this share of a step behind its range is not of the time that the range shows.
_LATE = 0.1
#: So many steps in the middle show whether their work ends late.
_SAMPLE = 32
#: A unit of kernels that repeats so often is a step, where so many of its kernels are the same.
_REPEATS, _ALIKE = 3, 0.95


@dataclass(frozen=True)
class Windows:
    """Steps, in order, without overlap; ``start`` and ``end`` have shape (steps,), ns.

    Attributes:
        unit: what a step is, in words.
        called: shape (steps + 1,), when the program began each step, on the CPU's clock, and ended the last one.
        left: shape (steps,), when the program ended each of them: before the next one where something lies between.
        on_gpu: whether the windows are those of the GPU's work, which ends long after the ranges.
    """

    source: Source
    unit: str
    start: Ints
    end: Ints
    called: Ints
    left: Ints
    on_gpu: bool = False

    def __len__(self) -> int:
        return len(self.start)

    def select(self, chosen: Ints) -> Windows:
        """Some of the windows, by their indices."""
        return replace(self, start=self.start[chosen], end=self.end[chosen], left=self.left[chosen])


def find_windows(attributed: AttributedTrace, process: int) -> Windows | None:
    """The measured steps of a process; None where it has nothing that repeats."""
    found = _of_steps(attributed, process) or _of_phase(attributed, process, "optimizer")
    found = found or _of_phase(attributed, process, "forward") or _of_kernels(attributed, process)
    return _as_the_gpu_lived_it(found, attributed, process) if found else None


def whole_capture(attributed: AttributedTrace, mine: Bools) -> Windows:
    """The whole capture as one step, for a process where nothing repeats; ``mine`` are its operations."""
    operations, launched = attributed.trace.operations, attributed.attribution.time[mine]
    start, end = int(operations.start[mine].min()), int(operations.end[mine].max())
    called = np.array([min(start, int(launched.min())), max(end, int(launched.max()) + 1)])
    return Windows("period", "the whole capture", np.array([start]), np.array([end]), called, called[1:])


def _of_steps(attributed: AttributedTrace, process: int) -> Windows | None:
    """The step ranges; those with a backward pass where there are any."""
    instances, ranges = attributed.instances, attributed.trace.ranges
    for phase in (STEP, OTHER_STEP):
        chosen = _measured(attributed, process, phase)
        if chosen.any():
            names = [ranges.names[code] for code in dict.fromkeys(ranges.name[instances.range[chosen]].tolist())]
            by_profiler = names[0].startswith(_PROFILER_STEP)
            start, end = _apart(instances.start[chosen], instances.end[chosen])
            unit = f"a range {names[0]}" if len(names) == 1 else f"a range such as {names[0]}"
            unit = "a step of PyTorch's profiler" if by_profiler else unit
            called = np.append(start, end[-1:])
            return Windows("profiler_step" if by_profiler else "range", unit, start, end, called, end)
    return None


def _measured(attributed: AttributedTrace, process: int, phase: str) -> Bools:
    instances = attributed.instances
    of_phase = instances.phase == instances.phases.index(phase)
    chosen: Bools = instances.measured & of_phase & (instances.process == process)
    return chosen


def _apart(start: Ints, end: Ints) -> tuple[Ints, Ints]:
    """Windows cut where the next one begins: steps of two threads may overlap."""
    order = np.argsort(start, kind="stable")
    start, end = start[order], end[order]
    end[:-1] = np.minimum(end[:-1], start[1:])
    kept = end > start
    return start[kept], end[kept]


def _of_phase(attributed: AttributedTrace, process: int, phase: str) -> Windows | None:
    """From the end of one optimizer step to the next, or from the start of one forward pass to the next."""
    instances = attributed.instances
    chosen = _measured(attributed, process, phase)
    moments = instances.end[chosen] if phase == "optimizer" else instances.start[chosen]
    moments = np.unique(moments)
    if len(moments) < 2:
        return None
    unit = "from one optimizer step's end to the next" if phase == "optimizer" else "from one forward pass to the next"
    return _between(moments, unit, attributed, process)


def _between(moments: Ints, unit: str, attributed: AttributedTrace, process: int) -> Windows | None:
    """The windows between moments, without those that hold warm-up or lack a part of their GPU work."""
    start, end = moments[:-1], moments[1:]
    instances = attributed.instances
    unmeasured = np.sort(instances.start[~instances.measured & (instances.process == process)])
    holds = np.searchsorted(unmeasured, end) > np.searchsorted(unmeasured, start)
    start, end = start[~holds], end[~holds]
    return Windows("period", unit, start, end, np.append(start, end[-1:]), end) if len(start) else None


def _of_kernels(attributed: AttributedTrace, process: int) -> Windows | None:
    """The unit of kernels that repeats, as in an inference loop without ranges."""
    operations = attributed.trace.operations
    chosen = np.flatnonzero((operations.kind == KERNEL) & (operations.process == process) & ~attributed.warm)
    chosen = chosen[np.argsort(operations.start[chosen], kind="stable")]
    names = operations.name[chosen]
    period = _period(names)
    if period is None:
        return None
    first, length = period
    heads = chosen[first::length]
    called = attributed.attribution.time[heads]
    known = attributed.attribution.thread[heads] != NONE
    moments = np.where(known, called, operations.start[heads])
    if not (np.diff(moments) > 0).all():
        moments = operations.start[heads]
    return _between(moments, f"a unit of {length:,} kernels that repeats", attributed, process)


def _period(names: SmallInts) -> tuple[int, int] | None:
    """Where the repeating unit of a sequence of kernels first begins, and its length; None without one."""
    counts = np.bincount(names) if len(names) else np.zeros(1, np.int64)
    for code in np.argsort(counts, kind="stable"):
        if counts[code] < _REPEATS or counts[code] * _REPEATS > len(names):
            continue
        places = np.flatnonzero(names == code)
        length = int(np.median(np.diff(places)))
        alike = names[places[0] : len(names) - length] == names[places[0] + length :]
        if (np.diff(places) == length).all() and len(alike) and alike.mean() >= _ALIKE:
            return int(places[0]), length
    return None


def _as_the_gpu_lived_it(windows: Windows, attributed: AttributedTrace, process: int) -> Windows:
    """The windows on the GPU's timeline, where the program runs far ahead of the GPU.

    A step then lasts from the end of the work that was launched before it to the end of its own.
    """
    operations, attribution = attributed.trace.operations, attributed.attribution
    first = max(0, (len(windows) - _SAMPLE) // 2)
    sample = windows.select(np.arange(first, min(first + _SAMPLE, len(windows))))
    near = (attribution.time >= sample.start[0]) & (attribution.time < sample.end[-1])
    last = _last_ends(sample, *_launched(attributed, process, near))
    late = np.median(np.maximum(last - sample.end, 0)) > _LATE * np.median(sample.end - sample.start)
    if not late or attributed.trace.metadata.ranges_on_gpu:
        return windows
    time, end = _launched(attributed, process, np.ones(len(operations), np.bool_))
    last = _last_ends(windows, time, end)
    before = np.append(windows.start[0], np.maximum.accumulate(end))[np.searchsorted(time, windows.start)]
    ends = np.maximum.accumulate(np.maximum(last, windows.end))
    starts = np.maximum.reduce([before, windows.start, np.append(windows.start[0], ends[:-1])])
    kept = ends > starts
    if not kept.any():
        return windows
    called, left = windows.called[np.append(kept, True)], windows.left[kept]
    return replace(windows, start=starts[kept], end=ends[kept], called=called, left=left, on_gpu=True)


def _launched(attributed: AttributedTrace, process: int, chosen: Bools) -> tuple[Ints, Ints]:
    """When some operations of a process were launched, in order, and when each ended."""
    operations, attribution = attributed.trace.operations, attributed.attribution
    mine = np.flatnonzero(chosen & (operations.process == process) & (attribution.thread != NONE))
    mine = mine[np.argsort(attribution.time[mine], kind="stable")]
    return attribution.time[mine], operations.end[mine]


def _last_ends(windows: Windows, time: Ints, end: Ints) -> Ints:
    """The last end of what was launched in each step; the first step's start where nothing was."""
    step = np.searchsorted(windows.start, time, side="right") - 1
    inside = (step >= 0) & (time < windows.end[step])
    last = np.full(len(windows), windows.start[0])
    np.maximum.at(last, step[inside], end[inside])
    return last
