"""Which occurrences of a phase are measurements."""

from __future__ import annotations

from pathlib import Path

import pytest

from nsys_analyzer import Trace
from nsys_analyzer.analysis.summarize import summarize
from nsys_analyzer.analysis.summary import CaptureSummary
from nsys_analyzer.text import plain
from tests.export import ADD, AUTOGRAD, GEMM, Export, training_step


def summary_of(export: Export, tmp_path: Path) -> CaptureSummary:
    (summary,) = summarize(Trace.load(export.write(tmp_path / "t.sqlite")), "t")
    return summary


def phase_counts(summary: CaptureSummary) -> dict[str, tuple[int, int, int]]:
    return {p.phase: (p.instances, p.warmup_instances, p.incomplete_instances) for p in summary.phases}


@pytest.mark.parametrize("name", ["warmup", "warm_up", "Warm-up 3"])
def test_instances_inside_warm_up_are_left_out_and_counted(tmp_path: Path, name: str) -> None:
    # Two steps in warm-up [0, 2000), three after it.
    export = Export().thread(AUTOGRAD, "pt_autograd_0").range(name, 0, 2000)
    for step in range(5):
        training_step(export, step * 1000)
    summary = summary_of(export, tmp_path)
    assert phase_counts(summary)["forward"] == (3, 2, 0)
    assert summary.coverage is not None
    # 5 kernels a step, all of them in phases, those of two steps in warm-up.
    assert (summary.coverage.in_phases, summary.coverage.in_warmup) == (25, 10)


def test_warm_up_of_another_thread_of_the_process_counts(tmp_path: Path) -> None:
    export = Export().range("warmup", 0, 1000, tid=101).range("forward", 10, 20).range("forward", 2000, 2010)
    assert phase_counts(summary_of(export.kernel(GEMM, 12, 30, 40), tmp_path))["forward"] == (1, 1, 0)


def test_a_phase_inside_itself_is_one_instance(tmp_path: Path) -> None:
    export = Export().range("forward", 0, 100).range("forward pass", 10, 90).kernel(GEMM, 20, 30, 40)
    summary = summary_of(export, tmp_path)
    assert phase_counts(summary) == {"forward": (1, 0, 0)}


def test_a_phase_inside_another_is_counted_there_and_said(tmp_path: Path) -> None:
    export = Export().range("forward", 0, 100).range("loss", 50, 90).kernel(GEMM, 20, 30, 40).kernel(ADD, 60, 70, 80)
    summary = summary_of(export, tmp_path)
    assert phase_counts(summary) == {"forward": (1, 0, 0)}
    assert summary.phases[0].kernels_per_instance == 2
    assert any("`loss` ranges lie inside `forward`" in plain(warning, "`") for warning in summary.warnings)


def test_a_phase_without_an_end_is_no_measurement(tmp_path: Path) -> None:
    export = Export().range("forward", 0, 100).kernel(GEMM, 20, 30, 40)
    export.range("forward", 200, None).kernel(GEMM, 220, 230, 240)
    summary = summary_of(export, tmp_path)
    assert summary.status == "partial"
    assert phase_counts(summary) == {"forward": (1, 0, 0)}
    assert any("`forward` has no end" in plain(warning, "`") for warning in summary.warnings)


def test_an_instance_whose_kernels_are_missing_is_no_measurement(tmp_path: Path) -> None:
    # The second forward launches a kernel that the capture lacks.
    export = Export().range("forward", 0, 100).kernel(GEMM, 20, 30, 40)
    export.range("forward", 200, 300).kernel(GEMM, 220, 230, 240)
    export.call("cudaLaunchKernel_v7000", 250)
    summary = summary_of(export, tmp_path)
    assert summary.status == "partial"
    assert phase_counts(summary) == {"forward": (1, 0, 1)}
    assert summary.coverage is not None
    assert summary.coverage.lost_launches == 1


def test_launches_while_a_graph_is_captured_are_not_missing(tmp_path: Path) -> None:
    export = Export().range("forward", 0, 100)
    export.call("cudaStreamBeginCapture_v10000", 10)
    export.call("cudaLaunchKernel_v7000", 20)
    export.call("cudaStreamEndCapture_v10000", 30)
    summary = summary_of(export.kernel(GEMM, 40, 50, 60), tmp_path)
    assert summary.status == "ok"
    assert phase_counts(summary) == {"forward": (1, 0, 0)}


def test_a_failed_allocation_with_nothing_after_it_is_out_of_memory(tmp_path: Path) -> None:
    export = Export().range("forward", 0, 100).kernel(GEMM, 20, 30, 40)
    export.range("backward", 100, 200).kernel(GEMM, 110, 120, 130)
    export.call("cudaMalloc_v3020", 150, result=2)
    summary = summary_of(export, tmp_path)
    assert summary.status == "oom"
    assert phase_counts(summary) == {"forward": (1, 0, 0), "backward": (0, 0, 1)}


def test_an_allocation_that_succeeds_on_retry_is_not(tmp_path: Path) -> None:
    # The caching allocator frees its blocks and asks again.
    export = Export().range("forward", 0, 100)
    export.call("cudaMalloc_v3020", 10, result=2)
    export.call("cudaMalloc_v3020", 12)
    summary = summary_of(export.kernel(GEMM, 20, 30, 40), tmp_path)
    assert summary.status == "ok"
    assert phase_counts(summary) == {"forward": (1, 0, 0)}
