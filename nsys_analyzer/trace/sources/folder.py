"""Exports that are folders with a file for each table: ``nsys export --type parquetdir`` or ``arrowdir``."""

from __future__ import annotations

import os
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
    tables = (path / f"{name}{ending}" for name in SIGNATURE_TABLES for ending in TABLE_ENDINGS)
    return any(os.path.isfile(table) for table in tables)  # noqa: PTH113 - pathlib raises where one may not look


def written_ns(export: Path) -> int:
    """When an export was written, of a folder the table about it; 0 for a link that leads nowhere."""
    tables = (export / f"{name}{ending}" for name in EXPORT.aliases for ending in TABLE_ENDINGS)
    files = [export] if export.is_file() else [table for table in tables if table.is_file()]
    return max((file.stat().st_mtime_ns for file in files), default=0)
