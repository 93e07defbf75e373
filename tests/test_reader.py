"""Loading an export: every schema seen, and every way a file can be unreadable."""

import hashlib
import os
import sqlite3
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import pytest
from click.testing import CliRunner

from nsys_analyzer import Trace
from nsys_analyzer.analysis.summary.summarize import summarize
from nsys_analyzer.cli.main import cli
from nsys_analyzer.errors import MissingTableError, TraceError
from nsys_analyzer.report.facts import say_all
from tests.support.export import ADD, AUTOGRAD, GEMM, MAIN, Export, global_pid, global_tid, training_step

RealCapture = Callable[[str], Path]


def step(*drop: str, rename: dict[str, str] | None = None, **options: bool) -> Export:
    export = Export(drop, rename).thread(AUTOGRAD, "pt_autograd_0").gpu()
    export.add("DIAGNOSTIC_EVENT", timestamp=0, severity=2, text="the clock drifted", globalPid=global_pid())
    export.add("TARGET_INFO_SYSTEM_ENV", name="NvDriverVersion", value="580.1")
    export.add("TARGET_INFO_CUDA_DEVICE", gpuId=0, cudaId=0, pid=100)
    export.memory("MEMCPY", 5, 6, 8)
    return training_step(export, **options)


def sums(trace: Trace) -> dict[str, tuple[int, float]]:
    """Kernels and kernel sum (ns) of each phase."""
    (summary,) = summarize(trace, "trace")
    return {
        p.phase: (round(p.kernels_per_instance), round((p.kernel_time_ms.mean or 0.0) * 1e6)) for p in summary.phases
    }


# forward GEMM 100 + ADD 20, backward GEMM 200 + ADD 40, optimizer ADD 80; the step holds them all
STEP = {"forward": (2, 120), "backward": (2, 240), "optimizer": (1, 80), "step": (5, 440)}


def test_a_whole_export(tmp_path: Path) -> None:
    trace = Trace.load(step().write(tmp_path / "step.sqlite"))
    assert sums(trace) == STEP
    assert trace.operations.names == (GEMM, ADD)
    assert trace.metadata.profiler_version == "2025.3.2.0"
    assert trace.metadata.schema_version == "3.20.3"
    assert trace.metadata.driver == "580.1"
    assert trace.metadata.thread_names == {global_tid(MAIN): "python3", global_tid(AUTOGRAD): "pt_autograd_0"}
    assert [d.text for d in trace.metadata.diagnostics] == ["the clock drifted"]
    gpu = trace.metadata.gpu(100, 0)
    assert gpu is not None
    assert (gpu.name, gpu.memory_bytes, gpu.sm_count) == ("NVIDIA H200", 150 << 30, 132)


# --- tables and columns that are not there ---


@pytest.mark.parametrize(
    "missing",
    [
        ("DIAGNOSTIC_EVENT",),
        ("ThreadNames",),  # what another thread launches while the main one is in backward is backward's
        ("TARGET_INFO_GPU", "TARGET_INFO_CUDA_DEVICE", "TARGET_INFO_SYSTEM_ENV"),
        ("META_DATA_EXPORT",),
        ("CUPTI_ACTIVITY_KIND_MEMCPY",),
        ("CUPTI_ACTIVITY_KIND_KERNEL.graphNodeId",),
        ("NVTX_EVENTS.textId",),
        ("CUPTI_ACTIVITY_KIND_KERNEL.globalPid", "CUPTI_ACTIVITY_KIND_MEMCPY.globalPid"),
        ("CUPTI_ACTIVITY_KIND_KERNEL.demangledName",),
        ("CUPTI_ACTIVITY_KIND_KERNEL.deviceId", "CUPTI_ACTIVITY_KIND_KERNEL.streamId"),
        ("CUPTI_ACTIVITY_KIND_RUNTIME.returnValue",),
        ("DIAGNOSTIC_EVENT.globalPid", "DIAGNOSTIC_EVENT.severity"),
        ("NVTX_EVENTS.domainId",),
    ],
    ids=lambda names: ", ".join(names),
)
def test_absent_tables_and_columns_change_no_time(tmp_path: Path, missing: tuple[str, ...]) -> None:
    trace = Trace.load(step(*missing).write(tmp_path / "step.sqlite"))
    assert sums(trace) == STEP
    assert set(trace.operations.process.tolist()) == {global_pid()}


