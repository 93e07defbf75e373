"""From the records of ranks to the figures of each run: joined on the steps' numbers and on shared collectives."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from nsys_analyzer.analysis.ranks.exchanged import collective_figures
from nsys_analyzer.analysis.ranks.matching import (
    Clock,
    Group,
    align_clocks,
    group_members,
    knows_communicators,
    match_collectives,
    missing_ranks,
    numbers_of,
)
from nsys_analyzer.analysis.ranks.member import BY_ORDER, Member
from nsys_analyzer.analysis.ranks.run import Alignment, CollectiveFigures, ParallelRun, RankFigures, RanksFrom, RankStep
from nsys_analyzer.analysis.ranks.strategies import name_strategies
from nsys_analyzer.analysis.ranks.waits import Waits, find_waits
from nsys_analyzer.analysis.summary.statistics import Stats
from nsys_analyzer.text import Words, phrase, plural
from nsys_analyzer.trace.arrays import Ints

_NS_PER_MS = 1e6
#: Clocks whose error is a larger share of a step tell nothing of who waits for whom.
_TOO_FAR = 0.05
#: A rank that is the slowest in fewer of the steps is so by chance as well.
_STEADY = 0.75
#: Steps that are named.
_NAMED = 3
_RANK_AT_END = re.compile(r"[\W_]*(?:rank|(?<![^\W_])r)?[\W_]*$", re.IGNORECASE)


def join_ranks(members: Sequence[Member]) -> tuple[ParallelRun, ...]:
    """The runs that some members are of, the one of most ranks first."""
    return tuple(_Join(group).run() for group in group_members(members))


def clocks_of(members: Sequence[Member]) -> dict[str, tuple[str, Clock]]:
    """For each capture of a run whose clocks agree: the capture whose clock is the run's, and its own against it."""
    found: dict[str, tuple[str, Clock]] = {}
    for group in group_members(members):
        join = _Join(group)
        if join.alignment:
            first = join.members[0].capture
            clocks = zip(join.members, join.clocks, strict=True)
            found |= {member.capture: (first, clock) for member, clock in clocks if clock}
    return found


def _name(captures: Sequence[str]) -> str:
    """What a run is called: as its capture, or as its captures begin."""
    if len(captures) == 1:
        return captures[0]
    # The names are sorted so that the first and the last differ soonest.
    first, *_, last = sorted(captures)
    length = next((i for i, pair in enumerate(zip(first, last, strict=False)) if pair[0] != pair[1]), len(first))
    alike = _RANK_AT_END.sub("", first[:length])
    return f"{alike} ({len(captures)} captures)" if alike else f"{captures[0]} and {len(captures) - 1} more"


