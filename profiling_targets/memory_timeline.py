"""The memory of a step over time: from allocations and frees to levels, peaks, and the sawtooth of a phase."""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import NamedTuple

import numpy as np
import pandas as pd

from nsys_analyzer.experiments.memory import Holder, PhaseMemory, Point


@dataclass(frozen=True)
class MemoryEvent:
    """An allocation of a tensor's memory, or its free.

    Attributes:
        ms: when, since the step began.
        bytes: its size, negative for a free.
        address: the same in both events of one tensor.
        source: the line that asked for it, empty where none is known.
        in_block: whether a layer of the model asked for it.
        is_residual: whether the line adds to the residual stream.

    """

    ms: float
    bytes: int
    address: int
    source: str = ""
    in_block: bool = False
    is_residual: bool = False


@dataclass(frozen=True)
class Span:
    """A phase of the step, in ms since the step began."""

    name: str
    start_ms: float
    end_ms: float


class Sawtooth(NamedTuple):
    """Rises and falls of a curve: how often it turned down, and the slopes, in bytes per ms (None: it never did)."""

    falls: int
    rise_bytes_per_ms: float | None
    fall_bytes_per_ms: float | None


def levels(events: Sequence[MemoryEvent], base_bytes: int) -> list[Point]:
    """The bytes alive after each event, of which ``base_bytes`` were there before the first."""
    alive = accumulate((event.bytes for event in events), initial=base_bytes)
    return list(zip([0.0, *(event.ms for event in events)], alive, strict=True))


def phases_of(events: Sequence[MemoryEvent], spans: Sequence[Span], base_bytes: int) -> list[PhaseMemory]:
    """The memory of each phase; an event between two phases counts to the first of them."""
    found, before = [], base_bytes
    for span, inside in zip(spans, _by_span(events, spans), strict=True):
        alive = list(accumulate((event.bytes for event in inside), initial=before))
        handed_out = [event.bytes for event in inside if event.bytes > 0]
        found.append(
            PhaseMemory(
                span.name, span.start_ms, span.end_ms, before, max(alive), alive[-1],
                len(handed_out), len(inside) - len(handed_out), sum(handed_out),
            )
        )  # fmt: skip
        before = alive[-1]
    return found


def _by_span(events: Sequence[MemoryEvent], spans: Sequence[Span]) -> list[list[MemoryEvent]]:
    parts: list[list[MemoryEvent]] = [[] for _ in spans]
    for event in events:
        parts[_place(event, spans)].append(event)
    return parts


def _place(event: MemoryEvent, spans: Sequence[Span]) -> int:
    return max(bisect_right(spans, event.ms, key=lambda span: span.start_ms) - 1, 0)


def alive_after(events: Iterable[MemoryEvent]) -> list[MemoryEvent]:
    """The allocations among some events, in order, that none of the later ones frees."""
    alive: dict[int, MemoryEvent] = {}
    for event in events:
        alive.pop(event.address, None)
        if event.bytes > 0:
            alive[event.address] = event
    return list(alive.values())


def up_to_peak(events: Sequence[MemoryEvent]) -> Sequence[MemoryEvent]:
    """The events up to the one after which most memory is alive; none where it is never more than at the start."""
    alive = [level for _, level in levels(events, 0)]
    return events[: alive.index(max(alive))]


def largest(events: Sequence[MemoryEvent], spans: Sequence[Span], top: int) -> list[Holder]:
    """The largest allocations, those of one line, phase and size together; ``top`` groups at most."""
    at_peak = Counter(_kind(event, spans) for event in alive_after(up_to_peak(events)))
    counted = Counter(_kind(event, spans) for event in events if event.bytes > 0)
    order = sorted(counted, key=lambda kind: (-kind[2], -counted[kind], kind))
    return [Holder(*kind, counted[kind], at_peak[kind]) for kind in order[:top]]


def _kind(event: MemoryEvent, spans: Sequence[Span]) -> tuple[str, str, int]:
    return event.source, spans[_place(event, spans)].name, event.bytes


def thinned(points: Sequence[Point], limit: int) -> list[Point]:
    """At most ``limit`` points that draw the same curve: its ends, and the extremes of each stretch of time."""
    if len(points) <= limit:
        return list(points)
    inner = pd.DataFrame(points[1:-1], columns=["ms", "bytes"])
    edges = np.linspace(points[0][0], points[-1][0], (limit - 2) // 2 + 1)
    stretches = inner["bytes"].groupby(np.digitize(inner["ms"], edges[1:-1]))
    chosen = {*stretches.idxmin(), *stretches.idxmax()}
    return [points[0], *(points[index + 1] for index in sorted(chosen)), points[-1]]


def sawtooth(points: Sequence[Point], least_bytes: int) -> Sawtooth:
    """The rises and falls of a curve between its turns, each of ``least_bytes`` or more.

    The slopes are all bytes of the rises over the time that they took, and the same of the falls.
    """
    turns = list(_turns(points, least_bytes))
    pairs = list(pairwise(turns))
    rises = [(one, other) for one, other in pairs if other[1] > one[1]]
    falls = [(one, other) for one, other in pairs if other[1] < one[1]]
    return Sawtooth(len(falls), _slope(rises), _slope(falls))


def _turns(points: Sequence[Point], least_bytes: int) -> Iterator[Point]:
    """Where the curve starts to rise or fall, where it turns by ``least_bytes`` or more, and its last extreme."""
    low = high = edge = points[0]
    direction = 0  # not known before it has risen or fallen far enough
    for point in points:
        if not direction:
            low, high = min(low, point, key=_level), max(high, point, key=_level)
            if high[1] - low[1] >= least_bytes:
                direction, edge = (1 if point is high else -1), point
                yield low if point is high else high
        elif direction * (point[1] - edge[1]) >= 0:
            edge = point
        elif direction * (edge[1] - point[1]) >= least_bytes:
            yield edge
            direction, edge = -direction, point
    if direction:
        yield edge


def _level(point: Point) -> int:
    return point[1]


def _slope(pairs: Sequence[tuple[Point, Point]]) -> float | None:
    took_ms = sum(other[0] - one[0] for one, other in pairs)
    return abs(sum(other[1] - one[1] for one, other in pairs)) / took_ms if took_ms > 0 else None
