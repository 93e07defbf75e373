"""Records a program with ``nsys profile``: its arguments, from what it left to a report, and what it needs for that."""

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
from nsys_analyzer.errors import CaptureError
from nsys_analyzer.system.atomic_write import atomic_write, is_disk_full
from nsys_analyzer.system.nsys import Nsys, run_query
from nsys_analyzer.system.process import last_lines, run_captured
from nsys_analyzer.trace.sources import last_output_lines

INSTALL_NSYS = "apt-get install nsight-systems (Debian non-free), or https://developer.nvidia.com/nsight-systems"
#: The session of a server's recording, with the process ID of this command in a variable of the job.
PROCESS_ID = "NSYS_ANALYZE_PID"
_SESSION = "nsys-analyze-"
_LINKS_FOLLOWED = 16
_LONG_NAMES = {"-c": "--capture-range", "-f": "--force-overwrite", "-o": "--output", "-s": "--sample", "-t": "--trace"}
_NO_IMPORT = re.compile(r"(Importer error status|Unable to retrieve the importer)[^|]*\| ")  # nor was one needed


@dataclass(frozen=True)
class ProfileOptions:
    """The options of ``nsys profile``; an option in ``extra`` replaces the one that stands for a field.

    ``capture_range`` records from ``cudaProfilerStart`` to ``cudaProfilerStop`` alone; ``delay`` and ``duration``, in
    seconds, some time of a program that runs on, and the program is ended behind it.
    """

    capture_range: bool = True
    memory: bool = False
    delay: float | None = None
    duration: float | None = None
    extra: tuple[str, ...] = ()

    @property
    def runs_on(self) -> bool:
        """Whether the program would not end by itself."""
        return self.delay is not None or self.duration is not None


def profile_command(
    nsys: Nsys, report: Path, program: Sequence[str], options: ProfileOptions, *, by_rank: bool = False
) -> list[str]:
    """Returns the command line that records ``program`` into ``report``; whatever bears that name is overwritten.

    ``by_rank`` has nsys put the rank of its process behind the report's name.

    Raises:
        CaptureError: the report's name was given in an extra option, too.
    """
    extra = {_LONG_NAMES.get(name, name) for name in (word.partition("=")[0] for word in options.extra)}
    if "--output" in extra:
        raise CaptureError("nsys profile --output is set already", f"Leave it out: the report is {report}")
    arguments = [argument for argument in _arguments(options, by_rank) if argument.partition("=")[0] not in extra]
    output = str(report.with_suffix("")).replace("%", "%%")  # nsys replaces %h, %p and %q{...}
    output += RANK_SUFFIX if by_rank else ""
    return [str(nsys.path), "profile", *arguments, f"--output={output}", *options.extra, *program]


def finished_report(nsys: Nsys, report: Path, log: Path, timeout_s: float | None = None) -> Path:
    """Returns the report that a finished ``nsys profile`` left, imported where nsys did not do so itself.

    It is ``report``, ``X.nsys-rep``, or the ``X.qdrep`` of an old nsys; ``log`` holds the output of the run.

    Raises:
        CaptureError: nothing was recorded, or the recording (``X.qdstrm``, which stays) cannot be imported.
    """
    stream = report.with_suffix(".qdstrm")
    if stream.is_file():  # nsys removes it once it has imported: what lies beside it is half a report
        _import(nsys, stream, report, timeout_s)
        return report
    for path in (report, report.with_suffix(".qdrep")):
        if path.is_file() and path.stat().st_size:
            return path
    raise _no_report(report, log)


def start_now(nsys: Nsys) -> None:
    """Begins the recording of a server that this process started, before its delay is over; nsys says what fails."""
    subprocess.run([nsys.path, "start", f"--session={_SESSION}{os.getpid()}"], check=False)


def _arguments(options: ProfileOptions, by_rank: bool) -> Iterator[str]:
    yield "--trace=cuda,nvtx"
    yield "--sample=none"  # sampling the CPU is slow, and needs rights that containers withhold
    yield "--cpuctxsw=none"
    if options.capture_range:
        yield "--capture-range=cudaProfilerApi"
        yield "--capture-range-end=stop"  # its default ends the program at the range's end
    yield "--cuda-graph-trace=node"  # a graph traced as a whole has no kernels
    if options.memory:
        yield "--cuda-memory-usage=true"
    if options.runs_on:
        yield f"--delay={options.delay or 0:g}"
        if not by_rank:
            yield f"--session-new={_SESSION}%q{{{PROCESS_ID}}}"
        yield "--wait=primary"  # where a server's first process is killed, its workers may live on
    if options.duration is not None:
        yield f"--duration={options.duration:g}"
    yield "--force-overwrite=true"


