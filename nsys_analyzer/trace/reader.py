"""Reads the tables of an nsys export as columns: from SQLite through Arrow (ADBC), and from Parquet and Arrow files.

``nsys export --type parquetdir`` and ``arrowdir`` write a folder with one file per table. Only the requested columns
are read from the disk.
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

#: Matches the name of a table, with its version number if it has one, such as ``NVTX_EVENTS_V2``.
_VERSIONED_NAME = re.compile(r"(.*?)(?:_V([0-9]{1,6}))?")


class Reader(ABC):
    """An nsys export that is opened for reading.

    Attributes:
        path: the file or the folder.
        columns_of: the names of the columns of each table, by the table's name in the export.
    """

    path: Path
    columns_of: Mapping[str, tuple[str, ...]]

    @abstractmethod
    def count_rows(self, tables: Sequence[str]) -> dict[str, int]:
        """Returns the number of rows of each of these tables, by the table's name in the export."""

    @abstractmethod
    def has_rows(self, name: str) -> bool:
        """Returns whether a table, given by its name in the export, has any row."""

    @abstractmethod
    def _read_columns(
        self, name: str, table: Table, names_in_file: Mapping[Column, str | None], row_filter: Filter | None
    ) -> Frame:
        """Returns the columns of a table.

        Args:
            name: the table's name in the export.
            table: the declaration of the table.
            names_in_file: the columns to read, with their names in the export, or None for a missing column.
            row_filter: selects the rows to read; None for all rows.
        """

    def _check_signature(self, description: str, remedy: str) -> None:
        """Raises TraceError if the export has none of the tables that every version of nsys writes."""
        if not any(name in self.columns_of for name in SIGNATURE_TABLES):
            raise TraceError(f"{self.path} is {description}, but not an nsys export", remedy)

    def _make_damage_error(self, error: Exception) -> TraceError:
        """Returns the error for a damaged export, with the first line of the original error as the reason."""
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        return TraceError(f"{self.path} is damaged or truncated ({reason})", "Export the report again")

    def name_of(self, table: Table) -> str | None:
        """Returns the name of a table in this export; None if it is missing or empty (``nsys export --lazy=false``).

        Some versions of nsys append a number to the name of a table whose columns changed (``NVTX_EVENTS_V2``). The
        table with the highest number that has rows is used.
        """
        numbered_matches = [match for name in self.columns_of if (match := _VERSIONED_NAME.fullmatch(name))]
        for alias in table.aliases:
            required_columns = [c for c in table.columns if alias != table.aliases[0] and c.name in table.required]
            versions = {int(match[2] or 0): match[0] for match in numbered_matches if match[1] == alias}
            for _, name in sorted(versions.items(), reverse=True):
                if self.has_rows(name) and all(
                    find_alias(column, self.columns_of[name]) for column in required_columns
                ):
                    return name
        return None

    def unread_tables(self) -> tuple[str, ...]:
        """Returns the names of the tables that contain events, but from which the package reads nothing."""
        unread_tables = [
            name for name in self.columns_of if (_VERSIONED_NAME.fullmatch(name) or [name])[1] not in TABLE_ALIASES
        ]
        events = [name for name in unread_tables if {"start", "timestamp"} & {*self.columns_of[name]}]
        return tuple(sorted(filter(self.has_rows, events)))

    def read_all(self, tables: Iterable[Table]) -> dict[str, Frame]:
        """Reads tables with two threads, which is fastest if the largest come first, and returns them by their keys."""
        tables = tuple(tables)
        with ThreadPoolExecutor(2) as pool:  # two threads, because decoding a file releases the GIL
            return dict(zip((t.key for t in tables), pool.map(self.read, tables), strict=True))

    def read(self, table: Table) -> Frame:
        """Returns the columns of a table. A missing table has empty columns, and a missing column contains its default.

        Raises:
            MissingTableError: the table lacks a required column.
        """
        name = self.name_of(table)
        if name is None:
            return empty_frame(table.columns)
        names_in_file = {column: find_alias(column, self.columns_of[name]) for column in table.columns}
        for column, alias in names_in_file.items():
            if alias is None and column.name in table.required:
                raise MissingTableError(
                    f"{self.path}: table {name} has no column {column.aliases[0]}",
                    f"Capture again with --trace={table.trace_option} and a current nsys",
                )
        return self._read_columns(name, table, names_in_file, self.filter_of(table, name))

    def filter_of(self, table: Table, name: str) -> Filter | None:
        """Returns the filter of the table that is called ``name`` in the file; None if all its rows must be read."""
        row_filter = table.filter
        if row_filter is None or row_filter.column not in self.columns_of[name]:
            return None
        return None if row_filter.of_strings and "StringIds" not in self.columns_of else row_filter


