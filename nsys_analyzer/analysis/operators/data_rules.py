"""Defines the rules for operators that move data and hardly compute.

These are elementwise operators, norms, softmax, reductions, copies, lookups, optimizers, collectives and the kernels of
torch.compile. Their FLOPs count each addition, multiplication, comparison and function of an element as one operation.
"""

from __future__ import annotations

import math

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
        abs absolute acos acosh angle arccos arccosh arcsin arcsinh arctan arctanh asin asinh atan atanh bitwise_not
        ceil celu clip conj_physical cos cosh deg2rad digamma elu erf erfc erfinv exp exp2 expm1 fix floor frac frexp
        gelu glu hardshrink hardsigmoid hardswish hardtanh i0 isfinite isinf isnan isneginf isposinf leaky_relu lgamma
        log log10 log1p log2 log_sigmoid log_sigmoid_forward logical_not logit mish mvlgamma nan_to_num native_dropout
        neg negative polygamma positive rad2deg reciprocal relu relu6 round rrelu rsqrt selu sgn sigmoid sign signbit
        silu sin sinc sinh softplus softshrink special_bessel_j0 special_bessel_j1 special_entr special_erfcx
        special_i0e special_i1 special_i1e special_log_ndtr special_ndtri sqrt square tan tanh threshold tril triu
        trunc
    """,
    2: """
        __and__ __ilshift__ __irshift__ __ixor__ __lshift__ __or__ __rshift__ __xor__ _prelu_kernel add arctan2 atan2
        bitwise_and bitwise_left_shift bitwise_or bitwise_right_shift bitwise_xor clamp_max clamp_min copysign div
        divide elu_backward eq float_power floor_divide fmax fmin fmod gcd ge gelu_backward glu_backward greater
        greater_equal gt hardshrink_backward hardsigmoid_backward hardswish_backward hardtanh_backward heaviside hypot
        igamma igammac lcm ldexp le leaky_relu_backward less less_equal logaddexp logaddexp2 logical_and logical_or
        logical_xor logit_backward lt maximum minimum mish_backward mul multiply native_dropout_backward ne nextafter
        not_equal pow remainder rsub sigmoid_backward silu_backward softplus_backward softshrink_backward
        special_xlog1py special_zeta sub subtract tanh_backward threshold_backward true_divide xlogy
    """,
    3: """
        _prelu_kernel_backward addcdiv addcmul binary_cross_entropy_backward clamp huber_loss_backward lerp
        log_sigmoid_backward masked_fill mse_loss_backward rrelu_with_noise_backward smooth_l1_loss_backward where
    """,
}
_TENSORS_READ = {name: count for count, names in _POINTWISE.items() for name in names.split()}
#: The pointwise operators that return boolean tensors.
_COMPARISONS = """
    eq ge greater greater_equal gt isfinite isinf isnan isneginf isposinf le less less_equal logical_and logical_not
    logical_or logical_xor lt ne not_equal signbit
