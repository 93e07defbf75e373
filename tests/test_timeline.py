"""Tests the open ranges at each moment against a direct computation from the definition."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from nsys_analyzer.analysis.intervals import (
    LONG_AGO,
    NONE,
    Timeline,
    contains_any_time,
    count_open_ranges,
    find_last_time_before,
    is_in_any_range,
    is_inside_another_range,
    merge_ranges,
)
from nsys_analyzer.trace.arrays import Ints

Range = tuple[int, int, int]
GROUPS = (0, 1000, -7)
MOMENTS = [(group, time) for group in (*GROUPS, 5) for time in range(-7, 28)]

some_ranges = st.lists(
    st.tuples(st.sampled_from(GROUPS), st.integers(-5, 15), st.integers(0, 10)).map(
        lambda r: (r[0], r[1], r[1] + r[2])
    ),
    max_size=10,
)


def columns(rows: list[Range]) -> tuple[Ints, Ints, Ints]:
    table = np.array(rows, np.int64).reshape(-1, 3)
    return table[:, 0], table[:, 1], table[:, 2]


def moments() -> tuple[Ints, Ints]:
    table = np.array(MOMENTS, np.int64)
    return table[:, 0], table[:, 1]


def opened(rows: list[Range], group: int, time: int) -> list[int]:
    """By definition, in the order of opening; of two that open together the longer one first."""
    found = [i for i, (g, start, end) in enumerate(rows) if g == group and start <= time < end]
    return sorted(found, key=lambda i: (rows[i][1], -rows[i][2], i))


@given(some_ranges)
def test_the_first_and_the_last_opened(rows: list[Range]) -> None:
    last = Timeline(*columns(rows), innermost=True).open_at(*moments())
    first = Timeline(*columns(rows), innermost=False).open_at(*moments())
    for position, (group, time) in enumerate(MOMENTS):
        stack = opened(rows, group, time)
        assert last[position] == (stack[-1] if stack else NONE)
        assert first[position] == (stack[0] if stack else NONE)


@given(some_ranges)
def test_how_many_are_open(rows: list[Range]) -> None:
    expected = [len(opened(rows, group, time)) for group, time in MOMENTS]
    assert count_open_ranges(*columns(rows), *moments()).tolist() == expected
    assert is_in_any_range(*columns(rows), *moments()).tolist() == [count > 0 for count in expected]


@given(some_ranges)
def test_contained_ranges(rows: list[Range]) -> None:
    expected = [
        any(
            (other[0], other[1] <= row[1], other[2] >= row[2]) == (row[0], True, True)
            and (other[1:] != row[1:] or j < i)
            for j, other in enumerate(rows)
            if j != i
        )
        for i, row in enumerate(rows)
    ]
    assert is_inside_another_range(*columns(rows)).tolist() == expected


@given(some_ranges)
def test_merged_ranges_cover_the_same_moments_once(rows: list[Range]) -> None:
    joined = list(zip(*(column.tolist() for column in merge_ranges(*columns(rows))), strict=True))
    for group, time in MOMENTS:
        assert len(opened(joined, group, time)) == min(len(opened(rows, group, time)), 1)


def test_long_ago_is_before_every_time_and_in_64_bits() -> None:
    assert -(2**63) < LONG_AGO < -(2**60)  # 36 years in ns


def test_ranges_that_touch_are_one() -> None:
    # [0, 10) and [10, 20) touch, [21, 30) does not; of another group is [5, 25).
    joined = merge_ranges(*columns([(0, 10, 20), (1, 5, 25), (0, 21, 30), (0, 0, 10)]))
    assert [column.tolist() for column in joined] == [[0, 0, 1], [0, 21, 5], [20, 30, 25]]


def test_many_crossing_ranges_stay_cheap() -> None:
    # 20,000 ranges, each open while 2,000 others are: 40,000 boundaries, not 40 million pieces.
    start = np.arange(20_000)
    timeline = Timeline(np.zeros(20_000, np.int64), start, start + 2_000, innermost=False)
    assert timeline.open_at(np.zeros(3, np.int64), np.array([0, 1_999, 2_000])).tolist() == [0, 0, 1]


@given(some_ranges, st.lists(st.tuples(st.sampled_from((*GROUPS, 5)), st.integers(-9, 28)), max_size=10))
def test_moments_within_intervals_and_before_their_end(rows: list[Range], moments_: list[tuple[int, int]]) -> None:
    points = np.array(moments_, np.int64).reshape(-1, 2)
    group, start, end = columns(rows)
    held = contains_any_time(points[:, 0], points[:, 1], group, start, end)
    last = find_last_time_before(points[:, 0], points[:, 1], group, end)
    for position, (wanted, first, stop) in enumerate(rows):
        times = [time for g, time in moments_ if g == wanted]
        assert held[position] == any(first <= time < stop for time in times)
        assert last[position] == max((time for time in times if time < stop), default=LONG_AGO)


far_times = st.lists(st.integers(-(2**62), 2**62), min_size=40, max_size=40, unique=True).map(sorted)


@given(some_ranges, far_times)
def test_answers_depend_on_the_order_of_times_alone(rows: list[Range], far: list[int]) -> None:
    # Times 20 years apart leave no room for a second group in 64 bits, were they added to an offset for each group.
    def moved(time: Ints) -> Ints:
        return np.array(far, np.int64)[time + 10]

    group, start, end = columns(rows)
    at_group, at_time = moments()
    near, distant = (group, start, end), (group, moved(start), moved(end))
    points, far_points = (at_group, at_time), (at_group, moved(at_time))
    for innermost in (False, True):
        expected = Timeline(*near, innermost=innermost).open_at(*points)
        assert Timeline(*distant, innermost=innermost).open_at(*far_points).tolist() == expected.tolist()
    assert count_open_ranges(*distant, *far_points).tolist() == count_open_ranges(*near, *points).tolist()
    assert is_inside_another_range(*distant).tolist() == is_inside_another_range(*near).tolist()
    assert merge_ranges(*distant)[1].tolist() == moved(merge_ranges(*near)[1]).tolist()
    assert merge_ranges(*distant)[2].tolist() == moved(merge_ranges(*near)[2]).tolist()
    assert contains_any_time(*far_points, *distant).tolist() == contains_any_time(*points, *near).tolist()
    last = find_last_time_before(*points, group, end)
    expected = [int(moved(np.array([one]))[0]) if one != LONG_AGO else LONG_AGO for one in last.tolist()]
    assert find_last_time_before(*far_points, group, moved(end)).tolist() == expected
