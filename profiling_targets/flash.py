"""Our FlashAttention-2 against attention without fusion and against PyTorch's own: forward, backward, end to end.

``python -m profiling_targets.flash --implementation sdpa --context-length 4096`` measures one shape. On a GPU ``flash``
is Triton's kernels in ``flash_attention.py``, on a CPU the same algorithm in PyTorch, ``tiled_attention.py``.
"""

from __future__ import annotations

import importlib.util
import math
import statistics
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F  # noqa: N812  the name everybody knows it by
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from profiling_targets.cases import Figures, NotHereError, default_device, main, option
from profiling_targets.products import set_precision
from profiling_targets.tiled_attention import tiled_attention
from profiling_targets.timer import allocations, times_ms

#: Of the largest number of the fp32 reference, for the output and each gradient.
TOLERANCES = {"fp32": 1e-4, "bf16": 3e-2}
_LONGEST_CHECKED = 4096  # a longer reference takes more memory than what it checks
_LONG_MS = 100.0
#: do_bench takes as many calls as it guesses to fit its time: six by our own guess are five at the least by its.
_LEAST_CALLS = 6
_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
_IMPLEMENTATIONS = ("flash", "unfused", "sdpa", "sdpa_flash")
Attend = Callable[[Tensor, Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class Case:
    """One implementation and shape: queries, keys and values of (batch_size, heads, context_length, d_head)."""

    device: str = field(default_factory=default_device)
    implementation: str = option("flash", "sdpa_flash: SDPA held to its FlashAttention backend", _IMPLEMENTATIONS)
    precision: str = option("bf16", "of the tensors and products", ("bf16", "fp32"))
    d_head: int = option(64, "features of a head: 16, 32, 64 or 128")
    context_length: int = option(1024, "tokens")
    batch_size: int = option(1, "sequences")
    heads: int = option(8, "heads")
    causal: bool = option(True, "no token sees a later one")
    fp32_products: str = option("tf32x3", "of our Triton kernels in fp32", ("tf32x3", "ieee"))
    warmup_ms: int = option(25, "of do_bench's warm-up, on a GPU")
    measured_ms: int = option(100, "that do_bench measures for, on a GPU; longer where that is less than five calls")
    warmup_steps: int = option(1, "calls before the measured ones, without do_bench")
    steps: int = option(3, "measured calls without do_bench: on a CPU, and of passes longer than 100 ms")


class _Attention:
    """The attention of a case and its inputs; no pass leaves memory behind."""

    def __init__(self, case: Case) -> None:
        self.attend = _attend(case)
        torch.manual_seed(0)
        shape, dtype = (case.batch_size, case.heads, case.context_length, case.d_head), _DTYPES[case.precision]
        q, k, v, self.gradient = (torch.randn(shape, device=case.device, dtype=dtype) for _ in range(4))
        self.inputs = tuple(tensor.requires_grad_() for tensor in (q, k, v))  # (B, H, S, d_head) each

    def forward(self) -> Tensor:
        """One pass, recorded for backward."""
        return self.attend(*self.inputs)

    def gradients(self, out: Tensor, keep: bool = False) -> tuple[Tensor, ...]:
        """Those of q, k and v; ``keep``: what forward saved stays for another time."""
        return torch.autograd.grad(out, self.inputs, self.gradient, retain_graph=keep)

    def end_to_end(self) -> tuple[Tensor, ...]:
        """Forward, then backward: the output and the gradients."""
        out = self.forward()
        return (out.detach(), *self.gradients(out))


def measure(case: Case, figures: Figures) -> None:
    """Checks an implementation against fp32, then times its passes and counts their memory."""
    set_precision("fp32")  # no product of fp32 runs as TF32
    attention = _Attention(case)
    tensors = (*attention.inputs, attention.gradient)
    figures["inputs_bytes"] = sum(tensor.nbytes for tensor in tensors)
    if case.context_length <= _LONGEST_CHECKED:
        _check(case, attention, figures)
    figures |= _times("forward", attention.forward, case)
    with allocations(case.device) as counted:
        attention.end_to_end()
    figures["peak_bytes"] = counted.peak_bytes
    _measure_backward(case, attention, figures)
    figures |= _times("end_to_end", attention.end_to_end, case)


def _measure_backward(case: Case, attention: _Attention, figures: Figures) -> None:
    """Times backward alone, again and again from one forward pass."""
    out = attention.forward()
    figures["kernel"] = _kernel(case, out)
    figures |= _times("backward", lambda: attention.gradients(out, keep=True), case)


def _attend(case: Case) -> Attend:
    """The implementation of a case.

    Raises:
        NotHereError: this device or installation cannot run it.
    """
    if case.implementation == "unfused":
        return _unfused(case)
    if case.implementation == "sdpa":
        return lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=case.causal)
    if case.implementation == "sdpa_flash":
        if case.device == "cuda" and case.precision == "fp32":
            raise NotHereError("SDPA's FlashAttention backend takes no fp32 on a GPU")
        return lambda q, k, v: _sdpa_flash(q, k, v, case.causal)
    if case.device == "cpu":
        return lambda q, k, v: tiled_attention(q, k, v, case.causal)
    if importlib.util.find_spec("triton") is None:
        raise NotHereError("Triton is not installed: pip install triton")
    from profiling_targets.flash_attention import D_HEADS, flash_attention

    if case.d_head not in D_HEADS:
        raise NotHereError(f"the Triton kernels take a d_head of {', '.join(map(str, D_HEADS))}")
    return lambda q, k, v: flash_attention(q, k, v, case.causal, case.fp32_products)


def _unfused(case: Case) -> Attend:
    """Two products, and PyTorch's mask and softmax on all of the scores between them; the mask is made once."""
    side, scale = 2 * (case.context_length,), 1 / math.sqrt(case.d_head)
    future = torch.ones(side, dtype=torch.bool, device=case.device).triu_(1) if case.causal else None  # (S, S)

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        scores = q @ k.mT * scale  # (B, H, S, S)
        if future is not None:
            scores = scores.masked_fill(future, -math.inf)
        return scores.softmax(-1) @ v

    return attend


def _sdpa_flash(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Tensor:
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        return F.scaled_dot_product_attention(q, k, v, is_causal=causal)


def _check(case: Case, attention: _Attention, figures: Figures) -> None:
    """Compares output and gradients with those of unfused attention in fp32.

    Raises:
        RuntimeError: the implementation is wrong, and its time is worth nothing.
    """
    found = attention.end_to_end()
    inputs = tuple(tensor.detach().float().requires_grad_() for tensor in attention.inputs)
    out = _unfused(case)(*inputs)
    wanted = (out.detach(), *torch.autograd.grad(out, inputs, attention.gradient.float()))
    figures["max_error"] = error = max_error(found, wanted)
    if not error <= TOLERANCES[case.precision]:  # a NaN is wrong, too
        raise RuntimeError(f"wrong by {error:.1e} of the largest number, more than {TOLERANCES[case.precision]:.0e}")


def max_error(found: Sequence[Tensor], wanted: Sequence[Tensor]) -> float:
    """The largest difference ÷ the largest number of its reference, over pairs of tensors; NaN if there is one."""
    errors = [((a.float() - b).abs().max() / b.abs().max()).item() for a, b in zip(found, wanted, strict=True)]
    return math.nan if any(math.isnan(error) for error in errors) else max(errors)


def _kernel(case: Case, out: Tensor) -> str:
    """What ran: of SDPA the backend that PyTorch chose, as the node of its backward pass names it."""
    if case.implementation == "unfused":
        return "unfused"
    if case.implementation == "flash" and case.device == "cpu":
        return "tiles in PyTorch"
    if case.implementation == "flash":
        return f"Triton, {case.fp32_products}" if case.precision == "fp32" else "Triton"
    name = out.grad_fn.name().removesuffix("Backward0") if out.grad_fn else ""
    fused = name.startswith("ScaledDotProduct")
    return name.removeprefix("ScaledDotProduct") if fused else "math"


def _times(name: str, work: Callable[[], object], case: Case) -> Figures:
    """Median, shortest and longest time of a pass, by do_bench or, of a long pass or on a CPU, by few calls."""
    if case.device == "cuda" and (guess := times_ms(work, case.device, 1, 1)[0]) < _LONG_MS:
        return _by_do_bench(name, work, case.warmup_ms, max(case.measured_ms, math.ceil(_LEAST_CALLS * guess)))
    times = times_ms(work, case.device, case.warmup_steps, case.steps)
    return _figures(name, (statistics.median(times), min(times), max(times)), f"{case.steps} calls")


def _by_do_bench(name: str, work: Callable[[], object], warmup_ms: int, measured_ms: int) -> Figures:
    from triton.testing import do_bench

    times = do_bench(work, warmup=warmup_ms, rep=measured_ms, quantiles=(0.5, 0.0, 1.0))
    return {**_figures(name, times, "do_bench"), f"{name}_measured_ms": measured_ms}


def _figures(name: str, times: Sequence[float], timer: str) -> Figures:
    middle, low, high = times
    return {f"{name}_ms": middle, f"{name}_min_ms": low, f"{name}_max_ms": high, f"{name}_timer": timer}


if __name__ == "__main__":
    sys.exit(main(Case, measure))
