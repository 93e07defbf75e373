"""The summary: what a reader sees first."""

from __future__ import annotations

from collections.abc import Iterator

from nsys_analyzer.analysis.kernels.class_rules import COMMUNICATION
from nsys_analyzer.analysis.ranges.phases import STEP
from nsys_analyzer.analysis.summary.complete import compared_phases
from nsys_analyzer.analysis.summary.statistics import KernelRow
from nsys_analyzer.analysis.summary.summary import CaptureSummary, PhaseSummary
from nsys_analyzer.report.evidence import FEW, Evidence, ended, status_of
from nsys_analyzer.report.model import Block, Cell, Listing, Paragraph, Section, Table
from nsys_analyzer.report.sections.findings import first_to_fix, in_lines
from nsys_analyzer.report.sections.folding import fold_table
from nsys_analyzer.report.sections.ranks import of_one_side
from nsys_analyzer.report.sections.sweep import over_sweep, speed_ups
from nsys_analyzer.report.sections.timings import unprofiled_ms
from nsys_analyzer.report.sections.verdicts import busy_of
from nsys_analyzer.report.tables import Field, table
from nsys_analyzer.text import Words, phrase, plural, strong

_LEGEND = (
    "*Busy*: the share of the step without the profiler in which the {} works; *busy, profiled*: of the step under the "
    "profiler, where no other is known. *Matmul*: its share of the total {} time of the step, or of the forward pass "
    "where nothing else was captured. *Matmul ÷ softmax*: time of the attention matmuls ÷ time of softmax."
)


def summarize_answers(evidence: Evidence, sections: tuple[Section, ...]) -> Section:
    """The phases of each capture and every answer in a few words; of many captures tables over all instead."""
    rows = table(_OF_CAPTURE, evidence.captures)
    blocks = _of_all(evidence, rows) if len(evidence.captures) > FEW else _of_each(evidence, rows, sections)
    blocks = [*of_one_side(evidence), *blocks]
    if len(evidence.captures) > 1 and len(rows.columns) > 1:
        device = "CPU" if evidence.kernel == "operator" else "GPU"
        blocks.append(Paragraph(phrase(_LEGEND, device, evidence.kernel)))
    for section in sections:
        lines = [line for block in section.blocks if isinstance(block, Listing) for line in block.lines]
        if section.key == "warnings" and lines:
            blocks.append(Paragraph(f"{len(lines)} {plural(len(lines), 'warning')}: see the section {section.title}."))
    return Section("summary", "Summary", tuple(blocks))


def _of_each(evidence: Evidence, rows: Table, sections: tuple[Section, ...]) -> list[Block]:
    """The rows of several captures, then what to do first in each, its phases in a table, and its answers in a line."""
    said: dict[str, list[Words]] = {}
    for section in sections:
        for answer in section.answers:
            capture = _named(evidence, answer.capture)
            more = () if capture and first_to_fix(capture) else answer.more
            said.setdefault(answer.capture, []).extend((phrase("{}: {}", section.topic, answer.short), *more))
    blocks: list[Block] = [rows] if len(rows.rows) > 1 else []
    blocks += [] if said else [Paragraph("No capture could be measured.")]
    for title, lines in said.items():
        capture = _named(evidence, title)
        blocks.append(Paragraph(strong(title)))
        if capture and first_to_fix(capture):
            blocks += [Paragraph("What to do first:"), Listing(in_lines(capture))]
        figures = table(_fields(evidence), list(_phases(capture)) if capture else [])
        blocks += [*([figures] if figures.rows else []), Listing(tuple(lines))]
    return blocks


def _named(evidence: Evidence, title: str) -> CaptureSummary | None:
    """The capture of a title; none is called as a run of several."""
    return next((capture for capture in evidence.captures if capture.title == title), None)


#: A phase of a capture: its name, and what was recorded of it.
_Part = tuple[CaptureSummary, str, PhaseSummary | None]


def _phases(capture: CaptureSummary) -> Iterator[_Part]:
    """The phases that are compared, the others that were timed, and the step."""
    compared = compared_phases(capture)
    shown = {phase.phase: phase for phase in compared}
    timed = [name for name in (capture.unprofiled.phases if capture.unprofiled else ()) if unprofiled_ms(name, capture)]
    others = [name for name in timed if name not in shown and name != STEP]
    last = [STEP] if compared and STEP not in shown and (STEP in timed or capture.phase(STEP)) else []
    for name in (*shown, *others, *last):
        phase = shown.get(name) or capture.phase(name)
        yield capture, name, phase if phase and phase.instances else None


def _fields(evidence: Evidence) -> tuple[Field[_Part], ...]:
    def top(part: _Part) -> KernelRow | None:
        kernels = part[2].kernels if part[2] else ()
        return next((row for row in kernels if row.kernel_class != COMMUNICATION), None)

    busy = "GPU busy ms" if evidence.kernel == "kernel" else "operators busy ms"
    return (
        Field("phase", "text", lambda part: part[2].label if part[2] else part[1]),
        Field("ms, no profiler", "ms", lambda part: unprofiled_ms(part[1], part[0])),
        Field("ms, profiled", "ms", lambda part: part[2].wall_ms.median if part[2] else None),
        Field(busy, "ms", lambda part: part[2].gpu_busy_ms.median if part[2] and part[2].kernels else None),
        Field("matmul", "percent", _matmul_of_phase),
        Field(f"top {evidence.kernel}", "code", lambda part: evidence.labels[row.name] if (row := top(part)) else None),
        Field("launches", "count", lambda part: row.launches_per_instance if (row := top(part)) else None),
    )


def _matmul_of_phase(part: _Part) -> float | None:
    capture, name, phase = part
    shares = capture.matmul.step if capture.matmul and name == STEP else None
    return shares.matmul if shares else phase.share_of("matmul") if phase else None


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
    return capture.step.length_ms if capture.step and not capture.step.is_pass else None


def _busy_profiled(capture: CaptureSummary) -> float | None:
    """Busy ÷ the profiled time of the step, where its unprofiled time is unknown, and on a CPU."""
    step = capture.phase(STEP)
    if step is None:
        return None
    if share := step.busy_share:
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
    Field("matmul", "percent", lambda c: shares.matmul if (shares := c.matmul and c.matmul.of_all) else None),
    Field("matmul ÷ softmax", "factor", lambda c: c.attention.runtime_ratio if c.attention else None),
)
