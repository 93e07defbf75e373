"""Findings in words: what slows a step down, what a fix saves, the lines to type, and how to check it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from nsys_analyzer.analysis.findings.diagnosis import LEAST
from nsys_analyzer.analysis.findings.finding import Diagnosis, Finding
from nsys_analyzer.analysis.kernels.class_rules import MOVING, OTHER, UNKNOWN
from nsys_analyzer.analysis.ranges.phases import STEP
from nsys_analyzer.analysis.summary.summary import CaptureSummary
from nsys_analyzer.report.model import Block, Details, Interval, Listing, Paragraph, Seen, Table
from nsys_analyzer.report.tables import Field, table
from nsys_analyzer.report.units import about_percent, milliseconds, milliseconds_between
from nsys_analyzer.text import Text, Words, joined, phrase, plural, strong

_LEGEND: tuple[Words, ...] = (
    phrase(
        "*saves*: what a step would be shorter by if this alone were changed, and no profiler ran. The recorded steps "
        "are replayed without the profiler's cost, once as they are and once with the change. The two numbers rest on "
        "the least and the most that the change may save and that the profiler may cost. Where the CPU's own time is "
        "saved, they are 29% below and above their middle, or 20% where the step was timed without the profiler, since "
        "that time differs by as much between two runs of a program."
    ),
    phrase(
        "*step ms after fixes 1 to n*: the step with this change and all those above it. Changes overlap: their "
        "savings must not be added."
    ),
)
#: Findings that stand in full view.
FIRST = 3
#: A replay that misses the recorded steps by more than this is said.
_REPLAYED = 0.05
#: Communication that nothing hides, from this share of a step on, is more than a detail.
_MUCH = 0.2
#: From this share of a step on, the GPU's work fills it; most of the work; and what may be of an unknown class.
_FULL, _MOSTLY, _UNCLEAR = 0.9, 0.5, 0.1

#: The place of a finding, and the finding.
_Ranked = tuple[int, Finding]
#: The columns of a table of findings.
FIELDS: tuple[Field[_Ranked], ...] = (
    Field("#", "text", lambda row: str(row[0])),
    Field("finding", "text", lambda row: row[1].title),
    Field("saves ms", "ms", lambda row: saving(row[1])),
    Field("share of the step", "percent", lambda row: row[1].share_of_step),
    Field("step ms after fixes 1 to n", "ms", lambda row: row[1].left_after_all_ms),
)


def legend_of_findings(captures: Iterable[CaptureSummary]) -> tuple[Words, ...]:
    """What the figures of findings are, where there are any."""
    return _LEGEND if any(map(to_fix, captures)) else ()


def to_fix(capture: CaptureSummary) -> tuple[Finding, ...]:
    """The findings of a capture, what to do first before others."""
    return capture.diagnosis.findings if capture.diagnosis else ()


def first_to_fix(capture: CaptureSummary) -> Finding | None:
    """What to do first."""
    return next(iter(to_fix(capture)), None)


def without_profiler(capture: CaptureSummary) -> Interval | None:
    """What a step takes without the profiler, ms: as it was timed, else as it is estimated."""
    if timed := _timed_ms(capture):
        return Interval(timed, timed)
    diagnosis = capture.diagnosis
    return None if diagnosis is None or diagnosis.doubt else Interval(diagnosis.step_ms_low, diagnosis.step_ms_high)


def is_estimated(capture: CaptureSummary) -> bool:
    """Whether the step's time without the profiler, where it is known, was not timed."""
    return _timed_ms(capture) is None


def _timed_ms(capture: CaptureSummary) -> float | None:
    return capture.unprofiled.trusted_ms(STEP) if capture.unprofiled else None


def saving(finding: Finding) -> Interval:
    """What a finding saves, as a cell."""
    return Interval(finding.saves_ms_low, finding.saves_ms_high)


def in_a_line(finding: Finding, capture: CaptureSummary) -> str:
    """A finding and what it saves: "The GPU waits for launches: saves 12–21 ms of 53–58 ms (30 % of the step)"."""
    return f"{finding.title}: {saves_in_words(finding, capture)}"


def saves_in_words(finding: Finding, capture: CaptureSummary) -> str:
    """What a finding saves: "saves 12–21 ms of 53–58 ms (30 % of the step)"."""
    said = saves_of(finding, without_profiler(capture) or Interval(finding.step_ms, finding.step_ms))
    return str(capture.step.in_words(said)) if capture.step else said


def saves_of(finding: Finding, step: Interval) -> str:
    """What a finding saves of a step of so many ms; or the time that it is about."""
    of = milliseconds_between(step.low, step.high)
    if not finding.saves_ms_low:  # nothing tells how much of it can be saved
        return f"{milliseconds(finding.saves_ms_high)} of {of} ({about_percent(2 * finding.share_of_step)} of the step)"
    saves = milliseconds_between(finding.saves_ms_low, finding.saves_ms_high)
    return f"saves {saves} of {of} ({about_percent(finding.share_of_step)} of the step)"


def in_lines(capture: CaptureSummary) -> tuple[Words, ...]:
    """The first findings with their places, and why others are missing; else that there are none."""
    found = enumerate(to_fix(capture)[:FIRST], 1)
    lines: list[Words] = [f"{place}. {in_a_line(one, capture)}" for place, one in found]
    why = capture.findings_missing
    doubt = capture.diagnosis.doubt if capture.diagnosis else ""
    lines = [*([why] if why and doubt else []), *lines, *([why] if why and not doubt else [])]
    return tuple(lines or [nothing_found(capture)])


