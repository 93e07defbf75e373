"""Reports the time of each phase on the CPU's clock and on the GPU's clock."""

from __future__ import annotations

from collections.abc import Iterator

from nsys_analyzer.analysis.summary.complete import TRAINING_PHASES, find_whole_if_needed
from nsys_analyzer.analysis.summary.summary import CaptureSummary, PhaseSummary
from nsys_analyzer.report.evidence import make_median_cell, name_scope
from nsys_analyzer.report.model import Answer, Block, Field, Paragraph, make_table
from nsys_analyzer.report.units import format_ms, format_number

_TIMED_BY_TARGET = (
    "The phases were timed in a separate run. It synchronizes the device after each phase, so that the time of a phase "
    "includes its GPU work."
)
_TIMED_BY_HOOKS = (
    "Hooks timed the phases in a separate run, and did not wait for the GPU inside a step. CUDA events time a phase "
    "from the end of the preceding GPU work to the end of the phase's GPU work. On a CPU, the CPU's clock times the "
    "phase."
)
_STEP_OF_RECORDED_PROCESS = (
    "The length of a step was measured in the recorded process, before or after the recording. It need not be the sum "
    "of the phases, because two processes of one program may differ."
)


def answer_times(capture: CaptureSummary) -> Iterator[Block]:
    """Yields the time of each phase with and without the profiler, and the time during which the GPU works in it."""
    whole_capture = find_whole_if_needed(capture)
    phases = [*(phase for phase in capture.phases if phase.instances), *([whole_capture] if whole_capture else [])]
    if not phases:
        return
    main_phases = [phase for phase in phases if phase.phase in TRAINING_PHASES] or phases
    is_timed = all(phase.python_ms for phase in main_phases)
    sentences = [_describe_phase(capture, phase, timed=is_timed) for phase in main_phases]
    yield Answer(" ".join(sentences), capture.title)
    span, busy, kernel = ("operator", "operators", "operator") if capture.on_cpu else ("GPU", "GPU", "kernel")
    fields: tuple[Field[PhaseSummary], ...] = (
        Field("phase", "text", lambda phase: phase.label),
        Field("n", "count", lambda phase: phase.instances),
        Field("unprofiled ms", "ms", lambda phase: make_median_cell(phase.python_ms)),
        Field("profiled ms", "ms", lambda phase: make_median_cell(phase.wall_ms)),
        Field(f"{span} span ms", "ms", lambda phase: make_median_cell(phase.gpu_span_ms) if phase.gpu_ms else None),
        Field(f"{busy} busy ms", "ms", lambda phase: make_median_cell(phase.gpu_busy_ms) if phase.gpu_ms else None),
        Field(
            f"total {kernel} time ms",
            "ms",
            lambda phase: make_median_cell(phase.kernel_time_ms) if phase.gpu_ms else None,
        ),
        Field("profiler's overhead", "percent", lambda phase: capture.profiler_overhead(phase.phase)),
        Field("GPU busy share", "percent", lambda phase: phase.busy_share.low if phase.busy_share else None),
        Field("at most", "percent", lambda phase: phase.busy_share.high if phase.busy_share else None),
        Field("verdict", "text", lambda phase: phase.busy_share.verdict if phase.busy_share else None),
    )
    yield make_table(fields, phases, capture=capture.title, names=2)
    if unprofiled := capture.unprofiled:
        tokens, memory = unprofiled.tokens_per_second, unprofiled.peak_memory_bytes
        figures = [f"{tokens:,.0f} tokens/s"] if tokens else []
        figures += [f"peak memory {format_number(memory, 'bytes')}"] if memory else []
        sentences = [f"The run without the profiler has {' and '.join(figures)}."] if figures else []
        if any(times.n for times in unprofiled.phases.values()):  # times from --step-ms have no number of instances
            is_timed_by_hooks = capture.run and capture.run.timed_by == "hooks"
            sentences.append(_TIMED_BY_HOOKS if is_timed_by_hooks else _TIMED_BY_TARGET)
            sentences += [_STEP_OF_RECORDED_PROCESS] * unprofiled.step_in_recorded_process
        if sentences:
            yield Paragraph(" ".join(sentences), capture.title)


def _describe_phase(capture: CaptureSummary, phase: PhaseSummary, *, timed: bool) -> str:
    """Returns a sentence on a phase: "Under the profiler, forward takes 10.2 ms (the GPU is busy for 8.93 ms)."."""
    stats = phase.python_ms if timed else phase.wall_ms
    ms = stats.typical if stats else None
    busy = format_ms(phase.gpu_busy_ms.typical or 0.0)
    clock, name = "Without" if timed else "Under", name_scope(phase.label)
    if ms is None:  # the whole capture has no range and so no time
        text = f"{name} contains {busy} of {'operators' if capture.on_cpu else 'GPU work'}"
    elif not phase.gpu_ms:
        text = f"{name} takes {format_ms(ms)}, without GPU work"
    elif timed or phase.synchronized:
        text = f"{name} takes {format_ms(ms)} ({'operators run' if capture.on_cpu else 'the GPU is busy'} for {busy})"
    else:
        text = f"the range of {name} lasts {format_ms(ms)} and launches {busy} of GPU work"
    return f"{clock} the profiler, {text}."
