"""Steps in fp32, TF32 and bf16 autocast: speed, memory, which tensor is in which dtype, and what accumulators lose."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple, TypeAlias

from nsys_analyzer.analysis.transformer.models import find_model
from nsys_analyzer.configuration import MODES, PRECISIONS
from nsys_analyzer.errors import ConfigurationError
from nsys_analyzer.experiments.model import Bench, Results, Settings, grid, option, several, single
from nsys_analyzer.experiments.section import bars, factor, formatted, ratio, spread
from nsys_analyzer.experiments.steps import (
    SHARED,
    TARGET,
    StepCase,
    StepFigures,
    StepRow,
    model_names,
    step_section,
)
from nsys_analyzer.report.model import Bars, Block, Details, Paragraph, Section
from nsys_analyzer.report.tables import Field, table
from nsys_analyzer.report.units import ABSENT
from nsys_analyzer.runs.rows import CaseTarget, Row, Task
from nsys_analyzer.text import phrase

_NAMES = {"tf32": "TF32", "bf16": "bf16 autocast"}
_DEFINITIONS = phrase(
    "*Speed-up* is the step time in fp32 of the same configuration ÷ this one's, *memory* this peak of allocated "
    "memory ÷ that in fp32; on a CPU memory is not counted. *tf32* lets matmuls of fp32 tensors keep 10 bits of their "
    "operands; *bf16* is autocast: matmuls in bf16, parameters and gradients in fp32, the casts a part of the step; "
    "autocast keeps its bf16 cast of every weight beside it, which may be more memory than small activations save. "
    "FLOPs are those of the matmuls; the times hold the elementwise work as well."
)
#: The term that the sums add.
TERM = 0.01
_AUTOCAST = ("fp32", "bf16", "fp16")
#: Operands of the matmuls, and how their sums may be accumulated.
_PRODUCTS = {
    "cuda": (
        ("fp32", "fp32"), ("tf32", "fp32"), ("bf16", "fp32"), ("bf16", "reduced"),
        ("fp16", "fp32"), ("fp16", "reduced"), ("fp16", "fp16"),
    ),
    "cpu": (("fp32", "fp32"), ("bf16", "fp32"), ("fp16", "fp32")),
}  # fmt: skip
_HOW_ROUNDED = phrase(
    "*Rounded once* is the error of the exact result in the matmul's dtype: what is above it comes from the "
    "accumulation, and for TF32 from operands that lose 13 bits. *Reduced*: a matmul that is split along its sum may "
    "join the parts in the operands' precision (`allow_fp16_reduced_precision_reduction`, "
    "`allow_bf16_reduced_precision_reduction`: on by default in PyTorch); *fp16*: `allow_fp16_accumulation`."
)
_WHY_SUMS_DIFFER = (
    "A sum is rounded at each addition, so a small accumulator loses what is below half its last digit. Terms in fp16 "
    "carry their own rounding into any accumulator, converted first or not."
)


@dataclass(frozen=True)
class DtypesCase:
    """One experiment in one precision; each takes the options that concern it."""

    device: str
    experiment: str = option("dtypes", "what to look at", ("dtypes", "sums", "products"))
    model: str = option("toy", "whose dtypes", ("toy", "transformer"))
    precision: str = option("bf16", "of autocast, or of the matmuls' operands", ("fp32", "tf32", "bf16", "fp16"))
    accumulation: str = option(
        "fp32",
        "of matmuls: fp32; reduced: parts of a split sum may be joined in the operands' precision; fp16: all in fp16",
        ("fp32", "reduced", "fp16"),
    )
    terms: int = option(1000, f"how often the sums add {TERM}")
    length: int = option(16384, "terms of each sum in the matmuls")


@dataclass
class DtypesFigures:
    """The figures of the experiments; each has some of them.

    Attributes:
        dtypes: tensors with their dtypes.
        sum_fp32_of_fp32: the sum in an accumulator of the first dtype, of terms of the second; the others alike.
        sum_fp32_of_fp16_converted: of fp16 terms that are converted to fp32 before they are added.
        product_error: ‖matmul − exact‖ ÷ ‖exact‖.
        rounding_error: the same of the exact matmul, rounded once to the operands' dtype.
        product_bits: bits of the mantissa that the matmul keeps of its operands.
    """

    dtypes: list[tuple[str, str]] | None = None
    sum_fp32_of_fp32: float | None = None
    sum_fp16_of_fp16: float | None = None
    sum_bf16_of_bf16: float | None = None
    sum_fp32_of_fp16: float | None = None
    sum_fp32_of_fp16_converted: float | None = None
    sum_exact: float | None = None
    product_error: float | None = None
    product_bits: int | None = None
    rounding_error: float | None = None


DTYPES_TARGET = CaseTarget("profiling_targets.dtypes", DtypesCase, DtypesFigures)
_DtypesRow: TypeAlias = Row[DtypesCase, DtypesFigures]


def _cases(settings: Settings) -> Iterator[Task[StepCase] | Task[DtypesCase]]:
    """Yields the precisions of a mode after one another; then dtypes, sums, and matmuls with long sums."""
    for text in settings["model"]:
        name, _, batch = text.partition(":")
        if not batch.isdecimal() or int(batch) < 1:
            raise ConfigurationError(f"{text!r} is no model with a batch size", "Write it as small:64")
        yield from grid(
            TARGET, settings, lambda case: f"{case.model}, batch {case.batch_size}, {case.mode}, {case.precision}",
            model=(find_model(name).name,), batch_size=(int(batch),),
        )  # fmt: skip

    def label(case: DtypesCase) -> str:
        is_dtypes = case.experiment == "dtypes"
        about = f"dtypes of {case.model}" if is_dtypes else case.experiment.replace("product", "matmul")
        return f"{about}, {case.precision}, accumulation in {case.accumulation}"

    models = ("toy", "transformer")
    yield from grid(DTYPES_TARGET, settings, label, experiment=("dtypes",), model=models, precision=_AUTOCAST)
    yield from grid(DTYPES_TARGET, settings, label, experiment=("sums",), model=("toy",), precision=("bf16",))
    for precision, accumulation in _PRODUCTS[settings.device]:
        yield from grid(
            DTYPES_TARGET, settings, label, experiment=("products",), precision=(precision,),
            accumulation=(accumulation,), model=("toy",),
        )  # fmt: skip


def _section(results: Results) -> Section:
    rows, other = results.rows_of(TARGET), results.rows_of(DTYPES_TARGET)
    compared = _compare(rows)
    return step_section(
        "precision",
        "fp32, TF32 and bf16 autocast",
        results,
        rows,
        answers=(*_answers(compared), *_dtypes_answers(other)),
        blocks=(
            table(_FIELDS, compared, "Time and memory of a step by precision:", names=3),
            *_bars(compared),
            *_dtypes_blocks(other),
            *_accumulation_blocks(other),
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
    Field("configuration", "text", lambda compared: compared.setup),
    Field("mode", "text", lambda compared: compared.row.case.mode),
    Field("precision", "text", lambda compared: compared.row.case.precision),
    Field("step ms", "ms", lambda compared: spread(compared.row.figures.step)),
    Field("speed-up", "factor", lambda compared: compared.speed_up),
    Field("tokens/s", "count", lambda compared: compared.row.figures.tokens_per_s),
    Field("peak", "bytes", lambda compared: compared.row.figures.peak_allocated_bytes),
    Field("memory", "factor", lambda compared: compared.memory),
    Field("status", "text", lambda compared: compared.row.status),
)


def _answers(compared: Sequence[_Compared]) -> Iterator[str]:
    """Yields the speed-up of each precision in the last mode."""
    last = max((pair.row.case.mode for pair in compared), key=MODES.index, default="")
    setups: dict[str, list[str]] = {}
    for pair in compared:
        case = pair.row.case
        if case.mode == last and case.precision != "fp32" and pair.speed_up:
            setups.setdefault(pair.setup, []).append(f"{_NAMES[case.precision]} {factor(pair.speed_up)}")
    if setups:
        speed_ups = "; ".join(f"{setup}: {', '.join(factors)}" for setup, factors in setups.items())
        yield f"Speed of {last} against fp32: {speed_ups}."


def _bars(compared: Sequence[_Compared]) -> Iterator[Bars]:
    """Yields throughput and, on a GPU, memory; a group for each configuration and mode, a bar for each precision."""
    throughput: dict[tuple[str, str], float | None] = {}
    memory: dict[tuple[str, str], float | None] = {}
    for pair in sorted(compared, key=lambda pair: PRECISIONS.index(pair.row.case.precision)):
        bar, figures = (f"{pair.setup}, {pair.row.case.mode}", pair.row.case.precision), pair.row.figures
        peak = figures.peak_allocated_bytes
        throughput[bar] = figures.tokens_per_s if pair.row.ok else None
        memory[bar] = peak / 2**30 if pair.row.ok and peak is not None else None
    yield from bars("precision-throughput", "Throughput by precision", throughput, "tokens/s")
    yield from bars("precision-memory", "Peak of allocated memory by precision", memory, "GiB")


def _of(rows: Sequence[_DtypesRow], experiment: str) -> list[_DtypesRow]:
    return [row for row in rows if row.case.experiment == experiment]


def _dtypes_answers(rows: Sequence[_DtypesRow]) -> Iterator[str]:
    """Yields the tensors that stay in fp32 under every autocast, and a sum in fp16 and fp32."""
    toy = [row for row in _of(rows, "dtypes") if row.case.model == "toy" and row.case.precision != "fp32"]
    if seen := [dict(row.figures.dtypes) for row in toy if row.figures.dtypes]:
        kept = [tensor for tensor in seen[0] if all(dtypes.get(tensor) == "float32" for dtypes in seen)]
        yield f"Under autocast these stay in fp32: {', '.join(kept) or 'none'}."
    for row in _of(rows, "sums"):
        half, full = row.figures.sum_fp16_of_fp16, row.figures.sum_fp32_of_fp32
        if half is not None and full is not None:
            yield f"{TERM} added {row.case.terms:,} times gives {half:.7g} in fp16 and {full:.7g} in fp32."


def _dtypes_blocks(rows: Sequence[_DtypesRow]) -> Iterator[Block]:
    """Yields the dtypes of each model's tensors, as far as there are rows of them."""

    def dtype(row: _DtypesRow, dtypes: Mapping[str, str]) -> Callable[[str], str]:
        return lambda tensor: dtypes.get(tensor, ABSENT if row.ok else row.status)

    for model, title in (("toy", "fc1, ReLU, LayerNorm, fc2"), ("transformer", "one block of the transformer")):
        of_model = [row for row in _of(rows, "dtypes") if row.case.model == model]
        columns = [(row, dict(row.figures.dtypes or ())) for row in of_model]
        fields: list[Field[str]] = [Field("tensor", "text", str)]
        for row, dtypes in columns:
            heading = "no autocast" if row.case.precision == "fp32" else f"autocast {row.case.precision}"
            fields.append(Field(heading, "code", dtype(row, dtypes)))
        tensors = dict.fromkeys(tensor for _, dtypes in columns for tensor in dtypes)
        if of_model and model == "toy":
            caption = phrase("*Dtypes under autocast*: {}; cross entropy; parameters in fp32.", title)
            yield table(fields, tensors, caption)
        elif of_model:
            yield Details(f"Dtypes under autocast: {title}", (table(fields, tensors),))


