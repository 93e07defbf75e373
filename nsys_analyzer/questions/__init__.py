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
    kernel_names,
    matmul_share,
    models,
    other_kernels,
    phase_times,
    softmax,
    top_kernel,
    warnings,
)
from nsys_analyzer.questions.evidence import Evidence
from nsys_analyzer.report.model import Block, Listing, Paragraph, Report, Section

QUESTIONS: tuple[Callable[[Evidence], Section], ...] = (
    captures.answer,
    generate.answer,
    models.answer,
    conditions.answer,
    conservation.answer,
    warnings.answer,
    glossary.answer,
    phase_times.answer,
    top_kernel.answer,
    other_kernels.answer,
    matmul_share.answer,
    softmax.answer,
    kernel_names.answer,
)


def build_report(evidence: Evidence) -> Report:
    """Answers every question, and puts the answers in short before them."""
    sections = tuple(question(evidence) for question in QUESTIONS)
    return Report("Where the time of the training step goes", (in_short(sections), *sections))


def in_short(sections: tuple[Section, ...]) -> Section:
    """Every answer in a few words, capture by capture."""
    lines: dict[str, list[str]] = {}
    for section in sections:
        for answer in section.answers:
            lines.setdefault(answer.capture, []).append(f"{section.topic}: {answer.short}")
    blocks: list[Block] = []
    for capture, answers in lines.items():
        blocks += [Paragraph(f"**{capture}**"), Listing(tuple(answers))]
    return Section("in_short", "In short", tuple(blocks) or (Paragraph("No capture could be measured."),))
