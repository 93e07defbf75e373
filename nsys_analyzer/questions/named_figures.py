"""Defines the named figures, for ``ask``, ``check``, ``explain --budget`` and agents.

Each figure is a function with the decorator ``figure``, which names the part of a summary that the figure is read from.
The rest of the function's docstring after "Returns" is what users read about the figure.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from nsys_analyzer.analysis.counters.figures import CounterRow
from nsys_analyzer.analysis.findings.finding import Finding
from nsys_analyzer.analysis.memory.account import MemoryAccount
from nsys_analyzer.analysis.operators.account import OperatorRow, StepAccount
from nsys_analyzer.analysis.ranks.run import RankFigures
from nsys_analyzer.analysis.statistics import Stats
from nsys_analyzer.analysis.steps.step import StepSummary, UnprofiledStep
from nsys_analyzer.analysis.summary.kernel_tables import KernelRow
from nsys_analyzer.analysis.summary.modules import Module, Modules
from nsys_analyzer.analysis.summary.summary import CaptureSummary, Limits, PhaseSummary, StepEnergy, Unprofiled
from nsys_analyzer.analysis.transformer.attention import AttentionSummary
from nsys_analyzer.errors import ConfigurationError
from nsys_analyzer.questions.figure import (
    DOUBTFUL_TIME,
    NOT_TIMED,
    ON_CPU,
    OPAQUE_GRAPHS,
    OPERATIONS,
    TIMED,
    UNNAMED_KERNELS,
    figure,
)
from nsys_analyzer.questions.figure import FIGURES as FIGURES
from nsys_analyzer.questions.summary_parts import (
    ACCOUNT_PART,
    ATTENTION_PART,
    COUNTERS_PART,
    ENERGY_PART,
    FINDINGS_PART,
    GPU_PART,
    LIMITS_PART,
    MEMORY_ACCOUNT_PART,
    MEMORY_GROWTH_PART,
    MEMORY_PART,
    MODULES_PART,
    OPERATORS_PART,
    PHASE_PART,
    PROFILED_STEPS_PART,
    RANK_LATENESS_PART,
    RANK_PART,
    STEP_PART,
    TYPICAL_STEP_PART,
    UNPROFILED_PHASE_PART,
    UNPROFILED_STEP_PART,
    UNPROFILED_TOKENS_PART,
)

Row = TypeVar("Row", KernelRow, Module)

# --- figures of steps


@figure(GPU_PART, "text")
def gpu(capture: CaptureSummary) -> str | None:
    """Returns the GPU's name."""
    return capture.gpu


@figure(PROFILED_STEPS_PART, "count")
def steps(step: StepSummary) -> int | None:
    """Returns the number of measured steps."""
    return step.wall_ms.n


@figure(STEP_PART, "ms")
def step_ms(step: StepSummary) -> float:
    """Returns the length of a step: without the profiler if it was timed or estimated, else under the profiler."""
    return step.reported_ms


@figure(UNPROFILED_STEP_PART, "ms", rows=("timing",), obstacles=(NOT_TIMED,))
def step_unprofiled_ms(step: UnprofiledStep) -> float:
    """Returns the length of a step without the profiler."""
    return step.low


@figure(UNPROFILED_STEP_PART, "ms", obstacles=(TIMED,))
def step_estimated_ms(step: UnprofiledStep) -> float | tuple[float, float]:
    """Returns the estimated length of a step without the profiler."""
    return step.low if step.low == step.high else (step.low, step.high)


@figure(PROFILED_STEPS_PART, "ms")
def step_profiled_ms(step: StepSummary) -> Stats:
    """Returns the length of a step under the profiler."""
    return step.wall_ms


@figure(TYPICAL_STEP_PART, "ms", obstacles=(ON_CPU,))
def step_compute_ms(step: StepSummary) -> float:
    """Returns the time of a profiled step in which kernels compute."""
    return step.compute_ms


