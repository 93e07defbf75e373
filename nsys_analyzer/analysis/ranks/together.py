"""The steps of a run's ranks as one study: a collective begins when its last rank starts it, and all ranks wait for it.

Until then a rank waits, however long it has done so in the capture; what a collective takes from then on is its own.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import reduce
from typing import Any

import numpy as np
import numpy.typing as npt

from nsys_analyzer.analysis.intervals import NONE
from nsys_analyzer.analysis.ranks.join import Join, run_name
from nsys_analyzer.analysis.ranks.matching import END_TOGETHER, group_members
from nsys_analyzer.analysis.ranks.pace import pieces_of
from nsys_analyzer.analysis.steps.replay import OF_CALLS, OF_PIECES, Replay
from nsys_analyzer.analysis.steps.study import STUDY_OF_CALLS, STUDY_OF_PIECES, Study
from nsys_analyzer.analysis.summary.summary import CaptureSummary
from nsys_analyzer.trace.arrays import Ints

_Array = npt.NDArray[Any]


@dataclass(frozen=True)
class ReplayedCaptures:
    """The steps of a capture, or of all ranks of a run, with their numbers and what they are called."""

    title: str
    captures: tuple[CaptureSummary, ...]
    study: Study | None
    ranks: tuple[int | None, ...] = ()
    labels: tuple[str, ...] = ()


def join_replays(captures: Sequence[CaptureSummary]) -> Iterator[ReplayedCaptures]:
    """Yields the ranks of each run together, where it is known who waits for whom, and any other capture by itself."""
    capture_of = {(member.capture, member.process): one for one in captures for member in one.members}
    alone = {id(capture): capture for capture in captures}
    for group in group_members([member for capture in captures for member in capture.members]):
        join = Join(*group)
        ranks = tuple(capture_of[member.capture, member.process] for member in join.members)
        if study := _study_together(join, ranks):
            numbers, labels = zip(*((member.rank, member.label) for member in join.members), strict=True)
            yield ReplayedCaptures(run_name(join.members), ranks, study, numbers, labels)
            for capture in ranks:
                alone.pop(id(capture), None)
    yield from (ReplayedCaptures(capture.title, (capture,), capture.study) for capture in alone.values())


def _study_together(join: Join, captures: Sequence[CaptureSummary]) -> Study | None:
    """Returns the steps that the studies of all ranks hold; None where it is not known who waits for whom."""
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
    return _joined(
        [replace(study, replay=replay) for study, replay in zip(studies, _meeting(join, studies), strict=True)]
    )


def _meeting(join: Join, studies: Sequence[Study]) -> Iterator[Replay]:
    """Yields the replay of each rank with the collectives in which it meets others."""
    places, meets = [], []
    for study, member in zip(studies, join.members, strict=True):
        places.append(pieces_of(study, member))
        meets.append(np.full(len(study.begin), NONE))
    count = 0
    for match in join.matches:
        pieces = {rank: places[rank][index] for rank, index in match.items()}
        of_all = np.all([piece != NONE for piece in pieces.values()], axis=0)
        for rank, piece in pieces.items():
            meets[rank][piece[of_all]] = count + np.arange(of_all.sum())
        count += int(of_all.sum())
    clocks = [clock for clock in join.clocks if clock]
    first = [int(clock.aligned(study.started[:1])[0]) for study, clock in zip(studies, clocks, strict=True)]
    for study, member, waits, place, met, at in zip(
        studies, join.members, join.waits, places, meets, first, strict=True
    ):
        known, collectives = place != NONE, member.collectives
        # What is sent may leave before anyone receives it.
        goes_on = (waits.until == collectives.end) & ~np.isin(collectives.kind, END_TOGETHER)
        work, free = study.replay.work.copy(), np.zeros(len(met), np.bool_)
        work[place[known & ~goes_on]] = (collectives.end - waits.until)[known & ~goes_on]
        free[place[known & goes_on]] = True
        yield replace(
            study.replay,
            meets=np.where(free & (met != NONE), -2 - met, met),
            work=np.where(met == NONE, study.replay.work, work),
            begin=(float(at - min(first)),),
        )


def _joined(studies: Sequence[Study]) -> Study:
    """Returns the studies of all ranks as one, one rank behind the other."""
    replays = [study.replay for study in studies]

    def alike(values: Sequence[Any], names: Sequence[str]) -> dict[str, Any]:
        return {name: np.concatenate([getattr(value, name) for value in values]) for name in names}

    def positions(values: Sequence[Any], name: str, of: Iterable[Sequence[Any] | _Array]) -> Ints:
        """Returns positions, each among the things of its rank, as positions among those of all."""
        before = np.cumsum([0, *map(len, of)]).tolist()
        columns = zip((getattr(value, name) for value in values), before, strict=False)
        return np.concatenate([np.where(column >= 0, column.astype(np.int64) + at, NONE) for column, at in columns])

    calls, pieces = [study.call for study in studies], [study.kind for study in studies]
    columns = alike(replays, (*OF_CALLS, *OF_PIECES, "meets"))
    columns |= {name: positions(replays, name, calls) for name in ("launch", "first_call")}
    columns |= {name: positions(replays, name, pieces) for name in ("awaited", "behind")}
    replay = replace(replays[0], **columns, begin=tuple(replay.begin[0] for replay in replays))
    codes = {"kernel": "kernels", "phase": "phases", "api": "apis", "range": "ranges", "pause_range": "ranges"}
    columns = alike(studies, [name for name in (*STUDY_OF_CALLS, *STUDY_OF_PIECES) if name not in codes])
    for name, table in codes.items():
        columns[name] = positions(studies, name, [getattr(study, table) for study in studies])
    for table in ("classes", *codes.values()):
        columns[table] = tuple(name for study in studies for name in getattr(study, table))
    # Of each range its name, and calls.
    before = [np.cumsum([0, *map(len, of)]) for of in ([study.ranges for study in studies], calls)]
    shifts = [np.repeat(at, (1, 4)) for at in zip(*before, strict=True)]
    columns["spans"] = np.concatenate([study.spans + by for study, by in zip(studies, shifts, strict=False)])
    return replace(studies[0], replay=replay, **columns, low_share=min(study.low_share for study in studies))
