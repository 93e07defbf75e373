"""Ranks in the report: JSON, markdown and the terminal, for one capture of all and for a capture of each."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from msgspec import structs

from nsys_analyzer.analysis.ranks.join import JoinedRanks, join_members
from nsys_analyzer.analysis.steps.member import Member
from nsys_analyzer.inputs.gather import gather
from nsys_analyzer.report.facts import say_all
from nsys_analyzer.text import plain
from tests.conftest import Main
from tests.support.commands import make_command_test, section
from tests.support.export import Export, global_tid
from tests.support.hostile import controls
from tests.support.ranks import Noted, Rank, one_capture, own_captures, write
from tests.support.rows import unpadded
from tests.test_lines import AHEAD, write_stacks

US = 1_000
STEP = 1_000 * US


def late(ranks: Sequence[Rank], name: str = "step", communicator: int = 5) -> list[Rank]:
    """Rank 1 computes 100 µs more: the others wait from 200 to 300, and all transfer from 300 to 400."""
    for number in range(3):
        at = number * STEP
        for rank in ranks:
            ready = at + (300 if rank.number == 1 else 200) * US
            rank.step(at, at + STEP, name.format(number)).step(at + 10 * US, at + 990 * US, "backward")
            rank.kernel(at + 20 * US, ready).collective("all-reduce", ready, at + 400 * US, communicator=communicator)
    return list(ranks)


def exposed(ranks: Sequence[Rank]) -> list[Rank]:
    """Of a step of 1000 µs 780 are a collective that nothing hides; rank 1 starts it 100 µs later."""
    for number in range(3):
        at = number * STEP
        for rank in ranks:
            ready = at + (300 if rank.number == 1 else 200) * US
            rank.step(at, at + STEP).kernel(at + 20 * US, ready, at + US)
            rank.collective("all-reduce", ready, at + 980 * US, at + 10 * US)
    return list(ranks)


def numbered(number: int) -> Export:
    """The capture of a rank whose steps have the numbers 0 to 2, or 7 to 9 for rank 1."""
    rank = own_captures(2)[number]
    if number == 0:
        return late([rank], "step {}")[0].export
    for place in range(3):
        rank.step(place * STEP, (place + 1) * STEP, f"step {place + 7}")
        rank.collective("all-reduce", place * STEP + 10 * US, place * STEP + 20 * US, communicator=5)
    return rank.export


def late_export(number: int, count: int, noted: Noted = "json", communicator: int = 5) -> Export:
    ranks = own_captures(count, noted, offsets=[5_000_000 * rank for rank in range(count)])
    return late(ranks, communicator=communicator)[number].export


def part_on_ranks(text: str) -> str:
    """What a report says of the ranks: in a section of theirs, or before the first one."""
    return section(text, "Ranks") if "\n## Ranks" in text else text.partition("\n## ")[0]


test_ranks_report = make_command_test("ranks_report", builders={
    "late": late_export, "numbered": numbered, "both": lambda: late(one_capture(2))[0].export,
    "exposed": lambda number, count, noted="none": exposed(own_captures(count, noted))[number].export,
}, figures={
    "titles": lambda ended: [
        finding["title"] for capture in json.loads(ended.out)["captures"] for finding in capture["findings"]
    ],
    "ranks": lambda ended: " ".join(part_on_ranks(ended.out).split()),
    "tables_of_ranks": lambda ended: part_on_ranks(ended.out).partition("- For each rank,")[0],
})  # fmt: skip


@pytest.fixture
def apart(tmp_path: Path) -> list[Path]:
    return write(late(own_captures(2, offsets=[0, 5_000_000])), tmp_path)


def data(run_main: Main, *arguments: object) -> dict[str, Any]:
    done = run_main("report", *arguments, "--format", "json")
    assert done.code == 0, done.err
    read: dict[str, Any] = json.loads(done.out)
    return read


def test_json_of_a_capture_of_each_rank(run_main: Main, apart: list[Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """In any order, or by their folder; they are joined once, though the findings of the run are the captures', too."""
    joins: list[int] = []

    def counted(members: Sequence[Member]) -> list[JoinedRanks]:
        joins.append(len(members))
        return join_members(members)

    monkeypatch.setattr("nsys_analyzer.analysis.ranks.runs.join_members", counted)
    data(run_main, *apart)
    assert joins == [2]
    assert data(run_main, *reversed(apart)) == data(run_main, apart[0].parent) == data(run_main, *apart)


def test_hostile_names_act_on_nothing(run_main: Main, tmp_path: Path) -> None:
    """A step, a phase and a file with names that would turn text, end a table or start a tag."""
    ranks = late(own_captures(2), "step\x1b[31m|<script>`{}")
    paths = write(ranks, tmp_path, "a`|<b>{}")
    done = run_main("report", *paths, "-o", tmp_path / "report.md", "--no-figures")
    assert not controls(unpadded(done.out + done.err))
    on_ranks = part_on_ranks((tmp_path / "report.md").read_text(encoding="utf-8").replace("\N{NO-BREAK SPACE}", " "))
    assert not controls(on_ranks)
    assert not re.search(r"(?<!\\)<(?:script|b)>", on_ranks)


