"""Classes of PyTorch's operators, as traces of machines without a GPU name them."""

from __future__ import annotations

import re

import pytest

from nsys_analyzer.analysis.kernels.class_rules import OPERATOR_RULES, OTHER
from nsys_analyzer.analysis.kernels.classes import classify
from tests.test_classes import NAMES

OPERATORS = {
    "matmul": [
        "aten::mm", "aten::bmm", "aten::addmm", "aten::baddbmm", "aten::mv", "aten::dot", "aten::matmul",
        "aten::linear_backward", "aten::_int_mm", "aten::einsum", "aten::mkldnn_linear", "mkldnn::_linear_pointwise",
        "aten::mkldnn_linear_backward_weights",
    ],
    "fused attention": [
        "aten::_scaled_dot_product_flash_attention_for_cpu_backward", "aten::_scaled_dot_product_efficient_attention",
    ],
    "softmax": ["aten::softmax", "aten::_log_softmax", "aten::_softmax_backward_data", "graph_0_cpp_fused__softmax_3"],
    "reduction": [
        "aten::sum", "aten::mean", "aten::amax", "aten::nll_loss_forward", "aten::nll_loss_nd",
        "aten::cross_entropy_loss", "aten::linalg_vector_norm", "aten::max",
    ],
    "elementwise": [
        "aten::mul", "aten::add_", "aten::zero_", "aten::zeros_like", "aten::ones", "aten::new_full", "aten::fill_",
        "aten::addcdiv_", "aten::silu", "aten::gelu_backward", "aten::rsqrt", "aten::triu", "aten::lerp_",
        "graph_0_cpp_fused_add_mul_0",
    ],
    "copy/layout": [
        "aten::copy_", "aten::_to_copy", "aten::to", "aten::t", "aten::view", "aten::_unsafe_view", "aten::expand",
        "aten::resolve_conj", "aten::as_strided", "aten::unflatten", "aten::index_select", "aten::slice_backward",
        "aten::type_as", "aten::contiguous", "aten::_reshape_alias",
    ],
    "memset/memcpy": ["aten::empty", "aten::empty_like", "aten::new_empty_strided", "aten::resize_", "aten::item"],
    "normalization": [
        "aten::rms_norm", "aten::_fused_rms_norm", "aten::native_layer_norm_backward", "cpp_fused_native_layer_norm_1",
    ],
    "embedding": ["aten::embedding", "aten::embedding_dense_backward"],
    "convolution": ["aten::conv2d", "aten::convolution_backward", "mkldnn::_convolution_pointwise"],
    "optimizer": ["aten::_foreach_mul_", "aten::_fused_adamw_"],
    "random": ["aten::randn", "aten::bernoulli_", "aten::uniform_"],
    "sort/scan": ["aten::topk", "aten::cumsum", "aten::sort"],
    "communication": ["c10d::allreduce_", "_c10d_functional::all_reduce"],
    OTHER: ["aten::no_such_operator", "my_library::attend", "CompiledFxGraph"],
}  # fmt: skip


@pytest.mark.parametrize(("name", "kernel_class"), [(name, one) for one, names in OPERATORS.items() for name in names])
def test_an_operator_is_of_its_class(name: str, kernel_class: str) -> None:
    assert classify(name) == kernel_class


def test_no_rule_of_operators_catches_a_kernel() -> None:
    """A library's kernel has its type before it, arguments behind it, or no namespace of operators at all."""
    namespaces = ("aten::", "mkldnn::", "onednn::", "quantized::", "prims::", "c10d::", "_c10d_", "record_param_comms")
    kernels = [name for _, name in NAMES if not name.startswith(namespaces)]
    assert len(kernels) > 80
    caught = [name for name in kernels if any(re.search(rule.pattern, name) for rule in OPERATOR_RULES)]
    assert [name for name in caught if "cpp_fused" not in name] == []
