"""The lines of the program behind idle time and findings, by the stacks that were sampled in that time.

The line of a stack is its innermost line in the author's own code, because only that code can be changed.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace

import numpy as np

from nsys_analyzer.analysis.intervals import find_overlaps
from nsys_analyzer.analysis.steps.anatomy import latest_end_before
from nsys_analyzer.analysis.steps.process import CAUSES, ProcessWork, Stretches
from nsys_analyzer.analysis.steps.windows import Windows
from nsys_analyzer.trace.arrays import Floats, Ints, distinct_rows
from nsys_analyzer.trace.columns import SYNCHRONIZE
from nsys_analyzer.trace.schema import NS_PER_MS
from nsys_analyzer.trace.stacks import StackFrame, Stacks

#: The most lines that are named, the least share of the time of each, and the fewest samples for any line.
_MAX_LINES, _MIN_SHARE, _MIN_SAMPLES = 3, 0.05, 3
#: Lines of source that are shown before and after the first line.
_SOURCE_CONTEXT = 5
#: Functions that Python makes for a part of a function.
_PART_OF_FUNCTION = re.compile(r"\.<(?:genexpr|listcomp|dictcomp|setcomp|lambda)>")


@dataclass(frozen=True)
class Line:
    """A line of the program, and its part of some time.

    Attributes:
        called_from: file and line of the call of its function, empty if the program does not call it.
        share: the part of the time in question.
        ms: that part per step; None if only the share is known.
        source: the lines around it with their numbers, only for the first line.
        loads: whether a process of the data loader is at this line, and the time in question is that process's.
    """

    file: str
    line: int
    function: str
    called_from: str
    share: float
    ms: float | None = None
    source: tuple[str, ...] = ()
    loads: bool = False

    @property
    def place(self) -> str:
        """Returns file and line: ``train.py:212``."""
        return f"{self.file}:{self.line}"


class SampledProgram:
    """The sampled stacks of a process, and what its program did at the same time.

    Attributes:
        stretches: three sets of stretches in which a cause is looked for, in this order: the calls that wait; the
            pauses and the calls of the allocator while the device idles; the idle time with any other cause.
    """

    def __init__(self, work: ProcessWork, windows: Windows, device: int) -> None:
        self._work, self._stacks = work, work.attributed.trace.stacks[work.process]
        self._windows, self._device = windows, device
        self._start = np.maximum(windows.start, latest_end_before(windows.end))
        # A device that computes on the CPU has no calls, and idles because the program does something else.
        calls, waiting = work.calls, work.waiting_calls
        is_copy = calls.call[waiting] != SYNCHRONIZE
        waits = Stretches(
            calls.start[waiting],
            calls.end[waiting],
            np.where(is_copy, CAUSES.index("copy"), CAUSES.index("sync")),
            work.ranges_at(calls.start[waiting]),
            calls.name[waiting].astype(np.int64),
        )
        idle = work.find_idle(windows, device)
        is_busy = np.isin(idle.cause, [CAUSES.index(cause) for cause in ("allocator", "host", "data")])
        other_idle = Stretches(idle.start, idle.end, idle.cause, idle.range, idle.api).select(~is_busy)
        # A pause in which the device has work to do delays nothing.
        _, delaying, _, _ = find_overlaps(work.busy.start, work.busy.end, idle.start[is_busy], idle.end[is_busy])
        self.stretches = [self._cut_to_steps(waits), work.busy.select(np.unique(delaying)), other_idle]

    def lines_of_cause(
        self, cause: int, ms: float | None = None, range_: int | None = None, api: int | None = None
    ) -> tuple[Line, ...]:
        """Returns the lines behind the idle time of a cause.

        Args:
            cause: code into ``CAUSES``.
            ms: the time per step; by default, all the time in which the program waits or pauses for this cause.
            range_, api: codes of the range and of the API call; None for all of them.
        """
        of_cause = []
        for stretches in self.stretches:
            mask = stretches.cause == cause
            if range_ is not None:
                mask &= (stretches.range == range_) & (stretches.api == api)
            of_cause.append(stretches.select(np.flatnonzero(mask)))
        stretches = next(filter(len, of_cause), of_cause[0])
        if ms is None:
            ms = int((stretches.end - stretches.start).sum()) / len(self._windows) / NS_PER_MS
        lines = self._hottest_lines(self._stacks, stretches.start, stretches.end, ms)
        return lines + (self._lines_of_loader() if CAUSES[cause] == "data" else ())

    def lines_of_steps(self, ms: float) -> tuple[Line, ...]:
        """Returns the lines at which the program is in a step, which takes so many ms."""
        return self._hottest_lines(self._stacks, self._start, self._windows.end, ms) + self._lines_of_loader()

    def lines_between_operators(self, ms: float) -> tuple[Line, ...]:
        """Returns the lines at which no operator runs, for a program that computes on the CPU."""
        idle = self._work.find_idle(self._windows, self._device)
        return self._hottest_lines(self._stacks, idle.start, idle.end, ms) + self._lines_of_loader()

    def votes_of_calls(self, started: Ints) -> Votes:
        """Returns the samples before or in each of some consecutive calls, given the starts of the calls."""
        calls = self._work.calls
        first = int(np.searchsorted(calls.start, started[0]))
        latest_end = np.maximum.accumulate(calls.end[: first + len(started)])
        start = np.append(started[0] if not first else latest_end[first - 1], latest_end[first:-1])
        sample, call, weight = _sampled(self._stacks, np.maximum(start, self._start[0]), latest_end[first:])
        return Votes(call, self._stacks.stack[sample], weight, self._stacks)

    def _lines_of_loader(self) -> tuple[Line, ...]:
        """Returns the lines at which a process of the data loader is during the steps."""
        loader = self._stacks.loader
        lines = self._hottest_lines(loader, self._start, self._windows.end, None) if loader else ()
        return tuple(replace(line, loads=True) for line in lines)

    def _hottest_lines(self, stacks: Stacks, start: Ints, end: Ints, ms: float | None) -> tuple[Line, ...]:
        """Returns the lines with most of the samples in some stretches, which do not overlap; none for few samples.

        A sample counts for the time to the next sample. A late sample also counts for the time that it was late.
        """
        sample, _, weight = _sampled(stacks, start, end)
        if len(np.unique(sample)) < _MIN_SAMPLES:
            return ()
        return _rank_lines(stacks, stacks.stack[sample], weight, ms)

    def _cut_to_steps(self, stretches: Stretches) -> Stretches:
        """Returns the stretches that begin in a step, cut where they overlap."""
        windows = self._windows
        step = np.searchsorted(windows.start, stretches.start, side="right") - 1
        in_step = (step >= 0) & (stretches.start < np.append(windows.end, 0)[step])
        stretches = stretches.select(np.flatnonzero(in_step))
        start = np.maximum(stretches.start, latest_end_before(stretches.end))
        return Stretches(start, np.maximum(stretches.end, start), stretches.cause, stretches.range, stretches.api)


@dataclass(frozen=True)
class Votes:
    """Samples of the program's stack while it launches something.

    Attributes:
        call: shape (samples,), the call that the program is in, or before.
        stack: shape (samples,), index into the stacks of ``stacks``.
        weight: shape (samples,), the time that each sample counts for, ns.
    """

    call: Ints
    stack: Ints
    weight: Floats
    stacks: Stacks

    def lines_of(self, work_ns: Floats, place: Ints, steps: int) -> tuple[Line, ...]:
        """Returns the lines that launched most of some work; none if there are too few samples.

        The work of a call belongs to the samples at its place in a step, or at the nearest place with samples.

        Args:
            work_ns: shape (calls,), the work that each call launched in all steps.
            place: shape (calls,), the place of each call in its step: the same call has the same place in all steps.
            steps: the number of steps.
        """
        launches = work_ns[self.call] > 0
        if launches.sum() < _MIN_SAMPLES:
            return ()
        sampled, position = np.unique(place[self.call[launches]], return_inverse=True)
        behind = np.minimum(np.searchsorted(sampled, place), len(sampled) - 1)
        before = np.maximum(behind - 1, 0)
        nearest = np.where(place - sampled[before] <= sampled[behind] - place, before, behind)
        work_per_weight = np.bincount(nearest, work_ns, len(sampled)) / np.bincount(position, self.weight[launches])
        ms = float(work_ns.sum()) / steps / NS_PER_MS
        return _rank_lines(self.stacks, self.stack[launches], self.weight[launches] * work_per_weight[position], ms)


def _rank_lines(stacks: Stacks, stack: Ints, weight: Floats, ms: float | None = None) -> tuple[Line, ...]:
    """Returns the lines of samples with these stacks, those with the largest weight first."""
    weight_of_callers: dict[StackFrame, dict[str, float]] = {}
    used, position = np.unique(stack, return_inverse=True)
    for code, ns in zip(used.tolist(), np.bincount(position, weight).tolist(), strict=True):
        if frames := stacks.stacks[code]:
            callers = weight_of_callers.setdefault(_in_named_function(frames[0]), {})
            caller = _find_caller(frames)
            callers[caller] = callers.get(caller, 0.0) + ns
    ranked = sorted(weight_of_callers, key=lambda frame: -sum(weight_of_callers[frame].values()))[:_MAX_LINES]
    total = float(weight.sum())
    lines: list[Line] = []
    for frame in ranked:
        callers = weight_of_callers[frame]
        share = sum(callers.values()) / total
        if share >= _MIN_SHARE:
            source: tuple[str, ...] = ()
            if not lines:
                text = stacks.source.get(frame.file, {})
                numbers = range(frame.line - _SOURCE_CONTEXT, frame.line + _SOURCE_CONTEXT + 1)
                marks = {frame.line: ">"}
                source = tuple(f"{marks.get(n, ' ')} {n:>4} {text[n]}" for n in numbers if n in text)
            caller = max(callers, key=lambda name: callers[name])
            lines.append(Line(*frame, caller, share, None if ms is None else share * ms, source))
    return tuple(lines)


def hottest_stacks(stacks: Stacks, start: Ints, end: Ints) -> tuple[Ints, tuple[tuple[StackFrame, ...], ...]]:
    """Returns the code of the stack with most of the samples in each stretch, and the stacks; code 0 has no line."""
    codes: dict[tuple[StackFrame, ...], int] = {(): 0}
    code = np.array([codes.setdefault(frames, len(codes)) for frames in stacks.stacks], np.int64)
    sample, stretch, weight = _sampled(stacks, start, end)
    sampled = code[stacks.stack[sample]]
    first, pair = distinct_rows(stretch, sampled)
    by_weight = first[np.argsort(np.bincount(pair, weight, len(first)), kind="stable")]
    hottest = np.zeros(len(start), np.int64)
    hottest[stretch[by_weight]] = sampled[by_weight]  # the last stack of each stretch stays
    return hottest, tuple(codes)


def _sampled(stacks: Stacks, start: Ints, end: Ints) -> tuple[Ints, Ints, Floats]:
    """Returns each sample in stretches that do not overlap, its stretch, and the time that it counts for, ns."""
    requested = np.minimum(stacks.requested, stacks.sampled - 1)
    sample, stretch, low, high = find_overlaps(start, end, requested, stacks.sampled)
    return sample, stretch, (high - low + stacks.period_ns * (high == stacks.sampled[sample])).astype(np.float64)


def _in_named_function(frame: StackFrame) -> StackFrame:
    """Returns the frame with the function that its author named."""
    return frame._replace(function=_PART_OF_FUNCTION.sub("", frame.function))


def _find_caller(frames: tuple[StackFrame, ...]) -> str:
    """Returns file and line of the call of the function of a stack's innermost line; empty if there is none."""
    innermost = _in_named_function(frames[0])
    outside = (frame for frame in frames[1:] if _in_named_function(frame)[::2] != innermost[::2])
    caller = next(outside, None)
    return f"{caller.file}:{caller.line}" if caller else ""
