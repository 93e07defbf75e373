"""The program waits for the GPU inside a step: it then launches from an empty queue."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from nsys_analyzer.analysis.findings.case import Candidate, Case, listed, times
from nsys_analyzer.analysis.findings.finding import Place
from nsys_analyzer.analysis.steps.replay import Replay
from nsys_analyzer.trace.arrays import Bools
from nsys_analyzer.trace.columns import COPY, INTO_HOST, SYNCHRONIZE

#: A copy to the host of so many bytes at most is a value that Python asks for (.item(), a mask for nonzero()).
_VALUE_BYTES = 4096

_READING = (
    "total = torch.stack([p.grad.norm() for p in model.parameters()]).norm()  # stays on the GPU",
    "if step % 100 == 0: print(total.item())  # one wait in 100 steps",
)
_SYNCHRONIZING = (
    "# leave out of the loop: torch.cuda.synchronize(), which timing needs and training does not",
    "# CUDA events time the GPU's work without a wait: torch.cuda.Event(enable_timing=True)",
)


def find(case: Case) -> Iterator[Candidate]:
    """Synchronizations, and small copies to the host, which wait."""
    study = case.study
    values = small_copies(case)
    reading = case.calls_of(values)
    syncs = study.call == SYNCHRONIZE
    # A copy of a value is followed by the synchronization that waits for it.
    chosen = syncs & ~after_large_copies(case) | (reading & (study.call == COPY))
    waits = chosen & (study.replay.awaited >= 0)
    if not waits.any():
        return
    apis = listed(study.called(chosen))
    names = listed(study.names(study.range[chosen]))
    reads = study.count(values)
    half, gone = np.where(chosen, 0.5, 1.0), np.where(values, 0.0, 1.0)

    def without_waiting(replay: Replay) -> Replay:
        return replay.without_waits(chosen).with_launching(half)

    def without(replay: Replay) -> Replay:
        return replay.without_calls(chosen).with_work(gone)

    remedy = _READING if reads >= 1 else _SYNCHRONIZING
    yield Candidate(
        "host_sync",
        "The program waits for the GPU inside the step",
        (without_waiting, without),
        (
            f"Each step waits in {times(study.calls(waits), 'call')}: {apis}"
            f"{f', in ranges such as {names}' if ', ' in names else f', in the range {names}' if names else ''}.",
            *(
                [f"{times(reads, 'value')} a step are copied to the host, as .item() and .cpu() do."]
                if reads >= 1
                else []
            ),
            *case.called_by(chosen),
        ),
        "The step is replayed without the waits and half of what Python does for them, and without the calls and their "
        "copies altogether.",
        remedy,
        "Comment the calls out for a run: if the step is no shorter, the GPU had work enough to bridge the wait.",
        of_cpu=True,
        explains=True,
        place=Place("idle", "sync"),
    )


def small_copies(case: Case) -> Bools:
    """The copies of values to the host."""
    to_host = np.isin(case.study.copy, INTO_HOST)
    chosen: Bools = to_host & (case.study.size <= _VALUE_BYTES)
    return chosen


def after_large_copies(case: Case) -> Bools:
    """The calls that come directly behind one that copies more than a value: they wait for the copy."""
    study = case.study
    copies = case.calls_of((study.copy > 0) & ~small_copies(case)) & (study.call == COPY)
    behind: Bools = np.append(False, copies[:-1])
    return behind
