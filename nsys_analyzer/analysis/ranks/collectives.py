"""Computes the figures of collectives: how long ranks wait for each other, transfer rates, and parallel strategies."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

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
from nsys_analyzer.trace.arrays import Bools, Ints, distinct_rows
from nsys_analyzer.trace.schema import MS_PER_S, NS_PER_MS

#: A message with at most this many bytes is assumed to contain a loss, a norm or a flag, and no tensor of the model.
_SMALL_MESSAGE_BYTES = 4096
#: If message sizes are unknown, a kind of collective in one phase counts as small messages if there are fewer of these
#: collectives than this share of the number of the most frequent ones.
_RARE_COLLECTIVE_SHARE = 0.1


@dataclass(frozen=True)
class Waits:
    """The times that one rank waits for other ranks in collectives, on the rank's own clock.

    Attributes:
        transfer_start_ns: the time at which the last rank has started each collective, shape (collectives,), ns.
        waiting_ns: the time in each step in which all running collectives wait, shape (steps,), ns.
        exposed_waiting_ns: the part of ``waiting_ns`` in which nothing else runs on the GPU, shape (steps,), ns.
    """

    transfer_start_ns: Ints
    waiting_ns: Ints
    exposed_waiting_ns: Ints


def find_waits(members: Sequence[Member], matches: Sequence[Match], clocks: Sequence[Clock]) -> list[Waits]:
    """Returns the waiting times of each member.

    A collective without a match is assumed to transfer data from its start.
    """
    aligned_starts = [clock.aligned(member.collectives.start) for member, clock in zip(members, clocks, strict=True)]
    last_starts = [start.copy() for start in aligned_starts]
    for match in matches:
        latest_start = np.max([aligned_starts[position][index] for position, index in match.items()], axis=0)
        for position, index in match.items():
            last_starts[position][index] = latest_start
    waits = []
    for member, start, last_start in zip(members, aligned_starts, last_starts, strict=True):
        collectives = member.collectives
        transfer_start_ns = np.minimum(collectives.start + last_start - start, collectives.end)
        order = np.argsort(transfer_start_ns, kind="stable")
        transfers = Cover.from_intervals(transfer_start_ns[order], collectives.end[order])
        running = Cover.from_intervals(collectives.start, collectives.end)
        all_wait = (transfers.find_gaps(*stretches) for stretches in ((running.start, running.end), member.exposed))
        in_steps = (
            Cover.from_intervals(begin, end).covered_within(member.start, member.end) for _, begin, end in all_wait
        )
        waits.append(Waits(transfer_start_ns, *in_steps))
    return waits


#: The properties by which collectives are grouped: kind, phase, bytes, and the number of ranks (0 if it is not known).
_GroupKey = tuple[int, str, int, int]


def summarize_collectives(
    members: Sequence[Member], matches: Sequence[Match], steps: Sequence[Ints], waits: Sequence[Waits],
    *, lacks_ranks: bool,
) -> tuple[CollectiveFigures, ...]:  # fmt: skip
    """Returns the figures of the collectives by kind, phase and size. The longest total time comes first.

    Args:
        members: the members of the run.
        matches: the collectives that members share.
        steps: the indices of the compared steps among the steps of each member; all members have equally many.
        waits: the waiting times of each member; empty if they are not known.
        lacks_ranks: whether some ranks of the run are not among the members, so that waits for them are not known.
    """
    durations = [member.collectives.end - member.collectives.start for member in members]
    transfer_starts = (
        [wait.transfer_start_ns for wait in waits] if waits else [member.collectives.start for member in members]
    )
    waited = [start - member.collectives.start for start, member in zip(transfer_starts, members, strict=True)]
    is_match = [np.zeros(len(member.collectives), np.bool_) for member in members]
    for match in matches:
        for position, index in match.items():
            is_match[position][index] = True
    figures = []
    for (kind, phase, size, ranks), rows in _group_collectives(members, steps, lacks_ranks=lacks_ranks).items():
        duration, waiting_ns, matched = (
            np.concatenate([columns[position][index] for position, index in rows])
            for columns in (durations, waited, is_match)
        )
        participants = len({position for position, _ in rows})
        divisor = participants * len(steps[0]) * NS_PER_MS  # converts a total in ns to ms per step and rank
        is_known = bool(waits) and bool(matched.any()) and not lacks_ranks
        transfer = Stats.of_ns((duration - waiting_ns)[matched]) if is_known else Stats()
        link_bytes = _count_link_bytes(kind, size, ranks)
        figures.append(
            CollectiveFigures(
                kind=COLLECTIVE_KINDS[kind],
                phase=phase,
                bytes=size if size >= 0 else None,
                ranks=ranks or None,
                count=len(duration) / participants / len(steps[0]),
                duration_ms=Stats.of_ns(duration),
                waiting_ms=float(waiting_ns.sum()) / divisor if is_known else None,
                transfer_ms=float((duration - waiting_ns).sum()) / divisor if is_known else None,
                bus_bytes_per_s=link_bytes / (transfer.median / MS_PER_S) if link_bytes and transfer.median else None,
            )
        )
    return tuple(sorted(_add_attainable_times(figures), key=lambda row: -(row.duration_ms.mean or 0.0) * row.count))


def _add_attainable_times(figures: Sequence[CollectiveFigures]) -> Iterator[CollectiveFigures]:
    """Yields the figures with the time that their bytes need at the bandwidth of the links.

    This bandwidth is the bus bandwidth of the collectives with the most bytes over each link.
    """
    link_bytes = [(row.bus_bytes_per_s or 0.0) * (row.transfer_ms or 0.0) / row.count for row in figures]
    bandwidth = (figures[int(np.argmax(link_bytes))].bus_bytes_per_s if figures else None) or 0.0
    for row in figures:
        is_known = bandwidth and row.bus_bytes_per_s and row.transfer_ms
        ratio = min((row.bus_bytes_per_s or 0.0) / bandwidth, 1.0) if is_known else 1.0
        yield replace(row, attainable_ms=(row.transfer_ms or 0.0) * ratio if is_known else None)


def _group_collectives(
    members: Sequence[Member], steps: Sequence[Ints], *, lacks_ranks: bool
) -> dict[_GroupKey, list[tuple[int, Ints]]]:
    """Groups the collectives of the given steps. A group lists positions of members and indices into their collectives.

    The number of ranks of a communicator is the number that NCCL records. If NCCL records none, it is the number of
    members that use the communicator, and 0 if some ranks of the run are not members.
    """
    is_whole = not lacks_ranks and (len(members) > 1 or members[0].world_size == 1)
    users: dict[int, int] = defaultdict(int)
    recorded_sizes: dict[int, int] = {}
    for member in members:
        ids, sizes = member.collectives.communicator, member.collectives.ranks
        first_of_group, _ = distinct_rows(ids, sizes)
        recorded_sizes |= {int(ids[row]): int(sizes[row]) for row in first_of_group if sizes[row]}
        for communicator in np.unique(ids[ids > 0]).tolist():
            users[communicator] += 1
    ranks_of = {
        communicator: recorded_sizes.get(communicator, count if is_whole else 0)
        for communicator, count in users.items()
    }
    all_ranks = len(members) if is_whole else 0
    collectives_by_key: dict[_GroupKey, list[tuple[int, Ints]]] = defaultdict(list)
    for position, member in enumerate(members):
        collectives = member.collectives
        index = np.flatnonzero(np.isin(collectives.step, steps[position]))
        columns = (
            collectives.kind, collectives.phase, collectives.bytes, collectives.communicator, collectives.ranks,
        )  # fmt: skip
        first_of_group, group = distinct_rows(*(column[index] for column in columns))
        count = np.bincount(group, minlength=len(first_of_group))
        index_by_group, ends = index[np.argsort(group, kind="stable")], np.cumsum(count)
        for first_row, first_position, end in zip(index[first_of_group], ends - count, ends, strict=True):
            kind, phase, size, communicator, ranks = (int(column[first_row]) for column in columns)
            name = collectives.names[phase] if phase != NONE else ""
            key = kind, name, size, ranks or ranks_of.get(communicator, all_ranks)
            collectives_by_key[key].append((position, index_by_group[first_position:end]))
    return collectives_by_key


def count_reductions(members: Sequence[Member], steps: Sequence[Ints]) -> int:
    """Returns how many times per step each rank reduces the same gradients: in so many backward passes.

    Args:
        members: the members of the run.
        steps: the indices of the compared steps among the steps of each member.
    """
    counts: list[int] = []
    for member, steps_of_member in zip(members, steps, strict=True):
        collectives, reduces = member.collectives, reduces_gradients(member)
        for step in steps_of_member.tolist():
            index = np.flatnonzero(reduces & (collectives.step == step))
            columns = (collectives.instance, collectives.kind, collectives.communicator, collectives.bytes)
            sizes_of_reductions: dict[int, Counter[tuple[int, ...]]] = defaultdict(Counter)
            for instance, *message in zip(*(column[index].tolist() for column in columns), strict=True):
                sizes_of_reductions[instance][tuple(message)] += 1
            passes = Counter(frozenset(messages.items()) for messages in sizes_of_reductions.values())
            counts.append(max(passes.values(), default=1))
    return round(float(np.median(counts))) if counts else 1


def repeats_reduction(member: Member) -> Bools:
    """Returns True for each collective that reduces gradients before the last backward pass of its step.

    A reduction in the last pass is sufficient, because gradients add up over the passes.
    """
    collectives, reduces = member.collectives, reduces_gradients(member) & (member.collectives.step != NONE)
    last_instance = np.full(len(member), NONE)
    np.maximum.at(last_instance, collectives.step[reduces], collectives.instance[reduces])
    repeats: Bools = reduces & (collectives.instance < np.append(last_instance, NONE)[collectives.step])
    return repeats


def reduces_gradients(member: Member) -> Bools:
    """Returns True for each collective of a member that reduces gradients in a backward pass."""
    collectives = member.collectives
    is_backward = np.array([*(name == "backward" for name in collectives.names), False])[collectives.phase]
    is_tensor = (collectives.bytes < 0) | (collectives.bytes > _SMALL_MESSAGE_BYTES)
    reduces: Bools = np.isin(collectives.kind, (ALL_REDUCE, REDUCE_SCATTER)) & is_backward & is_tensor
    return reduces


def _count_link_bytes(kind: int, size: int, ranks: int) -> float | None:
    """Counts the bytes that pass each rank's link, as nccl-tests (PERFORMANCE.md) defines bus bandwidth.

    For an all-reduce, a broadcast and a reduce, NCCL's message size is the size of the whole message. For other kinds,
    it is the size of one rank's part, or of the part that one rank sends to another. Returns None if the bytes are not
    known.
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
        first_of_pattern, pattern = distinct_rows(*columns)
        count = np.bincount(pattern, minlength=len(first_of_pattern))
        has_sizes = bool((collectives.bytes[is_counted] >= 0).all())
        min_count = 0 if has_sizes else _RARE_COLLECTIVE_SHARE * count.max(initial=0)
        frequent_rows = first_of_pattern[count >= min_count]
        for communicator, kind, phase in zip(*(column[frequent_rows].tolist() for column in columns), strict=True):
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
        all_reduce_phases = phases["all-reduce"]
        if all_reduce_phases & {"forward"}:
            return "tensor parallel"
        return DATA_PARALLEL if "backward" in all_reduce_phases else "data or tensor parallel"
    return ""
