"""What autocast computes in, and what an accumulator's precision costs: cases and blocks of the bench ``precision``."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from nsys_analyzer.benches.model import Case, Option, Row, Settings
from nsys_analyzer.report.model import Block, Cell, Column, Details, Paragraph, Table
from nsys_analyzer.report.units import ABSENT
from nsys_analyzer.text import emphasis, marked

TARGET = "profiling_targets.dtypes"
OPTIONS = (
    Option("terms", int, (1000,), (1000,), "How often the sums add 0.01.", several=False),
    Option("length", int, (16384,), (16384,), "Terms of each sum in the products.", several=False),
)
_AUTOCAST = ("fp32", "bf16", "fp16")
#: Operands of the products, and how their sums may be accumulated.
_PRODUCTS = {
    "cuda": (
        ("fp32", "fp32"), ("tf32", "fp32"), ("bf16", "fp32"), ("bf16", "reduced"),
        ("fp16", "fp32"), ("fp16", "reduced"), ("fp16", "fp16"),
    ),
    "cpu": (("fp32", "fp32"), ("bf16", "fp32"), ("fp16", "fp32")),
}  # fmt: skip
_SUMS = {
    "sum_fp32_of_fp32": ("fp32", "fp32"),
    "sum_fp16_of_fp16": ("fp16", "fp16"),
    "sum_bf16_of_bf16": ("bf16", "bf16"),
    "sum_fp32_of_fp16": ("fp32", "fp16"),
    "sum_fp32_of_fp16_converted": ("fp32", "fp16, converted to fp32 first"),
}
#: What the columns of the products say.
_HOW_ROUNDED = marked(
    "*Rounded once* is the error of the exact result in the dtype of the product: what is above it comes from the "
    "accumulation, and for TF32 from operands that lose 13 bits on the way in. *Reduced*: a product that is split "
    "along its sum may join the parts in the operands' precision (`allow_fp16_reduced_precision_reduction`, "
    "`allow_bf16_reduced_precision_reduction`: on by default in PyTorch); *fp16*: `allow_fp16_accumulation`."
)


def cases(settings: Settings) -> Iterator[Case]:
    """Dtypes of two small models, then sums, then long products."""
    for model in ("toy", "transformer"):
        for precision in _AUTOCAST:
            yield _case(
                settings, f"dtypes of {model}, {precision}", experiment="dtypes", model=model, precision=precision
            )
    yield _case(settings, "sums", experiment="sums", terms=settings["terms"])
    for precision, accumulation in _PRODUCTS[settings.device]:
        yield _case(
            settings, f"products of {precision}, accumulation {accumulation}", experiment="products",
            precision=precision, accumulation=accumulation, length=settings["length"],
        )  # fmt: skip


def _case(settings: Settings, label: str, **values: object) -> Case:
    return Case(TARGET, {"device": settings.device, **values}, label)


def _of(rows: Sequence[Row], experiment: str) -> list[Row]:
    return [row for row in rows if row.case["experiment"] == experiment]


def blocks(rows: Sequence[Row]) -> Iterator[Block]:
    """The tables of dtypes, of sums and of products, as far as there are rows of them."""
    found = _of(rows, "dtypes")
    for model, title in (("toy", "fc1, ReLU, LayerNorm, fc2"), ("transformer", "one block of the transformer")):
        if own := [row for row in found if row.case["model"] == model]:
            table = _dtypes(own)
            caption = f"{emphasis('Dtypes under autocast')}: {title}; cross entropy; parameters in fp32."
            yield (
                Table(table.columns, table.rows, caption)
                if model == "toy"
                else Details(f"Dtypes under autocast: {title}", (table,))
            )
    yield from _sums(_of(rows, "sums"))
    yield from _products(_of(rows, "products"))


def _dtypes(rows: Sequence[Row]) -> Table:
    """A line for each tensor, a column for each precision; of a row without dtypes its status."""
    seen = [dict(row.figures.get("dtypes", [])) for row in rows]
    tensors = dict.fromkeys(tensor for one in seen for tensor in one)
    columns = (Column("tensor"), *(Column(_heading(row), "code") for row in rows))
    cells = (
        (tensor, *(one.get(tensor, ABSENT if row.ok else row.status) for one, row in zip(seen, rows, strict=True)))
        for tensor in tensors
    )
    return Table(columns, tuple(cells))


def _heading(row: Row) -> str:
    return "no autocast" if row.case["precision"] == "fp32" else f"autocast {row.case['precision']}"


def answer(rows: Sequence[Row]) -> Iterator[str]:
    """What stays in fp32 under every autocast, and what the accumulator does to a sum, in a sentence each."""
    toy = [
        dict(row.figures["dtypes"]) for row in _of(rows, "dtypes")
        if row.ok and row.case["model"] == "toy" and row.case["precision"] != "fp32"
    ]  # fmt: skip
    if toy:
        kept = [tensor for tensor in toy[0] if all(one.get(tensor) == "float32" for one in toy)]
        yield f"Under autocast these stay in fp32: {', '.join(kept) or 'none'}."
    for row in _of(rows, "sums"):
        if row.ok:
            half, full = (f"{row.figures[f'sum_{name}_of_{name}']:.7g}" for name in ("fp16", "fp32"))
            yield f"0.01 added {row.case['terms']:,} times gives {half} in fp16 and {full} in fp32."


def _error(figures: Mapping[str, float], key: str) -> float:
    """The relative error of a sum."""
    return figures[key] / figures["sum_exact"] - 1


def _sums(rows: Sequence[Row]) -> Iterator[Block]:
    columns = (Column("accumulator"), Column("terms"), Column("sum"), Column("error, relative"))
    for row in rows:
        caption = f"{emphasis('Accumulation')}: 0.01 added {row.case['terms']:,} times, one by one."
        if row.ok:
            lines = tuple(
                (total, terms, f"{row.figures[key]:.7g}", f"{_error(row.figures, key):+.1e}")
                for key, (total, terms) in _SUMS.items()
            )
            yield Table(columns, lines, caption)
            yield Paragraph(
                "A sum is rounded at each addition, so a small accumulator loses what is below half its last digit. "
                "Terms in fp16 carry their own rounding into any accumulator; converting them first changes nothing, "
                "for the addition does it anyway."
            )
        else:
            yield Paragraph(f"{caption} Not measured: {row.status}, {row.message}.")


def _products(rows: Sequence[Row]) -> Iterator[Block]:
    if not rows:
        return
    columns = (
        Column("operands"), Column("accumulation"), Column("error, relative"), Column("rounded once"),
        Column("ratio", "factor"), Column("status"),
    )  # fmt: skip
    lines = tuple(_product(row) for row in rows)
    length = ", ".join(dict.fromkeys(f"{row.case['length']:,}" for row in rows))
    caption = f"{emphasis('Accumulation in products')}: sums of {length} terms between 0 and 1, against fp64."
    yield Table(columns, lines, caption)
    yield Paragraph(_HOW_ROUNDED)


def _product(row: Row) -> tuple[Cell, ...]:
    found, rounded = row.figures.get("product_error"), row.figures.get("rounding_error")
    ratio = found / rounded if found and rounded else None
    errors = (ABSENT if one is None else f"{one:.2e}" for one in (found, rounded))
    return row.case["precision"], row.case["accumulation"], *errors, ratio, row.status
