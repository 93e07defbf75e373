"""Ranks of real captures, against a plain computation: rows of the export, lists and loops, and nothing of ours."""

from __future__ import annotations

import shutil
import sqlite3
from collections import defaultdict
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import NamedTuple

import pytest

from nsys_analyzer.analysis.ranks.runs import find_runs
from nsys_analyzer.inputs.gather import gather
from tests.conftest import ROOT
from tests.support.packed import unpack
from tests.support.ranks import summaries

#: The captures, with how many steps and collectives each rank has.
CAPTURES = {
    "tests/data/ddp2_small256.sqlite.xz": (3, 57),
    "examples/programs/captures/ddp.sqlite.xz": (6, 84),
}
_PROCESS = ~0xFFFFFF


class Work(NamedTuple):
    """A kernel, a copy or a fill on the GPU, ns."""

    start: int
    end: int
    launched: int
    kind: str


class RankRows(NamedTuple):
    """The steps and the work of a process."""

    steps: list[tuple[int, int]]
    work: list[Work]


def rows_of(path: Path) -> list[RankRows]:
    """What each process of an export did, in the order of its device."""
    connection = sqlite3.connect(path)
    launched: dict[tuple[int, int], int] = {}
    for start, thread, correlation in connection.execute(
        "SELECT start, globalTid, correlationId FROM CUPTI_ACTIVITY_KIND_RUNTIME ORDER BY start DESC"
    ):
        launched[thread & _PROCESS, correlation] = start  # the outermost call, which starts first
    names = dict(connection.execute("SELECT id, value FROM StringIds"))
    work: dict[tuple[int, int], list[Work]] = defaultdict(list)
    for table, column in (("KERNEL", "demangledName"), ("MEMCPY", "0"), ("MEMSET", "0")):
        query = f"SELECT start, end, globalPid, deviceId, correlationId, {column} FROM CUPTI_ACTIVITY_KIND_{table}"
        for start, end, process, device, correlation, name in connection.execute(query):
            kind = "collective" if "nccl" in names.get(name, "") else table
            work[device, process].append(Work(start, end, launched[process, correlation], kind))
    steps: dict[int, list[tuple[int, int]]] = defaultdict(list)
    query = "SELECT start, end, globalTid FROM NVTX_EVENTS WHERE text = 'step' ORDER BY start"
    for start, end, thread in connection.execute(query):
        steps[thread & _PROCESS].append((start, end))
    return [RankRows(steps[process], sorted(rows)) for (_, process), rows in sorted(work.items())]


def to_the_next(rank: RankRows) -> RankRows:
    """From each step to the next; without the last one, where more than a tenth of a step lies between two."""
    bounds = [(one[0], other[0]) for one, other in pairwise(rank.steps)]
    between = median(other[0] - one[1] for one, other in pairwise(rank.steps))
    last = [] if between > 0.1 * median(end - start for start, end in bounds) else rank.steps[-1:]
    return rank._replace(steps=bounds + last)


def as_the_gpu_lived_it(rank: RankRows) -> RankRows:
    """The steps from the end of all work launched before them to the end of their own, where that ends late."""
    rows: list[tuple[int, int]] = []
    reached = 0
    for start, end in rank.steps:
        before = max((one.end for one in rank.work if one.launched < start), default=start)
        own = max((one.end for one in rank.work if start <= one.launched < end), default=end)
        behind = max(start, before, reached)
        reached = max(end, own, reached)
        rows.append((behind, reached))
    return rank._replace(steps=rows)


