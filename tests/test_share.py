"""Tests that the copy of ``share`` holds nothing of the owner, and gives the same report."""

from __future__ import annotations

import json
import lzma
import re
import resource
import shutil
import sqlite3
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from nsys_analyzer import Trace
from nsys_analyzer.cli.main import cli
from nsys_analyzer.errors import NsysAnalyzerError, TraceError
from nsys_analyzer.share import share
from tests.conftest import DATA
from tests.support.export import Export, shared_copy, training_step
from tests.support.kineto import MAIN, Kineto

RealCapture = Callable[[str], Path]
#: Every capture of tests/data that has something to analyse.
CAPTURES = sorted(
    str(path.relative_to(DATA))
    for pattern in ("*.sqlite.xz", "schema/*.sqlite.xz", "*.sqlite", "*.json.gz")
    for path in DATA.glob(pattern)
)

#: Variables of the machine of a person called zelda.
VARIABLES = {
    "PROJECT": "bluefalcon",
    "STORAGE_KEY": "k3y!",
    "DATABASE": "postgres://zeldadb:swordfish9@db.hyrule.org:5432/runs",
    "HOME": "/home/zelda",
    "MODE": "forward",
    "DTYPE": "bfloat16",
}
NUL_VARIABLES = {"SLURM_JOB_NAME": "nightly-run-17x", "WANDB_API_KEY": "0a1b2c3d4e5f60718293a4b5c6d7e8f901234567"}
HOST = "castle-17.hyrule.org"
#: Texts to plant, each with what of it must be gone.
PLANTED = {
    "in bluefalcon_step": "bluefalcon",
    "k3y!": "k3y!",
    "868686868": "868686868",
    "with swordfish9": "swordfish9",
    "nightly-run-17x": "nightly-run",
    NUL_VARIABLES["WANDB_API_KEY"]: "0a1b2c3d4e5f",
    HOST: "hyrule",
    "/home/zelda/hidden/train.py": "hidden",
    "of Zelda": "zelda",
    "link@hyrule.org": "link@",
    "192.168.77.13": "192.168.77",
    "GPU-a7d00f32-64fa-041e-83fb-5546b548f523": "64fa-041e",
    "--token tr1force": "tr1force",
    "https://link:pw@example.org/x?sig=1": "example.org",
    "-----BEGIN OPENSSH PRIVATE KEY-----\nb3BlbnNzaC1r": "b3BlbnNzaC1r",
}
PLANTED_TEXT = " and ".join(PLANTED)
FORBIDDEN = {*PLANTED.values(), "/home/", "SLURM_JOB_NAME", "STORAGE_KEY"}


def tables_of(connection: sqlite3.Connection) -> dict[str, list[str]]:
    """The columns of text of every table."""
    names = [name for (name,) in connection.execute("SELECT name FROM sqlite_master WHERE type = 'table'")]
    return {
        name: [row[1] for row in connection.execute(f"PRAGMA table_info('{name}')") if row[2] == "TEXT"]
        for name in names
    }


def add_row(connection: sqlite3.Connection, table: str, **values: object) -> None:
    """A row with something in every column, as many tables ask for it."""
    columns = [(row[1], row[2]) for row in connection.execute(f"PRAGMA table_info('{table}')")]
    row = [values.get(name, "" if kind == "TEXT" else 0) for name, kind in columns]
    connection.execute(f"INSERT INTO {table} VALUES ({', '.join('?' * len(row))})", row)


