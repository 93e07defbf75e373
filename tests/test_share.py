"""``share``: nothing of the owner is in the copy, and the copy gives the same report."""

from __future__ import annotations

import json
import random
import re
import resource
import shutil
import sqlite3
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path

import click
import pytest
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st

from nsys_analyzer import Trace
from nsys_analyzer.analysis.kernels.class_rules import RULES, Rule
from nsys_analyzer.analysis.kernels.classes import classify, first_rule, open_classes
from nsys_analyzer.analysis.kernels.precision import gemm_precision
from nsys_analyzer.analysis.ranges.phases import PhaseNames
from nsys_analyzer.cli.main import cli
from nsys_analyzer.errors import NsysAnalyzerError, TraceError
from nsys_analyzer.share.copy import share
from nsys_analyzer.share.private import PrivateValues, private_parts
from nsys_analyzer.share.scrub import Renamed, Scrubber, shown_command
from nsys_analyzer.share.vocabulary import is_ordinary
from tests.conftest import DATA, ROOT
from tests.support.export import Export, training_step
from tests.support.kineto import Kineto
from tests.test_share_names import FAMILIES

RealCapture = Callable[[str], Path]
CAPTURES = sorted(
    path.name.split(".")[0]
    for path in (*DATA.glob("*.sqlite.xz"), *(ROOT / "examples").glob("*.sqlite"))
    if path.name != "nccl_init.sqlite.xz"  # a few tables of a capture
)

#: Variables of the machine of a person called zelda, and what of them must not be found.
VARIABLES = {
    "PROJECT": "bluefalcon",
    "BUILD_TAG": "v7-rc4+nightly!x",
    "STORAGE_KEY": "k3y!",
    "SERVICE_PASSWORD": "868686868",
    "DATABASE": "postgres://zeldadb:swordfish9@db.hyrule.org:5432/runs",
    "HOME": "/home/zelda",
    "USER": "zelda",
    "HOSTNAME": "tower-9",
    "LANG": "C.UTF-8",
    "SHLVL": "1",
    "MODE": "forward",
    "BACKEND": "native",
    "NVIDIA_DRIVER_CAPABILITIES": "compute,utility",
    "DTYPE": "bfloat16",
}
NUL_VARIABLES = {"SLURM_JOB_NAME": "nightly-run-17x", "WANDB_API_KEY": "0a1b2c3d4e5f60718293a4b5c6d7e8f901234567"}
HOST = "castle-17.hyrule.org"
#: Texts to plant, each with what of it must be gone.
PLANTED = {
    "bluefalcon": "bluefalcon",
    "in bluefalcon_step": "bluefalcon",
    "v7-rc4+nightly!x": "rc4+nightly",
    "k3y!": "k3y!",
    "868686868": "868686868",
    "with swordfish9": "swordfish9",
    "nightly-run-17x": "nightly-run",
    NUL_VARIABLES["WANDB_API_KEY"]: "0a1b2c3d4e5f",
    HOST: "hyrule",
    "at tower-9.lost-woods.net": "lost-woods",
    "at tower-90.lost-woods.net": "lost-woods",
    "on castle-17": "castle-17",
    "/home/zelda/hidden/train.py": "hidden",
    "of Zelda": "zelda",
    "/srv/hidden/data": "/srv/",
    r"C:\hidden\train.py": "hidden",
    "hidden/module.py": "hidden",
    "link@hyrule.org": "link@",
    "192.168.77.13": "192.168.77",
    "fe80::1ff:fe23:4567:890a": "fe80",
    "0a:1b:2c:3d:4e:5f": "1b:2c",
    "0000:8a:00.0": "8a:00",
    "GPU-a7d00f32-64fa-041e-83fb-5546b548f523": "64fa-041e",
    "sk-proj-AbCdEfGhIjKlMnOpQrSt": "AbCdEfGh",
    "hf_AbCdEfGhIjKlMnOpQrStUv": "AbCdEfGh",
    "ghp_0123456789abcdefABCDEF0123456789abcd": "0123456789abcdef",
    "AKIAIOSFODNN7EXAMPLE": "IOSFODNN7",
    "eyJhbGciOiJIUzI1NiJ9.eyJzdWIiOiIxMjM0NTY3ODkwIn0.sflKxw": "eyJhbGci",
    "aws wJalrXUtnFEMIK7MDENGbPxRfiCYEXAMPLEKEY12": "wJalr",
    "password=hunter2": "hunter2",
    "api_key: 'tr1force'": "tr1force",
    "--token tr1force": "tr1force",
    "https://link:pw@example.org/x?sig=1": "example.org",
    "wss://relay.example.net": "relay",
    "Bearer tr1f-orce.x9": "tr1f-orce",
    "-----BEGIN OPENSSH PRIVATE KEY-----\nb3BlbnNzaC1r": "b3BlbnNzaC1r",  # the last, for it takes the rest with it
}
PLANTED_TEXT = " and ".join(PLANTED)
FORBIDDEN = {*PLANTED.values(), "/home/", "tr1force", "SLURM_JOB_NAME", "STORAGE_KEY"}


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
    copy = share(full_export, tmp_path / "copy.sqlite").path
    assert found_in(copy) == set()
    with closing(sqlite3.connect(copy)) as connection:
        texts = [
            text
            for table, columns in tables_of(connection).items()
            for column in columns
            for (text,) in connection.execute(f"SELECT {column} FROM {table}")
        ]
    assert sum("…" in text or "alias" in text for text in texts if text) > 30  # they were kept, and scrubbed


