"""Computes unfused attention in fp32, and the error of another implementation compared with it."""

from __future__ import annotations

import torch
from torch import Tensor

from profiling_targets.attention import TOLERANCES
from profiling_targets.attention_variants import Attention, Passes, max_error, naive

#: Of the largest number of the reference. fp16 keeps three bits more than bf16: an eighth of its tolerance.
TOLERATED = {
    torch.float32: TOLERANCES["fp32"],
    torch.bfloat16: TOLERANCES["bf16"],
    torch.float16: TOLERANCES["bf16"] / 8,
}


def passes(
    attend: Attention, inputs: tuple[Tensor, ...], out_grad: Tensor, causal: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The output, and the gradients of q, k and v."""
    wanted = [tensor.detach().requires_grad_() for tensor in inputs]
    out, dq, dk, dv = Passes(lambda q, k, v: attend(q, k, v, causal), wanted, out_grad).end_to_end()
    return out, dq, dk, dv


def error(attend: Attention, inputs: tuple[Tensor, ...], out_grad: Tensor, causal: bool) -> float:
    """Of output and gradients, against fp32 of the same inputs."""
    found = passes(attend, inputs, out_grad, causal)
    assert all(tensor.dtype == inputs[0].dtype for tensor in found)
    return max_error(found, passes(naive, tuple(tensor.float() for tensor in inputs), out_grad.float(), causal))


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
