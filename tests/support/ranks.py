"""Builds tiny runs of several ranks: what each does step by step, on a clock of its own where its capture has one.

Times are ns on the clock of the first rank; every rank has a process, a device and a thread of its own.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from nsys_analyzer import Trace
from nsys_analyzer.analysis.ranks.run import ParallelRun
from nsys_analyzer.analysis.ranks.runs import find_runs
from nsys_analyzer.analysis.summary.summarize import summarize
from nsys_analyzer.analysis.summary.summary import CaptureSummary
from tests.support.export import GEMM, Export, global_tid

Noted = Literal["json", "binary", "none"]
#: What NCCL calls the kernel and the function of each kind of collective.
KERNELS = {
    "all-reduce": "ncclDevKernel_AllReduce_Sum_f32_RING_LL(ncclDevKernelArgsStorage<4096ul>)",
    "all-gather": "ncclDevKernel_AllGather_RING_LL(ncclDevKernelArgsStorage<4096ul>)",
    "reduce-scatter": "ncclDevKernel_ReduceScatter_Sum_f32_RING_LL(ncclDevKernelArgsStorage<4096ul>)",
    "broadcast": "ncclDevKernel_Broadcast_RING_LL(ncclDevKernelArgsStorage<4096ul>)",
    "reduce": "ncclDevKernel_Reduce_Sum_f32_RING_LL(ncclDevKernelArgsStorage<4096ul>)",
    "send/receive": "ncclDevKernel_SendRecv(ncclDevKernelArgsStorage<4096ul>)",
}
FUNCTIONS = {
    "all-reduce": "ncclAllReduce", "all-gather": "ncclAllGather", "reduce-scatter": "ncclReduceScatter",
    "broadcast": "ncclBroadcast", "reduce": "ncclReduce", "all-to-all": "ncclAlltoAll", "gather": "ncclGather",
    "scatter": "ncclScatter", "send": "ncclSend", "receive": "ncclRecv",
}  # fmt: skip
#: The communicator of all ranks where a test names no other.
WORLD = 0x9C3F_2A51_77E0_1B04  # above 2^63, as half of them are
#: Schema IDs of the payloads of a new communicator, of a collective, and of a send or receive, as NCCL 2.27 numbers.
INIT, COLLECTIVE, EXCHANGE = 16_777_227, 16_777_220, 16_777_225
_FIELDS = {
    INIT: (("NCCL communicator ID", 18, None), ("No. of ranks", 5, 8), ("Rank", 5, 12), ("CUDA device", 5, 16)),
    COLLECTIVE: (("NCCL communicator ID", 18, None), ("Message size [bytes]", 22, 8)),
    EXCHANGE: (("NCCL communicator ID", 18, None), ("Message size [bytes]", 22, 8), ("Peer rank", 5, 16)),
}
_STREAM = 20


def binary(schema: int, payload: bytes) -> bytes:
    """A payload as nsys exports it: domain, schema, size and offset, 8 bytes each, before it."""
    return struct.pack("<QQQQ", 1, schema, len(payload), 32) + payload


def with_schemas(export: Export) -> Export:
    """An export with the schemas of NCCL's payloads."""
    for schema, fields in _FIELDS.items():
        for index, (name, kind, offset) in enumerate(fields):
            row = {"domainId": 1, "schemaId": schema, "idx": index, "type": kind, "name": name, "offset": offset}
            export.add("NVTX_PAYLOAD_SCHEMA_ENTRIES", **row)
    return export


