"""Kernels of fewer thread blocks than the GPU has multiprocessors: part of it has nothing to do."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from nsys_analyzer.analysis.findings.case import Candidate, Case, saved_work, times
from nsys_analyzer.analysis.findings.finding import Place
from nsys_analyzer.trace.columns import KERNEL

#: A shorter kernel is done before more blocks would help, ns.
_LONG_NS = 20_000
#: The least and the most of what full occupation would save.
_SAVED = (0.5, 0.9)


def find(case: Case) -> Iterator[Candidate]:
    """Long kernels with small grids, collectives left out."""
    study = case.study
    units = study.gpu.sm_count if study.gpu else 0
    small = (study.kind == KERNEL) & (study.size > 0) & (study.size < units) & (study.duration >= _LONG_NS)
    small &= ~study.of_class("communication")
    if not units or not small.any():
        return
    idle = np.where(small, 1 - study.size / units, 0.0)
    ms = case.ms(small)
    worst = study.kernels[int(np.bincount(study.kernel[small], study.replay.work[small]).argmax())]
    yield Candidate(
        "small_grids",
        "Kernels are too small to fill the GPU",
        tuple(saved_work(share * idle) for share in _SAVED),
        (
            f"{times(study.count(small), 'kernel')} a step of fewer blocks than the GPU's {units} multiprocessors take "
            f"{ms:.3g} ms; {np.average(study.size[small], weights=study.replay.work[small]):.0f} blocks on average.",
            f"Most of that time is in {worst[:80]}.",
        ),
        f"The step is replayed with {_SAVED[0]:.0%} to {_SAVED[1]:.0%} of what the idle multiprocessors could do.",
        (
            "# a larger batch, or several small problems at once: torch.bmm, torch._foreach_*, streams",
            'model = torch.compile(model, mode="max-autotune")  # tries split-K and smaller tiles',
        ),
        "Double the batch: if these kernels take twice as long, their grids were not what limits them.",
        place=Place("kernel", worst),
    )
