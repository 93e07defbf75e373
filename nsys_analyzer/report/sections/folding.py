"""Keeps a report of many captures readable: its details are folded, and what all rows of a table share is said once."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from nsys_analyzer.report.evidence import FEW
from nsys_analyzer.report.model import Answer, Block, Details, Listing, Paragraph, Section, Seen, Table
from nsys_analyzer.report.units import format_cell
from nsys_analyzer.text import joined, phrase, plain

#: Rows of a table that a screen holds.
_SCREEN = 12


def fold(section: Section) -> Section:
    """The section with what it says of one capture folded, capture by capture, and its long tables."""
    blocks: list[Block] = []
    by_capture: dict[str, list[Block]] = {}
    for block in section.blocks:
        if isinstance(block, Answer | Details | Listing | Paragraph | Seen | Table) and block.capture:
            by_capture.setdefault(block.capture, []).append(block)
        else:
            blocks += fold_table(block)
    if by_capture:
        captures = tuple(Details(title, tuple(found), title) for title, found in by_capture.items())
        blocks.append(Details(f"Capture by capture: {len(captures)}", captures))
    return replace(section, blocks=tuple(blocks))


def fold_table(block: Block) -> Iterator[Block]:
    """A long table as the sentence that every row shares and the rest of it, folded where no screen holds it."""
    if not isinstance(block, Table) or len(block.rows) <= FEW:
        yield block
        return
    table = _without_shared(block)
    if table.caption:
        yield Paragraph(table.caption)
    rest = replace(table, caption="")
    if len(rest.columns) > 1:
        yield Details(f"The whole table: {len(rest.rows)} rows", (rest,)) if len(rest.rows) > _SCREEN else rest


def _without_shared(table: Table) -> Table:
    """The table without the columns whose cell is the same in every row: its caption says them once."""
    shared = {i for i in range(1, len(table.columns)) if len({row[i] for row in table.rows}) == 1}
    kept = [i for i in range(len(table.columns)) if i not in shared]
    columns, first = table.columns, table.rows[0]
    said = [
        phrase("{} {}", columns[i].title, format_cell(first[i], columns[i].unit))
        for i in sorted(shared)
        if first[i] is not None
    ]
    caption = table.caption
    if said:
        before = (plain(caption).removesuffix(":"), ". ") if caption else ()
        caption = joined("", (*before, "The same in every row: ", joined(", ", said), "."))
    rows = tuple(tuple(row[i] for i in kept) for row in table.rows)
    return replace(table, columns=tuple(columns[i] for i in kept), rows=rows, caption=caption)
