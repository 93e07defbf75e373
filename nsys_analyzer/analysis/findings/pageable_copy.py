"""Batches are copied to the GPU from memory that is not pinned: the copy is slow, and the program waits for it."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from nsys_analyzer.analysis.findings.case import Candidate, Case, times
from nsys_analyzer.analysis.findings.finding import Place
from nsys_analyzer.analysis.steps.replay import Replay
from nsys_analyzer.trace.columns import COPY, PAGEABLE_TO_DEVICE

#: What a copy from pinned memory reaches over 16 lanes of PCIe 4.0 at least, bytes/s.
_PINNED_BYTES_PER_S = 25e9
_LEAST_BYTES = 64 << 10
#: What is left of a pause for a batch that another thread has put into pinned memory, ns.
_READY_NS = 50_000


def find(case: Case) -> Iterator[Candidate]:
    """Copies from pageable memory that are large enough to matter."""
    study = case.study
    copies = (study.copy == PAGEABLE_TO_DEVICE) & (study.size >= _LEAST_BYTES)
    if not copies.any():
        return
    calls = case.copying(copies)
    faster = np.minimum(study.size / _PINNED_BYTES_PER_S * 1e9 / np.maximum(study.duration, 1), 1.0)

    def pinned(replay: Replay) -> Replay:
        return replay.without_waits(calls).with_work(np.where(copies, faster, 1.0))

    # Getting a batch into pinned memory ahead spares what it takes to get it at all, not the making of it.
    loading = study.loading & (study.replay.pause <= study.duration[copies].max())

    def prefetched(replay: Replay) -> Replay:
        ready = replay.with_pauses(loading, _READY_NS).without_waits(calls)
        return ready.without_calls(calls & (study.call == COPY)).with_work(np.where(copies, 0.0, 1.0))

    whole = copies & study.first
    size, ms = study.size[whole].sum() / study.steps, study.duration[whole].sum() / study.steps / 1e6
    yield Candidate(
        "pageable_copy",
        "Batches are copied from pageable memory",
        (pinned, prefetched),
        (
            f"{times(study.count(copies), 'copy')} a step from pageable memory: {size / 2**20:,.1f} MiB in "
            f"{ms:.3g} ms, {size / max(ms, 1e-9) / 1e6:.3g} GB/s.",
            "The program waits for each: such a copy goes through a buffer of the driver's.",
            *case.called_by(calls),
        ),
        f"The step is replayed with copies that do not block, at {_PINNED_BYTES_PER_S / 1e9:.0f} GB/s on the same "
        "stream, and hidden altogether.",
        (
            "loader = DataLoader(..., pin_memory=True)",
            "batch = batch.to(device, non_blocking=True)  # best on a side stream, a batch ahead",
        ),
        "Train on a batch that is on the GPU already: if the step is no shorter, the copies are hidden.",
        of_cpu=True,
        explains=True,
        place=Place("idle", "copy"),
    )
