"""Attention alone, in one implementation and shape: its error, its time, and its memory.

The implementations are in ``attention_variants.py``; on a GPU ``flash`` is Triton's kernels in ``flash_attention.py``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import cast

import torch
from torch import Tensor

from nsys_analyzer.experiments.passes import TARGET, PassesCase, PassesFigures
from nsys_analyzer.inputs.rows import Times
from profiling_targets.attention_variants import (
    IMPLEMENTATIONS,
    Attend,
    Attention,
    Passes,
    later_keys,
    max_error,
    sdpa,
    triton_attention,
)
from profiling_targets.harness import NotHereError, allocations, main, set_precision, times_ms
from profiling_targets.transformer import unfused_attention

#: The largest difference from attention in fp64 that output or gradients may show, ÷ the largest value of these: twelve
#: roundings of bf16 (2⁻⁸), since some variants keep scores, weights and partial sums of gradients in it.
TOLERANCES = {"fp32": 1e-4, "bf16": 5e-2}
#: Scores of the heads that are checked, in all: 256 MiB in fp64.
_CHECKED_SCORES = 2**25
_DO_BENCH_WARMUP_MS = 25


def measure(case: PassesCase, figures: PassesFigures) -> None:
    """Checks an implementation against PyTorch's attention in fp64, then counts its memory and times its passes."""
    set_precision("fp32")  # no matmul of fp32 tensors runs as TF32
    shape = (case.batch_size, case.heads, case.context_length, case.d_head)
    passes = Passes.random(_attend(case), shape, case.device, case.precision)
    figures.inputs_bytes = sum(tensor.nbytes for tensor in (*passes.inputs, passes.gradient))
    (figures.first_step_ms,) = times_ms(passes.end_to_end, case.device, warmup=0, steps=1)
    if heads := _CHECKED_SCORES // case.context_length**2:
        figures.max_error = _error(case, passes, heads)
    with torch.no_grad():
        with allocations(case.device) as counted:
            passes.forward()
        figures.forward_peak_bytes = counted.peak_bytes
        figures.forward = _times(passes.forward, case)
    _measure_backward(case, passes, figures)
    with allocations(case.device) as counted:
        passes.end_to_end()
    figures.peak_bytes = counted.peak_bytes
    figures.end_to_end = _times(passes.end_to_end, case)


def _measure_backward(case: PassesCase, passes: Passes, figures: PassesFigures) -> None:
    """Times the backward pass alone.

    Eager code repeats the backward pass from one forward pass. Compiled code reuses the memory that its forward pass
    saved, so each of its backward passes follows a forward pass of its own, which is not timed.
    """
    with allocations(case.device) as counted:
        out = passes.forward()
    figures.before_backward_bytes = counted.alive_bytes
    if case.implementation.startswith("sdpa") and out.grad_fn:
        figures.kernel = out.grad_fn.name().removeprefix("ScaledDotProduct").removesuffix("Backward0")

    def renew_forward() -> None:
        nonlocal out
        out = passes.forward()

    prepare = renew_forward if case.compile else None
    figures.backward = _times(lambda: passes.backward(out, keep=not case.compile), case, prepare)


def _attend(case: PassesCase) -> Attend:
    """Returns the implementation of a case.

    Raises:
        NotHereError: this device or installation cannot run it.
    """
    if case.implementation == "unfused":
        attend = cast("Attention", torch.compile(unfused_attention) if case.compile else unfused_attention)
        masked = later_keys(case.context_length, case.context_length, case.device) & case.causal  # (S, S)
        return lambda q, k, v: attend(q, k, v, masked)
    if case.implementation == "sdpa_flash" and case.device == "cuda" and case.precision == "fp32":
        raise NotHereError("FlashAttention of PyTorch takes bf16 on a GPU, and no fp32")
    if case.implementation != "flash":
        return lambda q, k, v: IMPLEMENTATIONS[case.implementation](q, k, v, case.causal)
    if case.device == "cpu":
        raise NotHereError("Triton's kernels need a GPU; tiled is the same algorithm")
    in_triton = triton_attention(case.d_head)
    return lambda q, k, v: in_triton(q, k, v, case.causal)


def _error(case: PassesCase, passes: Passes, heads: int) -> float:
    """Returns the error of so many heads; an ArithmeticError where it is no attention: its time is worth nothing."""

    def checked(tensor: Tensor) -> Tensor:  # (B, H, S, d) -> (1, heads, S, d)
        return tensor.flatten(0, 1)[:heads].unsqueeze(0)

    found = [checked(tensor) for tensor in passes.end_to_end()]
    exact = passes.like(lambda q, k, v: sdpa(q, k, v, case.causal), lambda tensor: checked(tensor).double())
    error, tolerance = max_error(found, exact.end_to_end()), TOLERANCES[case.precision]
    if not error <= tolerance:  # a NaN is no agreement
        raise ArithmeticError(f"the error is {error:.2g}, and the tolerance {tolerance:.2g}")
    return error


def _times(work: Callable[[], object], case: PassesCase, prepare: Callable[[], object] | None = None) -> Times:
    """Returns the times of a pass; do_bench gives the median, the shortest and the longest alone.

    Args:
        work: the pass.
        case: how often it is measured, and on which device.
        prepare: runs before each pass and is not timed. A pass that needs it is not measured by do_bench.
    """
    if prepare or not case.measured_ms or case.device == "cpu":
        return Times.of(times_ms(work, case.device, case.warmup_steps, case.steps, prepare))
    from triton.testing import do_bench

    quantiles = (0.5, 0.0, 1.0)
    median, least, most = do_bench(work, warmup=_DO_BENCH_WARMUP_MS, rep=case.measured_ms, quantiles=quantiles)
    return Times(median, least, most, median)


if __name__ == "__main__":
    main(TARGET, measure)
