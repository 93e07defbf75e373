"""Prints a report on the terminal: its first screen, or sections with their tables."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from itertools import count, zip_longest
from textwrap import fill
from typing import TYPE_CHECKING, NamedTuple

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
from nsys_analyzer.report.renderers.step_bar import draw_bars
from nsys_analyzer.report.screen import console
from nsys_analyzer.report.units import format_cell, format_count
from nsys_analyzer.text import StrOrText, plain, visible

if TYPE_CHECKING:
    from rich.console import Console

#: The maximum number of rows of a table on the first screen, and the spaces between columns.
_FIRST_SCREEN_ROWS, _COLUMN_GAP = 20, 2
#: The minimum width of a column of names, and the maximum number of lines of a cell with short words.
_MIN_NAME_WIDTH, _MAX_CELL_LINES = 16, 3
#: The no-break space, and the character that replaces it while lines are broken.
_NO_BREAK_SPACE, _PLACEHOLDER = "\N{NO-BREAK SPACE}", "\ue000"
#: A file with a line number, such as "programs/train.py:22".
_FILE_AND_LINE = re.compile(r"\S+:\d+")


def print_first_screen(report: Report, first_section: Section) -> None:
    """Prints the title and the first screen of a report, with at most ``_FIRST_SCREEN_ROWS`` rows of each table."""
    screen = console()
    _print_text(screen, report.title, "bold")
    for block in first_section.blocks:
        if not isinstance(block, Details):
            _print_block(screen, block, max_rows=_FIRST_SCREEN_ROWS)


def print_section(section: Section) -> None:
    """Prints a section with its folded blocks, but without figures."""
    screen = console()
    if section.title:
        _print_text(screen, section.title, "bold")
    _print_blocks(
        screen, section.blocks, None if section.title else _FIRST_SCREEN_ROWS
    )  # the first section has no title


def print_table(block: Table) -> None:
    """Prints a complete table."""
    _print_table(console(), block)


def _print_blocks(screen: Console, blocks: Iterable[Block], max_rows: int | None = None) -> None:
    """Prints blocks, each after an empty line. Figures are omitted, and so are folds that contain only figures."""
    for block in blocks:
        if _has_text(block):
            screen.print()
            _print_block(screen, block, max_rows)


def _has_text(block: Block) -> bool:
    """Checks whether a block contains anything except figures."""
    if isinstance(block, Details):
        return any(map(_has_text, block.blocks))
    return isinstance(block, Paragraph | Answer | Listing | Table | StepBars)


def _print_block(screen: Console, block: Block, max_rows: int | None = None) -> None:
    match block:
        case Paragraph(text):
            _print_text(screen, text)
        case Answer(text) | Details(text):
            _print_text(screen, text, "bold")
        case Listing(lines, "bullets"):
            for line in lines:
                first_line, *continuation = _wrap_text(_to_plain_line(line), screen.width - 2)
                _print_lines(screen, [f"- {first_line}", *(f"  {text}" for text in continuation)])
        case Listing(lines):  # does not break lines of code, so that they can be copied
            _print_lines(screen, [f"    {_to_plain_line(line)}" for line in lines], "green")
        case Table():
            _print_table(screen, block, max_rows)
        case StepBars():
            for bar_line in draw_bars(block, screen):
                screen.print(bar_line)
    if isinstance(block, Details):
        _print_blocks(screen, block.blocks)


class _Column(NamedTuple):
    """A column with its formatted cells.

    Attributes:
        names_row: whether the cells are part of the name of the row.
        is_cut: whether cells that are too long are cut.
    """

    title: str
    cells: tuple[str, ...]
    is_text: bool
    names_row: bool
    is_cut: bool

    @property
    def longest(self) -> int:
        """Returns the width of the longest cell."""
        return max(map(_count_cells, self.cells), default=0)

    def widths(self) -> tuple[int, int]:
        """Returns the minimum and the full width.

        At the minimum width, no number or short word is broken, and the title has at most ``_MAX_CELL_LINES`` lines.
        """
        full_width = max(self.longest, _count_cells(self.title))
        title = max(map(_count_cells, self.title.split()), default=0)
        title = next(width for width in count(max(title, 1)) if len(_wrap_text(self.title, width)) <= _MAX_CELL_LINES)
        if self.is_cut or not self.is_text:
            return max(min(self.longest, _MIN_NAME_WIDTH) if self.is_cut else self.longest, title), full_width
        word = max((_count_cells(word) for cell in self.cells for word in cell.split()), default=0)
        min_width = max(_MIN_NAME_WIDTH, -(-self.longest // _MAX_CELL_LINES), min(word, 2 * _MIN_NAME_WIDTH))
        return max(min(self.longest, min_width), title), full_width

    def padded(self, cell: str, width: int) -> str:
        """Returns a line of a cell or title, padded to a width: text is aligned to the left, a number to the right."""
        space = " " * (width - _count_cells(cell))
        return cell + space if self.is_text else space + cell


def _print_table(screen: Console, block: Table, max_rows: int | None = None) -> None:
    """Prints a table, or a block of lines for each row if the columns do not fit side by side.

    On the first screen, for which ``max_rows`` is given, long texts after the second column are cut. If the blocks of
    lines need more than ``max_rows`` lines, the last columns are left out.
    """
    if block.caption:
        _print_text(screen, block.caption)
    rows = [
        [_to_plain_line(format_cell(cell, column.unit)) for cell, column in zip(row, block.columns, strict=True)]
        for row in block.rows[:max_rows]
    ]
    columns: list[_Column] = []
    for place, (title, unit) in enumerate((column.title, column.unit) for column in block.columns):
        is_cut = max_rows is not None and place > 1 and unit in ("text", "code")
        cells = tuple(row[place] for row in rows)
        columns.append(_Column(_to_plain_line(title), cells, unit in TEXT_UNITS, place < block.names, is_cut))
    widths = _fit_columns(columns, screen.width)
    constant = [column for column in columns if not column.names_row and len(set(column.cells)) == 1 < len(rows)]
    if widths is None and constant and len(constant) < len(block.columns) - block.names:
        _print_text(screen, f"In each row: {', '.join(f'{column.title} {column.cells[0]}' for column in constant)}")
        columns = [column for column in columns if column not in constant]
        widths = _fit_columns(columns, screen.width)
    blocks = [] if widths else _stack_rows(columns, len(rows), screen.width)
    hidden_parts: list[str] = []
    while max_rows and len(blocks) > max_rows and widths is None and len(columns) > 2:
        hidden_parts.insert(0, columns.pop().title)
        widths = _fit_columns(columns, screen.width)
    if widths is None:
        _print_lines(screen, blocks)
    else:
        titles = [_wrap_text(column.title, width) for column, width in zip(columns, widths, strict=True)]
        height = max(map(len, titles))
        header_rows = [[""] * (height - len(title)) + title for title in titles]
        _print_lines(screen, _format_row(columns, widths, header_rows), "bold")
        for row in zip(*(column.cells for column in columns), strict=True):
            _print_lines(screen, _format_row(columns, widths, [*map(_fit_cell, row, columns, widths)]))
    hidden_parts += [format_count(len(block.rows) - len(rows), "row")] if len(block.rows) > len(rows) else []
    if hidden_parts:
        _print_text(screen, f"Not shown: {', '.join(hidden_parts)}. See the report.")


def _fit_columns(columns: Sequence[_Column], room: int) -> list[int] | None:
    """Returns the widths of columns side by side; None if they do not fit. Spare width goes to text columns first."""
    widths, full_widths = ([*pair] for pair in zip(*(column.widths() for column in columns), strict=True))
    spare_width = room - sum(widths) - _COLUMN_GAP * (len(columns) - 1)
    if spare_width < 0:
        return None
    for place in sorted(range(len(columns)), key=lambda place: not columns[place].is_text):
        added = max(min(full_widths[place] - widths[place], spare_width), 0)
        widths[place], spare_width = widths[place] + added, spare_width - added
    return widths


def _fit_cell(cell: str, column: _Column, width: int) -> list[str]:
    """Returns the lines of a cell. If a cut cell is too long, a name loses its end, and a path its first folders."""
    if not column.is_cut or _count_cells(cell) <= width:
        return _wrap_text(cell, width)
    from rich.cells import set_cell_size

    if not _FILE_AND_LINE.fullmatch(cell):
        return [f"{set_cell_size(cell, width - 1)}…"]
    end = set_cell_size(cell[::-1], width - 1)[::-1]
    return [f"…{end[max(end.find('/'), 0) :]}"]


def _format_row(columns: Sequence[_Column], widths: Sequence[int], cells: Sequence[Sequence[str]]) -> Iterator[str]:
    """Yields the lines of a row, given the lines of each of its cells."""
    for parts in zip_longest(*cells, fillvalue=""):
        yield (" " * _COLUMN_GAP).join(map(_Column.padded, columns, parts, widths))


def _stack_rows(columns: Sequence[_Column], rows: int, room: int) -> list[str]:
    """Returns a block of lines for each row: its name, and below it the figures, each after its title."""
    lines: list[str] = []
    for row in range(rows):
        lines += _wrap_text(
            " · ".join(column.cells[row] for column in columns if column.names_row and column.cells[row]), room
        )
        line = ""
        for column in columns:
            if column.names_row or not column.title:  # columns of names, and columns of bars, which have no title
                continue
            item = f"{column.title} {column._replace(is_text=True).padded(column.cells[row], column.longest)}"
            if line and _count_cells(line) + _COLUMN_GAP + _count_cells(item) > room:
                lines.append(line)
                line = ""
            if _count_cells(item) > room - _COLUMN_GAP:
                lines += [" " * _COLUMN_GAP + part for part in _wrap_text(item, room - _COLUMN_GAP)]
            else:
                line += " " * _COLUMN_GAP + item
        lines += [line] if line else []
    return lines


def _print_text(screen: Console, text: StrOrText, style: str = "") -> None:
    _print_lines(screen, _wrap_text(_to_plain_line(text), screen.width), style)


def _print_lines(screen: Console, lines: Iterable[str], style: str = "") -> None:
    from rich.text import Text

    for line in lines:
        screen.print(Text(line.rstrip(" "), style), soft_wrap=True)


def _wrap_text(text: str, width: int) -> list[str]:
    """Returns the lines of a text. Unlike in rich, no line is broken at a no-break space."""
    from rich.console import Console
    from rich.text import Text

    lines = Text(text.replace(_NO_BREAK_SPACE, _PLACEHOLDER)).wrap(Console(), max(width, 1), overflow="fold")
    return [line.plain.rstrip(" ").replace(_PLACEHOLDER, _NO_BREAK_SPACE) for line in lines]


def print_answer(report: Report) -> None:
    """Prints the first paragraph of a report."""
    first_paragraph = next(
        block for section in report.sections for block in section.blocks if isinstance(block, Paragraph)
    )
    click.echo(fill(_to_plain_line(first_paragraph.text), 100))


def _count_cells(text: str) -> int:
    """Returns the number of terminal cells of a text."""
    from rich.cells import cell_len

    return cell_len(text)


def _to_plain_line(text: StrOrText) -> str:
    """Returns a text on one line, without formatting."""
    return visible(plain(text))
