"""(e) How softmax compares with the attention products, in time and in FLOPs."""

from __future__ import annotations

from nsys_analyzer.analysis.attention import AttentionSummary
from nsys_analyzer.analysis.summary import CaptureSummary
from nsys_analyzer.questions.evidence import Evidence
from nsys_analyzer.report.model import Answer, Cell, Column, Paragraph, Section, Table
from nsys_analyzer.report.units import format_number, milliseconds

_COLUMNS = (
    Column("capture"),
    Column("softmax ms", "ms"),
    Column("products ms", "ms"),
    Column("time: products ÷ softmax", "factor"),
    Column("FLOPs: products ÷ softmax", "factor"),
    Column("softmax", "flop/s"),
    Column("products", "flop/s"),
    Column("fused ms", "ms"),
    Column("fused", "flop/s"),
)
_CONVENTION = (
    "Times of one forward pass, over all layers. Softmax is every kernel launched inside the softmax ranges (max, "
    "subtract, exp, sum, divide), or a softmax by name inside attention where there is no such range; the products "
    "are the matmul kernels inside the attention ranges. Softmax counts 5 operations per score, 5·B·H·S²·L; the "
    "products 4·B·S²·d·L; their ratio is 4·d_head ÷ 5. The kernels of softmax read and write every score for an "
    "operation or two each, which memory bandwidth bounds, while a product reuses what it loads."
)

_HOW_TO_ANNOTATE = (
    "To tell attention from the rest, wrap it in an NVTX range `scaled dot product attention`, and its parts in "
    "`computing attention scores`, `computing softmax` and `final matmul`; or name the ranges there are with "
    "`--phase attention=NAME --phase scores=NAME --phase softmax=NAME --phase values=NAME`."
)


def answer(evidence: Evidence) -> Section:
    """Runtime ratio, FLOP ratio, achieved FLOP/s, and why they differ."""
    answers = tuple(
        Answer(capture.title, _sentence(capture), _short(capture.attention)) for capture in evidence.measured
    )
    rows = tuple(_row(capture.title, capture.attention) for capture in evidence.measured if capture.attention)
    kept = [i for i in range(len(_COLUMNS)) if any(row[i] is not None for row in rows)]
    filled = Table(tuple(_COLUMNS[i] for i in kept), tuple(tuple(row[i] for i in kept) for row in rows))
    table = (filled, Paragraph(_CONVENTION)) if rows else ()
    unknown = any(
        capture.attention is None and capture.phase("forward") and not _compiled(capture)
        for capture in evidence.measured
    )
    hint = (Paragraph(_HOW_TO_ANNOTATE),) if unknown else ()
    return Section(
        "softmax", "(e) How does softmax compare with the attention products?", (*answers, *table, *hint), "softmax"
    )


def _row(title: str, attention: AttentionSummary) -> tuple[Cell, ...]:
    both = (attention.matmul_flops or 0) + (attention.softmax_flops or 0)
    return (
        title,
        attention.softmax_ms,
        attention.matmul_ms,
        attention.runtime_ratio,
        attention.flop_ratio,
        _rate(attention.softmax_flops, attention.softmax_ms),
        _rate(attention.matmul_flops, attention.matmul_ms),
        attention.fused_ms,
        _rate(both or None, attention.fused_ms),
    )


def _short(attention: AttentionSummary | None) -> str:
    if attention is None:
        return "cannot be told from this capture"
    if attention.softmax_ms is None or attention.matmul_ms is None:
        return f"fused attention, {milliseconds(attention.fused_ms)}"
    ratio = format_number(attention.matmul_ms / attention.softmax_ms, "factor")
    flops = f" and {attention.flop_ratio:.1f}× the FLOPs" if attention.flop_ratio else ""
    return (
        f"products {milliseconds(attention.matmul_ms)}, softmax {milliseconds(attention.softmax_ms)}: "
        f"products are {ratio} the time{flops}"
    )


def _rate(flops: int | None, ms: float | None) -> float | None:
    """Achieved FLOP/s."""
    return flops / (ms / 1e3) if flops and ms else None


def _sentence(capture: CaptureSummary) -> str:
    attention = capture.attention
    if attention is None:
        return _unknown(capture)
    if attention.softmax_ms is None or attention.matmul_ms is None or attention.runtime_ratio is None:
        return (
            f"attention runs fused, {attention.fused_launches:,.0f} kernels and {milliseconds(attention.fused_ms)} per "
            "forward: softmax has no time of its own, it is computed in registers between the two products."
        )
    text = (
        f"the attention products take {milliseconds(attention.matmul_ms)} per forward, "
        f"{format_number(attention.runtime_ratio, 'factor')} the {milliseconds(attention.softmax_ms)} of softmax"
    )
    return f"{text}{_flops(attention, capture.on_cpu)}."


def _flops(attention: AttentionSummary, on_cpu: bool) -> str:
    """What the FLOPs say, where the dimensions are known."""
    if attention.flop_ratio is None:
        return "; give `--model` for the FLOP ratio"
    text = f", and do {attention.flop_ratio:.1f}× its FLOPs"
    softmax = _rate(attention.softmax_flops, attention.softmax_ms)
    products = _rate(attention.matmul_flops, attention.matmul_ms)
    if softmax and products:
        text += f" ({format_number(products, 'flop/s')} against {format_number(softmax, 'flop/s')})"
        if softmax < products and not on_cpu:
            text += ": softmax is bound by memory bandwidth"
    return text


def _unknown(capture: CaptureSummary) -> str:
    if capture.whole and capture.whole.opaque:
        return "the kernels of the graph are not in the capture; capture with `--cuda-graph-trace=node`."
    if not capture.phase("forward"):
        return "no forward pass was measured."
    if _compiled(capture):
        return "the compiled model opens no ranges inside itself: nothing tells attention from the rest of the forward."
    return "no range tells attention from the rest of the forward pass."


def _compiled(capture: CaptureSummary) -> bool:
    return bool(capture.run and capture.run.compile)
