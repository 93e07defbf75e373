"""Finds collectives that could run beside other work of the GPU but do not, and what a step would save if they did.

Every saving is the saving of a replay of all ranks. So a collective saves nothing if launching limits the ranks, or if
other work already hides the collective.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import NamedTuple, TypeAlias

import numpy as np

from nsys_analyzer.analysis.findings.finding import ReplayChange
from nsys_analyzer.analysis.intervals import NONE
from nsys_analyzer.analysis.ranks.collectives import reduces_gradients
from nsys_analyzer.analysis.ranks.joined_study import find_studied_collectives, remove_operations
from nsys_analyzer.analysis.ranks.run import DATA_PARALLEL, SHARDED, OverlapKind, ParallelRun, UnusedOverlap
from nsys_analyzer.analysis.steps.member import ALL_GATHER, ALL_REDUCE, Member
from nsys_analyzer.analysis.steps.replay import Replay
from nsys_analyzer.analysis.steps.study import Study
from nsys_analyzer.trace.arrays import Bools, Ints
from nsys_analyzer.trace.schema import NS_PER_MS

#: PyTorch's default size of a bucket of gradients, bytes.
DEFAULT_BUCKET_BYTES = 25 * 2**20
#: A bucket is too large if its size exceeds the default size by this factor.
_LARGE_BUCKET_FACTOR = 2
#: The number of parts into which the last bucket is divided if it is not too large.
_PARTS_OF_LAST_BUCKET = 4
#: A bucket is small if the default size is more than this factor times the bucket's size.
_SMALL_BUCKET_FACTOR = 5
#: The largest number of buckets that is assumed to stay exposed. The last buckets may be ready only when backward ends.
MAX_EXPOSED_BUCKETS = 3
#: Hidden collectives slow down the work beside them by at most this share of their own time: by a quarter to a third
#: on an H200 (all-reduce of two ranks, over NVLink and over the host's memory).
HIDDEN_COLLECTIVE_COST = 0.35
#: The difference between the numbers of equal phases of neighboring ranks. No capture has this many phases.
_INSTANCES_PER_RANK = 2**40


#: A kind of unused overlap, its operations, the size of a message, and the changes that save the least and the most.
_Candidate: TypeAlias = tuple[OverlapKind, Ints, int, ReplayChange, ReplayChange]


class _StudiedCollectives(NamedTuple):
    """Collectives of all ranks in the studied steps, in the order of their launches on each rank.

    Attributes:
        operation: the index of the collective's operation in the joined study.
        size: the message size of one rank, bytes; -1 if it is unknown.
        instance: a number of the phase that launches the collective, which is unique among all ranks.
    """

    operation: Ints
    size: Ints
    instance: Ints

    @property
    def is_followed(self) -> Bools:
        """Returns for each collective except the last one whether the next collective is in the same phase."""
        is_followed: Bools = self.instance[1:] == self.instance[:-1]
        return is_followed


def find_unused_overlaps(
    run: ParallelRun,
    study: Study,
    members: Sequence[Member],
    price: Callable[[ReplayChange], tuple[float, float]],
) -> tuple[UnusedOverlap, ...]:
    """Returns the ways in which collectives could run beside other work, each with what it saves.

    Args:
        run: the run. Its all-reduces in backward are buckets of gradients only if it is data parallel and nothing else.
        study: the joined study of all ranks.
        members: the replayed members of the run.
        price: returns the least and the most that a change of a replay saves per step, ms.
    """
    candidates: list[_Candidate] = []
    if run.strategies == (SHARDED,):
        candidates += _gather_earlier(_select_collectives(study, members, _is_all_gather))
    if run.strategies == (DATA_PARALLEL,):
        buckets = _select_collectives(study, members, _is_bucket)
        candidates += [*_divide_last_bucket(buckets), *_join_small_buckets(study, buckets)]
    overlaps = []
    for kind, operations, size, least_change, most_change in candidates:
        (least_ms, _), (_, most_ms) = price(least_change), price(most_change)
        if kind == "large buckets":
            least_ms = max(least_ms - HIDDEN_COLLECTIVE_COST * most_ms, 0.0)
        per_rank_and_step = len(members) * study.steps
        transfer_ms = float(study.replay.work_ns[operations].sum()) / per_rank_and_step / NS_PER_MS
        overlaps.append(UnusedOverlap(kind, len(operations) / per_rank_and_step, size, transfer_ms, least_ms, most_ms))
    return tuple(overlaps)


def _is_all_gather(member: Member) -> Bools:
    """Returns True for each all-gather in a phase."""
    collectives = member.collectives
    is_all_gather: Bools = (collectives.kind == ALL_GATHER) & (collectives.instance != NONE)
    return is_all_gather


def _is_bucket(member: Member) -> Bools:
    """Returns True for each all-reduce of gradients in a backward pass, if its size is known."""
    collectives = member.collectives
    is_bucket: Bools = reduces_gradients(member) & (collectives.kind == ALL_REDUCE) & (collectives.bytes > 0)
    return is_bucket


def _select_collectives(
    study: Study, members: Sequence[Member], select: Callable[[Member], Bools]
) -> _StudiedCollectives:
    """Returns the selected collectives of all members that are in the studied steps."""
    columns = []
    for rank, (member, operation) in enumerate(zip(members, find_studied_collectives(study, members), strict=True)):
        rows = np.flatnonzero((operation != NONE) & select(member))
        rows = rows[np.argsort(operation[rows])]
        instance = member.collectives.instance[rows] + rank * _INSTANCES_PER_RANK
        columns.append((operation[rows], member.collectives.bytes[rows], instance))
    return _StudiedCollectives(*(np.concatenate(parts) for parts in zip(*columns, strict=True)))


def _gather_earlier(gathers: _StudiedCollectives) -> Iterator[_Candidate]:
    """Yields a change that launches each all-gather of a phase together with the all-gather before it.

    The all-gather then runs beside the computation that follows the earlier all-gather, instead of after it.
    """
    earlier, later = gathers.operation[:-1][gathers.is_followed], gathers.operation[1:][gathers.is_followed]

    def gather_earlier(replay: Replay) -> Replay:
        """Returns the replay with earlier all-gathers."""
        ready_ns = np.cumsum(replay.cpu_ns)[replay.launch] - replay.cpu_ns[replay.launch] + replay.latency_ns
        latency_ns, joined = replay.latency_ns.copy(), replay.joined.copy()
        latency_ns[later] += np.minimum(ready_ns[earlier] - ready_ns[later], 0.0)
        joined[later] = NONE
        return replace(replay, latency_ns=latency_ns, joined=joined)

    if len(later):
        yield "late gather", later, int(np.median(gathers.size)), gather_earlier, gather_earlier


def _divide_last_bucket(buckets: _StudiedCollectives) -> Iterator[_Candidate]:
    """Yields a change that divides the last bucket of each backward pass, so that only a part of it stays exposed.

    A large bucket is divided into buckets of the default size.
    """
    is_last = ~np.append(buckets.is_followed, False)[: len(buckets.size)]
    last, size = buckets.operation[is_last], int(np.median(buckets.size[is_last])) if len(buckets.size) else 0
    is_large = size > _LARGE_BUCKET_FACTOR * DEFAULT_BUCKET_BYTES
    part = DEFAULT_BUCKET_BYTES / size if is_large else 1 / _PARTS_OF_LAST_BUCKET

    def shorten(share: float, replay: Replay) -> Replay:
        """Returns the replay with this share of the last buckets' transfers."""
        work_ns = replay.work_ns.copy()
        work_ns[last] *= min(share, 1.0)
        return replace(replay, work_ns=work_ns)

    if size:
        kind: OverlapKind = "large buckets" if is_large else "exposed bucket"
        yield kind, last, size, partial(shorten, MAX_EXPOSED_BUCKETS * part), partial(shorten, part)


