"""Lanes of slices: what crosses lies beside each other."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from nsys_analyzer.export.perfetto import assign_lanes

Spans = list[tuple[int, int]]
spans = st.lists(st.tuples(st.integers(0, 20), st.integers(0, 8)).map(lambda s: (s[0], s[0] + s[1])), max_size=12)


def laid_out(found: Spans, *, nested: bool) -> list[int]:
    start, end = np.array(found, np.int64).reshape(-1, 2).T
    return assign_lanes(start, end, nested=nested).tolist()


def overlap(one: tuple[int, int], other: tuple[int, int]) -> bool:
    return max(one[0], other[0]) < min(one[1], other[1])


def cross(one: tuple[int, int], other: tuple[int, int]) -> bool:
    """Whether two overlap, and neither holds the other."""
    holds = any(a[0] <= b[0] and b[1] <= a[1] for a, b in ((one, other), (other, one)))
    return overlap(one, other) and not holds


@given(spans)
def test_nothing_crosses_in_a_lane(found: Spans) -> None:
    lane = laid_out(found, nested=True)
    pairs = [(i, j) for i in range(len(found)) for j in range(i)]
    assert not any(cross(found[i], found[j]) for i, j in pairs if lane[i] == lane[j])
    if not any(cross(found[i], found[j]) for i, j in pairs):
        assert set(lane) <= {0}


@given(spans)
def test_operations_of_a_lane_do_not_overlap(found: Spans) -> None:
    """And there are no more lanes than operations that run at once."""
    lane = laid_out(found, nested=False)
    pairs = [(i, j) for i in range(len(found)) for j in range(i)]
    assert not any(overlap(found[i], found[j]) for i, j in pairs if lane[i] == lane[j])
    at_once = max((sum(s <= time < e for s, e in found) for time in range(30)), default=0)
    assert max(lane, default=0) <= max(at_once - 1, 0) + any(s == e for s, e in found)


def test_deep_nesting() -> None:
    """Deeper than the layers that are looked at one by one; what crosses all of them is in a lane of its own."""
    deep = [(i, 2_000 - i) for i in range(500)]
    assert laid_out(deep, nested=True) == [0] * 500
    assert laid_out([*deep, (1_000, 3_000)], nested=True) == [0] * 500 + [1]
