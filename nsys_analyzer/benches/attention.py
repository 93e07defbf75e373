"""Attention without heads over context lengths, eager and compiled: what S² costs in time and in memory."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from nsys_analyzer.analysis.scaling import fitted_exponent
from nsys_analyzer.benches.attention_bytes import accounting, rates, residences, shape_name
from nsys_analyzer.benches.conditions import conditions, precision_warnings
from nsys_analyzer.benches.model import Bench, Case, Option, Results, Row, Settings
from nsys_analyzer.benches.physics import physics
from nsys_analyzer.report.model import Block, Cell, Column, Figure, Lines, Listing, Paragraph, Section, Table
from nsys_analyzer.report.units import format_number

_OPTIONS = (
    Option("d", int, (16, 32, 64, 128), (32,), "Features of queries, keys and values."),
    Option("context_length", int, (256, 1024, 4096, 8192, 16384), (128, 256, 512), "Tokens."),
    Option("compile", ("off", "on"), ("off", "on"), ("off", "on"), "Eager (off), torch.compile (on)."),
    Option("batch_size", int, (8,), (8,), "Sequences.", several=False),
    Option("precision", ("fp32", "tf32"), ("fp32",), ("fp32",), "Of the products.", several=False),
    Option("warmup_steps", int, (5,), (2,), "Steps before the measured ones.", several=False, least=0),
    Option("steps", int, (100,), (10,), "Measured forward and backward passes.", several=False),
)
_MEASURES = (("forward_ms", "forward"), ("backward_ms", "backward"))


def _cases(settings: Settings) -> tuple[Case, ...]:
    same: dict[str, Any] = {key: settings[key] for key in ("batch_size", "precision", "warmup_steps", "steps")}
    return tuple(
        Case(
            "profiling_targets.attention",
            {"device": settings.device, "d": d, "context_length": length, "compile": compiled == "on", **same},
            f"d {d}, context {length:,}{', compiled' if compiled == 'on' else ''}",
        )
        for compiled in settings["compile"]
        for d in settings["d"]
        for length in settings["context_length"]
    )


def _section(results: Results) -> Section:
    pairs = _pairs(results)
    steps = sorted({int(row.case["steps"]) for row in results.rows})
    blocks: tuple[Block, ...] = (
        Paragraph(" ".join(_answers(results, pairs))),
        conditions(
            results,
            warmup=f"{_each(results, 'warmup_steps')} steps",
            steps=f"{', '.join(map(str, steps))} forward and backward passes of each shape, fresh tensors",
            synchronized="at the end of each pass",
            grad="recorded in forward, for queries, keys and values",
        ),
        *([Listing(flags)] if (flags := (*precision_warnings(results), *_flags(pairs))) else []),
        _times(pairs),
        _memory(pairs),
        *_figures(results),
        *accounting(results),
        *physics(results, rates(results), residences(results)),
    )
    return Section("bench-attention", "Bench: attention over context length, eager and compiled", blocks)


def _each(results: Results, key: str) -> str:
    return ", ".join(str(value) for value in sorted({row.case[key] for row in results.rows}))


_Pair = tuple[int, int, Row | None, Row | None]


def _pairs(results: Results) -> list[_Pair]:
    """Width, context length, and the eager and the compiled row of each shape."""
    shapes = dict.fromkeys((row.case["d"], row.case["context_length"]) for row in results.rows)
    return [
        (d, length, *(next(iter(results.of(d=d, context_length=length, compile=on)), None) for on in (False, True)))
        for d, length in sorted(shapes)
    ]


def _answers(results: Results, pairs: Sequence[_Pair]) -> Iterator[str]:
    exponents = [found for d in _widths(results) if (found := _exponent(results, d)) is not None]
    if exponents:
        span = _span(exponents, "{:.2f}")
        yield f"Memory before backward grows with the context length to the power {span} (eager, fitted at each width)."
    faster = [
        eager.figures[key] / compiled.figures[key]
        for _, _, eager, compiled in pairs
        for key, _ in _MEASURES
        if eager and compiled and eager.ok and compiled.ok
    ]
    if faster:
        yield f"`torch.compile` makes passes {_span(faster, '{:.2f}')} times as fast."
    lacking = [row for row in results.rows if row.status == "oom"]
    if lacking:
        shapes = ", ".join(shape_name(row) for row in lacking)
        yield f"Out of memory: {shapes}."
    else:
        yield "No shape ran out of memory."


def _span(values: Sequence[float], pattern: str) -> str:
    low, high = pattern.format(min(values)), pattern.format(max(values))
    return low if low == high else f"{low} to {high}"


def _widths(results: Results) -> list[int]:
    return sorted({row.case["d"] for row in results.rows})


def _exponent(results: Results, d: int) -> float | None:
    rows = [row for row in results.of(d=d, compile=False) if "before_backward_bytes" in row.figures]
    return fitted_exponent([(row.case["context_length"], row.figures["before_backward_bytes"]) for row in rows])


def _flags(pairs: Sequence[_Pair]) -> tuple[str, ...]:
    """What makes a comparison suspect: rows that are the same to the last digit, and nothing compiled."""
    lines = []
    for _, _, eager, compiled in pairs:
        if compiled and compiled.ok and compiled.figures.get("compiled_graphs") == 0:
            lines.append(f"**Nothing was compiled**: {shape_name(compiled)} fell back to eager.")
        if eager and compiled and eager.ok and compiled.ok:
            same = [word for key, word in _MEASURES if _printed(eager, key) == _printed(compiled, key)]
            if len(same) == len(_MEASURES):
                lines.append(
                    f"**Equal to the last digit**: {shape_name(compiled)} has the {' and '.join(same)} of eager."
                )
    return tuple(lines)


def _printed(row: Row, key: str) -> str:
    return format_number(row.figures[key], "ms")


def _times(pairs: Sequence[_Pair]) -> Table:
    columns = (
        Column("d", "count"), Column("context", "count"),
        Column("forward ms", "ms"), Column("compiled", "ms"), Column("speed-up", "factor"),
        Column("backward ms", "ms"), Column("compiled", "ms"), Column("speed-up", "factor"),
        Column("status"),
    )  # fmt: skip
    rows = []
    for d, length, eager, compiled in pairs:
        cells: list[Cell] = [d, length]
        for key, _ in _MEASURES:
            times = [row.figures.get(key) if row else None for row in (eager, compiled)]
            cells += [*times, times[0] / times[1] if times[0] and times[1] else None]
        rows.append((*cells, _status(eager, compiled)))
    return Table(columns, tuple(rows), "Time of one pass, eager and compiled, mean:")


def _status(eager: Row | None, compiled: Row | None) -> str:
    words = {name: row.status for name, row in (("eager", eager), ("compiled", compiled)) if row}
    if len(set(words.values())) == 1:
        return next(iter(words.values()))
    return ", ".join(f"{name} {status}" for name, status in words.items())


def _memory(pairs: Sequence[_Pair]) -> Table:
    columns = (
        Column("d", "count"), Column("context", "count"), Column("inputs", "bytes"),
        Column("waits for backward", "bytes"), Column("compiled", "bytes"), Column("peak", "bytes"),
        Column("compiled", "bytes"), Column("compile time", "ms"),
    )  # fmt: skip
    rows = []
    for d, length, eager, compiled in pairs:
        both = [row.figures if row else {} for row in (eager, compiled)]
        cells = [one.get(key) for key in ("before_backward_bytes", "peak_bytes") for one in both]
        first, steady = both[1].get("first_step_ms"), sum(both[1].get(key, 0) for key, _ in _MEASURES)
        compile_ms = first - steady if first and steady else None
        rows.append((d, length, (both[0] or both[1]).get("inputs_bytes"), *cells, compile_ms))
    caption = (
        "Memory above the inputs (queries, keys, values, mask, output gradient): what waits between forward and "
        "backward, and the peak of both. Compile time is the first step without that of a later one, in ms:"
    )
    return Table(columns, tuple(rows), caption)


def _figures(results: Results) -> Iterator[Figure]:
    for key, words, axis in (
        ("forward_ms", "Forward", "ms"),
        ("backward_ms", "Backward", "ms"),
        ("before_backward_bytes", "Memory that waits for backward", "MiB"),
    ):
        scale = 2**20 if axis == "MiB" else 1
        series = tuple(
            (f"d {d}, {'compiled' if compiled else 'eager'}", points)
            for d in _widths(results)
            for compiled in (False, True)
            if len(points := _points(results.of(d=d, compile=compiled), key, scale)) > 1
        )
        if series:
            title = f"{words} of attention by context length, batch {_each(results, 'batch_size')}"
            name = f"attention-{words.split()[0].lower()}"
            yield Lines(name, title, series, "context length, tokens", axis, log_x=True, log_y=True)


def _points(rows: Sequence[Row], key: str, scale: int) -> tuple[tuple[float, float | None], ...]:
    return tuple((row.case["context_length"], row.figures[key] / scale) for row in rows if key in row.figures)


BENCH = Bench(
    "attention",
    "Attention without heads over context lengths and widths, eager and compiled: time, memory, and how it grows.",
    _OPTIONS,
    _cases,
    _section,
    precisions=lambda settings: (settings["precision"],),
)