def report_of(trace: Path) -> str:
    """The report and its data, as text."""
    printed = [
        CliRunner().invoke(cli, ["report", str(trace), *more], catch_exceptions=False)
        for more in (["-o", "-"], ["--format", "json"])
    ]
    assert [result.exit_code for result in printed] == [0, 0]
    return "".join(result.stdout for result in printed)


@pytest.mark.parametrize("name", CAPTURES)
def test_the_copy_gives_the_same_report(real_capture: RealCapture, tmp_path: Path, name: str) -> None:
    """Of a capture on a machine whose variables have the names of phases, of kernels' namespaces and of types."""
    raw = tmp_path / f"{name}.sqlite"
    shutil.copy(real_capture(name), raw)
    with closing(sqlite3.connect(raw)) as connection:
        add_owner(connection)
        connection.commit()
    shared = share(raw, tmp_path / "copies" / f"{name}.sqlite")
    assert report_of(shared.path) == report_of(raw)
    assert shared.texts == 0  # no name of a real kernel or range was touched
    assert shared.renamed == ()
    assert shared.bytes_after < shared.bytes_before
    # NUL_VARIABLES, VARIABLES and OLDPWD: each variable once, though PROJECT is in two places
    assert shared.variables == len(NUL_VARIABLES) + len(VARIABLES) + 1
    assert found_in(shared.path) == set()


def test_the_copy_keeps_what_was_read_and_no_more(real_capture: RealCapture, tmp_path: Path) -> None:
    copy = share(real_capture("mem_small256"), tmp_path / "copy.sqlite").path
    with closing(sqlite3.connect(copy)) as connection:
        tables = tables_of(connection)
        assert not [name for name in tables if name.startswith(("ENUM_", "PROCESSES"))]
        recorded = connection.execute("SELECT * FROM META_DATA_CAPTURE").fetchall()
        assert recorded == [("CAPTURE_EVENT_TYPE", "NvtxEvents"), ("CAPTURE_EVENT_TYPE", "Cuda")]
        assert "TARGET_INFO_SESSION_START_TIME" not in tables
        kept = {row[1] for row in connection.execute("PRAGMA table_info('CUDA_GPU_MEMORY_USAGE_EVENTS')")}
        assert {"start", "bytes", "memKind", "memoryOperationType", "address"} <= kept
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
            " UNION SELECT textId FROM NVTX_EVENTS WHERE textId NOTNULL)"
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
    copy = Trace.load(share(trace, tmp_path / "copy.sqlite").path)
    assert [message.text for message in copy.metadata.diagnostics] == ["Some events might be missing, see …"]
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
    recording = Trace.load(share(export.write(tmp_path / "a.sqlite"), tmp_path / "b.sqlite").path).metadata.recording
    assert (recording.events, recording.graph_trace, recording.program) == (("Cuda",), "node", ())


