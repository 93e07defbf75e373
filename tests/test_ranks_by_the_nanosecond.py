"""Tests the figures of several ranks against a direct count of their nanoseconds."""

from __future__ import annotations

import statistics
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from random import Random

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from msgspec import structs

from nsys_analyzer import Trace
from nsys_analyzer.analysis.attribution.processes import find_processes
from nsys_analyzer.analysis.ranges.instances import AttributedTrace
from nsys_analyzer.analysis.ranks.run import ParallelRun, RankFigures
from nsys_analyzer.analysis.ranks.runs import find_runs, join_members
from nsys_analyzer.analysis.steps.member import Member, record_members
from tests.support.program import work_of
from tests.support.ranks import Rank, one_capture, own_captures, summaries, write

#: Length of a step, ns, with room behind its collectives; one begins where the one before it ends, the first at 200.
LENGTH = 200
COMMUNICATORS = (2**63 + 5, 6)


@dataclass(frozen=True)
class Piece:
    """Work of one rank; a collective has the place of its communicator and of itself among those of its step."""

    start: int
    end: int
    launch: int
    kind: str
    step: int
    communicator: int = 0
    place: int = 0


#: The work of each rank.
Case = list[list[Piece]]


@st.composite
def cases(draw: st.DrawFn, jitter: int = 1) -> Case:
    """Two or three ranks that compute, copy and exchange in one to three steps; a collective ends on all at once.

    It does so but for ``jitter`` ns. In some steps one rank has a collective more than the others.
    """
    ranks = draw(st.integers(2, 3))
    work: Case = [[] for _ in range(ranks)]
    for step in range(draw(st.integers(1, 3))):
        at = (step + 1) * LENGTH
        for one in work:
            for kind in ("compute", "copy"):
                for begun, length in draw(st.lists(st.tuples(st.integers(0, 180), st.integers(1, 25)), max_size=3)):
                    one.append(Piece(at + begun, at + begun + length, at + begun, kind, step))
        for communicator in range(len(COMMUNICATORS)):
            least = int(step == communicator == 0)  # ranks that exchange nothing are of no run
            for row in draw(_exchanges(at, step, communicator, ranks, least, jitter)):
                for one, piece in zip(work, row, strict=True):
                    one.append(piece)
        if step and draw(st.booleans()):
            start = at + draw(st.integers(150, 180))
            work[draw(st.integers(0, ranks - 1))].append(Piece(start, start + 9, start, "collective", step, 0, 9))
    return work


@st.composite
def _exchanges(
    draw: st.DrawFn, at: int, step: int, communicator: int, ranks: int, least: int, jitter: int
) -> list[tuple[Piece, ...]]:
    """The collectives of a communicator in a step, each on every rank, one behind the other."""
    found: list[tuple[Piece, ...]] = []
    for place in range(draw(st.integers(least, 3))):
        begun = max((one.end for row in found for one in row), default=at) + draw(st.integers(2, 6))
        starts = [begun + draw(st.integers(0, 18)) for _ in range(ranks)]
        end = max(starts) + draw(st.integers(1, 12))
        ends = [end + draw(st.integers(0, jitter)) for _ in range(ranks)]
        launch = at + 2 * place + communicator
        rows = zip(starts, ends, strict=True)
        found.append(tuple(Piece(s, e, launch, "collective", step, communicator, place) for s, e in rows))
    return found


def steps_of(case: Case) -> int:
    """How many steps there are; one before the last may be empty."""
    return 1 + max(piece.step for one in case for piece in one)


def build(case: Case, ranks: list[Rank]) -> list[Rank]:
    """The captures of a case, on ranks as they come from the support."""
    for rank, pieces in zip(ranks, case, strict=True):
        for step in range(steps_of(case)):
            rank.step((step + 1) * LENGTH, (step + 2) * LENGTH)
        for number, piece in enumerate(pieces):
            if piece.kind == "compute":
                rank.kernel(piece.start, piece.end, piece.launch, stream=100 + number)
            elif piece.kind == "copy":
                rank.copy(piece.start, piece.end, piece.launch)
            else:
                which = COMMUNICATORS[piece.communicator]
                stream = 20 + piece.communicator
                rank.collective(
                    "all-reduce", piece.start, piece.end, piece.launch, communicator=which, stream=stream, size=8
                )
    return ranks


