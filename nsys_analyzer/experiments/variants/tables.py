"""The tables and figures of the experiment ``variants``."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from nsys_analyzer.analysis.transformer.attention_costs import AttentionShape
from nsys_analyzer.experiments.attention.core import curves, figure, ms, same_status, spread
from nsys_analyzer.experiments.section import ratio
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


class _Errors(NamedTuple):
    """The rows of a variant in a precision whose results were checked."""

    variant: str
    precision: str
    rows: list[VariantsRow]

    def worst(self, one: str, kind: str) -> str | None:
        """The largest error of a pass."""
        found = [error for row in self.rows if (error := error_of(row, one, kind)) is not None]
        return f"{max(found):.1e}" if found else None

    def tolerance(self, name: str) -> str | None:
        """What an error may be."""
        return next((f"{most:.0e}" for row in self.rows if (most := figure(row, name)) is not None), None)


_ERRORS: tuple[Field[_Errors], ...] = (
    Field("variant", "text", lambda one: one.variant),
    Field("precision", "text", lambda one: one.precision),
    Field("cases", "count", lambda one: len(one.rows)),
    Field("forward", "text", lambda one: one.worst("forward", "max")),
    Field("gradients", "text", lambda one: one.worst("forward_backward", "max")),
    Field("tolerance", "text", lambda one: one.tolerance("tolerance")),
    Field("‖forward‖", "text", lambda one: one.worst("forward", "relative")),
    Field("‖gradients‖", "text", lambda one: one.worst("forward_backward", "relative")),
    Field("‖tolerance‖", "text", lambda one: one.tolerance("relative_tolerance")),
)


def errors(variants: Variants) -> Table:
    """The largest error of each variant in each precision, over all shapes; of each tensor by itself where known."""
    checked = [row for row in variants.rows if error_of(row, "forward") is not None]
    found = [
        _Errors(name, precision, own)
        for name in variants.names
        for precision in variants.precisions
        if (own := [row for row in checked if (row.case.implementation, row.case.precision) == (name, precision)])
    ]
    return table(
        _ERRORS, found, "Largest error of each variant over all its cases, checked before it was timed:", names=2
    )


class _Both(NamedTuple):
    """A variant at a shape, not causal and causal."""

    shape: AttentionShape
    variant: str
    rows: tuple[VariantsRow | None, VariantsRow | None]


def _both(variants: Variants) -> list[_Both]:
    find = variants.find
    return [
        _Both(s, name, (find(s, name, False), find(s, name, True))) for s in variants.shapes for name in variants.names
    ]


_NAMES: tuple[Field[_Both], ...] = (
    Field("shape", "text", lambda both: shape_name(both.shape)),
    Field("variant", "text", lambda both: both.variant),
)


def times(variants: Variants, one: str) -> Table:
    """The time of each variant at each shape, not causal and causal, and what it gains over naive."""

    def ended(both: _Both) -> str:
        asked = {"full": False, "causal": True}
        return same_status({word: status(both.rows[on], one) for word, on in asked.items() if on in variants.masks})

    fields: tuple[Field[_Both], ...] = (
        *_NAMES,
        Field("ms", "ms", lambda both: spread(both.rows[0], one)),
        Field("over naive", "factor", lambda both: variants.gain(both.shape, both.variant, False, one)),
        Field("causal ms", "ms", lambda both: spread(both.rows[1], one)),
        Field("over naive", "factor", lambda both: variants.gain(both.shape, both.variant, True, one)),
        Field("÷ causal", "factor", lambda both: ratio(*(ms(row, one) for row in both.rows))),
        Field("status", "text", ended),
    )

    def wanted(row: VariantsRow) -> bool:
        """Whether the pass was asked for, and the variant has it."""
        return row.case.backward and not (row.ok and ms(row, one) is None)

    rows = [both for both in _both(variants) if one == "forward" or any(wanted(row) for row in both.rows if row)]
    words = f"Time of {PASSES[one]}, mean ± standard deviation, not causal and causal, and the one ÷ the other:"
    return table(fields, rows, words, names=2)


def memory(variants: Variants, one: str) -> Table:
    """Peak and sum of all allocations of each variant at each shape, not causal and causal."""
    fields: tuple[Field[_Both], ...] = (
        *_NAMES,
        Field("peak", "bytes", lambda both: bytes_of(both.rows[0], one)),
        Field("allocated", "bytes", lambda both: bytes_of(both.rows[0], one, "total")),
        Field("causal peak", "bytes", lambda both: bytes_of(both.rows[1], one)),
        Field("allocated", "bytes", lambda both: bytes_of(both.rows[1], one, "total")),
        Field("peak ÷ inputs", "factor", lambda both: _over_inputs(both.rows, one)),
    )
    words = f"Memory of {PASSES[one]} above the inputs, at its peak and all allocations together:"
    return table(fields, _both(variants), words, names=2)


def _over_inputs(rows: Sequence[VariantsRow | None], one: str) -> float | None:
    """The peak ÷ the bytes of q, k and v, not causal where that was measured."""
    ratios = (ratio(bytes_of(row, one), figure(row, "inputs_bytes")) for row in rows)
    return next((one for one in ratios if one is not None), None)


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


def bars(variants: Variants) -> Iterator[Bars]:
    """What each variant gains over naive, forward, and its peak as a multiple of its inputs."""
    for causal, words in MASKS.items():
        others = [name for name in variants.names if name != "naive"]
        kept = [
            shape for shape in variants.shapes if any(variants.gain(shape, name, causal) for name in variants.names)
        ]
        series = tuple((name, tuple(variants.gain(shape, name, causal) for shape in kept)) for name in others)
        if kept and series:
            key, title = f"variants-speed-up-{words.replace(' ', '-')}", f"Speed-up over naive, forward, {words}"
            yield Bars(key, title, tuple(shape_name(shape) for shape in kept), series, "naive's time ÷ the variant's")
    peaks = tuple(
        (name, tuple(_over_inputs((variants.find(shape, name, False),), "forward") for shape in variants.shapes))
        for name in variants.names
    )
    if any(value for _, values in peaks for value in values):
        title, groups = (
            "Peak memory of forward above the inputs, not causal",
            tuple(map(shape_name, variants.shapes)),
        )
        yield Bars("variants-memory", title, groups, peaks, "multiple of the bytes of q, k and v")


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
