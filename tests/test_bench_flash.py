"""The bench of FlashAttention: its target on the CPU, its cases, and its section from hand-made rows."""

from __future__ import annotations

import importlib.util
from dataclasses import replace
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="the targets need PyTorch")

from torch.nn.attention import SDPBackend, sdpa_kernel  # noqa: E402

from nsys_analyzer.experiments.flash import (  # noqa: E402  # noqa: E402
    BENCH,
    TARGET,
    FlashCase,
    FlashFigures,
    FlashRow,
    find_limits,
    minimum_memory,
    rates,
)
from nsys_analyzer.experiments.model import AnyRow as Row  # noqa: E402
from nsys_analyzer.experiments.model import Results  # noqa: E402
from nsys_analyzer.experiments.results import all_cases  # noqa: E402
from nsys_analyzer.experiments.section import CeilingsCase, CeilingsFigures  # noqa: E402
from profiling_targets import flash  # noqa: E402
from profiling_targets.attention_variants import Attend  # noqa: E402
from profiling_targets.harness import NotHereError, measured  # noqa: E402
from tests.support.rows import check, default_settings, figures, page, typed_row  # noqa: E402

SMALL = {"device": "cpu", "precision": "fp32", "context_length": 40, "d_head": 8, "heads": 2, "steps": 2}
CASE = {"device": "cuda", "batch_size": 1, "heads": 8, "causal": True, "fp32_products": "tf32x3", "warmup_ms": 25,
        "measured_ms": 100, "warmup_steps": 1, "steps": 3}  # fmt: skip
INPUTS = 4 * 2 * 40 * 8 * 4  # q, k, v and the gradient; 2 heads, 40 tokens, 8 features, 4 bytes


def measured_flash(**case: Any) -> dict[str, Any]:
    return measured(TARGET, FlashCase(**{**SMALL, **case}), flash.measure)


@pytest.mark.parametrize(
    ("implementation", "precision", "kernel"),
    [
        ("flash", "fp32", "tiles in PyTorch"),
        ("unfused", "bf16", "unfused"),
        ("sdpa", "fp32", "FlashAttentionForCpu"),
        ("sdpa_flash", "bf16", "FlashAttentionForCpu"),
    ],
)
def test_measure(implementation: str, precision: str, kernel: str) -> None:
    row = measured_flash(implementation=implementation, precision=precision)
    figures = row["figures"]
    assert (row["status"], figures["kernel"]) == ("ok", kernel)
    assert figures["inputs_bytes"] == (INPUTS if precision == "fp32" else INPUTS / 2)
    assert figures["peak_bytes"] >= figures["inputs_bytes"]  # the output and three gradients are as large
    assert figures["max_error"] < flash.TOLERANCES[precision]
    for name in ("forward", "backward", "end_to_end"):
        assert 0 < figures[f"{name}_min_ms"] <= figures[f"{name}_ms"] <= figures[f"{name}_max_ms"]
        assert figures[f"{name}_timer"] == "2 calls"


def test_unfused_memory_holds_the_square() -> None:
    row = measured_flash(implementation="unfused", context_length=256)
    weights = 2 * 256**2 * 4
    assert row["figures"]["peak_bytes"] > 2 * weights  # the weights and their gradient


def test_the_backend_that_ran_is_named() -> None:
    with sdpa_kernel(SDPBackend.MATH):
        row = measured_flash(implementation="sdpa")
    assert row["figures"]["kernel"] == "math"


@pytest.mark.parametrize(("factor", "says"), [(1.001, "0.001"), (float("nan"), "nan")])
def test_a_wrong_kernel_is_not_timed(factor: float, says: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def wrong(case: FlashCase) -> Attend:
        return lambda q, k, v: factor * torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=case.causal)

    monkeypatch.setattr(flash, "_attend", wrong)
    row = measured_flash()
    assert row["status"] == "failed"
    assert row["message"].startswith(f"WrongResultError: max_error is {says}")
    assert "forward_ms" not in row["figures"]


def test_what_cannot_run_here_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(NotHereError, match="no fp32"):
        flash.measure(FlashCase(device="cuda", implementation="sdpa_flash", precision="fp32"), FlashFigures())
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: None)
    with pytest.raises(NotHereError, match="pip install triton"):
        flash.measure(FlashCase(device="cuda", implementation="flash"), FlashFigures())


