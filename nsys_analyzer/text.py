"""Text for a person: spans of plain text, code, emphasis and links.

The sentences of a report hold names that somebody else chose: of captures, kernels, ranges, files, messages of a
profiler. None of them may act on the output. So a ``str`` is plain: backticks, asterisks and tags in it are shown as
they are. Text with other spans is a :class:`Text`, made here alone: by ``code``, ``strong``, ``emphasis`` and ``link``
of one value, or by ``phrase``, whose template is a literal of ours with marks and whose values are plain::

    phrase("The range `{}` holds **no** backward pass ({:,} kernels)", name, count)

Renderers escape each span for their format.
"""

from __future__ import annotations

import math
import re
from abc import ABC
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from string import Formatter
from typing import TYPE_CHECKING, Literal, NoReturn, TypeAlias

Kind = Literal["plain", "code", "strong", "emphasis", "link"]

#: The marks of a template: code in backticks, strong in double asterisks, emphasis in single ones.
_MARKS = re.compile(r"`(?P<code>[^`]+)`|\*\*(?P<strong>[^*]+)\*\*|\*(?P<emphasis>[^*]+)\*")

#: What may not reach a page or a terminal: control characters, those that turn the direction of writing, halves of
#: surrogate pairs, which no file can hold, and noncharacters.
_UNSEEN = re.compile("[\x00-\x08\x0e-\x1f\x7f-\x84\x86-\x9f\u202a-\u202e\u2066-\u2069\ud800-\udfff\ufdd0-\ufdef]")
_BREAKS = re.compile("[\t\v\f\r\x85\u2028\u2029]")
_STANDS_FOR_UNSEEN = "\N{REPLACEMENT CHARACTER}"


NO_BREAK_SPACE = "\N{NO-BREAK SPACE}"  # a figure and its unit stay on one line
#: Decimal places of a number at most; of milliseconds, the last one is a nanosecond.
MAX_DECIMALS = 6

_NOTHING = object()


@dataclass(frozen=True)
class Span:
    """A stretch of text of one kind; of a link its target, too."""

    kind: Kind
    text: str
    target: str = ""


class Text:
    """Spans in order, none of them plain and empty.

    Texts and strings are joined by ``+`` and ``joined``; ``str(text)`` is the text without its marks. It is no
    dataclass, which msgspec would write as an object: JSON holds its text, code in backticks.
    """

    def __init__(self, spans: tuple[Span, ...]) -> None:
        self.spans = spans

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Text) and self.spans == other.spans

    def __hash__(self) -> int:
        return hash(self.spans)

    def __repr__(self) -> str:
        return f"Text({self.spans!r})"

    def __add__(self, other: StrOrText) -> Text:
        return Text((*self.spans, *spans(other)))

    def __radd__(self, other: str) -> Text:
        return Text((*spans(other), *self.spans))

    def __contains__(self, part: str) -> bool:
        return part in plain(self)

    def __str__(self) -> str:
        return plain(self)

    def __format__(self, _: str) -> NoReturn:
        """Refuses to stand in an f-string, which would lose the spans.

        Raises:
            TypeError: always.
        """
        raise TypeError(f"phrase() takes a Text, an f-string does not: {plain(self)!r}")


if TYPE_CHECKING:
    StrOrText: TypeAlias = str | Text
else:

    class StrOrText(ABC):  # noqa: B024 - a name for both
        """What msgspec reads as text and writes from either: it takes no union of a type of its own and another."""

    StrOrText.register(str)
    StrOrText.register(Text)


def code(value: StrOrText) -> Text:
    """A name, an option or a piece of code, to be shown letter by letter."""
    return Text((Span("code", plain(value)),))


def strong(value: StrOrText) -> Text:
    """A stretch that stands out."""
    return Text((Span("strong", plain(value)),))


def emphasis(value: StrOrText) -> Text:
    """A stretch that is set apart, as a term where it is defined."""
    return Text((Span("emphasis", plain(value)),))


def link(value: StrOrText, path: str) -> Text:
    """A text that leads to a file, by its path as the reader of the text sees it."""
    return Text((Span("link", plain(value), path),))


