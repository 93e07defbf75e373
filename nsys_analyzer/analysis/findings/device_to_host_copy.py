"""Large tensors are copied to the host inside the step: a checkpoint, or outputs that are logged."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from nsys_analyzer.analysis.findings.case import Candidate, Case, listed, times
from nsys_analyzer.analysis.findings.host_sync import small_copies
from nsys_analyzer.analysis.steps.replay import Replay
from nsys_analyzer.trace.columns import DEVICE_TO_PAGEABLE, DEVICE_TO_PINNED, SYNCHRONIZE

#: What is left of a copy's time on a stream of its own at most: it takes bandwidth, and host memory differs.
_LEFT = 0.15


def find(case: Case) -> Iterator[Candidate]:
    """Copies to the host that are more than values."""
    study = case.study
    copies = np.isin(study.copy, (DEVICE_TO_PAGEABLE, DEVICE_TO_PINNED)) & ~small_copies(case)
    if not copies.any():
        return
    calls = case.calls_of(copies)
    calls |= np.append(False, calls[:-1]) & (study.call == SYNCHRONIZE)
    names = listed([study.ranges[code] if code >= 0 else "" for code in study.range[calls].tolist()])
    around = calls if not names else calls | _in_ranges(case, calls)

    def asynchronous(replay: Replay) -> Replay:
        return replay.without_waits(calls).with_work(np.where(copies, _LEFT, 1.0))

    def gone(replay: Replay) -> Replay:
        return replay.without_calls(around).with_work(np.where(copies, 0.0, 1.0))

    size, ms = (
        study.size[copies & study.first].sum() / study.steps,
        study.duration[copies & study.first].sum() / study.steps / 1e6,
    )
    pageable = study.size[copies & study.first & (study.copy == DEVICE_TO_PAGEABLE)].sum() / max(
        study.size[copies & study.first].sum(), 1
    )
    yield Candidate(
        "device_to_host_copy",
        "Tensors are copied to the host inside the step",
        (asynchronous, gone),
        (
            f"{times(study.count(copies), 'copy')} a step from the GPU: {size / 2**20:,.1f} MiB in {ms:.3g} ms, "
            f"{pageable:.0%} of it to pageable memory{f', in the range {names}' if names else ''}.",
        ),
        "The step is replayed with copies on a stream of their own, which the program does not wait for, and without "
        "the code around them, too.",
        (
            "host = {k: torch.empty_like(v, device='cpu', pin_memory=True) for k, v in state.items()}  # once",
            "with torch.cuda.stream(side):",
            "    for k, v in state.items(): host[k].copy_(v, non_blocking=True)",
        ),
        "Leave the copies out for a run: if the step is no shorter, they are hidden.",
    )


def _in_ranges(case: Case, calls: np.ndarray) -> np.ndarray:
    """The calls in the ranges that hold the copies."""
    study = case.study
    codes = np.unique(study.range[calls & (study.range >= 0)])
    return np.isin(study.range, codes) & ~np.isin(study.range, _phase_codes(case))


def _phase_codes(case: Case) -> list[int]:
    """The codes of the ranges that are phases of the step: they hold more than copies."""
    return [i for i, name in enumerate(case.study.ranges) if name in case.study.phase_ranges]
