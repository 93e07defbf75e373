"""Replays a few steps from what was measured, so that a change can be tried: less work, fewer waits, cheaper launches.

The CPU's side is the sequence of API calls with the time between them; a blocking call ends when the GPU has done what
it waits for. The GPU's side is the work of each stream in its order: a piece starts when the one before it has ended,
its launch has reached the device, and what its stream waits for on another one has ended. What a change does to the
step then follows; nothing is added up that overlaps. (The idea is that of Daydream, Zhu et al., USENIX ATC 2020.)

Several ranks of a run move together: a collective transfers from when its last rank has started it.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Generator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import islice
from typing import Any, TypeAlias

import numpy as np

from nsys_analyzer.trace.arrays import Bools, Floats, Ints

_LONG_AGO = -(2.0**62)
#: Sums in another order differ by less, ns.
_ROUNDING_NS = 0.01
#: Steps of which the second and later ones show how long a step takes.
_FEWEST = 3
#: The columns of calls and of pieces, but for those that are positions.
OF_CALLS = ("after", "own", "lag", "events", "pause", "noted")
OF_PIECES = ("latency", "spacing", "work", "stream", "gap")
#: No capture holds so many collectives.
_MANY = 2**40
#: When each call starts, and one behind the last; when each piece ends, and what came before the first.
_Times: TypeAlias = tuple[Floats, Floats]
#: Yields each collective and when this rank starts it, and is sent when the last rank does.
_Running: TypeAlias = Generator[tuple[int, float], float, _Times]


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
        meets: shape (pieces,), the collective that each takes part in, -1 for none: its ``work`` is from the last
            rank's start on. -2 - n: it takes part in n, and does not wait for others. Empty where these are not known.
        begin: when the first call of each rank starts. The columns hold one rank behind the other, and ``first_call``
            the bounds of each rank's steps.
        on_time: the places of ranks that nobody waits for.
        noted: shape (calls,), the part of ``after`` that the profiler notes as its own; empty where it notes none.
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
    meets: Ints = field(default_factory=lambda: np.zeros(0, np.int64))
    begin: tuple[float, ...] = (0.0,)
    on_time: frozenset[int] = frozenset()
    noted: Floats = field(default_factory=lambda: np.zeros(0))

    @property
    def steps(self) -> int:
        """How many steps there are."""
        return len(self.first_call) // len(self.begin) - 1

    @cached_property
    def ranks(self) -> tuple[Replay, ...]:
        """Each rank by itself."""
        if len(self.begin) == 1:
            return (self,)
        bounds = self.first_call.reshape(len(self.begin), -1)
        return tuple(replace(self.between(*pair), begin=(at,)) for *pair, at in zip(bounds, self.begin, strict=True))

    @property
    def rank_of(self) -> tuple[Ints, Ints]:
        """The place of the rank of each call and of each piece."""
        calls, pieces = (np.array([len(getattr(one, name)) for one in self.ranks]) for name in ("after", "work"))
        places = np.arange(len(self.ranks))
        return np.repeat(places, calls), np.repeat(places, pieces)

    def between(self, first_call: Ints) -> Replay:
        """The steps with these bounds; what was launched before them is over."""
        first, last = int(first_call[0]), int(first_call[-1])
        low, high = np.searchsorted(self.launch, (first, last)).tolist()
        steps = self.without_waits(self.awaited < low)
        columns: dict[str, Any] = {name: getattr(steps, name)[first:last] for name in OF_CALLS}
        columns |= {name: getattr(self, name)[low:high] for name in (*OF_PIECES, "meets")}
        columns["launch"] = self.launch[low:high] - first
        columns["awaited"] = np.maximum(steps.awaited[first:last] - low, -1)
        columns["behind"] = np.maximum(self.behind[low:high] - low, -1)
        return replace(self, **columns, first_call=first_call - first)

    def with_events_costing(self, ns: float) -> Replay:
        """Returns the same steps without the profiler's cost: this much for each event, as far as there is time.

        The time that the profiler notes as its own is removed as well, whatever an event costs.
        """
        after, latency = self.after, self.latency
        if len(self.noted):
            after, latency = after - self.noted, np.maximum(latency - self.noted[self.launch], 0.0)
        after = after - np.minimum(self.events * ns, 0.9 * after)
        pause = np.minimum(self.pause, after)
        return replace(self, after=after, pause=pause, latency=latency, noted=self.noted[:0])

    def at_pace(self, factor: float, unrecorded_ns: Ints) -> Replay:
        """Returns the same steps with the CPU's time times a factor; waits for the GPU's unrecorded work stay."""
        gpu_ns = np.minimum(unrecorded_ns, self.pause)
        return replace(
            self, after=gpu_ns + (self.after - gpu_ns) * factor, pause=gpu_ns + (self.pause - gpu_ns) * factor
        )

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

        One or two steps are looked at as if they came again and again; both of two are then left out once. Of several
        ranks it is the longest one's.
        """
        if self.once:
            return self.total_ns
        return float(self.lengths.mean())

    @cached_property
    def lengths(self) -> Floats:
        """How long each step but the first takes, of the rank of the longest ones; each of one or two steps twice."""
        few = self.steps < _FEWEST
        ranks, left_out = [rank._again() if few else rank for rank in self._awaited], self.steps if few else 1
        pairs = zip(ranks, run_together(ranks), strict=True)
        return max((rank.lengths_of(*times)[left_out:] for rank, times in pairs), key=np.mean)

    @property
    def total_ns(self) -> float:
        """From the first call to the end of all, ns."""
        return max(float(max(starts[-1], done.max())) for starts, done in run_together(self._awaited))

    @property
    def _awaited(self) -> list[Replay]:
        """The ranks that others wait for."""
        return [rank for place, rank in enumerate(self.ranks) if place not in self.on_time]

    def _again(self, times: int = _FEWEST) -> Replay:
        """The same steps again and again."""
        repeated: dict[str, Any] = {name: np.tile(getattr(self, name), times) for name in (*OF_CALLS, *OF_PIECES)}
        calls, pieces = len(self.after), len(self.work)
        for name, count in (("launch", calls), ("awaited", pieces), ("behind", pieces), ("meets", _MANY)):
            values = getattr(self, name)
            shift = np.arange(times)[:, None] * count
            repeated[name] = np.where(values == -1, -1, values + np.where(values >= 0, shift, -shift)).ravel()
        first_call = (self.first_call[:-1] + np.arange(times)[:, None] * len(self.after)).ravel()
        return replace(self, **repeated, first_call=np.append(first_call, times * len(self.after)))

    def lengths_of(self, starts: Floats, done: Floats) -> Floats:
        """How long each step takes, by when each call starts (and one behind the last) and each piece ends.

        A step begins with its first call, or where the GPU has done what came before, if that is later. The last place
        of ``done`` is that of what ran before the first piece.
        """
        return np.diff(np.maximum(starts[self.first_call], self._ends(done)))

    def _ends(self, done: Floats) -> Floats:
        """When the GPU has done what came before each step, and all."""
        reached = np.append(done[-1], np.maximum.accumulate(done[:-1]))
        return reached[np.searchsorted(self.launch, self.first_call)]

    @cached_property
    def before(self) -> Ints:
        """Shape (pieces,), the piece before each on its stream; -1 for the first."""
        return before_on(self.stream)

    def run(self) -> _Running:
        """Runs one rank, which waits for others where they meet: wait by wait, and piece by piece.

        From one wait to the next all calls are shifted alike: each start is an offset and the shift of its segment.
        """
        offsets, waits = np.append(0.0, np.cumsum(self.after)), np.flatnonzero(self.awaited >= 0)
        meets = self.meets if len(self.meets) else np.full(len(self.work), -1)
        joins = np.flatnonzero((self.behind >= 0) | (meets != -1))
        links = zip(*(column[joins].tolist() for column in (self.behind, self.gap, meets)), strict=True)
        joined = dict(zip(joins.tolist(), links, strict=True))
        ready = offsets[self.launch] + self.latency
        pieces = zip(*(one.tolist() for one in (ready, self.before, self.spacing, self.work)), strict=True)
        launched = np.searchsorted(self.launch, waits, side="right")
        calls = (offsets[waits], self.own[waits], self.lag[waits], self.awaited[waits], launched)
        rows = zip(*(column.tolist() for column in calls), strict=True)
        shifts, done, piece = [*self.begin], [_LONG_AGO] * (len(self.work) + 1), 0  # the last: before the first piece
        for offset, own, lag, awaited, upto in (*rows, (0.0, 0.0, 0.0, -1, len(self.work))):
            shift = shifts[-1]
            for earliest, before, spacing, work in islice(pieces, upto - piece):
                start = max(earliest + shift, done[before] + spacing)
                if piece in joined:
                    behind, gap, collective = joined[piece]
                    start = max(start, done[behind] + gap)
                    if collective != -1:
                        start = yield collective, start
                done[piece] = start + work
                piece += 1
            if awaited >= 0:
                shifts.append(max(shift + own, done[awaited] + lag - offset))
        starts = offsets + np.repeat(shifts, np.diff(np.concatenate([[0], waits + 1, [len(offsets)]])))
        return starts, np.array(done)

    def critical_path(self, *, whole: bool = False) -> tuple[Floats, Floats]:
        """The share of each call's ``after`` and of each piece's ``work`` on the critical path of the steps.

        It leads from the end of the last step back to the start of the second, or of the first for the ``whole``: a
        little less of anything else makes no step shorter. The rest of the path is from launches to their start,
        between pieces, and in calls that wait. From a collective it goes back on the rank that started it last.
        """
        ranks, times = self._awaited, run_together(self._awaited)
        of_call, of_piece = [np.zeros(len(rank.after)) for rank in ranks], [np.zeros(len(rank.work)) for rank in ranks]
        waits, sources, lasts = zip(*(rank._sources(*one) for rank, one in zip(ranks, times, strict=True)), strict=True)
        started = sorted((begins, met, at, piece) for at, last in enumerate(lasts) for begins, met, piece in last)
        last_of = {met: (at, piece) for _, met, at, piece in started}
        at = max(range(len(ranks)), key=lambda at: max(times[at][0][-1], times[at][1].max()))
        (starts, done), call = times[at], len(ranks[at].after)
        piece = int(done[:-1].argmax()) if len(done) > 1 and done[:-1].max() > starts[call] else -1
        while True:
            while piece >= 0:
                of_piece[at][piece] = 1.0
                if len(ranks[at].meets):
                    at, piece = last_of.get(int(ranks[at].meets[piece]), (at, piece))
                call, piece = int(ranks[at].launch[piece]), sources[at][piece]
            place = int(np.searchsorted(waits[at], call)) - 1
            of_call[at][waits[at][place] if place >= 0 else 0 : call] = 1.0
            if place < 0:
                break
            piece = int(ranks[at].awaited[waits[at][place]])
        for at, (rank, (starts, done)) in enumerate(zip(ranks, times, strict=True)):
            begun = max(starts[rank.first_call[1]], rank._ends(done)[1]) if rank.steps >= _FEWEST and not whole else 0.0
            of_call[at] = np.clip((starts[1:] - begun) / np.maximum(rank.after, 1.0), 0.0, of_call[at])
            of_piece[at] = np.clip((done[:-1] - begun) / np.maximum(rank.work, 1.0), 0.0, of_piece[at])
        for at in sorted(self.on_time):
            of_call.insert(at, np.zeros(len(self.ranks[at].after)))
            of_piece.insert(at, np.zeros(len(self.ranks[at].work)))
        return np.concatenate(of_call), np.concatenate(of_piece)

    def _sources(self, starts: Floats, done: Floats) -> tuple[Ints, list[int], list[tuple[float, int, int]]]:
        """The calls that end with what they wait for; the piece that each piece follows; those that others wait for.

        A piece that follows none, -1, begins with its launch. Of the last ones it is said when they begin, and in which
        collective.
        """
        waits = np.flatnonzero(self.awaited >= 0)
        gpu_ended = done[self.awaited[waits]] + self.lag[waits] > starts[waits] + self.own[waits]
        begins = done[:-1] - self.work - _ROUNDING_NS
        joined = (self.behind >= 0) & (done[self.behind] + self.gap >= begins)
        follows = done[self.before] + self.spacing >= begins
        last = joined | follows | (starts[self.launch] + self.latency >= begins)
        met = np.flatnonzero((self.meets != -1) & last) if len(self.meets) else np.zeros(0, np.int64)
        sources = np.where(joined, self.behind, np.where(follows, self.before, -1)).tolist()
        return (
            waits[gpu_ended],
            sources,
            [*zip(begins[met].tolist(), met_in(self.meets[met]), met.tolist(), strict=True)],
        )

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

    def with_pauses(self, chosen: Bools, ns: float | Floats) -> Replay:
        """Returns the same steps with pauses of at most ``ns`` behind some calls; it may have shape (calls,)."""
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


