"""Compares softmax with the two matmuls inside self-attention: time, FLOPs and bytes."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np

from nsys_analyzer.analysis.intervals import NONE
from nsys_analyzer.analysis.kernels.classes import find_launching_operators
from nsys_analyzer.analysis.ranges.instances import AttributedTrace
from nsys_analyzer.analysis.transformer.models import (
    Configuration,
    ModelSize,
    attention_matmul_flops,
    attention_to_softmax_flop_ratio,
    softmax_flops,
)
from nsys_analyzer.analysis.transformer.peaks import find_l2_bytes, find_memory_bandwidth
from nsys_analyzer.trace.arrays import Bools, Ints, SmallInts
from nsys_analyzer.trace.columns import KERNEL
from nsys_analyzer.trace.metadata import Gpu
from nsys_analyzer.trace.phase_names import ATTENTION_PARTS, STEP
from nsys_analyzer.trace.schema import MS_PER_S, NS_PER_MS, NS_PER_S

FUSED = "fused attention"
_BY_RANGE = "every kernel of the softmax ranges"
_BY_NAME = "softmax kernels by name inside the attention ranges"
#: The scopes of the figures besides a step.
FORWARD, CAPTURE = "forward", "capture"
#: Work is memory-bound if it reaches this share of the peak bandwidth and its data does not fit into the cache.
MEMORY_BOUND = 0.6
#: There is no figure if kernels whose bytes cannot be counted have more than this share of the softmax's time.
_MAX_UNCOUNTED_SHARE = 0.05

#: PyTorch's operators for batched matmuls, and the kernel that sums the parts of a split-K matmul.
_BATCHED_MATMUL, _SPLIT_K_SUM = re.compile(r"aten::b(addb)?mm\b"), re.compile(r"(?i)split_?k.*reduce")
_TYPE = re.compile(r"BFloat16|bfloat16|Half\b|\bhalf\b|__half|\bfloat\b|\bdouble\b")
#: Bytes of an element by type. Other types in kernel names have 16 bits.
_ELEMENT_BYTES = {"float": 4, "double": 8}


@dataclass(frozen=True)
class SoftmaxTraffic:
    """The fewest bytes that softmax can move, counted from its kernels, and their rate; None if a figure is unknown.

    Attributes:
        bytes: bytes in the scope of the attention's times, such as one forward pass.
        bytes_per_s: bytes divided by the time of the softmax.
        score_bytes: bytes of one score tensor: B·H·S² elements of the widest type.
        peak_bytes_per_s: peak bandwidth of the GPU's memory.
        l2_bytes: size of the GPU's L2 cache.
        peak_share: ``bytes_per_s`` divided by the peak bandwidth.
        fits_in_l2: whether the L2 cache can hold a score tensor, so that bytes need not come from memory.
        memory_bound: whether ``peak_share`` is at least 0.6; None if the cache may have supplied the bytes.
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
    """Times of attention's softmax, of its matmuls, and of fused kernels that contain both; None is unknown.

    Attributes:
        softmax_ms, matmul_ms, fused_ms: time of these kernels in the scope ``per``.
        softmax_launches, matmul_launches, fused_launches: launches of these kernels in the scope ``per``.
        softmax_source: the way in which the softmax kernels were found.
        runtime_ratio: time of the matmuls divided by time of the softmax.
        flop_ratio: FLOPs of the matmuls divided by FLOPs of the softmax.
        softmax_flops, matmul_flops: FLOPs in the scope ``per``.
        softmax_flops_per_s, matmul_flops_per_s: FLOPs divided by the time of these kernels.
        fused_flops_per_s: FLOPs of softmax and matmuls divided by the time of the fused kernels.
        per: the scope of the figures: one "forward", one "step" if attention runs outside any forward, or the whole
            "capture" without warm-up if it runs outside both.
        occurrences: number of runs of attention in all measurements, by the ranges around its kernels. Each replay of a
            CUDA graph counts as a run.
        warmup_occurrences: number of runs inside warm-up, which are left out; None for "forward".
        softmax_traffic: the bytes that an unfused softmax moves.
        ratio_of: the quantities of both ratios.
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
        """Computes the rates."""
        fused_flops = (self.matmul_flops or 0) + (self.softmax_flops or 0)
        vars(self).update(
            softmax_flops_per_s=_rate(self.softmax_flops, self.softmax_ms),
            matmul_flops_per_s=_rate(self.matmul_flops, self.matmul_ms),
            fused_flops_per_s=_rate(fused_flops, self.fused_ms),
        )


def _rate(flops: int | None, ms: float | None) -> float | None:
    return flops / (ms / MS_PER_S) if flops and ms else None


def summarize_attention(
    attributed: AttributedTrace, process: int, configuration: Configuration | None, gpu: Gpu | None
) -> AttentionSummary | None:
    """Compares softmax and attention matmuls of one process: per forward, otherwise per step or over the capture.

    Args:
        configuration: gives FLOPs and bytes.
        gpu: gives the peak bandwidth.

    Returns:
        None if no range or kernel is known to be attention.
    """
    parts = next((scope for scope in _find_scopes(attributed, process) if scope.has_attention), None)
    if parts is None:
        return None
    softmax_ms, matmul_ms = parts.ms(parts.softmax), parts.ms(parts.matmul)
    around = parts.softmax if parts.softmax.any() else parts.fused
    occurrences = _count_occurrences(parts.attributed, parts.kernels[around])
    configuration = configuration or Configuration()
    model, batch, context = configuration.model, configuration.batch_size, configuration.context_length
    shapes = (model, batch, context) if model and batch and context else None
    # Attention runs once per layer in each forward pass. If the division has a remainder, their number is unknown.
    forwards, remainder = divmod(occurrences or 0, model.num_layers * parts.units) if model else (0, 0)
    if parts.per == FORWARD:
        forwards, remainder = 1, 0
    known_shapes = shapes if forwards and not remainder else None
    return AttentionSummary(
        softmax_ms=softmax_ms,
        matmul_ms=matmul_ms,
        fused_ms=parts.ms(parts.fused),
        softmax_launches=parts.count_launches(parts.softmax),
        matmul_launches=parts.count_launches(parts.matmul),
        fused_launches=parts.count_launches(parts.fused),
        softmax_source=parts.source if softmax_ms else "",
        runtime_ratio=matmul_ms / softmax_ms if matmul_ms and softmax_ms else None,
        flop_ratio=attention_to_softmax_flop_ratio(model) if model else None,
        softmax_flops=softmax_flops(*known_shapes) * forwards if known_shapes else None,
        matmul_flops=attention_matmul_flops(*known_shapes) * forwards if known_shapes else None,
        per=parts.per,
        occurrences=occurrences,
        warmup_occurrences=None if parts.warmup is None else _count_occurrences(parts.attributed, parts.warmup) or 0,
        softmax_traffic=_measure_traffic(parts, shapes, occurrences, gpu) if softmax_ms else None,
    )


def _find_scopes(attributed: AttributedTrace, process: int) -> Iterator[_Parts]:
    """Yields the scopes that exist: forward, step and capture.

    Outside a forward pass only kernels inside attention ranges count, since other fused kernels may belong to backward.
    """
    operations, instances = attributed.trace.operations, attributed.instances

    def select_kernels(per: str, instance_of: SmallInts) -> tuple[Ints, int]:
        """Returns the kernels inside measured instances of ``per``, and the number of these instances."""
        units = (instances.phase == instances.phases.index(per)) & (instances.process == process)
        units &= instances.is_measured
        is_inside = np.append(units, False)[instance_of]  # the last entry serves operations without an instance
        return np.flatnonzero((operations.kind == KERNEL) & is_inside), int(units.sum())

    phase_instance, step_instance = attributed.instances_of_operations
    forward, forwards = select_kernels(FORWARD, phase_instance)
    if len(forward):
        yield _Parts(attributed, FORWARD, forward, attributed.find_attention_parts(forward), forwards, None)
    if not attributed.roles.mask(*ATTENTION_PARTS).any():
        return
    kernels = np.flatnonzero((operations.kind == KERNEL) & (operations.process == process))
    part = attributed.find_attention_parts(kernels)
    kernels, part = kernels[part != NONE], part[part != NONE]
    is_warmup = attributed.is_warmup[kernels]
    in_softmax = part == ATTENTION_PARTS.index("softmax")
    left_out = kernels[is_warmup & (in_softmax | ~in_softmax.any())]
    step, steps = select_kernels(STEP, step_instance)
    in_step = np.isin(kernels, step)
    yield _Parts(attributed, STEP, kernels[in_step], part[in_step], steps, left_out)
    yield _Parts(attributed, CAPTURE, kernels[~is_warmup], part[~is_warmup], 1, left_out)


class _Parts:
    """The softmax, the matmuls and the fused attention among the kernels of a scope, as masks over these kernels.

    Args:
        kernels: indices of the kernels of the scope.
        part: the part of attention that each kernel is in, -1 if it is in none.
        units: the number of forward passes or steps in the scope.
        warmup: indices of the kernels that are left out because they ran in warm-up.
    """

    def __init__(
        self, attributed: AttributedTrace, per: str, kernels: Ints, part: Ints, units: int, warmup: Ints | None
    ) -> None:
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
        self.matmul: Bools = in_parts if in_parts.any() else self._without_projections(matmuls)
        self.has_attention = bool(self.fused.any() or (self.softmax.any() and self.matmul.any()))

    def _without_projections(self, matmuls: Bools) -> Bools:
        """Returns the scores and values among the matmuls of a range around all of attention.

        Such a range may contain projections. The operators of scores and values are batched matmuls. Without operators,
        scores and values are the matmuls next to the softmax.
        """
        trace = self.attributed.trace
        operator = find_launching_operators(trace, self.attributed.attribution, self.kernels)
        is_batched = np.array([*map(bool, map(_BATCHED_MATMUL.match, trace.operators.names)), False])
        batched: Bools = matmuls & is_batched[operator]
        if batched.any():
            return batched
        at = np.flatnonzero(matmuls)
        is_sum = np.array([bool(_SPLIT_K_SUM.search(name)) for name in trace.operations.names], np.bool_)
        # The number of the matmul that each kernel belongs to. The sum of its parts has the same number.
        number = np.cumsum(~is_sum[trace.operations.name[self.kernels[at]]])
        next_matmul = np.searchsorted(at, np.flatnonzero(self.softmax))
        neighbors = np.append(next_matmul[next_matmul > 0] - 1, next_matmul[next_matmul < len(at)])
        return np.isin(np.arange(len(matmuls)), at[np.isin(number, number[neighbors])])

    def ms(self, selected: Bools) -> float | None:
        """Returns the time of the selected kernels per unit, ms; None if there are none."""
        return int(self.duration[selected].sum()) / self.units / NS_PER_MS if selected.any() else None

    def count_launches(self, selected: Bools) -> float:
        """Counts the launches of the selected kernels per unit."""
        return int((self.attributed.trace.operations.continues[self.kernels][selected] == 0).sum()) / self.units


def _count_occurrences(attributed: AttributedTrace, kernels: Ints) -> int | None:
    """Counts the attention ranges around kernels; a range that a graph captured counts once for each replay."""
    part = attributed.roles.codes(ATTENTION_PARTS)
    around = part == ATTENTION_PARTS.index("attention")
    attention = attributed.attribution.find_innermost(around if around.any() else part != NONE, kernels)
    replayed = attributed.trace.operations.graph_node[kernels] != 0
    replay = np.where(replayed, attributed.attribution.launch[kernels], NONE)
    pairs = np.unique(np.stack([attention, replay])[:, attention != NONE], axis=1)
    return pairs.shape[1] or None


def _measure_traffic(
    parts: _Parts, shapes: tuple[ModelSize, int, int] | None, occurrences: int | None, gpu: Gpu | None
) -> SoftmaxTraffic | None:
    """Counts the bytes of the softmax; returns None unless attention runs once per layer, on all its scores."""
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
    """Counts the minimum of bytes that an unfused softmax moves, and compares their rate with the peak bandwidth.

    A trace has no counters of bytes, so a lower bound is counted. Each kernel of the softmax reads its score tensor
    (B, H, S, S) once and writes its result once. A reduction writes B·H·S values instead of a tensor, and an operation
    with such values (subtract the maximum, divide by the sum) reads them once. The sizes of elements follow from the
    types in the kernel's name.

    Args:
        kernels: the name, the launches and the total ns of each softmax kernel; each runs on the scores of one layer.
        shape: batch size, heads, context length.
        units: the number of forward passes or steps that the launches are from.
        gpu: the GPU on which they ran.

    Returns:
        None if too much time is in kernels of an unknown kind. Also None if the rate exceeds the peak although no cache
        can hold the tensor, since the kernels then work on other tensors than assumed.
    """
    batch, heads, context = shape
    countable = [(launches, ns, *moved) for name, launches, ns in kernels if (moved := count_moved_bytes(name))]
    total_ns = sum(ns for _, _, ns in kernels)
    if not total_ns or sum(ns for _, ns, *_ in countable) < (1 - _MAX_UNCOUNTED_SHARE) * total_ns:
        return None
    rows = batch * heads * context
    row_bytes = (
        launches * (context * (bytes_read + bytes_written) + bytes_of_row)
        for launches, _, bytes_read, bytes_written, bytes_of_row in countable
    )
    moved_bytes = rows * sum(row_bytes)
    score_bytes = (
        rows * context * max(max(bytes_read, bytes_written) for _, _, bytes_read, bytes_written, _ in countable)
    )
    rate, peak, cache = moved_bytes / total_ns * NS_PER_S, find_memory_bandwidth(gpu), find_l2_bytes(gpu)
    share = rate / peak if peak else None
    fits = score_bytes <= cache if cache else None
    if share and share > 1 and not fits:
        return None
    reaches_bound = share >= MEMORY_BOUND if share is not None else None
    memory_bound = reaches_bound if fits is False or reaches_bound is False else None
    return SoftmaxTraffic(moved_bytes / units, rate, score_bytes, peak, cache, share, fits, memory_bound)


def count_moved_bytes(name: str) -> tuple[int, int, int] | None:
    """Returns the bytes that a kernel of PyTorch moves per element of a score tensor.

    Returns:
        The bytes read and the bytes written per element, and the bytes read or written per row, 0 if there are none.
        None for an unknown kind of kernel, and for a fill, since its tensor may be a scalar.
    """
    sizes = [_ELEMENT_BYTES.get(type_name, 2) for type_name in _TYPE.findall(name)]
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
