"""Times of synchronised work, memory counted to the byte, and the precision of products as they ran."""

import pytest
import torch

from nsys_analyzer.experiments.section import MANTISSA_BITS
from nsys_analyzer.runs.rows import Times
from profiling_targets.harness import allocations, kept_bits, set_precision, times_ms

MIB = 2**20


def test_warm_up_is_not_measured() -> None:
    calls: list[int] = []
    assert len(times_ms(lambda: calls.append(1), "cpu", warmup=2, steps=3)) == 3
    assert len(calls) == 5


def test_statistics() -> None:
    # 1, 2, 6: mean 3, deviations −2, −1, 3, variance (4 + 1 + 9) ÷ 2 = 7
    found = Times.of([1.0, 2.0, 6.0])
    assert (found.ms, found.min_ms, found.max_ms, found.median_ms) == (3, 1, 6, 2)
    assert (found.std_ms, found.cv) == pytest.approx((7**0.5, 7**0.5 / 3))


def test_one_time_has_no_spread() -> None:
    assert Times.of([2.0]) == Times(2.0, 2.0, 2.0, 2.0, None, None)


def test_allocations_are_counted_with_temporaries() -> None:
    kept = []

    def work() -> None:
        first = torch.empty(MIB // 4)  # 1 MiB, alive to the end
        for _ in range(3):
            torch.empty(2 * MIB // 4)  # 2 MiB, gone at once, three times
        kept.append(first)

    with allocations("cpu") as counted:
        work()
    # At most the first and one temporary at a time; at the end the first; all in all 1 + 3 · 2.
    assert (counted.peak_bytes, counted.alive_bytes, counted.total_bytes) == (3 * MIB, 1 * MIB, 7 * MIB)


def test_bits_of_the_mantissa() -> None:
    set_precision("fp32")
    assert kept_bits("cpu") == MANTISSA_BITS["fp32"] == 23
    assert kept_bits("cpu", torch.bfloat16) == MANTISSA_BITS["bf16"] == 7


@pytest.mark.gpu
def test_tf32_is_found_out() -> None:
    if not torch.cuda.is_available():
        pytest.skip("no GPU: TF32 is a precision of NVIDIA's tensor cores")
    set_precision("tf32")
    assert kept_bits("cuda") == MANTISSA_BITS["tf32"] == 10
    set_precision("fp32")
    assert kept_bits("cuda") == MANTISSA_BITS["fp32"]
