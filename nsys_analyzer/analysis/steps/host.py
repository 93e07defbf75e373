"""What the program did on the CPU: the API calls of the threads that give the GPU work, and the time between them.

Python holds one lock, and autograd's thread works while the main thread waits for it: the calls of a process's
launching threads are looked at as one sequence.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from nsys_analyzer.analysis.attribution.attribution import autograd_threads
from nsys_analyzer.analysis.intervals import NONE, Cover, Timeline
from nsys_analyzer.analysis.ranges.instances import AttributedTrace
from nsys_analyzer.analysis.ranges.phases import OTHER_STEP, STEP
from nsys_analyzer.trace.arrays import Bools, Ints, SmallInts, blocks, distinct, taken
from nsys_analyzer.trace.columns import (
    ALLOCATE,
    COPY,
    FREE,
    INTO_HOST,
    MEMCPY,
    ON_DEVICE,
    OTHER_CALL,
    SYNCHRONIZE,
    Launches,
    Ranges,
    process_of,
)
from nsys_analyzer.trace.phase_names import normalized_name

#: From this on, a stretch without an API call is the program's own work, and no pause between two launches, ns.
PAUSE_NS = 100_000
#: From this on a copy's call blocks, ns: an asynchronous one returns at once.
_BLOCKS_NS = 15_000
#: The clocks of threads, to this, ns.
_SKEW_NS = 3_000

#: Words that name the input pipeline, and those that do so together, as in ``get_batch``.
_LOADING = (
    "data", "dataset", "dataloader", "dataloading", "loader", "loading", "fetch", "fetching", "prefetch", "minibatch",
)  # fmt: skip
_VERBS = ("get", "next", "load", "collate", "read")
_NOUNS = ("batch", "batches", "input", "inputs", "sample", "samples")
#: Starts of words that name a part of the model: ``BatchNorm2d``, ``DistributedDataParallel.forward``, ``input_proj``.
_OF_THE_MODEL = ("norm", "parallel", "embed", "proj", "layer", "forward", "backward", "loss")


@dataclass(frozen=True)
class Host:
    """The calls of the launching threads of a process in order, and the pauses between them.

    Attributes:
        index: shape (calls,), index of each call into the trace's launches.
        waiting: the positions of the calls that wait: synchronizations, blocking copies.
        slow: the positions of other calls that take long, such as one that loads a module.
        allocating: the positions of those that allocate or free the device's memory; ``allocations`` is their union.
        pauses: the stretches without any call.
        range: shape (pauses,), index of the innermost range around the middle of each pause; -1 in none but a step's.
        loading: shape (pauses,), True where the program loads a batch: in a range that says so, or in none, with a copy
            to the device behind it, and not at the end of a step.
    """

    calls: Launches
    index: SmallInts
    waiting: Ints
    slow: Ints
    allocating: Ints
    allocations: Cover
    pauses: Cover
    range: Ints
    loading: Bools
    ranges: Ranges
    lines: Timeline
    listed: Ints
    process: int

    def innermost(self, time: Ints) -> Ints:
        """The innermost range that the program has open at some moments, or -1."""
        return np.append(self.listed, NONE)[self.lines.at(np.full(len(time), self.process), time)]

    def name(self, index: int) -> str:
        """The name of a range, empty for -1."""
        return self.ranges.names[self.ranges.name[index]] if index != NONE else ""


def find_host(attributed: AttributedTrace, process: int, bounds: tuple[int, int] | None = None) -> Host:
    """The CPU's side of a process.

    ``bounds``: from when to when it matters, so that what comes before its first call and behind its last is seen.
    """
    trace = attributed.trace
    launches = trace.launches
    threads = distinct(taken(launches.thread, attributed.attribution.launch, NONE))
    chosen = np.zeros(len(launches), np.bool_)
    for thread in threads[process_of(threads) == process]:
        chosen |= launches.thread == thread
    index = np.flatnonzero(chosen).astype(np.int32)
    calls = launches if chosen.all() else launches.select(index)
    if (calls.start[1:] <= calls.start[:-1]).any():
        order = np.lexsort((-calls.end, calls.start))
        index, calls = index[order], calls.select(order)
    inside = _inside_another(calls)
    if inside.any():
        index, calls = index[~inside], calls.select(~inside)
    waiting = np.flatnonzero((calls.call == SYNCHRONIZE) | (calls.call == COPY))
    lasting = calls.end[waiting] - calls.start[waiting]
    waiting = waiting[(calls.call[waiting] == SYNCHRONIZE) | (lasting > _BLOCKS_NS)]
    # Where another thread goes on meanwhile, the program does not wait.
    following = taken(calls.start, np.where(waiting + 1 < len(calls), waiting + 1, NONE), np.iinfo(np.int64).max)
    waiting = waiting[following >= calls.end[waiting] - _SKEW_NS]
    slow = _lasting(calls, PAUSE_NS)
    slow = slow[~np.isin(calls.call[slow], (SYNCHRONIZE, COPY, ALLOCATE, FREE))]
    allocating = np.flatnonzero((calls.call == ALLOCATE) | (calls.call == FREE))
    pauses = _pauses(calls, bounds)
    ranges = trace.ranges
    # The main thread's ranges tell what the program does; autograd's are operators.
    listed = np.flatnonzero((process_of(ranges.thread) == process) & ~np.isin(ranges.thread, autograd_threads(trace)))
    lines = Timeline(process_of(ranges.thread[listed]), ranges.start[listed], ranges.end[listed], latest=True)
    allocations = Cover.of(calls.start[allocating], calls.end[allocating])
    middle = (pauses.start + pauses.end) // 2
    around = np.append(listed, NONE)[lines.at(np.full(len(middle), process), middle)]
    around[np.append(attributed.roles.mask(STEP, OTHER_STEP), False)[around]] = NONE
    loads = np.array([*(is_loading(name) for name in ranges.names), False])
    unnamed = (around == NONE) & _before_a_batch(attributed, process, calls, index, pauses)
    loading = loads[np.append(ranges.name, NONE)[around]] | unnamed
    return Host(
        calls, index, waiting, slow, allocating, allocations, pauses, around, loading, ranges, lines, listed, process
    )


def _before_a_batch(
    attributed: AttributedTrace, process: int, calls: Launches, index: SmallInts, pauses: Cover
) -> Bools:
    """True for the pauses behind which a batch is copied to the device, but for those at the end of a step's range."""
    operations = attributed.trace.operations
    to_device = (operations.kind == MEMCPY) & ~np.isin(operations.copy, (*INTO_HOST, ON_DEVICE))
    copies = attributed.attribution.launch[to_device]
    does = np.flatnonzero(calls.call != OTHER_CALL)  # others ask for something, such as whether a stream is captured
    following = np.append(does, NONE)[np.searchsorted(does, np.searchsorted(calls.start, pauses.end))]
    instances = attributed.instances
    steps = np.isin(instances.phase, [instances.phases.index(name) for name in (STEP, OTHER_STEP)])
    ends = np.sort(instances.end[steps & (instances.process == process)])
    starts = np.sort(instances.start[steps & (instances.process == process)])
    middle = (pauses.start + pauses.end) // 2
    in_step = np.searchsorted(starts, middle, side="right") > np.searchsorted(ends, middle, side="right")
    at_the_end = in_step & (np.searchsorted(ends, pauses.end, side="right") > np.searchsorted(ends, middle))
    is_copy = (following != NONE) & np.isin(np.append(index, NONE)[following], copies[copies != NONE])
    found: Bools = is_copy & ~at_the_end
    return found


