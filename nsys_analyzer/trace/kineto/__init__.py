"""Converts a trace of PyTorch's profiler to the tables of an nsys export."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Iterator
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np

from nsys_analyzer.errors import TraceError
from nsys_analyzer.trace.arrays import Ints, arrow_table
from nsys_analyzer.trace.columns import pid_of
from nsys_analyzer.trace.kineto.events import COLUMNS, KernelSizes, Rows, TrackId
from nsys_analyzer.trace.kineto.read import KinetoTrace, read_kineto
from nsys_analyzer.trace.metadata import CPU, CUDA, HIP
from nsys_analyzer.trace.reader import ArrowReader

if TYPE_CHECKING:
    import pyarrow as pa

_PUSH_POP_EVENT = 59  # the eventType of push-pop ranges in nsys exports
_WARNING_SEVERITY = 2  # the severity of warnings in nsys exports
_PAGEABLE_MEMORY, _DEVICE_MEMORY = 0, 2  # codes of nsys's ENUM_CUDA_MEM_KIND
#: The words in Kineto's names of copies for the codes 1 to 10 of nsys's ENUM_CUDA_MEMCPY_OPER.
_COPY_DIRECTIONS = ("HtoD", "DtoH", "HtoA", "AtoH", "AtoA", "AtoD", "DtoA", "DtoD", "HtoH", "PtoP")
#: The codes of nsys's ENUM_CUDA_MEM_KIND by the words in Kineto's names of copies.
_MEMORY_KINDS, _UNKNOWN_MEMORY = {"Pageable": 0, "Pinned": 1, "Device": 2, "Array": 3, "Managed": 4}, 7
#: Matches the name that Kineto writes for a thread: "thread 28683 (pt_autograd_0)".
_THREAD_NAME = re.compile(r"^thread \d+ \((.+)\)$")
#: The name that a GPU gets if the trace contains none, by platform.
_UNNAMED_DEVICE = {CUDA: "unnamed NVIDIA GPU", HIP: "unnamed AMD GPU"}

_VIRTUAL_MACHINE_ID = 1 << 48  # a global ID contains the ID of the virtual machine above the bits of the process ID
_MAX_ID = 1 << 24  # a global thread ID contains 24 bits of the process ID and 24 bits of the thread ID
#: The kinds of events whose track is a thread of a process. The track of any other event is a stream of a GPU.
_CPU_KINDS = ("runtime", "range", "operator", "memory")

#: The columns of a table: arrays of integers, or lists of texts.
_Columns = dict[str, Any]


def open_trace(path: Path) -> ArrowReader:
    """Opens a trace of PyTorch's profiler; raises the errors of :func:`read_tables`."""
    return ArrowReader(path, read_tables(path))


def read_tables(path: Path) -> dict[str, pa.Table]:
    """Reads a trace of PyTorch's profiler as tables of an nsys export, by their names in an export.

    Tables without rows are left out.

    Raises:
        TraceError: an error of :func:`read_kineto`, or the trace contains several processes.
    """
    trace = read_kineto(path)
    if trace.on_cpu:
        _make_kernels(trace)
        if trace.properties.device_properties:
            trace.remarks.append("The machine has a GPU, but the trace contains no GPU work: all times are CPU times")
    process, thread = _assign_global_ids(trace)
    name_of = {track: name for track, name in trace.of("thread")[["track", "name"]].tolist() if thread[track]}
    thread_names = [_THREAD_NAME.sub(r"\1", trace.texts[name]) for name in name_of.values()]
    name_ids = np.arange(len(trace.texts), len(trace.texts) + len(thread_names))  # they follow the texts in StringIds
    texts = [*trace.texts, *thread_names]
    tables = {
        **_make_gpu_tables(trace, process),
        **_make_cpu_tables(trace, process, thread),
        **_make_condition_tables(trace, process),
        "ThreadNames": {"nameId": name_ids, "globalTid": thread[list(name_of)]},
        "StringIds": {"id": np.arange(len(texts)), "value": texts},
    }
    arrow_tables = {name: arrow_table(columns) for name, columns in tables.items()}
    return {name: table for name, table in arrow_tables.items() if table.num_rows}


