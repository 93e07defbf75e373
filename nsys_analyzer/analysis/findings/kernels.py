"""Rules on kernels that could take less time: with tensor cores, larger grids, or fewer passes over the data.

Each rule is a type of figures and the function that finds them. ``report/finding_texts/kernels.py`` puts them into
words.
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
    Change,
    FindingFigures,
    Place,
    Rule,
    Shares,
    StepsToExplain,
    saved_launches,
    saved_work,
)
from nsys_analyzer.analysis.findings.waits import LEAST_IDLE_SHARE
from nsys_analyzer.analysis.intervals import NONE
from nsys_analyzer.analysis.kernels.classes import find_precision
from nsys_analyzer.analysis.steps.study import Study
from nsys_analyzer.analysis.transformer.peaks import find_peaks
from nsys_analyzer.trace.arrays import Bools, Ints
from nsys_analyzer.trace.columns import KERNEL, ON_DEVICE
from nsys_analyzer.trace.phase_names import ATTENTION_PARTS

#: The first launch of a kernel, which loads it, takes at least this many times as long as a launch usually takes.
_LOADING_FACTOR = 10
#: The share of the gain from TF32, by the peaks, that is reached in practice: the least and the most.
TF32_GAIN_SHARE = (0.3, 0.8)
#: TF32 is worth a finding only if its peak is this many times that of fp32.
_LEAST_TF32_SPEEDUP = 1.5
#: Products with a vector read each number once: tensor cores do not make them faster.
_VECTOR_PRODUCT = re.compile(r"(?i)gemv|dot_kernel")
#: A shorter matmul is too small to be faster on tensor cores, ns.
_SHORTEST_MATMUL_NS = 15_000
#: A shorter kernel ends before more blocks would help, ns.
_SHORTEST_SMALL_GRID_NS = 20_000
#: The share of the idle multiprocessors' time that a full grid would save: the least and the most.
SMALL_GRID_SAVINGS = (0.5, 0.9)
#: The time of fused attention ÷ that of the matmuls of unfused attention, backward included: the most and the least.
FUSED_ATTENTION_RATIOS = (1.0, 0.4)
#: Attention has a softmax in at least this many layers of a step.
_FEWEST_ATTENTION_LAYERS = 2
#: At most this many kernels stand between the two matmuls around a softmax.
_MAX_KERNELS_BETWEEN_MATMULS = 20
#: The number of blocks identifies attention's kernels in a backward pass only if other forward kernels with as many
#: blocks take at most this share of the time of attention's.
_MAX_OUTSIDE_SHARE = 0.5
#: Patterns in the names of kernels: a loss over the vocabulary, a backward pass, and the maximum before a softmax.
_LOSS_SOFTMAX, _BACKWARD, _MAXIMUM = re.compile("(?i)log"), re.compile("(?i)backward|bwd"), re.compile("(?i)max")
_CLASSES_ON_SCORES = ("elementwise", "reduction", "softmax", "copy/layout", "random")
#: The router of a mixture of experts also has a softmax between matmuls. After it, the largest values are selected.
_ROUTING_KERNEL = re.compile(r"(?i)top_?k|gating")
#: Kernels that torch.compile or XLA made.
_COMPILED_KERNEL = re.compile("^triton_|_fusion")
_PLAIN_CLASSES = ("elementwise", "copy/layout")
_ONE_PASS_CLASSES = (*_PLAIN_CLASSES, "reduction", "normalization", "softmax")
#: The share of an optimizer's work that fusing saves: the least and the most. A fused AdamW moves 7 tensors of a
#: parameter's size, a naive one 20; tensors that fit the cache cost less.
FUSED_OPTIMIZER_SAVINGS = (0.4, 0.7)
#: A kernel of a fused optimizer: of PyTorch, of Apex and similar libraries, or of a compiler.
_FUSED_OPTIMIZER_KERNEL = re.compile(r"[Ff]used\w*(?:MathFunctor|[Aa]dam|[Ss]gd)|AdamFunctor|^triton_")
#: A fused optimizer launches fewer kernels than this.
FUSED_OPTIMIZER_KERNELS = 40
#: This many copies in a row are a chain.
SHORTEST_CHAIN = 3
#: The share of a chain's work that a better layout saves: the least and the most.
CHAIN_SAVINGS = (0.65, 1.0)
#: The share of the copies of a cache that writing new keys and values in place saves: the least and the most.
CACHE_COPY_SAVINGS = (0.7, 1.0)
_CONCATENATING_KERNEL = re.compile("CatArrayBatchedCopy")
#: A longer row copies tensors side by side, as an average of weights does, and is not a chain.
_LONGEST_CHAIN = 16
#: The thread blocks of two copies of one tensor differ at most by this factor, because of the sizes of their types.
_MAX_BLOCK_RATIO = 4
#: Kernels that copy one tensor, possibly into another layout or type.
_COPY_KERNEL = re.compile(r"(?i)copy|transpose|permute|nchwto|nhwcto")
#: Kernels of the same class that gather or join several tensors.
_GATHER_KERNEL = re.compile(r"(?i)cat_?array|index|gather|scatter")


@dataclass(frozen=True)
class Fp32MatmulFigures(FindingFigures):
    """The matmuls in fp32, per step, and the peaks of the GPU.

    Attributes:
        share: their share of the step without the profiler.
        gpu: the name of the GPU.
        fp32_flops, tf32_flops, bf16_flops: its peaks, FLOP/s.
        speedups: the least and the most by which TF32 makes the matmuls faster, as the replay assumes.
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
    study = steps.study
    peaks = find_peaks(study.gpu.name if study.gpu else None)
    if peaks is None or "tf32" not in peaks.flops_per_s:
        return
    fp32, tf32, bf16 = (peaks.flops_per_s[precision] for precision in ("fp32", "tf32", "bf16"))
    is_fp32 = (find_precision(name) == "fp32" and not _VECTOR_PRODUCT.search(name) for name in study.kernels)
    in_fp32 = np.array([*is_fp32, False])
    matmuls = in_fp32[study.pieces.kernel] & (study.pieces.duration_ns >= _SHORTEST_MATMUL_NS)
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
class SmallGridsFigures(FindingFigures):
    """The long kernels with few blocks, per step.

    Attributes:
        multiprocessors: the number of the GPU's multiprocessors.
        mean_blocks: the mean number of blocks, weighted by time.
        longest_kernel: the name of the kernel with most of the time.
    """

    kernels: float
    ms: float
    multiprocessors: int
    mean_blocks: float
    longest_kernel: str


