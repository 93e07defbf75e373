"""Softmax against the two matmuls inside self-attention: time, FLOPs and bytes."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np

from nsys_analyzer.analysis.intervals import NONE
from nsys_analyzer.analysis.ranges.instances import AttributedTrace, find_launching_operators
from nsys_analyzer.analysis.ranges.phases import ATTENTION_PARTS, STEP
from nsys_analyzer.analysis.transformer.costs import (
    attention_matmul_flops,
    attention_to_softmax_flop_ratio,
    softmax_flops,
)
from nsys_analyzer.analysis.transformer.models import Configuration, ModelSize
from nsys_analyzer.analysis.transformer.peaks import find_l2_bytes, find_memory_bandwidth
from nsys_analyzer.trace.arrays import Bools, Ints, SmallInts
from nsys_analyzer.trace.columns import KERNEL
from nsys_analyzer.trace.metadata import Gpu
from nsys_analyzer.trace.schema import MS_PER_S, NS_PER_MS, NS_PER_S

FUSED = "fused attention"
_BY_RANGE = "every kernel of the softmax ranges"
_BY_NAME = "softmax kernels by name inside the attention ranges"
#: What the figures may be of, besides a step.
FORWARD, CAPTURE = "forward", "capture"
#: From this share of the peak bandwidth on, beyond the cache, work is called memory-bound.
MEMORY_BOUND = 0.6
#: Kernels whose bytes cannot be counted may have this share of the softmax's time; with more there is no figure.
_UNCOUNTED = 0.05

#: PyTorch's products of batches of matrices, and the kernel that adds up the parts of one product.
_BATCHED, _SPLIT_K_SUM = re.compile(r"aten::b(addb)?mm\b"), re.compile(r"(?i)split_?k.*reduce")
_TYPE = re.compile(r"BFloat16|bfloat16|Half\b|\bhalf\b|__half|\bfloat\b|\bdouble\b")
_SIZES = {"float": 4, "double": 8}  # of bytes; the others have 16 bits


@dataclass(frozen=True)
class SoftmaxTraffic:
    """The bytes that the softmax moved, counted by kernel (see ``softmax_traffic``); None where a figure is unknown.

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


@dataclass(frozen=True)
class AttentionSummary:
    """Times of attention's softmax, of its matmuls, and of kernels that do both at once; None is unknown.

    Attributes:
        softmax_source: how the softmax was found.
        runtime_ratio, flop_ratio: matmuls ÷ softmax.
        per: the unit of the figures: one "forward", one "step" where attention lies in no forward, or the whole
            "capture" outside warm-up where it lies in neither.
        occurrences: how often attention ran in all that was measured, by the ranges around its kernels, a replay of
            a CUDA graph once more.
        softmax_flops_per_s, matmul_flops_per_s, fused_flops_per_s: achieved; the last by kernels that do both at once.
        ratio_of: what both ratios are of.
        warmup_occurrences: how often it ran inside warm-up, which is left out; None for "forward".
    """

    softmax_ms: float | None
    matmul_ms: float | None
    fused_ms: float | None
    softmax_launches: float
    matmul_launches: float
    fused_launches: float
    softmax_source: str
    runtime_ratio: float | None
    flop_ratio: float | None
    softmax_flops: int | None
    matmul_flops: int | None
    per: str = FORWARD
    occurrences: int | None = None
    warmup_occurrences: int | None = None
    softmax_traffic: SoftmaxTraffic | None = None
    softmax_flops_per_s: float | None = field(init=False)
    matmul_flops_per_s: float | None = field(init=False)
    fused_flops_per_s: float | None = field(init=False)
    ratio_of: str = "products / softmax"

    def __post_init__(self) -> None:
        """Fills the rates."""
        both = (self.matmul_flops or 0) + (self.softmax_flops or 0)
        vars(self).update(
            softmax_flops_per_s=_rate(self.softmax_flops, self.softmax_ms),
            matmul_flops_per_s=_rate(self.matmul_flops, self.matmul_ms),
            fused_flops_per_s=_rate(both, self.fused_ms),
        )


