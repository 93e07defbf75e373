"""Defines the parts of a summary that named figures are read from: where a part is found, and how it is described.

A part also explains why its figures are unknown, and which command would record them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from nsys_analyzer.analysis.counters.figures import MIN_SAMPLES, CounterRow
from nsys_analyzer.analysis.findings.finding import Finding
from nsys_analyzer.analysis.memory.account import MemoryAccount
from nsys_analyzer.analysis.operators.account import StepAccount
from nsys_analyzer.analysis.ranks.run import RankFigures
from nsys_analyzer.analysis.statistics import Stats
from nsys_analyzer.analysis.steps.step import StepSummary, UnprofiledStep
from nsys_analyzer.analysis.summary.modules import Modules
from nsys_analyzer.analysis.summary.summary import CaptureSummary, Limits, PhaseSummary, StepEnergy, Unprofiled
from nsys_analyzer.analysis.transformer.attention import AttentionSummary
from nsys_analyzer.errors import PROGRAM_ARGUMENTS, RECORD_COMMAND, RECORD_ON_GPU_COMMAND
from nsys_analyzer.questions.figure import (
    Subject,
    SummaryPart,
    find_unprofiled_step,
)
from nsys_analyzer.report.sections.limits import MFU_OPTIONS, explain_missing_mfu
from nsys_analyzer.report.sections.operators import explain_missing_account
from nsys_analyzer.text import plain, plural

# --- descriptions of figures

_UNPROFILED_STEP = "a step without the profiler"


def _describe_phase(phase: PhaseSummary, subject: Subject) -> str:
    if "phase" not in subject.arguments:
        return "the capture without warm-up"
    return f"mean of {phase.instances} {plural(phase.instances, 'instance')} of {phase.label}"


def _describe_profiled_steps(step: StepSummary, _: Subject) -> str:
    count = step.wall_ms.n or 0
    return f"median of {count} {plural(count, 'step')} under the profiler, {plain(step.unit)}"


def _describe_typical_step(step: StepSummary, subject: Subject) -> str:
    return f"near the {_describe_profiled_steps(step, subject)}"


def _describe_step(step: StepSummary, subject: Subject) -> str:
    if step.unprofiled_ms is None:
        return _describe_typical_step(step, subject)
    return _UNPROFILED_STEP if step.unprofiled_ms.timed else f"{_UNPROFILED_STEP}, estimated"


def _describe_rank(rank: RankFigures, _: Subject) -> str:
    return f"mean of {len(rank.steps)} {plural(len(rank.steps), 'step')} of all ranks under the profiler"


def _describe_lateness(rank: RankFigures, subject: Subject) -> str:
    is_profiled = isinstance(rank.lateness_ms, Stats)
    return _describe_rank(rank, subject) if is_profiled else f"{_UNPROFILED_STEP}, replayed"


# --- why figures are unknown, and the command that would record them


def _explain_missing_phase(subject: Subject) -> tuple[str, str]:
    phases = ", ".join(phase.phase for phase in subject.capture.phases if phase.instances)
    return f"The capture lacks this phase, or this time of the phase. Its phases: {phases}", RECORD_COMMAND


def _explain_missing_finding(subject: Subject) -> tuple[str, str]:
    ids = ", ".join(finding.id for finding in subject.capture.findings or ())
    findings = plain(subject.capture.findings_missing or ids, "`")
    return f"The capture has no such finding: {findings}", "nsys-analyze explain CAPTURE"


def _explain_missing_account(subject: Subject) -> tuple[str, str]:
    findings_missing = plain(subject.capture.findings_missing or "The steps of the capture are not known", "`")
    why, needs = explain_missing_account(subject.capture) or (findings_missing, RECORD_COMMAND)
    return why.removesuffix("."), needs


def _explain_missing_rate(subject: Subject) -> tuple[str, str]:
    """Returns why the rate of a phase is unknown, and the command with the missing options."""
    limits, phase = subject.capture.limits, subject.arguments["phase"]
    if limits is None:
        return "Nothing in the capture ran on a GPU", RECORD_ON_GPU_COMMAND
    rated_phases = ", ".join(rate.phase for rate in limits.phases if rate.phase != phase and rate.mfu is not None)
    why = (
        f"The FLOPs or the time of {phase} are not known. They are known for these phases: {rated_phases}"
        if rated_phases
        else ""
    )
    missing_options = limits.missing if "peaks" not in limits.missing else ()
    options = [
        f"{MFU_OPTIONS[name]} {'NAME' if name == 'model' else 'N'}" for name in missing_options if name in MFU_OPTIONS
    ]
    needs = f"nsys-analyze ask CAPTURE QUESTION {' '.join(options)}" if options else ""
    return why or plain(explain_missing_mfu(limits), "`").removesuffix("."), needs


def _explain_by(why: str, needs: str) -> Callable[[Subject], tuple[str, str]]:
    """Returns a function that gives this reason and this command for every missing figure."""
    return lambda _: (why, needs)


# --- the parts

GPU_PART = SummaryPart[CaptureSummary](
    get=lambda subject: subject.capture,
    describe=lambda *_: "the capture without warm-up",
    explain_missing=_explain_by("The capture names no GPU", RECORD_COMMAND),
)
MEMORY_PART = replace(
    GPU_PART, explain_missing=_explain_by("Memory was not recorded", f"nsys-analyze run --memory {PROGRAM_ARGUMENTS}")
)
MEMORY_ACCOUNT_PART = SummaryPart[MemoryAccount](
    get=lambda subject: subject.capture.memory,
    describe=lambda account, _: f"the peak of the memory snapshot, GPU {account.device}",
    explain_missing=_explain_by(
        "The snapshot does not tell this, or none was recorded", f"nsys-analyze run --memory {PROGRAM_ARGUMENTS}"
    ),
)
MEMORY_GROWTH_PART = replace(
    MEMORY_ACCOUNT_PART, describe=lambda account, _: f"the {account.steps} steps of the snapshot"
)
PHASE_PART = SummaryPart[PhaseSummary](
    get=lambda subject: subject.phase,
    describe=_describe_phase,
    explain_missing=_explain_missing_phase,
    optional_arguments=("phase",),
)
PROFILED_STEPS_PART = SummaryPart[StepSummary](
    get=lambda subject: subject.capture.step,
    describe=_describe_profiled_steps,
    explain_missing=_explain_by("The steps of the capture, or this time of a step, are not known", RECORD_COMMAND),
)
#: The figures that are means over the profiled steps near the median length.
TYPICAL_STEP_PART = replace(PROFILED_STEPS_PART, describe=_describe_typical_step)
#: The figures of a step that use its reported length: without the profiler if known, else under the profiler.
STEP_PART = replace(PROFILED_STEPS_PART, describe=_describe_step)
UNPROFILED_STEP_PART = SummaryPart[UnprofiledStep](
    get=find_unprofiled_step,
    describe=lambda *_: _UNPROFILED_STEP,
    explain_missing=PROFILED_STEPS_PART.explain_missing,
)
UNPROFILED_PHASE_PART = SummaryPart[Unprofiled](
    get=lambda subject: subject.capture.unprofiled,
    describe=lambda _, subject: f"mean of {subject.arguments['phase']} without the profiler",
    explain_missing=_explain_by("The phase was not timed without the profiler", RECORD_COMMAND),
)
UNPROFILED_TOKENS_PART = SummaryPart[Unprofiled](
    get=lambda subject: subject.capture.unprofiled,
    describe=lambda *_: _UNPROFILED_STEP,
    explain_missing=_explain_by(
        "The step was not timed without the profiler, or its number of tokens is not known", RECORD_COMMAND
    ),
)
ENERGY_PART = SummaryPart[StepEnergy](
    get=lambda subject: subject.capture.energy,
    describe=lambda energy, _: f"mean of {energy.steps} {plural(energy.steps, 'step')} without the profiler",
    explain_missing=_explain_by(
        "The energy of steps was not measured; nsys-analyze doctor says whether this machine can", RECORD_COMMAND
    ),
)
FINDINGS_PART = SummaryPart[tuple[Finding, ...]](
    get=lambda subject: subject.capture.findings,
    describe=lambda *_: f"{_UNPROFILED_STEP}, replayed",
    explain_missing=_explain_missing_finding,
)
ACCOUNT_PART = SummaryPart[StepAccount](
    get=lambda subject: subject.capture.account,
    describe=lambda *_: f"{_UNPROFILED_STEP}, replayed",
    explain_missing=_explain_missing_account,
)
#: The figures that are sums of the measured times of operators.
OPERATORS_PART = replace(ACCOUNT_PART, describe=lambda *_: "mean of the measured steps")
ATTENTION_PART = SummaryPart[AttentionSummary](
    get=lambda subject: subject.capture.attention,
    describe=lambda attention, _: f"mean of one {attention.per}",
    explain_missing=_explain_by(
        "The capture does not show which kernels belong to softmax or to the attention matmuls",
        "nsys-analyze ask CAPTURE QUESTION --phase-name softmax=RANGE",
    ),
)
MODULES_PART = SummaryPart[Modules](
    get=lambda subject: subject.capture.modules,
    describe=lambda modules, _: f"mean of one {modules.per}",
    explain_missing=_explain_by("No range names a module", f"nsys-analyze run --modules {PROGRAM_ARGUMENTS}"),
)
LIMITS_PART = SummaryPart[Limits](
    get=lambda subject: subject.capture.limits,
    describe=lambda _, subject: subject.arguments["phase"],
    explain_missing=_explain_missing_rate,
)
RANK_PART = SummaryPart[RankFigures](
    get=lambda subject: subject.rank,
    describe=_describe_rank,
    explain_missing=_explain_by(
        "The captures are not from several ranks of one run", f"nsys-analyze run --nproc 2 {PROGRAM_ARGUMENTS}"
    ),
)
RANK_LATENESS_PART = replace(RANK_PART, describe=_describe_lateness)


def _find_counters(subject: Subject) -> CounterRow | None:
    """Returns the counters of the class or the phase that a question names; if it names none, of all work."""
    counters, names = subject.capture.counters, subject.arguments
    if counters is None or {"class", "phase"} <= names.keys():
        return None
    rows = counters.classes if "class" in names else counters.phases
    name = names.get("class", names.get("phase"))
    return next((row for row in rows if row.name == name), None) if name else counters.whole


def _explain_missing_counter(subject: Subject) -> tuple[str, str]:
    command = f"nsys-analyze run --counters {PROGRAM_ARGUMENTS}"
    if subject.capture.counters is None:
        return "The hardware counters of the GPU were not recorded", command
    if {"class", "phase"} <= subject.arguments.keys():
        return "The counters are known by class and by phase, but not by both", "nsys-analyze ask CAPTURE --list"
    return f"This counter is missing, or this work runs alone in fewer than {MIN_SAMPLES} samples", command


COUNTERS_PART = SummaryPart[CounterRow](
    get=_find_counters,
    describe=lambda row, subject: (
        f"mean of {row.samples} samples in which {f'only {row.name} runs' if subject.arguments else 'the GPU works'}"
    ),
    explain_missing=_explain_missing_counter,
    optional_arguments=("phase", "class"),
)
