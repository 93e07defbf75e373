"""Reads kernel classes that users define in a TOML file or in a plugin, which is an installed package."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path
from typing import TypeAlias

import msgspec
import pyarrow

from nsys_analyzer.system.plugins import KERNEL_CLASSES, load_plugins, skip_failing_plugin
from nsys_analyzer.system.strict_json import read_toml

#: The maximum number of characters of a pattern that an error message quotes.
_MAX_QUOTED_CHARACTERS = 80


class OwnClass(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A kernel class that a user defines. If it has the name of a built-in class, it adds kernels to that class.

    Attributes:
        kernels: regular expressions. A kernel belongs to the class if its name contains a match of one of them.
        meaning: the explanation of the class in a report's glossary.
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
    """Compiles a pattern into a search function whose run time is bounded for every pattern and text.

    If repetitions in a pattern are nested or follow each other, Python's own search may take exponential time. RE2
    searches such patterns instead. It supports neither lookaround, such as ``(?=…)``, nor backreferences.
    """
    compiled_pattern = re.compile(pattern)
    simplified_pattern = re.sub(r"\\.|\[\^?\]?[^\]]*\]", "x", pattern, flags=re.DOTALL)
    if len(re.findall(r"(?<!\()[*+?{]", simplified_pattern)) <= 1 and not re.search(r"\)[*+?{]", simplified_pattern):
        return compiled_pattern.search
    from pyarrow.compute import match_substring_regex  # only few patterns need this import

    return lambda text: match_substring_regex(pyarrow.scalar(text), pattern).as_py()


OwnClasses: TypeAlias = Mapping[str, OwnClass]


def read_classes(path: Path) -> OwnClasses:
    """Reads the classes in a TOML file. Each class is a table with ``kernels`` and optionally ``meaning``.

    Raises:
        ConfigurationError: the file is not such a TOML file.
    """
    return read_toml(path, dict[str, OwnClass], '["state space"], and below it kernels = ["^scan_"]')


@cache
def read_plugin_classes() -> OwnClasses:
    """Reads the kernel classes that installed packages define."""
    classes: dict[str, OwnClass] = {}
    for point, table in load_plugins(KERNEL_CLASSES):
        with skip_failing_plugin(point):
            classes |= msgspec.convert(table, dict[str, OwnClass])
    return classes