def test_without_metadata_all_is_unknown(tmp_path: Path) -> None:
    tables = ("META_DATA_EXPORT", "TARGET_INFO_GPU", "TARGET_INFO_CUDA_DEVICE", "TARGET_INFO_SYSTEM_ENV")
    metadata = Trace.load(step(*tables).write(tmp_path / "step.sqlite")).metadata
    assert (metadata.profiler_version, metadata.schema_version, metadata.driver) == ("unknown",) * 3
    assert (metadata.runtime, metadata.cpu, metadata.os) == ("unknown",) * 3
    assert metadata.gpus == {}
    assert metadata.gpu(100, 0) is None


def test_without_nvtx_table(tmp_path: Path) -> None:
    trace = Trace.load(step("NVTX_EVENTS").write(tmp_path / "step.sqlite"))
    assert "nvtx" not in trace.tables
    assert len(trace.ranges) == len(trace.open_ranges) == 0
    assert len(trace.kernels) == 5
    # The thread of autograd tells its two kernels.
    assert trace.kernels["phase"].dropna().tolist() == ["backward", "backward"]
    (summary,) = summarize(trace, "trace")
    assert any("no NVTX table" in warning for warning in say_all(summary.warnings))


def test_without_kernel_table(tmp_path: Path) -> None:
    trace = Trace.load(step("CUPTI_ACTIVITY_KIND_KERNEL").write(tmp_path / "step.sqlite"))
    assert [trace.operations.kind.tolist(), len(trace.ranges)] == [[1], 4]  # the copy; step and three phases
    with pytest.raises(MissingTableError, match="--trace=cuda,nvtx"):
        _ = trace.kernels


def test_without_api_calls_no_kernel_has_a_launch(tmp_path: Path) -> None:
    trace = Trace.load(step("CUPTI_ACTIVITY_KIND_RUNTIME").write(tmp_path / "step.sqlite"))
    (summary,) = summarize(trace, "trace")
    assert summary.coverage is not None
    assert (summary.coverage.kernels, summary.coverage.without_launch) == (5, 5)
    assert any("no CUDA API table" in warning for warning in say_all(summary.warnings))


def test_old_names(tmp_path: Path) -> None:
    rename = {"META_DATA_EXPORT": "EXPORT_META_DATA"}
    trace = Trace.load(step("TARGET_INFO_CUDA_DEVICE", rename=rename).write(tmp_path / "old.sqlite"))
    assert sums(trace) == STEP
    assert trace.metadata.profiler_version == "2025.3.2.0"
    gpu = trace.metadata.gpu(100, 0)
    assert gpu is not None
    assert (gpu.name, gpu.memory_bytes, gpu.sm_count) == ("NVIDIA H200", 150 << 30, 132)


def test_an_unknown_string_id_keeps_its_kernel(tmp_path: Path) -> None:
    export = Export().kernel(GEMM, 1, 2, 5)
    export._rows["CUPTI_ACTIVITY_KIND_KERNEL"][0]["demangledName"] = 999
    trace = Trace.load(export.write(tmp_path / "t.sqlite"))
    assert trace.operations.names == ("unknown kernel 999",)


# --- names, texts and times ---


@pytest.mark.parametrize("dropped", [(), ("NVTX_EVENTS.text",)], ids=["text is NULL", "no text column"])
def test_names_by_id(tmp_path: Path, dropped: tuple[str, ...]) -> None:
    export = Export(dropped).range("forward", 0, 10, by_id=True).range("backward", 10, 20, by_id=True)
    ranges = Trace.load(export.write(tmp_path / "t.sqlite")).ranges
    assert [ranges.names[i] for i in ranges.name] == ["forward", "backward"]


def test_only_ranges_are_ranges(tmp_path: Path) -> None:
    export = Export().range("a", 0, 10).range("open", 0, None)
    for kind in (34, 33, 75):  # a mark, a category's name, a domain's name
        export.range("not a range", 3, 4, kind=kind)
    for kind in (60, 70, 71):
        export.range(f"kind {kind}", 5, 9, kind=kind)
    trace = Trace.load(export.write(tmp_path / "t.sqlite"))
    assert [trace.ranges.names[i] for i in trace.ranges.name] == ["a", "kind 60", "kind 70", "kind 71"]
    assert [trace.open_ranges.names[i] for i in trace.open_ranges.name] == ["open"]


def test_text_after_the_first_batch(tmp_path: Path) -> None:
    """A driver that takes a column's type from its first 65,536 rows must not lose the text behind them."""
    export = Export()
    for i in range(70_000):
        export.range("layer", i, i + 1, by_id=True)
    export.range("forward", 80_000, 80_010).range("layer", 80_001, 80_002, by_id=True)
    ranges = Trace.load(export.write(tmp_path / "t.sqlite")).ranges
    assert len(ranges) == 70_002
    assert [ranges.names[i] for i in ranges.name[[0, 69_999, 70_000, 70_001]]] == ["layer", "layer", "forward", "layer"]