@figure(TYPICAL_STEP_PART, "ms", rows=("memcpy",), obstacles=(ON_CPU,))
def step_copy_ms(step: StepSummary) -> float:
    """Returns the time of a profiled step in which the GPU only copies."""
    return step.exposed_copy_ms


@figure(TYPICAL_STEP_PART, "ms", obstacles=(ON_CPU,))
def step_communication_ms(step: StepSummary) -> float:
    """Returns the time of a profiled step in which the GPU only runs collectives."""
    return step.exposed_communication_ms


@figure(TYPICAL_STEP_PART, "ms", rows=OPERATIONS, obstacles=(ON_CPU,))
def step_idle_ms(step: StepSummary) -> float:
    """Returns the time of a profiled step in which the GPU is idle."""
    return step.idle_ms


@figure(STEP_PART, "fraction", rows=OPERATIONS, obstacles=(ON_CPU,))
def step_busy_share(step: StepSummary) -> float | None:
    """Returns the share of the step length step_ms in which the GPU works."""
    return step.busy_share


@figure(TYPICAL_STEP_PART, "fraction", rows=OPERATIONS, obstacles=(ON_CPU,))
def step_idle_share(step: StepSummary) -> float:
    """Returns the share of a profiled step in which the GPU is idle."""
    return step.idle_ms / step.length_ms


@figure(TYPICAL_STEP_PART, "ms", needs=("cause",), rows=OPERATIONS, obstacles=(ON_CPU,))
def idle_cause_ms(step: StepSummary, cause: str) -> float:
    """Returns the time of a profiled step in which the GPU is idle because of one cause."""
    return sum(row.ms for row in step.causes if row.cause == cause)


@figure(TYPICAL_STEP_PART, "ms", needs=("class",), obstacles=(OPAQUE_GRAPHS, UNNAMED_KERNELS))
def step_class_ms(step: StepSummary, kernel_class: str) -> float:
    """Returns the time of a profiled step in which kernels of a class compute."""
    return sum(row.ms for row in step.classes if row.kernel_class == kernel_class)


@figure(TYPICAL_STEP_PART, "fraction", needs=("class",), obstacles=(OPAQUE_GRAPHS, UNNAMED_KERNELS))
def step_class_share(step: StepSummary, kernel_class: str) -> float:
    """Returns the share of a profiled step in which kernels of a class compute."""
    return sum(row.ms for row in step.classes if row.kernel_class == kernel_class) / step.length_ms


@figure(TYPICAL_STEP_PART, "count", obstacles=(OPAQUE_GRAPHS,))
def step_kernels(step: StepSummary) -> float:
    """Returns the number of kernels and fills in a step."""
    return step.launches


@figure(TYPICAL_STEP_PART, "us", rows=OPERATIONS, obstacles=(ON_CPU,))
def launch_latency_us(step: StepSummary) -> float | None:
    """Returns the median time from a launch to the start of the launched operation."""
    return step.launch_latency_us.median if step.launch_latency_us else None


@figure(FINDINGS_PART, "ms", needs=("finding",), obstacles=(ON_CPU,))
def saves_ms(findings: tuple[Finding, ...], finding_id: str) -> float | tuple[float, float] | None:
    """Returns the saving per step that a finding predicts."""
    for finding in findings:
        if finding.id == finding_id:
            low, high = finding.saves_ms_low, finding.saves_ms_high
            return low if low == high else (low, high)
    return None


# --- figures of operators


@figure(ACCOUNT_PART, "ms", obstacles=(ON_CPU,))
def attainable_ms(account: StepAccount) -> float:
    """Returns the attainable length of a step on this GPU."""
    return account.attainable_ms


@figure(ACCOUNT_PART, "ms", obstacles=(ON_CPU,))
def redundant_ms(account: StepAccount) -> float:
    """Returns the time that a step takes longer because of redundant work."""
    return sum(part.ms for part in account.parts if part.cause == "redundant")