def add_owner(connection: sqlite3.Connection) -> None:
    """What nsys writes of a machine: properties of the capture, a block of variables, the host, the processes."""
    connection.execute("CREATE TABLE IF NOT EXISTS META_DATA_CAPTURE (name TEXT, value TEXT)")
    connection.execute("CREATE TABLE IF NOT EXISTS TARGET_INFO_SYSTEM_ENV (name TEXT, value TEXT)")
    connection.execute("CREATE TABLE IF NOT EXISTS PROCESSES (globalPid INTEGER, pid INTEGER, name TEXT)")
    capture = [("PROCESS_0:ENVIRONMENT_VARIABLE", f'{name}="{value}"') for name, value in VARIABLES.items()]
    capture += [("PROCESS_0:USER_NAME", "zelda"), ("DEVICE_DISPLAY_NAME", HOST)]
    for name, value in capture:
        add_row(connection, "META_DATA_CAPTURE", name=name, value=value)
    block = "\0".join(f"{name}={value}" for name, value in NUL_VARIABLES.items()) + "\0"
    connection.execute("INSERT INTO StringIds SELECT max(id) + 1, ? FROM StringIds", (block,))
    machine = [("Hostname", HOST), ("DeviceEnvironment", "OLDPWD=/home/zelda/hidden;PROJECT=bluefalcon")]
    for name, value in machine:
        add_row(connection, "TARGET_INFO_SYSTEM_ENV", name=name, value=value)
    add_row(connection, "PROCESSES", name="/home/zelda/hidden/train.py")


@pytest.fixture
def full_export(real_capture: RealCapture, tmp_path: Path) -> Path:
    """A capture of nsys 2025.3 with every table that one of the captures has, a row at least in each."""
    path = tmp_path / "full.sqlite"
    shutil.copy(real_capture("graphcapture_fp32"), path)
    with closing(sqlite3.connect(path)) as connection:
        for name in ("mem_small256", "ddp2_small256", "graphnode_small256", "graph_small256", "oom_fp32"):
            connection.execute("ATTACH ? AS other", (str(real_capture(name)),))
            present = {row[0] for row in connection.execute("SELECT name FROM main.sqlite_master")}
            created = connection.execute("SELECT name, sql FROM other.sqlite_master WHERE type = 'table'").fetchall()
            for table, sql in created:
                if table not in present:
                    connection.execute(sql)
                    connection.execute(f"INSERT INTO main.{table} SELECT * FROM other.{table} LIMIT 20")
            connection.commit()
            connection.execute("DETACH other")
        for table in tables_of(connection):
            if not connection.execute(f"SELECT count(*) FROM {table}").fetchone()[0]:
                add_row(connection, table)
        connection.commit()
    return path


def found_in(path: Path) -> set[str]:
    """Which of the forbidden texts a file holds, in either case."""
    content = path.read_bytes().lower()
    return {text for text in FORBIDDEN if text.lower().encode() in content}


def test_nothing_planted_in_any_text_column_is_in_the_copy(full_export: Path, tmp_path: Path) -> None:
    with closing(sqlite3.connect(full_export)) as connection:
        planted = 0
        for table, columns in tables_of(connection).items():
            properties = {"name", "value"} <= set(columns)  # which keep their names, or none of them would be read
            for column in set(columns) - ({"name"} if properties else set()):
                connection.execute(f"UPDATE {table} SET {column} = coalesce({column} || ' ', '') || ?", (PLANTED_TEXT,))
                planted += 1
            if properties:
                add_row(connection, table, name=PLANTED_TEXT, value=PLANTED_TEXT)
        connection.execute("UPDATE DIAGNOSTIC_EVENT SET severity = 2")  # each message a warning, and kept
        add_owner(connection)
        connection.commit()
    assert planted == 71  # as many columns of text have the tables of these captures
    assert found_in(full_export) == FORBIDDEN
    copy = shared_copy(full_export, tmp_path / "copy.sqlite")
    assert found_in(copy) == set()
    with closing(sqlite3.connect(copy)) as connection:
        texts = [
            text
            for table, columns in tables_of(connection).items()
            for column in columns
            for (text,) in connection.execute(f"SELECT {column} FROM {table}")
        ]
    assert sum("…" in text or "alias" in text for text in texts if text) > 30  # they were kept, and scrubbed


def differences(before: object, after: object, path: str = "") -> Iterator[str]:
    """Where two reports have other figures or other names; an alias or a mark is no other name."""
    if isinstance(before, dict) and isinstance(after, dict):
        for key in before.keys() | after.keys():
            yield from differences(before.get(key), after.get(key), f"{path}.{key}")
    elif isinstance(before, list) and isinstance(after, list) and len(before) == len(after):
        for one, other in zip(before, after, strict=True):
            yield from differences(one, other, f"{path}]")
    elif before != after and not (isinstance(before, str) and ("alias" in str(after) or "…" in str(after))):
        yield f"{path}: {before} is {after} now"


