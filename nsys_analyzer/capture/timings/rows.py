"""The rows of a timings CSV: the file read, its cells turned into numbers, each error with its line and column."""

from __future__ import annotations

import csv
import io
import math
import re
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path

from nsys_analyzer.capture.timings.columns import Columns, TimeColumn, status_from_text, understand
from nsys_analyzer.errors import TimingsError

_MISSING = {"", "-", "--", "–", "—", "nan", "none", "null", "na", "n/a", "<na>"}
_FLAGS = {"true": True, "yes": True, "1": True, "1.0": True, "false": False, "no": False, "0": False, "0.0": False}

_EXPECTED = "a header line, then one row per run, such as: model,context_length,phase,mean_ms"
DIMENSIONS = ("d_model", "d_ff", "num_layers", "num_heads")
"""The fields that describe a model without its name."""
_DATE = re.compile(r"(\d{4})-?(\d\d)-?(\d\d)(?:[_T -]?(\d\d)[-:]?(\d\d)[-:]?(\d\d)?)?")


@dataclass(frozen=True)
class Row:
    """One line of the file, its cells read by field; ``line`` counts from 1, the header's line included."""

    path: Path
    line: int
    columns: Columns
    cells: tuple[str, ...]
    decimal_comma: bool = False

    def error(self, header: str, problem: str, hint: str) -> TimingsError:
        """An error that names the file, this line and the column."""
        return TimingsError(f"{self.path}, line {self.line}, column {header!r}: {problem}", hint)

    def header(self, field: str) -> str:
        """The header that the file gives this field; the field's own name where it has none."""
        index = self.columns.fields.get(field)
        return field if index is None else self.columns.headers[index].strip()

    def text(self, field: str) -> str | None:
        """The field's cell; ``None`` where the column or the value is missing."""
        index = self.columns.fields.get(field)
        return None if index is None else self._cell(index)

    def _cell(self, index: int) -> str | None:
        text = self.cells[index].strip() if index < len(self.cells) else ""
        return None if text.lower() in _MISSING else text

    def flag(self, field: str) -> bool | None:
        """The field as true or false.

        Raises:
            TimingsError: another word.
        """
        text = self.text(field)
        if text is not None and text.lower() not in _FLAGS:
            raise self.error(self.header(field), f"{text!r} is neither true nor false", "Write true or false")
        return None if text is None else _FLAGS[text.lower()]

    def integer(self, field: str, least: int = 1) -> int | None:
        """The field as a whole number of at least ``least``; ``512.0`` is 512.

        Raises:
            TimingsError: not a number, not whole, or below ``least``.
        """
        text = self.text(field)
        if text is None:
            return None
        value = self._number(self.header(field), text)
        if value != int(value) or value < least:
            problem = f"{text!r} is not a whole number of at least {least}"
            raise self.error(self.header(field), problem, "Correct the value or leave the cell empty")
        return int(value)

    def milliseconds(self, column: TimeColumn) -> float | None:
        """The time in this column, in milliseconds; ``None`` where it is missing or a status, such as OOM.

        Raises:
            TimingsError: not a number, negative, or zero where it is no deviation.
        """
        text = self._cell(column.index)
        if text is None or self.status_in(column):
            return None
        value = self._number(column.header, text)
        if value < 0 or (value == 0 and column.statistic != "std"):
            raise self.error(column.header, f"{text!r} is no time that can pass", "Time the run again")
        return value * column.ms_per_unit

    def status_in(self, column: TimeColumn) -> str | None:
        """The status that a cell of times holds in place of a time: ``oom``, ``failed``, ``timeout``."""
        status = status_from_text(self._cell(column.index) or "")
        return None if status == "ok" else status

    def _number(self, header: str, text: str) -> float:
        try:
            value = float(text.replace(",", ".") if self.decimal_comma else text)
        except ValueError:
            value = math.nan
        if not math.isfinite(value):
            raise self.error(
                header, f"{text!r} is not a number", "Write a plain number, or OOM, or leave the cell empty"
            )
        return value

    def seconds_since_epoch(self) -> float | None:
        """The row's time stamp, in seconds since 1970; ``None`` where there is none that can be read."""
        text = (self.text("time_stamp") or "").replace("Z", "+00:00")
        if re.fullmatch(r"\d{9,11}(\.\d+)?", text):
            return float(text)
        if date := _DATE.fullmatch(text):
            text = "{}-{}-{}T{}:{}:{}".format(*(part or "00" for part in date.groups()))
        try:
            moment = datetime.fromisoformat(text)
        except ValueError:
            return None
        return (moment if moment.tzinfo else moment.replace(tzinfo=timezone.utc)).timestamp()


