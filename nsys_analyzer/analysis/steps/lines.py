"""Finds the lines of the program that cause idle time or launch work, from sampled stacks of the program.

The line of a stack is its innermost line in the program's own code, because only this code can be changed.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np

from nsys_analyzer.analysis.intervals import find_overlaps
from nsys_analyzer.analysis.steps.anatomy import find_latest_earlier_ends
from nsys_analyzer.analysis.steps.process import CAUSES, ProcessWork, Stretches
from nsys_analyzer.analysis.steps.windows import Windows
from nsys_analyzer.trace.arrays import Bools, Floats, Ints, distinct_rows
from nsys_analyzer.trace.columns import SYNCHRONIZE
from nsys_analyzer.trace.schema import NS_PER_MS
from nsys_analyzer.trace.stacks import StackFrame, Stacks

#: The maximum number of lines that are listed for a time, and the minimum share of the time that a listed line has.
MAX_LINES, MIN_LINE_SHARE = 3, 0.05
#: Lines are listed only if they were found from at least this number of samples.
_MIN_SAMPLES = 3
#: A line begins some work if at least the first share of its samples are in this work, and if at least the second share
#: of the samples in this work are at the line.
_LEAST_SHARES_OF_FIRST_LINE = (0.9, 0.6)
#: The number of lines of source code that are shown before and after the first listed line.
_SOURCE_CONTEXT = 5
#: Matches the name of a function that Python creates inside another function, such as ``.<lambda>`` in ``f.<lambda>``.
_PART_OF_FUNCTION = re.compile(r"\.<(?:genexpr|listcomp|dictcomp|setcomp|lambda)>")

#: Matches a line in a text of the capture hooks: its file, its number, its function, and the line that calls it.
_LINE_TEXT = re.compile(r"(.+?):(\d+) in (.*?)(?:, called from (.+))?")


@dataclass(frozen=True)
class Line:
    """A line of the program, and the share of a given time that the program spends at this line.

    Attributes:
        file, line, function: the position of the line.
        called_from: the file and line that call the function of this line; empty if no line of the program calls it.
        share: the share of the given time, 0 to 1.
        ms: the time at this line per step, ms; None if only the share is known.
        source: the source code around the line, with line numbers; empty except for the first listed line.
        loads: whether a process of the data loader executes this line. ``share`` is then a share of that process's
            time.
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
        """Returns the place of the line in its file, such as ``train.py:212``."""
        return f"{self.file}:{self.line}"


