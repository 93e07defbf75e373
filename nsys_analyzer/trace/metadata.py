"""Reads the metadata of a capture from its export: versions, GPUs, names of threads, and messages of the profiler."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, replace

from nsys_analyzer.text import StrOrText, phrase, plain
from nsys_analyzer.trace.arrays import Frame, iterate_rows
from nsys_analyzer.trace.schema import TIME_SHIFT

#: The severities of nsys's messages, by their codes.
SEVERITIES = {1: "info", 2: "warning", 3: "error", 4: "verbose"}

#: Patterns of nsys's messages about a missing CUDA trace, each with an explanation for the user. CUPTI supports only
#: one client at a time (cupti_result.h, CUPTI_ERROR_MULTIPLE_SUBSCRIBERS_NOT_SUPPORTED). Tracing needs no special
#: permission, except on a virtual GPU.
_CUDA_MESSAGES = (
    (
        re.compile(r"CUDA (?:profiling might have not been started correctly|injection initialization failed)"),
        phrase(
            "nsys recorded no CUDA trace of the process. There are three possible reasons. The process made no CUDA "
            "call, like a launcher or a data loader. Or CUPTI could not start in it, because another profiler "
            "(torch.profiler, a debugger) was attached, nsys is older than the driver, a virtual GPU does not allow "
            "tracing, or the process was forked without exec (use `--trace-fork-before-exec=true`). Or the process was "
            "killed before its records were written."
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
#: Only this many characters at the start of a message are examined. The messages of nsys are much shorter.
_MAX_MESSAGE_CHARACTERS = 1_000
#: Matches if no API follows whose events are used in figures.
_NOT_A_USED_API = r"(?!CUDA |NVTX |CUPTI )"
#: Matches messages about other APIs than CUDA and NVTX, and messages about CPU samples. No figure depends on these.
_IRRELEVANT_MESSAGE = re.compile(
    rf"No {_NOT_A_USED_API}.+ events collected\. Does (?:the|any) process use"
    rf"|{_NOT_A_USED_API}[\w ./+-]+ profiling might have not been started correctly"
    rf"|Not all {_NOT_A_USED_API}.+ events might have been collected"
    rf"|.*Some {_NOT_A_USED_API}[\w ]+ events might be missing"
    r"|.*Unified Memory trace is not supported"
    r"|(?i:.*\b(?:ip samples?|sampling|context[ -]switch\w*|backtraces?|ftrace|gpu metrics)\b)"
)


@dataclass(frozen=True)
class Diagnostic:
    """A message of the profiler.

    Attributes:
        process: global process ID that the message is about.
        severity: a key of ``SEVERITIES``.
        text: the message.
    """

    process: int
    severity: int
    text: str


def is_irrelevant_message(text: str) -> bool:
    """Returns whether a message is only about other APIs than CUDA and NVTX, or about CPU samples."""
    return bool(_IRRELEVANT_MESSAGE.match(text[:_MAX_MESSAGE_CHARACTERS]))


def first_sentence(text: str) -> str:
    """Returns a message of the profiler on one line, without the advice at its end."""
    sentence = " ".join(text.split()).split(". To make sure")[0].rstrip(".")
    return sentence if sentence.endswith(("?", "!")) else f"{sentence}."


def explain_message(text: str) -> StrOrText:
    """Returns an explanation of a message about a missing CUDA trace; an empty text for any other message."""
    return next((explanation for pattern, explanation in _CUDA_MESSAGES if pattern.search(text)), "")


def find_missing_cuda_message(messages: Iterable[Diagnostic]) -> Diagnostic | None:
    """Returns the message that explains a missing CUDA trace; None without such a message.

    If there are several such messages, the one that comes first in ``_NO_CUDA`` is returned.
    """
    candidates = list(messages)
    matching_messages = (
        message for pattern, _ in _CUDA_MESSAGES for message in candidates if pattern.search(message.text)
    )
    return next(matching_messages, None)


def explain_missing_cuda(messages: Iterable[Diagnostic]) -> str:
    """Returns the profiler's message about a missing CUDA trace, with an explanation; an empty text without one."""
    reason = find_missing_cuda_message(messages)
    return f"nsys: {first_sentence(reason.text)} {plain(explain_message(reason.text), '`')}" if reason else ""


#: The name of the device that represents the CPU in a trace without a GPU.
CPU = "CPU"

_TORCH_PROFILER = "torch.profiler"
#: Matches a version that is written as an integer. nsys writes 0 if there is no driver, which is no version.
_VERSION_NUMBER = re.compile(r"(?!0$)[0-9]{1,18}")

#: The programming platforms of GPUs: NVIDIA's CUDA and AMD's HIP.
CUDA, HIP = "CUDA", "HIP"

_MULTIPROCESSOR_WORDS = {CUDA: "SMs", HIP: "CUs"}


