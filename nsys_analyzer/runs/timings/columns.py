"""The meaning of a timings table's columns: the fields, the times, and what else may tell two runs apart."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import NamedTuple

from nsys_analyzer.errors import TimingsError
from nsys_analyzer.runs.timings import words
from nsys_analyzer.runs.timings.cells import NUMBER, cell_of_time
from nsys_analyzer.runs.timings.table import Table, listed
from nsys_analyzer.runs.timings.words import COMPILED, DIMENSIONS, FIELDS, FLAGS, MS_PER_UNIT, WORD_OF, word

_DIGITS_OF_A_SETTING = 4
_DATE = re.compile(r"\d{4}-?\d\d-?\d\d(?:[_T -]?\d\d[-:]?\d\d.*)?")


class Group(NamedTuple):
    """The columns of one phase's times; ``phase`` is ``None`` where the row says it.

    ``conditions`` are the conditions that the headers name: ``(("compile", "true"),)`` for ``Compiled forward (ms)``.
    """

    phase: str | None
    conditions: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True)
class TimeColumn:
    """A column of times: ``statistic`` is mean, std, min, max or median; without a ``unit`` it is in seconds."""

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
    """The meaning of a table's columns, by their places.

    A field that only headers of times name has its own name in place of a place. ``others`` have no meaning here, and
    may be a condition of the run.
    """

    headers: tuple[str, ...]
    fields: dict[str, int | str]
    times: tuple[TimeColumn, ...]
    others: tuple[int, ...]
    notes: tuple[str, ...]

    def groups(self) -> list[Group]:
        """The groups with a mean or median column, in order."""
        return list(dict.fromkeys(time.group for time in self.times if time.statistic in ("mean", "median")))

    def of(self, group: Group) -> dict[str, TimeColumn]:
        """The group's columns by their statistic."""
        return {time.statistic: time for time in self.times if time.group == group}

    def header(self, field: str) -> str:
        """The header that the file gives this field; the field's own name where it has none."""
        place = self.fields.get(field)
        return self.headers[place] if isinstance(place, int) else field

    def place(self, name: str) -> int | str | None:
        """The place of the column with this header, else of the field of this name; ``None`` without either."""
        spelled = (place for place, header in enumerate(self.headers) if word(header) == word(name))
        return next(spelled, self.fields.get(word(name)))


def understand(table: Table, model: str | None = None) -> Columns:
    """The meaning of each header, by its words and, where a word has several meanings, by the cells below it.

    Args:
        table: the file's.
        model: that of every row where no column and no header names one.

    Raises:
        TimingsError: no column of times, or none of models.
    """
    texts = [[str(text) for text in table.frame[place].cat.categories if text] for place in table.frame]
    found = [time for place, header in enumerate(table.headers) if (time := _time_column(place, header, texts[place]))]
    # Of two columns for one figure the one that states its unit is used, then the first.
    used: dict[tuple[Group, str], TimeColumn] = {}
    for time in sorted(found, key=lambda time: time.unit is None):
        used.setdefault((time.group, time.statistic), time)
    times = sorted(used.values(), key=lambda time: time.place)
    notes = (*table.notes, *_notes(texts, found, times))
    free = [place for place in range(len(table.headers)) if place not in {time.place for time in found}]
    fields = _fields(table.headers, texts, free)
    others = [place for place in free if place not in fields.values()]
    others = [place for place in others if _may_be_a_condition(table.headers[place], texts[place])]
    names_the_model = "model" in fields or fields.keys() >= set(DIMENSIONS)
    if model and not names_the_model:
        times = [_under(time, ("model", model)) for time in times]
    in_headers = {kind: kind for time in times for kind, _ in time.group.conditions}
    columns = Columns(table.headers, {**in_headers, **fields}, tuple(times), tuple(others), notes)
    place = f"{table.path}, line {table.header_line}"
    if not columns.groups():
        hint = "Add mean_ms beside a phase column, or forward_ms and backward_ms"
        if any(re.fullmatch(r"\d+\.\d+", header) for header in table.headers):
            hint = "Its first line is data: put a header line above it, such as model,mode,mean,std"
        raise TimingsError(f"{place}: no column of times among {listed(table.headers)}", hint)
    if not names_the_model and "model" not in in_headers:
        hint = f"Add a column model, or the columns {', '.join(DIMENSIONS)}, or give --model"
        raise TimingsError(f"{place}: no column names the model among {listed(table.headers)}", hint)
    return columns


def _under(time: TimeColumn, condition: tuple[str, str]) -> TimeColumn:
    """The column as one whose header says this, unless it says something else."""
    conditions = dict([condition]) | dict(time.group.conditions)
    return replace(time, group=time.group._replace(conditions=tuple(conditions.items())))


