"""Rules for kernels that could take less time: with tensor cores, larger grids, or fewer passes over the data.

Each rule consists of a type of figures and a function that finds them. ``report/finding_texts/kernels.py`` makes
sentences from the figures.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial

import numpy as np

from nsys_analyzer.analysis.findings.finding import (
    Candidate,
    FindingFigures,
    Place,
    ReplayChange,
    Rule,
    StepsToExplain,
    WorkShares,
    saved_launches,
    saved_work,
)
from nsys_analyzer.analysis.findings.waits import LEAST_IDLE_SHARE
from nsys_analyzer.analysis.intervals import NONE
from nsys_analyzer.analysis.kernels.classes import find_precision
from nsys_analyzer.analysis.operators.account import describe_shapes
from nsys_analyzer.analysis.operators.pricing import PricedOperators
from nsys_analyzer.analysis.operators.shape_reasons import Reason
from nsys_analyzer.analysis.operators.waves import find_idle_shares
from nsys_analyzer.analysis.steps.study import Study
from nsys_analyzer.analysis.transformer.peaks import find_peaks
from nsys_analyzer.trace.arrays import Bools, Ints
from nsys_analyzer.trace.columns import KERNEL, ON_DEVICE
from nsys_analyzer.trace.phase_names import ATTENTION_PARTS

#: A call is shortened by at most this many times the usual time of a launch. If a call takes longer, it is the first
#: launch of a kernel, which loads the kernel.
_LOADING_CALL_FACTOR = 10
#: The smallest and the largest share of the theoretical speedup of TF32, which follows from the peaks, that is assumed.
TF32_GAIN_SHARE = (0.3, 0.8)
#: The minimum ratio of the TF32 peak to the fp32 peak for which a finding is reported.
_LEAST_TF32_SPEEDUP = 1.5
#: Matches kernels that multiply by a vector. Such kernels read each element once, so tensor cores do not help.
_VECTOR_PRODUCT_KERNEL = re.compile(r"(?i)gemv|dot_kernel")
#: The minimum duration of a matmul that tensor cores are assumed to make faster, ns.
_SHORTEST_MATMUL_NS = 15_000
#: The minimum duration of a kernel that a larger grid is assumed to make faster, ns.
_SHORTEST_SMALL_GRID_NS = 20_000
#: The smallest and the largest share of the idle multiprocessors' time that a full grid is assumed to save.
SMALL_GRID_SAVINGS = (0.5, 0.9)
#: The time of fused attention divided by the time of the matmuls of unfused attention, in forward and backward passes:
#: the largest and the smallest ratio that is assumed.
FUSED_ATTENTION_RATIOS = (1.0, 0.4)
#: The minimum number of softmaxes between matmuls per step that count as attention.
_FEWEST_ATTENTION_LAYERS = 2
#: The maximum number of kernels from the first to the last matmul around a softmax.
_MAX_KERNELS_BETWEEN_MATMULS = 20
#: A grid size identifies attention's kernels in a backward pass only if the forward kernels outside of attention with
#: this grid size take at most this share of the time of attention's forward kernels with this grid size.
_MAX_SHARE_OUTSIDE_ATTENTION = 0.5
#: Matches kernels of a loss over the vocabulary.
_LOSS_KERNEL = re.compile("(?i)log")
#: Matches kernels of a backward pass.
_BACKWARD_KERNEL = re.compile("(?i)backward|bwd")
#: Matches reductions that compute the maximum before a softmax.
_MAXIMUM_KERNEL = re.compile("(?i)max")
#: The classes of the kernels that unfused attention runs on its scores.
_CLASSES_ON_SCORES = ("elementwise", "reduction", "softmax", "copy/layout", "random")
#: Matches kernels with which the router of a mixture of experts selects experts. The router also has a softmax between
#: matmuls, which must not be taken for attention.
_ROUTING_KERNEL = re.compile(r"(?i)top_?k|gating")
#: Matches kernels that torch.compile or XLA generated.
_COMPILED_KERNEL = re.compile("^triton_|_fusion")
#: The classes whose kernels pass once over the data, so that a compiler can fuse them with their neighbors.
_FUSIBLE_CLASSES = ("elementwise", "copy/layout", "reduction", "normalization", "softmax")
#: The smallest and the largest share of an optimizer's work that fusing is assumed to save. For each parameter, a fused
#: AdamW reads or writes 7 tensors, and an unfused AdamW 20. Tensors that fit into the cache cost less.
FUSED_OPTIMIZER_SAVINGS = (0.4, 0.7)
#: Matches kernels of a fused optimizer of PyTorch, of Apex and similar libraries, or of a compiler.
_FUSED_OPTIMIZER_KERNEL = re.compile(r"[Ff]used\w*(?:MathFunctor|[Aa]dam|[Ss]gd)|AdamFunctor|^triton_")
#: A fused optimizer launches fewer kernels per step than this.
MAX_FUSED_OPTIMIZER_KERNELS = 40
#: The minimum number of consecutive copies that are a chain.
SHORTEST_COPY_CHAIN = 3
#: The smallest and the largest share of a chain's work that a better layout is assumed to save.
COPY_CHAIN_SAVINGS = (0.65, 1.0)
#: The smallest and the largest share of a cache's copies that writing keys and values in place is assumed to save.
CACHE_COPY_SAVINGS = (0.7, 1.0)
#: Matches the kernel with which PyTorch concatenates tensors.
_CONCATENATING_KERNEL = re.compile("CatArrayBatchedCopy")
#: The maximum number of consecutive copies that are a chain. More copies copy different tensors, as an average of
#: weights does.
_LONGEST_COPY_CHAIN = 16
#: The maximum ratio of the grid sizes of two copies of one tensor. The sizes differ if the element types differ.
_MAX_GRID_SIZE_RATIO = 4
#: Matches kernels that copy one tensor, possibly into another layout or type.
_COPY_KERNEL = re.compile(r"(?i)copy|transpose|permute|nchwto|nhwcto")
#: Matches kernels of the class copy/layout that gather or join several tensors.
_GATHER_KERNEL = re.compile(r"(?i)cat_?array|index|gather|scatter")


@dataclass(frozen=True)
class Fp32MatmulFigures(FindingFigures):
    """The matmuls in fp32, per step, and the peaks of the GPU.

    Attributes:
        kernels: the number of fp32 matmuls per step.
        ms: the time of fp32 matmuls per step, ms.
        share: this time as a share of the step without the profiler.
        gpu: the name of the GPU.
        fp32_flops, tf32_flops, bf16_flops: the peaks of the GPU, FLOP/s.
        speedups: the smallest and the largest factor by which TF32 is assumed to make the matmuls faster.
    """

    kernels: float
    ms: float
    share: float
    gpu: str
    fp32_flops: float
    tf32_flops: float
    bf16_flops: float
    speedups: tuple[float, float]


def find_fp32_matmul(steps: StepsToExplain) -> Iterator[Candidate]:
    """Finds matmuls whose kernels multiply in fp32 on CUDA cores, on a GPU whose TF32 peak is known."""
    if steps.operators and steps.operators.rates:  # the rule on operators in fp32 knows more
        return
    study = steps.study
    peaks = find_peaks(study.gpu.name if study.gpu else None)
    if peaks is None or "tf32" not in peaks.flops_per_s:
        return
    fp32, tf32, bf16 = (peaks.flops_per_s[precision] for precision in ("fp32", "tf32", "bf16"))
    is_fp32 = (find_precision(name) == "fp32" and not _VECTOR_PRODUCT_KERNEL.search(name) for name in study.kernels)
    in_fp32 = np.array([*is_fp32, False])
    matmuls = in_fp32[study.operations.kernel] & (study.operations.duration_ns >= _SHORTEST_MATMUL_NS)
    if tf32 / fp32 < _LEAST_TF32_SPEEDUP or not matmuls.any():
        return
    ms = study.work_ms(matmuls)
    least, most = (1 + (tf32 / fp32 - 1) * share for share in TF32_GAIN_SHARE)
    figures = Fp32MatmulFigures(
        study.operations_per_step(matmuls), ms, ms / steps.step_ms, peaks.name, fp32, tf32, bf16, (least, most)
    )
    changes = tuple(saved_work(matmuls * (1 - 1 / speedup)) for speedup in (least, most))
    yield Candidate("fp32_matmul", figures, changes, Place("class", "matmul"), matmuls)


@dataclass(frozen=True)
class IdleMultiprocessorsFigures(FindingFigures):
    """The kernels whose blocks leave multiprocessors idle, per step.

    Attributes:
        kernels: the number of these kernels per step.
        ms: the time of these kernels per step, ms.
        multiprocessors: the number of multiprocessors of the GPU.
        mean_blocks: the mean number of blocks of these kernels, weighted by time.
        longest_kernel: the name of the kernel with most of the time.
        operator: the name of the operator that launches this kernel, and its shapes; empty if operators are unknown.
        blocks_per_wave: the number of blocks of the kernel with most of the time that the GPU runs at once; 0 if it is
            unknown.
    """

    kernels: float
    ms: float
    multiprocessors: int
    mean_blocks: float
    longest_kernel: str
    operator: tuple[str, str]
    blocks_per_wave: int


class SmallGridsFigures(IdleMultiprocessorsFigures):
    """The kernels with fewer blocks than the GPU has multiprocessors, per step."""


class WaveTailsFigures(IdleMultiprocessorsFigures):
    """The kernels of several waves whose last wave leaves multiprocessors idle, per step."""


def find_small_grids(steps: StepsToExplain) -> Iterator[Candidate]:
    """Finds kernels with fewer blocks than the GPU has multiprocessors, and kernels whose last wave is partly full.

    If the attainable time of an operator is known, its kernels count if this is the reason for its excess, and they
    save at most the excess. Of other kernels, those count that are long and have fewer blocks than multiprocessors.
    """
    study, operators = steps.study, steps.operators
    idle, work_ns = find_idle_shares(study), study.replay.work_ns
    is_long = study.operations.duration_ns >= _SHORTEST_SMALL_GRID_NS
    kinds: tuple[tuple[str, type[IdleMultiprocessorsFigures], Reason, Bools], ...] = (
        ("small_grids", SmallGridsFigures, "small_grid", idle.is_small),
        ("wave_tails", WaveTailsFigures, "wave_tail", (idle.least > 0) & ~idle.is_small),
    )
    for finding_id, figures_type, reason, is_of_kind in kinds:
        shares = []
        for idle_share in (idle.least * is_of_kind, idle.most * is_of_kind):
            counted_share = (idle.is_small & is_long).astype(np.float64)
            if operators:
                limit = np.minimum(operators.excess_ns / np.maximum(operators.measure_ns(idle_share), 1.0), 1.0)
                limited_share = operators.spread(np.where(steps.reasons[reason], limit, 0.0))
                counted_share = np.where(operators.operations_of(operators.is_priced), limited_share, counted_share)
            shares.append(idle_share * counted_share)
        selected = shares[1] > 0
        if not selected.any():
            continue
        longest = int(np.bincount(study.operations.kernel[selected], work_ns[selected]).argmax())
        is_longest = selected & (study.operations.kernel == longest)
        figures = figures_type(
            study.operations_per_step(selected),
            study.work_ms(selected),
            study.gpu.sm_count if study.gpu else 0,
            mean_blocks=float(np.average(study.operations.size[selected], weights=work_ns[selected])),
            longest_kernel=study.kernels[longest],
            operator=_describe_operator(operators, int(operators.call[is_longest][0])) if operators else ("", ""),
            blocks_per_wave=int(idle.blocks_per_wave[is_longest][0]),
        )
        changes = tuple(saved_work(share * gain) for share, gain in zip(shares, SMALL_GRID_SAVINGS, strict=True))
        place = Place("kernel", figures.longest_kernel)
        yield Candidate(finding_id, figures, changes, place, selected, is_symptom=True)


def _describe_operator(operators: PricedOperators, call: int) -> tuple[str, str]:
    """Returns the name of the operator of a call without its namespace, and its shapes; empty for no call."""
    if call < 0:
        return "", ""
    signature = operators.calls.signatures[operators.calls.signature[call]]
    return signature.name.rpartition("::")[2], describe_shapes(signature)


@dataclass(frozen=True)
class UnfusedAttentionFigures(FindingFigures):
    """The kernels of unfused attention, per step.

    Attributes:
        score_kernels, score_ms: the number and the time, ms, of the kernels that work on the scores.
        matmuls, matmul_ms: the number and the time, ms, of the matmuls before and after these kernels.
    """

    score_kernels: float
    score_ms: float
    matmuls: float
    matmul_ms: float


def find_unfused_attention(steps: StepsToExplain) -> Iterator[Candidate]:
    """Finds unfused attention, by the program's ranges around it or by its softmax."""
    study = steps.study
    matmuls, on_scores = _find_attention(study)
    if not matmuls.any() or not on_scores.any() or study.of_class("fused attention").any():
        return
    figures = UnfusedAttentionFigures(
        study.operations_per_step(on_scores),
        study.work_ms(on_scores),
        study.operations_per_step(matmuls),
        study.work_ms(matmuls),
    )
    calls = study.calls_of(on_scores)
    changes = tuple(
        _shorten_with_calls(on_scores + matmuls * (1 - ratio), calls, 0.0) for ratio in FUSED_ATTENTION_RATIOS
    )
    yield Candidate("unfused_attention", figures, changes, Place("class", "softmax"), matmuls | on_scores)


