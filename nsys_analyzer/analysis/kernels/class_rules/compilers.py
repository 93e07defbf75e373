"""Rules for names that a compiler wrote: torch.compile and XLA, which list their operators.

torch.compile names a kernel ``triton_<kind>_fused_<op>_<op>_…_<n>``: ``poi`` pointwise, ``red`` and ``per``
reductions, ``tem`` a template (matmul, attention), ``for`` a horizontal fusion of ``torch._foreach`` calls, as of an
optimizer. A reduction that names softmax, else a normalization, else an embedding is of that class. A pointwise kernel
is elementwise, unless its list holds nothing but moves, softmax, a normalization or random numbers, or an embedding at
all. XLA names a fusion ``<kind>_<op>_…_fusion``; a bare ``fusion_12`` stays ``other``.
"""

from __future__ import annotations

from nsys_analyzer.analysis.kernels.class_rules import rule
from nsys_analyzer.analysis.kernels.class_rules.rule import Rule

#: ATen operators that move or relabel elements and compute nothing. None is a sequence of others (``index_select``
#: is ``index``, ``select``), so that a list of them is read in one way only and fast.
MOVES = (
    r"(?:_to_copy|copy|clone|cat|stack|contiguous|concat|t|transpose|permute|view|_unsafe_view|reshape|expand|repeat"
    r"|slice|select|split|split_with_sizes|slice_backward|select_backward|unsqueeze"
    r"|squeeze|constant_pad_nd|as_strided|index|index_put|gather|scatter|flip|roll|unbind|detach|alias"
    r"|lift_fresh|unfold|unsafe_split|convert_element_type|_reshape_alias|repeat_interleave)"
)
_NORMS = r"_?(?:native_|fused_)?(?:layer|rms|group|batch)_norm(?:_legit)?(?:_no_training)?(?:_backward)?"
#: Operators whose own work is no pointwise kernel: one that names them moves their inputs or outputs.
_MOVED_FOR = r"(?:_scaled_dot_product_\w+?_attention|fmha_v\d_(?:fwd|bwd)|moe_forward)"
_SOFTMAX = r"_?(?:log_)?softmax(?:_backward_data)?"
_REDUCTION = r"^triton_(?:red|per|mix)_fused_\w*"

#: XLA operations that move or convert elements.
_XLA_MOVES = (
    r"(?:concatenate|transpose|copy|dynamic_slice|dynamic_update_slice|slice|gather|scatter|pad|broadcast|reshape"
    r"|bitcast|convert|reverse)"
)


def _only(operators: str) -> str:
    """Match a pointwise kernel that fuses one of ``operators`` and, besides them, nothing but moves."""
    return rf"^triton_poi_fused(?:_{MOVES})*_{operators}(?:_(?:{operators}|{MOVES}))*(?:_\d+)?$"


_COPY_RULES = (rule.memset_memcpy(r"(?i)^\[?(?:CUDA )?mem(?:cpy|set)", "[CUDA memcpy Host-to-Device]"),)

_INDUCTOR_RULES = (
    rule.optimizer(r"^triton_.*(?:_foreach_|_fused_adam|_fused_sgd)|^triton_for_fused", "triton_for_fused_0"),
    rule.fused_attention(
        r"^triton_(?:tem_fused_)?\w*(?:flex_attention|flex_decoding)",
        "triton_tem_fused_flex_attention_backward",
    ),
    rule.convolution(r"^triton_tem_fused_\w*convolution|^triton_convolution", "triton_tem_fused_convolution_3"),
    rule.matmul(r"^triton_tem_|^triton_(?:b|add|badd)?mm", "triton_tem_fused_bmm_7"),
    rule.copy_layout(rf"^triton_poi_fused(?:_(?:{MOVES}|{_MOVED_FOR}))+(?:_\d+)?$", "triton_poi_fused_cat_70"),
    rule.softmax(_only(_SOFTMAX), "triton_poi_fused__softmax_1"),
    rule.normalization(_only(_NORMS), "triton_poi_fused_native_layer_norm_3"),
    rule.random(
        _only(r"(?:native_dropout|randn?|bernoulli|inductor_random|inductor_seeds)"),
        "triton_poi_fused_native_dropout_0",
    ),
    rule.reduction(
        r"^triton_poi_fused_\w*(?:max|avg)_pool\dd(?!\w*backward)",
        "triton_poi_fused_max_pool2d_with_indices_1",
    ),
    rule.embedding(r"^triton_poi_fused_\w*embedding", "triton_poi_fused_add_embedding_0"),
    rule.elementwise(r"^triton_poi_fused", "triton_poi_fused_mul_silu_8"),
    rule.softmax(r"^triton_\w*softmax", "triton_red_fused__log_softmax_nll_loss_forward_1"),
    rule.normalization(
        _REDUCTION + r"(?:(?:layer|rms|group|batch)_norm|var_mean|mean\w*_rsqrt)",
        "triton_red_fused__to_copy_add_embedding_mean_mul_pow_rsqrt_10",
    ),
    rule.embedding(_REDUCTION + r"embedding", "triton_per_fused_embedding_dense_backward_sum_view_21"),
    rule.sort_scan(
        r"^triton_spl_fused|^triton_(?:red|per|mix)_fused(?:_\w+)?_(?:sort|topk|cumsum|cumprod)_",
        "triton_spl_fused_cumsum_0",
    ),
    rule.reduction(r"^triton_(?:red|per|mix)_fused", "triton_red_fused__to_copy_clone_mul_sum_7"),
)

_XLA_RULES = (
    rule.matmul(r"^gemm_fusion|^(?:cublas|cutlass)_\w*fusion", "gemm_fusion_dot_general_744"),
    rule.copy_layout(
        rf"^(?:(?:loop|input|wrapped)_)?{_XLA_MOVES}(?:_{_XLA_MOVES})*(?:_fusion)?(?:_\d+)*$",
        "loop_dynamic_update_slice_fusion",
    ),
    rule.reduction(r"^(?:loop|input|wrapped)_(?:\w+_)?reduce(?:_|$)", "input_reduce_fusion_92"),
    rule.elementwise(r"^(?:loop|input)_\w*fusion|^wrapped_", "loop_multiply_transpose_fusion_17"),
)

COMPILED_RULES: tuple[Rule, ...] = _COPY_RULES + _INDUCTOR_RULES + _XLA_RULES
