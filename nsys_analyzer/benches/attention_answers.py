"""What the rows of attention say in sentences: growth of memory, steady speed-ups, and what is suspect."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from nsys_analyzer.analysis.scaling import fitted_exponent
from nsys_analyzer.benches.attention_bytes import shape_name
from nsys_analyzer.benches.endings import endings
from nsys_analyzer.benches.model import Results, Row
from nsys_analyzer.report.units import format_number, percent
from nsys_analyzer.text import code, strong

PHASES = ("forward", "backward")
#: Width, context length, and the eager and the compiled row of a shape.
Pair = tuple[int, int, Row | None, Row | None]
#: A coefficient of variation above which a mean is no speed-up's.
_UNSTEADY = 0.1


def latest(results: Results) -> Results:
    """The results with one row for each case: the last, where one was measured again in another environment."""
    rows = {tuple(sorted(row.case.items())): row for row in results.rows}
    return replace(results, rows=tuple(rows.values()))


def pairs_of(results: Results) -> list[Pair]:
    """Width, context length, and the eager and the compiled row of each shape."""
    shapes = dict.fromkeys((row.case["d"], row.case["context_length"]) for row in results.rows)
    return [
        (d, length, *(next(iter(results.of(d=d, context_length=length, compile=on)), None) for on in (False, True)))
        for d, length in sorted(shapes)
    ]


def answers(results: Results, pairs: Sequence[Pair]) -> Iterator[str]:
    """The sentences, each where there are rows for it."""
    exponents = [found for d in widths(results) if (found := _exponent(results, d)) is not None]
    if exponents:
        span = _span(exponents, "{:.2f}")
        yield f"Memory before backward grows with the context length to the power {span} (eager, fitted at each width)."
    yield from _of_compiling(pairs)
    yield from endings(results.rows, shape_name, "No shape ran out of memory.")


def _of_compiling(pairs: Sequence[Pair]) -> Iterator[str]:
    """The span of the speed-ups of steady passes, with the pass and the shape of each end."""
    faster = sorted(
        (eager.figures[f"{phase}_ms"] / compiled.figures[f"{phase}_ms"], f"{phase}, d {d}, context {length:,}")
        for d, length, eager, compiled in pairs
        for phase in PHASES
        if eager and compiled and eager.ok and compiled.ok and _is_steady(eager, phase) and _is_steady(compiled, phase)
    )
    if len(faster) > 1:
        ends = " to ".join(f"{speed_up:.2f} ({of})" for speed_up, of in (faster[0], faster[-1]))
        yield f"{code('torch.compile')} makes steady passes (CV of {percent(_UNSTEADY)} at most) {ends} times as fast."
    elif faster:
        yield f"{code('torch.compile')} makes a pass {faster[0][0]:.2f} times as fast ({faster[0][1]})."
    elif any(eager and compiled and eager.ok and compiled.ok for _, _, eager, compiled in pairs):
        yield f"No pass was steady both eager and compiled (CV of {percent(_UNSTEADY)} at most): no span is given."


def _is_steady(row: Row, phase: str) -> bool:
    return bool(row.figures.get(f"{phase}_cv", 0) <= _UNSTEADY)


def _unsteady(rows: Sequence[Row]) -> Iterator[str]:
    """A line for the passes whose times spread too far for their mean."""
    passes = [(row, phase) for row in rows if row.ok for phase in PHASES]
    if far := [(row, phase) for row, phase in passes if not _is_steady(row, phase)]:
        lengths = " and ".join(f"{length:,}" for length in sorted({row.case["context_length"] for row, _ in far}))
        yield (
            f"{strong('Unsteady passes')}, CV above {percent(_UNSTEADY)}: {len(far)} of {len(passes)}, at context "
            f"{lengths}. Their speed-ups in the tables may be noise, and the sentence above leaves them out."
        )


def _span(values: Sequence[float], pattern: str) -> str:
    low, high = pattern.format(min(values)), pattern.format(max(values))
    return low if low == high else f"{low} to {high}"


def widths(results: Results) -> list[int]:
    """The widths that were measured, in order."""
    return sorted({row.case["d"] for row in results.rows})


def _exponent(results: Results, d: int) -> float | None:
    rows = [row for row in results.of(d=d, compile=False) if "before_backward_bytes" in row.figures]
    return fitted_exponent([(row.case["context_length"], row.figures["before_backward_bytes"]) for row in rows])


def flags(results: Results, pairs: Sequence[Pair]) -> Iterator[str]:
    """What makes a figure suspect: unsteady passes, rows that are the same to the last digit, nothing compiled."""
    yield from _unsteady(results.rows)
    for _, _, eager, compiled in pairs:
        if compiled and compiled.ok and compiled.figures.get("compiled_graphs") == 0:
            yield f"{strong('Nothing was compiled')}: {shape_name(compiled)} fell back to eager."
        if eager and compiled and eager.ok and compiled.ok and _are_equal(eager, compiled):
            passes = " and ".join(PHASES)
            yield f"{strong('Equal to the last digit')}: {shape_name(compiled)} has the {passes} of eager."


def _are_equal(eager: Row, compiled: Row) -> bool:
    """Whether every pass of both prints the same time."""
    printed = ([format_number(row.figures[f"{phase}_ms"], "ms") for phase in PHASES] for row in (eager, compiled))
    return len(set(map(tuple, printed))) == 1
