"""Of each collective: until when a rank waits for the last one to come, and from when on it transfers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from nsys_analyzer.analysis.intervals.cover import Cover
from nsys_analyzer.analysis.ranks.matching import Clock, Matches
from nsys_analyzer.analysis.ranks.member import Member
from nsys_analyzer.trace.arrays import Ints


@dataclass(frozen=True)
class Waits:
    """The waiting of one rank, on its own clock.

    Attributes:
        until: shape (collectives,), ns: when the last rank has started each; its start where that is this rank.
        waiting, exposed_waiting: shape (steps,), ns in which collectives run and all of them wait: of any moment, and
            of those in which nothing else runs.
    """

    until: Ints
    waiting: Ints
    exposed_waiting: Ints


def find_waits(members: Sequence[Member], found: Sequence[Matches], clocks: Sequence[Clock]) -> list[Waits]:
    """The waiting of each member. A collective that is no match transfers from its start on."""
    starts = [clock.aligned(member.collectives.start) for member, clock in zip(members, clocks, strict=True)]
    last = [start.copy() for start in starts]
    for matches in found:
        latest = np.max([starts[p][row] for p, row in zip(matches.members, matches.index, strict=True)], axis=0)
        for position, row in zip(matches.members, matches.index, strict=True):
            last[position][row] = latest
    return [_waits(member, late - start) for member, late, start in zip(members, last, starts, strict=True)]


def _waits(member: Member, waited: Ints) -> Waits:
    """The waiting of a member from how long each collective waited."""
    collectives = member.collectives
    until = np.minimum(collectives.start + waited, collectives.end)
    order = np.argsort(until, kind="stable")
    transfers = Cover.of(until[order], collectives.end[order])
    running = Cover.of(collectives.start, collectives.end)

    def within_steps(stretches: tuple[Ints, Ints]) -> Ints:
        _, start, end = transfers.without(*stretches)
        return Cover.of(start, end).within(member.start, member.end)

    return Waits(until, within_steps((running.start, running.end)), within_steps(member.exposed))
