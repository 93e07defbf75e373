"""The figures that have a name, for ``ask``, ``check``, ``explain --budget`` and agents.

Each figure is a function. A new figure is a new function here.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TypeVar

from nsys_analyzer.analysis.findings.finding import Finding
from nsys_analyzer.analysis.kernels.class_rules import UNKNOWN
from nsys_analyzer.analysis.ranks.run import RankFigures
from nsys_analyzer.analysis.statistics import Stats
from nsys_analyzer.analysis.steps.step import StepSummary, UnprofiledStep
from nsys_analyzer.analysis.summary.kernel_tables import KernelRow, find_class_share
from nsys_analyzer.analysis.summary.modules import Module, Modules
from nsys_analyzer.analysis.summary.summary import CaptureSummary, Limits, PhaseSummary, Unprofiled
from nsys_analyzer.analysis.transformer.attention import AttentionSummary
from nsys_analyzer.errors import (
    PROGRAM_ARGUMENTS,
    RECORD_COMMAND,
    RECORD_GRAPH_NODES_COMMAND,
    RECORD_ON_GPU_COMMAND,
    ConfigurationError,
)
from nsys_analyzer.questions.figure import COPIES, MEMORY_EVENTS, OPERATIONS, RANGES, TIMINGS, Obstacle, Part, Subject
from nsys_analyzer.questions.figure import FIGURES as FIGURES
from nsys_analyzer.questions.figure import figure as figure
from nsys_analyzer.report.sections.limits import OPTIONS, explain_missing_mfu
from nsys_analyzer.text import plain, plural

Row = TypeVar("Row", KernelRow, Module)


# --- conditions under which figures are unknown


def _unprofiled_step(subject: Subject) -> UnprofiledStep | None:
    return subject.capture.step.unprofiled_ms if subject.capture.step else None


def _is_timed(subject: Subject) -> bool:
    """Tells whether the step was timed without the profiler."""
    step = _unprofiled_step(subject)
    return step is not None and step.timed


def _has_unnamed_kernels(subject: Subject) -> bool:
    phase = subject.phase
    return phase is not None and find_class_share(phase.classes, UNKNOWN) is None


def _has_doubtful_time(subject: Subject) -> bool:
    unprofiled = subject.capture.unprofiled
    return unprofiled is not None and bool(unprofiled.doubts.get(subject.arguments["phase"]))


ON_CPU = Obstacle(lambda subject: subject.capture.on_cpu, "The program ran on the CPU", RECORD_ON_GPU_COMMAND)
OPAQUE_GRAPHS = Obstacle(
    lambda subject: subject.phase and subject.phase.opaque, "CUDA graphs hide kernels in this capture",
    RECORD_GRAPH_NODES_COMMAND,
)  # fmt: skip
UNNAMED_KERNELS = Obstacle(
    _has_unnamed_kernels, "The capture holds kernels without a name", "nsys export --type sqlite REPORT"
)  # fmt: skip
NOT_TIMED = Obstacle(
    lambda subject: not _is_timed(subject), "The step was not timed without the profiler", RECORD_COMMAND
)
TIMED = Obstacle(
    _is_timed,
    "The step was timed without the profiler, and needs no estimate",
    "nsys-analyze ask CAPTURE step_unprofiled_ms",
)
DOUBTFUL_TIME = Obstacle(_has_doubtful_time, "The times without the profiler cannot be right", RECORD_COMMAND)


# --- parts of a summary


def _describe_phase(subject: Subject) -> str:
    phase = subject.phase
    if phase is None or "phase" not in subject.arguments:
        return "the capture without warm-up"
    return f"mean of {phase.instances} {plural(phase.instances, 'instance')} of {phase.label}"


def _describe_profiled_steps(subject: Subject) -> str:
    step = subject.capture.step
    if step is None:
        return "the capture without warm-up"
    count = step.wall_ms.n or 0
    return f"median of {count} {plural(count, 'step')} under the profiler, {plain(step.unit)}"


def _describe_typical_step(subject: Subject) -> str:
    return f"near the {_describe_profiled_steps(subject)}" if subject.capture.step else "the capture without warm-up"


def _describe_step(subject: Subject) -> str:
    """Returns what the one length of a step is of: a step without the profiler if that is known."""
    if _unprofiled_step(subject):
        return f"a step without the profiler{'' if _is_timed(subject) else ', estimated'}"
    return _describe_typical_step(subject)


def _describe_unprofiled(subject: Subject) -> str:
    return f"mean of {subject.arguments.get('phase')} without the profiler"


def _describe_rank(subject: Subject) -> str:
    steps = len(subject.rank.steps) if subject.rank else 0
    return f"mean of {steps} {plural(steps, 'step')} of all ranks under the profiler"


def _describe_lateness(subject: Subject) -> str:
    is_replayed = subject.rank is not None and not isinstance(subject.rank.lateness_ms, Stats)
    return "a step without the profiler, replayed" if is_replayed else _describe_rank(subject)


def _always(text: str) -> Callable[[Subject], str]:
    return lambda _: text


def _missing(why: str, needs: str) -> Callable[[Subject], tuple[str, str]]:
    return lambda _: (why, needs)


def _explain_missing_phase(subject: Subject) -> tuple[str, str]:
    phases = ", ".join(phase.phase for phase in subject.capture.phases if phase.instances)
    return f"The capture does not hold this phase, or this time of it. Its phases: {phases}", RECORD_COMMAND


def _explain_missing_finding(subject: Subject) -> tuple[str, str]:
    ids = ", ".join(finding.id for finding in subject.capture.findings or ())
    findings = plain(subject.capture.findings_missing or ids, "`")
    return f"The capture has no such finding: {findings}", "nsys-analyze explain CAPTURE"


def _explain_missing_rate(subject: Subject) -> tuple[str, str]:
    """Returns why the rate of a phase is unknown, and the command with the missing options."""
    limits, phase = subject.capture.limits, subject.arguments["phase"]
    if limits is None:
        return "Nothing in the capture ran on a GPU", RECORD_ON_GPU_COMMAND
    rated = ", ".join(rate.phase for rate in limits.phases if rate.phase != phase and rate.mfu is not None)
    why = f"The FLOPs or the time of {phase} are not known. Those of these phases are known: {rated}" if rated else ""
    missing = limits.missing if "peaks" not in limits.missing else ()
    options = [f"{OPTIONS[name]} {'NAME' if name == 'model' else 'N'}" for name in missing if name in OPTIONS]
    needs = f"nsys-analyze ask CAPTURE QUESTION {' '.join(options)}" if options else ""
    return why or plain(explain_missing_mfu(limits), "`").removesuffix("."), needs


_WITHOUT_STEPS = _missing("The steps of the capture, or this time of a step, are not known", RECORD_COMMAND)
_ONE_RANK = _missing(
    "The captures are not from several ranks of one run", f"nsys-analyze run --nproc 2 {PROGRAM_ARGUMENTS}"
)
_WHOLE_CAPTURE = _always("the capture without warm-up")

GPU = Part[CaptureSummary](
    lambda subject: subject.capture, _WHOLE_CAPTURE, _missing("The capture names no GPU", RECORD_COMMAND)
)  # fmt: skip
MEMORY = Part[CaptureSummary](
    lambda subject: subject.capture, _WHOLE_CAPTURE,
    _missing("Memory was not recorded", f"nsys-analyze run --memory {PROGRAM_ARGUMENTS}"),
)  # fmt: skip
PHASE = Part[PhaseSummary](lambda subject: subject.phase, _describe_phase, _explain_missing_phase, ("phase",))
#: The steps: all of those under the profiler, those near their median, and the step whose length reports state.
PROFILED_STEPS = Part[StepSummary](lambda subject: subject.capture.step, _describe_profiled_steps, _WITHOUT_STEPS)
TYPICAL_STEP = replace(PROFILED_STEPS, describe=_describe_typical_step)
STEP = replace(PROFILED_STEPS, describe=_describe_step)
UNPROFILED_STEP = Part[UnprofiledStep](_unprofiled_step, _always("a step without the profiler"), _WITHOUT_STEPS)
#: The times without the profiler: of a phase, and of a step.
UNPROFILED_PHASES = Part[Unprofiled](lambda subject: subject.capture.unprofiled, _describe_unprofiled,
    _missing("The phase was not timed without the profiler", RECORD_COMMAND),
)  # fmt: skip
UNPROFILED = Part[Unprofiled](
    lambda subject: subject.capture.unprofiled, _always("a step without the profiler"),
    _missing("The step was not timed without the profiler, or its number of tokens is not known", RECORD_COMMAND),
)  # fmt: skip
FINDINGS = Part[tuple[Finding, ...]](
    lambda subject: subject.capture.findings, _always("a step without the profiler, replayed"),
    _explain_missing_finding,
)  # fmt: skip
ATTENTION = Part[AttentionSummary](
    lambda subject: subject.capture.attention,
    lambda subject: f"mean of one {subject.capture.attention.per}" if subject.capture.attention else "",
    _missing(
        "The capture does not show which kernels belong to it",
        "nsys-analyze ask CAPTURE QUESTION --phase-name softmax=RANGE",
    ),
)
MODULES = Part[Modules](
    lambda subject: subject.capture.modules,
    lambda subject: f"mean of one {subject.capture.modules.per}" if subject.capture.modules else "",
    _missing("No range names a module", f"nsys-analyze run --modules {PROGRAM_ARGUMENTS}"),
)
LIMITS = Part[Limits](
    lambda subject: subject.capture.limits, lambda subject: subject.arguments["phase"], _explain_missing_rate
)  # fmt: skip
RANK = Part[RankFigures](lambda subject: subject.rank, _describe_rank, _ONE_RANK)
RANK_LATENESS = replace(RANK, describe=_describe_lateness)


# --- figures of steps


@figure(GPU, "text")
def gpu(capture: CaptureSummary) -> str | None:
    """Returns the GPU's name."""
    return capture.gpu


