"""The summary: what a reader sees first."""

from __future__ import annotations

from dataclasses import dataclass

from nsys_analyzer.analysis.kernels.classes import COMMUNICATION
from nsys_analyzer.analysis.ranges.phases import STEP
from nsys_analyzer.analysis.summary.compared import compared_phases, shares_of_all, step_shares
from nsys_analyzer.analysis.summary.statistics import KernelRow
from nsys_analyzer.analysis.summary.summary import CaptureSummary, PhaseSummary
from nsys_analyzer.analysis.summary.verdicts import busy_share
from nsys_analyzer.report.model import Block, Cell, Details, Listing, Paragraph, Section
from nsys_analyzer.report.sections.evidence import FEW, Evidence, ended, status_of
from nsys_analyzer.report.sections.pivots import pivots, speed_ups
from nsys_analyzer.report.sections.verdicts import busy_of
from nsys_analyzer.report.tables import Field, table
from nsys_analyzer.text import Words, phrase, strong

#: Rows of captures that a screen holds.
_SCREEN = 12
_LEGEND = (
    "*Step ms, no profiler*: by Python's clock; *step ms, profiled*: the wall time of the step's range; *busy*: the "
    "share of the unprofiled step in which the {} works, or of the profiled one where no other is known (*busy, "
    "profiled*), which is lower wherever the profiler makes the step slower; *matmul*: its share of the total {} time "
    "of the step, or of the forward pass where nothing else was captured; *matmul ÷ softmax*: time of the attention "
    "matmuls against that of softmax."
)


@dataclass(frozen=True)
class _Row:
    """A phase of a capture: its times in ms, matmul's share of its kernels' time, and the kernel that leads."""

    phase: str
    unprofiled_ms: float | None
    wall_ms: float | None
    busy_ms: float | None
    matmul: float | None
    top_kernel: KernelRow | None


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
        figures = table(_fields(evidence), _rows(capture), names=1)
        blocks += [Paragraph(strong(title)), *([figures] if figures.rows else []), Listing(tuple(said[title]))]
    return tuple(blocks)


def _fields(evidence: Evidence) -> tuple[Field[_Row], ...]:
    busy = "busy ms" if evidence.kernel == "operator" else "GPU busy ms"
    return (
        Field("phase", "text", lambda row: row.phase),
        Field("ms, no profiler", "ms", lambda row: row.unprofiled_ms),
        Field("ms, profiled", "ms", lambda row: row.wall_ms),
        Field(busy, "ms", lambda row: row.busy_ms),
        Field("matmul", "percent", lambda row: row.matmul),
        Field(
            f"top {evidence.kernel}",
            "code",
            lambda row: evidence.labels[row.top_kernel.name] if row.top_kernel else None,
        ),
        Field("launches", "count", lambda row: row.top_kernel.launches_per_instance if row.top_kernel else None),
    )


def _rows(capture: CaptureSummary) -> list[_Row]:
    """The phases that are compared and the step; of a run without a trace the phases that it timed itself."""
    times = capture.unprofiled.phases if capture.unprofiled else {}
    compared = compared_phases(capture)
    if not compared:
        return [_Row(name, stats.typical, None, None, None, None) for name, stats in times.items()]
    step = capture.phase(STEP)
    phases = [*compared, *([step] if step and step.instances and step not in compared else [])]
    return [_row(capture, phase) for phase in phases]


def _row(capture: CaptureSummary, phase: PhaseSummary) -> _Row:
    unprofiled = capture.unprofiled.typical_ms(phase.phase) if capture.unprofiled else None
    shares = step_shares(capture) if phase.phase == STEP else None
    matmul = shares.matmul if shares else phase.share_of("matmul")
    top = next((row for row in phase.kernels if row.kernel_class != COMMUNICATION), None)
    return _Row(phase.label, unprofiled, phase.wall_ms.median, phase.gpu_busy_ms.median, matmul, top)


def _of_all(evidence: Evidence) -> tuple[Block, ...]:
    """The step by model, context and variant, then a row for each capture, of many those that were profiled."""
    times = pivots(evidence.captures, _time, "ms", "Step ms without the profiler")
    faster = speed_ups(evidence.captures, _time, "the step without the profiler")
    blocks: list[Block] = [*times, *([faster] if faster else [])]
    rows = table(_OF_CAPTURE, evidence.captures)
    if len(rows.rows) <= _SCREEN or not times:
        blocks.append(rows)
    else:
        profiled = table(_OF_CAPTURE, evidence.measured)
        blocks += [profiled] if 0 < len(profiled.rows) <= _SCREEN else []
        blocks.append(Details(f"All captures: {len(rows.rows)} rows", (rows,)))
    device = "CPU" if evidence.kernel == "operator" else "GPU"
    return (*blocks, Paragraph(phrase(_LEGEND, device, evidence.kernel)))


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
