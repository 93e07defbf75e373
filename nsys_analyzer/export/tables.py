"""The table of GPU operations in three formats, Parquet, CSV and SQLite, and what its columns are."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nsys_analyzer.export.frame import OPERATION_COLUMNS, operation_frame
from nsys_analyzer.export.writing import Capture
from nsys_analyzer.text import FORMULA

if TYPE_CHECKING:
    import pyarrow as pa

_GENERATOR = {"generator": "nsys-analyze export"}
_START_OF_PARQUET = b"PAR1"
#: SQLite keeps it at the byte 68 of the file: "nsys" as a number.
_APPLICATION_ID, _PLACE = b"nsys", 68
_TABLE = "gpu_operations"


class Parquet:
    """A Parquet file: the smallest, with types and units."""

    @staticmethod
    def write(captures: Sequence[Capture], path: Path) -> None:
        """Writes the operations of the captures, a row group or more for each."""
        from pyarrow import parquet

        schema = _arrow_schema().with_metadata(_GENERATOR)
        # Arrow takes a path for text, which not every one is.
        with path.open("wb") as file, parquet.ParquetWriter(file, schema, compression="zstd") as writer:
            for table in _operation_tables(captures):
                writer.write_table(table.replace_schema_metadata(_GENERATOR))

    @staticmethod
    def is_ours(path: Path) -> bool:
        """Returns whether a file is a table that was written here."""
        from pyarrow import ArrowException, parquet

        with path.open("rb") as file:
            if file.read(len(_START_OF_PARQUET)) != _START_OF_PARQUET:
                return False
            try:
                metadata = parquet.read_schema(file).metadata or {}
            except (ArrowException, OSError):  # it only begins as one does
                return False
        return all(metadata.get(key.encode()) == value.encode() for key, value in _GENERATOR.items())


class Csv:
    """CSV (RFC 4180, UTF-8): nothing between commas is a missing value, "" an empty text.

    A text that a spreadsheet would take for a formula has an apostrophe before it.
    """

    @staticmethod
    def write(captures: Sequence[Capture], path: Path) -> None:
        """Writes the operations of the captures, below one line of names."""
        from pyarrow import csv

        options = csv.WriteOptions(include_header=False, quoting_style="needed")
        with path.open("wb") as file:
            file.write(_header())
            for table in _operation_tables(captures):
                csv.write_csv(_plain_texts(table, formulas=False), file, options)

    @staticmethod
    def is_ours(path: Path) -> bool:
        """Returns whether a file has the columns of a table that was written here."""
        with path.open("rb") as file:
            return file.readline(2 * len(_header())) == _header()


class Sqlite:
    """An SQLite database with one table."""

    @staticmethod
    def write(captures: Sequence[Capture], path: Path) -> None:
        """Writes the operations of the captures into the table."""
        from sqlite_utils import Database

        types: dict[str, Any] = {"category": str, "integer": int, "flag": int}
        with closing(Database(path)) as database:
            database.execute(f"PRAGMA application_id = {int.from_bytes(_APPLICATION_ID, 'big')}")
            columns = {name: types[column.type] for name, column in OPERATION_COLUMNS.items()}
            database.create_table(_TABLE, columns)
            # A fifth of the time of its insert_all, which joins the values of few rows in a statement.
            insert = f"INSERT INTO {_TABLE} VALUES ({', '.join('?' * len(columns))})"
            for operations in _operation_tables(captures):
                for batch in _plain_texts(operations).to_batches(20_000):
                    with database.conn as connection:
                        connection.executemany(insert, zip(*batch.to_pydict().values(), strict=True))

    @staticmethod
    def is_ours(path: Path) -> bool:
        """Returns whether a file is a database that was written here."""
        with path.open("rb") as file:
            file.seek(_PLACE)
            return file.read(4) == _APPLICATION_ID


def column_reference() -> Iterator[tuple[str, str, str, str]]:
    """Yields name, type, unit and meaning of each column."""
    types = {"category": "text", "integer": "integer", "flag": "true or false"}
    return ((name, types[column.type], column.unit, column.doc) for name, column in OPERATION_COLUMNS.items())


def _operation_tables(captures: Sequence[Capture]) -> Iterator[pa.Table]:
    """Yields the operations of each capture, in columns of the schema; times are on the clock of their capture.

    Raises:
        MissingTableError: a capture has no GPU activity.
    """
    import pyarrow as pa

    for capture in captures:
        attributed = capture.read()
        frame = operation_frame(attributed)
        processes = capture.processes(attributed)
        if len(processes) == 1 and processes[0].rank is not None:
            frame["rank"] = frame["rank"].fillna(processes[0].rank)
        yield pa.Table.from_pandas(frame, _arrow_schema(), preserve_index=False)


def _arrow_schema() -> pa.Schema:
    """Returns the columns, each with what it says and its unit in its metadata."""
    import pyarrow as pa

    types = {"category": pa.dictionary(pa.int32(), pa.string()), "integer": pa.int64(), "flag": pa.bool_()}
    return pa.schema(
        [
            pa.field(name, types[column.type], metadata={"description": column.doc, "unit": column.unit})
            for name, column in OPERATION_COLUMNS.items()
        ]
    )


def _plain_texts(table: pa.Table, *, formulas: bool = True) -> pa.Table:
    """Returns the table with texts in place of codes, for formats that know no codes."""
    import pyarrow as pa
    from pyarrow.compute import replace_substring_regex

    for place, field in enumerate(table.schema):
        if pa.types.is_dictionary(field.type):
            texts = table.column(place).cast(pa.string())
            texts = texts if formulas else replace_substring_regex(texts, FORMULA, r"'\1")
            table = table.set_column(place, field.with_type(pa.string()), texts)
    return table


def _header() -> bytes:
    return f"{','.join(OPERATION_COLUMNS)}\n".encode()
