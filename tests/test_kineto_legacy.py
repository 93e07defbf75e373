"""Traces of the autograd profiler before Kineto: bare arrays, no categories, operators timed on the GPU."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from nsys_analyzer import Trace
from nsys_analyzer.analysis.summary.summarize import summarize
from nsys_analyzer.analysis.summary.summary import CaptureSummary
from nsys_analyzer.errors import TraceError
from tests.support.kineto import Kineto


def loaded(trace: Kineto, tmp_path: Path) -> Trace:
    path = tmp_path / "t.json"
    path.write_text(trace.array(), encoding="utf-8")
    return Trace.load(path)


def summary_of(trace: Kineto, tmp_path: Path) -> CaptureSummary:
    (summary,) = summarize(loaded(trace, tmp_path), "t")
    return summary


def step() -> Kineto:
    """Forward [100, 200) on the CPU, [300, 500) on the GPU. In it linear, [110, 150) and [310, 410), which calls t,
    [112, 114) and [310, 311), and addmm, [120, 140) and [320, 400); then relu, [160, 170) and [420, 450).

    On the GPU linear's own stretches are [311, 320) and [400, 410): the longest takes 10.
    """
    trace = Kineto().legacy(0, "forward", 100.0, 100.0, (300.0, 200.0))
    trace.legacy(1, "aten::linear", 110.0, 40.0, (310.0, 100.0))
    trace.legacy(2, "aten::t", 112.0, 2.0, (310.0, 1.0))
    trace.legacy(3, "aten::addmm", 120.0, 20.0, (320.0, 80.0))
    return trace.legacy(4, "aten::relu", 160.0, 10.0, (420.0, 30.0))


def test_an_operator_is_a_kernel_by_its_own_time_on_the_gpu(tmp_path: Path) -> None:
    forward = summary_of(step(), tmp_path).phase("forward")
    assert forward
    found = {row.name: row.ms_per_instance * 1000 for row in forward.kernels}
    assert found == pytest.approx({"aten::addmm": 80, "aten::relu": 30, "aten::linear": 10, "aten::t": 1})
    assert forward.wall_ms.mean == pytest.approx(0.100)
    assert forward.gpu_busy_ms.mean == pytest.approx(0.121)  # 80 + 30 + 10 + 1: none overlap
    assert forward.share_of("matmul") == pytest.approx(90 / 121)  # linear and addmm


def test_the_arrows_are_launches(tmp_path: Path) -> None:
    trace = loaded(step(), tmp_path)
    started = dict(zip(trace.launches.correlation.tolist(), trace.launches.start.tolist(), strict=True))
    of_kernel = [started[number] for number in trace.operations.correlation.tolist()]
    first = min(trace.ranges.start)  # forward's, at 100
    assert sorted(np.array(of_kernel) - first) == [10_000, 12_000, 20_000, 60_000]


def test_it_is_said_how_they_were_timed(tmp_path: Path) -> None:
    assert any("CUDA events" in warning for warning in summary_of(step(), tmp_path).warnings)


def test_without_a_gpu_operators_are_timed_on_the_cpu(tmp_path: Path) -> None:
    trace = (
        Kineto()
        .legacy(0, "forward", 100.0, 100.0)
        .legacy(1, "aten::mm", 110.0, 40.0)
        .legacy(2, "MmBackward", 300.0, 9.0)
    )
    summary = summary_of(trace, tmp_path)
    forward = summary.phase("forward")
    assert summary.on_cpu
    assert forward
    assert [(row.name, row.ms_per_instance) for row in forward.kernels] == [("aten::mm", pytest.approx(0.040))]
    assert summary.warnings == ()


def test_a_gpu_of_which_only_arrows_tell_is_told(tmp_path: Path) -> None:
    # PyTorch 1.8 and later write where an arrow starts, and no more.
    trace = Kineto().legacy(0, "forward", 100.0, 100.0).legacy(1, "aten::mm", 110.0, 40.0, (300.0, 9.0))
    trace.events = [event for event in trace.events if event["pid"] == "CPU functions"]
    summary = summary_of(trace, tmp_path)
    assert summary.on_cpu
    assert any("launched work on a GPU" in warning for warning in summary.warnings)


def test_two_devices_stay_apart(tmp_path: Path) -> None:
    trace = Kineto().legacy(0, "aten::mm", 0.0, 5.0, (10.0, 20.0)).legacy(1, "aten::mm", 5.0, 5.0, (10.0, 20.0))
    for event in trace.events[-2:]:
        event["tid"] = 1
    operations = loaded(trace, tmp_path).operations
    assert sorted(operations.device.tolist()) == [0, 1]
    assert sorted(operations.correlation.tolist()) == [1, 2]
    assert (operations.end - operations.start).tolist() == [20_000, 20_000]


def test_another_tools_processes_are_none_of_it(tmp_path: Path) -> None:
    trace = Kineto().legacy(0, "aten::mm", 0.0, 5.0)
    trace.events[0]["pid"] = "Compositor"
    trace.operator("aten::add", 10, 5)
    assert loaded(trace, tmp_path).operations.names == ("aten::add",)


def test_a_trace_without_operators_is_refused(tmp_path: Path) -> None:
    """On the GPU is a range alone, which is no kernel; of the CPU nothing is there."""
    trace = Kineto().legacy(0, "forward", 100.0, 100.0, (300.0, 200.0))
    trace.events = [event for event in trace.events if event.get("pid") == "CUDA functions"]
    with pytest.raises(TraceError, match=r"holds no events of PyTorch's profiler"):
        loaded(trace, tmp_path)
