"""Attention without heads, eager and compiled: how its time and its memory grow with the context length.

``flash`` and ``variants`` compare other implementations of attention: the work of a pass, which all three hold against
the limits of the device, is counted here.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from nsys_analyzer.analysis.transformer.costs import AttentionShape
from nsys_analyzer.experiments.model import AnyRow, Bench, Results, Settings, grid, option, several, single
from nsys_analyzer.experiments.section import (
    UNSTEADY,
    MinimumMemory,
    Rate,
    compile_cache,
    curves,
    each,
    endings,
    figure,
    fitted_exponent,
    mean_ms,
    no_cache,
    ratio,
    section,
    span,
    spread,
    unsteady,
)
from nsys_analyzer.report.model import Lines, Section
from nsys_analyzer.report.tables import Field, table
from nsys_analyzer.runs.rows import CaseTarget, Row, Task, Times
from nsys_analyzer.text import Words, phrase

PASSES = ("forward", "backward")
#: Passes over the scores of one eager forward: two matmuls write or read them once, scale, mask, subtract, exp and
#: divide read and write them, max and sum read them.
_EAGER_PASSES = 14
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

    @property
    def shape(self) -> AttentionShape:
        """The shape with its costs; the tensors are fp32."""
        return AttentionShape(self.batch_size, 1, self.context_length, self.d, True, self.precision)

    @property
    def name(self) -> str:
        """The case in a sentence."""
        return f"d {self.d}, context {self.context_length:,}{', compiled' if self.compile else ''}"


@dataclass
class AttentionFigures:
    """Times of forward and backward, and memory above the inputs.

    Attributes:
        product_bits: bits of the mantissa that matmuls keep: the precision that they really have.
        first_step_ms: the first forward and backward, with compilation.
        inputs_bytes: queries, keys, values, mask, and the gradient of the output.
        before_backward_bytes: allocated between forward and backward.
        forward_peak_bytes, peak_bytes: the peak of forward, and of forward and backward.
        saved: shape, dtype, number and bytes of the tensors that are saved for backward.
    """

    product_bits: int | None = None
    first_step_ms: float | None = None
    compiled_graphs: int | None = None
    inputs_bytes: int | None = None
    before_backward_bytes: int | None = None
    forward_peak_bytes: int | None = None
    peak_bytes: int | None = None
    saved: list[tuple[list[int], str, int, int]] | None = None
    forward: Times | None = None
    backward: Times | None = None


TARGET = CaseTarget("profiling_targets.attention", AttentionCase, AttentionFigures)
AttentionRow = Row[AttentionCase, AttentionFigures]


def _cases(settings: Settings) -> Iterator[Task[AttentionCase]]:
    for compiled in settings["compile"]:
        environment = no_cache(settings) if compiled else None
        yield from grid(TARGET, settings, lambda case: case.name, environment=environment, compile=(compiled,))


class _Timed(NamedTuple):
    """A row, and the eager row of its shape if it is compiled."""

    row: AttentionRow
    eager: AttentionRow | None

    def speed_up(self, name: str) -> float | None:
        """Returns eager's time of a pass ÷ compiled's; None where one is missing."""
        return ratio(mean_ms(self.eager, name), mean_ms(self.row, name))

    @property
    def compile_ms(self) -> float | None:
        """The first step of compiled code without the time of a later one."""
        first, later = self.row.figures.first_step_ms, [mean_ms(self.row, name) for name in PASSES]
        known = self.row.case.compile and first and any(later)
        return first - sum(time for time in later if time) if first and known else None


def _section(results: Results) -> Section:
    # Of a case that was measured again in another environment the last row counts.
    rows = tuple({row.case: row for row in results.rows_of(TARGET)}.values())
    eager = {(row.case.d, row.case.context_length): row for row in rows if not row.case.compile}
    timed = [
        _Timed(row, eager.get((row.case.d, row.case.context_length)) if row.case.compile else None)
        for row in sorted(rows, key=lambda row: (row.case.d, row.case.context_length, row.case.compile))
    ]
    return section(
        "attention",
        "attention over context length, eager and compiled",
        results,
        rows,
        lambda row: row.case.name,
        answers=_answers(timed),
        warmup=f"{each(rows, 'warmup_steps')} steps",
        measured=f"{each(rows, 'steps')} forward and backward passes of each shape{compile_cache(rows)}",
        synchronized="at the end of each pass",
        gradients="recorded in forward, for queries, keys and values",
        warnings=_warnings(rows),
        blocks=(
            table(_TIMES, timed, "Time of one pass, mean ± standard deviation:", names=3),
            table(_MEMORY, timed, "Memory: the inputs, and what is allocated beside them:", names=3),
            *_figures(rows),
        ),
        definitions=_DEFINITIONS,
        rates=[
            rate
            for row in rows
            if row.ok
            for rate in unfused_rates(row, f"{{}}, {row.case.name}", 0 if row.case.compile else _EAGER_PASSES)
        ],
        memory=_minimum_memory(rows),
    )


def _answers(timed: Sequence[_Timed]) -> Iterator[Words]:
    saved: dict[int, list[tuple[float, float]]] = {}
    gains = []
    for pair in timed:
        if not pair.row.case.compile and (size := pair.row.figures.before_backward_bytes):
            saved.setdefault(pair.row.case.d, []).append((pair.row.case.context_length, size))
        for name in PASSES:
            both = (figure(pair.eager, name), figure(pair.row, name))
            is_steady = all(times is None or (times.cv or 0) <= UNSTEADY for times in both)
            if is_steady and (gain := pair.speed_up(name)):
                gains.append(gain)
    powers = sorted(power for points in saved.values() if (power := fitted_exponent(points)) is not None)
    if powers:
        written = " to ".join(dict.fromkeys(f"{power:.2f}" for power in (powers[0], powers[-1])))
        yield f"Memory saved for backward grows with the context length to the power {written} (eager, for each d)."
    if gains:
        yield phrase(
            "`torch.compile` makes a pass {} as fast (passes with a CV of 10 % or less).", span(gains, "factor")
        )
    yield from endings([pair.row for pair in timed], lambda row: row.case.name, "No shape ran out of memory.")


def _warnings(rows: Sequence[AttentionRow]) -> Iterator[Words]:
    variation = {f"{row.case.name}, {name}": figure(row, name).cv or 0 for row in rows if row.ok for name in PASSES}
    yield from unsteady("passes", variation)
    for row in rows:
        if row.ok and row.figures.compiled_graphs == 0:
            yield phrase("**Nothing was compiled**: {} fell back to eager.", row.case.name)


_SHAPE: tuple[Field[_Timed], ...] = (
    Field("d", "count", lambda timed: timed.row.case.d),
    Field("context", "count", lambda timed: timed.row.case.context_length),
    Field("code", "text", lambda timed: "compiled" if timed.row.case.compile else "eager"),
)
_TIMES: tuple[Field[_Timed], ...] = (
    *_SHAPE,
    Field("forward ms", "ms", lambda timed: spread(timed.row.figures.forward)),
    Field("speed-up", "factor", lambda timed: timed.speed_up("forward")),
    Field("backward ms", "ms", lambda timed: spread(timed.row.figures.backward)),
    Field("speed-up", "factor", lambda timed: timed.speed_up("backward")),
    Field("compile ms", "ms", lambda timed: timed.compile_ms),
    Field("status", "text", lambda timed: timed.row.status),
)
_MEMORY: tuple[Field[_Timed], ...] = (
    *_SHAPE,
    Field("inputs", "bytes", lambda timed: timed.row.figures.inputs_bytes),
    Field("saved for backward", "bytes", lambda timed: timed.row.figures.before_backward_bytes),
    Field("peak", "bytes", lambda timed: timed.row.figures.peak_bytes),
)


def _figures(rows: Sequence[AttentionRow]) -> Iterator[Lines]:
    """Yields time of each pass and memory saved for backward over the context length, at one width."""
    d = drawn_width(row.case.d for row in rows)
    for name, y_axis in (("forward", "ms"), ("backward", "ms"), ("memory", "MiB saved for backward")):
        points: dict[str, list[tuple[float, float | None]]] = {"eager": [], "compiled": []}
        for row in (row for row in rows if row.case.d == d):
            size = row.figures.before_backward_bytes
            value = mean_ms(row, name) if y_axis == "ms" else None if size is None else size / 2**20
            points["compiled" if row.case.compile else "eager"].append((row.case.context_length, value))
        title = f"Attention by context length: {name}, d {d}, batch {each(rows, 'batch_size')}"
        yield from curves(f"attention-{name}", title, points, y_axis)


def _minimum_memory(rows: Sequence[AttentionRow]) -> Iterator[tuple[int, MinimumMemory]]:
    """Yields the memory before each eager backward: three score matrices and the output are alive."""
    for row in rows:
        if (measured := row.figures.before_backward_bytes) and not row.case.compile:
            least = 3 * row.case.shape.square_bytes + row.case.shape.tensor_bytes
            label = f"saved for backward at {row.case.name}"
            yield row.case.d, MinimumMemory(label, measured, least, "3·B·S² scores, B·S·d output")


class WithHeads:
    """The shape of a case of attention with heads: q, k and v are (batch_size, heads, context_length, d_head)."""

    batch_size: int
    heads: int
    context_length: int
    d_head: int
    causal: bool
    precision: str

    @property
    def shape(self) -> AttentionShape:
        """The shape with its costs."""
        sizes = (self.batch_size, self.heads, self.context_length, self.d_head)
        return AttentionShape(*sizes, self.causal, self.precision)


def drawn_width(widths: Iterable[int]) -> int:
    """Returns the width of heads that figures show: 64, or the largest."""
    known = set(widths)
    return 64 if 64 in known else max(known)


def unfused_rates(row: AnyRow, label: str, passes: int) -> Iterator[Rate]:
    """Yields the work of naive attention: all scores, masked ones too, with two matmuls forward and four backward.

    ``passes`` is how often forward reads or writes all scores in memory, 0 where that is not known.
    """
    shape: AttentionShape = row.case.shape
    flops, square = 4 * shape.d_head * shape.square, shape.square_bytes
    if (forward := mean_ms(row, "forward")) is not None:
        yield Rate(label.format("forward"), shape.precision, flops, passes * square or None, forward, 2 * square)
    if (backward := mean_ms(row, "backward")) is not None:
        yield Rate(label.format("backward"), shape.precision, 2 * flops, None, backward)


def fused_rates(row: AnyRow, label: str, passes: Mapping[str, str], *, in_three: bool) -> Iterator[Rate]:
    """Yields the least work of any attention: the visible scores, and each tensor moved once.

    ``passes`` are figures of the row, with their names for the ``label``. With ``in_three`` each fp32 matmul is made of
    three in TF32: all of them count, against TF32's peak.
    """
    shape: AttentionShape = row.case.shape
    work = {
        "forward": (shape.forward_flops, shape.forward_bytes),
        "backward": (shape.backward_flops, shape.backward_bytes),
        "forward_backward": (3 * shape.forward_flops, None),
    }
    precision, matmuls, suffix = (
        ("tf32", 3, ", fp32 as 3xTF32, all three counted") if in_three else (shape.precision, 1, "")
    )
    for name, words in passes.items():
        if (time := mean_ms(row, name)) is not None:
            flops, moved = work[name]
            yield Rate(label.format(words) + suffix, precision, matmuls * flops, moved, time)


BENCH = Bench(
    "attention",
    "Attention without heads over context lengths and widths, eager and compiled: time, memory, and how it grows.",
    (
        several(AttentionCase, "d", (16, 32, 64, 128), (32,)),
        several(AttentionCase, "context_length", (256, 1024, 4096, 8192, 16384), (128, 256, 512)),
        several(AttentionCase, "compile", (False, True)),
        *single(AttentionCase, "batch_size", "precision", "warmup_steps", "steps"),
    ),
    lambda settings: tuple(_cases(settings)),
    _section,
    targets=(TARGET,),
)
