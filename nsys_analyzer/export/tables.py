"""Exports the table of GPU operations as Parquet, CSV or SQLite, and describes its columns."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nsys_analyzer.export.frame import OPERATION_COLUMNS, operation_frame
from nsys_analyzer.export.writing import Capture
from nsys_analyzer.text import FORMULA_START

if TYPE_CHECKING:
    import pyarrow as pa

_FILE_METADATA = {"generator": "nsys-analyze export"}
_PARQUET_MAGIC = b"PAR1"
#: The application ID that marks the SQLite files of this tool, and its offset in a SQLite file in bytes.
_APPLICATION_ID, _APPLICATION_ID_OFFSET = b"nsys", 68
_TABLE_NAME = "gpu_operations"


class Parquet:
    """The table of GPU operations as Parquet. It is the smallest format, and contains types and units."""

    @staticmethod
    def write(captures: Sequence[Capture], path: Path) -> None:
        """Writes the operations of the captures, with one or more row groups for each capture."""
        from pyarrow import parquet

        schema = _make_arrow_schema().with_metadata(_FILE_METADATA)
        # Arrow decodes a path as UTF-8, but a path need not be valid UTF-8. So Arrow gets an open file.
        with path.open("wb") as file, parquet.ParquetWriter(file, schema, compression="zstd") as writer:
            for table in _make_operation_tables(captures):
                writer.write_table(table.replace_schema_metadata(_FILE_METADATA))

    @staticmethod
    def is_ours(path: Path) -> bool:
        """Checks whether this tool wrote a file as a Parquet table."""
        from pyarrow import ArrowException, parquet

        with path.open("rb") as file:
            if file.read(len(_PARQUET_MAGIC)) != _PARQUET_MAGIC:
                return False
            try:
                metadata = parquet.read_schema(file).metadata or {}
            except (ArrowException, OSError):  # the file only begins like a Parquet file
                return False
        return all(metadata.get(key.encode()) == value.encode() for key, value in _FILE_METADATA.items())


class Csv:
    """The table of GPU operations as CSV (RFC 4180, UTF-8).

    An empty field is a missing value, and ``""`` is an empty text. An apostrophe is put before each text that a
    spreadsheet would execute as a formula.
    """

    @staticmethod
    def write(captures: Sequence[Capture], path: Path) -> None:
        """Writes the operations of the captures as CSV, below a header."""
        from pyarrow import csv

        options = csv.WriteOptions(include_header=False, quoting_style="needed")
        with path.open("wb") as file:
            file.write(_make_csv_header())
            for table in _make_operation_tables(captures):
                csv.write_csv(_decode_categories(table, formulas=False), file, options)

    @staticmethod
    def is_ours(path: Path) -> bool:
        """Checks whether a file has the header of the CSV tables that this tool writes."""
        with path.open("rb") as file:
            return file.readline(2 * len(_make_csv_header())) == _make_csv_header()


class Sqlite:
    """The table of GPU operations in a SQLite database."""

    @staticmethod
    def write(captures: Sequence[Capture], path: Path) -> None:
        """Writes the operations of the captures into the table of the database."""
        from sqlite_utils import Database

        types: dict[str, Any] = {"category": str, "integer": int, "flag": int}
        with closing(Database(path)) as database:
            database.execute(f"PRAGMA application_id = {int.from_bytes(_APPLICATION_ID, 'big')}")
            columns = {name: types[column.type] for name, column in OPERATION_COLUMNS.items()}
            database.create_table(_TABLE_NAME, columns)
            # ``executemany`` takes a fifth of the time of ``insert_all``, which inserts only few rows with each
            # statement.
            insert = f"INSERT INTO {_TABLE_NAME} VALUES ({', '.join('?' * len(columns))})"
            for operations in _make_operation_tables(captures):
                for batch in _decode_categories(operations).to_batches(20_000):
                    with database.conn as connection:
                        connection.executemany(insert, zip(*batch.to_pydict().values(), strict=True))

    @staticmethod
    def is_ours(path: Path) -> bool:
        """Checks whether this tool wrote a file as a SQLite database."""
        with path.open("rb") as file:
            file.seek(_APPLICATION_ID_OFFSET)
            return file.read(4) == _APPLICATION_ID


def _make_operation_tables(captures: Sequence[Capture]) -> Iterator[pa.Table]:
    """Yields a table of each capture's operations, with times on the clock of the capture.

    Raises:
        MissingTableError: a capture has no GPU operations.
    """
    import pyarrow as pa

    for capture in captures:
        attributed = capture.read()
        frame = operation_frame(attributed)
        processes = capture.processes(attributed)
        if len(processes) == 1 and processes[0].rank is not None:
            frame["rank"] = frame["rank"].fillna(processes[0].rank)
        yield pa.Table.from_pandas(frame, _make_arrow_schema(), preserve_index=False)


def _make_arrow_schema() -> pa.Schema:
    """Returns the Arrow schema of the table of GPU operations, with the meaning and unit of each column."""
    import pyarrow as pa

    types = {"category": pa.dictionary(pa.int32(), pa.string()), "integer": pa.int64(), "flag": pa.bool_()}
    return pa.schema(
        [
            pa.field(name, types[column.type], metadata={"description": column.doc, "unit": column.unit})
            for name, column in OPERATION_COLUMNS.items()
        ]
    )


def _decode_categories(table: pa.Table, *, formulas: bool = True) -> pa.Table:
    """Returns a table with texts in place of categorical columns, for formats without categorical types.

    Unless ``formulas`` is set, an apostrophe is put before each text that a spreadsheet would execute as a formula.
    """
    import pyarrow as pa
    from pyarrow.compute import replace_substring_regex

    for index, field in enumerate(table.schema):
        if pa.types.is_dictionary(field.type):
            texts = table.column(index).cast(pa.string())
            texts = texts if formulas else replace_substring_regex(texts, FORMULA_START, r"'\1")
            table = table.set_column(index, field.with_type(pa.string()), texts)
    return table


def _make_csv_header() -> bytes:
    """Returns the first line of the CSV files."""
    return f"{','.join(OPERATION_COLUMNS)}\n".encode()