def test_threads_of_other_programs_are_left_out(tmp_path: Path) -> None:
    export = training_step(Export().gpu()).thread(150, "pt_autograd_0").thread(7, "secret-daemon", pid=900)
    copy = Trace.load(share(export.write(tmp_path / "a.sqlite"), tmp_path / "b.sqlite").path)
    assert sorted(copy.metadata.thread_names.values()) == ["pt_autograd_0", "python3"]


def test_text_in_a_column_of_numbers_stays_behind(step_trace: Path, tmp_path: Path) -> None:
    with closing(sqlite3.connect(step_trace)) as connection:
        connection.execute("UPDATE CUPTI_ACTIVITY_KIND_KERNEL SET streamId = 'hunter2'")
        connection.commit()
    assert b"hunter2" not in share(step_trace, tmp_path / "copy.sqlite").path.read_bytes()


def test_names_that_are_no_text(step_trace: Path, tmp_path: Path) -> None:
    """A name cut in the middle of a character reads as before; a range without a name stays without one."""
    with closing(sqlite3.connect(step_trace)) as connection:
        connection.execute("UPDATE NVTX_EVENTS SET text = CAST(x'736368c3' AS TEXT) WHERE text = 'optimizer'")
        connection.execute("UPDATE NVTX_EVENTS SET text = NULL WHERE text = 'backward'")
        connection.commit()
    copy = Trace.load(share(step_trace, tmp_path / "copy.sqlite").path)
    assert copy.ranges.names == Trace.load(step_trace).ranges.names


@pytest.mark.parametrize("name", CAPTURES)
def test_no_name_of_a_real_capture_is_changed(real_capture: RealCapture, name: str) -> None:
    trace = Trace.load(real_capture(name))
    scrubber = Scrubber(PrivateValues())
    for text in {*trace.operations.names, *trace.ranges.names}:
        assert scrubber.name(text.encode()) == text
    assert scrubber.renamed == []


def test_no_name_behind_a_kernel_rule_is_changed() -> None:
    scrubber = Scrubber(PrivateValues())
    assert [rule.example for rule in RULES if scrubber.name(rule.example.encode()) != rule.example] == []


_PRIVATE = PrivateValues(words=("ann", "node17"), hosts=frozenset({"node17"}))


@pytest.mark.parametrize(
    ("text", "scrubbed"),
    [
        ("ann_step", "alias 1"),  # "…_step" would be a step
        ("ann_load", "…_load"),
        ("step of ann", "step of …"),
        ("on node17.hyrule.org", "on …"),
        ("on node17-ib0.hyrule.org", "on …"),
        ("forward, of /data/ann/x.bin", "forward, alias 1"),
        ("Backward_Pass #3, lr=s3cr3t", "backward, alias 1"),
        ("Backward_Pass, lr=s3cr3t", "backward, alias 1"),
        ("load, sizes of /data/ann/x.bin, seq = 12", "alias 1, seq = 12"),
        ("A=b\0C=d", "…"),
    ],
)
def test_what_stands_for_a_name(text: str, scrubbed: str) -> None:
    """An alias is of the phase that the name was; what is known to be private goes, and leaves the rest a name."""
    shown = Scrubber(_PRIVATE).name(text.encode())
    assert shown == scrubbed
    assert PhaseNames().key_of(text) == PhaseNames().key_of(shown)


def test_an_alias_is_stable_and_listed() -> None:
    scrubber = Scrubber(_PRIVATE)
    names = ["/srv/x", "of /mnt/ann", "/srv/x", "/srv/y", "/srv/x, seq = 4"]
    shown = [scrubber.name(name.encode()) for name in names]
    assert shown == ["alias 1", "alias 2", "alias 1", "alias 3", "alias 1, seq = 4"]
    assert scrubber.renamed == [
        Renamed("/srv/x", "alias 1"),
        Renamed("of /mnt/…", "alias 2"),
        Renamed("/srv/y", "alias 3"),
    ]


