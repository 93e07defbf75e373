"""The steps of a process: what one pass of the program's loop is, and when each begins and ends.

In this order: a range or annotation that names the step; its phases, from one forward pass to the next; the period at
which the whole sequence of its work repeats; the number that a person says. Else the capture is one pass. A layer, one
parameter's update, a micro-batch of a step that has an optimizer, or a loop beside the model is never a step.
"""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np

from nsys_analyzer.analysis.attribution.attribution import autograd_threads
from nsys_analyzer.analysis.intervals import NONE, Cover
from nsys_analyzer.analysis.ranges.instances import AttributedTrace
from nsys_analyzer.analysis.ranges.phases import OTHER_STEP, STEP, WARMUP
from nsys_analyzer.analysis.steps.repetition import Repeats, find_repeats, has_layers
from nsys_analyzer.trace.arrays import Bools, Integers, Ints, distinct
from nsys_analyzer.trace.columns import GRAPH, KERNEL, process_of
from nsys_analyzer.trace.phase_names import MODULE_CALL, STEP_OF_ENGINE

Source = Literal["range", "profiler_step", "phases", "repetition", "said", "pass"]

_PROFILER_STEP = "ProfilerStep#"
#: GPU work that ends later than this share of a step behind its range is not of the time that the range shows.
_LATE = 0.1
#: So many steps in the middle show whether their work ends late.
_SAMPLE = 32
#: Phases that span a step hold at least this share of the time of all operations.
_MOST = 0.8
#: A first or last step with fewer launches than this share of the usual was not recorded whole.
_WHOLE = 0.9
#: What computes in a layer.
_COMPUTING = ("matmul", "fused attention", "convolution")
#: Steps that train in turns, as those of a GAN, are alike if so much of their kernels is the same.
_SAME_WORK = 0.9


@dataclass(frozen=True)
class Windows:
    """Steps, in order, without overlap; every array has shape (steps,), ns.

    Attributes:
        unit: what a step is, in a clause.
        start, end: from a step's start to the next one's, of the last to its own end, by the clock of the CPU or of the
            device, whichever ends later.
        called, left: when the program began each step, and when what lies behind it.
        ended: when the program ended each step itself, before what may lie between it and the next one.
        on_gpu: whether the windows are those of the GPU's work, which ends long after the program has gone on.
        cut: how many steps more the capture holds a part of.
    """

    source: Source
    unit: str
    start: Ints
    end: Ints
    called: Ints
    left: Ints
    ended: Ints
    on_gpu: bool = False
    cut: int = 0

    def __len__(self) -> int:
        return len(self.start)

    def select(self, chosen: Ints | Bools) -> Windows:
        """Some of the windows, by their indices or a mask."""
        columns = {name: getattr(self, name)[chosen] for name in ("start", "end", "called", "left", "ended")}
        return replace(self, **columns)


def find_windows(attributed: AttributedTrace, process: int) -> Windows | None:
    """The steps of a process, or its whole work as one pass; None where none of it is known."""
    work = _Work(attributed, process)
    if not len(work.index):
        return None
    found = _of_ranges(work)
    if found is None or (len(found) == 1 and found.source == "profiler_step"):
        # The profiler may have been told of one step around several passes.
        phases = _of_phases(work)
        found = phases if phases and (found is None or len(phases) > 1) else found
    found = found or _of_repetition(work) or _as_said(work)
    return _as_the_gpu_lived_it(found, attributed, process) if found else _pass(work)


