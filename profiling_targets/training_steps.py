"""Times the training steps of a transformer, phase by phase: one configuration, from its very first step on.

``python -m profiling_targets.training_steps --model small --context-length 256`` prints its figures; of a bench's
cases, many run in one process. The transformer is that of ``transformer.py``.
"""

from __future__ import annotations

import statistics
import sys
from collections.abc import Iterable

import torch
from torch import Tensor

from nsys_analyzer.analysis.transformer.costs import attention_matmul_flops, forward_flops
from nsys_analyzer.experiments.steps import TARGET, StepCase, StepFigures
from nsys_analyzer.runs.rows import Times
from profiling_targets.harness import config_of, kept_bits, main, step_ns, synchronize
from profiling_targets.transformer import Training


def measure(case: StepCase, figures: StepFigures) -> None:
    """Times each phase of each step, from the first one on, and counts the memory of what lives between steps.

    ``times_ms`` are the measured steps, ``warmup_times_ms`` those before them; ``first_step_ms`` is the first of all.
    Making the model comes before it. On the CPU there is no peak of memory: nothing there counts it without
    slowing the steps down.
    """
    # The least of the forward's matmuls: attention in one kernel may skip the half that the mask hides.
    shape = case.size, case.batch_size, case.context_length
    hidden = attention_matmul_flops(*shape) // 2 if case.attention == "sdpa" else 0
    figures.forward_flops = forward_flops(*shape) - hidden
    figures.backward_flops = 2 * figures.forward_flops  # a matmul for the gradient of each operand
    try:
        training = Training(config_of(case))
        figures.parameters = sum(parameter.numel() for parameter in training.parameters)
        figures.parameters_bytes = _bytes(training.parameters)
        _time_steps(training, case, figures)
    finally:
        if case.device == "cuda":
            figures.peak_allocated_bytes = torch.cuda.max_memory_allocated()
            figures.peak_reserved_bytes = torch.cuda.max_memory_reserved()
    figures.gradients_bytes = _bytes(p.grad for p in training.parameters if p.grad is not None)
    figures.optimizer_bytes = _bytes(training.states())
    figures.logits_bytes = _bytes([training.logits])
    # Last, for it multiplies: before the first step it would have warmed up what that step is to show.
    with torch.autocast(case.device, torch.bfloat16, enabled=case.precision == "bf16"):
        figures.product_bits = kept_bits(case.device)


def _time_steps(training: Training, case: StepCase, figures: StepFigures) -> None:
    """Warms up and measures; the figures are there after each step, in milliseconds."""
    phases = training.phases()
    warmup: list[float] = []
    figures.warmup_times_ms = warmup
    times: dict[str, list[float]] = {}
    synchronize(case.device)  # what made the model is no part of the first step
    for index in range(case.warmup_steps + case.steps):
        step = {phase: ns / 1e6 for phase, ns in step_ns(phases, case.device).items()}
        if not index:
            figures.first_step_ms = step["step"]
        if index < case.warmup_steps:
            warmup.append(step["step"])
            continue
        for phase, ms in step.items():
            times.setdefault(phase, []).append(ms)
        figures.times_ms = times["step"]
    for phase, values in times.items():
        setattr(figures, phase, Times.of(values))
    figures.tokens_per_s = case.batch_size * case.context_length / statistics.fmean(times["step"]) * 1e3


def _bytes(tensors: Iterable[Tensor]) -> int:
    return sum(tensor.nbytes for tensor in tensors)


if __name__ == "__main__":
    sys.exit(main(TARGET, measure))
