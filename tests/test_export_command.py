"""``nsys-analyze export``: files, names, what is replaced, and errors."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import pandas as pd
import pytest

from nsys_analyzer.export import FORMATS, Format
from nsys_analyzer.export.writing import export
from tests.conftest import Main
from tests.support.export import AUTOGRAD, Export, training_step
from tests.support.folders import as_folder
from tests.support.kineto import Kineto
from tests.test_export_perfetto import ranks

NOTES = b"mine\n"
SUFFIXES = {name: form.suffix for name, form in FORMATS.items()}


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step_trace: Path) -> Path:
    """A working folder with a capture, step.sqlite."""
    monkeypatch.chdir(tmp_path)
    assert step_trace.parent == tmp_path
    return tmp_path


def test_the_suffix_says_the_format(here: Path, run_main: Main) -> None:
    for form, suffix in SUFFIXES.items():
        assert run_main("export", "step.sqlite", "-o", f"t{suffix.upper()}").code == 0
        assert FORMATS[form].is_ours(here / f"t{suffix.upper()}")
    assert run_main("export", "step.sqlite", "--format", "perfetto", "-o", "t.perfetto-trace").code == 0
    refused = run_main("export", "step.sqlite", "-o", "t.html")
    said = "t.html ends in .html, but a file must end in .pftrace, .parquet, .csv or .db. Name another file with -o"
    assert (refused.code, refused.err) == (1, f"Error: {said}\n")
    assert not (here / "t.html").exists()


@pytest.mark.parametrize("form", SUFFIXES)
def test_the_file_is_named_after_the_trace(here: Path, form: str, run_main: Main) -> None:
    (here / "elsewhere").mkdir()
    (here / "step.sqlite").rename(here / "elsewhere/step.sqlite")
    ended = run_main("export", "elsewhere/step.sqlite", "--format", form)
    assert (ended.code, ended.err) == (0, "")
    assert ended.out.startswith(f"step{SUFFIXES[form]}: ")
    assert {path.name for path in here.iterdir()} == {"elsewhere", f"step{SUFFIXES[form]}"}
    assert run_main("export", "elsewhere/step.sqlite", "--format", form).code == 0  # its own it replaces unasked


@pytest.mark.parametrize("form", SUFFIXES)
@pytest.mark.parametrize("content", [NOTES, b"PAR1", b"SQLite format 3\0"])
def test_a_file_of_somebody_else_stays(here: Path, form: str, content: bytes, run_main: Main) -> None:
    """It is refused before anything is read: the capture is not there."""
    target = here / f"mine{SUFFIXES[form]}"
    target.write_bytes(content)
    ended = run_main("export", "absent.sqlite", "--format", form, "-o", target.name)
    assert (ended.code, ended.err) == (
        1,
        f"Error: {target.name} was not written by nsys-analyze, and would be replaced. "
        "Name another file with -o, or replace it with --force\n",
    )
    assert target.read_bytes() == content
    assert run_main("export", "step.sqlite", "--format", form, "-o", target.name, "--force").code == 0
    assert FORMATS[form].is_ours(target)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("-o", "step.sqlite", "--force"), "step.sqlite has the name of an input, not of a csv. Name another file"),
        (("-o", "out.db"), "out.db ends in .db, but the suffix of csv is .csv. Name another file with -o"),
        (("-o", "folder"), "folder is a folder. Name a file in it: -o folder/capture.csv"),
        (("-o", "step.sqlite/out.csv"), "step.sqlite/out.csv cannot be written (Not a directory)"),
        (("--phase-name", "forward"), "forward"),
    ],
)  # fmt: skip
def test_what_cannot_be_written(here: Path, words: tuple[str, ...], said: str, run_main: Main) -> None:
    (here / "folder").mkdir()
    before = (here / "step.sqlite").read_bytes()
    ended = run_main("export", "step.sqlite", "--format", "csv", *words)
    assert ended.code != 0
    assert said in ended.err
    assert len(ended.err.splitlines()) == 1
    assert (here / "step.sqlite").read_bytes() == before


@pytest.mark.parametrize("form", SUFFIXES)
def test_a_capture_that_cannot_be_read_leaves_what_was_there(here: Path, form: str, run_main: Main) -> None:
    assert run_main("export", "step.sqlite", "--format", form, "-o", f"out{SUFFIXES[form]}").code == 0
    before = (here / f"out{SUFFIXES[form]}").read_bytes()
    (here / "broken.sqlite").write_bytes(b"SQLite format 3\0" + b"x" * 100)
    ended = run_main("export", "step.sqlite", "broken.sqlite", "--format", form, "-o", f"out{SUFFIXES[form]}")
    assert ended.code == 1
    assert "broken.sqlite" in ended.err
    assert len(ended.err.splitlines()) == 1
    assert (here / f"out{SUFFIXES[form]}").read_bytes() == before
    assert {path.name for path in here.iterdir()} == {"step.sqlite", "broken.sqlite", f"out{SUFFIXES[form]}"}


def test_a_timeline_where_nothing_else_is_asked_for(here: Path, run_main: Main) -> None:
    assert run_main("export", "step.sqlite").code == 0
    assert FORMATS["perfetto"].is_ours(here / "step.pftrace")


@pytest.mark.parametrize(
    ("trace", "said"),
    [
        ("absent.sqlite", "absent.sqlite: No such file or directory. Give the path of a .sqlite or .nsys-rep file"),
        ("empty", "empty contains no trace. Give a folder with"),
        ("unprofiled", "unprofiled contains no trace. Give a trace, or a folder with some"),
    ],
)
def test_what_cannot_be_read(here: Path, trace: str, said: str, run_main: Main) -> None:
    (here / "empty").mkdir()
    (here / "unprofiled").mkdir()
    (here / "unprofiled/a.manifest.json").write_text('{"status": "ok", "profiler": "none"}')
    ended = run_main("export", trace)
    assert ended.code == 1
    assert ended.err.startswith(f"Error: {said}")
    assert len(ended.err.splitlines()) == 1


def test_inputs_of_every_kind(here: Path, run_main: Main) -> None:
    """An export in a folder of Parquet files, a trace of PyTorch's profiler, and a folder that holds captures."""
    as_folder(here / "step.sqlite", here / "tables_pqtdir")
    Kineto().gpu().range("forward", 0, 50).operator("aten::mm", 10, 20).write(here / "profiler.pt.trace.json")
    assert run_main("export", "tables_pqtdir", "--format", "csv", "-o", "folder.csv").code == 0
    assert run_main("export", "step.sqlite", "--format", "csv", "-o", "file.csv").code == 0
    one, other = (pd.read_csv(here / name).drop(columns="capture") for name in ("folder.csv", "file.csv"))
    pd.testing.assert_frame_equal(one, other)
    ended = run_main("export", "profiler.pt.trace.json", "--format", "perfetto")
    assert (ended.code, ended.out.partition(":")[0]) == (0, "profiler.pftrace")
    (here / "runs").mkdir()
    for name in ("a", "b"):
        training_step(Export().thread(AUTOGRAD, "pt_autograd_0")).write(here / f"runs/{name}.sqlite")
    assert run_main("export", "runs", "--format", "csv").out.startswith("runs.csv: ")
    assert pd.read_csv(here / "runs.csv")["capture"].value_counts().to_dict() == {"a.sqlite": 5, "b.sqlite": 5}