@dataclass(frozen=True)
class Gpu:
    """A GPU of the machine on which the capture was recorded. A number is 0 if it is unknown.

    ``compute_capability`` is its major version. The four numbers before ``clock_hz`` are what a
    multiprocessor has for blocks.
    """

    gpu_id: int
    name: str
    memory_bytes: int
    sm_count: int
    memory_bytes_per_s: int = 0
    l2_bytes: int = 0
    compute_capability: int = 0
    registers_per_sm: int = 0
    shared_bytes_per_sm: int = 0
    warps_per_sm: int = 0
    blocks_per_sm: int = 0
    clock_hz: int = 0

    @property
    def is_cpu(self) -> bool:
        """Whether this entry represents the CPU."""
        return self.name == CPU


@dataclass(frozen=True)
class Metadata:
    """The metadata of a capture. A text is "unknown" if the export does not contain it.

    Attributes:
        profiler: "nsys" or "torch".
        platform: "CUDA" or "HIP".
        profiler_version: version of the profiler.
        schema_version: version of the export's schema.
        driver: version of the GPU driver.
        runtime: version of CUDA or HIP.
        cpu: model of the CPU.
        os: name and version of the operating system.
        gpus: GPUs by GPU ID.
        gpu_of: GPU IDs by (pid, CUDA device ordinal).
        thread_names: names by global thread ID.
        diagnostics: messages of the profiler.
        time_shift_ns: offset that ``nsys export`` added to every time.
        started_utc_ns: start of the session, ns since 1970 (UTC); 0 if the export does not contain it.
        unread_tables: names of recorded tables from which nothing is read.
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
        """The name of the GPUs' multiprocessors: SMs on NVIDIA's GPUs, compute units (CUs) on AMD's."""
        return _MULTIPROCESSOR_WORDS.get(self.platform, "units")

    def gpu(self, pid: int, device: int) -> Gpu | None:
        """Returns the GPU that has this device ordinal in a process; None if it is unknown.

        Exports of nsys up to 2024.2 do not say which GPU has which ordinal. One of the machine's GPUs is returned then
        if all of them are equal.
        """
        are_equal = len({replace(gpu, gpu_id=0) for gpu in self.gpus.values()}) == 1
        return self.gpus.get(self.gpu_of.get((pid, device), -1), next(iter(self.gpus.values())) if are_equal else None)


def read_metadata(frames: dict[str, Frame], strings: dict[int, str]) -> Metadata:
    """Builds the metadata from the small tables, such as ``export``, ``environment`` and ``gpus``.

    Args:
        frames: the tables by their keys.
        strings: the export's strings by ID.
    """
    export = dict(iterate_rows(frames["export"]))
    environment = dict(iterate_rows(frames["environment"]))
    platform = environment.get("DevicePlatform", CUDA)
    driver = environment.get("NvDriverVersion") or "unknown"
    time_shift = export.get(TIME_SHIFT, "")
    return Metadata(
        profiler="torch" if export.get("EXPORT_PRODUCT_NAME") == _TORCH_PROFILER else "nsys",
        profiler_version=export.get("EXPORT_PRODUCT_VERSION") or export.get("PRODUCT_VERSION") or "unknown",
        schema_version=export.get("EXPORT_SCHEMA_VERSION", "unknown"),
        platform=platform,
        driver=driver if driver != "0" else "unknown",  # nsys writes 0 if there is no driver
        runtime=_runtime_version(platform, environment),
        cpu=environment.get("CpuDescription", "unknown"),
        os=environment.get("OsDescription", "unknown"),
        gpus={row[0]: Gpu(*row) for row in iterate_rows(frames["gpus"])},
        gpu_of={(pid, device): gpu for gpu, device, pid in iterate_rows(frames["cuda_devices"])},
        thread_names={thread: strings.get(name, "") for thread, name in iterate_rows(frames["threads"])},
        diagnostics=read_diagnostics(frames["diagnostics"]),
        time_shift_ns=int(time_shift) if re.fullmatch(r"[+-]?\d{1,18}|[+-]?[1-4]\d{18}", time_shift) else 0,
        started_utc_ns=max((start for (start,) in iterate_rows(frames["session_start"])), default=0),
    )


def read_diagnostics(frame: Frame) -> tuple[Diagnostic, ...]:
    """Returns the profiler's messages, in the file's order."""
    return tuple(Diagnostic(*row) for row in iterate_rows(frame))


def _runtime_version(platform: str, environment: dict[str, str]) -> str:
    """Returns the version of CUDA, or the version of HIP with the version of ROCm that it belongs to.

    The integer 13000 means CUDA 13.0. The integer 70253211 (``HIP_VERSION``) means HIP 7.2.53211.
    """
    if platform == HIP:
        number = environment.get("HipRuntimeVersion") or environment.get("HipDriverVersion", "")
    else:
        number = environment.get("CudaDriverVersion", "")
    if not _VERSION_NUMBER.fullmatch(number):
        return "unknown"
    if platform == HIP:
        major, minor_and_patch = divmod(int(number), 10_000_000)
        minor, patch = divmod(minor_and_patch, 100_000)
        return f"{major}.{minor}.{patch} (ROCm {major}.{minor})"
    return f"{int(number) // 1000}.{int(number) % 1000 // 10}"
