"""The rows of a timings table with their runs and their figures: one row for each time."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from nsys_analyzer.runs.timings.cells import LONGEST_MS, READERS, SHORTEST_MS, CellError, Time, read_time
from nsys_analyzer.runs.timings.columns import Columns, TimeColumn
from nsys_analyzer.runs.timings.layouts import describe, ended
from nsys_analyzer.runs.timings.table import Table, error_at, read_texts
from nsys_analyzer.runs.timings.timing import Timing
from nsys_analyzer.runs.timings.words import CELLS, CONDITIONS, DIMENSIONS
from nsys_analyzer.trace.arrays import Bools, Ints

if TYPE_CHECKING:
    import pandas as pd

#: Fields with a figure of the row, and the name of each in ``Timing``; all others describe its run.
_BESIDE = {"iteration": "iteration", "peak_memory_bytes": "peak_memory_bytes", "time_stamp": "time_stamp_s"}
FIGURES = ("mean_ms", "std_ms", "min_ms", "max_ms", "median_ms", *_BESIDE.values())
_Floats = npt.NDArray[np.float64]


def rows_of(table: Table, columns: Columns) -> pd.DataFrame:
    """The table's rows, each once for each group of columns of times.

    ``row`` and ``group``, from 0, are columns, too, and each condition that headers of times name.
    """
    import pandas as pd

    groups, count = columns.groups(), len(table.frame)
    rows = table.frame.iloc[np.repeat(np.arange(count), len(groups))]
    rows = rows.assign(row=np.repeat(np.arange(count), len(groups)), group=np.tile(np.arange(len(groups)), count))
    for condition in dict.fromkeys(kind for group in groups for kind, _ in group.conditions):
        codes, texts = pd.factorize(np.array([dict(group.conditions).get(condition, "") for group in groups], object))
        rows[condition] = pd.Categorical.from_codes(np.tile(codes, count), pd.Index(texts, dtype=object))
    return rows


def figures_of(path: Path, columns: Columns, rows: pd.DataFrame) -> tuple[list[Timing], pd.DataFrame]:
    """The distinct runs, and a frame of figures with the number of its run for each row that is of one.

    Columns are called as in ``Timing``; NaN is a figure that is missing.

    Raises:
        TimingsError: a cell cannot be read.
    """
    import pandas as pd

    codes, runs, failed = _runs_of(path, columns, rows)
    rows, codes = rows[codes >= 0], codes[codes >= 0]
    figures = {name: np.full(len(rows), np.nan) for name in FIGURES}
    for field, name in _BESIDE.items():
        if field in columns.fields:
            figures[name] = _values(path, columns, rows, field).astype(float)
    status = np.array([run.status for run in runs], object)[codes]
    for number, group in enumerate(columns.groups()):
        at = np.flatnonzero(rows["group"] == number)
        # A row of one time has none where it failed; one with a time for each phase still has those before.
        asked = ~failed[codes[at]] if group.phase is None else np.ones(len(at), np.bool_)
        times = columns.of(group)
        center = times.get("mean") or times["median"]
        ms, beside, instead = _times(path, rows.iloc[at], center, asked)
        ok = asked & ~np.isnan(ms)
        status[at] = np.where(ok, "ok", np.where(asked & (instead != ""), instead, status[at]))
        for statistic, column in times.items():
            found = ms if column is center else _times(path, rows.iloc[at], column, ok)[0]
            figures[f"{statistic}_ms"][at] = np.where(ok, found, np.nan)
        std_ms = figures["std_ms"][at]
        figures["std_ms"][at] = np.where(ok & np.isnan(std_ms), beside, std_ms)
    steps = {name: np.array([getattr(run, name) for run in runs], float) for name in ("steps", "warmup_steps")}
    of_run = {"run": codes, "status": status, **{name: values[codes] for name, values in steps.items()}}
    frame = pd.DataFrame({"line": rows.index, "row": rows["row"].to_numpy(), **of_run, **figures})
    timed = frame["row"][frame["mean_ms"].notna() | frame["median_ms"].notna()]
    return runs, frame[(frame["status"] != "missing") | ~frame["row"].isin(timed)]


def _runs_of(path: Path, columns: Columns, rows: pd.DataFrame) -> tuple[Ints, list[Timing], Bools]:
    """Of each row the number of its run, -1 where its times are of none; the runs; and whether each failed."""
    fields = {field: place for field, place in columns.fields.items() if field not in _BESIDE}
    codes = _distinct(rows, [*fields.values(), *columns.others])
    first, group_of = np.unique(codes, return_index=True)[1], rows["group"].to_numpy()
    values = {field: _values(path, columns, rows, field)[first].tolist() for field in fields}
    stated = [field for field in CONDITIONS if field in fields and not (field in DIMENSIONS and "model" in fields)]
    condition_cells = _pairs(rows.iloc[first], {columns.header(field): fields[field] for field in stated})
    conditions = _pairs(rows.iloc[first], {columns.headers[place]: place for place in columns.others})
    groups = columns.groups()
    beside = [{other.phase for other in groups if other.conditions == group.conditions} for group in groups]
    runs: list[Timing] = []
    failed, numbers = [], []
    cells_of = [dict(zip(values, cells, strict=True)) for cells in zip(*values.values(), strict=True)]
    for number, (row, cells) in enumerate(zip(first.tolist(), cells_of, strict=True)):
        status, has_failed = ended(cells)
        more = {"condition_cells": condition_cells[number], "conditions": conditions[number]}
        try:
            run = describe(cells, groups[group_of[row]], beside[group_of[row]], status=status, file=str(path), **more)
        except CellError as error:
            raise error_at(path, rows.index[row], columns.header(error.field), error) from error
        numbers.append(len(runs) if run else -1)
        if run:
            runs.append(run)
            failed.append(has_failed)
    return np.array(numbers)[codes], runs, np.array(failed)


def _distinct(rows: pd.DataFrame, places: list[int | str]) -> Ints:
    """The number of each row's combination of a group and texts, in the order in which they appear."""
    import pandas as pd

    codes = rows["group"].to_numpy()
    for place in places:
        column = rows[place].cat
        codes = codes * len(column.categories) + column.codes.to_numpy()
        codes = pd.factorize(codes)[0].astype(np.int64)
    return pd.factorize(codes)[0].astype(np.int64)