def test_ids_and_ends_after_the_first_batch(tmp_path: Path) -> None:
    export = Export()
    for i in range(70_000):
        export.range("layer", i, None)
    export.range("forward", 80_000, 80_010, by_id=True)
    trace = Trace.load(export.write(tmp_path / "t.sqlite"))
    assert len(trace.open_ranges) == 70_000
    assert [trace.ranges.names[i] for i in trace.ranges.name] == ["forward"]


def test_negative_times(tmp_path: Path) -> None:
    """A range that was open when the session began has a negative start."""
    trace = Trace.load(training_step(Export().gpu(), at=-2000).write(tmp_path / "t.sqlite"))
    assert trace.ranges.start.tolist() == [-2000, -1990, -1700, -1300]
    assert trace.ranges.end.tolist() == [-1000, -1700, -1300, -1050]
    assert sums(trace) == STEP


# --- the file itself ---

NAMES = ["with space.sqlite", "what?.sqlite", "a#b.sqlite", "100%25.sqlite", "a&mode=rw.sqlite", "ünï ✓.sqlite"]


@pytest.mark.parametrize("name", NAMES)
def test_any_file_name(tmp_path: Path, name: str) -> None:
    folder = tmp_path / f"folder of {name}"
    folder.mkdir()
    trace = Trace.load(step().write(folder / name))
    assert sums(trace) == STEP
    assert [path.name for path in folder.iterdir()] == [name]


def test_a_relative_path(step_trace: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(step_trace.parent)
    assert sums(Trace.load("step.sqlite")) == STEP


def fingerprint(path: Path) -> tuple[str, int]:
    return hashlib.sha256(path.read_bytes()).hexdigest(), path.stat().st_mtime_ns


def test_a_file_in_wal_mode_leaves_no_journal(step_trace: Path) -> None:
    """Opened as a database, not as immutable, such a file would get a -shm and a -wal beside it."""
    with closing(sqlite3.connect(step_trace)) as connection:
        connection.execute("PRAGMA journal_mode = WAL")
    before = fingerprint(step_trace)
    assert sums(Trace.load(step_trace)) == STEP
    assert fingerprint(step_trace) == before
    assert [path.name for path in step_trace.parent.iterdir()] == ["step.sqlite"]


# --- files that cannot be read ---


def fails(path: Path, *parts: str) -> TraceError:
    with pytest.raises(TraceError) as error:
        Trace.load(path)
    said = str(error.value)
    assert "\n" not in said
    assert str(path) in said
    assert error.value.hint
    for part in parts:
        assert part in said
    return error.value


def contacts(path: Path) -> None:
    sqlite3.connect(path).execute("CREATE TABLE people (name TEXT)").connection.close()


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda _path: None, ("No such file", ".nsys-rep")),
        (Path.mkdir, ("Is a directory", ".sqlite")),
        (os.mkfifo, ("is not a regular file",)),
        (Path.touch, ("is empty", "Export the report again")),
        (lambda path: path.write_bytes(b"SQLite format 3"), ("not a SQLite file", "nsys export --type sqlite")),
        (contacts, ("not an nsys export", "nsys export --type sqlite")),
    ],
)
def test_what_is_no_export(tmp_path: Path, make: Callable[[Path], object], said: tuple[str, ...]) -> None:
    path = tmp_path / "other.sqlite"
    make(path)
    fails(path, *said)


def test_an_export_with_nothing_to_analyze(tmp_path: Path) -> None:
    error = fails(Export().write(tmp_path / "t.sqlite"), "neither CUDA activity nor NVTX ranges", "--trace=cuda,nvtx")
    assert isinstance(error, MissingTableError)


@pytest.mark.parametrize(
    "column", ["CUPTI_ACTIVITY_KIND_KERNEL.start", "CUPTI_ACTIVITY_KIND_RUNTIME.correlationId", "NVTX_EVENTS.globalTid"]
)
def test_a_table_without_a_column_it_needs(tmp_path: Path, column: str) -> None:
    table, name = column.split(".")
    error = fails(step(column).write(tmp_path / "t.sqlite"), f"table {table} has no column {name}", "--trace=")
    assert isinstance(error, MissingTableError)


@pytest.mark.parametrize("kept", [16, 99, 100, 2000, 4096, 0.001, 0.01, 0.1, 0.5, 0.9, 0.999, -1])
def test_a_truncated_export(tmp_path: Path, real_capture: RealCapture, kept: float) -> None:
    """Cut to a number of bytes, to a fraction, or by one byte; SQLite reads what is missing of a page as zeros."""
    whole = real_capture("train_small256")
    size = whole.stat().st_size
    length = int(kept) if kept > 1 else size - 1 if kept < 0 else int(size * kept)
    path = tmp_path / "cut.sqlite"
    path.write_bytes(whole.read_bytes()[:length])
    fails(path, "damaged or truncated", "Export the report again")


