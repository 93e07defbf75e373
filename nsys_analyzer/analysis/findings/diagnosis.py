"""The findings of a capture, ranked by the time that they would free, or why it has none."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial

import numpy as np

from nsys_analyzer.analysis.findings import kernels, serving, waits
from nsys_analyzer.analysis.findings.finding import Candidate, Diagnosis, Finding, Place, Rule, StepsToExplain, listed
from nsys_analyzer.analysis.kernels.class_rules import UNKNOWN
from nsys_analyzer.analysis.ranges.phases import STEP
from nsys_analyzer.analysis.steps.process import Cause
from nsys_analyzer.analysis.steps.replay import Replay
from nsys_analyzer.analysis.steps.step import StepSummary
from nsys_analyzer.analysis.steps.study import Study
from nsys_analyzer.analysis.summary.summary import CaptureSummary
from nsys_analyzer.system.plugins import FINDINGS, load_plugins, skip_if_it_fails
from nsys_analyzer.text import StrOrText, phrase, plural, rounded, rounded_percent
from nsys_analyzer.trace.columns import COPY, SYNCHRONIZE
from nsys_analyzer.trace.schema import NS_PER_MS

#: What is looked for; of two findings that save as much, the one that is named first here comes first.
RULES: tuple[Rule, ...] = (*waits.RULES, *kernels.RULES, *serving.RULES)
#: What saves less than this share of a step is not listed.
SMALLEST_SAVING = 0.03
#: CPU time without a profiler ÷ CPU time under it, at least, after the recording of events is taken off: a program runs
#: faster when no profiler runs beside it.
_CPU = 0.84
#: What the launch of a CUDA graph takes without a profiler, and what recording a node adds to the pause before it, ns.
#: Where nodes are recorded one by one, the launch takes 0.9 to 1.3 µs for each: of 639 nodes 0.85 ms. On the GPU a
#: graph of 692 nodes took 9.16 ms, with its nodes recorded 9.45. The step of examples/serving takes 2.93 ms in place
#: of 1.96.
_GRAPH_NS, _NODE_NS = 50_000.0, 420.0
#: By how much savings differ between two runs of one program: of the GPU's work; of the CPU's own time; of the latter
#: where the step was timed without the profiler. Two of three of 26 savings, measured in another run than the captured
#: one on three rented hosts, lay within the second, and 12 of 14 within the third.
_RUNS, _CPU_RUNS, _TIMED_CPU_RUNS = 0.03, 0.29, 0.2
#: A replay that differs from the recorded steps by more tells nothing of others.
_TRUSTED = 0.1
#: From this share of a profiled step on, the profiler hides what the program does.
_HIDES = 0.3
#: What saves less than this share of a step on one baseline is not looked at on others.
_NEGLIGIBLE = 0.005
#: Steps whose lengths differ by this much at most take as long.
_SAME = 0.03
#: How often the profiler's cost is halved in on, where the step's unprofiled time is known; its largest multiple.
_ROUNDS, _MOST = 16, 4.0
#: A step is no usual one if recording CUDA graphs, or starting CUDA up, takes this share of it.
_ONE_TIME_SHARE = 0.25
#: A call that waits for nothing takes this long only if it starts CUDA up or loads kernels.
_START_UP_NS = 3_000_000
#: An idle GPU of unknown cause: where a replay tells nothing, it tells nothing either.
_UNEXPLAINED = Place("idle", "unknown")
#: The causes of the idle time that follows a wait, until the next launches come. Between these, freed memory is
#: allocated again.
_CAUSES_BEHIND = {"sync": {"launch"}, "copy": {"launch"}, "allocator": {"launch", "host"}}
#: The columns of a replay that are times.
_TIMES = ("after", "own", "lag", "latency", "spacing", "work", "pause", "gap")
#: A GPU that computes for less of a step than this is mostly idle.
_BUSY = 0.7
#: Lines that wait, as many as are named.
_WAITING = 3
#: What the program does while the GPU idles, and the lines that tell more.
_TITLES: dict[Cause, str] = {
    "sync": "the program waits for it",
    "allocator": "memory is allocated and freed",
    "copy": "the program waits for copies",
    "launch": "it waits for launches",
    "host": "the program works on the CPU",
    "data": "batches are loaded",
    "communication": "collectives wait to start",
    "unrecorded": "the program waits for work that was not recorded",
    "profiler": "the profiler works",
    "unknown": "the cause is unknown",
}
_REMEDIES: dict[str, tuple[str, ...]] = {
    "cudaGraphLaunch": (
        "# nsys profile --cuda-graph-trace=graph  # where each node is recorded, a graph's launch takes longer",
    ),
    "copy": (
        "# copy what is needed next while the GPU computes, from pinned memory, on a stream of its own:",
        "with torch.cuda.stream(side): ahead = host.to(device, non_blocking=True)",
        "# keep on the GPU what fits: fewer layers offloaded, smaller data types",
    ),
    "communication": ("# compare the ranks: a collective waits for the last one. Give the captures of all ranks.",),
}
_DISPROOF = "Time the part by itself: if the step is no shorter without it, the GPU waits for something else."
_LOOK = ("# put a range around what you suspect, torch.cuda.nvtx.range_push(name) ... range_pop(), and record again",)
#: From this share of the compute on, kernels inside CUDA graphs hide what could be found.
_IN_GRAPHS = 0.3
_BY_NSYS = phrase("Capture with `nsys profile --trace=cuda,nvtx`")
_BY_TORCH = phrase("Record with `activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]`")


def diagnose(capture: CaptureSummary) -> Diagnosis | None:
    """Returns the findings of a capture; None where no launches are known to replay its steps from."""
    if capture.step is None or capture.study is None or capture.on_cpu:
        return None
    step, study, profiled = capture.step, capture.study, capture.step.length_ms
    error = study.replay.step_ns / study.measured_ns - 1 if study.measured_ns else 0.0
    unprofiled = capture.unprofiled.trusted_ms(STEP) if capture.unprofiled else None
    baselines, scale = baselines_of(study, profiled, unprofiled)
    replayed = [replay.step_ns / NS_PER_MS * scale for replay in baselines]
    shortest, longest = min(replayed), max(replayed)
    busy = step.total_ms - step.idle_ms
    low, high = (unprofiled or unprofiled_ms(ms, busy, profiled) for ms in (shortest, longest))
    why = ""
    if not unprofiled and busy > (1 + _TRUSTED) * longest:
        why = "the steps hold work of the GPU that was launched before them"
    if abs(error) > _TRUSTED:
        differs = f"{rounded_percent(abs(error))} {'longer' if error > 0 else 'shorter'}"
        why = f"a replay of the recorded steps is {differs} than they are"
    happens_once = _start_up(step, study)
    if study.recording_share >= _ONE_TIME_SHARE:
        happens_once = "the program records CUDA graphs, as it does once, and nothing of what it records runs meanwhile"
    if capture.status == "oom" and step.is_pass:
        happens_once = f"the program ran out of memory: {(capture.message or 'an allocation failed').rstrip('.')}"
    why = happens_once or why
    findings: list[Finding] = []
    if not why:
        steps = StepsToExplain(
            step, study, baselines, scale, (low + high) / 2, capture.is_torch, bool(unprofiled), high
        )
        candidates = [candidate for rule in RULES for candidate in rule(steps)]
        for point, rule in load_plugins(FINDINGS):
            with skip_if_it_fails(point):
                of_plugin = [*rule(steps)]
                _ = [_saves(steps, candidate, (), 0.0) for candidate in of_plugin]  # its changes fail here, if they do
                candidates += of_plugin
        candidates = list(map(serving.of_serving, candidates)) if step.kind else candidates
        if not steps.is_torch:
            candidates = [replace(candidate, remedy=()) for candidate in candidates]
        findings = list(_ranked(steps, candidates))
    explained = {"unrecorded", "profiler", *(finding.place.name for finding in findings if finding.place)}
    # The findings of the whole run say what the collectives of a process wait for.
    if any(len(member.collectives) and member.world_size != 1 for member in capture.members):
        explained.add("communication")
    unsure = _find_idle_gpu(step, profiled if why else (low + high) / 2, explained)
    if unsure and not happens_once and not (why and unsure.place == _UNEXPLAINED):
        place = sum(finding.saves_ms >= unsure.saves_ms for finding in findings)
        left_ms = findings[place - 1].left_after_all_ms if place else unsure.step_ms
        lines = study.lines.get(unsure.place.name, ()) if unsure.place else ()
        findings.insert(place, replace(unsure, left_after_all_ms=left_ms, lines=lines))
    hides = profiled - longest > _HIDES * profiled
    overhead = (profiled - longest, profiled - shortest) if hides else None
    if capture.run and capture.run.waits:  # the lines of which PyTorch warns in a step, those that wait most often
        most = sorted(capture.run.waits.items(), key=lambda pair: -pair[1])[:_WAITING]
        sentence = phrase(
            f"PyTorch names what waits in a step: {', '.join(['`{}` {:,}×'] * len(most))}.", *sum(most, ())
        )
        for place, finding in enumerate(findings):
            if finding.id == "host_sync":
                findings[place] = replace(finding, evidence=(*finding.evidence, sentence))
    return Diagnosis(low, high, profiled, busy, error, bool(unprofiled), overhead, tuple(findings), why)


def _start_up(step: StepSummary, study: Study) -> str:
    """Says which calls start the program up, if these take much of the only pass; else returns an empty text."""
    call_ns, total_ms = study.replay.after - study.replay.pause, float(study.replay.after.sum()) / NS_PER_MS
    slow = (call_ns >= _START_UP_NS) & (study.replay.awaited < 0) & ~np.isin(study.call, (COPY, SYNCHRONIZE))
    ms = float(call_ns[slow].sum()) / NS_PER_MS
    if step.instances > 1 or ms < _ONE_TIME_SHARE * total_ms or not ms:
        return ""
    longest = np.argsort(np.where(slow, -call_ns, 0))[: slow.sum()]
    calls = listed(
        [f"{study.apis[study.api[at]].partition('_v')[0]} {rounded(call_ns[at] / NS_PER_MS)} ms" for at in longest]
    )
    share = f"whose start-up calls take {rounded(ms)} of {rounded(total_ms)} ms, as they do once ({calls})"
    return f"this is a cold start, {share}. Record steps after the warm-up"


def baselines_of(study: Study, length_ms: float, timed_ms: float | None) -> tuple[tuple[Replay, ...], float]:
    """Returns the steps as they may be without the profiler, and the length of a step ÷ that of the replayed ones.

    ``length_ms`` is a step's length, and ``timed_ms`` that without the profiler, where it was timed.
    """
    # Without the least and without the most that the profiler may have cost.
    most = study.replay.with_events_costing(1.0)
    baselines = (
        study.replay.with_events_costing(study.low_share),
        most,
        most.at_pace(_CPU, study.unrecorded_ns).with_graph_launches(_GRAPH_NS, _NODE_NS),
    )
    if timed_ms:
        step_ns = timed_ms * NS_PER_MS
        # A step that the GPU fills takes as long whatever launching costs: its length does not tell that cost.
        near = [replay for replay in baselines if abs(replay.step_ns / step_ns - 1) <= _SAME]
        return tuple(_lasting(replay, step_ns) for replay in near or _fitted(study, most, step_ns)), 1.0
    # What a replay says of the steps that it looks at holds for the length of a step.
    return baselines, length_ms / (study.replay.step_ns / NS_PER_MS) if study.replay.step_ns else 1.0


def unprofiled_ms(replayed_ms: float, busy_ms: float, profiled_ms: float) -> float:
    """Returns a step without the profiler: no program is slower without it, and none is done before the GPU is."""
    return min(max(replayed_ms, busy_ms), profiled_ms)


def _fitted(study: Study, most: Replay, step_ns: float) -> list[Replay]:
    """Returns the steps with so much of the profiler's cost taken off that they take their unprofiled time.

    Where it is more than the most that recording costs, the CPU may as well have been faster: they are returned, too.
    """
    cost = _halved(0.0, _MOST, lambda cost: study.replay.with_events_costing(cost).step_ns > step_ns)
    fitted = [study.replay.with_events_costing(cost)]
    if cost > 1:
        at_pace = partial(most.at_pace, unrecorded_ns=study.unrecorded_ns)
        fitted.append(at_pace(_halved(1.0, 0.0, lambda pace: at_pace(pace).step_ns > step_ns)))
    return fitted


def _halved(low: float, high: float, is_low: Callable[[float], bool]) -> float:
    """Returns the end of an interval that is left when it was halved, at the side that is not low."""
    for _ in range(_ROUNDS):
        middle = (low + high) / 2
        low, high = (middle, high) if is_low(middle) else (low, middle)
    return high


def _lasting(replay: Replay, step_ns: float) -> Replay:
    """Returns steps of a length, with all of their times scaled: the machine's pace was another one."""
    pace = step_ns / replay.step_ns if replay.step_ns else 1.0
    return replace(replay, **{name: getattr(replay, name) * pace for name in _TIMES})


