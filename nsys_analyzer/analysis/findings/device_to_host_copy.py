"""Large tensors are copied to the host inside the step: a checkpoint, or outputs that are logged."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from nsys_analyzer.analysis.findings.case import Candidate, Case, listed, three, times
from nsys_analyzer.analysis.findings.finding import Place
from nsys_analyzer.analysis.findings.host_sync import small_copies
from nsys_analyzer.analysis.steps.replay import Replay
from nsys_analyzer.trace.arrays import Bools, Ints
from nsys_analyzer.trace.columns import DEVICE_TO_PAGEABLE, INTO_HOST, KERNEL

#: What is left of a copy's time on a stream of its own at most: it takes bandwidth, and host memory differs.
_LEFT = 0.15


def find(case: Case) -> Iterator[Candidate]:
    """Copies to the host that are more than values."""
    study = case.study
    copies = np.isin(study.copy, INTO_HOST) & ~small_copies(case)
    if not copies.any():
        return
    calls = case.copying(copies)
    names = listed(study.names(study.range[calls]))
    around = calls | _in_ranges(case, calls, study.range)
    # Between two of these copies the program makes room for the next one.
    pausing = _in_ranges(case, calls, study.pause_range) | (calls & np.append(calls[1:], False))
    if (around & case.calls_of(study.kind == KERNEL)).any():  # the ranges hold more than copies
        around = calls

    def asynchronous(replay: Replay) -> Replay:
        return replay.without_waits(calls).with_work(np.where(copies, _LEFT, 1.0))

    def gone(replay: Replay) -> Replay:
        return replay.without_calls(around).with_pauses(pausing, 0.0).with_work(np.where(copies, 0.0, 1.0))

    whole = copies & study.first
    size, ms = study.size[whole].sum() / study.steps, study.duration[whole].sum() / study.steps / 1e6
    pageable = study.size[whole & (study.copy == DEVICE_TO_PAGEABLE)].sum() / max(study.size[whole].sum(), 1)
    yield Candidate(
        "device_to_host_copy",
        "Tensors are copied to the host inside the step",
        (asynchronous, gone),
        (
            f"{times(study.count(copies), 'copy')} a step from the GPU: {size / 2**20:,.1f} MiB in {three(ms)} ms, "
            f"{pageable:.0%} of it to pageable memory{f', in the range {names}' if names else ''}.",
        ),
        "The step is replayed with copies on a stream of their own, which the program does not wait for, and without "
        "the code around them, too.",
        (
            "host = {k: torch.empty_like(v, device='cpu', pin_memory=True) for k, v in state.items()}  # once",
            "side = torch.cuda.Stream()  # once",
            "side.wait_stream(torch.cuda.current_stream())",
            "with torch.cuda.stream(side):",
            "    for k, v in state.items(): host[k].copy_(v, non_blocking=True)",
            "# before the next optimizer.step(): torch.cuda.current_stream().wait_stream(side)",
            "# before host is written to a file: side.synchronize()",
        ),
        "Leave the copies out for a run: if the step is no shorter, they are hidden.",
        of_cpu=True,
        explains=True,
        place=Place("idle", "copy"),
    )


def _in_ranges(case: Case, calls: Bools, around: Ints) -> Bools:
    """The calls around which is a range that holds the copies, and no phase of the step."""
    study = case.study
    codes = [code for code in np.unique(study.range[calls]).tolist() if code >= 0]
    inside: Bools = np.isin(around, [code for code in codes if study.ranges[code] not in study.phase_ranges])
    return inside
