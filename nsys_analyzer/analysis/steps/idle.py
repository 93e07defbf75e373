"""Why a device idles: every nanosecond of a gap belongs to one cause, by what the program did meanwhile.

A gap is looked at from the side of the operation that ends it. Where that was launched before the gap began, the
device had it in its queue: nothing of the program's keeps it waiting. Else the program came too late, because it was
in a blocking call when the device ran dry, in the allocator, at work of its own, or because launching takes its time.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np

from nsys_analyzer.analysis.intervals import NONE, Cover
from nsys_analyzer.analysis.steps.anatomy import COMMUNICATING, Gaps, reached_before
from nsys_analyzer.analysis.steps.host import Host
from nsys_analyzer.trace.arrays import Bools, Codes, Ints
from nsys_analyzer.trace.columns import SYNCHRONIZE

Cause = Literal["sync", "allocator", "copy", "launch", "host", "data", "communication", "unknown"]
CAUSES: tuple[Cause, ...] = ("sync", "allocator", "copy", "launch", "host", "data", "communication", "unknown")

#: Between two kernels that are both queued the GPU needs about a microsecond; up to this it is its own affair, ns.
_QUEUED_NS = 10_000
#: The clocks of CPU and GPU are read together, to this, ns.
_SKEW_NS = 3_000


@dataclass(frozen=True)
class IdleRow:
    """Idle time of one cause over all steps: in which range, in which API call, and in how many gaps."""

    cause: Cause
    range: str
    api: str
    ns: int
    gaps: int


@dataclass(frozen=True)
class Causes:
    """The causes of each gap; the parts of a gap add up to it.

    Attributes:
        base: shape (gaps,), code into ``CAUSES`` of what is left of each gap without its pauses and allocator calls.
        base_ns, pause_ns, allocator_ns: shape (gaps,).
        data_ns: shape (gaps,), the part of ``pause_ns`` in which the program loads a batch.
        own: shape (gaps,), True for the short pauses between operations that are both queued: the device's own.
        pause: shape (gaps,), code into ``CAUSES`` of the last pause in or before each gap.
        rows: the causes over all steps, the longest first.
    """

    base: Ints
    base_ns: Ints
    pause_ns: Ints
    allocator_ns: Ints
    pause: Ints
    data_ns: Ints
    own: Bools
    rows: tuple[IdleRow, ...]

    @property
    def parts(self) -> tuple[tuple[Ints, Ints], ...]:
        """The parts of the gaps: the cause of each as a code into ``CAUSES``, and ns."""
        host, data, allocator = (np.full(len(self.base), one) for one in (_HOST, _DATA, _ALLOCATOR))
        others = (host, self.pause_ns - self.data_ns), (data, self.data_ns), (allocator, self.allocator_ns)
        return (self.base, self.base_ns), *others


def find_causes(gaps: Gaps, host: Host, launched: Ints, rank: Codes, steps: Bools) -> Causes:
    """The causes of the gaps of one device.

    Args:
        gaps: its gaps.
        host: the CPU's side of the process.
        launched: shape (operations,), when each was launched, ns; far in the past where that is not known.
        rank: shape (operations,), as of ``anatomy``.
        steps: shape (ranges,), True for the ranges of steps, which name no part of one.
    """
    known, queued, until = _launches(gaps, launched)
    pause_ns, allocator_ns = _within(host.pauses, gaps, until), _within(host.allocations, gaps, until)
    base, call = _bases(gaps, host, queued, known, rank)
    base_ns = gaps.length - pause_ns - allocator_ns
    rows = [*_base_rows(base, base_ns, call, host, steps), *_pause_rows(gaps, until, host)]
    rows += _allocator_rows(gaps, until, host, steps)
    last = np.searchsorted(host.pauses.start, gaps.end) - 1
    pause = np.where(np.append(host.loading, False)[last], _DATA, _HOST)
    loads = Cover.of(host.pauses.start[host.loading], host.pauses.end[host.loading])
    data_ns, own = _within(loads, gaps, until), queued & (gaps.length <= _QUEUED_NS)
    return Causes(base, base_ns, pause_ns, allocator_ns, pause, data_ns, own, _joined(rows))


def idle_stretches(gaps: Gaps, causes: Causes, host: Host, launched: Ints) -> tuple[Ints, Ints, Ints]:
    """The gaps cut where their cause changes: start, end and cause (a code into ``CAUSES``) of each stretch, in order.

    Those of a cause are as long together as ``causes`` says; ``launched`` is as of :func:`find_causes`.
    """
    *_, until = _launches(gaps, launched)
    _, interval, low, high = host.pauses.inside(gaps.start, until)
    parts = [(low, high, np.where(host.loading[interval], _DATA, _HOST))]
    _, _, low, high = host.allocations.inside(gaps.start, until)
    parts.append((low, high, np.full(len(low), _ALLOCATOR)))
    start = np.concatenate([host.pauses.start, host.allocations.start])
    end, order = np.concatenate([host.pauses.end, host.allocations.end]), np.argsort(start, kind="stable")
    others = Cover.of(start[order], end[order])
    gap, low, high = others.without(gaps.start, until)
    parts.append((low, high, causes.base[gap]))
    behind = gaps.end > until  # there nothing that the program does keeps the device waiting
    parts.append((until[behind], gaps.end[behind], causes.base[behind]))
    low, high, cause = (np.concatenate(columns) for columns in zip(*parts, strict=True))
    order = np.argsort(low, kind="stable")
    low, high, cause = low[order], high[order], cause[order]
    # Two parts of one cause that touch are one stretch, unless a gap ends between them.
    joins = (low[1:] == high[:-1]) & (cause[1:] == cause[:-1]) & ~np.isin(low[1:], gaps.start)
    first, last = np.append(True, ~joins)[: len(low)], np.append(~joins, True)[: len(low)]
    return low[first], high[last], cause[first]


def _launches(gaps: Gaps, launched: Ints) -> tuple[Bools, Bools, Ints]:
    """Of the operation that ends each gap: whether there is one, whether it was queued, and when its launch began.

    Until then, as far as it is in the gap, whatever the program does keeps the device waiting.
    """
    known = gaps.next != NONE
    launch = np.where(known, launched[gaps.next], gaps.end)
    queued = known & (launch <= gaps.start - _SKEW_NS)
    return known, queued, np.where(queued, gaps.start, np.minimum(np.maximum(launch, gaps.start), gaps.end))


def _within(cover: Cover, gaps: Gaps, until: Ints) -> Ints:
    """Shape (gaps,): how much of each gap up to a moment in it some intervals cover, ns; most gaps touch none."""
    first = np.searchsorted(gaps.end, cover.start, side="right")
    behind = np.searchsorted(gaps.start, cover.end, side="left")
    touched = np.zeros(len(gaps.start) + 1, np.int64)
    reaches = behind > first
    np.add.at(touched, first[reaches], 1)
    np.add.at(touched, behind[reaches], -1)
    index = np.flatnonzero(np.cumsum(touched[:-1]))
    covered = np.zeros(len(gaps.start), np.int64)
    covered[index] = cover.within(gaps.start[index], until[index])
    return covered


def _bases(gaps: Gaps, host: Host, queued: Bools, known: Bools, rank: Codes) -> tuple[Ints, Ints]:
    """What each gap is due to besides pauses and the allocator, and the call that keeps it open, or -1.

    That is the call that waits when the gap begins, or else one that takes long before the gap ends.
    """
    waiting = host.waiting
    start, end = host.calls.start[waiting], host.calls.end[waiting]
    began = np.searchsorted(start, gaps.start + _SKEW_NS, side="right") - 1
    call = np.append(waiting, NONE)[began]
    inside = (began >= 0) & (np.append(end, 0)[began] + _SKEW_NS >= gaps.start)
    is_copy = np.append(host.calls.call[waiting] != SYNCHRONIZE, False)[began]
    slow = host.slow
    latest = np.searchsorted(host.calls.start[slow], gaps.end) - 1
    late = ~inside & ~queued & known & (latest >= 0) & (np.append(host.calls.end[slow], 0)[latest] > gaps.start)
    beside = known & (rank[gaps.next] == COMMUNICATING)
    base = np.select(
        [queued & (gaps.length <= _QUEUED_NS), queued & beside, queued, inside & is_copy, inside, known],
        [_LAUNCH, _COMMUNICATION, _UNKNOWN, _COPY, _SYNC, _LAUNCH],
        _UNKNOWN,
    )
    return base, np.where(inside & ~queued, call, np.where(late, np.append(slow, NONE)[latest], NONE))


def _base_rows(base: Ints, base_ns: Ints, call: Ints, host: Host, steps: Bools) -> list[IdleRow]:
    """What is left of the gaps by cause, and in a blocking call by call and by the range around it."""
    others = call == NONE
    ns = np.bincount(base[others], base_ns[others], len(CAUSES))
    count = np.bincount(base[others], base_ns[others] > 0, len(CAUSES))
    rows = [IdleRow(cause, "", "", int(ns[i]), int(count[i])) for i, cause in enumerate(CAUSES)]
    inside = np.flatnonzero(~others)
    names = _range_names(host, host.calls.start[call[inside]], steps)
    apis = [host.calls.names[code] for code in host.calls.name[call[inside]].tolist()]
    found = zip(base[inside].tolist(), names, apis, base_ns[inside].tolist(), strict=True)
    return rows + [IdleRow(CAUSES[cause], name, api, idle, 1) for cause, name, api, idle in found]


def _range_names(host: Host, time: Ints, steps: Bools) -> list[str]:
    """The names of the innermost ranges at some moments, empty outside all but a step's."""
    around = host.innermost(time).tolist()
    return ["" if one == NONE or steps[one] else host.name(one) for one in around]


