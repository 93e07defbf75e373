"""From the events of a PyTorch profiler trace to the tables of an nsys export, as far as they are read."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Iterator
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np

from nsys_analyzer.trace.arrays import Ints
from nsys_analyzer.trace.columns import pid_of, stream_thread
from nsys_analyzer.trace.metadata import CPU, CUDA, HIP, MTIA, RANGES_ON, XPU
from nsys_analyzer.trace.sources.kineto.events import NULL, Device, KinetoTrace, Place
from nsys_analyzer.trace.sources.kineto.events import Rows as Events
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

_AT_ONCE = 1 << 14
"""Rows that are written at once."""

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
        return {
            "CUPTI_ACTIVITY_KIND_KERNEL": Rows(f"{_ON_GPU} demangledName", self._kernels()),
            "CUPTI_ACTIVITY_KIND_MEMCPY": Rows(f"{_ON_GPU} bytes copyKind srcKind dstKind", self._copies()),
            "CUPTI_ACTIVITY_KIND_MEMSET": Rows(f"{_ON_GPU} bytes", self._fills()),
            "CUPTI_ACTIVITY_KIND_RUNTIME": Rows("start end globalTid correlationId nameId returnValue", self._calls()),
            "NCCL_CALLS": Rows("start globalTid function bytes ranks", self._nccl_calls()),
            "TARGET_INFO_GPU": Rows("id name totalMemory smCount", _devices(self._trace)),
            "TARGET_INFO_CUDA_DEVICE": Rows("gpuId cudaId pid", self._processes_of_devices()),
            "DIAGNOSTIC_EVENT": Rows("severity text globalPid", self._messages()),
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

    def _string_ids(self, numbers: Ints) -> Ints:
        """The IDs of the texts of these numbers, given in the order of the rows; NULL stays."""
        texts, rows = self._trace.texts, np.flatnonzero(numbers != NULL)
        first = np.full(len(texts), len(numbers))
        first[numbers[rows[::-1]]] = rows[::-1]  # of equal numbers the last assignment stays: that of the first row
        ids = np.zeros(len(texts), np.int64)
        for number in np.argsort(first)[: np.count_nonzero(first < len(numbers))]:
            ids[number] = self._strings[texts[number]]
        found = np.full(len(numbers), NULL)
        found[rows] = ids[numbers[rows]]
        return found

    def _by_place(self, events: Events, value: Callable[[Place], int]) -> Ints:
        """The value that belongs to the place of each event."""
        values = np.zeros(len(self._trace.places), np.int64)
        for place in np.unique(events["place"]):
            values[place] = value(self._trace.places[place])
        found: Ints = values[events["place"]]
        return found

    def _on_gpu(self, events: Events) -> tuple[Ints, ...]:
        process = self._by_place(events, lambda place: self._process_of_gpu[place[0]])
        node = np.where(events["graph_node"] == 0, NULL, events["graph_node"])
        return (*(events[name] for name in ("start", "end", "device", "stream", "correlation")), process, node)

    def _kernels(self) -> Iterator[tuple[Any, ...]]:
        events = self._trace.of("kernel")
        yield from _rows(*self._on_gpu(events), self._string_ids(events["name"]))

    def _copies(self) -> Iterator[tuple[Any, ...]]:
        events = self._trace.of("memcpy")
        found, inverse = np.unique(events["name"], return_inverse=True)
        kinds = np.array([_copy_kinds(self._trace.texts[name]) for name in found], np.int64).reshape(-1, 3)[inverse]
        yield from _rows(*self._on_gpu(events), events["size"], *kinds.T)

    def _fills(self) -> Iterator[tuple[Any, ...]]:
        events = self._trace.of("memset")
        yield from _rows(*self._on_gpu(events), events["size"])

    def _processes_of_devices(self) -> list[tuple[int, int, int]]:
        """Each device with the processes that use it."""
        events = self._trace.operations
        processes = self._by_place(events, lambda place: pid_of(self._process_of_gpu[place[0]]))
        used = set(zip(events["device"].tolist(), processes.tolist(), strict=True))
        return [(device, device, pid) for device, pid in sorted(used)]

    def _messages(self) -> list[tuple[int, str, int]]:
        return [(_WARNING, text, self._threads.processes[0]) for text in self._trace.remarks]

    def _calls(self) -> Iterator[tuple[Any, ...]]:
        events = self._trace.calls
        names = self._string_ids(events["name"])
        yield from _rows(
            events["start"], events["end"], self._thread(events), events["correlation"], names, np.zeros_like(names)
        )

    def _nccl_calls(self) -> Iterator[tuple[Any, ...]]:
        """The collectives that kernels say they carry out, where they are launched one by one.

        The groups of PyTorch have names within a run, and no IDs that tell runs apart.
        """
        calls = self._trace.calls
        calls = calls[np.argsort(calls["correlation"], kind="stable")]
        _, first, times = np.unique(calls["correlation"], return_index=True, return_counts=True)
        calls = calls[first[times == 1]]
        events = self._trace.of("collective")
        events = events[events["correlation"] != 0]
        _, first, times = np.unique(events["correlation"], return_index=True, return_counts=True)
        events = events[first[times == 1]]
        _, launch, carried = np.intersect1d(
            calls["correlation"], events["correlation"], assume_unique=True, return_indices=True
        )
        calls, events = calls[launch], events[carried]
        functions = [self._trace.texts[name] for name in events["name"].tolist()]
        columns = calls["start"], self._thread(calls), events["size"], events["ranks"]
        for function, (start, thread, *numbers) in zip(functions, _rows(*columns), strict=True):
            yield start, thread, function, *numbers

    def _thread(self, events: Events) -> Ints:
        return self._by_place(events, lambda place: self._threads.thread(*place))

    def _ranges(self) -> Iterator[tuple[Any, ...]]:
        """The ranges of ``record_function``, as push/pop ranges of its thread, or of its stream on the GPU."""
        on_cpu, on_gpu = self._trace.of("range"), self._trace.of("gpu range")
        for events, threads in ((on_cpu, self._thread(on_cpu)), (on_gpu, self._by_place(on_gpu, self._stream_thread))):
            kind = np.full(len(events), _PUSH_POP)
            yield from _rows(events["start"], events["end"], kind, threads, self._string_ids(events["name"]))

    def _stream_thread(self, place: Place) -> int:
        device, stream = place
        process = self._process_of_gpu.get(device, self._threads.processes[0])
        thread: int = stream_thread(process, device if isinstance(device, int) else 0, stream)
        return thread

    def _operators(self) -> Iterator[tuple[Any, ...]]:
        """Every operator, autograd's bookkeeping among them, as it ran on its thread."""
        events = self._trace.of("operator")
        shapes, names = self._string_ids(np.stack([events["shapes"], events["name"]], 1).ravel()).reshape(-1, 2).T
        numbers = events["sequence"], events["forward_thread"]
        yield from _rows(events["start"], events["end"], self._thread(events), names, *numbers, shapes)

    def _memory(self) -> Iterator[tuple[Any, ...]]:
        """The memory that PyTorch's allocator allocated and freed: the GPU's, or the host's where there is no GPU."""
        events = self._trace.of("memory")
        if not self._trace.on_cpu:
            events = events[events["device"] != NULL]
        process = self._by_place(events, lambda place: self._threads.process(place[0]))
        kind = np.where(events["device"] == NULL, _HOST, _DEVICE)
        size = events["size"]
        yield from _rows(events["start"], process, np.abs(size), kind, (size < 0).astype(int), events["allocated"])

    def _thread_names(self) -> Iterator[tuple[Any, ...]]:
        """The names of the threads on which anything happened; Kineto writes each more than once."""
        named = dict(self._trace.of("thread")[["place", "name"]].tolist())
        for place, name in named.items():
            pid, tid = self._trace.places[place]
            if self._threads.knows(pid, tid):
                yield self._strings[_THREAD_NAME.sub(r"\1", self._trace.texts[name])], self._threads.thread(pid, tid)

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
        on_gpu = [(RANGES_ON, "GPU")] if len(self._trace.of("gpu range")) else []
        return [
            ("EXPORT_PRODUCT_NAME", "torch.profiler"),
            ("EXPORT_PRODUCT_VERSION", str(self._trace.properties.torch_version or "unknown")),
            ("EXPORT_SCHEMA_VERSION", "3.20.3"),
            *on_gpu,
            *origin_rows(self._suffix, self._trace.status),
        ]


