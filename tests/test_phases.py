"""Tests which phase the name of a range means."""

from __future__ import annotations

import pytest

from nsys_analyzer.errors import ConfigurationError
from nsys_analyzer.trace.phase_names import PhaseNames


@pytest.mark.parametrize(
    ("name", "phase"),
    [
        ("forward", "forward"),
        ("Forward_Pass", "forward"),
        ("forward pass #3", "forward"),
        ("FWD", "forward"),
        ("forward, step 12", "forward"),
        ("backward_pass", "backward"),
        ("bwd", "backward"),
        ("BackwardPass", "backward"),
        ("loss.backward()", "backward"),
        ("optimizer_step", "optimizer"),
        ("optimizer.step()", "optimizer"),
        ("opt", "optimizer"),
        ("optim", "optimizer"),
        ("Optimizer.step#AdamW.step", "optimizer"),
        ("Optimizer.step#SGD.step", "optimizer"),
        ("loss", "loss"),
        ("compute_loss", "loss"),
        ("step", "step"),
        ("step 17", "step"),
        ("train_step_3/10", "step"),
        ("ProfilerStep#4", "step"),
        ("Iteration: 5", "step"),
        ("warmup", "warmup"),
        ("warm_up", "warmup"),
        ("Warm-Up", "warmup"),
        ("warmup step 2", "warmup"),
        ("computing softmax", "softmax"),
        ("scaled dot product attention", "attention"),
        ("computing attention scores", "scores"),
        ("final matmul", "values"),
        ("attn(F)", "forward"),
        ("mlp(B)", "backward"),
        ("mlp(W)", "backward"),
        ("f(W, B)", None),
        ("aten::softmax", None),
        ("lr_warmup_scheduler", None),
        ("Optimizer.zero_grad#AdamW.zero_grad", None),
        ("forward_backward", None),
        ("layer 3", None),
        ("42", None),
        ("", None),
    ],
)
def test_usual_spellings(name: str, phase: str | None) -> None:
    assert PhaseNames().find_role(name) == phase


def test_an_option_takes_the_place_of_the_default_names() -> None:
    names = PhaseNames.parse(["forward=my fwd", "forward=other fwd"])
    assert [names.find_role(n) for n in ("my fwd", "other fwd", "forward", "backward")] == [
        "forward",
        "forward",
        None,
        "backward",
    ]


def test_a_phase_of_the_users_own_comes_last() -> None:
    assert PhaseNames.parse(["data=load"]).leaf_phases == ("forward", "loss", "backward", "optimizer", "data")


@pytest.mark.parametrize("option", ["forward", "=name", "forward=", ""])
def test_an_option_that_is_no_pair(option: str) -> None:
    with pytest.raises(ConfigurationError, match="PHASE=RANGE"):
        PhaseNames.parse([option])