def find_unfused_scores(study: Study) -> Bools:
    """Returns True for each operation of unfused attention that works on its scores; shape (operations,)."""
    on_scores = _find_attention(study)[1]
    return on_scores & (not study.of_class("fused attention").any())


def _find_attention(study: Study) -> tuple[Bools, Bools]:
    """Returns a mask of attention's matmuls and a mask of the kernels on its scores, in forward and backward passes.

    In a forward pass, the softmax follows one matmul and precedes another matmul. In a backward pass, it follows two
    matmuls and precedes two. If ranges of the program name the parts of attention, they decide for the forward pass.
    """
    is_matmul, may_be_score_kernel = study.of_class("matmul"), study.of_class(*_CLASSES_ON_SCORES)
    matmuls = study.in_attention_part("scores", "values") & is_matmul
    part = study.in_attention_part(*ATTENTION_PARTS)
    is_score_kernel = part & may_be_score_kernel if matmuls.any() else np.zeros_like(part)
    # A softmax of several kernels computes the maximum first.
    is_maximum = part & study.of_class("reduction") & study.kernel_matches(_MAXIMUM_KERNEL)
    softmax = (
        study.of_class("softmax") & ~study.kernel_matches(_LOSS_KERNEL) & (part if part.any() else True)
    ) | is_maximum
    softmax &= ~study.in_phase("loss", "optimizer")
    backward = study.of_class("softmax") & (study.in_phase("backward") | study.kernel_matches(_BACKWARD_KERNEL))
    backward &= ~study.kernel_matches(_LOSS_KERNEL)
    forward = softmax & ~backward if not matmuls.any() else np.zeros_like(part)
    matmul_index = np.flatnonzero(is_matmul)
    selects = study.of_class("sort/scan") | study.kernel_matches(_ROUTING_KERNEL)
    gathers = study.kernel_matches(_GATHER_KERNEL)
    step = np.searchsorted(study.replay.first_call, study.replay.launch, side="right")
    router_sizes: set[int] = set()
    for softmaxes, matmuls_per_side in ((forward, 1), (backward, 2)):
        layers_by_kernels = defaultdict[tuple[int, ...], list[Ints]](list)
        for index in np.flatnonzero(softmaxes).tolist():
            next_matmul, size = int(np.searchsorted(matmul_index, index)), int(study.operations.size[index])
            neighbors = matmul_index[max(next_matmul - matmuls_per_side, 0) : next_matmul + matmuls_per_side]
            if len(neighbors) < 2 * matmuls_per_side or neighbors[-1] - neighbors[0] > _MAX_KERNELS_BETWEEN_MATMULS:
                continue
            first, last = neighbors[0], neighbors[-1]
            if matmuls_per_side == 1 and (selects[first:last].any() or gathers[index:last].any()):
                router_sizes.add(size or NONE)
            elif step[first] == step[last] and not (matmuls_per_side == 2 and size in router_sizes):
                layers_by_kernels[(size, *study.operations.kernel[[index, *neighbors]].tolist())].append(neighbors)
        for layers in layers_by_kernels.values():
            # Attention occurs in every layer. A single softmax, as over a vocabulary, is not part of attention.
            if not part.any() and len(layers) < _FEWEST_ATTENTION_LAYERS * study.steps:
                continue
            for neighbors in layers:
                matmuls[neighbors] = True
                is_score_kernel[neighbors[0] : neighbors[-1]] |= may_be_score_kernel[neighbors[0] : neighbors[-1]]
    if is_score_kernel.any() and not backward.any():
        backward_matmuls, backward_score_kernels = _find_backward_by_grids(study, part, is_score_kernel)
        return matmuls | backward_matmuls, is_score_kernel | backward_score_kernels
    return matmuls, is_score_kernel