def _import(nsys: Nsys, stream: Path, report: Path, timeout_s: float | None) -> None:
    importer = find_importer(nsys.path)
    if importer is None:
        raise CaptureError(
            f"{nsys.path} left {stream}, and its importer (QdstrmImporter) is not here",
            f"Install all of Nsight Systems {nsys.version}, or import where it is: QdstrmImporter -i {stream.name}",
        )
    again = f"run {shlex.quote(str(importer))} -i {shlex.quote(str(stream))}"
    with atomic_write(report) as unfinished:
        try:  # absolute paths are never taken for options
            done = run_captured([importer, "-i", stream.absolute(), "-o", unfinished.absolute()], timeout_s)
        except subprocess.TimeoutExpired as error:
            problem = f"The import of {stream} was stopped after {timeout_s:g} s"
            raise CaptureError(problem, f"To give it more time, {again}") from error
        if done.returncode != 0 or not unfinished.is_file():
            message = (
                last_output_lines(done.stderr) or last_output_lines(done.stdout) or f"exit status {done.returncode}"
            )
            raise CaptureError(f"{stream} cannot be imported: {message}", f"To try it by hand, {again}")
    stream.unlink()


def _no_report(report: Path, log: Path) -> CaptureError:
    for folder in (report.parent, Path(tempfile.gettempdir())):
        if is_disk_full(folder):  # nsys dies there with other words, or none
            problem = f"The disk of {folder} is full"
            return CaptureError(problem, f"Free some space, or choose another folder: df -h {folder}")
    output = last_lines(log) if log.is_file() else ""
    if "No reports were generated" in output or output.endswith("Generated:"):  # the latter until 2023
        return CaptureError(
            f"nsys recorded nothing, for no capture range was opened: {_NO_IMPORT.sub('', output)}",
            "Call torch.cuda.profiler.start() and stop() around what to record, or record all: "
            "nsys-analyze run --whole-program",
        )
    return CaptureError(f"nsys wrote no report: {output or 'it printed nothing'}", f"Read its output: {log}")


# --- the installation ---


@dataclass(frozen=True)
class Check:
    """One thing that was looked at, what was found, and the command that fixes it, empty where nothing does."""

    name: str
    status: Literal["ok", "missing", "broken", "unknown"]
    found: str
    remedy: str = ""


def find_importer(nsys: Path) -> Path | None:
    """Finds the ``QdstrmImporter`` of an ``nsys``, which turns a recording (``.qdstrm``) into a report.

    NVIDIA's packages have it in ``host-linux-*`` beside the folder of ``nsys``, and Nsight Compute in
    ``host/linux-desktop-*``. Debian's have it beside the folder of a *link* to ``nsys``, where ``nsys``, which
    asks for its own real path, does not look. None where there is no importer.
    """
    names = [nsys.absolute()]  # the command, and every link on the way to the file itself
    while names[-1].is_symlink() and len(names) < _LINKS_FOLLOWED:
        names.append(names[-1].parent / names[-1].readlink())
    folders = [name.parent.parent for name in (*names, nsys.resolve())]
    real = nsys.resolve()
    if len(real.parents) > 3:  # lib/x86_64-linux-gnu/nsight-systems/target-linux-x64/nsys: lib/nsight-systems
        folders.append(real.parents[3] / real.parents[1].name)
    beside = (importer for folder in folders for importer in sorted(folder.resolve().glob("*/QdstrmImporter")))
    return next(beside, None)


def importer_check(nsys: Nsys) -> Check:
    """Checks whether what an nsys records can become a report here."""
    importer = find_importer(nsys.path)
    if importer is None:
        with nsys.path.open("rb") as file:
            is_script = file.read(4) != b"\x7fELF"
        if is_script:
            return Check("importer", "unknown", f"{nsys.path} is a script, and only it knows")
        return Check("importer", "missing", f"no QdstrmImporter belongs to {nsys.path}", INSTALL_NSYS)
    if fault := start_fault(importer):
        remedy = f"{INSTALL_NSYS}; ldd {importer} lists libraries that are not found"
        return Check("importer", "broken", f"{importer} does not start: {fault}", remedy)
    return Check("importer", "ok", f"starts: {importer}")


def start_fault(binary: Path) -> str | None:
    """Starts a binary with ``--version``: None where it starts, else the last line of its message."""
    try:
        done = run_query(binary, "--version")
    except (OSError, subprocess.TimeoutExpired) as error:
        return str(error)
    if done.returncode == 0:
        return None
    return last_output_lines(done.stderr) or last_output_lines(done.stdout) or f"exit status {done.returncode}"
