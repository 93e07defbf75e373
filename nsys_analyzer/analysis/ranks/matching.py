"""Matches the records of ranks: finds the members of each run, their shared collectives, and their clocks.

Clocks are aligned on the ends of collectives, because a collective ends on all of its ranks at the same time.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import combinations
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from nsys_analyzer.analysis.intervals import NONE
from nsys_analyzer.analysis.ranks.run import JoinNote, Separation
from nsys_analyzer.analysis.steps.member import (
    ALL_GATHER,
    ALL_REDUCE,
    ALL_TO_ALL,
    REDUCE_SCATTER,
    SEND_RECEIVE,
    Member,
)
from nsys_analyzer.trace.arrays import Ints, dense_codes

#: The clocks of the hosts of one job are assumed to differ by less than this, ns.
_LARGEST_CLOCK_DIFFERENCE_NS = 10_000_000_000
#: World sizes are limited to this value, because a larger one is an error in the file.
_MAX_WORLD_SIZE = 1_000_000
#: The kinds of collectives in which every rank waits for all others, so that all ranks finish at about the same time.
KINDS_WITH_COMMON_END = (ALL_REDUCE, ALL_GATHER, REDUCE_SCATTER, ALL_TO_ALL)
#: A clock counts as drifting if its drift over the capture exceeds the error of the measurement by this factor.
_MIN_DRIFT_TO_ERROR = 3
#: The standard deviation of a normal distribution divided by its median absolute deviation.
_DEVIATION_TO_MEDIAN_DEVIATION = 1.4826


# --- the members of each run


def group_members(members: Sequence[Member]) -> list[tuple[tuple[Member, ...], tuple[JoinNote, ...]]]:
    """Returns the members of each run in order of rank, with notes on the grouping. The largest run comes first.

    Members of one run share a communicator, a capture, or the run that their manifests name. If neither communicators
    nor manifests identify the run, captures of different ranks belong to one run if they have the same world size and,
    as far as it is known, were recorded at the same time.
    """
    original_members: list[Member] = []
    original_of_copy: dict[str, str] = {}  # the name of the original capture, by the name of its copy
    for member in members:
        original_member = next((candidate for candidate in original_members if _is_copy(member, candidate)), None)
        if original_member is None:
            original_members.append(member)
        else:
            original_of_copy[member.capture] = original_member.capture
    runs: list[tuple[list[Member], list[JoinNote]]] = []
    for part in (part for joined_group in _group_by_keys(original_members) for part in _split_by_rank(joined_group)):
        separations = [_find_separation(part, run) for run, _ in runs]
        if None in separations:
            runs[separations.index(None)][0].extend(part)
        else:
            runs.append((part, [separation for separation in separations if separation]))
    member_groups = []
    for run, separation_notes in runs:
        captures = {member.capture for member in run}
        notes = [JoinNote("copy", names) for names in original_of_copy.items() if names[1] in captures]
        # The reason why a run was not joined with another run matters only if the run lacks ranks.
        if find_missing_ranks(run) or len(run) == 1:
            notes += separation_notes[:1]
        run.sort(key=lambda m: (m.rank is None, m.rank or 0, m.device, m.capture, m.process))
        member_groups.append((_replace_exchanges_by_all_to_all(run), tuple(notes)))
    return sorted(member_groups, key=lambda group: -len(group[0]))


def find_missing_ranks(group: Sequence[Member]) -> tuple[int, ...]:
    """Returns the ranks of a run without a member; nothing if the world size or the ranks of members are not known."""
    size = min(max(member.world_size for member in group), _MAX_WORLD_SIZE)
    ranks = _known_ranks(group)
    return () if not ranks and len(group) >= size else tuple(sorted(set(range(size)) - ranks))


def has_known_communicators(member: Member) -> bool:
    """Returns whether the communicators of a member's collectives are known."""
    return bool((member.collectives.communicator > 0).any())