"""


def _pointwise(name: str, *, in_place: bool) -> Rule:
    """Makes the rule of an operator that computes each element of its output from one element of each input."""

    def select(call: Call) -> list[Tensor]:
        return call.tensors()[: _TENSORS_READ[name]]

    def count_flops(call: Call) -> float:
        return float(_count_broadcast_elements(select(call)))

    def count_written(call: Call) -> float:
        if in_place:
            return size_of(0)(call)
        tensors = select(call)
        element_bytes = 1 if name in _COMPARISONS.split() else max(map(call.element_bytes, tensors))
        return _count_broadcast_elements(tensors) * element_bytes

    return Rule(
        "elementwise", count_flops, lambda call: call.count_bytes(select(call)), _outputs_if_returned_or(count_written)
    )


def _count_broadcast_elements(tensors: list[Tensor]) -> int:
    """Returns the number of elements to which PyTorch broadcasts tensors."""
    longest = max((len(tensor.shape) for tensor in tensors), default=0)
    shapes = [(1,) * (longest - len(tensor.shape)) + tensor.shape for tensor in tensors]
    return math.prod(next((size for size in sizes if size != 1), 1) for sizes in zip(*shapes, strict=True))


def _outputs_if_returned_or(otherwise: Formula) -> Formula:
    """Makes a formula: the bytes of the outputs, or another formula if they are unknown or not returned."""
    return lambda call: call.count_bytes(call.outputs) if call.outputs else otherwise(call)


def _foreach(name: str) -> Rule:
    """Makes the rule of a pointwise operator on each tensor of a list; further arguments may be lists, too."""
    read = bytes_of(*range(_TENSORS_READ[name]))
    return Rule("optimizer", operations(1, 0), read, _outputs_if_returned_or(size_of(0)))


def _optimizer(operations_per_parameter: float, written: tuple[int, ...]) -> Rule:
    """Makes the rule of an optimizer that updates lists of tensors: the parameters at position 0, and its state."""
    return Rule("optimizer", operations(operations_per_parameter, 0), bytes_of(), size_of(*written))


# --- lookups and updates by index: they touch the elements that the indices select


def _selected(index: int, values: int = 0) -> Formula:
    """Makes a formula: the bytes of one element of ``values`` for each element of ``index``."""
    return lambda call: count_elements(call.tensor(index)) * call.element_bytes(call.tensor(values))


def _selected_rows(index: int) -> Formula:
    """Makes a formula: the bytes of one row of the table at position 0 for each element of ``index``."""

    def count(call: Call) -> float:
        table = call.tensor(0)
        return count_elements(call.tensor(index)) * math.prod(table.shape[1:]) * call.element_bytes(table)

    return count


def _selected_slices(call: Call) -> float:
    """Returns the bytes that ``(self, dim, index)`` selects: a slice across the dimension for each index."""
    table = call.tensor(0)
    slice_elements = count_elements(table) // max(1, table.shape[int(call.value(1))])
    return count_elements(call.tensor(2)) * slice_elements * call.element_bytes(table)


def _put_elements(call: Call) -> float:
    """Returns the bytes that ``index_put_(self, indices, values)`` writes; a mask does not tell how many it selects."""
    indices = [tensor for tensor in call.tensors(1) if tensor.dtype not in ("bool", "uint8")]
    elements = max(_count_broadcast_elements(indices) if indices else 0, count_elements(call.tensor(2)))
    return elements * call.element_bytes(call.tensor(0))


def _put(call: Call) -> float:
    """Returns the bytes that ``index_put_(self, indices, values, accumulate)`` reads."""
    return bytes_of(1, 2)(call) + (_put_elements(call) if call.value(3, False) else 0.0)


def _outputs_are_read(call: Call) -> float:
    """Returns the bytes of the outputs, as many of which are read from the source."""
    if call.outputs is None:
        raise call.unknown("outputs")
    return call.count_bytes(call.outputs)


def _lookup(selected: Formula, *others: int) -> Rule:
    """Makes the rule of an operator that returns selected elements, and reads the tensors at other positions."""
    return Rule("embedding", nothing, add(selected, bytes_of(*others)), outputs_or(selected))


def _update(selected: Formula, *others: int, reads_selected: bool = False) -> Rule:
    """Makes the rule of an operator that changes the selected elements of the tensor at position 0."""
    read = add(selected, bytes_of(*others)) if reads_selected else bytes_of(*others)
    return Rule("embedding", nothing, read, selected)


# --- other formulas


def _given_elements(position: int, *, of_batch: bool = False) -> Formula:
    """Makes a formula: the bytes of an output whose size is an argument; ``of_batch`` adds the dimensions 0 and 1."""

    def count(call: Call) -> float:
        source, sizes = call.tensor(0), call.value(position)
        batch = math.prod(source.shape[:2]) if of_batch else 1
        return batch * float(math.prod(sizes)) * call.element_bytes(source)

    return count


def _pooled(bytes_of_index: int) -> Formula:
    """Makes a formula: the bytes of the output of ``pool(self, kernel_size, stride, padding)`` with indices."""

    def count(call: Call) -> float:
        source, kernel = call.tensor(0), call.value(1)
        stride, padding = call.value(2, []) or kernel, call.value(3, 0)
        dimensions = len(kernel)
        padding = [padding] * dimensions if isinstance(padding, int) else padding
        sizes = [
            (size + 2 * pad - width) // step + 1
            for size, pad, width, step in zip(source.shape[-dimensions:], padding, kernel, stride, strict=True)
        ]
        elements = math.prod(source.shape[:-dimensions]) * math.prod(sizes)
        return float(elements) * (call.element_bytes(source) + bytes_of_index)

    return count


def _fft_operations(per_element: float) -> Formula:
    """Makes a formula: the operations of a fast Fourier transform over the dimensions in the argument at position 1."""

    def count(call: Call) -> float:
        source = call.tensor(0)
        length = math.prod(source.shape[dimension] for dimension in call.value(1))
        return per_element * count_elements(source) * math.log2(max(1, length))

    return count


def _make_triton_rule(name: str) -> Rule | None:
    """Makes the rule of a kernel of torch.compile, ``triton_poi_fused_add_mul_0``, or returns None for other kernels.

    A kernel reads no more elements of a buffer than it has iterations, whose numbers are its last arguments. A buffer
    that is read and written counts once, because the arguments do not tell it from one that is only written.
    """
    category, _, operators = name.removeprefix("triton::triton_").partition("_fused_")
    if category not in ("poi", "red", "per", "for"):
        return None
    kinds: dict[str, OperatorKind] = {"norm": "norm", "softmax": "softmax", "nll_loss": "cross entropy"}
    kind = next((kind for word, kind in kinds.items() if word in operators), None)
    if kind is None:
        kind = {"poi": "elementwise", "for": "optimizer"}.get(category, "reduction")  # type: ignore[assignment]

    def count(call: Call) -> float:
        numbers = [int(text) for text in call.signature.arguments if text.isdigit()]
        iterations = math.prod(numbers) if numbers else math.inf
        return sum(min(count_stored_elements(x), iterations) * call.element_bytes(x) for x in call.tensors())

    return Rule(kind or "elementwise", nothing, count, nothing)


# --- the table

_ONE_OPERATION = operations(1, 0)
_AS_FIRST = outputs_or(size_of(0))
_SMALL = outputs_or(nothing)  # outputs that are much smaller than the inputs

#: The rules by names of operators; names without a namespace are in ``aten``. If the outputs are unknown, the source is
#: a trace that also contains the operators that an operator calls, such as the one that fills a gradient with zeros.
_TABLE: tuple[tuple[str, Rule], ...] = (
    # --- lists of tensors, and optimizers
    ("_foreach_copy_", Rule("optimizer", nothing, bytes_of(1), size_of(0))),
    ("_foreach_zero_", Rule("optimizer", nothing, nothing, size_of(0))),
    ("_foreach_norm _foreach_max _foreach_powsum", Rule("optimizer", operations(2, 0), bytes_of(0), _SMALL)),
    ("_amp_foreach_non_finite_check_and_unscale_", _optimizer(2, (0,))),
    # AdamW for each parameter: decay 1, first moment 3, second moment 4, denominator 3, step 3 (torch.optim.AdamW).
    ("_fused_adam_ _fused_adamw_", _optimizer(14, (0, 2, 3, 4))),
    # SGD: decay 2, momentum 2, step 2 (torch.optim.SGD). Adagrad: sum of squares 2, denominator 2, step 2.
    ("_fused_sgd_ _fused_adagrad_", _optimizer(6, (0, 2))),
    # --- norms: mean 1, variance 3, normalization 2, weight and bias 2; RMS norm: squares 2, scale 1, weight 1
    (
        """native_layer_norm native_group_norm native_batch_norm cudnn_batch_norm miopen_batch_norm
        _native_batch_norm_legit _native_batch_norm_legit_functional _batch_norm_with_update""",
        Rule("norm", operations(8, 0)),
    ),
    ("_fused_rms_norm batch_norm_elemt", Rule("norm", operations(4, 0))),
    ("batch_norm_stats", Rule("norm", operations(4, 0), bytes_of(0), _SMALL)),
    # Backward: normalized input 2, gradients of weight and bias 3, two sums 3, gradient of the input 6.
    (
        """native_layer_norm_backward native_batch_norm_backward batch_norm_backward cudnn_batch_norm_backward
        miopen_batch_norm_backward native_group_norm_backward""",
        Rule("norm", operations(14, 0)),
    ),
    ("_fused_rms_norm_backward", Rule("norm", operations(10, 0))),
    ("batch_norm_backward_reduce", Rule("norm", operations(7, 0), bytes_of(), _SMALL)),
    ("batch_norm_backward_elemt", Rule("norm", operations(7, 0))),
    # --- softmax: maximum, difference, exponential, sum, quotient; backward: product, sum, difference, product
    (
        "_softmax _log_softmax _safe_softmax _masked_softmax",
        Rule("softmax", operations(5, 0), bytes_of(0, 1), _AS_FIRST),
    ),
    (
        "_softmax_backward_data _log_softmax_backward_data",
        Rule("softmax", operations(4, 0), bytes_of(0, 1), _AS_FIRST),
    ),
    # --- losses: cross entropy reads one logarithm for each target
    (
        "nll_loss_forward nll_loss2d_forward",
        Rule("cross entropy", nothing, add(_selected(1), bytes_of(1, 2)), _SMALL),
    ),
    (
        "nll_loss_backward nll_loss2d_backward",
        Rule("cross entropy", nothing, bytes_of(0, 2, 3, 6), outputs_or(_selected(2, 1))),
    ),
    (
        "mse_loss smooth_l1_loss huber_loss binary_cross_entropy binary_cross_entropy_with_logits",
        Rule("reduction", operations(3, 0), bytes_of(0, 1, 2, 3), _SMALL),
    ),
    # --- reductions, scans and searches
    (
        """sum nansum mean amax amin max min aminmax argmax argmin prod std var std_mean var_mean norm
        linalg_vector_norm all any logsumexp equal count_nonzero median nanmedian mode kthvalue""",
        Rule("reduction", _ONE_OPERATION, bytes_of(0, 1), _SMALL),
    ),
    (
        "cumsum cumsum_ cumprod cumprod_ logcumsumexp cummax cummin",
        Rule("reduction", _ONE_OPERATION, bytes_of(0), _AS_FIRST),
    ),
    ("sort", Rule("other", nothing, bytes_of(0), _AS_FIRST)),
    (
        """topk unique_consecutive _unique2 unique_dim histc bincount multinomial nonzero masked_select searchsorted
        bucketize""",
        Rule("other", nothing, bytes_of(0, 1), _SMALL),
    ),
    ("_fft_c2c", Rule("other", _fft_operations(5), bytes_of(0), _AS_FIRST)),
    ("_fft_r2c _fft_c2r", Rule("other", _fft_operations(2.5), bytes_of(0), _AS_FIRST)),
    # --- pooling and interpolation
    (
        "max_pool2d_with_indices max_pool3d_with_indices",
        Rule("reduction", _ONE_OPERATION, bytes_of(0), outputs_or(_pooled(8))),
    ),
    ("avg_pool2d avg_pool3d", Rule("reduction", _ONE_OPERATION, bytes_of(0), outputs_or(_pooled(0)))),
    (
        "_adaptive_avg_pool2d _adaptive_avg_pool3d adaptive_max_pool2d adaptive_max_pool3d",
        Rule("reduction", _ONE_OPERATION, bytes_of(0), outputs_or(_given_elements(1, of_batch=True))),
    ),
    (
        "max_pool2d_with_indices_backward max_pool3d_with_indices_backward",
        Rule("reduction", _ONE_OPERATION, bytes_of(0, 7), outputs_or(size_of(1))),
    ),
    (
        "avg_pool2d_backward avg_pool3d_backward _adaptive_avg_pool2d_backward _adaptive_avg_pool3d_backward",
        Rule("reduction", _ONE_OPERATION, bytes_of(0), outputs_or(size_of(1))),
    ),
    (
        """upsample_nearest1d upsample_nearest2d upsample_nearest3d upsample_linear1d upsample_bilinear2d
        upsample_trilinear3d upsample_bicubic2d _upsample_nearest_exact2d _upsample_bilinear2d_aa""",
        Rule("elementwise", nothing, bytes_of(0), outputs_or(_given_elements(1, of_batch=True))),
    ),
    (
        """upsample_nearest1d_backward upsample_nearest2d_backward upsample_nearest3d_backward
        upsample_linear1d_backward upsample_bilinear2d_backward upsample_trilinear3d_backward
        upsample_bicubic2d_backward _upsample_nearest_exact2d_backward _upsample_bilinear2d_aa_backward""",
        Rule("elementwise", nothing, bytes_of(0), outputs_or(_given_elements(2))),
    ),
    # --- lookups and updates by index
    ("embedding", _lookup(_selected_rows(1), 1)),
    ("_embedding_bag", Rule("embedding", nothing, add(_selected_rows(1), bytes_of(1, 2, 6)), _SMALL)),
    ("embedding_dense_backward", Rule("embedding", nothing, bytes_of(0, 1), _AS_FIRST)),
    ("index_select", _lookup(_selected_slices, 2)),
    ("gather", _lookup(_selected(2), 2)),
    ("take", _lookup(_selected(1), 1)),
    ("index", _lookup(_outputs_are_read, 1)),
    ("index_put_ _index_put_impl_", Rule("embedding", nothing, _put, _put_elements)),
    ("scatter_", _update(_selected(2), 2, 3)),
    ("scatter_add_ scatter_reduce_", _update(_selected(2), 2, 3, reads_selected=True)),
    ("index_add_ index_reduce_", _update(_selected_slices, 2, 3, reads_selected=True)),
    ("index_copy_", _update(_selected_slices, 2, 3)),
    ("index_fill_", _update(_selected_slices, 2)),
    (
        """scatter scatter_add scatter_reduce index_add index_reduce index_copy index_fill index_put slice_scatter
        select_scatter""",
        Rule("embedding", nothing, bytes_of(0, 1, 2, 3), _AS_FIRST),
    ),
    # --- copies and new tensors
    ("copy_", Rule("copy", nothing, bytes_of(1), size_of(0))),
    ("_local_scalar_dense", Rule("copy", nothing, bytes_of(0), nothing)),
    (
        """_to_copy clone cat stack _reshape_copy expand_copy permute_copy view_copy flip roll repeat
        repeat_interleave constant_pad_nd reflection_pad1d reflection_pad2d replication_pad1d replication_pad2d
        replication_pad3d slice_backward select_backward im2col col2im unfold_backward pixel_shuffle pixel_unshuffle
        channel_shuffle as_strided_copy slice_copy t_copy transpose_copy select_copy rot90""",
        Rule("copy", nothing, bytes_of(0), _AS_FIRST),
    ),
    (
        """split_with_sizes_copy _chunk_cat fsdp::all_gather_copy_in fsdp::split_with_sizes_copy fsdp::chunk_cat""",
        Rule("copy", nothing, bytes_of(0), size_of(0)),
    ),
    (
        """zeros ones full zeros_like ones_like full_like new_zeros new_ones new_full fill_ zero_ normal_ uniform_
        bernoulli_ exponential_ random_ log_normal_ cauchy_ geometric_ arange linspace logspace eye rand randn randint
        rand_like randn_like randint_like randperm tril_indices triu_indices""",
        Rule("copy", nothing, nothing, _AS_FIRST),
    ),
    (
        "empty empty_like empty_strided new_empty new_empty_strided empty_permuted _unsafe_view resize_ set_",
        Rule("other", nothing, nothing, nothing),
    ),
    # --- collectives: what this rank gives and receives
    (
        "c10d::allreduce_ c10d::allreduce_coalesced_ c10d::reduce_ _c10d_functional::all_reduce_",
        Rule("collective", nothing, bytes_of(0), size_of(0)),
    ),
    ("c10d::broadcast_ c10d::send c10d::recv_", Rule("collective", nothing, bytes_of(0), nothing)),
    (
        """c10d::_allgather_base_ c10d::allgather_ c10d::allgather_into_tensor_coalesced_ c10d::_reduce_scatter_base_
        c10d::reduce_scatter_ c10d::reduce_scatter_tensor_coalesced_ c10d::alltoall_base_ c10d::alltoall_
        c10d::gather_ c10d::scatter_""",
        Rule("collective", nothing, bytes_of(1), size_of(0)),
    ),
    (
        """_c10d_functional::all_reduce _c10d_functional::all_gather_into_tensor _c10d_functional::broadcast
        _c10d_functional::reduce_scatter_tensor _c10d_functional::all_to_all_single""",
        Rule("collective", nothing, bytes_of(0), _AS_FIRST),
    ),
)
_DATA_RULES: dict[str, Rule] = {
    **{f"aten::{name}": _pointwise(name, in_place=False) for name in _TENSORS_READ},
    **{f"aten::{name}_": _pointwise(name, in_place=True) for name in _TENSORS_READ},
    **{f"aten::_foreach_{name}{suffix}": _foreach(name) for name in _TENSORS_READ for suffix in ("", "_")},
    **{name if "::" in name else f"aten::{name}": rule for names, rule in _TABLE for name in names.split()},
}
