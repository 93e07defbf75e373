"""Memory over a step as pure functions: every expectation's arithmetic stands beside it."""

from __future__ import annotations

import sqlite3
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nsys_analyzer.analysis.summary.summarize import summarize
from nsys_analyzer.analysis.transformer.costs import layer_saved_bytes, residual_bytes
from nsys_analyzer.analysis.transformer.models import ModelSize
from nsys_analyzer.experiments.memory import Holder, Point, Slope, slope_of_thirds
from nsys_analyzer.trace.trace import Trace
from profiling_targets.memory_history import (
    alive_after,
    largest,
    levels,
    phases_of,
    sawtooth,
    thinned,
    up_to_peak,
)
from profiling_targets.memory_recording import MemoryEvent, Source, Span
from tests.support.export import Export, global_pid, training_step

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
    forward, backward = phases_of(EVENTS, SPANS, 100)
    assert (forward.start_bytes, forward.peak_bytes, forward.end_bytes) == (100, 150, 130)
    assert (forward.allocations, forward.frees, forward.allocated_bytes) == (2, 1, 50)
    assert (backward.start_bytes, backward.peak_bytes, backward.end_bytes) == (130, 150, 20)
    assert (backward.allocations, backward.frees, backward.allocated_bytes) == (1, 2, 20)


def test_a_phase_without_an_allocation_peaks_at_its_start() -> None:
    forward, backward = phases_of([MemoryEvent(6.0, -40, 0xA)], SPANS, 100)
    assert (forward.peak_bytes, backward.peak_bytes, backward.end_bytes) == (100, 100, 60)


def test_an_event_between_phases_counts_to_the_first() -> None:
    forward, backward = phases_of([MemoryEvent(4.5, 10, 0xA)], SPANS, 0)
    assert (forward.end_bytes, backward.start_bytes, backward.allocations) == (10, 10, 0)


def test_what_is_alive_knows_an_address_that_was_used_again() -> None:
    assert [event.ms for event in alive_after(EVENTS[:3])] == [1.0]
    assert [event.ms for event in alive_after(EVENTS)] == [6.0]  # 0xB, handed out a second time


def test_the_peak_is_the_first_of_equal_ones() -> None:
    assert list(up_to_peak(EVENTS)) == EVENTS[:2]  # 150 at 2.0 and again at 6.0
    assert list(up_to_peak([MemoryEvent(1.0, -5, 0xA)])) == []


def test_the_largest_are_grouped_by_line_phase_and_size() -> None:
    events = [*EVENTS, MemoryEvent(8.5, 20, 0xD)]
    assert largest(events, SPANS, 2) == [
        Holder("model.py:1 f", "forward", 30, 1, 1),
        Holder("", "backward", 20, 2, 0),  # two of them come before one of forward
    ]


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


def test_falls_that_are_deep_enough_count() -> None:
    points: list[Point] = [(0, 0), (1, 10), (2, 9), (3, 30), (5, 10), (6, 40), (8, 20)]
    found = sawtooth(points, 5)  # the dent of 1 at 2 ms is none
    assert found.falls == 2
    assert found.rise_bytes_per_ms == pytest.approx(60 / 4)  # 30 in 3 ms and 30 in 1 ms
    assert found.fall_bytes_per_ms == pytest.approx(40 / 4)  # 20 in 2 ms and 20 in 2 ms


def test_a_curve_that_only_falls_has_one_fall_and_no_rise() -> None:
    found = sawtooth([(0, 50), (1, 51), (2, 20), (4, 11)], 10)
    assert (found.falls, found.rise_bytes_per_ms) == (1, None)
    assert found.fall_bytes_per_ms == pytest.approx(40 / 3)  # 51 at 1 ms to 11 at 4 ms


def test_a_flat_curve_has_no_slope() -> None:
    found = sawtooth([(0, 50), (1, 51), (2, 50)], 10)
    assert (found.falls, found.rise_bytes_per_ms, found.fall_bytes_per_ms) == (0, None, None)


def test_the_pace_of_a_curve_at_first_and_at_last() -> None:
    # Thirds of [1, 10] are 3 ms: 0 to 30 from 1 to 4 ms, and from 7 to 10 ms 36 to 27.
    assert slope_of_thirds([(1, 0), (2, 20), (4, 30), (6, 36), (9, 24), (10, 27)]) == (
        pytest.approx(30 / 3),
        pytest.approx(-3),
    )
    # The level at a border is that of the last point before it: 8 at 3 ms, and at 6 ms 8 still.
    assert slope_of_thirds([(0, 5), (2, 8), (9, 20)]) == (pytest.approx(3 / 3), pytest.approx(12 / 3))


def test_thirds_that_no_float_can_hold_still_end_with_the_last_point() -> None:
    # 0.1 + 3 · ((0.8 − 0.1) ÷ 3) is 0.7999999999999999; 9 come within its last third of 0.7 ÷ 3 ms.
    assert slope_of_thirds([(0.1, 0), (0.8, 9)]) == (0, pytest.approx(9 / (0.7 / 3)))


def test_a_curve_without_time_has_no_pace() -> None:
    assert slope_of_thirds([(2.0, 7)]) is None
    assert slope_of_thirds([(2.0, 7), (2.0, 9)]) is None


@pytest.mark.parametrize(
    ("wall_ms", "issue_ms", "allocator_ms", "on_gpu", "limit"),
    [
        (10.0, 9.8, 4.9, True, "allocator"),  # half of the time to issue
        (10.0, 9.8, 4.8, True, "host"),
        (10.0, 5.0, 4.9, True, "GPU"),  # the allocator fills the issuing, and still the GPU is behind
        (10.0, 9.0, 1.0, True, "GPU"),  # a tenth of the phase is waiting
        (10.0, 9.1, 1.0, True, "host"),
        (10.0, 10.0, 1.0, False, "CPU"),  # on a CPU the host is the device
        (10.0, 10.0, 6.0, False, "allocator"),
    ],
)
def test_what_a_phase_waits_for(wall_ms: float, issue_ms: float, allocator_ms: float, on_gpu: bool, limit: str) -> None:
    phase = SimpleNamespace(wall_ms=wall_ms, issue_ms=issue_ms, allocator_ms=allocator_ms)
    row = SimpleNamespace(case=SimpleNamespace(device="cuda" if on_gpu else "cpu"))
    assert Slope(row, phase).waits_for == limit


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