def find_alias(column: Column, columns: Sequence[str]) -> str | None:
    """Returns the name of a column in a file, given the file's columns; None if it is missing."""
    return next((alias for alias in column.aliases if alias in columns), None)


#: The rows of a batch that the SQLite driver reads. With its default of 1,024, a million rows take three times as long.
_BATCH_ROWS = 16_384
#: The magic bytes of compressed files and archives, by their offset.
_COMPRESSED_FORMATS = {
    (0, b"\x1f\x8b"): "gzip",
    (0, b"PK\x03\x04"): "zip",
    (0, b"\xfd7zXZ"): "xz",
    (0, b"BZh"): "bzip2",
    (0, b"\x28\xb5\x2f\xfd"): "zstd",
    (257, b"ustar"): "tar",
}
_RECORD_HINT = f"Record the program with: {RECORD_COMMAND}"
_CHROME_TRACE_HINT = "With PyTorch's profiler, write a Chrome trace: prof.export_chrome_trace('trace.json.gz')"
#: Files that users mistake for captures: by the suffixes of their names, a description and a hint.
_UNSUPPORTED_FILES = {
    (".pftrace", ".perfetto-trace"): ("a trace in Perfetto's own format", _CHROME_TRACE_HINT),
    (".xplane.pb",): ("an XPlane file, which the profilers of TensorFlow and JAX write", _RECORD_HINT),
    tuple(f".{ending}{packed}" for ending in ("pickle", "pkl") for packed in ("", ".gz", ".xz", ".zst")): (
        "a pickle file, such as a memory snapshot of PyTorch, which contains no kernels",
        "Read a snapshot with: nsys-analyze memory FILE",
    ),
    (".ncu-rep",): ("a report of Nsight Compute", _RECORD_HINT),
    (".qdrep",): (
        "a report of Nsight Systems before 2021.4",
        "Export it, and give the export: nsys export --type sqlite FILE.qdrep",
    ),
    (".qdstrm",): ("a recording that nsys has not imported", "Import it: QdstrmImporter -i FILE.qdstrm"),
}
#: The bytes that are needed to recognize a file: the magic bytes of tar follow byte 257.
_HEADER_BYTES = 262
_EXPORT_HINT = "export it with: nsys export --type sqlite FILE.nsys-rep"


class SqliteReader(Reader):
    """An export in SQLite, which is opened read-only. ``uri`` is the URI that SQLite opens."""

    def __init__(self, path: Path) -> None:
        self.path = path
        _check_header(path)
        self.uri = immutable_uri(path)
        self._has_rows: dict[str, bool] = {}
        query = "SELECT m.name, p.name FROM sqlite_master m, pragma_table_info(m.name) p WHERE m.type = 'table'"
        columns: dict[str, list[str]] = defaultdict(list)
        for table, column in self.rows(query):
            columns[table].append(column)
        self.columns_of = {table: tuple(names) for table, names in columns.items()}
        self._check_signature("a SQLite file", f"To make one, {_EXPORT_HINT}")

    def count_rows(self, tables: Sequence[str]) -> dict[str, int]:
        """Returns the number of rows of each of these tables, by the table's name in the file."""
        return {name: self.rows(f"SELECT count(*) FROM {quote_identifier(name)}")[0][0] for name in tables}

    def rows(self, query: str, *parameters: str) -> list[tuple[Any, ...]]:
        """Returns the rows of a query, which must be few; raises TraceError for a damaged file."""
        try:
            with closing(sqlite3.connect(self.uri, uri=True)) as connection:
                connection.text_factory = lambda raw: raw.decode("utf-8", errors="replace")
                return connection.execute(query, parameters).fetchall()
        except (sqlite3.Error, UnicodeDecodeError) as error:  # UnicodeDecodeError if SQLite's message quotes a bad name
            raise self._make_damage_error(error) from error
        except MemoryError as error:  # the results of these queries are small, so a size in the file must be damaged
            raise self._make_damage_error(sqlite3.DatabaseError("it requires more memory than is available")) from error

    def has_rows(self, name: str) -> bool:
        """Returns whether a table, given by its name in the file, has any row."""
        if name not in self._has_rows:
            self._has_rows[name] = bool(self.rows(f"SELECT EXISTS (SELECT 1 FROM {quote_identifier(name)})")[0][0])
        return self._has_rows[name]

    def _read_columns(
        self, name: str, table: Table, names_in_file: Mapping[Column, str | None], row_filter: Filter | None
    ) -> Frame:
        import adbc_driver_sqlite
        import pyarrow as pa
        from adbc_driver_manager import AdbcConnection, AdbcStatement, Error

        where_clause = f" WHERE {row_filter.column} {row_filter.predicate}" if row_filter else ""
        selected_columns = ", ".join(_make_select_expression(column, alias) for column, alias in names_in_file.items())
        try:
            with (
                adbc_driver_sqlite.connect(self.uri) as database,
                AdbcConnection(database) as connection,
                AdbcStatement(connection) as statement,
            ):
                statement.set_options(**{"adbc.sqlite.query.batch_rows": str(_BATCH_ROWS)})
                statement.set_sql_query(f"SELECT {selected_columns} FROM {quote_identifier(name)}{where_clause}")
                stream, _ = statement.execute_query()
                return build_frame(pa.RecordBatchReader.from_stream(stream), table.columns)
        except MemoryError:
            raise  # ArrowMemoryError is an ArrowException, but does not mean that the file is damaged
        except (Error, pa.ArrowException, OSError, UnicodeDecodeError) as error:
            raise self._make_damage_error(error) from error