@figure(ACCOUNT_PART, "ms", obstacles=(ON_CPU,))
def unfused_ms(account: StepAccount) -> float:
    """Returns the time that a step takes longer because operators are not fused with their neighbors."""
    return sum(part.ms for part in account.parts if part.cause == "unfused")


@figure(OPERATORS_PART, "fraction", obstacles=(ON_CPU,))
def expected_share(account: StepAccount) -> float:
    """Returns the share of the kernel time of a step whose attainable time is known."""
    return account.expected_share


@figure(OPERATORS_PART, "ms", needs=("operator",), obstacles=(ON_CPU,))
def operator_excess_ms(account: StepAccount, operator: str) -> float:
    """Returns the kernel time of an operator, such as aten::mm or mm, above its attainable time."""
    return _add_up_excess(
        account, "operator", operator, lambda row: operator in (row.operator, row.operator.rpartition("::")[2])
    )


@figure(OPERATORS_PART, "ms", needs=("module",), obstacles=(ON_CPU,))
def module_excess_ms(account: StepAccount, module: str) -> float:
    """Returns the kernel time of a module and the modules inside it above their attainable time."""
    return _add_up_excess(
        account, "module", module, lambda row: f".{module}." in f".{row.module.partition(':')[0].replace('/', '.')}."
    )


@figure(OPERATORS_PART, "ms", needs=("line",), obstacles=(ON_CPU,))
def line_excess_ms(account: StepAccount, line: str) -> float:
    """Returns the kernel time of the operators of a line, such as train.py:12, above their attainable time."""
    return _add_up_excess(account, "line", line, lambda row: line in (row.line, row.line.partition(" in ")[0]))


def _add_up_excess(account: StepAccount, kind: str, name: str, matches: Callable[[OperatorRow], bool]) -> float:
    """Returns the excess of the operators that match, ms.

    Raises:
        ConfigurationError: no operator matches.
    """
    rows = [row for row in account.operators if matches(row)]
    if not rows:
        raise ConfigurationError(
            f"No operator of the steps has the {kind} {name!r}", f"See: nsys-analyze operators CAPTURE --by {kind}"
        )
    return sum(row.excess_ms for row in rows)


# --- figures of the hardware counters


@figure(COUNTERS_PART, "fraction", rows=("counter",))
def sms_active_share(counters: CounterRow) -> float | None:
    """Returns the share of the GPU's SMs that are active while the work runs."""
    return counters.sms_active


@figure(COUNTERS_PART, "fraction", rows=("counter",))
def sm_issue_share(counters: CounterRow) -> float | None:
    """Returns the share of the cycles in which the SMs issue an instruction while the work runs."""
    return counters.sm_issue


@figure(COUNTERS_PART, "fraction", rows=("counter",))
def tensor_active_share(counters: CounterRow) -> float | None:
    """Returns the share of the work's time in which the tensor cores are active."""
    return counters.tensor_active


@figure(COUNTERS_PART, "fraction", rows=("counter",))
def dram_share(counters: CounterRow) -> float | None:
    """Returns the share of the memory's peak bandwidth that the work uses."""
    return counters.dram_share


@figure(COUNTERS_PART, "count", rows=("counter",))
def sm_clock_mhz(counters: CounterRow) -> float | None:
    """Returns the clock of the SMs in MHz while the work runs."""
    return counters.sm_clock_mhz


@figure(COUNTERS_PART, "text", rows=("counter",))
def limited_by(counters: CounterRow) -> str | None:
    """Returns what the work uses for at least 60 % of its peak: memory, compute or neither."""
    return counters.limited_by


# --- figures of phases, and of the whole capture


@figure(PHASE_PART, "ms", rows=("range",))
def wall_ms(phase: PhaseSummary) -> Stats:
    """Returns the duration of the phase on the CPU's clock."""
    return phase.wall_ms


