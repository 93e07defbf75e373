"""Records the memory of one step of a transformer, event by event: levels, peaks, and what held the memory.

``python -m profiling_targets.memory_history --model small --snapshot memory.pickle`` prints the figures; on a GPU the
snapshot is for the viewer at pytorch.org/memory_viz. The transformer is that of ``transformer.py``.
"""

from __future__ import annotations

import os
import statistics
import sys
import time
from bisect import bisect_right
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import accumulate, pairwise
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pandas as pd
import torch
from torch import Tensor

from nsys_analyzer.analysis.transformer.costs import layer_saved_bytes, residual_bytes
from nsys_analyzer.capture.jobs import FOLDER
from nsys_analyzer.experiments.memory import (
    TARGET,
    Holder,
    MemoryCase,
    MemoryFigures,
    PhaseFigures,
    Point,
    SavedLine,
)
from profiling_targets.harness import Phases, config_of, main, step_ns, synchronize
from profiling_targets.memory_recording import MemoryEvent, Recording, Span, code_of, record_on_cpu, record_on_gpu
from profiling_targets.transformer import Training

_CALLS, _ROUNDS = 1_000, 5
_FP32 = 4


def measure(case: MemoryCase, figures: MemoryFigures) -> None:
    """Times the phases, then records the memory of one more step and reduces it to figures."""
    size, shape = case.size, (case.batch_size, case.context_length)
    figures.parameter_bytes = _FP32 * size.parameters
    figures.logits_bytes = _FP32 // (2 if case.precision == "bf16" else 1) * shape[0] * shape[1] * size.vocab_size
    figures.residual_bytes = residual_bytes(size, *shape)
    if case.trains:
        by_shapes = layer_saved_bytes(size, *shape, case.precision, case.device == "cuda")
        figures.layer_saves_by_shapes_bytes = by_shapes
    training = Training(config_of(case))
    phases = training.phases()
    for _ in range(case.warmup_steps):
        step_ns(phases, case.device)
    figures.moment_bytes = sum(moment.untyped_storage().nbytes() for moment in training.states())
    times = _times_ms(phases, case.device, case.steps)
    figures.step_ms = sum(wall for wall, _ in times.values())
    figures.cached_call_us = _cached_call_us(case)
    recording = _recorded(case, training)
    add_figures(recording, figures, times, figures.cached_call_us, size.num_layers if case.trains else None)
    if case.device == "cuda":
        # The last of all: an empty cache takes some steps to settle again, which no other figure may see.
        _add_cold(phases, figures)


def _times_ms(phases: Phases, device: str, steps: int) -> dict[str, tuple[float, float]]:
    """Returns each phase's median time to its synchronized end, and to the moment when all its work was issued."""
    times: dict[str, list[tuple[float, float]]] = {name: [] for name in phases}
    for _ in range(steps):
        for name, phase in phases.items():
            before = time.perf_counter_ns()
            phase()
            issued = time.perf_counter_ns()
            synchronize(device)
            times[name].append(((time.perf_counter_ns() - before) / 1e6, (issued - before) / 1e6))
    medians = {name: [statistics.median(part) for part in zip(*pairs, strict=True)] for name, pairs in times.items()}
    return {name: (wall, issue) for name, (wall, issue) in medians.items()}


def _add_cold(phases: Phases, figures: MemoryFigures) -> None:
    """Adds the times of a step whose allocator has nothing in its cache, and its calls to the device."""
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    before = torch.cuda.memory_stats()["segment.all.allocated"]
    cold_ms = {name: ns / 1e6 for name, ns in step_ns(phases, "cuda").items()}
    figures.cold_device_calls = torch.cuda.memory_stats()["segment.all.allocated"] - before
    figures.cold_step_ms = cold_ms["step"]
    figures.phases = [replace(phase, cold_ms=cold_ms[phase.name]) for phase in figures.phases or []]


def _cached_call_us(case: MemoryCase) -> float:
    """Times how the allocator hands out a residual stream and takes it back, the call from Python included."""
    shape = (case.batch_size, case.context_length, case.size.d_model)
    rounds = []
    for _ in range(_ROUNDS):
        before = time.perf_counter_ns()
        for _ in range(_CALLS):
            torch.empty(shape, device=case.device)
        rounds.append((time.perf_counter_ns() - before) / _CALLS / 1e3)
    return min(rounds)


def _living(training: Training) -> Iterator[Tensor]:
    """Yields all tensors that outlive a step."""
    yield from training.parameters
    yield from training.model.buffers()
    yield from (parameter.grad for parameter in training.parameters if parameter.grad is not None)
    yield from training.states()
    yield from (training.tokens, training.targets, training.logits, training.value)


_POINTS, _GROUPS = 1_000, 12
#: The curve turns where it moves by a tenth of its height, as the eye sees it.
_TURN = 10


def _recorded(case: MemoryCase, training: Training) -> Recording:
    """Records one more step; a snapshot's relative path begins in the bench's folder, or in the working directory."""
    if case.device == "cpu":
        return record_on_cpu(training.phases(), lambda: _living(training))
    path = Path(os.environ.get(FOLDER, "")) / case.snapshot if case.snapshot else None
    return record_on_gpu(training.phases(), path)


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
    figures.largest = [replace(holder, code=code_of(holder.source)) for holder in largest(events, spans, _GROUPS)]
    sizes = Counter(event.bytes for event in events if event.source.is_residual and event.bytes > 0)
    figures.residual_seen_bytes = sizes.most_common(1)[0][0] if sizes else None
    if layers:
        _add_saved(alive_after(event for event in events if event.ms <= spans[0].end_ms), layers, figures)


