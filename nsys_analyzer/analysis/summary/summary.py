"""The figures of one process of one capture."""

from __future__ import annotations

from dataclasses import dataclass, field

from nsys_analyzer.analysis.findings.finding import Diagnosis
from nsys_analyzer.analysis.modules.module import Modules
from nsys_analyzer.analysis.ranges.phases import OTHER_STEP, STEP
from nsys_analyzer.analysis.ranks.member import Member
from nsys_analyzer.analysis.steps.step import StepSummary
from nsys_analyzer.analysis.summary.device_memory import DeviceMemory
from nsys_analyzer.analysis.summary.profiler_cost import ProfilerCost
from nsys_analyzer.analysis.summary.statistics import ClassRow, KernelRow, MemoryRow, Stats, share_of
from nsys_analyzer.analysis.tracks.tracks import Tracks
from nsys_analyzer.analysis.transformer.attention import AttentionSummary
from nsys_analyzer.analysis.transformer.models import Configuration
from nsys_analyzer.configuration import Run
from nsys_analyzer.text import Words
from nsys_analyzer.trace.metadata import Gpu, Metadata

#: The states of a capture.
STATUSES = ("ok", "oom", "partial", "no_kernels", "failed", "timeout", "not_profiled")
#: Phases with less of the GPU time than this hide too much to answer for a capture alone.
_NEARLY_ALL = 0.9
#: Passes of one program launch about as many kernels each.
_EVEN = 1.5


@dataclass(frozen=True)
class ThreadShare:
    """A thread that launches kernels of a phase: its name, its ID, and kernels per instance."""

    thread: str
    tid: int
    kernels_per_instance: float


