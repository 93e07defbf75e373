"""The time that a profiler itself adds to a phase, estimated from the events that it recorded there.

Recording API calls, NVTX ranges and PyTorch's operators costs time on the CPU. Their number times the cost of one is
the most that the profiler can have added; a GPU that has work left hides it. What a profiler notes of its own work, the
allocation of CUPTI's buffers above all, 0.2 to 3 ms each, comes on top of the cost of each call.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

import numpy as np

from nsys_analyzer.analysis.intervals import Cover
from nsys_analyzer.trace.arrays import Ints, mask_by_name
from nsys_analyzer.trace.columns import Ranges, process_of
from nsys_analyzer.trace.phase_names import MODULE_RANGE_PREFIX, MODULE_RANGE_WITH_PATH, RECORDING_RANGE
from nsys_analyzer.trace.schema import NS_PER_US, US_PER_MS
from nsys_analyzer.trace.trace import Trace


@dataclass(frozen=True)
class EventCost:
    """The lowest and the highest cost of recording one event, µs, that were seen on an H200."""

    event: str
    low_us: float
    high_us: float


#: With nsys 2025.3, (wall - unprofiled time) ÷ API calls of those passes of examples/sweep whose GPU is busy for less
#: than 70 % of the unprofiled time: small at context 128 in fp32 4.9 and 4.0, at 512 in bf16 5.2 and 4.5.
API_CALL = EventCost("API call", 4.0, 5.2)
#: mem_small256 (--pytorch=autograd-nvtx) against train_small256 (without), (difference of walls) ÷ (difference of
#: ranges): optimizer 2.0, forward 2.4, backward 5.2.
NVTX_RANGE = EventCost("NVTX range", 2.0, 5.2)
#: A step of a 12-layer encoder with and without PyTorch 2.11's profiler, API calls taken off: 0.8 to 2.7 in fp32 and
#: bf16, 3.6 with stacks.
OPERATOR = EventCost("operator", 0.8, 3.6)
#: The median duration of a kernel launch, µs, where ``API_CALL`` was measured. A slower CPU takes longer for a launch
#: and, so it is assumed, as much longer for recording it. The limit is for launches that wait for room in their queue.
_LAUNCH_US, _SLOWEST = 3.9, 3.0


@dataclass(frozen=True)
class ProfilerCost:
    """The least and the most time that recording its events can have added to one instance of a phase, mean."""

    low_ms: float
    high_ms: float


class RecordedEvents:
    """The events of one process whose recording costs time, by their start."""

    def __init__(self, trace: Trace, process: int) -> None:
        ranges, slower = recorded_ranges(trace), slowness(trace)
        recorded = [(trace.launches.start, trace.launches.thread, API_CALL, slower)]
        recorded += [(ranges.start, ranges.thread, NVTX_RANGE, 1.0)]
        if trace.metadata.profiler == "torch":  # nsys writes operators among its ranges
            recorded += [(trace.operators.start, trace.operators.thread, OPERATOR, 1.0)]
        self._recorded = [(_starts(start, thread, process), each, by) for start, thread, each, by in recorded]
        self._known = bool(len(trace.launches)) and not trace.costly_tables

    def cost(self, start: Ints, end: Ints) -> ProfilerCost | None:
        """The cost in each of some instances, on average; ``start`` and ``end`` have shape (instances,), ns.

        None where it is not known what was traced, or not what recording it costs.
        """
        if not len(start) or not self._known:
            return None
        low = high = 0.0
        for events, each, slower in self._recorded:
            # The instance's own range starts with it and is not counted.
            count = (np.searchsorted(events, end) - np.searchsorted(events, start, side="right")).mean()
            low, high = low + count * each.low_us * slower / US_PER_MS, high + count * each.high_us * slower / US_PER_MS
        return ProfilerCost(float(low), float(high))


#: Notes that are no cost of profiling: the driver's own work, a full queue of launches, the span of the recording, and
#: flushed buffers, because a thread of the profiler's flushes them.
_NO_COST = re.compile(f"(?i)command buffer full|compil|loading|buffer flush|{RECORDING_RANGE}")


def noted_costs(trace: Trace, process: int, threads: Ints) -> Cover:
    """Returns when the profiler held some threads of a process up, by its own account."""
    noted = trace.profiler_events.select(~mask_by_name(trace.profiler_events, lambda name: bool(_NO_COST.search(name))))
    noted = noted.select(np.isin(noted.thread, [process, *threads]))
    noted = noted.select(np.argsort(noted.start, kind="stable"))
    return Cover.from_intervals(noted.start, noted.end)


def recorded_ranges(trace: Trace) -> Ranges:
    """The ranges of the program; PyTorch's profiler records a call of a module as one of all Python calls."""
    ranges = trace.ranges
    if trace.metadata.profiler != "torch":
        return ranges
    is_call = mask_by_name(
        ranges, lambda name: name.startswith(MODULE_RANGE_PREFIX) and not MODULE_RANGE_WITH_PATH.match(name)
    )
    return ranges.select(~is_call) if is_call.any() else ranges


def slowness(trace: Trace) -> float:
    """How much longer than where the costs were measured the recording of an API call takes, by that of a launch."""
    slower = trace.median_launch_ns / NS_PER_US / _LAUNCH_US if trace.median_launch_ns else 1.0
    return min(max(slower, 1.0), _SLOWEST)


def _starts(start: Ints, thread: Ints, process: int) -> Ints:
    mine = process_of(thread) == process
    found = start if mine.all() else start[mine]
    return found if (found[1:] >= found[:-1]).all() else np.sort(found)
