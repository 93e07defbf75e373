"""Captures in formats of other tools: a trace for ui.perfetto.dev, and the table of GPU operations.

A new format is a module, or a class in one, with ``write(captures, path)`` and ``is_ours(path)``, and an entry in
``FORMATS``, or in another package an entry point whose name is that of the format, and which names its ``Format``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from pkgutil import resolve_name
from typing import Any

from nsys_analyzer.system.plugins import EXPORT_FORMATS, load_plugins, skip_if_it_fails


@dataclass(frozen=True)
class Format:
    """A format: the place of its functions, ``module`` or ``module:class``, and what its files end in.

    The place is imported where it is used; captures are those of ``export.writing``. ``on_one_clock``: whether it shows
    all captures on one timeline.
    """

    place: str
    suffix: str
    on_one_clock: bool = False

    @property
    def write(self) -> Callable[[Sequence[Any], Path], None]:
        """Writes captures into a file; raises NsysAnalyzerError where one cannot be read, OSError else."""
        write: Callable[[Sequence[Any], Path], None] = resolve_name(self.place).write
        return write

    @property
    def is_ours(self) -> Callable[[Path], bool]:
        """Returns whether a file that is not empty was written here."""
        is_ours: Callable[[Path], bool] = resolve_name(self.place).is_ours
        return is_ours


#: The formats, by the names that --format takes.
FORMATS = {
    "perfetto": Format("nsys_analyzer.export.perfetto", ".pftrace", on_one_clock=True),
    "parquet": Format("nsys_analyzer.export.tables:Parquet", ".parquet"),
    "csv": Format("nsys_analyzer.export.tables:Csv", ".csv"),
    "sqlite": Format("nsys_analyzer.export.tables:Sqlite", ".db"),
}


def formats() -> dict[str, Format]:
    """Returns these, and those of installed packages."""
    found = dict(FORMATS)
    for point, form in load_plugins(EXPORT_FORMATS):
        with skip_if_it_fails(point):
            _ = form.write, form.is_ours, form.suffix  # its module is there
            found.setdefault(point.name, form)
    return found
