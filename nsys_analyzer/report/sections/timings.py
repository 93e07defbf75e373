"""How long the target takes without the profiler, and what the profiler adds."""

from __future__ import annotations

from functools import partial

from nsys_analyzer.analysis.summary.compared import TRAINING_PHASES
from nsys_analyzer.analysis.summary.runs import Unprofiled
from nsys_analyzer.analysis.summary.statistics import Stats
from nsys_analyzer.analysis.summary.summary import CaptureSummary
from nsys_analyzer.report.model import Answer, Block, Cell, Details, Paragraph, Section, Table
from nsys_analyzer.report.sections.evidence import FEW, Evidence, ended, spread
from nsys_analyzer.report.sections.pivots import pivots
from nsys_analyzer.report.sections.sweep_times import time_figures
from nsys_analyzer.report.tables import Field, table
from nsys_analyzer.report.units import format_number, milliseconds, signed_percent
from nsys_analyzer.text import Words, phrase

_TITLE = "Timings of unprofiled runs"
_STEP = "step"
_Timed = tuple[CaptureSummary, Unprofiled]
_GRID = (*TRAINING_PHASES, _STEP)
_WHAT_TIMES_HOLD = phrase(
    "the device is synchronised at the end of each phase, so that a phase's time holds its work. *tokens/s*: batch "
    "size × context length ÷ the time of a step. *Peak memory*: the most that was allocated on the device."
)


def answer(evidence: Evidence) -> Section:
    """The step by model and context, one row for each capture, then each phase's spread and a figure of the step."""
    captures = [capture for capture in evidence.captures if capture.unprofiled and _timed(capture.unprofiled)]
    if not captures:
        return Section("timings", _TITLE, ())
    spreads = _spreads(captures)
    tables: list[Block] = [spreads] if spreads.rows else []
    blocks: list[Block] = [answer for capture in captures if (answer := _answer(capture))]
    for phase in ("forward", "backward") if len(captures) > FEW else ():
        blocks += pivots(captures, partial(_phase_ms, phase), "ms", f"{phase.capitalize()} ms without the profiler")
    blocks += [_grid(captures), Paragraph(_conditions(captures))]
    if len(captures) > FEW and tables:
        tables = [Details(f"The spread of every phase: {len(spreads.rows)} rows", tuple(tables))]
    return Section("timings", _TITLE, (*blocks, *tables, *time_figures(captures)), "unprofiled")


def _phase_ms(phase: str, capture: CaptureSummary) -> float | None:
    return capture.unprofiled.typical_ms(phase) if capture.unprofiled else None


def _timed(unprofiled: Unprofiled) -> bool:
    """Whether the timings know anything of a run: its times or how it ended."""
    return bool(unprofiled.phases) or unprofiled.status != "missing"


def _answer(capture: CaptureSummary) -> Answer | None:
    """The step where it was timed, else the phases; then tokens per second, memory and the profiler's overhead."""
    unprofiled = capture.unprofiled
    if unprofiled is None or not unprofiled.phases:
        return None
    named = [_STEP] if unprofiled.typical_ms(_STEP) else list(unprofiled.phases)
    times = ", ".join(f"{phase} {milliseconds(unprofiled.typical_ms(phase))}" for phase in named)
    tokens, peak = capture.tokens_per_second, unprofiled.peak_memory_bytes
    costs = [
        f"{phase} {signed_percent(cost)}" for phase in _GRID if (cost := capture.profiler_overhead(phase)) is not None
    ]
    parts = [
        times,
        *([f"{tokens:,.0f} tokens/s"] if tokens else []),
        *([f"peak memory {format_number(peak, 'bytes')}"] if peak else []),
    ]
    under = f"; the profiler's overhead: {', '.join(costs)}" if costs else ""
    short = f"{', '.join(parts)}{f'; profiler: {costs[-1]}' if costs else ''}"
    return Answer(capture.title, f"{', '.join(parts)}{under}.", short)


_TOKENS: Field[_Timed] = Field(
    "tokens/s", "count", lambda row: round(tokens) if (tokens := row[0].tokens_per_second) else None
)


def _grid(captures: list[CaptureSummary]) -> Table:
    """Every phase of each capture, its tokens per second and its memory."""
    rows = [(capture, capture.unprofiled) for capture in captures if capture.unprofiled]
    fields: list[Field[_Timed]] = [
        Field("capture", "text", lambda row: row[0].title),
        *map(_time_of, _GRID),
        *(() if len(captures) > FEW else (_TOKENS,)),
        Field("peak memory", "bytes", lambda row: row[1].peak_memory_bytes),
    ]
    return table(fields, rows, "Every phase, in ms:")


def _time_of(phase: str) -> Field[_Timed]:
    """The time of a phase; how a run ended stands in its place, and makes no column but the step's worth showing."""

    def fills(cell: Cell) -> bool:
        return cell is not None if phase == _STEP else isinstance(cell, (int, float))

    return Field(phase, "ms", lambda row: row[1].typical_ms(phase) or ended(row[1]), fills)


_SPREADS: tuple[Field[tuple[str, str, Stats]], ...] = (
    Field("capture", "text", lambda row: row[0]),
    Field("phase", "text", lambda row: row[1]),
    Field("n", "count", lambda row: row[2].n),
    Field("mean ms", "ms", lambda row: spread(row[2])),
    Field("median ms", "ms", lambda row: row[2].median),
    Field("min ms", "ms", lambda row: row[2].min),
    Field("max ms", "ms", lambda row: row[2].max),
)


def _spreads(captures: list[CaptureSummary]) -> Table:
    timed = [(capture.title, capture.unprofiled.phases) for capture in captures if capture.unprofiled]
    rows = [(title, phase, stats) for title, phases in timed for phase, stats in phases.items()]
    caption = "Each phase over its n measured steps, by Python's clock, mean ± deviation:"
    return table(_SPREADS, rows, caption, names=3)


def _conditions(captures: list[CaptureSummary]) -> Words:
    """What the times are of, from what the timings say of themselves."""
    said = [capture.unprofiled for capture in captures if capture.unprofiled]
    warmup = sorted({one.warmup_steps for one in said if one.warmup_steps is not None})
    steps = sorted({stats.n for one in said for stats in one.phases.values() if stats.n is not None})
    devices = sorted({one.device for one in said if one.device})
    known = [
        *([f"{_either(steps)} measured step{'' if steps == [1] else 's'}"] if steps else []),
        *([f"after {_either(warmup)} warm-up step{'' if warmup == [1] else 's'}"] if warmup else []),
        *([f"on {' and '.join(devices)}"] if devices else []),
    ]
    conditions = f": {' '.join(known)}" if known else ""
    return phrase(
        "Timed by the target with `time.perf_counter()` in a run of its own without the profiler{}; {}",
        conditions,
        _WHAT_TIMES_HOLD,
    )


def _either(numbers: list[int]) -> str:
    return " or ".join(str(number) for number in numbers) if len(numbers) < 4 else f"{numbers[0]} to {numbers[-1]}"
