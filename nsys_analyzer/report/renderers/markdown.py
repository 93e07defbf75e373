"""The report as markdown."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence

from tabulate import tabulate

from nsys_analyzer.report.model import (
    TEXT_UNITS,
    Answer,
    Block,
    Details,
    Listing,
    Paragraph,
    Report,
    Section,
    Seen,
    Table,
)
from nsys_analyzer.report.renderers.inline import alternative, cell, fence, heading, line, summary, target
from nsys_analyzer.report.units import ABSENT, format_cell
from nsys_analyzer.text import phrase, visible

#: A table with a longer cell or more rows, or a folded one, is not padded, which would double it.
_WIDEST_PADDED, _LONGEST_PADDED = 60, 20
#: A report of more sections has a list of them behind the first one, the summary.
_FEW_SECTIONS = 3
#: The width of a page of GitHub, of a letter and of a cell's padding and border, in pixels.
PAGE, _LETTER, _PADDING = 821, 8.6, 27
#: Where a cell may break.
_BREAK = re.compile(r"[ \n]|<wbr>")
#: What GitHub leaves out of a heading's name.
_NO_ANCHOR = re.compile(r"[^\w\- ]")


def render(report: Report, figures: Mapping[str, str]) -> str:
    """The report as one markdown text; ``figures`` are key to path as the file sees it, others are left out."""
    sections = [_section(section, figures) for section in report.sections]
    if len(sections) > _FEW_SECTIONS:
        sections.insert(1, _contents(report.sections))
    return "\n\n".join([f"# {heading(report.title)}", *sections]) + "\n"


def _contents(sections: Sequence[Section]) -> str:
    """A list of links to the sections, each by the name that GitHub gives its heading."""
    taken: Counter[str] = Counter()
    lines = ["**Contents**", ""]
    for section in sections:
        title = visible(section.title).strip()
        anchor = _NO_ANCHOR.sub("", title.lower()).replace(" ", "-")
        number = f"-{taken[anchor]}" if taken[anchor] else ""
        taken[anchor] += 1
        label = alternative(title)
        lines.append(f"- [{label}](#{target(anchor + number)})" if label else f"- {ABSENT}")
    return "\n".join(lines)


def _section(section: Section, figures: Mapping[str, str]) -> str:
    blocks = [render_block(block, figures) for block in section.blocks]
    return "\n\n".join([f"## {heading(section.title)}", *(block for block in blocks if block)])


def render_block(block: Block, figures: Mapping[str, str]) -> str:
    """One block as markdown; empty where it is a figure that has no path."""
    match block:
        case Paragraph(text):
            return line(text)
        case Answer(capture, text):
            return line(phrase("**{}:** {}", capture, text))
        case Listing(lines, "bullets"):
            return "\n".join(f"- {line(one)}" for one in lines)
        case Listing(lines, kind):
            return fence(lines, "sh" if kind == "commands" else "python")
        case Table():
            return _table(block)
        case Details(title, blocks):
            shown = (_table(one, most=0) if isinstance(one, Table) else render_block(one, figures) for one in blocks)
            inner = "\n\n".join(block for block in shown if block)
            return f"<details><summary>{summary(title)}</summary>\n\n{inner}\n\n</details>"
        case Seen():
            return ""
        case _:
            path = figures.get(block.key)
            return f"![{alternative(block.title)}]({target(path)})" if path else ""


def _table(block: Table, most: int = _LONGEST_PADDED) -> str:
    cells = [
        [cell(column.title), *(cell(format_cell(row[i], column.unit)) for row in block.rows)]
        for i, column in enumerate(block.columns)
    ]
    parts = "\n\n".join(_part(block, cells, chosen, most) for chosen in fitting(cells, block.names))
    return f"{line(block.caption)}\n\n{parts}" if block.caption else parts


def fitting(columns: Sequence[Sequence[str]], names: int) -> list[list[int]]:
    """The columns of each table that a page has room for: the first ones, which name the rows, with some of the others.

    Args:
        columns: the cells of each column, its title among them, as they are written.
        names: how many of the columns name the rows.
    """
    widths = [max(len(part) for text in cells for part in _BREAK.split(text)) * _LETTER + _PADDING for cells in columns]
    first = list(range(min(names, len(widths))))
    parts: list[list[int]] = [[]]
    for i in range(len(first), len(widths)):
        if parts[-1] and sum(widths[k] for k in (*first, *parts[-1], i)) > PAGE:
            parts.append([])
        parts[-1].append(i)
    return [first + part for part in parts]


def _part(block: Table, cells: Sequence[Sequence[str]], chosen: Sequence[int], most: int) -> str:
    alignment = ["left" if block.columns[i].unit in TEXT_UNITS else "right" for i in chosen]
    headers, *rows = ([cells[i][row] for i in chosen] for row in range(1 + len(block.rows)))
    padded = len(rows) <= most and all(len(one) <= _WIDEST_PADDED for row in rows for one in row)
    return (_padded_table if padded else _plain_table)(headers, rows, alignment)


def _padded_table(headers: list[str], rows: list[list[str]], alignment: list[str]) -> str:
    alignments = alignment if rows else None
    return tabulate(rows, headers=headers, tablefmt="pipe", colalign=alignments, disable_numparse=True)


def _plain_table(headers: list[str], rows: list[list[str]], alignment: list[str]) -> str:
    rule = f"|{'|'.join(':--' if one == 'left' else '--:' for one in alignment)}|"
    head, *body = (f"| {' | '.join(cells)} |" for cells in (headers, *rows))
    return "\n".join((head, rule, *body))
