"""The report on the terminal: its answers in short, or a section with its tables."""

from __future__ import annotations

from collections.abc import Iterable
from textwrap import fill
from typing import TYPE_CHECKING

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
    Table,
)
from nsys_analyzer.report.screen import console
from nsys_analyzer.report.units import format_cell
from nsys_analyzer.text import Words, plain, plural, visible

if TYPE_CHECKING:
    from rich.console import Console

#: Captures whose every answer fits a screen.
_FEW = 6
#: What is printed of each of more captures: its first answer, and the first line that belongs to it.
_FIRST = 2


def print_answers(report: Report) -> None:
    """Prints every answer of the report in a few words, capture by capture; of many captures the first."""
    from rich.table import Table
    from rich.text import Text

    screen = console()
    captures: dict[str, list[tuple[str, Words]]] = {}
    for section in report.sections:
        for answer in section.answers:
            lines = captures.setdefault(answer.capture, [])
            lines += [(section.topic, answer.short), *(("", line) for line in answer.more)]
    many = len(captures) > _FEW
    # A run that was timed alone has nothing to say but its time.
    alone = {one.title for one in report.captures if one.status == "not_profiled"} & set(captures) if many else set()
    for capture, answers in captures.items():
        if capture in alone:
            continue
        screen.print(Text(_shown(capture), "bold"))
        grid = Table.grid(padding=(0, 2), pad_edge=True)
        grid.add_column()
        grid.add_column(overflow="fold")
        for topic, short in answers[:_FIRST] if many else answers:
            grid.add_row(Text(_shown(topic), "cyan"), _shown(short))
        screen.print(grid)
    if alone:
        screen.print(f"{len(alone)} {plural(len(alone), 'configuration')} without a capture: see the report.")


def print_section(section: Section) -> None:
    """Prints a section: its text, tables and lines of code, what is folded in a report too; no figures."""
    from rich.text import Text

    screen = console()
    screen.print(Text(_shown(section.title), "bold"))
    _print_blocks(screen, section.blocks)


def _print_blocks(screen: Console, blocks: Iterable[Block]) -> None:
    """Prints blocks with an empty line before each."""
    from rich import table
    from rich.text import Text

    for block in blocks:
        match block:
            case Paragraph(text):
                screen.print("", Text(_shown(text)), sep="\n")
            case Answer(capture, text):
                screen.print("", Text.assemble((f"{_shown(capture)}: ", "bold"), _shown(text)), sep="\n")
            case Listing(lines, "bullets"):
                grid = table.Table.grid(padding=(0, 1))
                grid.add_column()
                grid.add_column(overflow="fold")  # a long path is broken, not cut
                for line in lines:
                    grid.add_row("-", _shown(line))
                screen.print("", grid, sep="\n")
            case Listing(lines):  # to be copied: each on a line of its own, however long
                screen.print()
                for line in lines:
                    screen.print(Text(f"    {_shown(line)}", "green"), soft_wrap=True)
            case Table():
                screen.print()
                _print_table(screen, block)
            case Details(title, inner):
                screen.print("", Text(_shown(title), "bold"), sep="\n")
                _print_blocks(screen, inner)


def _print_table(screen: Console, block: Table) -> None:
    from rich import table
    from rich.text import Text

    if block.caption:
        screen.print(Text(_shown(block.caption)))
    grid = table.Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for column in block.columns:
        is_text = column.unit in TEXT_UNITS
        grid.add_column(_shown(column.title), justify="left" if is_text else "right", overflow="fold")
    for row in block.rows:
        cells = (format_cell(cell, column.unit) for cell, column in zip(row, block.columns, strict=True))
        grid.add_row(*map(_shown, cells))
    screen.print(grid)


def print_answer(report: Report) -> None:
    """Prints what a report says first."""
    first = next(block for section in report.sections for block in section.blocks if isinstance(block, Paragraph))
    click.echo(fill(_shown(first.text), 100))


def _shown(text: Words) -> str:
    """Text without marks, and without the no-break spaces that a terminal breaks at all the same."""
    return visible(plain(text)).replace("\N{NO-BREAK SPACE}%", "%")
