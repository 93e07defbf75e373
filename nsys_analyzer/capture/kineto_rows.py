"""From the events of a PyTorch profiler trace to the rows of an nsys export."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from nsys_analyzer.capture.kineto_events import Event, KinetoTrace
from nsys_analyzer.capture.kineto_ids import Strings, Threads, correlation_of, pid_of, processes_of_gpus
from nsys_analyzer.capture.kineto_tables import Rows

_PUSH_POP = 59
_WARNING = 2
_HOST, _DEVICE = 0, 2  # nsys's ENUM_CUDA_MEM_KIND: pageable memory, device memory
_CPU_DEVICE = 0  # c10::DeviceType
_OLD_GPUS, _OLD_SMS = "computeProperties", "multiProcessorCount"  # of PyTorch before 1.11
#: How Kineto names a copy ("Memcpy HtoD (Pageable -> Device)") to nsys's ENUM_CUDA_MEMCPY_OPER.
_COPY_KINDS = ("", "HtoD", "DtoH", "HtoA", "AtoH", "AtoA", "AtoD", "DtoA", "DtoD", "HtoH", "PtoP")
#: Kineto's "thread 28683 (pt_autograd_0)".
_THREAD_NAME = re.compile(r"^thread \d+ \((.+)\)$")

#: The properties of a trace that say on what it ran; Kineto's own, or those our recorder adds.
_ENVIRONMENT = {
    "CudaDriverVersion": "cuda_driver_version",
    "NvDriverVersion": "driver_version",
    "CpuDescription": "cpu",
    "OsDescription": "os",
}


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
        "TARGET_INFO_GPU": _gpus(trace),
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
        return (*row, arguments.get("bytes", 0), _copy_kind(event.name), node)
    return (*row, arguments.get("bytes", 0), node)


def _device(event: Event) -> int:
    """The GPU's ordinal; a copy between GPUs happened "inDevice"."""
    arguments = event.arguments
    return int(arguments.get("device", arguments.get("inDevice", event.pid if isinstance(event.pid, int) else 0)))


def _copy_kind(name: str) -> int:
    words = name.split()
    return _COPY_KINDS.index(words[1]) if len(words) > 1 and words[1] in _COPY_KINDS else 0


def _gpus(trace: KinetoTrace) -> Rows:
    return [
        (gpu["id"], gpu.get("name", ""), gpu.get("totalGlobalMem", 0), gpu.get("numSms", gpu.get(_OLD_SMS, 0)))
        for gpu in gpu_properties(trace)
    ]


def gpu_properties(trace: KinetoTrace) -> list[dict[str, Any]]:
    """The machine's GPUs as Kineto lists them."""
    return list(trace.properties.get("deviceProperties") or trace.properties.get(_OLD_GPUS) or ())


def range_rows(trace: KinetoTrace, threads: Threads, strings: Strings) -> Rows:
    """NVTX_EVENTS: what ``record_function`` marked, as push/pop ranges of its thread."""
    for event in trace.of("range"):
        yield event.start, event.end, _PUSH_POP, threads.thread(event.pid, event.tid), strings(event.name), 0


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
    return [
        ("EXPORT_PRODUCT_NAME", "torch.profiler"),
        ("EXPORT_PRODUCT_VERSION", version),
        ("EXPORT_SCHEMA_VERSION", "3.20.3"),
    ]


def environment_rows(trace: KinetoTrace) -> Rows:
    """TARGET_INFO_SYSTEM_ENV, as far as the trace knows."""
    found = ((name, trace.properties.get(key)) for name, key in _ENVIRONMENT.items())
    return [(name, str(value)) for name, value in found if value]


def warning_row(text: str, process: int) -> tuple[Any, ...]:
    """A row of DIAGNOSTIC_EVENT."""
    return 0, _WARNING, text, process
