"""What a report may replace, and the timings that it finds by itself."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from nsys_analyzer.cli import cli
from nsys_analyzer.commands.writing import MARK, is_ours
from nsys_analyzer.report.plots import SOFTWARE
from tests.test_bench_command import Run, case
from tests.test_bench_command import run as run
from tests.test_report_command import HEADER, two_steps

NOTES = "# What I saw\n\nIn `nsys-analyze` the backward pass takes 60 %.\n"
PNG = b"\x89PNG\r\n\x1a\n mine"


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working folder with a capture."""
    monkeypatch.chdir(tmp_path)
    two_steps().write(tmp_path / "small_ctx256.sqlite")
    return tmp_path


def report(*words: str) -> Result:
    return CliRunner().invoke(cli, ["report", *words])


@pytest.mark.parametrize(("name", "options"), [("report.md", ()), ("out.json", ("--format", "json", "-o", "out.json"))])
def test_a_file_of_somebody_else_stays(here: Path, name: str, options: tuple[str, ...]) -> None:
    """It is refused before anything is read: the capture is not there."""
    (here / name).write_text(NOTES, encoding="utf-8")
    refused = report("absent.sqlite", *options)
    assert str(refused.exception) == (
        f"{name} was not written by nsys-analyze, and would be replaced. "
        "Name another file with -o, or replace it with --force"
    )
    assert (here / name).read_text(encoding="utf-8") == NOTES
    assert report("small_ctx256.sqlite", *options, "--force").exit_code == 0
    assert is_ours(here / name)
    assert report("small_ctx256.sqlite", *options).exit_code == 0  # and its own it replaces unasked


def test_marks(here: Path) -> None:
    report("small_ctx256.sqlite")
    assert (here / "report.md").read_text(encoding="utf-8").endswith(f"\n\n{MARK}\n")
    figures = sorted((here / "report_figures").iterdir())
    assert figures
    assert all(f"Software\0{SOFTWARE}".encode() in path.read_bytes() for path in figures)
    data = json.loads(report("small_ctx256.sqlite", "--format", "json").stdout)
    assert data["generator"] == "nsys-analyze"
    assert MARK not in report("small_ctx256.sqlite", "-o", "-").stdout
    (here / "empty.md").touch()
    assert is_ours(here / "empty.md")  # nothing is lost


def test_a_report_that_a_person_went_on_writing_is_theirs(here: Path) -> None:
    report("small_ctx256.sqlite")
    with (here / "report.md").open("a", encoding="utf-8") as file:
        file.write(NOTES * 10)
    assert not is_ours(here / "report.md")


def test_figures_of_the_older_report_go_and_others_stay(here: Path) -> None:
    report("small_ctx256.sqlite")
    figures = here / "report_figures"
    first = {path.name for path in figures.iterdir()}
    stale = figures / "of-a-capture-that-is-gone.png"
    stale.write_bytes(next(figures.iterdir()).read_bytes())
    (figures / "photo.png").write_bytes(PNG)
    assert report("small_ctx256.sqlite").exit_code == 0
    assert {path.name for path in figures.iterdir()} == {*first, "photo.png"}
    assert report("small_ctx256.sqlite", "--no-figures").exit_code == 0
    assert {path.name for path in figures.iterdir()} == {"photo.png"}


def test_a_figure_of_somebody_else_is_not_drawn_over(here: Path) -> None:
    report("small_ctx256.sqlite")
    before = (here / "report.md").read_bytes()
    figure = next((here / "report_figures").iterdir())
    figure.write_bytes(PNG)
    refused = report("small_ctx256.sqlite")
    assert f"report_figures/{figure.name} was not written by nsys-analyze" in str(refused.exception)
    assert (figure.read_bytes(), (here / "report.md").read_bytes()) == (PNG, before)
    assert report("small_ctx256.sqlite", "--force").exit_code == 0
    assert is_ours(figure)


@pytest.mark.parametrize("profiled", [["--profiler", "none"], []])
def test_a_sweep_is_refused_before_it_runs(here: Path, profiled: list[str]) -> None:
    (here / "runs").mkdir()
    (here / "runs/report.md").write_text(NOTES, encoding="utf-8")
    words = ["run", "--model", "small", "--device", "cpu", *profiled]
    refused = CliRunner().invoke(cli, words)
    assert str(refused.exception) == (
        "runs/report.md was not written by nsys-analyze, and would be replaced. "
        "Move it away, or name another --output-dir"
    )
    assert [path.name for path in (here / "runs").iterdir()] == ["report.md"]


def test_a_bench_is_refused_before_it_runs(run: Run, tmp_path: Path) -> None:
    (tmp_path / "b").mkdir()
    (tmp_path / "b/test.md").write_text(NOTES, encoding="utf-8")
    with pytest.raises(Exception, match=r"test\.md was not written by nsys-analyze"):
        run(case("ok"))
    assert [path.name for path in (tmp_path / "b").iterdir()] == ["test.md"]
    (tmp_path / "b/test.md").unlink()
    run(case("ok"))
    assert run(case("ok"), resume=True) == ("ok ok", True)  # its own section it replaces


def test_what_is_no_file_is_not_replaced(here: Path) -> None:
    (here / "pipe.md").symlink_to("/dev/null")
    assert "pipe.md is no file" in str(report("small_ctx256.sqlite", "-o", "pipe.md").exception)
    assert (here / "pipe.md").is_symlink()


# --- timings ---


def timed(folder: Path, mean_ms: float = 3.2) -> Path:
    """A folder with a capture whose forward takes 4 ms, and its unprofiled time."""
    folder.mkdir(exist_ok=True)
    two_steps().write(folder / "small_ctx256.sqlite")
    rows = f"small,256,4,fp32,train,forward,10,{mean_ms},0.1,ok\n"
    (folder / "timings.csv").write_text(HEADER + rows, encoding="utf-8")
    return folder


def test_the_timings_of_a_folder_are_used_and_named(here: Path) -> None:
    """4 ÷ 3.2 - 1 = 25 %; with another file named, 4 ÷ 2 - 1 = 100 %."""
    timed(here / "sweep")
    timed(here / "other", 2.0)
    found = report("sweep", "-o", "-")
    assert "forward +25.0 %" in found.stdout.replace("\N{NO-BREAK SPACE}", " ")
    assert found.stderr == "Unprofiled times: sweep/timings.csv; --csv names others.\n"
    assert "**timings.csv:** Found in the captures' folder and used; `--csv` names another." in found.stdout
    named = report("sweep", "--csv", "other/timings.csv", "-o", "-")
    assert "forward +100.0 %" in named.stdout.replace("\N{NO-BREAK SPACE}", " ")
    assert named.stderr == ""
    alone = report("sweep/small_ctx256.sqlite", "-o", "-")  # a file stands for itself
    assert "unprofiled timing" not in alone.stdout


def test_two_folders_with_timings(here: Path) -> None:
    found = report(str(timed(here / "a")), str(timed(here / "b")), "-o", "-")
    assert found.exit_code == 0
    assert found.stderr == "Several folders have a timings.csv, and none is used: name one with --csv.\n"


def test_timings_that_cannot_be_read_are_left_out(here: Path) -> None:
    (timed(here / "sweep") / "timings.csv").write_text("a,b\n1,2\n", encoding="utf-8")
    found = report("sweep", "-o", "-")
    assert found.exit_code == 0
    assert found.stderr.startswith("Left out, as it cannot be read: sweep/timings.csv")