def read(ranks: Sequence[Rank]) -> list[Member]:
    """The record of each rank, without the rest of its capture's summary."""
    members: list[Member] = []
    with tempfile.TemporaryDirectory() as folder:
        for path in write(ranks, Path(folder)):
            attributed = AttributedTrace(Trace.load(path))
            for process in find_processes(attributed.trace):
                work, steps = work_of(attributed, process.global_pid)
                members += record_members(work, process, steps, path.stem)
    return members


def only(members: Sequence[Member]) -> ParallelRun:
    (join,) = join_members(members)
    return join.summarize()


# --- by definition


def exchanges(case: Case) -> dict[tuple[int, int], list[list[Piece]]]:
    """The collectives of each step and communicator, those of each rank in the order of their launches."""
    groups: dict[tuple[int, int], list[list[Piece]]] = {}
    for one in case:
        of_rank: dict[tuple[int, int], list[Piece]] = {}
        for piece in one:
            if piece.kind == "collective":
                of_rank.setdefault((piece.step, piece.communicator), []).append(piece)
        for key, pieces in of_rank.items():
            groups.setdefault(key, []).append(sorted(pieces, key=lambda piece: piece.launch))
    return groups


def steps_apart(case: Case) -> set[int]:
    """The steps in which a rank has more collectives than another one: they are left out."""
    groups = exchanges(case).items()
    return {step for (step, _), rows in groups if len(rows) < len(case) or len({len(row) for row in rows}) > 1}


def last_starts(case: Case) -> dict[Piece, int]:
    """When the last rank has started each collective of the steps that are not left out."""
    apart = steps_apart(case)
    found: dict[Piece, int] = {}
    for (step, _), rows in exchanges(case).items():
        for row in rows if step not in apart else ():
            for place, piece in enumerate(row):
                found[piece] = max(other[place].start for other in rows)
    return found


NAMES = (
    "step", "compute", "exposed_copy", "communication", "exposed_communication", "idle", "waiting", "transfer",
    "exposed_waiting", "exposed_transfer",
)  # fmt: skip


def counted(case: Case) -> Iterator[list[dict[str, int]]]:
    """Of each rank and step, the nanoseconds of each part."""
    until, last = last_starts(case), steps_of(case) - 1
    steps = range(steps_of(case))
    for pieces in case:
        of_steps = []
        for step in steps:
            count = dict.fromkeys(NAMES, 0)
            # The last step lasts until all of its work has ended.
            ends = [(step + 2) * LENGTH, *(piece.end for piece in pieces if piece.step == step == last)]
            for time in range((step + 1) * LENGTH, max(ends)):
                running = [piece for piece in pieces if piece.start <= time < piece.end]
                kinds = {piece.kind for piece in running}
                waits = all(time < until.get(piece, 0) for piece in running if piece.kind == "collective")
                count["step"] += 1
                count["compute"] += "compute" in kinds
                count["exposed_copy"] += "copy" in kinds and "compute" not in kinds
                count["idle"] += not kinds
                for prefix, counts in (("", "collective" in kinds), ("exposed_", kinds == {"collective"})):
                    count[f"{prefix}communication"] += counts
                    count[f"{prefix}waiting"] += counts and waits
                    count[f"{prefix}transfer"] += counts and not waits
            of_steps.append(count)
        yield of_steps


def ns_of(rank: RankFigures, name: str) -> float:
    """A figure in ns, of the step its median."""
    value = getattr(rank, f"{name}_ms")
    return float(getattr(value, "median", value)) * 1e6


def expected_ns(steps: list[dict[str, int]], length: float, name: str) -> float:
    """The length of a step; means of its work, and of what waits as much as makes the parts add up to that length."""
    if name == "step":
        return length
    # The means are of the steps near the median, within a hundredth of it, or those nearest to it.
    reach = max(0.01 * length, min(abs(one["step"] - length) for one in steps))
    near = [one for one in steps if abs(one["step"] - length) <= reach]
    means = {key: sum(one[key] for one in near) / len(near) for key in NAMES}
    works = means["compute"] + means["exposed_copy"]
    waits = means["step"] - works
    scale = max(length - works, 0) / waits if waits else 1
    if name == "idle" or (name.startswith("exposed_") and name != "exposed_copy"):
        return means[name] * scale
    # What is hidden is in the time of work.
    return means[name] + (scale - 1) * means.get(f"exposed_{name}", 0)


