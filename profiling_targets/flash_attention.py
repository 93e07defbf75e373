"""Implements FlashAttention-2 for PyTorch with Triton kernels: ``flash_attention(q, k, v, causal)``, with gradients.

The kernels are in ``flash_kernels.py``. The same algorithm in plain PyTorch is in ``tiled_attention.py``.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
import triton
from torch import Tensor

from profiling_targets.flash_kernels import delta_kernel, forward_kernel, keys_kernel, queries_kernel

D_HEADS = (16, 32, 64, 128)
_KERNELS = {"forward": forward_kernel, "keys": keys_kernel, "queries": queries_kernel}
_DELTA_ROWS = 64


@dataclass(frozen=True)
class Launch:
    """The parameters with which a kernel is launched.

    Attributes:
        block_m, block_n: the numbers of queries and keys in a tile, which are powers of two.
        num_warps: the number of warps in a thread block.
        num_stages: the number of stages of the software pipeline that loads tiles in advance.
    """

    block_m: int
    block_n: int
    num_warps: int
    num_stages: int


def _make_launches(*sizes: tuple[int, int, int, int]) -> dict[int, Launch]:
    return {d_head: Launch(*size) for d_head, size in zip(D_HEADS, sizes, strict=True)}


#: The launch parameters by kernel and precision of the matmuls, then by d_head. They were the fastest of several that
#: were tried on an H200, with causal attention and 16 heads. The measure was the sum of the times at contexts of 4,096
#: and 16,384 tokens (fp32: 2,048), each divided by its number of scores.
LAUNCHES: dict[tuple[str, str], dict[int, Launch]] = {
    ("forward", "half"): _make_launches((64, 64, 4, 3), (64, 64, 4, 3), (128, 64, 4, 3), (128, 128, 8, 3)),
    ("keys", "half"): _make_launches((64, 128, 4, 3), (64, 128, 4, 3), (32, 64, 4, 2), (64, 64, 4, 2)),
    ("queries", "half"): _make_launches((64, 64, 4, 3), (64, 64, 4, 3), (128, 64, 4, 3), (128, 64, 8, 3)),
    ("forward", "tf32x3"): _make_launches((32, 32, 4, 2), (64, 32, 8, 2), (64, 32, 4, 2), (32, 32, 4, 2)),
    ("keys", "tf32x3"): _make_launches((32, 32, 4, 2), (32, 32, 4, 2), (64, 32, 4, 2), (32, 32, 4, 2)),
    ("queries", "tf32x3"): _make_launches((32, 32, 4, 1), (32, 32, 4, 2), (64, 32, 4, 2), (32, 32, 4, 2)),
}


def flash_attention(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Tensor:
    """Computes attention, softmax(q·kᵀ ÷ √d_head)·v, without writing the scores to memory.

    Matmuls of bf16 and fp16 tensors accumulate in fp32. A matmul of fp32 tensors is computed as three TF32 matmuls on
    tensor cores, with an error close to that of fp32.

    Args:
        q, k, v: (B, H, S, d_head) in bf16, fp16 or fp32 on one device. d_head must be in ``D_HEADS``. The tensors are
            copied first if their strides differ or their last dimension is not contiguous.
        causal: whether each query ignores later keys.

    Returns:
        The output, (B, H, S, d_head), contiguous, with the dtype of q.
    """
    matmuls = "tf32x3" if q.dtype == torch.float32 else "half"
    out: Tensor = FlashAttention.apply(q, k, v, causal, matmuls)  # type: ignore[no-untyped-call]
    return out


class FlashAttention(torch.autograd.Function):
    """The autograd function whose forward and backward run the Triton kernels."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, causal: bool, matmuls: str) -> Tensor:
        """Computes the output, and saves the inputs, the output and one number per row for backward."""
        q, k, v = _make_strides_equal(q, k, v)
        out, lse = run_forward(q, k, v, causal, matmuls)
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.causal, ctx.matmuls = causal, matmuls
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, Tensor, None, None]:
        """Computes the gradients of q, k and v."""
        q, k, v, out, lse = ctx.saved_tensors
        return *run_backward(q, k, v, out, lse, grads[0].contiguous(), ctx.causal, ctx.matmuls), None, None


def run_forward(q: Tensor, k: Tensor, v: Tensor, causal: bool, matmuls: str) -> tuple[Tensor, Tensor]:
    """Returns the output, and ``lse`` (B, H, S), the binary logarithm of the softmax denominator of each row."""
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    lse = torch.empty(q.shape[:-1], dtype=torch.float32, device=q.device)
    _launch_kernel("forward", (q, k, v, out, lse), causal, matmuls)
    return out, lse


def run_backward(
    q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, out_grad: Tensor, causal: bool, matmuls: str
) -> tuple[Tensor, Tensor, Tensor]:
    """Returns the gradients of q, k and v, contiguous.

    One kernel visits all rows for each tile of keys, and another kernel visits all keys for each tile of rows. Both
    recompute the scores. This takes seven matmuls instead of five, but needs no atomic additions.
    """
    delta = torch.empty_like(lse)  # (B, H, S)
    with torch.cuda.device(q.get_device()):
        blocks = triton.cdiv(delta.numel(), _DELTA_ROWS)
        delta_kernel[(blocks,)](out, out_grad, delta, delta.numel(), q.shape[-1], _DELTA_ROWS)
    dq, dk, dv = (torch.empty(q.shape, dtype=q.dtype, device=q.device) for _ in range(3))
    _launch_kernel("keys", (q, k, v, out_grad, lse, delta, dk, dv), causal, matmuls)
    _launch_kernel("queries", (q, k, v, out_grad, lse, delta, dq), causal, matmuls)
    return dq, dk, dv


def _launch_kernel(name: str, tensors: tuple[Tensor, ...], causal: bool, matmuls: str) -> None:
    """Launches a kernel with a thread block for each head and each tile of rows or keys. The first tensor is q."""
    batch_size, heads, length, d_head = tensors[0].shape
    launch = LAUNCHES[name, matmuls][d_head]
    tile = launch.block_n if name == "keys" else launch.block_m
    with torch.cuda.device(tensors[0].get_device()):  # -1, the device of a CPU tensor, changes nothing
        _KERNELS[name][(batch_size * heads, triton.cdiv(length, tile))](
            *tensors,
            *tensors[0].stride()[:3],
            heads,
            length,
            math.log2(math.e) / math.sqrt(d_head),
            d_head=d_head,
            causal=causal,
            even=length % max(launch.block_m, launch.block_n) == 0,  # tiles are powers of two
            precision="ieee" if matmuls == "half" else matmuls,
            block_m=launch.block_m,
            block_n=launch.block_n,
            num_warps=launch.num_warps,
            num_stages=launch.num_stages,
        )


def _make_strides_equal(*tensors: Tensor) -> tuple[Tensor, ...]:
    """Returns the tensors with equal strides and a contiguous last dimension, copied if necessary."""
    strides = tensors[0].stride()
    are_equal = strides[-1] == 1 and all(tensor.stride() == strides for tensor in tensors)
    return tensors if are_equal else tuple(tensor.contiguous() for tensor in tensors)
