"""Tests attention outside of any forward range, and the bytes that its softmax moves."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from nsys_analyzer import Trace
from nsys_analyzer.analysis.summary.complete import complete_captures
from nsys_analyzer.analysis.summary.summarize import summarize
from nsys_analyzer.analysis.summary.summary import CaptureSummary
from nsys_analyzer.analysis.transformer.attention import (
    count_moved_bytes,
    measure_softmax_traffic,
)
from nsys_analyzer.analysis.transformer.models import Configuration, ModelSize
from nsys_analyzer.analysis.transformer.peaks import find_l2_bytes, find_memory_bandwidth, find_peaks
from nsys_analyzer.report.evidence import Evidence
from nsys_analyzer.report.model import Report
from nsys_analyzer.report.renderers.json_report import report_data
from nsys_analyzer.report.renderers.markdown import render
from nsys_analyzer.report.sections import build_report
from nsys_analyzer.trace.metadata import Gpu
from tests.support.cases import make_case_test
from tests.support.export import GEMM

H200 = Gpu(0, "NVIDIA H200", 150 << 30, 132)

_ELEMENTWISE = "void at::native::elementwise_kernel<(int)128, (int)2, void at::native::gpu_kernel_impl_nocast<"
_VECTORIZED = "void at::native::vectorized_elementwise_kernel<(int)4, at::native::"
_REDUCE = "void at::native::reduce_kernel<(int)512, (int)1, at::native::ReduceOp<"
AMAX = f"{_REDUCE}float, at::native::MaxOps<float>, unsigned int, float, (int)4, (int)4>>(T3)"
SUBTRACT = f"{_ELEMENTWISE}at::native::CUDAFunctor_add<float>>(at::TensorIteratorBase &, const T1 &)>(int, T3)"
EXP = f"{_VECTORIZED}exp_kernel_cuda(at::TensorIteratorBase &)::[lambda(float) (instance 1)], std::array<char *, 2>>"
SUM = f"{_REDUCE}float, at::native::func_wrapper_t<float, at::native::sum_functor<float, float, float>>>(T3)"
DIVIDE = f"{_ELEMENTWISE}at::native::BinaryFunctor<float, float, float, at::native::DivFunctor<float>>>(int, T3)"
BY_HAND = (AMAX, SUBTRACT, EXP, SUM, DIVIDE)


def section_e(summary: CaptureSummary) -> str:
    text = render(build_report(Evidence(complete_captures([summary]), "nsys-analyze report")), {}).replace("\xa0", " ")
    return text.split("How does softmax compare with the attention matmuls?")[1].split("\n## ")[0]


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        (AMAX, (4, 0, 4)),
        (SUBTRACT, (4, 4, 4)),
        (EXP, (4, 4, 0)),
        (SUM, (4, 0, 4)),
        (DIVIDE, (4, 4, 4)),
        (SUBTRACT.replace("float", "c10::BFloat16"), (2, 2, 2)),
        (f"{_VECTORIZED}BUnaryFunctor<c10::Half, c10::Half, c10::Half, MulFunctor<float>>>(int)", (2, 2, 0)),
        (f"{_VECTORIZED}bfloat16_copy_kernel_cuda(at::TensorIteratorBase &)::[lambda(float)]>", (4, 2, 0)),
        (
            "void at::native::unrolled_elementwise_kernel<at::native::direct_copy_kernel_cuda(at::TensorIteratorBase &)"
            "::[lambda(float) (instance 1)], at::native::memory::LoadWithCast<(int)1>>(int)",
            (2, 4, 0),
        ),
        (
            "void at::native::(anonymous namespace)::softmax_warp_forward<c10::BFloat16, float, float, 8, false>",
            (2, 4, 0),
        ),
        (
            "void at::native::(anonymous namespace)::cunn_SoftMaxForward<4, c10::Half, float, c10::Half, "
            "at::native::(anonymous namespace)::SoftMaxForwardEpilogue>",
            (2, 2, 0),
        ),
        (f"{_VECTORIZED}FillFunctor<float>, std::array<char *, 1>>(int)", None),  # perhaps of a scalar
        ("triton_per_fused_amax_exp_sub_3", None),
        (GEMM, None),
    ],
)  # fmt: skip
def test_what_a_kernel_of_softmax_moves(name: str, expected: tuple[int, int, int] | None) -> None:
    assert count_moved_bytes(name) == expected


test_attention = make_case_test(
    "attention",
    {
        "section": lambda capture: section_e(capture.summary),
        "json": lambda capture: report_data(Report("", (), complete_captures(capture.summaries)))["captures"][0],
    },
    {
        "FLASH": "void pytorch_flash::flash_fwd_kernel<Flash_fwd_kernel_traits<64, 128, 128, 4>>(Flash_fwd_params)",
        "SPLIT_K": "void splitKreduce_kernel<32, 16, int, float>",
        "SOFTMAX_WARP": "void (anonymous namespace)::softmax_warp_forward<float, float, float, 7, false, false>(float)",
        "MAX": AMAX,
        "SUBTRACT": SUBTRACT,
        "EXP": EXP,
        "SUM": SUM,
        "DIVIDE": DIVIDE,
    },
)


def by_hand(ns: int) -> list[tuple[str, int, int]]:
    """The five kernels of a softmax by hand, on one layer, together ``5 * ns`` long."""
    return [(name, 1, ns) for name in BY_HAND]


def test_a_softmax_by_hand_moves_eight_score_tensors_and_four_rows() -> None:
    # B 1, H 2, S 4,096: scores 2 · 4,096² = 33,554,432 of 4 bytes, 128 MiB, more than the L2 cache of 60 MiB; rows of
    # 8,192 values. Reads of max, subtract, exp, sum, divide 5; writes of subtract, exp, divide 3; rows: written by
    # max and sum, read by subtract and divide.
    scores, rows = 33_554_432, 8_192
    moved = 4 * (8 * scores + 4 * rows)
    found = measure_softmax_traffic(by_hand(70_000), (1, 2, 4096), 1, H200)
    assert found is not None
    assert found.bytes == moved
    assert found.bytes_per_s == pytest.approx(moved / 350e-6)  # 3.07 TB/s, 63.9 % of 4.8
    assert found.peak_share == pytest.approx(moved / 350e-6 / 4.8e12)
    assert (found.fits_in_l2, found.memory_bound) == (False, True)
    slower = measure_softmax_traffic(by_hand(100_000), (1, 2, 4096), 1, H200)  # 2.15 TB/s, 44.7 %
    assert slower is not None
    assert slower.memory_bound is False


def test_what_the_cache_holds_is_not_called_memory_bound() -> None:
    # S 1,024: 8 MiB. At 3.4 TB/s it is above 60 %, and at 13 TB/s above the peak: the cache can.
    for ns in (4_000, 1_000):
        found = measure_softmax_traffic(by_hand(ns), (1, 2, 1024), 1, H200)
        assert found is not None
        assert (found.fits_in_l2, found.memory_bound) == (True, None)
        assert found.peak_share is not None
        assert found.peak_share > 0.6


def test_bytes_that_cannot_be_are_no_figure() -> None:
    # 128 MiB eight times in 5 · 10 us: 21 TB/s from memory. The kernels are of other tensors.
    assert measure_softmax_traffic(by_hand(10_000), (1, 2, 4096), 1, H200) is None
    # A tenth of the time goes to a kernel that nothing is known of; of a twentieth the rest is still a lower bound.
    unknown = [*by_hand(70_000), ("mystery", 1, 39_000)]
    assert measure_softmax_traffic(unknown, (1, 2, 4096), 1, H200) is None
    assert measure_softmax_traffic([*by_hand(70_000), ("mystery", 1, 17_000)], (1, 2, 4096), 1, H200) is not None


def test_a_gpu_without_a_datasheet_has_the_peaks_that_its_export_says() -> None:
    other = Gpu(0, "NVIDIA B300", 1 << 38, 148, 8_000_000_000_000, 126 << 20)
    assert (find_memory_bandwidth(other), find_l2_bytes(other)) == (8e12, 126 << 20)
    assert (find_memory_bandwidth(H200), find_l2_bytes(H200)) == (4.8e12, 60 << 20)
    unknown = Gpu(0, "NVIDIA B300", 1 << 38, 148)
    assert (find_memory_bandwidth(unknown), find_l2_bytes(unknown), find_memory_bandwidth(None)) == (None, None, None)
    assert find_peaks("NVIDIA H200") is not None
    found = measure_softmax_traffic(by_hand(70_000), (1, 2, 4096), 1, unknown)
    assert found is not None
    assert (found.peak_share, found.fits_in_l2, found.memory_bound) == (None, None, None)


@pytest.mark.parametrize(
    ("name", "share", "fits"),
    [
        ("small_ctx512_forward_fp32", 0.577, True),  # 2.77 TB/s
        ("small_ctx512_train_bf16", 0.491, True),  # 2.36 TB/s: its max and subtract move 16-bit scores
    ],
)
def test_the_examples_sweep_reaches_its_known_share_of_the_peak(name: str, share: float, fits: bool) -> None:
    # B 4, H 12, S 512, L 12: 12,582,912 scores a layer. In fp32 8 times 48 MiB and 4 rows of 96 KiB take 145.6 us.
    model = ModelSize("small", 768, 3072, 12, 12)
    path = Path(__file__).parents[1] / "examples/sweep" / name / "capture.sqlite"
    (summary,) = summarize(Trace.load(path), name, configuration=Configuration(model, 512, 4, source="manifest"))
    assert summary.attention is not None
    traffic = summary.attention.softmax_traffic
    assert traffic is not None
    assert traffic.peak_share == pytest.approx(share, abs=0.001)
    assert traffic.fits_in_l2 is fits


def test_softmax_at_context_1024_is_memory_bound(real_capture: Callable[[str], Path]) -> None:
    """Four times the scores of context 512: 192 MiB, beyond the cache, at 2.94 of 4.8 TB/s = 61.3 %."""
    path = real_capture("small_ctx1024_train_fp32")
    known = Configuration(ModelSize("small", 768, 3072, 12, 12), 1024, 4, source="manifest")
    (summary,) = summarize(Trace.load(path), path.stem, configuration=known)
    assert summary.attention is not None
    traffic = summary.attention.softmax_traffic
    assert traffic is not None
    assert traffic.score_bytes == 4 * 12 * 1024**2 * 4
    assert traffic.peak_share == pytest.approx(0.613, abs=0.001)
    assert not traffic.fits_in_l2
    assert "61.3 % of the memory's peak bandwidth, so softmax is memory-bound." in section_e(summary)
