"""Events of a trace, and arguments of events, that cannot be what they say: refused, counted and reported."""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Mapping

import msgspec

_AT = re.compile(r" - at `\$\.(?P<place>.*)`$")
_LONGEST_NAME = 60
_MOST_REASONS = 3


class BadEventError(Exception):
    """An event that cannot be what it says; its text is the reason."""


def reason(error: Exception, inside: str = "args") -> str:
    """Why a value was refused, in a few words: "correlation: expected int, got str".

    ``inside`` is what was refused where the error does not name a part of it.
    """
    if isinstance(error, UnicodeEncodeError):
        return "a text that is no Unicode"
    if isinstance(error, RecursionError):
        return "nested too deep"
    said = str(error)
    if not isinstance(error, msgspec.ValidationError):
        return said
    place, what = _AT.search(said), _AT.sub("", said).replace("`", "")
    return f"{place['place'] if place else inside}: {what[:1].lower()}{what[1:]}"


class RefusedEvents:
    """Counts the events that are refused, by kind and reason, with the name of the first of each kind.

    And of those that are kept, the arguments that are refused.
    """

    def __init__(self) -> None:
        self._reasons: dict[str, Counter[str]] = defaultdict(Counter)
        self._first: dict[str, str] = {}
        self._arguments: Counter[tuple[str, str]] = Counter()

    def add(self, kind: str, why: str, name: object) -> None:
        """Count one event."""
        self._first.setdefault(kind, _shown(name))
        reasons = self._reasons[kind]
        reasons[why if why in reasons or len(reasons) < _MOST_REASONS else "other reasons"] += 1

    def add_argument(self, kind: str, name: str) -> None:
        """Count one argument of an event that was kept."""
        self._arguments[kind, name] += 1

    def argument_remarks(self) -> tuple[str, ...]:
        """One for each argument of each kind."""
        return tuple(
            f"{count:,} event{'s' if count > 1 else ''} of the kind {kind} "
            f"{'have' if count > 1 else 'has'} a `{name}` that cannot be read"
            for (kind, name), count in self._arguments.items()
        )

    def remarks(self, kept: Mapping[str, int]) -> tuple[str, ...]:
        """One for each kind, beside the number of its events that were kept."""
        return tuple(self._remark(kind, kept.get(kind, 0)) for kind in self._reasons)

    def _remark(self, kind: str, kept: int) -> str:
        reasons = self._reasons[kind]
        count = reasons.total()
        why = ", ".join(f"{text} ({times:,})" for text, times in reasons.most_common())
        return (
            f"{count:,} of {count + kept:,} events of the kind {kind} cannot be what the trace says and "
            f"{'is' if count == 1 else 'are'} left out: {why}; the first is {self._first[kind]}"
        )


def _shown(name: object) -> str:
    """A name on one line and not too long."""
    if not isinstance(name, str):
        return "without a name"
    text = "".join(one if one.isprintable() else "\N{REPLACEMENT CHARACTER}" for one in name[:_LONGEST_NAME])
    return f'"{text}"' if len(name) <= _LONGEST_NAME else f'"{text}…"'
