"""Tests that processing long columns in blocks, without a copy, gives the figures of whole columns."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from nsys_analyzer import Trace
from nsys_analyzer.analysis.intervals import measure_unions
from nsys_analyzer.analysis.summary.summarize import summarize
from nsys_analyzer.trace import arrays
from nsys_analyzer.trace.arrays import (
    append_in_place,
    compress_constant,
    distinct_texts,
    iterate_blocks,
    take_or_default,
)

integers = st.integers(-(2**62), 2**62)


@pytest.mark.parametrize("name", ["train_small256", "ddp2_small256", "graphnode_small256"])
def test_the_size_of_blocks_changes_no_figure(
    real_capture: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    path = real_capture(name)
    whole = [repr(replace(one, source="")) for one in summarize(Trace.load(path), "t")]
    monkeypatch.setattr(arrays, "_BLOCK_LENGTH", 701)
    assert [repr(replace(one, source="")) for one in summarize(Trace.load(path), "t")] == whole


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 50), st.integers(0, 20)), min_size=1), st.integers(1, 5))
def test_unions_across_blocks(intervals: list[tuple[int, int, int]], size: int) -> None:
    """The moments that any interval of a group covers, counted one by one."""
    group, start, length = (np.array(column, np.int64) for column in zip(*intervals, strict=True))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(arrays, "_BLOCK_LENGTH", size)
        covered, first, last = measure_unions(group, start, start + length, 4)
    for one in range(4):
        mine = [(s, s + n) for g, s, n in intervals if g == one]
        assert covered[one] == len({moment for s, e in mine for moment in range(s, e)})
        assert (first[one], last[one]) == ((min(s for s, _ in mine), max(e for _, e in mine)) if mine else (0, 0))


@given(st.lists(st.integers(-1, 9)), st.lists(integers, min_size=10, max_size=10))
def test_taken_entries(index: list[int], column: list[int]) -> None:
    found = take_or_default(np.array(column, np.int64), np.array(index, np.int32), 5)
    assert found.tolist() == [column[i] if i >= 0 else 5 for i in index]


@given(st.lists(st.lists(integers), min_size=2))
def test_grown_columns(columns: list[list[int]]) -> None:
    first, *others = (np.array(column, np.int64) for column in columns)
    assert append_in_place(first, *others).tolist() == [value for column in columns for value in column]


@given(st.lists(st.integers(0, 1), min_size=1))
def test_a_column_of_one_value_takes_no_memory(values: list[int]) -> None:
    column = compress_constant(np.array(values, np.int64))
    assert column.tolist() == values
    assert (column.strides == (0,)) == (len(set(values)) == 1)


@given(st.integers(0, 200_000), st.integers(0, 100_000))
def test_blocks_cover_a_column_once(length: int, least: int) -> None:
    parts = [np.arange(length)[block] for block in iterate_blocks(length, least)]
    assert np.array_equal(np.concatenate([np.arange(0), *parts]), np.arange(length))


@given(st.lists(st.text(max_size=3)))
def test_distinct_texts_lead_back(texts: list[str]) -> None:
    found, codes = distinct_texts(texts)
    assert found == tuple(sorted({*texts, ""}))
    assert [found[code] for code in codes.tolist()] == texts
