"""Every command on exports of nsys, real ones from 2020.4 on and built ones from 2022.2 on.

The figures are the same, and there is no traceback.

``tests/data/schema`` holds real exports of nsys 2020.4 (whose exports carry no version), 2022.4 (schema 3.0.0), 2023.4
(3.7.2) and 2024.2 (3.11.1), those of 2025.3 (3.20.3) are in ``tests/data``. This program made them, on a CPU::

    def step():
        with nvtx.annotate("step"):
            with nvtx.annotate("forward"):
                with nvtx.annotate("computing softmax"):
                    time.sleep(0.002)
            nvtx.push_range("backward")
            time.sleep(0.003)
            nvtx.pop_range()
            with nvtx.annotate("optimizer"):
                time.sleep(0.001)

    with nvtx.annotate("warmup"):
        step(); step()
    for _ in range(3):
        step()

under ``nsys profile --trace=nvtx --sample=none --cpuctxsw=none``. ``nsysA.sqlite`` was recorded and exported by
version A, ``nsysA_by_B.sqlite`` recorded by A and exported by B, ``_utc`` with ``--ts-normalize=true``. The tables are
all that the version writes with ``--lazy=false`` (2020.4 and ``_utc``: those with rows), without the ``ENUM_`` tables;
the rows are those that ``nsys-analyze share`` keeps.
"""

import json
import lzma
import shutil
import sqlite3
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from random import Random
from tempfile import TemporaryDirectory
from typing import Any

import pytest
from click.testing import CliRunner, Result
from hypothesis import given, settings
from hypothesis import strategies as st

from nsys_analyzer import Trace
from nsys_analyzer.analysis.attribution.launches import find_graph_captures
from nsys_analyzer.analysis.summary.summarize import summarize
from nsys_analyzer.cli.main import cli
from nsys_analyzer.errors import RECORD_COMMAND, NsysAnalyzerError
from nsys_analyzer.report.facts import say_all
from nsys_analyzer.trace import trace as trace_module
from tests.conftest import DATA
from tests.support.export import AUTOGRAD, Export, global_pid, training_step

RealCapture = Callable[[str], Path]

RECORDED = ("nsys2020.4", "nsys2022.4", "nsys2023.4", "nsys2024.2")
#: One report, of 2020.4.
ONE_REPORT = ("nsys2020.4", "nsys2020.4_by_2022.4", "nsys2020.4_by_2023.4", "nsys2020.4_by_2024.2")
UTC = "nsys2024.2_utc"
REAL = tuple(dict.fromkeys((*RECORDED, *ONE_REPORT, UTC)))
#: The shortest that the phases of the program can last, ms.
SLEEPS = {"forward": 2, "backward": 3, "optimizer": 1}


@dataclass(frozen=True)
class Version:
    """A version of the schema as far as anything reads it, and how it differs from its neighbour in ``VERSIONS``.

    The neighbour is the next on the way to the version that ``tests.support.export`` builds.

    Attributes:
        schema: ``EXPORT_SCHEMA_VERSION``, empty where the export carries none.
        nsys: a version of nsys that writes it, empty where none is known.
        renamed: names that the neighbour has, of tables or as ``TABLE.column``, and the names that this one has.
        absent: what the neighbour has and this one lacks.
    """

    schema: str
    nsys: str
    renamed: Mapping[str, str]
    absent: tuple[str, ...] = ()


