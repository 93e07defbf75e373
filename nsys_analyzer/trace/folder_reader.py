"""Reads an nsys export that is a folder with a file for each table: Parquet (``parquetdir``) or Arrow (``arrowdir``).

Only the columns that are asked for are read from the disk.
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
from nsys_analyzer.trace.arrays import Bools, Frame
from nsys_analyzer.trace.batches import frame_of, integers_of
from nsys_analyzer.trace.reader import Reader
from nsys_analyzer.trace.schema import STRINGS, Column, Filter, Table

if TYPE_CHECKING:
    import pyarrow as pa

PARQUET, ARROW = ".parquet", ".arrow"
_BATCH_ROWS = 65_536
_EXPORT_AGAIN = "Export the report again: nsys export --type parquetdir FILE.nsys-rep"
_NO_ID = -(2**62)


class FolderReader(Reader):
    """An export with one file for each table; lists of nsys's own codes (``ENUM_…``) are left out."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._files = _files_in(path)
        self._rows: dict[str, int] = {}
        self.columns_of = {name: tuple(self._schema(name).names) for name in self._files}
        self._check_signature("a folder", _EXPORT_AGAIN)

    def counts(self, tables: Sequence[str]) -> dict[str, int]:
        """Rows of some tables, by their names."""
        for name in tables:
            if name not in self._rows:
                self._rows[name] = self._read(partial(_rows_of, self._files[name]))
        return {name: self._rows[name] for name in tables}

    def has_rows(self, name: str) -> bool:
        """Whether a table, by its name, holds a row."""
        return self.counts([name])[name] > 0

    def _schema(self, name: str) -> pa.Schema:
        return self._read(partial(_schema_of, self._files[name]))

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
        batches = _first(_batches_of(self._files[name], names), rows)
        return self._read(lambda: frame_of(batches, table.columns, rows, chosen))  # type: ignore[no-any-return]

    def _chosen(self, wanted: Filter) -> Callable[[pa.RecordBatch], Bools]:
        """What tells which rows of a batch are wanted: by its last column, which is that of the filter."""
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
        """The IDs of the strings that match."""
        strings = self.read(STRINGS)
        texts = strings["value"].to_pylist()
        return [one for one, text in zip(strings["id"].tolist(), texts, strict=True) if matches(text)]


def _files_in(folder: Path) -> dict[str, Path]:
    """The files of the tables, by the tables' names."""
    try:
        files = [file for file in sorted(folder.iterdir()) if file.suffix in (PARQUET, ARROW) and file.is_file()]
    except OSError as error:
        raise TraceError(f"{folder}: {error.strerror}", "Give the path of an export of nsys") from error
    return {file.stem: file for file in files if not file.stem.startswith("ENUM_")}


def _schema_of(file: Path) -> pa.Schema:
    if file.suffix == PARQUET:
        import pyarrow.parquet as pq

        return pq.read_schema(file)
    return _stream(file).schema


def _rows_of(file: Path) -> int:
    if file.suffix == PARQUET:
        import pyarrow.parquet as pq

        return int(pq.read_metadata(file).num_rows)
    return sum(batch.num_rows for batch in _stream(file))


def _stream(file: Path) -> pa.RecordBatchStreamReader:
    import pyarrow as pa

    return pa.ipc.open_stream(pa.memory_map(str(file)))


def _batches_of(file: Path, names: Sequence[str | None]) -> Iterator[pa.RecordBatch]:
    """The table in parts, with these columns in this order; a column without a name is of nulls."""
    import pyarrow as pa

    known = list(dict.fromkeys(name for name in names if name is not None))
    if file.suffix == PARQUET:
        import pyarrow.parquet as pq

        parts = pq.ParquetFile(file).iter_batches(_BATCH_ROWS, columns=known, use_threads=False)
    else:
        parts = (part.slice(i, _BATCH_ROWS) for part in _stream(file) for i in range(0, part.num_rows, _BATCH_ROWS))
    for part in parts:
        part.validate()
        column_of = {name: part.column(name) for name in known}
        columns = [column_of[name] if name is not None else pa.nulls(part.num_rows, pa.int64()) for name in names]
        yield pa.RecordBatch.from_arrays(columns, names=[str(i) for i in range(len(names))])


def _first(batches: Iterator[pa.RecordBatch], rows: int) -> Iterator[pa.RecordBatch]:
    """The batches up to so many rows."""
    for batch in batches:
        if rows <= 0:
            return
        yield batch.slice(0, rows)
        rows -= batch.num_rows
