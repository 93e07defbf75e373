"""Finds the export of an nsys report, or exports the report with nsys."""

from __future__ import annotations

import functools
import re
import shlex
import subprocess
from pathlib import Path
from typing import TYPE_CHECKING

from nsys_analyzer.errors import ExportError
from nsys_analyzer.system.atomic_write import atomic_write
from nsys_analyzer.system.machine import find_nsys, nsys_version, version_key
from nsys_analyzer.system.process import run_captured
from nsys_analyzer.trace.schema import EXPORT as EXPORT_TABLE
from nsys_analyzer.trace.schema import TABLE_ENDINGS
from nsys_analyzer.trace.sources import FOLDER, is_export_folder, trace_stem

if TYPE_CHECKING:
    from nsys_analyzer.trace.reader import Reader

_SQLITE_MAGIC = b"SQLite format 3\x00"
#: The export option that keeps the payloads of NCCL's ranges, which contain ranks, communicators and message sizes.
_BLOBS_OPTION = "--include-blobs"
_HELP_TIMEOUT_S = 60
_PROGRESS_BAR = re.compile(r"(Exporting|Processing) \d+ events:")
_REPORT_VERSION = re.compile(rb"Report (\d{4}(?:@\d+)+)")  # "NVIDIA Tegra Profiler Report 2023@4@4@54-..."
#: Parts of the messages with which ``nsys export`` rejects a file that is not a complete report.
_DAMAGED_REPORT_MESSAGES = ("Version tag is not found", "Cannot read from stream", "magic number mismatch")


def open_report(report: Path) -> Reader:
    """Opens the export of a report, which is made first if needed. Raises the errors of :func:`ensure_export`."""
    # Imported here, because they need numpy and ensure_export does not.
    from nsys_analyzer.trace.reader import SqliteReader, open_folder

    export = ensure_export(report)
    return open_folder(export) if export.is_dir() else SqliteReader(export)


def ensure_export(report: Path, timeout_s: float | None = None) -> Path:
    """Returns the export beside a report; exports the report to SQLite if there is no up-to-date export.

    The export of ``X.nsys-rep`` is ``X.sqlite``, ``X_pqtdir`` or ``X_arwdir``. An export that is older than the report
    is replaced. If nsys is missing, the older export is used, because copying the report may have changed the report's
    modification time.

    Raises:
        ExportError: the report does not exist, its folder cannot be written, or nsys is missing, fails, or takes longer
            than ``timeout_s``.
    """
    if not report.is_file():
        raise ExportError(f"{report} does not exist or is not a file", f"Look for it: ls {report.parent}")
    if not report.stat().st_size:
        raise ExportError(f"{report} is empty", "Capture again: the run ended before nsys wrote its report")
    exports = [report.with_name(f"{trace_stem(report)}{ending}") for ending in (*FOLDER.suffixes, ".sqlite")]
    existing_exports = [export for export in exports if is_sqlite(export) or is_export_folder(export)]
    newest_export, export = max(existing_exports, key=export_time_ns, default=None), exports[-1]
    if newest_export and is_export_of(newest_export, report):
        return newest_export
    nsys = find_nsys()
    if nsys is None:
        if newest_export:
            return newest_export
        command = _make_export_command(report.name)
        raise ExportError(
            f"{report} must be exported to SQLite first, and there is no nsys here",
            f"Install Nsight Systems, or export on the machine that has it: {command}",
        )
    try:
        with atomic_write(export, source=report) as unfinished:
            _run_export(nsys, report, unfinished, timeout_s)
    except OSError as error:
        hint = f"Export it to another folder: {_make_export_command(str(report))} --output FILE.sqlite"
        raise ExportError(f"The export of {report} cannot be written: {error}", hint) from error
    return export


def is_export_of(export: Path, report: Path) -> bool:
    """Returns whether an export exists and is at least as new as its report."""
    return (is_sqlite(export) or is_export_folder(export)) and export_time_ns(export) >= report.stat().st_mtime_ns


