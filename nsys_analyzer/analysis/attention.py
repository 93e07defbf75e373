"""Softmax against the two products inside self-attention: time, FLOPs, achieved FLOP/s."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from nsys_analyzer.analysis.classes import classify
from nsys_analyzer.analysis.flops import (
    attention_product_flops,
    attention_to_softmax_flop_ratio,
    softmax_flops,
)
from nsys_analyzer.analysis.instances import AttributedTrace
from nsys_analyzer.analysis.models import Configuration
from nsys_analyzer.analysis.phases import ATTENTION_PARTS
from nsys_analyzer.trace.arrays import Bools, Ints
from nsys_analyzer.trace.columns import KERNEL

FUSED = "fused attention"
_BY_RANGE = "every kernel of the softmax ranges"
_BY_NAME = "softmax kernels by name inside the attention ranges"


@dataclass(frozen=True)
class AttentionSummary:
    """Times of one forward pass, summed over its layers.

    Attributes:
        softmax_ms: every kernel launched inside the softmax ranges, or each softmax kernel of the attention.
        matmul_ms: the matmul kernels of the attention ranges.
        fused_ms: attention kernels that do both at once.
        softmax_launches, matmul_launches, fused_launches: per forward pass.
        softmax_source: how the softmax was found.
        runtime_ratio, flop_ratio: products ÷ softmax, None where unknown.
        softmax_flops, matmul_flops: of one forward pass, None where the dimensions are unknown.

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


def summarize_attention(
    attributed: AttributedTrace, forward: Ints, configuration: Configuration | None
) -> AttentionSummary | None:
    """Compares softmax and attention products over some forward instances.

    Args:
        attributed: the trace.
        forward: the measured forward instances, indices into ``attributed.instances``.
        configuration: the model and shapes, for FLOPs.

    Returns:
        None without a forward pass, or where no range or kernel tells attention from the rest.

    """
    operations = attributed.trace.operations
    is_forward = np.zeros(len(attributed.instances.range) + 1, np.bool_)  # the last entry serves no instance
    is_forward[forward] = True
    inside = np.flatnonzero((operations.kind == KERNEL) & is_forward[attributed.phase_instance])
    if not len(inside):
        return None
    part = attributed.attention_part(inside)
    classes = np.array([classify(name) for name in operations.names])[operations.name[inside]]
    fused = classes == FUSED
    in_range, by_name = part == ATTENTION_PARTS.index("softmax"), (classes == "softmax") & (part >= 0)
    softmax, source = (in_range, _BY_RANGE) if in_range.any() else (by_name, _BY_NAME)
    products = (classes == "matmul") & (part >= 0) & ~softmax
    in_parts = products & np.isin(part, [ATTENTION_PARTS.index(name) for name in ("scores", "values")])
    # A range around all of attention may hold the projections too.
    matmul = in_parts if in_parts.any() else products
    if not fused.any() and not (softmax.any() and matmul.any()):
        return None
    per_forward = _PerForward((operations.end - operations.start)[inside], len(forward))
    return _with_flops(per_forward, softmax, matmul, fused, source, configuration)


class _PerForward:
    """Sums over the kernels of some forward passes, per pass."""

    def __init__(self, duration: Ints, forwards: int) -> None:
        self._duration, self._forwards = duration, forwards

    def ms(self, chosen: Bools) -> float | None:
        return int(self._duration[chosen].sum()) / self._forwards / 1e6 if chosen.any() else None

    def launches(self, chosen: Bools) -> float:
        return int(chosen.sum()) / self._forwards


def _with_flops(
    per: _PerForward,
    softmax: Bools,
    matmul: Bools,
    fused: Bools,
    source: str,
    configuration: Configuration | None,
) -> AttentionSummary:
    softmax_ms, matmul_ms = per.ms(softmax), per.ms(matmul)
    model = configuration.model if configuration else None
    batch = configuration.batch_size if configuration else None
    context = configuration.context_length if configuration else None
    shapes = (model, batch, context) if model and batch and context else None
    return AttentionSummary(
        softmax_ms=softmax_ms,
        matmul_ms=matmul_ms,
        fused_ms=per.ms(fused),
        softmax_launches=per.launches(softmax),
        matmul_launches=per.launches(matmul),
        fused_launches=per.launches(fused),
        softmax_source=source if softmax_ms else "",
        runtime_ratio=matmul_ms / softmax_ms if matmul_ms and softmax_ms else None,
        flop_ratio=attention_to_softmax_flop_ratio(model) if model else None,
        softmax_flops=softmax_flops(*shapes) if shapes else None,
        matmul_flops=attention_product_flops(*shapes) if shapes else None,
    )
