"""How long a step of each rank takes by itself at the pace that it has without the profiler: who is late there, too.

A profiler makes launching slower, not on all ranks alike. Where launching limits the ranks, a rank that is late under
the profiler may be none that others wait for without it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from nsys_analyzer.analysis.intervals import NONE
from nsys_analyzer.analysis.kernels.class_rules import COMMUNICATION
from nsys_analyzer.analysis.ranks.collectives import Waits
from nsys_analyzer.analysis.ranks.member import Member
from nsys_analyzer.analysis.steps.replay import Replay
from nsys_analyzer.analysis.steps.study import Study
from nsys_analyzer.trace.arrays import Ints

#: Multiples of the most that recording an event costs at which steps are replayed: between these they are interpolated.
_COSTS = (0.0, 1.0, 3.0)


def pieces_of(study: Study, member: Member) -> Ints:
    """Returns the piece of the studied steps that each collective of a rank is, -1 outside of these."""
    index = np.flatnonzero(study.of_class(COMMUNICATION))
    piece_of = dict(zip(study.begin[index].tolist(), index.tolist(), strict=True))
    return np.array([piece_of.get(start, NONE) for start in member.collectives.start.tolist()], np.int64)


def own_steps_ms(ranks: Sequence[tuple[Study, Member, Waits]], timed_ms: float | None) -> list[list[float]]:
    """Returns what a step of each rank takes if it waits for no other one, ms: as recorded, and without the profiler.

    How much the profiler slowed each rank is not known. It cost every rank as much for each recorded event, or so much
    that all ranks launch at the pace of the fastest one: the last two lists. On either the longest step lasts as long
    as was measured; without a measurement the most that recording costs is taken off.
    """
    replays = []
    for study, member, waits in ranks:
        piece, work = pieces_of(study, member), study.replay.work.copy()
        work[piece[piece != NONE]] = (member.collectives.end - waits.until)[piece != NONE]
        replays.append(replace(study.replay, work=work))
    pace = [max(float(np.median(replay.after)), 1.0) for replay in replays]
    rows = zip(replays, pace, ranks, strict=True)
    alike = [replay.at_pace(min(pace) / own, study.unrecorded_ns) for replay, own, (study, *_) in rows]
    return [_steps_ms(replays, 0.0), *(_unprofiled_ms(some, timed_ms) for some in (replays, alike))]


def _unprofiled_ms(replays: Sequence[Replay], timed_ms: float | None) -> list[float]:
    if timed_ms is None:
        return _steps_ms(replays, 1.0)
    steps = np.array([_steps_ms(replays, cost) for cost in _COSTS])
    cost = np.interp(-timed_ms, -steps.max(axis=1), _COSTS)
    return [float(np.interp(cost, _COSTS, of_rank)) for of_rank in steps.T]


def _steps_ms(replays: Sequence[Replay], cost: float) -> list[float]:
    return [replay.with_events_costing(cost).step_ns / 1e6 for replay in replays]