def find_small_grids(steps: StepsToExplain) -> Iterator[Candidate]:
    """Finds long kernels of fewer blocks than the GPU has multiprocessors, collectives left out."""
    study = steps.study
    units = study.gpu.sm_count if study.gpu else 0
    small = (study.pieces.kind == KERNEL) & (study.pieces.size > 0) & (study.pieces.size < units)
    small &= (study.pieces.duration_ns >= _SHORTEST_SMALL_GRID_NS) & ~study.of_class("communication")
    if not units or not small.any():
        return
    idle_share = np.where(small, 1 - study.pieces.size / units, 0.0)
    work_ns = study.replay.work_ns[small]
    longest = study.kernels[int(np.bincount(study.pieces.kernel[small], work_ns).argmax())]
    mean_blocks = float(np.average(study.pieces.size[small], weights=work_ns))
    figures = SmallGridsFigures(study.operations_per_step(small), study.work_ms(small), units, mean_blocks, longest)
    changes = tuple(saved_work(share * idle_share) for share in SMALL_GRID_SAVINGS)
    yield Candidate("small_grids", figures, changes, Place("kernel", longest), small)


@dataclass(frozen=True)
class UnfusedAttentionFigures(FindingFigures):
    """The kernels of unfused attention, per step: those that work on the scores, and the matmuls around them."""

    score_kernels: float
    score_ms: float
    matmuls: float
    matmul_ms: float


def find_unfused_attention(steps: StepsToExplain) -> Iterator[Candidate]:
    """Finds attention with kernels over the scores, by its ranges or by its softmax."""
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
    changes = tuple(_fewer_kernels(on_scores + matmuls * (1 - ratio), calls, 0.0) for ratio in FUSED_ATTENTION_RATIOS)
    yield Candidate("unfused_attention", figures, changes, Place("class", "softmax"), matmuls | on_scores)


