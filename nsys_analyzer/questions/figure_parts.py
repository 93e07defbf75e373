"""The parts of a summary that figures are read from, and the conditions under which figures are unknown."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from nsys_analyzer.analysis.findings.finding import Finding
from nsys_analyzer.analysis.kernels.class_rules import UNKNOWN
from nsys_analyzer.analysis.ranks.run import RankFigures
from nsys_analyzer.analysis.statistics import Stats
from nsys_analyzer.analysis.steps.step import StepSummary, UnprofiledStep
from nsys_analyzer.analysis.summary.kernel_tables import find_class_share
from nsys_analyzer.analysis.summary.modules import Modules
from nsys_analyzer.analysis.summary.summary import CaptureSummary, Limits, PhaseSummary, Unprofiled
from nsys_analyzer.analysis.transformer.attention import AttentionSummary
from nsys_analyzer.errors import (
    PROGRAM_ARGUMENTS,
    RECORD_COMMAND,
    RECORD_GRAPH_NODES_COMMAND,
    RECORD_ON_GPU_COMMAND,
)
from nsys_analyzer.questions.figure import Obstacle, Part, Subject
from nsys_analyzer.report.sections.limits import OPTIONS, explain_missing_mfu
from nsys_analyzer.text import plain, plural

# --- conditions under which figures are unknown


def _unprofiled_step(subject: Subject) -> UnprofiledStep | None:
    return subject.capture.step.unprofiled_ms if subject.capture.step else None


def _is_timed(subject: Subject) -> bool:
    """Tells whether the step was timed without the profiler."""
    step = _unprofiled_step(subject)
    return step is not None and step.timed


ON_CPU = Obstacle(lambda subject: subject.capture.on_cpu, "The program ran on the CPU", RECORD_ON_GPU_COMMAND)
OPAQUE_GRAPHS = Obstacle(
    lambda subject: subject.phase and subject.phase.opaque,
    "CUDA graphs hide kernels in this capture",
    RECORD_GRAPH_NODES_COMMAND,
)
UNNAMED_KERNELS = Obstacle(
    lambda subject: subject.phase and find_class_share(subject.phase.classes, UNKNOWN) is None,
    "The capture holds kernels without a name",
    "nsys export --type sqlite REPORT",
)
NOT_TIMED = Obstacle(
    lambda subject: not _is_timed(subject), "The step was not timed without the profiler", RECORD_COMMAND
)
TIMED = Obstacle(
    _is_timed,
    "The step was timed without the profiler, and needs no estimate",
    "nsys-analyze ask CAPTURE step_unprofiled_ms",
)
DOUBTFUL_TIME = Obstacle(
    lambda subject: subject.capture.unprofiled and subject.capture.unprofiled.doubts.get(subject.arguments["phase"]),
    "The times without the profiler cannot be right",
    RECORD_COMMAND,
)


# --- what figures are of, in words

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


def _missing(why: str, needs: str) -> Callable[[Subject], tuple[str, str]]:
    return lambda _: (why, needs)


# --- the parts

GPU = Part[CaptureSummary](
    get=lambda subject: subject.capture,
    describe=lambda *_: "the capture without warm-up",
    explain_missing=_missing("The capture names no GPU", RECORD_COMMAND),
)
MEMORY = replace(
    GPU, explain_missing=_missing("Memory was not recorded", f"nsys-analyze run --memory {PROGRAM_ARGUMENTS}")
)
PHASE = Part[PhaseSummary](
    get=lambda subject: subject.phase,
    describe=_describe_phase,
    explain_missing=_explain_missing_phase,
    optional_arguments=("phase",),
)
PROFILED_STEPS = Part[StepSummary](
    get=lambda subject: subject.capture.step,
    describe=_describe_profiled_steps,
    explain_missing=_missing("The steps of the capture, or this time of a step, are not known", RECORD_COMMAND),
)
#: The mean of the profiled steps whose length is near the median.
TYPICAL_STEP = replace(PROFILED_STEPS, describe=_describe_typical_step)
#: The step whose length reports state: without the profiler if that is known, else under the profiler.
STEP = replace(PROFILED_STEPS, describe=_describe_step)
UNPROFILED_STEP = Part[UnprofiledStep](
    get=_unprofiled_step,
    describe=lambda *_: _UNPROFILED_STEP,
    explain_missing=PROFILED_STEPS.explain_missing,
)
UNPROFILED_PHASE = Part[Unprofiled](
    get=lambda subject: subject.capture.unprofiled,
    describe=lambda _, subject: f"mean of {subject.arguments['phase']} without the profiler",
    explain_missing=_missing("The phase was not timed without the profiler", RECORD_COMMAND),
)
UNPROFILED_TOKENS = Part[Unprofiled](
    get=lambda subject: subject.capture.unprofiled,
    describe=lambda *_: _UNPROFILED_STEP,
    explain_missing=_missing(
        "The step was not timed without the profiler, or its number of tokens is not known", RECORD_COMMAND
    ),
)
FINDINGS = Part[tuple[Finding, ...]](
    get=lambda subject: subject.capture.findings,
    describe=lambda *_: f"{_UNPROFILED_STEP}, replayed",
    explain_missing=_explain_missing_finding,
)
ATTENTION = Part[AttentionSummary](
    get=lambda subject: subject.capture.attention,
    describe=lambda attention, _: f"mean of one {attention.per}",
    explain_missing=_missing(
        "The capture does not show which kernels belong to softmax or to the attention matmuls",
        "nsys-analyze ask CAPTURE QUESTION --phase-name softmax=RANGE",
    ),
)
MODULES = Part[Modules](
    get=lambda subject: subject.capture.modules,
    describe=lambda modules, _: f"mean of one {modules.per}",
    explain_missing=_missing("No range names a module", f"nsys-analyze run --modules {PROGRAM_ARGUMENTS}"),
)
LIMITS = Part[Limits](
    get=lambda subject: subject.capture.limits,
    describe=lambda _, subject: subject.arguments["phase"],
    explain_missing=_explain_missing_rate,
)
RANK = Part[RankFigures](
    get=lambda subject: subject.rank,
    describe=_describe_rank,
    explain_missing=_missing(
        "The captures are not from several ranks of one run", f"nsys-analyze run --nproc 2 {PROGRAM_ARGUMENTS}"
    ),
)
RANK_LATENESS = replace(RANK, describe=_describe_lateness)
