"""Reads the times of runs without a profiler, from CSV tables and from the manifests of a sweep.

A sweep also writes its times as a table, ``timings.csv``. A table of another program has either a row for each phase
(with the columns ``phase``, ``mean_ms``, and ``capture`` if there are several captures) or a column for each phase
(such as ``forward_ms`` or ``step_s``).
"""

from __future__ import annotations

import csv
import io
import math
import re
import statistics
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Annotated, TypeAlias

import msgspec
from msgspec import structs

from nsys_analyzer.analysis.statistics import Stats
from nsys_analyzer.analysis.transformer.models import Configuration, mode_from_text
from nsys_analyzer.configuration import DIMENSIONS, OPTIONS, PHASES_OF_MODE, Run
from nsys_analyzer.errors import ConfigurationError, TimingsError
from nsys_analyzer.inputs.manifest import MANIFEST, TIMINGS, capture_name_of_manifest, configuration_of, make_run
from nsys_analyzer.inputs.rows import Times
from nsys_analyzer.system.atomic_write import write_text
from nsys_analyzer.system.strict_json import decode_json
from nsys_analyzer.trace.phase_names import STEP
from nsys_analyzer.trace.schema import MS_PER_S, NS_PER_MS, US_PER_MS

#: The columns with the numbers of warm-up steps and of measured steps.
_STEP_COLUMNS = ("warmup_steps", "steps")
#: The columns with the configuration of a run.
_CONFIGURATION_COLUMNS = (
    "model", *DIMENSIONS, *(name for name, option in OPTIONS.items() if option.in_run and name not in _STEP_COLUMNS),
)  # fmt: skip
_STATISTICS = ("mean", "std", "min", "median", "max")
#: The columns of the table that a sweep writes. The times are statistics over the measured steps, in ms.
SWEEP_COLUMNS = (
    "capture", *_CONFIGURATION_COLUMNS, "rank", "phase", *_STEP_COLUMNS, *(f"{name}_ms" for name in _STATISTICS),
    "peak_memory_bytes", "status", "message", "process",
)  # fmt: skip
#: Matches the name of a column with the mean time of a phase: the phase, and the unit of the time.
_TIME_COLUMN_OF_PHASE = re.compile(r"(forward|loss|backward|forward\+backward|optimizer|step)_(ns|us|ms|s)")
_MS_PER_UNIT = {"ns": 1 / NS_PER_MS, "us": 1 / US_PER_MS, "ms": 1.0, "s": MS_PER_S}
#: The columns with times in a table that has a row for each phase, each with its unit in ms.
_TIME_COLUMNS = {f"{name}_ms": 1.0 for name in _STATISTICS}
#: The columns that describe a run. Tables of older sweeps also have the column ``optimizer``.
_RUN_COLUMNS = {*SWEEP_COLUMNS, "optimizer"} - {"phase", "process", *_TIME_COLUMNS}
#: The value in the column ``process`` if the recorded process made the timed steps. The cell is empty otherwise.
_RECORDED_PROCESS = "recorded"
#: A mean time of a phase outside these limits is rejected as impossible.
_SHORTEST_MS, _LONGEST_MS = 1e-9, 365 * 86_400e3
#: The median of fewer steps before or after the capture range is used only if there is no other median.
_FEWEST_RELIABLE_STEPS = 3
_TABLE_HINT = (
    f"Give a sweep's {TIMINGS}, a table with a row for each phase (columns phase and mean_ms, and capture if there are "
    "several captures), or a table with a column for each phase, such as forward_ms and step_ms"
)


