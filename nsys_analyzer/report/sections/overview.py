"""Reports several captures side by side: by model and context length if these identify a capture, else one per row."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from textwrap import shorten
from typing import NamedTuple

from nsys_analyzer.analysis.summary.summary import CaptureSummary
from nsys_analyzer.analysis.transformer.models import Configuration
from nsys_analyzer.configuration import Run
from nsys_analyzer.report.evidence import find_peak_memory, format_status
from nsys_analyzer.report.facts import describe_message
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
from nsys_analyzer.report.sections.findings import get_findings, make_saving_cell
from nsys_analyzer.report.sections.kernels import find_top_kernel
from nsys_analyzer.report.sections.limits import find_step_mfu
from nsys_analyzer.report.units import format_ms_range
from nsys_analyzer.text import join_names, plural
from nsys_analyzer.trace.phase_names import STEP

#: A table by context length needs this many models or context lengths, and this many captures with the figure.
_MIN_GRID_SIZE = 2
#: The most characters of the list of captures that did not finish.
_MAX_LIST_LENGTH = 200
#: The statuses of captures that finished.
_FINISHED_STATUSES = ("ok", "no_kernels", "not_profiled")
#: The label of a curve's axis by the unit of the figure, and the factor that converts the figure to this label.
_AXIS_UNITS: dict[Unit, tuple[str, float]] = {
    "percent": ("%", 100.0), "bytes": ("GiB", 2.0**-30), "count": ("launches", 1.0), "factor": ("ratio", 1.0),
}  # fmt: skip
_CellFunction = Callable[[CaptureSummary], Cell]


class Measure(NamedTuple):
    """A figure that tables and charts of a sweep show for each capture.

    ``key`` is the name of the figure's drawing, and is empty if the figure is not drawn.
    """

    title: str
    unit: Unit
    cell: _CellFunction
    key: str = ""


def overview_section(captures: Sequence[CaptureSummary], labels: Mapping[str, str]) -> Section:
    """Returns the section with a table by model and context length, or with a row for each capture, and with drawings.

    Args:
        captures: the captures.
        labels: the short label of each kernel name.
    """
    measures, places = _list_measures(labels), _find_places(captures)
    step_cells, *other_cells = (_cells_by_place(captures, places, measure.cell) for measure in measures)
    speed_ups = _find_speed_ups(step_cells)
    title: Field[CaptureSummary] = Field("capture", "text", lambda capture: capture.title)
    fields = (title, *(Field(measure.title, measure.unit, measure.cell) for measure in measures))
    rows = make_table(fields, captures)
    folded_blocks = [
        _make_grid(cells, measure.title, measure.unit)
        for cells, measure in zip(other_cells, measures[1:], strict=True)
        if cells
    ]
    folded_blocks += [_make_grid(speed_ups, "Speed-up of the step", "factor")] if speed_ups else []
    folded_blocks += [rows] if step_cells else []
    answers = (_describe_speed_ups(speed_ups), _describe_top_finding(captures), _describe_unfinished(captures))
    first_table = _make_grid(step_cells, measures[0].title, measures[0].unit) if step_cells else rows
    blocks: list[Block] = [*(Answer(text) for text in answers if text), first_table]
    if origin := _describe_step_origin(captures):
        blocks.append(Paragraph(origin))
    drawings = [lines for measure in measures for lines in _draw_curves(captures, places, measure)]
    blocks += drawings[:1]
    blocks += [Details("More of the sweep, and each capture in a row", tuple(folded_blocks))] if folded_blocks else []
    blocks += [Details("More figures over the sweep", tuple(drawings[1:]))] if drawings[1:] else []
    return Section("overview", "", tuple(blocks))


def _describe_step_origin(captures: Sequence[CaptureSummary]) -> str:
    """Returns a sentence on how the steps were timed; empty if all were measured without the profiler."""
    captures_by_origin: Counter[str] = Counter()
    for capture in captures:
        is_measured = capture.unprofiled and capture.unprofiled.trusted_ms(STEP)
        if isinstance(make_step_cell(capture), float):
            is_estimated = capture.step is not None and capture.step.unprofiled_ms is not None
            origin = "measured without" if is_measured else "estimated without" if is_estimated else "measured under"
            captures_by_origin[f"{origin} the profiler"] += 1
    if not captures_by_origin or list(captures_by_origin) == ["measured without the profiler"]:
        return ""
    origins = list(captures_by_origin)
    if len(origins) > 1:
        origins = [f"{origin} ({count} {plural(count, 'capture')})" for origin, count in captures_by_origin.items()]
    return f"Steps are {join_names(origins)}. Phases are profiled, unless they were timed without the profiler."


def _list_measures(labels: Mapping[str, str]) -> tuple[Measure, ...]:
    def find_top_kernel_cell(capture: CaptureSummary) -> Cell:
        """Returns the label of a capture's top kernel."""
        leader = find_top_kernel(capture)
        return labels[leader.kernel.name] if leader else None

    return (
        Measure("Step ms", "ms", make_step_cell, "step"),
        Measure("Attainable ms", "ms", lambda capture: capture.account.attainable_ms if capture.account else None),
        Measure("What to do first", "text", lambda capture: next((row.title for row in get_findings(capture)), None)),
        Measure("Saving ms", "ms", lambda capture: next(map(make_saving_cell, get_findings(capture)), None)),
        Measure("GPU works", "percent", lambda capture: capture.step.busy_share if capture.step else None, "gpu-busy"),
        Measure("MFU", "percent", find_step_mfu, "mfu"),
        Measure("Forward ms", "ms", lambda capture: _get_phase_ms(capture, "forward"), "forward"),
        Measure("Backward ms", "ms", lambda capture: _get_phase_ms(capture, "backward")),
        Measure(
            "Matmul's share of kernel time",
            "percent",
            lambda capture: capture.matmul.overall.matmul if capture.matmul and capture.matmul.overall else None,
            "matmul",
        ),
        Measure(
            "Attention: matmul ÷ softmax time",
            "factor",
            lambda capture: capture.attention.runtime_ratio if capture.attention else None,
            "matmul-to-softmax",
        ),
        Measure("Peak memory", "bytes", find_peak_memory, "memory"),
        Measure("Energy per step", "J", lambda capture: capture.energy.joules if capture.energy else None),
        Measure("Top kernel", "code", find_top_kernel_cell),
    )


