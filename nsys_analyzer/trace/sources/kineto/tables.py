"""From the events of a PyTorch profiler trace to the tables of an nsys export, as far as they are read."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Iterator
from itertools import count
from pathlib import Path
from typing import Any

from nsys_analyzer.trace.columns import pid_of, stream_thread
from nsys_analyzer.trace.metadata import CPU, CUDA, HIP, MTIA, RANGES_ON, XPU
from nsys_analyzer.trace.sources.kineto.events import Device, Event, GpuOperation, KinetoTrace
from nsys_analyzer.trace.sources.kineto.ids import Threads, processes_of_gpus
from nsys_analyzer.trace.sources.kineto.read import read_kineto
from nsys_analyzer.trace.sources.made import origin_rows
from nsys_analyzer.trace.sources.source import WriteExport
from nsys_analyzer.trace.writer import Rows, write_tables

_PUSH_POP = 59
_WARNING = 2
_HOST, _DEVICE = 0, 2  # nsys's ENUM_CUDA_MEM_KIND: pageable memory, device memory
_COPY_KINDS = ("HtoD", "DtoH", "HtoA", "AtoH", "AtoA", "AtoD", "DtoA", "DtoD", "HtoH", "PtoP")
#: ENUM_CUDA_MEM_KIND by the words of the same names.
_MEMORY_KINDS, _UNKNOWN_MEMORY = {"Pageable": 0, "Pinned": 1, "Device": 2, "Array": 3, "Managed": 4}, 7
#: Kineto's "thread 28683 (pt_autograd_0)".
_THREAD_NAME = re.compile(r"^thread \d+ \((.+)\)$")

_MAKERS = {"AMD": HIP, "Intel": XPU}
#: What a device is called that the trace gives no name.
_UNNAMED = {CUDA: "unnamed NVIDIA GPU", HIP: "unnamed AMD GPU", XPU: "unnamed Intel GPU", MTIA: "MTIA"}

_ON_GPU = "start end deviceId streamId correlationId globalPid graphNodeId"


def read_tables(path: Path, suffix: str) -> WriteExport:
    """Reads a trace, and returns what writes the tables of an nsys export; raises what :func:`read_kineto` does.

    The suffix of its name tells a trace from another of the same stem.
    """
    trace = read_kineto(path)
    return lambda output: write_tables(output, _Tables(trace, suffix).all())


class _Tables:
    """The tables of a trace, with the IDs that its threads and strings have there."""

    def __init__(self, trace: KinetoTrace, suffix: str) -> None:
        self._trace = trace
        self._suffix = suffix
        self._strings: dict[str, int] = defaultdict(count(1).__next__)  # the ID of each text
        self._threads = Threads(trace)
        self._process_of_gpu = processes_of_gpus(trace, self._threads)

    def all(self) -> dict[str, Rows]:
        """All tables by their names. The strings come last: they are collected as the other rows are written."""
        of, process = self._trace.of, self._threads.processes[0]
        messages = [(_WARNING, text, process) for text in self._trace.remarks]
        pids = ((event.device, pid_of(self._process_of_gpu[event.pid])) for event in self._trace.operations)
        devices = sorted(set(pids))
        copies = ((*self._on_gpu(event), event.size, *_copy_kinds(event.name)) for event in of("memcpy"))
        fills = ((*self._on_gpu(event), event.size) for event in of("memset"))
        kernels = ((*self._on_gpu(event), self._strings[event.name]) for event in of("kernel"))
        return {
            "CUPTI_ACTIVITY_KIND_KERNEL": Rows(f"{_ON_GPU} demangledName", kernels),
            "CUPTI_ACTIVITY_KIND_MEMCPY": Rows(f"{_ON_GPU} bytes copyKind srcKind dstKind", copies),
            "CUPTI_ACTIVITY_KIND_MEMSET": Rows(f"{_ON_GPU} bytes", fills),
            "CUPTI_ACTIVITY_KIND_RUNTIME": Rows("start end globalTid correlationId nameId returnValue", self._calls()),
            "TARGET_INFO_GPU": Rows(
                "id name totalMemory smCount", _devices(self._trace, (device for device, _ in devices))
            ),
            "TARGET_INFO_CUDA_DEVICE": Rows("gpuId cudaId pid", [(device, device, pid) for device, pid in devices]),
            "DIAGNOSTIC_EVENT": Rows("severity text globalPid", messages),
            "NVTX_EVENTS": Rows("start end eventType globalTid textId", self._ranges()),
            "TORCH_OPERATOR_EVENTS": Rows(
                "start end globalTid nameId sequenceNumber forwardThreadId shapesId", self._operators()
            ),
            "CUDA_GPU_MEMORY_USAGE_EVENTS": Rows(
                "start globalPid bytes memKind memoryOperationType localMemoryPoolUtilizedSize", self._memory()
            ),
            "ThreadNames": Rows("nameId globalTid", self._thread_names()),
            "TARGET_INFO_SYSTEM_ENV": Rows("name value", self._environment()),
            "PROCESS_RANKS": Rows("globalPid rank worldSize", self._ranks()),
            "META_DATA_EXPORT": Rows("name value", self._export()),
            "StringIds": Rows("id value", self._string_rows()),
        }

    def _string_rows(self) -> Iterator[tuple[int, str]]:
        for text, number in self._strings.items():
            yield number, text

    def _on_gpu(self, event: GpuOperation) -> tuple[Any, ...]:
        process = self._process_of_gpu[event.pid]
        return event.start, event.end, event.device, event.stream, event.correlation, process, event.graph_node

    def _calls(self) -> Iterator[tuple[Any, ...]]:
        for event in self._trace.calls:
            yield event.start, event.end, self._thread(event), event.correlation, self._strings[event.name], 0

    def _thread(self, event: Event) -> int:
        return self._threads.thread(event.pid, event.tid)

    def _ranges(self) -> Iterator[tuple[Any, ...]]:
        """The ranges of ``record_function``, as push/pop ranges of its thread, or of its stream on the GPU."""
        for event in self._trace.of("range"):
            yield event.start, event.end, _PUSH_POP, self._thread(event), self._strings[event.name]
        for event in self._trace.of("gpu range"):
            process = self._process_of_gpu.get(event.pid, self._threads.processes[0])
            thread = stream_thread(process, event.pid if isinstance(event.pid, int) else 0, event.tid)
            yield event.start, event.end, _PUSH_POP, thread, self._strings[event.name]

    def _operators(self) -> Iterator[tuple[Any, ...]]:
        """Every operator, autograd's bookkeeping among them, as it ran on its thread."""
        thread, strings = self._thread, self._strings
        for event in self._trace.of("operator"):
            shapes = strings[event.shapes] if event.shapes else None
            numbers = event.sequence, event.forward_thread
            yield event.start, event.end, thread(event), strings[event.name], *numbers, shapes

    def _memory(self) -> Iterator[tuple[Any, ...]]:
        """The memory that PyTorch's allocator allocated and freed: the GPU's, or the host's where there is no GPU."""
        for event in self._trace.of("memory"):
            if event.device is not None or self._trace.on_cpu:
                kind = _HOST if event.device is None else _DEVICE
                process = self._threads.process(event.pid)
                yield event.start, process, abs(event.size), kind, int(event.size < 0), event.allocated

    def _thread_names(self) -> Iterator[tuple[Any, ...]]:
        """The names of the threads on which anything happened; Kineto writes each more than once."""
        named = {(event.pid, event.tid): event.name for event in self._trace.of("thread")}
        for (pid, tid), name in named.items():
            if self._threads.knows(pid, tid):
                yield self._strings[_THREAD_NAME.sub(r"\1", name)], self._threads.thread(pid, tid)

    def _environment(self) -> Iterator[tuple[str, str]]:
        """The platform, versions, CPU and system, from Kineto's properties and those that our recorder adds."""
        platform, properties = platform_of(self._trace), self._trace.properties
        if not self._trace.on_cpu and platform != CUDA:
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

    def _ranks(self) -> Iterator[tuple[int, int, int]]:
        """The rank and the world size of ``distributedInfo``; of several processes it does not say whose."""
        group, processes = self._trace.properties.distributed, self._threads.processes
        if group and group.rank is not None and len(processes) == 1:
            yield processes[0], group.rank, group.world_size or 0

    def _export(self) -> list[tuple[str, str]]:
        """The profiler, and the origin of the file."""
        on_gpu = [(RANGES_ON, "GPU")] if self._trace.of("gpu range") else []
        return [
            ("EXPORT_PRODUCT_NAME", "torch.profiler"),
            ("EXPORT_PRODUCT_VERSION", str(self._trace.properties.torch_version or "unknown")),
            ("EXPORT_SCHEMA_VERSION", "3.20.3"),
            *on_gpu,
            *origin_rows(self._suffix, self._trace.status),
        ]


