"""What autocast computes in, and what an accumulator's precision costs: cases and blocks of the bench ``precision``."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from nsys_analyzer.experiments.model import CaseTarget, Row, Settings, Task, grid, option, single
from nsys_analyzer.experiments.section import ratio
from nsys_analyzer.report.model import Block, Details, Paragraph, Table
from nsys_analyzer.report.tables import Field, table
from nsys_analyzer.report.units import ABSENT
from nsys_analyzer.text import Words, phrase

#: What the sums add.
TERM = 0.01


@dataclass(frozen=True)
class DtypesCase:
    """One experiment in one precision; each takes the options that concern it."""

    device: str
    experiment: str = option("dtypes", "what to look at", ("dtypes", "sums", "products"))
    model: str = option("toy", "whose dtypes", ("toy", "transformer"))
    precision: str = option(
        "bf16", "autocast's of the dtypes, the operands' of the products", ("fp32", "tf32", "bf16", "fp16")
    )
    accumulation: str = option(
        "fp32",
        "of products: fp32; reduced: a product that is split joins its parts in the operands' precision, which is what "
        "PyTorch allows by default; fp16: all in fp16",
        ("fp32", "reduced", "fp16"),
    )
    terms: int = option(1000, f"how often the sums add {TERM}")
    length: int = option(16384, "terms of each sum in the products")


@dataclass
class DtypesFigures:
    """What one experiment found; each has figures of its own.

    Attributes:
        dtypes: of ``dtypes``, each tensor with its dtype.
        sum_fp32_of_fp32, sum_fp16_of_fp16, sum_bf16_of_bf16, sum_fp32_of_fp16, sum_fp32_of_fp16_converted: of
            ``sums``, the sum in an accumulator of terms, the last converted to fp32 before they are added.
        sum_exact: what the sum should be.
        product_error: of ``products``, the length of the difference to the exact product ÷ that of the exact one.
        product_bits: bits of the mantissa that the product keeps of its operands.
        rounding_error: the error of the exact product rounded once, to the dtype of the operands.

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
OPTIONS = (single(DtypesCase, "terms"), single(DtypesCase, "length"))
_Row: TypeAlias = Row[DtypesCase, DtypesFigures]
_AUTOCAST = ("fp32", "bf16", "fp16")
#: Operands of the products, and how their sums may be accumulated.
_PRODUCTS = {
    "cuda": (
        ("fp32", "fp32"), ("tf32", "fp32"), ("bf16", "fp32"), ("bf16", "reduced"),
        ("fp16", "fp32"), ("fp16", "reduced"), ("fp16", "fp16"),
    ),
    "cpu": (("fp32", "fp32"), ("bf16", "fp32"), ("fp16", "fp32")),
}  # fmt: skip
#: What the columns of the products say.
_HOW_ROUNDED = phrase(
    "*Rounded once* is the error of the exact result in the dtype of the product: what is above it comes from the "
    "accumulation, and for TF32 from operands that lose 13 bits on the way in. *Reduced*: a product that is split "
    "along its sum may join the parts in the operands' precision (`allow_fp16_reduced_precision_reduction`, "
    "`allow_bf16_reduced_precision_reduction`: on by default in PyTorch); *fp16*: `allow_fp16_accumulation`."
)


def cases(settings: Settings) -> Iterator[Task[DtypesCase]]:
    """Dtypes of two small models, then sums, then long products."""
    models = ("toy", "transformer")
    yield from grid(TARGET, settings, _label, experiment=("dtypes",), model=models, precision=_AUTOCAST)
    yield from grid(TARGET, settings, _label, experiment=("sums",))
    for precision, accumulation in _PRODUCTS[settings.device]:
        yield from grid(
            TARGET, settings, _label, experiment=("products",), precision=(precision,), accumulation=(accumulation,)
        )


def _label(case: DtypesCase) -> str:
    if case.experiment == "dtypes":
        return f"dtypes of {case.model}, {case.precision}"
    return "sums" if case.experiment == "sums" else f"products of {case.precision}, accumulation {case.accumulation}"


def _of(rows: Sequence[_Row], experiment: str) -> list[_Row]:
    return [row for row in rows if row.case.experiment == experiment]


def blocks(rows: Sequence[_Row]) -> Iterator[Block]:
    """The tables of dtypes, of sums and of products, as far as there are rows of them."""
    found = _of(rows, "dtypes")
    for model, title in (("toy", "fc1, ReLU, LayerNorm, fc2"), ("transformer", "one block of the transformer")):
        if own := [row for row in found if row.case.model == model]:
            caption = phrase("*Dtypes under autocast*: {}; cross entropy; parameters in fp32.", title)
            shown = model == "toy"
            lines = _dtypes(own, caption if shown else "")
            yield lines if shown else Details(f"Dtypes under autocast: {title}", (lines,))
    yield from _sums(_of(rows, "sums"))
    yield from _products(_of(rows, "products"))


