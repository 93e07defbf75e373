"""Tables and figures of the experiment ``variants``."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import product

from nsys_analyzer.experiments.attention.core import curves, figure, mib, ms
from nsys_analyzer.experiments.section import bars, ratio, spread
from nsys_analyzer.experiments.variants.cases import VariantsRow
from nsys_analyzer.experiments.variants.compared import (
    MASKS,
    PASSES,
    Growth,
    Variants,
    bytes_of,
    error_of,
    growths,
    shape_name,
    status,
)
from nsys_analyzer.report.model import Bars, Lines, Table
from nsys_analyzer.report.tables import Field, table


def _worst(rows: Sequence[VariantsRow], one: str, kind: str) -> str | None:
    found = [error for row in rows if (error := error_of(row, one, kind)) is not None]
    return f"{max(found):.1e}" if found else None


def _tolerance(rows: Sequence[VariantsRow], name: str) -> str | None:
    return next((f"{most:.0e}" for row in rows if (most := figure(row, name)) is not None), None)


_ERRORS: tuple[Field[list[VariantsRow]], ...] = (
    Field("variant", "text", lambda rows: rows[0].case.implementation),
    Field("precision", "text", lambda rows: rows[0].case.precision),
    Field("cases", "count", len),
    Field("forward", "text", lambda rows: _worst(rows, "forward", "max")),
    Field("gradients", "text", lambda rows: _worst(rows, "forward_backward", "max")),
    Field("tolerance", "text", lambda rows: _tolerance(rows, "tolerance")),
    Field("‖forward‖", "text", lambda rows: _worst(rows, "forward", "relative")),
    Field("‖gradients‖", "text", lambda rows: _worst(rows, "forward_backward", "relative")),
    Field("‖tolerance‖", "text", lambda rows: _tolerance(rows, "relative_tolerance")),
)


def errors(variants: Variants) -> Table:
    """The largest error of each variant in each precision, over all shapes."""
    groups: dict[tuple[str, str], list[VariantsRow]] = {}
    for row in variants.rows:
        if error_of(row, "forward") is not None:
            groups.setdefault((row.case.precision, row.case.implementation), []).append(row)
    return table(_ERRORS, groups.values(), "Largest error of each variant, checked before it was timed:", names=2)


def passes(variants: Variants, one: str) -> Table:
    """Time and memory of a pass of each row, and its gain over naive."""

    def full_over_causal(row: VariantsRow) -> float | None:
        full = variants.find(row.case.shape, row.case.implementation, False)
        return ratio(ms(full, one), ms(row, one)) if row.case.causal else None

    fields: tuple[Field[VariantsRow], ...] = (
        Field("shape", "text", lambda row: shape_name(row.case.shape)),
        Field("variant", "text", lambda row: row.case.implementation),
        Field("mask", "text", lambda row: "causal" if row.case.causal else "none"),
        Field("ms", "ms", lambda row: spread(figure(row, one))),
        Field("over naive", "factor", lambda row: variants.gain(row, one)),
        Field("without mask ÷ causal", "factor", full_over_causal),
        Field("peak", "bytes", lambda row: bytes_of(row, one)),
        Field("allocated", "bytes", lambda row: bytes_of(row, one, "total")),
        Field("peak ÷ inputs", "factor", lambda row: ratio(bytes_of(row, one), row.figures.inputs_bytes)),
        Field("status", "text", lambda row: status(row, one)),
    )
    rows = [row for row in variants.rows if status(row, one) != "not run"]
    caption = f"{PASSES[one].capitalize()}: time, mean ± standard deviation, and memory above the inputs:"
    return table(fields, rows, caption, names=3)


def _written(power: float | None) -> str | None:
    return None if power is None else f"{power:.2f}"


_GROWTH: tuple[Field[Growth], ...] = (
    Field("variant", "text", lambda one: one.variant),
    Field("peak", "text", lambda one: _written(one.peak)),
    Field("allocated", "text", lambda one: _written(one.allocated)),
)


def growth(variants: Variants) -> Iterator[Table]:
    """The growth of every variant, a table for shapes that differ in their tokens alone."""
    for (first, *_, last), found in growths(variants):
        tokens = f"{first.context_length:,} to {last.context_length:,} tokens"
        of = f"{first.batch_size} × {first.heads} heads, d {first.d_head}, {first.precision}, not causal"
        yield table(_GROWTH, found, f"Growth from {tokens} ({of}): the power p of a + b·Nᵖ:")


def speed_ups(variants: Variants) -> Iterator[Bars]:
    """The gain of each variant over naive, forward."""
    for causal, words in MASKS.items():
        rows = [row for row in variants.rows if row.case.causal == causal and row.case.implementation != "naive"]
        gains = {(shape_name(row.case.shape), row.case.implementation): variants.gain(row) for row in rows}
        key, title = f"variants-speed-up-{words.replace(' ', '-')}", f"Speed-up over naive, forward, {words}"
        yield from bars(key, title, gains, "naive's time ÷ the variant's")


def memory_by_tokens(variants: Variants) -> Iterator[Lines]:
    """Peak memory over the tokens, a curve for each variant."""
    for number, family in enumerate(variants.families()):
        points: dict[str, list[tuple[float, float | None]]] = {name: [] for name in variants.names}
        for shape, name in product(family, variants.names):
            size = bytes_of(variants.find(shape, name, False), "forward")
            points[name].append((shape.context_length, mib(size)))
        key = f"variants-memory-by-tokens{f'-{number + 1}' if number else ''}"
        title = f"Peak memory of forward by tokens, {family[0].heads} heads, d {family[0].d_head}"
        yield from curves(key, title, points, "MiB above the inputs")
