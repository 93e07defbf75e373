"""From the events of a PyTorch profiler's trace to the tables of an nsys export, as far as they are read."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Iterator
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from nsys_analyzer.errors import TraceError
from nsys_analyzer.trace.arrays import Ints, arrow_table
from nsys_analyzer.trace.columns import pid_of
from nsys_analyzer.trace.kineto.events import COLUMNS, Name, Rows
from nsys_analyzer.trace.kineto.read import KinetoTrace, read_kineto
from nsys_analyzer.trace.metadata import CPU, CUDA, HIP

if TYPE_CHECKING:
    import pyarrow as pa

_PUSH_POP = 59
_WARNING = 2
_HOST, _DEVICE = 0, 2  # nsys's ENUM_CUDA_MEM_KIND: pageable memory, device memory
_COPY_KINDS = ("HtoD", "DtoH", "HtoA", "AtoH", "AtoA", "AtoD", "DtoA", "DtoD", "HtoH", "PtoP")
#: ENUM_CUDA_MEM_KIND by the words of the same names.
_MEMORY_KINDS, _UNKNOWN_MEMORY = {"Pageable": 0, "Pinned": 1, "Device": 2, "Array": 3, "Managed": 4}, 7
#: Kineto's "thread 28683 (pt_autograd_0)".
_THREAD_NAME = re.compile(r"^thread \d+ \((.+)\)$")
#: What a device is called that the trace gives no name.
_UNNAMED = {CUDA: "unnamed NVIDIA GPU", HIP: "unnamed AMD GPU"}

_VM = 1 << 48
_LIMIT = 1 << 24  # a global ID has 24 bits for the process and 24 for the thread
#: Kinds of event that happen on a thread of a process; the others name a GPU and a stream there.
_ON_A_THREAD = ("runtime", "range", "operator", "memory")


def read_tables(path: Path) -> dict[str, pa.Table]:
    """Reads a trace of PyTorch's profiler as the tables of an nsys export, by their names there; none is empty.

    Raises:
        TraceError: what :func:`read_kineto` raises, or the trace is of several processes.
    """
    trace = read_kineto(path)
    if trace.on_cpu:
        _make_kernels(trace)
        if trace.properties.device_properties:
            trace.remarks.append(
                "The machine has a GPU, and the trace holds nothing that ran there: the times are those of the CPU"
            )
    tables = {name: arrow_table(columns) for name, columns in _tables(trace, *_threads(trace)).items()}
    return {name: table for name, table in tables.items() if table.num_rows}


def _threads(trace: KinetoTrace) -> tuple[int, Ints]:
    """Returns the global ID of the trace's process, and the global thread ID of each place.

    The latter has shape (places,), and is 0 for a place where nothing of a CPU happened.

    Raises:
        TraceError: it is of several processes.
    """
    numbers = np.unique(np.concatenate([trace.of(kind)["place"] for kind in _ON_A_THREAD])).tolist()
    pids = _folded(trace.places[number][0] for number in numbers)
    if len(pids) > 1:
        # Kineto writes a GPU's number where the process belongs: which launched what ran there is not known.
        raise TraceError(f"{trace.path} holds {len(pids)} processes", "Give the trace of each rank alone")
    process = _VM | next(iter(pids.values()), 0) << 24
    threads = _folded(trace.places[number][1] for number in numbers)
    thread = np.zeros(len(trace.places), np.int64)
    thread[numbers] = [process | threads[trace.places[number][1]] for number in numbers]
    return process, thread


def _folded(ids: Iterable[Name]) -> dict[Name, int]:
    """Returns a number below 2^24 for each ID: itself where it is one, else the next that is free."""
    distinct = set(ids)
    fitting = {name for name in distinct if isinstance(name, int) and 0 <= name < _LIMIT}
    free = (number for number in count(1) if number not in fitting)
    in_order = sorted(distinct, key=lambda name: (str(type(name)), name))
    return {name: name if isinstance(name, int) and name in fitting else next(free) for name in in_order}


_Columns = dict[str, Any]
"""The columns of a table: arrays of integers, or lists of texts."""


def _tables(trace: KinetoTrace, process: int, thread: Ints) -> dict[str, _Columns]:
    """Returns all tables by their names in an export, also those without a row."""
    calls, ranges, operators, memory = (trace.of(kind) for kind in ("runtime", "range", "operator", "memory"))
    copies = trace.of("memcpy")
    if not trace.on_cpu:
        memory = memory[memory["device"] >= 0]  # the host's is of interest where there is no GPU
    names, inverse = np.unique(copies["name"], return_inverse=True)
    kinds = np.array([_copy_kinds(trace.texts[name]) for name in names], np.int64).reshape(-1, 3)[inverse]
    used = np.unique(trace.operations["device"])
    named = {number: name for number, name in trace.of("thread")[["place", "name"]].tolist() if thread[number]}
    texts = [*trace.texts, *(_THREAD_NAME.sub(r"\1", trace.texts[name]) for name in named.values())]
    group = trace.properties.distributed
    ranks = [group] if group and group.rank is not None else []
    devices = list(_devices(trace))
    return {
        "CUPTI_ACTIVITY_KIND_KERNEL": {
            **_on_gpu(trace.of("kernel"), process),
            "demangledName": trace.of("kernel")["name"],
            "continues": trace.of("kernel")["continues"],
        },
        "CUPTI_ACTIVITY_KIND_MEMCPY": {
            **_on_gpu(copies, process),
            "bytes": copies["bytes"],
            **dict(zip(("copyKind", "srcKind", "dstKind"), kinds.T, strict=True)),
        },
        "CUPTI_ACTIVITY_KIND_MEMSET": {
            **_on_gpu(trace.of("memset"), process),
            "bytes": trace.of("memset")["bytes"],
        },
        "CUPTI_ACTIVITY_KIND_RUNTIME": {
            **_spans(calls, thread[calls["place"]]),
            "correlationId": calls["correlation"],
            "nameId": calls["name"],
        },
        "NCCL_CALLS": _nccl_calls(trace, thread),
        "CUPTI_ACTIVITY_KIND_OVERHEAD": {
            **_spans(trace.of("noted"), np.full(len(trace.of("noted")), process)),
            "nameId": trace.of("noted")["name"],
        },
        "TARGET_INFO_GPU": dict(zip(("id", "name", "totalMemory", "smCount"), _transposed(devices, 4), strict=True)),
        "TARGET_INFO_CUDA_DEVICE": {"gpuId": used, "cudaId": used, "pid": np.full(len(used), pid_of(process))},
        "DIAGNOSTIC_EVENT": {
            "severity": np.full(len(trace.remarks), _WARNING),
            "text": trace.remarks,
            "globalPid": np.full(len(trace.remarks), process),
        },
        "NVTX_EVENTS": {
            **_spans(ranges, thread[ranges["place"]]),
            "eventType": np.full(len(ranges), _PUSH_POP),
            "textId": ranges["name"],
        },
        "TORCH_OPERATOR_EVENTS": {
            **_spans(operators, thread[operators["place"]]),
            "nameId": operators["name"],
            "sequenceNumber": operators["sequence"],
            "forwardThreadId": operators["forward_thread"],
        },
        "CUDA_GPU_MEMORY_USAGE_EVENTS": {
            "start": memory["start"],
            "globalPid": np.full(len(memory), process),
            "bytes": np.abs(memory["bytes"]),
            "memKind": np.where(memory["device"] < 0, _HOST, _DEVICE),
            "memoryOperationType": (memory["bytes"] < 0).astype(np.int64),
            "localMemoryPoolUtilizedSize": memory["allocated"],
        },
        "ThreadNames": {
            "nameId": np.arange(len(trace.texts), len(texts)),
            "globalTid": thread[list(named)],
        },
        "TARGET_INFO_SYSTEM_ENV": _properties(_environment(trace)),
        "PROCESS_RANKS": {
            "globalPid": np.full(len(ranks), process),
            "rank": np.array([each.rank for each in ranks], np.int64),
            "worldSize": np.array([each.world_size or 0 for each in ranks], np.int64),
        },
        "META_DATA_EXPORT": _properties(
            [
                ("EXPORT_PRODUCT_NAME", "torch.profiler"),
                ("EXPORT_PRODUCT_VERSION", str(trace.properties.torch_version or "unknown")),
                ("EXPORT_SCHEMA_VERSION", "3.20.3"),
            ]
        ),
        "StringIds": {"id": np.arange(len(texts)), "value": texts},
    }


def _spans(events: Rows, thread: Ints) -> _Columns:
    return {"start": events["start"], "end": events["end"], "globalTid": thread}


def _on_gpu(events: Rows, process: int) -> _Columns:
    return {
        "start": events["start"],
        "end": events["end"],
        "deviceId": events["device"],
        "contextId": events["context"],
        "streamId": events["stream"],
        "correlationId": events["correlation"],
        "globalPid": np.full(len(events), process),
        "graphNodeId": events["graph_node"],
    }


def _copy_kinds(name: str) -> tuple[int, int, int]:
    """Returns the ENUM_CUDA_MEMCPY_OPER of a copy and the ENUM_CUDA_MEM_KIND of its ends, by its name.

    "Memcpy HtoD (Pageable -> Device)"; 0 for an unknown kind of copy, 7 for an unknown kind of memory.
    """
    direction = next((kind for kind, word in enumerate(_COPY_KINDS, 1) if f"Memcpy {word}" in name), 0)
    ends = re.search(r"\((\w+) -> (\w+)\)", name)
    source, target = (_MEMORY_KINDS.get(end, _UNKNOWN_MEMORY) for end in (ends.groups() if ends else ("", "")))
    return direction, source, target


def _nccl_calls(trace: KinetoTrace, thread: Ints) -> _Columns:
    """Returns the collectives that kernels say they carry out, where they are launched one by one.

    The groups of PyTorch have names within a run, and no IDs that tell runs apart.
    """
    calls, collectives = trace.of("runtime"), trace.of("collective")
    calls, collectives = (_of_one_correlation(rows) for rows in (calls, collectives[collectives["correlation"] != 0]))
    _, launch, carried = np.intersect1d(
        calls["correlation"], collectives["correlation"], assume_unique=True, return_indices=True
    )
    calls, collectives = calls[launch], collectives[carried]
    return {
        "start": calls["start"],
        "globalTid": thread[calls["place"]],
        "function": [trace.texts[name] for name in collectives["name"].tolist()],
        "bytes": collectives["bytes"],
        "ranks": collectives["ranks"],
    }


def _of_one_correlation(rows: Rows) -> Rows:
    """Returns the rows whose correlation ID no other has, in its order."""
    _, first, times = np.unique(rows["correlation"], return_index=True, return_counts=True)
    alone: Rows = rows[first[times == 1]]
    return alone


def _platform(trace: KinetoTrace) -> str:
    """Returns the platform of the trace's device: "CUDA" or "HIP"."""
    properties = trace.properties
    versions = (properties.hip_runtime_version, properties.hip_driver_version, properties.roctracer_version)
    calls = (trace.texts[name] for name in np.unique(trace.of("runtime")["name"]))
    is_amd = any(version is not None for version in versions) or any(name.startswith("hip") for name in calls)
    return HIP if is_amd or any((gpu.name or "").startswith("AMD") for gpu in properties.device_properties) else CUDA


