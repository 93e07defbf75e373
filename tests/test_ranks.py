"""Tests where the rank of a process comes from."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from nsys_analyzer import Trace
from nsys_analyzer.analysis.attribution.processes import find_processes
from nsys_analyzer.analysis.summary.summarize import summarize
from nsys_analyzer.cli.main import cli
from nsys_analyzer.report.facts import say_all
from tests.support.cases import make_case_test
from tests.support.export import GEMM, Export, global_tid, shared_copy
from tests.support.kineto import Kineto
from tests.support.ranks import INIT, binary, with_schemas

#: Each process by its device, where nothing tells its rank.
BY_DEVICE = [("device 0", None, 100), ("device 1", None, 200)]
#: Process 100 is rank 1, on device 0: the order is that of ranks.
BY_RANK = [("rank 0", 0, 200), ("rank 1", 1, 100)]


def two_processes() -> Export:
    """Process 100 uses device 0, process 200 device 1."""
    export = Export()
    for device, pid in enumerate((100, 200)):
        export.kernel(GEMM, 20, 30, 45, tid=pid, pid=pid, device=device)
    return export


def one_process() -> Export:
    return Export().kernel(GEMM, 20, 30, 45)


def initialise(export: Export, pid: int, **payload: Any) -> Export:
    """A range in which a process makes a communicator, with its payload."""
    name = export.string("ncclCommInitRankConfig")
    where = {"start": 1, "end": 2, "eventType": 59, "globalTid": global_tid(pid, pid), "domainId": 1}
    return export.add("NVTX_EVENTS", textId=name, **where, **payload)


def as_json(rank: int, ranks: int = 2) -> str:
    return json.dumps({"NCCL communicator ID": 9_123_456_789, "No. of ranks": ranks, "Rank": rank, "CUDA device": 0})


def as_binary(rank: int, ranks: int = 2) -> bytes:
    """Communicator, ranks, rank, device, padding."""
    return binary(INIT, struct.pack("<Qiiii", 9_123_456_789, ranks, rank, 0, 0))


def of_ranks(export: Export, kind: str = "jsonText") -> Export:
    """Process 100 is rank 1, process 200 rank 0."""
    for pid, rank in ((100, 1), (200, 0)):
        text = as_json(rank)
        value = {"jsonText": text, "jsonTextId": export.string(text), "binaryData": as_binary(rank)}[kind]
        initialise(export, pid, **{kind: value})
    return export


def environment(export: Export, **variables: object) -> Export:
    for name, value in variables.items():
        export.add("META_DATA_CAPTURE", name="PROCESS_0:ENVIRONMENT_VARIABLE", value=f'{name}="{value}"')
    return export


def labels(path: Path) -> list[tuple[str, int | None, int]]:
    return [(one.label, one.rank, one.pid) for one in find_processes(Trace.load(path))]


def labels_of(export: Export, tmp_path: Path) -> list[tuple[str, int | None, int]]:
    return labels(export.write(tmp_path / "t.sqlite"))


# --- NCCL ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["jsonText", "jsonTextId", "binaryData"])
def test_nccls_payload_tells_the_rank(kind: str, tmp_path: Path) -> None:
    assert labels_of(of_ranks(with_schemas(two_processes()), kind), tmp_path) == BY_RANK


def test_the_largest_communicator_counts(tmp_path: Path) -> None:
    # Each is rank 0 of a communicator of its own, made first; of both together, 100 is rank 1.
    export = two_processes()
    for pid in (100, 200):
        initialise(export, pid, jsonText=as_json(0, ranks=1))
    assert labels_of(of_ranks(export), tmp_path) == BY_RANK


@pytest.mark.parametrize(
    ("payload", "pids"),
    [
        ({"jsonText": as_json(0)}, (100, 200)),  # one rank of two processes, of two groups, is that of neither
        ({}, (100,)),
        ({"jsonText": "of somebody's own"}, (100,)),
        ({"jsonText": "[1]"}, (100,)),
        ({"jsonText": '{"Rank": 1}'}, (100,)),
        ({"binaryData": b"short"}, (100,)),
        ({"binaryData": as_binary(1)[:-12]}, (100,)),
        ({"binaryData": as_binary(1)}, (100,)),  # without the schema that says where its fields are
    ],
)
def test_a_payload_that_tells_no_rank(payload: dict[str, Any], pids: tuple[int, ...], tmp_path: Path) -> None:
    export = two_processes()
    for pid in pids:
        initialise(export, pid, **payload)
    assert labels_of(export, tmp_path) == BY_DEVICE


def test_an_export_without_payloads_is_told_how_to_keep_them(tmp_path: Path) -> None:
    def warns(export: Export) -> bool:
        (summary,) = summarize(Trace.load(export.write(tmp_path / "t.sqlite")), "t")
        return any("--include-blobs=true" in warning for warning in say_all(summary.warnings))

    export = initialise(one_process(), 100)
    assert warns(export)
    assert not warns(initialise(export, 100, jsonText=as_json(1)))


# --- the environment -----------------------------------------------------------------------------------------------


test_environment = make_case_test("ranks", {"ranks": lambda capture: labels(capture.path)})


@pytest.mark.parametrize(
    ("blocks", "expected"),
    [
        (["TOKEN=abc\0RANK=7\0WORLD_SIZE=8\0"], ("rank 7", 7, 100)),
        ([f"A=b\0RANK={rank}\0" for rank in (0, 1)], ("", None, 100)),  # they differ, and tell nothing
    ],
)
def test_a_block_of_variables_tells_it_too(
    blocks: list[str], expected: tuple[str, int | None, int], tmp_path: Path
) -> None:
    export = one_process()
    for block in blocks:
        export.string(block)
    assert labels_of(export, tmp_path) == [expected]


# --- a copy to share -----------------------------------------------------------------------------------------------


def test_a_copy_to_share_keeps_the_rank_and_nothing_beside_it(tmp_path: Path) -> None:
    export = of_ranks(of_ranks(with_schemas(two_processes())), "binaryData")
    copied = shared_copy(export.write(tmp_path / "t.sqlite"), tmp_path / "copy.sqlite")
    assert labels(copied) == BY_RANK
    assert b"9123456789" not in copied.read_bytes()
    assert struct.pack("<Q", 9_123_456_789) not in copied.read_bytes()


def test_a_copy_keeps_the_rank_of_the_environment(tmp_path: Path) -> None:
    export = environment(one_process(), RANK=3, WORLD_SIZE=8, SECRET_TOKEN="swordfish9")
    copied = shared_copy(export.write(tmp_path / "t.sqlite"), tmp_path / "copy.sqlite")
    assert b"swordfish9" not in copied.read_bytes()
    for path in (copied, shared_copy(copied, tmp_path / "again.sqlite")):
        assert labels(path) == [("rank 3", 3, 100)]


# --- PyTorch's traces and manifests ----------------------------------------------------------------------------------


def traced(**properties: Any) -> Kineto:
    return Kineto(**properties).gpu().launch(1, 110).kernel(GEMM, 1, 120, 30)


def captures(*arguments: Path) -> list[dict[str, Any]]:
    done = CliRunner().invoke(cli, ["report", *map(str, arguments), "--format", "json"])
    assert done.exit_code == 0, done.output
    found: list[dict[str, Any]] = json.loads(done.stdout)["captures"]
    return found


@pytest.mark.parametrize(
    ("told", "process", "rank"),
    [
        ({"backend": "nccl", "rank": 1, "world_size": 2}, "rank 1", 1),
        ({"rank": 3}, "rank 3", 3),
        ({"rank": 0, "world_size": 1}, None, 0),
        ({"backend": "nccl"}, None, None),
        ({"rank": "zero"}, None, None),
        ("no object", None, None),
    ],
)
def test_what_distributed_info_may_hold(told: object, process: str | None, rank: int | None, tmp_path: Path) -> None:
    (only,) = captures(traced(distributedInfo=told).write(tmp_path / "t.json"))
    assert (only["process"], only["rank"]) == (process, rank)


def test_a_manifest_tells_the_rank(tmp_path: Path) -> None:
    trace = traced().write(tmp_path / "a.json.gz")
    (tmp_path / "a.manifest.json").write_text('{"rank": 0}', encoding="utf-8")
    (only,) = captures(trace)
    assert (only["process"], only["rank"]) == ("rank 0", 0)


def test_a_real_payload_of_two_processes(real_capture: Callable[[str], Path]) -> None:
    """What nsys 2025.3 exported with ``--include-blobs=true`` of NCCL's start in two processes, a kernel of each."""
    summaries = summarize(Trace.load(real_capture("nccl_init")), "ddp")
    assert [(one.process, one.rank) for one in summaries] == [("rank 0", 0), ("rank 1", 1)]
