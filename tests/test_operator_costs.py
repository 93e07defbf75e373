"""Tests the FLOPs and bytes of operators. The arithmetic stands beside each expectation."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, get_args

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

from nsys_analyzer.analysis.operators.costs import Cost, estimate_cost
from nsys_analyzer.analysis.operators.matmul_rules import MATMUL_RULES
from nsys_analyzer.analysis.operators.operands import OperatorKind
from nsys_analyzer.trace.operator_calls import Signature, Tensor, TensorArgument


def bf16(*shape: int, strides: tuple[int, ...] | None = None) -> Tensor:
    return Tensor(shape, "bfloat16", strides, "cuda")


def fp32(*shape: int) -> Tensor:
    return Tensor(shape, "float32", None, "cuda")


def int64(*shape: int) -> Tensor:
    return Tensor(shape, "int64", None, "cuda")


def cost(name: str, *inputs: TensorArgument | str, outputs: Sequence[Tensor] | None = None) -> Cost | None:
    """The cost of a call. An argument that is a text is no tensor."""
    tensors = tuple(None if isinstance(value, str) else value for value in inputs)
    texts = tuple(value if isinstance(value, str) else "" for value in inputs)
    written = None if outputs is None else tuple(outputs)
    return estimate_cost(Signature(name if "::" in name else f"aten::{name}", tensors, written, texts))


def fp8(*shape: int) -> Tensor:
    return Tensor(shape, "float8_e4m3fn")


BOTH, WEIGHT = "[True, True, False]", "[False, True, False]"
CONVOLUTION = ("[2, 2]", "[1, 1]", "[1, 1]", "False", "[0, 0]", "1")
QUERY, KEY = bf16(2, 8, 128, 64), bf16(2, 2, 128, 64)  # 8 heads of queries share 2 heads of keys
PARAMETERS = (bf16(100), bf16(20, 10))
OF_MASK = Tensor((4, 8), "bool")

# 2·M·N·K and the three matrices; a bias and its rows are small but read; a vector has one column.
MATMULS = [
    (cost("mm", bf16(4, 8), bf16(8, 2), outputs=[bf16(4, 2)]), 2 * 4 * 2 * 8, 2 * (32 + 16 + 8)),
    (cost("mm", bf16(64, 32), bf16(32, 16)), 2 * 64 * 16 * 32, 2 * (64 * 32 + 32 * 16 + 64 * 16)),
    # The fourth matrix is the output of an overload.
    (cost("mm", bf16(4, 8), bf16(8, 2), bf16(4, 2), outputs=[bf16(4, 2)]), 2 * 4 * 2 * 8, 2 * (32 + 16 + 8)),
    (cost("addmm", fp32(16), fp32(64, 32), fp32(32, 16)), 2 * 64 * 16 * 32, 4 * (16 + 64 * 32 + 32 * 16 + 64 * 16)),
    (cost("bmm", bf16(3, 4, 8), bf16(3, 8, 2)), 2 * 3 * 4 * 2 * 8, 2 * 3 * (32 + 16 + 8)),
    # A weight that is expanded over the batch (stride 0) is read once.
    (cost("bmm", bf16(3, 4, 8), bf16(3, 8, 2, strides=(0, 2, 1))), 2 * 3 * 4 * 2 * 8, 2 * (96 + 16 + 24)),
    (cost("baddbmm", bf16(1, 4, 2), bf16(3, 4, 8), bf16(3, 8, 2)), 2 * 3 * 4 * 2 * 8, 2 * (8 + 3 * (32 + 16 + 8))),
    (cost("mv", bf16(4, 8), bf16(8)), 2 * 4 * 8, 2 * (32 + 8 + 4)),
    (cost("dot", fp32(8), fp32(8)), 2 * 8, 4 * (8 + 8 + 1)),
    (cost("linear", bf16(2, 5, 8), bf16(3, 8), bf16(3)), 2 * 10 * 3 * 8, 2 * (80 + 24 + 3 + 30)),
    (cost("matmul", bf16(5, 1, 4, 8), bf16(6, 8, 2)), 2 * 30 * 4 * 2 * 8, 2 * (5 * 32 + 6 * 16 + 30 * 8)),
    # FP8 with an output in bf16 and a scale for each row and column.
    (
        cost("_scaled_mm", fp8(64, 32), fp8(32, 16), fp32(64, 1), fp32(1, 16), outputs=[bf16(64, 16)]),
        2 * 64 * 16 * 32,
        64 * 32 + 32 * 16 + 4 * 64 + 4 * 16 + 2 * 64 * 16,
    ),
    # NVFP4: a byte has two values, so that 16 bytes of a row are 32 values; a scale in FP8 for 16 values.
    (
        cost(
            "_scaled_mm", Tensor((64, 16), "float4_e2m1fn_x2"), Tensor((16, 8), "float4_e2m1fn_x2"), fp8(64, 2),
            fp8(8, 2), outputs=[bf16(64, 8)],
        ),
        2 * 64 * 8 * 32,
        64 * 16 + 16 * 8 + 128 + 16 + 2 * 64 * 8,
    ),
    # A mixture of experts: each of 10 tokens meets one of 4 experts, and all experts are read.
    (cost("_grouped_mm", bf16(10, 8), bf16(4, 8, 6), Tensor((4,), "int32"), outputs=[bf16(10, 6)]),
     2 * 10 * 6 * 8, 2 * (80 + 192 + 60) + 16),
    # The gradient of the experts: each token belongs to one product, and there are 4 products.
    (cost("_grouped_mm", bf16(8, 10), bf16(10, 6), Tensor((4,), "int32"), outputs=[bf16(4, 8, 6)]),
     2 * 8 * 6 * 10, 2 * (80 + 60 + 192) + 16),
    # Weights in 4 bits: 2 tiles of 8 rows, 4-byte elements.
    (cost("_weight_int4pack_mm", bf16(3, 128), Tensor((2, 1, 32, 4), "int32"), "32", bf16(4, 16, 2)),
     2 * 3 * 16 * 128, 2 * 384 + 4 * 256 + 2 * 128 + 2 * 48),
]  # fmt: skip


TEMPLATES = [
    # Kernels of torch.compile: a bias, the operands and the output.
    (cost("triton::triton_tem_fused_addmm_gelu_0", bf16(16), bf16(4, 8), bf16(8, 16), bf16(4, 16)),
     "matmul", 2 * 64 * 8, 2 * (16 + 32 + 128 + 64)),
    (cost("triton::triton_tem_fused_mm_4", bf16(8, 8), bf16(8, 8), bf16(8, 8)), "matmul", 2 * 64 * 8, 2 * 3 * 64),
    (cost("triton::triton_tem_fused_mm_5", bf16(8, 8), bf16(8, 8), "None", outputs=[bf16(8, 8)]),
     "matmul", 2 * 64 * 8, 2 * 3 * 64),
    (cost("triton::triton_tem_fused_bmm_1", bf16(3, 4, 8), bf16(3, 8, 2), bf16(3, 4, 2)),
     "matmul", 2 * 24 * 8, 2 * (96 + 48 + 24)),
    # FlexAttention without a mask has one block.
    (cost("triton::triton_tem_fused_flex_attention_3", bf16(1, 4, 32, 16), bf16(1, 2, 32, 16), bf16(1, 2, 32, 16),
          fp32(1, 4, 32), Tensor((1, 1, 1), "int32"), Tensor((1, 1, 1, 1), "int32"), bf16(1, 4, 32, 16)),
     "attention", 2 * 2 * 16 * 4 * 32 * 32, 2 * (2 * 2048 + 2 * 1024) + 4 * 128 + 8),
]  # fmt: skip


@pytest.mark.parametrize(("found", "kind", "flops", "transferred"), TEMPLATES)
def test_templates(found: Cost, kind: str, flops: float, transferred: float) -> None:
    assert (found.kind, found.flops, found.bytes) == (kind, flops, transferred)


@pytest.mark.parametrize(("found", "flops", "transferred"), MATMULS)
def test_matmuls(found: Cost, flops: float, transferred: float) -> None:
    assert (found.kind, found.flops, found.bytes) == ("matmul", flops, transferred)


CONVOLUTIONS = [
    # 3×3, stride 2, padding 1: (8 + 2 − 3) ÷ 2 + 1 = 4. Each of 2·6·4·4 outputs is a sum over 3 channels · 9.
    (cost("convolution", bf16(2, 3, 8, 8), bf16(6, 3, 3, 3), bf16(6), *CONVOLUTION),
     2 * 192 * 27, 2 * (384 + 162 + 6 + 192)),
    # Two groups: each output is a sum over 2 of the 4 channels.
    (cost("convolution", bf16(1, 4, 5, 5), bf16(6, 2, 3, 3), "None", "[1, 1]", "[0, 0]", "[1, 1]", "False", "[0, 0]",
          "2"),
     2 * 6 * 9 * 18, 2 * (100 + 108 + 54)),
    # Dilation 2: 3 weights reach over 5 elements, 9 − 5 + 1 = 5.
    (cost("conv1d", bf16(1, 1, 9), bf16(1, 1, 3), "None", "[1]", "[0]", "[2]", "1"), 2 * 5 * 3, 2 * (9 + 3 + 5)),
    (cost("conv2d", bf16(1, 1, 4, 4), bf16(1, 1, 3, 3), "None", "[1, 1]", "[1, 1]", "[1, 1]", "1"),
     2 * 16 * 9, 2 * (16 + 9 + 16)),
    # 1×1 with stride 2 reads every second element of both dimensions.
    (cost("convolution", bf16(1, 4, 8, 8), bf16(6, 4, 1, 1), "None", "[2, 2]", "[0, 0]", "[1, 1]", "False", "[0, 0]",
          "1"),
     2 * 6 * 16 * 4, 2 * (4 * 16 + 24 + 6 * 16)),
    # Transposed: each of 4·4·4 inputs meets 6·9 weights; 4·2 = 8 outputs in each dimension.
    (cost("convolution", bf16(1, 4, 4, 4), bf16(4, 6, 3, 3), "None", "[2, 2]", "[1, 1]", "[1, 1]", "True", "[1, 1]",
          "1"),
     2 * 64 * 54, 2 * (64 + 216 + 6 * 64)),
    (cost("cudnn_convolution", bf16(2, 3, 8, 8), bf16(6, 3, 3, 3), "[1, 1]", "[2, 2]", "[1, 1]", "1"),
     2 * 192 * 27, 2 * (384 + 162 + 192)),
    # Backward of the first one: the gradients of the input and the weight, then of the weight alone.
    (cost("convolution_backward", bf16(2, 6, 4, 4), bf16(2, 3, 8, 8), bf16(6, 3, 3, 3), "[6]", *CONVOLUTION, BOTH),
     2 * 2 * 192 * 27, 2 * (192 + 384 + 162 + 384 + 162)),
    (cost("convolution_backward", bf16(2, 6, 4, 4), bf16(2, 3, 8, 8), bf16(6, 3, 3, 3), "[6]", *CONVOLUTION, WEIGHT),
     2 * 192 * 27, 2 * (192 + 384 + 162 + 162)),
]  # fmt: skip


@pytest.mark.parametrize(("found", "flops", "transferred"), CONVOLUTIONS)
def test_convolutions(found: Cost, flops: float, transferred: float) -> None:
    assert (found.kind, found.precision, found.flops, found.bytes) == ("convolution", "bf16", flops, transferred)


SCORES = 2 * 8 * 128 * 128  # a score for each query and key of each head
ONE_QUERY, CACHE = bf16(2, 8, 1, 64), bf16(2, 2, 128, 64)
PACKED, OFFSETS = bf16(128, 8, 64), Tensor((5,), "int32")
ATTENTION = [
    # A score needs 2·64 FLOPs, and weighs a value with 2·64. Keys and values have 2 heads.
    (cost("_scaled_dot_product_flash_attention", QUERY, KEY, KEY, "0.0", "False", outputs=[QUERY]),
     256 * SCORES, 2 * 131072 + 2 * 32768 * 2 + 2 * 131072),
    (cost("_scaled_dot_product_flash_attention", QUERY, KEY, KEY, "0.0", "True"), 128 * SCORES, 655360),
    (cost("_scaled_dot_product_cudnn_attention", QUERY, KEY, KEY, "None", "True", "0.0", "True"), 128 * SCORES, 655360),
    # The layout with tokens before heads.
    (cost("_flash_attention_forward", bf16(2, 128, 8, 64), bf16(2, 128, 2, 64), bf16(2, 128, 2, 64), "None", "None",
          "128", "128", "0.0", "False", "False"), 256 * SCORES, 655360),
    # Efficient attention: type 1 is a causal mask.
    (cost("_efficient_attention_forward", bf16(2, 128, 8, 64), bf16(2, 128, 8, 64), bf16(2, 128, 8, 64), "None", "None",
          "None", "None", "None", "0.0", "1", "True"), 128 * SCORES, 4 * 2 * 131072),
    # One query reads the whole cache.
    (cost("_scaled_dot_product_flash_attention", ONE_QUERY, CACHE, CACHE, "0.0", "False"),
     256 * 2 * 8 * 128, 2 * (1024 + 2 * 32768 + 1024)),
    # Four packed sequences have the fewest scores if each has 32 tokens.
    (cost("_flash_attention_forward", PACKED, PACKED, PACKED, OFFSETS, OFFSETS, "64", "64", "0.0", "False", "False"),
     256 * 8 * 4 * 32 * 32, 2 * 4 * 65536 + 2 * 4 * 5),
    # 16 queries at the end of 128 keys: all keys but the triangle of 16²÷2 above the diagonal.
    (cost("flash_attn::_flash_attn_forward", bf16(1, 16, 1, 64), bf16(1, 128, 1, 64), bf16(1, 128, 1, 64), "0.0",
          "0.125", "True", "-1", "-1"), 256 * (16 * 128 - 128), 2 * 64 * (16 + 128 + 128 + 16)),
    # A window of 31 earlier keys: 32 for each query.
    (cost("flash_attn::_flash_attn_forward", bf16(1, 128, 1, 64), bf16(1, 128, 1, 64), bf16(1, 128, 1, 64), "0.0",
          "0.125", "True", "31", "0"), 256 * 128 * 32, 2 * 64 * 4 * 128),
    # Without a causal mask, 16 earlier and 15 later keys: 32 for each query.
    (cost("flash_attn::_flash_attn_forward", bf16(1, 128, 1, 64), bf16(1, 128, 1, 64), bf16(1, 128, 1, 64), "0.0",
          "0.125", "False", "16", "15"), 256 * 128 * 32, 2 * 64 * 4 * 128),
    # Backward: five matmuls instead of two. Four tensors have the shape of the queries, and four that of the keys.
    (cost("_scaled_dot_product_flash_attention_backward", QUERY, QUERY, KEY, KEY, QUERY, fp32(2, 8, 128), "None",
          "None", "128", "128", "0.0", "False"), 5 * 128 * SCORES, 2 * (4 * 131072 + 4 * 32768) + 4 * 2048),
    # The three gradients are arguments.
    (cost("flash_attn::_flash_attn_backward", bf16(1, 16, 1, 64), bf16(1, 16, 1, 64), bf16(1, 16, 1, 64),
          bf16(1, 16, 1, 64), bf16(1, 16, 1, 64), fp32(1, 1, 16), bf16(1, 16, 1, 64), bf16(1, 16, 1, 64),
          bf16(1, 16, 1, 64), "0.0", "0.125", "False", "-1", "-1", outputs=[fp32(1, 1, 16)]),
     5 * 128 * 256, 2 * 1024 * 8 + 64 + 64),
]  # fmt: skip


@pytest.mark.parametrize(("found", "flops", "transferred"), ATTENTION)
def test_attention(found: Cost, flops: float, transferred: float) -> None:
    assert (found.kind, found.precision, found.flops, found.bytes) == ("attention", "bf16", flops, transferred)


TRAFFIC = [
    ("elementwise", cost("add", bf16(4, 8), bf16(4, 8), "None", outputs=[bf16(4, 8)]), 2 * 3 * 32),
    ("elementwise", cost("add", bf16(4, 8), bf16(8)), 2 * (32 + 8 + 32)),  # a row is read once
    ("elementwise", cost("mul", bf16(4, 8, strides=(1, 0)), bf16(4, 8)), 2 * (4 + 32 + 32)),  # 4 elements in memory
    ("elementwise", cost("mul", bf16(4, 8), fp32(4, 1)), 2 * 32 + 4 * 4 + 4 * 32),  # promoted to the wider type
    ("elementwise", cost("gt", bf16(4, 8), "0", outputs=[Tensor((4, 8), "bool")]), 2 * 32 + 32),  # a byte each
    ("elementwise", cost("relu_", bf16(4, 8), outputs=[bf16(4, 8)]), 2 * 64),
    ("elementwise", cost("where", OF_MASK, fp32(4, 8), fp32()), 32 + 4 * 32 + 4 + 4 * 32),
    ("optimizer", cost("_foreach_add_", PARAMETERS, PARAMETERS, outputs=[]), 3 * 2 * 300),
    ("optimizer", cost("_foreach_mul", PARAMETERS, "0.5"), 2 * 2 * 300),
    # The two factors are the same gradients; with other types, they are different lists.
    ("optimizer", cost("_foreach_addcmul_", PARAMETERS, PARAMETERS, PARAMETERS, "0.1", outputs=[]), 3 * 2 * 300),
    ("optimizer", cost("_foreach_addcmul_", PARAMETERS, PARAMETERS, (fp32(100), fp32(20, 10)), "0.1"), 10 * 300),
    ("optimizer", cost("_foreach_copy_", PARAMETERS, (fp32(100), fp32(20, 10)), outputs=[]), 6 * 300),
    ("optimizer", cost("_foreach_zero_", PARAMETERS, outputs=[]), 600),
    # AdamW reads parameters, gradients, two moments and two counts of steps, and writes all but the gradients.
    (
        "optimizer",
        cost("_fused_adamw_", PARAMETERS, PARAMETERS, PARAMETERS, PARAMETERS, "[]", (fp32(), fp32()), outputs=[]),
        2 * 300 * 4 + 8 + 2 * 300 * 3,
    ),
    ("optimizer", cost("_fused_sgd_", PARAMETERS, PARAMETERS, PARAMETERS, outputs=[]), 2 * 300 * 5),
    ("norm", cost("native_layer_norm", bf16(4, 8), "[8]", bf16(8), bf16(8)), 2 * (32 + 8 + 8 + 32)),
    ("norm", cost("_fused_rms_norm_backward", bf16(4, 8), bf16(4, 8), "[8]", fp32(4, 1), bf16(8), "[True, True]",
                  outputs=[bf16(4, 8), bf16(8)]), 2 * (32 + 32 + 8 + 32 + 8) + 16),
    ("norm", cost("native_batch_norm", bf16(2, 3, 4, 4), *[fp32(3)] * 4, "True"), 2 * 96 * 2 + 4 * 12),
    ("softmax", cost("_softmax", bf16(4, 8), "1", "True", outputs=[fp32(4, 8)]), 2 * 32 + 4 * 32),
    ("softmax", cost("_log_softmax_backward_data", fp32(4, 8), fp32(4, 8), "1", "torch.float32"), 3 * 4 * 32),
    # Cross entropy: one logarithm for each of 4 targets; backward writes a gradient for all of them.
    ("cross entropy", cost("nll_loss_forward", fp32(4, 8), int64(4), outputs=[fp32(), fp32()]), 16 + 32 + 8),
    ("cross entropy", cost("nll_loss_backward", fp32(), fp32(4, 8), int64(4), "None", "1", "-100", fp32(),
                           outputs=[fp32(4, 8)]), 4 + 32 + 4 + 128),
    ("reduction", cost("sum", bf16(4, 8), "[1]", "False", "None", outputs=[bf16(4)]), 2 * (32 + 4)),
    ("other", cost("cumsum", fp32(4, 8), "1", outputs=[fp32(4, 8)]), 4 * 64),
    # (8 + 2 − 3) ÷ 2 + 1 = 4 in both dimensions; the indices have 8 bytes.
    ("reduction", cost("max_pool2d_with_indices", bf16(1, 2, 8, 8), "[3, 3]", "[2, 2]", "[1, 1]"), 2 * 128 + 10 * 32),
    ("reduction", cost("max_pool2d_with_indices_backward", bf16(1, 2, 4, 4), bf16(1, 2, 8, 8), *["[3, 3]"] * 5,
                       int64(1, 2, 4, 4)), 2 * 32 + 8 * 32 + 2 * 128),
    ("reduction", cost("_adaptive_avg_pool2d", bf16(1, 2, 8, 8), "[1, 1]"), 2 * (128 + 2)),
    ("elementwise", cost("upsample_nearest2d", bf16(1, 2, 4, 4), "[8, 8]"), 2 * (32 + 128)),
    ("other", cost("sort", fp32(8), "0", outputs=[fp32(8), int64(8)]), 32 + 32 + 64),
    # 3 rows of 16 elements, not the table.
    ("embedding", cost("embedding", bf16(1000, 16), int64(3)), 2 * 48 + 24 + 2 * 48),
    ("embedding", cost("index_select", fp32(10, 1000), "1", int64(3)), 4 * 30 + 24 + 4 * 30),
    ("embedding", cost("gather", fp32(1000, 16), "0", int64(3, 16)), 4 * 48 + 8 * 48 + 4 * 48),
    ("embedding", cost("index", fp32(1000, 16), (int64(3),), outputs=[fp32(3, 16)]), 4 * 48 + 24 + 4 * 48),
    ("embedding", cost("embedding_dense_backward", bf16(3, 16), int64(3), "1000", outputs=[bf16(1000, 16)]),
     2 * 48 + 24 + 32000),
    ("embedding", cost("embedding_dense_backward", bf16(3, 16), int64(3), "1000"), 2 * 48 + 24 + 32000),
    # 5 elements of a large tensor are read and written, also if the result is a new tensor.
    ("embedding", cost("scatter", fp32(8, 1000), "1", int64(8, 1), fp32(8, 1), outputs=[fp32(8, 1000)]), 64 + 3 * 32),
    ("embedding", cost("index_put_", fp32(1000), (int64(5),), fp32(), "False", outputs=[fp32(1000)]), 40 + 4 + 40),
    ("embedding", cost("index_put_", fp32(1000), (int64(5),), fp32(5), "True"), 40 + 20 + 20 + 20),
    ("embedding", cost("scatter_", fp32(8, 1000), "1", int64(8, 1), "1", outputs=[fp32(8, 1000)]), 64 + 2 * 32),
    ("embedding", cost("scatter_add_", fp32(1000), "0", int64(5), fp32(5), outputs=[fp32(1000)]), 40 + 20 + 20 + 20),
    ("embedding", cost("index_add_", fp32(1000, 4), "0", int64(5), fp32(5, 4)), 40 + 80 + 80 + 80),
    ("copy", cost("copy_", fp32(4, 8), bf16(4, 8), "False", outputs=[fp32(4, 8)]), 4 * 32 + 2 * 32),
    ("copy", cost("_to_copy", fp32(4, 8), "torch.bfloat16", outputs=[bf16(4, 8)]), 4 * 32 + 2 * 32),
    ("copy", cost("cat", (bf16(4, 8), bf16(2, 8)), "0"), 2 * 2 * 48),
    ("copy", cost("zeros", "[4, 8]", outputs=[fp32(4, 8)]), 4 * 32),
    ("copy", cost("fill_", fp32(4, 8), "0"), 4 * 32),
    ("collective", cost("c10d::allreduce_", (bf16(100),), outputs=[bf16(100)]), 400),
    ("collective", cost("c10d::_allgather_base_", bf16(400), bf16(100), outputs=[bf16(400)]), 1000),
    ("collective", cost("_c10d_functional::reduce_scatter_tensor", bf16(400), outputs=[bf16(100)]), 1000),
    # Kernels of torch.compile: 32 iterations read no more than 32 rows' elements of the table.
    ("elementwise", cost("triton::triton_poi_fused_add_mul_0", bf16(32), bf16(32), bf16(32), "32"), 2 * 96),
    ("elementwise", cost("triton::triton_poi_fused_embedding_1", int64(32), bf16(1000, 64), bf16(32), "32"),
     8 * 32 + 2 * 32 + 2 * 32),
    ("reduction", cost("triton::triton_per_fused_sum_3", fp32(4, 8), fp32(4), "4", "8"), 4 * 36),
    ("norm", cost("triton::triton_red_fused_native_layer_norm_2", bf16(4, 8), bf16(8), bf16(4, 8), "4", "8"), 2 * 72),
]  # fmt: skip


@pytest.mark.parametrize(("kind", "found", "transferred"), TRAFFIC)
def test_memory_traffic(kind: str, found: Cost, transferred: float) -> None:
    assert (found.kind, found.bytes) == (kind, transferred)


UNKNOWN = [
    cost("a_package::an_operator", bf16(4), outputs=[bf16(4)]),
    cost("_cudnn_rnn", bf16(4), outputs=[bf16(4)]),
    cost("add", Tensor((4, 8)), Tensor((4, 8))),  # the types are unknown
    cost("copy_", bf16(4), Tensor((4,), "bfloat16", None, "cpu")),  # a transfer
    cost("_fused_adamw_", "", "", "", "", "", ""),  # the source leaves long lists out
    cost("mm", bf16(4)),
    estimate_cost(Signature("aten::conv2d", (bf16(1, 3, 8, 8), bf16(6, 3, 3, 3)))),  # a stride that nobody knows
    estimate_cost(Signature("aten::scaled_dot_product_attention", (QUERY, KEY, KEY))),  # causal or not
    # The cache and the lengths of its sequences are in the context of vLLM, not among the arguments.
    cost("vllm::unified_attention_with_output", *[bf16(32, 16, 64)] * 4, "model.layers.0.self_attn.attn", outputs=[]),
    # Pages: the table tells how many there are, not how many are in use.
    cost("_flash_attention_forward", PACKED, bf16(64, 16, 8, 64), bf16(64, 16, 8, 64), OFFSETS, OFFSETS, "64", "64",
         "0.0", "False", "False", "None", "None", "None", "None", "None", Tensor((4, 16), "int32")),
    # FlexAttention with a mask of several blocks.
    cost("triton::triton_tem_fused_flex_attention_3", *[bf16(1, 4, 256, 16)] * 3, Tensor((1, 1, 2, 2), "int32")),
    cost("triton::triton_tem_fused_mm_0", bf16(4, 8), bf16(16, 8), bf16(4, 16)),
    cost("triton::a_kernel_by_hand", bf16(4), outputs=[bf16(4)]),
]  # fmt: skip


@pytest.mark.parametrize("found", UNKNOWN)
def test_unknown_costs(found: Cost | None) -> None:
    assert found is None


def test_unknown_types() -> None:
    """A source without types tells the FLOPs of a matmul."""
    assert cost("mm", Tensor((4, 8)), Tensor((8, 2))) == Cost("matmul", "", 128.0, 0.0)


# --- properties

SIZES = st.integers(1, 9)


@given(SIZES, SIZES, SIZES, SIZES)
def test_batches_of_matmuls_add_up(batch: int, rows: int, inner: int, columns: int) -> None:
    """A batch of matmuls costs as much as its matmuls, and transposing both operands changes nothing."""
    one = cost("mm", bf16(rows, inner), bf16(inner, columns))
    many = cost("bmm", bf16(batch, rows, inner), bf16(batch, inner, columns))
    swapped = cost("bmm", bf16(batch, columns, inner), bf16(batch, inner, rows))
    assert one
    assert many == swapped == Cost("matmul", "bf16", batch * one.flops, batch * one.bytes)


@given(st.lists(st.booleans(), min_size=3, max_size=3), SIZES, SIZES, st.integers(1, 3), st.integers(1, 2))
def test_backward_of_a_convolution_is_the_sum_of_its_parts(
    mask: list[bool], channels: int, filters: int, kernel: int, stride: int
) -> None:
    inputs, weight = bf16(2, channels, 8, 8), bf16(filters, channels, kernel, kernel)
    size = (8 - kernel) // stride + 1
    arguments = (f"[{stride}, {stride}]", "[0, 0]", "[1, 1]", "False", "[0, 0]", "1")
    forward = cost("convolution", inputs, weight, "None", *arguments)
    operands = bf16(2, filters, size, size), inputs, weight
    backward = cost("convolution_backward", *operands, "None", *arguments, str(mask))
    assert forward
    assert backward
    assert backward.flops == (mask[0] + mask[1]) * forward.flops


SHAPES = st.lists(SIZES, max_size=3).map(tuple)


@given(SHAPES, st.sampled_from(["add", "mul", "silu", "gelu_backward", "_to_copy", "_softmax", "native_layer_norm"]))
def test_outputs_are_written(shape: tuple[int, ...], name: str) -> None:
    tensor = bf16(*shape)
    known, unknown = cost(name, tensor, tensor, outputs=[tensor]), cost(name, tensor, tensor)
    assert known
    assert known.bytes >= 2 * math.prod(shape)
    assert known == unknown  # the shape of the output follows from the input


@pytest.mark.parametrize("argument", [None, bf16(), bf16(0), bf16(3), bf16(2, 0, 3), (), (bf16(2), bf16(3))])
def test_arguments_that_do_not_fit(argument: TensorArgument) -> None:
    """A source may have any arguments. The cost is then unknown, or finite and not negative."""
    for name in {*MATMUL_RULES, *(f"aten::{name}" for name in dir(torch.ops.aten))}:
        for text in ("", "None", "x", "[0, 0]", "7"):
            found = estimate_cost(Signature(name, (argument,) * 12, None, (text,) * 12))
            assert found is None or (found.kind in get_args(OperatorKind) and 0 <= found.flops + found.bytes < math.inf)


# --- PyTorch


class Described(TorchDispatchMode):
    """Describes each operator as a source does, with its FLOPs by PyTorch's own formula, or None."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[Signature, int | None]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        schema = func._schema
        if schema.returns and all(entry.alias_info and not entry.alias_info.is_write for entry in schema.returns):
            return result  # a view
        values = [*args, *(kwargs.get(entry.name) for entry in schema.arguments[len(args) :])]
        inputs = tuple(describe(value) for value in values)
        texts = tuple("" if given is not None else str(value) for given, value in zip(inputs, values, strict=True))
        outputs = describe(result if isinstance(result, (list, tuple)) else [result]) or ()
        formula = flop_registry.get(func._overloadpacket)
        flops = formula(*args, **kwargs, out_val=result) if formula else None
        self.calls.append((Signature(schema.name, inputs, outputs, texts), flops))
        return result


