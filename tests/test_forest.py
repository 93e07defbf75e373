"""The forest of open ranges against a plain reading of the definition."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from nsys_analyzer.analysis.forest import Forest, build_forest
from nsys_analyzer.analysis.timeline import NONE
from nsys_analyzer.trace.arrays import Ints

Range = tuple[int, int, int]

ranges_strategy = st.lists(
    st.tuples(st.sampled_from([0, 1000, -7]), st.integers(-5, 15), st.integers(0, 10)).map(
        lambda r: (r[0], r[1], r[1] + r[2])
    ),
    max_size=9,
)


def ints(*values: int) -> Ints:
    return np.array(values, np.int64)


def stack(forest: Forest, group: int, time: int) -> list[int]:
    """The ranges open in a group at a time, outermost first."""
    node = int(forest.node_at(ints(group), ints(time))[0])
    found = []
    while node != NONE:
        found.append(int(forest.range_of[node]))
        node = int(forest.parent[node])
    return found[::-1]


def open_ranges(ranges: list[Range], group: int, time: int) -> list[int]:
    """By definition: those with start <= time < end; opened first is outermost, the longer one if together."""
    opened = [i for i, (g, start, end) in enumerate(ranges) if g == group and start <= time < end]
    return sorted(opened, key=lambda i: (ranges[i][1], -ranges[i][2], i))


def forest_of(ranges: list[Range]) -> Forest:
    columns = np.array(ranges, np.int64).reshape(-1, 3)
    return build_forest(columns[:, 0], columns[:, 1], columns[:, 2])


@given(ranges_strategy)
def test_every_moment_has_the_stack_of_the_definition(ranges: list[Range]) -> None:
    forest = forest_of(ranges)
    for group in (0, 1000, -7, 5):
        for time in range(-6, 27):
            assert stack(forest, group, time) == open_ranges(ranges, group, time)


@given(ranges_strategy)
def test_a_child_lies_inside_its_parent(ranges: list[Range]) -> None:
    forest = forest_of(ranges)
    children = np.flatnonzero(forest.parent != NONE)
    assert (forest.level[children] == forest.level[forest.parent[children]] + 1).all()


@pytest.mark.parametrize(
    ("time", "expected"),
    [(-1, []), (0, [0]), (9, [0]), (10, [0, 1]), (19, [0, 1]), (20, [0]), (99, [0]), (100, [])],
)
def test_a_range_is_open_from_its_start_to_before_its_end(time: int, expected: list[int]) -> None:
    assert stack(forest_of([(0, 0, 100), (0, 10, 20)]), 0, time) == expected


def test_a_crossing_range_stays_open_after_the_one_around_it_ends() -> None:
    # 0: [0, 10) and 1: [5, 20) cross, as start/end ranges may; 2: [6, 8) lies in both.
    forest = forest_of([(0, 0, 10), (0, 5, 20), (0, 6, 8)])
    assert stack(forest, 0, 7) == [0, 1, 2]
    assert stack(forest, 0, 9) == [0, 1]
    assert stack(forest, 0, 12) == [1]


def test_no_ranges_at_all() -> None:
    forest = forest_of([])
    assert stack(forest, 0, 0) == []


def test_times_far_apart_in_many_groups_stay_exact() -> None:
    # Nanoseconds since the epoch (1.8e18) need all 63 bits unless the origin is taken off.
    epoch = 1_795_218_246_036_462_678
    forest = forest_of([(thread << 24, epoch + thread, epoch + thread + 3_600_000_000_000) for thread in range(50)])
    assert stack(forest, 7 << 24, epoch + 7) == [7]
    assert stack(forest, 7 << 24, epoch + 6) == []


@given(ranges_strategy, st.lists(st.integers(-(2**62), 2**62), min_size=40, max_size=40, unique=True).map(sorted))
def test_the_stack_depends_on_the_order_of_times_alone(ranges: list[Range], far: list[int]) -> None:
    near = forest_of(ranges)
    distant = forest_of([(group, far[start + 10], far[end + 10]) for group, start, end in ranges])
    for group in (0, 1000, -7, 5):
        for time in range(-6, 27):
            assert stack(distant, group, far[time + 10]) == stack(near, group, time)