def make_step_cell(capture: CaptureSummary) -> Cell:
    """Returns the length of a step in ms, without the profiler if it is known; the status of a run that failed."""
    step, unprofiled = capture.step, capture.unprofiled
    if unprofiled and (ms := unprofiled.trusted_ms(STEP)):
        return ms
    if step and (step.unprofiled_ms or not step.is_pass):
        return step.reported_ms
    return None if capture.status in _FINISHED_STATUSES else format_status(capture.status)


def _get_phase_ms(capture: CaptureSummary, name: str) -> float | None:
    """Returns the time of a phase in ms, without the profiler if it was timed so."""
    phase = capture.phase(name)
    unprofiled_ms = capture.unprofiled.typical_ms(name) if capture.unprofiled else None
    return unprofiled_ms if unprofiled_ms is not None else phase.wall_ms.median if phase else None


def _describe_top_finding(captures: Sequence[CaptureSummary]) -> str:
    """Returns a sentence on the finding that is the first one in most captures; empty if there are no findings."""
    first_findings = [findings[0] for capture in captures if (findings := get_findings(capture))]
    if not first_findings:
        return ""
    (title, count), *_ = Counter(finding.title for finding in first_findings).most_common(1)
    savings = [(finding.saves_ms_low, finding.saves_ms_high) for finding in first_findings if finding.title == title]
    low_ms, high_ms = min(low for low, _ in savings), max(high for _, high in savings)
    analyzed = sum(capture.diagnosis is not None for capture in captures)
    saving = format_ms_range(low_ms, high_ms)
    return f"Do first in {count} of {analyzed} profiled captures: {title} (a fix saves {saving} per step)."


def _describe_unfinished(captures: Sequence[CaptureSummary]) -> str:
    """Returns a sentence on the captures that did not finish; empty if all did. "About" has their messages."""
    unfinished_captures = [capture for capture in captures if capture.status not in _FINISHED_STATUSES]
    if not unfinished_captures:
        return ""
    names = ", ".join(
        f"{capture.title} ({format_status(capture.status, describe_message(capture))})"
        for capture in unfinished_captures
    )
    names = shorten(f"{names}.", _MAX_LIST_LENGTH, placeholder=" …")
    return f"{len(unfinished_captures)} of {len(captures)} captures did not finish: {names}"


# --- places in a sweep


class Variant(NamedTuple):
    """The options of a capture besides model and context length. Options that all captures share are empty."""

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
        """Returns the variant that a speed-up is measured against: fp32, not compiled, without a CUDA graph."""
        return self._replace(precision="fp32" if self.precision else "", compiled="", graph="")


class Place(NamedTuple):
    """The place of a capture in a sweep."""

    model: str
    context: int
    variant: Variant | str


#: The place of each capture, by its title.
_PlaceByTitle = Mapping[str, Place]


