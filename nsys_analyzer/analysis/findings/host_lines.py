"""Finds the source lines and functions whose time on the CPU makes the GPU wait for launches.

The time between two CUDA calls is divided among the stacks that were sampled in it. A line needs time to launch its
operations: their number times the usual time of a launch. The rest of its time is the excess of the line, whatever the
line does. The replay says how much shorter a step would be without this excess. Time that a more specific finding
explains, such as the loading of batches, is left out.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

from nsys_analyzer.analysis.findings.finding import (
    Candidate,
    FindingFigures,
    Place,
    ReplayChange,
    StepsToExplain,
)
from nsys_analyzer.analysis.findings.waits import MAJORITY_SHARE
from nsys_analyzer.analysis.intervals import NONE
from nsys_analyzer.analysis.operators.pricing import PricedOperators
from nsys_analyzer.analysis.steps.lines import Line, StackSamples, in_named_function, rank_lines
from nsys_analyzer.analysis.steps.replay import Replay
from nsys_analyzer.analysis.steps.study import Study
from nsys_analyzer.trace.arrays import Bools, Floats, Ints
from nsys_analyzer.trace.columns import COPY, SYNCHRONIZE
from nsys_analyzer.trace.schema import NS_PER_MS, NS_PER_US

#: The ID of the findings of this file, and the causes of the idle time that their changes can remove.
HOST_LINE, _IDLE_CAUSES = "host_line", frozenset(("launch", "host"))
#: The maximum number of lines and functions that are reported.
_MAX_PLACES = 5
#: A line or function is replayed only if its excess is at least this share of a step under the profiler.
_SMALLEST_EXCESS_SHARE = 0.02
#: A line or function is slow only if its time is at least this multiple of the usual time to launch its operations.
#: Lines of a forward pass take up to four times as long for each launch as autograd, which launches most operations.
_SLOW_FACTOR = 5.0
#: A pause is long if it takes at least this multiple of the usual time of a launch, or this time, ns. Long pauses are
#: divided among the samples of long pauses only, because each of them is the time of one line, which is often not that
#: of the calls around it. The launch of a CUDA graph may be the usual launch, and takes up to a millisecond.
_LONG_FACTOR, _LONG_PAUSE_NS = 10.0, 1_000_000.0
#: A line or function is reported only if it launches at most this share of all operations. Otherwise, its time is that
#: of launching in general, as it is for the main loop or for a layer of the model.
_LARGEST_SHARE_OF_LAUNCHES = 0.1
#: In a step with few launches, such as those of CUDA graphs, a line may launch this number of operations.
_FEW_LAUNCHES = 5
#: Slow lines of a function form one block, such as the body of a loop, if at most this number of lines is between them.
_LARGEST_GAP_IN_BLOCK = 2
#: Of the places that have at least this share of the largest excess, the innermost place is reported.
_SIMILAR_EXCESS = 0.9
#: Calls at equal positions of two steps are the same calls if the numbers of calls differ by at most this share.
_SIMILAR_LENGTHS_TOLERANCE = 0.02
#: Excess that is found from fewer samples is not reported. In long pauses, whose length is known, fewer are sufficient.
_MIN_SAMPLES, _MIN_SAMPLES_IN_PAUSES = 3, 2


@dataclass(frozen=True)
class HostLineFigures(FindingFigures):
    """The time of a line, of a block of lines or of a function on the CPU, per step under the profiler.

    Attributes:
        name: the file with the lines, such as ``train.py:30-34``, or the name of the function.
        is_function: whether ``name`` is that of a function.
        cpu_ms: the time on the CPU, without waits for the GPU, ms.
        launches: the number of launches in this time.
        launch_us: the usual time of a launch, µs.
        waits: the number of waits for the GPU that no other finding explains.
        samples: the number of samples in this time, in all studied steps.
    """

    name: str
    is_function: bool
    cpu_ms: float
    launches: float
    launch_us: float
    waits: float
    samples: int


class _Excerpt(NamedTuple):
    """A line, a block of lines, or a function, and the stacks that contain it.

    Attributes:
        file, function: the position of the lines.
        lines: the numbers of the lines; empty for a function.
        depth: by the index of a stack, the index of its innermost frame in the excerpt.
    """

    file: str
    function: str
    lines: tuple[int, ...]
    depth: dict[int, int]

    @property
    def name(self) -> str:
        """Returns the name of the function, or the file with the first and the last line, such as ``train.py:3-5``."""
        if not self.lines:
            return self.function
        return f"{self.file}:{'-'.join(map(str, dict.fromkeys((self.lines[0], self.lines[-1]))))}"


@dataclass(frozen=True)
class _StackTimes:
    """What each sampled stack takes in the studied steps. Arrays have the shape (stacks,) unless stated otherwise.

    Attributes:
        cpu_ns: the time between the program's calls that no other finding explains, ns.
        launches: the number of launches in this time.
        waited_ns: the time in waits that no other finding explains, ns.
        launch_ns: the usual time of a launch, ns.
        shares: pairs of a call and a stack, with the stack's share of the time after the call.
        wait_shares: pairs of a call and a stack, with the stack's share of the call itself.
        unexplained: shape (calls,), the share of the time after each call that no other finding explains.
        is_waiting: shape (calls,), True for each call with a wait that no other finding explains.
        is_long: shape (calls,), True for each call before a long pause.
    """

    cpu_ns: Floats
    launches: Floats
    waited_ns: Floats
    launch_ns: float
    shares: tuple[Ints, Ints, Floats]
    wait_shares: tuple[Ints, Ints, Floats]
    unexplained: Floats
    is_waiting: Bools
    is_long: Bools

    def excess_ns(self, stacks: Ints, factor: float = 1.0) -> float:
        """Returns the time of the given stacks above that of their launches, ns; 0 if they are not slow.

        Args:
            stacks: the indices of the stacks.
            factor: the true CPU time of the stacks, divided by their time according to the samples.
        """
        time_ns = float(self.cpu_ns[stacks].sum()) * factor + float(self.waited_ns[stacks].sum())
        usual_ns = float(self.launches[stacks].sum()) * self.launch_ns
        return time_ns - usual_ns if time_ns >= _SLOW_FACTOR * usual_ns else 0.0


def find_host_lines(steps: StepsToExplain, candidates: Sequence[Candidate]) -> Iterator[Candidate]:
    """Finds the lines and functions whose own time on the CPU may delay launches, the largest excess first.

    Args:
        steps: the steps.
        candidates: the candidates of the other rules. The time that they explain is left out.
    """
    study = steps.study
    samples, call_samples = study.cpu_samples, study.call_samples
    if samples is None or call_samples is None or not len(samples.call) or not len(call_samples.call):
        return
    times = _measure_stacks(steps, samples, call_samples, candidates)
    excerpts = _find_excerpts(samples, times, frozenset((steps.run.lines or {}).values()), study.steps)
    remaining = np.ones(len(times.cpu_ns), np.bool_)
    for _ in range(_MAX_PLACES):
        excess_ns = [
            times.excess_ns(np.array([stack for stack in excerpt.depth if remaining[stack]], np.int64))
            for excerpt in excerpts
        ]
        largest_ns = max(excess_ns, default=0.0)
        if largest_ns < _SMALLEST_EXCESS_SHARE * study.profiled_step_ns * study.steps:
            return
        similar = [
            excerpt for excerpt, ns in zip(excerpts, excess_ns, strict=True) if ns >= _SIMILAR_EXCESS * largest_ns
        ]
        excerpt = min(similar, key=lambda excerpt: _rank_excerpt(excerpt, times))
        stacks = np.array([stack for stack in excerpt.depth if remaining[stack]], np.int64)
        remaining[stacks] = False
        if candidate := _make_candidate(steps, samples, call_samples, times, excerpt, stacks):
            yield candidate


def _measure_stacks(
    steps: StepsToExplain, samples: StackSamples, call_samples: StackSamples, candidates: Sequence[Candidate]
) -> _StackTimes:
    """Measures the time of each sampled stack that the specific candidates do not explain."""
    study, replay = steps.study, steps.study.replay
    unexplained, is_waiting = np.ones(len(study.calls)), replay.awaited >= 0
    is_waiting &= np.isin(study.calls.kind, (COPY, SYNCHRONIZE))  # a launch may wait for room in the driver's queue
    for candidate in candidates:
        if candidate.is_specific_cause:
            changed = candidate.changes[-1](replay)
            remaining_share = changed.cpu_ns / np.maximum(replay.cpu_ns, 1.0)
            unexplained = np.minimum(unexplained, remaining_share)
            is_waiting &= changed.awaited >= 0
    stack_count = len(samples.stacks.stacks)
    positions = _find_positions(study)
    is_long = replay.pause_ns > min(_LONG_FACTOR * replay.median_launch_ns, _LONG_PAUSE_NS)
    parts = zip(*(samples.divide_calls(positions, calls) for calls in (is_long, ~is_long)), strict=True)
    call, stack, share = (np.concatenate(columns) for columns in parts)
    wait_shares = call_samples.divide_calls(positions, is_waiting)
    cpu_ns = _sum_by(stack, share * (replay.cpu_ns * unexplained)[call], stack_count)
    waiting_call, waiting_stack, waiting_share = wait_shares
    waited_ns = np.where(is_waiting, steps.waited_ns, 0.0)[waiting_call] * waiting_share
    # The call before a long pause is often made by another line.
    is_launching, launches = study.calls_of(np.ones(len(study.operations), np.bool_)) & ~is_long, np.zeros(stack_count)
    if steps.operators:
        launches, is_counted = _count_launches_by_line(steps.operators, samples, cpu_ns)
        is_launching &= ~is_counted
    launches = launches + _sum_by(stack, share * is_launching[call], stack_count)
    return _StackTimes(
        cpu_ns, launches, _sum_by(waiting_stack, waited_ns, stack_count), replay.median_launch_ns,
        (call, stack, share),
        wait_shares, unexplained, is_waiting, is_long,
    )  # fmt: skip


def _find_positions(study: Study) -> Ints:
    """Returns the position of each call in its step, or the index of each call if the steps differ too much."""
    first_call, calls = study.replay.first_call, np.arange(len(study.calls))
    lengths = np.diff(first_call)
    is_alike = lengths.max() <= (1 + _SIMILAR_LENGTHS_TOLERANCE) * lengths.min()
    return calls - np.repeat(first_call[:-1], lengths) if is_alike else calls


def _count_launches_by_line(priced: PricedOperators, samples: StackSamples, cpu_ns: Floats) -> tuple[Floats, Bools]:
    """Counts the launches of each stack by the lines of the operators' calls.

    The launches of a line are divided among the stacks with this innermost line, by their time ``cpu_ns``. Launches of
    a backward pass are not counted, because their lines are those of the forward pass.

    Returns:
        The number of launches of each stack, and True for each API call that was counted.
    """
    calls, launch = priced.calls, priced.study.replay.launch
    line_of_call = np.where(calls.in_phase("backward", "recomputed"), NONE, calls.line)
    line_of_launch = np.full(len(priced.study.calls), NONE)
    line_of_launch[launch] = np.append(line_of_call, NONE)[priced.call]
    is_counted = line_of_launch != NONE
    counts = np.bincount(line_of_launch[is_counted], minlength=len(calls.lines)).tolist()
    launches_of_place = {line.partition(" in ")[0]: count for line, count in zip(calls.lines, counts, strict=True)}
    places = [f"{frames[0].file}:{frames[0].line}" if frames else "" for frames in samples.stacks.stacks]
    ns_of_place: dict[str, float] = defaultdict(float)
    for place, ns in zip(places, cpu_ns.tolist(), strict=True):
        ns_of_place[place] += ns
    launches = [
        launches_of_place.get(place, 0) * ns / (ns_of_place[place] or 1.0)
        for place, ns in zip(places, cpu_ns.tolist(), strict=True)
    ]
    return np.array(launches), is_counted


def _find_excerpts(
    samples: StackSamples, times: _StackTimes, phase_lines: frozenset[str], steps: int
) -> list[_Excerpt]:
    """Returns the slow lines, the blocks of slow lines, and the slow functions of the sampled stacks.

    Samples whose innermost line calls a phase, such as ``optimizer.step()``, are left out: this time is PyTorch's own.
    """
    lines: dict[tuple[str, str, int], dict[int, int]] = {}
    functions: dict[tuple[str, str], dict[int, int]] = {}
    for stack in np.flatnonzero(times.cpu_ns + times.waited_ns).tolist():
        if {f"{frame.file}:{frame.line}" for frame in samples.stacks.stacks[stack][:1]} & phase_lines:
            continue
        for level, frame in enumerate(map(in_named_function, samples.stacks.stacks[stack])):
            lines.setdefault((frame.file, frame.function, frame.line), {}).setdefault(stack, level)
            functions.setdefault((frame.file, frame.function), {}).setdefault(stack, level)
    most_launches = _LARGEST_SHARE_OF_LAUNCHES * times.launches.sum()

    def is_slow(depth: dict[int, int]) -> bool:
        """Returns whether the stacks are slow and launch few operations."""
        stacks = np.array(list(depth), np.int64)
        calls_others, launches = any(depth.values()), times.launches[stacks].sum()
        launches_few = launches <= most_launches or (launches <= _FEW_LAUNCHES * steps and not calls_others)
        return bool(launches_few and times.excess_ns(stacks))

    excerpts = [_Excerpt(file, function, (), depth) for (file, function), depth in functions.items() if is_slow(depth)]
    block = _Excerpt("", "", (), {})
    for (file, function, line), all_depths in sorted(lines.items()):
        depth = all_depths if is_slow(all_depths) else {stack: 0 for stack, level in all_depths.items() if not level}
        if not is_slow(depth):
            continue
        excerpt = _Excerpt(file, function, (line,), depth)
        excerpts.append(excerpt)
        longer = _Excerpt(file, function, (*block.lines, line), {**depth, **block.depth})
        is_near = (file, function) == block[:2] and line - block.lines[-1] <= _LARGEST_GAP_IN_BLOCK + 1
        block = longer if is_near and is_slow(longer.depth) else excerpt
        excerpts += [block] if block is longer else []
    return excerpts


def _rank_excerpt(excerpt: _Excerpt, times: _StackTimes) -> tuple[float, int]:
    """Returns the mean number of the program's frames inside an excerpt, and its number of lines."""
    stacks = np.array(list(excerpt.depth), np.int64)
    weight = times.cpu_ns[stacks] + times.waited_ns[stacks]
    mean_depth = float(np.average(list(excerpt.depth.values()), weights=weight))
    return round(mean_depth, 1), len(excerpt.lines) or 1_000_000


