"""Completes the summaries of captures with figures that need manifests, unprofiled times or other captures.

These are findings, rates, shares and short labels of kernels.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType

from msgspec import structs

from nsys_analyzer.analysis.facts import Fact
from nsys_analyzer.analysis.findings.diagnosis import diagnose
from nsys_analyzer.analysis.findings.finding import Diagnosis
from nsys_analyzer.analysis.kernels.class_rules import COMMUNICATION, UNKNOWN
from nsys_analyzer.analysis.kernels.labels import make_short_labels
from nsys_analyzer.analysis.operators.costs import add_uncounted_flops
from nsys_analyzer.analysis.steps.serving import Serving
from nsys_analyzer.analysis.steps.step import StepSummary, UnprofiledStep
from nsys_analyzer.analysis.summary.energy import add_energy
from nsys_analyzer.analysis.summary.kernel_tables import (
    ClassShares,
    KernelRow,
    Leader,
    MatmulShare,
    make_class_rows,
    merge_kernels,
)
from nsys_analyzer.analysis.summary.limits import PEAK_TOLERANCE, compare_with_peaks
from nsys_analyzer.analysis.summary.modules import with_flops
from nsys_analyzer.analysis.summary.summary import BusyShare, CaptureSummary, Limits, PhaseSummary, Unprofiled
from nsys_analyzer.analysis.transformer.attention import FORWARD, AttentionSummary
from nsys_analyzer.analysis.transformer.models import (
    ELEMENT_BYTES,
    count_cached_bytes,
    count_weights_bytes,
)
from nsys_analyzer.analysis.transformer.peaks import find_memory_bandwidth
from nsys_analyzer.configuration import NO_PRICES, CountedFlops, Prices
from nsys_analyzer.trace.phase_names import LEAF_PHASES, MODULE_RANGE_PREFIX, OTHER_STEP, STEP, find_module_role
from nsys_analyzer.trace.schema import MS_PER_S

#: An unprofiled time is of other work if the GPU's busy time under the profiler exceeds it by more than this share.
_BUSY_TOLERANCE = 0.02
#: Steps represent the whole capture if they contain more than this share of its kernel time.
_SUFFICIENT_SHARE_IN_STEPS = 0.9
#: Findings may be missing if kernels hidden in CUDA graphs have at least this share of the compute time.
_NOTABLE_HIDDEN_SHARE = 0.3


def complete_captures(
    captures: Sequence[CaptureSummary],
    not_diagnosed: Mapping[str, Fact] = MappingProxyType({}),
    prices: Prices = NO_PRICES,
) -> tuple[CaptureSummary, ...]:
    """Returns the captures of a report with their findings, rates, shares and labels.

    ``not_diagnosed`` contains the titles of the captures whose findings are not derived, each with the reason.
    ``prices`` determine the cost of tokens.
    """
    kernels = {row.name for capture in captures if capture.whole for row in capture.whole.kernels}
    labels = make_short_labels(sorted(kernels))
    diagnosed = []
    for capture in captures:
        if (unprofiled := capture.unprofiled) and capture.times_calls:
            # A step generates one token, so the time of a whole generation is not the time of a step.
            phases = {name: times for name, times in unprofiled.phases.items() if name != STEP}
            capture = replace(capture, unprofiled=replace(unprofiled, phases=phases))
        if capture.title not in not_diagnosed:
            capture = replace(capture, diagnosis=diagnose_capture(capture))
        if capture.step:
            capture = replace(capture, step=_complete_step(capture, capture.step))
        diagnosed.append(_add_labels_and_shares(capture, labels))
    completed_captures = []
    for capture in diagnosed:
        diagnosis, limits = capture.diagnosis, compare_with_peaks(capture)
        capture = replace(
            capture,
            top_kernels=find_top_kernels(capture),
            matmul=_find_matmul_share(capture, diagnosed),
            limits=limits,
            attention=_remove_impossible_rates(capture.attention, limits),
            serving=_complete_serving(capture, capture.serving) if capture.serving else None,
            account=diagnosis.account if diagnosis else None,
            findings=(diagnosis.findings or (None if diagnosis.doubt else ())) if diagnosis else None,
            missing_reason=not_diagnosed.get(capture.title) or find_missing_reason(capture),
            unprofiled=_complete_unprofiled(capture, capture.unprofiled) if capture.unprofiled else None,
        )
        completed_captures.append(add_energy(capture, prices))
    return tuple(completed_captures)


def diagnose_capture(capture: CaptureSummary) -> Diagnosis | None:
    """Returns the diagnosis of a capture; None if its steps cannot be replayed."""
    step, study = capture.step, capture.study
    if step is None or study is None or capture.on_cpu:
        return None
    ran_out = Fact("findings_out_of_memory", failure=capture.message) if capture.status == "oom" else None
    unprofiled = capture.unprofiled
    timed_step = unprofiled.trusted(STEP) if unprofiled else None
    in_recorded_process = unprofiled is not None and unprofiled.step_in_recorded_process
    return diagnose(
        step,
        study,
        operators=capture.operators,
        unprofiled_ms=timed_step.typical if timed_step else None,
        in_recorded_process=in_recorded_process,
        step_spread=(timed_step.std or 0.0) / timed_step.typical
        if timed_step and timed_step.typical and in_recorded_process
        else 0.0,
        is_torch=capture.is_torch,
        out_of_memory=ran_out,
        waits_for_ranks=any(len(member.collectives) and member.world_size != 1 for member in capture.members),
        run=capture.run,
    )


def find_missing_reason(capture: CaptureSummary) -> Fact | None:
    """Returns the reason why some or all findings of a capture are missing; None if all were looked for."""
    step, metadata = capture.step, capture.metadata
    if capture.on_cpu:
        return Fact("ran_on_cpu")
    if metadata is None:
        return Fact("no_capture", reason=capture.message)
    is_from_torch = metadata.profiler == "torch"
    if capture.has_no_kernel:
        lost_launches = capture.coverage.lost_launches if capture.coverage else 0
        if lost_launches:
            return Fact("only_launches_recorded", launches=lost_launches)
        return Fact("no_recorded_kernel", by_torch=is_from_torch)
    if step is None or all(device.total_ms <= device.idle_ms for device in step.devices):
        return Fact("idle_steps")
    if step.launch_latency_us is None:
        return Fact("no_replay_without_api_calls", by_torch=is_from_torch)
    if capture.diagnosis is None:
        return Fact("too_few_api_calls")
    if capture.diagnosis.doubt:
        return capture.diagnosis.doubt
    hidden_ms = sum(row.ms for row in step.classes if row.kernel_class == UNKNOWN)
    is_opaque = capture.whole is not None and capture.whole.opaque
    if not is_opaque or hidden_ms < _NOTABLE_HIDDEN_SHARE * step.compute_ms:
        return None
    return Fact("hidden_in_graphs", share=hidden_ms / step.compute_ms)


def _remove_impossible_rates(attention: AttentionSummary | None, limits: Limits | None) -> AttentionSummary | None:
    """Returns attention without rates above the GPU's peak. They arise if kernels skip the scores that a mask hides."""
    peak = (limits.peak_flops or limits.best_peak_flops) if limits else None
    if attention is None or peak is None:
        return attention
    rates = ("softmax_flops_per_s", "matmul_flops_per_s", "fused_flops_per_s")
    possible_rates = replace(attention)
    vars(possible_rates).update(
        {name: None for name in rates if (getattr(attention, name) or 0) > peak * (1 + PEAK_TOLERANCE)}
    )
    return possible_rates