def _phase(
    phase: PhaseFigures, recording: Recording, points: Sequence[Point], wall_ms: float, issue_ms: float,
    cached_call_us: float,
) -> PhaseFigures:  # fmt: skip
    """Returns the figures of one phase: memory, the falls of its curve, the calls to the device in it, and times."""
    inside = [(phase.start_ms, phase.start_bytes)]
    inside += [point for point in points if phase.start_ms < point[0] <= phase.end_ms]
    calls = [call for call in recording.device_calls if phase.start_ms <= call.ms <= phase.end_ms]
    alive = [level for _, level in inside]
    found = sawtooth(inside, max((max(alive) - min(alive)) // _TURN, 1))
    device_calls_ms = sum(call.since_ms for call in calls)
    return replace(
        phase,
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
    inside = [event for event in alive if event.source.in_block]
    sizes, counts = Counter[str](), Counter(event.source.line for event in inside)
    for event in inside:
        sizes[event.source.line] += event.bytes
    figures.kept_bytes = sum(event.bytes for event in alive)
    figures.layer_saves_bytes = sum(sizes.values()) / layers
    figures.layer_saves = [
        SavedLine(source, code_of(source), counts[source] / layers, size / layers)
        for source, size in sizes.most_common()
    ]


class Sawtooth(NamedTuple):
    """Rises and falls of a curve: how often it turned down, and the slopes, in bytes per ms (None: it never did)."""

    falls: int
    rise_bytes_per_ms: float | None
    fall_bytes_per_ms: float | None


def levels(events: Sequence[MemoryEvent], base_bytes: int) -> list[Point]:
    """Returns the bytes alive after each event, of which ``base_bytes`` were there before the first."""
    alive = accumulate((event.bytes for event in events), initial=base_bytes)
    return list(zip([0.0, *(event.ms for event in events)], alive, strict=True))


def phases_of(events: Sequence[MemoryEvent], spans: Sequence[Span], base_bytes: int) -> list[PhaseFigures]:
    """Returns the memory of each phase; an event between two phases counts to the first of them."""
    found, before = [], base_bytes
    parts: list[list[MemoryEvent]] = [[] for _ in spans]
    for event in events:
        parts[_place(event, spans)].append(event)
    for span, inside in zip(spans, parts, strict=True):
        alive = list(accumulate((event.bytes for event in inside), initial=before))
        handed_out = [event.bytes for event in inside if event.bytes > 0]
        found.append(
            PhaseFigures(
                span.name, span.start_ms, span.end_ms, before, max(alive), alive[-1],
                len(handed_out), len(inside) - len(handed_out), sum(handed_out),
            )
        )  # fmt: skip
        before = alive[-1]
    return found


def _place(event: MemoryEvent, spans: Sequence[Span]) -> int:
    return max(bisect_right(spans, event.ms, key=lambda span: span.start_ms) - 1, 0)


def alive_after(events: Iterable[MemoryEvent]) -> list[MemoryEvent]:
    """Returns the allocations among some events, in order, that none of the later ones frees."""
    alive: dict[int, MemoryEvent] = {}
    for event in events:
        alive.pop(event.address, None)
        if event.bytes > 0:
            alive[event.address] = event
    return list(alive.values())


def up_to_peak(events: Sequence[MemoryEvent]) -> Sequence[MemoryEvent]:
    """Returns the events up to the one after which most memory is alive; none where that is the start."""
    alive = [level for _, level in levels(events, 0)]
    return events[: alive.index(max(alive))]


def largest(events: Sequence[MemoryEvent], spans: Sequence[Span], top: int) -> list[Holder]:
    """Returns the largest allocations, those of one line, phase and size together; ``top`` groups at most."""
    at_peak = Counter(_kind(event, spans) for event in alive_after(up_to_peak(events)))
    counted = Counter(_kind(event, spans) for event in events if event.bytes > 0)
    order = sorted(counted, key=lambda kind: (-kind[2], -counted[kind], kind))
    return [Holder(*kind, counted[kind], at_peak[kind]) for kind in order[:top]]


def _kind(event: MemoryEvent, spans: Sequence[Span]) -> tuple[str, str, int]:
    return event.source.line, spans[_place(event, spans)].name, event.bytes


def thinned(points: Sequence[Point], limit: int) -> list[Point]:
    """Returns at most ``limit`` points that draw the same curve: its ends, and the extremes of each stretch of time."""
    if len(points) <= limit:
        return list(points)
    inner = pd.DataFrame(points[1:-1], columns=["ms", "bytes"])
    edges = np.linspace(points[0][0], points[-1][0], (limit - 2) // 2 + 1)
    stretches = inner["bytes"].groupby(np.digitize(inner["ms"], edges[1:-1]))
    chosen = {*stretches.idxmin(), *stretches.idxmax()}
    return [points[0], *(points[index + 1] for index in sorted(chosen)), points[-1]]


def sawtooth(points: Sequence[Point], least_bytes: int) -> Sawtooth:
    """Returns the rises and falls of a curve between its turns, each of ``least_bytes`` or more.

    The slopes are all bytes of the rises over the time that they took, and the same of the falls.
    """
    turns = list(_turns(points, least_bytes))
    pairs = list(pairwise(turns))
    rises = [(one, other) for one, other in pairs if other[1] > one[1]]
    falls = [(one, other) for one, other in pairs if other[1] < one[1]]
    return Sawtooth(len(falls), _slope(rises), _slope(falls))


def _turns(points: Sequence[Point], least_bytes: int) -> Iterator[Point]:
    """Yields where a curve starts to rise or fall, where it turns by ``least_bytes`` or more, its last extreme."""
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


if __name__ == "__main__":
    sys.exit(main(TARGET, measure))
