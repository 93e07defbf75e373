"""Ranks in the report: JSON, markdown and the terminal, for one capture of all and for a capture of each."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from nsys_analyzer.analysis.ranks.join import JoinedRanks, join_members
from nsys_analyzer.analysis.steps.member import Member
from nsys_analyzer.inputs.gather import gather
from nsys_analyzer.report.facts import say_all
from nsys_analyzer.text import plain
from tests.conftest import Main
from tests.support.export import global_tid
from tests.support.hostile import controls
from tests.support.ranks import Rank, one_capture, own_captures, write
from tests.support.rows import unpadded
from tests.test_lines import AHEAD, write_stacks

US = 1_000
STEP = 1_000 * US
STATS = ("n", "mean", "std", "min", "median", "max")


def late(ranks: Sequence[Rank], name: str = "step", communicator: int = 5) -> list[Rank]:
    """Rank 1 computes 100 µs more: the others wait from 200 to 300, and all transfer from 300 to 400."""
    for number in range(3):
        at = number * STEP
        for rank in ranks:
            ready = at + (300 if rank.number == 1 else 200) * US
            rank.step(at, at + STEP, name.format(number)).step(at + 10 * US, at + 990 * US, "backward")
            rank.kernel(at + 20 * US, ready).collective("all-reduce", ready, at + 400 * US, communicator=communicator)
    return list(ranks)


@pytest.fixture
def together(tmp_path: Path) -> list[Path]:
    return write(late(one_capture(2)), tmp_path, "both")


@pytest.fixture
def apart(tmp_path: Path) -> list[Path]:
    return write(late(own_captures(2, offsets=[0, 5_000_000])), tmp_path)


def data(run_main: Main, *arguments: object) -> dict[str, Any]:
    done = run_main("report", *arguments, "--format", "json")
    assert done.code == 0, done.err
    read: dict[str, Any] = json.loads(done.out)
    return read


def assert_late(found: dict[str, Any], captures: list[str], *, one_clock: bool = False) -> None:
    """What JSON says of the example, whatever its captures."""
    parts = "compute_ms", "communication_ms", "exposed_communication_ms", "waiting_ms", "transfer_ms", "idle_ms"
    expected = [[0.18, 0.2, 0.2, 0.1, 0.1, 0.62], [0.28, 0.1, 0.1, 0.0, 0.1, 0.62]]
    for number, (row, capture, values) in enumerate(zip(found["ranks"], captures, expected, strict=True)):
        assert (row["rank"], row["capture"], row["device"]) == (number, capture, number)
        assert {key: row["step_ms"][key] for key in STATS} == {**dict.fromkeys(STATS, 1.0), "n": 3, "std": 0.0}
        assert [row[name] for name in parts] == pytest.approx(values)
        assert row["offset_ms"] == pytest.approx(0 if one_clock else 5 * number)
    said = {"slowest_position": 1, "fastest_position": 0, "world_size": 2, "missing_ranks": []}
    assert {key: found[key] for key in said} == said
    assert found["skew_ms"] == pytest.approx(0.1)
    assert found["clocks"]["one_clock"] is one_clock
    (row,) = found["collectives"]
    assert (row["kind"], row["bytes"], row["count"], row["ranks"]) == ("all-reduce", 1 << 20, 1, 2)
    assert row["bus_bytes_per_s"] == pytest.approx((1 << 20) / 100e-6)


def test_json_of_one_capture(run_main: Main, together: list[Path]) -> None:
    found = data(run_main, *together)
    assert_late(found, ["both", "both"], one_clock=True)
    assert len(found["captures"]) == 2


def test_json_of_a_capture_of_each_rank(run_main: Main, apart: list[Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """In any order, or by their folder; they are joined once, though the findings of the run are the captures', too."""
    joins = []

    def counted(members: Sequence[Member]) -> list[JoinedRanks]:
        joins.append(len(members))
        return join_members(members)

    monkeypatch.setattr("nsys_analyzer.analysis.ranks.join.join_members", counted)
    found = data(run_main, *apart)
    assert joins == [2]
    assert_late(found, ["rank0", "rank1"])
    assert data(run_main, *reversed(apart)) == data(run_main, apart[0].parent) == found


