"""How long a step of each rank takes by itself, at its pace without the profiler: this shows who is late without it.

A profiler makes launching slower, and not by the same factor on all ranks. If launching limits the ranks, others may
not wait without the profiler for the rank that is late under it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from nsys_analyzer.analysis.intervals import NONE
from nsys_analyzer.analysis.kernels.class_rules import COMMUNICATION
from nsys_analyzer.analysis.ranks.collectives import Waits
from nsys_analyzer.analysis.steps.member import Member
from nsys_analyzer.analysis.steps.replay import Replay
from nsys_analyzer.analysis.steps.study import Study
from nsys_analyzer.trace.arrays import Ints
from nsys_analyzer.trace.schema import NS_PER_MS

#: Steps are replayed at these costs of an event, as multiples of the highest cost; between them, they are interpolated.
_COSTS = (0.0, 1.0, 3.0)


def pieces_of(study: Study, member: Member) -> Ints:
    """Returns the position of each collective of a rank among the pieces of the studied steps, or -1."""
    index = np.flatnonzero(study.of_class(COMMUNICATION))
    piece_of = dict(zip(study.begin[index].tolist(), index.tolist(), strict=True))
    return np.array([piece_of.get(start, NONE) for start in member.collectives.start.tolist()], np.int64)


def own_steps_ms(ranks: Sequence[tuple[Study, Member, Waits]], timed_ms: float | None) -> list[list[float]]:
    """Returns what a step of each rank takes if it waits for no other rank, ms: as recorded, and without the profiler.

    How much the profiler slowed each rank down is not known, so there are two lists without the profiler. In the first
    one, each recorded event costs the same on every rank. In the second one, all ranks launch at the pace of the
    fastest one. In both, the longest step takes as long as was measured. Without a measurement, the highest cost of
    recording is taken off.
    """
    replays = []
    for study, member, waits in ranks:
        piece, work = pieces_of(study, member), study.replay.work.copy()
        work[piece[piece != NONE]] = (member.collectives.end - waits.until)[piece != NONE]
        replays.append(replace(study.replay, work=work))
    pace = [max(float(np.median(replay.after)), 1.0) for replay in replays]
    rows = zip(replays, pace, ranks, strict=True)
    at_one_pace = [replay.at_pace(min(pace) / of_rank, study.unrecorded_ns) for replay, of_rank, (study, *_) in rows]
    return [_steps_ms(replays, 0.0), _unprofiled_ms(replays, timed_ms), _unprofiled_ms(at_one_pace, timed_ms)]


def _unprofiled_ms(replays: Sequence[Replay], timed_ms: float | None) -> list[float]:
    """Returns the steps at the cost of an event by which the longest one takes as long as it was timed."""
    if timed_ms is None:
        return _steps_ms(replays, 1.0)
    steps = np.array([_steps_ms(replays, cost) for cost in _COSTS])
    cost = np.interp(-timed_ms, -steps.max(axis=1), _COSTS)
    return [float(np.interp(cost, _COSTS, of_rank)) for of_rank in steps.T]


def _steps_ms(replays: Sequence[Replay], cost: float) -> list[float]:
    """Returns the length of a step of each rank if recording an event costs this multiple of the highest cost."""
    return [replay.with_events_costing(cost).step_ns / NS_PER_MS for replay in replays]
