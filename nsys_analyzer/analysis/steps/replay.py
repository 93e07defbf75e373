"""Replays a few steps from what was measured, so that a change can be tried: less work, fewer waits, cheaper launches.

The CPU's side is the sequence of API calls with the time between them; a blocking call ends when the GPU has done what
it waits for. The GPU's side is the sequence of its work: each piece starts when the one before it has ended and its
launch has reached the device. What a change does to the step then follows; nothing is added up that overlaps. (The
idea is that of Daydream, Zhu et al., USENIX ATC 2020.)
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from nsys_analyzer.trace.arrays import Bools, Floats, Ints

_LONG_AGO = -(2.0**62)
#: A step of numpy's over all between two waits takes as long as so many calls and pieces one by one.
_AS_LONG = 100
#: Sums in another order differ by less, ns.
_ROUNDING_NS = 0.01
#: Steps of which the second and later ones show how long a step takes.
_FEWEST = 3


@dataclass(frozen=True)
class Replay:
    """The calls and the pieces of GPU work of some steps that follow each other; times in ns.

    Attributes:
        after: shape (calls,), from the start of each call (the end of one that waits) to the start of the next.
        own: shape (calls,), the least that a waiting call takes.
        awaited: shape (calls,), the last piece that each call waits for, -1 for one that does not wait.
        lag: shape (calls,), from that piece's end to the call's.
        launch: shape (pieces,), the call that launched each piece; pieces are in the order in which the GPU ran them.
        latency: shape (pieces,), from the launch to the earliest start.
        spacing: shape (pieces,), from the end of the piece before to the earliest start.
        work: shape (pieces,), ns of GPU work that nothing else hides.
        first_call: shape (steps + 1,), the first call of each step, and the one behind the last.
        events: shape (calls,), what the profiler may have cost at most from each call to the next.
        pause: shape (calls,), the part of ``after`` in which the program does something else than launching: from the
            call's end to the next call, where that is long, else 0. Other calls, or none, leave it as it is.
        once: whether this is one pass, which nothing follows.
    """

    after: Floats
    own: Floats
    awaited: Ints
    lag: Floats
    launch: Ints
    latency: Floats
    spacing: Floats
    work: Floats
    first_call: Ints
    events: Floats
    pause: Floats
    once: bool = False

    @property
    def steps(self) -> int:
        """How many steps there are."""
        return len(self.first_call) - 1

    def with_events_costing(self, ns: float) -> Replay:
        """The same steps without what the profiler adds: so much for each event, as far as there is time to take."""
        after = self.after - np.minimum(self.events * ns, 0.9 * self.after)
        return replace(self, after=after, pause=np.minimum(self.pause, after))

    def at_pace(self, factor: float) -> Replay:
        """The same steps with all of the CPU's time, and nothing of the GPU's, times a factor."""
        return replace(self, after=self.after * factor, pause=self.pause * factor)

    @cached_property
    def step_ns(self) -> float:
        """How long a step takes, ns: from one's end to the next's, without the first, which begins with an idle GPU.

        One or two steps are looked at as if they came again and again; both of two are then left out once.
        """
        starts, done = self._run()
        if self.steps >= _FEWEST:
            return self.mean_ns(starts, done)
        ends = self._ends(done)
        first = last = max(starts[-1], ends[-1])
        if self.once:
            return float(last)
        for _ in range(_FEWEST - 1):
            starts, done = self._run(starts[-1], ends[-1])
            ends = self._ends(done)
            last = max(starts[-1], ends[-1])
        return float(last - first) / (self.steps * (_FEWEST - 1))

    def mean_ns(self, starts: Floats, done: Floats) -> float:
        """How long a step but the first takes, by when each call starts (and one behind the last) and each piece ends.

        A step begins with its first call, or where the GPU has done what came before, if that is later. The last place
        of ``done`` is that of what ran before the first piece.
        """
        bounds = np.maximum(starts[self.first_call], self._ends(done))
        return float(bounds[-1] - bounds[1]) / (self.steps - 1)

    def _ends(self, done: Floats) -> Floats:
        """When the GPU has done what came before each step, and all."""
        launched = np.maximum.accumulate(self.launch) if len(self.launch) else self.launch
        return done[np.searchsorted(launched, self.first_call) - 1]

    def _run(self, begun: float = 0.0, ended: float = _LONG_AGO) -> tuple[Floats, Floats]:
        """When each call starts (and one behind the last), and when each piece ends (and what came before the first).

        Args:
            begun: when the first call starts.
            ended: when the GPU has done all that came before it.
        """
        waits = np.flatnonzero(self.awaited >= 0)
        many = len(waits) * _AS_LONG > len(self.after) + len(self.work)
        return self._one_by_one(waits, begun, ended) if many else self._between_waits(waits, begun, ended)

    def _one_by_one(self, waits: Ints, begun: float, ended: float) -> tuple[Floats, Floats]:
        """Start of each call and end of each piece, wait by wait and piece by piece: where calls wait often.

        From one wait to the next all calls are shifted alike: each start is an offset and the shift of its segment.
        """
        offsets = np.append(0.0, np.cumsum(self.after))
        # A piece runs at the first wait for it or for a later one, and begins no later than that call does.
        run_at = np.append(waits, len(self.after))[
            np.searchsorted(np.maximum.accumulate(self.awaited[waits]), np.arange(len(self.work)))
        ]
        launch = np.minimum(self.launch, run_at)
        earliest = (offsets[launch] + self.latency).tolist()
        segment = np.searchsorted(waits, launch).tolist()
        spacing, work = self.spacing.tolist(), self.work.tolist()
        shifts, done, piece = [begun], list[float](), 0
        columns = (offsets[waits], self.own[waits], self.lag[waits], self.awaited[waits])
        before = ended
        for offset, own, lag, awaited in zip(*(column.tolist() for column in columns), strict=True):
            shift = shifts[-1]
            while piece <= awaited:
                ended = max(ended + spacing[piece], earliest[piece] + shifts[segment[piece]]) + work[piece]
                done.append(ended)
                piece += 1
            shifts.append(max(shift + own, done[awaited] + lag - offset))
        while piece < len(work):
            ended = max(ended + spacing[piece], earliest[piece] + shifts[segment[piece]]) + work[piece]
            done.append(ended)
            piece += 1
        starts = offsets + np.repeat(shifts, np.diff(np.concatenate([[0], waits + 1, [len(offsets)]])))
        return starts, np.array([*done, before])  # the last place is that of the piece before the first

    def _between_waits(self, waits: Ints, begun: float, ended: float) -> tuple[Floats, Floats]:
        """The same, at once for all calls and pieces from one wait to the next."""
        count = len(self.after)
        starts = np.empty(count + 1)
        done = np.empty(len(self.work) + 1)
        done[-1] = ended  # the piece before the first
        offsets = np.append(0.0, np.cumsum(self.after))
        shift, first, piece = begun, 0, 0
        for call in [*waits.tolist(), count]:
            starts[first : call + 1] = offsets[first : call + 1] + shift
            upto = len(self.work) if call == count else int(self.awaited[call]) + 1
            if upto > piece:
                self._advance(done, starts, piece, upto, call)
                piece = upto
            if call < count:
                end = max(starts[call] + self.own[call], done[int(self.awaited[call])] + self.lag[call])
                shift += end - starts[call]
                first = call + 1
        return starts, done

    def _advance(self, done: Floats, starts: Floats, first: int, last: int, call: int) -> None:
        """Runs the pieces from ``first`` to ``last``: each starts behind the one before it and behind its launch."""
        some = slice(first, last)
        ready = starts[np.minimum(self.launch[some], call)] + self.latency[some]
        cost = np.cumsum(self.spacing[some] + self.work[some])
        # end_i = max(end_{i-1} + spacing_i, ready_i) + work_i; both sides less the cumulated cost make one running max.
        earliest = ready + self.work[some] - cost
        earliest[0] = max(earliest[0], done[first - 1])
        done[some] = np.maximum.accumulate(earliest) + cost

    def critical_path(self) -> tuple[Floats, Floats]:
        """The share of each call's ``after`` and of each piece's ``work`` on the critical path of the steps.

        It leads from the end of the last step back to the start of the second: a little less of anything else makes no
        step shorter. The rest of the path is from launches to their start, between pieces, and in calls that wait.
        """
        starts, done = self._run()
        of_call, of_piece = np.zeros(len(self.after)), np.zeros(len(self.work))
        waits = np.flatnonzero(self.awaited >= 0)
        gpu_ended = done[self.awaited[waits]] + self.lag[waits] > starts[waits] + self.own[waits]
        waits = waits[gpu_ended]  # they end with a piece; others take their own time
        follows = done[np.arange(len(self.work)) - 1] + self.spacing >= done[:-1] - self.work - _ROUNDING_NS
        launched = np.flatnonzero(~follows)  # they begin with their launch; others behind the piece before
        call, piece = len(self.after), len(self.work) - 1
        on_gpu = bool(len(self.work)) and done[piece] > starts[call]
        while True:
            if on_gpu:
                place = int(np.searchsorted(launched, piece, side="right")) - 1
                first = int(launched[place]) if place >= 0 else 0
                of_piece[first : piece + 1] = 1.0
                if place < 0:
                    break
                call = min(int(self.launch[first]), call)
            place = int(np.searchsorted(waits, call)) - 1
            of_call[waits[place] if place >= 0 else 0 : call] = 1.0
            if place < 0:
                break
            call, on_gpu = int(waits[place]), True
            piece = int(self.awaited[call])
        begun = max(starts[self.first_call[1]], self._ends(done)[1]) if self.steps >= _FEWEST else 0.0
        calls = np.clip((starts[1:] - begun) / np.maximum(self.after, 1.0), 0.0, of_call)
        return calls, np.clip((done[:-1] - begun) / np.maximum(self.work, 1.0), 0.0, of_piece)

    # --- changes

    def without_waits(self, chosen: Bools) -> Replay:
        """Calls that do not wait any more; each still takes its own time."""
        chosen = chosen & (self.awaited >= 0)
        after = np.where(chosen, self.own + self.after, self.after)
        return replace(self, awaited=np.where(chosen, -1, self.awaited), after=after)

    def without_calls(self, chosen: Bools) -> Replay:
        """Calls that are gone, with the time to the next call, but for a pause."""
        freed = self.without_waits(chosen)
        return replace(freed, after=np.where(chosen, self.pause, freed.after))

    def with_pauses(self, chosen: Bools, ns: float) -> Replay:
        """Pauses of at most so much behind some calls."""
        cut = np.where(chosen, np.maximum(self.pause - ns, 0.0), 0.0)
        return replace(self, after=self.after - cut, pause=self.pause - cut)

    def with_launching(self, factor: Floats, most: float = np.inf) -> Replay:
        """The time from each call to the next times a factor, shape (calls,), pauses left as they are.

        ``most``: what one call saves at most, ns.
        """
        return replace(self, after=self.after - np.minimum((self.after - self.pause) * (1 - factor), most))

    @property
    def launching_ns(self) -> float:
        """What it takes to launch something, from one call to the next: median, ns."""
        launching = (self.after - self.pause)[self.launch]
        return float(np.median(launching)) if len(launching) else 0.0

    def with_work(self, factor: Floats) -> Replay:
        """The work of each piece times a factor, shape (pieces,); a piece without work starts no gap either."""
        return replace(self, work=self.work * factor, spacing=np.where(factor == 0, 0.0, self.spacing))
