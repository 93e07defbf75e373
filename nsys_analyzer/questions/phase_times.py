"""(a) How long forward, backward and optimizer take, on five clocks."""

from __future__ import annotations

from nsys_analyzer.analysis.statistics import Stats
from nsys_analyzer.analysis.summary import CaptureSummary, PhaseSummary
from nsys_analyzer.questions.evidence import TRAINING_PHASES, Evidence, figures_of, nothing_measured, spread
from nsys_analyzer.report.model import Answer, Bars, Block, Column, Paragraph, Section, Table
from nsys_analyzer.report.units import milliseconds, percent

_CLOCKS = ("python", "wall", "GPU span", "GPU busy", "kernel sum")
_LEGEND = (
    "*python*: timed by the target around a synchronised phase, without the profiler (`--csv`); *wall*: the range's "
    "own duration under the profiler; *GPU span*: first start to last end of its GPU operations; *GPU busy*: the union "
    "of their intervals (kernels, copies, fills); *kernel sum*: the sum of kernel durations, above busy where "
    "kernels overlap. Mean ± standard deviation over n measured instances."
)
#: Busy ÷ wall above and below which a phase is called bound by the GPU or by launches.
_GPU_BOUND, _LAUNCH_BOUND = 0.9, 0.7
#: A phase below this share of the longest one has no bar that can be seen.
_VISIBLE = 0.01


def answer(evidence: Evidence) -> Section:
    """Times of every phase, whether launches or the GPU bound them, and what the profiler cost."""
    title = "(a) How long do forward, backward and optimizer take?"
    captures = [capture for capture in evidence.captures if any(p.instances for p in capture.phases)]
    if not captures:
        return Section("phase_times", title, (nothing_measured(), *_whole_blocks(evidence)))
    phases = [(capture, phase) for capture in captures for phase in capture.phases if phase.instances]
    # Without timings the python clock is a column of dashes: left out, the table fits a page.
    shown = slice(0 if any(phase.python_ms for _, phase in phases) else 1, None)
    columns = (Column("capture"), Column("phase"), Column("n", "count"))
    clocks = tuple(Column(f"{clock} ms", "ms") for clock in _CLOCKS[shown])
    rows = tuple(
        (capture.title, phase.phase, phase.instances, *(spread(clock) for clock in _clocks(phase)[shown]))
        for capture, phase in phases
    )
    blocks: tuple[Block, ...] = (
        *(_answer(capture, bool(evidence.timings)) for capture in captures),
        Table((*columns, *clocks), rows),
        Paragraph(_LEGEND),
        *figures_of(evidence, lambda capture: _figure(capture, evidence.figure_key(capture, "phase-times"))),
        *_whole_blocks(evidence),
    )
    return Section("phase_times", title, blocks, "time")


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
    times = "; ".join(
        f"{p.phase} takes {milliseconds(p.wall_ms.mean)} of wall time, GPU busy {milliseconds(p.gpu_busy_ms.mean)}"
        for p in phases
    )
    text = " ".join(part for part in (f"{times}.", _bound(phases), _overhead(capture, phases) if timed else "") if part)
    short = ", ".join(f"{p.phase} {_wall_and_busy(p)}" for p in phases)
    return Answer(capture.title, text, f"{short} (wall / GPU busy)")


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
        compared.append(("forward+backward", wall, capture.python_forward_backward_ms))
    costs = {name: wall / python.mean - 1 for name, wall, python in compared if wall and python and python.mean}
    if not costs and any(phase.python_ms for phase in phases):
        return "Nothing synchronises under the profiler, so the unprofiled timing has nothing to be compared with."
    if not costs:
        return "The CSV has no timing, or no single one, for this configuration."
    figures = ", ".join(f"{name} {'+' if cost >= 0 else '−'}{percent(abs(cost))}" for name, cost in costs.items())
    return f"Profiled wall time against the unprofiled timing: {figures}; {_reason(phases, max(costs.values()))}."


def _reason(phases: list[PhaseSummary], cost: float) -> str:
    if cost <= 0:
        return "no cost of tracing shows"
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