def _add_labels_and_shares(capture: CaptureSummary, labels: dict[str, str]) -> CaptureSummary:
    """Returns the capture with a short label for each kernel and with the busy shares of its phases."""

    def add_labels(phase: PhaseSummary, busy: BusyShare | None = None) -> PhaseSummary:
        """Returns the phase with the short labels of its kernels, and with its GPU-busy share."""
        rows = tuple(structs.replace(row, label=labels[row.name]) for row in phase.kernels)
        return structs.replace(phase, kernels=rows, busy_share=busy)

    phases = tuple(add_labels(phase, find_busy_share(capture, phase)) for phase in capture.phases)
    return replace(capture, phases=phases, whole=add_labels(capture.whole) if capture.whole else None)


def _complete_step(capture: CaptureSummary, step: StepSummary) -> StepSummary:
    """Returns the steps with their length without the profiler, if a replay or an unprofiled run shows it."""
    diagnosis, unprofiled = capture.diagnosis, capture.unprofiled
    timed_ms = unprofiled.trusted_ms(STEP) if unprofiled else None
    in_recorded_process = bool(timed_ms and unprofiled and unprofiled.step_in_recorded_process)
    times = UnprofiledStep(timed_ms, timed_ms, True, in_recorded_process) if timed_ms else None
    if diagnosis is None:
        step = replace(step, unprofiled_ms=times)
    else:
        if not (timed_ms or diagnosis.doubt):
            times = UnprofiledStep(diagnosis.step_ms_low, diagnosis.step_ms_high, False)
        path = () if diagnosis.doubt else step.critical_path
        step = replace(
            step, unprofiled_ms=times, profiler_overhead_ms=diagnosis.profiler_overhead_ms, critical_path=path
        )
    return replace(step, busy_share=find_busy_share_of_step(step, on_cpu=capture.on_cpu))


