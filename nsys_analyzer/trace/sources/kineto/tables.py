"""From the events of a PyTorch profiler trace to the tables of an nsys export."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from nsys_analyzer.trace.columns import pid_of, stream_thread
from nsys_analyzer.trace.metadata import CUDA, HIP, MTIA, RANGES_ON, XPU
from nsys_analyzer.trace.sources.kineto.events import Device, GpuOperation, KinetoTrace
from nsys_analyzer.trace.sources.kineto.ids import Strings, Threads, processes_of_gpus
from nsys_analyzer.trace.sources.kineto.operators import CPU, OperatorCall, operator_calls
from nsys_analyzer.trace.sources.kineto.read import read_kineto
from nsys_analyzer.trace.sources.made import origin_rows
from nsys_analyzer.trace.sources.source import WriteExport
from nsys_analyzer.trace.writer import Rows, write_tables

_PUSH_POP = 59
_WARNING = 2
_HOST, _DEVICE = 0, 2  # nsys's ENUM_CUDA_MEM_KIND: pageable memory, device memory
_MTIA_COPIES = {"HOST_TO_DEVICE": 1, "DEVICE_TO_HOST": 2}  # as ENUM_CUDA_MEMCPY_OPER
#: How Kineto names a copy ("Memcpy HtoD (Pageable -> Device)") to nsys's ENUM_CUDA_MEMCPY_OPER.
_COPY_KINDS = ("", "HtoD", "DtoH", "HtoA", "AtoH", "AtoA", "AtoD", "DtoA", "DtoD", "HtoH", "PtoP")
#: Kineto's "thread 28683 (pt_autograd_0)".
_THREAD_NAME = re.compile(r"^thread \d+ \((.+)\)$")

_MAKERS = {"AMD": HIP, "Intel": XPU}
#: What a device is called that the trace gives no name.
_UNNAMED = {CUDA: "unnamed NVIDIA GPU", HIP: "unnamed AMD GPU", XPU: "unnamed Intel GPU", MTIA: "MTIA"}

_ON_GPU = "start end deviceId contextId streamId correlationId globalPid"
_OF_KIND = {
    "kernel": "demangledName shortName graphNodeId",
    "memcpy": "bytes copyKind graphNodeId",
    "memset": "bytes graphNodeId",
}
_CALL = "start end globalTid correlationId nameId returnValue"
_GPU = "id name totalMemory smCount"
_CUDA_DEVICE = "gpuId cudaId pid"


def read_tables(path: Path, suffix: str) -> WriteExport:
    """Reads a trace, and returns what writes the tables of an nsys export.

    Kernels, copies and fills keep their launches, ranges are those of ``record_function``. In a trace without any
    of the first three, the operators are the kernels, of a device called "CPU".

    Args:
        path: the trace.
        suffix: that of its name, by which a trace is told from another of the same stem.

    Raises:
        TraceError: see :func:`read_kineto`.
    """
    trace = read_kineto(path)
    return lambda output: write_tables(output, _Tables(trace, suffix).all())


class _Tables:
    """The tables of a trace, with the IDs that its threads and strings have there."""

    def __init__(self, trace: KinetoTrace, suffix: str) -> None:
        self._trace = trace
        self._suffix = suffix
        self._strings = Strings()
        self._threads = Threads(trace)
        self._process_of_gpu = processes_of_gpus(trace, self._threads)

    def all(self) -> dict[str, Rows]:
        """All tables by their names. The strings come last: they are collected as the other rows are written."""
        tables, warnings = (self._of_gpus(), ()) if self._trace.operations else self._of_operators()
        return {
            **tables,
            "DIAGNOSTIC_EVENT": self._diagnostics(*self._trace.remarks, *warnings),
            "NVTX_EVENTS": Rows("start end eventType globalTid textId domainId", self._ranges()),
            "TORCH_OPERATOR_EVENTS": Rows("start end globalTid nameId", self._operators()),
            "CUDA_GPU_MEMORY_USAGE_EVENTS": Rows(
                "start globalPid deviceId contextId address pc bytes memKind memoryOperationType"
                " localMemoryPoolSize localMemoryPoolUtilizedSize",
                self._memory(),
            ),
            "ThreadNames": Rows("nameId priority globalTid", self._thread_names()),
            "TARGET_INFO_SYSTEM_ENV": Rows("name value", self._environment()),
            "PROCESS_RANKS": Rows("globalPid rank worldSize", self._ranks()),
            "META_DATA_EXPORT": Rows("name value", self._export()),
            "StringIds": Rows("id value", self._strings.rows()),
        }

    def _of_gpus(self) -> dict[str, Rows]:
        """The tables of what ran on GPUs: kernels, copies and fills, the calls behind them, and the GPUs."""
        found = {kind: self._trace.of(kind) for kind in _OF_KIND}
        pids = ((event.device, pid_of(self._process_of_gpu[event.pid])) for event in self._trace.operations)
        devices = sorted(set(pids))
        return {
            **{
                f"CUPTI_ACTIVITY_KIND_{kind.upper()}": Rows(f"{_ON_GPU} {_OF_KIND[kind]}", self._on_gpu(events))
                for kind, events in found.items()
            },
            "CUPTI_ACTIVITY_KIND_RUNTIME": Rows(_CALL, self._calls()),
            "TARGET_INFO_GPU": Rows(_GPU, _devices(self._trace, (device for device, _ in devices))),
            "TARGET_INFO_CUDA_DEVICE": Rows(_CUDA_DEVICE, [(device, device, pid) for device, pid in devices]),
        }

    def _on_gpu(self, events: Iterable[GpuOperation]) -> Iterator[tuple[Any, ...]]:
        for event in events:
            process = self._process_of_gpu[event.pid]
            row = (event.start, event.end, event.device, event.context, event.stream, event.correlation, process)
            if event.kind == "kernel":
                name = self._strings(event.name)
                yield *row, name, name, event.graph_node
            elif event.kind == "memcpy":
                yield *row, event.size, _copy_kind(event), event.graph_node
            else:
                yield *row, event.size, event.graph_node

    def _calls(self) -> Iterator[tuple[Any, ...]]:
        for event in self._trace.calls:
            thread = self._threads.thread(event.pid, event.tid)
            yield event.start, event.end, thread, event.correlation, self._strings(event.name), 0

    def _of_operators(self) -> tuple[dict[str, Rows], tuple[str, ...]]:
        """The tables of a trace without a GPU: each call of an operator as a kernel and its launch, on a device "CPU".

        A thread is a stream. And the warnings about them.
        """
        calls, warnings = operator_calls(self._trace)
        processes = self._threads.processes
        return {
            "CUPTI_ACTIVITY_KIND_KERNEL": Rows(f"{_ON_GPU} {_OF_KIND['kernel']}", self._run_operators(calls)),
            "CUPTI_ACTIVITY_KIND_RUNTIME": Rows(_CALL, self._launched_operators(calls)),
            "TARGET_INFO_GPU": Rows(_GPU, [(0, CPU, 0, 0)]),
            "TARGET_INFO_CUDA_DEVICE": Rows(_CUDA_DEVICE, [(0, 0, pid_of(process)) for process in processes]),
        }, warnings

    def _run_operators(self, calls: list[OperatorCall]) -> Iterator[tuple[Any, ...]]:
        for correlation, call in enumerate(calls, 1):
            name, process = self._strings(call.name), self._threads.process(call.event.pid)
            yield *call.run, 0, 0, call.stream, correlation, process, name, name, None

    def _launched_operators(self, calls: list[OperatorCall]) -> Iterator[tuple[Any, ...]]:
        for correlation, call in enumerate(calls, 1):
            thread = self._threads.thread(call.event.pid, call.event.tid)
            yield *call.launch, thread, correlation, self._strings(call.name), 0

    def _diagnostics(self, *warnings: str) -> Rows:
        process = self._threads.processes[0]
        return Rows("timestamp severity text globalPid", [(0, _WARNING, text, process) for text in warnings])

    def _ranges(self) -> Iterator[tuple[Any, ...]]:
        """The ranges of ``record_function``, as push/pop ranges of its thread, or of its stream on the GPU."""
        threads, strings = self._threads, self._strings
        for event in self._trace.of("range"):
            yield event.start, event.end, _PUSH_POP, threads.thread(event.pid, event.tid), strings(event.name), 0
        for event in self._trace.of("gpu range"):
            process = self._process_of_gpu.get(event.pid, threads.processes[0])
            thread = stream_thread(process, event.pid if isinstance(event.pid, int) else 0, event.tid)
            yield event.start, event.end, _PUSH_POP, thread, strings(event.name), 0

    def _operators(self) -> Iterator[tuple[Any, ...]]:
        """Every operator, autograd's bookkeeping among them, as it ran on its thread."""
        for event in self._trace.of("operator"):
            thread = self._threads.thread(event.pid, event.tid)
            yield event.start, event.end, thread, self._strings(event.name)

    def _memory(self) -> Iterator[tuple[Any, ...]]:
        """The memory that PyTorch's allocator gave out and took back, and how much it then held.

        The host's memory counts where there is no GPU, as that of device 0.
        """
        of_host = not self._trace.operations
        for event in self._trace.of("memory"):
            if event.device is not None or of_host:
                kind = _HOST if event.device is None else _DEVICE
                yield (
                    event.start, self._threads.process(event.pid), event.device or 0, 0, event.address, 0,
                    abs(event.size), kind, int(event.size < 0), event.reserved, event.allocated,
                )  # fmt: skip

    def _thread_names(self) -> Iterator[tuple[Any, ...]]:
        """The names of the threads on which anything happened; Kineto writes each more than once."""
        named = {(event.pid, event.tid): event.thread_name for event in self._trace.of("thread")}
        for (pid, tid), name in named.items():
            if self._threads.knows(pid, tid):
                known = _THREAD_NAME.match(name)
                yield self._strings(known[1] if known else name), 0, self._threads.thread(pid, tid)

    def _environment(self) -> Iterator[tuple[str, str]]:
        """The platform, versions, CPU and system, from Kineto's properties and those that our recorder adds."""
        platform, told = platform_of(self._trace), self._trace.properties
        if self._trace.operations and platform != CUDA:
            yield "DevicePlatform", platform
        for name, value in (
            ("CudaDriverVersion", told.cuda_driver_version),
            ("HipDriverVersion", told.hip_driver_version),
            ("HipRuntimeVersion", told.hip_runtime_version),
            ("NvDriverVersion", told.driver_version),
            ("CpuDescription", told.cpu),
            ("OsDescription", told.os),
        ):
            if value:
                yield name, str(value)

    def _ranks(self) -> Iterator[tuple[int, int, int]]:
        """The rank and the world size of ``distributedInfo``; of several processes it does not say whose."""
        told, processes = self._trace.properties.distributed, self._threads.processes
        if told and told.rank is not None and len(processes) == 1:
            yield processes[0], told.rank, told.world_size or 0

    def _export(self) -> list[tuple[str, str]]:
        """The profiler, and the origin of the file."""
        on_gpu = [(RANGES_ON, "GPU")] if self._trace.of("gpu range") else []
        return [
            ("EXPORT_PRODUCT_NAME", "torch.profiler"),
            ("EXPORT_PRODUCT_VERSION", str(self._trace.properties.torch_version or "unknown")),
            ("EXPORT_SCHEMA_VERSION", "3.20.3"),
            *on_gpu,
            *origin_rows(self._suffix, self._trace.fingerprint),
        ]


