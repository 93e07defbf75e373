"""The least bytes that one forward pass of the transformer moves, from its shapes and the size of an element.

Each matmul of (m, k) and (k, n) reads both operands once and writes its result once: m·k + k·n + m·n elements. B, S, d,
H, L and V are those of ``flops``. A backward pass moves twice as much: of each matmul the gradients of both operands
are matmuls of the same three matrices.
"""

from __future__ import annotations

from nsys_analyzer.analysis.transformer.models import ModelSize

#: Bytes of an element that a matmul of this precision reads and writes.
ELEMENT_BYTES = {"fp32": 4, "tf32": 4, "bf16": 2, "fp16": 2}


def attention_matmul_elements(model: ModelSize, batch_size: int, context_length: int) -> int:
    """Elements of Q·Kᵀ and of the weights times V, as matmuls of their own: 2·(2·B·S·d + B·H·S²)·L."""
    vectors = 2 * batch_size * context_length * model.d_model
    scores = batch_size * model.num_heads * context_length**2
    return 2 * (vectors + scores) * model.num_layers


def fused_attention_elements(model: ModelSize, batch_size: int, context_length: int) -> int:
    """Elements of attention as one kernel, which reads Q, K and V and writes the result: 4·B·S·d·L.

    Backward it reads these four and the result's gradient, and writes three gradients: twice as many.
    """
    return 4 * batch_size * context_length * model.d_model * model.num_layers


def linear_elements(model: ModelSize, batch_size: int, context_length: int) -> int:
    """Elements of every matmul with a weight: four projections and three of the feed-forward a layer, and the head."""
    tokens, d = batch_size * context_length, model.d_model
    projections = 4 * (2 * tokens * d + d * d)
    feed_forward = 3 * (tokens * d + d * model.d_ff + tokens * model.d_ff)
    head = tokens * d + d * model.vocab_size + tokens * model.vocab_size
    return (projections + feed_forward) * model.num_layers + head
