"""The conditions of a capture as its export tells them: versions, GPUs, threads and the profiler's own messages."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, replace

from nsys_analyzer.text import StrOrText, phrase
from nsys_analyzer.trace.arrays import Frame, iterate_rows
from nsys_analyzer.trace.schema import TIME_SHIFT

#: The severities of a message, as nsys numbers them.
SEVERITIES = {1: "info", 2: "warning", 3: "error", 4: "verbose"}

#: Messages that explain why a process has no CUDA trace, and what they mean. CUPTI takes one client at a time
#: (cupti_result.h, CUPTI_ERROR_MULTIPLE_SUBSCRIBERS_NOT_SUPPORTED); tracing asks for no special rights, but for those
#: that a virtual GPU may withhold.
_NO_CUDA = (
    (
        re.compile(r"CUDA (?:profiling might have not been started correctly|injection initialization failed)"),
        phrase(
            "nsys got no CUDA trace of the process. Either it made no CUDA call, as a launcher or a data loader; or "
            "CUPTI could not start in it, because another profiler was attached (torch.profiler, a debugger), nsys is "
            "older than the driver, a virtual GPU allows no tracing, or the process was forked without exec "
            "(`--trace-fork-before-exec=true`); or it was killed before it wrote its records."
        ),
    ),
    (
        re.compile(r"Installed CUDA driver version .* is not supported by this build"),
        "The driver is newer than this nsys, whose CUPTI may record nothing or stop early: install a newer nsys.",
    ),
    (
        re.compile(r"CUDA tracing is not supported"),
        "This GPU cannot be traced by nsys.",
    ),
)
#: Characters of a message that are looked at: those of nsys are far shorter.
_LONGEST = 1_000
_OURS = r"(?!CUDA |NVTX |CUPTI )"
#: Messages about other APIs and about samples of the CPU: no figure of ours comes from these.
_OF_OTHERS = re.compile(
    rf"No {_OURS}.+ events collected\. Does (?:the|any) process use"
    rf"|{_OURS}[\w ./+-]+ profiling might have not been started correctly"
    rf"|Not all {_OURS}.+ events might have been collected"
    rf"|.*Some {_OURS}[\w ]+ events might be missing"
    r"|.*Unified Memory trace is not supported"
    r"|(?i:.*\b(?:ip samples?|sampling|context[ -]switch\w*|backtraces?|ftrace|gpu metrics)\b)"
)


@dataclass(frozen=True)
class Diagnostic:
    """A message of the profiler: the global process ID it is about, 1 info, 2 warning or 3 error, its text."""

    process: int
    severity: int
    text: str


def is_irrelevant_message(text: str) -> bool:
    """Returns whether a message is about APIs other than CUDA and NVTX, or about samples of the CPU."""
    return bool(_OF_OTHERS.match(text[:_LONGEST]))


def first_sentence(text: str) -> str:
    """Returns a message on one line, without its advice."""
    sentence = " ".join(text.split()).split(". To make sure")[0].rstrip(".")
    return sentence if sentence.endswith(("?", "!")) else f"{sentence}."


def explain_message(text: str) -> StrOrText:
    """Returns the meaning of a message about a missing CUDA trace, empty for any other message."""
    return next((explanation for pattern, explanation in _NO_CUDA if pattern.search(text)), "")


def find_missing_cuda_message(messages: Iterable[Diagnostic]) -> Diagnostic | None:
    """Returns the first message that explains a missing CUDA trace, the plainest first."""
    texts = list(messages)
    matching = (message for pattern, _ in _NO_CUDA for message in texts if pattern.search(message.text))
    return next(matching, None)


def explain_missing_cuda(messages: Iterable[Diagnostic]) -> StrOrText:
    """Why there is no CUDA trace, in the profiler's words and ours; empty where no message says so."""
    reason = find_missing_cuda_message(messages)
    return phrase("nsys: {} {}", first_sentence(reason.text), explain_message(reason.text)) if reason else ""


