"""An input format: which files it takes, and how one becomes the SQLite export that is read."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

WriteExport: TypeAlias = Callable[[Path], None]
"""Writes an export to a path where no file is."""

_HEAD = 1024


@dataclass(frozen=True)
class Source:
    """An input format.

    Attributes:
        suffixes: of its files, the longer of two endings first.
        open: checks and reads a file, and returns what writes its export, given the seconds that another program may
            take for it (None: no limit). None for a file that is an export itself.
        ambiguous_suffixes: endings that other files have, too.
        marks: a file of such an ending, in a folder, is taken where one of these stands in its first kB.
        tells_origin: whether its exports hold :func:`~nsys_analyzer.trace.sources.made.origin_rows`. Without them an
            export is current when it is no older.
    """

    suffixes: tuple[str, ...]
    open: Callable[[Path, float | None], WriteExport] | None = None
    ambiguous_suffixes: tuple[str, ...] = ()
    marks: tuple[bytes, ...] = ()
    tells_origin: bool = True

    def suffix_of(self, path: Path) -> str:
        """The ending by which it takes a file, empty where it does not take it."""
        return next((ending for ending in (*self.suffixes, *self.ambiguous_suffixes) if path.name.endswith(ending)), "")

    def begins(self, path: Path) -> bool:
        """Tells whether a file of an ambiguous ending begins as this format does."""
        try:
            if not path.name.endswith(self.ambiguous_suffixes or "/") or not path.is_file():
                return False
            with path.open("rb") as file:
                head = file.read(_HEAD)
        except OSError:
            return False
        return any(mark in head for mark in self.marks)

    def stem_of(self, path: Path) -> str:
        """The name of a file without the ending."""
        return path.name.removesuffix(self.suffix_of(path)) or path.name
