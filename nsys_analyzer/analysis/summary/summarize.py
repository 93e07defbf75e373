"""From a trace to one summary for each of its processes."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial

import numpy as np
from msgspec import structs

from nsys_analyzer.analysis.attribution.attribution import ATTRIBUTION_METHODS, UNATTRIBUTED
from nsys_analyzer.analysis.attribution.processes import Process, find_processes
from nsys_analyzer.analysis.intervals import NONE, has_moments
from nsys_analyzer.analysis.kernels.class_rules import FUSED, MATMUL
from nsys_analyzer.analysis.ranges.instances import AttributedTrace
from nsys_analyzer.analysis.ranges.phases import OTHER_STEP, STEP, PhaseNames, is_framework_name
from nsys_analyzer.analysis.statistics import Stats, sample_ms
from nsys_analyzer.analysis.steps.member import record_members
from nsys_analyzer.analysis.steps.profiler_cost import RecordedEvents
from nsys_analyzer.analysis.steps.serving import summarize_serving
from nsys_analyzer.analysis.steps.step import UNPHASED, StepSummary
from nsys_analyzer.analysis.steps.summarize import summarize_steps
from nsys_analyzer.analysis.steps.tracks import record_tracks
from nsys_analyzer.analysis.steps.windows import Steps, find_steps
from nsys_analyzer.analysis.summary.kernel_tables import (
    GpuClocks,
    GroupSums,
    find_peak_memory,
    find_precision_shares,
    make_class_rows,
    make_kernel_rows,
    make_memory_rows,
    measure_gpu_clocks,
    sum_by_group,
    sum_by_group_and_code,
)
from nsys_analyzer.analysis.summary.modules import summarize_modules
from nsys_analyzer.analysis.summary.summary import CaptureSummary, Coverage, PhaseSummary
from nsys_analyzer.analysis.summary.warnings import capture_warnings
from nsys_analyzer.analysis.transformer.attention import summarize_attention
from nsys_analyzer.analysis.transformer.models import Configuration
from nsys_analyzer.errors import NsysAnalyzerError
from nsys_analyzer.trace.arrays import Bools, Ints, SmallInts, distinct, mask_by_name
from nsys_analyzer.trace.columns import process_of
from nsys_analyzer.trace.metadata import Gpu
from nsys_analyzer.trace.schema import NS_PER_MS
from nsys_analyzer.trace.trace import Trace

#: Clock skew that is no lack of synchronisation, and the share of instances that may lack it.
_SKEW_NS, _STRAGGLERS = 5_000, 0.05
#: The names of so many ranges are listed, of more the first: `step 1`, `step 2` and so on.
_LISTED = 3
#: What tells the steps where ranges name them.
_BY_RANGES = ("range", "profiler_step")


def summarize(
    trace: Trace, name: str, names: PhaseNames | None = None, configuration: Configuration | None = None,
    *, tracked: int = 0,
) -> tuple[CaptureSummary, ...]:  # fmt: skip
    """One summary for each process of a trace that uses a GPU (or has phases, where none does), without findings.

    Args:
        trace: the capture.
        name: its name in tables.
        names: the names of the ranges of phases.
        configuration: the model and its shapes, where known.
        tracked: of how many operations every moment is kept, for a timeline, about; 0 for none.
    """
    attributed = AttributedTrace(trace, names)
    processes = find_processes(trace)
    steps = {one.global_pid: find_steps(attributed, one.global_pid) for one in processes}
    start_ups = {process: one.start_up for process, one in steps.items() if one and one.start_up}
    attributed = attributed.with_start_ups_as_warmup(start_ups) if start_ups else attributed
    found = []
    for process in processes:
        summary = _ProcessView(attributed, process, steps[process.global_pid]).summary(name, configuration)
        if tracked:
            summary = replace(summary, tracks=record_tracks(attributed, process.global_pid, tracked))
        found.append(summary)
    return tuple(found)


class _ProcessView:
    """The operations and instances of one process of an attributed trace."""

    def __init__(self, attributed: AttributedTrace, process: Process, steps: Steps | None) -> None:
        self.attributed, self.process, self.steps = attributed, process, steps
        self.instances, self.kernels = attributed.instances, attributed.kernels
        operations = attributed.trace.operations
        mine = operations.process == process.global_pid
        self.mine: Bools | slice = slice(None) if mine.all() else mine
        self.operations = operations if mine.all() else operations.select(mine)
        self.own_instances = self.instances.process == process.global_pid
        self.recorded = RecordedEvents(attributed.as_recorded, process.global_pid)

    def summary(self, name: str, configuration: Configuration | None) -> CaptureSummary:
        trace = self.attributed.trace
        phases = self.phases()
        contradiction = _contradiction(configuration, phases)
        if configuration and contradiction:
            configuration = structs.replace(configuration, model=None, model_name=None)
        whole = self.whole() if len(self.operations) else None
        coverage = self.coverage()
        matmuls = [row for row in whole.kernels if row.kernel_class in (MATMUL, FUSED)] if whole else []
        gpu = trace.metadata.gpu(self.process.pid, int(self.operations.device[0])) if whole else None
        by_ranges = self.steps is None or self.steps.windows.source in _BY_RANGES
        modules = summarize_modules(self.attributed, self.process.global_pid, by_ranges=by_ranges)
        peak_memory_bytes, memory_events = find_peak_memory(self.attributed, self.process.global_pid)
        status = self.status()
        summary = CaptureSummary(
            name=name,
            process=self.process.label or None,
            source=trace.path.name,
            status=status,
            message=self.what_ran_out(gpu) if status == "oom" else None,
            pid=self.process.pid,
            rank=self.process.rank,
            device=gpu,
            metadata=trace.metadata,
            configuration=configuration,
            phases=phases,
            whole=whole,
            attention=summarize_attention(self.attributed, self.process.global_pid, configuration, gpu),
            coverage=coverage,
            precisions=find_precision_shares(matmuls),
            peak_memory_bytes=peak_memory_bytes,
            memory_events=memory_events,
            modules=modules,
        )
        if self.steps:
            step, study = summarize_steps(self.attributed, self.process.global_pid, self.steps)
            members = () if summary.on_cpu else record_members(self.attributed, self.process, self.steps, name)
            phases = tuple(_with_length(phase, step) for phase in phases)
            step = replace(step, passes=self.passes(self.steps))
            serving = summarize_serving(self.attributed, self.process.global_pid, self.steps)
            summary = replace(summary, step=step, serving=serving, study=study, members=members, phases=phases)
        check_attribution(summary)
        warnings = capture_warnings(summary, coverage, self.attributed, self.process.global_pid)
        warnings = (*warnings, contradiction) if contradiction else warnings
        # Ranges that are called steps and are none, around several passes or a part of one, are shown nowhere else.
        # Nor is one that says the mean of prefill and decode.
        is_named = summary.step is None or summary.step.source in _BY_RANGES
        is_named &= summary.serving is None or len(summary.serving.kinds) == 1
        phases = phases if is_named else tuple(phase for phase in phases if phase.phase != STEP)
        return replace(summary, phases=phases, warnings=warnings)

    def status(self) -> str:
        """No kernels, out of memory, partial, or ok."""
        open_phases = self.attributed.find_open_phases(self.process.global_pid)
        incomplete = self.own_instances & self.instances.incomplete
        if self.attributed.ran_out_of_memory(self.process.global_pid):
            return "oom"
        if self.operations.kernels.stop == 0:
            return "no_kernels"
        return "partial" if open_phases or incomplete.any() else "ok"

    def what_ran_out(self, gpu: Gpu | None) -> str:
        """Says which allocation failed last, in which range, and how much memory the GPU has."""
        failed, ranges = self.attributed.trace.failed_allocations, self.attributed.trace.ranges
        failed = failed.select(process_of(failed.thread) == self.process.global_pid)
        last = int(failed.start.argmax())
        at, api = failed.start[last], failed.names[failed.name[last]].partition("_v")[0]
        around = np.flatnonzero((ranges.thread == failed.thread[last]) & (ranges.start <= at) & (ranges.end > at))
        innermost = ranges.name[around[np.argsort(ranges.start[around])]].tolist()[-1:]
        where = "".join(f" in the range {ranges.names[code]}" for code in innermost)
        size = f", which has {gpu.memory_bytes / 2**30:,.1f} GiB" if gpu and gpu.memory_bytes else ""
        memory = f" on the {gpu.name}{size}" if gpu else ""
        return f"{api} failed{where}{memory}, and nothing was launched afterwards."

    def phases(self) -> tuple[PhaseSummary, ...]:
        """The phases that occur, in the order of a step; the step itself last."""
        leaf, step = (part[self.mine] for part in self.attributed.instances_of_operations)
        *leaves, other_step, last = range(len(self.instances.phases))
        return (*self._group(leaf, leaves), *self._group(step, [other_step, last]))

    def _group(self, instance: SmallInts, codes: Sequence[int]) -> Iterator[PhaseSummary]:
        """The phases of these codes that occur, from the instance of each operation."""
        clocks = measure_gpu_clocks(self.operations, instance, len(self.instances.range))
        # The last entry serves operations without an instance.
        phase_of = np.append(np.where(self.instances.measured, self.instances.phase, NONE), NONE).astype(np.int32)
        sums = self._totals(phase_of[instance], len(self.instances.phases))
        for code in codes:
            chosen = np.flatnonzero(self.own_instances & (self.instances.phase == code))
            if len(chosen):
                yield self._phase(code, chosen, clocks, sums)

    def _totals(self, group: SmallInts, groups: int) -> GroupSums:
        return sum_by_group(self.operations, self.kernels.code[self.mine], group, (len(self.kernels.names), groups))

    def _phase(self, code: int, chosen: Ints, clocks: GpuClocks, sums: GroupSums) -> PhaseSummary:
        measured = chosen[self.instances.measured[chosen]]
        ranges, instances = self.attributed.trace.ranges, self.instances
        codes = distinct(np.sort(ranges.name[instances.range[chosen]]))
        names = [ranges.names[i] for i in codes]
        inferred = all(name in self.attributed.roles.inferred or is_framework_name(name) for name in names)
        kernels = clocks.kernels[measured] if inferred else measured[:0]
        backward = self.own_instances & (instances.phase == instances.phases.index("backward"))
        first = [column[measured[:1]] for column in (instances.process, instances.start, instances.end)]
        return structs.replace(
            self._gpu_figures(instances.phases[code], code, measured, clocks, sums),
            range=", ".join(names[:_LISTED]) + (f" and {len(names) - _LISTED} more" if len(names) > _LISTED else ""),
            instances=len(measured),
            warmup_instances=int(instances.warmup[chosen].sum()),
            incomplete_instances=int((instances.incomplete & ~instances.warmup)[chosen].sum()),
            wall_ms=Stats.of_ns((instances.end - instances.start)[measured]),
            wall_values_ms=sample_ms((instances.end - instances.start)[measured]),
            busy_values_ms=sample_ms(clocks.busy[measured]),
            synchronized=self._synchronized(measured, clocks),
            # A backward pass starts inside the first of the instances.
            holds_backward=bool(has_moments(instances.process[backward], instances.start[backward], *first).any()),
            inferred=inferred,
            profiler_cost=self.recorded.cost(instances.start[measured], instances.end[measured]),
            kernels_least=int(kernels.min()) if len(kernels) else 0,
            kernels_most=int(kernels.max(initial=0)),
        )

    def _synchronized(self, measured: Ints, clocks: GpuClocks) -> bool:
        """True where GPU work ends before the range, but for a few microseconds of clock skew and a few stragglers."""
        instances = self.instances
        skew = np.maximum(_SKEW_NS, (instances.end - instances.start)[measured] // 1000)
        late = (clocks.span[measured] > 0) & (clocks.last_end[measured] > instances.end[measured] + skew)
        return bool(late.sum() <= _STRAGGLERS * len(measured))

    def _gpu_figures(self, phase: str, code: int, measured: Ints, clocks: GpuClocks, sums: GroupSums) -> PhaseSummary:
        """The figures of a phase's GPU operations; ``code`` is its row of ``sums``, ``measured`` are its instances."""
        n = max(len(measured), 1)
        kernels = make_kernel_rows(self.kernels, sums.kernels[code], sums.kernel_ns[code], n)
        return PhaseSummary(
            phase=phase,
            instances=n,
            kernels_per_instance=int(sums.kernels[code].sum()) / n,
            gpu_span_ms=Stats.of_ns(clocks.span[measured]),
            gpu_busy_ms=Stats.of_ns(clocks.busy[measured]),
            kernel_time_ms=Stats.of_ns([] if clocks.opaque[measured].any() else clocks.kernel_time[measured]),
            classes=make_class_rows(kernels),
            kernels=kernels,
            memory=make_memory_rows(sums.others[code], sums.other_ns[code], n),
        )

    def whole(self) -> PhaseSummary:
        """The process's operations outside warm-up as one phase of one instance."""
        warm = self.attributed.is_warmup[self.mine]
        everything = np.where(warm, np.int32(NONE), np.int32(0))
        clocks = measure_gpu_clocks(self.operations, everything, 1)
        whole = self._gpu_figures("whole capture", 0, np.zeros(1, np.int64), clocks, self._totals(everything, 1))
        first, last = clocks.last_end[0] - clocks.span[0], clocks.last_end[0]
        holds_warmup = (warm & (self.operations.start >= first) & (self.operations.end <= last)).any()
        # The span holds warm-up then, which the other figures do not.
        return structs.replace(whole, gpu_span_ms=Stats()) if holds_warmup else whole

    def passes(self, steps: Steps) -> dict[str, float]:
        """Returns how often each phase begins in a step.

        The last recorded step does not count: the time between it and a next step may be missing.
        """
        windows, ranges = steps.windows, self.attributed.trace.ranges
        if len(windows) > 1 and windows.left[-1] == steps.every.left[-1]:
            windows = windows.select(np.arange(len(windows) - 1))
        in_process = process_of(ranges.thread) == self.process.global_pid
        measured = self.own_instances & self.instances.measured
        starts = {name: ranges.start[in_process & mask_by_name(ranges, name.__eq__)] for name in UNPHASED}
        for code, name in enumerate(self.instances.phases[: -len((OTHER_STEP, STEP))]):
            starts[name] = self.instances.start[measured & (self.instances.phase == code)]
        if windows.source != "pass":  # a pass begins with its first work, and ranges may begin before that
            starts = {name: start[windows.step_at(start) != NONE] for name, start in starts.items()}
        return {name: len(start) / len(windows) for name, start in starts.items() if len(start)}

    def coverage(self) -> Coverage:
        attribution = self.attributed.attribution
        kernel = self.operations.kernels
        how = attribution.how[self.mine][kernel]
        leaf, step = (part[self.mine][kernel] for part in self.attributed.instances_of_operations)
        warm = self.attributed.is_warmup[self.mine][kernel]
        count, ns = sum_by_group_and_code(self.operations.select(kernel), how, warm, (len(ATTRIBUTION_METHODS), 2))
        first = self.operations.continues[kernel] == 0
        return Coverage(
            kernels=int(np.count_nonzero(first)),
            attributed=int(count[UNATTRIBUTED + 1 :].sum()),
            in_phases=int(np.count_nonzero(first & ((leaf != NONE) | (step != NONE) | warm))),
            in_warmup=int(np.count_nonzero(first & warm)),
            unattributed=int(count[UNATTRIBUTED].sum()),
            kernel_ms=_sum_ms(ns),
            attributed_ms=_sum_ms(ns[UNATTRIBUTED + 1 :]),
            unattributed_ms=_sum_ms(ns[UNATTRIBUTED]),
            without_launch=int(np.count_nonzero(first & (attribution.launch[self.mine][kernel] == NONE))),
            ambiguous=int(np.count_nonzero(first & attribution.ambiguous[self.mine][kernel])),
            how=dict(zip(ATTRIBUTION_METHODS, count.sum(axis=1).tolist(), strict=True)),
            lost_launches=self.attributed.count_lost_launches(self.process.global_pid),
            warmup_ms=_sum_ms(ns[:, 1]),
        )


