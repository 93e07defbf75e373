"""Attention without heads over context lengths, eager and compiled: what S² costs in time and in memory."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import NamedTuple

from nsys_analyzer.experiments.attention.cases import TARGET, AttentionCase, AttentionRow
from nsys_analyzer.experiments.attention.core import (
    figure,
    largest,
    ms,
    quotient,
    same_status,
    span,
    spread,
    unfused_rates,
)
from nsys_analyzer.experiments.limits import MinimumMemory, Rate, check_limits
from nsys_analyzer.experiments.model import Bench, Results, Settings, Task, grid, several, single
from nsys_analyzer.experiments.scaling import fitted_exponent
from nsys_analyzer.experiments.section import UNSTEADY, conditions, each, endings, messages, precision_warnings, section
from nsys_analyzer.report.model import Block, Details, Figure, Panels, Section
from nsys_analyzer.report.tables import Field, table
from nsys_analyzer.report.units import format_number, percent
from nsys_analyzer.text import Words, phrase

PASSES = ("forward", "backward")
_OPTIONS = (
    several(AttentionCase, "d", (16, 32, 64, 128), (32,)),
    several(AttentionCase, "context_length", (256, 1024, 4096, 8192, 16384), (128, 256, 512)),
    several(AttentionCase, "compile", (False, True)),
    *(single(AttentionCase, name) for name in ("batch_size", "precision", "warmup_steps", "steps")),
)
#: Lets PyTorch find nothing that an earlier run compiled. On a CPU it may: the C++ compiler needs seconds.
_COLD = {"TORCHINDUCTOR_FORCE_DISABLE_CACHES": "1"}
#: Passes over the scores of one eager forward: two matmuls write or read them once, scale, mask, subtract, exp and
#: divide read and write them, max and sum read them.
_EAGER_PASSES = 14
_TIGHTEST = 3
_DEFINITIONS = phrase(
    "*Inputs* are queries, keys, values, the mask and the gradient of the output. *Saved for backward* is what is "
    "alive between forward and backward, *peak* the most in both of them. *Compile time* is the first step without "
    "the time of a later one."
)


def _cases(settings: Settings) -> tuple[Task[AttentionCase], ...]:
    return tuple(
        task
        for compiled in settings["compile"]
        for task in grid(
            TARGET, settings, lambda case: case.name,
            environment=_COLD if compiled and settings.device == "cuda" else None,
            compile=(compiled,), d=settings["d"], context_length=settings["context_length"],
        )
    )  # fmt: skip


class Pair(NamedTuple):
    """The eager and the compiled row of a shape; None for what was not run."""

    d: int
    context_length: int
    eager: AttentionRow | None
    compiled: AttentionRow | None

    def speed_up(self, one: str) -> float | None:
        """Eager's time of a pass ÷ compiled's; None where one is missing."""
        return quotient(ms(self.eager, one), ms(self.compiled, one))

    @property
    def status(self) -> str:
        """How both ended."""
        return same_status(
            {name: row.status for name, row in (("eager", self.eager), ("compiled", self.compiled)) if row}
        )

    @property
    def compile_ms(self) -> float | None:
        """The first step without the time of a later one, compiled."""
        first, later = figure(self.compiled, "first_step_ms"), [ms(self.compiled, one) for one in PASSES]
        return first - sum(time for time in later if time) if first and any(later) else None


def _pairs(rows: Sequence[AttentionRow]) -> list[Pair]:
    found: dict[tuple[int, int], dict[bool, AttentionRow]] = {}
    for row in rows:
        found.setdefault((row.case.d, row.case.context_length), {}).setdefault(row.case.compile, row)
    return [Pair(*shape, both.get(False), both.get(True)) for shape, both in sorted(found.items())]


def _section(results: Results) -> Section:
    # Of a case that was measured again in another environment the last row counts.
    rows = tuple({row.case: row for row in results.rows_of(TARGET)}.values())
    pairs = _pairs(rows)
    return section(
        "attention",
        "attention over context length, eager and compiled",
        answers=_answers(rows, pairs),
        conditions=conditions(
            results,
            warmup=f"{each(rows, 'warmup_steps')} steps",
            steps=f"{each(rows, 'steps')} forward and backward passes of each shape, fresh tensors{_compiled(rows)}",
            synchronized="at the end of each pass",
            grad="recorded in forward, for queries, keys and values",
        ),
        warnings=(*precision_warnings(results), *_warnings(rows, pairs)),
        blocks=(
            *(
                table(_times(one), pairs, f"Time of one {one} pass, mean and standard deviation:", names=2)
                for one in PASSES
            ),
            table(_MEMORY, pairs, "Memory above the inputs, and the time of compiling:", names=2),
            *_figures(rows),
            *_accounting(rows),
        ),
        lacking=messages(rows, lambda row: row.case.name),
        limits=check_limits(results, [rate for row in rows if row.ok for rate in _rates(row)], list(_minimum(rows))),
        definitions=_DEFINITIONS,
    )


def _compiled(rows: Sequence[AttentionRow]) -> str:
    """Where compiled code came from, for the conditions; empty where nothing was compiled."""
    environments = [row.environment for row in rows if row.case.compile]
    if not environments:
        return ""
    cold = all(environment == _COLD for environment in environments)
    return "; compiled code " + ("made anew, no cache in use" if cold else "from PyTorch's cache where it held some")


def _answers(rows: Sequence[AttentionRow], pairs: Sequence[Pair]) -> Iterator[Words]:
    """Growth of memory, what compiling gains, and what ran out of memory."""
    kept = {(pair.d, pair.context_length): figure(pair.eager, "before_backward_bytes") for pair in pairs}
    widths = dict.fromkeys(pair.d for pair in pairs)
    fitted = [fitted_exponent([(n, size) for (of, n), size in kept.items() if of == d and size]) for d in widths]
    if powers := [power for power in fitted if power is not None]:
        written = span(powers, "{:.2f}")
        yield f"Memory before backward grows with context length to the power {written} (eager, fitted at each width)."
    yield from _of_compiling(pairs)
    yield from endings(rows, lambda row: row.case.name, "No shape ran out of memory.")


def _of_compiling(pairs: Sequence[Pair]) -> Iterator[Words]:
    """The least and the largest speed-up of steady passes, each with its pass and shape."""
    whole = [pair for pair in pairs if pair.eager and pair.compiled and pair.eager.ok and pair.compiled.ok]
    faster = sorted(
        (gain, f"{one}, d {pair.d}, context {pair.context_length:,}")
        for pair in whole
        for one in PASSES
        if _is_steady(pair.eager, one) and _is_steady(pair.compiled, one) and (gain := pair.speed_up(one))
    )
    if len(faster) > 1:
        ends = " to ".join(f"{gain:.2f} ({of})" for gain, of in (faster[0], faster[-1]))
        yield phrase(
            "`torch.compile` makes steady passes (CV of {} at most) {} times as fast.", percent(UNSTEADY), ends
        )
    elif faster:
        yield phrase("`torch.compile` makes a pass {:.2f} times as fast ({}).", *faster[0])
    elif whole:
        yield f"No pass was steady both eager and compiled (CV of {percent(UNSTEADY)} at most): no span is given."


def _is_steady(row: AttentionRow | None, one: str) -> bool:
    times = figure(row, one)
    return times is not None and (times.cv or 0) <= UNSTEADY


def _warnings(rows: Sequence[AttentionRow], pairs: Sequence[Pair]) -> Iterator[Words]:
    """What makes a figure suspect: unsteady passes, nothing compiled, times that are the same to the last digit."""
    passes = [(row, one) for row in rows if row.ok for one in PASSES]
    if far := [row.case.context_length for row, one in passes if not _is_steady(row, one)]:
        yield phrase(
            "**Unsteady passes**, CV above {}: {} of {}, at context {}. Their speed-ups in the tables may be noise, "
            "and the sentence above leaves them out.",
            percent(UNSTEADY), len(far), len(passes), " and ".join(f"{length:,}" for length in sorted(set(far))),
        )  # fmt: skip
    for pair in pairs:
        if pair.compiled and pair.compiled.ok and pair.compiled.figures.compiled_graphs == 0:
            yield phrase("**Nothing was compiled**: {} fell back to eager.", pair.compiled.case.name)
        eager, compiled = (
            [format_number(time, "ms") for one in PASSES if (time := ms(row, one))]
            for row in (pair.eager, pair.compiled)
        )
        if pair.compiled and compiled and eager == compiled:
            passed = " and ".join(PASSES)
            yield phrase("**Equal to the last digit**: {} has the {} of eager.", pair.compiled.case.name, passed)


_SHAPE: tuple[Field[Pair], ...] = (
    Field("d", "count", lambda pair: pair.d),
    Field("context", "count", lambda pair: pair.context_length),
)
_MEMORY: tuple[Field[Pair], ...] = (
    *_SHAPE,
    Field("inputs", "bytes", lambda pair: figure(pair.eager or pair.compiled, "inputs_bytes")),
    Field("saved for backward", "bytes", lambda pair: figure(pair.eager, "before_backward_bytes")),
    Field("compiled", "bytes", lambda pair: figure(pair.compiled, "before_backward_bytes")),
    Field("peak", "bytes", lambda pair: figure(pair.eager, "peak_bytes")),
    Field("compiled", "bytes", lambda pair: figure(pair.compiled, "peak_bytes")),
    Field("compile time", "ms", lambda pair: pair.compile_ms),
)


def _times(one: str) -> tuple[Field[Pair], ...]:
    return (
        *_SHAPE,
        Field("eager ms", "ms", lambda pair: spread(pair.eager, one)),
        Field("compiled ms", "ms", lambda pair: spread(pair.compiled, one)),
        Field("speed-up", "factor", lambda pair: pair.speed_up(one)),
        Field("status", "text", lambda pair: pair.status),
    )


def _figures(rows: Sequence[AttentionRow]) -> Iterator[Figure]:
    """The time of each pass, and the memory saved for backward, over the context length, a panel for each width."""
    title = f"of attention by context length, batch {each(rows, 'batch_size')}"
    for one in PASSES:
        yield from _panels(f"attention-{one}", f"{one.capitalize()} {title}", rows, partial(ms, name=one), "ms")
    yield from _panels("attention-memory", f"Memory saved for backward {title}", rows, _saved_mib, "MiB")


def _saved_mib(row: AttentionRow) -> float | None:
    size = row.figures.before_backward_bytes
    return None if size is None else size / 2**20


def _panels(
    key: str, title: str, rows: Sequence[AttentionRow], value: Callable[[AttentionRow], float | None], y_axis: str
) -> Iterator[Panels]:
    panels = []
    for d in sorted({row.case.d for row in rows}):
        of = {
            "eager": [row for row in rows if row.case.d == d and not row.case.compile],
            "compiled": [row for row in rows if row.case.d == d and row.case.compile],
        }
        points = {
            name: [(row.case.context_length, y) for row in own if (y := value(row)) is not None]
            for name, own in of.items()
        }
        panels.append((f"d {d}", tuple((name, tuple(sorted(own))) for name, own in points.items() if len(own) > 1)))
    if shown := tuple(panel for panel in panels if panel[1]):
        yield Panels(key, title, shown, "context length, tokens", y_axis, log_y=True)


class _Saved(NamedTuple):
    """Tensors of one shape that are saved for backward."""

    tensor: str
    shape: str
    dtype: str
    number: int | None
    bytes: float


_SAVED: tuple[Field[_Saved], ...] = (
    Field("tensor", "text", lambda one: one.tensor),
    Field("shape", "text", lambda one: one.shape),
    Field("dtype", "text", lambda one: one.dtype),
    Field("number", "count", lambda one: one.number),
    Field("bytes", "bytes", lambda one: one.bytes),
)


def _largest(rows: Sequence[AttentionRow], most: int) -> list[tuple[AttentionRow, float]]:
    """The eager rows that save the most for backward, and the bytes of it."""
    return largest([row for row in rows if not row.case.compile], lambda row: row.figures.before_backward_bytes, most)


def _accounting(rows: Sequence[AttentionRow]) -> Iterator[Block]:
    """The tensors that the largest eager row saves, against the memory that was measured."""
    for row, measured in _largest([row for row in rows if row.figures.saved], 1):
        batch, length, d = row.case.batch_size, row.case.context_length, row.case.d
        inputs = ([batch, length, d], [batch, d, length], [length, length])
        own = [
            _Saved(_role(shape, length), _sides(shape), dtype, number, size)
            for shape, dtype, number, size in row.figures.saved or ()
            if shape not in inputs
        ]
        own.append(_Saved("output", _sides(inputs[0]), "float32", 1, row.case.shape.tensor_bytes))
        own.append(_Saved("sum", "", "", None, sum(one.bytes for one in own)))
        own.append(_Saved("measured", "", "", None, measured))
        caption = f"Saved for backward at {row.case.name}, as autograd says; inputs are not counted again:"
        yield Details("Byte accounting of the largest shape", (table(_SAVED, own, caption),))


def _role(shape: Sequence[int], length: int) -> str:
    square = list(shape[-2:]) == [length, length]
    return "scores, their exponentials, the weights" if square else "maxima and sums of the rows"


def _sides(shape: Sequence[int]) -> str:
    return " × ".join(f"{side:,}" for side in shape)


def _rates(row: AttentionRow) -> Iterator[Rate]:
    return unfused_rates(row, f"{{}}, {row.case.name}", 0 if row.case.compile else _EAGER_PASSES)


def _minimum(rows: Sequence[AttentionRow]) -> Iterator[MinimumMemory]:
    """Before an eager backward three score matrices and the output are alive."""
    for row, measured in _largest(rows, _TIGHTEST):
        least = 3 * row.case.shape.square_bytes + row.case.shape.tensor_bytes
        yield MinimumMemory(f"saved for backward at {row.case.name}", measured, least, "3·B·S² scores, B·S·d output")


BENCH = Bench(
    "attention",
    "Attention without heads over context lengths and widths, eager and compiled: time, memory, and how it grows.",
    _OPTIONS,
    _cases,
    _section,
    precisions=lambda settings: (settings["precision"],),
    targets=(TARGET,),
)
