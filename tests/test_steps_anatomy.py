"""Tests what fills a step against a direct count of its nanoseconds."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import groupby, pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from nsys_analyzer.analysis.intervals import NONE, Cover
from nsys_analyzer.analysis.steps.anatomy import (
    COMMUNICATING,
    COMPUTE,
    COPYING,
    Anatomy,
    Fragments,
    Gaps,
    dissect_steps,
)
from nsys_analyzer.analysis.steps.windows import Windows
from nsys_analyzer.trace.arrays import Ints
from nsys_analyzer.trace.columns import Operations

RANKS = (COMPUTE, COPYING, COMMUNICATING)
IDLE = len(RANKS)
BOUNDS = (-10, 70)  # operations may lie outside all steps, or span several


@dataclass(frozen=True)
class Operation:
    """A plain operation; ``mine`` is False for an operation of another device."""

    start: int
    end: int
    rank: int
    stream: int
    mine: bool


Case = tuple[list[tuple[int, int]], list[Operation]]

operation = st.tuples(
    st.integers(*BOUNDS), st.integers(0, 25), st.sampled_from(RANKS), st.integers(0, 3), st.integers(0, 5).map(bool)
).map(lambda o: Operation(o[0], o[0] + o[1], *o[2:]))  # fmt: skip
# Neighbours of the sorted bounds: steps of any length, some without a gap between them.
steps = st.lists(st.integers(0, 60), min_size=2, max_size=6, unique=True).map(sorted).flatmap(
    lambda bounds: st.lists(st.sampled_from(list(pairwise(bounds))), min_size=1, unique=True).map(sorted)
)  # fmt: skip
cases = st.tuples(steps, st.lists(operation, max_size=12))


def windows_of(bounds: list[tuple[int, int]]) -> Windows:
    start, end = (np.array(column, np.int64) for column in zip(*bounds, strict=True))
    return Windows("range", "a range named step", start, end, start, end, end)


def operations_of(rows: list[Operation]) -> tuple[Operations, Ints, Ints]:
    """Returns the operations, the indices of this device's in the order of their starts, and the ranks of all."""
    count = len(rows)
    start, end, rank, stream, mine = (
        np.array([getattr(row, name) for row in rows], np.int64) for name in ("start", "end", "rank", "stream", "mine")
    )
    zeros, small = np.zeros(count, np.int64), np.zeros(count, np.int32)
    operations = Operations(
        start=start, end=end, device=(1 - mine).astype(np.int32), stream=stream, names=("kernel",),
        **dict.fromkeys(("correlation", "process", "graph_node", "size"), zeros),
        **dict.fromkeys(("kind", "context", "name", "copy", "continues", "resource"), small),
    )  # fmt: skip
    chosen = np.flatnonzero(mine)
    return operations, chosen[np.argsort(start[chosen], kind="stable")], rank


def rows_of(columns: Fragments | Gaps, *names: str) -> list[tuple[int, ...]]:
    """Some columns as plain rows."""
    return list(zip(*(getattr(columns, name).tolist() for name in names), strict=True))


def dissected(case: Case) -> tuple[Anatomy, Ints]:
    operations, chosen, rank = operations_of(case[1])
    return dissect_steps(windows_of(case[0]), operations, chosen, rank), chosen


def owner(rows: list[Operation], chosen: list[int], time: int) -> int:
    """By definition: of the operations at work in a nanosecond, the first of the least rank; -1 where none is."""
    working = [i for i in chosen if rows[i].start <= time < rows[i].end]
    return min(working, key=lambda i: rows[i].rank, default=NONE)  # the first of several: chosen is in order of start


@given(cases)
def test_each_part_is_the_count_of_its_nanoseconds(case: Case) -> None:
    bounds, rows = case
    anatomy, chosen = dissected(case)
    assert anatomy.parts.dtype == np.int64
    for window, (start, end) in enumerate(bounds):
        owners = [owner(rows, chosen.tolist(), time) for time in range(start, end)]
        count = [sum(i != NONE and rows[i].rank == rank for i in owners) for rank in RANKS]
        assert anatomy.parts[:, window].tolist() == [*count, owners.count(NONE)]


@given(cases)
def test_a_moment_is_shared_by_the_operations_of_its_rank(case: Case) -> None:
    bounds, rows = case
    anatomy, chosen = dissected(case)
    found: dict[tuple[int, int], float] = {}
    for one, window, share in rows_of(anatomy.fragments, "operation", "step", "exposed_ns"):
        found[window, one] = found.get((window, one), 0) + share
    for window, (start, end) in enumerate(bounds):
        expected = dict.fromkeys(chosen.tolist(), 0.0)
        for time in range(start, end):
            working = [i for i in chosen.tolist() if rows[i].start <= time < rows[i].end]
            first = [i for i in working if rows[i].rank == min(rows[j].rank for j in working)]
            for i in first:
                expected[i] += 1 / len(first)
        assert {i: found.get((window, i), 0) for i in expected} == pytest.approx(expected)


