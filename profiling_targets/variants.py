"""One attention variant at one shape: its error, its time, and all memory that it allocates.

``python -m profiling_targets.variants --implementation flash --causal`` measures one. On a CPU the variants naive,
blocked, fused and flash are those of ``attention_cpu.cpp``, forward only; the others, and all of them on a GPU, those
of ``attention_variants.py``.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial

import torch
import torch.nn.functional as F  # noqa: N812  the name everybody knows it by
from torch import Tensor

from profiling_targets import attention_cpu
from profiling_targets.attention_variants import IMPLEMENTATIONS, Attention
from profiling_targets.cases import Figures, NotHereError, default_device, main, option
from profiling_targets.products import set_precision
from profiling_targets.timer import allocations, statistics_of, times_ms

#: The largest difference from attention in fp64 that output or gradients may show, ÷ the largest value of these: twelve
#: roundings of bf16 (2⁻⁸), since some variants keep scores, weights and partial sums of gradients in it.
TOLERANCES = {"fp32": 2e-5, "bf16": 5e-2}
#: The largest ‖found − exact‖ ÷ ‖exact‖ (Euclidean) of the output and of each gradient by itself, since the largest of
#: all numbers hides what is wrong in the small ones. Up to 4,096 tokens of 128 features the variants show at most 1e-2
#: in bf16 and 7e-7 in fp32; products of fp32 as one of TF32 show more than 1e-4.
RELATIVE_TOLERANCES = {"fp32": 1e-5, "bf16": 2e-2}
#: A tensor of a smaller share of the largest norm is zero but for rounding: of one token the gradients of q and k.
_ZERO = 1e-9

_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
#: Scores of the heads that are checked, in all: 256 MiB in fp64.
_CHECKED_SCORES = 2**25
#: A call that takes longer is timed three times, and what checked it and counted its memory was its warm-up.
_LONG_MS, _LONG_STEPS = 1000.0, 3


@dataclass(frozen=True)
class Case:
    """One variant at one shape, (batch_size, heads, context_length, d_head)."""

    device: str = field(default_factory=default_device)
    implementation: str = option("naive", "the variant", tuple(IMPLEMENTATIONS))
    batch_size: int = option(1, "sequences")
    heads: int = option(4, "heads of each")
    context_length: int = option(1024, "tokens of each")
    d_head: int = option(32, "features of a head")
    precision: str = option("fp32", "of inputs and products", tuple(_DTYPES))
    causal: bool = option(False, "no query sees a later key")
    backward: bool = option(False, "measure forward and backward too, where the variant has one")
    warmup_steps: int = option(3, "calls before the measured ones; none more where a call takes over a second")
    steps: int = option(10, "measured calls; at most 3 where a call takes over a second")


class WrongResultError(ArithmeticError):
    """A variant whose result is not attention."""


def measure(case: Case, figures: Figures) -> None:
    """Checks a variant against PyTorch's attention in fp64, then counts its memory and times it."""
    set_precision("fp32")
    work = _Work(case)
    figures["inputs_bytes"] = sum(tensor.nbytes for tensor in work.inputs)
    figures["tolerance"] = TOLERANCES[case.precision]
    figures["relative_tolerance"] = RELATIVE_TOLERANCES[case.precision]
    for prefix, call in work.calls().items():
        _check(work, prefix, call(), figures)
        with allocations(case.device) as counted:
            call()
        figures[f"{prefix}_peak_bytes"], figures[f"{prefix}_total_bytes"] = counted.peak_bytes, counted.total_bytes
        _time(case, prefix, call, figures)


def _time(case: Case, prefix: str, call: Callable[[], object], figures: Figures) -> None:
    times = times_ms(call, case.device, warmup=0, steps=1)
    if times[0] > _LONG_MS:
        times += times_ms(call, case.device, warmup=0, steps=min(case.steps, _LONG_STEPS) - 1)
    else:
        times = times_ms(call, case.device, case.warmup_steps, case.steps)
    figures[f"{prefix}_steps"] = len(times)
    figures |= statistics_of(prefix, times)


