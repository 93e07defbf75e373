"""Finds a group of ranks whose collectives take longer than equal collectives of other groups of ranks."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

import numpy as np

from nsys_analyzer.analysis.ranks.matching import Match
from nsys_analyzer.analysis.ranks.run import SlowLink
from nsys_analyzer.analysis.steps.member import Member
from nsys_analyzer.trace.arrays import Ints
from nsys_analyzer.trace.schema import NS_PER_MS

#: The smallest number of groups of ranks whose median is the usual time of a transfer.
_MIN_GROUPS = 3
#: A group of ranks counts as slow if its transfers take at least this many times the usual time, and if the additional
#: time is at least this share of a step.
_SLOW_RATIO, _SLOW_SHARE = 1.25, 0.02


def find_slow_link(
    members: Sequence[Member], matches: Sequence[Match], steps: Sequence[Ints], step_ns: float
) -> SlowLink | None:
    """Returns the group of ranks with the slowest transfers among groups of equal size; None if no group is slow.

    The time of a transfer is the shortest duration of the collective on any rank, because the rank that starts the
    collective last does not wait.

    Args:
        members: the members of the run.
        matches: the collectives that members share; each match is of one communicator or pair of ranks.
        steps: the indices of the compared steps among the steps of each member.
        step_ns: the length of a step, ns.
    """
    # The durations of transfers by the collective's kind, its size and its number of ranks, and then by the ranks.
    durations_ns: dict[tuple[int, int, int], dict[tuple[int, ...], Ints]] = defaultdict(dict)
    for match in matches:
        place, index = next(iter(match.items()))
        collectives = members[place].collectives
        shortest_ns = np.min(
            [(members[p].collectives.end - members[p].collectives.start)[i] for p, i in match.items()], 0
        )
        in_steps = np.isin(collectives.step[index], steps[place])
        kinds, sizes = collectives.kind[index], collectives.bytes[index]
        for kind, size in sorted(set(zip(kinds[in_steps].tolist(), sizes[in_steps].tolist(), strict=True))):
            is_equal = in_steps & (kinds == kind) & (sizes == size)
            durations_ns[kind, size, len(match)][tuple(match)] = shortest_ns[is_equal]
    transfer_ns: dict[tuple[int, ...], float] = defaultdict(float)
    usual_ns: dict[tuple[int, ...], float] = defaultdict(float)
    for durations_of_groups in durations_ns.values():
        if len(durations_of_groups) >= _MIN_GROUPS:
            usual = float(np.median([np.median(durations) for durations in durations_of_groups.values()]))
            for group, durations in durations_of_groups.items():
                transfer_ns[group] += float(np.median(durations)) * len(durations)
                usual_ns[group] += usual * len(durations)
    if not usual_ns:
        return None
    slowest = max(usual_ns, key=lambda group: transfer_ns[group] - usual_ns[group])
    later_ns = (transfer_ns[slowest] - usual_ns[slowest]) / max(len(steps[0]), 1)
    if later_ns < _SLOW_SHARE * step_ns or transfer_ns[slowest] < _SLOW_RATIO * usual_ns[slowest]:
        return None
    labels = tuple(members[place].label for place in slowest)
    return SlowLink(labels, transfer_ns[slowest] / usual_ns[slowest], later_ns / NS_PER_MS)
