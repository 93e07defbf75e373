"""Tests that NCCL's payloads of both kinds are read and matched with the kernels of the calls."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import pytest

from nsys_analyzer import Trace
from nsys_analyzer.analysis.ranges.instances import AttributedTrace
from nsys_analyzer.analysis.steps.member import COLLECTIVE_KINDS, Collectives
from nsys_analyzer.analysis.summary.summarize import summarize
from nsys_analyzer.export.frame import operation_frame
from nsys_analyzer.trace.ranks import NcclCalls
from tests.support.cases import Capture, make_case_test
from tests.support.export import GEMM, Export, global_tid, shared_copy
from tests.support.kineto import Kineto
from tests.support.ranks import (
    COLLECTIVE,
    EXCHANGE,
    KERNELS,
    WORLD,
    Noted,
    Rank,
    binary,
    own_captures,
    with_schemas,
)

#: The ID of a communicator without its highest bit, which the columns have no room for.
KEPT = WORLD - 2**63


both_kinds = pytest.mark.parametrize("noted", ["json", "binary"])


def calls_of(export: Export, folder: Path) -> NcclCalls:
    return Trace.load(export.write(folder / "t.sqlite")).nccl_calls


def noted_of(export: Export, folder: Path) -> tuple[list[int], ...]:
    """The communicator, the bytes and the peer of each call."""
    calls = calls_of(export, folder)
    return calls.communicator.tolist(), calls.bytes.tolist(), calls.peer.tolist()


def noting(export: Export, function: str = "ncclSend", thread: int = 100, **payload: Any) -> Export:
    """A range of a function, with its payload."""
    row = {"start": 5, "end": 6, "eventType": 59, "domainId": 1, "globalTid": global_tid(thread, 100)}
    return export.add("NVTX_EVENTS", textId=export.string(function), **row, **payload)


def collectives_of(rank: Rank, folder: Path, device: int = 0) -> Collectives:
    """What the only process of a capture noted of its collectives on one device."""
    (summary,) = summarize(Trace.load(rank.export.write(folder / "t.sqlite")), "t")
    return next(member.collectives for member in summary.members if member.device == device)


def alone(noted: Noted = "json") -> Rank:
    return own_captures(1, noted)[0].step(0, 1000)


def collectives(capture: Capture) -> Collectives:
    return next(member.collectives for member in capture.summary.members if member.device == 0)


test_nccl_calls = make_case_test(
    "nccl_calls",
    {
        "calls": lambda capture: capture.trace.nccl_calls,
        "functions": lambda capture: [
            capture.trace.nccl_calls.names[code] for code in capture.trace.nccl_calls.name.tolist()
        ],
        "collectives": collectives,
        "kinds": lambda capture: [COLLECTIVE_KINDS[code] for code in collectives(capture).kind],
    },
    {
        "WORLD": KEPT, "ALL_REDUCE": KERNELS["all-reduce"], "SEND_RECEIVE": KERNELS["send/receive"],
        "THREAD": global_tid(100, 100), "HOSTILE_1": "ncclAllReduce\0\x1b[31m",
        "HOSTILE_2": "ncclAllReduce" + "`|<script>" * 9, "HOSTILE_3": "ncclSendé\u202e",
    },
    {"rank": alone, "rank_without_steps": lambda noted: Rank(0, with_schemas(Export()), noted=noted)},
)  # fmt: skip


# --- payloads


@both_kinds
def test_a_communicator_is_of_as_many_ranks_as_it_was_made_for(noted: Noted, tmp_path: Path) -> None:
    """Those that the capture saw being made, whatever the order; in a copy to share, too."""
    rank = own_captures(4, noted)[0].call("ncclAllReduce", 10, 8).call("ncclAllReduce", 20, 8, communicator=5)
    rank.call("ncclAllReduce", 30, 8, communicator=2**63 + 6).init(2**63 + 6, 2)
    path = rank.export.write(tmp_path / "t.sqlite")
    for read in (path, shared_copy(path, tmp_path / "copy.sqlite")):
        assert Trace.load(read).nccl_calls.ranks.tolist() == [4, 0, 2]


def test_a_payload_may_be_a_string_of_its_own(tmp_path: Path) -> None:
    export = Export()
    text = export.string(json.dumps({"NCCL communicator ID": 7, "Message size [bytes]": 64}))
    assert noted_of(noting(export, "ncclAllGather", jsonTextId=text), tmp_path) == ([7], [64], [-1])


_UNKNOWN = (0, -1, -1)
#: A payload, and the communicator, the bytes and the peer that are read of it.
PAYLOADS: tuple[tuple[dict[str, Any], tuple[int, int, int]], ...] = (
    # older versions call the size bytes, and name no communicator
    ({"jsonText": '{"Bytes": 96, "Peer rank": 1}'}, (0, 96, 1)),
    # nothing, or nothing that can be read
    ({}, _UNKNOWN),
    ({"jsonText": "somebody's own"}, _UNKNOWN),
    ({"jsonText": "[1, 2]"}, _UNKNOWN),
    ({"jsonText": '{"NCCL communicator ID": "x", "Message size [bytes]": -5, "Peer rank": null}'}, _UNKNOWN),
    ({"jsonText": '{"Message size [bytes]": 1e400, "Peer rank": 123456789012345678901234567890}'}, _UNKNOWN),
    ({"jsonText": '{"Message size [bytes]": {"a": 1}'}, _UNKNOWN),
    ({"binaryData": b""}, _UNKNOWN),
    ({"binaryData": b"short"}, _UNKNOWN),
    ({"binaryData": binary(COLLECTIVE, b"")}, _UNKNOWN),
    ({"binaryData": binary(COLLECTIVE, b"1234567")}, _UNKNOWN),  # ends within the first field
    ({"binaryData": binary(999, struct.pack("<QQ", 5, 64))}, _UNKNOWN),  # of a schema that nobody has described
    # communicator and size are there, of the peer 2 bytes of 4
    ({"binaryData": binary(EXCHANGE, struct.pack("<QQ", 5, 64) + b"\1\0")}, (5, 64, -1)),
)


@pytest.mark.parametrize(("payload", "expected"), PAYLOADS)
def test_what_is_read_of_a_payload(payload: dict[str, Any], expected: tuple[int, int, int], tmp_path: Path) -> None:
    assert noted_of(noting(with_schemas(Export()), **payload), tmp_path) == tuple([value] for value in expected)


@pytest.mark.parametrize("missing", ["NVTX_PAYLOAD_SCHEMA_ENTRIES", "NVTX_EVENTS.binaryData", "NVTX_EVENTS.textId"])
def test_an_export_without_payloads_or_schemas(missing: str, tmp_path: Path) -> None:
    rank = alone("binary").collective("all-reduce", 10, 20)
    rank.export.drop(missing)
    noted = collectives_of(rank, tmp_path)
    assert (noted.communicator.tolist(), noted.bytes.tolist()) == ([-21], [-1])  # known by its stream, 20


# --- from calls to kernels


def test_a_call_for_each_device_of_a_process(tmp_path: Path) -> None:
    """A group of two calls is launched as a kernel on either device: each carries out the call of its own."""
    first = alone()
    second = Rank(0, first.export, device=1)
    first.call("ncclGroupStart", 9).call("ncclBroadcast", 10, 64)
    second.call("ncclBroadcast", 11, 128)
    first.call("ncclGroupEnd", 12)
    for rank in (first, second):
        rank.kernel(100, 200, 13 + rank.device, KERNELS["broadcast"], 20)
    first.export.write(tmp_path / "t.sqlite")
    assert [collectives_of(first, tmp_path, device).bytes.tolist() for device in (0, 1)] == [[64], [128]]


def test_the_calls_of_another_thread_are_not_its_kernels(tmp_path: Path) -> None:
    rank = alone()
    noting(rank.export, "ncclAllReduce", 555, jsonText='{"Message size [bytes]": 64}')
    rank.kernel(100, 200, 20, KERNELS["all-reduce"], 20)
    assert collectives_of(rank, tmp_path).bytes.tolist() == [-1]


def test_the_kernel_tells_the_kind_where_no_call_does(tmp_path: Path) -> None:
    rank = alone("none")
    for number, name in enumerate(KERNELS.values()):
        rank.kernel(100 + number * 10, 105 + number * 10, name=name, stream=20)
    rank.kernel(400, 410).kernel(500, 510, name="void nvshmemi_init_array_kernel(int)", stream=20)
    kinds = [COLLECTIVE_KINDS[code] for code in collectives_of(rank, tmp_path).kind]
    assert kinds == [*KERNELS, "other"]


GENERIC = "ncclDevKernel_Generic_1(ncclDevKernelArgsStorage<4096ul>)"


@pytest.mark.parametrize(
    ("annotation", "operator", "kind"),
    [
        ("nccl:all_reduce", "c10d::allreduce_", "all-reduce"),
        ("nccl:_all_gather_base", "record_param_comms", "all-gather"),
        ("nccl:send 0->1", "c10d::send", "send/receive"),
        ("nccl:coalesced", "_c10d_functional::reduce_scatter_tensor", "reduce-scatter"),
        ("forward", "_c10d_functional::reduce_scatter_tensor", "reduce-scatter"),
        ("all_gather", "aten::copy_", "other"),
    ],
)
def test_a_kernel_for_any_collective_is_what_its_annotation_says(
    annotation: str, operator: str, kind: str, tmp_path: Path
) -> None:
    """The operator lies around the annotation of a library, and inside a range of the program."""
    around, inside = (20, 60), (22, 50)
    trace = Kineto(distributedInfo={"rank": 0, "world_size": 2}).gpu("AMD Instinct MI300X")
    trace.range("ProfilerStep#1", 0, 200).range("ProfilerStep#2", 200, 200)
    trace.range(annotation, *(inside if "nccl" in annotation else around))
    trace.operator(operator, *(around if "nccl" in annotation else inside))
    trace.launch(1, 30).kernel(GENERIC, 1, 90, 10).launch(2, 230).kernel(GEMM, 2, 300, 10)
    (summary,) = summarize(Trace.load(trace.write(tmp_path / "t.json")), "t")
    (member,) = summary.members
    assert [COLLECTIVE_KINDS[code] for code in member.collectives.kind] == [kind]


PEER, WITHIN = "Memcpy PtoP (Device -> Device)", "Memcpy DtoD (Device -> Device)"


def copying() -> Kineto:
    """Three steps of 10 ms with a matmul of 6 ms, and behind it copies one after the other, each of 0.35 ms.

    Communication: two between devices in the collective, one of its own on the device, one in a range of the program.
    Copies: one of an operator in the collective, one outside of it, one on the device in a range of the program.
    """
    trace = Kineto(distributedInfo={"rank": 0, "world_size": 2}).gpu()
    for step in range(3):
        at, number = 10_000 * step, 10 * step + 1
        trace.range(f"ProfilerStep#{step}", at, 10_000).operator("aten::mm", at + 50, 50)
        trace.launch(number, at + 60).kernel(GEMM, number, at + 100, 6000)
        trace.operator("record_param_comms", at + 100, 100).range("nccl:_all_gather_base", at + 100, 100)
        trace.operator("aten::copy_", at + 150, 20).range("all-gather of gradients", at + 400, 50)
        calls = ((110, PEER), (120, PEER), (130, WITHIN), (160, WITHIN), (300, PEER), (410, PEER), (420, WITHIN))
        for place, (called, kind) in enumerate(calls, 1):
            trace.launch(number + place, at + called, api="cudaMemcpyAsync")
            trace.copy(kind, number + place, at + 6100 + 350 * place, 350, 1 << 20)
    return trace


def test_copies_that_carry_out_a_collective_are_communication(tmp_path: Path) -> None:
    path = copying().write(tmp_path / "t.json")
    (summary,) = summarize(Trace.load(path), "t")
    step = summary.step
    assert step is not None
    parts = (step.compute_ms, step.exposed_communication_ms, step.exposed_copy_ms, step.idle_ms)
    # 4 and 3 of 7 copies of 0.35 ms: 6 + 1.4 + 1.05 + 1.55 = 10 ms
    assert parts == pytest.approx((6.0, 1.4, 1.05, 1.55))
    assert summary.whole is not None
    assert summary.whole.kernels_per_instance == 3  # copies are no kernels
    frame = operation_frame(AttributedTrace(Trace.load(path)))
    assert frame["class"].tolist().count("communication") == 3 * 4


def test_a_rank_communicates_by_kernels_and_by_copies(tmp_path: Path) -> None:
    trace = copying()
    for step in range(3):  # behind the copies of 7 × 0.35 ms from 6.45 ms on
        number, at = 10 * step + 9, 10_000 * step
        trace.launch(number, at + 500).kernel(GENERIC, number, at + 9000, 200)
    (summary,) = summarize(Trace.load(trace.write(tmp_path / "t.json")), "t")
    (member,) = summary.members
    assert member.exposed_communication.tolist() == [1_600_000] * 3  # 4 × 0.35 + 0.2 ms
    assert member.exposed_copy.tolist() == [1_050_000] * 3
    assert len(member.collectives) == 3  # a copy waits for no other rank


def test_a_process_that_exchanges_nothing_is_no_member(tmp_path: Path) -> None:
    export = Export().kernel(GEMM, 20, 30, 45)
    (summary,) = summarize(Trace.load(export.write(tmp_path / "t.sqlite")), "t")
    assert summary.members == ()


# --- a copy to share


def test_a_copy_to_share_keeps_what_the_messages_are(tmp_path: Path) -> None:
    rank = alone("binary").collective("all-reduce", 10, 20, size=1234567)
    copied = shared_copy(rank.export.write(tmp_path / "t.sqlite"), tmp_path / "copy.sqlite")
    (summary,) = summarize(Trace.load(copied), "t")
    (member,) = summary.members
    assert (member.rank, member.collectives.kind.tolist()) == (0, [0])
    assert (member.collectives.bytes.tolist(), member.collectives.communicator.tolist()) == ([1234567], [KEPT])
