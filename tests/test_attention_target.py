"""The target that measures attention alone, on the CPU."""

from __future__ import annotations

import importlib.util
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="the targets need PyTorch")

from torch.nn.attention import SDPBackend, sdpa_kernel  # noqa: E402

from nsys_analyzer.experiments.passes import TARGET, PassesCase  # noqa: E402
from profiling_targets import attention, harness  # noqa: E402

SMALL = {"device": "cpu", "context_length": 40, "d_head": 8, "heads": 2, "warmup_steps": 0, "steps": 2}


def measured(**case: Any) -> dict[str, Any]:
    return harness.measure_case(TARGET, PassesCase(**{**SMALL, **case}), attention.measure)


@pytest.mark.parametrize(
    ("implementation", "precision", "kernel"),
    [("tiled", "fp32", None), ("unfused", "bf16", None), ("naive", "fp32", None), ("sdpa_flash", "bf16", "Flash")],
)
@pytest.mark.parametrize("causal", [False, True])
def test_measure(implementation: str, precision: str, kernel: str | None, causal: bool) -> None:
    row = measured(implementation=implementation, precision=precision, causal=causal)
    figures = row["figures"]
    assert row["status"] == "ok", row["message"]
    assert kernel is None or figures["kernel"].startswith(kernel)
    # q, k, v and the gradient; 2 heads, 40 tokens, 8 features, 4 or 2 bytes
    assert figures["inputs_bytes"] == 4 * 2 * 40 * 8 * (4 if precision == "fp32" else 2)
    assert figures["max_error"] < attention.TOLERANCES[precision]
    for name in ("forward", "backward", "end_to_end"):
        assert 0 < figures[f"{name}_min_ms"] <= figures[f"{name}_ms"] <= figures[f"{name}_max_ms"]
    assert "peak_bytes" not in figures  # a CPU counts none


@pytest.mark.slow  # compiles
def test_compiled_attention_is_measured_whole() -> None:
    # Compiled code donates what forward saved to its backward pass, so no backward pass can be run a second time.
    row = measured(implementation="unfused", compile=True, causal=True, steps=2)
    assert row["status"] == "ok", row["message"]
    assert row["figures"]["max_error"] < attention.TOLERANCES["fp32"]
    assert row["figures"]["backward_ms"] > 0


def test_the_backend_that_ran_is_named() -> None:
    with sdpa_kernel(SDPBackend.MATH):
        row = measured(implementation="sdpa")
    assert "Flash" not in row["figures"]["kernel"]


@pytest.mark.parametrize(("factor", "says"), [(1.001, "0.001"), (float("nan"), "nan")])
def test_a_wrong_kernel_is_not_timed(factor: float, says: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def wrong(q: Any, k: Any, v: Any, causal: bool) -> Any:
        return factor * torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=causal)

    monkeypatch.setitem(attention.IMPLEMENTATIONS, "naive", wrong)
    row = measured(implementation="naive")
    assert row["status"] == "failed"
    assert row["message"].startswith(f"ArithmeticError: the error is {says}")
    assert "forward_ms" not in row["figures"]


def test_of_one_token_the_gradients_of_q_and_k_are_zero() -> None:
    assert measured(implementation="sdpa", context_length=1)["figures"]["max_error"] < 1e-6  # none divides by them


def test_a_length_whose_scores_are_too_many_is_not_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention, "_CHECKED_SCORES", 40**2 - 1)
    assert "max_error" not in measured()["figures"]


def test_flash_attention_of_pytorch_is_not_tried_in_fp32_on_a_gpu() -> None:
    with pytest.raises(harness.NotHereError, match="supports bf16 on a GPU, but not fp32"):
        attention._find_implementation(PassesCase(device="cuda", implementation="sdpa_flash", precision="fp32"))


def test_what_cannot_run_here_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    assert measured(implementation="flash")["status"] == "unsupported"  # Triton has no CPU
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: None)
    with pytest.raises(harness.NotHereError, match="pip install triton"):
        attention._find_implementation(PassesCase(device="cuda", implementation="flash"))
