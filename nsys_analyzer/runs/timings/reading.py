"""From files to timings: which rows are read, and what is told of the others."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np

from nsys_analyzer.errors import TimingsError
from nsys_analyzer.runs.timings.columns import Columns, understand
from nsys_analyzer.runs.timings.layouts import is_unknown, model_notes
from nsys_analyzer.runs.timings.matching import Timings
from nsys_analyzer.runs.timings.repeats import numbered, pool_iterations, split_by_conditions, without_repeats
from nsys_analyzer.runs.timings.rows import FIGURES, figures_of, rows_of
from nsys_analyzer.runs.timings.table import lines_listed, listed, read_table
from nsys_analyzer.runs.timings.timing import UNKNOWN_PHASE, Timing
from nsys_analyzer.runs.timings.words import DIMENSIONS, FLAGS, phase_from_text, phase_in_name
from nsys_analyzer.text import plural
from nsys_analyzer.trace.arrays import Bools

if TYPE_CHECKING:
    import pandas as pd

_WHOLE = ("line", "steps", "peak_memory_bytes", "iteration")


@dataclass(frozen=True)
class Selection:
    """Which rows of a table to read, and what its columns leave open.

    Rows must have every header and value of ``where``. ``phase`` and ``model`` are those of tables that name none.
    ``skip`` first iterations of each run are left out; with None, rows are iterations only where a column numbers them.
    """

    where: tuple[tuple[str, str], ...] = ()
    phase: str | None = None
    skip: int | None = None
    model: str | None = None

    @staticmethod
    def parse(where: Sequence[str], phase: str | None, skip: int | None, model: str | None = None) -> Selection:
        """The selection of ``--csv-where COLUMN=VALUE``, ``--csv-phase``, ``--csv-skip`` and ``--model``.

        Raises:
            TimingsError: not COLUMN=VALUE.
        """
        pairs = [text.partition("=") for text in where]
        if wrong := next((text for text, pair in zip(where, pairs, strict=True) if not pair[0] or not pair[1]), None):
            raise TimingsError(f"--csv-where {wrong!r} is not COLUMN=VALUE", "Write, for example, bfloat16=False")
        known = phase and (phase_from_text(phase) or phase.lower())
        return Selection(tuple((name.strip(), value.strip()) for name, _, value in pairs), known, skip, model)


def read_timings(*paths: Path, selection: Selection | None = None) -> Timings:
    """The timings in these files, in our own columns or in those of the usual benchmark scripts.

    A file is a CSV, a JSON list or an object per line, or a markdown table, with a model and times: ``mean_ms`` beside
    a ``phase``, or ``forward_ms`` and ``backward_ms``; ``words`` has the synonyms, ``layouts`` the forms of a row. Rows
    of one configuration and phase are told apart by columns without a meaning here, are iterations of one run where a
    column numbers them, or are the same run again: then the one with more warm-up steps is used, then the newer.

    Raises:
        TimingsError: a file that is no such table, a value that is no number or impossible, no row of a known model,
            two rows for one configuration and phase that nothing tells apart, or a selection of no rows.
    """
    import pandas as pd

    selection = selection or Selection()
    runs: list[Timing] = []
    read: list[pd.DataFrame] = []
    notes: list[str] = []
    before = 0
    for path in paths:
        own_runs, figures, own = _read_file(path, selection)
        read.append(figures.assign(run=figures["run"] + len(runs), row=figures["row"] + before))
        before += int(figures["row"].max()) + 1
        runs += own_runs
        notes += own if len(paths) == 1 else [f"{path.name}: {note}" for note in own]
    figures = pd.concat(read, ignore_index=True)
    runs = split_by_conditions(runs, figures)
    figures["timing"] = numbered(runs)[figures["run"]]
    figures, pooled = pool_iterations(runs, figures, selection.skip)
    figures, choices = without_repeats(runs, figures)
    return Timings(", ".join(path.name for path in paths), _timings(runs, figures), (*notes, *pooled, *choices))


def _timings(runs: Sequence[Timing], figures: pd.DataFrame) -> tuple[Timing, ...]:
    """The runs with their figures."""
    columns: dict[str, list[Any]] = {"status": figures["status"].tolist()}
    for name in figures.columns[figures.notna().any()].intersection(["line", "steps", *FIGURES]):
        kind = int if name in _WHOLE else float
        columns[name] = [None if value != value else kind(value) for value in figures[name].tolist()]  # NaN
    rows = zip(figures["run"].tolist(), zip(*columns.values(), strict=True), strict=True)
    return tuple(msgspec.structs.replace(runs[run], **dict(zip(columns, row, strict=True))) for run, row in rows)


def _read_file(path: Path, selection: Selection) -> tuple[list[Timing], pd.DataFrame, list[str]]:
    """The runs of a file without figures, the figures of each of their rows, and the notes on the file."""
    table = read_table(path)
    columns = understand(table, selection.model)
    rows, left_out = _measured(path, columns, rows_of(table, columns))
    for name, value in selection.where:
        rows = _where(path, columns, rows, name, value)
    runs, figures = figures_of(path, columns, rows)
    runs, note = _with_phase(path, runs, figures, selection.phase)
    return runs, figures, list(dict.fromkeys([*columns.notes, *model_notes(runs), *left_out, *note]))


def _measured(path: Path, columns: Columns, rows: pd.DataFrame) -> tuple[pd.DataFrame, list[str]]:
    """The rows of known models without warm-up, and the notes on the others.

    Raises:
        TimingsError: none is left.
    """
    notes = []
    has_dimensions = np.logical_and.reduce([_holds(columns, rows, field, bool) for field in DIMENSIONS])
    is_left_out = _holds(columns, rows, "model", is_unknown) & ~has_dimensions
    if is_left_out.any() and not is_left_out.all():  # of unknown models alone, the first is an error
        notes.append(_unknown_models(rows[is_left_out], columns))
        rows = rows[~is_left_out]
    is_warmup = _holds(columns, rows, "is_warmup", lambda text: FLAGS[text.lower()])
    if is_warmup.all():
        raise TimingsError(f"{path}: every row is warm-up", "Write a row for the steps after it, too")
    if is_warmup.any():
        notes.append(f"{rows['row'][is_warmup].nunique()} rows of warm-up are left out")
    return rows[~is_warmup], notes


def _holds(columns: Columns, rows: pd.DataFrame, field: str, is_it: Callable[[str], bool]) -> Bools:
    """Whether each row's cell of a field is given and is such a text."""
    if field not in columns.fields:
        return np.zeros(len(rows), np.bool_)
    column = rows[columns.fields[field]].cat
    return np.array([bool(text) and is_it(text) for text in column.categories], np.bool_)[column.codes]


