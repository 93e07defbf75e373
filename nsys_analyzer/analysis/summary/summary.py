"""Defines the summary of one process of one capture, which a report's JSON is written from and read into."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Literal

import msgspec

from nsys_analyzer.analysis.attribution.processes import make_pid_label
from nsys_analyzer.analysis.counters.figures import Counters
from nsys_analyzer.analysis.facts import Fact, FactOrText
from nsys_analyzer.analysis.findings.finding import Diagnosis, Finding
from nsys_analyzer.analysis.kernels.class_rules import MODEL_CLASSES
from nsys_analyzer.analysis.memory.account import MemoryAccount
from nsys_analyzer.analysis.operators.account import StepAccount
from nsys_analyzer.analysis.operators.matching import OperatorWork
from nsys_analyzer.analysis.statistics import Stats
from nsys_analyzer.analysis.steps.member import Member
from nsys_analyzer.analysis.steps.profiler_cost import ProfilerCost
from nsys_analyzer.analysis.steps.serving import Serving
from nsys_analyzer.analysis.steps.step import Ms, StepSummary
from nsys_analyzer.analysis.steps.study import Study
from nsys_analyzer.analysis.steps.tracks import Tracks
from nsys_analyzer.analysis.summary.kernel_tables import (
    ClassRow,
    KernelRow,
    Leader,
    MatmulShare,
    MemoryRow,
    find_class_share,
)
from nsys_analyzer.analysis.summary.modules import Modules
from nsys_analyzer.analysis.transformer.attention import AttentionSummary
from nsys_analyzer.analysis.transformer.models import Configuration
from nsys_analyzer.analysis.transformer.peaks import BusyVerdict, judge_busy_share
from nsys_analyzer.configuration import GpuEnergy, Run
from nsys_analyzer.text import StrOrText
from nsys_analyzer.trace.metadata import CPU, Gpu, Metadata
from nsys_analyzer.trace.phase_names import OTHER_STEP, STEP
from nsys_analyzer.trace.schema import MS_PER_S

#: The origin of a time: a run without the profiler, the estimated length of a step, the GPU's busy time, or the range.
TimeOrigin = Literal["unprofiled", "estimated", "gpu_busy", "wall"]


@dataclass(frozen=True)
class PhaseRate:
    """The model's FLOPs in one instance of a phase, and the rate that follows from its time.

    Attributes:
        mfu: the rate as a share of the peak in the matmuls' precisions; None if these precisions are not known.
        mfu_of_best: the rate as a share of the GPU's highest peak.
    """

    phase: str
    model_flops: int
    ms: float
    time_of: TimeOrigin
    mfu: float | None
    mfu_of_best: float | None

    @property
    def flops_per_s(self) -> float:
        """Returns the achieved rate in FLOP/s."""
        return self.model_flops / (self.ms / MS_PER_S)


class ClassRate(msgspec.Struct, frozen=True):
    """The work of one kernel class in one instance of a phase, and its rates while these kernels run.

    Attributes:
        kernel_class: a class, ``ATTENTION_MATMUL``, or a kind of copy.
        bytes: a lower bound of the moved bytes, derived from shapes and not measured. For copies, the copied bytes.
        bytes_per_s: the rate of the moved bytes; None if above the memory's peak, because a cache served some bytes.
        peak_flops_per_s: the peak in the precision of these kernels; None if the precision is not known, and for work
            without matmuls.
        flops_per_s: the achieved rate.
        share_of_peak: the achieved rate as a share of ``peak_flops_per_s``.
    """

    kernel_class: str = msgspec.field(name="class")
    phase: str
    ms: float
    flops: int | float | None = None
    bytes: int | float | None = None
    bytes_per_s: float | None = None
    precision: str | None = None
    peak_flops_per_s: float | None = None
    flops_per_s: float | None = None
    share_of_peak: float | None = None

    def __post_init__(self) -> None:
        """Computes the rates from the work and the time."""
        rate, peak = None if self.flops is None else self.flops / (self.ms / MS_PER_S), self.peak_flops_per_s
        msgspec.structs.force_setattr(self, "flops_per_s", rate)
        msgspec.structs.force_setattr(self, "share_of_peak", rate / peak if rate is not None and peak else None)

    @property
    def intensity(self) -> float | None:
        """Returns the arithmetic intensity in FLOP/byte; None if the FLOPs or the bytes are unknown or in doubt."""
        return self.flops / self.bytes if self.flops and self.bytes and self.bytes_per_s else None


@dataclass(frozen=True)
class Limits:
    """The rates that a process achieves, compared with its GPU's peaks. A figure is None if it is unknown.

    Attributes:
        gpu: the name of the GPU.
        precision: the precision of most of the matmul time.
        peak_flops: the mean of the roofs in FLOP/s, weighted by the matmul time in each precision.
        roofs: each precision that ran, with its peak in FLOP/s.
        missing: what is missing to compute rates: "model", "context length", "batch size" or "peaks".
        notes: the assumptions behind the figures, and the work that the figures leave out.
        doubt: the reason why figures are left out.
    """

    gpu: str
    precision: str | None
    peak_flops: float | None
    best_precision: str | None
    best_peak_flops: float | None
    peak_bytes_per_s: float | None
    source: str | None
    roofs: tuple[tuple[str, float], ...]
    phases: tuple[PhaseRate, ...] = ()
    classes: tuple[ClassRate, ...] = ()
    missing: tuple[str, ...] = ()
    notes: tuple[FactOrText, ...] = ()
    doubt: FactOrText | None = None

    def phase(self, name: str) -> PhaseRate | None:
        """Returns the rate of the phase with this name; None if the phase has no rate."""
        return next((rate for rate in self.phases if rate.phase == name), None)

    @property
    def main_rate(self) -> PhaseRate | None:
        """Returns the rate of the step; the rate of the first phase if the rate of the step is unknown."""
        return self.phase(STEP) or next(iter(self.phases), None)


#: The statuses of a capture.
STATUSES = ("ok", "oom", "partial", "no_kernels", "failed", "timeout", "not_profiled")
#: The phases of a capture represent the whole capture if they contain at least this share of its GPU time.
_SUFFICIENT_SHARE_IN_PHASES = 0.9
#: Matches the names of PyTorch's own kernels.
_PYTORCH_KERNEL = re.compile(r"\bat::|\bc10::|\bat_cuda|^triton_")
#: An inferred phase is uneven if its largest instance has more than this factor times as many kernels as its smallest.
_UNEVEN_KERNELS_RATIO = 1.5


@dataclass(frozen=True)
class BusyShare:
    """The GPU's busy time in one phase divided by the phase's wall time.

    Attributes:
        unprofiled: whether the wall time was measured in a run without the profiler.
        low, high: the bounds of the share. Both are equal if the wall time is unprofiled. ``high`` is 1 if no upper
            bound is known.
        estimated: the bounds of the share if the unprofiled length of the step is an estimate; otherwise None.
        verdict: the verdict on both bounds; "undecided" if the verdicts on the two bounds differ.
    """

    busy_ms: float
    wall_ms: float
    unprofiled: bool
    low: float
    high: float
    estimated: tuple[float, float] | None = None
    verdict: BusyVerdict = field(init=False)

    def __post_init__(self) -> None:
        """Derives the verdict from the bounds of the busy share."""
        low, high = map(judge_busy_share, self.estimated or (self.low, self.high))
        vars(self)["verdict"] = low if low == high else "undecided"


class PhaseSummary(msgspec.Struct, frozen=True):
    """The figures of one phase over its measured instances.

    Figures of kernels and kernel classes are means over these instances.

    Attributes:
        range: the names of the phase's ranges in the trace.
        instances: the number of measured instances.
        warmup_instances: the number of instances that were left out as warm-up.
        incomplete_instances: the number of instances that were left out because they are incomplete.
        wall_ms: the duration of the range on the CPU's clock.
        gpu_span_ms: the time from the first start to the last end of the phase's GPU operations.
        gpu_busy_ms: the time in which at least one of the phase's GPU operations runs.
        kernel_time_ms: the total kernel time; empty if an opaque graph hides kernels.
        python_ms: the time of the phase in an unprofiled run; None if it was not measured.
        synchronized: whether the GPU work ends before the ranges do, so that the wall time includes the work.
        holds_backward: whether a backward pass starts inside the first instance, as in a training step.
        inferred: whether the phase was found by a framework's ranges or operators, not by a range of the program.
        kernels_least: the smallest number of kernels of an instance; 0 if the phase is not inferred.
        kernels_most: the largest number of kernels of an instance; 0 if the phase is not inferred.
        wall_values_ms, busy_values_ms: the times of each instance, or of an evenly spread sample if there are many.
        busy_share: the share of the range's time in which the GPU is busy; None if the range ends before its GPU work.
    """

    phase: str
    instances: int
    kernels_per_instance: float
    gpu_span_ms: Stats
    gpu_busy_ms: Stats
    kernel_time_ms: Stats = msgspec.field(name="kernel_sum_ms")
    classes: tuple[ClassRow, ...]
    kernels: tuple[KernelRow, ...]
    memory: tuple[MemoryRow, ...] = msgspec.field(name="memory_operations")
    range: str = ""
    warmup_instances: int = 0
    incomplete_instances: int = 0
    wall_ms: Stats = Stats()
    python_ms: Stats | None = None
    synchronized: bool = False
    holds_backward: bool = False
    inferred: bool = False
    profiler_cost: ProfilerCost | None = None
    kernels_least: int = 0
    kernels_most: int = 0
    wall_values_ms: tuple[Ms, ...] = ()
    busy_values_ms: tuple[Ms, ...] = ()
    busy_share: BusyShare | None = None

    @property
    def uneven(self) -> bool:
        """Returns whether the numbers of kernels show that instances of an inferred phase may include other work."""
        return self.inferred and self.kernels_most > _UNEVEN_KERNELS_RATIO * max(self.kernels_least, 1)

    @property
    def label(self) -> str:
        """Returns the name of the phase, marked if it is inferred."""
        return f"{self.phase} (inferred)" if self.inferred else self.phase

    @property
    def gpu_ms(self) -> float:
        """Returns the total duration of the kernels, copies, fills and opaque graphs of one instance, ms."""
        return sum(row.ms_per_instance for row in self.kernels) + sum(row.ms_per_instance for row in self.memory)

    @property
    def opaque(self) -> bool:
        """Returns whether an opaque graph hides kernels of the phase, so that the shares of its kernels are unknown."""
        return any(row.kind == "graph" for row in self.memory)

    def launches_of(self, kernel_class: str) -> float:
        """Returns the launches of a kernel class in one instance."""
        return sum(row.launches_per_instance for row in self.classes if row.kernel_class == kernel_class)

    def share_of(self, kernel_class: str) -> float | None:
        """Returns a class's share of the total kernel time: 0 if it has no kernel, None if the share is not known."""
        return find_class_share(self.classes, kernel_class)


