"""The lines of the program behind idle time and findings: the sampled stacks that fall into their stretches vote.

The line of a stack is its innermost one that the program's author wrote; what that calls is not his to change.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np

from nsys_analyzer.analysis.intervals import find_overlaps
from nsys_analyzer.analysis.steps.anatomy import reached_before
from nsys_analyzer.analysis.steps.process import CAUSES, ProcessWork, Stretches
from nsys_analyzer.analysis.steps.windows import Windows
from nsys_analyzer.trace.arrays import Floats, Ints, distinct_rows
from nsys_analyzer.trace.columns import SYNCHRONIZE
from nsys_analyzer.trace.schema import NS_PER_MS
from nsys_analyzer.trace.stacks import StackFrame, Stacks

#: Lines that are named, the share that each has at least, and the samples that tell them at least.
_MOST, _LEAST_SHARE, _FEWEST = 3, 0.05, 3
#: Lines of the source that are shown around the first.
_AROUND = 5
#: Code that Python puts into a function of its own, inside the one that holds it.
_INSIDE = re.compile(r"\.<(?:genexpr|listcomp|dictcomp|setcomp|lambda)>")


@dataclass(frozen=True)
class Line:
    """A line of the program, and its part of some time.

    Attributes:
        called_from: file and line of the call of its function, empty where the program does not call it.
        share: of the time in question.
        ms: in a step; None where only the share is known.
        source: the lines around it, with their numbers; of the first line alone.
        loads: whether a process of the data loader is at this line, and its time is the one in question.
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
        """File and line: ``train.py:212``."""
        return f"{self.file}:{self.line}"


class Voters:
    """The sampled stacks of a process, and what its program did meanwhile.

    Attributes:
        stretches: the calls that wait; the pauses and the calls of the allocator in which the device idles; and of
            causes that have none of these the idle time itself.
    """

    def __init__(self, work: ProcessWork, windows: Windows, device: int) -> None:
        self._work, self._stacks = work, work.attributed.trace.stacks[work.process]
        self._windows, self._device = windows, device
        self._start = np.maximum(windows.start, reached_before(windows.end))
        # A device that computes on the CPU has no calls, and is idle for the program's own reasons.
        calls, waiting = work.calls, work.waiting
        is_copy = calls.call[waiting] != SYNCHRONIZE
        waits = Stretches(
            calls.start[waiting], calls.end[waiting],
            np.where(is_copy, CAUSES.index("copy"), CAUSES.index("sync")),
            work.ranges_at(calls.start[waiting]), calls.name[waiting].astype(np.int64),
        )  # fmt: skip
        idle = work.find_idle(windows, device)
        busy = np.isin(idle.cause, [CAUSES.index(cause) for cause in ("allocator", "host", "data")])
        left = Stretches(idle.start, idle.end, idle.cause, idle.range, idle.api).select(~busy)
        # A pause in which the device has work to do delays nothing.
        _, delaying, _, _ = find_overlaps(work.busy.start, work.busy.end, idle.start[busy], idle.end[busy])
        self.stretches = [self._inside(waits), work.busy.select(np.unique(delaying)), left]

    def of_idle(
        self, cause: int, ms: float | None = None, range_: int | None = None, api: int | None = None
    ) -> tuple[Line, ...]:
        """The lines behind the idle time of a cause; of so many ms where they are of one range and API call.

        Else they are of all the time in which the program waits or pauses for this cause.
        """
        chosen = []
        for some in self.stretches:
            mask = some.cause == cause
            if range_ is not None:
                mask &= (some.range == range_) & (some.api == api)
            chosen.append(some.select(np.flatnonzero(mask)))
        one = next(filter(len, chosen), chosen[0])
        if ms is None:
            ms = int((one.end - one.start).sum()) / len(self._windows) / NS_PER_MS
        return self.hottest(one.start, one.end, ms) + (self.of_loader() if CAUSES[cause] == "data" else ())

    def of_calls(self, started: Ints) -> Votes:
        """The samples before each of some calls that follow each other, or in it; by when these start."""
        calls = self._work.calls
        first = int(np.searchsorted(calls.start, started[0]))
        reached = np.maximum.accumulate(calls.end[: first + len(started)])
        start = np.append(started[0] if not first else reached[first - 1], reached[first:-1])
        sample, call, weight = _sampled(self._stacks, np.maximum(start, self._start[0]), reached[first:])
        return Votes(call, self._stacks.stack[sample], weight, self._stacks)

    def of_step(self, ms: float) -> tuple[Line, ...]:
        """The lines at which the program is in a step."""
        return self.hottest(self._start, self._windows.end, ms) + self.of_loader()

    def of_loader(self) -> tuple[Line, ...]:
        """The lines at which a process of the data loader is during the steps."""
        loader = self._stacks.loader
        found = self.hottest(self._start, self._windows.end, stacks=loader) if loader else ()
        return tuple(replace(line, loads=True) for line in found)

    def of_operators(self, ms: float) -> tuple[Line, ...]:
        """The lines at which no operator of a program runs that computes on the CPU."""
        idle = self._work.find_idle(self._windows, self._device)
        return self.hottest(idle.start, idle.end, ms) + self.of_loader()

    def hottest(
        self, start: Ints, end: Ints, ms: float | None = None, stacks: Stacks | None = None
    ) -> tuple[Line, ...]:
        """The lines with most of the samples in some stretches, which do not overlap; none where too few tell them.

        A sample counts for the time to the next one, and for all that it was waited for.
        """
        stacks = stacks or self._stacks
        sample, _, weight = _sampled(stacks, start, end)
        return _ranked(stacks, stacks.stack[sample], weight, ms) if len(np.unique(sample)) >= _FEWEST else ()

    def _inside(self, stretches: Stretches) -> Stretches:
        """The stretches that begin in a step, cut where they overlap."""
        windows = self._windows
        place = np.searchsorted(windows.start, stretches.start, side="right") - 1
        inside = (place >= 0) & (stretches.start < np.append(windows.end, 0)[place])
        chosen = stretches.select(np.flatnonzero(inside))
        start = np.maximum(chosen.start, reached_before(chosen.end))
        return Stretches(start, np.maximum(chosen.end, start), chosen.cause, chosen.range, chosen.api)