#: The version that ``tests.support.export`` builds.
_EXPORT = Version("3.20.3", "2025.3.2", {})
#: Newest first; all but the first are of exports that were read. Which tables and columns a version knows is told by
#: those with ``--lazy=false`` (3.0, 3.7, 3.11). That some versions number tables is known from others, not from those
#: that were read.
VERSIONS = (
    Version(
        "3.27.0", "",
        {"NVTX_EVENTS": "NVTX_EVENTS_V3", "CUPTI_ACTIVITY_KIND_RUNTIME": "CUPTI_ACTIVITY_KIND_RUNTIME_V2"},
    ),
    Version("3.25.0", "2026.2.1", {}),
    Version("3.24.14", "2026.1.1", {}),
    Version("3.23.3", "2025.5.1", {}),
    _EXPORT,
    Version("3.17.2", "2025.1.3", {}),
    Version(
        "3.11.1", "2024.2.3", {},
        ("TARGET_INFO_CUDA_DEVICE", "NVTX_EVENTS.binaryData", "NVTX_PAYLOAD_SCHEMA_ENTRIES"),
    ),
    Version(
        "3.7.2", "2023.4.4", {"CUDA_GRAPH_NODE_EVENTS": "CUDA_GRAPH_EVENTS"},
        ("CUPTI_ACTIVITY_KIND_GRAPH_TRACE", "DIAGNOSTIC_EVENT"),
    ),
    Version("3.4.0", "2023.3.1", {}),
    Version("3.0.0", "2022.4.2", {"META_DATA_EXPORT": "EXPORT_META_DATA"}, ("META_DATA_CAPTURE",)),
    Version("2.9.1", "2022.2.1", {}),
)  # fmt: skip


def built(version: Version, path: Path) -> Path:
    """A training step of 5 kernels on two threads with a CUDA graph's node, as a version exports it."""
    ours, its = VERSIONS.index(_EXPORT), VERSIONS.index(version)
    older = VERSIONS[ours : its + 1] if its >= ours else VERSIONS[its:ours]
    renamed = {name: given for one in older for name, given in one.renamed.items()}
    export = Export(tuple(name for one in older for name in one.absent), renamed)
    export.thread(AUTOGRAD, "pt_autograd_0").gpu().add("TARGET_INFO_CUDA_DEVICE", gpuId=0, cudaId=0, pid=100)
    export.add("DIAGNOSTIC_EVENT", timestamp=0, severity=2, text="the clock drifted", globalPid=global_pid())
    export.add("TARGET_INFO_SYSTEM_ENV", name="NvDriverVersion", value="580.1")
    export.add("ANALYSIS_DETAILS", duration=1000, startTime=500, stopTime=1500)
    training_step(export).write(path)
    with closing(sqlite3.connect(path)) as connection, connection:
        for table in ("META_DATA_EXPORT", "EXPORT_META_DATA"):
            if "META_DATA_EXPORT" not in export._drop and renamed.get("META_DATA_EXPORT", "META_DATA_EXPORT") == table:
                update = f"UPDATE {table} SET value = ? WHERE name = ?"
                connection.execute(update, (version.schema, "EXPORT_SCHEMA_VERSION"))
                connection.execute(update, (version.nsys, "EXPORT_PRODUCT_VERSION"))
    return path


@cache
def unpacked(name: str) -> bytes:
    return lzma.decompress((DATA / "schema" / f"{name}.sqlite.xz").read_bytes())


def real(name: str, folder: Path) -> Path:
    """A real export with every table that its version knows."""
    path = folder / f"{name}.sqlite"
    path.write_bytes(unpacked(name))
    return path


def lazy(path: Path) -> Path:
    """The same without the tables that have no row, as nsys exports by default."""
    with closing(sqlite3.connect(path)) as connection, connection:
        connection.execute("PRAGMA synchronous = OFF")  # it is a copy
        connection.execute("BEGIN")
        for name in tables_of(connection):
            if not connection.execute(f'SELECT EXISTS (SELECT 1 FROM "{name}")').fetchone()[0]:
                connection.execute(f'DROP TABLE "{name}"')
    return path


def tables_of(connection: sqlite3.Connection, of: str = "main") -> list[str]:
    return [name for (name,) in connection.execute(f"SELECT name FROM {of}.sqlite_master WHERE type = 'table'")]


def columns_of(connection: sqlite3.Connection, table: str, of: str = "main") -> list[str]:
    return [row[1] for row in connection.execute(f'PRAGMA {of}.table_info("{table}")')]


def invoke(*arguments: object) -> Result:
    """A command that ends with 0, or with 1 and one line of error."""
    result = CliRunner().invoke(cli, [*map(str, arguments)])
    if result.exit_code:
        assert isinstance(result.exception, NsysAnalyzerError), result.exception
        assert "\n" not in str(result.exception)
        assert result.exception.hint
    return result


