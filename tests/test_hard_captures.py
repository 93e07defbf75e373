"""Tests captures that mislead a tool which believes them literally, each with the true figures."""

from __future__ import annotations

from pathlib import Path

from nsys_analyzer import Trace
from nsys_analyzer.analysis.summary.complete import complete_captures
from nsys_analyzer.analysis.summary.summarize import summarize
from nsys_analyzer.analysis.summary.summary import CaptureSummary
from nsys_analyzer.analysis.transformer.models import configuration_from_name
from nsys_analyzer.report.evidence import Evidence
from nsys_analyzer.report.renderers.markdown import render
from nsys_analyzer.report.sections import build_report
from tests.support.cases import Capture, make_case_test
from tests.support.export import ADD, AUTOGRAD, GEMM, Export, training_step


def share_of_matmul_in_a_step(capture: Capture) -> float | None:
    step = capture.summary.phase("step")
    assert step is not None
    return step.share_of("matmul")


test_hard_captures = make_case_test(
    "hard_captures",
    {
        "counts": lambda capture: {phase.phase: phase.instances for phase in capture.summary.phases},
        "share of matmul in a step": share_of_matmul_in_a_step,
        "names of ranges": lambda capture: capture.trace.ranges.names,
        "kernels": lambda capture: len(capture.trace.kernels),
        "range paths": lambda capture: capture.trace.kernels["range_path"].tolist(),
        "launch threads": lambda capture: capture.trace.kernels["launch_tid"].tolist(),
    },
)


def test_inference_of_another_precision_is_another_configuration(tmp_path: Path) -> None:
    def forward_only(gemm: int) -> Export:
        return Export().range("forward", 0, 1000).kernel(GEMM, 10, 20, 20 + gemm).kernel(ADD, 11, 600, 600 + 100 - gemm)

    def summary_of(export: Export, name: str) -> CaptureSummary:
        path = export.write(tmp_path / f"{name}.sqlite")
        (summary,) = summarize(Trace.load(path), name, configuration=configuration_from_name(name))
        return summary

    summaries = [
        summary_of(forward_only(10), "large_ctx256_bf16_forward"),
        summary_of(forward_only(90), "large_ctx256_fp32_forward"),
        summary_of(training_step(Export().thread(AUTOGRAD, "pt_autograd_0")), "large_ctx256_fp32_train"),
    ]
    text = render(build_report(Evidence(complete_captures(summaries), "nsys-analyze report")), {})
    assert text.replace("\xa0", " ").count("in inference (the forward pass)") == 1  # the training step's own
