"""The recorder of a step's memory, on entries of the allocator's history as PyTorch writes them."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from nsys_analyzer.errors import ConfigurationError
from nsys_analyzer.experiments.memory import TARGET, MemoryCase, MemoryFigures, Point
from nsys_analyzer.inputs.rows import to_json_values
from profiling_targets import transformer
from profiling_targets.harness import measure_case
from profiling_targets.memory_history import (
    MemoryEvent,
    Span,
    fill_figures,
    find_unreleased_allocations,
    measure,
    record,
    tensor_events,
    thin_points,
)
from profiling_targets.transformer import Block

SPANS = [Span("forward", 0.0, 4.0), Span("backward", 5.0, 9.0)]
#: Forward keeps 30 of 50, backward frees what was there before (100) and makes 20.
EVENTS = [
    MemoryEvent(1.0, 30, 0xA, 1, "f", True),
    MemoryEvent(2.0, 20, 0xB, 2, "f", True),
    MemoryEvent(3.0, -20, 0xB),
    MemoryEvent(6.0, 20, 0xB),
    MemoryEvent(7.0, -100, 0xC),
    MemoryEvent(8.0, -30, 0xA),
]


def figures_of(events: list[MemoryEvent], base_bytes: int, layers: int | None = None) -> MemoryFigures:
    figures = MemoryFigures()
    fill_figures(events, SPANS, base_bytes, figures, layers)
    return figures


def test_levels_begin_with_what_was_there() -> None:
    figures = figures_of(EVENTS, 100)
    assert figures.timeline_ms_bytes == [
        (0.0, 100), (1.0, 130), (2.0, 150), (3.0, 130), (6.0, 150), (7.0, 50), (8.0, 20),
    ]  # fmt: skip
    assert (figures.base_bytes, figures.step_peak_bytes) == (100, 150)


def measure_phases(events: list[MemoryEvent], base_bytes: int) -> list[tuple[int, int]]:
    """Bytes at the start of each phase, and its peak."""
    return [(phase.start_bytes, phase.peak_bytes) for phase in figures_of(events, base_bytes).phases or ()]


def test_each_phase_has_its_own_peak() -> None:
    assert measure_phases(EVENTS, 100) == [(100, 150), (130, 150)]
    assert measure_phases([MemoryEvent(6.0, -40, 0xA)], 100) == [(100, 100), (100, 100)]  # one without an allocation
    assert measure_phases([MemoryEvent(4.5, 10, 0xA)], 0) == [(0, 10), (10, 10)]  # between two it counts to the first


def test_what_is_alive_knows_an_address_that_was_used_again() -> None:
    assert [event.ms for event in find_unreleased_allocations(EVENTS[:3])] == [1.0]
    assert [event.ms for event in find_unreleased_allocations(EVENTS)] == [6.0]  # 0xB, handed out a second time


@given(st.lists(st.integers(0, 1000), min_size=1, max_size=300), st.integers(4, 40))
def test_thinning_keeps_the_peak(levels: list[int], limit: int) -> None:
    points: list[Point] = [(float(ms), level) for ms, level in enumerate(levels)]
    kept = thin_points(points, limit)
    assert len(kept) <= limit
    assert kept == sorted(set(kept) & set(points))
    assert max(level for _, level in kept) == max(levels)
    assert len(levels) > limit or kept == points


def test_a_case_that_cannot_run_here() -> None:
    row = measure_case(TARGET, MemoryCase(device="cpu"), measure)
    assert (row["status"], row["message"]) == ("unsupported", "Only the allocator of a GPU keeps a history of memory")
    with pytest.raises(ConfigurationError, match="at least 1"):
        MemoryCase(device="cuda", warmup_steps=0)


def _line(function: Callable[..., Any], code: str) -> int:
    """The line of the model's file with this code."""
    lines = Path(transformer.__file__).read_text(encoding="utf-8").splitlines()
    first = int(function.__code__.co_firstlineno)
    return next(number for number, line in enumerate(lines, 1) if code in line and number > first)


MODEL = Block.forward.__code__.co_filename
NORM, ADD = _line(transformer.RMSNorm.forward, "normalized_x = x32"), _line(Block.forward, "x = x + self.attention(")
IN_NORM = (MODEL, NORM, "forward")
IN_BLOCK = (MODEL, ADD, "forward")
FINAL = (MODEL, _line(transformer.Transformer.forward, "logits: Tensor"), "forward")
MODULE = (str(Path(torch.__file__).parent / "nn" / "modules" / "module.py"), 7, "_call_impl")


