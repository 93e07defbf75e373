"""Attention in six ways with PyTorch's operators: the same result, other memory, forward and backward.

B sequences, H heads, N tokens. The four from ``naive`` to ``tiled`` go from all N² scores to one tile of them;
``flash`` is ``tiled`` in Triton, ``torch`` what PyTorch itself offers. They run wherever their operators do.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import reduce
from operator import add

import torch
import torch.nn.functional as F  # noqa: N812  the name everybody knows it by
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from profiling_targets.cases import NotHereError
from profiling_targets.tiled_attention import tiled_attention

Attention = Callable[[Tensor, Tensor, Tensor, bool], Tensor]

_TILE = 256
_ROWS = 128


def naive(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Tensor:
    """All scores at once: product, mask, softmax, product, each a pass over (B, H, N, N).

    Args:
        q, k, v: (B, H, N, d) each; so for all variants.
        causal: whether a query sees no later key.
    """
    scores = q @ k.mT / math.sqrt(q.shape[-1])  # (B, H, N, N)
    return _masked(scores, causal).softmax(-1) @ v


def blocked(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Tensor:
    """As ``naive``, with both products in tiles of 256; the scores are still all there."""
    scores = torch.cat([_scores_by_tile(rows, k) for rows in _split(q, _TILE, -2)], -2)  # (B, H, N, N)
    weights = _masked(scores / math.sqrt(q.shape[-1]), causal).softmax(-1)
    return torch.cat([_values_by_tile(rows, v) for rows in _split(weights, _TILE, -2)], -2)


def _scores_by_tile(q: Tensor, k: Tensor) -> Tensor:  # (B, H, 256, d), (B, H, N, d) -> (B, H, 256, N)
    return torch.cat([q @ keys.mT for keys in _split(k, _TILE, -2)], -1)


def _values_by_tile(weights: Tensor, v: Tensor) -> Tensor:  # (B, H, 256, N), (B, H, N, d) -> (B, H, 256, d)
    pairs = zip(_split(weights, _TILE, -1), _split(v, _TILE, -2), strict=True)
    summed: Tensor = reduce(add, (part @ values for part, values in pairs))
    return summed


def _split(x: Tensor, size: int, dim: int) -> tuple[Tensor, ...]:
    parts: tuple[Tensor, ...] = torch.split(x, size, dim)
    return parts


def fused(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Tensor:
    """A block of 128 query rows at a time, each from its scores to its output before the next one starts.

    A block and not one row: a launch costs more than the work of a row. Rows are whole, so that their softmax is the
    plain one, and a causal block skips the keys after its last row. Backward makes the scores of each block anew.
    """
    training = torch.is_grad_enabled() and any(x.requires_grad for x in (q, k, v))
    done = []
    for first, rows in zip(range(0, q.shape[-2], _ROWS), _split(q, _ROWS, -2), strict=True):
        seen = min(first + _ROWS, k.shape[-2]) if causal else k.shape[-2]
        inputs = (rows, k[..., :seen, :], v[..., :seen, :], causal)
        # Without the checkpoint, autograd would keep the weights of every block: all N² of them.
        done.append(checkpoint(naive, *inputs, use_reentrant=False) if training else naive(*inputs))
    return torch.cat(done, -2)


def _masked(scores: Tensor, causal: bool) -> Tensor:
    """The scores without those of later keys; the last query sees all keys there are."""
    if not causal:
        return scores
    rows, keys = scores.shape[-2:]
    ahead = torch.ones(rows, keys, dtype=torch.bool, device=scores.device).triu(keys - rows + 1)
    return scores.masked_fill(ahead, -math.inf)


def flash(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Tensor:
    """FlashAttention-2 in Triton.

    Raises:
        NotHereError: there is no Triton, or it has no kernel for this d_head.
    """
    try:
        from profiling_targets.flash_attention import D_HEADS, flash_attention
    except ModuleNotFoundError as error:
        raise NotHereError("The flash variant on a GPU needs Triton", "pip install triton") from error
    if q.shape[-1] not in D_HEADS:
        raise NotHereError(f"The flash variant has no kernel for d_head {q.shape[-1]}", f"It knows {D_HEADS}")
    return flash_attention(q, k, v, causal)


def sdpa(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Tensor:
    """PyTorch's own, by whichever of its kernels it chooses."""
    return F.scaled_dot_product_attention(q, k, v, is_causal=causal)


IMPLEMENTATIONS: dict[str, Attention] = {
    "naive": naive,
    "blocked": blocked,
    "fused": fused,
    "tiled": tiled_attention,
    "flash": flash,
    "torch": sdpa,
}