@figure(PROFILED_STEPS, "count")
def steps(step: StepSummary) -> int | None:
    """Returns the number of measured steps."""
    return step.wall_ms.n


@figure(STEP, "ms")
def step_ms(step: StepSummary) -> float:
    """Returns the length of a step: unprofiled if it was timed, else estimated, else profiled."""
    return step.reported_ms


@figure(UNPROFILED_STEP, "ms", rows=TIMINGS, obstacles=(NOT_TIMED,))
def step_unprofiled_ms(step: UnprofiledStep) -> float:
    """Returns the length of a step without the profiler."""
    return step.low


@figure(UNPROFILED_STEP, "ms", obstacles=(TIMED,))
def step_estimated_ms(step: UnprofiledStep) -> float | tuple[float, float]:
    """Returns the estimated length of a step without the profiler."""
    return step.low if step.low == step.high else (step.low, step.high)


@figure(PROFILED_STEPS, "ms")
def step_profiled_ms(step: StepSummary) -> Stats:
    """Returns the length of a step under the profiler."""
    return step.wall_ms


@figure(TYPICAL_STEP, "ms", obstacles=(ON_CPU,))
def step_compute_ms(step: StepSummary) -> float:
    """Returns the time of a profiled step in which kernels compute."""
    return step.compute_ms


