"""The figures of one process of one capture: the one type that a report's JSON is written from and read by."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Literal

import msgspec

from nsys_analyzer.analysis.attribution.processes import make_pid_label
from nsys_analyzer.analysis.findings.finding import Diagnosis, Finding
from nsys_analyzer.analysis.kernels.class_rules import MODEL_CLASSES
from nsys_analyzer.analysis.ranges.phases import OTHER_STEP, STEP
from nsys_analyzer.analysis.ranks.member import Member
from nsys_analyzer.analysis.statistics import Stats
from nsys_analyzer.analysis.steps.profiler_cost import ProfilerCost
from nsys_analyzer.analysis.steps.serving import Serving
from nsys_analyzer.analysis.steps.step import Ms, StepSummary
from nsys_analyzer.analysis.steps.study import Study
from nsys_analyzer.analysis.steps.tracks import Tracks
from nsys_analyzer.analysis.summary.modules import Modules
from nsys_analyzer.analysis.summary.statistics import ClassRow, KernelRow, Leader, MatmulShare, MemoryRow, share_of
from nsys_analyzer.analysis.transformer.attention import AttentionSummary
from nsys_analyzer.analysis.transformer.models import Configuration
from nsys_analyzer.analysis.transformer.peaks import Verdict, judge_busy_share
from nsys_analyzer.configuration import Run
from nsys_analyzer.text import StrOrText
from nsys_analyzer.trace.metadata import CPU, Gpu, Metadata
from nsys_analyzer.trace.schema import MS_PER_S

#: What a time is: of a run without the profiler, that of the step estimated, the GPU's work alone, the profiled range.
TimeOf = Literal["unprofiled", "estimated", "gpu_busy", "wall"]


@dataclass(frozen=True)
class PhaseRate:
    """The FLOPs of the model in one instance of a phase against the time that it takes.

    Attributes:
        mfu: of the peak in the precision that ran; None where that is not known.
        mfu_of_best: of the GPU's highest peak.
    """

    phase: str
    model_flops: int
    ms: float
    time_of: TimeOf
    mfu: float | None
    mfu_of_best: float | None

    @property
    def flops_per_s(self) -> float:
        """Achieved."""
        return self.model_flops / (self.ms / MS_PER_S)


class ClassRate(msgspec.Struct, frozen=True):
    """The work of a class of kernels in one instance of a phase, and its rate while these kernels run.

    Attributes:
        kernel_class: a class, ``ATTENTION_MATMUL`` or a kind of copy.
        bytes: the least that were moved, counted and not measured; of copies, what they moved.
        bytes_per_s: None, too, where it is above the memory's peak: a cache has served part of it.
        peak_flops_per_s: in the precision of these kernels; None where that is not known, and for work without matmuls.
        flops_per_s: achieved; ``share_of_peak`` is of that peak.
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
        """Fills the rates."""
        rate, peak = None if self.flops is None else self.flops / (self.ms / MS_PER_S), self.peak_flops_per_s
        msgspec.structs.force_setattr(self, "flops_per_s", rate)
        msgspec.structs.force_setattr(self, "share_of_peak", rate / peak if rate is not None and peak else None)

    @property
    def intensity(self) -> float | None:
        """Arithmetic intensity, FLOP/byte, where neither rate is in doubt."""
        return self.flops / self.bytes if self.flops and self.bytes and self.bytes_per_s else None


