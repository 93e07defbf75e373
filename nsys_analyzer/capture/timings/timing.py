"""One unprofiled timing, and how a row of a timings CSV becomes one, or several where its columns are wide."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from nsys_analyzer.analysis.models import (
    ModelSize,
    find_model,
    mode_from_text,
    precision_from_text,
    resolve_model,
)
from nsys_analyzer.capture.timings.columns import phase_from_text, status_from_text
from nsys_analyzer.capture.timings.rows import DIMENSIONS, Row
from nsys_analyzer.errors import ConfigurationError

UNKNOWN_PHASE = "unknown"
"""The phase of a time where no column says what was timed; it matches no phase of a capture."""


@dataclass(frozen=True)
class Timing:
    """One phase of one unprofiled configuration, times in milliseconds; ``None`` is unknown.

    ``phase`` is ``forward``, ``backward``, ``optimizer``, ``loss``, ``step``, ``forward+backward``, a word of the
    file's own, or ``UNKNOWN_PHASE``. ``status`` is ``ok``, ``oom``, ``failed``, ``timeout``, ``missing`` (no time and
    no reason given) or a word of the file's own; times are only there where it is ``ok``. ``line`` counts from 1.
    ``capture`` is the name of the capture of the same configuration, where the file says it.
    """

    model: ModelSize | None
    model_name: str
    context_length: int | None
    batch_size: int | None
    precision: str | None
    mode: str | None
    phase: str
    warmup_steps: int | None
    steps: int | None
    mean_ms: float | None
    std_ms: float | None
    min_ms: float | None
    max_ms: float | None
    median_ms: float | None
    peak_memory_bytes: int | None
    status: str
    line: int
    time_stamp_s: float | None = None
    capture: str | None = None
    attention: str | None = None
    device: str | None = None
    message: str | None = None

    @property
    def setup(self) -> tuple[object, ...]:
        """The model's dimensions (or its name), context length, batch size and precision."""
        model = self.model.dimensions if self.model else self.model_name
        return model, self.context_length, self.batch_size, self.precision


def timings_of(row: Row) -> list[Timing]:
    """The row's timings: one, or one per phase where its columns are wide.

    Raises:
        TimingsError: an unknown model, a value that is no number or impossible; it names line and column.
    """
    timings = [_timing(row, group, phase) for group, phase in _phases(row)]
    timed = any(timing.mean_ms is not None or timing.median_ms is not None for timing in timings)
    return [timing for timing in timings if timing.status != "missing" or not timed]


def _phases(row: Row) -> list[tuple[str | None, str]]:
    """The groups of time columns to read, each with the phase it stands for in this row."""
    groups = row.columns.phases()
    named: list[tuple[str | None, str]] = [(group, group) for group in groups if group is not None]
    said = _phase_of(row)
    if None not in groups or (said is None and named):
        return named
    return [(None, said or UNKNOWN_PHASE), *((group, phase) for group, phase in named if phase != said)]


def _phase_of(row: Row) -> str | None:
    """What the row's one time is the time of: its phase, else ``only_forward``, else its mode."""
    if text := row.text("phase"):
        return phase_from_text(text) or text.lower()
    only_forward = row.flag("only_forward")
    if only_forward is not None:
        return "forward" if only_forward else "forward+backward"
    return phase_from_text(row.text("mode") or "")


def _mode(row: Row) -> str | None:
    """The row's mode; ``None`` where the mode column says what was timed and is the phase."""
    wide = None not in row.columns.phases()
    only_forward = row.flag("only_forward")
    if text := row.text("mode"):
        is_phase = not wide and row.text("phase") is None and only_forward is None and phase_from_text(text)
        return None if is_phase else mode_from_text(text)
    if not wide or only_forward is None:
        return None
    return "forward" if only_forward else "forward+backward"


def _precision(row: Row) -> str | None:
    """The row's precision; mixed precision is bf16 unless a half precision is named, without it fp32."""
    text, mixed = row.text("precision"), row.text("mixed_precision")
    precision = precision_from_text(text) if text else None
    if mixed is None:
        return precision
    if (named := precision_from_text(mixed)) in ("fp32", "tf32", "bf16", "fp16"):
        return named
    if row.flag("mixed_precision"):
        return precision if precision in ("bf16", "fp16") else "bf16"
    return precision or "fp32"


def _timing(row: Row, group: str | None, phase: str) -> Timing:
    model, name = _model(row)
    status = _status(row, group)
    columns = row.columns
    ms = {
        statistic: row.milliseconds(column) if status == "ok" and column else None
        for statistic in ("mean", "std", "min", "max", "median")
        for column in [columns.time(group, statistic)]
    }
    return Timing(
        model=model,
        model_name=name,
        context_length=row.integer("context_length"),
        batch_size=row.integer("batch_size"),
        precision=_precision(row),
        mode=_mode(row),
        phase=phase,
        warmup_steps=row.integer("warmup_steps", least=0),
        steps=row.integer("steps", least=0),
        mean_ms=ms["mean"],
        std_ms=ms["std"],
        min_ms=ms["min"],
        max_ms=ms["max"],
        median_ms=ms["median"],
        peak_memory_bytes=row.integer("peak_memory_bytes", least=0),
        status=status,
        line=row.line,
        time_stamp_s=row.seconds_since_epoch(),
        capture=row.text("capture"),
        attention=row.text("attention"),
        device=row.text("device"),
        message=row.text("message"),
    )


def _status(row: Row, group: str | None) -> str:
    """How the run ended. A wide row that failed late still holds the times of the phases before: they are ok."""
    text = row.text("status")
    declared = "oom" if row.flag("oom") else status_from_text(text or "ok")
    if group is None and declared not in ("ok", None):
        return str(declared)
    main = row.columns.time(group, "mean") or row.columns.time(group, "median")
    if main and (in_cell := row.status_in(main)):
        return in_cell
    if main and row.milliseconds(main) is not None:
        return "ok"
    if declared is None:
        return str(text).lower()
    return "missing" if declared == "ok" else declared


def _model(row: Row) -> tuple[ModelSize | None, str]:
    """The row's model and the name that the row gives it; a row that names its capture needs no model."""
    name = row.text("model")
    given = [row.integer(field) for field in DIMENSIONS]
    dimensions = _complete(given)
    try:
        model = resolve_model(name, dimensions, row.integer("vocab_size"))
    except ConfigurationError as error:
        hint = f"{error.hint}; or give its {', '.join(DIMENSIONS)}" if dimensions is None else error.hint
        raise row.error(row.header("model" if dimensions is None else "d_model"), error.message, hint) from error
    if model is None and row.text("capture"):
        return None, ""
    if model is None:
        raise row.error(row.header("model"), "no model", f"Give its name, or all of {', '.join(DIMENSIONS)}")
    for field, value, known in zip(DIMENSIONS, given, model.dimensions, strict=True):
        if value not in (None, known):
            problem = f"{value} is not {model.name}'s, which is {known}"
            raise row.error(row.header(field), problem, f"Give all of {', '.join(DIMENSIONS)}, or correct it")
    return model, name or model.name


def _complete(given: Sequence[int | None]) -> tuple[int, int, int, int] | None:
    values = [value for value in given if value is not None]
    return (values[0], values[1], values[2], values[3]) if len(values) == 4 else None


def model_notes(row: Row) -> list[str]:
    """What to say of a row that gives a known model's name to other dimensions."""
    model, name = _model(row)
    try:
        known = find_model(name)
    except ConfigurationError:
        return []
    if model is None or known.dimensions == model.dimensions:
        return []
    return [f"{name} has the dimensions of {model.name} in this file, not those of the known {known.name}"]
