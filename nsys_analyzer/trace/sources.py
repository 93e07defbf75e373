"""The input formats: which files each takes, how one is opened, and how a report of nsys is exported first.

A new format is a function that opens its files as a :class:`~nsys_analyzer.trace.reader.Reader`, as with
:class:`~nsys_analyzer.trace.reader.ArrowReader` over tables in memory, and an entry in ``SOURCES``.
"""

from __future__ import annotations

import functools
import os
import re
import shlex
import subprocess
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from glob import escape
from pathlib import Path
from typing import TYPE_CHECKING

from nsys_analyzer.errors import ExportError, NsysAnalyzerError
from nsys_analyzer.system.atomic_write import atomic_write
from nsys_analyzer.system.nsys import find_nsys, nsys_version, version_key
from nsys_analyzer.system.process import run_captured
from nsys_analyzer.trace.schema import EXPORT as EXPORT_TABLE
from nsys_analyzer.trace.schema import SIGNATURE_TABLES, TABLE_ENDINGS

if TYPE_CHECKING:
    from nsys_analyzer.trace.reader import Reader

REPORT_SUFFIXES = (".nsys-rep", ".qdrep")
"""The suffixes of reports: ``.qdrep`` up to Nsight Systems 2021.3, ``.nsys-rep`` since then."""

FOLDER_ENDINGS = ("_pqtdir", "_arwdir")
"""The endings of folders of Parquet or Arrow files, which nsys adds to the report's name."""

_SQLITE_MAGIC = b"SQLite format 3\x00"
#: The export option that keeps the payloads of NCCL's ranges: ranks, communicators, message sizes.
_BLOBS_OPTION = "--include-blobs"
_ANSWER_TIMEOUT_S = 60
_PROGRESS = re.compile(r"(Exporting|Processing) \d+ events:")
_REPORT_VERSION = re.compile(rb"Report (\d{4}(?:@\d+)+)")  # "NVIDIA Tegra Profiler Report 2023@4@4@54-..."
_NOT_A_REPORT = ("Version tag is not found", "Cannot read from stream", "magic number mismatch")


_HEAD_BYTES = 1024
_MANIFEST = "manifest.json"


@dataclass(frozen=True)
class Source:
    """An input format.

    Attributes:
        suffixes: the suffixes of its files. If two of them match a name, the longer one must be first.
        open: opens a file for reading.
    """

    suffixes: tuple[str, ...]
    open: Callable[[Path], Reader]

    def suffix_of(self, path: Path) -> str:
        """Returns the suffix by which a file has this format; empty if it has another format."""
        return next((ending for ending in self.suffixes if path.name.endswith(ending)), "")


# The functions import the readers when they are called, because numpy and Arrow would slow down a command's help.


def _open_sqlite(path: Path) -> Reader:
    from nsys_analyzer.trace.reader import SqliteReader

    return SqliteReader(path)


def _open_folder(path: Path) -> Reader:
    from nsys_analyzer.trace.reader import open_folder

    return open_folder(path)


def _open_report(path: Path) -> Reader:
    export = ensure_export(path)
    return _open_folder(export) if export.is_dir() else _open_sqlite(export)


def _open_trace(path: Path) -> Reader:
    from nsys_analyzer.trace.kineto import read_tables
    from nsys_analyzer.trace.reader import ArrowReader

    return ArrowReader(path, read_tables(path))


EXPORT = Source((".sqlite",), _open_sqlite)
"""An SQLite export. A file with an unknown suffix is also opened as one, because its content may be SQLite."""

NSYS_REPORT = Source(REPORT_SUFFIXES, _open_report)

KINETO = Source(
    (".pt.trace.json.gz", ".pt.trace.json", ".json.gz", ".json"),
    _open_trace,
)
"""A trace of PyTorch's profiler, plain or compressed with gzip."""

FOLDER = Source(FOLDER_ENDINGS, _open_folder)
"""A folder with one file per table. It is recognized by its content, not by its name."""

SOURCES: tuple[Source, ...] = (EXPORT, NSYS_REPORT, KINETO)
"""The formats of files."""


def find_source(path: Path) -> Source:
    """Returns the format of a file by its name, or of a folder by its content."""
    if is_export_folder(path):
        return FOLDER
    return next((source for source in SOURCES if source.suffix_of(path)), EXPORT)


