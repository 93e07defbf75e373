"""What each row of a timings table says of its run, by the layouts that tables of timings have."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np

from nsys_analyzer.analysis.transformer.models import (
    ModelSize,
    find_model,
    mode_from_text,
    precision_from_text,
    resolve_model,
)
from nsys_analyzer.errors import ConfigurationError
from nsys_analyzer.runs.timings.cells import CellError, flag
from nsys_analyzer.runs.timings.columns import Group
from nsys_analyzer.runs.timings.rows import Rows
from nsys_analyzer.runs.timings.table import Table
from nsys_analyzer.runs.timings.timing import UNKNOWN_PHASE, Timing
from nsys_analyzer.runs.timings.words import (
    CONDITIONS,
    DIMENSIONS,
    SPELLINGS,
    phase_from_text,
    status_from_text,
    word,
)
from nsys_analyzer.trace.arrays import Ints

FIGURES = ("iteration", "peak_memory_bytes", "time_stamp")
"""Fields with a figure of the row, beside its times; all others describe its run."""
_MODE_OF = {"forward": "forward", "backward": "forward+backward", "forward+backward": "forward+backward"}
#: Fields that are what their cells say, whatever else the row says.
_AS_THEY_ARE = (
    "context_length", "batch_size", "warmup_steps", "steps", "capture", "attention", "compile", "cuda_graph",
    "optimizer", "message",
)  # fmt: skip


class Layout(NamedTuple):
    """One of the forms of a row: which of its cells say what was timed, and which say the mode of the run.

    ``phase`` and ``mode`` are fields, or ``ran``: what the flags (only forward, with backward, with optimizer) say was
    run. Of several the first that is given counts. A row has this layout where its ``phase`` is given.
    """

    rows: str
    phase: str | None
    mode: tuple[str, ...]


#: For rows with one time: the first layout that fits. A time of no known phase gets that of the file's name.
ONE_TIME = (
    Layout("a row for each phase of a run, or each of its iterations", "phase", ("mode",)),
    Layout("a row for each run, with flags of what was run", "ran", ("mode",)),
    Layout("a row for each run, its mode is what was timed", "mode", ()),
    Layout("a row for each run, and nothing says what was timed", None, ("mode",)),
)
A_TIME_PER_PHASE = Layout(
    "a row for each run or iteration, the headers of its times say the phase", None, ("mode", "ran")
)


@dataclass(frozen=True)
class Runs:
    """The runs that rows describe, each once, in the order in which they appear.

    Attributes:
        codes: for each row of the table, the index of its run.
        timings: for each run and group of time columns, a timing without figures; ``None`` where the group's times are
            not of this run.
        without_time: for each run, the status of a row that holds no time.
        failed: for each run, whether the row says that it did not end well, so that its one time does not count.
    """

    codes: Ints
    timings: dict[Group, list[Timing | None]]
    without_time: list[str]
    failed: list[bool]


def runs_of(rows: Rows, says: tuple[tuple[str, str], ...]) -> Runs:
    """What the rows say of their runs, under the time columns whose headers say this."""
    table, columns = rows.table, rows.columns
    described = [place for field, place in columns.fields.items() if field not in FIGURES]
    codes, first = _distinct(table, (*described, *columns.others))

    def field(name: str) -> list[Any]:
        return list(rows.field(name, dict(says).get(name))[first])

    def pairs(headers: Iterable[tuple[str, int]]) -> list[tuple[tuple[str, str], ...]]:
        own = [[(header, text or "") for text in rows.texts(place)[first]] for header, place in headers]
        return list(zip(*own, strict=True)) if own else [()] * len(first)

    groups = sorted((one for one in columns.groups() if one.says == says), key=lambda one: one.phase is not None)
    dimensions = [field(name) for name in DIMENSIONS]
    models = rows.each("model", _model, first, field("model"), *dimensions, field("vocab_size"), field("capture"))
    flags = [field(name) for name in ("bf16", "fp16", "tf32")]
    precisions = rows.each("mixed_precision", _precision, first, field("precision"), field("mixed_precision"), *flags)
    ran = map(_ran, field("only_forward"), field("with_backward"), field("with_optimizer"))
    wide = Group(None, says) not in groups
    laid_out = [_laid_out(*cells, wide=wide) for cells in zip(field("phase"), ran, field("mode"), strict=True)]
    devices = list(map(_device, field("device"), field("gpu")))
    ended = list(map(_ended, field("oom"), field("status"), field("message")))
    conditions = [name for name in CONDITIONS if name in columns.fields]
    if "model" in conditions:
        conditions = [name for name in conditions if name not in DIMENSIONS]
    said = pairs((columns.header(name), columns.fields[name]) for name in conditions)
    values: dict[str, Iterable[Any]] = {
        "model": [model and model[0] for model in models],
        "model_name": [model[1] if model else "" for model in models],
        **{name: field(name) for name in _AS_THEY_ARE},
        "precision": precisions,
        "mode": [mode for _, mode in laid_out],
        "device": [device for device, _ in devices],
        "gpu": [gpu for _, gpu in devices],
        "said": [(*own, *says) for own in said],
        "conditions": pairs((table.headers[place].strip(), place) for place in columns.others),
    }
    runs: dict[Group, list[Timing | None]] = {group: [] for group in groups}
    for (phase, _), own in zip(laid_out, zip(*values.values(), strict=True), strict=True):
        phases = _phases(groups, phase)
        for group in groups:
            run = dict(zip(values, own, strict=True))
            timing = Timing(**run, phase=phases[group], file=str(table.path)) if group in phases else None
            runs[group].append(timing)
    return Runs(codes, runs, [status for status, _ in ended], [failed for _, failed in ended])


def _distinct(table: Table, places: Iterable[int]) -> tuple[Ints, list[int]]:
    """The rows by the texts of these columns: the number of each row's combination, and the first row of each."""
    import pandas as pd

    codes = np.zeros(len(table.frame), np.int64)
    for place in places:
        own, texts = table.texts(place)
        codes = pd.factorize(codes * len(texts) + own)[0].astype(np.int64)
    return codes, np.unique(codes, return_index=True)[1].tolist()


