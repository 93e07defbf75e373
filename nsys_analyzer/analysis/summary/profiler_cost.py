"""The time that a profiler itself adds to a phase, estimated from the events that it recorded there.

A trace holds no unprofiled time. It holds the events whose recording costs time on the CPU: API calls, NVTX ranges and
PyTorch's operators. Their number times the cost of one is what the profiler can have added where nothing hides it; a
GPU that has work left hides it. (nsys's ``PROFILER_OVERHEAD`` is no such figure: it holds the allocation and flushing
of CUPTI's buffers, 0.2 ms each, and none of what a call costs.)
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from nsys_analyzer.trace.arrays import Ints
from nsys_analyzer.trace.columns import process_of
from nsys_analyzer.trace.trace import Trace


@dataclass(frozen=True)
class EventCost:
    """The cost of recording one event.

    Attributes:
        event: what is recorded.
        options: the options that record it.
        low_us, high_us: the lowest and the highest cost seen, per event, in µs.
        source: where they were seen.
    """

    event: str
    options: str
    low_us: float
    high_us: float
    source: str


API_CALL = EventCost(
    "API call", "nsys --trace=cuda, or torch.profiler's CUDA activities", 4.0, 5.2,
    "examples/sweep (nsys 2025.3, H200), (wall - unprofiled time) / API calls of the forward and backward passes whose "
    "GPU is busy for less than 70 % of the unprofiled time, or nearly: small at context 128 in fp32 4.9 and 4.0, small "
    "at 512 in bf16 5.2 and 4.5. A GPU that is busier hides it: small at 256 3.6 and 0.6. One run is an outlier: "
    "medium at 512 in bf16, forward, 8.1",
)  # fmt: skip
NVTX_RANGE = EventCost(
    "NVTX range", "nsys --trace=nvtx, most of them of --pytorch=autograd-nvtx", 2.0, 5.2,
    "mem_small256 (--pytorch=autograd-nvtx, H200) against train_small256 (without), (difference of walls) / "
    "(difference of ranges): optimizer 2.0, forward 2.4, backward 5.2; a Hugging Face GPT-2 "
    "with autograd-shapes-nvtx against functions-trace: 2.8 over the step",
)  # fmt: skip
OPERATOR = EventCost(
    "operator", "torch.profiler's CPU activities", 0.8, 3.6,
    "PyTorch 2.11's profiler around a step of a 12-layer encoder on an H200, with and without it, API calls taken off: "
    "0.8 to 2.7 in fp32 and bf16, 3.6 with stacks; the machine's own times spread by half",
)  # fmt: skip

#: The median duration of a kernel launch, µs, where ``API_CALL`` was measured. A slower CPU takes longer for a launch
#: and, so it is assumed, as much longer for recording it. The limit is for launches that wait for room in their queue.
_LAUNCH_US, _SLOWEST = 3.9, 3.0


@dataclass(frozen=True)
class ProfilerCost:
    """The time that the profiler can have added to one instance of a phase.

    Attributes:
        api_calls, nvtx_ranges, operators: events recorded in one instance, mean.
        low_ms, high_ms: what recording them costs where the GPU hides none of it; None where more was traced than
            has a known cost, or where nothing says what was.
    """

    api_calls: float
    nvtx_ranges: float
    operators: float
    low_ms: float | None
    high_ms: float | None


class RecordedEvents:
    """The events of one process whose recording costs time, by their start."""

    def __init__(self, trace: Trace, process: int) -> None:
        launches, ranges = trace.launches, trace.ranges
        # nsys writes operators among its ranges.
        operators = trace.operators if trace.metadata.profiler == "torch" else None
        self._starts = tuple(
            _starts(events.start, events.thread, process) if events is not None else np.empty(0, np.int64)
            for events in (launches, ranges, operators)
        )
        slower = trace.launch_ns / 1e3 / _LAUNCH_US if trace.launch_ns else 1.0
        self._slower = min(max(slower, 1.0), _SLOWEST)
        self._known = bool(len(launches.start)) and not trace.costly_tables

    def cost(self, start: Ints, end: Ints) -> ProfilerCost | None:
        """Returns the time that the profiler can have added to each of some instances, on average.

        Args:
            start, end: shape (instances,), ns.
        """
        if not len(start):
            return None
        calls, ranges, operators = (_count(events, start, end) for events in self._starts)
        low, high = (
            (calls * call * self._slower + ranges * pushed + operators * run) / 1e3
            for call, pushed, run in (
                (API_CALL.low_us, NVTX_RANGE.low_us, OPERATOR.low_us),
                (API_CALL.high_us, NVTX_RANGE.high_us, OPERATOR.high_us),
            )
        )
        return ProfilerCost(calls, ranges, operators, low if self._known else None, high if self._known else None)


def _starts(start: Ints, thread: Ints, process: int) -> Ints:
    mine = process_of(thread) == process
    own = start if mine.all() else start[mine]
    return own if (own[1:] >= own[:-1]).all() else np.sort(own)


def _count(events: Ints, start: Ints, end: Ints) -> float:
    """How many of the events start inside an instance, its own range not counted, on average."""
    return float((np.searchsorted(events, end) - np.searchsorted(events, start, side="right")).mean())
