"""The cells of a timings table: each text as the value that its column holds, or an error with what to write."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from datetime import datetime, timezone
from typing import Any, NamedTuple

from nsys_analyzer.runs.timings.words import COMPILED, FLAGS, MS_PER_UNIT, Cells, status_from_text
from nsys_analyzer.system.strict_json import LARGEST

NUMBER = r"[-+]?(?:\d+\.?\d*|\.\d+)(?:[eE][-+]?\d+)?"
_TIME = re.compile(
    rf"\$? ?(?P<value>{NUMBER}) ?(?P<unit>[muµμ]?s\b)? ?"
    rf"(?:(?:±|\+/?-|\\pm) ?(?P<spread>{NUMBER}) ?(?P<last>[muµμ]?s\b)?)? ?\$?"
)
SHORTEST_MS, LONGEST_MS = 1e-9, 365 * 86_400e3


_DATE = re.compile(r"(\d{4})-?(\d\d)-?(\d\d)(?:[_T -]?(\d\d)[-:]?(\d\d)[-:]?(\d\d)?)?")


class CellError(Exception):
    """A cell that is not what its column holds; ``field`` is another column's, where that is the wrong one."""

    def __init__(self, problem: str, hint: str, field: str = "") -> None:
        super().__init__(problem)
        self.problem, self.hint, self.field = problem, hint, field


class Time(NamedTuple):
    """A time and the deviation beside it in ms, NaN where there is none; or a status, such as ``oom``."""

    ms: float = math.nan
    std_ms: float = math.nan
    status: str = ""


def number(text: str) -> float:
    """The finite number in a cell.

    Raises:
        CellError: any other text, NaN and infinity.
    """
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not math.isfinite(value):
        raise CellError(f"{text!r} is not a number", "Write a plain number, or OOM, or leave the cell empty")
    return value


def whole_number(text: str, least: int = 0) -> int:
    """The whole number of at least ``least`` in a cell; ``512.0`` is 512.

    Raises:
        CellError: not a number, not whole, below ``least``, or above 2^53.
    """
    value = number(text)
    if not value.is_integer() or not least <= value <= LARGEST:
        wanted = f"up to {LARGEST:,}" if value > LARGEST else f"of at least {least}"
        raise CellError(f"{text!r} is not a whole number {wanted}", "Correct the value or leave the cell empty")
    return int(value)


def flag(text: str) -> bool:
    """True or false, in any of the spellings of ``FLAGS``.

    Raises:
        CellError: another word.
    """
    if text.lower() not in FLAGS:
        raise CellError(f"{text!r} is neither true nor false", "Write true or false")
    return FLAGS[text.lower()]


def seconds_since_epoch(text: str) -> float | None:
    """A date, with or without its time, or a number of seconds, in seconds since 1970; ``None`` for other texts."""
    if re.fullmatch(r"\d{9,11}(\.\d+)?", text):
        return float(text)
    if date := _DATE.fullmatch(text):
        text = "{}-{}-{}T{}:{}:{}".format(*(part or "00" for part in date.groups()))
    try:
        moment = datetime.fromisoformat(text)
    except ValueError:  # of 02/03/2025 nobody knows which is the month
        return None
    return (moment if moment.tzinfo else moment.replace(tzinfo=timezone.utc)).timestamp()


READERS: dict[Cells, Callable[[str], Any]] = {
    "text": str,
    "words": str,
    "warm-up": flag,
    "flag": flag,
    "flags": flag,
    "compiled": lambda text: COMPILED[text.lower()],
    "count": lambda text: whole_number(text, 1),
    "number": whole_number,
    "numbering": whole_number,
    "date": seconds_since_epoch,
}


def read_time(text: str, ms_per_unit: float, shortest_ms: float = SHORTEST_MS) -> Time:
    """The time in a cell: ``20.5``, ``20.5 ms``, ``20.5 ± 0.3 ms``; or the status in its place.

    Raises:
        CellError: not a number, below ``shortest_ms``, above a year, or a negative deviation.
    """
    cell = cell_of_time(text)
    status = None if cell else status_from_text(text)
    if status and status != "ok":
        return Time(status=status)
    if cell is None:
        return Time(_possible(text, number(text) * ms_per_unit, shortest_ms))
    ms = number(cell["value"]) * _ms_per(cell["unit"] or cell["last"], ms_per_unit)
    spread = cell["spread"]
    std_ms = number(spread) * _ms_per(cell["last"] or cell["unit"], ms_per_unit) if spread else math.nan
    return Time(_possible(text, ms, shortest_ms), _possible(text, std_ms, 0.0) if spread else math.nan)


def cell_of_time(text: str) -> re.Match[str] | None:
    """The number, the unit and the deviation of a cell, the last two where it has them; ``None`` for other texts."""
    # One space in place of many: a thousand of them fall to the pattern's places for a space in a million ways.
    return _TIME.fullmatch(" ".join(text.split()))


def _ms_per(unit: str | None, otherwise: float) -> float:
    return MS_PER_UNIT[re.sub("[µμ]", "u", unit)] if unit else otherwise


def _possible(text: str, ms: float, shortest_ms: float) -> float:
    if not shortest_ms <= ms <= LONGEST_MS:
        raise CellError(f"{text!r} is outside the range of possible times", "Time the run again")
    return ms
