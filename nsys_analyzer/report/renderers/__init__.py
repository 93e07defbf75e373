"""Defines the formats of a report. A new format is a module with ``render`` and an entry in ``RENDERERS``."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib import import_module
from typing import TYPE_CHECKING, Literal, cast

if TYPE_CHECKING:
    from nsys_analyzer.report.model import Report


@dataclass(frozen=True)
class ReportFormat:
    """A format of a report.

    Attributes:
        module: the module with ``render(report, figures) -> str``. ``figures`` maps the key of a figure to its path
            or drawing.
        file: the default name of the file. Data is printed by default.
        figures: whether figures are drawn into files beside the report or inline; empty if it has none.
        has_timeline: whether the format has a timeline of the measured steps.
        is_data: whether programs read the format. Such a report is printed by default, and without changes.
        mark: the last line of a file, by which the tool recognizes files that it wrote.
    """

    module: str
    file: str
    figures: Literal["files", "inline", ""] = ""
    has_timeline: bool = False
    is_data: bool = False
    mark: str = ""

    @property
    def render(self) -> Callable[[Report, Mapping[str, str]], str]:
        """Returns the function ``render`` of the module, which is imported at the first access."""
        return cast("Callable[[Report, Mapping[str, str]], str]", import_module(self.module).render)


_GENERATED_PAGE_MARK = "<!-- Written by nsys-analyze, which replaces this file. Take this line out to keep it. -->"

RENDERERS = {
    "markdown": ReportFormat(
        "nsys_analyzer.report.renderers.markdown", "report.md", figures="files", mark=_GENERATED_PAGE_MARK
    ),
    "html": ReportFormat(
        "nsys_analyzer.report.renderers.html",
        "report.html",
        figures="inline",
        has_timeline=True,
        mark=_GENERATED_PAGE_MARK,
    ),
    "json": ReportFormat("nsys_analyzer.report.renderers.json_report", "report.json", is_data=True),
}
