"""A table of text from a file: CSV, JSON (a list, or an object per line) or markdown."""

from __future__ import annotations

import csv
import io
import json
import math
import re
from collections.abc import Iterator
from dataclasses import dataclass
from operator import eq
from pathlib import Path
from sys import intern
from typing import Any

from nsys_analyzer.capture.timings.words import MISSING, word
from nsys_analyzer.errors import TimingsError

_EXPECTED = "a header line, then one row per run, such as: model,context_length,phase,mean_ms"
_JSON = json.JSONDecoder()
#: Objects in objects, and what is said of more.
_DEEPEST, _TOO_DEEP = 32, "nested too deep"
#: Cells of the table for each that the file holds, the others are missing; small tables have any number of them.
_MOST_CELLS_PER_GIVEN, _FEW_CELLS = 10, 1_000_000


@dataclass(frozen=True)
class TextTable:
    """The header and the rows of a file, each as long as the header; a row's line counts from 1."""

    headers: tuple[str, ...]
    header_line: int
    rows: list[tuple[int, tuple[str, ...]]]
    decimal_comma: bool = False
    notes: tuple[str, ...] = ()


def has_rows(path: Path) -> bool:
    """Whether the file holds anything below its header.

    Raises:
        TimingsError: no such file, empty, or no text.
    """
    return len([line for line in _read_text(path).splitlines() if line.strip()]) > 1


def read_table(path: Path) -> TextTable:
    """The table in a file, by what the file begins with; a header that stands there again is left out, with a note.

    Raises:
        TimingsError: no such file, empty, not a table, a header and no rows, a row longer than the header.
    """
    text = _read_text(path)
    start = text.lstrip()
    if start[0] in "[{":
        lines = _json_lines(path, text)
        decimal_comma = False
    elif start[0] == "|" or path.suffix.lower() == ".md":
        lines = _markdown_lines(path, text)
        decimal_comma = False
    else:
        lines, decimal_comma = _csv_lines(path, text)
    (header_line, headers), rows = lines[0], lines[1:]
    spelled = [word(header) for header in headers]
    again = dict.fromkeys(
        line for line, cells in rows if len(cells) == len(spelled) and all(map(eq, map(word, cells), spelled))
    )
    rows = [row for row in rows if row[0] not in again and not MISSING.issuperset(map(str.lower, row[1]))]
    notes = tuple(f"line {line}: the header again, left out" for line in again)
    if not rows:
        raise TimingsError(f"{path}: a header and no rows", "Run the timings again: the file holds none")
    for line, cells in rows:
        if any(cell.strip() for cell in cells[len(headers) :]):
            problem = f"{path}, line {line}: {len(cells)} cells under a header of {len(headers)}"
            raise TimingsError(problem, "Correct the row, or quote the value that holds the separator")
    width = len(headers)
    _check_filled(path, width, len(rows), sum(len(cells) for _, cells in rows))
    whole = [(line, cells if len(cells) == width else _fitted(cells, width)) for line, cells in rows]
    return TextTable(headers, header_line, whole, decimal_comma, notes)


def _fitted(cells: tuple[str, ...], width: int) -> tuple[str, ...]:
    """The cells of a row that is longer by empty cells, or shorter, than the header."""
    return (*cells[:width], *[""] * (width - len(cells)))


def _check_filled(path: Path, columns: int, rows: int, given: int) -> None:
    """Makes sure that a table is not much larger than its file.

    Raises:
        TimingsError: it is, and most of its cells are missing.
    """
    if columns * rows > _MOST_CELLS_PER_GIVEN * given + _FEW_CELLS:
        problem = f"{path}: {columns:,} columns and {rows:,} rows, and most of the cells are missing"
        raise TimingsError(problem, "Give a file with one table of timings")


def _read_text(path: Path) -> str:
    of_shell = path.is_fifo() and path.is_relative_to("/dev")  # <(...), which has a writer
    if path.exists() and not (path.is_file() or path.is_dir() or of_shell):
        raise TimingsError(f"{path}: is a pipe or a device", "Give the path of a CSV file")
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


_Lines = list[tuple[int, tuple[str, ...]]]


