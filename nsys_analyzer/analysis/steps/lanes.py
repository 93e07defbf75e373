"""One step as it passed: the program's ranges, the calls that block, each stream's work, and why the device idles."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np

from nsys_analyzer.analysis.attribution.attribution import autograd_threads
from nsys_analyzer.analysis.intervals.timeline import contained
from nsys_analyzer.analysis.ranges.instances import AttributedTrace
from nsys_analyzer.analysis.steps.anatomy import Gaps
from nsys_analyzer.analysis.steps.host import Host
from nsys_analyzer.analysis.steps.idle import CAUSES
from nsys_analyzer.trace.arrays import Bools, Integers, Ints, SmallInts
from nsys_analyzer.trace.columns import PROCESS_MASK, Ranges, pid_of, process_of

#: Lanes of ranges inside each other, and lanes of streams.
_DEEPEST, _MOST_STREAMS = 3, 4
#: Of the CPU's, what is shorter than this share of the step is left out (ranges by the mean of their name), and over
#: such a gap neighbours are joined.
#: Nothing of the GPU's is joined: thousands of gaps of microseconds are a good part of a step.
_FINE = 1 / 1600

#: Ranges that cover less of the step have no lane: one short range of a library says nothing of its thread.
_FEW = 1 / 200

Kind = Literal["ranges", "calls", "stream", "idle"]


@dataclass(frozen=True)
class Block:
    """A block of a lane: its name, start and end in ms since the step began."""

    name: str
    start_ms: float
    end_ms: float


@dataclass(frozen=True)
class Lane:
    """A lane of the step: ranges of a thread at one depth, calls that block, a stream by class, idle by cause."""

    title: str
    kind: Kind
    blocks: tuple[Block, ...]


def draw_lanes(
    attributed: AttributedTrace, host: Host, bounds: tuple[int, int], chosen: Integers, labels: SmallInts,
    classes: tuple[str, ...], gaps: Gaps, causes: Ints,
) -> tuple[Lane, ...]:  # fmt: skip
    """The lanes of one step.

    Args:
        bounds: start and end of the step, ns.
        chosen: the indices of the device's operations.
        labels: shape (operations,), the code of the class of each into ``classes``.
        gaps: the device's gaps, and ``causes`` the code of the largest part of each.
    """
    start, end = bounds
    operations = attributed.trace.operations
    mine = chosen[(operations.end[chosen] > start) & (operations.start[chosen] < end)]
    streams, counts = np.unique(operations.stream[mine], return_counts=True)
    busiest = streams[np.argsort(-counts, kind="stable")][:_MOST_STREAMS]
    lanes = [*_range_lanes(attributed, host, bounds), _call_lane(host, bounds)]
    for stream in busiest.tolist():
        of_stream = mine[operations.stream[mine] == stream]
        of_stream = of_stream[np.argsort(operations.start[of_stream], kind="stable")]
        spans = operations.start[of_stream], operations.end[of_stream]
        lanes.append(Lane(f"GPU stream {stream}", "stream", _blocks(*spans, labels[of_stream], classes, bounds, 0)))
    inside = (gaps.end > start) & (gaps.start < end)
    idle = _blocks(gaps.start[inside], gaps.end[inside], causes[inside], CAUSES, bounds, 0)
    return tuple(lane for lane in (*lanes, Lane("GPU idle", "idle", idle)) if lane.blocks)


def _range_lanes(attributed: AttributedTrace, host: Host, bounds: tuple[int, int]) -> list[Lane]:
    """The ranges of the program's thread with most of them, in up to three depths, and those of autograd's."""
    ranges = attributed.trace.ranges
    start, end = bounds
    open_here = (ranges.end > start) & (ranges.start < end) & (process_of(ranges.thread) == host.process)
    open_here &= ~attributed.roles.mask("step")
    # A name is shown with all of its ranges or not at all, so that a layer's twelve ranges do not look like three.
    code = ranges.name[open_here]
    length = np.bincount(code, (ranges.end - ranges.start)[open_here], len(ranges.names))
    seen = length >= np.bincount(code, minlength=len(ranges.names)) * ((end - start) * _FINE)
    open_here &= seen[ranges.name]
    engine = np.isin(ranges.thread, autograd_threads(attributed.trace))
    lanes = []
    for chosen, depths in ((open_here & ~engine, _DEEPEST), (open_here & engine, 1)):
        threads, counts = np.unique(ranges.thread[chosen], return_counts=True)
        if len(threads):
            thread = int(threads[np.argmax(counts)])
            title = "autograd's thread" if depths == 1 else thread_title(attributed, thread)
            lanes += _nested(f"CPU: {title}", ranges.select(chosen & (ranges.thread == thread)), bounds, depths)
    return lanes


def thread_title(attributed: AttributedTrace, thread: int) -> str:
    """What a thread is called: the main one has the ID of its process."""
    own = thread & ~PROCESS_MASK
    if own == pid_of(thread):
        return "main thread"
    return f"thread {attributed.trace.metadata.thread_names.get(thread) or own}"


def _nested(title: str, ranges: Ranges, bounds: tuple[int, int], depths: int) -> list[Lane]:
    lanes = []
    for depth in range(depths):
        if not len(ranges):
            break
        inside: Bools = contained(ranges.thread, ranges.start, ranges.end)
        outer = ranges.select(~inside)
        outer = outer.select(np.argsort(outer.start, kind="stable"))
        blocks = _blocks(outer.start, outer.end, outer.name, outer.names, bounds)
        lane = Lane(title if not depth else "", "ranges", blocks)
        if sum(block.end_ms - block.start_ms for block in blocks) >= _FEW * (bounds[1] - bounds[0]) / 1e6:
            lanes.append(lane)
        ranges = ranges.select(inside)
    return lanes


def _call_lane(host: Host, bounds: tuple[int, int]) -> Lane:
    """The calls that wait or allocate, as far as they can be seen."""
    start, end = bounds
    calls = host.calls.select(np.union1d(host.waiting, host.allocating))
    calls = calls.select((calls.end > start) & (calls.start < end))
    calls = calls.select(calls.end - calls.start >= (end - start) * _FINE)
    names = tuple(name.partition("_v")[0] for name in calls.names)
    return Lane(
        "CPU: blocking calls", "calls", _blocks(calls.start, calls.end, calls.name.astype(np.int64), names, bounds)
    )


def _blocks(
    start: Ints, end: Ints, code: Ints, names: tuple[str, ...], bounds: tuple[int, int], apart: float = _FINE
) -> tuple[Block, ...]:
    """The blocks of a lane, clipped to the step.

    Neighbours of one name are joined, unless the gap between them is longer than ``apart``, a share of the step.
    """
    low, high = bounds
    start, end = np.maximum(start, low), np.minimum(end, high)
    if not len(start):
        return ()
    new = (code[1:] != code[:-1]) | (start[1:] - end[:-1] > (high - low) * apart)
    first = np.flatnonzero(np.append(True, new))
    begun, ended = (start[first] - low) / 1e6, (np.maximum.reduceat(end, first) - low) / 1e6
    return tuple(map(Block, (names[one] for one in code[first].tolist()), begun.tolist(), ended.tolist()))
