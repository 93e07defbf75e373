"""Reads tables of an nsys export as columns, never as rows: of SQLite through Arrow (ADBC), of Parquet and Arrow.

A folder is what ``nsys export --type parquetdir`` or ``arrowdir`` writes, with a file for each table; only the columns
that are asked for are read from the disk.
"""

from __future__ import annotations

import os
import re
import sqlite3
from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from fnmatch import translate
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

import numpy as np

from nsys_analyzer.errors import RECORD_COMMAND, MissingTableError, TraceError
from nsys_analyzer.trace.arrays import Bools, Frame, arrow_to_integers, build_frame, empty_frame, iterate_rows
from nsys_analyzer.trace.schema import (
    NO_TIME,
    SIGNATURE_TABLES,
    STRINGS,
    TABLE_ALIASES,
    TABLE_ENDINGS,
    Column,
    Filter,
    Table,
)

if TYPE_CHECKING:
    import pyarrow as pa

#: The name of a table, and the number of its version.
_NUMBERED = re.compile(r"(.*?)(?:_V([0-9]{1,6}))?")


class Reader(ABC):
    """An nsys export that is only read.

    Attributes:
        path: the file or the folder.
        columns_of: the columns of each of its tables, by the tables' names.
    """

    path: Path
    columns_of: Mapping[str, tuple[str, ...]]

    @abstractmethod
    def count_rows(self, tables: Sequence[str]) -> dict[str, int]:
        """Returns rows of some tables, by their names in the export."""

    @abstractmethod
    def has_rows(self, name: str) -> bool:
        """Returns whether a table of the export, by its name there, holds a row."""

    @abstractmethod
    def _columns(self, name: str, table: Table, present: Mapping[Column, str | None], wanted: Filter | None) -> Frame:
        """Returns the columns of a table called ``name``, each by its own name there or None, of the rows wanted."""

    def _check_signature(self, what: str, remedy: str) -> None:
        if not any(name in self.columns_of for name in SIGNATURE_TABLES):
            raise TraceError(f"{self.path} is {what}, but not an nsys export", remedy)

    def _damaged(self, error: Exception) -> TraceError:
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        return TraceError(f"{self.path} is damaged or truncated ({reason})", "Export the report again")

    def name_of(self, table: Table) -> str | None:
        """Returns the name of a table in this export; None where it is absent or empty (``nsys export --lazy=false``).

        Some nsys number a table whose columns changed (``NVTX_EVENTS_V2``): the newest that holds a row counts.
        """
        numbered = [match for name in self.columns_of if (match := _NUMBERED.fullmatch(name))]
        for alias in table.aliases:
            required = [c for c in table.columns if alias != table.aliases[0] and c.name in table.required]
            versions = {int(match[2] or 0): match[0] for match in numbered if match[1] == alias}
            for _, name in sorted(versions.items(), reverse=True):
                if self.has_rows(name) and all(column_in(column, self.columns_of[name]) for column in required):
                    return name
        return None

    def unread_tables(self) -> tuple[str, ...]:
        """Returns the names of the tables of events that were recorded, and of which nothing is read."""
        unread = [name for name in self.columns_of if (_NUMBERED.fullmatch(name) or [name])[1] not in TABLE_ALIASES]
        events = [name for name in unread if {"start", "timestamp"} & {*self.columns_of[name]}]
        return tuple(sorted(filter(self.has_rows, events)))

    def read_all(self, tables: Iterable[Table]) -> dict[str, Frame]:
        """Reads several tables side by side, largest first is fastest; keys are the tables' keys."""
        tables = tuple(tables)
        with ThreadPoolExecutor(2) as pool:  # whatever decodes a file releases the GIL
            return dict(zip((t.key for t in tables), pool.map(self.read, tables), strict=True))

    def read(self, table: Table) -> Frame:
        """Returns one table as columns; an absent table has columns of length 0, an absent column its default.

        Raises:
            MissingTableError: the table lacks a column the analysis cannot do without.
        """
        name = self.name_of(table)
        if name is None:
            return empty_frame(table.columns)
        present = {column: column_in(column, self.columns_of[name]) for column in table.columns}
        for column, alias in present.items():
            if alias is None and column.name in table.required:
                raise MissingTableError(
                    f"{self.path}: table {name} has no column {column.aliases[0]}",
                    f"Capture again with --trace={table.trace_option} and a current nsys",
                )
        return self._columns(name, table, present, self.filter_of(table, name))

    def filter_of(self, table: Table, name: str) -> Filter | None:
        """Returns the rows worth reading of a table with this name in the file; None for all."""
        wanted = table.filter
        usable = wanted and wanted.column in self.columns_of[name] and (wanted.table or name) in self.columns_of
        return wanted if usable else None