@dataclass(frozen=True)
class Limits:
    """What a process achieves of its GPU's peaks; None is unknown, shares are fractions.

    Attributes:
        gpu: its name.
        precision: the one that most of the matmul time ran in.
        peak_flops: the mean of the roofs, by the matmul time of each.
        roofs: precision to peak FLOP/s, of those that ran.
        missing: what would have to be known: "model", "context length", "batch size", "peaks".
        notes: what the figures leave out, a sentence each.
        doubt: why figures are left out.
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
    notes: tuple[str, ...] = ()
    doubt: str | None = None

    def phase(self, name: str) -> PhaseRate | None:
        """A phase by its name."""
        return next((one for one in self.phases if one.phase == name), None)

    @property
    def chief(self) -> PhaseRate | None:
        """The step, else the first of its phases."""
        return self.phase(STEP) or next(iter(self.phases), None)


#: The states of a capture.
STATUSES = ("ok", "oom", "partial", "no_kernels", "failed", "timeout", "not_profiled")
#: Phases with less of the GPU time than this hide too much to answer for a capture alone.
_NEARLY_ALL = 0.9
#: What the kernels of a program that runs PyTorch have among their names.
_OF_TORCH = re.compile(r"\bat::|\bc10::|\bat_cuda|^triton_")
#: Passes of one program launch about as many kernels each.
_EVEN = 1.5


@dataclass(frozen=True)
class BusyShare:
    """GPU busy ÷ wall of one phase.

    Attributes:
        unprofiled: whether the wall time is of an unprofiled run.
        low, high: the share; equal where the wall time is unprofiled. ``high`` is 1 where nothing bounds it.
        estimated: the lowest and the highest share if the step's unprofiled length is estimated; else None.
        verdict: that of both ends of the share; "undecided" where these differ.
    """

    busy_ms: float
    wall_ms: float
    unprofiled: bool
    low: float
    high: float
    estimated: tuple[float, float] | None = None
    verdict: Verdict = field(init=False)

    def __post_init__(self) -> None:
        """Fills the verdict."""
        low, high = map(judge_busy_share, self.estimated or (self.low, self.high))
        vars(self)["verdict"] = low if low == high else "undecided"


class PhaseSummary(msgspec.Struct, frozen=True):
    """One phase over its measured instances; times, kernels and classes are of one instance, longest first.

    Attributes:
        range: the names its ranges have in the trace.
        instances, warmup_instances, incomplete_instances: measured, left out as warm-up, left out as partial.
        wall_ms: the range's own duration on the CPU's clock.
        gpu_span_ms: first start to last end of its GPU operations.
        gpu_busy_ms: the union of their intervals.
        kernel_time_ms: total kernel time; without figures where an opaque graph hides kernels.
        python_ms: timed by the target in an unprofiled run, None where no timings are known.
        synchronized: whether its GPU work ends before its ranges do, so that its wall time holds its work.
        holds_backward: whether a backward pass starts inside its first instance, as in a training step.
        inferred: found by a framework's ranges or operators, not by a range of the program's own.
        kernels_least, kernels_most: kernels of the instances with fewest and with most; 0 where it is not inferred.
        wall_values_ms, busy_values_ms: those of each instance; of very many those of some, evenly spread.
        busy_share: of the range's time; None where its wall time is not that of its work.
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
        """True where the kernels of an inferred phase vary so much that some instances may hold other work, too."""
        return self.inferred and self.kernels_most > _EVEN * max(self.kernels_least, 1)

    @property
    def label(self) -> str:
        """The name of the phase, marked where it is inferred."""
        return f"{self.phase} (inferred)" if self.inferred else self.phase

    @property
    def gpu_ms(self) -> float:
        """The summed durations of the kernels, copies, fills and opaque graphs of one instance."""
        return sum(row.ms_per_instance for row in self.kernels) + sum(row.ms_per_instance for row in self.memory)

    @property
    def opaque(self) -> bool:
        """True where an opaque graph hides kernels of the phase, so that no shares of them are known."""
        return any(row.kind == "graph" for row in self.memory)

    def launches_of(self, kernel_class: str) -> float:
        """The launches of a class in one instance."""
        return sum(row.launches_per_instance for row in self.classes if row.kernel_class == kernel_class)

    def share_of(self, kernel_class: str) -> float | None:
        """The share of a class in the total kernel time, 0 where it has no kernel; None where it is not known."""
        return share_of(self.classes, kernel_class)