@pytest.mark.parametrize(
    ("text", "kept"),
    [("/srv/x", "/srv/x"), ("/srv/ann/x", "/srv/…/x"), ("see /srv/x", "alias 1"), ("/srv/x\0HOME=/root", "…")],
)
def test_names_that_are_allowed(text: str, kept: str) -> None:
    """As a whole, and without what is known to be private."""
    assert Scrubber(_PRIVATE, [re.compile("/srv/.*", re.DOTALL)]).name(text.encode()) == kept


@pytest.mark.parametrize(
    ("text", "readable"),
    [
        (
            "Some events might be missing, see /home/zelda/run.log and castle",
            "Some events might be missing, see … and …",
        ),
        ("driver 535.104.05.01 at 10.0.0.7", "driver 535.104.05.01 at …"),
        ("NVIDIA A100-SXM4-80GB MIG 1g.10gb", "NVIDIA A100-SXM4-80GB MIG 1g.10gb"),
        ("AMD Instinct MI300X", "AMD Instinct MI300X"),
        ("Intel(R) Xeon(R) Platinum 8480C", "Intel(R) Xeon(R) Platinum 8480C"),
        ("GPU-a7d00f32-64fa-041e-83fb-5546b548f523", "…"),
        ("2025.3.2.0", "2025.3.2.0"),
        ("password: 1234", "…"),
    ],
)
def test_the_words_of_a_message(text: str, readable: str) -> None:
    assert Scrubber(PrivateValues()).message(text.encode()) == readable


_PARTS = st.sampled_from(
    ["/home/ann/", "/conv1/Conv", " + ", "/relu/Relu", "/tmp/a/", "train.py", "forward", "token=", "s3cr3t", "…",
     " (2)", "/x/", "C:\\runs\\", "ann", "torch/nn/", ", seq = 3", "10.0.0.1", "a@b.org"]
)  # fmt: skip


@given(st.lists(st.lists(_PARTS, max_size=5).map("".join), unique=True))
def test_names_that_differ_stay_different(names: list[str]) -> None:
    scrubber = Scrubber(PrivateValues(words=("ann",)))
    assert len({scrubber.name(name.encode()) for name in names}) == len(names)


def test_the_layers_of_a_network_stay_as_many(tmp_path: Path) -> None:
    """TensorRT names a range after the layers that it runs; a loader's paths end alike."""
    names = [
        *(f"/layer{i}/conv{j}/Conv + /layer{i}/relu/Relu" for i in range(3) for j in range(3)),
        *(f"load /mnt/shards/{i}/part.bin" for i in range(3)),
    ]
    export = training_step(Export().gpu())
    for i, name in enumerate(names):
        export.range(name, 2000 + 10 * i, 2005 + 10 * i)
    copy = Trace.load(share(export.write(tmp_path / "a.sqlite"), tmp_path / "b.sqlite").path)
    kept = set(copy.ranges.names) - {"step", "forward", "backward", "optimizer", ""}
    assert kept == {*names[:9], "alias 1", "alias 2", "alias 3"}


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
    path = share(export.write(tmp_path / "a.sqlite"), tmp_path / "b.sqlite").path
    with closing(sqlite3.connect(path)) as connection:
        calls = connection.execute(
            "SELECT value, start, end FROM CUPTI_ACTIVITY_KIND_RUNTIME JOIN StringIds ON id = nameId"
            " WHERE start >= 2000"
        ).fetchall()
    assert calls == [(name, 2000 + 10 * i, 2001 + 10 * i) for i, name in enumerate(blocking)]


@pytest.mark.parametrize("value", ["1", "C.UTF-8", "forward", "en_US.UTF-8", "bfloat16", "9.0a", "13.0.2", "x86_64"])
def test_ordinary_values(value: str) -> None:
    assert is_ordinary(value)
    assert list(private_parts("MODE", value)) == []