def find_busy_share_of_step(step: StepSummary, *, on_cpu: bool) -> float | None:
    """Returns the time in which the GPU works as a share of the step's reported length. On a CPU, operators count."""
    if not step.total_ms:
        return None
    if on_cpu:  # on a CPU, the profiler makes the operators longer, so the profiled length is used
        return step.compute_ms / step.total_ms
    length_ms, busy_ms = step.reported_ms if step.unprofiled_ms else step.total_ms, step.total_ms - step.idle_ms
    if busy_ms > length_ms:  # the busy time includes waits of collectives for ranks that the profiler slowed down
        busy_ms -= step.exposed_communication_ms
    return min(busy_ms / length_ms, 1.0) if length_ms else None


def _complete_serving(capture: CaptureSummary, serving: Serving) -> Serving:
    """Returns the serving figures with a lower bound of the bytes that are read to decode a token.

    If the run did not report the size of the weights and the cache, it is computed from the model's dimensions, with
    weights in the precision of most of the matmul time.
    """
    run, peak = capture.run, find_memory_bandwidth(capture.device)
    if run and run.weights_bytes:
        return serving.with_memory_bounds(run.weights_bytes, run.cache_bytes, peak, counted=True)
    precision = max(capture.precisions, key=lambda name: capture.precisions[name], default="unknown")
    model = capture.configuration.model if capture.configuration else None
    element_bytes = ELEMENT_BYTES.get(precision)
    if model is None or element_bytes is None:
        return serving
    weights_bytes, token_bytes = count_weights_bytes(model, element_bytes), count_cached_bytes(model, 1, element_bytes)
    return serving.with_memory_bounds(weights_bytes, token_bytes, peak, counted=False)


def _complete_unprofiled(capture: CaptureSummary, unprofiled: Unprofiled) -> Unprofiled:
    """Returns the unprofiled times with the tokens per second and the profiler's overhead."""
    step_ms, tokens = unprofiled.trusted_ms(STEP), capture.tokens_per_step
    tokens_per_second = tokens / (step_ms / MS_PER_S) if tokens and step_ms else None
    overhead = {phase: capture.profiler_overhead(phase) for phase in unprofiled.phases}
    return replace(unprofiled, tokens_per_second=tokens_per_second, profiler_overhead=overhead)


def find_busy_share(capture: CaptureSummary, phase: PhaseSummary) -> BusyShare | None:
    """Returns the share of a phase's time during which the GPU works.

    A profiler slows the CPU down, but not the kernels. So the busy time is taken from the trace, and the wall time from
    an unprofiled run. Without such a run, busy time ÷ profiled wall time is the lower bound, and busy time ÷ (wall
    time − the profiler's estimated cost) is approximately the upper bound. The share of the step is computed from the
    length that is reported.

    Returns:
        The share; None on a CPU, and if no measured wall time includes the GPU work.
    """
    busy_ms, wall_ms = phase.gpu_busy_ms.median, phase.wall_ms.median
    if capture.on_cpu or busy_ms is None:
        return None
    if phase.phase == STEP and (step := capture.step) and (share := step.busy_share) is not None:
        times, busy_ms = step.unprofiled_ms, step.total_ms - step.idle_ms
        is_timed = times is not None and times.timed
        bounds = (busy_ms / times.high, min(busy_ms / times.low, 1.0)) if times and times.low and not is_timed else None
        return BusyShare(busy_ms, step.reported_ms, is_timed, share, share, bounds)
    unprofiled_ms = capture.unprofiled.trusted_ms(phase.phase) if capture.unprofiled else None
    if unprofiled_ms and busy_ms <= unprofiled_ms * (1 + _BUSY_TOLERANCE):
        share = min(busy_ms / unprofiled_ms, 1.0)
        return BusyShare(busy_ms, unprofiled_ms, True, share, share)
    if not phase.synchronized or not wall_ms:
        return None
    cost = phase.profiler_cost
    least_wall_ms = max(wall_ms - cost.high_ms, busy_ms) if cost else busy_ms
    low, high = min(busy_ms / wall_ms, 1.0), min(busy_ms / least_wall_ms, 1.0) if least_wall_ms else 0.0
    return BusyShare(min(busy_ms, wall_ms), wall_ms, False, low, high)


