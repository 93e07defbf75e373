"""(b) Which kernel takes most GPU time in forward, in backward and in both."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from nsys_analyzer.analysis.statistics import KernelRow, merge_kernels
from nsys_analyzer.analysis.summary import CaptureSummary
from nsys_analyzer.questions.evidence import FEW, Evidence, compared_phases, nothing_measured
from nsys_analyzer.report.model import Answer, Block, Cell, Column, Details, Section, Table
from nsys_analyzer.report.units import milliseconds, percent

_LEADER = "with the most time"
_COLUMNS = (
    Column("capture"),
    Column("in one"),
    Column(_LEADER, "code"),
    Column("class"),
    Column("launches", "count"),
    Column("ms", "ms"),
    Column("share", "percent"),
)
_NAMED = ("capture", "in one", _LEADER, "share")


def answer(evidence: Evidence) -> Section:
    """The top kernel of forward, backward and both, and whether it is the same one."""
    tops = {capture.title: tuple(_tops(capture)) for capture in evidence.measured}
    answers = tuple(
        Answer(title, _sentence(rows, evidence), _short(rows, evidence.labels)) for title, rows in tops.items() if rows
    )
    rows = tuple(_row(title, scope, row, evidence) for title, found in tops.items() for scope, row in found)
    blocks: tuple[Block, ...] = (*answers, *_tables(rows, evidence)) if answers else (nothing_measured(),)
    time = "GPU time" if evidence.kernel == "kernel" else "time"
    title = f"(b) Which {evidence.kernel} takes the most {time}?"
    return Section("top_kernel", title, blocks, f"top {evidence.kernel}")


def _tables(rows: tuple[tuple[Cell, ...], ...], evidence: Evidence) -> tuple[Block, ...]:
    """Of many captures the leader over all that was seen of each, the phases apart folded."""
    of_all = {row[0]: row for row in rows}
    if len(of_all) <= FEW:
        return (_table(rows, evidence),)
    parts = tuple(row for row in rows if row is not of_all[row[0]])
    folded = (Details(f"The phases apart: {len(parts)} rows", (_table(parts, evidence),)),) if parts else ()
    return _table(tuple(of_all.values()), evidence), *folded


def _table(rows: tuple[tuple[Cell, ...], ...], evidence: Evidence) -> Table:
    """Of many captures the names and shares alone: theirs are long names, and the rest stands in their answers."""
    few = len({row[0] for row in rows}) <= FEW
    shown = [i for i, column in enumerate(_COLUMNS) if few or column.title in _NAMED]
    columns = (_COLUMNS[i] for i in shown)
    named = (replace(c, title=f"{evidence.kernel} {_LEADER}") if c.title == _LEADER else c for c in columns)
    return Table(tuple(named), tuple(tuple(row[i] for i in shown) for row in rows))


def _tops(capture: CaptureSummary) -> Iterator[tuple[str, KernelRow]]:
    phases = {phase.phase: phase for phase in compared_phases(capture)}
    forward, backward = phases.get("forward"), phases.get("backward")
    for phase in [p for p in (forward, backward) if p] or list(phases.values())[:1]:
        yield phase.phase, phase.kernels[0]
    if forward and backward:
        yield "forward+backward", merge_kernels(forward.kernels, backward.kernels)[0]


def _row(title: str, scope: str, row: KernelRow, evidence: Evidence) -> tuple[Cell, ...]:
    label = evidence.labels[row.name]
    return (title, scope, label, row.kernel_class, row.launches_per_instance, row.ms_per_instance, row.share)


def _short(tops: tuple[tuple[str, KernelRow], ...], labels: dict[str, str]) -> str:
    return "; ".join(f"{scope} `{labels[row.name]}` {percent(row.share)}" for scope, row in tops)


def _sentence(tops: tuple[tuple[str, KernelRow], ...], evidence: Evidence) -> str:
    labels, kernel = evidence.labels, evidence.kernel
    parts = [
        f"in {scope} `{labels[row.name]}` ({row.launches_per_instance:,.0f} launches, "
        f"{milliseconds(row.ms_per_instance)}, {percent(row.share)})"
        for scope, row in tops
    ]
    names = {row.name for _, row in tops}
    if len(tops) < 3:
        return f"{'; '.join(parts)}."
    of_forward, of_backward, of_both = (row.name for _, row in tops)
    if len(names) == 1:
        verdict = f"the same {kernel} in all three"
    elif of_forward == of_backward:
        verdict = f"the same {kernel} in forward and backward, another over both"
    else:
        leads = "forward's" if of_both == of_forward else "backward's" if of_both == of_backward else "neither's"
        verdict = f"not the same {kernel}; over both together {leads} leads"
    return f"{'; '.join(parts)}: {verdict}."