@dataclass(frozen=True)
class Votes:
    """Samples of the program's stack while it launches something.

    Attributes:
        call: shape (samples,), the call that the program is before or in; ``stack`` is an index into those of
            ``stacks``, and ``weight`` the time that the sample counts for.
    """

    call: Ints
    stack: Ints
    weight: Floats
    stacks: Stacks

    def of(self, work_ns: Floats, place: Ints, steps: int) -> tuple[Line, ...]:
        """Returns the lines that launched most of some work; none if there are too few samples.

        The work of a call belongs to the samples at its place in a step, or at the nearest place with samples.

        Args:
            work_ns: shape (calls,), the work that each call launched in so many steps.
            place: shape (calls,), the place of each call in its step: the same call has the same place in all steps.
        """
        chosen = work_ns[self.call] > 0
        if chosen.sum() < _FEWEST:
            return ()
        sampled, at = np.unique(place[self.call[chosen]], return_inverse=True)
        behind = np.minimum(np.searchsorted(sampled, place), len(sampled) - 1)
        before = np.maximum(behind - 1, 0)
        nearest = np.where(place - sampled[before] <= sampled[behind] - place, before, behind)
        rate = np.bincount(nearest, work_ns, len(sampled)) / np.bincount(at, self.weight[chosen])
        ms = float(work_ns.sum()) / steps / NS_PER_MS
        return _ranked(self.stacks, self.stack[chosen], self.weight[chosen] * rate[at], ms)


def _ranked(stacks: Stacks, stack: Ints, weight: Floats, ms: float | None = None) -> tuple[Line, ...]:
    """The lines of samples with these stacks, the hottest first."""
    by_line: dict[StackFrame, dict[str, float]] = {}
    used, place = np.unique(stack, return_inverse=True)
    for one, ns in zip(used.tolist(), np.bincount(place, weight).tolist(), strict=True):
        if frames := stacks.stacks[one]:
            callers = by_line.setdefault(_plain(frames[0]), {})
            caller = _caller(frames)
            callers[caller] = callers.get(caller, 0.0) + ns
    ranked = sorted(by_line, key=lambda frame: -sum(by_line[frame].values()))[:_MOST]
    total = float(weight.sum())
    found: list[Line] = []
    for frame in ranked:
        callers = by_line[frame]
        share = sum(callers.values()) / total
        if share >= _LEAST_SHARE:
            source = () if found else tuple(_source(frame, stacks))
            caller = max(callers, key=lambda one: callers[one])
            found.append(Line(*frame, caller, share, None if ms is None else share * ms, source))
    return tuple(found)


def hottest_stacks(stacks: Stacks, start: Ints, end: Ints) -> tuple[Ints, tuple[tuple[StackFrame, ...], ...]]:
    """The stack with most of the samples in each stretch: its code, and the stacks by their codes; 0 has no line."""
    codes: dict[tuple[StackFrame, ...], int] = {(): 0}
    code = np.array([codes.setdefault(frames, len(codes)) for frames in stacks.stacks], np.int64)
    sample, stretch, weight = _sampled(stacks, start, end)
    sampled = code[stacks.stack[sample]]
    first, pair = distinct_rows(stretch, sampled)
    rising = first[np.argsort(np.bincount(pair, weight, len(first)), kind="stable")]
    hottest = np.zeros(len(start), np.int64)
    hottest[stretch[rising]] = sampled[rising]  # of several the last stays
    return hottest, tuple(codes)


def _sampled(stacks: Stacks, start: Ints, end: Ints) -> tuple[Ints, Ints, Floats]:
    """The samples in stretches that do not overlap: which sample, in which stretch, and the time that it counts for."""
    sample, stretch, low, high = find_overlaps(
        start, end, np.minimum(stacks.requested, stacks.sampled - 1), stacks.sampled
    )
    return sample, stretch, (high - low + stacks.period_ns * (high == stacks.sampled[sample])).astype(np.float64)


def _source(frame: StackFrame, stacks: Stacks) -> Iterator[str]:
    text = stacks.source.get(frame.file, {})
    for number in range(frame.line - _AROUND, frame.line + _AROUND + 1):
        if number in text:
            yield f"{'>' if number == frame.line else ' '} {number:>4} {text[number]}"


def _plain(frame: StackFrame) -> StackFrame:
    """The frame in the function that its author named."""
    return frame._replace(function=_INSIDE.sub("", frame.function))


def _caller(frames: tuple[StackFrame, ...]) -> str:
    """Where the program calls the function of a stack's innermost line; empty where it does not."""
    here = _plain(frames[0])
    outside = (one for one in frames[1:] if _plain(one)[::2] != here[::2])
    caller = next(outside, None)
    return f"{caller.file}:{caller.line}" if caller else ""
