"""Under which conditions the captures were taken."""

from __future__ import annotations

from collections.abc import Sequence

from nsys_analyzer.analysis.summary.summary import CaptureSummary
from nsys_analyzer.configuration import OPTIONS, Option, Run, Value
from nsys_analyzer.report.model import Block, Paragraph, Section
from nsys_analyzer.report.sections.evidence import Evidence
from nsys_analyzer.report.tables import Field, table
from nsys_analyzer.report.units import percent
from nsys_analyzer.text import phrase
from nsys_analyzer.trace.metadata import Gpu, Metadata

_PRECISION = Paragraph(
    phrase(
        "*Matmul precision* is what ran, not what was asked for: it is read from the names of the matmul and fused "
        "attention kernels, weighted by their time. Names that do not show it (split-K reductions) are left out."
    )
)

_Traced = tuple[CaptureSummary, Metadata]
_Ran = tuple[str, Run]


def answer(evidence: Evidence) -> Section:
    """GPU, driver, versions, the precision that the kernels' names show, and what the runs say they asked for."""
    traced = [(capture, capture.metadata) for capture in evidence.captures if capture.metadata]
    runs = [(capture.title, capture.run) for capture in evidence.captures if capture.run]
    blocks: list[Block] = []
    if traced:
        blocks += [table((_TITLE, *_device(traced)), traced), table((_TITLE, *_RECORDED), traced), _PRECISION]
    asked = table((_TITLE_OF_RUN, *_ASKED), runs, "What was asked for, as each run's manifest says:")
    blocks += [asked] if asked.rows else []
    return Section("conditions", "Capture conditions", tuple(blocks))


def _device(traced: Sequence[_Traced]) -> tuple[Field[_Traced], ...]:
    """The device, in the words of the platforms: "CUDA", "HIP", or "CUDA / HIP" where the captures have both."""
    units = " / ".join(dict.fromkeys(metadata.units for _, metadata in traced))
    platforms = " / ".join(dict.fromkeys(metadata.platform for _, metadata in traced))
    return (
        Field("GPU", "text", lambda row: "none (CPU)" if row[0].on_cpu else row[0].gpu.name if row[0].gpu else None),
        Field("memory", "bytes", lambda row: gpu.memory_bytes or None if (gpu := _gpu(row[0])) else None),
        Field(units, "count", lambda row: gpu.sm_count or None if (gpu := _gpu(row[0])) else None),
        Field("driver", "text", lambda row: row[1].driver),
        Field(platforms, "text", lambda row: row[1].runtime),
    )


def _gpu(capture: CaptureSummary) -> Gpu | None:
    return None if capture.on_cpu else capture.gpu


def _precision(capture: CaptureSummary) -> str | None:
    known = {name: share for name, share in capture.precisions.items() if name != "unknown"}
    total = sum(known.values())
    named = (name if len(known) == 1 else f"{name} {percent(share / total)}" for name, share in known.items())
    return ", ".join(named) or None


_TITLE: Field[_Traced] = Field("capture", "text", lambda row: row[0].title)
_RECORDED: tuple[Field[_Traced], ...] = (
    Field("profiler", "text", lambda row: f"{row[1].profiler} {row[1].profiler_version}"),
    Field("schema", "text", lambda row: row[1].schema_version),
    Field("torch", "text", lambda row: row[0].run.torch if row[0].run else None),
    Field("matmul precision", "text", lambda row: _precision(row[0])),
)
_TITLE_OF_RUN: Field[_Ran] = Field("capture", "text", lambda row: row[0])


def _asked(option: Option) -> Field[_Ran]:
    return Field(option.column or option.name, "text", lambda row: _said(getattr(row[1], option.name)))


def _said(value: Value | None) -> str | None:
    return ("no", "yes")[value] if isinstance(value, bool) else None if value is None else str(value)


_ASKED = tuple(_asked(option) for option in OPTIONS.values() if option.column != "")
