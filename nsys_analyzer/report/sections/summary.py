"""The summary: what a reader sees first."""

from __future__ import annotations

from nsys_analyzer.analysis.kernels.classes import COMMUNICATION
from nsys_analyzer.analysis.ranges.phases import STEP
from nsys_analyzer.analysis.summary.compared import compared_phases, shares_of_all, step_shares
from nsys_analyzer.analysis.summary.summary import CaptureSummary, PhaseSummary
from nsys_analyzer.analysis.summary.verdicts import busy_share
from nsys_analyzer.report.model import Block, Cell, Listing, Paragraph, Section, Table
from nsys_analyzer.report.sections.evidence import FEW, Evidence, ended, status_of
from nsys_analyzer.report.sections.folding import fold_table
from nsys_analyzer.report.sections.sweep import over_sweep, speed_ups
from nsys_analyzer.report.sections.timings import unprofiled_ms
from nsys_analyzer.report.sections.verdicts import busy_of
from nsys_analyzer.report.tables import Field, table
from nsys_analyzer.text import Words, phrase, strong

_LEGEND = (
    "*Step ms, no profiler*: by Python's clock; *step ms, profiled*: the wall time of the step's range; *busy*: the "
    "share of the unprofiled step in which the {} works, or of the profiled one where no other is known (*busy, "
    "profiled*), which is lower wherever the profiler makes the step slower; *matmul*: its share of the total {} time "
    "of the step, or of the forward pass where nothing else was captured; *matmul ÷ softmax*: time of the attention "
    "matmuls against that of softmax."
)


def summarize_answers(evidence: Evidence, sections: tuple[Section, ...]) -> Section:
    """The figures of each capture in a table, then every answer in a sentence; of many captures tables over all."""
    blocks = _of_all(evidence) if len(evidence.captures) > FEW else _of_each(evidence, sections)
    warned = [section for section in sections if section.key == "warnings" and _counted(section)]
    said = [Paragraph(f"{_counted(section)}: see the section {section.title}.") for section in warned]
    return Section("summary", "Summary", (*blocks, *said) or (Paragraph("No capture could be measured."),))


def _counted(section: Section) -> str:
    """The number of warnings, empty where there are none."""
    lines = [line for block in section.blocks if isinstance(block, Listing) for line in block.lines]
    return f"{len(lines)} warning{'' if len(lines) == 1 else 's'}" if lines else ""


def _of_each(evidence: Evidence, sections: tuple[Section, ...]) -> tuple[Block, ...]:
    said: dict[str, list[Words]] = {}
    for section in sections:
        for answer in section.answers:
            said.setdefault(answer.capture, []).append(phrase("{}: {}", section.topic, answer.short))
    blocks: list[Block] = []
    captures = {capture.title: capture for capture in evidence.captures if capture.title in said}
    for title, capture in captures.items():
        figures = table(_fields(evidence, capture), _phases(capture))
        blocks += [Paragraph(strong(title)), *([figures] if figures.rows else []), Listing(tuple(said[title]))]
    return tuple(blocks)


def _phases(capture: CaptureSummary) -> list[PhaseSummary]:
    """The phases that are compared, and the step."""
    compared, step = compared_phases(capture), capture.phase(STEP)
    return [*compared, *([step] if compared and step and step.instances and step not in compared else [])]


def _fields(evidence: Evidence, capture: CaptureSummary) -> tuple[Field[PhaseSummary], ...]:
    tops = {
        phase.phase: next((row for row in phase.kernels if row.kernel_class != COMMUNICATION), None)
        for phase in _phases(capture)
    }

    def name_of_top(phase: PhaseSummary) -> str | None:
        return evidence.labels[top.name] if (top := tops[phase.phase]) else None

    def launches_of_top(phase: PhaseSummary) -> float | None:
        return top.launches_per_instance if (top := tops[phase.phase]) else None

    return (
        Field("phase", "text", lambda phase: phase.label),
        Field("ms, no profiler", "ms", lambda phase: unprofiled_ms(phase.phase, capture)),
        Field("ms, profiled", "ms", lambda phase: phase.wall_ms.median),
        Field("operators busy ms" if capture.on_cpu else "GPU busy ms", "ms", lambda phase: phase.gpu_busy_ms.median),
        Field("matmul", "percent", lambda phase: _matmul(capture, phase)),
        Field(f"top {evidence.kernel}", "code", name_of_top),
        Field("launches", "count", launches_of_top),
    )


def _matmul(capture: CaptureSummary, phase: PhaseSummary) -> float | None:
    shares = step_shares(capture) if phase.phase == STEP else None
    return shares.matmul if shares else phase.share_of("matmul")


def _of_all(evidence: Evidence) -> tuple[Block, ...]:
    """The step by model, context and variant, then a row for each capture."""
    times = over_sweep(evidence, _time, "ms", "Step ms without the profiler", "unprofiled-times")
    faster = speed_ups(evidence, _time, "Speed-up of the step without the profiler")
    rows = table(_OF_CAPTURE, evidence.captures)
    device = "CPU" if evidence.kernel == "operator" else "GPU"
    legend = Paragraph(phrase(_LEGEND, device, evidence.kernel))
    has_tables = any(isinstance(block, Table) for block in times)
    return (*times, *faster, *(fold_table(rows) if has_tables else (rows,)), legend)


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