def _assign_global_ids(trace: KinetoTrace) -> tuple[int, Ints]:
    """Returns the global ID of the trace's process, and the global thread ID of each track.

    The array of thread IDs has shape (tracks,). The ID is 0 for the tracks of GPU operations.

    Raises:
        TraceError: the trace contains several processes.
    """
    tracks = np.unique(np.concatenate([trace.of(kind)["track"] for kind in _CPU_KINDS])).tolist()
    pids = _fit_ids(trace.tracks[track][0] for track in tracks)
    if len(pids) > 1:
        # Kineto writes the GPU in place of the process, so the process that launched an operation would be unknown.
        raise TraceError(f"{trace.path} contains {len(pids)} processes", "Give one trace for each rank")
    process = _VIRTUAL_MACHINE_ID | next(iter(pids.values()), 0) << 24
    tids = _fit_ids(trace.tracks[track][1] for track in tracks)
    thread = np.zeros(len(trace.tracks), np.int64)
    thread[tracks] = [process | tids[trace.tracks[track][1]] for track in tracks]
    return process, thread


def _fit_ids(ids: Iterable[TrackId]) -> dict[TrackId, int]:
    """Returns an integer below 2^24 for each ID: the ID itself if it is below 2^24, else the next unused integer."""
    distinct = set(ids)
    usable = {track_id for track_id in distinct if isinstance(track_id, int) and 0 <= track_id < _MAX_ID}
    free = (number for number in count(1) if number not in usable)
    in_order = sorted(distinct, key=lambda track_id: (str(type(track_id)), track_id))
    return {
        track_id: track_id if isinstance(track_id, int) and track_id in usable else next(free) for track_id in in_order
    }


def _make_gpu_tables(trace: KinetoTrace, process: int) -> dict[str, _Columns]:
    """Returns the tables of the GPU operations."""

    def common_columns(operations: Rows) -> _Columns:
        """Returns the columns that all tables of GPU operations have."""
        return {
            "start": operations["start"],
            "end": operations["end"],
            "deviceId": operations["device"],
            "contextId": operations["context"],
            "streamId": operations["stream"],
            "correlationId": operations["correlation"],
            "globalPid": np.full(len(operations), process),
            "graphNodeId": operations["graph_node"],
        }

    kernels, copies, memsets = trace.of("kernel"), trace.of("memcpy"), trace.of("memset")
    names, inverse = np.unique(copies["name"], return_inverse=True)
    kinds = np.array([_parse_copy_name(trace.texts[name]) for name in names], np.int64).reshape(-1, 3)[inverse]
    return {
        "CUPTI_ACTIVITY_KIND_KERNEL": {
            **common_columns(kernels),
            "demangledName": kernels["name"],
            "continues": kernels["continues"],
            **_make_size_columns(trace, kernels["sizes"]),
        },
        "CUPTI_ACTIVITY_KIND_MEMCPY": {
            **common_columns(copies),
            "bytes": copies["bytes"],
            **dict(zip(("copyKind", "srcKind", "dstKind"), kinds.T, strict=True)),
        },
        "CUPTI_ACTIVITY_KIND_MEMSET": {**common_columns(memsets), "bytes": memsets["bytes"]},
    }


#: The columns of the sizes of a kernel: of its grid, of its blocks, and of what a block occupies.
_SIZE_COLUMNS = (
    "gridX", "gridY", "gridZ", "blockX", "blockY", "blockZ", "registersPerThread", "dynamicSharedMemory",
)  # fmt: skip


def _make_size_columns(trace: KinetoTrace, sizes: Ints) -> _Columns:
    """Returns the columns of the sizes of kernels, 0 if they are unknown, from the codes of their texts."""
    texts, inverse = np.unique(sizes, return_inverse=True)
    rows = []
    for code in texts.tolist():
        text = trace.texts[code] if code >= 0 else "[]"
        try:
            grid, block, registers, shared_bytes = msgspec.json.decode(text, type=KernelSizes)
        except msgspec.ValidationError:  # the trace has no sizes, or sizes of another form
            grid, block, registers, shared_bytes = (0, 0, 0), (0, 0, 0), 0, 0
        rows.append((*grid, *block, registers, shared_bytes))
    columns = np.array(rows, np.int64).reshape(-1, len(_SIZE_COLUMNS))[inverse].T
    return dict(zip(_SIZE_COLUMNS, columns, strict=True))


