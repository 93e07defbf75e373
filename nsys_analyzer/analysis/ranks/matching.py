"""What belongs together in the records of ranks: members of one run, collectives that are one, and times of one moment.

A collective ends on all of its ranks at once, by which their clocks are compared.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import combinations
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from nsys_analyzer.analysis.intervals import NONE
from nsys_analyzer.analysis.steps.member import (
    ALL_GATHER,
    ALL_REDUCE,
    ALL_TO_ALL,
    REDUCE_SCATTER,
    SEND_RECEIVE,
    Member,
)
from nsys_analyzer.text import StrOrText, phrase
from nsys_analyzer.trace.arrays import Ints, dense_codes

#: Clocks of hosts that run for one job differ by less, ns.
_CLOCKS_DIFFER_NS = 10_000_000_000
#: No run has more: a file that says so is broken.
_MOST_RANKS = 1_000_000
#: Those that no rank leaves before all have come, and all leave at about the same time.
END_TOGETHER = (ALL_REDUCE, ALL_GATHER, REDUCE_SCATTER, ALL_TO_ALL)
#: Clocks drift if they do so by more than the measure's own error, this many times.
_SURELY = 3
#: The median absolute deviation of what is normally distributed, to its standard deviation.
_TO_DEVIATION = 1.4826


# --- which members are of one run


def group_members(members: Sequence[Member]) -> list[tuple[tuple[Member, ...], tuple[StrOrText, ...]]]:
    """Returns the members of each run in order of rank, and what a reader must know of how they came together.

    Those of most members come first. Members of one run share a communicator, a capture, or a run of their manifests.
    Where neither communicators nor manifests tell, captures of different ranks of as many are of one run, if they
    were recorded at one time as far as that is known.
    """
    once: list[Member] = []
    originals: dict[str, str] = {}  # the capture that stays, by that which is its copy
    for member in members:
        original = next((other for other in once if _is_copy(member, other)), None)
        if original is None:
            once.append(member)
        else:
            originals[member.capture] = original.capture
    runs: list[tuple[list[Member], list[StrOrText]]] = []
    for part in (part for joined in _join_by_keys(once) for part in _split_by_rank(joined)):
        reasons = [_why_apart(part, run) for run, _ in runs]
        if None in reasons:
            runs[reasons.index(None)][0].extend(part)
        else:
            runs.append((part, [reason for reason in reasons if reason]))
    groups = []
    for run, why_apart in runs:
        captures = {member.capture for member in run}
        copies = [(copy, original) for copy, original in originals.items() if original in captures]
        notes: list[StrOrText] = [
            phrase("`{}` is the same capture as `{}`, and counts once.", *pair) for pair in copies
        ]
        # A run that has all of its ranks is nobody's rest.
        if missing_ranks(run) or len(run) == 1:
            notes += why_apart[:1]
        run.sort(key=lambda one: (one.rank is None, one.rank or 0, one.device, one.capture, one.process))
        groups.append((_with_all_to_all(run), tuple(notes)))
    return sorted(groups, key=lambda group: -len(group[0]))


def missing_ranks(group: Sequence[Member]) -> tuple[int, ...]:
    """Returns the ranks that no member is, as far as it is known how many there are, and which the members are."""
    size = min(max(member.world_size for member in group), _MOST_RANKS)
    ranks = _ranks(group)
    return () if not ranks and len(group) >= size else tuple(sorted(set(range(size)) - ranks))


def knows_communicators(member: Member) -> bool:
    """Returns whether it is known which communicators a member's collectives are of."""
    return bool((member.collectives.communicator > 0).any())


def _is_copy(member: Member, other: Member) -> bool:
    """Returns whether two members are one, of captures of different names, from which their ranks may be taken."""
    alike = (member.process, member.device) == (other.process, other.device)
    columns = [(each.start, each.collectives.start, each.collectives.communicator) for each in (member, other)]
    return alike and member.capture != other.capture and all(map(np.array_equal, *columns))


def _join_by_keys(members: Sequence[Member]) -> Iterator[list[Member]]:
    """Yields the members in groups that share a communicator, a capture, or a run of their manifests."""
    groups: list[tuple[set[Hashable], list[Member]]] = []
    for member in members:
        ids = np.unique(member.collectives.communicator)
        keys: set[Hashable] = {("capture", member.capture), *(("communicator", i) for i in ids[ids > 0].tolist())}
        if member.run:
            keys.add(("run", member.run))
        joined, rest = [member], []
        for other_keys, group in groups:
            if other_keys.isdisjoint(keys):
                rest.append((other_keys, group))
            else:
                keys, joined = keys | other_keys, [*group, *joined]
        groups = [*rest, (keys, joined)]
    return (group for _, group in groups)


def _split_by_rank(group: Sequence[Member]) -> list[list[Member]]:
    """Returns several parts where several captures are of one rank, the first capture of each in the first."""
    parts: list[list[Member]] = []
    for member in sorted(group, key=lambda member: (member.started_utc_ns, member.capture)):
        free = [part for part in parts if member.rank is None or member.rank not in _ranks(part)]
        if free:
            free[0].append(member)
        else:
            parts.append([member])
    return parts


