"""The least bytes that an unfused softmax moves, and the share of the memory's peak bandwidth that they reach.

A trace has no counter of bytes, so the least is counted: each kernel of the softmax reads its score tensor (B, H, S, S)
once and writes its result once, a reduction writes B·H·S values in place of a tensor, and an operation with such a row
(subtract the maximum, divide by the sum) reads it once. Sizes of elements are those of the types in the kernel's name.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

from nsys_analyzer.analysis.transformer.peaks import l2_bytes, memory_bytes_per_s
from nsys_analyzer.trace.metadata import Gpu

#: From this share of the peak bandwidth on, beyond the cache, work is called memory-bound.
MEMORY_BOUND = 0.6
#: Kernels whose bytes cannot be counted may have this share of the softmax's time; with more there is no figure.
_UNCOUNTED = 0.05

_TYPE = re.compile(r"BFloat16|bfloat16|Half\b|\bhalf\b|__half|\bfloat\b|\bdouble\b")
_SIZES = {"float": 4, "double": 8}  # of bytes; the others have 16 bits


@dataclass(frozen=True)
class SoftmaxKernels:
    """The kernels of one name in the softmax: launches and their summed time, ns."""

    name: str
    launches: int
    ns: int


@dataclass(frozen=True)
class SoftmaxTraffic:
    """The bytes that the softmax moved, by the convention of this module; None where a figure is unknown.

    Attributes:
        bytes: of one forward pass, or of whatever else the attention's times are of.
        score_bytes: one score tensor, B·H·S² elements of the widest type.
        fits_in_l2: whether the L2 cache holds a score tensor, so that bytes need not have come from memory.
        memory_bound: whether ``peak_share`` reaches ``MEMORY_BOUND``; None where the cache may have served it.
    """

    bytes: float
    bytes_per_s: float
    score_bytes: int
    peak_bytes_per_s: float | None
    l2_bytes: int | None
    peak_share: float | None
    fits_in_l2: bool | None
    memory_bound: bool | None


def softmax_traffic(
    kernels: Iterable[SoftmaxKernels], shape: tuple[int, int, int], units: int, gpu: Gpu | None
) -> SoftmaxTraffic | None:
    """The bytes of some softmax kernels against the GPU's peak.

    Args:
        kernels: every kernel of the softmax, each on the score tensor of one layer.
        shape: batch size, heads, context length.
        units: over how many forward passes (or steps) the launches are.
        gpu: where they ran.

    Returns:
        None where too many kernels are of no known kind, or where the rate is above the peak with a tensor that no
        cache holds: the kernels are of other tensors than assumed.
    """
    batch, heads, context = shape
    kernels = list(kernels)
    counted = [(one, by) for one in kernels if (by := pass_of(one.name))]
    ns = sum(one.ns for one in kernels)
    if not ns or sum(one.ns for one, _ in counted) < (1 - _UNCOUNTED) * ns:
        return None
    rows = batch * heads * context
    moved = rows * sum(one.launches * (context * (by.read + by.written) + by.row) for one, by in counted)
    score_bytes = rows * context * max(max(by.read, by.written) for _, by in counted)
    rate, peak, cache = moved / ns * 1e9, memory_bytes_per_s(gpu), l2_bytes(gpu)
    share = rate / peak if peak else None
    fits = score_bytes <= cache if cache else None
    if share and share > 1 and not fits:
        return None
    reaches = share >= MEMORY_BOUND if share is not None else None
    bound = reaches if fits is False or reaches is False else None
    return SoftmaxTraffic(moved / units, rate, score_bytes, peak, cache, share, fits, bound)


@dataclass(frozen=True)
class Pass:
    """The bytes that one kernel moves: of an element read and written of score tensors, and of its row, 0 for none."""

    read: int
    written: int
    row: int = 0


def pass_of(name: str) -> Pass | None:
    """The bytes that a kernel of a softmax moves: PyTorch's softmax, reductions, copies and elementwise kernels.

    None for any other, and for a fill, whose tensor may be a scalar.
    """
    sizes = [_SIZES.get(found, 2) for found in _TYPE.findall(name)]
    if re.search(r"\b[bf]+loat16_copy_kernel", name):
        return Pass(4, 2)
    if not sizes or "FillFunctor" in name:
        return None
    first = sizes[0]
    if "softmax_warp_forward<" in name and len(sizes) > 1:  # <input, output, accumulator, ...>
        return Pass(first, sizes[1])
    if re.search(r"cunn_(Spatial)?SoftMaxForward", name) and len(sizes) > 2:  # <..., input, accumulator, output, ...>
        return Pass(first, sizes[2])
    if re.search(r"\breduce_kernel<", name):
        return Pass(first, 0, first)
    if "elementwise_kernel<" not in name:
        return None
    if "copy_kernel" in name and re.search(r"LoadWithCast|gpu_kernel_impl<", name):  # between 32 and 16 bits
        return Pass(4 if first == 2 else 2, first)
    return Pass(first, first, first if re.search(r"CUDAFunctor_add<|\bBinaryFunctor<", name) else 0)
