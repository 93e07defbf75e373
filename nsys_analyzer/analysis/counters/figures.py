"""Measures the hardware counters of the GPU while phases, kernel classes, kernels, modules and operators run.

A figure is computed from the samples in which no other operations run on the GPU. The activity of such a sample belongs
to the time in which the operations run. So a figure is the sum of value × length over the samples, divided by this
time.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Literal

import numpy as np

from nsys_analyzer.analysis.intervals import NONE, Cover, find_overlaps
from nsys_analyzer.analysis.operators.account import LAYER_NUMBER, describe_shapes
from nsys_analyzer.analysis.operators.costs import estimate_cost
from nsys_analyzer.analysis.operators.matching import OperatorWork
from nsys_analyzer.analysis.ranges.calls import CallFinder, find_module_calls
from nsys_analyzer.analysis.ranges.instances import AttributedTrace
from nsys_analyzer.analysis.steps.windows import Windows
from nsys_analyzer.trace.arrays import Bools, Ints, distinct, distinct_rows, distinct_texts
from nsys_analyzer.trace.columns import OPERATION_KINDS, pid_of
from nsys_analyzer.trace.gpu_counters import GpuSamples
from nsys_analyzer.trace.metadata import Gpu
from nsys_analyzer.trace.schema import NS_PER_MS, NS_PER_S, NS_PER_US

#: A figure is left out if it is computed from fewer samples.
MIN_SAMPLES = 20
#: A sample is used if the operations run for at least this share of it. In the rest of a sample, the GPU is idle.
_MIN_COVERED_SHARE = 0.5
#: Memory or SMs limit the work if they are used for at least this share of their peak.
_LIMIT_SHARE = 0.6
#: The clock is low below this share of the usual clock, and a step is slow above this multiple of the usual length.
LOW_CLOCK, _SLOW_STEP = 0.95, 1.05
_HZ_PER_MHZ = 1e6
#: The maximum number of kernels, modules and operators with figures. Those with the most samples are chosen.
_MAX_ROWS = 100

#: What limits work by the counters: the memory's bandwidth, the SMs' instructions or tensor cores, or neither.
LimitedBy = Literal["memory", "compute", "neither"]


@dataclass(frozen=True)
class CounterRow:
    """The counters of a GPU while one group of operations runs alone. A figure with too few samples is None.

    Attributes:
        name: the name of the group: a phase, kernel class, kernel, module or operator.
        samples: the number of samples in which only this group runs.
        sms_active: the mean share of the SMs that run a warp.
        sm_issue: the share of the SMs' cycles that issue an instruction.
        tensor_active: the share of the cycles in which the tensor cores are active.
        dram_read, dram_write: the shares of the memory's peak bandwidth.
        nvlink_received, nvlink_sent, pcie_received, pcie_sent: the shares of the peak bandwidth of the link.
        sm_clock_mhz: the clock of the SMs, MHz.
        dram_bytes_per_s: the bytes that the memory reads and writes per second; None if its peak is unknown.
        limited_by: the resource that is used for at least 60 % of its peak; None if the counters of memory and SMs are
            unknown.
    """

    name: str
    samples: int
    sms_active: float | None = None
    sm_issue: float | None = None
    tensor_active: float | None = None
    dram_read: float | None = None
    dram_write: float | None = None
    nvlink_received: float | None = None
    nvlink_sent: float | None = None
    pcie_received: float | None = None
    pcie_sent: float | None = None
    sm_clock_mhz: float | None = None
    dram_bytes_per_s: float | None = None
    limited_by: LimitedBy | None = field(init=False, default=None)

    def __post_init__(self) -> None:
        """Finds what limits the work."""
        if self.sm_issue is not None and self.dram_share is not None:
            compute_share = max(self.sm_issue, self.tensor_active or 0.0)
            limit: LimitedBy = "memory" if self.dram_share >= compute_share else "compute"
            vars(self)["limited_by"] = limit if max(self.dram_share, compute_share) >= _LIMIT_SHARE else "neither"

    @property
    def dram_share(self) -> float | None:
        """Returns the share of the memory's peak bandwidth that reads and writes take together."""
        return None if self.dram_read is None or self.dram_write is None else self.dram_read + self.dram_write


