"""Captures in formats of other tools: a trace for ui.perfetto.dev, and the table of GPU operations.

A new format is a module with ``write(captures, path)`` and ``is_ours(path)``, and an entry in ``FORMATS``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from nsys_analyzer.export.captures import Capture


@dataclass(frozen=True)
class Format:
    """A format: its module, which is imported where it is used, and what its files end in.

    ``on_one_clock``: whether it shows all captures on one timeline.
    """

    module: str
    suffix: str
    on_one_clock: bool = False

    @property
    def write(self) -> Callable[[Sequence[Capture], Path], None]:
        """Writes captures into a file; raises NsysAnalyzerError where one cannot be read, OSError else."""
        write: Callable[[Sequence[Capture], Path], None] = self._module.write
        return write

    @property
    def is_ours(self) -> Callable[[Path], bool]:
        """Whether a file that is not empty was written here."""
        is_ours: Callable[[Path], bool] = self._module.is_ours
        return is_ours

    @property
    def _module(self) -> Any:
        return import_module(self.module)


#: The formats, by the names that --format takes.
FORMATS = {
    "perfetto": Format("nsys_analyzer.export.perfetto", ".pftrace", on_one_clock=True),
    "parquet": Format("nsys_analyzer.export.parquet", ".parquet"),
    "csv": Format("nsys_analyzer.export.csv", ".csv"),
    "sqlite": Format("nsys_analyzer.export.sqlite", ".db"),
}
