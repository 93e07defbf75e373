"""The figures of a comparison in tables: what explains the change, times, kernels, findings."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import NamedTuple

from nsys_analyzer.analysis.comparison.change import Change
from nsys_analyzer.analysis.comparison.comparison import (
    Comparison,
    FindingChange,
    KernelChange,
    PartChange,
    StepChange,
)
from nsys_analyzer.analysis.kernels.labels import short_labels
from nsys_analyzer.report.evidence import CAUSE_WORDS
from nsys_analyzer.report.model import Block, Cell, Listing, Paragraph, Shift, Table
from nsys_analyzer.report.tables import Field, table
from nsys_analyzer.report.units import format_number, milliseconds_between
from nsys_analyzer.text import Words, phrase
from nsys_analyzer.trace.metadata import CPU

_CAUSES: dict[str, str] = dict(CAUSE_WORDS.items())
#: What is below this share of the step is not in a table by itself; and so many rows of kernels are.
_MATTERS, _MOST_KERNELS = 0.005, 10


def explaining(comparison: Comparison, title: str) -> Iterator[Block]:
    """What stands below the answer: the reasons that were overridden, and what explains the change."""
    if comparison.cautions:
        yield Paragraph("Compared all the same, as --force says, although:", title)
        yield Listing(comparison.cautions, capture=title)
    if comparison.step:
        yield _parts(comparison.step, title)


def others(comparison: Comparison, title: str) -> Iterator[Block]:
    """The other figures: times, kernels, findings."""
    if times := list(_times(comparison)):
        yield table(_TIMES, times, "Times, ms:", capture=title)
    if comparison.step:
        yield from _kernels(comparison.step, title)
    if comparison.findings:
        several = len(comparison.before.runs) + len(comparison.after.runs) > len(("before", "after"))
        of_runs = " (those of most runs of a side, medians)" if several else ""
        yield Paragraph(f"Findings, and what removing each would save{of_runs}:", title)
        yield Listing(tuple(map(_finding, comparison.findings)), capture=title)


class _Row(NamedTuple):
    """A row of a table: its name, the change, and its cells where it is no change of its own."""

    name: str
    change: Change | None
    before: Cell
    after: Cell
    shift: Cell


def _row(name: str, change: Change) -> _Row:
    return _Row(name, change, change.before_ms, change.after_ms, Shift(change.ms, change.low_ms, change.high_ms))


def relative(change: Change | None) -> Shift | None:
    """A change as a share of what was before, with its interval."""
    if change is None or change.share is None:
        return None
    return Shift(change.share, change.low_share, change.high_share)


_PARTS: tuple[Field[_Row], ...] = (
    Field("part of the step", "text", lambda row: row.name),
    Field("before", "ms", lambda row: row.before),
    Field("after", "ms", lambda row: row.after),
    Field("change (95% interval)", "ms", lambda row: row.shift),
)
_TIMES: tuple[Field[_Row], ...] = (
    Field("time", "text", lambda row: row.name),
    Field("before", "ms", lambda row: row.before),
    Field("after", "ms", lambda row: row.after),
    Field("change (95% interval)", "percent", lambda row: relative(row.change)),
)


def name_of(part: PartChange) -> str:
    """A part in words: compute: matmul; idle: the program waits for the GPU."""
    if part.kind == "compute":
        return f"compute: {part.name}"
    return f"idle: {_CAUSES[part.name]}" if part.kind == "idle" else part.kind


def _parts(step: StepChange, capture: str) -> Table:
    """What explains the change of the step: the parts that matter, and the sum of the others; each column adds up."""
    longest = max(step.wall.before_ms, step.wall.after_ms)
    least = _MATTERS * longest
    large = [part for part in step.parts if abs(part.change.ms) >= least]
    small = [part for part in step.parts if abs(part.change.ms) < least]
    if len(small) == 1:
        large, small = [*large, *small], []
    rows = [_row(name_of(part), part.change) for part in large]
    if small:
        rows.append(_sum(f"{len(small)} parts with less change", small))
    rows.append(_row("the step", step.wall))
    caption = "What explains the change: the step under the profiler, ms, the largest change first."
    return table(_PARTS, rows, caption, capture=capture)


def _sum(name: str, parts: Iterable[PartChange]) -> _Row:
    """What some parts add up to."""
    changes = [part.change for part in parts]
    before, after = sum(one.before_ms for one in changes), sum(one.after_ms for one in changes)
    return _Row(name, None, before, after, Shift(after - before))


def _times(comparison: Comparison) -> Iterator[_Row]:
    """The step and the phases by each clock: without the profiler first. Wall time needs somebody who waits."""
    step = comparison.step
    busy = "operators busy" if comparison.before.runs[0].gpu == CPU else "GPU busy"
    if comparison.unprofiled:
        yield _row("step, without the profiler", comparison.unprofiled)
    for phase in comparison.phases:
        if phase.unprofiled:
            yield _row(f"{phase.phase}, without the profiler", phase.unprofiled)
    if step:
        yield _row("step, under the profiler", step.wall)
        yield _row(f"step, {busy}", step.busy)
    for phase in comparison.phases:
        if phase.synchronized:
            yield _row(f"{phase.phase}, under the profiler", phase.wall)
        yield _row(f"{phase.phase}, {busy}", phase.busy)


class _KernelRow(NamedTuple):
    """A kernel of a class, by its short label."""

    label: str
    kernel_class: str
    one: KernelChange


_KERNELS: tuple[Field[_KernelRow], ...] = (
    Field("kernel", "text", lambda row: row.label),
    Field("class", "text", lambda row: row.kernel_class),
    Field("launches", "text", lambda row: launches_of(row.one.before_launches, row.one.after_launches)),
    Field("before", "ms", lambda row: row.one.change.before_ms),
    Field("after", "ms", lambda row: row.one.change.after_ms),
    Field("change", "ms", lambda row: Shift(row.one.change.ms)),
)


def _kernels(step: StepChange, capture: str) -> Iterator[Table]:
    """The kernels whose time changed most, by more than chance."""
    labels = short_labels(sorted({name for part in step.parts for one in part.kernels for name in _names(one)}))
    rows = [(part.name, one) for part in step.parts for one in part.kernels]
    least = _MATTERS * max(step.wall.before_ms, step.wall.after_ms)
    changed = sorted(
        (row for row in rows if row[1].change.is_change and abs(row[1].change.ms) >= least / 2),
        key=lambda row: -abs(row[1].change.ms),
    )
    if changed:
        shown = [_KernelRow(_label(one, labels, name), name, one) for name, one in changed[:_MOST_KERNELS]]
        launches = f"{launches_of(step.before_launches, step.after_launches)} launched in a step"
        caption = f"Kernels whose time changed most, ms and launches of a step ({launches}):"
        yield table(_KERNELS, shown, caption, capture=capture, names=2)


def _names(one: KernelChange) -> list[str]:
    return [name for name in (one.before_name, one.after_name) if name]


def _label(one: KernelChange, labels: dict[str, str], kernel_class: str) -> str:
    """A kernel's label, or both where two stand for each other; of fills and opaque graphs their class."""
    names = [labels[name] for name in dict.fromkeys(_names(one))] or [kernel_class]
    only = " (only before)" if one.after_name is None else " (only after)" if one.before_name is None else ""
    return " → ".join(names) + only


def has_renamed(step: StepChange | None) -> bool:
    """Whether kernels of other names stand for each other."""
    kernels = [one for part in step.parts for one in part.kernels] if step else []
    return any(len(set(_names(one))) > 1 for one in kernels)


def _finding(one: FindingChange) -> Words:
    savings = " → ".join(
        milliseconds_between(each.saves_ms_low, each.saves_ms_high) for each in (one.before, one.after) if each
    )
    return phrase("**{}**: {} ({})", one.status, one.finding.title, savings)


def launches_of(before: float, after: float) -> str:
    """Launches of a step before and after, once where they are the same."""
    written = format_number(before, "count"), format_number(after, "count")
    return written[0] if written[0] == written[1] else " → ".join(written)
