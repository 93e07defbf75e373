"""The meaning of a timings table's columns: the fields, the times, and what else may tell two runs apart."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import NamedTuple

from nsys_analyzer.errors import TimingsError
from nsys_analyzer.runs.timings import words
from nsys_analyzer.runs.timings.cells import NUMBER, cell_of_time
from nsys_analyzer.runs.timings.table import Table
from nsys_analyzer.runs.timings.words import COMPILED, DIMENSIONS, FIELDS, FLAGS, MISSING, MS_PER_UNIT, WORD_OF, word

_DIGITS_OF_A_SETTING = 4
_MANY, _LETTERS = 24, 30
_SAID_ONCE = ("statistic", "unit", *words.CONDITIONS_OF_A_HEADER)
_DATE = re.compile(r"\d{4}-?\d\d-?\d\d(?:[_T -]?\d\d[-:]?\d\d.*)?")


class Group(NamedTuple):
    """The columns of one phase's times; ``phase`` is ``None`` where the row says it.

    ``says`` are the conditions that the headers name: ``(("compile", "true"),)`` for ``Compiled forward (ms)``.
    """

    phase: str | None
    says: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True)
class TimeColumn:
    """A column of times: ``statistic`` is mean, std, min, max or median; ``unit`` is ``None`` where none is said."""

    place: int
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
    """A table's header, understood: the place of each field's column, the columns of times, and the other columns.

    ``others`` are the places of columns without a meaning here that may be a condition of the run.
    """

    headers: tuple[str, ...]
    fields: dict[str, int]
    times: tuple[TimeColumn, ...]
    others: tuple[int, ...]
    notes: tuple[str, ...]

    def groups(self) -> tuple[Group, ...]:
        """The groups with a mean or median column, in order."""
        return tuple(dict.fromkeys(time.group for time in self.times if time.statistic in ("mean", "median")))

    def of(self, group: Group) -> dict[str, TimeColumn]:
        """The group's columns by their statistic."""
        return {time.statistic: time for time in self.times if time.group == group}

    def listed(self) -> str:
        """The headers as a message names them, of many the first."""
        more = len(self.headers) - _MANY
        first = ", ".join(repr(header.strip()[:_LETTERS]) for header in self.headers[:_MANY])
        return first + (f" and {more} more" if more > 0 else "")

    def header(self, field: str) -> str:
        """The header that the file gives this field; the field's own name where it has none."""
        return self.headers[self.fields[field]].strip() if field in self.fields else field

    def place(self, name: str) -> int | None:
        """The place of the column with this header, else of the field of this name; ``None`` without either."""
        spelled = (place for place, header in enumerate(self.headers) if word(header) == word(name))
        return next(spelled, self.fields.get(word(name)))

    def names_the_model(self) -> bool:
        """Whether columns, or the headers of times, say which model was timed."""
        said = all("model" in dict(group.says) for group in self.groups())
        return said or "model" in self.fields or all(field in self.fields for field in DIMENSIONS)


def understand(table: Table) -> Columns:
    """Finds the meaning of each header by its words and, where a word has several meanings, by the cells below it.

    Raises:
        TimingsError: no column of times.
    """
    found = [time for place in range(len(table.headers)) if (time := _time_column(table, place))]
    found = _with_totals(found)
    # Of two columns for one figure the one that states its unit is used, then the first.
    found.sort(key=lambda time: (time.unit is None, time.place))
    used: dict[tuple[Group, str], TimeColumn] = {}
    for time in found:
        used.setdefault((time.group, time.statistic), time)
    times = tuple(sorted(used.values(), key=lambda time: time.place))
    fields = _fields(table, {time.place for time in found})
    taken = {*fields.values(), *(time.place for time in found)}
    left = [place for place in range(len(table.headers)) if place not in taken]
    others = tuple(place for place in left if _may_be_a_condition(table.headers[place], table.texts(place).texts))
    columns = Columns(table.headers, fields, times, others, (*table.notes, *_notes(table, found, times)))
    if not columns.groups():
        hint = "Add mean_ms beside a phase column, or forward_ms and backward_ms"
        if any(re.fullmatch(r"\d+\.\d+", header.strip()) for header in table.headers):
            hint = "Its first line is data: put a header line above it, such as model,mode,mean,std"
        problem = f"{table.path}, line {table.header_line}: no column of times among {columns.listed()}"
        raise TimingsError(problem, hint)
    return columns