def phrase(template: str, *values: object) -> Text:
    """A sentence of ours with values in it.

    Args:
        template: a literal; code stands in backticks, what stands out in asterisks, and values go where
            :meth:`str.format` puts them, in order: ``{}``, ``{:,}``.
        values: the values, plain or with spans of their own; inside a mark their spans count for nothing.
    """
    left = iter(values)
    found: list[Span] = []
    at = 0
    for mark in _MARKS.finditer(template):
        found += _filled(template[at : mark.start()], left)
        kind: Kind = "code" if mark["code"] else "strong" if mark["strong"] else "emphasis"
        found.append(Span(kind, "".join(span.text for span in _filled(mark[kind], left))))
        at = mark.end()
    found += _filled(template[at:], left)
    if unused := list(left):
        raise TypeError(f"no place for {unused} in {template!r}")
    return Text(tuple(found))


def _filled(template: str, values: Iterator[object]) -> Iterator[Span]:
    """The spans of a stretch without marks, its fields filled in order."""
    for literal, field, spec, _ in Formatter().parse(template):
        yield from spans(literal)
        if field is not None:
            value = next(values, _NOTHING)
            if value is _NOTHING:
                raise TypeError(f"no value for each place in {template!r}")
            yield from spans(value if isinstance(value, Text) else format(value, spec or ""))


def join_texts(separator: str, parts: Iterable[StrOrText]) -> StrOrText:
    """The parts with a separator between them; a ``str`` where all of them are."""
    listed_parts = list(parts)
    if all(isinstance(part, str) for part in listed_parts):
        return separator.join(map(str, listed_parts))
    between = [part for one in listed_parts for part in (separator, one)][1:]
    return Text(tuple(span for part in between for span in spans(part)))


def spans(text: StrOrText) -> tuple[Span, ...]:
    """The spans of a text in order, none of them plain and empty."""
    if isinstance(text, Text):
        return text.spans
    return (Span("plain", text),) if text else ()


def plain(text: StrOrText, quote: str = "") -> str:
    """The text without its marks; ``quote`` is put around code."""
    if isinstance(text, str):
        return text
    return "".join(f"{quote}{one.text}{quote}" if one.kind == "code" else one.text for one in text.spans)


def visible(text: str) -> str:
    """The text on one line, with a stand-in for each character that none may see (``visible_lines``)."""
    return visible_lines(text).replace("\n", " ")


def visible_lines(text: str) -> str:
    """The text with a stand-in for each control character but the newline, and for what turns or breaks text.

    These are C0, DEL and C1 characters, U+202A to U+202E, U+2066 to U+2069, lone surrogates and noncharacters.
    """
    return _UNSEEN.sub(_STANDS_FOR_UNSEEN, _BREAKS.sub(" ", text))


#: The beginning of a text that a spreadsheet would read as a formula; in CSV, an apostrophe precedes it.
FORMULA = r"^([=+\-@\t\r])"


def join_names(names: Sequence[str], conjunction: str = "and") -> str:
    """Joins names as in a sentence: "a", "a and b", "a, b and c"."""
    return f" {conjunction} ".join([", ".join(names[:-1]), names[-1]]) if len(names) > 1 else names[0]


def plural(number: float, noun: str) -> str:
    """The noun as it stands behind a number."""
    if number == 1:
        return noun
    if noun.endswith("y") and noun[-2:-1] not in "aeiou":
        return f"{noun[:-1]}ies"
    return f"{noun}es" if noun.endswith(("ch", "s", "x")) else f"{noun}s"


def rounded(value: float) -> str:
    """Writes a number in three digits, without final zeros or digits below a millionth: 52, 9.37, 1,235."""
    places = min(max(2 - math.floor(math.log10(abs(value))), 0), MAX_DECIMALS) if value else 0
    written = format_fixed(value, places)
    return written.rstrip("0").rstrip(".") if places else written


def rounded_percent(value: float, digits: int | None = None) -> str:
    """Writes an estimated fraction as a percentage, for sentences: 48 %, 0.2 %."""
    places = (1 if 0 < value < 0.005 else 0) if digits is None else digits
    return f"{format_fixed(100 * value, places)}{NO_BREAK_SPACE}%"


def format_fixed(value: float, places: int) -> str:
    """Writes a number with this many decimal places, and a zero without a minus sign."""
    return f"{round(value, places) + 0.0:,.{places}f}".replace("-", "\N{MINUS SIGN}")
