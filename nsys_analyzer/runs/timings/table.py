"""A file of timings as one table of texts: CSV, JSON (a list, or an object per line) or markdown."""

from __future__ import annotations

import csv
import io
import json
import math
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from sys import intern
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from nsys_analyzer.errors import TimingsError
from nsys_analyzer.runs.timings.cells import CellError
from nsys_analyzer.runs.timings.words import MISSING
from nsys_analyzer.text import plural
from nsys_analyzer.trace.arrays import Bools

if TYPE_CHECKING:
    import pandas as pd

_EXPECTED = "a header line, then one row per run, such as: model,context_length,phase,mean_ms"
_JSON = json.JSONDecoder()
_BETWEEN_OBJECTS = re.compile(r"[ \t\r\n,]*")
_DEEPEST, _TOO_DEEP = 32, "nested too deep"  # objects in objects
_MOST_CELLS_PER_GIVEN, _FEW_CELLS = 10, 1_000_000
_LETTERS_OF_A_CELL = 100
_MOST_LISTED, _LETTERS = 12, 30
_Lines = list[tuple[int, tuple[str, ...]]]


@dataclass(frozen=True)
class Table:
    """A file of timings as texts.

    The index of ``frame`` is the line in the file, from 1; its columns are numbered from 0, and categories of texts
    without spaces around them, "" for what is missing. ``notes`` say what was left out.
    """

    path: Path
    headers: tuple[str, ...]
    header_line: int
    frame: pd.DataFrame
    notes: tuple[str, ...] = ()


def read_texts(
    path: Path, column: pd.Series[Any], header: str, read: Callable[[str], Any], needed: Bools | None = None
) -> npt.NDArray[np.object_]:
    """The value that ``read`` makes of each distinct text of a column, ``None`` where the text is missing.

    Raises:
        TimingsError: a cell cannot be read, and its row is ``needed``.
    """
    texts = column.cat.categories
    values = np.full(len(texts), None, object)
    errors: dict[int, CellError] = {}
    for number, text in enumerate(texts):
        try:
            values[number] = read(text) if text else None
        except CellError as error:
            errors[number] = error
    codes = column.cat.codes.to_numpy()
    wrong = np.isin(codes, list(errors)) & (True if needed is None else needed)
    if wrong.any():
        row = int(wrong.argmax())
        raise error_at(path, column.index[row], header, errors[int(codes[row])])
    return values


def listed(texts: Iterable[str], show: Callable[[str], str] = repr) -> str:
    """The first few of these for a message, each shortened."""
    first = list(islice(texts, _MOST_LISTED + 1))
    more = ", ..." if len(first) > _MOST_LISTED else ""
    return ", ".join(show(text[:_LETTERS]) for text in first[:_MOST_LISTED]) + more


def lines_listed(lines: Iterable[int]) -> str:
    """``line 3``, or ``lines 3, 5``."""
    numbers = [str(line) for line in lines]
    return f"{plural(len(numbers), 'line')} {listed(numbers, str)}"


def error_at(path: Path, line: int, header: str, error: CellError) -> TimingsError:
    """The error of a cell with its place."""
    problem = error.problem
    if len(problem) > 2 * _LETTERS_OF_A_CELL:
        problem = f"{problem[:_LETTERS_OF_A_CELL]}…{problem[-_LETTERS_OF_A_CELL:]}"
    return TimingsError(f"{path}, line {line}, column {header[:_LETTERS_OF_A_CELL]!r}: {problem}", error.hint)


def has_rows(path: Path) -> bool:
    """Whether the file holds anything below its header.

    Raises:
        TimingsError: no such file, empty, or no text.
    """
    return len([line for line in _read_text(path).splitlines() if line.strip()]) > 1


def read_table(path: Path) -> Table:
    """The table in a file, by what the file begins with; a header that stands there again is left out, with a note.

    Raises:
        TimingsError: no such file, empty, not a table, a header and no rows, or a row longer than the header.
    """
    import pandas as pd

    text = _read_text(path)
    start = text.lstrip()[0]
    if start in "[{":
        lines = _json_lines(path, text)
    else:
        lines = _markdown_lines(path, text) if start == "|" or path.suffix.lower() == ".md" else _csv_lines(path, text)
    (header_line, header), *rows = lines
    titles = [cell.strip().lower() for cell in header]
    again = {line for line, cells in rows if cells[0].strip().lower() == titles[0] and _same(cells, titles)}
    rows = [row for row in rows if row[0] not in again] if again else rows
    width = len(header)
    for line, cells in rows:
        if len(cells) > width and any(map(str.strip, cells[width:])):
            problem = f"{path}, line {line}: {len(cells)} cells under a header of {width}"
            raise TimingsError(problem, "Correct the row, or quote the value that holds the separator")
    missing = [""] * width  # a row may be shorter than the header, or have empty cells behind it
    even = [cells if len(cells) == width else [*cells, *missing][:width] for _, cells in rows]
    frame = pd.DataFrame(even, index=[line for line, _ in rows], columns=range(width), dtype=object).apply(_categories)
    is_given = np.logical_or.reduce([frame[place] != "" for place in frame])
    if not is_given.any():
        raise TimingsError(f"{path}: a header and no rows", "Run the timings again: the file holds none")
    notes = (f"{lines_listed(sorted(again))}: the header again, left out",) if again else ()
    return Table(path, tuple(map(str.strip, header)), header_line, frame[is_given], notes)