def test_operators_are_the_ranges_that_autograd_annotated(tmp_path: Path) -> None:
    """A name with IDs is an operator's wherever it stands, and so is aten's without; a person's own is none."""
    export = Export().range("forward", 0, 100).range("aten::mm, seq = 3, op_id = 7", 10, 20)
    export.range("MmBackward0, op_id = 8", 30, 40, by_id=True).range("aten::add_", 50, 60)
    trace = Trace.load(export.write(tmp_path / "t.sqlite"))
    assert [trace.operators.names[name] for name in trace.operators.name] == ["aten::mm", "MmBackward0", "aten::add_"]
    assert len(trace.ranges) == 4


def altered(path: Path, *statements: str) -> Path:
    """An export after some statements of SQL."""
    with closing(sqlite3.connect(path)) as connection, connection:
        for statement in statements:
            connection.execute(statement)
    return path


def names_of(path: Path) -> list[str]:
    return [row.name for summary in summarize(Trace.load(path), "t") if summary.whole for row in summary.whole.kernels]


def test_an_empty_newer_table_hides_no_older_one(tmp_path: Path) -> None:
    path = training_step(Export(rename={"StringIds": "StringIds_V2"})).write(tmp_path / "t.sqlite")
    altered(path, 'CREATE TABLE "StringIds_V10" (id INTEGER, value TEXT)')
    assert sorted(names_of(path)) == sorted({GEMM, ADD})
    # Once it holds the names, it is the newer one: 10 is above 2.
    altered(path, "INSERT INTO StringIds_V10 SELECT id, value || '_new' FROM StringIds_V2")
    assert sorted(names_of(path)) == sorted({f"{GEMM}_new", f"{ADD}_new"})


@pytest.mark.parametrize(
    "lost",
    [
        ["DROP TABLE StringIds"], ["DELETE FROM StringIds"],
        ["ALTER TABLE StringIds RENAME TO s", "CREATE VIEW StringIds AS SELECT * FROM s"],
    ],
)  # fmt: skip
def test_without_names_the_share_of_matmul_is_not_known(tmp_path: Path, lost: list[str]) -> None:
    path = altered(training_step(Export().gpu()).write(tmp_path / "t.sqlite"), *lost)
    (summary,) = summarize(Trace.load(path), "t")
    assert summary.whole is not None
    assert {row.kernel_class for row in summary.whole.classes} == {"unknown"}
    assert any(
        "does not contain the names of 2 kernels (100.0\xa0% of the kernel time)" in warning
        for warning in say_all(summary.warnings)
    )
    written = CliRunner().invoke(cli, ["report", str(path), "-o", str(tmp_path / "report.md"), "--no-figures"])
    assert written.exit_code == 0, written.output
    report = (tmp_path / "report.md").read_text(encoding="utf-8")
    assert "contain the names of 2 kernels (100.0\xa0% of the kernel time), so their class is unknown" in report
    assert "What share is matmul" not in report  # nothing says that there is one


def test_one_lost_name_is_one_unknown_kernel(tmp_path: Path) -> None:
    path = training_step(Export().gpu()).write(tmp_path / "t.sqlite")
    altered(path, f"DELETE FROM StringIds WHERE value = '{ADD}'")
    (summary,) = summarize(Trace.load(path), "t")
    forward = summary.phase("forward")
    assert forward is not None
    # GEMM 100 of 120 ns, ADD 20: between 83 and 100 % are matmul.
    assert {row.kernel_class: row.share for row in forward.classes} == pytest.approx(
        {"matmul": 5 / 6, "unknown": 1 / 6}
    )
    assert forward.share_of("matmul") is None


def test_a_file_that_is_all_suffix(tmp_path: Path) -> None:
    training_step(Export().gpu()).write(tmp_path / ".sqlite")
    result = CliRunner().invoke(cli, ["report", str(tmp_path), "--format", "json"])
    assert result.exit_code == 0, result.output
    assert '"name": ".sqlite"' in result.output


def test_of_an_endless_kernel_name_the_start_is_kept(tmp_path: Path) -> None:
    longest = "void k<" + "a, " * 100_000 + "b>(int)"  # 7 + 300,000 + 7 letters
    trace = Trace.load(Export().kernel(longest, 1, 2, 3).kernel(longest[:20_000], 4, 5, 6).write(tmp_path / "t.sqlite"))
    assert sorted(trace.operations.names, key=len) == [longest[:20_000], f"{longest[:20_000]}… (300,014 characters)"]