def _rows(*columns: Ints) -> Iterator[tuple[Any, ...]]:
    """The rows of columns, None in place of NULL: a few thousand at a time, for Python's integers take memory."""
    for start in range(0, len(columns[0]), _AT_ONCE):
        yield from zip(*(_values(column[start : start + _AT_ONCE]) for column in columns), strict=True)


def _values(column: Ints) -> list[int | None]:
    values: list[int | None] = column.tolist()
    return [None if value == NULL else value for value in values] if NULL in column else values


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
    calls = (trace.texts[name] for name in np.unique(trace.calls["name"]))
    if any(version is not None for version in versions) or any(name.startswith("hip") for name in calls):
        return HIP
    makers = (re.split(r"[ (]", gpu.name or "")[0] for gpu in properties.device_properties)
    return next((_MAKERS[maker] for maker in makers if maker in _MAKERS), CUDA)


def _devices(trace: KinetoTrace) -> Iterator[tuple[int, str, int, int]]:
    """The devices that the trace lists; where it lists none, those used, if they are no NVIDIA's; or the CPU."""
    if trace.on_cpu:
        yield 0, CPU, 0, 0
        return
    platform, listed = platform_of(trace), trace.properties.device_properties
    if not listed and platform != CUDA:
        yield from ((device, _UNNAMED[platform], 0, 0) for device in np.unique(trace.operations["device"]).tolist())
    for gpu in listed:
        yield gpu.id, _device_name(gpu, platform), gpu.memory or 0, gpu.sms or 0


def _device_name(gpu: Device, platform: str) -> str:
    """The name as it is written, with the maker's where that says nothing: "MTIA ARTEMIS", "unnamed AMD GPU"."""
    name = (gpu.name or "").strip()
    if not name:
        return _UNNAMED[platform]
    return f"{MTIA} {name}" if platform == MTIA and MTIA not in name else name
