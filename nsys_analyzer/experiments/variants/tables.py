"""Tables and figures of the experiment ``variants``."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from nsys_analyzer.analysis.transformer.attention_costs import AttentionShape
from nsys_analyzer.experiments.attention.core import curves, figure, ms, same_status, spread
from nsys_analyzer.experiments.section import bars, ratio
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


class _Both(NamedTuple):
    """A variant at a shape, and its rows not causal and causal, of what was asked for."""

    shape: AttentionShape
    variant: str
    rows: dict[bool, VariantsRow | None]

    def status(self, one: str) -> str:
        """How a pass ended."""
        return same_status({("full", "causal")[causal]: status(row, one) for causal, row in self.rows.items()})


def _both(variants: Variants) -> list[_Both]:
    masks = sorted({row.case.causal for row in variants.rows})
    return [
        _Both(shape, name, {causal: variants.find(shape, name, causal) for causal in masks})
        for shape in variants.shapes
        for name in variants.names
    ]


_NAMES: tuple[Field[_Both], ...] = (
    Field("shape", "text", lambda both: shape_name(both.shape)),
    Field("variant", "text", lambda both: both.variant),
)


def times(variants: Variants, one: str) -> Table:
    """The time of each variant at each shape, not causal and causal, and its gain over naive."""
    fields: tuple[Field[_Both], ...] = (
        *_NAMES,
        Field("ms", "ms", lambda both: spread(both.rows.get(False), one)),
        Field("over naive", "factor", lambda both: variants.gain(both.shape, both.variant, False, one)),
        Field("causal ms", "ms", lambda both: spread(both.rows.get(True), one)),
        Field("over naive", "factor", lambda both: variants.gain(both.shape, both.variant, True, one)),
        Field("÷ causal", "factor", lambda both: ratio(ms(both.rows.get(False), one), ms(both.rows.get(True), one))),
        Field("status", "text", lambda both: both.status(one)),
    )
    rows = [both for both in _both(variants) if one == "forward" or both.status(one) != "not run"]
    return table(fields, rows, f"Time of {PASSES[one]}, mean ± standard deviation:", names=2)


def memory(variants: Variants, one: str) -> Table:
    """Peak and sum of all allocations of each variant at each shape, not causal and causal."""
    fields: tuple[Field[_Both], ...] = (
        *_NAMES,
        Field("peak", "bytes", lambda both: bytes_of(both.rows.get(False), one)),
        Field("allocated", "bytes", lambda both: bytes_of(both.rows.get(False), one, "total")),
        Field("causal peak", "bytes", lambda both: bytes_of(both.rows.get(True), one)),
        Field("allocated", "bytes", lambda both: bytes_of(both.rows.get(True), one, "total")),
        Field("peak ÷ inputs", "factor", lambda both: _of_inputs(both.rows.get(False), one)),
    )
    return table(fields, _both(variants), f"Memory of {PASSES[one]} above the inputs:", names=2)


def _of_inputs(row: VariantsRow | None, one: str) -> float | None:
    return ratio(bytes_of(row, one), figure(row, "inputs_bytes"))


def _written(power: float | None) -> str | None:
    return None if power is None else f"{power:.2f}"


_GROWTH: tuple[Field[Growth], ...] = (
    Field("variant", "text", lambda one: one.variant),
    Field("tokens", "text", lambda one: "{:,} to {:,}".format(*one.tokens)),
    Field("peak", "text", lambda one: _written(one.peak)),
    Field("allocated", "text", lambda one: _written(one.allocated)),
    Field("time", "text", lambda one: _written(one.time)),
)


def growth(variants: Variants) -> Iterator[Table]:
    """The growth of every variant, a table for shapes that differ in their tokens alone."""
    for first, found in growths(variants):
        of = f"{first.batch_size} × {first.heads} heads, d {first.d_head}, {first.precision}"
        yield table(_GROWTH, found, f"Growth with the tokens ({of}), not causal: the power p of a + b·Nᵖ:", names=2)


def speed_ups(variants: Variants) -> Iterator[Bars]:
    """The gain of each variant over naive, forward."""
    for causal, words in MASKS.items():
        gains = {
            (shape_name(shape), name): variants.gain(shape, name, causal)
            for shape in variants.shapes
            for name in variants.names
            if name != "naive" and ms(variants.find(shape, "naive", causal), "forward")
        }
        key, title = f"variants-speed-up-{words.replace(' ', '-')}", f"Speed-up over naive, forward, {words}"
        yield from bars(key, title, gains, "naive's time ÷ the variant's")


def memory_by_tokens(variants: Variants) -> Iterator[Lines]:
    """Peak memory over the tokens, a curve for each variant."""
    for number, family in enumerate(variants.families()):
        points = {
            name: [(shape.context_length, _mib(variants.find(shape, name, False))) for shape in family]
            for name in variants.names
        }
        key = f"variants-memory-by-tokens{f'-{number + 1}' if number else ''}"
        title = f"Peak memory of forward by tokens, {family[0].heads} heads, d {family[0].d_head}"
        yield from curves(key, title, points, "MiB above the inputs")


def _mib(row: VariantsRow | None) -> float | None:
    size = bytes_of(row, "forward")
    return None if size is None else size / 2**20
