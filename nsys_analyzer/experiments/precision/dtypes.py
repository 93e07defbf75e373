"""Dtypes under autocast, and the error that an accumulator's precision costs: a part of the bench ``precision``."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, TypeAlias

from nsys_analyzer.experiments.model import CaseTarget, Row, Settings, Task, grid, option, single
from nsys_analyzer.experiments.section import ratio
from nsys_analyzer.report.model import Block, Details, Paragraph
from nsys_analyzer.report.tables import Field, table
from nsys_analyzer.report.units import ABSENT
from nsys_analyzer.text import phrase

#: The term that the sums add.
TERM = 0.01


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


TARGET = CaseTarget("profiling_targets.dtypes", DtypesCase, DtypesFigures)
OPTIONS = single(DtypesCase, "terms", "length")
_Row: TypeAlias = Row[DtypesCase, DtypesFigures]
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


def cases(settings: Settings) -> Iterator[Task[DtypesCase]]:
    """Dtypes of two small models, then sums, then matmuls with long sums."""
    models = ("toy", "transformer")
    yield from grid(TARGET, settings, _label, experiment=("dtypes",), model=models, precision=_AUTOCAST)
    yield from grid(TARGET, settings, _label, experiment=("sums",))
    for precision, accumulation in _PRODUCTS[settings.device]:
        yield from grid(
            TARGET, settings, _label, experiment=("products",), precision=(precision,), accumulation=(accumulation,)
        )


def _label(case: DtypesCase) -> str:
    about = f"dtypes of {case.model}" if case.experiment == "dtypes" else case.experiment.replace("product", "matmul")
    return f"{about}, {case.precision}, accumulation in {case.accumulation}"


def _of(rows: Sequence[_Row], experiment: str) -> list[_Row]:
    return [row for row in rows if row.case.experiment == experiment]


def blocks(rows: Sequence[_Row]) -> Iterator[Block]:
    """The tables of dtypes, of sums and of matmuls, as far as there are rows of them."""
    for model, title in (("toy", "fc1, ReLU, LayerNorm, fc2"), ("transformer", "one block of the transformer")):
        of_model = [row for row in _of(rows, "dtypes") if row.case.model == model]
        columns = [(row, dict(row.figures.dtypes or ())) for row in of_model]
        fields: list[Field[str]] = [Field("tensor", "text", str)]
        fields += [Field(_heading(row), "code", _dtype(row, dtypes)) for row, dtypes in columns]
        tensors = dict.fromkeys(tensor for _, dtypes in columns for tensor in dtypes)
        if not of_model:
            continue
        if model == "toy":
            caption = phrase("*Dtypes under autocast*: {}; cross entropy; parameters in fp32.", title)
            yield table(fields, tensors, caption)
        else:
            yield Details(f"Dtypes under autocast: {title}", (table(fields, tensors),))
    for row in _of(rows, "sums"):
        caption = phrase("*Accumulation*: {} added {:,} times, one by one.", TERM, row.case.terms)
        if row.ok:
            yield table(_SUM, _sums(row.figures), caption)
            yield Paragraph(_WHY_SUMS_DIFFER)
        else:
            yield Paragraph(phrase("{} Not measured: {}, {}.", caption, row.status, row.message))
    if matmuls := _of(rows, "products"):
        length = ", ".join(dict.fromkeys(f"{row.case.length:,}" for row in matmuls))
        caption = phrase("*Accumulation in matmuls*: sums of {} terms between 0 and 1, against fp64.", length)
        yield table(_MATMUL, matmuls, caption)
        yield Paragraph(_HOW_ROUNDED)


def _heading(row: _Row) -> str:
    return "no autocast" if row.case.precision == "fp32" else f"autocast {row.case.precision}"


def _dtype(row: _Row, dtypes: Mapping[str, str]) -> Callable[[str], str]:
    """The dtype of a tensor, or the status of a row without dtypes."""
    return lambda tensor: dtypes.get(tensor, ABSENT if row.ok else row.status)


def answer(rows: Sequence[_Row]) -> Iterator[str]:
    """The tensors that stay in fp32 under every autocast, and a sum in fp16 and fp32."""
    toy = [row for row in _of(rows, "dtypes") if row.case.model == "toy" and row.case.precision != "fp32"]
    if seen := [dict(row.figures.dtypes) for row in toy if row.figures.dtypes]:
        kept = [tensor for tensor in seen[0] if all(one.get(tensor) == "float32" for one in seen)]
        yield f"Under autocast these stay in fp32: {', '.join(kept) or 'none'}."
    for row in _of(rows, "sums"):
        half, full = row.figures.sum_fp16_of_fp16, row.figures.sum_fp32_of_fp32
        if half is not None and full is not None:
            yield f"{TERM} added {row.case.terms:,} times gives {half:.7g} in fp16 and {full:.7g} in fp32."


class _Sum(NamedTuple):
    """A sum of terms in an accumulator, and its relative error."""

    accumulator: str
    terms: str
    value: float
    error: float


def _sums(figures: DtypesFigures) -> Iterator[_Sum]:
    sums = (
        ("fp32", "fp32", figures.sum_fp32_of_fp32),
        ("fp16", "fp16", figures.sum_fp16_of_fp16),
        ("bf16", "bf16", figures.sum_bf16_of_bf16),
        ("fp32", "fp16", figures.sum_fp32_of_fp16),
        ("fp32", "fp16, converted to fp32 first", figures.sum_fp32_of_fp16_converted),
    )
    for accumulator, terms, value in sums:
        if value is not None and figures.sum_exact:
            yield _Sum(accumulator, terms, value, value / figures.sum_exact - 1)


_SUM: tuple[Field[_Sum], ...] = (
    Field("accumulator", "text", lambda one: one.accumulator),
    Field("terms", "text", lambda one: one.terms),
    Field("sum", "text", lambda one: f"{one.value:.7g}"),
    Field("error, relative", "text", lambda one: f"{one.error:+.1e}"),
)
_WHY_SUMS_DIFFER = (
    "A sum is rounded at each addition, so a small accumulator loses what is below half its last digit. Terms in fp16 "
    "carry their own rounding into any accumulator, converted first or not."
)
_MATMUL: tuple[Field[_Row], ...] = (
    Field("operands", "text", lambda row: row.case.precision),
    Field("accumulation", "text", lambda row: row.case.accumulation),
    Field("error, relative", "text", lambda row: _error(row.figures.product_error)),
    Field("rounded once", "text", lambda row: _error(row.figures.rounding_error)),
    Field("ratio", "factor", lambda row: ratio(row.figures.product_error, row.figures.rounding_error)),
    Field("status", "text", lambda row: row.status),
)


def _error(error: float | None) -> str:
    return ABSENT if error is None else f"{error:.2e}"
