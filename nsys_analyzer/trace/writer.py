"""Writes the tables of an nsys export."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from contextlib import closing
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Rows:
    """The rows of a table, read once: the names of its columns, with blanks between them, and their values."""

    columns: str
    values: Iterable[tuple[Any, ...]]


def write_tables(path: Path, tables: Mapping[str, Rows]) -> None:
    """Writes a SQLite file of tables; as in nsys, a table without rows is not there. Raises sqlite3.Error."""
    from sqlite_utils import Database

    database = Database(path)
    with closing(database.conn) as connection:
        # The file is nobody's until it is complete: there is nothing that a journal could save.
        connection.execute("PRAGMA journal_mode = OFF")
        connection.execute("PRAGMA synchronous = OFF")
        for name, rows in tables.items():
            remaining = iter(rows.values)
            first = next(remaining, None)
            if first is not None:
                kinds = (str if isinstance(value, str) else int for value in first)
                database.create_table(name, dict(zip(rows.columns.split(), kinds, strict=True)))
                marks = ", ".join("?" * len(first))
                # Rows as they come: the library's own inserts take dictionaries, at a multiple of the cost.
                connection.executemany(f'INSERT INTO "{name}" VALUES ({marks})', chain((first,), remaining))
        connection.commit()