class SampledProgram:
    """The sampled stacks of a process, and the stretches of time in which these stacks show the lines of a cause.

    Attributes:
        stretches: three sets of stretches: the calls that wait; the pauses and the allocator's calls during idle time
            of the device; other idle time. The lines of a cause are found in the first set that contains the cause.
    """

    def __init__(self, work: ProcessWork, windows: Windows, device: int) -> None:
        self._work, self._stacks = work, work.attributed.trace.stacks[work.process]
        self._windows, self._device = windows, device
        self._start = np.maximum(windows.start, find_latest_earlier_ends(windows.end))
        # A program that computes on the CPU has no calls that wait.
        calls, waiting = work.calls, work.waiting_calls
        is_copy = calls.call[waiting] != SYNCHRONIZE
        waits = Stretches(
            calls.start[waiting],
            calls.end[waiting],
            np.where(is_copy, CAUSES.index("copy"), CAUSES.index("sync")),
            work.find_range_codes(calls.start[waiting]),
            calls.name[waiting].astype(np.int64),
        )
        idle_stretches = work.find_idle_stretches(windows, device)
        is_busy = np.isin(idle_stretches.cause, [CAUSES.index(cause) for cause in ("allocator", "host", "data")])
        other_idle = Stretches(
            idle_stretches.start, idle_stretches.end, idle_stretches.cause, idle_stretches.range, idle_stretches.api
        ).select(~is_busy)
        # A pause causes idle time only if the device idles in it.
        _, delaying, _, _ = find_overlaps(
            work.delays.start, work.delays.end, idle_stretches.start[is_busy], idle_stretches.end[is_busy]
        )
        self.stretches = [self._cut_to_steps(waits), work.delays.select(np.unique(delaying)), other_idle]

    def lines_of_cause(
        self, cause: int, ms: float | None = None, range_: int | None = None, api: int | None = None
    ) -> tuple[Line, ...]:
        """Returns the lines that the program executes during the idle time of a cause.

        Args:
            cause: the index of the cause in ``CAUSES``.
            ms: the idle time per step that is divided among the lines, ms; by default, the total time of the stretches.
            range_, api: the codes of the range and of the API call; None for all ranges and calls.
        """
        for stretches in self.stretches:
            mask = stretches.cause == cause
            if range_ is not None:
                mask &= (stretches.range == range_) & (stretches.api == api)
            if mask.any():
                break
        stretches = stretches.select(mask)
        if ms is None:
            ms = int((stretches.end - stretches.start).sum()) / len(self._windows) / NS_PER_MS
        lines = self._hottest_lines(self._stacks, stretches.start, stretches.end, ms)
        return lines + (self._lines_of_loader() if CAUSES[cause] == "data" else ())

    def lines_of_steps(self, ms: float) -> tuple[Line, ...]:
        """Returns the lines that the program executes longest in a step. ``ms`` is the length of a step."""
        return self._hottest_lines(self._stacks, self._start, self._windows.end, ms) + self._lines_of_loader()

    def lines_between_operators(self, ms: float) -> tuple[Line, ...]:
        """Returns the lines that a program without a GPU executes while no operator runs.

        ``ms`` is the time without an operator per step.
        """
        idle_stretches = self._work.find_idle_stretches(self._windows, self._device)
        return self._hottest_lines(self._stacks, idle_stretches.start, idle_stretches.end, ms) + self._lines_of_loader()

    def samples_of_calls(self, call_starts: Ints) -> StackSamples:
        """Returns the samples that were taken during consecutive calls, or in the pauses before these calls.

        Args:
            call_starts: shape (calls,), the start of each call, ns.
        """
        calls = self._work.calls
        first_call = int(np.searchsorted(calls.start, call_starts[0]))
        latest_end = np.maximum.accumulate(calls.end[: first_call + len(call_starts)])
        start = np.append(call_starts[0] if not first_call else latest_end[first_call - 1], latest_end[first_call:-1])
        return self.samples_between(np.maximum(start, self._start[0]), latest_end[first_call:])

    def samples_between(self, start: Ints, end: Ints) -> StackSamples:
        """Returns the samples in the stretches [start, end), one for each call, which must not overlap."""
        sample, call, weight = _find_samples(self._stacks, start, end)
        return StackSamples(call, self._stacks.stack[sample], weight, self._stacks)

    def _lines_of_loader(self) -> tuple[Line, ...]:
        """Returns the lines that a process of the data loader executes during the steps."""
        loader = self._stacks.loader
        lines = self._hottest_lines(loader, self._start, self._windows.end, None) if loader else ()
        return tuple(replace(line, loads=True) for line in lines)

    def _hottest_lines(self, stacks: Stacks, start: Ints, end: Ints, ms: float | None) -> tuple[Line, ...]:
        """Returns the lines with most samples in the stretches [start, end), which must not overlap.

        If there are fewer than ``_MIN_SAMPLES`` samples, the tuple is empty. ``ms`` is the time per step that is
        divided among the lines.
        """
        sample, _, weight = _find_samples(stacks, start, end)
        if len(np.unique(sample)) < _MIN_SAMPLES:
            return ()
        return rank_lines(stacks, stacks.stack[sample], weight, ms)

    def _cut_to_steps(self, stretches: Stretches) -> Stretches:
        """Returns the stretches that begin in a step. Where stretches overlap, the later stretch is shortened."""
        windows = self._windows
        step = np.searchsorted(windows.start, stretches.start, side="right") - 1
        in_step = (step >= 0) & (stretches.start < np.append(windows.end, 0)[step])
        stretches = stretches.select(np.flatnonzero(in_step))
        start = np.maximum(stretches.start, find_latest_earlier_ends(stretches.end))
        return Stretches(start, np.maximum(stretches.end, start), stretches.cause, stretches.range, stretches.api)