@lru_cache(SPELLINGS)
def _model(
    name: str | None, d_model: int | None, d_ff: int | None, num_layers: int | None, num_heads: int | None,
    vocab_size: int | None, capture: str | None,
) -> tuple[ModelSize | None, str]:  # fmt: skip
    """The model and the name that the row gives it; a row that names its capture needs no model.

    Raises:
        CellError: no model, one that is unknown, or dimensions that are not those of its name.
    """
    given = (d_model, d_ff, num_layers, num_heads)
    dimensions = (d_model, d_ff, num_layers, num_heads) if d_model and d_ff and num_layers and num_heads else None
    try:
        model = resolve_model(name, dimensions, vocab_size)
    except ConfigurationError as error:
        if dimensions:
            raise CellError(error.message, error.hint, "d_model") from error
        raise CellError(error.message, f"{error.hint}; or give its {', '.join(DIMENSIONS)}") from error
    if model is None and capture:
        return None, ""
    if model is None:
        raise CellError("no model", f"Give its name, or all of {', '.join(DIMENSIONS)}")
    for field, value, known in zip(DIMENSIONS, given, model.dimensions, strict=True):
        if value not in (None, known):
            problem = f"{value} is not {model.name}'s, which is {known}"
            raise CellError(problem, f"Give all of {', '.join(DIMENSIONS)}, or correct it", field)
    return model, name or model.name


@lru_cache(SPELLINGS)
def is_unknown(name: str) -> bool:
    """Whether no known model has this name."""
    try:
        find_model(name)
    except ConfigurationError:
        return True
    return False


