"""Floating-point operations of one pass of the transformer, from its shapes alone.

B is the batch size, S the context length, d = d_model, H the heads, L the layers, V the vocabulary. A matmul of
(m, k) and (k, n) counts 2·m·k·n: one multiplication and one addition per term. Norms, RoPE, the activation and
the residual additions are too few to count.
"""

from __future__ import annotations

from nsys_analyzer.analysis.transformer.models import ModelSize

SOFTMAX_FLOPS_PER_SCORE = 5
"""The convention for softmax: max, subtract, exp, sum, divide, each one operation per score."""


def projection_flops(model: ModelSize, batch_size: int, context_length: int) -> int:
    """FLOPs of the Q, K, V and output projections in one forward: 8·B·S·d²·L, four (B·S, d) × (d, d) a layer."""
    return 8 * batch_size * context_length * model.d_model**2 * model.num_layers


def attention_matmul_flops(model: ModelSize, batch_size: int, context_length: int) -> int:
    """FLOPs of Q·Kᵀ and of the weights times V in one forward: 4·B·S²·d·L, two matmuls of 2·B·S²·d a layer.

    The whole S × S square is counted: unfused attention computes it and masks afterwards.
    """
    return 4 * batch_size * context_length**2 * model.d_model * model.num_layers


def feed_forward_flops(model: ModelSize, batch_size: int, context_length: int) -> int:
    """FLOPs of SwiGLU's three matmuls in one forward: 6·B·S·d·d_ff·L."""
    return 6 * batch_size * context_length * model.d_model * model.d_ff * model.num_layers


def head_flops(model: ModelSize, batch_size: int, context_length: int) -> int:
    """FLOPs of the head, the matmul with the vocabulary, in one forward: 2·B·S·d·V."""
    return 2 * batch_size * context_length * model.d_model * model.vocab_size


def forward_flops(model: ModelSize, batch_size: int, context_length: int) -> int:
    """FLOPs of one forward pass: projections, attention matmuls, feed-forward and head."""
    parts = (projection_flops, attention_matmul_flops, feed_forward_flops, head_flops)
    return sum(part(model, batch_size, context_length) for part in parts)


def backward_flops(model: ModelSize, batch_size: int, context_length: int) -> int:
    """FLOPs of one backward pass: twice the forward's, a matmul for each of its two operands' gradients."""
    return 2 * forward_flops(model, batch_size, context_length)


def softmax_flops(model: ModelSize, batch_size: int, context_length: int) -> int:
    """FLOPs of the attention's softmax in one forward: 5·B·H·S²·L, by ``SOFTMAX_FLOPS_PER_SCORE``."""
    scores = batch_size * model.num_heads * context_length**2 * model.num_layers
    return SOFTMAX_FLOPS_PER_SCORE * scores


def attention_to_softmax_flop_ratio(model: ModelSize) -> float:
    """Attention matmuls ÷ softmax in FLOPs: 4·d_head ÷ 5, whatever B and S. Their times have another ratio."""
    return 4 * model.d_head / SOFTMAX_FLOPS_PER_SCORE
