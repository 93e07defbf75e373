"""Draws the figures of a report as PNG files, readable at the width of a page."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from nsys_analyzer.report.model import Bars

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_WIDTH_INCHES = 8.0
_DPI = 120
_PALETTE = (
    "#4269d0", "#efb118", "#ff725c", "#6cc5b0", "#3ca951", "#ff8ab7", "#a463f2", "#97bbf5", "#9c6b4e", "#9498a0",
    "#1f3a7a", "#8a6508", "#993224",
)  # fmt: skip


def draw(figure: Bars, path: Path) -> None:
    """Draws one figure into a PNG file."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    height = _height(figure)
    canvas = Figure(figsize=(_WIDTH_INCHES, height), dpi=_DPI, layout="constrained")
    FigureCanvasAgg(canvas)
    axes = canvas.add_subplot()
    _DRAWERS[figure.kind](axes, figure)
    axes.set_title(figure.title, fontsize=11, loc="left", wrap=True)
    axes.spines[["top", "right"]].set_visible(False)
    if len(figure.series) > 1:
        canvas.legend(
            *axes.get_legend_handles_labels(), loc="outside lower center", ncols=min(len(figure.series), 5), fontsize=8
        )
    canvas.savefig(path, format="png", metadata={"Software": None})


def _height(figure: Bars) -> float:
    """Inches: horizontal bars need a line each, the others a fixed height."""
    if figure.kind == "horizontal":
        return 1.2 + 0.3 * len(figure.groups)
    return 4.2 + 0.22 * (len(figure.series) // 5)


def _grouped(axes: Axes, figure: Bars) -> None:
    width = 0.8 / len(figure.series)
    for number, (name, values) in enumerate(figure.series):
        at = [group + (number - (len(figure.series) - 1) / 2) * width for group in range(len(figure.groups))]
        bars = axes.bar(at, [value or 0.0 for value in values], width, label=name, color=_color(number))
        if len(figure.groups) * len(figure.series) <= 24:
            texts = ["" if value is None else f"{value:.3g}" for value in values]
            axes.bar_label(bars, texts, fontsize=7, padding=1)
    _group_axis(axes, figure)


def _stacked(axes: Axes, figure: Bars) -> None:
    base = [0.0] * len(figure.groups)
    for number, (name, values) in enumerate(figure.series):
        heights = [value or 0.0 for value in values]
        bars = axes.bar(range(len(base)), heights, 0.6, bottom=base, label=name, color=_color(number))
        texts = [f"{height:.0f}" if height >= 4 else "" for height in heights]
        axes.bar_label(bars, texts, label_type="center", fontsize=8, color="white")
        base = [low + height for low, height in zip(base, heights, strict=True)]
    _group_axis(axes, figure)


def _horizontal(axes: Axes, figure: Bars) -> None:
    ((_, values),) = figure.series
    at = range(len(figure.groups))
    bars = axes.barh(at, [value or 0.0 for value in values], 0.7, color=_PALETTE[0])
    axes.bar_label(bars, [f"{value:.3g}" if value else "" for value in values], fontsize=8, padding=2)
    axes.set_yticks(at, figure.groups, fontsize=8)
    axes.invert_yaxis()
    axes.set_xlabel(figure.axis, fontsize=9)
    axes.margins(x=0.1)


def _group_axis(axes: Axes, figure: Bars) -> None:
    crowded = sum(len(group) for group in figure.groups) > 80
    alignment: dict[str, Any] = {"rotation": 30, "ha": "right"} if crowded else {}
    axes.set_xticks(range(len(figure.groups)), figure.groups, fontsize=8, **alignment)
    axes.set_ylabel(figure.axis, fontsize=9)
    axes.margins(y=0.1)


def _color(number: int) -> str:
    return _PALETTE[number % len(_PALETTE)]


_DRAWERS = {"grouped": _grouped, "stacked": _stacked, "horizontal": _horizontal}
