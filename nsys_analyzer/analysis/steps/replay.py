"""Replays a few steps from what was measured, so that a change can be tried: less work, fewer waits, cheaper launches.

The CPU's side is the sequence of API calls with the time between them; a blocking call ends when the GPU has done what
it waits for. The GPU's side is the work of each stream in its order: a piece starts when the one before it has ended,
its launch has reached the device, and what its stream waits for on another one has ended. What a change does to the
step then follows; nothing is added up that overlaps. (The idea is that of Daydream, Zhu et al., USENIX ATC 2020.)
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from itertools import islice
from typing import Any

import numpy as np

from nsys_analyzer.trace.arrays import Bools, Floats, Ints

_LONG_AGO = -(2.0**62)
#: A step of numpy's over all between two waits takes as long as so many calls and pieces one by one.
_AS_LONG = 100
#: Sums in another order differ by less, ns.
_ROUNDING_NS = 0.01
#: Steps of which the second and later ones show how long a step takes.
_FEWEST = 3
#: The columns of which a step that comes again has the same values.
_OF_EACH = ("after", "own", "lag", "latency", "spacing", "work", "events", "pause", "stream", "gap")


@dataclass(frozen=True)
class Replay:
    """The calls and the pieces of GPU work of some steps that follow each other; times in ns.

    Attributes:
        after: shape (calls,), from the start of each call (the end of one that waits) to the start of the next.
        own: shape (calls,), the least that a waiting call takes.
        awaited: shape (calls,), the last piece that each call waits for, -1 for one that does not wait.
        lag: shape (calls,), from that piece's end to the call's.
        launch: shape (pieces,), the call that launched each piece; pieces are in the order of their launches.
        latency: shape (pieces,), from the launch to the earliest start.
        spacing: shape (pieces,), from the end of the piece before on its stream to the earliest start; below zero where
            both overlapped.
        work: shape (pieces,), ns from its start to its end.
        first_call: shape (steps + 1,), the first call of each step, and the one behind the last.
        events: shape (calls,), what the profiler may have cost at most from each call to the next.
        pause: shape (calls,), the part of ``after`` in which the program does something else than launching: from the
            call's end to the next call, where that is long, else 0. Other calls, or none, leave it as it is.
        stream: shape (pieces,), code of the stream that each runs on.
        behind: shape (pieces,), an earlier piece of another stream that each starts behind, -1 for none.
        gap: shape (pieces,), from the end of that piece to the earliest start.
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
    stream: Ints
    behind: Ints
    gap: Floats
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

    def with_graph_launches(self, ns: float, node_ns: float) -> Replay:
        """The same steps as if no profiler recorded the nodes of CUDA graphs.

        A graph's launch takes ``ns`` at most, and the pause before each node is ``node_ns`` shorter.
        """
        is_graph = np.bincount(self.launch, minlength=len(self.after)) > 1
        cost = np.where(is_graph, np.maximum(self.after - self.pause - ns, 0.0), 0.0)
        return replace(
            self,
            after=self.after - cost,
            latency=np.maximum(self.latency - cost[self.launch], 0.0),
            spacing=self.spacing - np.where(is_graph[self.launch], np.clip(self.spacing, 0.0, node_ns), 0.0),
        )

    @cached_property
    def step_ns(self) -> float:
        """How long a step takes, ns: from one's end to the next's, without the first, which begins with an idle GPU.

        One or two steps are looked at as if they came again and again; both of two are then left out once.
        """
        if self.once:
            return self.total_ns
        steps, left_out = (self, 1) if self.steps >= _FEWEST else (self._again(_FEWEST), self.steps)
        return steps.mean_ns(*steps._run(), left_out)

    @property
    def total_ns(self) -> float:
        """From the first call to the end of all, ns."""
        starts, done = self._run()
        return float(max(starts[-1], done.max()))

    def _again(self, times: int) -> Replay:
        """The same steps again and again."""
        repeated: dict[str, Any] = {name: np.tile(getattr(self, name), times) for name in _OF_EACH}
        for name, count in (("launch", len(self.after)), ("awaited", len(self.work)), ("behind", len(self.work))):
            values = getattr(self, name)
            shifted = values + np.arange(times)[:, None] * count
            repeated[name] = np.where(values >= 0, shifted, -1).ravel()
        first_call = (self.first_call[:-1] + np.arange(times)[:, None] * len(self.after)).ravel()
        return replace(self, **repeated, first_call=np.append(first_call, times * len(self.after)))

    def mean_ns(self, starts: Floats, done: Floats, left_out: int = 1) -> float:
        """How long a step but the first takes, by when each call starts (and one behind the last) and each piece ends.

        A step begins with its first call, or where the GPU has done what came before, if that is later. The last place
        of ``done`` is that of what ran before the first piece; ``left_out`` is the number of the first steps.
        """
        bounds = np.maximum(starts[self.first_call], self._ends(done))
        return float(bounds[-1] - bounds[left_out]) / (self.steps - left_out)

    def _ends(self, done: Floats) -> Floats:
        """When the GPU has done what came before each step, and all."""
        reached = np.append(done[-1], np.maximum.accumulate(done[:-1]))
        return reached[np.searchsorted(self.launch, self.first_call)]

    @cached_property
    def before(self) -> Ints:
        """Shape (pieces,), the piece before each on its stream; -1 for the first."""
        return before_on(self.stream)

    def _run(self) -> tuple[Floats, Floats]:
        """When each call starts, and one behind the last; when each piece ends, and what came before the first."""
        waits, joins = np.flatnonzero(self.awaited >= 0), np.flatnonzero(self.behind >= 0)
        many = (len(waits) + len(joins)) * _AS_LONG > len(self.after) + len(self.work)
        return self._one_by_one(waits) if many else self._between_waits(waits, joins)

    def _one_by_one(self, waits: Ints) -> tuple[Floats, Floats]:
        """Start of each call and end of each piece, wait by wait and piece by piece: where calls wait often.

        From one wait to the next all calls are shifted alike: each start is an offset and the shift of its segment.
        """
        offsets = np.append(0.0, np.cumsum(self.after))
        segment = np.searchsorted(waits, self.launch)
        shifts, done, piece = [0.0], [_LONG_AGO] * (len(self.work) + 1), 0  # the last place: what came before the first
        columns = zip(
            (offsets[self.launch] + self.latency).tolist(), self.before.tolist(), self.spacing.tolist(),
            self.behind.tolist(), self.gap.tolist(), self.work.tolist(), strict=True,
        )  # fmt: skip
        calls = (
            offsets[waits],
            self.own[waits],
            self.lag[waits],
            self.awaited[waits],
            np.searchsorted(segment, np.arange(len(waits)), side="right"),
        )
        rows = zip(*(column.tolist() for column in calls), strict=True)
        for offset, own, lag, awaited, upto in (*rows, (0.0, 0.0, 0.0, -1, len(self.work))):
            shift = shifts[-1]
            for earliest, before, spacing, behind, gap, work in islice(columns, upto - piece):
                start = max(earliest + shift, done[before] + spacing)
                if behind >= 0:
                    start = max(start, done[behind] + gap)
                done[piece] = start + work
                piece += 1
            if awaited >= 0:
                shifts.append(max(shift + own, done[awaited] + lag - offset))
        starts = offsets + np.repeat(shifts, np.diff(np.concatenate([[0], waits + 1, [len(offsets)]])))
        return starts, np.array(done)

    def _between_waits(self, waits: Ints, joins: Ints) -> tuple[Floats, Floats]:
        """The same, at once for all calls and pieces from one wait, or wait of a stream for another, to the next."""
        count = len(self.after)
        starts = np.empty(count + 1)
        done = np.full(len(self.work) + 1, _LONG_AGO)  # the last place is that of what came before the first
        offsets = np.append(0.0, np.cumsum(self.after))
        shift, first, piece = 0.0, 0, 0
        launched = np.searchsorted(self.launch, waits, side="right")
        for call, upto in zip([*waits.tolist(), count], [*launched.tolist(), len(self.work)], strict=True):
            starts[first : call + 1] = offsets[first : call + 1] + shift
            inside = joins[np.searchsorted(joins, piece, side="right") : np.searchsorted(joins, upto)]
            for last in (*inside.tolist(), upto):
                self._advance(done, starts, piece, last)
                piece = last
            if call < count:
                end = max(starts[call] + self.own[call], done[int(self.awaited[call])] + self.lag[call])
                shift += end - starts[call]
                first = call + 1
        return starts, done

    def _advance(self, done: Floats, starts: Floats, first: int, last: int) -> None:
        """Runs the pieces from ``first`` to ``last``, of which the first alone may wait for another stream."""
        streams = self.stream[first:last]
        alone = not (streams[1:] != streams[:-1]).any()
        for stream in streams[:1] if alone else np.unique(streams):
            some = slice(first, last) if alone else first + np.flatnonzero(streams == stream)
            ready = starts[self.launch[some]] + self.latency[some]
            if stream == streams[0] and self.behind[first] >= 0:
                ready[0] = max(ready[0], done[self.behind[first]] + self.gap[first])
            cost = np.cumsum(self.spacing[some] + self.work[some])
            # end_i = max(end_{i-1} + spacing_i, ready_i) + work_i: less the cumulated cost, one running maximum.
            earliest = ready + self.work[some] - cost
            earliest[0] = max(earliest[0], done[self.before[some][0]])
            done[some] = np.maximum.accumulate(earliest) + cost

    def critical_path(self, *, whole: bool = False) -> tuple[Floats, Floats]:
        """The share of each call's ``after`` and of each piece's ``work`` on the critical path of the steps.

        It leads from the end of the last step back to the start of the second, or of the first for the ``whole``: a
        little less of anything else makes no step shorter. The rest of the path is from launches to their start,
        between pieces, and in calls that wait.
        """
        starts, done = self._run()
        of_call, of_piece = np.zeros(len(self.after)), np.zeros(len(self.work))
        waits = np.flatnonzero(self.awaited >= 0)
        gpu_ended = done[self.awaited[waits]] + self.lag[waits] > starts[waits] + self.own[waits]
        waits = waits[gpu_ended]  # they end with a piece; others take their own time
        begins = done[:-1] - self.work - _ROUNDING_NS
        joined = (self.behind >= 0) & (done[self.behind] + self.gap >= begins)
        follows = done[self.before] + self.spacing >= begins
        # The piece that each one follows, -1 for those that begin with their launch.
        source = np.where(joined, self.behind, np.where(follows, self.before, -1)).tolist()
        call = len(self.after)
        piece = int(done[:-1].argmax()) if len(self.work) and done[:-1].max() > starts[call] else -1
        while True:
            while piece >= 0:
                of_piece[piece] = 1.0
                call, piece = int(self.launch[piece]), source[piece]
            place = int(np.searchsorted(waits, call)) - 1
            of_call[waits[place] if place >= 0 else 0 : call] = 1.0
            if place < 0:
                break
            piece = int(self.awaited[waits[place]])
        begun = max(starts[self.first_call[1]], self._ends(done)[1]) if self.steps >= _FEWEST and not whole else 0.0
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


def before_on(stream: Ints) -> Ints:
    """Shape (pieces,), the piece before each on its stream; -1 for the first."""
    order = np.argsort(stream, kind="stable")
    before = np.full(len(stream), -1)
    before[order[1:]] = np.where(stream[order[1:]] == stream[order[:-1]], order[:-1], -1)
    return before
