"""Reads kernel classes that users define: in a file, or in a package that names them as an entry point."""

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

#: The number of characters of a pattern that an error quotes.
_MAX_QUOTED_CHARACTERS = 80


class OwnClass(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A kernel class that a user defines. If its name is that of a class of the package, it adds kernels to that class.

    Attributes:
        kernels: regular expressions that match in the names of its kernels.
        meaning: its line of the glossary.
    """

    kernels: tuple[str, ...]
    meaning: str = "A class of your own."

    def __post_init__(self) -> None:
        """Raises ValueError if a pattern is not a regular expression."""
        for pattern in self.kernels:
            try:
                compile_bounded_search(pattern)("")
            except (re.error, RecursionError, OverflowError, pyarrow.ArrowInvalid) as error:
                quoted = pattern if len(pattern) <= _MAX_QUOTED_CHARACTERS else f"{pattern[:_MAX_QUOTED_CHARACTERS]}…"
                raise ValueError(f"{quoted!r} is not a regular expression: {error}") from error


@cache
def compile_bounded_search(pattern: str) -> Callable[[str], object]:
    """Compiles a pattern into a search function whose run time is bounded, whatever the pattern and the text are.

    If repetitions are nested or follow each other, Python's own search may take exponential time. RE2 searches for such
    patterns instead. It supports neither lookaround, ``(?=…)``, nor backreferences.
    """
    compiled = re.compile(pattern)
    letters = re.sub(r"\\.|\[\^?\]?[^\]]*\]", "x", pattern, flags=re.DOTALL)
    if len(re.findall(r"(?<!\()[*+?{]", letters)) <= 1 and not re.search(r"\)[*+?{]", letters):
        return compiled.search
    from pyarrow.compute import match_substring_regex  # only few patterns need this import

    return lambda text: match_substring_regex(pyarrow.scalar(text), pattern).as_py()


OwnClasses: TypeAlias = Mapping[str, OwnClass]


def read_classes(path: Path) -> OwnClasses:
    """Reads the classes in a TOML file. Each class is a table with ``kernels`` and optionally a ``meaning``.

    Raises:
        ConfigurationError: the file has other contents.
    """
    return read_toml(path, dict[str, OwnClass], '["state space"], and below it kernels = ["^scan_"]')


@cache
def read_plugin_classes() -> OwnClasses:
    """Reads the classes that installed packages define."""
    classes: dict[str, OwnClass] = {}
    for point, table in load_plugins(KERNEL_CLASSES):
        with skip_if_it_fails(point):
            classes |= msgspec.convert(table, dict[str, OwnClass])
    return classes
