"""Steps in fp32, TF32 and bf16 autocast: speed, memory, which tensor is in which dtype, and what accumulators lose."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import NamedTuple

from nsys_analyzer.analysis.transformer.models import find_model
from nsys_analyzer.errors import ConfigurationError
from nsys_analyzer.experiments import steps
from nsys_analyzer.experiments.model import Bench, Results, Settings, Task, grid, several, single
from nsys_analyzer.experiments.precision import dtypes
from nsys_analyzer.experiments.section import bars, factor, ratio, spread
from nsys_analyzer.experiments.steps import MODES, PRECISIONS, TARGET, StepCase, StepFigures, StepRow, model_names
from nsys_analyzer.report.model import Bars, Section
from nsys_analyzer.report.tables import Field, table
from nsys_analyzer.text import phrase

_NAMES = {"tf32": "TF32", "bf16": "bf16 autocast"}
_OPTIONS = (
    several(
        StepCase, "model", ("small:64", "large:32"), ("small:1",), help="sizes, each with its batch size after a colon"
    ),
    several(StepCase, "precision", PRECISIONS, ("fp32", "bf16")),
    several(StepCase, "mode", MODES[:2]),
    *single(StepCase, "context_length"),
    *steps.SHARED,
    *dtypes.OPTIONS,
)
_DEFINITIONS = phrase(
    "*Speed-up* is the step time in fp32 of the same configuration ÷ this one's, *memory* this peak of allocated "
    "memory ÷ that in fp32; on a CPU memory is not counted. *tf32* lets matmuls of fp32 tensors keep 10 bits of their "
    "operands; *bf16* is autocast: matmuls in bf16, parameters and gradients in fp32, the casts a part of the step; "
    "autocast keeps its bf16 cast of every weight beside it, which may be more memory than small activations save. "
    "FLOPs are those of the matmuls; the times hold the elementwise work as well."
)


def _cases(settings: Settings) -> Iterator[Task[StepCase] | Task[dtypes.DtypesCase]]:
    """The precisions of a mode after one another, then dtypes and accumulation."""
    for name, batch in map(_model_and_batch, settings["model"]):
        yield from grid(
            TARGET, settings, lambda case: f"{case.model}, batch {case.batch_size}, {case.mode}, {case.precision}",
            model=(name,), batch_size=(batch,), mode=settings["mode"], precision=settings["precision"],
        )  # fmt: skip
    yield from dtypes.cases(settings)


def _model_and_batch(text: str) -> tuple[str, int]:
    name, _, batch = text.partition(":")
    if not batch.isdecimal() or int(batch) < 1:
        raise ConfigurationError(f"{text!r} is no model with a batch size", "Write it as small:64")
    return find_model(name).name, int(batch)


def _section(results: Results) -> Section:
    rows, other = results.rows_of(TARGET), results.rows_of(dtypes.TARGET)
    compared = _compare(rows)
    return steps.step_section(
        "precision",
        "fp32, TF32 and bf16 autocast",
        results,
        rows,
        answers=(*_answers(compared), *dtypes.answer(other)),
        blocks=(
            table(_FIELDS, compared, "Time and memory of a step by precision:", names=3),
            *_bars(compared),
            *dtypes.blocks(other),
        ),
        definitions=_DEFINITIONS,
    )


class _Compared(NamedTuple):
    """A row beside the same setup, which is its configuration without mode and precision, in fp32."""

    row: StepRow
    setup: str
    speed_up: float | None
    memory: float | None


def _compare(rows: Sequence[StepRow]) -> list[_Compared]:
    setup = model_names(rows, beside=("mode", "precision"))
    measured = {row.case: row.figures for row in rows if row.ok}
    found = []
    for row in rows:
        figures = measured.get(row.case, StepFigures())
        base = measured.get(replace(row.case, precision="fp32"), StepFigures())
        speed_up = ratio(base.step.ms, figures.step.ms) if base.step and figures.step else None
        memory = ratio(figures.peak_allocated_bytes, base.peak_allocated_bytes)
        found.append(_Compared(row, setup(row), speed_up, memory))
    return found


_FIELDS: tuple[Field[_Compared], ...] = (
    Field("configuration", "text", lambda one: one.setup),
    Field("mode", "text", lambda one: one.row.case.mode),
    Field("precision", "text", lambda one: one.row.case.precision),
    Field("step ms", "ms", lambda one: spread(one.row.figures.step)),
    Field("speed-up", "factor", lambda one: one.speed_up),
    Field("tokens/s", "count", lambda one: one.row.figures.tokens_per_s),
    Field("peak", "bytes", lambda one: one.row.figures.peak_allocated_bytes),
    Field("memory", "factor", lambda one: one.memory),
    Field("status", "text", lambda one: one.row.status),
)


def _answers(compared: Sequence[_Compared]) -> Iterator[str]:
    """The speed-up of each precision in the last mode."""
    last = max((one.row.case.mode for one in compared), key=MODES.index, default="")
    setups: dict[str, list[str]] = {}
    for one in compared:
        case = one.row.case
        if case.mode == last and case.precision != "fp32" and one.speed_up:
            setups.setdefault(one.setup, []).append(f"{_NAMES[case.precision]} {factor(one.speed_up)}")
    if setups:
        speed_ups = "; ".join(f"{setup}: {', '.join(factors)}" for setup, factors in setups.items())
        yield f"Speed of {last} against fp32: {speed_ups}."


def _bars(compared: Sequence[_Compared]) -> Iterator[Bars]:
    """Throughput and, on a GPU, memory; a group for each configuration and mode, a bar for each precision."""
    throughput: dict[tuple[str, str], float | None] = {}
    memory: dict[tuple[str, str], float | None] = {}
    for one in sorted(compared, key=lambda one: PRECISIONS.index(one.row.case.precision)):
        bar, figures = (f"{one.setup}, {one.row.case.mode}", one.row.case.precision), one.row.figures
        peak = figures.peak_allocated_bytes
        throughput[bar] = figures.tokens_per_s if one.row.ok else None
        memory[bar] = peak / 2**30 if one.row.ok and peak is not None else None
    yield from bars("precision-throughput", "Throughput by precision", throughput, "tokens/s")
    yield from bars("precision-memory", "Peak of allocated memory by precision", memory, "GiB")


BENCH = Bench(
    "precision",
    "Steps in fp32, TF32 and bf16 autocast: speed, memory, dtypes, and what an accumulator's precision costs.",
    _OPTIONS,
    lambda settings: tuple(_cases(settings)),
    _section,
    precisions=lambda settings: settings["precision"],
    targets=(TARGET, dtypes.TARGET),
)
