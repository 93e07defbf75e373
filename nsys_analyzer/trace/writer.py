"""Writes the tables of an nsys export, as :mod:`nsys_analyzer.trace.schema` declares them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from contextlib import closing
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

from nsys_analyzer.trace.schema import TABLES


@dataclass(frozen=True)
class Rows:
    """The rows of a table, read once.

    Attributes:
        columns: the names of the columns that are filled, with blanks between them.
        values: those of each row, in this order.
    """

    columns: str
    values: Iterable[tuple[Any, ...]]


def write_tables(path: Path, tables: Mapping[str, Rows]) -> None:
    """Writes a SQLite file of tables, one after the other; as in nsys, a table without rows is not there.

    Raises:
        sqlite3.Error: the file cannot be written.
    """
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
                types, columns = TABLES[name].sql_types(), rows.columns.split()
                database.create_table(name, {one: types[one] for one in columns})
                marks = ", ".join("?" * len(columns))
                # Rows as they come: the library's own inserts take dictionaries, at a multiple of the cost.
                connection.executemany(f'INSERT INTO "{name}" VALUES ({marks})', chain((first,), remaining))
        connection.commit()