@dataclass(frozen=True)
class OperatorTraffic:
    """The bytes that one call of an operator moves.

    Attributes:
        operator: the name of the operator.
        shapes: the shapes of its tensors.
        samples: the number of samples in which only calls of this operator with these shapes run.
        dram_bytes: the bytes that the memory reads and writes, by the counters.
        least_bytes: the bytes that a call reads and writes at least; None if they are unknown.
    """

    operator: str
    shapes: str
    samples: int
    dram_bytes: float
    least_bytes: float | None


@dataclass(frozen=True)
class SlowStep:
    """A step that is longer than usual, while the clock of the SMs is lower than in the other steps.

    Attributes:
        number: the number of the step among the measured ones, from 1.
        ms: the length of the step under the profiler, ms.
        sm_clock_mhz: the mean clock while the GPU works, MHz.
        samples: the number of samples.
    """

    number: int
    ms: float
    sm_clock_mhz: float
    samples: int


@dataclass(frozen=True)
class Counters:
    """The hardware counters of the GPU of a process.

    Attributes:
        gpu_id: the ID of the GPU, as nsys counts.
        samples: the number of samples in the capture.
        period_us: the time between two samples, us.
        sm_count: the number of SMs of the GPU, 0 if it is unknown.
        peak_clock_mhz: the highest clock of the SMs: the GPU's maximum or a higher sample, MHz; None if it is unknown.
        whole: the figures of all work of the process outside warm-up.
        phases, classes, kernels, modules: the figures of each phase, kernel class, kernel and module of the model.
            Those with the most samples come first. Equal layers are one module.
        operators: the bytes of operators.
        slow_steps: the longer steps with a low clock.
    """

    gpu_id: int
    samples: int
    period_us: float
    sm_count: int
    peak_clock_mhz: float | None
    whole: CounterRow | None
    phases: tuple[CounterRow, ...]
    classes: tuple[CounterRow, ...]
    kernels: tuple[CounterRow, ...]
    modules: tuple[CounterRow, ...]
    operators: tuple[OperatorTraffic, ...] = ()
    slow_steps: tuple[SlowStep, ...] = ()

    def of_class(self, kernel_class: str) -> CounterRow | None:
        """Returns the figures of a kernel class; None if it has none."""
        return next((row for row in self.classes if row.name == kernel_class), None)


def summarize_counters(
    attributed: AttributedTrace,
    process: int,
    gpu: Gpu | None,
    windows: Windows | None,
    operators: OperatorWork | None,
) -> Counters | None:
    """Summarizes the counters of the GPU on which a process runs; returns None if they were not recorded.

    Args:
        attributed: the trace.
        process: the global ID of the process.
        gpu: the GPU of the process.
        windows: the measured steps; None if they are unknown.
        operators: the calls of operators; None if they were not recorded.
    """
    gpu_id = find_sampled_gpu(attributed, process)
    if gpu_id is None:
        return None
    work = SampledWork(attributed, process, gpu_id, gpu.memory_bytes_per_s if gpu else 0)
    samples = work.samples
    clocks_hz = samples.values.get("sm_clock", np.zeros(0))
    highest_hz = max(gpu.clock_hz if gpu else 0, float(np.nanmax(clocks_hz, initial=0)))
    kernels = attributed.kernels
    return Counters(
        gpu_id=gpu_id,
        samples=len(samples.start),
        period_us=float(np.median(samples.end - samples.start)) / NS_PER_US,
        sm_count=gpu.sm_count if gpu else 0,
        peak_clock_mhz=highest_hz / _HZ_PER_MHZ or None,
        whole=next(iter(work.measure(np.zeros(len(work.is_own), np.int64), ("all work",))), None),
        phases=work.measure(*work.group_by_phase()),
        classes=work.measure(*work.group_by_class()),
        kernels=work.measure(kernels.code.astype(np.int64), kernels.names),
        modules=work.measure(*work.group_by_module()),
        operators=tuple(work.measure_operators(operators, len(windows))) if operators and windows else (),
        slow_steps=tuple(work.find_slow_steps(windows)) if windows else (),
    )


