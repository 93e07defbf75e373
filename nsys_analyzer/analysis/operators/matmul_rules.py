"""Defines the rules for operators that multiply: matmuls, convolutions, attention and recurrent networks.

Their FLOPs are those of ``torch.utils.flop_counter``: 2 for each multiplication with its addition. There is one
difference: causal attention counts the scores on one side of the diagonal, because its kernels skip the other side.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

from nsys_analyzer.analysis.operators.operands import (
    Call,
    Rule,
    bytes_of,
    count_elements,
    outputs_or,
    size_of,
)
from nsys_analyzer.trace.operator_calls import Tensor

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
    """Returns the number of output elements of a grouped matmul, as a mixture of experts has.

    Each row of a left operand with two dimensions belongs to one group, and each column of a right one. If both have
    two dimensions, the groups share the inner dimension, so that one matmul does the arithmetic of all groups.
    """
    groups = left.shape[0] if len(left.shape) == len(right.shape) == 3 else 1
    return groups * left.shape[-2] * right.shape[-1]


def _matmul(
    left: int, right: int, last: int, count_outputs: Callable[[Tensor, Tensor], int] = _count_matmul_outputs
) -> Rule:
    """Makes the rule of a matmul.

    Args:
        left: the position of the left operand, whose last dimension is the inner dimension.
        right: the position of the right operand.
        last: the position of the last tensor that is read.
        count_outputs: returns the number of elements of the output.
    """

    def count_flops(call: Call) -> float:
        operand = call.tensor(left)
        values_per_element = 2 if operand.dtype.startswith("float4") else 1  # a byte contains two values
        return 2 * count_outputs(operand, call.tensor(right)) * operand.shape[-1] * values_per_element

    def count_written(call: Call) -> float:
        operand = call.tensor(left)
        return count_outputs(operand, call.tensor(right)) * call.element_bytes(operand)

    return Rule("matmul", count_flops, bytes_of(*range(last + 1)), outputs_or(count_written))


def _count_packed_int4_outputs(inputs: Tensor, weight: Tensor) -> int:
    """Returns the number of output elements for weights in tiles of 8 rows of ``_convert_weight_to_int4pack`` makes."""
    return inputs.shape[0] * weight.shape[0] * 8


_MATMULS = {
    **dict.fromkeys(("mm", "bmm", "mv", "dot", "vdot", "matmul", "_int_mm"), _matmul(0, 1, 1)),
    **dict.fromkeys(("addmm", "addmm_", "_addmm_activation", "addmv", "baddbmm", "baddbmm_"), _matmul(1, 2, 2)),
    "linear": _matmul(0, 1, 2, _count_linear_outputs),
    "_scaled_mm": _matmul(0, 1, 4),
    "_scaled_mm_v2": _matmul(0, 1, 8),
    "_grouped_mm": _matmul(0, 1, 3, _count_grouped_outputs),
    "_scaled_grouped_mm": _matmul(0, 1, 5, _count_grouped_outputs),
    "_weight_int8pack_mm": _matmul(0, 1, 2, _count_linear_outputs),
    "_weight_int4pack_mm": _matmul(0, 1, 3, _count_packed_int4_outputs),
}


# --- convolutions


class _Convolution(NamedTuple):
    """The positions of the arguments of a convolution; None for an argument that it does not have.

    The input is at position 0, and the weight at position 1.
    """

    stride: int
    padding: int
    dilation: int | None
    groups: int | None = None
    output_padding: int | None = None
    transposed: int | bool = False

    def is_transposed(self, call: Call) -> bool:
        """Returns whether the convolution is transposed."""
        return self.transposed if isinstance(self.transposed, bool) else bool(call.value(self.transposed))

    def find_output_shape(self, call: Call) -> tuple[int, ...]:
        """Returns the shape of the output."""
        if call.outputs:
            return call.outputs[0].shape
        inputs, weight = call.tensor(0), call.tensor(1)
        dimensions = len(weight.shape) - 2

        def read(position: int | None, default: int) -> list[int]:
            """Returns an argument for each dimension. PyTorch repeats a single number."""
            value: Any = default if position is None else call.value(position, default)
            sizes = [value] if isinstance(value, int) else [*value]
            return sizes * dimensions if len(sizes) == 1 else sizes

        stride, dilation = read(self.stride, 1), read(self.dilation, 1)
        extent = [spread * (size - 1) for spread, size in zip(dilation, weight.shape[2:], strict=True)]
        padding = call.value(self.padding, 0)
        if padding == "same":
            paddings = extent
        else:
            paddings = [0] * dimensions if padding == "valid" else [2 * size for size in read(self.padding, 0)]
        sizes = inputs.shape[-dimensions:]
        if self.is_transposed(call):
            channels = weight.shape[1] * (call.value(self.groups, 1) if self.groups else 1)
            added = read(self.output_padding, 0)
            spatial = [
                (size - 1) * step - pad + reach + add + 1
                for size, step, pad, reach, add in zip(sizes, stride, paddings, extent, added, strict=True)
            ]
        else:
            channels = weight.shape[0]
            spatial = [
                (size + pad - reach - 1) // step + 1
                for size, step, pad, reach in zip(sizes, stride, paddings, extent, strict=True)
            ]
        return (*inputs.shape[: -dimensions - 1], channels, *spatial)


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


def _convolution(positions: _Convolution) -> Rule:
    def count_flops(call: Call) -> float:
        transposed = positions.is_transposed(call)
        multiplied = call.tensor(0).shape if transposed else positions.find_output_shape(call)
        return _count_convolution_flops(call.tensor(1), multiplied)

    def count_read(call: Call) -> float:
        used_bytes = _count_used_bytes(call, call.tensor(0), call.tensor(1), positions.find_output_shape(call))
        return used_bytes + call.count_bytes(call.tensors(1, 2, 3, 4))

    def count_written(call: Call) -> float:
        return math.prod(positions.find_output_shape(call)) * call.element_bytes(call.tensor(0))

    return Rule("convolution", count_flops, count_read, outputs_or(count_written))


def _make_convolution_backward() -> Rule:
    """Makes the rule of ``convolution_backward(grad_output, input, weight, …, transposed, …, output_mask)``."""

    def read(call: Call) -> tuple[Tensor, Tensor, Tensor, bool, bool]:
        """Returns the three tensors, and whether the gradients of the input and of the weight are computed."""
        for_input, for_weight, _ = call.value(10)
        return call.tensor(0), call.tensor(1), call.tensor(2), for_input, for_weight

    def count_flops(call: Call) -> float:
        """Returns the FLOPs of the gradients of the input and the weight, each as many as those of the convolution."""
        gradient, inputs, weight, for_input, for_weight = read(call)
        multiplied = inputs.shape if call.value(7) else gradient.shape
        return (for_input + for_weight) * _count_convolution_flops(weight, multiplied)

    def count_read(call: Call) -> float:
        gradient, inputs, weight, for_input, for_weight = read(call)
        read_bytes = call.count_bytes([gradient, *([weight] if for_input else [])])
        return read_bytes + (_count_used_bytes(call, inputs, weight, gradient.shape) if for_weight else 0.0)

    def count_written(call: Call) -> float:
        _, inputs, weight, for_input, for_weight = read(call)
        return call.count_bytes([*([inputs] if for_input else []), *([weight] if for_weight else [])])

    return Rule("convolution", count_flops, count_read, outputs_or(count_written))


_CONVOLUTIONS = {
    **dict.fromkeys(("conv1d", "conv2d", "conv3d", "cudnn_convolution_relu"), _Convolution(3, 4, 5)),
    **dict.fromkeys(("convolution", "_convolution"), _Convolution(3, 4, 5, 8, 7, transposed=6)),
    **dict.fromkeys(
        ("conv_transpose1d", "conv_transpose2d", "conv_transpose3d"), _Convolution(3, 4, 7, 6, 5, transposed=True)
    ),
    "cudnn_convolution": _Convolution(3, 2, 4),
    "cudnn_convolution_transpose": _Convolution(4, 2, 5, 6, 3, transposed=True),
    "cudnn_convolution_add_relu": _Convolution(5, 6, 7),
    "miopen_convolution": _Convolution(4, 3, 5),
    "_conv_depthwise2d": _Convolution(4, 5, 6),
    "conv_depthwise3d": _Convolution(4, 5, 6),
    "thnn_conv2d": _Convolution(4, 5, None),
    "_slow_conv2d_forward": _Convolution(4, 5, None),
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
        window: the position of the number of earlier keys that a query sees; -1 is all.
        pages: the position of the table of pages, or None. It does not tell how many pages are in use.
        written: the positions of tensors that the operator writes, although they are arguments.
    """

    query: int
    causal: int
    tokens: int = 2
    offsets: int | None = None
    ends_at_last: bool = False
    window: int | None = None
    pages: int | None = None
    written: tuple[int, ...] = ()

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
        causal = int(call.value(self.causal, 0))
        pairs = queries * keys
        if causal:
            triangle = min(queries, keys) ** 2 / 2
            has_only_triangle = (keys >= queries) != (self.ends_at_last or causal == 2)
            pairs = triangle if has_only_triangle else pairs - triangle
        if self.window is not None and (window := int(call.value(self.window, -1))) >= 0:
            pairs = min(pairs, queries * (window + 1))
        return batch * heads * pairs


