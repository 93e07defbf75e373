"""Builds the command line of ``nsys profile``, finds the report that nsys wrote, and checks the installation."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from nsys_analyzer.capture.targets import RANK_SUFFIX
from nsys_analyzer.errors import CaptureError, CountersRefusedError
from nsys_analyzer.system.atomic_write import atomic_write, is_disk_full
from nsys_analyzer.system.machine import Nsys, run_query
from nsys_analyzer.system.process import read_last_lines, run_captured
from nsys_analyzer.trace.nsys_report import last_output_lines

INSTALL_NSYS = "apt-get install nsight-systems (Debian non-free), or https://developer.nvidia.com/nsight-systems"
#: The environment variable with the process ID of ``nsys-analyze``. The nsys session that records a server has this ID
#: in its name.
PROCESS_ID_VARIABLE = "NSYS_ANALYZE_PID"
_SESSION_PREFIX = "nsys-analyze-"
_MAX_LINKS = 16
#: The samples of the GPU's counters per second, unless ``--nsys-option`` says otherwise.
_COUNTER_FREQUENCY_HZ = 10_000
_LONG_OPTION_NAMES = {
    "-c": "--capture-range",
    "-f": "--force-overwrite",
    "-o": "--output",
    "-s": "--sample",
    "-t": "--trace",
}
#: Matches nsys's messages about its importer. They do not matter if nsys recorded nothing that it could import.
_IMPORTER_MESSAGE = re.compile(r"(Importer error status|Unable to retrieve the importer)[^|]*\| ")

#: Matches nsys's messages that it cannot sample a GPU's counters, because of permissions or because of the GPU.
_COUNTERS_REFUSED = re.compile(r"(?P<permission>ERR_NVGPUCTRPERM)|None of the installed GPUs are supported")


@dataclass(frozen=True)
class ProfileOptions:
    """The options of ``nsys profile``.

    Attributes:
        capture_range: whether to record only from ``cudaProfilerStart`` to ``cudaProfilerStop``.
        memory: whether to record the use of GPU memory.
        counters: whether to sample the hardware counters of the GPUs.
        delay: the seconds after which the recording of a server begins.
        duration: the seconds that the recording of a server takes. The server is ended afterwards.
        extra: further options. Each replaces the option of the same name.
    """

    capture_range: bool = True
    memory: bool = False
    counters: bool = False
    delay: float | None = None
    duration: float | None = None
    extra: tuple[str, ...] = ()

    @property
    def is_server(self) -> bool:
        """Whether the program is a server, which does not end by itself."""
        return self.delay is not None or self.duration is not None


def make_profile_command(
    nsys: Nsys, report: Path, program: Sequence[str], options: ProfileOptions, *, by_rank: bool = False
) -> list[str]:
    """Returns the command line that records ``program`` into ``report``, and overwrites an existing report.

    With ``by_rank``, nsys runs once for each rank, and appends the rank to the name of the report.

    Raises:
        CaptureError: an extra option names another report.
    """
    replaced_options = {
        _LONG_OPTION_NAMES.get(name, name) for name in (word.partition("=")[0] for word in options.extra)
    }
    if "--output" in replaced_options:
        raise CaptureError("nsys profile --output is set already", f"Leave it out: the report is {report}")
    all_arguments = [*_make_arguments(options, by_rank), *(_make_counter_arguments(nsys) if options.counters else ())]
    arguments = [argument for argument in all_arguments if argument.partition("=")[0] not in replaced_options]
    # Escapes percent signs, because nsys replaces %h, %p and %q{...}.
    output = str(report.with_suffix("")).replace("%", "%%")
    output += RANK_SUFFIX if by_rank else ""
    return [str(nsys.path), "profile", *arguments, f"--output={output}", *options.extra, *program]


def find_or_import_report(nsys: Nsys, report: Path, log: Path, timeout_s: float | None = None) -> Path:
    """Returns the report of a finished ``nsys profile``, and imports the recording if nsys did not.

    Args:
        nsys: the nsys that recorded the program.
        report: the expected file, ``X.nsys-rep``.
        log: the file with the output of the run.
        timeout_s: the time limit of the import in seconds.

    Raises:
        CaptureError: nothing was recorded, or the recording cannot be imported. The recording (``X.qdstrm``) is kept.
    """
    stream = report.with_suffix(".qdstrm")
    if stream.is_file():  # nsys removes the recording after the import, so a report beside it is incomplete
        _import_recording(nsys, stream, report, timeout_s)
        return report
    if report.is_file() and report.stat().st_size:
        return report
    for folder in (report.parent, Path(tempfile.gettempdir())):
        if is_disk_full(folder):  # on a full disk, nsys ends with an unrelated message or none
            problem = f"The disk of {folder} is full"
            raise CaptureError(problem, f"Free some space, or choose another folder: df -h {folder}")
    output = read_last_lines(log) if log.is_file() else ""
    refusal = _COUNTERS_REFUSED.search(log.read_text(encoding="utf-8", errors="replace")) if log.is_file() else None
    if refusal and refusal["permission"]:
        raise CountersRefusedError(
            "nsys may not sample the GPU's counters, because the driver allows this only to administrators",
            "Run as root (docker run --cap-add=SYS_ADMIN), or load the driver with "
            "NVreg_RestrictProfilingToAdminUsers=0: https://developer.nvidia.com/ERR_NVGPUCTRPERM",
        )
    if refusal:
        raise CountersRefusedError("nsys cannot sample the counters of this GPU", "Leave out --counters")
    if "No reports were generated" in output or output.endswith("Generated:"):  # nsys before 2024 prints "Generated:"
        raise CaptureError(
            f"nsys recorded nothing, because no capture range was opened: {_IMPORTER_MESSAGE.sub('', output)}",
            "Call torch.cuda.profiler.start() before the steps to record and stop() after them, or record the whole "
            "program: nsys-analyze run --whole-program",
        )
    raise CaptureError(f"nsys wrote no report: {output or 'it printed nothing'}", f"Read its output: {log}")


def start_recording(nsys: Nsys) -> None:
    """Begins the recording of a server before its delay is over. nsys prints an error if that fails."""
    subprocess.run([nsys.path, "start", f"--session={_SESSION_PREFIX}{os.getpid()}"], check=False)


def _make_arguments(options: ProfileOptions, by_rank: bool) -> Iterator[str]:
    yield "--trace=cuda,nvtx"
    yield "--sample=none"  # does not sample the CPU, which is slow and needs rights that containers do not have
    yield "--cpuctxsw=none"
    if options.capture_range:
        yield "--capture-range=cudaProfilerApi"
        yield "--capture-range-end=stop"  # does not end the program at the end of the range, as nsys would by default
    yield "--cuda-graph-trace=node"  # records each node of a CUDA graph, because a graph as a whole shows no kernels
    if options.memory:
        yield "--cuda-memory-usage=true"
    if options.is_server:
        yield f"--delay={options.delay or 0:g}"
        if not by_rank:
            yield f"--session-new={_SESSION_PREFIX}%q{{{PROCESS_ID_VARIABLE}}}"
        yield "--wait=primary"  # waits only for the server's first process, which its workers may outlive
    if options.duration is not None:
        yield f"--duration={options.duration:g}"
    yield "--force-overwrite=true"


def _make_counter_arguments(nsys: Nsys) -> tuple[str, str]:
    """Returns the options that sample the counters of the GPUs that the program sees.

    nsys before 2024.6 calls the option ``--gpu-metrics-device``, and cannot select the visible GPUs.
    """
    described = run_query(nsys.path, "profile", "--help").stdout
    name = "--gpu-metrics-devices" if "--gpu-metrics-devices" in described else "--gpu-metrics-device"
    return f"{name}={'cuda-visible' if 'cuda-visible' in described else 'all'}", (
        f"--gpu-metrics-frequency={_COUNTER_FREQUENCY_HZ}"
    )


def _import_recording(nsys: Nsys, stream: Path, report: Path, timeout_s: float | None) -> None:
    importer = find_importer(nsys.path)
    if importer is None:
        raise CaptureError(
            f"{nsys.path} wrote {stream}, but its importer (QdstrmImporter) is not installed here",
            f"Install Nsight Systems {nsys.version} completely, or import the file on a machine that has it: "
            f"QdstrmImporter -i {stream.name}",
        )
    retry = f"run {shlex.quote(str(importer))} -i {shlex.quote(str(stream))}"
    with atomic_write(report) as unfinished:
        try:  # the path is absolute, so that nsys cannot mistake it for an option
            process = run_captured([importer, "-i", stream.absolute(), "-o", unfinished.absolute()], timeout_s)
        except subprocess.TimeoutExpired as error:
            problem = f"The import of {stream} was stopped after {timeout_s:g} s"
            raise CaptureError(problem, f"To give the import more time, {retry}") from error
        if process.returncode != 0 or not unfinished.is_file():
            raise CaptureError(
                f"{stream} cannot be imported: {_last_message(process)}", f"To try the import by hand, {retry}"
            )
    stream.unlink()


# --- the installation ---


@dataclass(frozen=True)
class Check:
    """The result of a check: its status, a description, and how the user fixes a fault, or an empty text."""

    name: str
    status: Literal["ok", "missing", "broken", "unknown"]
    description: str
    remedy: str = ""


def find_importer(nsys: Path) -> Path | None:
    """Returns the ``QdstrmImporter`` of an ``nsys``, which turns a recording (``.qdstrm``) into a report, or None.

    NVIDIA's packages contain the importer in ``host-linux-*`` beside the folder of ``nsys``, and Nsight Compute
    contains it in ``host/linux-desktop-*``. Debian's package contains it beside the folder of a *link* to ``nsys``.
    ``nsys`` does not search there, because it resolves its own path first.
    """
    names = [nsys.absolute()]  # the command, and each path to which its chain of links leads
    while names[-1].is_symlink() and len(names) < _MAX_LINKS:
        names.append(names[-1].parent / names[-1].readlink())
    folders = [name.parent.parent for name in (*names, nsys.resolve())]
    real_path = nsys.resolve()
    if len(real_path.parents) > 3:  # lib/x86_64-linux-gnu/nsight-systems/target-linux-x64/nsys: lib/nsight-systems
        folders.append(real_path.parents[3] / real_path.parents[1].name)
    importers = (importer for folder in folders for importer in sorted(folder.resolve().glob("*/QdstrmImporter")))
    return next(importers, None)


def check_importer(nsys: Nsys) -> Check:
    """Checks whether the importer of an nsys is installed and starts."""
    importer = find_importer(nsys.path)
    if importer is None:
        with nsys.path.open("rb") as file:
            is_script = file.read(4) != b"\x7fELF"
        if is_script:
            return Check("importer", "unknown", f"{nsys.path} is a script, so its importer cannot be checked")
        return Check("importer", "missing", f"no QdstrmImporter belongs to {nsys.path}", INSTALL_NSYS)
    if fault := find_start_fault(importer):
        remedy = f"{INSTALL_NSYS}; ldd {importer} lists libraries that are not found"
        return Check("importer", "broken", f"{importer} does not start: {fault}", remedy)
    return Check("importer", "ok", f"starts: {importer}")


def find_start_fault(program: Path) -> str | None:
    """Starts a program with ``--version``. Returns None if the program starts, else the last lines of its message."""
    try:
        process = run_query(program, "--version")
    except (OSError, subprocess.TimeoutExpired) as error:
        return str(error)
    return None if process.returncode == 0 else _last_message(process)


def _last_message(process: subprocess.CompletedProcess[str]) -> str:
    return last_output_lines(process.stderr) or last_output_lines(process.stdout) or f"exit status {process.returncode}"
