"""Attention without heads, eager and compiled: how its time and its memory grow with the context length."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from nsys_analyzer.experiments.attention.cases import TARGET, AttentionCase, AttentionRow
from nsys_analyzer.experiments.attention.core import curves, drawn_width, figure, mib, ms, unfused_rates
from nsys_analyzer.experiments.limits import MinimumMemory, Rate
from nsys_analyzer.experiments.model import Bench, Results, Settings, Task, grid, several, single
from nsys_analyzer.experiments.scaling import fitted_exponent
from nsys_analyzer.experiments.section import (
    UNSTEADY,
    compile_cache,
    each,
    endings,
    no_cache,
    ratio,
    section,
    span,
    spread,
    unsteady,
)
from nsys_analyzer.report.model import Lines, Section
from nsys_analyzer.report.tables import Field, table
from nsys_analyzer.text import Words, phrase

PASSES = ("forward", "backward")
_OPTIONS = (
    several(AttentionCase, "d", (16, 32, 64, 128), (32,)),
    several(AttentionCase, "context_length", (256, 1024, 4096, 8192, 16384), (128, 256, 512)),
    several(AttentionCase, "compile", (False, True)),
    *single(AttentionCase, "batch_size", "precision", "warmup_steps", "steps"),
)
#: Passes over the scores of one eager forward: two matmuls write or read them once, scale, mask, subtract, exp and
#: divide read and write them, max and sum read them.
_EAGER_PASSES = 14
_DEFINITIONS = phrase(
    "*Inputs* are queries, keys, values, the mask and the gradient of the output. *Saved for backward* is what is "
    "allocated between forward and backward, *peak* the most at any moment of both. *Compile* is the first step "
    "minus the mean step."
)


def _cases(settings: Settings) -> tuple[Task[AttentionCase], ...]:
    return tuple(
        task
        for compiled in settings["compile"]
        for task in grid(
            TARGET, settings, lambda case: case.name,
            environment=no_cache(settings) if compiled else None,
            compile=(compiled,), d=settings["d"], context_length=settings["context_length"],
        )
    )  # fmt: skip


class _Timed(NamedTuple):
    """A row, and the eager row of its shape if it is compiled."""

    row: AttentionRow
    eager: AttentionRow | None

    def speed_up(self, one: str) -> float | None:
        """Eager's time of a pass ÷ compiled's; None where one is missing."""
        return ratio(ms(self.eager, one), ms(self.row, one))

    def is_steady(self, one: str) -> bool:
        """Whether the times of a pass vary little enough for a speed-up."""
        both = (figure(self.eager, one), figure(self.row, one))
        return all(times is None or (times.cv or 0) <= UNSTEADY for times in both)

    @property
    def compile_ms(self) -> float | None:
        """The first step of compiled code without the time of a later one."""
        first, later = self.row.figures.first_step_ms, [ms(self.row, one) for one in PASSES]
        known = self.row.case.compile and first and any(later)
        return first - sum(time for time in later if time) if first and known else None


def _timed(rows: Sequence[AttentionRow]) -> list[_Timed]:
    eager = {(row.case.d, row.case.context_length): row for row in rows if not row.case.compile}
    return [
        _Timed(row, eager.get((row.case.d, row.case.context_length)) if row.case.compile else None)
        for row in sorted(rows, key=lambda row: (row.case.d, row.case.context_length, row.case.compile))
    ]


def _section(results: Results) -> Section:
    # Of a case that was measured again in another environment the last row counts.
    rows = tuple({row.case: row for row in results.rows_of(TARGET)}.values())
    timed = _timed(rows)
    return section(
        "attention",
        "attention over context length, eager and compiled",
        results,
        rows,
        _name,
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
        rates=[rate for row in rows if row.ok for rate in _rates(row)],
        memory=_minimum(rows),
    )


def _name(row: AttentionRow) -> str:
    return row.case.name


def _answers(timed: Sequence[_Timed]) -> Iterator[Words]:
    saved: dict[int, list[tuple[float, float]]] = {}
    for row in (one.row for one in timed if not one.row.case.compile):
        if size := row.figures.before_backward_bytes:
            saved.setdefault(row.case.d, []).append((row.case.context_length, size))
    powers = sorted(power for points in saved.values() if (power := fitted_exponent(points)) is not None)
    if powers:
        written = " to ".join(dict.fromkeys(f"{power:.2f}" for power in (powers[0], powers[-1])))
        yield f"Memory saved for backward grows with the context length to the power {written} (eager, for each d)."
    gains = [gain for both in timed for one in PASSES if both.is_steady(one) and (gain := both.speed_up(one))]
    if gains:
        yield phrase(
            "`torch.compile` makes a pass {} as fast (passes with a CV of 10 % or less).", span(gains, "factor")
        )
    yield from endings([one.row for one in timed], _name, "No shape ran out of memory.")


def _warnings(rows: Sequence[AttentionRow]) -> Iterator[Words]:
    variation = {f"{_name(row)}, {one}": figure(row, one).cv or 0 for row in rows if row.ok for one in PASSES}
    yield from unsteady("passes", variation)
    for row in rows:
        if row.ok and row.figures.compiled_graphs == 0:
            yield phrase("**Nothing was compiled**: {} fell back to eager.", _name(row))


_SHAPE: tuple[Field[_Timed], ...] = (
    Field("d", "count", lambda one: one.row.case.d),
    Field("context", "count", lambda one: one.row.case.context_length),
    Field("code", "text", lambda one: "compiled" if one.row.case.compile else "eager"),
)
_TIMES: tuple[Field[_Timed], ...] = (
    *_SHAPE,
    Field("forward ms", "ms", lambda one: spread(one.row.figures.forward)),
    Field("speed-up", "factor", lambda one: one.speed_up("forward")),
    Field("backward ms", "ms", lambda one: spread(one.row.figures.backward)),
    Field("speed-up", "factor", lambda one: one.speed_up("backward")),
    Field("compile ms", "ms", lambda one: one.compile_ms),
    Field("status", "text", lambda one: one.row.status),
)
_MEMORY: tuple[Field[_Timed], ...] = (
    *_SHAPE,
    Field("inputs", "bytes", lambda one: one.row.figures.inputs_bytes),
    Field("saved for backward", "bytes", lambda one: one.row.figures.before_backward_bytes),
    Field("peak", "bytes", lambda one: one.row.figures.peak_bytes),
)


_DRAWN: tuple[tuple[str, str, Callable[[AttentionRow], float | None]], ...] = (
    ("forward", "ms", lambda row: ms(row, "forward")),
    ("backward", "ms", lambda row: ms(row, "backward")),
    ("memory", "MiB saved for backward", lambda row: mib(row.figures.before_backward_bytes)),
)


def _figures(rows: Sequence[AttentionRow]) -> Iterator[Lines]:
    """Time of each pass and memory saved for backward over the context length, at one width."""
    d = drawn_width(row.case.d for row in rows)
    for name, y_axis, value in _DRAWN:
        points: dict[str, list[tuple[float, float | None]]] = {"eager": [], "compiled": []}
        for row in rows:
            if row.case.d == d:
                points["compiled" if row.case.compile else "eager"].append((row.case.context_length, value(row)))
        title = f"Attention by context length: {name}, d {d}, batch {each(rows, 'batch_size')}"
        yield from curves(f"attention-{name}", title, points, y_axis)


def _rates(row: AttentionRow) -> Iterator[Rate]:
    return unfused_rates(row, f"{{}}, {row.case.name}", 0 if row.case.compile else _EAGER_PASSES)


def _minimum(rows: Sequence[AttentionRow]) -> Iterator[tuple[int, MinimumMemory]]:
    """Before an eager backward three score matrices and the output are alive."""
    for row in rows:
        if (measured := row.figures.before_backward_bytes) and not row.case.compile:
            least = 3 * row.case.shape.square_bytes + row.case.shape.tensor_bytes
            label = f"saved for backward at {row.case.name}"
            yield row.case.d, MinimumMemory(label, measured, least, "3·B·S² scores, B·S·d output")


BENCH = Bench(
    "attention",
    "Attention without heads over context lengths and widths, eager and compiled: time, memory, and how it grows.",
    _OPTIONS,
    _cases,
    _section,
    precisions=lambda settings: (settings["precision"],),
    targets=(TARGET,),
)
