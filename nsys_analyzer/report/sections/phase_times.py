"""(a) How long forward, backward and optimizer take, on five clocks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from nsys_analyzer.analysis.ranges.phases import STEP
from nsys_analyzer.analysis.summary.compared import TRAINING_PHASES
from nsys_analyzer.analysis.summary.statistics import Stats
from nsys_analyzer.analysis.summary.summary import CaptureSummary, PhaseSummary
from nsys_analyzer.report.model import Answer, Bars, Block, Cell, Paragraph, Section, Table
from nsys_analyzer.report.sections.evidence import (
    FEW,
    Evidence,
    figures_of,
    kernel_word,
    nothing_measured,
    spread,
    typical,
)
from nsys_analyzer.report.sections.overhead import overhead
from nsys_analyzer.report.sections.pivots import pivots
from nsys_analyzer.report.sections.verdicts import busy_of, how_costs_are_estimated, verdicts
from nsys_analyzer.report.tables import Field, table
from nsys_analyzer.report.units import milliseconds, typical_milliseconds
from nsys_analyzer.text import Words, joined, phrase

_CLOCKS = ("python", "wall", "GPU span", "GPU busy", "total kernel time")
_CLOCKS_ON_CPU = ("python", "wall", "operator span", "operators busy", "total operator time")
_LEGEND = phrase(
    "*python*: timed by the target around a synchronised phase, without the profiler (`--csv`); *wall*: the range's "
    "own duration under the profiler; *GPU span*: first start to last end of its GPU operations; *GPU busy*: the union "
    "of their intervals (kernels, copies, fills); *total kernel time*: the sum of kernel durations, above busy where "
    "kernels overlap. The median over n measured instances, and from the least to the most in brackets, python's over "
    "those of its own run, *GPU work after the range*: for how long it goes on when the range has ended. "
    "*Profiler's overhead*: wall ÷ python − 1, a dash where GPU work outlasts the range, which then is no measure of "
    "the phase."
)
_LEGEND_OF_CPU = phrase(
    "*python*: timed by the target around a phase, without the profiler (`--csv`); *wall*: the range's own duration "
    "under the profiler; *operator span*: first start to last end of its operators; *operators busy*: the union of "
    "their intervals, in which they compute on the CPU, the rest of the wall time being Python's and PyTorch's own; "
    "*total operator time*: the sum of their own times. The median over n measured instances, and from the least to "
    "the most in brackets, python's over those of its own run. *Profiler's overhead*: wall ÷ python − 1."
)
_LEGEND_ON_CPU = phrase(
    " Of a capture without a GPU, *GPU busy* is the time in which operators compute on the CPU, and the rest of the "
    "wall time is Python's and PyTorch's own."
)
#: A phase below this share of the longest one has no bar that can be seen.
_VISIBLE = 0.01


def answer(evidence: Evidence) -> Section:
    """Times of every phase, whether the GPU is busy in them or waits, and what the profiler cost."""
    title = "(a) How long do forward, backward and optimizer take?"
    captures = [capture for capture in evidence.captures if _profiled(capture) or _python_times(capture)]
    if not captures:
        return Section("phase_times", title, (nothing_measured(),))
    profiled = [capture for capture in captures if _profiled(capture)]
    blocks: tuple[Block, ...] = (
        *(_answer(c, bool(evidence.timings)) if _profiled(c) else _python_answer(c) for c in captures),
        *(pivots(profiled, busy_of, "percent", "GPU busy share of the step") if len(captures) > FEW else ()),
        *((_grid(profiled),) if len(profiled) > FEW else ()),
        *_tables(captures),
        Paragraph(joined(" ", (_legend(profiled), *how_costs_are_estimated(profiled)))),
        *figures_of(evidence, lambda capture: _figure(capture, evidence.figure_key(capture, "phase-times"))),
    )
    return Section("phase_times", title, blocks, "time")


def _legend(profiled: Sequence[CaptureSummary]) -> Words:
    if kernel_word(*profiled) == "operator":
        return _LEGEND_OF_CPU
    return _LEGEND + (_LEGEND_ON_CPU if any(capture.on_cpu for capture in profiled) else "")


def _clock_names(captures: Sequence[CaptureSummary]) -> tuple[str, ...]:
    return _CLOCKS_ON_CPU if kernel_word(*captures) == "operator" else _CLOCKS


def _profiled(capture: CaptureSummary) -> bool:
    return bool(_shown(capture))


def _shown(capture: CaptureSummary) -> list[PhaseSummary]:
    """The measured phases, and the whole capture where they do not answer for it."""
    whole = [capture.whole] if capture.whole and not capture.phases_suffice else []
    return [*(phase for phase in capture.phases if phase.instances), *whole]


@dataclass(frozen=True)
class _Times:
    """A phase on every clock that there is, ms; ``overhead`` is the profiler's, a share of the unprofiled time."""

    capture: str
    phase: str
    instances: int | None
    python: Cell = None
    wall: Cell = None
    overhead: float | None = None
    span: Cell = None
    busy: Cell = None
    kernel_sum: Cell = None
    late: Cell = None