def _devices(trace: KinetoTrace) -> Iterator[tuple[int, str, int, int]]:
    """Yields the devices that the trace lists; where it lists none, those used, if they are AMD's; or the CPU."""
    if trace.on_cpu:
        yield 0, CPU, 0, 0
        return
    platform, listed = _platform(trace), trace.properties.device_properties
    if not listed and platform == HIP:
        yield from ((device, _UNNAMED[platform], 0, 0) for device in np.unique(trace.operations["device"]).tolist())
    for gpu in listed:
        yield gpu.id, (gpu.name or "").strip() or _UNNAMED[platform], gpu.memory or 0, gpu.sms or 0


def _environment(trace: KinetoTrace) -> Iterator[tuple[str, str]]:
    """Yields the platform, versions, CPU and system, from Kineto's properties and those that our recorder adds."""
    platform, properties = _platform(trace), trace.properties
    if not trace.on_cpu and platform == HIP:
        yield "DevicePlatform", platform
    for name, value in (
        ("CudaDriverVersion", properties.cuda_driver_version),
        ("HipDriverVersion", properties.hip_driver_version),
        ("HipRuntimeVersion", properties.hip_runtime_version),
        ("NvDriverVersion", properties.driver_version),
        ("CpuDescription", properties.cpu),
        ("OsDescription", properties.os),
    ):
        if value:
            yield name, str(value)


