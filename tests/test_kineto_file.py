"""Tests the forms of a file of PyTorch's profiler: an object, a bare array, events of the GPU alone."""

from __future__ import annotations

from pathlib import Path

import pytest

from nsys_analyzer import Trace
from nsys_analyzer.analysis.summary.summarize import summarize
from nsys_analyzer.analysis.summary.summary import CaptureSummary
from nsys_analyzer.report.facts import say_all
from tests.support.kineto import Kineto

GEMM = "ampere_sgemm_128x64_tn"
ADD = "vectorized_elementwise_kernel"


def summary_of(trace: Kineto, tmp_path: Path) -> CaptureSummary:
    (summary,) = summarize(Trace.load(trace.write(tmp_path / "t.json")), "t")
    return summary


def step() -> Kineto:
    """Forward [100, 200) launches a GEMM at 110 that runs [120, 150)."""
    return Kineto().range("forward", 100, 100).launch(1, 110).kernel(GEMM, 1, 120, 30)


# --- a bare array --------------------------------------------------------------------------------------------------


def test_a_bare_array_of_events_is_a_trace(tmp_path: Path) -> None:
    path = tmp_path / "t.json"
    path.write_text(step().array(), encoding="utf-8")
    (summary,) = summarize(Trace.load(path), "t")
    forward = summary.phase("forward")
    assert forward
    assert forward.kernels_per_instance == 1
    assert forward.kernel_time_ms.mean == pytest.approx(0.030)


# --- events of the GPU alone ----------------------------------------------------------------------------------------


def test_a_trace_without_ranges_is_told_of_record_function(tmp_path: Path) -> None:
    warnings = say_all(summary_of(Kineto().gpu().kernel(GEMM, 1, 120, 30), tmp_path).warnings)
    assert any("record_function" in warning and "ProfilerActivity.CPU" in warning for warning in warnings)
    assert any("no CUDA API calls" in warning for warning in warnings)
    assert not any("--trace" in warning for warning in warnings)


def test_who_recorded_the_cpu_and_the_gpu_is_not_asked_to(tmp_path: Path) -> None:
    trace = Kineto().gpu().operator("aten::mm", 100, 50).launch(1, 110).kernel(GEMM, 1, 120, 30)
    assert not any("ProfilerActivity" in warning for warning in say_all(summary_of(trace, tmp_path).warnings))
