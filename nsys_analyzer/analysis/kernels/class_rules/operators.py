"""Rules for PyTorch's operators: what a trace of a machine without a GPU calls its kernels.

An operator is of the class of the kernels that it launches on a GPU. One that only calls others (``aten::linear``
calls ``aten::mm``) is of the class of its work, little as its own time is.
"""

from __future__ import annotations

from nsys_analyzer.analysis.kernels.class_rules import rule
from nsys_analyzer.analysis.kernels.class_rules.compilers import MOVES
from nsys_analyzer.analysis.kernels.class_rules.rule import Rule

#: The end of an operator's name: an in-place ``_``, then an overload, arguments or nothing.
_END = r"_?(?![A-Za-z0-9_])"
#: torch.compile's C++ kernels, where it is told to name them: they list what they fuse.
_CPP = r"^(?:graph_\d+_)?cpp_fused_"

OPERATOR_RULES: tuple[Rule, ...] = (
    rule.optimizer(r"^aten::_?(?:foreach_|fused_(?:adam|sgd|adagrad)|amp_)", "aten::_fused_adamw_"),
    rule.fused_attention(
        r"^aten::_?(?:scaled_dot_product_(?:\w*flash|efficient|cudnn|fused|attention_flash)|flash_attention|efficient_attention"
        r"|cudnn_attention)",
        "aten::_scaled_dot_product_flash_attention_for_cpu",
    ),
    rule.matmul(
        r"^(?:aten|mkldnn|onednn|c10d|prims)::_?\w*(?:linear|matmul|einsum|tensordot)(?:_\w*pointwise|_backward\w*)?"
        + _END,
        "mkldnn::_linear_pointwise",
    ),
    rule.matmul(
        r"^aten::_?(?:(?:add|b|addb|baddb|int_|scaled_|grouped_)?mm|addmv|mv|v?dot|inner|addr|ger)(?:_activation)?"
        + _END,
        "aten::addmm",
    ),
    rule.softmax(r"^aten::\w*softmax", "aten::_softmax"),
    rule.normalization(r"^aten::\w*(?:layer|rms|group|batch|instance)_norm", "aten::native_layer_norm"),
    rule.embedding(r"^aten::_?embedding", "aten::embedding_dense_backward"),
    rule.convolution(
        r"^(?:aten|mkldnn|onednn|quantized)::\w*(?:convolution|conv_?\d?d|conv_transpose|conv_tbc)|^aten::_?conv"
        + _END,
        "aten::mkldnn_convolution",
    ),
    rule.random(
        r"^aten::(?:normal|uniform|bernoulli|rand\w*|(?:native_|feature_)?dropout|multinomial|exponential|poisson"
        r"|log_normal|cauchy|geometric)" + _END,
        "aten::normal_",
    ),
    rule.sort_scan(
        r"^aten::_?(?:sort|argsort|msort|topk|kthvalue|cum(?:sum|prod|max|min)|unique\w*|nonzero|searchsorted"
        r"|bucketize|bincount|histc)" + _END,
        "aten::cumsum",
    ),
    rule.reduction(
        r"^aten::_?(?:nan)?(?:sum|mean|prod|max|min|amax|amin|aminmax|argmax|argmin|var|std|var_mean|std_mean|any|all"
        r"|norm|linalg_vector_norm|logsumexp|median|count_nonzero|trace)" + _END,
        "aten::sum",
    ),
    rule.reduction(r"^aten::\w*(?:_loss|nll_loss\w*|loss_backward|_pool\d?d?\w*)", "aten::nll_loss_forward"),
    rule.communication(r"^(?:_?c10d(?:_functional)?|_dtensor|symm_mem)::|^record_param_comms$", "c10d::allreduce_"),
    rule.memset_memcpy(  # Memory that is taken and not yet written.
        r"^aten::(?:new_)?(?:empty\w*|_empty_affine_quantized)|^aten::(?:resize_?|resize_as_?|set_)(?![a-z])",
        "aten::empty_strided",
    ),
    rule.memset_memcpy(r"^aten::(?:_local_scalar_dense|item|_pin_memory|pin_memory)" + _END, "aten::item"),
    rule.copy_layout(
        rf"^aten::(?:{MOVES}(?:_{MOVES})?|to|take\w*|index_(?:add|copy)|_index_put_impl|scatter_(?:add|reduce)|masked_select"
        r"|masked_scatter|pad|narrow|flatten|chunk|unfold_backward|im2col|col2im"
        r"|resolve_(?:conj|neg)|result_type|type_as|unflatten|(?:expand|view|reshape|broadcast)_(?:as|to|tensors)|movedim|moveaxis"
        r"|swap(?:axes|dims)|diagonal\w*|numpy_T|[mM][TH]|adjoint|tile|[hvd]stack|meshgrid|unsafe_chunk|tensor_split|real"
        r"|imag|view_as_(?:real|complex)|_(?:un)?pack_padded\w*|_conj|rot90|pixel_\w+|_convert_indices\w*"
        r"|_nested_\w+|constant_pad\w*|reflection_pad\w*|replication_pad\w*|fliplr|flipud)" + _END,
        "aten::copy_",
    ),
    rule.elementwise(
        r"^aten::_?(?:r?sub|add|mul|r?div|true_divide|neg|abs|exp2?|expm1|log\w{0,2}|pow|r?sqrt|square|reciprocal|erf\w*"
        r"|a?(?:sin|cos|tan)h?|atan2|sigmoid|silu|gelu|(?:leaky_)?relu6?|elu|softplus|threshold|glu|clamp\w*|where"
        r"|masked_fill|fill|zero|(?:new_)?(?:zeros|ones|full)(?:_like)?|scalar_tensor|arange|linspace|tri[lu]|lerp|addc(?:mul|div)|maximum|minimum"
        r"|f?mod|remainder|floor\w*|ceil|round|trunc|sign|eq|ne|lt|le|gt|ge|(?:bitwise|logical)_\w+|isnan|isfinite"
        r"|isin|nan_to_num|hardtanh|mish|hypot|polar|(?:linalg_)?cross|conj\w*|digamma|lgamma|i[01]e?|sinc|sgn|xlogy|erfinv|tri[lu]_indices|native_dropout)(?:_backward\w*)?"
        + _END,
        "aten::add",
    ),
    rule.softmax(_CPP + r"\w*softmax", "graph_0_cpp_fused__softmax_div_masked_fill_3"),
    rule.normalization(
        _CPP + r"\w*(?:(?:layer|rms|group|batch)_norm|var_mean|mean\w*_rsqrt)",
        "graph_0_cpp_fused_add_mean_mul_pow_rsqrt_0",
    ),
    rule.embedding(_CPP + r"\w*embedding", "graph_0_cpp_fused_embedding_0"),
    rule.elementwise(_CPP, "graph_0_cpp_fused_mul_silu_1"),
)
