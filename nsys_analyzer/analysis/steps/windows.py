"""The steps of a process: what one pass of the program's loop is, when each begins and ends, and which are measured.

In this order: a range or annotation that names the step; its phases, from one forward pass to the next; the period at
which the whole sequence of its work repeats; the number that a person says. Else the capture is one pass. A layer, one
parameter's update, a micro-batch of a step that has an optimizer, or a loop beside the model is never a step.

Steps of one program differ: the first one starts things up, some wait for a batch, some hold an evaluation. What is
alike is a group, with a count; a length that is given for all of them must not hide one.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Literal, get_args

import numpy as np

from nsys_analyzer.analysis.intervals import NONE, Cover
from nsys_analyzer.analysis.kernels.class_rules import COMMUNICATION
from nsys_analyzer.analysis.ranges.inference import BY_THREADS
from nsys_analyzer.analysis.ranges.instances import AttributedTrace
from nsys_analyzer.analysis.steps.repetition import Repeats, find_repeats, has_layers
from nsys_analyzer.trace.arrays import Bools, Integers, Ints, distinct, mask_by_name
from nsys_analyzer.trace.columns import COPY_KINDS, GRAPH, KERNEL, MEMCPY, Ranges, process_of
from nsys_analyzer.trace.phase_names import (
    MODULE_RANGE_PREFIX,
    OTHER_STEP,
    PIPELINE_PASS_SUFFIXES,
    RECORDING_RANGE,
    STEP,
    WARMUP,
    ServedStep,
    parse_served_step,
)
from nsys_analyzer.trace.schema import NS_PER_MS

Source = Literal["range", "profiler_step", "phases", "repetition", "said", "pass"]
GroupKind = Literal["usual", "longer", "shorter", "other work", "first", "last"]

_PROFILER_STEP = "ProfilerStep#"
_NUMBER_AT_END = re.compile(r"(\d{1,18})\W*$")
#: GPU work that ends later than this share of a step behind its range is not of the time that the range shows.
_LATE = 0.1
#: A launch that waits for this share of a step, while nothing runs, waits for work of before the capture.
_UNSEEN = 0.5
#: So many steps in the middle show whether their work ends late.
_SAMPLE = 32
#: Phases that span a step hold at least this share of the time of all operations.
_MOST = 0.8
#: What computes in a layer.
_COMPUTING = ("matmul", "fused attention", "convolution")
#: A step that takes so many times the median of the others, or so much less, is unlike them.
_UNUSUAL = 1.5
#: Steps are near the median if their lengths differ from it by at most this share.
_NEAR_MEDIAN = 0.01
#: Where what lies between steps takes more than this share of one, a last step is not whole.
_BETWEEN = 0.1
#: Between steps of different work there is a gap of this factor; of more where there are few operations or little time.
_GAP, _FEW, _SHORT_NS = 1.5, 20, 50_000
#: Steps that train in turns, as those of a GAN, are alike if so much of their work is the same.
_SAME_WORK = 0.9
#: A step's range is around a generation if it holds at least this many forward passes.
_PASSES_OF_GENERATION = 8
#: The first steps of a capture are a cold call if at least this many of them last longer.
_COLD_CALL_STEPS = 3
#: A server without a request does nothing for so many steps.
_SERVER_PAUSES = 10


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
    """

    source: Source
    unit: str
    start: Ints
    end: Ints
    called: Ints
    left: Ints
    ended: Ints
    on_gpu: bool = False

    @staticmethod
    def of(source: Source, unit: str, start: Ints, end: Ints, ended: Ints | None = None) -> Windows:
        """Returns steps whose bounds are those of the program; without ``ended`` nothing lies between them."""
        return Windows(source, unit, start, end, start, end, end if ended is None else ended)

    def __len__(self) -> int:
        return len(self.start)

    @property
    def length(self) -> Ints:
        """Shape (steps,), ns."""
        return self.end - self.start

    @property
    def median(self) -> int:
        """The place of a step of median length."""
        return int(np.argsort(self.length, kind="stable")[(len(self) - 1) // 2])

    def step_at(self, time: Ints) -> Ints:
        """Returns the step that the program was in at some moments, -1 outside all."""
        step = np.searchsorted(self.called, time, side="right") - 1
        return np.where((step >= 0) & (time < self.left[step]), step, NONE)

    def select(self, chosen: Ints | Bools) -> Windows:
        """Some of the windows, by their indices or a mask."""
        columns = {name: getattr(self, name)[chosen] for name in ("start", "end", "called", "left", "ended")}
        return replace(self, **columns)


def near_median(length: Ints) -> tuple[float, float]:
    """Returns the least and the greatest length of the steps near the median, ns; both of two middle steps are near."""
    middle = float(np.median(length))
    reach = max(_NEAR_MEDIAN * middle, float(np.abs(length - middle).min()))
    return middle - reach, middle + reach


@dataclass(frozen=True)
class StepGroup:
    """Steps that are alike.

    Attributes:
        kind: "usual"; "longer" or "shorter" than these with the same work; "other work"; "first", left out as start-up;
            "last", left out since the time from it to the next one is not known.
        median_ms: their length.
        measured: whether they are part of the figures.
    """

    kind: GroupKind
    steps: int
    median_ms: float
    measured: bool


@dataclass(frozen=True)
class Steps:
    """The steps of a process.

    Attributes:
        windows: those that are measured.
        number: shape (measured steps,), the place of each among ``every``, from 0.
        every: all that were recorded.
        groups: the usual ones first.
        marks: what an engine that serves requests says of each of ``every``; none where it marks no steps.
        names: of each of ``every`` the kind of its group, or what an engine says that it does.
    """

    windows: Windows
    number: Ints
    every: Windows
    groups: tuple[StepGroup, ...]
    marks: tuple[ServedStep, ...] = ()
    names: tuple[str, ...] = ()

    @property
    def others(self) -> Iterator[tuple[str, Steps]]:
        """The groups that are not measured, but for the first and the last step: each as if it alone were."""
        measured = {self.names[place] for place in self.number.tolist()}
        for name in dict.fromkeys(self.names):
            if name not in (*measured, "first", "last"):
                number = np.array([place for place, one in enumerate(self.names) if one == name])
                windows = self.every.select(number)
                group = StepGroup("usual", len(windows), float(np.median(windows.length)) / NS_PER_MS, measured=True)
                yield name, replace(self, windows=windows, number=number, groups=(group,))

    @property
    def length_ms(self) -> float:
        """The length of a step: the median of those that are measured."""
        return float(np.median(self.windows.length)) / NS_PER_MS

    @property
    def start_up(self) -> tuple[int, int] | None:
        """When the first steps that are left out began, and when the step after them did; None if none are left out."""
        first = sum(group.steps for group in self.groups if group.kind == "first")
        return (int(self.every.called[0]), int(self.every.left[first - 1])) if first else None


def find_steps(attributed: AttributedTrace, process: int) -> Steps | None:
    """The steps of a process by its global ID; None where nothing of it ran on a device."""
    every = find_windows(attributed, process)
    if every is None:
        return None
    marks = _marks(attributed, process, every)
    of_engine = Counter(mark.kind for mark in marks).most_common(1)
    kinds = np.array(
        [("usual" if mark.kind == of_engine[0][0] else "other work") for mark in marks]
        or _kinds(attributed, process, every),
        np.object_,
    )
    length = every.length
    usual = np.sort(length[kinds == "usual"])[((kinds == "usual").sum() - 1) // 2]
    is_longer, is_shorter = length > _UNUSUAL * usual + _SHORT_NS, length < usual / _UNUSUAL - _SHORT_NS
    kinds[: _starting(attributed, process, marks, kinds == "usual", is_longer)] = "first"
    if not marks:  # a step that serves is as long as its batch is large
        kinds[(kinds == "usual") & is_longer], kinds[(kinds == "usual") & is_shorter] = "longer", "shorter"
    if kinds[-1] == "shorter" and every.source in ("phases", "repetition"):
        kinds[-1] = "last"
    groups = []
    for kind in get_args(GroupKind):
        if len(of_kind := length[kinds == kind]):
            groups.append(StepGroup(kind, len(of_kind), float(np.median(of_kind)) / NS_PER_MS, kind == "usual"))
    measured = np.flatnonzero(kinds == "usual")
    marked = np.array([mark.kind for mark in marks] or kinds, np.object_)
    names = tuple(np.where(kinds == "first", kinds, marked).tolist())
    return Steps(every.select(measured), measured, every, tuple(groups), marks, names)


def _starting(
    attributed: AttributedTrace, process: int, marks: tuple[ServedStep, ...], usual: Bools, is_longer: Bools
) -> int:
    """Returns how many of the first steps are a cold call of a model that does not train: they last longer.

    They end with the last longer step that does the usual work. A server's first steps may be longer because its batch
    was larger, so they do not count; those of a generation count if the first batch is not larger than the median.
    """
    cold = np.flatnonzero(usual[: int(np.argmin(is_longer))])
    if len(cold) < _COLD_CALL_STEPS or _trains(attributed, process):
        return 0
    batches = [mark.batch or 0 for mark, is_usual in zip(marks, usual.tolist(), strict=False) if is_usual]
    serves = marks and not (all(mark.inferred for mark in marks) and batches[0] <= np.median(batches))
    return 0 if serves else int(cold[-1]) + 1


def _trains(attributed: AttributedTrace, process: int) -> bool:
    """Tells whether a process runs backward passes or an optimizer."""
    instances = attributed.instances
    phases = [instances.phases.index(name) for name in ("backward", "optimizer")]
    return bool(np.isin(instances.phase[instances.process == process], phases).any())


def _marks(attributed: AttributedTrace, process: int, every: Windows) -> tuple[ServedStep, ...]:
    """Returns an engine's mark of each step; none if a step has no mark, or if this may be no engine."""
    instances, ranges = attributed.instances, attributed.trace.ranges
    steps = [instances.phases.index(name) for name in (STEP, OTHER_STEP)]
    mine = np.flatnonzero((instances.process == process) & np.isin(instances.phase, steps))
    if every.source != "range" or not len(mine):
        return ()
    chosen = mine[np.searchsorted(instances.start[mine], every.called)]
    names = ranges.name[instances.range[chosen]].tolist()
    marks = tuple(mark for code in names if (mark := parse_served_step(ranges.names[code])))
    serves = any(mark.certain for mark in marks) or len({mark.kind for mark in marks}) > 1
    return marks if serves and len(marks) == len(names) else ()


def find_windows(attributed: AttributedTrace, process: int) -> Windows | None:
    """Finds the steps of a process, or its whole work as one pass; None where none of it is known."""
    work = _Work(attributed, process)
    if not len(work.index):
        return None
    windows = _of_ranges(work)
    if windows is None or (len(windows) == 1 and windows.source == "profiler_step"):
        # The profiler may have been told of one step around several passes.
        phases = _of_phases(work)
        windows = phases if phases and (windows is None or len(phases) > 1) else windows
    windows = windows or _of_repetition(work) or _of_phases(work, by_threads=True) or _as_said(work)
    return _on_gpu_timeline(windows, work) if windows else work.whole


class _Work:
    """The operations of a process outside warm-up; ``time`` is when each was launched."""

    def __init__(self, attributed: AttributedTrace, process: int) -> None:
        self.attributed, self.process = attributed, process
        operations, attribution = attributed.trace.operations, attributed.attribution
        self.index = np.flatnonzero((operations.process == process) & ~attributed.is_warmup)
        self.start, self.end = operations.start[self.index], operations.end[self.index]
        self.ns, placed = self.end - self.start, attribution.thread[self.index] != NONE
        self.time = np.where(placed, attribution.time[self.index], self.start)

    def instances_of(self, *phases: str) -> Bools:
        """Marks the instances of some phases in this process."""
        instances = self.attributed.instances
        is_phase = np.isin(instances.phase, [instances.phases.index(name) for name in phases])
        mine: Bools = is_phase & (instances.process == self.process)
        return mine

    @property
    def warmups(self) -> Ranges:
        """The warm-up ranges of the process."""
        warmups = self.attributed.trace.ranges.select(self.attributed.roles.mask(WARMUP))
        return warmups.select(process_of(warmups.thread) == self.process)

    @property
    def bounds(self) -> tuple[int, int]:
        """From the first launch to the last end of all work."""
        return int(min(self.time.min(), self.start.min())), int(self.end.max())

    @property
    def whole(self) -> Windows:
        """All work as one pass: as long as the process was recorded, but without the warm-up ranges before its work."""
        trace = self.attributed.trace
        span = trace.profiler_events.select(
            mask_by_name(trace.profiler_events, lambda name: name.startswith(RECORDING_RANGE))
        )
        columns = (trace.ranges, trace.launches, trace.operators, span)
        recorded = [rows.select(process_of(rows.thread) == self.process) for rows in columns]
        first, last = self.bounds
        warmup_ends = self.warmups.end[self.warmups.end <= first]
        begun = min(int(rows.start.min(initial=first)) for rows in recorded)
        # Ranges may have been opened before the session.
        start = min(max(begun, int(warmup_ends.max(initial=begun)), trace.metadata.time_shift_ns), first)
        end = max(int(self.time.max()) + 1, *(int(rows.end.max(initial=last)) for rows in recorded))
        return Windows.of("pass", "the whole capture", np.array([start]), np.array([end]))

    def ended_with_its_work(self, windows: Windows) -> Windows:
        """Returns the windows, whose steps end with the work that each launches, at the earliest."""
        ended = np.maximum(windows.ended, _last_ends(windows, self.time, self.end))
        return replace(windows, ended=np.minimum(ended, windows.left))


# --- a range that names the step


def _of_ranges(work: _Work) -> Windows | None:
    """Returns the step ranges; those with a backward pass where there are any."""
    attributed, instances, ranges = work.attributed, work.attributed.instances, work.attributed.trace.ranges
    # Steps of every kind bound each other; of two threads they may begin at once.
    begun = np.unique(np.append(instances.start[work.instances_of(STEP, OTHER_STEP)], work.warmups.start))
    for phase in (STEP, OTHER_STEP):
        chosen = work.instances_of(phase) & instances.measured
        if not chosen.any():
            continue
        names = [ranges.names[code] for code in dict.fromkeys(ranges.name[instances.range[chosen]].tolist())]
        is_certain = STEP in attributed.roles.names.extra or bool(parse_served_step(names[0]))
        if not is_certain and (not _hold_passes(work, chosen) or _hold_tokens(work, chosen)):
            continue
        by_profiler = names[0].startswith(_PROFILER_STEP)
        unit = f"a range {names[0]}" if len(names) == 1 else f"a range such as {names[0]}"
        start, first = np.unique(instances.start[chosen], return_index=True)
        own, never = instances.end[chosen][first], np.iinfo(np.int64).max
        codes = ranges.name[instances.range[chosen][first]].tolist()
        following = np.append(begun, never)[np.searchsorted(begun, start, side="right")]
        missing = _misses_next([ranges.names[code] for code in codes]) & (not parse_served_step(names[0]))
        until = np.where((following == never) | missing, own, following)
        source: Source = "profiler_step" if by_profiler else "range"
        unit = "a step of PyTorch's profiler" if by_profiler else unit
        windows = Windows.of(source, unit, start, until, np.minimum(own, until))
        return _without_pauses(windows, work) if parse_served_step(names[0]) else windows
    return None


def _misses_next(names: list[str]) -> Bools:
    """Marks the steps after which steps are missing, by the numbers at the ends of their names: #8 follows #3.

    PyTorch's profiler counts every step; a program may number every tenth.
    """
    numbers = [int(match[1]) for name in names if (match := _NUMBER_AT_END.search(name))]
    if len(numbers) < len(names) or len(names) < 2:
        return np.zeros(len(names), np.bool_)
    increase = np.diff(numbers)
    return np.append(increase > (1 if names[0].startswith(_PROFILER_STEP) else max(np.median(increase), 1)), False)


def _without_pauses(windows: Windows, work: _Work) -> Windows:
    """Returns the steps of a server, each but for the time behind it in which no request was there."""
    ended = work.ended_with_its_work(windows).ended
    behind = windows.end - ended
    pauses = behind > _SERVER_PAUSES * (np.median(behind) + np.median(ended - windows.start))
    end = np.where(pauses, ended, windows.end)
    return replace(windows, end=end, left=end)


def _hold_passes(work: _Work, chosen: Bools) -> bool:
    """Tells whether step ranges hold the passes of the model; a range `step` may be around the optimizer alone."""
    instances = work.attributed.instances
    time = instances.start[work.instances_of("forward", "backward") & instances.measured]
    steps = Cover.from_intervals(instances.start[chosen], instances.end[chosen])
    return bool(steps.covered_within(time, time + 1).sum() >= 0.5 * len(time))


def _hold_tokens(work: _Work, chosen: Bools) -> bool:
    """Tells whether each step range is around a generation: many forward passes of a model that does not train."""
    instances, ranges = work.attributed.instances, work.attributed.trace.ranges
    in_turns = mask_by_name(ranges, lambda name: name.endswith(tuple(PIPELINE_PASS_SUFFIXES)))[instances.range]
    forward = np.sort(instances.start[work.instances_of("forward") & ~in_turns])
    bounds = [np.searchsorted(forward, edge[chosen]) for edge in (instances.start, instances.end)]
    return not _trains(work.attributed, work.process) and bool(
        np.median(bounds[1] - bounds[0]) >= _PASSES_OF_GENERATION
    )


# --- phases

_LETTERS = {"forward": "F", "backward": "B", "optimizer": "O"}


def _of_phases(work: _Work, *, by_threads: bool = False) -> Windows | None:
    """Returns the steps from one forward pass to the next, or from one optimizer's end to the next.

    Of one of each they are the step that they span. Phases that threads and kernels alone tell count by themselves.
    """
    instances = work.attributed.instances
    letter = np.array([_LETTERS.get(name, "") for name in (*instances.phases, "")])[instances.phase]
    # What autograd's thread runs again of a forward pass is part of a backward pass.
    ranges = work.attributed.trace.ranges
    again = np.isin(ranges.thread[instances.range], work.attributed.attribution.engine)
    # A pipeline's schedule runs the parts of several passes in turns.
    in_turns = mask_by_name(ranges, lambda name: name.endswith(tuple(PIPELINE_PASS_SUFFIXES)))[instances.range]
    told = mask_by_name(ranges, lambda name: BY_THREADS in name)[instances.range] == by_threads
    index = np.flatnonzero((instances.process == work.process) & (letter != "") & ~again & ~in_turns & told)
    text = "".join(letter[index].tolist())
    if "F" not in text:
        return _between_optimizers(work, index[letter[index] == "O"])
    closing = next((letter for letter in "OB" if letter in text), "F")
    spans = [match.span() for match in re.finditer(f"[^{closing}]*{closing}+" if closing != "F" else "F", text)]
    steps = _without_evaluation(spans, text) if closing != "F" else spans
    first, last = (np.array([span[place] for span in steps], np.int64) for place in (0, 1))
    start, end = instances.start[index], np.maximum.accumulate(instances.end[index])
    bounds = np.unique(np.append(start, work.warmups.start))
    bound = np.searchsorted(bounds, start[last - 1], side="right")
    own = end[last - 1]
    if closing == "F" and len(steps) > 1:  # what follows a last forward pass is its own, too, as it is of the others
        own[-1] = max(own[-1], work.end[work.time >= start[-1]].max(initial=start[-1]))
    until = np.where(bound == len(bounds), own, np.append(bounds, 0)[bound])
    measured = np.append(0, np.cumsum(instances.measured[index]))
    kept = (measured[last] - measured[first] == last - first) & (until > start[first])
    bounds_of_kept = start[first][kept], until[kept], np.minimum(own, until)[kept]
    windows = Windows.of("phases", "from one forward pass to the next", *bounds_of_kept)
    if closing == "F" and len(windows):
        windows = work.ended_with_its_work(windows)
    if len(windows) < 2:
        inside = work.ns[windows.step_at(work.time) != NONE].sum() if len(windows) else 0
        spans_all = inside and inside >= _MOST * work.ns.sum()
        return replace(windows, unit="the one step that its phases span") if spans_all else None
    return _joined_turns(windows, work) if "O" in text else windows


def _without_evaluation(steps: list[tuple[int, int]], text: str) -> list[tuple[int, int]]:
    """Returns steps with as many forward passes before the first other one as most have: the rest is an evaluation.

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
    """Returns the steps where the end of the optimizer is all that is known of each."""
    instances = work.attributed.instances
    moments, first = np.unique(instances.end[optimizers], return_index=True)
    measured, warm = instances.measured[optimizers][first], np.searchsorted(np.sort(work.warmups.start), moments)
    kept = measured[1:] & measured[:-1] & (warm[1:] == warm[:-1])
    unit = "from one optimizer step's end to the next"
    windows = Windows.of("phases", unit, moments[:-1][kept], moments[1:][kept])
    return _joined_turns(windows, work) if len(windows) else None


def _joined_turns(windows: Windows, work: _Work) -> Windows:
    """Returns the steps of models that train in turns as one: those of a GAN, which launch different kernels."""
    step, symbol = windows.step_at(work.time), _symbols(work, work.index)
    inside = step != NONE
    counts = np.zeros((len(windows), int(symbol.max()) + 1))
    np.add.at(counts, (step[inside], symbol[inside]), 1)
    for turns in range(1, len(windows) // 2 + 1):
        later, earlier = counts[turns:], counts[:-turns]
        if (np.minimum(later, earlier).sum(1) >= _SAME_WORK * np.maximum(later, earlier).sum(1)).all():
            break
    else:
        return windows
    first = np.arange(0, len(windows) - turns + 1, turns)
    last = first + turns - 1
    bounds = windows.start[first], windows.end[last], windows.ended[last]
    unit = f"{turns} optimizer steps that take turns" if turns > 1 else windows.unit
    return Windows.of("phases", unit, *bounds)


# --- repetition


def _of_repetition(work: _Work) -> Windows | None:
    """Returns the units in which the whole sequence of work repeats, where these are passes of the program's loop."""
    operations, names = work.attributed.trace.operations, work.attributed.roles.names
    # The operations of the device that works most, in order of launch.
    _, device = np.unique(operations.device[work.index], return_inverse=True)
    mine = np.flatnonzero(device == np.argmax(np.bincount(device, work.ns)))
    mine = mine[np.lexsort((work.start[mine], work.time[mine]))]
    index, time, said = work.index[mine], work.time[mine], names.steps
    launch = work.attributed.attribution.launch[index]
    first = np.append(True, (launch[1:] != launch[:-1]) | (launch[1:] == NONE))  # the first operation of each launch
    pauses = np.diff(time, prepend=time[:1])
    for repeats in find_repeats(_symbols(work, index), work.ns[mine], pauses, said, first):
        moments = time[repeats.starts]
        if not (np.diff(moments) > 0).all():  # the kernels of one graph are launched together
            moments = operations.start[index[repeats.starts]]
        bounds = np.append(moments, max(int(time[repeats.end - 1]), int(moments[-1])) + 1)
        unit = f"a sequence of {repeats.period:,} operations that repeats"
        windows = Windows.of("said" if said else "repetition", unit, bounds[:-1], bounds[1:], moments)
        if said or (not _in_one_range(work, windows) and _is_loop(work, index, repeats)):
            return work.ended_with_its_work(windows)
    return None


def _symbols(work: _Work, index: Integers) -> Ints:
    """What each operation is, from 0 on: its kernel, or its kind and the way of a copy."""
    operations = work.attributed.trace.operations
    others = len(operations.names) + len(COPY_KINDS) * operations.kind[index].astype(np.int64) + operations.copy[index]
    return np.where(operations.name[index] >= 0, operations.name[index], others)


def _in_one_range(work: _Work, windows: Windows) -> bool:
    """Whether all units lie in a single phase, or in a single call of a model: they are parts of one pass."""
    roles, ranges = work.attributed.roles, work.attributed.trace.ranges
    is_call = np.array([*(name.startswith(MODULE_RANGE_PREFIX) for name in ranges.names), False])[ranges.name]
    around = (roles.is_phase_or_step | is_call) & (process_of(ranges.thread) == work.process)
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
    # Beside a layer's replay its attention runs, which takes no graph; beside a pass's, what samples and feeds it.
    if replays == 1 and not computes[~is_replayed].any():
        return True
    return has_layers(_symbols(work, unit), computes)


# --- a number that a person says, and the clock


def _as_said(work: _Work) -> Windows | None:
    """Returns as many equal parts of the capture as a person says it has steps."""
    steps = work.attributed.roles.names.steps
    if not steps:
        return None
    bounds = np.linspace(*work.bounds, steps + 1).astype(np.int64)
    return Windows.of("said", f"one of {steps:,} equal parts of the capture", bounds[:-1], bounds[1:])


def _on_gpu_timeline(windows: Windows, work: _Work) -> Windows:
    """Returns the windows by the GPU's clock, where the program runs far ahead of the GPU.

    A step then lasts from the end of the work that was launched before it to the end of its own.
    """
    attributed = work.attributed
    operations, attribution = attributed.trace.operations, attributed.attribution
    mine = np.flatnonzero((operations.process == work.process) & (attribution.thread != NONE))
    mine = mine[np.argsort(attribution.time[mine], kind="stable")]
    time, end = attribution.time[mine], operations.end[mine]
    last = _last_ends(windows, time, end)
    middle = max(0, (len(windows) - _SAMPLE) // 2)
    sample = slice(middle, middle + _SAMPLE)
    late = np.median(np.maximum(last - windows.end, 0)[sample]) > _LATE * np.median(windows.length[sample])
    # Work of before the capture, which is not in the file, may run until the first step's own work begins.
    called, own = int(windows.start[0]), mine[windows.step_at(time) == 0]
    first = int(operations.start[own].min()) if len(own) else called
    if not late:
        end = np.append(windows.end[:-1], max(int(windows.end[-1]), int(last[-1])))
        waits = first < end[0] and _waits_for_unseen(work, mine, called, _UNSEEN * int(windows.length[0]))
        return replace(windows, start=np.append(first, windows.start[1:]) if waits else windows.start, end=end)
    ends = np.maximum.accumulate(np.maximum(last, windows.end))
    length = float(np.median(np.diff(ends, prepend=called)))
    first = first if first - called > _LATE * length else called
    before = np.append(first, np.maximum.accumulate(end))[np.searchsorted(time, windows.start)]
    starts = np.maximum.reduce([before, windows.start, np.append(before[0], ends[:-1])])
    kept = ends > starts
    return replace(windows, start=starts, end=ends, on_gpu=True).select(kept) if kept.any() else windows


def _waits_for_unseen(work: _Work, mine: Ints, called: int, long: float) -> bool:
    """Tells whether the first work from a moment on starts long after its launch, while nothing recorded runs."""
    trace, launch = work.attributed.trace, work.attributed.attribution.launch
    start, end = trace.operations.start[mine], trace.operations.end[mine]
    if not (start >= called).any():
        return False
    first = int(start[start >= called].min())
    launched = int(trace.launches.end[launch[mine[start == first][0]]])
    return first - max(launched, int(end[start < called].max(initial=called))) > long


def _last_ends(windows: Windows, time: Ints, end: Ints) -> Ints:
    """Returns the last end of what was launched in each step; the first step's start where nothing was."""
    step = windows.step_at(time)
    last = np.full(len(windows), windows.start[0])
    np.maximum.at(last, step[step != NONE], end[step != NONE])
    return last


# --- steps that are alike


def _kinds(attributed: AttributedTrace, process: int, every: Windows) -> list[GroupKind]:
    """Tells the kind of each step by its work: the usual one is that of most steps."""
    length, launches, compute = every.length, *_launched(attributed, process, every)
    kinds: list[GroupKind] = ["usual"] * len(every)
    if len(every) < 2 or every.source == "said":
        return kinds
    own = np.maximum(every.ended - every.called, every.end - every.left)  # without what lies between steps
    has_open_end = bool(every.left[-1] == every.ended[-1])  # the time behind the last step is unknown
    complete = length[1 : len(every) - has_open_end]
    is_long = own[0] > _UNUSUAL * np.median(own[1:])
    is_long |= bool(len(complete)) and length[0] > _UNUSUAL * np.median(complete) + _SHORT_NS
    # Inference may begin with a long prompt. Then the step is longer in proportion to its work.
    work_ratio = compute[0] / max(np.median(compute[1:]), 1)
    is_other_work = work_ratio > _UNUSUAL and own[0] <= _UNUSUAL * work_ratio * np.median(own[1:])
    first = int(is_long and (_trains(attributed, process) or not is_other_work))
    between = np.median((every.left - every.ended)[first:-1]) if len(every) > first + 1 else 0
    last = len(every) - int(between > _BETWEEN * np.median(length[first:]) and has_open_end)
    some = slice(first, last)
    key = _clusters(launches[some] + _FEW) * len(every) + _clusters(compute[some] + _SHORT_NS)
    most = max(np.unique(key).tolist(), key=lambda one: ((key == one).sum(), length[some][key == one].sum()))
    usual = np.median(own[some][key == most])
    like = (own <= _UNUSUAL * usual) & (own >= usual / _UNUSUAL)
    alike = like[some] | (key == most)  # work of other streams may fall into a neighbouring step
    kinds[some] = ["usual" if one else "other work" for one in alike.tolist()]
    kinds[:first], kinds[last:] = ["first"] * first, ["last"] * (len(every) - last)
    return kinds


def _launched(attributed: AttributedTrace, process: int, every: Windows) -> tuple[Ints, Ints]:
    """Returns how many operations each step launches, and how long these compute, ns; shape (steps,).

    Collectives do not count. Copies count as operations only, because a first step may upload the model.
    """
    operations, attribution, kernels = attributed.trace.operations, attributed.attribution, attributed.kernels
    waits = np.array([*(name == COMMUNICATION for name in kernels.classes), False])[kernels.code]
    mine = (operations.process == process) & ~waits
    placed = mine & (attribution.thread != NONE)
    mine = placed if placed.any() else mine  # the rest was launched before the recording began
    step = every.step_at((attribution.time if placed.any() else operations.start)[mine]) + 1
    computing_ns = np.where(operations.kind == MEMCPY, 0, operations.end - operations.start)[mine]
    ns = np.bincount(step, computing_ns, len(every) + 1)
    return np.bincount(step, minlength=len(every) + 1)[1:], ns[1:].astype(np.int64)


def _clusters(values: Ints) -> Ints:
    """Returns the group of each value, from the smallest on: between two groups there is a gap."""
    order = np.argsort(values, kind="stable")
    group = np.append(0, np.cumsum(values[order][1:] > _GAP * values[order][:-1]))
    found = np.empty(len(values), np.int64)
    found[order] = group
    return found
