"""Builds tiny nsys exports, so that a test's expectation can be worked out beside it."""

from __future__ import annotations

import sqlite3
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from nsys_analyzer.share import share
from nsys_analyzer.trace.schema import TABLES

_SQL_TYPES = {int: "INTEGER", float: "REAL", str: "TEXT", bytes: "BLOB"}
VM = 1 << 48
PID = 100
MAIN = 100
AUTOGRAD = 150

GEMM = "ampere_sgemm_128x64_tn"
ADD = "void at::native::vectorized_elementwise_kernel<4, at::native::CUDAFunctor_add<float>>(int)"
SOFTMAX = "void at::native::(anonymous namespace)::cunn_SoftMaxForward<4, float, float, float>(float *)"


def shared_copy(trace: Path, output: Path, **options: Any) -> Path:
    """Writes a copy of a trace to share, and returns its path."""
    share(trace, output, **options)
    return output


def global_pid(pid: int = PID) -> int:
    """The global process ID of a process."""
    return VM | (pid << 24)


def global_tid(tid: int = MAIN, pid: int = PID) -> int:
    """The global thread ID of a thread."""
    return global_pid(pid) | tid


class Export:
    """A trace under construction: times in ns, kernels launched by a call of their own.

    ``drop`` names tables or ``TABLE.column`` that this export does not have.
    """

    def __init__(self, drop: tuple[str, ...] = (), rename: Mapping[str, str] | None = None) -> None:
        self._rows: dict[str, list[dict[str, Any]]] = {}
        self._strings: dict[str, int] = {}
        self._correlation = 0
        self._drop = drop
        self._rename = dict(rename or {})
        self.add("META_DATA_EXPORT", name="EXPORT_PRODUCT_VERSION", value="2025.3.2.0")
        self.add("META_DATA_EXPORT", name="EXPORT_SCHEMA_VERSION", value="3.20.3")
        self.thread(MAIN, "python3")

    def add(self, table: str, **row: Any) -> Export:
        """A row of any table."""
        self._rows.setdefault(table, []).append(row)
        return self

    def drop(self, table: str) -> Export:
        """Leaves a table out."""
        self._drop = (*self._drop, table)
        return self

    def string(self, text: str) -> int:
        """The StringIds ID of a text."""
        return self._strings.setdefault(text, len(self._strings) + 1)

    def thread(self, tid: int, name: str, pid: int = PID) -> Export:
        """A thread's name."""
        return self.add("ThreadNames", nameId=self.string(name), globalTid=global_tid(tid, pid))

    def gpu(self, gpu_id: int = 0, name: str = "NVIDIA H200") -> Export:
        """A GPU of the machine."""
        return self.add("TARGET_INFO_GPU", id=gpu_id, name=name, totalMemory=150 << 30, smCount=132)

    def range(
        self, name: str, start: int, end: int | None, tid: int = MAIN, pid: int = PID, *, by_id: bool = False,
        kind: int = 59,
    ) -> Export:  # fmt: skip
        """An NVTX range; without an end it stays open. ``by_id`` names it through StringIds."""
        named = {"textId": self.string(name)} if by_id else {"text": name}
        return self.add(
            "NVTX_EVENTS", start=start, end=end, eventType=kind, globalTid=global_tid(tid, pid), domainId=0, **named
        )

    def call(
        self, api: str, start: int, tid: int = MAIN, pid: int = PID, correlation: int | None = None, result: int = 0
    ) -> int:
        """An API call of 1 ns; returns its correlation ID."""
        if correlation is None:
            self._correlation += 1
            correlation = self._correlation
        self.add(
            "CUPTI_ACTIVITY_KIND_RUNTIME", start=start, end=start + 1, globalTid=global_tid(tid, pid),
            correlationId=correlation, nameId=self.string(api), returnValue=result,
        )  # fmt: skip
        return correlation

    def kernel(
        self, name: str, launch: int | None, start: int, end: int, tid: int = MAIN, pid: int = PID, *,
        correlation: int | None = None, stream: int = 7, device: int = 0, node: int | None = None,
        api: str = "cudaLaunchKernel_v7000", context: int | None = None,
    ) -> Export:  # fmt: skip
        """A kernel from start to end, launched at ``launch`` (None: no launch row)."""
        if launch is not None:
            correlation = self.call(api, launch, tid, pid, correlation)
        elif correlation is None:
            self._correlation += 1
            correlation = self._correlation
        self._gpu("KERNEL", start, end, correlation, pid, stream, device)
        self._rows["CUPTI_ACTIVITY_KIND_KERNEL"][-1].update(
            demangledName=self.string(name), shortName=self.string(name), graphNodeId=node,
            **({} if context is None else {"contextId": context}),
        )  # fmt: skip
        return self

    def memory(
        self, kind: str, launch: int, start: int, end: int, tid: int = MAIN, pid: int = PID, stream: int = 7,
        device: int = 0,
    ) -> Export:  # fmt: skip
        """A MEMCPY or MEMSET."""
        api = "cudaMemcpyAsync_v3020" if kind == "MEMCPY" else "cudaMemsetAsync_v3020"
        self._gpu(kind, start, end, self.call(api, launch, tid, pid), pid, stream, device)
        return self

    def captured_node(self, at: int, node: int, original: int | None = None) -> Export:
        """Adds a node of a graph, made at a time, and the node that it is a copy of."""
        return self.add(
            "CUDA_GRAPH_NODE_EVENTS", start=at, end=at, globalTid=global_tid(), graphNodeId=node,
            originalGraphNodeId=original,
        )  # fmt: skip

    def graph(self, launch: int, start: int, end: int) -> Export:
        """An opaque replay of a CUDA graph."""
        self._gpu("GRAPH_TRACE", start, end, self.call("cudaGraphLaunch_v10000", launch), PID, 7, 0)
        return self

    def _gpu(self, kind: str, start: int, end: int, correlation: int, pid: int, stream: int, device: int) -> None:
        self.add(
            f"CUPTI_ACTIVITY_KIND_{kind}", start=start, end=end, deviceId=device, streamId=stream,
            correlationId=correlation, globalPid=global_pid(pid),
        )  # fmt: skip

    def write(self, path: Path) -> Path:
        """Writes the export; tables without rows are not there, as in nsys."""
        path.unlink(missing_ok=True)
        connection = sqlite3.connect(path)
        strings = [{"id": number, "value": text} for text, number in self._strings.items()]
        for table, rows in {**self._rows, "StringIds": strings}.items():
            if table not in self._drop:
                self._write_table(connection, table, rows)
        connection.commit()
        connection.close()
        return path

    def _write_table(self, connection: sqlite3.Connection, table: str, rows: list[dict[str, Any]]) -> None:
        types = {name: _SQL_TYPES[type(value)] for row in rows for name, value in row.items() if value is not None}
        for column in TABLES[table].columns if table in TABLES else ():
            types.setdefault(column.aliases[0], _SQL_TYPES[type(column.default)])
        names = [name for name in types if f"{table}.{name}" not in self._drop]
        name = self._rename.get(table, table)
        renamed = [f'"{self._rename.get(f"{table}.{one}", one)}" {types[one]}' for one in names]
        connection.execute(f'CREATE TABLE "{name}" ({", ".join(renamed)})')
        marks = ", ".join("?" * len(names))
        connection.executemany(f'INSERT INTO "{name}" VALUES ({marks})', [[row.get(n) for n in names] for row in rows])


