"""The input formats, and the export that a file of each becomes, in SQLite or Parquet: made once, and kept.

A new format is a module with a :class:`~nsys_analyzer.trace.sources.source.Source`, and an entry in ``SOURCES``.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Callable
from functools import partial
from pathlib import Path

from nsys_analyzer.errors import ExportError, TraceError
from nsys_analyzer.system.atomic_write import atomic_folder, atomic_write
from nsys_analyzer.trace.sources.folder import ARROW_FOLDER, FOLDER, PARQUET_FOLDER, is_export_folder, written_ns
from nsys_analyzer.trace.sources.kineto import KINETO
from nsys_analyzer.trace.sources.made import is_sqlite, origin_of, places, writable_place
from nsys_analyzer.trace.sources.nsys_report import NSYS_REPORT, folder_export
from nsys_analyzer.trace.sources.source import Source

EXPORT = Source((".sqlite",))
"""An SQLite export, which is read as it is; so is a file that no format takes, for its content may be one."""

SOURCES: tuple[Source, ...] = (EXPORT, NSYS_REPORT, KINETO)


def source_of(path: Path) -> Source:
    """The format of a file, by its name, or of a folder."""
    if is_export_folder(path):
        return FOLDER
    return next((source for source in SOURCES if source.suffix_of(path)), EXPORT)


def is_capture(path: Path) -> bool:
    """Tells whether a file in a folder is a capture: by its name, or, of a plain ``.json``, by how it begins."""
    return any(path.name.endswith(source.suffixes) or source.begins(path) for source in SOURCES)


def trace_stem(capture: Path) -> str:
    """The name that a capture shares with its export: ``a`` of ``a.nsys-rep``, ``a.json.gz`` and ``a.json``.

    Not ``Path.stem``: what follows the point of ``2.7B_ctx256`` is no suffix. Nor is all of ``.sqlite``.
    """
    return source_of(capture).stem_of(capture)


def export_of(path: Path, timeout_s: float | None = None) -> Path:
    """What is read of a capture: itself, or its export, made only where no current one is there.

    Of a report of nsys that is a folder of Parquet files where there is one, or nsys can write it: it is written and
    read in less time. Anything else becomes what :func:`sqlite_of` tells, which says what is raised, too.
    """
    if is_export_folder(path):
        return path
    if source_of(path) is not NSYS_REPORT or not path.is_file():
        return sqlite_of(path, timeout_s)
    places_of = [folder_places(path, ending) for ending in (PARQUET_FOLDER, ARROW_FOLDER)]
    of_sqlite = places(path, trace_stem(path))
    for export in (
        *(beside for beside, _ in places_of),
        of_sqlite[0],
        *(cached for _, cached in places_of),
        of_sqlite[1],
    ):
        if is_current(export, path):
            return export
    write = folder_export(path, timeout_s)
    if write is None:
        return sqlite_of(path, timeout_s)
    output = writable_place(*places_of[0])
    try:
        with atomic_folder(output, path) as unfinished:
            write(unfinished)
    except OSError as error:
        raise _unwritten(path, error) from error
    return output


def folder_places(capture: Path, ending: str) -> tuple[Path, Path]:
    """Where the folder of a report's export may lie: beside it, and in the cache."""
    stem = trace_stem(capture)
    return tuple(place.with_name(f"{stem}{ending}") for place in places(capture, stem))  # type: ignore[return-value]


def sqlite_of(path: Path, timeout_s: float | None = None) -> Path:
    """The SQLite file behind a path: itself, or the export of a capture, made only where no current one is there.

    It is ``X.sqlite`` beside the capture ``X``; in ``~/.cache/nsys-analyze`` (or below ``$XDG_CACHE_HOME``) where that
    folder cannot be written, or holds another capture's export of that name.

    Raises:
        TraceError: the file cannot be read, or there is too little memory for what it holds.
        ExportError: there is no place for the export, or the program that makes it is missing, fails, or takes longer
            than ``timeout_s``.
    """
    if is_export_folder(path):
        hint = "Give the report itself, or export it: nsys export --type sqlite FILE.nsys-rep"
        raise TraceError(f"{path} is a folder, and this needs a SQLite export", hint)
    if source_of(path).open is None:
        return path
    beside, cached = places(path, trace_stem(path))
    if beside.exists() and not is_made_from(beside, path):
        beside = cached
    if path.is_file() and path.stat().st_size:
        for export in (beside, cached):
            if is_current(export, path):
                return export
    return _convert(path, partial(writable_place, beside, cached), timeout_s)


def convert(path: Path, output: Path) -> None:
    """Writes the export of a capture to a file of any name; raises what :func:`sqlite_of` does."""
    _convert(path, lambda: output, None)


def _convert(path: Path, place: Callable[[], Path], timeout_s: float | None) -> Path:
    source = source_of(path)
    if source.open is None:
        raise ExportError(f"{path} is an export already", "Name a report of nsys or a trace of PyTorch's profiler")
    try:
        write = source.open(path, timeout_s)
        output = place()
        with atomic_write(output, source=path) as unfinished:
            write(unfinished)
    except MemoryError as error:
        hint = "Record fewer steps, or read it on a machine with more memory"
        raise TraceError(f"{path} needs more memory than there is", hint) from error
    except (sqlite3.Error, OSError) as error:
        raise _unwritten(path, error) from error
    return output


def _unwritten(path: Path, error: Exception) -> ExportError:
    hint = "Make room, or set XDG_CACHE_HOME to a folder that has it"
    return ExportError(f"The export of {path} cannot be written: {error}", hint)


def is_made_from(export: Path, capture: Path) -> bool:
    """Whether an export of the capture's name is that capture's; without an origin it is that of a report."""
    if export.is_dir():
        return source_of(capture) is NSYS_REPORT and is_export_folder(export)
    source, origin = source_of(capture), origin_of(export)
    if origin is None or not source.tells_origin:
        return origin is None and not source.tells_origin
    return origin.suffix in (None, source.suffix_of(capture))


def is_current(export: Path, capture: Path) -> bool:
    """Whether an export is the capture's; one of nsys, which says nothing of its report, must be no older."""
    if not capture.exists():  # a link that leads nowhere
        return False
    if export.is_dir():
        return is_export_folder(export) and written_ns(export) >= capture.stat().st_mtime_ns
    if not is_made_from(export, capture):
        return False
    if origin := origin_of(export):
        return origin.is_current(capture)
    return is_sqlite(export) and export.stat().st_mtime_ns >= capture.stat().st_mtime_ns
