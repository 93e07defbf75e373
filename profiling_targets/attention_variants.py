"""Implements attention with PyTorch's operators in several ways, and computes the error of an implementation.

All implementations compute the same result. They differ in the number of scores that are in memory at once: ``naive``
and ``blocked`` keep all S² scores, ``fused`` keeps those of a block of rows, and ``tiled`` keeps one tile. ``sdpa`` is
PyTorch's own attention. The target ``attention`` measures the implementations.

Shapes: B sequences, H heads, S tokens, d features of a head. Queries, keys, values, the output and their gradients
have the same shape, (B, H, S, d).
"""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Callable, Sequence
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
Attend = Callable[[Tensor, Tensor, Tensor], Tensor]

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
#: A tensor counts as zero if its largest value is at most this share of the largest value of all tensors. With a single
#: token, dq and dk are zero up to rounding.
_ZERO_TENSOR_SHARE = 1e-9
_TILE_LENGTH = 256
_ROWS_PER_BLOCK = 128


class Passes:
    """The forward and backward passes of one implementation of attention over fixed inputs.

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
    def random(cls, attend: Attend, shape: Sequence[int], device: str, precision: str = "fp32") -> Passes:
        """Makes passes over normally distributed inputs. The seed is fixed, so each call makes equal inputs."""
        torch.manual_seed(0)
        q, k, v, gradient = (torch.randn(*shape, device=device, dtype=DTYPES[precision]) for _ in range(4))
        return cls(attend, [tensor.requires_grad_() for tensor in (q, k, v)], gradient)

    def like(self, attend: Attend, convert: Callable[[Tensor], Tensor]) -> Passes:
        """Makes passes of another implementation over the converted inputs, for example over fp64 copies of them."""
        inputs = [convert(tensor.detach()).requires_grad_() for tensor in self.inputs]
        return Passes(attend, inputs, convert(self.gradient))

    def forward(self) -> Tensor:
        """Returns the output. If gradients are enabled, autograd records the pass for the backward pass."""
        return self.attend(*self.inputs)

    def backward(self, out: Tensor, keep: bool = False) -> tuple[Tensor, ...]:
        """Returns dq, dk and dv. With ``keep``, the saved tensors are kept, so that the backward pass can run again."""
        return torch.autograd.grad(out, self.inputs, self.gradient, retain_graph=keep)

    def end_to_end(self) -> tuple[Tensor, ...]:
        """Runs both passes, and returns the output, dq, dk and dv."""
        out = self.forward()
        return (out.detach(), *self.backward(out))


def max_error(results: Sequence[Tensor], exact: Sequence[Tensor]) -> float:
    """Returns the largest of the tensors' errors, max |result − exact| ÷ max |exact|, or NaN if an error is NaN.

    Tensors that are zero up to rounding are ignored.
    """
    sizes = [float(tensor.abs().max()) for tensor in exact]
    errors = [
        float((result.to(reference.dtype) - reference).abs().max()) / size
        for result, reference, size in zip(results, exact, sizes, strict=True)
        if not size <= _ZERO_TENSOR_SHARE * max(sizes)
    ]
    return math.nan if any(map(math.isnan, errors)) else max(errors)


def naive(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Tensor:
    """Computes attention with all scores at once: matmul, mask, softmax and matmul each read or write (B, H, S, S).

    Args:
        q, k, v: (B, H, S, d) each, as for all implementations.
        causal: whether each query ignores later keys.
    """
    return _mask_later_keys(q @ k.mT / math.sqrt(q.shape[-1]), causal).softmax(-1) @ v


def later_keys(rows: int, keys: int, device: str | torch.device) -> Tensor:
    """Returns a mask (rows, keys) of the keys that come after each query. The last query sees all keys."""
    return torch.ones(rows, keys, dtype=torch.bool, device=device).triu(keys - rows + 1)


def _mask_later_keys(scores: Tensor, causal: bool) -> Tensor:
    """Returns the scores. If ``causal``, the scores of keys that come after their query are minus infinity."""
    rows, keys = scores.shape[-2:]
    return scores.masked_fill(later_keys(rows, keys, scores.device), -math.inf) if causal else scores


def blocked(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Tensor:
    """Computes attention with all scores in memory at once, as ``naive`` does, but both matmuls in tiles of 256."""
    scores = torch.cat(
        [_compute_scores_by_tile(rows, k) for rows in _split_into_tiles(q, _TILE_LENGTH, -2)], -2
    )  # (B, H, S, S)
    weights = _mask_later_keys(scores / math.sqrt(q.shape[-1]), causal).softmax(-1)
    return torch.cat([_sum_values_by_tile(rows, v) for rows in _split_into_tiles(weights, _TILE_LENGTH, -2)], -2)


def _compute_scores_by_tile(q: Tensor, k: Tensor) -> Tensor:  # (B, H, 256, d), (B, H, S, d) -> (B, H, 256, S)
    return torch.cat([q @ keys.mT for keys in _split_into_tiles(k, _TILE_LENGTH, -2)], -1)


def _sum_values_by_tile(weights: Tensor, v: Tensor) -> Tensor:  # (B, H, 256, S), (B, H, S, d) -> (B, H, 256, d)
    pairs = zip(_split_into_tiles(weights, _TILE_LENGTH, -1), _split_into_tiles(v, _TILE_LENGTH, -2), strict=True)
    summed_values: Tensor = reduce(add, (part @ values for part, values in pairs))
    return summed_values


def _split_into_tiles(x: Tensor, size: int, dim: int) -> tuple[Tensor, ...]:
    parts: tuple[Tensor, ...] = torch.split(x, size, dim)
    return parts


def fused(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Tensor:
    """Computes attention in blocks of 128 query rows, each from scores to output before the next block starts.

    A block has many rows, because a kernel launch costs more than the work of one row. A block contains all scores of
    its rows, so the ordinary softmax works. With a causal mask, a block skips the keys after its last row. Backward
    recomputes the scores of each block.
    """
    training = torch.is_grad_enabled() and any(x.requires_grad for x in (q, k, v))
    outputs = []
    for first_row, rows in zip(
        range(0, q.shape[-2], _ROWS_PER_BLOCK), _split_into_tiles(q, _ROWS_PER_BLOCK, -2), strict=True
    ):
        visible_length = min(first_row + _ROWS_PER_BLOCK, k.shape[-2]) if causal else k.shape[-2]
        inputs = (rows, k[..., :visible_length, :], v[..., :visible_length, :], causal)
        # Without activation checkpointing, autograd would save the softmax weights of all blocks, S² numbers.
        outputs.append(checkpoint(naive, *inputs, use_reentrant=False) if training else naive(*inputs))
    return torch.cat(outputs, -2)


def triton_attention(d_head: int) -> Attention:
    """Returns the implementation of attention by the Triton kernels of FlashAttention-2.

    Raises:
        NotHereError: Triton is not installed, or the kernels do not support this d_head.
    """
    if importlib.util.find_spec("triton") is None:
        raise NotHereError("FlashAttention on a GPU needs Triton", "pip install triton")
    from profiling_targets.flash_attention import D_HEADS, flash_attention

    if d_head not in D_HEADS:
        raise NotHereError(f"The Triton kernels take a d_head of {', '.join(map(str, D_HEADS))}, not {d_head}")
    return flash_attention


def sdpa(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Tensor:
    """Computes PyTorch's scaled_dot_product_attention with the backend that PyTorch chooses."""
    return F.scaled_dot_product_attention(q, k, v, is_causal=causal)


def sdpa_flash(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Tensor:
    """Computes PyTorch's scaled_dot_product_attention with its FlashAttention backend."""
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        return sdpa(q, k, v, causal)


IMPLEMENTATIONS: dict[str, Attention] = {
    "naive": naive,
    "blocked": blocked,
    "fused": fused,
    "tiled": tiled_attention,
    "sdpa": sdpa,
    "sdpa_flash": sdpa_flash,
}