@dataclass(frozen=True)
class StackSamples:
    """Samples of the program's stack during calls, or in pauses before them, which show the lines that make the calls.

    Attributes:
        call: shape (samples,), the index of the call that the program executes or makes next.
        stack: shape (samples,), the index of the stack in ``stacks.stacks``.
        weight: shape (samples,), the time that each sample represents, ns.
        stacks: all sampled stacks of the process.
    """

    call: Ints
    stack: Ints
    weight: Floats
    stacks: Stacks

    def lines_of(self, work_ns: Floats, position: Ints, steps: int) -> tuple[Line, ...]:
        """Returns the lines that launched most of the given work.

        The work of a call is divided among the samples that were taken at the call's position in any step. If there are
        no such samples, the samples at the nearest position are used. If fewer than ``_MIN_SAMPLES`` samples were taken
        in calls that launch the work, the tuple is empty.

        Args:
            work_ns: shape (calls,), the GPU time of the work that each call launched, ns.
            position: shape (calls,), the position of each call in its step.
            steps: the number of steps.
        """
        launches = work_ns[self.call] > 0
        if launches.sum() < _MIN_SAMPLES:
            return ()
        sampled_positions, index = np.unique(position[self.call[launches]], return_inverse=True)
        nearest_index = _find_nearest(sampled_positions, position)
        weight_at_position = np.bincount(index, self.weight[launches])
        work_per_weight = np.bincount(nearest_index, work_ns, len(sampled_positions)) / weight_at_position
        ms = float(work_ns.sum()) / steps / NS_PER_MS
        return rank_lines(self.stacks, self.stack[launches], self.weight[launches] * work_per_weight[index], ms)

    def divide_calls(self, position: Ints, calls: Bools) -> tuple[Ints, Ints, Floats]:
        """Divides the time of each of the given calls among the stacks that were sampled at its position in any step.

        If there are no such samples, the samples at the nearest position are used. Only samples of the given calls are
        used.

        Args:
            position: shape (calls,), the position of each call in its step.
            calls: shape (calls,), True for the given calls.

        Returns:
            For each pair of a call and a stack: both indices, and the stack's share of the call, 0 to 1.
        """
        sample, given_call = np.flatnonzero(calls[self.call]), np.flatnonzero(calls)
        if not len(sample):
            return given_call[:0], given_call[:0], np.zeros(0)
        sampled_position = position[self.call[sample]]
        first_of_pair, pair = distinct_rows(sampled_position, self.stack[sample])
        pair_weight = np.bincount(pair, self.weight[sample], len(first_of_pair))
        positions, index, pairs_at = np.unique(sampled_position[first_of_pair], return_inverse=True, return_counts=True)
        stack, share = self.stack[sample[first_of_pair]], pair_weight / np.bincount(index, pair_weight)[index]
        # Each call has the pairs of its nearest position, which follow each other in ``by_position``.
        by_position = np.argsort(index, kind="stable")
        nearest_position = _find_nearest(positions, position[given_call])
        pair_count = pairs_at[nearest_position]
        begin = np.cumsum(pairs_at)[nearest_position] - pair_count
        number = np.arange(pair_count.sum()) - np.repeat(np.cumsum(pair_count) - pair_count, pair_count)
        pair_of_row = by_position[np.repeat(begin, pair_count) + number]
        return np.repeat(given_call, pair_count), stack[pair_of_row], share[pair_of_row]

    def find_first_line(self, calls: Bools, ms: float) -> tuple[Line, ...]:
        """Returns the outermost line of the program that executes the given calls and hardly any others.

        The tuple is empty if there is no such line. For calls of a whole forward pass, the line is that which calls the
        model, whereas ``lines_of`` returns lines inside the model.

        Args:
            calls: shape (calls,), True for the given calls.
            ms: the time of their work per step, ms.
        """
        is_given = calls[self.call]
        weights: dict[StackFrame, list[float]] = {}
        for stack, is_given_call, weight in zip(
            self.stack.tolist(), is_given.tolist(), self.weight.tolist(), strict=True
        ):
            for frame in set(self.stacks.stacks[stack]):
                total = weights.setdefault(frame, [0.0, 0.0])
                total[0] += weight
                total[1] += weight * is_given_call
        least_share_at_line, least_share_of_work = _LEAST_SHARES_OF_FIRST_LINE
        given_weight = float(self.weight[is_given].sum())
        for stack in self.stack[is_given].tolist() if is_given.sum() >= _MIN_SAMPLES else ():
            for frame in reversed(self.stacks.stacks[stack]):
                total_weight, weight = weights[frame]
                if weight >= least_share_at_line * total_weight and weight >= least_share_of_work * given_weight:
                    source = quote_source(self.stacks, frame.file, frame.line)
                    return (Line(*in_named_function(frame), "", weight / given_weight, ms, source),)
        return ()

    def find_callers(self, function: str) -> tuple[Line, ...]:
        """Returns the lines of the program that call a function, such as ``Block.forward``, longest first."""
        weights: dict[StackFrame, float] = {}
        for stack, weight in zip(self.stack.tolist(), self.weight.tolist(), strict=True):
            for frame, caller in pairwise(self.stacks.stacks[stack]):
                if frame.function == function and caller.function != function:
                    weights[caller] = weights.get(caller, 0.0) + weight
        callers = sorted(weights, key=lambda frame: -weights[frame])[:MAX_LINES]
        total = sum(weights.values())
        return tuple(
            Line(*in_named_function(frame), "", weights[frame] / total, None, quote_source(self.stacks, *frame[:2]))
            for frame in callers
        )


def parse_line(text: str, share: float, ms: float | None = None) -> Line | None:
    """Returns the line that a text of the capture hooks names; None for another text.

    Args:
        text: ``train.py:7 in step``, or ``train.py:7 in step, called from train.py:20``.
        share, ms: as in ``Line``.
    """
    match = _LINE_TEXT.fullmatch(text)
    return Line(match[1], int(match[2]), match[3], match[4] or "", share, ms) if match else None