def open_capture(path: Path) -> Reader:
    """Opens a capture of any format. A report of nsys is exported first unless it has an up-to-date export.

    Raises:
        TraceError: the file is missing, damaged, or in another format.
        ExportError: a report could not be exported.
    """
    return find_source(path).open(path)


def is_capture(path: Path) -> bool:
    """Returns whether a file in a folder is a capture: by its suffix, and for ``.json`` also by its first bytes."""
    ending = next((ending for source in SOURCES if (ending := source.suffix_of(path))), "")
    return _begins_as_trace(path) if ending == ".json" else bool(ending)


def _begins_as_trace(path: Path) -> bool:
    try:
        if not path.is_file():  # opening a FIFO would wait for a writer
            return False
        with path.open("rb") as file:
            head = file.read(_HEAD_BYTES)
    except OSError:
        return False
    return b'"schemaVersion"' in head or b'"traceEvents"' in head


def is_report(path: Path) -> bool:
    """Returns whether a file is a report of nsys according to its name."""
    return find_source(path) is NSYS_REPORT


def trace_stem(capture: Path) -> str:
    """Returns the name of a capture without its suffix: ``a`` for ``a.nsys-rep``, ``a.json.gz`` and ``a.json``.

    It differs from ``Path.stem``: ``2.7B_ctx256`` has no suffix, and neither has a file that is called ``.sqlite``.
    """
    return capture.name.removesuffix(find_source(capture).suffix_of(capture)) or capture.name


def check_output_is_no_input(output: Path, inputs: Iterable[Path]) -> None:
    """Checks that a file to write is not one of the files that are read, also through links and other spellings.

    Args:
        output: the file to write.
        inputs: traces, files of timings, and folders that contain them.

    Raises:
        NsysAnalyzerError: the output is an input, an export of one, or a manifest beside one.
    """
    for path in inputs if output.exists() else ():
        beside = path.parent.glob(f"{escape(trace_stem(path))}.*")
        files = (*path.glob("*"), *path.glob("*/*")) if path.is_dir() else (*beside, path.with_name(_MANIFEST))
        ending = (_MANIFEST, ".csv", ".jsonl", *TABLE_ENDINGS) if path.is_dir() else _MANIFEST
        for file in (path, *(file for file in files if is_capture(file) or file.name.endswith(ending))):
            if file.exists() and file.samefile(output):
                role = "the input itself" if file == path else f"{file}, which is read"
                raise NsysAnalyzerError(f"{output} is {role}", "Name another file with -o")


# --- the export of a report of nsys


def ensure_export(report: Path, timeout_s: float | None = None) -> Path:
    """Returns the export beside a report; exports the report to SQLite if there is no up-to-date export.

    The export of ``X.nsys-rep`` is ``X.sqlite``, ``X_pqtdir`` or ``X_arwdir``. An export that is older than the report
    is replaced. Without nsys it is used all the same, because copying the report may have changed its time.

    Raises:
        ExportError: the report does not exist, its folder cannot be written, or nsys is missing, fails, or takes longer
            than ``timeout_s``.
    """
    if not report.is_file():
        raise ExportError(f"{report} does not exist or is not a file", f"Look for it: ls {report.parent}")
    if not report.stat().st_size:
        raise ExportError(f"{report} is empty", "Capture again: the run ended before nsys wrote its report")
    exports = [report.with_name(f"{trace_stem(report)}{ending}") for ending in (*FOLDER_ENDINGS, ".sqlite")]
    existing = [export for export in exports if is_sqlite(export) or is_export_folder(export)]
    newest, export = max(existing, key=export_time_ns, default=None), exports[-1]
    if newest and is_export_of(newest, report):
        return newest
    nsys = find_nsys()
    if nsys is None:
        if newest:
            return newest
        command = _export_command(report.name)
        raise ExportError(
            f"{report} must be exported to SQLite first, and there is no nsys here",
            f"Install Nsight Systems, or export on the machine that has it: {command}",
        )
    try:
        with atomic_write(export, source=report) as unfinished:
            _export(nsys, report, unfinished, timeout_s)
    except OSError as error:
        hint = f"Export it to another folder: {_export_command(str(report))} --output FILE.sqlite"
        raise ExportError(f"The export of {report} cannot be written: {error}", hint) from error
    return export


