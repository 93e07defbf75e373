"""Rows of the experiment ``variants`` side by side: gains over naive, errors, and growth with the tokens."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import NamedTuple

from nsys_analyzer.analysis.transformer.attention_costs import AttentionShape
from nsys_analyzer.experiments.attention.core import figure, ms
from nsys_analyzer.experiments.model import Results
from nsys_analyzer.experiments.scaling import fitted_exponent
from nsys_analyzer.experiments.section import ratio
from nsys_analyzer.experiments.variants.cases import TARGET, VariantsCase, VariantsRow

#: Names of the figures of a pass, and of the pass.
PASSES = {"forward": "forward", "forward_backward": "forward and backward"}
MASKS = {False: "not causal", True: "causal"}


def shape_name(shape: AttentionShape) -> str:
    """Such as 1×4×1,024×32 fp32."""
    return "×".join(f"{side:,}" for side in shape.sizes) + f" {shape.precision}"


def case_name(case: VariantsCase) -> str:
    """A case's variant and shape."""
    return f"{case.implementation} at {shape_name(case.shape)}{', causal' if case.causal else ''}"


class Variants:
    """The rows side by side; ``shapes``, ``names`` and ``precisions`` are in the order of the rows."""

    def __init__(self, results: Results) -> None:
        self.rows, self.on_gpu = results.rows_of(TARGET), results.on_gpu
        self.shapes = list(dict.fromkeys(replace(row.case.shape, causal=False) for row in self.rows))
        self.names = list(dict.fromkeys(row.case.implementation for row in self.rows))
        self.precisions = list(dict.fromkeys(shape.precision for shape in self.shapes))
        self._rows = {(row.case.shape, row.case.implementation): row for row in self.rows}

    def find(self, shape: AttentionShape, name: str, causal: bool) -> VariantsRow | None:
        """The row of a variant at a shape."""
        return self._rows.get((replace(shape, causal=causal), name))

    def gain(self, row: VariantsRow, one: str = "forward") -> float | None:
        """Naive's time ÷ that of a variant; None where one of the two is missing."""
        return ratio(ms(self.find(row.case.shape, "naive", row.case.causal), one), ms(row, one))

    def families(self) -> list[list[AttentionShape]]:
        """Shapes that differ in their tokens alone, where there are several, the shortest first."""
        groups: dict[AttentionShape, list[AttentionShape]] = {}
        for shape in sorted(self.shapes, key=lambda shape: shape.context_length):
            groups.setdefault(replace(shape, context_length=0), []).append(shape)
        return [group for group in groups.values() if len(group) > 1]


def bytes_of(row: VariantsRow | None, one: str, kind: str = "peak") -> int | None:
    """The peak or the total memory of a pass; None where it was not measured."""
    return getattr(figure(row, one), f"{kind}_bytes", None)


def error_of(row: VariantsRow, one: str, kind: str = "max") -> float | None:
    """The max or the relative error of a pass; None where it was not checked."""
    return getattr(figure(row, one), f"{kind}_error", None)


def status(row: VariantsRow, one: str) -> str:
    """How one pass of a row ended; an ok row without the time of a pass never ran it."""
    if ms(row, one) is not None:
        return "ok"
    asked = one == "forward" or row.case.backward
    return row.status if asked and not row.ok else "not run"


class Growth(NamedTuple):
    """The power of the tokens with which the memory of a variant grows, None where it is not known."""

    variant: str
    peak: float | None
    allocated: float | None


def growths(variants: Variants) -> Iterator[tuple[list[AttentionShape], list[Growth]]]:
    """The growth of every variant over shapes that differ in their tokens alone, with these shapes."""
    for family in variants.families():
        found = []
        for name in variants.names:
            rows = [(shape.context_length, variants.find(shape, name, False)) for shape in family]
            peak = _power([(n, bytes_of(row, "forward")) for n, row in rows])
            allocated = _power([(n, bytes_of(row, "forward", "total")) for n, row in rows])
            found.append(Growth(name, peak, allocated))
        yield family, [one for one in found if any(one[1:])]


def _power(points: Sequence[tuple[int, float | None]]) -> float | None:
    """The power p of a + b·Nᵖ through the last three points, of N, 2N and 4N say; of two points that of b·Nᵖ.

    What does not grow, such as tiles of a fixed size, drops out of the differences: these go with Nᵖ alone.
    """
    last = [(n, value) for n, value in points if value is not None][-3:]
    steps = [(first[0], second[1] - first[1]) for first, second in pairwise(last)]
    even = len(last) == 3 and last[0][0] * last[2][0] == last[1][0] ** 2
    return fitted_exponent(steps if even and all(step > 0 for _, step in steps) else last[-2:])
