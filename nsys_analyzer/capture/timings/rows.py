"""The rows of a timings table: cells turned into numbers, each error with its file, line and column."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, replace
from datetime import datetime, timezone
from pathlib import Path

from nsys_analyzer.capture.timings.columns import Columns, TimeColumn, cell_of_time
from nsys_analyzer.capture.timings.words import FLAGS, MISSING, MS_PER_UNIT, status_from_text, word
from nsys_analyzer.errors import TimingsError
from nsys_analyzer.strict_json import LARGEST

DIMENSIONS = ("d_model", "d_ff", "num_layers", "num_heads")
"""The fields that describe a model without its name."""
#: Letters of a cell that an error repeats.
_LONGEST = 100
_SHORTEST_MS, _LONGEST_MS = 1e-9, 365 * 86_400e3
_DATE = re.compile(r"(\d{4})-?(\d\d)-?(\d\d)(?:[_T -]?(\d\d)[-:]?(\d\d)[-:]?(\d\d)?)?")


@dataclass(frozen=True)
class Row:
    """One line of the file, its cells read by field; ``line`` counts from 1, the header's line included.

    ``says`` are fields that the header of the columns at hand gives, in place of a column of their own.
    """

    path: Path
    line: int
    columns: Columns
    cells: tuple[str, ...]
    decimal_comma: bool = False
    says: tuple[tuple[str, str], ...] = ()

    def under(self, says: tuple[tuple[str, str], ...]) -> Row:
        """The row as columns whose headers say this see it."""
        return replace(self, says=says)

    def error(self, header: str, problem: str, hint: str) -> TimingsError:
        """An error that names the file, this line and the column."""
        said = problem if len(problem) <= 2 * _LONGEST else f"{problem[:_LONGEST]}…{problem[-_LONGEST:]}"
        return TimingsError(f"{self.path}, line {self.line}, column {header[:_LONGEST]!r}: {said}", hint)

    def header(self, field: str) -> str:
        """The header that the file gives this field; the field's own name where it has none."""
        index = self.columns.fields.get(field)
        return field if index is None else self.columns.headers[index].strip()

    def text(self, field: str) -> str | None:
        """The field's cell; ``None`` where the column or the value is missing."""
        index = self.columns.fields.get(field)
        return dict(self.says).get(field) if index is None else self.cell(index)

    def cell(self, index: int) -> str | None:
        """The cell at this place; ``None`` where the value is missing."""
        text = self.cells[index].strip() if index < len(self.cells) else ""
        return None if text.lower() in MISSING else text

    def named(self, name: str) -> str | None:
        """The cell under this header, or of this field; empty where the value, ``None`` where the column is missing."""
        index = self.columns.place(name)
        return dict(self.says).get(word(name)) if index is None else self.cell(index) or ""

    def flag(self, field: str) -> bool | None:
        """The field as true or false.

        Raises:
            TimingsError: another word.
        """
        text = self.text(field)
        if text is not None and text.lower() not in FLAGS:
            raise self.error(self.header(field), f"{text!r} is neither true nor false", "Write true or false")
        return None if text is None else FLAGS[text.lower()]

    def integer(self, field: str, least: int = 1) -> int | None:
        """The field as a whole number of at least ``least``; ``512.0`` is 512.

        Raises:
            TimingsError: not a number, not whole, below ``least``, or above what any arithmetic holds.
        """
        text = self.text(field)
        if text is None:
            return None
        value = self._number(self.header(field), text)
        if not value.is_integer() or not least <= value <= LARGEST:
            wanted = f"up to {LARGEST:,}" if value > LARGEST else f"of at least {least}"
            problem = f"{text!r} is not a whole number {wanted}"
            raise self.error(self.header(field), problem, "Correct the value or leave the cell empty")
        return int(value)

    def milliseconds(self, column: TimeColumn) -> float | None:
        """The time in this column, in milliseconds; ``None`` where it is missing or a status, such as OOM.

        Raises:
            TimingsError: not a number, negative, above a year, or below a picosecond where it is no deviation.
        """
        return self._milliseconds(column, "value", deviation=column.statistic == "std")

    def spread(self, column: TimeColumn) -> float | None:
        """The deviation that stands beside the time in one cell, ``20.5 ± 0.3``, in milliseconds."""
        return self._milliseconds(column, "spread", deviation=True)

    def _milliseconds(self, column: TimeColumn, part: str, *, deviation: bool) -> float | None:
        text = self.cell(column.index)
        if text is None or self.status_in(column):
            return None
        cell = cell_of_time(text)
        number = cell[part] if cell else text if part == "value" else None
        if number is None:
            return None
        value = self._number(column.header, number)
        unit = (cell["last"] or cell["unit"] if part == "spread" else cell["unit"] or cell["last"]) if cell else None
        ms = value * (MS_PER_UNIT[re.sub("[µμ]", "u", unit)] if unit else column.ms_per_unit)
        if not can_pass(ms, deviation=deviation):
            raise self.error(column.header, f"{text!r} is no time that can pass", "Time the run again")
        return ms

    def status_in(self, column: TimeColumn) -> str | None:
        """The status that a cell of times holds in place of a time: ``oom``, ``failed``, ``timeout``."""
        status = status_from_text(self.cell(column.index) or "")
        return None if status == "ok" else status

    def _number(self, header: str, text: str) -> float:
        value = plain_number(text, decimal_comma=self.decimal_comma)
        if value is None:
            raise self.error(
                header, f"{text!r} is not a number", "Write a plain number, or OOM, or leave the cell empty"
            )
        return value

    def seconds_since_epoch(self) -> float | None:
        """The row's time stamp, in seconds since 1970; ``None`` where there is none that can be read."""
        return seconds_since_epoch(self.text("time_stamp") or "")


def plain_number(text: str, *, decimal_comma: bool = False) -> float | None:
    """The number that a cell is, and nothing beside it; ``None`` for any other text, NaN and infinity."""
    try:
        value = float(text.replace(",", ".") if decimal_comma else text)
    except ValueError:
        return None
    return value if math.isfinite(value) else None


def can_pass(ms: float, *, deviation: bool) -> bool:
    """Whether this can be a time in milliseconds: from a picosecond to a year; a deviation can be zero."""
    return (0 if deviation else _SHORTEST_MS) <= ms <= _LONGEST_MS


def seconds_since_epoch(text: str) -> float | None:
    """A date, with or without its time, or a number of seconds, in seconds since 1970; ``None`` for other texts."""
    text = text.strip().replace("Z", "+00:00")
    if re.fullmatch(r"\d{9,11}(\.\d+)?", text):
        return float(text)
    if date := _DATE.fullmatch(text):
        text = "{}-{}-{}T{}:{}:{}".format(*(part or "00" for part in date.groups()))
    try:
        moment = datetime.fromisoformat(text)
    except ValueError:
        return None
    return (moment if moment.tzinfo else moment.replace(tzinfo=timezone.utc)).timestamp()
