"""Exports that are folders with a file for each table: ``nsys export --type parquetdir`` or ``arrowdir``."""

from __future__ import annotations

from pathlib import Path

from nsys_analyzer.trace.schema import EXPORT, SIGNATURE_TABLES
from nsys_analyzer.trace.sources.source import Source

PARQUET_FOLDER, ARROW_FOLDER = "_pqtdir", "_arwdir"
"""How nsys calls them, behind the report's name."""

FOLDER = Source((PARQUET_FOLDER, ARROW_FOLDER))
"""Such a folder is one capture, whatever it is called, and read as it is."""

TABLE_ENDINGS = (".parquet", ".arrow")
"""Of the files of its tables."""


def is_export_folder(path: Path) -> bool:
    """Whether a folder is an export of nsys, and no folder of captures: by the files that each version writes."""
    return path.is_dir() and any(
        (path / f"{name}{ending}").is_file() for name in SIGNATURE_TABLES for ending in TABLE_ENDINGS
    )


def written_ns(folder: Path) -> int:
    """When an export was written: nsys writes the table about it last."""
    tables = (folder / f"{name}{ending}" for name in EXPORT.aliases for ending in TABLE_ENDINGS)
    return max((table.stat().st_mtime_ns for table in tables if table.is_file()), default=0)
