"""Times the training steps of a transformer, phase by phase: one configuration, from its very first step on.

``python -m profiling_targets.training_steps --model small --context-length 256`` prints its figures; of a bench's
cases, many run in one process. The transformer is that of ``transformer.py``.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, fields, replace
from itertools import chain

import torch
from torch import Tensor

from nsys_analyzer.analysis.flops import attention_product_flops, forward_flops
from nsys_analyzer.analysis.models import ModelSize, find_model
from nsys_analyzer.errors import ConfigurationError
from profiling_targets.cases import Figures, NotHereError, default_device, main, option
from profiling_targets.config import ATTENTIONS, MODES, PRECISIONS, Config
from profiling_targets.harness import Times, step_ns, synchronize
from profiling_targets.products import kept_bits
from profiling_targets.timer import statistics_of
from profiling_targets.transformer import Training


@dataclass(frozen=True)
class Case:
    """One configuration, and how many steps of it.

    Raises:
        ConfigurationError: no step to measure, or fewer than none to warm up.

    """

    device: str = field(default_factory=default_device)
    model: str = option("small", "small, medium, large, xl, 2.7B, xl-2026 or 10B")
    d_model: int = option(0, "in place of the model's; 0 is the model's own, here and below")
    d_ff: int = 0
    num_layers: int = 0
    num_heads: int = 0
    vocab_size: int = 0
    context_length: int = 256
    batch_size: int = 4
    mode: str = option("train", "the phases of a step: forward; loss and backward too; the optimizer too", MODES)
    precision: str = option("fp32", "bf16 is autocast", PRECISIONS)
    attention: str = option("unfused", "written out, or PyTorch's own", ATTENTIONS)
    optimizer: str = option("torch", "AdamW of torch.optim, or ours", ("torch", "plain"))
    compile: bool = option(False, "torch.compile the model")
    warmup_steps: int = option(5, "steps before the measured ones")
    steps: int = option(10, "measured steps")
    seed: int = 0

    def __post_init__(self) -> None:
        if self.steps < 1 or self.warmup_steps < 0:
            raise ConfigurationError("steps must be at least 1, and warmup_steps at least 0")

    @property
    def size(self) -> ModelSize:
        """The model's dimensions, with those in place that the case gives."""
        given = {name: value for name in _DIMENSIONS if (value := getattr(self, name))}
        return replace(find_model(self.model), **given)


_DIMENSIONS = tuple(one.name for one in fields(ModelSize) if one.name != "name")


def measure(case: Case, figures: Figures) -> None:
    """Times each phase of each step, from the first one on, and counts the memory of what lives between steps.

    ``times_ms`` are the measured steps, ``warmup_times_ms`` those before them; ``first_step_ms`` is the first of all.
    Making the model comes before it. On the CPU there is no peak of memory: nothing there counts it without
    slowing the steps down.
    """
    figures["forward_flops"] = _forward_flops(case)
    figures["backward_flops"] = 2 * figures["forward_flops"]  # a product for each of its two operands' gradients
    try:
        training = Training(_config(case))
        figures["parameters"] = sum(parameter.numel() for parameter in training.parameters)
        figures["parameters_bytes"] = _bytes(training.parameters)
        _time_steps(training, case, figures)
    finally:
        figures.update(_peaks(case.device))
    figures["gradients_bytes"] = _bytes(p.grad for p in training.parameters if p.grad is not None)
    figures["optimizer_bytes"] = _bytes(_states(training, case.device))
    figures["logits_bytes"] = _bytes([training.logits])
    # Last, for it multiplies: before the first step it would have warmed up what that step is to show.
    with torch.autocast(case.device, torch.bfloat16, enabled=case.precision == "bf16"):
        figures["product_bits"] = kept_bits(case.device)


def _forward_flops(case: Case) -> int:
    """FLOPs of the forward's products, the least: attention in one kernel may skip the half that the mask hides."""
    shape = case.size, case.batch_size, case.context_length
    return forward_flops(*shape) - (attention_product_flops(*shape) // 2 if case.attention == "sdpa" else 0)


def _config(case: Case) -> Config:
    if case.precision == "tf32" and case.device == "cpu":
        raise NotHereError("TF32 is a precision of NVIDIA's tensor cores")
    shared = {one.name for one in fields(Config)} & {one.name for one in fields(case)}
    return Config(size=case.size, **{name: getattr(case, name) for name in shared})


def _time_steps(training: Training, case: Case, figures: Figures) -> None:
    """Warms up and measures; the figures are there after each step, in milliseconds."""
    phases = training.phases()
    warmup = figures["warmup_times_ms"] = []
    times: Times = {}
    synchronize(case.device)  # what made the model is no part of the first step
    for index in range(case.warmup_steps + case.steps):
        step = {phase: ns / 1e6 for phase, ns in step_ns(phases, case.device).items()}
        figures.setdefault("first_step_ms", step["step"])
        if index < case.warmup_steps:
            warmup.append(step["step"])
            continue
        for phase, ms in step.items():
            times.setdefault(phase, []).append(ms)
        figures["times_ms"] = times["step"]
    for phase, values in times.items():
        figures.update(statistics_of(phase, values))
    figures["tokens_per_s"] = case.batch_size * case.context_length / figures["step_ms"] * 1e3


def _peaks(device: str) -> Figures:
    """The most memory that tensors took, and that PyTorch's allocator held, since the case began."""
    if device == "cpu":
        return {}
    return {
        "peak_allocated_bytes": torch.cuda.max_memory_allocated(),
        "peak_reserved_bytes": torch.cuda.max_memory_reserved(),
    }


def _states(training: Training, device: str) -> Iterator[Tensor]:
    """The optimizer's tensors on the device; AdamW counts its steps on the CPU."""
    values = chain.from_iterable(state.values() for state in training.optimizer.state.values())
    return (value for value in values if isinstance(value, Tensor) and value.device.type == device)


def _bytes(tensors: Iterable[Tensor]) -> int:
    return sum(tensor.nbytes for tensor in tensors)


if __name__ == "__main__":
    sys.exit(main(Case, measure))