class _Work:
    """The inputs of a case, and its passes as functions without arguments."""

    def __init__(self, case: Case) -> None:
        torch.manual_seed(0)
        self.case, (self.attend, differentiable) = case, _find(case)
        self.backward = case.backward and differentiable
        shape = (case.batch_size, case.heads, case.context_length, case.d_head)
        new = partial(torch.randn, shape, device=case.device, dtype=_DTYPES[case.precision])
        q, k, v = (new(requires_grad=self.backward) for _ in range(3))  # (B, H, N, d) each
        self.inputs = (q, k, v)
        self.gradient = new() if self.backward else torch.empty(0)

    def calls(self) -> dict[str, Callable[[], tuple[Tensor, ...]]]:
        """What is measured, by the prefix of its figures."""
        both = {"forward_backward": self._forward_backward} if self.backward else {}
        return {"forward": self._forward, **both}

    def _forward(self) -> tuple[Tensor]:
        with torch.no_grad():
            return (self.attend(*self.inputs, self.case.causal),)

    def _forward_backward(self) -> tuple[Tensor, ...]:
        out = self.attend(*self.inputs, self.case.causal)
        return torch.autograd.grad(out, self.inputs, self.gradient)

    def exact(self) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
        """The output and the three gradients in fp64, of the heads that are checked."""
        q, k, v = (self.checked(x).double().requires_grad_(self.backward) for x in self.inputs)
        out = F.scaled_dot_product_attention(q, k, v, is_causal=self.case.causal)
        if not self.backward:
            return (out,), ()
        gradients = torch.autograd.grad(out, (q, k, v), self.checked(self.gradient).double())
        return (out.detach(),), gradients

    def checked(self, x: Tensor) -> Tensor:  # (B, H, N, d) -> (1, heads that are checked, N, d)
        """The heads that are checked, evenly spread from the first to the last: heads know nothing of each other."""
        heads = x.detach().flatten(0, 1)
        count = max(2, min(len(heads), _CHECKED_SCORES // self.case.context_length**2))
        chosen = sorted({i * (len(heads) - 1) // (count - 1) for i in range(count)})
        return heads[chosen].unsqueeze(0)


def _find(case: Case) -> tuple[Attention, bool]:
    """The variant, and whether it has a backward."""
    if case.device == "cuda" or case.implementation not in attention_cpu.IMPLEMENTATIONS:
        return IMPLEMENTATIONS[case.implementation], True
    if case.precision != "fp32":
        raise NotHereError(f"The C++ variant {case.implementation} computes in fp32 alone")
    return partial(attention_cpu.attention, case.implementation), False


def _check(work: _Work, prefix: str, found: tuple[Tensor, ...], figures: Figures) -> None:
    """Notes both errors; raises WrongResultError where one is above its tolerance, or no number."""
    exact = work.exact()[len(found) > 1]
    checked = [work.checked(one).double() for one in found]
    errors = {
        f"{prefix}_max_error": (_max_error(checked, exact), figures["tolerance"]),
        f"{prefix}_relative_error": (_relative_error(checked, exact), figures["relative_tolerance"]),
    }
    figures |= {name: error for name, (error, _) in errors.items()}
    for name, (error, tolerance) in errors.items():
        if not error <= tolerance:  # a NaN is wrong, too
            raise WrongResultError(f"{name} is {error:.2g}, and the tolerance {tolerance:.2g}")


def _max_error(found: Sequence[Tensor], exact: Sequence[Tensor]) -> float:
    """The largest difference of any tensor ÷ the largest value of all."""
    largest = max(float(one.abs().max()) for one in exact)
    return _largest([float((one - other).abs().max()) / largest for one, other in zip(found, exact, strict=True)])


def _relative_error(found: Sequence[Tensor], exact: Sequence[Tensor]) -> float:
    """The largest ‖found − exact‖ ÷ ‖exact‖, each tensor against itself; one that is zero is left out."""
    norms = [float(one.norm()) for one in exact]
    differences = [float((one - other).norm()) for one, other in zip(found, exact, strict=True)]
    pairs = zip(differences, norms, strict=True)
    return _largest([difference / norm for difference, norm in pairs if not norm <= _ZERO * max(norms)])


def _largest(errors: Sequence[float]) -> float:
    """The largest; NaN if there is one, which ``max`` may pass over."""
    return math.nan if any(map(math.isnan, errors)) else max(errors)


if __name__ == "__main__":
    sys.exit(main(Case, measure))
