"""The tables of the flash bench."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import accumulate

from nsys_analyzer.benches.flash_costs import Limits, least_ms
from nsys_analyzer.benches.model import Results, Row
from nsys_analyzer.report.model import Block, Cell, Column, Details, Table, Unit

NAMES = {"flash": "flash", "unfused": "unfused", "sdpa": "SDPA", "sdpa_flash": "SDPA flash"}
PASSES = (("forward_ms", "forward"), ("backward_ms", "backward"), ("end_to_end_ms", "end to end"))
_WHOLE = PASSES[-1][0]
_FLAT = 1.1
_ENOUGH = 5


def implementations(results: Results) -> list[str]:
    """Those that there are rows of, the peers first."""
    found = dict.fromkeys(row.case["implementation"] for row in results.rows)
    return [*(one for one in found if one != "flash"), *(one for one in found if one == "flash")]


def widths(results: Results, precision: str) -> list[int]:
    """The d_head that there are rows of, the smallest first."""
    return sorted({row.case["d_head"] for row in results.of(precision=precision)})


def lengths(results: Results, precision: str) -> list[int]:
    """The context lengths that there are rows of, the shortest first."""
    return sorted({row.case["context_length"] for row in results.of(precision=precision)})


def find(results: Results, implementation: str, precision: str, d: int, length: int) -> Row | None:
    """The row of a shape."""
    rows = results.of(implementation=implementation, precision=precision, d_head=d, context_length=length)
    return next(iter(rows), None)


def ratio(results: Results, row: Row, key: str, peer: str | None = None) -> float | None:
    """A row's time ÷ that of one other implementation of its shape, by default the fastest; None without one."""
    same = {name: row.case[name] for name in ("precision", "d_head", "context_length")}
    others = [one for one in results.of(**same) if one.case["implementation"] != row.case["implementation"]]
    times = [one.figures[key] for one in others if key in one.figures and peer in (None, one.case["implementation"])]
    return row.figures[key] / min(times) if times and key in row.figures else None


def flat_until(results: Results, implementation: str, precision: str, d: int) -> int | None:
    """The longest context at which a pass end to end takes as long as at shorter ones; None where none is longer.

    As long: within 10 % of the least time up to there. So long as the work does not show in its time, the time is a
    fixed cost of each call.
    """
    rows = results.of(implementation=implementation, precision=precision, d_head=d)
    times = sorted((row.case["context_length"], row.figures[_WHOLE]) for row in rows if _WHOLE in row.figures)
    least = accumulate((ms for _, ms in times), min)
    flat = [length for (length, ms), low in zip(times, least, strict=True) if ms <= _FLAT * low]
    return flat[-1] if len(flat) > 1 else None


def matrix(results: Results, precision: str, limits: Limits | None) -> Iterator[Block]:
    """Ours end to end against its faster peer, then of the roofline: context lengths down, d_head across."""
    if not results.of(implementation="flash", precision=precision):
        return
    caption = f"{precision}, end to end: time of flash ÷ that of the faster peer, below 1 is faster:"
    yield _matrix(results, precision, "factor", lambda row: ratio(results, row, _WHOLE), caption)
    if limits:
        caption = f"{precision}, end to end: what flash reaches of the roofline from {limits.source}:"
        yield _matrix(results, precision, "percent", lambda row: _of_roofline(row, _WHOLE, limits), caption)


def _matrix(results: Results, precision: str, unit: Unit, figure: Callable[[Row], Cell], caption: str) -> Table:
    wide = widths(results, precision)
    columns = (Column("context", "count"), *(Column(f"d_head {d}", unit) for d in wide))
    rows = []
    for length in lengths(results, precision):
        ours = [find(results, "flash", precision, d, length) for d in wide]
        cells = (None if row is None else figure(row) if _WHOLE in row.figures else row.status for row in ours)
        rows.append((length, *cells))
    return Table(columns, tuple(rows), caption)


def _of_roofline(row: Row | None, key: str, limits: Limits | None) -> float | None:
    return least_ms(row, key, limits) / row.figures[key] if row and limits and key in row.figures else None


def details(results: Results, precision: str, limits: Limits | None) -> Iterator[Block]:
    """Every latency and the peak memory, folded, for each d_head."""
    for d in widths(results, precision):
        tables = [_latency(results, precision, d, one, limits) for one in PASSES]
        yield Details(f"{precision}, d_head {d}: every latency, and memory", (*tables, _memory(results, precision, d)))


