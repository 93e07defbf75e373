"""Windows: when each step begins and ends, and the operations of a process that tell it."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

import numpy as np

from nsys_analyzer.analysis.intervals import NONE
from nsys_analyzer.analysis.ranges.instances import AttributedTrace
from nsys_analyzer.trace.arrays import Bools, Integers, Ints, mask_by_name
from nsys_analyzer.trace.columns import COPY_KINDS, Ranges, process_of
from nsys_analyzer.trace.phase_names import RECORDING_RANGE, WARMUP

#: What shows the steps: a range, the profiler of PyTorch, phases, repetition, a number given by the user ("said"), or
#: nothing, so that the capture is one pass.
Source = Literal["range", "profiler_step", "phases", "repetition", "said", "pass"]

#: Steps are near the median if their lengths differ from it by at most this share.
_NEAR_MEDIAN = 0.01


@dataclass(frozen=True)
class Windows:
    """Steps in order, without overlap. Every array has the shape (steps,), in ns on the capture's clock.

    Attributes:
        source: what shows the steps.
        unit: what a step is, in a clause.
        start, end: from the start of a step to the start of the next one, by the clock of the CPU or of the device,
            whichever is later. The last step ends by itself.
        cpu_start: when the program begins each step.
        cpu_end: when the program begins what follows each step.
        body_end: when the program ends the step itself. The time until ``cpu_end`` lies between two steps.
        on_gpu: whether the windows bound the GPU's work, because it ends long after the program has gone on.
    """

    source: Source
    unit: str
    start: Ints
    end: Ints
    cpu_start: Ints
    cpu_end: Ints
    body_end: Ints
    on_gpu: bool = False

    @staticmethod
    def of_program(source: Source, unit: str, start: Ints, end: Ints, body_end: Ints | None = None) -> Windows:
        """Returns steps that are bounded by the program. Without ``body_end``, no time lies between them."""
        return Windows(source, unit, start, end, start, end, end if body_end is None else body_end)

    def __len__(self) -> int:
        return len(self.start)

    @property
    def length(self) -> Ints:
        """Returns the length of each step, ns."""
        return self.end - self.start

    @property
    def median_position(self) -> int:
        """Returns the position of a step of median length."""
        return int(np.argsort(self.length, kind="stable")[(len(self) - 1) // 2])

    def step_at(self, time: Ints) -> Ints:
        """Returns the step that the program was in at some times, ``NONE`` outside of all steps."""
        step = np.searchsorted(self.cpu_start, time, side="right") - 1
        return np.where((step >= 0) & (time < self.cpu_end[step]), step, NONE)

    def select(self, steps: Ints | Bools) -> Windows:
        """Returns some of the windows, by their positions or a mask."""
        names = ("start", "end", "cpu_start", "cpu_end", "body_end")
        return replace(self, **{name: getattr(self, name)[steps] for name in names})


def bounds_near_median(length: Ints) -> tuple[float, float]:
    """Returns the least and the greatest length of the steps near the median, ns.

    Both middle steps of an even number of steps are near the median.
    """
    median = float(np.median(length))
    reach = max(_NEAR_MEDIAN * median, float(np.abs(length - median).min()))
    return median - reach, median + reach


class LaunchedWork:
    """The operations of a process outside warm-up.

    Attributes:
        index: indices into the operations of the trace.
        start, end, duration_ns: of each operation, ns.
        time: when each operation was launched; its start if the launch is unknown.
    """

    def __init__(self, attributed: AttributedTrace, process: int) -> None:
        self.attributed, self.process = attributed, process
        operations, attribution = attributed.trace.operations, attributed.attribution
        self.index = np.flatnonzero((operations.process == process) & ~attributed.is_warmup)
        self.start, self.end = operations.start[self.index], operations.end[self.index]
        self.duration_ns = self.end - self.start
        has_launch = attribution.thread[self.index] != NONE
        self.time = np.where(has_launch, attribution.time[self.index], self.start)

    def is_instance_of(self, *phases: str) -> Bools:
        """Returns a mask of the instances of some phases in this process."""
        instances = self.attributed.instances
        is_phase = np.isin(instances.phase, [instances.phases.index(name) for name in phases])
        mask: Bools = is_phase & (instances.process == self.process)
        return mask

    @property
    def warmups(self) -> Ranges:
        """Returns the warm-up ranges of the process."""
        warmups = self.attributed.trace.ranges.select(self.attributed.roles.mask(WARMUP))
        return warmups.select(process_of(warmups.thread) == self.process)

    @property
    def bounds(self) -> tuple[int, int]:
        """Returns the first launch and the last end of all work."""
        return int(min(self.time.min(), self.start.min())), int(self.end.max())

    @property
    def as_one_pass(self) -> Windows:
        """Returns all work as one pass.

        It is as long as the process was recorded, without the warm-up ranges before its work.
        """
        trace = self.attributed.trace
        recording = trace.profiler_events.select(
            mask_by_name(trace.profiler_events, lambda name: name.startswith(RECORDING_RANGE))
        )
        tables = (trace.ranges, trace.launches, trace.operators, recording)
        recorded = [table.select(process_of(table.thread) == self.process) for table in tables]
        first, last = self.bounds
        warmup_ends = self.warmups.end[self.warmups.end <= first]
        first_record = min(int(table.start.min(initial=first)) for table in recorded)
        # Ranges may have been opened before the session.
        start = min(max(first_record, int(warmup_ends.max(initial=first_record)), trace.metadata.time_shift_ns), first)
        end = max(int(self.time.max()) + 1, *(int(table.end.max(initial=last)) for table in recorded))
        return Windows.of_program("pass", "the whole capture", np.array([start]), np.array([end]))

    def end_with_work(self, windows: Windows) -> Windows:
        """Returns the windows with steps whose bodies end no earlier than the work that they launch."""
        body_end = np.maximum(windows.body_end, last_ends(windows, self.time, self.end))
        return replace(windows, body_end=np.minimum(body_end, windows.cpu_end))

    def symbols(self, index: Integers) -> Ints:
        """Returns a code for what each operation is: its kernel, or its kind and the direction of a copy."""
        operations = self.attributed.trace.operations
        not_kernels = len(operations.names) + len(COPY_KINDS) * operations.kind[index].astype(np.int64)
        return np.where(operations.name[index] >= 0, operations.name[index], not_kernels + operations.copy[index])


def last_ends(windows: Windows, time: Ints, end: Ints) -> Ints:
    """Returns the latest end of the work that each step launched, or the start of the first step if it launched none.

    Args:
        windows: the steps.
        time: shape (operations,), when each operation was launched.
        end: shape (operations,), when each operation ended.
    """
    step = windows.step_at(time)
    latest = np.full(len(windows), windows.start[0])
    np.maximum.at(latest, step[step != NONE], end[step != NONE])
    return latest


def trains(attributed: AttributedTrace, process: int) -> bool:
    """Checks whether a process runs backward passes or an optimizer."""
    instances = attributed.instances
    phases = [instances.phases.index(name) for name in ("backward", "optimizer")]
    return bool(np.isin(instances.phase[instances.process == process], phases).any())
