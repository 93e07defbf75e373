"""Diagnoses a capture: ranks its findings by the time that they would save, or says why findings are in doubt."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TypeAlias

import numpy as np

from nsys_analyzer.analysis.facts import Fact
from nsys_analyzer.analysis.findings import (
    fewer_operators,
    kernels,
    kernels_without_operators,
    values_on_host,
    waits,
)
from nsys_analyzer.analysis.findings import operators as operator_rules
from nsys_analyzer.analysis.findings.finding import (
    Candidate,
    Diagnosis,
    Finding,
    FindingFigures,
    FindingWithFigures,
    Place,
    Rule,
    StepsToExplain,
)
from nsys_analyzer.analysis.findings.host_lines import HOST_LINE, find_host_lines
from nsys_analyzer.analysis.findings.reasons import find_reasons
from nsys_analyzer.analysis.findings.redundant_work import find_redundant_work, find_zeros
from nsys_analyzer.analysis.findings.saving_intervals import estimate_interval
from nsys_analyzer.analysis.operators.account import StepAccount, make_account
from nsys_analyzer.analysis.operators.matching import OperatorWork
from nsys_analyzer.analysis.operators.pricing import price_operators
from nsys_analyzer.analysis.steps.pace import estimate_baselines, estimate_unprofiled_ms, widen_interval_ms
from nsys_analyzer.analysis.steps.process import Cause
from nsys_analyzer.analysis.steps.replay import Replay
from nsys_analyzer.analysis.steps.step import StepSummary
from nsys_analyzer.analysis.steps.study import Study
from nsys_analyzer.configuration import Run
from nsys_analyzer.system.plugins import FINDINGS, load_plugins, skip_failing_plugin
from nsys_analyzer.trace.columns import COPY, SYNCHRONIZE
from nsys_analyzer.trace.schema import NS_PER_MS

#: All rules, except the one on idle time that no other rule explains. If two findings save equal time, the finding of
#: the earlier rule comes first.
RULES: tuple[Rule, ...] = (
    *waits.RULES, *values_on_host.RULES, find_redundant_work, find_zeros, *operator_rules.RULES, *fewer_operators.RULES,
    *kernels_without_operators.RULES, *kernels.RULES,
)  # fmt: skip
#: A finding is reported only if it saves at least this share of a step.
SMALLEST_SAVING_SHARE = 0.03
#: A cause that programs without a fault have as well is reported only if the lower bound of its saving is at least this
#: share of a step. Fusing the operators of an eager Llama and of an eager ResNet-50, both without a fault, saves at
#: least 6 % and 9 %. Fusing those of two programs that were left uncompiled saves at least 23 % and 40 %.
LEAST_COMMON_SAVING_SHARE = 0.1
#: Savings are not trusted if the length of the replayed steps differs from the recorded length by more than this share.
_MAX_REPLAY_ERROR = 0.1
#: A report warns about the profiler's cost if it exceeds this share of a profiled step.
_NOTABLE_OVERHEAD_SHARE = 0.3
#: If a change saves less than this share of a step on one baseline, it is not replayed on the other baselines.
_NEGLIGIBLE_SAVING_SHARE = 0.005
#: The only pass of a program does not represent further passes if capturing CUDA graphs, or initializing CUDA, takes at
#: least this share of it.
_NOTABLE_ONE_TIME_SHARE = 0.25
#: A call that does not wait for the GPU is assumed to initialize CUDA or load kernels if it takes at least this
#: long, ns.
_START_UP_CALL_NS = 3_000_000
#: For each cause of a wait: the causes of the idle time from the end of the wait to the next launches. A change that
#: removes the wait also removes this idle time.
_CAUSES_AFTER_WAIT = {"sync": {"launch"}, "copy": {"launch"}, "allocator": {"launch", "host"}}
#: If operators are known, a finding is left out if findings that save more explain more than this share of its work.
_MAX_EXPLAINED_SHARE = 0.5
#: The finding ``gpu_idle`` is reported only if the GPU computes for less than this share of a step.
_MIN_COMPUTE_SHARE = 0.7


def diagnose(
    step: StepSummary,
    study: Study,
    *,
    operators: OperatorWork | None = None,
    unprofiled_ms: float | None = None,
    in_recorded_process: bool = False,
    step_spread: float = 0.0,
    is_torch: bool = True,
    out_of_memory: Fact | None = None,
    waits_for_ranks: bool = False,
    run: Run | None = None,
) -> Diagnosis:
    """Finds the causes that make the steps of a capture long, and the time that each of them costs.

    Args:
        step: the figures of the steps.
        study: a few steps in full detail.
        operators: the calls of PyTorch's operators in the steps; None if they are unknown.
        unprofiled_ms: the measured length of a step without the profiler, ms; None if it was not measured.
        in_recorded_process: whether ``unprofiled_ms`` was measured in the recorded process.
        step_spread: the relative standard deviation of the steps that the recorded process made without the profiler.
        is_torch: whether the program uses PyTorch.
        out_of_memory: the reason for missing findings if the program ran out of memory; else None.
        waits_for_ranks: whether collectives wait for other ranks. The findings of the whole run explain such waits.
        run: the manifest of the capture; None if there is none.
    """
    profiled_ms = step.length_ms
    busy_ms = step.total_ms - step.idle_ms
    replay_error = study.replay.step_ns / study.profiled_step_ns - 1 if study.profiled_step_ns else 0.0
    baselines, scale = estimate_baselines(study, profiled_ms, unprofiled_ms, in_recorded_process)
    replayed_ms = [replay.step_ns / NS_PER_MS * scale for replay in baselines]
    shortest_ms, longest_ms = min(replayed_ms), max(replayed_ms)
    low_ms, high_ms = (
        unprofiled_ms or estimate_unprofiled_ms(ms, busy_ms, profiled_ms) for ms in (shortest_ms, longest_ms)
    )
    one_time_reason = _find_one_time_reason(step, study, out_of_memory)
    doubt = one_time_reason
    if abs(replay_error) > _MAX_REPLAY_ERROR:
        doubt = doubt or Fact("replay_differs", error=replay_error)
    if not unprofiled_ms and busy_ms > (1 + _MAX_REPLAY_ERROR) * longest_ms:
        doubt = doubt or Fact("earlier_work")
    findings: list[Finding] = []
    account: StepAccount | None = None
    if not doubt:
        is_timed, middle_ms = bool(unprofiled_ms), (low_ms + high_ms) / 2
        priced = price_operators(study, operators) if operators else None
        reasons = find_reasons(priced) if priced else {}
        steps = StepsToExplain(
            step, study, baselines, scale, middle_ms, is_torch, is_timed, high_ms * (1 + step_spread), priced, reasons,
            run or Run(), step_spread,
        )  # fmt: skip
        account, findings = _explain_steps(steps)
    explained_causes = _find_explained_causes(step, findings) | ({"communication"} if waits_for_ranks else set())
    idle = _find_idle_gpu(step, profiled_ms if doubt else (low_ms + high_ms) / 2, explained_causes)
    # If the replay cannot be trusted, idle time with an unknown cause is not reported.
    is_vague = doubt is not None and idle is not None and idle.place == Place("idle", "unknown")
    if idle and not one_time_reason and not is_vague:
        position = sum(finding.saves_ms >= idle.saves_ms for finding in findings)
        left_ms = findings[position - 1].left_after_all_ms if position else idle.step_ms
        lines = study.lines.get(idle.place.name, ()) if idle.place else ()
        findings.insert(position, replace(idle, left_after_all_ms=left_ms, lines=lines))
    is_notable = profiled_ms - longest_ms > _NOTABLE_OVERHEAD_SHARE * profiled_ms
    overhead_ms = (profiled_ms - longest_ms, profiled_ms - shortest_ms) if is_notable else None
    ends_ms = (
        (low_ms * (1 - step_spread), high_ms * (1 + step_spread))
        if unprofiled_ms
        else widen_interval_ms(low_ms, high_ms, busy_ms, profiled_ms)
    )
    return Diagnosis(
        *ends_ms, profiled_ms, busy_ms, replay_error, bool(unprofiled_ms), overhead_ms, tuple(findings), doubt,
        account, bool(unprofiled_ms) and in_recorded_process,
    )  # fmt: skip


def _explain_steps(steps: StepsToExplain) -> tuple[StepAccount | None, list[Finding]]:
    """Returns the account of a step, and the findings of all rules that save enough time."""
    candidates = [candidate for rule in RULES for candidate in rule(steps)]
    for point, rule in load_plugins(FINDINGS):
        with skip_failing_plugin(point):
            plugin_candidates = [*rule(steps)]
            for candidate in plugin_candidates:
                _find_saving(steps, candidate, (), 0.0)  # raises if a change fails, so that the plugin is skipped
            candidates += plugin_candidates
    candidates += find_host_lines(steps, candidates)
    ranked, account = _rank_candidates(steps, candidates), None
    if steps.operators:
        work_ns = steps.study.replay.work_ns
        changed_ns = [[change(steps.study.replay).work_ns for change in candidate.changes] for candidate, _ in ranked]
        fused_ns = [
            np.mean(ns, axis=0) for (candidate, _), ns in zip(ranked, changed_ns, strict=True) if candidate.is_common
        ]
        fused_share, least_share = (
            np.min([work_ns, *ns], axis=0) / np.maximum(work_ns, 1.0)
            for ns in (fused_ns, [ns[-1] for ns in changed_ns])
        )
        idle_ms: dict[str, float] = {row.cause: row.ms for row in steps.summary.causes}
        lengths = (steps.baselines, steps.scale, steps.step_ms)
        account = make_account(steps.operators, *lengths, idle_ms, fused_share, least_share, steps.reasons)
    # A finding saves at most what lies between the attainable step and the step.
    gap_ms = account.step_ms - account.attainable_ms if account else np.inf
    return account, [*_make_findings(steps, [(candidate, saving.limit(gap_ms)) for candidate, saving in ranked])]


def _find_explained_causes(step: StepSummary, findings: Sequence[Finding]) -> set[str]:
    """Returns the causes of idle time and the kernel classes that findings explain, or that need no finding."""
    causes = {"unrecorded", "profiler", *(finding.place.name for finding in findings if finding.place)}
    lines_ms = sum(finding.saves_ms for finding in findings if finding.id == HOST_LINE)
    if lines_ms and lines_ms >= waits.MAJORITY_SHARE * step.idle_of("launch"):
        causes.add("launch")
    return causes


def _find_one_time_reason(step: StepSummary, study: Study, out_of_memory: Fact | None) -> Fact | None:
    """Returns why the only pass of a program does not represent further passes; None if it does."""
    if out_of_memory and step.is_pass:
        return out_of_memory
    if study.recording_share >= _NOTABLE_ONE_TIME_SHARE:
        return Fact("captures_graphs")
    return _find_cold_start(step, study)


def _find_cold_start(step: StepSummary, study: Study) -> Fact | None:
    """Returns the fact that the only pass is a cold start: it mostly initializes CUDA or loads kernels. Else None."""
    call_ns = study.replay.cpu_ns - study.replay.pause_ns
    total_ms = float(study.replay.cpu_ns.sum()) / NS_PER_MS
    starts_up = (call_ns >= _START_UP_CALL_NS) & (study.replay.awaited < 0)
    starts_up &= ~np.isin(study.calls.kind, (COPY, SYNCHRONIZE))
    start_up_ms = float(call_ns[starts_up].sum()) / NS_PER_MS
    if step.instances > 1 or start_up_ms < _NOTABLE_ONE_TIME_SHARE * total_ms or not start_up_ms:
        return None
    longest_first = np.argsort(np.where(starts_up, -call_ns, 0))[: starts_up.sum()].tolist()
    calls = tuple(
        (study.apis[study.calls.api[call]].partition("_v")[0], float(call_ns[call]) / NS_PER_MS)
        for call in longest_first
    )
    return Fact("cold_start", start_up_ms=start_up_ms, total_ms=total_ms, calls=calls)


@dataclass(frozen=True)
class _SavingInterval:
    """The smallest, the middle and the largest saving of a candidate per step, ms."""

    low: float = 0.0
    middle: float = 0.0
    high: float = 0.0

    def limit(self, limit_ms: float) -> _SavingInterval:
        """Returns the interval below a limit. If the limit is below the lower end, the interval is scaled to it."""
        low = self.low if self.low <= limit_ms else limit_ms * self.low / self.high
        return _SavingInterval(low, min(self.middle, limit_ms), min(self.high, limit_ms))


_RankedCandidate: TypeAlias = tuple[Candidate, _SavingInterval]


def _rank_candidates(steps: StepsToExplain, candidates: Sequence[Candidate]) -> list[_RankedCandidate]:
    """Returns the candidates that save enough time with their savings, the largest saving first.

    The saving of the general cause of idle time is computed after the specific causes and redundant work were removed.
    """
    specific = [
        candidate
        for candidate in candidates
        if candidate.is_specific_cause or candidate.is_redundant or candidate.saves_launches
    ]
    ranked: list[_RankedCandidate] = []
    explained_ms = 0.0
    for candidate in sorted(candidates, key=lambda candidate: candidate.is_general_cause):
        earlier_candidates = (specific, explained_ms) if candidate.is_general_cause else ((), 0.0)
        saving = _find_saving(steps, candidate, *earlier_candidates)
        is_large = saving.low >= LEAST_COMMON_SAVING_SHARE * steps.step_ms or not candidate.is_common
        if is_large and saving.middle >= SMALLEST_SAVING_SHARE * steps.step_ms:
            ranked.append((candidate, saving))
            explained_ms += saving.high if candidate.is_specific_cause else 0.0
    ranked.sort(key=lambda pair: -pair[1].middle)
    return _without_explained_work(steps.study, ranked) if steps.operators else ranked


def _make_findings(steps: StepsToExplain, ranked: Sequence[_RankedCandidate]) -> Iterator[FindingWithFigures]:
    """Yields the findings with the length of a step after each finding and all earlier findings were fixed."""
    remaining = list(steps.baselines)
    for candidate, saving in ranked:
        # The first change of a candidate saves least. It is not made if it lengthens a step after the other changes.
        remaining = [
            min(candidate.changes[0](replay), replay, key=lambda changed: changed.step_ns) for replay in remaining
        ]
        remaining_ms = [replay.step_ns / NS_PER_MS * steps.scale for replay in remaining]
        yield FindingWithFigures(
            id=candidate.id,
            saves_ms_low=saving.low,
            saves_ms_high=saving.high,
            saves_ms=saving.middle,
            step_ms=steps.step_ms,
            left_after_all_ms=(min(remaining_ms) + max(remaining_ms)) / 2,
            place=candidate.place,
            lines=candidate.find_lines(steps),
            figures=candidate.figures,
            is_torch=steps.is_torch,
            is_pass=steps.summary.is_pass,
            is_serving=bool(steps.summary.kind),
        )


def _without_explained_work(study: Study, ranked: Sequence[_RankedCandidate]) -> list[_RankedCandidate]:
    """Returns the candidates whose GPU work is not mostly that of others, which save more or know a reason."""
    explained_operations, kept = np.zeros(len(study.operations), np.bool_), []
    for candidate, saving in sorted(ranked, key=lambda pair: pair[0].is_symptom):
        if candidate.operations is not None:
            work_ms = study.work_ms(candidate.operations)
            if study.work_ms(candidate.operations & explained_operations) > _MAX_EXPLAINED_SHARE * work_ms:
                continue
            explained_operations |= candidate.operations
        kept.append((candidate, saving))
    return sorted(kept, key=lambda pair: -pair[1].middle)


def _find_saving(
    steps: StepsToExplain, candidate: Candidate, earlier_candidates: Sequence[Candidate], earlier_ms: float
) -> _SavingInterval:
    """Returns the saving of a candidate's changes per step on all baselines, limited to the time of its cause.

    Args:
        steps: the steps that are replayed.
        candidate: the candidate.
        earlier_candidates: the candidates whose last changes, which save most, are made first.
        earlier_ms: the largest saving of these candidates, ms.
    """
    replays: list[tuple[Replay, Replay]] = []
    for baseline in steps.baselines:
        for earlier in earlier_candidates:
            baseline = min(earlier.changes[-1](baseline), baseline, key=lambda replay: replay.step_ns)
        replays += [(baseline, change(baseline)) for change in candidate.changes]
        most_ns = max(before.step_ns - after.step_ns for before, after in replays)
        if most_ns * steps.scale < _NEGLIGIBLE_SAVING_SHARE * steps.step_ms * NS_PER_MS:
            return _SavingInterval()  # on the other baselines, the saving would be similarly small
    low, middle, high = estimate_interval(steps.study, replays, steps.scale, steps.step_spread)
    # A candidate saves at most the time of its cause, and at most the step without the remaining work.
    study, step, replay = steps.study, steps.summary, steps.study.replay
    changed = candidate.changes[-1](replay)
    work_ms = study.work_ms(changed.work_ns < replay.work_ns if candidate.operations is None else candidate.operations)
    # If waits are removed, the program saves the waiting time. It usually waits for the work that the candidate is
    # about, so only the larger of both times counts.
    waits_ms = steps.pause_ms_per_step(steps.waited_ns[(replay.awaited >= 0) & (changed.awaited < 0)])
    name = candidate.place.name if candidate.place and candidate.saves_cpu_time else ""
    has_fewer_launches = candidate.operations is not None and (changed.cpu_ns < replay.cpu_ns).any()
    causes = {"launch"} if has_fewer_launches else candidate.idle_causes or {name, *_CAUSES_AFTER_WAIT.get(name, ())}
    idle_ms = sum(row.ms for row in step.idle_by_cause if row.cause in causes) if step.idle_by_cause else step.idle_ms
    busy_ms = study.busy_ms  # of the same steps as the work of the candidate
    remaining_work_ms = min(busy_ms, steps.step_ms) * max(1 - work_ms / busy_ms, 0.0) if busy_ms else 0.0
    # If the measured step without the profiler is longer than the profiled step, its parts may be longer, too.
    # The GPU's work takes as long as under the profiler, so the CPU's time is longer by more than the step.
    pace = max(steps.step_ms / step.length_ms, 1.0) if step.length_ms else 1.0
    if candidate.saves_cpu_time and step.idle_ms and steps.step_ms > step.length_ms:
        pace = max(pace, (steps.step_ms - busy_ms) / step.idle_ms)
    rest_ms = max(steps.longest_step_ms, steps.step_ms) - remaining_work_ms - earlier_ms
    limit_ms = max(min((max(work_ms, waits_ms) + idle_ms) * pace, rest_ms, steps.step_ms), 0.0)
    return _SavingInterval(max(low, 0.0), middle, high).limit(limit_ms)


@dataclass(frozen=True)
class GpuIdleFigures(FindingFigures):
    """The largest part of a step in which the GPU does not compute.

    Attributes:
        cause: the cause of the idle time; "copy" or "communication" if the GPU copies or communicates.
        is_exposed: whether the GPU copies or communicates in this part; otherwise, it is idle.
        ms: the length of this part, ms.
        compute_share: the share of the step in which the GPU computes.
        range_name: the range with most of the idle time of this cause; empty if it is outside of ranges.
        api: the API call with most of the idle time of this cause, if it is outside of ranges; else empty.
        is_mostly_in_place: whether most of the idle time of this cause is in ``range_name`` or ``api``.
        is_pass: whether the whole capture counts as one step.
    """

    cause: Cause
    is_exposed: bool
    ms: float
    compute_share: float
    range_name: str
    api: str
    is_mostly_in_place: bool
    is_pass: bool


def _find_idle_gpu(step: StepSummary, step_ms: float, explained_causes: set[str]) -> FindingWithFigures | None:
    """Returns a finding for the largest part of a step in which the GPU does not compute.

    Returns None if the GPU computes for most of the step, or if another finding explains this part.

    Args:
        step: the figures of the steps.
        step_ms: the length of a step without the profiler, ms.
        explained_causes: the causes of idle time and the kernel classes that other findings explain.
    """
    if not step_ms or step.compute_ms >= _MIN_COMPUTE_SHARE * step_ms:
        return None
    causes_ms: dict[Cause, float] = {}
    for row in step.idle_by_cause:
        causes_ms[row.cause] = causes_ms.get(row.cause, 0.0) + row.ms
    # Without the profiler, the idle time is shorter, but copies and collectives take the same time.
    idle_ms = max(step_ms - (step.total_ms - step.idle_ms), 0.0)
    scale = idle_ms / step.idle_ms if step.idle_ms else 0.0
    parts: list[tuple[float, Cause, bool]] = [(ms * scale, cause, False) for cause, ms in causes_ms.items()]
    parts.append((step.exposed_copy_ms, "copy", True))
    parts.append((step.exposed_communication_ms, "communication", True))
    ms, cause, is_exposed = max(parts)
    if cause in explained_causes or not ms:
        return None
    ms_by_place = defaultdict[tuple[str, str], float](float)
    for row in step.idle_by_cause:
        range_and_api = (row.range, "") if row.range else ("", row.api or "")
        ms_by_place[range_and_api] += row.ms * (row.cause == cause)
    (range_name, api), longest_ms = max(ms_by_place.items(), key=lambda pair: pair[1], default=(("", ""), 0.0))
    is_mostly_in_place = longest_ms >= waits.MAJORITY_SHARE * causes_ms.get(cause, 0.0)
    ms = min(ms, step_ms)
    figures = GpuIdleFigures(
        cause, is_exposed, ms, step.compute_ms / step_ms, range_name, api, is_mostly_in_place, step.is_pass
    )
    return FindingWithFigures(
        id="gpu_idle",
        saves_ms_low=0.0,
        saves_ms_high=ms,
        step_ms=step_ms,
        left_after_all_ms=step_ms,
        place=Place("idle", cause),
        figures=figures,
        is_pass=step.is_pass,
    )