@pytest.mark.parametrize(
    ("name", "value", "private"),
    [
        ("PROJECT", "falcon", ["falcon"]),
        ("PROJECT", "falco", []),  # five letters
        ("API_KEY", "falc", ["falc"]),
        ("API_KEY", "12345678", ["12345678"]),
        ("USER", "ann", ["ann"]),
        ("USER", "root", []),
        ("PWD", "/srv/falcon", []),  # a path: its last name stays wherever it is found
        ("HOSTS", "a,node-17x", ["a,node-17x", "node-17x"]),
        ("SLURMD_NODENAME", "gpu-node-17", ["gpu-node-17"]),
    ],
)
def test_private_values(name: str, value: str, private: list[str]) -> None:
    assert list(dict.fromkeys(private_parts(name, value))) == private


def refusals(folder: Path) -> Iterator[tuple[Path, Path, str]]:
    trace = folder / "step.sqlite"
    (folder / "folder.sqlite").mkdir()
    (folder / "there.sqlite").write_text("mine")
    (folder / "text.sqlite").write_text("no database at all")
    (folder / "linked.sqlite").symlink_to(trace)
    sqlite3.connect(folder / "other.sqlite").execute("CREATE TABLE t (a)").connection.close()
    yield trace, trace, "is the input itself"
    yield trace, folder / "linked.sqlite", "is the input itself"
    yield trace, folder / "there.sqlite", "is there already. Name another file with -o, or replace it with --force"
    yield trace, folder / "folder.sqlite", "is a folder"
    yield trace, folder / "report.md", "is not called like an export. Name it report.sqlite"
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


def test_force_replaces(step_trace: Path, tmp_path: Path) -> None:
    output = tmp_path / "there.sqlite"
    output.write_text("mine")
    assert len(Trace.load(share(step_trace, output, force=True).path).operations) == 5


def test_what_an_export_was_made_from_is_not_replaced(step_trace: Path, tmp_path: Path) -> None:
    report, outside = tmp_path / "step.nsys-rep", tmp_path / "outside.sqlite"
    report.write_bytes(b"report")
    outside.symlink_to(report)
    with pytest.raises(NsysAnalyzerError, match=r"outside\.sqlite is .*step\.nsys-rep, which is read"):
        share(step_trace, outside, force=True)
    assert report.read_bytes() == b"report"


def test_a_link_stays_and_its_file_keeps_its_permissions(step_trace: Path, tmp_path: Path) -> None:
    (tmp_path / "far").mkdir()
    real, link = tmp_path / "far/real.sqlite", tmp_path / "link.sqlite"
    real.write_text("mine")
    real.chmod(0o640)
    link.symlink_to(real)
    assert len(Trace.load(share(step_trace, link, force=True).path).operations) == 5
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
        add_row(connection, "NVTX_EVENTS", eventType=59, text="bluefalcon", textId=None)
        add_row(connection, "NVTX_EVENTS", eventType=59, text="load /opt/x of bluefalcon", textId=None)
        connection.commit()
    arguments = ["share", str(full_export), "-o", str(tmp_path / "copy.sqlite")]
    printed = CliRunner().invoke(cli, arguments, catch_exceptions=False).stdout
    # the 14 of VARIABLES, OLDPWD, the 2 of NUL_VARIABLES
    assert "Environment: 17 variables" in printed
    assert "Texts changed: 1\n" in printed
    assert "Names replaced by an alias: 1\n  alias 1: load /opt/x of …\n" in printed
    allowed = CliRunner().invoke(
        cli, [*arguments, "--force", "--keep", "other", "--keep", "load /.*"], catch_exceptions=False
    )
    assert "Names replaced by an alias: 0\n" in allowed.stdout
    everything = CliRunner().invoke(cli, [*arguments, "--force", "--keep-all-names"], catch_exceptions=False)
    assert "Names replaced by an alias: 0\n" in everything.stdout
    assert CliRunner().invoke(cli, [*arguments, "--force", "--keep", "("]).exit_code == 2
    assert "PROCESSES" in printed or "META_DATA_CAPTURE" in printed
    assert not [text for text in FORBIDDEN if text in printed]