def describe(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return Tensor(tuple(value.shape), str(value.dtype).removeprefix("torch."), tuple(value.stride()))
    if isinstance(value, (list, tuple)):
        return tuple(map(describe, [item for item in value if isinstance(item, torch.Tensor)])) or None
    return None


def meta(*shape: int) -> torch.Tensor:
    return torch.empty(shape, device="meta", requires_grad=True)


def attend(q: tuple[int, ...], k: tuple[int, ...], **options: Any) -> torch.Tensor:
    return torch.nn.functional.scaled_dot_product_attention(meta(*q), meta(*k), meta(*k), **options)


F = torch.nn.functional
PROGRAMS: list[Callable[[], torch.Tensor]] = [
    lambda: meta(4, 8) @ meta(8, 2),
    lambda: meta(3, 4, 8) @ meta(3, 8, 2),
    lambda: F.linear(meta(2, 5, 8), meta(3, 8), meta(3)),
    lambda: torch.baddbmm(meta(3, 4, 2), meta(3, 4, 8), meta(3, 8, 2)),
    lambda: F.conv1d(meta(2, 3, 9), meta(4, 3, 3), meta(4), dilation=2),
    lambda: F.conv2d(meta(2, 3, 9, 8), meta(4, 3, 3, 2), meta(4), stride=(2, 1), padding=(1, 0)),
    lambda: F.conv3d(meta(1, 2, 5, 5, 5), meta(4, 2, 3, 3, 3)),
    lambda: F.conv_transpose2d(meta(2, 4, 5, 5), meta(4, 3, 3, 3), stride=2, output_padding=1),
    lambda: torch.ops.aten._scaled_dot_product_flash_attention(*[meta(2, 4, 16, 32)] * 3)[0],
    lambda: torch.ops.aten._scaled_dot_product_efficient_attention(*[meta(2, 4, 16, 32)] * 3, None, True)[0],
    lambda: torch.ops.aten._scaled_dot_product_flash_attention(
        meta(2, 4, 16, 32), meta(2, 4, 24, 32), meta(2, 4, 24, 32)
    )[0],
]


@pytest.mark.parametrize("program", PROGRAMS)
def test_flops_agree_with_pytorch(program: Callable[[], torch.Tensor]) -> None:
    """Forward and backward have the FLOPs of ``torch.utils.flop_counter``."""
    with Described() as described:
        program().sum().backward()
    counted = [(signature, flops) for signature, flops in described.calls if flops is not None]
    assert len(counted) in (2, 3)  # backward has one operator, or one for each operand
    assert [found.flops for signature, _ in counted if (found := estimate_cost(signature))] == [f for _, f in counted]


def test_output_shapes_agree_with_pytorch() -> None:
    """A source without outputs gives the same cost as one with outputs, because formulas find the shapes."""
    with Described() as described:
        for program in PROGRAMS[:7]:
            program()
        F.max_pool2d(meta(1, 2, 8, 8), 3, 2, 1)
        F.avg_pool2d(meta(1, 2, 8, 8), 2)
        F.adaptive_avg_pool2d(meta(1, 2, 8, 8), 3)
        F.interpolate(meta(1, 2, 4, 4), scale_factor=2.0)
        F.embedding(torch.zeros(3, dtype=torch.int64, device="meta"), meta(9, 4))
    computing = [signature for signature, _ in described.calls if any(signature.inputs)]  # not those that fill
    assert len(computing) >= 12
    for signature in computing:
        assert estimate_cost(signature) == estimate_cost(signature._replace(outputs=None)), signature.name


def test_all_operators_of_a_training_step_have_a_cost() -> None:
    model = torch.nn.Sequential(
        torch.nn.Conv2d(3, 8, 3, stride=2, bias=False),
        torch.nn.BatchNorm2d(8),
        torch.nn.ReLU(inplace=True),
        torch.nn.MaxPool2d(2),
        torch.nn.GroupNorm(2, 8),
        torch.nn.Upsample(scale_factor=2),
        torch.nn.AdaptiveAvgPool2d(4),
        torch.nn.Flatten(2),
        torch.nn.TransformerEncoderLayer(16, 2, 32, activation="gelu", batch_first=True),
        torch.nn.RMSNorm(16),
        torch.nn.Flatten(),
        torch.nn.Dropout(),
        torch.nn.Linear(128, 10),
    )
    table = torch.nn.Embedding(50, 10)
    optimizers = [
        torch.optim.AdamW(model.parameters(), foreach=True),
        torch.optim.SGD(table.parameters(), momentum=0.9),
    ]
    with Described() as described:
        hidden = model(torch.rand(2, 3, 32, 32)) + table(torch.tensor([3, 7]))
        loss = F.cross_entropy(hidden, torch.tensor([1, 2])) + F.mse_loss(hidden, torch.zeros(2, 10))
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad(set_to_none=False)
    operators = [signature for signature, _ in described.calls if not signature.name.startswith("profiler::")]
    unknown = {signature.name for signature in operators if estimate_cost(signature) is None}
    assert len(operators) > 100
    assert unknown == set()


def test_the_pointwise_operators_of_pytorch_have_a_rule() -> None:
    """All of them but special functions, and operators that PyTorch replaces by others before it runs them."""
    composite = "CompositeImplicitAutograd"
    names = {
        str(overload._schema.name)
        for name in dir(torch.ops.aten)
        if hasattr(packet := getattr(torch.ops.aten, name), "overloads")
        for overload in (getattr(packet, entry) for entry in packet.overloads())
        if torch.Tag.pointwise in overload.tags
        and torch._C._dispatch_has_kernel(overload.name())
        and not torch._C._dispatch_has_kernel_for_dispatch_key(overload.name(), composite)
    }
    kinds = {name: getattr(cost(name, bf16(8), bf16(8), bf16(8)), "kind", None) for name in names}
    assert {name for name, kind in kinds.items() if kind is None} == set()
