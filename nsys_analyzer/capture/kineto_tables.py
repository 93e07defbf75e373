"""The tables of an nsys export as the converter fills them, and their file."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from sqlite_utils import Database

_GPU = "start end deviceId contextId streamId correlationId globalPid"
#: Tables with their columns, named and typed as schema 3.20 of nsys has them; integers but for ``:str``. Two are
#: ours: TORCH_OPERATOR_EVENTS and PROCESS_RANKS.
_COLUMNS = {
    "CUPTI_ACTIVITY_KIND_KERNEL": f"{_GPU} demangledName shortName graphNodeId",
    "CUPTI_ACTIVITY_KIND_MEMCPY": f"{_GPU} bytes copyKind graphNodeId",
    "CUPTI_ACTIVITY_KIND_MEMSET": f"{_GPU} bytes graphNodeId",
    "CUPTI_ACTIVITY_KIND_RUNTIME": "start end globalTid correlationId nameId returnValue",
    "NVTX_EVENTS": "start end eventType globalTid textId domainId",
    "TORCH_OPERATOR_EVENTS": "start end globalTid nameId",
    "CUDA_GPU_MEMORY_USAGE_EVENTS": (
        "start globalPid deviceId contextId address pc bytes memKind memoryOperationType"
        " localMemoryPoolSize localMemoryPoolUtilizedSize"
    ),
    "DIAGNOSTIC_EVENT": "timestamp severity text:str globalPid",
    "ThreadNames": "nameId priority globalTid",
    "TARGET_INFO_GPU": "id name:str totalMemory smCount",
    "TARGET_INFO_CUDA_DEVICE": "gpuId cudaId pid",
    "TARGET_INFO_SYSTEM_ENV": "name:str value:str",
    "META_DATA_EXPORT": "name:str value:str",
    "PROCESS_RANKS": "globalPid rank worldSize",
    "StringIds": "id value:str",
}

Rows = Iterable[tuple[Any, ...]]


def write_tables(path: Path, tables: Mapping[str, Rows]) -> None:
    """Write a SQLite file of these tables: rows in the order of the columns, read once, table by table.

    As in nsys, a table without rows is not there.

    Raises:
        sqlite3.Error: the file cannot be written.
    """
    from sqlite_utils import Database

    database = Database(path)
    try:
        # The file is nobody's until it is complete: there is nothing that a journal could save.
        database.conn.execute("PRAGMA journal_mode = OFF")
        database.conn.execute("PRAGMA synchronous = OFF")
        for name, rows in tables.items():
            remaining = iter(rows)
            first = next(remaining, None)
            if first is not None:
                _write_table(database, name, chain((first,), remaining))
    finally:
        database.conn.close()


def _write_table(database: Database, name: str, rows: Rows) -> None:
    columns = dict(_column(text) for text in _COLUMNS[name].split())
    database.create_table(name, columns)
    marks = ", ".join("?" * len(columns))
    with database.conn:  # rows as they come: sqlite-utils' own inserts take dictionaries, at a multiple of the cost
        database.conn.executemany(f'INSERT INTO "{name}" VALUES ({marks})', rows)


def _column(text: str) -> tuple[str, type]:
    name, _, kind = text.partition(":")
    return name, str if kind == "str" else int
