"""Steps in fp32, TF32 and bf16 autocast: speed, memory, which tensor is in which dtype, and what accumulators lose."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from nsys_analyzer.analysis.transformer.models import find_model
from nsys_analyzer.configuration import MODES, PRECISIONS
from nsys_analyzer.errors import ConfigurationError
from nsys_analyzer.experiments.model import (
    AnyRow,
    Bench,
    Results,
    Settings,
    figure,
    grid,
    option,
    ratio,
    several,
    single,
)
from nsys_analyzer.experiments.section import bars, namer, rows_table
from nsys_analyzer.experiments.steps import HOW, SHARED, TARGET, StepCase
from nsys_analyzer.report.model import Block, Details, Paragraph
from nsys_analyzer.report.tables import Field, table
from nsys_analyzer.report.units import ABSENT, format_number
from nsys_analyzer.runs.rows import CaseTarget, Row, Task
from nsys_analyzer.text import phrase

_DEFINITIONS = phrase(
    "*Speed-up* is the step time in fp32 of the same configuration ÷ this one's, *memory* this peak of allocated "
    "memory ÷ that in fp32; on a CPU memory is not counted. *tf32* lets matmuls of fp32 tensors keep 10 bits of their "
    "operands; *bf16* is autocast: matmuls in bf16, parameters and gradients in fp32, the casts a part of the step; "
    "autocast keeps its bf16 cast of every weight beside it, which may be more memory than small activations save."
)
#: The term that the sums add.
TERM = 0.01
_AUTOCAST = ("fp32", "bf16", "fp16")
_WHY_SUMS_DIFFER = (
    "A sum is rounded at each addition, so a small accumulator loses what is below half its last digit. Terms in fp16 "
    "carry their own rounding into any accumulator, converted first or not."
)


@dataclass(frozen=True)
class DtypesCase:
    """One experiment in one precision; each takes the options that concern it."""

    device: str
    experiment: str = option("dtypes", "what to look at", ("dtypes", "sums"))
    model: str = option("toy", "whose dtypes", ("toy", "transformer"))
    precision: str = option("bf16", "of autocast", ("fp32", "bf16", "fp16"))
    terms: int = option(1000, f"how often the sums add {TERM}")


@dataclass
class DtypesFigures:
    """The figures of the experiments; each has some of them.

    Attributes:
        dtypes: tensors with their dtypes.
        sum_fp32_of_fp32: the sum in an accumulator of the first dtype, of terms of the second; the others alike.
        sum_fp32_of_fp16_converted: of fp16 terms that are converted to fp32 before they are added.
    """

    dtypes: list[tuple[str, str]] | None = None
    sum_fp32_of_fp32: float | None = None
    sum_fp16_of_fp16: float | None = None
    sum_bf16_of_bf16: float | None = None
    sum_fp32_of_fp16: float | None = None
    sum_fp32_of_fp16_converted: float | None = None
    sum_exact: float | None = None


DTYPES_TARGET = CaseTarget("profiling_targets.dtypes", DtypesCase, DtypesFigures)
_DtypesRow: TypeAlias = Row[DtypesCase, DtypesFigures]


def _cases(settings: Settings) -> Iterator[Task[StepCase] | Task[DtypesCase]]:
    """Yields the precisions of a mode after one another; then dtypes, and sums."""
    for text in settings["model"]:
        name, _, batch = text.partition(":")
        if not batch.isdecimal() or int(batch) < 1:
            raise ConfigurationError(f"{text!r} is no model with a batch size", "Write it as small:64")
        yield from grid(TARGET, settings, model=(find_model(name).name,), batch_size=(int(batch),))
    models = ("toy", "transformer")
    yield from grid(DTYPES_TARGET, settings, experiment=("dtypes",), model=models, precision=_AUTOCAST)
    yield from grid(DTYPES_TARGET, settings, experiment=("sums",), model=("toy",), precision=("bf16",))


def _answers(results: Results) -> Iterator[str]:
    """Yields the speed-up of each precision in the last mode, the tensors that autocast leaves in fp32, and a sum."""
    rows, other = results.rows_of(TARGET), results.rows_of(DTYPES_TARGET)
    last = max((row.case.mode for row in rows), key=MODES.index, default="")
    name = namer(rows, ["mode"])
    gains = [(name(row), gain) for row in rows if row.case.mode == last and (gain := _speed_up(results, row))]
    if gains:
        listed = "; ".join(f"{what} {format_number(gain, 'factor')}" for what, gain in gains)
        yield f"Speed of {last} against fp32: {listed}."
    toy = [row for row in _of(other, "dtypes") if row.case.model == "toy" and row.case.precision != "fp32"]
    if seen := [dict(row.figures.dtypes) for row in toy if row.figures.dtypes]:
        kept = [tensor for tensor in seen[0] if all(dtypes.get(tensor) == "float32" for dtypes in seen)]
        yield f"Under autocast these stay in fp32: {', '.join(kept) or 'none'}."
    for row in _of(other, "sums"):
        half, full = row.figures.sum_fp16_of_fp16, row.figures.sum_fp32_of_fp32
        if half is not None and full is not None:
            yield f"{TERM} added {row.case.terms:,} times gives {half:.7g} in fp16 and {full:.7g} in fp32."


def _speed_up(results: Results, row: AnyRow) -> float | None:
    return results.gain(row, "step", precision="fp32")


def _blocks(results: Results) -> Iterator[Block]:
    rows, other = results.rows_of(TARGET), results.rows_of(DTYPES_TARGET)

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
    peaks = {(name(row), row.case.precision): ratio(row.figures.peak_allocated_bytes, 2**30) for row in ordered}
    yield from bars("precision-memory", "Peak of allocated memory by precision", peaks, "GiB")
    yield from _dtypes(_of(other, "dtypes"))
    for row in _of(other, "sums"):
        yield from _sums(row)


def scientific(value: float | None) -> str | None:
    """Returns an error as text: ``1.2e-05``; None where it is missing."""
    return None if value is None else f"{value:.1e}"


def _of(rows: Sequence[_DtypesRow], experiment: str) -> list[_DtypesRow]:
    return [row for row in rows if row.case.experiment == experiment]


def _dtypes(rows: Sequence[_DtypesRow]) -> Iterator[Block]:
    """Yields the dtypes of each model's tensors, as far as there are rows of them."""

    def dtype(row: _DtypesRow, dtypes: Mapping[str, str]) -> Callable[[str], str]:
        return lambda tensor: dtypes.get(tensor, ABSENT if row.ok else row.status)

    for model, title in (("toy", "fc1, ReLU, LayerNorm, fc2"), ("transformer", "one block of the transformer")):
        columns = [(row, dict(row.figures.dtypes or ())) for row in rows if row.case.model == model]
        names: list[Field[str]] = [Field("tensor", "text", str)]
        for row, dtypes in columns:
            heading = "no autocast" if row.case.precision == "fp32" else f"autocast {row.case.precision}"
            names.append(Field(heading, "code", dtype(row, dtypes)))
        if tensors := dict.fromkeys(tensor for _, dtypes in columns for tensor in dtypes):
            yield Details(f"Dtypes under autocast: {title}; parameters in fp32", (table(names, tensors),))


