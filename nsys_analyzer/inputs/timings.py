"""Times of runs without a profiler: from tables of comma-separated values, and from the manifests of a sweep.

A sweep writes a table for people, ``timings.csv``. Tables of other programs have a row for each phase (``phase``,
``mean_ms``, and ``capture`` where there are several), or a column for each (``forward_ms``, ``step_s``).
"""

from __future__ import annotations

import csv
import io
import math
import re
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Annotated

import msgspec
from msgspec import structs

from nsys_analyzer.analysis.statistics import Stats
from nsys_analyzer.analysis.transformer.models import Configuration, mode_from_text
from nsys_analyzer.configuration import DIMENSIONS, OPTIONS, Run
from nsys_analyzer.errors import ConfigurationError, TimingsError
from nsys_analyzer.inputs.manifest import MANIFEST, TIMINGS, configuration_of, name_by_manifest, run_from
from nsys_analyzer.inputs.rows import Times
from nsys_analyzer.inputs.targets import PHASES
from nsys_analyzer.system.atomic_write import write_text
from nsys_analyzer.system.strict_json import decode_json
from nsys_analyzer.trace.schema import MS_PER_S, NS_PER_MS, US_PER_MS

#: The table that a sweep writes, its file and its columns; times in milliseconds over the measured steps.
NAME = TIMINGS
_STEPS = ("warmup_steps", "steps")
_DESCRIBED = ("model", *DIMENSIONS, *(name for name, one in OPTIONS.items() if one.in_run and name not in _STEPS))
_STATISTICS = ("mean", "std", "min", "median", "max")
WRITTEN = (
    "capture", *_DESCRIBED, "rank", "phase", *_STEPS, *(f"{name}_ms" for name in _STATISTICS),
    "peak_memory_bytes", "status", "message",
)  # fmt: skip
#: The column of a phase's mean times, in a table with a column for each phase, and its units.
_OF_A_PHASE = re.compile(r"(forward|loss|backward|forward\+backward|optimizer|step)_(ns|us|ms|s)")
_UNITS_MS = {"ns": 1 / NS_PER_MS, "us": 1 / US_PER_MS, "ms": 1.0, "s": MS_PER_S}
#: The columns of the times of one phase, which its row names.
_OF_ONE = {f"{name}_ms": 1.0 for name in _STATISTICS}
_OF_A_RUN = {*WRITTEN, "optimizer"} - {"phase", *_OF_ONE}  # older tables of a sweep have its name
_SHORTEST_MS, _LONGEST_MS = 1e-9, 365 * 86_400e3
_NEEDED = (
    f"Give a sweep's {NAME}, or a table with phase, mean_ms or capture, phase, mean_ms (a row for each phase), "
    "or one with forward_ms, step_ms (a column for each)"
)


@dataclass(frozen=True)
class Timing:
    """One phase of a run without a profiler.

    Attributes:
        times: None where it was not timed.
        place: the file and the line.
        status: ``missing`` where it has neither time nor reason, else one of a manifest's.
        run, configuration: what the row says of the run, its ``capture`` among it.
    """

    phase: str
    times: Stats | None
    place: str
    status: str = "ok"
    run: Run = field(default_factory=Run)
    configuration: Configuration = field(default_factory=Configuration)

    @cached_property
    def cells(self) -> tuple[tuple[str, str], ...]:
        """Returns what tells its run from others; a number of steps does not."""
        told = ((name, getattr(self.run, name)) for name in (*_DESCRIBED, "optimizer", "rank", "warmup_steps"))
        return tuple((name, str(value)) for name, value in told if value is not None)

    @property
    def model(self) -> str | None:
        """Returns the name of its model, which may be no known one."""
        return self.configuration.model.name if self.configuration.model else self.run.model


@dataclass(frozen=True)
class Timings:
    """Timings of one or several files (``source``), one for each run and phase.

    ``of_captures`` says that those which fit no capture are none that was asked for.
    """

    source: str
    rows: tuple[Timing, ...]
    of_captures: bool = False