def _lasting(calls: Launches, least: int) -> Ints:
    """The positions of the calls that take at least so many ns."""
    parts = (
        block.start + np.flatnonzero(calls.end[block] - calls.start[block] >= least) for block in blocks(len(calls))
    )
    return np.concatenate([np.empty(0, np.int64), *parts])


def _pauses(calls: Launches, bounds: tuple[int, int] | None) -> Cover:
    """The long stretches between calls; with bounds also before the first call and behind the last."""
    if not len(calls):
        return Cover.of(calls.start, calls.end)
    over = np.maximum.accumulate(calls.end)
    over += PAUSE_NS  # from here on a stretch is long
    long = np.flatnonzero(calls.start[1:] >= over[:-1])
    begin, end = over[long] - PAUSE_NS, calls.start[long + 1]
    if bounds:
        begin = np.concatenate([bounds[:1], begin, over[-1:] - PAUSE_NS])
        end = np.concatenate([calls.start[:1], end, bounds[1:]])
        begin, end = begin[end - begin >= PAUSE_NS], end[end - begin >= PAUSE_NS]
    return Cover.of(begin, end)


def _inside_another(calls: Launches) -> Bools:
    """True for the driver's calls inside a call of their thread; the calls are in order of start, the longer first."""
    inside = np.zeros(len(calls), np.bool_)
    if not len(calls) or (calls.start[1:] >= np.maximum.accumulate(calls.end)[:-1]).all():
        return inside
    for thread in distinct(calls.thread):
        mine = np.flatnonzero(calls.thread == thread)
        reached = np.maximum.accumulate(calls.end[mine])
        inside[mine[1:]] = calls.end[mine[1:]] <= reached[:-1]
        inside[mine[1:]] &= calls.start[mine[1:]] < reached[:-1]
    return inside


def is_loading(name: str) -> bool:
    """True for the name of a range around the input pipeline."""
    words = set(normalized_name(name).split())
    together = not words.isdisjoint(_VERBS) and not words.isdisjoint(_NOUNS)
    of_the_model = any(word.startswith(_OF_THE_MODEL) for word in words)
    return (together or not words.isdisjoint(_LOADING)) and not of_the_model