def _fields(table: Table, timed: set[int]) -> dict[str, int]:
    """The column of each field: the first of its spellings under which the cells are what they have to be."""
    spelled: dict[str, int] = {}
    for place, header in enumerate(table.headers):
        spelled.setdefault(word(header), place)
    fields: dict[str, int] = {}
    for field in FIELDS:
        places = [spelled[spelling] for spelling in field.spellings.split() if spelling in spelled]
        free = [place for place in places if place not in timed and place not in fields.values()]
        fits = _FITS.get(field.cells)
        if fitting := [place for place in free if fits is None or fits(_given(table.texts(place).texts))]:
            fields[field.name] = fitting[0]
    if not {"phase", "mode"} & set(fields):
        taken = timed | set(fields.values())
        free = [place for place in range(len(table.headers)) if place not in taken]
        if phases := [place for place in free if _are_phases(table.texts(place).texts)]:
            fields["phase"] = phases[0]
    return fields


def _given(texts: list[str]) -> list[str]:
    return [text.lower() for text in texts if text.lower() not in MISSING]


def _are_phases(texts: list[str]) -> bool:
    """Whether every cell names a phase, which makes a column one of phases, whatever its header is."""
    named = all(words.phase_from_text(text) for text in texts)
    return named and not {"forward", "backward", "forward+backward"}.isdisjoint(map(words.phase_from_text, texts))


def _are_flags(texts: list[str]) -> bool:
    return bool(texts) and all(text in FLAGS for text in texts)


#: What the cells of a column have to be where its header has several meanings.
_FITS: dict[str, Callable[[list[str]], bool]] = {
    "flags": _are_flags,
    "words": lambda texts: not _are_flags(texts),
    "compiled": lambda texts: bool(texts) and all(text in COMPILED for text in texts),
    "warm-up": lambda texts: bool(texts) and all(text in ("true", "false") for text in texts),
    "numbering": lambda texts: len(set(texts)) > 1 and all(re.fullmatch(r"\d+(\.0+)?", text) for text in texts),
}


def _may_be_a_condition(header: str, texts: list[str]) -> bool:
    """Whether a column may be a setting of the run, and not its result, its origin or its number.

    A setting is a word, a flag, or a number of few digits; a result has many, or differs in every row.
    """
    named = set(word(header).split("_"))
    given = [text for text in texts if text.lower() not in MISSING]
    if not named - {""} or not given or named & words.ORIGIN_WORDS:
        return False
    if named & words.RESULT_WORDS and all(re.match(r"[-+~≈]?\d", text) for text in given):
        return False
    if all(re.fullmatch(NUMBER, text) for text in given):
        fractions = [re.sub(r"\D", "", text).strip("0") for text in given if "." in text]
        return all(len(digits) <= _DIGITS_OF_A_SETTING for digits in fractions)
    return not (all(_DATE.fullmatch(text) for text in given) or any(text[0] in "[{" for text in given))


def _notes(table: Table, found: list[TimeColumn], used: tuple[TimeColumn, ...]) -> Iterator[str]:
    unitless = [time.header for time in used if time.unit is None and not _carry_a_unit(table.texts(time.place).texts)]
    if unitless:
        yield f"{', '.join(unitless)}: no unit in the column's name, read as seconds"
    unused = [time.header for time in found if time not in used]
    if unused:
        yield f"{', '.join(unused)}: not used, another column gives the same figure"


def _time_column(table: Table, place: int) -> TimeColumn | None:
    """The column as one of times; ``None`` where its header has another word than those of ``words.TIME_WORDS``."""
    header = table.headers[place]
    parts = word(re.sub(r"(?:[\s_]per[\s_]|/)(?:step|iter|iteration)(?![a-z])", " ", header.lower())).split("_")
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
    texts = table.texts(place).texts
    if not _is_time(said, parts) and not _carry_a_unit(texts):
        return None
    if "unit" not in said and _are_flags([text.lower() for text in texts if text]):
        return None
    conditions = tuple((kind, said[kind][0]) for kind in words.CONDITIONS_OF_A_HEADER if kind in said)
    statistic, unit = said.get("statistic", ["mean"])[0], said.get("unit", [None])[0]
    return TimeColumn(place, header.strip(), Group(phase, conditions), statistic, unit)


def _is_time(said: dict[str, list[str]], parts: list[str]) -> bool:
    """Whether the words say "time": ``loss_mean`` and ``max_step`` do not, ``loss_ms`` and ``small/fwd`` do."""
    if parts == ["s"]:
        return False
    ordinary = bool({"loss", "step", "total"} & set(said.get("phase", [])))
    phase_of_a_model = "model" in said and "phase" in said
    return bool(
        "unit" in said or "time" in said.get("word", []) or ("statistic" in said and not ordinary) or phase_of_a_model
    )


def _carry_a_unit(texts: list[str]) -> bool:
    """Whether the cells that hold a number give its unit."""
    units = (match["unit"] or match["last"] for text in texts if (match := cell_of_time(text)))
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