def _find_backward_by_grids(study: Study, part: Bools, is_score_kernel: Bools) -> tuple[Bools, Bools]:
    """Returns both masks of ``_find_attention`` for a backward pass in which no kernel is named softmax.

    A kernel of the backward pass works on the scores if it has the same grid size as a kernel on the scores in the
    forward pass. The matmuls next to such kernels belong to attention. If forward kernels outside of attention have the
    same grid size, too, it identifies only kernels on the scores, and only if these other kernels take little time.
    """
    may_be_score_kernel, is_matmul = study.of_class(*_CLASSES_ON_SCORES), study.of_class("matmul")
    is_outside_attention = study.in_phase("forward", "loss") & ~part & ~is_score_kernel & may_be_score_kernel
    backward = study.in_phase("backward") & ~part & may_be_score_kernel
    grids = np.unique(
        study.operations.size[is_score_kernel & (study.operations.duration_ns >= 5_000) & (study.operations.size > 0)]
    )
    inside_ms, outside_ms = (
        np.array([study.work_ms(kernels & (study.operations.size == grid)) for grid in grids.tolist()])
        for kernels in (is_score_kernel, is_outside_attention)
    )
    mostly_inside, only_inside = grids[outside_ms <= _MAX_SHARE_OUTSIDE_ATTENTION * inside_ms], grids[outside_ms == 0]
    score_kernel_index = np.flatnonzero(backward & np.isin(study.operations.size, only_inside))
    matmuls = np.zeros(len(study.operations.size), np.bool_)
    matmul_index = np.flatnonzero(study.in_phase("backward") & ~part & is_matmul)
    if len(score_kernel_index) and len(matmul_index):
        position = np.searchsorted(score_kernel_index, matmul_index)
        distance_before = matmul_index - score_kernel_index[np.maximum(position - 1, 0)]
        distance_after = score_kernel_index[np.minimum(position, len(score_kernel_index) - 1)] - matmul_index
        is_after_scores = (distance_before > 0) & (distance_before <= 3)
        is_before_scores = (distance_after > 0) & (distance_after <= 3)
        matmuls[matmul_index[is_after_scores | is_before_scores]] = True
    return matmuls, backward & np.isin(study.operations.size, mostly_inside)


