"""Summarizes each process of a trace: its phases, steps, kernels, modules and attribution."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
from msgspec import structs

from nsys_analyzer.analysis.attribution.attribution import ATTRIBUTION_METHODS, UNATTRIBUTED
from nsys_analyzer.analysis.attribution.processes import Process, find_processes
from nsys_analyzer.analysis.counters.figures import summarize_counters
from nsys_analyzer.analysis.counters.levels import make_levels
from nsys_analyzer.analysis.facts import Fact
from nsys_analyzer.analysis.intervals import NONE, contains_any_time, measure_unions
from nsys_analyzer.analysis.kernels.class_rules import FUSED_ATTENTION, MATMUL
from nsys_analyzer.analysis.operators.matching import find_operator_work, name_operators_of_kernels
from nsys_analyzer.analysis.ranges.instances import AttributedTrace
from nsys_analyzer.analysis.statistics import Stats, sample_ms
from nsys_analyzer.analysis.steps.groups import Steps, find_steps
from nsys_analyzer.analysis.steps.member import record_members
from nsys_analyzer.analysis.steps.process import ProcessWork
from nsys_analyzer.analysis.steps.profiler_cost import RecordedEvents
from nsys_analyzer.analysis.steps.serving import summarize_serving
from nsys_analyzer.analysis.steps.step import PARTS_OUTSIDE_PHASES
from nsys_analyzer.analysis.steps.summarize import summarize_steps
from nsys_analyzer.analysis.steps.tracks import record_tracks
from nsys_analyzer.analysis.summary.kernel_tables import (
    GroupSums,
    find_peak_memory,
    find_precision_shares,
    make_class_rows,
    make_kernel_rows,
    make_memory_rows,
    sum_by_group,
    sum_by_group_and_code,
)
from nsys_analyzer.analysis.summary.modules import summarize_modules, with_tokens
from nsys_analyzer.analysis.summary.summary import CaptureSummary, Coverage, PhaseSummary
from nsys_analyzer.analysis.summary.warnings import find_warnings
from nsys_analyzer.analysis.transformer.attention import summarize_attention
from nsys_analyzer.analysis.transformer.models import FILE_NAME_SOURCES, Configuration
from nsys_analyzer.errors import NsysAnalyzerError
from nsys_analyzer.trace.arrays import Bools, Ints, SmallInts, distinct, mask_by_name
from nsys_analyzer.trace.columns import GRAPH, Operations, process_of
from nsys_analyzer.trace.metadata import Gpu
from nsys_analyzer.trace.phase_names import OTHER_STEP, STEP, PhaseNames, is_framework_name
from nsys_analyzer.trace.schema import NS_PER_MS
from nsys_analyzer.trace.trace import Trace

#: GPU work may seem to end up to this many ns after its range, because the clocks of CPU and GPU differ.
_CLOCK_SKEW_NS = 5_000
#: A phase is synchronized if at most this share of its instances has GPU work that ends after the range.
_LATE_INSTANCES_SHARE = 0.05
#: The maximum number of range names that are listed for a phase. Further names, such as ``step 4``, are only counted.
_MAX_LISTED_RANGES = 3
#: The values of ``windows.source`` for steps that ranges mark.
_RANGE_SOURCES = ("range", "profiler_step")


def summarize(
    trace: Trace, name: str, names: PhaseNames | None = None, configuration: Configuration | None = None,
    *, tracked: int = 0,
) -> tuple[CaptureSummary, ...]:  # fmt: skip
    """Returns a summary of each process that uses a GPU, or of each process with phases if none does.

    The summaries have no findings yet.

    Args:
        trace: the capture.
        name: the name of the capture in tables.
        names: the names of the ranges of phases.
        configuration: the model and its shapes, if they are known.
        tracked: the approximate number of operations to keep for a timeline, 0 for none.
    """
    attributed = AttributedTrace(trace, names)
    processes = find_processes(trace)
    steps = {process.global_pid: find_steps(attributed, process.global_pid) for process in processes}
    start_ups = {
        pid: process_steps.start_up_bounds
        for pid, process_steps in steps.items()
        if process_steps and process_steps.start_up_bounds
    }
    attributed = attributed.with_start_ups_as_warmup(start_ups) if start_ups else attributed
    summaries = []
    for process in processes:
        summarizer = _ProcessSummarizer(attributed, process, steps[process.global_pid])
        summaries.append(summarizer.summarize(name, configuration, tracked))
    return tuple(summaries)


class _ProcessSummarizer:
    """Summarizes the operations and phase instances of one process of an attributed trace."""

    def __init__(self, attributed: AttributedTrace, process: Process, steps: Steps | None) -> None:
        self.attributed, self.process, self.steps = attributed, process, steps
        self.instances, self.kernels = attributed.instances, attributed.kernels
        operations = attributed.trace.operations
        is_in_process = operations.process == process.global_pid
        #: Selects the operations of the process among those of the trace.
        self.in_process: Bools | slice = slice(None) if is_in_process.all() else is_in_process
        self.operations = operations if is_in_process.all() else operations.select(is_in_process)
        self.own_instances = self.instances.process == process.global_pid
        self.recorded = RecordedEvents(attributed.as_recorded, process.global_pid)

    def summarize(self, name: str, configuration: Configuration | None, tracked: int) -> CaptureSummary:
        """Returns the summary of the process. The arguments are those of the function ``summarize``."""
        trace = self.attributed.trace
        phases = self.summarize_phases()
        contradiction = _find_contradiction(configuration, phases)
        if configuration and contradiction:
            configuration = structs.replace(configuration, model=None, model_name=None)
        whole_capture = self.summarize_whole() if len(self.operations) else None
        coverage = self.count_coverage()
        matmuls = (
            [row for row in whole_capture.kernels if row.kernel_class in (MATMUL, FUSED_ATTENTION)]
            if whole_capture
            else []
        )
        gpu = trace.metadata.gpu(self.process.pid, int(self.operations.device[0])) if whole_capture else None
        by_ranges = self.steps is None or self.steps.windows.source in _RANGE_SOURCES
        modules = summarize_modules(self.attributed, self.process.global_pid, by_ranges=by_ranges)
        peak_memory_bytes, memory_events = find_peak_memory(self.attributed, self.process.global_pid)
        status = self.find_status()
        summary = CaptureSummary(
            name=name,
            process=self.process.label or None,
            source=trace.path.name,
            status=status,
            message=self.find_failed_allocation(gpu) if status == "oom" else None,
            pid=self.process.pid,
            rank=self.process.rank,
            device=gpu,
            metadata=trace.metadata,
            configuration=configuration,
            phases=phases,
            whole=whole_capture,
            attention=summarize_attention(self.attributed, self.process.global_pid, configuration, gpu),
            coverage=coverage,
            precisions=find_precision_shares(matmuls),
            peak_memory_bytes=peak_memory_bytes,
            memory_events=memory_events,
            modules=modules,
        )
        if self.steps:
            work = ProcessWork(self.attributed, self.process.global_pid, self.steps.recorded)
            step, study = summarize_steps(work, self.steps)
            if operators := find_operator_work(work, self.steps):
                step = replace(step, kernels=name_operators_of_kernels(step.kernels, work, operators))
                modules = with_tokens(modules, operators.calls) if modules else None
            members = () if summary.on_cpu else record_members(work, self.process, self.steps, name)
            if step.source in _RANGE_SOURCES:
                # The wall time of a step is the time from its start to the start of the next one.
                wall_ms = replace(step.wall_ms, median=step.length_ms)
                clocks = {"wall_ms": wall_ms, "wall_values_ms": step.wall_values_ms, "synchronized": True}
                phases = tuple(structs.replace(phase, **clocks) if phase.phase == STEP else phase for phase in phases)
            step = replace(step, passes=self.count_passes(self.steps))
            serving, tracks = summarize_serving(work, self.steps), None
            if tracked:
                tracks = record_tracks(work, self.steps, tracked)
                tracks = replace(tracks, levels=make_levels(self.attributed, self.process.global_pid, tracks))
            summary = replace(
                summary,
                step=step,
                serving=serving,
                study=study,
                operators=operators,
                members=members,
                phases=phases,
                tracks=tracks,
            )
        windows = self.steps.windows if self.steps else None
        counters = summarize_counters(self.attributed, self.process.global_pid, gpu, windows, summary.operators)
        summary = replace(summary, counters=counters)
        check_attribution(summary)
        warnings = find_warnings(summary, coverage, self.attributed, self.process.global_pid)
        warnings = (*warnings, *([contradiction] if contradiction else []))
        # A step range is shown only if it marks each step, and if the steps are not a mixture of prefill and decode.
        shows_step = summary.step is None or summary.step.source in _RANGE_SOURCES
        shows_step &= summary.serving is None or len(summary.serving.kinds) == 1
        phases = phases if shows_step else tuple(phase for phase in phases if phase.phase != STEP)
        return replace(summary, phases=phases, warnings=warnings)

    def find_status(self) -> str:
        """Returns the status of the process: "oom", "no_kernels", "partial" or "ok"."""
        open_phases = self.attributed.find_open_phases(self.process.global_pid)
        is_incomplete = self.own_instances & self.instances.incomplete
        if self.attributed.ran_out_of_memory(self.process.global_pid):
            return "oom"
        if self.operations.kernels.stop == 0:
            return "no_kernels"
        return "partial" if open_phases or is_incomplete.any() else "ok"

    def find_failed_allocation(self, gpu: Gpu | None) -> Fact:
        """Returns the last allocation that failed: its API call, its innermost range, and the GPU's memory."""
        failed_allocations, ranges = self.attributed.trace.failed_allocations, self.attributed.trace.ranges
        failed_allocations = failed_allocations.select(process_of(failed_allocations.thread) == self.process.global_pid)
        last_failure = int(failed_allocations.start.argmax())
        time, api_call = (
            failed_allocations.start[last_failure],
            failed_allocations.names[failed_allocations.name[last_failure]].partition("_v")[0],
        )
        enclosing_ranges = np.flatnonzero(
            (ranges.thread == failed_allocations.thread[last_failure]) & (ranges.start <= time) & (ranges.end > time)
        )
        innermost_names = ranges.name[enclosing_ranges[np.argsort(ranges.start[enclosing_ranges])]].tolist()[-1:]
        return Fact(
            "allocation_failed",
            api_call=api_call,
            range="".join(ranges.names[code] for code in innermost_names),
            gpu=gpu.name if gpu else "",
            memory_bytes=gpu.memory_bytes if gpu else 0,
        )

    def summarize_phases(self) -> tuple[PhaseSummary, ...]:
        """Summarizes the phases that occur, in the order of a step. The step itself comes last."""
        leaf, step = (instances[self.in_process] for instances in self.attributed.instances_of_operations)
        *leaf_codes, other_step_code, step_code = range(len(self.instances.phases))
        return (*self._summarize_phases(leaf, leaf_codes), *self._summarize_phases(step, [other_step_code, step_code]))

    def _summarize_phases(self, instance: SmallInts, codes: Sequence[int]) -> Iterator[PhaseSummary]:
        """Summarizes those phases with the given codes that occur.

        Args:
            instance: the phase instance of each operation, shape (operations,).
            codes: the codes of the phases.
        """
        clocks = measure_gpu_clocks(self.operations, instance, len(self.instances.range))
        # Operations without an instance have index -1, which selects the added last entry.
        phase = np.append(np.where(self.instances.is_measured, self.instances.phase, NONE), NONE).astype(np.int32)
        sums_by_phase = self._sum_by_group(phase[instance], len(self.instances.phases))
        for code in codes:
            instances_of_phase = np.flatnonzero(self.own_instances & (self.instances.phase == code))
            if len(instances_of_phase):
                yield self._summarize_phase(code, instances_of_phase, clocks, sums_by_phase)

    def _sum_by_group(self, group: SmallInts, groups: int) -> GroupSums:
        """Returns the sums of the process's operations by group and kernel."""
        kernel = self.kernels.code[self.in_process]
        return sum_by_group(self.operations, kernel, group, (len(self.kernels.names), groups))

    def _summarize_phase(
        self, code: int, instances_of_phase: Ints, clocks: GpuClocks, sums_by_phase: GroupSums
    ) -> PhaseSummary:
        """Returns the summary of one phase.

        Args:
            code: the code of the phase.
            instances_of_phase: the indices of its instances.
            clocks: the GPU time of each instance.
            sums_by_phase: the sums of operations by phase.
        """
        measured_instances = instances_of_phase[self.instances.is_measured[instances_of_phase]]
        ranges, instances = self.attributed.trace.ranges, self.instances
        range_names = [
            ranges.names[name] for name in distinct(np.sort(ranges.name[instances.range[instances_of_phase]]))
        ]
        unlisted_count = len(range_names) - _MAX_LISTED_RANGES
        is_inferred = all(name in self.attributed.roles.inferred or is_framework_name(name) for name in range_names)
        kernels = clocks.kernels[measured_instances] if is_inferred else measured_instances[:0]
        is_backward = self.own_instances & (instances.phase == instances.phases.index("backward"))
        first_instance = [
            column[measured_instances[:1]] for column in (instances.process, instances.start, instances.end)
        ]
        wall_ns = (instances.end - instances.start)[measured_instances]
        latest_end = instances.end[measured_instances] + np.maximum(_CLOCK_SKEW_NS, wall_ns // 1000)
        has_work = clocks.span[measured_instances] > 0
        is_late = has_work & (clocks.last_end[measured_instances] > latest_end)
        starts_backward = contains_any_time(
            instances.process[is_backward], instances.start[is_backward], *first_instance
        )
        return structs.replace(
            self._summarize_gpu_work(instances.phases[code], code, measured_instances, clocks, sums_by_phase),
            range=", ".join(range_names[:_MAX_LISTED_RANGES])
            + (f" and {unlisted_count} more" if unlisted_count > 0 else ""),
            instances=len(measured_instances),
            warmup_instances=int(instances.warmup[instances_of_phase].sum()),
            incomplete_instances=int((instances.incomplete & ~instances.warmup)[instances_of_phase].sum()),
            wall_ms=Stats.of_ns(wall_ns),
            wall_values_ms=sample_ms(wall_ns),
            busy_values_ms=sample_ms(clocks.busy[measured_instances]),
            synchronized=bool(is_late.sum() <= _LATE_INSTANCES_SHARE * len(measured_instances)),
            holds_backward=bool(starts_backward.any()),
            inferred=is_inferred,
            profiler_cost=self.recorded.cost(instances.start[measured_instances], instances.end[measured_instances]),
            kernels_least=int(kernels.min()) if len(kernels) else 0,
            kernels_most=int(kernels.max(initial=0)),
        )

    def _summarize_gpu_work(
        self, phase: str, code: int, measured_instances: Ints, clocks: GpuClocks, sums_by_phase: GroupSums
    ) -> PhaseSummary:
        """Returns the figures of a phase's GPU operations.

        Args:
            phase: the name of the phase.
            code: the row of the phase in ``sums_by_phase``.
            measured_instances: the indices of its measured instances.
            clocks: the GPU time of each instance.
            sums_by_phase: the sums of operations by phase.
        """
        instances = max(len(measured_instances), 1)
        kernels = make_kernel_rows(self.kernels, sums_by_phase.kernels[code], sums_by_phase.kernel_ns[code], instances)
        return PhaseSummary(
            phase=phase,
            instances=instances,
            kernels_per_instance=int(sums_by_phase.kernels[code].sum()) / instances,
            gpu_span_ms=Stats.of_ns(clocks.span[measured_instances]),
            gpu_busy_ms=Stats.of_ns(clocks.busy[measured_instances]),
            kernel_time_ms=Stats.of_ns(
                [] if clocks.opaque[measured_instances].any() else clocks.kernel_time[measured_instances]
            ),
            classes=make_class_rows(kernels),
            kernels=kernels,
            memory=make_memory_rows(sums_by_phase.others[code], sums_by_phase.other_ns[code], instances),
        )

    def summarize_whole(self) -> PhaseSummary:
        """Summarizes all operations of the process outside warm-up as one phase with one instance."""
        is_warmup = self.attributed.is_warmup[self.in_process]
        instance = np.where(is_warmup, np.int32(NONE), np.int32(0))
        clocks = measure_gpu_clocks(self.operations, instance, 1)
        whole_capture = self._summarize_gpu_work(
            "whole capture", 0, np.zeros(1, np.int64), clocks, self._sum_by_group(instance, 1)
        )
        start, end = clocks.last_end[0] - clocks.span[0], clocks.last_end[0]
        spans_warmup = (is_warmup & (self.operations.start >= start) & (self.operations.end <= end)).any()
        # The other figures leave warm-up out, so a span that includes warm-up would contradict them.
        return structs.replace(whole_capture, gpu_span_ms=Stats()) if spans_warmup else whole_capture

    def count_passes(self, steps: Steps) -> dict[str, float]:
        """Returns the mean number of times that each phase begins in a step.

        The last recorded step is left out, because the time up to the next step may be missing.
        """
        windows, ranges = steps.windows, self.attributed.trace.ranges
        if len(windows) > 1 and windows.cpu_end[-1] == steps.recorded.cpu_end[-1]:
            windows = windows.select(np.arange(len(windows) - 1))
        is_in_process = process_of(ranges.thread) == self.process.global_pid
        is_measured = self.own_instances & self.instances.is_measured
        starts_of_phase = {
            name: ranges.start[is_in_process & mask_by_name(ranges, name.__eq__)] for name in PARTS_OUTSIDE_PHASES
        }
        for code, name in enumerate(self.instances.phases[: -len((OTHER_STEP, STEP))]):
            starts_of_phase[name] = self.instances.start[is_measured & (self.instances.phase == code)]
        if windows.source != "pass":  # a pass begins with its first GPU work, before which ranges may begin
            starts_of_phase = {name: start[windows.step_at(start) != NONE] for name, start in starts_of_phase.items()}
        return {name: len(start) / len(windows) for name, start in starts_of_phase.items() if len(start)}

    def count_coverage(self) -> Coverage:
        """Counts kernels and adds up their durations by the method with which they were attributed."""
        attribution = self.attributed.attribution
        kernels = self.operations.kernels
        method = attribution.method[self.in_process][kernels]
        leaf, step = (instances[self.in_process][kernels] for instances in self.attributed.instances_of_operations)
        is_warmup = self.attributed.is_warmup[self.in_process][kernels]
        count, duration_ns = sum_by_group_and_code(
            self.operations.select(kernels), method, is_warmup, (len(ATTRIBUTION_METHODS), 2)
        )
        is_first = self.operations.continues[kernels] == 0  # each kernel counts once, also if it has several parts
        return Coverage(
            kernels=int(np.count_nonzero(is_first)),
            attributed=int(count[UNATTRIBUTED + 1 :].sum()),
            in_phases=int(np.count_nonzero(is_first & ((leaf != NONE) | (step != NONE) | is_warmup))),
            in_warmup=int(np.count_nonzero(is_first & is_warmup)),
            unattributed=int(count[UNATTRIBUTED].sum()),
            kernel_ms=_sum_ms(duration_ns),
            attributed_ms=_sum_ms(duration_ns[UNATTRIBUTED + 1 :]),
            unattributed_ms=_sum_ms(duration_ns[UNATTRIBUTED]),
            without_launch=int(np.count_nonzero(is_first & (attribution.launch[self.in_process][kernels] == NONE))),
            ambiguous=int(np.count_nonzero(is_first & attribution.is_ambiguous[self.in_process][kernels])),
            how=dict(zip(ATTRIBUTION_METHODS, count.sum(axis=1).tolist(), strict=True)),
            lost_launches=self.attributed.count_lost_launches(self.process.global_pid),
            warmup_ms=_sum_ms(duration_ns[:, 1]),
        )


def _sum_ms(duration_ns: Ints) -> float:
    return int(duration_ns.sum()) / NS_PER_MS


def _find_contradiction(configuration: Configuration | None, phases: Sequence[PhaseSummary]) -> Fact | None:
    """Returns the contradiction between the model in a file name and the capture's matmuls; None if there is none."""
    model = configuration.model if configuration and configuration.source in FILE_NAME_SOURCES else None
    forwards = [phase for phase in phases if phase.phase == "forward" and phase.instances]
    matmuls = sum(phase.launches_of(MATMUL) for phase in forwards)
    if model is None or not 0 < matmuls < model.min_matmuls:
        return None
    return Fact("model_contradicted", model=model.name, needed=model.min_matmuls, launched=matmuls)


#: Sums of floats count as equal if their absolute or relative difference is at most this value.
_ROUNDING_TOLERANCE = 1e-6
_is_equal = partial(math.isclose, rel_tol=_ROUNDING_TOLERANCE, abs_tol=_ROUNDING_TOLERANCE)


def check_attribution(summary: CaptureSummary) -> None:
    """Checks that every kernel is counted exactly once, and that no part exceeds the whole.

    Raises:
        NsysAnalyzerError: a check fails, so the figures are wrong.
    """
    coverage, whole_capture = summary.coverage, summary.whole
    if coverage is None or whole_capture is None:
        return
    kernels_in_leaves = sum(phase.kernels_per_instance * phase.instances for phase in summary.leaf_phases)
    gpu_ms_in_leaves = sum(phase.gpu_ms * phase.instances for phase in summary.leaf_phases)
    kernel_rows_ms = sum(row.ms_per_instance for row in whole_capture.kernels)
    checks = {
        "attributed + unattributed kernels are all kernels": coverage.attributed + coverage.unattributed
        == sum(coverage.how.values())
        == whole_capture.kernels_per_instance + coverage.in_warmup,
        "their times add up": _is_equal(coverage.attributed_ms + coverage.unattributed_ms, coverage.kernel_ms),
        "kernels by name and in warm-up take the time of all kernels": _is_equal(
            kernel_rows_ms + coverage.warmup_ms, coverage.kernel_ms
        ),
        "phases have no more kernels than the ranges": kernels_in_leaves <= coverage.in_phases + _ROUNDING_TOLERANCE
        and coverage.in_warmup <= coverage.in_phases <= coverage.attributed + coverage.in_warmup,
        "phases have no more GPU time than the whole capture": gpu_ms_in_leaves
        <= whole_capture.gpu_ms * (1 + _ROUNDING_TOLERANCE) + _ROUNDING_TOLERANCE,
    }
    failed_checks = [name for name, holds in checks.items() if not holds]
    if failed_checks:
        raise NsysAnalyzerError(
            f"{summary.title}: it is not true that {failed_checks[0]}", "Please report this capture"
        )


@dataclass(frozen=True)
class GpuClocks:
    """The GPU times of each instance in ns, and its numbers of kernels and opaque graphs; shape (instances,).

    Attributes:
        span: the time from the first start to the last end of an operation.
        busy: the time during which at least one operation runs.
        kernel_time: the total kernel time.
        last_end: the last end of an operation.
        kernels, opaque: the numbers of kernels and of opaque graphs.
    """

    span: Ints
    busy: Ints
    kernel_time: Ints
    last_end: Ints
    kernels: Ints
    opaque: Ints


def measure_gpu_clocks(operations: Operations, instance: SmallInts, instances: int) -> GpuClocks:
    """Measures the GPU times of each instance.

    Args:
        operations: the operations of a process.
        instance: the number of the instance of each operation, -1 for none; shape (operations,).
        instances: the number of instances.
    """
    # Operations without an instance form a group that is dropped at the end, which is faster than leaving them out.
    group, groups = instance + 1, instances + 1
    busy, first, last = measure_unions(group, operations.start, operations.end, groups)
    kernels = operations.kernels
    instance_of_kernel = instance[kernels]
    one_code = np.broadcast_to(np.int32(0), len(instance_of_kernel))
    count, duration_ns = sum_by_group_and_code(operations.select(kernels), instance_of_kernel, one_code, (instances, 1))
    return GpuClocks(
        span=(last - first)[1:],
        busy=busy[1:],
        kernel_time=duration_ns[:, 0],
        last_end=last[1:],
        kernels=count[:, 0],
        opaque=np.bincount(group[operations.of_kind(GRAPH)], minlength=groups)[1:],
    )