def _rate(flops: int | None, ms: float | None) -> float | None:
    return flops / (ms / MS_PER_S) if flops and ms else None


def summarize_attention(
    attributed: AttributedTrace, process: int, configuration: Configuration | None, gpu: Gpu | None
) -> AttentionSummary | None:
    """Compares softmax and attention matmuls of one process: per forward, else per step, else over the capture.

    The configuration gives FLOPs and bytes, the GPU its peak bandwidth. None where no range or kernel is
    known to be attention.
    """
    parts = next((scope for scope in _scopes(attributed, process) if scope.has_attention), None)
    return _summary(parts, configuration, gpu) if parts else None


def _scopes(attributed: AttributedTrace, process: int) -> Iterator[_Parts]:
    """Yields forward, step and capture, as far as they are there.

    Outside a forward only kernels inside attention ranges count: a fused kernel elsewhere may be of backward.
    """
    operations, instances = attributed.trace.operations, attributed.instances

    def inside(per: str, instance_of: SmallInts) -> tuple[Ints, int]:
        units = (instances.phase == instances.phases.index(per)) & (instances.process == process)
        units &= instances.measured
        of_kernel = np.append(units, False)[instance_of]  # the last entry serves no instance
        return np.flatnonzero((operations.kind == KERNEL) & of_kernel), int(units.sum())

    phase_instance, step_instance = attributed.instances_of_operations
    forward, forwards = inside(FORWARD, phase_instance)
    if len(forward):
        yield _Parts(attributed, FORWARD, forward, attributed.find_attention_parts(forward), forwards, None)
    if not attributed.roles.mask(*ATTENTION_PARTS).any():
        return
    mine = np.flatnonzero((operations.kind == KERNEL) & (operations.process == process))
    part = attributed.find_attention_parts(mine)
    mine, part = mine[part != NONE], part[part != NONE]
    warm = attributed.is_warmup[mine]
    in_softmax = part == ATTENTION_PARTS.index("softmax")
    left_out = mine[warm & (in_softmax | ~in_softmax.any())]
    step, steps = inside(STEP, step_instance)
    in_step = np.isin(mine, step)
    yield _Parts(attributed, STEP, mine[in_step], part[in_step], steps, left_out)
    yield _Parts(attributed, CAPTURE, mine[~warm], part[~warm], 1, left_out)


class _Parts:
    """The softmax, the matmuls and the fused attention among the kernels of a scope, as masks over these."""

    def __init__(
        self, attributed: AttributedTrace, per: str, kernels: Ints, part: Ints, units: int, warmup: Ints | None
    ) -> None:
        """Takes ``kernels`` by index, the part of attention each is in (-1: none), and those left out as ``warmup``."""
        self.attributed, self.per, self.units = attributed, per, units
        self.kernels, self.warmup = kernels, warmup
        operations = attributed.trace.operations
        self.duration = (operations.end - operations.start)[kernels]
        classes, code = np.array(attributed.kernels.classes, np.str_), attributed.kernels.code[kernels]
        self.fused: Bools = (classes == FUSED)[code]
        in_range, by_name = part == ATTENTION_PARTS.index("softmax"), (classes == "softmax")[code] & (part != NONE)
        self.softmax, self.source = (in_range, _BY_RANGE) if in_range.any() else (by_name, _BY_NAME)
        matmuls = (classes == "matmul")[code] & (part != NONE) & ~self.softmax
        in_parts = matmuls & np.isin(part, [ATTENTION_PARTS.index(name) for name in ("scores", "values")])
        self.matmul: Bools = in_parts if in_parts.any() else self.without_projections(matmuls)
        self.has_attention = bool(self.fused.any() or (self.softmax.any() and self.matmul.any()))

    def without_projections(self, matmuls: Bools) -> Bools:
        """Marks the scores and values among the matmuls of a range around all of attention, which may hold projections.

        Their operators multiply batches of matrices. Without operators, they are the matmuls next to the softmax.
        """
        trace = self.attributed.trace
        operator = find_launching_operators(trace, self.attributed.attribution, self.kernels)
        is_batched = np.array([*map(bool, map(_BATCHED.match, trace.operators.names)), False])
        batched: Bools = matmuls & is_batched[operator]
        if batched.any():
            return batched
        at = np.flatnonzero(matmuls)
        sums_up = np.array([bool(_SPLIT_K_SUM.search(name)) for name in trace.operations.names], np.bool_)
        product = np.cumsum(~sums_up[trace.operations.name[self.kernels[at]]])  # with the sum of its parts, if any
        behind = np.searchsorted(at, np.flatnonzero(self.softmax))
        neighbors = np.append(behind[behind > 0] - 1, behind[behind < len(at)])
        return np.isin(np.arange(len(matmuls)), at[np.isin(product, product[neighbors])])

    def ms(self, some: Bools) -> float | None:
        """Returns the time of some of the kernels, per unit."""
        return int(self.duration[some].sum()) / self.units / NS_PER_MS if some.any() else None

    def launches(self, some: Bools) -> float:
        """Counts the launches of some of the kernels, per unit."""
        return int((self.attributed.trace.operations.continues[self.kernels][some] == 0).sum()) / self.units


