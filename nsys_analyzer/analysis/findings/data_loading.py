"""The GPU waits for the input pipeline: a batch is loaded in the loop, on the thread that launches."""

from __future__ import annotations

from collections.abc import Iterator

from nsys_analyzer.analysis.findings.case import Candidate, Case, listed, shorter_pauses, three, times
from nsys_analyzer.analysis.findings.finding import Place

#: What it takes to get a batch that is ready: out of a queue, as far as the loop's own thread works for it, ns.
_READY_NS = (500_000, 50_000)


def find(case: Case) -> Iterator[Candidate]:
    """Pauses of the program in the input pipeline."""
    study = case.study
    chosen = study.loading
    if not chosen.any():
        return
    ms = case.paused_ms(chosen)
    names = listed(study.names(study.pause_range[chosen]))
    where = f"in the range {names}" if names else "between two steps, before the batch is copied"
    yield Candidate(
        "data_loading",
        "The GPU waits for the input pipeline",
        tuple(shorter_pauses(chosen, ns) for ns in _READY_NS),
        (
            f"For {three(ms)} ms of each step the program calls nothing of CUDA's {where}: "
            f"{times(study.calls(chosen), 'stretch')}.",
        ),
        "The step is replayed with batches that are ready when they are asked for: 0.05 to 0.5 ms each.",
        (
            "loader = DataLoader(dataset, batch_size, num_workers=8, pin_memory=True,",
            "                    persistent_workers=True, prefetch_factor=4)",
            "batch = batch.to(device, non_blocking=True)",
        ),
        "Train on one batch that is made before the loop: if the step is no shorter, loading does not hold it up.",
        of_cpu=True,
        explains=True,
        place=Place("idle", "data"),
    )
