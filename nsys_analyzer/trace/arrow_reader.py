"""Reads tables in Arrow's batches: those of a folder with a file for each table, and tables in memory.

The folder is what ``nsys export --type parquetdir`` or ``arrowdir`` writes; only the columns that are asked for are
read from the disk.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from fnmatch import translate
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

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
    """An export in Arrow's batches.

    Args:
        path: the file or the folder that the tables are of.
        tables: what holds each table, by the tables' names.
    """

    def __init__(self, path: Path, tables: Mapping[str, _TableFile | pa.RecordBatch]) -> None:
        self.path = path
        self._tables = tables
        self._rows: dict[str, int] = {}
        self.columns_of = {
            name: tuple(self._read(partial(getattr, table, "schema")).names) for name, table in tables.items()
        }
        self._check_signature("a folder", _EXPORT_AGAIN)

    def counts(self, tables: Sequence[str]) -> dict[str, int]:
        """Returns the rows of some tables, by their names."""
        for name in tables:
            if name not in self._rows:
                self._rows[name] = self._read(partial(getattr, self._tables[name], "num_rows"))
        return {name: self._rows[name] for name in tables}

    def has_rows(self, name: str) -> bool:
        """Returns whether a table, by its name, holds a row."""
        return self.counts([name])[name] > 0

    def _read(self, action: Callable[[], Any]) -> Any:
        import pyarrow as pa

        try:
            return action()
        except MemoryError:
            raise  # Arrow's is an ArrowException, too, and says nothing of the file
        except (pa.ArrowException, OSError, EOFError, UnicodeDecodeError) as error:  # the last: of a column's name
            raise self._damaged(error) from error

    def _columns(self, name: str, table: Table, present: Mapping[Column, str | None], wanted: Filter | None) -> Frame:
        rows = min(self.counts([name])[name], table.limit or self._rows[name])
        chosen = self._chosen(wanted) if wanted else None
        names = (*present.values(), *((wanted.column,) if wanted else ()))
        batches = _first(_batches_of(self._tables[name], names), rows)
        return self._read(lambda: frame_of(batches, table.columns, rows, chosen))  # type: ignore[no-any-return]

    def _chosen(self, wanted: Filter) -> Callable[[pa.RecordBatch], Bools]:
        """Returns what tells which rows of a batch are wanted: by its last column, which is that of the filter."""
        matches = (
            re.compile("|".join(translate(glob) for glob in wanted.globs)).match if wanted.globs else lambda _: None
        )
        if not wanted.of_strings and any(isinstance(value, str) for value in (*wanted.values, *wanted.globs)):
            return lambda batch: np.array(
                [
                    text is not None and bool(text in wanted.values or matches(text))
                    for text in batch.columns[-1].to_pylist()
                ],
                np.bool_,
            )
        listed = np.array(self._ids_of(matches) if wanted.of_strings else wanted.values, np.int64)

        def chosen(batch: pa.RecordBatch) -> Bools:
            numbers = integers_of(batch.columns[-1], _NO_ID)
            found: Bools = (numbers != _NO_ID) & np.isin(numbers, listed, invert=wanted.without)
            return found

        return chosen

    def _ids_of(self, matches: Callable[[str], object]) -> list[int]:
        """Returns the IDs of the strings that match."""
        strings = self.read(STRINGS)
        texts = strings["value"].to_pylist()
        return [number for number, text in zip(strings["id"].tolist(), texts, strict=True) if matches(text)]


def open_folder(path: Path) -> ArrowReader:
    """Opens an export with one file for each table; lists of nsys's own codes (``ENUM_…``) are left out."""
    try:
        files = [file for file in sorted(path.iterdir()) if file.suffix in TABLE_ENDINGS and file.is_file()]
    except OSError as error:
        raise TraceError(f"{path}: {error.strerror}", "Give the path of an export of nsys") from error
    return ArrowReader(path, {file.stem: _TableFile(file) for file in files if not file.stem.startswith("ENUM_")})


class _TableFile:
    """A table in a file of Parquet, or of Arrow's stream."""

    def __init__(self, path: Path) -> None:
        self.path = path

    @property
    def schema(self) -> pa.Schema:
        if self.path.suffix == ".parquet":
            import pyarrow.parquet as pq

            return pq.read_schema(self.path)
        return self._stream().schema

    @property
    def num_rows(self) -> int:
        if self.path.suffix == ".parquet":
            import pyarrow.parquet as pq

            return int(pq.read_metadata(self.path).num_rows)
        return sum(batch.num_rows for batch in self._stream())

    def batches(self, columns: Sequence[str]) -> Iterator[pa.RecordBatch]:
        if self.path.suffix == ".parquet":
            import pyarrow.parquet as pq

            yield from pq.ParquetFile(self.path).iter_batches(_BATCH_ROWS, columns=columns, use_threads=False)
        else:
            yield from self._stream()

    def _stream(self) -> pa.RecordBatchStreamReader:
        import pyarrow as pa

        return pa.ipc.open_stream(pa.memory_map(str(self.path)))


def _batches_of(table: _TableFile | pa.RecordBatch, names: Sequence[str | None]) -> Iterator[pa.RecordBatch]:
    """Yields the table in parts, with these columns in this order; a column without a name is of nulls."""
    import pyarrow as pa

    known = list(dict.fromkeys(name for name in names if name is not None))
    parts = table.batches(known) if isinstance(table, _TableFile) else [table]
    for part in (whole.slice(i, _BATCH_ROWS) for whole in parts for i in range(0, whole.num_rows, _BATCH_ROWS)):
        part.validate()
        column_of = {name: part.column(name) for name in known}
        columns = [column_of[name] if name is not None else pa.nulls(part.num_rows, pa.int64()) for name in names]
        yield pa.RecordBatch.from_arrays(columns, names=[str(i) for i in range(len(names))])


def _first(batches: Iterator[pa.RecordBatch], rows: int) -> Iterator[pa.RecordBatch]:
    """Returns the batches up to so many rows."""
    for batch in batches:
        if rows <= 0:
            return
        yield batch.slice(0, rows)
        rows -= batch.num_rows


def write_sqlite(tables: Mapping[str, pa.RecordBatch], output: Path) -> None:
    """Writes tables to a SQLite file, as an export of nsys has them."""
    import adbc_driver_sqlite
    from adbc_driver_manager import AdbcConnection, AdbcStatement

    with adbc_driver_sqlite.connect(str(output)) as database, AdbcConnection(database) as connection:
        for name, table in tables.items():
            with AdbcStatement(connection) as statement:
                statement.set_options(**{"adbc.ingest.target_table": name})
                statement.bind(table)
                statement.execute_update()
