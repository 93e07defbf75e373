"""Reads tables of an nsys export as columns, never as rows, from whatever it was exported to."""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from nsys_analyzer.errors import MissingTableError, TraceError
from nsys_analyzer.trace.arrays import Frame
from nsys_analyzer.trace.batches import empty_frame
from nsys_analyzer.trace.schema import SIGNATURE_TABLES, Column, Filter, Table

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
    def counts(self, tables: Sequence[str]) -> dict[str, int]:
        """Rows of some tables, by their names in the export."""

    @abstractmethod
    def has_rows(self, name: str) -> bool:
        """Whether a table of the export, by its name there, holds a row."""

    @abstractmethod
    def _columns(self, name: str, table: Table, present: Mapping[Column, str | None], wanted: Filter | None) -> Frame:
        """The columns of a table that is called ``name``, each by its own name there or None, of the rows wanted."""

    def _check_signature(self, what: str, remedy: str) -> None:
        if not any(name in self.columns_of for name in SIGNATURE_TABLES):
            raise TraceError(f"{self.path} is {what}, but not an nsys export", remedy)

    def _damaged(self, error: Exception) -> TraceError:
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        return TraceError(f"{self.path} is damaged or truncated ({reason})", "Export the report again")

    def name_of(self, table: Table) -> str | None:
        """The name a table has in this export; None where it is absent or has no row (``nsys export --lazy=false``).

        Some nsys number a table whose columns changed (``NVTX_EVENTS_V2``): the newest that holds a row counts.
        """
        found = [match for name in self.columns_of if (match := _NUMBERED.fullmatch(name))]
        for alias in table.aliases:
            versions = {int(match[2] or 0): match[0] for match in found if match[1] == alias}
            for _, name in sorted(versions.items(), reverse=True):
                if self.has_rows(name) and (alias == table.aliases[0] or self._has_required(table, name)):
                    return name
        return None

    def _has_required(self, table: Table, name: str) -> bool:
        required = (column for column in table.columns if column.name in table.required)
        return all(column_in(column, self.columns_of[name]) for column in required)

    def read_all(self, tables: Iterable[Table]) -> dict[str, Frame]:
        """Reads several tables side by side, largest first is fastest; keys are the tables' keys."""
        tables = tuple(tables)
        with ThreadPoolExecutor(2) as pool:  # whatever decodes a file releases the GIL
            return dict(zip((t.key for t in tables), pool.map(self.read, tables), strict=True))

    def read(self, table: Table) -> Frame:
        """One table as columns; an absent table has columns of length 0, an absent column its default.

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
        """The rows worth reading of a table with this name in the file; None for all."""
        wanted = table.filter
        usable = wanted and wanted.column in self.columns_of[name] and (wanted.table or name) in self.columns_of
        return wanted if usable else None


def column_in(column: Column, columns: Sequence[str]) -> str | None:
    """The name that a column has among those of a table in a file, None where it is not there."""
    return next((alias for alias in column.aliases if alias in columns), None)