def row(implementation: str, length: int, end_to_end_ms: float, **changes: Any) -> FlashRow:
    case = {**CASE, "implementation": implementation, "precision": "bf16", "d_head": 64, "context_length": length}
    figures = {"forward_ms": end_to_end_ms / 4, "backward_ms": end_to_end_ms, "end_to_end_ms": end_to_end_ms,
               "peak_bytes": 2**30, "kernel": implementation, "forward_timer": "do_bench"}  # fmt: skip
    status, message = changes.pop("status", "ok"), changes.pop("message", "")
    case |= {key: changes.pop(key) for key in tuple(changes) if key in case}
    return typed_row(TARGET, case, {**figures, **changes} if status == "ok" else changes, status, message)


def test_cases() -> None:
    cases = all_cases(BENCH, default_settings(BENCH, "cuda"))
    # ceilings in both precisions; three implementations in both, SDPA's FlashAttention in bf16; 4 widths, 10 lengths
    assert len(cases) == 2 + (3 * 2 + 1) * 4 * 10
    shape = {"precision": "bf16", "d_head": 16, "context_length": 128}
    assert cases[2].case == FlashCase(**{**CASE, **shape, "implementation": "flash"})
    assert len(all_cases(BENCH, default_settings(BENCH, "cpu"))) == 1 + 3 * 3


FP32 = {"precision": "fp32"}


@pytest.mark.parametrize(
    ("rows", "says", "says_not"),
    [
        # At the longest context 9 ÷ 12 to the fastest, 9 ÷ 18 to SDPA's FlashAttention; at 128 tokens 3 ÷ 1
        ((row("flash", 128, 3), row("unfused", 128, 2), row("sdpa", 128, 1),
          row("flash", 4096, 9), row("unfused", 4096, 20), row("sdpa", 4096, 12), row("sdpa_flash", 4096, 18)),
         ["At context 4,096 in bf16, forward and backward, flash takes 0.750× the time of its fastest peer ",
          "0.500× the time of SDPA's FlashAttention backend.", "| 64 | 128 | 2.000 | 1.000 | – | 3.000 | 3.000× |",
          "Nothing ran out of memory."], ["Few calls"]),
        # 20 ms forward: five calls fit into 100 ms; backward and end to end one
        ((row("flash", 128, 80.0), row("sdpa", 128, 80.0, backward_measured_ms=480, end_to_end_measured_ms=480)),
         ["fewer than 5 in 2 of 6 passes"], []),
        ((row("unfused", 128, 1.0, **FP32, max_error=0.0), row("flash", 128, 1.0, **FP32, max_error=3e-6)),
         ["| unfused | fp32 | unfused | 1 | 0.0e+00 |", "| flash | fp32 | flash | 1 | 3.0e-06 |"], []),
        # of 1 ÷ 4 ms forward, and of 1 ms backward, 2.5 times that: see the roofline below
        ((row("flash", 4096, 1.0),), ["6.9 % forward and 4.3 % backward of the bf16 roofline"], ["Impossible"]),
        # 8·16384·16385 ÷ 2 scores of 4·64 FLOPs, 2.75e11, in 1.5 ms are 183 TFLOP/s: above a third of 494.7, below
        # that; in 2 ms 137 TFLOP/s
        ((row("sdpa", 16384, 6.0, **FP32),),
         ["**Impossible rate**: forward of SDPA, fp32, d_head 64, context 16,384, fp32 as 3xTF32"], []),
        ((row("sdpa", 16384, 8.0, **FP32),), [], ["Impossible rate"]),
        # 1.166e12 FLOPs forward in 0.25 ms are 4.7 PFLOP/s
        ((row("flash", 16384, 0.5, heads=33),), ["**Impossible rate**: forward of flash"], []),
        ((row("flash", 65536, 30.0), row("unfused", 65536, 0, status="oom", message="CUDA out of memory."),
          row("unfused", 32768, 9.0), row("flash", 32768, 3.0, peak_bytes=2**20)),
         ["Out of memory: unfused, bf16, d_head 64, context 65,536.",
          "At context 32,768 (bf16, d_head 64) unfused attention needs 1.0 GiB above its inputs, flash 1.0 MiB.",
          "| unfused, bf16, d_head 64, context 65,536 | oom | CUDA out of memory. |",
          "| 64 | 65,536 | oom | 30.00 | – |"], []),
        ((row("sdpa", 128, 1.0), row("flash", 128, 0, status="failed", message="RuntimeError: wrong by 1.0e+00")),
         ["Failed: flash, bf16, d_head 64, context 128.", "| RuntimeError: wrong by 1.0e+00 |"], ["flash takes"]),
    ],
)  # fmt: skip
def test_what_the_section_says(rows: tuple[FlashRow, ...], says: list[str], says_not: list[str]) -> None:
    check(page(BENCH, rows), says, says_not)


