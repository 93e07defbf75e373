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
from tests.support.commands import make_command_test
from tests.support.export import AUTOGRAD, Export, training_step
from tests.support.folders import as_folder
from tests.support.kineto import Kineto
from tests.test_export_perfetto import ranks

NOTES = b"mine\n"
SUFFIXES = {name: form.suffix for name, form in FORMATS.items()}


test_export = make_command_test(
    "export_command",
    builders={
        "step": lambda: training_step(Export()), "named_step": lambda: training_step(Export(), wrap="whole thing"),
    },
    file_figures={
        **{f"is_{name}": form.is_ours for name, form in FORMATS.items()},
        "phases": lambda path: [*set(pd.read_csv(path)["phase"])],
    },
)  # fmt: skip


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step_trace: Path) -> Path:
    """A working folder with a capture, step.sqlite."""
    monkeypatch.chdir(tmp_path)
    assert step_trace.parent == tmp_path
    return tmp_path


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