def immutable_uri(path: Path) -> str:
    """Returns the URI with which SQLite reads a database without writing locks, checkpoints or new files."""
    return f"file:{quote(os.path.realpath(os.fsencode(path)))}?mode=ro&immutable=1"


def _check_header(path: Path) -> None:
    """Checks the first bytes and the size of a SQLite file, and explains what is wrong.

    Raises:
        TraceError: the file cannot be read, is truncated, or is not a SQLite file.
    """
    if path.exists() and not (path.is_file() or path.is_dir()):  # opening a named pipe blocks until a process writes
        raise TraceError(f"{path} is not a regular file", "Give the path of a .sqlite or .nsys-rep file")
    try:
        with path.open("rb") as file:
            header = file.read(_HEADER_BYTES)
            size = file.seek(0, 2)
    except OSError as error:
        raise TraceError(f"{path}: {error.strerror}", "Give the path of a .sqlite or .nsys-rep file") from error
    if not header:
        raise TraceError(f"{path} is empty", "Export the report again")
    if header[:16] != b"SQLite format 3\x00":
        for endings, (description, remedy) in _UNSUPPORTED_FILES.items():
            if path.name.lower().endswith(endings):
                raise TraceError(f"{path} cannot be read: it is {description}", remedy)
        if archive := next(
            (name for (at, magic), name in _COMPRESSED_FORMATS.items() if header.startswith(magic, at)), None
        ):
            raise TraceError(f"{path} is compressed or an archive ({archive})", "Unpack it, and give the capture in it")
        raise TraceError(f"{path} is not a SQLite file", f"To make one, {_EXPORT_HINT}")
    page_size, page_count = int.from_bytes(header[16:18], "big"), int.from_bytes(header[28:32], "big")
    page_count_is_valid = header[24:28] == header[92:96]
    # The page count is valid if the file's change counter equals the counter that was stored with the page count. The
    # size is checked here, because SQLite reads the missing bytes of a truncated last page as zeros.
    if size < 100 or (page_count_is_valid and size < (65_536 if page_size == 1 else page_size) * page_count):
        raise TraceError(f"{path} is damaged or truncated (it has only {size:,} bytes)", "Export the report again")


def _make_select_expression(column: Column, alias: str | None) -> str:
    """Returns the SQL expression for a column that is called ``alias`` in the file; None is a missing column."""
    literal = "''" if column.is_text else str(column.default)
    source = literal if alias is None else quote_identifier(alias)
    if column.is_text:
        # NULL is replaced, because the driver infers the type of a column from its first batch. Texts are read as
        # bytes, because a name that was cut inside a character is not valid UTF-8.
        source = f"CAST(coalesce({source}, {literal}) AS BLOB)"
    return f"{source} AS {column.name}_"


def quote_identifier(identifier: str) -> str:
    """Returns the name of a table or column quoted for SQL. The name may contain any characters."""
    escaped = identifier.replace('"', '""')
    return f'"{escaped}"'


_ARROW_BATCH_ROWS = 65_536
_EXPORT_AGAIN_HINT = "Export the report again: nsys export --type parquetdir FILE.nsys-rep"


