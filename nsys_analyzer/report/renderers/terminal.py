"""The report on the terminal: its first screen, or sections with their tables."""

from __future__ import annotations

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
from nsys_analyzer.report.renderers.step_bar import draw
from nsys_analyzer.report.screen import console
from nsys_analyzer.report.units import counted, format_cell
from nsys_analyzer.text import Words, plain, visible

if TYPE_CHECKING:
    from rich.console import Console

#: Rows of a table on the first screen, spaces between columns, letters that a name has at least, and lines of a cell
#: at most, if its words are short.
_ROWS, _GAP, _NAME, _LINES = 20, 2, 16, 3
#: What stands for a no-break space while lines are broken.
_NO_BREAK, _STAND_IN = "\N{NO-BREAK SPACE}", "\ue000"


def print_first_screen(report: Report, first: Section) -> None:
    """Prints what a report says first below its title: as many rows of a table as fit a screen."""
    screen = console()
    _print_text(screen, report.title, "bold")
    for block in first.blocks:
        if not isinstance(block, Details):
            _print_block(screen, block, most=_ROWS)


def print_section(section: Section) -> None:
    """Prints a section: its text, tables and lines of code, what is folded in a report too; no figures."""
    screen = console()
    if section.title:
        _print_text(screen, section.title, "bold")
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
    match block:
        case Paragraph(text):
            _print_text(screen, text)
        case Answer(text) | Details(text):
            _print_text(screen, text, "bold")
        case Listing(lines, "bullets"):
            for line in lines:
                first, *others = _wrapped(_shown(line), screen.width - 2)
                _print_lines(screen, [f"- {first}", *(f"  {other}" for other in others)])
        case Listing(lines):  # to be copied: each on a line of its own, however long
            _print_lines(screen, [f"    {_shown(line)}" for line in lines], "green")
        case Table():
            _print_table(screen, block, most)
        case StepBars():
            for bar in draw(block, screen):
                screen.print(bar)
    if isinstance(block, Details):
        _print_blocks(screen, block.blocks)