def _parse_copy_name(name: str) -> tuple[int, int, int]:
    """Returns nsys's codes for the direction of a copy, and for the memory of its source and its destination.

    A name is "Memcpy HtoD (Pageable -> Device)". An unknown direction is 0, an unknown kind of memory is 7.
    """
    direction = next((code for code, word in enumerate(_COPY_DIRECTIONS, 1) if f"Memcpy {word}" in name), 0)
    ends = re.search(r"\((\w+) -> (\w+)\)", name)
    source, target = (_MEMORY_KINDS.get(end, _UNKNOWN_MEMORY) for end in (ends.groups() if ends else ("", "")))
    return direction, source, target


def _make_cpu_tables(trace: KinetoTrace, process: int, thread: Ints) -> dict[str, _Columns]:
    """Returns the tables of events on threads, of the profiler's overhead, and of allocations."""

    def times_and_threads(events: Rows) -> _Columns:
        """Returns the columns that all tables of events on threads have."""
        return {"start": events["start"], "end": events["end"], "globalTid": thread[events["track"]]}

    calls, ranges, operators, overhead = (trace.of(kind) for kind in ("runtime", "range", "operator", "overhead"))
    memory = trace.of("memory")
    if not trace.on_cpu:
        memory = memory[memory["device"] >= 0]  # with a GPU, only its memory counts, not host memory
    return {
        "CUPTI_ACTIVITY_KIND_RUNTIME": {
            **times_and_threads(calls),
            "correlationId": calls["correlation"],
            "nameId": calls["name"],
        },
        "NVTX_EVENTS": {
            **times_and_threads(ranges),
            "eventType": np.full(len(ranges), _PUSH_POP_EVENT),
            "textId": ranges["name"],
        },
        "TORCH_OPERATOR_EVENTS": {
            **times_and_threads(operators),
            "nameId": operators["name"],
            "sequenceNumber": operators["sequence"],
            "forwardThreadId": operators["forward_thread"],
            "argumentsId": operators["arguments"],
        },
        "CUPTI_ACTIVITY_KIND_OVERHEAD": {
            "start": overhead["start"],
            "end": overhead["end"],
            "globalTid": np.full(len(overhead), process),
            "nameId": overhead["name"],
        },
        "CUDA_GPU_MEMORY_USAGE_EVENTS": {
            "start": memory["start"],
            "globalPid": np.full(len(memory), process),
            "bytes": np.abs(memory["bytes"]),
            "memKind": np.where(memory["device"] < 0, _PAGEABLE_MEMORY, _DEVICE_MEMORY),
            "memoryOperationType": (memory["bytes"] < 0).astype(np.int64),
            "localMemoryPoolUtilizedSize": memory["allocated"],
        },
        "NCCL_CALLS": _make_nccl_table(trace, thread),
    }


def _make_nccl_table(trace: KinetoTrace, thread: Ints) -> _Columns:
    """Returns a table of NCCL calls: the launches of the kernels that carry out collectives.

    A launch that starts several kernels is left out. The table contains no communicators, because PyTorch's names of
    process groups are unique only within a run.
    """

    def with_unique_correlation(rows: Rows) -> Rows:
        """Returns the rows whose correlation ID occurs only once, sorted by correlation ID."""
        _, first, counts = np.unique(rows["correlation"], return_index=True, return_counts=True)
        unique: Rows = rows[first[counts == 1]]
        return unique

    calls, collectives = trace.of("runtime"), trace.of("collective")
    calls = with_unique_correlation(calls)
    collectives = with_unique_correlation(collectives[collectives["correlation"] != 0])
    _, call, collective = np.intersect1d(
        calls["correlation"], collectives["correlation"], assume_unique=True, return_indices=True
    )
    calls, collectives = calls[call], collectives[collective]
    return {
        "start": calls["start"],
        "globalTid": thread[calls["track"]],
        "function": [trace.texts[name] for name in collectives["name"].tolist()],
        "bytes": collectives["bytes"],
        "ranks": collectives["ranks"],
    }


