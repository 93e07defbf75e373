"""From an Nsight Systems report (``.nsys-rep``) to its SQLite export."""

from __future__ import annotations

import functools
import re
import shlex
import subprocess
from functools import partial
from pathlib import Path

from nsys_analyzer.errors import ExportError
from nsys_analyzer.system.nsys import find_nsys, nsys_version, numbers_in
from nsys_analyzer.system.process import run_captured
from nsys_analyzer.trace.sources.folder import is_export_folder
from nsys_analyzer.trace.sources.made import is_sqlite, origin_of, places
from nsys_analyzer.trace.sources.source import Source, WriteExport

#: Keeps what NCCL notes of its calls: ranks, communicators, message sizes.
_BLOBS = "--include-blobs"
_ANSWER_TIMEOUT_S = 60
#: From this version on a folder is known to hold all that a SQLite export does; 2023.4 leaves META_DATA_CAPTURE out.
_WHOLE_FOLDERS = (2025, 3)
_PROGRESS = re.compile(r"(Exporting|Processing) \d+ events:")
_REPORT_VERSION = re.compile(rb"Report (\d{4}(?:@\d+)+)")  # "NVIDIA Tegra Profiler Report 2023@4@4@54-..."
_NOT_A_REPORT = ("Version tag is not found", "Cannot read from stream", "magic number mismatch")


def _open(report: Path, timeout_s: float | None) -> WriteExport:
    """Checks a report, and returns what runs ``nsys export``; both raise ExportError."""
    if not report.is_file():
        raise ExportError(f"{report} does not exist or is not a file", f"Look for it: ls {report.parent}")
    if report.stat().st_size == 0:
        raise ExportError(f"{report} is empty", "Capture again: the run ended before nsys wrote its report")
    nsys = find_nsys()
    if nsys is None:
        raise _missing_nsys(report)
    return partial(_export, nsys, report, timeout_s)


def folder_export(report: Path, timeout_s: float | None) -> WriteExport | None:
    """What writes a report as a folder of Parquet files; None where there is no nsys that writes whole ones."""
    nsys = find_nsys() if report.stat().st_size else None
    try:
        is_new = nsys is not None and numbers_in(nsys_version(nsys))[: len(_WHOLE_FOLDERS)] >= _WHOLE_FOLDERS
    except ExportError:  # it does not run: whoever exports to SQLite says so
        return None
    return partial(_export, nsys, report, timeout_s, kind="parquetdir") if nsys and is_new else None


def _export(nsys: Path, report: Path, timeout_s: float | None, output: Path, *, kind: str = "sqlite") -> None:
    options = ["--type", kind, "--force-overwrite", "true", "--output", str(output.absolute())]
    if _BLOBS in _known_options(nsys):
        options.append(f"{_BLOBS}=true")
    try:  # an absolute path is never taken for an option
        finished = run_captured([str(nsys), "export", *options, str(report.absolute())], timeout_s)
    except OSError as error:
        raise ExportError(f"{nsys} cannot be run: {error}", "Set NSYS to an nsys that runs here") from error
    except subprocess.TimeoutExpired as error:
        raise ExportError(
            f"nsys export of {report} was stopped after {timeout_s:g} s",
            f"Give it more time by hand: {_export_command(str(report))}",
        ) from error
    if finished.returncode != 0 or not (is_sqlite(output) or is_export_folder(output)):
        raise _failed_export(nsys, report, finished)


@functools.cache
def _known_options(nsys: Path) -> str:
    """What ``nsys export --help`` says; nothing where it does not answer."""
    try:
        answer = run_captured([str(nsys), "export", "--help"], _ANSWER_TIMEOUT_S)
    except (OSError, subprocess.TimeoutExpired):
        return ""  # the export itself will say what is wrong
    return answer.stdout + answer.stderr


def _missing_nsys(report: Path) -> ExportError:
    what = f"{report} must be exported to SQLite first, and there is no nsys here"
    for older in places(report, NSYS_REPORT.stem_of(report)):
        if is_sqlite(older) and origin_of(older) is None:
            what = f"{older} is older than {report.name}, and there is no nsys here to export it again"
            break
    how = _export_command(report.name)
    return ExportError(what, f"Install Nsight Systems, or export on the machine that has it: {how}")


def _failed_export(nsys: Path, report: Path, finished: subprocess.CompletedProcess[str]) -> ExportError:
    message = last_words(finished.stderr) or last_words(finished.stdout)
    if any(phrase in message for phrase in _NOT_A_REPORT):
        return ExportError(
            f"{report} is not an Nsight Systems report, or only a part of one: {message}",
            "Copy it again, or capture again with nsys profile",
        )
    taken_by = _report_version(report)
    if taken_by and numbers_in(taken_by) > numbers_in(version := nsys_version(nsys)):
        return ExportError(
            f"{report} was taken by Nsight Systems {taken_by}, and {nsys} is {version}: too old to read it",
            f"Install a newer one, or export on the machine that took it: {_export_command(report.name)}",
        )
    reason = message or f"exit status {finished.returncode}"
    return ExportError(f"nsys export failed: {reason}", f"Try it by hand: {_export_command(str(report))}")


def last_words(output: str) -> str:
    """The last two lines of the output of ``nsys``, as one, without the progress bars between them."""
    lines = (line.strip() for line in re.split(r"[\r\n]", output))
    return " ".join([line for line in lines if line and not _PROGRESS.match(line)][-2:]).rstrip(".")


def _report_version(report: Path) -> str | None:
    """The version in the report's first bytes, ``2023.4.4.54``; reports of 2022 and before hold none."""
    with report.open("rb") as file:
        match = _REPORT_VERSION.search(file.read(128))
    return match[1].decode().replace("@", ".") if match else None


def _export_command(report: str) -> str:
    path = f"./{report}" if report.startswith("-") else report  # not to be taken for an option
    return f"nsys export --type sqlite {shlex.quote(path)}"


NSYS_REPORT = Source((".nsys-rep", ".qdrep"), _open, tells_origin=False)
"""A report of nsys: ``.qdrep`` until Nsight Systems 2021.3, ``.nsys-rep`` since."""