@dataclass(frozen=True)
class UnfusedElementwiseFigures(FindingFigures):
    """The separate elementwise kernels, casts, norms and reductions that a compiler could fuse, per step.

    Attributes:
        kernels: the number of these kernels per step.
        ms: the time of these kernels per step, ms.
        share: this time as a share of the step without the profiler.
        chain_length: the mean number of such kernels that follow each other directly, weighted by time.
    """

    kernels: float
    ms: float
    share: float
    chain_length: float


def find_unfused_elementwise(steps: StepsToExplain) -> Iterator[Candidate]:
    """Finds elementwise kernels, casts, norms and reductions outside the optimizer that no compiler generated.

    A compiler fuses a chain of consecutive kernels into one kernel. It takes between the time of the longest kernel and
    that of the two longest kernels.
    """
    if steps.has_data_flow:  # the rule on chains of operators knows more
        return
    study = steps.study
    least, most, chain_length = np.zeros((3, len(study.operations)))
    for chain in find_kernel_chains(study):
        work_ns = np.sort(study.replay.work_ns[chain])
        chain_length[chain] = len(chain)
        for share, kernels in ((least, 2), (most, 1)):
            share[chain] = work_ns[:-kernels].sum() / max(work_ns.sum(), 1.0)
    separate = chain_length > 0
    if study.operations_per_step(separate) < 2:
        return
    # Each compiled region costs additional CPU time. If launching limits the step, this cost may be as large as the
    # saving of fewer launches: compiling made one such model 43 % faster, and another one 2 %.
    save = saved_work if steps.idle_share >= LEAST_IDLE_SHARE else partial(saved_launches, steps)
    ms = study.work_ms(separate)
    mean_length = float(np.average(chain_length[separate], weights=study.replay.work_ns[separate]))
    figures = UnfusedElementwiseFigures(study.operations_per_step(separate), ms, ms / steps.step_ms, mean_length)
    changes = (save(least), save(most))
    yield Candidate("unfused_elementwise", figures, changes, Place("class", "elementwise"), separate, is_common=True)