@dataclass(frozen=True)
class Coverage:
    """The numbers of kernels of a process, by how the kernels were attributed. Each kernel counts once.

    Attributes:
        attributed: the kernels that were launched inside a range.
        unattributed: the kernels that were launched outside of all ranges, or whose launch was not recorded.
        in_phases: the kernels in a phase, including the step and warm-up.
        ambiguous: the kernels that were launched while several threads had phases open.
        how: the number of kernels by the method with which they were attributed.
        lost_launches: the kernel launches whose kernel is missing in the capture.
    """

    kernels: int
    attributed: int
    in_phases: int
    in_warmup: int
    unattributed: int
    kernel_ms: float
    attributed_ms: float
    unattributed_ms: float
    without_launch: int
    ambiguous: int
    how: dict[str, int]
    lost_launches: int
    warmup_ms: float


@dataclass(frozen=True)
class Unprofiled:
    """The times of phases in a run without a profiler. A figure is None if it is unknown.

    Attributes:
        status: "ok", "oom", "failed", "timeout", "missing", or another status that the timings file states.
        message: the reason for the status.
        phases: the times of each phase in ms.
        device: "cuda" or "cpu".
        doubts: the reasons why the time of a phase cannot be right, by phase.
        tokens_per_second: batch size × context length ÷ the time of a step.
        profiler_overhead: the wall time under the profiler ÷ the unprofiled time − 1, by phase.
        step_in_recorded_process: whether the recorded process made the timed steps, outside of the capture range.
    """

    status: str
    message: str = ""
    phases: dict[str, Stats] = field(default_factory=dict)
    warmup_steps: int | None = None
    device: str | None = None
    peak_memory_bytes: int | None = None
    doubts: dict[str, tuple[FactOrText, ...]] = field(default_factory=dict)
    tokens_per_second: float | None = None
    profiler_overhead: dict[str, float | None] = field(default_factory=dict)
    step_in_recorded_process: bool = False

    def typical_ms(self, phase: str) -> float | None:
        """Returns the median time of a phase in ms, or the mean if there is no median; None if it was not timed."""
        return self.phases[phase].typical if phase in self.phases else None

    def trusted(self, phase: str) -> Stats | None:
        """Returns the times of a phase; None if it was not timed or its time is in doubt."""
        return None if self.doubts.get(phase) else self.phases.get(phase)

    def trusted_ms(self, phase: str) -> float | None:
        """Returns the typical time of a phase in ms; None if it was not timed or its time is in doubt."""
        stats = self.trusted(phase)
        return stats.typical if stats else None