def _dtypes(rows: Sequence[_Row], caption: Words) -> Table:
    """A line for each tensor, a column for each precision; of a row without dtypes its status."""
    seen = [(row, dict(row.figures.dtypes or ())) for row in rows]
    tensors = dict.fromkeys(tensor for _, one in seen for tensor in one)
    columns: list[Field[str]] = [Field("tensor", "text", lambda tensor: tensor)]
    for row, one in seen:
        lacking = ABSENT if row.ok else row.status
        columns.append(Field(_heading(row), "code", _cell(one, lacking)))
    return table(columns, tensors, caption)


def _cell(seen: Mapping[str, str], lacking: str) -> Callable[[str], str]:
    return lambda tensor: seen.get(tensor, lacking)


def _heading(row: _Row) -> str:
    return "no autocast" if row.case.precision == "fp32" else f"autocast {row.case.precision}"


def answer(rows: Sequence[_Row]) -> Iterator[str]:
    """What stays in fp32 under every autocast, and what the accumulator does to a sum, in a sentence each."""
    toy = [row for row in _of(rows, "dtypes") if row.case.model == "toy" and row.case.precision != "fp32"]
    if seen := [dict(row.figures.dtypes) for row in toy if row.figures.dtypes]:
        kept = [tensor for tensor in seen[0] if all(one.get(tensor) == "float32" for one in seen)]
        yield f"Under autocast these stay in fp32: {', '.join(kept) or 'none'}."
    for row in _of(rows, "sums"):
        half, full = row.figures.sum_fp16_of_fp16, row.figures.sum_fp32_of_fp32
        if half is not None and full is not None:
            yield f"{TERM} added {row.case.terms:,} times gives {half:.7g} in fp16 and {full:.7g} in fp32."


@dataclass(frozen=True)
class _Sum:
    """A sum in an accumulator, and its relative error."""

    accumulator: str
    terms: str
    found: float
    error: float


def _sums_of(figures: DtypesFigures) -> Iterator[_Sum]:
    sums = (
        ("fp32", "fp32", figures.sum_fp32_of_fp32),
        ("fp16", "fp16", figures.sum_fp16_of_fp16),
        ("bf16", "bf16", figures.sum_bf16_of_bf16),
        ("fp32", "fp16", figures.sum_fp32_of_fp16),
        ("fp32", "fp16, converted to fp32 first", figures.sum_fp32_of_fp16_converted),
    )
    for accumulator, terms, found in sums:
        if found is not None and figures.sum_exact:
            yield _Sum(accumulator, terms, found, found / figures.sum_exact - 1)


_SUMS: tuple[Field[_Sum], ...] = (
    Field("accumulator", "text", lambda one: one.accumulator),
    Field("terms", "text", lambda one: one.terms),
    Field("sum", "text", lambda one: f"{one.found:.7g}"),
    Field("error, relative", "text", lambda one: f"{one.error:+.1e}"),
)


def _sums(rows: Sequence[_Row]) -> Iterator[Block]:
    for row in rows:
        caption = phrase("*Accumulation*: {} added {:,} times, one by one.", TERM, row.case.terms)
        if row.ok:
            yield table(_SUMS, _sums_of(row.figures), caption)
            yield Paragraph(
                "A sum is rounded at each addition, so a small accumulator loses what is below half its last digit. "
                "Terms in fp16 carry their own rounding into any accumulator; converting them first changes nothing, "
                "for the addition does it anyway."
            )
        else:
            yield Paragraph(phrase("{} Not measured: {}, {}.", caption, row.status, row.message))


_PRODUCT: tuple[Field[_Row], ...] = (
    Field("operands", "text", lambda row: row.case.precision),
    Field("accumulation", "text", lambda row: row.case.accumulation),
    Field("error, relative", "text", lambda row: _error(row.figures.product_error)),
    Field("rounded once", "text", lambda row: _error(row.figures.rounding_error)),
    Field("ratio", "factor", lambda row: ratio(row.figures.product_error, row.figures.rounding_error)),
    Field("status", "text", lambda row: row.status),
)


def _error(found: float | None) -> str:
    return ABSENT if found is None else f"{found:.2e}"


def _products(rows: Sequence[_Row]) -> Iterator[Block]:
    if rows:
        length = ", ".join(dict.fromkeys(f"{row.case.length:,}" for row in rows))
        caption = phrase("*Accumulation in products*: sums of {} terms between 0 and 1, against fp64.", length)
        yield table(_PRODUCT, rows, caption)
        yield Paragraph(_HOW_ROUNDED)
