"""The optimizer runs several kernels over each parameter, where a fused one reads and writes each once."""

from __future__ import annotations

import re
from collections.abc import Iterator

import numpy as np

from nsys_analyzer.analysis.findings.case import Candidate, Case, less_of, three, times
from nsys_analyzer.analysis.findings.finding import Place

#: A fused AdamW moves 7 tensors of a parameter's size, a naive one 20; those that fit the cache cost less.
_SAVED = (0.4, 0.7)
#: A fused optimizer's kernel, of PyTorch, of Apex and those like it, and of a compiler.
_FUSED = re.compile(r"[Ff]used\w*(?:MathFunctor|[Aa]dam|[Ss]gd)|AdamFunctor|^triton_")
#: Fused optimizers need fewer kernels than this.
_FUSED_KERNELS = 40


def find(case: Case) -> Iterator[Candidate]:
    """An optimizer phase of many kernels, none of which is a fused one."""
    study = case.study
    chosen = study.in_phase("optimizer") & study.of_class("optimizer", "elementwise", "reduction", "copy/layout")
    fused = np.array([*(bool(_FUSED.search(name)) for name in study.kernels), False])
    if study.count(chosen) < _FUSED_KERNELS or (fused[study.kernel] & chosen).any():
        return
    calls = case.calls_of(chosen)
    per_step = study.count(chosen)
    foreach = study.of_class("optimizer") & chosen
    kind = "multi-tensor (foreach)" if foreach.sum() > 0.5 * chosen.sum() else "a parameter at a time"
    yield Candidate(
        "unfused_optimizer",
        "The optimizer is not fused",
        tuple(less_of(chosen * share, calls, _FUSED_KERNELS / per_step) for share in _SAVED),
        (f"It runs {times(per_step, 'kernel')} a step ({kind}) for {three(case.ms(chosen))} ms on the GPU.",),
        f"The step is replayed with {_FUSED_KERNELS} launches in the optimizer and {_SAVED[0]:.0%} to {_SAVED[1]:.0%} "
        "less work: a fused AdamW moves 7 tensors of the parameters' size, a naive one 20, some of them in the cache.",
        ("optimizer = torch.optim.AdamW(model.parameters(), lr, fused=True)",),
        "Count the optimizer's kernels afterwards: if they are few and the step is no shorter, the GPU had other work.",
        place=Place("phase", "optimizer"),
    )
