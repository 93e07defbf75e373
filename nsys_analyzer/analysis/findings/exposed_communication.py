"""The GPU waits for collectives that no computation hides."""

from __future__ import annotations

from collections.abc import Iterator

from nsys_analyzer.analysis.findings.case import Candidate, Case, saved_work, times

#: The least and the most of exposed communication that overlap can hide.
_SAVED = (0.55, 1.0)


def find(case: Case) -> Iterator[Candidate]:
    """Collectives, as far as nothing computes meanwhile."""
    study = case.study
    chosen = study.of_class("communication")
    if not chosen.any():
        return
    ms, whole = case.ms(chosen), study.duration[chosen & study.first].sum() / study.steps / 1e6
    yield Candidate(
        "exposed_communication",
        "Collectives are not hidden by computation",
        tuple(saved_work(chosen * share) for share in _SAVED),
        (
            f"{times(study.count(chosen), 'collective')} a step take {whole:.3g} ms; no work hides {ms:.3g} ms of it.",
            "A part of that may be waiting for a rank that comes late.",
        ),
        f"The step is replayed with {_SAVED[0]:.0%} to {_SAVED[1]:.0%} of it hidden.",
        (
            "model = DistributedDataParallel(model, bucket_cap_mb=100, gradient_as_bucket_view=True)",
            "# FSDP2: fully_shard each block, with reshard_after_forward=False where memory allows",
        ),
        "Run on one GPU with the same batch: if the step is as long, collectives do not hold it up.",
    )
