"""The meaning of a timings table's columns: the fields, the times, and what else may tell two runs apart."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import takewhile
from typing import NamedTuple

from nsys_analyzer.capture.timings import words
from nsys_analyzer.capture.timings.words import COMPILED, FIELDS, FLAGS, MISSING, MS_PER_UNIT, WORD_OF, word

_NUMBER = r"[-+]?(?:\d+(?:[.,]\d*)?|[.,]\d+)(?:[eE][-+]?\d+)?"
_CELL_OF_TIME = re.compile(
    rf"\$? ?(?P<value>{_NUMBER}) ?(?P<unit>[muµμ]?s\b)? ?"
    rf"(?:(?:±|\+/?-|\\pm) ?(?P<spread>{_NUMBER}) ?(?P<last>[muµμ]?s\b)?)? ?\$?"
)
_DIGITS_OF_A_SETTING = 4
_MANY, _LETTERS = 24, 30
_SAID_ONCE = ("statistic", "unit", *words.CONDITIONS_OF_A_HEADER)
_Cells = Callable[[int], list[str]]
"""The texts that stand in a column, each once: they say what it means, however often they stand there."""
_DATE = re.compile(r"\d{4}-?\d\d-?\d\d(?:[_T -]?\d\d[-:]?\d\d.*)?")


class Group(NamedTuple):
    """The columns of one phase's times; ``phase`` is ``None`` where the row says it.

    ``says`` are the conditions that the headers name: ``(("compile", "true"),)`` for ``Compiled forward (ms)``.
    """

    phase: str | None
    says: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True)
class TimeColumn:
    """A column of times: ``unit`` is ``None`` where the header does not say it."""

    index: int
    header: str
    group: Group
    statistic: str
    unit: str | None

    @property
    def ms_per_unit(self) -> float:
        """Milliseconds in one of the column's units; seconds where the header has none."""
        return MS_PER_UNIT[self.unit or "s"]


@dataclass(frozen=True)
class Columns:
    """A table's header, understood: the cell index of each field, the columns of times, and the other columns.

    ``others`` are the indices of columns without a meaning here that may be a condition of the run.
    """

    headers: tuple[str, ...]
    fields: dict[str, int]
    times: tuple[TimeColumn, ...]
    others: tuple[int, ...] = ()
    notes: tuple[str, ...] = ()

    def groups(self) -> tuple[Group, ...]:
        """The groups with a mean or median column, in order."""
        return tuple(dict.fromkeys(time.group for time in self.times if time.statistic in ("mean", "median")))

    def time(self, group: Group, statistic: str) -> TimeColumn | None:
        """The column of this group and statistic."""
        return next((time for time in self.times if (time.group, time.statistic) == (group, statistic)), None)

    def center(self, group: Group) -> TimeColumn | None:
        """The column of this group's mean, or of its median where it has that alone."""
        return self.time(group, "mean") or self.time(group, "median")

    def listed(self) -> str:
        """The headers as a message names them, of many the first."""
        more = len(self.headers) - _MANY
        first = ", ".join(repr(header.strip()[:_LETTERS]) for header in self.headers[:_MANY])
        return first + (f" and {more} more" if more > 0 else "")

    def place(self, name: str) -> int | None:
        """The index of the column with this header, else of the field of this name; ``None`` without either."""
        spelled = (index for index, header in enumerate(self.headers) if word(header) == word(name))
        return next(spelled, self.fields.get(word(name)))


def understand(headers: tuple[str, ...], rows: Sequence[tuple[str, ...]]) -> Columns:
    """Finds the meaning of each header by its words and, where a word has several meanings, by the cells below it.

    Each row is as long as the header.
    """

    @cache
    def cells(index: int) -> list[str]:
        return list(dict.fromkeys(row[index].strip() for row in rows))

    found = [time for index, header in enumerate(headers) if (time := _time_column(index, header, cells))]
    found = _with_totals(found)
    # Of two columns for one figure the one that states its unit is used, then the first.
    found.sort(key=lambda time: (time.unit is None, time.index))
    times: dict[tuple[Group, str], TimeColumn] = {}
    for time in found:
        times.setdefault((time.group, time.statistic), time)
    ordered = tuple(sorted(times.values(), key=lambda time: time.index))
    timed = {time.index for time in found}
    fields = _fields(headers, cells, timed)
    left = [index for index in range(len(headers)) if index not in {*fields.values(), *timed}]
    others = tuple(index for index in left if _may_be_a_condition(headers[index], cells(index)))
    return Columns(headers, fields, ordered, others, tuple(_column_notes(found, ordered, cells)))


def _fields(headers: tuple[str, ...], cells: _Cells, timed: set[int]) -> dict[str, int]:
    spelled = [word(header) for header in headers]
    fields: dict[str, int] = {}
    for name, synonyms in FIELDS:
        places = [spelled.index(synonym) for synonym in synonyms if synonym in spelled]
        free = [index for index in places if index not in timed and index not in fields.values()]
        fitting = [index for index in free if name not in _VALUES or _VALUES[name](_given(cells(index)))]
        if fitting:
            fields[name] = fitting[0]
    if not {"phase", "mode"} & set(fields):
        free = [index for index in range(len(headers)) if index not in {*timed, *fields.values()}]
        if phases := [index for index in free if _are_phases(cells(index))]:
            fields["phase"] = phases[0]
    return fields


