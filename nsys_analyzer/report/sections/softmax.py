"""(e) How softmax compares with the attention matmuls, in time, in FLOPs and in bytes."""

from __future__ import annotations

from nsys_analyzer.analysis.summary.summary import CaptureSummary
from nsys_analyzer.analysis.transformer.attention import CAPTURE, FORWARD, AttentionSummary
from nsys_analyzer.analysis.transformer.softmax_traffic import MEMORY_BOUND, SoftmaxTraffic
from nsys_analyzer.report.model import Answer, Block, Paragraph, Section
from nsys_analyzer.report.sections.evidence import Evidence
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
    "Times of one forward pass, over all layers, or of what the column *of* says. Softmax is every kernel launched "
    "inside the softmax ranges (max, subtract, exp, sum, divide), or a softmax by name inside attention where there is "
    "no such range; the attention matmuls are the matmul kernels inside the attention ranges. Softmax counts 5 "
    "operations per score, 5·B·H·S²·L; the matmuls 4·B·S²·d·L; their ratio is 4·d_head ÷ 5. The kernels of softmax "
    "read and write every score for an operation or two each, while a matmul reuses what it loads."
)
_CONVENTION_OF_BYTES = (
    "Softmax's bytes are counted, not measured, and are the least that its kernels move: each reads its score tensor "
    "(B·H·S² elements of the type in the kernel's name) once and writes its result once; max and sum write B·H·S "
    "values, subtract and divide read them. It is called memory-bound where it reaches "
    f"{percent(MEMORY_BOUND)} of the peak bandwidth of the GPU's memory with a score tensor that the L2 cache cannot "
    "hold."
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
    blocks += [Answer(c.title, _sentence(c), _short(c.attention)) for c in evidence.measured]
    if rows := [(capture.title, capture.attention) for capture in evidence.measured if capture.attention]:
        blocks += [found for fields in (_TIMES, _RATES) if (found := table(fields, rows)).rows]
        counted = any(attention.softmax_traffic for _, attention in rows)
        blocks += [Paragraph(phrase("{} {}", _CONVENTION, _CONVENTION_OF_BYTES) if counted else _CONVENTION)]
    if any(capture.attention is None and _could_be_annotated(capture) for capture in evidence.measured):
        blocks.append(Paragraph(_HOW_TO_ANNOTATE))
    return Section("softmax", "(e) How does softmax compare with the attention matmuls?", tuple(blocks), "softmax")


def _ratio(capture: CaptureSummary) -> float | None:
    return capture.attention.runtime_ratio if capture.attention else None


def _of(attention: AttentionSummary) -> str:
    """The scope of the figures, for a table and for a few words."""
    return _ranges(attention.occurrences or 0) if attention.per == CAPTURE else f"one {attention.per}"


def _ranges(count: int) -> str:
    return counted(count, "attention range")


def _short(attention: AttentionSummary | None) -> str:
    if attention is None:
        return "cannot be told from this capture"
    of = "" if attention.per == FORWARD else f" ({_of(attention)})"
    if attention.softmax_ms is None or attention.matmul_ms is None or attention.runtime_ratio is None:
        return f"fused attention, {milliseconds(attention.fused_ms)}{of}"
    times = f"{milliseconds(attention.matmul_ms)} against {milliseconds(attention.softmax_ms)}"
    return f"{_compared(attention)}: {times}{of}"


def _compared(attention: AttentionSummary) -> str:
    """The attention matmuls against softmax, in FLOPs where these are known, and in time."""
    ratio = format_number(attention.runtime_ratio or 0.0, "factor")
    if attention.flop_ratio is None:
        return f"the attention matmuls take {ratio} the time of softmax"
    return f"the attention matmuls do {attention.flop_ratio:.1f}× the FLOPs of softmax in {ratio} its time"


def _sentence(capture: CaptureSummary) -> Words:
    attention = capture.attention
    if attention is None:
        return _unknown(capture)
    if attention.softmax_ms is None or attention.matmul_ms is None or attention.runtime_ratio is None:
        kernels = counted(attention.fused_launches, "kernel")
        return (
            f"attention runs fused, {kernels} and {milliseconds(attention.fused_ms)} "
            f"{_per(attention, attention.fused_ms)}: softmax has no time of its own, it is computed in registers "
            f"between the two matmuls.{_warmup(attention)}"
        )
    each = f" ({_each(attention, attention.softmax_ms)})" if attention.per == CAPTURE else ""
    matmul = f"{milliseconds(attention.matmul_ms)} {_per(attention, attention.matmul_ms)}"
    text = f"{_compared(attention)}: {matmul} against {milliseconds(attention.softmax_ms)}{each}"
    return phrase("{}{}.{}{}", text, _rates(attention), _bytes(attention), _warmup(attention))


def _per(attention: AttentionSummary, ms: float | None) -> str:
    """The scope of a time; over the whole capture with the time of one attention range."""
    if attention.per != CAPTURE or ms is None:
        return f"per {attention.per}"
    return f"in total over {_of(attention)} ({_each(attention, ms)})"


def _each(attention: AttentionSummary, ms: float) -> str:
    return f"{milliseconds(ms / (attention.occurrences or 1))} each"


def _warmup(attention: AttentionSummary) -> str:
    """How much was left out, outside a forward, whose warm-up instances are counted with the phases."""
    left_out = attention.warmup_occurrences
    return f" Left out are {_ranges(left_out)} inside warm-up." if left_out else ""


def _rates(attention: AttentionSummary) -> Words:
    """The FLOP/s of both, or what to give for them."""
    if attention.flop_ratio is None:
        return phrase("; give `--model` for the FLOP ratio")
    softmax, matmul = attention.softmax_flops_per_s, attention.matmul_flops_per_s
    return (
        f" ({format_number(matmul, 'flop/s')} against {format_number(softmax, 'flop/s')})" if softmax and matmul else ""
    )


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
