"""What follows from all that is known of captures: findings, rates, shares, labels; filled once, at the end."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

from msgspec import structs

from nsys_analyzer.analysis.findings.diagnosis import diagnose, why_missing
from nsys_analyzer.analysis.kernels.class_rules import COMMUNICATION
from nsys_analyzer.analysis.kernels.labels import make_short_labels
from nsys_analyzer.analysis.ranges.phases import LEAF_PHASES, OTHER_STEP, STEP, find_module_role
from nsys_analyzer.analysis.steps.serving import Serving
from nsys_analyzer.analysis.steps.step import StepSummary, UnprofiledStep
from nsys_analyzer.analysis.summary.limits import TOLERANCE, limits_of
from nsys_analyzer.analysis.summary.modules import with_flops
from nsys_analyzer.analysis.summary.statistics import (
    ClassShares,
    KernelRow,
    Leader,
    MatmulShare,
    class_rows,
    merge_kernels,
)
from nsys_analyzer.analysis.summary.summary import BusyShare, CaptureSummary, Limits, PhaseSummary, Unprofiled
from nsys_analyzer.analysis.transformer.attention import FORWARD, AttentionSummary
from nsys_analyzer.analysis.transformer.costs import ELEMENT_BYTES, cached_bytes, read_weights_bytes
from nsys_analyzer.analysis.transformer.peaks import find_memory_bandwidth
from nsys_analyzer.configuration import CountedFlops
from nsys_analyzer.trace.phase_names import MODULE_RANGE_PREFIX
from nsys_analyzer.trace.schema import MS_PER_S

#: An unprofiled time that is shorter than GPU busy by more than this was not of the same work.
_TOLERANCE = 0.02
#: Steps that hold more of the kernels' time than this stand for the whole capture.
_NEARLY_ALL = 0.9


def complete(captures: Sequence[CaptureSummary]) -> tuple[CaptureSummary, ...]:
    """The captures of a report with what follows from their times, ranks and manifests, and from each other."""
    labels = make_short_labels(sorted({row.name for one in captures if one.whole for row in one.whole.kernels}))
    diagnosed = (replace(one, diagnosis=diagnose(one)) for one in map(_of_one_step, captures))
    labelled = [_labelled(replace(one, step=_step(one, one.step) if one.step else None), labels) for one in diagnosed]
    return tuple(
        replace(
            one,
            top_kernels=leaders(one),
            matmul=matmul_share(one, labelled),
            limits=(limits := limits_of(one)),
            attention=_possible(one.attention, limits),
            serving=_serving(one, one.serving) if one.serving else None,
            findings=(one.diagnosis.findings or (None if one.diagnosis.doubt else ())) if one.diagnosis else None,
            findings_missing=why_missing(one),
            unprofiled=_unprofiled(one, one.unprofiled) if one.unprofiled else None,
        )
        for one in labelled
    )


def _possible(attention: AttentionSummary | None, limits: Limits | None) -> AttentionSummary | None:
    """Returns attention without the rates above the GPU's peak, whose kernels skip the FLOPs that a mask hides."""
    peak = (limits.peak_flops or limits.best_peak_flops) if limits else None
    if attention is None or peak is None:
        return attention
    rates = ("softmax_flops_per_s", "matmul_flops_per_s", "fused_flops_per_s")
    possible = replace(attention)
    vars(possible).update({name: None for name in rates if (getattr(attention, name) or 0) > peak * (1 + TOLERANCE)})
    return possible


def _of_one_step(capture: CaptureSummary) -> CaptureSummary:
    """The capture without the time that hooks took of a whole generation, where its steps are those of one token."""
    timed = capture.unprofiled
    if timed is None or not capture.times_calls:
        return capture
    return replace(capture, unprofiled=replace(timed, phases={k: v for k, v in timed.phases.items() if k != STEP}))


def _labelled(capture: CaptureSummary, labels: dict[str, str]) -> CaptureSummary:
    """The capture with a short label of each kernel, unique among the captures, and the busy shares of its phases."""

    def label(phase: PhaseSummary, busy: BusyShare | None = None) -> PhaseSummary:
        rows = tuple(structs.replace(row, label=labels[row.name]) for row in phase.kernels)
        return structs.replace(phase, kernels=rows, busy_share=busy)

    phases = tuple(label(phase, busy_share(capture, phase)) for phase in capture.phases)
    return replace(capture, phases=phases, whole=label(capture.whole) if capture.whole else None)


def _step(capture: CaptureSummary, step: StepSummary) -> StepSummary:
    """The steps with their time without the profiler, as far as a replay or the program itself tells it."""
    diagnosis, timed_ms = capture.diagnosis, capture.unprofiled.trusted_ms(STEP) if capture.unprofiled else None
    if diagnosis is None:
        step = replace(step, unprofiled_ms=UnprofiledStep(timed_ms, timed_ms, True) if timed_ms else None)
    else:
        is_known = diagnosis.is_timed or not diagnosis.doubt
        times = UnprofiledStep(diagnosis.step_ms_low, diagnosis.step_ms_high, diagnosis.is_timed) if is_known else None
        path = () if diagnosis.doubt else step.critical_path
        step = replace(
            step, unprofiled_ms=times, profiler_overhead_ms=diagnosis.profiler_overhead_ms, critical_path=path
        )
    return replace(step, busy_share=working_share(replace(capture, step=step)))