class _Work:
    """The operations of a process outside warm-up, and those of the device that works most, in order of launch."""

    def __init__(self, attributed: AttributedTrace, process: int) -> None:
        self.attributed, self.process = attributed, process
        operations, attribution = attributed.trace.operations, attributed.attribution
        self.index = np.flatnonzero((operations.process == process) & ~attributed.warm)
        self.placed = attribution.thread[self.index] != NONE
        self.time = np.where(self.placed, attribution.time[self.index], operations.start[self.index])
        self.ns = (operations.end - operations.start)[self.index]

    def share(self, start: int, end: int) -> float:
        """The share of the time of all operations that those launched from one moment to another have."""
        total = float(self.ns.sum())
        return float(self.ns[(self.time >= start) & (self.time < end)].sum()) / total if total else 0.0

    def launches(self, windows: Windows) -> Ints:
        """Shape (steps,): the operations launched in each step."""
        time = np.sort(self.time)
        launches: Ints = np.searchsorted(time, windows.left) - np.searchsorted(time, windows.called)
        return launches

    def last_end(self, start: int) -> int:
        """When the last operation that was launched from a moment on ends."""
        ends = self.attributed.trace.operations.end[self.index[self.time >= start]]
        return int(ends.max(initial=start))

    def on_main_device(self) -> tuple[Ints, Ints, Ints]:
        """The operations of the device that works most, in order of launch: index, time of launch, duration."""
        operations = self.attributed.trace.operations
        device = operations.device[self.index]
        low = int(device.min())
        main = int(np.argmax(np.bincount(device - low, self.ns))) + low
        chosen = np.flatnonzero(device == main)
        chosen = chosen[np.lexsort((operations.start[self.index[chosen]], self.time[chosen]))]
        return self.index[chosen], self.time[chosen], self.ns[chosen]


# --- a range that names the step


def _of_ranges(work: _Work) -> Windows | None:
    """The step ranges; those with a backward pass where there are any."""
    attributed, instances = work.attributed, work.attributed.instances
    mine = instances.process == work.process
    step = np.isin(instances.phase, [instances.phases.index(name) for name in (STEP, OTHER_STEP)])
    for phase in (STEP, OTHER_STEP):
        chosen = mine & instances.measured & (instances.phase == instances.phases.index(phase))
        if not chosen.any():
            continue
        ranges = attributed.trace.ranges
        names = [ranges.names[code] for code in dict.fromkeys(ranges.name[instances.range[chosen]].tolist())]
        is_certain = STEP in attributed.roles.names.extra or bool(STEP_OF_ENGINE.match(names[0]))
        if not is_certain and not _hold_passes(work, chosen):
            continue
        by_profiler = names[0].startswith(_PROFILER_STEP)
        unit = f"a range {names[0]}" if len(names) == 1 else f"a range such as {names[0]}"
        unit = "a step of PyTorch's profiler" if by_profiler else unit
        start, end = instances.start[chosen], instances.end[chosen]
        # Steps of every kind bound each other; of two threads they may begin at once.
        begun = np.unique(np.append(instances.start[mine & step], _warmup_starts(work)))
        start, first = np.unique(start, return_index=True)
        following = np.append(begun, np.iinfo(np.int64).max)[np.searchsorted(begun, start, side="right")]
        own, is_last = end[first], following == np.iinfo(np.int64).max
        until = np.where(is_last, own, following)
        source: Source = "profiler_step" if by_profiler else "range"
        return Windows(source, unit, start, until, start, until, np.minimum(own, until))
    return None


def _hold_passes(work: _Work, chosen: Bools) -> bool:
    """Whether some step ranges hold the passes of the model; a range `step` may be around the optimizer alone."""
    instances = work.attributed.instances
    passes = np.isin(instances.phase, [instances.phases.index(name) for name in ("forward", "backward")])
    passes &= (instances.process == work.process) & instances.measured
    if not passes.any():
        return True
    steps = Cover.of(instances.start[chosen], instances.end[chosen])
    time = instances.start[passes]
    return bool(steps.within(time, time + 1).sum() >= 0.5 * len(time))


def _warmup_starts(work: _Work) -> Ints:
    attributed = work.attributed
    warmup = attributed.trace.ranges.select(attributed.roles.mask(WARMUP))
    mine = process_of(warmup.thread) == work.process
    return warmup.select(mine).start


# --- phases

_LETTERS = {"forward": "F", "backward": "B", "optimizer": "O"}