def read_timings(*paths: Path) -> Timings:
    """Reads tables with a row for each phase, or a column for each.

    Raises:
        TimingsError: a file that is no such table, a value that is no number or impossible, a run timed twice.
    """
    rows: dict[object, Timing] = {}
    for row in (row for path in paths for row in _rows(path)):
        first = rows.setdefault((row.run.capture, row.phase, row.cells), row)
        if first is not row:
            what = f"{row.place}: {row.phase!r} of the same run has a time in {first.place}, too"
            raise TimingsError(what, "Give each phase of a run one row, with the mean of its repeats")
    return Timings(", ".join(path.name for path in paths), tuple(rows.values()))


def _rows(path: Path) -> Iterator[Timing]:
    """Yields the rows of a file, one for each phase."""
    (_, header), *lines = _table(path)
    wide = {name: match for name in header if (match := _OF_A_PHASE.fullmatch(name))}
    phases = {match[1]: {name: _UNITS_MS[match[2]]} for name, match in wide.items()}
    unknown = [name for name in header if name not in wide and name not in (*_OF_A_RUN, "phase", *_OF_ONE)]
    of_one = {"phase", *_OF_ONE} & {*header}
    is_twice = len({*header}) < len(header) or len(phases) < len(wide)
    if unknown or is_twice or (of_one if phases else not of_one >= {"phase", "mean_ms"}):
        problem = f"the column {unknown[0][:40]!r} is not known" if unknown else "not one time for each phase"
        raise TimingsError(f"{path}: {problem}", _NEEDED)
    for line, texts in lines:
        cells = {name: text for name, text in zip(header, texts, strict=False) if text}
        if len(texts) != len(header) or not (phases or "phase" in cells):
            problem = "no phase" if len(texts) == len(header) else f"{len(texts)} cells under {len(header)} columns"
            raise TimingsError(f"{path}, line {line}: {problem}", _NEEDED)
        place = f"{path.name}, line {line}"
        run, configuration = _described(place, cells)
        ended = "missing" if run.status == "ok" else run.status
        for phase, columns in (phases or {cells["phase"]: _OF_ONE}).items():
            values = [_time_ms(place, name, cells.get(name), unit) for name, unit in columns.items()]
            times = None if values[0] is None else Stats(run.steps, *values)
            yield Timing(phase, times, place, "ok" if times else ended, run, configuration)


def _table(path: Path) -> list[tuple[int, list[str]]]:
    """Returns the header of a file and its rows, without blank ones, with the lines where they stand.

    Raises:
        TimingsError: no such file, no table, or no row.
    """
    if path.is_char_device() or (path.is_fifo() and not path.is_relative_to("/dev")):  # where <(...) has a writer
        raise TimingsError(f"{path}: is a pipe or a device", "Give the path of a CSV file")
    try:
        lines = csv.reader(io.StringIO(path.read_bytes().decode("utf-8-sig"), newline=""))
        table = [(lines.line_num, [text.strip() for text in texts]) for texts in lines if any(map(str.strip, texts))]
    except OSError as error:
        raise TimingsError(f"{path}: cannot be read ({error.strerror})", "Give the path of a CSV file") from error
    except (ValueError, csv.Error) as error:
        raise TimingsError(f"{path}: no CSV ({textwrap.shorten(str(error), 200)})", _NEEDED) from error
    if len(table) < 2:
        raise TimingsError(f"{path}: no rows", _NEEDED)
    return table


def _described(place: str, cells: dict[str, str]) -> tuple[Run, Configuration]:
    """Returns what a row says of its run; a model of no known name is one without dimensions."""
    try:
        run = msgspec.convert({name: text for name, text in cells.items() if name in _OF_A_RUN}, Run, strict=False)
        try:
            configuration = configuration_of(run)
        except ConfigurationError:
            if all((run.d_model, run.d_ff, run.num_layers, run.num_heads)):
                raise
            configuration = configuration_of(replace(run, model=None))
    except msgspec.ValidationError as error:
        name = str(error).rpartition("$.")[2].rstrip("`")
        problem = f"{place}, column {name!r}: {cells.get(name)!r} is not what it holds"
        raise TimingsError(problem, "Correct the value or leave the cell empty") from error
    except ConfigurationError as error:
        raise TimingsError(f"{place}: {error.message}", error.hint) from error
    return run, structs.replace(configuration, source="timings")


