"""The names that people and frameworks give to the ranges of a training step's phases, and of attention's parts."""

from __future__ import annotations

import re
from collections.abc import Mapping

#: The spellings found without options, as ``normalized_name`` writes them.
DEFAULT_NAMES: Mapping[str, tuple[str, ...]] = {
    "forward": (
        "forward", "fwd", "fw", "forward pass", "fwd pass", "forward step", "fwd step", "model forward",
        "forward only", "inference", "inference step", "model inference",
    ),
    "loss": ("loss", "compute loss", "loss computation", "loss fn", "loss function", "criterion", "cross entropy"),
    "backward": (
        "backward", "bwd", "bw", "backward pass", "bwd pass", "backward step", "bwd step", "loss backward",
        "model backward",
    ),
    "optimizer": (
        "optimizer", "optimiser", "optim", "opt", "optimizer step", "optimiser step", "optim step", "opt step",
        "step optimizer", "optimizer update", "optimizer pass", "adamw", "adamw step", "adam step", "sgd step",
    ),
    "step": (
        "step", "train step", "training step", "iteration", "iter", "train iteration", "training iteration",
        "profiler step", "profilerstep", "batch", "train batch", "training batch", "execute model",
    ),
    "warmup": ("warmup", "warm up", "warmup step", "warmup steps", "warm up step", "warm up steps", "warmup iteration",
               "warmup iterations", "warmup phase", "warming up"),
    "attention": (
        "scaled dot product attention", "sdpa", "attention", "self attention", "attn", "causal self attention",
        "multi head attention", "multihead attention", "multi head self attention", "multihead self attention",
    ),
    "scores": (
        "computing attention scores", "attention scores", "compute attention scores", "attn scores", "scores",
        "qk", "qk t", "q k t", "qkt", "qk matmul",
    ),
    "softmax": ("computing softmax", "softmax", "compute softmax", "attention softmax", "attn softmax"),
    "values": (
        "final matmul", "attention output", "attn output", "av", "pv", "av matmul", "pv matmul", "attn v",
        "attention values", "scores v", "computing final matmul",
    ),
}  # fmt: skip

#: How the parts of a pipeline's schedule end, as in ``attn(F)``: B is the gradient of the input, W that of the weights.
PASSES = {"(F)": "forward", "(B)": "backward", "(W)": "backward"}

#: The steps of engines that serve models, with what is in each: vLLM's ``execute_context_1(80)_generation_31(31)``,
#: SGLang's ``step[DECODE bs=32]``.
STEP_OF_ENGINE = re.compile(r"execute_(?:\d+_)?context_\d+\(.*\)_generation_\d+\(|step\[")
#: How both begin: SGLang's lies in a range of the other kind, which waits for more than the step.
EXECUTOR, STEP_IN_ENGINE = "execute_", "step["

#: How the range of a module's call begins: ``nn.Module: Linear_3`` of PyTorch's profiler, ``nn.Module: GPT/h.0: Block``
#: of our hooks.
MODULE_CALL = "nn.Module: "
#: The second kind, with the path and the class of the module.
MODULE_WITH_PATH = re.compile(rf"{re.escape(MODULE_CALL)}(?P<path>[^:]+): (?P<kind>[^:]+)")

_LONGEST_NAME = 500
_COUNTER = re.compile(r"\d+(\s*(/|of)\s*\d+)?\W*$")


def normalized_name(name: str) -> str:
    """Returns a range's name without case, punctuation and counters: ``Forward_Pass #3`` is ``forward pass``.

    PyTorch's own ``Optimizer.step#AdamW.step`` becomes ``optimizer step``. Of an endless name the start counts.
    """
    name = name[:_LONGEST_NAME]
    text = name.split("#", 1)[0] if name.startswith("Optimizer.") else name.split(",", 1)[0]
    text = re.sub(r"([a-z])([A-Z])", r"\1 \2", _COUNTER.sub("", text)).lower()
    return re.sub(r"[\W_]+", " ", text).strip()