def _properties(pairs: Iterable[tuple[str, str]]) -> _Columns:
    names, values = _transposed(list(pairs), 2)
    return {"name": names, "value": values}


def _transposed(rows: list[tuple[Any, ...]], columns: int) -> list[Any]:
    """Returns the columns of some rows: arrays of integers, lists of texts."""
    transposed = zip(*rows, strict=True) if rows else ((),) * columns
    return [
        np.array(column, np.int64) if column and isinstance(column[0], int) else list(column) for column in transposed
    ]


# --- the operators of a trace without a GPU

#: Autograd's own bookkeeping, which runs operators: ``autograd::engine::evaluate_function: MmBackward0``,
#: ``torch::autograd::AccumulateGrad``, ``MmBackward0``, ``torch::jit::…Backward``, a function's ``MyBackward``.
_AUTOGRAD = re.compile(r"^(?:torch::)?autograd::|^[\w:<>., ]*Backward\d*$")
#: What torch.compile's own code runs in; its matmuls are operators in it.
_COMPILED = "## Call CompiledFxGraph"
_COMPILED_GRAPH = "CompiledFxGraph"

Stretch = tuple[int, int]
"""Where an operator runs and none that it calls: start and end in ns."""


def _make_kernels(trace: KinetoTrace) -> None:
    """Makes a launch of each call of an operator, in place, and kernels of its own time; a thread is a stream."""
    operators, names, graph = trace.of("operator"), trace.texts, len(trace.texts)
    working = [number for number in np.unique(operators["name"]) if is_operator(names[number])]
    if any(names[number].startswith(_COMPILED) for number in working):
        names.append(_COMPILED_GRAPH)
    threads: dict[int, list[tuple[int, int, int, int]]] = defaultdict(list)
    for span in operators[np.isin(operators["name"], working)][["name", "place", "start", "end"]].tolist():
        threads[span[1]].append(span)
    calls, kernels = list[tuple[int, ...]](), list[tuple[int, ...]]()
    for stream, spans in enumerate(threads.values()):
        spans.sort(key=lambda span: (span[2], -span[3]))
        for (name, place, start, end), free in zip(spans, find_own_stretches(span[2:] for span in spans), strict=True):
            is_graph = names[name].startswith(_COMPILED)
            name = graph if is_graph else name  # equal graphs differ in the hash of their names
            for part, run in enumerate(free or [(start, start)]):
                if is_graph or not part:
                    calls.append((name, place, *(run if is_graph else (start, end)), len(calls) + 1))
                kernels.append((name, place, *run, len(calls), 0, 0, stream, 0, 0, int(part > 0 and not is_graph)))
    trace.events["runtime"] = np.array(calls, COLUMNS["runtime"])
    trace.events["kernel"] = np.array(kernels, COLUMNS["kernel"])


