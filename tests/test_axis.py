"""The axis against the plain order of pairs, over all 64-bit values."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from nsys_analyzer.trace.arrays import OFF_AXIS, Axis

INT64 = st.integers(-(2**63), 2**63 - 1)
values = INT64 | st.integers(-3, 3)
pairs = st.lists(st.tuples(values, values), min_size=1, max_size=12)


@given(pairs, pairs)
def test_places_are_in_the_order_of_group_then_value(
    on_axis: list[tuple[int, int]], others: list[tuple[int, int]]
) -> None:
    group, value = np.array(on_axis, np.int64).T
    axis = Axis(group, value)
    known = {one for one, _ in on_axis}
    asked = [*on_axis, *(pair for pair in others if pair[0] in known)]
    place = axis.place(*np.array(asked, np.int64).T).tolist()
    for pair, where in zip(on_axis, place, strict=False):
        for other, there in zip(asked, place, strict=True):
            assert (pair < other, pair == other) == (where < there, where == there)
    in_order = [where for _, where in sorted(zip(asked, place, strict=True))]
    assert in_order == sorted(in_order)
    assert in_order[0] > OFF_AXIS
    own = axis.place(group, value)
    assert own.tolist() == place[: len(on_axis)]


@given(pairs, INT64)
def test_a_group_that_is_not_there_has_no_place(on_axis: list[tuple[int, int]], other: int) -> None:
    group, value = np.array(on_axis, np.int64).T
    place = Axis(group, value).place(np.array([other]), value[:1])
    assert (place == OFF_AXIS).all() == (other not in group)


def test_without_values_nothing_has_a_place() -> None:
    empty = np.empty(0, np.int64)
    assert Axis(empty, empty).place(np.array([0]), np.array([5])).tolist() == [OFF_AXIS]


def test_a_value_beyond_all_others_stays_in_its_group() -> None:
    # Groups 3, 4 and 6 hold values from 10 to 20, 5 is none of them.
    axis = Axis(np.array([3, 4, 6, 6]), np.array([10, 20, 10, 20]))
    group, value = np.array([3, 3, 4, 4, 6, 6]), np.array([20, 99, -99, 99, -99, 10])
    place = axis.place(group, value).tolist()
    assert place == sorted(set(place))
    assert axis.place(np.array([5, 2, 7]), np.array([15, 15, 15])).tolist() == [OFF_AXIS] * 3


def test_groups_that_are_numbered_from_0_on() -> None:
    axis = Axis(np.array([1, 0, 2]), np.array([10, 20]))
    assert axis.place(np.array([-1, 3]), np.array([10, 10])).tolist() == [OFF_AXIS] * 2
    place = axis.place(np.array([0, 0, 1, 2, 2]), np.array([10, 20, 10, 10, 20])).tolist()
    assert place == sorted(set(place))