def output(*arguments: object) -> str:
    result = invoke(*arguments)
    assert result.exit_code == 0, result.exception
    return result.stdout


def figures(path: Path) -> Any:
    return json.loads(output("report", path, "--format", "json"))["captures"]


def phases(path: Path) -> list[dict[str, Any]]:
    (capture,) = figures(path)
    return list(capture["phases"])


def warnings(path: Path) -> list[str]:
    return [warning for summary in summarize(Trace.load(path), "t") for warning in say_all(summary.warnings)]


def run_all(path: Path, folder: Path) -> Iterator[str]:
    """What every command prints or writes; a copy to share is reported like its original."""
    report, copy = folder / "report.md", folder / f"copy_of_{path.name}"
    output("report", path, "-o", report, "--no-figures")
    yield report.read_text(encoding="utf-8")
    yield output("report", path, "--format", "json")
    yield output("info", path)
    yield output("share", path, "-o", copy)
    assert phases(copy) == phases(path)
    for style in ("text", "csv", "json"):
        kernels = invoke("kernels", path, "--format", style)
        yield kernels.stdout or str(kernels.exception)


# --- real exports ---


@pytest.mark.parametrize("name", REAL)
def test_every_command_on_a_real_export(tmp_path: Path, name: str) -> None:
    path = real(name, tmp_path)
    report, _, info, _, *kernels = run_all(path, tmp_path)
    assert "forward" in report
    assert "computing softmax: 5" in info
    assert all("contains no kernels" in said and RECORD_COMMAND in said for said in kernels)


@pytest.mark.parametrize("name", REAL)
def test_a_real_export_loses_no_row(tmp_path: Path, name: str) -> None:
    """Five steps of a range, three phases and one range in forward; and the warm-up around two of them."""
    trace = Trace.load(real(name, tmp_path))
    assert trace.left_out == ()
    assert len(trace.ranges) == 5 * (1 + 3 + 1) + 1
    assert len(trace.open_ranges) == 0
    found = {phase["phase"]: phase for phase in phases(trace.path)}
    assert list(found) == [*SLEEPS, "step"]
    for phase, least in SLEEPS.items():
        assert (found[phase]["instances"], found[phase]["warmup_instances"]) == (3, 2)
        assert found[phase]["wall_ms"]["min"] >= least


@pytest.mark.parametrize("name", ONE_REPORT[1:])
def test_one_report_has_the_same_figures_by_whatever_version_it_was_exported(tmp_path: Path, name: str) -> None:
    assert phases(real(name, tmp_path)) == phases(real(ONE_REPORT[0], tmp_path))


def test_times_that_count_from_1970_change_no_figure(tmp_path: Path) -> None:
    """``nsys export --ts-normalize=true`` adds the moment of the capture to each time: 1.8e18 ns."""
    assert phases(real(UTC, tmp_path)) == phases(real("nsys2024.2", tmp_path))
    assert warnings(tmp_path / f"{UTC}.sqlite") == warnings(tmp_path / "nsys2024.2.sqlite")


@pytest.mark.parametrize("name", [name for name in REAL if name != UTC])
def test_tables_without_rows_change_nothing(tmp_path: Path, name: str) -> None:
    (tmp_path / "lazy").mkdir()
    every = real(name, tmp_path)
    some = lazy(real(name, tmp_path / "lazy"))
    assert phases(every) == phases(some)
    assert warnings(every) == warnings(some)
    assert output("info", every) == output("info", some)
    assert Trace.load(every).costly_tables == ()


# --- rows in any order, as of 2025.6 on ---


