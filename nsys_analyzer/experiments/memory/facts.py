"""Facts of the memory bench's rows: names, phases, limits, contradictions, and claims on hardware limits."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from nsys_analyzer.analysis.transformer.flops import backward_flops, forward_flops
from nsys_analyzer.experiments.limits import MinimumMemory, Rate
from nsys_analyzer.experiments.memory.case import MemoryRow, PhaseFigures, run_name
from nsys_analyzer.experiments.memory.timeline import Point, limited_by, paces
from nsys_analyzer.experiments.model import Results, known
from nsys_analyzer.report.units import format_number, milliseconds
from nsys_analyzer.text import Words, phrase

#: The phases whose slopes are looked at; the loss is too short for one, and the optimizer keeps nothing.
SLOPED = ("forward", "backward")
#: How far two counts of the same bytes may lie apart, and two peaks that pass for equal.
_TOLERANCE = 0.001
_TIGHTEST = 6
_FLOPS = {"forward": forward_flops, "backward": backward_flops}


def phases_of(row: MemoryRow) -> list[PhaseFigures]:
    """The phases of a row, none where it ended before they were recorded."""
    return row.figures.phases or []


def slopes_of(rows: Sequence[MemoryRow]) -> Iterator[tuple[MemoryRow, PhaseFigures]]:
    """Each forward and backward phase, with its row."""
    return ((row, phase) for row in rows if row.ok for phase in phases_of(row) if phase.name in SLOPED)


def limit_of(row: MemoryRow, phase: PhaseFigures) -> str:
    """Whom a phase waits for."""
    return limited_by(phase.wall_ms, phase.issue_ms, phase.allocator_ms, row.case.device == "cuda")


def course(row: MemoryRow, phase: PhaseFigures) -> list[Point]:
    """The curve of a phase from its start to its last event, of backward from where the old gradients are freed."""
    start_ms, end_ms = phase.start_ms, phase.end_ms
    points = [(start_ms, phase.start_bytes)]
    points += [(ms, level) for ms, level in known(row.figures.timeline_ms_bytes) if start_ms < ms <= end_ms]
    if phase.name != "backward":
        return points
    # Gradients have the size of the parameters; they go at once, which is no slope.
    freed = phase.start_bytes - known(row.figures.parameter_bytes)
    begin = next((index for index, (_, level) in enumerate(points) if level <= freed), 0)
    return points[begin:]


def paces_of(row: MemoryRow, phase: PhaseFigures) -> tuple[float | None, float | None, float | None]:
    """Bytes per second in which memory changes: in the first third of a phase's course, in the last, over its wall."""
    points = course(row, phase)
    first, last = paces(points) or (None, None)
    over_wall = (points[-1][1] - points[0][1]) / phase.wall_ms
    return first and first * 1e3, last and last * 1e3, over_wall * 1e3


def place_of_peak(row: MemoryRow) -> str:
    """Where memory is highest, for a sentence: a phase, or a border where the phases beside it are equally high."""
    phases = phases_of(row)
    top = max(phase.peak_bytes for phase in phases)
    tied = [phase for phase in phases if phase.peak_bytes >= top * (1 - _TOLERANCE)]
    # A phase that is never higher than where it starts has its peak from the phase before.
    own = [phase.name for phase in tied if phase.peak_bytes > phase.start_bytes * (1 + _TOLERANCE)]
    if len(own) < 2:
        return f"in its {(own or [tied[0].name])[0]}"
    if tied[-1].name == "backward":
        return f"where {own[0]} ends and backward begins"
    return f"equally in its {' and '.join(own)}"


def _times(count: int) -> str:
    return "once" if count == 1 else f"{count:,} times"


def warnings(results: Results, rows: Sequence[MemoryRow]) -> tuple[Words, ...]:
    """What should not be: calls to the driver in a warm step, and counts of the same bytes that differ."""
    lines = [line for row in rows if row.ok for line in _row_warnings(row)]
    lines += [
        phrase(
            "**cudaMalloc while measuring**: {} allocates {} in its measured steps.",
            one.title,
            _times(memory.allocations),
        )
        for one in results.captures
        if (memory := one.device_memory) and not memory.of_tensors and memory.allocations
    ]
    return tuple(lines)


def _row_warnings(row: MemoryRow) -> Iterator[Words]:
    figures, phases = row.figures, phases_of(row)
    calls = sum(phase.device_allocations + phase.device_frees for phase in phases)
    if calls:
        took = milliseconds(sum(phase.device_calls_ms for phase in phases))
        yield (
            phrase(
                "**cudaMalloc in the recorded step**: {} calls the driver {}, in {} at most. Its "
                "allocator's cache had not settled, which takes some steps, anew after it was emptied to "
                "time a step without it.",
                run_name(row),
                _times(calls),
                took,
            )
        )
    for one in phases:
        yield from _differ(row, f"peak of {one.name}", one.peak_bytes, one.counted_peak_bytes, "allocator")
    yield from _differ(row, "residual stream", figures.residual_seen_bytes, figures.residual_bytes, "shape")
    if row.case.trains:
        kept, expected = figures.layer_saves_bytes, figures.layer_saves_by_shapes_bytes
        yield from _differ(row, "memory that a layer keeps", kept, expected, "shapes")


def _differ(row: MemoryRow, what: str, seen: float | None, expected: float | None, source: str) -> Iterator[Words]:
    if seen and expected and abs(seen / expected - 1) > _TOLERANCE:
        sizes = f"{format_number(seen, 'bytes')} recorded, {format_number(expected, 'bytes')} by its {source}"
        yield phrase("**Two counts differ**: {}, {}: {}.", run_name(row), what, sizes)


def rates(rows: Sequence[MemoryRow]) -> list[Rate]:
    """FLOPs of the matmuls, and bytes: what the allocator hands out is written once at least."""
    return [
        Rate(
            f"{phase.name}, {run_name(row)}",
            row.case.precision,
            _FLOPS[phase.name](row.case.size, row.case.batch_size, row.case.context_length),
            phase.allocated_bytes,
            phase.wall_ms,
            phase.peak_bytes - phase.start_bytes,
        )
        for row, phase in slopes_of(rows)
    ]


def minimum_memory(rows: Sequence[MemoryRow]) -> list[MinimumMemory]:
    """The lower bounds of each phase, of those phases the ones that leave least room above them."""
    found = [one for row in rows if row.ok for one in _minimum_memory(row)]
    return sorted(found, key=lambda one: one.ratio)[:_TIGHTEST]


def _minimum_memory(row: MemoryRow) -> Iterator[MinimumMemory]:
    figures, name = row.figures, run_name(row)
    parameters, logits, forward = (
        known(one) for one in (figures.parameter_bytes, figures.logits_bytes, figures.forward_peak_bytes)
    )
    if not row.case.trains:
        yield MinimumMemory(name, forward, parameters + logits, "weights, logits")
        return
    # Gradients have the size of the parameters, and are freed when the next backward begins.
    held = 2 * parameters + known(figures.moment_bytes)
    saved = known(figures.layer_saves_by_shapes_bytes) * row.case.size.num_layers
    parts = "weights, gradients, moments"
    yield MinimumMemory(f"forward, {name}", forward, held + saved + logits, f"{parts}, activations, logits")
    yield MinimumMemory(f"optimizer, {name}", known(figures.optimizer_peak_bytes), held, parts)
