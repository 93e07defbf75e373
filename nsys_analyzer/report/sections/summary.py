"""The summary: what a reader sees first."""

from __future__ import annotations

from nsys_analyzer.analysis.ranges.phases import STEP
from nsys_analyzer.analysis.summary.compared import shares_of_all
from nsys_analyzer.analysis.summary.summary import CaptureSummary
from nsys_analyzer.analysis.summary.verdicts import busy_share
from nsys_analyzer.report.model import Block, Cell, Listing, Paragraph, Section, Table
from nsys_analyzer.report.sections.evidence import FEW, Evidence, ended, status_of
from nsys_analyzer.report.sections.folding import fold_table
from nsys_analyzer.report.sections.sweep import over_sweep, speed_ups
from nsys_analyzer.report.sections.verdicts import busy_of
from nsys_analyzer.report.tables import Field, table
from nsys_analyzer.text import Words, phrase, plural, strong

_LEGEND = (
    "*Busy*: the share of the step without the profiler in which the {} works; *busy, profiled*: of the step under the "
    "profiler, where no other is known. *Matmul*: its share of the total {} time of the step, or of the forward pass "
    "where nothing else was captured. *Matmul ÷ softmax*: time of the attention matmuls ÷ time of softmax."
)


def summarize_answers(evidence: Evidence, sections: tuple[Section, ...]) -> Section:
    """Figures of each capture in a row; then every answer in a few words, of many captures tables over all instead."""
    rows = table(_OF_CAPTURE, evidence.captures)
    blocks = _of_all(evidence, rows) if len(evidence.captures) > FEW else _of_each(rows, sections)
    if len(rows.columns) > 1:
        device = "CPU" if evidence.kernel == "operator" else "GPU"
        blocks.append(Paragraph(phrase(_LEGEND, device, evidence.kernel)))
    for section in sections:
        lines = [line for block in section.blocks if isinstance(block, Listing) for line in block.lines]
        if section.key == "warnings" and lines:
            blocks.append(Paragraph(f"{len(lines)} {plural(len(lines), 'warning')}: see the section {section.title}."))
    return Section("summary", "Summary", tuple(blocks))


def _of_each(rows: Table, sections: tuple[Section, ...]) -> list[Block]:
    said: dict[str, list[Words]] = {}
    for section in sections:
        for answer in section.answers:
            said.setdefault(answer.capture, []).append(phrase("{}: {}", section.topic, answer.short))
    blocks: list[Block] = [rows] if rows.rows else []
    blocks += [] if said else [Paragraph("No capture could be measured.")]
    for title, lines in said.items():
        blocks += [Paragraph(strong(title)), Listing(tuple(lines))]
    return blocks


def _of_all(evidence: Evidence, rows: Table) -> list[Block]:
    """The step by model, context and variant, then the rows, folded where these tables say the most of them."""
    blocks: list[Block] = [*over_sweep(evidence, _time, "ms", "Step ms without the profiler", "unprofiled-times")]
    has_tables = any(isinstance(block, Table) for block in blocks)
    blocks += speed_ups(evidence, _time, "Speed-up of the step without the profiler")
    return [*blocks, *(fold_table(rows) if has_tables else (rows,))]


def _said(cell: Cell) -> bool:
    return cell not in (None, "ok")


def _time(capture: CaptureSummary) -> Cell:
    """The unprofiled time of a step, of a run without any the word for how it ended."""
    unprofiled = capture.unprofiled
    return (unprofiled.typical_ms(STEP) or ended(unprofiled)) if unprofiled else None


def _step_ms(capture: CaptureSummary) -> float | None:
    step = capture.phase(STEP)
    return step.wall_ms.median if step else None


def _busy_profiled(capture: CaptureSummary) -> float | None:
    """Busy ÷ the profiled time of the step, where its unprofiled time is unknown, and on a CPU."""
    step = capture.phase(STEP)
    if step is None:
        return None
    if share := busy_share(capture, step):
        return None if share.unprofiled else share.low
    wall, busy = step.wall_ms.median, step.gpu_busy_ms.median
    return busy / wall if capture.on_cpu and step.synchronized and busy is not None and wall else None


_OF_CAPTURE: tuple[Field[CaptureSummary], ...] = (
    Field("capture", "text", lambda c: c.title),
    # How a capture ended is said where one of them ended otherwise than well.
    Field("status", "text", lambda c: f"{status_of(c.status)}{', on the CPU' if c.on_cpu else ''}", _said),
    Field("step ms, no profiler", "ms", lambda c: c.unprofiled.typical_ms(STEP) if c.unprofiled else None),
    Field("step ms, profiled", "ms", _step_ms),
    Field("busy", "percent", busy_of),
    Field("busy, profiled", "percent", _busy_profiled),
    Field("matmul", "percent", lambda c: shares.matmul if (shares := shares_of_all(c)) else None),
    Field("matmul ÷ softmax", "factor", lambda c: c.attention.runtime_ratio if c.attention else None),
)
