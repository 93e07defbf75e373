"""The formats of a report, a module each with ``render``: a new one is a module and a row here."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib import import_module
from typing import TYPE_CHECKING, Literal, cast

if TYPE_CHECKING:
    from nsys_analyzer.report.model import Report


@dataclass(frozen=True)
class Format:
    """A format of a report, whose module has ``render(report, figures) -> str``; figures are key to path or drawing.

    Attributes:
        file: the name of its file, unless another is given; data is printed.
        figures: what its figures are drawn as: files beside it, or a part of it; empty where it has none.
        has_timeline: whether it shows every moment of the measured steps.
        is_data: whether programs read it: it is printed letter by letter, and by default.
        mark: the last line of its files, by which they are known as ours.
    """

    module: str
    file: str
    figures: Literal["files", "inline", ""] = ""
    has_timeline: bool = False
    is_data: bool = False
    mark: str = ""

    @property
    def render(self) -> Callable[[Report, Mapping[str, str]], str]:
        """The module's function; the module is loaded when it is first asked for."""
        return cast("Callable[[Report, Mapping[str, str]], str]", import_module(self.module).render)


RENDERERS = {
    "markdown": Format(
        "nsys_analyzer.report.renderers.markdown",
        "report.md",
        figures="files",
        mark="<!-- Written by nsys-analyze, which replaces this file. Take this line out to keep it. -->",
    ),
    "html": Format(
        "nsys_analyzer.report.renderers.html",
        "report.html",
        figures="inline",
        has_timeline=True,
        mark="<!-- Written by nsys-analyze, which replaces this file. Take this line out to keep it. -->",
    ),
    "json": Format("nsys_analyzer.report.renderers.json_report", "report.json", is_data=True),
}
