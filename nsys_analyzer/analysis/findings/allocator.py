"""Memory is allocated or freed with CUDA inside the step, instead of taken from PyTorch's cache."""

from __future__ import annotations

import re
from collections.abc import Iterator

import numpy as np

from nsys_analyzer.analysis.findings.case import Candidate, Case, listed, times
from nsys_analyzer.analysis.findings.finding import Place
from nsys_analyzer.trace.columns import ALLOCATE, FREE, SYNCHRONIZE


def find(case: Case) -> Iterator[Candidate]:
    """Calls of cudaMalloc, cudaFree and the like, and the synchronizations before they free."""
    study = case.study
    # Those of the host's memory, and those in the order of a stream, are another matter.
    others = np.array([bool(re.search("Async|Host", api)) for api in study.apis] or [False])
    chosen = np.isin(study.call, (ALLOCATE, FREE)) & ~others[study.api]
    if study.calls(chosen) < 1 or case.step.is_pass:  # of a pass, the first allocations of all
        return
    # PyTorch waits for the device before it frees.
    waits = (study.call == SYNCHRONIZE) & np.append(chosen[1:], False) & (np.append(study.call[1:], 0) == FREE)
    calls = chosen | waits
    apis = listed(study.called(chosen))
    yield Candidate(
        "allocator",
        "Memory is allocated and freed inside the step",
        (lambda replay: replay.without_calls(calls),),
        (
            f"Each step makes {times(study.calls(chosen), 'call')} of {apis}.",
            *(["A call that frees waits for all work on the GPU."] if (chosen & (study.call == FREE)).any() else []),
            *case.called_by(chosen),
        ),
        "The step is replayed without these calls.",
        (
            "# leave out: torch.cuda.empty_cache()",
            "# where the cache is too small for the sizes in turn:",
            "# PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True python train.py",
        ),
        "torch.cuda.memory_stats()['num_device_alloc'] stays the same over the steps afterwards.",
        of_cpu=True,
        explains=True,
        place=Place("idle", "allocator"),
    )
