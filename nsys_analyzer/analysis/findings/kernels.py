"""Rules for kernels that could take less time: with larger grids, or as fused attention or a fused optimizer.

Each rule consists of a type of figures and a function that finds them. ``report/finding_texts/kernels.py`` makes
sentences from the figures.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass

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
from nsys_analyzer.analysis.intervals import NONE
from nsys_analyzer.analysis.operators.account import describe_shapes
from nsys_analyzer.analysis.operators.pricing import PricedOperators
from nsys_analyzer.analysis.operators.shape_reasons import Reason
from nsys_analyzer.analysis.operators.waves import find_idle_shares
from nsys_analyzer.analysis.steps.study import Study
from nsys_analyzer.trace.arrays import Bools, Ints
from nsys_analyzer.trace.columns import ON_DEVICE
from nsys_analyzer.trace.phase_names import ATTENTION_PARTS

#: A call is shortened by at most this many times the usual time of a launch. If a call takes longer, it is the first
#: launch of a kernel, which loads the kernel.
_LOADING_CALL_FACTOR = 10
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
#: The smallest and the largest share of an optimizer's work that fusing is assumed to save. For each parameter, a fused
#: AdamW reads or writes 7 tensors, and an unfused AdamW 20. Tensors that fit into the cache cost less.
FUSED_OPTIMIZER_SAVINGS = (0.4, 0.7)
#: Matches kernels of a fused optimizer of PyTorch, of Apex and similar libraries, or of a compiler.
_FUSED_OPTIMIZER_KERNEL = re.compile(r"[Ff]used\w*(?:MathFunctor|[Aa]dam|[Ss]gd)|AdamFunctor|^triton_")
#: A fused optimizer launches fewer kernels per step than this.
MAX_FUSED_OPTIMIZER_KERNELS = 40
#: The smallest and the largest share of a cache's copies that writing keys and values in place is assumed to save.
CACHE_COPY_SAVINGS = (0.7, 1.0)
#: Matches the kernel with which PyTorch concatenates tensors.
_CONCATENATING_KERNEL = re.compile("CatArrayBatchedCopy")
#: Matches kernels of the class copy/layout that gather or join several tensors.
GATHER_KERNEL = re.compile(r"(?i)cat_?array|index|gather|scatter")


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
    matmuls, on_scores = find_attention(study)
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
    on_scores = find_attention(study)[1]
    return on_scores & (not study.of_class("fused attention").any())


def find_attention(study: Study) -> tuple[Bools, Bools]:
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
    gathers = study.kernel_matches(GATHER_KERNEL)
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
    """Returns both masks of ``find_attention`` for a backward pass in which no kernel is named softmax.

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
    place = Place("phase", "optimizer")
    yield Candidate("unfused_optimizer", figures, changes, place, updates, saves_launches=True)


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
RULES: tuple[Rule, ...] = (find_unfused_optimizer, find_unfused_attention, find_small_grids, find_cache_copies)