def _ranked(steps: StepsToExplain, candidates: Sequence[Candidate]) -> Iterator[Finding]:
    """Yields the findings worth a change, the largest saving first, each with what is left after all up to it.

    The saving of a candidate that others explain is what it saves after these, and no more than the idle time that
    they leave.
    """
    explaining = [candidate for candidate in candidates if candidate.explains]
    ranked, explained_ms = [], 0.0
    for candidate in sorted(candidates, key=lambda candidate: candidate.explained):
        saves = _saves(steps, candidate, *((explaining, explained_ms) if candidate.explained else ((), 0.0)))
        if saves[1] >= SMALLEST_SAVING * steps.step_ms:
            ranked.append((candidate, saves))
            explained_ms += saves[2] if candidate.explains else 0.0
    ranked.sort(key=lambda pair: -pair[1][1])
    left = list(steps.baselines)
    for candidate, (low, middle, high) in ranked:
        # The first change saves least; beside others a change may cost, and is not made then.
        left = [min(candidate.changes[0](replay), replay, key=lambda replay: replay.step_ns) for replay in left]
        left_ms = [replay.step_ns / NS_PER_MS * steps.scale for replay in left]
        words = steps.summary.in_words
        yield Finding(
            candidate.id,
            candidate.title,
            low,
            high,
            steps.step_ms,
            (min(left_ms) + max(left_ms)) / 2,
            tuple(map(words, candidate.evidence)),
            words(candidate.derivation),
            candidate.remedy,
            words(candidate.disproof),
            candidate.place,
            candidate.lines(steps.study),
            middle,
        )