def training_step(export: Export, at: int = 0, pid: int = PID, *, wrap: str | None = "step") -> Export:
    """One training step of 1,000 ns from ``at``: what is in it stands in the comments.

    forward [10, 300): GEMM launched at 20 runs [30, 130), ADD launched at 40 runs [130, 150): sum 120, busy 120
    backward [300, 700): GEMM launched by autograd at 350 runs [360, 560), ADD at 400 runs [560, 600): sum 240
    optimizer [700, 950): ADD launched at 710 runs [720, 800): sum 80
    """
    if wrap:
        export.range(wrap, at, at + 1000, pid=pid)
    export.range("forward", at + 10, at + 300, pid=pid)
    export.kernel(GEMM, at + 20, at + 30, at + 130, pid=pid)
    export.kernel(ADD, at + 40, at + 130, at + 150, pid=pid)
    export.range("backward", at + 300, at + 700, pid=pid)
    export.kernel(GEMM, at + 350, at + 360, at + 560, tid=AUTOGRAD, pid=pid)
    export.kernel(ADD, at + 400, at + 560, at + 600, tid=AUTOGRAD, pid=pid)
    export.range("optimizer", at + 700, at + 950, pid=pid)
    export.kernel(ADD, at + 710, at + 720, at + 800, pid=pid)
    return export
