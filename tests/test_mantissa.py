"""Bits of the mantissa, and the precision they tell."""

from __future__ import annotations

import pytest

from nsys_analyzer.experiments.ceilings import MANTISSA_BITS, PRECISION_BY_BITS, precision_title


@pytest.mark.parametrize("precision", ["fp32", "tf32", "bf16"])
def test_bits_tell_the_precision(precision: str) -> None:
    assert PRECISION_BY_BITS[MANTISSA_BITS[precision]] == precision


def test_ten_bits_of_fp32_tensors_are_tf32() -> None:
    assert MANTISSA_BITS["fp16"] == MANTISSA_BITS["tf32"] == 10
    assert len(PRECISION_BY_BITS) == len(MANTISSA_BITS) - 1


@pytest.mark.parametrize(
    ("bits", "title"),
    [(23, "fp32"), (10, "TF32 (10 bits of mantissa)"), (7, "bf16 (7 bits of mantissa)"), (3, "3 bits")],
)
def test_titles(bits: int, title: str) -> None:
    assert precision_title(bits) == title
