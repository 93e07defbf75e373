"""Records the memory of one step of a transformer, event by event: levels, peaks, and what layers save.

``python -m profiling_targets.memory_history --model small --snapshot memory.pickle`` prints the figures; on a GPU the
snapshot is for the viewer at pytorch.org/memory_viz. The transformer is that of ``transformer.py``.
"""

from __future__ import annotations

import os
import statistics
import sys
from bisect import bisect_right
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import accumulate
from pathlib import Path

import numpy as np
import pandas as pd
from torch import Tensor

from nsys_analyzer.analysis.transformer.costs import layer_saved_bytes, residual_bytes
from nsys_analyzer.capture.jobs import FOLDER
from nsys_analyzer.experiments.memory import TARGET, MemoryCase, MemoryFigures, PhaseFigures, Point, SavedLine
from profiling_targets.harness import Phases, config_of, main, step_ns
from profiling_targets.memory_recording import MemoryEvent, Recording, Span, code_of, record_on_cpu, record_on_gpu
from profiling_targets.transformer import Training

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
    figures.step_ms = sum(times.values())
    add_figures(_recorded(case, training), figures, times, size.num_layers if case.trains else None)


def _times_ms(phases: Phases, device: str, steps: int) -> dict[str, float]:
    """Returns each phase's median time to its synchronized end."""
    measured = [step_ns(phases, device) for _ in range(steps)]
    return {name: statistics.median(step[name] for step in measured) / 1e6 for name in phases}


def _living(training: Training) -> Iterator[Tensor]:
    """Yields all tensors that outlive a step."""
    yield from training.parameters
    yield from training.model.buffers()
    yield from (parameter.grad for parameter in training.parameters if parameter.grad is not None)
    yield from training.states()
    yield from (training.tokens, training.targets, training.logits, training.value)


_POINTS = 1_000


def _recorded(case: MemoryCase, training: Training) -> Recording:
    """Records one more step; a snapshot's relative path begins in the bench's folder, or in the working directory."""
    if case.device == "cpu":
        return record_on_cpu(training.phases(), lambda: _living(training))
    path = Path(os.environ.get(FOLDER, "")) / case.snapshot if case.snapshot else None
    return record_on_gpu(training.phases(), path)


def add_figures(recording: Recording, figures: MemoryFigures, times: Mapping[str, float], layers: int | None) -> None:
    """Adds the figures of a recording.

    Args:
        recording: of one step.
        figures: where they are added.
        times: of each phase ms to its synchronized end, without a recorder.
        layers: of the model; None where nothing is saved for backward.
    """
    events, spans = recording.events, recording.spans
    figures.base_bytes = recording.base_bytes
    figures.phases = phases_of(events, spans, recording.base_bytes, times)
    figures.step_peak_bytes = max(phase.peak_bytes for phase in figures.phases)
    for phase in figures.phases:
        setattr(figures, f"{phase.name}_peak_bytes", phase.peak_bytes)
    for counted in recording.statistics.values():  # by the allocator itself, the highest of all phases
        for key, value in counted.items():
            name = key.replace("_bytes", "_peak_bytes")
            setattr(figures, name, max(value, getattr(figures, name) or 0))
    points = thinned(levels(events, recording.base_bytes), _POINTS)
    figures.timeline_ms_bytes = [(round(ms, 4), level) for ms, level in points]
    if layers:
        _add_saved(alive_after(event for event in events if event.ms <= spans[0].end_ms), layers, figures)


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


def levels(events: Sequence[MemoryEvent], base_bytes: int) -> list[Point]:
    """Returns the bytes alive after each event, of which ``base_bytes`` were there before the first."""
    alive = accumulate((event.bytes for event in events), initial=base_bytes)
    return list(zip([0.0, *(event.ms for event in events)], alive, strict=True))


def phases_of(
    events: Sequence[MemoryEvent], spans: Sequence[Span], base_bytes: int, times: Mapping[str, float]
) -> list[PhaseFigures]:
    """Returns the memory of each phase; an event between two phases counts to the first of them."""
    found, before = [], base_bytes
    parts: list[list[MemoryEvent]] = [[] for _ in spans]
    for event in events:
        parts[max(bisect_right(spans, event.ms, key=lambda span: span.start_ms) - 1, 0)].append(event)
    for span, inside in zip(spans, parts, strict=True):
        alive = list(accumulate((event.bytes for event in inside), initial=before))
        handed_out = [event.bytes for event in inside if event.bytes > 0]
        found.append(
            PhaseFigures(
                span.name, span.start_ms, span.end_ms, before, max(alive), alive[-1],
                len(handed_out), len(inside) - len(handed_out), sum(handed_out), times[span.name],
            )
        )  # fmt: skip
        before = alive[-1]
    return found


def alive_after(events: Iterable[MemoryEvent]) -> list[MemoryEvent]:
    """Returns the allocations among some events, in order, that none of the later ones frees."""
    alive: dict[int, MemoryEvent] = {}
    for event in events:
        alive.pop(event.address, None)
        if event.bytes > 0:
            alive[event.address] = event
    return list(alive.values())


def thinned(points: Sequence[Point], limit: int) -> list[Point]:
    """Returns at most ``limit`` points that draw the same curve: its ends, and the extremes of each stretch of time."""
    if len(points) <= limit:
        return list(points)
    inner = pd.DataFrame(points[1:-1], columns=["ms", "bytes"])
    edges = np.linspace(points[0][0], points[-1][0], (limit - 2) // 2 + 1)
    stretches = inner["bytes"].groupby(np.digitize(inner["ms"], edges[1:-1]))
    chosen = {*stretches.idxmin(), *stretches.idxmax()}
    return [points[0], *(points[index + 1] for index in sorted(chosen)), points[-1]]


if __name__ == "__main__":
    sys.exit(main(TARGET, measure))