def _occurrences(attributed: AttributedTrace, kernels: Ints) -> int | None:
    """Counts the attention ranges around some kernels, one that a graph captured once for each replay."""
    part = attributed.roles.codes(ATTENTION_PARTS)
    around = part == ATTENTION_PARTS.index("attention")
    attention = attributed.attribution.find_innermost(around if around.any() else part != NONE, kernels)
    replayed = attributed.trace.operations.graph_node[kernels] != 0
    replay = np.where(replayed, attributed.attribution.launch[kernels], NONE)
    pairs = np.unique(np.stack([attention, replay])[:, attention != NONE], axis=1)
    return pairs.shape[1] or None


def _summary(parts: _Parts, configuration: Configuration | None, gpu: Gpu | None) -> AttentionSummary:
    softmax_ms, matmul_ms = parts.ms(parts.softmax), parts.ms(parts.matmul)
    around = parts.softmax if parts.softmax.any() else parts.fused
    occurrences = _occurrences(parts.attributed, parts.kernels[around])
    configuration = configuration or Configuration()
    model, batch, context = configuration.model, configuration.batch_size, configuration.context_length
    shapes = (model, batch, context) if model and batch and context else None
    # Outside a forward, attention runs once a layer in each forward pass; None where that does not come out even.
    forwards, rest = divmod(occurrences or 0, model.num_layers * parts.units) if model else (0, 0)
    if parts.per == FORWARD:
        forwards, rest = 1, 0
    counted = shapes if forwards and not rest else None
    return AttentionSummary(
        softmax_ms=softmax_ms,
        matmul_ms=matmul_ms,
        fused_ms=parts.ms(parts.fused),
        softmax_launches=parts.launches(parts.softmax),
        matmul_launches=parts.launches(parts.matmul),
        fused_launches=parts.launches(parts.fused),
        softmax_source=parts.source if softmax_ms else "",
        runtime_ratio=matmul_ms / softmax_ms if matmul_ms and softmax_ms else None,
        flop_ratio=attention_to_softmax_flop_ratio(model) if model else None,
        softmax_flops=softmax_flops(*counted) * forwards if counted else None,
        matmul_flops=attention_matmul_flops(*counted) * forwards if counted else None,
        per=parts.per,
        occurrences=occurrences,
        warmup_occurrences=None if parts.warmup is None else _occurrences(parts.attributed, parts.warmup) or 0,
        softmax_traffic=_traffic(parts, shapes, occurrences, gpu) if softmax_ms else None,
    )


