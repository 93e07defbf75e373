"""Real captures of other programs than the one the tool was written for: one H200, Nsight Systems 2025.3.

Each expectation follows from what the program does, said beside it, not from what the tool printed.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from nsys_analyzer import Trace
from nsys_analyzer.analysis.summary.summarize import summarize
from nsys_analyzer.analysis.summary.summary import CaptureSummary

Capture = Callable[[str], Path]
NAMES = [
    "checkpoint_fp16", "compile_bf16", "graphcapture_fp32", "llama_bf16", "jax_mlp", "oom_fp32", "accumulate_tf32",
]  # fmt: skip


def summary_of(real_capture: Capture, name: str) -> CaptureSummary:
    (summary,) = summarize(Trace.load(real_capture(name)), name)
    return summary


@pytest.mark.parametrize("name", NAMES)
def test_every_kernel_is_counted_once_and_almost_all_are_known(real_capture: Capture, name: str) -> None:
    summary = summary_of(real_capture, name)
    coverage, whole = summary.coverage, summary.whole
    assert coverage is not None
    assert whole is not None
    assert coverage.attributed + coverage.unattributed == coverage.kernels == whole.kernels_per_instance
    assert coverage.lost_launches == 0
    assert whole.share_of("other") < 0.02


def test_activation_checkpointing_runs_forward_inside_backward(real_capture: Capture) -> None:
    # Three steps; each of the 6 blocks has a range `forward` of its own, inside forward and again, recomputed,
    # on autograd's thread inside backward. Each attention runs once in forward, and once more in backward.
    summary = summary_of(real_capture, "checkpoint_fp16")
    forward, backward = summary.phase("forward"), summary.phase("backward")
    assert forward is not None
    assert backward is not None
    assert (forward.instances, backward.instances) == (3, 3)
    flash = [
        sum(r.launches_per_instance for r in phase.kernels if r.kernel_class == "fused attention" and "fprop" in r.name)
        for phase in (forward, backward)
    ]
    assert flash == [6, 6]
    assert next(iter(summary.precisions)) == "fp16"


def test_a_compiled_model_with_an_eager_optimizer(real_capture: Capture) -> None:
    summary = summary_of(real_capture, "compile_bf16")
    forward, optimizer = summary.phase("forward"), summary.phase("optimizer")
    assert forward is not None
    assert optimizer is not None
    assert any(row.name.startswith("triton_") for row in forward.kernels)
    assert optimizer.share_of("optimizer") == pytest.approx(1.0)


def test_a_graph_captured_inside_the_trace_keeps_its_ranges(real_capture: Capture) -> None:
    # 6 layers, one attention each, three replays; the attention ranges were open only at capture.
    trace = Trace.load(real_capture("graphcapture_fp32"))
    replayed = trace.kernels.query("how == 'graph'")
    inside = replayed[replayed["range_path"].astype(str).str.endswith("scaled dot product attention")]
    assert len(inside[inside["class"] == "fused attention"]) == 6 * 3
    (summary,) = summarize(trace, "graph")
    forward = summary.phase("forward")
    assert forward is not None
    assert (forward.instances, summary.status) == (3, "ok")


def test_other_names_and_two_backward_passes_a_step(real_capture: Capture) -> None:
    # Ranges fwd, criterion, bwd, opt in `step 2` to `step 4`; gradients of two passes add up; TF32 allowed, while
    # attention in fp32 stays so.
    summary = summary_of(real_capture, "accumulate_tf32")
    instances = {phase.phase: phase.instances for phase in summary.phases}
    assert instances == {"forward": 6, "loss": 6, "backward": 6, "optimizer": 3, "step": 3}
    assert next(iter(summary.precisions)) == "tf32"


def test_a_model_of_the_transformers_library(real_capture: Capture) -> None:
    summary = summary_of(real_capture, "llama_bf16")
    assert [p.range for p in summary.phases] == ["forward_pass", "backward_pass", "optimizer_step", "train_step"]
    assert next(iter(summary.precisions)) == "bf16"


def test_jax_replays_graphs_and_has_steps_alone(real_capture: Capture) -> None:
    summary = summary_of(real_capture, "jax_mlp")
    assert [p.phase for p in summary.phases] == ["step"]
    assert summary.coverage is not None
    assert summary.coverage.how["graph"] == summary.coverage.kernels


def test_a_run_that_ends_out_of_memory(real_capture: Capture) -> None:
    # Batch 2 passes, batch 64 fails in cudaMalloc inside the second forward, whose range the exception closes.
    summary = summary_of(real_capture, "oom_fp32")
    assert summary.status == "oom"
    counts = {p.phase: (p.instances, p.incomplete_instances) for p in summary.phases}
    assert counts == {"forward": (1, 1), "backward": (1, 0)}