@figure(TYPICAL_STEP, "ms", rows=COPIES, obstacles=(ON_CPU,))
def step_copy_ms(step: StepSummary) -> float:
    """Returns the time of a profiled step in which the GPU only copies."""
    return step.exposed_copy_ms


@figure(TYPICAL_STEP, "ms", obstacles=(ON_CPU,))
def step_communication_ms(step: StepSummary) -> float:
    """Returns the time of a profiled step in which the GPU only runs collectives."""
    return step.exposed_communication_ms


@figure(TYPICAL_STEP, "ms", rows=OPERATIONS, obstacles=(ON_CPU,))
def step_idle_ms(step: StepSummary) -> float:
    """Returns the time of a profiled step in which the GPU is idle."""
    return step.idle_ms


@figure(STEP, "fraction", rows=OPERATIONS, obstacles=(ON_CPU,))
def step_busy_share(step: StepSummary) -> float | None:
    """Returns the share of a step in which the GPU works; the step's length is that of step_ms."""
    return step.busy_share


@figure(TYPICAL_STEP, "fraction", rows=OPERATIONS, obstacles=(ON_CPU,))
def step_idle_share(step: StepSummary) -> float:
    """Returns the share of a profiled step in which the GPU is idle."""
    return step.idle_ms / step.length_ms


