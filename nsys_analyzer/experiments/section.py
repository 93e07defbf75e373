"""Makes the section of an experiment from its description and its rows, with the parts that all experiments share."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import fields, is_dataclass
from functools import partial
from typing import Any, Literal, TypeAlias

from nsys_analyzer.experiments.model import (
    CONDITION_OPTIONS,
    AnyRow,
    Bench,
    Results,
    configuration,
    describe,
    find_figure,
    format_option_name,
    format_value,
    options_of,
    to_command_line_value,
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

#: A column: its heading, its unit, and the path of a figure or a function that returns the cell of a row.
Column: TypeAlias = tuple[str, Unit, str | Callable[[Any], Cell]]

_STATUS_WORDS = {
    "oom": "Out of memory",
    "timeout": "Out of time",
    "failed": "Failed",
    "unsupported": "Not supported here",
}
#: A sentence that lists rows names at most this many of them.
_MAX_LISTED_ROWS = 4
#: A table shows at most this many characters of a message. The file of rows contains the whole message.
_MESSAGE_LENGTH = 160
#: Times are unsteady if their coefficient of variation (standard deviation ÷ mean) exceeds this value.
_UNSTEADY_CV = 0.1


def make_section(bench: Bench, results: Results) -> Section:
    """Returns the section of an experiment.

    The section contains sentences on the results, the conditions, unsteady times, tables, charts, and the messages of
    rows that failed.
    """
    rows = results.rows
    unsteady = tuple(_describe_unsteady_times(rows))
    machine = next((row.machine for row in rows if row.machine), {})
    device = machine.get("gpu") or f"CPU, {machine.get('threads', '?')} threads"
    values: dict[str, str] = {}
    for option in options_of(bench.target.case) if bench.conditions else ():
        values_of_option = dict.fromkeys(getattr(row.case, option) for row in rows)
        values[option] = ", ".join(map(format_value, values_of_option))
    conditions = {
        "Device": f"{device}, PyTorch {machine.get('torch', '?')}, Python {machine.get('python', '?')}",
        **{name: condition.format(**values) for name, condition in bench.conditions.items()},
    }
    conditions_text = "; ".join(f"{name}: {condition}" for name, condition in conditions.items())
    blocks: tuple[Block, ...] = (
        Paragraph(join_texts(" ", (*bench.write_sentences(results), *_describe_statuses(rows)))),
        Paragraph(emphasis("Conditions.") + f" {conditions_text}."),
        *([Listing(unsteady)] if unsteady else []),
        *bench.make_tables_and_charts(results),
        *_make_message_table(rows),
        *([Paragraph(bench.definitions)] if bench.definitions else []),
    )
    return Section(f"bench-{bench.name}", f"Bench: {bench.title}", blocks)


def _describe_unsteady_times(rows: Sequence[AnyRow]) -> Iterator[StrOrText]:
    """Yields a sentence about the times whose coefficient of variation exceeds ``_UNSTEADY_CV``."""
    name = make_row_namer(rows)
    times: dict[str, float] = {}
    for row in rows:
        figures = vars(row.figures) if is_dataclass(row.figures) else {}
        # The times of short phases always vary, so only the time of the whole step is checked.
        checked_figures = {"step": figures["step"]} if "step" in figures else figures
        times |= {
            f"{format_option_name(key)} of {name(row)}": getattr(value, "cv", None) or 0
            for key, value in checked_figures.items()
        }
    if unsteady := {time: cv for time, cv in times.items() if cv > _UNSTEADY_CV}:
        yield phrase(
            "**Unsteady times** (CV above {}): {}. Other work on the machine makes times unsteady.",
            format_percent(_UNSTEADY_CV), _list_first(f"{time}: {format_percent(cv)}" for time, cv in unsteady.items()),
        )  # fmt: skip


def _describe_statuses(rows: Sequence[AnyRow]) -> Iterator[str]:
    """Yields a sentence for each status other than ok, which names the rows with this status."""
    name = make_row_namer(rows)
    for status, word in _STATUS_WORDS.items():
        if names := [name(row) for row in rows if row.status == status]:
            yield f"{word}: {_list_first(names)}."
    if all(row.ok for row in rows):
        yield "Nothing ran out of memory."


def _make_message_table(rows: Sequence[AnyRow]) -> Iterator[Block]:
    """Yields a folded table with the messages of the rows whose status is not ok."""
    if unmeasured := [row for row in rows if not row.ok]:
        columns: tuple[Field[AnyRow], ...] = (
            Field("what", "text", make_row_namer(rows)),
            Field("status", "text", lambda row: row.status),
            Field("message", "text", _shorten_message),
        )
        yield Details(f"Rows without a measurement: {len(unmeasured)}", (make_table(columns, unmeasured),))


def _shorten_message(row: AnyRow) -> str:
    return row.message if len(row.message) <= _MESSAGE_LENGTH else f"{row.message[:_MESSAGE_LENGTH]}…"


def _list_first(names: Iterable[str]) -> str:
    """Returns the first names for a sentence, and how many names follow them."""
    all_names = list(names)
    remaining_count = len(all_names) - _MAX_LISTED_ROWS
    return "; ".join(all_names[:_MAX_LISTED_ROWS]) + (f"; {remaining_count} more" if remaining_count > 0 else "")


# --- names of rows


def find_differing_options(rows: Sequence[AnyRow], without: Iterable[str] = ()) -> list[str]:
    """Returns the options whose values differ among the rows. The option ``model`` is always among them.

    Args:
        rows: the rows.
        without: options to leave out.
    """
    if not rows or not is_dataclass(rows[0].case):
        return []
    keys = [field.name for field in fields(rows[0].case) if field.name not in (*CONDITION_OPTIONS, *without)]
    keys_with_several_values = [key for key in keys if len({getattr(row.case, key, None) for row in rows}) > 1]
    return [key for key in keys if key == "model" or key in keys_with_several_values]


def make_row_namer(rows: Sequence[AnyRow], without: Iterable[str] = ()) -> Callable[[AnyRow], str]:
    """Returns a function that names a row in a sentence by the options that differ among the rows."""
    keys = find_differing_options(rows, without)
    return lambda row: describe(row.case, keys) or row.module.rpartition(".")[2]


def format_factor_range(factors: Iterable[float]) -> str:
    """Returns the smallest and the largest factor for a sentence, such as ``1.2× to 3.4×``.

    If both factors have the same text, it is written once.
    """
    sorted_factors = sorted(factors)
    return " to ".join(
        dict.fromkeys(format_number(factor, "factor") for factor in (sorted_factors[0], sorted_factors[-1]))
    )


def format_extremes(values: Iterable[tuple[float, str]], write: Callable[[float], str]) -> str:
    """Returns the smallest and the largest value with their names, such as ``1.2× (small) to 3.4× (large)``."""
    sorted_values = sorted(values)
    return " to ".join(
        dict.fromkeys(f"{write(value)} ({name})" for value, name in (sorted_values[0], sorted_values[-1]))
    )


def format_scientific(value: float | None) -> str | None:
    """Returns a number in scientific notation, such as ``1.2e-05``, or None if it is missing."""
    return None if value is None else f"{value:.1e}"


# --- tables


def make_cell(line: Any, source: str | Callable[[Any], Cell]) -> Cell:
    """Returns the cell of a table's line, which is a row or a group of rows.

    Args:
        line: the row or the group.
        source: a function that returns the cell, or the path of a figure of a row. A cell of repeated times contains
            their mean and standard deviation.
    """
    if not isinstance(source, str):
        return source(line)
    value = find_figure(line, source)
    if not is_dataclass(value):
        return value  # type: ignore[no-any-return]
    times: Any = value
    return None if times.ms is None else Spread(times.ms, getattr(times, "std_ms", None))


def make_rows_table(rows: Sequence[AnyRow], caption: StrOrText, *columns: Column, status: bool = True) -> Table:
    """Returns a table with a line for each row: the options that differ among the rows, the columns, and the status."""
    names = _make_option_columns(rows, find_differing_options(rows), lambda row: row.case)
    cells: list[Field[AnyRow]] = [
        Field(title, unit, partial(make_cell, source=source)) for title, unit, source in columns
    ]
    if status and not all(row.ok for row in rows):
        cells.append(Field("status", "text", lambda row: row.status))
    return make_table([*names, *cells], rows, caption, names=len(names))


def group_rows(rows: Sequence[AnyRow], option: str) -> list[dict[Any, AnyRow]]:
    """Returns the groups of rows that differ only in one option. A group maps the option's values to rows."""
    groups_by_configuration: dict[Any, dict[Any, AnyRow]] = {}
    for row in rows:
        group = groups_by_configuration.setdefault(configuration(row.case, option), {})
        group[getattr(row.case, option)] = row
    return list(groups_by_configuration.values())


