"""Tests figures outside of the phases: the whole capture, warm-up, communication, copies and fills."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from nsys_analyzer import Trace
from nsys_analyzer.analysis.summary.summarize import summarize
from nsys_analyzer.cli.main import cli
from nsys_analyzer.report.evidence import Evidence
from nsys_analyzer.report.renderers.json_report import report_data
from nsys_analyzer.report.sections import build_report
from tests.support.cases import Capture, make_case_test
from tests.support.export import GEMM, shared_copy
from tests.support.kineto import Kineto


def timed(capture: Capture) -> str:
    """Returns the report with a time of 8 ms that was measured for the step alone."""
    timings = capture.path.with_name("timings.csv")
    timings.write_text("model,context_length,phase,mean_ms\nsmall,256,step,8.0\n", encoding="utf-8")
    return capture.report("--csv", str(timings), "--model", "small", "--context-length", "256")


test_whole_capture = make_case_test(
    "whole_capture",
    {
        "first screen": lambda capture: capture.report().partition("## ")[0],
        "table of times": lambda capture: capture.report().partition("Times: median")[2],
        "report with timings": timed,
        "json": lambda capture: report_data(build_report(Evidence(capture.summaries)))["captures"][0],
        "number of kernels in tables": lambda capture: (
            len(capture.summary.phases[0].kernels), len(capture.summary.whole.kernels)
        ),
        "causes": lambda capture: {cause.cause: cause.ms for cause in capture.summary.step.causes},
        "lengths in a copy to share": lambda capture: [
            summary.step.length_ms
            for summary in summarize(
                Trace.load(shared_copy(capture.path, capture.path.with_name("copy.sqlite"))), "t"
            )
        ],
    },
)  # fmt: skip


def test_the_step_without_what_the_profiler_notes(tmp_path: Path) -> None:
    """Steps of 10 ms: kernels run [0.2, 1.7), [4.1, 7.1) and on to 9.9; the second's launch takes from 1.0 to 4.0.

    The profiler notes 3.0 ms in that launch. Without it the second kernel starts at 1.7, 2.4 ms earlier: 7.6 ms. Two
    runs differ by 3 % of the GPU's 7.3 ms and by 15 % of the other 0.3 ms: 0.264 ms.
    """
    trace = Kineto().gpu()
    for number in range(5):
        at = number * 10_000
        trace.range(f"ProfilerStep#{number}", at, 10_000)
        for place, (called, lasts, ran, ms) in enumerate(
            [(100, 5, 200, 1_500), (990, 3_030, 4_100, 3_000), (4_040, 5, 7_100, 2_800)]
        ):
            trace.add("cuda_runtime", "cudaLaunchKernel", at + called, lasts, correlation=3 * number + place + 1)
            trace.kernel(GEMM, 3 * number + place + 1, at + ran, ms)
        trace.add("overhead", "Activity Buffer Request", at + 1_000, 3_000, pid=-1, tid=0)
        trace.add("cuda_runtime", "cudaDeviceSynchronize", at + 4_100, 5_800, correlation=90 + number)
    path = trace.write(tmp_path / "t.json")
    done = CliRunner().invoke(cli, ["ask", str(path), "step_estimated_ms", "--format", "json"], catch_exceptions=False)
    assert json.loads(done.stdout)["answers"][0]["value"] == pytest.approx([7.6 - 0.264, 7.6 + 0.264], abs=0.05)