def _make_candidate(
    steps: StepsToExplain,
    samples: StackSamples,
    call_samples: StackSamples,
    times: _StackTimes,
    excerpt: _Excerpt,
    stacks: Ints,
) -> Candidate | None:
    """Returns the candidate of an excerpt, or None if there are too few samples in its time."""
    study = steps.study
    is_inside = np.zeros(len(times.cpu_ns), np.bool_)
    is_inside[stacks] = True
    of_excerpt = is_inside[samples.stack]
    weight = samples.weight * times.unexplained[samples.call]
    count, total = (float(part.sum()) / samples.stacks.period_ns for part in (weight[of_excerpt], weight))
    share, wait_share = (
        _sum_by(call, part * is_inside[stack], len(study.calls))
        for call, stack, part in (times.shares, times.wait_shares)
    )
    share *= times.unexplained
    waits = times.is_waiting & (wait_share >= MAJORITY_SHARE)
    in_waits = waits[call_samples.call] & is_inside[call_samples.stack]
    wait_count = float(call_samples.weight[in_waits].sum()) / samples.stacks.period_ns
    # The relative standard error of a binomial distribution.
    error = float(np.sqrt(max(1 - count / max(total, 1.0), 0.0) / max(count, 1.0)))
    in_pauses = float(weight[of_excerpt & times.is_long[samples.call]].sum()) / samples.stacks.period_ns
    has_samples = count + wait_count >= _MIN_SAMPLES or in_pauses >= _MIN_SAMPLES_IN_PAUSES
    if not has_samples or not times.excess_ns(stacks, 1 - error):
        return None
    launches = float(times.launches[stacks].sum())
    changes = tuple(_remove_excess(share, waits, launches, factor) for factor in (1 - error, 1 + error))
    cpu_ms = float(times.cpu_ns[stacks].sum()) / study.steps / NS_PER_MS
    figures = HostLineFigures(
        excerpt.name,
        not excerpt.lines,
        cpu_ms,
        launches / study.steps,
        times.launch_ns / NS_PER_US,
        float(waits.sum()) / study.steps,
        round(count + wait_count),
    )
    return Candidate(
        HOST_LINE, figures, changes, Place("idle", "host"), idle_causes=_IDLE_CAUSES,
        lines=_list_lines(samples, excerpt, of_excerpt, weight, cpu_ms),
    )  # fmt: skip


