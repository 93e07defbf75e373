"""Computes the figures of collectives: how long ranks wait for each other, transfer rates, and parallel strategies."""

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

#: A message with at most this many bytes is assumed to contain a loss, a norm or a flag, and no tensor of the model.
_SMALL_MESSAGE_BYTES = 4096
#: If sizes are unknown, collectives count as small messages if their number is below this share of that of the most
#: frequent collectives.
_RARE_SHARE = 0.1


@dataclass(frozen=True)
class Waits:
    """The waiting of one rank for others, on its own clock.

    Attributes:
        transfer_start: the time at which the last rank has started each collective, shape (collectives,), ns.
        waiting: the time in each step in which all running collectives wait, shape (steps,), ns.
        exposed_waiting: the part of the waiting in which nothing else runs on the GPU, shape (steps,), ns.
    """

    transfer_start: Ints
    waiting: Ints
    exposed_waiting: Ints


def find_waits(members: Sequence[Member], matches: Sequence[Match], clocks: Sequence[Clock]) -> list[Waits]:
    """Returns the waiting of each member. Collectives without a match are assumed to transfer from their start."""
    starts = [clock.aligned(member.collectives.start) for member, clock in zip(members, clocks, strict=True)]
    last_starts = [start.copy() for start in starts]
    for match in matches:
        latest = np.max([starts[position][index] for position, index in match.items()], axis=0)
        for position, index in match.items():
            last_starts[position][index] = latest
    waits = []
    for member, start, last_start in zip(members, starts, last_starts, strict=True):
        collectives = member.collectives
        transfer_start = np.minimum(collectives.start + last_start - start, collectives.end)
        order = np.argsort(transfer_start, kind="stable")
        transfers = Cover.from_intervals(transfer_start[order], collectives.end[order])
        running = Cover.from_intervals(collectives.start, collectives.end)
        all_wait = (transfers.find_gaps(*stretches) for stretches in ((running.start, running.end), member.exposed))
        in_steps = (
            Cover.from_intervals(begin, end).covered_within(member.start, member.end) for _, begin, end in all_wait
        )
        waits.append(Waits(transfer_start, *in_steps))
    return waits


#: The kind, phase and bytes of a collective, and the number of ranks that take part, which is 0 if it is not known.
_Key = tuple[int, str, int, int]


def summarize_collectives(
    members: Sequence[Member], matches: Sequence[Match], steps: Sequence[Ints], waits: Sequence[Waits],
    *, lacks_ranks: bool,
) -> tuple[CollectiveFigures, ...]:  # fmt: skip
    """Returns the figures of the collectives by kind, phase and size. The longest total time comes first.

    Args:
        members: the members of the run.
        matches: the collectives that members share.
        steps: the indices of the steps in the steps of each member, the same number for all members.
        waits: the waiting of each member; empty if it is not known.
        lacks_ranks: whether some ranks of the run are not among the members, so that waiting for them is not known.
    """
    durations = [member.collectives.end - member.collectives.start for member in members]
    transfer_starts = (
        [wait.transfer_start for wait in waits] if waits else [member.collectives.start for member in members]
    )
    waited = [start - member.collectives.start for start, member in zip(transfer_starts, members, strict=True)]
    is_match = [np.zeros(len(member.collectives), np.bool_) for member in members]
    for match in matches:
        for position, index in match.items():
            is_match[position][index] = True
    figures = []
    for (kind, phase, size, ranks), rows in _group_alike(members, steps, lacks_ranks=lacks_ranks).items():
        duration, waiting, matched = (
            np.concatenate([columns[position][index] for position, index in rows])
            for columns in (durations, waited, is_match)
        )
        participants = len({position for position, _ in rows})
        divisor = participants * len(steps[0]) * NS_PER_MS  # from a total in ns to ms per step and rank
        is_known = bool(waits) and bool(matched.any()) and not lacks_ranks
        transfer = Stats.of_ns((duration - waiting)[matched]) if is_known else Stats()
        link_bytes = _bytes_per_link(kind, size, ranks)
        figures.append(
            CollectiveFigures(
                kind=COLLECTIVE_KINDS[kind],
                phase=phase,
                bytes=size if size >= 0 else None,
                ranks=ranks or None,
                count=len(duration) / participants / len(steps[0]),
                duration_ms=Stats.of_ns(duration),
                waiting_ms=float(waiting.sum()) / divisor if is_known else None,
                transfer_ms=float((duration - waiting).sum()) / divisor if is_known else None,
                bus_bytes_per_s=link_bytes / (transfer.median / MS_PER_S) if link_bytes and transfer.median else None,
            )
        )
    return tuple(sorted(figures, key=lambda row: -(row.duration_ms.mean or 0.0) * row.count))


