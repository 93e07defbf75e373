"""The table of GPU operations: what is written is what is read back."""

from __future__ import annotations

import csv
import sqlite3
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
from pyarrow import parquet

from nsys_analyzer.analysis.ranges.instances import AttributedTrace
from nsys_analyzer.errors import MissingTableError
from nsys_analyzer.export import FORMATS
from nsys_analyzer.export.frame import COLUMNS, OPERATION_COLUMNS, kernel_frame, operation_frame
from nsys_analyzer.export.writing import Capture
from nsys_analyzer.trace.phase_names import PhaseNames
from nsys_analyzer.trace.trace import Trace
from tests.support.export import ADD, GEMM, Export, training_step

TABLES = ("parquet", "csv", "sqlite")
#: What a spreadsheet would take for formulas, and what CSV must quote.
ODD = ("=SUM(A1:A9)", "@cmd", "+1-2", 'a "quoted", name', "two\nlines", "ä 中")
Row = dict[str, Any]


def parsed(name: str, text: str) -> Any:
    """A value of CSV without its quotes."""
    kind = OPERATION_COLUMNS[name].type
    return text if kind == "category" else text == "true" if kind == "flag" else int(text)


def read(form: str, path: Path) -> list[Row]:
    """The rows of a file, missing values as None; in CSV, what is empty is missing, or an empty text."""
    if form == "parquet":
        return parquet.read_table(path).to_pylist()
    if form == "csv":
        with path.open(newline="", encoding="utf-8") as file:
            rows = list(csv.DictReader(file))
        return [{name: parsed(name, text) if text else None for name, text in row.items()} for row in rows]
    with closing(sqlite3.connect(path)) as connection:
        connection.row_factory = sqlite3.Row
        return [dict(row) for row in connection.execute("SELECT * FROM gpu_operations ORDER BY rowid")]


def expected(form: str, path: Path) -> list[Row]:
    """The rows of the frame, as a format can say them."""
    frame = operation_frame(AttributedTrace(Trace.load(path)))
    rows = frame.astype(object).where(frame.notna(), None).to_dict("records")
    if form == "csv":
        rows = [{name: None if value == "" else value for name, value in row.items()} for row in rows]
    return rows  # SQLite's 1 is True


def exported(form: str, folder: Path, *paths: Path) -> Path:
    target = folder / f"out{FORMATS[form].suffix}"
    FORMATS[form].write([Capture(path, PhaseNames()) for path in paths], target)
    assert FORMATS[form].is_ours(target)
    return target


@pytest.mark.parametrize("form", TABLES)
@pytest.mark.parametrize("name", ["train_small256", "graph_small256"])
def test_what_is_written_is_read_back(
    form: str, name: str, real_capture: Callable[[str], Path], tmp_path: Path
) -> None:
    path = real_capture(name)
    assert read(form, exported(form, tmp_path, path)) == expected(form, path)


@pytest.mark.parametrize("form", TABLES)
def test_texts_stay_as_they_are_and_are_no_formulas(form: str, tmp_path: Path) -> None:
    export = Export()
    for number, name in enumerate(ODD, 1):
        at = number * 100
        export.range(name, at, at + 90).kernel(name, at, at + 10, at + 50)
    found = read(form, exported(form, tmp_path, export.write(tmp_path / "t.sqlite")))
    shown = [f"'{name}" if form == "csv" and name[0] in "=@+" else name for name in ODD]
    assert [(row["name"], row["range_path"]) for row in found] == [(name, name) for name in shown]


def test_units_and_meanings_are_in_the_file(step_trace: Path, tmp_path: Path) -> None:
    schema = parquet.read_schema(exported("parquet", tmp_path, step_trace))
    for name, column in OPERATION_COLUMNS.items():
        assert schema.field(name).metadata[b"unit"].decode() == column.unit
        assert schema.field(name).metadata[b"description"].decode() == column.doc
        assert name.endswith("_ns") == (column.unit == "ns")