def _find_attention(study: Study) -> tuple[Bools, Bools]:
    """Returns which operations are attention's matmuls, and which work on its scores, forward and backward.

    In a forward pass, the softmax stands after one matmul and before another; in a backward pass, after two and before
    two. If ranges of the program name the parts of attention, these decide for the forward pass.
    """
    is_matmul, may_be_on_scores = study.of_class("matmul"), study.of_class(*_CLASSES_ON_SCORES)
    matmuls = study.in_attention_part("scores", "values") & is_matmul
    part = study.in_attention_part(*ATTENTION_PARTS)
    on_scores = part & may_be_on_scores if matmuls.any() else np.zeros_like(part)
    # A softmax that is written by hand computes the maximum first.
    by_hand = part & study.of_class("reduction") & study.kernel_matches(_MAXIMUM)
    softmax = (
        study.of_class("softmax") & ~study.kernel_matches(_LOSS_SOFTMAX) & (part if part.any() else True)
    ) | by_hand
    softmax &= ~study.in_phase("loss", "optimizer")
    backward = study.of_class("softmax") & (study.in_phase("backward") | study.kernel_matches(_BACKWARD))
    backward &= ~study.kernel_matches(_LOSS_SOFTMAX)
    forward = softmax & ~backward if not matmuls.any() else np.zeros_like(part)
    matmul_index = np.flatnonzero(is_matmul)
    selects = study.of_class("sort/scan") | study.kernel_matches(_ROUTING_KERNEL)
    gathers = study.kernel_matches(_GATHER_KERNEL)
    step = np.searchsorted(study.replay.first_call, study.replay.launch, side="right")
    router_sizes: set[int] = set()
    for softmaxes, matmuls_per_side in ((forward, 1), (backward, 2)):
        layers_by_kernels = defaultdict[tuple[int, ...], list[Ints]](list)
        for index in np.flatnonzero(softmaxes).tolist():
            next_matmul, size = int(np.searchsorted(matmul_index, index)), int(study.pieces.size[index])
            around = matmul_index[max(next_matmul - matmuls_per_side, 0) : next_matmul + matmuls_per_side]
            if len(around) < 2 * matmuls_per_side or around[-1] - around[0] > _MAX_KERNELS_BETWEEN_MATMULS:
                continue
            first, last = around[0], around[-1]
            if matmuls_per_side == 1 and (selects[first:last].any() or gathers[index:last].any()):
                router_sizes.add(size or NONE)
            elif step[first] == step[last] and not (matmuls_per_side == 2 and size in router_sizes):
                layers_by_kernels[(size, *study.pieces.kernel[[index, *around]].tolist())].append(around)
        for layers in layers_by_kernels.values():
            # Attention is in every layer. A single softmax, as over a vocabulary, is not attention's.
            if not part.any() and len(layers) < _FEWEST_ATTENTION_LAYERS * study.steps:
                continue
            for around in layers:
                matmuls[around] = True
                on_scores[around[0] : around[-1]] |= may_be_on_scores[around[0] : around[-1]]
    if on_scores.any() and not backward.any():
        backward_matmuls, backward_on_scores = _find_backward_by_grids(study, part, on_scores)
        return matmuls | backward_matmuls, on_scores | backward_on_scores
    return matmuls, on_scores


