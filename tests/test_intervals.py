"""Unions and bounds of intervals by group."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from nsys_analyzer.analysis.intervals import Cover, find_overlaps, measure_unions

GROUPS = 3
intervals = st.lists(
    st.tuples(st.integers(0, GROUPS - 1), st.integers(-20, 20), st.integers(0, 15)).map(
        lambda i: (i[0], i[1], i[1] + i[2])
    ),
    max_size=20,
)


@given(intervals)
def test_the_union_counts_every_covered_moment_once(rows: list[tuple[int, int, int]]) -> None:
    group, start, end = np.array(rows, np.int64).reshape(-1, 3).T
    covered = [len({t for g, s, e in rows if g == wanted for t in range(s, e)}) for wanted in range(GROUPS)]
    assert measure_unions(group, start, end, GROUPS)[0].tolist() == covered


@given(intervals)
def test_busy_is_at_most_the_sum_and_the_span(rows: list[tuple[int, int, int]]) -> None:
    group, start, end = np.array(rows, np.int64).reshape(-1, 3).T
    busy, first, last = measure_unions(group, start, end, GROUPS)
    assert (busy <= np.bincount(group, end - start, GROUPS)).all()
    assert (busy <= last - first).all()


def test_overlap_across_streams_is_counted_once() -> None:
    # Group 0: [0, 10) and [5, 12) cover 12; group 1: [100, 110) and [120, 125) cover 15 of a span of 25.
    group, start, end = (np.array(c, np.int64) for c in ([0, 1, 0, 1], [0, 100, 5, 120], [10, 110, 12, 125]))
    busy, first, last = measure_unions(group, start, end, 3)
    assert busy.tolist() == [12, 15, 0]
    assert (first.tolist(), last.tolist()) == ([0, 100, 0], [12, 125, 0])


far = st.integers(-(2**62) + 1, 2**62 - 1)


@given(st.lists(st.tuples(st.integers(0, GROUPS - 1), far, far), max_size=20))
def test_a_union_is_exact_however_far_its_intervals_lie(rows: list[tuple[int, int, int]]) -> None:
    rows = [(group, min(one, other), max(one, other)) for group, one, other in rows]
    group, start, end = np.array(rows, np.int64).reshape(-1, 3).T
    busy, first, last = measure_unions(group, start, end, GROUPS)
    for wanted in range(GROUPS):
        mine = sorted((s, e) for g, s, e in rows if g == wanted)
        covered, reached = 0, -(2**63)
        for s, e in mine:
            covered += max(e - max(s, reached), 0)
            reached = max(reached, e)
        assert busy[wanted] == covered
        assert (first[wanted], last[wanted]) == ((mine[0][0], reached) if mine else (0, 0))


def test_one_operation_of_a_broken_time_changes_no_other_group() -> None:
    # Groups 0 and 1 hold [10, 20) and [12, 30) each: 20. Group 2's ends at 2^62.
    rows = [(0, 10, 20), (0, 12, 30), (1, 10, 20), (1, 12, 30), (2, 40, 2**62)]
    group, start, end = np.array(rows, np.int64).T
    assert measure_unions(group, start, end, 3)[0].tolist() == [20, 20, 2**62 - 40]


@given(intervals, intervals)
def test_what_is_covered_and_what_is_not_make_up_a_stretch(
    covering: list[tuple[int, int, int]], stretches: list[tuple[int, int, int]]
) -> None:
    lasting = sorted((start, end) for _, start, end in covering if end > start)
    cover = Cover.from_intervals(*np.array(lasting, np.int64).reshape(-1, 2).T)
    _, start, end = np.array(stretches, np.int64).reshape(-1, 3).T
    covered, interval, low, high = find_overlaps(cover.start, cover.end, start, end)
    assert ((cover.start[interval] <= low) & (high <= cover.end[interval])).all()
    free, free_low, free_high = cover.find_gaps(start, end)
    for one in range(len(stretches)):
        inside = {t for k in np.flatnonzero(covered == one) for t in range(low[k], high[k])}
        outside = {t for k in np.flatnonzero(free == one) for t in range(free_low[k], free_high[k])}
        assert inside == {t for t in range(start[one], end[one]) if any(s <= t < e for s, e in lasting)}
        assert outside == set(range(start[one], end[one])) - inside