class _Sum(NamedTuple):
    """A sum of terms in an accumulator, and its relative error."""

    accumulator: str
    terms: str
    value: float
    error: float


def _accumulation_blocks(rows: Sequence[_DtypesRow]) -> Iterator[Block]:
    """Yields the tables of sums and of matmuls, as far as there are rows of them."""
    for row in _of(rows, "sums"):
        caption = phrase("*Accumulation*: {} added {:,} times, one by one.", TERM, row.case.terms)
        if not row.ok:
            yield Paragraph(phrase("{} Not measured: {}, {}.", caption, row.status, row.message))
            continue
        figures = row.figures
        values = {
            ("fp32", "fp32"): figures.sum_fp32_of_fp32,
            ("fp16", "fp16"): figures.sum_fp16_of_fp16,
            ("bf16", "bf16"): figures.sum_bf16_of_bf16,
            ("fp32", "fp16"): figures.sum_fp32_of_fp16,
            ("fp32", "fp16, converted to fp32 first"): figures.sum_fp32_of_fp16_converted,
        }
        exact = figures.sum_exact
        sums = [
            _Sum(*names, value, value / exact - 1) for names, value in values.items() if value is not None and exact
        ]
        yield table(_SUM, sums, caption)
        yield Paragraph(_WHY_SUMS_DIFFER)
    if matmuls := _of(rows, "products"):
        length = ", ".join(dict.fromkeys(f"{row.case.length:,}" for row in matmuls))
        caption = phrase("*Accumulation in matmuls*: sums of {} terms between 0 and 1, against fp64.", length)
        yield table(_MATMUL, matmuls, caption)
        yield Paragraph(_HOW_ROUNDED)