def is_operator(name: str) -> bool:
    """Returns whether a ``cpu_op`` does work: it has a namespace (``aten::mm``), and is not autograd's bookkeeping.

    What has none is a label somebody put around operators: ``MmBackward0``, ``enumerate(DataLoader)#…``,
    ``Optimizer.step#AdamW.step``, ``DistributedDataParallel.forward``; but for what torch.compile made.
    """
    return ("::" in name and not _AUTOGRAD.search(name)) or name.startswith(_COMPILED) or "cpp_fused" in name


def find_own_stretches(intervals: Iterable[tuple[int, int]]) -> list[list[Stretch]]:
    """Returns the stretches of each interval of one thread that no interval nested in it covers; none empty.

    Args:
        intervals: (start, end) in ns, by start and, where they start together, the longer first. One that ends
            after the one it starts in is cut there.
    """
    free: list[list[Stretch]] = []
    ends: list[int] = []
    free_from: list[int] = []
    stack: list[int] = []

    def leave_out(index: int, start: int, end: int) -> None:
        if start > free_from[index]:
            free[index].append((free_from[index], start))
        free_from[index] = end

    for start, end in intervals:
        while stack and ends[stack[-1]] <= start:
            stack.pop()
        if stack:
            end = min(end, ends[stack[-1]])  # profilers round, and a child may outlive its parent by 1 ns
            leave_out(stack[-1], start, end)
        stack.append(len(free))
        free.append([])
        ends.append(end)
        free_from.append(start)
    for index, end in enumerate(ends):
        leave_out(index, end, end)
    return free