def _is_copy(first: Member, second: Member) -> bool:
    """Returns whether two captures with different names contain the same recording of one member."""
    if first.capture == second.capture or (first.process, first.device) != (second.process, second.device):
        return False
    columns = [(member.start, member.collectives.start, member.collectives.communicator) for member in (first, second)]
    return all(map(np.array_equal, *columns))


def _group_by_keys(members: Sequence[Member]) -> Iterator[list[Member]]:
    """Yields the members in groups that share a communicator, a capture, or the run that their manifests name."""
    groups: list[tuple[set[Hashable], list[Member]]] = []
    for member in members:
        ids = np.unique(member.collectives.communicator)
        keys: set[Hashable] = {("capture", member.capture), *(("communicator", i) for i in ids[ids > 0].tolist())}
        if member.run:
            keys.add(("run", member.run))
        joined_members, separate_groups = [member], []
        for group_keys, group in groups:
            if group_keys.isdisjoint(keys):
                separate_groups.append((group_keys, group))
            else:
                keys, joined_members = keys | group_keys, [*group, *joined_members]
        groups = [*separate_groups, (keys, joined_members)]
    return (group for _, group in groups)


def _split_by_rank(group: Sequence[Member]) -> list[list[Member]]:
    """Splits a group into parts that have each rank at most once. The first part has each rank's earliest capture."""
    parts: list[list[Member]] = []
    for member in sorted(group, key=lambda member: (member.started_utc_ns, member.capture)):
        lacks_rank = (part for part in parts if member.rank is None or member.rank not in _known_ranks(part))
        if part := next(lacks_rank, None):
            part.append(member)
        else:
            parts.append([member])
    return parts


def _find_separation(group: Sequence[Member], earlier_group: Sequence[Member]) -> JoinNote | None:
    """Returns the reason why two groups without a common key are separate runs; None if they belong to one run."""
    members = (*group, *earlier_group)
    shared_ranks = _known_ranks(group) & _known_ranks(earlier_group)
    world_sizes = sorted({member.world_size for member in members if member.world_size})
    first_members = group[0], earlier_group[0]
    latest_start_ns = max(int(member.start[0]) + member.started_utc_ns for member in first_members)
    gap_ns = latest_start_ns - min(int(member.end[-1]) + member.started_utc_ns for member in first_members)
    reason: Separation
    noted_numbers: tuple[int, ...] = ()
    if shared_ranks:
        reason, noted_numbers = "same rank", (min(shared_ranks),)
    elif any(member.rank is None for member in members):
        reason = "unknown rank"
    elif len(world_sizes) > 1:
        reason, noted_numbers = "different world sizes", (world_sizes[0], world_sizes[-1])
    elif all(map(has_known_communicators, members)):
        reason = "no common communicator"
    elif len({member.run for member in members if member.run}) > 1:
        reason = "different runs"
    elif len({member.name_without_rank for member in members if member.name_without_rank}) > 1:
        reason = "different names"
    elif all(member.started_utc_ns for member in first_members) and gap_ns > _LARGEST_CLOCK_DIFFERENCE_NS:
        reason = "different times"
    else:
        return None
    return JoinNote(reason, (earlier_group[0].capture, group[0].capture), noted_numbers)


def _known_ranks(group: Sequence[Member]) -> set[int]:
    """Returns the set of the rank numbers that the members are known to have."""
    return {member.rank for member in group if member.rank is not None}