def _values(path: Path, columns: Columns, rows: pd.DataFrame, field: str) -> npt.NDArray[np.object_]:
    column = rows[columns.fields[field]]
    return read_texts(path, column, columns.header(field), READERS[CELLS[field]])[column.cat.codes]


def _pairs(rows: pd.DataFrame, places: dict[str, int | str]) -> list[tuple[tuple[str, str], ...]]:
    """The header and the text of each of these columns, by row."""
    own = [[(header, text) for text in rows[place]] for header, place in places.items()]
    return list(zip(*own, strict=True)) if own else [()] * len(rows)


def _times(path: Path, rows: pd.DataFrame, time: TimeColumn, needed: Bools) -> tuple[_Floats, _Floats, Any]:
    """The times of a column in ms, the deviations beside them, and the statuses in their place."""
    column, shortest_ms = rows[time.place], 0.0 if time.statistic == "std" else SHORTEST_MS
    texts, codes = column.cat.categories, column.cat.codes.to_numpy()
    try:
        ms = np.array([float(text or "nan") for text in texts]) * time.ms_per_unit
    except ValueError:
        ms = np.array([-1.0])
    if (np.isnan(ms) | ((shortest_ms <= ms) & (ms <= LONGEST_MS))).all():
        return ms[codes], np.full(len(codes), np.nan), np.full(len(codes), "", object)
    found = read_texts(path, column, time.header, lambda text: read_time(text, time.ms_per_unit, shortest_ms), needed)
    own, beside, status = zip(*(one or Time() for one in found), strict=True)
    return np.array(own)[codes], np.array(beside)[codes], np.array(status, object)[codes]