_ROW: tuple[Field[_Times], ...] = (
    Field("capture", "text", lambda row: row.capture),
    Field("phase", "text", lambda row: row.phase),
    Field("n", "count", lambda row: row.instances),
)


def _tables(captures: Sequence[CaptureSummary]) -> tuple[Table, ...]:
    """Every phase on every clock that there is: in one table, or in two where all five clocks would not fit a page."""
    rows = [row for capture in captures for row in _rows(capture)]
    profiled = [capture for capture in captures if _profiled(capture)]
    names = [f"{clock} ms" for clock in _clock_names(profiled)]
    python: Field[_Times] = Field(names[0], "ms", lambda row: row.python)
    wall: Field[_Times] = Field(names[1], "ms", lambda row: row.wall)
    overhead: Field[_Times] = Field("profiler's overhead", "percent", lambda row: row.overhead)
    late: Field[_Times] = Field("GPU work after the range ms", "ms", lambda row: row.late)
    of_device: tuple[Field[_Times], ...] = (
        Field(names[2], "ms", lambda row: row.span),
        Field(names[3], "ms", lambda row: row.busy),
        Field(names[4], "ms", lambda row: row.kernel_sum),
    )
    if not profiled:
        return (table((*_ROW, python), rows, names=len(_ROW)),)
    timed = any(row.python is not None for row in rows)
    if not timed and all(row.late is None for row in rows):
        return (table((*_ROW, wall, *of_device), rows, names=len(_ROW)),)
    caption = "Without and under the profiler:" if timed else "On the CPU's clock:"
    return (
        table((*_ROW, python, wall, overhead, late), rows, caption, names=len(_ROW)),
        table((*_ROW, *of_device), rows, "What ran in that time:", names=len(_ROW)),
    )


def _rows(capture: CaptureSummary) -> list[_Times]:
    """Each phase; of a run without a trace on Python's clock alone."""
    if not _profiled(capture):
        timed = _python_times(capture).items()
        return [_Times(capture.title, phase, stats.n, spread(stats)) for phase, stats in timed]
    return [_times_of(capture, phase) for phase in _shown(capture)]


def _times_of(capture: CaptureSummary, phase: PhaseSummary) -> _Times:
    python, wall, *of_device = (typical(clock) or spread(clock) for clock in _clocks(phase))
    span, busy, kernel_sum = of_device if phase.gpu_ms else (None, None, None)
    late = None if phase.synchronized else typical(phase.gpu_lag_ms)
    overhead = capture.profiler_overhead(phase.phase)
    return _Times(capture.title, phase.label, phase.instances, python, wall, overhead, span, busy, kernel_sum, late)


def _grid(captures: Sequence[CaptureSummary]) -> Table:
    """One row for each capture: wall and GPU busy of the phases of a step."""
    capture: Field[CaptureSummary] = Field("capture", "text", lambda c: c.title)
    return table((capture, *(field for phase in TRAINING_PHASES for field in _wall_and_busy_of(phase))), captures)


def _wall_and_busy_of(name: str) -> tuple[Field[CaptureSummary], ...]:
    return (
        Field(f"{name} wall ms", "ms", lambda c: phase.wall_ms.median if (phase := c.phase(name)) else None),
        Field("busy ms", "ms", lambda c: phase.gpu_busy_ms.median if (phase := c.phase(name)) else None),
    )


def _python_times(capture: CaptureSummary) -> dict[str, Stats]:
    return capture.unprofiled.phases if capture.unprofiled else {}


