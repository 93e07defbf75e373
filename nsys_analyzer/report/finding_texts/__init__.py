"""Writes the sentences of findings, and the reasons why findings are missing.

Each module of this folder covers one family of rules. It has one function for each type of figures.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import fields, replace
from typing import TYPE_CHECKING, Any, TypeAlias

from msgspec import structs

from nsys_analyzer.analysis.findings.finding import (
    ColdStart,
    EarlierWork,
    Finding,
    FindingFigures,
    FindingTexts,
    FindingWithFigures,
    HiddenInGraphs,
    IdleSteps,
    LostKernels,
    MissingReason,
    NoApiCalls,
    NoCapture,
    NoKernels,
    OutOfMemory,
    RanOnCpu,
    RecordsGraphs,
    ReplayDiffers,
    TooFewCalls,
)
from nsys_analyzer.analysis.steps.step import name_pass
from nsys_analyzer.analysis.summary.summary import CaptureSummary
from nsys_analyzer.report.facts import say, say_facts
from nsys_analyzer.report.finding_texts import kernels, waits
from nsys_analyzer.report.finding_texts.waits import name_first
from nsys_analyzer.report.units import rounded, rounded_percent
from nsys_analyzer.text import StrOrText, phrase, plain, plural

if TYPE_CHECKING:
    from nsys_analyzer.analysis.ranks.run import ParallelRun

Texts: TypeAlias = "dict[type[FindingFigures], Callable[[Any], FindingTexts]]"
#: The function that writes the sentences of a finding of one capture, by the type of the finding's figures.
TEXTS: Texts = {**waits.TEXTS, **kernels.TEXTS}
#: The remedy of a finding in an engine that serves requests, by the finding's ID. It replaces the PyTorch code.
_SERVING_REMEDIES: Mapping[str, tuple[str, ...]] = {
    "launch_bound": (
        '# vLLM: leave out --enforce-eager; --compilation-config \'{"cudagraph_mode": "FULL_AND_PIECEWISE"}\'',
        "# SGLang: leave out --disable-cuda-graph; --cuda-graph-max-bs as large as the batches get",
        "# TensorRT-LLM: cuda_graph_config: {enable_padding: true}",
        'model.generate(..., cache_implementation="static")  # transformers compiles decode then',
    ),
    "host_sync": (
        "# vLLM: --async-scheduling; SGLang: leave out --disable-overlap-schedule",
        "# TensorRT-LLM: disable_overlap_scheduler: false",
        "# a loop of your own: keep the new tokens on the GPU as the next input, and read them one step later",
    ),
    "pageable_copy": ("ids = torch.tensor(ids, pin_memory=True).to(device, non_blocking=True)",),
}
#: The experiment that would disprove a finding in an engine that serves requests, by the finding's ID.
_SERVING_DISPROOFS: Mapping[str, str] = {
    "data_loading": "Serve one request again and again: if the step is no shorter, loading does not limit it.",
    "pageable_copy": "Serve one request again and again: if the step is no shorter, the copies do not limit it.",
}


def write_texts(capture: CaptureSummary) -> CaptureSummary:
    """Returns a capture with the sentences of its findings, of its facts and of why findings are missing."""
    diagnosis = capture.diagnosis
    if diagnosis:
        diagnosis = replace(diagnosis, findings=tuple(map(write_finding, diagnosis.findings)))
    findings = capture.findings
    if findings is not None:
        findings = tuple(map(write_finding, findings))
    reason = capture.missing_reason
    why_missing = explain_missing_findings(reason) if reason else capture.findings_missing
    return say_facts(replace(capture, diagnosis=diagnosis, findings=findings, findings_missing=why_missing))


def write_run_texts(run: ParallelRun) -> ParallelRun:
    """Returns a run of several ranks, with the sentences of its findings."""
    from nsys_analyzer.report.finding_texts.ranks import TEXTS as RUN_TEXTS  # captures of one rank need none of it

    return structs.replace(run, findings=tuple(write_finding(finding, RUN_TEXTS) for finding in run.findings))


def write_finding(finding: Finding, texts_of_figures: Texts = TEXTS) -> Finding:
    """Returns a finding with its sentences. A finding that already has sentences is returned unchanged."""
    if not isinstance(finding, FindingWithFigures):
        return finding
    figures = finding.figures
    texts = figures if isinstance(figures, FindingTexts) else texts_of_figures[type(figures)](figures)
    if finding.is_serving:
        remedy, disproof = _SERVING_REMEDIES.get(finding.id), _SERVING_DISPROOFS.get(finding.id)
        texts = replace(texts, remedy=remedy or texts.remedy, disproof=disproof or texts.disproof)
    if not finding.is_torch:
        texts = replace(texts, remedy=())
    if finding.is_pass:
        texts = replace(
            texts,
            title=str(name_pass(texts.title)),
            evidence=tuple(map(name_pass, texts.evidence)),
            derivation=name_pass(texts.derivation),
            disproof=name_pass(texts.disproof),
        )
    values = {field.name: getattr(finding, field.name) for field in fields(Finding) if field.init}
    return Finding(**(values | vars(texts)))


def explain_missing_findings(reason: MissingReason) -> StrOrText:
    """Returns sentences that explain why some or all findings of a capture are missing."""
    no_saving = "No saving can be derived here"
    match reason:
        case EarlierWork():
            return f"{no_saving}: the steps contain GPU work that was launched before them."
        case ReplayDiffers(error):
            differs = f"{rounded_percent(abs(error))} {'longer' if error > 0 else 'shorter'}"
            return f"{no_saving}: the replayed steps are {differs} than the recorded steps."
        case ColdStart(start_up_ms, total_ms, calls):
            names = name_first([f"{api} {rounded(ms)} ms" for api, ms in calls])
            return (
                f"{no_saving}: this is a cold start. Calls that a program makes only once, at its start, take "
                f"{rounded(start_up_ms)} of {rounded(total_ms)} ms ({names}). Record steps after the warm-up."
            )
        case RecordsGraphs():
            return (
                f"{no_saving}: the program captures CUDA graphs, which it does only once, and captured operations do "
                "not run during the capture."
            )
        case OutOfMemory(message):
            failure = plain(say(message)).rstrip(".") or "an allocation failed"
            return f"{no_saving}: the program ran out of memory: {failure}."
        case RanOnCpu():
            return "The program ran on the CPU, where no findings are looked for."
        case NoCapture(message):
            return say(message) if message else "There is no capture of this run."
        case LostKernels(launches):
            return (
                f"{launches:,} kernel {plural(launches, 'launch')} and no kernel were recorded: the GPU's records were "
                "dropped or cut off. Record again, with a warm-up before the recorded steps."
            )
        case NoKernels(by_torch):
            return phrase("No kernel was recorded. {} around steps that run on the GPU.", _how_to_record(by_torch))
        case IdleSteps():
            return "Nothing runs on the GPU during the steps."
        case NoApiCalls(by_torch):
            return phrase(
                "This trace has no API calls. Without API calls, launches and waits are unknown, and no step can be "
                "replayed. So all findings are missing: on launches, waits, copies, memory and data loading, and on "
                "matmuls, attention, elementwise kernels and the optimizer. {}.",
                _how_to_record(by_torch),
            )
        case TooFewCalls():
            return "Findings need the API calls of whole steps. This capture contains too few API calls."
        case HiddenInGraphs(share):
            return phrase(
                "{} of the GPU's compute time is inside CUDA graphs whose kernels were not recorded. So findings about "
                "matmuls, attention, elementwise kernels and the optimizer are missing. Capture with "
                "`--cuda-graph-trace=node`.",
                rounded_percent(share),
            )
    raise TypeError(f"no sentence for {reason!r}")


def _how_to_record(by_torch: bool) -> StrOrText:
    """Returns the advice on how to record kernels and API calls, without the final period."""
    if by_torch:
        return phrase("Record with `activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]`")
    return phrase("Capture with `nsys profile --trace=cuda,nvtx`")
