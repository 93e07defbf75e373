"""Represents text for people as spans: plain text, code, emphasis and links.

A report contains texts that the package does not control, such as messages of a profiler, and names of captures,
kernels, ranges and files. These texts must not change the formatting of the report. So a ``str`` is plain text, and its
backticks, asterisks and tags are shown unchanged. Text with other spans is a :class:`Text`. Only this module creates
such texts: ``code``, ``strong``, ``emphasis`` and ``link`` make a text from one value, and ``phrase`` makes a text from
a template and values::

    phrase("The range `{}` holds **no** backward pass ({:,} kernels)", name, count)

Each renderer escapes the spans for its format.
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

#: Matches the marks of a template: `code`, **strong emphasis** and *emphasis*.
_MARKUP = re.compile(r"`(?P<code>[^`]+)`|\*\*(?P<strong>[^*]+)\*\*|\*(?P<emphasis>[^*]+)\*")

#: Matches characters that must not reach a page or a terminal: control characters, characters that change the direction
#: of writing, lone surrogates, which UTF-8 cannot encode, and noncharacters.
_INVISIBLE = re.compile("[\x00-\x08\x0e-\x1f\x7f-\x84\x86-\x9f\u202a-\u202e\u2066-\u2069\ud800-\udfff\ufdd0-\ufdef]")
_BREAKING_CHARACTERS = re.compile("[\t\v\f\r\x85\u2028\u2029]")
_REPLACEMENT_CHARACTER = "\N{REPLACEMENT CHARACTER}"


NO_BREAK_SPACE = "\N{NO-BREAK SPACE}"  # keeps a value and its unit on one line
#: The maximum number of decimal places. The sixth decimal place of a time in ms is a nanosecond.
MAX_DECIMALS = 6
#: The binary units. A size is written in the largest unit of which it is at least this fraction, so that 1,023.99 MiB
#: is written as 1.0 GiB and not as 1,024.0 MiB.
_BINARY_UNITS = ((2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB"))
_BINARY_UNIT_THRESHOLD = 0.99995

#: The number of names that ``list_first`` lists.
_MAX_NAMES = 3


@dataclass(frozen=True)
class Span:
    """A part of a text, with one kind of formatting. ``target`` is the target of a link."""

    kind: Kind
    text: str
    target: str = ""


class Text:
    """A text as a sequence of spans. A plain span is never empty.

    Texts and strings are concatenated by ``+`` and ``join_texts``; ``str(text)`` is the text without marks. JSON
    contains the text with code in backticks. The class is not a dataclass, because msgspec would write it as an object.
    """

    def __init__(self, spans: tuple[Span, ...]) -> None:
        self.spans = spans

    def __eq__(self, value: object) -> bool:
        return isinstance(value, Text) and self.spans == value.spans

    def __hash__(self) -> int:
        return hash(self.spans)

    def __repr__(self) -> str:
        return f"Text({self.spans!r})"

    def __add__(self, suffix: StrOrText) -> Text:
        return Text((*self.spans, *spans(suffix)))

    def __radd__(self, prefix: str) -> Text:
        return Text((*spans(prefix), *self.spans))

    def __contains__(self, part: str) -> bool:
        return part in plain(self)

    def __str__(self) -> str:
        return plain(self)

    def __format__(self, _: str) -> NoReturn:
        """Rejects a text in an f-string, because the spans would be lost.

        Raises:
            TypeError: always.
        """
        raise TypeError(f"phrase() takes a Text, an f-string does not: {plain(self)!r}")


if TYPE_CHECKING:
    StrOrText: TypeAlias = str | Text
else:

    class StrOrText(ABC):  # noqa: B024 - a common name for both types
        """The type of fields that are ``str`` or ``Text``, because msgspec does not support the union of both."""

    StrOrText.register(str)
    StrOrText.register(Text)


def code(value: StrOrText) -> Text:
    """Returns a name, an option or a piece of code as a text that is shown verbatim."""
    return Text((Span("code", plain(value)),))


def strong(value: StrOrText) -> Text:
    """Returns a text with strong emphasis."""
    return Text((Span("strong", plain(value)),))


def emphasis(value: StrOrText) -> Text:
    """Returns a text with emphasis, for example for a term at its definition."""
    return Text((Span("emphasis", plain(value)),))


def link(value: StrOrText, path: str) -> Text:
    """Returns a text that links to a file. The path is relative to the file that will contain the link."""
    return Text((Span("link", plain(value), path),))


def phrase(template: str, *values: object) -> Text:
    """Returns a text made from a template and values.

    Args:
        template: a literal with code in backticks, emphasis in asterisks, and fields for the values in order. The
            fields are those of :meth:`str.format`, such as ``{}`` and ``{:,}``.
        values: texts or other values. If a field is inside a mark, the text gets the formatting of the mark.

    Raises:
        TypeError: the template has more or fewer fields than there are values.
    """
    remaining_values = iter(values)
    spans: list[Span] = []
    position = 0
    for mark in _MARKUP.finditer(template):
        spans += _fill_fields(template[position : mark.start()], remaining_values)
        kind: Kind = "code" if mark["code"] else "strong" if mark["strong"] else "emphasis"
        spans.append(Span(kind, "".join(span.text for span in _fill_fields(mark[kind], remaining_values))))
        position = mark.end()
    spans += _fill_fields(template[position:], remaining_values)
    if unused_values := list(remaining_values):
        raise TypeError(f"{template!r} has no field for {unused_values}")
    return Text(tuple(spans))


def _fill_fields(template: str, values: Iterator[object]) -> Iterator[Span]:
    """Fills the fields of a template without marks, in order, and yields the spans of the result."""
    for literal, field, spec, _ in Formatter().parse(template):
        yield from spans(literal)
        if field is not None:
            try:
                value = next(values)
            except StopIteration:
                raise TypeError(f"{template!r} has more fields than there are values") from None
            yield from spans(value if isinstance(value, Text) else format(value, spec or ""))


def join_texts(separator: str, parts: Iterable[StrOrText]) -> StrOrText:
    """Joins the parts with a separator between them. The result is a ``str`` if every part is a ``str``."""
    parts = list(parts)
    if all(isinstance(part, str) for part in parts):
        return separator.join(map(str, parts))
    parts_and_separators = [piece for part in parts for piece in (separator, part)][1:]
    return Text(tuple(span for piece in parts_and_separators for span in spans(piece)))


def spans(text: StrOrText) -> tuple[Span, ...]:
    """Returns the spans of a text in order. A plain span is never empty."""
    if isinstance(text, Text):
        return text.spans
    return (Span("plain", text),) if text else ()


def plain(text: StrOrText, quote: str = "") -> str:
    """Returns a text without formatting. ``quote`` is put before and after code."""
    if isinstance(text, str):
        return text
    return "".join(f"{quote}{span.text}{quote}" if span.kind == "code" else span.text for span in text.spans)


def visible(text: str) -> str:
    """Returns a text on one line, with a replacement for each invisible character (see ``visible_lines``)."""
    return visible_lines(text).replace("\n", " ")


def visible_lines(text: str) -> str:
    """Returns a text with U+FFFD in place of each invisible character, except for newlines.

    Control characters (C0, DEL, C1), U+202A to U+202E, U+2066 to U+2069, lone surrogates and noncharacters are
    invisible. Tabs, and line breaks other than newlines, become spaces.
    """
    return _INVISIBLE.sub(_REPLACEMENT_CHARACTER, _BREAKING_CHARACTERS.sub(" ", text))


#: Matches the start of a text that a spreadsheet would execute as a formula. In CSV files, an apostrophe precedes it.
FORMULA_START = r"^([=+\-@\t\r])"


def join_names(names: Sequence[str], conjunction: str = "and") -> str:
    """Joins names for a sentence: "a", "a and b", "a, b and c"."""
    return f" {conjunction} ".join([", ".join(names[:-1]), names[-1]]) if len(names) > 1 else names[0]


def list_first(names: Sequence[str]) -> str:
    """Returns the first names and the number of the remaining names: "a, b, c and 2 more"; empty without names."""
    count_of_others = [f"{len(names) - _MAX_NAMES} more"] if len(names) > _MAX_NAMES else []
    return join_names([*names[:_MAX_NAMES], *count_of_others]) if names else ""


def plural(number: float, noun: str) -> str:
    """Returns a noun in the singular for the number 1, else in the plural: "kernel", "kernels"."""
    if number == 1:
        return noun
    if noun.endswith("y") and noun[-2:-1] not in "aeiou":
        return f"{noun[:-1]}ies"
    return f"{noun}es" if noun.endswith(("ch", "s", "x")) else f"{noun}s"


def rounded(value: float) -> str:
    """Formats a number with three significant digits, without trailing zeros and without digits below 1e-6.

    Examples are 52, 9.37 and 1,235.
    """
    places = min(max(2 - math.floor(math.log10(abs(value))), 0), MAX_DECIMALS) if value else 0
    formatted_value = format_fixed(value, places)
    return formatted_value.rstrip("0").rstrip(".") if places else formatted_value


def rounded_percent(value: float, digits: int | None = None) -> str:
    """Formats a fraction as a rounded percentage for a sentence: 48 %, 0.2 %."""
    places = (1 if 0 < value < 0.005 else 0) if digits is None else digits
    return f"{format_fixed(100 * value, places)}{NO_BREAK_SPACE}%"


def format_bytes(value: float) -> str:
    """Formats a size in bytes in a suitable binary unit: 230.7 MiB."""
    scale, unit = next(
        ((scale, unit) for scale, unit in _BINARY_UNITS if abs(value) >= scale * _BINARY_UNIT_THRESHOLD), (1, "B")
    )
    return f"{format_fixed(value / scale, 1 if scale > 1 else 0)}{NO_BREAK_SPACE}{unit}"


def format_fixed(value: float, places: int) -> str:
    """Formats a number with this many decimal places. A zero has no minus sign."""
    return f"{round(value, places) + 0.0:,.{places}f}".replace("-", "\N{MINUS SIGN}")