def _python_answer(capture: CaptureSummary) -> Answer:
    """What Python's clock alone says, where no trace tells the other clocks."""
    times = _python_times(capture)
    said = [f"{phase} {milliseconds(stats.mean)}" for phase, stats in times.items()]
    text = f"{', '.join(said)} by Python's clock; without a trace nothing says where that time goes."
    return Answer(capture.title, text, f"{', '.join(said)} (Python's clock, not profiled)")


def _clocks(phase: PhaseSummary) -> tuple[Stats | None, ...]:
    """The five clocks in the order of ``_CLOCKS``."""
    return (phase.python_ms, phase.wall_ms, phase.gpu_span_ms, phase.gpu_busy_ms, phase.kernel_sum_ms)


def _answer(capture: CaptureSummary, timed: bool) -> Answer:
    named = TRAINING_PHASES if capture.phases_suffice else (*TRAINING_PHASES, STEP)
    found = [p for p in _shown(capture) if p.phase in named or p is capture.whole]
    shown = found if any(p.phase in TRAINING_PHASES for p in found) else _shown(capture)
    ranges = [p for p in shown if p is not capture.whole]
    times = "; ".join(_times(p, capture.on_cpu) for p in shown)
    step = capture.phase(STEP)
    # Where the step alone was timed without the profiler, it is what a verdict and the overhead rest on.
    judged = [*ranges, step] if step and step.python_ms and not any(p.python_ms for p in ranges) else ranges
    bound = verdicts(capture, [p for p in judged if p.gpu_ms])
    text = " ".join(part for part in (f"{times}.", bound, overhead(capture, judged) if timed else "") if part)
    short = ", ".join(f"{p.phase} {_wall_and_busy(p)}" for p in shown)
    clocks = "wall / operators busy on the CPU" if capture.on_cpu else "wall / GPU busy"
    clocks += "; inferred phases" if any(p.inferred and p.phase != STEP for p in ranges) else ""
    return Answer(capture.title, text, f"{short} ({clocks})")


def _times(phase: PhaseSummary, on_cpu: bool) -> str:
    """Wall time and busy time of a phase, and how long its GPU work outlasts it, in a sentence's part."""
    if not phase.gpu_ms:
        none = "runs no operator" if on_cpu else "puts no work on a GPU"
        return f"{phase.label} takes {_milliseconds(phase.wall_ms)} of wall time and {none}"
    busy = f"{'operators compute for' if on_cpu else 'GPU busy'} {_milliseconds(phase.gpu_busy_ms)}"
    if phase.wall_ms.mean is None:  # the whole capture, which has no range
        within = typical(phase.gpu_span_ms)
        return f"the {phase.label}: {busy}{f' in {typical_milliseconds(within)}' if within else ''}"
    late = "" if phase.synchronized else f" (its GPU work ends {_lag_in_words(phase)} after the range)"
    return f"{phase.label} takes {_milliseconds(phase.wall_ms)} of wall time, {busy}{late}"


def _lag_in_words(phase: PhaseSummary) -> str:
    """How long GPU work outlasts the range, at most: most instances may end in time."""
    several = phase.gpu_lag_ms.min != phase.gpu_lag_ms.max
    return f"{'up to ' if several else ''}{milliseconds(phase.gpu_lag_ms.max)}"


def _milliseconds(stats: Stats) -> str:
    return typical_milliseconds(typical(stats))


def _wall_and_busy(phase: PhaseSummary) -> str:
    wall, busy = (typical_milliseconds(typical(clock), spread=False) for clock in (phase.wall_ms, phase.gpu_busy_ms))
    if not phase.gpu_ms:
        return f"{wall} / no GPU work"
    if phase.wall_ms.median is None:
        return f"busy {busy}"
    late = "" if phase.synchronized else f", ending {_lag_in_words(phase)} after the range"
    return f"{wall} / {busy}{late}"


def _figure(capture: CaptureSummary, key: str) -> Bars:
    longest = max((phase.wall_ms.mean or 0.0 for phase in capture.phases), default=0.0)
    phases = [phase for phase in capture.phases if (phase.wall_ms.mean or 0.0) > longest * _VISIBLE]
    series = (
        (name, tuple(stats.median if stats else None for stats in (_clocks(phase)[i] for phase in phases)))
        for i, name in enumerate(_clock_names([capture]))
    )
    return Bars(
        key,
        f"{capture.title}: time per phase by clock",
        tuple(phase.phase for phase in phases),
        tuple(one for one in series if any(value is not None for value in one[1])),
        "ms per instance",
        "nested",
        mark=_CLOCKS[0],
    )