def _of_phases(work: _Work) -> Windows | None:
    """From one forward pass to the next, or from one optimizer's end to the next; of one of each the step they span."""
    instances = work.attributed.instances
    letter = np.array([_LETTERS.get(name, "") for name in (*instances.phases, "")])[instances.phase]
    # What autograd's thread runs again of a forward pass is part of a backward pass.
    again = np.isin(work.attributed.trace.ranges.thread[instances.range], autograd_threads(work.attributed.trace))
    index = np.flatnonzero((instances.process == work.process) & (letter != "") & ~again)
    text = "".join(letter[index].tolist())
    if "F" not in text:
        return _between_optimizers(work, index[letter[index] == "O"])
    closing = next((one for one in "OB" if one in text), "F")
    steps = [match.span() for match in re.finditer(f"[^{closing}]*{closing}+" if closing != "F" else "F", text)]
    cut = len(steps)
    steps = _without_evaluation(steps, text) if closing != "F" else steps
    cut -= len(steps)
    first, last = (np.array([span[place] for span in steps], np.int64) for place in (0, 1))
    start, end = instances.start[index], np.maximum.accumulate(instances.end[index])
    bounds = np.unique(np.append(start, _warmup_starts(work)))
    bound = np.searchsorted(bounds, start[last - 1], side="right")
    own = end[last - 1]
    if closing == "F" and len(steps) > 1:  # what follows a last forward pass is its own, too, as it is of the others
        own[-1] = max(own[-1], work.last_end(int(start[-1])))
    until = np.where(bound == len(bounds), own, np.append(bounds, 0)[bound])
    measured = np.append(0, np.cumsum(instances.measured[index]))
    kept = (measured[last] - measured[first] == last - first) & (until > start[first])
    ended = np.minimum(own, until)
    found = Windows(
        "phases", "from one forward pass to the next", *_bounds_of(start[first][kept], until[kept], ended[kept])
    )
    found = replace(found, cut=cut)
    found = _ended_with_its_work(found, work) if closing == "F" and len(found) else found
    if len(found) < 2:
        alone = len(found) == 1 and work.share(int(found.called[0]), int(found.left[0])) >= _MOST
        return replace(found, unit="the one step that its phases span") if alone else None
    found = _recorded_whole(found, work)
    return _joined_turns(found, work) if "O" in text else found


def _bounds_of(start: Ints, end: Ints, ended: Ints | None = None) -> tuple[Ints, Ints, Ints, Ints, Ints]:
    return start, end, start, end, end if ended is None else ended


def _ended_with_its_work(windows: Windows, work: _Work) -> Windows:
    """The windows, whose steps end with the work that each launches, at the earliest."""
    ended = np.maximum(windows.ended, _last_ends(windows, work.time, work.attributed.trace.operations.end[work.index]))
    return replace(windows, ended=np.minimum(ended, windows.left))


def _without_evaluation(steps: list[tuple[int, int]], text: str) -> list[tuple[int, int]]:
    """Steps with as many forward passes before the first other one as most have: those before are an evaluation.

    A step without any was not recorded from its start.
    """
    leading = [len(text[first:last]) - len(text[first:last].lstrip("F")) for first, last in steps]
    usual = Counter(many for many in leading if many).most_common(1)[0][0] if any(leading) else 0
    return [
        (first + max(many - usual, 0), last)
        for (first, last), many in zip(steps, leading, strict=True)
        if many >= min(usual, 1)
    ]


def _between_optimizers(work: _Work, optimizers: Ints) -> Windows | None:
    """The steps where the end of the optimizer is all that is known of each."""
    instances = work.attributed.instances
    moments, first = np.unique(instances.end[optimizers], return_index=True)
    if len(moments) < 2:
        return None
    measured = instances.measured[optimizers][first]
    start, end = moments[:-1], moments[1:]
    warm = np.sort(_warmup_starts(work))
    kept = measured[1:] & measured[:-1] & (np.searchsorted(warm, end) == np.searchsorted(warm, start))
    found = Windows("phases", "from one optimizer step's end to the next", *_bounds_of(start[kept], end[kept]))
    return _joined_turns(found, work) if len(found) else None


def _recorded_whole(windows: Windows, work: _Work) -> Windows:
    """The steps without a first or last one in which much less is launched than in the others: it was cut."""
    launches = work.launches(windows)
    usual = np.median(launches)
    first = int(launches[0] < _WHOLE * usual)
    last = len(windows) - int(launches[-1] < _WHOLE * usual)
    whole = last - first
    return replace(windows.select(np.arange(first, last)), cut=windows.cut + len(windows) - whole) if whole else windows


