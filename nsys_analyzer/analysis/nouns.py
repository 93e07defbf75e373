"""Nouns after numbers: 1 launch, 2 launches, 0.5 launches."""

from __future__ import annotations


def plural(number: float, noun: str) -> str:
    """The noun as it stands behind a number."""
    if number == 1:
        return noun
    return f"{noun}es" if noun.endswith(("ch", "s", "x")) else f"{noun}s"
