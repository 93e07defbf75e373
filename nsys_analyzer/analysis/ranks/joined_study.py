"""Joins the studied steps of a run's ranks into one study, so that a replay shows how a change of one rank affects all.

In the replay, a collective transfers data from the moment when its last rank has started it. The time for which ranks
waited in the capture is left out.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import reduce
from typing import Any

import numpy as np

from nsys_analyzer.analysis.intervals import NONE
from nsys_analyzer.analysis.kernels.class_rules import COMMUNICATION
from nsys_analyzer.analysis.ranks.join import JoinedRanks, join_members, name_run
from nsys_analyzer.analysis.ranks.matching import KINDS_WITH_COMMON_END
from nsys_analyzer.analysis.steps.member import Member
from nsys_analyzer.analysis.steps.replay import (
    CALL_COLUMNS,
    COLLECTIVE_COLUMNS,
    MIN_STEPS,
    OPERATION_COLUMNS,
    Replay,
)
from nsys_analyzer.analysis.steps.study import Study
from nsys_analyzer.analysis.summary.summary import CaptureSummary
from nsys_analyzer.trace.arrays import Bools, Ints

#: The largest number of calls of all ranks that are replayed together, if that leaves enough steps.
_MAX_CALLS = 60_000


@dataclass(frozen=True)
class CapturesToReplay:
    """The steps of one capture, or of all ranks of a run, to be replayed.

    Attributes:
        title: the name of the capture or of the run.
        captures: the capture, or the captures of all ranks.
        study: the studied steps; None if there are none.
        ranks: the number of each rank; empty for one capture.
        labels: the label of each rank; empty for one capture.
    """

    title: str
    captures: tuple[CaptureSummary, ...]
    study: Study | None
    ranks: tuple[int | None, ...] = ()
    labels: tuple[str, ...] = ()


def join_replays(captures: Sequence[CaptureSummary]) -> Iterator[CapturesToReplay]:
    """Yields each run whose ranks can be replayed together, then every other capture by itself.

    Ranks can be replayed together if it is known which rank waits for which.
    """
    capture_of = {(member.capture, member.process): capture for capture in captures for member in capture.members}
    capture_by_id = {id(capture): capture for capture in captures}
    for join in join_members([member for capture in captures for member in capture.members]):
        ranks = tuple(capture_of[member.capture, member.process] for member in join.members)
        if not join.missing and (study := join_studies(join, ranks)):
            numbers, labels = zip(*((member.rank, member.label) for member in join.members), strict=True)
            yield CapturesToReplay(name_run(join.members), ranks, study, numbers, labels)
            for capture in ranks:
                capture_by_id.pop(id(capture), None)
    yield from (CapturesToReplay(capture.title, (capture,), capture.study) for capture in capture_by_id.values())


def join_studies(join: JoinedRanks, captures: Sequence[CaptureSummary]) -> Study | None:
    """Joins the steps that the studies of all ranks contain; None if it is not known which rank waits for which."""
    studies = [capture.study for capture in captures if capture.study]
    if not join.alignment or len({id(study) for study in studies}) < len(join.members):
        return None
    rows = list(zip(studies, join.members, join.numbers, strict=True))
    numbers = [
        number_of_step[np.searchsorted(member.start, study.windows.start)] for study, member, number_of_step in rows
    ]
    common = reduce(np.intersect1d, numbers, join.shared)
    runs = np.split(common, np.flatnonzero(np.diff(np.searchsorted(numbers[0], common)) > 1) + 1)
    steps = max(runs, key=len)
    if not len(steps):
        return None
    steps = _select_steps(join, steps, sum(len(study.calls) / study.steps for study in studies))
    first_steps = [int(np.searchsorted(number_of_step, steps[0])) for number_of_step in numbers]
    studies = [study.select_steps(at, at + len(steps)) for study, at in zip(studies, first_steps, strict=True)]
    replays = _mark_shared_collectives(join, studies)
    return _concatenate_studies([replace(study, replay=replay) for study, replay in zip(studies, replays, strict=True)])


def _select_steps(join: JoinedRanks, numbers: Ints, calls_per_step: float) -> Ints:
    """Selects consecutive steps with a mean length close to the median length, as many as ``_MAX_CALLS`` allows."""
    count = max(MIN_STEPS, int(_MAX_CALLS // calls_per_step))
    if len(numbers) <= count:
        return numbers
    lengths_ns = np.max([walls[np.searchsorted(join.shared, numbers)] for walls in join.walls_ns], axis=0)
    total_ns = np.append(0, np.cumsum(lengths_ns))
    means_ns = (total_ns[count:] - total_ns[:-count]) / count
    first = int(np.abs(means_ns - np.median(lengths_ns)).argmin())
    return numbers[first : first + count]


def _mark_shared_collectives(join: JoinedRanks, studies: Sequence[Study]) -> Iterator[Replay]:
    """Yields the replay of each rank, with the number of the shared collective that each operation takes part in."""
    pairs = list(zip(studies, join.members, strict=True))
    places = [place for study, member in pairs for place in find_studied_collectives(study, [member])]
    collective_of_operations = [np.full(len(study.operations), NONE) for study in studies]
    count = 0
    for match in join.matches:
        operations = {rank: places[rank][index] for rank, index in match.items()}
        on_all_ranks = np.all([operation != NONE for operation in operations.values()], axis=0)
        for rank, operation in operations.items():
            collective_of_operations[rank][operation[on_all_ranks]] = count + np.arange(on_all_ranks.sum())
        count += int(on_all_ranks.sum())
    clocks = [clock for clock in join.clocks if clock]
    first_call_starts = [
        int(clock.aligned(study.calls.start[:1])[0]) for study, clock in zip(studies, clocks, strict=True)
    ]
    rows = zip(studies, join.members, join.waits, places, collective_of_operations, first_call_starts, strict=True)
    for study, member, waits, place, collective, begin_ns in rows:
        is_studied, collectives = place != NONE, member.collectives
        # A send may end before the data is received.
        ends_alone = (waits.transfer_start_ns == collectives.end) & ~np.isin(collectives.kind, KINDS_WITH_COMMON_END)
        work_ns, waits_for_ranks = study.replay.work_ns.copy(), np.ones(len(collective), np.bool_)
        transfer = collectives.end - waits.transfer_start_ns
        work_ns[place[is_studied & ~ends_alone]] = transfer[is_studied & ~ends_alone]
        waits_for_ranks[place[is_studied & ends_alone]] = False
        yield replace(
            study.replay,
            collective=collective,
            waits_for_ranks=waits_for_ranks,
            work_ns=np.where(collective == NONE, study.replay.work_ns, work_ns),
            rank_begin_ns=(float(begin_ns - min(first_call_starts)),),
        )


def find_studied_collectives(study: Study, members: Sequence[Member]) -> list[Ints]:
    """Returns the index of each collective of each rank in the operations of the studied steps, or -1."""
    is_collective, (_, rank) = study.of_class(COMMUNICATION), study.replay.rank_of
    places = []
    for position, member in enumerate(members):
        index = np.flatnonzero(is_collective & (rank == position))
        operation_of = dict(zip(study.operations.start[index].tolist(), index.tolist(), strict=True))
        starts = member.collectives.start.tolist()
        places.append(np.array([operation_of.get(start, NONE) for start in starts], np.int64))
    return places


def remove_operations(study: Study, operations: Bools, replay: Replay) -> Replay:
    """Returns the steps without the given operations, their launches, and the calls that prepare these launches."""
    removed_calls = study.calls_of(operations)
    is_launch = study.calls_of(np.ones(len(operations), np.bool_))
    next_launch = np.searchsorted(np.flatnonzero(is_launch), np.arange(len(is_launch)))
    removed_calls |= np.append(removed_calls[is_launch], False)[next_launch]
    changed = replay.without_calls(removed_calls).scale_work(np.where(operations, 0.0, 1.0))
    return replace(changed, collective=np.where(operations, NONE, changed.collective))


def _concatenate_studies(studies: Sequence[Study]) -> Study:
    """Concatenates the studies of all ranks to one study, which has the rows of the first rank first."""
    replays = [study.replay for study in studies]

    def concatenate_columns(tables: Sequence[Any], names: Iterable[str]) -> dict[str, Any]:
        """Returns the named columns, concatenated over the tables of all ranks."""
        return {name: np.concatenate([getattr(table, name) for table in tables]) for name in names}

    def shift_positions(tables: Sequence[Any], names: Iterable[str], counts: Sequence[int]) -> dict[str, Any]:
        """Returns columns of positions in the rows of all ranks, from columns of positions in the rows of each rank."""
        offsets = np.cumsum([0, *counts[:-1]]).tolist()
        shifted_columns = {}
        for name in names:
            columns = [getattr(table, name).astype(np.int64) for table in tables]
            pairs = zip(columns, offsets, strict=True)
            shifted_columns[name] = np.concatenate(
                [np.where(column >= 0, column + offset, NONE) for column, offset in pairs]
            )
        return shifted_columns

    calls, operations = [study.calls for study in studies], [study.operations for study in studies]
    spans = [study.spans for study in studies]
    call_counts, operation_counts = [len(table) for table in calls], [len(table) for table in operations]
    columns = concatenate_columns(replays, (*CALL_COLUMNS, *OPERATION_COLUMNS, *COLLECTIVE_COLUMNS))
    columns |= shift_positions(replays, ("launch", "first_call"), call_counts)
    columns |= shift_positions(replays, ("awaited", "joined"), operation_counts)
    replay = replace(replays[0], **columns, rank_begin_ns=tuple(replay.rank_begin_ns[0] for replay in replays))
    texts = ("kernels", "classes", "phases", "apis", "callers", "ranges")
    counts = {name: [len(getattr(study, name)) for study in studies] for name in texts}
    call_columns = concatenate_columns(calls, calls[0].columns())
    call_columns |= shift_positions(calls, ["api"], counts["apis"]) | shift_positions(
        calls, ["caller"], counts["callers"]
    )
    call_columns |= shift_positions(calls, ("range", "pause_range"), counts["ranges"])
    operation_columns = concatenate_columns(operations, operations[0].columns())
    operation_columns |= shift_positions(operations, ["kernel"], counts["kernels"])
    operation_columns |= shift_positions(operations, ["phase"], counts["phases"])
    span_columns = shift_positions(spans, ("first_call", "end_call", "first_pause", "end_pause"), call_counts)
    joined_texts: dict[str, Any] = {
        name: tuple(text for study in studies for text in getattr(study, name)) for name in texts
    }
    return replace(
        studies[0],
        replay=replay,
        calls=replace(calls[0], **call_columns),
        operations=replace(operations[0], **operation_columns),
        spans=replace(spans[0], **span_columns, **shift_positions(spans, ["name"], counts["ranges"])),
        **joined_texts,
        min_cost_share=min(study.min_cost_share for study in studies),
    )
