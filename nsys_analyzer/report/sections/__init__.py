"""The report: of one capture its decision, findings and answers; of several the overview first, each capture folded."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from typing import NamedTuple

from nsys_analyzer.analysis.summary.summary import CaptureSummary
from nsys_analyzer.report.evidence import Evidence, kernel_word
from nsys_analyzer.report.model import Answer, Block, Details, Paragraph, Report, Section, StepBars
from nsys_analyzer.report.sections import ranks
from nsys_analyzer.report.sections.about import about
from nsys_analyzer.report.sections.attention import HOW_TO_ANNOTATE, answer_attention
from nsys_analyzer.report.sections.decision import decision_section
from nsys_analyzer.report.sections.findings import findings_section, shared_findings_section
from nsys_analyzer.report.sections.kernels import answer_matmul, answer_other_kernels, answer_top_kernel
from nsys_analyzer.report.sections.limits import answer_limits
from nsys_analyzer.report.sections.modules import answer_modules
from nsys_analyzer.report.sections.overview import overview
from nsys_analyzer.report.sections.serving import answer_serving
from nsys_analyzer.report.sections.steps import step_details
from nsys_analyzer.report.sections.times import answer_times
from nsys_analyzer.text import strong

#: The sections that explain a step: what comes first, and what would make it shorter.
EXPLAINING = ("decision", "overview", "ranks", "findings")


class Question(NamedTuple):
    """A question about a capture: its title, its answer's blocks, none where it has no object, and what it folds."""

    key: str
    title: Callable[[CaptureSummary], str]
    answer: Callable[[CaptureSummary, Mapping[str, str]], Iterable[Block]]
    folded: str = ""


#: In the report's order; a new one is a function and an entry.
QUESTIONS = (
    Question(
        "times", lambda _: "How long does each phase take?", lambda capture, _: answer_times(capture),
        "Times: median, minimum and maximum",
    ),
    Question("top_kernel", lambda c: f"Which {kernel_word(c)} takes the most time?", answer_top_kernel),
    Question(
        "kernels", lambda c: f"Which other {kernel_word(c)}s and classes matter?", answer_other_kernels, "By phase"
    ),
    Question("matmul", lambda _: "What share is matmul?", lambda c, _: answer_matmul(c), "Share of each class"),
    Question(
        "attention", lambda _: "How does softmax compare with the attention matmuls?",
        lambda capture, _: answer_attention(capture), "Times, FLOPs and bytes",
    ),
    Question(
        "limits", lambda _: "How far is it from the hardware's limits?", lambda capture, _: answer_limits(capture),
        "Rates, and the peaks",
    ),
    Question(
        "modules", lambda _: "Which modules take the time?", lambda capture, _: answer_modules(capture),
        "Module by module",
    ),
)  # fmt: skip


def build_report(evidence: Evidence) -> Report:
    """The report of captures, with the experiments after it."""
    benches = tuple(bench.section for bench in evidence.benches)
    if benches and not evidence.captures:
        return Report("Experiments on transformers", benches, benches=evidence.benches)
    if len(evidence.captures) == 1:
        (capture,) = evidence.captures
        title, sections = capture.title, [*_of_one(capture, evidence)]
    else:
        members = ranks.find_rank_titles(evidence.captures, evidence.runs)
        of_one_run = len(evidence.runs) == 1 and len(members) == len(evidence.captures)
        title = evidence.runs[0].name if of_one_run else f"{len(evidence.captures)} captures"
        sections = [*_of_several(evidence, members)]
    shown = tuple(section for section in (*sections, about(evidence), *benches) if section.blocks)
    return Report(title, shown, evidence.captures, evidence.labels, evidence.benches, evidence.runs)


def _of_one(capture: CaptureSummary, evidence: Evidence) -> Iterator[Section]:
    """The sections of one capture, from the decision to the details."""
    yield decision_section(capture, evidence)
    yield ranks.answer_ranks(evidence)
    yield findings_section(capture)
    yield from _answers(capture, evidence)


def _of_several(evidence: Evidence, members: frozenset[str]) -> Iterator[Section]:
    """The overview, the runs of several ranks, the findings that captures share, and each capture folded."""
    others = [one for one in evidence.captures if one.title not in members]
    of_ranks = ranks.answer_ranks(evidence)
    if others:
        yield overview(evidence.captures, evidence.labels)
        yield of_ranks
        yield shared_findings_section(others)
    else:
        yield replace(of_ranks, title="")
    folded = []
    for capture in evidence.captures:
        own = [findings_section(capture)] if capture.title in members else []
        sections = (decision_section(capture, evidence), *own, *_answers(capture, evidence))
        if capture.status != "not_profiled":  # the overview has all that is known of a run that was timed alone
            folded.append(Details(capture.title, tuple(_flat(sections)), capture.title))
    yield Section("captures", "Capture by capture", tuple(folded))


def _flat(sections: Iterable[Section]) -> Iterator[Block]:
    """Sections inside something folded: their titles are paragraphs."""
    for section in sections:
        if section.title and section.blocks:
            yield Paragraph(strong(section.title))
        yield from section.blocks


def _answers(capture: CaptureSummary, evidence: Evidence) -> Iterator[Section]:
    """The questions that have an object, a sentence in view and the rest folded."""
    yield Section("serving", "How are requests served?", tuple(answer_serving(capture, evidence.labels)))
    for one in QUESTIONS:
        blocks = tuple(one.answer(capture, evidence.labels))
        said = tuple(block for block in blocks if isinstance(block, Answer))
        rest = tuple(block for block in blocks if block not in said)
        folded = (Details(one.folded, rest, capture.title),) if said and rest else rest
        yield Section(one.key, one.title(capture), (*said, *folded))
    unknown = capture.attention is None and capture.whole and capture.holds_model and not capture.on_cpu
    how = Details("How to compare softmax with the attention matmuls", (Paragraph(HOW_TO_ANNOTATE),), capture.title)
    yield Section("details", "Details", (*step_details(capture), *([how] if unknown else [])))


def first_screen(report: Report) -> Section:
    """What a report says first: its first section, and of its ranks the answers, the bars and the findings' titles."""
    first = report.sections[0]
    of_ranks = [block for section in report.sections if section.key == "ranks" for block in section.blocks]
    kept: tuple[type[Block], ...] = (Answer, StepBars, Paragraph) if len(report.runs) == 1 else (Answer,)
    # Below the title of a finding stands what was seen, which a screen has no room for.
    titles = [isinstance(block, Paragraph) and bool(block.capture) for block in of_ranks]
    said = [
        block
        for block, below_title in zip(of_ranks, (False, *titles), strict=False)
        if not below_title and (isinstance(block, kept) or (isinstance(block, Paragraph) and not block.capture))
    ]
    return replace(first, blocks=(*(first.blocks if first.key != "ranks" else ()), *said))