def test_json_of_a_folder_of_each_rank(run_main: Main, tmp_path: Path) -> None:
    places = [tmp_path / "rank0", tmp_path / "rank1"]
    for rank, place in zip(late(own_captures(2, offsets=[0, 5_000_000])), places, strict=True):
        place.mkdir()
        rank.export.write(place / "trace.sqlite")
    found = data(run_main, *places)
    assert_late(found, [row["name"] for row in found["captures"]])


def test_json_of_two_runs_and_of_none(run_main: Main, tmp_path: Path, step_trace: Path) -> None:
    """That of three ranks comes first, the other one stands beside it."""
    (tmp_path / "two").mkdir()
    two = write(late(own_captures(2)), tmp_path / "two", "two{}")
    found = data(run_main, *two, *write(late(own_captures(3), "step", 6), tmp_path))
    assert [row["rank"] for row in found["ranks"]] == [0, 1, 2]
    (other,) = found["other_runs"]
    assert [row["capture"] for row in other["ranks"]] == ["two0", "two1"]
    assert not {"ranks", "slowest_position", "skew_ms", "collectives"} & set(data(run_main, step_trace))


def page(run_main: Main, tmp_path: Path, *paths: Path) -> tuple[str, str]:
    """What a report's page says of the ranks, and what the terminal says."""
    done = run_main("report", *paths, "-o", tmp_path / "report.md", "--no-figures")
    assert done.code == 0, done.err
    text = unpadded((tmp_path / "report.md").read_text(encoding="utf-8")).replace("\N{NO-BREAK SPACE}", " ")
    _, title, section = text.partition("## Ranks")
    return (section if title else text).partition("\n## ")[0], unpadded(done.out + done.err)


def test_the_page_of_one_capture_and_of_one_of_each_rank(
    run_main: Main, together: list[Path], apart: list[Path], tmp_path: Path
) -> None:
    for paths, clocks in (
        (together, ["All ranks use one clock: "]),
        (apart, ["aligned on the ends of 3 collectives that the ranks share"]),
    ):
        section, terminal = page(run_main, tmp_path, *paths)
        for said in (
            "2 ranks, data parallel (DDP): 1 ms per step under the profiler.",
            "Rank 1 is late by 0.1 ms in 3 of 3 steps. Its largest loss is 0.1 ms of compute (matmul) in backward.",
            "A step of rank 0 has 0.2 ms of exposed communication, 20 % of the step: 0.1 ms of it is waiting.",
            "| rank 0 | 1.000 | 0.180 | 0.100 | 0.100 | 0.620 | 0.000 | 0.900 | 0.000 |",
            "| rank 1 | 1.000 | 0.280 | 0.000 | 0.100 | 0.620 | 0.000 | 1.000 | 0.100",
            *clocks,
        ):
            assert said in section
        assert "Rank 1 is late by 0.1 ms" in " ".join(terminal.split())


def test_the_page_of_a_rank_alone(run_main: Main, apart: list[Path], tmp_path: Path) -> None:
    section, terminal = page(run_main, tmp_path, apart[0])
    for text in (section, " ".join(terminal.split())):
        assert "It is not known which rank waits for which." in text
    assert "There is no capture of rank 1: which ranks wait for it is unknown." in section
    assert "own time" not in section.partition("- For each rank,")[0]  # no table has a column of unknown figures
    section, _ = page(run_main, tmp_path, *write(late(own_captures(1, "none")), tmp_path, "unknown"))
    assert "1 device, data parallel (DDP)" in section
    assert "--include-blobs=true" in section


def test_the_page_of_ranks_that_share_no_step(run_main: Main, tmp_path: Path) -> None:
    ranks = own_captures(2)
    late(ranks[:1], "step {}")
    for number in range(3):
        ranks[1].step(number * STEP, (number + 1) * STEP, f"step {number + 7}")
        ranks[1].collective("all-reduce", number * STEP + 10 * US, number * STEP + 20 * US, communicator=5)
    section, _ = page(run_main, tmp_path, *write(ranks, tmp_path))
    assert "The ranks have no step number in common" in section
    assert "It is not known which rank waits for which." in section


