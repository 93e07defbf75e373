"""The attainable time of an operator: curves of measured times, classes, data sheets, and the table from a bench."""

from __future__ import annotations

import csv
import importlib.util
import math
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nsys_analyzer.analysis.operators.attainable import (
    TIMES_FILE,
    AttainableRates,
    Curve,
    find_attainable_rates,
    find_classes,
)
from nsys_analyzer.analysis.operators.costs import Cost
from nsys_analyzer.analysis.transformer.peaks import find_peaks
from nsys_analyzer.experiments import attainable
from nsys_analyzer.inputs.rows import ROWS_FILE
from nsys_analyzer.trace.metadata import Gpu
from nsys_analyzer.trace.operator_calls import Signature, Tensor
from tests.support.operator_calls import OperatorSteps, tensor
from tests.support.rows import page, typed_row

ROOT = Path(__file__).parent.parent
ROWS = ROOT / "examples/benches/attainable" / ROWS_FILE
AMOUNTS = st.floats(1, 1e15)


def rates_of(name: str) -> AttainableRates:
    """Returns the rates of a GPU by the name that its driver reports."""
    rates = find_attainable_rates(Gpu(0, name, 0, 0))
    assert rates
    return rates


H100 = rates_of("NVIDIA H100 80GB HBM3")
A100 = rates_of("NVIDIA A100-SXM4-80GB")


def make_tool() -> ModuleType:
    """Returns the module that writes the table."""
    spec = importlib.util.spec_from_file_location("make_attainable_times", ROOT / "docs/make_attainable_times.py")
    assert spec
    assert spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


# --- curves


def test_a_curve_follows_the_fastest_operators() -> None:
    # 100 takes no longer than 200, which takes 40 ns. 250 takes at most 1.25 · 40 ns. 400 is twice 200, so its time
    # stands, for example because 200 fits into the L2 cache and 400 does not.
    curve = Curve.of([(100, 50), (200, 40), (250, 90), (400, 100)])
    assert dict(zip(curve.amount, curve.ns, strict=True)) == {100: 40, 200: 40, 250: 50, 400: 100}
    assert [curve.time_ns(amount) for amount in (0, 1, 150)] == pytest.approx([40, 40, 40])  # a shortest time
    assert curve.time_ns(math.sqrt(250 * 400)) == pytest.approx(math.sqrt(50 * 100))  # a line between logarithms
    assert curve.time_ns(1200) == 300  # 3 · 100


@given(st.lists(st.tuples(AMOUNTS, AMOUNTS), min_size=1), AMOUNTS, AMOUNTS)
def test_more_work_takes_no_less_time(points: list[tuple[float, float]], first: float, second: float) -> None:
    curve, (less, more) = Curve.of(points), sorted((first, second))
    assert curve.time_ns(less) <= curve.time_ns(more) * (1 + 1e-9)
    assert all(curve.time_ns(amount) <= ns * (1 + 1e-9) for amount, ns in points)  # no measured operator is faster


@given(st.sampled_from([H100, A100]), AMOUNTS, AMOUNTS, AMOUNTS)
def test_arithmetic_and_traffic_overlap(rates: AttainableRates, flops: float, size: float, factor: float) -> None:
    both = rates.time_ns(Cost("matmul", "bf16", flops, size))
    assert both == max(rates.time_ns(Cost("matmul", "bf16", flops, 0)), rates.time_ns(Cost("matmul", "bf16", 1, size)))
    assert both <= rates.time_ns(Cost("matmul", "bf16", flops * factor, size * factor)) * (1 + 1e-9)


# --- the table


def test_rates_of_large_operators() -> None:
    """An H100 has 989.4 TFLOP/s in bf16 and 3.35 TB/s, of which good kernels attain about 80 and 90 %."""
    flops, size = 2 * 8192**3, 4e9
    assert 0.75 < flops / H100.time_ns(Cost("matmul", "bf16", flops, 0)) / 989.4e3 < 0.85
    assert 0.88 < size / H100.time_ns(Cost("elementwise", "fp32", 1e9, size)) / 3350 < 0.95
    assert not H100.is_scaled