def _csv_lines(path: Path, text: str) -> tuple[_Lines, bool]:
    """The lines of a CSV separated by commas, semicolons or tabs; and whether numbers may have a decimal comma."""
    first = next(line for line in text.splitlines() if line.strip())
    separator = max(",;\t", key=first.count)
    if separator not in first:
        raise TimingsError(f"{path}, line 1: not a CSV: the header has no comma, semicolon or tab", f"Give {_EXPECTED}")
    reader = csv.reader(io.StringIO(text, newline=""), delimiter=separator, skipinitialspace=True)
    try:
        # A text that stands there many times is kept once.
        lines = [(reader.line_num, tuple(map(intern, cells))) for cells in reader if any(map(str.strip, cells))]
    except csv.Error as error:
        raise TimingsError(f"{path}, line {reader.line_num}: not a CSV ({error})", f"Give {_EXPECTED}") from error
    return lines, separator != ","


def _markdown_lines(path: Path, text: str) -> _Lines:
    """The lines of the file's one markdown table, without emphasis; other text is passed over."""
    lines: _Lines = []
    rules: set[int] = set()
    for number, line in enumerate(text.splitlines(), 1):
        cells = tuple(intern(cell.strip().strip("*`").strip()) for cell in line.strip().strip("|").split("|"))
        if line.lstrip().startswith("|") and any(cells):
            if all(re.fullmatch(r":?-+:?", cell) for cell in cells):
                rules.add(number)
            else:
                lines.append((number, cells))
    headers = {cells for number, cells in lines if number + 1 in rules}
    if len(headers) != 1:
        problem = f"{path}: {len(headers)} markdown tables" if headers else f"{path}, line 1: no markdown table"
        raise TimingsError(problem, "Give a file of one table, its second line |---|---|")
    return lines


def _json_lines(path: Path, text: str) -> _Lines:
    """The objects of a JSON list, or of one object per line, as rows under all their keys."""
    objects = list(_objects(path, text))
    headers = tuple(dict.fromkeys(key for _, values in objects for key in values))
    _check_filled(path, len(headers), len(objects), sum(len(values) for _, values in objects))
    return [(1, headers), *((line, tuple(values.get(key, "") for key in headers)) for line, values in objects)]


def _objects(path: Path, text: str) -> Iterator[tuple[int, dict[str, str]]]:
    """Each object with the line it begins on."""
    in_list = text.lstrip()[0] == "["
    line, counted = 1, 0
    at = _after_separators(text, len(text) - len(text.lstrip()) + in_list)
    while at < len(text) and not (in_list and text[at] == "]"):
        line, counted = line + text.count("\n", counted, at), at
        try:
            cells, end = _object(text, at)
        except json.JSONDecodeError as error:
            raise _no_rows(path, error.lineno, f"not JSON ({error.msg})") from error
        except RecursionError as error:
            raise _no_rows(path, line, _TOO_DEEP) from error
        except ValueError as error:
            raise _no_rows(path, line, str(error)) from error
        yield line, cells
        at = _after_separators(text, end)


def _object(text: str, at: int) -> tuple[dict[str, str], int]:
    """The cells of the object that begins here, and where it ends."""
    value, end = _JSON.raw_decode(text, at)
    if isinstance(value, dict):
        return dict(_cells(value)), end
    raise ValueError(f"a JSON {type(value).__name__}, not an object")


def _after_separators(text: str, at: int) -> int:
    while at < len(text) and text[at] in " \t\r\n,":
        at += 1
    return at


def _no_rows(path: Path, line: int, problem: str) -> TimingsError:
    return TimingsError(f"{path}, line {line}: {problem}", "Give a list of objects, or one object per line")


def _cells(values: dict[str, Any], before: str = "", depth: int = 1) -> Iterator[tuple[str, str]]:
    """Each value as the text of a cell; an object in it as cells of longer names, a list, which no cell holds, not.

    Raises:
        ValueError: what no cell can hold: an infinite number, half a surrogate pair, a nesting too deep.
    """
    for key, value in values.items():
        name = f"{before}{key}"
        if isinstance(value, dict):
            if depth == _DEEPEST:
                raise ValueError(_TOO_DEEP)
            yield from _cells(value, f"{name}_", depth + 1)
        elif not isinstance(value, list):
            yield _cell(name), "" if value is None else _cell(value)


def _cell(value: str | float) -> str:
    """The text of a value; one that stands there many times is kept once. NaN is a value that is missing."""
    if isinstance(value, float) and math.isnan(value):
        return ""
    if isinstance(value, float) and math.isinf(value):
        raise ValueError(f"{value} is no number; write null for a value that is missing")
    text = str(value)
    if not text.isascii() and any("\ud800" <= letter <= "\udfff" for letter in text):
        raise ValueError("half a surrogate pair in a text")
    return intern(text)
