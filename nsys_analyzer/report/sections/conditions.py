"""Under which conditions the captures were taken."""

from __future__ import annotations

from nsys_analyzer.analysis.summary.summary import CaptureSummary
from nsys_analyzer.configuration import OPTIONS, Option
from nsys_analyzer.report.evidence import Evidence
from nsys_analyzer.report.model import Block, Paragraph, Section
from nsys_analyzer.report.tables import Field, table
from nsys_analyzer.report.units import percent
from nsys_analyzer.text import phrase

_PRECISION = phrase(
    "*Matmul precision* is what ran, not what was asked for: it is read from the names of the matmul and fused "
    "attention kernels, weighted by their time. Names that do not show it (split-K reductions) are left out."
)
_TITLE: Field[CaptureSummary] = Field("capture", "text", lambda c: c.title)


def answer(evidence: Evidence) -> Section:
    """GPU, driver, versions, the precision that the kernels' names show, and what the runs say they asked for."""
    captures = evidence.captures
    asked = "What was asked for, as each run's manifest says:"
    tables = (
        table((_TITLE, *_device(evidence)), captures),
        table((_TITLE, *_RECORDED), captures),
        table((_TITLE, *_ASKED), captures, asked),
    )
    blocks: list[Block] = [found for found in tables if found.rows]
    blocks += [Paragraph(_PRECISION)] if any(map(_precision, captures)) else []
    return Section("conditions", "Capture conditions", tuple(blocks))


def _device(evidence: Evidence) -> tuple[Field[CaptureSummary], ...]:
    """The device, in the words of the platforms: "CUDA", "HIP", or "CUDA / HIP" where the captures have both."""
    traced = [capture.metadata for capture in evidence.captures if capture.metadata]
    units = " / ".join(dict.fromkeys(metadata.units for metadata in traced))
    platforms = " / ".join(dict.fromkeys(metadata.platform for metadata in traced))
    return (
        Field("GPU", "text", _device_name),
        Field("memory", "bytes", lambda c: c.conditions.gpu_memory_bytes if c.conditions else None),
        Field(units, "count", lambda c: c.conditions.gpu_sm_count if c.conditions else None),
        Field("driver", "text", lambda c: c.metadata.driver if c.metadata else None),
        Field(platforms, "text", lambda c: c.metadata.runtime if c.metadata else None),
    )


def _device_name(capture: CaptureSummary) -> str | None:
    """The GPU of its kernels, else the one that the run names."""
    if capture.gpu:
        return "none (CPU)" if capture.on_cpu else capture.gpu
    return capture.run.gpu if capture.run else None


def _precision(capture: CaptureSummary) -> str | None:
    known = {name: share for name, share in capture.precisions.items() if name != "unknown"}
    total = sum(known.values())
    named = (name if len(known) == 1 else f"{name} {percent(share / total)}" for name, share in known.items())
    return ", ".join(named) or None


_RECORDED: tuple[Field[CaptureSummary], ...] = (
    Field("profiler", "text", lambda c: f"{c.metadata.profiler} {c.metadata.profiler_version}" if c.metadata else None),
    Field("schema", "text", lambda c: c.metadata.schema_version if c.metadata else None),
    Field("torch", "text", lambda c: c.run.torch if c.run else None),
    Field("matmul precision", "text", _precision),
    Field("model known from", "text", lambda c: c.configuration.source if c.configuration else None),
)


def _asked(option: Option) -> Field[CaptureSummary]:
    def said(capture: CaptureSummary) -> str | None:
        value = getattr(capture.run, option.name, None)
        return ("no", "yes")[value] if isinstance(value, bool) else None if value is None else str(value)

    return Field(option.column or option.name, "text", said)


_ASKED = tuple(_asked(option) for option in OPTIONS.values() if option.column != "")
