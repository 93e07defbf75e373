"""Defines the experiment ``attention``: time and memory of attention by context length, eager and compiled."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

from nsys_analyzer.experiments.model import (
    AnyRow,
    Bench,
    Results,
    list_option,
    mean_ms,
    ratio,
    scalar_options,
)
from nsys_analyzer.experiments.passes import TARGET, PassesCase, drawn_width
from nsys_analyzer.experiments.section import fit_exponent, format_factor_range, make_curves, make_rows_table
from nsys_analyzer.report.model import Block, Cell
from nsys_analyzer.text import StrOrText, phrase

PASSES = ("forward", "backward")
_DEFINITIONS = phrase(
    "*Saved for backward* is the memory that is allocated between forward and backward. *Peak* is the highest memory "
    "during both passes. Both exclude the inputs. *Compile* is the first step minus the mean step."
)


def _write_sentences(results: Results) -> Iterator[StrOrText]:
    saved_bytes_by_head_size: dict[int, list[tuple[float, float]]] = {}
    for row in results.rows:
        if not row.case.compile and (size := row.figures.before_backward_bytes):
            saved_bytes_by_head_size.setdefault(row.case.d_head, []).append((row.case.context_length, size))
    powers = sorted(
        power for points in saved_bytes_by_head_size.values() if (power := fit_exponent(points)) is not None
    )
    if powers:
        exponents = " to ".join(dict.fromkeys(f"{power:.2f}" for power in (powers[0], powers[-1])))
        yield f"Memory saved for backward grows with the context length to the power {exponents} (eager, for each d)."
    if gains := [
        gain for row in results.rows for name in PASSES if (gain := results.speed_up(row, name, compile=False))
    ]:
        yield phrase("`torch.compile` makes a pass {} as fast.", format_factor_range(gains))


def _make_tables_and_charts(results: Results) -> Iterator[Block]:
    """Yields tables of the time and memory of each shape, and charts over the context length for one d_head."""
    rows = sorted(results.rows, key=lambda row: (row.case.d_head, row.case.context_length, row.case.compile))

    def compute_compile_ms(row: AnyRow) -> Cell:
        """Returns the compile time of a compiled row in ms: its first step minus the mean times of both passes."""
        times = [mean_ms(row, name) or 0.0 for name in PASSES]
        return row.figures.first_step_ms - sum(times) if row.case.compile and all(times) else None

    yield make_rows_table(
        rows, "Time of one pass, mean ± standard deviation:",
        ("forward ms", "ms", "forward"),
        ("speed-up", "factor", lambda row: results.speed_up(row, "forward", compile=False)),
        ("backward ms", "ms", "backward"),
        ("speed-up", "factor", lambda row: results.speed_up(row, "backward", compile=False)),
        ("compile ms", "ms", compute_compile_ms),
    )  # fmt: skip
    yield make_rows_table(
        rows, "Memory, without the inputs:",
        ("saved for backward", "bytes", "before_backward_bytes"), ("peak", "bytes", "peak_bytes"),
    )  # fmt: skip
    d = drawn_width({row.case.d_head for row in rows})
    drawn_rows = [row for row in rows if row.case.d_head == d]
    for name in PASSES:
        title = f"Attention by context length: {name}, d {d}"
        yield from make_curves(f"attention-{name}", title, drawn_rows, partial(mean_ms, path=name), "ms")
    title = f"Attention by context length: memory, d {d}"
    yield from make_curves(
        "attention-memory", title, drawn_rows, lambda row: ratio(row.figures.before_backward_bytes, 2**20),
        "MiB saved for backward",
    )  # fmt: skip


BENCH = Bench(
    name="attention",
    title="attention over context length, eager and compiled",
    summary="Measures how the time and memory of attention grow with context length and d_head, eager and compiled.",
    options=(
        list_option(PassesCase, "compile", (False, True)),
        list_option(PassesCase, "implementation", ("unfused",)),
        list_option(PassesCase, "heads", (1,)),
        list_option(PassesCase, "batch_size", (8,)),
        list_option(PassesCase, "d_head", (16, 32, 64, 128), (32,)),
        list_option(PassesCase, "context_length", (256, 1024, 4096, 8192, 16384), (128, 256, 512)),
        *scalar_options(PassesCase, "warmup_steps", "steps"),
    ),
    target=TARGET,
    conditions={
        "warm-up": "{warmup_steps} steps",
        "measured": "{steps} passes of each shape, batch {batch_size}, {precision}; on a GPU compiled without a cache",
        "synchronized": "at the end of each pass",
    },
    write_sentences=_write_sentences,
    make_tables_and_charts=_make_tables_and_charts,
    definitions=_DEFINITIONS,
)
