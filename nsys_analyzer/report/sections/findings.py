"""Findings in words: what slows a step down, what a fix saves, the lines to type, and how to check it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from nsys_analyzer.analysis.findings.diagnosis import SMALLEST_SAVING
from nsys_analyzer.analysis.findings.finding import Finding
from nsys_analyzer.analysis.ranks.run import ParallelRun
from nsys_analyzer.analysis.summary.summary import CaptureSummary
from nsys_analyzer.report.evidence import step_noun
from nsys_analyzer.report.model import (
    Block,
    Details,
    Field,
    Interval,
    Listing,
    Paragraph,
    Section,
    TimelineLink,
    make_table,
)
from nsys_analyzer.report.sections.lines import lines_of_program
from nsys_analyzer.report.units import format_ms_range, rounded_percent
from nsys_analyzer.text import StrOrText, join_texts, phrase, plural, strong

#: Findings that stand in full view.
FIRST = 3
#: A replay that misses the recorded steps by more than this is said.
_REPLAYED = 0.05
#: Communication that nothing hides, from this share of a step on, is more than a detail.
_MUCH = 0.2
#: Sentences of evidence that stand in full view.
_SENTENCES = 2


def to_fix(capture: CaptureSummary) -> tuple[Finding, ...]:
    """The findings of a capture, what to do first before others."""
    return capture.diagnosis.findings if capture.diagnosis else ()


def saving(finding: Finding) -> Interval:
    """What a finding saves, as a cell."""
    return Interval(finding.saves_ms_low, finding.saves_ms_high)


def in_a_line(finding: Finding, noun: str = "a step") -> str:
    """A finding and what it saves: "The GPU waits for launches: saves 12–21 ms a step (30 %)"."""
    saves = format_ms_range(finding.saves_ms_low, finding.saves_ms_high)
    return f"{finding.title}: saves {saves} {noun} ({rounded_percent(finding.share_of_step)})"


def nothing_found(capture: CaptureSummary) -> str:
    """That nothing stands out, or that much of the step is of other ranks."""
    step = capture.step
    if step and step.exposed_communication_ms > _MUCH * step.total_ms:
        part = rounded_percent(step.exposed_communication_ms / step.total_ms)
        return (
            f"For {part} of the step the GPU only communicates. "
            "Whether it transfers or waits for a late rank is known only beside the captures of the other ranks."
        )
    saving = rounded_percent(SMALLEST_SAVING)
    return f"Nothing stands out: no change that is looked for saves {saving} of the step or more."


def findings_of_capture(capture: CaptureSummary) -> Section:
    """Each finding of one capture, the first ones in full view."""
    blocks: list[Block] = []
    for place, finding in enumerate(to_fix(capture), 1):
        title = f"{place}. {in_a_line(finding, step_noun(capture.step))}"
        inside = _explained(finding, capture.title)
        if place <= FIRST:
            blocks += [Paragraph(strong(title), capture.title), *inside]
        else:
            blocks.append(Details(title, inside, capture.title))
    return Section("findings", "Findings", (*blocks, *_replayed(capture)))


def _remedy(finding: Finding, capture: str = "") -> tuple[Listing, ...]:
    return (Listing(finding.remedy, "python", capture),) if finding.remedy else ()


def _explained(finding: Finding, capture: str) -> tuple[Block, ...]:
    """What was seen, what to type, where the timeline shows it; folded, what the saving rests on."""
    return (
        Paragraph(join_texts(" ", finding.evidence[:_SENTENCES]), capture),
        *lines_of_program(finding.lines, capture),
        *_remedy(finding, capture),
        *((TimelineLink(finding.place, capture),) if finding.place else ()),
        Details(
            "How the saving is derived, and how to check it",
            (Listing((*finding.evidence[_SENTENCES:], *_reasons(finding))),),
            capture,
        ),
    )


def _reasons(finding: Finding) -> tuple[StrOrText, ...]:
    return (
        phrase("How the saving is derived: {}", finding.derivation),
        phrase("How to check: {}", finding.disproof),
    )


def _replayed(capture: CaptureSummary) -> Iterator[Paragraph]:
    """How far the replay misses the recorded steps, where that is much."""
    error = capture.diagnosis.replay_error if capture.diagnosis else 0.0
    if to_fix(capture) and abs(error) > _REPLAYED and not capture.findings_missing:
        off = f"{rounded_percent(abs(error))} {'longer' if error > 0 else 'shorter'}"
        yield Paragraph(
            f"The replayed steps are {off} than the recorded ones: take these savings as rough ones.", capture.title
        )


#: A capture, and a finding of it.
_Found = tuple[CaptureSummary, Finding]
_IN_CAPTURES: tuple[Field[_Found], ...] = (
    Field("capture", "text", lambda row: row[0].title),
    Field("saves ms", "ms", lambda row: saving(row[1])),
    Field("share of the step", "percent", lambda row: row[1].share_of_step),
    Field("line", "code", lambda row: row[1].lines[0].place if row[1].lines else None),
    Field("what was seen", "text", lambda row: row[1].evidence[0] if row[1].evidence else None),
)


def shared_findings(captures: Sequence[CaptureSummary]) -> Section:
    """The findings of several captures, each once, with a table of the captures that have it."""
    found: dict[tuple[str, str], list[_Found]] = {}
    for capture in captures:
        for finding in to_fix(capture):
            found.setdefault((finding.id, finding.title), []).append((capture, finding))
    blocks: list[Block] = []
    ranked = sorted(found.items(), key=lambda pair: -sum(finding.share_of_step for _, finding in pair[1]))
    for place, ((_, title), rows) in enumerate(ranked, 1):
        shares = sorted(finding.share_of_step for _, finding in rows)
        between = " to ".join(dict.fromkeys(rounded_percent(share) for share in (shares[0], shares[-1])))
        heading = f"{title}: {len(rows)} {plural(len(rows), 'capture')}, {between} of the step"
        first = rows[0][1]
        reasons = Listing(_reasons(first))
        code = _remedy(first)
        shown = make_table(_IN_CAPTURES, rows)
        if place <= FIRST:
            blocks += [Paragraph(strong(heading)), *code, Details("The captures", (shown, reasons))]
        else:
            blocks.append(Details(heading, (*code, shown, reasons)))
    return Section("findings", "Findings", tuple(blocks))


def findings_of_run(run: ParallelRun) -> Iterator[Block]:
    """What would make the step of all ranks shorter; of the step under the profiler, as the ranks' times are."""
    for place, finding in enumerate(run.findings, 1):
        yield Paragraph(strong(f"{place}. {in_a_line(finding)}"), run.name)
        yield from _explained(finding, run.name)