#: The phases of a training step that tables compare.
TRAINING_PHASES = ("forward", "backward", "optimizer")
#: The scope of figures over forward and backward together.
FORWARD_AND_BACKWARD = "forward+backward"


def select_compared_phases(capture: CaptureSummary) -> tuple[PhaseSummary, ...]:
    """Returns the phases whose kernels tables compare: forward, backward, optimizer and the user's own phases.

    If these phases do not represent the capture, the step and the whole capture follow. A phase with an opaque graph is
    left out, because the shares of its visible kernels would mislead.
    """
    visible_phases = [phase for phase in capture.phases if phase.instances and phase.kernels and not phase.opaque]
    parts = tuple(phase for phase in visible_phases if phase.phase not in ("loss", STEP, OTHER_STEP))
    if parts and capture.phases_suffice:
        return parts
    steps = tuple(phase for phase in visible_phases if phase.phase == STEP)
    whole_capture = find_whole_if_needed(capture)
    if whole_capture is None or not whole_capture.kernels:
        return (*parts, *steps)
    has_opaque = whole_capture.opaque or any(phase.opaque for phase in capture.phases)
    return (*parts, *steps) if has_opaque else (*parts, *steps, whole_capture)


def find_whole_if_needed(capture: CaptureSummary) -> PhaseSummary | None:
    """Returns the whole capture as a phase; None if its phases or its steps represent the whole capture."""
    whole_capture, step = capture.whole, capture.phase(STEP)
    if whole_capture is None or capture.phases_suffice:
        return None
    in_steps_ms = (step.kernel_time_ms.mean or 0.0) * step.instances if step else 0.0
    total_ms = whole_capture.kernel_time_ms.mean or 0.0
    return whole_capture if in_steps_ms <= _SUFFICIENT_SHARE_IN_STEPS * total_ms else None


def split_compared_phases(capture: CaptureSummary) -> tuple[tuple[PhaseSummary, ...], tuple[PhaseSummary, ...]]:
    """Splits the compared phases into phases inside the step, and the step together with the whole capture."""
    compared_phases = select_compared_phases(capture)
    enclosing_phases = tuple(phase for phase in compared_phases if phase.phase == STEP or phase is capture.whole)
    return tuple(phase for phase in compared_phases if phase not in enclosing_phases), enclosing_phases


def find_top_kernels(capture: CaptureSummary) -> tuple[Leader, ...]:
    """Returns the top kernels of forward, of backward, of both together, of the step and of the whole capture.

    Without forward and backward, the top kernel of the first other phase is returned instead.
    """
    parts, enclosing_phases = split_compared_phases(capture)
    passes = [phase for name in ("forward", "backward") for phase in parts if phase.phase == name]
    kernels_of_both = merge_kernels(*(phase.kernels for phase in passes)) if len(passes) == 2 else ()
    return (
        *(_find_leader(phase.phase, phase.kernels) for phase in passes or parts[:1]),
        *([_find_leader(FORWARD_AND_BACKWARD, kernels_of_both)] if kernels_of_both else []),
        *(_find_leader(phase.phase, phase.kernels) for phase in enclosing_phases),
    )


def _find_leader(scope: str, kernels: tuple[KernelRow, ...]) -> Leader:
    return Leader(scope, next((row for row in kernels if row.kernel_class != COMMUNICATION), kernels[0]))


