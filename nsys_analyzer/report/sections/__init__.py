"""The questions of the report, one module each, in the order a reader meets them.

Each module has ``answer(evidence) -> Section``. A new question is a new module and a row here.
"""

from __future__ import annotations

from collections.abc import Callable

from nsys_analyzer.report.evidence import FEW, Evidence
from nsys_analyzer.report.model import Report, Section
from nsys_analyzer.report.sections import (
    attribution_check,
    captures,
    conditions,
    generate,
    glossary,
    kernel_names,
    limits,
    matmul_share,
    models,
    modules,
    other_kernels,
    phase_times,
    ranks,
    softmax,
    steps,
    summary,
    timings,
    top_kernel,
    warnings,
)
from nsys_analyzer.report.sections.folding import fold

QUESTIONS: tuple[Callable[[Evidence], Section], ...] = (
    ranks.answer,
    steps.answer,
    timings.answer,
    phase_times.answer,
    top_kernel.answer,
    other_kernels.answer,
    matmul_share.answer,
    limits.answer,
    softmax.answer,
    modules.answer,
    captures.answer,
    conditions.answer,
    models.answer,
    attribution_check.answer,
    warnings.answer,
    glossary.answer,
    kernel_names.answer,
    generate.answer,
)


def build_report(evidence: Evidence) -> Report:
    """The summary, every question that has an answer, what the answers rest on, and the experiments after them."""
    benches = tuple(bench.section for bench in evidence.benches)
    if benches and not evidence.captures:
        return Report("Experiments on transformers", benches, benches=evidence.benches)
    sections = tuple(section for question in QUESTIONS if (section := question(evidence)).blocks)
    many = len(evidence.captures) > FEW
    first = summary.summarize_answers(evidence, sections)
    said = (first, *(map(fold, sections) if many else sections), *benches)
    stepped = [one.step for one in evidence.captures if one.step]
    is_pass = bool(stepped) and all(step.is_pass for step in stepped)
    title = f"Where the time of the {'capture' if is_pass else 'training step'} goes"
    return Report(title, said, evidence.captures, evidence.labels, evidence.benches, evidence.runs)
