"""The program pauses: for a while it calls nothing of CUDA's, and the GPU runs out of work."""

from __future__ import annotations

from collections.abc import Iterator

from nsys_analyzer.analysis.findings.case import Candidate, Case, by_time, shorter_pauses, three, times
from nsys_analyzer.analysis.findings.finding import Place

#: A pause from here on is no part of launching work (a slow CPU prepares an optimizer's launches for up to 2.4 ms), and
#: what is left of it when its cause is gone, ns.
LONG_NS, _LEFT_NS = 3_000_000, (200_000, 20_000)


def find(case: Case) -> Iterator[Candidate]:
    """Pauses outside the input pipeline."""
    study = case.study
    pause = study.replay.pause
    chosen = (pause >= LONG_NS) & ~study.loading
    if not chosen.any():
        return
    ms = case.paused_ms(chosen)
    where = by_time(study.pause_range[chosen], pause[chosen], study.ranges)
    yield Candidate(
        "host_stall",
        "The CPU stops launching work",
        tuple(shorter_pauses(chosen, ns) for ns in _LEFT_NS),
        (
            f"Each step holds {times(study.calls(chosen), 'pause')} of {LONG_NS / 1e6:.0f} ms or more, {three(ms)} ms "
            f"together, in which the program makes no CUDA call, most of it in {where}.",
            f"The longest takes {three(pause[chosen].max() / 1e6)} ms.",
        ),
        "The step is replayed with pauses of 0.02 to 0.2 ms in their place.",
        (
            "# py-spy dump --pid PID  # shows what Python does in the pause",
            "import gc; gc.collect(); gc.freeze(); gc.disable()  # where it is Python's garbage collector",
        ),
        "Put a range around what you suspect: if the pause is not in it, it is something else.",
        of_cpu=True,
        explains=True,
        place=Place("idle", "host"),
    )