def in_another_order(source: Path, path: Path, random: Random) -> Path:
    """A copy of an export with the rows of every table in another order."""
    shutil.copy(source, path)
    with closing(sqlite3.connect(path)) as connection, connection:
        connection.execute("PRAGMA synchronous = OFF")  # it is a copy
        for table in tables_of(connection):
            rows = connection.execute(f'SELECT * FROM "{table}"').fetchall()
            random.shuffle(rows)
            connection.execute(f'DELETE FROM "{table}"')
            if rows:
                connection.executemany(f'INSERT INTO "{table}" VALUES ({",".join("?" * len(rows[0]))})', rows)
    return path


@pytest.mark.parametrize("name", ["checkpoint_fp16", "graphnode_small256", "ddp2_small256"])
def test_rows_in_another_order_change_no_figure_of_a_real_capture(
    real_capture: RealCapture, tmp_path: Path, name: str
) -> None:
    path = real_capture(name)
    (tmp_path / "other").mkdir()
    assert figures(in_another_order(path, tmp_path / "other" / path.name, Random(1))) == figures(path)


@settings(max_examples=20, deadline=None)
@given(st.randoms(use_true_random=False))
def test_rows_in_another_order_change_no_figure(random: Random) -> None:
    # Of the five launches of each step only the first four of the capture tell how long a launch takes: those of one
    # step last 2 ns, and those of the two behind it 7 and 12.
    with TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        patch.setattr(trace_module, "_CALLS_FOR_MEDIAN", 4)
        export = Export().thread(AUTOGRAD, "pt_autograd_0").gpu()
        for step in range(3):
            training_step(export, 1000 * step)
        for row in export._rows["CUPTI_ACTIVITY_KIND_RUNTIME"]:
            row["end"] = row["start"] + 2 + 5 * (row["start"] // 1000)
        path = export.write(Path(folder) / "t.sqlite")
        (Path(folder) / "other").mkdir()
        other = in_another_order(path, Path(folder) / "other" / "t.sqlite", random)
        assert (Trace.load(other).median_launch_ns, figures(other)) == (2, figures(path))


# --- GPU captures in the tables of older versions ---


def as_exported_by(version: str, capture: Path, folder: Path) -> Path:
    """A capture of nsys 2025.3 in the tables and columns that an older version has; what it has not is lost."""
    path = real(version, folder)
    with closing(sqlite3.connect(path)) as connection, connection:
        connection.execute("ATTACH ? AS newer", (str(capture),))
        newer = tables_of(connection, "newer")
        for table in tables_of(connection):
            connection.execute(f'DELETE FROM "{table}"')
            source = "META_DATA_EXPORT" if table == "EXPORT_META_DATA" else table
            if table == "CUDA_GRAPH_EVENTS" and "graphNodeId" in columns_of(connection, table):
                source = "CUDA_GRAPH_NODE_EVENTS"
            if source in newer:
                there = columns_of(connection, source, "newer")
                common = ", ".join(f'"{name}"' for name in columns_of(connection, table) if name in there)
                connection.execute(f'INSERT INTO "{table}" ({common}) SELECT {common} FROM newer."{source}"')
    return path


@pytest.mark.parametrize(
    ("version", "name"),
    [
        ("nsys2022.4", "train_small256"), ("nsys2022.4", "graphnode_small256"), ("nsys2022.4", "ddp2_small256"),
        ("nsys2023.4", "graphnode_small256"), ("nsys2024.2", "graphnode_small256"), ("nsys2024.2", "ddp2_small256"),
    ],
)  # fmt: skip
def test_a_gpu_capture_in_the_tables_of_an_older_version(
    tmp_path: Path, real_capture: RealCapture, version: str, name: str
) -> None:
    """Each tells launches, names, ranges and graph nodes, and what the GPUs are where they are all alike.

    Up to 2023.4 the nodes of graphs are in CUDA_GRAPH_EVENTS, which is a table of graphs in 2024.2.
    """
    newer = Trace.load(real_capture(name))
    older = Trace.load(as_exported_by(version, real_capture(name), tmp_path))
    before, after = summarize(newer, "t"), summarize(older, "t")
    assert [summary.phases for summary in after] == [summary.phases for summary in before]
    assert [summary.coverage for summary in after] == [summary.coverage for summary in before]
    assert {summary.gpu for summary in after} == {"NVIDIA H200"}
    expected, found = find_graph_captures(newer), find_graph_captures(older)
    assert len(expected.operation) > 0 or name != "graphnode_small256"
    assert found.operation.tolist() == expected.operation.tolist()
    assert found.time.tolist() == expected.time.tolist()


# --- versions built from the table ---


@pytest.mark.parametrize("version", VERSIONS, ids=lambda version: version.schema or version.nsys)
def test_every_command_on_a_built_export(tmp_path: Path, version: Version) -> None:
    """Forward 100 + 20 ns, backward 200 + 40, optimizer 80, together 440: as in every version."""
    path = built(version, tmp_path / "t.sqlite")
    report, _, info, _, table, csv, rows = run_all(path, tmp_path)
    trace = Trace.load(path)
    (summary,) = summarize(trace, "t")
    sums = {phase.phase: round((phase.kernel_time_ms.mean or 0) * 1e6) for phase in summary.phases}
    assert sums == {"forward": 120, "backward": 240, "optimizer": 80, "step": 440}
    assert trace.left_out == ()
    assert (trace.metadata.schema_version, trace.metadata.profiler_version) == (
        version.schema or "unknown",
        version.nsys if version.schema and version.nsys else "unknown",
    )
    gpu = trace.metadata.gpu(100, 0)
    assert gpu is not None
    assert (gpu.name, gpu.memory_bytes, gpu.sm_count) == ("NVIDIA H200", 150 << 30, 132)
    assert all("ampere_sgemm" in text for text in (report, table, csv, rows))
    assert f"schema {version.schema or 'unknown'}" in info


@pytest.mark.parametrize("shift", [0, 5 * 10**9, -5 * 10**9, 1_795_314_474_713_240_567])
@pytest.mark.parametrize("told", [True, False])
def test_times_that_were_shifted(tmp_path: Path, shift: int, told: bool) -> None:
    """By any ``--ts-shift``, whether the export tells the length of the session or not."""
    export = training_step(Export().gpu().thread(AUTOGRAD, "pt_autograd_0"), at=shift)
    export.add("META_DATA_EXPORT", name="EXPORT_CONFIG_TIME_SHIFT", value=str(shift))
    if told:
        export.add("ANALYSIS_DETAILS", duration=1000, startTime=shift + 500, stopTime=shift + 1500)
    path = export.write(tmp_path / "t.sqlite")
    plain = training_step(Export().gpu().thread(AUTOGRAD, "pt_autograd_0")).write(tmp_path / "plain.sqlite")
    assert Trace.load(path).left_out == ()
    assert phases(path) == phases(plain)
    output("share", path, "-o", tmp_path / "copy.sqlite")
    assert phases(tmp_path / "copy.sqlite") == phases(plain)


@pytest.mark.parametrize("text", ["", "soon", "1e18", str(2**80), "-" + str(2**62)])
def test_a_shift_that_is_none(tmp_path: Path, text: str) -> None:
    export = training_step(Export().gpu()).add("META_DATA_EXPORT", name="EXPORT_CONFIG_TIME_SHIFT", value=text)
    assert Trace.load(export.write(tmp_path / "t.sqlite")).left_out == ()


@pytest.mark.parametrize("table", ["OSRT_API", "COMPOSITE_EVENTS", "CUDA_CALLCHAINS"])
def test_a_costly_table_without_rows_was_not_recorded(tmp_path: Path, table: str) -> None:
    path = training_step(Export().gpu()).write(tmp_path / "t.sqlite")
    with closing(sqlite3.connect(path)) as connection, connection:
        connection.execute(f"CREATE TABLE {table} (id INTEGER, start INTEGER)")
    assert Trace.load(path).costly_tables == ()
    with closing(sqlite3.connect(path)) as connection, connection:
        connection.execute(f"INSERT INTO {table} VALUES (1, 2)")
    assert Trace.load(path).costly_tables == (table,)
    output("share", path, "-o", tmp_path / "copy.sqlite")
    assert Trace.load(tmp_path / "copy.sqlite").costly_tables == (table,)