def _entry(action: str, us: float, size: int, address: int, *frames: tuple[str, int, str]) -> dict[str, Any]:
    """An entry of the allocator's history; those that were recorded without a stack have no frames at all."""
    entry: dict[str, Any] = {"action": action, "addr": address, "size": size, "stream": 0, "time_us": us}
    if frames:
        entry["frames"] = [{"filename": file, "line": line, "name": name} for file, line, name in frames]
    return entry


@pytest.mark.parametrize(
    ("frames", "line", "in_block"),
    [
        ([MODULE, IN_NORM, MODULE, IN_BLOCK, FINAL], NORM, True),
        ([IN_BLOCK, MODULE, FINAL], ADD, True),
        ([MODULE, IN_NORM, FINAL], NORM, False),  # the final norm is in no layer
        ([MODULE], 0, False),
    ],
)
def test_the_innermost_line_of_the_model_is_the_source(frames: list[Any], line: int, in_block: bool) -> None:
    (event,) = tensor_events([_entry("alloc", 1, 8, 0xA, *frames)], 0)
    assert (event.line, event.in_block) == (line, in_block)


def _history(began_us: int) -> list[dict[str, Any]]:
    """A cudaMalloc 300 µs after the event before it, a tensor that stays, and one that goes."""
    return [
        _entry("alloc", began_us + 100, 512, 0xA, MODULE, IN_NORM, MODULE, IN_BLOCK),
        _entry("segment_alloc", began_us + 400, 2 << 20, 0xF),
        _entry("alloc", began_us + 450, 1000, 0xB, IN_BLOCK),
        _entry("free_requested", began_us + 500, 512, 0xA),
        _entry("free_completed", began_us + 500, 512, 0xA),
        _entry("snapshot", began_us + 600, 0, 0),
    ]


def test_the_allocators_history_becomes_events() -> None:
    events = tensor_events(_history(5_000_000), 5_000_000_000)
    assert [(event.ms, event.bytes, event.address, event.in_block) for event in events] == [
        (pytest.approx(0.1), 512, 0xA, True),
        (pytest.approx(0.45), 1000, 0xB, True),
        (pytest.approx(0.5), -512, 0xA, False),
    ]


class _Memory:
    """Stands for ``torch.cuda``: a step that allocates as ``_history`` says."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.recording: list[Any] = []
        self.trace: list[dict[str, Any]] = []
        patch.setattr(torch.cuda.memory, "_record_memory_history", lambda enabled, **_: self.recording.append(enabled))
        patch.setattr(torch.cuda.memory, "_snapshot", lambda: {"device_traces": [self.trace]})
        patch.setattr(torch.cuda, "memory_stats", lambda: {"requested_bytes.all.current": 7})
        patch.setattr(torch.cuda, "synchronize", lambda: None)
        patch.setattr(torch.cuda, "current_device", lambda: 0)

    def work(self) -> None:
        self.trace = _history(time.time_ns() // 1000)
        time.sleep(0.01)


def test_recording_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    memory = _Memory(monkeypatch)
    events, spans, base_bytes = record({"forward": memory.work, "loss": lambda: None})
    assert memory.recording == ["all", None]  # the history ends where the step does
    assert [event.bytes for event in events] == [512, 1000, -512]
    assert [span.name for span in spans] == ["forward", "loss"]
    assert all(0 <= event.ms <= spans[0].end_ms for event in events)
    found = MemoryFigures()
    fill_figures(events, spans, base_bytes, found, layers=1)
    figures = to_json_values(found)
    assert figures["step_peak_bytes"] == 7 + 512 + 1000
    assert figures["layer_saves_bytes"] == figures["kept_bytes"] == 1000
    (line,) = figures["layer_saves"]
    assert (line["source"], line["tensors"]) == (f"transformer.py:{ADD} forward", 1)
    assert line["code"].startswith("x = x + self.attention(")


def test_the_history_ends_when_memory_runs_out(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails() -> None:
        raise torch.cuda.OutOfMemoryError("CUDA out of memory")

    memory = _Memory(monkeypatch)
    with pytest.raises(torch.cuda.OutOfMemoryError):
        record({"forward": fails})
    assert memory.recording == ["all", None]