def _copy_kinds(name: str) -> tuple[int, int, int]:
    """The ENUM_CUDA_MEMCPY_OPER of a copy and the ENUM_CUDA_MEM_KIND of its ends, by its name.

    "Memcpy HtoD (Pageable -> Device)"; 0 for an unknown kind of copy, 7 for an unknown kind of memory.
    """
    direction = next((kind for kind, word in enumerate(_COPY_KINDS, 1) if f"Memcpy {word}" in name), 0)
    ends = re.search(r"\((\w+) -> (\w+)\)", name)
    source, target = (_MEMORY_KINDS.get(end, _UNKNOWN_MEMORY) for end in (ends.groups() if ends else ("", "")))
    return direction, source, target


def platform_of(trace: KinetoTrace) -> str:
    """The platform of the trace's device: "CUDA", "HIP", "XPU" or "MTIA"."""
    if trace.on_mtia:
        return MTIA
    properties = trace.properties
    versions = (properties.hip_runtime_version, properties.hip_driver_version, properties.roctracer_version)
    if any(version is not None for version in versions) or any(call.name.startswith("hip") for call in trace.calls):
        return HIP
    makers = (re.split(r"[ (]", gpu.name or "")[0] for gpu in properties.device_properties)
    return next((_MAKERS[maker] for maker in makers if maker in _MAKERS), CUDA)


def _devices(trace: KinetoTrace, used: Iterable[int]) -> Iterator[tuple[int, str, int, int]]:
    """The devices that the trace lists; where it lists none, those used, if they are no NVIDIA's; or the CPU."""
    if trace.on_cpu:
        yield 0, CPU, 0, 0
        return
    platform, listed = platform_of(trace), trace.properties.device_properties
    if not listed and platform != CUDA:
        yield from ((device, _UNNAMED[platform], 0, 0) for device in sorted(set(used)))
    for gpu in listed:
        yield gpu.id, _device_name(gpu, platform), gpu.memory or 0, gpu.sms or 0


def _device_name(gpu: Device, platform: str) -> str:
    """The name as it is written, with the maker's where that says nothing: "MTIA ARTEMIS", "unnamed AMD GPU"."""
    name = (gpu.name or "").strip()
    if not name:
        return _UNNAMED[platform]
    return f"{MTIA} {name}" if platform == MTIA and MTIA not in name else name
