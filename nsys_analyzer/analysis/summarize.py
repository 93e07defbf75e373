"""From a trace to one summary for each of its processes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from nsys_analyzer.analysis.attention import AttentionSummary, summarize_attention
from nsys_analyzer.analysis.attribution import HOW
from nsys_analyzer.analysis.instances import AttributedTrace
from nsys_analyzer.analysis.models import Configuration
from nsys_analyzer.analysis.phases import PhaseNames
from nsys_analyzer.analysis.precision import gemm_precision
from nsys_analyzer.analysis.processes import Process, processes_of
from nsys_analyzer.analysis.statistics import (
    GpuClocks,
    KernelRow,
    Stats,
    class_rows,
    gpu_clocks,
    kernel_rows,
    memory_rows,
)
from nsys_analyzer.analysis.summary import CaptureSummary, Coverage, PhaseSummary, ThreadShare
from nsys_analyzer.analysis.warnings import capture_warnings
from nsys_analyzer.trace.arrays import Bools, Ints, distinct
from nsys_analyzer.trace.trace import KERNEL, Trace


def summarize(
    trace: Trace, name: str, names: PhaseNames | None = None, configuration: Configuration | None = None
) -> tuple[CaptureSummary, ...]:
    """One summary for each process of a trace that uses a GPU (or has phases, where none does).

    Args:
        trace: the trace.
        name: what to call the capture.
        names: which range names mean which phase.
        configuration: what is known of the model and its shapes.

    """
    attributed = AttributedTrace(trace, names)
    return tuple(_ProcessView(attributed, process).summary(name, configuration) for process in processes_of(trace))


class _ProcessView:
    """The operations and instances of one process of an attributed trace."""

    def __init__(self, attributed: AttributedTrace, process: Process) -> None:
        self.attributed, self.process = attributed, process
        self.instances = attributed.instances
        operations = attributed.trace.operations
        mine = operations.process == process.global_pid
        self.mine: Bools | slice = slice(None) if mine.all() else mine
        self.operations = operations if mine.all() else operations.select(mine)
        self.own_instances = self.instances.process == process.global_pid

    def summary(self, name: str, configuration: Configuration | None) -> CaptureSummary:
        trace = self.attributed.trace
        phases = self.phases()
        whole = self.whole() if len(self.operations) else None
        summary = CaptureSummary(
            name=name,
            process=self.process.label,
            source=trace.path.name,
            status=self.status(),
            pid=self.process.pid,
            gpu=trace.metadata.gpu(self.process.pid, int(self.operations.device[0])) if whole else None,
            metadata=trace.metadata,
            configuration=configuration,
            phases=phases,
            whole=whole,
            attention=self.attention(configuration),
            coverage=self.coverage(),
            precisions=_precisions(whole.kernels) if whole else {},
        )
        return replace(summary, warnings=capture_warnings(summary, self.attributed, self.process.global_pid))

    def status(self) -> str:
        """No kernels, out of memory, partial, or ok."""
        open_phases = self.attributed.open_phases(self.process.global_pid)
        incomplete = self.own_instances & self.instances.incomplete
        if self.attributed.out_of_memory(self.process.global_pid):
            return "oom"
        if not (self.operations.kind == KERNEL).any():
            return "no_kernels"
        return "partial" if open_phases or incomplete.any() else "ok"

    def phases(self) -> tuple[PhaseSummary, ...]:
        """The phases that occur, in the order of a step; the step itself last."""
        groups = (self.attributed.phase_instance[self.mine], self.attributed.step_instance[self.mine])
        count = len(self.instances.range)
        clocks = [gpu_clocks(self.operations, group, count) for group in groups]
        found = []
        for code, phase in enumerate(self.instances.phases):
            chosen = np.flatnonzero(self.own_instances & (self.instances.phase == code))
            if len(chosen):
                which = int(phase == self.instances.phases[-1])
                found.append(self._phase(phase, chosen, groups[which], clocks[which]))
        return tuple(found)

    def _phase(self, phase: str, chosen: Ints, group: Ints, clocks: GpuClocks) -> PhaseSummary:
        measured = chosen[self.instances.measured[chosen]]
        flag = np.zeros(len(self.instances.range) + 1, np.bool_)
        flag[measured] = True
        inside = flag[group]
        operations = self.operations.select(inside)
        ranges, instances = self.attributed.trace.ranges, self.instances
        n = max(len(measured), 1)
        kernels = kernel_rows(operations, n)
        return PhaseSummary(
            phase=phase,
            range=", ".join(sorted({ranges.names[i] for i in ranges.name[instances.range[chosen]]})),
            instances=len(measured),
            warmup_instances=int(instances.warmup[chosen].sum()),
            incomplete_instances=int((instances.incomplete & ~instances.warmup)[chosen].sum()),
            launch_threads=self._threads(inside, n),
            kernels_per_instance=int(clocks.kernels[measured].sum()) / n,
            wall_ms=Stats.of_ns((instances.end - instances.start)[measured]),
            gpu_span_ms=Stats.of_ns(clocks.span[measured]),
            gpu_busy_ms=Stats.of_ns(clocks.busy[measured]),
            kernel_sum_ms=Stats.of_ns([] if clocks.opaque[measured].any() else clocks.kernel_sum[measured]),
            python_ms=None,
            synchronized=bool((clocks.last_end[measured] <= instances.end[measured]).all()),
            classes=class_rows(kernels),
            kernels=kernels,
            memory=memory_rows(operations, n),
        )

    def _threads(self, inside: Bools, instances: int) -> tuple[ThreadShare, ...]:
        """The threads that launch the kernels of some operations, most kernels first."""
        trace = self.attributed.trace
        launch = self.attributed.attribution.launch[self.mine][inside & (self.operations.kind == KERNEL)]
        of_kernel = trace.launches.thread[launch[launch >= 0]]
        threads = distinct(of_kernel)
        counts = np.bincount(np.searchsorted(threads, of_kernel), minlength=len(threads))
        return tuple(
            ThreadShare(
                trace.metadata.thread_names.get(int(threads[i]), "unnamed"),
                int(threads[i]) & 0xFFFFFF,
                int(counts[i]) / instances,
            )
            for i in np.argsort(-counts, kind="stable")
        )

    def whole(self) -> PhaseSummary:
        """The process's operations as one phase of one instance."""
        clocks = gpu_clocks(self.operations, np.zeros(len(self.operations), np.int64), 1)
        kernels = kernel_rows(self.operations, 1)
        return PhaseSummary(
            phase="whole capture",
            range="",
            instances=1,
            warmup_instances=0,
            incomplete_instances=0,
            launch_threads=self._threads(np.ones(len(self.operations), np.bool_), 1),
            kernels_per_instance=int(clocks.kernels[0]),
            wall_ms=Stats(0),
            gpu_span_ms=Stats.of_ns(clocks.span),
            gpu_busy_ms=Stats.of_ns(clocks.busy),
            kernel_sum_ms=Stats.of_ns([] if clocks.opaque.any() else clocks.kernel_sum),
            python_ms=None,
            synchronized=False,
            classes=class_rows(kernels),
            kernels=kernels,
            memory=memory_rows(self.operations, 1),
        )

    def attention(self, configuration: Configuration | None) -> AttentionSummary | None:
        code = self.instances.phases.index("forward")
        forward = np.flatnonzero(self.own_instances & (self.instances.phase == code) & self.instances.measured)
        return summarize_attention(self.attributed, forward, configuration)

    def coverage(self) -> Coverage:
        """Counts and times that must add up."""
        attribution = self.attributed.attribution
        kernel = self.operations.kind == KERNEL
        duration = (self.operations.end - self.operations.start)[kernel]
        how = attribution.how[self.mine][kernel]
        attributed = how != 0
        leaf, step = (part[self.mine][kernel] for part in self.attributed.instance_pair)
        warmup = np.append(self.instances.warmup, False)
        total, covered = int(duration.sum()), int(duration[attributed].sum())
        return Coverage(
            kernels=len(how),
            attributed=int(attributed.sum()),
            in_phases=int(((leaf >= 0) | (step >= 0)).sum()),
            in_warmup=int((warmup[leaf] | warmup[step]).sum()),
            unattributed=int((~attributed).sum()),
            kernel_ms=total / 1e6,
            attributed_ms=covered / 1e6,
            unattributed_ms=(total - covered) / 1e6,
            without_launch=int((attribution.launch[self.mine][kernel] < 0).sum()),
            ambiguous=int(attribution.ambiguous[self.mine][kernel].sum()),
            how={HOW[code]: int(n) for code, n in enumerate(np.bincount(how, minlength=len(HOW)))},
            lost_launches=self.attributed.lost_in(self.process.global_pid),
            operations=len(self.operations),
        )


def _precisions(kernels: Sequence[KernelRow]) -> dict[str, float]:
    """Shares of the matmul and fused attention time by the precision in the kernels' names."""
    ms: dict[str, float] = {}
    for row in kernels:
        if row.kernel_class in ("matmul", "fused attention"):
            precision = gemm_precision(row.name) or "unknown"
            ms[precision] = ms.get(precision, 0.0) + row.ms_per_instance
    total = sum(ms.values())
    return {key: value / total for key, value in sorted(ms.items(), key=lambda item: -item[1])} if total else {}
