"""Reduces the recording of a step's memory to figures: the timeline, its phases, and what held the memory."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from nsys_analyzer.analysis.memory_timeline import (
    MemoryEvent,
    PhaseMemory,
    Point,
    alive_after,
    largest,
    levels,
    phases_of,
    teeth,
    thinned,
)
from profiling_targets.cases import Figures
from profiling_targets.memory_recording import Recording, code_of

_POINTS, _GROUPS = 1_000, 12
#: A turn of the curve is one where it moves by this part of its height, as the eye sees it.
_TEETH = 10


def add_figures(recording: Recording, figures: Figures, layers: int | None) -> None:
    """Adds what a recording says.

    Args:
        recording: the recording of one step.
        figures: takes the figures.
        layers: of the model; None where nothing is kept for backward.

    """
    events, spans = recording.events, recording.spans
    points = levels(events, recording.base_bytes)
    phases = phases_of(events, spans, recording.base_bytes)
    figures["base_bytes"] = recording.base_bytes
    figures["step_peak_bytes"] = max(phase.peak_bytes for phase in phases)
    figures |= {f"{phase.name}_peak_bytes": phase.peak_bytes for phase in phases}
    figures |= _allocator(recording)
    figures["timeline_ms_bytes"] = [[round(ms, 4), level] for ms, level in thinned(points, _POINTS)]
    figures["phases"] = [_phase(phase, recording, points) for phase in phases]
    figures["largest"] = [{**asdict(one), "code": code_of(one.source)} for one in largest(events, spans, _GROUPS)]
    sizes = Counter(event.bytes for event in events if event.is_residual and event.bytes > 0)
    figures["residual_seen_bytes"] = sizes.most_common(1)[0][0] if sizes else None
    if layers:
        figures |= _kept(alive_after(event for event in events if event.ms <= spans[0].end_ms), layers)


def _allocator(recording: Recording) -> Figures:
    """What the allocator itself counted, the highest of all phases."""
    counted = recording.statistics.values()
    keys = next(iter(counted), {})
    return {key.replace("_bytes", "_peak_bytes"): max(one[key] for one in counted) for key in keys}


def _phase(phase: PhaseMemory, recording: Recording, points: Sequence[Point]) -> dict[str, Any]:
    """One phase: its memory, its teeth, and the calls to the device in it."""
    inside = [(phase.start_ms, phase.start_bytes)]
    inside += [point for point in points if phase.start_ms < point[0] <= phase.end_ms]
    calls = [call for call in recording.device_calls if phase.start_ms <= call.ms <= phase.end_ms]
    alive = [level for _, level in inside]
    found = teeth(inside, max((max(alive) - min(alive)) // _TEETH, 1))
    return {
        **asdict(phase),
        "counted_peak_bytes": recording.statistics.get(phase.name, {}).get("requested_bytes"),
        "teeth": found.count,
        "rise_bytes_per_ms": found.rise_bytes_per_ms,
        "fall_bytes_per_ms": found.fall_bytes_per_ms,
        "device_allocations": sum(call.bytes > 0 for call in calls),
        "device_frees": sum(call.bytes < 0 for call in calls),
        "device_calls_ms": sum(call.since_ms for call in calls),
    }


def _kept(alive: Sequence[MemoryEvent], layers: int) -> Figures:
    """What was made in forward and is alive at its end: all of it, and what one layer keeps, line by line."""
    inside = [event for event in alive if event.in_block]
    sizes, counts = Counter[str](), Counter(event.source for event in inside)
    for event in inside:
        sizes[event.source] += event.bytes
    return {
        "kept_bytes": sum(event.bytes for event in alive),
        "layer_saves_bytes": sum(sizes.values()) / layers,
        "layer_saves": [
            {"source": source, "code": code_of(source), "tensors": counts[source] / layers, "bytes": size / layers}
            for source, size in sizes.most_common()
        ],
    }
