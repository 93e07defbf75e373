"""Chains of elementwise kernels, reductions and casts read and write what one compiled kernel would keep."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from nsys_analyzer.analysis.findings.case import Candidate, Case, less_of, times
from nsys_analyzer.analysis.findings.layout_copies import chains
from nsys_analyzer.analysis.findings.unfused_attention import attention_work

#: The share of these kernels' work that torch.compile saves, and of their launches.
_SAVED, _FEWER = (0.5, 0.85), 0.6
_CLASSES = ("elementwise", "reduction", "normalization", "copy/layout", "softmax")


def find(case: Case) -> Iterator[Candidate]:
    """Kernels of these classes that no compiler made, outside the optimizer."""
    study = case.study
    compiled = np.array([*(name.startswith("triton_") for name in study.kernels), False])
    chosen = study.of_class(*_CLASSES) & ~compiled[study.kernel] & ~study.in_phase("optimizer")
    chosen &= ~attention_work(case)[1] & ~chains(case)  # which have findings of their own
    if study.count(chosen) < 2:
        return
    calls = case.calls_of(chosen)

    ms = case.ms(chosen)
    yield Candidate(
        "unfused_elementwise",
        "Elementwise kernels are not fused",
        tuple(less_of(chosen, share, calls, 1 - _FEWER) for share in _SAVED),
        (
            f"{times(study.count(chosen), 'kernel')} a step, elementwise, reductions, norms and casts, take {ms:.3g} "
            f"ms ({ms / case.step_ms:.0%} of the step), {ms / study.count(chosen) * 1e3:.3g} µs each.",
        ),
        f"The step is replayed with {_SAVED[0]:.0%} to {_SAVED[1]:.0%} less work in them and {_FEWER:.0%} fewer of "
        "their launches, as torch.compile reaches on transformers.",
        ("model = torch.compile(model)  # or block.compile() for each block: it compiles faster",),
        "Kernels named triton_… take the place of these; if the step is no shorter, it waits for something else.",
    )
