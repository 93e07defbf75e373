"""Our FlashAttention-2 against attention without fusion and against PyTorch's own: forward, backward, end to end.

``python -m profiling_targets.flash --implementation sdpa --context-length 4096`` measures one shape. On a GPU ``flash``
is Triton's kernels in ``flash_attention.py``, on a CPU the same algorithm in PyTorch, ``tiled_attention.py``.
"""

from __future__ import annotations

import math
import statistics
import sys
from collections.abc import Callable

from torch import Tensor

from nsys_analyzer.experiments.flash import TARGET, FlashCase, FlashFigures, FlashTimes
from profiling_targets.attention_variants import (
    Attend,
    Passes,
    check_error,
    later_keys,
    max_error,
    naive,
    sdpa,
    sdpa_flash,
    triton_attention,
)
from profiling_targets.harness import NotHereError, allocations, main, set_precision, times_ms
from profiling_targets.tiled_attention import tiled_attention

#: Of the largest number of the fp32 reference, for the output and each gradient.
TOLERANCES = {"fp32": 1e-4, "bf16": 3e-2}
_LONGEST_CHECKED = 4096  # a longer reference takes more memory than what it checks
_LONG_MS = 100.0
#: do_bench estimates how many calls fit its time: six by our estimate are at least five by its.
_LEAST_CALLS = 6


def measure(case: FlashCase, figures: FlashFigures) -> None:
    """Checks an implementation against fp32, then times its passes and counts their memory."""
    set_precision("fp32")  # no matmul of fp32 tensors runs as TF32
    attend, shape = _attend(case), (case.batch_size, case.heads, case.context_length, case.d_head)
    passes = Passes.random(attend, shape, case.device, case.precision)
    figures.inputs_bytes = sum(tensor.nbytes for tensor in (*passes.inputs, passes.gradient))
    if case.context_length <= _LONGEST_CHECKED:
        exact = passes.like(_unfused(case), lambda tensor: tensor.detach().float())
        figures.max_error = error = max_error(passes.end_to_end(), exact.end_to_end())
        check_error("max_error", error, TOLERANCES[case.precision])
    figures.forward = _times(passes.forward, case)
    with allocations(case.device) as counted:
        passes.end_to_end()
    figures.peak_bytes = counted.peak_bytes
    _measure_backward(case, passes, figures)
    figures.end_to_end = _times(passes.end_to_end, case)


def _measure_backward(case: FlashCase, passes: Passes, figures: FlashFigures) -> None:
    """Times backward alone, again and again from one forward pass, which is freed after it."""
    out = passes.forward()
    figures.kernel = _kernel(case, out)
    figures.backward = _times(lambda: passes.backward(out, keep=True), case)


def _attend(case: FlashCase) -> Attend:
    """Returns the implementation of a case.

    Raises:
        NotHereError: this device or installation cannot run it.
    """
    if case.implementation == "unfused":
        return _unfused(case)
    if case.implementation == "sdpa":
        return lambda q, k, v: sdpa(q, k, v, case.causal)
    if case.implementation == "sdpa_flash":
        if case.device == "cuda" and case.precision == "fp32":
            raise NotHereError("SDPA's FlashAttention backend takes no fp32 on a GPU")
        return lambda q, k, v: sdpa_flash(q, k, v, case.causal)
    if case.device == "cpu":
        return lambda q, k, v: tiled_attention(q, k, v, case.causal)
    in_triton = triton_attention(case.d_head)
    return lambda q, k, v: in_triton(q, k, v, case.causal, case.fp32_products)


def _unfused(case: FlashCase) -> Attend:
    """Returns naive attention whose mask is made once."""
    masked = later_keys(case.context_length, case.context_length, case.device) if case.causal else None  # (S, S)
    return lambda q, k, v: naive(q, k, v, case.causal, masked)


def _kernel(case: FlashCase, out: Tensor) -> str:
    """Names what ran: of SDPA the backend that PyTorch chose, as the node of its backward pass names it."""
    if case.implementation == "unfused":
        return "unfused"
    if case.implementation == "flash" and case.device == "cpu":
        return "tiles in PyTorch"
    if case.implementation == "flash":
        return f"Triton, {case.fp32_products}" if case.precision == "fp32" else "Triton"
    name = out.grad_fn.name().removesuffix("Backward0") if out.grad_fn else ""
    fused = name.startswith("ScaledDotProduct")
    return name.removeprefix("ScaledDotProduct") if fused else "math"


def _times(work: Callable[[], object], case: FlashCase) -> FlashTimes:
    """Returns median, shortest and longest time of a pass, by do_bench or, of a long pass or on a CPU, by few calls."""
    if case.device == "cuda" and (guess := times_ms(work, case.device, 1, 1)[0]) < _LONG_MS:
        from triton.testing import do_bench

        measured_ms = max(case.measured_ms, math.ceil(_LEAST_CALLS * guess))
        median, least, most = do_bench(work, warmup=case.warmup_ms, rep=measured_ms, quantiles=(0.5, 0.0, 1.0))
        return FlashTimes(median, least, most, "do_bench", measured_ms)
    times = times_ms(work, case.device, case.warmup_steps, case.steps)
    return FlashTimes(statistics.median(times), min(times), max(times), f"{case.steps} calls")


if __name__ == "__main__":
    sys.exit(main(TARGET, measure))