@figure(TYPICAL_STEP, "ms", needs=("cause",), rows=OPERATIONS, obstacles=(ON_CPU,))
def idle_cause_ms(step: StepSummary, cause: str) -> float:
    """Returns the time of a profiled step in which the GPU is idle for one cause."""
    return sum(row.ms for row in step.causes if row.cause == cause)


@figure(TYPICAL_STEP, "ms", needs=("class",), obstacles=(OPAQUE_GRAPHS, UNNAMED_KERNELS))
def step_class_ms(step: StepSummary, kernel_class: str) -> float:
    """Returns the time of a profiled step in which kernels of a class compute."""
    return sum(row.ms for row in step.classes if row.kernel_class == kernel_class)


@figure(TYPICAL_STEP, "fraction", needs=("class",), obstacles=(OPAQUE_GRAPHS, UNNAMED_KERNELS))
def step_class_share(step: StepSummary, kernel_class: str) -> float:
    """Returns the share of a profiled step in which kernels of a class compute."""
    return sum(row.ms for row in step.classes if row.kernel_class == kernel_class) / step.length_ms


@figure(TYPICAL_STEP, "count", obstacles=(OPAQUE_GRAPHS,))
def step_kernels(step: StepSummary) -> float:
    """Returns the number of kernels and fills in a step."""
    return step.launches


@figure(TYPICAL_STEP, "us", rows=OPERATIONS, obstacles=(ON_CPU,))
def launch_latency_us(step: StepSummary) -> float | None:
    """Returns the time from a launch to the start of its operation."""
    return step.launch_latency_us.median if step.launch_latency_us else None


@figure(FINDINGS, "ms", needs=("finding",), obstacles=(ON_CPU,))
def saves_ms(findings: tuple[Finding, ...], finding_id: str) -> float | tuple[float, float] | None:
    """Returns the saving per step that a finding predicts."""
    for finding in findings:
        if finding.id == finding_id:
            low, high = finding.saves_ms_low, finding.saves_ms_high
            return low if low == high else (low, high)
    return None


# --- figures of phases, and of the whole capture


@figure(PHASE, "ms", rows=RANGES)
def wall_ms(phase: PhaseSummary) -> Stats:
    """Returns the duration on the CPU's clock."""
    return phase.wall_ms


@figure(UNPROFILED_PHASES, "ms", needs=("phase",), rows=TIMINGS, obstacles=(DOUBTFUL_TIME,))
def unprofiled_ms(unprofiled: Unprofiled, phase: str) -> Stats | None:
    """Returns the duration without the profiler."""
    return unprofiled.phases.get(phase)


@figure(PHASE, "ms", rows=OPERATIONS, obstacles=(ON_CPU,))
def gpu_busy_ms(phase: PhaseSummary) -> Stats:
    """Returns the union of its GPU operations."""
    return phase.gpu_busy_ms