@figure(UNPROFILED_PHASE_PART, "ms", needs=("phase",), rows=("timing",), obstacles=(DOUBTFUL_TIME,))
def unprofiled_ms(unprofiled: Unprofiled, phase: str) -> Stats | None:
    """Returns the duration of the phase without the profiler."""
    return unprofiled.phases.get(phase)


@figure(PHASE_PART, "ms", rows=OPERATIONS, obstacles=(ON_CPU,))
def gpu_busy_ms(phase: PhaseSummary) -> Stats:
    """Returns the time in which at least one GPU operation of the phase runs."""
    return phase.gpu_busy_ms


@figure(PHASE_PART, "ms", rows=OPERATIONS, obstacles=(ON_CPU,))
def gpu_span_ms(phase: PhaseSummary) -> Stats:
    """Returns the time from the start of the phase's first GPU operation to the end of its last one."""
    return phase.gpu_span_ms


@figure(PHASE_PART, "fraction", rows=OPERATIONS, obstacles=(ON_CPU,))
def busy_share(phase: PhaseSummary) -> float | tuple[float, float] | None:
    """Returns the GPU's busy time in the phase ÷ the duration of the phase on the CPU's clock."""
    if phase.busy_share is None:
        return None
    low, high = phase.busy_share.low, phase.busy_share.high
    return low if low == high else (low, high)


@figure(PHASE_PART, "ms", obstacles=(OPAQUE_GRAPHS,))
def kernel_sum_ms(phase: PhaseSummary) -> Stats:
    """Returns the total kernel time of the phase."""
    return phase.kernel_time_ms


@figure(PHASE_PART, "count", obstacles=(OPAQUE_GRAPHS,))
def kernels(phase: PhaseSummary) -> float:
    """Returns the number of kernels in one instance of the phase."""
    return phase.kernels_per_instance


@figure(PHASE_PART, "count", rows=("range",))
def instances(phase: PhaseSummary) -> int:
    """Returns the number of measured instances of the phase."""
    return phase.instances


@figure(PHASE_PART, "count", rows=("memcpy",), obstacles=(ON_CPU,))
def copies(phase: PhaseSummary) -> float:
    """Returns the number of copies in one instance of the phase."""
    return sum(row.operations_per_instance for row in phase.memory if row.kind == "memcpy")


@figure(PHASE_PART, "ms", rows=("memcpy",), obstacles=(ON_CPU,))
def copy_ms(phase: PhaseSummary) -> float:
    """Returns the total time of the copies in one instance of the phase."""
    return sum(row.ms_per_instance for row in phase.memory if row.kind == "memcpy")


def _launches_of_class(phase: PhaseSummary, kernel_class: str) -> float:
    return phase.launches_of(kernel_class)


@figure(
    PHASE_PART, "ms", needs=("class",), obstacles=(OPAQUE_GRAPHS, UNNAMED_KERNELS), count_kernels=_launches_of_class
)  # fmt: skip
def class_ms(phase: PhaseSummary, kernel_class: str) -> float:
    """Returns the total time of the kernels of a class in one instance of the phase."""
    return sum(row.ms_per_instance for row in phase.classes if row.kernel_class == kernel_class)


@figure(
    PHASE_PART, "count", needs=("class",), obstacles=(OPAQUE_GRAPHS, UNNAMED_KERNELS), count_kernels=_launches_of_class
)  # fmt: skip
def class_launches(phase: PhaseSummary, kernel_class: str) -> float:
    """Returns the number of kernels of a class in one instance of the phase."""
    return phase.launches_of(kernel_class)


@figure(
    PHASE_PART, "fraction", needs=("class",), obstacles=(OPAQUE_GRAPHS, UNNAMED_KERNELS),
    count_kernels=_launches_of_class,
)  # fmt: skip
def class_share(phase: PhaseSummary, kernel_class: str) -> float:
    """Returns the share of the phase's total kernel time that kernels of a class take."""
    return sum(row.share for row in phase.classes if row.kernel_class == kernel_class)


