"""Tests cases in processes of their own: what remains after an out-of-memory, a crash, a time-out or an interrupt."""

import json
import resource
from pathlib import Path
from typing import Any

import pytest

from nsys_analyzer.capture.jobs import LOG, run_cases, select_remaining_cases
from nsys_analyzer.errors import ConfigurationError, NoSpaceError
from nsys_analyzer.inputs.rows import ROWS_FILE, CaseTarget, Row, Task, append_command, read_rows_file, start_rows_file
from nsys_analyzer.system.process import JobResult, Progress
from tests.support.sweeping import let_time_pass

TARGET: CaseTarget[Any, Any] = CaseTarget("tests.support.case_target")


def case(ends: str, number: int = 0, **more: Any) -> Task[Any]:
    return Task(TARGET, {"ends": ends, "number": number, **more}, f"{ends} {number}")


class Runner:
    """Runs cases in a folder, and keeps what was told of them."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.told: list[str] = []
        start_rows_file(folder, {"bench": "test"})

    def run(self, *cases: Task[Any], timeout_s: float = 300) -> tuple[Row[Any, Any], ...]:
        def ended(name: str, end: JobResult, _: float) -> None:
            self.told.append(f"{name}: {end.status}")

        run_cases(cases, self.folder, timeout_s, Progress(lambda *_: None, ended))
        return read_rows_file(self.folder / ROWS_FILE)[1]


@pytest.fixture
def runner(tmp_path: Path) -> Runner:
    return Runner(tmp_path)


def test_cases_of_one_target_share_a_process(runner: Runner) -> None:
    rows = runner.run(case("ok", 1), case("ok", 2))
    assert [row.status for row in rows] == ["ok", "ok"]
    assert len({row.figures["pid"] for row in rows}) == 1
    assert runner.told == ["ok 1: ok", "ok 2: ok"]
    assert sorted(path.name for path in runner.folder.iterdir()) == [ROWS_FILE, "target.log"]  # nothing hidden is left


@pytest.mark.parametrize("after", [0, 0.6])  # the row is read at the end of the process, and while it still runs
def test_out_of_memory_leaves_the_rest_to_a_fresh_process(runner: Runner, after: float) -> None:
    rows = runner.run(
        case("ok", 1), case("oom", 2, after=after), case("ok", 3), case("failed", 4, after=after), case("ok", 5)
    )
    assert [row.status for row in rows] == ["ok", "oom", "ok", "failed", "ok"]
    assert len({row.figures["pid"] for row in rows}) == 3


def test_a_process_that_dies_gives_its_case_a_row(runner: Runner) -> None:
    rows = runner.run(case("ok", 1), case("dies", 2), case("ok", 3))
    assert [row.status for row in rows] == ["ok", "oom", "ok"]
    assert rows[1].message == "MemoryError: no room"


def test_the_time_of_a_case_begins_with_it(runner: Runner, monkeypatch: pytest.MonkeyPatch) -> None:
    """The limit of 2 s is for each case: three cases of 1.5 s each end in one process of 4.5 s."""
    rows_file, log = runner.folder / ROWS_FILE, runner.folder / LOG

    def seconds() -> float:
        return 1.5 * rows_file.read_text().count("\n") + 10 * (log.exists() and "hangs" in log.read_text())

    let_time_pass(monkeypatch, seconds)
    rows = runner.run(*(case("ok", n, after=0.3) for n in range(3)), case("hangs", 4), case("ok", 5), timeout_s=2)
    assert [row.status for row in rows] == ["ok", "ok", "ok", "timeout", "ok"]
    assert rows[3].message == "stopped after 2 s"


def test_what_remains(runner: Runner) -> None:
    cases = [case("ok", 1), case("oom", 2), case("failed", 3)]
    rows = runner.run(*cases)
    assert select_remaining_cases([*cases, case("ok", 4)], rows) == [cases[2], case("ok", 4)]


def test_a_second_try_takes_the_place_of_the_first(runner: Runner) -> None:
    with (runner.folder / ROWS_FILE).open("a") as file:
        for status in ("failed", "ok"):
            row = {"module": "m", "case": {"n": 1}, "environment": {}, "status": status, "message": None}
            file.write(json.dumps(row) + "\n")
    assert [row.status for row in read_rows_file(runner.folder / ROWS_FILE)[1]] == ["ok"]


def test_a_line_that_was_cut_off_is_passed_over_and_cut(runner: Runner) -> None:
    runner.run(case("ok", 1))
    with (runner.folder / ROWS_FILE).open("a") as file:
        file.write('{"module": "m", "ca')
    assert len(read_rows_file(runner.folder / ROWS_FILE)[1]) == 1
    append_command(runner.folder, "nsys-analyze bench test --resume")
    assert len(runner.run(case("ok", 2))) == 2
    assert read_rows_file(runner.folder / ROWS_FILE)[0]["runs"] == ["nsys-analyze bench test --resume"]


def test_what_a_killed_run_gave_its_process_goes(runner: Runner) -> None:
    (runner.folder / f".{'a1' * 16}.cases.json").write_text("[]")
    (runner.folder / f".{'b2' * 16}.rows.jsonl").write_text("")
    (runner.folder / ".mine.cases.json").write_text("mine")
    runner.run(case("ok", 1))
    assert sorted(path.name for path in runner.folder.iterdir()) == [".mine.cases.json", ROWS_FILE, "target.log"]


def test_a_full_disk_keeps_whole_rows_and_names_the_file(runner: Runner) -> None:
    runner.run(case("ok", 1))
    before = (runner.folder / ROWS_FILE).read_bytes()
    limit = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (len(before) + 20, limit[1]))
    try:
        with pytest.raises(NoSpaceError, match=rf"{ROWS_FILE} cannot be written \(File too large\): it needs \d+\xa0B"):
            runner.run(case("ok", 2))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limit)
    assert (runner.folder / ROWS_FILE).read_bytes() == before


@pytest.mark.parametrize("text", ["", "no JSON\n", '{"schema_version": 1}\n', '{"bench": "x"}\n', "[]\n"])
def test_another_file_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / ROWS_FILE).write_text(text)
    with pytest.raises(ConfigurationError, match=r"was not written by nsys-analyze bench"):
        read_rows_file(tmp_path / ROWS_FILE)
