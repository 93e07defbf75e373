"""The report as markdown."""

from __future__ import annotations

from functools import singledispatch
from urllib.parse import quote

from tabulate import tabulate

from nsys_analyzer.report.model import Answer, Bars, Details, Listing, Paragraph, Report, Section, Table
from nsys_analyzer.report.units import format_cell

_TEXT_UNITS = ("text", "code")


def render_markdown(report: Report, figures: dict[str, str]) -> str:
    """The report as one markdown text.

    Args:
        report: the report.
        figures: figure key to its path as the markdown file sees it; a figure without one is left out.
    """
    parts = [f"# {report.title}", *(_section(section, figures) for section in report.sections)]
    return "\n\n".join(parts) + "\n"


def _section(section: Section, figures: dict[str, str]) -> str:
    blocks = [render_block(block, figures) for block in section.blocks]
    return "\n\n".join([f"## {section.title}", *(block for block in blocks if block)])


@singledispatch
def render_block(block: object, figures: dict[str, str]) -> str:
    """One block as markdown."""
    raise TypeError(f"no markdown for {type(block).__name__} ({len(figures)} figures)")


@render_block.register
def _(block: Paragraph, figures: dict[str, str]) -> str:
    del figures
    return block.text


@render_block.register
def _(block: Answer, figures: dict[str, str]) -> str:
    del figures
    return f"**{block.capture}:** {block.text}"


@render_block.register
def _(block: Listing, figures: dict[str, str]) -> str:
    del figures
    if block.kind == "commands":
        return "\n".join(["```sh", *block.lines, "```"])
    return "\n".join(f"- {line}" for line in block.lines)


@render_block.register
def _(block: Table, figures: dict[str, str]) -> str:
    del figures
    units = [column.unit for column in block.columns]
    rows = [[_escape(format_cell(cell, unit)) for cell, unit in zip(row, units, strict=True)] for row in block.rows]
    alignment = ["left" if unit in _TEXT_UNITS else "right" for unit in units]
    text = tabulate(
        rows,
        headers=[_escape(column.title) for column in block.columns],
        tablefmt="pipe",
        colalign=alignment if rows else None,
        disable_numparse=True,
    )
    return f"{block.caption}\n\n{text}" if block.caption else text


@render_block.register
def _(block: Details, figures: dict[str, str]) -> str:
    inner = "\n\n".join(render_block(one, figures) for one in block.blocks)
    return f"<details><summary>{block.title}</summary>\n\n{inner}\n\n</details>"


@render_block.register
def _(block: Bars, figures: dict[str, str]) -> str:
    path = figures.get(block.key)
    title = block.title.replace("[", "\\[").replace("]", "\\]")
    return f"![{title}]({quote(path)})" if path else ""


def _escape(cell: str) -> str:
    return cell.replace("|", "\\|").replace("\n", " ")
