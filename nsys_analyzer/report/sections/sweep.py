"""A figure of many captures over model, context length and variant: as tables, and drawn."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from nsys_analyzer.analysis.summary.summary import CaptureSummary
from nsys_analyzer.analysis.transformer.models import Configuration
from nsys_analyzer.configuration import Run
from nsys_analyzer.report.evidence import FEW, Evidence, model_of
from nsys_analyzer.report.model import Bars, Block, Cell, Curves, Panels, Table, Unit
from nsys_analyzer.report.tables import Field, table

#: Models and contexts that a variant needs for a table of its own.
_LEAST = 2
_MOST_BARS = 24
#: The unit of a drawn axis, and what a figure is multiplied by.
_AXES: dict[Unit, tuple[str, float]] = {
    "percent": ("%", 100.0), "bytes": ("GiB", 2.0**-30), "count": ("launches", 1.0), "factor": ("ratio", 1.0),
}  # fmt: skip
_Value = Callable[[CaptureSummary], Cell]


class Variant(NamedTuple):
    """The options by which captures differ beside model and context length; those that all share are empty."""

    batch: str
    precision: str
    mode: str
    attention: str
    compiled: str
    graph: str

    def __str__(self) -> str:
        return " ".join(part for part in self if part)

    @property
    def base(self) -> Variant:
        """The variant that this one is a speed-up over: in fp32, not compiled, without a CUDA graph."""
        return self._replace(precision="fp32" if self.precision else "", compiled="", graph="")


class Place(NamedTuple):
    """The place of a capture in a sweep."""

    model: str
    context: int
    variant: Variant


def over_sweep(evidence: Evidence, value: _Value, unit: Unit, title: str, key: str) -> tuple[Block, ...]:
    """A figure of each capture in tables of model and context, by variant, then drawn; nothing of few captures."""
    if len(evidence.captures) <= FEW:
        return ()
    drawing = draw_over_context(evidence.captures, value, unit, title, key)
    return (*_tables(_cells(evidence.captures, value), unit, title), *drawing)


def speed_ups(evidence: Evidence, time: _Value, title: str) -> tuple[Table, ...]:
    """How many times as fast as in fp32 and not compiled each other variant is, at each model and context."""
    cells = _cells(evidence.captures, time)
    factors: dict[Place, Cell] = {}
    for place, own in cells.items():
        base = cells.get(place._replace(variant=place.variant.base))
        if place.variant != place.variant.base and isinstance(own, float) and isinstance(base, float):
            factors[place] = base / own
    return (_by_variant(factors, factors, "factor", title, lambda one: f"{one} over {one.base}"),) if factors else ()


def draw_over_context(
    captures: Sequence[CaptureSummary], value: _Value, unit: Unit, title: str, key: str
) -> tuple[Panels | Bars, ...]:  # fmt: skip
    """A panel for each model with a curve over context for each variant; else, of a few captures, a bar for each."""
    axis, factor = _AXES.get(unit, (unit, 1.0))
    known = {c.title: found * factor for c in captures if isinstance(found := value(c), (int, float))}
    points = {place: known[title] for title, place in _places(captures).items() if title in known}
    panels = tuple((model, _curves(points, model)) for model in dict.fromkeys(place.model for place in points))
    if any(len(curve) > 1 for _, curves in panels for _, curve in curves):
        whole, log_y = f"{title}, by context length", unit in ("ms", "bytes")
        return (Panels(key, whole, panels, "context length, tokens", axis, log_y=log_y),)
    bars = Bars(key, title, tuple(known), ((axis, tuple(known.values())),), axis, "horizontal")
    return (bars,) if 1 < len(known) <= _MOST_BARS else ()


def _curves(points: Mapping[Place, float], model: str) -> Curves:
    """The curve of each variant of a model."""
    curves: dict[Variant, list[tuple[float, float]]] = {place.variant: [] for place in points}
    for place, value in points.items():
        if place.model == model:
            curves[place.variant].append((place.context, value))
    return tuple((str(variant) or "all", tuple(sorted(curve))) for variant, curve in curves.items() if curve)


def _places(captures: Sequence[CaptureSummary]) -> dict[str, Place]:
    """Capture title to its place; empty where a context is unknown, or two captures have the same place."""
    parts = {capture.title: _parts(capture) for capture in captures}
    shared = [len(set(values)) == 1 for values in zip(*parts.values(), strict=True)]
    places: dict[str, Place] = {}
    for capture in captures:
        known = capture.configuration or Configuration()
        if known.context_length is None:
            return {}
        own = ("" if same else part for part, same in zip(parts[capture.title], shared, strict=True))
        places[capture.title] = Place(model_of(capture), known.context_length, Variant(*own))
    return places if len(set(places.values())) == len(captures) else {}


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


def _cells(captures: Sequence[CaptureSummary], value: _Value) -> dict[Place, Cell]:
    """The figures by place; none where fewer than two captures have one, or their places are not known."""
    places = _places(captures)
    cells: dict[Place, Cell] = {places[c.title]: cell for c in captures if places and (cell := value(c)) is not None}
    return cells if len(cells) >= _LEAST else {}


def _tables(cells: Mapping[Place, Cell], unit: Unit, title: str) -> tuple[Table, ...]:
    """By model and context of each variant that has several of both, then the variants side by side."""
    variants = dict.fromkeys(place.variant for place in cells)
    wide = [variant for variant in variants if _is_wide(cells, variant)]
    narrow = [place for place in cells if place.variant not in wide]
    tables = [_by_context(cells, variant, unit, title) for variant in wide]
    return (*tables, *([_by_variant(cells, narrow, unit, title)] if narrow else []))


def _is_wide(cells: Mapping[Place, Cell], variant: Variant) -> bool:
    own = [place for place in cells if place.variant == variant]
    return min(len({place.model for place in own}), len({place.context for place in own})) >= _LEAST


def _by_context(cells: Mapping[Place, Cell], variant: Variant, unit: Unit, title: str) -> Table:
    own = [place for place in cells if place.variant == variant]

    def at(context: int) -> Field[str]:
        return Field(f"context {context:,}", unit, lambda model: cells.get(Place(model, context, variant)))

    fields: list[Field[str]] = [Field("model", "text", lambda model: model)]
    fields += map(at, sorted({place.context for place in own}))
    return table(
        fields, dict.fromkeys(place.model for place in own), f"{title}{f', {variant}' if any(variant) else ''}:"
    )


def _by_variant(
    cells: Mapping[Place, Cell], chosen: Sequence[Place] | Mapping[Place, Cell], unit: Unit, title: str,
    name: Callable[[Variant], str] = str,
) -> Table:  # fmt: skip
    """The models and contexts of the chosen places, with every variant that they have."""

    def of(variant: Variant) -> Field[tuple[str, int]]:
        return Field(name(variant) or "otherwise", unit, lambda row: cells.get(Place(*row, variant)))

    fields: list[Field[tuple[str, int]]] = [
        Field("model", "text", lambda row: row[0]),
        Field("context", "count", lambda row: row[1]),
        *map(of, dict.fromkeys(place.variant for place in cells)),
    ]
    rows = dict.fromkeys((place.model, place.context) for place in chosen)
    return table(fields, rows, f"{title}, by variant:", names=2)