def _find_places(captures: Sequence[CaptureSummary]) -> _PlaceByTitle:
    """Returns the place of each capture; empty if a context length is unknown or two captures have the same place."""
    options: dict[str, tuple[str, ...]] = {}
    for capture in captures:
        configuration, run = capture.configuration or Configuration(), capture.run or Run()
        options[capture.title] = (
            f"batch {configuration.batch_size}" if configuration.batch_size else "",
            *(configuration.precision or "", configuration.mode or "", configuration.attention or ""),
            *("compiled" if run.compile else "", "CUDA graph" if run.cuda_graph else ""),
        )
    is_shared = [len(set(values)) == 1 for values in zip(*options.values(), strict=True)]
    places: dict[str, Place] = {}
    for capture in captures:
        configuration = capture.configuration or Configuration()
        if configuration.context_length is None or configuration.model is None:
            return {}
        own_options = (
            "" if shared else option for option, shared in zip(options[capture.title], is_shared, strict=True)
        )
        places[capture.title] = Place(configuration.model.name, configuration.context_length, Variant(*own_options))
    contexts, models = {place.context for place in places.values()}, {place.model for place in places.values()}
    is_sweep = max(len(contexts), len(models)) >= _MIN_GRID_SIZE
    return places if is_sweep and len(set(places.values())) == len(captures) else {}


def _cells_by_place(
    captures: Sequence[CaptureSummary], places: _PlaceByTitle, make_cell: _CellFunction
) -> dict[Place, Cell]:
    """Returns the figures by place; none if the places are not known or fewer than two captures have a figure."""
    cells: dict[Place, Cell] = {}
    for capture in captures if places else ():
        if (cell := make_cell(capture)) is not None:
            cells[places[capture.title]] = cell
    return cells if len(cells) >= _MIN_GRID_SIZE else {}


def _make_grid(cells: Mapping[Place, Cell], title: str, unit: Unit) -> Table:
    """Returns a table with a row for each variant of each model, and a column for each context length."""

    def make_context_field(context: int) -> Field[tuple[str, Variant | str]]:
        """Returns the column of a context length."""
        return Field(f"{context:,}", unit, lambda row: cells.get(Place(row[0], context, row[1])))

    models = list(dict.fromkeys(place.model for place in cells))
    rows = dict.fromkeys((place.model, place.variant) for place in cells)
    fields: list[Field[tuple[str, Variant | str]]] = [
        Field("model", "text", lambda row: row[0]),
        Field("variant", "text", lambda row: str(row[1]) or None, fills=bool),
        *map(make_context_field, sorted({place.context for place in cells})),
    ]
    return make_table(fields, sorted(rows, key=lambda row: models.index(row[0])), f"{title}, by context length:")


def _find_speed_ups(step_cells: Mapping[Place, Cell]) -> dict[Place, float]:
    """Returns the speed-up of each variant over its base variant, by place."""
    factors: dict[Place, float] = {}
    for place, ms in step_cells.items():
        base = place.variant.base if isinstance(place.variant, Variant) else place.variant
        base_ms = step_cells.get(place._replace(variant=base))
        if base != place.variant and isinstance(ms, float) and isinstance(base_ms, float):
            factors[place._replace(variant=f"{place.variant} over {base}")] = base_ms / ms
    return factors


def _describe_speed_ups(speed_ups: Mapping[Place, float]) -> str:
    """Returns the range of each speed-up: "The speed-up of a step is 2.1× to 4.0× for bf16 train over fp32 train."."""
    ranges = []
    for variant in dict.fromkeys(place.variant for place in speed_ups):
        factors = [factor for place, factor in speed_ups.items() if place.variant == variant]
        bounds = dict.fromkeys(f"{factor:.1f}×" for factor in (min(factors), max(factors)))
        ranges.append(f"{' to '.join(bounds)} for {variant}")
    return f"The speed-up of a step is {join_names(ranges)}." if ranges else ""


def _draw_curves(captures: Sequence[CaptureSummary], places: _PlaceByTitle, measure: Measure) -> Iterator[Lines]:
    """Yields a drawing with a curve over context length for each variant that has several context lengths."""
    axis, factor = _AXIS_UNITS.get(measure.unit, (measure.unit, 1.0))
    curves: dict[str, list[tuple[float, float | None]]] = {}
    for capture in captures if places and measure.key else ():
        place, value = places[capture.title], measure.cell(capture)
        if isinstance(value, (int, float)):
            curves.setdefault(f"{place.model} {place.variant}".strip(), []).append((place.context, value * factor))
    if series := tuple((name, tuple(sorted(curve))) for name, curve in curves.items() if len(curve) > 1):
        title, log_y = f"{measure.title}, by context length", measure.unit in ("ms", "bytes")
        yield Lines(measure.key, title, series, "context length, tokens", axis, log_x=True, log_y=log_y)
