"""Reference figures of real captures: one NVIDIA H200, PyTorch 2.11, Nsight Systems 2025.3.

The model is the small one: 12 layers, 9 · 12 + 1 = 109 products per forward pass, some of them two launches.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from nsys_analyzer import Trace
from nsys_analyzer.analysis.summary.summarize import summarize
from nsys_analyzer.analysis.summary.summary import CaptureSummary, PhaseSummary
from nsys_analyzer.report.facts import say_all

Capture = Callable[[str], Path]
EXACT = 1e-3


def entries(real_capture: Capture, name: str) -> tuple[CaptureSummary, ...]:
    return summarize(Trace.load(real_capture(name)), name)


def phase_of(summary: CaptureSummary, name: str) -> PhaseSummary:
    phase = summary.phase(name)
    assert phase is not None
    return phase


# Means per instance (wall: median), found by an independent script that reads kernels alone: its busy time leaves
# out the fills (48 a forward in train_small256), which makes it the kernel sum where no kernels overlap.
REFERENCE = [
    ("train_small256", "forward", 3, 0, 644, 20.905, 8.989, 20.798),
    ("train_small256", "backward", 3, 0, 1300, 34.829, 19.065, 39.729),
    ("train_small256", "optimizer", 3, 0, 1776, 22.467, 5.335, 22.069),
    ("full_small128", "forward", 3, 5, 692, 21.378, 5.096, 21.123),
    ("full_small128", "backward", 3, 5, 1348, 33.704, 11.003, 35.829),
    ("bf16_sdpa_small1024", "forward", 3, 0, 682, 20.948, 5.981, 20.857),
]


@pytest.mark.parametrize(("name", "phase", "instances", "warmup", "kernels", "wall", "kernel_busy", "span"), REFERENCE)
def test_reference_figures(
    real_capture: Capture,
    name: str,
    phase: str,
    instances: int,
    warmup: int,
    kernels: int,
    wall: float,
    kernel_busy: float,
    span: float,
) -> None:
    (summary,) = entries(real_capture, name)
    found = phase_of(summary, phase)
    assert (found.instances, found.warmup_instances) == (instances, warmup)
    assert found.kernels_per_instance == kernels
    assert found.wall_ms.median == pytest.approx(wall, rel=EXACT)
    assert found.kernel_time_ms.mean == pytest.approx(kernel_busy, rel=EXACT)
    assert found.gpu_span_ms.mean == pytest.approx(span, rel=EXACT)
    fills = sum(row.ms_per_instance for row in found.memory)
    assert found.gpu_busy_ms.mean == pytest.approx(kernel_busy + fills, rel=EXACT)


# A GEMM by name alone. The reference leaves split-K reductions out and counts attention kernels in; the classes
# do the opposite, so the reference is matmul minus split-K, plus fused attention.
MATMUL_BY_NAME = [
    ("train_small256", "forward", 0.778),
    ("train_small256", "backward", 0.711),
    ("train_small256", "optimizer", 0.0),
    ("full_small128", "forward", 0.755),
    ("full_small128", "backward", 0.668),
    ("bf16_sdpa_small1024", "forward", 0.317),
]


@pytest.mark.parametrize(("name", "phase", "share"), MATMUL_BY_NAME)
def test_matmul_share(real_capture: Capture, name: str, phase: str, share: float) -> None:
    (summary,) = entries(real_capture, name)
    found = phase_of(summary, phase)
    split_k = sum(row.share for row in found.kernels if "splitKreduce" in row.name)
    by_name = found.share_of("matmul") - split_k + found.share_of("fused attention")
    assert by_name == pytest.approx(share, abs=0.0006)


def test_every_kernel_of_every_capture_is_accounted_for(real_capture: Capture) -> None:
    kernels = {
        "train_small256": 11_166,
        "full_small128": 30_546,
        "bf16_sdpa_small1024": 11_262,
        "mem_small256": 11_166,
        "graph_small256": 0,
        "graphnode_small256": 1_932,
        "ddp2_small256": 12_792,
    }
    for name, expected in kernels.items():
        coverages = [s.coverage for s in entries(real_capture, name) if s.coverage]
        assert sum(c.kernels for c in coverages) == expected
        assert sum(c.attributed + c.unattributed for c in coverages) == expected
        assert all(c.lost_launches == 0 for c in coverages)


def test_ranks_are_kept_apart(real_capture: Capture) -> None:
    first, second = entries(real_capture, "ddp2_small256")
    assert (first.process, first.pid, second.process, second.pid) == ("device 0", 615, "device 1", 616)
    for summary in (first, second):
        assert [phase_of(summary, p).kernels_per_instance for p in ("forward", "backward", "optimizer")] == [
            647,
            1429,
            56,
        ]
    # The second process waits in NCCL for the first: overlap makes its kernel sum larger than its busy time.
    backward = phase_of(second, "backward")
    assert backward.share_of("communication") > 0.7
    assert (backward.kernel_time_ms.mean or 0) > (backward.gpu_busy_ms.mean or 0)


def test_an_opaque_graph_is_no_idle_time(real_capture: Capture) -> None:
    (opaque,) = entries(real_capture, "graph_small256")
    (nodes,) = entries(real_capture, "graphnode_small256")
    assert opaque.status == "no_kernels"
    assert any("opaque" in warning for warning in say_all(opaque.warnings))
    # The same forward pass, 9.3 and 9.6 ms of wall, nearly all of it busy.
    for summary in (opaque, nodes):
        forward = phase_of(summary, "forward")
        assert 0.9 < (forward.gpu_busy_ms.mean or 0) / (forward.wall_ms.mean or 1) < 1
    assert phase_of(nodes, "forward").kernels_per_instance == 644
    assert nodes.coverage is not None
    assert nodes.coverage.how["graph"] == 1_932


def test_softmax_of_the_small_model(real_capture: Capture) -> None:
    (summary,) = entries(real_capture, "train_small256")
    attention = summary.attention
    assert attention is not None
    # 12 layers: 5 softmax kernels and 2 products each.
    assert (attention.softmax_launches, attention.matmul_launches) == (60, 24)
    assert attention.runtime_ratio == pytest.approx(0.3995 / 0.4988, rel=1e-3)


def test_precision_is_read_from_the_kernels(real_capture: Capture) -> None:
    (fp32,) = entries(real_capture, "train_small256")
    (bf16,) = entries(real_capture, "bf16_sdpa_small1024")
    assert next(iter(fp32.precisions)) == "fp32"
    assert next(iter(bf16.precisions)) == "bf16"


def test_autograd_annotations_are_joined_by_name(real_capture: Capture) -> None:
    trace = Trace.load(real_capture("mem_small256"))
    assert len(trace.ranges) == 51_819
    assert len(trace.ranges.names) < 200
    products = trace.kernels.query("phase == 'forward' and range_path.str.contains('aten::bmm')")
    assert products["instance"].nunique() == 3
