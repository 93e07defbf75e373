"""Reads an nsys export in SQLite through Arrow (ADBC)."""

from __future__ import annotations

import os
import shlex
import sqlite3
import sys
from collections.abc import Mapping, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any
from urllib.parse import quote

from nsys_analyzer.errors import TraceError
from nsys_analyzer.trace.arrays import Frame
from nsys_analyzer.trace.batches import frame_of
from nsys_analyzer.trace.reader import Reader
from nsys_analyzer.trace.schema import Column, Filter, Table

_BATCH_ROWS = 16_384  # the driver's 1,024 costs three times as long on a million rows
_COUNTED_AT_ONCE = 500
_NO_TEXT = "\N{REPLACEMENT CHARACTER}"
_HOT_JOURNAL = bytes.fromhex("d9d505f920a163d7")
_NOT_SQLITE = "export it with: nsys export --type sqlite FILE.nsys-rep"


class SqliteReader(Reader):
    """An export in SQLite, opened read-only and immutable; ``uri`` is what SQLite opens."""

    def __init__(self, path: Path) -> None:
        self.path = path
        _check_header(path)
        self.uri = immutable_uri(path)
        self._filled: dict[str, bool] = {}
        self.columns_of = self._catalog()
        self._check_signature("a SQLite file", f"To make one, {_NOT_SQLITE}")

    def _catalog(self) -> dict[str, tuple[str, ...]]:
        """The columns of every table of the file whose name is text."""
        query = "SELECT m.name, p.name FROM sqlite_master m, pragma_table_info(m.name) p WHERE m.type = 'table'"
        columns: dict[str, list[str]] = {}
        for table, column in self.rows(query):
            columns.setdefault(table, []).append(column)
        return {table: tuple(names) for table, names in columns.items() if _NO_TEXT not in table}

    def counts(self, tables: Sequence[str]) -> dict[str, int]:
        """Rows of some tables, by their names in the file."""
        found: dict[str, int] = {}
        for first in range(0, len(tables), _COUNTED_AT_ONCE):
            some = tables[first : first + _COUNTED_AT_ONCE]
            (counted,) = self.rows("SELECT " + ", ".join(f"(SELECT count(*) FROM {quoted(name)})" for name in some))
            found |= dict(zip(some, counted, strict=True))
        return found

    def rows(self, query: str, *parameters: str) -> list[tuple[Any, ...]]:
        """The few rows that a query finds; large tables are read as columns. Raises TraceError for a damaged file."""
        try:
            with closing(sqlite3.connect(self.uri, uri=True)) as connection:
                connection.text_factory = lambda raw: raw.decode("utf-8", errors="replace")
                return connection.execute(query, parameters).fetchall()
        except (sqlite3.Error, UnicodeDecodeError) as error:  # of SQLite's own message, where it quotes a broken name
            raise self._damaged(error) from error
        except MemoryError as error:  # a broken size: these queries find few rows
            raise self._damaged(sqlite3.DatabaseError("it asks for more memory than there is")) from error

    def has_rows(self, name: str) -> bool:
        """Whether a table of the file, by its name there, holds a row."""
        if name not in self._filled:
            self._filled[name] = bool(self.rows(f"SELECT EXISTS (SELECT 1 FROM {quoted(name)})")[0][0])
        return self._filled[name]

    def _columns(self, name: str, table: Table, present: Mapping[Column, str | None], wanted: Filter | None) -> Frame:
        where = f" WHERE {wanted.column} {wanted.predicate}" if wanted else ""
        selected = ", ".join(_expression(column, alias) for column, alias in present.items())
        limit = f" LIMIT {table.limit}" if table.limit else ""
        rows = min(self._most_rows(name), table.limit or sys.maxsize)
        return self._query(f"SELECT {selected} FROM {quoted(name)}{where}{limit}", table.columns, rows)

    def _most_rows(self, name: str) -> int:
        """How many rows a table has at the most, as a rule: its last row's number, where the file has room for them."""
        try:
            ((last,),) = self.rows(f"SELECT max(rowid) FROM {quoted(name)}")
        except TraceError:  # its rows have no numbers, or whoever reads them sees the damage
            return 0
        most = self.path.stat().st_size // (2 + len(self.columns_of[name]))  # a row's own size, and one of each value
        return min(last, most) if isinstance(last, int) and last > 0 else 0

    def _query(self, sql: str, columns: tuple[Column, ...], rows: int) -> Frame:
        import adbc_driver_sqlite
        import pyarrow as pa
        from adbc_driver_manager import AdbcConnection, AdbcStatement, Error

        try:
            with (
                adbc_driver_sqlite.connect(self.uri) as database,
                AdbcConnection(database) as connection,
                AdbcStatement(connection) as statement,
            ):
                statement.set_options(**{"adbc.sqlite.query.batch_rows": str(_BATCH_ROWS)})
                statement.set_sql_query(sql)
                stream, _ = statement.execute_query()
                return frame_of(pa.RecordBatchReader.from_stream(stream), columns, rows)
        except MemoryError:
            raise  # Arrow's is an ArrowException, too, and says nothing of the file
        except (Error, pa.ArrowException, OSError) as error:
            raise self._damaged(error) from error


