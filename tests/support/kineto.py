"""Builds tiny traces of PyTorch's profiler, with the fields that Kineto writes."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

from nsys_analyzer.trace.kineto import read_tables

PID = 500
MAIN = 500
AUTOGRAD = 560


class Kineto:
    """A trace under construction: times in microseconds."""

    def __init__(self, **properties: Any) -> None:
        self.properties = {"schemaVersion": 1, "deviceProperties": [], **properties}
        self.events: list[dict[str, Any]] = []

    def add(self, cat: str, name: str, ts: Any, dur: Any, pid: Any = PID, tid: Any = MAIN, **args: Any) -> Kineto:
        """A complete event ("X") of any category."""
        event = {"ph": "X", "cat": cat, "name": name, "pid": pid, "tid": tid, "ts": ts, "dur": dur, "args": args}
        self.events.append(event)
        return self

    def gpu(self, name: str = "NVIDIA H100", number: int = 0) -> Kineto:
        """A GPU of the machine."""
        self.properties["deviceProperties"] += [
            {"id": number, "name": name, "totalGlobalMem": 80 << 30, "computeMajor": 9, "numSms": 132}
        ]
        return self

    def range(self, name: str, ts: Any, dur: Any, pid: Any = PID, tid: Any = MAIN) -> Kineto:
        """What ``record_function`` leaves, and its shadow on the GPU."""
        self.add("gpu_user_annotation", name, ts, dur, pid=0, tid=7)
        return self.add("user_annotation", name, ts, dur, pid, tid, **{"External id": 1, "Ev Idx": 0})

    def operator(
        self, name: str, ts: Any, dur: Any, pid: Any = PID, tid: Any = MAIN, *, sequence: Any = 1,
        forward_thread: Any = None,
    ) -> Kineto:  # fmt: skip
        """A ``cpu_op``, without the arguments that are None."""
        node = {"Sequence number": sequence, "Fwd thread id": forward_thread}
        present = {key: value for key, value in node.items() if value is not None}
        return self.add("cpu_op", name, ts, dur, pid, tid, **{"External id": 2, **present})

    def module(self, name: str, ts: Any, dur: Any, pid: Any = PID, tid: Any = MAIN) -> Kineto:
        """The call of a module, ``Linear_3``, as the tracer of Python writes it."""
        where = {"Python id": 9, "Python parent id": 8, "Python module id": 3}
        return self.add("python_function", f"nn.Module: {name}", ts, dur, pid, tid, **where)

    def launch(
        self, correlation: int, ts: Any, pid: Any = PID, tid: Any = MAIN, api: str = "cudaLaunchKernel"
    ) -> Kineto:
        """An API call of 1 us, and the arrow that starts there."""
        cat = "cuda_driver" if api.startswith("cuL") else "cuda_runtime"
        self.events.append(
            {"ph": "s", "id": correlation, "pid": pid, "tid": tid, "ts": ts, "cat": "ac2g", "name": "ac2g"}
        )
        return self.add(cat, api, ts, 1, pid, tid, cbid=211, correlation=correlation)

    def kernel(
        self, name: str, correlation: int, ts: Any, dur: Any, device: int = 0, stream: int = 7, **args: Any
    ) -> Kineto:
        """A kernel: its process is the GPU, its thread the stream."""
        where = {"queued": 0, "device": device, "context": 1, "stream": stream, "correlation": correlation}
        more = {"registers per thread": 32, "blocks per SM": 0.5, "grid": [1, 1, 1], "graph id": 0, "graph node id": 0}
        return self.add("kernel", name, ts, dur, device, stream, **{**where, **more, **args})

    def graph_kernel(self, name: str, correlation: int, ts: Any, dur: Any, node: int) -> Kineto:
        """Adds a kernel of a graph's replay."""
        return self.kernel(name, correlation, ts, dur, **{"graph id": 4, "graph node id": node})

    def collective(
        self, name: str, correlation: int, ts: Any, dur: Any, sent: int, received: int, dtype: str, ranks: int
    ) -> Kineto:
        """Adds a collective's kernel with its message: the elements that a rank sends and receives, and their type."""
        message = {"Collective name": name, "In msg nelems": sent, "Out msg nelems": received, "dtype": dtype}
        group = {"Group size": ranks, "Process Group Name": "0", "Process Group Ranks": "[0, 1]"}
        return self.kernel("ncclDevKernel_Any()", correlation, ts, dur, stream=20, **message, **group)

    def copy(self, kind: str, correlation: int, ts: Any, dur: Any, size: int) -> Kineto:
        """A gpu_memcpy ("Memcpy HtoD (Pageable -> Device)") or gpu_memset ("Memset (Device)")."""
        where = {"device": 0, "context": 1, "stream": 7, "correlation": correlation, "bytes": size}
        return self.add("gpu_memcpy" if "cpy" in kind else "gpu_memset", kind, ts, dur, 0, 7, **where)

    def memory(self, size: int, ts: Any, device: int, allocated: int) -> Kineto:
        """An instant of ``profile_memory``: device -1 is the host."""
        args = {"Total Reserved": 1 << 21, "Total Allocated": allocated, "Bytes": size, "Device Id": device}
        args |= {"Device Type": 0 if device < 0 else 1, "Addr": 4096}
        where = {"name": "[memory]", "pid": PID, "tid": MAIN, "ts": ts}
        self.events.append({"ph": "i", "cat": "cpu_instant_event", "s": "t", **where, "args": args})
        return self

    def thread(self, tid: Any, name: str, pid: Any = PID) -> Kineto:
        """A thread's name, twice, as Kineto writes it."""
        event = {"ph": "M", "name": "thread_name", "ts": 0, "pid": pid, "tid": tid, "args": {"name": name}}
        self.events += [event, event]
        return self

    def array(self) -> str:
        """The events as a bare array."""
        return json.dumps(self.events)

    def text(self) -> str:
        """The trace as JSON."""
        return json.dumps({**self.properties, "traceEvents": self.events, "traceName": "trace.json"})

    def write(self, path: Path) -> Path:
        """Writes the trace, compressed where the name says so."""
        content = self.text().encode()
        path.write_bytes(gzip.compress(content) if path.suffix == ".gz" else content)
        return path


def tables_of(path: Path) -> dict[str, dict[str, list[Any]]]:
    """Returns what a trace is read as: the columns of each table, by their names; texts for their IDs."""
    tables = {name: table.to_pydict() for name, table in read_tables(path).items()}
    strings = tables.pop("StringIds")
    text_of = dict(zip(strings["id"], strings["value"], strict=True))
    for columns in tables.values():
        for name in {"demangledName", "nameId", "textId"} & set(columns):
            columns[name] = [text_of.get(number) for number in columns[name]]
    return tables