class _Join:
    """The members of one run, the steps that they share, and who waited for whom."""

    def __init__(self, group: Group) -> None:
        self.group, self.members = group, group.members
        self.matched = match_collectives(self.members)
        self.missing = missing_ranks(self.members)
        self.numbers = numbers_of(self.members)
        shared = self.shared = self.matched.alike if len(self.matched.alike) else self.matched.numbers
        #: The places of the shared steps among those of each member; where they share none, of all that it has.
        self.steps = [np.flatnonzero(np.isin(one, shared if len(shared) else one)) for one in self.numbers]
        self.clocks = align_clocks(self.members, self.matched.matches)
        self.alignment = self._alignment()
        known = [clock or Clock() for clock in self.clocks]
        self.waits = find_waits(self.members, self.matched.matches, known) if self.alignment else None

    def run(self) -> ParallelRun:
        """The figures."""
        own = self._own()
        slowest = fastest = skew = None
        takes_turns = False
        if own is not None and own.size:
            median = np.median(own, axis=1)
            slowest, fastest = int(np.argmax(median)), int(np.argmin(median))
            skew = max(float(np.median(own[slowest] - own[fastest])), 0.0) / _NS_PER_MS
            takes_turns = float((own.argmax(axis=0) == slowest).mean()) < _STEADY
        return ParallelRun(
            name=_name(tuple(dict.fromkeys(member.capture for member in self.members))),
            strategies=name_strategies(self.members),
            world_size=max(member.world_size for member in self.members),
            missing=self.missing,
            steps=len(self.shared),
            ranks=tuple(self._rank(position, own) for position in range(len(self.members))),
            collectives=self._collectives(),
            slowest=slowest,
            fastest=fastest,
            takes_turns=takes_turns,
            skew_ms=skew,
            alignment=self.alignment,
            ranks_from=self._ranks_from,
            notes=(*self.group.notes, *self._notes()),
        )

    def _collectives(self) -> tuple[CollectiveFigures, ...]:
        """The collectives of the shared steps, if there are any."""
        if not len(self.shared):
            return ()
        return collective_figures(self.members, self.matched.matches, self.steps, self.waits, bool(self.missing))

    def _alignment(self) -> Alignment | None:
        """How well the clocks agree; None where they do not, or where there is nothing to align."""
        others = self.clocks[1:]
        if not others or any(clock is None for clock in others) or not self.matched.matches or self._all_apart:
            return None
        known = [clock for clock in others if clock]
        spread = max(clock.spread_ns for clock in known)
        if spread > _TOO_FAR * np.median(self._walls(0)):
            return None
        one_clock = len({member.capture for member in self.members}) == 1
        return Alignment(one_clock, spread / _NS_PER_MS, min(clock.collectives for clock in known if clock.collectives))

    @property
    def _all_apart(self) -> bool:
        """Whether there is no step of all ranks in which their collectives are the same."""
        return bool(self.matched.apart) and not len(self.matched.alike)

    def _walls(self, position: int) -> Ints:
        """Shape (steps,): the lengths of the shared steps of a member, ns."""
        member, steps = self.members[position], self.steps[position]
        walls: Ints = (member.end - member.start)[steps]
        return walls

    def _own(self) -> Any:
        """Shape (members, steps): the steps without exposed waiting, ns; None where waiting is not known."""
        if not self.waits:
            return None
        waits = zip(self.waits, self.steps, strict=True)
        return np.array([self._walls(i) - one.exposed_waiting[steps] for i, (one, steps) in enumerate(waits)])

    def _rank(self, position: int, own: Any) -> RankFigures:
        member, steps = self.members[position], self.steps[position]

        walls, parts = self._walls(position), member.parts
        scale = self._scale_of_waiting(position)

        def ms(ns: Ints) -> float:
            return float(ns[steps].mean()) / _NS_PER_MS if len(steps) else 0.0

        exposed_ms = ms(parts.exposed_communication)

        figures = RankFigures(
            label=member.label,
            rank=member.rank,
            process=member.process,
            capture=member.capture,
            source=member.source,
            device=member.device,
            step_ms=replace(Stats.of_ns(walls), median=member.length_ms),
            compute_ms=ms(parts.compute),
            exposed_copy_ms=ms(parts.exposed_copy),
            communication_ms=ms(parts.communication) + (scale - 1) * exposed_ms,
            exposed_communication_ms=scale * exposed_ms,
            idle_ms=scale * ms(parts.idle),
            cpu_ms=ms(member.cpu),
            steps=self._steps(position, own),
        )
        return figures if self.waits is None else self._with_waits(figures, position, own, self.waits[position], scale)

    def _scale_of_waiting(self, position: int) -> float:
        """What means of exposed communication and idle time are multiplied by, so that parts add up to a step's length.

        Computing and copying take as long in a long step as in others.
        """
        member, walls = self.members[position], self._walls(position)
        works = (member.parts.compute + member.parts.exposed_copy)[self.steps[position]]
        waits = float(walls.sum() - works.sum())
        return max(member.length_ms * _NS_PER_MS - float(works.mean()), 0.0) * len(walls) / waits if waits else 1.0

    def _steps(self, position: int, own: Any) -> tuple[RankStep, ...]:
        """The shared steps of a member, one by one."""
        member, steps = self.members[position], self.steps[position]
        parts = member.parts
        numbers = self.numbers[position][steps].tolist()
        known = [parts.compute, parts.exposed_copy, parts.communication, parts.exposed_communication, parts.idle]
        columns = [self._walls(position), *(part[steps] for part in known)]
        if self.waits is not None:
            columns += [self.waits[position].exposed_waiting[steps], own[position]]
        rows = zip(*((column / _NS_PER_MS).tolist() for column in columns), strict=True)
        return tuple(RankStep(number, *row) for number, row in zip(numbers, rows, strict=True))

    def _with_waits(self, figures: RankFigures, position: int, own: Any, waits: Waits, scale: float) -> RankFigures:
        member, steps, clock = self.members[position], self.steps[position], self.clocks[position]
        waiting, exposed = (float(ns[steps].mean()) / _NS_PER_MS for ns in (waits.waiting, waits.exposed_waiting))
        waiting, exposed = waiting + (scale - 1) * exposed, scale * exposed
        typical = Stats.of_ns(own[position])  # of the shared steps, which may be longer than the others
        return replace(
            figures,
            waiting_ms=waiting,
            transfer_ms=figures.communication_ms - waiting,
            exposed_waiting_ms=exposed,
            exposed_transfer_ms=figures.exposed_communication_ms - exposed,
            own_ms=replace(typical, median=min(typical.median or 0.0, member.length_ms)),
            late_ms=Stats.of_ns(own[position] - own[int(np.argmin(np.median(own, axis=1)))]),
            slowest_steps=int((own.argmax(axis=0) == position).sum()),
            offset_ms=self._offset_ms(member, clock) if clock else None,
            shift_ns=clock.offset_ns if clock else None,
        )

    def _offset_ms(self, member: Member, clock: Clock) -> float:
        """By how much a member's clock is ahead of the first one's: absolute times where both are known."""
        first = self.members[0]
        starts = member.started_utc_ns - first.started_utc_ns if member.started_utc_ns and first.started_utc_ns else 0
        return (clock.offset_ns + starts) / _NS_PER_MS

    @property
    def _ranks_from(self) -> RanksFrom | None:
        named = any(member.named for member in self.members)
        by_order = any(member.run == BY_ORDER for member in self.members)
        return "file names" if named else "order of the call" if by_order else None

    def _notes(self) -> Iterator[Words]:
        """What a reader must know of the join."""
        if self._ranks_from == "file names":
            yield "Which capture is of which rank is taken from the files' names: nothing in them says it."
        elif self._ranks_from:
            yield phrase("The captures are taken for ranks in the order of the call (`--ranks`).")
        if self.missing:
            ranks = f"{plural(len(self.missing), 'rank')} {', '.join(map(str, self.missing))}"
            known = "time spent waiting for it counts as transferring"
            yield phrase("No capture is of {}: {}.", ranks, known if self.waits else "who waits for it is unknown")
        common = len(self.matched.numbers)
        if common and any(len(member) != common for member in self.members):
            said = ", ".join(f"{member.label} has {len(member)}" for member in self.members)
            yield phrase("The ranks have different steps ({}): {} of all are looked at.", said, common)
        if self.matched.apart and not self._all_apart:
            named = ", ".join(map(str, self.matched.apart[:_NAMED]))
            more = ", …" if len(self.matched.apart) > _NAMED else ""
            count = len(self.matched.apart)
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
        """How far apart clocks are that are known, where steps joined by their places may be others; else 0."""
        if all(member.numbered for member in self.members) or not self.alignment:
            return 0.0
        pairs = zip(self.members, self.clocks, strict=True)
        known = [abs(self._offset_ms(m, clock)) for m, clock in pairs if clock and m.started_utc_ns]
        step_ms = float(np.median(self._walls(0))) / _NS_PER_MS
        return max(known) if known and self.members[0].started_utc_ns and max(known) > step_ms / 2 else 0.0

    def _why_not_aligned(self) -> Words:
        if not len(self.matched.numbers):
            return "The ranks have no step of one number in common: each is shown by its own steps, and none compared."
        lost = [m.label for m, clock in zip(self.members, self.clocks, strict=True) if clock is None]
        if lost:
            named = ", ".join(lost)
            return phrase("The clocks cannot be aligned: {} shares no collective with the other ranks.", named)
        if self._all_apart:
            return "The collectives of every step differ from rank to rank, so nothing is known to wait."
        if not self.matched.matches:
            return "No collective of a rank can be told to be one of another rank, so nothing is known to wait."
        spread = max(clock.spread_ns for clock in self.clocks if clock) / _NS_PER_MS
        return phrase("The clocks cannot be aligned: collectives end {:.3g} ms apart from rank to rank.", spread)
