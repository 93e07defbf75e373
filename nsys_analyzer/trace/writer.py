"""Writes the tables of an nsys export."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterable, Mapping
from contextlib import closing
from dataclasses import dataclass
from itertools import chain, islice
from pathlib import Path
from typing import Any

_AT_ONCE = 1 << 12
"""Rows that are in memory at once."""

_TOGETHER = 16
"""Rows that one statement writes: one for each row takes half as long again."""


@dataclass(frozen=True)
class Rows:
    """The rows of a table, read once: the names of its columns, with blanks between them, and their values."""

    columns: str
    values: Iterable[tuple[Any, ...]]


def write_tables(path: Path, tables: Mapping[str, Rows]) -> None:
    """Writes a SQLite file of tables; as in nsys, a table without rows is not there. Raises sqlite3.Error."""
    with closing(sqlite3.connect(path)) as connection:
        # The file is nobody's until it is complete: there is nothing that a journal could save.
        connection.execute("PRAGMA journal_mode = OFF")
        connection.execute("PRAGMA synchronous = OFF")
        for name, rows in tables.items():
            remaining = iter(rows.values)
            first = next(remaining, None)
            if first is not None:
                kinds = ("TEXT" if isinstance(value, str) else "INTEGER" for value in first)
                columns = (f'"{column}" {kind}' for column, kind in zip(rows.columns.split(), kinds, strict=True))
                connection.execute(f'CREATE TABLE "{name}" ({", ".join(columns)})')
                row = f"({', '.join('?' * len(first))})"
                one, many = (f'INSERT INTO "{name}" VALUES {", ".join([row] * times)}' for times in (1, _TOGETHER))
                values = chain((first,), remaining)
                while some := list(islice(values, _AT_ONCE)):
                    whole = len(some) - len(some) % _TOGETHER
                    flat = chain.from_iterable(some[:whole])
                    connection.executemany(many, zip(*[flat] * (len(first) * _TOGETHER), strict=True))
                    connection.executemany(one, some[whole:])
        connection.commit()
