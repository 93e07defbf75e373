"""Which collectives of several ranks are one: the same place in the same step of the same communicator.

Those that a program launches between two steps, such as a loss that is averaged, are matched among themselves. They are
of no step, but a rank may wait for them when the next one has begun.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import combinations

import numpy as np

from nsys_analyzer.analysis.intervals.timeline import NONE
from nsys_analyzer.analysis.ranks.member import ALL_TO_ALL, SEND_RECEIVE, Member
from nsys_analyzer.trace.arrays import Ints, dense_codes


@dataclass(frozen=True)
class Matches:
    """Collectives that several members took part in.

    Attributes:
        members: their positions among the members of the run.
        index: shape (members, matches), the index into each member's collectives.
        pairwise: whether these are exchanges between two ranks.
    """

    members: tuple[int, ...]
    index: Ints
    pairwise: bool

    def __len__(self) -> int:
        return int(self.index.shape[1])


@dataclass(frozen=True)
class Matched:
    """The matches of a run.

    Attributes:
        numbers: shape (steps,), of the steps that all members have.
        found: the matches, of one communicator each.
        apart: the steps, by number, whose collectives differ from rank to rank: who waits in them is not known.
    """

    numbers: Ints
    found: tuple[Matches, ...]
    apart: tuple[int, ...]

    @property
    def alike(self) -> Ints:
        """The numbers of the steps whose collectives are the same on all ranks."""
        alike: Ints = np.setdiff1d(self.numbers, self.apart)
        return alike


def with_all_to_all(members: Sequence[Member]) -> tuple[Member, ...]:
    """The members, with exchanges of every rank with every rank as what they are: NCCL sends and receives for them."""
    size: dict[int, int] = defaultdict(lambda: 2)
    for member in members:
        ids, peer, noted = (getattr(member.collectives, name) for name in ("communicator", "peer", "ranks"))
        for one in np.unique(ids[ids > 0]).tolist():
            users = sum(one in other.collectives.communicator for other in members)
            size[one] = max(size[one], users, int(peer[ids == one].max()) + 1, int(noted[ids == one].max()))
    return tuple(_with_all_to_all(member, size) for member in members)


def _with_all_to_all(member: Member, size: Mapping[int, int]) -> Member:
    """A member, where the communicators are of so many ranks; a message then is what passes between two of them."""
    collectives = member.collectives
    ids, code = dense_codes(collectives.communicator)
    ranks = np.array([size.get(one, 0) for one in ids.tolist()], np.int64)[code]
    is_all = (collectives.kind == SEND_RECEIVE) & (ranks > 0) & (collectives.peers >= ranks)
    if not is_all.any():
        return member
    kind = np.where(is_all, ALL_TO_ALL, collectives.kind)
    sizes = np.where(is_all & (collectives.bytes > 0), collectives.bytes // np.maximum(ranks, 1), collectives.bytes)
    return replace(member, collectives=replace(collectives, kind=kind, bytes=sizes))


def match_collectives(members: Sequence[Member]) -> Matched:
    """The collectives that are one, in the steps that all members have."""
    numbers = common_numbers(members)
    found: list[Matches] = []
    apart: set[int] = set()
    for users in _users(members).values():
        for pairwise in (False, True):
            for some in _groups(members, users, pairwise=pairwise):
                matches, lost = _match(members, some, numbers, pairwise=pairwise)
                apart |= lost
                if len(matches):
                    found.append(matches)
    return Matched(numbers, tuple(found), tuple(sorted(apart)))


def common_numbers(members: Sequence[Member]) -> Ints:
    """The numbers of the steps that all members have; by place, where the ranges of one do not say them."""
    common, *others = numbers_of(members)
    for numbers in others:
        common = np.intersect1d(common, numbers)
    return common


def numbers_of(members: Sequence[Member]) -> list[Ints]:
    """Shape (steps,) for each member: its steps' numbers; their places, where the ranges of one do not say them."""
    numbered = all(member.numbered for member in members)
    return [member.number if numbered else np.arange(len(member)) for member in members]


#: The collectives of a communicator that each member has: position to indices.
_Users = dict[int, Ints]


def _users(members: Sequence[Member]) -> dict[tuple[str, int], _Users]:
    """The collectives of each communicator; one without an ID is known by the place of its stream among such."""
    users: dict[tuple[str, int], _Users] = {}
    for position, member in enumerate(members):
        communicator = member.collectives.communicator
        ids, first = np.unique(communicator, return_index=True)
        streams = iter(range(len(ids)))
        for one in ids[np.argsort(first)].tolist():
            key = ("id", one) if one > 0 else ("stream", next(streams))
            users.setdefault(key, {})[position] = np.flatnonzero(communicator == one)
    return users


def _groups(members: Sequence[Member], users: _Users, *, pairwise: bool) -> list[_Users]:
    """The collectives to match with each other: those of all, or for exchanges those of each pair."""
    kept: _Users = {}
    for position, index in users.items():
        exchanges = members[position].collectives.kind[index] == SEND_RECEIVE
        if len(some := index[exchanges == pairwise]):
            kept[position] = some
    if not pairwise or len(kept) <= 2:
        return [kept] if len(kept) > 1 else []
    # A peer is known by its rank in the communicator: that of the run, if the communicator is of all.
    ranks = sorted(kept, key=lambda position: (members[position].rank or 0, members[position].device))
    with_peer = [
        {
            one: kept[one][members[one].collectives.peer[kept[one]] == ranks.index(other)]
            for one, other in ((low, high), (high, low))
        }
        for low, high in combinations(ranks, 2)
    ]
    return [pair for pair in with_peer if all(map(len, pair.values()))]


def _match(members: Sequence[Member], users: _Users, numbers: Ints, *, pairwise: bool) -> tuple[Matches, set[int]]:
    """The matches of one communicator in and behind some steps, and those steps in which its ranks' collectives differ.

    There are two places for collectives in each step: launched in it, and launched behind it, before the next one.
    """
    known_numbers = numbers_of(members)
    ordered, steps = [], []
    for position, index in users.items():
        collectives = members[position].collectives
        known = collectives.since[index] != NONE
        number = known_numbers[position][collectives.since[index[known]]]
        place = np.searchsorted(numbers, number)
        inside = np.append(numbers, NONE)[place] == number
        index, place = index[known][inside], place[inside]
        place = 2 * place + (collectives.step[index] == NONE)
        order = np.lexsort((collectives.start[index], collectives.launched[index], place))
        ordered.append(index[order])
        steps.append(place[order])
    counts = np.array([np.bincount(step, minlength=2 * len(numbers)) for step in steps])
    alike = (counts == counts[0]).all(axis=0)
    kept = [index[alike[step]] for index, step in zip(ordered, steps, strict=True)]
    step = steps[0][alike[steps[0]]]
    kinds = [
        members[position].collectives.kind[index] for position, index in zip(users, kept, strict=True)
    ]  # the same number of collectives in each step
    differs = np.zeros(len(step), np.bool_)
    for kind in kinds[1:]:
        differs |= kind != kinds[0]
    alike[step[differs]] = False
    index = np.array([one[alike[step]] for one in kept])
    return Matches(tuple(users), index, pairwise), set(numbers[~alike[::2]].tolist())
