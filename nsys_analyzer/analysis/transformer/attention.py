"""Softmax against the two matmuls inside self-attention: time, FLOPs, bytes, and what the figures are of."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

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
from nsys_analyzer.trace.arrays import Bools, Ints
from nsys_analyzer.trace.columns import KERNEL
from nsys_analyzer.trace.metadata import Gpu

FUSED = "fused attention"
_BY_RANGE = "every kernel of the softmax ranges"
_BY_NAME = "softmax kernels by name inside the attention ranges"


#: What the figures may be of, besides a step.
FORWARD, CAPTURE = "forward", "capture"


@dataclass(frozen=True)
class AttentionSummary:
    """Times of attention, of one forward pass where there is one.

    Attributes:
        softmax_ms: every kernel launched inside the softmax ranges, or each softmax kernel of the attention.
        matmul_ms: the matmul kernels of the attention ranges.
        fused_ms: attention kernels that do both at once.
        softmax_launches, matmul_launches, fused_launches: of the same.
        softmax_source: how the softmax was found.
        runtime_ratio, flop_ratio: matmuls ÷ softmax, None where unknown.
        softmax_flops, matmul_flops: of the same, None where the dimensions are unknown.
        per: what the figures are of: one "forward", one "step" where attention lies in no forward, or the whole
            "capture" outside warm-up where it lies in neither.
        occurrences: how often attention ran in all that was measured, by the ranges around its kernels, a replay of
            a CUDA graph once more; None without such ranges.
        warmup_occurrences: how often it ran inside warm-up, which is left out; None for "forward", whose instances
            are counted themselves.
        softmax_traffic: the bytes that the softmax moved, None where they cannot be counted.
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

    @property
    def softmax_flops_per_s(self) -> float | None:
        """The FLOP/s that softmax achieves."""
        return _rate(self.softmax_flops, self.softmax_ms)

    @property
    def matmul_flops_per_s(self) -> float | None:
        """The FLOP/s that the attention matmuls achieve."""
        return _rate(self.matmul_flops, self.matmul_ms)

    @property
    def fused_flops_per_s(self) -> float | None:
        """The FLOP/s of kernels that do both at once."""
        return _rate((self.matmul_flops or 0) + (self.softmax_flops or 0), self.fused_ms)


def _rate(flops: int | None, ms: float | None) -> float | None:
    return flops / (ms / 1e3) if flops and ms else None


def summarize_attention(
    attributed: AttributedTrace, process: int, configuration: Configuration | None, gpu: Gpu | None
) -> AttentionSummary | None:
    """Compares softmax and attention matmuls of one process: per forward, else per step, else over the capture.

    Args:
        attributed: the trace.
        process: global process ID.
        configuration: the model and shapes, for FLOPs and bytes.
        gpu: where the kernels ran, for its peak bandwidth.

    Returns:
        None where no range or kernel tells attention from the rest.
    """
    for scope in _scopes(attributed, process):
        parts = _Parts(attributed, scope)
        if parts.found:
            return _summary(parts, configuration, gpu)
    return None


@dataclass(frozen=True)
class _Scope:
    """Kernels to look at for attention: indices, the part of attention each is in (or -1), and over how many units."""

    per: str
    kernels: Ints
    part: Ints
    units: int
    warmup: Ints | None = None  # kernels of attention that are left out because they are in warm-up


def _scopes(attributed: AttributedTrace, process: int) -> Iterator[_Scope]:
    """Forward, step and capture, as far as they are there.

    Outside a forward only kernels inside attention ranges count: a fused kernel elsewhere may be of backward.
    """
    operations, instances = attributed.trace.operations, attributed.instances

    def inside(per: str, instance_of: Ints) -> tuple[Ints, int]:
        chosen = (instances.phase == instances.phases.index(per)) & (instances.process == process)
        chosen &= instances.measured
        of_kernel = np.append(chosen, False)[instance_of]  # the last entry serves no instance
        return np.flatnonzero((operations.kind == KERNEL) & of_kernel), int(chosen.sum())

    forward, forwards = inside(FORWARD, attributed.phase_instance)
    if len(forward):
        yield _Scope(FORWARD, forward, attributed.attention_part(forward), forwards)
    if not attributed.has_attention:
        return
    mine = np.flatnonzero((operations.kind == KERNEL) & (operations.process == process))
    part = attributed.attention_part(mine)
    mine, part = mine[part != NONE], part[part != NONE]
    warm = attributed.warm[mine]
    in_softmax = part == ATTENTION_PARTS.index("softmax")
    left_out = mine[warm & (in_softmax | ~in_softmax.any())]
    step, steps = inside(STEP, attributed.step_instance)
    in_step = np.isin(mine, step)
    yield _Scope(STEP, mine[in_step], part[in_step], steps, left_out)
    yield _Scope(CAPTURE, mine[~warm], part[~warm], 1, left_out)