def _sum_by(index: Ints, weight: Floats, count: int) -> Floats:
    """Returns the sum of the weights of each index from 0 to ``count`` - 1."""
    return np.bincount(index, weight, count).astype(np.float64)


def _remove_excess(share: Floats, waits: Bools, launches: float, factor: float) -> ReplayChange:
    """Returns a change that removes the waits of a line and its time above the usual time of its launches.

    Args:
        share: shape (calls,), the line's share of the time after each call.
        waits: shape (calls,), True for each call with a wait that is removed.
        launches: the number of launches of the line.
        factor: the line's true time, divided by its time according to the samples.
    """

    def remove_excess(replay: Replay) -> Replay:
        """Returns the steps without the excess."""
        time_ns, usual_ns = share * replay.cpu_ns, launches * replay.median_launch_ns
        excess_share = np.clip(factor - usual_ns / max(float(time_ns.sum()), 1.0), 0.0, 1.0)
        return replay.without_waits(waits).without_cpu_time(time_ns * excess_share)

    return remove_excess


def _list_lines(
    samples: StackSamples, excerpt: _Excerpt, of_excerpt: Bools, weight: Floats, ms: float
) -> tuple[Line, ...]:
    """Returns the lines of an excerpt, and after them the lines that they call, with their parts of the time ``ms``."""
    stacks = samples.stacks
    cut = tuple(frames[excerpt.depth.get(index, 0) :] for index, frames in enumerate(stacks.stacks))
    own_lines = rank_lines(replace(stacks, stacks=cut), samples.stack[of_excerpt], weight[of_excerpt], ms)
    inner_lines = rank_lines(stacks, samples.stack[of_excerpt], weight[of_excerpt], ms)
    places = {line.place for line in own_lines}
    return own_lines + tuple(line for line in inner_lines if line.place not in places)
