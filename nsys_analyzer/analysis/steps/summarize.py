"""Summarizes the steps of a process from its attributed trace."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import replace
from statistics import median
from typing import TypeVar

import numpy as np

from nsys_analyzer.analysis.attribution.processes import runs_on_cpu
from nsys_analyzer.analysis.intervals import NONE, Cover, find_overlaps
from nsys_analyzer.analysis.kernels.class_rules import COMMUNICATION
from nsys_analyzer.analysis.statistics import Stats, StepTimes, sample_ms
from nsys_analyzer.analysis.steps.anatomy import (
    ACTIVITIES,
    COMPUTE,
    Anatomy,
    dissect_steps,
    measure_exposed_ns,
)
from nsys_analyzer.analysis.steps.groups import Steps
from nsys_analyzer.analysis.steps.lines import Line, SampledProgram
from nsys_analyzer.analysis.steps.process import (
    CAUSES,
    OPERATIONS_PER_BLOCK,
    OUTSIDE_PHASES,
    ProcessWork,
    is_loading,
)
from nsys_analyzer.analysis.steps.replay import MIN_STEPS
from nsys_analyzer.analysis.steps.step import (
    INPUT_PHASE,
    PROGRAM_PART,
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
    narrow_to_base,
)
from nsys_analyzer.analysis.steps.study import Study
from nsys_analyzer.analysis.steps.study_steps import study_groups
from nsys_analyzer.analysis.steps.windows import Windows, find_bounds_near_median
from nsys_analyzer.trace.arrays import Ints, SmallInts, distinct, distinct_rows
from nsys_analyzer.trace.columns import process_of
from nsys_analyzer.trace.phase_names import OTHER_STEP, STEP, map_by_shape
from nsys_analyzer.trace.schema import NS_PER_MS, NS_PER_US

#: The approximate maximum number of operations of a process in the steps that are dissected.
_MAX_OPERATIONS = 300_000
#: The maximum number of rows of idle time in ranges. It is limited because each request may have its own range.
_MAX_IDLE_ROWS = 1_000
#: The code of the name "other ranges", for the ranges without one of the ``_MAX_IDLE_ROWS`` rows.
_OTHER_RANGES = NONE - 1
#: The latency and the queue of launches are measured in this number of steps before and after the middle step.
_STEPS_FOR_LAUNCH_LATENCY = 8
_Timed = TypeVar("_Timed", ClassTime, CauseTime, KernelTime, IdleTime, OnPath)


def summarize_steps(work: ProcessWork, steps: Steps) -> tuple[StepSummary, Study | None]:
    """Returns the summary of a process's steps, and a study of some steps (None if no launch is known)."""
    trace, process, all_windows = work.attributed.trace, work.process, steps.windows
    # In a long capture, only evenly spread blocks of steps are dissected, which is sufficient for mean values.
    windows, operations = all_windows, sum(map(len, work.devices.values()))
    block_stride = -(-operations // _MAX_OPERATIONS)
    block_length = max(1, OPERATIONS_PER_BLOCK * len(windows) // max(operations, 1))
    if block_stride > 1 and len(windows) >= 2 * block_stride * block_length:
        windows = windows.select(np.flatnonzero(np.arange(len(windows)) // block_length % block_stride == 0))
    program_of_device = {}
    if process in trace.stacks:
        program_of_device = {device: SampledProgram(work, windows, device) for device in work.devices}
    dissected_devices = [
        dissect_device(work, windows, device, steps.length_ms, program_of_device.get(device)) for device in work.devices
    ]
    main_device = max(dissected_devices, key=lambda device: device.compute_ms)
    on_cpu, program = runs_on_cpu(trace, process), program_of_device.get(main_device.device)
    if on_cpu:
        main_device = _measure_phases_by_ranges(work, windows, main_device, program)
        dissected_devices = [main_device]
    latency, queue = (None, None) if on_cpu else _measure_launches(work, all_windows, work.devices[main_device.device])
    marks = [steps.marks[position] for position in steps.positions.tolist() if steps.marks]
    batches = [mark.batch for mark in marks if mark.batch is not None]
    unit = windows.unit
    if len(windows) < len(all_windows):
        unit += f" ({len(windows):,} of {len(all_windows):,} steps are analyzed)"
    summary = StepSummary(
        **vars(main_device),
        instances=len(all_windows),
        source=windows.source,
        unit=unit,
        kind=marks[0].kind if marks else "",
        batch=median(batches) if batches else None,
        on_gpu_timeline=windows.on_gpu,
        length_ms=steps.length_ms,
        wall_ms=Stats.of_ns(all_windows.length),
        wall_values_ms=sample_ms(all_windows.length),
        groups=steps.groups,
        devices=tuple(narrow_to_base(device, DeviceSteps) for device in dissected_devices),
        launch_latency_us=latency,
        queue=queue,
        lines=program.lines_of_steps(steps.length_ms) if program else (),
    )
    if on_cpu:
        return summary, None
    study = study_groups(work, steps, main_device.device)
    if study:
        summary = replace(summary, critical_path=tuple(_find_critical_path(work, study, summary)))
    if study and program:
        lines: dict[str, tuple[Line, ...]] = {}
        for code, cause in enumerate(CAUSES):
            lines[cause] = program.lines_of_cause(code, None if cause == "copy" else summary.idle_of(cause))
        study = replace(
            study,
            lines=lines,
            call_samples=program.samples_of_calls(study.calls.start),
            cpu_samples=program.samples_between(*study.cpu_spans),
        )
    return summary, study


def _find_critical_path(work: ProcessWork, study: Study, step: StepSummary) -> Iterator[OnPath]:
    """Yields the parts of the critical path. They add up to the length of the step.

    While critical work runs on the main GPU, which is the GPU that computes most, this work is on the path. While the
    main GPU is idle, critical work of another GPU is on the path, or the cause of the idle time if there is no such
    work. While the main GPU does work that is not critical, the program is on the path.
    """
    # The first of several steps is left out, as in a replay, because it begins with an idle GPU.
    windows = study.windows.select(np.arange(study.steps) >= int(study.steps >= MIN_STEPS))
    idle_stretches = work.find_idle_stretches(windows, step.device)
    busy_ns = int(windows.length.sum() - (idle_stretches.end - idle_stretches.start).sum())
    operations = work.attributed.trace.operations
    critical = study.critical_operations
    critical = critical[np.argsort(operations.start[critical], kind="stable")]
    on_main_device = operations.device[critical] == step.device
    fragments = dissect_steps(windows, operations, critical[on_main_device], work.activity).fragments
    part_names = (*work.classes, "copies", COMMUNICATION)  # in the order of activities
    last_class = work.class_code.dtype.type(len(work.classes) - 1)
    name_code = np.where(work.activity == COMPUTE, work.class_code, last_class + work.activity)
    scale = (step.total_ms - step.idle_ms) / max(busy_ns, 1)
    exposed_ns_by_name = np.bincount(name_code[fragments.operation], fragments.exposed_ns, len(part_names)) * scale
    parts_on_gpu = [OnPath("GPU", name, ms) for name, ms in zip(part_names, exposed_ns_by_name.tolist(), strict=True)]
    yield from _sort_by_time(parts_on_gpu)
    # While the main GPU is idle, critical work of another GPU replaces the cause of the idle time.
    on_other_devices = critical[~on_main_device]
    starts, ends = operations.start[on_other_devices], operations.end[on_other_devices]
    index, stretch, start, end = find_overlaps(idle_stretches.start, idle_stretches.end, starts, ends)
    order = np.argsort(start, kind="stable")
    operation, cause = on_other_devices[index[order]], idle_stretches.cause[stretch[order]]
    ms_of_cause = {row.cause: row.ms for row in step.causes}
    idle_ms = np.array([ms_of_cause.get(name, 0.0) for name in CAUSES])
    ms_per_ns = idle_ms / np.maximum(
        np.bincount(idle_stretches.cause, idle_stretches.end - idle_stretches.start, len(CAUSES)), 1
    )
    other_devices_ms = measure_exposed_ns(start[order], end[order], work.activity[operation]) * ms_per_ns[cause]
    for device in distinct(np.sort(operations.device[operation])).tolist():
        on_device = operations.device[operation] == device
        ms_of_name = np.bincount(name_code[operation[on_device]], other_devices_ms[on_device], len(part_names))
        yield from _sort_by_time(
            OnPath("GPU", *row, device) for row in zip(part_names, ms_of_name.tolist(), strict=True)
        )
    idle_ms = (idle_ms - np.bincount(cause, other_devices_ms, len(CAUSES))).round(9)
    yield from _sort_by_time(OnPath("idle", *row) for row in zip(CAUSES, idle_ms.tolist(), strict=True))
    program_ms = round(step.total_ms - step.idle_ms - sum(part.ms for part in parts_on_gpu), 6)
    yield from _sort_by_time([OnPath("CPU", PROGRAM_PART, max(program_ms, 0.0))])


def dissect_device(
    work: ProcessWork, windows: Windows, device: int, length_ms: float, program: SampledProgram | None = None
) -> DissectedSteps:
    """Computes the parts of the steps on one device. They are means over the steps of about median length.

    Args:
        work: the operations and the calls of the process.
        windows: the steps.
        device: the number of the device.
        length_ms: the length of a step, ms. The parts are scaled so that they add up to it.
        program: the sampled stacks of the program; None if stacks were not sampled.
    """
    device_sums = _DeviceSums(work, *find_bounds_near_median(windows.length))
    for steps, anatomy in work.dissect_blocks(windows, device):
        device_sums.add(steps, anatomy)
    # The mean length of the steps near the median differs a little from the median length. So communication and idle
    # time are scaled to the time that compute and copies leave.
    parts, ms_per_ns = device_sums.parts, 1 / (device_sums.parts.near * NS_PER_MS)
    work_ms, wait_ms = float(parts.typical[:2].sum()) * ms_per_ns, float(parts.typical[2:].sum()) * ms_per_ns
    work_scale, wait_scale = 1.0, (length_ms - work_ms) / wait_ms if wait_ms else 1.0
    if length_ms < work_ms or not wait_ms:
        work_scale = wait_scale = length_ms / (work_ms + wait_ms) if work_ms + wait_ms else 1.0
    (compute_ms, _), (copy_ms, copy_std_ms), *_ = parts.mean_and_std_ms(work_scale)
    *_, (communication_ms, communication_std_ms), (idle_ms, _) = parts.mean_and_std_ms(wait_scale)
    scales = np.array([[work_scale], [work_scale], [wait_scale], [wait_scale]]) * ms_per_ns
    phases = zip(*(device_sums.phase_ns * scales).tolist(), work.phases, strict=True)
    classes = zip(work.classes, device_sums.classes.mean_and_std_ms(work_scale), strict=True)
    kernels = zip(
        device_sums.kernel_names,
        device_sums.launches.tolist(),
        device_sums.kernels.mean_and_std_ms(work_scale),
        strict=True,
    )
    causes = zip(CAUSES, device_sums.causes.mean_and_std_ms(wait_scale), strict=True)
    return DissectedSteps(
        compute_ms=compute_ms,
        exposed_copy_ms=copy_ms,
        exposed_communication_ms=communication_ms,
        idle_ms=idle_ms,
        device=device,
        classes=_sort_by_time(ClassTime(name, *ms) for name, ms in classes),
        phases=tuple(PhaseParts(*row) for row in phases if any(row[:-1])),
        idle_by_cause=_sort_by_time(_list_idle_times(work, device_sums, ms_per_ns, wait_scale, program)),
        kernels=_sort_by_time(KernelTime(*name, count / parts.near, *ms) for name, count, ms in kernels),
        causes=_sort_by_time(CauseTime(cause, *ms) for cause, ms in causes),
        busy_values_ms=sample_ms(np.concatenate(device_sums.busy_ns)),
        exposed_copy_std_ms=copy_std_ms,
        exposed_communication_std_ms=communication_std_ms,
        own_pauses_ms=device_sums.device_pauses_ns * ms_per_ns * wait_scale,
    )


class _DeviceSums:
    """Sums of times over the dissected steps of a device. Steps are added in blocks.

    ``launches``, ``phase_ns``, ``device_pauses_ns``, ``idle_ns`` and ``idle_gaps`` are sums over the steps whose length
    is near the median length.

    Attributes:
        parts, classes, kernels, causes: the times by part of the step, kernel class, kernel and cause of idle time.
        kernel_names: the name and the class of each kernel. The last rows have no name: one row for each class, for
            fills and for graphs whose kernels are unknown.
        launches: shape (kernels,), how often each kernel starts.
        phase_ns: shape (parts, phases), the time of each part in each phase, ns.
        busy_ns: for each block, the time in which the GPU works in each step, ns.
        device_pauses_ns: the idle time in pauses of the device itself, ns.
        idle_ns, idle_gaps: the idle time, ns, and the number of gaps, by cause, range and API call.
    """

    def __init__(self, work: ProcessWork, shortest_ns: float, longest_ns: float) -> None:
        self._work, self._near_median = work, (shortest_ns, longest_ns)
        kernels = work.attributed.kernels
        self.kernel_names = [*zip(kernels.names, kernels.classes, strict=True), *(("", name) for name in work.classes)]
        self.parts, self.causes = StepTimes(len(ACTIVITIES) + 1), StepTimes(len(CAUSES))
        self.classes, self.kernels = StepTimes(len(work.classes)), StepTimes(len(self.kernel_names))
        self.launches = np.zeros(len(self.kernel_names), np.int64)
        self.phase_ns = np.zeros((len(ACTIVITIES) + 1, len(work.phases)))
        self.busy_ns: list[Ints] = []
        self.device_pauses_ns = 0
        self.idle_ns, self.idle_gaps = Counter[tuple[int, int, int]](), Counter[tuple[int, int, int]]()

    def add(self, windows: Windows, anatomy: Anatomy) -> None:
        """Adds a block of steps."""
        shortest_ns, longest_ns = self._near_median
        is_near_median = (windows.length >= shortest_ns) & (windows.length <= longest_ns)
        part, step = np.indices(anatomy.parts.shape)
        self.parts.add(step.ravel(), part.ravel(), anatomy.parts.ravel(), is_near_median)
        self.busy_ns.append(windows.length - anatomy.parts[-1])
        # Add the work and the gaps of each phase. A gap belongs to the phase of the operation after the gap.
        fragments, gaps, phase = anatomy.fragments, anatomy.gaps, self._work.phase
        for activity in ACTIVITIES:
            counts = (fragments.activity == activity) & is_near_median[fragments.step]
            phase_of_fragment = phase[fragments.operation[counts]]
            self.phase_ns[activity] += np.bincount(
                phase_of_fragment, fragments.exposed_ns[counts], len(self._work.phases)
            )
        gap_ns = (gaps.end - gaps.start) * is_near_median[gaps.step]
        self.phase_ns[-1] += np.bincount(phase[gaps.next_operation], gap_ns, len(self._work.phases))
        # Add the compute time and the launches of each kernel, and the compute time of each class.
        operations, kernels = self._work.attributed.trace.operations, self._work.attributed.kernels
        computes = fragments.activity == COMPUTE
        columns = (fragments.operation, fragments.exposed_ns, fragments.step)
        operation, exposed_ns, step = (column[computes] for column in columns)
        class_code, kernel_code = self._work.class_code[operation], kernels.code[operation]
        kernel = np.where(kernel_code == NONE, len(kernels.names) + class_code, kernel_code)
        self.classes.add(step, class_code, exposed_ns, is_near_median)
        self.kernels.add(step, kernel, exposed_ns, is_near_median)
        starts = (fragments.start[computes] == operations.start[operation]) & is_near_median[step]
        starts &= operations.continues[operation] == 0
        self.launches += np.bincount(kernel[starts], minlength=len(self.launches))
        # Add the idle time by cause, range and API call.
        idle = self._work.find_idle_causes(gaps)
        self.causes.add(idle.step, idle.cause, idle.end - idle.start, is_near_median)
        idle = idle.select(is_near_median[idle.step])
        length = idle.end - idle.start
        self.device_pauses_ns += int(length[idle.is_device_pause].sum())
        first_of_group, group = distinct_rows(idle.cause, idle.range, idle.api)
        keys = zip(*(column[first_of_group].tolist() for column in (idle.cause, idle.range, idle.api)), strict=True)
        sums_by_group = (np.bincount(group, weights, len(first_of_group)).tolist() for weights in (length, idle.begins))
        for key, ns, count in zip(keys, *sums_by_group, strict=True):
            self.idle_ns[key] += int(ns)
            self.idle_gaps[key] += int(count)


def _list_idle_times(
    work: ProcessWork, device_sums: _DeviceSums, ms_per_ns: float, wait_scale: float, program: SampledProgram | None
) -> Iterator[IdleTime]:
    """Yields a row of idle time for each cause, range and API call.

    If more than ``_MAX_IDLE_ROWS`` rows have a range, the shortest of them become one row for each cause.

    Args:
        work: the calls of the process.
        device_sums: the sums over the steps near the median.
        ms_per_ns: the factor from a sum in ns to the mean per step in ms.
        wait_scale: the additional factor for idle time.
        program: the sampled stacks of the program; None if stacks were not sampled.
    """
    keys_with_range = [key for key in device_sums.idle_ns if key[1] != NONE]
    for key in sorted(keys_with_range, key=lambda key: -device_sums.idle_ns[key])[_MAX_IDLE_ROWS:]:
        device_sums.idle_ns[key[0], _OTHER_RANGES, NONE] += device_sums.idle_ns.pop(key)
        device_sums.idle_gaps[key[0], _OTHER_RANGES, NONE] += device_sums.idle_gaps.pop(key)
    ranges, apis = (*work.attributed.trace.ranges.names, "other ranges", ""), work.calls.names
    for (cause, range_, api), ns in device_sums.idle_ns.items():
        ms = ns * ms_per_ns * wait_scale
        yield IdleTime(
            CAUSES[cause],
            ranges[range_] or None,
            apis[api].partition("_v")[0] if api != NONE else None,  # without the version that CUPTI appends
            ms,
            device_sums.idle_gaps[cause, range_, api] / device_sums.parts.near,
            program.lines_of_cause(cause, ms, range_, api) if program else (),
        )


def _sort_by_time(rows: Iterable[_Timed]) -> tuple[_Timed, ...]:
    """Returns the rows whose time is not 0, the longest first."""
    return tuple(sorted((row for row in rows if row.ms), key=lambda row: -row.ms))


def _measure_launches(
    work: ProcessWork, windows: Windows, index: SmallInts
) -> tuple[LaunchLatency | None, Queue | None]:
    """Measures the time from launches to the starts of their operations, and the number of launches in the GPU's queue.

    Only operations that are launched in a few steps in the middle of the capture count.
    """
    middle_step = len(windows) // 2
    first_step = max(0, middle_step - _STEPS_FOR_LAUNCH_LATENCY)
    last_step = min(len(windows), middle_step + _STEPS_FOR_LAUNCH_LATENCY) - 1
    time = work.launched_at[index]
    index = index[(time >= windows.cpu_start[first_step]) & (time < windows.cpu_end[last_step])]
    if not len(index):
        return None, None
    # The nodes of a graph count as one launch, which starts with the first node and ends with the last node.
    starts, ends = (getattr(work.attributed.trace.operations, name)[index] for name in ("start", "end"))
    order = np.lexsort((starts, launch := work.attributed.attribution.launch[index]))
    first_of_launch = np.flatnonzero(np.diff(launch[order], prepend=NONE - 1))
    first_operations = index[order[first_of_launch]]
    waits_us = work.attributed.measure_launch_waits(first_operations) / NS_PER_US
    launched_at = np.sort(work.launched_at[first_operations])
    sorted_ends = np.sort(np.maximum.reduceat(ends[order], first_of_launch))
    queue_length = np.maximum(
        np.arange(len(first_of_launch)) - np.searchsorted(sorted_ends, launched_at, side="right"), 0
    )
    return LaunchLatency(*np.percentile(waits_us, [50, 90]).tolist()), Queue(
        float(np.median(queue_length)), int(queue_length.max())
    )


def _measure_phases_by_ranges(
    work: ProcessWork, windows: Windows, device: DissectedSteps, program: SampledProgram | None
) -> DissectedSteps:
    """Returns the steps of a program without a GPU. The lengths of its phases are those of their ranges.

    The loading of batches counts as a phase. The time in which no operator runs is idle time with the cause "host",
    since the program does not wait for a device.
    """
    instances, ranges = work.attributed.instances, work.attributed.trace.ranges
    is_loading_range = np.array([*map_by_shape(ranges.names, is_loading), False])[ranges.name]
    is_loading_range &= process_of(ranges.thread) == work.process
    ranges_of_phases = [(INPUT_PHASE, ranges.start[is_loading_range], ranges.end[is_loading_range])]
    for code, name in enumerate(instances.phases[: -len((OTHER_STEP, STEP))]):
        is_phase = (instances.phase == code) & (instances.process == work.process)
        ranges_of_phases.append((name, instances.start[is_phase], instances.end[is_phase]))
    wall_ns = float(windows.length.sum())
    compute_of_phase = {phase.phase: phase.compute_ms for phase in device.phases}
    phases: list[PhaseParts] = []
    rest_ms = device.total_ms
    for name, start, end in ranges_of_phases:
        order = np.argsort(start, kind="stable")
        ns = Cover.from_intervals(start[order], end[order]).covered_within(windows.start, windows.end).sum()
        ms = min(float(ns) / wall_ns * device.total_ms, rest_ms) if wall_ns else 0.0
        compute_ms = min(compute_of_phase.get(name, 0.0), ms)
        if ms:
            phases.append(PhaseParts(compute_ms, 0.0, 0.0, ms - compute_ms, name))
        rest_ms -= ms
    compute_ms = max(device.compute_ms - sum(phase.compute_ms for phase in phases), 0.0)
    phases.append(PhaseParts(compute_ms, 0.0, 0.0, max(rest_ms - compute_ms, 0.0), OUTSIDE_PHASES))
    lines = program.lines_between_operators(device.idle_ms) if program else ()
    idle_ms, gaps = device.idle_ms, sum(idle.gaps for idle in device.idle_by_cause)
    return replace(
        device,
        phases=tuple(phases),
        idle_by_cause=_sort_by_time([IdleTime("host", None, None, idle_ms, gaps, lines)]),
        causes=_sort_by_time([CauseTime("host", idle_ms, None)]),
        own_pauses_ms=0.0,
    )