def _find_nearest(values: Ints, position: Ints) -> Ints:
    """Returns the index of the value that is nearest to each position. ``values`` must be sorted."""
    following = np.minimum(np.searchsorted(values, position), len(values) - 1)
    preceding = np.maximum(following - 1, 0)
    is_preceding_nearer = position - values[preceding] <= values[following] - position
    return np.where(is_preceding_nearer, preceding, following)


def rank_lines(stacks: Stacks, stack: Ints, weight: Floats, ms: float | None = None) -> tuple[Line, ...]:
    """Returns the lines of the given samples, the line with the largest total weight first.

    Args:
        stacks: all sampled stacks of the process.
        stack: shape (samples,), the index of each sample's stack.
        weight: shape (samples,), the weight of each sample.
        ms: the time that is divided among the lines by weight, ms; None if it is unknown.
    """
    weight_of_callers: dict[StackFrame, dict[str, float]] = {}
    used_stacks, position = np.unique(stack, return_inverse=True)
    for used_stack, ns in zip(used_stacks.tolist(), np.bincount(position, weight).tolist(), strict=True):
        if frames := stacks.stacks[used_stack]:
            callers = weight_of_callers.setdefault(in_named_function(frames[0]), {})
            caller = _find_caller(frames)
            callers[caller] = callers.get(caller, 0.0) + ns
    ranked_frames = sorted(weight_of_callers, key=lambda frame: -sum(weight_of_callers[frame].values()))[:MAX_LINES]
    total_weight = float(weight.sum())
    lines: list[Line] = []
    for frame in ranked_frames:
        callers = weight_of_callers[frame]
        share = sum(callers.values()) / total_weight
        if share >= MIN_LINE_SHARE:
            source = () if lines else quote_source(stacks, frame.file, frame.line)
            caller = max(callers, key=lambda name: callers[name])
            lines.append(Line(*frame, caller, share, None if ms is None else share * ms, source))
    return tuple(lines)


def quote_source(stacks: Stacks, file: str, line: int) -> tuple[str, ...]:
    """Returns the source code around a line with line numbers; empty if the stacks do not contain it."""
    code = stacks.source.get(file, {})
    numbers = range(line - _SOURCE_CONTEXT, line + _SOURCE_CONTEXT + 1)
    return tuple(f"{'>' if n == line else ' '} {n:>4} {code[n]}" for n in numbers if n in code)


def find_hottest_stacks(stacks: Stacks, start: Ints, end: Ints) -> tuple[Ints, tuple[tuple[StackFrame, ...], ...]]:
    """Returns the index of the stack that was sampled longest in each stretch, and all stacks. Stack 0 is empty."""
    codes: dict[tuple[StackFrame, ...], int] = {(): 0}
    code = np.array([codes.setdefault(frames, len(codes)) for frames in stacks.stacks], np.int64)
    sample, stretch, weight = _find_samples(stacks, start, end)
    sampled_stack = code[stacks.stack[sample]]
    first_of_pair, pair = distinct_rows(stretch, sampled_stack)
    order_by_weight = first_of_pair[np.argsort(np.bincount(pair, weight, len(first_of_pair)), kind="stable")]
    hottest_stack = np.zeros(len(start), np.int64)
    hottest_stack[stretch[order_by_weight]] = sampled_stack[
        order_by_weight
    ]  # of equal indices, the last assignment remains
    return hottest_stack, tuple(codes)


def _find_samples(stacks: Stacks, start: Ints, end: Ints) -> tuple[Ints, Ints, Floats]:
    """Finds the samples in stretches that do not overlap.

    A sample represents the time until the next sample. If it was taken late, it also represents the delay.

    Returns:
        For each pair of a sample and a stretch: both indices, and the time that the sample represents there, ns.
    """
    requested_at = np.minimum(stacks.requested, stacks.sampled - 1)
    sample, stretch, overlap_start, overlap_end = find_overlaps(start, end, requested_at, stacks.sampled)
    until_next_ns = stacks.period_ns * (overlap_end == stacks.sampled[sample])
    return sample, stretch, (overlap_end - overlap_start + until_next_ns).astype(np.float64)


def in_named_function(frame: StackFrame) -> StackFrame:
    """Returns the frame with the named function instead of a part such as ``f.<lambda>``."""
    return frame._replace(function=_PART_OF_FUNCTION.sub("", frame.function))


def _find_caller(frames: tuple[StackFrame, ...]) -> str:
    """Returns the file and line that call the innermost function of a stack, or an empty text."""
    innermost_frame = in_named_function(frames[0])
    outer_frames = (frame for frame in frames[1:] if in_named_function(frame)[::2] != innermost_frame[::2])
    caller = next(outer_frames, None)
    return f"{caller.file}:{caller.line}" if caller else ""
