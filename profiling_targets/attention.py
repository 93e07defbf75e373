"""Measures one implementation of attention for tensors of one shape: its error, its time, and its memory.

The implementations are in ``attention_variants.py``, except for the Triton kernels of ``flash``, which are in
``flash_attention.py`` and ``flash_kernels.py``.
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
from profiling_targets.harness import NotHereError, main, measure_allocations, set_precision, time_calls_ms
from profiling_targets.transformer import unfused_attention

#: The largest allowed error by precision. The error is the largest difference of the output or a gradient from
#: attention in fp64 ÷ the largest value. For bf16 about twelve rounding errors (2⁻⁸ each) are allowed, because some
#: variants keep scores and partial sums in bf16.
TOLERANCES = {"fp32": 1e-4, "bf16": 5e-2}
#: The error is checked for as many heads as have at most this number of scores together. In fp64 these scores need
#: 256 MiB.
_CHECKED_SCORES = 2**25
_DO_BENCH_WARMUP_MS = 25


def measure(case: PassesCase, figures: PassesFigures) -> None:
    """Checks an implementation against PyTorch's attention in fp64, then counts its memory and times its passes."""
    set_precision("fp32")  # so that no matmul of fp32 tensors runs as TF32
    shape = (case.batch_size, case.heads, case.context_length, case.d_head)
    passes = Passes.random(_find_implementation(case), shape, case.device, case.precision)
    figures.inputs_bytes = sum(tensor.nbytes for tensor in (*passes.inputs, passes.gradient))
    (figures.first_step_ms,) = time_calls_ms(passes.end_to_end, case.device, warmup=0, steps=1)
    if heads := _CHECKED_SCORES // case.context_length**2:
        figures.max_error = _measure_error(case, passes, heads)
    with torch.no_grad():
        with measure_allocations(case.device) as memory:
            passes.forward()
        figures.forward_peak_bytes = memory.peak_bytes
        figures.forward = _measure_times(passes.forward, case)
    _measure_backward(case, passes, figures)
    with measure_allocations(case.device) as memory:
        passes.end_to_end()
    figures.peak_bytes = memory.peak_bytes
    figures.end_to_end = _measure_times(passes.end_to_end, case)


def _measure_backward(case: PassesCase, passes: Passes, figures: PassesFigures) -> None:
    """Measures the time of the backward pass without the forward pass.

    Eager code repeats the backward pass from a single forward pass. A compiled backward pass overwrites the memory that
    its forward pass saved. So a new forward pass, which is not timed, runs before each compiled backward pass.
    """
    with measure_allocations(case.device) as memory:
        out = passes.forward()
    figures.before_backward_bytes = memory.alive_bytes
    if case.implementation.startswith("sdpa") and out.grad_fn:
        figures.kernel = out.grad_fn.name().removeprefix("ScaledDotProduct").removesuffix("Backward0")

    def renew_forward() -> None:
        """Runs a new forward pass, from which the next backward pass starts."""
        nonlocal out
        out = passes.forward()

    prepare = renew_forward if case.compile else None
    figures.backward = _measure_times(lambda: passes.backward(out, keep=not case.compile), case, prepare)


def _find_implementation(case: PassesCase) -> Attend:
    """Returns the implementation that a case names, as a function of q, k and v.

    Raises:
        NotHereError: this device or installation cannot run the implementation.
    """
    if case.implementation == "unfused":
        attend = cast("Attention", torch.compile(unfused_attention) if case.compile else unfused_attention)
        masked = later_keys(case.context_length, case.context_length, case.device) & case.causal  # (S, S)
        return lambda q, k, v: attend(q, k, v, masked)
    if case.implementation == "sdpa_flash" and case.device == "cuda" and case.precision == "fp32":
        raise NotHereError("PyTorch's FlashAttention supports bf16 on a GPU, but not fp32")
    if case.implementation != "flash":
        return lambda q, k, v: IMPLEMENTATIONS[case.implementation](q, k, v, case.causal)
    if case.device == "cpu":
        raise NotHereError("Triton kernels need a GPU; the implementation tiled is the same algorithm")
    in_triton = triton_attention(case.d_head)
    return lambda q, k, v: in_triton(q, k, v, case.causal)


def _measure_error(case: PassesCase, passes: Passes, heads: int) -> float:
    """Returns the error of an implementation for the first ``heads`` heads of its inputs.

    Raises:
        ArithmeticError: the error exceeds the tolerance, so the implementation is wrong, and its time is not measured.
    """

    def select_checked_heads(tensor: Tensor) -> Tensor:  # (B, H, S, d) -> (1, heads, S, d)
        """Returns the heads of a tensor whose error is checked."""
        return tensor.flatten(0, 1)[:heads].unsqueeze(0)

    results = [select_checked_heads(tensor) for tensor in passes.end_to_end()]
    exact = passes.like(
        lambda q, k, v: sdpa(q, k, v, case.causal), lambda tensor: select_checked_heads(tensor).double()
    )
    error, tolerance = max_error(results, exact.end_to_end()), TOLERANCES[case.precision]
    if not error <= tolerance:  # the condition is also true if the error is NaN
        raise ArithmeticError(f"the error is {error:.2g}, and the tolerance {tolerance:.2g}")
    return error


def _measure_times(work: Callable[[], object], case: PassesCase, prepare: Callable[[], object] | None = None) -> Times:
    """Returns the measured times of a pass.

    If Triton's do_bench measures the pass on a GPU, the median stands for the mean, and there is no standard deviation.

    Args:
        work: the pass.
        case: the case, which contains the device and the number of calls.
        prepare: is called before each pass, and is not timed. do_bench does not measure a pass with ``prepare``.
    """
    if prepare or not case.measured_ms or case.device == "cpu":
        return Times.of(time_calls_ms(work, case.device, case.warmup_steps, case.steps, prepare))
    from triton.testing import do_bench

    quantiles = (0.5, 0.0, 1.0)
    median, least, most = do_bench(work, warmup=_DO_BENCH_WARMUP_MS, rep=case.measured_ms, quantiles=quantiles)
    return Times(median, least, most, median)


if __name__ == "__main__":
    main(TARGET, measure)
