"""Keeps a report of many captures readable: what is said capture by capture is folded, what all share is said once."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import groupby

from nsys_analyzer.report.model import Answer, Block, Details, Paragraph, Section, Table
from nsys_analyzer.report.sections.evidence import FEW
from nsys_analyzer.report.units import format_cell
from nsys_analyzer.text import Text, Words, joined, phrase, spans

_LONG_TABLE = 60


def fold(section: Section) -> Section:
    """The section with its answers and its tables of one capture each folded where they are many.

    Long tables are folded too, and what every row of a table shares is said before it.
    """
    return replace(section, blocks=tuple(_folded(section.blocks)))


def _folded(blocks: tuple[Block, ...]) -> Iterator[Block]:
    for kind, found in groupby(blocks, _kind):
        run = tuple(found)
        if kind and len(run) > FEW:
            yield Details(f"Capture by capture: {len(run)} {kind}", run)
        else:
            for block in run:
                yield from _shorter(block)


def _kind(block: Block) -> str:
    """What a block is one of, where there is one for each capture."""
    if isinstance(block, Answer):
        return "answers"
    return "tables" if isinstance(block, Table) and block.capture else ""


def _shorter(block: Block) -> Iterator[Block]:
    if isinstance(block, Details) and len(block.blocks) == 1 and isinstance(block.blocks[0], Table):
        for one in _said_once(block.blocks[0]):
            yield replace(block, blocks=(one,)) if isinstance(one, Table) else one
    elif isinstance(block, Details):
        yield replace(block, blocks=tuple(one for inner in block.blocks for one in _said_once(inner)))
    elif isinstance(block, Table) and len(block.rows) > _LONG_TABLE:
        *said, last = _said_once(block)
        yield from said
        yield Details(f"The whole table: {len(block.rows)} rows", (last,))
    else:
        yield from _said_once(block)


def _said_once(block: Block) -> Iterator[Block]:
    """What a long table says in every row, as a sentence, and the rest of it, if there is any."""
    if not isinstance(block, Table) or block.capture or len(block.rows) <= FEW:
        yield block
        return
    table = _without_shared(block)
    if table.caption:
        yield Paragraph(table.caption)
    if len(table.columns) > 1:
        yield replace(table, caption="")


def _without_shared(table: Table) -> Table:
    """The table without the columns whose cell is the same in every row: its caption says them once."""
    shared = {i for i in range(1, len(table.columns)) if len({row[i] for row in table.rows}) == 1}
    kept = [i for i in range(len(table.columns)) if i not in shared]
    first = table.rows[0]
    said = [
        phrase("{} {}", table.columns[i].title, format_cell(first[i], table.columns[i].unit))
        for i in sorted(shared)
        if first[i] is not None
    ]
    caption = table.caption
    if said:
        before = (_without_colon(caption), ". ") if caption else ()
        caption = joined("", (*before, "The same in every row: ", joined(", ", said), "."))
    rows = tuple(tuple(row[i] for i in kept) for row in table.rows)
    return replace(table, columns=tuple(table.columns[i] for i in kept), rows=rows, caption=caption)


def _without_colon(caption: Words) -> Words:
    *before, last = spans(caption)
    return Text((*before, replace(last, text=last.text.removesuffix(":"))))
