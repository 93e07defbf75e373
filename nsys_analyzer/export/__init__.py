"""Exports captures to formats of other tools: a trace for ui.perfetto.dev, and the table of GPU operations.

A new format is a module or class with ``write(captures, path)`` and ``is_ours(path)``, and an entry in ``FORMATS``.
Instead of the entry, another package has an entry point with the name of the format, which refers to its ``Format``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from pkgutil import resolve_name
from typing import Any

from nsys_analyzer.system.plugins import EXPORT_FORMATS, load_plugins, skip_failing_plugin


@dataclass(frozen=True)
class Format:
    """A format of exported files.

    Attributes:
        module_or_class: the module (``module``) or class (``module:class``) with the functions of the format. It is
            imported when the functions are used.
        suffix: the suffix of files in the format.
        on_one_clock: whether a file has one timeline for all captures, so that the captures must be aligned.
    """

    module_or_class: str
    suffix: str
    on_one_clock: bool = False

    @property
    def write(self) -> Callable[[Sequence[Any], Path], None]:
        """Returns the function that writes captures (``export.writing.Capture``) into a file.

        The function raises NsysAnalyzerError if a capture cannot be read, and OSError if the file cannot be written.
        """
        write: Callable[[Sequence[Any], Path], None] = resolve_name(self.module_or_class).write
        return write

    @property
    def is_ours(self) -> Callable[[Path], bool]:
        """Returns the function that tells whether this tool wrote a file in this format. The file must not be empty."""
        is_ours: Callable[[Path], bool] = resolve_name(self.module_or_class).is_ours
        return is_ours


#: The formats of this package, by the values of ``--format``.
FORMATS = {
    "perfetto": Format("nsys_analyzer.export.perfetto", ".pftrace", on_one_clock=True),
    "parquet": Format("nsys_analyzer.export.tables:Parquet", ".parquet"),
    "csv": Format("nsys_analyzer.export.tables:Csv", ".csv"),
    "sqlite": Format("nsys_analyzer.export.tables:Sqlite", ".db"),
}


def load_formats() -> dict[str, Format]:
    """Returns the formats of this package and of installed plugins."""
    formats = dict(FORMATS)
    for point, form in load_plugins(EXPORT_FORMATS):
        with skip_failing_plugin(point):
            _ = form.write, form.is_ours, form.suffix  # fails if the module or a function is missing
            formats.setdefault(point.name, form)
    return formats