def find_kernel_chains(study: Study) -> Iterator[Ints]:
    """Yields the operations of each chain of consecutive kernels that a compiler could fuse; at least one kernel.

    Other rules report attention's kernels and chains of copies.
    """
    fusible = study.of_class(*_FUSIBLE_CLASSES) | (study.operations.copy == ON_DEVICE)
    fusible &= ~study.kernel_matches(_COMPILED_KERNEL) & ~study.in_phase("optimizer") & ~_find_attention(study)[1]
    # Fills and copies between two kernels do not keep a compiler from fusing them.
    is_barrier, index = (study.operations.kind == KERNEL) & ~fusible, np.flatnonzero(fusible)
    starts = np.diff(np.cumsum(is_barrier)[index], prepend=-1) > 0
    copy_chains = _find_copy_chains(study)
    yield from (chain for chain in np.split(index, np.flatnonzero(starts)[1:]) if not copy_chains[chain].all())


@dataclass(frozen=True)
class CopiesFigures(FindingFigures):
    """The figures of a rule that finds copies on the device.

    Attributes:
        copies: the number of these copies per step.
        ms: the time of these copies per step, ms.
        share: this time as a share of the step without the profiler.
    """

    copies: float
    ms: float
    share: float


class LayoutCopiesFigures(CopiesFigures):
    """The figures of chains of copies: casts and layout changes of one tensor."""


