"""(a) How long forward, backward and optimizer take, on five clocks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from nsys_analyzer.analysis.statistics import Stats
from nsys_analyzer.analysis.summary import CaptureSummary, PhaseSummary
from nsys_analyzer.questions.evidence import (
    FEW,
    TRAINING_PHASES,
    Evidence,
    figures_of,
    kernel_word,
    nothing_measured,
    spread,
)
from nsys_analyzer.questions.overhead import overhead
from nsys_analyzer.report.model import Answer, Bars, Block, Cell, Column, Paragraph, Section, Table
from nsys_analyzer.report.units import milliseconds, percent

_CLOCKS = ("python", "wall", "GPU span", "GPU busy", "kernel sum")
_CLOCKS_ON_CPU = ("python", "wall", "operator span", "operators busy", "operator sum")
_LEGEND = (
    "*python*: timed by the target around a synchronised phase, without the profiler (`--csv`); *wall*: the range's "
    "own duration under the profiler; *GPU span*: first start to last end of its GPU operations; *GPU busy*: the union "
    "of their intervals (kernels, copies, fills); *kernel sum*: the sum of kernel durations, above busy where "
    "kernels overlap. Mean ± standard deviation over n measured instances, python's over those of its own run. "
    "*Profiler's overhead*: wall ÷ python − 1, a dash where GPU work outlasts the range, which then is no measure of "
    "the phase."
)
_LEGEND_OF_CPU = (
    "*python*: timed by the target around a phase, without the profiler (`--csv`); *wall*: the range's own duration "
    "under the profiler; *operator span*: first start to last end of its operators; *operators busy*: the union of "
    "their intervals, in which they compute on the CPU, the rest of the wall time being Python's and PyTorch's own; "
    "*operator sum*: the sum of their own times. Mean ± standard deviation over n measured instances, python's over "
    "those of its own run. *Profiler's overhead*: wall ÷ python − 1."
)
_LEGEND_ON_CPU = (
    " Of a capture without a GPU, *GPU busy* is the time in which operators compute on the CPU, and the rest of the "
    "wall time is Python's and PyTorch's own."
)
#: A row of the tables: what it is of, then its figures by their place.
_TEXTS = (Column("capture"), Column("phase"), Column("n", "count"))
_PYTHON, _WALL, _OVERHEAD = 3, 4, 5
_OF_DEVICE = (6, 7, 8)
#: Busy ÷ wall above and below which a phase is called bound by the GPU or by launches.
_GPU_BOUND, _LAUNCH_BOUND = 0.9, 0.7
#: A phase below this share of the longest one has no bar that can be seen.
_VISIBLE = 0.01


def answer(evidence: Evidence) -> Section:
    """Times of every phase, whether launches or the GPU bound them, and what the profiler cost."""
    title = "(a) How long do forward, backward and optimizer take?"
    captures = [capture for capture in evidence.captures if _profiled(capture) or _python_times(capture)]
    if not captures:
        return Section("phase_times", title, (nothing_measured(), *_whole_blocks(evidence)))
    profiled = [capture for capture in captures if _profiled(capture)]
    blocks: tuple[Block, ...] = (
        *(_answer(c, bool(evidence.timings)) if _profiled(c) else _python_answer(c) for c in captures),
        *((_grid(profiled),) if len(profiled) > FEW else ()),
        *_tables(captures),
        Paragraph(_legend(profiled)),
        *figures_of(evidence, lambda capture: _figure(capture, evidence.figure_key(capture, "phase-times"))),
        *_whole_blocks(evidence),
    )
    return Section("phase_times", title, blocks, "time")


def _legend(profiled: Sequence[CaptureSummary]) -> str:
    if kernel_word(*profiled) == "operator":
        return _LEGEND_OF_CPU
    return _LEGEND + (_LEGEND_ON_CPU if any(capture.on_cpu for capture in profiled) else "")


def _clock_names(captures: Sequence[CaptureSummary]) -> tuple[str, ...]:
    return _CLOCKS_ON_CPU if kernel_word(*captures) == "operator" else _CLOCKS


def _profiled(capture: CaptureSummary) -> bool:
    return any(phase.instances for phase in capture.phases)


def _tables(captures: Sequence[CaptureSummary]) -> tuple[Table, ...]:
    """Every phase on every clock that there is: in one table, or in two where all five clocks would not fit a page."""
    rows = [row for capture in captures for row in _rows(capture)]
    profiled = [capture for capture in captures if _profiled(capture)]
    python, wall, *of_device = (Column(f"{clock} ms", "ms") for clock in _clock_names(profiled))
    columns = (*_TEXTS, python, wall, Column("profiler's overhead", "percent"), *of_device)
    if not profiled:
        return (_table(columns, rows, (_PYTHON,)),)
    if any(row[_PYTHON] is not None for row in rows):
        host = replace(_table(columns, rows, (_PYTHON, _WALL, _OVERHEAD)), caption="Without and under the profiler:")
        return host, replace(_table(columns, rows, _OF_DEVICE), caption="What ran in that time:")
    return (_table(columns, rows, (_WALL, *_OF_DEVICE)),)


def _table(columns: tuple[Column, ...], rows: list[tuple[Cell, ...]], shown: tuple[int, ...]) -> Table:
    """The rows with these of their figures, where they have any."""
    kept = (*range(len(_TEXTS)), *shown)
    filled = [row for row in rows if any(row[i] for i in shown)]
    return Table(tuple(columns[i] for i in kept), tuple(tuple(row[i] for i in kept) for row in filled))


def _rows(capture: CaptureSummary) -> list[tuple[Cell, ...]]:
    """Capture, phase, n, python, wall, the profiler's overhead and the other clocks of each phase.

    Of a run without a trace Python's clock alone.
    """
    if not _profiled(capture):
        timed = _python_times(capture).items()
        return [(capture.title, phase, stats.n, spread(stats), *[None] * 5) for phase, stats in timed]
    rows: list[tuple[Cell, ...]] = []
    for phase in (phase for phase in capture.phases if phase.instances):
        python, wall, *of_device = (spread(clock) for clock in _clocks(phase))
        overhead = capture.profiler_overhead(phase.phase)
        rows.append((capture.title, phase.phase, phase.instances, python, wall, overhead, *of_device))
    return rows


def _grid(captures: Sequence[CaptureSummary]) -> Table:
    """One row for each capture: wall and GPU busy of the phases of a step."""
    columns = [Column("capture")]
    for name in TRAINING_PHASES:
        columns += [Column(f"{name} wall ms", "ms"), Column("busy ms", "ms")]
    rows = []
    for capture in captures:
        cells: list[Cell] = [capture.title]
        for name in TRAINING_PHASES:
            phase = capture.phase(name)
            cells += [phase.wall_ms.mean, phase.gpu_busy_ms.mean] if phase else [None, None]
        rows.append(tuple(cells))
    return Table(tuple(columns), tuple(rows))


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


def _busy_share(phase: PhaseSummary) -> float | None:
    """Busy ÷ wall, where the GPU's work lies inside the range."""
    if not phase.synchronized or not phase.wall_ms.mean or phase.gpu_busy_ms.mean is None:
        return None
    return phase.gpu_busy_ms.mean / phase.wall_ms.mean


