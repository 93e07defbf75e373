"""Builds the report from its sections.

The report of one capture has a decision section, findings, and answers to questions. The report of several captures
begins with an overview, and the sections of each capture are folded.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from typing import NamedTuple

from nsys_analyzer.analysis.summary.summary import CaptureSummary
from nsys_analyzer.report.evidence import Evidence, kernel_word
from nsys_analyzer.report.model import Answer, Block, Details, Paragraph, Report, Section, StepBars
from nsys_analyzer.report.sections import ranks
from nsys_analyzer.report.sections.about import about_section
from nsys_analyzer.report.sections.counters import answer_counters
from nsys_analyzer.report.sections.decision import decision_section
from nsys_analyzer.report.sections.energy import answer_energy
from nsys_analyzer.report.sections.findings import findings_section, shared_findings_section
from nsys_analyzer.report.sections.kernels import (
    HOW_TO_ANNOTATE,
    answer_attention,
    answer_matmul,
    answer_other_kernels,
    answer_top_kernel,
)
from nsys_analyzer.report.sections.limits import answer_limits
from nsys_analyzer.report.sections.memory import answer_memory
from nsys_analyzer.report.sections.modules import answer_modules
from nsys_analyzer.report.sections.operators import answer_operators
from nsys_analyzer.report.sections.overview import overview_section
from nsys_analyzer.report.sections.serving import answer_serving
from nsys_analyzer.report.sections.steps import step_details
from nsys_analyzer.report.sections.times import answer_times
from nsys_analyzer.text import Text, strong

#: The keys of the sections that explain how long a step takes.
EXPLAIN_SECTION_KEYS = ("decision", "overview", "ranks", "findings", "memory")


class ReportQuestion(NamedTuple):
    """A question about a capture.

    Attributes:
        key: the key of its section.
        title: returns the title of its section.
        answer: yields the blocks of the answer, given the capture and the labels of kernels. It yields nothing if the
            question does not apply to the capture.
        folded: the title of the folded details, or empty if nothing is folded.
    """

    key: str
    title: Callable[[CaptureSummary], str]
    answer: Callable[[CaptureSummary, Mapping[str, str]], Iterable[Block]]
    folded: str = ""


#: The questions in the order of the report. A new question is a function and an entry.
QUESTIONS = (
    ReportQuestion(
        "times",
        lambda _: "How long does each phase take?",
        lambda capture, _: answer_times(capture),
        "Times: median, minimum and maximum",
    ),
    ReportQuestion(
        "top_kernel",
        lambda capture: f"Which {kernel_word(capture)} takes the most time?",
        answer_top_kernel,
    ),
    ReportQuestion(
        "kernels",
        lambda capture: f"Which other {kernel_word(capture)}s and classes take much time?",
        answer_other_kernels,
        "Times by phase",
    ),
    ReportQuestion(
        "matmul",
        lambda _: "What share is matmul?",
        lambda capture, _: answer_matmul(capture),
        "Share of each class",
    ),
    ReportQuestion(
        "attention",
        lambda _: "How does softmax compare with the attention matmuls?",
        lambda capture, _: answer_attention(capture),
        "Times, FLOPs and bytes",
    ),
    ReportQuestion(
        "limits",
        lambda _: "How far are the times from the hardware's limits?",
        lambda capture, _: answer_limits(capture),
        "Rates and peaks",
    ),
    ReportQuestion(
        "counters",
        lambda _: "What do the GPU's hardware counters show?",
        answer_counters,
    ),
    ReportQuestion(
        "memory",
        lambda _: "What fills the memory of the GPU?",
        lambda capture, _: answer_memory(capture.memory, capture.title) if capture.memory else (),
        "Memory by kind and line",
    ),
    ReportQuestion(
        "energy",
        lambda _: "How much energy does a step take?",
        lambda capture, _: answer_energy(capture),
        "Each GPU and phase",
    ),
    ReportQuestion(
        "operators",
        lambda _: "What each operator should cost",
        lambda capture, _: answer_operators(capture),
    ),
    ReportQuestion(
        "modules",
        lambda _: "Which modules take the time?",
        lambda capture, _: answer_modules(capture),
        "Times by module",
    ),
)


def build_report(evidence: Evidence) -> Report:
    """Builds the report of captures, followed by the experiments."""
    benches = tuple(bench.section for bench in evidence.benches)
    if benches and not evidence.captures:
        return Report("Experiments on transformers", benches, benches=evidence.benches)
    if len(evidence.captures) == 1:
        (capture,) = evidence.captures
        title = capture.title
        sections = [
            decision_section(capture, evidence),
            ranks.answer_ranks(evidence),
            findings_section(capture),
            *_answer_questions(capture, evidence),
        ]
    else:
        rank_titles = ranks.find_rank_titles(evidence.captures, evidence.runs)
        is_one_run = len(evidence.runs) == 1 and len(rank_titles) == len(evidence.captures)
        title = evidence.runs[0].name if is_one_run else f"{len(evidence.captures)} captures"
        sections = [*_build_sections_of_captures(evidence, rank_titles)]
    filled_sections = tuple(section for section in (*sections, about_section(evidence), *benches) if section.blocks)
    return Report(title, filled_sections, evidence.captures, evidence.labels, evidence.benches, evidence.runs)


def _build_sections_of_captures(evidence: Evidence, rank_titles: frozenset[str]) -> Iterator[Section]:
    """Yields the overview, the runs of several ranks, the findings shared by captures, and the folded captures.

    ``rank_titles`` are the titles of the captures that belong to runs of several ranks.
    """
    other_captures = [capture for capture in evidence.captures if capture.title not in rank_titles]
    ranks_section = ranks.answer_ranks(evidence)
    if other_captures:
        yield overview_section(evidence.captures, evidence.labels)
        yield ranks_section
        yield shared_findings_section(other_captures)
    else:
        yield replace(ranks_section, title="")
    folded_captures = []
    for capture in evidence.captures:
        # A run without a capture has no section: the overview shows its figures. One of many ranks has none, either.
        if capture.status == "not_profiled" or capture.is_one_of_many_ranks:
            continue
        findings = [findings_section(capture)] if capture.title in rank_titles else []
        sections = (decision_section(capture, evidence), *findings, *_answer_questions(capture, evidence))
        blocks: list[Block] = []
        for section in sections:
            blocks += [Paragraph(strong(section.title))] if section.title and section.blocks else []
            blocks += section.blocks
        folded_captures.append(Details(capture.title, tuple(blocks), capture.title))
    reasons = (capture.findings_missing for capture in evidence.captures if capture.is_one_of_many_ranks)
    left_out = [Paragraph(reason) for reason in dict.fromkeys(reasons) if isinstance(reason, str | Text)]
    yield Section("captures", "Capture by capture", (*left_out, *folded_captures))


def _answer_questions(capture: CaptureSummary, evidence: Evidence) -> Iterator[Section]:
    """Yields a section for each question. The answer is in full view, and the details are folded."""
    yield Section("serving", "How are requests served?", tuple(answer_serving(capture, evidence.labels)))
    for question in QUESTIONS:
        blocks = tuple(question.answer(capture, evidence.labels))
        answers = tuple(block for block in blocks if isinstance(block, Answer))
        details = tuple(block for block in blocks if block not in answers)
        if answers and details and question.folded:
            details = (Details(question.folded, details, capture.title),)
        yield Section(question.key, question.title(capture), (*answers, *details))
    lacks_ranges = capture.attention is None and capture.whole and capture.holds_model and not capture.on_cpu
    hint = Details("How to compare softmax with the attention matmuls", (Paragraph(HOW_TO_ANNOTATE),), capture.title)
    yield Section("details", "Details", (*step_details(capture), *([hint] if lacks_ranges else [])))


def select_first_screen(report: Report) -> Section:
    """Returns the part of a report that a terminal shows: the first section, and excerpts on runs of several ranks.

    The excerpt of a single run contains its answers, bars and titles of findings. The excerpt of several runs contains
    only their answers.
    """
    first_section = report.sections[0]
    rank_blocks = [block for section in report.sections if section.key == "ranks" for block in section.blocks]
    shown_types: tuple[type[Block], ...] = (Answer, StepBars, Paragraph) if len(report.runs) == 1 else (Answer,)
    # The evidence of a finding, which follows its title, has no room on a screen.
    are_titles = [isinstance(block, Paragraph) and bool(block.capture) for block in rank_blocks]
    rank_excerpt = [
        block
        for block, follows_title in zip(rank_blocks, (False, *are_titles), strict=False)
        if not follows_title
        and (isinstance(block, shown_types) or (isinstance(block, Paragraph) and not block.capture))
    ]
    return replace(
        first_section, blocks=(*(first_section.blocks if first_section.key != "ranks" else ()), *rank_excerpt)
    )