class _Parts:
    """The softmax, the matmuls and the fused attention among the kernels of a scope, as masks over these."""

    def __init__(self, attributed: AttributedTrace, scope: _Scope) -> None:
        self.attributed, self.scope = attributed, scope
        operations, part = attributed.trace.operations, scope.part
        self.duration = (operations.end - operations.start)[scope.kernels]
        self.name = operations.name[scope.kernels]
        classes = np.array(attributed.kernels.classes)[attributed.kernels.code[scope.kernels]]
        self.fused: Bools = classes == FUSED
        in_range, by_name = part == ATTENTION_PARTS.index("softmax"), (classes == "softmax") & (part >= 0)
        self.softmax, self.source = (in_range, _BY_RANGE) if in_range.any() else (by_name, _BY_NAME)
        matmuls = (classes == "matmul") & (part >= 0) & ~self.softmax
        in_parts = matmuls & np.isin(part, [ATTENTION_PARTS.index(name) for name in ("scores", "values")])
        # A range around all of attention may hold the projections too.
        self.matmul: Bools = in_parts if in_parts.any() else matmuls

    @property
    def found(self) -> bool:
        """Whether there is attention to speak of: fused, or both softmax and matmuls."""
        return bool(self.fused.any() or (self.softmax.any() and self.matmul.any()))

    def ms(self, chosen: Bools) -> float | None:
        """Time of some of the kernels, per unit."""
        return int(self.duration[chosen].sum()) / self.scope.units / 1e6 if chosen.any() else None

    def launches(self, chosen: Bools) -> float:
        """Launches of some of the kernels, per unit."""
        return int(chosen.sum()) / self.scope.units

    @property
    def occurrences(self) -> int | None:
        """How often attention ran: by the ranges around its softmax, else around its fused kernels."""
        return _occurrences(self.attributed, self.scope.kernels[self.softmax if self.softmax.any() else self.fused])

    @property
    def softmax_kernels(self) -> Iterator[SoftmaxKernels]:
        """The kernels of the softmax by name."""
        names = self.attributed.trace.operations.names
        name, duration = self.name[self.softmax], self.duration[self.softmax]
        for code in np.unique(name).tolist():
            same = name == code
            yield SoftmaxKernels(names[code], int(same.sum()), int(duration[same].sum()))


def _occurrences(attributed: AttributedTrace, kernels: Ints) -> int | None:
    """In how many attention ranges some kernels lie; in one that a graph captured, once for each replay."""
    part = attributed.roles.codes(ATTENTION_PARTS)
    around = part == ATTENTION_PARTS.index("attention")
    found = attributed.attribution.innermost(around if around.any() else part != NONE, kernels)
    replayed = attributed.trace.operations.graph_node[kernels] != 0
    replay = np.where(replayed, attributed.attribution.launch[kernels], NONE)
    pairs = np.unique(np.stack([found, replay])[:, found != NONE], axis=1)
    return pairs.shape[1] or None


def _summary(parts: _Parts, configuration: Configuration | None, gpu: Gpu | None) -> AttentionSummary:
    softmax_ms, matmul_ms = parts.ms(parts.softmax), parts.ms(parts.matmul)
    scope, occurrences = parts.scope, parts.occurrences
    known = configuration or Configuration()
    model, batch, context = known.model, known.batch_size, known.context_length
    shapes = (model, batch, context) if model and batch and context else None
    forwards = _forwards(scope, model, occurrences)
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
        softmax_flops=softmax_flops(*shapes) * forwards if shapes and forwards else None,
        matmul_flops=attention_matmul_flops(*shapes) * forwards if shapes and forwards else None,
        per=scope.per,
        occurrences=occurrences,
        warmup_occurrences=None if scope.warmup is None else _occurrences(parts.attributed, scope.warmup) or 0,
        softmax_traffic=_traffic(parts, shapes, occurrences, gpu) if softmax_ms else None,
    )


def _forwards(scope: _Scope, model: ModelSize | None, occurrences: int | None) -> int | None:
    """How many forward passes one unit holds: outside a forward, attention runs once a layer in each of them.

    None where that does not come out even.
    """
    if scope.per == FORWARD:
        return 1
    if not model or not occurrences or occurrences % (model.num_layers * scope.units):
        return None
    return occurrences // (model.num_layers * scope.units)


def _traffic(
    parts: _Parts, shapes: tuple[ModelSize, int, int] | None, occurrences: int | None, gpu: Gpu | None
) -> SoftmaxTraffic | None:
    """The bytes of the softmax, where attention runs once a layer, on all of the layer's scores."""
    if shapes is None or gpu is None or gpu.is_cpu or not occurrences or occurrences % shapes[0].num_layers:
        return None
    model, batch, context = shapes
    return softmax_traffic(parts.softmax_kernels, (batch, model.num_heads, context), parts.scope.units, gpu)