@dataclass(frozen=True)
class PhaseSummary:
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
        gpu_lag_ms: by how much its GPU work ends after its range, 0 where it ends before.
        wall_values_ms, busy_values_ms: those of each instance; of very many those of some, evenly spread.
    """

    phase: str
    instances: int
    launch_threads: tuple[ThreadShare, ...]
    kernels_per_instance: float
    gpu_span_ms: Stats
    gpu_busy_ms: Stats
    kernel_time_ms: Stats
    classes: tuple[ClassRow, ...]
    kernels: tuple[KernelRow, ...]
    memory: tuple[MemoryRow, ...]
    range: str = ""
    warmup_instances: int = 0
    incomplete_instances: int = 0
    wall_ms: Stats = field(default_factory=Stats)
    python_ms: Stats | None = None
    synchronized: bool = False
    holds_backward: bool = False
    inferred: bool = False
    gpu_lag_ms: Stats = field(default_factory=Stats)
    profiler_cost: ProfilerCost | None = None
    kernels_least: int = 0
    kernels_most: int = 0
    wall_values_ms: tuple[float, ...] = ()
    busy_values_ms: tuple[float, ...] = ()

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
        operations: all GPU operations (copies, fills and graphs too).
        extent_ms: from the first to the last moment of any operation, API call or range of the process.
        shortest_wait_ms: from a launch to its operation's start, below 0 by the clocks' error at most.
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
    operations: int
    warmup_ms: float
    extent_ms: float
    shortest_wait_ms: float | None


@dataclass(frozen=True)
class Unprofiled:
    """Times by Python's clock around synchronised phases, where no profiler slowed them; None is unknown.

    Attributes:
        status: "ok", "oom", "failed", "timeout", "missing" or a word of the timings file; ``message`` says why.
        phases: phase to its times in ms.
        device: "cuda" or "cpu".
        doubts: phase to the reasons why its time cannot be right.
    """

    status: str
    message: str = ""
    phases: dict[str, Stats] = field(default_factory=dict)
    warmup_steps: int | None = None
    device: str | None = None
    peak_memory_bytes: int | None = None
    doubts: dict[str, tuple[str, ...]] = field(default_factory=dict)

    def typical_ms(self, phase: str) -> float | None:
        """The median time of a phase in ms, else the mean; None where it was not timed."""
        return self.phases[phase].typical if phase in self.phases else None

    def trusted_ms(self, phase: str) -> float | None:
        """The typical time of a phase in ms; None where it was not timed or is in doubt."""
        return None if self.doubts.get(phase) else self.typical_ms(phase)


@dataclass(frozen=True)
class CaptureSummary:
    """One process of one capture; None is unknown or not recorded.

    Attributes:
        process: its label in tables, empty where the capture has one that is not one of several ranks.
        source: the file's name.
        status: one of ``STATUSES``; ``message`` says why it is not ok.
        phases: in the order of a step.
        whole: every operation of the process outside warm-up as one phase of one instance.
        step: what fills its steps; None where it has none.
        modules: the time of each module of its model; None where no range names one.
        diagnosis: what slows them down; None where no launches are known.
        members: what each of its devices did step by step, where it exchanges something with others.
        tracks: every moment of its measured steps, where that was asked for.
    """

    name: str
    process: str
    source: str
    status: str
    message: str = ""
    pid: int | None = None
    gpu: Gpu | None = None
    metadata: Metadata | None = None
    configuration: Configuration | None = None
    phases: tuple[PhaseSummary, ...] = ()
    whole: PhaseSummary | None = None
    attention: AttentionSummary | None = None
    coverage: Coverage | None = None
    precisions: dict[str, float] = field(default_factory=dict)
    run: Run | None = None
    unprofiled: Unprofiled | None = None
    warnings: tuple[Words, ...] = ()
    device_memory: DeviceMemory | None = None
    rank: int | None = None
    step: StepSummary | None = None
    diagnosis: Diagnosis | None = None
    modules: Modules | None = None
    members: tuple[Member, ...] = field(default=(), compare=False, repr=False)
    tracks: Tracks | None = field(default=None, compare=False, repr=False)

    @property
    def title(self) -> str:
        """The name, with the process where there are several."""
        return f"{self.name} {self.process}".strip()

    @property
    def on_cpu(self) -> bool:
        """True where its kernels are operators that ran on the CPU, as the torch recorder writes them without a GPU."""
        return self.gpu is not None and self.gpu.is_cpu

    @property
    def tokens_per_second(self) -> float | None:
        """Batch size × context length ÷ the time of an unprofiled step."""
        step = self.unprofiled.typical_ms(STEP) if self.unprofiled else None
        known = self.configuration or Configuration()
        tokens = (known.batch_size or 0) * (known.context_length or 0)
        return tokens / (step / 1e3) if tokens and step else None

    def profiler_overhead(self, name: str) -> float | None:
        """A phase's wall time under the profiler ÷ its unprofiled time − 1; None where one of them is not known."""
        phase, unprofiled = self.phase(name), self.unprofiled.trusted_ms(name) if self.unprofiled else None
        profiled = phase.wall_ms.typical if phase and self.is_timed(phase) else None
        return profiled / unprofiled - 1 if profiled and unprofiled else None

    @property
    def ranges_on_gpu(self) -> bool:
        """True where its ranges lie on the GPU's timeline, and none lasts longer than the GPU's work in it."""
        return self.metadata is not None and self.metadata.ranges_on_gpu

    def is_timed(self, phase: PhaseSummary) -> bool:
        """True where the wall time of a phase holds its work: the range is the CPU's, and the GPU's work ends in it."""
        return phase.synchronized and not self.ranges_on_gpu

    @property
    def leaf_phases(self) -> tuple[PhaseSummary, ...]:
        """The phases other than the step."""
        return tuple(phase for phase in self.phases if phase.phase not in (STEP, OTHER_STEP))

    @property
    def share_in_phases(self) -> float | None:
        """The share of the whole capture's GPU time that lies in phases other than the step; None without GPU time."""
        total = self.whole.gpu_ms if self.whole else 0.0
        held = sum(phase.gpu_ms * phase.instances for phase in self.leaf_phases)
        return min(held / total, 1.0) if total else None  # a sum of floats may pass the whole by its last digit

    @property
    def phases_suffice(self) -> bool:
        """True where the phases stand for the capture: forward and nearly all GPU time are in them, none is uneven."""
        uneven = any(phase.uneven for phase in self.phases)
        return self.phase("forward") is not None and (self.share_in_phases or 0.0) >= _NEARLY_ALL and not uneven

    def phase(self, name: str) -> PhaseSummary | None:
        """A phase by name, if it has a measured instance."""
        return next((p for p in self.phases if p.phase == name and p.instances), None)
