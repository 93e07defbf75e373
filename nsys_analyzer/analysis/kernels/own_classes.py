"""Classes of kernels that people have of their own: in a file, or in a package that names them as an entry point."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path
from typing import TypeAlias

import msgspec
import pyarrow

from nsys_analyzer.system.plugins import KERNEL_CLASSES, load_plugins, skip_if_it_fails
from nsys_analyzer.system.strict_json import read_toml

#: An error quotes at most this many characters of a pattern.
_QUOTED_CHARACTERS = 80


class OwnClass(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A class: patterns that find the names of its kernels, and its line of the glossary.

    Under the name of a class of the package's it has more kernels of that class.
    """

    kernels: tuple[str, ...]
    meaning: str = "A class of your own."

    def __post_init__(self) -> None:
        """Raises ValueError if a pattern is no regular expression."""
        for pattern in self.kernels:
            try:
                compile_bounded_search(pattern)("")
            except (re.error, RecursionError, OverflowError, pyarrow.ArrowInvalid) as error:
                quoted = pattern if len(pattern) <= _QUOTED_CHARACTERS else f"{pattern[:_QUOTED_CHARACTERS]}…"
                raise ValueError(f"{quoted!r} is no regular expression: {error}") from error


@cache
def compile_bounded_search(pattern: str) -> Callable[[str], object]:
    """Returns a search for a pattern whose time is bounded, whatever the pattern and the text are.

    Python's own search may backtrack without end if repetitions stand inside or behind each other, so RE2 searches for
    such patterns. RE2 knows neither lookaround, ``(?=…)``, nor backreferences.
    """
    compiled = re.compile(pattern)
    letters = re.sub(r"\\.|\[\^?\]?[^\]]*\]", "x", pattern, flags=re.DOTALL)
    if len(re.findall(r"(?<!\()[*+?{]", letters)) <= 1 and not re.search(r"\)[*+?{]", letters):
        return compiled.search
    from pyarrow.compute import match_substring_regex  # few patterns need it

    return lambda text: match_substring_regex(pyarrow.scalar(text), pattern).as_py()


OwnClasses: TypeAlias = Mapping[str, OwnClass]


def read_classes(path: Path) -> OwnClasses:
    """Returns the classes of a file: TOML with a table for each, which has ``kernels`` and perhaps a ``meaning``.

    Raises:
        ConfigurationError: it holds something else.
    """
    return read_toml(path, dict[str, OwnClass], '["state space"], and below it kernels = ["^scan_"]')


@cache
def read_plugin_classes() -> OwnClasses:
    """Returns the classes that installed packages have."""
    classes: dict[str, OwnClass] = {}
    for point, named in load_plugins(KERNEL_CLASSES):
        with skip_if_it_fails(point):
            classes |= msgspec.convert(named, dict[str, OwnClass])
    return classes
