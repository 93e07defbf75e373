"""Follows the memory formats of images through a step.

The values of a pixel are stored together in ``channels_last``. Otherwise, an image is stored by channel (NCHW).
"""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from nsys_analyzer.analysis.operators.operands import Call, count_elements
from nsys_analyzer.trace.arrays import Bools, Ints
from nsys_analyzer.trace.operator_calls import OperatorCalls, Signature, Tensor

#: Matches operators of images that have kernels for both memory formats.
IMAGE_OPERATOR = re.compile(r"convolution|batch_norm|pool")

HALF_PRECISIONS = ("bfloat16", "float16")


@dataclass(frozen=True)
class ImageFormats:
    """The formats of the images that calls read and write. Arrays have the shape (calls,).

    Attributes:
        is_mixed: whether most convolutions have channels_last tensors, although some images are stored by channel.
        by_channel: True for each call that reads or writes an image that is stored by channel.
        last: True for each call that reads or writes an image in channels_last.
        converts: True for each call that writes an image that it reads in the other format.
        origin: the call after which the images of each call in ``by_channel`` are stored by channel; -1 for others.
    """

    is_mixed: bool
    by_channel: Bools
    last: Bools
    converts: Bools
    origin: Ints


def find_format(tensor: Tensor) -> Literal["last", "by_channel"] | None:
    """Returns the memory format of a tensor with images; None for another tensor, or if both formats are equal."""
    if len(tensor.shape) not in (4, 5) or not tensor.strides:
        return None
    if tensor.shape[1] < 2 or math.prod(tensor.shape[2:]) < 2:
        return None
    if tensor.strides[1] == 1:
        return "last"
    return "by_channel" if tensor.strides[-1] == 1 else None


def find_image_formats(calls: OperatorCalls) -> ImageFormats:
    """Returns the formats of the images in half precision that calls read and write.

    Images are the tensors that have the shape of an image of a convolution, of a norm or of pooling.
    """
    shapes = {tensor.shape for signature in calls.signatures for tensor in _images_of(signature)}
    rows = [_describe(signature, shapes) for signature in calls.signatures]
    columns = np.array([*rows, (False,) * 6], np.bool_).T[:, calls.signature]
    by_channel, last, converts, writes_by_channel, is_convolution, is_in_channels_last = columns
    is_mixed = bool(by_channel.any() and (is_convolution & is_in_channels_last).sum() > is_convolution.sum() / 2)
    origin = _find_origins(calls, by_channel, writes_by_channel) if is_mixed else np.full(len(calls), -1)
    return ImageFormats(is_mixed, by_channel, last, converts, origin)


def _describe(signature: Signature, shapes: Collection[tuple[int, ...]]) -> tuple[bool, ...]:
    """Returns for the calls of a signature: the values of ``ImageFormats``, and what finds the remaining values.

    The remaining values are: whether a call writes an image by channel, whether it is a convolution, and whether one of
    its tensors is in channels_last, which may be its weight.
    """
    call = Call(signature)
    read, written = (
        {(tensor.shape, find_format(tensor)) for tensor in tensors if _is_image(tensor, shapes)}
        for tensors in (call.tensors(), call.outputs or ())
    )
    formats = [form for _, form in (*read, *written)]
    return (
        "by_channel" in formats,
        "last" in formats,
        any(shape == read_shape and {form, read_form} == {"last", "by_channel"}
            for shape, form in written for read_shape, read_form in read),
        any(form == "by_channel" for _, form in written),
        "convolution" in signature.name,
        any(find_format(tensor) == "last" for tensor in call.all_tensors()),
    )  # fmt: skip


def _is_image(tensor: Tensor, shapes: Collection[tuple[int, ...]]) -> bool:
    return tensor.shape in shapes and tensor.dtype in HALF_PRECISIONS


def _images_of(signature: Signature) -> Sequence[Tensor]:
    """Returns the images that a convolution, a norm or pooling reads and writes, without the weights."""
    if not IMAGE_OPERATOR.search(signature.name) or "backward" in signature.name:
        return ()
    tensors = (*Call(signature).tensors()[:1], *(signature.outputs or ())[:1])
    return [tensor for tensor in tensors if len(tensor.shape) in (4, 5)]


def _find_origins(calls: OperatorCalls, by_channel: Bools, writes_by_channel: Bools) -> Ints:
    """Returns the first call of the data flow whose images are stored by channel, for each call with such images.

    If such an image is a view of a tensor of another shape, its origin is the call that wrote this tensor.
    """
    origin, of_value, writers = np.full(len(calls), -1), dict[int, int](), dict[int, int]()
    read_sizes = [
        {count_elements(tensor) for tensor in Call(signature).tensors() if find_format(tensor) == "by_channel"}
        for signature in calls.signatures
    ]
    written_sizes = [{count_elements(tensor) for tensor in signature.outputs or ()} for signature in calls.signatures]
    signatures = calls.signature.tolist()
    unknown = ((),) * len(calls)  # a source without values
    for index, (reads, writes) in enumerate(zip(calls.reads or unknown, calls.writes or unknown, strict=True)):
        if by_channel[index]:
            origins = [of_value[value] for value in reads if value in of_value] or [
                writers[value]
                for value in reads
                if value in writers and read_sizes[signatures[index]] & written_sizes[signatures[writers[value]]]
            ]
            origin[index] = min(origins, default=index)
        if writes_by_channel[index]:
            of_value.update(dict.fromkeys(writes, int(origin[index])))
        writers.update(dict.fromkeys(writes, index))
    return origin