def _join_small_buckets(study: Study, buckets: _StudiedCollectives) -> Iterator[_Candidate]:
    """Yields a change that joins small buckets to buckets of up to the largest usual size, with one launch for each.

    The largest saving assumes that the bytes of a small bucket take no time. The smallest saving assumes that these
    bytes are transferred at the largest bandwidth of any bucket.
    """
    total_size = np.cumsum(buckets.size)
    starts_pass = np.append(True, ~buckets.is_followed)[: len(total_size)]
    size_before_pass = np.maximum.accumulate(np.where(starts_pass, total_size - buckets.size, 0))
    joined_bucket = (total_size - size_before_pass) // (_LARGE_BUCKET_FACTOR * DEFAULT_BUCKET_BYTES)
    is_joined = np.append(buckets.is_followed & (joined_bucket[1:] == joined_bucket[:-1]), False)[: len(total_size)]
    is_small = is_joined & (buckets.size * _SMALL_BUCKET_FACTOR < DEFAULT_BUCKET_BYTES)
    small = buckets.operation[is_small]
    is_removed = np.zeros(len(study.operations), np.bool_)
    is_removed[small] = True
    next_kept = buckets.operation[~is_small][np.cumsum(~is_small)[is_small]] if len(small) else small

    def join_buckets(has_latency_only: bool, replay: Replay) -> Replay:
        """Returns the replay without the small buckets, whose bytes are transferred with those of the next bucket."""
        changed = remove_operations(study, is_removed, replay)
        if has_latency_only:
            return changed
        ns_per_byte = float((replay.work_ns[buckets.operation] / buckets.size).min())
        work_ns = changed.work_ns.copy()
        np.add.at(work_ns, next_kept, ns_per_byte * buckets.size[is_small])
        return replace(changed, work_ns=work_ns)

    if len(small):
        size = int(np.median(buckets.size[is_small]))
        yield "small buckets", small, size, partial(join_buckets, False), partial(join_buckets, True)
