"""The tensors that one layer of the transformer saves for backward (activations), from the shapes alone.

B is the batch size, S the context length, d = d_model, H the heads. Counted is what autograd saves of a pre-norm
layer with naive (unfused) attention: the operands of matmuls, the operand or the result of each other operation as its
derivative needs it. Parameters are not counted, nor what lives in every layer alike (mask, RoPE's tables).
"""

from __future__ import annotations

from nsys_analyzer.analysis.transformer.models import ModelSize

_FP32, _HALF = 4, 2


def residual_bytes(model: ModelSize, batch_size: int, context_length: int) -> int:
    """The residual stream, (B, S, d) in fp32: autocast leaves embedding and additions in fp32."""
    return batch_size * context_length * model.d_model * _FP32


def layer_saved_bytes(
    model: ModelSize, batch_size: int, context_length: int, precision: str, on_gpu: bool = True
) -> int:
    """Bytes that one layer saves in forward for backward, in ``fp32``, ``tf32`` (as fp32) or ``bf16``.

    Under autocast (bf16) the matmuls' operands are saved in bf16: each projection saves its own cast of the normed
    input, and a cast of its weight. On a GPU autocast computes ``exp`` in fp32, on the CPU in bf16.
    """
    tokens = batch_size * context_length
    d, d_ff, scores = tokens * model.d_model, tokens * model.d_ff, tokens * model.num_heads * context_length
    row_of_scores = tokens * model.num_heads
    half = precision == "bf16"
    wide = _HALF if half else _FP32
    exp = _HALF if half and not on_gpu else _FP32
    weights = 4 * model.d_model**2 + 3 * model.d_model * model.d_ff
    # Autocast casts the norm's output for each of q, k, v, w1 and w3 anew, and the weights.
    inputs = (5 * d + weights) * _HALF if half else 2 * d * _FP32
    sizes = (
        2 * d * _FP32,  # residual stream after attention and after feed-forward
        2 * d * _FP32,  # input of each norm ÷ its RMS
        2 * tokens * _FP32,  # 1 ÷ RMS of each norm
        inputs,  # output of each norm
        3 * d * wide,  # rotated q and k, and v
        scores * wide,  # masked scores
        row_of_scores * wide,  # maximum of each row
        (scores + row_of_scores) * exp,  # exponentials, and the sum of each row
        scores * wide,  # attention weights
        d * wide,  # attended values
        4 * d_ff * wide,  # w1 x, its SiLU, w3 x, and their product
    )
    return sum(sizes)