def column_in(column: Column, columns: Sequence[str]) -> str | None:
    """Returns the name that a column has among those of a table in a file, None where it is not there."""
    return next((alias for alias in column.aliases if alias in columns), None)


_BATCH_ROWS = 16_384  # the driver's 1,024 costs three times as long on a million rows
#: How packed files and archives begin: bytes by their place.
_PACKED = {
    (0, b"\x1f\x8b"): "gzip",
    (0, b"PK\x03\x04"): "zip",
    (0, b"\xfd7zXZ"): "xz",
    (0, b"BZh"): "bzip2",
    (0, b"\x28\xb5\x2f\xfd"): "zstd",
    (257, b"ustar"): "tar",
}
_RECORD = f"Record the program with: {RECORD_COMMAND}"
_CHROME_TRACE = "With PyTorch's profiler, write a Chrome trace: prof.export_chrome_trace('trace.json.gz')"
#: Files that people take for captures, by the endings of their names: a description, and what to do.
_FOREIGN = {
    (".pftrace", ".perfetto-trace"): ("a trace in Perfetto's own format", _CHROME_TRACE),
    (".xplane.pb",): ("an XPlane file, as the profilers of TensorFlow and JAX write it", _RECORD),
    (".pickle", ".pkl"): ("a pickle, as PyTorch's memory snapshots are (see https://pytorch.org/memory_viz)", _RECORD),
    (".ncu-rep",): ("a report of Nsight Compute", _RECORD),
    (".qdstrm",): ("a recording that nsys has not imported", "Import it: QdstrmImporter -i FILE.qdstrm"),
}
_HEADER = 262
_NOT_SQLITE = "export it with: nsys export --type sqlite FILE.nsys-rep"


class SqliteReader(Reader):
    """An export in SQLite, opened read-only and immutable; ``uri`` is what SQLite opens."""

    def __init__(self, path: Path) -> None:
        self.path = path
        _check_header(path)
        self.uri = immutable_uri(path)
        self._filled: dict[str, bool] = {}
        query = "SELECT m.name, p.name FROM sqlite_master m, pragma_table_info(m.name) p WHERE m.type = 'table'"
        columns: dict[str, list[str]] = defaultdict(list)
        for table, column in self.rows(query):
            columns[table].append(column)
        self.columns_of = {table: tuple(names) for table, names in columns.items()}
        self._check_signature("a SQLite file", f"To make one, {_NOT_SQLITE}")

    def count_rows(self, tables: Sequence[str]) -> dict[str, int]:
        """Returns rows of some tables, by their names in the file."""
        return {name: self.rows(f"SELECT count(*) FROM {quote_identifier(name)}")[0][0] for name in tables}

    def rows(self, query: str, *parameters: str) -> list[tuple[Any, ...]]:
        """Returns the few rows that a query finds, for no large table; raises TraceError for a damaged file."""
        try:
            with closing(sqlite3.connect(self.uri, uri=True)) as connection:
                connection.text_factory = lambda raw: raw.decode("utf-8", errors="replace")
                return connection.execute(query, parameters).fetchall()
        except (sqlite3.Error, UnicodeDecodeError) as error:  # of SQLite's own message, where it quotes a broken name
            raise self._damaged(error) from error
        except MemoryError as error:  # a broken size: these queries find few rows
            raise self._damaged(sqlite3.DatabaseError("it asks for more memory than there is")) from error

    def has_rows(self, name: str) -> bool:
        """Returns whether a table of the file, by its name there, holds a row."""
        if name not in self._filled:
            self._filled[name] = bool(self.rows(f"SELECT EXISTS (SELECT 1 FROM {quote_identifier(name)})")[0][0])
        return self._filled[name]

    def _columns(self, name: str, table: Table, present: Mapping[Column, str | None], wanted: Filter | None) -> Frame:
        import adbc_driver_sqlite
        import pyarrow as pa
        from adbc_driver_manager import AdbcConnection, AdbcStatement, Error

        where = f" WHERE {wanted.column} {wanted.predicate}" if wanted else ""
        selected = ", ".join(_expression(column, alias) for column, alias in present.items())
        try:
            with (
                adbc_driver_sqlite.connect(self.uri) as database,
                AdbcConnection(database) as connection,
                AdbcStatement(connection) as statement,
            ):
                statement.set_options(**{"adbc.sqlite.query.batch_rows": str(_BATCH_ROWS)})
                statement.set_sql_query(f"SELECT {selected} FROM {quote_identifier(name)}{where}")
                stream, _ = statement.execute_query()
                return build_frame(pa.RecordBatchReader.from_stream(stream), table.columns)
        except MemoryError:
            raise  # Arrow's is an ArrowException, too, and says nothing of the file
        except (Error, pa.ArrowException, OSError, UnicodeDecodeError) as error:
            raise self._damaged(error) from error


