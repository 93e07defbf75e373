"""Defines the experiment ``precision``: speed and memory of steps in fp32, TF32 and bf16 autocast."""

from __future__ import annotations

from collections.abc import Iterator

from nsys_analyzer.configuration import MODES, PRECISIONS
from nsys_analyzer.experiments.model import AnyRow, Bench, Results, find_figure, list_option, ratio, scalar_options
from nsys_analyzer.experiments.section import make_bars, make_row_namer, make_rows_table
from nsys_analyzer.experiments.steps import SHARED_OPTIONS, STEP_CONDITIONS, TARGET, StepCase
from nsys_analyzer.report.model import Block
from nsys_analyzer.report.units import format_number
from nsys_analyzer.text import phrase

_DEFINITIONS = phrase(
    "*Speed-up* is the step time of the same configuration in fp32 ÷ the step time in this precision. *Memory* is the "
    "peak of allocated memory in this precision ÷ the peak in fp32. It is not counted on a CPU. *tf32* rounds the "
    "operands of fp32 matmuls to 10 bits of mantissa. *bf16* is autocast: matmuls run in bf16, parameters and "
    "gradients stay in fp32, and the casts are a part of the step. Autocast keeps a bf16 copy of every weight, which "
    "may need more memory than small activations save."
)


def _write_sentences(results: Results) -> Iterator[str]:
    """Yields the speed-up of each precision in the mode with the most phases."""
    longest_mode = max((row.case.mode for row in results.rows), key=MODES.index, default="")
    name = make_row_namer(results.rows, ["mode"])
    gains = [
        (name(row), gain) for row in results.rows if row.case.mode == longest_mode and (gain := _speed_up(results, row))
    ]
    if gains:
        speed_ups = "; ".join(f"{configuration} {format_number(gain, 'factor')}" for configuration, gain in gains)
        yield f"Speed-up over fp32 in mode {longest_mode}: {speed_ups}."


def _speed_up(results: Results, row: AnyRow) -> float | None:
    return results.speed_up(row, "step", precision="fp32")


def _make_tables_and_charts(results: Results) -> Iterator[Block]:
    rows = results.rows

    def compute_memory_ratio(row: AnyRow) -> float | None:
        """Returns the peak memory of a row ÷ the peak memory of the same case in fp32."""
        base = results.find_row(row, precision="fp32")
        return ratio(row.figures.peak_allocated_bytes, find_figure(base, "peak_allocated_bytes"))

    yield make_rows_table(
        rows, "Step time and memory by precision:",
        ("step ms", "ms", "step"), ("speed-up", "factor", lambda row: _speed_up(results, row)),
        ("tokens/s", "count", "tokens_per_s"), ("peak", "bytes", "peak_allocated_bytes"),
        ("memory", "factor", compute_memory_ratio),
    )  # fmt: skip
    name = make_row_namer(rows, ["precision"])
    rows_by_precision = sorted((row for row in rows if row.ok), key=lambda row: PRECISIONS.index(row.case.precision))
    throughput = {(name(row), row.case.precision): row.figures.tokens_per_s for row in rows_by_precision}
    yield from make_bars("precision-throughput", "Throughput by precision", throughput, "tokens/s")


BENCH = Bench(
    name="precision",
    title="fp32, TF32 and bf16 autocast",
    summary="Measures the speed and memory of training steps in fp32, TF32 and bf16 autocast.",
    options=(
        list_option(StepCase, "model", ("small", "large"), ("small",), help="model sizes"),
        list_option(StepCase, "mode", MODES[:2]),
        list_option(StepCase, "precision", PRECISIONS, ("fp32", "bf16")),
        *scalar_options(StepCase, "context_length", "batch_size"),
        *SHARED_OPTIONS,
    ),
    target=TARGET,
    conditions=STEP_CONDITIONS,
    write_sentences=_write_sentences,
    make_tables_and_charts=_make_tables_and_charts,
    definitions=_DEFINITIONS,
)
