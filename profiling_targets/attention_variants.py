"""Implementations of attention with PyTorch's operators: the same result, other memory, forward and backward.

B sequences, H heads, N tokens. The four from ``naive`` to ``tiled`` go from all N² scores to one tile of them;
``flash`` is ``tiled`` in Triton, ``torch`` what PyTorch itself offers. They run wherever their operators do.
"""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Callable
from functools import reduce
from operator import add

import torch
import torch.nn.functional as F  # noqa: N812  the name everybody knows it by
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.checkpoint import checkpoint

from profiling_targets.harness import NotHereError
from profiling_targets.tiled_attention import tiled_attention

Attention = Callable[..., Tensor]

_TILE = 256
_ROWS = 128


def naive(q: Tensor, k: Tensor, v: Tensor, causal: bool, masked: Tensor | None = None) -> Tensor:
    """All scores at once: matmul, mask, softmax, matmul, each a pass over (B, H, N, N).

    Args:
        q, k, v: (B, H, N, d) each; so for all implementations.
        causal: whether a query sees no later key.
        masked: the mask, see ``later_keys``, where it was made before; else each causal call makes it.
    """
    scores = q @ k.mT / math.sqrt(q.shape[-1])  # (B, H, N, N)
    return _masked(scores, causal, masked).softmax(-1) @ v


def later_keys(rows: int, keys: int, device: str | torch.device) -> Tensor:
    """Returns which keys are hidden from each query, (rows, keys): the later ones; the last query sees all keys."""
    return torch.ones(rows, keys, dtype=torch.bool, device=device).triu(keys - rows + 1)


def _masked(scores: Tensor, causal: bool, masked: Tensor | None = None) -> Tensor:
    """The scores, minus infinity for later keys."""
    if causal and masked is None:
        rows, keys = scores.shape[-2:]
        masked = later_keys(rows, keys, scores.device)
    return scores if masked is None else scores.masked_fill(masked, -math.inf)


def blocked(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Tensor:
    """As ``naive``, with both matmuls in tiles of 256; the scores are still all there."""
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
    plain one, and a causal block skips the keys after its last row. Backward recomputes the scores of each block.
    """
    training = torch.is_grad_enabled() and any(x.requires_grad for x in (q, k, v))
    done = []
    for first, rows in zip(range(0, q.shape[-2], _ROWS), _split(q, _ROWS, -2), strict=True):
        seen = min(first + _ROWS, k.shape[-2]) if causal else k.shape[-2]
        inputs = (rows, k[..., :seen, :], v[..., :seen, :], causal)
        # Without the checkpoint, autograd would keep the weights of every block: all N² of them.
        done.append(checkpoint(naive, *inputs, use_reentrant=False) if training else naive(*inputs))
    return torch.cat(done, -2)


def flash(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Tensor:
    """FlashAttention-2 in Triton."""
    return triton_attention(q.shape[-1])(q, k, v, causal)


def triton_attention(d_head: int) -> Attention:
    """Returns FlashAttention-2 in Triton, which takes ``fp32_products`` besides.

    Raises:
        NotHereError: there is no Triton, or it has no kernel for this d_head.
    """
    if importlib.util.find_spec("triton") is None:
        raise NotHereError("FlashAttention on a GPU needs Triton", "pip install triton")
    from profiling_targets.flash_attention import D_HEADS, flash_attention

    if d_head not in D_HEADS:
        raise NotHereError(f"The Triton kernels take a d_head of {', '.join(map(str, D_HEADS))}, not {d_head}")
    return flash_attention


def sdpa(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Tensor:
    """PyTorch's own, by whichever of its kernels it chooses."""
    return F.scaled_dot_product_attention(q, k, v, is_causal=causal)


def sdpa_flash(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Tensor:
    """PyTorch's own, held to its FlashAttention backend."""
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        return sdpa(q, k, v, causal)


IMPLEMENTATIONS: dict[str, Attention] = {
    "naive": naive,
    "blocked": blocked,
    "fused": fused,
    "tiled": tiled_attention,
    "flash": flash,
    "torch": sdpa,
}