def run_together(ranks: Sequence[Replay]) -> list[_Times]:
    """Runs ranks at once: each collective begins to transfer when its last rank has started it."""
    running: list[Any] = [rank.run() for rank in ranks]
    missing = Counter(met for rank in ranks for met in met_in(rank.meets))
    started = defaultdict[int, dict[int, float]](dict)  # by rank, of the collectives that wait for others
    free: set[tuple[int, int]] = set()
    ended: dict[int, _Times] = {}
    ready: list[tuple[int, float | None]] = [(place, None) for place in range(len(ranks))]
    while len(ended) < len(ranks):
        if ready:
            place, begins = ready.pop()
            try:
                met, start = running[place].send(begins)
            except StopIteration as end:
                ended[place] = end.value
                continue
            if met < 0:  # it goes on, and others wait for it
                ready.append((place, start))
                met = -2 - met
                free.add((met, place))
            started[met][place] = start
            missing[met] -= 1
        else:  # two ranks launch two collectives in different orders: the first one goes on without the others
            met = min(started, key=lambda one: max(started[one].values()))
            missing[met] = 0
        if missing[met] <= 0:
            waited = started.pop(met)
            ready += [(place, max(waited.values())) for place in waited if (met, place) not in free]
    return [ended[place] for place in range(len(ranks))]


def met_in(meets: Ints) -> list[int]:
    """The collective of each piece, whether or not it waits for others."""
    collectives: list[int] = np.where(meets >= 0, meets, -2 - meets).tolist()
    return collectives


def before_on(stream: Ints) -> Ints:
    """Shape (pieces,), the piece before each on its stream; -1 for the first."""
    order = np.argsort(stream, kind="stable")
    before = np.full(len(stream), -1)
    before[order[1:]] = np.where(stream[order[1:]] == stream[order[:-1]], order[:-1], -1)
    return before
