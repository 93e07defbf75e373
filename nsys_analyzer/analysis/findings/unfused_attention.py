"""Attention runs as separate kernels over the scores, where one kernel would never write them."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from nsys_analyzer.analysis.findings.case import Candidate, Case, less_of, times
from nsys_analyzer.analysis.findings.finding import Place
from nsys_analyzer.trace.arrays import Bools

#: The time of fused attention ÷ that of the matmuls of unfused attention, backward included.
_FUSED = (1.0, 0.4)
#: Softmax kernels of one step, at least, and kernels from a matmul over the softmax to the next, at most.
_FEWEST_LAYERS, _LONGEST_CHAIN = 2, 20
#: Kernels of as many blocks outside of attention, of the time of those inside, at most.
_SHARED = 0.5
_CHAIN = ("elementwise", "reduction", "softmax", "copy/layout", "random")


def find(case: Case) -> Iterator[Candidate]:
    """Attention with kernels over the scores, by its ranges or by its softmax."""
    study = case.study
    matmuls, chain = attention_work(case)
    if not matmuls.any() or not chain.any() or (study.of_class("fused attention") & study.part).any():
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

    The backward pass has no ranges of its own: there, kernels of as many thread blocks as those of the forward pass
    work on the same scores, and the batched matmuls between them are attention's. Where the forward pass has kernels of
    as many blocks outside of attention, too, that says little of the backward pass, and nothing of its matmuls.
    """
    study = case.study
    chain_class, matmul = study.of_class(*_CHAIN), study.of_class("matmul")
    part = study.part if study.part.any() else _around_softmax(case)
    chain = part & chain_class
    outside = study.in_phase("forward", "loss") & ~part & chain_class
    backward = study.in_phase("backward") & ~part & chain_class
    grids = np.unique(study.size[chain & (study.duration >= 5_000) & (study.size > 0)])
    inside_ms, outside_ms = (
        np.array([case.ms(some & (study.size == grid)) for grid in grids.tolist()]) for some in (chain, outside)
    )
    mostly, only = grids[outside_ms <= _SHARED * inside_ms], grids[outside_ms == 0]
    on_scores = backward & np.isin(study.size, mostly)
    near = np.flatnonzero(backward & np.isin(study.size, only))
    batched = np.zeros(len(study.size), np.bool_)
    candidates = np.flatnonzero(study.in_phase("backward") & ~part & matmul)
    if len(near) and len(candidates):
        place = np.searchsorted(near, candidates)
        before = candidates - near[np.maximum(place - 1, 0)]
        behind = near[np.minimum(place, len(near) - 1)] - candidates
        batched[candidates[((before > 0) & (before <= 3)) | ((behind > 0) & (behind <= 3))]] = True
    return part & matmul | batched, chain | on_scores


def _around_softmax(case: Case) -> Bools:
    """Without ranges: each softmax kernel with the chain from the matmul before it to the one behind it.

    Every layer has one; that of the loss over the vocabulary is one by itself, and a logarithm as a rule.
    """
    study = case.study
    found = np.zeros(len(study.size), np.bool_)
    logarithm = np.array([*("log" in name.lower() for name in study.kernels), False])
    softmax = study.of_class("softmax") & ~logarithm[study.kernel] & study.in_phase("forward")
    matmuls = np.flatnonzero(study.of_class("matmul"))
    if study.count(softmax) < _FEWEST_LAYERS or study.of_class("fused attention").any():
        return found
    at = np.flatnonzero(softmax)
    place = np.searchsorted(matmuls, at)
    for first, last in zip(place - 1, place, strict=True):
        if first >= 0 and last < len(matmuls) and matmuls[last] - matmuls[first] <= _LONGEST_CHAIN:
            found[matmuls[first] : matmuls[last] + 1] = True
    return found
