"""Looks for every finding in a capture and ranks them by the time that they would free."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from nsys_analyzer.analysis.findings import RULES
from nsys_analyzer.analysis.findings.case import Candidate, Case
from nsys_analyzer.analysis.findings.finding import Diagnosis, Finding
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
#: 26 savings, measured in another run than the captured one on three rented hosts, lay within this.
_RUNS, _CPU_RUNS = 0.03, 0.29
#: A replay that differs from the recorded steps by more tells nothing of others.
_TRUSTED = 0.1
#: From this share of a profiled step on, the profiler hides what the program does.
_HIDES = 0.3
#: How often the profiler's cost is halved in on, where the step's unprofiled time is known; its largest multiple.
_ROUNDS, _MOST = 30, 4.0
#: The columns of a replay that are times.
_TIMES = ("after", "own", "lag", "latency", "spacing", "work", "pause")


def diagnose(capture: CaptureSummary, without: frozenset[str] = frozenset()) -> Diagnosis | None:
    """The findings of a capture; None where it has no steps, or no launches to replay them from.

    ``without`` are the IDs of findings that are told elsewhere.
    """
    if capture.step is None or capture.step.study is None or capture.on_cpu:
        return None
    study = capture.step.study
    unprofiled = capture.unprofiled.trusted_ms(STEP) if capture.unprofiled else None
    baselines = _timed(study, unprofiled * 1e6) if unprofiled else _estimated(study)
    steps = [unprofiled] if unprofiled else [replay.step_ns / 1e6 for replay in baselines]
    profiled = study.measured_ns / 1e6
    low, high = min(steps), max(steps)
    if not unprofiled:  # no program is slower without a profiler
        low, high = min(low, profiled), min(high, profiled)
    error = study.replay.step_ns / study.measured_ns - 1 if study.measured_ns else 0.0
    why = ""
    if abs(error) > _TRUSTED:
        why = f"a replay of the recorded steps is {abs(error):.0%} {'longer' if error > 0 else 'shorter'} than they are"
    parts = capture.step.main.parts
    if not unprofiled and parts.total_ms - parts.idle_ms > (1 + _TRUSTED) * high:
        why = "the steps hold work of the GPU that was launched before them"
    if why:
        return Diagnosis(low, high, profiled, study.busy_ms, error, bool(unprofiled), (), why)
    case = Case(capture.step, study, capture.configuration, baselines, (low + high) / 2)
    candidates = (one for rule in RULES for one in rule(case) if one.id not in without)
    found = [(candidate, _saves(case, candidate)) for candidate in candidates]
    found = [(one, saves) for one, saves in found if sum(saves) / 2 >= LEAST * case.step_ms]
    if profiled - high > _HIDES * profiled:
        found.append((_overhead(profiled, profiled - high), (profiled - high, profiled - steps[len(steps) // 2])))
    found.sort(key=lambda pair: -sum(pair[1]))
    return Diagnosis(low, high, profiled, study.busy_ms, error, bool(unprofiled), tuple(_ranked(case, found)))


def _overhead(profiled_ms: float, overhead_ms: float) -> Candidate:
    """The profiler as a finding of its own, where it takes so much of a step that it hides the program."""
    return Candidate(
        "profiler_overhead",
        "The profiler slows the step down",
        (),
        (f"A step takes {profiled_ms:.3g} ms under the profiler; {overhead_ms:.3g} ms of that or more are its own.",),
        "From the number of recorded API calls, ranges and operators, and what recording one costs; or from the step's "
        "time without the profiler.",
        (
            "# nsys-analyze run times the program without the profiler, too; of your own loop:",
            "torch.cuda.synchronize(); start = time.perf_counter()",
            "for _ in range(20): step()",
            "torch.cuda.synchronize(); print((time.perf_counter() - start) / 20)",
        ),
        "Time the steps without the profiler: they take as long as under it.",
    )


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


def _saves(case: Case, candidate: Candidate) -> tuple[float, float]:
    """The least and the most that a candidate's changes make a step shorter, ms, on any of the baselines."""
    saved = [
        (baseline.step_ns - change(baseline).step_ns) / 1e6
        for baseline in case.baselines
        for change in candidate.changes
    ]
    low, high = max(min(saved), 0.0) * (1 - _RUNS), max(*saved, 0.0) * (1 + _RUNS)
    if candidate.of_cpu and len(case.baselines) > 1:  # where the step was timed, the run's pace is known
        middle = (low + high) / 2
        low, high = min(low, (1 - _CPU_RUNS) * middle), max(high, (1 + _CPU_RUNS) * middle)
    return low, min(high, case.step_ms)


def _ranked(case: Case, found: list[tuple[Candidate, tuple[float, float]]]) -> Iterator[Finding]:
    """The findings, each with what is left of a step after it and those before it."""
    left = list(case.baselines)
    for one, (low, high) in found:
        if one.changes:  # the first one saves least; beside others a change may cost, and is not made then
            left = [min(one.changes[0](replay), replay, key=lambda one: one.step_ns) for replay in left]
        steps = [replay.step_ns / 1e6 for replay in left]
        left_ms = (min(steps) + max(steps)) / 2
        # The profiler's share is of the step that it slows down.
        step_ms = case.step_ms if one.changes else case.study.measured_ns / 1e6
        said = one.evidence, one.derivation, one.remedy, one.disproof
        yield Finding(one.id, one.title, low, high, step_ms, left_ms, *said, one.place)
