"""Tests the stacks of open ranges against a direct computation from the definition."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from nsys_analyzer.analysis.attribution.attribution import find_open_stacks
from nsys_analyzer.trace.columns import Ranges

Range = tuple[int, int, int]
Moment = tuple[int, int]
GROUPS = (0, 1000, -7)
MOMENTS = [(group, time) for group in (*GROUPS, 5) for time in range(-6, 27)]

some_ranges = st.lists(
    st.tuples(st.sampled_from(GROUPS), st.integers(-5, 15), st.integers(0, 10)).map(
        lambda r: (r[0], r[1], r[1] + r[2])
    ),
    max_size=9,
)


def stacks(ranges: list[Range], moments: list[Moment]) -> list[list[int]]:
    """The ranges open at each (group, time), outermost first."""
    group, start, end = np.array(ranges, np.int64).reshape(-1, 3).T
    at_group, at_time = np.array(moments, np.int64).T
    names = Ranges(start, end, group, np.arange(len(ranges)), tuple(map(str, range(len(ranges)))))
    codes, found = find_open_stacks(names, at_group, at_time)
    return [list(found[code]) for code in codes]


def opened(ranges: list[Range], group: int, time: int) -> list[int]:
    """By definition: those with start <= time < end; opened first is outermost, the longer one if together."""
    found = [i for i, (g, start, end) in enumerate(ranges) if g == group and start <= time < end]
    return sorted(found, key=lambda i: (ranges[i][1], -ranges[i][2], i))


@given(some_ranges, st.permutations(MOMENTS))
def test_every_moment_has_the_stack_of_the_definition(ranges: list[Range], moments: list[Moment]) -> None:
    assert stacks(ranges, moments) == [opened(ranges, *moment) for moment in moments]


@given(some_ranges, st.lists(st.integers(-(2**62), 2**62), min_size=40, max_size=40, unique=True).map(sorted))
def test_the_stack_depends_on_the_order_of_times_alone(ranges: list[Range], far: list[int]) -> None:
    distant = [(group, far[start + 10], far[end + 10]) for group, start, end in ranges]
    assert stacks(distant, [(group, far[time + 10]) for group, time in MOMENTS]) == stacks(ranges, MOMENTS)


@pytest.mark.parametrize(
    ("time", "expected"),
    [(-1, []), (0, [0]), (9, [0]), (10, [0, 1]), (19, [0, 1]), (20, [0]), (99, [0]), (100, [])],
)
def test_a_range_is_open_from_its_start_to_before_its_end(time: int, expected: list[int]) -> None:
    assert stacks([(0, 0, 100), (0, 10, 20)], [(0, time)]) == [expected]


def test_a_crossing_range_stays_open_after_the_one_around_it_ends() -> None:
    # 0: [0, 10) and 1: [5, 20) cross, as start/end ranges may; 2: [6, 8) lies in both.
    assert stacks([(0, 0, 10), (0, 5, 20), (0, 6, 8)], [(0, 7), (0, 9), (0, 12)]) == [[0, 1, 2], [0, 1], [1]]


def test_no_ranges_at_all() -> None:
    assert stacks([], [(0, 0)]) == [[]]
