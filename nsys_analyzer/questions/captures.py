"""One row for each capture, whatever became of it."""

from __future__ import annotations

from dataclasses import replace

from nsys_analyzer.analysis.summary import CaptureSummary
from nsys_analyzer.questions.evidence import Evidence, status_of
from nsys_analyzer.report.model import Answer, Cell, Column, Section, Table

_COLUMNS = (  # "kernel" stands for the evidence's word for it
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
_ON_CPU_IN_SHORT = "the CPU, there is no GPU: its kernels are operators of PyTorch, by the time of their own"
_ON_CPU = (
    "ran on the CPU, there is no GPU. Its kernels are operators of PyTorch, each by its own time without the operators "
    "it calls; what is called busy is the time in which they compute on the CPU."
)


def answer(evidence: Evidence) -> Section:
    """The captures of the report, by model and context length; first, which of them had no GPU."""
    rows = tuple(_row(capture) for capture in evidence.captures)
    on_cpu = tuple(Answer(c.title, _ON_CPU, _ON_CPU_IN_SHORT) for c in evidence.captures if c.on_cpu)
    columns = tuple(replace(column, title=column.title.replace("kernel", evidence.kernel)) for column in _COLUMNS)
    return Section("captures", "Captures", (*on_cpu, Table(columns, rows)), "device")


def _status(capture: CaptureSummary) -> str:
    """The status, with what the run said of it; why a file could not be read stands in the warnings."""
    unreadable = capture.status == "failed" and capture.message in capture.warnings
    return status_of(capture.status, "" if unreadable else capture.message)


def _steps(capture: CaptureSummary) -> int | None:
    """Measured steps: of the step range, else of the phase that occurs once in a step; untraced, what the run says."""
    once = [phase for name in ("step", "optimizer", "backward", "forward") if (phase := capture.phase(name))]
    if once:
        return once[0].instances
    return capture.run.steps if capture.run and capture.status == "not_profiled" else None


def _gpu(capture: CaptureSummary) -> str | None:
    """The GPU of its kernels, else the one that the run names."""
    if capture.gpu:
        return "none (CPU)" if capture.on_cpu else capture.gpu.name
    return capture.run.gpu if capture.run else None


def _row(capture: CaptureSummary) -> tuple[Cell, ...]:
    configuration = capture.configuration
    return (
        capture.title,
        configuration.model.name if configuration and configuration.model else None,
        configuration.context_length if configuration else None,
        configuration.batch_size if configuration else None,
        _status(capture),
        _gpu(capture),
        _steps(capture),
        capture.coverage.kernels if capture.coverage else None,
        capture.coverage.kernel_ms if capture.coverage and capture.coverage.kernels else None,
    )