def make_comparison_table(
    rows: Sequence[AnyRow], option: str, caption: StrOrText, columns: Mapping[Any, Column], *group_columns: Column
) -> Table:
    """Returns a table with one line for each group of rows that differ only in one option.

    Args:
        rows: the rows.
        option: the option.
        caption: the caption of the table.
        columns: for each value of the option, its column. The column's cells are made from the row with this value.
        group_columns: further columns. Their cells are made from the group, which maps the option's values to rows.
    """

    def make_value_cell(group: dict[Any, AnyRow], value: Any, source: str | Callable[[Any], Cell]) -> Cell:
        """Returns the cell of the group's row for a value of the option, or the status of a row without a figure."""
        row = group.get(value)
        content = make_cell(row, source) if row else None
        return row.status if row and not row.ok and content is None else content

    option_columns = _make_option_columns(
        rows, find_differing_options(rows, [option]), lambda group: next(iter(group.values())).case
    )
    cells: list[Field[Any]] = [
        Field(title, unit, partial(make_value_cell, value=value, source=source))
        for value, (title, unit, source) in columns.items()
    ]
    cells += [Field(title, unit, partial(make_cell, source=source)) for title, unit, source in group_columns]
    return make_table([*option_columns, *cells], group_rows(rows, option), caption, names=len(option_columns))


