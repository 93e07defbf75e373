"""Converts an SQLite export to the folder that ``nsys export`` writes as Parquet or Arrow files.

Names, types and the order of rows are those of nsys 2025.3: a file for each table, integers as wide and as signed as
the events hold them, texts with 64-bit offsets, one Arrow stream without compression, or Parquet row groups.
"""

from __future__ import annotations

import sqlite3
from contextlib import closing
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

_ROW_GROUP = 2_048
_LONG = 200_000
#: The types of integers that are not 64 bits wide and signed.
_TYPES = {
    **dict.fromkeys(("deviceId", "correlationId", "eventType", "eventClass", "returnValue"), pa.uint32()),
    **dict.fromkeys(("textId", "jsonTextId", "srcKind", "dstKind", "memKind", "gpuId", "cudaId"), pa.uint32()),
    **dict.fromkeys(("globalPid", "globalTid", "streamId", "contextId", "demangledName", "shortName"), pa.uint64()),
    **dict.fromkeys(("nameId", "graphNodeId", "bytes", "copyKind", "originalGraphNodeId"), pa.uint64()),
    **dict.fromkeys(("gridX", "gridY", "gridZ", "blockX", "blockY", "blockZ"), pa.int32()),
}  # fmt: skip


def as_folder(export: Path, folder: Path, ending: str = ".parquet") -> Path:
    """Writes the tables of an export that have rows into a new folder, and returns it."""
    folder.mkdir()
    with closing(sqlite3.connect(export)) as connection:
        connection.text_factory = bytes
        tables = connection.execute("SELECT name FROM sqlite_master WHERE type = 'table'").fetchall()
        for (name,) in tables:
            (rows,) = connection.execute(f'SELECT count(*) FROM "{name.decode()}"').fetchone()
            table = (_long_table if rows > _LONG else _table)(connection, name.decode())
            if table.num_rows:
                _write(table, folder / f"{name.decode()}{ending}")
    return folder


def _table(connection: sqlite3.Connection, name: str) -> pa.Table:
    columns = [row[1].decode() for row in connection.execute(f'PRAGMA table_info("{name}")')]
    rows = connection.execute(f'SELECT * FROM "{name}"').fetchall()
    arrays = [_array(column, [row[i] for row in rows]) for i, column in enumerate(columns)]
    return pa.Table.from_arrays(arrays, names=columns)


def _long_table(connection: sqlite3.Connection, name: str) -> pa.Table:
    """A table of a benchmark's capture, of integers and texts: without a Python object for each value."""
    from adbc_driver_sqlite import dbapi

    columns = {row[1].decode(): row[2].decode() for row in connection.execute(f'PRAGMA table_info("{name}")')}
    selected = ", ".join(f"coalesce({one}, '') AS {one}" if kind == "TEXT" else one for one, kind in columns.items())
    (_, _, file) = connection.execute("PRAGMA database_list").fetchone()
    with dbapi.connect(f"file:{file.decode()}?mode=ro") as long, long.cursor() as cursor:
        cursor.execute(f'SELECT {selected} FROM "{name}"')
        table = cursor.fetch_arrow_table()
    types = [pa.large_string() if kind == "TEXT" else _TYPES.get(one, pa.int64()) for one, kind in columns.items()]
    return table.cast(pa.schema(list(zip(columns, types, strict=True))), safe=False)


def _array(name: str, values: list[Any]) -> pa.Array:
    if any(isinstance(value, bytes) for value in values):
        blobs = pa.array([value if value is None else bytes(value) for value in values], pa.large_binary())
        return blobs.view(pa.large_string())  # as nsys writes binary payloads, too
    if any(isinstance(value, float) for value in values):
        return pa.array(values, pa.float64())
    return pa.array(values, pa.int64()).cast(_TYPES.get(name, pa.int64()), safe=False)


def _write(table: pa.Table, file: Path) -> None:
    if file.suffix == ".parquet":
        pq.write_table(table, file, row_group_size=_ROW_GROUP, compression="snappy")
        return
    with pa.OSFile(str(file), "wb") as out, pa.ipc.new_stream(out, table.schema) as stream:
        stream.write_table(table)
