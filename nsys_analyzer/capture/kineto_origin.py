"""Which trace a SQLite file was made from: ``run.sqlite`` may be that of ``run.nsys-rep`` or of ``run.json.gz``."""

from __future__ import annotations

import sqlite3
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

from nsys_analyzer.capture.placement import REPORT_SUFFIXES, is_fresh, is_sqlite, trace_stem

CONVERTER = "3"
"""The version of this package's converter; a file of another one is made again."""

_VERSION, _SUFFIX = "EXPORT_CONVERTER_VERSION", "EXPORT_SOURCE_SUFFIX"  # rows of META_DATA_EXPORT


@dataclass(frozen=True)
class _Origin:
    """Which converter made a file, and from a trace of which suffix; the first converter did not say."""

    version: str
    suffix: str | None


def origin_rows(trace: Path) -> list[tuple[str, str]]:
    """The rows of META_DATA_EXPORT that mark what was converted from ``trace``.

    The suffix alone: the rest of the name is the file's own, and stays right when both are renamed.
    """
    return [(_VERSION, CONVERTER), (_SUFFIX, _suffix(trace))]


def is_made_from(made: Path, trace: Path) -> bool:
    """Say whether ``made``, which bears the trace's name, is its SQLite form: of a report, what was not converted."""
    origin = _origin(made)
    if origin is None or trace.suffix in REPORT_SUFFIXES:
        return origin is None and trace.suffix in REPORT_SUFFIXES
    return origin.suffix in (None, _suffix(trace))


def is_current(made: Path, trace: Path) -> bool:
    """Say whether ``made`` is the trace's SQLite form, no older than the trace, and not by an older converter."""
    if not is_fresh(made, trace) or not is_made_from(made, trace):
        return False
    origin = _origin(made)
    return origin is None or origin.version == CONVERTER


def _suffix(trace: Path) -> str:
    return trace.name.removeprefix(trace_stem(trace))


def _origin(made: Path) -> _Origin | None:
    """Where a file was converted from, None where it was not: an export of nsys, or no database."""
    if not is_sqlite(made):
        return None
    query = "SELECT name, value FROM META_DATA_EXPORT WHERE name IN (?, ?)"
    try:
        with closing(sqlite3.connect(made)) as connection:
            found = dict(connection.execute(query, (_VERSION, _SUFFIX)).fetchall())
    except sqlite3.Error:
        return None  # no such table, or a damaged file: not converted either way
    return _Origin(str(found[_VERSION]), found.get(_SUFFIX)) if _VERSION in found else None