@figure(PHASE, "ms", rows=OPERATIONS, obstacles=(ON_CPU,))
def gpu_span_ms(phase: PhaseSummary) -> Stats:
    """Returns the time from the first start to the last end of its GPU operations."""
    return phase.gpu_span_ms


@figure(PHASE, "fraction", rows=OPERATIONS, obstacles=(ON_CPU,))
def busy_share(phase: PhaseSummary) -> float | tuple[float, float] | None:
    """Returns the GPU's busy time divided by the duration on the CPU's clock."""
    if phase.busy_share is None:
        return None
    low, high = phase.busy_share.low, phase.busy_share.high
    return low if low == high else (low, high)


@figure(PHASE, "ms", obstacles=(OPAQUE_GRAPHS,))
def kernel_sum_ms(phase: PhaseSummary) -> Stats:
    """Returns the total kernel time."""
    return phase.kernel_time_ms


@figure(PHASE, "count", obstacles=(OPAQUE_GRAPHS,))
def kernels(phase: PhaseSummary) -> float:
    """Returns the number of kernels in one instance."""
    return phase.kernels_per_instance


@figure(PHASE, "count", rows=RANGES)
def instances(phase: PhaseSummary) -> int:
    """Returns the number of measured instances."""
    return phase.instances


@figure(PHASE, "count", rows=COPIES, obstacles=(ON_CPU,))
def copies(phase: PhaseSummary) -> float:
    """Returns the number of copies in one instance."""
    return sum(row.operations_per_instance for row in phase.memory if row.kind == "memcpy")


@figure(PHASE, "ms", rows=COPIES, obstacles=(ON_CPU,))
def copy_ms(phase: PhaseSummary) -> float:
    """Returns the total time of copies."""
    return sum(row.ms_per_instance for row in phase.memory if row.kind == "memcpy")


def _launches_of_class(phase: PhaseSummary, kernel_class: str) -> float:
    return phase.launches_of(kernel_class)


@figure(
    PHASE, "ms", needs=("class",), obstacles=(OPAQUE_GRAPHS, UNNAMED_KERNELS), count_kernels=_launches_of_class
)  # fmt: skip
def class_ms(phase: PhaseSummary, kernel_class: str) -> float:
    """Returns the total time of the kernels of a class."""
    return sum(row.ms_per_instance for row in phase.classes if row.kernel_class == kernel_class)


@figure(
    PHASE, "count", needs=("class",), obstacles=(OPAQUE_GRAPHS, UNNAMED_KERNELS), count_kernels=_launches_of_class
)  # fmt: skip
def class_launches(phase: PhaseSummary, kernel_class: str) -> float:
    """Returns the number of kernels of a class in one instance."""
    return phase.launches_of(kernel_class)


@figure(
    PHASE, "fraction", needs=("class",), obstacles=(OPAQUE_GRAPHS, UNNAMED_KERNELS), count_kernels=_launches_of_class
)  # fmt: skip
def class_share(phase: PhaseSummary, kernel_class: str) -> float:
    """Returns the share of the total kernel time in kernels of a class."""
    return sum(row.share for row in phase.classes if row.kernel_class == kernel_class)


@figure(PHASE, "text", obstacles=(OPAQUE_GRAPHS,))
def top_kernel(phase: PhaseSummary) -> str | None:
    """Returns the name of the kernel with the most time."""
    return phase.kernels[0].name if phase.kernels else None


@figure(PHASE, "ms", needs=("kernel",), obstacles=(OPAQUE_GRAPHS,))
def kernel_ms(phase: PhaseSummary, kernel: str) -> float:
    """Returns the total time of one kernel, found by a part of its name."""
    return _find_kernel(phase, kernel).ms_per_instance


@figure(PHASE, "count", needs=("kernel",), obstacles=(OPAQUE_GRAPHS,))
def kernel_launches(phase: PhaseSummary, kernel: str) -> float:
    """Returns the number of launches of one kernel, found by a part of its name."""
    return _find_kernel(phase, kernel).launches_per_instance


