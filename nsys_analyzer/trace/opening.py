"""Opens an export of nsys, whatever it was exported to."""

from __future__ import annotations

from pathlib import Path

from nsys_analyzer.trace.folder_reader import FolderReader
from nsys_analyzer.trace.reader import Reader
from nsys_analyzer.trace.sqlite_reader import SqliteReader


def open_export(path: Path) -> Reader:
    """Opens an nsys export: an SQLite file, or a folder of Parquet or Arrow files.

    Raises:
        TraceError: no such file, empty, of another format, damaged, or not written by nsys.
    """
    if any(path.glob("*.parquet")) or any(path.glob("*.arrow")):
        return FolderReader(path)
    return SqliteReader(path)
