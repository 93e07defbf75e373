"""The conditions of a capture as its export tells them: versions, GPUs, threads and the profiler's own messages."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace

from nsys_analyzer.trace.arrays import Frame, rows_of
from nsys_analyzer.trace.diagnostics import Diagnostic
from nsys_analyzer.trace.schema import NO_TIME, TIME_SHIFT

CPU = "CPU"
"""The name of the device that stands for the CPU, on a machine without a GPU."""

_TORCH = "torch.profiler"
_ARGUMENT = re.compile(r":ARGUMENT_([0-9]{1,6})$")
#: A version as an integer; without a driver nsys writes 0.
_NUMBER = re.compile(r"(?!0$)[0-9]{1,18}")

CUDA, HIP = "CUDA", "HIP"
"""How devices are programmed: NVIDIA's and AMD's."""

_UNITS = {CUDA: "SMs", HIP: "CUs"}

RANGES_ON = "EXPORT_RANGES_ON"
"""The property of a converted trace whose ranges lie on the GPU's timeline."""


@dataclass(frozen=True)
class Gpu:
    """One GPU of the capture's machine; unknown figures are 0."""

    gpu_id: int
    name: str
    memory_bytes: int
    sm_count: int
    memory_bytes_per_s: int = 0
    l2_bytes: int = 0

    @property
    def is_cpu(self) -> bool:
        """Whether it stands for the CPU."""
        return self.name == CPU


@dataclass(frozen=True)
class Recording:
    """The recording that nsys was asked for: kinds of events in nsys's words ("Cuda"), and the program's command line.

    ``graph_trace`` is "graph" (CUDA graphs as a whole) or "node".
    """

    events: tuple[str, ...] = ()
    graph_trace: str = ""
    program: tuple[str, ...] = ()


@dataclass(frozen=True)
class Metadata:
    """The capture's conditions; texts are "unknown" where the export is silent.

    Attributes:
        profiler: "nsys" or "torch".
        platform: how the devices are programmed: "CUDA" or "HIP".
        runtime: the version of CUDA or HIP.
        gpus: by GPU ID.
        gpu_of: (pid, CUDA device ordinal) to GPU ID.
        thread_names: by global thread ID.
        ranges_on_gpu: whether the ranges lie on the GPU's timeline, each on a thread that stands for a stream.
        time_shift_ns: added by the export to each of its times.
        started_utc_ns: when the session started, since 1970 (UTC); 0 where the export is silent.
    """

    profiler: str
    platform: str
    profiler_version: str
    schema_version: str
    driver: str
    runtime: str
    cpu: str
    os: str
    gpus: dict[int, Gpu]
    gpu_of: dict[tuple[int, int], int]
    thread_names: dict[int, str]
    diagnostics: tuple[Diagnostic, ...]
    ranges_on_gpu: bool = False
    recording: Recording = Recording()
    time_shift_ns: int = 0
    started_utc_ns: int = 0

    @property
    def units(self) -> str:
        """The name of the devices' multiprocessors: SMs, an AMD GPU's compute units (CUs)."""
        return _UNITS.get(self.platform, "units")

    def gpu(self, pid: int, device: int) -> Gpu | None:
        """The GPU behind a device ordinal of a process.

        Where the export does not tell it, as up to nsys 2024.2: any, on a machine whose GPUs are all alike.
        """
        alike = len({replace(gpu, gpu_id=0) for gpu in self.gpus.values()}) == 1
        return self.gpus.get(self.gpu_of.get((pid, device), -1), next(iter(self.gpus.values())) if alike else None)


def read_metadata(frames: dict[str, Frame], strings: dict[int, str]) -> Metadata:
    """Builds the metadata from the small tables (``export``, ``environment``, ``gpus``, ...)."""
    export = dict(rows_of(frames["export"]))
    environment = dict(rows_of(frames["environment"]))
    platform = environment.get("DevicePlatform", CUDA)
    driver = environment.get("NvDriverVersion") or "unknown"
    return Metadata(
        profiler="torch" if export.get("EXPORT_PRODUCT_NAME") == _TORCH else "nsys",
        profiler_version=export.get("EXPORT_PRODUCT_VERSION") or export.get("PRODUCT_VERSION") or "unknown",
        schema_version=export.get("EXPORT_SCHEMA_VERSION", "unknown"),
        platform=platform,
        driver=driver if driver != "0" else "unknown",  # nsys writes 0 without a driver
        runtime=_runtime_version(platform, environment),
        cpu=environment.get("CpuDescription", "unknown"),
        os=environment.get("OsDescription", "unknown"),
        gpus={row[0]: Gpu(*row) for row in rows_of(frames["gpus"])},
        gpu_of={(pid, device): gpu for gpu, device, pid in rows_of(frames["cuda_devices"])},
        thread_names={thread: strings.get(name, "") for thread, name in rows_of(frames["threads"])},
        diagnostics=read_diagnostics(frames["diagnostics"]),
        ranges_on_gpu=RANGES_ON in export,
        recording=_recording(frames["capture"]),
        time_shift_ns=_shift(export.get(TIME_SHIFT, "")),
        started_utc_ns=max((start for (start,) in rows_of(frames["session_start"])), default=0),
    )


def read_diagnostics(frame: Frame) -> tuple[Diagnostic, ...]:
    """The profiler's messages, in the file's order."""
    return tuple(Diagnostic(*row) for row in rows_of(frame))


def _recording(frame: Frame) -> Recording:
    rows = list(rows_of(frame))
    words = {int(found[1]): value for name, value in rows if (found := _ARGUMENT.search(name))}
    command = [value for name, value in rows if name.endswith(":COMMAND")]
    modes = [value.lower() for name, value in rows if name.endswith("CUDA_GRAPH_TRACE_OPTIONS:MODE")]
    return Recording(
        tuple(dict.fromkeys(value for name, value in rows if name == "CAPTURE_EVENT_TYPE")),
        modes[0] if modes else "",
        (*command[:1], *(words[i] for i in sorted(words))) if command else (),
    )


def _shift(text: str) -> int:
    """A shift in ns; what is no time that a trace can have is none."""
    return int(text) if re.fullmatch(r"[+-]?\d{1,19}", text) and abs(int(text)) < -NO_TIME else 0


def _runtime_version(platform: str, environment: dict[str, str]) -> str:
    """The version of CUDA (13000 is 13.0), or of HIP and its ROCm (70253211, ``HIP_VERSION``, is 7.2.53211)."""
    if platform == HIP:
        number = environment.get("HipRuntimeVersion") or environment.get("HipDriverVersion", "")
    else:
        number = environment.get("CudaDriverVersion", "")
    if not _NUMBER.fullmatch(number):
        return "unknown"
    if platform == HIP:
        major, rest = divmod(int(number), 10_000_000)
        minor, patch = divmod(rest, 100_000)
        return f"{major}.{minor}.{patch} (ROCm {major}.{minor})"
    return f"{int(number) // 1000}.{int(number) % 1000 // 10}"
