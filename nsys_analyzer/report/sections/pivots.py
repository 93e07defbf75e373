"""A figure of many captures as tables of model, context length and variant, as a reader of a sweep wants it first."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from nsys_analyzer.analysis.summary.summary import CaptureSummary
from nsys_analyzer.analysis.transformer.models import Configuration
from nsys_analyzer.configuration import Run
from nsys_analyzer.report.model import Cell, Table, Unit
from nsys_analyzer.report.sections.evidence import model_of
from nsys_analyzer.report.tables import Field, table
from nsys_analyzer.text import Words

#: Models and contexts that a variant needs for a table of its own.
_LEAST = 2
_PLAIN = "fp32"


@dataclass(frozen=True)
class Variant:
    """What tells captures apart beside model and context length; parts that all captures share are empty."""

    batch: str
    precision: str
    mode: str
    attention: str
    compiled: str
    graph: str

    def __str__(self) -> str:
        parts = (self.batch, self.precision, self.mode, self.attention, self.compiled, self.graph)
        return " ".join(part for part in parts if part)

    @property
    def base(self) -> Variant:
        """The variant that this one is a speed-up over: in fp32, not compiled, without a CUDA graph."""
        return replace(self, precision=_PLAIN if self.precision else "", compiled="", graph="")


@dataclass(frozen=True)
class Key:
    """The place of a capture among those of a sweep."""

    model: str
    context: int
    variant: Variant


def variants_of(captures: Sequence[CaptureSummary]) -> dict[str, Variant]:
    """Capture title to its variant."""
    parts = {capture.title: _parts(capture) for capture in captures}
    shared = [len(set(values)) == 1 for values in zip(*parts.values(), strict=True)]
    return {
        title: Variant(*("" if same else part for part, same in zip(own, shared, strict=True)))
        for title, own in parts.items()
    }


def keys_of(captures: Sequence[CaptureSummary]) -> dict[str, Key]:
    """Capture title to its place; empty where a context is unknown, or two captures have the same place."""
    variants = variants_of(captures)
    keys: dict[str, Key] = {}
    for capture in captures:
        context = capture.configuration.context_length if capture.configuration else None
        if context is None:
            return {}
        keys[capture.title] = Key(model_of(capture), context, variants[capture.title])
    return keys if len(set(keys.values())) == len(captures) else {}


def _parts(capture: CaptureSummary) -> tuple[str, ...]:
    known, run = capture.configuration or Configuration(), capture.run or Run()
    return (
        f"batch {known.batch_size}" if known.batch_size else "",
        known.precision or "",
        known.mode or "",
        known.attention or "",
        "compiled" if run.compile else "",
        "CUDA graph" if run.cuda_graph else "",
    )


def pivots(
    captures: Sequence[CaptureSummary], figure: Callable[[CaptureSummary], Cell], unit: Unit, title: str
) -> tuple[Table, ...]:  # fmt: skip
    """A figure by model and context of each variant that has several of both, and the other variants side by side.

    Args:
        captures: the captures of the report.
        figure: the figure of a capture, None where it has none.
        unit: the figure's.
        title: what it is, the start of the captions.

    Returns:
        Nothing where fewer than two captures have the figure, or their places are not known.
    """
    cells = _cells(captures, figure)
    wide = [variant for variant in dict.fromkeys(key.variant for key in cells) if _is_wide(cells, variant)]
    tables = [_by_context(cells, variant, unit, title) for variant in wide]
    narrow = dict.fromkeys((key.model, key.context) for key in cells if key.variant not in wide)
    if narrow:
        tables.append(_by_variant(cells, tuple(narrow), unit, title))
    return tuple(tables)


def speed_ups(captures: Sequence[CaptureSummary], time: Callable[[CaptureSummary], Cell], title: str) -> Table | None:
    """How many times as fast as in fp32 and not compiled each other variant is, at each model and context.

    Args:
        captures: the captures of the report.
        time: the time of a capture, None where it has none.
        title: what is timed, the end of the caption.
    """
    cells = _cells(captures, time)
    factors: dict[Key, float] = {}
    for key, own in cells.items():
        base = cells.get(replace(key, variant=key.variant.base))
        if key.variant != key.variant.base and isinstance(own, float) and isinstance(base, float):
            factors[key] = base / own

    def of(variant: Variant) -> Field[tuple[str, int]]:
        name = f"{variant} over {variant.base}"
        return Field(name, "factor", lambda place: factors.get(Key(*place, variant)))

    places = tuple(dict.fromkeys((key.model, key.context) for key in factors))
    fields = [of(variant) for variant in dict.fromkeys(key.variant for key in factors)]
    return _of_places(places, fields, f"Speed-up of {title}:") if factors else None


def _cells(captures: Sequence[CaptureSummary], figure: Callable[[CaptureSummary], Cell]) -> dict[Key, Cell]:
    """The figures by place; none where fewer than two captures have one, or their places are not known."""
    keys = keys_of(captures)
    cells: dict[Key, Cell] = {keys[c.title]: cell for c in captures if keys and (cell := figure(c)) is not None}
    return cells if len(cells) >= _LEAST else {}


def _is_wide(cells: Mapping[Key, Cell], variant: Variant) -> bool:
    own = [key for key in cells if key.variant == variant]
    return min(len({key.model for key in own}), len({key.context for key in own})) >= _LEAST


def _by_context(cells: Mapping[Key, Cell], variant: Variant, unit: Unit, title: str) -> Table:
    own = [key for key in cells if key.variant == variant]

    def at(context: int) -> Field[str]:
        return Field(f"context {context:,}", unit, lambda model: cells.get(Key(model, context, variant)))

    fields: tuple[Field[str], ...] = (
        Field("model", "text", lambda model: model),
        *map(at, sorted({key.context for key in own})),
    )
    said = f", {variant}" if str(variant) else ""
    return table(fields, dict.fromkeys(key.model for key in own), f"{title}{said}:")


def _by_variant(cells: Mapping[Key, Cell], places: tuple[tuple[str, int], ...], unit: Unit, title: Words) -> Table:
    def of(variant: Variant) -> Field[tuple[str, int]]:
        return Field(str(variant) or "otherwise", unit, lambda place: cells.get(Key(*place, variant)))

    return _of_places(places, [of(variant) for variant in dict.fromkeys(key.variant for key in cells)], f"{title}:")


def _of_places(places: tuple[tuple[str, int], ...], fields: Sequence[Field[tuple[str, int]]], caption: str) -> Table:
    names: tuple[Field[tuple[str, int]], ...] = (
        Field("model", "text", lambda place: place[0]),
        Field("context", "count", lambda place: place[1]),
    )
    return table((*names, *fields), places, caption, names=2)