def _unknown_models(rows: pd.DataFrame, columns: Columns) -> str:
    names = rows[columns.fields["model"]].unique()
    return f"{lines_listed(rows.index.unique())}: unknown {plural(len(names), 'model')} {listed(names)}, left out"


def _where(path: Path, columns: Columns, rows: pd.DataFrame, name: str, value: str) -> pd.DataFrame:
    """The rows with this value in the column of this name.

    Raises:
        TimingsError: there is no such column, or no such value; it lists those there are.
    """
    place = columns.place(name)
    if place is None:
        problem = f"{path}: --csv-where {name}={value}: no column {name!r}"
        raise TimingsError(problem, f"Give one of {listed(columns.headers)}")
    found = rows[place].unique().tolist()
    chosen = rows[rows[place].isin([text for text in found if _equal(text, value)])]
    if chosen.empty:
        raise TimingsError(f"{path}, column {name!r}: no row has {value!r}", f"Give one of {listed(found)}")
    return chosen


def _equal(cell: str, wanted: str) -> bool:
    """Whether a cell is the same text, flag or number, in any spelling."""
    ours, theirs = cell.lower(), wanted.lower()
    if ours == theirs or (ours in FLAGS and FLAGS[ours] == FLAGS.get(theirs)):
        return True
    try:
        return float(ours) == float(theirs)
    except ValueError:
        return False


def _with_phase(
    path: Path, runs: list[Timing], figures: pd.DataFrame, asked: str | None
) -> tuple[list[Timing], list[str]]:
    """The runs with the phase that was asked for, or that the file's name says, where no column says it.

    Raises:
        TimingsError: the columns say every phase already.
    """
    if all(runs[run].phase != UNKNOWN_PHASE for run in figures["run"].unique()):
        if asked:
            raise TimingsError(f"{path}: --csv-phase {asked}: its columns say what was timed", "Leave the option out")
        return runs, []
    phase = asked or phase_in_name(path.stem)
    if phase is None:
        remedy = "add a column phase, such as forward or forward+backward, or give --csv-phase"
        return runs, [f"no column says which phase was timed: {remedy}"]
    runs = [msgspec.structs.replace(run, phase=phase) if run.phase == UNKNOWN_PHASE else run for run in runs]
    return runs, [] if asked else [f"no column says which phase was timed: {phase}, by the file's name"]
