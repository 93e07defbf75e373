"""The memory of a step over time: from allocations and frees to levels, peaks, teeth, and what limits a phase."""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

#: The share of the issuing that the allocator must take for the phase to be its own, and the share of waiting for
#: the GPU at the phase's end from which on the GPU is what the phase waits for.
ALLOCATOR_SHARE, WAITING_SHARE = 0.5, 0.1

_ROUNDING_MS = 1e-9

#: Time in ms and bytes alive from then on.
Point = tuple[float, int]


@dataclass(frozen=True)
class MemoryEvent:
    """A tensor's memory as it is handed out, or taken back.

    Attributes:
        ms: when, since the step began.
        bytes: its size, below zero where it is taken back.
        address: what both events of one tensor share.
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


@dataclass(frozen=True)
class PhaseMemory:
    """Memory in one phase: alive at its start, at most, and at its end, and what was handed out and taken back."""

    name: str
    start_ms: float
    end_ms: float
    start_bytes: int
    peak_bytes: int
    end_bytes: int
    allocations: int
    frees: int
    allocated_bytes: int


@dataclass(frozen=True)
class Group:
    """Allocations of one size by one line in one phase; ``at_peak`` of them were alive at the step's peak."""

    source: str
    phase: str
    bytes: int
    count: int
    at_peak: int


@dataclass(frozen=True)
class Teeth:
    """Rises and falls of a curve: how often it turned down, and the slopes, in bytes per ms (None: it never did)."""

    count: int
    rise_bytes_per_ms: float | None
    fall_bytes_per_ms: float | None


def levels(events: Sequence[MemoryEvent], base_bytes: int) -> list[Point]:
    """The bytes alive after each event, of which ``base_bytes`` were there before the first."""
    alive = accumulate((event.bytes for event in events), initial=base_bytes)
    return list(zip([0.0, *(event.ms for event in events)], alive, strict=True))


def phases_of(events: Sequence[MemoryEvent], spans: Sequence[Span], base_bytes: int) -> list[PhaseMemory]:
    """What each phase did to memory; an event between two phases counts to the first of them."""
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


def largest(events: Sequence[MemoryEvent], spans: Sequence[Span], top: int) -> list[Group]:
    """The largest allocations, those of one line, phase and size together; ``top`` groups at most."""
    at_peak = Counter(_kind(event, spans) for event in alive_after(up_to_peak(events)))
    counted = Counter(_kind(event, spans) for event in events if event.bytes > 0)
    order = sorted(counted, key=lambda kind: (-kind[2], -counted[kind], kind))
    return [Group(*kind, counted[kind], at_peak[kind]) for kind in order[:top]]


def _kind(event: MemoryEvent, spans: Sequence[Span]) -> tuple[str, str, int]:
    return event.source, spans[_place(event, spans)].name, event.bytes


def thinned(points: Sequence[Point], limit: int) -> list[Point]:
    """At most ``limit`` points that draw the same curve: first, last, and the extremes of short stretches between.

    No peak is lost: the highest point of each stretch of time stays.
    """
    if len(points) <= limit:
        return list(points)
    stretches = (limit - 2) // 2
    (start, _), (end, _) = points[0], points[-1]
    width = (end - start) / stretches or 1.0
    kept: dict[int, list[int]] = {}  # stretch -> where its lowest and its highest point are
    for index, (ms, level) in enumerate(points[1:-1], 1):
        low_high = kept.setdefault(min(int((ms - start) / width), stretches - 1), [index, index])
        if level < points[low_high[0]][1]:
            low_high[0] = index
        if level > points[low_high[1]][1]:
            low_high[1] = index
    chosen = {index for pair in kept.values() for index in pair}
    return [points[index] for index in sorted({0, *chosen, len(points) - 1})]


def teeth(points: Sequence[Point], least_bytes: int) -> Teeth:
    """The teeth of a curve: it rises to the next turn, and falls from there, each by ``least_bytes`` or more.

    The slopes are all bytes of the rises over the time that they took, and the same of the falls.
    """
    turns = list(_turns(points, least_bytes))
    pairs = list(pairwise(turns))
    rises = [(one, other) for one, other in pairs if other[1] > one[1]]
    falls = [(one, other) for one, other in pairs if other[1] < one[1]]
    return Teeth(len(falls), _slope(rises), _slope(falls))


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


def paces(points: Sequence[Point]) -> tuple[float, float] | None:
    """How fast a curve changes in the first and in the last third of its time, in bytes per ms; below zero it falls.

    None where the curve takes no time.
    """
    start_ms, end_ms = points[0][0], points[-1][0]
    third_ms = (end_ms - start_ms) / 3
    if third_ms <= 0:
        return None
    first, one, two, last = (_level_at(points, start_ms + number * third_ms) for number in range(4))
    return (one - first) / third_ms, (last - two) / third_ms


def _level_at(points: Sequence[Point], ms: float) -> int:
    """The level at a moment; the sum of thirds may round to just before the last point, or beyond it."""
    return points[max(bisect_right(points, ms + _ROUNDING_MS, key=lambda point: point[0]) - 1, 0)][1]


def limited_by(wall_ms: float, issue_ms: float, allocator_ms: float, asynchronous: bool) -> str:
    """Whom a phase waits for: ``GPU``, ``allocator`` or the ``host`` that issues, and ``CPU`` where that computes.

    None of these is GPU-bound, memory-bound or compute-bound, which are claims on busy time, bytes/s and FLOP/s.

    Args:
        wall_ms: the phase, synchronized at its end.
        issue_ms: until all its work was issued, before the synchronization.
        allocator_ms: of the issuing in the allocator.
        asynchronous: whether the device works on while the host issues, as a GPU does.

    """
    if asynchronous and wall_ms - issue_ms >= WAITING_SHARE * wall_ms:
        return "GPU"
    if allocator_ms >= ALLOCATOR_SHARE * issue_ms:
        return "allocator"
    return "host" if asynchronous else "CPU"
