"""Parses a page, and builds the parse tree that a report must have whatever its names are."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from markdown_it import MarkdownIt
from markdown_it.token import Token

from nsys_analyzer.report.model import (
    Answer,
    Bars,
    Block,
    Details,
    Lines,
    Listing,
    Paragraph,
    Report,
    StepBars,
    Table,
    TimelineLink,
)
from nsys_analyzer.report.renderers.step_bar import bar_lines
from nsys_analyzer.report.units import MISSING_CELL, format_cell
from nsys_analyzer.text import Span, StrOrText, Text, plain, spans, visible

#: What stands in a line: kind of the span and its letters; neighbours that are plain are one.
Inline = tuple[tuple[str, str], ...]
#: A token of the tree without its end, such as ``("th_open",)``; of a line what stands in it, of a fence its content.
Node = tuple[object, ...]

_PARSER = MarkdownIt("commonmark").enable(["table", "strikethrough"])
_KINDS = {"strong_open": "strong", "em_open": "emphasis", "link_open": "link", "s_open": "strike"}


def tree(page: str) -> list[Node]:
    """The nodes of a page in order, as GitHub's parser sees them."""
    return [_node(token) for token in _PARSER.parse(page) if token.nesting >= 0]


def _node(token: Token) -> Node:
    if token.type == "inline":
        return ("inline", _joined(_inline(token.children or [])))
    if token.type in ("fence", "code_block", "html_block"):
        return (token.type, token.info, token.content.rstrip("\n"))
    return (token.type, token.tag)


def _inline(children: Sequence[Token]) -> Iterator[tuple[str, str]]:
    inside: list[str] = []
    for token in children:
        if token.nesting == 1:
            inside.append(_KINDS[token.type])
            yield inside[-1], ""
        elif token.nesting == -1:
            inside.pop()
        elif token.type == "text":
            yield inside[-1] if inside else "plain", token.content
        elif token.type == "image":
            assert all(child.type == "text" for child in token.children or ())
            yield token.type, "".join(child.content for child in token.children or ())
        else:
            yield {"code_inline": "code"}.get(token.type, token.type), token.content


def _joined(parts: Iterator[tuple[str, str]]) -> Inline:
    """The parts with those of one stretch put together; of plain ones the empty left out."""
    found: list[tuple[str, str]] = []
    for kind, text in parts:
        if found and kind == found[-1][0] and kind != "code" and (text or kind == "plain"):
            found[-1] = (kind, found[-1][1] + text)
        else:
            found.append((kind, text))
    return tuple(part for part in found if part != ("plain", ""))


def tree_of(report: Report, drawn: dict[str, str]) -> list[Node]:
    """The nodes that the page of a report must have; ``drawn`` are the figures that it shows."""
    nodes: list[Node] = [("heading_open", "h1"), _line(report.title)]
    for section in report.sections:
        nodes += [("heading_open", "h2"), _line(section.title)] if section.title else []
        nodes += [node for block in section.blocks for node in _block(block, drawn)]
    return nodes


def _block(block: Block, drawn: dict[str, str]) -> Iterator[Node]:
    if isinstance(block, Paragraph):
        yield from _paragraph(block.text)
    elif isinstance(block, Answer):
        yield from _answer(block)
    elif isinstance(block, Table):
        yield from _table(block)
    elif isinstance(block, StepBars):
        bars = ("".join(stroke.text for stroke in line).rstrip() for line in bar_lines(block, 96))
        yield ("fence", "", "\n".join(visible(one) for one in bars).rstrip("\n"))
    elif isinstance(block, Details):
        yield ("html_block", "", f"<details><summary>{_as_html(block.title)}</summary>")
        yield from (node for one in block.blocks for node in _block(one, drawn))
        yield ("html_block", "", "</details>")
    elif isinstance(block, Bars | Lines):
        if block.key in drawn:
            yield from (("paragraph_open", "p"), ("inline", (("image", visible(block.title)),)))
    elif isinstance(block, Listing) and block.kind == "bullets":
        yield ("bullet_list_open", "ul")
        for line in block.lines:
            yield from (("list_item_open", "li"), *_paragraph(line))
    elif not isinstance(block, TimelineLink):  # a page alone shows where
        language = "sh" if block.kind == "commands" else "python"
        yield ("fence", language, "\n".join(visible(plain(line)) for line in block.lines).rstrip("\n"))


def _answer(block: Answer) -> Iterator[Node]:
    """A sentence in strong letters, its code in strong code."""
    parts = [replace(span, kind="plain") if span.kind in ("strong", "emphasis") else span for span in spans(block.text)]
    _, inline = _line(Text(tuple(parts)))
    strong = (("strong", one) if kind == "plain" else (kind, one) for kind, one in inline or (("plain", MISSING_CELL),))
    yield from (("paragraph_open", "p"), ("inline", _joined(iter((("strong", ""), *strong)))))


def _table(table: Table) -> Iterator[Node]:
    if table.caption:
        yield from _paragraph(table.caption)
    yield from (("table_open", "table"), ("thead_open", "thead"), ("tr_open", "tr"))
    for column in table.columns:
        yield from (("th_open", "th"), _line(column.title))
    if table.rows:
        yield ("tbody_open", "tbody")
    for row in table.rows:
        yield ("tr_open", "tr")
        for cell, column in zip(row, table.columns, strict=True):
            yield from (("td_open", "td"), _line(format_cell(cell, column.unit)))


def _paragraph(text: StrOrText) -> tuple[Node, Node]:
    kind, inline = _line(text)
    return ("paragraph_open", "p"), (kind, inline or (("plain", MISSING_CELL),))


def _line(text: StrOrText) -> tuple[str, Inline]:
    """A line with the letters of its text, each as it is, but for those that none may see."""
    parts: list[tuple[str, str]] = []
    before = ""
    for span in spans(text):
        parts += [("plain", " ")] if before == span.kind == "code" else []
        parts.append(_part(span))
        before = span.kind
    inline = list(_joined(iter(parts)))
    if inline and inline[0][0] == "plain":
        inline[0] = ("plain", inline[0][1].lstrip())
    if inline and inline[-1][0] == "plain":
        inline[-1] = ("plain", inline[-1][1].rstrip())
    return "inline", tuple(part for part in inline if part != ("plain", ""))


def _part(span: Span) -> tuple[str, str]:
    text = visible(span.text)
    shown = text if span.kind in ("plain", "code") else text.strip()
    return (span.kind, shown) if shown or span.kind == "plain" else ("plain", MISSING_CELL)


def _as_html(text: str) -> str:
    return visible(text).replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