def figures_of(trace: Path) -> list[dict[str, Any]]:
    """The data of a report about one trace, but for the names of its file."""
    result = CliRunner().invoke(cli, ["report", str(trace), "--format", "json"], catch_exceptions=False)
    assert result.exit_code == 0
    captures = json.loads(result.stdout)["captures"]
    return [{key: value for key, value in one.items() if key not in ("name", "source")} for one in captures]


def capture(name: str, folder: Path) -> Path:
    """A capture of tests/data in a folder of its own, uncompressed."""
    path = folder / Path(name).name.removesuffix(".xz")
    with lzma.open(DATA / name) if name.endswith(".xz") else (DATA / name).open("rb") as packed:
        path.write_bytes(packed.read())
    return path


@pytest.mark.parametrize("name", CAPTURES)
def test_the_copy_gives_the_same_figures(tmp_path: Path, name: str) -> None:
    """Of a capture with a range, an environment, a host and a user that nobody else may see."""
    raw = capture(name, tmp_path)
    if raw.suffix == ".sqlite":
        with closing(sqlite3.connect(raw)) as connection:
            add_owner(connection)
            if "NVTX_EVENTS" in tables_of(connection):
                for text in PLANTED:
                    add_row(connection, "NVTX_EVENTS", eventType=59, text=text, textId=None, end=1)
            connection.commit()
    # Of the same name, for it may tell a configuration.
    copy = tmp_path / "copies" / f"{raw.name.partition('.')[0]}.sqlite"
    renamed = share(raw, copy, force=True)  # makes the folder
    assert list(differences(figures_of(raw), figures_of(copy))) == []
    assert found_in(copy) == set()
    assert {one.text for one in renamed} <= {*PLANTED, *OWN_NAMES}


#: Names that the programs behind the captures chose, and a thread of nsys.
OWN_NAMES = {
    "capture", "Thunk:#hlo_op=command_buffer_1#", "XlaModule:#hlo_module=jit_f,program_id=2654#", "fusion_147",
    "nsys-launcher",
}  # fmt: skip


def test_the_copy_keeps_what_was_read_and_no_more(real_capture: RealCapture, tmp_path: Path) -> None:
    copy = shared_copy(real_capture("mem_small256"), tmp_path / "copy.sqlite")
    with closing(sqlite3.connect(copy)) as connection:
        tables = tables_of(connection)
        assert not [name for name in tables if name.startswith(("ENUM_", "PROCESSES"))]
        recorded = connection.execute("SELECT * FROM META_DATA_CAPTURE").fetchall()
        assert recorded == [("CAPTURE_EVENT_TYPE", "NvtxEvents"), ("CAPTURE_EVENT_TYPE", "Cuda")]
        assert "TARGET_INFO_SESSION_START_TIME" not in tables
        kept = {row[1] for row in connection.execute("PRAGMA table_info('CUDA_GPU_MEMORY_USAGE_EVENTS')")}
        assert {"start", "bytes"} <= kept
        assert "name" not in kept
        gpu = {row[1] for row in connection.execute("PRAGMA table_info('TARGET_INFO_GPU')")}
        assert not gpu & {"uuid", "busLocation", "luid", "ctrlDevPath"}
        names = connection.execute("SELECT name FROM META_DATA_EXPORT ORDER BY name").fetchall()
        assert [name for (name,) in names] == [
            "EXPORT_PRODUCT_NAME",
            "EXPORT_PRODUCT_VERSION",
            "EXPORT_SCHEMA_VERSION",
        ]
        (unused,) = connection.execute(
            "SELECT count(*) FROM StringIds WHERE id NOT IN (SELECT demangledName FROM CUPTI_ACTIVITY_KIND_KERNEL"
            " UNION SELECT nameId FROM CUPTI_ACTIVITY_KIND_RUNTIME UNION SELECT nameId FROM ThreadNames"
            " UNION SELECT nameId FROM PROFILER_OVERHEAD UNION SELECT textId FROM NVTX_EVENTS WHERE textId NOTNULL)"
        ).fetchone()
        assert unused == 0
        assert connection.execute("PRAGMA integrity_check").fetchone() == ("ok",)