@dataclass(frozen=True)
class PhaseTiming:
    """The times of one phase in a run without a profiler.

    Attributes:
        phase: the name of the phase.
        times: the times in ms; None if the phase was not timed.
        place: the file and the line of the row, for messages.
        status: one of ``configuration.STATUSES``, or ``missing`` if the row contains neither a time nor another status.
        run, configuration: the description of the run, including the name of its ``capture``.
        in_recorded_process: whether the recorded process made the timed steps, outside of the capture range.
    """

    phase: str
    times: Stats | None
    place: str
    status: str = "ok"
    run: Run = field(default_factory=Run)
    configuration: Configuration = field(default_factory=Configuration)
    in_recorded_process: bool = False

    @cached_property
    def cells(self) -> tuple[tuple[str, str], ...]:
        """Returns the columns that identify the run, with their values, without the number of measured steps."""
        names = (*_CONFIGURATION_COLUMNS, "optimizer", "rank", "warmup_steps")
        values = ((name, getattr(self.run, name)) for name in names)
        return tuple((name, str(value)) for name, value in values if value is not None)

    @property
    def model(self) -> str | None:
        """Returns the name of the model, which the package may not know."""
        return self.configuration.model.name if self.configuration.model else self.run.model


@dataclass(frozen=True)
class Timings:
    """The unprofiled times from one or several files, with one row for each run and phase.

    Attributes:
        source: the names of the files.
        rows: the rows.
        of_captures: whether each row was measured for a capture of the report. A row that fits no capture is then
            dropped, and does not become a row of the report.
    """

    source: str
    rows: tuple[PhaseTiming, ...]
    of_captures: bool = False


def read_timings(*paths: Path) -> Timings:
    """Reads tables of unprofiled times, which have a row for each phase or a column for each phase.

    Raises:
        TimingsError: a file is not such a table, a value is not a possible time, or a run is timed twice.
    """
    rows: dict[object, PhaseTiming] = {}
    for row in (row for path in paths for row in _read_rows(path)):
        earlier_row = rows.setdefault((row.run.capture, row.phase, row.cells), row)
        if earlier_row is not row:
            problem = f"{row.place}: {row.phase!r} of the same run also has a time in {earlier_row.place}"
            raise TimingsError(problem, "Give each phase of a run one row, with the mean of its repeats")
    return Timings(", ".join(path.name for path in paths), tuple(rows.values()))


def _read_rows(path: Path) -> Iterator[PhaseTiming]:
    """Yields the times in a table, one for each phase of each run."""
    (_, header), *lines = _read_table(path)
    phase_columns = {name: match for name in header if (match := _TIME_COLUMN_OF_PHASE.fullmatch(name))}
    columns_of_phase = {match[1]: {name: _MS_PER_UNIT[match[2]]} for name, match in phase_columns.items()}
    known_columns = {*phase_columns, *_RUN_COLUMNS, "phase", "process", *_TIME_COLUMNS}
    unknown_columns = [name for name in header if name not in known_columns]
    row_columns = {"phase", *_TIME_COLUMNS} & {*header}
    has_duplicates = len({*header}) < len(header) or len(columns_of_phase) < len(phase_columns)
    if (
        unknown_columns
        or has_duplicates
        or (row_columns if columns_of_phase else not row_columns >= {"phase", "mean_ms"})
    ):
        problem = (
            f"the column {unknown_columns[0][:40]!r} is not known"
            if unknown_columns
            else "it needs one time for each phase"
        )
        raise TimingsError(f"{path}: {problem}", _TABLE_HINT)
    for line, texts in lines:
        cells = {name: text for name, text in zip(header, texts, strict=False) if text}
        if len(texts) != len(header) or not (columns_of_phase or "phase" in cells):
            problem = "no phase" if len(texts) == len(header) else f"{len(texts)} cells under {len(header)} columns"
            raise TimingsError(f"{path}, line {line}: {problem}", _TABLE_HINT)
        place = f"{path.name}, line {line}"
        run, configuration = _read_description(place, cells)
        status_without_time = "missing" if run.status == "ok" else run.status
        for phase, columns in (columns_of_phase or {cells["phase"]: _TIME_COLUMNS}).items():
            values = [_read_time_ms(place, name, cells.get(name), unit) for name, unit in columns.items()]
            times = None if values[0] is None else Stats(run.steps, *values)
            status, in_recorded_process = (
                "ok" if times else status_without_time,
                cells.get("process") == _RECORDED_PROCESS,
            )
            yield PhaseTiming(phase, times, place, status, run, configuration, in_recorded_process)