@dataclass(frozen=True)
class Coverage:
    """The kernels of a process, counted where they were attributed: attributed + unattributed = all, each once.

    Attributes:
        attributed, unattributed: launched inside a range; outside every range or without a launch row.
        in_phases: those in a phase (the step and warm-up included).
        ambiguous: those launched while several threads had phases open.
        lost_launches: kernel launches whose kernel the capture lacks.
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
    """Times by Python's clock around synchronised phases, where no profiler slowed them; None is unknown.

    Attributes:
        status: "ok", "oom", "failed", "timeout", "missing" or a word of the timings file; ``message`` says why.
        phases: phase to its times in ms.
        device: "cuda" or "cpu".
        doubts: phase to the reasons why its time cannot be right.
        tokens_per_second: batch size × context length ÷ the time of a step.
        profiler_overhead: of each phase its wall time under the profiler ÷ its unprofiled time − 1.
    """

    status: str
    message: str = ""
    phases: dict[str, Stats] = field(default_factory=dict)
    warmup_steps: int | None = None
    device: str | None = None
    peak_memory_bytes: int | None = None
    doubts: dict[str, tuple[str, ...]] = field(default_factory=dict)
    tokens_per_second: float | None = None
    profiler_overhead: dict[str, float | None] = field(default_factory=dict)

    def typical_ms(self, phase: str) -> float | None:
        """The median time of a phase in ms, else the mean; None where it was not timed."""
        return self.phases[phase].typical if phase in self.phases else None

    def trusted(self, phase: str) -> Stats | None:
        """The times of a phase; None where it was not timed or is in doubt."""
        return None if self.doubts.get(phase) else self.phases.get(phase)

    def trusted_ms(self, phase: str) -> float | None:
        """The typical one of these times, ms."""
        stats = self.trusted(phase)
        return stats.typical if stats else None


@dataclass(frozen=True)
class Conditions:
    """The versions of the trace and the machine, "unknown" where the trace is silent, and the GPU's own figures."""

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
    """One process of one capture, as a report's JSON holds it; None is unknown or not recorded.

    Attributes:
        process: its label in tables, None where the capture has one that is not one of several ranks.
        source: the file's name.
        status: one of ``STATUSES``; ``message`` says why it is not ok.
        gpu: its name.
        precisions: shares of the matmul time by precision.
        phases: in the order of a step.
        whole: every operation of the process outside warm-up as one phase of one instance.
        share_in_phases: the share of the whole capture's GPU time that lies in phases other than the step.
        phases_suffice: whether the phases stand for the capture: forward and nearly all GPU time are in them, none is
            uneven.
        modules: the time of each module of its model; None where no range names one.
        step: what fills its steps; None where it has none.
        peak_memory_bytes: the most device memory over the measured phases, of PyTorch's tensors where its allocator was
            recorded, else as the driver hands it out.
        serving: the steps of an engine that serves requests by their kinds; None where no mark tells them.
        findings: what slows them down, the largest saving first, None where none can be derived;
            ``findings_missing`` says why some or all are missing.
    """

    name: str
    process: str | None
    source: str
    status: str
    message: str | None = None
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
    findings: tuple[Finding, ...] | None = None
    findings_missing: StrOrText | None = None
    peak_memory_bytes: int | None = None
    coverage: Coverage | None = None
    run: Run | None = None
    unprofiled: Unprofiled | None = None
    warnings: tuple[StrOrText, ...] = ()

    @property
    def title(self) -> str:
        """The name, with the process where there are several."""
        return f"{self.name} {self.process or ''}".strip()

    def __repr__(self) -> str:
        """Returns one line: a session or a notebook shows it."""
        steps = f"{self.step.instances} × {self.step.length_ms:.2f} ms profiled" if self.step else "unknown"
        return f"<{type(self).__name__} {self.title}: {self.status}, steps {steps}, {len(self.phases)} phases>"

    @property
    def hardware(self) -> str:
        """The GPU that it ran on, or of a run without one the processor; empty where it is not known."""
        run = self.run or Run()
        if self.on_cpu or run.device == "cpu":
            return " ".join(filter(None, (CPU, run.host_cpu)))
        return self.gpu or run.gpu or ""

    @property
    def shares_gpu(self) -> bool:
        """Whether only its ID tells the process from others of its capture, on the same GPU."""
        return self.pid is not None and self.process == make_pid_label(self.pid)

    @property
    def has_no_kernel(self) -> bool:
        """True where it was read and holds no kernel, and no graph that may hide some."""
        hidden = self.whole is not None and self.whole.opaque
        return self.coverage is not None and not self.coverage.kernels and not hidden

    @property
    def is_torch(self) -> bool:
        """False where nsys recorded every kernel of a program, and none of PyTorch's is among them."""
        if self.profiler != "nsys" or self.whole is None or self.whole.opaque:
            return True
        return any(_OF_TORCH.search(row.name) for row in self.whole.kernels)

    @property
    def trains(self) -> bool:
        """Whether a backward pass or an optimizer is seen."""
        seen = any(self.phase(name) for name in ("backward", "optimizer"))
        return seen or any(row.kernel_class == "optimizer" for row in (self.whole.kernels if self.whole else ()))

    @property
    def times_calls(self) -> bool:
        """Whether hooks timed and counted whole generations, while each step of the capture is one token."""
        of_tokens = self.serving is not None or (self.step is not None and self.step.source == "phases")
        return self.run is not None and self.run.timed_by == "hooks" and of_tokens and not self.trains

    @property
    def holds_model(self) -> bool:
        """False where every kernel is known, and none is of a class that models are made of."""
        whole = self.whole
        return whole is None or whole.opaque or any(row.kernel_class in MODEL_CLASSES for row in whole.classes)

    @property
    def on_cpu(self) -> bool:
        """True where its kernels are operators that ran on the CPU, as the torch recorder writes them without a GPU."""
        return self.gpu == CPU

    @property
    def leaf_phases(self) -> tuple[PhaseSummary, ...]:
        """The phases other than the step."""
        return tuple(phase for phase in self.phases if phase.phase not in (STEP, OTHER_STEP))

    def phase(self, name: str) -> PhaseSummary | None:
        """A phase by name, if it has a measured instance."""
        return next((p for p in self.phases if p.phase == name and p.instances), None)