def _given(cells: list[str]) -> list[str]:
    return [cell.lower() for cell in cells if cell.lower() not in MISSING]


def _are_phases(values: list[str]) -> bool:
    """Whether every cell names a phase, which makes a column one of phases, whatever its header is."""
    phases = list(takewhile(bool, map(words.phase_from_text, values)))
    return len(phases) == len(values) and not {"forward", "backward", "forward+backward"}.isdisjoint(phases)


def _are_flags(values: list[str]) -> bool:
    return bool(values) and all(value in FLAGS for value in values)


def _count(values: list[str]) -> bool:
    return len(set(values)) > 1 and all(re.fullmatch(r"\d+(\.0+)?", value) for value in values)


#: Fields that share a header with others, and what their cells have to be.
_VALUES: dict[str, Callable[[list[str]], bool]] = {
    **dict.fromkeys(("bf16", "fp16", "tf32", "cuda_graph", "with_backward", "with_optimizer"), _are_flags),
    "compile": lambda values: bool(values) and all(value in COMPILED for value in values),
    "is_warmup": lambda values: bool(values) and all(value in ("true", "false") for value in values),
    "iteration": _count,
    "optimizer": lambda values: not _are_flags(values),
}


def _may_be_a_condition(header: str, values: list[str]) -> bool:
    """Whether a column may be a setting of the run, and not its result, its origin or its number.

    A setting is a word, a flag, or a number of few digits; a result has many, or differs in every row.
    """
    named = set(word(header).split("_"))
    given = [value for value in values if value.lower() not in MISSING]
    if not named - {""} or not given or named & words.ORIGIN_WORDS:
        return False
    if named & words.RESULT_WORDS and all(re.match(r"[-+~≈]?\d", value) for value in given):
        return False
    if all(re.fullmatch(_NUMBER, value) for value in given):
        fractions = [re.sub(r"\D", "", value).strip("0") for value in given if "." in value]
        return all(len(digits) <= _DIGITS_OF_A_SETTING for digits in fractions)
    return not (all(_DATE.fullmatch(value) for value in given) or any(value[0] in "[{" for value in given))


def _column_notes(found: list[TimeColumn], used: tuple[TimeColumn, ...], cells: _Cells) -> Iterator[str]:
    unitless = [time.header for time in used if time.unit is None and not _carry_a_unit(cells(time.index))]
    if unitless:
        yield f"{', '.join(unitless)}: no unit in the column's name, read as seconds"
    unused = [time.header for time in found if time not in used]
    if unused:
        yield f"{', '.join(unused)}: not used, another column gives the same figure"


def _time_column(index: int, header: str, cells: _Cells) -> TimeColumn | None:
    spelled = re.sub(r"(?:[\s_]per[\s_]|/)(?:step|iter|iteration)(?![a-z])", " ", header.lower())
    parts = word(spelled).split("_")
    said: dict[str, list[str]] = {}
    for part in parts:
        kind, value = WORD_OF.get(part, (None, part))
        if kind is None:
            return None
        if value not in said.setdefault(kind, []):
            said[kind].append(value)
    phases = said.get("phase", [])
    phase = words.single_phase(phases)
    if (phases and phase is None) or any(len(said.get(kind, [])) > 1 for kind in _SAID_ONCE):
        return None
    conditions = tuple((kind, said[kind][0]) for kind in words.CONDITIONS_OF_A_HEADER if kind in said)
    if not _is_time(said, parts) and not _carry_a_unit(cells(index)):
        return None
    if "unit" not in said and _are_flags([cell.lower() for cell in cells(index) if cell]):
        return None
    statistic, unit = said.get("statistic", ["mean"])[0], said.get("unit", [None])[0]
    return TimeColumn(index, header.strip(), Group(phase, conditions), statistic, unit)


def _is_time(said: dict[str, list[str]], parts: list[str]) -> bool:
    """Whether the words say "time": ``loss_mean`` and ``max_step`` do not, ``loss_ms`` and ``small/fwd`` do."""
    if parts == ["s"]:
        return False
    ordinary = bool({"loss", "step", "total"} & set(said.get("phase", [])))
    phase_of_a_model = "model" in said and "phase" in said
    return bool(
        "unit" in said or "time" in said.get("word", []) or ("statistic" in said and not ordinary) or phase_of_a_model
    )


def cell_of_time(text: str) -> re.Match[str] | None:
    """A number, a unit where it has one, and a deviation: ``20.5``, ``20.5 ms``, ``20.5 ± 0.3 ms``; None for others."""
    # One space in place of many: a thousand of them fall to the pattern's places for a space in a million ways.
    return _CELL_OF_TIME.fullmatch(" ".join(text.split()))


def _carry_a_unit(cells: list[str]) -> bool:
    """Whether the cells that hold a number give its unit."""
    units = (match["unit"] or match["last"] for cell in cells if (match := cell_of_time(cell)))
    return bool(next(units, None)) and all(units)


def _with_totals(times: list[TimeColumn]) -> list[TimeColumn]:
    """A total is that of the phases beside it: a step where the optimizer is among them; left out without any."""
    placed = []
    for time in times:
        beside = {other.group.phase for other in times if other.group.says == time.group.says}
        if time.group.phase != "total":
            placed.append(time)
        elif {"forward", "backward"} <= beside:
            whole = "step" if "optimizer" in beside else "forward+backward"
            placed.append(replace(time, group=time.group._replace(phase=whole)))
    return placed
