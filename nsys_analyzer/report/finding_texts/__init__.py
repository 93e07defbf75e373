"""The sentences of findings, and why findings are missing.

A file for each family of rules has one function for each type of figures.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import fields, replace
from typing import TYPE_CHECKING, Any, TypeAlias

from msgspec import structs

from nsys_analyzer.analysis.findings.finding import Finding, FindingFigures, FindingTexts, FindingWithFigures
from nsys_analyzer.analysis.findings.missing import (
    ColdStart,
    EarlierWork,
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
#: By the type of its figures: the function that writes the sentences of a finding of one capture.
TEXTS: Texts = {**waits.TEXTS, **kernels.TEXTS}
#: By the id of a finding: the remedy in an engine that serves requests, instead of the one in PyTorch code.
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
        "# a loop of your own: feed the new tokens back on the GPU, and read those of the step before",
    ),
    "pageable_copy": ("ids = torch.tensor(ids, pin_memory=True).to(device, non_blocking=True)",),
}
#: By the id of a finding: the experiment that would disprove it in an engine.
_SERVING_DISPROOFS: Mapping[str, str] = {
    "data_loading": "Serve one request again and again: if the step is no shorter, loading does not limit it.",
    "pageable_copy": "Serve one request again and again: if the step is no shorter, the copies do not limit it.",
}


def write_texts(capture: CaptureSummary) -> CaptureSummary:
    """Returns a capture with sentences: those of its findings and facts, and the reason why findings are missing."""
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
    """Returns a run of several ranks whose findings have their sentences."""
    from nsys_analyzer.report.finding_texts.ranks import TEXTS as RUN_TEXTS  # captures of one rank need none of it

    return structs.replace(run, findings=tuple(write_finding(finding, RUN_TEXTS) for finding in run.findings))


def write_finding(finding: Finding, texts_of_figures: Texts = TEXTS) -> Finding:
    """Returns a finding with its sentences; a finding that has them already stays as it is."""
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
    """Returns why some findings of a capture are missing, or all of them, in whole sentences."""
    no_saving = "No saving can be derived here"
    match reason:
        case EarlierWork():
            return f"{no_saving}: the steps hold work of the GPU that was launched before them."
        case ReplayDiffers(error):
            differs = f"{rounded_percent(abs(error))} {'longer' if error > 0 else 'shorter'}"
            return f"{no_saving}: a replay of the recorded steps is {differs} than they are."
        case ColdStart(start_up_ms, total_ms, calls):
            names = name_first([f"{api} {rounded(ms)} ms" for api, ms in calls])
            return (
                f"{no_saving}: this is a cold start, in which start-up calls take {rounded(start_up_ms)} of "
                f"{rounded(total_ms)} ms, as they do once ({names}). Record steps after the warm-up."
            )
        case RecordsGraphs():
            return (
                f"{no_saving}: the program records CUDA graphs, as it does once, and the recorded operations do not "
                "run meanwhile."
            )
        case OutOfMemory(message):
            failure = plain(say(message)).rstrip(".") or "an allocation failed"
            return f"{no_saving}: the program ran out of memory: {failure}."
        case RanOnCpu():
            return "The program ran on the CPU, for which no findings are looked for."
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
            return "Nothing runs on the GPU in the steps."
        case NoApiCalls(by_torch):
            return phrase(
                "This trace has no API calls. Without them waits and launches are unknown, and nothing can be "
                "replayed. So all findings are missing: on launches, waits, copies, memory and data loading, and on "
                "matmuls, attention, elementwise kernels and the optimizer. {}.",
                _how_to_record(by_torch),
            )
        case TooFewCalls():
            return "Findings need the API calls of whole steps, and this capture holds too few of them."
        case HiddenInGraphs(share):
            return phrase(
                "{} of the GPU's compute time is inside CUDA graphs whose kernels were not recorded. So findings about "
                "matmuls, attention, elementwise kernels and the optimizer are missing. Capture with "
                "`--cuda-graph-trace=node`.",
                rounded_percent(share),
            )
    raise TypeError(f"no sentence says {reason!r}")


def _how_to_record(by_torch: bool) -> StrOrText:
    """Returns what records kernels and API calls, as the beginning of a sentence."""
    if by_torch:
        return phrase("Record with `activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]`")
    return phrase("Capture with `nsys profile --trace=cuda,nvtx`")
