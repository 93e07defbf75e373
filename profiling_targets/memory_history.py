"""Records each allocation of one training step on a GPU: memory over time, peaks, and the activations of a layer.

The figures come from the history of PyTorch's caching allocator. For each allocation, it contains the line of
``transformer.py`` that requested the memory.
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
from profiling_targets.harness import NotHereError, Phases, main, make_config, run_step_ns
from profiling_targets.transformer import Block, Training

_BLOCK_FORWARD_CODE: CodeType = Block.forward.__code__
_MODEL_FILE = _BLOCK_FORWARD_CODE.co_filename
_BLOCK_LINES = frozenset(line for _, _, line in _BLOCK_FORWARD_CODE.co_lines() if line)
_MAX_HISTORY_ENTRIES = 1_000_000
_SIGN_OF_ACTION = {"alloc": 1, "free_requested": -1}
_TIMELINE_POINTS = 1_000


@dataclass(frozen=True)
class MemoryEvent:
    """The allocation or the release of a tensor's memory.

    Attributes:
        ms: the time since the step began.
        bytes: the size, negative for a release.
        address: the address of the memory, by which a release is matched with its allocation.
        line: the line of ``transformer.py`` that requested the memory, or 0 if another file did.
        function: the name of the function that contains this line.
        in_block: whether a layer of the model called this function.
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
    """Warms up, records the memory of one more step, and fills in the figures."""
    if case.device == "cpu":
        raise NotHereError("Only the allocator of a GPU keeps a history of memory")
    phases = Training(make_config(case)).phases()
    for _ in range(case.warmup_steps):
        run_step_ns(phases, case.device)
    events, spans, base_bytes = record(phases)
    figures.reserved_peak_bytes = torch.cuda.max_memory_reserved()
    fill_figures(events, spans, base_bytes, figures, case.size.num_layers if case.mode == "train" else None)


def record(phases: Phases) -> tuple[list[MemoryEvent], list[Span], int]:
    """Records the memory of one step. The phases must have run before, so that one-time work is not recorded.

    Returns:
        The memory events of the step, its phases, and the bytes that were allocated before it.
    """
    spans, start_ns = [], time.time_ns()
    torch.cuda.memory._record_memory_history("all", context="alloc", stacks="python", max_entries=_MAX_HISTORY_ENTRIES)
    try:
        base_bytes = torch.cuda.memory_stats()["requested_bytes.all.current"]
        for name, phase in phases.items():
            start = time.time_ns()
            phase()
            torch.cuda.synchronize()
            spans.append(Span(name, (start - start_ns) / NS_PER_MS, (time.time_ns() - start_ns) / NS_PER_MS))
        trace = torch.cuda.memory._snapshot()["device_traces"][torch.cuda.current_device()]
    finally:
        torch.cuda.memory._record_memory_history(enabled=None)
    return tensor_events(trace, start_ns), spans, base_bytes


def tensor_events(trace: Sequence[dict[str, Any]], began_ns: int) -> list[MemoryEvent]:
    """Returns the allocations and releases of tensors in the trace of one device.

    Args:
        trace: the entries of the allocator's history, whose ``time_us`` is Unix time.
        began_ns: the Unix time of the step's start in ns.
    """
    events = []
    for entry in trace:
        if sign := _SIGN_OF_ACTION.get(entry["action"]):
            ms = entry["time_us"] / US_PER_MS - began_ns / NS_PER_MS
            frames = [frame for frame in entry.get("frames", ()) if frame["filename"] == _MODEL_FILE]  # innermost first
            line, function = (frames[0]["line"], frames[0]["name"]) if frames else (0, "")
            in_block = any(
                frame["name"] == _BLOCK_FORWARD_CODE.co_name and frame["line"] in _BLOCK_LINES for frame in frames
            )
            events.append(MemoryEvent(ms, sign * entry["size"], entry["addr"], line, function, in_block))
    return events


def fill_figures(
    events: Sequence[MemoryEvent], spans: Sequence[Span], base_bytes: int, figures: MemoryFigures, layers: int | None
) -> None:
    """Fills in the figures of a recorded step.

    Args:
        events, spans, base_bytes: what :func:`record` returned.
        figures: the figures to fill in.
        layers: the number of layers of the model, or None if nothing is saved for backward.
    """
    allocated_bytes = accumulate((event.bytes for event in events), initial=base_bytes)
    levels = list(zip([0.0, *(event.ms for event in events)], allocated_bytes, strict=True))
    figures.base_bytes, figures.phases = base_bytes, measure_phases(levels, spans)
    figures.step_peak_bytes = max(phase.peak_bytes for phase in figures.phases)
    figures.timeline_ms_bytes = [(round(ms, 4), level) for ms, level in thin_points(levels, _TIMELINE_POINTS)]
    if not layers:
        return
    activations = find_unreleased_allocations(event for event in events if event.ms <= spans[0].end_ms)
    activations_in_block = [event for event in activations if event.in_block]
    bytes_by_line, counts = (
        Counter[tuple[int, str]](),
        Counter((event.line, event.function) for event in activations_in_block),
    )
    for event in activations_in_block:
        bytes_by_line[event.line, event.function] += event.bytes
    figures.kept_bytes = sum(event.bytes for event in activations)
    figures.layer_saves_bytes = sum(bytes_by_line.values()) / layers
    figures.layer_saves = [
        SavedLine(
            f"{Path(_MODEL_FILE).name}:{line} {function}", linecache.getline(_MODEL_FILE, line).strip(),
            counts[line, function] / layers, size / layers,
        )
        for (line, function), size in bytes_by_line.most_common()
    ]  # fmt: skip


def measure_phases(levels: Sequence[Point], phases: Sequence[Span]) -> list[PhaseFigures]:
    """Returns the memory of each phase. An event between two phases counts for the earlier phase."""
    first_points = [0, *(bisect_right(levels, phase.start_ms, key=lambda point: point[0]) for phase in phases[1:])]
    end_points = [*first_points[1:], len(levels)]
    figures = []
    for phase, first_point, end in zip(phases, first_points, end_points, strict=True):
        levels_in_phase = [
            level for _, level in levels[max(first_point - 1, 0) : end]
        ]  # also the level when the phase starts
        figures.append(PhaseFigures(phase.name, phase.start_ms, phase.end_ms, levels_in_phase[0], max(levels_in_phase)))
    return figures


def find_unreleased_allocations(events: Iterable[MemoryEvent]) -> list[MemoryEvent]:
    """Returns the allocations that no later event releases, in the order of the events."""
    event_of_address: dict[int, MemoryEvent] = {}
    for event in events:
        event_of_address.pop(event.address, None)
        if event.bytes > 0:
            event_of_address[event.address] = event
    return list(event_of_address.values())


def thin_points(points: Sequence[Point], limit: int) -> list[Point]:
    """Returns at most ``limit`` points of a curve: the highest of each group of consecutive points."""
    size = -(-len(points) // limit)
    return [max(points[first : first + size], key=lambda point: point[1]) for first in range(0, len(points), size)]


if __name__ == "__main__":
    main(TARGET, measure)
