"""Rules on the steps of engines that serve requests.

Each rule is a type of figures and the function that finds them. ``report/finding_texts/serving.py`` puts them into
words.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from nsys_analyzer.analysis.findings.finding import (
    Candidate,
    FindingFigures,
    Place,
    Rule,
    StepsToExplain,
    saved_launches,
)
from nsys_analyzer.trace.columns import ON_DEVICE

#: The time between two steps that remains if the next one is prepared meanwhile: the most and the least assumed, ns.
_REMAINING_GAP_NS = (200_000, 20_000)
#: The share of the copies of a cache that writing new keys and values in place saves: the least and the most.
CACHE_COPY_SAVINGS = (0.7, 1.0)
_CONCATENATING_KERNEL = re.compile("CatArrayBatchedCopy")


@dataclass(frozen=True)
class BetweenStepsFigures(FindingFigures):
    """The time from the last CUDA call of a step to the first of the next one, ms."""

    gap_ms: float


def find_between_steps(steps: StepsToExplain) -> Iterator[Candidate]:
    """Finds time between steps in which the program makes no CUDA call: scheduling, sampling, detokenization."""
    study = steps.study
    between = np.zeros(len(study.calls.kind), np.bool_)
    between[study.replay.first_call[1:] - 1] = True
    between &= study.replay.pause_ns > 0
    if not steps.summary.kind or not between.any():
        return
    figures = BetweenStepsFigures(steps.paused_ms(study.replay.pause_ns[between]))
    changes = tuple(lambda replay, ns=ns: replay.with_pauses(between, ns) for ns in _REMAINING_GAP_NS)
    yield Candidate("between_steps", figures, changes, Place("idle", "host"))


@dataclass(frozen=True)
class CacheCopiesFigures(FindingFigures):
    """The copies of a growing cache, per step; ``share`` is their share of the step without the profiler."""

    copies: float
    ms: float
    share: float


def find_cache_copies(steps: StepsToExplain) -> Iterator[Candidate]:
    """Finds tensors that each decode step concatenates or copies on the device, as a cache that grows does."""
    study = steps.study
    copies = study.kernel_matches(_CONCATENATING_KERNEL) | (study.pieces.copy == ON_DEVICE)
    if steps.summary.kind != "decode" or not copies.any():
        return
    ms = study.work_ms(copies)
    figures = CacheCopiesFigures(study.operations_per_step(copies), ms, ms / steps.step_ms)
    changes = tuple(saved_launches(steps, copies * share) for share in CACHE_COPY_SAVINGS)
    yield Candidate("cache_copies", figures, changes, Place("class", "copy/layout"), copies)


#: The rules of this family; of two findings that save as much, the rule that stands first here comes first.
RULES: tuple[Rule, ...] = (find_between_steps, find_cache_copies)
