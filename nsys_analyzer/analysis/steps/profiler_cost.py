"""Estimates the time that a profiler adds to a phase, from the events that it recorded in the phase.

Recording API calls, NVTX ranges and PyTorch's operators takes time on the CPU. The number of events times the cost of
one event is an upper bound of the added time, because this cost is hidden while the GPU still has work. A profiler also
records some of its own work, such as the allocation of CUPTI's buffers, which takes 0.2 to 3 ms per buffer. The time of
this work is added to the cost of the events.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

import numpy as np

from nsys_analyzer.analysis.intervals import Cover
from nsys_analyzer.trace.arrays import Floats, Ints, mask_by_name
from nsys_analyzer.trace.columns import Launches, Ranges, process_of
from nsys_analyzer.trace.phase_names import MODULE_RANGE_PREFIX, MODULE_RANGE_WITH_PATH, RECORDING_RANGE
from nsys_analyzer.trace.schema import NS_PER_MS, NS_PER_US
from nsys_analyzer.trace.trace import Trace


@dataclass(frozen=True)
class EventCost:
    """The lowest and the highest measured cost of recording one event, µs, on a machine with an H200."""

    event: str
    low_us: float
    high_us: float


#: Measured with nsys 2025.3 as (wall time - unprofiled time) ÷ API calls, on the passes of examples/sweep whose GPU is
#: busy for less than 70 % of the unprofiled time: 4.9 and 4.0 (small, context 128, fp32), 5.2 and 4.5 (512, bf16).
API_CALL = EventCost("API call", 4.0, 5.2)
#: Measured on mem_small256 (--pytorch=autograd-nvtx) and train_small256 (without it) as the difference of wall times ÷
#: the difference of ranges: optimizer 2.0, forward 2.4, backward 5.2.
NVTX_RANGE = EventCost("NVTX range", 2.0, 5.2)
#: Measured on a step of a 12-layer encoder with and without PyTorch 2.11's profiler, minus the cost of API calls: 0.8
#: to 2.7 in fp32 and bf16, and 3.6 with stacks.
OPERATOR = EventCost("operator", 0.8, 3.6)
#: The median duration of a kernel launch on the machine on which ``API_CALL`` was measured, µs.
_REFERENCE_LAUNCH_US = 3.9
#: The largest factor by which recording is assumed to be slower than on the reference machine. Launches that are longer
#: by a larger factor wait until their queue has room.
_MAX_SLOWDOWN_FACTOR = 3.0
#: Matches records of the profiler that are not a cost of profiling: work of the driver, a full queue of launches, the
#: span of the recording, and the flushing of buffers, which runs on a thread of the profiler.
_RECORDS_WITHOUT_COST = re.compile(f"(?i)command buffer full|compil|loading|buffer flush|{RECORDING_RANGE}")


@dataclass(frozen=True)
class ProfilerCost:
    """The bounds of the mean time that the recording of events added to one instance of a phase, ms."""

    low_ms: float
    high_ms: float


class RecordedEvents:
    """The starts of the events of one process whose recording takes time."""

    def __init__(self, trace: Trace, process: int) -> None:
        self._events: list[tuple[Ints, EventCost, float]] = []
        for table, cost, factor in _find_recorded_tables(trace):
            event_starts = table.start[process_of(table.thread) == process]
            self._events.append((np.sort(event_starts, kind="stable"), cost, factor))  # fast if the table is sorted
        self._is_known = bool(len(trace.launches)) and not trace.costly_tables

    def cost(self, start: Ints, end: Ints) -> ProfilerCost | None:
        """Returns the mean cost of recording events in the given instances of a phase.

        Returns None if it is unknown which events were recorded, or what their recording costs.

        Args:
            start, end: shape (instances,), the start and end of each instance, ns.
        """
        if not len(start) or not self._is_known:
            return None
        # The range of the instance itself starts at `start`, and is not counted.
        low_ns, high_ns = self.bound_costs(start + 1, end)
        return ProfilerCost(float(low_ns.mean()) / NS_PER_MS, float(high_ns.mean()) / NS_PER_MS)

    def bound_costs(self, start: Ints, end: Ints) -> tuple[Floats, Floats]:
        """Returns the lower and the upper bound of the cost of recording in each interval, ns, shape (intervals,)."""
        low_ns, high_ns = np.zeros((2, len(start)))
        for starts, cost, factor in self._events:
            count = np.searchsorted(starts, end) - np.searchsorted(starts, start)
            low_ns += count * cost.low_us * factor * NS_PER_US
            high_ns += count * cost.high_us * factor * NS_PER_US
        return low_ns, high_ns


def find_profiler_busy_times(trace: Trace, process: int, threads: Ints) -> Cover:
    """Returns the times in which the profiler delayed the given threads, as the profiler itself recorded them."""
    records = trace.profiler_events
    records = records.select(
        ~mask_by_name(records, _RECORDS_WITHOUT_COST.search) & np.isin(records.thread, [process, *threads])
    )
    records = records.select(np.argsort(records.start, kind="stable"))
    return Cover.from_intervals(records.start, records.end)


def _find_recorded_tables(trace: Trace) -> list[tuple[Launches | Ranges, EventCost, float]]:
    """Returns each table of events whose recording takes time, the cost of one event, and a factor for this machine."""
    # Recording an API call is assumed to be slower than on the reference machine by the same factor as a launch.
    slowness = trace.median_launch_ns / NS_PER_US / _REFERENCE_LAUNCH_US if trace.median_launch_ns else 1.0
    launches = (trace.launches, API_CALL, min(max(slowness, 1.0), _MAX_SLOWDOWN_FACTOR))
    if trace.metadata.profiler != "torch":  # nsys records operators as ranges, so they are counted as ranges
        return [launches, (trace.ranges, NVTX_RANGE, 1.0)]
    # PyTorch's profiler records calls of modules together with all calls of Python functions, so they are not counted.
    is_call = mask_by_name(
        trace.ranges, lambda name: name.startswith(MODULE_RANGE_PREFIX) and not MODULE_RANGE_WITH_PATH.match(name)
    )
    return [launches, (trace.ranges.select(~is_call), NVTX_RANGE, 1.0), (trace.operators, OPERATOR, 1.0)]
