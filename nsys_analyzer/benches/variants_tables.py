"""The tables and figures of the variants bench."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from nsys_analyzer.analysis.attention_costs import AttentionShape
from nsys_analyzer.analysis.scaling import fitted_exponent
from nsys_analyzer.benches.model import Results, Row
from nsys_analyzer.report.model import Bars, Cell, Column, Lines, Spread, Table

#: What is measured, as the prefix of its figures.
FORWARD, BOTH = "forward", "forward_backward"
_WORDS = {FORWARD: "forward", BOTH: "forward and backward"}
_BYTES = {"fp32": 4, "bf16": 2}
_WIDTHS = (Column("shape"), Column("variant"))


class Shape(NamedTuple):
    """What is attended: (B, H, N, d) in a precision."""

    batch_size: int
    heads: int
    context_length: int
    d_head: int
    precision: str

    @property
    def name(self) -> str:
        """Such as 1×4×1,024×32 fp32."""
        return "×".join(f"{side:,}" for side in self[:4]) + f" {self.precision}"

    @property
    def options(self) -> dict[str, Any]:
        """The target's options."""
        return self._asdict()

    def cost(self, causal: bool) -> AttentionShape:
        """The shape as costs are computed from it."""
        return AttentionShape(*self[:4], causal, _BYTES[self.precision])


def shape_of(row: Row) -> Shape:
    """The shape of a row."""
    return Shape(*(row.case[key] for key in Shape._fields))


def shapes(results: Results) -> list[Shape]:
    """Every shape, in the order of the rows."""
    return list(dict.fromkeys(map(shape_of, results.rows)))


def implementations(results: Results) -> list[str]:
    """Every variant, in the order of the rows."""
    return list(dict.fromkeys(row.case["implementation"] for row in results.rows))


def find(results: Results, shape: Shape, implementation: str, causal: bool) -> Row | None:
    """The row of one variant at a shape."""
    return next(iter(results.of(implementation=implementation, causal=causal, **shape.options)), None)


def speed_ups(results: Results, shape: Shape, causal: bool, prefix: str = FORWARD) -> dict[str, float | None]:
    """Naive's time ÷ that of each variant; None where one of the two is missing."""
    naive = _figure(find(results, shape, "naive", causal), f"{prefix}_ms")
    own = {name: _figure(find(results, shape, name, causal), f"{prefix}_ms") for name in implementations(results)}
    return {name: naive / ms if naive and ms else None for name, ms in own.items()}


def _figure(row: Row | None, key: str) -> float | None:
    return row.figures.get(key) if row else None


def _pairs(results: Results) -> Iterator[tuple[Shape, str, tuple[Row | None, Row | None]]]:
    """Each variant at each shape, not causal and causal."""
    for shape in shapes(results):
        for name in implementations(results):
            both = (find(results, shape, name, False), find(results, shape, name, True))
            if any(both):
                yield shape, name, both


def errors(results: Results) -> Table:
    """The largest error of each variant in each precision, over all shapes."""
    columns = (
        Column("variant"), Column("precision"), Column("cases", "count"), Column("forward"), Column("gradients"),
        Column("tolerance"),
    )  # fmt: skip
    rows: list[tuple[Cell, ...]] = []
    for name in implementations(results):
        for precision in dict.fromkeys(shape.precision for shape in shapes(results)):
            own = results.of(implementation=name, precision=precision)
            checked = [row for row in own if f"{FORWARD}_max_error" in row.figures]
            if checked:
                worst = (_worst(checked, prefix) for prefix in (FORWARD, BOTH))
                rows.append((name, precision, len(checked), *worst, f"{checked[0].figures['tolerance']:.0e}"))
    return Table(columns, tuple(rows), "Largest error of each variant over all its cases, checked before it was timed:")


def _worst(rows: Sequence[Row], prefix: str) -> str | None:
    found = [row.figures[key] for row in rows if (key := f"{prefix}_max_error") in row.figures]
    return None if not found else "not a number" if None in found else f"{max(found):.1e}"


def times(results: Results, prefix: str) -> Table:
    """The time of each variant at each shape, not causal and causal, and what it gains over naive."""
    columns = (
        *_WIDTHS, Column("ms", "ms"), Column("over naive", "factor"), Column("causal ms", "ms"),
        Column("over naive", "factor"), Column("÷ causal", "factor"), Column("status"),
    )  # fmt: skip
    rows: list[tuple[Cell, ...]] = []
    for shape, name, both in _pairs(results):
        cells: list[Cell] = []
        for causal, row in enumerate(both):
            cells += [_spread(row, prefix), speed_ups(results, shape, bool(causal), prefix)[name]]
        full, causal_ms = (_figure(row, f"{prefix}_ms") for row in both)
        gain = full / causal_ms if full and causal_ms else None
        if prefix == FORWARD or full or causal_ms:
            rows.append((shape.name, name, *cells, gain, _status(both)))
    caption = f"Time of {_WORDS[prefix]}, mean ± standard deviation, not causal and causal, and the one ÷ the other:"
    return Table(columns, tuple(rows), caption)