def _find_backward_by_grids(study: Study, part: Bools, on_scores: Bools) -> tuple[Bools, Bools]:
    """Returns the same for a backward pass in which no kernel is named as a softmax.

    Kernels with as many thread blocks as those of the forward pass work on the same scores, and the matmuls next to
    them are attention's. If kernels of the forward pass outside of attention have as many blocks, too, the number of
    blocks says little about the backward pass, and nothing about its matmuls.
    """
    may_be_on_scores, is_matmul = study.of_class(*_CLASSES_ON_SCORES), study.of_class("matmul")
    outside = study.in_phase("forward", "loss") & ~part & ~on_scores & may_be_on_scores
    backward = study.in_phase("backward") & ~part & may_be_on_scores
    grids = np.unique(study.pieces.size[on_scores & (study.pieces.duration_ns >= 5_000) & (study.pieces.size > 0)])
    inside_ms, outside_ms = (
        np.array([study.work_ms(kernels & (study.pieces.size == grid)) for grid in grids.tolist()])
        for kernels in (on_scores, outside)
    )
    mostly_inside, only_inside = grids[outside_ms <= _MAX_OUTSIDE_SHARE * inside_ms], grids[outside_ms == 0]
    on_scores_index = np.flatnonzero(backward & np.isin(study.pieces.size, only_inside))
    matmuls = np.zeros(len(study.pieces.size), np.bool_)
    matmul_index = np.flatnonzero(study.in_phase("backward") & ~part & is_matmul)
    if len(on_scores_index) and len(matmul_index):
        place = np.searchsorted(on_scores_index, matmul_index)
        before = matmul_index - on_scores_index[np.maximum(place - 1, 0)]
        after = on_scores_index[np.minimum(place, len(on_scores_index) - 1)] - matmul_index
        matmuls[matmul_index[((before > 0) & (before <= 3)) | ((after > 0) & (after <= 3))]] = True
    return matmuls, backward & np.isin(study.pieces.size, mostly_inside)


@dataclass(frozen=True)
class UnfusedElementwiseFigures(FindingFigures):
    """The elementwise kernels and the like that no compiler made, per step.

    Attributes:
        share: their share of the step without the profiler.
        chain_length: the mean number of them directly after each other, weighted by time.
    """

    kernels: float
    ms: float
    share: float
    chain_length: float


def find_unfused_elementwise(steps: StepsToExplain) -> Iterator[Candidate]:
    """Finds elementwise kernels, casts and the like that no compiler made, outside the optimizer.

    A compiler makes one kernel of a chain of k that follow each other: between 1/k and 2/k of their time is left.
    Kernels that are one pass already (a norm, a softmax, a sum) are part of a chain, and keep their time.
    """
    study = steps.study
    separate = (
        study.of_class(*_ONE_PASS_CLASSES) & ~study.kernel_matches(_COMPILED_KERNEL) & ~study.in_phase("optimizer")
    )
    # Attention's kernels and chains of copies have findings of their own.
    separate &= ~_find_attention(study)[1] & ~_find_copy_chains(study)
    if study.operations_per_step(separate) < 2:
        return
    # Each compiled region costs CPU time of its own. If launching limits the step, that cost may be as large as what
    # fewer launches save: of two such models, compiling made one 43 % faster, the other 2 %.
    save = saved_work if steps.idle_share >= LEAST_IDLE_SHARE else partial(saved_launches, steps)
    index, chain_length = np.flatnonzero(separate), np.ones(len(separate))
    chain_length[index] = _row_lengths(np.append(True, np.diff(index) > 1))
    least = np.where(study.of_class(*_PLAIN_CLASSES), np.maximum(1 - 2 / chain_length, 0.0), 0.0)
    most = np.where(study.of_class(*_PLAIN_CLASSES, "reduction"), 1 - 1 / chain_length, 0.0)
    ms = study.work_ms(separate)
    mean_length = float(np.average(chain_length[separate], weights=study.replay.work_ns[separate]))
    figures = UnfusedElementwiseFigures(study.operations_per_step(separate), ms, ms / steps.step_ms, mean_length)
    changes = tuple(save(share * separate) for share in (least, most))
    yield Candidate("unfused_elementwise", figures, changes, Place("class", "elementwise"), separate)


@dataclass(frozen=True)
class LayoutCopiesFigures(FindingFigures):
    """The copies that stand in chains, per step; ``share`` is their share of the step without the profiler."""

    copies: float
    ms: float
    share: float


def find_layout_copies(steps: StepsToExplain) -> Iterator[Candidate]:
    """Finds chains of copies on the device: casts and layout changes directly after each other, to and fro."""
    study = steps.study
    chained = _find_copy_chains(study)
    if not chained.any():
        return
    ms = study.work_ms(chained)
    figures = LayoutCopiesFigures(study.operations_per_step(chained), ms, ms / steps.step_ms)
    changes = tuple(saved_launches(steps, chained * share) for share in CHAIN_SAVINGS)
    yield Candidate("layout_copies", figures, changes, Place("class", "copy/layout"), chained)