def _time_ms(place: str, column: str, text: str | None, unit_ms: float) -> float | None:
    """Returns the time in a cell; None for an empty one."""
    if text is None:
        return None
    try:
        ms = float(text) * unit_ms
    except ValueError:
        ms = math.nan
    if not (0 if column == "std_ms" else _SHORTEST_MS) <= ms <= _LONGEST_MS:
        what = f"{place}, column {column!r}: {text[:30]!r} is not a number, or no possible time"
        raise TimingsError(what, "Write a plain number, or leave the cell empty and give a status")
    return ms


# --- of a sweep


class _Timed(msgspec.Struct):
    """What a manifest keeps of a run without a profiler: how it ended, and the times of each phase's steps in ms."""

    status: str
    times_ms: dict[str, Annotated[list[float], msgspec.Meta(min_length=1)]]
    message: str | None = None


def timings_of_sweep(folder: Path) -> Timings:
    """Returns the times in the manifests of a sweep's folder, to the nanosecond.

    A configuration that ran out of memory, failed or timed out has its phases with that status and no times. Of one
    capture of several ranks those of each are there.

    Raises:
        ConfigurationError: the times of a manifest are none of a sweep's.
    """
    return Timings(NAME, tuple(row for path in sorted(folder.glob(f"[!.]*/*{MANIFEST}")) for row in of_manifest(path)))


def of_manifest(path: Path) -> Iterator[Timing]:
    """Yields the times of a manifest; none where the file is somebody else's: others call theirs so, too."""
    try:
        values = decode_json(path.read_bytes())
    except ValueError:
        return
    if not isinstance(values, dict):
        return
    of_ranks = values.get("rank_timings") if values.get("capture") else None
    for rank, kept in enumerate(of_ranks) if of_ranks else ((None, values.get("timings")),):
        if not kept:  # a program may time nothing
            continue
        try:
            timed = msgspec.convert(kept, _Timed)
        except msgspec.ValidationError as error:
            problem = f"{path.parent.name}/{path.name}: its timings are none of a sweep's ({error})"
            raise ConfigurationError(problem, "Move the folder away, or run the configuration again") from error
        manifest = run_from(values, path)
        described = {name: getattr(manifest, name) for name in (*_DESCRIBED, *_STEPS)}
        message = " ".join((timed.message or "").split()) or None
        run = Run(**described, rank=rank, capture=name_by_manifest(path), status=timed.status, message=message)
        configuration = structs.replace(configuration_of(run), source="timings")
        for phase in timed.times_ms or PHASES.get(mode_from_text(manifest.mode or ""), ()):
            times = None
            if timed.status == "ok":
                spread = Times.of(timed.times_ms[phase])
                ms = (spread.ms, spread.std_ms, spread.min_ms, spread.median_ms, spread.max_ms)
                times = Stats(run.steps, *(None if value is None else round(value, 6) for value in ms))
                run = replace(run, peak_memory_bytes=manifest.peak_memory_bytes)
            yield Timing(phase, times, path.parent.name, timed.status, run, configuration)


def write_timings(folder: Path) -> Path:
    """Writes the times of a sweep's folder as ``timings.csv``, whole or not at all, and returns its path."""
    text = io.StringIO()
    writer = csv.DictWriter(text, WRITTEN, restval="", extrasaction="ignore", lineterminator="\n")
    writer.writeheader()
    for row in timings_of_sweep(folder).rows:
        times = vars(row.times) if row.times else {}
        figures = {f"{name}_ms": f"{times[name]:.6f}" for name in _STATISTICS if times.get(name) is not None}
        writer.writerow({**vars(row.run), "phase": row.phase, **figures, "status": row.status})
    write_text(folder / NAME, text.getvalue())
    return folder / NAME


def is_from_a_sweep(path: Path) -> bool:
    """Tells whether a file of timings was written here, and may be written anew."""
    with path.open(encoding="utf-8", errors="replace") as file:
        return file.readline().startswith(",".join(WRITTEN[:2]))