def test_the_line_that_makes_a_rank_late(run_main: Main, tmp_path: Path) -> None:
    """Rank 1 sleeps for 300 µs of each step before it launches anything; its stack was sampled meanwhile."""
    ranks = own_captures(2)
    for at in range(0, 3 * STEP, STEP):
        for rank in ranks:
            ready = at + (420 if rank.number else 120) * US
            rank.step(at, at + STEP).kernel(ready - 20 * US, ready, ready - 25 * US)
            rank.collective("all-reduce", ready, at + 500 * US, ready - 10 * US)
            rank.copy(at + 510 * US, at + 520 * US)
    ranks[1].step(-10 * US, -9 * US, f"nsys-analyze clock {ranks[1].pid} {AHEAD - 10 * US}")
    paths = write(ranks, tmp_path)
    asleep = [at + number * 1_000.0 for number in range(3) for at in (100, 200, 300)]
    write_stacks(tmp_path, [(at, at, (1, 0)) for at in asleep], pid=ranks[1].pid)
    (tmp_path / "t.stacks.gz").rename(paths[1].with_suffix(".stacks.gz"))
    said = " ".join(run_main("explain", *paths).out.split())
    assert "in 3 of 3 steps. Its largest loss is 0.3 ms of idle time (other CPU work, train.py:30)" in said
    (row, *_) = data(run_main, *paths)["lost"]
    assert [(line["line"], line["called_from"]) for line in row["lines"]] == [(30, "train.py:9")]


# --- the pace without the profiler


def launching(folder: Path, *ranks: tuple[int, int]) -> list[Path]:
    """Four steps that launching limits: 30 kernels so many µs apart, a pause, an all-reduce, and a wait for it."""
    run, at = own_captures(len(ranks)), 0
    for number in range(4):
        ready = [at + (10 + 30 * gap + pause) * US for gap, pause in ranks]
        end = max(ready) + 55 * US
        for rank, (gap, _), begin in zip(run, ranks, ready, strict=True):
            rank.step(at, end + 10 * US, f"step {number}").step(at + US, end, "backward")
            for place in range(30):
                launched = at + (10 + place * gap) * US
                rank.kernel(launched + 5 * US, launched + 7 * US, launched)
            rank.collective("all-reduce", begin + 5 * US, end, begin)
            rank.export.add(
                "CUPTI_ACTIVITY_KIND_RUNTIME", start=begin + 2 * US, end=end + 2 * US, correlationId=900 + number,
                globalTid=global_tid(rank.pid, rank.pid), returnValue=0,
                nameId=rank.export.string("cudaDeviceSynchronize_v3020"),
            )  # fmt: skip
        at = end + 10 * US
    return write(run, folder)


def test_a_rank_that_only_the_profiler_makes_late_is_not_named(run_main: Main, tmp_path: Path) -> None:
    """Each launch of rank 1 takes 15 µs in place of 10: 450 µs in place of 300, and a step 10 + 450 + 55 + 10 µs.

    Without the profiler a step takes 0.4 ms; where both launch at one pace neither is late.
    """
    (run,) = gather(launching(tmp_path, (10, 0), (15, 0)), step_ms=0.4).runs
    assert (run.unprofiled_ms, run.slowest) == (0.4, 1)
    assert run.skew_ms == pytest.approx(0.15)
    assert not run.is_late
    assert not any(finding.id == "late_rank" for finding in run.findings)
    assert [rank.late_unprofiled_ms for rank in run.ranks] == pytest.approx([0, 0], abs=0.02)
    asked = run_main("ask", tmp_path, "late_ms rank=1", "--step-ms", "0.4").out
    assert "a step without the profiler, replayed" in asked
    said = " ".join(run_main("explain", tmp_path, "--step-ms", "0.4").out.split()).replace("\N{NO-BREAK SPACE}", " ")
    assert "A step takes 0.4 ms (measured without the profiler). Launching limits the step (" in said
    assert "No rank is late without the profiler. Rank 1 is late by 0.15 ms only under the profiler," in said
    assert "fitted to its own measured step, a step of all ranks takes 0.4 ms. The measured step takes 0.4 ms." in said


def test_a_rank_that_is_late_without_the_profiler_too_is_named(run_main: Main, tmp_path: Path) -> None:
    """Rank 1 does something else for 150 µs in each step, whatever launching takes."""
    (run,) = gather(launching(tmp_path, (10, 0), (10, 150)), step_ms=0.45).runs
    assert run.is_late
    assert run.late_bounds_ms == pytest.approx((0.15, 0.15), abs=0.01)
    assert run.replayed
    varying = structs.replace(run, replayed=replace(run.replayed, spread_ms=0.16))
    assert not varying.is_late  # steps vary by more than the delay of 0.15 ms
    (finding,) = (finding for finding in run.findings if finding.id == "late_rank")
    assert (finding.step_ms, finding.saves_ms_high) == (0.45, pytest.approx(0.15, abs=0.01))
    said = " ".join(run_main("explain", tmp_path, "--step-ms", "0.45").out.split()).replace("\N{NO-BREAK SPACE}", " ")
    assert (
        "Rank 1 is late by 0.15 ms without the profiler (from a replay). Under the profiler, it is late by 0.15 ms in 4"
        in said
    )


def test_a_step_without_room_for_the_waiting_under_the_profiler_is_trusted(tmp_path: Path) -> None:
    """Rank 0 is busy for 30 · 2 µs and 200 in its collective, 150 of which it waits for rank 1: no 250 µs hold that."""
    inputs = gather(launching(tmp_path, (10, 0), (15, 0)), step_ms=0.25)
    assert inputs.runs[0].unprofiled_ms == 0.25
    assert not any("not trusted" in plain(warning) for one in inputs.captures for warning in say_all(one.warnings))
