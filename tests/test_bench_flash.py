"""The bench of FlashAttention: its target on the CPU, its cases, and its section from hand-made rows."""

from __future__ import annotations

import importlib.util
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="the targets need PyTorch")

from torch.nn.attention import SDPBackend, sdpa_kernel  # noqa: E402

from nsys_analyzer.experiments.flash import BENCH, TARGET, FlashCase, FlashFigures, flops_per_s  # noqa: E402
from nsys_analyzer.experiments.model import AnyRow  # noqa: E402
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


def row(implementation: str, length: int, end_to_end_ms: float, **changes: Any) -> AnyRow:
    case = {**CASE, "implementation": implementation, "precision": "bf16", "d_head": 64, "context_length": length}
    figures = {"forward_ms": end_to_end_ms / 4, "backward_ms": end_to_end_ms, "end_to_end_ms": end_to_end_ms,
               "peak_bytes": 2**30, "kernel": implementation, "forward_timer": "do_bench"}  # fmt: skip
    status, message = changes.pop("status", "ok"), changes.pop("message", "")
    case |= {key: changes.pop(key) for key in tuple(changes) if key in case}
    return typed_row(TARGET, case, {**figures, **changes} if status == "ok" else changes, status, message)


def test_cases() -> None:
    cases = BENCH.tasks(default_settings(BENCH, "cuda"))
    # three implementations in both precisions, SDPA's FlashAttention in bf16; 4 widths, 10 lengths
    assert len(cases) == (3 * 2 + 1) * 4 * 10
    shape = {"precision": "bf16", "d_head": 16, "context_length": 128}
    assert cases[0].case == FlashCase(**{**CASE, **shape, "implementation": "flash"})
    assert len(BENCH.tasks(default_settings(BENCH, "cpu"))) == 3 * 3


FP32 = {"precision": "fp32"}


@pytest.mark.parametrize(
    ("rows", "says", "says_not"),
    [
        # At 4,096 tokens 20 ÷ 9 and 12 ÷ 9; at 128 tokens 3 ÷ 1 of the fastest peer
        ((row("flash", 128, 3), row("unfused", 128, 2), row("sdpa", 128, 1),
          row("flash", 4096, 9), row("unfused", 4096, 20), row("sdpa", 4096, 12), row("sdpa_flash", 4096, 18)),
         ["At context 4,096 in bf16, forward and backward, flash is 2.222× as fast as unfused attention.",
          "flash is 1.333× as fast as PyTorch's SDPA.", "| 128 | 3.000 | 2.000 | 1.000 | – | 3.000× |",
          "Nothing ran out of memory."], []),
        ((row("unfused", 128, 1.0, **FP32, max_error=0.0), row("flash", 128, 1.0, **FP32, max_error=3e-6)),
         ["| unfused | 0.0e+00 | unfused |", "| flash | 3.0e-06 | flash |"], []),
        ((row("flash", 65536, 30.0), row("unfused", 65536, 0, status="oom", message="CUDA out of memory."),
          row("unfused", 32768, 9.0), row("flash", 32768, 3.0, peak_bytes=2**20)),
         ["Out of memory: unfused, context length 65,536.",
          "At context 32,768 (bf16, d_head 64) unfused attention needs 1.0 GiB above its inputs, flash 1.0 MiB.",
          "| unfused, context length 65,536 | oom | CUDA out of memory. |", "| 65,536 | 30.00 | oom | – |"], []),
        ((row("sdpa", 128, 1.0), row("flash", 128, 0, status="failed", message="RuntimeError: wrong by 1.0e+00")),
         ["Failed: flash.", "| RuntimeError: wrong by 1.0e+00 |"], ["as fast as"]),
    ],
)  # fmt: skip
def test_what_the_section_says(rows: tuple[AnyRow, ...], says: list[str], says_not: list[str]) -> None:
    check(page(BENCH, rows), says, says_not)


def test_flops() -> None:
    # 8·4096·4097 ÷ 2 = 67,125,248 scores of 4·64 FLOPs forward, 10·64 backward
    one = row("flash", 4096, 1.0)
    assert flops_per_s(one, "forward") == 4 * 64 * 67_125_248 / 0.25e-3
    assert flops_per_s(one, "backward") == 10 * 64 * 67_125_248 / 1e-3
    assert flops_per_s(row("flash", 4096, 1.0, causal=False), "end_to_end") == 14 * 64 * 8 * 4096**2 / 1e-3


def test_figures() -> None:
    rows = (row("flash", 256, 2.0), row("flash", 128, 1.0), row("flash", 128, 9.0, d_head=128), row("sdpa", 128, 3.0))
    drawn = figures(BENCH, rows)
    assert list(drawn) == ["flash-bf16-forward", "flash-bf16-backward", "flash-bf16-end-to-end"]
    *_, figure = drawn.values()
    assert figure.series == (("flash", ((128, 1.0), (256, 2.0))),)  # a single point is no curve
    assert (figure.log_x, figure.log_y, figure.y_axis) == (True, True, "ms")
