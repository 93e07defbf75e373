"""What follows from all that is known of captures: findings, rates, shares, labels; filled once, at the end."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from msgspec import structs

from nsys_analyzer.analysis.findings.diagnosis import diagnose, why_missing
from nsys_analyzer.analysis.kernels.labels import short_labels
from nsys_analyzer.analysis.ranges.phases import STEP
from nsys_analyzer.analysis.steps.step import StepSummary, UnprofiledStep
from nsys_analyzer.analysis.summary.compared import leaders, matmul_share
from nsys_analyzer.analysis.summary.limits import limits_of
from nsys_analyzer.analysis.summary.summary import BusyShare, CaptureSummary, PhaseSummary, Unprofiled

#: An unprofiled time that is shorter than GPU busy by more than this was not of the same work.
_TOLERANCE = 0.02


def complete(captures: Sequence[CaptureSummary]) -> tuple[CaptureSummary, ...]:
    """The captures of a report with what follows from their times, ranks and manifests, and from each other."""
    labels = short_labels(sorted({row.name for one in captures if one.whole for row in one.whole.kernels}))
    labelled = [_labelled(replace(one, diagnosis=diagnose(one)), labels) for one in captures]
    return tuple(_complete(one, labelled) for one in labelled)


def _labelled(capture: CaptureSummary, labels: dict[str, str]) -> CaptureSummary:
    """The capture with a short label of each kernel, unique among the captures, and the busy shares of its phases."""

    def label(phase: PhaseSummary, busy: BusyShare | None = None) -> PhaseSummary:
        rows = tuple(structs.replace(row, label=labels[row.name]) for row in phase.kernels)
        return structs.replace(phase, kernels=rows, busy_share=busy)

    phases = tuple(label(phase, busy_share(capture, phase)) for phase in capture.phases)
    return replace(capture, phases=phases, whole=label(capture.whole) if capture.whole else None)


def _complete(capture: CaptureSummary, captures: Sequence[CaptureSummary]) -> CaptureSummary:
    diagnosis = capture.diagnosis
    return replace(
        capture,
        top_kernels=leaders(capture),
        matmul=matmul_share(capture, captures),
        limits=limits_of(capture),
        step=_step(capture, capture.step) if capture.step else None,
        findings=diagnosis.findings if diagnosis and not diagnosis.doubt else None,
        findings_missing=why_missing(capture),
        unprofiled=_unprofiled(capture, capture.unprofiled) if capture.unprofiled else None,
    )


def _step(capture: CaptureSummary, step: StepSummary) -> StepSummary:
    """The steps with their time without the profiler, as far as a replay or the program itself tells it."""
    found = capture.diagnosis
    if found is None:
        return step
    known = found.timed or not found.doubt
    times = UnprofiledStep(found.step_ms_low, found.step_ms_high, found.timed) if known else None
    return replace(step, unprofiled_ms=times, profiler_overhead_ms=found.overhead_ms)


def _unprofiled(capture: CaptureSummary, unprofiled: Unprofiled) -> Unprofiled:
    """The unprofiled times with what they say of a step's tokens and of the profiler."""
    step_ms, known = unprofiled.typical_ms(STEP), capture.configuration
    tokens = (known.batch_size or 0) * (known.context_length or 0) if known else 0
    overhead = {phase: capture.profiler_overhead(phase) for phase in unprofiled.phases}
    per_second = tokens / (step_ms / 1e3) if tokens and step_ms else None
    return replace(unprofiled, tokens_per_second=per_second, profiler_overhead=overhead)


def busy_share(capture: CaptureSummary, phase: PhaseSummary) -> BusyShare | None:
    """The share of one phase's time in which the GPU works; None on a CPU, and without a wall time that measures it.

    A profiler slows the CPU, not the kernels: GPU busy is taken from the trace, wall time from an unprofiled run.
    Without one, busy ÷ profiled wall is the lower bound, and busy ÷ (wall − the profiler's estimated cost) about the
    upper one.
    """
    busy, wall = phase.gpu_busy_ms.median, phase.wall_ms.median
    if capture.on_cpu or busy is None:
        return None
    unprofiled = capture.unprofiled.trusted_ms(phase.phase) if capture.unprofiled else None
    if unprofiled and busy <= unprofiled * (1 + _TOLERANCE):
        share = min(busy / unprofiled, 1.0)
        return BusyShare(busy, unprofiled, True, share, share)
    if not capture.is_timed(phase) or not wall:
        return None
    cost = phase.profiler_cost
    without = max(wall - cost.high_ms, busy) if cost and cost.high_ms is not None else busy
    low, high = min(busy / wall, 1.0), min(busy / without, 1.0) if without else 0.0
    return BusyShare(min(busy, wall), wall, False, low, high, cost)
