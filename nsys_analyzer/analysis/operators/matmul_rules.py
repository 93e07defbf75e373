"""Defines the rules for operators that multiply: matmuls, convolutions and attention.

Their FLOPs are those of ``torch.utils.flop_counter``: 2 for each multiplication with its addition. There is one
difference: causal attention counts the scores on one side of the diagonal, because its kernels skip the other side.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from itertools import pairwise
from typing import NamedTuple

from nsys_analyzer.analysis.operators.operands import (
    Call,
    Rule,
    bytes_of,
    count_elements,
    nothing,
    outputs_or,
    size_of,
)
from nsys_analyzer.trace.operator_calls import Signature, Tensor
from nsys_analyzer.trace.operator_shapes import LINEAR_LAYER


def find_matmul_rule(signature: Signature) -> Rule | None:
    """Returns the rule of an operator that multiplies, or None for other operators."""
    if signature.name.startswith("triton::triton_tem_"):
        return _make_template_rule(signature.name)
    return MATMUL_RULES.get(signature.name)


def count_scores(call: Call) -> float:
    """Returns the number of scores that an attention operator computes.

    Raises:
        LookupError: the operator is no attention, or its inputs do not determine the number.
    """
    return _ATTENTION[call.signature.name].count_scores(call)


# --- matmuls


def _count_matmul_outputs(left: Tensor, right: Tensor) -> int:
    """Returns the number of elements that ``torch.matmul`` returns."""
    rows = left.shape[-2] if len(left.shape) > 1 else 1
    columns = right.shape[-1] if len(right.shape) > 1 else 1
    longest = max(len(left.shape), len(right.shape), 2)
    batches = [(1,) * (longest - len(tensor.shape)) + tensor.shape[:-2] for tensor in (left, right)]
    return int(math.prod(map(max, *batches))) * rows * columns


def _count_linear_outputs(inputs: Tensor, weight: Tensor) -> int:
    """Returns the number of elements that ``torch.nn.functional.linear`` returns."""
    return count_elements(inputs) // inputs.shape[-1] * math.prod(weight.shape[:-1])


def _count_grouped_outputs(left: Tensor, right: Tensor) -> int:
    """Returns the number of output elements of a grouped matmul, which a mixture of experts has.

    Each row of a left operand with two dimensions belongs to one group, and each column of a right one. If both have
    two dimensions, the groups share the inner dimension, so that one matmul does the arithmetic of all groups.
    """
    groups = left.shape[0] if len(left.shape) == len(right.shape) == 3 else 1
    return groups * left.shape[-2] * right.shape[-1]


def _count_int4_outputs(inputs: Tensor, weight: Tensor) -> int:
    """Returns the number of output elements for weights in tiles of 8 rows of ``_convert_weight_to_int4pack``."""
    return inputs.shape[0] * weight.shape[0] * 8


def _matmul(left: int, last: int, count_outputs: Callable[[Tensor, Tensor], int] = _count_matmul_outputs) -> Rule:
    """Makes the rule of a matmul.

    Args:
        left: the position of the left operand, whose last dimension is the inner dimension. The right operand follows.
        last: the position of the last tensor that is read. The output of an overload follows.
        count_outputs: returns the number of elements of the output.
    """

    def count_flops(call: Call) -> float:
        """Returns 2 FLOPs for each element of the output and of the inner dimension."""
        operand = call.tensor(left)
        values_per_element = 2 if operand.dtype.startswith("float4") else 1  # a byte contains two values
        return 2 * count_outputs(operand, call.tensor(left + 1)) * operand.shape[-1] * values_per_element

    def count_written(call: Call) -> float:
        """Returns the bytes of the output."""
        operand = call.tensor(left)
        return count_outputs(operand, call.tensor(left + 1)) * call.element_bytes(operand)

    return Rule("matmul", bytes_of(*range(last + 1)), outputs_or(count_written), count_flops)


_MATMULS = {
    **dict.fromkeys(("mm", "bmm", "mv", "dot", "vdot", "matmul", "_int_mm"), _matmul(0, 1)),
    **dict.fromkeys(("addmm", "addmm_", "_addmm_activation", "addmv", "baddbmm", "baddbmm_", "addbmm"), _matmul(1, 2)),
    "linear": _matmul(0, 2, _count_linear_outputs),
    "_scaled_mm": _matmul(0, 4),
    "_scaled_mm_v2": _matmul(0, 8),
    "_grouped_mm": _matmul(0, 3, _count_grouped_outputs),
    "_scaled_grouped_mm": _matmul(0, 5, _count_grouped_outputs),
    "_weight_int8pack_mm": _matmul(0, 2, _count_linear_outputs),
    "_weight_int4pack_mm": _matmul(0, 3, _count_int4_outputs),
}


# --- convolutions


def _is_transposed(call: Call) -> bool:
    name = call.signature.name
    return "transpose" in name or (name in ("aten::convolution", "aten::_convolution") and bool(call.value(6)))


def _find_output_shape(call: Call) -> tuple[int, ...]:
    """Returns the shape of the output of a convolution. Padding and stride are at different positions."""
    if call.outputs:
        return call.outputs[0].shape
    inputs, weight = call.tensor(0), call.tensor(1)
    positions = _CONVOLUTIONS[call.signature.name.removeprefix("aten::")]
    strides, paddings, dilations = (call.value(position) for position in positions)
    sizes = zip(inputs.shape[2:], weight.shape[2:], strides, paddings, dilations, strict=True)
    if _is_transposed(call):  # the usual padding gives as many outputs
        return (inputs.shape[0], weight.shape[1], *(size * stride for size, _, stride, _, _ in sizes))
    spatial = ((size + 2 * pad - step * (kernel - 1) - 1) // stride + 1 for size, kernel, stride, pad, step in sizes)
    return (inputs.shape[0], weight.shape[0], *spatial)


def _count_convolution_flops(weight: Tensor, multiplied: tuple[int, ...]) -> float:
    """Returns the FLOPs of a convolution.

    Args:
        weight: the weight. Its first dimension counts the channels of the multiplied tensor.
        multiplied: the shape of the tensor of which each element meets all weights of its channel: the output, or the
            input of a transposed convolution.
    """
    return 2.0 * math.prod(multiplied) * math.prod(weight.shape[1:])


def _count_used_bytes(call: Call, inputs: Tensor, weight: Tensor, outputs: tuple[int, ...]) -> float:
    """Returns the bytes of the input that a convolution reads. A stride larger than the kernel leaves elements out."""
    dimensions = len(weight.shape) - 2
    sizes = zip(inputs.shape[-dimensions:], outputs[-dimensions:], weight.shape[2:], strict=True)
    used = math.prod(min(size, output * kernel) for size, output, kernel in sizes)
    return math.prod(inputs.shape[:-dimensions]) * used * call.element_bytes(inputs)


def _make_convolution() -> Rule:
    """Makes the rule of a convolution of ``(input, weight, …)`` with a bias at any position."""

    def count_flops(call: Call) -> float:
        """Returns the FLOPs of the convolution, without its bias."""
        multiplied = call.tensor(0).shape if _is_transposed(call) else _find_output_shape(call)
        return _count_convolution_flops(call.tensor(1), multiplied)

    def count_read(call: Call) -> float:
        """Returns the bytes of the weights and of the part of the input that the output depends on."""
        used_bytes = _count_used_bytes(call, call.tensor(0), call.tensor(1), _find_output_shape(call))
        return used_bytes + call.count_bytes(call.tensors()[1:])

    def count_written(call: Call) -> float:
        """Returns the bytes of the output."""
        return math.prod(_find_output_shape(call)) * call.element_bytes(call.tensor(0))

    return Rule("convolution", count_read, outputs_or(count_written), count_flops)


def _make_convolution_backward() -> Rule:
    """Makes the rule of ``convolution_backward(grad_output, input, weight, …, transposed, …, output_mask)``.

    The mask selects the computed gradients: of the input, of the weight and of the bias.
    """

    def count_flops(call: Call) -> float:
        """Returns the FLOPs of the gradients of input and weight. Each has as many FLOPs as the convolution."""
        multiplied = call.tensor(1 if call.value(7) else 0).shape
        for_input, for_weight, _ = call.value(10)
        return (int(for_input) + int(for_weight)) * _count_convolution_flops(call.tensor(2), multiplied)

    def count_read(call: Call) -> float:
        """Returns the bytes of the gradient, the weights and the used part of the input."""
        gradient, inputs, weight = (call.tensor(position) for position in range(3))
        return call.count_bytes([gradient, weight]) + _count_used_bytes(call, inputs, weight, gradient.shape)

    def count_written(call: Call) -> float:
        """Returns the bytes of the computed gradients, which are as large as the input and the weights."""
        return call.count_bytes([call.tensor(position) for position in (1, 2) if call.value(10)[position - 1]])

    return Rule("convolution", count_read, outputs_or(count_written), count_flops)


#: The positions of stride, padding and dilation among the arguments of each convolution.
_CONVOLUTIONS = {
    **dict.fromkeys(("convolution", "_convolution", "conv1d", "conv2d", "conv3d", "cudnn_convolution_relu"), (3, 4, 5)),
    **dict.fromkeys(("conv_transpose1d", "conv_transpose2d", "conv_transpose3d"), (3, 4, 7)),
    "cudnn_convolution_add_relu": (5, 6, 7),
    "cudnn_convolution": (3, 2, 4),
    "cudnn_convolution_transpose": (4, 2, 5),
    "_conv_depthwise2d": (4, 5, 6),
}


# --- attention


class _Attention(NamedTuple):
    """The positions of the arguments of an attention operator.

    Attributes:
        query: the position of the query. The key and the value follow.
        causal: the position of the argument that says whether a query sees only earlier keys, as a boolean or as a
            type of mask: 0 is none, 1 starts at the first query and key, and 2 ends at the last query and key.
        tokens: the dimension of the tokens; the heads are the other one of the dimensions 1 and 2 of four.
        offsets: the position of the offsets of sequences that are packed one after the other, or None.
        ends_at_last: whether the last query sees all keys if there are fewer queries than keys.
        window: the position of the number of earlier keys that a query sees; -1 is all. That of later keys follows.
        pages: the position of the table of pages, or None. It does not show how many pages are in use.
    """

    query: int
    causal: int
    tokens: int = 2
    offsets: int | None = None
    ends_at_last: bool = False
    window: int | None = None
    pages: int | None = None

    def count_scores(self, call: Call) -> float:
        """Returns the number of pairs of a query and a key, over all heads and sequences."""
        query, key = call.tensor(self.query), call.tensor(self.query + 1)
        if self.pages is not None and call.tensors(self.pages):
            raise call.unknown("number of pages")
        query_shape, key_shape = ((1,) * (4 - len(shape)) + shape for shape in (query.shape, key.shape))
        batch, heads = query_shape[0], query_shape[3 - self.tokens]
        queries, keys = float(query_shape[self.tokens]), float(key_shape[self.tokens])
        if self.offsets is not None and (offsets := call.tensors(self.offsets)):
            sequences = offsets[0].shape[0] - 1  # sequences of equal length have the fewest pairs
            batch, queries, keys = batch * sequences, queries / sequences, keys / sequences
        pairs = queries * keys
        if causal := int(call.value(self.causal, 0)):
            triangle = min(queries, keys) ** 2 / 2
            has_only_triangle = (keys >= queries) != (self.ends_at_last or causal == 2)
            pairs = triangle if has_only_triangle else pairs - triangle
        if self.window is not None:
            earlier, later = int(call.value(self.window, -1)), 0 if causal else int(call.value(self.window + 1, -1))
            pairs = min(pairs, queries * (earlier + 1 + later)) if min(earlier, later) >= 0 else pairs
        return batch * heads * pairs


def _attention(positions: _Attention, *, is_backward: bool) -> Rule:
    """Makes the rule of an attention operator. The gradients that flash_attn takes as arguments count as read.

    The forward pass multiplies queries with keys, and scores with values. The backward pass computes the scores again,
    and the gradients of the values, the scores, the queries and the keys.
    """
    key_matmuls, value_matmuls = (3, 2) if is_backward else (1, 1)

    def count_flops(call: Call) -> float:
        """Returns the FLOPs of all matmuls on the scores."""
        key, value = call.tensor(positions.query + 1), call.tensor(positions.query + 2)
        width = key_matmuls * key.shape[-1] + value_matmuls * value.shape[-1]
        return 2 * width * positions.count_scores(call)

    outputs = size_of(*range(positions.query, positions.query + (3 if is_backward else 1)))
    return Rule("attention", bytes_of(), outputs_or(outputs), count_flops)


_ATTENTION = {
    "aten::scaled_dot_product_attention": _Attention(0, 5),
    "aten::_scaled_dot_product_flash_attention": _Attention(0, 4),
    "aten::_scaled_dot_product_flash_attention_backward": _Attention(1, 11),
    "aten::_scaled_dot_product_flash_attention_for_cpu": _Attention(0, 4),
    "aten::_scaled_dot_product_flash_attention_for_cpu_backward": _Attention(1, 7),
    "aten::_scaled_dot_product_efficient_attention": _Attention(0, 6),
    "aten::_scaled_dot_product_efficient_attention_backward": _Attention(1, 11),
    "aten::_scaled_dot_product_cudnn_attention": _Attention(0, 6),
    "aten::_scaled_dot_product_cudnn_attention_backward": _Attention(1, 14),
    "aten::_flash_attention_forward": _Attention(0, 8, tokens=1, offsets=3, window=11, pages=15),
    "aten::_flash_attention_backward": _Attention(1, 11, tokens=1, offsets=6, window=15),
    "aten::_efficient_attention_forward": _Attention(0, 9, tokens=1, offsets=4),
    "aten::_efficient_attention_backward": _Attention(1, 14, tokens=1, offsets=6),
    "aten::_cudnn_attention_forward": _Attention(0, 10, offsets=4),
    "aten::_cudnn_attention_backward": _Attention(1, 14, offsets=9),
    # The package flash_attn, versions 2.7 and 2.8 (flash_attn_interface.py).
    "flash_attn::_flash_attn_forward": _Attention(0, 5, tokens=1, ends_at_last=True, window=6),
    "flash_attn::_flash_attn_varlen_forward": _Attention(
        0, 9, tokens=1, offsets=3, ends_at_last=True, window=10, pages=15
    ),
    "flash_attn::_flash_attn_backward": _Attention(1, 11, tokens=1, ends_at_last=True, window=12),
    "flash_attn::_flash_attn_varlen_backward": _Attention(1, 15, tokens=1, offsets=9, ends_at_last=True, window=16),
}

# --- kernels of torch.compile


def _make_template_rule(name: str) -> Rule | None:
    """Makes the rule of a kernel from a template of torch.compile, such as ``triton_tem_fused_addmm_gelu_0``.

    In a source without outputs, the last buffers among the inputs are the outputs.
    """

    def count_matmul(call: Call) -> float:
        """Returns the FLOPs of the first two consecutive buffers whose product is as large as a later buffer."""
        buffers = call.all_tensors()
        for position, (left, right) in enumerate(pairwise(buffers), 2):
            if len(left.shape) == len(right.shape) >= 2 and left.shape[-1] == right.shape[-2]:
                elements = _count_matmul_outputs(left, right)
                if elements in map(count_elements, buffers[position:]):
                    return 2 * elements * left.shape[-1]
        raise call.unknown("operands")

    def count_attention(call: Call) -> float:
        """Returns the FLOPs of FlexAttention. Only the content of a mask shows which of its blocks are used."""
        query, key, value, *mask_blocks = (tensor for tensor in call.tensors() if len(tensor.shape) == 4)
        if any(tensor.dtype == "int32" and tensor.shape[-1] > 1 for tensor in mask_blocks):
            raise call.unknown("number of blocks")
        keys, values = (3, 2) if "backward" in name else (1, 1)
        scores = math.prod(query.shape[:3]) * key.shape[2]
        return 2.0 * (keys * key.shape[-1] + values * value.shape[-1]) * scores

    if "flex_attention" in name:
        return Rule("attention", bytes_of(), outputs_or(nothing), count_attention)
    return Rule("matmul", bytes_of(), outputs_or(nothing), count_matmul) if "mm" in name else None


#: The rules of operators that multiply, by the name of the operator.
MATMUL_RULES: dict[str, Rule] = {
    **{f"aten::{name}": rule for name, rule in _MATMULS.items()},
    LINEAR_LAYER: _MATMULS["linear"],
    **{f"aten::{name}": _make_convolution() for name in _CONVOLUTIONS},
    "aten::convolution_backward": _make_convolution_backward(),
    **{name: _attention(positions, is_backward="backward" in name) for name, positions in _ATTENTION.items()},
}
