"""Tests captures that mislead a tool which believes them literally, each with the true figures."""

from __future__ import annotations

import sqlite3
from pathlib import Path

import pytest

from nsys_analyzer import Trace
from nsys_analyzer.analysis.summary.complete import complete_captures
from nsys_analyzer.analysis.summary.summarize import summarize
from nsys_analyzer.analysis.summary.summary import CaptureSummary
from nsys_analyzer.analysis.transformer.models import configuration_from_name
from nsys_analyzer.report.evidence import Evidence
from nsys_analyzer.report.facts import say_all
from nsys_analyzer.report.renderers.markdown import render
from nsys_analyzer.report.sections import build_report
from nsys_analyzer.text import plain
from tests.support.export import ADD, AUTOGRAD, GEMM, MAIN, Export, global_tid, training_step

MS = 1e-6


def summary_of(export: Export, tmp_path: Path, name: str = "t") -> CaptureSummary:
    path = export.write(tmp_path / f"{name}.sqlite")
    (summary,) = summarize(Trace.load(path), name, configuration=configuration_from_name(name))
    return summary


def report_of(*summaries: CaptureSummary) -> str:
    return render(build_report(Evidence(complete_captures(summaries), "nsys-analyze report")), {}).replace("\xa0", " ")


def counts(summary: CaptureSummary) -> dict[str, int]:
    return {phase.phase: phase.instances for phase in summary.phases}


def test_text_that_is_no_utf8_loses_a_character_not_the_capture(tmp_path: Path) -> None:
    path = training_step(Export().thread(AUTOGRAD, "pt_autograd_0")).write(tmp_path / "t.sqlite")
    with sqlite3.connect(path) as connection:
        connection.execute("UPDATE NVTX_EVENTS SET text = CAST(x'66776420e4bd' AS TEXT) WHERE text = 'forward'")
        connection.execute("INSERT INTO StringIds VALUES (999, CAST(x'ff00fe' AS TEXT))")
    connection.close()
    trace = Trace.load(path)
    assert any(name.startswith("fwd ") for name in trace.ranges.names)
    assert len(trace.kernels) == 5


def test_step_ranges_around_the_optimizer_alone_are_no_training_step(tmp_path: Path) -> None:
    # forward, backward, step side by side: matmul 100 + 200 of 120 + 240 + 80 = 440.
    export = training_step(Export().thread(AUTOGRAD, "pt_autograd_0"), wrap=None)
    export._rows["NVTX_EVENTS"] = [
        {**row, "text": "step" if row["text"] == "optimizer" else row["text"]} for row in export._rows["NVTX_EVENTS"]
    ]
    summary = summary_of(export, tmp_path)
    text = report_of(summary)
    # Without the optimizer among the phases the sum is forward + backward: 300 of 360; forward alone is 100 of 120.
    assert "83.3 % of forward+backward" in text
    assert "In the forward+backward it is about the same as in inference (the forward pass)." in text
    assert "--phase-name optimizer=step" in text


def test_evaluation_steps_are_kept_apart_from_training_steps(tmp_path: Path) -> None:
    export = Export().thread(AUTOGRAD, "pt_autograd_0")
    training_step(training_step(export, 0), 1000)
    for at in (2000, 3000, 4000):
        export.range("step", at, at + 500).range("forward", at + 10, at + 300)
        export.kernel(GEMM, at + 20, at + 30, at + 130)
    summary = summary_of(export, tmp_path)
    assert counts(summary) == {"forward": 5, "backward": 2, "optimizer": 2, "step without backward": 3, "step": 2}
    step = summary.phase("step")
    assert step is not None
    # One training step: GEMM 100 + 200 of 440.
    assert step.share_of("matmul") == pytest.approx(300 / 440)


def test_projections_inside_an_attention_range_are_no_attention_products(tmp_path: Path) -> None:
    # Q, K, V [10, 40) and output [200, 300) lie in the attention range, but in none of its parts.
    export = Export().range("forward", 0, 1000).range("self attention", 0, 900)
    export.kernel(GEMM, 1, 10, 40).kernel(GEMM, 800, 200, 300)
    export.range("attention scores", 100, 200).kernel(GEMM, 110, 120, 140)
    export.range("softmax", 200, 300).kernel(ADD, 210, 220, 260)
    export.range("final matmul", 300, 400).kernel(GEMM, 310, 320, 340)
    attention = summary_of(export, tmp_path).attention
    assert attention is not None
    # Products 20 + 20, softmax 40.
    assert (attention.matmul_launches, attention.runtime_ratio) == (2, pytest.approx(1.0))


def test_a_softmax_range_outside_attention_is_none_of_its(tmp_path: Path) -> None:
    export = Export().range("forward", 0, 1000).range("attention", 0, 400)
    export.range("scores", 10, 50).kernel(GEMM, 20, 30, 40)
    export.range("softmax", 50, 90).kernel(ADD, 60, 70, 75)
    export.range("softmax", 500, 600).kernel(ADD, 510, 520, 590)
    attention = summary_of(export, tmp_path).attention
    assert attention is not None
    assert attention.softmax_ms == pytest.approx(5 * MS)


def test_kernels_beside_an_opaque_graph_have_no_share_to_report(tmp_path: Path) -> None:
    export = Export().range("forward", 0, 1000).graph(10, 100, 300).kernel(GEMM, 400, 410, 460)
    text = report_of(summary_of(export, tmp_path))
    assert "## How long does each phase take?" in text
    assert "Which kernel takes" not in text
    assert "What share is matmul?" not in text
    assert "opaque" in text