def test_captures_without_a_common_clock_are_told(here: Path, run_main: Main) -> None:
    training_step(Export()).write(here / "other.sqlite")
    ended = run_main("export", "step.sqlite", "other.sqlite", "--format", "perfetto")
    assert ended.code == 0
    assert ended.err == "Not aligned by collectives, so each starts at its own time 0: step.sqlite, other.sqlite\n"
    aligned = run_main("export", *ranks(here, 1_000_000), "--format", "perfetto")
    assert (aligned.code, aligned.err) == (0, "")


def test_a_format_is_a_module_and_an_entry(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Names of kernels, one a line."""
    source = here / "names_format.py"
    source.write_text(
        "def write(captures, path):\n"
        "    names = (name for one in captures for name in one.read().trace.operations.names)\n"
        "    path.write_text('names\\n' + '\\n'.join(names))\n"
        "def is_ours(path):\n"
        "    return path.read_text().startswith('names\\n')\n"
    )
    spec = importlib.util.spec_from_file_location("names_format", source)
    assert spec
    assert spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    monkeypatch.setitem(sys.modules, "names_format", module)
    monkeypatch.setitem(FORMATS, "names", Format("names_format", ".txt"))
    assert export([here / "step.sqlite"], here / "out.txt", "names") > 0
    assert "ampere_sgemm_128x64_tn" in (here / "out.txt").read_text()
    assert export([here / "step.sqlite"], here / "out.txt", "names") > 0


def test_a_phase_of_another_name(here: Path, run_main: Main) -> None:
    """What is launched in its range belongs to it."""
    path = training_step(Export(), wrap="whole thing").write(here / "named.sqlite")
    assert run_main("export", path, "--format", "csv", "--phase-name", "forward=whole thing", "-o", "out.csv").code == 0
    assert set(pd.read_csv(here / "out.csv")["phase"]) == {"forward"}
