"""A few consecutive steps in full detail, with a replay of them: what findings are made from."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import numpy as np

from nsys_analyzer.analysis.steps.lines import Line, Votes
from nsys_analyzer.analysis.steps.replay import MIN_STEPS, Replay
from nsys_analyzer.analysis.steps.windows import Windows
from nsys_analyzer.trace.arrays import Bools, Codes, Floats, Integers, Ints, SmallInts
from nsys_analyzer.trace.columns import SYNCHRONIZE, Columns
from nsys_analyzer.trace.metadata import Gpu
from nsys_analyzer.trace.phase_names import ATTENTION_PARTS
from nsys_analyzer.trace.schema import NS_PER_MS

#: The number of a stream has the number of its device in the bits from this one on; 0 is the studied device.
DEVICE_SHIFT = 32
#: Calls that begin and end the recording of a CUDA graph, such as cudaStreamBeginCapture_v10000.
_BEGINS_RECORDING, _ENDS_RECORDING = "StreamBeginCapture", "StreamEndCapture"


@dataclass(frozen=True)
class StudiedCalls(Columns):
    """The API calls of the studied steps, in order; every column has the shape (calls,).

    Attributes:
        start: ns.
        kind: what the call does, a key of ``CALLS`` or 0.
        api: code of the call's name into ``Study.apis``.
        caller: code into ``Study.callers``: the part of PyTorch that made the call, by its backtrace.
        range: code into ``Study.ranges`` of the innermost range at the start of the call; ``NONE`` outside ranges and
            in the range of a step alone.
        pause_range: the range during the time to the next call: where the program loads a batch, else the longest one.
        loading_ns: the part of the pause after the call in which the program loads a batch.
        unrecorded_ns: the part of the pause after the call in which it still waits, for work that was not recorded.
        off_cpu_ns: the part of the time to the next call in which the program's thread has no CPU; NaN if unknown.
    """

    start: Ints
    kind: Codes
    api: SmallInts
    caller: Ints
    range: Ints
    pause_range: Ints
    loading_ns: Ints
    unrecorded_ns: Ints
    off_cpu_ns: Floats


@dataclass(frozen=True)
class StudiedPieces(Columns):
    """The GPU's work of the studied steps, in the order of its launches; every column has the shape (pieces,).

    Attributes:
        start: ns.
        operation: index into the operations of the trace.
        kind, size, copy: as in the operations of the trace; collectives are not copies.
        kernel: code into ``Study.kernels`` and ``Study.classes``, ``NONE`` if it is not a kernel.
        phase: code into ``Study.phases``.
        attention_part: code into ``ATTENTION_PARTS`` of the range in which it was launched, ``NONE`` outside of them.
        duration_ns: from start to end.
        exposed_ns: the part of the duration that no other operation hides; 0 on other devices.
    """

    start: Ints
    operation: Ints
    kind: Codes
    size: Ints
    copy: SmallInts
    kernel: SmallInts
    phase: Integers
    attention_part: Ints
    duration_ns: Ints
    exposed_ns: Floats


@dataclass(frozen=True)
class RangeSpans:
    """The program's ranges, by the calls that they hold; every column has the shape (ranges,).

    Attributes:
        name: code into ``Study.ranges``.
        first_call, end_call: the range holds the starts of the calls from ``first_call`` to before ``end_call``.
        first_pause, end_pause: the range holds the middles of the times after these calls.
    """

    name: Ints
    first_call: Ints
    end_call: Ints
    first_pause: Ints
    end_pause: Ints

    def select_calls(self, low: int, high: int) -> RangeSpans:
        """Returns the spans among the calls from ``low`` to before ``high``."""
        bounds = (self.first_call, self.end_call, self.first_pause, self.end_pause)
        return RangeSpans(self.name, *(np.clip(calls - low, 0, high - low) for calls in bounds))


@dataclass(frozen=True)
class Study:
    """Some steps: a replay of them, and what their calls and their GPU work are.

    Attributes:
        replay: the steps with their calls and pieces in the same order as ``calls`` and ``pieces``.
        windows: the steps on the capture's clock.
        kernels, classes: the names of kernels, and the class of each.
        phases, apis, callers, ranges: the texts of the codes. The first caller is empty.
        phase_ranges: names of ranges that bound a phase.
        measured_ns: the mean length of these steps under the profiler. The first of several steps is left out, as in a
            replay.
        min_cost_share: the least that the profiler may have cost, as a share of the most.
        lines: the lines of the program behind the idle time of each cause.
        votes: the lines of the program that launch something.
        group: the name of the group that these steps belong to.
        other_groups: steps of other groups, which are unlike these.
    """

    replay: Replay
    windows: Windows
    calls: StudiedCalls
    pieces: StudiedPieces
    spans: RangeSpans
    kernels: tuple[str, ...]
    classes: tuple[str, ...]
    phases: tuple[str, ...]
    apis: tuple[str, ...]
    callers: tuple[str, ...]
    ranges: tuple[str, ...]
    phase_ranges: frozenset[str]
    measured_ns: float
    min_cost_share: float
    gpu: Gpu | None
    lines: Mapping[str, tuple[Line, ...]] = field(default_factory=dict)
    votes: Votes | None = None
    group: str = "usual"
    other_groups: tuple[StudiedGroup, ...] = ()

    @property
    def steps(self) -> int:
        """Returns the number of steps."""
        return self.replay.steps

    @property
    def is_loading(self) -> Bools:
        """Returns a mask of the calls after which the program loads a batch."""
        is_loading: Bools = self.calls.loading_ns > 0
        return is_loading

    def select_steps(self, first: int, end: int) -> Study:
        """Returns the steps of one rank from ``first`` to before ``end``."""
        bounds = self.replay.first_call[first : end + 1]
        low, high = bounds[[0, -1]].tolist()
        first_piece, end_piece = np.searchsorted(self.replay.launch, (low, high)).tolist()
        return replace(
            self,
            replay=self.replay.select_steps(bounds),
            windows=self.windows.select(np.arange(first, end)),
            calls=self.calls.select(slice(low, high)),
            pieces=self.pieces.select(slice(first_piece, end_piece)),
            spans=self.spans.select_calls(low, high),
        )

    # --- masks of pieces, shape (pieces,)

    def of_class(self, *classes: str) -> Bools:
        """Returns a mask of the pieces whose kernel belongs to one of these classes."""
        mask: Bools = np.array([*(name in classes for name in self.classes), False])[self.pieces.kernel]
        return mask

    def in_phase(self, *phases: str) -> Bools:
        """Returns a mask of the pieces of one of these phases."""
        mask: Bools = np.array([*(name in phases for name in self.phases), False])[self.pieces.phase]
        return mask

    def in_attention_part(self, *parts: str) -> Bools:
        """Returns a mask of the pieces that were launched in one of these parts of attention."""
        mask: Bools = np.array([*(name in parts for name in ATTENTION_PARTS), False])[self.pieces.attention_part]
        return mask

    def kernel_matches(self, pattern: re.Pattern[str]) -> Bools:
        """Returns a mask of the pieces of kernels in whose names a pattern is found."""
        matches = [*(bool(pattern.search(name)) for name in self.kernels), False]
        mask: Bools = np.array(matches)[self.pieces.kernel]
        return mask

    # --- masks of calls, shape (calls,)

    def calls_of(self, pieces: Bools) -> Bools:
        """Returns a mask of the calls that launched some pieces."""
        calls = np.zeros(len(self.calls), np.bool_)
        calls[self.replay.launch[pieces]] = True
        return calls

    def copy_calls(self, copies: Bools) -> Bools:
        """Returns a mask of the calls that launched some copies, and the synchronizations directly after them."""
        calls = self.calls_of(copies)
        mask: Bools = calls | (np.append(False, calls[:-1]) & (self.calls.kind == SYNCHRONIZE))
        return mask

    def inside_range(self, name: str) -> tuple[Bools, Bools]:
        """Returns masks of calls that start in a range of this name, at any depth, and of calls that pause in one."""
        has_name = np.array([*(text == name for text in self.ranges), False])[self.spans.name]
        masks = []
        for first, end in (
            (self.spans.first_call, self.spans.end_call),
            (self.spans.first_pause, self.spans.end_pause),
        ):
            opened = np.zeros(len(self.calls) + 1, np.int64)
            np.add.at(opened, first[has_name], 1)
            np.add.at(opened, end[has_name], -1)
            masks.append(opened.cumsum()[:-1] > 0)
        return masks[0], masks[1]

    # --- figures

    def work_ms(self, pieces: Bools) -> float:
        """Returns the exposed work of some pieces per step, ms."""
        return float(self.pieces.exposed_ns[pieces].sum()) / self.steps / NS_PER_MS

    @property
    def busy_ms(self) -> float:
        """Returns the GPU's work per step, ms, over the steps that a replay counts."""
        first = 1 if self.steps >= MIN_STEPS else 0
        is_counted = self.replay.launch >= self.replay.first_call[first]
        return float(self.pieces.exposed_ns[is_counted].sum()) / (self.steps - first) / NS_PER_MS

    @property
    def recording_share(self) -> float:
        """Returns the share of the time in which the program records CUDA graphs: its launches do not run then."""
        begins, ends = (
            np.cumsum(np.array([*(word in api for api in self.apis), False])[self.calls.api])
            for word in (_BEGINS_RECORDING, _ENDS_RECORDING)
        )
        cpu_ns = self.replay.cpu_ns
        return float(cpu_ns[begins > ends].sum() / cpu_ns.sum()) if cpu_ns.any() else 0.0

    @property
    def critical_operations(self) -> Ints:
        """Returns the indices of the trace's operations that are on the critical path of all of the steps."""
        _, share_on_path = self.replay.critical_path(from_start=True)
        operations: Ints = self.pieces.operation[share_on_path > 0]
        return operations

    @property
    def on_device(self) -> Bools:
        """Returns a mask of the pieces of the studied device; the others run on other devices of the process."""
        on_device: Bools = self.replay.stream >> DEVICE_SHIFT == 0
        return on_device

    def operations_per_step(self, pieces: Bools) -> float:
        """Returns how many of some pieces run on the studied device in a step, median."""
        return self._median_per_step(self.replay.launch[pieces & self.on_device])

    def calls_per_step(self, calls: Bools) -> float:
        """Returns how many of some calls a step has: the median, since the first steps may do more than the others."""
        return self._median_per_step(np.flatnonzero(calls))

    def _median_per_step(self, calls: Ints) -> float:
        """Returns the median number of these calls in a step, by their positions."""
        step = np.searchsorted(self.replay.first_call, calls, side="right") - 1
        return float(np.median(np.bincount(step, minlength=self.steps)[: self.steps]))

    # --- names

    def range_names(self, codes: Ints) -> list[str]:
        """Returns the names of ranges by their codes, empty for ``NONE``."""
        return [self.ranges[code] if code >= 0 else "" for code in codes.tolist()]

    def api_names(self, calls: Bools) -> list[str]:
        """Returns the names of some calls, without the version that CUPTI appends."""
        return [self.apis[code].partition("_v")[0] for code in self.calls.api[calls].tolist()]

    def lines_of(self, pieces: Bools) -> tuple[Line, ...]:
        """Returns the lines of the program that launch some pieces, weighted by the work that each line launches.

        The backward pass is launched from one line. So the lines that launch such pieces in other phases are returned
        if there are any.
        """
        if not self.votes:
            return ()
        not_backward = pieces & ~self.in_phase("backward")
        work_ns = np.where(not_backward if not_backward.any() else pieces, self.pieces.exposed_ns, 0.0)
        launched_ns = np.bincount(self.replay.launch, work_ns, len(self.calls)).astype(np.float64)
        # The same call has the same place in each step, unless steps differ in their number of calls.
        lengths = set(np.diff(self.replay.first_call).tolist())
        period = lengths.pop() if len(lengths) == 1 else len(self.calls)
        return self.votes.lines_of(launched_ns, np.arange(len(self.calls)) % period, self.steps)


@dataclass(frozen=True)
class StudiedGroup:
    """Steps that are unlike the usual ones: how many there are, their median length, and some of them in detail."""

    name: str
    steps: int
    length_ms: float
    study: Study