def working_share(capture: CaptureSummary) -> float | None:
    """Returns the GPU's work, or on a CPU the operators', as a share of the step's reported length."""
    step = capture.step
    if step is None or not step.total_ms:
        return None
    if capture.on_cpu:  # the profiler makes operators longer, too
        return step.compute_ms / step.total_ms
    length, works = step.said_ms if step.unprofiled_ms else step.total_ms, step.total_ms - step.idle_ms
    if works > length:  # then collectives waited for ranks that the profiler slowed down
        works -= step.exposed_communication_ms
    return min(works / length, 1.0) if length else None


def _serving(capture: CaptureSummary, serving: Serving) -> Serving:
    """The serving with what decoding reads at the least, by the model itself or else by its dimensions.

    By these weights have the precision of most of the matmul time.
    """
    run, peak = capture.run, find_memory_bandwidth(capture.device)
    if run and run.weights_bytes:
        return serving.with_least(run.weights_bytes, run.cache_bytes, peak, counted=True)
    precision = max(capture.precisions, key=lambda name: capture.precisions[name], default="unknown")
    model = capture.configuration.model if capture.configuration else None
    element = ELEMENT_BYTES.get(precision)
    if model is None or element is None:
        return serving
    return serving.with_least(read_weights_bytes(model, element), cached_bytes(model, 1, element), peak, counted=False)


def _unprofiled(capture: CaptureSummary, unprofiled: Unprofiled) -> Unprofiled:
    """The unprofiled times with what they say of a step's tokens and of the profiler."""
    step_ms, known = unprofiled.typical_ms(STEP), capture.configuration
    tokens = (known.batch_size or 0) * (known.context_length or 0) if known else 0
    per_second = tokens / (step_ms / MS_PER_S) if tokens and step_ms else None
    overhead = {phase: capture.profiler_overhead(phase) for phase in unprofiled.phases}
    return replace(unprofiled, tokens_per_second=per_second, profiler_overhead=overhead)


def busy_share(capture: CaptureSummary, phase: PhaseSummary) -> BusyShare | None:
    """The share of one phase's time in which the GPU works; None on a CPU, and without a wall time that measures it.

    The step's share is the one that is reported with its length. A profiler slows the CPU, not the kernels: GPU busy is
    taken from the trace, wall time from an unprofiled run. Without one, busy ÷ profiled wall is the lower bound, and
    busy ÷ (wall − the profiler's estimated cost) about the upper one.
    """
    busy, wall = phase.gpu_busy_ms.median, phase.wall_ms.median
    if capture.on_cpu or busy is None:
        return None
    if phase.phase == STEP and (step := capture.step) and (share := step.busy_share) is not None:
        times, works = step.unprofiled_ms, step.total_ms - step.idle_ms
        ends = (works / times.high, min(works / times.low, 1.0)) if times and times.low and not times.timed else None
        return BusyShare(works, step.said_ms, times is not None and times.timed, share, share, ends)
    unprofiled = capture.unprofiled.trusted_ms(phase.phase) if capture.unprofiled else None
    if unprofiled and busy <= unprofiled * (1 + _TOLERANCE):
        share = min(busy / unprofiled, 1.0)
        return BusyShare(busy, unprofiled, True, share, share)
    if not phase.synchronized or not wall:
        return None
    cost = phase.profiler_cost
    without = max(wall - cost.high_ms, busy) if cost else busy
    low, high = min(busy / wall, 1.0), min(busy / without, 1.0) if without else 0.0
    return BusyShare(min(busy, wall), wall, False, low, high)


#: The phases that tables compare, and the step that holds them.
TRAINING_PHASES = ("forward", "backward", "optimizer")
BOTH = "forward+backward"


def compared_phases(capture: CaptureSummary) -> tuple[PhaseSummary, ...]:
    """Forward, backward, optimizer and the user's own phases, then step and whole capture where these do not suffice.

    A phase with an opaque graph is none of them: shares of the kernels that are seen would mislead.
    """
    seen = [phase for phase in capture.phases if phase.instances and phase.kernels and not phase.opaque]
    parts = tuple(phase for phase in seen if phase.phase not in ("loss", STEP, OTHER_STEP))
    if parts and capture.phases_suffice:
        return parts
    steps = tuple(phase for phase in seen if phase.phase == STEP)
    whole, opaque = whole_beside(capture), any(phase.opaque for phase in capture.phases)
    return (*parts, *steps, *((whole,) if whole and whole.kernels and not whole.opaque and not opaque else ()))


