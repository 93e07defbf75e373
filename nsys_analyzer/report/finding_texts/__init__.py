"""The sentences of findings: a file for each family of rules, with one function for each type of figures."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields, replace
from typing import Any

from msgspec import structs

from nsys_analyzer.analysis.findings.finding import Finding, FindingFigures, FindingTexts, FindingWithFigures
from nsys_analyzer.analysis.ranks.run import ParallelRun
from nsys_analyzer.analysis.steps.step import name_pass
from nsys_analyzer.analysis.summary.summary import CaptureSummary
from nsys_analyzer.report.finding_texts import kernels, ranks, serving, waits
from nsys_analyzer.report.finding_texts.missing import explain_missing_findings

#: By the type of its figures: the function that writes the sentences of a finding.
TEXTS: dict[type[FindingFigures], Callable[[Any], FindingTexts]] = {
    **waits.TEXTS,
    **kernels.TEXTS,
    **serving.TEXTS,
    **ranks.TEXTS,
}


def write_texts(capture: CaptureSummary) -> CaptureSummary:
    """Returns a capture whose findings have their sentences, and which says why findings are missing."""
    diagnosis = capture.diagnosis
    if diagnosis:
        diagnosis = replace(diagnosis, findings=tuple(map(write_finding, diagnosis.findings)))
    findings = capture.findings
    if findings is not None:
        findings = tuple(map(write_finding, findings))
    reason = capture.missing_reason
    why_missing = explain_missing_findings(reason) if reason else capture.findings_missing
    return replace(capture, diagnosis=diagnosis, findings=findings, findings_missing=why_missing)


def write_run_texts(run: ParallelRun) -> ParallelRun:
    """Returns a run of several ranks whose findings have their sentences."""
    return structs.replace(run, findings=tuple(map(write_finding, run.findings)))


def write_finding(finding: Finding) -> Finding:
    """Returns a finding with its sentences; a finding that has them already stays as it is."""
    if not isinstance(finding, FindingWithFigures):
        return finding
    figures = finding.figures
    texts = figures if isinstance(figures, FindingTexts) else TEXTS[type(figures)](figures)
    if finding.is_serving:
        texts = serving.adapt_to_serving(finding.id, texts)
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
    known = {field.name: getattr(finding, field.name) for field in fields(Finding) if field.init}
    return Finding(**(known | vars(texts)))
