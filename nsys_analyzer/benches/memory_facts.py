"""Facts of the memory bench's rows: names, phases, limits, contradictions, and claims on hardware limits."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from nsys_analyzer.analysis.flops import backward_flops, forward_flops
from nsys_analyzer.analysis.memory_timeline import Point, limited_by, paces
from nsys_analyzer.analysis.models import ModelSize, find_model
from nsys_analyzer.benches.model import Results, Row
from nsys_analyzer.benches.physics import Rate, Residence
from nsys_analyzer.report.units import format_number, milliseconds
from nsys_analyzer.text import strong

#: The phases whose slopes are looked at; the loss is too short for one, and the optimizer keeps nothing.
SLOPED = ("forward", "backward")
#: How far two counts of the same bytes may lie apart, and two peaks that pass for equal.
_TOLERANCE = 0.001
_TIGHTEST = 6
_FLOPS = {"forward": forward_flops, "backward": backward_flops}

Phase = Mapping[str, Any]
"""A phase of a row, as its target wrote it."""


def size_of(row: Row) -> ModelSize:
    """The model that a row ran."""
    model = find_model(row.case["model"])
    return replace(model, num_layers=row.case["num_layers"] or model.num_layers)


def run_name(row: Row) -> str:
    """What a row is called: ``small 256 train fp32``; ``small-L2`` where it has two layers in place of its own."""
    case = row.case
    cut = f"-L{case['num_layers']}" if case["num_layers"] else ""
    return f"{case['model']}{cut} {case['context_length']} {case['mode']} {case['precision']}"


def trained(row: Row) -> bool:
    """Whether it is a full step."""
    return bool(row.case["mode"] == "train")


def phases_of(row: Row) -> list[Phase]:
    """The phases of a row, none where it ended before they were recorded."""
    return list(row.figures.get("phases", ()))


def sloped(results: Results) -> Iterator[tuple[Row, Phase]]:
    """Each forward and backward phase, with its row."""
    return ((row, phase) for row in results.rows if row.ok for phase in phases_of(row) if phase["name"] in SLOPED)


def limit_of(row: Row, phase: Phase) -> str:
    """Whom a phase waits for."""
    return limited_by(phase["wall_ms"], phase["issue_ms"], phase["allocator_ms"], row.case["device"] == "cuda")


def course(row: Row, phase: Phase) -> list[Point]:
    """The curve of a phase from its start to its last event, of backward from where the old gradients are freed."""
    start_ms, end_ms = phase["start_ms"], phase["end_ms"]
    points = [(start_ms, int(phase["start_bytes"]))]
    points += [(ms, level) for ms, level in row.figures["timeline_ms_bytes"] if start_ms < ms <= end_ms]
    if phase["name"] != "backward":
        return points
    # Gradients have the size of the parameters; they go at once, which is no slope.
    freed = phase["start_bytes"] - row.figures["parameter_bytes"]
    begin = next((index for index, (_, level) in enumerate(points) if level <= freed), 0)
    return points[begin:]


def paces_of(row: Row, phase: Phase) -> tuple[float | None, float | None, float | None]:
    """Bytes per second in which memory changes: in the first third of a phase's course, in the last, over its wall."""
    points = course(row, phase)
    first, last = paces(points) or (None, None)
    over_wall = (points[-1][1] - points[0][1]) / phase["wall_ms"]
    return first and first * 1e3, last and last * 1e3, over_wall * 1e3


def place_of_peak(row: Row) -> str:
    """Where memory is highest, for a sentence: a phase, or a border where the phases beside it are equally high."""
    phases = phases_of(row)
    top = max(int(phase["peak_bytes"]) for phase in phases)
    tied = [phase for phase in phases if phase["peak_bytes"] >= top * (1 - _TOLERANCE)]
    # A phase that is never higher than where it starts has its peak from the phase before.
    own = [str(phase["name"]) for phase in tied if phase["peak_bytes"] > phase["start_bytes"] * (1 + _TOLERANCE)]
    if len(own) < 2:
        return f"in its {(own or [tied[0]['name']])[0]}"
    if tied[-1]["name"] == "backward":
        return f"where {own[0]} ends and backward begins"
    return f"equally in its {' and '.join(own)}"


