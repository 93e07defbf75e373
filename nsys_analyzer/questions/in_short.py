"""The answers in short, before all others."""

from __future__ import annotations

from nsys_analyzer.analysis.summary import CaptureSummary, PhaseSummary
from nsys_analyzer.analysis.verdicts import busy_share
from nsys_analyzer.questions.evidence import FEW, Evidence, status_of
from nsys_analyzer.questions.matmul_share import matmul_of_all
from nsys_analyzer.report.model import Block, Cell, Column, Listing, Paragraph, Section, Table
from nsys_analyzer.text import marked, strong

_STATUS, _BUSY, _BUSY_PROFILED = "status", "busy", "busy, profiled"
_COLUMNS = (
    Column("capture"),
    Column(_STATUS),
    Column("step ms, no profiler", "ms"),
    Column("step ms, profiled", "ms"),
    Column(_BUSY, "percent"),
    Column(_BUSY_PROFILED, "percent"),
    Column("matmul", "percent"),
    Column("products ÷ softmax", "factor"),
)
#: Columns that are left out where they say nothing.
_OPTIONAL = (_STATUS, _BUSY, _BUSY_PROFILED)
_LEGEND = marked(
    "*Step ms, no profiler*: Python's clock; *step ms, profiled*: the wall time of the step's range; *busy*: the share "
    "of the unprofiled step in which the {device} works, or of the profiled one where no other is known (*busy, "
    "profiled*), which is lower wherever the profiler makes the step slower; *matmul*: its share of the {kernel} sum "
    "of the step, or of the forward pass where nothing else was captured; *products ÷ softmax*: time of the attention "
    "products against that of softmax."
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
    return tuple(block for title in titles for block in (Paragraph(strong(title)), Listing(tuple(lines[title]))))


def _rows(evidence: Evidence) -> tuple[Block, ...]:
    device = "CPU" if evidence.kernel == "operator" else "GPU"
    return _table(evidence), Paragraph(_LEGEND.format(device=device, kernel=evidence.kernel))


def _table(evidence: Evidence) -> Table:
    """One row for each capture; how it ended is said only where one of them ended otherwise than well."""
    rows = [_row(capture) for capture in evidence.captures]
    said = [any(row[i] not in (None, "ok") for row in rows) for i in range(len(_COLUMNS))]
    kept = [i for i, column in enumerate(_COLUMNS) if said[i] or column.title not in _OPTIONAL]
    return Table(tuple(_COLUMNS[i] for i in kept), tuple(tuple(row[i] for i in kept) for row in rows))


def _row(capture: CaptureSummary) -> tuple[Cell, ...]:
    step, attention = capture.phase("step"), capture.attention
    return (
        capture.title,
        f"{status_of(capture.status)}{', on the CPU' if capture.on_cpu else ''}",
        capture.unprofiled.typical_ms("step") if capture.unprofiled else None,
        step.wall_ms.median if step else None,
        *_busy(capture, step),
        matmul_of_all(capture),
        attention.runtime_ratio if attention else None,
    )


def _busy(capture: CaptureSummary, step: PhaseSummary | None) -> tuple[float | None, float | None]:
    """Busy ÷ the unprofiled time of the step, else busy ÷ its profiled time; on a CPU always the second."""
    if step is None:
        return None, None
    if share := busy_share(capture, step):
        return (share.low, None) if share.unprofiled else (None, share.low)
    wall, busy = step.wall_ms.median, step.gpu_busy_ms.median
    return None, busy / wall if capture.on_cpu and step.synchronized and busy is not None and wall else None
