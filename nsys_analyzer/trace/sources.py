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
"""Of reports: ``.qdrep`` until Nsight Systems 2021.3, ``.nsys-rep`` since."""

FOLDER_ENDINGS = ("_pqtdir", "_arwdir")
"""How nsys calls an export that is a folder of Parquet or Arrow files, behind the report's name."""

_SQLITE_MAGIC = b"SQLite format 3\x00"
#: Keeps what NCCL notes of its calls: ranks, communicators, message sizes.
_BLOBS = "--include-blobs"
_ANSWER_TIMEOUT_S = 60
_PROGRESS = re.compile(r"(Exporting|Processing) \d+ events:")
_REPORT_VERSION = re.compile(rb"Report (\d{4}(?:@\d+)+)")  # "NVIDIA Tegra Profiler Report 2023@4@4@54-..."
_NOT_A_REPORT = ("Version tag is not found", "Cannot read from stream", "magic number mismatch")


_HEAD = 1024
_MANIFEST = "manifest.json"


@dataclass(frozen=True)
class Source:
    """An input format.

    Attributes:
        suffixes: of its files, the longer of two endings first.
        open: opens a file.
    """

    suffixes: tuple[str, ...]
    open: Callable[[Path], Reader]

    def suffix_of(self, path: Path) -> str:
        """Returns the ending by which it takes a file, empty where it does not take it."""
        return next((ending for ending in self.suffixes if path.name.endswith(ending)), "")


# The readers need numpy and Arrow, which a command's help does not.


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
"""An SQLite export; so is a file that no format takes, for its content may be one."""

NSYS_REPORT = Source(REPORT_SUFFIXES, _open_report)

KINETO = Source(
    (".pt.trace.json.gz", ".pt.trace.json", ".json.gz", ".json"),
    _open_trace,
)
"""A trace of PyTorch's profiler, plain or compressed with gzip."""

FOLDER = Source(FOLDER_ENDINGS, _open_folder)
"""A folder with a file for each table is one capture, whatever it is called."""

SOURCES: tuple[Source, ...] = (EXPORT, NSYS_REPORT, KINETO)
"""The formats of files."""


def find_source(path: Path) -> Source:
    """Returns the format of a file, by its name, or of a folder."""
    if is_export_folder(path):
        return FOLDER
    return next((source for source in SOURCES if source.suffix_of(path)), EXPORT)


def open_capture(path: Path) -> Reader:
    """Opens a capture of any format; a report of nsys is exported first, where no current export is there.

    Raises:
        TraceError: the file is absent, damaged, or of another format.
        ExportError: a report could not be exported.
    """
    return find_source(path).open(path)


def is_capture(path: Path) -> bool:
    """Returns whether a file in a folder is a capture: by its name, or, of a plain ``.json``, by how it begins."""
    ending = next((ending for source in SOURCES if (ending := source.suffix_of(path))), "")
    return _begins_as_trace(path) if ending == ".json" else bool(ending)


def _begins_as_trace(path: Path) -> bool:
    try:
        if not path.is_file():  # to open a FIFO waits for its writer
            return False
        with path.open("rb") as file:
            head = file.read(_HEAD)
    except OSError:
        return False
    return b'"schemaVersion"' in head or b'"traceEvents"' in head


def is_report(path: Path) -> bool:
    """Returns whether a file is a report of nsys, by its name."""
    return find_source(path) is NSYS_REPORT


def trace_stem(capture: Path) -> str:
    """Returns the name that a capture shares with its export: ``a`` of ``a.nsys-rep``, ``a.json.gz`` and ``a.json``.

    Not ``Path.stem``: what follows the point of ``2.7B_ctx256`` is no suffix. Nor is all of ``.sqlite``.
    """
    return capture.name.removesuffix(find_source(capture).suffix_of(capture)) or capture.name


def check_output_is_no_input(output: Path, inputs: Iterable[Path]) -> None:
    """Makes sure that a file to write is none of those that are read: hard links, symbolic links and spellings count.

    Args:
        output: the file to write.
        inputs: traces, files of timings, and folders that hold them.

    Raises:
        NsysAnalyzerError: it is one of the inputs, a manifest of theirs, or another form of one.
    """
    for path in inputs if output.exists() else ():
        beside = path.parent.glob(f"{escape(trace_stem(path))}.*")
        files = (*path.glob("*"), *path.glob("*/*")) if path.is_dir() else (*beside, path.with_name(_MANIFEST))
        ending = (_MANIFEST, ".csv", ".jsonl", *TABLE_ENDINGS) if path.is_dir() else _MANIFEST
        for file in (path, *(file for file in files if is_capture(file) or file.name.endswith(ending))):
            if file.exists() and file.samefile(output):
                named = "the input itself" if file == path else f"{file}, which is read"
                raise NsysAnalyzerError(f"{output} is {named}", "Name another file with -o")