def _why_apart(group: Sequence[Member], other: Sequence[Member]) -> StrOrText | None:
    """Returns why two groups that share nothing are not taken to be of one run; None where they are."""
    members = (*group, *other)
    both = _ranks(group) & _ranks(other)
    sizes = sorted({member.world_size for member in members if member.world_size})
    firsts = group[0], other[0]
    begin = max(int(member.start[0]) + member.started_utc_ns for member in firsts)
    end = min(int(member.end[-1]) + member.started_utc_ns for member in firsts)
    if both:
        why = f"both hold rank {min(both)}"
    elif any(member.rank is None for member in members):
        why = "the rank of one is not known"
    elif len(sizes) > 1:
        why = f"one is of {sizes[0]} ranks, one of {sizes[-1]}"
    elif all(map(knows_communicators, members)):
        why = "they share no communicator"
    elif len({member.run for member in members if member.run}) > 1:
        why = "their manifests name different runs"
    elif len({member.name_without_rank for member in members if member.name_without_rank}) > 1:
        why = "their names differ in more than the rank"
    elif all(member.started_utc_ns for member in firsts) and begin - end > _CLOCKS_DIFFER_NS:
        why = "one had ended before the other began"
    else:
        return None
    return phrase("`{}` and `{}` are not joined: {}.", other[0].capture, group[0].capture, why)


def _ranks(group: Sequence[Member]) -> set[int]:
    return {member.rank for member in group if member.rank is not None}


