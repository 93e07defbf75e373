"""What the collectives of a run cost: who waits for whom, how fast each transfers, and the strategy that they tell."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from nsys_analyzer.analysis.intervals import NONE, Cover
from nsys_analyzer.analysis.ranks.matching import Clock, Match
from nsys_analyzer.analysis.ranks.run import DATA_PARALLEL, PIPELINE, SHARDED, CollectiveFigures
from nsys_analyzer.analysis.statistics import Stats
from nsys_analyzer.analysis.steps.member import (
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
from nsys_analyzer.trace.arrays import Ints, distinct_rows
from nsys_analyzer.trace.schema import MS_PER_S, NS_PER_MS

#: A message of so few bytes carries a loss, a norm or a flag, not activations, gradients or weights.
_SMALL = 4096
#: Without sizes, collectives that are so much rarer than the usual ones are taken to be such, too.
_RARE = 0.1


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


def find_waits(members: Sequence[Member], matches: Sequence[Match], clocks: Sequence[Clock]) -> list[Waits]:
    """Returns the waiting of each member. A collective that is no match transfers from its start on."""
    starts = [clock.aligned(member.collectives.start) for member, clock in zip(members, clocks, strict=True)]
    last_starts = [start.copy() for start in starts]
    for match in matches:
        latest = np.max([starts[position][index] for position, index in match.items()], axis=0)
        for position, index in match.items():
            last_starts[position][index] = latest
    waits = []
    for member, start, last_start in zip(members, starts, last_starts, strict=True):
        collectives = member.collectives
        until = np.minimum(collectives.start + last_start - start, collectives.end)
        order = np.argsort(until, kind="stable")
        transfers = Cover.from_intervals(until[order], collectives.end[order])
        running = Cover.from_intervals(collectives.start, collectives.end)
        all_wait = (transfers.find_gaps(*stretches) for stretches in ((running.start, running.end), member.exposed))
        in_steps = (
            Cover.from_intervals(begin, end).covered_within(member.start, member.end) for _, begin, end in all_wait
        )
        waits.append(Waits(until, *in_steps))
    return waits


#: Kind, phase, bytes, and how many ranks take part, 0 where that is not known.
_Key = tuple[int, str, int, int]


def summarize_collectives(
    members: Sequence[Member], matches: Sequence[Match], steps: Sequence[Ints], waits: Sequence[Waits],
    *, lacks_ranks: bool,
) -> tuple[CollectiveFigures, ...]:  # fmt: skip
    """Returns the collectives of some steps by kind, phase and size, those that take longest in all first.

    Args:
        members: of the run.
        matches: their collectives that are one.
        steps: the places of the steps among those of each member, as many of each.
        waits: of each member; empty where that is not known.
        lacks_ranks: whether ranks of the run are no members, so that nobody knows how long these wait.
    """
    durations = [member.collectives.end - member.collectives.start for member in members]
    until = [each.until for each in waits] if waits else [member.collectives.start for member in members]
    waited = [end - member.collectives.start for end, member in zip(until, members, strict=True)]
    is_match = [np.zeros(len(member.collectives), np.bool_) for member in members]
    for match in matches:
        for position, index in match.items():
            is_match[position][index] = True
    figures = []
    for (kind, phase, size, ranks), rows in _alike(members, steps, lacks_ranks=lacks_ranks).items():
        duration, waiting, matched = (
            np.concatenate([columns[position][index] for position, index in rows])
            for columns in (durations, waited, is_match)
        )
        takers = len({position for position, _ in rows})
        in_all = takers * len(steps[0]) * NS_PER_MS  # to ms of one step of one rank
        known = bool(waits) and bool(matched.any()) and not lacks_ranks
        transfer = Stats.of_ns((duration - waiting)[matched]) if known else Stats()
        link = _bytes_over_a_link(kind, size, ranks)
        figures.append(
            CollectiveFigures(
                kind=COLLECTIVE_KINDS[kind],
                phase=phase,
                bytes=size if size >= 0 else None,
                ranks=ranks or None,
                count=len(duration) / takers / len(steps[0]),
                duration_ms=Stats.of_ns(duration),
                waiting_ms=float(waiting.sum()) / in_all if known else None,
                transfer_ms=float((duration - waiting).sum()) / in_all if known else None,
                bus_bytes_per_s=link / (transfer.median / MS_PER_S) if link and transfer.median else None,
            )
        )
    return tuple(sorted(figures, key=lambda row: -(row.duration_ms.mean or 0.0) * row.count))


def _alike(
    members: Sequence[Member], steps: Sequence[Ints], *, lacks_ranks: bool
) -> dict[_Key, list[tuple[int, Ints]]]:
    """Returns the collectives of some steps that are alike: the positions of members, and the indices into theirs.

    A communicator with an ID is of as many ranks as NCCL notes, else of as many as there are members that use it. Where
    these are not the whole run they are no measure, and it is not known.
    """
    is_whole = not lacks_ranks and (len(members) > 1 or members[0].world_size == 1)
    users: dict[int, int] = defaultdict(int)
    noted: dict[int, int] = {}
    for member in members:
        ids, sizes = member.collectives.communicator, member.collectives.ranks
        first, _ = distinct_rows(ids, sizes)
        noted |= {int(ids[at]): int(sizes[at]) for at in first if sizes[at]}
        for communicator in np.unique(ids[ids > 0]).tolist():
            users[communicator] += 1
    ranks_of = {each: noted.get(each, count if is_whole else 0) for each, count in users.items()}
    of_all = len(members) if is_whole else 0
    alike: dict[_Key, list[tuple[int, Ints]]] = defaultdict(list)
    for position, member in enumerate(members):
        collectives = member.collectives
        index = np.flatnonzero(np.isin(collectives.step, steps[position]))
        columns = (
            collectives.kind, collectives.phase, collectives.bytes, collectives.communicator, collectives.ranks,
        )  # fmt: skip
        first, group = distinct_rows(*(column[index] for column in columns))
        count = np.bincount(group, minlength=len(first))
        in_groups, ends = index[np.argsort(group, kind="stable")], np.cumsum(count)
        for at, begin, end in zip(index[first], ends - count, ends, strict=True):
            kind, phase, size, communicator, ranks = (int(column[at]) for column in columns)
            name = collectives.names[phase] if phase != NONE else ""
            key = kind, name, size, ranks or ranks_of.get(communicator, of_all)
            alike[key].append((position, in_groups[begin:end]))
    return alike


def _bytes_over_a_link(kind: int, size: int, ranks: int) -> float | None:
    """Returns the bytes that pass each rank's link, as nccl-tests (PERFORMANCE.md) defines bus bandwidth.

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


