"""The compared parts of a capture: phases and the step around them, with their top kernel and classes."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from msgspec import structs

from nsys_analyzer.analysis.kernels.classes import COMMUNICATION
from nsys_analyzer.analysis.ranges.phases import LEAF_PHASES, OTHER_STEP, STEP
from nsys_analyzer.analysis.summary.shares import ClassShares, Leader, MatmulShare
from nsys_analyzer.analysis.summary.statistics import KernelRow, class_rows, merge_kernels
from nsys_analyzer.analysis.summary.summary import CaptureSummary, PhaseSummary
from nsys_analyzer.analysis.transformer.models import Configuration

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
    whole, opaque = capture.whole, any(phase.opaque for phase in capture.phases)
    shown = whole and whole.kernels and not whole.opaque and not opaque and not capture.phases_suffice
    return (*parts, *steps, *((whole,) if whole and shown else ()))


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
    collective = next((row for row in kernels if row.kernel_class == COMMUNICATION), None)
    return Leader(scope, leading, None if collective is leading else collective)


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
    return ClassShares(phase.phase, phase.classes, phase.kernel_time_ms.mean)


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
    classes = class_rows(merge_kernels(*(phase.kernels for phase in parts for _ in range(phase.instances // steps))))
    return ClassShares(name, classes, sum(row.ms_per_instance for row in classes))


def _is_its_inference(capture: CaptureSummary, other: CaptureSummary) -> bool:
    ours, theirs = capture.configuration, other.configuration
    if not ours or not theirs or not ours.model or theirs.mode != "forward" or ours.mode == "forward":
        return False
    built = [(run.compile, run.cuda_graph) if (run := one.run) else None for one in (capture, other)]
    return built[0] == built[1] and _but_mode(ours) == _but_mode(theirs)


def _but_mode(known: Configuration) -> Configuration:
    return structs.replace(known, mode=None, source="")