def whole_beside(capture: CaptureSummary) -> PhaseSummary | None:
    """The whole capture, where neither its phases nor its steps stand for it."""
    whole, step = capture.whole, capture.phase(STEP)
    if whole is None or capture.phases_suffice:
        return None
    in_steps = (step.kernel_time_ms.mean or 0.0) * step.instances if step else 0.0
    return whole if in_steps <= _NEARLY_ALL * (whole.kernel_time_ms.mean or 0.0) else None


def parts_and_enclosing(capture: CaptureSummary) -> tuple[tuple[PhaseSummary, ...], tuple[PhaseSummary, ...]]:
    """The compared phases in two: those that enclose no other one, then the step and the whole capture."""
    compared = compared_phases(capture)
    enclosing = tuple(phase for phase in compared if phase.phase == STEP or phase is capture.whole)
    return tuple(phase for phase in compared if phase not in enclosing), enclosing


def leaders(capture: CaptureSummary) -> tuple[Leader, ...]:
    """The leaders of forward, backward and both, or of whatever else there is, then of the step and the whole."""
    parts, enclosing = parts_and_enclosing(capture)
    passes = [phase for name in ("forward", "backward") for phase in parts if phase.phase == name]
    both = merge_kernels(*(phase.kernels for phase in passes)) if len(passes) == 2 else ()
    return (
        *(_leader(phase.phase, phase.kernels) for phase in passes or parts[:1]),
        *([_leader(BOTH, both)] if both else []),
        *(_leader(phase.phase, phase.kernels) for phase in enclosing),
    )


def _leader(scope: str, kernels: tuple[KernelRow, ...]) -> Leader:
    leading = next((row for row in kernels if row.kernel_class != COMMUNICATION), kernels[0])
    return Leader(scope, leading)


def matmul_share(capture: CaptureSummary, captures: Iterable[CaptureSummary]) -> MatmulShare:
    """Matmul's share in each phase, in a step, and in inference: that of a forward-only capture of the report first."""
    candidates = [other for other in captures if capture.whole and _is_its_inference(capture, other)]
    forwards = ((one, phase) for one in (*candidates, capture) if (phase := one.phase("forward")) and phase.kernels)
    source, forward = next(forwards, (capture, None))
    return MatmulShare(
        tuple(_shares(phase) for phase in compared_phases(capture)),
        _step_shares(capture),
        _shares(forward) if forward else None,
        None if source is capture else source.title,
    )


def _shares(phase: PhaseSummary) -> ClassShares:
    return ClassShares(phase.phase, phase.classes)


def _step_shares(capture: CaptureSummary) -> ClassShares | None:
    """The classes of a whole training step: of the step range, else of its phases together; None without a step."""
    # A training step has an optimizer.
    name = "training step" if capture.phase("optimizer") or not capture.phase("forward") else BOTH
    step = capture.phase(STEP)
    if step and step.kernels and step.holds_backward:
        return replace(_shares(step), scope=name)
    parts = [phase for leaf in LEAF_PHASES if (phase := capture.phase(leaf)) and phase.kernels]
    steps = min((phase.instances for phase in parts), default=0)
    # Gradients accumulated over k passes: k forwards for one optimizer. Counts that do not fit are no steps.
    if len(parts) < 2 or any(phase.instances % steps for phase in parts):
        return None
    kernels = merge_kernels(*(phase.kernels for phase in parts for _ in range(phase.instances // steps)))
    return ClassShares(name, class_rows(kernels))


def _is_its_inference(capture: CaptureSummary, other: CaptureSummary) -> bool:
    ours, theirs = capture.configuration, other.configuration
    if not ours or not theirs or not ours.model or theirs.mode != "forward" or ours.mode == "forward":
        return False
    built = [(run.compile, run.cuda_graph) if (run := one.run) else None for one in (capture, other)]
    return built[0] == built[1] and ours == structs.replace(theirs, mode=ours.mode, source=ours.source)


def with_counted_flops(capture: CaptureSummary, counted: CountedFlops) -> CaptureSummary:
    """The capture with FLOPs of its modules and of attention; what is known of attention from its shapes stays."""
    modules = with_flops(capture.modules, counted) if capture.modules else None
    attention = capture.attention
    if attention and attention.per == FORWARD and attention.flop_ratio is None:
        attention = _of_attention(attention, counted)
    return replace(capture, modules=modules, attention=attention)


def _of_attention(attention: AttentionSummary, counted: CountedFlops) -> AttentionSummary:
    """Of one forward pass; matmuls with other FLOPs than attention's own hold projections, and say nothing."""
    passes = counted.passes.get(FORWARD, 0)
    if not passes or not counted.softmax or not counted.attention_matmul:
        return attention
    in_modules = sum(
        flops.get(FORWARD, 0)
        for name, flops in counted.modules.items()
        if find_module_role(MODULE_RANGE_PREFIX + name) == "attention"
    )
    if attention.matmul_ms and in_modules and in_modules != counted.attention_matmul:
        attention = replace(attention, matmul_ms=None, runtime_ratio=None)
    return replace(
        attention,
        softmax_flops=round(counted.softmax / passes),
        matmul_flops=round(counted.attention_matmul / passes),
        flop_ratio=counted.attention_matmul / counted.softmax,
    )