def _spread(row: Row | None, prefix: str) -> Spread | None:
    mean = _figure(row, f"{prefix}_ms")
    return None if mean is None else Spread(mean, _figure(row, f"{prefix}_std_ms"))


def _status(both: Sequence[Row | None]) -> str:
    words = {name: row.status for name, row in zip(("full", "causal"), both, strict=True) if row}
    if len(set(words.values())) == 1:
        return next(iter(words.values()))
    return ", ".join(f"{name} {status}" for name, status in words.items())


def memory(results: Results, prefix: str) -> Table:
    """Peak and sum of all allocations of each variant at each shape, not causal and causal."""
    columns = (
        *_WIDTHS, Column("peak", "bytes"), Column("allocated", "bytes"), Column("causal peak", "bytes"),
        Column("allocated", "bytes"), Column("peak ÷ inputs", "factor"),
    )  # fmt: skip
    rows: list[tuple[Cell, ...]] = []
    for shape, name, both in _pairs(results):
        cells = [_figure(row, f"{prefix}_{kind}_bytes") for row in both for kind in ("peak", "total")]
        if any(cell is not None for cell in cells):
            rows.append((shape.name, name, *cells, _over_inputs(both, prefix)))
    caption = f"Memory of {_WORDS[prefix]} above the inputs, at its peak and all allocations together:"
    return Table(columns, tuple(rows), caption)


def _over_inputs(both: Sequence[Row | None], prefix: str) -> float | None:
    """The peak ÷ the bytes of q, k and v, not causal where that was measured."""
    pairs = [(_figure(row, f"{prefix}_peak_bytes"), _figure(row, "inputs_bytes")) for row in both]
    return next((peak / inputs for peak, inputs in pairs if peak is not None and inputs), None)


def _families(results: Results) -> Iterator[list[Shape]]:
    """Shapes that differ in their tokens alone, where there are several, the shortest first."""
    groups: dict[Shape, list[Shape]] = {}
    for shape in sorted(shapes(results), key=lambda shape: shape.context_length):
        groups.setdefault(shape._replace(context_length=0), []).append(shape)
    return (group for group in groups.values() if len(group) > 1)


def growth(results: Results) -> Iterator[Table]:
    """To which power of the tokens memory and time grow, of shapes that differ in nothing else."""
    for family in _families(results):
        rows: list[tuple[Cell, ...]] = []
        for name in implementations(results):
            powers = [_power(results, family, name, f"{FORWARD}_{key}") for key in ("peak_bytes", "total_bytes", "ms")]
            if any(powers):
                rows.append((name, f"{family[0].context_length:,} to {family[-1].context_length:,}", *powers))
        columns = (
            Column("variant"), Column("tokens"), Column("peak"), Column("allocated"), Column("time"),
        )  # fmt: skip
        of = f"{family[0].batch_size} × {family[0].heads} heads, d {family[0].d_head}, {family[0].precision}"
        yield Table(columns, tuple(rows), f"Growth with the tokens ({of}): the power of N that fits, not causal:")


def _points(results: Results, family: Sequence[Shape], name: str, key: str) -> list[tuple[float, float]]:
    pairs = ((shape.context_length, _figure(find(results, shape, name, False), key)) for shape in family)
    return [(length, value) for length, value in pairs if value is not None]


def _power(results: Results, family: Sequence[Shape], name: str, key: str) -> str | None:
    power = fitted_exponent(_points(results, family, name, key))
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


def speed_up_figures(results: Results) -> Iterator[Bars]:
    """What each variant gains over naive, forward, not causal and causal."""
    for causal, word in ((False, "not causal"), (True, "causal")):
        gains = {shape: speed_ups(results, shape, causal) for shape in shapes(results)}
        gains = {shape: own for shape, own in gains.items() if any(own.values())}
        names = [name for name in implementations(results) if name != "naive"]
        series = tuple((name, tuple(own[name] for own in gains.values())) for name in names)
        if gains and series:
            key = f"variants-speed-up-{word.replace(' ', '-')}"
            groups = tuple(shape.name for shape in gains)
            yield Bars(key, f"Speed-up over naive, forward, {word}", groups, series, "naive's time ÷ the variant's")


def memory_figure(results: Results) -> Iterator[Bars]:
    """The peak of each variant as a multiple of its inputs, not causal."""
    kept = shapes(results)
    series = tuple(
        (name, tuple(_over_inputs((find(results, shape, name, False),), FORWARD) for shape in kept))
        for name in implementations(results)
    )
    if any(value for _, values in series for value in values):
        groups = tuple(shape.name for shape in kept)
        title = "Peak memory of forward above the inputs, not causal"
        yield Bars("variants-memory", title, groups, series, "multiple of the bytes of q, k and v")
