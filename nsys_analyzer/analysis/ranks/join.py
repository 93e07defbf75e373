"""From the records of ranks to the figures of each run: joined on the steps' numbers and on shared collectives."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np
from msgspec import structs

from nsys_analyzer.analysis.ranges.phases import STEP
from nsys_analyzer.analysis.ranks.collectives import find_waits, name_strategies, summarize_collectives
from nsys_analyzer.analysis.ranks.findings import find_in_run, find_losses
from nsys_analyzer.analysis.ranks.matching import (
    Clock,
    align_clocks,
    group_members,
    knows_communicators,
    match_collectives,
    missing_ranks,
    step_numbers,
)
from nsys_analyzer.analysis.ranks.pace import own_steps_ms
from nsys_analyzer.analysis.ranks.run import (
    LATE_SHARE,
    Alignment,
    CollectiveFigures,
    ParallelRun,
    RankFigures,
    RanksFrom,
    RankStep,
)
from nsys_analyzer.analysis.statistics import Stats
from nsys_analyzer.analysis.steps.member import BY_ORDER, Member
from nsys_analyzer.analysis.steps.windows import near_median
from nsys_analyzer.analysis.summary.summary import CaptureSummary
from nsys_analyzer.text import StrOrText, phrase, plural
from nsys_analyzer.trace.arrays import Ints
from nsys_analyzer.trace.schema import NS_PER_MS

#: Clocks whose error is a larger share of a step tell nothing of who waits for whom.
_TOO_FAR = 0.05
#: A rank that is the slowest in fewer of the steps is so by chance as well.
_STEADY = 0.75
#: The profiler makes no step longer if the step takes at least this share of its length without the profiler.
_AS_LONG = 0.97
#: At most this many ranks have their steps replayed.
_MOST_REPLAYED_RANKS = 8
#: Steps that are named, and missing ranks.
_NAMED, _LISTED = 3, 16
_RANK_AT_END = re.compile(r"[\W_]*(?:rank|(?<![^\W_])r)?[\W_]*$", re.IGNORECASE)


def find_runs(captures: Sequence[CaptureSummary]) -> tuple[ParallelRun, ...]:
    """Returns the runs that captures are of, as far as these exchange something with others; that of most ranks first.

    Each has its findings, and where its ranks lose time to the one with least own time.
    """
    pairs = [(member, capture) for capture in captures for member in capture.members]
    capture_of = {(member.capture, member.process, member.device): capture for member, capture in pairs}
    runs = []
    for join in join_members([member for member, _ in pairs]):
        of_ranks = [capture_of[member.capture, member.process, member.device] for member in join.members]
        run = _at_unprofiled_pace(_with_losses(join.run(), of_ranks), join, of_ranks)
        runs.append(structs.replace(run, findings=find_in_run(run)))
    return tuple(runs)


def join_members(members: Sequence[Member]) -> list[Join]:
    """Returns the members of each run joined, the run of most ranks first."""
    return [Join(*group) for group in group_members(members)]


def find_clocks(members: Sequence[Member]) -> dict[str, tuple[str, Clock]]:
    """Returns, by capture of a run whose clocks agree, the one whose clock is the run's, and its own against that."""
    clocks: dict[str, tuple[str, Clock]] = {}
    for join in join_members(members):
        if join.alignment:
            first = join.members[0].capture
            pairs = zip(join.members, join.clocks, strict=True)
            clocks |= {member.capture: (first, clock) for member, clock in pairs if clock}
    return clocks


def _with_losses(run: ParallelRun, captures: Sequence[CaptureSummary]) -> ParallelRun:
    """Returns the run with where its ranks lose time to the fastest one, and how late each of them is by that."""
    if run.slowest is None or run.fastest is None or run.slowest == run.fastest:
        return run
    pairs = list(zip(run.ranks, captures, strict=True))
    losses = [find_losses(pair, pairs[run.fastest]) for pair in pairs]
    most = losses[run.slowest]
    if most is None:
        return run
    ranks = list(run.ranks)
    for position, (rank, loss) in enumerate(zip(run.ranks, losses, strict=True)):
        if loss and rank.late_ms and position != run.fastest:
            _, slowed_ms = loss
            ranks[position] = replace(rank, late_ms=rank.late_ms.shifted(slowed_ms))
    lost, slowed_ms = most
    skew = (run.skew_ms or 0.0) + slowed_ms
    return structs.replace(run, ranks=tuple(ranks), skew_ms=skew, lost=lost, slowed_ms=slowed_ms)


