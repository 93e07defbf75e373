"""(a) How long forward, backward and optimizer take, on five clocks."""

from __future__ import annotations

from nsys_analyzer.analysis.ranges.phases import STEP
from nsys_analyzer.analysis.summary.complete import TRAINING_PHASES
from nsys_analyzer.analysis.summary.statistics import Stats
from nsys_analyzer.analysis.summary.summary import CaptureSummary, PhaseSummary
from nsys_analyzer.report.evidence import NOTHING_MEASURED, Evidence, figures_of, spread, typical
from nsys_analyzer.report.model import Answer, Bars, Block, Cell, Listing, Paragraph, Section, Table
from nsys_analyzer.report.sections.overhead import overhead
from nsys_analyzer.report.sections.sweep import over_sweep
from nsys_analyzer.report.sections.verdicts import busy_of, how_costs_are_estimated, verdicts
from nsys_analyzer.report.tables import Field, table
from nsys_analyzer.report.units import milliseconds
from nsys_analyzer.text import Words, phrase

#: The clocks of a GPU, and those of a CPU.
_CLOCKS = (
    ("python", "wall", "GPU span", "GPU busy", "total kernel time"),
    ("python", "wall", "operator span", "operators busy", "total operator time"),
)
_LEGEND: tuple[Words, ...] = (
    phrase("*n*: measured instances; times are their median, with minimum and maximum in brackets."),
    phrase("*python*: the time of the phase in a run without the profiler (`--csv`), as the section above says."),
    phrase("*wall*: duration of the phase's range under the profiler."),
    phrase("*profiler's overhead*: wall ÷ python − 1."),
)
_LEGEND_OF_GPU: tuple[Words, ...] = (
    phrase("Where GPU work goes on after the range, the profiler's overhead is unknown."),
    phrase("*GPU span*: from the start of the phase's first GPU operation to the end of its last one."),
    phrase("*GPU busy*: the time in which at least one GPU operation (kernel, copy, fill) runs."),
    phrase("*total kernel time*: the sum of all kernel durations; more than GPU busy where kernels overlap."),
)
_LEGEND_OF_CPU: tuple[Words, ...] = (
    phrase("*operator span*: from the start of the phase's first operator to the end of its last one."),
    phrase("*operators busy*: the time in which operators compute on the CPU; the rest is Python's and PyTorch's own."),
    phrase("*total operator time*: the sum of the operators' times, each without the operators that it calls."),
)
#: A phase below this share of the longest one has no bar that can be seen.
_VISIBLE = 0.01


def answer(evidence: Evidence) -> Section:
    """Times of every phase, whether the GPU is busy in them or waits, and what the profiler cost."""
    captures = [capture for capture in evidence.captures if _shown(capture)]
    blocks: list[Block] = [*over_sweep(evidence, busy_of, "percent", "GPU busy share of the step", "gpu-busy")]
    for capture in captures:
        blocks += [_answer(capture, bool(evidence.timings)), *_tables(capture)]
    if captures:
        on_cpu, on_gpu = (any(capture.on_cpu is kind for capture in captures) for kind in (True, False))
        clocks = (*(_LEGEND_OF_GPU if on_gpu else ()), *(_LEGEND_OF_CPU if on_cpu else ()))
        blocks += [Listing((*_LEGEND, *clocks)), *map(Paragraph, how_costs_are_estimated(captures))]
    blocks += figures_of(evidence, _figure)
    title = "(a) How long do forward, backward and optimizer take?"
    return Section("phase_times", title, tuple(blocks) or (NOTHING_MEASURED,), "time")


def _shown(capture: CaptureSummary) -> list[PhaseSummary]:
    """The measured phases, and the whole capture where they do not answer for it."""
    whole = [capture.whole] if capture.whole and not capture.phases_suffice else []
    return [*(phase for phase in capture.phases if phase.instances), *whole]


