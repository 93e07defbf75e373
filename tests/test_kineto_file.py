"""What a file of PyTorch's profiler may look like: an object, a bare array, events of the GPU alone."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from nsys_analyzer import Trace
from nsys_analyzer.analysis.summary.complete import busy_share
from nsys_analyzer.analysis.summary.summarize import summarize
from nsys_analyzer.analysis.summary.summary import CaptureSummary
from nsys_analyzer.report.model import Table
from nsys_analyzer.report.sections.times import answer_times
from nsys_analyzer.runs.timed import with_timings
from nsys_analyzer.runs.timings import read_timings
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


def on_gpu(trace: Kineto, name: str, start: int, length: int, device: int = 0, stream: int = 7) -> Kineto:
    return trace.add("gpu_user_annotation", name, start, length, pid=device, tid=stream)


def gpu_alone() -> Kineto:
    """Stream 7: forward [100, 200) with a GEMM [100, 150) and an ADD [150, 170); backward [200, 400) with a GEMM
    [200, 300). Stream 20: backward [180, 260), with a GEMM [180, 240) while forward is open on stream 7.
    """
    trace = on_gpu(Kineto().gpu(), "forward", 100, 100)
    on_gpu(on_gpu(trace, "backward", 200, 200), "backward", 180, 80, stream=20)
    trace.kernel(GEMM, 1, 100, 50).kernel(ADD, 2, 150, 20).kernel(GEMM, 3, 200, 100)
    return trace.kernel(GEMM, 4, 180, 60, stream=20)


def test_kernels_of_a_trace_without_the_cpu_are_placed_by_gpu_time(tmp_path: Path) -> None:
    summary = summary_of(gpu_alone(), tmp_path)
    forward, backward = summary.phase("forward"), summary.phase("backward")
    assert forward
    assert backward
    assert (forward.instances, forward.kernels_per_instance) == (1, 2)
    assert forward.kernel_time_ms.mean == pytest.approx(0.070)
    assert forward.wall_ms.mean == pytest.approx(0.100)
    # A range for each stream: (100 + 60) / 2.
    assert (backward.instances, backward.kernels_per_instance) == (2, 1)
    assert backward.kernel_time_ms.mean == pytest.approx(0.080)


def test_it_is_said_that_they_are(tmp_path: Path) -> None:
    warnings = summary_of(gpu_alone(), tmp_path).warnings
    assert sum("placed by GPU time" in warning for warning in warnings) == 1
    assert not any("no launch row" in warning or "--trace" in warning for warning in warnings)
    assert "Several streams have backward open at once; each stream's occurrence counts as an instance." in warnings


def test_what_is_outside_every_range_on_its_stream_is_unattributed(tmp_path: Path) -> None:
    # One ends as forward does, on another stream nothing is open, on another device neither.
    trace = on_gpu(Kineto().gpu().gpu(number=1), "forward", 100, 100)
    trace.kernel(GEMM, 1, 120, 10).kernel(GEMM, 2, 200, 10).kernel(GEMM, 3, 120, 10, stream=20)
    trace.kernel(GEMM, 4, 120, 10, device=1)
    coverage = summary_of(trace, tmp_path).coverage
    assert coverage
    assert (coverage.attributed, coverage.unattributed) == (1, 3)


def test_api_calls_alone_do_not_hide_the_ranges_on_the_gpu(tmp_path: Path) -> None:
    # The launch at 90 lies before forward; nothing of the CPU says what it belonged to.
    trace = on_gpu(Kineto().gpu(), "forward", 100, 100).launch(1, 90).kernel(GEMM, 1, 120, 10)
    forward = summary_of(trace, tmp_path).phase("forward")
    assert forward
    assert forward.kernels_per_instance == 1


def test_ranges_on_the_gpu_count_for_nothing_beside_those_of_the_cpu(tmp_path: Path) -> None:
    # The kernel launched in forward runs while backward is drawn on the GPU.
    trace = step()
    on_gpu(trace, "backward", 110, 100)
    summary = summary_of(trace, tmp_path)
    assert [phase.phase for phase in summary.phases] == ["forward"]
    assert not any("GPU time" in warning for warning in summary.warnings)


def test_a_range_on_the_gpu_is_no_wall_time(tmp_path: Path) -> None:
    """Forward spans 100 us of the GPU and takes 300 without: no doubt, no overhead, a share of 70 ÷ 300."""
    csv = tmp_path / "t.csv"
    csv.write_text("model,phase,mean_ms\nsmall,forward,0.3\n")
    (summary,) = with_timings([summary_of(gpu_alone(), tmp_path)], read_timings(csv), one_run=True)
    forward = summary.phase("forward")
    assert forward
    assert busy_share(replace(summary, unprofiled=None), forward) is None
    assert summary.unprofiled
    assert not summary.unprofiled.doubts
    assert summary.profiler_overhead("forward") is None
    (times,) = (one for one in answer_times(summary) if isinstance(one, Table))
    assert "verdict" not in [column.title for column in times.columns]
    share = busy_share(summary, forward)
    assert share
    assert share.low == pytest.approx(70 / 300)


def test_warm_up_on_the_gpu_is_left_out_of_the_whole(tmp_path: Path) -> None:
    """Of 50 + 40 us of kernels 50 lie in warm-up, so that forward's 40 are all that is left."""
    trace = on_gpu(on_gpu(Kineto().gpu(), "warmup", 0, 90), "forward", 100, 100)
    summary = summary_of(trace.kernel(GEMM, 1, 10, 50).kernel(GEMM, 2, 120, 40), tmp_path)
    assert summary.whole
    assert summary.coverage
    assert summary.whole.gpu_ms == pytest.approx(0.040)
    assert (summary.coverage.in_warmup, summary.coverage.warmup_ms) == (1, pytest.approx(0.050))
    assert summary.phases_suffice


def test_a_trace_without_ranges_is_told_of_record_function(tmp_path: Path) -> None:
    warnings = summary_of(Kineto().gpu().kernel(GEMM, 1, 120, 30), tmp_path).warnings
    assert any("record_function" in warning and "ProfilerActivity.CPU" in warning for warning in warnings)
    assert any("no CUDA API calls" in warning for warning in warnings)
    assert not any("--trace" in warning for warning in warnings)
