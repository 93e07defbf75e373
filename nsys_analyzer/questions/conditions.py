"""Under which conditions the captures were taken."""

from __future__ import annotations

from dataclasses import replace

from nsys_analyzer.analysis.runs import RunConditions
from nsys_analyzer.analysis.summary import CaptureSummary
from nsys_analyzer.questions.evidence import FEW, Evidence
from nsys_analyzer.report.model import Block, Cell, Column, Details, Paragraph, Section, Table
from nsys_analyzer.report.units import percent
from nsys_analyzer.trace.metadata import Metadata

_UNITS, _RUNTIME = "SMs", "CUDA"  # for other platforms by other names
_DEVICE = (
    Column("capture"),
    Column("GPU"),
    Column("memory", "bytes"),
    Column(_UNITS, "count"),
    Column("driver"),
    Column(_RUNTIME),
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
    many = len(traced) > FEW
    runs = [(c.title, c.run) for c in evidence.captures if c.run and not (many and c.metadata)]
    of_runs = "of the runs without a trace, as their manifests say" if many else "for, as each run's manifest says"
    asked = _table(_ASKED, [_asked(*one) for one in runs], f"What was asked {of_runs}:")
    blocks: list[Block] = []
    if many:
        blocks += [Details(f"Capture by capture: {len(traced)} rows", (_together(traced),)), _PRECISION]
    elif traced:
        device = _table(_for_platforms(_DEVICE, traced), [_device(*one) for one in traced])
        blocks += [device, _table(_RECORDED, [_recorded(*one) for one in traced]), _PRECISION]
    blocks += [asked] if len(asked.columns) > 1 else []
    return Section("conditions", "Capture conditions", tuple(blocks))


def _together(traced: list[tuple[CaptureSummary, Metadata]]) -> Table:
    """The three tables as one: of many captures most columns are the same in every row, which is said once."""
    asked = tuple(replace(c, title="precision asked for") if c.title == "precision" else c for c in _ASKED[1:])
    rows = [(*_device(*one), *_recorded(*one)[1:], *_asked("", one[0].run or RunConditions())[1:]) for one in traced]
    return _table((*_for_platforms(_DEVICE, traced), *_RECORDED[1:], *asked), rows)


def _for_platforms(columns: tuple[Column, ...], traced: list[tuple[CaptureSummary, Metadata]]) -> tuple[Column, ...]:
    """The columns with the platforms' own words: "CUDA", "HIP", or "CUDA / HIP" where the captures have both."""
    known = [metadata for _, metadata in traced]
    words = {
        _UNITS: " / ".join(dict.fromkeys(metadata.units for metadata in known)),
        _RUNTIME: " / ".join(dict.fromkeys(metadata.platform for metadata in known)),
    }
    return tuple(replace(column, title=words.get(column.title, column.title)) for column in columns)


def _table(columns: tuple[Column, ...], rows: list[tuple[Cell, ...]], caption: str = "") -> Table:
    """The table without the optional columns that no row fills."""
    optional = {"torch", "precision asked for", *(column.title for column in _ASKED[1:])}
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
        metadata.runtime,
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
