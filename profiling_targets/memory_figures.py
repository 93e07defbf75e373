"""Reduces the recording of a step's memory to figures: the timeline, its phases, and what held the memory."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace

from nsys_analyzer.experiments.memory import MemoryFigures, PhaseFigures, PhaseMemory, Point, SavedLine
from profiling_targets.memory_recording import Recording, code_of
from profiling_targets.memory_timeline import (
    MemoryEvent,
    alive_after,
    largest,
    levels,
    phases_of,
    sawtooth,
    thinned,
)

_POINTS, _GROUPS = 1_000, 12
#: The curve turns where it moves by a tenth of its height, as the eye sees it.
_TURN = 10


def add_figures(
    recording: Recording, figures: MemoryFigures, times: Mapping[str, tuple[float, float]], cached_call_us: float,
    layers: int | None,
) -> None:  # fmt: skip
    """Adds the figures of a recording.

    Args:
        recording: of one step.
        figures: where they are added.
        times: of each phase ms to its synchronized end, and until all its work was issued, without a recorder.
        cached_call_us: the time of one allocation and free.
        layers: of the model; None where nothing is saved for backward.

    """
    events, spans = recording.events, recording.spans
    points = levels(events, recording.base_bytes)
    phases = phases_of(events, spans, recording.base_bytes)
    figures.base_bytes = recording.base_bytes
    figures.step_peak_bytes = max(phase.peak_bytes for phase in phases)
    for phase in phases:
        setattr(figures, f"{phase.name}_peak_bytes", phase.peak_bytes)
    for counted in recording.statistics.values():  # by the allocator itself, the highest of all phases
        for key, value in counted.items():
            name = key.replace("_bytes", "_peak_bytes")
            setattr(figures, name, max(value, getattr(figures, name) or 0))
    figures.timeline_ms_bytes = [(round(ms, 4), level) for ms, level in thinned(points, _POINTS)]
    figures.phases = [_phase(phase, recording, points, *times[phase.name], cached_call_us) for phase in phases]
    figures.largest = [replace(one, code=code_of(one.source)) for one in largest(events, spans, _GROUPS)]
    sizes = Counter(event.bytes for event in events if event.is_residual and event.bytes > 0)
    figures.residual_seen_bytes = sizes.most_common(1)[0][0] if sizes else None
    if layers:
        _add_saved(alive_after(event for event in events if event.ms <= spans[0].end_ms), layers, figures)


def _phase(
    phase: PhaseMemory, recording: Recording, points: Sequence[Point], wall_ms: float, issue_ms: float,
    cached_call_us: float,
) -> PhaseFigures:  # fmt: skip
    """One phase: its memory, the falls of its curve, the calls to the device in it, and its times."""
    inside = [(phase.start_ms, phase.start_bytes)]
    inside += [point for point in points if phase.start_ms < point[0] <= phase.end_ms]
    calls = [call for call in recording.device_calls if phase.start_ms <= call.ms <= phase.end_ms]
    alive = [level for _, level in inside]
    found = sawtooth(inside, max((max(alive) - min(alive)) // _TURN, 1))
    device_calls_ms = sum(call.since_ms for call in calls)
    return PhaseFigures(
        **vars(phase),
        counted_peak_bytes=recording.statistics.get(phase.name, {}).get("requested_bytes"),
        teeth=found.falls,
        rise_bytes_per_ms=found.rise_bytes_per_ms,
        fall_bytes_per_ms=found.fall_bytes_per_ms,
        device_allocations=sum(call.bytes > 0 for call in calls),
        device_frees=sum(call.bytes < 0 for call in calls),
        device_calls_ms=device_calls_ms,
        wall_ms=wall_ms,
        issue_ms=issue_ms,
        allocator_ms=phase.allocations * cached_call_us / 1e3 + device_calls_ms,
    )


def _add_saved(alive: Sequence[MemoryEvent], layers: int, figures: MemoryFigures) -> None:
    """Adds the memory allocated in forward and alive at its end: all of it, and that of one layer, line by line."""
    inside = [event for event in alive if event.in_block]
    sizes, counts = Counter[str](), Counter(event.source for event in inside)
    for event in inside:
        sizes[event.source] += event.bytes
    figures.kept_bytes = sum(event.bytes for event in alive)
    figures.layer_saves_bytes = sum(sizes.values()) / layers
    figures.layer_saves = [
        SavedLine(source, code_of(source), counts[source] / layers, size / layers)
        for source, size in sizes.most_common()
    ]
