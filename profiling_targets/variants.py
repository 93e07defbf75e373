"""One attention variant at one shape: its error, its time, and all memory that it allocates.

``python -m profiling_targets.variants --implementation flash --causal`` measures one of ``attention_variants.py``.
"""

from __future__ import annotations

import sys
from collections.abc import Callable

import torch
from torch import Tensor

from nsys_analyzer.experiments.variants import TARGET, VariantPass, VariantsCase, VariantsFigures
from nsys_analyzer.runs.rows import Times
from profiling_targets.attention_variants import (
    IMPLEMENTATIONS,
    Passes,
    check_error,
    max_error,
    relative_error,
    sdpa,
)
from profiling_targets.harness import NotHereError, allocations, main, set_precision, times_ms

#: The largest difference from attention in fp64 that output or gradients may show, ÷ the largest value of these: twelve
#: roundings of bf16 (2⁻⁸), since some variants keep scores, weights and partial sums of gradients in it.
TOLERANCES = {"fp32": 2e-5, "bf16": 5e-2}
#: The largest ‖found − exact‖ ÷ ‖exact‖ (Euclidean) of the output and of each gradient by itself, since the largest of
#: all numbers hides what is wrong in the small ones. Up to 4,096 tokens of 128 features the variants show at most 1e-2
#: in bf16 and 7e-7 in fp32; matmuls of fp32 as one of TF32 show more than 1e-4.
RELATIVE_TOLERANCES = {"fp32": 1e-5, "bf16": 2e-2}
#: Scores of the heads that are checked, in all: 256 MiB in fp64.
_CHECKED_SCORES = 2**25
#: A call that takes longer is timed three times, and what checked it and counted its memory was its warm-up.
_LONG_MS, _LONG_STEPS = 1000.0, 3


def measure(case: VariantsCase, figures: VariantsFigures) -> None:
    """Checks a variant against PyTorch's attention in fp64, then counts its memory and times it."""
    set_precision("fp32")
    if case.implementation == "flash" and case.device == "cpu":
        raise NotHereError("Triton's kernels need a GPU; tiled is the same algorithm")
    attend = IMPLEMENTATIONS[case.implementation]
    shape = (case.batch_size, case.heads, case.context_length, case.d_head)
    passes = Passes.random(
        lambda q, k, v: attend(q, k, v, case.causal), shape, case.device, case.precision, backward=case.backward
    )
    figures.inputs_bytes = sum(tensor.nbytes for tensor in passes.inputs)
    figures.tolerance, figures.relative_tolerance = TOLERANCES[case.precision], RELATIVE_TOLERANCES[case.precision]
    exact = passes.like(lambda q, k, v: sdpa(q, k, v, case.causal), lambda tensor: checked_heads(tensor).double())
    figures.forward = VariantPass()
    _measure("forward", case, figures.forward, lambda: _forward(passes), lambda: _forward(exact))
    if passes.inputs[0].requires_grad:
        figures.forward_backward = VariantPass()
        both = figures.forward_backward
        _measure("forward_backward", case, both, lambda: passes.end_to_end()[1:], lambda: exact.end_to_end()[1:])


def _forward(passes: Passes) -> tuple[Tensor]:
    with torch.no_grad():
        return (passes.forward(),)


def _measure(
    name: str,
    case: VariantsCase,
    found: VariantPass,
    work: Callable[[], tuple[Tensor, ...]],
    exact: Callable[[], tuple[Tensor, ...]],
) -> None:
    """Checks one pass, then counts its memory, then times it."""
    checked, expected = [checked_heads(tensor.detach()) for tensor in work()], exact()
    found.max_error, found.relative_error = max_error(checked, expected), relative_error(checked, expected)
    check_error(f"{name}_max_error", found.max_error, TOLERANCES[case.precision])
    check_error(f"{name}_relative_error", found.relative_error, RELATIVE_TOLERANCES[case.precision])
    del checked, expected
    with allocations(case.device) as counted:
        work()
    found.peak_bytes, found.total_bytes = counted.peak_bytes, counted.total_bytes
    times = times_ms(work, case.device, warmup=0, steps=1)
    if times[0] > _LONG_MS:
        times += times_ms(work, case.device, warmup=0, steps=min(case.steps, _LONG_STEPS) - 1)
    else:
        times = times_ms(work, case.device, case.warmup_steps, case.steps)
    found.steps = len(times)
    for figure, value in vars(Times.of(times)).items():
        setattr(found, figure, value)


def checked_heads(x: Tensor) -> Tensor:  # (B, H, N, d) -> (1, heads that are checked, N, d)
    """Returns the heads to check, evenly spread from the first to the last: heads know nothing of each other."""
    heads = x.flatten(0, 1)
    count = max(2, min(len(heads), _CHECKED_SCORES // x.shape[-2] ** 2))
    chosen = sorted({i * (len(heads) - 1) // (count - 1) for i in range(count)})
    return heads[chosen].unsqueeze(0)


if __name__ == "__main__":
    sys.exit(main(TARGET, measure))
