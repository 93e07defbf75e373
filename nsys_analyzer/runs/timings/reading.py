"""From files to timings: which rows are read, and what is told of the others."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from nsys_analyzer.errors import TimingsError
from nsys_analyzer.runs.timings.columns import Columns, understand
from nsys_analyzer.runs.timings.figures import FIGURES, figure, figures_of
from nsys_analyzer.runs.timings.layouts import is_unknown, model_notes, runs_of
from nsys_analyzer.runs.timings.matching import Timings
from nsys_analyzer.runs.timings.repeats import pool_iterations, split_by_conditions, without_repeats
from nsys_analyzer.runs.timings.rows import Rows
from nsys_analyzer.runs.timings.table import Table, read_table
from nsys_analyzer.runs.timings.timing import UNKNOWN_PHASE, Timing
from nsys_analyzer.runs.timings.words import DIMENSIONS, FLAGS, MISSING, phase_from_text, phase_in_name, word
from nsys_analyzer.trace.arrays import Bools

if TYPE_CHECKING:
    import pandas as pd

_FEW = 8
_LETTERS = 30
_WHOLE = ("line", "steps", "peak_memory_bytes", "iteration")


@dataclass(frozen=True)
class Selection:
    """Which rows of a table to read, and what its columns leave open.

    Attributes:
        where: header and value of the rows to read; several add up.
        phase: what was timed where no column says it.
        skip: how many iterations of each run to leave out, the first ones; None where rows are no iterations unless a
            column numbers them.
        model: the model of every row of a table that names none.
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

    A file is a CSV, a JSON list or an object per line, or a markdown table. Columns: the model by name or by its four
    dimensions; times as ``mean_ms`` beside a ``phase`` (or ``only_forward``, or ``mode``), or wide as ``forward_ms``
    and ``backward_ms``; the synonyms are the tables of ``words``, the forms of a row are those of ``layouts``. A
    column ``capture`` names the capture that a row belongs to. Rows of one configuration and phase are told apart by
    columns without a meaning here, are iterations of one run where a column numbers them, or are the same run again:
    then the one with more warm-up steps is used, then the newer; ``notes`` records it.

    Raises:
        TimingsError: a file that is no such table, a value that is no number or impossible, no row of a known model,
            two rows for one configuration and phase that nothing tells apart, or a selection of no rows.
    """
    import pandas as pd

    selection = selection or Selection()
    runs: list[Timing] = []
    read: list[pd.DataFrame] = []
    notes: list[str] = []
    for path in paths:
        own_runs, figures, own = _read_file(path, selection)
        before = 1 + max((int(part["row"].max()) for part in read), default=-1)
        read.append(figures.assign(run=figures["run"] + len(runs), row=figures["row"] + before))
        runs += own_runs
        notes += own if len(paths) == 1 else [f"{path.name}: {note}" for note in own]
    figures = pd.concat(read, ignore_index=True)
    figures["steps"] = np.array([run.steps for run in runs], np.float64)[figures["run"]]
    runs = split_by_conditions(runs, figures)
    figures, pooled = pool_iterations(runs, figures, selection.skip)
    figures, choices = without_repeats(runs, figures)
    return Timings(", ".join(path.name for path in paths), _timings(runs, figures), (*notes, *pooled, *choices))


def _timings(runs: Sequence[Timing], figures: pd.DataFrame) -> tuple[Timing, ...]:
    """The runs with their figures."""
    columns: dict[str, list[Any]] = {"status": figures["status"].tolist()}
    for name in ("line", "steps", *FIGURES):
        values = (figures[name] if name == "line" else figure(figures, name)).tolist()
        kind = int if name in _WHOLE else float
        columns[name] = [None if value != value else kind(value) for value in values]  # NaN is not itself
    rows = zip(figures["run"].tolist(), zip(*columns.values(), strict=True), strict=True)
    return tuple(replace(runs[run], **dict(zip(columns, row, strict=True))) for run, row in rows)


def _read_file(path: Path, selection: Selection) -> tuple[list[Timing], pd.DataFrame, list[str]]:
    """The runs of a file without figures, the figures of each of their rows, and the notes on the file."""
    table, columns = _understood(path, selection.model)
    measured, left_out = _measured(table, columns)
    groups = [dict(group.says) for group in columns.groups()]
    admitted = np.ones(len(measured.frame), np.bool_)
    for name, value in selection.where:
        admitted &= _admitted(measured, columns, groups, name, value)
    says = [own for own in dict.fromkeys(group.says for group in columns.groups()) if _admits(columns, own, selection)]
    if not admitted.any() or not says:
        conditions = " and ".join(f"{name}={value}" for name, value in selection.where)
        raise TimingsError(f"{path}: no row has {conditions}", "Give fewer of them")
    chosen = measured.rows(admitted)
    rows = Rows(chosen, columns)
    runs, figures = figures_of(rows, [runs_of(rows, own) for own in says])
    rows.check()
    of_models = model_notes(runs)
    runs, note = _with_phase(path, runs, figures, selection.phase)
    return runs, figures, list(dict.fromkeys([*columns.notes, *of_models, *left_out, *note]))


def _understood(path: Path, model: str | None) -> tuple[Table, Columns]:
    """The table in a file and its columns; ``model`` is that of every row where no column names one.

    Raises:
        TimingsError: no table, or one without a column of times or of models.
    """
    table = read_table(path)
    columns = understand(table)
    if model and not columns.names_the_model():
        table = table.with_column("model", model)
        columns = understand(table)
    if not columns.names_the_model():
        hint = f"Add a column model, or the columns {', '.join(DIMENSIONS)}, or give --model"
        problem = f"{path}, line {table.header_line}: no column names the model among {columns.listed()}"
        raise TimingsError(problem, hint)
    return table, columns


def _measured(table: Table, columns: Columns) -> tuple[Table, list[str]]:
    """The rows of known models without warm-up, and the notes on the others.

    Raises:
        TimingsError: none is left.
    """
    of_unknown = _holds(table, columns, "model", is_unknown)
    some_missing = [~_holds(table, columns, field, lambda text: text.lower() not in MISSING) for field in DIMENSIONS]
    of_unknown &= np.any(some_missing, axis=0)
    if of_unknown.all():
        rows = Rows(table, columns)
        runs_of(rows, ())
        rows.check()  # it names the model, and what can be given
    warmup = _holds(table, columns, "is_warmup", lambda text: FLAGS.get(text.lower(), False)) & ~of_unknown
    if (warmup | of_unknown).all():
        raise TimingsError(f"{table.path}: every row is warm-up", "Write a row for the steps after it, too")
    notes = [_unknown_models(table.rows(of_unknown), columns)] if of_unknown.any() else []
    if warmup.any():
        notes.append(f"{warmup.sum()} rows of warm-up are left out")
    return table.rows(~of_unknown & ~warmup), notes


def _holds(table: Table, columns: Columns, field: str, is_it: Callable[[str], bool]) -> Bools:
    """Whether each row's cell of a field is given and is such a text."""
    if field not in columns.fields:
        return np.zeros(len(table.frame), np.bool_)
    codes, texts = table.texts(columns.fields[field])
    return np.array([text.lower() not in MISSING and is_it(text) for text in texts], np.bool_)[codes]