def find_layout_copies(steps: StepsToExplain) -> Iterator[Candidate]:
    """Finds chains of copies on the device: casts and layout changes of one tensor that follow each other directly."""
    if steps.has_data_flow:  # the rule on chains of operators knows more
        return
    study = steps.study
    chained = _find_copy_chains(study)
    if not chained.any():
        return
    ms = study.work_ms(chained)
    figures = LayoutCopiesFigures(study.operations_per_step(chained), ms, ms / steps.step_ms)
    changes = tuple(saved_launches(steps, chained * share) for share in COPY_CHAIN_SAVINGS)
    yield Candidate("layout_copies", figures, changes, Place("class", "copy/layout"), chained)


def _find_copy_chains(study: Study) -> Bools:
    """Returns True for each copy on the device that is part of a chain, outside the optimizer; shape (operations,).

    All copies of a chain copy one tensor, so the grid sizes of neighbors are similar. Under autocast, the casts of a
    weight, a bias and an input follow each other, but have different grid sizes and are not a chain.
    """
    copies_one_tensor = study.kernel_matches(_COPY_KERNEL) & ~study.kernel_matches(_GATHER_KERNEL)
    copies = (study.of_class("copy/layout") & copies_one_tensor) | (study.operations.copy == ON_DEVICE)
    copies &= ~study.in_phase("optimizer")
    in_chain = np.zeros(len(copies), np.bool_)
    index = np.flatnonzero(copies)
    if not len(index):
        return in_chain
    size = np.maximum(study.operations.size[index], 1)
    is_unlike = np.maximum(size[1:], size[:-1]) > _MAX_GRID_SIZE_RATIO * np.minimum(size[1:], size[:-1])
    length = _find_run_lengths(np.append(True, (np.diff(index) > 1) | is_unlike))
    in_chain[index[(length >= SHORTEST_COPY_CHAIN) & (length <= _LONGEST_COPY_CHAIN)]] = True
    return in_chain