def _answer(capture: CaptureSummary, timed: bool) -> Answer:
    phases = [p for name in TRAINING_PHASES if (p := capture.phase(name))]
    phases = phases or [p for p in capture.phases if p.instances]
    busy = "operators compute for" if capture.on_cpu else "GPU busy"
    times = "; ".join(
        f"{p.phase} takes {milliseconds(p.wall_ms.mean)} of wall time, {busy} {milliseconds(p.gpu_busy_ms.mean)}"
        for p in phases
    )
    bound = "" if capture.on_cpu else _bound(phases)
    text = " ".join(part for part in (f"{times}.", bound, overhead(capture, phases) if timed else "") if part)
    short = ", ".join(f"{p.phase} {_wall_and_busy(p)}" for p in phases)
    clocks = "wall / operators busy on the CPU" if capture.on_cpu else "wall / GPU busy"
    return Answer(capture.title, text, f"{short} ({clocks})")


def _wall_and_busy(phase: PhaseSummary) -> str:
    return f"{milliseconds(phase.wall_ms.mean)} / {milliseconds(phase.gpu_busy_ms.mean)}"


def _bound(phases: list[PhaseSummary]) -> str:
    """Whether each phase waits for the GPU or the GPU for launches."""
    words: dict[str, list[str]] = {}
    for phase in phases:
        share = _busy_share(phase)
        if share is None:
            verdict = "Not synchronised, GPU work goes on after the range, idle time is unknown"
        elif share >= _GPU_BOUND:
            verdict = "Bound by the GPU"
        elif share <= _LAUNCH_BOUND:
            verdict = "Launch-bound, the GPU waits for the CPU"
        else:
            verdict = "Between launch-bound and GPU-bound"
        words.setdefault(verdict, []).append(
            phase.phase
            if share is None
            else f"{phase.phase} ({percent(share)} busy, {milliseconds(phase.idle_ms)} idle)"
        )
    return " ".join(f"{verdict}: {', '.join(names)}." for verdict, names in words.items())


def _figure(capture: CaptureSummary, key: str) -> Bars:
    longest = max((phase.wall_ms.mean or 0.0 for phase in capture.phases), default=0.0)
    phases = [phase for phase in capture.phases if (phase.wall_ms.mean or 0.0) > longest * _VISIBLE]
    by_clock = zip(*(_clocks(phase) for phase in phases), strict=True)
    series = tuple(
        (name, tuple(stats.mean if stats else None for stats in clock))
        for name, clock in zip(_clock_names([capture]), by_clock, strict=True)
    )
    return Bars(
        key,
        f"{capture.title}: time per phase by clock",
        tuple(phase.phase for phase in phases),
        tuple(one for one in series if any(value is not None for value in one[1])),
        "ms per instance",
    )


def _whole_blocks(evidence: Evidence) -> tuple[Block, ...]:
    """GPU time of captures without phases: all that can be said of them."""
    bare = [c for c in evidence.measured if c.whole and not any(p.instances for p in c.phases)]
    if not bare:
        return ()
    columns = (Column("capture"), *(Column(f"{name} ms", "ms") for name in _clock_names(bare)[2:]))
    rows = tuple(
        (c.title, c.whole.gpu_span_ms.mean, c.whole.gpu_busy_ms.mean, c.whole.kernel_sum_ms.mean)
        for c in bare
        if c.whole
    )
    return (Table(columns, rows, "Times of whole captures, which have no measured phase:"),)
