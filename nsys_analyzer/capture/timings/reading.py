"""From files to timings: which rows are read, and what is told of the others."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from nsys_analyzer.capture.timings.kinds import Kind, read_kinds
from nsys_analyzer.capture.timings.matching import Timings
from nsys_analyzer.capture.timings.repeats import pool_iterations, split_by_conditions, without_repeats
from nsys_analyzer.capture.timings.rows import Row
from nsys_analyzer.capture.timings.series import Series, series_of
from nsys_analyzer.capture.timings.timing import UNKNOWN_PHASE, has_unknown_model, model_notes, timings_of
from nsys_analyzer.capture.timings.words import FLAGS, phase_from_text, phase_in_name
from nsys_analyzer.errors import TimingsError

_FEW = 8
_LETTERS = 30


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

    def admits(self, row: Row) -> bool:
        """Whether the row has all that ``where`` asks for."""
        return all(_equal(row.named(name) or "", value) for name, value in self.where)


def read_timings(*paths: Path, selection: Selection | None = None) -> Timings:
    """The timings in these files, in our own columns or in those of the usual benchmark scripts.

    A file is a CSV, a JSON list or an object per line, or a markdown table. Columns: the model by name or by its four
    dimensions; times as ``mean_ms`` beside a ``phase`` (or ``only_forward``, or ``mode``), or wide as ``forward_ms``
    and ``backward_ms``; the synonyms are the tables of ``words``. A column ``capture`` names the capture that a row
    belongs to. Rows of one configuration and phase are told apart by columns without a meaning here, are iterations
    of one run where a column numbers them, or are the same run again: then the one with more warm-up steps is used,
    then the newer; ``notes`` records it.

    Raises:
        TimingsError: a file that is no such table, a value that is no number or impossible, no row of a known model,
            two rows for one configuration and phase that nothing tells apart, or a selection of no rows.
    """
    selection = selection or Selection()
    read: list[Series] = []
    notes: list[str] = []
    for path in paths:
        before = 1 + max((series.places[-1] for series in read), default=-1)
        timed, own = _read_file(path, selection, before)
        read += timed
        notes += own if len(paths) == 1 else [f"{path.name}: {note}" for note in own]
    runs, pooled = pool_iterations(split_by_conditions(read), selection.skip)
    used, choices = without_repeats(runs)
    return Timings(", ".join(path.name for path in paths), used, (*notes, *pooled, *choices))


def _read_file(path: Path, selection: Selection, before: int) -> tuple[list[Series], list[str]]:
    columns, kinds = read_kinds(path, selection.model, [name for name, _ in selection.where])
    known = [kind for kind in kinds if not has_unknown_model(kind.first)]
    if not known:
        timings_of(kinds[0].first)  # its error names the model and what can be given
    measured = [kind for kind in known if not (kind.first.text("is_warmup") and kind.first.flag("is_warmup"))]
    if not measured:
        raise TimingsError(f"{path}: every row is warm-up", "Write a row for the steps after it, too")
    _check(path, [kind.first for kind in measured], selection.where)
    timed = [series for kind in measured for series in series_of(kind, before, selection.admits)]
    if not timed:
        conditions = " and ".join(f"{name}={value}" for name, value in selection.where)
        raise TimingsError(f"{path}: no row has {conditions}", "Give fewer of them")
    of_models = [note for kind in known for note in model_notes(kind.first)]
    timed, note = _with_phase(path, timed, selection.phase)
    return timed, list(dict.fromkeys([*columns.notes, *of_models, *_left_out(kinds, known, measured), *note]))


def _check(path: Path, rows: Sequence[Row], where: tuple[tuple[str, str], ...]) -> None:
    """Whether each condition names a column, and a value that stands in it.

    Raises:
        TimingsError: there is no such column, or no such value; it lists those there are.
    """
    for name, value in where:
        seen = [row.under(group.says).named(name) for row in rows for group in row.columns.groups()]
        cells = list(dict.fromkeys(cell for cell in seen if cell is not None))
        if not cells:
            listed = rows[0].columns.listed()
            raise TimingsError(f"{path}: --csv-where {name}={value}: no column {name!r}", f"Give one of {listed}")
        if not any(_equal(cell, value) for cell in cells):
            listed = ", ".join(map(repr, cells[:_FEW])) + (", ..." if len(cells) > _FEW else "")
            raise TimingsError(f"{path}, column {name!r}: no row has {value!r}", f"Give one of {listed}")


def _equal(cell: str, wanted: str) -> bool:
    """Whether a cell is what was asked for: the same text, flag or number, in any spelling."""
    ours, theirs = cell.lower(), wanted.lower()
    if ours == theirs or (ours in FLAGS and FLAGS[ours] == FLAGS.get(theirs)):
        return True
    try:
        return float(ours) == float(theirs)
    except ValueError:
        return False


def _with_phase(path: Path, timed: list[Series], asked: str | None) -> tuple[list[Series], list[str]]:
    """The timings with the phase that was asked for, or that the file's name says, where no column says it.

    Raises:
        TimingsError: the columns say every phase already.
    """
    open_ones = [series for series in timed if series.timing.phase == UNKNOWN_PHASE]
    if asked and not open_ones:
        raise TimingsError(f"{path}: --csv-phase {asked}: its columns say what was timed", "Leave the option out")
    phase = asked or phase_in_name(path.stem)
    if not open_ones:
        return timed, []
    if phase is None:
        remedy = "add a column phase, such as forward or forward+backward, or give --csv-phase"
        return timed, [f"no column says which phase was timed: {remedy}"]
    placed = [
        replace(series, timing=replace(series.timing, phase=phase)) if series.timing.phase == UNKNOWN_PHASE else series
        for series in timed
    ]
    return placed, [] if asked else [f"no column says which phase was timed: {phase}, by the file's name"]


def _left_out(kinds: Sequence[Kind], known: Sequence[Kind], measured: Sequence[Kind]) -> Iterator[str]:
    """Notes on the rows that are not read."""
    unknown = [kind for kind in kinds if has_unknown_model(kind.first)]
    names = list(dict.fromkeys(kind.first.text("model") or "" for kind in unknown))
    if unknown:
        numbers = sorted(line for kind in unknown for line in kind.lines)
        listed = ", ".join(repr(name[:_LETTERS]) for name in names[:_FEW]) + (", ..." if len(names) > _FEW else "")
        lines = ", ".join(map(str, numbers[:_FEW])) + (", ..." if len(numbers) > _FEW else "")
        word = "line" if len(numbers) == 1 else "lines"
        yield f"{word} {lines}: unknown model{'' if len(names) == 1 else 's'} {listed}, left out"
    if warm_up := sum(len(kind.lines) for kind in known) - sum(len(kind.lines) for kind in measured):
        yield f"{warm_up} rows of warm-up are left out"
