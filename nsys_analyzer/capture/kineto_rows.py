"""From the events of a PyTorch profiler trace to the rows of an nsys export."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from nsys_analyzer.capture.kineto_devices import device_rows
from nsys_analyzer.capture.kineto_events import Event, KinetoTrace
from nsys_analyzer.capture.kineto_ids import Strings, Threads, correlation_of, pid_of, processes_of_gpus
from nsys_analyzer.capture.kineto_tables import Rows
from nsys_analyzer.trace.columns import stream_thread
from nsys_analyzer.trace.metadata import RANGES_ON

_PUSH_POP = 59
_WARNING = 2
_HOST, _DEVICE = 0, 2  # nsys's ENUM_CUDA_MEM_KIND: pageable memory, device memory
_CPU_DEVICE = 0  # c10::DeviceType
_MTIA_COPIES = {"HOST_TO_DEVICE": 1, "DEVICE_TO_HOST": 2}  # as ENUM_CUDA_MEMCPY_OPER
#: How Kineto names a copy ("Memcpy HtoD (Pageable -> Device)") to nsys's ENUM_CUDA_MEMCPY_OPER.
_COPY_KINDS = ("", "HtoD", "DtoH", "HtoA", "AtoH", "AtoA", "AtoD", "DtoA", "DtoD", "HtoH", "PtoP")
#: Kineto's "thread 28683 (pt_autograd_0)".
_THREAD_NAME = re.compile(r"^thread \d+ \((.+)\)$")


def gpu_rows(trace: KinetoTrace, threads: Threads, strings: Strings) -> dict[str, Rows]:
    """The tables of what ran on GPUs: kernels, copies and fills, the calls behind them, and the GPUs."""
    process_of = processes_of_gpus(trace, threads)

    def rows(kind: str) -> Iterator[tuple[Any, ...]]:
        for event in trace.of(kind):
            yield _gpu_row(event, process_of[event.pid], strings)

    found = {kind: rows(kind) for kind in ("kernel", "memcpy", "memset") if trace.of(kind)}
    operations = trace.of("kernel", "memcpy", "memset")
    devices = sorted({(_device(event), pid_of(process_of[event.pid])) for event in operations})
    return {
        **{f"CUPTI_ACTIVITY_KIND_{kind.upper()}": table for kind, table in found.items()},
        "CUPTI_ACTIVITY_KIND_RUNTIME": _call_rows(trace, threads, strings),
        "TARGET_INFO_GPU": device_rows(trace, (device for device, _ in devices)),
        "TARGET_INFO_CUDA_DEVICE": [(device, device, pid) for device, pid in devices],
    }


def _call_rows(trace: KinetoTrace, threads: Threads, strings: Strings) -> Rows:
    for event in trace.of("runtime"):
        thread = threads.thread(event.pid, event.tid)
        yield event.start, event.end, thread, correlation_of(event), strings(event.name), 0


def _gpu_row(event: Event, process: int, strings: Strings) -> tuple[Any, ...]:
    arguments = event.arguments
    context = arguments.get("context", arguments.get("inContext", 0))
    stream = arguments.get("stream", event.tid)
    row = (event.start, event.end, _device(event), context, stream, correlation_of(event), process)
    node = arguments.get("graph node id") or None
    if event.kind == "kernel":
        return (*row, strings(event.name), strings(event.name), node)
    if event.kind == "memcpy":
        return (*row, arguments.get("bytes", arguments.get("size", 0)), _copy_kind(event), node)
    return (*row, arguments.get("bytes", 0), node)


def _device(event: Event) -> int:
    """The GPU's ordinal; a copy between GPUs happened "inDevice"."""
    arguments = event.arguments
    return int(arguments.get("device", arguments.get("inDevice", event.pid if isinstance(event.pid, int) else 0)))


def _copy_kind(event: Event) -> int:
    words = event.name.split()
    if "direction" in event.arguments:
        return _MTIA_COPIES.get(event.arguments["direction"], 0)
    return _COPY_KINDS.index(words[1]) if len(words) > 1 and words[1] in _COPY_KINDS else 0


def range_rows(trace: KinetoTrace, threads: Threads, strings: Strings) -> Rows:
    """NVTX_EVENTS: what ``record_function`` marked, as push/pop ranges of its thread, or of its stream on the GPU."""
    for event in trace.of("range"):
        yield event.start, event.end, _PUSH_POP, threads.thread(event.pid, event.tid), strings(event.name), 0
    if trace.of("gpu range"):
        process_of = processes_of_gpus(trace, threads)
        for event in trace.of("gpu range"):
            thread = stream_thread(process_of.get(event.pid, threads.processes[0]), _device(event), event.tid)
            yield event.start, event.end, _PUSH_POP, thread, strings(event.name), 0


def operator_event_rows(trace: KinetoTrace, threads: Threads, strings: Strings) -> Rows:
    """TORCH_OPERATOR_EVENTS: every operator, autograd's bookkeeping among them, as it ran on its thread."""
    for event in trace.of("operator"):
        yield event.start, event.end, threads.thread(event.pid, event.tid), strings(event.name)


def memory_rows(trace: KinetoTrace, threads: Threads) -> Rows:
    """CUDA_GPU_MEMORY_USAGE_EVENTS: what PyTorch's allocator gave out and took back, and what it then held.

    The host's memory counts where there is no GPU, as that of device 0.
    """
    for event in trace.of("memory"):
        values = event.arguments
        is_host = values.get("Device Type", _CPU_DEVICE) == _CPU_DEVICE
        if is_host and trace.has_gpu:
            continue
        size = int(values.get("Bytes", 0))
        yield (
            event.start, threads.process(event.pid), 0 if is_host else values.get("Device Id", 0), 0,
            values.get("Addr", 0), 0, abs(size), _HOST if is_host else _DEVICE, int(size < 0),
            values.get("Total Reserved"), values.get("Total Allocated"),
        )  # fmt: skip


def thread_rows(trace: KinetoTrace, threads: Threads, strings: Strings) -> Rows:
    """ThreadNames, of the threads on which anything happened."""
    named = {  # Kineto names a thread more than once
        threads.thread(event.pid, event.tid): str(event.arguments.get("name", ""))
        for event in trace.of("thread")
        if threads.knows(event.pid, event.tid)
    }
    for thread, name in named.items():
        known = _THREAD_NAME.match(name)
        yield strings(known[1] if known else name), 0, thread


def export_rows(trace: KinetoTrace) -> list[tuple[str, str]]:
    """META_DATA_EXPORT: who recorded it."""
    version = str(trace.properties.get("torch_version") or "unknown")
    on_gpu = [(RANGES_ON, "GPU")] if trace.of("gpu range") else []
    return [
        ("EXPORT_PRODUCT_NAME", "torch.profiler"),
        ("EXPORT_PRODUCT_VERSION", version),
        ("EXPORT_SCHEMA_VERSION", "3.20.3"),
        *on_gpu,
    ]


def rank_rows(trace: KinetoTrace, threads: Threads) -> Rows:
    """PROCESS_RANKS: the rank and the world size of ``distributedInfo``; of several processes it does not say whose."""
    told = trace.properties.get("distributedInfo")
    processes = threads.processes
    if isinstance(told, dict) and isinstance(told.get("rank"), int) and len(processes) == 1:
        size = told.get("world_size")
        yield processes[0], told["rank"], size if isinstance(size, int) else 0


def warning_row(text: str, process: int) -> tuple[Any, ...]:
    """A row of DIAGNOSTIC_EVENT."""
    return 0, _WARNING, text, process
