"""(a) How long forward, backward and optimizer take, on the CPU's clock and on the GPU's."""

from __future__ import annotations

from collections.abc import Iterator

from nsys_analyzer.analysis.ranges.phases import STEP
from nsys_analyzer.analysis.summary.complete import TRAINING_PHASES, whole_beside
from nsys_analyzer.analysis.summary.statistics import Stats
from nsys_analyzer.analysis.summary.summary import CaptureSummary, PhaseSummary
from nsys_analyzer.report.evidence import typical
from nsys_analyzer.report.model import Answer, Bars, Block, Paragraph, Spread, Table
from nsys_analyzer.report.tables import Field, table
from nsys_analyzer.report.units import about_milliseconds, format_number, milliseconds
from nsys_analyzer.text import listed, phrase

#: The clocks of a GPU, and those of a CPU.
_CLOCKS = (
    ("unprofiled", "profiled", "GPU span", "GPU busy", "total kernel time"),
    ("unprofiled", "profiled", "operator span", "operators busy", "total operator time"),
)
#: How times without the profiler were taken.
_BY_OPTION = phrase("The time of a step without the profiler is what the call says (`--step-ms`).")
_BY_TARGET = (
    "Timed in a run of its own. The device is synchronised after each phase, so that a phase holds its GPU work."
)
_BY_HOOKS = (
    "Timed in a run of its own from outside, where nothing waits for the GPU inside a step: CUDA events time a phase's "
    "work, from the end of the work before it to its own end; on a CPU its own clock does."
)
#: A phase below this share of the longest one has no bar that can be seen.
_VISIBLE = 0.01


def measured(capture: CaptureSummary) -> list[PhaseSummary]:
    """The measured phases, and the whole capture where they do not answer for it."""
    whole = whole_beside(capture)
    return [*(phase for phase in capture.phases if phase.instances), *([whole] if whole else [])]


def question(capture: CaptureSummary) -> str:
    """The question, of the phases that there are."""
    named = [phase.phase for phase in measured(capture) if phase.phase in TRAINING_PHASES]
    if not named:
        return "How long do the phases take?"
    return f"How long {'does' if len(named) == 1 else 'do'} {listed(named)} take?"


def answer_times(capture: CaptureSummary) -> Iterator[Block]:
    """The time of each phase without the profiler and under it, and how long the GPU works in it."""
    phases = measured(capture)
    if not phases:
        return
    named = [phase for phase in phases if phase.phase in TRAINING_PHASES]
    yield Answer(_sentence(capture, named or phases), capture.title)
    yield _table(capture, phases)
    bars = _bars(capture)
    if bars.groups:
        yield bars


def _sentence(capture: CaptureSummary, phases: list[PhaseSummary]) -> str:
    """Each phase with its time and the work in it: "Under the profiler forward takes 10.2 ms (GPU busy 8.93 ms)"."""
    timed = all(phase.python_ms for phase in phases)
    said = ", ".join(_phase(capture, phase, timed=timed) for phase in phases)
    return f"{'Without' if timed else 'Under'} the profiler {said}."


def _phase(capture: CaptureSummary, phase: PhaseSummary, *, timed: bool) -> str:
    stats = phase.python_ms if timed else phase.wall_ms
    ms = stats.typical if stats else None
    busy = about_milliseconds(phase.gpu_busy_ms.typical or 0.0)
    works = "operators" if capture.on_cpu else "GPU busy"
    if ms is None:  # the whole capture, which has no range
        return f"the {phase.label} takes {busy} of {'operators' if capture.on_cpu else 'GPU work'}"
    takes = f"{phase.label} takes {about_milliseconds(ms)}"
    if not phase.gpu_ms:
        return f"{takes} (no work on the GPU)"
    if timed or phase.synchronized:
        return f"{takes} ({works} {busy})"
    return f"the range of {phase.label} lasts {about_milliseconds(ms)} and launches {busy} of work"


def _table(capture: CaptureSummary, phases: list[PhaseSummary]) -> Table:
    names = _CLOCKS[capture.on_cpu]
    fields: tuple[Field[PhaseSummary], ...] = (
        Field("phase", "text", lambda phase: phase.label),
        Field("n", "count", lambda phase: phase.instances),
        Field(f"{names[0]} ms", "ms", lambda phase: typical(phase.python_ms)),
        Field(f"{names[1]} ms", "ms", lambda phase: typical(phase.wall_ms)),
        Field(f"{names[2]} ms", "ms", lambda phase: typical(phase.gpu_span_ms) if phase.gpu_ms else None),
        Field(f"{names[3]} ms", "ms", lambda phase: typical(phase.gpu_busy_ms) if phase.gpu_ms else None),
        Field(f"{names[4]} ms", "ms", lambda phase: typical(phase.kernel_time_ms) if phase.gpu_ms else None),
        Field("profiler's overhead", "percent", lambda phase: capture.profiler_overhead(phase.phase)),
        Field("GPU busy share", "percent", lambda phase: phase.busy_share.low if phase.busy_share else None),
        Field("at most", "percent", lambda phase: phase.busy_share.high if phase.busy_share else None),
        Field("verdict", "text", lambda phase: phase.busy_share.verdict if phase.busy_share else None),
    )
    return table(fields, phases, capture=capture.title, names=2)


def _bars(capture: CaptureSummary) -> Bars:
    phases = [phase for phase in capture.phases if phase.phase != STEP or len(capture.phases) == 1]
    longest = max((phase.wall_ms.mean or 0.0 for phase in phases), default=0.0)
    phases = [phase for phase in phases if (phase.wall_ms.mean or 0.0) > longest * _VISIBLE]
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
        mark=_CLOCKS[0][0],
    )


def unprofiled_times(capture: CaptureSummary, *, by_option: bool) -> Iterator[Block]:
    """The times without the profiler, the rate and the memory of these runs, and how they were timed.

    ``by_option``: the call says the time of a step.
    """
    timed = capture.unprofiled
    if timed is None or not timed.phases:
        return
    fields: tuple[Field[tuple[str, Stats]], ...] = (
        Field("phase", "text", lambda row: row[0]),
        Field("n", "count", lambda row: row[1].n),
        Field("mean ms", "ms", lambda row: None if row[1].mean is None else Spread(row[1].mean, row[1].std)),
        Field("median ms (min – max)", "ms", lambda row: typical(row[1])),
    )
    yield table(fields, timed.phases.items(), capture=capture.title)
    said = [f"{timed.tokens_per_second:,.0f} tokens/s"] if timed.tokens_per_second else []
    said += [f"peak memory {format_number(timed.peak_memory_bytes, 'bytes')}"] if timed.peak_memory_bytes else []
    if said:
        yield Paragraph(f"{', '.join(said)}.", capture.title)
    if by_option:
        yield Paragraph(_BY_OPTION, capture.title)
        return
    hooks = capture.run.hooks_ms if capture.run else None
    took = "" if hooks is None else f" The hooks took {milliseconds(hooks)} of the CPU's time in a step."
    by_hooks = capture.run is not None and capture.run.timed_by == "hooks"
    yield Paragraph(f"{_BY_HOOKS}{took}" if by_hooks else _BY_TARGET, capture.title)