def test_what_begins_first_hides_no_matmul_behind_it() -> None:
    """[0, 100) and [20, 60): from 20 to 60 each has half of every moment, 20 of 40, so that they add up to 100."""
    rows = [Operation(0, 100, COMPUTE, 0, True), Operation(20, 60, COMPUTE, 1, True)]
    anatomy, _ = dissected(([(0, 100)], rows))
    assert anatomy.fragments.exposed_ns.tolist() == [80, 20]
    assert anatomy.parts[:, 0].tolist() == [100, 0, 0, 0]


@given(cases)
def test_fragments_are_the_operations_clipped_to_the_steps(case: Case) -> None:
    bounds, rows = case
    fragments = dissected(case)[0].fragments
    found = rows_of(fragments, "operation", "step", "start", "end", "activity")
    clipped = [
        (i, window, max(row.start, start), min(row.end, end), row.rank)
        for window, (start, end) in enumerate(bounds)
        for i, row in enumerate(rows)
        if row.mine and min(row.end, end) > max(row.start, start)
    ]
    assert sorted(found) == sorted(clipped)
    assert (np.diff(fragments.start) >= 0).all()


def idle_runs(case: Case, chosen: list[int]) -> Iterator[tuple[int, int, int, int]]:
    """By definition: start, end, step and following operation of each stretch without work."""
    bounds, rows = case
    for window, (start, end) in enumerate(bounds):
        moments = [(time, owner(rows, chosen, time) == NONE) for time in range(start, end)]
        for idle, run in groupby(moments, key=lambda moment: moment[1]):
            times = [time for time, _ in run]
            if idle:
                behind = times[-1] + 1
                lasting = [i for i in chosen if rows[i].end > rows[i].start or behind == end]
                yield times[0], behind, window, next((i for i in lasting if rows[i].start >= behind), NONE)


@given(cases)
def test_gaps_are_the_stretches_without_work(case: Case) -> None:
    anatomy, chosen = dissected(case)
    gaps = anatomy.gaps
    assert rows_of(gaps, "start", "end", "step", "next_operation") == list(idle_runs(case, chosen.tolist()))
    assert np.bincount(gaps.step, gaps.end - gaps.start, len(case[0])).tolist() == anatomy.parts[-1].tolist()


def test_a_step_worked_out_by_hand() -> None:
    """Compute [10, 30), a copy [20, 40) that shows for 10, a collective [35, 60) that shows for 20, idle 10 + 40."""
    rows = [Operation(*one, 0, True) for one in ((10, 30, COMPUTE), (20, 40, COPYING), (35, 60, COMMUNICATING))]
    anatomy, _ = dissected(([(0, 100)], rows))
    assert anatomy.parts[:, 0].tolist() == [20, 10, 20, 50]
    assert (anatomy.gaps.start.tolist(), anatomy.gaps.end.tolist()) == ([0, 60], [10, 100])
    assert anatomy.gaps.next_operation.tolist() == [0, NONE]


def test_times_as_those_of_a_clock_stay_exact() -> None:
    """Nanoseconds since 1970 need 61 bits, more than a float has: of 10 ns 7 are compute, 3 idle."""
    epoch = 1_750_000_000_000_000_000
    rows = [Operation(epoch + 1, epoch + 8, COMPUTE, 0, True)]
    anatomy, _ = dissected(([(epoch, epoch + 10)], rows))
    assert anatomy.parts[:, 0].tolist() == [7, 0, 0, 3]


# --- covers

intervals = st.lists(st.tuples(st.integers(-5, 30), st.integers(0, 8)).map(lambda i: (i[0], i[0] + i[1])), max_size=8)
moments = st.lists(st.integers(-8, 45), min_size=1, max_size=8)


@given(intervals, moments, moments)
def test_a_cover_counts_every_covered_moment_once(rows: list[tuple[int, int]], one: list[int], two: list[int]) -> None:
    start, end = np.array(sorted(rows), np.int64).reshape(-1, 2).T
    cover = Cover.from_intervals(start, end)
    covered = {time for first, last in rows for time in range(first, last)}
    assert cover.covered_before(np.array(one)).tolist() == [sum(time < bound for time in covered) for bound in one]
    pairs = [(min(pair), max(pair)) for pair in zip(one, two, strict=False)]
    low, high = np.array(pairs, np.int64).T
    assert cover.covered_within(low, high).tolist() == [sum(a <= time < b for time in covered) for a, b in pairs]
    assert (cover.start[1:] > cover.end[:-1]).all()
    assert int(cover.covered[-1]) == len(covered)