def union(intervals: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """The stretches in which one of the intervals runs."""
    found: list[tuple[int, int]] = []
    for start, end in sorted(intervals):
        if found and start <= found[-1][1]:
            found[-1] = found[-1][0], max(found[-1][1], end)
        else:
            found.append((start, end))
    return found


def length(stretches: list[tuple[int, int]], start: int, end: int) -> int:
    """The part of a step that stretches fill."""
    return sum(max(0, min(last, end) - max(first, start)) for first, last in stretches)


def last_starts(ranks: list[RankRows]) -> list[list[int]]:
    """When the last rank has started each collective: the i-th that one launches is the i-th of the other."""
    ordered = [sorted((one for one in rank.work if one.kind == "collective"), key=_launched) for rank in ranks]
    assert len({len(row) for row in ordered}) == 1
    last = [max(row[place].start for row in ordered) for place in range(len(ordered[0]))]
    found = []
    for rank, row in zip(ranks, ordered, strict=True):
        of_work = dict(zip(row, last, strict=True))
        found.append([of_work[one] for one in rank.work if one.kind == "collective"])
    return found


def _launched(one: Work) -> int:
    return one.launched


def plain_figures(ranks: list[RankRows]) -> list[dict[str, float]]:
    """Of each rank, the means of the shared steps near their median, ns; waiting is scaled to that."""
    found = []
    shared = min(len(rank.steps) for rank in ranks)
    for rank, last in zip(ranks, last_starts(ranks), strict=True):
        collectives = [one for one in rank.work if one.kind == "collective"]
        kinds = {
            "compute": [one[:2] for one in rank.work if one.kind in ("KERNEL", "MEMSET")],
            "work": [one[:2] for one in rank.work if one.kind != "collective"],
            "busy": [one[:2] for one in rank.work],
            "communication": [one[:2] for one in collectives],
            # transferring, from the last rank's start on, and that together with work that hides it
            "transfer": [(max(one.start, at), one.end) for one, at in zip(collectives, last, strict=True)],
        }
        kinds["transfer or work"] = kinds["transfer"] + kinds["work"]
        stretches = {name: union(intervals) for name, intervals in kinds.items()}
        steps = rank.steps[:shared]
        step = median(end - start for start, end in steps)
        reach = max(0.01 * step, min(abs(end - start - step) for start, end in steps))
        near = [(start, end) for start, end in steps if abs(end - start - step) <= reach]
        sums = {name: sum(length(rows, *one) for one in near) / len(near) for name, rows in stretches.items()}
        mean = sum(end - start for start, end in near) / len(near)
        exposed, waits = sums["busy"] - sums["work"], sums["busy"] - sums["transfer or work"]
        longer = (step - sums["work"]) / (mean - sums["work"])
        found.append(
            {
                "step": step,
                "compute": sums["compute"],
                "exposed_copy": sums["work"] - sums["compute"],
                "communication": sums["communication"] + (longer - 1) * exposed,
                "exposed_communication": longer * exposed,
                "idle": longer * (mean - sums["busy"]),
                "transfer": sums["transfer"] + (longer - 1) * (exposed - waits),
                "waiting": sums["communication"] - sums["transfer"] + (longer - 1) * waits,
                "exposed_transfer": longer * (exposed - waits),
                "exposed_waiting": longer * waits,
            }
        )
    return found


@pytest.mark.parametrize(("name", "count"), CAPTURES.items())
def test_every_figure_is_that_of_a_plain_computation(name: str, count: tuple[int, int], tmp_path: Path) -> None:
    path = unpack(ROOT / name, tmp_path)
    captures = summaries([path])
    (run,) = find_runs(captures)
    ranks = rows_of(path)
    assert [(len(one.steps), sum(row.kind == "collective" for row in one.work)) for one in ranks] == [count] * 2
    # Which bounds the steps have is another question, answered by the steps of each capture.
    on_gpu = [capture.step.on_gpu_timeline for capture in captures if capture.step]
    ranks = [
        as_the_gpu_lived_it(to_the_next(rank)) if late else to_the_next(rank)
        for rank, late in zip(ranks, on_gpu, strict=True)
    ]
    for rank, figures in zip(run.ranks, plain_figures(ranks), strict=True):
        for part, ns in figures.items():
            value = getattr(rank, f"{part}_ms")
            found = value.median if part == "step" else value
            assert found * 1e6 == pytest.approx(ns, abs=0.01), (rank.label, part)


def test_the_late_rank_of_a_real_run(tmp_path: Path) -> None:
    """Device 1 waits for device 0: the same 19 collectives of a step take 2.5 ms on one and 80.4 ms on the other.

    Of the last step of device 1 the time to a next one is not known: two steps are of both.
    """
    (run,) = find_runs(summaries([unpack(ROOT / "tests/data/ddp2_small256.sqlite.xz", tmp_path)]))
    first, second = run.ranks
    assert run.slowest_rank is first
    assert first.communication_ms == pytest.approx(2.46, abs=0.05)
    assert second.communication_ms == pytest.approx(80.4, abs=0.05)
    assert first.exposed_communication_ms == pytest.approx(2.2, abs=0.05)
    assert second.exposed_communication_ms == pytest.approx(56.2, abs=0.05)
    assert sum(row.count for row in run.collectives) == 19
    assert first.slowest_steps == run.steps == 2


@pytest.mark.parametrize("name", CAPTURES)
def test_the_ends_of_a_real_collective_agree(name: str, tmp_path: Path) -> None:
    """Which is what clocks are aligned by: to 10 µs on one clock. No rank waits longer than its collectives run."""
    (run,) = find_runs(summaries([unpack(ROOT / name, tmp_path)]))
    assert run.alignment
    assert run.alignment.one_clock
    assert run.alignment.spread_ms < 0.020
    for rank in run.ranks:
        assert rank.step_ms.median is not None
        parts = rank.compute_ms + rank.exposed_copy_ms + rank.exposed_communication_ms + rank.idle_ms
        assert parts == pytest.approx(rank.step_ms.median, abs=1e-6)
        waiting, exposed = rank.waiting_ms or 0.0, rank.exposed_waiting_ms or 0.0
        assert 0 <= exposed <= waiting <= rank.communication_ms
        assert rank.exposed_communication_ms <= rank.communication_ms


def test_a_rank_whose_first_step_is_not_whole(tmp_path: Path, real_capture: Callable[[str], Path]) -> None:
    """It lacks a kernel of a collective there, so that its second step is the first that is measured.

    That one is the other rank's second step all the same: the waiting of the two ranks is that of this step.
    """
    path = shutil.copyfile(real_capture("ddp2_small256"), tmp_path / "t.sqlite")
    (before,) = gather([path]).runs
    with sqlite3.connect(path) as connection:
        of_process = "(SELECT globalTid & ~16777215 FROM NVTX_EVENTS WHERE text = 'step' ORDER BY start LIMIT 1)"
        nccl = f"shortName IN (SELECT id FROM StringIds WHERE value LIKE '%nccl%') AND globalPid = {of_process}"
        connection.execute(
            "DELETE FROM CUPTI_ACTIVITY_KIND_KERNEL WHERE rowid = "
            f"(SELECT rowid FROM CUPTI_ACTIVITY_KIND_KERNEL WHERE {nccl} ORDER BY start LIMIT 1 OFFSET 2)"
        )
    (after,) = gather([path]).runs
    for old, new in zip(before.ranks, after.ranks, strict=True):
        second = next(step for step in old.steps if step.number == 1)
        assert [step.number for step in new.steps] == [1]
        waiting = [step.step_ms - (step.own_ms or 0.0) for step in (new.steps[0], second)]
        assert waiting[0] == pytest.approx(waiting[1], rel=0.01, abs=0.01)
