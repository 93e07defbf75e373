"""Defines the rules for operators that move data and hardly compute.

These are elementwise operators, norms, softmax, reductions, copies, lookups, optimizers, collectives and the kernels of
torch.compile. Their FLOPs count each addition, multiplication, comparison and function of an element as one operation.
They are 0 for operators that compute less than one operation for each element that they move.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

from nsys_analyzer.analysis.operators.operands import (
    Call,
    Formula,
    OperatorKind,
    Rule,
    add,
    bytes_of,
    count_elements,
    count_stored_elements,
    nothing,
    operations,
    outputs_or,
    size_of,
)
from nsys_analyzer.trace.operator_calls import Signature, Tensor


def find_data_rule(signature: Signature) -> Rule | None:
    """Returns the rule of an operator that moves data, or None if the operator is unknown."""
    if signature.name.startswith("triton::triton_"):
        return _make_triton_rule(signature.name)
    return _DATA_RULES.get(signature.name)


# --- elementwise operators

#: The pointwise operators of PyTorch (the tag ``pointwise``) and their backward operators, by the number of tensors
#: that they read. A tensor after these is the output of an overload with ``out``.
_POINTWISE = {
    1: """
        abs acos acosh angle asin asinh atan atanh bernoulli bitwise_not ceil celu conj_physical cos cosh deg2rad
        digamma elu erf erfc erfinv exp exp2 expm1 floor frac frexp gelu glu hardshrink hardsigmoid hardswish hardtanh
        i0 isinf isnan isneginf isposinf leaky_relu lgamma log log10 log1p log2 log_sigmoid_forward logical_not logit
        mish mvlgamma nan_to_num native_dropout neg polygamma rad2deg reciprocal relu round rsqrt sgn sigmoid sign
        signbit silu sin sinc sinh softplus softshrink sqrt tan tanh threshold tril triu trunc
    """,
    2: """
        __ilshift__ __irshift__ __lshift__ __rshift__ _masked_scale _prelu_kernel add atan2 bitwise_and
        bitwise_left_shift bitwise_or bitwise_right_shift bitwise_xor clamp_max clamp_min complex copysign div
        elu_backward eq floor_divide fmax fmin fmod gcd ge gelu_backward glu_backward gt hardshrink_backward
        hardsigmoid_backward hardswish_backward hardtanh_backward heaviside hypot igamma igammac lcm ldexp le
        leaky_relu_backward logaddexp logaddexp2 logical_and logical_or logical_xor logit_backward lt maximum minimum
        mish_backward mul native_dropout_backward ne nextafter polar pow remainder rsub sigmoid_backward silu_backward
        softplus_backward softshrink_backward sub tanh_backward threshold_backward xlogy
    """,
    3: """
        _prelu_kernel_backward addcdiv addcmul binary_cross_entropy_backward clamp huber_loss_backward lerp
        log_sigmoid_backward masked_fill mse_loss_backward rrelu_with_noise_backward smooth_l1_loss_backward where
    """,
}
_TENSORS_READ = {name: count for count, names in _POINTWISE.items() for name in names.split()}
#: The pointwise operators that return boolean tensors.
_COMPARISONS = "eq ge gt isinf isnan isneginf isposinf le logical_and logical_not logical_or logical_xor lt ne signbit"


def _pointwise(name: str, *, in_place: bool) -> Rule:
    """Makes the rule of an operator that computes each element of its output from one element of each input."""

    def select(call: Call) -> list[Tensor]:
        return call.tensors()[: _TENSORS_READ[name]]

    def count_written(call: Call) -> float:
        sizes = [call.element_bytes(tensor) for tensor in select(call)]
        element_bytes = sizes[0] if in_place else 1 if name in _COMPARISONS.split() else max(sizes)
        return _count_broadcast_elements(select(call)) * element_bytes

    return Rule(
        "elementwise", lambda call: call.count_bytes(select(call)), outputs_or(count_written),
        lambda call: _count_broadcast_elements(select(call)),
    )  # fmt: skip


def _count_broadcast_elements(tensors: list[Tensor]) -> int:
    """Returns the number of elements to which PyTorch broadcasts tensors."""
    longest = max((len(tensor.shape) for tensor in tensors), default=0)
    shapes = [(1,) * (longest - len(tensor.shape)) + tensor.shape for tensor in tensors]
    return math.prod(next((size for size in sizes if size != 1), 1) for sizes in zip(*shapes, strict=True))


def _optimizer(flops_per_parameter: float, written: tuple[int, ...]) -> Rule:
    """Makes the rule of an operator that updates lists of tensors in place, such as parameters and their moments."""
    return Rule("optimizer", bytes_of(), size_of(*written), operations(flops_per_parameter))


def _read_by_addcmul(call: Call) -> float:
    """Returns the bytes that ``addcmul(self, tensor1, tensor2)`` reads.

    Optimizers pass the gradients as both factors. So two lists with the same shapes count as one list that is squared.
    """
    factors = call.signature.inputs[1:3]
    return call.count_bytes(call.tensors(0, 1) if len(set(factors)) == 1 else call.tensors(0, 1, 2))


# --- lookups and updates by index: they touch the elements that the indices select


def _elements(index: int, table: int = 0) -> Formula:
    """Makes a formula: the bytes of one element of a table for each element of an index."""
    return lambda call: count_elements(call.tensor(index)) * call.element_bytes(call.tensor(table))


def _rows(call: Call) -> float:
    """Returns the bytes that ``(table, index)`` selects: one row of the table for each element of the index."""
    return float(math.prod(call.tensor(0).shape[1:]) * _elements(1)(call))


def _slices(call: Call) -> float:
    """Returns the bytes that ``(table, dim, index)`` selects: a slice across the dimension for each element."""
    shape = call.tensor(0).shape
    return math.prod(shape) // max(1, shape[int(call.value(1))]) * _elements(2)(call)


def _table_gradient(call: Call) -> float:
    """Returns the bytes of the output of ``embedding_dense_backward(gradient, indices, rows)``: the whole table."""
    gradient = call.tensor(0)
    return float(call.value(2) * gradient.shape[-1] * call.element_bytes(gradient))


def _put(call: Call) -> float:
    """Returns the bytes that ``(table, indices, values)`` writes. A mask does not tell how many elements it selects."""
    indices = [tensor for tensor in call.tensors(1) if tensor.dtype not in ("bool", "uint8")]
    elements = max(_count_broadcast_elements(indices) if indices else 0, count_elements(call.tensor(2)))
    return elements * call.element_bytes(call.tensor(0))


def _accumulated(call: Call) -> float:
    """Returns the bytes that ``(table, indices, values, accumulate)`` reads of the table."""
    return _put(call) if call.value(3, False) else 0.0


def _returned(call: Call) -> float:
    """Returns the bytes of the outputs, as many of which are read from a table."""
    if call.outputs is None:
        raise call.unknown("outputs")
    return call.count_bytes(call.outputs)


def _lookup(selected: Formula, *others: int) -> Rule:
    """Makes the rule of an operator that returns selected elements, and also reads the tensors at other positions."""
    return Rule("embedding", add(selected, bytes_of(*others)), outputs_or(selected))


def _update(selected: Formula, *others: int, adds: bool = False) -> Rule:
    """Makes the rule of an operator that writes the selected elements of a table, or adds to them."""
    return Rule("embedding", add(selected if adds else nothing, bytes_of(*others)), selected)


# --- other formulas


def _resized(position: int, *, of_batch: bool = False) -> Formula:
    """Makes a formula: the bytes of an output with a given size, which excludes batch and channels if ``of_batch``."""

    def count(call: Call) -> float:
        source = call.tensor(0)
        batch = math.prod(source.shape[:2]) if of_batch else 1
        return float(batch * math.prod(call.value(position)) * call.element_bytes(source))

    return count


def _pooled(index_bytes: int) -> Formula:
    """Makes a formula: the bytes of the output of ``pool(self, kernel_size, stride, padding)`` and of its indices."""

    def count(call: Call) -> float:
        source, kernel = call.tensor(0), call.value(1)
        stride, padding = call.value(2, []) or kernel, call.value(3, [0] * len(kernel))
        windows = zip(source.shape[-len(kernel) :], kernel, stride, padding, strict=True)
        sizes = [(size + 2 * pad - width) // step + 1 for size, width, step, pad in windows]
        elements = math.prod(source.shape[: -len(kernel)]) * math.prod(sizes)
        return float(elements * (call.element_bytes(source) + index_bytes))

    return count


#: The kinds of the kernels of torch.compile by a word in their names. The first one that occurs applies.
_TRITON_KINDS: tuple[tuple[str, OperatorKind], ...] = (
    ("norm", "norm"), ("nll_loss", "cross entropy"), ("softmax", "softmax"), ("triton_poi", "elementwise"),
    ("triton_for", "optimizer"), ("triton_red", "reduction"), ("triton_per", "reduction"),
)  # fmt: skip


def _make_triton_rule(name: str) -> Rule | None:
    """Makes the rule of a kernel of torch.compile, ``triton_poi_fused_add_mul_0``, or returns None for other kernels.

    A kernel reads and writes no more elements of a buffer than it has iterations, whose numbers are its last arguments.
    In a source without outputs, a buffer that is read and written counts once.
    """

    def count_used(call: Call, tensors: Iterable[Tensor]) -> float:
        numbers = [int(text) for text in call.signature.arguments if text.isdigit()]
        iterations = math.prod(numbers) if numbers else math.inf
        return sum(min(count_stored_elements(x), iterations) * call.element_bytes(x) for x in tensors)

    kind = next((kind for word, kind in _TRITON_KINDS if word in name), None)
    if kind is None:
        return None
    return Rule(kind, lambda call: count_used(call, call.tensors()), lambda call: count_used(call, call.outputs or ()))


# --- the table

_IF_KNOWN = outputs_or(nothing)  # outputs that are much smaller than the inputs

#: The rules by names of operators; names without a namespace are in ``aten``.
_TABLE: tuple[tuple[str, Rule], ...] = (
    # Lists of tensors. AdamW for each parameter: decay 1, first moment 3, second moment 4, denominator 3, step 3. SGD:
    # decay 2, momentum 2, step 2. Adagrad: sum of squares 2, denominator 2, step 2 (the formulas of torch.optim).
    ("_fused_adam_ _fused_adamw_", _optimizer(14, (0, 2, 3, 4))),
    ("_fused_sgd_ _fused_adagrad_", _optimizer(6, (0, 2))),
    ("_amp_foreach_non_finite_check_and_unscale_ _amp_update_scale_", _optimizer(2, (0,))),
    ("_foreach_addcmul_", Rule("optimizer", _read_by_addcmul, size_of(0), operations(3))),
    ("addcmul addcmul_", Rule("elementwise", _read_by_addcmul, flops=operations(3))),
    ("_foreach_copy_", Rule("optimizer", bytes_of(1), size_of(0))),
    ("_foreach_zero_", Rule("optimizer", nothing, size_of(0))),
    ("_foreach_norm _foreach_max _foreach_powsum", Rule("optimizer", bytes_of(0), _IF_KNOWN, operations(2))),
    # Norms: mean 1, variance 3, normalization 2, weight and bias 2; RMS norm: squares 2, scale 1, weight 1. Backward:
    # normalized input 2, gradients of weight and bias 3, two sums 3, gradient of the input 6.
    ("native_layer_norm native_group_norm native_batch_norm cudnn_batch_norm miopen_batch_norm _native_batch_norm_legit"
     " _native_batch_norm_legit_functional _batch_norm_with_update", Rule("norm", flops=operations(8))),
    ("_fused_rms_norm batch_norm_elemt _weight_norm_interface _weight_norm_interface_backward",
     Rule("norm", flops=operations(4))),
    ("batch_norm_stats", Rule("norm", bytes_of(0), _IF_KNOWN, operations(4))),
    ("native_layer_norm_backward native_group_norm_backward native_batch_norm_backward batch_norm_backward"
     " cudnn_batch_norm_backward miopen_batch_norm_backward", Rule("norm", flops=operations(14))),
    ("_fused_rms_norm_backward", Rule("norm", flops=operations(10))),
    ("batch_norm_backward_reduce", Rule("norm", bytes_of(), _IF_KNOWN, operations(7))),
    ("batch_norm_backward_elemt", Rule("norm", flops=operations(7))),
    # Softmax: maximum, difference, exponential, sum, quotient. Backward: product, sum, difference, product.
    ("_softmax _log_softmax _safe_softmax _masked_softmax", Rule("softmax", bytes_of(0, 1), flops=operations(5))),
    ("_softmax_backward_data _log_softmax_backward_data", Rule("softmax", bytes_of(0, 1), flops=operations(4))),
    # Losses. Cross entropy reads one logarithm for each target.
    ("nll_loss_forward nll_loss2d_forward", Rule("cross entropy", add(_elements(1), bytes_of(1, 2)), _IF_KNOWN)),
    ("nll_loss_backward nll_loss2d_backward",
     Rule("cross entropy", bytes_of(0, 2, 3, 6), outputs_or(size_of(1)))),
    ("mse_loss smooth_l1_loss huber_loss binary_cross_entropy binary_cross_entropy_with_logits",
     Rule("reduction", bytes_of(0, 1, 2, 3), _IF_KNOWN, operations(3))),
    # Reductions, scans and searches.
    ("sum nansum mean amax amin max min aminmax argmax argmin prod std var std_mean var_mean norm linalg_vector_norm"
     " all any logsumexp equal count_nonzero median nanmedian mode kthvalue",
     Rule("reduction", bytes_of(0, 1), _IF_KNOWN, operations(1))),
    ("cumsum cumsum_ cumprod cumprod_ logcumsumexp cummax cummin", Rule("reduction", bytes_of(0), flops=operations(1))),
    ("sort _fft_c2c _fft_r2c _fft_c2r", Rule("other", bytes_of(0))),
    ("topk unique_consecutive _unique2 unique_dim histc bincount multinomial nonzero masked_select searchsorted"
     " bucketize isin", Rule("other", bytes_of(0, 1), _IF_KNOWN)),
    ("_thnn_fused_lstm_cell _thnn_fused_lstm_cell_backward_impl _thnn_fused_gru_cell _thnn_fused_gru_cell_backward",
     Rule("elementwise", flops=operations(1))),
    # Pooling and interpolation.
    ("max_pool2d_with_indices max_pool3d_with_indices", Rule("reduction", bytes_of(0), outputs_or(_pooled(8)))),
    ("avg_pool2d avg_pool3d", Rule("reduction", bytes_of(0), outputs_or(_pooled(0)))),
    ("_adaptive_avg_pool2d _adaptive_avg_pool3d adaptive_max_pool2d adaptive_max_pool3d",
     Rule("reduction", bytes_of(0), outputs_or(_resized(1, of_batch=True)))),
    ("max_pool2d_with_indices_backward max_pool3d_with_indices_backward",
     Rule("reduction", bytes_of(0, 7), outputs_or(size_of(1)))),
    ("adaptive_max_pool2d_backward adaptive_max_pool3d_backward",
     Rule("reduction", bytes_of(0, 2), outputs_or(size_of(1)))),
    ("avg_pool2d_backward avg_pool3d_backward _adaptive_avg_pool2d_backward _adaptive_avg_pool3d_backward",
     Rule("reduction", bytes_of(0), outputs_or(size_of(1)))),
    ("upsample_nearest1d upsample_nearest2d upsample_nearest3d upsample_linear1d upsample_bilinear2d upsample_bicubic2d"
     " upsample_trilinear3d _upsample_nearest_exact2d _upsample_bilinear2d_aa _upsample_bicubic2d_aa",
     Rule("elementwise", bytes_of(0), outputs_or(_resized(1, of_batch=True)))),
    ("upsample_nearest1d_backward upsample_nearest2d_backward upsample_nearest3d_backward upsample_linear1d_backward"
     " upsample_bilinear2d_backward upsample_bicubic2d_backward upsample_trilinear3d_backward"
     " _upsample_nearest_exact2d_backward _upsample_bilinear2d_aa_backward _upsample_bicubic2d_aa_backward",
     Rule("elementwise", bytes_of(0), outputs_or(_resized(2)))),
    # Lookups and updates by index.
    ("embedding", _lookup(_rows, 1)),
    ("_embedding_bag _embedding_bag_forward_only", Rule("embedding", add(_rows, bytes_of(1, 2, 6)), _IF_KNOWN)),
    ("embedding_dense_backward", Rule("embedding", bytes_of(0, 1), outputs_or(_table_gradient))),
    ("index_select", _lookup(_slices, 2)),
    ("gather", _lookup(_elements(2), 2)),
    ("take", _lookup(_elements(1), 1)),
    ("index _unsafe_index grid_sampler_2d grid_sampler_3d", _lookup(_returned, 1)),
    ("index_put_ _index_put_impl_", Rule("embedding", add(_accumulated, bytes_of(1, 2)), _put)),
    ("scatter_", _update(_elements(2), 2, 3)),
    ("scatter_add_ scatter_reduce_", _update(_elements(2), 2, 3, adds=True)),
    ("index_copy_ index_fill_", _update(_slices, 2, 3)),
    ("index_add_ index_reduce_", _update(_slices, 2, 3, adds=True)),
    ("scatter scatter_add scatter_reduce index_add index_reduce index_copy index_fill index_put _unsafe_index_put"
     " slice_scatter select_scatter grid_sampler_2d_backward grid_sampler_3d_backward"
     " _embedding_bag_dense_backward", Rule("embedding", bytes_of(0, 1, 2, 3))),
    # Copies and new tensors.
    ("copy_", Rule("copy", bytes_of(1), size_of(0))),
    ("_local_scalar_dense", Rule("copy", bytes_of(0), nothing)),
    ("_to_copy clone cat stack _reshape_copy expand_copy permute_copy view_copy flip roll repeat repeat_interleave"
     " constant_pad_nd reflection_pad1d reflection_pad2d replication_pad1d replication_pad2d replication_pad3d"
     " slice_backward select_backward im2col col2im unfold_backward pixel_shuffle pixel_unshuffle channel_shuffle"
     " as_strided_copy slice_copy t_copy transpose_copy select_copy rot90 diag_embed", Rule("copy", bytes_of(0))),
    ("reflection_pad1d_backward reflection_pad2d_backward replication_pad1d_backward replication_pad2d_backward"
     " replication_pad3d_backward", Rule("copy", bytes_of(0), outputs_or(size_of(1)))),
    ("split_with_sizes_copy _chunk_cat fsdp::all_gather_copy_in fsdp::split_with_sizes_copy fsdp::chunk_cat",
     Rule("copy", bytes_of(0), size_of(0))),
    ("zeros ones full zeros_like ones_like full_like new_zeros new_ones new_full fill_ zero_ normal_ uniform_"
     " bernoulli_ exponential_ random_ log_normal_ cauchy_ geometric_ arange linspace logspace eye rand randn randint"
     " rand_like randn_like randint_like randperm tril_indices triu_indices scalar_tensor normal hann_window",
     Rule("copy", nothing)),
    ("empty empty_like empty_strided new_empty new_empty_strided empty_permuted _unsafe_view resize_ set_ unsafe_split"
     " unsqueeze_ squeeze_ transpose_ t_",
     Rule("other", nothing, nothing)),
    # Collectives: what this rank gives and receives.
    ("c10d::allreduce_ c10d::allreduce_coalesced_ c10d::reduce_ _c10d_functional::all_reduce_",
     Rule("collective", bytes_of(0), size_of(0))),
    ("c10d::broadcast_ c10d::send c10d::recv_", Rule("collective", bytes_of(0), nothing)),
    ("c10d::_allgather_base_ c10d::allgather_ c10d::allgather_into_tensor_coalesced_ c10d::_reduce_scatter_base_"
     " c10d::reduce_scatter_ c10d::reduce_scatter_tensor_coalesced_ c10d::alltoall_base_ c10d::alltoall_ c10d::gather_"
     " c10d::scatter_", Rule("collective", bytes_of(1), size_of(0))),
    ("_c10d_functional::all_reduce _c10d_functional::all_gather_into_tensor _c10d_functional::reduce_scatter_tensor"
     " _c10d_functional::all_to_all_single _c10d_functional::broadcast", Rule("collective", bytes_of(0))),
)  # fmt: skip
_DATA_RULES: dict[str, Rule] = {
    **{f"aten::{name}": _pointwise(name, in_place=False) for name in _TENSORS_READ},
    **{f"aten::{name}_": _pointwise(name, in_place=True) for name in _TENSORS_READ},
    **{
        f"aten::_foreach_{name}{suffix}": Rule("optimizer", bytes_of(*range(count)), written, operations(1))
        for name, count in _TENSORS_READ.items()
        for suffix, written in (("", outputs_or(size_of(0))), ("_", size_of(0)))
    },
    **{name if "::" in name else f"aten::{name}": rule for names, rule in _TABLE for name in names.split()},
}
