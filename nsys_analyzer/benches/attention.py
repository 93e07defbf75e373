"""Attention without heads over context lengths, eager and compiled: what S² costs in time and in memory."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from nsys_analyzer.benches.attention_answers import PHASES, Pair, answers, flags, latest, pairs_of, widths
from nsys_analyzer.benches.attention_bytes import accounting, rates, residences, shape_name
from nsys_analyzer.benches.conditions import conditions, precision_warnings
from nsys_analyzer.benches.endings import messages
from nsys_analyzer.benches.model import Bench, Case, Option, Results, Row, Settings
from nsys_analyzer.benches.physics import physics
from nsys_analyzer.report.model import (
    Block,
    Column,
    Figure,
    Lines,
    Listing,
    Paragraph,
    Section,
    Spread,
    Table,
)

_OPTIONS = (
    Option("d", int, (16, 32, 64, 128), (32,), "Features of queries, keys and values."),
    Option("context_length", int, (256, 1024, 4096, 8192, 16384), (128, 256, 512), "Tokens."),
    Option("compile", ("off", "on"), ("off", "on"), ("off", "on"), "Eager (off), torch.compile (on)."),
    Option("batch_size", int, (8,), (8,), "Sequences.", several=False),
    Option("precision", ("fp32", "tf32"), ("fp32",), ("fp32",), "Of the products.", several=False),
    Option("warmup_steps", int, (5,), (2,), "Steps before the measured ones.", several=False, least=0),
    Option("steps", int, (100,), (10,), "Measured forward and backward passes.", several=False),
)
#: Lets PyTorch find nothing that an earlier run compiled. On a CPU it may: the C++ compiler needs seconds.
_COLD = {"TORCHINDUCTOR_FORCE_DISABLE_CACHES": "1"}
_ANEW = "compiled code made anew, no cache in use"
_KEPT = "compiled code from PyTorch's cache where it held some"


def _cases(settings: Settings) -> tuple[Case, ...]:
    same: dict[str, Any] = {key: settings[key] for key in ("batch_size", "precision", "warmup_steps", "steps")}
    return tuple(
        Case(
            "profiling_targets.attention",
            {"device": settings.device, "d": d, "context_length": length, "compile": compiled == "on", **same},
            f"d {d}, context {length:,}{', compiled' if compiled == 'on' else ''}",
            _COLD if compiled == "on" and settings.device == "cuda" else {},
        )
        for compiled in settings["compile"]
        for d in settings["d"]
        for length in settings["context_length"]
    )


def _section(results: Results) -> Section:
    results = latest(results)
    pairs = pairs_of(results)
    steps = sorted({int(row.case["steps"]) for row in results.rows})
    blocks: tuple[Block, ...] = (
        Paragraph(" ".join(answers(results, pairs))),
        conditions(
            results,
            warmup=f"{_each(results, 'warmup_steps')} steps",
            steps=f"{', '.join(map(str, steps))} forward and backward passes of each shape, fresh tensors"
            f"{_code(results)}",
            synchronized="at the end of each pass",
            grad="recorded in forward, for queries, keys and values",
        ),
        *([Listing(lines)] if (lines := (*precision_warnings(results), *flags(results, pairs))) else []),
        *(_times(pairs, phase) for phase in PHASES),
        _memory(pairs),
        *_figures(results),
        *accounting(results),
        *messages(results.rows, shape_name),
        *physics(results, rates(results), residences(results)),
    )
    return Section("bench-attention", "Bench: attention over context length, eager and compiled", blocks)


def _code(results: Results) -> str:
    """Where compiled code came from, for the conditions; empty where nothing was compiled."""
    compiled = results.of(compile=True)
    return f"; {_ANEW if all(row.environment == _COLD for row in compiled) else _KEPT}" if compiled else ""


def _each(results: Results, key: str) -> str:
    return ", ".join(str(value) for value in sorted({row.case[key] for row in results.rows}))


def _times(pairs: Sequence[Pair], phase: str) -> Table:
    columns = (
        Column("d", "count"), Column("context", "count"), Column("eager ms", "ms"), Column("compiled ms", "ms"),
        Column("speed-up", "factor"), Column("status"),
    )  # fmt: skip
    rows = []
    for d, length, eager, compiled in pairs:
        slow, fast = (_spread(row, phase) for row in (eager, compiled))
        speed_up = slow.mean / fast.mean if slow and fast else None
        rows.append((d, length, slow, fast, speed_up, _status(eager, compiled)))
    return Table(columns, tuple(rows), f"Time of one {phase} pass, mean and standard deviation:")


def _spread(row: Row | None, phase: str) -> Spread | None:
    mean = row.figures.get(f"{phase}_ms") if row else None
    return Spread(mean, row.figures.get(f"{phase}_std_ms")) if row and mean else None


def _status(eager: Row | None, compiled: Row | None) -> str:
    words = {name: row.status for name, row in (("eager", eager), ("compiled", compiled)) if row}
    if len(set(words.values())) == 1:
        return next(iter(words.values()))
    return ", ".join(f"{name} {status}" for name, status in words.items())


def _memory(pairs: Sequence[Pair]) -> Table:
    """What waits for backward, the peak, and the time that compiling took."""
    columns = (
        Column("d", "count"), Column("context", "count"), Column("inputs", "bytes"),
        Column("waits for backward", "bytes"), Column("compiled", "bytes"), Column("peak", "bytes"),
        Column("compiled", "bytes"), Column("compile time", "ms"),
    )  # fmt: skip
    rows = []
    for d, length, eager, compiled in pairs:
        both = [row.figures if row else {} for row in (eager, compiled)]
        cells = [one.get(key) for key in ("before_backward_bytes", "peak_bytes") for one in both]
        first, steady = both[1].get("first_step_ms"), sum(both[1].get(f"{phase}_ms", 0) for phase in PHASES)
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
            for d in widths(results)
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