def test_hostile_names_act_on_nothing(run_main: Main, tmp_path: Path) -> None:
    """A step, a phase and a file with names that would turn text, end a table or start a tag."""
    ranks = late(own_captures(2), "step\x1b[31m|<script>`{}")
    paths = write(ranks, tmp_path, "a`|<b>{}")
    section, terminal = page(run_main, tmp_path, *paths)
    assert not controls(section)
    assert not controls(terminal)
    assert not re.search(r"(?<!\\)<(?:script|b)>", section)


def test_explain_says_it_too(run_main: Main, apart: list[Path]) -> None:
    done = run_main("explain", *apart)
    assert done.code == 0, done.err
    said = " ".join(done.out.split())
    assert "is late by" in said
    # The programs need the CPU for all of a step: without the lateness it would be as long, and nothing is to be saved.
    assert (
        "Without this delay, a step would hardly be shorter. The other ranks are limited by the CPU: each needs" in said
    )
    assert "All ranks wait for one" not in said


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


# --- ranks that nothing in the captures tells ---


def exposed(ranks: Sequence[Rank]) -> list[Rank]:
    """Of a step of 1000 µs 780 are a collective that nothing hides; rank 1 starts it 100 µs later."""
    for number in range(3):
        at = number * STEP
        for rank in ranks:
            ready = at + (300 if rank.number == 1 else 200) * US
            rank.step(at, at + STEP).kernel(at + 20 * US, ready, at + US)
            rank.collective("all-reduce", ready, at + 980 * US, at + 10 * US)
    return list(ranks)


def told(run_main: Main, *arguments: object) -> tuple[object, list[int | None], list[str]]:
    """What tells the ranks, those of the first run, and the findings of the captures: of one, that collectives cost."""
    found = data(run_main, *arguments)
    findings = [one["title"] for capture in found["captures"] for one in capture["findings"]]
    return found["ranks_from"], [row["rank"] for row in found["ranks"]], findings


@pytest.mark.parametrize(
    ("names", "ranks"),
    [
        (("ddp_rank{}", "ddp_rank{}"), [0, 1]),
        (("rank-{}", "rank-{}"), [0, 1]),
        (("ddp.rank{}.profile", "ddp.rank{}.profile"), [0, 1]),
        (("ddp_R{}_b", "ddp_R{}_b"), [0, 1]),
        (("rank{}", "rank{}"), [0, 1]),
        (("ddp_rank{}", "other_rank{}"), [None]),  # of two runs
        (("ddp_rank0_{}", "ddp_rank0_{}"), [None]),  # one rank twice
        (("worker{}", "worker{}"), [None]),
        (("ddp_r{}1", "ddp_r{}1"), [None]),  # two runs: r01, r11
        (("crank{}", "crank{}"), [None]),
    ],
)
def test_the_names_of_the_files_tell_the_ranks(
    run_main: Main, tmp_path: Path, names: tuple[str, str], ranks: list[int | None]
) -> None:
    of_each = zip(exposed(own_captures(2, "none")), names, strict=True)
    paths = [path for rank, name in of_each for path in write([rank], tmp_path, name)]
    said = "file names" if ranks == [0, 1] else None
    assert told(run_main, *reversed(paths)) == (said, ranks, [])
    assert told(run_main, *paths, "--ranks") == ("order of the call", [0, 1], [])
    run = data(run_main, tmp_path)
    assert any("taken from its file name" in note for note in run["run_notes"]) is bool(said)
    # Rank 1 computes 100 µs more.
    assert (run["slowest_position"], run["skew_ms"]) == ((1, pytest.approx(0.1)) if said else (None, None))