def test_inference_of_another_precision_is_another_configuration(tmp_path: Path) -> None:
    def forward_only(gemm: int) -> Export:
        return Export().range("forward", 0, 1000).kernel(GEMM, 10, 20, 20 + gemm).kernel(ADD, 11, 600, 600 + 100 - gemm)

    captures = [
        summary_of(forward_only(10), tmp_path, "large_ctx256_bf16_forward"),
        summary_of(forward_only(90), tmp_path, "large_ctx256_fp32_forward"),
        summary_of(training_step(Export().thread(AUTOGRAD, "pt_autograd_0")), tmp_path, "large_ctx256_fp32_train"),
    ]
    text = report_of(*captures)
    assert text.count("in inference (the forward pass)") == 1  # of the training step alone, its own


def test_a_launch_that_failed_is_no_missing_kernel(tmp_path: Path) -> None:
    # Autotuning tries launches that the driver refuses (701: out of resources).
    export = Export().range("forward", 0, 1000).kernel(GEMM, 10, 20, 30)
    export.call("cuLaunchKernel", 40, result=701)
    summary = summary_of(export, tmp_path)
    assert (summary.status, counts(summary)) == ("ok", {"forward": 1})


def test_autograds_launches_into_a_graphs_capture_are_not_missing(tmp_path: Path) -> None:
    export = Export().thread(AUTOGRAD, "pt_autograd_0").range("forward", 0, 1000).kernel(GEMM, 10, 20, 30)
    export.call("cudaStreamEndCapture_v10000", 50)  # an end without a begin covers nothing
    export.call("cudaStreamBeginCapture_v10000", 100)
    export.call("cudaLaunchKernel_v7000", 150, tid=AUTOGRAD)
    export.call("cudaStreamEndCapture_v10000", 200)
    export.call("cudaStreamBeginCapture_v10000", 900, tid=101)  # nor does a begin without an end
    export.call("cudaLaunchKernel_v7000", 950, tid=102)
    summary = summary_of(export, tmp_path)
    assert summary.coverage is not None
    assert summary.coverage.lost_launches == 1


def test_a_backward_that_only_autograds_thread_names(tmp_path: Path) -> None:
    export = Export().thread(AUTOGRAD, "pt_autograd_0").range("step", 0, 1000).range("forward", 0, 300)
    export.kernel(ADD, 10, 20, 30).range("backward", 400, 700, tid=AUTOGRAD).kernel(GEMM, 500, 510, 520, tid=AUTOGRAD)
    assert counts(summary_of(export, tmp_path))["backward"] == 1


def test_a_warm_up_without_an_end_lasts_to_the_end(tmp_path: Path) -> None:
    export = Export().range("forward", 0, 50).kernel(GEMM, 10, 20, 30)
    export.range("warmup", 60, None).range("forward", 100, 200).kernel(GEMM, 110, 120, 130)
    summary = summary_of(export, tmp_path)
    assert counts(summary) == {"forward": 1}
    assert any("warm-up range has no end" in plain(warning) for warning in say_all(summary.warnings))


def test_a_straggler_of_a_microsecond_is_no_lack_of_synchronisation(tmp_path: Path) -> None:
    export = Export()
    for number in range(3):
        at = number * 1_000_000
        export.range("forward", at, at + 500_000).kernel(GEMM, at + 10, at + 100, at + 500_001)
    assert summary_of(export, tmp_path).phases[0].synchronized


def test_two_gpus_of_one_process_are_said(tmp_path: Path) -> None:
    export = Export().range("forward", 0, 100).kernel(GEMM, 10, 20, 40).kernel(GEMM, 12, 20, 40, device=1)
    summary = summary_of(export, tmp_path)
    assert any("2 GPUs" in plain(warning) for warning in say_all(summary.warnings))
    assert summary.phases[0].gpu_busy_ms.mean == pytest.approx(20 * MS)


def test_a_capture_with_steps_alone_has_answers(tmp_path: Path) -> None:
    export = Export().range("ProfilerStep#7", 0, 1000).kernel(GEMM, 10, 20, 100).kernel(ADD, 12, 100, 120)
    text = report_of(summary_of(export, tmp_path))
    assert "Matmul is 80.0 % of the step" in text
    assert "` in the step (80.0 % of the time" in text


def test_gradients_accumulated_without_a_step_range(tmp_path: Path) -> None:
    # Two passes for one optimizer: (100 + 200) · 2 of (120 + 240) · 2 + 80 = 800.
    export = Export().thread(AUTOGRAD, "pt_autograd_0")
    training_step(export, 0, wrap=None)
    training_step(export, 1000, wrap=None)
    export._rows["NVTX_EVENTS"] = [
        r for r in export._rows["NVTX_EVENTS"] if not (r["text"] == "optimizer" and r["start"] < 1000)
    ]
    assert "75.0 % of the training step" in report_of(summary_of(export, tmp_path))


def test_many_threads_with_crossing_ranges_stay_cheap(tmp_path: Path) -> None:
    # 40 threads, each with 100 ranges of no phase, and a bare thread that inherits the one opened last.
    export = Export()
    for tid in range(200, 240):
        for number in range(100):
            export.range("worker", number * 100 + tid, number * 100 + tid + 150, tid=tid, kind=60)
    export.kernel(GEMM, 5_000, 5_010, 5_020, tid=MAIN)
    trace = Trace.load(export.write(tmp_path / "t.sqlite"))
    assert trace.kernels["range_path"].tolist()[0].startswith("worker")
    assert trace.kernels["launch_tid"].tolist() == [global_tid() & 0xFFFFFF]