def _attention(positions: _Attention) -> Rule:
    def count_flops(call: Call) -> float:
        """Each score is a product of a query and a key, and weighs a value."""
        query, value = call.tensor(positions.query), call.tensor(positions.query + 2)
        return 2 * (query.shape[-1] + value.shape[-1]) * positions.count_scores(call)

    return Rule("attention", count_flops, written=outputs_or(size_of(positions.query)))


def _attention_backward(positions: _Attention) -> Rule:
    def count_flops(call: Call) -> float:
        """Five matmuls: the scores again, and the gradients of the scores, the values, the queries and the keys."""
        query, value = call.tensor(positions.query), call.tensor(positions.query + 2)
        return 2 * (3 * query.shape[-1] + 2 * value.shape[-1]) * positions.count_scores(call)

    def count_read(call: Call) -> float:
        return bytes_of()(call) - bytes_of(*positions.written)(call) if positions.written else bytes_of()(call)

    operands = range(positions.query, positions.query + 3)
    written = size_of(*operands)
    return Rule("attention", count_flops, count_read, written if positions.written else outputs_or(written))


_ATTENTION = {
    "aten::scaled_dot_product_attention": _Attention(0, 5),
    "aten::_scaled_dot_product_attention_math": _Attention(0, 5),
    "aten::_scaled_dot_product_flash_attention": _Attention(0, 4),
    "aten::_scaled_dot_product_efficient_attention": _Attention(0, 6),
    "aten::_scaled_dot_product_cudnn_attention": _Attention(0, 6),
    "aten::_scaled_dot_product_fused_attention_overrideable": _Attention(0, 5),
    "aten::_flash_attention_forward": _Attention(0, 8, tokens=1, offsets=3, window=11, pages=15),
    "aten::_efficient_attention_forward": _Attention(0, 9, tokens=1, offsets=4),
    "aten::_cudnn_attention_forward": _Attention(0, 10, offsets=4),
    # The package flash_attn, versions 2.7 and 2.8 (flash_attn_interface.py).
    "flash_attn::_flash_attn_forward": _Attention(0, 5, tokens=1, ends_at_last=True, window=6),
    "flash_attn::_flash_attn_varlen_forward": _Attention(
        0, 9, tokens=1, offsets=3, ends_at_last=True, window=10, pages=15
    ),
}
_ATTENTION_BACKWARD = {
    "aten::_scaled_dot_product_flash_attention_backward": _Attention(1, 11),
    "aten::_scaled_dot_product_efficient_attention_backward": _Attention(1, 11),
    "aten::_scaled_dot_product_cudnn_attention_backward": _Attention(1, 14),
    "aten::_scaled_dot_product_fused_attention_overrideable_backward": _Attention(1, 13),
    "aten::_flash_attention_backward": _Attention(1, 11, tokens=1, offsets=6, window=15),
    "aten::_efficient_attention_backward": _Attention(1, 14, tokens=1, offsets=6),
    "aten::_cudnn_attention_backward": _Attention(1, 14, offsets=9),
    "flash_attn::_flash_attn_backward": _Attention(1, 11, tokens=1, ends_at_last=True, window=12, written=(6, 7, 8)),
    "flash_attn::_flash_attn_varlen_backward": _Attention(
        1, 15, tokens=1, offsets=9, ends_at_last=True, window=16, written=(6, 7, 8)
    ),
}

# --- recurrent networks


def _recurrent(passes: int) -> Rule:
    """Makes the rule of a recurrent network: each token meets each weight matrix of the list at position 1."""

    def count_flops(call: Call) -> float:
        inputs = call.tensor(0)
        weights = sum(count_elements(weight) for weight in call.tensors(1) if len(weight.shape) > 1)
        return passes * 2.0 * weights * count_elements(inputs) / inputs.shape[-1]

    return Rule("matmul", count_flops)


#: The rules of operators that multiply, by the name of the operator.
MATMUL_RULES: dict[str, Rule] = {
    **{f"aten::{name}": rule for name, rule in _MATMULS.items()},
    **{f"aten::{name}": _convolution(positions) for name, positions in _CONVOLUTIONS.items()},
    "aten::convolution_backward": _make_convolution_backward(),
    **{name: _attention(positions) for name, positions in _ATTENTION.items()},
    **{name: _attention_backward(positions) for name, positions in _ATTENTION_BACKWARD.items()},
    "aten::_cudnn_rnn": _recurrent(1),
    "aten::_cudnn_rnn_backward": _recurrent(2),
}