class _Column(NamedTuple):
    """A column as it is printed; ``names_row``: it is among those that say what a row is of."""

    title: str
    cells: tuple[str, ...]
    is_text: bool
    names_row: bool
    is_cut: bool

    @property
    def longest(self) -> int:
        """Returns the width of its longest cell."""
        from rich.cells import cell_len

        return max(map(cell_len, self.cells), default=0)

    def widths(self) -> tuple[int, int]:
        """Returns the least width, in which no number, short word or title of many lines is broken, and the whole."""
        from rich.cells import cell_len

        whole = max(self.longest, cell_len(self.title))
        title = max(map(cell_len, self.title.split()), default=0)
        title = next(width for width in count(max(title, 1)) if len(_wrapped(self.title, width)) <= _LINES)
        if self.is_cut or not self.is_text:
            return max(min(self.longest, _NAME) if self.is_cut else self.longest, title), whole
        word = max((cell_len(word) for cell in self.cells for word in cell.split()), default=0)
        return max(min(self.longest, max(_NAME, -(-self.longest // _LINES), min(word, 2 * _NAME))), title), whole

    def padded(self, cell: str, width: int) -> str:
        """Returns a part of a cell or title in so many letters: text at their left, a number at their right."""
        from rich.cells import cell_len

        space = " " * (width - cell_len(cell))
        return cell + space if self.is_text else space + cell


def _print_table(screen: Console, block: Table, most: int | None = None) -> None:
    """Prints a table, as a block of each row where its columns have no room side by side.

    On a first screen, which has room for ``most`` lines, long names behind figures are cut, and so many rows that no
    block of each has room remain lines of the first columns.
    """
    if block.caption:
        _print_text(screen, block.caption)
    rows = [
        [_shown(format_cell(cell, column.unit)) for cell, column in zip(row, block.columns, strict=True)]
        for row in block.rows[:most]
    ]
    columns = []
    for place, column in enumerate(block.columns):
        is_cut = most is not None and place > 1 and column.unit in ("text", "code")
        cells = tuple(row[place] for row in rows)
        columns.append(_Column(_shown(column.title), cells, column.unit in TEXT_UNITS, place < block.names, is_cut))
    widths = _side_by_side(columns, screen.width)
    same = [one for one in columns if not one.names_row and len(set(one.cells)) == 1 < len(rows)]
    if widths is None and same and len(same) < len(block.columns) - block.names:
        _print_text(screen, f"In each row: {', '.join(f'{one.title} {one.cells[0]}' for one in same)}")
        columns = [one for one in columns if one not in same]
        widths = _side_by_side(columns, screen.width)
    blocks = [] if widths else _blocks(columns, len(rows), screen.width)
    hidden: list[str] = []
    while most and len(blocks) > most and widths is None and len(columns) > 2:
        hidden.insert(0, columns.pop().title)
        widths = _side_by_side(columns, screen.width)
    if widths is None:
        _print_lines(screen, blocks)
    else:
        titles = [_wrapped(one.title, width) for one, width in zip(columns, widths, strict=True)]
        height = max(map(len, titles))
        above = [[""] * (height - len(title)) + title for title in titles]
        _print_lines(screen, _lines(columns, widths, above), "bold")
        for row in zip(*(one.cells for one in columns), strict=True):
            parts = [_fitted(cell, *pair) for cell, pair in zip(row, zip(columns, widths, strict=True), strict=True)]
            _print_lines(screen, _lines(columns, widths, parts))
    hidden += [counted(len(block.rows) - len(rows), "row")] if len(block.rows) > len(rows) else []
    if hidden:
        _print_text(screen, f"Not shown: {', '.join(hidden)}. See the report.")


def _side_by_side(columns: Sequence[_Column], room: int) -> list[int] | None:
    """Returns the widths of columns side by side, text first as wide as it asks for; None where there is no room."""
    widths, wholes = ([*pair] for pair in zip(*(column.widths() for column in columns), strict=True))
    spare = room - sum(widths) - _GAP * (len(columns) - 1)
    if spare < 0:
        return None
    for place in sorted(range(len(columns)), key=lambda place: not columns[place].is_text):
        more = max(min(wholes[place] - widths[place], spare), 0)
        widths[place], spare = widths[place] + more, spare - more
    return widths


def _fitted(cell: str, column: _Column, width: int) -> list[str]:
    from rich.cells import cell_len, set_cell_size

    if column.is_cut and cell_len(cell) > width:
        return [f"{set_cell_size(cell, width - 1)}…"]
    return _wrapped(cell, width)


def _lines(columns: Sequence[_Column], widths: Sequence[int], cells: Sequence[Sequence[str]]) -> Iterator[str]:
    """Yields the lines of a row, of whose cells each has lines of its own."""
    for parts in zip_longest(*cells, fillvalue=""):
        padded = (one.padded(part, width) for one, part, width in zip(columns, parts, widths, strict=True))
        yield (" " * _GAP).join(padded)


def _blocks(columns: Sequence[_Column], rows: int, room: int) -> list[str]:
    """Returns the lines of a block for each row: its names, and below them each figure behind its title."""
    from rich.cells import cell_len

    lines: list[str] = []
    for row in range(rows):
        lines += _wrapped(" · ".join(one.cells[row] for one in columns if one.names_row and one.cells[row]), room)
        line = ""
        for one in columns:
            if one.names_row or not one.title:  # a column of bars has no title
                continue
            item = f"{one.title} {one._replace(is_text=True).padded(one.cells[row], one.longest)}"
            if line and cell_len(line) + _GAP + cell_len(item) > room:
                lines.append(line)
                line = ""
            if cell_len(item) > room - _GAP:
                lines += [" " * _GAP + part for part in _wrapped(item, room - _GAP)]
            else:
                line += " " * _GAP + item
        lines += [line] if line else []
    return lines


def _print_text(screen: Console, text: Words, style: str = "") -> None:
    _print_lines(screen, _wrapped(_shown(text), screen.width), style)


def _print_lines(screen: Console, lines: Iterable[str], style: str = "") -> None:
    from rich.text import Text

    for line in lines:
        screen.print(Text(line.rstrip(" "), style), soft_wrap=True)


def _wrapped(text: str, width: int) -> list[str]:
    """Returns the lines of a text; none is broken at a no-break space, as rich breaks it."""
    from rich.console import Console
    from rich.text import Text

    lines = Text(text.replace(_NO_BREAK, _STAND_IN)).wrap(Console(), max(width, 1), overflow="fold")
    return [line.plain.rstrip(" ").replace(_STAND_IN, _NO_BREAK) for line in lines]


def print_answer(report: Report) -> None:
    """Prints what a report says first."""
    first = next(block for section in report.sections for block in section.blocks if isinstance(block, Paragraph))
    click.echo(fill(_shown(first.text), 100))


def _shown(text: Words) -> str:
    """Text on one line, without marks."""
    return visible(plain(text))
