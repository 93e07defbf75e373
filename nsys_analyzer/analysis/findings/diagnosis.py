"""Looks for every finding in a capture and ranks them by the time that they would free."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from nsys_analyzer.analysis.findings import RULES
from nsys_analyzer.analysis.findings.case import Candidate, Case
from nsys_analyzer.analysis.findings.finding import Diagnosis, Finding
from nsys_analyzer.analysis.findings.gpu_idle import find_idle_gpu
from nsys_analyzer.analysis.ranges.phases import STEP
from nsys_analyzer.analysis.steps.replay import Replay
from nsys_analyzer.analysis.steps.study import Study
from nsys_analyzer.analysis.summary.summary import CaptureSummary

#: What saves less than this share of a step is not listed.
LEAST = 0.03
#: The CPU is faster without a profiler beside it, by more than the recording of events: what takes it 1 under the
#: profiler takes 0.84 at least.
_CPU = 0.84
#: Two runs of one program differ, in the GPU's work by some percent; in the CPU's own time so much that two in three of
#: 26 savings, measured in another run than the captured one on three rented hosts, lay within this; where the step was
#: timed without the profiler, 12 of 14 within the third.
_RUNS, _CPU_RUNS, _TIMED_CPU_RUNS = 0.03, 0.29, 0.2
#: A replay that differs from the recorded steps by more tells nothing of others.
_TRUSTED = 0.1
#: From this share of a profiled step on, the profiler hides what the program does.
_HIDES = 0.3
#: What saves less than this share of a step on one baseline is not looked at on others.
_NEGLIGIBLE = 0.005
#: How often the profiler's cost is halved in on, where the step's unprofiled time is known; its largest multiple.
_ROUNDS, _MOST = 16, 4.0
#: What of a process alone nobody knows: whether its collectives wait for another rank. The findings of a run tell it.
_TOLD_OF_RUNS = frozenset({"exposed_communication"})
#: The columns of a replay that are times.
_TIMES = ("after", "own", "lag", "latency", "spacing", "work", "pause")


def diagnose(capture: CaptureSummary) -> Diagnosis | None:
    """The findings of a capture; None where no launches are known to replay its steps from."""
    if capture.step is None or capture.study is None or capture.on_cpu:
        return None
    study, profiled = capture.study, capture.step.length_ms
    error = study.replay.step_ns / study.measured_ns - 1 if study.measured_ns else 0.0
    unprofiled = capture.unprofiled.trusted_ms(STEP) if capture.unprofiled else None
    baselines = _timed(study, unprofiled * 1e6) if unprofiled else _estimated(study)
    # What a replay says of the steps that it looks at holds for the length of a step.
    scale = 1.0 if unprofiled or not study.replay.step_ns else profiled / (study.replay.step_ns / 1e6)
    replayed = [replay.step_ns / 1e6 * scale for replay in baselines]
    busy = capture.step.total_ms - capture.step.idle_ms
    # No program is slower without a profiler, and none is done before the GPU is.
    low, high = (unprofiled,) * 2 if unprofiled else (min(max(ms, busy), profiled) for ms in _ends(replayed))
    why = ""
    if not unprofiled and busy > (1 + _TRUSTED) * max(replayed):
        why = "the steps hold work of the GPU that was launched before them"
    if abs(error) > _TRUSTED:
        why = f"a replay of the recorded steps is {abs(error):.0%} {'longer' if error > 0 else 'shorter'} than they are"
    has_others = any(len(member.collectives) and member.world_size != 1 for member in capture.members)
    without = _TOLD_OF_RUNS if has_others else frozenset()
    found: list[Finding] = []
    if not why:
        case = Case(capture.step, study, capture.configuration, baselines, scale, (low + high) / 2)
        candidates = [one for rule in RULES for one in rule(case) if one.id not in without]
        found = list(_ranked(case, candidates))
    told = {one.place.name for one in found if one.place} | ({"communication"} if without else set())
    if idle := find_idle_gpu(capture.step, profiled if why else (low + high) / 2, frozenset(told)):
        place = sum(one.saves_ms >= idle.saves_ms for one in found)
        left = found[place - 1].left_after_all_ms if place else idle.step_ms
        found.insert(place, replace(idle, left_after_all_ms=left))
    overhead = _overhead(profiled, replayed)
    return Diagnosis(low, high, profiled, busy, error, bool(unprofiled), overhead, tuple(found), why)


def _ends(values: Sequence[float]) -> tuple[float, float]:
    return min(values), max(values)


def _overhead(profiled_ms: float, replayed: Sequence[float]) -> tuple[float, float] | None:
    """The least and the most that the profiler takes of a step, ms, where that hides what the program does."""
    low, high = (profiled_ms - ms for ms in reversed(_ends(replayed)))
    return (low, high) if low > _HIDES * profiled_ms else None


def _estimated(study: Study) -> tuple[Replay, ...]:
    """The steps without the least and without the most that the profiler may have cost."""
    least, most = study.replay.with_events_costing(study.low_share), study.replay.with_events_costing(1.0)
    return least, most, most.at_pace(_CPU)


def _timed(study: Study, step_ns: float) -> tuple[Replay, ...]:
    """The steps with so much of the profiler's cost taken off that they take their unprofiled time.

    Where that does not suffice, or they are shorter than that as they were recorded, the machine's pace was another
    one: all of their times are scaled.
    """
    low, high = 0.0, _MOST
    for _ in range(_ROUNDS):
        middle = (low + high) / 2
        if study.replay.with_events_costing(middle).step_ns > step_ns:
            low = middle
        else:
            high = middle
    found = study.replay.with_events_costing(high)
    pace = step_ns / found.step_ns if found.step_ns else 1.0
    return (replace(found, **{name: getattr(found, name) * pace for name in _TIMES}),)


def _ranked(case: Case, candidates: Sequence[Candidate]) -> Iterator[Finding]:
    """The findings worth a change, the largest saving first; each with what is left of a step after all up to it.

    What is left for a cause that others explain is valued without these, and stands behind them.
    """
    explaining = [one for one in candidates if one.explains]
    found = []
    for one in candidates:
        saves = _saves(case, one, () if one.explains or not one.explained else explaining)
        if sum(saves) / 2 >= LEAST * case.step_ms:
            found.append((one, saves))
    found.sort(key=lambda pair: -sum(pair[1]))
    last = max((place for place, (one, _) in enumerate(found) if one.explains), default=-1)
    for place, pair in enumerate(found[:last]):
        if pair[0].explained:  # behind the last one that explains it
            found.insert(last + 1, pair)
            del found[place]
            break
    left = list(case.baselines)
    for one, (low, high) in found:
        # The first change saves least; beside others a change may cost, and is not made then.
        left = [min(one.changes[0](replay), replay, key=lambda one: one.step_ns) for replay in left]
        steps = [replay.step_ns / 1e6 * case.scale for replay in left]
        words = case.step.in_words
        said = tuple(map(words, one.evidence)), words(one.derivation), one.remedy, words(one.disproof)
        yield Finding(one.id, one.title, low, high, case.step_ms, sum(_ends(steps)) / 2, *said, one.place)


def _saves(case: Case, candidate: Candidate, before: Sequence[Candidate]) -> tuple[float, float]:
    """The least and the most that a candidate's changes make a step shorter, ms, on any of the baselines.

    ``before``: the candidates whose most saving changes are made first.
    """
    saved = []
    for baseline in case.baselines:
        for other in before:
            baseline = min(other.changes[-1](baseline), baseline, key=lambda one: one.step_ns)
        ns = [baseline.step_ns - change(baseline).step_ns for change in candidate.changes]
        saved += [max(one, 0.0) / 1e6 * case.scale for one in ns]
        if max(saved) < _NEGLIGIBLE * case.step_ms:
            return 0.0, 0.0  # other baselines differ by less
    low, high = min(saved) * (1 - _RUNS), max(saved) * (1 + _RUNS)
    if candidate.of_cpu:
        runs, middle = _CPU_RUNS if len(case.baselines) > 1 else _TIMED_CPU_RUNS, (low + high) / 2
        low, high = min(low, (1 - runs) * middle), max(high, (1 + runs) * middle)
    return low, min(high, case.step_ms)
