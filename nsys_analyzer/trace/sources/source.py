"""An input format: which files it takes, and how one becomes the SQLite export that is read."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

WriteExport: TypeAlias = Callable[[Path], None]
"""Writes an export to a path where no file is."""


@dataclass(frozen=True)
class Source:
    """An input format.

    Attributes:
        suffixes: of its files, the longer of two endings first.
        open: checks and reads a file, and returns what writes its export, given the seconds that another program may
            take for it (None: no limit). None for a file that is an export itself.
        ambiguous_suffixes: endings that other files have, too: a file is taken where it is named, not in a folder.
        tells_origin: whether its exports hold :func:`~nsys_analyzer.trace.sources.made.origin_rows`. Without them an
            export is current when it is no older.
    """

    suffixes: tuple[str, ...]
    open: Callable[[Path, float | None], WriteExport] | None = None
    ambiguous_suffixes: tuple[str, ...] = ()
    tells_origin: bool = True

    def suffix_of(self, path: Path) -> str:
        """The ending by which it takes a file, empty where it does not take it."""
        return next((ending for ending in (*self.suffixes, *self.ambiguous_suffixes) if path.name.endswith(ending)), "")

    def stem_of(self, path: Path) -> str:
        """The name of a file without the ending."""
        return path.name.removesuffix(self.suffix_of(path)) or path.name