def _find_copy_chains(study: Study) -> Bools:
    """Returns which operations are copies on the device that stand in a chain, outside the optimizer.

    A chain copies one tensor: of two neighbors, neither has many times the thread blocks of the other. (Under autocast,
    the casts of a weight, its bias and an input stand side by side, and are no chain.)
    """
    of_one_tensor = study.kernel_matches(_COPY_KERNEL) & ~study.kernel_matches(_GATHER_KERNEL)
    copies = (study.of_class("copy/layout") & of_one_tensor) | (study.pieces.copy == ON_DEVICE)
    copies &= ~study.in_phase("optimizer")
    in_chain = np.zeros(len(copies), np.bool_)
    index = np.flatnonzero(copies)
    if not len(index):
        return in_chain
    size = np.maximum(study.pieces.size[index], 1)
    is_unlike = np.maximum(size[1:], size[:-1]) > _MAX_BLOCK_RATIO * np.minimum(size[1:], size[:-1])
    length = _row_lengths(np.append(True, (np.diff(index) > 1) | is_unlike))
    in_chain[index[(length >= SHORTEST_CHAIN) & (length <= _LONGEST_CHAIN)]] = True
    return in_chain


def _row_lengths(starts: Bools) -> Ints:
    """Returns the length of the row that each operation stands in; ``starts`` marks those that begin a row."""
    first = np.flatnonzero(starts)
    lengths = np.diff(np.append(first, len(starts)))
    return np.repeat(lengths, lengths)


@dataclass(frozen=True)
class CacheCopiesFigures(FindingFigures):
    """The copies of a growing cache, per step; ``share`` is their share of the step without the profiler."""

    copies: float
    ms: float
    share: float


def find_cache_copies(steps: StepsToExplain) -> Iterator[Candidate]:
    """Finds tensors that each decode step concatenates or copies on the device, as a cache that grows does."""
    study = steps.study
    copies = study.kernel_matches(_CONCATENATING_KERNEL) | (study.pieces.copy == ON_DEVICE)
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
        is_foreach: whether most of them update several parameters at once (PyTorch's foreach implementation).
    """

    kernels: float
    ms: float
    is_foreach: bool


def find_unfused_optimizer(steps: StepsToExplain) -> Iterator[Candidate]:
    """Finds an optimizer of many kernels, none of them fused: a fused one reads and writes each parameter once."""
    study = steps.study
    updates = study.in_phase("optimizer") & study.of_class("optimizer", "elementwise", "reduction", "copy/layout")
    is_fused = (study.kernel_matches(_FUSED_OPTIMIZER_KERNEL) & updates).any()
    kernels = study.operations_per_step(updates)
    if kernels < FUSED_OPTIMIZER_KERNELS or is_fused:
        return
    foreach = study.of_class("optimizer") & updates
    figures = UnfusedOptimizerFigures(kernels, study.work_ms(updates), bool(foreach.sum() > 0.5 * updates.sum()))
    calls, remaining = study.calls_of(updates), FUSED_OPTIMIZER_KERNELS / kernels
    changes = tuple(_fewer_kernels(updates * share, calls, remaining) for share in FUSED_OPTIMIZER_SAVINGS)
    yield Candidate("unfused_optimizer", figures, changes, Place("phase", "optimizer"), updates)


def _fewer_kernels(share: Shares, calls: Bools, remaining: float) -> Change:
    """Returns a change that removes a share of each operation's work, and all but a part of the time after some calls.

    No call saves more than ten usual launches: the first launch of a kernel loads it.

    Args:
        share: the share of each operation's work that is removed.
        calls: which calls become shorter.
        remaining: the share of their time that remains.
    """
    work, after = (1 - share).astype(np.float64), np.where(calls, remaining, 1.0)
    return lambda replay: replay.with_launching(after, _LOADING_FACTOR * replay.launching_ns).with_work(work)


#: The rules of this family; of two findings that save as much, the rule that stands first here comes first.
RULES: tuple[Rule, ...] = (
    find_fp32_matmul, find_unfused_optimizer, find_unfused_attention, find_unfused_elementwise,
    find_layout_copies, find_small_grids, find_cache_copies,
)  # fmt: skip
