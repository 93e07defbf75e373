"""The answers in short, before all others."""

from __future__ import annotations

from nsys_analyzer.analysis.summary import CaptureSummary
from nsys_analyzer.questions.evidence import FEW, Evidence, status_of
from nsys_analyzer.questions.matmul_share import matmul_of_all
from nsys_analyzer.report.model import Block, Cell, Column, Listing, Paragraph, Section, Table

_STATUS = "status"
_COLUMNS = (
    Column("capture"),
    Column(_STATUS),
    Column("step ms, no profiler", "ms"),
    Column("step ms, profiled", "ms"),
    Column("busy, profiled", "percent"),
    Column("matmul", "percent"),
    Column("products ÷ softmax", "factor"),
)
_LEGEND = (
    "*Step ms, no profiler*: Python's clock; *step ms, profiled*: the wall time of the step's range; *busy, profiled*: "
    "the share of that in which the {device} works, which is higher without the profiler wherever that makes the step "
    "faster; *matmul*: its share of the {kernel} sum of the step, or of the forward pass where nothing else was "
    "captured; *products ÷ softmax*: time of the attention products against that of softmax."
)


def summarize_answers(evidence: Evidence, sections: tuple[Section, ...]) -> Section:
    """Every answer in a few words, capture by capture; of many captures a row each, their words are the sections'."""
    blocks = _rows(evidence) if len(evidence.captures) > FEW else _words(evidence, sections)
    return Section("in_short", "In short", blocks or (Paragraph("No capture could be measured."),))


def _words(evidence: Evidence, sections: tuple[Section, ...]) -> tuple[Block, ...]:
    lines: dict[str, list[str]] = {}
    for section in sections:
        for answer in section.answers:
            lines.setdefault(answer.capture, []).append(f"{section.topic}: {answer.short}")
    titles = dict.fromkeys(capture.title for capture in evidence.captures if capture.title in lines)
    return tuple(block for title in titles for block in (Paragraph(f"**{title}**"), Listing(tuple(lines[title]))))


def _rows(evidence: Evidence) -> tuple[Block, ...]:
    device = "CPU" if evidence.kernel == "operator" else "GPU"
    return _table(evidence), Paragraph(_LEGEND.format(device=device, kernel=evidence.kernel))


def _table(evidence: Evidence) -> Table:
    """One row for each capture; how it ended is said only where one of them ended otherwise than well."""
    rows = [_row(capture) for capture in evidence.captures]
    kept = [i for i, column in enumerate(_COLUMNS) if column.title != _STATUS or any(row[i] != "ok" for row in rows)]
    return Table(tuple(_COLUMNS[i] for i in kept), tuple(tuple(row[i] for i in kept) for row in rows))


def _row(capture: CaptureSummary) -> tuple[Cell, ...]:
    step, attention = capture.phase("step"), capture.attention
    wall, busy = (step.wall_ms.median, step.gpu_busy_ms.median) if step else (None, None)
    return (
        capture.title,
        f"{status_of(capture.status)}{', on the CPU' if capture.on_cpu else ''}",
        capture.unprofiled.mean_ms("step") if capture.unprofiled else None,
        wall,
        busy / wall if step and step.synchronized and busy is not None and wall else None,
        matmul_of_all(capture),
        attention.runtime_ratio if attention else None,
    )