def _traffic(
    parts: _Parts, shapes: tuple[ModelSize, int, int] | None, occurrences: int | None, gpu: Gpu | None
) -> SoftmaxTraffic | None:
    """Counts the bytes of the softmax, where attention runs once a layer, on all of the layer's scores."""
    if shapes is None or gpu is None or gpu.is_cpu or not occurrences or occurrences % shapes[0].num_layers:
        return None
    model, batch, context = shapes
    operations, duration = parts.attributed.trace.operations, parts.duration[parts.softmax]
    codes, place, launches = np.unique(
        operations.name[parts.kernels[parts.softmax]], return_inverse=True, return_counts=True
    )
    names, ns = [operations.names[code] for code in codes.tolist()], np.bincount(place, duration).astype(np.int64)
    kernels = list(zip(names, launches.tolist(), ns.tolist(), strict=True))
    return softmax_traffic(kernels, (batch, model.num_heads, context), parts.units, gpu)


def softmax_traffic(
    kernels: Sequence[tuple[str, int, int]], shape: tuple[int, int, int], units: int, gpu: Gpu | None
) -> SoftmaxTraffic | None:
    """Counts the least bytes that an unfused softmax moves, against the peak bandwidth of the GPU's memory.

    A trace has no counter of bytes, so the least is counted: each kernel of the softmax reads its score tensor
    (B, H, S, S) once and writes its result once, a reduction writes B·H·S values in place of a tensor, and an operation
    with such a row (subtract the maximum, divide by the sum) reads it once. Sizes of elements are those of the types in
    the kernel's name.

    Args:
        kernels: the name, launches and summed ns of the kernels of the softmax, each on the score tensor of one layer.
        shape: batch size, heads, context length.
        units: over how many forward passes (or steps) the launches are.
        gpu: where they ran.

    Returns:
        None where too many kernels are of no known kind, or where the rate is above the peak with a tensor that no
        cache holds: the kernels are of other tensors than assumed.
    """
    batch, heads, context = shape
    counted = [(launches, took, *moves) for name, launches, took in kernels if (moves := count_moved_bytes(name))]
    ns = sum(took for _, _, took in kernels)
    if not ns or sum(took for _, took, *_ in counted) < (1 - _UNCOUNTED) * ns:
        return None
    rows = batch * heads * context
    moved = rows * sum(launches * (context * (read + written) + row) for launches, _, read, written, row in counted)
    score_bytes = rows * context * max(max(read, written) for _, _, read, written, _ in counted)
    rate, peak, cache = moved / ns * NS_PER_S, find_memory_bandwidth(gpu), find_l2_bytes(gpu)
    share = rate / peak if peak else None
    fits = score_bytes <= cache if cache else None
    if share and share > 1 and not fits:
        return None
    reaches = share >= MEMORY_BOUND if share is not None else None
    bound = reaches if fits is False or reaches is False else None
    return SoftmaxTraffic(moved / units, rate, score_bytes, peak, cache, share, fits, bound)


def count_moved_bytes(name: str) -> tuple[int, int, int] | None:
    """Says what bytes a kernel of PyTorch's moves: of an element read and written of score tensors, and of its row.

    0 stands for no row, None for any other, and for a fill, whose tensor may be a scalar.
    """
    sizes = [_SIZES.get(written, 2) for written in _TYPE.findall(name)]
    if re.search(r"\b[bf]+loat16_copy_kernel", name):
        return 4, 2, 0
    if not sizes or "FillFunctor" in name:
        return None
    first = sizes[0]
    if "softmax_warp_forward<" in name and len(sizes) > 1:  # <input, output, accumulator, ...>
        return first, sizes[1], 0
    if re.search(r"cunn_(Spatial)?SoftMaxForward", name) and len(sizes) > 2:  # <..., input, accumulator, output, ...>
        return first, sizes[2], 0
    if re.search(r"\breduce_kernel<", name):
        return first, 0, first
    if "elementwise_kernel<" not in name:
        return None
    if "copy_kernel" in name and re.search(r"LoadWithCast|gpu_kernel_impl<", name):  # between 32 and 16 bits
        return 4 if first == 2 else 2, first, 0
    return first, first, first if re.search(r"CUDAFunctor_add<|\bBinaryFunctor<", name) else 0