def test_the_help_says_the_rule() -> None:
    command = cli.commands["share"]  # type: ignore[attr-defined]
    assert isinstance(command, click.Command)
    assert "6 characters or more" in " ".join((command.help or "").split())


def test_properties_that_carry_identity_are_looked_for_in_every_name(tmp_path: Path) -> None:
    """Names of machines, people and folders, and numbered variables, read as names: only the property tells."""
    export = training_step(Export().gpu())
    properties = {
        "META_DATA_CAPTURE": {
            "PROCESS_0:ENVIRONMENT_VARIABLE_12": 'PROJECT="bluefalcon"',
            "PROCESS_0:EnvironmentVariable:3": "TEAM=redheron",
            "LoginName": "marguerite",
            "CommandLine": "python /srv/greenkestrel/train.py --api-key greyowl",
        },
        "TARGET_INFO_SYSTEM_ENV": {"MachineName": "castle.hyrule.org", "NodeName": "tower9", "Env_7": "X=whitestork"},
    }
    for table, rows in properties.items():
        for name, value in rows.items():
            export.add(table, name=name, value=value)
    private = ["bluefalcon", "redheron", "marguerite", "greenkestrel", "greyowl", "castle", "tower9", "whitestork"]
    for i, value in enumerate(private):
        export.range(f"load_{value}", 2000 + 10 * i, 2005 + 10 * i)
    content = share(export.write(tmp_path / "a.sqlite"), tmp_path / "b.sqlite").path.read_bytes().lower()
    assert [value for value in private if value.encode() in content] == []
    assert b"load_" in content


def test_no_byte_of_the_copy_holds_a_secret(tmp_path: Path) -> None:
    """Free pages and unused space with them; each secret as a range, in a sentence, a message and a thread's name."""
    numbers = random.Random("bytes")
    secrets = {draw(numbers) for draw in FAMILIES.values() for _ in range(5)}
    export = training_step(Export().gpu())
    for i, secret in enumerate(sorted(secrets)):
        export.range(f"load {secret}", 2000 + 20 * i, 2005 + 20 * i).range(secret, 2006 + 20 * i, 2009 + 20 * i)
        export.thread(1000 + i, secret)
        export.add("DIAGNOSTIC_EVENT", severity=2, text=f"Profiling failed at {secret}.")
    trace = export.write(tmp_path / "a.sqlite")
    with closing(sqlite3.connect(trace)) as connection:  # rows that were there leave their bytes in the pages
        connection.execute("DELETE FROM DIAGNOSTIC_EVENT WHERE rowid % 2")
        connection.commit()
    content = share(trace, tmp_path / "b.sqlite").path.read_bytes()
    assert [secret for secret in secrets if secret.encode() in content] == []
    assert report_figures(tmp_path / "b.sqlite") == report_figures(trace)


def report_figures(trace: Path) -> object:
    """The data of a report, without what quotes messages, and where it is from."""
    result = CliRunner().invoke(cli, ["report", str(trace), "--format", "json"], catch_exceptions=False)
    words = ("name", "source", "warnings")
    return [
        {key: value for key, value in capture.items() if key not in words}
        for capture in json.loads(result.stdout)["captures"]
    ]


def test_names_of_tables_and_columns_with_quotes_in_them(tmp_path: Path) -> None:
    path = training_step(Export().gpu()).write(tmp_path / "t.sqlite")
    with sqlite3.connect(path) as connection:
        connection.execute('CREATE TABLE "o""dd" ("a""b" TEXT, "name" TEXT, "value" TEXT)')
        connection.execute("""INSERT INTO "o""dd" VALUES ('x', 'HOSTNAME', 'bluefalcon')""")
    connection.close()
    shared = share(path, tmp_path / "copy.sqlite")
    assert shared.tables['o"dd'] == 1


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: f"{rule.kernel_class}-{rule.example[:30]}")
def test_an_alias_is_of_the_class_that_its_name_was(rule: Rule) -> None:
    """And in its precision; an operator may make of it what it might have of the name. A second copy is the same."""
    name = f"{rule.example} /home/ann"
    alias = Scrubber(PrivateValues()).name(name.encode())
    assert alias is not None
    assert alias.endswith("alias 1") is (first_rule(name) is None)
    assert (classify(alias), open_classes(alias)) == (classify(name), open_classes(name))
    assert gemm_precision(alias) == gemm_precision(name)
    assert alias.startswith("aten::") is name.startswith("aten::")
    assert Scrubber(PrivateValues()).name(alias.encode()) == alias


