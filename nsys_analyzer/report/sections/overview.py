"""Several captures side by side: by model and context length where these tell them, else a row of each."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from textwrap import shorten
from typing import NamedTuple

from nsys_analyzer.analysis.ranges.phases import STEP
from nsys_analyzer.analysis.summary.summary import CaptureSummary
from nsys_analyzer.analysis.transformer.models import Configuration
from nsys_analyzer.configuration import Run
from nsys_analyzer.report.evidence import status_of
from nsys_analyzer.report.model import (
    Answer,
    Bars,
    Block,
    Cell,
    Choice,
    Curves,
    Details,
    Listing,
    Panels,
    Paragraph,
    Section,
    Table,
    Unit,
)
from nsys_analyzer.report.sections.decision import working_share
from nsys_analyzer.report.sections.findings import saving, to_fix
from nsys_analyzer.report.sections.kernels import top_kernel
from nsys_analyzer.report.sections.limits import mfu_of_step
from nsys_analyzer.report.tables import Field, table
from nsys_analyzer.report.units import milliseconds_between
from nsys_analyzer.text import phrase

#: Models and contexts that a variant needs for a table of its own.
_LEAST = 2
_MOST_BARS = 24
#: Letters of a message.
_MESSAGE = 200
#: How captures end well.
_WELL = ("ok", "no_kernels", "not_profiled")
#: The unit of a drawn axis, and what a figure is multiplied by.
_AXES: dict[Unit, tuple[str, float]] = {
    "percent": ("%", 100.0), "bytes": ("GiB", 2.0**-30), "count": ("launches", 1.0), "factor": ("ratio", 1.0),
}  # fmt: skip
_Value = Callable[[CaptureSummary], Cell]


class Measure(NamedTuple):
    """A figure of each capture; ``key`` names its drawing, empty where none is made."""

    title: str
    unit: Unit
    value: _Value
    key: str = ""


def overview(captures: Sequence[CaptureSummary], labels: Mapping[str, str]) -> Section:
    """The captures by model and context length, else in rows; then what is drawn of them."""
    measures, places = _measures(labels), _places(captures)
    grid = tuple(found for one in measures for found in _tables(captures, places, one))
    speed = _speed_ups(captures, places, measures[0])
    said = (_in_short(speed) if speed else "", _most_often(captures), _how_many_ended(captures))
    blocks: list[Block] = [Answer(text) for text in said if text]
    blocks += [Choice(grid)] if grid else []
    blocks += [speed] if speed else []
    rows = table(_fields(labels), captures)
    blocks.append(Details(f"All {len(captures)} captures", (rows,)) if grid else rows)
    if known := _how_steps_are_known(captures):
        blocks.append(Paragraph(known))
    if ended := _how_they_ended(captures):
        blocks.append(ended)
    drawn = [figure for one in measures for figure in _draw(captures, places, one)]
    blocks += drawn[:1]
    blocks += [Details("More figures over the sweep", tuple(drawn[1:]))] if drawn[1:] else []
    return Section("overview", "", tuple(blocks))


def _measures(labels: Mapping[str, str]) -> tuple[Measure, ...]:
    def kernel(capture: CaptureSummary) -> Cell:
        leader = top_kernel(capture)
        return labels[leader.kernel.name] if leader else None

    return (
        Measure("Step ms", "ms", step_ms, "step"),
        Measure("What to do first", "text", lambda c: found[0].title if (found := to_fix(c)) else None),
        Measure("Saves ms", "ms", lambda c: saving(found[0]) if (found := to_fix(c)) else None),
        Measure("GPU works", "percent", working_share, "gpu-busy"),
        Measure("MFU", "percent", mfu_of_step, "mfu"),
        Measure("Forward ms", "ms", lambda c: _phase_ms(c, "forward"), "forward"),
        Measure("Backward ms", "ms", lambda c: _phase_ms(c, "backward")),
        Measure("Matmul's share of kernel time", "percent", _matmul, "matmul"),
        Measure("Attention: matmul ÷ softmax time", "factor", _ratio, "matmul-to-softmax"),
        Measure("Peak memory", "bytes", lambda c: c.unprofiled.peak_memory_bytes if c.unprofiled else None, "memory"),
        Measure("Top kernel", "code", kernel),
    )


def step_ms(capture: CaptureSummary) -> Cell:
    """The one length of a step: without the profiler where that is known; of a run that failed, how it ended."""
    step, timed = capture.step, capture.unprofiled
    if timed and (ms := timed.typical_ms(STEP)):
        return ms
    if step and (step.unprofiled_ms or not step.is_pass):
        return step.said_ms
    return None if capture.status in _WELL else status_of(capture.status)


def _phase_ms(capture: CaptureSummary, name: str) -> float | None:
    """The time of a phase: without the profiler where it was timed so."""
    phase = capture.phase(name)
    timed = capture.unprofiled.typical_ms(name) if capture.unprofiled else None
    return timed if timed is not None else phase.wall_ms.median if phase else None


def _matmul(capture: CaptureSummary) -> float | None:
    shares = capture.matmul.of_all if capture.matmul else None
    return shares.matmul if shares else None


def _ratio(capture: CaptureSummary) -> float | None:
    return capture.attention.runtime_ratio if capture.attention else None


def _fields(labels: Mapping[str, str]) -> tuple[Field[CaptureSummary], ...]:
    capture: Field[CaptureSummary] = Field("capture", "text", lambda c: c.title)
    return (capture, *(Field(one.title, one.unit, one.value) for one in _measures(labels)))


def _how_steps_are_known(captures: Sequence[CaptureSummary]) -> str:
    """Which lengths of steps are not measured without the profiler; empty where all are."""
    count: dict[str, int] = {}
    for one in captures:
        timed = one.unprofiled and one.unprofiled.typical_ms(STEP)
        if isinstance(step_ms(one), float):
            estimated = one.step is not None and one.step.unprofiled_ms is not None
            words = "measured without" if timed else "estimated without" if estimated else "under"
            count[words] = count.get(words, 0) + 1
    if not count or list(count) == ["measured without"]:
        return ""
    said = ", ".join(
        f"{words} the profiler{f' ({number})' if len(count) > 1 else ''}" for words, number in count.items()
    )
    return f"Steps are {said}; phases are profiled, unless they were timed without it."


def _most_often(captures: Sequence[CaptureSummary]) -> str:
    """The finding that is first in most captures, and what it saves there; empty without one."""
    first = [found[0] for one in captures if (found := to_fix(one))]
    if not first:
        return ""
    (title, count), *_ = Counter(finding.title for finding in first).most_common(1)
    those = [finding for finding in first if finding.title == title]
    saves = milliseconds_between(min(one.saves_ms_low for one in those), max(one.saves_ms_high for one in those))
    analyzed = sum(one.diagnosis is not None for one in captures)
    return f"Do first in {count} of {analyzed} profiled captures: {title} (saves {saves} a step)."


def _how_many_ended(captures: Sequence[CaptureSummary]) -> str:
    """How many captures ended otherwise than well, and which; empty where all ended well."""
    titles: dict[str, list[str]] = {}
    for one in captures:
        if one.status not in _WELL:
            titles.setdefault(status_of(one.status), []).append(one.title)
    said = (f"{shorten(', '.join(names), _MESSAGE)} ({words})" for words, names in titles.items())
    count = sum(map(len, titles.values()))
    return f"Not finished, {count} of {len(captures)}: {'; '.join(said)}." if titles else ""


def _how_they_ended(captures: Sequence[CaptureSummary]) -> Listing | None:
    """What was said of captures that ended otherwise than well, each message once; "About" has the long ones whole."""
    names_of: dict[tuple[str, str], list[str]] = {}
    for one in captures:
        if one.status not in (*_WELL, "oom") and one.message:  # that memory ran out says all
            names_of.setdefault((one.status, " ".join(one.message.split())), []).append(one.title)
    lines = (
        phrase("{} ({}): {}", ", ".join(names), status_of(status), shorten(message, _MESSAGE, placeholder=" …"))
        for (status, message), names in names_of.items()
    )
    return Listing(tuple(lines)) if names_of else None


# --- places in a sweep


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


#: Capture title to its place.
_Places = Mapping[str, Place]


def _places(captures: Sequence[CaptureSummary]) -> _Places:
    """The place of each capture; empty where a context is unknown, or two captures have the same place."""
    parts = {capture.title: _parts(capture) for capture in captures}
    shared = [len(set(values)) == 1 for values in zip(*parts.values(), strict=True)]
    places: dict[str, Place] = {}
    for capture in captures:
        known = capture.configuration or Configuration()
        if known.context_length is None or known.model is None:
            return {}
        own = ("" if same else part for part, same in zip(parts[capture.title], shared, strict=True))
        places[capture.title] = Place(known.model.name, known.context_length, Variant(*own))
    wide = max(len({place.context for place in places.values()}), len({place.model for place in places.values()}))
    return places if wide >= _LEAST and len(set(places.values())) == len(captures) else {}


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


def _cells(captures: Sequence[CaptureSummary], places: _Places, value: _Value) -> dict[Place, Cell]:
    """The figures by place; none where fewer than two captures have one, or their places are not known."""
    cells: dict[Place, Cell] = {places[c.title]: cell for c in captures if places and (cell := value(c)) is not None}
    return cells if len(cells) >= _LEAST else {}


def _tables(captures: Sequence[CaptureSummary], places: _Places, measure: Measure) -> tuple[Table, ...]:
    """By model and context of each variant that has several of both, then the variants side by side."""
    cells = _cells(captures, places, measure.value)
    variants = dict.fromkeys(place.variant for place in cells)
    wide = [variant for variant in variants if _is_wide(cells, variant)]
    narrow = [place for place in cells if place.variant not in wide]
    found = [_by_context(cells, variant, measure) for variant in wide]
    return (*found, *([_by_variant(cells, narrow, measure.unit, measure.title)] if narrow else []))


def _is_wide(cells: Mapping[Place, Cell], variant: Variant) -> bool:
    own = [place for place in cells if place.variant == variant]
    return len({place.context for place in own}) >= _LEAST


def _by_context(cells: Mapping[Place, Cell], variant: Variant, measure: Measure) -> Table:
    own = [place for place in cells if place.variant == variant]

    def at(context: int) -> Field[str]:
        return Field(f"context {context:,}", measure.unit, lambda model: cells.get(Place(model, context, variant)))

    fields: list[Field[str]] = [Field("model", "text", lambda model: model)]
    fields += map(at, sorted({place.context for place in own}))
    title = f"{measure.title}{f', {variant}' if any(variant) else ''}"
    return table(fields, dict.fromkeys(place.model for place in own), f"{title}:")


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


def _speed_ups(captures: Sequence[CaptureSummary], places: _Places, measure: Measure) -> Table | None:
    """How many times as fast as in fp32 and not compiled each other variant is, at each model and context."""
    cells = _cells(captures, places, measure.value)
    factors: dict[Place, Cell] = {}
    for place, own in cells.items():
        base = cells.get(place._replace(variant=place.variant.base))
        if place.variant != place.variant.base and isinstance(own, float) and isinstance(base, float):
            factors[place] = base / own
    title = "Speed-up of the step"
    return _by_variant(factors, factors, "factor", title, lambda one: f"{one} over {one.base}") if factors else None


def _in_short(speed: Table) -> str:
    """The least and the most of each speed-up: "Speed-up of a step: bf16 train over fp32 train 2.1× to 4.0×"."""
    said = []
    for place, column in enumerate(speed.columns[speed.names :], speed.names):
        factors = sorted(cell for row in speed.rows if isinstance(cell := row[place], float))
        between = " to ".join(dict.fromkeys(f"{factor:.1f}×" for factor in (factors[0], factors[-1])))
        said.append(f"{column.title} {between}")
    return f"Speed-up of a step: {', '.join(said)}."


def _draw(captures: Sequence[CaptureSummary], places: _Places, measure: Measure) -> tuple[Panels | Bars, ...]:
    """A panel for each model with a curve over context for each variant; else, of a few captures, a bar for each."""
    if not measure.key:
        return ()
    axis, factor = _AXES.get(measure.unit, (measure.unit, 1.0))
    known = {c.title: found * factor for c in captures if isinstance(found := measure.value(c), (int, float))}
    points = {place: known[title] for title, place in places.items() if title in known}
    panels = tuple((model, _curves(points, model)) for model in dict.fromkeys(place.model for place in points))
    if any(len(curve) > 1 for _, curves in panels for _, curve in curves):
        title, log_y = f"{measure.title}, by context length", measure.unit in ("ms", "bytes")
        return (Panels(measure.key, title, panels, "context length, tokens", axis, log_y=log_y),)
    bars = Bars(measure.key, measure.title, tuple(known), ((axis, tuple(known.values())),), axis, "horizontal")
    return (bars,) if 1 < len(known) <= _MOST_BARS else ()


def _curves(points: Mapping[Place, float], model: str) -> Curves:
    """The curve of each variant of a model."""
    curves: dict[Variant, list[tuple[float, float]]] = {place.variant: [] for place in points}
    for place, value in points.items():
        if place.model == model:
            curves[place.variant].append((place.context, value))
    return tuple((str(variant) or "all", tuple(sorted(curve))) for variant, curve in curves.items() if curve)
