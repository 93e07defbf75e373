"""The answer to a person's own question in words: what a step would take, what it saves, and what limits it then."""

from __future__ import annotations

from collections.abc import Iterator

from nsys_analyzer.analysis.kernels.class_rules import COMMUNICATION
from nsys_analyzer.analysis.what_if import PathPart, Saving, WhatIf, Where
from nsys_analyzer.report.model import Answer, Block, Field, Paragraph, Section, SignedChange, make_table
from nsys_analyzer.report.units import format_ms, format_ms_range, rounded_percent

#: Of less work than this share is saved, something else limits the step.
_ALL = 0.9
#: A change of less than this share of a step is none.
_NOTHING = 0.001
_PATH: tuple[Field[PathPart], ...] = (
    Field("part", "text", lambda row: row.part),
    Field("where", "text", lambda row: row.where),
    Field("rank", "text", lambda row: row.rank or None),
    Field("before ms", "ms", lambda row: row.before_ms),
    Field("after ms", "ms", lambda row: row.after_ms),
)
_GROUPS: tuple[Field[Saving], ...] = (
    Field("steps", "text", lambda row: row.group),
    Field("count", "count", lambda row: row.steps),
    Field("before ms", "ms", lambda row: row.step_ms),
    Field("after ms", "ms", lambda row: row.new_step_ms),
    Field("change ms", "ms", lambda row: SignedChange(-row.saves_ms, -row.saves_ms_high, -row.saves_ms_low)),
)


def answer(found: WhatIf) -> Section:
    """What a step would take after the changes, and its critical path before and after them."""
    return Section("what_if", f"{found.capture}: what if {', '.join(found.changes)}", tuple(_blocks(found)))


def _blocks(found: WhatIf) -> Iterator[Block]:
    step, new = format_ms(found.step_ms), format_ms(found.new_step_ms)
    low, high = found.saves_ms_low, found.saves_ms_high
    share = f" ({rounded_percent(abs(found.saves_ms) / found.step_ms)})"
    if max(abs(low), abs(high)) < _NOTHING * found.step_ms:
        change, share = "as long", ""
    elif low < 0 < high:
        change = f"between {format_ms(high)} shorter and {format_ms(-low)} longer"
    else:
        change = f"{format_ms_range(*sorted((abs(low), abs(high))))} {'shorter' if high > 0 else 'longer'}"
    yield Answer(f"A step would take {new} instead of {step} without the profiler: {change}{share}.")
    sides: tuple[Where, ...] = ("GPU", "CPU")
    where, (before, after) = max(
        ((side, found.on_path_ms(side)) for side in sides), key=lambda side: (side[1][1] - side[1][0], side[1][1])
    )
    if 0 <= found.saves_ms < _ALL * found.less_ms:
        limit = (
            f"since the step then waits for the {where}: {format_ms(after)} of its critical path, "
            f"{format_ms(before)} before"
        )
        why = limit if after > before else "since the rest of it is not on the critical path"
        each = " on each rank" if found.ranks else ""
        yield Paragraph(f"{format_ms(found.less_ms)} less to do{each} save {format_ms(found.saves_ms)}, {why}.")
    if found.ranks:
        rank = max(found.ranks, key=lambda label: found.on_path_ms(label)[1])
        before, after = found.on_path_ms(rank)
        yield Paragraph(
            f"The ranks wait for each other: of the critical path {format_ms(after)} are then on {rank}, "
            f"{format_ms(before)} before."
        )
    if found.groups:
        yield make_table(_GROUPS, found.groups, "A step of each group, and of all by how many there are.")
    caption = "The critical path of a step: what makes the step shorter, if it is shorter."
    yield make_table(_PATH, found.path, caption)
    if not found.ranks and any(part.part == COMMUNICATION for part in found.path):
        yield Paragraph(
            "Other ranks are left as they are: a collective that waits for one of them waits as long, and how much of "
            "it is waiting is not known. With the captures of all ranks they are replayed together."
        )
