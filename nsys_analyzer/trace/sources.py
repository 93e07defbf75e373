"""The input formats: which files each takes, and how one is opened.

A new format is a function that opens its files as a :class:`~nsys_analyzer.trace.reader.Reader`, as with
:class:`~nsys_analyzer.trace.arrow_reader.ArrowReader` over tables in memory, and an entry in ``SOURCES``.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from nsys_analyzer.errors import NsysAnalyzerError, TraceError
from nsys_analyzer.system.atomic_write import atomic_folder, atomic_write
from nsys_analyzer.trace.nsys_report import (
    ARROW_FOLDER,
    FOLDER_ENDINGS,
    REPORT_SUFFIXES,
    TABLE_ENDINGS,
    cache_of,
    export_of,
    is_export_folder,
    is_export_of,
    is_sqlite,
    made_cache_of,
)

if TYPE_CHECKING:
    import pyarrow as pa

    from nsys_analyzer.trace.reader import Reader

_HEAD = 1024
_CONVERTER = 10
"""The version of what reads PyTorch's traces: tables that another one kept are not read."""
_WORTH_KEEPING = 8_000_000
"""Bytes of the tables of a trace that are kept: such a one is read in a second, and in a tenth of it from the cache."""
_MANIFEST = "manifest.json"
_SQLITE_SIDECARS = ("-wal", "-shm", "-journal")


@dataclass(frozen=True)
class Source:
    """An input format.

    Attributes:
        suffixes: of its files, the longer of two endings first.
        open: opens a file.
        ambiguous_suffixes: endings that other files have, too.
        marks: a file of such an ending, in a folder, is taken where one of these stands in its first kB.
    """

    suffixes: tuple[str, ...]
    open: Callable[[Path], Reader]
    ambiguous_suffixes: tuple[str, ...] = ()
    marks: tuple[bytes, ...] = ()

    def suffix_of(self, path: Path) -> str:
        """Returns the ending by which it takes a file, empty where it does not take it."""
        return next((ending for ending in (*self.suffixes, *self.ambiguous_suffixes) if path.name.endswith(ending)), "")

    def begins(self, path: Path) -> bool:
        """Returns whether a file of an ambiguous ending begins as this format does."""
        try:
            if not path.name.endswith(self.ambiguous_suffixes or "/") or not path.is_file():
                return False
            with path.open("rb") as file:
                head = file.read(_HEAD)
        except OSError:
            return False
        return any(mark in head for mark in self.marks)


# The readers need numpy and Arrow, which a command's help does not.


def _open_sqlite(path: Path) -> Reader:
    from nsys_analyzer.trace.reader import SqliteReader

    return SqliteReader(path)


def _open_folder(path: Path) -> Reader:
    from nsys_analyzer.trace.arrow_reader import open_folder

    return open_folder(path)


def _open_report(path: Path) -> Reader:
    export = export_of(path)
    return _open_folder(export) if export.is_dir() else _open_sqlite(export)


def _open_trace(path: Path) -> Reader:
    """Opens a trace of PyTorch's profiler; of a large one the tables are kept in the cache."""
    from nsys_analyzer.trace.arrow_reader import ArrowReader
    from nsys_analyzer.trace.kineto.tables import read_tables

    kept = _kept_tables(path)
    if kept and is_export_folder(kept):
        return _open_folder(kept)
    tables = read_tables(path)
    if kept and sum(table.nbytes for table in tables.values()) >= _WORTH_KEEPING:
        _keep(tables, path, kept)
    return ArrowReader(path, tables)


def _kept_tables(path: Path) -> Path | None:
    """Returns the folder in the cache for the tables of a trace as it is now; None for what is no file."""
    if not path.is_file():
        return None
    status = path.stat()
    return cache_of(path) / f"{_CONVERTER}-{status.st_size}-{status.st_mtime_ns}{ARROW_FOLDER}"


def _keep(tables: Mapping[str, pa.Table], path: Path, kept: Path) -> None:
    """Writes the tables of a trace to the cache, in place of those of what the file was before."""
    import pyarrow as pa

    try:
        made_cache_of(path)
        for older in kept.parent.glob(f"*{ARROW_FOLDER}"):
            shutil.rmtree(older)
        with atomic_folder(kept, path) as unfinished:
            unfinished.mkdir()
            for name, table in tables.items():
                with pa.ipc.new_stream(str(unfinished / f"{name}.arrow"), table.schema) as stream:
                    stream.write_table(table)
    except (OSError, NsysAnalyzerError):
        return  # without a cache the trace is read again the next time


EXPORT = Source((".sqlite",), _open_sqlite)
"""An SQLite export; so is a file that no format takes, for its content may be one."""

NSYS_REPORT = Source(REPORT_SUFFIXES, _open_report)

KINETO = Source(
    (".pt.trace.json.gz", ".pt.trace.json", ".json.gz"),
    _open_trace,
    ambiguous_suffixes=(".json",),
    marks=(b'"schemaVersion"', b'"traceEvents"'),
)
"""A trace of PyTorch's profiler, plain or compressed with gzip."""

FOLDER = Source(FOLDER_ENDINGS, _open_folder)
"""A folder with a file for each table is one capture, whatever it is called."""

SOURCES: tuple[Source, ...] = (EXPORT, NSYS_REPORT, KINETO)
"""The formats of files."""