@dataclass(frozen=True)
class StepEnergy:
    """The energy of a step without the profiler, on all GPUs of the process.

    Attributes:
        joules, error_joules: the energy of a step, and the largest error by the updates of the GPU's counter.
        watts: the mean power during the steps.
        idle_watts: the power before the program used the GPUs; None if it is not known.
        steps: the number of steps whose energy was read.
        joules_per_token: the energy ÷ (batch size × context length); None if these are not known.
        gpus: the readings of each GPU.
    """

    joules: float
    error_joules: float
    watts: float
    idle_watts: float | None
    steps: int
    joules_per_token: float | None
    gpus: tuple[GpuEnergy, ...]


@dataclass(frozen=True)
class TokenCost:
    """The cost of a million tokens of a training or inference step, in the currency of the given prices.

    Attributes:
        electricity: the part by the price of a kWh; None if the price or the energy is not known.
        gpu_time: the part by the price of a GPU for an hour; None if the price or the length of a step is not known.
        total: the sum of the known parts.
    """

    electricity: float | None
    gpu_time: float | None
    total: float


@dataclass(frozen=True)
class Conditions:
    """The versions of the schema and of the software ("unknown" if not recorded), and the size of the GPU."""

    schema_version: str
    platform: str
    driver: str
    runtime: str
    cpu: str
    os: str
    gpu_memory_bytes: int | None
    gpu_sm_count: int | None