def _make_condition_tables(trace: KinetoTrace, process: int) -> dict[str, _Columns]:
    """Returns the tables about the machine, the rank, the profiler, and the warnings about the trace."""
    properties, used_devices = trace.properties, np.unique(trace.operations["device"])
    is_amd_gpu = not trace.on_cpu and _find_platform(trace) == HIP
    environment = (
        ("DevicePlatform", HIP if is_amd_gpu else None),
        ("CudaDriverVersion", properties.cuda_driver_version),
        ("HipDriverVersion", properties.hip_driver_version),
        ("HipRuntimeVersion", properties.hip_runtime_version),
        ("NvDriverVersion", properties.driver_version),
        ("CpuDescription", properties.cpu),
        ("OsDescription", properties.os),
    )
    gpu_columns = (
        "id", "name", "totalMemory", "smCount", "computeMajor", "maxRegistersPerSm", "maxShmemPerSm", "maxWarpsPerSm",
    )  # fmt: skip
    group = properties.distributed
    ranks = [(group.rank, group.world_size or 0)] if group and group.rank is not None else []
    rank, world_size = _transpose(ranks, 2)
    return {
        "TARGET_INFO_GPU": dict(
            zip(gpu_columns, _transpose(list(_list_devices(trace)), len(gpu_columns)), strict=True)
        ),
        "TARGET_INFO_CUDA_DEVICE": {
            "gpuId": used_devices,
            "cudaId": used_devices,
            "pid": np.full(len(used_devices), pid_of(process)),
        },
        "TARGET_INFO_SYSTEM_ENV": _make_property_table([(name, str(value)) for name, value in environment if value]),
        "PROCESS_RANKS": {"globalPid": np.full(len(ranks), process), "rank": rank, "worldSize": world_size},
        "META_DATA_EXPORT": _make_property_table(
            [
                ("EXPORT_PRODUCT_NAME", "torch.profiler"),
                ("EXPORT_PRODUCT_VERSION", str(properties.torch_version or "unknown")),
                ("EXPORT_SCHEMA_VERSION", "3.20.3"),
            ]
        ),
        "DIAGNOSTIC_EVENT": {
            "severity": np.full(len(trace.remarks), _WARNING_SEVERITY),
            "text": trace.remarks,
            "globalPid": np.full(len(trace.remarks), process),
        },
    }


def _find_platform(trace: KinetoTrace) -> str:
    """Returns the programming platform of the trace's GPUs: "CUDA" or "HIP"."""
    properties = trace.properties
    versions = (properties.hip_runtime_version, properties.hip_driver_version, properties.roctracer_version)
    calls = (trace.texts[name] for name in np.unique(trace.of("runtime")["name"]))
    is_amd = any(version is not None for version in versions) or any(name.startswith("hip") for name in calls)
    return HIP if is_amd or any((gpu.name or "").startswith("AMD") for gpu in properties.device_properties) else CUDA


def _list_devices(trace: KinetoTrace) -> Iterator[tuple[int | str, ...]]:
    """Yields a row of the table of GPUs for each GPU that the trace lists. A number is 0 if it is unknown.

    If the trace lists no GPUs, the function yields the AMD GPUs that ran operations. For a trace without a GPU, it
    yields the CPU.
    """
    if trace.on_cpu:
        yield 0, CPU, *(0,) * 6
        return
    platform, gpus = _find_platform(trace), trace.properties.device_properties
    if not gpus and platform == HIP:
        used_devices = np.unique(trace.operations["device"]).tolist()
        yield from ((device, _UNNAMED_DEVICE[platform], *(0,) * 6) for device in used_devices)
    for gpu in gpus:
        name = (gpu.name or "").strip() or _UNNAMED_DEVICE[platform]
        # The rule that tells how many blocks run at once is that of NVIDIA, whose warps have 32 threads.
        warps = (gpu.threads_per_sm or 0) // 32 if gpu.warp_size == 32 else 0
        limits = (gpu.compute_capability, gpu.registers_per_sm, gpu.shared_bytes_per_sm, warps)
        yield gpu.id, name, *(number or 0 for number in (gpu.memory, gpu.sms, *limits))


def _make_property_table(pairs: Iterable[tuple[str, str]]) -> _Columns:
    """Returns the columns of a table of properties, from pairs of name and value."""
    names, values = _transpose(list(pairs), 2)
    return {"name": names, "value": values}


def _transpose(rows: list[tuple[Any, ...]], columns: int) -> list[Any]:
    """Returns the columns of the given rows: arrays of integers, or lists of texts."""
    transposed = zip(*rows, strict=True) if rows else ((),) * columns
    return [
        np.array(column, np.int64) if column and isinstance(column[0], int) else list(column) for column in transposed
    ]


# --- the operators of a trace without a GPU

