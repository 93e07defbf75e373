"""Steps of every size over context lengths and modes: time, spread, throughput and memory; and what warm-up does."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TypeAlias

from nsys_analyzer.configuration import MODES
from nsys_analyzer.experiments.model import Bench, Results, Settings, grid, options_of, several, single
from nsys_analyzer.experiments.section import bars, curves, extremes, factor, figure, span, spread
from nsys_analyzer.experiments.steps import (
    PHASES,
    SHARED,
    TARGET,
    StepCase,
    StepRow,
    model_names,
    models,
    step_section,
    titles,
)
from nsys_analyzer.report.model import Block, Cell, Details, Figure, Lines, Paragraph, Section, Table
from nsys_analyzer.report.tables import Field, table
from nsys_analyzer.report.units import milliseconds, percent
from nsys_analyzer.runs.rows import Task, Times
from nsys_analyzer.text import phrase

#: The environment variable of the study's cases: cases of other variables run in processes of their own.
VARIABLE = "NSYS_ANALYZE_WARMUP_STUDY"
#: What the warm-up study has in common with the other cases, as options of its own.
_OF_STUDY = {
    "model": "the study's model",
    "context_length": "tokens of its sequences",
    "mode": "the phases of its steps",
}
#: A step is slow that takes so many times its process's steady step.
_SLOW = 1.5
_STUDY_DEFINITION = (
    "{} *Steady step* is the median of the later half of a process's measured steps; *mean ÷ steady* compares each "
    "process with itself, for processes differ. The model is made before the first step, so the device is in use "
    "already; the first step still loads kernels and libraries, and allocates the memory that later steps use again."
)
_DEFINITIONS = phrase(
    "*A step* is the phases of its mode, by Python's clock, which waits for the device at the end of each phase: "
    "*forward* is the forward pass alone, *forward-backward* adds loss and backward, *train* the optimizer. *CV* is "
    "standard deviation ÷ mean of the measured steps. *Allocated* is the peak memory of tensors, *reserved* that of "
    "PyTorch's allocator; on a CPU neither is counted. FLOPs are those of the matmuls; the times hold the elementwise "
    "work as well."
)


def _cases(settings: Settings) -> Iterator[Task[StepCase]]:
    """Yields the grid, in one process as long as memory lasts, from small to large; then the study."""

    def label(case: StepCase) -> str:
        return f"{case.model}, context {case.context_length:,}, {case.mode}"

    yield from grid(TARGET, settings, label, model=models(settings))
    # Each warm-up in a process of its own, for only a process's first steps are slow.
    same = {key: (settings[f"study_{key}"],) for key in _OF_STUDY}
    for warmup in settings["study_warmup_steps"]:
        yield from grid(
            TARGET, settings, lambda case: f"warm-up of {case.warmup_steps}", environment={VARIABLE: str(warmup)},
            warmup_steps=(warmup,), **same,
        )  # fmt: skip


def _section(results: Results) -> Section:
    every = results.rows_of(TARGET)
    study = _processes([row for row in every if VARIABLE in row.environment])
    rows = [row for row in every if VARIABLE not in row.environment]
    return step_section(
        "timing",
        "timing of training steps, and warm-up",
        results,
        rows,
        answers=(*_answers(rows), *_study_answers(study)),
        blocks=(_times(rows), *_figures(rows), *_study(study), *_details(rows)),
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


#: A model and a context length, with its rows by mode.
_Shape: TypeAlias = tuple[tuple[str, int], Mapping[str, StepRow]]


def _times(rows: Sequence[StepRow]) -> Table:
    """Returns a line for each model and context length, the modes side by side; throughput and memory of the last."""
    modes, name = _modes(rows), model_names(rows)
    shapes: dict[tuple[str, int], dict[str, StepRow]] = {}
    for row in rows:
        shapes.setdefault((name(row), row.case.context_length), {})[row.case.mode] = row

    def time_or_status(mode: str, shape: _Shape) -> Cell:
        row = shape[1].get(mode)
        return row.status if row and not row.ok else spread(figure(row, "step"))

    last = modes[-1] if modes else ""
    fields: tuple[Field[_Shape], ...] = (
        Field("model", "text", lambda shape: shape[0][0]),
        Field("context", "count", lambda shape: shape[0][1]),
        *(Field(f"{mode} ms", "ms", partial(time_or_status, mode)) for mode in modes),
        Field(f"tokens/s, {last}", "count", lambda shape: figure(shape[1].get(last), "tokens_per_s")),
        Field(f"peak, {last}", "bytes", lambda shape: figure(shape[1].get(last), "peak_allocated_bytes")),
    )
    return table(fields, shapes.items(), "Time of a step by mode, mean ± standard deviation:", names=2)


def _details(rows: Sequence[StepRow]) -> Iterator[Block]:
    """Yields spread, phases, throughput and memory of each configuration, folded away."""

    def of_phase(name: str) -> Callable[[StepRow], Cell]:
        return lambda row: spread(row.figures.phase(name)) if row.ok else None

    configuration: tuple[Field[StepRow], ...] = (
        Field("model", "text", model_names(rows)),
        Field("context", "count", lambda row: row.case.context_length),
        Field("mode", "text", lambda row: row.case.mode),
    )
    status: Field[StepRow] = Field("status", "text", lambda row: row.status)
    steps: tuple[Field[StepRow], ...] = (
        Field("mean ms", "ms", lambda row: spread(row.figures.step)),
        Field("min", "ms", lambda row: getattr(row.figures.step, "min_ms", None)),
        Field("max", "ms", lambda row: getattr(row.figures.step, "max_ms", None)),
        Field("median", "ms", lambda row: getattr(row.figures.step, "median_ms", None)),
        Field("CV", "percent", lambda row: getattr(row.figures.step, "cv", None)),
        *(Field(f"{phase} ms", "ms", of_phase(phase)) for phase in PHASES),
    )
    memory: tuple[Field[StepRow], ...] = (
        Field("tokens/s", "count", lambda row: row.figures.tokens_per_s),
        Field("allocated", "bytes", lambda row: row.figures.peak_allocated_bytes),
        Field("reserved", "bytes", lambda row: row.figures.peak_reserved_bytes),
        Field("parameters", "bytes", lambda row: row.figures.parameters_bytes),
        Field("gradients", "bytes", lambda row: row.figures.gradients_bytes),
        Field("states", "bytes", lambda row: row.figures.optimizer_bytes),
    )
    yield Details("Steps and their phases", (table((*configuration, *steps, status), rows, names=3),))
    yield Details("Throughput and memory", (table((*configuration, *memory, status), rows, names=3),))


def _figures(rows: Sequence[StepRow]) -> Iterator[Figure]:
    """Yields the time of a step over context length in the last mode, a curve for each model, and its phases."""
    name = model_names(rows)
    for mode in _modes(rows)[-1:]:
        measured = [(row, step.ms) for row in rows if row.case.mode == mode and row.ok and (step := row.figures.step)]
        points: dict[str, list[tuple[float, float | None]]] = {}
        for row, ms in measured:
            points.setdefault(name(row), []).append((row.case.context_length, ms))
        yield from curves("timing-step", f"Time of a step by context length, {mode}", points, "ms")
        lengths = [row.case.context_length for row, _ in measured]
        # The longest of those that most models have.
        length = max(lengths, key=lambda length: (lengths.count(length), length), default=0)
        shares = {
            (name(row), phase): 100 * times.ms / ms if (times := row.figures.phase(phase)) else None
            for row, ms in measured
            if row.case.context_length == length
            for phase in PHASES
        }
        title = f"Phases of a step, {mode}, context {length:,}"
        yield from bars("timing-phases", title, shares, "% of the step", "stacked")


@dataclass(frozen=True)
class _Process:
    """The steps of one process of the warm-up study: its row, statistics, and times in ms."""

    row: StepRow
    step: Times
    times_ms: list[float]

    @property
    def steady_ms(self) -> float:
        """The median of the later half of the measured steps; of an odd number, with the one in the middle."""
        return statistics.median(self.times_ms[len(self.times_ms) // 2 :])

    @property
    def mean_over_steady(self) -> float:
        """The error of the mean, as a factor."""
        return self.step.ms / self.steady_ms

    @property
    def all_ms(self) -> list[float]:
        """All steps, warm-up included."""
        return [*(self.row.figures.warmup_times_ms or []), *self.times_ms]


def _processes(rows: Sequence[StepRow]) -> list[_Process]:
    """Returns the processes of the study by their warm-up; none of fewer than two that were measured."""
    measured = [
        _Process(row, step, times)
        for row in rows
        if row.ok and (step := row.figures.step) and (times := row.figures.times_ms)
    ]
    return sorted(measured, key=lambda process: process.row.case.warmup_steps) if len(measured) > 1 else []


_STUDY: tuple[Field[_Process], ...] = (
    Field("warm-up steps", "count", lambda process: process.row.case.warmup_steps),
    Field("mean ms", "ms", lambda process: spread(process.step)),
    Field("CV", "percent", lambda process: process.step.cv),
    Field("min", "ms", lambda process: min(process.times_ms)),
    Field("max", "ms", lambda process: max(process.times_ms)),
    Field("steady step", "ms", lambda process: process.steady_ms),
    Field("mean ÷ steady", "factor", lambda process: process.mean_over_steady),
)


def _study(processes: Sequence[_Process]) -> Iterator[Block]:
    """Yields mean, spread and slow steps by warm-up."""
    if not processes:
        return
    case = processes[0].row.case
    about = f"{case.mode} steps of {case.model}, context {case.context_length:,}, batch {case.batch_size}"
    caption = phrase("*Warm-up study*: {} measured {}; a fresh process for each warm-up.", case.steps, about)
    yield table(_STUDY, processes, caption)
    numbered = [
        (number, ms / process.steady_ms) for process in processes for number, ms in enumerate(process.all_ms, 1)
    ]
    slow = Counter(number for number, times in numbered if times > _SLOW)
    words = f"No step of a process took more than {_SLOW} times its steady step."
    if slow:
        steps = ", ".join(f"step {number} in {slow[number]} of {len(processes)} processes" for number in sorted(slow))
        words = f"Slower than {_SLOW} times the steady step, warm-up included: {steps}."
    yield Paragraph(phrase(_STUDY_DEFINITION, words))
    series = tuple(
        (f"warm-up of {process.row.case.warmup_steps}", tuple(enumerate(process.all_ms, 1))) for process in processes
    )
    title, axis = f"Every step of each process: {about}", "step of the process, warm-up included"
    yield Lines("timing-warmup", title, series, axis, "ms", log_y=True)


def _study_answers(processes: Sequence[_Process]) -> Iterator[str]:
    """Yields the error of the mean with the least and the most warm-up, and the first step's part in it."""
    if not processes:
        return
    least, most = processes[0], processes[-1]
    errors = [
        f"{factor(process.mean_over_steady)} with a warm-up of {process.row.case.warmup_steps}"
        for process in (least, most)
    ]
    yield f"The mean step ÷ the steady step of the process is {' and '.join(errors)}."
    excess = [max(ms - least.steady_ms, 0) for ms in least.times_ms]
    if sum(excess):
        share, first = percent(excess[0] / sum(excess)), milliseconds(least.times_ms[0])
        warmup = least.row.case.warmup_steps
        yield f"With a warm-up of {warmup}, the first measured step ({first}) makes {share} of the excess."


BENCH = Bench(
    "timing",
    "Steps of every size over context lengths and modes: time, spread, tokens/s and memory; and what warm-up does.",
    (
        several(StepCase, "model", ("small", "medium", "large", "xl", "2.7B"), ("small",), help="sizes"),
        several(StepCase, "context_length", (128, 256, 512, 1024), (32, 64)),
        several(StepCase, "mode", MODES),
        *single(StepCase, "batch_size", "precision", "optimizer"),
        *SHARED,
        several(
            StepCase, "warmup_steps", (0, 1, 2, 5), (0, 1),
            name="study_warmup_steps", spelling="study-warmup", help="warm-ups of the warm-up study, a process each",
        ),
        *(replace(options_of(StepCase)[name], name=f"study_{name}", help=help) for name, help in _OF_STUDY.items()),
    ),
    lambda settings: tuple(_cases(settings)),
    _section,
    targets=(TARGET,),
)  # fmt: skip
