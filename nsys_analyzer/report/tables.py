"""Tables declared by their columns: each with its unit, and its cell as a function of the row's data."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

from nsys_analyzer.report.model import Cell, Column, Table, Unit
from nsys_analyzer.text import Words

Row = TypeVar("Row")


@dataclass(frozen=True)
class Field(Generic[Row]):
    """A column and where its cells come from; ``fills`` tells whether a cell is worth a column."""

    title: str
    unit: Unit
    cell: Callable[[Row], Cell]
    fills: Callable[[Cell], bool] = lambda cell: cell is not None


def table(
    fields: Sequence[Field[Row]], rows: Iterable[Row], caption: Words = "", *, capture: str = "", names: int = 1
) -> Table:
    """The rows that have a figure, under the fields that any of them fills.

    So many ``names``, the first fields, name the row: they stay, and are no figures.
    """
    every = [tuple(field.cell(row) for field in fields) for row in rows]
    filled = [cells for cells in every if any(cell is not None for cell in cells[names:])]
    kept = [i for i, field in enumerate(fields) if i < names or any(field.fills(cells[i]) for cells in filled)]
    columns = tuple(Column(fields[i].title, fields[i].unit) for i in kept)
    return Table(columns, tuple(tuple(cells[i] for i in kept) for cells in filled), caption, capture, names)
