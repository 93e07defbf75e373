"""Renders a report as markdown: CommonMark with the tables, strikethrough and formulas of GitHub.

Every text is escaped here, since names in it are foreign input.
"""

from __future__ import annotations

import html
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from urllib.parse import quote

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
from nsys_analyzer.report.renderers.step_bar import bar_lines
from nsys_analyzer.report.units import MISSING_CELL, format_cell
from nsys_analyzer.text import Span, StrOrText, plain, spans, visible

#: A table that is not folded is padded if the lengths of its cells and the number of its rows are at most these limits.
_MAX_PADDED_CELL_LENGTH, _MAX_PADDED_ROWS = 60, 20
#: The number of characters of a bar, which is the number of characters in a line of a GitHub page.
_BAR_WIDTH = 96

#: Matches the characters that start or end a construct of markdown. It does not match an underscore between letters, an
#: asterisk between spaces, a "<" that starts no tag, or a "&" that starts no entity.
_SPECIAL_CHARACTERS = re.compile(
    r"""
    [`\[\]~$]
    | (?<![ ])\* | \*(?![ ])
    | (?<![^\W_])_ | _(?![^\W_])
    | <(?=[A-Za-z/!?])
    | &(?=\#?\w+;)
    | \\(?=[!-/:-@\[-`{-~]|$)
    | !$
    """,
    re.VERBOSE,
)
#: The start of a line that is a heading, a quotation, a list item or a rule.
_BLOCK_START = re.compile(r"#{1,6}(?=\s|$)|>|[-+](?=\s|$)|(?=-)(?:-\s*){3,}$")
_NUMBERED_ITEM = re.compile(r"(\d{1,9})([.)])(?=\s|$)")
_CLOSING_HASHES = re.compile(r"(?<![^\s])(#+)$")
_BACKTICKS = re.compile("`+")
_DELIMITERS = {"strong": "**", "emphasis": "*"}


def render(report: Report, figures: Mapping[str, str]) -> str:
    """Returns the report as markdown.

    Args:
        report: the report.
        figures: the path of each figure relative to the file, by the figure's key. Other figures are left out.
    """
    blocks = [f"# {_render_heading(report.title)}"]
    for section in report.sections:
        blocks += [f"## {_render_heading(section.title)}"] if section.title else []
        blocks += filter(None, (render_block(block, figures) for block in section.blocks))
    return "\n\n".join(blocks) + "\n"


def render_block(block: Block, figures: Mapping[str, str], *, folded: bool = False) -> str:
    """Returns a block as markdown, which is empty for a figure without a path."""
    match block:
        case Paragraph(text):
            return _render_line(text)
        case Answer(text):
            # The whole line is bold. Markdown misreads the delimiters of bold text inside bold text.
            nested = ("strong", "emphasis")
            line = "".join(
                _render_span(replace(span, kind="plain") if span.kind in nested else span) for span in spans(text)
            )
            return f"**{line.strip() or MISSING_CELL}**"
        case Listing(lines, "bullets"):
            return "\n".join(f"- {_render_line(line)}" for line in lines)
        case Listing(lines, kind):
            return _fence_lines(lines, "sh" if kind == "commands" else kind)
        case Table():
            return _render_table(block, padded=not folded)
        case StepBars():
            bars = ["".join(stroke.text for stroke in line).rstrip() for line in bar_lines(block, _BAR_WIDTH)]
            return _fence_lines(bars, "")
        case Details(title, blocks):
            content = "\n\n".join(filter(None, (render_block(inner, figures, folded=True) for inner in blocks)))
            summary = html.escape(visible(plain(title)), quote=False)
            return f"<details><summary>{summary}</summary>\n\n{content}\n\n</details>" if content else ""
        case TimelineLink():
            return ""
        case _:
            path = figures.get(block.key)
            return f"![{_escape(plain(block.title))}]({link_target(path)})" if path else ""


def _render_table(table: Table, *, padded: bool) -> str:
    headers = [_render_cell(column.title) for column in table.columns]
    rows = [
        [_render_cell(format_cell(row[i], column.unit)) for i, column in enumerate(table.columns)] for row in table.rows
    ]
    alignment = ["left" if column.unit in TEXT_UNITS else "right" for column in table.columns]
    is_small = len(rows) <= _MAX_PADDED_ROWS and all(
        len(cell) <= _MAX_PADDED_CELL_LENGTH for row in rows for cell in row
    )
    if padded and is_small:
        text = tabulate(rows, headers, tablefmt="pipe", colalign=alignment if rows else None, disable_numparse=True)
    else:
        rule = f"|{'|'.join(':--' if side == 'left' else '--:' for side in alignment)}|"
        head, *body = (f"| {' | '.join(cells)} |" for cells in (headers, *rows))
        text = "\n".join((head, rule, *body))
    return f"{_render_line(table.caption)}\n\n{text}" if table.caption else text


def _render_line(text: StrOrText) -> str:
    """Returns a paragraph or a list item on one line."""
    line = _render_inline(text).strip() or MISSING_CELL
    if _BLOCK_START.match(line):
        return f"\\{line}"
    return _NUMBERED_ITEM.sub(r"\1\\\2", line, count=1) if _NUMBERED_ITEM.match(line) else line


def _render_heading(text: StrOrText) -> str:
    return _CLOSING_HASHES.sub(r"\\\1", _render_inline(text).strip())


def _render_cell(text: StrOrText) -> str:
    return _render_inline(text).replace("|", "\\|").strip()


def _render_inline(text: StrOrText) -> str:
    """Returns a text as part of a line."""
    parts, previous_kind = "", ""
    for span in spans(text):
        # Separates adjacent code spans, which markdown would join.
        separator = " " if previous_kind == span.kind == "code" else ""
        parts += f"{separator}{_render_span(span)}"
        previous_kind = span.kind
    return parts


def _render_span(span: Span) -> str:
    if span.kind == "plain":
        return _escape(span.text)
    # Markdown ignores a delimiter before a space or around an empty text.
    text = visible(span.text) if span.kind == "code" else visible(span.text).strip()
    if not text:
        return MISSING_CELL
    if span.kind == "code":
        delimiter = "`" * (1 + _find_longest_backticks(text))
        needs_padding = text.startswith("`") or text.endswith("`") or (text[0] == text[-1] == " " and text.strip())
        return f"{delimiter} {text} {delimiter}" if needs_padding else f"{delimiter}{text}{delimiter}"
    if span.kind == "link":
        return f"[{_escape(text)}]({link_target(span.target)})"
    return f"{_DELIMITERS[span.kind]}{_escape(text)}{_DELIMITERS[span.kind]}"


def _escape(text: str) -> str:
    return _SPECIAL_CHARACTERS.sub(r"\\\g<0>", visible(text))


def _fence_lines(lines: Sequence[StrOrText], language: str) -> str:
    """Returns lines inside a fence that is longer than any backticks in them."""
    texts = [visible(plain(line)) for line in lines]
    fence = "`" * max(3, 1 + _find_longest_backticks("\n".join(texts)))
    return "\n".join((f"{fence}{language}", *texts, fence))


def _find_longest_backticks(text: str) -> int:
    return max(map(len, _BACKTICKS.findall(text)), default=0)


def link_target(path: str) -> str:
    """Returns a path as the target of a link or image. Bytes that are not valid UTF-8 are kept."""
    return quote(re.sub("[\ud800-\udc7f\udd00-\udfff]", "\N{REPLACEMENT CHARACTER}", path), errors="surrogateescape")