def _read_table(path: Path) -> list[tuple[int, list[str]]]:
    """Returns the header of a table and its rows that are not blank, each with its line number.

    Raises:
        TimingsError: the file does not exist, is not a table, or has no rows.
    """
    if path.is_char_device() or (path.is_fifo() and not path.is_relative_to("/dev")):  # a shell's <(...)
        raise TimingsError(f"{path}: is a pipe or a device", "Give the path of a CSV file")
    try:
        lines = csv.reader(io.StringIO(path.read_bytes().decode("utf-8-sig"), newline=""))
        table = [(lines.line_num, [text.strip() for text in texts]) for texts in lines if any(map(str.strip, texts))]
    except OSError as error:
        raise TimingsError(f"{path}: cannot be read ({error.strerror})", "Give the path of a CSV file") from error
    except (ValueError, csv.Error) as error:
        raise TimingsError(f"{path}: not CSV ({textwrap.shorten(str(error), 200)})", _TABLE_HINT) from error
    if len(table) < 2:
        raise TimingsError(f"{path}: no rows", _TABLE_HINT)
    return table


def _read_description(place: str, cells: dict[str, str]) -> tuple[Run, Configuration]:
    """Returns the run and the configuration that a row of a table describes.

    If the package does not know the model, and the row has no dimensions, the configuration has no model.
    """
    try:
        run = msgspec.convert({name: text for name, text in cells.items() if name in _RUN_COLUMNS}, Run, strict=False)
        try:
            configuration = configuration_of(run)
        except ConfigurationError:
            if all((run.d_model, run.d_ff, run.num_layers, run.num_heads)):
                raise
            configuration = configuration_of(replace(run, model=None))
    except msgspec.ValidationError as error:
        name = str(error).rpartition("$.")[2].rstrip("`")
        problem = f"{place}, column {name!r}: {cells.get(name)!r} is not a possible value"
        raise TimingsError(problem, "Correct the value or leave the cell empty") from error
    except ConfigurationError as error:
        raise TimingsError(f"{place}: {error.message}", error.hint) from error
    return run, structs.replace(configuration, source="timings")


def _read_time_ms(place: str, column: str, text: str | None, unit_ms: float) -> float | None:
    """Converts the text of a cell to a time in ms; returns None if the cell is empty."""
    if text is None:
        return None
    try:
        ms = float(text) * unit_ms
    except ValueError:
        ms = math.nan
    if not (0 if column == "std_ms" else _SHORTEST_MS) <= ms <= _LONGEST_MS:
        problem = f"{place}, column {column!r}: {text[:30]!r} is not a number, or not a possible time"
        raise TimingsError(problem, "Write a plain number, or leave the cell empty and give a status")
    return ms


# --- the times of a sweep


_TimesMs: TypeAlias = Annotated[list[float], msgspec.Meta(min_length=1)]


class _ManifestTimings(msgspec.Struct):
    """The part of a manifest about times without the profiler, in ms.

    Attributes:
        status: the status of the timed run.
        times_ms: the times of each phase in the timed run, one per step.
        message: the message of the timed run.
        steps_before_capture_ms, steps_after_capture_ms: the lengths of the steps that the recorded process made before
            the capture range opened, and after it closed.
    """

    status: str
    times_ms: dict[str, _TimesMs]
    message: str | None = None
    steps_before_capture_ms: _TimesMs | None = None
    steps_after_capture_ms: _TimesMs | None = None

    def find_step_lengths_ms(self) -> list[float] | None:
        """Returns the lengths of the steps that the recorded process made without the profiler, if it measured them.

        If enough steps before and after the capture range were measured, the steps with the shorter median are
        returned, because a profiler that still works outside of the range only makes steps longer. The first of several
        steps after the range begins with an idle GPU and is left out.
        """
        after_ms = self.steps_after_capture_ms or []
        measured = [steps_ms for steps_ms in (self.steps_before_capture_ms, after_ms[1:] or after_ms) if steps_ms]
        reliable = [steps_ms for steps_ms in measured if len(steps_ms) >= _FEWEST_RELIABLE_STEPS]
        return min(reliable or measured, key=statistics.median, default=None)


