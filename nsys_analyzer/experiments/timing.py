"""Steps of every size over context lengths and modes: time, spread, throughput and memory; and what warm-up does."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence
from dataclasses import replace

from nsys_analyzer.configuration import MODES
from nsys_analyzer.experiments.model import Bench, Results, Settings, grid, mean_ms, options_of, several, single
from nsys_analyzer.experiments.section import bars, curves, extremes, namer, rows_table, side_by_side, span
from nsys_analyzer.experiments.steps import DEFINITIONS, HOW, PHASES, SHARED, TARGET, StepCase, StepFigures, models
from nsys_analyzer.report.model import Block, Details, Lines, Paragraph
from nsys_analyzer.report.units import format_number, milliseconds, percent
from nsys_analyzer.runs.rows import Row, Task
from nsys_analyzer.text import phrase

#: The environment variable of the study's cases: cases of other variables run in processes of their own.
VARIABLE = "NSYS_ANALYZE_WARMUP_STUDY"
#: What the warm-up study has in common with the other cases, as options of its own.
_OF_STUDY = {
    "model": "the study's model",
    "context_length": "tokens of its sequences",
    "mode": "the phases of its steps",
}
_STUDY_DEFINITION = phrase(
    "*Steady step* is the median of the later half of a process's measured steps; *mean ÷ steady* compares each "
    "process with itself, for processes differ. The model is made before the first step, so the device is in use "
    "already; the first step still loads kernels and libraries, and allocates the memory that later steps use again."
)
_Row = Row[StepCase, StepFigures]


def _cases(settings: Settings) -> Iterator[Task[StepCase]]:
    """Yields the grid, in one process as long as memory lasts, from small to large; then the study."""
    yield from grid(TARGET, settings, model=models(settings))
    # Each warm-up in a process of its own, for only a process's first steps are slow.
    same = {key: (settings[f"study_{key}"],) for key in _OF_STUDY}
    for warmup in settings["study_warmup_steps"]:
        yield from grid(TARGET, settings, {VARIABLE: str(warmup)}, warmup_steps=(warmup,), **same)


def _rows(results: Results) -> list[_Row]:
    return [row for row in results.rows_of(TARGET) if VARIABLE not in row.environment]


def _study_rows(results: Results) -> list[_Row]:
    """Returns the processes of the study by their warm-up; none of fewer than two that were measured."""
    rows = [row for row in results.rows_of(TARGET) if VARIABLE in row.environment and row.ok and row.figures.times_ms]
    return sorted(rows, key=lambda row: row.case.warmup_steps) if len(rows) > 1 else []


def _of_longest_mode(rows: Sequence[_Row]) -> list[_Row]:
    """Returns the measured rows of the mode with the most phases."""
    last = max((row.case.mode for row in rows), key=MODES.index, default="")
    return [row for row in rows if row.ok and row.case.mode == last]


def _answers(results: Results) -> Iterator[str]:
    rows = _rows(results)
    name, measured = namer(rows), [row for row in rows if row.ok]
    yield f"Of {len(rows)} configurations {len(measured)} were measured."
    if steps := [(step.ms, name(row)) for row in _of_longest_mode(rows) if (step := row.figures.step)]:
        yield f"A step takes {extremes(steps, milliseconds)}."
    both = [(row.figures.forward, row.figures.backward) for row in rows]
    if ratios := [backward.ms / forward.ms for forward, backward in both if forward and backward]:
        yield f"Backward takes {span(ratios)} the forward pass."
    if varied := [(step.cv, name(row)) for row in rows if (step := row.figures.step) and step.cv is not None]:
        most, where = max(varied)
        yield f"Steps vary by {percent(most)} at most (CV; {where})."
    if study := _study_rows(results):
        errors = [
            f"{format_number(_mean_over_steady(row), 'factor')} with a warm-up of {row.case.warmup_steps}"
            for row in (study[0], study[-1])
        ]
        yield f"The mean step ÷ the steady step of the process is {' and '.join(errors)}."
        times, steady = study[0].figures.times_ms or [], _steady_ms(study[0])
        excess = [max(ms - steady, 0) for ms in times]
        if sum(excess):
            yield (
                f"With a warm-up of {study[0].case.warmup_steps}, the first measured step ({milliseconds(times[0])}) "
                f"makes {percent(excess[0] / sum(excess))} of the excess."
            )


def _blocks(results: Results) -> Iterator[Block]:
    rows = _rows(results)
    last = _of_longest_mode(rows)
    yield side_by_side(
        rows, "mode", "Time of a step by mode, mean ± standard deviation:",
        {mode: (f"{mode} ms", "ms", "step") for mode in MODES},
    )  # fmt: skip
    yield from curves("timing-step", "Time of a step by context length", last, lambda row: mean_ms(row, "step"), "ms")
    lengths = [row.case.context_length for row in last]
    # The longest of those that most models have.
    length = max(lengths, key=lambda length: (lengths.count(length), length), default=0)
    shown = [row for row in last if row.case.context_length == length]
    name = namer(shown)
    shares = {
        (name(row), phase): 100 * ms / row.figures.step.ms if row.figures.step and (ms := mean_ms(row, phase)) else None
        for row in shown
        for phase in PHASES
    }
    title = f"Phases of a step, context {length:,}"
    yield from bars("timing-phases", title, shares, "% of the step", "stacked")
    yield from _study(_study_rows(results))
    phases = rows_table(
        rows, "", ("mean ms", "ms", "step"), ("median", "ms", "step.median_ms"), ("CV", "percent", "step.cv"),
        *((f"{phase} ms", "ms", phase) for phase in PHASES),
        ("tokens/s", "count", "tokens_per_s"), ("peak", "bytes", "peak_allocated_bytes"),
    )  # fmt: skip
    yield Details("Phases, throughput and memory", (phases,))


def _study(rows: Sequence[_Row]) -> Iterator[Block]:
    """Yields mean and spread by warm-up, and every step."""
    if not rows:
        return
    case = rows[0].case
    about = f"{case.mode} steps of {case.model}, context {case.context_length:,}, batch {case.batch_size}"
    yield rows_table(
        rows,
        phrase("*Warm-up study*: {} measured {}; a fresh process for each warm-up.", case.steps, about),
        ("warm-up steps", "count", lambda row: row.case.warmup_steps),
        ("mean ms", "ms", "step"),
        ("CV", "percent", "step.cv"),
        ("max", "ms", "step.max_ms"),
        ("steady step", "ms", _steady_ms),
        ("mean ÷ steady", "factor", _mean_over_steady),
    )
    yield Paragraph(_STUDY_DEFINITION)
    series = tuple(
        (
            f"warm-up of {row.case.warmup_steps}",
            tuple(enumerate([*(row.figures.warmup_times_ms or []), *(row.figures.times_ms or [])], 1)),
        )
        for row in rows
    )
    title, axis = f"Every step of each process: {about}", "step of the process, warm-up included"
    yield Lines("timing-warmup", title, series, axis, "ms", log_y=True)


def _steady_ms(row: _Row) -> float:
    """Returns the median of the later half of the measured steps; of an odd number, with the one in the middle."""
    times = row.figures.times_ms or []
    return statistics.median(times[len(times) // 2 :])


def _mean_over_steady(row: _Row) -> float:
    """Returns the error of the mean, as a factor."""
    return statistics.fmean(row.figures.times_ms or []) / _steady_ms(row)


BENCH = Bench(
    name="timing",
    title="timing of training steps, and warm-up",
    summary="Steps of every size over context lengths and modes: time, spread, tokens/s and memory; and what warm-up "
    "does.",
    options=(
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
    targets=(TARGET,),
    cases=_cases,
    how=HOW,
    answers=_answers,
    blocks=_blocks,
    definitions=DEFINITIONS,
)  # fmt: skip