class ArrowReader(Reader):
    """An export as Arrow tables or Parquet files.

    Args:
        path: the file or the folder that contains the tables.
        tables: the tables, or their Parquet files, by the tables' names.
    """

    def __init__(self, path: Path, tables: Mapping[str, Path | pa.Table]) -> None:
        self.path = path
        self._tables = tables
        self._row_counts: dict[str, int] = {}
        columns: dict[str, tuple[str, ...]] = {}
        for name, table in tables.items():
            if isinstance(table, Path):
                import pyarrow.parquet as pq

                with self._explain_damage():
                    file = pq.ParquetFile(table)
                    columns[name], self._row_counts[name] = tuple(file.schema_arrow.names), file.metadata.num_rows
            else:
                columns[name], self._row_counts[name] = tuple(table.schema.names), table.num_rows
        self.columns_of = columns
        self._check_signature("a folder", _EXPORT_AGAIN_HINT)

    def count_rows(self, tables: Sequence[str]) -> dict[str, int]:
        """Returns the number of rows of each of these tables, by the table's name."""
        return {name: self._row_counts[name] for name in tables}

    def has_rows(self, name: str) -> bool:
        """Returns whether a table, given by its name, has any row."""
        return self._row_counts[name] > 0

    @contextmanager
    def _explain_damage(self) -> Iterator[None]:
        """Turns an error of the block into one that says that the export is damaged."""
        import pyarrow as pa

        try:
            yield
        except MemoryError:
            raise  # ArrowMemoryError is an ArrowException, but does not mean that the file is damaged
        except (pa.ArrowException, OSError, EOFError, UnicodeDecodeError, KeyError) as error:  # KeyError: column names
            raise self._make_damage_error(error) from error

    def _read_columns(
        self, name: str, table: Table, names_in_file: Mapping[Column, str | None], row_filter: Filter | None
    ) -> Frame:
        is_wanted = self._make_row_test(row_filter) if row_filter else None
        names = (*names_in_file.values(), *((row_filter.column,) if row_filter else ()))
        with self._explain_damage():
            return build_frame(self._read_batches(name, names), table.columns, is_wanted)

    def _read_batches(self, name: str, columns: Sequence[str | None]) -> Iterator[pa.RecordBatch]:
        """Yields batches of a table's rows with the given columns, in this order. None stands for a column of nulls."""
        import pyarrow as pa

        present_columns = list(dict.fromkeys(column for column in columns if column is not None))
        table = self._tables[name]
        if isinstance(table, Path):
            import pyarrow.parquet as pq

            parts = pq.ParquetFile(table).iter_batches(_ARROW_BATCH_ROWS, columns=present_columns, use_threads=False)
        else:
            parts = table.select(present_columns).to_batches(_ARROW_BATCH_ROWS)
        for part in parts:
            part.validate()
            nulls = pa.nulls(part.num_rows, pa.int64())
            arrays = [nulls if column is None else part.column(column) for column in columns]
            yield pa.RecordBatch.from_arrays(arrays, names=[str(i) for i in range(len(columns))])

    def _make_row_test(self, row_filter: Filter) -> Callable[[pa.RecordBatch], Bools]:
        """Returns the function that tests the last column of a batch, and returns the mask of the rows to read."""
        globs = re.compile("|".join(map(translate, row_filter.globs)) or "(?!)")
        values: Sequence[int | str] = row_filter.values
        if row_filter.of_strings:
            values = [number for number, text in iterate_rows(self.read(STRINGS)) if globs.match(text)]
        tests = (*row_filter.values, *row_filter.globs)
        are_texts = not row_filter.of_strings and any(isinstance(value, str) for value in tests)

        def is_wanted(batch: pa.RecordBatch) -> Bools:
            """Returns True for each row of the batch that must be read."""
            column = batch.columns[-1]
            if are_texts:
                texts = column.to_pylist()
                return np.array([t is not None and bool(t in values or globs.match(t)) for t in texts], np.bool_)
            numbers = arrow_to_integers(column, NO_TIME)
            are_wanted: Bools = np.isin(numbers, np.array(values, np.int64), invert=row_filter.excludes)
            are_wanted &= numbers != NO_TIME
            return are_wanted

        return is_wanted


def open_folder(path: Path) -> ArrowReader:
    """Opens an export that is a folder with one file per table. Tables of codes (``ENUM_…``) are ignored.

    Raises:
        TraceError: a file is damaged, the folder cannot be read, or it is not an export.
    """
    import pyarrow as pa

    tables: dict[str, Path | pa.Table] = {}
    try:
        for file in sorted(path.iterdir()):
            if file.suffix in TABLE_ENDINGS and file.is_file() and not file.stem.startswith("ENUM_"):
                is_arrow = file.suffix == ".arrow"
                tables[file.stem] = pa.ipc.open_stream(pa.memory_map(str(file))).read_all() if is_arrow else file
    except pa.ArrowException as error:
        raise TraceError(f"{path} is damaged or truncated ({error})", _EXPORT_AGAIN_HINT) from error
    except OSError as error:
        raise TraceError(f"{path}: {error.strerror}", "Give the path of an export of nsys") from error
    return ArrowReader(path, tables)


def write_sqlite(tables: Mapping[str, pa.Table], output: Path) -> None:
    """Writes tables to a new SQLite file, like an export of nsys; raises OSError if the file cannot be written."""
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