def is_export_of(export: Path, report: Path) -> bool:
    """Returns whether an export exists and is not older than its report."""
    return (is_sqlite(export) or is_export_folder(export)) and export_time_ns(export) >= report.stat().st_mtime_ns


def is_export_folder(path: Path) -> bool:
    """Returns whether a folder is an export of nsys: it contains a table that every version of nsys writes."""
    tables = (path / f"{name}{ending}" for name in SIGNATURE_TABLES for ending in TABLE_ENDINGS)
    return any(os.path.isfile(table) for table in tables)  # noqa: PTH113 - pathlib raises without permission


def is_sqlite(path: Path) -> bool:
    """Returns whether a file exists and starts like a SQLite database."""
    try:
        if not path.is_file():  # opening a FIFO would wait for a writer
            return False
        with path.open("rb") as file:
            return file.read(len(_SQLITE_MAGIC)) == _SQLITE_MAGIC
    except OSError:
        return False


def export_time_ns(export: Path) -> int:
    """Returns the time (ns) at which an export was written, for a folder that of its export table; 0 if missing."""
    tables = (export / f"{name}{ending}" for name in EXPORT_TABLE.aliases for ending in TABLE_ENDINGS)
    files = [export] if export.is_file() else [table for table in tables if table.is_file()]
    return max((file.stat().st_mtime_ns for file in files), default=0)


def _export(nsys: Path, report: Path, output: Path, timeout_s: float | None) -> None:
    options = ["--type", "sqlite", "--force-overwrite", "true", "--output", str(output.absolute())]
    if _BLOBS_OPTION in _known_options(nsys):
        options.append(f"{_BLOBS_OPTION}=true")
    try:  # absolute paths cannot be mistaken for options
        finished = run_captured([str(nsys), "export", *options, str(report.absolute())], timeout_s)
    except OSError as error:
        raise ExportError(f"{nsys} cannot be run: {error}", "Set NSYS to an nsys that can be run") from error
    except subprocess.TimeoutExpired as error:
        raise ExportError(
            f"nsys export of {report} was stopped after {timeout_s:g} s",
            f"Run it without a time limit: {_export_command(str(report))}",
        ) from error
    if finished.returncode != 0 or not is_sqlite(output):
        raise _failed_export(nsys, report, finished)


@functools.cache
def _known_options(nsys: Path) -> str:
    """Returns the output of ``nsys export --help``; empty if it fails."""
    try:
        answer = run_captured([str(nsys), "export", "--help"], _ANSWER_TIMEOUT_S)
    except (OSError, subprocess.TimeoutExpired):
        return ""  # the export itself will report the problem
    return answer.stdout + answer.stderr


def _failed_export(nsys: Path, report: Path, finished: subprocess.CompletedProcess[str]) -> ExportError:
    message = last_output_lines(finished.stderr) or last_output_lines(finished.stdout)
    if any(phrase in message for phrase in _NOT_A_REPORT):
        return ExportError(
            f"{report} is not an Nsight Systems report, or only a part of one: {message}",
            "Copy it again, or capture again with nsys profile",
        )
    recorded_with = _report_version(report)
    if recorded_with and version_key(recorded_with) > version_key(version := nsys_version(nsys)):
        return ExportError(
            f"{report} was recorded with Nsight Systems {recorded_with}, and {nsys} is {version}: too old to read it",
            f"Install a newer one, or export on the machine that recorded it: {_export_command(report.name)}",
        )
    reason = message or f"exit status {finished.returncode}"
    return ExportError(f"nsys export failed: {reason}", f"Run it yourself: {_export_command(str(report))}")


def last_output_lines(output: str) -> str:
    """Returns the last two lines of the output of ``nsys`` as one line, without progress bars."""
    lines = (line.strip() for line in re.split(r"[\r\n]", output))
    return " ".join([line for line in lines if line and not _PROGRESS.match(line)][-2:]).rstrip(".")


def _report_version(report: Path) -> str | None:
    """Returns the version in a report's first bytes, such as ``2023.4.4.54``; reports up to 2022 do not contain it."""
    with report.open("rb") as file:
        match = _REPORT_VERSION.search(file.read(128))
    return match[1].decode().replace("@", ".") if match else None


def _export_command(report: str) -> str:
    return f"nsys export --type sqlite {shlex.quote(report)}"