def _find_run_lengths(starts: Bools) -> Ints:
    """Returns the length of the run of operations that contains each operation.

    ``starts`` is True for the first operation of each run.
    """
    first = np.flatnonzero(starts)
    lengths = np.diff(np.append(first, len(starts)))
    return np.repeat(lengths, lengths)


class CacheCopiesFigures(CopiesFigures):
    """The figures of copies of tensors that grow in each decode step, such as a cache of keys and values."""


def find_cache_copies(steps: StepsToExplain) -> Iterator[Candidate]:
    """Finds tensors that each decode step concatenates or copies on the device, such as a growing cache."""
    study = steps.study
    copies = study.kernel_matches(_CONCATENATING_KERNEL) | (study.operations.copy == ON_DEVICE)
    if steps.summary.kind != "decode" or not copies.any():
        return
    ms = study.work_ms(copies)
    figures = CacheCopiesFigures(study.operations_per_step(copies), ms, ms / steps.step_ms)
    changes = tuple(saved_launches(steps, copies * share) for share in CACHE_COPY_SAVINGS)
    yield Candidate("cache_copies", figures, changes, Place("class", "copy/layout"), copies)


@dataclass(frozen=True)
class UnfusedOptimizerFigures(FindingFigures):
    """The kernels of an unfused optimizer, per step.

    Attributes:
        kernels: the number of these kernels per step.
        ms: the time of these kernels per step, ms.
        is_foreach: whether most kernels update several parameters at once (PyTorch's foreach implementation).
    """

    kernels: float
    ms: float
    is_foreach: bool


def find_unfused_optimizer(steps: StepsToExplain) -> Iterator[Candidate]:
    """Finds an optimizer that launches many kernels and no fused kernel."""
    study = steps.study
    updates = study.in_phase("optimizer") & study.of_class("optimizer", "elementwise", "reduction", "copy/layout")
    is_fused = (study.kernel_matches(_FUSED_OPTIMIZER_KERNEL) & updates).any()
    kernels = study.operations_per_step(updates)
    if kernels < MAX_FUSED_OPTIMIZER_KERNELS or is_fused:
        return
    foreach = study.of_class("optimizer") & updates
    figures = UnfusedOptimizerFigures(kernels, study.work_ms(updates), bool(foreach.sum() > 0.5 * updates.sum()))
    calls, remaining = study.calls_of(updates), MAX_FUSED_OPTIMIZER_KERNELS / kernels
    changes = tuple(_shorten_with_calls(updates * share, calls, remaining) for share in FUSED_OPTIMIZER_SAVINGS)
    yield Candidate("unfused_optimizer", figures, changes, Place("phase", "optimizer"), updates)


def _shorten_with_calls(share: WorkShares, calls: Bools, remaining: float) -> ReplayChange:
    """Returns a change that shortens the work of operations and the time of calls.

    No call saves more than ten usual launches, since a longer call loads its kernel.

    Args:
        share: shape (operations,), the share of each operation's work that is removed.
        calls: shape (calls,), True for each call that is shortened.
        remaining: the share of these calls' time that remains.
    """
    work_factor, launch_factor = (1 - share).astype(np.float64), np.where(calls, remaining, 1.0)
    return lambda replay: replay.scale_launches(
        launch_factor, _LOADING_CALL_FACTOR * replay.median_launch_ns
    ).scale_work(work_factor)


#: The rules of this file. If two findings save equal time, the finding of the earlier rule comes first.
RULES: tuple[Rule, ...] = (
    find_fp32_matmul, find_unfused_optimizer, find_unfused_attention, find_unfused_elementwise,
    find_layout_copies, find_small_grids, find_cache_copies,
)  # fmt: skip
