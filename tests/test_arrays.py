"""Tests that distinct values and codes equal those of ``np.unique``, and that Arrow arrays keep their values."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from nsys_analyzer.trace.arrays import arrow_integers, arrow_texts, dense_codes, distinct, distinct_rows
from nsys_analyzer.trace.schema import NO_TIME

values = st.lists(st.one_of(st.integers(-5, 5), st.integers(-(2**62), 2**62)), max_size=30)


@given(values)
def test_codes_lead_back_to_the_values(numbers: list[int]) -> None:
    array = np.array(numbers, np.int64)
    ids, codes = dense_codes(array)
    assert ids.tolist() == sorted(set(numbers))
    assert ids[codes].tolist() == numbers


@given(values)
def test_distinct_values_are_sorted_and_complete(numbers: list[int]) -> None:
    assert distinct(np.array(numbers, np.int64)).tolist() == sorted(set(numbers))


@given(st.lists(st.tuples(*[st.one_of(st.integers(-2, 2), st.integers(-(2**62), 2**62))] * 3), max_size=30))
def test_distinct_rows_are_sorted_and_complete(rows: list[tuple[int, ...]]) -> None:
    first, codes = distinct_rows(*np.array(rows, np.int64).reshape(-1, 3).T)
    found = sorted(set(rows))
    assert first.tolist() == [rows.index(row) for row in found]
    assert [found[code] for code in codes.tolist()] == rows


@given(values.filter(lambda numbers: NO_TIME not in numbers))
def test_integers_become_an_arrow_array(numbers: list[int]) -> None:
    """All but the number that stands for a time that is not known."""
    assert arrow_integers(np.array([*numbers, 0], np.int64)[:-1]).to_pylist() == numbers


@given(st.lists(st.text(st.characters(codec="utf-8"))))
def test_texts_become_an_arrow_array(texts: list[str]) -> None:
    made = arrow_texts(texts)
    made.validate(full=True)
    assert made.to_pylist() == texts
