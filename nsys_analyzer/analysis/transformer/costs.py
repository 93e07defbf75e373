"""Computes the costs of a transformer from its shapes alone: FLOPs, and the minimum of bytes moved.

B is the batch size, S the context length, d = d_model, H the number of heads, L the number of layers, V the vocabulary
size.

A matmul of (m, k) and (k, n) has 2·m·k·n FLOPs: one multiplication and one addition per term. The FLOPs of norms, RoPE,
the activation and the residual additions are negligible. A matmul reads both operands once and writes its result once:
m·k + k·n + m·n elements. A backward pass has twice the FLOPs and moves twice as much, since the gradients of the two
operands of a matmul are two matmuls of the same three matrices.
"""

from __future__ import annotations

from nsys_analyzer.analysis.transformer.models import ModelSize

SOFTMAX_FLOPS_PER_SCORE = 5
"""By convention a softmax counts five operations per score: max, subtract, exp, sum and divide."""

#: Bytes per element that a matmul of each precision reads and writes.
ELEMENT_BYTES = {"fp32": 4, "tf32": 4, "bf16": 2, "fp16": 2}


def attention_matmul_flops(model: ModelSize, batch_size: int, context_length: int) -> int:
    """Counts the FLOPs of Q·Kᵀ and of the attention weights times V in one forward pass: 4·B·S²·d·L.

    Each layer has two such matmuls of 2·B·S²·d FLOPs. The whole S × S square counts, since unfused attention computes
    it and masks it afterwards.
    """
    return 4 * batch_size * context_length**2 * model.d_model * model.num_layers


def forward_flops(model: ModelSize, batch_size: int, context_length: int) -> int:
    """Counts the FLOPs of one forward pass: two for each token and weight, and those of attention.

    The weights are four projections (d, d) and SwiGLU's three matrices (d, d_ff) per layer, and the head (d, V).
    """
    d = model.d_model
    weights = (4 * d * d + 3 * d * model.d_ff) * model.num_layers + d * model.vocab_size
    return 2 * batch_size * context_length * weights + attention_matmul_flops(model, batch_size, context_length)


def softmax_flops(model: ModelSize, batch_size: int, context_length: int) -> int:
    """Counts the FLOPs of attention's softmax in one forward pass: 5·B·H·S²·L, by ``SOFTMAX_FLOPS_PER_SCORE``."""
    scores = batch_size * model.num_heads * context_length**2 * model.num_layers
    return SOFTMAX_FLOPS_PER_SCORE * scores


def attention_to_softmax_flop_ratio(model: ModelSize) -> float:
    """Returns the FLOPs of the attention matmuls divided by those of softmax: 4·d_head ÷ 5 for any B and S.

    The ratio of their times differs from it.
    """
    return 4 * model.d_head / SOFTMAX_FLOPS_PER_SCORE


def attention_matmul_elements(model: ModelSize, batch_size: int, context_length: int) -> int:
    """Counts the elements that the two attention matmuls move as separate kernels: 2·(2·B·S·d + B·H·S²)·L."""
    vectors = 2 * batch_size * context_length * model.d_model
    scores = batch_size * model.num_heads * context_length**2
    return 2 * (vectors + scores) * model.num_layers


def fused_attention_elements(model: ModelSize, batch_size: int, context_length: int) -> int:
    """Counts the elements that attention moves as one kernel, which reads Q, K and V and writes the result: 4·B·S·d·L.

    In the backward pass it reads these four and the gradient of the result, and writes three gradients: twice as many.
    """
    return 4 * batch_size * context_length * model.d_model * model.num_layers


def read_weights_bytes(model: ModelSize, element: int) -> int:
    """Counts the bytes of the weights that every pass reads: all weights except the embedding.

    A token reads only one row of the embedding.

    Args:
        element: bytes per element.
    """
    return (model.parameters - model.vocab_size * model.d_model) * element


def cached_bytes(model: ModelSize, positions: float, element: int) -> float:
    """Counts the bytes of the keys and values of ``positions`` in the cache: 2·L·d elements for each position.

    Keys and values have as many heads as queries.

    Args:
        element: bytes per element.
    """
    return 2 * model.num_layers * model.d_model * element * positions


def linear_elements(model: ModelSize, batch_size: int, context_length: int) -> int:
    """Counts the elements that all matmuls with a weight move in one forward pass.

    These are four projections and three feed-forward matmuls per layer, and the head.
    """
    tokens, d = batch_size * context_length, model.d_model
    projections = 4 * (2 * tokens * d + d * d)
    feed_forward = 3 * (tokens * d + d * model.d_ff + tokens * model.d_ff)
    head = tokens * d + d * model.vocab_size + tokens * model.vocab_size
    return (projections + feed_forward) * model.num_layers + head
