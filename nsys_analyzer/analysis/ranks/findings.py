"""Finds where the ranks of a run lose time: a slow rank to a faster rank, and all ranks to communication.

Each finding has a type of figures and a function that finds them. ``report/finding_texts/ranks.py`` writes the
sentences.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import NamedTuple, TypeVar

from nsys_analyzer.analysis.findings.diagnosis import SMALLEST_SAVING_SHARE
from nsys_analyzer.analysis.findings.finding import FindingFigures, FindingWithFigures, Place
from nsys_analyzer.analysis.kernels.class_rules import COMMUNICATION
from nsys_analyzer.analysis.ranks.run import (
    DATA_PARALLEL,
    SHARDED,
    LostTime,
    ParallelRun,
    Part,
    RankFigures,
    UnusedOverlap,
)
from nsys_analyzer.analysis.steps.lines import Line
from nsys_analyzer.analysis.summary.summary import CaptureSummary

#: What a timeline highlights for every finding about a run: the collectives.
_COLLECTIVES_PLACE = Place("class", COMMUNICATION)
#: The assumed relative difference of a saving of CPU time between two runs. On three rented hosts, 26 savings were
#: measured in another run than the captured run. Two thirds of the savings differed by less than this.
_CPU_TIME_TOLERANCE = 0.29
#: The assumed relative difference of the time of equal work on two GPUs.
_TWO_GPUS_TOLERANCE = 0.1
#: A cause explains a loss if it makes up at least this share of the loss.
_LEAST_EXPLAINED_SHARE = 0.5

Key = TypeVar("Key", bound=Hashable)


# --- the time that one rank loses to another


def find_losses(
    slow: tuple[RankFigures, CaptureSummary], fast: tuple[RankFigures, CaptureSummary]
) -> tuple[tuple[LostTime, ...], float] | None:
    """Compares the own times of a slow and a fast rank by phase and part, ms per step; None if a step is unknown.

    A waiting collective occupies a part of the GPU. If other work runs at the same time, its kernels take longer than
    on the rank for which the collective waits.

    Returns:
        The differences by phase and part, the largest first, and the time by which waiting collectives slowed the work
        of the fast rank down. The sum of the differences minus this time is the difference of the ranks' steps without
        exposed waiting, if all steps were analyzed.
    """
    devices = [
        device
        for figures, capture in (slow, fast)
        for device in (capture.step.devices if capture.step else ())
        if device.device == figures.device
    ]
    if len(devices) < 2:
        return None
    # The time of each device without communication, by phase and part.
    own_ms: list[dict[tuple[str, Part], float]] = [{}, {}]
    for part_ms, device in zip(own_ms, devices, strict=True):
        for phase in device.phases:
            part_ms[phase.phase, "compute"] = phase.compute_ms
            part_ms[phase.phase, "copies"] = phase.exposed_copy_ms
            part_ms[phase.phase, "idle"] = phase.idle_ms
    lost_ms = _subtract_times(*own_ms)
    slowed_ms = _subtract_slowdown(lost_ms, fast[0])
    transfer_ms = (slow[0].exposed_transfer_ms or 0.0) - (fast[0].exposed_transfer_ms or 0.0)
    rows = [LostTime(phase, part, ms) for (phase, part), ms in lost_ms.items()]
    rows = sorted((*rows, LostTime("", "transferring", transfer_ms)), key=lambda row: -row.ms)
    # The largest losses in compute and in idle time are labeled with their main cause.
    row_of_largest_loss: dict[Part, int] = {}
    for place, row in enumerate(rows):
        row_of_largest_loss.setdefault(row.part, place)
    if "idle" in row_of_largest_loss:
        row = rows[row_of_largest_loss["idle"]]
        causes = ({(idle.cause, idle.range or ""): idle.ms for idle in device.idle_by_cause} for device in devices)
        if cause := _find_explanation(row.ms, _subtract_times(*causes)):
            lines = (idle.lines for idle in devices[0].idle_by_cause if (idle.cause, idle.range or "") == cause)
            rows[row_of_largest_loss["idle"]] = replace(
                row, cause=cause[0], range=cause[1], lines=next(filter(None, lines), ())
            )
    if "compute" in row_of_largest_loss:
        row = rows[row_of_largest_loss["compute"]]
        classes = _subtract_times(*({time.kernel_class: time.ms for time in device.classes} for device in devices))
        trees = [capture.modules.modules if capture.modules else () for _, capture in (slow, fast)]
        module_ms = (
            {module.path: module.own_forward_ms + module.own_backward_ms for module in modules} for modules in trees
        )
        path = _find_explanation(row.ms, _subtract_times(*module_ms)) or ""
        rows[row_of_largest_loss["compute"]] = replace(
            row,
            kernel_class=_find_explanation(row.ms, classes) or "",
            module=path,
            module_line=next((module.line for module in trees[0] if module.path == path), ""),
        )
    return tuple(rows), slowed_ms


def _subtract_slowdown(lost_ms: dict[tuple[str, Part], float], fast: RankFigures) -> float:
    """Corrects the losses for the time by which waiting collectives slowed the faster rank's kernels down.

    The faster rank was slowed down in the phases in which it computes for longer. If its other parts are shorter in
    such a phase, the phase was slowed down by less: kernels that take longer leave less idle time.

    Returns:
        The time by which the kernels were slowed down, ms.
    """
    hidden_waiting_ms = (fast.waiting_ms or 0.0) - (fast.exposed_waiting_ms or 0.0)
    slowed_ms = 0.0
    for phase in dict.fromkeys(phase for phase, _ in lost_ms):
        compute_ms = lost_ms.get((phase, "compute"), 0.0)
        phase_ms = sum(ms for key, ms in lost_ms.items() if key[0] == phase)
        ms = min(max(-compute_ms, 0.0), max(-phase_ms, 0.0), hidden_waiting_ms)
        if ms:
            lost_ms[phase, "compute"] += ms
            slowed_ms, hidden_waiting_ms = slowed_ms + ms, hidden_waiting_ms - ms
    return slowed_ms


def _subtract_times(minuends: Mapping[Key, float], subtrahends: Mapping[Key, float]) -> dict[Key, float]:
    """Returns the differences between the values of two tables, without zeros."""
    keys = dict.fromkeys((*minuends, *subtrahends))
    return {key: ms for key in keys if (ms := minuends.get(key, 0.0) - subtrahends.get(key, 0.0))}


def _find_explanation(loss_ms: float, difference_ms: Mapping[Key, float]) -> Key | None:
    """Returns the key of the largest difference, if it explains most of the loss."""
    largest_key = max(difference_ms, key=lambda key: difference_ms[key], default=None)
    explains = largest_key is not None and difference_ms[largest_key] >= _LEAST_EXPLAINED_SHARE * loss_ms > 0
    return largest_key if explains else None


# --- changes that would make the steps of all ranks shorter


def find_run_findings(run: ParallelRun) -> tuple[FindingWithFigures, ...]:
    """Returns the findings about all ranks of a run, the largest saving first."""
    slowest = run.slowest_rank
    # If ranks are missing, it is unknown which ranks wait for them.
    if slowest is None or slowest.own_ms is None or len(run.ranks) < 2 or run.missing:
        return ()
    # No step is shorter than the GPU's own work, whatever the other ranks do.
    most_ms = max(run.step_ms - slowest.compute_ms - slowest.exposed_copy_ms, 0.0)
    repeated_reduction_savings = [*_find_repeated_reductions(run, slowest)]
    unequal_work_savings = [*_find_unequal_work(run)]
    late_rank_savings = [] if unequal_work_savings else [*_find_late_rank(run, slowest)]
    savings = [
        *unequal_work_savings,
        *late_rank_savings,
        *repeated_reduction_savings,
        *_find_unused_overlaps(run),
    ]
    # If no unused overlap explains exposed communication, all of it is assumed to be avoidable. The stages of a
    # pipeline wait by design.
    if not run.is_pipeline and not any(isinstance(saving.figures, UnusedOverlapFigures) for saving in savings):
        exposed_ms = (slowest.exposed_transfer_ms or 0.0) / (run.reductions if repeated_reduction_savings else 1)
        if run.replayed:
            exposed_ms = min(exposed_ms, run.replayed.without_transfers_ms[1])
        has_replicas = not {DATA_PARALLEL, SHARDED}.isdisjoint(run.strategies)
        figures = ExposedCommunicationFigures(slowest.label, slowest.transfer_ms or 0.0, exposed_ms, has_replicas)
        savings.append(_RunSaving("exposed_communication", figures, 0.0, exposed_ms))
    findings = []
    left_ms = run.step_ms
    for saving in sorted(savings, key=lambda saving: -saving.middle_ms):
        low_ms, high_ms = min(saving.low_ms, most_ms), min(saving.high_ms, most_ms)
        if (low_ms + high_ms) / 2 >= SMALLEST_SAVING_SHARE * run.step_ms:
            # The findings are about separate parts of the step, so their savings add up.
            left_ms = max(left_ms - (low_ms + high_ms) / 2, 0.0)
            findings.append(
                FindingWithFigures(
                    id=saving.id,
                    saves_ms_low=low_ms,
                    saves_ms_high=high_ms,
                    saves_ms=saving.middle_ms,
                    step_ms=run.step_ms,
                    left_after_all_ms=left_ms,
                    place=_COLLECTIVES_PLACE,
                    figures=saving.figures,
                    lines=saving.lines,
                )
            )
    return tuple(findings)


class _RunSaving(NamedTuple):
    """The ID and the figures of a possible finding about a run, the interval of its saving per step, and its lines."""

    id: str
    figures: FindingFigures
    low_ms: float
    high_ms: float
    lines: tuple[Line, ...] = ()

    @property
    def middle_ms(self) -> float:
        """Returns the middle of the interval of the saving, ms."""
        return (self.low_ms + self.high_ms) / 2


@dataclass(frozen=True)
class LateRankFigures(FindingFigures):
    """The figures of the rank that all other ranks wait for.

    Attributes:
        rank: the label of the rank.
        late_ms: the own time of the rank minus the shortest own time of a rank, per step under the profiler.
        slowest_steps: the number of steps in which the rank is the slowest.
        steps: the number of all steps.
        is_replayed: whether the saving is from replays of the ranks without the profiler.
        tolerance: the share by which the saving differs from run to run.
        place: the range or module in which the rank loses most time; empty if it is not known.
    """

    rank: str
    late_ms: float
    slowest_steps: int
    steps: int
    is_replayed: bool
    tolerance: float
    place: str


def _find_late_rank(run: ParallelRun, slowest: RankFigures) -> Iterator[_RunSaving]:
    """Yields the saving if the slowest rank, for which all other ranks wait, were as fast as they are."""
    if not run.is_late:
        return
    late_ms = run.skew_ms or 0.0
    least_ms, most_ms = run.late_bounds_ms or (0.0, late_ms)
    if most_ms and not run.is_slowed:  # the lateness under the profiler is then that without it
        most_ms = late_ms
    largest_loss = run.lost[0] if run.lost else None
    tolerance = _CPU_TIME_TOLERANCE if largest_loss and largest_loss.part == "idle" else _TWO_GPUS_TOLERANCE
    figures = LateRankFigures(
        slowest.label,
        late_ms,
        slowest.slowest_steps,
        run.steps,
        bool(run.late_bounds_ms),
        tolerance,
        (largest_loss.range or largest_loss.module) if largest_loss else "",
    )
    low_ms = max(least_ms, 0.0) * (1 - tolerance)
    high_ms = min(max(most_ms, 0.0) * (1 + tolerance), late_ms)
    yield _RunSaving("late_rank", figures, low_ms, high_ms, largest_loss.lines if largest_loss else ())


@dataclass(frozen=True)
class UnequalWorkFigures(FindingFigures):
    """The ranks with the most and the least work.

    Attributes:
        most, least: the labels of the ranks.
        ratio: the FLOPs of the rank with the most work ÷ those of the rank with the least work.
        most_tokens, least_tokens: the tokens per step of the ranks; None if they are not known.
        most_compute_ms, least_compute_ms: the GPU time of the ranks per step.
    """

    most: str
    least: str
    ratio: float
    most_tokens: int | None
    least_tokens: int | None
    most_compute_ms: float
    least_compute_ms: float


def _find_unequal_work(run: ParallelRun) -> Iterator[_RunSaving]:
    """Yields the saving if all replicas of the model had equal work, from replays with the mean number of FLOPs."""
    if run.unequal_work and run.replayed and run.replayed.equal_work_ms and run.replayed.equal_work_ms[1] > 0:
        most, least = run.unequal_work
        figures = UnequalWorkFigures(
            most.label, least.label, (most.flops or 0.0) / (least.flops or 1.0), most.tokens, least.tokens,
            most.compute_ms, least.compute_ms,
        )  # fmt: skip
        low_ms, high_ms = run.replayed.equal_work_ms
        yield _RunSaving(
            "unequal_work", figures, low_ms * (1 - _TWO_GPUS_TOLERANCE), high_ms * (1 + _TWO_GPUS_TOLERANCE)
        )


@dataclass(frozen=True)
class RepeatedReductionFigures(FindingFigures):
    """The reductions of the same gradients in several backward passes of a step, under the profiler.

    Attributes:
        reductions: the number of backward passes per step that reduce the gradients.
        is_sharded: whether each rank has a shard of the model (FSDP).
        transfer_ms: the transfer time of the slowest rank's collectives per step.
        exposed_ms: the part of the transfer time that nothing hides.
        waiting_ms: the time per step in which a rank waits for other ranks in collectives, as a mean over the ranks.
    """

    reductions: int
    is_sharded: bool
    transfer_ms: float
    exposed_ms: float
    waiting_ms: float


def _find_repeated_reductions(run: ParallelRun, slowest: RankFigures) -> Iterator[_RunSaving]:
    """Yields the saving if gradients were reduced once per step, in the last of its backward passes, from replays."""
    saving_ms = run.replayed.reduced_once_ms if run.replayed else None
    if run.reductions < 2 or saving_ms is None or {DATA_PARALLEL, SHARDED}.isdisjoint(run.strategies):
        return
    waiting_ms = sum(rank.exposed_waiting_ms or 0.0 for rank in run.ranks) / len(run.ranks)
    figures = RepeatedReductionFigures(
        run.reductions, SHARDED in run.strategies, slowest.transfer_ms or 0.0, slowest.exposed_transfer_ms or 0.0,
        waiting_ms,
    )  # fmt: skip
    # Two standard errors of the length of a step, because the saving is the difference of two lengths.
    error_ms = 2 * run.replayed.spread_ms / math.sqrt(run.steps) if run.replayed else 0.0
    low_ms, high_ms = (
        ms + sign * math.hypot(_CPU_TIME_TOLERANCE * ms, error_ms) for ms, sign in zip(saving_ms, (-1, 1), strict=True)
    )
    yield _RunSaving("repeated_reductions", figures, max(low_ms, 0.0), high_ms)


@dataclass(frozen=True)
class UnusedOverlapFigures(FindingFigures):
    """The collectives of a run that could run beside other work, but do not."""

    overlap: UnusedOverlap


def _find_unused_overlaps(run: ParallelRun) -> Iterator[_RunSaving]:
    """Yields what a step saves if collectives run beside other work of the GPU, from replays of all ranks."""
    for overlap in run.replayed.overlaps if run.replayed else ():
        if overlap.saves_ms_low < SMALLEST_SAVING_SHARE * run.step_ms:  # hidden at one of the paces
            continue
        low_ms = overlap.saves_ms_low * (1 - _TWO_GPUS_TOLERANCE)
        high_ms = overlap.saves_ms_high * (1 + _TWO_GPUS_TOLERANCE)
        yield _RunSaving(overlap.kind.replace(" ", "_"), UnusedOverlapFigures(overlap), low_ms, high_ms)


@dataclass(frozen=True)
class ExposedCommunicationFigures(FindingFigures):
    """The communication of a rank that nothing hides, per step.

    Attributes:
        rank: the label of the rank.
        transfer_ms: the transfer time of the rank's collectives, without waiting for other ranks.
        exposed_ms: the part of the transfer time that nothing hides.
        has_replicas: whether each rank has a replica of the model, or a shard of a replica.
    """

    rank: str
    transfer_ms: float
    exposed_ms: float
    has_replicas: bool