def _saves(
    steps: StepsToExplain, candidate: Candidate, before: Sequence[Candidate], gone_ms: float
) -> tuple[float, float, float]:
    """Returns the least, the middle and the most that a candidate's changes save of a step on any baseline, ms.

    They save no more than the candidate's cause takes.

    ``before``: the candidates whose most saving changes are made first, and ``gone_ms`` the most that these save.
    """
    saved_ms: list[float] = []
    for baseline in steps.baselines:
        for explaining in before:
            baseline = min(explaining.changes[-1](baseline), baseline, key=lambda replay: replay.step_ns)
        ns = [baseline.step_ns - change(baseline).step_ns for change in candidate.changes]
        saved_ms += [max(saved_ns, 0.0) / NS_PER_MS * steps.scale for saved_ns in ns]
        if max(saved_ms) < _NEGLIGIBLE * steps.step_ms:
            return 0.0, 0.0, 0.0  # other baselines differ by less
    low, high = interval_of(saved_ms, of_cpu=candidate.of_cpu, timed=steps.is_timed)
    most = max(_most_saved_ms(steps, candidate, gone_ms), 0.0)
    # If the cause takes less than the replay saves at least, the interval keeps the ratio of its ends.
    return low if low <= most else most * low / high, min((low + high) / 2, most), min(high, most)