_SUM: tuple[Field[_Sum], ...] = (
    Field("accumulator", "text", lambda total: total.accumulator),
    Field("terms", "text", lambda total: total.terms),
    Field("sum", "text", lambda total: f"{total.value:.7g}"),
    Field("error, relative", "text", lambda total: f"{total.error:+.1e}"),
)
_MATMUL: tuple[Field[_DtypesRow], ...] = (
    Field("operands", "text", lambda row: row.case.precision),
    Field("accumulation", "text", lambda row: row.case.accumulation),
    Field("error, relative", "text", lambda row: formatted(row.figures.product_error, ".2e")),
    Field("rounded once", "text", lambda row: formatted(row.figures.rounding_error, ".2e")),
    Field("ratio", "factor", lambda row: ratio(row.figures.product_error, row.figures.rounding_error)),
    Field("status", "text", lambda row: row.status),
)


BENCH = Bench(
    "precision",
    "Steps in fp32, TF32 and bf16 autocast: speed, memory, dtypes, and what an accumulator's precision costs.",
    (
        several(
            StepCase, "model", ("small:64", "large:32"), ("small:1",),
            help="sizes, each with its batch size after a colon",
        ),
        several(StepCase, "mode", MODES[:2]),
        several(StepCase, "precision", PRECISIONS, ("fp32", "bf16")),
        *single(StepCase, "context_length"),
        *SHARED,
        *single(DtypesCase, "terms", "length"),
    ),
    lambda settings: tuple(_cases(settings)),
    _section,
    targets=(TARGET, DTYPES_TARGET),
)  # fmt: skip