def source_of(path: Path) -> Source:
    """Returns the format of a file, by its name, or of a folder."""
    if is_export_folder(path):
        return FOLDER
    return next((source for source in SOURCES if source.suffix_of(path)), EXPORT)


def open_capture(path: Path) -> Reader:
    """Opens a capture of any format; a report of nsys is exported first, where no current export is there.

    Raises:
        TraceError: the file is absent, damaged, of another format, or too large for the memory.
        ExportError: a report could not be exported.
    """
    try:
        return source_of(path).open(path)
    except MemoryError as error:
        hint = "Record fewer steps, or read it on a machine with more memory"
        raise TraceError(f"{path} needs more memory than there is", hint) from error


def is_capture(path: Path) -> bool:
    """Returns whether a file in a folder is a capture: by its name, or, of a plain ``.json``, by how it begins."""
    return any(path.name.endswith(source.suffixes) or source.begins(path) for source in SOURCES)


def trace_stem(capture: Path) -> str:
    """Returns the name that a capture shares with its export: ``a`` of ``a.nsys-rep``, ``a.json.gz`` and ``a.json``.

    Not ``Path.stem``: what follows the point of ``2.7B_ctx256`` is no suffix. Nor is all of ``.sqlite``.
    """
    return capture.name.removesuffix(source_of(capture).suffix_of(capture)) or capture.name


def sqlite_of(path: Path, timeout_s: float | None = None) -> Path:
    """Returns the SQLite file behind a path: itself, or what a capture is written to, beside it or in the cache.

    Raises:
        TraceError: the file cannot be read, or is a folder of tables.
        ExportError: there is no place for the export, or the program that makes it is missing, fails, or takes longer
            than ``timeout_s``.
    """
    source = source_of(path)
    if source is FOLDER:
        hint = "Give the report itself, or export it: nsys export --type sqlite FILE.nsys-rep"
        raise TraceError(f"{path} is a folder, and this needs a SQLite export", hint)
    if source is EXPORT:
        return path
    if source is NSYS_REPORT:
        return export_of(path, timeout_s, as_sqlite=True)
    from nsys_analyzer.trace.arrow_reader import write_sqlite
    from nsys_analyzer.trace.kineto.tables import read_tables

    tables = read_tables(path)
    output = made_cache_of(path) / f"{trace_stem(path)}.sqlite"
    with atomic_write(output, source=path) as unfinished:
        write_sqlite(tables, unfinished)
    return output


def is_made_from(export: Path, capture: Path) -> bool:
    """Returns whether an export of the capture's name is that capture's.

    Earlier versions left a SQLite file of our own beside a trace of PyTorch's profiler.
    """
    is_of_report = source_of(capture) is NSYS_REPORT
    if export.is_dir():
        return is_of_report and is_export_folder(export)
    return is_of_report or (is_sqlite(export) and _is_of_torch(export))


def is_current(export: Path, capture: Path) -> bool:
    """Returns whether an export stands for a report of nsys: it is the report's, and no older."""
    return source_of(capture) is NSYS_REPORT and capture.exists() and is_export_of(export, capture)


def _is_of_torch(export: Path) -> bool:
    from nsys_analyzer.trace.reader import SqliteReader
    from nsys_analyzer.trace.schema import EXPORT as PROPERTIES

    try:
        properties = SqliteReader(export).read(PROPERTIES)
    except NsysAnalyzerError:
        return False  # damaged: whoever reads it says so
    return "torch.profiler" in properties["value"].to_pylist()


def check_no_input(output: Path, inputs: Iterable[Path]) -> None:
    """Makes sure that a file to write is none of those that are read: hard links, symbolic links and spellings count.

    Args:
        output: the file to write.
        inputs: traces, files of timings, and folders that hold them.

    Raises:
        NsysAnalyzerError: it is one of the inputs, a manifest of theirs, or another form of one.
    """
    if not output.exists():
        return
    status = output.stat()
    for source in inputs:
        for path in _files_in(source) if source.is_dir() else _files_behind(source):
            try:
                is_same = os.path.samestat(path.stat(), status)
            except OSError:  # it is not there, or cannot be looked at: then it is not read, either
                continue
            if is_same:
                named = "the input itself" if path == source else f"{path}, which is read"
                raise NsysAnalyzerError(f"{output} is {named}", "Name another file with -o")


def _files_in(folder: Path) -> Iterator[Path]:
    """Yields the files that a folder stands for, its own and those one level below."""
    for inside, subfolders, names in os.walk(folder, followlinks=True):
        for path in (Path(inside, name) for name in names):
            if is_capture(path):
                yield from _files_behind(path)
            elif path.name.endswith((_MANIFEST, ".csv", ".jsonl", *TABLE_ENDINGS)):
                yield path
        if Path(inside) != folder:
            subfolders.clear()


def _files_behind(source: Path) -> Iterator[Path]:
    """Yields a file, its manifests, and the other forms of the same capture: beside it or in the cache."""
    yield source
    for path in dict.fromkeys((source, Path(os.path.realpath(source)))):
        stem = trace_stem(path)
        yield from (path.with_name(name) for name in (_MANIFEST, f"{stem}.{_MANIFEST}"))
        yield from (path.with_name(f"{stem}{suffix}") for kind in SOURCES for suffix in kind.suffixes)
        yield cache_of(path) / f"{stem}.sqlite"
        yield from (path.with_name(f"{stem}.sqlite{ending}") for ending in _SQLITE_SIDECARS)