def _sum_ms(ns: Ints) -> float:
    return int(ns.sum()) / NS_PER_MS


def _with_length(phase: PhaseSummary, step: StepSummary) -> PhaseSummary:
    """Returns the phase; that of the step with its length, from the start of one to the next."""
    if phase.phase != STEP or step.source not in _BY_RANGES:
        return phase
    wall = replace(step.wall_ms, median=step.length_ms)
    return structs.replace(phase, wall_ms=wall, wall_values_ms=step.wall_values_ms, synchronized=True)


def _contradiction(configuration: Configuration | None, phases: Sequence[PhaseSummary]) -> str:
    """Why a configuration read from a file name cannot be the capture's; empty where it can."""
    model = configuration.model if configuration and configuration.source.startswith("file name") else None
    matmuls = sum(one.launches_of(MATMUL) for one in phases if one.phase == "forward" and one.instances)
    if model is None or not 0 < matmuls < model.fewest_matmuls:
        return ""
    return (
        f"The file name says {model.name}, which needs {model.fewest_matmuls} matmuls per forward or more; the capture "
        f"launches {matmuls:,.0f}, so the name is not believed."
    )


_ROUNDING = 1e-6
_equal = partial(math.isclose, rel_tol=_ROUNDING, abs_tol=_ROUNDING)


