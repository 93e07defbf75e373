"""Exports that are folders of Parquet or Arrow files: the same figures as from SQLite, and one capture each.

``tests/data/folders.tar.xz`` holds four small training steps on an H200, exported by nsys 2025.3.2 to SQLite, Parquet
and Arrow: the tables, columns and rows that ``nsys-analyze share`` keeps, in the files, names and types of the exports.
"""

from __future__ import annotations

import shutil
import tarfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from click.testing import CliRunner

from nsys_analyzer import Trace
from nsys_analyzer.analysis.summary.summarize import summarize
from nsys_analyzer.cli.main import cli
from nsys_analyzer.errors import NsysAnalyzerError, TraceError
from nsys_analyzer.inputs.gather import gather
from nsys_analyzer.inputs.traces import find_traces
from nsys_analyzer.trace import schema
from nsys_analyzer.trace.nsys_report import ensure_export
from nsys_analyzer.trace.sources import check_output_is_no_input, open_capture
from tests.conftest import DATA
from tests.support.export import Export, training_step
from tests.support.folders import as_folder

RealCapture = Callable[[str], Path]
ENDINGS = (".parquet", ".arrow")
CAPTURES = (
    "train_small256", "full_small128", "ddp2_small256", "graph_small256", "graphnode_small256", "mem_small256",
    "functions_autograd_gpt2", "nccl_init", "jax_mlp",
)  # fmt: skip


@pytest.mark.parametrize("name", ["steps_pqtdir", "steps_arwdir"])
def test_real_exports(tmp_path: Path, name: str) -> None:
    with tarfile.open(DATA / "folders.tar.xz") as packed:
        packed.extractall(tmp_path, filter="data")
    folder, sqlite = tmp_path / "folders" / name, tmp_path / "folders" / "steps.sqlite"
    assert summaries(folder) == summaries(sqlite)
    assert len(Trace.load(folder).operations) == 109  # 101 kernels and 8 copies


def summaries(path: Path) -> list[object]:
    """All figures of a capture but its file's name, comparable."""
    return [repr(replace(one, source="")) for one in summarize(Trace.load(path), "t")]


@pytest.mark.parametrize("ending", ENDINGS)
@pytest.mark.parametrize("name", CAPTURES)
def test_the_same_figures(tmp_path: Path, real_capture: RealCapture, name: str, ending: str) -> None:
    sqlite = real_capture(name)
    assert summaries(as_folder(sqlite, tmp_path / "export", ending)) == summaries(sqlite)


@pytest.mark.parametrize("ending", ENDINGS)
def test_every_table_is_read_alike(tmp_path: Path, real_capture: RealCapture, ending: str) -> None:
    """With filters by numbers, by texts and by strings, defaults of absent columns, and the limit of the grids."""
    sqlite = real_capture("mem_small256")
    one, other = open_capture(sqlite), open_capture(as_folder(sqlite, tmp_path / "export", ending))
    tables = [table for table in vars(schema).values() if isinstance(table, schema.Table)]
    assert len(tables) > 20
    for table in tables:
        for column, values in one.read(table).items():
            assert other.read(table)[column].tolist() == values.tolist(), (table.key, column)


def test_a_folder_of_exports_holds_each_once(tmp_path: Path) -> None:
    """An export in a folder is a capture; beside the SQLite file of its name the newer one stands for both."""
    sqlite = training_step(Export()).write(tmp_path / "a.sqlite")
    newer = as_folder(sqlite, tmp_path / "a_pqtdir")
    other = as_folder(sqlite, tmp_path / "b_arwdir", ".arrow")
    assert sorted(find_traces([tmp_path])) == [newer, other]
    assert find_traces([newer]) == [newer]
    shutil.rmtree(newer)
    assert sorted(find_traces([tmp_path])) == [sqlite, other]


def test_commands_take_a_folder(tmp_path: Path) -> None:
    folder = as_folder(training_step(Export().gpu()).write(tmp_path / "t.sqlite"), tmp_path / "t_pqtdir")
    for arguments in (
        ["report", str(folder), "-o", str(tmp_path / "r.md")],
        ["info", str(folder)],
        ["kernels", str(folder)],
    ):
        result = CliRunner().invoke(cli, arguments)
        assert result.exit_code == 0, result.output
    assert "CUPTI_ACTIVITY_KIND_KERNEL: " in CliRunner().invoke(cli, ["info", str(folder)]).output


def test_a_current_export_is_taken_whatever_it_is(tmp_path: Path) -> None:
    report = tmp_path / "run.nsys-rep"
    report.write_bytes(b"a report")
    sqlite = training_step(Export().gpu()).write(tmp_path / "run.sqlite")
    assert ensure_export(report) == sqlite
    folder = as_folder(sqlite, tmp_path / "run_arwdir", ".arrow")
    assert ensure_export(report) == folder


def test_a_folder_of_a_run_has_its_manifest(tmp_path: Path) -> None:
    """One run: its manifest is that of the folder's export, and no row of its own."""
    as_folder(training_step(Export().gpu()).write(tmp_path / "t.sqlite"), tmp_path / "capture_pqtdir")
    (tmp_path / "t.sqlite").unlink()
    (tmp_path / "manifest.json").write_text('{"status": "ok", "context_length": 256, "batch_size": 4}')
    (row,) = gather([tmp_path]).captures
    assert row.configuration is not None
    assert row.configuration.context_length == 256
    assert row.name == tmp_path.name


def test_no_file_of_a_folder_is_written_over(tmp_path: Path) -> None:
    folder = as_folder(training_step(Export()).write(tmp_path / "t.sqlite"), tmp_path / "t_pqtdir")
    with pytest.raises(NsysAnalyzerError, match="which is read"):
        check_output_is_no_input(folder / "StringIds.parquet", [folder])


@pytest.mark.parametrize("ending", ENDINGS)
def test_damage_is_named(tmp_path: Path, ending: str) -> None:
    folder = as_folder(training_step(Export()).write(tmp_path / "t.sqlite"), tmp_path / "export", ending)
    kernels = folder / f"CUPTI_ACTIVITY_KIND_KERNEL{ending}"
    kernels.write_bytes(kernels.read_bytes()[:100])
    with pytest.raises(TraceError, match="damaged or truncated"):
        Trace.load(folder)


@pytest.mark.parametrize("ending", ENDINGS)
def test_a_column_that_is_there_twice_is_damage(tmp_path: Path, ending: str) -> None:
    folder = as_folder(training_step(Export()).write(tmp_path / "t.sqlite"), tmp_path / "export", ending)
    columns = pa.array([1], pa.int64())
    table = pa.Table.from_arrays([columns] * 3, ["start", "end", "end"])
    name = folder / f"CUPTI_ACTIVITY_KIND_MEMSET{ending}"
    if ending == ".parquet":
        pq.write_table(table, name)
    else:
        with pa.ipc.new_stream(str(name), table.schema) as stream:
            stream.write_table(table)
    with pytest.raises(TraceError, match="damaged or truncated"):
        Trace.load(folder)
