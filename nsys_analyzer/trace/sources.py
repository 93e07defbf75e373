"""Declares the input formats, recognizes the format of a file, and opens it.

A new format is a module with a function that opens its files as a :class:`~nsys_analyzer.trace.reader.Reader`, for
example as an :class:`~nsys_analyzer.trace.reader.ArrowReader` over tables in memory, and an entry of ``SOURCES``.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from glob import escape
from pathlib import Path
from pkgutil import resolve_name
from typing import TYPE_CHECKING

from nsys_analyzer.errors import NsysAnalyzerError
from nsys_analyzer.trace.schema import SIGNATURE_TABLES, TABLE_ENDINGS

if TYPE_CHECKING:
    from nsys_analyzer.trace.reader import Reader

_HEAD_BYTES = 1024
_MANIFEST = "manifest.json"


@dataclass(frozen=True)
class Source:
    """An input format.

    Attributes:
        suffixes: the suffixes of the names, with the approximate ratio of the size in memory to the size on disk. If
            two suffixes match a name, the longer one must be first.
        opener: the function that opens a capture, as ``module:function``. The module is imported when a capture is
            opened, because numpy and Arrow would slow down a command's help.
        shared_suffix: a suffix that files of other programs also have.
        marks: texts of which a file with ``shared_suffix`` must contain one in its first bytes.
        makes_tables: whether the file itself contains no tables, so that opening it makes tables from its content.
        is_folder: whether a capture is a folder with one file per table. It is recognized by its content, not by its
            suffix.
    """

    suffixes: Mapping[str, int]
    opener: str
    shared_suffix: str = ""
    marks: tuple[bytes, ...] = ()
    makes_tables: bool = False
    is_folder: bool = False

    def matches(self, path: Path) -> bool:
        """Returns whether a path has this format: a file according to its suffix, a folder according to its content."""
        return is_export_folder(path) if self.is_folder else bool(self.suffix_of(path))

    def suffix_of(self, path: Path) -> str:
        """Returns the suffix of this format that a name ends with; an empty text if there is none."""
        return next((suffix for suffix in self.suffixes if path.name.endswith(suffix)), "")

    def open(self, path: Path) -> Reader:
        """Opens a capture for reading. Raises NsysAnalyzerError if the capture cannot be read."""
        open_path: Callable[[Path], Reader] = resolve_name(self.opener)
        return open_path(path)


#: A SQLite export of nsys.
EXPORT = Source({".sqlite": 1}, "nsys_analyzer.trace.reader:SqliteReader")

NSYS_REPORT = Source({".nsys-rep": 8}, "nsys_analyzer.trace.nsys_report:open_report")

#: A trace of PyTorch's profiler, plain or compressed with gzip.
KINETO = Source(
    {".pt.trace.json.gz": 15, ".pt.trace.json": 1, ".json.gz": 15, ".json": 1},
    "nsys_analyzer.trace.kineto:open_trace",
    shared_suffix=".json",
    marks=(b'"schemaVersion"', b'"traceEvents"'),
    makes_tables=True,
)

#: A folder of Parquet or Arrow files. nsys appends the suffix to the report's name.
FOLDER = Source({"_pqtdir": 4, "_arwdir": 1}, "nsys_analyzer.trace.reader:open_folder", is_folder=True)

#: All formats. If two formats match a path, the first one is used.
SOURCES: tuple[Source, ...] = (FOLDER, EXPORT, NSYS_REPORT, KINETO)


def find_source(path: Path) -> Source:
    """Returns the format of a capture. A path that matches no format may be a SQLite export with an unknown suffix."""
    return next((source for source in SOURCES if source.matches(path)), EXPORT)


def open_capture(path: Path) -> Reader:
    """Opens a capture of any format. A report of nsys is exported first unless it has an up-to-date export.

    Raises:
        TraceError: the file is missing, damaged, or in another format.
        ExportError: a report could not be exported.
    """
    return find_source(path).open(path)


def is_capture(path: Path) -> bool:
    """Returns whether a path inside a folder is a capture. Hidden folders are no captures.

    A file with a shared suffix is recognized by its first bytes.
    """
    source = next((source for source in SOURCES if source.matches(path)), None)
    if source is None or source.is_folder:
        return source is not None and not path.name.startswith(".")
    if source.suffix_of(path) != source.shared_suffix:
        return True
    try:
        if not path.is_file():  # skips a named pipe, because opening it blocks until a process writes
            return False
        with path.open("rb") as file:
            first_bytes = file.read(_HEAD_BYTES)
    except OSError:
        return False
    return any(mark in first_bytes for mark in source.marks)


def is_report(path: Path) -> bool:
    """Returns whether a file is a report of nsys according to its name."""
    return find_source(path) is NSYS_REPORT


def is_export_folder(path: Path) -> bool:
    """Returns whether a folder is an export of nsys: it contains a table that every version of nsys writes."""
    tables = (path / f"{name}{ending}" for name in SIGNATURE_TABLES for ending in TABLE_ENDINGS)
    return any(os.path.isfile(table) for table in tables)  # noqa: PTH113 - pathlib raises without permission


def capture_suffixes(*, with_shared: bool = True) -> tuple[str, ...]:
    """Returns the suffixes of the formats whose captures are files.

    Args:
        with_shared: whether to include suffixes that files of other programs also have.
    """
    formats = [source for source in SOURCES if not source.is_folder]
    return tuple(suffix for form in formats for suffix in form.suffixes if with_shared or suffix != form.shared_suffix)


def estimate_size(path: Path) -> int:
    """Returns the estimated size of a capture in memory, in bytes. Raises OSError if the capture cannot be found."""
    if path.is_dir():
        tables = (file for file in path.iterdir() if file.suffix in TABLE_ENDINGS)
        return sum(file.stat().st_size * TABLE_ENDINGS[file.suffix] for file in tables)
    source = find_source(path)
    return path.stat().st_size * source.suffixes.get(source.suffix_of(path), 1)


def trace_stem(capture: Path) -> str:
    """Returns the name of a capture without its suffix: ``a`` for ``a.nsys-rep``, ``a.json.gz`` and ``a.json``.

    It differs from ``Path.stem``: ``2.7B_ctx256`` has no suffix, and neither has a file that is called ``.sqlite``.
    """
    return capture.name.removesuffix(find_source(capture).suffix_of(capture)) or capture.name


def find_files_beside(capture: Path, pattern: str) -> list[Path]:
    """Returns the files in the capture's folder whose names are the capture's stem and a match of the pattern."""
    names = re.compile(re.escape(trace_stem(capture)) + pattern)
    return sorted(path for path in capture.parent.iterdir() if names.fullmatch(path.name))


def check_output_is_no_input(output: Path, inputs: Iterable[Path]) -> None:
    """Checks that the output file is not one of the input files, even if links or other spellings hide that.

    Args:
        output: the file to write.
        inputs: traces, tables of times, and folders that contain them.

    Raises:
        NsysAnalyzerError: the output is an input, the export of an input, or the manifest beside an input.
    """
    for path in inputs if output.exists() else ():
        siblings = path.parent.glob(f"{escape(trace_stem(path))}.*")
        files = (*path.glob("*"), *path.glob("*/*")) if path.is_dir() else (*siblings, path.with_name(_MANIFEST))
        ending = (_MANIFEST, ".csv", ".jsonl", *TABLE_ENDINGS) if path.is_dir() else _MANIFEST
        for file in (path, *(file for file in files if is_capture(file) or file.name.endswith(ending))):
            if file.exists() and file.samefile(output):
                role = "the input itself" if file == path else f"{file}, which is read"
                raise NsysAnalyzerError(f"{output} is {role}", "Name another file with -o")