def test_a_numbered_table_and_old_names(tmp_path: Path) -> None:
    export = Export(
        drop=("DIAGNOSTIC_EVENT.severity",),
        rename={"NVTX_EVENTS": "NVTX_EVENTS_V2", "META_DATA_EXPORT": "EXPORT_META_DATA", "StringIds": "StringIds"},
    )
    export.add("DIAGNOSTIC_EVENT", text="Some events might be missing, see /home/zelda/run.log")
    export.add("DIAGNOSTIC_EVENT", text="Profiling has started.")
    trace = training_step(export.gpu()).write(tmp_path / "old.sqlite")
    copy = Trace.load(shared_copy(trace, tmp_path / "copy.sqlite"))
    assert [message.text for message in copy.metadata.diagnostics] == ["Some events might be missing …"]
    assert set(copy.ranges.names) >= {"step", "forward", "backward", "optimizer"}
    assert copy.metadata.profiler_version == "2025.3.2.0"
    assert len(copy.operations) == 5


def test_the_options_of_nsys_are_kept_and_the_program_is_not(tmp_path: Path) -> None:
    export = training_step(Export().gpu())
    for name, value in (
        ("CAPTURE_EVENT_TYPE", "Cuda"),
        ("CUDA_GRAPH_TRACE_OPTIONS:MODE", "Node"),
        ("PROCESS_0:COMMAND", "/home/zelda/train.py"),
        ("PROCESS_0:ARGUMENT_0", "--project=falcon"),
        ("PROCESS_0:WORKING_DIR", "/home/zelda"),
    ):
        export.add("META_DATA_CAPTURE", name=name, value=value)
    copy = shared_copy(export.write(tmp_path / "a.sqlite"), tmp_path / "b.sqlite")
    with closing(sqlite3.connect(copy)) as connection:
        kept = connection.execute("SELECT name, value FROM META_DATA_CAPTURE").fetchall()
    assert kept == [("CAPTURE_EVENT_TYPE", "Cuda"), ("CUDA_GRAPH_TRACE_OPTIONS:MODE", "Node")]


def test_threads_of_other_programs_are_left_out(tmp_path: Path) -> None:
    export = training_step(Export().gpu()).thread(150, "pt_autograd_0").thread(7, "secret-daemon", pid=900)
    copy = Trace.load(shared_copy(export.write(tmp_path / "a.sqlite"), tmp_path / "b.sqlite"))
    assert sorted(copy.metadata.thread_names.values()) == ["pt_autograd_0", "python3"]


def test_names_that_are_no_text(step_trace: Path, tmp_path: Path) -> None:
    """A name cut in the middle of a character reads as before; a range without a name stays without one."""
    with closing(sqlite3.connect(step_trace)) as connection:
        connection.execute("UPDATE NVTX_EVENTS SET text = CAST(x'736368c3' AS TEXT) WHERE text = 'optimizer'")
        connection.execute("UPDATE NVTX_EVENTS SET text = NULL WHERE text = 'backward'")
        connection.commit()
    copy = Trace.load(shared_copy(step_trace, tmp_path / "copy.sqlite", keep=[re.compile("sch.")]))
    assert copy.ranges.names == Trace.load(step_trace).ranges.names


