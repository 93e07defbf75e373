"""Finds the runs of several ranks among captures, replays the ranks of each run together, and adds their findings.

A profiler makes launching slower, and not by the same factor on all ranks. So what limits a step, and which rank the
other ranks wait for, is read from the replay of all ranks at their pace without the profiler.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import pairwise
from typing import Any, TypeAlias

import numpy as np
from msgspec import structs

from nsys_analyzer.analysis.intervals import NONE
from nsys_analyzer.analysis.kernels.class_rules import COMMUNICATION
from nsys_analyzer.analysis.ranks.collectives import repeats_reduction
from nsys_analyzer.analysis.ranks.findings import find_losses, find_run_findings
from nsys_analyzer.analysis.ranks.join import JoinedRanks, join_members
from nsys_analyzer.analysis.ranks.joined_study import find_studied_collectives, join_studies, remove_operations
from nsys_analyzer.analysis.ranks.overlap import find_unused_overlaps
from nsys_analyzer.analysis.ranks.run import LATE_SHARE, Limit, ParallelRun, ReplayedRun
from nsys_analyzer.analysis.steps.pace import estimate_baselines, find_profiler_cost
from nsys_analyzer.analysis.steps.replay import COST_COLUMNS, Replay
from nsys_analyzer.analysis.steps.study import Study
from nsys_analyzer.analysis.summary.summary import CaptureSummary
from nsys_analyzer.configuration import Run
from nsys_analyzer.trace.arrays import Bools
from nsys_analyzer.trace.columns import MEMCPY, ON_DEVICE
from nsys_analyzer.trace.phase_names import STEP
from nsys_analyzer.trace.schema import NS_PER_MS

#: A replay at a pace without the profiler, and the ratio of the length of a step to that of a replayed step.
_Pace: TypeAlias = tuple[Replay, float]

#: The largest number of ranks that are replayed. Of a larger run, ranks at equal distances in the order of own times
#: are replayed.
_MAX_REPLAYED_RANKS = 8


def find_runs(captures: Sequence[CaptureSummary]) -> tuple[ParallelRun, ...]:
    """Returns the runs of the captures whose ranks exchange data, with their findings. The largest run comes first."""
    pairs = [(member, capture) for capture in captures for member in capture.members]
    capture_of = {(member.capture, member.process, member.device): capture for member, capture in pairs}
    runs = []
    for join in join_members([member for member, _ in pairs]):
        captures_of_ranks = [capture_of[member.capture, member.process, member.device] for member in join.members]
        run = _replay_run(_add_work(join.summarize(), captures_of_ranks), join, captures_of_ranks)
        run = _add_losses(run, captures_of_ranks)
        runs.append(structs.replace(run, findings=find_run_findings(run)))
    return tuple(runs)


def _add_losses(run: ParallelRun, captures: Sequence[CaptureSummary]) -> ParallelRun:
    """Adds what the slowest rank loses to the fastest rank, and corrects how late ranks are; see ``find_losses``."""
    if run.slowest is None or run.fastest is None or run.slowest == run.fastest:
        return run
    pairs = list(zip(run.ranks, captures, strict=True))
    losses = [find_losses(pair, pairs[run.fastest]) for pair in pairs]
    losses_of_slowest = losses[run.slowest]
    if losses_of_slowest is None:
        return run
    ranks = list(run.ranks)
    for position, (rank, loss) in enumerate(zip(run.ranks, losses, strict=True)):
        if loss and rank.late_ms and position != run.fastest:
            _, slowed_ms = loss
            ranks[position] = replace(rank, late_ms=rank.late_ms.shifted(slowed_ms))
    lost_times, slowed_ms = losses_of_slowest
    skew = (run.skew_ms or 0.0) + slowed_ms
    return structs.replace(run, ranks=tuple(ranks), skew_ms=skew, lost=lost_times, slowed_ms=slowed_ms)


def _add_work(run: ParallelRun, captures: Sequence[CaptureSummary]) -> ParallelRun:
    """Adds to the ranks the FLOPs and the tokens of a step, as far as their manifests contain them."""
    ranks = []
    for rank, capture in zip(run.ranks, captures, strict=True):
        manifest = capture.run or Run()
        flops = manifest.flops.flops_per_step if manifest.flops else None
        tokens = (manifest.batch_size or 0) * (manifest.context_length or 0) or None
        ranks.append(replace(rank, flops=flops, tokens=tokens))
    return structs.replace(run, ranks=tuple(ranks))


# --- the replay of all ranks


def _replay_run(run: ParallelRun, join: JoinedRanks, captures: Sequence[CaptureSummary]) -> ParallelRun:
    """Adds to the run the measured step without the profiler, and the replay of all ranks at this pace.

    There is no replay if it is not known which ranks wait for each other.
    """
    times = [capture.unprofiled.trusted(STEP) if capture.unprofiled else None for capture in captures]
    timed = [stats for stats in times if stats and stats.typical]
    if len(timed) == len(captures):
        run = structs.replace(run, unprofiled_ms=max(stats.typical or 0.0 for stats in timed))
    positions = list(range(len(join.members)))
    if len(positions) > _MAX_REPLAYED_RANKS:
        if not len(join.own_ns) or any(len(match) < len(join.members) for match in join.matches):
            return run  # groups of ranks, such as the stages of a pipeline, cannot be replayed without other ranks
        positions.sort(key=lambda position: -np.median(join.own_ns[position]))
        positions = positions[:: -(-len(positions) // _MAX_REPLAYED_RANKS)]
        join = JoinedRanks(tuple(join.members[position] for position in positions), ())
    study = join_studies(join, [captures[position] for position in positions])
    profiled_ms = max(rank.step_ms.median or 0.0 for rank in run.ranks)
    if run.missing or study is None or not profiled_ms:
        return run
    estimates, scale = estimate_baselines(study, profiled_ms, None)
    estimated_ms = [replay.step_ns / NS_PER_MS * scale for replay in estimates]
    paces = estimated_paces = [(replay, scale) for replay in estimates]
    step_ms = None
    if run.unprofiled_ms:
        in_process = all(capture.unprofiled.step_in_recorded_process for capture in captures if capture.unprofiled)
        paces = [(replay, 1.0) for replay in estimate_baselines(study, profiled_ms, run.unprofiled_ms, in_process)[0]]
        estimated_paces = [(replay, run.unprofiled_ms * NS_PER_MS / replay.step_ns) for replay in estimates]
        step_ms = _replay_fitted_ranks(study, [timed[position].typical or 0.0 for position in positions])
    path_ns = _measure_path_ns(study, paces[0][0])
    limit_ns = defaultdict[Limit, float](float)
    for (_, limit), ns in path_ns.items():
        limit_ns[limit] += ns
    largest_first = sorted(limit_ns.items(), key=lambda item: -item[1])
    path_length_ns = sum(limit_ns.values()) or 1.0
    spread_ms = float(paces[0][0].lengths_ns.std()) / NS_PER_MS * paces[0][1]
    if run.unprofiled_ms:
        spread_ms = max(stats.std or 0.0 for stats in timed)
    is_collective = study.of_class(COMMUNICATION)
    find_savings_ms = partial(_find_savings_ms, paces)
    replayed = ReplayedRun(
        estimated_ms=(min(estimated_ms), max(estimated_ms)),
        step_ms=step_ms,
        spread_ms=spread_ms,
        limits={limit: ns / path_length_ns for limit, ns in largest_first},
        without_transfers_ms=find_savings_ms(lambda replay: replay.scale_work(np.where(is_collective, 0.0, 1.0))),
        overlaps=find_unused_overlaps(run, study, join.members, partial(_find_savings_ms, (*paces, *estimated_paces))),
    )
    is_repeated = _find_repeated_reductions(join, study)
    if is_repeated.any():
        removed = is_repeated | _find_bucket_work(study, is_repeated)
        once_ms = find_savings_ms(partial(remove_operations, study, removed))
        replayed = replace(replayed, reduced_once_ms=once_ms, overlaps=())
    if run.unequal_work:
        flops = np.array([run.ranks[position].flops for position in positions], np.float64)
        factor = np.where(is_collective, 1.0, (flops.mean() / flops)[study.replay.rank_of[1]])
        equal_work_ms = find_savings_ms(lambda replay: replay.scale_work(factor))
        replayed = replace(replayed, equal_work_ms=equal_work_ms)
    run = structs.replace(run, replayed=replayed)
    may_be_late = run.slowest is not None and not run.takes_turns and (run.skew_ms or 0.0) >= LATE_SHARE * profiled_ms
    if run.is_pipeline or not may_be_late:
        return run
    return _add_lateness(run, positions, paces, path_ns)


def _add_lateness(
    run: ParallelRun,
    positions: Sequence[int],
    paces: Sequence[_Pace],
    path_ns: Mapping[tuple[int, Limit], float],
) -> ParallelRun:
    """Adds to the run by how much a step would be shorter if no other rank waited for the slowest rank.

    If the profiler makes steps longer, the same is added for the other rank that is on the critical path for the
    longest time. It is unknown how much the profiler slowed each rank down. So the ranks are also replayed as if all of
    them launched as fast as the fastest rank, and the estimate in which a rank is less late counts.
    """
    one_pace = [(_launch_at_one_pace(replay), scale) for replay, scale in paces]
    rank_ns = np.array(
        [sum(ns for (rank, _), ns in path_ns.items() if rank == index) for index in range(len(positions))]
    )
    slowest = positions.index(run.slowest)
    rank_ns[slowest] = 0.0
    ranks = list(run.ranks)
    bounds_ms = (0.0, 0.0)
    for index in (int(rank_ns.argmax()), slowest):
        change = partial(replace, unawaited_ranks=frozenset([index]))
        savings_ms = [*_find_savings_ms(paces, change), *_find_savings_ms(one_pace, change)]
        bounds_ms = min(savings_ms), max(savings_ms)
        position = positions[index]
        if run.is_slowed:
            ranks[position] = replace(ranks[position], late_unprofiled_ms=bounds_ms[0])
    return structs.replace(run, ranks=tuple(ranks), late_bounds_ms=bounds_ms)


def _measure_path_ns(study: Study, replay: Replay) -> dict[tuple[int, Limit], float]:
    """Returns the time on the critical path by the rank and by what takes the time, ns."""
    call_shares, operation_shares = replay.critical_path()
    is_collective = study.of_class(COMMUNICATION)
    path_ns: dict[tuple[int, Limit], float] = {}
    rank_of_call, rank_of_operation = replay.rank_of
    for position in range(len(replay.ranks)):
        calls, operations = rank_of_call == position, rank_of_operation == position
        cpu_ns, pause_ns = (call_shares[calls] @ column[calls] for column in (replay.cpu_ns, replay.pause_ns))
        path_ns[position, "launching"] = float(cpu_ns - pause_ns)
        path_ns[position, "other CPU work"] = float(pause_ns)
        work_ns, is_transfer = (operation_shares * replay.work_ns)[operations], is_collective[operations]
        path_ns[position, "work of the GPU"] = float(work_ns[~is_transfer].sum())
        path_ns[position, "communication"] = float(work_ns[is_transfer].sum())
    return path_ns


def _find_repeated_reductions(join: JoinedRanks, study: Study) -> Bools:
    """Returns True for each operation that reduces gradients which a later pass of the step reduces again."""
    is_repeated = np.zeros(len(study.operations) + 1, np.bool_)
    for member, operations in zip(join.members, find_studied_collectives(study, join.members), strict=True):
        is_repeated[operations[repeats_reduction(member)]] = True
    return is_repeated[:NONE]


def _find_savings_ms(paces: Sequence[_Pace], change: Callable[[Replay], Replay]) -> tuple[float, float]:
    """Returns the least and the most that a change saves per step at any pace, ms."""
    savings_ms = [(replay.step_ns - change(replay).step_ns) / NS_PER_MS * scale for replay, scale in paces]
    return max(min(savings_ms), 0.0), max(*savings_ms, 0.0)


def _replay_fitted_ranks(study: Study, step_ms: Sequence[float]) -> float:
    """Returns the length of a step of all ranks if each rank alone, without waiting for others, takes its given length.

    Args:
        study: the joined study of all ranks.
        step_ms: the measured length of a step of each rank without the profiler, ms.
    """
    columns: list[Replay] = []
    for rank, ms in zip(study.replay.ranks, step_ms, strict=True):
        alone = replace(rank, collective=np.full(len(rank.collective), NONE))
        columns.append(rank.without_profiler_cost(find_profiler_cost(alone, ms * NS_PER_MS)))
    fitted: dict[str, Any] = {name: np.concatenate([getattr(rank, name) for rank in columns]) for name in COST_COLUMNS}
    return replace(study.replay, **fitted).step_ns / NS_PER_MS


def _launch_at_one_pace(replay: Replay) -> Replay:
    """Returns the steps as if all ranks launched as fast as the fastest rank."""
    rank_of_call, _ = replay.rank_of
    launch_ns = np.array([max(rank.median_launch_ns, 1.0) for rank in replay.ranks])
    return replay.scale_launches((launch_ns.min() / launch_ns)[rank_of_call])


def _find_bucket_work(study: Study, reductions: Bools) -> Bools:
    """Returns True for each operation that writes a gradient to its bucket, or back from it after the reduction.

    After the last reduction of a pass, each gradient is copied back on the device. A kernel that runs exactly as often
    as these copies in the pass is the kernel that scales each gradient and writes it to its bucket.
    """
    kernel, phase, (_, rank) = study.operations.kernel, study.operations.phase, study.replay.rank_of
    starts_pass = np.append(True, (phase[1:] != phase[:-1]) | (rank[1:] != rank[:-1]))
    is_copy = (study.operations.kind == MEMCPY) & (study.operations.copy == ON_DEVICE)
    is_bucket_work = np.zeros(len(kernel), np.bool_)
    bounds = [*np.flatnonzero(starts_pass).tolist(), len(kernel)]
    for first, end in pairwise(bounds):
        reductions_in_pass = np.flatnonzero(reductions[first:end])
        if len(reductions_in_pass):
            copies = is_copy[first:end] & (np.arange(end - first) > reductions_in_pass[-1])
            counts = np.bincount(kernel[first:end] + 1)
            counts[0] = 0  # the count of operations that are not kernels
            is_scaling = (counts == copies.sum())[kernel[first:end] + 1] & copies.any()
            is_bucket_work[first:end] = copies | is_scaling
    return is_bucket_work
