"""Attention without heads, eager and compiled: how its time and its memory grow with the context length."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import partial

from nsys_analyzer.experiments.model import (
    AnyRow,
    Bench,
    Results,
    Settings,
    grid,
    mean_ms,
    option,
    ratio,
    several,
    single,
)
from nsys_analyzer.experiments.section import curves, fitted_exponent, rows_table, span
from nsys_analyzer.report.model import Block, Cell
from nsys_analyzer.runs.rows import CaseTarget, Task, Times
from nsys_analyzer.text import Words, phrase

PASSES = ("forward", "backward")
#: PyTorch finds nothing that an earlier run compiled.
_NO_CACHE = {"TORCHINDUCTOR_FORCE_DISABLE_CACHES": "1"}
_DEFINITIONS = phrase(
    "*Inputs* are queries, keys, values, the mask and the gradient of the output. *Saved for backward* is what is "
    "allocated between forward and backward, *peak* the most at any moment of both. *Compile* is the first step "
    "minus the mean step."
)


@dataclass(frozen=True)
class AttentionCase:
    """One shape of causal attention without heads: queries, keys and values of (batch_size, context_length, d) each."""

    device: str
    batch_size: int = option(8, "batch size")
    context_length: int = option(1024, "tokens")
    d: int = option(64, "features of queries, keys and values", spelling="d-head")
    compile: bool = option(False, "with torch.compile (on), or eager (off)")
    precision: str = option("fp32", "of the matmuls", ("fp32", "tf32"))
    warmup_steps: int = option(5, "steps before the measured ones", cpu=2, least=0)
    steps: int = option(100, "measured forward and backward passes", cpu=10)


@dataclass
class AttentionFigures:
    """Times of forward and backward, and memory above the inputs.

    Attributes:
        product_bits: bits of the mantissa that matmuls keep: the precision that they really have.
        first_step_ms: the first forward and backward, with compilation.
        inputs_bytes: queries, keys, values, mask, and the gradient of the output.
        before_backward_bytes: allocated between forward and backward.
        forward_peak_bytes, peak_bytes: the peak of forward, and of forward and backward.
    """

    product_bits: int | None = None
    first_step_ms: float | None = None
    inputs_bytes: int | None = None
    before_backward_bytes: int | None = None
    forward_peak_bytes: int | None = None
    peak_bytes: int | None = None
    forward: Times | None = None
    backward: Times | None = None


TARGET = CaseTarget("profiling_targets.attention", AttentionCase, AttentionFigures)


def without_cache(settings: Settings, compiled: bool) -> dict[str, str]:
    """Returns the environment of compiled cases; on a CPU the cache stays in use, as the C++ compiler needs seconds."""
    return _NO_CACHE if compiled and settings.device == "cuda" else {}


def _cases(settings: Settings) -> Iterator[Task[AttentionCase]]:
    for compiled in settings["compile"]:
        yield from grid(TARGET, settings, without_cache(settings, compiled), compile=(compiled,))


def _answers(results: Results) -> Iterator[Words]:
    saved: dict[int, list[tuple[float, float]]] = {}
    for row in results.rows_of(TARGET):
        if not row.case.compile and (size := row.figures.before_backward_bytes):
            saved.setdefault(row.case.d, []).append((row.case.context_length, size))
    powers = sorted(power for points in saved.values() if (power := fitted_exponent(points)) is not None)
    if powers:
        written = " to ".join(dict.fromkeys(f"{power:.2f}" for power in (powers[0], powers[-1])))
        yield f"Memory saved for backward grows with the context length to the power {written} (eager, for each d)."
    if gains := [gain for row in results.rows for name in PASSES if (gain := results.gain(row, name, compile=False))]:
        yield phrase("`torch.compile` makes a pass {} as fast.", span(gains))


def _blocks(results: Results) -> Iterator[Block]:
    """Yields time and memory of each shape, and both over the context length at one width."""
    rows = sorted(results.rows, key=lambda row: (row.case.d, row.case.context_length, row.case.compile))

    def compile_ms(row: AnyRow) -> Cell:
        times = [mean_ms(row, name) or 0.0 for name in PASSES]
        return row.figures.first_step_ms - sum(times) if row.case.compile and all(times) else None

    yield rows_table(
        rows, "Time of one pass, mean ± standard deviation:",
        ("forward ms", "ms", "forward"),
        ("speed-up", "factor", lambda row: results.gain(row, "forward", compile=False)),
        ("backward ms", "ms", "backward"),
        ("speed-up", "factor", lambda row: results.gain(row, "backward", compile=False)),
        ("compile ms", "ms", compile_ms),
    )  # fmt: skip
    yield rows_table(
        rows, "Memory: the inputs, and what is allocated beside them:", ("inputs", "bytes", "inputs_bytes"),
        ("saved for backward", "bytes", "before_backward_bytes"), ("peak", "bytes", "peak_bytes"),
    )  # fmt: skip
    d = drawn_width(row.case.d for row in rows)
    shown = [row for row in rows if row.case.d == d]
    for name in PASSES:
        title = f"Attention by context length: {name}, d {d}"
        yield from curves(f"attention-{name}", title, shown, partial(mean_ms, path=name), "ms")
    title = f"Attention by context length: memory, d {d}"
    yield from curves(
        "attention-memory", title, shown, lambda row: ratio(row.figures.before_backward_bytes, 2**20),
        "MiB saved for backward",
    )  # fmt: skip


def drawn_width(widths: Iterable[int]) -> int:
    """Returns the width of heads that figures show: 64, or the largest."""
    known = set(widths)
    return 64 if 64 in known else max(known)


BENCH = Bench(
    name="attention",
    title="attention over context length, eager and compiled",
    summary="Attention without heads over context lengths and widths, eager and compiled: time, memory, and how it "
    "grows.",
    options=(
        several(AttentionCase, "d", (16, 32, 64, 128), (32,)),
        several(AttentionCase, "context_length", (256, 1024, 4096, 8192, 16384), (128, 256, 512)),
        several(AttentionCase, "compile", (False, True)),
        *single(AttentionCase, "batch_size", "precision", "warmup_steps", "steps"),
    ),
    targets=(TARGET,),
    cases=_cases,
    how={
        "warm-up": "{warmup_steps} steps",
        "measured": "{steps} forward and backward passes of each shape, batch {batch_size}, {precision}; on a GPU "
        "compiled anew, without a cache",
        "synchronized": "at the end of each pass",
        "gradients": "recorded in forward, for queries, keys and values",
    },
    answers=_answers,
    blocks=_blocks,
    definitions=_DEFINITIONS,
)
