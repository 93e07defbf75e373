"""One unprofiled timing, and how a row of a timings table becomes one, or several where its columns are wide."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from nsys_analyzer.analysis.models import (
    ModelSize,
    find_model,
    mode_from_text,
    precision_from_text,
    resolve_model,
)
from nsys_analyzer.capture.timings.columns import Group
from nsys_analyzer.capture.timings.rows import DIMENSIONS, Row
from nsys_analyzer.capture.timings.words import COMPILED, phase_from_text, status_from_text, word
from nsys_analyzer.errors import ConfigurationError

UNKNOWN_PHASE = "unknown"
"""The phase of a time where no column says what was timed; it matches no phase of a capture."""

_MODE_OF = {"forward": "forward", "backward": "forward+backward", "forward+backward": "forward+backward"}
#: Fields that say under which condition a run was made, in the order in which a message names them.
_CONDITIONS = (
    "model", *DIMENSIONS, "context_length", "batch_size", "precision", "mixed_precision", "bf16", "fp16", "tf32",
    "compile", "cuda_graph", "attention", "optimizer", "device", "gpu",
)  # fmt: skip


@dataclass(frozen=True)
class Timing:
    """One phase of one unprofiled configuration, times in milliseconds; ``None`` is unknown.

    ``phase`` is ``forward``, ``backward``, ``optimizer``, ``loss``, ``step``, ``forward+backward``, a word of the
    file's own, or ``UNKNOWN_PHASE``. ``status`` is ``ok``, ``oom``, ``failed``, ``timeout``, ``missing`` (no time and
    no reason given) or a word of the file's own; times are only there where it is ``ok``. ``line`` counts from 1, in
    ``file``, a path. ``capture`` is the name of the capture of the same configuration, where the file says it.
    ``said`` are header and cell of every column that says a condition; ``conditions`` those of columns without a
    meaning here. ``iteration`` is the row's number where the file has a row for each iteration.
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
    file: str = ""
    time_stamp_s: float | None = None
    capture: str | None = None
    attention: str | None = None
    compile: bool | None = None
    cuda_graph: bool | None = None
    optimizer: str | None = None
    device: str | None = None
    gpu: str | None = None
    message: str | None = None
    iteration: int | None = None
    said: tuple[tuple[str, str], ...] = ()
    conditions: tuple[tuple[str, str], ...] = ()

    @property
    def setup(self) -> tuple[object, ...]:
        """Equal for two timings of one run: the model's dimensions (or its name), and every condition."""
        return *self.known_setup, self.conditions

    @property
    def known_setup(self) -> tuple[object, ...]:
        """The setup without the conditions whose meaning is not known."""
        model = self.model.dimensions if self.model else self.model_name
        known = (self.attention, self.compile, self.cuda_graph, self.optimizer, self.device, self.gpu)
        return model, self.context_length, self.batch_size, self.precision, *known

    @property
    def center_ms(self) -> float | None:
        """The mean, or the median where the file gives that alone."""
        return self.mean_ms if self.mean_ms is not None else self.median_ms


def timings_of(row: Row, admits: Callable[[Row], bool] | None = None) -> list[tuple[Group, Timing]]:
    """The row's timings: one, or one per phase (and condition) where its columns are wide; each with its columns.

    ``admits`` picks among the conditions that the headers of wide columns name.

    Raises:
        TimingsError: a value that is no number or impossible; it names line and column.
    """
    timings = [
        (group, _timing(row.under(says), group, phase))
        for says in dict.fromkeys(group.says for group in row.columns.groups())
        if admits is None or admits(row.under(says))
        for group, phase in _phases(row, says)
    ]
    timed = any(timing.center_ms is not None for _, timing in timings)
    return [(group, timing) for group, timing in timings if timing.status != "missing" or not timed]


def _phases(row: Row, says: tuple[tuple[str, str], ...]) -> list[tuple[Group, str]]:
    """The groups of time columns to read, each with the phase it stands for in this row."""
    groups = [group for group in row.columns.groups() if group.says == says]
    named = [(group, group.phase) for group in groups if group.phase is not None]
    lone = Group(None, says)
    said = _phase_of(row)
    if lone not in groups or (said is None and named):
        return named
    return [(lone, said or UNKNOWN_PHASE), *((group, phase) for group, phase in named if phase != said)]


def _phase_of(row: Row) -> str | None:
    """The phase of the row's one time: the one it names, else what its flags say was run, else its mode."""
    if text := row.text("phase"):
        return phase_from_text(text) or text.lower()
    return _ran(row) or phase_from_text(row.text("mode") or "")


def _ran(row: Row) -> str | None:
    """The phases that were timed, by the flags: forward alone, with the backward pass, with the optimizer too."""
    only_forward, backward, optimizer = (row.flag(one) for one in ("only_forward", "with_backward", "with_optimizer"))
    if only_forward is None and backward is None:
        return None
    if only_forward or backward is False:
        return "forward"
    return "step" if optimizer else "forward+backward"


def _mode(row: Row) -> str | None:
    """The row's mode; ``None`` where the mode column says what was timed and is the phase."""
    wide = Group(None, row.says) not in row.columns.groups()
    ran = _ran(row)
    if text := row.text("mode"):
        phase = phase_from_text(text)
        if not wide and row.text("phase") is None and ran is None and phase:
            return None
        return _MODE_OF.get(phase, "train") if phase else mode_from_text(text)
    return _MODE_OF.get(ran, "train") if wide and ran else None


