"""Which trace a SQLite file was made from: ``run.sqlite`` may be that of ``run.nsys-rep`` or of ``run.json.gz``."""

from __future__ import annotations

import hashlib
import os
import sqlite3
from contextlib import closing
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO

from nsys_analyzer.capture.placement import REPORT_SUFFIXES, is_fresh, is_sqlite, trace_stem
from nsys_analyzer.trace.reader import immutable_uri

CONVERTER = "5"
"""The version of this package's converter; a file of another one is made again."""

_PIECE = 1 << 20
_VERSION, _SUFFIX = "EXPORT_CONVERTER_VERSION", "EXPORT_SOURCE_SUFFIX"  # rows of META_DATA_EXPORT
_SOURCE = {name: f"EXPORT_SOURCE_{name.upper()}" for name in ("size", "mtime_ns", "inode", "blake2b")}


@dataclass(frozen=True)
class Source:
    """What tells a file from another: its length in bytes, when it was written (ns), its inode, its content."""

    size: int
    mtime_ns: int
    inode: int
    blake2b: str

    @classmethod
    def of(cls, file: IO[bytes]) -> Source:
        """Those of an open file, which is read from its start, and left there.

        Raises:
            OSError: it cannot be read.
        """
        state = os.fstat(file.fileno())
        digest = hashlib.blake2b(digest_size=16)
        for piece in iter(lambda: file.read(_PIECE), b""):
            digest.update(piece)
        file.seek(0)
        return cls(state.st_size, state.st_mtime_ns, state.st_ino, digest.hexdigest())


@dataclass(frozen=True)
class _Origin:
    """Which converter made a file, from a trace of which suffix, and what it was; the first converters did not say."""

    version: str
    suffix: str | None
    source: dict[str, str]


def origin_rows(trace: Path, source: Source) -> list[tuple[str, str]]:
    """The rows of META_DATA_EXPORT that mark what was converted from ``trace``.

    Of its name the suffix alone: the rest is the file's own, and stays right when both are renamed.
    """
    told = [(_SOURCE[name], str(value)) for name, value in asdict(source).items()]
    return [(_VERSION, CONVERTER), (_SUFFIX, _suffix(trace)), *told]


def is_made_from(made: Path, trace: Path) -> bool:
    """Say whether ``made``, which bears the trace's name, is its SQLite form: of a report, what was not converted."""
    return _is_of(_origin(made), trace)


def is_current(made: Path, trace: Path) -> bool:
    """Say whether ``made`` is the trace's SQLite form, not by another converter, and the trace still the same.

    An export of nsys says nothing of its report: it is current when it is no older. A trace that was copied or moved
    has another time or inode, and is the same when its content is.
    """
    origin = _origin(made)
    if not _is_of(origin, trace):
        return False
    if origin is None:
        return is_fresh(made, trace)
    return origin.version == CONVERTER and _is_same(origin.source, trace)


def _is_of(origin: _Origin | None, trace: Path) -> bool:
    if origin is None or trace.suffix in REPORT_SUFFIXES:
        return origin is None and trace.suffix in REPORT_SUFFIXES
    return origin.suffix in (None, _suffix(trace))


def _is_same(recorded: dict[str, str], trace: Path) -> bool:
    try:
        state = trace.stat()
        if recorded.get("size") != str(state.st_size):
            return False
        if (recorded.get("mtime_ns"), recorded.get("inode")) == (str(state.st_mtime_ns), str(state.st_ino)):
            return True
        with trace.open("rb") as file:
            return recorded.get("blake2b") == Source.of(file).blake2b
    except OSError:
        return False  # whoever reads the trace then says why it cannot be read


def _suffix(trace: Path) -> str:
    return trace.name.removeprefix(trace_stem(trace))


def _origin(made: Path) -> _Origin | None:
    """Where a file was converted from, None where it was not: an export of nsys, or no database."""
    if not is_sqlite(made):
        return None
    query = "SELECT name, value FROM META_DATA_EXPORT WHERE name LIKE 'EXPORT_%'"
    try:
        with closing(sqlite3.connect(immutable_uri(made), uri=True)) as connection:
            found = dict(connection.execute(query).fetchall())
    except sqlite3.Error:
        return None  # no such table, or a damaged file: not converted either way
    if _VERSION not in found:
        return None
    source = {name: str(found[row]) for name, row in _SOURCE.items() if row in found}
    return _Origin(str(found[_VERSION]), found.get(_SUFFIX), source)