# --- figures of the model


@figure(ATTENTION, "ms", obstacles=(OPAQUE_GRAPHS,))
def softmax_ms(attention: AttentionSummary) -> float | None:
    """Returns the time of the softmax of attention."""
    return attention.softmax_ms


@figure(ATTENTION, "ms", obstacles=(OPAQUE_GRAPHS,))
def attention_matmul_ms(attention: AttentionSummary) -> float | None:
    """Returns the time of the attention matmuls."""
    return attention.matmul_ms


@figure(MODULES, "ms", needs=("module",), obstacles=(OPAQUE_GRAPHS,))
def module_ms(modules: Modules, module: str) -> float:
    """Returns the kernel time of a module and all modules in it, forward and backward."""
    return _find_module(modules, module).ms


@figure(MODULES, "ms", needs=("module",), obstacles=(OPAQUE_GRAPHS,))
def module_forward_ms(modules: Modules, module: str) -> float:
    """Returns the kernel time of a module and all modules in it, forward only."""
    return _find_module(modules, module).forward.ms


@figure(LIMITS, "fraction", needs=("phase",))
def mfu(limits: Limits, phase: str) -> float | None:
    """Returns the model FLOPs utilization: the model's FLOPs ÷ time ÷ peak."""
    rate = limits.phase(phase)
    return rate.mfu if rate else None


@figure(LIMITS, "flop", needs=("phase",))
def model_flops(limits: Limits, phase: str) -> int | None:
    """Returns the model's FLOPs in one instance."""
    rate = limits.phase(phase)
    return rate.model_flops if rate else None


@figure(MEMORY, "bytes", rows=MEMORY_EVENTS, obstacles=(ON_CPU,))
def peak_memory_bytes(capture: CaptureSummary) -> int | None:
    """Returns the most device memory in use."""
    return capture.peak_memory_bytes


@figure(UNPROFILED, "tokens/s", rows=TIMINGS)
def tokens_per_s(unprofiled: Unprofiled) -> float | None:
    """Returns the tokens of a step ÷ its length without the profiler."""
    return unprofiled.tokens_per_second


# --- figures of ranks


@figure(RANK_LATENESS, "ms")
def late_ms(rank: RankFigures) -> Stats | float | None:
    """Returns a rank's own time minus that of the fastest rank."""
    return rank.lateness_ms


@figure(RANK, "ms")
def collectives_ms(rank: RankFigures) -> float:
    """Returns the time in which a rank runs collectives, hidden or exposed."""
    return rank.communication_ms


@figure(RANK, "ms")
def waiting_ms(rank: RankFigures) -> float | None:
    """Returns the part of collectives_ms in which the last rank has not yet started the collective."""
    return rank.waiting_ms


# --- rows that are found by a part of their name


def _find_kernel(phase: PhaseSummary, name: str) -> KernelRow:
    """Returns the kernel with this name, or else the kernel whose name contains it.

    Raises:
        ConfigurationError: there is no such kernel, or there are several.
    """
    return _find_row("kernel", name, [(row.name, row) for row in phase.kernels], lambda full: name in full)


def _find_module(modules: Modules, path: str) -> Module:
    """Returns the module with this path, or else the module whose path ends in it.

    Raises:
        ConfigurationError: there is no such module, or there are several.
    """
    rows = [(module.path, module) for module in modules.modules]
    return _find_row("module", path, rows, lambda full: full.endswith(f".{path}"))


def _find_row(kind: str, name: str, named_rows: list[tuple[str, Row]], matches: Callable[[str], bool]) -> Row:
    rows = [row for full, row in named_rows if full == name] or [row for full, row in named_rows if matches(full)]
    if len(rows) != 1:
        raise ConfigurationError(f"{len(rows)} {kind}s match {name!r}", f"See: nsys-analyze {kind}s CAPTURE")
    return rows[0]
