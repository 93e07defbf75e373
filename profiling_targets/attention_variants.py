"""Implements attention with PyTorch's operators in several ways, and measures the error of each.

All implementations have the same result and differ in memory. The four implementations from ``naive`` to ``tiled`` hold
fewer and fewer scores at once, from all S² scores down to one tile. ``sdpa`` is PyTorch's own attention. The target
``attention`` measures them.

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
#: A tensor counts as zero if its largest value is below this share of the largest value of all tensors. With a single
#: token dq and dk are zero up to rounding.
_ZERO_SHARE = 1e-9
_TILE = 256
_ROWS = 128


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
        """Makes passes over normally distributed inputs, which are the same in each call."""
        torch.manual_seed(0)
        q, k, v, gradient = (torch.randn(*shape, device=device, dtype=DTYPES[precision]) for _ in range(4))
        return cls(attend, [tensor.requires_grad_() for tensor in (q, k, v)], gradient)

    def like(self, attend: Attend, convert: Callable[[Tensor], Tensor]) -> Passes:
        """Makes passes of another implementation over converted inputs, such as inputs in another precision."""
        inputs = [convert(tensor.detach()).requires_grad_() for tensor in self.inputs]
        return Passes(attend, inputs, convert(self.gradient))

    def forward(self) -> Tensor:
        """Returns the output, which autograd records for the backward pass."""
        return self.attend(*self.inputs)

    def backward(self, out: Tensor, keep: bool = False) -> tuple[Tensor, ...]:
        """Returns dq, dk and dv. With ``keep``, the saved tensors remain, so that backward can run again."""
        return torch.autograd.grad(out, self.inputs, self.gradient, retain_graph=keep)

    def end_to_end(self) -> tuple[Tensor, ...]:
        """Runs both passes, and returns the output, dq, dk and dv."""
        out = self.forward()
        return (out.detach(), *self.backward(out))


def max_error(results: Sequence[Tensor], exact: Sequence[Tensor]) -> float:
    """Returns max |result − exact| ÷ max |exact| of the worst tensor, or NaN if any tensor holds a NaN.

    Tensors that are zero up to rounding are left out.
    """
    sizes = [float(tensor.abs().max()) for tensor in exact]
    errors = [
        float((result.to(reference.dtype) - reference).abs().max()) / size
        for result, reference, size in zip(results, exact, sizes, strict=True)
        if not size <= _ZERO_SHARE * max(sizes)
    ]
    return math.nan if any(map(math.isnan, errors)) else max(errors)


def naive(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Tensor:
    """Computes all scores at once: matmul, mask, softmax, matmul, each a pass over (B, H, S, S).

    Args:
        q, k, v: (B, H, S, d) each, as for all implementations.
        causal: whether each query ignores later keys.
    """
    return _masked(q @ k.mT / math.sqrt(q.shape[-1]), causal).softmax(-1) @ v


def later_keys(rows: int, keys: int, device: str | torch.device) -> Tensor:
    """Returns which keys are hidden from each query, (rows, keys): the later ones; the last query sees all keys."""
    return torch.ones(rows, keys, dtype=torch.bool, device=device).triu(keys - rows + 1)


def _masked(scores: Tensor, causal: bool) -> Tensor:
    """Returns the scores, minus infinity for later keys."""
    rows, keys = scores.shape[-2:]
    return scores.masked_fill(later_keys(rows, keys, scores.device), -math.inf) if causal else scores


def blocked(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Tensor:
    """Computes attention like ``naive`` with all scores in memory at once, but both matmuls in tiles of 256."""
    scores = torch.cat([_scores_by_tile(rows, k) for rows in _split(q, _TILE, -2)], -2)  # (B, H, S, S)
    weights = _masked(scores / math.sqrt(q.shape[-1]), causal).softmax(-1)
    return torch.cat([_values_by_tile(rows, v) for rows in _split(weights, _TILE, -2)], -2)


def _scores_by_tile(q: Tensor, k: Tensor) -> Tensor:  # (B, H, 256, d), (B, H, S, d) -> (B, H, 256, S)
    return torch.cat([q @ keys.mT for keys in _split(k, _TILE, -2)], -1)


def _values_by_tile(weights: Tensor, v: Tensor) -> Tensor:  # (B, H, 256, S), (B, H, S, d) -> (B, H, 256, d)
    pairs = zip(_split(weights, _TILE, -1), _split(v, _TILE, -2), strict=True)
    summed: Tensor = reduce(add, (part @ values for part, values in pairs))
    return summed


def _split(x: Tensor, size: int, dim: int) -> tuple[Tensor, ...]:
    parts: tuple[Tensor, ...] = torch.split(x, size, dim)
    return parts


def fused(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Tensor:
    """Computes blocks of 128 query rows, each from its scores to its output before the next block starts.

    A block has many rows because a launch costs more than the work of one row. The rows are complete, so the ordinary
    softmax works. A causal block skips the keys after its last row. Backward recomputes the scores of each block.
    """
    training = torch.is_grad_enabled() and any(x.requires_grad for x in (q, k, v))
    outputs = []
    for first, rows in zip(range(0, q.shape[-2], _ROWS), _split(q, _ROWS, -2), strict=True):
        visible = min(first + _ROWS, k.shape[-2]) if causal else k.shape[-2]
        inputs = (rows, k[..., :visible, :], v[..., :visible, :], causal)
        # Without the checkpoint, autograd would save the S² softmax weights of all blocks.
        outputs.append(checkpoint(naive, *inputs, use_reentrant=False) if training else naive(*inputs))
    return torch.cat(outputs, -2)


def triton_attention(d_head: int) -> Attention:
    """Returns the implementation of FlashAttention-2 in Triton.

    Raises:
        NotHereError: Triton is not installed, or there is no kernel for this d_head.
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
