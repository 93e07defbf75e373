"""The section of an experiment, made of its description and its rows: the parts, tables and figures that all share."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import fields, is_dataclass
from typing import Any, Literal, TypeAlias

from nsys_analyzer.experiments.model import (
    CONDITIONS,
    AnyRow,
    Bench,
    Results,
    configuration,
    describe,
    figure,
    options_of,
    spelled,
    told,
    words,
)
from nsys_analyzer.report.model import (
    Bars,
    Block,
    Cell,
    Details,
    Field,
    Lines,
    Listing,
    Paragraph,
    Section,
    Spread,
    Table,
    Unit,
    make_table,
)
from nsys_analyzer.report.units import format_number, format_percent
from nsys_analyzer.text import StrOrText, emphasis, join_texts, phrase

#: A column: its heading, its unit, and a figure's path or what makes the cell of a row.
Column: TypeAlias = tuple[str, Unit, str | Callable[[Any], Cell]]

_ENDINGS = {"oom": "Out of memory", "timeout": "Out of time", "failed": "Failed", "unsupported": "Not supported here"}
_MOST_NAMED = 4
#: Letters of a message that a table has room for; the file of rows has all of them.
_MESSAGE_LENGTH = 160
#: The standard deviation ÷ mean above which a mean says little.
_UNSTEADY = 0.1


def make_section(bench: Bench, results: Results) -> Section:
    """Returns the section of a bench: answers, conditions, what is suspect, tables, figures, what was not measured."""
    rows = results.rows
    suspect = tuple(_unsteady(rows))
    blocks: tuple[Block, ...] = (
        Paragraph(join_texts(" ", (*bench.answers(results), *_endings(rows)))),
        _conditions(bench, results),
        *([Listing(suspect)] if suspect else []),
        *bench.blocks(results),
        *_messages(rows),
        *([Paragraph(bench.definitions)] if bench.definitions else []),
    )
    return Section(f"bench-{bench.name}", f"Bench: {bench.title}", blocks)


def _conditions(bench: Bench, results: Results) -> Paragraph:
    """Says the device, versions, and how it was timed."""
    machine = next((row.machine for row in results.rows if row.machine), {})
    device = machine.get("gpu") or f"CPU, {machine.get('threads', '?')} threads"
    values = {option: each(results.rows, option) for option in options_of(bench.target.case)} if bench.how else {}
    parts = {
        "Device": f"{device}, PyTorch {machine.get('torch', '?')}, Python {machine.get('python', '?')}",
        **{name: how.format(**values) for name, how in bench.how.items()},
    }
    return Paragraph(emphasis("Conditions.") + f" {'; '.join(f'{name}: {how}' for name, how in parts.items())}.")


def _unsteady(rows: Sequence[AnyRow]) -> Iterator[StrOrText]:
    """Yields a line on times whose coefficient of variation is above ``_UNSTEADY``."""
    name = namer(rows)
    times: dict[str, float] = {}
    for row in rows:
        known = vars(row.figures) if is_dataclass(row.figures) else {}
        # Of a step that is timed as a whole its phases may be short.
        chosen = {"step": known["step"]} if "step" in known else known
        times |= {f"{words(key)} of {name(row)}": getattr(found, "cv", None) or 0 for key, found in chosen.items()}
    if far := {what: cv for what, cv in times.items() if cv > _UNSTEADY}:
        which = _named(f"{what}: {format_percent(cv)}" for what, cv in far.items())
        yield phrase(
            "**Unsteady times**, CV above {}: {}. A busy machine adds to it.", format_percent(_UNSTEADY), which
        )


def _endings(rows: Sequence[AnyRow]) -> Iterator[str]:
    """Yields a sentence for each status that is not ok, with the rows that ended so."""
    name = namer(rows)
    for status, word in _ENDINGS.items():
        if ended := [name(row) for row in rows if row.status == status]:
            yield f"{word}: {_named(ended)}."
    if all(row.ok for row in rows):
        yield "Nothing ran out of memory."


def _messages(rows: Sequence[AnyRow]) -> Iterator[Block]:
    """Yields why rows are not ok, folded away."""

    def shortened(row: AnyRow) -> str:
        return row.message if len(row.message) <= _MESSAGE_LENGTH else f"{row.message[:_MESSAGE_LENGTH]}…"

    if lacking := [row for row in rows if not row.ok]:
        columns: tuple[Field[AnyRow], ...] = (
            Field("what", "text", namer(rows)),
            Field("status", "text", lambda row: row.status),
            Field("message", "text", shortened),
        )
        yield Details(f"What was not measured, and why: {len(lacking)} rows", (make_table(columns, lacking),))


def _named(names: Iterable[str]) -> str:
    """Returns the names for a sentence, of many the first, and how many more there are."""
    every = list(names)
    more = f"; {len(every) - _MOST_NAMED} more" if len(every) > _MOST_NAMED else ""
    return "; ".join(every[:_MOST_NAMED]) + more


# --- what rows are called


def differing(rows: Sequence[AnyRow], without: Iterable[str] = ()) -> list[str]:
    """Returns the options that tell the rows apart, the model always among them."""
    if not rows or not is_dataclass(rows[0].case):
        return []
    keys = [known.name for known in fields(rows[0].case) if known.name not in (*CONDITIONS, *without)]
    several = [key for key in keys if len({getattr(row.case, key, None) for row in rows}) > 1]
    return [key for key in keys if key == "model" or key in several]


def namer(rows: Sequence[AnyRow], without: Iterable[str] = ()) -> Callable[[AnyRow], str]:
    """Returns what names a row in a sentence: by the options in which it differs from others."""
    keys = differing(rows, without)
    return lambda row: describe(row.case, keys) or row.module.rpartition(".")[2]


def each(rows: Iterable[AnyRow], option: str) -> str:
    """Returns the values that an option has in the rows, for a sentence."""
    values = dict.fromkeys(getattr(row.case, option) for row in rows)
    return ", ".join(map(told, values))


def span(values: Iterable[float], unit: Unit = "factor") -> str:
    """Returns the least and the largest value, for a sentence: ``1.2× to 3.4×``, or one of two that read alike."""
    known = sorted(values)
    return " to ".join(dict.fromkeys(format_number(value, unit) for value in (known[0], known[-1])))


def extremes(values: Iterable[tuple[float, str]], write: Callable[[float], str]) -> str:
    """Returns the least and the largest value with their names, for a sentence: ``1.2× (small) to 3.4× (large)``."""
    known = sorted(values)
    return " to ".join(dict.fromkeys(f"{write(value)} ({name})" for value, name in (known[0], known[-1])))


def scientific(value: float | None) -> str | None:
    """Returns an error as text: ``1.2e-05``; None where it is missing."""
    return None if value is None else f"{value:.1e}"


# --- tables


def cell(of: str | Callable[[Any], Cell]) -> Callable[[Any], Cell]:
    """Returns what makes the cell of a row: times are their mean and standard deviation."""
    if not isinstance(of, str):
        return of

    def found(row: AnyRow | None) -> Cell:
        value = figure(row, of)
        if not is_dataclass(value):
            return value  # type: ignore[no-any-return]
        times: Any = value
        return None if times.ms is None else Spread(times.ms, getattr(times, "std_ms", None))

    return found


def rows_table(rows: Sequence[AnyRow], caption: StrOrText, *columns: Column, status: bool = True) -> Table:
    """Returns a line for each row: the options that tell it apart, the columns, and how it ended."""
    names = _names(rows, differing(rows), lambda row: row.case)
    cells: list[Field[AnyRow]] = [Field(title, unit, cell(of)) for title, unit, of in columns]
    if status and not all(row.ok for row in rows):
        cells.append(Field("status", "text", lambda row: row.status))
    return make_table([*names, *cells], rows, caption, names=len(names))


def groups(rows: Sequence[AnyRow], option: str) -> list[dict[Any, AnyRow]]:
    """Returns the rows that differ in this option alone, by its value."""
    found: dict[Any, dict[Any, AnyRow]] = {}
    for row in rows:
        found.setdefault(configuration(row.case, option), {})[getattr(row.case, option)] = row
    return list(found.values())


def side_by_side(
    rows: Sequence[AnyRow], option: str, caption: StrOrText, columns: Mapping[Any, Column], *more: Column
) -> Table:
    """Returns a line for the rows that differ in one option alone.

    Args:
        rows, caption: what is shown.
        option: stands in columns, by its value.
        columns: of each value of the option.
        more: columns whose cells are made of all rows of a line, by the option's value.
    """

    def of_one(value: Any, of: str | Callable[[Any], Cell]) -> Callable[[dict[Any, AnyRow]], Cell]:
        def found(group: dict[Any, AnyRow]) -> Cell:
            row = group.get(value)
            made = cell(of)(row) if row else None
            return row.status if row and not row.ok and made is None else made

        return found

    names = _names(rows, differing(rows, [option]), lambda group: next(iter(group.values())).case)
    cells = [Field(title, unit, of_one(value, of)) for value, (title, unit, of) in columns.items()]
    last: list[Field[Any]] = [Field(title, unit, cell(of)) for title, unit, of in more]
    return make_table([*names, *cells, *last], groups(rows, option), caption, names=len(names))


def _names(rows: Sequence[AnyRow], options: Iterable[str], case: Callable[[Any], Any]) -> list[Field[Any]]:
    """Returns the columns of some options; ``case`` takes the case out of what a line is made of."""

    def of(option: str) -> Field[Any]:
        is_number = type(getattr(rows[0].case, option)) is int
        return Field(words(option), "count" if is_number else "text", lambda one: spelled(getattr(case(one), option)))

    return [of(option) for option in options]


# --- figures


def bars(
    key: str, title: str, values: Mapping[tuple[str, str], float | None], axis: str,
    kind: Literal["grouped", "stacked"] = "grouped",
) -> Iterator[Bars]:  # fmt: skip
    """Yields a bar chart of values by group and series; nothing where no value is known."""
    names = dict.fromkeys(name for (_, name), value in values.items() if value is not None)
    of = tuple(dict.fromkeys(group for group, _ in values))
    if names:
        series = tuple((name, tuple(values.get((group, name)) for group in of)) for name in names)
        yield Bars(key, title, of, series, axis, kind)


def curves(
    key: str, title: str, rows: Sequence[AnyRow], value: Callable[[AnyRow], float | None], y_axis: str
) -> Iterator[Lines]:
    """Yields values over the context length: a curve for the rows that differ in it alone, of two at least."""
    name = namer(rows, ["context_length"])
    points: dict[str, list[tuple[float, float]]] = {}
    for row in sorted(rows, key=lambda row: row.case.context_length):
        if (y := value(row)) is not None:
            points.setdefault(name(row), []).append((row.case.context_length, y))
    if series := tuple((name, tuple(values)) for name, values in points.items() if len(values) > 1):
        yield Lines(key, title, series, "context length, tokens", y_axis, log_x=True, log_y=True)


def fitted_exponent(points: Sequence[tuple[float, float]]) -> float | None:
    """Returns the exponent p of y = c · xᵖ that fits positive points best, by least squares of log y over log x.

    None below two different x.
    """
    logs = [(math.log(x), math.log(y)) for x, y in points if x > 0 and y > 0]
    if len({x for x, _ in logs}) < 2:
        return None
    return statistics.linear_regression(*zip(*logs, strict=True)).slope