# --- the export of a report of nsys


def ensure_export(report: Path, timeout_s: float | None = None) -> Path:
    """Returns the export of a report that stands beside it, made as a SQLite file where there is none.

    It is ``X.sqlite``, ``X_pqtdir`` or ``X_arwdir`` beside the report ``X``. One that is older than the report is
    exported again. Without nsys it is returned all the same: a copied file has the time of its copying.

    Raises:
        ExportError: there is no such report, its folder cannot be written, or nsys is missing, fails, or takes longer
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
        what = f"{report} must be exported to SQLite first, and there is no nsys here"
        how = _export_command(report.name)
        raise ExportError(what, f"Install Nsight Systems, or export on the machine that has it: {how}")
    try:
        with atomic_write(export, source=report) as unfinished:
            _export(nsys, report, unfinished, timeout_s)
    except OSError as error:
        hint = f"Export it to another place: {_export_command(str(report))} --output FILE.sqlite"
        raise ExportError(f"The export of {report} cannot be written: {error}", hint) from error
    return export


def is_export_of(export: Path, report: Path) -> bool:
    """Returns whether an export is there that is no older than the report of its name."""
    return (is_sqlite(export) or is_export_folder(export)) and export_time_ns(export) >= report.stat().st_mtime_ns


def is_export_folder(path: Path) -> bool:
    """Returns whether a folder is an export of nsys, and none of captures: by the files that each version writes."""
    tables = (path / f"{name}{ending}" for name in SIGNATURE_TABLES for ending in TABLE_ENDINGS)
    return any(os.path.isfile(table) for table in tables)  # noqa: PTH113 - pathlib raises where one may not look


def is_sqlite(path: Path) -> bool:
    """Returns whether a file is there and starts as a SQLite database does."""
    try:
        if not path.is_file():  # to open a FIFO waits for its writer
            return False
        with path.open("rb") as file:
            return file.read(len(_SQLITE_MAGIC)) == _SQLITE_MAGIC
    except OSError:
        return False


def export_time_ns(export: Path) -> int:
    """Returns when an export was written, of a folder the table about it; 0 for a link that leads nowhere."""
    tables = (export / f"{name}{ending}" for name in EXPORT_TABLE.aliases for ending in TABLE_ENDINGS)
    files = [export] if export.is_file() else [table for table in tables if table.is_file()]
    return max((file.stat().st_mtime_ns for file in files), default=0)


def _export(nsys: Path, report: Path, output: Path, timeout_s: float | None) -> None:
    options = ["--type", "sqlite", "--force-overwrite", "true", "--output", str(output.absolute())]
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
    if finished.returncode != 0 or not is_sqlite(output):
        raise _failed_export(nsys, report, finished)


@functools.cache
def _known_options(nsys: Path) -> str:
    """Returns what ``nsys export --help`` says; nothing where it does not answer."""
    try:
        answer = run_captured([str(nsys), "export", "--help"], _ANSWER_TIMEOUT_S)
    except (OSError, subprocess.TimeoutExpired):
        return ""  # the export itself will say what is wrong
    return answer.stdout + answer.stderr


def _failed_export(nsys: Path, report: Path, finished: subprocess.CompletedProcess[str]) -> ExportError:
    message = last_output_lines(finished.stderr) or last_output_lines(finished.stdout)
    if any(phrase in message for phrase in _NOT_A_REPORT):
        return ExportError(
            f"{report} is not an Nsight Systems report, or only a part of one: {message}",
            "Copy it again, or capture again with nsys profile",
        )
    taken_by = _report_version(report)
    if taken_by and version_key(taken_by) > version_key(version := nsys_version(nsys)):
        return ExportError(
            f"{report} was taken by Nsight Systems {taken_by}, and {nsys} is {version}: too old to read it",
            f"Install a newer one, or export on the machine that took it: {_export_command(report.name)}",
        )
    reason = message or f"exit status {finished.returncode}"
    return ExportError(f"nsys export failed: {reason}", f"Try it by hand: {_export_command(str(report))}")


def last_output_lines(output: str) -> str:
    """Returns the last two lines of the output of ``nsys``, as one, without the progress bars between them."""
    lines = (line.strip() for line in re.split(r"[\r\n]", output))
    return " ".join([line for line in lines if line and not _PROGRESS.match(line)][-2:]).rstrip(".")


def _report_version(report: Path) -> str | None:
    """Returns the version in the report's first bytes, ``2023.4.4.54``; reports of 2022 and before hold none."""
    with report.open("rb") as file:
        match = _REPORT_VERSION.search(file.read(128))
    return match[1].decode().replace("@", ".") if match else None


def _export_command(report: str) -> str:
    return f"nsys export --type sqlite {shlex.quote(report)}"
