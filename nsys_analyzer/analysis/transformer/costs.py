"""What a transformer costs, from its shapes alone: FLOPs, and the least bytes moved.

B is the batch size, S the context length, d = d_model, H the heads, L the layers, V the vocabulary. A matmul of
(m, k) and (k, n) counts 2·m·k·n FLOPs: one multiplication and one addition per term. Norms, RoPE, the activation and
the residual additions are too few to count. The same matmul reads both operands once and writes its result once:
m·k + k·n + m·n elements; a backward pass moves twice as much: of each matmul the gradients of both operands are matmuls
of the same three matrices.
"""

from __future__ import annotations

from nsys_analyzer.analysis.transformer.models import ModelSize

SOFTMAX_FLOPS_PER_SCORE = 5
"""The convention for softmax: max, subtract, exp, sum, divide, each one operation per score."""

#: Bytes of an element that a matmul of this precision reads and writes.
ELEMENT_BYTES = {"fp32": 4, "tf32": 4, "bf16": 2, "fp16": 2}


def attention_matmul_flops(model: ModelSize, batch_size: int, context_length: int) -> int:
    """Counts the FLOPs of Q·Kᵀ and of the weights times V in one forward: 4·B·S²·d·L, two matmuls of 2·B·S²·d a layer.

    The whole S × S square is counted: unfused attention computes it and masks afterwards.
    """
    return 4 * batch_size * context_length**2 * model.d_model * model.num_layers


def forward_flops(model: ModelSize, batch_size: int, context_length: int) -> int:
    """Counts the FLOPs of one forward pass; a backward pass has twice as many, a matmul for each operand's gradient.

    Those of the matmuls: four projections (B·S, d) × (d, d) and SwiGLU's three with d_ff a layer, the head with the
    vocabulary, two FLOPs for each token and weight; and those of attention.
    """
    d = model.d_model
    weights = (4 * d * d + 3 * d * model.d_ff) * model.num_layers + d * model.vocab_size
    return 2 * batch_size * context_length * weights + attention_matmul_flops(model, batch_size, context_length)


def softmax_flops(model: ModelSize, batch_size: int, context_length: int) -> int:
    """Counts the FLOPs of the attention's softmax in one forward: 5·B·H·S²·L, by ``SOFTMAX_FLOPS_PER_SCORE``."""
    scores = batch_size * model.num_heads * context_length**2 * model.num_layers
    return SOFTMAX_FLOPS_PER_SCORE * scores


def attention_to_softmax_flop_ratio(model: ModelSize) -> float:
    """Divides attention matmuls by softmax in FLOPs: 4·d_head ÷ 5, whatever B and S. Their times have another ratio."""
    return 4 * model.d_head / SOFTMAX_FLOPS_PER_SCORE


def attention_matmul_elements(model: ModelSize, batch_size: int, context_length: int) -> int:
    """Counts the elements of Q·Kᵀ and of the weights times V, as matmuls of their own: 2·(2·B·S·d + B·H·S²)·L."""
    vectors = 2 * batch_size * context_length * model.d_model
    scores = batch_size * model.num_heads * context_length**2
    return 2 * (vectors + scores) * model.num_layers


def fused_attention_elements(model: ModelSize, batch_size: int, context_length: int) -> int:
    """Counts the elements of attention as one kernel, which reads Q, K and V and writes the result: 4·B·S·d·L.

    Backward it reads these four and the result's gradient, and writes three gradients: twice as many.
    """
    return 4 * batch_size * context_length * model.d_model * model.num_layers


def read_weights_bytes(model: ModelSize, element: int) -> int:
    """Counts the bytes of the weights that every pass reads: all but the embedding, of which a token reads a row."""
    return (model.parameters - model.vocab_size * model.d_model) * element


def cached_bytes(model: ModelSize, positions: float, element: int) -> float:
    """Counts the bytes of keys and values of positions in the cache: 2·L·d elements each, as many heads as queries."""
    return 2 * model.num_layers * model.d_model * element * positions


def linear_elements(model: ModelSize, batch_size: int, context_length: int) -> int:
    """Counts the elements of every matmul with a weight.

    Those are four projections and three matmuls of the feed-forward a layer, and the head.
    """
    tokens, d = batch_size * context_length, model.d_model
    projections = 4 * (2 * tokens * d + d * d)
    feed_forward = 3 * (tokens * d + d * model.d_ff + tokens * model.d_ff)
    head = tokens * d + d * model.vocab_size + tokens * model.vocab_size
    return (projections + feed_forward) * model.num_layers + head
