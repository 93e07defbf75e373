"""The GPU waits for collectives that no computation hides."""

from __future__ import annotations

from collections.abc import Iterator

from nsys_analyzer.analysis.findings.case import Candidate, Case, saved_work, three, times
from nsys_analyzer.analysis.findings.finding import Place

#: The least and the most of exposed communication that overlap can hide.
_SAVED, _SAVED_IN_INFERENCE = (0.55, 1.0), (0.0, 0.5)

_TRAINING = (
    "model = DistributedDataParallel(model, bucket_cap_mb=100, gradient_as_bucket_view=True)",
    "# FSDP2: fully_shard each block, with reshard_after_forward=False where memory allows",
)
_INFERENCE = (
    "# fewer ranks for each copy of the model, or larger batches: a collective for each layer stays",
    'model = torch.compile(model, mode="max-autotune")  # may overlap matmuls with collectives',
)


def find(case: Case) -> Iterator[Candidate]:
    """Collectives, as far as nothing computes meanwhile."""
    study = case.study
    chosen = study.of_class("communication")
    if not chosen.any():
        return
    trains = study.in_phase("backward").any() or not study.in_phase("forward").any()
    saved, remedy = (_SAVED, _TRAINING) if trains else (_SAVED_IN_INFERENCE, _INFERENCE)
    ms, whole = case.ms(chosen), study.duration[chosen & study.first].sum() / study.steps / 1e6
    yield Candidate(
        "exposed_communication",
        "Collectives are not hidden by computation",
        tuple(saved_work(chosen * share) for share in saved),
        (
            f"{times(study.count(chosen), 'collective')} a step take {three(whole)} ms, of which nothing hides "
            f"{three(ms)} ms. A part of that may be waiting for a rank that comes late.",
        ),
        f"The step is replayed with {saved[0]:.0%} to {saved[1]:.0%} of it hidden.",
        remedy,
        "Run on one GPU with the same batch: if the step is as long, collectives do not hold it up.",
        place=Place("class", "communication"),
    )
