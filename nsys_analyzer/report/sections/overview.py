"""Several captures side by side: by model and context length where these tell them, else a row of each."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from textwrap import shorten
from typing import NamedTuple

from nsys_analyzer.analysis.ranges.phases import STEP
from nsys_analyzer.analysis.summary.summary import CaptureSummary
from nsys_analyzer.analysis.transformer.models import Configuration
from nsys_analyzer.configuration import Run
from nsys_analyzer.report.evidence import peak_memory, status_of
from nsys_analyzer.report.model import (
    Answer,
    Block,
    Cell,
    Details,
    Field,
    Lines,
    Paragraph,
    Section,
    Table,
    Unit,
    make_table,
)
from nsys_analyzer.report.sections.findings import findings_of, saving_cell
from nsys_analyzer.report.sections.kernels import top_kernel
from nsys_analyzer.report.sections.limits import mfu_of_step
from nsys_analyzer.report.units import format_ms_range

#: Models and contexts that a variant needs for a table of its own.
_LEAST = 2
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
    step, *others = (_cells(captures, places, one.value) for one in measures)
    faster = _speed_ups(step)
    capture: Field[CaptureSummary] = Field("capture", "text", lambda c: c.title)
    rows = make_table((capture, *(Field(one.title, one.unit, one.value) for one in measures)), captures)
    folded = [_grid(cells, one.title, one.unit) for cells, one in zip(others, measures[1:], strict=True) if cells]
    folded += [_grid(faster, "Speed-up of the step", "factor")] if faster else []
    folded += [rows] if step else []
    said = (_in_short(faster), _most_often(captures), _how_many_ended(captures))
    first = _grid(step, measures[0].title, measures[0].unit) if step else rows
    blocks: list[Block] = [*(Answer(text) for text in said if text), first]
    if known := _how_steps_are_known(captures):
        blocks.append(Paragraph(known))
    drawn = [figure for one in measures for figure in _draw(captures, places, one)]
    blocks += drawn[:1]
    blocks += [Details("More of the sweep, and each capture in a row", tuple(folded))] if folded else []
    blocks += [Details("More figures over the sweep", tuple(drawn[1:]))] if drawn[1:] else []
    return Section("overview", "", tuple(blocks))


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


def _measures(labels: Mapping[str, str]) -> tuple[Measure, ...]:
    def kernel(capture: CaptureSummary) -> Cell:
        leader = top_kernel(capture)
        return labels[leader.kernel.name] if leader else None

    return (
        Measure("Step ms", "ms", step_ms, "step"),
        Measure("What to do first", "text", lambda c: found[0].title if (found := findings_of(c)) else None),
        Measure("Saves ms", "ms", lambda c: saving_cell(found[0]) if (found := findings_of(c)) else None),
        Measure("GPU works", "percent", lambda c: c.step.busy_share if c.step else None, "gpu-busy"),
        Measure("MFU", "percent", mfu_of_step, "mfu"),
        Measure("Forward ms", "ms", lambda c: _phase_ms(c, "forward"), "forward"),
        Measure("Backward ms", "ms", lambda c: _phase_ms(c, "backward")),
        Measure(
            "Matmul's share of kernel time",
            "percent",
            lambda c: c.matmul.overall.matmul if c.matmul and c.matmul.overall else None,
            "matmul",
        ),
        Measure(
            "Attention: matmul ÷ softmax time",
            "factor",
            lambda c: c.attention.runtime_ratio if c.attention else None,
            "matmul-to-softmax",
        ),
        Measure("Peak memory", "bytes", peak_memory, "memory"),
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


def _most_often(captures: Sequence[CaptureSummary]) -> str:
    """The finding that is first in most captures, and what it saves there; empty without one."""
    first = [found[0] for one in captures if (found := findings_of(one))]
    if not first:
        return ""
    (title, count), *_ = Counter(finding.title for finding in first).most_common(1)
    those = [finding for finding in first if finding.title == title]
    saves = format_ms_range(min(one.saves_ms_low for one in those), max(one.saves_ms_high for one in those))
    analyzed = sum(one.diagnosis is not None for one in captures)
    return f"Do first in {count} of {analyzed} profiled captures: {title} (saves {saves} a step)."


def _how_many_ended(captures: Sequence[CaptureSummary]) -> str:
    """How many captures ended otherwise than well, and which; empty where all ended well. "About" has the messages."""
    ended = [f"{one.title} ({status_of(one.status, one.message or '')})" for one in captures if one.status not in _WELL]
    if not ended:
        return ""
    names = shorten(", ".join(ended) + ".", _MESSAGE, placeholder=" …")
    return f"Not finished, {len(ended)} of {len(captures)}: {names}"


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
    variant: Variant | str


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


def _grid(cells: Mapping[Place, Cell], title: str, unit: Unit) -> Table:
    """A row for each variant of each model, a column for each context length."""

    def at(context: int) -> Field[tuple[str, Variant | str]]:
        return Field(f"{context:,}", unit, lambda row: cells.get(Place(row[0], context, row[1])))

    models = list(dict.fromkeys(place.model for place in cells))
    rows = dict.fromkeys((place.model, place.variant) for place in cells)
    fields: list[Field[tuple[str, Variant | str]]] = [
        Field("model", "text", lambda row: row[0]),
        Field("variant", "text", lambda row: str(row[1]) or None, fills=bool),
        *map(at, sorted({place.context for place in cells})),
    ]
    return make_table(fields, sorted(rows, key=lambda row: models.index(row[0])), f"{title}, by context length:")


def _speed_ups(cells: Mapping[Place, Cell]) -> dict[Place, float]:
    """How many times as fast as in fp32 and not compiled each other variant is, at each model and context."""
    factors: dict[Place, float] = {}
    for place, own in cells.items():
        base = place.variant.base if isinstance(place.variant, Variant) else place.variant
        slow = cells.get(place._replace(variant=base))
        if base != place.variant and isinstance(own, float) and isinstance(slow, float):
            factors[place._replace(variant=f"{place.variant} over {base}")] = slow / own
    return factors


def _in_short(factors: Mapping[Place, float]) -> str:
    """The least and the most of each speed-up: "Speed-up of a step: bf16 train over fp32 train 2.1× to 4.0×"."""
    said = []
    for name in dict.fromkeys(place.variant for place in factors):
        own = [factor for place, factor in factors.items() if place.variant == name]
        said.append(f"{name} {' to '.join(dict.fromkeys(f'{end:.1f}×' for end in (min(own), max(own))))}")
    return f"Speed-up of a step: {', '.join(said)}." if said else ""


def _draw(captures: Sequence[CaptureSummary], places: _Places, measure: Measure) -> Iterator[Lines]:
    """A curve over context for each variant of a model that has several of these."""
    axis, factor = _AXES.get(measure.unit, (measure.unit, 1.0))
    curves: dict[str, list[tuple[float, float | None]]] = {}
    for capture in captures if places and measure.key else ():
        place, value = places[capture.title], measure.value(capture)
        if isinstance(value, (int, float)):
            curves.setdefault(f"{place.model} {place.variant}".strip(), []).append((place.context, value * factor))
    if series := tuple((name, tuple(sorted(curve))) for name, curve in curves.items() if len(curve) > 1):
        title, log_y = f"{measure.title}, by context length", measure.unit in ("ms", "bytes")
        yield Lines(measure.key, title, series, "context length, tokens", axis, log_x=True, log_y=log_y)