def test_data_of_the_size_of_the_cache_are_read_from_memory() -> None:
    # 24 MB in the L2 cache were measured at more than 6 TB/s. An operator that reads them from memory has 3.1 TB/s.
    assert H100.time_ns(Cost("elementwise", "bf16", 0, 24e6)) == pytest.approx(24e6 / 3.06e3, rel=0.02)


def test_a_kernel_has_a_shortest_time_on_every_gpu() -> None:
    for kind in ("elementwise", "matmul"):
        shortest = [rates.time_ns(Cost(kind, "bf16", 8, 8)) for rates in (H100, A100)]  # type: ignore[arg-type]
        assert shortest[0] == shortest[1]
        assert 900 < shortest[0] < 2500


def test_times_of_another_gpu_follow_from_the_data_sheets() -> None:
    assert A100.is_scaled
    assert A100.measured_on == H100.gpu.removeprefix("NVIDIA ")
    large = Cost("matmul", "bf16", 1e13, 0), Cost("elementwise", "bf16", 0, 1e11)
    factors = [A100.time_ns(cost) / H100.time_ns(cost) for cost in large]
    assert factors == pytest.approx([989.4 / 312, 3.35 / 2.039])  # TFLOP/s and TB/s of H100 ÷ A100


@pytest.mark.parametrize(
    ("gpu", "kind", "precision", "similar", "factor"),
    [
        ("NVIDIA A100-SXM4-80GB", "matmul", "fp8", "bf16", math.nan),  # it has no arithmetic in fp8
        ("NVIDIA H200", "matmul", "fp64", "bf16", math.nan),  # neither measured nor in the table of peaks
        ("NVIDIA B200", "matmul", "fp4", "fp8", 4.5 / 9),  # an H100 has no fp4, and its fp8 was measured
        ("NVIDIA B200", "attention", "fp8", "bf16", 2.25 / 4.5),  # attention in fp8 was not measured
    ],
)
def test_precisions_that_were_not_measured(gpu: str, kind: Any, precision: str, similar: str, factor: float) -> None:
    rates = rates_of(gpu)
    times = [rates.time_ns(Cost(kind, name, 1e14, 0)) for name in (precision, similar)]
    assert times[0] == pytest.approx(times[1] * factor, nan_ok=True)


@pytest.mark.parametrize(
    ("kind", "columns", "limit"),
    [
        ("matmul", 4096, "FLOPs"),
        ("matmul", 1, "memory"),  # 2 FLOPs for each of 4096² weights of 2 bytes
        ("elementwise", 4096, "memory"),
    ],
)
def test_the_limit_of_an_operator(kind: Any, columns: int, limit: str) -> None:
    cost = Cost(kind, "bf16", 2 * 4096**2 * columns, 2 * (4096**2 + 2 * 4096 * columns))
    assert H100.find_limit(cost, Signature("aten::mm", ())) == limit


def test_no_rates() -> None:
    assert find_attainable_rates(None) is None
    assert find_attainable_rates(Gpu(0, "NVIDIA GPU of tomorrow", 0, 0)) is None
    assert math.isnan(H100.time_ns(Cost("collective", "", 0, 1e6)))


def test_classes() -> None:
    heads = Tensor((8, 16, 1024, 64), "bfloat16")
    backward = Signature("aten::_scaled_dot_product_flash_attention_backward", (heads,) * 4)
    assert find_classes(Cost("attention", "bf16", 1, 1), backward) == (
        "attention with heads of 64 backward", "attention with heads of 64", "attention backward", "attention",
    )  # fmt: skip
    norms = ("cudnn_batch_norm", "native_batch_norm_backward", "batch_norm_backward_elemt", "layer_norm")
    classes = [find_classes(Cost("norm", "bf16", 1, 1), Signature(f"aten::{name}", (heads,)))[0] for name in norms]
    assert classes == ["batch norm", "batch norm backward", "norm backward", "norm"]
    assert find_classes(Cost("copy", "bf16", 1, 1)) == ("copy",)