def _copy_kind(event: GpuOperation) -> int:
    words = event.name.split()
    if event.direction is not None:
        return _MTIA_COPIES.get(event.direction, 0)
    return _COPY_KINDS.index(words[1]) if len(words) > 1 and words[1] in _COPY_KINDS else 0


def platform_of(trace: KinetoTrace) -> str:
    """The platform that the trace's device is programmed by: "CUDA", "HIP", "XPU" or "MTIA".

    Known by the categories of the events, by the properties, by the names of the API calls or by that of the GPU.
    """
    if trace.on_mtia:
        return MTIA
    told = trace.properties
    versions = (told.hip_runtime_version, told.hip_driver_version, told.roctracer_version)
    calls = {event.name for event in trace.calls}
    if any(version is not None for version in versions) or any(name.startswith("hip") for name in calls):
        return HIP
    makers = ((gpu.name or "").partition(" ")[0].partition("(")[0] for gpu in told.devices)
    return next((_MAKERS[maker] for maker in makers if maker in _MAKERS), CUDA)


def _devices(trace: KinetoTrace, used: Iterable[int]) -> Iterator[tuple[int, str, int, int]]:
    """The devices that the trace lists; where it lists none, those used, if they are no NVIDIA's."""
    platform, listed = platform_of(trace), trace.properties.devices
    if not listed and platform != CUDA:
        yield from ((device, _UNNAMED[platform], 0, 0) for device in sorted(set(used)))
    for gpu in listed:
        yield gpu.id, _device_name(gpu, platform), gpu.memory, gpu.old_sms if gpu.sms is None else gpu.sms


def _device_name(gpu: Device, platform: str) -> str:
    """The name as it is written, with the maker's where that says nothing: "MTIA ARTEMIS", "unnamed AMD GPU"."""
    name = (gpu.name or "").strip()
    if not name:
        return _UNNAMED[platform]
    return f"{MTIA} {name}" if platform == MTIA and MTIA not in name else name