def _pause_rows(gaps: Gaps, until: Ints, host: Host) -> list[IdleRow]:
    """The idle time in the pauses of the program: of its input pipeline, or of other work of its own."""
    idle = Cover(gaps.start, until, np.append(0, np.cumsum(until - gaps.start)))
    found = idle.within(host.pauses.start, host.pauses.end)
    pauses = np.flatnonzero(found)
    name = np.append(host.ranges.name, NONE)[host.range[pauses]]
    keys, group = np.unique(name * 2 + host.loading[pauses], return_inverse=True)
    ns, count = np.bincount(group, found[pauses], len(keys)), np.bincount(group, minlength=len(keys))
    names = [host.ranges.names[key >> 1] if key >= 0 else "" for key in keys.tolist()]
    causes: list[Cause] = ["data" if key & 1 else "host" for key in keys.tolist()]
    figures = zip(causes, names, ns.tolist(), count.tolist(), strict=True)
    return [IdleRow(cause, name, "", int(idle), many) for cause, name, idle, many in figures]


def _allocator_rows(gaps: Gaps, until: Ints, host: Host, steps: Bools) -> list[IdleRow]:
    """The idle time in each call of the allocator; where two threads are in it, a moment is that of the first."""
    idle = Cover(gaps.start, until, np.append(0, np.cumsum(until - gaps.start)))
    index = host.allocating
    begin = np.maximum(host.calls.start[index], reached_before(host.calls.end[index]))
    found = idle.within(begin, np.maximum(host.calls.end[index], begin))
    index, found = index[found > 0], found[found > 0]
    names = _range_names(host, host.calls.start[index], steps)
    apis = [host.calls.names[code] for code in host.calls.name[index].tolist()]
    return [IdleRow("allocator", *row, 1) for row in zip(names, apis, found.tolist(), strict=True)]


def _joined(rows: list[IdleRow]) -> tuple[IdleRow, ...]:
    sums: dict[tuple[Cause, str, str], tuple[int, int]] = {}
    for row in rows:
        ns, gaps = sums.get((row.cause, row.range, row.api), (0, 0))
        sums[row.cause, row.range, row.api] = ns + row.ns, gaps + row.gaps
    joined = [IdleRow(*key, *value) for key, value in sums.items() if value[0]]
    return tuple(sorted(joined, key=lambda row: -row.ns))


_SYNC, _ALLOCATOR, _COPY, _LAUNCH, _HOST, _DATA, _COMMUNICATION, _UNKNOWN = range(len(CAUSES))
