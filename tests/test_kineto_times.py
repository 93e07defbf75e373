"""Times of a PyTorch profiler's trace in nanoseconds: many at once as one by one."""

from __future__ import annotations

from decimal import Decimal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nsys_analyzer.trace.kineto.events import to_nanoseconds

NUMBERS = st.from_regex(r"-?(0|[1-9][0-9]{0,21})(\.[0-9]{1,20})?", fullmatch=True)


@given(st.lists(NUMBERS, min_size=1, max_size=6))
def test_times_are_those_of_exact_decimals(texts: list[str]) -> None:
    times, are_possible = to_nanoseconds([text.encode() for text in texts])
    exact = [Decimal(text) * 1000 for text in texts]
    assert are_possible.tolist() == [abs(number) < 2**61 // 1000 * 1000 for number in exact]
    assert times.tolist() == [round(n) if fine else 0 for n, fine in zip(exact, are_possible, strict=True)]


@pytest.mark.parametrize(
    ("text", "ns"),
    [
        ("1669783687464181", 1669783687464181000),  # a time since 1970, in whole microseconds
        ("4375873182668.740", 4375873182668740),
        ("0.0005", 0),  # half a nanosecond: to even
        ("0.0015", 2),
        ("-0.0015", -2),
        ("0.00050001", 1),
        ("1.5E+2", 150_000),
        ("1.2e5", 120_000_000),  # 120,000 us: its point stands where that of nanoseconds does
        ('"1"', 1000),
        ('"1.23"', 1230),
        ("2305843009213693.952", None),  # 2⁶¹
        ("-9223372036854775808", None),
        ("1e400", None),
        ("1" * 400, None),
        ("null", None),
        ("", None),
    ],
)
def test_microseconds_become_nanoseconds(text: str, ns: int | None) -> None:
    for others in ([], [b"1"], [b'"1"']):
        times, are_possible = to_nanoseconds([*others, text.encode()])
        assert (times[-1], are_possible[-1]) == (ns or 0, ns is not None)