def name_strategies(members: Sequence[Member]) -> tuple[str, ...]:
    """Returns how the members share the work, by each communicator's pattern; empty where none can be told."""
    if len(members) > 1 and len({(member.capture, member.process) for member in members}) == 1:
        return ("several GPUs in one process",)
    patterns: dict[int, set[tuple[str, str]]] = defaultdict(set)
    for member in members:
        collectives = member.collectives
        counted = (collectives.step != NONE) & ((collectives.bytes < 0) | (collectives.bytes > _SMALL))
        columns = [column[counted] for column in (collectives.communicator, collectives.kind, collectives.phase)]
        first, pattern = distinct_rows(*columns)
        times = np.bincount(pattern, minlength=len(first))
        sized = bool((collectives.bytes[counted] >= 0).all())
        least = 0 if sized else _RARE * times.max(initial=0)
        usual = first[times >= least]
        for communicator, kind, phase in zip(*(column[usual].tolist() for column in columns), strict=True):
            name = collectives.names[phase] if phase != NONE else ""
            # One communicator may use several streams: those without an ID are looked at together.
            patterns[max(communicator, 0)].add((COLLECTIVE_KINDS[kind], name))
    return tuple(dict.fromkeys(name for pattern in patterns.values() if (name := _strategy(pattern))))


def _strategy(pattern: set[tuple[str, str]]) -> str:
    """Returns what the collectives of one communicator, by kind and phase, are for."""
    phases: dict[str, set[str]] = defaultdict(set)
    for kind, phase in pattern:
        phases[kind].add("forward" if phase == "loss" else phase)
    if "send/receive" in phases:
        return PIPELINE
    if "all-to-all" in phases:
        return "expert parallel"
    if "all-gather" in phases and "reduce-scatter" in phases:
        if "forward" in phases["reduce-scatter"]:
            return "tensor parallel, with its sequence"
        return "sharded optimizer (ZeRO)" if phases["all-gather"] == {"optimizer"} else SHARDED
    if "all-reduce" in phases:
        reduced = phases["all-reduce"]
        if reduced & {"forward"}:
            return "tensor parallel"
        return DATA_PARALLEL if "backward" in reduced else "data or tensor parallel"
    return ""