@dataclass
class Rank:
    """One rank under construction.

    Attributes:
        export: of its capture.
        offset, drift: what its clock is ahead by at 0, ns, and by how much that grows, ns per ns.
        noted: how NCCL's payloads are kept.
    """

    number: int
    export: Export
    ranks: int = 2
    device: int = 0
    offset: int = 0
    drift: float = 0.0
    noted: Noted = "json"

    def __post_init__(self) -> None:
        self.pid = 100 + self.number

    def time(self, time: float) -> int:
        """A time on this rank's clock."""
        return round(time + self.offset + self.drift * time)

    def init(self, communicator: int = WORLD, ranks: int = 0) -> Rank:
        """The payload that tells the rank: of a communicator of all, or of a smaller one of so many neighbours."""
        ranks = ranks or self.ranks
        number = self.number % ranks
        values = {"NCCL communicator ID": communicator, "No. of ranks": ranks, "Rank": number, "CUDA device": 0}
        payload = struct.pack("<Qiiii", communicator, ranks, number, 0, 0)
        return self._note("ncclCommInitRankConfig", 0, values, INIT, payload)

    def step(self, start: int, end: int, name: str = "step") -> Rank:
        """A step's range, or that of a phase."""
        self.export.range(name, self.time(start), self.time(end), tid=self.pid, pid=self.pid)
        return self

    def kernel(self, start: int, end: int, launch: int | None = None, name: str = GEMM, stream: int = 7) -> Rank:
        """A kernel, launched as it starts where nothing else is said."""
        self.export.kernel(
            name, self.time(start if launch is None else launch), self.time(start), self.time(end), tid=self.pid,
            pid=self.pid, stream=stream, device=self.device,
        )  # fmt: skip
        return self

    def copy(self, start: int, end: int, launch: int | None = None) -> Rank:
        """A copy between host and device."""
        at = self.time(start if launch is None else launch)
        self.export.memory("MEMCPY", at, self.time(start), self.time(end), self.pid, self.pid, 9, self.device)
        return self

    def collective(
        self, kind: str, start: int, end: int, launch: int | None = None, *, size: int = 1 << 20,
        communicator: int = WORLD, stream: int = _STREAM, peers: Sequence[int] = (), kernel: str = "",
        functions: Sequence[str] = ("send", "receive"),
    ) -> Rank:  # fmt: skip
        """A collective, called and launched in one moment; of an exchange, a send to or a receive from each peer.

        The ``functions`` of an exchange are called in turns, one for each peer.
        """
        at = start if launch is None else launch
        grouped = len(peers) > 1
        if grouped:
            self.call("ncclGroupStart", at)
        for number, peer in enumerate(peers if kind == "send/receive" else (None,)):
            function = FUNCTIONS[functions[number % len(functions)]] if peer is not None else FUNCTIONS[kind]
            self.call(function, at, size, communicator, peer)
        if grouped:
            self.call("ncclGroupEnd", at)
        return self.kernel(start, end, at, kernel or KERNELS[kind], stream)

    def call(
        self, function: str, at: int, size: int | None = None, communicator: int = WORLD, peer: int | None = None
    ) -> Rank:
        """The range of one of NCCL's functions; with a size, what it notes beside it."""
        values = {"NCCL communicator ID": communicator, "Message size [bytes]": size, "Peer rank": peer}
        values = {name: value for name, value in values.items() if value is not None}
        schema = COLLECTIVE if peer is None else EXCHANGE
        payload = struct.pack("<QQ", communicator, size or 0)
        payload += b"" if peer is None else struct.pack("<ii", peer, 0)
        return self._note(function, at, values if size is not None else {}, schema, payload)

    def graph_launch(self, at: int) -> int:
        """Adds the replay of a graph, and returns its correlation ID."""
        return self.export.call("cudaGraphLaunch_v10000", at, self.pid, self.pid)

    def graph_kernel(self, name: str, start: int, end: int, correlation: int, node: int) -> Rank:
        """Adds a kernel of a graph's replay."""
        self.export.kernel(
            name, None, start, end, self.pid, self.pid, correlation=correlation, stream=_STREAM, node=node
        )
        return self

    def write(self, path: Path) -> Path:
        """Writes the capture of this rank."""
        return self.export.write(path)

    def _note(self, function: str, at: int, values: dict[str, int], schema: int, payload: bytes) -> Rank:
        noted: dict[str, str | bytes] = {}
        if values and self.noted == "json":
            noted = {"jsonText": json.dumps(values)}
        if values and self.noted == "binary":
            noted = {"binaryData": binary(schema, payload)}
        self.export.add(
            "NVTX_EVENTS", start=self.time(at), end=self.time(at) + 1, eventType=59, domainId=1,
            globalTid=global_tid(self.pid, self.pid), textId=self.export.string(function), **noted,
        )  # fmt: skip
        return self


def one_capture(ranks: int, noted: Noted = "json") -> list[Rank]:
    """The ranks of a run in one capture."""
    export = with_schemas(Export())
    return [Rank(number, export, ranks, number, noted=noted).init() for number in range(ranks)]


def own_captures(
    ranks: int, noted: Noted = "json", *, offsets: Sequence[int] = (), drifts: Sequence[float] = ()
) -> list[Rank]:
    """The ranks of a run, each in a capture of its own."""
    offsets, drifts = [*offsets, *[0] * ranks], [*drifts, *[0.0] * ranks]
    return [
        Rank(number, with_schemas(Export()), ranks, number, offsets[number], drifts[number], noted).init()
        for number in range(ranks)
    ]


def write(ranks: Sequence[Rank], folder: Path, name: str = "rank{}") -> list[Path]:
    """Writes the captures of some ranks, each once."""
    exports = {id(rank.export): rank for rank in reversed(ranks)}
    return [rank.export.write(folder / f"{name.format(rank.number)}.sqlite") for rank in reversed(exports.values())]


def summaries(paths: Sequence[Path]) -> list[CaptureSummary]:
    """The captures in some files."""
    return [summary for path in paths for summary in summarize(Trace.load(path), path.stem)]


def joined(ranks: Sequence[Rank], folder: Path) -> ParallelRun:
    """The one run that some ranks are of."""
    (run,) = find_runs(summaries(write(ranks, folder)))
    return run
