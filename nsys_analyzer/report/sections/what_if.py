"""The answer to a person's own question in words: what a step would take, what it saves, and what limits it then."""

from __future__ import annotations

from collections.abc import Iterator

from nsys_analyzer.analysis.findings.what_if import PathPart, WhatIf, Where
from nsys_analyzer.analysis.kernels.class_rules import COMMUNICATION
from nsys_analyzer.report.model import Answer, Block, Paragraph, Section
from nsys_analyzer.report.tables import Field, table
from nsys_analyzer.report.units import about_milliseconds, about_percent, milliseconds_between

#: Of less work than this share is saved, something else limits the step.
_ALL = 0.9
_PATH: tuple[Field[PathPart], ...] = (
    Field("part", "text", lambda row: row.part),
    Field("where", "text", lambda row: row.where),
    Field("before ms", "ms", lambda row: row.before_ms),
    Field("after ms", "ms", lambda row: row.after_ms),
)


def answer(found: WhatIf) -> Section:
    """What a step would take after the changes, and its critical path before and after them."""
    return Section("what_if", f"{found.capture}: what if {', '.join(found.changes)}", tuple(_blocks(found)))


def _blocks(found: WhatIf) -> Iterator[Block]:
    step, new = about_milliseconds(found.step_ms), about_milliseconds(found.new_step_ms)
    low, high = found.saves_ms_low, found.saves_ms_high
    if low < 0 < high:
        change = f"between {about_milliseconds(high)} shorter and {about_milliseconds(-low)} longer"
    else:
        change = f"{milliseconds_between(*sorted((abs(low), abs(high))))} {'shorter' if high > 0 else 'longer'}"
    share = about_percent(abs(found.saves_ms) / found.step_ms)
    yield Answer(f"A step would take {new} instead of {step} without the profiler: {change} ({share}).")
    sides: tuple[Where, ...] = ("GPU", "CPU")
    where, (before, after) = max(
        ((side, found.on_path_ms(side)) for side in sides), key=lambda side: side[1][1] - side[1][0]
    )
    if 0 <= found.saves_ms < _ALL * found.less_ms:
        yield Paragraph(
            f"{about_milliseconds(found.less_ms)} less to do save {about_milliseconds(found.saves_ms)}, since the step "
            f"then waits for the {where}: {about_milliseconds(after)} of its critical path, "
            f"{about_milliseconds(before)} before."
        )
    caption = "The critical path of a step: what makes the step shorter, if it is shorter."
    yield table(_PATH, found.path, caption)
    if any(part.part == COMMUNICATION for part in found.path):
        yield Paragraph("Other ranks are left as they are: a collective that waits for one of them waits as long.")