@dataclass(frozen=True)
class Summary:
    """The summary of one process of one capture, in the form of a report's JSON.

    A figure is None if it is unknown or was not recorded.

    Attributes:
        process: the label of the process in tables; None if the capture has a single process without a rank.
        source: the name of the file.
        status: one of ``STATUSES``. ``message`` gives the reason for a status other than ok.
        gpu: the name of the GPU.
        precisions: the share of the matmul time in each precision.
        phases: the phases in the order of a step.
        whole: all operations of the process outside warm-up, as one phase with one instance.
        share_in_phases: the share of the whole capture's GPU time in phases other than the step.
        phases_suffice: whether the phases represent the capture: they include forward and nearly all GPU time, and
            none is uneven.
        modules: the time of each module of the model; None if no range names a module.
        step: the figures of the steps; None if the capture has no step.
        peak_memory_bytes: the peak of device memory during the measured phases: memory of PyTorch's tensors if its
            allocator was recorded, else memory that the driver allocated.
        energy: the energy of a step without the profiler; None if it was not measured.
        cost: the cost of a million tokens; None if no price was given.
        serving: the steps of an inference engine by kind; None if no range marks them.
        account: the parts of a step above its attainable length; None if the attainable times of its operators are
            unknown.
        counters: the hardware counters of the GPU; None if they were not recorded, and JSON then lacks the key.
        memory: what fills the memory of the GPU; None if no snapshot was recorded, and JSON then lacks the key.
        findings: the causes that make steps longer, the largest saving first; None if no saving can be derived.
        findings_missing: the sentence that explains why some or all findings are missing.
    """

    name: str
    process: str | None
    source: str
    status: str
    message: FactOrText | None = None
    pid: int | None = None
    rank: int | None = None
    gpu: str | None = None
    profiler: str | None = None
    profiler_version: str | None = None
    conditions: Conditions | None = None
    configuration: Configuration | None = None
    precisions: dict[str, float] = field(default_factory=dict)
    phases: tuple[PhaseSummary, ...] = ()
    share_in_phases: float | None = None
    phases_suffice: bool = False
    whole: PhaseSummary | None = None
    top_kernels: tuple[Leader, ...] = ()
    matmul: MatmulShare | None = None
    attention: AttentionSummary | None = None
    limits: Limits | None = None
    modules: Modules | None = None
    step: StepSummary | None = None
    serving: Serving | None = None
    account: StepAccount | None = None
    counters: Counters | None = None
    memory: MemoryAccount | None = None
    findings: tuple[Finding, ...] | None = None
    findings_missing: StrOrText | None = None
    peak_memory_bytes: int | None = None
    coverage: Coverage | None = None
    run: Run | None = None
    unprofiled: Unprofiled | None = None
    energy: StepEnergy | None = None
    cost: TokenCost | None = None
    warnings: tuple[FactOrText, ...] = ()

    @property
    def title(self) -> str:
        """Returns the name of the capture, with the label of the process if it has one."""
        return f"{self.name} {self.process or ''}".strip()

    def __repr__(self) -> str:
        """Returns one line of text, which an interactive session or a notebook displays."""
        steps = f"{self.step.instances} × {self.step.length_ms:.2f} ms profiled" if self.step else "unknown"
        return f"<{type(self).__name__} {self.title}: {self.status}, steps {steps}, {len(self.phases)} phases>"

    @property
    def hardware(self) -> str:
        """Returns the name of the GPU, or of the processor for a run without a GPU; empty if it is not known."""
        run = self.run or Run()
        if self.on_cpu or run.device == "cpu":
            return " ".join(filter(None, (CPU, run.host_cpu)))
        return self.gpu or run.gpu or ""

    @property
    def tokens_per_step(self) -> int:
        """Returns the batch size × the context length; 0 if one of them is not known."""
        configuration = self.configuration or Configuration()
        return (configuration.batch_size or 0) * (configuration.context_length or 0)

    @property
    def shares_gpu(self) -> bool:
        """Returns whether the process shares its GPU with others, so that only its process ID identifies it."""
        return self.pid is not None and self.process == make_pid_label(self.pid)

    @property
    def has_no_kernel(self) -> bool:
        """Returns whether the capture was read, and has neither a kernel nor an opaque graph that may hide kernels."""
        hides_kernels = self.whole is not None and self.whole.opaque
        return self.coverage is not None and not self.coverage.kernels and not hides_kernels

    @property
    def is_torch(self) -> bool:
        """Returns whether the program may use PyTorch.

        The result is False only if nsys recorded every kernel, and no kernel is one of PyTorch's own kernels.
        """
        if self.profiler != "nsys" or self.whole is None or self.whole.opaque:
            return True
        return any(_PYTORCH_KERNEL.search(row.name) for row in self.whole.kernels)

    @property
    def trains(self) -> bool:
        """Returns whether the capture has a backward pass or an optimizer."""
        has_phase = any(self.phase(name) for name in ("backward", "optimizer"))
        return has_phase or any(row.kernel_class == "optimizer" for row in (self.whole.kernels if self.whole else ()))

    @property
    def times_calls(self) -> bool:
        """Returns whether hooks timed whole generations, while a step of the capture generates only one token."""
        is_step_a_token = self.serving is not None or (self.step is not None and self.step.source == "phases")
        return self.run is not None and self.run.timed_by == "hooks" and is_step_a_token and not self.trains

    @property
    def holds_model(self) -> bool:
        """Returns whether the program may run a model.

        The result is False only if every kernel is known and no kernel has a class that occurs in models.
        """
        if self.whole is None or self.whole.opaque:
            return True
        return any(row.kernel_class in MODEL_CLASSES for row in self.whole.classes)

    @property
    def on_cpu(self) -> bool:
        """Returns whether the program ran on the CPU, so that operators take the place of kernels."""
        return self.gpu == CPU

    @property
    def leaf_phases(self) -> tuple[PhaseSummary, ...]:
        """Returns all phases except the step, which contains them."""
        return tuple(phase for phase in self.phases if phase.phase not in (STEP, OTHER_STEP))

    def phase(self, name: str) -> PhaseSummary | None:
        """Returns the phase with this name; None if it has no measured instance."""
        return next((phase for phase in self.phases if phase.phase == name and phase.instances), None)


