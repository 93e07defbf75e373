"""The answers in short, before all others."""

from __future__ import annotations

from nsys_analyzer.analysis.compared import shares_of_all
from nsys_analyzer.analysis.summary import CaptureSummary
from nsys_analyzer.analysis.verdicts import busy_share
from nsys_analyzer.questions.evidence import FEW, Evidence, status_of
from nsys_analyzer.report.model import Block, Cell, Listing, Paragraph, Section
from nsys_analyzer.report.tables import Field, table
from nsys_analyzer.text import marked, strong

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
    return table(_FIELDS, evidence.captures), Paragraph(_LEGEND.format(device=device, kernel=evidence.kernel))


def _said(cell: Cell) -> bool:
    return cell not in (None, "ok")


def _step_ms(capture: CaptureSummary) -> float | None:
    step = capture.phase("step")
    return step.wall_ms.median if step else None


def _busy(capture: CaptureSummary) -> float | None:
    """Busy ÷ the unprofiled time of the step, on a GPU."""
    step = capture.phase("step")
    share = busy_share(capture, step) if step else None
    return share.low if share and share.unprofiled else None


def _busy_profiled(capture: CaptureSummary) -> float | None:
    """Busy ÷ the profiled time of the step, where its unprofiled time is unknown, and on a CPU."""
    step = capture.phase("step")
    if step is None:
        return None
    if share := busy_share(capture, step):
        return None if share.unprofiled else share.low
    wall, busy = step.wall_ms.median, step.gpu_busy_ms.median
    return busy / wall if capture.on_cpu and step.synchronized and busy is not None and wall else None


_FIELDS: tuple[Field[CaptureSummary], ...] = (
    Field("capture", "text", lambda c: c.title),
    # How a capture ended is said where one of them ended otherwise than well.
    Field("status", "text", lambda c: f"{status_of(c.status)}{', on the CPU' if c.on_cpu else ''}", _said),
    Field("step ms, no profiler", "ms", lambda c: c.unprofiled.typical_ms("step") if c.unprofiled else None),
    Field("step ms, profiled", "ms", _step_ms),
    Field("busy", "percent", _busy),
    Field("busy, profiled", "percent", _busy_profiled),
    Field("matmul", "percent", lambda c: shares.matmul if (shares := shares_of_all(c)) else None),
    Field("products ÷ softmax", "factor", lambda c: c.attention.runtime_ratio if c.attention else None),
)
