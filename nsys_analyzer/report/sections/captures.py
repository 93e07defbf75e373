"""One row for each capture, whatever became of it."""

from __future__ import annotations

from nsys_analyzer.analysis.summary.summary import CaptureSummary
from nsys_analyzer.analysis.transformer.models import Configuration
from nsys_analyzer.report.evidence import Evidence, status_of
from nsys_analyzer.report.model import Answer, Section
from nsys_analyzer.report.sections.models import flops_of
from nsys_analyzer.report.tables import Field, table

_ON_CPU_IN_SHORT = "the CPU, there is no GPU: its kernels are operators of PyTorch, by the time of their own"
_ON_CPU = (
    "ran on the CPU, there is no GPU. Its kernels are operators of PyTorch, each by its own time without the operators "
    "it calls; what is called busy is the time in which they compute on the CPU."
)


def answer(evidence: Evidence) -> Section:
    """The captures of the report, by model and context length; first, which of them had no GPU."""
    on_cpu = tuple(Answer(c.title, _ON_CPU, _ON_CPU_IN_SHORT) for c in evidence.captures if c.on_cpu)
    return Section("captures", "Captures", (*on_cpu, table(_fields(evidence.kernel), evidence.captures)), "device")


def _fields(kernel: str) -> tuple[Field[CaptureSummary], ...]:
    return (
        Field("capture", "text", lambda c: c.title),
        Field("model", "text", lambda c: model.name if (model := _configuration(c).model) else None),
        Field("context", "count", lambda c: _configuration(c).context_length),
        Field("batch", "count", lambda c: _configuration(c).batch_size),
        Field("status", "text", _status),
        Field("steps", "count", _steps),
        Field(f"{kernel}s", "count", lambda c: c.coverage.kernels if c.coverage else None),
        Field("forward FLOPs", "flop", lambda c: flops_of(_configuration(c))),
    )


def _configuration(capture: CaptureSummary) -> Configuration:
    return capture.configuration or Configuration()


def _status(capture: CaptureSummary) -> str:
    """The status, with what the run said of it; why a file could not be read stands in the warnings."""
    unreadable = capture.status == "failed" and capture.message in capture.warnings
    return status_of(capture.status, "" if unreadable else capture.message or "")


def _steps(capture: CaptureSummary) -> int | None:
    """Measured steps: of the step range, else of the phase that occurs once in a step; untraced, what the run says."""
    once = [phase for name in ("step", "optimizer", "backward", "forward") if (phase := capture.phase(name))]
    if once:
        return once[0].instances
    return capture.run.steps if capture.run and capture.status == "not_profiled" else None