@lru_cache(SPELLINGS)
def _precision(
    text: str | None, mixed: str | None, bf16: bool | None, fp16: bool | None, tf32: bool | None
) -> str | None:
    """The precision; mixed precision is bf16 unless a half precision is named, without it fp32.

    Raises:
        CellError: mixed precision that is neither a precision nor a flag.
    """
    flags = {"bf16": bf16, "fp16": fp16, "tf32": tf32}
    precision = precision_from_text(text) if text else next((name for name, flag in flags.items() if flag), None)
    if text and re.search(r"mixed|autocast|amp", text.lower()):
        parts = (precision_from_text(part) for part in word(text).split("_"))
        return next((part for part in parts if part in ("bf16", "fp16")), "bf16")
    if mixed is None:
        return precision or ("fp32" if False in flags.values() else None)
    if (named := precision_from_text(mixed)) in ("fp32", "tf32", "bf16", "fp16"):
        return named
    if flag(mixed):
        return precision if precision in ("bf16", "fp16") else "bf16"
    return precision or "fp32"


def _ran(only_forward: bool | None, backward: bool | None, optimizer: bool | None) -> str | None:
    """The phases that were timed, by the flags: forward alone, with the backward pass, with the optimizer too."""
    if only_forward is None and backward is None:
        return None
    if only_forward or backward is False:
        return "forward"
    return "step" if optimizer else "forward+backward"


@lru_cache(SPELLINGS)
def _laid_out(phase: str | None, ran: str | None, mode: str | None, *, wide: bool) -> tuple[str | None, str | None]:
    """The phase of a row's one time, ``None`` where the row does not say it, and the mode of its run."""
    phases = {
        "phase": phase and (phase_from_text(phase) or phase.lower()),
        "ran": ran,
        "mode": phase_from_text(mode or ""),
    }
    layout = next(layout for layout in ONE_TIME if layout.phase is None or phases[layout.phase])
    said = phases[layout.phase] if layout.phase else None
    cells = {"ran": ran, "mode": mode}
    named = next((cell for field in (A_TIME_PER_PHASE if wide else layout).mode if (cell := cells[field])), None)
    if named is None:
        return said, None
    known = phase_from_text(named)
    return said, _MODE_OF.get(known, "train") if known else mode_from_text(named)


def _phases(groups: list[Group], said: str | None) -> dict[Group, str]:
    """The groups of time columns to read in a row that says this phase, each with the phase it stands for."""
    named = {group: group.phase for group in groups if group.phase is not None}
    lone = next((group for group in groups if group.phase is None), None)
    if lone is None or (said is None and named):
        return named
    return {lone: said or UNKNOWN_PHASE, **{group: phase for group, phase in named.items() if phase != said}}


def _device(device: str | None, gpu: str | None) -> tuple[str | None, str | None]:
    """``cuda`` or ``cpu``, and the GPU's name, which some write in a column ``device``."""
    kind = device.lower().split(":")[0] if device else None
    known = kind in (None, "cuda", "cpu", "mps")
    return (kind, gpu) if known else (None, gpu or device)


@lru_cache(SPELLINGS)
def _ended(oom: bool | None, status: str | None, message: str | None) -> tuple[str, bool]:
    """The status of a row without a time, and whether the row says that the run failed."""
    declared = "oom" if oom else status_from_text(status or "ok")
    if declared == "ok":
        of_message = (status_from_text(message) or "failed") if message and status is None else "missing"
        return of_message, False
    return declared or str(status).lower(), declared is not None


def model_notes(runs: Iterable[Timing]) -> Iterator[str]:
    """Notes on rows that give a known model's name to other dimensions."""
    for model, name in dict.fromkeys((run.model, run.model_name) for run in runs):
        if model and not is_unknown(name) and find_model(name).dimensions != model.dimensions:
            known = find_model(name).name
            yield f"{name} has the dimensions of {model.name} in this file, not those of the known {known}"
