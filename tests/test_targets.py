from __future__ import annotations

import sys

import pytest

from nsys_analyzer.analysis.models import configuration_from_name
from nsys_analyzer.capture.targets import Sweep, program_target
from nsys_analyzer.errors import ConfigurationError


def sweep(**changes: object) -> Sweep:
    usual = {
        "models": ("small",), "context_lengths": (256,), "modes": ("train",), "precisions": ("fp32",),
        "batch_size": 4, "warmup_steps": 5, "steps": 10, "device": "cuda",
    }  # fmt: skip
    return Sweep(**{**usual, **changes})  # type: ignore[arg-type]


def test_a_sweep_is_a_product_in_order_and_holds_nothing_twice() -> None:
    targets = sweep(
        models=("small", "medium"), context_lengths=(128, 256, 128), modes=("train", "forward"), precisions=("bf16",)
    ).targets()
    assert [target.name for target in targets] == [
        f"{model}_ctx{context}_{mode}_bf16"
        for model in ("small", "medium")
        for context in (128, 256)
        for mode in ("train", "forward")
    ]


def test_a_target_is_the_program_one_would_type() -> None:
    (target,) = sweep(modes=("forward-backward",)).targets()
    assert target.program == (
        sys.executable, "-m", "profiling_targets.transformer", "--model", "small", "--context-length", "256",
        "--mode", "forward-backward", "--precision", "fp32", "--device", "cuda", "--steps", "10", "--warmup", "5",
    )  # fmt: skip
    assert target.described["mode"] == "forward+backward"


def test_what_is_unusual_is_in_the_name_and_on_the_command_line() -> None:
    (target,) = sweep(
        batch_size=8, attention="sdpa", optimizer="plain", compile=True, options=("--seed", "3")
    ).targets()
    assert target.name == "small_ctx256_train_fp32_b8_sdpa_plain-optimizer_compile"
    assert target.program[-2:] == ("--seed", "3")
    for words in (("--batch-size", "8"), ("--attention", "sdpa"), ("--optimizer", "plain"), ("--compile",)):
        at = target.program.index(words[0])
        assert target.program[at : at + len(words)] == words


@pytest.mark.parametrize("model", ["small", "2.7B", "xl-2026", "10B"])
def test_a_name_says_what_a_file_name_can_say(model: str) -> None:
    (target,) = sweep(models=(model,), precisions=("bf16",), batch_size=8).targets()
    said = configuration_from_name(target.name)
    assert said
    assert said.model
    assert (said.model.name, said.context_length, said.batch_size, said.precision, said.mode) == (
        model, 256, 8, "bf16", "train",
    )  # fmt: skip


def test_an_unknown_model() -> None:
    with pytest.raises(ConfigurationError, match="Unknown model 'huge'"):
        sweep(models=("small", "huge")).targets()


@pytest.mark.parametrize(
    ("program", "name"),
    [
        (("python", "-u", "src/train.py", "--lr", "1"), "train"),
        (("python", "-m", "my.trainer"), "my.trainer"),
        (("./run me.sh",), "run-me.sh"),
    ],
)
def test_a_program_is_called_after_its_script(program: tuple[str, ...], name: str) -> None:
    target = program_target(program, {"batch_size": 2})
    assert (target.name, target.program, target.described, target.timed) == (name, program, {"batch_size": 2}, False)


def test_a_program_without_a_name() -> None:
    with pytest.raises(ConfigurationError, match="gives no name"):
        program_target(("/",), {})
