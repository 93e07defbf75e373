"""Bits of the mantissa, and the precision they tell."""

from __future__ import annotations

import pytest

from nsys_analyzer.experiments.limits import MANTISSA_BITS, precision_found, precision_title


@pytest.mark.parametrize("precision", ["fp32", "tf32", "bf16"])
def test_bits_tell_the_precision(precision: str) -> None:
    assert precision_found(MANTISSA_BITS[precision], "other") == precision


def test_ten_bits_of_fp32_tensors_are_tf32() -> None:
    assert MANTISSA_BITS["fp16"] == MANTISSA_BITS["tf32"] == 10
    assert precision_found(10, "fp32") == "tf32"


def test_bits_that_were_not_counted_leave_the_precision_asked_for() -> None:
    assert precision_found(None, "bf16") == "bf16"


@pytest.mark.parametrize(
    ("bits", "title"),
    [(23, "fp32"), (10, "TF32 (10 bits of mantissa)"), (7, "bf16 (7 bits of mantissa)"), (3, "3 bits")],
)
def test_titles(bits: int, title: str) -> None:
    assert precision_title(bits) == title