def _most_saved_ms(steps: StepsToExplain, candidate: Candidate, gone_ms: float) -> float:
    """Returns what the cause of a candidate takes of a step, ms, but no more than the step less the work that stays.

    ``gone_ms``: what the changes before this one save of the step.
    """
    study, step, replay = steps.study, steps.summary, steps.study.replay
    changed = candidate.changes[-1](replay)
    work_ms = study.ms(changed.work < replay.work if candidate.pieces is None else candidate.pieces)
    # Waits that end sooner save the program's own time. As a rule it waits for the work that the candidate is about.
    waits_ms = steps.paused_ms(steps.waited_ns[(replay.awaited >= 0) & (changed.awaited < 0)])
    name = candidate.place.name if candidate.place and candidate.of_cpu else ""
    launches = candidate.pieces is not None and (changed.after < replay.after).any()
    causes = {"launch"} if launches else {name, *_CAUSES_BEHIND.get(name, ())}
    idle_ms = sum(row.ms for row in step.idle_by_cause if row.cause in causes) if step.idle_by_cause else step.idle_ms
    busy_ms = step.total_ms - step.idle_ms
    stays_ms = min(busy_ms, steps.step_ms) * max(1 - work_ms / busy_ms, 0.0) if busy_ms else 0.0
    # A step that was timed without the profiler may be longer than the profiled one, and so may each of its parts.
    pace = max(steps.step_ms / step.length_ms, 1.0) if step.length_ms else 1.0
    left_ms = max(steps.longest_step_ms, steps.step_ms) - stays_ms - gone_ms
    return min((max(work_ms, waits_ms) + idle_ms) * pace, left_ms, steps.step_ms)


def interval_of(saved_ms: Sequence[float], *, of_cpu: bool, timed: bool) -> tuple[float, float]:
    """Returns the least and the most that changes save in another run, by what they save in replays of this one.

    Args:
        saved_ms: what they save, of each assumption; below zero where a step becomes longer.
        of_cpu: whether they change the CPU's own time, which differs by more from run to run.
        timed: whether the step was timed without the profiler.
    """
    low, high = min(saved_ms), max(saved_ms)
    low, high = low - _RUNS * abs(low), high + _RUNS * abs(high)
    if of_cpu:
        middle = (low + high) / 2
        width = (_TIMED_CPU_RUNS if timed else _CPU_RUNS) * abs(middle)
        low, high = min(low, middle - width), max(high, middle + width)
    return low, high