def _joined_turns(windows: Windows, work: _Work) -> Windows:
    """The steps of models that train in turns as one: those of a GAN, whose kernels alternate."""
    operations = work.attributed.trace.operations
    kernels = operations.kind[work.index] == KERNEL
    name, time = operations.name[work.index[kernels]], work.time[kernels]
    step = np.searchsorted(windows.called, time, side="right") - 1
    inside = (step >= 0) & (time < windows.left[step])
    if len(windows) < 4 or not inside.any():
        return windows
    used, code = np.unique(name[inside], return_inverse=True)
    counts = np.zeros((len(windows), len(used)))
    np.add.at(counts, (step[inside], code), 1)
    kind: list[int] = []
    for one in range(len(windows)):
        alike = (
            kind[other]
            for other in range(one)
            if np.minimum(counts[one], counts[other]).sum() >= _SAME_WORK * max(counts[one].sum(), counts[other].sum())
        )
        kind.append(next(alike, one))
    for turns in range(2, len(windows) // 2 + 1):
        whole = len(windows) // turns * turns
        if len(set(kind[:turns])) == turns and kind[turns:whole] == kind[: whole - turns]:
            first, last = np.arange(0, whole, turns), np.arange(turns - 1, whole, turns)
            unit = f"{turns} optimizer steps that take turns"
            bounds = _bounds_of(windows.start[first], windows.end[last], windows.ended[last])
            return Windows("phases", unit, *bounds, cut=windows.cut)
    return windows


# --- repetition


def _of_repetition(work: _Work) -> Windows | None:
    """The units in which the whole sequence of work repeats, where these are passes of the program's loop."""
    index, time, ns = work.on_main_device()
    said = work.attributed.roles.names.steps
    for repeats in find_repeats(_symbols(work, index), ns, np.diff(time, prepend=time[:1]), said):
        moments = time[repeats.starts]
        if not (np.diff(moments) > 0).all():  # the kernels of one graph are launched together
            moments = work.attributed.trace.operations.start[index[repeats.starts]]
        bounds = np.append(moments, max(int(time[repeats.end - 1]), int(moments[-1])) + 1)
        unit = f"a sequence of {repeats.period:,} operations that repeats"
        found = Windows("said" if said else "repetition", unit, *_bounds_of(bounds[:-1], bounds[1:], moments))
        found = _ended_with_its_work(found, work)
        if said or (not _in_one_range(work, found) and _is_loop(work, index, repeats)):
            return found
    return None


def _symbols(work: _Work, index: Integers) -> Ints:
    """What each operation is, from 0 on: its kernel, or its kind and the way of a copy."""
    operations = work.attributed.trace.operations
    others = len(operations.names) + 8 * operations.kind[index].astype(np.int64) + operations.copy[index]
    return np.where(operations.name[index] >= 0, operations.name[index], others)


def _in_one_range(work: _Work, windows: Windows) -> bool:
    """Whether all units lie in a single phase, or in a single call of a model: they are parts of one pass."""
    roles, ranges = work.attributed.roles, work.attributed.trace.ranges
    is_call = np.array([*(name.startswith(MODULE_CALL) for name in ranges.names), False])[ranges.name]
    around = (roles.any_phase | is_call) & (process_of(ranges.thread) == work.process)
    around &= (ranges.start <= windows.called[0]) & (ranges.end >= windows.called[-1])
    return bool(around.any())


def _is_loop(work: _Work, index: Ints, repeats: Repeats) -> bool:
    """Whether units are passes of a loop, and not the layers of one pass.

    A pass has layers in it, trains a model, or is the replay of a graph. It has something before its layers and
    something behind them, so that layers are no passes where kernels lie on both sides. Waits and copies between CPU
    and device tell nothing: layers that are sharded or offloaded have them, too.
    """
    attributed, operations = work.attributed, work.attributed.trace.operations
    is_kernel = operations.kind[index] == KERNEL
    before = int(is_kernel[: repeats.before].sum())
    behind = int(is_kernel[len(index) - repeats.behind :].sum())
    if before and behind and max(before, behind) < repeats.period:
        return False
    unit = index[int(repeats.starts[0]) : int(repeats.starts[0]) + repeats.period]
    classes = np.array([*attributed.kernels.classes, ""])[attributed.kernels.code[unit]]
    computes = np.isin(classes, _COMPUTING)
    if "optimizer" in classes and computes.any():
        return True
    is_replayed = (operations.kind[unit] == GRAPH) | (operations.graph_node[unit] != 0)
    replays = len(distinct(np.sort(attributed.attribution.launch[unit[is_replayed]])))
    if replays == 1 and not (operations.kind[unit[~is_replayed]] == KERNEL).any():
        return True
    return has_layers(_symbols(work, unit), computes)


# --- a number that a person says, and one pass


def _as_said(work: _Work) -> Windows | None:
    """As many equal parts of the capture as a person says it has steps."""
    steps = work.attributed.roles.names.steps
    whole = _pass(work)
    if not steps:
        return None
    bounds = np.linspace(int(whole.start[0]), int(whole.end[0]), steps + 1).astype(np.int64)
    return Windows("said", f"one of {steps:,} equal parts of the capture", *_bounds_of(bounds[:-1], bounds[1:]))


def _pass(work: _Work) -> Windows:
    """All work as one pass, from its first launch to its last end."""
    start = np.array([min(int(work.time.min()), int(work.attributed.trace.operations.start[work.index].min()))])
    end = np.array([int(work.attributed.trace.operations.end[work.index].max())])
    left = np.maximum(end, int(work.time.max()) + 1)
    return Windows("pass", "the whole capture", start, end, start, left, left)


def _as_the_gpu_lived_it(windows: Windows, attributed: AttributedTrace, process: int) -> Windows:
    """The windows on the GPU's timeline, where the program runs far ahead of the GPU.

    A step then lasts from the end of the work that was launched before it to the end of its own.
    """
    first = max(0, (len(windows) - _SAMPLE) // 2)
    sample = windows.select(np.arange(first, min(first + _SAMPLE, len(windows))))
    near = (attributed.attribution.time >= sample.start[0]) & (attributed.attribution.time < sample.end[-1])
    last = _last_ends(sample, *_launched(attributed, process, near))
    late = np.median(np.maximum(last - sample.end, 0)) > _LATE * np.median(sample.end - sample.start)
    time, end = _launched(attributed, process, np.ones(len(attributed.trace.operations), np.bool_))
    last = _last_ends(windows, time, end)
    if not late or attributed.trace.metadata.ranges_on_gpu:
        return replace(windows, end=np.append(windows.end[:-1], max(int(windows.end[-1]), int(last[-1]))))
    ends = np.maximum.accumulate(np.maximum(last, windows.end))
    first = _first_start(windows, attributed, process, float(np.median(np.diff(ends, prepend=windows.start[0]))))
    before = np.append(first, np.maximum.accumulate(end))[np.searchsorted(time, windows.start)]
    starts = np.maximum.reduce([before, windows.start, np.append(before[0], ends[:-1])])
    kept = ends > starts
    return replace(windows, start=starts, end=ends, on_gpu=True).select(kept) if kept.any() else windows


def _launched(attributed: AttributedTrace, process: int, chosen: Bools) -> tuple[Ints, Ints]:
    """When some operations of a process were launched, in order, and when each ended."""
    operations, attribution = attributed.trace.operations, attributed.attribution
    mine = np.flatnonzero(chosen & (operations.process == process) & (attribution.thread != NONE))
    mine = mine[np.argsort(attribution.time[mine], kind="stable")]
    return attribution.time[mine], operations.end[mine]


def _last_ends(windows: Windows, time: Ints, end: Ints) -> Ints:
    """The last end of what was launched in each step; the first step's start where nothing was."""
    step = np.searchsorted(windows.called, time, side="right") - 1
    inside = (step >= 0) & (time < windows.left[step])
    last = np.full(len(windows), windows.start[0])
    np.maximum.at(last, step[inside], end[inside])
    return last


def _first_start(windows: Windows, attributed: AttributedTrace, process: int, length: float) -> int:
    """When the first step begins on the GPU where nothing was launched before it: with its own work, if that is late.

    Work of before the capture, which is not in the file, may run until then.
    """
    operations, attribution = attributed.trace.operations, attributed.attribution
    own = (operations.process == process) & (attribution.thread != NONE)
    own &= (attribution.time >= windows.called[0]) & (attribution.time < windows.left[0])
    called = int(windows.start[0])
    start = int(operations.start[own].min()) if own.any() else called
    return start if start - called > _LATE * length else called
