"""Reads tables of Arrow: those of a folder with a file for each table, and tables in memory.

The folder is what ``nsys export --type parquetdir`` or ``arrowdir`` writes; only the columns that are asked for are
read from the disk.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from fnmatch import translate
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import quote

import numpy as np

from nsys_analyzer.errors import TraceError
from nsys_analyzer.trace.arrays import Bools, Frame, frame_of, integers_of
from nsys_analyzer.trace.nsys_report import TABLE_ENDINGS
from nsys_analyzer.trace.reader import Reader
from nsys_analyzer.trace.schema import STRINGS, Column, Filter, Table

if TYPE_CHECKING:
    import pyarrow as pa

_BATCH_ROWS = 65_536
_EXPORT_AGAIN = "Export the report again: nsys export --type parquetdir FILE.nsys-rep"
_NO_ID = -(2**62)


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

    def counts(self, tables: Sequence[str]) -> dict[str, int]:
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
        except (pa.ArrowException, OSError, EOFError, UnicodeDecodeError) as error:  # the last: of a column's name
            raise self._damaged(error) from error

    def _columns(self, name: str, table: Table, present: Mapping[Column, str | None], wanted: Filter | None) -> Frame:
        rows = min(self._rows[name], table.limit or self._rows[name])
        is_wanted = self._row_filter(wanted) if wanted else None
        names = (*present.values(), *((wanted.column,) if wanted else ()))
        with self._reading():
            return frame_of(self._batches(name, names, rows), table.columns, rows, is_wanted)

    def _batches(self, name: str, columns: Sequence[str | None], rows: int) -> Iterator[pa.RecordBatch]:
        """Yields the first rows of a table, with these columns in this order; a column without a name is of nulls."""
        import pyarrow as pa

        present = list(dict.fromkeys(column for column in columns if column is not None))
        table = self._tables[name]
        if isinstance(table, Path):
            import pyarrow.parquet as pq

            parts = pq.ParquetFile(table).iter_batches(_BATCH_ROWS, columns=present, use_threads=False)
        else:
            parts = table.select(present).to_batches(_BATCH_ROWS)
        for part in parts:
            if rows <= 0:
                return
            part.validate()
            nulls = pa.nulls(part.num_rows, pa.int64())
            arrays = [nulls if column is None else part.column(column) for column in columns]
            yield pa.RecordBatch.from_arrays(arrays, names=[str(i) for i in range(len(columns))]).slice(0, rows)
            rows -= part.num_rows

    def _row_filter(self, wanted: Filter) -> Callable[[pa.RecordBatch], Bools]:
        """Returns what tells which rows of a batch are wanted: by its last column, which is that of the filter."""
        globs = re.compile("|".join(map(translate, wanted.globs)))
        matches = globs.match if wanted.globs else lambda _text: None
        if not wanted.of_strings and any(isinstance(value, str) for value in (*wanted.values, *wanted.globs)):

            def has_text(batch: pa.RecordBatch) -> Bools:
                texts = batch.columns[-1].to_pylist()
                return np.array([t is not None and bool(t in wanted.values or matches(t)) for t in texts], np.bool_)

            return has_text
        listed = wanted.values
        if wanted.of_strings:
            strings = self.read(STRINGS)
            texts = strings["value"].to_pylist()
            listed = tuple(number for number, text in zip(strings["id"].tolist(), texts, strict=True) if matches(text))

        def has_number(batch: pa.RecordBatch) -> Bools:
            numbers = integers_of(batch.columns[-1], _NO_ID)
            are_wanted: Bools = (numbers != _NO_ID) & np.isin(
                numbers, np.array(listed, np.int64), invert=wanted.without
            )
            return are_wanted

        return has_number


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
