"""Memory over a step as pure functions: every expectation's arithmetic stands beside it."""

from __future__ import annotations

import sqlite3
from collections.abc import Callable
from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from nsys_analyzer.analysis.summary.summarize import summarize
from nsys_analyzer.analysis.transformer.costs import layer_saved_bytes, residual_bytes
from nsys_analyzer.analysis.transformer.models import ModelSize
from nsys_analyzer.experiments.memory import Point
from nsys_analyzer.trace.trace import Trace
from profiling_targets.memory_history import alive_after, levels, phases_of, thinned
from profiling_targets.memory_recording import MemoryEvent, Source, Span
from tests.support.export import Export, global_pid, training_step

TIMES = {"forward": 1.0, "backward": 2.0}
SPANS = [Span("forward", 0.0, 4.0), Span("backward", 5.0, 9.0)]
#: Forward keeps 30 of 50, backward frees what was there before (100) and makes 20.
EVENTS = [
    MemoryEvent(1.0, 30, 0xA, Source("model.py:1 f")),
    MemoryEvent(2.0, 20, 0xB, Source("model.py:2 f")),
    MemoryEvent(3.0, -20, 0xB),
    MemoryEvent(6.0, 20, 0xB),
    MemoryEvent(7.0, -100, 0xC),
    MemoryEvent(8.0, -30, 0xA),
]


def test_levels_begin_with_what_was_there() -> None:
    assert levels(EVENTS, 100) == [
        (0.0, 100), (1.0, 130), (2.0, 150), (3.0, 130), (6.0, 150), (7.0, 50), (8.0, 20),
    ]  # fmt: skip


def test_each_phase_has_its_own_peak() -> None:
    forward, backward = phases_of(EVENTS, SPANS, 100, TIMES)
    assert (forward.start_bytes, forward.peak_bytes, forward.end_bytes) == (100, 150, 130)
    assert (forward.allocations, forward.frees, forward.allocated_bytes) == (2, 1, 50)
    assert (backward.start_bytes, backward.peak_bytes, backward.end_bytes) == (130, 150, 20)
    assert (backward.allocations, backward.frees, backward.allocated_bytes) == (1, 2, 20)


def test_a_phase_without_an_allocation_peaks_at_its_start() -> None:
    forward, backward = phases_of([MemoryEvent(6.0, -40, 0xA)], SPANS, 100, TIMES)
    assert (forward.peak_bytes, backward.peak_bytes, backward.end_bytes) == (100, 100, 60)


def test_an_event_between_phases_counts_to_the_first() -> None:
    forward, backward = phases_of([MemoryEvent(4.5, 10, 0xA)], SPANS, 0, TIMES)
    assert (forward.end_bytes, backward.start_bytes, backward.allocations) == (10, 10, 0)


def test_what_is_alive_knows_an_address_that_was_used_again() -> None:
    assert [event.ms for event in alive_after(EVENTS[:3])] == [1.0]
    assert [event.ms for event in alive_after(EVENTS)] == [6.0]  # 0xB, handed out a second time


@given(st.lists(st.integers(-1000, 1000), min_size=1, max_size=300), st.integers(4, 40))
def test_thinning_keeps_the_ends_and_the_extremes(steps: list[int], limit: int) -> None:
    points: list[Point] = [(float(ms), level) for ms, level in enumerate(steps)]
    kept = thinned(points, limit)
    assert len(kept) <= max(limit, 2)
    assert kept == sorted(set(kept))
    assert set(kept) <= set(points)
    assert (kept[0], kept[-1]) == (points[0], points[-1])
    assert max(level for _, level in kept) == max(steps)
    assert min(level for _, level in kept) == min(steps)


def test_thinning_leaves_a_short_curve_alone() -> None:
    points: list[Point] = [(0.0, 1), (1.0, 5), (1.0, 2)]
    assert thinned(points, 3) == points


def test_events_of_one_moment_can_be_thinned() -> None:
    assert thinned([(1.0, level) for level in range(10)], 4) == [(1.0, 0), (1.0, 1), (1.0, 8), (1.0, 9)]


TINY = ModelSize("tiny", d_model=8, d_ff=16, num_layers=2, num_heads=2, vocab_size=50)


