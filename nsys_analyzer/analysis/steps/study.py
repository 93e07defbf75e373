"""A few consecutive steps in full detail, on the device that does most: what findings are made from."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from nsys_analyzer.analysis.intervals import LONG_AGO, NONE, Cover
from nsys_analyzer.analysis.ranges.instances import AttributedTrace
from nsys_analyzer.analysis.steps.anatomy import shares_of
from nsys_analyzer.analysis.steps.lines import Line, Votes
from nsys_analyzer.analysis.steps.process import PAUSE_NS, ProcessWork
from nsys_analyzer.analysis.steps.profiler_cost import (
    API_CALL,
    NVTX_RANGE,
    OPERATOR,
    EventCost,
    recorded_ranges,
    slowness,
)
from nsys_analyzer.analysis.steps.replay import Replay, before_on
from nsys_analyzer.analysis.steps.windows import Steps, Windows
from nsys_analyzer.trace.arrays import Bools, Codes, Floats, Integers, Ints, SmallInts, dense_codes
from nsys_analyzer.trace.columns import (
    COPY,
    DEVICE_TO_PAGEABLE,
    FREE,
    OTHER_COPY,
    PAGEABLE_TO_DEVICE,
    SYNCHRONIZE,
    Launches,
    Ranges,
    pid_of,
    process_of,
)
from nsys_analyzer.trace.metadata import Gpu
from nsys_analyzer.trace.phase_names import ATTENTION_PARTS
from nsys_analyzer.trace.schema import NS_PER_MS, NS_PER_US

#: Steps that are studied, and the calls that they may have together.
_FEWEST, _MOST_STEPS, _MOST_CALLS = 3, 10, 15_000
#: Steps whose mean differs by less than this from the length of a step are studied; of several choices the most.
_LIKE = 0.03
#: A call may wait from this duration on, ns. The driver's queue holds 1,024 launches: near that one waits for room.
_LONG_NS, _QUEUE = 20_000, 1_000
#: The least that a synchronization takes, and the clocks' difference, ns.
_SHORTEST_WAIT_NS, _SKEW_NS = 4_000, 3_000
#: Streams of other devices differ from those of the one that is studied from this bit on.
_OTHER_DEVICE = 32
#: What waits for another stream begins so soon behind it, ns.
_AT_ONCE_NS = 10_000
#: What begins and ends the recording of a CUDA graph: cudaStreamBeginCapture_v10000, hipStreamEndCapture.
_RECORDING = ("StreamBeginCapture", "StreamEndCapture")
#: From a launch to its start on an idle GPU, and between two pieces that are queued, ns, where nothing was measured.
_LATENCY_NS, _SPACING_NS = 6_000, 1_000

#: The calls that make a stream wait for an event, and those that record one, by the starts of their names.
_WAIT_EVENT, _RECORD = "(cuda|cu|hip)StreamWaitEvent", "(cuda|cu|hip)EventRecord"


#: The columns of a study by call, and by piece.
STUDY_OF_CALLS = ("call", "api", "range", "pause_range", "loading_ns", "unrecorded_ns", "started", "off_cpu")
STUDY_OF_PIECES = ("operation", "kind", "size", "copy", "kernel", "phase", "part", "duration", "exposed", "begin")
_NOTHING = np.zeros(0, np.int64)


@dataclass(frozen=True)
class Study:
    """Some steps: a replay of them, and what its pieces and its calls are.

    Attributes:
        windows: the steps on the capture's clock.
        operation: shape (pieces,), index of each into the trace's operations; ``kind, size, copy`` are as of these.
        kernel: code into ``kernels``, -1 for what is no kernel; each has its class in ``classes``.
        phase: code into ``phases``.
        part: shape (pieces,), code into ``ATTENTION_PARTS`` of the range of attention it was launched in, -1 outside.
        duration: shape (pieces,), ns of each operation; ``exposed`` is the part of it that nothing else hides.
        call: shape (calls,), what each does; ``api`` is a code into ``apis``.
        range: shape (calls,), code into ``ranges`` of the innermost range when it starts; -1 in none but a step's.
        caller: what of PyTorch each call was made for, empty where no backtrace says it.
        pause_range: the same for the time to the next call: where the program loads a batch, else its longest part.
        spans: shape (ranges, 5), of each of the program's ranges its code, the first call and the one behind the last
            that start in it, and the same of the times behind calls, by their middles.
        loading_ns: shape (calls,), the part of the pause behind the call in which the program loads a batch.
        unrecorded_ns: shape (calls,), the part of the pause behind the call in which the call still waits, for work
            that was not recorded.
        measured_ns: how long these steps took under the profiler, mean, as a replay looks at them.
        low_share: the least that the profiler may have cost, as a share of the most.
        lines: of the program, behind the idle time of each cause; ``votes`` tell those that launch something.
        off_cpu: shape (calls,), ns of the time from each call to the next in which the program's thread has no CPU; NaN
            where that is not known.
        begin: shape (pieces,), when each operation began, ns; ``started`` is when each call did.
        group: the name of these steps' group; ``others`` are the other groups.
    """

    replay: Replay
    windows: Windows
    operation: Ints
    kind: Codes
    size: Ints
    copy: SmallInts
    kernel: SmallInts
    kernels: tuple[str, ...]
    classes: tuple[str, ...]
    phase: Integers
    phases: tuple[str, ...]
    part: Ints
    duration: Ints
    exposed: Floats
    call: Codes
    api: SmallInts
    apis: tuple[str, ...]
    caller: tuple[str, ...]
    range: Ints
    pause_range: Ints
    spans: Ints
    loading_ns: Ints
    unrecorded_ns: Ints
    ranges: tuple[str, ...]
    phase_ranges: frozenset[str]
    measured_ns: float
    low_share: float
    gpu: Gpu | None
    lines: Mapping[str, tuple[Line, ...]] = field(default_factory=dict)
    votes: Votes | None = None
    begin: Ints = field(default_factory=lambda: _NOTHING)
    started: Ints = field(default_factory=lambda: _NOTHING)
    off_cpu: Floats = field(default_factory=lambda: _NOTHING.astype(np.float64))
    group: str = "usual"
    others: tuple[OtherSteps, ...] = ()

    @property
    def steps(self) -> int:
        """How many steps there are."""
        return self.replay.steps

    @property
    def loading(self) -> Bools:
        """True for the calls behind which the program loads a batch."""
        loading: Bools = self.loading_ns > 0
        return loading

    def of_steps(self, first: int, last: int) -> Study:
        """Some of the steps of one rank, up to the last but without it."""
        bounds = self.replay.first_call[first : last + 1]
        low, high = bounds[[0, -1]].tolist()
        of_each = (STUDY_OF_CALLS, (low, high)), (STUDY_OF_PIECES, np.searchsorted(self.replay.launch, (low, high)))
        columns: dict[str, Any] = {
            name: getattr(self, name)[slice(*among)] for names, among in of_each for name in names
        }
        spans = self.spans.copy()
        spans[:, 1:] = np.clip(spans[:, 1:] - low, 0, high - low)
        columns |= {"windows": self.windows.select(np.arange(first, last))}
        return replace(self, **columns, replay=self.replay.between(bounds), spans=spans)

    def of_class(self, *classes: str) -> Bools:
        """True for the pieces whose kernel is of one of these classes."""
        of_class: Bools = np.array([*(one in classes for one in self.classes), False])[self.kernel]
        return of_class

    def in_phase(self, *phases: str) -> Bools:
        """True for the pieces of one of these phases."""
        of_phase: Bools = np.array([*(one in phases for one in self.phases), False])[self.phase]
        return of_phase

    def in_part(self, *parts: str) -> Bools:
        """True for the pieces launched in one of these parts of attention."""
        of_part: Bools = np.array([*(one in parts for one in ATTENTION_PARTS), False])[self.part]
        return of_part

    def named(self, pattern: re.Pattern[str]) -> Bools:
        """True for the pieces of a kernel whose name holds a pattern."""
        holds: Bools = np.array([*(bool(pattern.search(name)) for name in self.kernels), False])[self.kernel]
        return holds

    def calls_of(self, pieces: Bools) -> Bools:
        """Marks the calls that launched some pieces."""
        calls = np.zeros(len(self.call), np.bool_)
        calls[self.replay.launch[pieces]] = True
        return calls

    def lines_of(self, pieces: Bools) -> tuple[Line, ...]:
        """Returns the lines that launch some pieces, by the work that each of them launches.

        The backward pass has one line for all that it launches: what else launches such pieces tells them apart.
        """
        ahead = pieces & ~self.in_phase("backward")
        work_ns = np.where(ahead if ahead.any() else pieces, self.exposed, 0.0)
        launched_ns = np.bincount(self.replay.launch, work_ns, len(self.call)).astype(np.float64)
        calls = set(np.diff(self.replay.first_call).tolist())  # if steps differ in their calls, no two places are alike
        place = np.arange(len(self.call)) % (calls.pop() if len(calls) == 1 else len(self.call))
        return self.votes.of(launched_ns, place, self.steps) if self.votes else ()

    def copying(self, copies: Bools) -> Bools:
        """Marks the calls that launched some copies, and the synchronizations directly behind them."""
        calls = self.calls_of(copies)
        copying: Bools = calls | (np.append(False, calls[:-1]) & (self.call == SYNCHRONIZE))
        return copying

    def inside(self, name: str) -> tuple[Bools, Bools]:
        """True for the calls that start in a range of a name, at any depth, and for those with their pause in one."""
        spans = self.spans[[self.ranges[code] == name for code in self.spans[:, 0].tolist()]]
        calls, pauses = np.zeros((2, len(self.call) + 1), np.int64)
        for opened, (start, end) in ((calls, (1, 2)), (pauses, (3, 4))):
            np.add.at(opened, spans[:, start], 1)
            np.add.at(opened, spans[:, end], -1)
        return calls.cumsum()[:-1] > 0, pauses.cumsum()[:-1] > 0

    @property
    def busy_ms(self) -> float:
        """The GPU's work in a step, of the steps that a replay looks at, ms."""
        left_out = 1 if self.steps >= _FEWEST else 0
        later = self.replay.launch >= self.replay.first_call[left_out]
        return float(self.exposed[later].sum()) / (self.steps - left_out) / NS_PER_MS

    @property
    def recording_share(self) -> float:
        """The share of the time in which the program records a CUDA graph: what it launches meanwhile does not run."""
        bounds = [np.array([*(word in api for api in self.apis), False])[self.api] for word in _RECORDING]
        inside, after = np.cumsum(bounds[0]) > np.cumsum(bounds[1]), self.replay.after
        return float(after[inside].sum() / after.sum()) if after.any() else 0.0

    @property
    def critical(self) -> Ints:
        """The operations on the critical path of all of the steps."""
        _, on_path = self.replay.critical_path(whole=True)
        critical: Ints = self.operation[on_path > 0]
        return critical

    def ms(self, pieces: Bools) -> float:
        """The work of some pieces in a step, ms."""
        return float(self.exposed[pieces].sum()) / self.steps / NS_PER_MS

    def names(self, codes: Ints) -> list[str]:
        """The names of ranges by their codes, empty for -1."""
        return [self.ranges[code] if code >= 0 else "" for code in codes.tolist()]

    def called(self, chosen: Bools) -> list[str]:
        """The names of some calls, without their version."""
        return [self.apis[code].partition("_v")[0] for code in self.api[chosen].tolist()]

    def count(self, chosen: Bools) -> float:
        """How many operations there are in a step, of some pieces: median."""
        return self.calls_at(self.replay.launch[chosen & self.on_device])

    @property
    def on_device(self) -> Bools:
        """True for the pieces of the device whose work is told, False for those of others."""
        on_device: Bools = self.replay.stream >> _OTHER_DEVICE == 0
        return on_device

    def calls(self, chosen: Bools) -> float:
        """How many calls there are in a step, of some: median, since what the first steps do is none of the others'."""
        return self.calls_at(np.flatnonzero(chosen))

    def calls_at(self, calls: Ints) -> float:
        """How many calls there are in a step, of those at some positions: median."""
        step = np.searchsorted(self.replay.first_call, calls, side="right") - 1
        return float(np.median(np.bincount(step, minlength=self.steps)[: self.steps]))


