"""Reference figures of real captures: one NVIDIA H200, PyTorch 2.11, Nsight Systems 2025.3.

The model is the small one: 12 layers, 9 · 12 + 1 = 109 products per forward pass, some of them two launches.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

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


class Reference(NamedTuple):
    """Figures of a phase per instance: the mean, and the median of the wall time.

    An independent script that reads only kernels found them. Its busy time has no fills (48 a forward pass in
    train_small256), so it is the total kernel time where no kernels overlap. Its share of matmul counts GEMMs by name:
    it leaves split-K reductions out and counts attention kernels in. The classes do the opposite.
    """

    capture: str
    phase: str
    warmup: int
    kernels: int
    wall_ms: float
    kernel_busy_ms: float
    span_ms: float
    matmul_share: float


REFERENCES = [
    Reference("train_small256", "forward", 0, 644, 20.905, 8.989, 20.798, 0.778),
    Reference("train_small256", "backward", 0, 1300, 34.829, 19.065, 39.729, 0.711),
    Reference("train_small256", "optimizer", 0, 1776, 22.467, 5.335, 22.069, 0.0),
    Reference("full_small128", "forward", 5, 692, 21.378, 5.096, 21.123, 0.755),
    Reference("full_small128", "backward", 5, 1348, 33.704, 11.003, 35.829, 0.668),
    Reference("bf16_sdpa_small1024", "forward", 0, 682, 20.948, 5.981, 20.857, 0.317),
]


@pytest.mark.parametrize("reference", REFERENCES, ids=lambda row: f"{row.capture}-{row.phase}")
def test_reference_figures(real_capture: Capture, reference: Reference) -> None:
    (summary,) = entries(real_capture, reference.capture)
    found = phase_of(summary, reference.phase)
    assert (found.instances, found.warmup_instances) == (3, reference.warmup)
    assert found.kernels_per_instance == reference.kernels
    assert found.wall_ms.median == pytest.approx(reference.wall_ms, rel=EXACT)
    assert found.kernel_time_ms.mean == pytest.approx(reference.kernel_busy_ms, rel=EXACT)
    assert found.gpu_span_ms.mean == pytest.approx(reference.span_ms, rel=EXACT)
    fills = sum(row.ms_per_instance for row in found.memory)
    assert found.gpu_busy_ms.mean == pytest.approx(reference.kernel_busy_ms + fills, rel=EXACT)
    split_k = sum(row.share for row in found.kernels if "splitKreduce" in row.name)
    share_by_name = found.share_of("matmul") - split_k + found.share_of("fused attention")
    assert share_by_name == pytest.approx(reference.matmul_share, abs=0.0006)


def test_every_kernel_of_every_capture_is_accounted_for(real_capture: Capture) -> None:
    kernels = {
        "train_small256": 11_166, "full_small128": 30_546, "bf16_sdpa_small1024": 11_262, "mem_small256": 11_166,
        "graph_small256": 0, "graphnode_small256": 1_932, "ddp2_small256": 12_792,
    }  # fmt: skip
    for name, expected in kernels.items():
        coverages = [s.coverage for s in entries(real_capture, name) if s.coverage]
        assert sum(c.kernels for c in coverages) == expected
        assert sum(c.attributed + c.unattributed for c in coverages) == expected
        assert all(c.lost_launches == 0 for c in coverages)


def test_ranks_are_kept_apart(real_capture: Capture) -> None:
    first, second = entries(real_capture, "ddp2_small256")
    assert (first.process, first.pid, second.process, second.pid) == ("device 0", 615, "device 1", 616)
    for summary in (first, second):
        phases = [phase_of(summary, name) for name in ("forward", "backward", "optimizer")]
        assert [phase.kernels_per_instance for phase in phases] == [647, 1429, 56]
    # The second process waits in NCCL for the first: overlap makes its kernel sum larger than its busy time.
    backward = phase_of(second, "backward")
    assert backward.share_of("communication") > 0.7
    assert (backward.kernel_time_ms.mean or 0) > (backward.gpu_busy_ms.mean or 0)


def test_an_opaque_graph_is_no_idle_time(real_capture: Capture) -> None:
    (opaque,) = entries(real_capture, "graph_small256")
    (nodes,) = entries(real_capture, "graphnode_small256")
    assert opaque.status == "no_kernels"
    assert any("kernels of 3 CUDA graph replays were not recorded" in warning for warning in say_all(opaque.warnings))
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