def read_sweep_timings(folder: Path) -> Timings:
    """Returns the times in the manifests of a sweep's folder, rounded to the nanosecond.

    If a run ran out of memory, failed or timed out, its phases have this status and no times. If a run has several
    ranks, there are rows for each rank.

    Raises:
        ConfigurationError: a manifest contains times in a format that no sweep writes.
    """
    manifests = sorted(folder.glob(f"[!.]*/*{MANIFEST}"))
    return Timings(TIMINGS, tuple(row for path in manifests for row in read_manifest_timings(path)))


def read_manifest_timings(path: Path) -> Iterator[PhaseTiming]:
    """Yields the times in a manifest; yields nothing if another tool wrote the file.

    Raises:
        ConfigurationError: the manifest contains times in a format that no sweep writes.
    """
    try:
        values = decode_json(path.read_bytes())
    except ValueError:
        return
    if not isinstance(values, dict):
        return
    rank_timings = values.get("rank_timings") if values.get("capture") else None
    for rank, timings_entry in enumerate(rank_timings) if rank_timings else ((None, values.get("timings")),):
        if not timings_entry:  # the entry is empty if the program timed nothing
            continue
        try:
            timings = msgspec.convert(timings_entry, _ManifestTimings)
        except msgspec.ValidationError as error:
            problem = f"{path.parent.name}/{path.name}: its timings were not written by a sweep ({error})"
            raise ConfigurationError(problem, "Move the folder away, or run the configuration again") from error
        manifest = make_run(values, path)
        description = {name: getattr(manifest, name) for name in (*_CONFIGURATION_COLUMNS, *_STEP_COLUMNS)}
        message = " ".join((timings.message or "").split()) or None
        run = Run(
            **description, rank=rank, capture=capture_name_of_manifest(path), status=timings.status, message=message
        )
        configuration = structs.replace(configuration_of(run), source="timings")
        step_lengths_ms, times_ms = timings.find_step_lengths_ms(), timings.times_ms
        if step_lengths_ms:  # the step's length in the process of the capture replaces that in another process
            times_ms = {**times_ms, STEP: step_lengths_ms}
        for phase in times_ms or PHASES_OF_MODE.get(mode_from_text(manifest.mode or ""), ()):
            times, in_recorded_process = None, bool(phase == STEP and step_lengths_ms)
            if timings.status == "ok":
                spread = Times.of(times_ms[phase])
                ms = (spread.ms, spread.std_ms, spread.min_ms, spread.median_ms, spread.max_ms)
                count = len(times_ms[phase]) if in_recorded_process else run.steps
                times = Stats(count, *(None if value is None else round(value, 6) for value in ms))
                run = replace(run, peak_memory_bytes=manifest.peak_memory_bytes)
            yield PhaseTiming(phase, times, path.parent.name, timings.status, run, configuration, in_recorded_process)


def write_timings(folder: Path) -> Path:
    """Writes the times in a sweep's folder atomically as ``timings.csv`` there, and returns the path of the table."""
    text = io.StringIO()
    writer = csv.DictWriter(text, SWEEP_COLUMNS, restval="", extrasaction="ignore", lineterminator="\n")
    writer.writeheader()
    for row in read_sweep_timings(folder).rows:
        times = vars(row.times) if row.times else {}
        figures = {f"{name}_ms": f"{times[name]:.6f}" for name in _STATISTICS if times.get(name) is not None}
        process = _RECORDED_PROCESS if row.in_recorded_process else ""
        writer.writerow({**vars(row.run), "phase": row.phase, **figures, "status": row.status, "process": process})
    write_text(folder / TIMINGS, text.getvalue())
    return folder / TIMINGS


def is_sweep_table(path: Path) -> bool:
    """Returns whether a sweep wrote a table of times. Such a table may be replaced."""
    with path.open(encoding="utf-8", errors="replace") as file:
        return file.readline().startswith(",".join(SWEEP_COLUMNS[:2]))
