"""The target of dtypes and accumulation."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="the targets need PyTorch")

from profiling_targets import dtypes  # noqa: E402
from profiling_targets.dtypes import TARGET, DtypesCase, measure  # noqa: E402
from profiling_targets.harness import NotHereError, measured  # noqa: E402


def row(**values: Any) -> dict[str, Any]:
    return measured(TARGET, DtypesCase(device="cpu", **values), measure)


def dtypes_of(model: str, precision: str) -> dict[str, str]:
    one = row(model=model, precision=precision)
    assert one["status"] == "ok", one["message"]
    return dict(one["figures"]["dtypes"])


def test_autocast_computes_products_in_bf16_and_keeps_parameters() -> None:
    for model in ("toy", "transformer"):  # without it all is fp32
        assert set(dtypes_of(model, "fp32").values()) == {"float32"}
    found = dtypes_of("toy", "bf16")
    assert list(found) == [
        "parameters", "fc1 output", "relu output", "norm output", "fc2 output", "logits", "loss", "gradients",
    ]  # fmt: skip
    assert [found[name] for name in ("fc1 output", "fc2 output", "logits")] == 3 * ["bfloat16"]
    assert [found[name] for name in ("parameters", "loss", "gradients")] == 3 * ["float32"]


def test_our_norm_computes_in_fp32_whatever_autocast_says() -> None:
    found = dtypes_of("transformer", "bf16")
    assert found["inside RMSNorm: 1 ÷ root"] == found["norm output"] == "float32"  # the residual stream is fp32
    assert found["attention.q output"] == found["head output"] == "bfloat16"
    assert "inside softmax: exp" in found


def test_a_device_without_this_autocast_is_not_a_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "is_autocast_enabled", lambda _: False)
    one = row(precision="bf16")
    assert (one["status"], one["message"]) == ("unsupported", "autocast to bf16 is not supported on this device")


@pytest.mark.parametrize(("text", "error"), [("not implemented for 'Half'", NotHereError), ("a bug", RuntimeError)])
def test_only_a_missing_kernel_is_no_failure(text: str, error: type[Exception]) -> None:
    with pytest.raises(error, match=text), dtypes._autocast(DtypesCase(device="cpu")):
        raise RuntimeError(text)


def test_sums() -> None:
    figures = row(experiment="sums")["figures"]
    half = np.float16(0)
    for _ in range(1000):
        half += np.float16(0.01)
    assert figures["sum_fp16_of_fp16"] == half == 9.953125
    assert figures["sum_bf16_of_bf16"] == 4  # from 4 on a step is 4 ÷ 2⁷ = 0.031, and half of it more than 0.01
    assert figures["sum_fp32_of_fp32"] == pytest.approx(10, rel=1e-4)
    # 0.01 is 0.0100021 in fp16: a thousand of them are 10.0021 whatever adds them
    assert figures["sum_fp32_of_fp16"] == figures["sum_fp32_of_fp16_converted"] == pytest.approx(10.0021, abs=1e-3)
    assert figures["sum_exact"] == 10
