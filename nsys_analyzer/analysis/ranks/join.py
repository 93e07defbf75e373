"""Joins the records of ranks into runs, by their step numbers and shared collectives, and computes the figures."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np

from nsys_analyzer.analysis.ranks.collectives import (
    count_reductions,
    find_waits,
    name_strategies,
    summarize_collectives,
)
from nsys_analyzer.analysis.ranks.links import find_slow_link
from nsys_analyzer.analysis.ranks.matching import (
    Clock,
    align_clocks,
    find_missing_ranks,
    find_step_numbers,
    group_members,
    has_known_communicators,
    match_collectives,
)
from nsys_analyzer.analysis.ranks.pipelines import find_pipeline
from nsys_analyzer.analysis.ranks.run import (
    Alignment,
    CollectiveFigures,
    JoinNote,
    ParallelRun,
    RankFigures,
    RanksFrom,
    RankStep,
)
from nsys_analyzer.analysis.statistics import Stats
from nsys_analyzer.analysis.steps.member import BY_ORDER, Member
from nsys_analyzer.analysis.steps.windows import find_bounds_near_median
from nsys_analyzer.trace.arrays import Ints
from nsys_analyzer.trace.schema import NS_PER_MS

#: Clocks are aligned if their spread is at most this share of a step. Otherwise they cannot show which rank waits.
_MAX_SPREAD_SHARE = 0.05
#: The ranks take turns in being the slowest if no rank is the slowest in at least this share of the steps.
_STEADILY_SLOWEST_SHARE = 0.75
#: Matches the word "rank" or "r" at the end of the common start of captures' names.
_RANK_SUFFIX = re.compile(r"[\W_]*(?:rank|(?<![^\W_])r)?[\W_]*$", re.IGNORECASE)


def join_members(members: Sequence[Member]) -> list[JoinedRanks]:
    """Returns the joined members of each run. The largest run comes first."""
    return [JoinedRanks(*group) for group in group_members(members)]


def find_clocks(members: Sequence[Member]) -> dict[str, tuple[str, Clock]]:
    """Returns the reference capture and the clock of each capture whose run has aligned clocks."""
    clocks: dict[str, tuple[str, Clock]] = {}
    for join in join_members(members):
        if join.alignment:
            first_capture = join.members[0].capture
            pairs = zip(join.members, join.clocks, strict=True)
            clocks |= {member.capture: (first_capture, clock) for member, clock in pairs if clock}
    return clocks


class JoinedRanks:
    """The members of one run, the steps that they share, and the times that they waited for each other.

    Attributes:
        members: the members of the run, in order of rank.
        missing: the ranks without a member.
        numbers: the step numbers of each member.
        matches: the collectives that ranks share.
        common: the numbers of the steps that all members have.
        differing: the numbers of the steps whose collectives differ from rank to rank.
        shared: the numbers of the steps that are compared: the common steps without the differing steps.
        steps: the indices of the shared steps in the steps of each member; the indices of all steps if none are shared.
        walls_ns: the lengths of the steps in ``steps``, shape (steps,) for each member, ns.
        clocks: the clock of each member.
        alignment: how well the clocks agree; None if they could not be aligned.
        waits: the waiting times of each member; empty if they are not known.
        own_ns: the lengths of the steps without exposed waiting, shape (members, steps), ns; empty if waiting is not
            known.
        ranks_from: the source of the rank numbers, if neither captures nor manifests contain them.
    """

    def __init__(self, members: tuple[Member, ...], notes: tuple[JoinNote, ...]) -> None:
        self.members, self._group_notes = members, notes
        self.missing = find_missing_ranks(self.members)
        self.numbers = find_step_numbers(self.members)
        self.matches, self.common, self.differing = match_collectives(self.members)
        steps_of_equal_work: Ints = np.setdiff1d(self.common, self.differing)
        self._all_differ = bool(self.differing) and not len(steps_of_equal_work)
        shared_steps = self.shared = self.common if self._all_differ else steps_of_equal_work
        self.steps = [
            np.flatnonzero(np.isin(numbers, shared_steps if len(shared_steps) else numbers)) for numbers in self.numbers
        ]
        self.walls_ns = [(m.end - m.start)[steps] for m, steps in zip(self.members, self.steps, strict=True)]
        self.clocks = align_clocks(self.members, self.matches)
        self.alignment = self._find_alignment()
        clocks = [clock or Clock() for clock in self.clocks]
        self.waits = find_waits(self.members, self.matches, clocks) if self.alignment else []
        rows = zip(self.waits, self.walls_ns, self.steps, strict=False)
        self.own_ns = np.array([walls_ns - waits.exposed_waiting_ns[steps] for waits, walls_ns, steps in rows])
        are_joined_by_name = any(member.name_without_rank for member in self.members)
        are_joined_by_order = any(member.run == BY_ORDER for member in self.members)
        self.ranks_from: RanksFrom | None = (
            "file names" if are_joined_by_name else "order of the call" if are_joined_by_order else None
        )

    def summarize(self) -> ParallelRun:
        """Returns the figures of the run, without losses and findings."""
        slowest = fastest = skew = None
        takes_turns = False
        if self.own_ns.size:
            median = np.median(self.own_ns, axis=1)
            slowest, fastest = int(np.argmax(median)), int(np.argmin(median))
            skew = max(float(np.median(self.own_ns[slowest] - self.own_ns[fastest])), 0.0) / NS_PER_MS
            takes_turns = float((self.own_ns.argmax(axis=0) == slowest).mean()) < _STEADILY_SLOWEST_SHARE
        collectives: tuple[CollectiveFigures, ...] = ()
        step_ns = float(np.median(self.walls_ns[0])) if len(self.walls_ns[0]) else 0.0
        if len(self.shared):
            lacks_ranks = len(self.missing) > 0
            collectives = summarize_collectives(
                self.members, self.matches, self.steps, self.waits, lacks_ranks=lacks_ranks
            )
        return ParallelRun(
            name=name_run(self.members),
            strategies=name_strategies(self.members),
            world_size=max(member.world_size for member in self.members) or None,
            missing=self.missing,
            steps=len(self.shared),
            ranks=tuple(self._summarize_rank(position) for position in range(len(self.members))),
            collectives=collectives,
            slowest=slowest,
            fastest=fastest,
            takes_turns=takes_turns,
            skew_ms=skew,
            alignment=self.alignment,
            ranks_from=self.ranks_from,
            slow_link=find_slow_link(self.members, self.matches, self.steps, step_ns),
            pipeline=find_pipeline(self.members, self.matches, self.steps, self.waits, self.own_ns),
            reductions=count_reductions(self.members, self.steps),
            notes=(*self._group_notes, *self._find_notes()),
        )

    def _find_alignment(self) -> Alignment | None:
        """Returns how well the clocks agree; None if they disagree, or if clocks cannot be aligned."""
        clocks = [clock for clock in self.clocks[1:] if clock]
        if not clocks or len(clocks) < len(self.members) - 1 or not self.matches or self._all_differ:
            return None
        spread_ns = max(clock.spread_ns for clock in clocks)
        if spread_ns > _MAX_SPREAD_SHARE * np.median(self.walls_ns[0]):
            return None
        have_one_clock = len({member.capture for member in self.members}) == 1
        collectives = min(clock.collectives for clock in clocks if clock.collectives)
        return Alignment(have_one_clock, spread_ns / NS_PER_MS, collectives)

    def _summarize_rank(self, position: int) -> RankFigures:
        """Returns the figures of a member. Means are taken over the shared steps near the median."""
        member, steps, walls_ns = self.members[position], self.steps[position], self.walls_ns[position]
        step_ms, steps_near_median = Stats.of_ns(walls_ns), steps
        length_ms = step_ms.median or 0.0
        if len(steps):
            shortest_ns, longest_ns = find_bounds_near_median(walls_ns)
            steps_near_median = steps[(walls_ns >= shortest_ns) & (walls_ns <= longest_ns)]

        def mean_ms(ns: Ints) -> float:
            """Returns the mean of a column of times over the steps near the median, ms."""
            return float(ns[steps_near_median].mean()) / NS_PER_MS if len(steps_near_median) else 0.0

        # The mean of the steps near the median is not exactly the median. Exposed communication and idle time are
        # scaled so that the parts add up to the length of the step.
        work_ms = mean_ms(member.compute + member.exposed_copy)
        scaled_ms = mean_ms(member.exposed_communication + member.idle)
        scale = max(length_ms - work_ms, 0.0) / scaled_ms if scaled_ms else 1.0

        exposed_ms = mean_ms(member.exposed_communication)
        columns = [walls_ns, self.own_ns[position]] if self.waits else [walls_ns]
        rows = zip(*((column / NS_PER_MS).tolist() for column in columns), strict=True)
        step_numbers = self.numbers[position][steps].tolist()
        figures = RankFigures(
            label=member.label,
            rank=member.rank,
            process=member.process,
            capture=member.capture,
            source=member.source,
            device=member.device,
            step_ms=step_ms,
            compute_ms=mean_ms(member.compute),
            exposed_copy_ms=mean_ms(member.exposed_copy),
            communication_ms=mean_ms(member.communication) + (scale - 1) * exposed_ms,
            exposed_communication_ms=scale * exposed_ms,
            idle_ms=scale * mean_ms(member.idle),
            cpu_ms=mean_ms(member.cpu),
            steps=tuple(RankStep(step_number, *row) for step_number, row in zip(step_numbers, rows, strict=True)),
        )
        if not self.waits:
            return figures
        own_ns, clock = self.own_ns[position], self.clocks[position]
        exposed_waiting_ms = mean_ms(self.waits[position].exposed_waiting_ns)
        waiting_ms = mean_ms(self.waits[position].waiting_ns) + (scale - 1) * exposed_waiting_ms
        own_ms = Stats.of_ns(own_ns)
        return replace(
            figures,
            waiting_ms=waiting_ms,
            transfer_ms=figures.communication_ms - waiting_ms,
            exposed_waiting_ms=scale * exposed_waiting_ms,
            exposed_transfer_ms=figures.exposed_communication_ms - scale * exposed_waiting_ms,
            own_ms=replace(own_ms, median=min(own_ms.median or 0.0, length_ms)),
            late_ms=Stats.of_ns(own_ns - self.own_ns[int(np.argmin(np.median(self.own_ns, axis=1)))]),
            slowest_steps=int((self.own_ns.argmax(axis=0) == position).sum()),
            offset_ms=self._find_offset_ms(member, clock) if clock else None,
            shift_ns=clock.offset_ns if clock else None,
        )

    def _find_offset_ms(self, member: Member, clock: Clock) -> float:
        """Returns how far a member's clock is ahead of the first member's clock, in UTC if both starts are known."""
        first_member = self.members[0]
        start_difference_ns = (
            member.started_utc_ns - first_member.started_utc_ns
            if member.started_utc_ns and first_member.started_utc_ns
            else 0
        )
        return (clock.offset_ns + start_difference_ns) / NS_PER_MS

    def _find_notes(self) -> Iterator[JoinNote]:
        """Yields the notes on how the members were joined."""
        if self.ranks_from:
            yield JoinNote("ranks from file names" if self.ranks_from == "file names" else "ranks from order")
        if self.missing:
            yield JoinNote("missing ranks", numbers=self.missing)
        labels = tuple(member.label for member in self.members)
        if len(self.common) and any(len(member) != len(self.common) for member in self.members):
            yield JoinNote("different steps", labels, (len(self.common), *map(len, self.members)))
        if self.differing and not self._all_differ:
            yield JoinNote("differing collectives", numbers=tuple(self.differing))
        if self.waits and len(self.members) > 2 and not all(map(has_known_communicators, self.members)):
            yield JoinNote("unknown communicators", labels)
        if distance_ms := self._find_clock_distance_ms():
            yield JoinNote("distant clocks", ms=distance_ms)
        if len(self.members) == 1 or self.alignment:
            return
        if not len(self.common):
            yield JoinNote("no common step")
        elif None in self.clocks:
            pairs = zip(self.members, self.clocks, strict=True)
            yield JoinNote("no shared collective", tuple(m.label for m, clock in pairs if clock is None))
        elif self._all_differ:
            yield JoinNote("all collectives differ")
        elif not self.matches:
            yield JoinNote("no matched collective")
        else:
            yield JoinNote("ends differ", ms=max(clock.spread_ns for clock in self.clocks if clock) / NS_PER_MS)

    def _find_clock_distance_ms(self) -> float:
        """Returns how far the clocks are apart if this shows that different steps may have been joined, else 0.

        This can happen only if the names of step ranges contain no numbers, because steps are then joined by position.
        """
        if all(member.has_numbers for member in self.members) or not self.alignment:
            return 0.0
        pairs = zip(self.members, self.clocks, strict=True)
        offsets_ms = [abs(self._find_offset_ms(m, clock)) for m, clock in pairs if clock and m.started_utc_ns]
        distance_ms = max(offsets_ms, default=0.0) if self.members[0].started_utc_ns else 0.0
        return distance_ms if distance_ms > float(np.median(self.walls_ns[0])) / NS_PER_MS / 2 else 0.0


def name_run(members: Sequence[Member]) -> str:
    """Returns the name of a run: the name of its only capture, or the common start of its captures' names."""
    captures = tuple(dict.fromkeys(member.capture for member in members))
    if len(captures) == 1:
        return captures[0]
    # A common start of the first and the last of the sorted names is a common start of all names.
    first_capture, *_, last_capture = sorted(captures)
    length = next(
        (i for i, pair in enumerate(zip(first_capture, last_capture, strict=False)) if pair[0] != pair[1]),
        len(first_capture),
    )
    common_start = _RANK_SUFFIX.sub("", first_capture[:length])
    return (
        f"{common_start} ({len(captures)} captures)" if common_start else f"{captures[0]} and {len(captures) - 1} more"
    )