def _find_idle_gpu(step: StepSummary, step_ms: float, explained: set[str]) -> Finding | None:
    """Finds the largest part of a step in which the GPU does not compute; None if it is small, or explained already.

    Args:
        step: the steps.
        step_ms: what one takes without the profiler.
        explained: the idle causes and kernel classes that other findings are about.
    """
    if not step_ms or step.compute_ms >= _BUSY * step_ms:
        return None
    causes: dict[Cause, float] = {}
    for row in step.idle_by_cause:
        causes[row.cause] = causes.get(row.cause, 0.0) + row.ms
    # Without the profiler the GPU idles for less; copies and collectives take as long.
    idle_ms = max(step_ms - (step.total_ms - step.idle_ms), 0.0)
    scale = idle_ms / step.idle_ms if step.idle_ms else 0.0
    parts: list[tuple[float, Cause, str]]
    parts = [(ms * scale, cause, f"The GPU is idle: {_TITLES[cause]}") for cause, ms in causes.items()]
    parts.append((step.exposed_copy_ms, "copy", "Copies that nothing hides take most of the step"))
    parts.append((step.exposed_communication_ms, "communication", "Collectives take most of the step"))
    ms, cause, title = max(parts)
    if cause in explained or not ms:
        return None
    by_place = defaultdict[str, float](float)
    for row in step.idle_by_cause:
        by_place[f"the range {row.range}" if row.range else row.api or ""] += row.ms * (row.cause == cause)
    where, place_ms = max(by_place.items(), key=lambda pair: pair[1], default=("", 0.0))
    place = f", most of it in {where}" if where and place_ms >= waits.MOSTLY * causes.get(cause, 0.0) else ""
    ms, of = min(ms, step_ms), "the capture" if step.is_pass else "a step"
    share = rounded_percent(step.compute_ms / step_ms)
    return Finding(
        "gpu_idle",
        str(step.in_words(title)),
        0.0,
        ms,
        step_ms,
        step_ms,
        (f"The GPU computes for {share} of {of}; {rounded(ms)} ms of the rest are this{place}.",),
        "No change that is looked for removes this time: between nothing and all of it may be saved.",
        _REMEDIES.get(where, _REMEDIES.get(cause, _LOOK)),
        step.in_words(_DISPROOF),
        Place("idle", cause),
    )


def why_missing(capture: CaptureSummary) -> StrOrText | None:
    """Says why some findings, or all of them, cannot be had; None where all were looked for."""
    step, by_torch = capture.step, capture.metadata is not None and capture.metadata.profiler == "torch"
    how = _BY_TORCH if by_torch else _BY_NSYS
    if capture.on_cpu:
        return "The program ran on the CPU, for which no findings are looked for."
    if capture.metadata is None:
        return capture.message or "There is no capture of this run."
    if capture.has_no_kernel:
        if capture.coverage and (lost := capture.coverage.lost_launches):
            launches = f"{lost:,} kernel {plural(lost, 'launch')}"
            why = "the GPU's records were dropped or cut off. Record again, with a warm-up before the recorded steps"
            return f"{launches} and no kernel were recorded: {why}."
        return phrase("No kernel was recorded. {} around steps that run on the GPU.", how)
    if step is None or not works(step):
        return "Nothing runs on the GPU in the steps."
    if step.launch_latency_us is None:
        return phrase(
            "This trace has no API calls: without them no waits and launches are known, and nothing can be replayed. "
            "So all findings are missing: on launches, waits, copies, memory and data loading, and on matmuls, "
            "attention, elementwise kernels and the optimizer. {}.",
            how,
        )
    if capture.diagnosis is None:
        return "Findings need the API calls of whole steps, and this capture holds too few of them."
    if capture.diagnosis.doubt:
        return f"No saving can be told here: {capture.diagnosis.doubt}."
    hidden = sum(row.ms for row in step.classes if row.kernel_class == UNKNOWN)
    if not (capture.whole and capture.whole.opaque) or hidden < _IN_GRAPHS * step.compute_ms:
        return None
    return phrase(
        "{} of the GPU's compute time is inside CUDA graphs whose kernels were not recorded: findings about matmuls, "
        "attention, elementwise kernels and the optimizer cannot be had. Capture with `--cuda-graph-trace=node`.",
        rounded_percent(hidden / step.compute_ms),
    )


def works(step: StepSummary) -> bool:
    """Tells whether anything runs on a GPU in the steps."""
    return any(device.total_ms > device.idle_ms for device in step.devices)
