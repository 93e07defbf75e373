"""Windows, which contain the start and end of each step, and the launched work from which windows are found."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

import numpy as np

from nsys_analyzer.analysis.intervals import NONE
from nsys_analyzer.analysis.ranges.instances import AttributedTrace
from nsys_analyzer.trace.arrays import Bools, Integers, Ints, mask_by_name
from nsys_analyzer.trace.columns import COPY_KINDS, Ranges, process_of
from nsys_analyzer.trace.phase_names import RECORDING_RANGE, WARMUP

#: What shows where steps begin and end: a range, the steps of PyTorch's profiler, phases, repetition, or a number of
#: steps that the user gives ("said"). If nothing shows steps, the whole capture counts as one step ("pass").
StepSource = Literal["range", "profiler_step", "phases", "repetition", "said", "pass"]

#: A step is near the median if its length differs from the median length by at most this share of the median.
_NEAR_MEDIAN_SHARE = 0.01


@dataclass(frozen=True)
class Windows:
    """The start and end of each of several steps. The steps are in order and do not overlap.

    Every array has the shape (steps,) and contains times on the capture's clock, ns.

    Attributes:
        source: what shows where the steps begin and end.
        unit: a clause that says what counts as a step.
        start, end: the start and end of each step. A step ends when the next step starts. These are times of the
            program, or of the GPU's work if ``on_gpu`` is True. The last step ends with its own range or work.
        cpu_start: the time at which the program begins each step.
        cpu_end: the time at which the program begins what follows each step.
        body_end: the end of the step's own code. The time from ``body_end`` to ``cpu_end`` lies between two steps.
        on_gpu: whether steps begin and end with the GPU's work, because the GPU works far behind the program.
    """

    source: StepSource
    unit: str
    start: Ints
    end: Ints
    cpu_start: Ints
    cpu_end: Ints
    body_end: Ints
    on_gpu: bool = False

    @staticmethod
    def of_program(source: StepSource, unit: str, start: Ints, end: Ints, body_end: Ints | None = None) -> Windows:
        """Makes the windows of steps that begin and end with the program's own work.

        If ``body_end`` is None, there is no time between steps.
        """
        return Windows(source, unit, start, end, start, end, end if body_end is None else body_end)

    def __len__(self) -> int:
        return len(self.start)

    @property
    def length(self) -> Ints:
        """Returns the length of each step, ns."""
        return self.end - self.start

    @property
    def median_position(self) -> int:
        """Returns the index of a step of median length."""
        return int(np.argsort(self.length, kind="stable")[(len(self) - 1) // 2])

    def step_at(self, time: Ints) -> Ints:
        """Returns the index of the step that the program executed at each time, ``NONE`` outside of all steps."""
        step = np.searchsorted(self.cpu_start, time, side="right") - 1
        return np.where((step >= 0) & (time < self.cpu_end[step]), step, NONE)

    def select(self, steps: Ints | Bools) -> Windows:
        """Returns the windows of the given steps, which are indices or a mask."""
        names = ("start", "end", "cpu_start", "cpu_end", "body_end")
        return replace(self, **{name: getattr(self, name)[steps] for name in names})


def find_bounds_near_median(length: Ints) -> tuple[float, float]:
    """Returns the bounds of the lengths that count as near the median, ns.

    If the number of steps is even, the bounds include the lengths of both middle steps.
    """
    median = float(np.median(length))
    max_deviation = max(_NEAR_MEDIAN_SHARE * median, float(np.abs(length - median).min()))
    return median - max_deviation, median + max_deviation


class LaunchedWork:
    """The operations of a process outside warm-up.

    Each array has the shape (operations,).

    Attributes:
        index: the index of each operation in the operations of the trace.
        start, end, duration_ns: the start, end and duration of each operation, ns.
        launched_at: the time at which each operation was launched, ns; its start if the launch is unknown.
    """

    def __init__(self, attributed: AttributedTrace, process: int) -> None:
        self.attributed, self.process = attributed, process
        operations, attribution = attributed.trace.operations, attributed.attribution
        self.index = np.flatnonzero((operations.process == process) & ~attributed.is_warmup)
        self.start, self.end = operations.start[self.index], operations.end[self.index]
        self.duration_ns = self.end - self.start
        has_launch = attribution.thread[self.index] != NONE
        self.launched_at = np.where(has_launch, attribution.time[self.index], self.start)

    def is_instance_of(self, *phases: str) -> Bools:
        """Returns True for each instance of the given phases in this process; shape (instances,)."""
        return mask_instances(self.attributed, self.process, *phases)

    @property
    def warmups(self) -> Ranges:
        """Returns the warm-up ranges of the process."""
        warmups = self.attributed.trace.ranges.select(self.attributed.roles.has_role(WARMUP))
        return warmups.select(process_of(warmups.thread) == self.process)

    @property
    def bounds(self) -> tuple[int, int]:
        """Returns the time of the first launch and the end of the last operation, ns."""
        return int(min(self.launched_at.min(), self.start.min())), int(self.end.max())

    @property
    def as_one_pass(self) -> Windows:
        """Returns windows with a single step: the whole recording of the process, without warm-up before its work."""
        trace = self.attributed.trace
        is_recording = mask_by_name(trace.profiler_events, lambda name: name.startswith(RECORDING_RANGE))
        recording = trace.profiler_events.select(is_recording)
        tables = (trace.ranges, trace.launches, trace.operators, recording)
        recorded_tables = [table.select(process_of(table.thread) == self.process) for table in tables]
        first_launch, last_end = self.bounds
        warmup_ends = self.warmups.end[self.warmups.end <= first_launch]
        first_record = min(int(table.start.min(initial=first_launch)) for table in recorded_tables)
        # Ranges may have been opened before the profiler's session began.
        start = min(max(int(warmup_ends.max(initial=first_record)), trace.metadata.time_shift_ns), first_launch)
        end = max(int(self.launched_at.max()) + 1, *(int(table.end.max(initial=last_end)) for table in recorded_tables))
        return Windows.of_program("pass", "the whole capture", np.array([start]), np.array([end]))

    def end_with_work(self, windows: Windows) -> Windows:
        """Returns windows in which the body of each step ends no earlier than the work that the step launched."""
        body_end = np.maximum(windows.body_end, find_work_ends(windows, self.launched_at, self.end))
        return replace(windows, body_end=np.minimum(body_end, windows.cpu_end))

    def symbols(self, index: Integers) -> Ints:
        """Returns a code for each operation. Equal codes stand for the same kernel, or the same kind of copy."""
        operations = self.attributed.trace.operations
        not_kernels = len(operations.names) + len(COPY_KINDS) * operations.kind[index].astype(np.int64)
        return np.where(operations.name[index] >= 0, operations.name[index], not_kernels + operations.copy[index])


def find_work_ends(windows: Windows, time: Ints, end: Ints) -> Ints:
    """Returns the latest end of the work that each step launched, ns; shape (steps,).

    A step that launched nothing has the start of the first step instead.

    Args:
        windows: the steps.
        time: shape (operations,), the time at which each operation was launched, ns.
        end: shape (operations,), the end of each operation, ns.
    """
    step = windows.step_at(time)
    latest_end = np.full(len(windows), windows.start[0])
    np.maximum.at(latest_end, step[step != NONE], end[step != NONE])
    return latest_end


def mask_instances(attributed: AttributedTrace, process: int, *phases: str) -> Bools:
    """Returns True for each instance of the given phases in a process; shape (instances,)."""
    instances = attributed.instances
    is_phase = np.isin(instances.phase, [instances.phases.index(name) for name in phases])
    mask: Bools = is_phase & (instances.process == process)
    return mask


def runs_training(attributed: AttributedTrace, process: int) -> bool:
    """Checks whether a process runs backward passes or an optimizer."""
    return bool(mask_instances(attributed, process, "backward", "optimizer").any())
