"""Texts in figures: names that somebody else chose, shortened, and numbers of three digits."""

from __future__ import annotations

import textwrap

from nsys_analyzer.text import visible

TITLE, NAME = 160, 60
#: Values below this are written with all their digits.
_WRITTEN_OUT = 1e9


def fitted(text: str, limit: int = NAME) -> str:
    """A text of so many letters at most, without those of the middle."""
    whole = visible(text)
    return whole if len(whole) <= limit else f"{whole[: limit // 2]}…{whole[-limit // 2 + 1 :]}"


def wrapped(text: str, width: int, limit: int = NAME) -> str:
    """A text over lines of so many letters, shortened to a limit."""
    return "\n".join(textwrap.wrap(fitted(text, limit), width)) or " "


def in_legend(name: str) -> str:
    """A name as the legend takes it, which leaves those out that start with an underscore."""
    text = fitted(name)
    return f" {text}" if text.startswith("_") else text


def three_digits(value: float) -> str:
    """A value in a figure: 0.0573, 2.00, 20.8, 1,235, 4e+12."""
    if 100 <= abs(value) < _WRITTEN_OUT:
        return f"{value:,.0f}"
    return f"{value:#.3g}".rstrip(".") if 1e-4 <= abs(value) < _WRITTEN_OUT or not value else f"{value:.0e}"
