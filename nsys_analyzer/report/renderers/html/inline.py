"""Spans of text as HTML: the one escape between what others wrote and a page."""

from __future__ import annotations

import re
from html import escape

from nsys_analyzer.report.renderers.inline import target
from nsys_analyzer.text import Span, StrOrText, spans, visible

_TAGS = {"code": "code", "strong": "strong", "emphasis": "em"}
#: Where a long name may break: behind what separates its parts.
_JOINT = re.compile(r"(?<=[_.:,/>])(?=\w)")


def inline(text: StrOrText) -> str:
    """A text inside a line."""
    return "".join(map(_span, spans(text)))


def name(text: str) -> str:
    """A name, letter by letter, which may break between its parts."""
    return _JOINT.sub("<wbr>", escape(visible(text)))


def _span(span: Span) -> str:
    if span.kind == "plain":
        return escape(visible(span.text))
    if span.kind == "link":
        return f'<a href="{escape(target(span.target))}">{escape(visible(span.text))}</a>'
    tag = _TAGS[span.kind]
    return f"<{tag}>{name(span.text)}</{tag}>"
