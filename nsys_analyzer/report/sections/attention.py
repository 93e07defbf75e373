"""Answers how softmax compares with the attention matmuls, in time, in FLOPs and in bytes."""

from __future__ import annotations

from collections.abc import Iterator

from nsys_analyzer.analysis.summary.summary import CaptureSummary
from nsys_analyzer.analysis.transformer.attention import CAPTURE, FORWARD, MEMORY_BOUND, AttentionSummary
from nsys_analyzer.report.model import Answer, Block, Field, Paragraph, make_table
from nsys_analyzer.report.units import format_count, format_ms, format_number, format_percent, rounded
from nsys_analyzer.text import phrase

_FIELDS: tuple[Field[AttentionSummary], ...] = (
    Field("unit", "text", lambda row: f"one {row.per}" if row.per != CAPTURE else _count_ranges(row)),
    Field("softmax ms", "ms", lambda row: row.softmax_ms),
    Field("matmul ms", "ms", lambda row: row.matmul_ms),
    Field("fused ms", "ms", lambda row: row.fused_ms),
    Field("time: matmul ÷ softmax", "factor", lambda row: row.runtime_ratio),
    Field("FLOPs: matmul ÷ softmax", "factor", lambda row: row.flop_ratio),
    Field("softmax FLOP/s", "flop/s", lambda row: row.softmax_flops_per_s),
    Field("matmul FLOP/s", "flop/s", lambda row: row.matmul_flops_per_s),
    Field("fused FLOP/s", "flop/s", lambda row: row.fused_flops_per_s),
    Field("softmax B/s", "bytes/s", lambda row: row.softmax_traffic.bytes_per_s if row.softmax_traffic else None),
    Field("share of peak", "percent", lambda row: row.softmax_traffic.peak_share if row.softmax_traffic else None),
)


def answer_attention(capture: CaptureSummary) -> Iterator[Block]:
    """Yields the ratio of the times and of the FLOPs, the achieved FLOP/s, and a note on softmax as other kernels."""
    attention = capture.attention
    if attention is None:
        return
    yield Answer(_sentence(attention), capture.title)
    figures = make_table(_FIELDS, [attention], capture=capture.title)
    if len(figures.columns) > 2:  # otherwise the sentence has the only figure, the time of fused attention
        yield figures
    forward = capture.phase(FORWARD)
    if attention.softmax_ms and forward and not forward.share_of("softmax"):
        text = "The softmax runs as elementwise and reduction kernels in its ranges. Other tables count them as such."
        yield Paragraph(text, capture.title)


def _count_ranges(attention: AttentionSummary) -> str:
    return format_count(attention.occurrences or 0, "attention range")


def _sentence(attention: AttentionSummary) -> str:
    softmax, matmul = attention.softmax_ms, attention.matmul_ms
    unit = {FORWARD: "one forward pass", CAPTURE: _count_ranges(attention)}.get(attention.per, "one step")
    if softmax is None or matmul is None or attention.runtime_ratio is None:
        fused = format_ms(attention.fused_ms or 0.0)
        return f"Attention is fused: {fused} in {unit}. The softmax is part of the same kernels."
    ratio = f"{rounded(attention.runtime_ratio)}×"
    times = f"{format_ms(matmul)} against {format_ms(softmax)} in {unit}"
    if attention.flop_ratio is None:
        return f"The attention matmuls take {ratio} the time of softmax: {times}.{_bandwidth(attention)}"
    flops = f"{rounded(attention.flop_ratio)}×"
    return f"The attention matmuls do {flops} the FLOPs of softmax in {ratio} its time: {times}.{_bandwidth(attention)}"


def _bandwidth(attention: AttentionSummary) -> str:
    """Returns the bandwidth of softmax, its share of the memory's peak, and whether softmax is memory-bound."""
    traffic = attention.softmax_traffic
    if traffic is None or traffic.peak_share is None:
        return ""
    rate = format_number(traffic.bytes_per_s, "bytes/s")
    text = f" Softmax moves at least {rate}, {format_percent(traffic.peak_share)} of the memory's peak bandwidth"
    if traffic.fits_in_l2:
        return f"{text}. Its scores fit into the L2 cache, which may serve a part of this traffic."
    if traffic.memory_bound is None:
        return f"{text}."
    if traffic.memory_bound:
        return f"{text}: it is memory-bound."
    return f"{text}. It is not memory-bound: that requires at least {format_percent(MEMORY_BOUND)}."


HOW_TO_ANNOTATE = phrase(
    "To measure the parts of attention, wrap attention in an NVTX range `scaled dot product attention`, and its parts "
    "in `computing attention scores`, `computing softmax` and `final matmul`. For existing ranges, give their names: "
    "`--phase-name attention=NAME --phase-name scores=NAME --phase-name softmax=NAME --phase-name values=NAME`. A "
    "compiled model opens no ranges inside. The kernels of a CUDA graph are recorded with `--cuda-graph-trace=node`."
)