@pytest.mark.parametrize("form", TABLES)
def test_several_captures_are_one_table(form: str, step_trace: Path, tmp_path: Path) -> None:
    """Of each the rows that it has alone; the second one's dictionaries of names are others."""
    second = Export().kernel("another", 5, 10, 20).kernel(GEMM, 30, 40, 60).write(tmp_path / "second.sqlite")
    found = read(form, exported(form, tmp_path, step_trace, second))
    assert [row["capture"] for row in found] == ["step.sqlite"] * 5 + ["second.sqlite"] * 2
    assert found == expected(form, step_trace) + expected(form, second)


def test_the_kernels_are_those_of_the_kernel_table(real_capture: Callable[[str], Path]) -> None:
    trace = Trace.load(real_capture("graphnode_small256"))
    kernels = kernel_frame(trace)
    found = operation_frame(AttributedTrace(trace))
    found = found[found["kind"] == "kernel"][list(COLUMNS)]
    pd.testing.assert_frame_equal(found, kernels, check_categorical=False)


def test_two_names_that_read_the_same(tmp_path: Path) -> None:
    """As where their bytes are no text: the rows of both have that name."""
    export = Export().kernel(GEMM, 5, 10, 20).kernel(ADD, 30, 40, 60)
    path = export.write(tmp_path / "t.sqlite")
    with closing(sqlite3.connect(path)) as connection, connection:
        connection.execute("UPDATE StringIds SET value = ? WHERE value = ?", (GEMM, ADD))
    assert kernel_frame(Trace.load(path))["name"].tolist() == [GEMM, GEMM]


def test_every_kind_of_operation(tmp_path: Path) -> None:
    """A kernel of 6 × 2 blocks waits 10 ns for its start, a copy of 4,096 bytes from pageable memory 20 ns."""
    export = training_step(Export(), wrap=None).kernel(ADD, None, 2_000, 2_010).memory("MEMCPY", 1_000, 1_020, 1_100)
    export.memory("MEMSET", 1_200, 1_210, 1_220).graph(1_300, 1_310, 1_400)
    export._rows["CUPTI_ACTIVITY_KIND_KERNEL"][0].update(gridX=6, gridY=2, gridZ=1)
    export._rows["CUPTI_ACTIVITY_KIND_MEMCPY"][0].update(bytes=4_096, copyKind=1, srcKind=0, dstKind=2)
    export._rows["CUPTI_ACTIVITY_KIND_MEMSET"][0].update(bytes=16)
    frame = operation_frame(AttributedTrace(Trace.load(export.write(tmp_path / "t.sqlite"))))
    rows = frame.astype(object).where(frame.notna(), None).set_index("start_ns")
    shown = ["kind", "class", "launch_latency_ns", "precision", "thread_blocks", "bytes", "copy"]
    assert rows[shown].loc[[30, 2_000, 1_020, 1_210, 1_310]].to_numpy().tolist() == [
        ["kernel", "matmul", 10, "fp32", 12, None, None],
        ["kernel", "elementwise", None, None, None, None, None],
        ["memcpy", "memset/memcpy", 20, None, None, 4_096, "pageable to device"],
        ["memset", "memset/memcpy", 10, None, None, 16, None],
        ["graph", "unknown", 10, None, None, None, None],
    ]


@pytest.mark.parametrize("form", TABLES)
def test_the_rank_of_the_manifest(form: str, step_trace: Path, tmp_path: Path) -> None:
    (tmp_path / "manifest.json").write_text('{"rank": 3, "world_size": 4, "status": "ok"}')
    assert {row["rank"] for row in read(form, exported(form, tmp_path, step_trace))} == {3}


def test_without_gpu_work_there_is_no_table(tmp_path: Path) -> None:
    path = Export().range("forward", 0, 10).write(tmp_path / "t.sqlite")
    with pytest.raises(MissingTableError, match="contains no CUDA kernels"):
        exported("csv", tmp_path, path)
