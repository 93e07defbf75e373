"""The unprofiled time of a step as a matrix of models and contexts, as a reader of a sweep wants it first."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from nsys_analyzer.analysis.summary import CaptureSummary
from nsys_analyzer.questions.evidence import ended, model_of, variants
from nsys_analyzer.report.model import Bars, Cell, Column, Table

_LEAST = 2
#: Time by model, context length and variant.
_Times = dict[tuple[str, int, str], Cell]


@dataclass(frozen=True)
class Matrix:
    """Times of models, as a table and as a figure."""

    table: Table
    figure: Bars


def sweep_times(captures: Sequence[CaptureSummary]) -> tuple[Matrix, ...]:
    """Model by context of every variant that has two of both, and model by variant at the contexts of the others.

    A variant is what else tells captures apart, such as ``bf16 train``. Nothing where no variant has two models and
    two contexts, nothing was timed, or captures cannot be told apart by these three.
    """
    keys = _keys(captures)
    phase = "step" if any(c.unprofiled and c.unprofiled.typical_ms("step") for c in captures) else "forward"
    times = {key: _time(capture, phase) for key, capture in zip(keys, captures, strict=True)} if keys else {}
    wide = [variant for variant in _distinct(times, 2) if _is_wide(times, variant)]
    if not wide or len(times) < len(captures) or not any(times.values()):
        return ()
    narrow = [variant for variant in _distinct(times, 2) if variant not in wide]
    contexts = sorted({context for _, context, variant in times if variant in narrow})
    return (
        *(_by_context(times, phase, variant) for variant in wide),
        *(_by_variant(times, phase, context) for context in contexts),
    )


def _keys(captures: Sequence[CaptureSummary]) -> list[tuple[str, int, str]]:
    """Model, context and variant of each capture; empty where one has no context."""
    contexts = [capture.configuration.context_length if capture.configuration else None for capture in captures]
    others = variants(captures)
    known = [context for context in contexts if context is not None]
    if len(known) < len(captures):
        return []
    return [(model_of(c), context, others[c.title]) for c, context in zip(captures, known, strict=True)]


def _time(capture: CaptureSummary, phase: str) -> Cell:
    """The typical time of a phase in ms, of a run without any the word for how it ended."""
    unprofiled = capture.unprofiled
    if unprofiled is None:
        return None
    return unprofiled.typical_ms(phase) or ended(unprofiled)


def _distinct(times: _Times, part: int) -> list[str]:
    return list(dict.fromkeys(str(key[part]) for key in times))


def _is_wide(times: _Times, variant: str) -> bool:
    own = [key for key in times if key[2] == variant]
    return min(len({key[0] for key in own}), len({key[1] for key in own})) >= _LEAST


def _by_context(times: _Times, phase: str, variant: str) -> Matrix:
    own = {(model, str(context)): time for (model, context, other), time in times.items() if other == variant}
    contexts = sorted({context for _, context, other in times if other == variant})
    return _matrix(own, {str(c): f"context {c:,}" for c in contexts}, phase, variant)


def _by_variant(times: _Times, phase: str, context: int) -> Matrix:
    own = {(model, variant): time for (model, other, variant), time in times.items() if other == context}
    columns = {variant: variant or "otherwise" for _, variant in own}
    return _matrix(own, columns, phase, f"context {context:,}")


def _matrix(times: dict[tuple[str, str], Cell], columns: dict[str, str], phase: str, of: str) -> Matrix:
    """A row for each model, a column for each of the keys under its title."""
    models = dict.fromkeys(model for model, _ in times)
    rows = {model: tuple(times.get((model, key)) for key in columns) for model in models}
    title = f"Unprofiled ms of one {phase}" + (f", {of}" if of else "")
    table = Table(
        (Column("model"), *(Column(title, "ms") for title in columns.values())),
        tuple((model, *cells) for model, cells in rows.items()),
        f"{title}:",
    )
    drawn = {m: tuple(c if isinstance(c, float) else None for c in cells) for m, cells in rows.items()}
    drawn = {model: values for model, values in drawn.items() if any(values)}
    series = tuple((name, tuple(values[i] for values in drawn.values())) for i, name in enumerate(columns.values()))
    key = re.sub(r"[^\w.]+", "-", f"unprofiled-times {of}".strip())
    return Matrix(table, Bars(key, title, tuple(drawn), series, f"ms per {phase}"))
