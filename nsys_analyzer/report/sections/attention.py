"""How softmax compares with the attention matmuls, in time, in FLOPs and in bytes."""

from __future__ import annotations

from collections.abc import Iterator

from nsys_analyzer.analysis.summary.summary import CaptureSummary
from nsys_analyzer.analysis.transformer.attention import CAPTURE, FORWARD, MEMORY_BOUND, AttentionSummary
from nsys_analyzer.report.model import Answer, Block, Field, Paragraph, make_table
from nsys_analyzer.report.units import format_count, format_ms, format_number, format_percent
from nsys_analyzer.text import phrase

_FIELDS: tuple[Field[AttentionSummary], ...] = (
    Field("of", "text", lambda one: f"one {one.per}" if one.per != CAPTURE else _ranges(one)),
    Field("softmax ms", "ms", lambda one: one.softmax_ms),
    Field("matmul ms", "ms", lambda one: one.matmul_ms),
    Field("fused ms", "ms", lambda one: one.fused_ms),
    Field("time: matmul ÷ softmax", "factor", lambda one: one.runtime_ratio),
    Field("FLOPs: matmul ÷ softmax", "factor", lambda one: one.flop_ratio),
    Field("softmax FLOP/s", "flop/s", lambda one: one.softmax_flops_per_s),
    Field("matmul FLOP/s", "flop/s", lambda one: one.matmul_flops_per_s),
    Field("fused FLOP/s", "flop/s", lambda one: one.fused_flops_per_s),
    Field("softmax B/s", "bytes/s", lambda one: one.softmax_traffic.bytes_per_s if one.softmax_traffic else None),
    Field("of peak", "percent", lambda one: one.softmax_traffic.peak_share if one.softmax_traffic else None),
)


def answer_attention(capture: CaptureSummary) -> Iterator[Block]:
    """Runtime ratio, FLOP ratio, achieved FLOP/s, and why they differ."""
    attention = capture.attention
    if attention is None:
        return
    yield Answer(_sentence(attention), capture.title)
    figures = make_table(_FIELDS, [attention], capture=capture.title)
    if len(figures.columns) > 2:  # of fused attention without FLOPs the sentence holds the only figure
        yield figures
    named = capture.phase(FORWARD)
    if attention.softmax_ms and named and not named.share_of("softmax"):
        words = "The softmax runs as elementwise kernels and reductions in its ranges: other tables count it as these."
        yield Paragraph(words, capture.title)


def _ranges(attention: AttentionSummary) -> str:
    return format_count(attention.occurrences or 0, "attention range")


def _sentence(attention: AttentionSummary) -> str:
    softmax, matmul = attention.softmax_ms, attention.matmul_ms
    of = {FORWARD: "one forward pass", CAPTURE: _ranges(attention)}.get(attention.per, "one step")
    if softmax is None or matmul is None or attention.runtime_ratio is None:
        fused = format_ms(attention.fused_ms or 0.0)
        return f"Attention is fused: {fused} in {of}, with the softmax inside, in registers."
    ratio = format_number(attention.runtime_ratio, "factor")
    times = f"{format_ms(matmul)} against {format_ms(softmax)} in {of}"
    if attention.flop_ratio is None:
        return f"The attention matmuls take {ratio} the time of softmax: {times}.{_bytes(attention)}"
    flops = f"{attention.flop_ratio:.1f}×"
    return f"The attention matmuls do {flops} the FLOPs of softmax in {ratio} its time: {times}.{_bytes(attention)}"


def _bytes(attention: AttentionSummary) -> str:
    """The bandwidth of softmax against the memory's peak, and whether that makes it memory-bound."""
    traffic = attention.softmax_traffic
    if traffic is None or traffic.peak_share is None:
        return ""
    rate = format_number(traffic.bytes_per_s, "bytes/s")
    text = f" Softmax moves {rate} at least, {format_percent(traffic.peak_share)} of the memory's peak"
    if traffic.fits_in_l2:
        return f"{text}: its scores fit into the L2 cache, which may serve a part of it."
    if traffic.memory_bound is None:
        return f"{text}."
    limit = f"below the {format_percent(MEMORY_BOUND)} of memory-bound kernels"
    return f"{text}: {'memory-bound' if traffic.memory_bound else limit}."


HOW_TO_ANNOTATE = phrase(
    "To tell attention from the rest, wrap it in an NVTX range `scaled dot product attention`, and its parts in "
    "`computing attention scores`, `computing softmax` and `final matmul`; or name the ranges there are with "
    "`--phase-name attention=NAME --phase-name scores=NAME --phase-name softmax=NAME --phase-name values=NAME`. A "
    "compiled model opens no ranges inside itself; of a CUDA graph `--cuda-graph-trace=node` records the kernels."
)
