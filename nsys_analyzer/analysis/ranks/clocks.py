"""How far the clocks of several captures are apart: a collective ends on all of its ranks at once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from nsys_analyzer.analysis.ranks.matching import Matches
from nsys_analyzer.analysis.ranks.member import ALL_GATHER, ALL_REDUCE, ALL_TO_ALL, REDUCE_SCATTER, Member
from nsys_analyzer.trace.arrays import Ints

#: Those that no rank leaves before all have come, and all leave at about the same time.
_END_TOGETHER = (ALL_REDUCE, ALL_GATHER, REDUCE_SCATTER, ALL_TO_ALL)
#: Clocks drift if they do so by more than the measure's own error, this many times.
_SURELY = 3
#: The median absolute deviation of what is normally distributed, to its standard deviation.
_TO_DEVIATION = 1.4826


@dataclass(frozen=True)
class Clock:
    """A member's clock against that of the first member.

    Attributes:
        offset_ns: what it is ahead by, in the middle of the capture.
        drift: by how much that grows, ns per ns.
        middle: the middle of the capture on its own clock, ns.
        spread_ns: how far ends that should be one are apart then, a standard deviation; 0 where none was seen.
        collectives: on how many that rests.
    """

    offset_ns: float = 0.0
    drift: float = 0.0
    middle: float = 0.0
    spread_ns: float = 0.0
    collectives: int = 0

    def aligned(self, time: Ints) -> Ints:
        """Times of the member on the first one's clock."""
        shift = self.offset_ns + self.drift * (time - self.middle)
        aligned: Ints = time - np.floor(shift + 0.5).astype(np.int64)  # halves go one way, whatever the offset
        return aligned


def align_clocks(members: Sequence[Member], found: Sequence[Matches]) -> list[Clock | None]:
    """The clock of each member; None for one that shares no collective with the first, nor with one that does.

    Members of one capture have one clock.
    """
    clocks: list[Clock | None] = [Clock(), *(None for _ in members[1:])]
    for _ in members:  # as often as a chain of shared collectives can be long
        for position in range(1, len(members)):
            if clocks[position] is None:
                clocks[position] = _clock(members, found, clocks, position)
    return clocks


def _clock(
    members: Sequence[Member], found: Sequence[Matches], clocks: Sequence[Clock | None], position: int
) -> Clock | None:
    """The clock of a member by the collectives that it shares with one whose clock is known: where these are most."""
    known = [other for other, clock in enumerate(clocks) if clock]
    ends = {other: _ends(members, found, position, other) for other in known}
    alike = [other for other in known if members[other].capture == members[position].capture]
    other = max(alike or known, key=lambda other: len(ends[other][0]))
    (own, others), clock = ends[other], clocks[other]
    assert clock
    if alike:
        # On one clock, ends that are far apart are not those of one collective.
        spread = _deviation((own - others).astype(np.float64)) if len(own) else 0.0
        return Clock(clock.offset_ns, clock.drift, clock.middle, spread, len(own))
    return _fitted(own, clock.aligned(others)) if len(own) else None


def _fitted(own: Ints, others: Ints) -> Clock:
    """The line through the middles of the first and the last third of the differences, level where it drifts little."""
    order = np.argsort(own)
    own, apart = own[order], (own - others)[order]
    offset, middle = float(np.median(apart)), float(np.median(own))
    spread = _deviation(apart - offset)
    third = len(own) // 3
    if third:
        run = float(np.median(own[-third:]) - np.median(own[:third]))
        rise = float(np.median(apart[-third:]) - np.median(apart[:third]))
        level = Clock(offset, 0.0, middle, spread, len(own))
        drift = rise / run if run else 0.0
        drifting = Clock(offset, drift, middle, _deviation(apart - offset - drift * (own - middle)), len(own))
        return drifting if _SURELY * drifting.spread_ns < abs(rise) else level
    return Clock(offset, 0.0, middle, spread, len(own))


def _deviation(apart: npt.NDArray[np.floating[Any]]) -> float:
    return _TO_DEVIATION * float(np.median(np.abs(apart)))


def _ends(members: Sequence[Member], found: Sequence[Matches], one: int, other: int) -> tuple[Ints, Ints]:
    """When shared collectives ended on two members: those that end together where there are any."""
    ends: list[tuple[Ints, Ints]] = []
    together: list[tuple[Ints, Ints]] = []
    for matches in found:
        if one in matches.members and other in matches.members:
            rows = [matches.index[matches.members.index(position)] for position in (one, other)]
            first, second = (members[position].collectives for position in (one, other))
            pair = first.end[rows[0]], second.end[rows[1]]
            ends.append(pair)
            alike = np.isin(first.kind[rows[0]], _END_TOGETHER)
            together.append((pair[0][alike], pair[1][alike]))
    chosen = together if any(len(pair[0]) for pair in together) else ends
    none = np.zeros(0, np.int64)
    return np.concatenate([none, *(p[0] for p in chosen)]), np.concatenate([none, *(p[1] for p in chosen)])
