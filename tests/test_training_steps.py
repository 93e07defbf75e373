"""The target that times training steps, on a tiny model."""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="the targets need PyTorch")

from profiling_targets import training_steps  # noqa: E402
from profiling_targets.harness import measure_case  # noqa: E402
from profiling_targets.training_steps import TARGET, StepCase, measure  # noqa: E402

TINY = {
    "device": "cpu", "d_model": 32, "d_ff": 64, "num_layers": 2, "num_heads": 4, "vocab_size": 50,
    "context_length": 16, "batch_size": 2, "warmup_steps": 2, "steps": 3,
}  # fmt: skip


def row(**values: Any) -> dict[str, Any]:
    return measure_case(TARGET, StepCase(**{**TINY, **values}), measure)


def test_a_step_is_timed_phase_by_phase() -> None:
    one = row()
    assert one["status"] == "ok", one["message"]
    figures = one["figures"]
    assert figures["first_step_ms"] > 0
    phases = sum(figures[f"{phase}_ms"] for phase in ("forward", "loss", "backward", "optimizer"))
    assert 0 < phases <= figures["step_ms"]
    assert figures["step_cv"] == pytest.approx(figures["step_std_ms"] / figures["step_ms"])
    assert figures["tokens_per_s"] == pytest.approx(2 * 16 / (figures["step_ms"] / 1e3))  # two sequences of 16


def test_forward_alone_has_no_gradients() -> None:
    figures = row(mode="forward")["figures"]
    assert "backward_ms" not in figures
    assert figures["forward_ms"] <= figures["step_ms"]


def test_the_measured_steps_are_those_after_the_warm_up(monkeypatch: pytest.MonkeyPatch) -> None:
    taken = iter([900, 500, 1, 2, 6])
    monkeypatch.setattr(training_steps, "run_step_ns", lambda *_: {"forward": 10**6, "step": next(taken) * 10**6})
    figures = row()["figures"]
    assert figures["first_step_ms"] == 900
    assert (figures["step_ms"], figures["step_median_ms"], figures["step_max_ms"]) == (3, 2, 6)  # (1 + 2 + 6) ÷ 3


def test_tf32_is_nothing_for_a_cpu() -> None:
    assert row(precision="tf32")["status"] == "unsupported"