def find_sampled_gpu(attributed: AttributedTrace, process: int) -> int | None:
    """Returns the ID of the GPU on which a process runs; None if the GPU was not sampled, or is unknown."""
    trace = attributed.trace
    devices = trace.operations.device[trace.operations.process == process]
    if not trace.counters or not len(devices):
        return None
    only_gpu = next(iter(trace.metadata.gpus)) if len(trace.metadata.gpus) == 1 else None
    gpu_id = trace.metadata.gpu_of.get((pid_of(process), int(devices[0])), only_gpu)
    return gpu_id if gpu_id in trace.counters else None


class SampledWork:
    """The samples of one GPU, and the operations of a process that run in each of them.

    Attributes:
        samples: the samples.
        is_own: shape (operations,), True for the operations of the process on this GPU outside warm-up.
    """

    def __init__(self, attributed: AttributedTrace, process: int, gpu_id: int, memory_bytes_per_s: float) -> None:
        self._attributed, self._memory_bytes_per_s = attributed, memory_bytes_per_s
        trace = attributed.trace
        self.samples: GpuSamples = trace.counters[gpu_id]
        operations = trace.operations
        first, pair = distinct_rows(operations.process, operations.device)
        pairs = zip(operations.process[first].tolist(), operations.device[first].tolist(), strict=True)
        gpu_of_pair = [trace.metadata.gpu_of.get((pid_of(owner), device), gpu_id) for owner, device in pairs]
        on_gpu = np.flatnonzero(np.array(gpu_of_pair)[pair] == gpu_id)
        on_gpu = on_gpu[np.argsort(operations.start[on_gpu], kind="stable")]
        self.is_own: Bools = (operations.process == process) & ~attributed.is_warmup
        start, end = operations.start[on_gpu], operations.end[on_gpu]
        #: The time of each sample in which an operation runs, and the pairs of a sample and an operation that runs in
        #: it.
        self._busy_ns = Cover.from_intervals(start, end).covered_within(self.samples.start, self.samples.end)
        position, self._sample, _, _ = find_overlaps(self.samples.start, self.samples.end, start, end)
        self._operation = on_gpu[position]

    @cached_property
    def _length_ns(self) -> Ints:
        return self.samples.end - self.samples.start

    def find_samples(self, code: Ints) -> Ints:
        """Returns the code of the operations that run alone in each sample, or -1; shape (samples,).

        Args:
            code: the code of each operation of the trace, or -1.
        """
        codes = np.where(self.is_own, code, NONE)[self._operation]
        lowest, highest = np.full(len(self._length_ns), np.iinfo(np.int64).max), np.full(len(self._length_ns), NONE)
        np.minimum.at(lowest, self._sample, codes)
        np.maximum.at(highest, self._sample, codes)
        is_alone = (lowest == highest) & (self._busy_ns >= _MIN_COVERED_SHARE * self._length_ns)
        return np.where(is_alone, highest, NONE)

    def measure(self, code: Ints, names: Sequence[str], min_samples: int = MIN_SAMPLES) -> tuple[CounterRow, ...]:
        """Returns the figures of each group of operations with enough samples, the group with the most samples first.

        Args:
            code: the index in ``names`` of the group of each operation of the trace, or -1.
            names: the name of each group.
            min_samples: the number of samples below which a figure is left out.
        """
        group = self.find_samples(code)
        counts = np.bincount(group[group != NONE], minlength=len(names))
        rows = []
        for index in np.argsort(-counts, kind="stable")[:_MAX_ROWS].tolist():
            if counts[index] >= min_samples:
                figures = self._measure_samples(np.flatnonzero(group == index), min_samples)
                rows.append(CounterRow(names[index], int(counts[index]), **figures))
        return tuple(rows)

    def _measure_samples(self, samples: Ints, min_samples: int) -> dict[str, float | None]:
        """Returns the figures of some samples by the name of the counter."""
        figures: dict[str, float | None] = {}
        for counter, values in self.samples.values.items():
            used = samples[~np.isnan(values[samples])]
            if len(used) < min_samples:
                continue
            activity, length_ns = values[used], self._length_ns[used]
            if counter == "sm_clock":
                figures["sm_clock_mhz"] = float(np.average(activity, weights=length_ns)) / _HZ_PER_MHZ
            else:
                figures[counter] = min(float((activity * length_ns).sum() / self._busy_ns[used].sum()), 1.0)
        reads, writes = figures.get("dram_read"), figures.get("dram_write")
        if reads is not None and writes is not None and self._memory_bytes_per_s:
            figures["dram_bytes_per_s"] = (reads + writes) * self._memory_bytes_per_s
        return figures

    def group_by_class(self) -> tuple[Ints, tuple[str, ...]]:
        """Returns the kernel class of each operation, and the names of the classes. Copies and fills are classes."""
        kernels, operations = self._attributed.kernels, self._attributed.trace.operations
        names, class_of_kernel = distinct_texts([*kernels.classes, *OPERATION_KINDS])
        of_kernel, of_kind = class_of_kernel[: len(kernels.classes)], class_of_kernel[len(kernels.classes) :]
        return np.where(kernels.code == NONE, of_kind[operations.kind], np.append(of_kernel, NONE)[kernels.code]), names

    def group_by_phase(self) -> tuple[Ints, tuple[str, ...]]:
        """Returns the phase of each operation in a measured instance, and the names of the phases."""
        instances = self._attributed.instances
        phase = np.append(np.where(instances.is_measured, instances.phase, NONE), NONE)
        return phase[self._attributed.instances_of_operations[0]], instances.phases

    def group_by_module(self) -> tuple[Ints, tuple[str, ...]]:
        """Returns the module of each operation, and the paths of the modules with ``*`` for the numbers of layers."""
        calls = find_module_calls(self._attributed)
        if calls is None:
            return np.full(len(self.is_own), NONE), ()
        names, code_of_path = distinct_texts([LAYER_NUMBER.sub("*", ".".join(path)) for path in calls.paths])
        path_of_call = np.append(code_of_path[calls.path], NONE)
        return path_of_call[CallFinder(self._attributed, calls).find_calls(np.arange(len(self.is_own)))], names

    def measure_operators(self, operators: OperatorWork, steps: int) -> Iterator[OperatorTraffic]:
        """Yields the bytes of a call of each operator with enough samples, the operator with the most samples first."""
        signatures = operators.calls.signatures
        signature = np.append(operators.calls.signature, NONE)[operators.call]
        trace_operations = self._attributed.trace.operations
        for row in self.measure(signature, tuple(map(str, range(len(signatures))))):
            index = int(row.name)
            of_signature = np.flatnonzero(self.is_own & (signature == index))
            calls = len(distinct(np.sort(operators.call[of_signature]))) * steps
            call_ns = (trace_operations.end - trace_operations.start)[of_signature].sum() / calls
            cost = estimate_cost(signatures[index])
            if row.dram_bytes_per_s is not None:
                yield OperatorTraffic(
                    signatures[index].name,
                    describe_shapes(signatures[index]),
                    row.samples,
                    row.dram_bytes_per_s * float(call_ns) / NS_PER_S,
                    cost.bytes if cost else None,
                )

    def find_slow_steps(self, windows: Windows) -> Iterator[SlowStep]:
        """Yields the steps that are longer than the median, and whose clock is lower than that of the median step."""
        clock_hz = self.samples.values.get("sm_clock")
        if clock_hz is None:
            return
        used = np.flatnonzero((self._busy_ns >= _MIN_COVERED_SHARE * self._length_ns) & ~np.isnan(clock_hz))
        step = np.searchsorted(windows.start, self.samples.start[used], side="right") - 1
        is_in_step = (step >= 0) & (self.samples.end[used] <= windows.end[step])
        used, step = used[is_in_step], step[is_in_step]
        counts = np.bincount(step, minlength=len(windows))
        clocks_hz = np.bincount(step, clock_hz[used], minlength=len(windows)) / np.maximum(counts, 1)
        lengths_ns, is_sampled = windows.end - windows.start, counts >= MIN_SAMPLES
        if not is_sampled.any():
            return
        is_slow = is_sampled & (lengths_ns > _SLOW_STEP * np.median(lengths_ns))
        is_slow &= clocks_hz < LOW_CLOCK * np.median(clocks_hz[is_sampled])
        for number in np.flatnonzero(is_slow).tolist():
            ms, mhz = float(lengths_ns[number]) / NS_PER_MS, float(clocks_hz[number]) / _HZ_PER_MHZ
            yield SlowStep(number + 1, ms, mhz, int(counts[number]))
