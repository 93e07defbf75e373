"""Attention runs as separate kernels over the scores, where one kernel would never write them."""

from __future__ import annotations

import re
from collections.abc import Iterator

import numpy as np

from nsys_analyzer.analysis.findings.case import Candidate, Case, less_of, times
from nsys_analyzer.analysis.findings.finding import Place
from nsys_analyzer.analysis.ranges.phases import ATTENTION_PARTS
from nsys_analyzer.trace.arrays import Bools

#: The time of fused attention ÷ that of the matmuls of unfused attention, backward included.
_FUSED = (1.0, 0.4)
#: Softmax kernels of one step, at least, and kernels from a matmul over the softmax to the next, at most.
_FEWEST_LAYERS, _LONGEST_CHAIN = 2, 20
#: Kernels of as many blocks outside of attention, of the time of those inside, at most.
_SHARED = 0.5
#: The softmax of a loss over the vocabulary, and that of a backward pass.
_OF_LOSS, _BACKWARD, _MAXIMUM = re.compile("(?i)log"), re.compile("(?i)backward|bwd"), re.compile("(?i)max")
_CHAIN = ("elementwise", "reduction", "softmax", "copy/layout", "random")


def find(case: Case) -> Iterator[Candidate]:
    """Attention with kernels over the scores, by its ranges or by its softmax."""
    study = case.study
    matmuls, chain = attention_work(case)
    if not matmuls.any() or not chain.any() or study.of_class("fused attention").any():
        return
    fused_ms, chain_ms = case.ms(matmuls), case.ms(chain)

    yield Candidate(
        "unfused_attention",
        "Attention is not fused",
        tuple(less_of(chain + matmuls * (1 - ratio), case.calls_of(chain), 0.0) for ratio in _FUSED),
        (
            f"Attention runs {times(study.count(chain), 'kernel')} a step over its scores for {chain_ms:.3g} ms, and "
            f"{times(study.count(matmuls), 'matmul')} for {fused_ms:.3g} ms.",
        ),
        "The step is replayed without the kernels over the scores, and with 0.4 to 1 times the matmuls' time: a fused "
        "kernel does the same matmuls, half of them where a causal mask lets it.",
        ("out = F.scaled_dot_product_attention(q, k, v, is_causal=True)  # in bf16 or fp16: FlashAttention",),
        "The kernels' names hold flash or fmha afterwards; the softmax's kernels are gone.",
        place=Place("class", "softmax"),
    )


def attention_work(case: Case) -> tuple[Bools, Bools]:
    """The pieces that are attention's matmuls, and those that work on its scores, forward and backward.

    Softmax stands between them: in a forward pass behind one matmul and before another, in a backward pass behind two
    and before two. Where the program's ranges name the parts of attention, these say it of the forward pass.
    """
    study = case.study
    matmul, moving = study.of_class("matmul"), study.of_class(*_CHAIN)
    matmuls = study.in_part("scores", "values") & matmul
    part = study.in_part(*ATTENTION_PARTS)
    chain = part & moving if matmuls.any() else np.zeros_like(part)
    # One that is written by hand takes the maximum first.
    by_hand = part & study.of_class("reduction") & study.named(_MAXIMUM)
    softmax = (study.of_class("softmax") & ~study.named(_OF_LOSS) & (part if part.any() else True)) | by_hand
    softmax &= ~study.in_phase("loss", "optimizer")
    backward = study.of_class("softmax") & (study.in_phase("backward") | study.named(_BACKWARD))
    backward &= ~study.named(_OF_LOSS)
    forward = softmax & ~backward if not matmuls.any() else np.zeros_like(part)
    at = np.flatnonzero(matmul)
    for chosen, around in ((forward, 1), (backward, 2)):
        # Every layer has one; a single one is of something else.
        is_of_layers = part.any() or study.count(chosen) >= _FEWEST_LAYERS
        for piece in np.flatnonzero(chosen).tolist() if is_of_layers else ():
            behind = int(np.searchsorted(at, piece))
            between = at[max(behind - around, 0) : behind + around]
            if len(between) == 2 * around and between[-1] - between[0] <= _LONGEST_CHAIN:
                matmuls[between] = True
                chain[between[0] : between[-1]] |= moving[between[0] : between[-1]]
    if chain.any() and not backward.any():
        more = _by_grids(case, part, chain)
        return matmuls | more[0], chain | more[1]
    return matmuls, chain


def _by_grids(case: Case, part: Bools, chain: Bools) -> tuple[Bools, Bools]:
    """The same of a backward pass without a softmax by name.

    Kernels of as many thread blocks as those of the forward pass work on the same scores, and the matmuls beside them
    are attention's. Where the forward pass has kernels of as many blocks outside of attention, too, that says little of
    the backward pass, and nothing of its matmuls.
    """
    study = case.study
    moving, matmul = study.of_class(*_CHAIN), study.of_class("matmul")
    outside = study.in_phase("forward", "loss") & ~part & ~chain & moving
    backward = study.in_phase("backward") & ~part & moving
    grids = np.unique(study.size[chain & (study.duration >= 5_000) & (study.size > 0)])
    inside_ms, outside_ms = (
        np.array([case.ms(some & (study.size == grid)) for grid in grids.tolist()]) for some in (chain, outside)
    )
    mostly, only = grids[outside_ms <= _SHARED * inside_ms], grids[outside_ms == 0]
    near = np.flatnonzero(backward & np.isin(study.size, only))
    beside = np.zeros(len(study.size), np.bool_)
    candidates = np.flatnonzero(study.in_phase("backward") & ~part & matmul)
    if len(near) and len(candidates):
        place = np.searchsorted(near, candidates)
        before = candidates - near[np.maximum(place - 1, 0)]
        behind = near[np.minimum(place, len(near) - 1)] - candidates
        beside[candidates[((before > 0) & (before <= 3)) | ((behind > 0) & (behind <= 3))]] = True
    return beside, backward & np.isin(study.size, mostly)
