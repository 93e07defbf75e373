"""How long forward, backward and optimizer take, on the CPU's clock and on the GPU's."""

from __future__ import annotations

from collections.abc import Iterator

from nsys_analyzer.analysis.summary.complete import TRAINING_PHASES, whole_if_needed
from nsys_analyzer.analysis.summary.summary import CaptureSummary, PhaseSummary
from nsys_analyzer.report.evidence import typical
from nsys_analyzer.report.model import Answer, Block, Field, Paragraph, Table, make_table
from nsys_analyzer.report.units import format_ms, format_number

_BY_TARGET = (
    "Timed in a run of its own. The device is synchronised after each phase, so that a phase holds its GPU work."
)
_BY_HOOKS = (
    "Timed in a run of its own from outside, where nothing waits for the GPU inside a step: CUDA events time a phase's "
    "work, from the end of the work before it to its own end; on a CPU its own clock does."
)


def answer_times(capture: CaptureSummary) -> Iterator[Block]:
    """The time of each phase without the profiler and under it, and how long the GPU works in it."""
    whole = whole_if_needed(capture)
    phases = [*(phase for phase in capture.phases if phase.instances), *([whole] if whole else [])]
    if not phases:
        return
    named = [phase for phase in phases if phase.phase in TRAINING_PHASES] or phases
    timed = all(phase.python_ms for phase in named)
    times = ", ".join(_phase(capture, phase, timed=timed) for phase in named)
    yield Answer(f"{'Without' if timed else 'Under'} the profiler {times}.", capture.title)
    yield _table(capture, phases)
    if known := capture.unprofiled:
        rates = [f"{known.tokens_per_second:,.0f} tokens/s"] if known.tokens_per_second else []
        rates += [f"peak memory {format_number(known.peak_memory_bytes, 'bytes')}"] if known.peak_memory_bytes else []
        said = [f"Without the profiler: {', '.join(rates)}."] if rates else []
        if any(one.n for one in known.phases.values()):  # not by --step-ms
            said += [_BY_HOOKS if capture.run and capture.run.timed_by == "hooks" else _BY_TARGET]
        if said:
            yield Paragraph(" ".join(said), capture.title)


def _phase(capture: CaptureSummary, phase: PhaseSummary, *, timed: bool) -> str:
    """A phase with its time and the work in it: "forward takes 10.2 ms (GPU busy 8.93 ms)"."""
    stats = phase.python_ms if timed else phase.wall_ms
    ms = stats.typical if stats else None
    busy = format_ms(phase.gpu_busy_ms.typical or 0.0)
    works = "operators" if capture.on_cpu else "GPU busy"
    if ms is None:  # the whole capture, which has no range
        return f"the {phase.label} takes {busy} of {'operators' if capture.on_cpu else 'GPU work'}"
    takes = f"{phase.label} takes {format_ms(ms)}"
    if not phase.gpu_ms:
        return f"{takes} (no work on the GPU)"
    if timed or phase.synchronized:
        return f"{takes} ({works} {busy})"
    return f"the range of {phase.label} lasts {format_ms(ms)} and launches {busy} of work"


def _table(capture: CaptureSummary, phases: list[PhaseSummary]) -> Table:
    works = ("operator", "operators") if capture.on_cpu else ("GPU", "GPU")
    kernel = "operator" if capture.on_cpu else "kernel"
    fields: tuple[Field[PhaseSummary], ...] = (
        Field("phase", "text", lambda phase: phase.label),
        Field("n", "count", lambda phase: phase.instances),
        Field("unprofiled ms", "ms", lambda phase: typical(phase.python_ms)),
        Field("profiled ms", "ms", lambda phase: typical(phase.wall_ms)),
        Field(f"{works[0]} span ms", "ms", lambda phase: typical(phase.gpu_span_ms) if phase.gpu_ms else None),
        Field(f"{works[1]} busy ms", "ms", lambda phase: typical(phase.gpu_busy_ms) if phase.gpu_ms else None),
        Field(f"total {kernel} time ms", "ms", lambda phase: typical(phase.kernel_time_ms) if phase.gpu_ms else None),
        Field("profiler's overhead", "percent", lambda phase: capture.profiler_overhead(phase.phase)),
        Field("GPU busy share", "percent", lambda phase: phase.busy_share.low if phase.busy_share else None),
        Field("at most", "percent", lambda phase: phase.busy_share.high if phase.busy_share else None),
        Field("verdict", "text", lambda phase: phase.busy_share.verdict if phase.busy_share else None),
    )
    return make_table(fields, phases, capture=capture.title, names=2)
