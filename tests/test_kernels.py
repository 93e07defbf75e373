"""Tests that a kernel name with two classes, by the operators that launched it, counts as two kernels."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner

from nsys_analyzer import Trace
from nsys_analyzer.analysis.kernels.classes import classify
from nsys_analyzer.analysis.ranges.instances import AttributedTrace
from nsys_analyzer.analysis.summary.kernel_tables import merge_kernels
from nsys_analyzer.analysis.summary.summarize import summarize
from nsys_analyzer.cli.main import cli
from nsys_analyzer.export.frame import kernel_frame
from tests.support.export import ADD, AUTOGRAD, GEMM, Export
from tests.support.kineto import Kineto

SGEMM = "volta_sgemm_64x64_nt"
CUTLASS = "void cutlass::Kernel2<cutlass_80_simt_sgemm_256x128_8x4_nn_align1>(T1::Params)"
#: Of torch.compile before 2.1, which named no operators.
NAMELESS = "triton__0d1d2d"


def convolution_and_matmul() -> Export:
    """Forward [0, 100): SGEMM twice in a convolution, 10 + 20 ns, once in aten::mm, 50 ns; ADD in the convolution."""
    export = Export().range("forward", 0, 100)
    export.range("aten::cudnn_convolution, seq = 1, op_id = 1", 10, 30)
    export.kernel(SGEMM, 12, 200, 210).kernel(SGEMM, 14, 210, 230).kernel(ADD, 16, 230, 235)
    export.range("aten::linear, seq = 2, op_id = 2", 40, 60).range("aten::mm, seq = 3, op_id = 3", 45, 55)
    return export.kernel(SGEMM, 50, 240, 290)


@pytest.fixture
def trace(tmp_path: Path) -> Trace:
    return Trace.load(convolution_and_matmul().write(tmp_path / "t.sqlite"))


def test_a_gemm_of_a_convolution_has_a_row_of_its_own(trace: Trace) -> None:
    (summary,) = summarize(trace, "t")
    (forward,) = summary.phases
    assert [
        (row.name, row.kernel_class, row.launches_per_instance, row.ms_per_instance) for row in forward.kernels
    ] == [
        (SGEMM, "matmul", 1, pytest.approx(50e-6)),
        (SGEMM, "convolution", 2, pytest.approx(30e-6)),
        (ADD, "elementwise", 1, pytest.approx(5e-6)),
    ]
    # 50 + 30 + 5 = 85 ns.
    shares = {row.kernel_class: row.share for row in forward.classes}
    assert shares == {
        name: pytest.approx(ns / 85) for name, ns in (("matmul", 50), ("convolution", 30), ("elementwise", 5))
    }
    # Only what is a matmul has a precision.
    assert summary.precisions == {"fp32": 1.0}


def test_tables_of_phases_are_merged_by_name_and_class(trace: Trace) -> None:
    (forward,) = summarize(trace, "t")[0].phases
    merged = merge_kernels(forward.kernels, forward.kernels)
    assert [(row.kernel_class, row.ms_per_instance) for row in merged] == [
        ("matmul", pytest.approx(100e-6)), ("convolution", pytest.approx(60e-6)), ("elementwise", pytest.approx(10e-6)),
    ]  # fmt: skip


def test_a_report_tells_the_two_classes_of_a_name(tmp_path: Path) -> None:
    export = Export().range("forward", 0, 100)
    export.range("aten::cudnn_convolution, seq = 1", 10, 30).kernel(CUTLASS, 20, 200, 230)
    export.range("aten::mm, seq = 2", 40, 60).kernel(CUTLASS, 50, 240, 290)
    path, written = export.write(tmp_path / "t.sqlite"), tmp_path / "report.md"
    result = CliRunner().invoke(cli, ["report", str(path), "-o", str(written)], catch_exceptions=False)
    assert result.exit_code == 0
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in written.read_text().splitlines()]
    shown = [row[:2] for row in rows if row and row[0] == "`cutlass simt sgemm 256x128_8x4_nn`"]
    # The table of all kernels: a row for each class; the full names: one line with both.
    assert [row[1] for row in shown if row[1] in ("matmul", "convolution")] == ["matmul", "convolution"]
    assert "`cutlass simt sgemm 256x128_8x4_nn` (convolution, matmul): `" in written.read_text()


def test_the_frame_has_class_and_operator_of_each_kernel(trace: Trace) -> None:
    frame = kernel_frame(trace)
    assert frame["class"].tolist() == ["convolution", "convolution", "elementwise", "matmul"]
    assert frame["operator"].tolist() == ["aten::cudnn_convolution"] * 3 + ["aten::mm"]


def test_a_trace_without_operators_has_one_kernel_for_each_name(tmp_path: Path) -> None:
    export = Export().range("forward", 0, 100).kernel(GEMM, 10, 20, 30).kernel(NAMELESS, 11, 30, 40)
    trace = Trace.load(export.write(tmp_path / "t.sqlite"))
    kernels = AttributedTrace(trace).kernels
    assert kernels.names == trace.operations.names
    np.testing.assert_array_equal(kernels.code, trace.operations.name)
    assert dict(zip(kernels.names, kernels.classes, strict=True)) == {GEMM: "matmul", NAMELESS: "compiled"}
    assert kernel_frame(trace)["operator"].isna().all()


def test_the_operator_of_another_thread_launched_nothing(tmp_path: Path) -> None:
    # Autograd launches while the main thread is in a convolution: of the two only the main thread's is one.
    export = Export().range("backward", 0, 100).range("aten::convolution_backward, seq = 1", 10, 90)
    export.kernel(SGEMM, 20, 200, 210).kernel(SGEMM, 30, 210, 220, tid=AUTOGRAD)
    frame = kernel_frame(Trace.load(export.write(tmp_path / "t.sqlite")))
    assert frame["class"].tolist() == ["convolution", "matmul"]


def test_a_graph_replays_what_an_operator_launched(tmp_path: Path) -> None:
    export = Export().range("aten::cudnn_convolution, seq = 1", 10, 30).range("forward", 100, 200)
    export.add("CUDA_GRAPH_NODE_EVENTS", start=20, end=21, globalTid=(1 << 48) | (100 << 24) | 100, graphNodeId=7)
    export.kernel(SGEMM, 110, 120, 130, node=7, api="cudaGraphLaunch_v10000")
    assert kernel_frame(Trace.load(export.write(tmp_path / "t.sqlite")))["class"].tolist() == ["convolution"]


def test_operators_of_pytorchs_profiler_decide_too(tmp_path: Path) -> None:
    kineto = Kineto().gpu().operator("aten::cudnn_convolution", 0, 100).operator("aten::empty", 10, 5)
    kineto.launch(1, 50).kernel(SGEMM, 1, 200, 10)
    kineto.operator("aten::addmm", 110, 50).launch(2, 120).kernel(SGEMM, 2, 220, 10)
    kineto.operator("CompiledFunction", 170, 50).launch(3, 180).kernel(NAMELESS, 3, 240, 10)
    frame = kernel_frame(Trace.load(kineto.write(tmp_path / "t.pt.trace.json")))
    assert frame["class"].tolist() == ["convolution", "matmul", "compiled"]


@pytest.mark.parametrize(
    ("name", "operator", "kernel_class"),
    [
        (SGEMM, "aten::convolution_backward", "convolution"),
        ("void cutlass::Kernel2<cutlass_80_tensorop_s1688gemm_64x64_16x6_tn_align4>()", "aten::conv2d", "convolution"),
        ("nvjet_sm90_tst_128x64_64x8_1x2_h_bz_NNT", "aten::cudnn_convolution", "convolution"),
        ("void cudnn::ops::convertTensor_kernel<float>()", "aten::cudnn_convolution", "convolution"),
        ("void cudnn::ops::convertTensor_kernel<float>()", "aten::copy_", "copy/layout"),
        ("void at::native::im2col_kernel<float>(long)", "aten::im2col", "copy/layout"),
        ("void at::native::im2col_kernel<float>(long)", "aten::_slow_conv2d_forward", "convolution"),
        ("void at_cuda_detail::cub::DeviceReduceSingleTileKernel<x>()", "aten::nonzero", "sort/scan"),
        ("void at_cuda_detail::cub::DeviceReduceSingleTileKernel<x>()", "aten::sum", "reduction"),
        # No rule knows the name.
        ("void globalKernel<float>()", "aten::addmm", "matmul"),
        ("compute_cuda_kernel", "aten::repeat_interleave", "copy/layout"),
        ("compute_cuda_kernel", "", "copy/layout"),
        (NAMELESS, "CompiledFunctionBackward", "compiled"),
        # A telling name stays what it is: a bias's gradient, a workspace's fill, a product inside something else.
        ("void at::native::reduce_kernel<512, 1, ReduceOp<float>>()", "aten::convolution_backward", "reduction"),
        ("void at::native::vectorized_elementwise_kernel<4, FillFunctor<float>>()", "aten::mm", "elementwise"),
        (SGEMM, "aten::_cudnn_rnn", "matmul"),
        (SGEMM, "aten::embedding_dense_backward", "matmul"),
    ],
)  # fmt: skip
def test_the_operator_decides_what_the_name_leaves_open(name: str, operator: str, kernel_class: str) -> None:
    assert classify(name, operator) == kernel_class
