"""Attention without heads, forward and backward, eager or compiled: time, and the memory saved for backward.

``python -m profiling_targets.attention --d 64 --context-length 4096`` measures one shape.
"""

from __future__ import annotations

import sys

import torch
from torch import Tensor

from nsys_analyzer.experiments.attention import TARGET, AttentionCase, AttentionFigures
from nsys_analyzer.runs.rows import Times
from profiling_targets.attention_variants import Passes, later_keys
from profiling_targets.harness import allocations, kept_bits, main, set_precision, step_ns, synchronize, times_ms
from profiling_targets.transformer import unfused_attention


def measure(case: AttentionCase, figures: AttentionFigures) -> None:
    """Times forward and backward, each synchronised, after counting the memory that is saved between them."""
    set_precision(case.precision)
    figures.product_bits = kept_bits(case.device)
    attend = torch.compile(unfused_attention) if case.compile else unfused_attention
    masked = later_keys(case.context_length, case.context_length, case.device)  # (S, S)
    shape = (case.batch_size, case.context_length, case.d)
    passes = Passes.random(lambda q, k, v: attend(q, k, v, masked), shape, case.device)
    (figures.first_step_ms,) = times_ms(passes.end_to_end, case.device, warmup=0, steps=1)
    figures.inputs_bytes = sum(tensor.nbytes for tensor in (*passes.inputs, masked, passes.gradient))
    with allocations(case.device) as counted:
        out = passes.forward()
    figures.before_backward_bytes, figures.forward_peak_bytes = counted.alive_bytes, counted.peak_bytes
    del out
    with allocations(case.device) as counted:
        passes.end_to_end()
    figures.peak_bytes = counted.peak_bytes
    outputs: list[Tensor] = []  # forward and backward follow each other in every step
    phases = {
        "forward": lambda: outputs.append(passes.forward()),
        "backward": lambda: passes.backward(outputs.pop()),
    }
    synchronize(case.device)
    steps = [step_ns(phases, case.device) for _ in range(case.warmup_steps + case.steps)][case.warmup_steps :]
    figures.forward, figures.backward = (Times.of([ns[name] / 1e6 for ns in steps]) for name in phases)


if __name__ == "__main__":
    sys.exit(main(TARGET, measure))
