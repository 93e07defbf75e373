"""Contains studies: a few consecutive steps in full detail, with a replay. Findings are computed from a study."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from nsys_analyzer.analysis.steps.lines import Line, StackSamples
from nsys_analyzer.analysis.steps.replay import MIN_STEPS, Replay
from nsys_analyzer.analysis.steps.windows import Windows
from nsys_analyzer.trace.arrays import Bools, Codes, Floats, Integers, Ints, SmallInts
from nsys_analyzer.trace.columns import SYNCHRONIZE, BlockResources, Columns
from nsys_analyzer.trace.metadata import Gpu
from nsys_analyzer.trace.phase_names import ATTENTION_PARTS
from nsys_analyzer.trace.schema import NS_PER_MS

#: From this bit on, the code of a stream contains the number of the stream's device minus that of the studied device.
DEVICE_SHIFT = 32


@dataclass(frozen=True)
class StudiedCalls(Columns):
    """The API calls of the studied steps, sorted by start. Every column has the shape (calls,).

    Attributes:
        start: the start of the call, ns.
        kind: the kind of the call, a key of ``CALLS`` or 0.
        api: the index in ``Study.apis`` of the call's name.
        caller: the index in ``Study.callers`` of the part of PyTorch that made the call, by its backtrace.
        range: the index in ``Study.ranges`` of the innermost range at the start of the call. It is ``NONE`` outside of
            ranges, and in the range of a step without an inner range.
        pause_range: the index in ``Study.ranges`` of the range after the call, until the next call. If the program
            loads a batch, it is the range in which it does so; else the range of the longest part.
        loading_ns: the part of the pause after the call in which the program loads a batch, ns.
        unrecorded_wait_ns: the part of the pause after the call in which the call still waits for unrecorded work, ns.
        off_cpu_ns: the part of the time until the next call in which the program's thread has no CPU, ns; NaN if it is
            unknown.
    """

    start: Ints
    kind: Codes
    api: SmallInts
    caller: Ints
    range: Ints
    pause_range: Ints
    loading_ns: Ints
    unrecorded_wait_ns: Ints
    off_cpu_ns: Floats


@dataclass(frozen=True)
class StudiedOperations(Columns):
    """The GPU operations in the studied steps, in the order of their launches. Columns have the shape (operations,).

    Attributes:
        start: the start of the operation, ns.
        trace_index: the index of the operation in the operations of the trace.
        kind, size, copy: as in the operations of the trace, except that a copy that is part of a collective counts as
            a kernel.
        kernel: the index in ``Study.kernels`` and ``Study.classes``, ``NONE`` if the operation is not a kernel.
        phase: the index in ``Study.phases`` of the phase that launched the operation.
        attention_part: the index in ``ATTENTION_PARTS`` of the attention range around the launch, ``NONE`` without one.
        duration_ns: the duration of the operation, ns.
        exposed_ns: the part of the duration that no other operation hides, ns; 0 on other devices than the studied one.
        resource: the index in ``Study.resources`` of what a block of a kernel occupies, -1 if it is unknown.
    """

    start: Ints
    trace_index: Ints
    kind: Codes
    size: Ints
    copy: SmallInts
    kernel: SmallInts
    phase: Integers
    attention_part: Ints
    duration_ns: Ints
    exposed_ns: Floats
    resource: SmallInts


@dataclass(frozen=True)
class RangeSpans:
    """The calls inside each of the program's ranges. Every column has the shape (ranges,).

    Attributes:
        name: the index in ``Study.ranges`` of the range's name.
        first_call, end_call: the first call that starts in the range, and the first call that starts after it.
        first_pause, end_pause: the first call, and the call after the last call, for which the range contains the
            middle of the time between the call and its next call.
    """

    name: Ints
    first_call: Ints
    end_call: Ints
    first_pause: Ints
    end_pause: Ints

    def select_calls(self, low: int, high: int) -> RangeSpans:
        """Returns the spans of the calls [low, high) only. The new index of the call ``low`` is 0."""
        bounds = (self.first_call, self.end_call, self.first_pause, self.end_pause)
        return RangeSpans(self.name, *(np.clip(calls - low, 0, high - low) for calls in bounds))


@dataclass(frozen=True)
class Study:
    """A few consecutive steps: a replay, and a description of each call and each GPU operation.

    Attributes:
        replay: the replay of the steps, whose calls and operations have the order of ``calls`` and ``operations``.
        windows: the start and end of each step on the capture's clock.
        calls, operations: the API calls and the GPU operations.
        spans: the calls inside each of the program's ranges.
        kernels, classes: the name and the class of each kernel.
        phases, apis, callers, ranges: the texts that columns refer to by index. The first caller is empty.
        phase_ranges: the names of the ranges that are phases.
        profiled_step_ns: the mean length of the steps under the profiler, ns. The first of several steps is left out,
            as in a replay.
        min_cost_share: the lower bound of the profiler's cost, divided by the upper bound.
        gpu: the studied device; None if the trace does not describe it.
        resources: what a block of a kernel occupies.
        lines: for each cause of idle time, the lines that the program executes during this idle time.
        call_samples: the samples that show which lines launch work; None if stacks were not sampled.
        cpu_samples: the samples in the time from each call, or from the end of its wait, to the next call. This is the
            time in ``replay.cpu_ns``. None if stacks were not sampled.
        group: the name of the group that the steps belong to.
        other_groups: the studies of the groups that are not measured.
    """

    replay: Replay
    windows: Windows
    calls: StudiedCalls
    operations: StudiedOperations
    spans: RangeSpans
    kernels: tuple[str, ...]
    classes: tuple[str, ...]
    phases: tuple[str, ...]
    apis: tuple[str, ...]
    callers: tuple[str, ...]
    ranges: tuple[str, ...]
    phase_ranges: frozenset[str]
    profiled_step_ns: float
    min_cost_share: float
    gpu: Gpu | None
    resources: tuple[BlockResources, ...] = ()
    lines: Mapping[str, tuple[Line, ...]] = field(default_factory=dict)
    call_samples: StackSamples | None = None
    cpu_samples: StackSamples | None = None
    group: str = "usual"
    other_groups: tuple[StudiedGroup, ...] = ()

    @property
    def steps(self) -> int:
        """Returns the number of steps."""
        return self.replay.steps

    @property
    def is_loading(self) -> Bools:
        """Returns True for each call after which the program loads a batch; shape (calls,)."""
        is_loading: Bools = self.calls.loading_ns > 0
        return is_loading

    def select_steps(self, first: int, end: int) -> Study:
        """Returns a study of the steps [first, end). The replay must be that of a single rank."""
        bounds = self.replay.first_call[first : end + 1]
        low, high = bounds[[0, -1]].tolist()
        first_operation, end_operation = np.searchsorted(self.replay.launch, (low, high)).tolist()
        return replace(
            self,
            replay=self.replay.select_steps(bounds),
            windows=self.windows.select(np.arange(first, end)),
            calls=self.calls.select(slice(low, high)),
            operations=self.operations.select(slice(first_operation, end_operation)),
            spans=self.spans.select_calls(low, high),
        )

    # --- masks of operations, shape (operations,)

    def of_class(self, *classes: str) -> Bools:
        """Returns True for each operation whose kernel belongs to one of the given classes."""
        return _mask_by_text(self.classes, classes.__contains__, self.operations.kernel)

    def in_phase(self, *phases: str) -> Bools:
        """Returns True for each operation that one of the given phases launched."""
        return _mask_by_text(self.phases, phases.__contains__, self.operations.phase)

    def in_attention_part(self, *parts: str) -> Bools:
        """Returns True for each operation that was launched in one of the given parts of attention."""
        return _mask_by_text(ATTENTION_PARTS, parts.__contains__, self.operations.attention_part)

    def kernel_matches(self, pattern: re.Pattern[str]) -> Bools:
        """Returns True for each operation whose kernel name contains a match of the pattern."""
        return _mask_by_text(self.kernels, pattern.search, self.operations.kernel)

    # --- masks of calls, shape (calls,)

    def calls_of(self, operations: Bools) -> Bools:
        """Returns True for each call that launched at least one of the given operations."""
        calls = np.zeros(len(self.calls), np.bool_)
        calls[self.replay.launch[operations]] = True
        return calls

    def calls_of_copies(self, copies: Bools) -> Bools:
        """Returns True for each call that launched one of the copies, and for each synchronization right after it."""
        calls = self.calls_of(copies)
        mask: Bools = calls | (np.append(False, calls[:-1]) & (self.calls.kind == SYNCHRONIZE))
        return mask

    def inside_range(self, name: str) -> tuple[Bools, Bools]:
        """Returns two masks of the calls inside the ranges of this name.

        The first mask is True for each call that starts in such a range, even if an inner range contains it. The second
        mask is True for each call if such a range contains the middle of the time between the call and the next call.
        """
        has_name = _mask_by_text(self.ranges, name.__eq__, self.spans.name)
        masks, spans = [], self.spans
        for first, end in ((spans.first_call, spans.end_call), (spans.first_pause, spans.end_pause)):
            open_range_changes = np.zeros(len(self.calls) + 1, np.int64)
            np.add.at(open_range_changes, first[has_name], 1)
            np.add.at(open_range_changes, end[has_name], -1)
            masks.append(open_range_changes.cumsum()[:-1] > 0)
        return masks[0], masks[1]

    # --- figures

    def work_ms(self, operations: Bools) -> float:
        """Returns the exposed time of the given operations per step, ms."""
        return float(self.operations.exposed_ns[operations].sum()) / self.steps / NS_PER_MS

    @property
    def busy_ms(self) -> float:
        """Returns the GPU's busy time per step in ms, as a mean over the steps.

        If a replay omits the first step, the mean omits it as well.
        """
        first = 1 if self.steps >= MIN_STEPS else 0
        is_counted = self.replay.launch >= self.replay.first_call[first]
        return float(self.operations.exposed_ns[is_counted].sum()) / (self.steps - first) / NS_PER_MS

    @property
    def recording_share(self) -> float:
        """Returns the share of the CPU's time in which CUDA graphs are captured, so that launches run nothing."""
        begun_captures = np.cumsum(_mask_by_text(self.apis, re.compile("StreamBeginCapture").search, self.calls.api))
        ended_captures = np.cumsum(_mask_by_text(self.apis, re.compile("StreamEndCapture").search, self.calls.api))
        cpu_ns = self.replay.cpu_ns
        return float(cpu_ns[begun_captures > ended_captures].sum() / cpu_ns.sum()) if cpu_ns.any() else 0.0

    @property
    def critical_operations(self) -> Ints:
        """Returns the indices in the trace of the operations on the critical path of all studied steps."""
        _, share_on_path = self.replay.critical_path(from_start=True)
        operations: Ints = self.operations.trace_index[share_on_path > 0]
        return operations

    @property
    def on_device(self) -> Bools:
        """Returns True for each operation that runs on the studied device, not on another device of the process."""
        on_device: Bools = self.replay.stream >> DEVICE_SHIFT == 0
        return on_device

    def operations_per_step(self, operations: Bools) -> float:
        """Returns the median number per step of the given operations that run on the studied device."""
        return self._median_per_step(self.replay.launch[operations & self.on_device])

    def calls_per_step(self, calls: Bools) -> float:
        """Returns the median number of the given calls per step. A mean would be biased by calls of the first steps."""
        return self._median_per_step(np.flatnonzero(calls))

    def _median_per_step(self, calls: Ints) -> float:
        """Returns the median number per step of the calls with the given indices."""
        step = np.searchsorted(self.replay.first_call, calls, side="right") - 1
        return float(np.median(np.bincount(step, minlength=self.steps)[: self.steps]))

    # --- names

    def range_names(self, codes: Ints) -> list[str]:
        """Returns the name of the range for each code, an empty text for ``NONE``."""
        return [self.ranges[code] if code >= 0 else "" for code in codes.tolist()]

    def api_names(self, calls: Bools) -> list[str]:
        """Returns the names of the selected calls, without the version that CUPTI appends."""
        return [self.apis[code].partition("_v")[0] for code in self.calls.api[calls].tolist()]

    def lines_of(self, operations: Bools) -> tuple[Line, ...]:
        """Returns the lines of the program that launch most GPU time of the given operations.

        Operations of the backward pass count only if all given operations are of the backward pass, because the same
        line launches the whole backward pass.
        """
        if not self.call_samples:
            return ()
        is_not_backward = operations & ~self.in_phase("backward")
        work_ns = np.where(is_not_backward if is_not_backward.any() else operations, self.operations.exposed_ns, 0.0)
        launched_ns = np.bincount(self.replay.launch, work_ns, len(self.calls)).astype(np.float64)
        # If all steps have the same number of calls, call i of a step corresponds to call i of any other step.
        lengths = set(np.diff(self.replay.first_call).tolist())
        period = lengths.pop() if len(lengths) == 1 else len(self.calls)
        return self.call_samples.lines_of(launched_ns, np.arange(len(self.calls)) % period, self.steps)

    @property
    def cpu_spans(self) -> tuple[Ints, Ints]:
        """Returns the start and the end of the time in ``replay.cpu_ns`` of each call, ns of the capture's clock.

        If the last call waits, the end of its wait is unknown, so its time is empty.
        """
        start, cpu_ns = self.calls.start, self.replay.cpu_ns.astype(np.int64)
        last_ns = np.where(self.replay.awaited[-1:] >= 0, 0, cpu_ns[-1:])
        return np.append(start[1:] - cpu_ns[:-1], start[-1:]), np.append(start[1:], start[-1:] + last_ns)


def _mask_by_text(texts: Sequence[str], is_match: Callable[[str], object], codes: Integers) -> Bools:
    """Returns True for each code, an index in ``texts``, whose text passes the test; False for ``NONE``."""
    mask: Bools = np.array([*map(bool, map(is_match, texts)), False])[codes]
    return mask


@dataclass(frozen=True)
class StudiedGroup:
    """A group of steps that is not measured: the number of steps, their median length, and a study of some steps."""

    name: str
    steps: int
    length_ms: float
    study: Study
