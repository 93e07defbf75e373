"""A capture with the FLOPs that were counted while its program ran."""

from __future__ import annotations

from dataclasses import replace

from nsys_analyzer.analysis.modules.summarize import with_flops
from nsys_analyzer.analysis.ranges.phases import module_key
from nsys_analyzer.analysis.summary.summary import CaptureSummary
from nsys_analyzer.analysis.transformer.attention import FORWARD, AttentionSummary
from nsys_analyzer.configuration import CountedFlops
from nsys_analyzer.trace.phase_names import MODULE_CALL


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
        if module_key(MODULE_CALL + name) == "attention"
    )
    if attention.matmul_ms and in_modules and in_modules != counted.attention_matmul:
        attention = replace(attention, matmul_ms=None, runtime_ratio=None)
    return replace(
        attention,
        softmax_flops=round(counted.softmax / passes),
        matmul_flops=round(counted.attention_matmul / passes),
        flop_ratio=counted.attention_matmul / counted.softmax,
    )
