"""The tables and figures of the variants bench."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from nsys_analyzer.analysis.attention_costs import AttentionShape
from nsys_analyzer.benches.model import Results, Row
from nsys_analyzer.report.model import Bars, Cell, Column, Spread, Table

#: What is measured, as the prefix of its figures.
FORWARD, BOTH = "forward", "forward_backward"
_WORDS = {FORWARD: "forward", BOTH: "forward and backward"}
_BYTES = {"fp32": 4, "bf16": 2}
#: The kinds of errors, and the titles of their columns; and the figures that say how large they may be.
_KINDS = {"max": ("forward", "gradients", "tolerance"), "relative": ("‖forward‖", "‖gradients‖", "‖tolerance‖")}
_TOLERANCES = {"max": "tolerance", "relative": "relative_tolerance"}
_MASKS = ("full", "causal")
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
    naive = figure(find(results, shape, "naive", causal), f"{prefix}_ms")
    own = {name: figure(find(results, shape, name, causal), f"{prefix}_ms") for name in implementations(results)}
    return {name: naive / ms if naive and ms else None for name, ms in own.items()}


def figure(row: Row | None, key: str) -> float | None:
    """A figure of a row; None where either is missing."""
    return row.figures.get(key) if row else None


def _pairs(results: Results) -> Iterator[tuple[Shape, str, tuple[Row | None, Row | None]]]:
    """Each variant at each shape, not causal and causal; None for what was not run."""
    for shape in shapes(results):
        for name in implementations(results):
            yield shape, name, (find(results, shape, name, False), find(results, shape, name, True))


def errors(results: Results) -> Table:
    """The largest error of each variant in each precision, over all shapes; of each tensor by itself where known."""
    kinds = [kind for kind in _KINDS if any(f"{FORWARD}_{kind}_error" in row.figures for row in results.rows)]
    columns = (
        Column("variant"), Column("precision"), Column("cases", "count"),
        *(Column(title) for kind in kinds for title in _KINDS[kind]),
    )  # fmt: skip
    rows: list[tuple[Cell, ...]] = []
    for name in implementations(results):
        for precision in dict.fromkeys(shape.precision for shape in shapes(results)):
            own = results.of(implementation=name, precision=precision)
            checked = [row for row in own if f"{FORWARD}_max_error" in row.figures]
            if checked:
                cells = (cell for kind in kinds for cell in _worst_of(checked, kind))
                rows.append((name, precision, len(checked), *cells))
    return Table(columns, tuple(rows), "Largest error of each variant over all its cases, checked before it was timed:")


def _worst_of(rows: Sequence[Row], kind: str) -> tuple[str | None, ...]:
    """The largest error of forward, and of the gradients, and what they may be."""
    tolerances = [row.figures[key] for row in rows if (key := _TOLERANCES[kind]) in row.figures]
    worst = (_worst(rows, f"{prefix}_{kind}_error") for prefix in (FORWARD, BOTH))
    return *worst, f"{tolerances[0]:.0e}" if tolerances else None


def _worst(rows: Sequence[Row], key: str) -> str | None:
    found = [row.figures[key] for row in rows if key in row.figures]
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
        full, causal_ms = (figure(row, f"{prefix}_ms") for row in both)
        gain = full / causal_ms if full and causal_ms else None
        if prefix == FORWARD or any(row.case["backward"] and not _lacks_backward(row) for row in both if row):
            rows.append((shape.name, name, *cells, gain, _status(results, both, prefix)))
    caption = f"Time of {_WORDS[prefix]}, mean ± standard deviation, not causal and causal, and the one ÷ the other:"
    return Table(columns, tuple(rows), caption)


def _spread(row: Row | None, prefix: str) -> Spread | None:
    mean = figure(row, f"{prefix}_ms")
    return None if mean is None else Spread(mean, figure(row, f"{prefix}_std_ms"))


def _lacks_backward(row: Row) -> bool:
    return row.ok and f"{BOTH}_ms" not in row.figures


def _status(results: Results, both: Sequence[Row | None], prefix: str) -> str:
    """How a pass ended, not causal and causal, of those that the bench was asked for."""
    asked = {row.case["causal"] for row in results.rows}
    words = {
        word: status(row, prefix)
        for causal, word, row in zip((False, True), _MASKS, both, strict=True)
        if causal in asked
    }
    if len(set(words.values())) == 1:
        return next(iter(words.values()))
    return ", ".join(f"{name} {ended}" for name, ended in words.items())


def status(row: Row | None, prefix: str) -> str:
    """How one pass of a row ended: backward may fail after forward was measured, and never runs after it failed."""
    if row is not None and f"{prefix}_ms" in row.figures:
        return "ok"
    if row is None or row.ok or (prefix == BOTH and f"{FORWARD}_ms" not in row.figures):
        return "not run"
    return row.status


def memory(results: Results, prefix: str) -> Table:
    """Peak and sum of all allocations of each variant at each shape, not causal and causal."""
    columns = (
        *_WIDTHS, Column("peak", "bytes"), Column("allocated", "bytes"), Column("causal peak", "bytes"),
        Column("allocated", "bytes"), Column("peak ÷ inputs", "factor"),
    )  # fmt: skip
    rows: list[tuple[Cell, ...]] = []
    for shape, name, both in _pairs(results):
        cells = [figure(row, f"{prefix}_{kind}_bytes") for row in both for kind in ("peak", "total")]
        if any(cell is not None for cell in cells):
            rows.append((shape.name, name, *cells, _over_inputs(both, prefix)))
    caption = f"Memory of {_WORDS[prefix]} above the inputs, at its peak and all allocations together:"
    return Table(columns, tuple(rows), caption)


def _over_inputs(both: Sequence[Row | None], prefix: str) -> float | None:
    """The peak ÷ the bytes of q, k and v, not causal where that was measured."""
    pairs = [(figure(row, f"{prefix}_peak_bytes"), figure(row, "inputs_bytes")) for row in both]
    return next((peak / inputs for peak, inputs in pairs if peak is not None and inputs), None)


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
