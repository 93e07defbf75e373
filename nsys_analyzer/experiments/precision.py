"""Steps in fp32, TF32 and bf16 autocast: speed and memory."""

from __future__ import annotations

from collections.abc import Iterator

from nsys_analyzer.configuration import MODES, PRECISIONS
from nsys_analyzer.experiments.model import AnyRow, Bench, Results, figure, ratio, several, single
from nsys_analyzer.experiments.section import bars, namer, rows_table
from nsys_analyzer.experiments.steps import HOW, SHARED, TARGET, StepCase
from nsys_analyzer.report.model import Block
from nsys_analyzer.report.units import format_number
from nsys_analyzer.text import phrase

_DEFINITIONS = phrase(
    "*Speed-up* is the step time in fp32 of the same configuration ÷ this one's, *memory* this peak of allocated "
    "memory ÷ that in fp32; on a CPU memory is not counted. *tf32* lets matmuls of fp32 tensors keep 10 bits of their "
    "operands; *bf16* is autocast: matmuls in bf16, parameters and gradients in fp32, the casts a part of the step; "
    "autocast keeps its bf16 cast of every weight beside it, which may be more memory than small activations save."
)


def _answers(results: Results) -> Iterator[str]:
    """Yields the speed-up of each precision in the last mode."""
    last = max((row.case.mode for row in results.rows), key=MODES.index, default="")
    name = namer(results.rows, ["mode"])
    gains = [(name(row), gain) for row in results.rows if row.case.mode == last and (gain := _speed_up(results, row))]
    if gains:
        listed = "; ".join(f"{what} {format_number(gain, 'factor')}" for what, gain in gains)
        yield f"Speed of {last} against fp32: {listed}."


def _speed_up(results: Results, row: AnyRow) -> float | None:
    return results.gain(row, "step", precision="fp32")


def _blocks(results: Results) -> Iterator[Block]:
    rows = results.rows

    def memory(row: AnyRow) -> float | None:
        base = results.beside(row, precision="fp32")
        return ratio(row.figures.peak_allocated_bytes, figure(base, "peak_allocated_bytes"))

    yield rows_table(
        rows, "Time and memory of a step by precision:",
        ("step ms", "ms", "step"), ("speed-up", "factor", lambda row: _speed_up(results, row)),
        ("tokens/s", "count", "tokens_per_s"), ("peak", "bytes", "peak_allocated_bytes"), ("memory", "factor", memory),
    )  # fmt: skip
    name = namer(rows, ["precision"])
    ordered = sorted((row for row in rows if row.ok), key=lambda row: PRECISIONS.index(row.case.precision))
    throughput = {(name(row), row.case.precision): row.figures.tokens_per_s for row in ordered}
    yield from bars("precision-throughput", "Throughput by precision", throughput, "tokens/s")


BENCH = Bench(
    name="precision",
    title="fp32, TF32 and bf16 autocast",
    summary="Steps in fp32, TF32 and bf16 autocast: speed and memory.",
    options=(
        several(StepCase, "model", ("small", "large"), ("small",), help="sizes"),
        several(StepCase, "mode", MODES[:2]),
        several(StepCase, "precision", PRECISIONS, ("fp32", "bf16")),
        *single(StepCase, "context_length", "batch_size"),
        *SHARED,
    ),
    target=TARGET,
    how=HOW,
    answers=_answers,
    blocks=_blocks,
    definitions=_DEFINITIONS,
)