def test_a_trace_of_pytorch_gives_the_same_figures_and_no_class_of_the_programs_own(tmp_path: Path) -> None:
    """An optimizer that PyTorch does not have ends the step as any other, and a Function of its own has a backward."""
    trace = Kineto(hostname="castle-17").gpu()
    names = (
        ("nn.Module: BluefalconNet_0", 0, 100), ("Optimizer.step#BluefalconAdam.step", 300, 50), ("of Zelda", 2, 4)
    )  # fmt: skip
    kernels = (("ampere_sgemm_128x64_tn", 20), ("void bluefalcon::softmax_kernel<float>(int)", 140),
               ("bluefalcon_kernel", 310))  # fmt: skip
    for i in range(4):
        start = 1000 * i
        for name, at, us in names:
            (trace.module if name.startswith("nn.") else trace.range)(name.removeprefix("nn.Module: "), start + at, us)
        trace.operator("BluefalconAttention", start + 10, 50, sequence=i)
        for node in ("autograd::engine::evaluate_function: BluefalconAttentionBackward", "BluefalconAttentionBackward"):
            trace.operator(node, start + 120, 90, tid=2, sequence=i, forward_thread=1)
        for j, (kernel, at) in enumerate(kernels):
            trace.launch(3 * i + j + 1, start + at, tid=2 if j == 1 else MAIN)
            trace.kernel(kernel, 3 * i + j + 1, start + at + 10, 30 + j)
    path = trace.write(tmp_path / "trace.json")
    copy = tmp_path / "copy.sqlite"
    renamed = share(path, copy)
    assert [phase["phase"] for phase in figures_of(path)[0]["phases"]][:3] == ["forward", "backward", "optimizer"]
    assert list(differences(figures_of(path), figures_of(copy))) == []
    assert found_in(copy) == set()
    assert {one.text for one in renamed} >= {"BluefalconAdam", "BluefalconNet", "of Zelda", "bluefalcon_kernel"}


def test_calls_that_block_are_kept_with_their_times(tmp_path: Path) -> None:
    """What explains idle time is not private; a look-up, which no figure needs, goes."""
    blocking = [
        "cudaDeviceSynchronize_v3020", "cudaStreamSynchronize_v3020", "cudaEventSynchronize_v3020", "cudaMemcpy_v3020",
        "cudaMemcpyAsync_v3020", "cudaMalloc_v3020", "cudaFree_v3020", "cudaHostAlloc_v3020", "cuMemAlloc_v2",
        "cuMemFree_v2", "cuStreamSynchronize", "hipDeviceSynchronize", "hipMemcpyWithStream", "hipMalloc", "hipFree",
    ]  # fmt: skip
    export = training_step(Export().gpu())
    for i, name in enumerate([*blocking, "cuKernelGetName"]):
        export.call(name, 2000 + 10 * i)
    path = shared_copy(export.write(tmp_path / "a.sqlite"), tmp_path / "b.sqlite")
    with closing(sqlite3.connect(path)) as connection:
        calls = connection.execute(
            "SELECT value, start, end FROM CUPTI_ACTIVITY_KIND_RUNTIME JOIN StringIds ON id = nameId"
            " WHERE start >= 2000"
        ).fetchall()
    assert calls == [(name, 2000 + 10 * i, 2001 + 10 * i) for i, name in enumerate(blocking)]


def refusals(folder: Path) -> Iterator[tuple[Path, Path, str]]:
    trace = folder / "step.sqlite"
    (folder / "folder.sqlite").mkdir()
    (folder / "there.sqlite").write_text("mine")
    (folder / "text.sqlite").write_text("no database at all")
    (folder / "linked.sqlite").symlink_to(trace)
    sqlite3.connect(folder / "other.sqlite").execute("CREATE TABLE t (a)").connection.close()
    yield trace, trace, "is the input itself"
    yield trace, folder / "linked.sqlite", "is the input itself"
    yield trace, folder / "there.sqlite", "exists already. Name another file with -o, or replace it with --force"
    yield trace, folder / "folder.sqlite", "is a folder"
    yield trace, folder / "report.md", "has no suffix .sqlite. Name it report.sqlite"
    yield trace, folder / "there.sqlite" / "x.sqlite", "cannot be written (Not a directory)"
    yield folder / "absent.sqlite", folder / "new.sqlite", "No such file"
    yield folder / "text.sqlite", folder / "new.sqlite", "is not a SQLite file"
    yield folder / "other.sqlite", folder / "new.sqlite", "not an nsys export"


