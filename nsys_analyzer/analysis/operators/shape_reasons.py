"""Explains the time of operators above their attainable time, if their shapes show the reason.

The reasons are the precision, the memory format of images, and sizes that do not suit tensor cores.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal, TypeAlias

import numpy as np

from nsys_analyzer.analysis.operators.attainable import COMPUTE_KINDS
from nsys_analyzer.analysis.operators.costs import Cost, estimate_cost
from nsys_analyzer.analysis.operators.memory_formats import (
    HALF_PRECISIONS,
    IMAGE_OPERATOR,
    ImageFormats,
    find_format,
    find_image_formats,
)
from nsys_analyzer.analysis.operators.operands import Call
from nsys_analyzer.analysis.operators.pricing import PricedOperators
from nsys_analyzer.analysis.operators.redundancy import Redundancy
from nsys_analyzer.trace.arrays import Bools, Floats
from nsys_analyzer.trace.operator_calls import Signature, Tensor, TensorArgument

#: The reasons why operators take longer than they should, in the order in which they are tested. A call has the first
#: reason that applies:
#:
#: - a ``Redundancy``: a step does not need the call.
#: - ``precision``, ``memory_format``, ``alignment``: the shapes show the reason; see ``explain_calls``.
#: - ``attention``: the call works on the scores of unfused attention.
#: - ``efficient_attention``: the call is PyTorch's memory-efficient attention.
#: - ``reduction``: the call reduces over elements that are not adjacent in memory.
#: - ``unfused``: one kernel could replace the chain of operators that contains the call.
#: - ``copies``: the call only copies a tensor.
#: - ``small_grid``: kernels of the call have fewer blocks than the GPU has multiprocessors.
#: - ``wave_tail``: the last wave of blocks of the call's kernels fills only a part of the GPU.
#: - ``many_kernels``: the call launches many kernels.
Reason: TypeAlias = (
    Redundancy
    | Literal[
        "precision", "memory_format", "alignment", "attention", "efficient_attention", "reduction", "unfused", "copies",
        "small_grid", "wave_tail", "many_kernels",
    ]
)  # fmt: skip
#: The smallest and the largest share of the time above the attainable time that is saved if images are stored as
#: channels_last. A ResNet-50 in bf16 on an H100 saved 87 % of this time.
MEMORY_FORMAT_SAVINGS = (0.65, 1.0)
#: A matrix is aligned if the length of its rows is a multiple of this number of bytes.
ALIGNMENT_BYTES = 16
#: Sizes are padded to a multiple of the first number of elements, and large sizes to a multiple of the second.
_PADDING, _PADDING_OF_LARGE_SIZES = 8, 64
_LARGE_SIZE = 256
#: The fewest channels of a convolution that are worth padding. Images have 3 channels, and no more work.
_FEWEST_CHANNELS = 16
#: The ratio of the time of a matmul to its attainable time that is assumed if a step contains no other matmul.
_USUAL_RATIO = 1.3
#: An operator with float32 operands multiplies without tensor cores if it takes more than this multiple of its
#: attainable time in TF32.
_LEAST_FP32_RATIO = 1.5


@dataclass(frozen=True)
class ExplainedCalls:
    """Calls whose time above their attainable time has a reason.

    Attributes:
        calls: shape (calls,), True for these calls.
        least_ns, most_ns: shape (calls,), the least and the most time that remains of each call, ns.
    """

    calls: Bools
    least_ns: Floats
    most_ns: Floats


def explain_calls(operators: PricedOperators) -> Mapping[Reason, ExplainedCalls]:
    """Returns the calls that shapes explain, by the reason. Each call has at most one reason."""
    pending, explained = find_needed_calls(operators), dict[Reason, ExplainedCalls]()
    tests: dict[Reason, Callable[[PricedOperators, Bools], ExplainedCalls]] = {
        "precision": _explain_precision, "memory_format": _explain_memory_format, "alignment": _explain_alignment,
    }  # fmt: skip
    for reason, explain in tests.items():
        explained[reason] = explain(operators, pending)
        pending = pending & ~explained[reason].calls
    return explained


def find_needed_calls(operators: PricedOperators) -> Bools:
    """Returns True for each call with work that a step needs."""
    pending: Bools = (operators.measured_ns > 0) & ~np.any([*operators.redundant.values()], axis=0)
    return pending


def _explain_precision(operators: PricedOperators, pending: Bools) -> ExplainedCalls:
    """Finds matmuls, convolutions and attention that multiply in fp32 without tensor cores.

    At least their attainable time in bf16 remains, and at most their attainable time in TF32.
    """
    calls, rates = operators.calls, operators.rates
    least_ns, most_ns = np.full((2, len(calls.signatures)), np.nan)
    for index, (signature, cost) in enumerate(zip(calls.signatures, operators.costs, strict=True)):
        if rates and cost and cost.kind in COMPUTE_KINDS and cost.precision == "fp32":
            in_bf16 = estimate_cost(_map_tensors(signature, _as_bf16))
            most_ns[index] = rates.time_ns(cost._replace(precision="tf32"), signature)
            least_ns[index] = rates.time_ns(in_bf16, signature) if in_bf16 else np.nan
    most_ns = np.where(np.isnan(most_ns), least_ns * 2, most_ns)
    least_ns, most_ns = least_ns[calls.signature], most_ns[calls.signature]
    return ExplainedCalls(pending & (operators.measured_ns > _LEAST_FP32_RATIO * most_ns), least_ns, most_ns)


def _as_bf16(tensor: Tensor) -> Tensor:
    return tensor._replace(dtype="bfloat16") if tensor.dtype == "float32" else tensor


def _explain_memory_format(operators: PricedOperators, pending: Bools) -> ExplainedCalls:
    """Finds operators on images whose channels are not stored together, if the step contains convolutions.

    If all convolutions have such images, the operators are those that have kernels for both formats. Otherwise, all
    operators on such images are compared with the same operators on images in channels_last.
    """
    formats, measured_ns = find_image_formats(operators.calls), operators.measured_ns
    least, most = MEMORY_FORMAT_SAVINGS
    if formats.is_mixed:
        is_affected, expected_ns = formats.by_channel, _expect_channels_last(operators, formats)
    else:
        is_affected, expected_ns = _find_images_by_channel(operators), operators.attainable_ns
    excess_ns = np.nan_to_num(np.maximum(measured_ns - expected_ns, 0.0))
    calls = pending & is_affected & (excess_ns > 0)
    return ExplainedCalls(calls, measured_ns - most * excess_ns, measured_ns - least * excess_ns)


def _find_images_by_channel(operators: PricedOperators) -> Bools:
    """Returns True for each convolution, norm and pooling on images by channel, if a convolution has such images."""
    is_by_channel = [
        bool(IMAGE_OPERATOR.search(signature.name)) and _is_by_channel(signature)
        for signature in operators.calls.signatures
    ]
    if not any(
        by_channel and cost and cost.kind == "convolution"
        for by_channel, cost in zip(is_by_channel, operators.costs, strict=True)
    ):
        is_by_channel = [False] * len(is_by_channel)
    calls_by_channel: Bools = np.array([*is_by_channel, False])[operators.calls.signature]
    return calls_by_channel


def _is_by_channel(signature: Signature) -> bool:
    """Returns whether the first tensor with images in a half precision stores each channel separately."""
    images = (
        tensor
        for tensor in Call(signature).tensors()
        if len(tensor.shape) in (4, 5) and tensor.strides and tensor.dtype in HALF_PRECISIONS
    )
    first = next(images, None)
    return first is not None and find_format(first) == "by_channel"


def _expect_channels_last(operators: PricedOperators, formats: ImageFormats) -> Floats:
    """Returns the time of each call if its images were in channels_last, ns; NaN if it is unknown.

    It is the mean time of the calls with tensors of the same shapes in channels_last, or else the attainable time. Only
    operators with kernels for both formats, or with images in both formats, are compared with the attainable time. No
    time remains of a copy between both formats.
    """
    signatures, signature_code = operators.calls.signatures, operators.calls.signature
    key_of_signature = [
        (
            signature.name,
            *(tensor._replace(strides=None) for tensor in Call(signature).all_tensors()),
        )
        for signature in signatures
    ]
    code_of_key = {key: code for code, key in enumerate(dict.fromkeys(key_of_signature))}
    code = np.array([code_of_key[key] for key in key_of_signature], np.int64)[signature_code]
    is_reference = formats.last & ~formats.by_channel & (operators.measured_ns > 0)
    total_ns = np.bincount(code[is_reference], operators.measured_ns[is_reference], len(code_of_key))
    count = np.bincount(code[is_reference], minlength=len(code_of_key))
    reference_ns = np.where(count > 0, total_ns / np.maximum(count, 1), np.nan)[code]
    has_kernels = np.array([bool(IMAGE_OPERATOR.search(row.name)) for row in signatures])[signature_code]
    is_copy = np.array([bool(cost and cost.kind == "copy") for cost in operators.costs])[signature_code]
    otherwise_ns = np.where(has_kernels | formats.last, operators.attainable_ns, np.nan)
    expected_ns = np.where(np.isnan(reference_ns), otherwise_ns, reference_ns)
    return np.where(is_copy & formats.converts, 0.0, expected_ns)


def _explain_alignment(operators: PricedOperators, pending: Bools) -> ExplainedCalls:
    """Finds operators that multiply matrices whose rows do not begin at multiples of ``ALIGNMENT_BYTES``.

    At least the attainable time of the padded matrices remains. At most, the time above it has the same ratio as in the
    other matmuls of the step.
    """
    calls, rates = operators.calls, operators.rates
    padded_ns = np.full(len(calls.signatures), np.nan)
    for index, (signature, cost) in enumerate(zip(calls.signatures, operators.costs, strict=True)):
        sizes = find_misaligned_sizes(signature, cost)
        if sizes and rates and cost and (padded := estimate_cost(_pad(signature, sizes))):
            padded_ns[index] = rates.time_ns(padded._replace(precision=cost.precision), signature)
    least_ns = padded_ns[calls.signature]
    is_matmul = np.array([bool(cost and cost.kind == "matmul") for cost in operators.costs])[calls.signature]
    other_matmuls = pending & is_matmul & np.isnan(least_ns) & operators.is_priced
    measured_ns, attainable_ns = operators.measured_ns[other_matmuls], operators.attainable_ns[other_matmuls]
    ratio = float(measured_ns.sum() / attainable_ns.sum()) if other_matmuls.any() else 0.0
    most_ns = least_ns * (max(ratio, 1.0) if ratio else _USUAL_RATIO)
    return ExplainedCalls(pending & (operators.measured_ns > most_ns), least_ns, most_ns)


def find_misaligned_sizes(signature: Signature, cost: Cost | None) -> frozenset[int]:
    """Returns the sizes of a multiplying operator that make the rows of its matrices misaligned."""
    if cost is None or cost.kind not in COMPUTE_KINDS:
        return frozenset()
    sizes = set[int]()
    call = Call(signature)
    for tensor in call.all_tensors():
        if len(tensor.shape) < 2 or not tensor.dtype:
            continue
        if cost.kind == "convolution":
            size = tensor.shape[1] if tensor.shape[1] >= _FEWEST_CHANNELS else 0
        else:  # the dimension whose elements are stored one after the other
            size = tensor.shape[tensor.strides.index(1) if tensor.strides and 1 in tensor.strides else -1]
        if size * call.element_bytes(tensor) % ALIGNMENT_BYTES and size > 1:
            sizes.add(size)
    return frozenset(sizes)


def pad_size(size: int) -> int:
    """Returns the next larger size that suits tensor cores."""
    multiple = _PADDING_OF_LARGE_SIZES if size >= _LARGE_SIZE else _PADDING
    return -(-size // multiple) * multiple


def _pad(signature: Signature, sizes: frozenset[int]) -> Signature:
    """Returns the operator with padded sizes."""
    return _map_tensors(
        signature,
        lambda tensor: tensor._replace(
            shape=tuple(pad_size(size) if size in sizes else size for size in tensor.shape), strides=None
        ),
    )


def _map_tensors(signature: Signature, change: Callable[[Tensor], Tensor]) -> Signature:
    """Returns the operator with each of its tensors changed."""

    def change_argument(argument: TensorArgument) -> TensorArgument:
        """Returns the argument with each of its tensors changed."""
        if isinstance(argument, Tensor):
            return change(argument)
        return tuple(map(change, argument)) if argument else None

    outputs = signature.outputs and tuple(map(change, signature.outputs))
    return signature._replace(inputs=tuple(map(change_argument, signature.inputs)), outputs=outputs)