def _latency(results: Results, precision: str, d: int, one: tuple[str, str], limits: Limits | None) -> Table:
    (key, name), names = one, implementations(results)
    columns = [Column("context", "count"), *(Column(f"{NAMES[name]} ms", "ms") for name in names)]
    columns += [Column("÷ faster peer", "factor"), Column("of roofline", "percent")]
    rows = []
    for length in lengths(results, precision):
        ours = find(results, "flash", precision, d, length)
        cells: list[Cell] = [length, *(_figure(find(results, peer, precision, d, length), key) for peer in names)]
        cells += [ratio(results, ours, key) if ours else None, _of_roofline(ours, key, limits)]
        rows.append(tuple(cells))
    return Table(tuple(columns), tuple(rows), f"{name.capitalize()}, {precision}, d_head {d}:")


def _memory(results: Results, precision: str, d: int) -> Table:
    names = implementations(results)
    columns = (Column("context", "count"), *(Column(NAMES[name], "bytes") for name in names))
    rows = tuple(
        (length, *(_figure(find(results, name, precision, d, length), "peak_bytes") for name in names))
        for length in lengths(results, precision)
    )
    return Table(columns, rows, f"Peak memory of forward and backward above the inputs, {precision}, d_head {d}:")


def _figure(row: Row | None, key: str) -> Cell:
    """The figure, else how the row ended."""
    if row is None:
        return None
    value: Cell = row.figures.get(key)
    return row.status if value is None and not row.ok else value


def errors(results: Results) -> Table:
    """What ran, and how far it was from fp32 at the worst."""
    columns = (
        Column("implementation"), Column("precision"), Column("what ran"), Column("shapes checked", "count"),
        Column("largest error"),
    )  # fmt: skip
    rows = []
    for precision in dict.fromkeys(row.case["precision"] for row in results.rows):
        for one in implementations(results):
            mine = results.of(implementation=one, precision=precision)
            found = [row.figures["max_error"] for row in mine if row.figures.get("max_error") is not None]
            kernels = dict.fromkeys(row.figures["kernel"] for row in mine if "kernel" in row.figures)
            error = _error(found, is_reference=(one, precision) == ("unfused", "fp32"))
            rows.append((NAMES[one], precision, ", ".join(kernels) or None, len(found), error))
    caption = "What ran, and its error against unfused attention in fp32, of the contexts up to 4,096:"
    return Table(columns, tuple(rows), caption)


def _error(found: Sequence[float], is_reference: bool) -> str | None:
    if not found:
        return None
    return "reference" if is_reference else f"{max(found):.1e}"


def passes_measured(results: Results, calls: str) -> str:
    """What was measured on a GPU, and how many passes were measured by few calls."""
    passes = [(row, key.removesuffix("_ms")) for row in results.rows for key, _ in PASSES if key in row.figures]
    benched = [(row, one) for row, one in passes if row.figures.get(f"{one}_timer", "do_bench") == "do_bench"]
    long = len(passes) - len(benched)
    told = f"{results.rows[0].case['measured_ms']} ms of each pass by triton.testing.do_bench"
    # do_bench takes as many calls as fit its time, one at the least.
    few = sum(_time_of(row, one) < _ENOUGH * row.figures[f"{one}_ms"] for row, one in benched)
    single = sum(row.figures.get(f"{one}_min_ms", 0) == row.figures.get(f"{one}_max_ms") for row, one in benched)
    if few:
        told += f" (of {few} of {len(passes)} passes fewer than {_ENOUGH} calls fit into that"
        told += f", of {single} the least and the largest time are the same: one call)" if single else ")"
    return told + (f", {calls} of the {long} passes that take over 100 ms" if long else "")


def _time_of(row: Row, one: str) -> float:
    """Milliseconds that do_bench was given for a pass."""
    given: float = row.figures.get(f"{one}_measured_ms", row.case["measured_ms"])
    return given


def shape_name(row: Row) -> str:
    """What a row measured, in words."""
    case = row.case
    name = NAMES[case["implementation"]]
    return f"{name}, {case['precision']}, d_head {case['d_head']}, context {case['context_length']:,}"


def spread(values: Sequence[float], pattern: str) -> str:
    """The least and the largest value, as one where they are written alike."""
    low, high = (pattern.format(limit(values)) for limit in (min, max))
    return low if low == high else f"{low} to {high}"