def _precision(row: Row) -> str | None:
    """The row's precision; mixed precision is bf16 unless a half precision is named, without it fp32."""
    text, mixed = row.text("precision"), row.text("mixed_precision")
    flags = {name: row.flag(name) for name in ("bf16", "fp16", "tf32")}
    precision = precision_from_text(text) if text else next((name for name, flag in flags.items() if flag), None)
    if text and re.search(r"mixed|autocast|amp", text.lower()):
        return _half_in(text) or "bf16"
    if mixed is None:
        return precision or ("fp32" if False in flags.values() else None)
    if (named := precision_from_text(mixed)) in ("fp32", "tf32", "bf16", "fp16"):
        return named
    if row.flag("mixed_precision"):
        return precision if precision in ("bf16", "fp16") else "bf16"
    return precision or "fp32"


def _half_in(text: str) -> str | None:
    """The half precision that a longer text names, such as ``bf16_autocast``."""
    parts = (precision_from_text(part) for part in word(text).split("_"))
    return next((part for part in parts if part in ("bf16", "fp16")), None)


def _timing(row: Row, group: Group, phase: str) -> Timing:
    model, name = model_of(row)
    status = _status(row, group)
    ms = _milliseconds(row, group) if status == "ok" else {}
    device, gpu = _device(row)
    compiled = row.text("compile")
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
        mean_ms=ms.get("mean"),
        std_ms=ms.get("std"),
        min_ms=ms.get("min"),
        max_ms=ms.get("max"),
        median_ms=ms.get("median"),
        peak_memory_bytes=row.integer("peak_memory_bytes", least=0),
        status=status,
        line=row.line,
        file=str(row.path),
        time_stamp_s=row.seconds_since_epoch(),
        capture=row.text("capture"),
        attention=row.text("attention"),
        compile=COMPILED[compiled.lower()] if compiled else None,
        cuda_graph=row.flag("cuda_graph"),
        optimizer=row.text("optimizer"),
        device=device,
        gpu=gpu,
        message=row.text("message"),
        iteration=row.integer("iteration", least=0),
        said=_said(row),
        conditions=tuple((row.columns.headers[i].strip(), row.cell(i) or "") for i in row.columns.others),
    )


def _milliseconds(row: Row, group: Group) -> dict[str, float | None]:
    """The row's times by statistic; a deviation may stand in the cell of the mean."""
    columns = ((statistic, row.columns.time(group, statistic)) for statistic in ("mean", "std", "min", "max", "median"))
    ms = {statistic: row.milliseconds(column) for statistic, column in columns if column}
    main = row.columns.center(group)
    if ms.get("std") is None and main:
        ms["std"] = row.spread(main)
    return ms


def _device(row: Row) -> tuple[str | None, str | None]:
    """``cuda`` or ``cpu``, and the GPU's name, which some write in a column ``device``."""
    device, gpu = row.text("device"), row.text("gpu")
    kind = device.lower().split(":")[0] if device else None
    known = kind in (None, "cuda", "cpu", "mps")
    return (kind, gpu) if known else (None, gpu or device)


def _said(row: Row) -> tuple[tuple[str, str], ...]:
    """Header and cell of each column that says a condition, then what the header of the time's column says."""
    fields = [field for field in _CONDITIONS if field in row.columns.fields]
    if "model" in fields:
        fields = [field for field in fields if field not in DIMENSIONS]
    return (*((row.header(field), row.text(field) or "") for field in fields), *row.says)


def _status(row: Row, group: Group) -> str:
    """How the run ended. A wide row that failed late still holds the times of the phases before: they are ok."""
    text = row.text("status")
    declared = "oom" if row.flag("oom") else status_from_text(text or "ok")
    if group.phase is None and declared not in ("ok", None):
        return str(declared)
    main = row.columns.center(group)
    if main and (in_cell := row.status_in(main)):
        return in_cell
    if main and row.milliseconds(main) is not None:
        return "ok"
    if declared is None:
        return str(text).lower()
    if declared == "ok" and text is None and (message := row.text("message")):
        return status_from_text(message) or "failed"
    return "missing" if declared == "ok" else declared


def model_of(row: Row) -> tuple[ModelSize | None, str]:
    """The row's model and the name that the row gives it; a row that names its capture needs no model.

    Raises:
        TimingsError: no model, one that is unknown, or dimensions that are not those of its name.
    """
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


def has_unknown_model(row: Row) -> bool:
    """Whether the row's model is a name that is not known, without the dimensions that would say what it is."""
    if any(row.text(field) is None for field in DIMENSIONS) and (name := row.text("model")):
        try:
            find_model(name)
        except ConfigurationError:
            return True
    return False


def _complete(given: Sequence[int | None]) -> tuple[int, int, int, int] | None:
    values = [value for value in given if value is not None]
    return (values[0], values[1], values[2], values[3]) if len(values) == 4 else None


def model_notes(row: Row) -> list[str]:
    """Notes on a row that gives a known model's name to other dimensions."""
    if "model" not in row.columns.fields:
        return []
    model, name = model_of(row)
    try:
        known = find_model(name)
    except ConfigurationError:
        return []
    if model is None or known.dimensions == model.dimensions:
        return []
    return [f"{name} has the dimensions of {model.name} in this file, not those of the known {known.name}"]
