"""Defines the experiment ``timing``: training steps by model size, context length and mode."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from nsys_analyzer.configuration import MODES
from nsys_analyzer.experiments.model import Bench, Results, list_option, mean_ms, scalar_options
from nsys_analyzer.experiments.section import (
    format_extremes,
    format_factor_range,
    make_bars,
    make_comparison_table,
    make_curves,
    make_row_namer,
    make_rows_table,
)
from nsys_analyzer.experiments.steps import (
    PHASES,
    SHARED_OPTIONS,
    STEP_CONDITIONS,
    STEP_DEFINITIONS,
    TARGET,
    StepCase,
    StepFigures,
)
from nsys_analyzer.inputs.rows import Row
from nsys_analyzer.report.model import Block, Details
from nsys_analyzer.report.units import format_ms, format_percent

_Row = Row[StepCase, StepFigures]


def _select_longest_mode(rows: Sequence[_Row]) -> list[_Row]:
    """Returns the measured rows of the mode with the most phases."""
    longest_mode = max((row.case.mode for row in rows), key=MODES.index, default="")
    return [row for row in rows if row.ok and row.case.mode == longest_mode]


def _write_sentences(results: Results) -> Iterator[str]:
    rows = results.rows
    name, measured_rows = make_row_namer(rows), [row for row in rows if row.ok]
    yield f"{len(measured_rows)} of {len(rows)} configurations were measured."
    if steps := [(step.ms, name(row)) for row in _select_longest_mode(rows) if (step := row.figures.step)]:
        yield f"A step takes {format_extremes(steps, format_ms)}."
    passes = [(row.figures.forward, row.figures.backward) for row in rows]
    if ratios := [backward.ms / forward.ms for forward, backward in passes if forward and backward]:
        yield f"The backward pass takes {format_factor_range(ratios)} the time of the forward pass."
    if varied := [(step.cv, name(row)) for row in rows if (step := row.figures.step) and step.cv is not None]:
        largest_cv, configuration = max(varied)
        yield f"Step times vary by {format_percent(largest_cv)} at most (CV; {configuration})."


def _make_tables_and_charts(results: Results) -> Iterator[Block]:
    rows = results.rows
    rows_of_longest_mode = _select_longest_mode(rows)
    yield make_comparison_table(
        rows, "mode", "Step time by mode, mean ± standard deviation:",
        {mode: (f"{mode} ms", "ms", "step") for mode in MODES},
    )  # fmt: skip
    yield from make_curves(
        "timing-step", "Step time by context length", rows_of_longest_mode, lambda row: mean_ms(row, "step"), "ms"
    )
    lengths = [row.case.context_length for row in rows_of_longest_mode]
    # The chart shows the context length at which the most rows were measured. If several qualify, it shows the longest.
    length = max(lengths, key=lambda length: (lengths.count(length), length), default=0)
    drawn_rows = [row for row in rows_of_longest_mode if row.case.context_length == length]
    name = make_row_namer(drawn_rows)
    shares = {
        (name(row), phase): 100 * ms / row.figures.step.ms if row.figures.step and (ms := mean_ms(row, phase)) else None
        for row in drawn_rows
        for phase in PHASES
    }
    title = f"Phases of a step, context {length:,}"
    yield from make_bars("timing-phases", title, shares, "% of the step", "stacked")
    phases = make_rows_table(
        rows, "", ("mean ms", "ms", "step"), ("median", "ms", "step.median_ms"), ("CV", "percent", "step.cv"),
        *((f"{phase} ms", "ms", phase) for phase in PHASES),
        ("tokens/s", "count", "tokens_per_s"), ("peak", "bytes", "peak_allocated_bytes"),
    )  # fmt: skip
    yield Details("Phases, throughput and memory", (phases,))


BENCH = Bench(
    name="timing",
    title="timing of training steps",
    summary="Measures the time, tokens/s and memory of training steps for each model size, context length and mode.",
    options=(
        list_option(StepCase, "model", ("small", "medium", "large", "xl", "2.7B"), ("small",), help="model sizes"),
        list_option(StepCase, "context_length", (128, 256, 512, 1024), (32, 64)),
        list_option(StepCase, "mode", MODES),
        *scalar_options(StepCase, "batch_size", "precision"),
        *SHARED_OPTIONS,
    ),
    target=TARGET,
    conditions=STEP_CONDITIONS,
    write_sentences=_write_sentences,
    make_tables_and_charts=_make_tables_and_charts,
    definitions=STEP_DEFINITIONS,
)  # fmt: skip
