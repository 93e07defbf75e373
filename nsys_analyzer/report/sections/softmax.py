"""(e) How softmax compares with the attention matmuls, in time, in FLOPs and in bytes."""

from __future__ import annotations

from nsys_analyzer.analysis.summary.summary import CaptureSummary
from nsys_analyzer.analysis.transformer.attention import (
    CAPTURE,
    FORWARD,
    MEMORY_BOUND,
    AttentionSummary,
    SoftmaxTraffic,
)
from nsys_analyzer.report.evidence import Evidence
from nsys_analyzer.report.model import Answer, Block, Paragraph, Section
from nsys_analyzer.report.sections.sweep import over_sweep
from nsys_analyzer.report.tables import Field, table
from nsys_analyzer.report.units import counted, format_number, milliseconds, percent
from nsys_analyzer.text import Words, phrase

#: A capture's title, and its attention.
_Row = tuple[str, AttentionSummary]
_CAPTURE: Field[_Row] = Field("capture", "text", lambda row: row[0])
_TIMES: tuple[Field[_Row], ...] = (
    _CAPTURE,
    Field("of", "text", lambda row: None if row[1].per == FORWARD else _of(row[1])),
    Field("softmax ms", "ms", lambda row: row[1].softmax_ms),
    Field("matmul ms", "ms", lambda row: row[1].matmul_ms),
    Field("softmax backward ms", "ms", lambda row: row[1].softmax_backward_ms),
    Field("time: matmul ÷ softmax", "factor", lambda row: row[1].runtime_ratio),
    Field("FLOPs: matmul ÷ softmax", "factor", lambda row: row[1].flop_ratio),
)
_RATES: tuple[Field[_Row], ...] = (
    _CAPTURE,
    Field("softmax FLOP/s", "flop/s", lambda row: row[1].softmax_flops_per_s),
    Field("matmul FLOP/s", "flop/s", lambda row: row[1].matmul_flops_per_s),
    Field("softmax B/s", "bytes/s", lambda row: traffic.bytes_per_s if (traffic := row[1].softmax_traffic) else None),
    Field(
        "of peak bandwidth", "percent", lambda row: traffic.peak_share if (traffic := row[1].softmax_traffic) else None
    ),
    Field("fused ms", "ms", lambda row: row[1].fused_ms),
    Field("fused FLOP/s", "flop/s", lambda row: row[1].fused_flops_per_s),
)
_CONVENTION = phrase(
    "Times are of one forward pass, all layers together, unless the column *of* says otherwise. *Softmax*: all kernels "
    "launched inside the softmax ranges (max, subtract, exp, sum, divide), or those named softmax where there is no "
    "such range. *Matmul*: the matmul kernels inside the attention ranges. FLOPs: 5·B·H·S²·L of softmax, 5 for each "
    "score; 4·B·S²·d·L of the matmuls; their ratio is 4·d_head ÷ 5. Softmax kernels read and write every score for one "
    "or two operations; a matmul uses what it loads many times."
)
_CONVENTION_OF_BYTES = phrase(
    "*Softmax B/s* is a lower bound, counted and not measured: each softmax kernel reads its score tensor (B·H·S² "
    "elements of the type in the kernel's name) once and writes its result once; max and sum write B·H·S values, "
    "subtract and divide read them. Softmax is called memory-bound from {} of the GPU's peak memory bandwidth, if its "
    "score tensor does not fit into the L2 cache.",
    percent(MEMORY_BOUND),
)
_HOW_TO_ANNOTATE = phrase(
    "To tell attention from the rest, wrap it in an NVTX range `scaled dot product attention`, and its parts in "
    "`computing attention scores`, `computing softmax` and `final matmul`; or name the ranges there are with "
    "`--phase attention=NAME --phase scores=NAME --phase softmax=NAME --phase values=NAME`."
)


def answer(evidence: Evidence) -> Section:
    """Runtime ratio, FLOP ratio, achieved FLOP/s, and why they differ."""
    title = "Attention matmul time ÷ softmax time"
    blocks: list[Block] = [*over_sweep(evidence, _ratio, "factor", title, "matmul-to-softmax")]
    blocks += [_answer(capture) for capture in evidence.measured]
    if rows := [(capture.title, capture.attention) for capture in evidence.measured if capture.attention]:
        blocks += [found for fields in (_TIMES, _RATES) if (found := table(fields, rows)).rows]
        counted = any(attention.softmax_traffic for _, attention in rows)
        blocks += [Paragraph(_CONVENTION), *([Paragraph(_CONVENTION_OF_BYTES)] if counted else [])]
    if any(capture.attention is None and _could_be_annotated(capture) for capture in evidence.measured):
        blocks.append(Paragraph(_HOW_TO_ANNOTATE))
    return Section("softmax", "(e) How does softmax compare with the attention matmuls?", tuple(blocks), "softmax")


