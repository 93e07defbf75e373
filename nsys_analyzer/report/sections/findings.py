"""Reports findings: what slows a step down, what a fix saves, which code to type, and how to check the fix."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from nsys_analyzer.analysis.findings.diagnosis import LEAST_COMMON_SAVING_SHARE, SMALLEST_SAVING_SHARE
from nsys_analyzer.analysis.findings.finding import Finding
from nsys_analyzer.analysis.ranks.run import ParallelRun
from nsys_analyzer.analysis.steps.lines import Line
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
from nsys_analyzer.report.sections.bars import round_account
from nsys_analyzer.report.units import format_bounds, format_ms, format_ms_range, rounded, rounded_percent
from nsys_analyzer.text import NO_BREAK_SPACE, StrOrText, join_texts, phrase, plural, strong

#: The number of findings in full view. The remaining findings are folded.
SHOWN_FINDINGS = 3
#: The number of sentences of evidence in full view. The remaining sentences are folded.
_SHOWN_SENTENCES = 2
#: The report says that savings are rough if the length of the replayed steps differs from that of the recorded steps
#: by more than this share.
_NOTABLE_REPLAY_ERROR = 0.05
#: The report asks for the captures of the other ranks if exposed communication exceeds this share of a step.
_NOTABLE_COMMUNICATION_SHARE = 0.2
_HOW_JOULES_ARE_DERIVED = (
    "The lower bound is the shortest saved time × the power before the program used the GPU. The upper bound is the "
    "longest saved time × the power while the GPU works, if the rest of a step takes only the power before the program."
)


def get_findings(capture: CaptureSummary) -> tuple[Finding, ...]:
    """Returns the findings of a capture, the largest saving first."""
    return capture.diagnosis.findings if capture.diagnosis else ()


def make_saving_cell(finding: Finding) -> Interval:
    """Returns the saving of a finding as a cell of a table, ms."""
    return Interval(finding.saves_ms_low, finding.saves_ms_high)


def summarize_finding(finding: Finding, noun: str = "a step") -> str:
    """Returns a finding and its saving: "The GPU waits for launches: a fix saves 12–21 ms a step (30 %)"."""
    saving = format_ms_range(finding.saves_ms_low, finding.saves_ms_high)
    return f"{finding.title}: a fix saves {saving} {noun} ({rounded_percent(finding.share_of_step)})"


def explain_no_findings(capture: CaptureSummary) -> str:
    """Returns a sentence on why there are no findings: none is large enough, or the other ranks are needed."""
    step = capture.step
    if step and step.exposed_communication_ms > _NOTABLE_COMMUNICATION_SHARE * step.total_ms:
        share = rounded_percent(step.exposed_communication_ms / step.total_ms)
        return (
            f"For {share} of the step, the GPU communicates without computing. "
            "Only the captures of the other ranks can show whether the GPU transfers data or waits for a late rank."
        )
    least_share, least_common_share = map(rounded_percent, (SMALLEST_SAVING_SHARE, LEAST_COMMON_SAVING_SHARE))
    sentence = (
        f"There are no findings: no change that nsys-analyze replays would save {least_share} of the step or more. "
        f"Unfused operators are a finding only if fusing them saves at least {least_common_share}."
    )
    account = capture.account
    unfused_ms = round_account(account).get("unfused", 0.0) if account else 0.0
    if account and unfused_ms >= SMALLEST_SAVING_SHARE * account.step_ms:
        sentence += (
            " torch.compile may fuse some operators, as in each eager program, which saves about "
            f"{format_ms(unfused_ms)}."
        )
    return sentence


def findings_section(capture: CaptureSummary) -> Section:
    """Returns the findings of one capture, the first ones in full view."""
    blocks: list[Block] = []
    for place, finding in enumerate(get_findings(capture), 1):
        title = f"{place}. {summarize_finding(finding, step_noun(capture.step))}"
        explanation = _explain_finding(finding, capture.title)
        if place <= SHOWN_FINDINGS:
            blocks += [Paragraph(strong(title), capture.title), *explanation]
        else:
            blocks.append(Details(title, explanation, capture.title))
    error = capture.diagnosis.replay_error if capture.diagnosis else 0.0
    if blocks and abs(error) > _NOTABLE_REPLAY_ERROR and not capture.findings_missing:
        differs = f"{rounded_percent(abs(error))} {'longer' if error > 0 else 'shorter'}"
        rough_estimate_sentence = (
            f"The replayed steps are {differs} than the recorded ones, so these savings are rough estimates."
        )
        blocks.append(Paragraph(rough_estimate_sentence, capture.title))
    return Section("findings", "Findings", tuple(blocks))


def _explain_finding(finding: Finding, capture: str) -> tuple[Block, ...]:
    """Returns the evidence, the code to type and the link to the timeline; folded, how the saving is derived."""
    return (
        Paragraph(join_texts(" ", finding.evidence[:_SHOWN_SENTENCES]), capture),
        *list_program_lines(finding.lines, capture),
        *_list_remedy(finding, capture),
        *((TimelineLink(finding.place, capture),) if finding.place else ()),
        Details(
            "How the saving is derived, and how to check it",
            (Listing((*finding.evidence[_SHOWN_SENTENCES:], *_describe_derivation_and_check(finding))),),
            capture,
        ),
    )


def _list_remedy(finding: Finding, capture: str = "") -> tuple[Listing, ...]:
    return (Listing(finding.remedy, "python", capture),) if finding.remedy else ()


def _describe_derivation_and_check(finding: Finding) -> tuple[StrOrText, ...]:
    joules = []
    if finding.saves_joules:
        bounds = f"{format_bounds(*finding.saves_joules)}{NO_BREAK_SPACE}J"
        joules = [phrase("*What a fix saves in energy.* {} per step. {}", bounds, _HOW_JOULES_ARE_DERIVED)]
    return (
        phrase("*How the saving is derived.* {}", finding.derivation),
        *joules,
        phrase("*How to check the finding.* {}", finding.disproof),
    )


_FindingOfCapture = tuple[CaptureSummary, Finding]
_CAPTURE_FIELDS: tuple[Field[_FindingOfCapture], ...] = (
    Field("capture", "text", lambda row: row[0].title),
    Field("saving, ms", "ms", lambda row: make_saving_cell(row[1])),
    Field("share of the step", "percent", lambda row: row[1].share_of_step),
    Field("line", "code", lambda row: row[1].lines[0].place if row[1].lines else None),
    Field("evidence", "text", lambda row: row[1].evidence[0] if row[1].evidence else None),
)


def shared_findings_section(captures: Sequence[CaptureSummary]) -> Section:
    """Returns each finding of several captures once, with a table of the captures that have it."""
    findings_by_title: dict[tuple[str, str], list[_FindingOfCapture]] = {}
    for capture in captures:
        for finding in get_findings(capture):
            findings_by_title.setdefault((finding.id, finding.title), []).append((capture, finding))
    blocks: list[Block] = []
    titles_by_saving = sorted(
        findings_by_title.items(), key=lambda item: -sum(finding.share_of_step for _, finding in item[1])
    )
    for place, ((_, title), rows) in enumerate(titles_by_saving, 1):
        shares = sorted(finding.share_of_step for _, finding in rows)
        share_range = " to ".join(dict.fromkeys(rounded_percent(share) for share in (shares[0], shares[-1])))
        captures_with_it = f"{len(rows)} {plural(len(rows), 'capture')}"
        heading = f"{title}: a fix saves {share_range} of the step ({captures_with_it})"
        _, first_finding = rows[0]
        remedy = _list_remedy(first_finding)
        detail_blocks = (make_table(_CAPTURE_FIELDS, rows), Listing(_describe_derivation_and_check(first_finding)))
        if place <= SHOWN_FINDINGS:
            blocks += [Paragraph(strong(heading)), *remedy, Details("The captures", detail_blocks)]
        else:
            blocks.append(Details(heading, (*remedy, *detail_blocks)))
    return Section("findings", "Findings", tuple(blocks))


def run_finding_blocks(run: ParallelRun) -> Iterator[Block]:
    """Yields the findings about all ranks of a run. Their savings are shares of the step under the profiler."""
    for place, finding in enumerate(run.findings, 1):
        yield Paragraph(strong(f"{place}. {summarize_finding(finding)}"), run.name)
        yield from _explain_finding(finding, run.name)


def describe_line(line: Line) -> StrOrText:
    """Returns a line and its time: "train.py:212 in log_norms, called from train.py:140 · 9.8 of 10.1 ms (97 %)"."""
    caller = phrase(", called from `{}`", line.called_from) if line.called_from else ""
    share = rounded_percent(line.share)
    time = f" · {share} of {'the time of a data-loading process' if line.loads else 'the samples'}"
    if line.ms is not None:
        time = f" · {rounded(line.ms)} of {format_ms(line.ms / line.share)} ({share})"
    return phrase("`{}` in `{}`", line.place, line.function) + caller + time


def list_program_lines(lines: Sequence[Line], capture: str) -> Iterator[Block]:
    """Yields the source lines with the most time, and the folded code around the first of them.

    Yields nothing if no stacks were sampled.
    """
    if lines:
        yield Listing(tuple(map(describe_line, lines)), capture=capture)
        if lines[0].source:
            yield Details(f"The code around {lines[0].place}", (Listing(lines[0].source, "python"),), capture)
