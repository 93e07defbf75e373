"""Compares softmax with the two matmuls inside self-attention: time, FLOPs and bytes."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np

from nsys_analyzer.analysis.intervals import NONE
from nsys_analyzer.analysis.kernels.class_rules import FUSED_ATTENTION
from nsys_analyzer.analysis.kernels.classes import find_launching_operators
from nsys_analyzer.analysis.ranges.instances import AttributedTrace
from nsys_analyzer.analysis.transformer.models import (
    Configuration,
    Shapes,
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

#: How the softmax kernels of a scope were found.
_FOUND_BY_RANGE = "every kernel of the softmax ranges"
_FOUND_BY_NAME = "softmax kernels by name inside the attention ranges"
#: Two scopes of the figures: one forward pass, and the whole capture. The third scope is ``STEP``.
FORWARD, CAPTURE = "forward", "capture"
#: A softmax is memory-bound if it reaches this share of the peak bandwidth and its data does not fit into the cache.
MEMORY_BOUND_SHARE = 0.6
#: The bytes of the softmax count as unknown if kernels whose bytes cannot be counted take more than this share of the
#: softmax's time.
_MAX_UNCOUNTED_SHARE = 0.05

#: Match PyTorch's operators for batched matmuls, and the kernels that sum the parts of a split-K matmul.
_BATCHED_MATMUL, _SPLIT_K_SUM_KERNEL = re.compile(r"aten::b(addb)?mm\b"), re.compile(r"(?i)split_?k.*reduce")
#: Matches the element types in the name of a kernel.
_ELEMENT_TYPE = re.compile(r"BFloat16|bfloat16|Half\b|\bhalf\b|__half|\bfloat\b|\bdouble\b")
#: The size of an element by its type, bytes. All other types that ``_ELEMENT_TYPE`` matches have two bytes.
_ELEMENT_BYTES = {"float": 4, "double": 8}


@dataclass(frozen=True)
class SoftmaxTraffic:
    """The minimum bytes that the softmax moves, and the rate. A figure is None if it is unknown.

    Attributes:
        bytes: the minimum bytes in the scope of the attention's figures, such as one forward pass.
        bytes_per_s: the minimum bytes divided by the time of the softmax.
        score_bytes: the bytes of one score tensor: B·H·S² elements of the widest type.
        peak_bytes_per_s: the peak bandwidth of the GPU's memory, bytes/s.
        l2_bytes: the size of the GPU's L2 cache, bytes.
        peak_share: ``bytes_per_s`` divided by the peak bandwidth.
        fits_in_l2: whether a score tensor fits into the L2 cache, so that bytes may come from the cache.
        memory_bound: whether ``peak_share`` is at least 0.6; None if bytes may come from the cache.
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
    """The figures of attention's softmax, of its matmuls, and of fused kernels that contain both.

    A figure is None if it is unknown.

    Attributes:
        softmax_ms: the time of attention's softmax kernels in the scope that ``per`` names, ms.
        matmul_ms: the time of attention's matmul kernels in the scope that ``per`` names, ms.
        fused_ms: the time of fused attention kernels in the scope that ``per`` names, ms.
        softmax_launches: the number of launches of attention's softmax kernels in the scope that ``per`` names.
        matmul_launches: the number of launches of attention's matmul kernels in the scope that ``per`` names.
        fused_launches: the number of launches of fused attention kernels in the scope that ``per`` names.
        softmax_source: how the softmax kernels were found.
        runtime_ratio: the time of the matmuls divided by the time of the softmax.
        flop_ratio: the FLOPs of the matmuls divided by the FLOPs of the softmax.
        softmax_flops, matmul_flops: the FLOPs of softmax and matmuls in the scope ``per``.
        softmax_flops_per_s, matmul_flops_per_s: the FLOPs of the kernels divided by their time.
        fused_flops_per_s: the FLOPs of softmax and matmuls divided by the time of the fused kernels.
        per: the scope of the figures: one "forward" pass; one "step" if attention runs outside of forward passes; the
            whole "capture" without warm-up if attention also runs outside of steps.
        occurrences: the number of executions of attention in all measured passes or steps, by the ranges around its
            kernels. Each replay of a CUDA graph counts as one execution.
        warmup_occurrences: the number of executions in warm-up, which are left out; None for "forward".
        softmax_traffic: the bytes that an unfused softmax moves.
        ratio_of: the numerator and the denominator of both ratios, as text.
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
        """Computes the figures in FLOP/s."""
        fused_flops = (self.matmul_flops or 0) + (self.softmax_flops or 0)
        vars(self).update(
            softmax_flops_per_s=_flops_per_s(self.softmax_flops, self.softmax_ms),
            matmul_flops_per_s=_flops_per_s(self.matmul_flops, self.matmul_ms),
            fused_flops_per_s=_flops_per_s(fused_flops, self.fused_ms),
        )


def _flops_per_s(flops: int | None, ms: float | None) -> float | None:
    """Returns FLOPs divided by a time, FLOP/s; None if one of them is unknown or 0."""
    return flops / (ms / MS_PER_S) if flops and ms else None


def summarize_attention(
    attributed: AttributedTrace, process: int, configuration: Configuration | None, gpu: Gpu | None
) -> AttentionSummary | None:
    """Compares the softmax with the attention matmuls of one process.

    The figures are those of one forward pass, or else of one step, or else of the whole capture.

    Args:
        attributed: the attributed trace.
        process: the global ID of the process.
        configuration: the configuration of the capture, from which FLOPs and bytes are computed.
        gpu: the GPU, whose peak bandwidth is compared.

    Returns:
        The figures, or None if no range or kernel is known to be attention.
    """
    attention_kernels = next((scope for scope in _find_scopes(attributed, process) if scope.has_attention), None)
    if attention_kernels is None:
        return None
    softmax_ms, matmul_ms = (
        attention_kernels.ms(attention_kernels.softmax),
        attention_kernels.ms(attention_kernels.matmul),
    )
    around = attention_kernels.softmax if attention_kernels.softmax.any() else attention_kernels.fused
    occurrences = _count_occurrences(attention_kernels.attributed, attention_kernels.kernels[around])
    configuration = configuration or Configuration()
    model, shapes = configuration.model, configuration.shapes
    # Attention runs once per layer in each forward pass. If the division has a remainder, the number of forward passes
    # is unknown.
    forwards, remainder = divmod(occurrences or 0, model.num_layers * attention_kernels.units) if model else (0, 0)
    if attention_kernels.per == FORWARD:
        forwards, remainder = 1, 0
    known_shapes = shapes if forwards and not remainder else None
    return AttentionSummary(
        softmax_ms=softmax_ms,
        matmul_ms=matmul_ms,
        fused_ms=attention_kernels.ms(attention_kernels.fused),
        softmax_launches=attention_kernels.count_launches(attention_kernels.softmax),
        matmul_launches=attention_kernels.count_launches(attention_kernels.matmul),
        fused_launches=attention_kernels.count_launches(attention_kernels.fused),
        softmax_source=attention_kernels.source if softmax_ms else "",
        runtime_ratio=matmul_ms / softmax_ms if matmul_ms and softmax_ms else None,
        flop_ratio=attention_to_softmax_flop_ratio(model) if model else None,
        softmax_flops=softmax_flops(*known_shapes) * forwards if known_shapes else None,
        matmul_flops=attention_matmul_flops(*known_shapes) * forwards if known_shapes else None,
        per=attention_kernels.per,
        occurrences=occurrences,
        warmup_occurrences=None
        if attention_kernels.warmup is None
        else _count_occurrences(attention_kernels.attributed, attention_kernels.warmup) or 0,
        softmax_traffic=_measure_traffic(attention_kernels, shapes, occurrences, gpu) if softmax_ms else None,
    )


def _find_scopes(attributed: AttributedTrace, process: int) -> Iterator[_AttentionKernels]:
    """Yields the attention kernels of each scope that exists: forward passes, steps and the whole capture.

    Outside of forward passes, only kernels inside attention ranges are included, because other fused attention kernels
    may belong to a backward pass.
    """
    operations, instances = attributed.trace.operations, attributed.instances

    def select_kernels(per: str, instance_of: SmallInts) -> tuple[Ints, int]:
        """Returns the kernels inside measured instances of the scope ``per``, and the number of these instances."""
        units = (instances.phase == instances.phases.index(per)) & (instances.process == process)
        units &= instances.is_measured
        is_inside = np.append(units, False)[instance_of]  # index -1, for operations without an instance, selects False
        return np.flatnonzero((operations.kind == KERNEL) & is_inside), int(units.sum())

    phase_instance, step_instance = attributed.instances_of_operations
    forward, forwards = select_kernels(FORWARD, phase_instance)
    if len(forward):
        yield _AttentionKernels(attributed, FORWARD, forward, attributed.find_attention_parts(forward), forwards, None)
    if not attributed.roles.has_role(*ATTENTION_PARTS).any():
        return
    kernels = np.flatnonzero((operations.kind == KERNEL) & (operations.process == process))
    part = attributed.find_attention_parts(kernels)
    kernels, part = kernels[part != NONE], part[part != NONE]
    is_warmup = attributed.is_warmup[kernels]
    in_softmax = part == ATTENTION_PARTS.index("softmax")
    left_out = kernels[is_warmup & (in_softmax | ~in_softmax.any())]
    step, steps = select_kernels(STEP, step_instance)
    in_step = np.isin(kernels, step)
    yield _AttentionKernels(attributed, STEP, kernels[in_step], part[in_step], steps, left_out)
    yield _AttentionKernels(attributed, CAPTURE, kernels[~is_warmup], part[~is_warmup], 1, left_out)


class _AttentionKernels:
    """The masks that select softmax, matmuls and fused attention among the kernels of a scope.

    Args:
        attributed: the attributed trace.
        per: the name of the scope.
        kernels: the indices of the kernels of the scope.
        part: shape (kernels,), the index in ``ATTENTION_PARTS`` of the range around each kernel, or -1.
        units: the number of forward passes or steps in the scope.
        warmup: the indices of attention kernels that are left out because they ran in warm-up; None for "forward".
    """

    def __init__(
        self, attributed: AttributedTrace, per: str, kernels: Ints, part: Ints, units: int, warmup: Ints | None
    ) -> None:
        self.attributed, self.per, self.units = attributed, per, units
        self.kernels, self.warmup = kernels, warmup
        operations = attributed.trace.operations
        self.duration = (operations.end - operations.start)[kernels]
        classes, code = np.array(attributed.kernels.classes, np.str_), attributed.kernels.code[kernels]
        self.fused: Bools = (classes == FUSED_ATTENTION)[code]
        is_in_softmax_range, is_named_softmax = (
            part == ATTENTION_PARTS.index("softmax"),
            (classes == "softmax")[code] & (part != NONE),
        )
        self.softmax, self.source = (
            (is_in_softmax_range, _FOUND_BY_RANGE) if is_in_softmax_range.any() else (is_named_softmax, _FOUND_BY_NAME)
        )
        matmuls = (classes == "matmul")[code] & (part != NONE) & ~self.softmax
        matmuls_in_parts = matmuls & np.isin(part, [ATTENTION_PARTS.index(name) for name in ("scores", "values")])
        self.matmul: Bools = matmuls_in_parts if matmuls_in_parts.any() else self._exclude_projections(matmuls)
        self.has_attention = bool(self.fused.any() or (self.softmax.any() and self.matmul.any()))

    def _exclude_projections(self, matmuls: Bools) -> Bools:
        """Removes projections from a mask of the matmuls inside ranges around whole attention layers.

        The matmuls that compute scores and values are batched matmuls, by the operators that launch them. If there are
        no operators, they are the matmuls directly before and after the softmax.
        """
        trace = self.attributed.trace
        operator = find_launching_operators(trace, self.attributed.attribution, self.kernels)
        is_batched = np.array([*map(bool, map(_BATCHED_MATMUL.match, trace.operators.names)), False])
        batched: Bools = matmuls & is_batched[operator]
        if batched.any():
            return batched
        index = np.flatnonzero(matmuls)
        is_split_k_sum = np.array([bool(_SPLIT_K_SUM_KERNEL.search(name)) for name in trace.operations.names], np.bool_)
        # A split-K matmul consists of two kernels, the matmul and the sum of its parts. Both get the same number.
        number = np.cumsum(~is_split_k_sum[trace.operations.name[self.kernels[index]]])
        next_matmul = np.searchsorted(index, np.flatnonzero(self.softmax))
        neighbors = np.append(next_matmul[next_matmul > 0] - 1, next_matmul[next_matmul < len(index)])
        return np.isin(np.arange(len(matmuls)), index[np.isin(number, number[neighbors])])

    def ms(self, selected: Bools) -> float | None:
        """Returns the time of the selected kernels per unit, ms; None if no kernel is selected."""
        return int(self.duration[selected].sum()) / self.units / NS_PER_MS if selected.any() else None

    def count_launches(self, selected: Bools) -> float:
        """Counts the launches of the selected kernels per unit."""
        return int((self.attributed.trace.operations.continues[self.kernels][selected] == 0).sum()) / self.units


def _count_occurrences(attributed: AttributedTrace, kernels: Ints) -> int | None:
    """Counts the attention ranges around the given kernels; None if there are none.

    A range that a CUDA graph captured counts once for each replay of the graph.
    """
    part = attributed.roles.find_role_codes(ATTENTION_PARTS)
    around = part == ATTENTION_PARTS.index("attention")
    attention = attributed.attribution.find_innermost(around if around.any() else part != NONE, kernels)
    is_replayed = attributed.trace.operations.graph_node[kernels] != 0
    replay = np.where(is_replayed, attributed.attribution.launch[kernels], NONE)
    pairs = np.unique(np.stack([attention, replay])[:, attention != NONE], axis=1)
    return pairs.shape[1] or None


def _measure_traffic(
    parts: _AttentionKernels, shapes: Shapes | None, occurrences: int | None, gpu: Gpu | None
) -> SoftmaxTraffic | None:
    """Counts the bytes that the softmax moves.

    Returns None if the shapes or the GPU are unknown, or if attention does not run once per layer.
    """
    if shapes is None or gpu is None or gpu.is_cpu or not occurrences or occurrences % shapes.model.num_layers:
        return None
    operations, duration = parts.attributed.trace.operations, parts.duration[parts.softmax]
    codes, position, launches = np.unique(
        operations.name[parts.kernels[parts.softmax]], return_inverse=True, return_counts=True
    )
    names, ns = [operations.names[code] for code in codes.tolist()], np.bincount(position, duration).astype(np.int64)
    kernels = list(zip(names, launches.tolist(), ns.tolist(), strict=True))
    shape = shapes.batch_size, shapes.model.num_heads, shapes.context_length
    return measure_softmax_traffic(kernels, shape, parts.units, gpu)


def measure_softmax_traffic(
    kernels: Sequence[tuple[str, int, int]], shape: tuple[int, int, int], units: int, gpu: Gpu | None
) -> SoftmaxTraffic | None:
    """Counts the minimum bytes that an unfused softmax moves, and compares the rate with the peak bandwidth.

    A trace has no counters of bytes, so a lower bound is computed. Each kernel of the softmax reads a score tensor
    (B, H, S, S) once and writes a result of the same shape once. A reduction writes B·H·S elements instead, and a
    kernel that uses the result of a reduction (to subtract the maximum, or to divide by the sum) reads these elements
    once. The sizes of elements follow from the types in the kernel's name.

    Args:
        kernels: (name, number of launches, total duration in ns) of each softmax kernel. Each launch processes the
            scores of one layer.
        shape: (batch size, number of heads, context length).
        units: the number of forward passes or steps that contain these launches.
        gpu: the GPU on which the kernels ran.

    Returns:
        The bytes and rates, or None if too much of the time is spent in kernels of an unknown kind. The result is also
        None if the rate exceeds the peak although the score tensor does not fit into the cache, because the kernels
        then process other tensors than assumed.
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
    reaches_bound = share >= MEMORY_BOUND_SHARE if share is not None else None
    memory_bound = reaches_bound if fits is False or reaches_bound is False else None
    return SoftmaxTraffic(moved_bytes / units, rate, score_bytes, peak, cache, share, fits, memory_bound)


