"""Under which conditions the captures were taken."""

from __future__ import annotations

from nsys_analyzer.analysis.summary import CaptureSummary
from nsys_analyzer.questions.evidence import Evidence
from nsys_analyzer.report.model import Cell, Column, Paragraph, Section, Table
from nsys_analyzer.report.units import percent

_COLUMNS = (
    Column("capture"),
    Column("GPU"),
    Column("memory", "bytes"),
    Column("SMs", "count"),
    Column("driver"),
    Column("CUDA"),
    Column("nsys"),
    Column("schema"),
    Column("precision of the products"),
)


def answer(evidence: Evidence) -> Section:
    """GPU, driver, versions, and the precision that the kernels' names show."""
    table = Table(_COLUMNS, tuple(_row(capture) for capture in evidence.captures if capture.metadata))
    note = Paragraph(
        "The precision is read from the names of the matmul and fused attention kernels, by their time; it is what "
        "ran, not what was asked for. A name that does not say (a split-K reduction) is not counted."
    )
    return Section("conditions", "Capture conditions", (table, note))


def _row(capture: CaptureSummary) -> tuple[Cell, ...]:
    gpu, metadata = capture.gpu, capture.metadata
    known = {name: share for name, share in capture.precisions.items() if name != "unknown"}
    total = sum(known.values())
    precision = ", ".join(
        name if len(known) == 1 else f"{name} {percent(share / total)}" for name, share in known.items()
    )
    return (
        capture.title,
        gpu.name if gpu else None,
        gpu.memory_bytes or None if gpu else None,
        gpu.sm_count or None if gpu else None,
        metadata.driver if metadata else None,
        metadata.cuda if metadata else None,
        metadata.nsys_version if metadata else None,
        metadata.schema_version if metadata else None,
        precision or None,
    )