def _group_alike(
    members: Sequence[Member], steps: Sequence[Ints], *, lacks_ranks: bool
) -> dict[_Key, list[tuple[int, Ints]]]:
    """Returns the collectives of the steps, grouped by key: positions of members, and indices into their collectives.

    The number of ranks of a communicator with an ID is the number that NCCL records, else the number of members that
    use the communicator. It is not known if NCCL does not record it and some ranks of the run are not members.
    """
    is_whole = not lacks_ranks and (len(members) > 1 or members[0].world_size == 1)
    users: dict[int, int] = defaultdict(int)
    recorded_sizes: dict[int, int] = {}
    for member in members:
        ids, sizes = member.collectives.communicator, member.collectives.ranks
        first, _ = distinct_rows(ids, sizes)
        recorded_sizes |= {int(ids[at]): int(sizes[at]) for at in first if sizes[at]}
        for communicator in np.unique(ids[ids > 0]).tolist():
            users[communicator] += 1
    ranks_of = {
        communicator: recorded_sizes.get(communicator, count if is_whole else 0)
        for communicator, count in users.items()
    }
    all_ranks = len(members) if is_whole else 0
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
            key = kind, name, size, ranks or ranks_of.get(communicator, all_ranks)
            alike[key].append((position, in_groups[begin:end]))
    return alike


def _bytes_per_link(kind: int, size: int, ranks: int) -> float | None:
    """Returns the bytes that pass each rank's link, as nccl-tests (PERFORMANCE.md) defines bus bandwidth.

    For an all-reduce, a broadcast and a reduce, NCCL's message size is the size of the whole message. For other kinds
    it is the size of one rank's part, or of the part between two ranks. Returns None if the bytes are not known.
    """
    if size <= 0 or ranks < 2 or kind == OTHER_KIND:
        return None
    if kind == ALL_REDUCE:
        return size * 2 * (ranks - 1) / ranks
    if kind in (ALL_GATHER, REDUCE_SCATTER, ALL_TO_ALL, GATHER, SCATTER):
        return float(size * (ranks - 1))
    return float(size)


def name_strategies(members: Sequence[Member]) -> tuple[str, ...]:
    """Returns how the members share the work, inferred from their collectives; empty if it is not known."""
    if len(members) > 1 and len({(member.capture, member.process) for member in members}) == 1:
        return ("several GPUs in one process",)
    patterns: dict[int, set[tuple[str, str]]] = defaultdict(set)
    for member in members:
        collectives = member.collectives
        is_counted = (collectives.step != NONE) & ((collectives.bytes < 0) | (collectives.bytes > _SMALL_MESSAGE_BYTES))
        columns = [column[is_counted] for column in (collectives.communicator, collectives.kind, collectives.phase)]
        first, pattern = distinct_rows(*columns)
        times = np.bincount(pattern, minlength=len(first))
        has_sizes = bool((collectives.bytes[is_counted] >= 0).all())
        least = 0 if has_sizes else _RARE_SHARE * times.max(initial=0)
        usual = first[times >= least]
        for communicator, kind, phase in zip(*(column[usual].tolist() for column in columns), strict=True):
            name = collectives.names[phase] if phase != NONE else ""
            # One communicator may use several streams, so all communicators without an ID are treated as one.
            patterns[max(communicator, 0)].add((COLLECTIVE_KINDS[kind], name))
    return tuple(dict.fromkeys(name for pattern in patterns.values() if (name := _name_strategy(pattern))))


def _name_strategy(pattern: set[tuple[str, str]]) -> str:
    """Returns the strategy that a communicator's kinds of collectives and phases indicate; empty if there is none."""
    phases: dict[str, set[str]] = defaultdict(set)
    for kind, phase in pattern:
        phases[kind].add("forward" if phase == "loss" else phase)
    if "send/receive" in phases:
        return PIPELINE
    if "all-to-all" in phases:
        return "expert parallel"
    if "all-gather" in phases and "reduce-scatter" in phases:
        if "forward" in phases["reduce-scatter"]:
            return "tensor and sequence parallel"
        return "sharded optimizer (ZeRO)" if phases["all-gather"] == {"optimizer"} else SHARDED
    if "all-reduce" in phases:
        reduced = phases["all-reduce"]
        if reduced & {"forward"}:
            return "tensor parallel"
        return DATA_PARALLEL if "backward" in reduced else "data or tensor parallel"
    return ""