def nothing_found(capture: CaptureSummary) -> str:
    """That nothing stands out, and how close the step is to the GPU's work in it."""
    diagnosis, step = capture.diagnosis, capture.step
    if step and step.exposed_communication_ms > _MUCH * step.total_ms:
        part = about_percent(step.exposed_communication_ms / step.total_ms)
        return (
            f"For {part} of the step the GPU only communicates. "
            "Whether it transfers or waits for a late rank is known only beside the captures of the other ranks."
        )
    said = f"Nothing stands out: no change that is looked for saves {about_percent(LEAST)} of the step or more."
    if diagnosis is None or not diagnosis.step_ms:
        return said
    share = min(diagnosis.busy_ms / diagnosis.step_ms, 1.0)
    said += f" The GPU's work fills {about_percent(share)} of the step without the profiler."
    return said + (_more_of_the_same(capture) if share >= _FULL else "")


def _more_of_the_same(capture: CaptureSummary) -> str:
    """Where a larger batch would not help a step that the GPU's work fills; empty where that is not known."""
    classes = capture.step.classes if capture.step else ()
    total = sum(one.ms for one in classes)
    if not total or any(one.kernel_class in (UNKNOWN, OTHER) and one.ms > _UNCLEAR * total for one in classes):
        return ""
    share = sum(one.ms for one in classes if one.kernel_class in MOVING) / total
    smaller = " Smaller data types would shorten them." if share >= _MOSTLY else ""
    return (
        f" {about_percent(share)} of it is in kernels that read and write more than they compute: a larger batch makes "
        f"them longer, not faster.{smaller}"
    )


def findings_of(capture: CaptureSummary, *, explained: bool) -> Iterator[Block]:
    """The findings of a capture in a table, and each one ``explained``."""
    diagnosis = capture.diagnosis
    if diagnosis is None:
        return
    ranked = list(enumerate(to_fix(capture), 1))
    if ranked:
        yield _table(capture.title, ranked)
        if why := capture.findings_missing:  # without any to fix the answer has said it
            yield Paragraph(why, capture.title)
    if diagnosis.overhead_ms:
        low, high = diagnosis.overhead_ms
        yield Paragraph(
            f"The profiler takes {milliseconds_between(low, high)} of a profiled step, an estimate by the number of "
            "events that it recorded: all findings leave this time out.",
            capture.title,
        )
    if ranked and abs(diagnosis.error) > _REPLAYED:
        yield Paragraph(_roughly(diagnosis), capture.title)
    shown = [(f"{place}. {in_a_line(one, capture)}", _seen_andfixed(one, capture.title)) for place, one in ranked]
    for title, blocks in shown[:FIRST] if explained else ():
        yield Paragraph(strong(title), capture.title)
        yield from blocks
    for title, blocks in shown[FIRST:] if explained else ():
        yield Details(title, blocks, capture.title)
    if ranked and not explained:
        lines = (phrase("**{}** {}", f"{one.title}:", joined(" ", one.evidence)) for _, one in ranked)
        yield Listing(tuple(lines), capture=capture.title)


def remedies(captures: Iterable[CaptureSummary]) -> Iterator[Details]:
    """What to do about each finding of many captures, said once."""
    found: dict[tuple[object, ...], tuple[Finding, list[str]]] = {}
    for capture in captures:
        for one in capture.diagnosis.findings if capture.diagnosis else ():
            key = (one.id, one.derivation, one.remedy, one.disproof)
            found.setdefault(key, (one, []))[1].append(capture.title)
    for one, names in sorted(found.values(), key=lambda pair: -len(pair[1])):
        title = f"{one.title} ({len(names)} {plural(len(names), 'capture')})"
        yield Details(title, (Listing(one.remedy, "python"), Listing(_reasons(one))))


def _table(capture: str, ranked: list[_Ranked]) -> Table:
    caption = "What to fix, the largest saving first; of the step without the profiler:"
    return table(FIELDS, ranked, caption, capture=capture, names=2)


def _seen_andfixed(finding: Finding, capture: str) -> tuple[Block, ...]:
    """What was seen, what to type, and what both rest on."""
    return (Paragraph(joined(" ", finding.evidence), capture), *seen(finding, capture), *fixed(finding, capture))


def seen(finding: Finding, capture: str) -> tuple[Seen, ...]:
    """Where a timeline shows a finding."""
    return (Seen(finding.place, capture),) if finding.place else ()


def fixed(finding: Finding, capture: str) -> tuple[Block, ...]:
    """What to type, and what that rests on."""
    return Listing(finding.remedy, "python", capture), Listing(_reasons(finding), capture=capture)


def _reasons(finding: Finding) -> tuple[Words, ...]:
    return (
        phrase("How the saving is derived: {}", finding.derivation),
        phrase("How to check: {}", finding.disproof),
    )


def _roughly(diagnosis: Diagnosis) -> Text:
    longer = "longer" if diagnosis.error > 0 else "shorter"
    off = about_percent(abs(diagnosis.error))
    return phrase("The replayed steps are {} {} than the recorded ones: take these savings as rough ones.", off, longer)