def immutable_uri(path: Path) -> str:
    """Returns the URI by which SQLite reads a database as it is: no lock, no checkpoint, nothing written beside it."""
    return f"file:{quote(os.path.realpath(os.fsencode(path)))}?mode=ro&immutable=1"


def _check_header(path: Path) -> None:
    if path.exists() and not (path.is_file() or path.is_dir()):  # a pipe would be waited for
        raise TraceError(f"{path} is no regular file", "Give the path of a .sqlite or .nsys-rep file")
    try:
        with path.open("rb") as file:
            header = file.read(_HEADER)
            size = file.seek(0, 2)
    except OSError as error:
        raise TraceError(f"{path}: {error.strerror}", "Give the path of a .sqlite or .nsys-rep file") from error
    if not header:
        raise TraceError(f"{path} is empty", "Export the report again")
    if packed := next((name for (at, magic), name in _PACKED.items() if header.startswith(magic, at)), None):
        raise TraceError(f"{path} is an archive or packed ({packed})", "Unpack it and give what is in it")
    if header[:16] != b"SQLite format 3\x00":
        for endings, (description, remedy) in _FOREIGN.items():
            if path.name.lower().endswith(endings):
                raise TraceError(f"{path} cannot be read: it is {description}", remedy)
        raise TraceError(f"{path} is not a SQLite file", f"To make one, {_NOT_SQLITE}")
    page, pages = int.from_bytes(header[16:18], "big"), int.from_bytes(header[28:32], "big")
    says_its_size = header[24:28] == header[92:96]  # the change counter, as it was when the count was written
    # SQLite reads what a half-written last page lacks as zeros.
    if size < 100 or (says_its_size and size < (65_536 if page == 1 else page) * pages):
        raise TraceError(f"{path} is damaged or truncated ({size:,} bytes are left of it)", "Export the report again")


def _expression(column: Column, alias: str | None) -> str:
    literal = "''" if column.is_text else str(column.default)
    source = literal if alias is None else quote_identifier(alias)
    if column.is_text:
        # The driver takes a column's type from its first batch: a text that is NULL there must not be. As bytes,
        # since a name cut in the middle of a character is no valid text.
        source = f"CAST(coalesce({source}, {literal}) AS BLOB)"
    return f"{source} AS {column.name}_"


def quote_identifier(identifier: str) -> str:
    """Returns a name of a table or column as SQL takes it, whatever is in it."""
    escaped = identifier.replace('"', '""')
    return f'"{escaped}"'


_ARROW_ROWS = 65_536
_EXPORT_AGAIN = "Export the report again: nsys export --type parquetdir FILE.nsys-rep"


