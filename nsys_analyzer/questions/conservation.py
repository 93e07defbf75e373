"""Whether every kernel is accounted for, once."""

from __future__ import annotations

from nsys_analyzer.analysis.summary import CaptureSummary
from nsys_analyzer.questions.evidence import Evidence
from nsys_analyzer.report.model import Cell, Column, Paragraph, Section, Table

_COLUMNS = (
    Column("capture"),
    Column("kernels", "count"),
    Column("same thread", "count"),
    Column("other thread", "count"),
    Column("graph", "count"),
    Column("no range", "count"),
    Column("in phases", "count"),
    Column("warm-up", "count"),
    Column("dropped", "count"),
    Column("attributed", "percent"),
)


def answer(evidence: Evidence) -> Section:
    """Attributed + unattributed = all, in count and in time."""
    rows = tuple(_row(capture) for capture in evidence.captures if capture.coverage)
    text = (
        "Same thread + other thread + graph + no range = kernels, each kernel once. *Same thread*: a range was open "
        "on the thread that launched it; *other thread*: it inherited the ranges of the thread that waits for it; "
        "*graph*: launched by the replay of a CUDA graph inside a range; *no range*: unattributed, launched outside "
        "every range. *In phases* counts those in a phase or step, *warm-up* those of them that are left out as "
        "warm-up, *dropped* the launches whose kernel the capture lacks; *attributed* is attributed kernel time ÷ "
        "all kernel time."
    )
    return Section("conservation", "Conservation", (Table(_COLUMNS, rows), Paragraph(text)))


def _row(capture: CaptureSummary) -> tuple[Cell, ...]:
    coverage = capture.coverage
    if coverage is None:
        return (capture.title, *(None for _ in _COLUMNS[1:]))
    return (
        capture.title,
        coverage.kernels,
        coverage.how["same thread"],
        coverage.how["other thread"],
        coverage.how["graph"],
        coverage.unattributed,
        coverage.in_phases,
        coverage.in_warmup,
        coverage.lost_launches,
        coverage.attributed_ms / coverage.kernel_ms if coverage.kernel_ms else None,
    )
