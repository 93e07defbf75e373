"""Findings in words: what slows a step down, what a fix saves, the lines to type, and what would disprove it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from nsys_analyzer.analysis.findings.diagnosis import LEAST
from nsys_analyzer.analysis.findings.finding import Diagnosis, Finding
from nsys_analyzer.analysis.summary.summary import CaptureSummary
from nsys_analyzer.report.model import Block, Details, Interval, Listing, Paragraph, Table
from nsys_analyzer.report.tables import Field, table
from nsys_analyzer.report.units import about_milliseconds, about_percent, milliseconds_between
from nsys_analyzer.text import Text, Words, joined, phrase, plural, strong

_LEGEND: tuple[Words, ...] = (
    phrase(
        "*saves*: what a step would be shorter by if this alone were changed, and no profiler ran. The recorded steps "
        "are replayed without the profiler's cost, once as they are and once with the change. The two numbers rest on "
        "the least and the most that the change may save and that the profiler may cost."
    ),
    phrase(
        "*step after it*: the step with this change and all those above it. Changes overlap: their savings must not be "
        "added."
    ),
)
_OF_PROFILER = phrase(
    "*The profiler slows the step down* is said of the step under the profiler. All other findings leave the profiler "
    "out: this one changes nothing in the program."
)
#: The finding that is none of the program's.
_PROFILER = "profiler_overhead"
#: Findings that stand in full view.
_FIRST = 3
#: A replay that misses the recorded steps by more than this is said.
_REPLAYED = 0.05

#: The place of a finding, and the finding.
_Ranked = tuple[int, Finding]
_FIELDS: tuple[Field[_Ranked], ...] = (
    Field("#", "text", lambda row: str(row[0])),
    Field("finding", "text", lambda row: row[1].title),
    Field("saves ms", "ms", lambda row: saving(row[1])),
    Field("share of the step", "percent", lambda row: row[1].share_of_step),
    Field("step after it ms", "ms", lambda row: row[1].left_ms),
)


def legend_of_findings(captures: Iterable[CaptureSummary]) -> tuple[Words, ...]:
    """What the figures of findings are, where there are any."""
    ids = {one.id for capture in captures for one in (capture.diagnosis.findings if capture.diagnosis else ())}
    return (*(_LEGEND if ids else ()), *([_OF_PROFILER] if _PROFILER in ids else []))


def first_to_fix(diagnosis: Diagnosis) -> Finding | None:
    """The finding in the program itself that saves most."""
    return next((one for one in diagnosis.findings if one.id != _PROFILER), None)


def saving(finding: Finding) -> Interval:
    """What a finding saves, as a cell."""
    return Interval(finding.saves_ms_low, finding.saves_ms_high)


def in_a_line(finding: Finding) -> str:
    """A finding and what it saves: "The GPU waits for launches: saves 12–21 ms of 56 ms (30 %)"."""
    return f"{finding.title}: {saves_in_words(finding)}"


def saves_in_words(finding: Finding) -> str:
    """What a finding saves: "saves 12–21 ms of 56 ms (30 %)"."""
    saves = milliseconds_between(finding.saves_ms_low, finding.saves_ms_high)
    share = about_percent(finding.share_of_step)
    return f"saves {saves} of {about_milliseconds(finding.step_ms)} ({share})"


def in_lines(capture: CaptureSummary, most: int = _FIRST) -> tuple[str, ...]:
    """The first findings with their places, or that there are none; empty where they are not known."""
    diagnosis = capture.diagnosis
    if diagnosis is None:
        return ()
    lines = (f"{place}. {in_a_line(one)}" for place, one in enumerate(diagnosis.findings[:most], 1))
    return tuple(lines) if diagnosis.findings else (nothing_found(diagnosis),)


def nothing_found(diagnosis: Diagnosis) -> str:
    """That nothing stands out, and how close the step is to the GPU's work in it."""
    share = min(diagnosis.busy_ms / diagnosis.step_ms, 1.0) if diagnosis.step_ms else 0.0
    return (
        f"Nothing stands out: no change that is looked for saves {about_percent(LEAST)} of the step or more. The GPU's "
        f"work fills {about_percent(share)} of the step"
    )


def findings_of(capture: CaptureSummary, *, explained: bool) -> Iterator[Block]:
    """The findings of a capture in a table, and each one ``explained``."""
    diagnosis = capture.diagnosis
    if diagnosis is None:
        yield Paragraph(_lacking(capture), capture.title)
        return
    ranked = list(enumerate(diagnosis.findings, 1))
    if not ranked:
        return
    yield _table(capture.title, ranked)
    if abs(diagnosis.error) > _REPLAYED:
        yield Paragraph(_roughly(diagnosis), capture.title)
    shown = [(f"{place}. {in_a_line(one)}", _seen_and_fixed(one, capture.title)) for place, one in ranked]
    for title, blocks in shown[:_FIRST] if explained else ():
        yield Paragraph(strong(title), capture.title)
        yield from blocks
    for title, blocks in shown[_FIRST:] if explained else ():
        yield Details(title, blocks, capture.title)
    if not explained:
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
    return table(_FIELDS, ranked, caption, capture=capture, names=2)


def _seen_and_fixed(finding: Finding, capture: str) -> tuple[Block, ...]:
    """What was seen, what to type, and what both rest on."""
    return (
        Paragraph(joined(" ", finding.evidence), capture),
        Listing(finding.remedy, "python", capture),
        Listing(_reasons(finding), capture=capture),
    )


def _reasons(finding: Finding) -> tuple[Words, ...]:
    return (
        phrase("How the saving is derived: {}", finding.derivation),
        phrase("What would disprove it: {}", finding.disproof),
    )


def _roughly(diagnosis: Diagnosis) -> Text:
    longer = "longer" if diagnosis.error > 0 else "shorter"
    off = about_percent(abs(diagnosis.error))
    return phrase("The replayed steps are {} {} than the recorded ones: take these savings as rough ones.", off, longer)


def _lacking(capture: CaptureSummary) -> Words:
    """Why nothing was looked for, and what to do."""
    by_torch = capture.metadata is not None and capture.metadata.profiler == "torch"
    remedy = (
        phrase("Record with `activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]`.")
        if by_torch
        else phrase("Capture with `nsys profile --trace=cuda,nvtx`.")
    )
    if capture.step is not None and capture.step.launch_latency_us is not None:
        return phrase(
            "**Findings**: not known. They need the API calls of whole steps, and this capture holds too few of them."
        )
    return phrase(
        "**Findings**: not known. They need the API calls of the program, which this capture does not hold. {}", remedy
    )
