"""A table of text from a file: CSV, JSON (a list, or an object per line) or markdown."""

from __future__ import annotations

import csv
import io
import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nsys_analyzer.capture.timings.words import MISSING, word
from nsys_analyzer.errors import TimingsError

_EXPECTED = "a header line, then one row per run, such as: model,context_length,phase,mean_ms"


@dataclass(frozen=True)
class TextTable:
    """The header and the rows of a file; each row's line counts from 1."""

    headers: tuple[str, ...]
    header_line: int
    rows: tuple[tuple[int, tuple[str, ...]], ...]
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
    again = [line for line, cells in rows if [word(cell) for cell in cells] == [word(header) for header in headers]]
    rows = [(line, cells) for line, cells in rows if line not in again and set(map(str.lower, cells)) - MISSING]
    notes = tuple(f"line {line}: the header again, left out" for line in again)
    if not rows:
        raise TimingsError(f"{path}: a header and no rows", "Run the timings again: the file holds none")
    for line, cells in rows:
        if any(cell.strip() for cell in cells[len(headers) :]):
            problem = f"{path}, line {line}: {len(cells)} cells under a header of {len(headers)}"
            raise TimingsError(problem, "Correct the row, or quote the value that holds the separator")
    return TextTable(headers, header_line, tuple(rows), decimal_comma, notes)


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


_Lines = list[tuple[int, tuple[str, ...]]]


def _csv_lines(path: Path, text: str) -> tuple[_Lines, bool]:
    """The lines of a CSV separated by commas, semicolons or tabs; and whether numbers may have a decimal comma."""
    first = next(line for line in text.splitlines() if line.strip())
    separator = max(",;\t", key=first.count)
    if separator not in first:
        raise TimingsError(f"{path}, line 1: not a CSV: the header has no comma, semicolon or tab", f"Give {_EXPECTED}")
    reader = csv.reader(io.StringIO(text, newline=""), delimiter=separator, skipinitialspace=True)
    try:
        lines = [(reader.line_num, tuple(cells)) for cells in reader if any(cell.strip() for cell in cells)]
    except csv.Error as error:
        raise TimingsError(f"{path}, line {reader.line_num}: not a CSV ({error})", f"Give {_EXPECTED}") from error
    return lines, separator != ","


def _markdown_lines(path: Path, text: str) -> _Lines:
    """The lines of the file's one markdown table, without emphasis; other text is passed over."""
    lines: _Lines = []
    rules: list[int] = []
    for number, line in enumerate(text.splitlines(), 1):
        cells = tuple(cell.strip().strip("*`").strip() for cell in line.strip().strip("|").split("|"))
        if line.lstrip().startswith("|") and any(cells):
            if all(re.fullmatch(r":?-+:?", cell) for cell in cells):
                rules.append(number)
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
    return [(1, headers), *((line, tuple(values.get(key, "") for key in headers)) for line, values in objects)]


def _objects(path: Path, text: str) -> Iterator[tuple[int, dict[str, str]]]:
    """Each object with the line it begins on."""
    decoder = json.JSONDecoder()
    in_list = text.lstrip()[0] == "["
    at = len(text) - len(text.lstrip()) + in_list
    while rest := text[at:].lstrip(" \t\r\n,"):
        if in_list and rest[0] == "]":
            return
        at = len(text) - len(rest)
        line = text.count("\n", 0, at) + 1
        try:
            value, at = decoder.raw_decode(text, at)
        except json.JSONDecodeError as error:
            problem = f"{path}, line {error.lineno}: not JSON ({error.msg})"
            raise TimingsError(problem, "Give a list of objects, or one object per line") from error
        if not isinstance(value, dict):
            problem = f"{path}, line {line}: a JSON {type(value).__name__}, not an object"
            raise TimingsError(problem, "Give a list of objects, or one object per line")
        yield line, dict(_cells(value))


def _cells(values: dict[str, Any], before: str = "") -> Iterator[tuple[str, str]]:
    """Each value as the text of a cell; an object in it as cells of longer names, a list, which no cell holds, not."""
    for key, value in values.items():
        name = f"{before}{key}"
        if isinstance(value, dict):
            yield from _cells(value, f"{name}_")
        elif not isinstance(value, list):
            yield name, "" if value is None else str(value)