@dataclass(frozen=True, repr=False)
class CaptureSummary(Summary):
    """The summary of a process, with parts that only the analysis or the timeline needs and the JSON omits.

    Attributes:
        device: the GPU.
        diagnosis: the causes that make steps longer; None if no launch is known.
        missing_reason: the reason why some or all findings are missing; None if all findings were looked for.
        study: a few of the steps in full detail; None if no launch is known.
        operators: the calls of PyTorch's operators in the measured steps; None if they were not recorded.
        members: the record of each device of the process step by step, if the devices exchange data with others.
        tracks: every operation of the measured steps, if a timeline was requested.
        memory_events: the number of memory events from which the peak memory was computed.
    """

    device: Gpu | None = None
    metadata: Metadata | None = None
    diagnosis: Diagnosis | None = None
    missing_reason: Fact | None = None
    study: Study | None = field(default=None, compare=False, repr=False)
    operators: OperatorWork | None = field(default=None, compare=False, repr=False)
    members: tuple[Member, ...] = field(default=(), compare=False, repr=False)
    tracks: Tracks | None = field(default=None, compare=False, repr=False)
    memory_events: int = 0

    def __post_init__(self) -> None:
        """Computes the fields that follow from the device, the profiler's metadata and the phases."""
        metadata, gpu = self.metadata, self.device
        derived_figures: dict[str, object] = {"gpu": gpu.name} if gpu else {}
        if metadata:
            derived_figures |= {"profiler": metadata.profiler, "profiler_version": metadata.profiler_version}
            derived_figures["conditions"] = Conditions(
                *(metadata.schema_version, metadata.platform, metadata.driver, metadata.runtime),
                *(metadata.cpu, metadata.os),
                gpu.memory_bytes or None if gpu else None,
                gpu.sm_count or None if gpu else None,
            )
        total_ms = self.whole.gpu_ms if self.whole else 0.0
        in_phases_ms = sum(phase.gpu_ms * phase.instances for phase in self.leaf_phases)
        # At most 1, because rounding may lift the sum above the total.
        share = min(in_phases_ms / total_ms, 1.0) if total_ms else None
        is_uneven = any(phase.uneven for phase in self.phases)
        has_forward = self.phase("forward") is not None
        suffice = has_forward and (share or 0.0) >= _SUFFICIENT_SHARE_IN_PHASES and not is_uneven
        vars(self).update(derived_figures, share_in_phases=share, phases_suffice=suffice)

    @property
    def is_one_of_many_ranks(self) -> bool:
        """Returns whether no findings are derived, because the capture is one of many ranks that do similar work."""
        return self.missing_reason is not None and self.missing_reason.id == "one_of_many_ranks"

    def profiler_overhead(self, name: str) -> float | None:
        """Returns a phase's wall time under the profiler ÷ its unprofiled time − 1; None if one of them is unknown."""
        phase, unprofiled = self.phase(name), self.unprofiled.trusted_ms(name) if self.unprofiled else None
        profiled_ms = phase.wall_ms.typical if phase and phase.synchronized else None
        return profiled_ms / unprofiled - 1 if profiled_ms and unprofiled else None