def _ratio(capture: CaptureSummary) -> float | None:
    return capture.attention.runtime_ratio if capture.attention else None


def _of(attention: AttentionSummary) -> str:
    """The scope of the figures, for a table and for a few words."""
    ranges = counted(attention.occurrences or 0, "attention range")
    return ranges if attention.per == CAPTURE else f"one {attention.per}"


def _answer(capture: CaptureSummary) -> Answer:
    attention = capture.attention
    if attention is None:
        return Answer(capture.title, _unknown(capture), "cannot be told from this capture")
    of = "" if attention.per == FORWARD else f" ({_of(attention)})"
    softmax, matmul = attention.softmax_ms, attention.matmul_ms
    if softmax is None or matmul is None or attention.runtime_ratio is None:
        short = f"fused attention, {milliseconds(attention.fused_ms)}{of}"
        rest: Words = f" ({counted(attention.fused_launches, 'kernel')}): softmax is computed inside it, in registers."
    else:
        short = f"{_compared(attention)}: {milliseconds(matmul)} against {milliseconds(softmax)}{of}"
        hint: Words = phrase("; give `--model` for the FLOP ratio") if attention.flop_ratio is None else ""
        rest = phrase("{}.{}", hint, _bytes(attention))
    left_out = attention.warmup_occurrences
    warmup = f" Left out are {counted(left_out, 'attention range')} inside warm-up." if left_out else ""
    return Answer(capture.title, phrase("{}{}{}", short, rest, warmup), short)


def _compared(attention: AttentionSummary) -> str:
    """The attention matmuls against softmax, in FLOPs where these are known, and in time."""
    ratio = format_number(attention.runtime_ratio or 0.0, "factor")
    if attention.flop_ratio is None:
        return f"the attention matmuls take {ratio} the time of softmax"
    return f"the attention matmuls do {attention.flop_ratio:.1f}× the FLOPs of softmax in {ratio} its time"


def _bytes(attention: AttentionSummary) -> str:
    """The bandwidth of softmax against the memory's peak, and whether that makes it memory-bound."""
    traffic = attention.softmax_traffic
    if traffic is None:
        return ""
    text = f" Softmax moves at least {format_number(traffic.bytes_per_s, 'bytes/s')}"
    if traffic.peak_share is None:
        return f"{text}; the peak bandwidth of this GPU is not known."
    text += f", {percent(traffic.peak_share)} of the peak of {format_number(traffic.peak_bytes_per_s or 0, 'bytes/s')}"
    return f"{text}: {_bound(traffic)}."


def _bound(traffic: SoftmaxTraffic) -> str:
    size = format_number(traffic.score_bytes, "bytes")
    if traffic.fits_in_l2:
        cache = format_number(traffic.l2_bytes or 0, "bytes")
        return f"its score tensor of {size} fits into the L2 cache of {cache}, which may have served part of it"
    if traffic.memory_bound is None:
        return f"whether a cache holds its score tensor of {size} is not known"
    if traffic.memory_bound:
        return f"memory-bound ({percent(MEMORY_BOUND)} or more)"
    return f"below the {percent(MEMORY_BOUND)} from which it would be called memory-bound"


def _unknown(capture: CaptureSummary) -> Words:
    if capture.whole and capture.whole.opaque:
        return phrase("the kernels of the graph are not in the capture; capture with `--cuda-graph-trace=node`.")
    if _compiled(capture):
        return "the compiled model opens no ranges inside itself: nothing tells attention from the rest of the forward."
    if not capture.phase("forward"):
        return "no forward pass was measured, and no range tells attention from the rest."
    return "no range tells attention from the rest of the forward pass."


def _could_be_annotated(capture: CaptureSummary) -> bool:
    """Whether ranges around attention would answer the question the next time."""
    return not _compiled(capture) and not (capture.whole and capture.whole.opaque)


def _compiled(capture: CaptureSummary) -> bool:
    return bool(capture.run and capture.run.compile)
