"""Replays a few recorded steps to estimate the effect of a change: less work, fewer waits, or shorter launches.

The CPU is modeled as a sequence of API calls with the time between them. A blocking call ends when the GPU has done the
work that the call waits for. The GPU is modeled as a sequence of operations on each stream. An operation starts when
the previous operation on its stream has ended, its launch has reached the device, and the work of another stream that
it waits for has ended. A replay computes the length of the changed step, so overlapping savings are never counted
twice. This method is that of Daydream (Zhu et al., USENIX ATC 2020).

The ranks of a run are replayed together: a collective transfers data only after its last rank has started it.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Generator, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import islice
from typing import Any, NamedTuple, TypeAlias

import numpy as np

from nsys_analyzer.analysis.intervals import NONE
from nsys_analyzer.trace.arrays import Bools, Floats, Ints

_LONG_AGO = -(2.0**62)
#: Two start times that differ by less than this count as equal, ns, because they may differ by rounding.
_ROUNDING_NS = 0.01
#: A replay of at least this many steps leaves out the first step, because it begins with an idle GPU.
MIN_STEPS = 3
#: The offset between the collective numbers of two repetitions of a step. No capture has this many collectives.
_COLLECTIVE_NUMBERS_PER_REPETITION = 2**40
#: Columns of ``Replay`` with a value for each call, except ``awaited``, which contains indices.
CALL_COLUMNS = ("cpu_ns", "min_wait_ns", "return_ns", "max_profiler_ns", "pause_ns", "profiler_work_ns")
#: Columns of ``Replay`` that ``without_profiler_cost`` changes.
COST_COLUMNS = ("cpu_ns", "pause_ns", "latency_ns", "profiler_work_ns")
#: Columns of ``Replay`` with a value for each operation, except ``launch`` and ``joined``, which contain indices.
OPERATION_COLUMNS = ("latency_ns", "spacing_ns", "work_ns", "stream", "join_gap_ns")
#: Columns of ``Replay`` that are empty if the collectives of a run's ranks are not matched.
COLLECTIVE_COLUMNS = ("collective", "waits_for_ranks")


class CollectiveArrival(NamedTuple):
    """The arrival of a rank at a collective: the start of the rank's operation in it.

    Attributes:
        collective: the number of the collective.
        start_ns: the time at which the rank starts its operation, ns.
        waits: whether the rank waits for the other ranks of the collective.
    """

    collective: int
    start_ns: float
    waits: bool


class ReplayedTimes(NamedTuple):
    """The times that the replay of one rank has computed, ns.

    Attributes:
        call_starts: shape (calls + 1,), the start of each call, and the end of the time after the last call.
        operation_ends: shape (operations + 1,), the end of each operation. The last value is the end of the work before
            the first operation, which the index ``NONE`` (-1) selects.
    """

    call_starts: Floats
    operation_ends: Floats


#: The replay of one rank. It yields each arrival at a collective, and receives the time at which the collective begins.
_ReplayGenerator: TypeAlias = Generator[CollectiveArrival, float, ReplayedTimes]


class _Limits(NamedTuple):
    """The dependencies that determined the times of a replayed rank.

    Attributes:
        waits: the indices of the calls that waited for work of the GPU.
        limiting_operation: for each operation, the index of the operation whose end determined its start, or ``NONE``
            if its launch determined the start.
        arrivals: (start, collective, index) of each operation of a collective that did not wait for other ranks.
    """

    waits: Ints
    limiting_operation: list[int]
    arrivals: list[tuple[float, int, int]]


@dataclass(frozen=True)
class Replay:
    """The API calls and the GPU operations of a few consecutive steps.

    A column has the shape (calls,) or (operations,). In a column of indices, ``NONE`` stands for a missing call or
    operation. Operations are in the order of their launches. If several ranks are replayed together, the columns of the
    ranks are concatenated.

    Attributes:
        cpu_ns: for each call, the time from its start to the start of the next call. If the call waits, the time begins
            at the end of the wait.
        min_wait_ns: for each call that waits, the shortest time that the call takes.
        awaited: for each call, the index of the last operation that the call waits for.
        return_ns: for each call that waits, the time from the end of the awaited operation to the end of the call.
        launch: for each operation, the index of the call that launched the operation.
        latency_ns: for each operation, the time from its launch to its earliest start.
        spacing_ns: for each operation, the time from the end of the previous operation on its stream to its earliest
            start. The time is negative if both operations overlapped.
        work_ns: for each operation, its duration. If the operation takes part in a collective, the duration begins when
            the last rank has started the collective.
        first_call: shape (ranks · (steps + 1),), the index of the first call of each step, and the index after the last
            call of the last step, for each rank.
        max_profiler_ns: for each call, the upper bound of the time that the profiler added to ``cpu_ns``.
        pause_ns: for each call, the part of ``cpu_ns`` in which the program pauses: the time from the end of the call
            to the next call if this time is long, else 0. Shorter launches do not shorten a pause.
        stream: for each operation, a code of its stream.
        joined: for each operation, the index of an earlier operation on another stream that the operation waits for.
        join_gap_ns: for each operation, the time from the end of the joined operation to the operation's earliest
            start.
        is_single_pass: whether the replay contains a single pass, which is not repeated, instead of steps of a loop.
        collective: for each operation, the number of the collective that the operation takes part in.
        waits_for_ranks: for each operation, whether the operation waits for the other ranks of its collective. An
            operation that sends data may start before another rank receives the data.
        rank_begin_ns: for each rank, the start of its first call, ns.
        unawaited_ranks: the indices of the ranks that no other rank waits for.
        profiler_work_ns: for each call, the part of ``cpu_ns`` that the profiler recorded as its own work. The column
            is empty if the profiler recorded no work of its own.
        least_step_ns: the time that another thread of the program, which is not replayed, needs for each step, ns. A
            step takes at least this time.
    """

    cpu_ns: Floats
    min_wait_ns: Floats
    awaited: Ints
    return_ns: Floats
    launch: Ints
    latency_ns: Floats
    spacing_ns: Floats
    work_ns: Floats
    first_call: Ints
    max_profiler_ns: Floats
    pause_ns: Floats
    stream: Ints
    joined: Ints
    join_gap_ns: Floats
    is_single_pass: bool = False
    collective: Ints = field(default_factory=lambda: np.zeros(0, np.int64))
    waits_for_ranks: Bools = field(default_factory=lambda: np.zeros(0, np.bool_))
    rank_begin_ns: tuple[float, ...] = (0.0,)
    unawaited_ranks: frozenset[int] = frozenset()
    profiler_work_ns: Floats = field(default_factory=lambda: np.zeros(0))
    least_step_ns: float = 0.0

    @property
    def steps(self) -> int:
        """Returns the number of steps."""
        return len(self.first_call) // len(self.rank_begin_ns) - 1

    @cached_property
    def ranks(self) -> tuple[Replay, ...]:
        """Returns one replay for each rank of the replayed run."""
        if len(self.rank_begin_ns) == 1:
            return (self,)
        rows = zip(self.first_call.reshape(len(self.rank_begin_ns), -1), self.rank_begin_ns, strict=True)
        return tuple(replace(self.select_steps(bounds), rank_begin_ns=(begin_ns,)) for bounds, begin_ns in rows)

    @property
    def rank_of(self) -> tuple[Ints, Ints]:
        """Returns the index of each call's rank, and of each operation's rank."""
        indices = np.arange(len(self.ranks))
        call_counts = [len(rank.cpu_ns) for rank in self.ranks]
        return np.repeat(indices, call_counts), np.repeat(indices, [len(rank.work_ns) for rank in self.ranks])

    def select_steps(self, first_call: Ints) -> Replay:
        """Returns a replay of consecutive steps of this replay.

        Calls of the selected steps do not wait for work that was launched before these steps.

        Args:
            first_call: shape (steps + 1,), the index of the first call of each step, and the end of the last step.
        """
        first, last = int(first_call[0]), int(first_call[-1])
        low, high = np.searchsorted(self.launch, (first, last)).tolist()
        steps = self.without_waits(self.awaited < low)
        columns: dict[str, Any] = {name: getattr(steps, name)[first:last] for name in CALL_COLUMNS}
        columns |= {name: getattr(self, name)[low:high] for name in (*OPERATION_COLUMNS, *COLLECTIVE_COLUMNS)}
        columns["launch"] = self.launch[low:high] - first
        columns["awaited"] = np.maximum(steps.awaited[first:last] - low, NONE)
        columns["joined"] = np.maximum(self.joined[low:high] - low, NONE)
        return replace(self, **columns, first_call=first_call - first)

    # --- times

    @cached_property
    def step_ns(self) -> float:
        """Returns the mean length of a step, ns: from the end of one step to the end of the next step.

        The first step is left out of the mean, because it begins with an idle GPU. A replay of only one or two recorded
        steps runs them several times and gives each of them the same weight. In a replay of several ranks, the slowest
        rank determines the length.
        """
        if self.is_single_pass:
            return max(self.total_ns, self.least_step_ns)
        return max(float(self.lengths_ns.mean()), self.least_step_ns)

    @cached_property
    def lengths_ns(self) -> Floats:
        """Returns the length on the slowest rank of each step except the first step, ns.

        If there are only one or two steps, these are the lengths of their repetitions.
        """
        is_short = self.steps < MIN_STEPS
        ranks = [rank._repeat() if is_short else rank for rank in self._awaited_ranks]
        first = self.steps if is_short else 1
        pairs = zip(ranks, replay_ranks(ranks), strict=True)
        return max((rank.step_lengths_ns(run)[first:] for rank, run in pairs), key=np.mean)

    @property
    def total_ns(self) -> float:
        """Returns the time from the first call to the end of all work of all ranks, ns."""
        runs = replay_ranks(self._awaited_ranks)
        return max(float(max(run.call_starts[-1], run.operation_ends.max())) for run in runs)

    @property
    def median_launch_ns(self) -> float:
        """Returns the median time that the CPU needs for a launch, from the call to the next call, ns."""
        launching_ns = (self.cpu_ns - self.pause_ns)[self.launch]
        return float(np.median(launching_ns)) if len(launching_ns) else 0.0

    def step_lengths_ns(self, run: ReplayedTimes) -> Floats:
        """Returns the length of each step, ns, shape (steps,).

        A step begins with its first call, or when the GPU has done the work of all earlier steps, whichever is later.
        """
        return np.diff(np.maximum(run.call_starts[self.first_call], self._earlier_work_ends(run.operation_ends)))

    @property
    def _awaited_ranks(self) -> list[Replay]:
        """Returns the ranks that other ranks wait for."""
        return [rank for position, rank in enumerate(self.ranks) if position not in self.unawaited_ranks]

    def _repeat(self) -> Replay:
        """Returns a replay in which these steps are repeated ``MIN_STEPS`` times."""
        names = (*CALL_COLUMNS, *OPERATION_COLUMNS, "waits_for_ranks")
        repeated_columns: dict[str, Any] = {name: np.tile(getattr(self, name), MIN_STEPS) for name in names}
        calls, operations = len(self.cpu_ns), len(self.work_ns)
        offsets = {"launch": calls, "awaited": operations, "joined": operations}
        offsets["collective"] = _COLLECTIVE_NUMBERS_PER_REPETITION
        repetitions = np.arange(MIN_STEPS)[:, None]
        for name, offset in offsets.items():
            indices = getattr(self, name)
            repeated_columns[name] = np.where(indices == NONE, NONE, indices + repetitions * offset).ravel()
        first_call = (self.first_call[:-1] + repetitions * calls).ravel()
        return replace(self, **repeated_columns, first_call=np.append(first_call, MIN_STEPS * calls))

    def _earlier_work_ends(self, operation_ends: Floats) -> Floats:
        """Returns the end of the work that was launched before each step, and the end of all work; ns."""
        latest_end = np.append(operation_ends[-1], np.maximum.accumulate(operation_ends[:-1]))
        return latest_end[np.searchsorted(self.launch, self.first_call)]

    @cached_property
    def previous_operation(self) -> Ints:
        """Returns the index of the previous operation on each operation's stream, or ``NONE``; shape (operations,)."""
        return find_previous_on_stream(self.stream)

    def run(self) -> _ReplayGenerator:
        """Replays one rank: yields each arrival at a collective, and receives the time at which the collective begins.

        The calls are divided into segments, each of which ends with a call that waits. The offset of a call is its
        start if no call waits. Waits delay all calls of a segment equally, so the start of a call is its offset plus
        the shift of its segment.
        """
        offsets, waits = np.append(0.0, np.cumsum(self.cpu_ns)), np.flatnonzero(self.awaited >= 0)
        collective = self.collective if len(self.collective) else np.full(len(self.work_ns), NONE)
        waits_for_ranks = self.waits_for_ranks if len(self.collective) else np.ones(len(self.work_ns), np.bool_)
        linked_operations = np.flatnonzero((self.joined != NONE) | (collective != NONE))
        links = _rows(linked_operations, self.joined, self.join_gap_ns, collective, waits_for_ranks)
        link_of_operation = dict(zip(linked_operations.tolist(), links, strict=True))
        earliest_starts = offsets[self.launch] + self.latency_ns
        operations = _rows(slice(None), earliest_starts, self.previous_operation, self.spacing_ns, self.work_ns)
        launched_count = np.searchsorted(self.launch, np.arange(len(self.cpu_ns)), side="right")
        segments = _rows(waits, offsets, self.min_wait_ns, self.return_ns, self.awaited, launched_count)
        last_segment = (0.0, 0.0, 0.0, NONE, len(self.work_ns))
        shifts, operation_ends, operation = [*self.rank_begin_ns], [_LONG_AGO] * (len(self.work_ns) + 1), 0
        for offset, min_wait, return_ns, awaited, end_operation in (*segments, last_segment):
            shift = shifts[-1]
            for earliest_start, previous_operation, spacing, work in islice(operations, end_operation - operation):
                launched, start = earliest_start + shift, operation_ends[previous_operation] + spacing
                if launched > start:  # calls of max() would take a fifth of the time of a long replay
                    start = launched
                if operation in link_of_operation:
                    joined, gap, collective_of_operation, waits_for_others = link_of_operation[operation]
                    start = max(start, operation_ends[joined] + gap)
                    if collective_of_operation != NONE:
                        start = yield CollectiveArrival(collective_of_operation, start, waits_for_others)
                operation_ends[operation] = start + work
                operation += 1
            if awaited != NONE:
                shifts.append(max(shift + min_wait, operation_ends[awaited] + return_ns - offset))
        calls_of_segment = np.diff(np.concatenate([[0], waits + 1, [len(offsets)]]))
        return ReplayedTimes(offsets + np.repeat(shifts, calls_of_segment), np.array(operation_ends))

    # --- the critical path

    def critical_path(self, *, from_start: bool = False) -> tuple[Floats, Floats]:
        """Returns the share of each call's ``cpu_ns`` and of each operation's ``work_ns`` on the critical path.

        The path leads from the end of the last step back to the start of the second step, or of the first step if
        ``from_start`` is True. If a call or operation is not on the path, shortening it a little does not shorten a
        step. The path also contains the time from launches to starts of operations, between operations, and in calls
        that wait. At a collective, the path continues on the rank that started the collective last.
        """
        ranks = self._awaited_ranks
        runs = replay_ranks(ranks)
        limits = [rank._find_limits(run) for rank, run in zip(ranks, runs, strict=True)]
        call_shares = [np.zeros(len(rank.cpu_ns)) for rank in ranks]
        operation_shares = [np.zeros(len(rank.work_ns)) for rank in ranks]
        arrivals = sorted(
            (start, collective, position, operation)
            for position, limit in enumerate(limits)
            for start, collective, operation in limit.arrivals
        )
        last_arrival = {collective: (position, operation) for _, collective, position, operation in arrivals}
        # The path starts from the latest end of all ranks: that of the last operation, or of the time after the last
        # call.
        current_rank = max(
            range(len(ranks)), key=lambda rank: max(runs[rank].call_starts[-1], runs[rank].operation_ends.max())
        )
        operation_ends, call = runs[current_rank].operation_ends[:-1], len(ranks[current_rank].cpu_ns)
        ends_on_gpu = len(operation_ends) > 0 and operation_ends.max() > runs[current_rank].call_starts[call]
        operation = int(operation_ends.argmax()) if ends_on_gpu else NONE
        while True:
            # Follow the GPU's work back to an operation whose launch determined its start.
            while operation != NONE:
                operation_shares[current_rank][operation] = 1.0
                rank = ranks[current_rank]
                if len(rank.collective) and rank.waits_for_ranks[operation]:
                    collective = int(rank.collective[operation])
                    current_rank, operation = last_arrival.get(collective, (current_rank, operation))
                call = int(ranks[current_rank].launch[operation])
                operation = limits[current_rank].limiting_operation[operation]
            # Follow the CPU back to the last call that waited for the GPU.
            waits = limits[current_rank].waits
            position = int(np.searchsorted(waits, call)) - 1
            call_shares[current_rank][waits[position] if position >= 0 else 0 : call] = 1.0
            if position < 0:
                break
            operation = int(ranks[current_rank].awaited[waits[position]])
        for current_rank, (rank, run) in enumerate(zip(ranks, runs, strict=True)):
            begin = 0.0
            if rank.steps >= MIN_STEPS and not from_start:
                begin = max(run.call_starts[rank.first_call[1]], rank._earlier_work_ends(run.operation_ends)[1])
            cpu_share = (run.call_starts[1:] - begin) / np.maximum(rank.cpu_ns, 1.0)
            work_share = (run.operation_ends[:-1] - begin) / np.maximum(rank.work_ns, 1.0)
            call_shares[current_rank] = np.clip(cpu_share, 0.0, call_shares[current_rank])
            operation_shares[current_rank] = np.clip(work_share, 0.0, operation_shares[current_rank])
        for position in sorted(self.unawaited_ranks):
            call_shares.insert(position, np.zeros(len(self.ranks[position].cpu_ns)))
            operation_shares.insert(position, np.zeros(len(self.ranks[position].work_ns)))
        return np.concatenate(call_shares), np.concatenate(operation_shares)

    def _find_limits(self, run: ReplayedTimes) -> _Limits:
        """Finds the dependencies that determined when each call and each operation of this rank could continue."""
        call_starts, operation_ends = run
        waits = np.flatnonzero(self.awaited >= 0)
        gpu_done_ns = operation_ends[self.awaited[waits]] + self.return_ns[waits]
        starts = operation_ends[:-1] - self.work_ns - _ROUNDING_NS
        is_delayed_by_join = (self.joined != NONE) & (operation_ends[self.joined] + self.join_gap_ns >= starts)
        is_delayed_by_stream = operation_ends[self.previous_operation] + self.spacing_ns >= starts
        is_delayed_by_launch = call_starts[self.launch] + self.latency_ns >= starts
        limiting_operation = np.where(
            is_delayed_by_join, self.joined, np.where(is_delayed_by_stream, self.previous_operation, NONE)
        )
        arrivals: list[tuple[float, int, int]] = []
        if len(self.collective):
            last_arrivals = np.flatnonzero(
                (self.collective != NONE) & (is_delayed_by_join | is_delayed_by_stream | is_delayed_by_launch)
            )
            arrivals = [*_rows(last_arrivals, starts, self.collective, np.arange(len(starts)))]
        is_limited = gpu_done_ns > call_starts[waits] + self.min_wait_ns[waits]
        return _Limits(waits[is_limited], limiting_operation.tolist(), arrivals)

    # --- changes

    def without_waits(self, calls: Bools) -> Replay:
        """Returns the steps as if the given calls did not wait. Each of these calls takes ``min_wait_ns``."""
        calls = calls & (self.awaited >= 0)
        cpu_ns = np.where(calls, self.min_wait_ns + self.cpu_ns, self.cpu_ns)
        return replace(self, awaited=np.where(calls, NONE, self.awaited), cpu_ns=cpu_ns)

    def without_calls(self, calls: Bools) -> Replay:
        """Returns the steps without the given calls, and without the time after them except for pauses."""
        steps = self.without_waits(calls)
        return replace(steps, cpu_ns=np.where(calls, self.pause_ns, steps.cpu_ns))

    def limit_pauses(self, calls: Bools, ns: float | Floats) -> Replay:
        """Returns the steps with shorter pauses after the given calls, each of at most ``ns``.

        Args:
            calls: shape (calls,), True for each call whose pause is shortened.
            ns: the longest pause, ns: one number, or an array of shape (calls,).
        """
        saved_ns = np.where(calls, np.maximum(self.pause_ns - ns, 0.0), 0.0)
        return replace(self, cpu_ns=self.cpu_ns - saved_ns, pause_ns=self.pause_ns - saved_ns)

    def without_cpu_time(self, saved_ns: Floats) -> Replay:
        """Returns the steps without the time ``saved_ns``, shape (calls,), from each call to the next call."""
        cpu_ns = np.maximum(self.cpu_ns - saved_ns, 0.0)
        return replace(self, cpu_ns=cpu_ns, pause_ns=np.minimum(self.pause_ns, cpu_ns))

    def scale_launches(self, factor: Floats, max_saved_ns: float = np.inf) -> Replay:
        """Returns the steps with the launch time multiplied by a factor: the CPU's time without pauses.

        Args:
            factor: shape (calls,), the factor for the time from each call to the next call.
            max_saved_ns: the maximum time that is saved from one call to the next call, ns.
        """
        saved_ns = np.minimum((self.cpu_ns - self.pause_ns) * (1 - factor), max_saved_ns)
        return replace(self, cpu_ns=self.cpu_ns - saved_ns)

    def scale_work(self, factor: Floats) -> Replay:
        """Returns the steps with the duration of each operation multiplied by a factor, shape (operations,).

        An operation with the factor 0 also loses the time between it and the previous operation.
        """
        spacing_ns = np.where(factor == 0, 0.0, self.spacing_ns)
        return replace(self, work_ns=self.work_ns * factor, spacing_ns=spacing_ns)

    def without_profiler_cost(self, multiple: float) -> Replay:
        """Returns the steps without the profiler's cost, which is ``multiple`` times ``max_profiler_ns`` for each call.

        A call keeps at least a tenth of its time. The time that the profiler recorded as its own work is also removed.
        """
        cpu_ns, latency_ns = self.cpu_ns, self.latency_ns
        if len(self.profiler_work_ns):
            cpu_ns = cpu_ns - self.profiler_work_ns
            latency_ns = np.maximum(latency_ns - self.profiler_work_ns[self.launch], 0.0)
        cpu_ns = cpu_ns - np.minimum(self.max_profiler_ns * multiple, 0.9 * cpu_ns)
        pause_ns = np.minimum(self.pause_ns, cpu_ns)
        return replace(
            self,
            cpu_ns=cpu_ns,
            pause_ns=pause_ns,
            latency_ns=latency_ns,
            profiler_work_ns=self.profiler_work_ns[:0],
        )

    def scale_cpu_time(self, factor: float, unrecorded_wait_ns: Ints) -> Replay:
        """Returns the steps with the CPU's time multiplied by a factor, except for waits for unrecorded GPU work.

        Args:
            factor: the factor for the CPU's time.
            unrecorded_wait_ns: shape (calls,), the part of each pause in which the program waits for unrecorded work,
                ns.
        """
        gpu_ns = np.minimum(unrecorded_wait_ns, self.pause_ns)
        return replace(
            self,
            cpu_ns=gpu_ns + (self.cpu_ns - gpu_ns) * factor,
            pause_ns=gpu_ns + (self.pause_ns - gpu_ns) * factor,
        )

    def with_graph_launches(self, launch_ns: float, node_ns: float) -> Replay:
        """Returns the steps as if the profiler did not record the nodes of CUDA graphs.

        Args:
            launch_ns: the maximum time that the launch of a graph then takes, ns.
            node_ns: the maximum time by which the gap before each node is shortened, ns.
        """
        is_graph = np.bincount(self.launch, minlength=len(self.cpu_ns)) > 1
        saved_ns = np.where(is_graph, np.maximum(self.cpu_ns - self.pause_ns - launch_ns, 0.0), 0.0)
        saved_spacing_ns = np.where(is_graph[self.launch], np.clip(self.spacing_ns, 0.0, node_ns), 0.0)
        return replace(
            self,
            cpu_ns=self.cpu_ns - saved_ns,
            latency_ns=np.maximum(self.latency_ns - saved_ns[self.launch], 0.0),
            spacing_ns=self.spacing_ns - saved_spacing_ns,
        )


