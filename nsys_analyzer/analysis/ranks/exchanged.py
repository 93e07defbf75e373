"""The collectives of a run by kind, phase and size: how many, how long, how fast."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from nsys_analyzer.analysis.intervals.timeline import NONE
from nsys_analyzer.analysis.ranks.matching import Matches
from nsys_analyzer.analysis.ranks.member import (
    ALL_GATHER,
    ALL_REDUCE,
    ALL_TO_ALL,
    COLLECTIVE_KINDS,
    GATHER,
    OTHER_KIND,
    REDUCE_SCATTER,
    SCATTER,
    Member,
)
from nsys_analyzer.analysis.ranks.run import CollectiveFigures
from nsys_analyzer.analysis.ranks.waits import Waits
from nsys_analyzer.analysis.summary.statistics import Stats
from nsys_analyzer.trace.arrays import Ints, distinct_rows

_NS_PER_MS = 1e6


#: Kind, phase, bytes, and how many ranks take part, 0 where that is not known.
_Key = tuple[int, str, int, int]


@dataclass
class _Some:
    """Collectives of one kind, phase and size: ns of each on each rank.

    Attributes:
        members: the positions of those that take part.
        matched: the transfers of those that were matched.
    """

    members: set[int] = field(default_factory=set)
    durations: list[Ints] = field(default_factory=list)
    waits: list[Ints] = field(default_factory=list)
    matched: list[Ints] = field(default_factory=list)


def collective_figures(
    members: Sequence[Member], found: Sequence[Matches], steps: Sequence[Ints], waits: Sequence[Waits] | None,
    lacks_ranks: bool,
) -> tuple[CollectiveFigures, ...]:  # fmt: skip
    """The collectives of some steps, the longest in all first.

    Args:
        members: of the run.
        found: their collectives that are one.
        steps: the places of the steps among those of each member, as many of each.
        waits: of each member; None where that is not known.
        lacks_ranks: whether ranks of the run are no members, so that nobody knows how long these wait.
    """
    rows: dict[_Key, _Some] = defaultdict(_Some)
    is_whole = not lacks_ranks and (len(members) > 1 or members[0].world_size == 1)
    sizes = _ranks_of_communicators(members, is_whole=is_whole)
    of_all = len(members) if is_whole else 0
    for position, member in enumerate(members):
        collectives = member.collectives
        in_step = np.isin(collectives.step, steps[position])
        is_match = np.zeros(len(collectives), np.bool_)
        for matches in found:
            if position in matches.members:
                is_match[matches.index[matches.members.index(position)]] = True
        duration = collectives.end - collectives.start
        waited = waits[position].until - collectives.start if waits else np.zeros_like(duration)
        columns = collectives.kind, collectives.phase, collectives.bytes, collectives.communicator, collectives.ranks
        for mine in _alike(np.flatnonzero(in_step), columns):
            kind, phase, size, communicator, noted = (int(column[mine[0]]) for column in columns)
            name = member.collectives.names[phase] if phase != NONE else ""
            some = rows[kind, name, size, noted or sizes.get(communicator, of_all)]
            some.members.add(position)
            some.durations.append(duration[mine])
            if waits:
                shared = mine[is_match[mine]]
                some.waits.append(waited[mine])
                some.matched.append(duration[shared] - waited[shared])
    figures = (_figures(key, some, len(steps[0]), lacks_ranks=lacks_ranks) for key, some in rows.items())
    return tuple(sorted(figures, key=lambda row: -(row.duration_ms.mean or 0.0) * row.count))


def _alike(index: Ints, columns: Sequence[Ints]) -> list[Ints]:
    """Some rows of columns in groups of those that are the same in all."""
    first, group = distinct_rows(*(column[index] for column in columns))
    count = np.bincount(group, minlength=len(first))
    return np.split(index[np.argsort(group, kind="stable")], np.cumsum(count)[:-1]) if len(index) else []


def _ranks_of_communicators(members: Sequence[Member], *, is_whole: bool) -> dict[int, int]:
    """How many ranks each communicator with an ID is of: as NCCL notes, else as many members as use it.

    Where they are not the whole run these are no measure, and it is 0: not known.
    """
    users: dict[int, int] = defaultdict(int)
    noted: dict[int, int] = {}
    for member in members:
        first, _ = distinct_rows(member.collectives.communicator, member.collectives.ranks)
        pairs = [(int(member.collectives.communicator[at]), int(member.collectives.ranks[at])) for at in first]
        for one in {one for one, _ in pairs if one > 0}:
            users[one] += 1
        noted |= {one: ranks for one, ranks in pairs if ranks}
    return {one: noted.get(one, count if is_whole else 0) for one, count in users.items()}


def _figures(key: _Key, some: _Some, steps: int, *, lacks_ranks: bool) -> CollectiveFigures:
    kind, phase, size, ranks = key
    durations = np.concatenate(some.durations)
    matched = np.concatenate(some.matched) if some.matched else np.zeros(0, np.int64)
    known = len(matched) > 0 and not lacks_ranks
    a_step = len(some.members) * steps * _NS_PER_MS
    waiting = float(np.concatenate(some.waits).sum()) if known else 0.0
    one = Stats.of_ns(matched) if known else Stats()
    link = _bytes_over_a_link(kind, size, ranks)
    return CollectiveFigures(
        kind=COLLECTIVE_KINDS[kind],
        phase=phase,
        bytes=size if size >= 0 else None,
        ranks=ranks or None,
        count=len(durations) / len(some.members) / steps,
        duration_ms=Stats.of_ns(durations),
        waiting_ms=waiting / a_step if known else None,
        transfer_ms=(float(durations.sum()) - waiting) / a_step if known else None,
        transfer_one_ms=one,
        bus_bytes_per_s=link / (one.median / 1e3) if known and link and one.median else None,
    )


def _bytes_over_a_link(kind: int, size: int, ranks: int) -> float | None:
    """The bytes that pass each rank's link, as nccl-tests (PERFORMANCE.md) defines bus bandwidth.

    NCCL counts the message of an all-reduce, a broadcast and a reduce as a whole, that of the others on one rank or
    between two.
    """
    if size <= 0 or ranks < 2 or kind == OTHER_KIND:
        return None
    if kind == ALL_REDUCE:
        return size * 2 * (ranks - 1) / ranks
    if kind in (ALL_GATHER, REDUCE_SCATTER, ALL_TO_ALL, GATHER, SCATTER):
        return float(size * (ranks - 1))
    return float(size)
