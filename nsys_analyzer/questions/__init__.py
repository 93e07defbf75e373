"""The questions of the report, one module each, in the order a reader meets them.

Each module has ``answer(evidence) -> Section``. A new question is a new module and a row here.
"""

from __future__ import annotations

from collections.abc import Callable

from nsys_analyzer.questions import (
    captures,
    conditions,
    conservation,
    generate,
    glossary,
    in_short,
    kernel_names,
    matmul_share,
    models,
    other_kernels,
    phase_times,
    softmax,
    timings,
    top_kernel,
    warnings,
)
from nsys_analyzer.questions.evidence import FEW, Evidence
from nsys_analyzer.questions.folding import fold
from nsys_analyzer.report.model import Report, Section

QUESTIONS: tuple[Callable[[Evidence], Section], ...] = (
    captures.answer,
    generate.answer,
    models.answer,
    conditions.answer,
    conservation.answer,
    warnings.answer,
    glossary.answer,
    timings.answer,
    phase_times.answer,
    top_kernel.answer,
    other_kernels.answer,
    matmul_share.answer,
    softmax.answer,
    kernel_names.answer,
)


def build_report(evidence: Evidence) -> Report:
    """Answers every question that has an answer, the answers in short before them and the benches after them."""
    benches = tuple(bench.section for bench in evidence.benches)
    if benches and not evidence.captures:
        return Report("Experiments on transformers", benches, benches=evidence.benches)
    sections = tuple(section for question in QUESTIONS if (section := question(evidence)).blocks)
    many = len(evidence.captures) > FEW
    first = in_short.summarize_answers(evidence, sections)
    said = (first, *(map(fold, sections) if many else sections), *benches)
    title = "Where the time of the training step goes"
    return Report(title, said, evidence.captures, evidence.labels, evidence.benches)
