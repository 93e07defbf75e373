"""Steps of every size over context lengths and modes: time, spread, throughput and memory; and what warm-up does."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import TypeAlias

from nsys_analyzer.experiments import steps
from nsys_analyzer.experiments.model import Bench, Results, Settings, Task, grid, several, single
from nsys_analyzer.experiments.section import bars, extremes, span, spread
from nsys_analyzer.experiments.steps import MODES, PHASES, TARGET, StepCase, StepRow, model_names, titles
from nsys_analyzer.experiments.timing import warmup
from nsys_analyzer.report.model import Block, Cell, Details, Figure, Lines, Section, Table
from nsys_analyzer.report.tables import Field, table
from nsys_analyzer.report.units import milliseconds, percent
from nsys_analyzer.text import phrase

_OPTIONS = (
    several(StepCase, "model", ("small", "medium", "large", "xl", "2.7B"), ("small",), help="sizes"),
    several(StepCase, "context_length", (128, 256, 512, 1024), (32, 64)),
    several(StepCase, "mode", MODES),
    *single(StepCase, "batch_size", "precision", "optimizer"),
    *steps.SHARED,
    *warmup.OPTIONS,
)
_DEFINITIONS = phrase(
    "*A step* is the phases of its mode, by Python's clock, which waits for the device at the end of each phase: "
    "*forward* is the forward pass alone, *forward-backward* adds loss and backward, *train* the optimizer. *CV* is "
    "standard deviation ÷ mean of the measured steps. *Allocated* is the peak memory of tensors, *reserved* that of "
    "PyTorch's allocator; on a CPU neither is counted. FLOPs are those of the matmuls; the times hold the elementwise "
    "work as well."
)


def _cases(settings: Settings) -> Iterator[Task[StepCase]]:
    """The grid in one process as long as memory lasts, from small to large; then the study."""
    yield from grid(
        TARGET, settings, lambda case: f"{case.model}, context {case.context_length:,}, {case.mode}",
        model=steps.models(settings), context_length=settings["context_length"], mode=settings["mode"],
    )  # fmt: skip
    yield from warmup.cases(settings)


def _section(results: Results) -> Section:
    every = results.rows_of(TARGET)
    study = [row for row in every if warmup.VARIABLE in row.environment]
    rows = [row for row in every if warmup.VARIABLE not in row.environment]
    return steps.step_section(
        "timing",
        "timing of training steps, and warm-up",
        results,
        rows,
        answers=(*_answers(rows), *warmup.answer(study)),
        blocks=(_times(rows), *_figures(rows), *warmup.study(study), *_details(rows)),
        definitions=_DEFINITIONS,
    )


def _answers(rows: Sequence[StepRow]) -> Iterator[str]:
    title, measured = titles(rows), [row for row in rows if row.ok]
    for mode in _modes(measured)[-1:]:
        steps = [(step.ms, title(row)) for row in measured if row.case.mode == mode and (step := row.figures.step)]
        yield f"Of {len(rows)} configurations {len(measured)} were measured."
        yield f"A step ({mode}) takes {extremes(steps, milliseconds)}."
    both = [(row.figures.forward, row.figures.backward) for row in rows]
    if ratios := [backward.ms / forward.ms for forward, backward in both if forward and backward]:
        yield f"Backward takes {span(ratios, 'factor')} the forward pass."
    if varied := [(step.cv, title(row)) for row in rows if (step := row.figures.step) and step.cv is not None]:
        most, name = max(varied)
        yield f"Steps vary by {percent(most)} at most (CV; {name})."


def _modes(rows: Sequence[StepRow]) -> list[str]:
    return [mode for mode in MODES if any(row.case.mode == mode for row in rows)]


#: The rows of a model at a context length, by mode.
_Modes: TypeAlias = Mapping[str, StepRow]


def _times(rows: Sequence[StepRow]) -> Table:
    """A line for each model and context length, the modes beside each other; throughput and memory of the last."""
    modes, name = _modes(rows), model_names(rows)
    shapes: dict[tuple[str, int], dict[str, StepRow]] = {}
    for row in rows:
        shapes.setdefault((name(row), row.case.context_length), {})[row.case.mode] = row
    last = modes[-1] if modes else ""
    fields: tuple[Field[_Modes], ...] = (
        Field("model", "text", lambda one: name(next(iter(one.values())))),
        Field("context", "count", lambda one: next(iter(one.values())).case.context_length),
        *(Field(f"{mode} ms", "ms", partial(_time_or_status, mode)) for mode in modes),
        Field(f"tokens/s, {last}", "count", lambda one: one[last].figures.tokens_per_s if last in one else None),
        Field(f"peak, {last}", "bytes", lambda one: one[last].figures.peak_allocated_bytes if last in one else None),
    )
    return table(fields, shapes.values(), "Time of a step by mode, mean ± standard deviation:", names=2)


def _time_or_status(mode: str, rows: _Modes) -> Cell:
    if row := rows.get(mode):
        return spread(row.figures.step) if row.ok else row.status
    return None


def _details(rows: Sequence[StepRow]) -> Iterator[Block]:
    """Spread, phases, throughput and memory of each configuration, folded away."""
    configuration: tuple[Field[StepRow], ...] = (
        Field("model", "text", model_names(rows)),
        Field("context", "count", lambda row: row.case.context_length),
        Field("mode", "text", lambda row: row.case.mode),
    )
    status: Field[StepRow] = Field("status", "text", lambda row: row.status)
    phases = tuple(Field(f"{phase} ms", "ms", partial(_phase, phase)) for phase in PHASES)
    yield Details("Steps and their phases", (table((*configuration, *_SPREAD, *phases, status), rows, names=3),))
    yield Details("Throughput and memory", (table((*configuration, *_MEMORY, status), rows, names=3),))


def _phase(name: str, row: StepRow) -> Cell:
    return spread(row.figures.phase(name)) if row.ok else None


def _of_step(figure: str) -> Callable[[StepRow], Cell]:
    return lambda row: getattr(row.figures.step, figure, None)


def _of_row(figure: str) -> Callable[[StepRow], Cell]:
    return lambda row: getattr(row.figures, figure)


_SPREAD: tuple[Field[StepRow], ...] = (
    Field("mean ms", "ms", lambda row: spread(row.figures.step)),
    Field("min", "ms", _of_step("min_ms")),
    Field("max", "ms", _of_step("max_ms")),
    Field("median", "ms", _of_step("median_ms")),
    Field("CV", "percent", _of_step("cv")),
)
_MEMORY: tuple[Field[StepRow], ...] = (
    Field("tokens/s", "count", _of_row("tokens_per_s")),
    Field("allocated", "bytes", _of_row("peak_allocated_bytes")),
    Field("reserved", "bytes", _of_row("peak_reserved_bytes")),
    Field("parameters", "bytes", _of_row("parameters_bytes")),
    Field("gradients", "bytes", _of_row("gradients_bytes")),
    Field("states", "bytes", _of_row("optimizer_bytes")),
)


def _figures(rows: Sequence[StepRow]) -> Iterator[Figure]:
    """The time of a step over context length in the last mode, a curve for each model, and the shares of its phases."""
    name = model_names(rows)
    for mode in _modes(rows)[-1:]:
        measured = [(row, step.ms) for row in rows if row.case.mode == mode and row.ok and (step := row.figures.step)]
        curves: dict[str, list[tuple[float, float]]] = {}
        for row, ms in measured:
            curves.setdefault(name(row), []).append((row.case.context_length, ms))
        if any(len(points) > 1 for points in curves.values()):
            series = tuple((model, tuple(points)) for model, points in curves.items())
            title, axis = f"Time of a step by context length, {mode}", "context length, tokens"
            yield Lines("timing-step", title, series, axis, "ms", log_x=True, log_y=True)
        lengths = [row.case.context_length for row, _ in measured]
        length = max(lengths, key=lambda one: (lengths.count(one), one), default=0)  # the longest most models have
        shares = {
            (name(row), phase): 100 * times.ms / ms if (times := row.figures.phase(phase)) else None
            for row, ms in measured
            if row.case.context_length == length
            for phase in PHASES
        }
        title = f"Phases of a step, {mode}, context {length:,}"
        yield from bars("timing-phases", title, shares, "% of the step", "stacked")


BENCH = Bench(
    "timing",
    "Steps of every size over context lengths and modes: time, spread, tokens/s and memory; and what warm-up does.",
    _OPTIONS,
    lambda settings: tuple(_cases(settings)),
    _section,
    precisions=lambda settings: (settings["precision"],),
    targets=(TARGET,),
)
