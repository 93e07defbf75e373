"""Spans of text as markdown: the one escape between what others wrote and ``report.md``.

The flavour is CommonMark with GitHub's tables and strikethrough, and the dollars of its formulas.
"""

from __future__ import annotations

import html
import re
from collections.abc import Sequence
from dataclasses import replace
from urllib.parse import quote

from nsys_analyzer.report.units import ABSENT
from nsys_analyzer.text import Span, StrOrText, plain, spans, visible

#: What starts or ends a construct of markdown. An underscore between letters does neither, nor does an asterisk
#: between spaces, a "<" before what is no name of a tag, a "&" that no entity follows.
_SPECIAL = re.compile(
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
#: What a line starts with that is a heading, a quotation, an item of a list, a rule.
_BLOCK = re.compile(r"#{1,6}(?=\s|$)|>|[-+](?=\s|$)|(?=-)(?:-\s*){3,}$")
_NUMBERED = re.compile(r"(\d{1,9})([.)])(?=\s|$)")
_CLOSING_HASHES = re.compile(r"(?<![^\s])(#+)$")
_BACKTICKS = re.compile("`+")
_AROUND = {"strong": "**", "emphasis": "*"}


def inline(text: StrOrText) -> str:
    """A text inside a line."""
    written, before = "", ""
    for span in spans(text):
        touching = before == span.kind == "code"  # two spans of code side by side would be read as one
        written += f"{' ' if touching else ''}{_span(span)}"
        before = span.kind
    return written


def line(text: StrOrText) -> str:
    """A text that is a paragraph, or an item of a list, on one line."""
    written = inline(text).strip() or ABSENT
    if _BLOCK.match(written):
        return f"\\{written}"
    return _NUMBERED.sub(r"\1\\\2", written, count=1) if _NUMBERED.match(written) else written


def answer(text: StrOrText) -> str:
    """A sentence that stands out, on one line: its code does, too."""
    marked = ("strong", "emphasis")  # marks inside marks are read in another order
    written = "".join(_span(replace(span, kind="plain") if span.kind in marked else span) for span in spans(text))
    return f"**{written.strip() or ABSENT}**"


def heading(text: StrOrText) -> str:
    """A text that is the title of a section."""
    return _CLOSING_HASHES.sub(r"\\\1", inline(text).strip())


def cell(text: StrOrText) -> str:
    """A text in a cell of a table."""
    return inline(text).replace("|", "\\|").strip()


def alternative(text: StrOrText) -> str:
    """A text that stands for a picture."""
    return _escaped(plain(text))


def summary(text: StrOrText) -> str:
    """The title of what is folded, which is HTML."""
    return html.escape(visible(plain(text)), quote=False)


def target(path: str) -> str:
    """A path as the target of a link or picture: bytes that are no UTF-8 stay as they are."""
    return quote(re.sub("[\ud800-\udc7f\udd00-\udfff]", "\N{REPLACEMENT CHARACTER}", path), errors="surrogateescape")


def fence(lines: Sequence[StrOrText], language: str) -> str:
    """Lines that stand as they are, inside a fence that none of them ends."""
    shown = [visible(plain(one)) for one in lines]
    marks = "`" * max(3, 1 + _longest_backticks("\n".join(shown)))
    return "\n".join((f"{marks}{language}", *shown, marks))


def _span(span: Span) -> str:
    if span.kind == "plain":
        return _escaped(span.text)
    # A mark that opens before a space, or around nothing, opens nothing.
    text = visible(span.text) if span.kind == "code" else visible(span.text).strip()
    if not text:
        return ABSENT
    if span.kind == "code":
        return _code(text)
    if span.kind == "link":
        return f"[{_escaped(text)}]({target(span.target)})"
    return f"{_AROUND[span.kind]}{_escaped(text)}{_AROUND[span.kind]}"


def _escaped(text: str) -> str:
    return _SPECIAL.sub(r"\\\g<0>", visible(text))


def _code(text: str) -> str:
    marks = "`" * (1 + _longest_backticks(text))
    padded = text.startswith("`") or text.endswith("`") or (text[0] == text[-1] == " " and text.strip())
    return f"{marks} {text} {marks}" if padded else f"{marks}{text}{marks}"


def _longest_backticks(text: str) -> int:
    return max((len(found) for found in _BACKTICKS.findall(text)), default=0)
