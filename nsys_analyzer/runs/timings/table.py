"""A file of timings as one table of texts: CSV, JSON (a list, or an object per line) or markdown."""

from __future__ import annotations

import csv
import io
import json
import math
import re
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from sys import intern
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from nsys_analyzer.errors import TimingsError
from nsys_analyzer.runs.timings.words import MISSING, word
from nsys_analyzer.trace.arrays import Bools, Ints

if TYPE_CHECKING:
    import pandas as pd

_EXPECTED = "a header line, then one row per run, such as: model,context_length,phase,mean_ms"
_JSON = json.JSONDecoder()
_BETWEEN_OBJECTS = re.compile(r"[ \t\r\n,]*")
#: Objects in objects, and what is said of more.
_DEEPEST, _TOO_DEEP = 32, "nested too deep"
#: Cells of the table for each that the file holds, the others are missing; small tables have any number of them.
_MOST_CELLS_PER_GIVEN, _FEW_CELLS = 10, 1_000_000
_Lines = list[tuple[int, tuple[str, ...]]]


class Texts(NamedTuple):
    """A column by its distinct texts, in the order in which they appear; ``codes`` is the index of each row's text."""

    codes: Ints
    texts: list[str]


@dataclass(frozen=True)
class Table:
    """A file of timings as texts without spaces around them.

    Attributes:
        path: the file.
        headers: a text for each column.
        header_line: the line of the header, 1 in a JSON file.
        frame: a row for each run or iteration, its line in the file (from 1) as index; columns are numbered from 0.
        decimal_comma: whether 20,5 is a number.
        notes: what was left out.
    """

    path: Path
    headers: tuple[str, ...]
    header_line: int
    frame: pd.DataFrame
    decimal_comma: bool = False
    notes: tuple[str, ...] = ()
    _columns: dict[int, Texts] = field(default_factory=dict, repr=False, compare=False)

    def texts(self, place: int) -> Texts:
        """The column at this place."""
        import pandas as pd

        if place not in self._columns:
            codes, texts = pd.factorize(self.frame[place].to_numpy())
            same, stripped = pd.factorize(np.array([text.strip() for text in texts], object))
            self._columns[place] = Texts(same[codes], stripped.tolist())
        return self._columns[place]

    def rows(self, chosen: Bools) -> Table:
        """These rows alone."""
        return self if chosen.all() else replace(self, frame=self.frame[chosen], _columns={})

    def with_column(self, header: str, text: str) -> Table:
        """The table with the same text in every row of one more column."""
        frame = self.frame.assign(**{"": text}).set_axis(range(len(self.headers) + 1), axis=1)
        return replace(self, headers=(*self.headers, header), frame=frame, _columns={})


def has_rows(path: Path) -> bool:
    """Whether the file holds anything below its header.

    Raises:
        TimingsError: no such file, empty, or no text.
    """
    return len([line for line in _read_text(path).splitlines() if line.strip()]) > 1


def read_table(path: Path) -> Table:
    """The table in a file, by what the file begins with; a header that stands there again is left out, with a note.

    Raises:
        TimingsError: no such file, empty, not a table, a header and no rows, a row longer than the header, or a table
            much larger than its file.
    """
    import pandas as pd

    text = _read_text(path)
    start, decimal_comma = text.lstrip()[0], False
    if start in "[{":
        lines = _json_lines(path, text)
    elif start == "|" or path.suffix.lower() == ".md":
        lines = _markdown_lines(path, text)
    else:
        lines, decimal_comma = _csv_lines(path, text)
    (header_line, headers), rows = lines[0], lines[1:]
    rows = rows if headers else []
    spelled = [word(header) for header in headers]
    again = {line for line, cells in rows if word(cells[0]) == spelled[0] and [*map(word, cells)] == spelled}
    rows = [
        (line, cells)
        for line, cells in rows
        if line not in again and not (cells[0].lower() in MISSING and MISSING.issuperset(map(str.lower, cells)))
    ]
    if not rows:
        raise TimingsError(f"{path}: a header and no rows", "Run the timings again: the file holds none")
    width = len(headers)
    for line, cells in rows:
        if any(map(str.strip, cells[width:])):
            problem = f"{path}, line {line}: {len(cells)} cells under a header of {width}"
            raise TimingsError(problem, "Correct the row, or quote the value that holds the separator")
    _check_filled(path, width, len(rows), sum(len(cells) for _, cells in rows))
    padding = ("",) * width
    whole = [cells if len(cells) == width else (*cells, *padding)[:width] for _, cells in rows]
    frame = pd.DataFrame(whole, index=[line for line, _ in rows], columns=range(width), dtype=object)
    notes = tuple(f"line {line}: the header again, left out" for line in sorted(again))
    return Table(path, headers, header_line, frame, decimal_comma, notes)


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
    at = _next_object(text, len(text) - len(text.lstrip()) + in_list)
    while at < len(text) and not (in_list and text[at] == "]"):
        line, counted = line + text.count("\n", counted, at), at
        try:
            value, end = _JSON.raw_decode(text, at)
            if isinstance(value, dict):
                row = dict(_cells(value))
            else:
                raise _no_rows(path, line, f"a JSON {type(value).__name__}, not an object")
        except json.JSONDecodeError as error:
            raise _no_rows(path, error.lineno, f"not JSON ({error.msg})") from error
        except RecursionError as error:
            raise _no_rows(path, line, _TOO_DEEP) from error
        except ValueError as error:
            raise _no_rows(path, line, str(error)) from error
        yield line, row
        at = _next_object(text, end)


def _next_object(text: str, at: int) -> int:
    """Where the text goes on behind spaces and commas."""
    separators = _BETWEEN_OBJECTS.match(text, at)
    return separators.end() if separators else at


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
