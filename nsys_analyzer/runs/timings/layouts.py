"""The run of each row of a timings table, by the layouts that such tables have."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Set
from functools import lru_cache
from typing import Any, NamedTuple

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
from nsys_analyzer.runs.timings.timing import UNKNOWN_PHASE, Timing
from nsys_analyzer.runs.timings.words import DIMENSIONS, SPELLINGS, phase_from_text, status_from_text, word

_MODE_OF = {"forward": "forward", "backward": "forward+backward", "forward+backward": "forward+backward"}
_OF_THE_MODEL = ("model", *DIMENSIONS, "vocab_size", "capture")
_OF_THE_PRECISION = ("precision", "mixed_precision", "bf16", "fp16", "tf32")
#: Fields that are what their cells say, whatever else the row says.
_AS_THEY_ARE = (
    "context_length", "batch_size", "warmup_steps", "steps", "capture", "attention", "compile", "cuda_graph",
    "optimizer", "message",
)  # fmt: skip


class Layout(NamedTuple):
    """One of the forms of a row: the field that says what was timed, and the field that says the mode of the run.

    ``ran`` stands for what the flags (only forward, with backward, with optimizer) say.
    """

    rows: str
    phase: str | None
    mode: str | None


#: The first layout counts whose ``phase`` the row gives. A time of no known phase gets that of the file's name.
ONE_TIME = (
    Layout("a row for each phase of a run, or each of its iterations", "phase", "mode"),
    Layout("a row for each run, with flags of what was run", "ran", "mode"),
    Layout("a row for each run, its mode is what was timed", "mode", None),
    Layout("a row for each run, and nothing says what was timed", None, "mode"),
)


def describe(cells: Mapping[str, Any], group: Group, beside: Set[str | None], **more: Any) -> Timing | None:
    """The run of a row, without figures; ``None`` where the times of this group of columns are not of its run.

    ``cells`` are the values of its fields, ``beside`` the phases of all groups under the same conditions, ``more``
    further fields of the timing.

    Raises:
        CellError: no model or precision can be made of the row.
    """
    timed, mode = _laid_out(cells.get("phase"), _ran(cells), cells.get("mode"), wide=None not in beside)
    if group.phase is None:
        phase = None if timed is None and len(beside) > 1 else timed or UNKNOWN_PHASE
    else:
        phase = None if timed == group.phase and None in beside else group.phase
    if phase is None:
        return None
    model, name = _model(*map(cells.get, _OF_THE_MODEL))
    device, gpu = _device(cells.get("device"), cells.get("gpu"))
    precision = _precision(*map(cells.get, _OF_THE_PRECISION))
    known = {field: cells[field] for field in _AS_THEY_ARE if field in cells}
    return Timing(model, name, phase=phase, mode=mode, precision=precision, device=device, gpu=gpu, **known, **more)


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
        raise CellError(error.message, f"{error.hint}; or give its {', '.join(DIMENSIONS)}", "model") from error
    if model is None and capture:
        return None, ""
    if model is None:
        raise CellError("no model", f"Give its name, or all of {', '.join(DIMENSIONS)}", "model")
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
    try:
        is_mixed = flag(mixed)
    except CellError as error:
        raise CellError(error.problem, error.hint, "mixed_precision") from error
    if is_mixed:
        return precision if precision in ("bf16", "fp16") else "bf16"
    return precision or "fp32"


def _ran(cells: Mapping[str, Any]) -> str | None:
    """The phases that were timed, by the flags: forward alone, with the backward pass, with the optimizer too."""
    only_forward, backward = cells.get("only_forward"), cells.get("with_backward")
    if only_forward is None and backward is None:
        return None
    if only_forward or backward is False:
        return "forward"
    return "step" if cells.get("with_optimizer") else "forward+backward"


@lru_cache(SPELLINGS)
def _laid_out(phase: str | None, ran: str | None, mode: str | None, *, wide: bool) -> tuple[str | None, str | None]:
    """The phase of a row's one time, ``None`` where the row does not say it, and the mode of its run."""
    phases = {
        "phase": phase and (phase_from_text(phase) or phase.lower()),
        "ran": ran,
        "mode": phase_from_text(mode or ""),
    }
    layout = next(layout for layout in ONE_TIME if layout.phase is None or phases[layout.phase])
    timed = phases[layout.phase] if layout.phase else None
    named = mode or ran if wide else mode if layout.mode else None  # of wide rows headers say the phase
    if named is None:
        return timed, None
    known = phase_from_text(named)
    return timed, _MODE_OF.get(known, "train") if known else mode_from_text(named)


def _device(device: str | None, gpu: str | None) -> tuple[str | None, str | None]:
    """``cuda`` or ``cpu``, and the GPU's name, which some write in a column ``device``."""
    kind = device.lower().split(":")[0] if device else None
    known = kind in (None, "cuda", "cpu", "mps")
    return (kind, gpu) if known else (None, gpu or device)


def ended(cells: Mapping[str, Any]) -> tuple[str, bool]:
    """The status of a row without a time, and whether the row says that the run failed."""
    status, message = cells.get("status"), cells.get("message")
    declared = "oom" if cells.get("oom") else status_from_text(status or "ok")
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
