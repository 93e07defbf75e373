"""The rows of a timings table by kind: what rows that differ in plain numbers alone have in common is read once."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Collection
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from nsys_analyzer.capture.timings.columns import Columns, TimeColumn, understand
from nsys_analyzer.capture.timings.rows import DIMENSIONS, Row, can_pass, plain_number, seconds_since_epoch
from nsys_analyzer.capture.timings.table import TextTable, read_table
from nsys_analyzer.errors import TimingsError

_Reader = Callable[[str], float | None]
"""The number that a cell holds, as ``Row`` reads it; ``None`` for all that is no plain number, or an impossible one."""


@dataclass(frozen=True)
class Kind:
    """Rows that have the same text wherever they do not have a plain number: what fails for one fails for the first.

    Attributes:
        first: the first of them; all that it says but its numbers is true of the others.
        places: where they stand among the rows of the table, from 0.
        lines: their lines in the file.
        numbers: for each column of numbers, by its index, the number of each row: milliseconds in a column of times.
    """

    first: Row
    places: list[int]
    lines: list[int]
    numbers: dict[int, list[float | None]]


def read_kinds(path: Path, model: str | None = None, named: Collection[str] = ()) -> tuple[Columns, list[Kind]]:
    """The header of a timings table, and its rows by kind, in the order in which the first of each stands there.

    Args:
        path: the file.
        model: the model of every row where no column names one.
        named: columns whose cells, even if numbers, tell kinds apart.

    Raises:
        TimingsError: no table, or one without a column of times or of models.
    """
    table = read_table(path)
    columns = understand(table.headers, [cells for _, cells in table.rows])
    if model and not _names_the_model(columns):
        rows = [(line, (*cells, model)) for line, cells in table.rows]
        table = replace(table, headers=(*table.headers, "model"), rows=rows)
        columns = understand(table.headers, [cells for _, cells in table.rows])
    columns = replace(columns, notes=(*table.notes, *columns.notes))
    _check_header(path, table.header_line, columns)
    places = {place for name in named if (place := columns.place(name)) is not None}
    return columns, _kinds(path, table, columns, places)


def _kinds(path: Path, table: TextTable, columns: Columns, named: set[int]) -> list[Kind]:
    """The rows by kind, which is the cells of all columns with a meaning, ``None`` in place of a plain number."""
    readers = {i: read for i, read in _readers(columns, decimal_comma=table.decimal_comma).items() if i not in named}
    numbers: dict[int, list[float | None]] = {}
    parts: list[list[str | None]] = []
    for index in sorted(_with_a_meaning(columns) | named):
        cells = [row[index] for _, row in table.rows]
        if index in readers:
            numbers[index] = list(map(readers[index], cells))
            parts.append([text if number is None else None for text, number in zip(cells, numbers[index], strict=True)])
        else:
            parts.append([*cells])
    places: dict[tuple[str | None, ...], list[int]] = defaultdict(list)
    for place, kind in enumerate(zip(*parts, strict=True)):
        places[kind].append(place)
    return [
        Kind(
            Row(path, table.rows[own[0]][0], columns, table.rows[own[0]][1], table.decimal_comma),
            own,
            [table.rows[place][0] for place in own],
            {
                index: [values[place] for place in own]
                for index, values in numbers.items()
                if values[own[0]] is not None
            },
        )
        for own in places.values()
    ]


def _with_a_meaning(columns: Columns) -> set[int]:
    return {*columns.fields.values(), *columns.others, *(time.index for time in columns.times)}


def _readers(columns: Columns, *, decimal_comma: bool) -> dict[int, _Reader]:
    """The columns of numbers, by their index: those in which the rows of one run differ."""
    number = partial(plain_number, decimal_comma=decimal_comma)
    readers: dict[int, _Reader] = {time.index: partial(_milliseconds, time, number) for time in columns.times}
    count = partial(_count, number)
    for field, read in (("iteration", count), ("peak_memory_bytes", count), ("time_stamp", seconds_since_epoch)):
        if field in columns.fields:
            readers[columns.fields[field]] = read
    return readers


def _milliseconds(time: TimeColumn, number: _Reader, text: str) -> float | None:
    value = number(text)
    ms = None if value is None else value * time.ms_per_unit
    return ms if ms is not None and can_pass(ms, deviation=time.statistic == "std") else None


def _count(number: _Reader, text: str) -> float | None:
    value = number(text)
    return int(value) if value is not None and value.is_integer() and value >= 0 else None


def _check_header(path: Path, line: int, columns: Columns) -> None:
    listed = columns.listed()
    groups = columns.groups()
    if not groups:
        hint = "Add mean_ms beside a phase column, or forward_ms and backward_ms"
        if any(re.fullmatch(r"\d+\.\d+", header.strip()) for header in columns.headers):
            hint = "Its first line is data: put a header line above it, such as model,mode,mean,std"
        raise TimingsError(f"{path}, line {line}: no column of times among {listed}", hint)
    if not _names_the_model(columns):
        hint = f"Add a column model, or the columns {', '.join(DIMENSIONS)}, or give --model"
        raise TimingsError(f"{path}, line {line}: no column names the model among {listed}", hint)


def _names_the_model(columns: Columns) -> bool:
    """Whether columns, or the headers of times, say which model was timed."""
    said = all("model" in dict(group.says) for group in columns.groups())
    return said or "model" in columns.fields or all(field in columns.fields for field in DIMENSIONS)