#: Matches ranges of autograd's engine and of autograd's nodes, which contain operators: ``autograd::engine::
#: evaluate_function: MmBackward0``, ``torch::autograd::AccumulateGrad``, ``MmBackward0``, ``torch::jit::…Backward``,
#: and the ``MyBackward`` of a user's function.
_AUTOGRAD_RANGE = re.compile(r"^(?:torch::)?autograd::|^[\w:<>., ]*Backward\d*$")
#: The prefix of the range around code that torch.compile generated. The matmuls of this code are operators in the
#: range.
_COMPILED_PREFIX = "## Call CompiledFxGraph"
_COMPILED_GRAPH = "CompiledFxGraph"

#: Start and end (ns) of a period in which an operator runs its own code, not an operator that it calls.
Stretch = tuple[int, int]


def _make_kernels(trace: KinetoTrace) -> None:
    """Adds kernels and launches to a trace without a GPU.

    Each stretch of an operator's own time becomes a kernel, each operator becomes a launch, and each thread a stream.
    """
    operators, texts, compiled_graph = trace.of("operator"), trace.texts, len(trace.texts)
    names = [name for name in np.unique(operators["name"]) if is_operator(texts[name])]
    if any(texts[name].startswith(_COMPILED_PREFIX) for name in names):
        texts.append(_COMPILED_GRAPH)
    operators_of_threads: dict[int, list[tuple[int, int, int, int]]] = defaultdict(list)
    for operator in operators[np.isin(operators["name"], names)][["name", "track", "start", "end"]].tolist():
        operators_of_threads[operator[1]].append(operator)
    calls, kernels = list[tuple[int, ...]](), list[tuple[int, ...]]()
    for stream, thread_operators in enumerate(operators_of_threads.values()):
        thread_operators.sort(key=lambda operator: (operator[2], -operator[3]))
        own_stretches = find_own_stretches(operator[2:] for operator in thread_operators)
        for (name, track, start, end), stretches in zip(thread_operators, own_stretches, strict=True):
            is_graph = texts[name].startswith(_COMPILED_PREFIX)
            name = compiled_graph if is_graph else name  # the names of equal graphs contain different hashes
            for part, stretch in enumerate(stretches or [(start, start)]):
                if is_graph or not part:
                    calls.append((name, track, *(stretch if is_graph else (start, end)), len(calls) + 1))
                continues = int(part > 0 and not is_graph)
                kernels.append((name, track, *stretch, len(calls), 0, 0, stream, 0, 0, continues, -1))
    trace.events["runtime"] = np.array(calls, COLUMNS["runtime"])
    trace.events["kernel"] = np.array(kernels, COLUMNS["kernel"])


def is_operator(name: str) -> bool:
    """Returns whether a ``cpu_op`` of this name computes something, instead of being a label around operators.

    An operator has a namespace (``aten::mm``), except for code that torch.compile generated. Labels are the ranges of
    autograd (``MmBackward0``), and for example ``enumerate(DataLoader)#…``, ``Optimizer.step#AdamW.step`` and
    ``DistributedDataParallel.forward``.
    """
    is_compiled = name.startswith(_COMPILED_PREFIX) or "cpp_fused" in name
    return is_compiled or ("::" in name and not _AUTOGRAD_RANGE.search(name))


def find_own_stretches(intervals: Iterable[tuple[int, int]]) -> list[list[Stretch]]:
    """Returns, for each interval of a thread, the stretches that no nested interval covers, without empty stretches.

    Args:
        intervals: (start, end) in ns, sorted by start. Of intervals with equal starts, the longer one is first. If an
            interval ends after the interval in which it starts, its end is moved forward to the end of that interval.
    """
    own_stretches: list[list[Stretch]] = []
    ends: list[int] = []
    covered_until: list[int] = []
    open_intervals: list[int] = []

    def cover(index: int, start: int, end: int) -> None:
        """Ends the current stretch of an interval at the start of a nested interval."""
        if start > covered_until[index]:
            own_stretches[index].append((covered_until[index], start))
        covered_until[index] = end

    for start, end in intervals:
        while open_intervals and ends[open_intervals[-1]] <= start:
            open_intervals.pop()
        if open_intervals:
            end = min(end, ends[open_intervals[-1]])  # because of rounding, a child may end 1 ns after its parent
            cover(open_intervals[-1], start, end)
        open_intervals.append(len(own_stretches))
        own_stretches.append([])
        ends.append(end)
        covered_until.append(start)
    for index, end in enumerate(ends):
        cover(index, end, end)
    return own_stretches