def _make_option_columns(
    rows: Sequence[AnyRow], options: Iterable[str], find_case: Callable[[Any], Any]
) -> list[Field[Any]]:
    """Returns the columns of some options. ``find_case`` returns the case of a line's row or group."""

    def read_option(line: Any, option: str) -> Cell:
        """Returns the value that an option has in a line of the table."""
        value: Cell = to_command_line_value(getattr(find_case(line), option))
        return value

    units: dict[str, Unit] = {
        option: "count" if type(getattr(rows[0].case, option)) is int else "text" for option in options
    }
    return [
        Field(format_option_name(option), unit, partial(read_option, option=option)) for option, unit in units.items()
    ]


# --- charts


def make_bars(
    key: str, title: str, values: Mapping[tuple[str, str], float | None], axis: str,
    kind: Literal["grouped", "stacked"] = "grouped",
) -> Iterator[Bars]:  # fmt: skip
    """Yields a bar chart of values by group and series, or nothing if all values are None."""
    names = dict.fromkeys(name for (_, name), value in values.items() if value is not None)
    chart_groups = tuple(dict.fromkeys(group for group, _ in values))
    if names:
        series = tuple((name, tuple(values.get((group, name)) for group in chart_groups)) for name in names)
        yield Bars(key, title, chart_groups, series, axis, kind)


def make_curves(
    key: str, title: str, rows: Sequence[AnyRow], value: Callable[[AnyRow], float | None], y_axis: str
) -> Iterator[Lines]:
    """Yields a chart of values over the context length, or nothing if there is no curve.

    A curve connects the rows that differ only in the context length, if there are at least two such rows.
    """
    name = make_row_namer(rows, ["context_length"])
    points: dict[str, list[tuple[float, float]]] = {}
    for row in sorted(rows, key=lambda row: row.case.context_length):
        if (y := value(row)) is not None:
            points.setdefault(name(row), []).append((row.case.context_length, y))
    if series := tuple((name, tuple(values)) for name, values in points.items() if len(values) > 1):
        yield Lines(key, title, series, "context length, tokens", y_axis, log_x=True, log_y=True)


def fit_exponent(points: Sequence[tuple[float, float]]) -> float | None:
    """Returns the exponent p of the curve y = c · xᵖ that fits positive points best.

    The fit minimizes the squared errors of log y over log x. The result is None if all points have the same x.
    """
    logs = [(math.log(x), math.log(y)) for x, y in points if x > 0 and y > 0]
    if len({x for x, _ in logs}) < 2:
        return None
    return statistics.linear_regression(*zip(*logs, strict=True)).slope