def _replace_exchanges_by_all_to_all(members: Sequence[Member]) -> tuple[Member, ...]:
    """Returns the members, with sends and receives between all ranks replaced by the all-to-all that they implement.

    NCCL implements an all-to-all by sends and receives. The message size becomes the bytes between two ranks.
    """
    size: dict[int, int] = defaultdict(lambda: 2)  # the number of ranks of each communicator with an ID
    users: Counter[int] = Counter()
    for member in members:
        ids, peer, ranks = (getattr(member.collectives, name) for name in ("communicator", "peer", "ranks"))
        for communicator in np.unique(ids[ids > 0]).tolist():
            users[communicator] += 1
            uses_communicator = ids == communicator
            size[communicator] = max(
                size[communicator], int(peer[uses_communicator].max()) + 1, int(ranks[uses_communicator].max())
            )
    size |= {communicator: max(size[communicator], count) for communicator, count in users.items()}
    changed_members = []
    for member in members:
        collectives = member.collectives
        distinct_communicators, code = dense_codes(collectives.communicator)
        ranks = np.array([size.get(communicator, 0) for communicator in distinct_communicators.tolist()], np.int64)[
            code
        ]
        is_all_to_all = (collectives.kind == SEND_RECEIVE) & (ranks > 0) & (collectives.peers >= ranks)
        kind = np.where(is_all_to_all, ALL_TO_ALL, collectives.kind)
        sizes = np.where(
            is_all_to_all & (collectives.bytes > 0), collectives.bytes // np.maximum(ranks, 1), collectives.bytes
        )
        changed_members.append(replace(member, collectives=replace(collectives, kind=kind, bytes=sizes)))
    return tuple(changed_members)


# --- the collectives that ranks share


#: Collectives of one communicator: the indices into the collectives of a member, by the member's position in the run.
#: In a match, all members have the same number of indices, and equal positions in the arrays denote one collective.
Match: TypeAlias = "dict[int, Ints]"


def match_collectives(members: Sequence[Member]) -> tuple[list[Match], Ints, list[int]]:
    """Matches the collectives that ranks share.

    The n-th collective of a step in a communicator is one collective on all ranks. Collectives that a program launches
    between two steps, such as the average of a loss, are matched among themselves. They belong to no step, but a rank
    may still wait for them in the next step.

    Returns:
        The matches, each in one communicator. The numbers of the steps that all members have. The numbers of those
        steps whose collectives differ between ranks: it is unknown which rank waits in such a step.
    """
    step_numbers, *numbers_of_others = find_step_numbers(members)
    for member_numbers in numbers_of_others:
        step_numbers = np.intersect1d(step_numbers, member_numbers)
    # A communicator without an ID is identified by the position of its stream among the streams without an ID.
    collectives_by_communicator: dict[tuple[str, int], Match] = defaultdict(dict)
    for position, member in enumerate(members):
        communicator = member.collectives.communicator
        ids, first_user = np.unique(communicator, return_index=True)
        streams = iter(range(len(ids)))
        for number in ids[np.argsort(first_user)].tolist():
            key = ("id", number) if number > 0 else ("stream", next(streams))
            collectives_by_communicator[key][position] = np.flatnonzero(communicator == number)
    matches: list[Match] = []
    differing_steps: set[int] = set()
    for users in collectives_by_communicator.values():
        for candidates in _split_exchanges(members, users):
            match, unequal_steps = _match_in_communicator(members, candidates, step_numbers)
            differing_steps |= unequal_steps
            if all(map(len, match.values())):
                matches.append(match)
    return matches, step_numbers, sorted(differing_steps)


def find_step_numbers(members: Sequence[Member]) -> list[Ints]:
    """Returns the step numbers of each member.

    If only some members have numbers in the names of their step ranges, steps are numbered by position on all members.
    """
    are_all_with_numbers = len({member.has_numbers for member in members}) == 1
    return [member.number if are_all_with_numbers else np.arange(len(member)) for member in members]


def _split_exchanges(members: Sequence[Member], users: Match) -> Iterator[Match]:
    """Yields the collectives to match: first those of all users, then the sends and receives of each pair of ranks."""
    for is_exchange in (False, True):
        kinds = {position: members[position].collectives.kind[index] for position, index in users.items()}
        index_of_member = {
            position: index[(kinds[position] == SEND_RECEIVE) == is_exchange] for position, index in users.items()
        }
        index_of_member = {position: index for position, index in index_of_member.items() if len(index)}
        if not is_exchange or len(index_of_member) <= 2:
            if len(index_of_member) > 1:
                yield index_of_member
            continue
        # A peer is a rank of the communicator, which is a rank of the run if the communicator has all ranks.
        ranks = sorted(index_of_member, key=lambda position: (members[position].rank or 0, members[position].device))
        peers = {position: members[position].collectives.peer[index] for position, index in index_of_member.items()}
        for (lower_rank, first_member), (higher_rank, second_member) in combinations(enumerate(ranks), 2):
            pair = {
                first_member: index_of_member[first_member][peers[first_member] == higher_rank],
                second_member: index_of_member[second_member][peers[second_member] == lower_rank],
            }
            if all(map(len, pair.values())):
                yield pair