def _times(count: int) -> str:
    return "once" if count == 1 else f"{count:,} times"


def flags(results: Results) -> tuple[str, ...]:
    """What should not be: calls to the driver in a warm step, and counts of the same bytes that differ."""
    lines = [line for row in results.rows if row.ok for line in _row_flags(row)]
    lines += [
        f"{strong('cudaMalloc while measuring')}: {one.title} allocates {_times(memory.allocations)} in its measured "
        "steps."
        for one in results.captures
        if (memory := one.device_memory) and not memory.of_tensors and memory.allocations
    ]
    return tuple(lines)


def _row_flags(row: Row) -> Iterator[str]:
    figures, phases = row.figures, phases_of(row)
    calls = sum(phase["device_allocations"] + phase["device_frees"] for phase in phases)
    if calls:
        took = milliseconds(sum(phase["device_calls_ms"] for phase in phases))
        yield (
            f"{strong('cudaMalloc in the recorded step')}: {run_name(row)} calls the driver {_times(calls)}, in {took} "
            "at most. Its allocator's cache had not settled, which takes some steps, anew after it was emptied to time "
            "a step without it."
        )
    for one in phases:
        yield from _differ(row, f"peak of {one['name']}", one["peak_bytes"], one["counted_peak_bytes"], "allocator")
    yield from _differ(row, "residual stream", figures["residual_seen_bytes"], figures["residual_bytes"], "shape")
    if trained(row):
        kept, expected = figures["layer_saves_bytes"], figures["layer_saves_by_shapes_bytes"]
        yield from _differ(row, "memory that a layer keeps", kept, expected, "shapes")


def _differ(row: Row, what: str, seen: float | None, expected: float | None, source: str) -> Iterator[str]:
    if seen and expected and abs(seen / expected - 1) > _TOLERANCE:
        sizes = f"{format_number(seen, 'bytes')} recorded, {format_number(expected, 'bytes')} by its {source}"
        yield f"{strong('Two counts differ')}: {run_name(row)}, {what}: {sizes}."


def rates(results: Results) -> list[Rate]:
    """FLOPs of the products, and bytes: what the allocator hands out is written once at least."""
    return [
        Rate(
            f"{phase['name']}, {run_name(row)}",
            str(row.case["precision"]),
            _FLOPS[phase["name"]](size_of(row), row.case["batch_size"], row.case["context_length"]),
            phase["allocated_bytes"],
            phase["wall_ms"],
            phase["peak_bytes"] - phase["start_bytes"],
        )
        for row, phase in sloped(results)
    ]


def residences(results: Results) -> list[Residence]:
    """What must live in each phase, of those phases the ones that leave least room beside it."""
    found = [one for row in results.rows if row.ok for one in _residences(row)]
    return sorted(found, key=lambda one: one.measured_bytes / one.must_live_bytes)[:_TIGHTEST]


def _residences(row: Row) -> Iterator[Residence]:
    figures, name = row.figures, run_name(row)
    parameters, logits = figures["parameter_bytes"], figures["logits_bytes"]
    if not trained(row):
        yield Residence(name, figures["forward_peak_bytes"], parameters + logits, "weights, logits")
        return
    # Gradients have the size of the parameters, and live until the next backward begins.
    held = 2 * parameters + figures["moment_bytes"]
    kept = figures["layer_saves_by_shapes_bytes"] * size_of(row).num_layers
    what = "weights, gradients, moments"
    yield Residence(f"forward, {name}", figures["forward_peak_bytes"], held + kept + logits, f"{what}, kept, logits")
    yield Residence(f"optimizer, {name}", figures["optimizer_peak_bytes"], held, what)
