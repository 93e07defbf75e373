"""One row for each capture, whatever became of it."""

from __future__ import annotations

from nsys_analyzer.analysis.summary import CaptureSummary
from nsys_analyzer.questions.evidence import Evidence
from nsys_analyzer.report.model import Cell, Column, Section, Table

_COLUMNS = (
    Column("capture"),
    Column("model"),
    Column("context", "count"),
    Column("batch", "count"),
    Column("status"),
    Column("GPU"),
    Column("steps", "count"),
    Column("kernels", "count"),
    Column("kernel ms", "ms"),
)


def answer(evidence: Evidence) -> Section:
    """The captures of the report, by model and context length."""
    rows = tuple(_row(capture) for capture in evidence.captures)
    return Section("captures", "Captures", (Table(_COLUMNS, rows),))


def _status(capture: CaptureSummary) -> str:
    """The status, with what the run said of it; why a file could not be read stands in the warnings."""
    said = capture.message and capture.status != "failed"
    return f"{capture.status}: {capture.message}" if said else capture.status


def _steps(capture: CaptureSummary) -> int | None:
    """Measured steps: of the step range, else of the phase that occurs once in a step."""
    once = [phase for name in ("step", "optimizer", "backward", "forward") if (phase := capture.phase(name))]
    return once[0].instances if once else None


def _row(capture: CaptureSummary) -> tuple[Cell, ...]:
    configuration = capture.configuration
    return (
        capture.title,
        configuration.model.name if configuration and configuration.model else None,
        configuration.context_length if configuration else None,
        configuration.batch_size if configuration else None,
        _status(capture),
        capture.gpu.name if capture.gpu else None,
        _steps(capture),
        capture.coverage.kernels if capture.coverage else None,
        capture.coverage.kernel_ms if capture.coverage else None,
    )