def test_roofline() -> None:
    one, short = row("flash", 4096, 1.0), row("flash", 2, 1.0)
    limits = find_limits(Results((one,)), "bf16")
    assert limits is not None
    # 8·4096·4097 ÷ 2 = 67,125,248 scores of 4·64 FLOPs forward, 10·64 backward, at 989.4 TFLOP/s
    assert limits.least_ms(one, "forward") == pytest.approx(0.0173684, rel=1e-4)
    assert limits.least_ms(one, "end_to_end") == pytest.approx(3.5 * 0.0173684, rel=1e-4)
    # 4 tensors of 8·2·64·2 bytes and 8·2·4 of lse: 8,256 bytes at 4.8 TB/s; 24 scores are 6,144 FLOPs
    assert limits.least_ms(short, "forward") == pytest.approx(8256 / 4.8e12 * 1e3)


@pytest.mark.parametrize(("products", "flops_per_s"), [("tf32x3", 494.7e12 / 3), ("ieee", 67e12)])
def test_fp32_by_three_products_of_tf32_has_their_limit(products: str, flops_per_s: float) -> None:
    limits = find_limits(Results((row("flash", 128, 1, **FP32, fp32_products=products),)), "fp32")
    assert limits is not None
    assert limits.flops_per_s == flops_per_s


def test_without_a_datasheet_the_ceilings_limit() -> None:
    ceiling = Row("profiling_targets.ceilings", CeilingsCase("cuda", "fp32"), "ok", "",
                  CeilingsFigures(product_flops_per_s=1e11, copy_bytes_per_s=1e10))  # fmt: skip
    on_cpu = replace(row("flash", 128, 1, device="cpu", precision="fp32"), machine={})
    limits = find_limits(Results((on_cpu,), {"fp32": ceiling}), "fp32")
    assert limits is not None
    assert (limits.flops_per_s, limits.bytes_per_s, limits.source) == (1e11, 1e10, "the measured ceilings")


def test_claims_of_unfused_attention_are_its_own() -> None:
    forward, backward = rates(row("unfused", 4096, 4.0))
    square = 8 * 4096**2
    assert (forward.flops, backward.flops) == (4 * 64 * square, 8 * 64 * square)  # masked scores are computed, too
    assert forward.bytes == 8 * square * 2
    assert forward.ms == 1.0  # a quarter of 4
    ((_, memory),) = minimum_memory([row("unfused", 4096, 4.0)])
    assert memory.least_bytes == 2 * square * 2 + 8 * 4096 * 64 * 2


def test_sdpa_in_fp32_is_held_to_tensor_cores() -> None:
    rows = [row(one, 128, 1, precision="fp32") for one in ("flash", "sdpa", "unfused")]
    found = [rate.precision for row in rows for rate in rates(row) if "forward" in rate.label]
    assert found == ["tf32", "tf32", "fp32"]
    true_fp32 = row("flash", 128, 1, precision="fp32", fp32_products="ieee")
    three, one = (next(rates(made)) for made in (rows[0], true_fp32))
    assert one.precision == "fp32"
    assert three.flops == 3 * one.flops  # against the peak of TF32


def test_figures() -> None:
    rows = (row("flash", 256, 2.0), row("flash", 128, 1.0), row("flash", 128, 9.0, d_head=128), row("sdpa", 128, 3.0))
    drawn = figures(BENCH, rows)
    assert list(drawn) == ["flash-bf16-forward", "flash-bf16-backward", "flash-bf16-end-to-end"]
    *_, figure = drawn.values()
    assert figure.series == (("flash", ((128, 1.0), (256, 2.0))),)  # a single point is no curve
    assert (figure.log_x, figure.log_y, figure.y_axis) == (True, True, "ms")
