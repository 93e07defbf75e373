"""The passes of one attention, and its error, for the targets ``attention``, ``flash`` and ``variants``.

Shapes: B sequences, H heads, S tokens, d features of a head. Queries, keys, values, the output and their gradients
have the same shape, (B, H, S, d).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

Attend = Callable[[Tensor, Tensor, Tensor], Tensor]

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
#: A tensor whose norm is a smaller share of the largest one is zero but for rounding: with one token, dq and dk.
_ZERO = 1e-9


class WrongResultError(ArithmeticError):
    """An implementation whose result is not attention: its time is worth nothing."""


class Passes:
    """Forward, backward, and both of them, of one attention over fixed inputs.

    Attributes:
        attend: the attention, a function of q, k and v.
        inputs: q, k and v.
        gradient: the gradient of the output.
    """

    def __init__(self, attend: Attend, inputs: Sequence[Tensor], gradient: Tensor) -> None:
        self.attend, self.gradient = attend, gradient
        q, k, v = inputs
        self.inputs = (q, k, v)

    @classmethod
    def random(
        cls, attend: Attend, shape: Sequence[int], device: str, precision: str = "fp32", backward: bool = True
    ) -> Passes:
        """Passes over normally distributed inputs, the same ones each time; ``backward``: q, k and v want gradients."""
        torch.manual_seed(0)
        q, k, v, gradient = (torch.randn(*shape, device=device, dtype=DTYPES[precision]) for _ in range(4))
        return cls(attend, [tensor.requires_grad_(backward) for tensor in (q, k, v)], gradient)

    def like(self, attend: Attend, convert: Callable[[Tensor], Tensor]) -> Passes:
        """Passes of another attention over the converted inputs: in another precision, or of some of the heads."""
        inputs = [convert(tensor.detach()).requires_grad_(tensor.requires_grad) for tensor in self.inputs]
        return Passes(attend, inputs, convert(self.gradient))

    def forward(self) -> Tensor:
        """Returns the output, recorded for backward."""
        return self.attend(*self.inputs)

    def backward(self, out: Tensor, keep: bool = False) -> tuple[Tensor, ...]:
        """Returns dq, dk and dv; ``keep``: what forward saved stays, so that the same pass can be run again."""
        return torch.autograd.grad(out, self.inputs, self.gradient, retain_graph=keep)

    def end_to_end(self) -> tuple[Tensor, ...]:
        """Returns the output, and dq, dk and dv where q, k and v want gradients."""
        out = self.forward()
        return (out.detach(), *(self.backward(out) if out.requires_grad else ()))


def max_error(found: Sequence[Tensor], exact: Sequence[Tensor]) -> float:
    """Returns max |found − exact| ÷ max |exact| of the worst tensor, or NaN if there is one."""
    return _worst(found, exact, lambda tensor: float(tensor.abs().max()))


def relative_error(found: Sequence[Tensor], exact: Sequence[Tensor]) -> float:
    """Returns ‖found − exact‖ ÷ ‖exact‖ (Euclidean) of the worst tensor, or NaN if there is one."""
    return _worst(found, exact, lambda tensor: float(tensor.norm()))


def _worst(found: Sequence[Tensor], exact: Sequence[Tensor], size: Callable[[Tensor], float]) -> float:
    """The largest size of a difference ÷ that of its exact tensor; tensors that are zero are left out."""
    sizes = [size(one) for one in exact]
    differences = [size(one.to(other.dtype) - other) for one, other in zip(found, exact, strict=True)]
    errors = [part / whole for part, whole in zip(differences, sizes, strict=True) if not whole <= _ZERO * max(sizes)]
    return math.nan if any(map(math.isnan, errors)) else max(errors)


def check_error(name: str, error: float, tolerance: float) -> None:
    """Raises WrongResultError where an error is above its tolerance, or NaN."""
    if not error <= tolerance:
        raise WrongResultError(f"{name} is {error:.2g}, and the tolerance {tolerance:.2g}")