def _find_matmul_share(capture: CaptureSummary, captures: Iterable[CaptureSummary]) -> MatmulShare:
    """Returns the share of matmuls in each phase, in a step, and in inference.

    The share in inference is that of a forward-only capture with an equal configuration, if the report has one.
    """
    inferences = [inference for inference in captures if capture.whole and _is_inference_of(inference, capture)]
    forwards = (
        (candidate, phase)
        for candidate in (*inferences, capture)
        if (phase := candidate.phase("forward")) and phase.kernels
    )
    source, forward = next(forwards, (capture, None))
    return MatmulShare(
        tuple(_make_class_shares(phase) for phase in select_compared_phases(capture)),
        _find_step_class_shares(capture),
        _make_class_shares(forward) if forward else None,
        None if source is capture else source.title,
    )


def _make_class_shares(phase: PhaseSummary) -> ClassShares:
    return ClassShares(phase.phase, phase.classes)


def _find_step_class_shares(capture: CaptureSummary) -> ClassShares | None:
    """Returns the class shares of a training step, from its range or its phases; None if the phases form no steps."""
    # A training step has an optimizer.
    scope = "training step" if capture.phase("optimizer") or not capture.phase("forward") else FORWARD_AND_BACKWARD
    step = capture.phase(STEP)
    if step and step.kernels and step.holds_backward:
        return replace(_make_class_shares(step), scope=scope)
    parts = [phase for leaf in LEAF_PHASES if (phase := capture.phase(leaf)) and phase.kernels]
    steps = min((phase.instances for phase in parts), default=0)
    # If gradients are accumulated over k passes, there are k forward passes per optimizer step. If the counts are not
    # multiples of the smallest count, the phases do not form steps.
    if len(parts) < 2 or any(phase.instances % steps for phase in parts):
        return None
    kernels = merge_kernels(*(phase.kernels for phase in parts for _ in range(phase.instances // steps)))
    return ClassShares(scope, make_class_rows(kernels))


def _is_inference_of(inference: CaptureSummary, training: CaptureSummary) -> bool:
    """Returns whether ``inference`` is a forward-only capture of the configuration that ``training`` trains."""
    forward, trained_model = inference.configuration, training.configuration
    if (
        not trained_model
        or not forward
        or not trained_model.model
        or forward.mode != "forward"
        or trained_model.mode == "forward"
    ):
        return False
    builds = [(run.compile, run.cuda_graph) if (run := capture.run) else None for capture in (training, inference)]
    return builds[0] == builds[1] and trained_model == structs.replace(
        forward, mode=trained_model.mode, source=trained_model.source
    )


def with_counted_flops(capture: CaptureSummary, counted_flops: CountedFlops) -> CaptureSummary:
    """Adds counted FLOPs to a capture's run and modules, and to its attention if shapes did not determine them already.

    Operators that PyTorch cannot count are counted from their recorded shapes.
    """
    if capture.operators:
        counted_flops = add_uncounted_flops(counted_flops, capture.operators.calls)
    modules = with_flops(capture.modules, counted_flops) if capture.modules else None
    attention = capture.attention
    if attention and attention.per == FORWARD and attention.flop_ratio is None:
        attention = _add_attention_flops(attention, counted_flops)
    run = capture.run and replace(capture.run, flops=counted_flops)
    return replace(capture, run=run, modules=modules, attention=attention)


def _add_attention_flops(attention: AttentionSummary, counted_flops: CountedFlops) -> AttentionSummary:
    """Adds the counted FLOPs of one forward pass to attention.

    If the matmuls inside attention modules have other FLOPs than attention itself, they include projections. Their time
    is then left out.
    """
    passes = counted_flops.passes.get(FORWARD, 0)
    if not passes or not counted_flops.softmax or not counted_flops.attention_matmul:
        return attention
    module_flops = sum(
        flops.get(FORWARD, 0)
        for name, flops in counted_flops.modules.items()
        if find_module_role(MODULE_RANGE_PREFIX + name) == "attention"
    )
    if attention.matmul_ms and module_flops and module_flops != counted_flops.attention_matmul:
        attention = replace(attention, matmul_ms=None, runtime_ratio=None)
    return replace(
        attention,
        softmax_flops=round(counted_flops.softmax / passes),
        matmul_flops=round(counted_flops.attention_matmul / passes),
        flop_ratio=counted_flops.attention_matmul / counted_flops.softmax,
    )
