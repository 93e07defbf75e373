"""Implements FlashAttention-2 in plain PyTorch, tile by tile, to read before the Triton kernels.

The softmax of a row needs the row's maximum and the sum of its exponentials. Neither needs the whole row at once: the
loop visits the keys one tile at a time, keeps the largest score so far and the sums relative to it, and rescales the
sums when a larger score appears. So only one tile of the S × S scores exists at a time. The backward pass recomputes
each tile of probabilities from the row's ``lse``, the logarithm of the softmax's denominator.

Dao, *FlashAttention-2*, 2023, https://arxiv.org/abs/2307.08691: algorithm 1 is ``forward``, algorithm 2 ``backward``.
Shapes: B sequences, H heads, S tokens; M rows and N keys make a tile.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

_TILE_LENGTH = 128


def tiled_attention(q: Tensor, k: Tensor, v: Tensor, causal: bool, tile: int = _TILE_LENGTH) -> Tensor:
    """Computes attention, softmax(q·kᵀ ÷ √d_head)·v, without storing all S × S scores at once.

    Scores, sums and gradients are fp32 for every type of input. Each result is rounded once, at the end.

    Args:
        q, k, v: (B, H, S, d_head), floating point, with any strides.
        causal: whether each query ignores later keys.
        tile: the number of rows and of keys in a tile.

    Returns:
        The output, (B, H, S, d_head), with the dtype of q.
    """
    out: Tensor = TiledAttention.apply(q, k, v, causal, tile)  # type: ignore[no-untyped-call]
    return out


class TiledAttention(torch.autograd.Function):
    """The autograd function with the forward and the backward algorithm."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, causal: bool, tile: int) -> Tensor:
        """Computes the output one tile of rows at a time, and saves ``lse``, one number per row, for backward."""
        out, lse = torch.empty_like(q), torch.empty(q.shape[:-1], dtype=torch.float32, device=q.device)
        for rows in _tiles(q.shape[-2], tile):
            max_score = torch.full_like(lse[..., rows], -math.inf)  # (B, H, M), the largest score so far
            denominator = torch.zeros_like(max_score)
            acc = torch.zeros_like(q[..., rows, :], dtype=torch.float32)  # (B, H, M, d_head)
            for keys in _keys_of(rows, q.shape[-2], tile, causal):
                scores = _scores(q, k, rows, keys, causal)  # (B, H, M, N)
                new_top = torch.maximum(max_score, scores.amax(-1))
                p = torch.exp(scores - new_top[..., None])
                shrink = torch.exp(max_score - new_top)  # the sums so far are relative to the old largest score
                denominator = denominator * shrink + p.sum(-1)
                acc = acc * shrink[..., None] + p @ v[..., keys, :].float()
                max_score = new_top
            out[..., rows, :] = (acc / denominator[..., None]).to(q.dtype)
            lse[..., rows] = max_score + denominator.log()
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.causal, ctx.tile = causal, tile
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, Tensor, None, None]:
        """Computes the gradients of q, k and v, and recomputes each tile of probabilities."""
        q, k, v, out, lse = ctx.saved_tensors
        out_grad, scale = grads[0].float(), 1 / math.sqrt(q.shape[-1])
        delta = (out_grad * out.float()).sum(-1)  # (B, H, S), a term of softmax's gradient, equal for all keys of a row
        dq, dk, dv = (torch.zeros_like(tensor, dtype=torch.float32) for tensor in (q, k, v))
        for rows in _tiles(q.shape[-2], ctx.tile):
            grad = out_grad[..., rows, :]  # (B, H, M, d_head)
            for keys in _keys_of(rows, q.shape[-2], ctx.tile, ctx.causal):
                p = torch.exp(_scores(q, k, rows, keys, ctx.causal) - lse[..., rows, None])  # (B, H, M, N)
                dv[..., keys, :] += p.mT @ grad
                dp = grad @ v[..., keys, :].float().mT
                ds = p * (dp - delta[..., rows, None]) * scale  # the gradient of the unscaled scores q·kᵀ
                dq[..., rows, :] += ds @ k[..., keys, :].float()
                dk[..., keys, :] += ds.mT @ q[..., rows, :].float()
        return dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype), None, None


def _tiles(length: int, tile: int) -> Iterator[slice]:
    """Returns the slices of ``tile`` positions each that cover a length. The last slice may be shorter."""
    return (slice(first, min(first + tile, length)) for first in range(0, length, tile))


def _keys_of(rows: slice, length: int, tile: int, causal: bool) -> Iterator[slice]:
    """Returns the slices of keys that at least one of the rows can see."""
    return _tiles(rows.stop if causal else length, tile)


def _scores(q: Tensor, k: Tensor, rows: slice, keys: slice, causal: bool) -> Tensor:
    """Returns one tile of the scaled scores (B, H, M, N) in fp32, with minus infinity for masked keys."""
    scores = q[..., rows, :].float() @ k[..., keys, :].float().mT / math.sqrt(q.shape[-1])
    if causal and keys.stop > rows.start + 1:  # the tile touches the diagonal
        row, key = (torch.arange(tile.start, tile.stop, device=q.device) for tile in (rows, keys))
        scores = scores.masked_fill(key > row[:, None], -math.inf)
    return scores
