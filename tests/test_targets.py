from __future__ import annotations

import sys

import pytest

from nsys_analyzer.analysis.transformer.models import configuration_from_name
from nsys_analyzer.capture.targets import Target, program_target, transformer_targets
from nsys_analyzer.configuration import Run, Value
from nsys_analyzer.errors import ConfigurationError


def targets(models: tuple[str, ...] = ("small",), more: tuple[str, ...] = (), **values: Value) -> tuple[Target, ...]:
    return transformer_targets(models, {name: (value,) for name, value in {"device": "cuda", **values}.items()}, more)


def test_a_sweep_is_a_product_in_order_and_holds_nothing_twice() -> None:
    choices = {"context_length": (128, 256, 128), "mode": ("train", "forward"), "precision": ("bf16",)}
    found = transformer_targets(("small", "medium"), choices)
    assert [target.name for target in found] == [
        f"{model}_ctx{context}_{mode}_bf16"
        for model in ("small", "medium")
        for context in (128, 256)
        for mode in ("train", "forward")
    ]


def test_a_target_is_the_program_one_would_type() -> None:
    (target,) = targets(mode="forward-backward")
    assert target.program == (
        sys.executable, "-m", "profiling_targets.transformer", "--model", "small", "--context-length", "256",
        "--mode", "forward-backward", "--precision", "fp32", "--device", "cuda", "--steps", "10", "--warmup", "5",
    )  # fmt: skip
    assert target.run == Run(
        model="small", context_length=256, batch_size=4, mode="forward-backward", precision="fp32", attention="unfused",
        compile=False, cuda_graph=False, device="cuda", steps=10, warmup_steps=5,
    )  # fmt: skip


def test_what_is_unusual_is_in_the_name_and_on_the_command_line() -> None:
    (target,) = targets(batch_size=8, attention="sdpa", compile=True, more=("--seed", "3"))
    assert target.name == "small_ctx256_train_fp32_b8_sdpa_compile"
    assert target.program[-2:] == ("--seed", "3")
    for words in (("--batch-size", "8"), ("--attention", "sdpa"), ("--compile",)):
        at = target.program.index(words[0])
        assert target.program[at : at + len(words)] == words


@pytest.mark.parametrize("model", ["small", "2.7B", "xl-2026", "10B"])
def test_a_name_says_what_a_file_name_can_say(model: str) -> None:
    (target,) = targets((model,), precision="bf16", batch_size=8)
    said = configuration_from_name(target.name)
    assert said
    assert said.model
    assert (said.model.name, said.context_length, said.batch_size, said.precision, said.mode) == (
        model, 256, 8, "bf16", "train",
    )  # fmt: skip


def test_an_unknown_model() -> None:
    with pytest.raises(ConfigurationError, match="Unknown model 'huge'"):
        targets(("small", "huge"))


@pytest.mark.parametrize(
    ("program", "name"),
    [
        (("python", "-u", "src/train.py", "--lr", "1"), "train"),
        (("python", "-m", "my.trainer"), "my.trainer"),
        (("./run me.sh",), "run-me.sh"),
    ],
)
def test_a_program_is_called_after_its_script(program: tuple[str, ...], name: str) -> None:
    target = program_target(program, Run(batch_size=2))
    assert (target.name, target.program, target.run, target.timed) == (name, program, Run(batch_size=2), False)


def test_a_program_without_a_name() -> None:
    with pytest.raises(ConfigurationError, match="gives no name"):
        program_target(("/",), Run())