def count_moved_bytes(name: str) -> tuple[int, int, int] | None:
    """Returns the bytes that a kernel of PyTorch moves per element of a score tensor.

    Returns:
        The bytes read per element, the bytes written per element, and the bytes read or written per row of the tensor.
        The result is None for an unknown kind of kernel, and for a fill, since a fill may write only a scalar.
    """
    element_bytes = [_ELEMENT_BYTES.get(type_name, 2) for type_name in _ELEMENT_TYPE.findall(name)]
    if re.search(r"\b[bf]+loat16_copy_kernel", name):
        return 4, 2, 0
    if not element_bytes or "FillFunctor" in name:
        return None
    first_size = element_bytes[0]
    if (
        "softmax_warp_forward<" in name and len(element_bytes) > 1
    ):  # template arguments <input, output, accumulator, ...>
        return first_size, element_bytes[1], 0
    if (
        re.search(r"cunn_(Spatial)?SoftMaxForward", name) and len(element_bytes) > 2
    ):  # <..., input, accumulator, output, ...>
        return first_size, element_bytes[2], 0
    if re.search(r"\breduce_kernel<", name):
        return first_size, 0, first_size
    if "elementwise_kernel<" not in name:
        return None
    if "copy_kernel" in name and re.search(r"LoadWithCast|gpu_kernel_impl<", name):  # a cast between 32 and 16 bits
        return 4 if first_size == 2 else 2, first_size, 0
    return first_size, first_size, first_size if re.search(r"CUDAFunctor_add<|\bBinaryFunctor<", name) else 0