def _match_in_communicator(members: Sequence[Member], users: Match, numbers: Ints) -> tuple[Match, set[int]]:
    """Returns the shared collectives of one communicator, and the numbers of the steps in which its ranks differ.

    Place 2·k contains the collectives that were launched in step k, and place 2·k + 1 those that were launched between
    step k and the next step.
    """
    numbers_by_member = find_step_numbers(members)
    indices, matched_places = [], []
    for position, candidates in users.items():
        collectives = members[position].collectives
        index = candidates[collectives.last_begun_step[candidates] != NONE]
        number = numbers_by_member[position][collectives.last_begun_step[index]]
        step = np.searchsorted(numbers, number)
        is_common = np.append(numbers, NONE)[step] == number
        index, step = index[is_common], step[is_common]
        place = 2 * step + (collectives.step[index] == NONE)
        order = np.lexsort((collectives.start[index], collectives.launched[index], place))
        indices.append(index[order])
        matched_places.append(place[order])
    counts = np.array([np.bincount(place, minlength=2 * len(numbers)) for place in matched_places])
    has_equal_count = (counts == counts[0]).all(axis=0)
    # Only places in which all members have the same number of collectives are kept.
    indices = [index[has_equal_count[place]] for index, place in zip(indices, matched_places, strict=True)]
    place = matched_places[0][has_equal_count[matched_places[0]]]
    kinds = np.array(
        [members[position].collectives.kind[index] for position, index in zip(users, indices, strict=True)]
    )
    has_equal_count[place[(kinds != kinds[0]).any(axis=0)]] = False
    matched_indices = (index[has_equal_count[place]] for index in indices)
    return dict(zip(users, matched_indices, strict=True)), set(numbers[~has_equal_count[::2]].tolist())


# --- the alignment of clocks