@figure(PHASE_PART, "text", obstacles=(OPAQUE_GRAPHS,))
def top_kernel(phase: PhaseSummary) -> str | None:
    """Returns the name of the kernel that takes the most time in the phase."""
    return phase.kernels[0].name if phase.kernels else None


@figure(PHASE_PART, "ms", needs=("kernel",), obstacles=(OPAQUE_GRAPHS,))
def kernel_ms(phase: PhaseSummary, kernel: str) -> float:
    """Returns the total time of a kernel, given by a part of its name, in one instance of the phase."""
    return _find_kernel(phase, kernel).ms_per_instance


@figure(PHASE_PART, "count", needs=("kernel",), obstacles=(OPAQUE_GRAPHS,))
def kernel_launches(phase: PhaseSummary, kernel: str) -> float:
    """Returns the number of launches of a kernel, given by a part of its name, in one instance of the phase."""
    return _find_kernel(phase, kernel).launches_per_instance


# --- figures of the model


@figure(ATTENTION_PART, "ms", obstacles=(OPAQUE_GRAPHS,))
def softmax_ms(attention: AttentionSummary) -> float | None:
    """Returns the time of the softmax in attention."""
    return attention.softmax_ms


@figure(ATTENTION_PART, "ms", obstacles=(OPAQUE_GRAPHS,))
def attention_matmul_ms(attention: AttentionSummary) -> float | None:
    """Returns the time of the attention matmuls."""
    return attention.matmul_ms


@figure(MODULES_PART, "ms", needs=("module",), obstacles=(OPAQUE_GRAPHS,))
def module_ms(modules: Modules, module: str) -> float:
    """Returns the kernel time of a module with the modules inside it, in forward and backward."""
    return _find_module(modules, module).ms


@figure(MODULES_PART, "ms", needs=("module",), obstacles=(OPAQUE_GRAPHS,))
def module_forward_ms(modules: Modules, module: str) -> float:
    """Returns the kernel time of a module with the modules inside it, in forward only."""
    return _find_module(modules, module).forward.ms


@figure(LIMITS_PART, "fraction", needs=("phase",))
def mfu(limits: Limits, phase: str) -> float | None:
    """Returns the model FLOPs utilization of the phase: the model's FLOPs ÷ time ÷ peak."""
    rate = limits.phase(phase)
    return rate.mfu if rate else None


@figure(LIMITS_PART, "flop", needs=("phase",))
def model_flops(limits: Limits, phase: str) -> int | None:
    """Returns the model's FLOPs in one instance of the phase."""
    rate = limits.phase(phase)
    return rate.model_flops if rate else None


@figure(MEMORY_PART, "bytes", rows=("memory",), obstacles=(ON_CPU,))
def peak_memory_bytes(capture: CaptureSummary) -> int | None:
    """Returns the largest amount of device memory in use."""
    return capture.peak_memory_bytes


@figure(MEMORY_ACCOUNT_PART, "bytes", rows=("snapshot",))
def snapshot_peak_bytes(account: MemoryAccount) -> int | None:
    """Returns the largest amount of memory that PyTorch's tensors use."""
    return account.peak.allocated_bytes


@figure(MEMORY_ACCOUNT_PART, "bytes", rows=("snapshot",))
def snapshot_reserved_bytes(account: MemoryAccount) -> int | None:
    """Returns the memory that PyTorch's allocator holds at the peak, used or unused."""
    return account.peak.reserved_bytes


@figure(MEMORY_ACCOUNT_PART, "bytes", rows=("snapshot",))
def weights_bytes(account: MemoryAccount) -> int | None:
    """Returns the memory of the weights at the peak."""
    return account.bytes_of("weights") or None


@figure(MEMORY_ACCOUNT_PART, "bytes", rows=("snapshot",))
def gradients_bytes(account: MemoryAccount) -> int | None:
    """Returns the memory of the gradients at the peak."""
    return account.bytes_of("gradients") if account.steps else None


