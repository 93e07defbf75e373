"""Which members are of one run: those that share a communicator, a capture, or a run of their manifests."""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from nsys_analyzer.analysis.ranks.member import Member
from nsys_analyzer.text import Words, phrase


@dataclass(frozen=True)
class Group:
    """Members of one run, in order of rank, and what a reader must know of how they came together."""

    members: tuple[Member, ...]
    notes: tuple[Words, ...] = ()


def group_members(members: Sequence[Member]) -> tuple[Group, ...]:
    """The runs, those of one member last.

    Where neither communicators nor manifests tell, captures of different ranks of as many are of one run, if they
    were recorded at one time as far as that is known.
    """
    once, copies = _each_once(members)
    merged: list[list[Member]] = []
    reasons: list[list[Words]] = []
    for group in (part for one in _certainly_one_run(once) for part in _each_rank_once(one)):
        why = [_why_apart(group, other) for other in merged]
        if None in why:
            merged[why.index(None)] += group
        else:
            merged.append(group)
            reasons.append([reason for reason in why if reason])
    found = [
        Group(
            tuple(sorted(group, key=_order)),
            (
                *(note for same, note in copies if any(same is member for member in group)),
                # A run that has all of its ranks is nobody's rest.
                *(why[:1] if missing_ranks(group) or len(group) == 1 else ()),
            ),
        )
        for group, why in zip(merged, reasons, strict=True)
    ]
    return tuple(sorted(found, key=lambda group: -len(group.members)))


def missing_ranks(group: Sequence[Member]) -> tuple[int, ...]:
    """The ranks of a run that no member is, as far as it is known how many there are, and which the members are."""
    size = max(member.world_size for member in group)
    known = set(_ranks(group))
    return () if not known and len(group) >= size else tuple(sorted(set(range(size)) - known))


def _order(member: Member) -> tuple[bool, int, int, str, int]:
    return member.rank is None, member.rank or 0, member.device, member.capture, member.process


def _each_once(members: Sequence[Member]) -> tuple[list[Member], list[tuple[Member, Words]]]:
    """The members without copies of a capture, and for each copy a member that stays and what to say of it."""
    once: list[Member] = []
    copies: dict[str, tuple[Member, Words]] = {}
    for member in members:
        same = next((other for other in once if _is_copy(member, other)), None)
        if same is None:
            once.append(member)
        else:
            said = phrase("`{}` is the same capture as `{}`, and counts once.", member.capture, same.capture)
            copies[member.capture] = same, said
    return once, list(copies.values())


def _each_rank_once(group: Sequence[Member]) -> list[list[Member]]:
    """The members, in several parts where several captures are of one rank, the first capture of each in the first."""
    parts: list[list[Member]] = []
    for member in sorted(group, key=lambda member: (member.started_utc_ns, member.capture)):
        free = (part for part in parts if member.rank is None or member.rank not in _ranks(part))
        part = next(free, None)
        if part is None:
            parts.append([member])
        else:
            part.append(member)
    return parts


def _is_copy(one: Member, other: Member) -> bool:
    alike = (one.process, one.device, one.rank) == (other.process, other.device, other.rank)
    columns = [(member.start, member.collectives.start, member.collectives.communicator) for member in (one, other)]
    return alike and one.capture != other.capture and all(map(np.array_equal, *columns))


def _certainly_one_run(members: Sequence[Member]) -> Iterator[list[Member]]:
    """The members in groups of those that are joined by shared keys."""
    groups: list[tuple[set[Hashable], list[Member]]] = []
    for member in members:
        keys, joined, rest = _keys(member), [member], []
        for known, group in groups:
            if known.isdisjoint(keys):
                rest.append((known, group))
            else:
                keys, joined = keys | known, [*group, *joined]
        groups = [*rest, (keys, joined)]
    return (group for _, group in groups)


def _keys(member: Member) -> set[Hashable]:
    """What members of one run share."""
    ids = np.unique(member.collectives.communicator)
    keys: set[Hashable] = {("communicator", one) for one in ids[ids > 0].tolist()}
    return keys | {("capture", member.capture)} | ({("run", member.run)} if member.run else set())


def _why_apart(group: Sequence[Member], other: Sequence[Member]) -> Words | None:
    """Why two groups that share nothing are not taken to be of one run; None where they are."""
    both = set(_ranks(group)) & set(_ranks(other))
    sizes = sorted({member.world_size for member in (*group, *other) if member.world_size})
    if both:
        why = f"both hold rank {min(both)}"
    elif any(member.rank is None for member in (*group, *other)):
        why = "the rank of one is not known"
    elif len(sizes) > 1:
        why = f"one is of {sizes[0]} ranks, one of {sizes[-1]}"
    elif all(map(knows_communicators, (*group, *other))):
        why = "they share no communicator"
    elif len({member.run for member in (*group, *other) if member.run}) > 1:
        why = "their manifests name different runs"
    elif len({member.named for member in (*group, *other) if member.named}) > 1:
        why = "their names differ in more than the rank"
    elif _at_different_times(group[0], other[0]):
        why = "one had ended before the other began"
    else:
        return None
    return phrase("`{}` and `{}` are not joined: {}.", other[0].capture, group[0].capture, why)


def _ranks(group: Sequence[Member]) -> Iterator[int]:
    return (member.rank for member in group if member.rank is not None)


def knows_communicators(member: Member) -> bool:
    """Whether it is known which communicators a member's collectives are of."""
    return bool((member.collectives.communicator > 0).any())


#: Clocks of hosts that run for one job differ by less, ns.
_CLOCKS_DIFFER_NS = 10_000_000_000


def _at_different_times(one: Member, other: Member) -> bool:
    if not (one.started_utc_ns and other.started_utc_ns):
        return False
    spans = [(int(m.start[0]) + m.started_utc_ns, int(m.end[-1]) + m.started_utc_ns) for m in (one, other)]
    apart = max(spans[0][0], spans[1][0]) - min(spans[0][1], spans[1][1])
    return apart > _CLOCKS_DIFFER_NS