def assert_counted(run: ParallelRun, case: Case) -> None:
    """Every figure of a run is the count of its nanoseconds."""
    own: list[list[int]] = []
    apart = steps_apart(case)
    for rank, every in zip(run.ranks, counted(case), strict=True):
        steps = [one for number, one in enumerate(every) if number not in apart]
        length = float(statistics.median(one["step"] for one in steps))
        for name in NAMES:
            assert ns_of(rank, name) == pytest.approx(expected_ns(steps, length, name)), name
        own.append([one["step"] - one["exposed_waiting"] for one in steps])
        found = [one.own_ms for one in rank.steps]
        assert [ms and ms * 1e6 for ms in found] == pytest.approx(own[-1])
    first = [column.index(max(column)) for column in zip(*own, strict=True)]  # of those that are as slow
    assert [rank.slowest_steps for rank in run.ranks] == [first.count(place) for place in range(len(run.ranks))]


# --- the laws


@given(cases())
def test_every_figure_is_the_count_of_its_nanoseconds(case: Case) -> None:
    run = only(read(build(case, one_capture(len(case)))))
    assert_counted(run, case)


@given(cases(jitter=0), st.integers(0, 10**15), st.integers(0, 10**15))
def test_captures_of_their_own_count_the_same(case: Case, one: int, two: int) -> None:
    """Where collectives end at once, clocks are aligned to the nanosecond."""
    run = only(read(build(case, own_captures(len(case), offsets=[one, two]))))
    assert_counted(run, case)
    assert run.ranks[1].offset_ms == pytest.approx((two - one) / 1e6, abs=2e-7)


@given(cases(), st.integers(0, 10**15))
def test_a_clock_that_is_ahead_changes_nothing_but_its_offset(case: Case, ahead: int) -> None:
    """The times of a step are counted on its own rank's clock."""

    def run(offset: int) -> ParallelRun:
        found = only(read(build(case, own_captures(len(case), offsets=[0, offset]))))
        return structs.replace(found, ranks=tuple(replace(rank, offset_ms=0.0, shift_ns=0.0) for rank in found.ranks))

    assert run(ahead) == run(0)


@given(cases(), st.randoms(use_true_random=False))
def test_the_order_of_captures_changes_nothing(case: Case, random: Random) -> None:
    members = read(build(case, own_captures(len(case), offsets=[0, 333, 777])))
    turned = list(members)
    random.shuffle(turned)
    assert [join.summarize() for join in join_members(turned)] == [join.summarize() for join in join_members(members)]


@given(cases())
@settings(max_examples=15)
def test_the_parts_are_those_of_the_captures_steps(case: Case) -> None:
    """Each rank's parts are what the same capture says of its steps, and the losses add up to what ranks differ by.

    The capture knows of no steps that the run leaves out.
    """
    assume(not steps_apart(case))
    with tempfile.TemporaryDirectory() as folder:
        captures = summaries(write(build(case, one_capture(len(case))), Path(folder)))
    (run,) = find_runs(captures)
    for rank, capture in zip(run.ranks, captures, strict=True):
        assert capture.step is not None
        same = "compute", "exposed_copy", "exposed_communication", "idle"
        found = [ns_of(rank, name) for name in same]
        assert found == pytest.approx([getattr(capture.step, f"{name}_ms") * 1e6 for name in same])
        assert rank.step_ms.median == pytest.approx(capture.step.length_ms)
    if run.lost and run.slowest is not None and run.fastest is not None:
        own = [(one.step_ms.median or 0.0) - (one.exposed_waiting_ms or 0.0) for one in run.ranks]
        lost = sum(row.ms for row in run.lost) - run.slowed_ms
        assert lost == pytest.approx(own[run.slowest] - own[run.fastest], abs=1e-9)
