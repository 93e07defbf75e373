"""Softmax against the two matmuls inside self-attention: time, FLOPs and bytes."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np

from nsys_analyzer.analysis.intervals.timeline import NONE
from nsys_analyzer.analysis.ranges.instances import AttributedTrace
from nsys_analyzer.analysis.ranges.phases import ATTENTION_PARTS, STEP
from nsys_analyzer.analysis.transformer.flops import (
    attention_matmul_flops,
    attention_to_softmax_flop_ratio,
    softmax_flops,
)
from nsys_analyzer.analysis.transformer.models import Configuration, ModelSize
from nsys_analyzer.analysis.transformer.softmax_traffic import SoftmaxKernels, SoftmaxTraffic, softmax_traffic
from nsys_analyzer.trace.arrays import Bools, Ints, SmallInts
from nsys_analyzer.trace.columns import KERNEL
from nsys_analyzer.trace.metadata import Gpu

FUSED = "fused attention"
_BY_RANGE = "every kernel of the softmax ranges"
_BY_NAME = "softmax kernels by name inside the attention ranges"
#: What the figures may be of, besides a step.
FORWARD, CAPTURE = "forward", "capture"
_Scope = tuple[str, Ints, Ints, int, Ints | None]


@dataclass(frozen=True)
class AttentionSummary:
    """Times of attention's softmax, of its matmuls, and of kernels that do both at once; None is unknown.

    Attributes:
        softmax_source: how the softmax was found.
        runtime_ratio, flop_ratio: matmuls ÷ softmax.
        per: the unit of the figures: one "forward", one "step" where attention lies in no forward, or the whole
            "capture" outside warm-up where it lies in neither.
        occurrences: how often attention ran in all that was measured, by the ranges around its kernels, a replay of
            a CUDA graph once more.
        softmax_backward_ms: of one backward pass, where the modules of its kernels are known.
        softmax_flops_per_s, matmul_flops_per_s, fused_flops_per_s: achieved; the last by kernels that do both at once.
        ratio_of: what both ratios are of.
        warmup_occurrences: how often it ran inside warm-up, which is left out; None for "forward".
    """

    softmax_ms: float | None
    matmul_ms: float | None
    fused_ms: float | None
    softmax_launches: float
    matmul_launches: float
    fused_launches: float
    softmax_source: str
    runtime_ratio: float | None
    flop_ratio: float | None
    softmax_flops: int | None
    matmul_flops: int | None
    per: str = FORWARD
    occurrences: int | None = None
    warmup_occurrences: int | None = None
    softmax_traffic: SoftmaxTraffic | None = None
    softmax_backward_ms: float | None = None
    softmax_flops_per_s: float | None = field(init=False)
    matmul_flops_per_s: float | None = field(init=False)
    fused_flops_per_s: float | None = field(init=False)
    ratio_of: str = "products / softmax"

    def __post_init__(self) -> None:
        """Fills the rates."""
        both = (self.matmul_flops or 0) + (self.softmax_flops or 0)
        vars(self).update(
            softmax_flops_per_s=_rate(self.softmax_flops, self.softmax_ms),
            matmul_flops_per_s=_rate(self.matmul_flops, self.matmul_ms),
            fused_flops_per_s=_rate(both, self.fused_ms),
        )


def _rate(flops: int | None, ms: float | None) -> float | None:
    return flops / (ms / 1e3) if flops and ms else None


def summarize_attention(
    attributed: AttributedTrace, process: int, configuration: Configuration | None, gpu: Gpu | None
) -> AttentionSummary | None:
    """Compares softmax and attention matmuls of one process: per forward, else per step, else over the capture.

    The configuration gives FLOPs and bytes, the GPU its peak bandwidth. None where no range or kernel is
    known to be attention.
    """
    scopes = (_Parts(attributed, *scope) for scope in _scopes(attributed, process))
    parts = next((one for one in scopes if one.found), None)
    return _summary(parts, configuration, gpu) if parts else None


def _scopes(attributed: AttributedTrace, process: int) -> Iterator[_Scope]:
    """Forward, step and capture, as far as they are there.

    Each is a unit, the indices of kernels, the part of attention each is in (-1: none), the number of units, and the
    kernels that are left out as warm-up. Outside a forward only kernels inside attention ranges count: a fused kernel
    elsewhere may be of backward.
    """
    operations, instances = attributed.trace.operations, attributed.instances

    def inside(per: str, instance_of: SmallInts) -> tuple[Ints, int]:
        chosen = (instances.phase == instances.phases.index(per)) & (instances.process == process)
        chosen &= instances.measured
        of_kernel = np.append(chosen, False)[instance_of]  # the last entry serves no instance
        return np.flatnonzero((operations.kind == KERNEL) & of_kernel), int(chosen.sum())

    phase_instance, step_instance = attributed.instance_pair
    forward, forwards = inside(FORWARD, phase_instance)
    if len(forward):
        yield FORWARD, forward, attributed.attention_part(forward), forwards, None
    if not attributed.roles.mask(*ATTENTION_PARTS).any():
        return
    mine = np.flatnonzero((operations.kind == KERNEL) & (operations.process == process))
    part = attributed.attention_part(mine)
    mine, part = mine[part != NONE], part[part != NONE]
    warm = attributed.warm[mine]
    in_softmax = part == ATTENTION_PARTS.index("softmax")
    left_out = mine[warm & (in_softmax | ~in_softmax.any())]
    step, steps = inside(STEP, step_instance)
    in_step = np.isin(mine, step)
    yield STEP, mine[in_step], part[in_step], steps, left_out
    yield CAPTURE, mine[~warm], part[~warm], 1, left_out


class _Parts:
    """The softmax, the matmuls and the fused attention among the kernels of a scope, as masks over these."""

    def __init__(
        self, attributed: AttributedTrace, per: str, kernels: Ints, part: Ints, units: int, warmup: Ints | None
    ) -> None:
        self.attributed, self.per, self.units = attributed, per, units
        self.kernels, self.warmup = kernels, warmup
        operations = attributed.trace.operations
        self.duration = (operations.end - operations.start)[kernels]
        classes, code = np.array(attributed.kernels.classes, np.str_), attributed.kernels.code[kernels]
        self.fused: Bools = (classes == FUSED)[code]
        in_range, by_name = part == ATTENTION_PARTS.index("softmax"), (classes == "softmax")[code] & (part != NONE)
        self.softmax, self.source = (in_range, _BY_RANGE) if in_range.any() else (by_name, _BY_NAME)
        matmuls = (classes == "matmul")[code] & (part != NONE) & ~self.softmax
        in_parts = matmuls & np.isin(part, [ATTENTION_PARTS.index(name) for name in ("scores", "values")])
        # A range around all of attention may hold the projections too.
        self.matmul: Bools = in_parts if in_parts.any() else matmuls
        self.found = bool(self.fused.any() or (self.softmax.any() and self.matmul.any()))

    def ms(self, chosen: Bools) -> float | None:
        """Time of some of the kernels, per unit."""
        return int(self.duration[chosen].sum()) / self.units / 1e6 if chosen.any() else None

    def launches(self, chosen: Bools) -> float:
        """Launches of some of the kernels, per unit."""
        return int(chosen.sum()) / self.units


def _occurrences(attributed: AttributedTrace, kernels: Ints) -> int | None:
    """The number of attention ranges around some kernels, one that a graph captured once for each replay."""
    part = attributed.roles.codes(ATTENTION_PARTS)
    around = part == ATTENTION_PARTS.index("attention")
    found = attributed.attribution.innermost(around if around.any() else part != NONE, kernels)
    replayed = attributed.trace.operations.graph_node[kernels] != 0
    replay = np.where(replayed, attributed.attribution.launch[kernels], NONE)
    pairs = np.unique(np.stack([found, replay])[:, found != NONE], axis=1)
    return pairs.shape[1] or None


def _summary(parts: _Parts, configuration: Configuration | None, gpu: Gpu | None) -> AttentionSummary:
    softmax_ms, matmul_ms = parts.ms(parts.softmax), parts.ms(parts.matmul)
    around = parts.softmax if parts.softmax.any() else parts.fused
    occurrences = _occurrences(parts.attributed, parts.kernels[around])
    known = configuration or Configuration()
    model, batch, context = known.model, known.batch_size, known.context_length
    shapes = (model, batch, context) if model and batch and context else None
    # Outside a forward, attention runs once a layer in each forward pass; None where that does not come out even.
    forwards, rest = divmod(occurrences or 0, model.num_layers * parts.units) if model else (0, 0)
    if parts.per == FORWARD:
        forwards, rest = 1, 0
    counted = shapes if forwards and not rest else None
    return AttentionSummary(
        softmax_ms=softmax_ms,
        matmul_ms=matmul_ms,
        fused_ms=parts.ms(parts.fused),
        softmax_launches=parts.launches(parts.softmax),
        matmul_launches=parts.launches(parts.matmul),
        fused_launches=parts.launches(parts.fused),
        softmax_source=parts.source if softmax_ms else "",
        runtime_ratio=matmul_ms / softmax_ms if matmul_ms and softmax_ms else None,
        flop_ratio=attention_to_softmax_flop_ratio(model) if model else None,
        softmax_flops=softmax_flops(*counted) * forwards if counted else None,
        matmul_flops=attention_matmul_flops(*counted) * forwards if counted else None,
        per=parts.per,
        occurrences=occurrences,
        warmup_occurrences=None if parts.warmup is None else _occurrences(parts.attributed, parts.warmup) or 0,
        softmax_traffic=_traffic(parts, shapes, occurrences, gpu) if softmax_ms else None,
    )


def _traffic(
    parts: _Parts, shapes: tuple[ModelSize, int, int] | None, occurrences: int | None, gpu: Gpu | None
) -> SoftmaxTraffic | None:
    """The bytes of the softmax, where attention runs once a layer, on all of the layer's scores."""
    if shapes is None or gpu is None or gpu.is_cpu or not occurrences or occurrences % shapes[0].num_layers:
        return None
    model, batch, context = shapes
    operations, duration = parts.attributed.trace.operations, parts.duration[parts.softmax]
    name = operations.name[parts.kernels[parts.softmax]]
    same = {code: name == code for code in np.unique(name).tolist()}
    kernels = [SoftmaxKernels(operations.names[i], int(one.sum()), int(duration[one].sum())) for i, one in same.items()]
    return softmax_traffic(kernels, (batch, model.num_heads, context), parts.units, gpu)
