"""The answers in short, before all others."""

from __future__ import annotations

from nsys_analyzer.analysis.summary import CaptureSummary
from nsys_analyzer.questions.evidence import FEW, Evidence, status_of
from nsys_analyzer.questions.matmul_share import matmul_of_step
from nsys_analyzer.report.model import Block, Cell, Column, Details, Listing, Paragraph, Section, Table

_COLUMNS = (
    Column("capture"),
    Column("status"),
    Column("step ms, no profiler", "ms"),
    Column("step ms, profiled", "ms"),
    Column("GPU busy", "percent"),
    Column("matmul of step", "percent"),
    Column("products ÷ softmax", "factor"),
)
_LEGEND = (
    "*Step ms, no profiler*: Python's clock; *step ms, profiled*: the wall time of the step's range; *GPU busy*: its "
    "share of that; *matmul of step*: its share of the step's kernel sum; *products ÷ softmax*: time of the attention "
    "products against that of softmax."
)


def summarize_answers(evidence: Evidence, sections: tuple[Section, ...]) -> Section:
    """Every answer in a few words, capture by capture; of many captures a row each, the words folded."""
    lines: dict[str, list[str]] = {}
    for section in sections:
        for answer in section.answers:
            lines.setdefault(answer.capture, []).append(f"{section.topic}: {answer.short}")
    blocks: list[Block] = []
    for title in dict.fromkeys(capture.title for capture in evidence.captures):
        blocks += [Paragraph(f"**{title}**"), Listing(tuple(lines[title]))] if title in lines else []
    if len(evidence.captures) > FEW:
        rows = tuple(_row(capture) for capture in evidence.captures)
        folded = [Details(f"In words: {len(lines)} captures", tuple(blocks))] if blocks else []
        blocks = [Table(_COLUMNS, rows), Paragraph(_LEGEND), *folded]
    return Section("in_short", "In short", tuple(blocks) or (Paragraph("No capture could be measured."),))


def _row(capture: CaptureSummary) -> tuple[Cell, ...]:
    step, attention = capture.phase("step"), capture.attention
    wall, busy = (step.wall_ms.mean, step.gpu_busy_ms.mean) if step else (None, None)
    return (
        capture.title,
        f"{status_of(capture.status)}{', on the CPU' if capture.on_cpu else ''}",
        capture.unprofiled.mean_ms("step") if capture.unprofiled else None,
        wall,
        busy / wall if step and step.synchronized and busy is not None and wall else None,
        matmul_of_step(capture),
        attention.runtime_ratio if attention else None,
    )
