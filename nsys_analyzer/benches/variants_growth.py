"""How memory and time of the attention variants grow with the tokens."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise

from nsys_analyzer.analysis.scaling import fitted_exponent
from nsys_analyzer.benches.model import Results
from nsys_analyzer.benches.variants_tables import FORWARD, Shape, figure, find, implementations, shapes
from nsys_analyzer.report.model import Cell, Column, Lines, Table


def _families(results: Results) -> Iterator[list[Shape]]:
    """Shapes that differ in their tokens alone, where there are several, the shortest first."""
    groups: dict[Shape, list[Shape]] = {}
    for shape in sorted(shapes(results), key=lambda shape: shape.context_length):
        groups.setdefault(shape._replace(context_length=0), []).append(shape)
    return (group for group in groups.values() if len(group) > 1)


def growth(results: Results) -> Iterator[Table]:
    """To which power of the tokens memory grows, and time on a CPU, of shapes that differ in nothing else.

    Not time on a GPU: there that of short contexts is the time of launches.
    """
    for family in _families(results):
        keys = ("peak_bytes", "total_bytes") if results.on_gpu else ("peak_bytes", "total_bytes", "ms")
        rows: list[tuple[Cell, ...]] = []
        for name in implementations(results):
            powers = [_power(_points(results, family, name, f"{FORWARD}_{key}")) for key in keys]
            if any(powers):
                rows.append((name, f"{family[0].context_length:,} to {family[-1].context_length:,}", *powers))
        titles = ("variant", "tokens", "peak", "allocated", "time")[: 2 + len(keys)]
        of = f"{family[0].batch_size} × {family[0].heads} heads, d {family[0].d_head}, {family[0].precision}"
        caption = f"Growth with the tokens ({of}), not causal: the power p of a + b·Nᵖ:"
        yield Table(tuple(map(Column, titles)), tuple(rows), caption)


def _points(results: Results, family: Sequence[Shape], name: str, key: str) -> list[tuple[float, float]]:
    pairs = ((shape.context_length, figure(find(results, shape, name, False), key)) for shape in family)
    return [(length, value) for length, value in pairs if value is not None]


def _power(points: Sequence[tuple[float, float]]) -> str | None:
    """The power p of a + b·Nᵖ through the last three points, of N, 2N and 4N say; of two points that of b·Nᵖ.

    What does not grow, such as tiles of a fixed size, drops out of the differences: these go with Nᵖ alone.
    """
    last = points[-3:]
    steps = [(first[0], second[1] - first[1]) for first, second in pairwise(last)]
    even = len(last) == 3 and last[0][0] * last[2][0] == last[1][0] ** 2
    power = fitted_exponent(steps if even and all(step > 0 for _, step in steps) else last[-2:])
    return None if power is None else f"{power:.2f}"


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
