"""Tests which files a report may replace, and which unprofiled times it finds by itself."""

from __future__ import annotations

import errno
import json
import os
import re
import stat
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from nsys_analyzer.cli.main import cli
from nsys_analyzer.errors import NoSpaceError
from nsys_analyzer.report.figures import SOFTWARE_NAME
from nsys_analyzer.report.renderers import RENDERERS
from nsys_analyzer.report.writing import is_ours
from tests.support.export import Export, training_step
from tests.support.kineto import Kineto
from tests.test_bench_command import Run, case
from tests.test_bench_command import run as run
from tests.test_report_command import HEADER, two_steps

MARK = RENDERERS["markdown"].mark
NOTES = "# What I saw\n\nIn `nsys-analyze` the backward pass takes 60 %.\n"
PNG = b"\x89PNG\r\n\x1a\n mine"


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working folder with a capture."""
    monkeypatch.chdir(tmp_path)
    two_steps().write(tmp_path / "small_ctx256.sqlite")
    return tmp_path


def run_command(*words: str) -> Result:
    return CliRunner().invoke(cli, words)


def report(*words: str) -> Result:
    return run_command("report", *words)


def contents(folder: Path) -> dict[Path, tuple[bytes, int]]:
    """The content of each file of a folder, and the number of its inode, which another file would not have."""
    return {path: (path.read_bytes(), path.stat().st_ino) for path in folder.iterdir()}


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
    assert all(f"Software\0{SOFTWARE_NAME}".encode() in path.read_bytes() for path in figures)
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
    refused = run_command("run", "--model", "small", "--device", "cpu", *profiled)
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


@pytest.mark.parametrize("options", [(), ("--force",), ("--format", "markdown", "--force")])
@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("null.md", "null.md is a pipe or a device, not a file. Name a file with -o, or print with -o -"),
        ("pipe.md", "pipe.md is a pipe or a device, not a file"),
        (".", "Name a file in it: -o report.md"),
    ],
)
def test_what_is_no_file_is_not_replaced(here: Path, name: str, said: str, options: tuple[str, ...]) -> None:
    (here / "null.md").symlink_to("/dev/null")
    os.mkfifo(here / "pipe.md")
    before = {path.name: path.lstat().st_mode for path in here.iterdir()}
    assert said in str(report("small_ctx256.sqlite", "-o", name, *options).exception)
    assert {path.name: path.lstat().st_mode for path in here.iterdir()} == before
    assert stat.S_ISCHR(Path("/dev/null").stat().st_mode)


def spellings(here: Path, suffix: str) -> dict[str, Path]:
    """Names under which no suffix says that an input lies there: output, input."""
    (here / "sub").mkdir()
    pairs = {
        f"hard{suffix}": here / "small_ctx256.sqlite",
        f"report_behind{suffix}": here / "small_ctx256.nsys-rep",
        f"times{suffix}": here / "times.txt",
        f"said{suffix}": here / "small_ctx256.manifest.json",
        f"shared{suffix}": here / "manifest.json",
    }
    for name, source in pairs.items():
        (here / name).hardlink_to(source)
    links = {f"soft{suffix}": "small_ctx256.sqlite", f"sub/far{suffix}": f"../soft{suffix}"}
    for name, source in links.items():
        (here / name).symlink_to(source)
    return pairs | dict.fromkeys([f"sub/../hard{suffix}", *links], here / "small_ctx256.sqlite")


@pytest.mark.parametrize("source", ["small_ctx256.sqlite", "."])
@pytest.mark.parametrize(("kind", "suffix"), [("markdown", ".md"), ("json", ".json")])
def test_no_input_is_written_over_in_any_spelling(here: Path, source: str, kind: str, suffix: str) -> None:
    manifest = json.dumps({"capture": "small_ctx256.sqlite", "status": "ok"})
    for name in ("manifest.json", "small_ctx256.manifest.json"):
        (here / name).write_text(manifest, encoding="utf-8")
    (here / "small_ctx256.nsys-rep").write_bytes(b"report")
    os.utime(here / "small_ctx256.nsys-rep", (0, 0))  # older than its export, which is read
    (here / "times.txt").write_text(HEADER + "small,256,4,fp32,train,forward,10,3.2,0.1,ok\n", encoding="utf-8")
    for name, path in spellings(here, suffix).items():
        before = path.read_bytes()
        refused = report(source, "--csv", "times.txt", "--force", "--format", kind, "-o", name)
        assert str(refused.exception).startswith(name)
        assert any(said in str(refused.exception) for said in ("which is read", "the input itself", "has the name of"))
        assert path.read_bytes() == before


def test_a_trace_of_pytorch_is_not_written_over(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(here / "cache"))
    trace = Kineto().launch(1, 0).kernel("gemm", 1, 5, 1).write(here / "trace.json")
    (here / "trace.md").hardlink_to(trace)
    refused = report("trace.json", "--force", "-o", "trace.md")
    assert "is the input itself" in str(refused.exception)
    (here / "out.md").symlink_to("trace.sqlite")
    refused = report("trace.json", "--force", "-o", "out.md")
    assert "has the name of an input" in str(refused.exception)


def test_a_report_behind_a_link(here: Path) -> None:
    """The link stays, its file is replaced, and keeps its permissions."""
    (here / "elsewhere").mkdir()
    (here / "elsewhere/real.md").touch(mode=0o640)
    (here / "elsewhere/real.md").chmod(0o640)
    (here / "report.md").symlink_to("elsewhere/real.md")
    assert report("small_ctx256.sqlite", "--no-figures").exit_code == 0
    assert (here / "report.md").is_symlink()
    assert is_ours(here / "elsewhere/real.md")
    assert (here / "elsewhere/real.md").stat().st_mode & 0o777 == 0o640
    assert [path.name for path in (here / "elsewhere").iterdir()] == ["real.md"]


def test_a_full_disk_while_figures_are_drawn(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    report("small_ctx256.sqlite")
    before = contents(here / "report_figures")

    def full(_figure: object, path: Path) -> None:
        path.write_bytes(b"half a figure")
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr("nsys_analyzer.report.figures.draw_png", full)
    error = report("small_ctx256.sqlite").exception
    assert isinstance(error, NoSpaceError)
    assert str(error).startswith("report_figures/")
    assert ".png cannot be written (No space left on device): " in str(error)
    assert contents(here / "report_figures") == before


@pytest.mark.parametrize("options", [(), ("--no-figures",)])
def test_a_report_that_cannot_be_written_changes_no_figure(
    here: Path, monkeypatch: pytest.MonkeyPatch, options: tuple[str, ...]
) -> None:
    report("small_ctx256.sqlite")
    figure = next((here / "report_figures").iterdir())
    figure.with_name("of-a-capture-that-is-gone.png").write_bytes(figure.read_bytes())
    before = contents(here / "report_figures")

    def full(*_: object) -> None:
        raise NoSpaceError("full")

    monkeypatch.setattr("nsys_analyzer.report.writing.write_text", full)
    assert isinstance(report("small_ctx256.sqlite", *options).exception, NoSpaceError)
    assert contents(here / "report_figures") == before


@pytest.mark.parametrize(
    "words",
    [
        ("report", "small_ctx256.sqlite", "--no-figures", "-o", "new/deep/r.md"),
        ("compare", "small_ctx256.sqlite", "small_ctx256.sqlite", "-o", "new/deep/c.md"),
        ("export", "small_ctx256.sqlite", "-o", "new/deep/c.pftrace"),
        ("share", "small_ctx256.sqlite", "-o", "new/deep/c.sqlite"),
    ],
)
def test_a_missing_folder_is_made_by_force_alone(here: Path, words: tuple[str, ...]) -> None:
    refused = run_command(*words)
    assert str(refused.exception) == "There is no folder new/deep. Create it, or add --force to create it"
    assert not (here / "new").exists()
    done = run_command(*words, "--force")
    assert done.exit_code == 0, done.output
    assert (here / words[-1]).is_file()


# --- timings ---


def timed(folder: Path, mean_ms: float = 3.2) -> Path:
    """A folder with a capture whose forward takes 4 ms, and its unprofiled time."""
    folder.mkdir(exist_ok=True)
    two_steps().write(folder / "small_ctx256.sqlite")
    rows = f"small,256,4,fp32,train,forward,10,{mean_ms},0.1,ok\n"
    (folder / "timings.csv").write_text(HEADER + rows, encoding="utf-8")
    return folder


def test_the_timings_of_a_folder_are_used_and_named(here: Path) -> None:
    """Forward takes 3.2 ms, with another file named 2 ms; 4 ms under the profiler."""
    timed(here / "sweep")
    timed(here / "other", 2.0)
    found = report("sweep", "-o", "-")
    assert "| 3.200 | 4.000 |" in re.sub(" +", " ", found.stdout)
    assert found.stderr == "Unprofiled times: sweep/timings.csv; --csv names others.\n"
    assert "**timings.csv:** Read from the captures' folder" in found.stdout
    named = report("sweep", "--csv", "other/timings.csv", "-o", "-")
    assert "| 2.000 | 4.000 |" in re.sub(" +", " ", named.stdout)
    assert named.stderr == ""
    alone = report("sweep/small_ctx256.sqlite", "-o", "-")  # its folder's times are its own, too
    assert "| 3.200 | 4.000 |" in re.sub(" +", " ", alone.stdout)


def test_two_folders_match_timings(here: Path) -> None:
    found = report(str(timed(here / "a")), str(timed(here / "b")), "-o", "-")
    assert found.exit_code == 0
    assert found.stderr == "Several folders have a timings.csv, and none is used: name one with --csv.\n"


def test_timings_that_cannot_be_read_are_left_out(here: Path) -> None:
    (timed(here / "sweep") / "timings.csv").write_text("a,b\n1,2\n", encoding="utf-8")
    found = report("sweep", "-o", "-")
    assert found.exit_code == 0
    assert found.stderr.startswith("Left out, as it cannot be read: sweep/timings.csv")


def test_figures_lie_beside_the_file_that_a_link_leads_to(tmp_path: Path) -> None:
    (tmp_path / "other").mkdir()
    (tmp_path / "link.md").symlink_to("other/real.md")
    capture = training_step(Export().gpu()).write(tmp_path / "t.sqlite")
    result = report(str(capture), "-o", str(tmp_path / "link.md"))
    assert result.exit_code == 0, result.output
    text = (tmp_path / "other/real.md").read_text(encoding="utf-8")
    shown = re.findall(r"!\[.*?\]\((.*?)\)", text)
    assert shown
    assert all((tmp_path / "other" / path).is_file() for path in shown)
    assert not (tmp_path / "link_figures").exists()