def immutable_uri(path: Path) -> str:
    """The URI by which SQLite reads a database as it is: no lock, no checkpoint, nothing written beside it."""
    return f"file:{quote(os.path.realpath(os.fsencode(path)))}?mode=ro&immutable=1"


def _check_header(path: Path) -> None:
    if path.exists() and not (path.is_file() or path.is_dir()):  # a pipe would be waited for
        raise TraceError(f"{path} is no regular file", "Give the path of a .sqlite or .nsys-rep file")
    try:
        with path.open("rb") as file:
            header = file.read(100)
            size = file.seek(0, 2)
    except OSError as error:
        raise TraceError(f"{path}: {error.strerror}", "Give the path of a .sqlite or .nsys-rep file") from error
    if not header:
        raise TraceError(f"{path} is empty", "Export the report again")
    if header[:16] != b"SQLite format 3\x00":
        raise TraceError(f"{path} is not a SQLite file", f"To make one, {_NOT_SQLITE}")
    if size < _size_in_header(header):  # SQLite reads what a half-written last page lacks as zeros
        raise TraceError(f"{path} is damaged or truncated ({size:,} bytes are left of it)", "Export the report again")
    _check_journals(path, in_wal_mode=2 in header[18:20])


def _check_journals(path: Path, *, in_wal_mode: bool) -> None:
    """Makes sure that no change waits beside the file, which is read as it is."""
    real = os.path.realpath(path)  # SQLite writes them beside the file that a link leads to
    wal, journal = Path(f"{real}-wal"), Path(f"{real}-journal")
    unfinished = journal.is_file() and journal.read_bytes()[: len(_HOT_JOURNAL)] == _HOT_JOURNAL
    if unfinished or (in_wal_mode and wal.is_file() and wal.stat().st_size):
        waiting = journal if unfinished else wal
        raise TraceError(
            f"{waiting} holds changes that are not in {path.name} yet",
            "Once whatever writes it has ended, open it once to take them in: "
            f"sqlite3 {shlex.quote(str(path))} 'PRAGMA wal_checkpoint(TRUNCATE)'",
        )


def _size_in_header(header: bytes) -> int:
    """The size in bytes that a database says it has; 100, its header's, where it does not say."""
    page, pages = int.from_bytes(header[16:18], "big"), int.from_bytes(header[28:32], "big")
    known = header[24:28] == header[92:96]  # the change counter, as it was when the count was written
    return max(100, (65_536 if page == 1 else page) * pages) if known else 100


def _expression(column: Column, alias: str | None) -> str:
    literal = "''" if column.is_text else str(column.default)
    source = literal if alias is None else quoted(alias)
    if column.is_text:
        # The driver takes a column's type from its first batch: a text that is NULL there must not be. As bytes,
        # since a name cut in the middle of a character is no valid text.
        source = f"CAST(coalesce({source}, {literal}) AS BLOB)"
    return f"{source} AS {column.name}_"


def quoted(identifier: str) -> str:
    """A name of a table or column as SQL takes it, whatever is in it."""
    escaped = identifier.replace('"', '""')
    return f'"{escaped}"'