class ArrowReader(Reader):
    """An export as tables of Arrow.

    Args:
        path: the file or the folder that the tables are of.
        tables: the tables, or files of Parquet, by the tables' names.
    """

    def __init__(self, path: Path, tables: Mapping[str, Path | pa.Table]) -> None:
        self.path = path
        self._tables = tables
        self._rows: dict[str, int] = {}
        columns: dict[str, tuple[str, ...]] = {}
        for name, table in tables.items():
            if isinstance(table, Path):
                import pyarrow.parquet as pq

                with self._reading():
                    file = pq.ParquetFile(table)
                    columns[name], self._rows[name] = tuple(file.schema_arrow.names), file.metadata.num_rows
            else:
                columns[name], self._rows[name] = tuple(table.schema.names), table.num_rows
        self.columns_of = columns
        self._check_signature("a folder", _EXPORT_AGAIN)

    def count_rows(self, tables: Sequence[str]) -> dict[str, int]:
        """Returns the rows of some tables, by their names."""
        return {name: self._rows[name] for name in tables}

    def has_rows(self, name: str) -> bool:
        """Returns whether a table, by its name, holds a row."""
        return self._rows[name] > 0

    @contextmanager
    def _reading(self) -> Iterator[None]:
        import pyarrow as pa

        try:
            yield
        except MemoryError:
            raise  # Arrow's is an ArrowException, too, and says nothing of the file
        except (pa.ArrowException, OSError, EOFError, UnicodeDecodeError, KeyError) as error:  # of columns' names
            raise self._damaged(error) from error

    def _columns(self, name: str, table: Table, present: Mapping[Column, str | None], wanted: Filter | None) -> Frame:
        is_wanted = self._row_filter(wanted) if wanted else None
        names = (*present.values(), *((wanted.column,) if wanted else ()))
        with self._reading():
            return build_frame(self._batches(name, names), table.columns, is_wanted)

    def _batches(self, name: str, columns: Sequence[str | None]) -> Iterator[pa.RecordBatch]:
        """Yields the rows of a table, with these columns in this order; a column without a name is of nulls."""
        import pyarrow as pa

        present = list(dict.fromkeys(column for column in columns if column is not None))
        table = self._tables[name]
        if isinstance(table, Path):
            import pyarrow.parquet as pq

            parts = pq.ParquetFile(table).iter_batches(_ARROW_ROWS, columns=present, use_threads=False)
        else:
            parts = table.select(present).to_batches(_ARROW_ROWS)
        for part in parts:
            part.validate()
            nulls = pa.nulls(part.num_rows, pa.int64())
            arrays = [nulls if column is None else part.column(column) for column in columns]
            yield pa.RecordBatch.from_arrays(arrays, names=[str(i) for i in range(len(columns))])

    def _row_filter(self, wanted: Filter) -> Callable[[pa.RecordBatch], Bools]:
        """Returns what tells which rows of a batch are wanted: by its last column, which is that of the filter."""
        globs = re.compile("|".join(map(translate, wanted.globs)) or "(?!)")
        listed: Sequence[int | str] = wanted.values
        if wanted.of_strings:
            listed = [number for number, text in iterate_rows(self.read(STRINGS)) if globs.match(text)]
        are_texts = not wanted.of_strings and any(isinstance(value, str) for value in (*wanted.values, *wanted.globs))

        def is_wanted(batch: pa.RecordBatch) -> Bools:
            column = batch.columns[-1]
            if are_texts:
                texts = column.to_pylist()
                return np.array([t is not None and bool(t in listed or globs.match(t)) for t in texts], np.bool_)
            numbers = arrow_to_integers(column, NO_TIME)
            are_wanted: Bools = np.isin(numbers, np.array(listed, np.int64), invert=wanted.without)
            are_wanted &= numbers != NO_TIME
            return are_wanted

        return is_wanted


def open_folder(path: Path) -> ArrowReader:
    """Opens an export with one file for each table; lists of nsys's own codes (``ENUM_…``) are left out."""
    import pyarrow as pa

    tables: dict[str, Path | pa.Table] = {}
    try:
        for file in sorted(path.iterdir()):
            if file.suffix in TABLE_ENDINGS and file.is_file() and not file.stem.startswith("ENUM_"):
                is_arrow = file.suffix == ".arrow"
                tables[file.stem] = pa.ipc.open_stream(pa.memory_map(str(file))).read_all() if is_arrow else file
    except pa.ArrowException as error:
        raise TraceError(f"{path} is damaged or truncated ({error})", _EXPORT_AGAIN) from error
    except OSError as error:
        raise TraceError(f"{path}: {error.strerror}", "Give the path of an export of nsys") from error
    return ArrowReader(path, tables)


def write_sqlite(tables: Mapping[str, pa.Table], output: Path) -> None:
    """Writes tables to a new SQLite file, as an export of nsys has them; raises OSError where it cannot be written."""
    import adbc_driver_sqlite
    from adbc_driver_manager import AdbcConnection, AdbcStatement, Error

    try:
        uri = f"file:{quote(os.fsencode(output))}"
        with adbc_driver_sqlite.connect(uri) as database, AdbcConnection(database) as connection:
            for name, table in tables.items():
                with AdbcStatement(connection) as statement:
                    statement.set_options(**{"adbc.ingest.target_table": name})
                    statement.bind_stream(table.to_reader())
                    statement.execute_update()
    except Error as error:
        raise OSError(f"{error}") from error
