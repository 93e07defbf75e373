"""(a) How long forward, backward and optimizer take, on five clocks."""

from __future__ import annotations

from collections.abc import Sequence

from nsys_analyzer.analysis.statistics import Stats
from nsys_analyzer.analysis.summary import CaptureSummary, PhaseSummary
from nsys_analyzer.questions.evidence import FEW, TRAINING_PHASES, Evidence, figures_of, nothing_measured, spread
from nsys_analyzer.report.model import Answer, Bars, Block, Cell, Column, Paragraph, Section, Table
from nsys_analyzer.report.units import milliseconds, percent

_CLOCKS = ("python", "wall", "GPU span", "GPU busy", "kernel sum")
_LEGEND = (
    "*python*: timed by the target around a synchronised phase, without the profiler (`--csv`); *wall*: the range's "
    "own duration under the profiler; *GPU span*: first start to last end of its GPU operations; *GPU busy*: the union "
    "of their intervals (kernels, copies, fills); *kernel sum*: the sum of kernel durations, above busy where "
    "kernels overlap. Mean ± standard deviation over n measured instances, python's over those of its own run."
)
_LEGEND_ON_CPU = (
    " Of a capture without a GPU, *GPU busy* is the time in which operators compute on the CPU, and the rest of the "
    "wall time is Python's and PyTorch's own."
)
#: Cells of a row before its clocks: capture, phase, n.
_TEXTS = 3
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
        Paragraph(_LEGEND + (_LEGEND_ON_CPU if any(capture.on_cpu for capture in profiled) else "")),
        *figures_of(evidence, lambda capture: _figure(capture, evidence.figure_key(capture, "phase-times"))),
        *_whole_blocks(evidence),
    )
    return Section("phase_times", title, blocks, "time")


def _profiled(capture: CaptureSummary) -> bool:
    return any(phase.instances for phase in capture.phases)


def _tables(captures: Sequence[CaptureSummary]) -> tuple[Table, ...]:
    """Every phase on every clock that there is: in one table, or in two where all five clocks would not fit a page."""
    rows = [row for capture in captures for row in _rows(capture)]
    if not any(_profiled(capture) for capture in captures):
        return (_table(rows, 0, 1),)
    timed = any(row[_TEXTS] is not None for row in rows)
    return (_table(rows, 0, 2), _table(rows, 2, len(_CLOCKS))) if timed else (_table(rows, 1, len(_CLOCKS)),)


def _table(rows: list[tuple[Cell, ...]], first: int, last: int) -> Table:
    """The rows on the clocks from ``first`` to before ``last``, where they have any."""
    columns = (Column("capture"), Column("phase"), Column("n", "count"))
    clocks = (Column(f"{clock} ms", "ms") for clock in _CLOCKS[first:last])
    shown = [(row[:_TEXTS], row[_TEXTS + first : _TEXTS + last]) for row in rows]
    return Table((*columns, *clocks), tuple((*texts, *cells) for texts, cells in shown if any(cells)))


def _rows(capture: CaptureSummary) -> list[tuple[Cell, ...]]:
    """Capture, phase, n and the five clocks of each phase; of a run without a trace Python's clock alone."""
    if not _profiled(capture):
        python = _python_times(capture).items()
        return [(capture.title, phase, stats.n, spread(stats), *[None] * (len(_CLOCKS) - 1)) for phase, stats in python]
    measured = [phase for phase in capture.phases if phase.instances]
    return [(capture.title, p.phase, p.instances, *(spread(clock) for clock in _clocks(p))) for p in measured]


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
    text = " ".join(part for part in (f"{times}.", bound, _overhead(capture, phases) if timed else "") if part)
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


def _overhead(capture: CaptureSummary, phases: list[PhaseSummary]) -> str:
    """Profiled against unprofiled time, and why they differ."""
    compared = [(phase.phase, phase.wall_ms.mean, phase.python_ms) for phase in phases if phase.synchronized]
    both = [capture.phase(name) for name in ("forward", "loss", "backward")]
    wall = sum(phase.wall_ms.mean or 0.0 for phase in both if phase)
    if both[-1] and both[-1].synchronized:
        compared.append(("forward+backward", wall, _python_times(capture).get("forward+backward")))
    costs = {name: wall / python.mean - 1 for name, wall, python in compared if wall and python and python.mean}
    if not costs and any(phase.python_ms for phase in phases):
        return "Nothing synchronises under the profiler, so the unprofiled timing has nothing to be compared with."
    if not costs:
        return "The CSV has no timing, or no single one, for this configuration."
    figures = ", ".join(f"{name} {'+' if cost >= 0 else '−'}{percent(abs(cost))}" for name, cost in costs.items())
    reason = _reason(capture, phases, max(costs.values()))
    return f"Profiled wall time against the unprofiled timing: {figures}; {reason}."


def _reason(capture: CaptureSummary, phases: list[PhaseSummary], cost: float) -> str:
    if cost <= 0:
        return "no cost of tracing shows"
    if capture.on_cpu:
        return "tracing adds a cost to every operator"
    waiting = [p.phase for p in phases if (share := _busy_share(p)) is not None and share <= _LAUNCH_BOUND]
    if waiting:
        return f"tracing adds a cost to every launch, and {', '.join(waiting)} wait for launches, so it shows in full"
    return "the GPU's work hides most of what tracing adds to each launch"


def _figure(capture: CaptureSummary, key: str) -> Bars:
    longest = max((phase.wall_ms.mean or 0.0 for phase in capture.phases), default=0.0)
    phases = [phase for phase in capture.phases if (phase.wall_ms.mean or 0.0) > longest * _VISIBLE]
    by_clock = zip(*(_clocks(phase) for phase in phases), strict=True)
    series = tuple(
        (name, tuple(stats.mean if stats else None for stats in clock))
        for name, clock in zip(_CLOCKS, by_clock, strict=True)
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
    columns = (Column("capture"), *(Column(f"{name} ms", "ms") for name in _CLOCKS[2:]))
    rows = tuple(
        (c.title, c.whole.gpu_span_ms.mean, c.whole.gpu_busy_ms.mean, c.whole.kernel_sum_ms.mean)
        for c in bare
        if c.whole
    )
    return (Table(columns, rows, "GPU time of whole captures, which have no measured phase:"),)