def _with_all_to_all(members: Sequence[Member]) -> tuple[Member, ...]:
    """Returns the members, with exchanges of every rank with every rank as what they are.

    NCCL sends and receives for them. A message then is what passes between two ranks.
    """
    size: dict[int, int] = defaultdict(lambda: 2)  # ranks of each communicator with an ID
    for member in members:
        ids, peer, ranks = (getattr(member.collectives, name) for name in ("communicator", "peer", "ranks"))
        for communicator in np.unique(ids[ids > 0]).tolist():
            users = sum(communicator in other.collectives.communicator for other in members)
            mine = ids == communicator
            size[communicator] = max(size[communicator], users, int(peer[mine].max()) + 1, int(ranks[mine].max()))
    changed = []
    for member in members:
        collectives = member.collectives
        distinct, code = dense_codes(collectives.communicator)
        ranks = np.array([size.get(communicator, 0) for communicator in distinct.tolist()], np.int64)[code]
        is_all = (collectives.kind == SEND_RECEIVE) & (ranks > 0) & (collectives.peers >= ranks)
        kind = np.where(is_all, ALL_TO_ALL, collectives.kind)
        sizes = np.where(is_all & (collectives.bytes > 0), collectives.bytes // np.maximum(ranks, 1), collectives.bytes)
        changed.append(replace(member, collectives=replace(collectives, kind=kind, bytes=sizes)))
    return tuple(changed)


# --- which collectives of several ranks are one


#: Collectives of one communicator that several members took part in: a member's position among those of the run, and
#: the indices into its collectives, as many of each where they are matched.
Match: TypeAlias = "dict[int, Ints]"


def match_collectives(members: Sequence[Member]) -> tuple[list[Match], Ints, list[int]]:
    """Returns the collectives that are one: of one place in a step of one communicator, in the steps of all members.

    Beside the matches, of one communicator each, these are the numbers of the steps that all members have, and of those
    whose collectives differ from rank to rank: who waits in them is not known.

    Those that a program launches between two steps, such as a loss that is averaged, are matched among themselves. They
    are of no step, but a rank may wait for them when the next one has begun.
    """
    numbers, *others = step_numbers(members)
    for other in others:
        numbers = np.intersect1d(numbers, other)
    # A communicator without an ID is known by the place of its stream among such.
    users_of: dict[tuple[str, int], Match] = defaultdict(dict)
    for position, member in enumerate(members):
        communicator = member.collectives.communicator
        ids, first = np.unique(communicator, return_index=True)
        streams = iter(range(len(ids)))
        for number in ids[np.argsort(first)].tolist():
            key = ("id", number) if number > 0 else ("stream", next(streams))
            users_of[key][position] = np.flatnonzero(communicator == number)
    matches: list[Match] = []
    apart: set[int] = set()
    for users in users_of.values():
        for group in _groups(members, users):
            match, differing = _match(members, group, numbers)
            apart |= differing
            if all(map(len, match.values())):
                matches.append(match)
    return matches, numbers, sorted(apart)


def step_numbers(members: Sequence[Member]) -> list[Ints]:
    """Returns the number of each step of each member; their places, where the ranges of some alone say the numbers."""
    alike = len({member.has_numbers for member in members}) == 1
    return [member.number if alike else np.arange(len(member)) for member in members]


def _groups(members: Sequence[Member], users: Match) -> Iterator[Match]:
    """Yields the collectives to match with each other: those of all users, and of exchanges those of each pair."""
    for is_exchange in (False, True):
        kinds = {position: members[position].collectives.kind[index] for position, index in users.items()}
        kept = {at: index[(kinds[at] == SEND_RECEIVE) == is_exchange] for at, index in users.items()}
        kept = {position: index for position, index in kept.items() if len(index)}
        if not is_exchange or len(kept) <= 2:
            if len(kept) > 1:
                yield kept
            continue
        # A peer is known by its rank in the communicator: that of the run, if the communicator is of all.
        ranks = sorted(kept, key=lambda position: (members[position].rank or 0, members[position].device))
        peers = {at: members[at].collectives.peer[index] for at, index in kept.items()}
        for (low, first), (high, second) in combinations(enumerate(ranks), 2):
            pair = {first: kept[first][peers[first] == high], second: kept[second][peers[second] == low]}
            if all(map(len, pair.values())):
                yield pair


def _match(members: Sequence[Member], users: Match, numbers: Ints) -> tuple[Match, set[int]]:
    """Returns the matches of one communicator, and the steps by number in which its ranks' collectives differ.

    There are two places for collectives in each step: launched in it, and launched behind it, before the next one.
    """
    numbers_of_member = step_numbers(members)
    indices, places = [], []
    for position, every in users.items():
        collectives = members[position].collectives
        index = every[collectives.since[every] != NONE]
        number = numbers_of_member[position][collectives.since[index]]
        step = np.searchsorted(numbers, number)
        is_common = np.append(numbers, NONE)[step] == number
        index, step = index[is_common], step[is_common]
        place = 2 * step + (collectives.step[index] == NONE)
        order = np.lexsort((collectives.start[index], collectives.launched[index], place))
        indices.append(index[order])
        places.append(place[order])
    counts = np.array([np.bincount(place, minlength=2 * len(numbers)) for place in places])
    alike = (counts == counts[0]).all(axis=0)
    # Of the places that are left all members have as many collectives.
    indices = [index[alike[place]] for index, place in zip(indices, places, strict=True)]
    place = places[0][alike[places[0]]]
    kinds = np.array([members[at].collectives.kind[index] for at, index in zip(users, indices, strict=True)])
    alike[place[(kinds != kinds[0]).any(axis=0)]] = False
    matched = (index[alike[place]] for index in indices)
    return dict(zip(users, matched, strict=True)), set(numbers[~alike[::2]].tolist())


# --- which times of several clocks are one


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
        """Returns times of the member on the first one's clock."""
        whole = int(self.offset_ns // 1)  # a sum with days of offset would round the fractions of the drift
        shift = self.offset_ns - whole + self.drift * (time - self.middle)
        aligned: Ints = time - whole - np.floor(shift + 0.5).astype(np.int64)  # halves go one way, whatever the offset
        return aligned


def align_clocks(members: Sequence[Member], matches: Sequence[Match]) -> list[Clock | None]:
    """Returns the clock of each member; None for one that shares no collective with the first, nor with one that does.

    Members of one capture have one clock.
    """
    clocks: list[Clock | None] = [Clock(), *(None for _ in members[1:])]
    for _ in members:  # as often as a chain of shared collectives can be long
        for position in range(1, len(members)):
            if clocks[position] is None:
                clocks[position] = _clock(members, matches, clocks, position)
    return clocks


def _clock(
    members: Sequence[Member], matches: Sequence[Match], clocks: Sequence[Clock | None], position: int
) -> Clock | None:
    """Returns the clock of a member by the collectives that it shares with one whose clock is known: with whom most."""
    known = [other for other, clock in enumerate(clocks) if clock]
    ends = {other: _ends(members, matches, position, other) for other in known}
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
    """Returns the line through the middles of the first and the last third of the differences.

    It is level where it drifts little.
    """
    order = np.argsort(own)
    own, apart = own[order], (own - others)[order]
    offset, middle = float(np.median(apart)), float(np.median(own))
    level = Clock(offset, 0.0, middle, _deviation(apart - offset), len(own))
    third = len(own) // 3
    run, rise = (
        float(np.median(times[-third:]) - np.median(times[:third])) if third else 0.0 for times in (own, apart)
    )
    if not run:
        return level
    drift = rise / run
    drifting = Clock(offset, drift, middle, _deviation(apart - offset - drift * (own - middle)), len(own))
    return drifting if _SURELY * drifting.spread_ns < abs(rise) else level


def _deviation(apart: npt.NDArray[np.floating[Any]]) -> float:
    return _TO_DEVIATION * float(np.median(np.abs(apart)))


def _ends(members: Sequence[Member], matches: Sequence[Match], position: int, other: int) -> tuple[Ints, Ints]:
    """Returns when shared collectives ended on two members: those that end together where there are any."""
    none = np.zeros(0, np.int64)
    rows = [(none, none, none)]
    for match in matches:
        if position in match and other in match:
            own, others = (members[place].collectives.select(match[place]) for place in (position, other))
            rows.append((own.end, others.end, own.kind))
    end, other_end, kind = (np.concatenate(column) for column in zip(*rows, strict=True))
    together = np.isin(kind, END_TOGETHER)
    return (end[together], other_end[together]) if together.any() else (end, other_end)
