"""Writes the sentences of findings.

Each module of this folder covers one family of rules. It has one function for each type of figures.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import fields, replace
from typing import TYPE_CHECKING, Any, TypeAlias

from msgspec import structs

from nsys_analyzer.analysis.findings.finding import Finding, FindingFigures, FindingTexts, FindingWithFigures
from nsys_analyzer.analysis.steps.step import replace_step_by_pass
from nsys_analyzer.analysis.summary.summary import CaptureSummary
from nsys_analyzer.report.facts import replace_facts_by_sentences, say
from nsys_analyzer.report.finding_texts import kernels, operators, waits

if TYPE_CHECKING:
    from nsys_analyzer.analysis.ranks.run import ParallelRun

Texts: TypeAlias = "dict[type[FindingFigures], Callable[[Any], FindingTexts]]"
#: The function that writes the sentences of a finding of one capture, by the type of the finding's figures.
TEXTS: Texts = {**waits.TEXTS, **operators.TEXTS, **kernels.TEXTS}
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
    why_missing = say(reason) if reason else capture.findings_missing
    return replace_facts_by_sentences(
        replace(capture, diagnosis=diagnosis, findings=findings, findings_missing=why_missing)
    )


def write_run_texts(run: ParallelRun) -> ParallelRun:
    """Returns a run of several ranks, with the sentences of its findings."""
    from nsys_analyzer.report.finding_texts.ranks import TEXTS as RUN_TEXTS  # not needed for captures of one rank

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
            title=str(replace_step_by_pass(texts.title)),
            evidence=tuple(map(replace_step_by_pass, texts.evidence)),
            derivation=replace_step_by_pass(texts.derivation),
            disproof=replace_step_by_pass(texts.disproof),
        )
    values = {field.name: getattr(finding, field.name) for field in fields(Finding) if field.init}
    return Finding(**(values | vars(texts)))
