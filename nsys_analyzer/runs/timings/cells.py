"""The cells of a timings table: one text, read as what its column holds, or refused with what to write instead."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from datetime import datetime, timezone
from typing import Any

from nsys_analyzer.runs.timings.words import COMPILED, FLAGS, MS_PER_UNIT, Cells, status_from_text
from nsys_analyzer.system.strict_json import LARGEST

NUMBER = r"[-+]?(?:\d+(?:[.,]\d*)?|[.,]\d+)(?:[eE][-+]?\d+)?"
_BESIDE = re.compile(r"±|\+/?-|\\pm")
_TIME = re.compile(
    rf"\$? ?(?P<value>{NUMBER}) ?(?P<unit>[muµμ]?s\b)? ?"
    rf"(?:(?:{_BESIDE.pattern}) ?(?P<spread>{NUMBER}) ?(?P<last>[muµμ]?s\b)?)? ?\$?"
)
_DATE = re.compile(r"(\d{4})-?(\d\d)-?(\d\d)(?:[_T -]?(\d\d)[-:]?(\d\d)[-:]?(\d\d)?)?")
_SHORTEST_MS, _LONGEST_MS = 1e-9, 365 * 86_400e3


class CellError(Exception):
    """A cell that is not what its column holds; ``field`` is another column's, where that is the wrong one."""

    def __init__(self, problem: str, hint: str, field: str | None = None) -> None:
        super().__init__(problem)
        self.problem, self.hint, self.field = problem, hint, field


def number(text: str, *, decimal_comma: bool = False) -> float:
    """The number that a cell is, and nothing beside it.

    Raises:
        CellError: any other text, NaN and infinity.
    """
    try:
        value = float(text.replace(",", ".") if decimal_comma else text)
    except ValueError:
        value = math.nan
    if not math.isfinite(value):
        raise CellError(f"{text!r} is not a number", "Write a plain number, or OOM, or leave the cell empty")
    return value


def whole_number(text: str, least: int, *, decimal_comma: bool = False) -> int:
    """The whole number of at least ``least`` that a cell is; ``512.0`` is 512.

    Raises:
        CellError: not a number, not whole, below ``least``, or above what any arithmetic holds.
    """
    value = number(text, decimal_comma=decimal_comma)
    if not value.is_integer() or not least <= value <= LARGEST:
        wanted = f"up to {LARGEST:,}" if value > LARGEST else f"of at least {least}"
        raise CellError(f"{text!r} is not a whole number {wanted}", "Correct the value or leave the cell empty")
    return int(value)


def flag(text: str) -> bool:
    """Whether a cell says true or false.

    Raises:
        CellError: another word.
    """
    if text.lower() not in FLAGS:
        raise CellError(f"{text!r} is neither true nor false", "Write true or false")
    return FLAGS[text.lower()]


def seconds_since_epoch(text: str) -> float | None:
    """A date, with or without its time, or a number of seconds, in seconds since 1970; ``None`` for other texts."""
    text = text.replace("Z", "+00:00")
    if re.fullmatch(r"\d{9,11}(\.\d+)?", text):
        return float(text)
    if date := _DATE.fullmatch(text):
        text = "{}-{}-{}T{}:{}:{}".format(*(part or "00" for part in date.groups()))
    try:
        moment = datetime.fromisoformat(text)
    except ValueError:
        return None
    return (moment if moment.tzinfo else moment.replace(tzinfo=timezone.utc)).timestamp()


def reader(cells: Cells, *, decimal_comma: bool) -> Callable[[str], Any]:
    """What reads a cell of a column that holds these, as ``words.FIELDS`` say."""
    if cells in ("count", "number", "numbering"):
        least = 1 if cells == "count" else 0
        return lambda text: whole_number(text, least, decimal_comma=decimal_comma)
    return _READERS.get(cells, str)


_READERS: dict[str, Callable[[str], Any]] = {
    "flag": flag,
    "flags": flag,
    "compiled": lambda text: COMPILED[text.lower()],
    "date": seconds_since_epoch,
}


def milliseconds(
    text: str, ms_per_unit: float, *, is_deviation: bool = False, decimal_comma: bool = False
) -> float | str:
    """The time in a cell: ``20.5``, ``20.5 ms``, ``20.5 ± 0.3 ms``; or the status in its place, such as ``oom``.

    Raises:
        CellError: not a number, negative, above a year, or below a picosecond where it is no deviation.
    """
    try:
        ms = number(text, decimal_comma=decimal_comma) * ms_per_unit
    except CellError:
        if (status := status_from_text(text)) and status != "ok":
            return status
        cell = cell_of_time(text)
        if cell is None:
            raise
        unit = _ms_per(cell["unit"] or cell["last"], ms_per_unit)
        ms = number(cell["value"], decimal_comma=decimal_comma) * unit
    return _possible(text, ms, is_deviation=is_deviation)


def deviation(text: str, ms_per_unit: float, *, decimal_comma: bool = False) -> float | None:
    """The deviation beside the time in a cell, in milliseconds; ``None`` where there is none.

    Raises:
        CellError: negative, or above a year.
    """
    cell = cell_of_time(text) if _BESIDE.search(text) else None
    if cell is None or cell["spread"] is None:
        return None
    ms = number(cell["spread"], decimal_comma=decimal_comma) * _ms_per(cell["last"] or cell["unit"], ms_per_unit)
    return _possible(text, ms, is_deviation=True)


def cell_of_time(text: str) -> re.Match[str] | None:
    """The number, the unit and the deviation of a cell, the last two where it has them; ``None`` for other texts."""
    # One space in place of many: a thousand of them fall to the pattern's places for a space in a million ways.
    return _TIME.fullmatch(" ".join(text.split()))


def _ms_per(unit: str | None, otherwise: float) -> float:
    return MS_PER_UNIT[re.sub("[µμ]", "u", unit)] if unit else otherwise


def _possible(text: str, ms: float, *, is_deviation: bool) -> float:
    """A time from a picosecond to a year; a deviation can be zero.

    Raises:
        CellError: it is beyond these.
    """
    if not (0 if is_deviation else _SHORTEST_MS) <= ms <= _LONGEST_MS:
        raise CellError(f"{text!r} is no time that can pass", "Time the run again")
    return ms
