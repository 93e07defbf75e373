"""Chains of elementwise kernels and casts read and write what one compiled kernel would keep.

A compiler makes one kernel of a chain of k that follow each other: between 1/k and 2/k of their time is left. Kernels
that are one pass already (a norm, a softmax, a sum) are part of a chain, and keep their time.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import partial

import numpy as np

from nsys_analyzer.analysis.findings.case import Candidate, Case, saved_launches, saved_work, times
from nsys_analyzer.analysis.findings.finding import Place
from nsys_analyzer.analysis.findings.launch_bound import IDLE
from nsys_analyzer.analysis.findings.layout_copies import chains
from nsys_analyzer.analysis.findings.unfused_attention import attention_work
from nsys_analyzer.analysis.steps.replay import Floats
from nsys_analyzer.trace.arrays import Bools

#: Kernels that torch.compile or XLA made.
_COMPILED = re.compile("^triton_|_fusion")
_PLAIN = ("elementwise", "copy/layout")
_CLASSES = (*_PLAIN, "reduction", "normalization", "softmax")


def find(case: Case) -> Iterator[Candidate]:
    """Kernels of these classes that no compiler made, outside the optimizer."""
    study = case.study
    compiled = np.array([*(bool(_COMPILED.search(name)) for name in study.kernels), False])
    chosen = study.of_class(*_CLASSES) & ~compiled[study.kernel] & ~study.in_phase("optimizer")
    chosen &= ~attention_work(case)[1] & ~chains(case)  # which have findings of their own
    if study.count(chosen) < 2:
        return
    # Each compiled region costs the CPU time of its own. Where launching is the limit, that may take all that fewer
    # launches save: of two models so bound, compiling made one 43 % faster, the other 2 %.
    saved = saved_work if case.idle_share >= IDLE else partial(saved_launches, case)
    length = _lengths(chosen)
    least = np.where(study.of_class(*_PLAIN), np.maximum(1 - 2 / length, 0.0), 0.0)
    most = np.where(study.of_class(*_PLAIN, "reduction"), 1 - 1 / length, 0.0)
    ms, typical = case.ms(chosen), float(np.average(length[chosen], weights=study.replay.work[chosen]))
    yield Candidate(
        "unfused_elementwise",
        "Elementwise kernels are not fused",
        tuple(saved(share * chosen) for share in (least, most)),
        (
            f"{times(study.count(chosen), 'kernel')} a step, elementwise, reductions, norms and casts, take {ms:.3g} "
            f"ms ({ms / case.step_ms:.0%} of the step), {ms / study.count(chosen) * 1e3:.3g} µs each.",
            f"They stand in chains of {typical:.2g} kernels on average, one directly behind the other.",
        ),
        "The step is replayed with each chain of k kernels as one: 1/k to 2/k of the time of its elementwise kernels "
        "and casts is left, and of their launches, unless launching is the limit: compiled code costs the CPU, too.",
        ("model = torch.compile(model)  # or block.compile() for each block: it compiles faster",),
        "Kernels named triton_… take the place of these; if the step is no shorter, it waits for something else.",
        place=Place("class", "elementwise"),
    )


def _lengths(chosen: Bools) -> Floats:
    """Shape (pieces,): how many of some pieces stand in a row around each of them, 1 for the others."""
    length = np.ones(len(chosen))
    index = np.flatnonzero(chosen)
    if len(index):
        starts = np.flatnonzero(np.append(True, np.diff(index) > 1))
        lengths = np.diff(np.append(starts, len(index)))
        length[index] = np.repeat(lengths, lengths)
    return length