@pytest.mark.parametrize(
    "name", ["of /home/ann", "unknown kernel /home/ann", "softmax, /home/ann", "forward, /home/ann"]
)
def test_an_alias_is_of_no_class_where_its_name_was_of_none(name: str) -> None:
    alias = Scrubber(PrivateValues()).name(name.encode())
    assert alias is not None
    assert alias != name
    assert (classify(alias), open_classes(alias)) == (classify(name), open_classes(name))


@pytest.mark.parametrize(
    ("words", "shown"),
    [
        (["python", "-u", "train.py", "-p", "hunter2", "-u", "ann"], "python -u train.py -p … -u …"),
        (["python", "train.py", "--server", "gpu17", "-p", "4"], "python train.py --server … -p 4"),
        (["RUNS=/data/ann", "python", "train.py"], "RUNS=… python train.py"),
        (["a", "-phunter2", "-usecret", "-p8080"], "a -p… -u… -p8080"),
    ],
)
def test_a_command_is_shown_without_its_user_and_machine(words: list[str], shown: str) -> None:
    assert shown_command(words) == shown


def test_the_numbers_and_sizes_of_operators_are_kept(tmp_path: Path) -> None:
    trace = Kineto().operator("aten::mm", 0, 9, sequence=7, shapes=[[8192, 768], [768, 3072], []])
    trace.operator("MmBackward0", 20, 9, sequence=7, forward_thread=1, shapes=[[4111111111111111, 2]]).module(
        "A_0", 0, 9
    )
    shared = share(trace.write(tmp_path / "t.json"), tmp_path / "copy.sqlite")
    copy = Trace.load(shared.path)
    operators = copy.operators
    assert (operators.sequence.tolist(), operators.forward_thread.tolist()) == ([7, 7], [0, 1])
    assert [operators.shape_texts[code] for code in operators.shapes] == ["[[8192, 768], [768, 3072], []]", "[[0, 2]]"]
    assert copy.ranges.names == ("", "nn.Module: A_0")
    assert shared.renamed == ()


def test_a_long_number_behind_an_operator_is_taken_out() -> None:
    scrubbed = Scrubber(PrivateValues()).name(b"aten::mm, seq = 4111111111111111, op_id = 12")
    assert scrubbed == "aten::mm, seq = 0, op_id = 12"


@pytest.mark.parametrize("name", ["FQDN", "TargetName"])
def test_the_name_of_the_target_is_looked_for(tmp_path: Path, name: str) -> None:
    export = training_step(Export().gpu()).range("bluefalcon_load", 2000, 2005)
    export.add("TARGET_INFO_SYSTEM_ENV", name=name, value="bluefalcon")
    copy = share(export.write(tmp_path / "a.sqlite"), tmp_path / "b.sqlite").path
    assert b"bluefalcon" not in copy.read_bytes()


def test_the_words_of_a_modules_path_are_hidden_one_by_one() -> None:
    """Places stay, numbers that are no place do not, and what tells attention stays told."""
    scrubber = Scrubber(PrivateValues())
    names = [
        "nn.Module: GPT2LMHeadModel/transformer.h.11.mlp: GPT2MLP",
        "nn.Module: Net/cards.4111111111111111.fc: Linear",
        "nn.Module: Net/192.168.17.4: Linear",
    ]
    shown = [str(scrubber.name(name.encode())) for name in names]
    assert shown[0] == names[0]
    assert "4111111111111111" not in shown[1]
    assert "192" not in shown[2]
    assert "168" not in shown[2]
    assert all(re.fullmatch(r"nn\.Module: [^:]+: [^:]+", one) for one in shown)