@dataclass(frozen=True, repr=False)
class CaptureSummary(Summary):
    """A process of a capture with what is no part of its report's JSON: what its analysis and a timeline need.

    Attributes:
        device: its GPU.
        diagnosis: what slows its steps down; None where no launches are known.
        study: some of the steps in detail, None where no launch is known.
        members: what each of its devices did step by step, where it exchanges something with others.
        tracks: every moment of its measured steps, where that was asked for.
        memory_events: the number of events that tell its peak memory.
    """

    device: Gpu | None = None
    metadata: Metadata | None = None
    diagnosis: Diagnosis | None = None
    study: Study | None = field(default=None, compare=False, repr=False)
    members: tuple[Member, ...] = field(default=(), compare=False, repr=False)
    tracks: Tracks | None = field(default=None, compare=False, repr=False)
    memory_events: int = 0

    def __post_init__(self) -> None:
        """Fills what follows from the device, the profiler's metadata and the phases."""
        told, gpu = self.metadata, self.device
        known: dict[str, object] = {"gpu": gpu.name} if gpu else {}
        if told:
            known |= {"profiler": told.profiler, "profiler_version": told.profiler_version}
            known["conditions"] = Conditions(
                *(told.schema_version, told.platform, told.driver, told.runtime, told.cpu, told.os),
                gpu.memory_bytes or None if gpu else None,
                gpu.sm_count or None if gpu else None,
            )
        total = self.whole.gpu_ms if self.whole else 0.0
        held = sum(phase.gpu_ms * phase.instances for phase in self.leaf_phases)
        share = min(held / total, 1.0) if total else None  # a sum of floats may pass the whole by its last digit
        uneven = any(phase.uneven for phase in self.phases)
        suffice = self.phase("forward") is not None and (share or 0.0) >= _NEARLY_ALL and not uneven
        vars(self).update(known, share_in_phases=share, phases_suffice=suffice)

    def profiler_overhead(self, name: str) -> float | None:
        """A phase's wall time under the profiler ÷ its unprofiled time − 1; None where one of them is not known."""
        phase, unprofiled = self.phase(name), self.unprofiled.trusted_ms(name) if self.unprofiled else None
        profiled = phase.wall_ms.typical if phase and phase.synchronized else None
        return profiled / unprofiled - 1 if profiled and unprofiled else None