def _unknown_models(table: Table, columns: Columns) -> str:
    names, lines = table.texts(columns.fields["model"]).texts, sorted(table.frame.index)
    word = "line" if len(lines) == 1 else "lines"
    models = f"unknown model{'' if len(names) == 1 else 's'} {_listed(repr(name[:_LETTERS]) for name in names)}"
    return f"{word} {_listed(map(str, lines))}: {models}, left out"


def _listed(texts: Iterable[str]) -> str:
    """The first few of these."""
    first = list(islice(texts, _FEW + 1))
    return ", ".join(first[:_FEW]) + (", ..." if len(first) > _FEW else "")


def _admitted(table: Table, columns: Columns, groups: list[dict[str, str]], name: str, value: str) -> Bools:
    """Whether each row has this value in the column of this name; all have it where headers alone say it.

    Raises:
        TimingsError: there is no such column, or no such value; it lists those there are.
    """
    place = columns.place(name)
    if place is None:
        cells, codes = [group[word(name)] for group in groups if word(name) in group], None
    else:
        codes, texts = table.texts(place)
        cells = ["" if text.lower() in MISSING else text for text in texts]
    if not cells:
        problem = f"{table.path}: --csv-where {name}={value}: no column {name!r}"
        raise TimingsError(problem, f"Give one of {columns.listed()}")
    equal = np.array([_equal(cell, value) for cell in cells])
    if not equal.any():
        listed = _listed(map(repr, dict.fromkeys(cells)))
        raise TimingsError(f"{table.path}, column {name!r}: no row has {value!r}", f"Give one of {listed}")
    return np.ones(len(table.frame), np.bool_) if codes is None else equal[codes]


def _admits(columns: Columns, says: tuple[tuple[str, str], ...], selection: Selection) -> bool:
    """Whether headers that say this have all that is asked of headers, and of no column."""
    asked = [(word(name), value) for name, value in selection.where if columns.place(name) is None]
    return all(_equal(dict(says).get(name, ""), value) for name, value in asked)


def _equal(cell: str, wanted: str) -> bool:
    """Whether a cell is what was asked for: the same text, flag or number, in any spelling."""
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
    runs = [replace(run, phase=phase) if run.phase == UNKNOWN_PHASE else run for run in runs]
    return runs, [] if asked else [f"no column says which phase was timed: {phase}, by the file's name"]
