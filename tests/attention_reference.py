"""What tests of attention compare with: unfused attention in fp32, and the error of another one to it."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from profiling_targets.flash import TOLERANCES, max_error

Attend = Callable[[Tensor, Tensor, Tensor, bool], Tensor]
#: Of the largest number of the reference. fp16 keeps three bits more than bf16: an eighth of its tolerance.
TOLERATED = {
    torch.float32: TOLERANCES["fp32"],
    torch.bfloat16: TOLERANCES["bf16"],
    torch.float16: TOLERANCES["bf16"] / 8,
}


def unfused(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Tensor:
    scores = q @ k.mT / math.sqrt(q.shape[-1])
    if causal:
        future = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).triu(1)
        scores = scores.masked_fill(future, -math.inf)
    return scores.softmax(-1) @ v


def passes(
    attend: Attend, inputs: tuple[Tensor, ...], out_grad: Tensor, causal: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The output, and the gradients of q, k and v."""
    q, k, v = (tensor.detach().requires_grad_() for tensor in inputs)
    out = attend(q, k, v, causal)
    dq, dk, dv = torch.autograd.grad(out, (q, k, v), out_grad)
    return out.detach(), dq, dk, dv


def error(attend: Attend, inputs: tuple[Tensor, ...], out_grad: Tensor, causal: bool) -> float:
    """Of output and gradients, against fp32 of the same inputs."""
    found = passes(attend, inputs, out_grad, causal)
    assert all(tensor.dtype == inputs[0].dtype for tensor in found)
    return max_error(found, passes(unfused, tuple(tensor.float() for tensor in inputs), out_grad.float(), causal))


def random_inputs(
    shape: tuple[int, int, int, int], dtype: torch.dtype, layout: str = "plain", device: str = "cpu"
) -> tuple[tuple[Tensor, ...], Tensor]:
    """q, k and v (B, H, S, d_head) and the gradient of the output.

    Args:
        shape: B, H, S, d_head.
        dtype: of all four.
        layout: ``plain``: contiguous; ``packed``: three slices of one tensor, heads beside each other, as a model's
            projection makes them; ``mixed``: each laid out in another way.
        device: where they are.
    """
    torch.manual_seed(0)
    batch_size, heads, length, d_head = shape
    packed = torch.randn(batch_size, length, 3, heads, d_head, device=device).to(dtype)
    q, k, v = (tensor.transpose(1, 2) for tensor in packed.unbind(2))
    if layout == "plain":
        q, k, v = q.contiguous(), k.contiguous(), v.contiguous()
    if layout == "mixed":
        k, v = k.contiguous(), v.contiguous().mT.contiguous().mT  # the last dimension of v is not contiguous
    return (q, k, v), torch.randn(shape, device=device).to(dtype)
