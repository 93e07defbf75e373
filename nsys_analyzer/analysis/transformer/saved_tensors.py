"""The tensors that one layer of the transformer saves for backward (activations), from the shapes alone.

B is the batch size, S the context length, d = d_model, H the heads. Counted is what autograd saves of a pre-norm
layer with naive (unfused) attention: the operands of matmuls, the operand or the result of each other operation as its
derivative needs it. Parameters are not counted, nor what lives in every layer alike (mask, RoPE's tables).
"""

from __future__ import annotations

from dataclasses import dataclass

from nsys_analyzer.analysis.transformer.models import ModelSize

_FP32, _HALF = 4, 2


@dataclass(frozen=True)
class Saved:
    """A tensor, or several alike: what it is, its shape in words, and bytes in one layer."""

    name: str
    shape: str
    bytes: int


def residual_bytes(model: ModelSize, batch_size: int, context_length: int) -> int:
    """The residual stream, (B, S, d) in fp32: autocast leaves embedding and additions in fp32."""
    return batch_size * context_length * model.d_model * _FP32


def saved_by_layer(
    model: ModelSize, batch_size: int, context_length: int, precision: str, on_gpu: bool = True
) -> tuple[Saved, ...]:
    """The tensors that one layer saves in forward for backward, in ``fp32``, ``tf32`` (as fp32) or ``bf16``.

    Under autocast (bf16) the matmuls' operands are saved in bf16: each projection saves its own cast of the normed
    input, and a cast of its weight. On a GPU autocast computes ``exp`` in fp32, on the CPU in bf16.
    """
    tokens = batch_size * context_length
    d, d_ff, scores = tokens * model.d_model, tokens * model.d_ff, tokens * model.num_heads * context_length
    row_of_scores = tokens * model.num_heads
    half = precision == "bf16"
    wide = _HALF if half else _FP32
    exp = _HALF if half and not on_gpu else _FP32
    # Autocast casts the norm's output for each of q, k, v, w1 and w3 anew.
    weights = 4 * model.d_model**2 + 3 * model.d_model * model.d_ff
    cast_inputs = (
        Saved("output of each norm, cast for q, k, v and for w1, w3", "5 × (B, S, d)", 5 * d * _HALF),
        Saved("weights, cast", "4 × (d, d), 3 × (d, d_ff)", weights * _HALF),
    )
    return (
        Saved("residual stream after attention and after feed-forward", "2 × (B, S, d)", 2 * d * _FP32),
        Saved("input of each norm ÷ its RMS", "2 × (B, S, d)", 2 * d * _FP32),
        Saved("1 ÷ RMS of each norm", "2 × (B, S, 1)", 2 * tokens * _FP32),
        *(cast_inputs if half else (Saved("output of each norm", "2 × (B, S, d)", 2 * d * _FP32),)),
        Saved("rotated q and k, and v", "3 × (B, S, d)", 3 * d * wide),
        Saved("masked scores", "(B, H, S, S)", scores * wide),
        Saved("maximum of each row of scores", "(B, H, S, 1)", row_of_scores * wide),
        Saved("exponentials", "(B, H, S, S)", scores * exp),
        Saved("sum of each row of exponentials", "(B, H, S, 1)", row_of_scores * exp),
        Saved("attention weights", "(B, H, S, S)", scores * wide),
        Saved("attended values", "(B, S, d)", d * wide),
        Saved("w1 x, its SiLU, w3 x, and their product", "4 × (B, S, d_ff)", 4 * d_ff * wide),
    )