def _tables(capture: CaptureSummary) -> tuple[Table, ...]:
    """Every phase on every clock that there is: in one table, or in two where all five clocks would not fit a page."""
    names = [f"{clock} ms" for clock in _CLOCKS[capture.on_cpu]]
    phases = _shown(capture)
    row: tuple[Field[PhaseSummary], ...] = (
        Field("phase", "text", lambda phase: phase.label),
        Field("n", "count", lambda phase: phase.instances),
    )
    wall: Field[PhaseSummary] = Field(names[1], "ms", lambda phase: _cell(phase.wall_ms))
    of_cpu: tuple[Field[PhaseSummary], ...] = (
        Field(names[0], "ms", lambda phase: _cell(phase.python_ms)),
        wall,
        Field("profiler's overhead", "percent", lambda phase: capture.profiler_overhead(phase.phase)),
        Field("GPU work after the range ms", "ms", lambda p: None if p.synchronized else typical(p.gpu_lag_ms)),
    )
    of_device: tuple[Field[PhaseSummary], ...] = (
        Field(names[2], "ms", lambda phase: _cell(phase.gpu_span_ms) if phase.gpu_ms else None),
        Field(names[3], "ms", lambda phase: _cell(phase.gpu_busy_ms) if phase.gpu_ms else None),
        Field(names[4], "ms", lambda phase: _cell(phase.kernel_time_ms) if phase.gpu_ms else None),
    )
    if all(phase.python_ms is None and phase.synchronized for phase in phases):
        return (table((*row, wall, *of_device), phases, "Each phase:", capture=capture.title, names=2),)
    operations = "Operators of each phase:" if capture.on_cpu else "GPU operations of each phase:"
    return (
        table((*row, *of_cpu), phases, "Each phase by the CPU's clock:", capture=capture.title, names=2),
        table((*row, *of_device), phases, operations, capture=capture.title, names=2),
    )


def _cell(stats: Stats | None) -> Cell:
    return typical(stats) or spread(stats)


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
    takes = f"{phase.label} takes {milliseconds(phase.wall_ms.typical)} of wall time"
    if phase.python_ms and phase.python_ms.mean is not None:
        without, profiled = milliseconds(phase.python_ms.typical), milliseconds(phase.wall_ms.typical)
        takes = f"{phase.label} takes {without} without the profiler, {profiled} of wall time under it"
    if not phase.gpu_ms:
        return f"{takes} and {'runs no operator' if on_cpu else 'puts no work on a GPU'}"
    busy = f"{'operators compute for' if on_cpu else 'GPU busy'} {milliseconds(phase.gpu_busy_ms.typical)}"
    if phase.wall_ms.mean is None:  # the whole capture, which has no range
        span = phase.gpu_span_ms.typical
        return f"the {phase.label}: {busy}{'' if span is None else f' in {milliseconds(span)}'}"
    late = "" if phase.synchronized else f" (its GPU work ends {_lag_in_words(phase)} after the range)"
    return f"{takes}, {busy}{late}"


def _lag_in_words(phase: PhaseSummary) -> str:
    """How long GPU work outlasts the range, at most: most instances may end in time."""
    several = phase.gpu_lag_ms.min != phase.gpu_lag_ms.max
    return f"{'up to ' if several else ''}{milliseconds(phase.gpu_lag_ms.max)}"


def _wall_and_busy(phase: PhaseSummary) -> str:
    wall, busy = milliseconds(phase.wall_ms.typical), milliseconds(phase.gpu_busy_ms.typical)
    if not phase.gpu_ms:
        return f"{wall} / no GPU work"
    if phase.wall_ms.median is None:
        return f"busy {busy}"
    late = "" if phase.synchronized else f", ending {_lag_in_words(phase)} after the range"
    return f"{wall} / {busy}{late}"


def _figure(capture: CaptureSummary) -> Bars:
    longest = max((phase.wall_ms.mean or 0.0 for phase in capture.phases), default=0.0)
    phases = [phase for phase in capture.phases if (phase.wall_ms.mean or 0.0) > longest * _VISIBLE]
    clocks = [(p.python_ms, p.wall_ms, p.gpu_span_ms, p.gpu_busy_ms, p.kernel_time_ms) for p in phases]
    medians = zip(*(tuple(one.median if one else None for one in of_phase) for of_phase in clocks), strict=True)
    series = zip(_CLOCKS[capture.on_cpu], medians, strict=False)
    return Bars(
        f"{capture.title}-phase-times",
        f"{capture.title}: time per phase by clock",
        tuple(phase.phase for phase in phases),
        tuple(one for one in series if any(value is not None for value in one[1])),
        "ms per instance",
        "nested",
        mark="python",
    )