def test_what_a_layer_keeps_in_fp32() -> None:
    # B 3, S 5: 15 tokens; (B, S, d) 120, (B, S, d_ff) 240, scores 3 · 2 · 5 · 5 = 150, rows of scores 30.
    # 10 of (B, S, d), 4 of (B, S, d_ff), 3 of scores, 2 of rows, 2 of (B, S, 1), 4 bytes each.
    expected = 4 * (10 * 120 + 4 * 240 + 3 * 150 + 2 * 30 + 2 * 15)
    assert layer_saved_bytes(TINY, 3, 5, "fp32") == expected
    assert layer_saved_bytes(TINY, 3, 5, "tf32") == layer_saved_bytes(TINY, 3, 5, "fp32")
    assert residual_bytes(TINY, 3, 5) == 4 * 120


def test_what_a_layer_keeps_under_autocast() -> None:
    # In fp32: 2 residuals and 2 normed of (B, S, d), 2 of (B, S, 1). In bf16: 5 casts, q, k, v and attended values of
    # (B, S, d), 4 of (B, S, d_ff), 2 of scores, their maxima, the weights' casts 4 · 8 · 8 + 3 · 8 · 16 = 640.
    common = 4 * (4 * 120 + 2 * 15) + 2 * (9 * 120 + 4 * 240 + 2 * 150 + 30 + 640)
    exponentials = 150 + 30  # with the sums of their rows
    assert layer_saved_bytes(TINY, 3, 5, "bf16") == common + 4 * exponentials
    assert layer_saved_bytes(TINY, 3, 5, "bf16", on_gpu=False) == common + 2 * exponentials


_COLUMNS = "start, globalPid, bytes, memKind, memoryOperationType, localMemoryPoolUtilizedSize"
Use = tuple[int, int, int, int, int | None]


def _with_memory(path: Path, uses: list[Use]) -> Path:
    """Adds memory events: start, bytes, kind (2 device, 5 static), 0 allocation or 1 free, bytes in use in the pool."""
    training_step(Export().gpu()).write(path)
    connection = sqlite3.connect(path)
    connection.execute(f"CREATE TABLE CUDA_GPU_MEMORY_USAGE_EVENTS ({_COLUMNS})")
    rows = [(use[0], global_pid(), *use[1:]) for use in uses]
    connection.executemany("INSERT INTO CUDA_GPU_MEMORY_USAGE_EVENTS VALUES (?, ?, ?, ?, ?, ?)", rows)
    connection.commit()
    connection.close()
    return path


def test_device_memory_inside_the_measured_steps(tmp_path: Path) -> None:
    # The step is [0, 1000]. Before it 700 are there; inside 200 come and go, and the static 9 are no allocation.
    uses: list[Use] = [
        (-5, 700, 2, 0, None), (-4, 9, 5, 0, None), (100, 200, 2, 0, None), (200, 200, 2, 1, None),
        (2000, 900, 2, 0, None),
    ]  # fmt: skip
    (summary,) = summarize(Trace.load(_with_memory(tmp_path / "memory.sqlite", uses)), "memory")
    memory = summary.device_memory
    assert memory is not None
    assert (memory.before_bytes, memory.peak_bytes) == (700, 900)
    assert (memory.allocations, memory.frees, memory.allocated_bytes) == (1, 1, 200)
    assert not memory.of_tensors


def test_a_pool_says_itself_what_is_in_use(tmp_path: Path) -> None:
    # 5,000 were in use before recording began; the events add up to 100 alone.
    uses: list[Use] = [(100, 100, 2, 0, 5100), (200, 100, 2, 1, 5000)]
    (summary,) = summarize(Trace.load(_with_memory(tmp_path / "memory.sqlite", uses)), "memory")
    memory = summary.device_memory
    assert memory is not None
    assert (memory.before_bytes, memory.peak_bytes) == (5000, 5100)


def test_a_capture_without_memory_events_has_no_device_memory(real_capture: Callable[[str], Path]) -> None:
    (summary,) = summarize(Trace.load(real_capture("train_small256")), "train")
    assert summary.device_memory is None


def test_a_real_capture_whose_allocator_had_all_it_needed(real_capture: Callable[[str], Path]) -> None:
    (summary,) = summarize(Trace.load(real_capture("mem_small256")), "memory")
    memory = summary.device_memory
    assert memory is not None
    # SELECT sum(bytes) FROM CUDA_GPU_MEMORY_USAGE_EVENTS WHERE memKind = 2: all of it at the session's start.
    assert memory.before_bytes == memory.peak_bytes == 3_598_977_024
    assert (memory.allocations, memory.frees) == (0, 0)