def has_rows(path: Path) -> bool:
    """Whether the file holds anything below its header.

    Raises:
        TimingsError: no such file, empty, or no text.
    """
    return len([line for line in _read_text(path).splitlines() if line.strip()]) > 1


def read_rows(path: Path) -> tuple[Columns, list[Row]]:
    """The header and the rows of a CSV separated by commas, semicolons or tabs; blank lines are left out.

    Raises:
        TimingsError: no such file, empty, not a CSV, no column of times or of models, a row longer than the header.
    """
    text = _read_text(path)
    first = next((line for line in text.splitlines() if line.strip()), "")
    separator = max(",;\t", key=first.count)
    if separator not in first:
        raise TimingsError(f"{path}, line 1: not a CSV: the header has no comma, semicolon or tab", f"Give {_EXPECTED}")
    reader = csv.reader(io.StringIO(text, newline=""), delimiter=separator, skipinitialspace=True)
    try:
        lines = [(reader.line_num, tuple(cells)) for cells in reader if any(cell.strip() for cell in cells)]
    except csv.Error as error:
        raise TimingsError(f"{path}, line {reader.line_num}: not a CSV ({error})", f"Give {_EXPECTED}") from error
    columns = understand(lines[0][1])
    _check_header(path, lines[0][0], columns)
    rows = [Row(path, line, columns, cells, decimal_comma=separator != ",") for line, cells in lines[1:]]
    _check_rows(path, rows)
    return columns, rows


def _read_text(path: Path) -> str:
    try:
        data = path.read_bytes()
    except FileNotFoundError as error:
        raise TimingsError(f"{path}: no such file", "Check the path, or leave the timings out") from error
    except OSError as error:
        raise TimingsError(f"{path}: cannot be read ({error.strerror})", "Give the path of a CSV file") from error
    encoding = "utf-16" if data[:2] in (b"\xff\xfe", b"\xfe\xff") else "utf-8-sig"  # PowerShell's > writes UTF-16
    try:
        text = data.decode(encoding)
    except UnicodeDecodeError as error:
        raise TimingsError(f"{path}: not a CSV: it is not text", "Save it as a CSV in UTF-8") from error
    if "\0" in text:
        raise TimingsError(f"{path}: not a CSV: it is not text", "Save it as a CSV in UTF-8")
    if not text.strip():
        raise TimingsError(f"{path}: the file is empty", f"Give {_EXPECTED}")
    return text


def _check_header(path: Path, line: int, columns: Columns) -> None:
    place = f"{path}, line {line}"
    if not columns.phases():
        hint = "Add mean_ms beside a phase column, or forward_ms and backward_ms"
        raise TimingsError(f"{place}: no column of times among {_listed(columns)}", hint)
    if "model" not in columns.fields and not all(field in columns.fields for field in DIMENSIONS):
        hint = f"Add a column model, or the columns {', '.join(DIMENSIONS)}"
        raise TimingsError(f"{place}: no column names the model among {_listed(columns)}", hint)


def _listed(columns: Columns) -> str:
    return ", ".join(repr(header.strip()) for header in columns.headers)


def _check_rows(path: Path, rows: list[Row]) -> None:
    if not rows:
        raise TimingsError(f"{path}: a header and no rows", "Run the timings again: the file holds none")
    for row in rows:
        count = len(row.columns.headers)
        if any(cell.strip() for cell in row.cells[count:]):
            problem = f"{row.path}, line {row.line}: {len(row.cells)} cells under a header of {count}"
            raise TimingsError(problem, "Correct the row, or quote the value that holds the separator")
