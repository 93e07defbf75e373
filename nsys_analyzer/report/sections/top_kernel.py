"""(b) Which kernel takes most GPU time in forward, in backward and in both."""

from __future__ import annotations

from nsys_analyzer.analysis.kernels.classes import COMMUNICATION
from nsys_analyzer.analysis.summary.compared import BOTH, Leader, leaders
from nsys_analyzer.analysis.summary.statistics import KernelRow
from nsys_analyzer.analysis.summary.summary import CaptureSummary
from nsys_analyzer.report.model import Answer, Block, Details, Section
from nsys_analyzer.report.sections.evidence import FEW, Evidence, nothing_measured
from nsys_analyzer.report.sections.pivots import pivots
from nsys_analyzer.report.tables import Field, table
from nsys_analyzer.report.units import counted, milliseconds, percent
from nsys_analyzer.text import Words, joined, phrase

#: Captures whose leaders stand in one table with their class, launches and time: more would not fit a page's width.
_IN_FULL = 2
#: A capture, a part of it, and the kernel that leads there.
_Led = tuple[str, str, KernelRow]


def answer(evidence: Evidence) -> Section:
    """The top kernel of forward, backward and both, and whether it is the same one."""
    known = [(capture.title, found) for capture in evidence.measured if (found := leaders(capture))]
    answers = tuple(Answer(title, _sentence(found, evidence), _short(found, evidence.labels)) for title, found in known)
    rows = [
        (title, f"{one.scope}{of}", kernel)
        for title, found in known
        for one in found
        for of, kernel in (("", one.kernel), (", communication", one.collective))
        if kernel
    ]
    many = len(evidence.captures) > FEW
    launches = pivots(evidence.captures, _launches, "count", f"Launches of the top {evidence.kernel}") if many else ()
    blocks: tuple[Block, ...] = (*answers, *launches, *_tables(rows, evidence)) if answers else (nothing_measured(),)
    time = "GPU time" if evidence.kernel == "kernel" else "time"
    title = f"(b) Which {evidence.kernel} takes the most {time}?"
    return Section("top_kernel", title, blocks, f"top {evidence.kernel}")


def _tables(rows: list[_Led], evidence: Evidence) -> tuple[Block, ...]:
    """Of many captures the leader over all that was seen of each, the phases apart folded."""
    # The last one of a capture is over all of it, but for a collective's row behind it.
    of_all = {row[0]: row for row in sorted(rows, key=lambda row: row[2].kernel_class != COMMUNICATION)}
    if len(of_all) <= _IN_FULL:
        return (table(_fields(evidence, few=True), rows),)
    fields = _fields(evidence, few=False)
    parts = [row for row in rows if row is not of_all[row[0]]]
    folded = (Details(f"The phases apart: {len(parts)} rows", (table(fields, parts),)),) if parts else ()
    return table(fields, of_all.values()), *folded


def _fields(evidence: Evidence, *, few: bool) -> tuple[Field[_Led], ...]:
    """Of many captures the names and shares alone: theirs are long names, and the rest stands in their answers."""
    figures: tuple[Field[_Led], ...] = (
        Field("class", "text", lambda row: row[2].kernel_class),
        Field("launches", "count", lambda row: row[2].launches_per_instance),
        Field("ms", "ms", lambda row: row[2].ms_per_instance),
    )
    return (
        Field("capture", "text", lambda row: row[0]),
        Field("phase", "text", lambda row: row[1]),
        Field(f"{evidence.kernel} with the most time", "code", lambda row: evidence.labels[row[2].name]),
        *(figures if few else ()),
        Field("share", "percent", lambda row: row[2].share),
    )


def _launches(capture: CaptureSummary) -> float | None:
    """Launches of the kernel that leads over the most that was seen of a capture."""
    found = leaders(capture)
    return found[-1].kernel.launches_per_instance if found else None


def _short(found: tuple[Leader, ...], labels: dict[str, str]) -> Words:
    return joined(
        "; ",
        (phrase("{} `{}` {}", one.scope, labels[one.kernel.name], percent(one.kernel.share)) for one in found),
    )


def _sentence(found: tuple[Leader, ...], evidence: Evidence) -> Words:
    said = {one.scope: phrase("in {} {}", one.scope, _named(one, evidence)) for one in found}
    if BOTH in said:
        said[BOTH] += f" ({_verdict({one.scope: one.kernel.name for one in found}, evidence.kernel)})"
    return phrase("{}.", joined("; ", said.values()))


def _named(leader: Leader, evidence: Evidence) -> Words:
    text, beside = _figures(leader.kernel, evidence), leader.collective
    return phrase("{}, with communication beside it, {}", text, _figures(beside, evidence)) if beside else text


def _figures(row: KernelRow, evidence: Evidence) -> Words:
    launches = counted(row.launches_per_instance, "launch")
    return phrase(
        "`{}` ({}, {}, {})", evidence.labels[row.name], launches, milliseconds(row.ms_per_instance), percent(row.share)
    )


def _verdict(leaders: dict[str, str], kernel: str) -> str:
    """Whether forward, backward and both together have one leader."""
    of_forward, of_backward, of_both = leaders["forward"], leaders["backward"], leaders[BOTH]
    if of_forward == of_backward == of_both:
        return f"the same {kernel} leads all three"
    if of_forward == of_backward:
        return f"forward and backward share it; another {kernel} leads overall"
    if of_both in (of_forward, of_backward):
        return f"the {kernel}s differ; the {'forward' if of_both == of_forward else 'backward'} one leads overall"
    return f"the {kernel}s differ; a third one leads overall"