def _at_unprofiled_pace(run: ParallelRun, join: Join, captures: Sequence[CaptureSummary]) -> ParallelRun:
    """Returns the run with its step without the profiler, and, if that is shorter, how late each rank is without it.

    The ranks' pace without the profiler is uncertain: of the two possible ones, that counts by which the slowest rank
    is least late.
    """
    times = [capture.unprofiled.trusted_ms(STEP) if capture.unprofiled else None for capture in captures]
    run = structs.replace(run, unprofiled_ms=max(filter(None, times)) if all(times) else None)
    studies = [capture.study for capture in captures if capture.study]
    profiled_ms = max(rank.step_ms.median or 0.0 for rank in run.ranks)
    is_known = join.waits and run.slowest is not None and len({id(study) for study in studies}) == len(run.ranks)
    may_be_late = is_known and not run.takes_turns and (run.skew_ms or 0.0) >= LATE_SHARE * profiled_ms
    if not may_be_late or (run.unprofiled_ms or 0.0) >= _AS_LONG * profiled_ms:
        return run
    # Of many ranks, a few that are evenly spread over the ranks' own times tell as much as all.
    order = sorted(range(len(run.ranks)), key=lambda place: -np.median(join.own[place]))
    replayed = order[:: -(-len(order) // _MOST_REPLAYED_RANKS)]
    rows = list(zip(studies, join.members, join.waits, strict=True))
    recorded, *unprofiled = own_steps_ms([rows[place] for place in replayed], run.unprofiled_ms)
    if not run.unprofiled_ms and max(unprofiled[0]) > _AS_LONG * max(recorded):
        return run
    own_ms = min(unprofiled, key=lambda steps_ms: steps_ms[0] - float(np.median(steps_ms[1:])))
    ranks = list(run.ranks)
    for place, ms in zip(replayed, own_ms, strict=True):
        ranks[place] = replace(ranks[place], late_unprofiled_ms=ms - min(own_ms))
    return structs.replace(run, ranks=tuple(ranks))


class Join:
    """The members of one run, the steps that they share, and who waited for whom."""

    def __init__(self, members: tuple[Member, ...], notes: tuple[StrOrText, ...]) -> None:
        self.members, self.notes = members, notes
        self.missing = missing_ranks(self.members)
        self.numbers = step_numbers(self.members)
        self.matches, self.common, self.apart = match_collectives(self.members)
        alike: Ints = np.setdiff1d(self.common, self.apart)
        #: Whether there is no step of all ranks in which their collectives are the same.
        self.all_apart = bool(self.apart) and not len(alike)
        shared = self.shared = self.common if self.all_apart else alike
        #: The places of the shared steps among those of each member; where they share none, of all that it has.
        self.steps = [np.flatnonzero(np.isin(numbers, shared if len(shared) else numbers)) for numbers in self.numbers]
        #: Shape (steps,) of each member: the lengths of these steps, ns.
        self.walls = [(m.end - m.start)[steps] for m, steps in zip(self.members, self.steps, strict=True)]
        self.clocks = align_clocks(self.members, self.matches)
        self.alignment = self._alignment()
        clocks = [clock or Clock() for clock in self.clocks]
        #: Empty where waiting is not known, as is ``own``.
        self.waits = find_waits(self.members, self.matches, clocks) if self.alignment else []
        rows = zip(self.waits, self.walls, self.steps, strict=False)
        #: Shape (members, steps): the steps without exposed waiting, ns.
        self.own = np.array([walls - waits.exposed_waiting[steps] for waits, walls, steps in rows])
        named = any(member.name_without_rank for member in self.members)
        by_order = any(member.run == BY_ORDER for member in self.members)
        self.ranks_from: RanksFrom | None = "file names" if named else "order of the call" if by_order else None

    def run(self) -> ParallelRun:
        """Returns the figures."""
        slowest = fastest = skew = None
        takes_turns = False
        if self.own.size:
            median = np.median(self.own, axis=1)
            slowest, fastest = int(np.argmax(median)), int(np.argmin(median))
            skew = max(float(np.median(self.own[slowest] - self.own[fastest])), 0.0) / NS_PER_MS
            takes_turns = float((self.own.argmax(axis=0) == slowest).mean()) < _STEADY
        collectives: tuple[CollectiveFigures, ...] = ()
        if len(self.shared):
            lacks_ranks = len(self.missing) > 0
            collectives = summarize_collectives(
                self.members, self.matches, self.steps, self.waits, lacks_ranks=lacks_ranks
            )
        return ParallelRun(
            name=run_name(self.members),
            strategies=name_strategies(self.members),
            world_size=max(member.world_size for member in self.members) or None,
            missing=self.missing,
            steps=len(self.shared),
            ranks=tuple(self._rank(position) for position in range(len(self.members))),
            collectives=collectives,
            slowest=slowest,
            fastest=fastest,
            takes_turns=takes_turns,
            skew_ms=skew,
            alignment=self.alignment,
            ranks_from=self.ranks_from,
            notes=(*self.notes, *self._notes()),
        )

    def _alignment(self) -> Alignment | None:
        """Returns how well the clocks agree; None where they do not, or where there is nothing to align."""
        others = [clock for clock in self.clocks[1:] if clock]
        if not others or len(others) < len(self.members) - 1 or not self.matches or self.all_apart:
            return None
        spread = max(clock.spread_ns for clock in others)
        if spread > _TOO_FAR * np.median(self.walls[0]):
            return None
        one_clock = len({member.capture for member in self.members}) == 1
        return Alignment(one_clock, spread / NS_PER_MS, min(clock.collectives for clock in others if clock.collectives))

    def _rank(self, position: int) -> RankFigures:
        """Returns the figures of a member: means of the shared steps near the median, and all of these one by one."""
        member, steps, walls = self.members[position], self.steps[position], self.walls[position]
        step_ms, near = Stats.of_ns(walls), steps
        length_ms = step_ms.median or 0.0
        if len(steps):
            shortest, longest = near_median(walls)
            near = steps[(walls >= shortest) & (walls <= longest)]

        def ms(ns: Ints) -> float:
            return float(ns[near].mean()) / NS_PER_MS if len(near) else 0.0

        # What means of exposed communication and idle time are multiplied by, so that parts add up to a step's length:
        # the mean of the steps near the median is not quite the median.
        works, rest = ms(member.compute + member.exposed_copy), ms(member.exposed_communication + member.idle)
        scale = max(length_ms - works, 0.0) / rest if rest else 1.0

        exposed_ms = ms(member.exposed_communication)
        columns = [walls, self.own[position]] if self.waits else [walls]
        rows = zip(*((column / NS_PER_MS).tolist() for column in columns), strict=True)
        numbers = self.numbers[position][steps].tolist()
        figures = RankFigures(
            label=member.label,
            rank=member.rank,
            process=member.process,
            capture=member.capture,
            source=member.source,
            device=member.device,
            step_ms=step_ms,
            compute_ms=ms(member.compute),
            exposed_copy_ms=ms(member.exposed_copy),
            communication_ms=ms(member.communication) + (scale - 1) * exposed_ms,
            exposed_communication_ms=scale * exposed_ms,
            idle_ms=scale * ms(member.idle),
            cpu_ms=ms(member.cpu),
            steps=tuple(RankStep(number, *row) for number, row in zip(numbers, rows, strict=True)),
        )
        if not self.waits:
            return figures
        own, clock = self.own[position], self.clocks[position]
        exposed_waiting = ms(self.waits[position].exposed_waiting)
        waiting = ms(self.waits[position].waiting) + (scale - 1) * exposed_waiting
        own_ms = Stats.of_ns(own)
        return replace(
            figures,
            waiting_ms=waiting,
            transfer_ms=figures.communication_ms - waiting,
            exposed_waiting_ms=scale * exposed_waiting,
            exposed_transfer_ms=figures.exposed_communication_ms - scale * exposed_waiting,
            own_ms=replace(own_ms, median=min(own_ms.median or 0.0, length_ms)),
            late_ms=Stats.of_ns(own - self.own[int(np.argmin(np.median(self.own, axis=1)))]),
            slowest_steps=int((self.own.argmax(axis=0) == position).sum()),
            offset_ms=self._offset_ms(member, clock) if clock else None,
            shift_ns=clock.offset_ns if clock else None,
        )

    def _offset_ms(self, member: Member, clock: Clock) -> float:
        """Returns by how much a member's clock is ahead of the first one's: absolute times where both are known."""
        first = self.members[0]
        starts = member.started_utc_ns - first.started_utc_ns if member.started_utc_ns and first.started_utc_ns else 0
        return (clock.offset_ns + starts) / NS_PER_MS

    def _notes(self) -> Iterator[StrOrText]:
        """Yields what a reader must know of the join."""
        if self.ranks_from == "file names":
            yield "Which capture is of which rank is taken from the files' names: nothing in them says it."
        elif self.ranks_from:
            yield phrase("The captures are taken for ranks in the order of the call (`--ranks`).")
        if self.missing:
            more = f" and {len(self.missing) - _LISTED:,} more" if len(self.missing) > _LISTED else ""
            named = ", ".join(map(str, self.missing[:_LISTED]))
            ranks = f"{plural(len(self.missing), 'rank')} {named}{more}"
            counted = "time spent waiting for it counts as transferring"
            yield phrase("No capture is of {}: {}.", ranks, counted if self.waits else "who waits for it is unknown")
        common = len(self.common)
        if common and any(len(member) != common for member in self.members):
            counts = ", ".join(f"{member.label} has {len(member)}" for member in self.members)
            yield phrase("The ranks have different steps ({}): {} of all are looked at.", counts, common)
        if self.apart and not self.all_apart:
            named = ", ".join(map(str, self.apart[:_NAMED]))
            more = ", …" if len(self.apart) > _NAMED else ""
            count = len(self.apart)
            steps, left_out = ("step", "it is") if count == 1 else ("steps", "they are")
            yield phrase(
                "The collectives of {} {} differ from rank to rank ({} {}{}): {} left out of all figures.",
                count, steps, steps, named, more, left_out,
            )  # fmt: skip
        if self.waits and len(self.members) > 2 and not all(map(knows_communicators, self.members)):
            yield phrase(
                "The captures do not name communicators: each collective is taken to be of all {} ranks, which is "
                "wrong where groups of them have their own. Of reports of nsys, `nsys export --include-blobs=true` "
                "keeps them.",
                len(self.members),
            )  # fmt: skip
        if far := self._far_apart_ms():
            yield phrase(
                "The captures' clocks are {:,.0f} ms apart, more than half a step. If the captures did not begin with "
                "one step, put its number into the range of each: `step 17`.",
                far,
            )
        if len(self.members) > 1 and self.alignment is None:
            yield self._why_not_aligned()

    def _far_apart_ms(self) -> float:
        """Returns how far apart clocks are that are known, where steps joined by their places may be others; else 0."""
        if all(member.has_numbers for member in self.members) or not self.alignment:
            return 0.0
        pairs = zip(self.members, self.clocks, strict=True)
        offsets_ms = [abs(self._offset_ms(m, clock)) for m, clock in pairs if clock and m.started_utc_ns]
        far = max(offsets_ms, default=0.0) if self.members[0].started_utc_ns else 0.0
        return far if far > float(np.median(self.walls[0])) / NS_PER_MS / 2 else 0.0

    def _why_not_aligned(self) -> StrOrText:
        """Returns why the clocks of several members are not aligned."""
        if not len(self.common):
            return "The ranks have no step of one number in common: each is shown by its own steps, and none compared."
        if None in self.clocks:
            labels = (m.label for m, clock in zip(self.members, self.clocks, strict=True) if clock is None)
            alone = ", ".join(labels)
            return phrase("The clocks cannot be aligned: {} shares no collective with the other ranks.", alone)
        if self.all_apart:
            return "The collectives of every step differ from rank to rank, so nothing is known to wait."
        if not self.matches:
            return "No collective of a rank can be told to be one of another rank, so nothing is known to wait."
        spread = max(clock.spread_ns for clock in self.clocks if clock) / NS_PER_MS
        return phrase("The clocks cannot be aligned: collectives end {:.3g} ms apart from rank to rank.", spread)


def run_name(members: Sequence[Member]) -> str:
    """Returns what a run is called: as its capture, or as its captures begin."""
    captures = tuple(dict.fromkeys(member.capture for member in members))
    if len(captures) == 1:
        return captures[0]
    # The names are sorted so that the first and the last differ soonest.
    first, *_, last = sorted(captures)
    length = next((i for i, pair in enumerate(zip(first, last, strict=False)) if pair[0] != pair[1]), len(first))
    alike = _RANK_AT_END.sub("", first[:length])
    return f"{alike} ({len(captures)} captures)" if alike else f"{captures[0]} and {len(captures) - 1} more"