def _sums(row: _DtypesRow) -> Iterator[Block]:
    """Yields the sums of the same terms in accumulators of several dtypes."""
    figures, exact = row.figures, row.figures.sum_exact
    if not exact:
        return
    values = {
        ("fp32", "fp32"): figures.sum_fp32_of_fp32,
        ("fp16", "fp16"): figures.sum_fp16_of_fp16,
        ("bf16", "bf16"): figures.sum_bf16_of_bf16,
        ("fp32", "fp16"): figures.sum_fp32_of_fp16,
        ("fp32", "fp16, converted to fp32 first"): figures.sum_fp32_of_fp16_converted,
    }
    columns: tuple[Field[tuple[tuple[str, str], float]], ...] = (
        Field("accumulator", "text", lambda total: total[0][0]),
        Field("terms", "text", lambda total: total[0][1]),
        Field("sum", "text", lambda total: f"{total[1]:.7g}"),
        Field("error, relative", "text", lambda total: f"{total[1] / exact - 1:+.1e}"),
    )
    sums = [(names, value) for names, value in values.items() if value is not None]
    yield table(columns, sums, phrase("*Accumulation*: {} added {:,} times, one by one.", TERM, row.case.terms))
    yield Paragraph(_WHY_SUMS_DIFFER)


BENCH = Bench(
    name="precision",
    title="fp32, TF32 and bf16 autocast",
    summary="Steps in fp32, TF32 and bf16 autocast: speed, memory, dtypes, and what an accumulator's precision costs.",
    options=(
        several(
            StepCase, "model", ("small:64", "large:32"), ("small:1",),
            help="sizes, each with its batch size after a colon",
        ),
        several(StepCase, "mode", MODES[:2]),
        several(StepCase, "precision", PRECISIONS, ("fp32", "bf16")),
        *single(StepCase, "context_length"),
        *SHARED,
        *single(DtypesCase, "terms"),
    ),
    targets=(TARGET, DTYPES_TARGET),
    cases=_cases,
    how=HOW,
    answers=_answers,
    blocks=_blocks,
    definitions=_DEFINITIONS,
)  # fmt: skip
