"""The report as markdown."""

from __future__ import annotations

from collections.abc import Mapping

from tabulate import tabulate

from nsys_analyzer.report.model import (
    TEXT_UNITS,
    Answer,
    Block,
    Details,
    Listing,
    Paragraph,
    Report,
    StepBars,
    Table,
    TimelineLink,
)
from nsys_analyzer.report.renderers.inline import alternative, answer, cell, fence, heading, line, summary, target
from nsys_analyzer.report.renderers.step_bar import lines as bar_lines
from nsys_analyzer.report.units import format_cell

#: A table with a longer cell or more rows, or a folded one, is not padded, which would double it.
_WIDEST_PADDED, _LONGEST_PADDED = 60, 20
#: Characters of a bar: as many as a page of GitHub shows.
_BAR = 96


def render(report: Report, figures: Mapping[str, str]) -> str:
    """The report as one markdown text; ``figures`` are key to path as the file sees it, others are left out."""
    written = [f"# {heading(report.title)}"]
    for section in report.sections:
        written += [f"## {heading(section.title)}"] if section.title else []
        written += filter(None, (render_block(block, figures) for block in section.blocks))
    return "\n\n".join(written) + "\n"


def render_block(block: Block, figures: Mapping[str, str], *, folded: bool = False) -> str:
    """One block as markdown; empty where it is a figure that has no path."""
    match block:
        case Paragraph(text):
            return line(text)
        case Answer(text):
            return answer(text)
        case Listing(lines, "bullets"):
            return "\n".join(f"- {line(one)}" for one in lines)
        case Listing(lines, kind):
            return fence(lines, "sh" if kind == "commands" else kind)
        case Table():
            return _table(block, padded=not folded)
        case StepBars():
            return fence(
                ["".join(stroke.text for stroke in strokes).rstrip() for strokes in bar_lines(block, _BAR)], ""
            )
        case Details(title, blocks):
            inner = "\n\n".join(filter(None, (render_block(one, figures, folded=True) for one in blocks)))
            return f"<details><summary>{summary(title)}</summary>\n\n{inner}\n\n</details>" if inner else ""
        case TimelineLink():
            return ""
        case _:
            path = figures.get(block.key)
            return f"![{alternative(block.title)}]({target(path)})" if path else ""


def _table(block: Table, *, padded: bool) -> str:
    headers = [cell(column.title) for column in block.columns]
    rows = [[cell(format_cell(row[i], column.unit)) for i, column in enumerate(block.columns)] for row in block.rows]
    alignment = ["left" if column.unit in TEXT_UNITS else "right" for column in block.columns]
    if padded and len(rows) <= _LONGEST_PADDED and all(len(one) <= _WIDEST_PADDED for row in rows for one in row):
        written = tabulate(rows, headers, tablefmt="pipe", colalign=alignment if rows else None, disable_numparse=True)
    else:
        rule = f"|{'|'.join(':--' if one == 'left' else '--:' for one in alignment)}|"
        head, *body = (f"| {' | '.join(cells)} |" for cells in (headers, *rows))
        written = "\n".join((head, rule, *body))
    return f"{line(block.caption)}\n\n{written}" if block.caption else written