def check_attribution(summary: CaptureSummary) -> None:
    """Checks that every kernel is counted once, and that no part holds more than its whole.

    Raises:
        NsysAnalyzerError: a check fails: the figures are wrong.
    """
    coverage, whole = summary.coverage, summary.whole
    if coverage is None or whole is None:
        return
    in_leaves = sum(phase.kernels_per_instance * phase.instances for phase in summary.leaf_phases)
    gpu_ms_in_leaves = sum(phase.gpu_ms * phase.instances for phase in summary.leaf_phases)
    by_name_ms = sum(row.ms_per_instance for row in whole.kernels)
    laws = {
        "attributed + unattributed kernels are all kernels": coverage.attributed + coverage.unattributed
        == sum(coverage.how.values())
        == whole.kernels_per_instance + coverage.in_warmup,
        "their times add up": _equal(coverage.attributed_ms + coverage.unattributed_ms, coverage.kernel_ms),
        "kernels by name and in warm-up take the time of all": _equal(
            by_name_ms + coverage.warmup_ms, coverage.kernel_ms
        ),
        "phases hold no more than the ranges": in_leaves <= coverage.in_phases + _ROUNDING
        and coverage.in_warmup <= coverage.in_phases <= coverage.attributed + coverage.in_warmup,
        "phases hold no more than the whole capture": gpu_ms_in_leaves <= whole.gpu_ms * (1 + _ROUNDING) + _ROUNDING,
    }
    broken = [law for law, holds in laws.items() if not holds]
    if broken:
        raise NsysAnalyzerError(f"{summary.title}: it does not hold that {broken[0]}", "Please report this capture")
