"""From the events of a PyTorch profiler trace to the rows of an nsys export."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from nsys_analyzer.capture.kineto_devices import device_rows
from nsys_analyzer.capture.kineto_events import GpuOperation, KinetoTrace
from nsys_analyzer.capture.kineto_ids import Strings, Threads, pid_of, processes_of_gpus
from nsys_analyzer.capture.kineto_tables import Rows
from nsys_analyzer.trace.columns import stream_thread
from nsys_analyzer.trace.metadata import RANGES_ON

_PUSH_POP = 59
_WARNING = 2
_HOST, _DEVICE = 0, 2  # nsys's ENUM_CUDA_MEM_KIND: pageable memory, device memory
_MTIA_COPIES = {"HOST_TO_DEVICE": 1, "DEVICE_TO_HOST": 2}  # as ENUM_CUDA_MEMCPY_OPER
#: How Kineto names a copy ("Memcpy HtoD (Pageable -> Device)") to nsys's ENUM_CUDA_MEMCPY_OPER.
_COPY_KINDS = ("", "HtoD", "DtoH", "HtoA", "AtoH", "AtoA", "AtoD", "DtoA", "DtoD", "HtoH", "PtoP")
#: Kineto's "thread 28683 (pt_autograd_0)".
_THREAD_NAME = re.compile(r"^thread \d+ \((.+)\)$")


def gpu_rows(trace: KinetoTrace, threads: Threads, strings: Strings) -> dict[str, Rows]:
    """The tables of what ran on GPUs: kernels, copies and fills, the calls behind them, and the GPUs."""
    process_of = processes_of_gpus(trace, threads)

    def rows(kind: str) -> Iterator[tuple[Any, ...]]:
        for event in trace.operations(kind):
            yield _gpu_row(event, process_of[event.pid], strings)

    found = {kind: rows(kind) for kind in ("kernel", "memcpy", "memset") if trace.of(kind)}
    operations = trace.operations()
    devices = sorted({(event.device, pid_of(process_of[event.pid])) for event in operations})
    return {
        **{f"CUPTI_ACTIVITY_KIND_{kind.upper()}": table for kind, table in found.items()},
        "CUPTI_ACTIVITY_KIND_RUNTIME": _call_rows(trace, threads, strings),
        "TARGET_INFO_GPU": device_rows(trace, (device for device, _ in devices)),
        "TARGET_INFO_CUDA_DEVICE": [(device, device, pid) for device, pid in devices],
    }


def _call_rows(trace: KinetoTrace, threads: Threads, strings: Strings) -> Rows:
    for event in trace.calls:
        thread = threads.thread(event.pid, event.tid)
        yield event.start, event.end, thread, event.correlation, strings(event.name), 0


def _gpu_row(event: GpuOperation, process: int, strings: Strings) -> tuple[Any, ...]:
    row = (event.start, event.end, event.device, event.context, event.stream, event.correlation, process)
    if event.kind == "kernel":
        return (*row, strings(event.name), strings(event.name), event.graph_node)
    if event.kind == "memcpy":
        return (*row, event.size, _copy_kind(event), event.graph_node)
    return (*row, event.size, event.graph_node)


def _copy_kind(event: GpuOperation) -> int:
    words = event.name.split()
    if event.direction is not None:
        return _MTIA_COPIES.get(event.direction, 0)
    return _COPY_KINDS.index(words[1]) if len(words) > 1 and words[1] in _COPY_KINDS else 0


def range_rows(trace: KinetoTrace, threads: Threads, strings: Strings) -> Rows:
    """NVTX_EVENTS: what ``record_function`` marked, as push/pop ranges of its thread, or of its stream on the GPU."""
    for event in trace.of("range"):
        yield event.start, event.end, _PUSH_POP, threads.thread(event.pid, event.tid), strings(event.name), 0
    if trace.of("gpu range"):
        process_of = processes_of_gpus(trace, threads)
        for event in trace.of("gpu range"):
            process = process_of.get(event.pid, threads.processes[0])
            thread = stream_thread(process, event.pid if isinstance(event.pid, int) else 0, event.tid)
            yield event.start, event.end, _PUSH_POP, thread, strings(event.name), 0


def operator_event_rows(trace: KinetoTrace, threads: Threads, strings: Strings) -> Rows:
    """TORCH_OPERATOR_EVENTS: every operator, autograd's bookkeeping among them, as it ran on its thread."""
    for event in trace.of("operator"):
        yield event.start, event.end, threads.thread(event.pid, event.tid), strings(event.name)


def memory_rows(trace: KinetoTrace, threads: Threads) -> Rows:
    """CUDA_GPU_MEMORY_USAGE_EVENTS: what PyTorch's allocator gave out and took back, and what it then held.

    The host's memory counts where there is no GPU, as that of device 0.
    """
    for event in trace.allocations:
        is_host = event.device is None
        if is_host and trace.has_gpu:
            continue
        yield (
            event.start, threads.process(event.pid), event.device or 0, 0, event.address, 0, abs(event.size),
            _HOST if is_host else _DEVICE, int(event.size < 0), event.reserved, event.allocated,
        )  # fmt: skip


def thread_rows(trace: KinetoTrace, threads: Threads, strings: Strings) -> Rows:
    """ThreadNames, of the threads on which anything happened."""
    named = {  # Kineto names a thread more than once
        threads.thread(event.pid, event.tid): event.thread_name
        for event in trace.thread_names
        if threads.knows(event.pid, event.tid)
    }
    for thread, name in named.items():
        known = _THREAD_NAME.match(name)
        yield strings(known[1] if known else name), 0, thread


def export_rows(trace: KinetoTrace) -> list[tuple[str, str]]:
    """META_DATA_EXPORT: who recorded it."""
    version = str(trace.properties.torch_version or "unknown")
    on_gpu = [(RANGES_ON, "GPU")] if trace.of("gpu range") else []
    return [
        ("EXPORT_PRODUCT_NAME", "torch.profiler"),
        ("EXPORT_PRODUCT_VERSION", version),
        ("EXPORT_SCHEMA_VERSION", "3.20.3"),
        *on_gpu,
    ]


def rank_rows(trace: KinetoTrace, threads: Threads) -> Rows:
    """PROCESS_RANKS: the rank and the world size of ``distributedInfo``; of several processes it does not say whose."""
    told = trace.properties.distributed
    processes = threads.processes
    if told and told.rank is not None and len(processes) == 1:
        yield processes[0], told.rank, told.world_size or 0


def warning_row(text: str, process: int) -> tuple[Any, ...]:
    """A row of DIAGNOSTIC_EVENT."""
    return 0, _WARNING, text, process
