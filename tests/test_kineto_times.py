"""Times of a PyTorch profiler's trace in nanoseconds: many at once as one by one."""

from __future__ import annotations

from decimal import Decimal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nsys_analyzer.trace.sources.kineto.times import all_nanoseconds, nanoseconds

NUMBERS = st.from_regex(r"-?(0|[1-9][0-9]{0,21})(\.[0-9]{1,20})?", fullmatch=True)
PLAIN = st.from_regex(r"-?(0|[1-9][0-9]{0,12})(\.[0-9]{1,5})?", fullmatch=True)


@given(st.lists(NUMBERS, min_size=1, max_size=6))
def test_all_at_once_are_those_of_each(texts: list[str]) -> None:
    found = all_nanoseconds([text.encode() for text in texts])
    assert found is None or found.tolist() == [nanoseconds(Decimal(text)) for text in texts]


@given(st.lists(PLAIN, min_size=1, max_size=6))
def test_plain_numbers_are_read_at_once(texts: list[str]) -> None:
    assert all_nanoseconds([text.encode() for text in texts]) is not None


@pytest.mark.parametrize(
    ("text", "ns"),
    [
        ("1669783687464181", 1669783687464181000),  # a time since 1970, in whole microseconds
        ("4375873182668.740", 4375873182668740),
        ("0.0005", 0),  # half a nanosecond: to even
        ("0.0015", 2),
        ("-0.0015", -2),
        ("0.00050001", 1),
        ("2305843009213693.951", 2**61 - 1),
    ],
)
def test_microseconds_become_nanoseconds(text: str, ns: int) -> None:
    assert nanoseconds(Decimal(text)) == ns
    found = all_nanoseconds([text.encode()])
    assert found is None or found.tolist() == [ns]


@pytest.mark.parametrize("text", ["2305843009213693.952", "-9223372036854775808", "1e400", "1" * 400])
def test_what_no_trace_can_hold_is_no_time(text: str) -> None:
    assert nanoseconds(Decimal(text)) is None
    assert all_nanoseconds([b"1", text.encode()]) is None


@pytest.mark.parametrize("texts", [[b""], [b"1", b""], [b"", b"1"], [b'"1"'], [b"null"], [b"1e3"], [b"1.5E+2"]])
def test_what_is_not_plain_is_left_to_be_read_alone(texts: list[bytes]) -> None:
    assert all_nanoseconds(texts) is None