def _fields(headers: tuple[str, ...], texts: list[list[str]], free: list[int]) -> dict[str, int | str]:
    """The column of each field: the first of its spellings under which the cells are what they have to be."""
    spelled: dict[str, int] = {}
    for place in reversed(range(len(headers))):
        spelled[word(headers[place])] = place
    fields: dict[str, int | str] = {}
    for field in FIELDS:
        places = [spelled[spelling] for spelling in field.spellings.split() if spelling in spelled]
        fits = _FITS.get(field.cells)
        for place in (place for place in places if place in free and place not in fields.values()):
            if fits is None or fits([text.lower() for text in texts[place]]):
                fields[field.name] = place
                break
    return fields


def _are_flags(texts: list[str]) -> bool:
    return bool(texts) and FLAGS.keys() >= set(texts)


#: What the cells of a column have to be where its header has several meanings.
_FITS: dict[str, Callable[[list[str]], bool]] = {
    "flags": _are_flags,
    "words": lambda texts: not _are_flags(texts),
    "compiled": lambda texts: bool(texts) and COMPILED.keys() >= set(texts),
    "warm-up": lambda texts: bool(texts) and {"true", "false"} >= set(texts),
    "numbering": lambda texts: len(texts) > 1 and all(text.removesuffix(".0").isdecimal() for text in texts),
}


def _may_be_a_condition(header: str, texts: list[str]) -> bool:
    """Whether a column may be a setting of the run, and not its result, its origin or its number.

    A setting is a word, a flag, or a number of few digits; a result has many, or differs in every row.
    """
    named = set(word(header).split("_"))
    if not named - {""} or not texts or named & words.ORIGIN_WORDS:
        return False
    if named & words.RESULT_WORDS and all(re.match(r"[-+~≈]?\d", text) for text in texts):
        return False
    if all(re.fullmatch(NUMBER, text) for text in texts):
        fractions = [re.sub(r"\D", "", text).strip("0") for text in texts if "." in text]
        return all(len(digits) <= _DIGITS_OF_A_SETTING for digits in fractions)
    return not (all(_DATE.fullmatch(text) for text in texts) or any(text[0] in "[{" for text in texts))


def _notes(texts: list[list[str]], found: list[TimeColumn], used: list[TimeColumn]) -> Iterator[str]:
    unitless = [time.header for time in used if time.unit is None and not _carry_a_unit(texts[time.place])]
    if unitless:
        yield f"{', '.join(unitless)}: no unit in the column's name, read as seconds"
    unused = [time.header for time in found if time not in used]
    if unused:
        yield f"{', '.join(unused)}: not used, another column gives the same figure"


def _time_column(place: int, header: str, texts: list[str]) -> TimeColumn | None:
    """The column as one of times; ``None`` where its header has another word than those of ``words.TIME_WORDS``."""
    parts = word(re.sub(r"(?:[\s_]per[\s_]|/)(?:step|iter|iteration)(?![a-z])", " ", header.lower())).split("_")
    meanings: dict[str, list[str]] = {}
    for part in parts:
        kind, value = WORD_OF.get(part, (None, part))
        if kind is None:
            return None
        if value not in meanings.setdefault(kind, []):
            meanings[kind].append(value)
    phase = words.single_phase(meanings.get("phase", []))
    once = all(len(values) == 1 for kind, values in meanings.items() if kind not in ("phase", "word"))
    if not once or (phase is None and "phase" in meanings):
        return None
    if not _is_time(meanings, parts) and not _carry_a_unit(texts):
        return None
    if "unit" not in meanings and _are_flags([text.lower() for text in texts]):
        return None
    conditions = tuple((kind, meanings[kind][0]) for kind in words.CONDITIONS_OF_A_HEADER if kind in meanings)
    statistic, unit = meanings.get("statistic", ["mean"])[0], meanings.get("unit", [None])[0]
    return TimeColumn(place, header, Group(phase, conditions), statistic, unit)


def _is_time(meanings: dict[str, list[str]], parts: list[str]) -> bool:
    """Whether the words say "time": ``loss_mean`` and ``max_step`` do not, ``loss_ms`` and ``small/fwd`` do."""
    if parts == ["s"]:
        return False
    ordinary = not {"loss", "step"}.isdisjoint(meanings.get("phase", []))
    is_statistic_or_model = ("statistic" in meanings and not ordinary) or ("model" in meanings and "phase" in meanings)
    return is_statistic_or_model or "unit" in meanings or "time" in meanings.get("word", [])


def _carry_a_unit(texts: list[str]) -> bool:
    """Whether the cells that hold a number give its unit."""
    units = (match["unit"] or match["last"] for text in texts if (match := cell_of_time(text)))
    return bool(next(units, None)) and all(units)
