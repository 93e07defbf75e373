"""The GPU waits for launches: its kernels are shorter than what the CPU needs to launch the next one.

A step is launch-bound where the GPU idles for 30 % of it or more, and launching is the largest cause.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from nsys_analyzer.analysis.findings.case import Candidate, Case, three, times
from nsys_analyzer.analysis.findings.finding import Place
from nsys_analyzer.analysis.findings.host_stall import LONG_NS
from nsys_analyzer.analysis.steps.idle import CAUSES
from nsys_analyzer.analysis.steps.replay import Replay
from nsys_analyzer.trace.arrays import Bools, Ints
from nsys_analyzer.trace.columns import ALLOCATE, FREE

#: The share of a step without the profiler in which the GPU has nothing to do, at least.
IDLE = 0.3
#: Waits with so many calls between them, or fewer, are looked at as one.
_CLOSE = 20


def find(case: Case) -> Iterator[Candidate]:
    """A GPU that idles between launches, more than for any other cause."""
    study = case.study
    idle = {cause: case.step.idle_of(cause) for cause in CAUSES}
    if max(idle, key=lambda cause: idle[cause]) != "launch" or case.idle_share < IDLE:
        return
    others = study.loading | np.isin(study.call, (ALLOCATE, FREE)) | _between_waits(study.replay.awaited)
    kept, pausing = np.where(others, 1.0, 0.0), ~others & (study.replay.pause < LONG_NS)

    def in_graph(replay: Replay) -> Replay:
        return replay.with_launching(kept)

    def without_pauses(replay: Replay) -> Replay:
        return replay.with_launching(kept).with_pauses(pausing, 0.0)

    work = study.busy_ms
    launches = len(study.replay.work) / study.steps
    on_gpu, by_program = (three(ms / max(launches, 1) * 1e3) for ms in (work, case.step_ms))
    yield Candidate(
        "launch_bound",
        "The GPU waits for launches",
        (in_graph, without_pauses),
        (
            f"{times(launches, 'operation')} a step take {on_gpu} µs on the GPU each, on average; without the profiler "
            f"the program needs {by_program} µs for one.",
            f"The GPU idles for {case.step.idle_of('launch'):.3g} ms of a profiled step because the next launch has "
            "not come.",
        ),
        "The step is replayed with launches that cost nothing, as in a CUDA graph, and without the program's own "
        "pauses between them, too.",
        (
            'model = torch.compile(model, mode="reduce-overhead")  # CUDA graphs',
            "# or a larger batch: the same launches, more work in each",
        ),
        "Double the batch: if the step takes twice as long, launches are not what it waits for.",
        of_cpu=True,
        explained=True,
        place=Place("idle", "launch"),
    )


def _between_waits(awaited: Ints) -> Bools:
    """The calls between two waits that follow each other closely: no graph holds a wait."""
    waits = np.flatnonzero(awaited >= 0)
    position = np.arange(len(awaited))
    place = np.searchsorted(waits, position, side="right")
    before = np.append(waits, -len(awaited))[place - 1]
    behind = np.append(waits, 2 * len(awaited))[place]
    close: Bools = behind - before <= _CLOSE
    return close
