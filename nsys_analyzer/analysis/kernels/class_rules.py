"""Declares the kernel classes, and the rules that find the class of a kernel by its name. The first match applies.

- A new class needs an entry of ``CLASSES`` and a rule.
- A new rule is a row in one of the tables below: class, pattern, and a real kernel name that the pattern matches.

:func:`nsys_analyzer.analysis.kernels.classes.classify` applies the rules. ``own_classes`` reads the classes of users.

torch.compile names a kernel ``triton_<kind>_fused_<op>_<op>_…_<n>``. The kinds are ``poi`` (pointwise), ``red`` and
``per`` (reductions), ``tem`` (a template, such as matmul or attention) and ``for`` (a horizontal fusion of
``torch._foreach`` calls, such as those of an optimizer). A reduction kernel is a softmax, a normalization or an
embedding if its name contains such an operator; the classes are tried in this order. A pointwise kernel is elementwise
with two exceptions. If its name lists only operators of another class and operators that move data, it has the other
class. If its name contains an embedding, it is an embedding. XLA names a fusion ``<kind>_<op>_…_fusion``. A fusion
without operators in its name, such as ``fusion_12``, has the class ``other``.

In a trace of a program without a GPU, PyTorch's operators take the place of kernels. An operator has the class of the
kernels that it launches on a GPU. An operator that only calls other operators, as ``aten::linear`` calls ``aten::mm``,
has the class of the operators that it calls, although its own time is short.

Most patterns for handwritten kernels start with ``AT_NAME`` or ``IN_NAME``, so that they match only in the qualified
name of the kernel, which ends at the template arguments. An elementwise kernel therefore stays elementwise if a functor
in its template arguments is called softmax. Rules are sorted from the most specific name to the least specific.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class KernelClass:
    """The explanation, the color and the letter of a kernel class in reports.

    Attributes:
        meaning: the explanation of the class in a report's glossary.
        color: the color of the class in figures, pages and bars. Only a class that often takes much time has its own
            color, since colors must be distinguishable. The color of any other class is empty, and a report gives all
            such classes one common color.
        letter: the letter of the class in bars without color. The letter of a class without its own color is empty, and
            a report gives all such classes one common letter.
    """

    meaning: str
    color: str = ""
    letter: str = ""


OTHER = "other"
#: The class of kernels whose name is missing in the capture.
UNKNOWN = "unknown"
COMPILED = "compiled"
#: The class of collectives. Their kernels spend most of their time waiting for the slowest rank.
COMMUNICATION = "communication"
#: The class of copies and fills of buffers, by a kernel or without a kernel.
FILLS = "memset/memcpy"
#: The classes of kernels that multiply matrices. A report states the precision of these kernels.
MATMUL, FUSED_ATTENTION = "matmul", "fused attention"

#: Every class by its name, in the order of a report's legend.
CLASSES: dict[str, KernelClass] = {
    MATMUL: KernelClass(
        "Matrix multiplications of any library: GEMM, batched GEMM, GEMV, dot, and their split-K reductions.",
        "#3377dd", "M",
    ),
    FUSED_ATTENTION: KernelClass(
        "Kernels that compute a whole attention (matmuls and softmax), and their helper kernels.", "#2233cc", "A"
    ),
    "softmax": KernelClass("Kernels named softmax or log-softmax, forward or backward.", "#880077", "S"),
    "reduction": KernelClass(
        "Sums, means, maxima and losses: kernels that read many elements and write few.", "#11aa55", "R"
    ),
    "elementwise": KernelClass(
        "Kernels that compute one output element per input element: arithmetic, activations, masks, fills, rotary.",
        "#ee5a14", "E",
    ),
    "copy/layout": KernelClass(
        "Kernels that move, cast or reorder elements: copy, cat, transpose, gather, scatter, indexing.", "#007755", "C"
    ),
    "normalization": KernelClass(
        "LayerNorm, RMSNorm, GroupNorm and BatchNorm, if one kernel has such a name.", "#005500", "N"
    ),
    "embedding": KernelClass("Lookups of rows in a table, and the addition of their gradients to it.", "#bb77aa", "B"),
    "convolution": KernelClass(
        "Convolutions, including implicit GEMM, and the transforms that they need.", "#3399ee", "V"
    ),
    "sort/scan": KernelClass("Sorting, top-k, prefix sums, selection and histograms.", "#558877", "K"),
    "optimizer": KernelClass(
        "Multi-tensor (foreach) and fused optimizer kernels, including gradient clipping.", "#bb0033", "O"
    ),
    "random": KernelClass("Random numbers and dropout masks.", "#779977", "D"),
    COMMUNICATION: KernelClass(
        "Collectives and exchanges between GPUs: NCCL, NVSHMEM, custom all-reduce.", "#9955aa", "G"
    ),
    FILLS: KernelClass("Copies and fills of whole buffers, which compute nothing.", "#556666", "F"),
    "input pipeline": KernelClass("Kernels that decode, crop, rotate or scale batches on the GPU: NVIDIA DALI."),
    UNKNOWN: KernelClass("Kernels whose name is missing in the capture.", "#554455", "?"),
    COMPILED: KernelClass(
        "Kernels of compilers that name them only by numbers or arguments: torch.compile of 2.0, nvFuser."
    ),
    OTHER: KernelClass(
        "Kernels that match no rule, and work without a class here: Fourier transforms, factorizations, solvers.",
        "#777788", "Z",
    ),
}  # fmt: skip

#: The classes of kernels in the forward and backward pass of a model. An optimizer usually runs no such kernels.
MODEL_CLASSES = (MATMUL, FUSED_ATTENTION, "convolution", "normalization", "embedding", "softmax")

#: The value of ``Rule.part_of`` for kernels that count as a convolution if a convolution launches them.
_CONVOLUTION_ONLY = ("convolution",)


@dataclass(frozen=True)
class Rule:
    """A rule that decides the class of a kernel by its name.

    Attributes:
        kernel_class: the class of each kernel whose name contains a match of ``pattern``.
        pattern: a regular expression.
        example: the name of a kernel that the rule matches, or the first part of the name.
        part_of: the other classes that a kernel may have: if an operator of one of these classes launches the kernel,
            the kernel has the operator's class. For example, cuDNN multiplies matrices to compute a convolution.
    """

    kernel_class: str
    pattern: str
    example: str
    part_of: tuple[str, ...] = ()


#: The start of a pattern that must match at the start of the kernel's function name. It matches the return type and
#: any number of namespaces before this name.
AT_NAME = (
    r"^(?:void |static )*(?:std::enable_if<.*?, void>::type )?"
    r"(?:\w+::|<unnamed>::|\(anonymous namespace\)::|\{anonymous\}::)*?"
)
#: The start of a pattern that may match anywhere in the qualified name of the kernel.
IN_NAME = AT_NAME + r"\w*?"


#: ATen operators that move elements or only change their shape, and compute nothing. No operator in this list may be a
#: sequence of other operators in the list, as ``index_select`` is: otherwise the search would take exponential time.
MOVING_OPERATORS = (
    r"(?:_to_copy|copy|clone|cat|stack|contiguous|concat|t|transpose|permute|view|_unsafe_view|reshape|expand|repeat"
    r"|slice|select|split|split_with_sizes|slice_backward|select_backward|unsqueeze"
    r"|squeeze|constant_pad_nd|as_strided|index|index_put|gather|scatter|flip|roll|unbind|detach|alias"
    r"|lift_fresh|unfold|unsafe_split|convert_element_type|_reshape_alias|repeat_interleave)"
)
_NORMALIZATIONS = r"_?(?:native_|fused_)?(?:layer|rms|group|batch)_norm(?:_legit)?(?:_no_training)?(?:_backward)?"
#: Operators that run kernels other than pointwise ones. A pointwise kernel with such an operator in its name only moves
#: the inputs or outputs of the operator.
_OPERATORS_WITH_MOVED_INPUTS = r"(?:_scaled_dot_product_\w+?_attention|fmha_v\d_(?:fwd|bwd)|moe_forward)"
_SOFTMAX_OPERATORS = r"_?(?:log_)?softmax(?:_backward_data)?"
_RANDOM_OPERATORS = r"(?:native_dropout|randn?|bernoulli|inductor_random|inductor_seeds)"
_REDUCTION_KERNEL = r"triton_(?:red|per|mix)_fused"
#: Matches torch.compile's C++ kernels with descriptive names, which list the fused operators.
_CPP_KERNEL = r"(?:graph_\d+_)?cpp_fused"

#: XLA operations that move or convert elements.
_XLA_MOVING_OPERATIONS = (
    r"(?:concatenate|transpose|copy|dynamic_slice|dynamic_update_slice|slice|gather|scatter|pad|broadcast|reshape"
    r"|bitcast|convert|reverse)"
)


def _fuses_only(operators: str) -> str:
    """Returns a pattern for pointwise kernels that fuse ``operators`` only with operators that move elements."""
    return rf"^triton_poi_fused(?:_{MOVING_OPERATORS})*_{operators}(?:_(?:{operators}|{MOVING_OPERATORS}))*(?:_\d+)?$"


_COMPILED_RULES: tuple[Rule, ...] = (
    Rule("memset/memcpy", r"(?i)^\[?(?:CUDA )?mem(?:cpy|set)", "[CUDA memcpy Host-to-Device]"),
    Rule("optimizer", r"^triton_.*(?:_foreach_|_fused_adam|_fused_sgd)|^triton_for_fused", "triton_for_fused_0"),
    Rule("fused attention", r"^triton_\w*flex_(?:attention|decoding)", "triton_tem_fused_flex_attention_backward"),
    Rule("convolution", r"^triton_tem_fused_\w*convolution|^triton_convolution", "triton_tem_fused_convolution_3"),
    Rule(
        "matmul",
        r"^triton_tem_|^triton_(?:b|add|badd)?mm|^nvfuser_matmul|^gemm_fusion|^(?:cublas|cutlass)_\w*fusion",
        "triton_tem_fused_bmm_7",
    ),
    Rule(
        "copy/layout",
        rf"^triton_poi_fused(?:_(?:{MOVING_OPERATORS}|{_OPERATORS_WITH_MOVED_INPUTS}))+(?:_\d+)?$",
        "triton_poi_fused_cat_70",
    ),
    Rule("softmax", _fuses_only(_SOFTMAX_OPERATORS), "triton_poi_fused__softmax_1"),
    Rule("normalization", _fuses_only(_NORMALIZATIONS), "triton_poi_fused_native_layer_norm_3"),
    Rule("random", _fuses_only(_RANDOM_OPERATORS), "triton_poi_fused_native_dropout_0"),
    Rule(
        "reduction", r"^triton_poi_\w*(?:max|avg)_pool\dd(?!\w*backward)", "triton_poi_fused_max_pool2d_with_indices_1"
    ),
    Rule("embedding", r"^triton_poi_fused_\w*embedding", "triton_poi_fused_add_embedding_0"),
    Rule("elementwise", r"^triton_poi_fused", "triton_poi_fused_mul_silu_8"),
    Rule("softmax", rf"^(?:triton|{_CPP_KERNEL})_\w*softmax", "triton_red_fused__log_softmax_nll_loss_forward_1"),
    Rule(
        "normalization",
        rf"^(?:{_REDUCTION_KERNEL}|{_CPP_KERNEL})_\w*(?:(?:layer|rms|group|batch)_norm|var_mean|mean\w*_rsqrt)|^nvfuser_\w*persistent",
        "triton_red_fused__to_copy_add_embedding_mean_mul_pow_rsqrt_10",
    ),
    Rule(
        "embedding",
        rf"^(?:{_REDUCTION_KERNEL}|{_CPP_KERNEL})_\w*embedding",
        "triton_per_fused_embedding_dense_backward_sum_view_21",
    ),
    Rule(
        "sort/scan",
        rf"^triton_spl_fused|^{_REDUCTION_KERNEL}(?:_\w+)?_(?:sort|topk|cumsum|cumprod)_",
        "triton_spl_fused_cumsum_0",
    ),
    Rule(
        "reduction",
        rf"^(?:{_REDUCTION_KERNEL}|nvfuser_reduction)|^(?:loop|input|wrapped)_(?:\w+_)?reduce(?:_|$)",
        "triton_red_fused__to_copy_clone_mul_sum_7",
    ),
    Rule(
        "copy/layout",
        r"^nvfuser_(?:transpose|resize)"
        rf"|^(?:(?:loop|input|wrapped)_)?{_XLA_MOVING_OPERATIONS}(?:_{_XLA_MOVING_OPERATIONS})*(?:_fusion)?(?:_\d+)*$",
        "loop_dynamic_update_slice_fusion",
    ),
    Rule(
        "elementwise",
        rf"^(?:{_CPP_KERNEL}_|nvfuser_pointwise|(?:loop|input)_\w*fusion|wrapped_)",
        "loop_multiply_transpose_fusion_17",
    ),
    # The kernel names of PyTorch 2.0's Inductor and of early nvFuser do not contain the operators of a kernel.
    Rule(COMPILED, r"^triton__(?=\d)[\dcde]+$|^CudaCodeGen::kernel\d|^nvfuser_", "triton__0d1d2d3de4de"),
)


#: Matches the end of an operator's name, with or without the ``_`` of an in-place operator. An overload may follow.
_OPERATOR_END = r"_?(?![A-Za-z0-9_])"

OPERATOR_RULES: tuple[Rule, ...] = (
    Rule("copy/layout", r"^aten::_foreach_copy" + _OPERATOR_END, "aten::_foreach_copy_"),
    Rule("optimizer", r"^aten::_?(?:foreach_|fused_(?:adam|sgd|adagrad)|amp_)", "aten::_fused_adamw_"),
    Rule(
        "fused attention",
        r"^aten::_?(?:scaled_dot_product_(?:\w*flash|efficient|cudnn|fused|attention_flash)|flash_attention"
        r"|efficient_attention|cudnn_attention)",
        "aten::_scaled_dot_product_flash_attention_for_cpu",
    ),
    Rule(
        "matmul",
        r"^(?:(?:aten|mkldnn|onednn|c10d|prims)::_?\w*(?:linear|matmul|einsum|tensordot)(?:_\w*pointwise|_backward\w*)?"
        r"|aten::_?(?:(?:add|b|addb|baddb|int_|scaled_|grouped_)?mm|addmv|mv|v?dot|inner|addr|ger)(?:_activation)?)"
        + _OPERATOR_END,
        "mkldnn::_linear_pointwise",
    ),
    Rule("softmax", r"^aten::\w*softmax", "aten::_softmax"),
    Rule("normalization", r"^aten::\w*(?:layer|rms|group|batch|instance)_norm", "aten::native_layer_norm"),
    Rule("embedding", r"^aten::_?embedding", "aten::embedding_dense_backward"),
    Rule(
        "convolution",
        r"^(?:aten|mkldnn|onednn|quantized)::\w*(?:convolution|conv_?\d?d|conv_transpose|conv_tbc)|^aten::_?conv"
        + _OPERATOR_END,
        "aten::mkldnn_convolution",
    ),
    Rule(
        "random",
        r"^aten::(?:normal|uniform|bernoulli|rand\w*|(?:native_|feature_)?dropout|multinomial|exponential|poisson"
        r"|log_normal|cauchy|geometric)" + _OPERATOR_END,
        "aten::normal_",
    ),
    Rule(
        "sort/scan",
        r"^aten::_?(?:sort|argsort|msort|topk|kthvalue|cum(?:sum|prod|max|min)|unique\w*|nonzero|searchsorted"
        r"|bucketize|bincount|histc)" + _OPERATOR_END,
        "aten::cumsum",
    ),
    Rule(
        "reduction",
        r"^aten::_?(?:nan)?(?:sum|mean|prod|max|min|amax|amin|aminmax|argmax|argmin|var|std|var_mean|std_mean|any|all"
        r"|norm|linalg_vector_norm|logsumexp|median|count_nonzero|trace)"
        + _OPERATOR_END
        + r"|^aten::\w*(?:_loss|nll_loss\w*|loss_backward|_pool\d?d?\w*)",
        "aten::sum",
    ),
    Rule("communication", r"^(?:_?c10d(?:_functional)?|_dtensor|symm_mem)::|^record_param_comms$", "c10d::allreduce_"),
    Rule(
        "memset/memcpy",  # Allocations that write no values belong to this class, too.
        r"^aten::(?:(?:new_)?empty|resize_|set_|_local_scalar_dense|item|_?pin_memory)",
        "aten::empty_strided",
    ),
    Rule(
        "copy/layout",
        rf"^aten::(?:{MOVING_OPERATORS}(?:_{MOVING_OPERATORS})?|to|take\w*|index_(?:add|copy)|_index_put_impl|scatter_(?:add|reduce)|masked_select"
        r"|masked_scatter|pad|narrow|flatten|chunk|unfold_backward|im2col|col2im"
        r"|resolve_(?:conj|neg)|result_type|type_as|unflatten|(?:expand|view|reshape|broadcast)_(?:as|to|tensors)|movedim|moveaxis"
        r"|swap(?:axes|dims)|diagonal\w*|numpy_T|[mM][TH]|adjoint|tile|[hvd]stack|meshgrid|unsafe_chunk|tensor_split|real"
        r"|imag|view_as_(?:real|complex)|_(?:un)?pack_padded\w*|_conj|rot90|pixel_\w+|_convert_indices\w*"
        r"|_nested_\w+|constant_pad\w*|reflection_pad\w*|replication_pad\w*|fliplr|flipud)" + _OPERATOR_END,
        "aten::copy_",
    ),
    Rule(
        "elementwise",
        r"^aten::_?(?:r?sub|add|mul|r?div|true_divide|neg|abs|exp2?|expm1|log\w{0,2}|pow|r?sqrt|square|reciprocal|erf\w*"
        r"|a?(?:sin|cos|tan)h?|atan2|sigmoid|silu|gelu|(?:leaky_)?relu6?|elu|softplus|threshold|glu|clamp\w*|where"
        r"|masked_fill|fill|zero|(?:new_)?(?:zeros|ones|full)(?:_like)?|scalar_tensor|arange|linspace|tri[lu]|lerp|addc(?:mul|div)|maximum|minimum"
        r"|f?mod|remainder|floor\w*|ceil|round|trunc|sign|eq|ne|lt|le|gt|ge|(?:bitwise|logical)_\w+|isnan|isfinite"
        r"|isin|nan_to_num|hardtanh|mish|hypot|polar|(?:linalg_)?cross|conj\w*|digamma|lgamma|i[01]e?|sinc|sgn|xlogy|erfinv|tri[lu]_indices|native_dropout)(?:_backward\w*)?"
        + _OPERATOR_END,
        "aten::add",
    ),
)

_LIBRARY_RULES: tuple[Rule, ...] = (
    # These kernels assign tokens to experts without other ranks, so they are not communication.
    Rule(
        "sort/scan",
        IN_NAME + r"(?:get_dispatch_layout|get_fused_mapping|count_expert|A2APrepareDispatch)",
        "void deep_ep::layout::get_dispatch_layout<256, 32, 8>(long const*, int*, int*, int*, bool*, int)",
    ),
    Rule(
        "communication",  # Includes mixtures of experts: DeepEP and its forks, TensorRT-LLM, FlashInfer, MoRI, pplx.
        AT_NAME
        + r"(?:[nr]?ccl|msccl|deep_ep|hybrid_ep|mori|quickreduce|symmetric_memory|nvshmem|userbuffers|barrier_kernel"
        r"|(?:inter|intra)node(?:_ll)?::|\w*?(?:A2A(?:Dispatch|Combine)|Ep(?:Dispatch|Combine)|notify_dispatch"
        r"|a2a_(?:dispatch|combine)_(?:send|recv)|(?i:cross_device_reduce|all_?reduce|all_?gather|reduce_?scatter"
        r"|all_?to_?all|multimem_|exchangeSplitAndOffset|(?:put|wait)_signal)))",
        "ncclDevKernel_ReduceScatter_Sum_bf16_RING_LL",
    ),
    Rule(
        "input pipeline", AT_NAME + r"dali::", "void dali::kernels::detail::gpu::FlipKernel<4ul, true, float>(float*)"
    ),
    # Rules for ATen kernels, which are named by the kind of their loop.
    Rule(
        "random",
        AT_NAME + r"(?:(?!fmha_)\w*?(?i:distribution_|dropout|philox|curand|bernoulli|gen_sequenced|generate_seed"
        r"|cupy_random)|\w*?PointwiseApply\d<.*(?:Distributions|bernoulli))",
        "void at::native::(anonymous namespace)::fused_dropout_kernel_vec<float, float, unsigned int, 1, 4>",
    ),
    Rule(
        "copy/layout",
        IN_NAME
        + r"(?:(?:_scatter_gather_|index_)elementwise_kernel|elementwise_kernel\w*<.*(?:copy_(?:kernel(?:_cuda|\b)"
        r"|device_to_device)|(?:flip|take_put|masked_scatter|unfold_backward_internal|conj)_kernel))",
        "void at::native::vectorized_elementwise_kernel<(int)8, at::native::bfloat16_copy_kernel_cuda(",
    ),
    Rule(
        "normalization",
        IN_NAME + r"elementwise_kernel\w*<.*(?:GroupNorm\w*KernelImpl|batch_norm_)",
        "void at::native::vectorized_elementwise_kernel<4, at::native::(anonymous namespace)::batch_norm_calc_invstd(",
    ),
    Rule(
        "elementwise",
        IN_NAME + r"(?:elementwise_kernel|PointwiseApply|triu_tril|fill_(?!Buffer)|upsample_|grid_sampler|_elemwise"
        r"|_vectorized\d_kernel|cross_kernel)",
        "void at::native::vectorized_elementwise_kernel<(int)4, at::native::FillFunctor<float>",
    ),
    # Rules for kernels with one unambiguous word in their name.
    Rule(
        "copy/layout",  # torch._foreach_copy_ runs this kernel, for example to cast parameters.
        IN_NAME + r"multi_tensor_apply_kernel<.*\bCopy(?:Functor)?\b",
        "void at::native::<unnamed>::multi_tensor_apply_kernel<at::native::<unnamed>::TensorListMetadata<(int)2>, "
        "at::native::<unnamed>::UnaryOpFunctor<float, (int)2, (int)1, (int)1>, at::native::Copy<float, float>>(",
    ),
    Rule(
        "optimizer",
        IN_NAME + r"(?:multi_tensor|[Aa]dam|lamb_stage|lpnorm_cleanup|sgd_|amp_update_scale)",
        "void multi_tensor_apply_kernel<TensorListMetadata<4>, AdamFunctor<float>>",
    ),
    Rule(
        "elementwise",  # Includes rotary embeddings, which look up no rows, and recurrent cells without their matmuls.
        AT_NAME
        + r"(?:\w*?(?i:rope|rotary)|elemWiseRNNcell|(?:LSTM|GRU|RNN|GENERIC)_\w*(?:elementWise|combine|accum|init)"
        r"|persistRNN_(?:add|init)|kernel::(?:lstm|gru)_cell_)",
        "void rotary_embedding_kernel<c10::BFloat16, true>",
    ),
    Rule(
        "softmax",
        IN_NAME + r"(?i:soft_?max)",
        "void at::native::(anonymous namespace)::cunn_SpatialSoftMaxForward<float>",
    ),
    Rule(
        "embedding",
        IN_NAME
        + r"(?i:embedding|compute_grad_weight|krn_partial|num_of_partial_segments|sum_and_scatter|linearize_index)",
        "void at::native::(anonymous namespace)::sum_and_scatter<float, long>",
    ),
    Rule(
        "normalization",
        AT_NAME + r"(?:\w*?(?:(?i:(?:layer|rms|group|batch|instance|weight|qk)_?norm|normalization|cuComputePart"
        r"|cuComputeGrad)|GammaBeta|RowwiseMoments|InternalGradients|FusedParams|ln_(?:fwd|bwd)|bn_(?:fw|bw))"
        r"|ck_tile::kentry<.*?(?:Layer|Rms)norm2d)",
        "void cuApplyLayerNorm<float, float, float>",
    ),
    Rule(
        "fused attention",
        AT_NAME
        + r"(?:(?:pytorch_)?flash::|fusion::(?:compute_dot_do_o|convert_d[qkv]|lean_reduction)|\w*?(?:fmha|_sdpa_"
        r"|flash_?(?:fwd|bwd)|[Ff]lash_?[Aa]tt|gemm_mha|attention|mha_(?:fwd|bwd)|_mla_|merge_attn|merge_state"
        r"|(?:Kernel2?|device_kernel|kentry)<.*(?:[Ff]lash|fmha|Fmha|FMHA|AttentionKernel))"
        r"|(?:Batch|Single)(?:Prefill|Decode)With)",
        "fmha_cutlassF_f32_aligned_64x64_rf_sm80",
    ),
    Rule(
        "fused attention",  # Triton kernels of the tutorial, FlashAttention, vLLM, SGLang, SageAttention and AOTriton.
        AT_NAME + r"(?:\w*attn_(?:fwd|bwd)|_(?:fwd|bwd)_(?:kernel|preprocess|grouped_kernel)|sage_(?:fwd|attn)"
        r"|_?bwd_(?:kernel_(?:fuse|dk_dv|dq)|preprocess)\b|reduce_segments$)",
        "_attn_fwd",
    ),
    # Rules for convolutions.
    Rule(
        "convolution",  # F.unfold and F.fold run these kernels without a convolution.
        IN_NAME + r"(?i:im2col|col2im|vol2col|vol2im)",
        "void at::native::im2col_kernel<c10::BFloat16>",
        ("copy/layout",),
    ),
    Rule(
        "convolution",  # Includes cuDNN's Fourier transforms, offset tables, and scaling and layout changes of tensors.
        AT_NAME + r"(?:(?:cudnn::cnn|cutlass\w*_cudnn\w*)::|fft[12]d_(?:r2c|c2r)_\d+|flip_filter"
        r"|pointwise_mult_and_sum_complex|\w*?(?:(?i:implicit_|convol|fprop|dgrad|wgrad|winograd|conv\d?d"
        r"|conv_depthwise)|(?:Kernel2?|device_kernel)<.*(?:fprop|dgrad|wgrad|ImplicitGemm|Conv2d)|[shi]cudnn|gcgemm"
        r"|compute\w*OffsetsKernel|scalePackedTensor|[nN](?:chw|hwc)To[nN]|ToFoldedN|n(?:chw|hwc)AddPadding))",
        "void implicit_convolve_sgemm<float, float, 128, 6, 7, 3, 3, 5, 1, false, true, true>",
    ),
    Rule(
        "convolution",  # MIOpen's convolutions, and MIOpen's transforms before and after a convolution.
        AT_NAME + r"(?:Im\dd2Col|Col2Im\dd|SubTensorOpWith|batched_transpose_\d+x|transpose_(?:CNHW2NCHW|NCHW2CNHW)"
        r"|\w*?(?:igemm_(?:fwd|bwd|wrw)_gtc|grouped_conv|conv_(?:fwd|bwd)|gemm_xdlops_bwd_weight|[aA]smConv|naive_conv))",
        "igemm_wrw_gtcx3_nhwc_bf16_bx0_ex1_bt256x128x16_wt32x32x8_ws2x1_wr2x2_ta1x4x1x4_1x4x1x64_tb1x4x1x2_1x4x1x64_gkgs",
    ),
    # Rules for matmuls, and for kernels before or after a matmul.
    Rule("reduction", AT_NAME + r"_finalize_matmul", "_finalize_matmul_scatter_bf16"),
    Rule(
        "copy/layout",
        AT_NAME + r"\w*gemm\w*::(?:\w+::)*transpose",
        "void grouped_gemm::utils::transpose<float>(float*)",
    ),
    Rule(
        "matmul",  # fbgemm is a library, not a GEMM. In TensorRT-LLM, the types of output and inputs follow bmm_.
        AT_NAME + r"(?:nvjet_|epilogue::impl::globalKernel|cublas|(?:dot_kernel|reduce_1Block_kernel)<.*[cC]ublas"
        r"|bmm_(?:Mx)?(?:E\dm\d|Bfloat16|Fp16|Fp32)_|_grouped_mm|\w*?(?:(?i:split_?k_?reduce|execute_split_k"
        r"|(?<!fb)gemm|gemv|trmv|addmm|sddmm|csrm[mv]|matmul|mul_mat|marlin|machete|Cijk_)|ck_moe_stage\d"
        r"|fused_moe_kernel|_mm_kernel|(?:Kernel2?|device_kernel)<.*(?i:(?<!fb)gemm)))",
        "volta_sgemm_64x64_nt",
        _CONVOLUTION_ONLY,
    ),
    # Rules for kernels that move data, and for the remaining kernels.
    Rule(
        "sort/scan",  # Includes kernels that assign tokens to experts: top-k, counts and prefix sums.
        AT_NAME + r"(?:rocprim::(?:\w+::)*partition|thrust::.*__(?:unique|merge_sort|scan|copy_if|partition)|\w*?(?:"
        r"(?i:(?<!ten)sort|Device\w*(?:Scan|Select|Unique|RunLength|Partition|Histo|Compact|ReduceByKey)|topk"
        r"|kernel_scan|write_indices|bucketize|searchsorted|gather(?:KthValue|Median)|compute_mode|inclusive_?\w*scan"
        r"|\bnms_|keep_from_mask|cupy_(?:scan|bsum))|lookback_scan|onesweep_|[rR]outing(?!\w*memset)"
        r"|trampoline_kernel<.*(?:scan|sort|partition|select|unique|histogram)|_sum_bitmatrix_rows"
        r"|kentry<[^,]*, (?:\w+::)*MoeSorting))",
        "void at::native::radixSortKVInPlace<2, -1, 32, 4, float, long, unsigned int>",
    ),
    Rule(
        "reduction",
        IN_NAME + r"Device(?:Segmented)?Reduce",
        "void at_cuda_detail::cub::detail::reduce::DeviceReduceSingleTileKernel<at_cuda_detail::cub::detail::reduce::",
        ("sort/scan",),
    ),
    Rule(
        "reduction",
        AT_NAME
        + r"(?:moe::(?:\w+::)*finalize|\w*?(?i:cross_?entropy|nll_?(?:loss|criterion)|reduce|reduction|argmax|argmin"
        r"|_pool(?!ed)|vector_norm|qparam|ctc_loss|margin_?loss|[cp]dist_|coalesceValues|roi_align|roi_pool"
        r"|cupy_(?:sum|mean|any|all|prod|[an]?max|[an]?min)))",
        "void at::native::reduce_kernel<(int)512, (int)1, at::native::ReduceOp<float, at::native::MaxOps<",
    ),
    Rule(
        "memset/memcpy",
        IN_NAME + r"(?:RepeatBuffer|[Mm]emset|setTensor|[Rr]edzone|__amd_rocclr_(?:fill|copy)Buffer)",
        "stream_executor::gpu::RepeatBufferKernelImpl",
    ),
    Rule(
        "copy/layout",
        IN_NAME + r"(?:tensorTransformGeneric|genericTranspose|transpose_readWrite|convertTensor)",
        "void cudnn::ops::convertTensor_kernel<float, float, float, (cudnnKernelDataType_t)2>",
        _CONVOLUTION_ONLY,
    ),
    Rule(
        "copy/layout",  # compute_cuda_kernel belongs to torch.repeat_interleave.
        AT_NAME
        + r"(?:compute_cuda_kernel|\w*?(?i:copy|CatArray|chunk_cat|gather|scatter|index_?(?:select|func|ing|put|add)"
        r"|transpose|permut|reshape_and_cache|store_kv_?cache|kv_indices|to_dense"
        r"|_pad\d?d?|roll_|flip(?:_|Kernel)|unpool|convert_indices|CooToCsr|lacpy|compressSparse|MetaDataReorder"
        r"|matrix_to_|expand_to_fused|cupy_(?:take|getitem)))",
        "void at::native::vectorized_gather_kernel<(int)16, long>",
    ),
    Rule(
        "elementwise",
        IN_NAME + r"(?i:silu|swiglu|geglu|gelu|relu|sigmoid|tanh|d?act_(?:and|kernel)|activation|quant|cast_"
        r"|_(?:add|mul|sub|div|bias|residual)_|axpy|scal_kernel|clamp|unary_kernel|bounds_check|offsets_range"
        r"|rowwise_to_float|token_ids|position_kernel|detail::(?:transform::)?transform_kernel|for_each::static_kernel"
        r"|scalar_multiply|BatchWarp|normalize_impl|^cupy_)",
        "void flashinfer::activation::act_and_mul_kernel<__nv_bfloat16, &(silu(float const&))>",
    ),
)

#: All rules. The first rule that matches applies.
RULES: tuple[Rule, ...] = (*_COMPILED_RULES, *OPERATOR_RULES, *_LIBRARY_RULES)