def replay_ranks(ranks: Sequence[Replay]) -> list[ReplayedTimes]:
    """Replays ranks together. Each collective begins to transfer data when its last rank has started it."""
    generators: list[Any] = [rank.run() for rank in ranks]
    missing_arrivals = Counter(collective for rank in ranks for collective in rank.collective.tolist())
    arrived = defaultdict[int, dict[int, float]](dict)  # for each collective that has not begun, the start on each rank
    passed_arrivals = set[tuple[int, int]]()  # (collective, rank) of each arrival that did not wait for other ranks
    times_of_rank: dict[int, ReplayedTimes] = {}
    ready_ranks: list[tuple[int, float | None]] = [(rank, None) for rank in range(len(ranks))]
    while len(times_of_rank) < len(ranks):
        if ready_ranks:
            rank, begin = ready_ranks.pop()
            try:
                arrival = generators[rank].send(begin)
            except StopIteration as end:
                times_of_rank[rank] = end.value
                continue
            collective = arrival.collective
            if not arrival.waits:
                ready_ranks.append((rank, arrival.start_ns))
                passed_arrivals.add((collective, rank))
            arrived[collective][rank] = arrival.start_ns
            missing_arrivals[collective] -= 1
        else:  # ranks launch collectives in different orders, so the earliest collective begins without some ranks
            collective = min(arrived, key=lambda number: max(arrived[number].values()))
            missing_arrivals[collective] = 0
        if missing_arrivals[collective] <= 0:
            starts = arrived.pop(collective)
            begin = max(starts.values())
            ready_ranks += [(rank, begin) for rank in starts if (collective, rank) not in passed_arrivals]
    return [times_of_rank[rank] for rank in range(len(ranks))]


def find_previous_on_stream(stream: Ints) -> Ints:
    """Returns the index of the previous operation on the stream of each operation, or ``NONE``; shape (operations,)."""
    order = np.argsort(stream, kind="stable")
    previous_operation = np.full(len(stream), NONE)
    previous_operation[order[1:]] = np.where(stream[order[1:]] == stream[order[:-1]], order[:-1], NONE)
    return previous_operation


def _rows(index: Any, *columns: Any) -> Iterator[Any]:
    """Yields the selected rows of the columns as tuples of numbers."""
    return zip(*(column[index].tolist() for column in columns), strict=True)
