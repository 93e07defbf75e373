"""The export made from a capture: where it lies (beside the capture, or in the cache), and what it was made from."""

from __future__ import annotations

import os
import sqlite3
import tempfile
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

from nsys_analyzer.errors import ExportError

CONVERTER = "9"
"""The version of this package's converters; a file of another one is made again."""

SQLITE_SIDECARS = ("-wal", "-shm", "-journal")
"""Endings of the files that SQLite keeps beside a database: ``a.sqlite-wal``."""

_CACHE = "~/.cache"
_CACHE_HINT = "Set XDG_CACHE_HOME to a folder that can be written"
_SQLITE_MAGIC = b"SQLite format 3\x00"
_VERSION, _SUFFIX = "EXPORT_CONVERTER_VERSION", "EXPORT_SOURCE_SUFFIX"  # rows of META_DATA_EXPORT
_SIZE, _MTIME = "EXPORT_SOURCE_SIZE", "EXPORT_SOURCE_MTIME_NS"


@dataclass(frozen=True)
class Origin:
    """The capture that a file was converted from: its size and time of writing, its name's suffix, the converter."""

    version: str
    suffix: str | None
    size: str
    mtime_ns: str

    def is_current(self, capture: Path) -> bool:
        """Whether this converter made it, and the capture has not been replaced since."""
        try:
            status = capture.stat()
        except OSError:
            return False  # whoever reads the capture then says why it cannot be read
        state = (CONVERTER, str(status.st_size), str(status.st_mtime_ns))
        return (self.version, self.size, self.mtime_ns) == state


def origin_rows(suffix: str, status: os.stat_result) -> list[tuple[str, str]]:
    """The rows of META_DATA_EXPORT that tell the origin of a converted file.

    Not the capture's name, but its suffix: both files may be renamed.
    """
    values = (CONVERTER, suffix, str(status.st_size), str(status.st_mtime_ns))
    return list(zip((_VERSION, _SUFFIX, _SIZE, _MTIME), values, strict=True))


def origin_of(export: Path) -> Origin | None:
    """Where a file was converted from, None where it was not: an export of nsys, or no database."""
    from nsys_analyzer.trace.sqlite_reader import immutable_uri  # not for a command's help: it needs numpy

    if not is_sqlite(export):
        return None
    query = "SELECT name, value FROM META_DATA_EXPORT WHERE name LIKE 'EXPORT_%'"
    try:
        with closing(sqlite3.connect(immutable_uri(export), uri=True)) as connection:
            found = dict(connection.execute(query).fetchall())
    except sqlite3.Error:
        return None  # no such table, or a damaged file: not converted either way
    if _VERSION not in found:
        return None
    return Origin(str(found[_VERSION]), found.get(_SUFFIX), str(found.get(_SIZE)), str(found.get(_MTIME)))


def places(capture: Path, stem: str) -> tuple[Path, Path]:
    """Where ``stem.sqlite`` of a capture may lie: beside it, and in the cache.

    The cache has a folder for each capture; of a user without a home it begins with the tilde.
    """
    import hashlib  # loads OpenSSL, which an export that is given needs not

    cache = Path(os.environ.get("XDG_CACHE_HOME") or os.path.expanduser(_CACHE))  # noqa: PTH111  # pathlib's raises
    digest = hashlib.sha256(os.fsencode(os.path.realpath(capture))).hexdigest()[:16]
    name = f"{stem}.sqlite"
    return capture.with_name(name), cache / "nsys-analyze" / digest / name


def writable_place(beside: Path, cached: Path) -> Path:
    """The place of the two where a file can be made; the cache's folder is made, closed to others, as needed.

    Raises:
        ExportError: neither can be written.
    """
    if _is_writable(beside.parent):
        return beside
    if cached.parts[0] == "~":
        problem = f"The folder of {beside} cannot be written, and there is no home folder for a cache"
        raise ExportError(problem, _CACHE_HINT)
    try:
        cached.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise ExportError(f"The export has nowhere to go: {error}", _CACHE_HINT) from error
    return cached


def is_sqlite(path: Path) -> bool:
    """Whether a file is there and starts as a SQLite database does."""
    try:
        if not path.is_file():  # to open a FIFO waits for its writer
            return False
        with path.open("rb") as file:
            return file.read(len(_SQLITE_MAGIC)) == _SQLITE_MAGIC
    except OSError:
        return False


def _is_writable(folder: Path) -> bool:
    """Whether a file can be made in a folder, tried by making one: modes and mounts both have a say."""
    try:
        with tempfile.TemporaryFile(dir=folder):
            return True
    except OSError:
        return False
