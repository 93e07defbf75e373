"""One process: its API calls and its pauses, what each of its operations is, and why its devices idle.

Python holds one lock, and autograd's thread works while the main thread waits for it: the calls of a process's
launching threads are looked at as one sequence.

Every nanosecond in which a device idles belongs to one cause, by what the program did meanwhile. A gap is looked at
from the side of the operation that ends it. Where that was launched before the gap began, the device had it in its
queue: nothing of the program's keeps it waiting. Else the program came too late, because it was in a blocking call when
the device ran dry, in the allocator or another slow call, at work of its own, or because launching takes its time.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Literal, get_args

import numpy as np

from nsys_analyzer.analysis.intervals import LONG_AGO, NONE, Cover, Timeline, find_overlaps
from nsys_analyzer.analysis.kernels.class_rules import COMMUNICATION, FILLS, UNKNOWN
from nsys_analyzer.analysis.ranges.instances import AttributedTrace
from nsys_analyzer.analysis.steps.anatomy import COMMUNICATING, COMPUTE, COPYING, Anatomy, Gaps, dissect, reached_before
from nsys_analyzer.analysis.steps.profiler_cost import noted_costs
from nsys_analyzer.analysis.steps.windows import Windows
from nsys_analyzer.trace.arrays import Bools, Ints, distinct, take_or_default
from nsys_analyzer.trace.columns import (
    ALLOCATE,
    BETWEEN_DEVICES,
    COPY,
    FREE,
    INTO_HOST,
    MEMCPY,
    MEMSET,
    ON_DEVICE,
    OTHER_CALL,
    SYNCHRONIZE,
    Columns,
    Launches,
    process_of,
)
from nsys_analyzer.trace.phase_names import (
    OTHER_STEP,
    REQUEST_RANGE,
    STEP,
    map_by_shape,
    normalize_name,
    parse_served_step,
)

Cause = Literal[
    "sync", "allocator", "copy", "launch", "host", "data", "communication", "unrecorded", "profiler", "unknown"
]
CAUSES: tuple[Cause, ...] = get_args(Cause)
_SYNC, _ALLOCATOR, _COPY, _LAUNCH, _HOST, _DATA, _COMMUNICATION, _UNRECORDED, _PROFILER, _UNKNOWN = range(len(CAUSES))

#: Phases of the GPU's time that no phase's range has launched.
OUTSIDE = "outside the phases"
#: Operations that are dissected at once: enough for numpy, and few enough for the processor's cache.
AT_ONCE = 50_000
#: From this on, a stretch without an API call is the program's own work, and no pause between two launches, ns.
PAUSE_NS = 100_000
#: From this on a copy's call blocks, ns: an asynchronous one returns at once.
_BLOCKS_NS = 15_000
#: Between two kernels that are both queued the GPU needs about a microsecond; up to this it is its own affair, ns.
_QUEUED_NS = 10_000
#: A wait that lasts this much longer than all recorded work waits for other work: returning takes far less time.
_UNRECORDED_NS = 1_000_000
#: The clocks of threads, and those of CPU and GPU, are read together, to this, ns.
_SKEW_NS = 3_000

#: Words that name the input pipeline, and those that do so together, as in ``get_batch``.
_LOADING = (
    "data", "dataset", "dataloader", "dataloading", "loader", "loading", "fetch", "fetching", "prefetch", "minibatch",
)  # fmt: skip
_VERBS = ("get", "next", "load", "collate", "read")
_NOUNS = ("batch", "batches", "input", "inputs", "sample", "samples")
#: Starts of words that name a part of the model: ``BatchNorm2d``, ``DistributedDataParallel.forward``, ``input_proj``.
#: What is fetched may be weights, too: ``prefetch_h2d_wo``, ``fetch_expert_3``.
_OF_THE_MODEL = re.compile(r"norm|parallel|embed|proj|layer|forward|backward|loss|weight|param|expert|kv|w[a-z]?\d*$")
#: A frame of Python, as the profiler of PyTorch writes it with stacks, and the words of files that load batches.
_FRAME = re.compile(r"(?:.*/)?(?P<file>[^/]*)\.py\(\d+\): (?P<function>.*)")
_OF_FILES = frozenset(("data", "dataset", "datasets", "dataloader", "datamodule"))


def is_loading(name: str) -> bool:
    """Tells whether a name is that of a range around the input pipeline."""
    if frame := _FRAME.fullmatch(name):  # of a Python function, whose file may be a loader of anything
        of_file = _OF_FILES.isdisjoint(normalize_name(frame["file"]).split())
        return not of_file or is_loading(frame["function"])
    words = set(normalize_name(name).split())
    together = not words.isdisjoint(_VERBS) and not words.isdisjoint(_NOUNS)
    of_the_model = any(_OF_THE_MODEL.match(word) for word in words)
    return (together or not words.isdisjoint(_LOADING)) and not of_the_model


@dataclass(frozen=True)
class Stretches(Columns):
    """Stretches of time that do not overlap, each with one cause, in order.

    Attributes:
        start, end: ns.
        cause: code into ``CAUSES``.
        range: code of the name of the program's innermost range; -1 in none but a step's, and where it is no matter.
        api: code of the name of the API call that the program is in, or -1.
    """

    end: Ints
    cause: Ints
    range: Ints
    api: Ints


@dataclass(frozen=True)
class Idle(Stretches):
    """The stretches in which a device idles, in order; each gap is cut where its cause changes.

    Attributes:
        window: the step that each lies in.
        begins: True for the first stretch of each pause and call, and of what is left of each gap.
        own: True for short pauses between operations that are both queued, which no program delays.
    """

    window: Ints
    begins: Bools
    own: Bools


class ProcessWork:
    """What a process did in some steps: the calls of its launching threads, its pauses, and what its operations are.

    Attributes:
        devices: the indices of the process's operations on each device.
        classes: the classes of kernels; ``label`` is the code of that of each operation of the trace.
        rank: what each operation of the trace does: ``COMPUTE``, ``COPYING`` or ``COMMUNICATING``.
        launched: when each operation of the trace was launched, far in the past where that is not known.
        phases: the names of phases; ``phase`` is the code of that of each operation, and of what is behind the last.
        index: shape (calls,), index of each call into the trace's launches; -1 for what stands for no call.
        waiting: the positions of the calls that wait: synchronizations, blocking copies.
        slow: the positions of other calls that take long, such as one that loads a module.
        allocating: the positions of those that allocate or free the device's memory.
        ranges: the indices of the ranges of its program, without autograd's.
        unrecorded: shape (calls,), ns at each call's end in which it still waits although all recorded work is done.
        noted: when the profiler held the program up, by its own account.
        busy: the program's pauses, its time in the allocator, in slow calls and in waits for unrecorded work, and the
            profiler's own work. A part of a pause is "data" if the program loads a batch there: in a range that says
            so. If no range does, it is a part outside of ranges, before a copy to the device, not at a step's end.
    """

    def __init__(self, attributed: AttributedTrace, process: int, windows: Windows) -> None:
        self.attributed, self.process = attributed, process
        mine = np.flatnonzero(attributed.trace.operations.process == process).astype(np.int32)
        on = attributed.trace.operations.device[mine]
        self.devices = {device: mine[on == device] for device in distinct(on).tolist()}
        self._classify()
        self._find_calls(int(windows.start[0]) if windows.source == "pass" else None)
        ranges = attributed.trace.ranges
        # The main thread's ranges tell what the program does; autograd's are operators.
        is_engine = np.isin(ranges.thread, attributed.attribution.engine)
        self.ranges = np.flatnonzero((process_of(ranges.thread) == process) & ~is_engine)
        of_mine = process_of(ranges.thread[self.ranges]), ranges.start[self.ranges], ranges.end[self.ranges]
        self._open = Timeline(*of_mine, latest=True)
        # A step's range says nothing of what is done inside, and a request's nothing of what is done meanwhile.
        of_request = np.array([*map(bool, map_by_shape(ranges.names, REQUEST_RANGE.fullmatch)), False])[ranges.name]
        around = (attributed.roles.mask(STEP, OTHER_STEP) | of_request)[self.ranges]
        self._names = np.append(np.where(around, NONE, ranges.name[self.ranges]), NONE)
        self.busy = self._find_busy(int(windows.start[0]), int(windows.end[-1]))

    def _classify(self) -> None:
        """Tells the class, the rank, the launch and the phase of each operation."""
        operations, kernels = self.attributed.trace.operations, self.attributed.kernels
        self.classes = tuple(dict.fromkeys((*kernels.classes, FILLS, UNKNOWN)))
        code = {name: i for i, name in enumerate(self.classes)}
        self.label = np.array([*(code[name] for name in kernels.classes), code[UNKNOWN]], np.int32)[kernels.code]
        filled = slice(operations.of_kind(MEMCPY).start, operations.of_kind(MEMSET).stop)
        self.label[filled][kernels.code[filled] == NONE] = code[FILLS]
        self.rank = np.full(len(operations), COMPUTE, np.int8)
        self.rank[operations.of_kind(MEMCPY)] = COPYING
        self.rank[self.label == code.get(COMMUNICATION, NONE)] = COMMUNICATING
        placed, time = self.attributed.attribution.thread != NONE, self.attributed.attribution.time
        self.launched = time if placed.all() else np.where(placed, time, LONG_AGO)
        instances = self.attributed.instances
        self.phases = (*instances.phases, OUTSIDE)
        phase_of = np.append(instances.phase, len(instances.phases)).astype(np.int32)
        self.phase = phase_of[np.append(self.attributed.instances_of_operations[0], NONE)]

    def _find_calls(self, begun: int | None) -> None:
        """Finds the calls of the threads that launch work of the process, and those that wait, last or allocate.

        ``begun``: the start if the capture is one pass. An empty call stands there, so that the time before the first
        call follows a call as well.
        """
        launches = self.attributed.trace.launches
        threads = distinct(take_or_default(launches.thread, self.attributed.attribution.launch, NONE))
        is_mine = np.isin(launches.thread, threads[process_of(threads) == self.process])
        self.index = np.flatnonzero(is_mine).astype(np.int32)
        calls = launches.select(is_mine)
        order = np.lexsort((-calls.end, calls.start))
        self.index, calls = self.index[order], calls.select(order)
        outer = ~_inside_another(calls)
        self.index, self.calls = self.index[outer], calls.select(outer)
        if begun is not None and (self.calls.start[:1] > begun).any():
            opening = {"start": begun, "end": begun, "call": OTHER_CALL, "correlation": NONE}
            columns = self.calls.columns()
            columns = {name: np.insert(column, 0, opening.get(name, column[0])) for name, column in columns.items()}
            self.index, self.calls = np.insert(self.index, 0, NONE), replace(self.calls, **columns)
        calls, lasting = self.calls, self.calls.end - self.calls.start
        waits = (calls.call == SYNCHRONIZE) | ((calls.call == COPY) & (lasting > _BLOCKS_NS))
        # Where another thread goes on meanwhile, the program does not wait.
        waits &= np.append(calls.start, np.iinfo(np.int64).max)[1:] >= calls.end - _SKEW_NS
        allocates = np.isin(calls.call, (ALLOCATE, FREE))
        self.waiting, self.allocating = np.flatnonzero(waits), np.flatnonzero(allocates)
        others = ~np.isin(calls.call, (SYNCHRONIZE, COPY)) & ~allocates
        self.slow = np.flatnonzero(others & (lasting >= PAUSE_NS))
        self.noted = noted_costs(self.attributed.trace, self.process, distinct(calls.thread))
        operations = self.attributed.trace.operations
        ended = np.sort(operations.end[operations.process == self.process])
        last = np.append(LONG_AGO, ended)[np.searchsorted(ended, calls.end + _SKEW_NS, side="right")]
        last = np.clip(last, calls.start, calls.end)
        beyond = calls.end - last - self.noted.covered_within(last, calls.end)
        self.unrecorded = np.where(waits & (calls.call == SYNCHRONIZE) & (beyond >= _UNRECORDED_NS), beyond, 0)

    def _find_busy(self, first: int, last: int) -> Stretches:
        """Finds the stretches between two moments in which the program pauses, allocates, or is in a slow call."""
        calls, unrecorded = self.calls, np.flatnonzero(self.unrecorded)
        index = np.unique(np.concatenate([self.allocating, self.slow, unrecorded]))
        # If two threads are in such calls at once, the time belongs to the first call.
        begin = np.where(self.unrecorded > 0, calls.end - self.unrecorded, calls.start)[index]
        begin = np.maximum(begin, reached_before(calls.end[index]))
        index, begin = index[calls.end[index] > begin], begin[calls.end[index] > begin]
        around, api = self.ranges_at(calls.start[index]), calls.name[index].astype(np.int64)
        cause = np.select([np.isin(index, self.slow), np.isin(index, unrecorded)], [_LAUNCH, _UNRECORDED], _ALLOCATOR)
        in_calls = (begin, calls.end[index], cause, around, api)
        reached = np.maximum.accumulate(calls.end)
        start, end = np.append(first, reached), np.append(calls.start, last)
        long = (end - start >= PAUSE_NS) & bool(len(calls))
        start, end = start[long], end[long]
        # A pause is divided whenever another range becomes the innermost one.
        ranges = self.attributed.trace.ranges
        edges = distinct(np.concatenate([ranges.start[self.ranges], ranges.end[self.ranges]]))
        inside = np.searchsorted(start, edges) > np.searchsorted(end, edges, side="right")
        begin = np.sort(np.concatenate([start, edges[inside]]))
        pause, name = np.searchsorted(start, begin, side="right") - 1, self.ranges_at(begin)
        changes = np.append(True, (np.diff(pause) != 0) | (np.diff(name) != 0))[: len(begin)]
        begin, pause, name = begin[changes], pause[changes], name[changes]
        until = np.minimum(np.append(begin[1:], last), end[pause])
        loads = np.array([*map_by_shape(ranges.names, is_loading), False])[name]
        # An engine copies the tokens of requests to the device before a step, and no batch. If ranges say when a batch
        # is loaded, no other time is loading.
        if not (loads.any() or any(map_by_shape(ranges.names, parse_served_step))):
            loads = (name == NONE) & self._before_a_batch(start, end)[pause] & (until - begin >= PAUSE_NS)
        pauses = (begin, until, np.where(loads, _DATA, _HOST), name, np.full(len(name), NONE))
        columns = [np.concatenate(pair) for pair in zip(pauses, in_calls, strict=True)]
        place, *bounds = self.noted.find_gaps(*columns[:2])
        parts = [*bounds, *(column[place] for column in columns[2:])]
        noted = np.full(len(self.noted.start), NONE)
        by_profiler = (self.noted.start, self.noted.end, np.full_like(noted, _PROFILER), noted, noted)
        columns = [np.concatenate(pair) for pair in zip(parts, by_profiler, strict=True)]
        return Stretches(*columns).select(np.argsort(columns[0], kind="stable"))

    def _before_a_batch(self, start: Ints, end: Ints) -> Bools:
        """Marks the pauses behind which a batch is copied to the device, but for those at the end of a step's range."""
        attributed, operations = self.attributed, self.attributed.trace.operations
        to_device = (operations.kind == MEMCPY) & ~np.isin(operations.copy, (*INTO_HOST, ON_DEVICE, BETWEEN_DEVICES))
        copies = attributed.attribution.launch[to_device]
        # Other calls ask for something, such as whether a stream is captured.
        does = np.flatnonzero(self.calls.call != OTHER_CALL)
        following = np.append(does, NONE)[np.searchsorted(does, np.searchsorted(self.calls.start, end))]
        instances = attributed.instances
        steps = np.isin(instances.phase, [instances.phases.index(name) for name in (STEP, OTHER_STEP)])
        steps &= instances.process == self.process
        begun, ended = np.sort(instances.start[steps]), np.sort(instances.end[steps])
        middle = (start + end) // 2
        in_step = np.searchsorted(begun, middle, side="right") > np.searchsorted(ended, middle, side="right")
        at_the_end = in_step & (np.searchsorted(ended, end, side="right") > np.searchsorted(ended, middle))
        is_copy = (following != NONE) & np.isin(np.append(self.index, NONE)[following], copies[copies != NONE])
        before: Bools = is_copy & ~at_the_end
        return before

    def innermost(self, time: Ints) -> Ints:
        """Returns the innermost range that the program has open at some moments, or -1."""
        return np.append(self.ranges, NONE)[self._open.open_at(np.full(len(time), self.process), time)]

    def ranges_at(self, time: Ints) -> Ints:
        """Returns the code of the name of the innermost range at some moments; -1 in none but a step's."""
        return self._names[self._open.open_at(np.full(len(time), self.process), time)]

    def pauses_between(self, start: Ints, end: Ints) -> tuple[Ints, Ints]:
        """Returns how long the program loads a batch in each stretch, ns, and the range in which it pauses.

        The range is the code of its name, or -1: that of the longest part in which it loads, else of the longest part.
        """
        stretch, piece, begin, until = find_overlaps(self.busy.start, self.busy.end, start, end)
        loads, lasting = self.busy.cause[piece] == _DATA, until - begin
        order = np.lexsort((lasting, loads, stretch))
        where = self.ranges_at((start + end) // 2)
        where[stretch[order]] = self.busy.range[piece[order]]
        return np.bincount(stretch[loads], lasting[loads], len(start)).astype(np.int64), where

    def dissect(self, windows: Windows, device: int) -> Iterator[tuple[Windows, Anatomy]]:
        """Dissects steps on a device, as many at once as have about ``AT_ONCE`` operations."""
        operations, chosen = self.attributed.trace.operations, self.devices[device]
        start = operations.start[chosen]
        if (start[1:] < start[:-1]).any():
            chosen = chosen[np.argsort(start, kind="stable")]
            start = operations.start[chosen]
        low = np.searchsorted(np.maximum.accumulate(operations.end[chosen]), windows.start, side="right")
        # With the operation that follows the last window: what ends its last gap.
        high = np.minimum(np.searchsorted(start, windows.end) + 1, len(chosen))
        number = (np.cumsum(high - low) - 1) // AT_ONCE
        for part in np.unique(number).tolist():
            picked = np.flatnonzero(number == part)
            some, near = windows.select(picked), chosen[int(low[picked].min()) : int(high[picked].max())]
            yield some, dissect(some, operations, near, self.rank)

    def find_idle(self, windows: Windows, device: int) -> Idle:
        """Finds when a device idles in some steps, and why."""
        parts = [self.find_causes(anatomy.gaps).columns().values() for _, anatomy in self.dissect(windows, device)]
        return Idle(*map(np.concatenate, zip(*parts, strict=True)))

    def find_causes(self, gaps: Gaps) -> Idle:
        """Finds why a device idles in its gaps."""
        # Until the launch of what ends a gap, whatever the program does keeps the device waiting; so does a launch that
        # takes long itself, as that of a graph does.
        known, launches = gaps.next != NONE, self.attributed.trace.launches
        launch = np.where(known, self.launched[gaps.next], gaps.end)
        returned = np.zeros(len(launches) + 1, np.int64)
        returned[self.index[self.slow]] = self.calls.end[self.slow]
        launch = np.maximum(launch, np.where(known, returned[self.attributed.attribution.launch[gaps.next]], 0))
        queued = known & (launch <= gaps.start - _SKEW_NS)
        until = np.where(queued, gaps.start, np.clip(launch, gaps.start, gaps.end))
        gap, place, start, end = find_overlaps(self.busy.start, self.busy.end, gaps.start, until)
        own = queued & (gaps.end - gaps.start <= _QUEUED_NS)
        # Besides what fills ``busy``, a gap is due to the call that waits when it begins.
        waiting = self.waiting
        began = np.searchsorted(self.calls.start[waiting], gaps.start + _SKEW_NS, side="right") - 1
        waits = (began >= 0) & (np.append(self.calls.end[waiting], 0)[began] + _SKEW_NS >= gaps.start)
        is_copy = np.append(self.calls.call[waiting] != SYNCHRONIZE, False)[began]
        collective = known & (self.rank[gaps.next] == COMMUNICATING)
        base = np.select(
            [own, queued & collective, queued, waits & is_copy, waits, known],
            [_LAUNCH, _COMMUNICATION, _UNKNOWN, _COPY, _SYNC, _LAUNCH],
            _UNKNOWN,
        )
        call = np.where(waits & ~queued, np.append(waiting, NONE)[began], NONE)
        called = call != NONE
        range_, api = np.full((2, len(call)), NONE)
        range_[called] = self.ranges_at(self.calls.start[call[called]])
        api[called] = self.calls.name[call[called]]
        left, *bounds = Cover.from_intervals(start, end).find_gaps(gaps.start, gaps.end)
        begins = [np.append(True, one[1:] != one[:-1])[: len(one)] for one in (place, left)]
        busy = self.busy.select(place)
        parts = (
            (start, end, busy.cause, busy.range, busy.api, gaps.window[gap], begins[0], np.zeros(len(gap), np.bool_)),
            (*bounds, base[left], range_[left], api[left], gaps.window[left], begins[1], own[left]),
        )
        columns = [np.concatenate(pair) for pair in zip(*parts, strict=True)]
        return Idle(*columns).select(np.argsort(columns[0], kind="stable"))


def _inside_another(calls: Launches) -> Bools:
    """Marks the driver's calls inside a call of their thread; the calls are in order of start, the longer first.

    One without a length at the end of another, as a coarse clock has them, is a call of its own.
    """
    inside = np.zeros(len(calls), np.bool_)
    for thread in distinct(calls.thread):
        mine = np.flatnonzero(calls.thread == thread)
        reached = np.maximum.accumulate(calls.end[mine])
        inside[mine[1:]] = (calls.end[mine[1:]] <= reached[:-1]) & (calls.start[mine[1:]] < reached[:-1])
    return inside
