"""The report on the terminal: its first screen, or sections with their tables."""

from __future__ import annotations

from collections.abc import Iterable
from textwrap import fill
from typing import TYPE_CHECKING, Literal

import click

from nsys_analyzer.report.model import (
    TEXT_UNITS,
    Answer,
    Block,
    Details,
    Listing,
    Paragraph,
    Report,
    Section,
    StepBars,
    Table,
)
from nsys_analyzer.report.renderers.step_bar import draw
from nsys_analyzer.report.screen import console
from nsys_analyzer.report.units import counted, format_cell
from nsys_analyzer.text import Words, plain, visible

if TYPE_CHECKING:
    from rich.console import Console

#: Rows of a table on the first screen, spaces between columns, and the least letters of names and of titles.
_ROWS, _GAP, _LEAST_NAME, _TITLE = 20, 2, 16, 9


def print_first_screen(report: Report, first: Section) -> None:
    """Prints what a report says first below its title: as many rows of a table as fit a screen."""
    from rich.text import Text

    screen = console()
    screen.print(Text(_shown(report.title), "bold"))
    for block in first.blocks:
        if not isinstance(block, Details):
            _print_block(screen, block, most=_ROWS)


def print_section(section: Section) -> None:
    """Prints a section: its text, tables and lines of code, what is folded in a report too; no figures."""
    from rich.text import Text

    screen = console()
    if section.title:
        screen.print(Text(_shown(section.title), "bold"))
    _print_blocks(screen, section.blocks, None if section.title else _ROWS)  # the first one has no title


def print_table(block: Table) -> None:
    """Prints a table by itself, whole."""
    _print_table(console(), block)


def _print_blocks(screen: Console, blocks: Iterable[Block], most: int | None = None) -> None:
    """Prints blocks with an empty line before each; no figures, nor a fold that holds nothing else."""
    for block in blocks:
        if _has_text(block):
            screen.print()
            _print_block(screen, block, most)


def _has_text(block: Block) -> bool:
    """Whether a terminal shows anything of a block; of figures it shows none."""
    if isinstance(block, Details):
        return any(map(_has_text, block.blocks))
    return isinstance(block, Paragraph | Answer | Listing | Table | StepBars)


def _print_block(screen: Console, block: Block, most: int | None = None) -> None:
    from rich import table
    from rich.text import Text

    match block:
        case Paragraph(text):
            screen.print(Text(_shown(text)))
        case Answer(text):
            screen.print(Text(_shown(text), "bold"))
        case Listing(lines, "bullets"):
            grid = table.Table.grid(padding=(0, 1))
            grid.add_column()
            grid.add_column(overflow="fold")  # a long path is broken, not cut
            for line in lines:
                grid.add_row("-", _shown(line))
            screen.print(grid)
        case Listing(lines):  # to be copied: each on a line of its own, however long
            for line in lines:
                screen.print(Text(f"    {_shown(line)}", "green"), soft_wrap=True)
        case Table():
            _print_table(screen, block, most)
        case StepBars():
            for bar in draw(block, screen):
                screen.print(bar)
        case Details(title, inner):
            screen.print(Text(_shown(title), "bold"))
            _print_blocks(screen, inner)


def _print_table(screen: Console, block: Table, most: int | None = None) -> None:
    from rich import table
    from rich.text import Text

    if block.caption:
        screen.print(Text(_shown(block.caption)))
    rows = [
        [_shown(format_cell(cell, column.unit)) for cell, column in zip(row, block.columns, strict=True)]
        for row in block.rows[:most]
    ]
    grid = table.Table(box=None, pad_edge=False, padding=(0, _GAP, 0, 0))
    titles = [_shown(column.title) for column in block.columns]
    cells = [max((len(row[place]) for row in rows), default=0) for place in range(len(titles))]
    # On the first screen a long name behind figures is cut where the screen ends, so that each row stays a line; where
    # that is not enough, the titles of figures are broken, and columns that have no room are left out.
    widths = [max(pair) for pair in zip(cells, map(len, titles), strict=True)]
    cut = [
        most is not None and place > 1 and column.unit in ("text", "code") and widths[place] > _LEAST_NAME
        for place, column in enumerate(block.columns)
    ]
    widths = [_LEAST_NAME if is_cut else width for is_cut, width in zip(cut, widths, strict=True)]
    is_broken = most is not None and sum(widths) + _GAP * len(widths) > screen.width + _GAP
    left, count = screen.width, 0
    for column, title, width, is_cut in zip(block.columns, titles, cells, cut, strict=True):
        is_text = column.unit in TEXT_UNITS
        words = title.split() if is_broken else [title]
        words = [word[:_TITLE] for word in words] if is_text else [*words, title[:_TITLE]]
        most_of_text = _LEAST_NAME if is_cut else 2 * _LEAST_NAME  # a longer one goes over several lines
        least = max(min(width, most_of_text) if is_text else width, *map(len, words), 0)
        if most is not None and count > 1 and left < least:
            break
        left, count = left - least - _GAP, count + 1
        justify: Literal["left", "right"] = "left" if is_text else "right"
        overflow: Literal["ellipsis", "fold"] = "ellipsis" if is_cut else "fold"
        fixed = least if is_broken and not is_text else None
        ratio = 1 if is_cut else None
        grid.expand |= is_cut
        grid.add_column(title, justify=justify, overflow=overflow, no_wrap=is_cut, ratio=ratio, width=fixed)
    for row in rows:
        grid.add_row(*map(Text, row[:count]))
    screen.print(grid)
    more = [(len(block.rows) - len(rows), "row"), (len(block.columns) - count, "column")]
    if said := " and ".join(counted(number, noun) for number, noun in more if number):
        screen.print(f"{said} more: see the report.")


def print_answer(report: Report) -> None:
    """Prints what a report says first."""
    first = next(block for section in report.sections for block in section.blocks if isinstance(block, Paragraph))
    click.echo(fill(_shown(first.text), 100))


def _shown(text: Words) -> str:
    """Text without marks, and without the no-break spaces that a terminal breaks at all the same."""
    return visible(plain(text)).replace("\N{NO-BREAK SPACE}%", "%")
