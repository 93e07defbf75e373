"""Text for a person, with marked stretches: code, strong, emphasis and links.

The sentences of a report hold names that somebody else chose: of captures, kernels, ranges, files, messages of a
profiler. None of them may act on the output. So text is plain unless a stretch is marked, and no character of plain
text means anything: ``f"{name} is slow"`` is safe whatever ``name`` is, backticks, asterisks and tags in it are shown
as they are. Marks are made here alone, by ``code``, ``strong``, ``emphasis`` and ``link`` around one value, or by
``marked`` in a sentence of ours; the renderers take a text apart with ``spans``, and escape each span for their format.

Marked text is a ``str``, so that sentences are joined as any others. A mark is a Unicode noncharacter with a number
that is drawn anew by each process, as the boundary of a MIME message is: no text from outside can hold one.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

Kind = Literal["plain", "code", "strong", "emphasis", "link"]

_BOUNDARY = f"\ufdd0{secrets.token_hex(8)}"
_LETTERS: dict[str, Kind] = {"c": "code", "s": "strong", "e": "emphasis", "l": "link"}
_END, _TARGET = f"{_BOUNDARY}.", f"{_BOUNDARY}|"
_MARKED = re.compile(
    rf"{_BOUNDARY}(?P<letter>[{''.join(_LETTERS)}])(?P<text>.*?)(?:{re.escape(_TARGET)}(?P<target>.*?))?"
    rf"{re.escape(_END)}",
    re.DOTALL,
)
_MARKUP = re.compile(r"`(?P<code>[^`]+)`|\*\*(?P<strong>[^*]+)\*\*|\*(?P<emphasis>[^*]+)\*")

#: What may not reach a page or a terminal: control characters, those that turn the direction of writing, halves of
#: surrogate pairs, which no file can hold, and the noncharacter that marks start with.
_UNSEEN = re.compile("[\x00-\x08\x0e-\x1f\x7f-\x84\x86-\x9f\u202a-\u202e\u2066-\u2069\ud800-\udfff\ufdd0]")
_BREAKS = re.compile("[\t\v\f\r\x85\u2028\u2029]")
_STANDS_FOR_UNSEEN = "\N{REPLACEMENT CHARACTER}"


@dataclass(frozen=True)
class Span:
    """A stretch of text of one kind; of a link its target, too."""

    kind: Kind
    text: str
    target: str = ""


def code(value: str) -> str:
    """A name, an option or a piece of code, to be shown letter by letter."""
    return _mark("c", plain(value))


def strong(value: str) -> str:
    """A stretch that stands out."""
    return _mark("s", plain(value))


def emphasis(value: str) -> str:
    """A stretch that is set apart, as a term where it is defined."""
    return _mark("e", plain(value))


def link(value: str, path: str) -> str:
    """A text that leads to a file, by its path as the reader of the text sees it."""
    return _mark("l", f"{plain(value)}{_TARGET}{plain(path)}")


def _mark(letter: str, content: str) -> str:
    return f"{_BOUNDARY}{letter}{content}{_END}"


def marked(sentence: str) -> str:
    """A sentence of ours, a literal without values, whose code is in backticks and whose emphasis in asterisks."""
    return _MARKUP.sub(lambda found: _mark((found.lastgroup or "")[0], found[found.lastgroup or 0]), sentence)


def spans(text: str) -> Iterator[Span]:
    """The spans of a text in order, none of them empty but for those that are marked."""
    at = 0
    for found in _MARKED.finditer(text):
        if found.start() > at:
            yield Span("plain", text[at : found.start()])
        yield Span(_LETTERS[found["letter"]], found["text"], found["target"] or "")
        at = found.end()
    if at < len(text):
        yield Span("plain", text[at:])


def plain(text: str, quote: str = "") -> str:
    """The text without its marks; ``quote`` is put around code."""
    if _BOUNDARY not in text:
        return text
    return "".join(f"{quote}{one.text}{quote}" if one.kind == "code" else one.text for one in spans(text))


def visible(text: str) -> str:
    """The text on one line, with a stand-in for each character that none may see (``visible_lines``)."""
    return visible_lines(text).replace("\n", " ")


def visible_lines(text: str) -> str:
    """The text with a stand-in for each control character but the newline, and for what turns or breaks text.

    These are C0, DEL and C1 characters, U+202A to U+202E, U+2066 to U+2069, and lone surrogates.
    """
    return _UNSEEN.sub(_STANDS_FOR_UNSEEN, _BREAKS.sub(" ", text))
