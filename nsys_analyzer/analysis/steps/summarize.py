"""From an attributed trace to the summary of a process's steps."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import replace
from statistics import median
from typing import TypeVar

import numpy as np

from nsys_analyzer.analysis.attribution.processes import is_on_cpu
from nsys_analyzer.analysis.intervals import NONE, Cover, find_overlaps
from nsys_analyzer.analysis.kernels.class_rules import COMMUNICATION
from nsys_analyzer.analysis.ranges.instances import AttributedTrace
from nsys_analyzer.analysis.statistics import Moments, Stats, sample_ms
from nsys_analyzer.analysis.steps.anatomy import ACTIVITIES, COMPUTE, dissect, shares_of
from nsys_analyzer.analysis.steps.lines import Line, Voters
from nsys_analyzer.analysis.steps.process import AT_ONCE, CAUSES, OUTSIDE, ProcessWork, is_loading
from nsys_analyzer.analysis.steps.step import (
    INPUT,
    PROGRAM,
    CauseTime,
    ClassTime,
    DeviceSteps,
    DissectedSteps,
    IdleTime,
    KernelTime,
    LaunchLatency,
    OnPath,
    PhaseParts,
    Queue,
    StepSummary,
    narrowed,
)
from nsys_analyzer.analysis.steps.study import Study, study_groups
from nsys_analyzer.analysis.steps.windows import Steps, Windows, near_median
from nsys_analyzer.trace.arrays import SmallInts, distinct, distinct_rows
from nsys_analyzer.trace.columns import process_of
from nsys_analyzer.trace.phase_names import OTHER_STEP, STEP, map_by_shape
from nsys_analyzer.trace.schema import NS_PER_MS, NS_PER_US

#: Operations of a process that are dissected in all, about.
_MOST_OPERATIONS = 300_000
#: Only this many rows of idle time are given one by one, because each request may be a range; and the code that stands
#: for the ranges of all other rows.
_MOST_IDLE_ROWS, _OTHER_RANGES = 1_000, NONE - 1
#: So many steps before the middle one, and from it on, tell how far the program runs ahead.
_LOOKED_AT = 8
_Timed = TypeVar("_Timed", ClassTime, CauseTime, KernelTime, IdleTime, OnPath)


def summarize_steps(attributed: AttributedTrace, process: int, steps: Steps) -> tuple[StepSummary, Study | None]:
    """Summarizes the steps of a process by its global ID, and some of them in detail; None where no launch is known."""
    measured = steps.windows
    work = ProcessWork(attributed, process, measured)
    # Of a long capture blocks of steps, evenly spread, tell as much in a part of the time.
    windows, operations = measured, sum(map(len, work.devices.values()))
    fewer, block = -(-operations // _MOST_OPERATIONS), max(1, AT_ONCE * len(measured) // max(operations, 1))
    if fewer > 1 and len(measured) >= 2 * fewer * block:
        windows = measured.select(np.flatnonzero(np.arange(len(measured)) // block % fewer == 0))
    sampled = {device: Voters(work, windows, device) for device in work.devices if process in attributed.trace.stacks}
    dissected = [dissect_device(work, windows, device, steps.length_ms, sampled.get(device)) for device in work.devices]
    main = max(dissected, key=lambda device: device.compute_ms)
    on_cpu, voters = is_on_cpu(attributed.trace, process), sampled.get(main.device)
    if on_cpu:
        main = _by_ranges(work, windows, main, voters)
        dissected = [main]
    chosen = work.devices[main.device]
    looked_at = f" (of {len(measured):,}, {len(windows):,} are looked at)" if len(windows) < len(measured) else ""
    latency, queue = (None, None) if on_cpu else _launching(work, measured, chosen)
    marks = [steps.marks[place] for place in steps.number.tolist() if steps.marks]
    summary = StepSummary(
        **vars(main),
        instances=len(measured),
        source=windows.source,
        unit=f"{windows.unit}{looked_at}",
        kind=marks[0].kind if marks else "",
        batch=median(batches) if (batches := [mark.batch for mark in marks if mark.batch is not None]) else None,
        on_gpu_timeline=windows.on_gpu,
        length_ms=steps.length_ms,
        wall_ms=Stats.of_ns(measured.end - measured.start),
        wall_values_ms=sample_ms(measured.end - measured.start),
        groups=steps.groups,
        devices=tuple(narrowed(device, DeviceSteps) for device in dissected),
        launch_latency_us=latency,
        queue=queue,
        lines=voters.of_step(steps.length_ms) if voters else (),
    )
    if on_cpu:
        return summary, None
    study = study_groups(work, steps, main.device)
    if study:
        summary = replace(summary, critical_path=tuple(_critical_path(work, study, summary)))
    if study and voters:
        lines: dict[str, tuple[Line, ...]] = {
            one: voters.of_idle(CAUSES.index(one), None if one == "copy" else summary.idle_of(one)) for one in CAUSES
        }
        study = replace(study, lines=lines, votes=voters.of_calls(study.started))
    return summary, study


def _critical_path(work: ProcessWork, study: Study, step: StepSummary) -> Iterator[OnPath]:
    """Yields the parts of the critical path, the longest of each side first; they add up to the step.

    The GPU's parts are its work that is on the path in the studied steps. While the GPU is idle, the path is the work
    of another GPU if that is on it, else the cause of the idle time. While the GPU does other work, the path is with
    the program.
    """
    # Of several steps the first is left out, as of a replay: it begins with an idle GPU.
    windows = study.windows.select(np.arange(study.steps) >= int(study.steps > 2))
    busy_ns = sum(int(anatomy.parts[:-1].sum()) for _, anatomy in work.dissect(windows, step.device))
    operations = work.attributed.trace.operations
    critical = study.critical[np.argsort(operations.start[study.critical], kind="stable")]
    is_own = operations.device[critical] == step.device
    fragments = dissect(windows, operations, critical[is_own], work.rank).fragments
    names = (*work.classes, "copies", COMMUNICATION)  # in the order of ranks
    label = np.where(work.rank == COMPUTE, work.label, work.label.dtype.type(len(work.classes) - 1) + work.rank)
    scale = (step.total_ms - step.idle_ms) / max(busy_ns, 1)
    by_name = np.bincount(label[fragments.operation], fragments.share, len(names)) * scale
    works = [OnPath("GPU", name, ms) for name, ms in zip(names, by_name.tolist(), strict=True)]
    yield from _longest(works)
    idle, others = work.find_idle(windows, step.device), critical[~is_own]
    index, stretch, start, end = find_overlaps(idle.start, idle.end, operations.start[others], operations.end[others])
    order = np.argsort(start, kind="stable")
    elsewhere, cause = others[index[order]], idle.cause[stretch[order]]
    ms_of_cause = {row.cause: row.ms for row in step.causes}
    idle_ms = np.array([ms_of_cause.get(name, 0.0) for name in CAUSES])
    per_ns = idle_ms / np.maximum(np.bincount(idle.cause, idle.end - idle.start, len(CAUSES)), 1)
    elsewhere_ms = shares_of(start[order], end[order], work.rank[elsewhere]) * per_ns[cause]
    for device in distinct(np.sort(operations.device[elsewhere])).tolist():
        on_device = operations.device[elsewhere] == device
        ms_of_name = np.bincount(label[elsewhere[on_device]], elsewhere_ms[on_device], len(names))
        yield from _longest(OnPath("GPU", *row, device) for row in zip(names, ms_of_name.tolist(), strict=True))
    left_ms = (idle_ms - np.bincount(cause, elsewhere_ms, len(CAUSES))).round(9)
    yield from _longest(OnPath("idle", *row) for row in zip(CAUSES, left_ms.tolist(), strict=True))
    program_ms = round(step.total_ms - step.idle_ms - sum(one.ms for one in works), 6)
    yield from _longest([OnPath("CPU", PROGRAM, max(program_ms, 0.0))])


def dissect_device(
    work: ProcessWork, windows: Windows, device: int, length_ms: float, voters: Voters | None = None
) -> DissectedSteps:
    """Dissects the steps on one device. The parts are means of the steps near the median, and add up to its length."""
    kernels, starts = work.attributed.kernels, work.attributed.trace.operations.start
    continues = work.attributed.trace.operations.continues
    # Behind all kernels stands, without a name, what of each class is none: fills, and opaque graphs.
    names = [*zip(kernels.names, kernels.classes, strict=True), *(("", name) for name in work.classes)]
    parts, by_cause = Moments(len(ACTIVITIES) + 1), Moments(len(CAUSES))
    by_class, by_kernel, launches = Moments(len(work.classes)), Moments(len(names)), np.zeros(len(names), np.int64)
    by_phase = np.zeros((len(ACTIVITIES) + 1, len(work.phases)))
    shortest, longest = near_median(windows.length)
    busy, own_pauses_ns = [], 0
    idle_ns, idle_gaps = Counter[tuple[int, int, int]](), Counter[tuple[int, int, int]]()
    for part, anatomy in work.dissect(windows, device):
        fragments, gaps, idle = anatomy.fragments, anatomy.gaps, work.find_causes(anatomy.gaps)
        near = (part.length >= shortest) & (part.length <= longest)
        place, step = np.indices(anatomy.parts.shape)
        parts.add(step.ravel(), place.ravel(), anatomy.parts.ravel(), near)
        busy.append(part.end - part.start - anatomy.parts[-1])
        for rank in ACTIVITIES:
            mine = (fragments.rank == rank) & near[fragments.window]
            phase = work.phase[fragments.operation[mine]]
            by_phase[rank] += np.bincount(phase, fragments.share[mine], len(work.phases))
        of_gaps = (gaps.end - gaps.start) * near[gaps.window]
        by_phase[-1] += np.bincount(work.phase[gaps.next], of_gaps, len(work.phases))
        computes = fragments.rank == COMPUTE
        operation, share, window = (one[computes] for one in (fragments.operation, fragments.share, fragments.window))
        label, code = work.label[operation], kernels.code[operation]
        kernel = np.where(code == NONE, len(kernels.names) + label, code)
        by_class.add(window, label, share, near)
        by_kernel.add(window, kernel, share, near)
        begun = (fragments.start[computes] == starts[operation]) & near[window] & (continues[operation] == 0)
        launches += np.bincount(kernel[begun], minlength=len(names))
        by_cause.add(idle.window, idle.cause, idle.end - idle.start, near)
        idle = idle.select(near[idle.window])
        length = idle.end - idle.start
        own_pauses_ns += int(length[idle.own].sum())
        first, group = distinct_rows(idle.cause, idle.range, idle.api)
        rows = zip(*(column[first].tolist() for column in (idle.cause, idle.range, idle.api)), strict=True)
        sums = (np.bincount(group, weights, len(first)).tolist() for weights in (length, idle.begins))
        for key, ns, count in zip(rows, *sums, strict=True):
            idle_ns[key] += int(ns)
            idle_gaps[key] += int(count)
    # The mean of the steps near the median is not quite the median. So waits are scaled to what the work leaves of it.
    in_ms = 1 / (parts.near * NS_PER_MS)
    works_ms, waits_ms = float(parts.typical[:2].sum()) * in_ms, float(parts.typical[2:].sum()) * in_ms
    works, waits = 1.0, (length_ms - works_ms) / waits_ms if waits_ms else 1.0
    if length_ms < works_ms or not waits_ms:
        works = waits = length_ms / (works_ms + waits_ms) if works_ms + waits_ms else 1.0
    (compute, _), (copy, copy_std), *_ = parts.of(works)
    *_, (communication, communication_std), (idle_ms, _) = parts.of(waits)
    scales = np.array([[works], [works], [waits], [waits]]) * in_ms
    of_phases = zip(*(by_phase * scales).tolist(), work.phases, strict=True)
    of_kernels = zip(names, launches.tolist(), by_kernel.of(works), strict=True)
    in_ranges = [key for key in idle_ns if key[1] != NONE]
    for key in sorted(in_ranges, key=lambda key: -idle_ns[key])[_MOST_IDLE_ROWS:]:
        idle_ns[key[0], _OTHER_RANGES, NONE] += idle_ns.pop(key)
        idle_gaps[key[0], _OTHER_RANGES, NONE] += idle_gaps.pop(key)
    ranges, apis = (*work.attributed.trace.ranges.names, "other ranges", ""), work.calls.names
    return DissectedSteps(
        compute_ms=compute,
        exposed_copy_ms=copy,
        exposed_communication_ms=communication,
        idle_ms=idle_ms,
        device=device,
        classes=_longest(ClassTime(name, *ms) for name, ms in zip(work.classes, by_class.of(works), strict=True)),
        phases=tuple(PhaseParts(*row) for row in of_phases if any(row[:-1])),
        idle_by_cause=_longest(
            IdleTime(
                CAUSES[cause],
                ranges[range_] or None,
                apis[api].partition("_v")[0] if api != NONE else None,  # without the version that CUPTI puts behind it
                ms := ns * in_ms * waits,
                idle_gaps[cause, range_, api] / parts.near,
                voters.of_idle(cause, ms, range_, api) if voters else (),
            )
            for (cause, range_, api), ns in idle_ns.items()
        ),
        kernels=_longest(KernelTime(*name, count / parts.near, *ms) for name, count, ms in of_kernels),
        causes=_longest(CauseTime(cause, *ms) for cause, ms in zip(CAUSES, by_cause.of(waits), strict=True)),
        busy_values_ms=sample_ms(np.concatenate(busy)),
        exposed_copy_std_ms=copy_std,
        exposed_communication_std_ms=communication_std,
        own_pauses_ms=own_pauses_ns * in_ms * waits,
    )


def _longest(rows: Iterable[_Timed]) -> tuple[_Timed, ...]:
    """Returns the rows that take time, the longest first."""
    return tuple(sorted((row for row in rows if row.ms), key=lambda row: -row.ms))


def _launching(work: ProcessWork, measured: Windows, chosen: SmallInts) -> tuple[LaunchLatency | None, Queue | None]:
    """Tells how long operations wait behind their launches, and how many of them are launched and not done.

    Those that are launched in some steps of the middle of the capture tell it.
    """
    middle = len(measured) // 2
    low, high = max(0, middle - _LOOKED_AT), min(len(measured), middle + _LOOKED_AT) - 1
    time = work.launched[chosen]
    mine = chosen[(time >= measured.called[low]) & (time < measured.left[high])]
    if not len(mine):
        return None, None
    # The nodes of a graph are one launch, which starts with the first and ends with the last of them.
    starts, ends = (getattr(work.attributed.trace.operations, name)[mine] for name in ("start", "end"))
    order = np.lexsort((starts, launch := work.attributed.attribution.launch[mine]))
    first = np.flatnonzero(np.diff(launch[order], prepend=NONE - 1))
    latency = (np.percentile(work.attributed.measure_launch_waits(mine[order[first]]), [50, 90]) / NS_PER_US).tolist()
    launched, ended = np.sort(work.launched[mine[order[first]]]), np.sort(np.maximum.reduceat(ends[order], first))
    waiting = np.maximum(np.arange(len(first)) - np.searchsorted(ended, launched, side="right"), 0)
    return LaunchLatency(*latency), Queue(float(np.median(waiting)), int(waiting.max()))


def _by_ranges(work: ProcessWork, windows: Windows, device: DissectedSteps, voters: Voters | None) -> DissectedSteps:
    """Tells the steps of a program without a GPU: each phase by its ranges, the loading of batches, and the rest.

    Nothing is launched there: the time in which no operator runs is the program's own.
    """
    instances, ranges = work.attributed.instances, work.attributed.trace.ranges
    loads = np.array([*map_by_shape(ranges.names, is_loading), False])[ranges.name]
    loads &= process_of(ranges.thread) == work.process
    wall = float((windows.end - windows.start).sum())
    computes = {phase.phase: phase.compute_ms for phase in device.phases}
    phases: list[PhaseParts] = []
    left = device.total_ms
    spans = [(INPUT, ranges.start[loads], ranges.end[loads])]
    for code, name in enumerate(instances.phases[: -len((OTHER_STEP, STEP))]):
        chosen = (instances.phase == code) & (instances.process == work.process)
        spans.append((name, instances.start[chosen], instances.end[chosen]))
    for name, start, end in spans:
        order = np.argsort(start, kind="stable")
        ns = Cover.from_intervals(start[order], end[order]).covered_within(windows.start, windows.end).sum()
        ms = min(float(ns) / wall * device.total_ms, left) if wall else 0.0
        compute = min(computes.get(name, 0.0), ms)
        if ms:
            phases.append(PhaseParts(compute, 0.0, 0.0, ms - compute, name))
        left -= ms
    compute = max(device.compute_ms - sum(phase.compute_ms for phase in phases), 0.0)
    phases.append(PhaseParts(compute, 0.0, 0.0, max(left - compute, 0.0), OUTSIDE))
    lines = voters.of_operators(device.idle_ms) if voters else ()
    idle_ms, gaps = device.idle_ms, sum(idle.gaps for idle in device.idle_by_cause)
    return replace(
        device,
        phases=tuple(phases),
        idle_by_cause=_longest([IdleTime("host", None, None, idle_ms, gaps, lines)]),
        causes=_longest([CauseTime("host", idle_ms, None)]),
        own_pauses_ms=0.0,
    )