def test_refusals(step_trace: Path, tmp_path: Path) -> None:
    for trace, output, message in refusals(tmp_path):
        before = sorted(tmp_path.iterdir())
        with pytest.raises(NsysAnalyzerError) as error:
            share(trace, output)
        assert message in str(error.value)
        assert "\n" not in str(error.value)
        assert sorted(tmp_path.iterdir()) == before  # nothing is left behind
    assert (tmp_path / "there.sqlite").read_text() == "mine"
    with pytest.raises(NsysAnalyzerError, match="is the input itself"):
        share(step_trace, step_trace, force=True)


def test_a_link_stays_and_its_file_keeps_its_permissions(step_trace: Path, tmp_path: Path) -> None:
    (tmp_path / "far").mkdir()
    real, link = tmp_path / "far/real.sqlite", tmp_path / "link.sqlite"
    real.write_text("mine")
    real.chmod(0o640)
    link.symlink_to(real)
    assert len(Trace.load(shared_copy(step_trace, link, force=True)).operations) == 5
    assert link.is_symlink()
    assert real.stat().st_mode & 0o777 == 0o640
    assert [path.name for path in real.parent.iterdir()] == ["real.sqlite"]


def test_a_damaged_export_leaves_nothing(real_capture: RealCapture, tmp_path: Path) -> None:
    damaged = tmp_path / "damaged.sqlite"
    content = bytearray(real_capture("graphcapture_fp32").read_bytes())
    content[8192:40960] = bytes(32768)  # pages 3 to 10, and the size as it was
    damaged.write_bytes(content)
    with pytest.raises(TraceError, match="is damaged or truncated"):
        share(damaged, tmp_path / "copy.sqlite")
    assert list(tmp_path.iterdir()) == [damaged]


def test_a_disk_that_takes_no_more_leaves_nothing(real_capture: RealCapture, tmp_path: Path) -> None:
    trace, unlimited = real_capture("train_small256"), resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, unlimited[1]))  # the copy is of a megabyte
    try:
        with pytest.raises(NsysAnalyzerError, match=r"copy\.sqlite cannot be written"):
            share(trace, tmp_path / "copy.sqlite")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, unlimited)
    assert list(tmp_path.iterdir()) == []


def test_what_it_says(full_export: Path, tmp_path: Path) -> None:
    with closing(sqlite3.connect(full_export)) as connection:
        add_owner(connection)
        add_row(connection, "NVTX_EVENTS", eventType=59, text="load /opt/x of ann", textId=None)
        connection.commit()
    arguments = ["share", str(full_export), "-o", str(tmp_path / "copy.sqlite")]

    def printed(*more: str) -> str:
        return CliRunner().invoke(cli, [*arguments, *more], catch_exceptions=False).stdout

    said = printed()
    assert re.search(r"Names replaced by an alias: \d\n(  alias \w: .*\n)*  alias \w: load /opt/x of ann\n", said)
    assert not [text for text in FORBIDDEN if text in said]
    assert "load" not in printed("--force", "--keep", "other", "--keep", "load /.*").partition("alias: ")[2]
    assert "Names replaced by an alias: 0\n" in printed("--force", "--keep-all-names")
    assert CliRunner().invoke(cli, [*arguments, "--force", "--keep", "("]).exit_code == 2


def test_the_numbers_of_operators_are_kept(tmp_path: Path) -> None:
    trace = Kineto().operator("aten::mm", 0, 9, sequence=7)
    trace.operator("MmBackward0", 20, 9, sequence=7, forward_thread=1).module("Linear_0", 0, 9)
    renamed = share(trace.write(tmp_path / "t.json"), tmp_path / "copy.sqlite")
    copy = Trace.load(tmp_path / "copy.sqlite")
    operators = copy.operators
    assert (operators.sequence.tolist(), operators.forward_thread.tolist()) == ([7, 7], [0, 1])
    assert copy.ranges.names == ("", "nn.Module: Linear_0")
    assert renamed == ()
