"""Declares the input formats, recognizes the format of a file, and opens it.

A new format is a module with a function that opens its files as a :class:`~nsys_analyzer.trace.reader.Reader`, for
example as an :class:`~nsys_analyzer.trace.reader.ArrowReader` over tables in memory, and an entry of ``SOURCES``.
"""

from __future__ import annotations

import os
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
        suffixes: the suffixes of its files, with the approximate ratio of the size in memory to the file's size. If two
            suffixes match a name, the longer one must be first.
        place: the function that opens a file, as ``module:function``. The module is imported when a file is opened,
            because numpy and Arrow would slow down a command's help.
        shared_suffix: a suffix that other files also have.
        marks: a file with ``shared_suffix`` has this format if its first bytes contain one of these texts.
        makes_tables: whether the file itself contains no tables, and opening it makes tables from its content.
    """

    suffixes: Mapping[str, int]
    place: str
    shared_suffix: str = ""
    marks: tuple[bytes, ...] = ()
    makes_tables: bool = False

    def suffix_of(self, path: Path) -> str:
        """Returns the suffix that marks a file as this format; an empty text if the file has another format."""
        return next((suffix for suffix in self.suffixes if path.name.endswith(suffix)), "")

    def open(self, path: Path) -> Reader:
        """Opens a file for reading. Raises NsysAnalyzerError if the file cannot be read."""
        open_file: Callable[[Path], Reader] = resolve_name(self.place)
        return open_file(path)


EXPORT = Source({".sqlite": 1}, "nsys_analyzer.trace.reader:SqliteReader")
"""An SQLite export. A file with an unknown suffix is also opened as one, because its content may be SQLite."""

NSYS_REPORT = Source({".nsys-rep": 8}, "nsys_analyzer.trace.nsys_report:open_report")

KINETO = Source(
    {".pt.trace.json.gz": 15, ".pt.trace.json": 1, ".json.gz": 15, ".json": 1},
    "nsys_analyzer.trace.kineto:open_trace",
    shared_suffix=".json",
    marks=(b'"schemaVersion"', b'"traceEvents"'),
    makes_tables=True,
)
"""A trace of PyTorch's profiler, plain or compressed with gzip."""

FOLDER = Source({"_pqtdir": 4, "_arwdir": 1}, "nsys_analyzer.trace.reader:open_folder")
"""A folder of Parquet or Arrow files, one for each table. nsys adds the suffix to the report's name, but a folder is
recognized by its content.
"""

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
    """Returns whether a file in a folder is a capture: by its suffix, and by its first bytes for a shared suffix."""
    source = next((source for source in SOURCES if source.suffix_of(path)), None)
    if source is None or source.suffix_of(path) != source.shared_suffix:
        return source is not None
    try:
        if not path.is_file():  # opening a FIFO would wait for a writer
            return False
        with path.open("rb") as file:
            head = file.read(_HEAD_BYTES)
    except OSError:
        return False
    return any(mark in head for mark in source.marks)


def is_report(path: Path) -> bool:
    """Returns whether a file is a report of nsys according to its name."""
    return find_source(path) is NSYS_REPORT


def is_export_folder(path: Path) -> bool:
    """Returns whether a folder is an export of nsys: it contains a table that every version of nsys writes."""
    tables = (path / f"{name}{ending}" for name in SIGNATURE_TABLES for ending in TABLE_ENDINGS)
    return any(os.path.isfile(table) for table in tables)  # noqa: PTH113 - pathlib raises without permission


def capture_suffixes(*, with_shared: bool = True) -> tuple[str, ...]:
    """Returns the suffixes of all formats of files, optionally without suffixes that other files also have."""
    return tuple(
        suffix for source in SOURCES for suffix in source.suffixes if with_shared or suffix != source.shared_suffix
    )


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


def check_output_is_no_input(output: Path, inputs: Iterable[Path]) -> None:
    """Checks that a file to write is not one of the files that are read, also through links and other spellings.

    Args:
        output: the file to write.
        inputs: traces, files of timings, and folders that contain them.

    Raises:
        NsysAnalyzerError: the output is an input, the export of an input, or the manifest beside an input.
    """
    for path in inputs if output.exists() else ():
        beside = path.parent.glob(f"{escape(trace_stem(path))}.*")
        files = (*path.glob("*"), *path.glob("*/*")) if path.is_dir() else (*beside, path.with_name(_MANIFEST))
        ending = (_MANIFEST, ".csv", ".jsonl", *TABLE_ENDINGS) if path.is_dir() else _MANIFEST
        for file in (path, *(file for file in files if is_capture(file) or file.name.endswith(ending))):
            if file.exists() and file.samefile(output):
                role = "the input itself" if file == path else f"{file}, which is read"
                raise NsysAnalyzerError(f"{output} is {role}", "Name another file with -o")