def is_sqlite(path: Path) -> bool:
    """Returns whether a file exists and starts like a SQLite database."""
    try:
        if not path.is_file():  # skips a named pipe, because opening it blocks until a process writes
            return False
        with path.open("rb") as file:
            return file.read(len(_SQLITE_MAGIC)) == _SQLITE_MAGIC
    except OSError:
        return False


def export_time_ns(export: Path) -> int:
    """Returns the modification time (ns) of an export, or of the table ``export`` in a folder; 0 if it is missing."""
    tables = (export / f"{name}{ending}" for name in EXPORT_TABLE.aliases for ending in TABLE_ENDINGS)
    files = [export] if export.is_file() else [table for table in tables if table.is_file()]
    return max((file.stat().st_mtime_ns for file in files), default=0)


def _run_export(nsys: Path, report: Path, output: Path, timeout_s: float | None) -> None:
    """Runs ``nsys export`` to write a report as SQLite; raises ExportError if it fails."""
    options = ["--type", "sqlite", "--force-overwrite", "true", "--output", str(output.absolute())]
    if _BLOBS_OPTION in _read_export_help(nsys):
        options.append(f"{_BLOBS_OPTION}=true")
    try:  # the paths are absolute, so that nsys does not read a name with a leading dash as an option
        finished_process = run_captured([str(nsys), "export", *options, str(report.absolute())], timeout_s)
    except OSError as error:
        raise ExportError(f"{nsys} cannot be run: {error}", "Set NSYS to an nsys that can be run") from error
    except subprocess.TimeoutExpired as error:
        raise ExportError(
            f"nsys export of {report} was stopped after {timeout_s:g} s",
            f"Run it without a time limit: {_make_export_command(str(report))}",
        ) from error
    if finished_process.returncode != 0 or not is_sqlite(output):
        raise _make_export_error(nsys, report, finished_process)


@functools.cache
def _read_export_help(nsys: Path) -> str:
    """Returns the output of ``nsys export --help``; an empty text if the command fails."""
    try:
        answer = run_captured([str(nsys), "export", "--help"], _HELP_TIMEOUT_S)
    except (OSError, subprocess.TimeoutExpired):
        return ""  # ignored here, because the export reports the problem
    return answer.stdout + answer.stderr


def _make_export_error(nsys: Path, report: Path, finished_process: subprocess.CompletedProcess[str]) -> ExportError:
    """Returns the error for a failed ``nsys export``, with a hint that fits the reason."""
    message = last_output_lines(finished_process.stderr) or last_output_lines(finished_process.stdout)
    if any(phrase in message for phrase in _DAMAGED_REPORT_MESSAGES):
        return ExportError(
            f"{report} is not an Nsight Systems report, or only a part of one: {message}",
            "Copy it again, or capture again with nsys profile",
        )
    with report.open("rb") as file:  # the first bytes of a report since 2023 contain the version of nsys
        match = _REPORT_VERSION.search(file.read(128))
    recorded_with = match[1].decode().replace("@", ".") if match else None
    if recorded_with and version_key(recorded_with) > version_key(version := nsys_version(nsys)):
        return ExportError(
            f"{report} was recorded with Nsight Systems {recorded_with}, and {nsys} is {version}: too old to read it",
            f"Install a newer one, or export on the machine that recorded it: {_make_export_command(report.name)}",
        )
    reason = message or f"exit status {finished_process.returncode}"
    return ExportError(f"nsys export failed: {reason}", f"Run it yourself: {_make_export_command(str(report))}")


def last_output_lines(output: str) -> str:
    """Returns the last two lines of the output of ``nsys`` as one line, without progress bars."""
    lines = (line.strip() for line in re.split(r"[\r\n]", output))
    return " ".join([line for line in lines if line and not _PROGRESS_BAR.match(line)][-2:]).rstrip(".")


def _make_export_command(report: str) -> str:
    return f"nsys export --type sqlite {shlex.quote(report)}"