@dataclass(frozen=True)
class OtherSteps:
    """Steps that are unlike the usual ones: how many there are, and some of them in detail."""

    name: str
    steps: int
    length_ms: float
    study: Study


def study_groups(work: ProcessWork, steps: Steps, device: int) -> Study | None:
    """Studies steps, and those of other groups by themselves; each as of ``study_steps``."""
    study = study_steps(work, steps, device)
    others = ((name, group, study_steps(work, group, device)) for name, group in steps.others) if study else ()
    found = tuple(OtherSteps(name, len(group.windows), group.length_ms, one) for name, group, one in others if one)
    return replace(study, others=found) if study else None


def study_steps(work: ProcessWork, steps: Steps, device: int, windows: Windows | None = None) -> Study | None:
    """Studies some of the steps; None where no launch is known. Other devices of the process are replayed, too.

    Args:
        device: the one whose work is told.
        windows: the steps that are studied; else a few that follow each other and take together as long as steps do.
    """
    attributed, operations = work.attributed, work.attributed.trace.operations
    windows = _chosen(steps, work.calls.start) if windows is None else windows
    bounds = np.append(windows.called, windows.left[-1:])
    goes_on = bool(np.isin(bounds[-1], steps.every.called))  # with a step right behind the last one
    first_call = np.searchsorted(work.calls.start, bounds)
    low, high = int(first_call[0]), int(first_call[-1])
    calls, unrecorded_ns = work.calls.select(slice(low, high)), work.unrecorded[low:high]
    if len(calls) < 2:
        return None
    calls = replace(calls, end=calls.end - unrecorded_ns)
    behind = work.calls.start[high] if goes_on and high < len(work.calls) else max(bounds[-1], calls.end[-1])
    if not np.isin(bounds[-1], steps.windows.called):  # the next step is left out, and so is the work it begins with
        behind = max(min(behind, bounds[-1] + calls.start[0] - bounds[0]), calls.end[-1])
    following = np.append(calls.start[1:], behind)
    position = np.full(len(attributed.trace.launches) + 1, NONE, np.int32)
    position[work.index[low:high]] = np.arange(high - low)
    position[NONE] = NONE
    launched = position[attributed.attribution.launch]
    every = np.concatenate(list(work.devices.values()))
    # Streams of two devices may have the same number. AMD's numbers are addresses, so codes replace them.
    numbers = operations.stream[every].astype(np.int64)
    numbers = dense_codes(numbers)[1] if (numbers >> _OTHER_DEVICE).any() else numbers
    stream_of = numbers + ((operations.device[every].astype(np.int64) - device) << _OTHER_DEVICE)
    placed = launched[every] != NONE
    mine, stream = every[placed], stream_of[placed]
    on_device = mine[stream >> _OTHER_DEVICE == 0]
    if not len(on_device):
        return None
    on_device = on_device[np.argsort(operations.start[on_device], kind="stable")]
    exposed = np.zeros(len(operations))
    exposed[on_device] = shares_of(operations.start[on_device], operations.end[on_device], work.rank[on_device])
    order = np.lexsort((operations.start[mine], launched[mine]))
    order = order[operations.end[mine[order]] > operations.start[mine[order]]]
    mine, stream = mine[order], stream[order]
    launch = launched[mine].astype(np.int64)
    begin, end = operations.start[mine], operations.end[mine]
    pageable = np.isin(operations.copy[mine], (PAGEABLE_TO_DEVICE, DEVICE_TO_PAGEABLE))
    earlier = ~placed & (work.launched[every] < calls.start[0]) & (work.launched[every] > LONG_AGO)
    queued = operations.end[every[earlier]], stream_of[earlier]
    awaited, own, lag, blocked = _waits(calls, launch, stream, end, pageable, queued)
    # Where another thread goes on meanwhile, the program does not wait.
    awaited = np.where(following < calls.end - _SKEW_NS, NONE, awaited)
    waits = awaited != NONE
    idle = np.maximum(following - calls.end, 0).astype(np.float64)
    after = np.maximum(following - np.where(waits | blocked, calls.end, calls.start), 0).astype(np.float64)
    low_cost, high_cost = _profiler_costs(attributed, work.process, calls.start, following)
    ran = [
        operations.end[every[(stream_of == one) & (operations.start[every] < begin[stream == one].min())]]
        for one in np.unique(stream)
    ]
    ran_before = np.array([ended.max(initial=LONG_AGO) for ended in ran])
    joins = _joins(calls, launch, stream, begin, end)
    # If the profiler works inside a launch, the operation is launched that much later.
    held_up = work.noted.covered_within(calls.start, calls.end)[launch]
    latency, spacing, gap = _gpu_side(begin, end, calls.start[launch] + held_up, stream, joins, ran_before)
    replay = Replay(
        after,
        own,
        awaited,
        lag,
        launch,
        latency + held_up,
        spacing,
        (end - begin).astype(np.float64),
        first_call - low,
        high_cost,
        np.where(idle >= PAUSE_NS, idle, 0.0),
        stream,
        joins,
        gap,
        once=windows.source == "pass",
        noted=work.noted.covered_within(following - after.astype(np.int64), following).astype(np.float64),
    )
    if replay.steps >= _FEWEST:
        lengths = replay.lengths_of(np.append(calls.start, behind), np.append(end, ran_before.max()))
        measured_ns = float(lengths[1:].mean())
    else:  # from the first call of the steps to the one behind them
        shift = (behind - bounds[-1]) - (calls.start[0] - bounds[0])
        measured_ns = float((windows.end - windows.start).sum() + shift) / replay.steps
    kernels, ranges = attributed.kernels, attributed.trace.ranges
    paused = np.maximum.accumulate((np.maximum(calls.end, calls.start) + following) // 2)
    loading_ns, pause_range = work.pauses_between(np.minimum(calls.end, following), following)
    opened = work.ranges
    places = [
        np.searchsorted(at, edge) for at in (calls.start, paused) for edge in (ranges.start[opened], ranges.end[opened])
    ]
    spans = np.stack([ranges.name[opened], *places], 1)
    return Study(
        replay, windows, mine,
        operations.kind[mine], operations.size[mine],
        np.where(kernels.code[mine] == NONE, operations.copy[mine], OTHER_COPY),  # without collectives
        kernels.code[mine], kernels.names, kernels.classes,
        work.phase[mine], work.phases,
        attributed.find_attention_parts(mine),
        end - begin, exposed[mine],
        calls.call, calls.name, calls.names,
        tuple(attributed.trace.torch_callers.get((work.process, one), "") for one in calls.correlation.tolist()),
        work.ranges_at(calls.start), pause_range,
        spans[(spans[:, 1] < spans[:, 2]) | (spans[:, 3] < spans[:, 4])],
        np.where(idle >= PAUSE_NS, loading_ns, 0), unrecorded_ns,
        ranges.names,
        frozenset(ranges.names[code] for code in np.unique(ranges.name[attributed.roles.is_leaf_phase]).tolist()),
        measured_ns,
        float(low_cost.sum() / high_cost.sum()) if high_cost.any() else 1.0,
        attributed.trace.metadata.gpu(pid_of(work.process), device),
        begin=begin, started=calls.start, group=steps.names[steps.number[0]],
        off_cpu=_off_cpu(attributed.trace.off_cpu, calls, following),
    )  # fmt: skip


def _off_cpu(known: Mapping[int, tuple[Ints, Ints]], calls: Launches, following: Ints) -> Floats:
    """The time between each call and the next in which the thread of the next has no CPU, ns; NaN where unknown."""
    thread, off = np.append(calls.thread[1:], calls.thread[-1:]), np.full(len(calls), np.nan)
    for one in set(known).intersection(np.unique(thread).tolist()):
        mine = thread == one
        off[mine] = Cover.from_intervals(*known[one]).covered_within(
            np.minimum(calls.end, following)[mine], following[mine]
        )
    return off


def _chosen(steps: Steps, called: Ints) -> Windows:
    """Measured steps that follow each other, as many as are studied, whose mean is nearest to the length of a step.

    Args:
        called: when each call of the program starts.
    """
    windows = steps.windows
    if len(windows) >= _FEWEST:  # the time from the last one to the next is not known
        windows = windows.select(windows.called < steps.every.called[-1])
    bounds = np.append(windows.called, windows.left)
    calls = np.searchsorted(called, bounds)
    each = max(1, int(np.median(calls[len(windows) :] - calls[: len(windows)])))
    most = int(np.clip(_MOST_CALLS // each, 1, _MOST_STEPS))
    apart = np.flatnonzero(windows.called[1:] != windows.left[:-1]) + 1
    runs = np.split(np.arange(len(windows)), apart)
    most = min(most, max(map(len, runs)))
    total = np.append(0, np.cumsum(windows.end - windows.start)) / NS_PER_MS
    best = (np.inf, 0, 0)
    for many in range(most, min(most, _FEWEST) - 1, -1):
        first = np.concatenate([run[: len(run) - many + 1] for run in runs if len(run) >= many])
        off = np.abs((total[first + many] - total[first]) / many - steps.length_ms)
        middle = np.abs(first + many / 2 - len(windows) / 2)  # of equals the one in the middle
        place = int(np.lexsort((middle, off.round(6)))[0])
        best = min(best, (float(off[place]), int(first[place]), many))
        if best[0] <= _LIKE * steps.length_ms:
            break
    _, start, many = best
    return windows.select(np.arange(start, start + many))


def _joins(calls: Launches, launch: Ints, stream: Ints, begin: Ints, end: Ints) -> Ints:
    """The piece of another stream that each piece starts behind, -1 for none, by the order of the calls' names.

    The piece that is launched behind a call for a stream to wait is taken for the one that waits, for what of another
    stream was launched before the call and ended last before it began. An event that is recorded directly before the
    call is one that a side stream waits for, unless the piece begins as soon as what it may wait for ends, and nothing
    else held it up.
    """
    named = {kind: np.array([bool(re.match(kind, name)) for name in calls.names]) for kind in (_WAIT_EVENT, _RECORD)}
    waits, records = (np.flatnonzero(mask[calls.name]) for mask in named.values())
    joins = np.full(len(launch), NONE, np.int64)
    waiting = np.searchsorted(launch, waits, side="right")
    waits, waiting = waits[waiting < len(launch)], waiting[waiting < len(launch)]
    before = np.where(waiting > 0, launch[waiting - 1], 0)
    recorded = np.searchsorted(records, waits) > np.searchsorted(records, before)
    streams, count = np.unique(stream, return_counts=True)
    by_side = recorded & (stream[waiting] == streams[count.argmax()])
    sure = np.zeros(len(launch), np.bool_)
    sure[waiting[~by_side]] = True
    for other in streams.tolist():
        mine = np.flatnonzero(stream == other)
        ended = np.searchsorted(np.maximum.accumulate(end[mine]), begin[waiting] + _SKEW_NS, side="right")
        last = np.append(mine, NONE)[np.minimum(np.searchsorted(mine, waiting), ended) - 1]
        joined = (last != NONE) & (stream[waiting] != other)
        joined &= end[last] > np.where(joins[waiting] != NONE, end[joins[waiting]], LONG_AGO)
        joins[waiting[joined]] = last[joined]
    ended, before = end[joins], before_on(stream)
    held = (begin - ended <= _AT_ONCE_NS) & (calls.start[launch] < ended) & ((before < 0) | (end[before] < ended))
    return np.where(sure | held, joins, NONE)


def _gpu_side(
    begin: Ints, end: Ints, called: Ints, stream: Ints, joins: Ints, ran_before: Ints
) -> tuple[Floats, Floats, Floats]:
    """Latency, spacing and gap of each piece, ns: what it waited for in the trace is what it waits for in a replay.

    ``ran_before``: when each stream, by its number, had done what it ran before its first piece.
    """
    before = before_on(stream)
    first = np.maximum(ran_before[np.searchsorted(np.unique(stream), stream)], called)
    ended = np.where(before >= 0, end[before], first)
    joined = np.where(joins >= 0, end[joins], LONG_AGO)
    spaced = begin - ended
    late = called > np.maximum(ended, joined)  # launched when the stream had already run dry
    latency = np.median((begin - called)[late & (begin > called)]) if (late & (begin > called)).any() else _LATENCY_NS
    # Differences are compared, since a time of a clock that counts from 1970 is no whole number as a float.
    by_join = (joined > ended) & (joined - called >= latency)
    by_launch = (spaced > 0) & (np.maximum(ended, joined) - called < latency)
    queued = ~by_launch & ~by_join & (spaced > 0)
    spacing = np.median(spaced[queued]) if queued.any() else _SPACING_NS
    gap = np.median((begin - joined)[by_join]) if by_join.any() else _SPACING_NS
    return (
        np.where(by_launch, np.maximum(begin - called, 0), latency).astype(np.float64),
        np.where(by_launch | by_join, np.minimum(spaced, spacing), spaced).astype(np.float64),
        np.where(by_join, begin - joined, np.minimum(begin - joined, gap)).astype(np.float64),
    )


def _waits(
    calls: Launches, launch: Ints, stream: Ints, end: Ints, pageable: Bools, queued: tuple[Ints, Ints]
) -> tuple[Ints, Floats, Floats, Bools]:
    """The piece that each call waits for, the least that the call takes, and what it takes after that piece's end.

    The last column marks calls that wait for room in a queue that is full of what was launched before these steps: a
    replay begins without that, and nothing waits. ``queued``: when each of that ends, and its stream.
    """
    lasting = calls.end - calls.start
    count = len(calls)
    position = np.arange(count)
    piece, queues = np.full(count, NONE), dict[int, Ints]()  # of each device
    for device in np.unique(stream >> _OTHER_DEVICE).tolist():
        ends = np.sort(queued[0][queued[1] >> _OTHER_DEVICE == device])
        queues[device] = len(ends) - np.searchsorted(ends, calls.start, side="right")
    for one in np.unique(stream).tolist():  # of all streams, what ended last before the call's end
        mine = np.flatnonzero(stream == one)
        reached = np.maximum.accumulate(end[mine])
        newest = np.searchsorted(launch[mine], position, side="right") - 1  # launched before or by it
        last = np.minimum(newest, np.searchsorted(reached, calls.end + _SKEW_NS, side="right") - 1)
        later = (last >= 0) & ((piece == NONE) | (end[mine[last]] > end[piece]))
        piece = np.where(later, mine[last], piece)
        queues[one >> _OTHER_DEVICE] += newest + 1 - np.searchsorted(reached, calls.start, side="right")
    ended_at = np.append(end, 0)[piece]
    waited = (piece >= 0) & (ended_at >= calls.start)
    sync = (calls.call == SYNCHRONIZE) & (piece >= 0)
    blocking = np.isin(calls.call, (COPY, FREE)) & waited & (lasting > _LONG_NS)
    # A copy through a buffer of the driver's: the call ends with it, a little before or after.
    copied = np.full(count, NONE)
    copied[launch[pageable]] = np.flatnonzero(pageable)
    through = (calls.call == COPY) & (copied != NONE) & (lasting > _LONG_NS)
    through &= np.append(end, 0)[copied] - calls.end < lasting // 2
    piece = np.where(through, copied, piece)
    ended_at, waited = np.append(end, 0)[piece], waited | through
    full = ~through & (lasting > _LONG_NS) & (np.max(list(queues.values()), axis=0) >= _QUEUE)
    waits = sync | blocking | (full & waited) | through
    behind = np.where(through, calls.end - ended_at, np.maximum(calls.end - ended_at, 0))
    lag = np.where(waited, behind, np.minimum(lasting, _SHORTEST_WAIT_NS))
    own = np.where(waited, np.minimum(lasting, _SHORTEST_WAIT_NS), lasting)
    return np.where(waits, piece, NONE), own.astype(np.float64), lag.astype(np.float64), full & ~waits


def _profiler_costs(attributed: AttributedTrace, process: int, start: Ints, end: Ints) -> tuple[Floats, Floats]:
    """The least and the most that the profiler may have cost from each call to the next, ns."""
    trace = attributed.as_recorded
    low, high = np.zeros(len(start)), np.zeros(len(start))
    slower = slowness(trace)
    recorded: list[tuple[Launches | Ranges, EventCost, float]] = [
        (trace.launches, API_CALL, slower),
        (recorded_ranges(trace), NVTX_RANGE, 1.0),
    ]
    recorded += [(trace.operators, OPERATOR, 1.0)] if trace.metadata.profiler == "torch" else []
    for events, cost, factor in recorded:
        near = events.select((events.start >= start.min()) & (events.start <= end.max()))
        times = np.sort(near.start[process_of(near.thread) == process])
        many = np.searchsorted(times, end) - np.searchsorted(times, start)
        low += many * cost.low_us * factor * NS_PER_US
        high += many * cost.high_us * factor * NS_PER_US
    return low, high