def test_a_rank_that_a_capture_tells_outranks_its_name(run_main: Main, tmp_path: Path) -> None:
    ranks = exposed(own_captures(2))
    paths = [*write(ranks[:1], tmp_path, "ddp_rank1"), *write(ranks[1:], tmp_path, "ddp_rank0")]
    found = data(run_main, *paths)
    assert [(row["rank"], row["capture"]) for row in found["ranks"]] == [(0, "ddp_rank1"), (1, "ddp_rank0")]
    assert found["ranks_from"] is None


def test_what_is_not_joined_is_said_with_the_line_to_write(
    run_main: Main, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whether collectives wait for another rank is not known of one side alone."""
    write(exposed(own_captures(2, "none")), tmp_path, "worker{}")
    monkeypatch.chdir(tmp_path)
    for words, names in (("worker1.sqlite worker0.sqlite", "worker0, worker1"), ("worker0.sqlite", "worker0")):
        said = f"The collectives of {names} could not be joined with those of another rank."
        text = " ".join(run_main("explain", *words.split()).out.split())
        assert said in text
        assert "Give the captures of all ranks, in order, with --ranks." in text
        text = " ".join(run_main("report", *words.split(), "--no-figures", "-o", "report.md").out.split())
        assert said in text  # on the first screen, too
    assert told(run_main, "worker0.sqlite") == (None, [None], [])


def test_a_process_alone_in_its_run_keeps_its_findings(run_main: Main, tmp_path: Path) -> None:
    (path,) = write(exposed(own_captures(1)), tmp_path, "alone")
    assert told(run_main, path) == (None, [0], ["Collectives take most of the step"])


def test_the_step_of_the_ranks_of_one_run(run_main: Main, apart: list[Path]) -> None:
    captures = data(run_main, *apart, "--step-ms", "0.9")["captures"]
    assert [one["unprofiled"]["phases"]["step"]["mean"] for one in captures] == [0.9, 0.9]


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
    assert run.later_than_others_ms is not None
    assert abs(run.later_than_others_ms[0]) < 0.02
    assert not any(finding.id == "late_rank" for finding in run.findings)
    assert [rank.late_unprofiled_ms for rank in run.ranks] == pytest.approx([0, 0], abs=0.02)
    asked = run_main("ask", tmp_path, "late_ms rank=1", "--step-ms", "0.4").out
    assert "a step without the profiler, replayed" in asked
    said = " ".join(run_main("explain", tmp_path, "--step-ms", "0.4").out.split()).replace("\N{NO-BREAK SPACE}", " ")
    assert (
        "0.4 ms per step (measured; profiled 0.525). No rank is late without the profiler. Under the profiler, rank 1"
        in said
    )
    assert "is late by 0.15 ms: launching limits the ranks, and the profiler makes launching slower." in said


def test_a_rank_that_is_late_without_the_profiler_too_is_named(run_main: Main, tmp_path: Path) -> None:
    """Rank 1 does something else for 150 µs in each step, whatever launching takes."""
    (run,) = gather(launching(tmp_path, (10, 0), (10, 150)), step_ms=0.45).runs
    assert run.later_than_others_ms == (pytest.approx(0.15, abs=0.01),)
    (finding,) = (finding for finding in run.findings if finding.id == "late_rank")
    assert (finding.step_ms, finding.saves_ms_high) == (0.45, pytest.approx(0.15, abs=0.01))
    said = " ".join(run_main("explain", tmp_path, "--step-ms", "0.45").out.split()).replace("\N{NO-BREAK SPACE}", " ")
    assert "Rank 1 is late by 0.15 ms without the profiler (by a replay), and by 0.15 ms under it in 4 of 4" in said


def test_a_step_without_room_for_the_waiting_under_the_profiler_is_trusted(tmp_path: Path) -> None:
    """Rank 0 is busy for 30 · 2 µs and 200 in its collective, 150 of which it waits for rank 1: no 250 µs hold that."""
    inputs = gather(launching(tmp_path, (10, 0), (15, 0)), step_ms=0.25)
    assert inputs.runs[0].unprofiled_ms == 0.25
    assert not any("not trusted" in plain(warning) for one in inputs.captures for warning in say_all(one.warnings))
