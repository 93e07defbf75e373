"""Records the memory of one step of a transformer on a GPU, event by event: levels, peaks, and what layers save.

The history of PyTorch's caching allocator tells it, with the line of the model that asked for each allocation. The
transformer is that of ``transformer.py``.
"""

from __future__ import annotations

import linecache
import time
from bisect import bisect_right
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from types import CodeType
from typing import Any

import torch

from nsys_analyzer.experiments.memory import TARGET, MemoryCase, MemoryFigures, PhaseFigures, Point, SavedLine
from nsys_analyzer.trace.schema import NS_PER_MS, US_PER_MS
from profiling_targets.harness import NotHereError, Phases, config_of, main, step_ns
from profiling_targets.transformer import Block, Training

_FORWARD: CodeType = Block.forward.__code__
_MODEL = _FORWARD.co_filename
_BLOCK_LINES = frozenset(line for _, _, line in _FORWARD.co_lines() if line)
_MOST_ENTRIES = 1_000_000
_TENSORS = {"alloc": 1, "free_requested": -1}
_POINTS = 1_000


@dataclass(frozen=True)
class MemoryEvent:
    """An allocation of a tensor's memory, or its free.

    Attributes:
        ms: when, since the step began.
        bytes: its size, negative for a free.
        address: the same in both events of one tensor.
        line: the line of the model that asked for it, 0 where none did.
        function: the name of the function that it stands in.
        in_block: whether a layer called that.
    """

    ms: float
    bytes: int
    address: int
    line: int = 0
    function: str = ""
    in_block: bool = False


@dataclass(frozen=True)
class Span:
    """A phase of the step, in ms since the step began."""

    name: str
    start_ms: float
    end_ms: float


def measure(case: MemoryCase, figures: MemoryFigures) -> None:
    """Warms up, then records the memory of one more step and reduces it to figures."""
    if case.device == "cpu":
        raise NotHereError("Only a GPU's allocator keeps a history of memory")
    phases = Training(config_of(case)).phases()
    for _ in range(case.warmup_steps):
        step_ns(phases, case.device)
    events, spans, base_bytes = record(phases)
    figures.reserved_peak_bytes = torch.cuda.max_memory_reserved()
    add_figures(events, spans, base_bytes, figures, case.size.num_layers if case.mode == "train" else None)


def record(phases: Phases) -> tuple[list[MemoryEvent], list[Span], int]:
    """Records one step of phases that have run before; its events, its phases, and the bytes alive before it."""
    spans, began = [], time.time_ns()
    torch.cuda.memory._record_memory_history("all", context="alloc", stacks="python", max_entries=_MOST_ENTRIES)
    try:
        base_bytes = torch.cuda.memory_stats()["requested_bytes.all.current"]
        for name, phase in phases.items():
            start = time.time_ns()
            phase()
            torch.cuda.synchronize()
            spans.append(Span(name, (start - began) / NS_PER_MS, (time.time_ns() - began) / NS_PER_MS))
        trace = torch.cuda.memory._snapshot()["device_traces"][torch.cuda.current_device()]
    finally:
        torch.cuda.memory._record_memory_history(enabled=None)
    return reduced(trace, began), spans, base_bytes


def reduced(trace: Sequence[dict[str, Any]], began_ns: int) -> list[MemoryEvent]:
    """Returns the tensors' events of the entries of one device's trace.

    Args:
        trace: the entries; ``time_us`` is Unix time.
        began_ns: the Unix time of the step's start.
    """
    events = []
    for entry in trace:
        if sign := _TENSORS.get(entry["action"]):
            ms = entry["time_us"] / US_PER_MS - began_ns / NS_PER_MS
            of_model = [frame for frame in entry.get("frames", ()) if frame["filename"] == _MODEL]  # innermost first
            line, function = (of_model[0]["line"], of_model[0]["name"]) if of_model else (0, "")
            in_block = any(frame["name"] == _FORWARD.co_name and frame["line"] in _BLOCK_LINES for frame in of_model)
            events.append(MemoryEvent(ms, sign * entry["size"], entry["addr"], line, function, in_block))
    return events


def add_figures(
    events: Sequence[MemoryEvent], spans: Sequence[Span], base_bytes: int, figures: MemoryFigures, layers: int | None
) -> None:
    """Adds the figures of a recorded step.

    Args:
        events, spans, base_bytes: of the step.
        figures: where they are added.
        layers: of the model; None where nothing is saved for backward.
    """
    alive = accumulate((event.bytes for event in events), initial=base_bytes)
    levels = list(zip([0.0, *(event.ms for event in events)], alive, strict=True))
    figures.base_bytes, figures.phases = base_bytes, phases_of(levels, spans)
    figures.step_peak_bytes = max(phase.peak_bytes for phase in figures.phases)
    figures.timeline_ms_bytes = [(round(ms, 4), level) for ms, level in thinned(levels, _POINTS)]
    if not layers:
        return
    kept = alive_after(event for event in events if event.ms <= spans[0].end_ms)
    inside = [event for event in kept if event.in_block]
    sizes, counts = Counter[tuple[int, str]](), Counter((event.line, event.function) for event in inside)
    for event in inside:
        sizes[event.line, event.function] += event.bytes
    figures.kept_bytes = sum(event.bytes for event in kept)
    figures.layer_saves_bytes = sum(sizes.values()) / layers
    figures.layer_saves = [
        SavedLine(
            f"{Path(_MODEL).name}:{line} {function}", linecache.getline(_MODEL, line).strip(),
            counts[line, function] / layers, size / layers,
        )
        for (line, function), size in sizes.most_common()
    ]  # fmt: skip


def phases_of(levels: Sequence[Point], spans: Sequence[Span]) -> list[PhaseFigures]:
    """Returns the memory of each phase; an event between two phases counts to the first of them."""
    firsts = [0, *(bisect_right(levels, span.start_ms, key=lambda point: point[0]) for span in spans[1:])]
    ends = [*firsts[1:], len(levels)]
    found = []
    for span, first, end in zip(spans, firsts, ends, strict=True):
        inside = [level for _, level in levels[max(first - 1, 0) : end]]  # from the level at its start on
        found.append(PhaseFigures(span.name, span.start_ms, span.end_ms, inside[0], max(inside)))
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
    """Returns at most some ``limit`` points that draw nearly the same curve: the highest of each stretch of events."""
    size = -(-len(points) // limit)
    return [max(points[first : first + size], key=lambda point: point[1]) for first in range(0, len(points), size)]


if __name__ == "__main__":
    main(TARGET, measure)
