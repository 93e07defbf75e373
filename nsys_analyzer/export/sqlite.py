"""The table of GPU operations in an SQLite database."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

from nsys_analyzer.analysis.kernels.frame import OPERATION_COLUMNS
from nsys_analyzer.export.captures import Capture
from nsys_analyzer.export.tables import TABLE, operation_tables, plain_texts

#: SQLite keeps it at the byte 68 of the file: "nsys" as a number.
_APPLICATION_ID = int.from_bytes(b"nsys", "big")
_START, _PLACE = b"SQLite format 3\0", 68
_ROWS = 20_000


def write(captures: Sequence[Capture], path: Path) -> None:
    """Writes the operations of the captures into one table."""
    import sqlite3

    from sqlite_utils import Database

    types: dict[str, Any] = {"category": str, "integer": int, "flag": int}
    with closing(sqlite3.connect(path)) as connection:
        # The file takes its name when it is complete: a journal would guard nothing.
        connection.execute("PRAGMA journal_mode = OFF")
        connection.execute("PRAGMA synchronous = OFF")
        connection.execute(f"PRAGMA application_id = {_APPLICATION_ID}")
        columns = {name: types[one.type] for name, one in OPERATION_COLUMNS.items()}
        table = Database(connection).create_table(TABLE, columns)
        marks = ", ".join("?" * len(OPERATION_COLUMNS))
        with connection:
            for operations in operation_tables(captures):
                for batch in plain_texts(operations).to_batches(_ROWS):
                    rows = zip(*(column.to_pylist() for column in batch.columns), strict=True)
                    connection.executemany(f"INSERT INTO {table.name} VALUES ({marks})", rows)


def is_ours(path: Path) -> bool:
    """Whether a file is a database that was written here."""
    with path.open("rb") as file:
        start = file.read(_PLACE + 4)
    return start.startswith(_START) and start[_PLACE:] == _APPLICATION_ID.to_bytes(4, "big")
