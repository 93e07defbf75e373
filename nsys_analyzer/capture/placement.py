"""Where a SQLite file made from a capture lies: beside it, or in the cache."""

from __future__ import annotations

import hashlib
import os
import tempfile
from pathlib import Path

from nsys_analyzer.errors import ExportError

KINETO_SUFFIXES = (".pt.trace.json.gz", ".pt.trace.json", ".json.gz")
"""What a trace of PyTorch's profiler is called in a folder; a plain ``.json`` may be anything."""

REPORT_SUFFIXES = (".nsys-rep", ".qdrep")
"""What a report is called: ``.qdrep`` until Nsight Systems 2021.3, ``.nsys-rep`` since."""

TRACE_SUFFIXES = (".sqlite", *REPORT_SUFFIXES, *KINETO_SUFFIXES)
"""What a capture is called, in a folder of them."""

SQLITE_SIDECARS = ("-wal", "-shm", "-journal")
"""Endings of the files that SQLite keeps beside a database: ``a.sqlite-wal``."""

_CACHE = "~/.cache"
_ELSEWHERE = "Set XDG_CACHE_HOME to a folder that can be written"
_SQLITE_MAGIC = b"SQLite format 3\x00"


def trace_stem(trace: Path) -> str:
    """Return the name that a trace shares with its export: ``a`` of ``a.nsys-rep``, ``a.json.gz`` and ``a.json``.

    Not ``Path.stem``: what follows the point of ``2.7B_ctx256`` is no suffix. Nor is all of ``.sqlite``.
    """
    suffixes = (suffix for suffix in (*TRACE_SUFFIXES, ".json") if trace.name.endswith(suffix))
    return trace.name.removesuffix(next(suffixes, "")) or trace.name


def places(source: Path, stem: str) -> tuple[Path, Path]:
    """Return where ``stem.sqlite`` of ``source`` may lie: beside it, and in the cache.

    The cache is ``~/.cache/nsys-analyze``, or below ``$XDG_CACHE_HOME``, with a folder for each source. Of a user
    without a home it begins with the tilde.
    """
    cache = Path(os.environ.get("XDG_CACHE_HOME") or os.path.expanduser(_CACHE))  # noqa: PTH111  # pathlib's raises
    digest = hashlib.sha256(os.fsencode(os.path.realpath(source))).hexdigest()[:16]
    name = f"{stem}.sqlite"
    return source.with_name(name), cache / "nsys-analyze" / digest / name


def writable_place(beside: Path, cached: Path) -> Path:
    """Return the place of the two where a file can be made; the cache's folder is made as needed.

    It is closed to others, for an export holds its owner's environment variables.

    Raises:
        ExportError: neither can be written.
    """
    if _is_writable(beside.parent):
        return beside
    if cached.parts[0] == "~":
        problem = f"The folder of {beside} cannot be written, and there is no home folder for a cache"
        raise ExportError(problem, _ELSEWHERE)
    try:
        cached.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise ExportError(f"The export has nowhere to go: {error}", _ELSEWHERE) from error
    return cached


def is_fresh(made: Path, source: Path) -> bool:
    """Say whether ``made`` is a SQLite file no older than the source it was made from."""
    return is_sqlite(made) and made.stat().st_mtime_ns >= source.stat().st_mtime_ns


def is_sqlite(path: Path) -> bool:
    """Say whether a file is there and starts as a SQLite database does."""
    try:
        if not path.is_file():  # to open a FIFO waits for its writer
            return False
        with path.open("rb") as file:
            return file.read(len(_SQLITE_MAGIC)) == _SQLITE_MAGIC
    except OSError:
        return False


def _is_writable(folder: Path) -> bool:
    """Say whether a file can be made in ``folder``, by making one: modes and mounts both have a say."""
    try:
        with tempfile.TemporaryFile(dir=folder):
            return True
    except OSError:
        return False