CPU = "CPU"
"""The name of the device that stands for the CPU, on a machine without a GPU."""

_TORCH = "torch.profiler"
#: A version as an integer; without a driver nsys writes 0.
_NUMBER = re.compile(r"(?!0$)[0-9]{1,18}")

CUDA, HIP = "CUDA", "HIP"
"""How devices are programmed: NVIDIA's and AMD's."""

_UNITS = {CUDA: "SMs", HIP: "CUs"}


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
class Metadata:
    """The capture's conditions; texts are "unknown" where the export is silent.

    Attributes:
        profiler: "nsys" or "torch".
        platform: how the devices are programmed: "CUDA" or "HIP".
        runtime: the version of CUDA or HIP.
        gpus: by GPU ID.
        gpu_of: (pid, CUDA device ordinal) to GPU ID.
        thread_names: by global thread ID.
        time_shift_ns: added by the export to each of its times.
        started_utc_ns: when the session started, since 1970 (UTC); 0 where the export is silent.
        unread_tables: the names of the tables of events of which nothing is read.
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
    time_shift_ns: int = 0
    started_utc_ns: int = 0
    unread_tables: tuple[str, ...] = ()

    @property
    def multiprocessors(self) -> str:
        """The name of the devices' multiprocessors: SMs, an AMD GPU's compute units (CUs)."""
        return _UNITS.get(self.platform, "units")

    def gpu(self, pid: int, device: int) -> Gpu | None:
        """Returns the GPU behind a device ordinal of a process.

        Where the export does not tell it, as up to nsys 2024.2: any, on a machine whose GPUs are all alike.
        """
        alike = len({replace(gpu, gpu_id=0) for gpu in self.gpus.values()}) == 1
        return self.gpus.get(self.gpu_of.get((pid, device), -1), next(iter(self.gpus.values())) if alike else None)


def read_metadata(frames: dict[str, Frame], strings: dict[int, str]) -> Metadata:
    """Builds the metadata from the small tables (``export``, ``environment``, ``gpus``, ...)."""
    export = dict(iterate_rows(frames["export"]))
    environment = dict(iterate_rows(frames["environment"]))
    platform = environment.get("DevicePlatform", CUDA)
    driver = environment.get("NvDriverVersion") or "unknown"
    shift = export.get(TIME_SHIFT, "")
    return Metadata(
        profiler="torch" if export.get("EXPORT_PRODUCT_NAME") == _TORCH else "nsys",
        profiler_version=export.get("EXPORT_PRODUCT_VERSION") or export.get("PRODUCT_VERSION") or "unknown",
        schema_version=export.get("EXPORT_SCHEMA_VERSION", "unknown"),
        platform=platform,
        driver=driver if driver != "0" else "unknown",  # nsys writes 0 without a driver
        runtime=_runtime_version(platform, environment),
        cpu=environment.get("CpuDescription", "unknown"),
        os=environment.get("OsDescription", "unknown"),
        gpus={row[0]: Gpu(*row) for row in iterate_rows(frames["gpus"])},
        gpu_of={(pid, device): gpu for gpu, device, pid in iterate_rows(frames["cuda_devices"])},
        thread_names={thread: strings.get(name, "") for thread, name in iterate_rows(frames["threads"])},
        diagnostics=read_diagnostics(frames["diagnostics"]),
        time_shift_ns=int(shift) if re.fullmatch(r"[+-]?\d{1,18}|[+-]?[1-4]\d{18}", shift) else 0,
        started_utc_ns=max((start for (start,) in iterate_rows(frames["session_start"])), default=0),
    )


def read_diagnostics(frame: Frame) -> tuple[Diagnostic, ...]:
    """Returns the profiler's messages, in the file's order."""
    return tuple(Diagnostic(*row) for row in iterate_rows(frame))


def _runtime_version(platform: str, environment: dict[str, str]) -> str:
    """Returns the version of CUDA (13000 is 13.0), or of HIP and its ROCm (70253211, ``HIP_VERSION``, is 7.2.53211)."""
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
