"""How memory and time of the attention variants grow with the tokens."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

from nsys_analyzer.analysis.scaling import fitted_exponent
from nsys_analyzer.benches.model import Results
from nsys_analyzer.benches.variants_tables import FORWARD, Shape, figure, find, implementations, shapes
from nsys_analyzer.report.model import Lines, Table
from nsys_analyzer.report.tables import Field, table


def _families(results: Results) -> Iterator[list[Shape]]:
    """Shapes that differ in their tokens alone, where there are several, the shortest first."""
    groups: dict[Shape, list[Shape]] = {}
    for shape in sorted(shapes(results), key=lambda shape: shape.context_length):
        groups.setdefault(shape._replace(context_length=0), []).append(shape)
    return (group for group in groups.values() if len(group) > 1)


@dataclass(frozen=True)
class Growth:
    """To which power of the tokens a variant grows, None where it does not grow evenly.

    Attributes:
        variant: which one.
        tokens: the fewest and the most.
        peak, allocated: of its memory.
        time: of its time; None on a GPU, where that of short contexts is the time of launches.
    """

    variant: str
    tokens: tuple[int, int]
    peak: float | None
    allocated: float | None
    time: float | None


def growths(results: Results) -> Iterator[tuple[Shape, tuple[Growth, ...]]]:
    """The growth of every variant over shapes that differ in their tokens alone, with the first of these."""
    for family in _families(results):
        tokens = family[0].context_length, family[-1].context_length
        found = tuple(Growth(name, tokens, *_powers(results, family, name)) for name in implementations(results))
        yield family[0], tuple(one for one in found if any((one.peak, one.allocated, one.time)))


def _powers(results: Results, family: Sequence[Shape], name: str) -> tuple[float | None, float | None, float | None]:
    peak, total, ms = (
        _points(results, family, name, f"{FORWARD}_{key}") for key in ("peak_bytes", "total_bytes", "ms")
    )
    return _power(peak), _power(total), None if results.on_gpu else _power(ms)


_GROWTH: tuple[Field[Growth], ...] = (
    Field("variant", "text", lambda one: one.variant),
    Field("tokens", "text", lambda one: "{:,} to {:,}".format(*one.tokens)),
    Field("peak", "text", lambda one: _written(one.peak)),
    Field("allocated", "text", lambda one: _written(one.allocated)),
    Field("time", "text", lambda one: _written(one.time)),
)


def _written(power: float | None) -> str | None:
    return None if power is None else f"{power:.2f}"


def growth(results: Results) -> Iterator[Table]:
    """The growth of every variant, a table for shapes that differ in their tokens alone."""
    for first, found in growths(results):
        of = f"{first.batch_size} × {first.heads} heads, d {first.d_head}, {first.precision}"
        yield table(_GROWTH, found, f"Growth with the tokens ({of}), not causal: the power p of a + b·Nᵖ:", names=2)


def _points(results: Results, family: Sequence[Shape], name: str, key: str) -> list[tuple[float, float]]:
    pairs = ((shape.context_length, figure(find(results, shape, name, False), key)) for shape in family)
    return [(length, value) for length, value in pairs if value is not None]


def _power(points: Sequence[tuple[float, float]]) -> float | None:
    """The power p of a + b·Nᵖ through the last three points, of N, 2N and 4N say; of two points that of b·Nᵖ.

    What does not grow, such as tiles of a fixed size, drops out of the differences: these go with Nᵖ alone.
    """
    last = points[-3:]
    steps = [(first[0], second[1] - first[1]) for first, second in pairwise(last)]
    even = len(last) == 3 and last[0][0] * last[2][0] == last[1][0] ** 2
    return fitted_exponent(steps if even and all(step > 0 for _, step in steps) else last[-2:])


def memory_by_length(results: Results) -> Iterator[Lines]:
    """Peak memory over the tokens, a curve for each variant."""
    for number, family in enumerate(_families(results)):
        series = tuple(
            (name, tuple((length, peak / 2**20) for length, peak in points))
            for name in implementations(results)
            if len(points := _points(results, family, name, f"{FORWARD}_peak_bytes")) > 1
        )
        if series:
            title = f"Peak memory of forward by tokens, {family[0].heads} heads, d {family[0].d_head}"
            key = f"variants-memory-by-tokens{f'-{number + 1}' if number else ''}"
            yield Lines(key, title, series, "tokens", "MiB above the inputs", log_x=True, log_y=True)
