"""Joins the studied steps of a run's ranks into one study, so that a replay shows how a change of one rank affects all.

In the replay, a collective transfers data from the moment when its last rank has started it. The time that ranks waited
before that in the capture is left out.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import reduce
from typing import Any

import numpy as np
import numpy.typing as npt

from nsys_analyzer.analysis.intervals import NONE
from nsys_analyzer.analysis.ranks.join import JoinedRanks, find_pieces, join_members, name_run
from nsys_analyzer.analysis.ranks.matching import END_TOGETHER
from nsys_analyzer.analysis.steps.replay import OF_CALLS, OF_PIECES, Replay
from nsys_analyzer.analysis.steps.study import STUDY_OF_CALLS, STUDY_OF_PIECES, Study
from nsys_analyzer.analysis.summary.summary import CaptureSummary
from nsys_analyzer.trace.arrays import Ints

_Array = npt.NDArray[Any]


@dataclass(frozen=True)
class ReplayedCaptures:
    """The steps of one capture, or of all ranks of a run, to be replayed.

    Attributes:
        title: the name of the capture or of the run.
        captures: the capture, or those of all ranks.
        study: the studied steps; None if there are none.
        ranks: the number of each rank; empty for one capture.
        labels: the label of each rank; empty for one capture.
    """

    title: str
    captures: tuple[CaptureSummary, ...]
    study: Study | None
    ranks: tuple[int | None, ...] = ()
    labels: tuple[str, ...] = ()


def join_replays(captures: Sequence[CaptureSummary]) -> Iterator[ReplayedCaptures]:
    """Yields each run whose ranks can be replayed together, then every other capture by itself.

    Ranks can be replayed together if it is known who waits for whom.
    """
    capture_of = {(member.capture, member.process): capture for capture in captures for member in capture.members}
    separate = {id(capture): capture for capture in captures}
    for join in join_members([member for capture in captures for member in capture.members]):
        ranks = tuple(capture_of[member.capture, member.process] for member in join.members)
        if study := _join_studies(join, ranks):
            numbers, labels = zip(*((member.rank, member.label) for member in join.members), strict=True)
            yield ReplayedCaptures(name_run(join.members), ranks, study, numbers, labels)
            for capture in ranks:
                separate.pop(id(capture), None)
    yield from (ReplayedCaptures(capture.title, (capture,), capture.study) for capture in separate.values())


def _join_studies(join: JoinedRanks, captures: Sequence[CaptureSummary]) -> Study | None:
    """Returns the steps that the studies of all ranks hold; None if it is not known who waits for whom."""
    studies = [capture.study for capture in captures if capture.study]
    if not join.alignment or join.missing or len({id(study) for study in studies}) < len(join.members):
        return None
    rows = list(zip(studies, join.members, join.numbers, strict=True))
    numbers = [of_rank[np.searchsorted(member.start, study.windows.start)] for study, member, of_rank in rows]
    common = reduce(np.intersect1d, numbers, join.shared)
    runs = np.split(common, np.flatnonzero(np.diff(np.searchsorted(numbers[0], common)) > 1) + 1)
    steps = max(runs, key=len)
    if not len(steps):
        return None
    firsts = [int(np.searchsorted(of_rank, steps[0])) for of_rank in numbers]
    studies = [study.of_steps(at, at + len(steps)) for study, at in zip(studies, firsts, strict=True)]
    replays = _replays_with_shared_collectives(join, studies)
    return _concatenate([replace(study, replay=replay) for study, replay in zip(studies, replays, strict=True)])


def _replays_with_shared_collectives(join: JoinedRanks, studies: Sequence[Study]) -> Iterator[Replay]:
    """Yields the replay of each rank, with the number of the shared collective that each piece takes part in."""
    places, meets = [], []
    for study, member in zip(studies, join.members, strict=True):
        places.append(find_pieces(study, member))
        meets.append(np.full(len(study.begin), NONE))
    count = 0
    for match in join.matches:
        pieces = {rank: places[rank][index] for rank, index in match.items()}
        on_all_ranks = np.all([piece != NONE for piece in pieces.values()], axis=0)
        for rank, piece in pieces.items():
            meets[rank][piece[on_all_ranks]] = count + np.arange(on_all_ranks.sum())
        count += int(on_all_ranks.sum())
    clocks = [clock for clock in join.clocks if clock]
    begins = [int(clock.aligned(study.started[:1])[0]) for study, clock in zip(studies, clocks, strict=True)]
    rows = zip(studies, join.members, join.waits, places, meets, begins, strict=True)
    for study, member, waits, place, meeting, begin in rows:
        is_studied, collectives = place != NONE, member.collectives
        # A send may end before the data is received.
        is_free = (waits.transfer_start == collectives.end) & ~np.isin(collectives.kind, END_TOGETHER)
        work, free = study.replay.work.copy(), np.zeros(len(meeting), np.bool_)
        transfer = collectives.end - waits.transfer_start
        work[place[is_studied & ~is_free]] = transfer[is_studied & ~is_free]
        free[place[is_studied & is_free]] = True
        yield replace(
            study.replay,
            meets=np.where(free & (meeting != NONE), -2 - meeting, meeting),
            work=np.where(meeting == NONE, study.replay.work, work),
            begin=(float(begin - min(begins)),),
        )


def _concatenate(studies: Sequence[Study]) -> Study:
    """Returns the studies of all ranks as one, with the columns of the ranks one after the other."""
    replays = [study.replay for study in studies]

    def columns_of(parts: Sequence[Any], names: Sequence[str]) -> dict[str, Any]:
        return {name: np.concatenate([getattr(part, name) for part in parts]) for name in names}

    def shift_positions(parts: Sequence[Any], name: str, tables: Iterable[Sequence[Any] | _Array]) -> Ints:
        """Returns a column of positions in the table of its own rank as positions in the tables of all ranks."""
        offsets = np.cumsum([0, *map(len, tables)]).tolist()
        columns = zip((getattr(part, name) for part in parts), offsets, strict=False)
        return np.concatenate(
            [np.where(column >= 0, column.astype(np.int64) + offset, NONE) for column, offset in columns]
        )

    calls, pieces = [study.call for study in studies], [study.kind for study in studies]
    columns = columns_of(replays, (*OF_CALLS, *OF_PIECES, "meets"))
    columns |= {name: shift_positions(replays, name, calls) for name in ("launch", "first_call")}
    columns |= {name: shift_positions(replays, name, pieces) for name in ("awaited", "behind")}
    replay = replace(replays[0], **columns, begin=tuple(replay.begin[0] for replay in replays))
    codes = {"kernel": "kernels", "phase": "phases", "api": "apis", "range": "ranges", "pause_range": "ranges"}
    columns = columns_of(studies, [name for name in (*STUDY_OF_CALLS, *STUDY_OF_PIECES) if name not in codes])
    for name, table in codes.items():
        columns[name] = shift_positions(studies, name, [getattr(study, table) for study in studies])
    for table in ("classes", *codes.values()):
        columns[table] = tuple(name for study in studies for name in getattr(study, table))
    # A row of spans holds a code of a range, then four positions of calls.
    offsets = [np.cumsum([0, *map(len, tables)]) for tables in ([study.ranges for study in studies], calls)]
    shifts = [np.repeat(pair, (1, 4)) for pair in zip(*offsets, strict=True)]
    columns["spans"] = np.concatenate([study.spans + shift for study, shift in zip(studies, shifts, strict=False)])
    return replace(studies[0], replay=replay, **columns, low_share=min(study.low_share for study in studies))
