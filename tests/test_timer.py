"""Times of synchronised work, and memory counted to the byte."""

import time

import pytest
import torch

from nsys_analyzer.inputs.rows import Times
from profiling_targets.harness import Allocations, measure_allocations, time_calls_ms

MIB = 2**20


def test_warm_up_is_not_measured() -> None:
    calls: list[int] = []
    assert len(time_calls_ms(lambda: calls.append(1), "cpu", warmup=2, steps=3)) == 3
    assert len(calls) == 5


def test_preparation_precedes_each_call_and_is_not_timed() -> None:
    calls: list[str] = []

    def prepare() -> None:
        time.sleep(0.02)
        calls.append("prepare")

    times = time_calls_ms(lambda: calls.append("work"), "cpu", warmup=1, steps=2, prepare=prepare)
    assert calls == ["prepare", "work"] * 3
    assert min(times) < 20  # the preparation alone takes 20 ms


def test_statistics() -> None:
    # 1, 2, 6: mean 3, deviations −2, −1, 3, variance (4 + 1 + 9) ÷ 2 = 7
    found = Times.of([1.0, 2.0, 6.0])
    assert (found.ms, found.min_ms, found.max_ms, found.median_ms) == (3, 1, 6, 2)
    assert (found.std_ms, found.cv) == pytest.approx((7**0.5, 7**0.5 / 3))


def test_one_time_has_no_spread() -> None:
    assert Times.of([2.0]) == Times(2.0, 2.0, 2.0, 2.0, None, None)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
def test_allocations_are_counted_with_temporaries() -> None:
    with measure_allocations("cuda") as counted:
        first = torch.empty(MIB // 4, device="cuda")  # 1 MiB, alive to the end
        for _ in range(3):
            torch.empty(2 * MIB // 4, device="cuda")  # 2 MiB, gone at once, three times
    # At most the first and one temporary at a time; at the end the first.
    assert (counted.peak_bytes, counted.alive_bytes) == (3 * MIB, first.nbytes)


def test_a_cpu_counts_no_memory() -> None:
    with measure_allocations("cpu") as counted:
        torch.empty(MIB)
    assert counted == Allocations()
