"""Under which conditions the captures were taken."""

from __future__ import annotations

from nsys_analyzer.analysis.runs import RunConditions
from nsys_analyzer.analysis.summary import CaptureSummary
from nsys_analyzer.questions.evidence import Evidence
from nsys_analyzer.report.model import Cell, Column, Paragraph, Section, Table
from nsys_analyzer.report.units import percent
from nsys_analyzer.trace.metadata import Metadata

_DEVICE = (
    Column("capture"),
    Column("GPU"),
    Column("memory", "bytes"),
    Column("SMs", "count"),
    Column("driver"),
    Column("CUDA"),
)
_RECORDED = (
    Column("capture"),
    Column("profiler"),
    Column("schema"),
    Column("torch"),
    Column("precision of the products"),
)
_ASKED = tuple(
    Column(title) for title in ("capture", "precision", "attention", "compiled", "CUDA graph", "optimizer", "seed")
)
_PRECISION = Paragraph(
    "The precision is read from the names of the matmul and fused attention kernels, by their time; it is what "
    "ran, not what was asked for. A name that does not say (a split-K reduction) is not counted."
)


def answer(evidence: Evidence) -> Section:
    """GPU, driver, versions, the precision that the kernels' names show, and what the runs say they asked for."""
    traced = [(capture, capture.metadata) for capture in evidence.captures if capture.metadata]
    runs = [(capture.title, capture.run) for capture in evidence.captures if capture.run]
    device = _table(_DEVICE, [_device(*one) for one in traced])
    recorded = _table(_RECORDED, [_recorded(*one) for one in traced])
    asked = _table(_ASKED, [_asked(*one) for one in runs], "What was asked for, as each run's manifest says:")
    blocks = (*((device, recorded, _PRECISION) if traced else ()), *((asked,) if len(asked.columns) > 1 else ()))
    return Section("conditions", "Capture conditions", blocks)


def _table(columns: tuple[Column, ...], rows: list[tuple[Cell, ...]], caption: str = "") -> Table:
    """The table without the optional columns that no row fills."""
    optional = ("torch", *(column.title for column in _ASKED[1:]))
    kept = [
        i for i, column in enumerate(columns) if column.title not in optional or any(row[i] is not None for row in rows)
    ]
    return Table(tuple(columns[i] for i in kept), tuple(tuple(row[i] for i in kept) for row in rows), caption)


def _device(capture: CaptureSummary, metadata: Metadata) -> tuple[Cell, ...]:
    gpu = None if capture.on_cpu else capture.gpu
    return (
        capture.title,
        "none (CPU)" if capture.on_cpu else gpu.name if gpu else None,
        gpu.memory_bytes or None if gpu else None,
        gpu.sm_count or None if gpu else None,
        metadata.driver,
        metadata.cuda,
    )


def _recorded(capture: CaptureSummary, metadata: Metadata) -> tuple[Cell, ...]:
    known = {name: share for name, share in capture.precisions.items() if name != "unknown"}
    total = sum(known.values())
    precision = ", ".join(
        name if len(known) == 1 else f"{name} {percent(share / total)}" for name, share in known.items()
    )
    return (
        capture.title,
        f"{metadata.profiler} {metadata.profiler_version}",
        metadata.schema_version,
        capture.run.torch if capture.run else None,
        precision or None,
    )


def _asked(title: str, run: RunConditions) -> tuple[Cell, ...]:
    return (
        title,
        run.precision,
        run.attention,
        _yes_or_no(run.compile),
        _yes_or_no(run.cuda_graph),
        run.optimizer,
        None if run.seed is None else str(run.seed),
    )


def _yes_or_no(flag: bool | None) -> str | None:
    return None if flag is None else "yes" if flag else "no"