@figure(MEMORY_ACCOUNT_PART, "bytes", rows=("snapshot",))
def optimizer_state_bytes(account: MemoryAccount) -> int | None:
    """Returns the memory of the optimizer's state at the peak."""
    return account.bytes_of("optimizer state") if account.steps else None


@figure(MEMORY_ACCOUNT_PART, "bytes", rows=("snapshot",))
def activations_bytes(account: MemoryAccount) -> int | None:
    """Returns the memory of the activations at the peak."""
    return account.bytes_of("activations") if account.steps else None


@figure(MEMORY_GROWTH_PART, "bytes", rows=("snapshot",))
def memory_growth_bytes(account: MemoryAccount) -> int | None:
    """Returns the memory that each step adds and does not release."""
    return sum(row.bytes_per_step for row in account.growth) if account.steps else None


@figure(UNPROFILED_TOKENS_PART, "tokens/s", rows=("timing",))
def tokens_per_s(unprofiled: Unprofiled) -> float | None:
    """Returns the number of tokens of a step ÷ the length of the step without the profiler."""
    return unprofiled.tokens_per_second


@figure(ENERGY_PART, "J", rows=("timing",))
def step_joules(energy: StepEnergy) -> float:
    """Returns the energy of a step without the profiler, on all GPUs of the process."""
    return energy.joules


@figure(ENERGY_PART, "J", rows=("timing",))
def token_joules(energy: StepEnergy) -> float | None:
    """Returns the energy of a step without the profiler ÷ the number of tokens of a step."""
    return energy.joules_per_token


@figure(ENERGY_PART, "W", rows=("timing",))
def power_w(energy: StepEnergy) -> float:
    """Returns the mean power during steps without the profiler."""
    return energy.watts


@figure(ENERGY_PART, "W", rows=("timing",))
def idle_power_w(energy: StepEnergy) -> float | None:
    """Returns the power of the GPUs before the program used them."""
    return energy.idle_watts


# --- figures of ranks


@figure(RANK_LATENESS_PART, "ms")
def late_ms(rank: RankFigures) -> Stats | float | None:
    """Returns a rank's own time minus the own time of the fastest rank."""
    return rank.lateness_ms


@figure(RANK_PART, "ms")
def collectives_ms(rank: RankFigures) -> float:
    """Returns the time in which a rank runs collectives, hidden or exposed."""
    return rank.communication_ms


@figure(RANK_PART, "ms")
def waiting_ms(rank: RankFigures) -> float | None:
    """Returns the time in which a rank runs a collective that the last rank has not started yet."""
    return rank.waiting_ms


# --- rows that are found by a part of their name


def _find_kernel(phase: PhaseSummary, name: str) -> KernelRow:
    """Returns the kernel with this name, or else the kernel whose name contains this text.

    Raises:
        ConfigurationError: there is no such kernel, or there are several.
    """
    return _find_row("kernel", name, [(row.name, row) for row in phase.kernels], lambda kernel: name in kernel)


def _find_module(modules: Modules, path: str) -> Module:
    """Returns the module with this path, or else the module whose path ends with this path.

    Raises:
        ConfigurationError: there is no such module, or there are several.
    """
    rows = [(module.path, module) for module in modules.modules]
    return _find_row("module", path, rows, lambda module_path: module_path.endswith(f".{path}"))


def _find_row(kind: str, name: str, named_rows: list[tuple[str, Row]], matches: Callable[[str], bool]) -> Row:
    """Returns the only row with this name, or else the only row whose name ``matches``.

    Raises:
        ConfigurationError: there is no such row, or there are several.
    """
    equal_rows = [row for row_name, row in named_rows if row_name == name]
    rows = equal_rows or [row for row_name, row in named_rows if matches(row_name)]
    if len(rows) != 1:
        raise ConfigurationError(f"{len(rows)} {kind}s match {name!r}", f"See: nsys-analyze {kind}s CAPTURE")
    return rows[0]
