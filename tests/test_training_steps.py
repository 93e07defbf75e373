"""The target that times training steps, on a tiny model."""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="the targets need PyTorch")

from nsys_analyzer.analysis.transformer.costs import forward_flops  # noqa: E402
from profiling_targets import training_steps  # noqa: E402
from profiling_targets.harness import main, measured  # noqa: E402
from profiling_targets.training_steps import TARGET, StepCase, measure  # noqa: E402

TINY = {
    "device": "cpu", "d_model": 32, "d_ff": 64, "num_layers": 2, "num_heads": 4, "vocab_size": 50,
    "context_length": 16, "batch_size": 2, "warmup_steps": 2, "steps": 3,
}  # fmt: skip


def row(**values: Any) -> dict[str, Any]:
    return measured(TARGET, StepCase(**{**TINY, **values}), measure)


def test_a_step_is_timed_phase_by_phase() -> None:
    one = row()
    assert one["status"] == "ok", one["message"]
    figures = one["figures"]
    assert (len(figures["warmup_times_ms"]), len(figures["times_ms"])) == (2, 3)
    assert figures["first_step_ms"] == figures["warmup_times_ms"][0]
    assert figures["step_ms"] == pytest.approx(sum(figures["times_ms"]) / 3)
    assert figures["step_max_ms"] == max(figures["times_ms"])
    phases = sum(figures[f"{phase}_ms"] for phase in ("forward", "loss", "backward", "optimizer"))
    assert 0 < phases <= figures["step_ms"]
    assert figures["step_cv"] == pytest.approx(figures["step_std_ms"] / figures["step_ms"])
    assert figures["tokens_per_s"] == pytest.approx(2 * 16 / (figures["step_ms"] / 1e3))  # two sequences of 16


def test_what_lives_between_steps_is_counted() -> None:
    figures = row()["figures"]
    # a layer 4·32² + 3·32·64 + 2·32 = 10,304; two of them, embedding and head 2·50·32, the last norm 32
    assert figures["parameters"] == 2 * 10_304 + 3_200 + 32 == 23_840
    assert figures["parameters_bytes"] == figures["gradients_bytes"] == 4 * 23_840
    tensors = 2 * 9 + 3  # a layer has 4 projections, 3 matrices and 2 norms
    assert figures["optimizer_bytes"] == 2 * 4 * 23_840 + 4 * tensors  # two states and, on the CPU, a count of steps
    assert figures["logits_bytes"] == 2 * 16 * 50 * 4
    assert not [key for key in figures if key.startswith("peak")]  # a CPU counts none


def test_forward_alone_has_no_gradients() -> None:
    figures = row(mode="forward")["figures"]
    assert figures["gradients_bytes"] == figures["optimizer_bytes"] == 0
    assert "backward_ms" not in figures
    assert figures["forward_ms"] <= figures["step_ms"]


def test_flops_are_those_of_the_dimensions_in_place() -> None:
    figures = row(mode="forward")["figures"]
    # 2 layers of 8·2·16·32² + 4·2·16²·32 + 6·2·16·32·64 = 720,896, and the head 2·2·16·32·50 = 102,400
    assert figures["forward_flops"] == 2 * 720_896 + 102_400 == forward_flops(StepCase(**TINY).size, 2, 16)
    assert figures["backward_flops"] == 2 * figures["forward_flops"]
    # attention in one kernel may skip what the mask hides: half of 2 layers of 4·2·16²·32
    assert row(mode="forward", attention="sdpa")["figures"]["forward_flops"] == figures["forward_flops"] - 65_536


def test_autocast_is_seen_in_what_a_product_keeps() -> None:
    whole, half = (row(mode="forward", precision=precision)["figures"] for precision in ("fp32", "bf16"))
    assert (whole["product_bits"], half["product_bits"]) == (23, 7)
    assert half["logits_bytes"] == whole["logits_bytes"] / 2
    assert half["parameters_bytes"] == whole["parameters_bytes"]  # autocast casts in passing


def test_without_warmup_the_first_step_is_measured() -> None:
    figures = row(warmup_steps=0, mode="forward")["figures"]
    assert figures["warmup_times_ms"] == []
    assert figures["first_step_ms"] == figures["times_ms"][0]


def test_nothing_is_multiplied_before_the_first_step(monkeypatch: pytest.MonkeyPatch) -> None:
    order: list[str] = []
    step, kept = training_steps.step_ns, training_steps.kept_bits
    monkeypatch.setattr(training_steps, "step_ns", lambda *args: order.append("step") or step(*args))
    monkeypatch.setattr(training_steps, "kept_bits", lambda *args: order.append("bits") or kept(*args))
    row(mode="forward")
    assert order == [*5 * ["step"], "bits"]


def test_steps_before_memory_ran_out_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    step, calls = training_steps.step_ns, iter(range(9))

    def fourth_fails(*args: Any) -> dict[str, int]:
        if next(calls) == 3:
            raise RuntimeError("CUDA out of memory. Tried to allocate 2.00 GiB")
        return step(*args)

    monkeypatch.setattr(training_steps, "step_ns", fourth_fails)
    one = row()
    assert one["status"] == "oom"
    assert (len(one["figures"]["warmup_times_ms"]), len(one["figures"]["times_ms"])) == (2, 1)
    assert one["figures"]["parameters"] == 23_840
    assert "step_ms" not in one["figures"]  # a mean of fewer steps than asked for is none


def test_tf32_is_nothing_for_a_cpu() -> None:
    assert row(precision="tf32")["status"] == "unsupported"


@pytest.mark.parametrize("wrong", ["--steps=0", "--warmup=-1", "--steps=many"])
def test_impossible_steps(wrong: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(TARGET, measure, [wrong])
    assert wrong.partition("=")[0] in capsys.readouterr().err


def test_command_line(capsys: pytest.CaptureFixture[str]) -> None:
    options = [f"--{key.removesuffix('_steps').replace('_', '-')}={value}" for key, value in TINY.items()]
    assert main(TARGET, measure, [*options, "--mode", "forward", "--optimizer", "plain"]) == 0
    assert "tokens_per_s" in capsys.readouterr().out


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
def test_on_a_gpu_the_peak_holds_what_must_live() -> None:
    figures = row(device="cuda")["figures"]
    lives = sum(figures[f"{part}_bytes"] for part in ("parameters", "gradients", "optimizer", "logits"))
    assert lives <= figures["peak_allocated_bytes"] <= figures["peak_reserved_bytes"]