@pytest.mark.parametrize(
    ("operator", "kernel", "precision"),
    [
        ("mm", "sm80_xmma_gemm_f32f32_tf32f32_f32_nn_n_tilesize128x64x16", "tf32"),
        ("mm", "sm80_xmma_gemm_f32f32_f32f32_f32_nt_n_tilesize64x64x8", "fp32"),
        ("mm", "a_kernel_that_does_not_tell", "fp32"),
        ("relu", "vectorized_elementwise_kernel<4, relu, tf32>", "fp32"),  # it does not multiply
    ],
)
def test_operators_in_fp32_have_the_precision_of_their_kernels(operator: str, kernel: str, precision: str) -> None:
    square = tensor(8192, 8192, dtype="float32")
    steps = OperatorSteps().call(
        operator, *(square, square)[: 2 if operator == "mm" else 1], out=[square], kernel=kernel
    )
    operators = steps.case().operators
    assert operators
    (cost,) = operators.costs
    assert cost
    assert cost.precision == precision
    assert operators.attainable_ns[0] == rates_of("NVIDIA H200").time_ns(cost)


# --- the bench


def test_the_table_follows_from_the_rows_of_the_bench() -> None:
    table = TIMES_FILE.read_text(encoding="utf-8")
    assert make_tool().add_times(table, ROWS) == table
    gpus = {row["gpu"] for row in csv.DictReader(table.splitlines())}
    assert all(find_peaks(gpu) for gpu in gpus)


def test_a_new_gpu_is_added_to_the_table(tmp_path: Path) -> None:
    rows = tmp_path / ROWS_FILE
    rows.write_text(ROWS.read_text(encoding="utf-8").replace("NVIDIA H100 80GB HBM3", "NVIDIA L4"), encoding="utf-8")
    before = TIMES_FILE.read_text(encoding="utf-8")
    after = make_tool().add_times(before, rows)
    assert after.startswith(before)
    assert {line.partition(",")[0] for line in after.removeprefix(before).splitlines()} == {"L4"}
    rows.write_text(rows.read_text(encoding="utf-8").replace("NVIDIA L4", "NVIDIA unknown"), encoding="utf-8")
    with pytest.raises(SystemExit, match="lacks the GPU NVIDIA unknown"):
        make_tool().add_times(before, rows)


def test_section_of_the_bench() -> None:
    # 2 · 4096³ FLOPs in 200 µs are 687 TFLOP/s, and 3 · 4096² · 2 bytes in 200 µs are 503 GB/s.
    matmul = {"operator_class": "matmul", "operator": "aten::mm", "shapes": "4096×4096 · 4096×4096",
              "precision": "bf16", "flops": 2.0 * 4096**3, "bytes": 6.0 * 4096**2, "us": 200.0}  # fmt: skip
    case = {"device": "cuda", "kind": "matmul", "max_mib": 4096, "warmup_steps": 3, "steps": 20}
    text = page(attainable.BENCH, [typed_row(attainable.TARGET, case, {"operators": [matmul]})])
    assert "| 4096×4096 · 4096×4096 | 200.0 | 687 TFLOP/s | 503 GB/s |" in text


@pytest.mark.slow
def test_operators_of_every_kind_have_a_cost() -> None:
    torch = pytest.importorskip("torch")
    from profiling_targets import attainable as target

    device = torch.get_default_device()
    try:
        for kind in attainable.KINDS:
            figures = attainable.AttainableFigures()
            case = attainable.AttainableCase("cpu", kind, max_mib=1, warmup_steps=0, steps=1)
            target.measure(case, figures)
            if kind != "attention":  # attention of this size needs a GPU's operators
                assert figures.operators, kind
            assert all(operator.us > 0 and operator.bytes > 0 for operator in figures.operators or ()), kind
    finally:
        torch.set_default_device(device)
