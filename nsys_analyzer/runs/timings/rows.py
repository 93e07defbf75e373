"""The rows of a timings table: their cells read by column, each distinct text once."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import numpy.typing as npt

from nsys_analyzer.errors import TimingsError
from nsys_analyzer.runs.timings.cells import CellError, deviation, milliseconds, reader
from nsys_analyzer.runs.timings.columns import Columns, TimeColumn
from nsys_analyzer.runs.timings.table import Table
from nsys_analyzer.runs.timings.words import CELLS, MISSING
from nsys_analyzer.trace.arrays import Bools

Objects = npt.NDArray[np.object_]
#: Letters of a cell that an error repeats.
_LONGEST = 100


class Rows:
    """A table's rows, their cells read by column; ``None`` is a value, or a column, that is missing.

    Cells that cannot be read are kept: the first of them is what a person has to correct, and ``check`` raises it.
    """

    def __init__(self, table: Table, columns: Columns) -> None:
        self.table, self.columns = table, columns
        self._wrong: list[tuple[int, TimingsError]] = []

    def field(self, field: str, otherwise: str | None = None) -> Objects:
        """A field as what its cells are, ``otherwise`` in every row where the table has no column of it."""
        read = reader(CELLS[field], decimal_comma=self.table.decimal_comma)
        if field in self.columns.fields:
            return self._column(self.columns.fields[field], self.columns.header(field), read)
        return np.full(len(self.table.frame), None if otherwise is None else read(otherwise), object)

    def texts(self, place: int) -> Objects:
        """A column's texts."""
        return self._column(place, "", str)

    def times(self, column: TimeColumn, needed: Bools) -> Objects:
        """The times of a column in ms, or the statuses in their place; those that are ``needed`` have to be right."""
        is_deviation, comma = column.statistic == "std", self.table.decimal_comma
        return self._column(
            column.place,
            column.header,
            lambda text: milliseconds(text, column.ms_per_unit, is_deviation=is_deviation, decimal_comma=comma),
            needed,
        )

    def deviations(self, column: TimeColumn, needed: Bools) -> Objects:
        """The deviations that stand beside the times of a column, in their cells, in ms."""
        comma = self.table.decimal_comma
        return self._column(
            column.place, column.header, lambda text: deviation(text, column.ms_per_unit, decimal_comma=comma), needed
        )

    def _column(self, place: int, header: str, read: Callable[[str], Any], needed: Bools | None = None) -> Objects:
        codes, texts = self.table.texts(place)
        values = np.empty(len(texts), object)
        errors: dict[int, CellError] = {}
        for number, text in enumerate(texts):
            try:
                values[number] = None if text.lower() in MISSING else read(text)
            except CellError as error:
                errors[number] = error
        if errors:
            wrong = np.flatnonzero(np.isin(codes, list(errors)) & (True if needed is None else needed))
            for row in wrong[:1].tolist():
                self._keep(row, header, errors[int(codes[row])])
        return values[codes]

    def each(self, field: str, function: Callable[..., Any], at: list[int], *values: Iterable[Any]) -> list[Any]:
        """What the function makes of the values at each of these rows; where it fails, the field's cell is wrong."""
        made: list[Any] = []
        for row, own in zip(at, zip(*values, strict=True), strict=True):
            try:
                made.append(function(*own))
            except CellError as error:
                self._keep(row, self.columns.header(error.field or field), error)
                return made + [None] * (len(at) - len(made))  # what comes later is not the first
        return made

    def _keep(self, row: int, header: str, error: CellError) -> None:
        said = error.problem
        if len(said) > 2 * _LONGEST:
            said = f"{said[:_LONGEST]}…{said[-_LONGEST:]}"
        place = f"{self.table.path}, line {self.table.frame.index[row]}, column {header[:_LONGEST]!r}"
        self._wrong.append((row, TimingsError(f"{place}: {said}", error.hint)))

    def check(self) -> None:
        """Makes sure that every cell could be read.

        Raises:
            TimingsError: the first that could not, with file, line and column.
        """
        if self._wrong:
            raise min(self._wrong, key=lambda wrong: wrong[0])[1]