@dataclass(frozen=True)
class Clock:
    """The difference between the clock of a member and the clock of the first member.

    Attributes:
        offset_ns: the member's clock minus the first member's clock in the middle of the capture, ns.
        drift: the growth of the offset, ns per ns.
        middle_ns: the middle of the capture on the member's clock, ns.
        spread_ns: the standard deviation of the difference between the two aligned ends of a shared collective, ns; 0
            if no collective is shared.
        collectives: the number of shared collectives from which the clock was fitted.
    """

    offset_ns: float = 0.0
    drift: float = 0.0
    middle_ns: float = 0.0
    spread_ns: float = 0.0
    collectives: int = 0

    def aligned(self, time: Ints) -> Ints:
        """Converts times on the member's clock to the first member's clock, ns."""
        # The whole part of the offset is subtracted as an integer, because a float that contains an offset of days
        # lacks the precision for the drift.
        whole_ns = int(self.offset_ns // 1)
        shift_ns = self.offset_ns - whole_ns + self.drift * (time - self.middle_ns)
        aligned: Ints = time - whole_ns - np.floor(shift_ns + 0.5).astype(np.int64)
        return aligned


def align_clocks(members: Sequence[Member], matches: Sequence[Match]) -> list[Clock | None]:
    """Returns the clock of each member; None if no chain of shared collectives connects it with the first member.

    Members of one capture have one clock.
    """
    clocks: list[Clock | None] = [Clock(), *(None for _ in members[1:])]
    shared = _count_shared_ends(members, matches)
    unaligned = list(range(1, len(members)))
    while unaligned:  # a member may be connected only by members whose clocks are found later
        for position in unaligned:
            clocks[position] = _align_clock(members, matches, clocks, position, shared[position])
        still_unaligned = [position for position in unaligned if clocks[position] is None]
        unaligned = still_unaligned if len(still_unaligned) < len(unaligned) else []
    return clocks


def _count_shared_ends(members: Sequence[Member], matches: Sequence[Match]) -> Ints:
    """Counts the collectives that ``_find_shared_ends`` finds for each pair of members; shape (members, members)."""
    with_common_end, all_shared = np.zeros((2, len(members), len(members)), np.int64)
    for match in matches:
        positions = np.array(list(match))
        position, index = next(iter(match.items()))
        pairs = np.ix_(positions, positions)
        with_common_end[pairs] += np.isin(members[position].collectives.kind[index], KINDS_WITH_COMMON_END).sum()
        all_shared[pairs] += len(index)
    return np.where(with_common_end > 0, with_common_end, all_shared)


def _align_clock(
    members: Sequence[Member], matches: Sequence[Match], clocks: Sequence[Clock | None], position: int, shared: Ints
) -> Clock | None:
    """Returns the clock of a member, aligned with that of the member that shares the most collectives with it.

    ``shared`` is the number of collectives that the member shares with each member.
    """
    candidates = [place for place, clock in enumerate(clocks) if clock]
    same_capture = [place for place in candidates if members[place].capture == members[position].capture]
    reference = max(same_capture or candidates, key=lambda place: int(shared[place]))
    clock, (ends, reference_ends) = clocks[reference], _find_shared_ends(members, matches, position, reference)
    assert clock
    if same_capture:
        # Members of one capture have one clock. Ends that are far apart then show that the match is wrong.
        deviation_ns = _estimate_deviation((ends - reference_ends).astype(np.float64)) if len(ends) else 0.0
        return Clock(clock.offset_ns, clock.drift, clock.middle_ns, deviation_ns, len(ends))
    return _fit_clock(ends, clock.aligned(reference_ends)) if len(ends) else None


def _fit_clock(ends: Ints, reference_ends: Ints) -> Clock:
    """Fits the offset and the drift of a clock to the ends of shared collectives.

    The drift is the slope from the median of the first third of the ends to the median of the last third. It is 0 if it
    is not significant.
    """
    order = np.argsort(ends)
    ends, difference = ends[order], (ends - reference_ends)[order]
    offset, middle_ns = float(np.median(difference)), float(np.median(ends))
    constant = Clock(offset, 0.0, middle_ns, _estimate_deviation(difference - offset), len(ends))
    third_length = len(ends) // 3
    run, rise = (
        float(np.median(times[-third_length:]) - np.median(times[:third_length])) if third_length else 0.0
        for times in (ends, difference)
    )
    if not run:
        return constant
    drift = rise / run
    residual = difference - offset - drift * (ends - middle_ns)
    drifting = Clock(offset, drift, middle_ns, _estimate_deviation(residual), len(ends))
    return drifting if _MIN_DRIFT_TO_ERROR * drifting.spread_ns < abs(rise) else constant


def _estimate_deviation(differences: npt.NDArray[np.floating[Any]]) -> float:
    """Estimates the standard deviation from the median absolute deviation, so that outliers have no effect."""
    return _DEVIATION_TO_MEDIAN_DEVIATION * float(np.median(np.abs(differences)))


def _find_shared_ends(
    members: Sequence[Member], matches: Sequence[Match], position: int, reference: int
) -> tuple[Ints, Ints]:
    """Returns the ends of the collectives that two members share, for each member.

    Only kinds that end at the same time on all ranks are used, if the members share such a collective.
    """
    no_ends = np.zeros(0, np.int64)
    rows = [(no_ends, no_ends, no_ends)]
    collectives, reference_collectives = members[position].collectives, members[reference].collectives
    for match in matches:
        if position in match and reference in match:
            index = match[position]
            rows.append((collectives.end[index], reference_collectives.end[match[reference]], collectives.kind[index]))
    end, reference_end, kind = (np.concatenate(column) for column in zip(*rows, strict=True))
    have_common_end = np.isin(kind, KINDS_WITH_COMMON_END)
    return (end[have_common_end], reference_end[have_common_end]) if have_common_end.any() else (end, reference_end)