def _categories(cells: pd.Series[Any]) -> pd.Series[Any]:
    """The texts of a column without spaces around them, each distinct one once."""
    import pandas as pd

    codes, found = pd.factorize(cells.fillna(""))
    stripped = [text.strip() for text in found]
    same, texts = pd.factorize(np.array(["" if text.lower() in MISSING else text for text in stripped], object))
    return pd.Series(pd.Categorical.from_codes(same[codes], pd.Index(texts, dtype=object)), cells.index)


def _same(cells: Sequence[str], titles: Sequence[str]) -> bool:
    return [cell.strip().lower() for cell in cells] == titles


def _read_text(path: Path) -> str:
    of_shell = path.is_fifo() and path.is_relative_to("/dev")  # <(...), which has a writer
    if path.exists() and not (path.is_file() or path.is_dir() or of_shell):
        raise TimingsError(f"{path}: is a pipe or a device", "Give the path of a CSV file")
    try:
        data = path.read_bytes()
    except OSError as error:
        raise TimingsError(f"{path}: cannot be read ({error.strerror})", "Give the path of a CSV file") from error
    encoding = "utf-16" if data[:2] in (b"\xff\xfe", b"\xfe\xff") else "utf-8-sig"  # PowerShell's > writes UTF-16
    try:
        text = data.decode(encoding)
    except UnicodeDecodeError:
        text = "\0"
    if "\0" in text:
        raise TimingsError(f"{path}: not a CSV: it is not text", "Save it as a CSV in UTF-8")
    if not text.strip():
        raise TimingsError(f"{path}: the file is empty", f"Give {_EXPECTED}")
    return text


def _csv_lines(path: Path, text: str) -> _Lines:
    """The lines of a CSV separated by commas, semicolons or tabs; without commas, 20,5 is a number."""
    first = next(line for line in text.splitlines() if line.strip())
    separator = max(",;\t", key=first.count)
    if separator not in first:
        raise TimingsError(f"{path}, line 1: not a CSV: the header has no comma, semicolon or tab", f"Give {_EXPECTED}")
    if separator != ",":
        text = re.sub(r"(?<=\d),(?=\d)", ".", text)
    reader = csv.reader(io.StringIO(text, newline=""), delimiter=separator, skipinitialspace=True)
    try:
        return [(reader.line_num, tuple(cells)) for cells in reader if any(cells)]
    except csv.Error as error:
        raise TimingsError(f"{path}, line {reader.line_num}: not a CSV ({error})", f"Give {_EXPECTED}") from error


def _markdown_lines(path: Path, text: str) -> _Lines:
    """The lines of the file's one markdown table, without emphasis; other text is passed over."""
    lines: _Lines = []
    rules: set[int] = set()
    for number, line in enumerate(text.splitlines(), 1):
        cells = tuple(cell.strip().strip("*`").strip() for cell in line.strip().strip("|").split("|"))
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
    """The objects of a JSON list, or of one object per line, as rows under all their keys.

    Raises:
        TimingsError: no such objects, or so many keys that the table would be much larger than the file.
    """
    objects = list(_objects(path, text))
    keys = tuple(dict.fromkeys(key for _, values in objects for key in values))
    given = sum(len(values) for _, values in objects)
    if len(keys) * len(objects) > _MOST_CELLS_PER_GIVEN * given + _FEW_CELLS:
        problem = f"{path}: {len(keys):,} different keys in {len(objects):,} rows, and most of the cells are missing"
        raise TimingsError(problem, "Give a file with one table of timings")
    return [(1, keys), *((line, tuple(values.get(key, "") for key in keys)) for line, values in objects)]


def _objects(path: Path, text: str) -> Iterator[tuple[int, dict[str, str]]]:
    """Each object with the line it begins on."""
    at = len(text) - len(text.lstrip())
    is_list = text[at] == "["
    line, counted = 1, 0
    at = _next_object(text, at + is_list)
    while at < len(text) and not (is_list and text[at] == "]"):
        line, counted = line + text.count("\n", counted, at), at
        try:
            value, end = _JSON.raw_decode(text, at)
            row = dict(_cells(value))
        except json.JSONDecodeError as error:
            line, problem = error.lineno, f"not JSON ({error.msg})"
        except RecursionError:
            problem = _TOO_DEEP
        except ValueError as error:
            problem = str(error)
        else:
            yield line, row
            at = _next_object(text, end)
            continue
        raise TimingsError(f"{path}, line {line}: {problem}", "Give a list of objects, or one object per line")


def _next_object(text: str, at: int) -> int:
    separators = _BETWEEN_OBJECTS.match(text, at)
    return separators.end() if separators else at


def _cells(values: Any, before: str = "", depth: int = 1) -> Iterator[tuple[str, str]]:
    """The keys and cells of an object; an object in it is cells of longer keys, a list is left out.

    Raises:
        ValueError: no object, or what no cell can hold: an infinite number, half a surrogate pair, a nesting too deep.
    """
    if not isinstance(values, dict):
        raise ValueError(f"a JSON {type(values).__name__}, not an object")  # noqa: TRY004 - of the file, not a caller's
    if depth > _DEEPEST:
        raise ValueError(_TOO_DEEP)
    for key, value in values.items():
        if isinstance(value, dict):
            yield from _cells(value, f"{before}{key}_", depth + 1)
        elif isinstance(value, float) and math.isinf(value):
            raise ValueError(f"{value} is no number; write null for a value that is missing")
        elif not isinstance(value, list):
            name, cell = f"{before}{key}", "" if value is None else str(value)
            (name + cell).encode()  # it refuses half a surrogate pair
            yield intern(name), intern(cell)
