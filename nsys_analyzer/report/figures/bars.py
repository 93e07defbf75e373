"""Draws bars: side by side, or as parts of one."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from nsys_analyzer.report.figures.palette import colors_of, text_color
from nsys_analyzer.report.figures.words import TITLE, fitted, in_legend, three_digits, wrapped
from nsys_analyzer.report.model import Bars

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure as Canvas

_FEWEST_GROUPS = 3
#: Bars that have room for their values, and letters of these, and of names, that stand side by side.
_MOST_LABELED, _VALUES_ACROSS, _NAMES_ACROSS = 32, 80, 100
#: Of a figure's width in inches: an axis beside the names of rows, and a letter.
_ACROSS, _LETTER = 6.3, 0.075
_LETTERS_OF_ROW = 36
_NO_NUMBER_BEYOND = 1e15


def draw_bars(canvas: Canvas, figure: Bars) -> None:
    """Draws a bar chart of any kind onto an empty canvas."""
    (_stacked if figure.kind == "stacked" else _grouped)(canvas, canvas.add_subplot(), figure)


def legend(canvas: Canvas, colors: Mapping[str, str]) -> None:
    """Writes names beside patches of their colors below the figure, five in a row, which makes it higher."""
    from matplotlib.patches import Patch

    longest = max((len(fitted(name)) for name in colors), default=0)
    across = max(1, min(5, int(100 / (longest + 6))))
    canvas.set_figheight(canvas.get_figheight() + 0.2 * math.ceil(len(colors) / across))
    patches = [Patch(color=color, label=in_legend(name)) for name, color in colors.items()]
    canvas.legend(handles=patches, loc="outside lower left", ncols=across)


def _grouped(canvas: Canvas, axes: Axes, figure: Bars) -> None:
    """Bars side by side with their values above them, upright where they are many."""
    colors, width = colors_of([name for name, _ in figure.series]), 0.8 / len(figure.series)
    values = [value for _, series in figure.series for value in series if value is not None]
    longest = max((len(three_digits(value)) for value in values), default=0)
    upright = len(figure.groups) * len(figure.series) * longest > _VALUES_ACROSS
    for number, (name, series) in enumerate(figure.series):
        shift = (number - (len(figure.series) - 1) / 2) * width
        at = [group + shift for group, value in enumerate(series) if value is not None]
        heights = [value for value in series if value is not None]
        bars = axes.bar(at, heights, width * 0.92, color=colors[name])
        if len(values) <= _MOST_LABELED:
            written = [three_digits(value) for value in heights]
            axes.bar_label(bars, written, padding=2, fontsize=8, rotation=90 if upright else 0)
    axes.margins(y=0.04 * longest if upright else 0.1)  # an upright number is as high as it is long
    _name_groups(axes, figure)
    if len(figure.series) > 1:
        legend(canvas, colors)


def _name_groups(axes: Axes, figure: Bars) -> None:
    """Writes the names of groups below them, over several lines or slanted where they are long."""
    width = max(8, _NAMES_ACROSS // len(figure.groups)) if figure.groups else 0
    names = [fitted(group) for group in figure.groups]
    over_lines = [textwrap.wrap(name, width, break_long_words=False) or [" "] for name in names]
    fits = all(len(lines) <= 3 and max(map(len, lines)) <= width for lines in over_lines)
    slanted: dict[str, Any] = {} if fits else {"rotation": 30, "ha": "right"}
    axes.set_xticks(range(len(names)), ["\n".join(lines) for lines in over_lines] if fits else names, **slanted)
    axes.yaxis.set_major_formatter("{x:,.10g}")
    axes.set_ylabel(fitted(figure.axis, TITLE))
    spare = max(0, _FEWEST_GROUPS - len(figure.groups)) / 2  # a single bar is no wall
    axes.set_xlim(-0.6 - spare, len(figure.groups) - 0.4 + spare)


def _stacked(canvas: Canvas, axes: Axes, figure: Bars) -> None:
    """One bar in a row for each group; parts bear their names where there is room, else the legend has all."""
    canvas.set_figheight(1.15 + 0.5 * len(figure.groups))
    colors = colors_of([name for name, _ in figure.series])
    totals = [sum(max(0.0, values[i] or 0.0) for _, values in figure.series) for i in range(len(figure.groups))]
    letters = _ACROSS / _LETTER / max([1e-9, *totals])  # that fit into a part of one unit
    base, named = [0.0] * len(totals), set()
    for name, values in figure.series:
        lengths = [value or 0.0 for value in values]
        axes.barh(range(len(base)), lengths, 0.62, left=base, color=colors[name], edgecolor="white", linewidth=0.8)
        for row, (start, length) in enumerate(zip(base, lengths, strict=True)):
            number = f"{length:.0f}" if figure.axis.startswith("%") else three_digits(length)
            whole = f"{fitted(name)} {number}"
            text = next((text for text in (whole, number) if len(text) + 1 <= length * letters), "")
            if abs(length) < _NO_NUMBER_BEYOND:
                axes.text(start + length / 2, row, text, ha="center", va="center", color=text_color(colors[name]))
            named |= {name} if text == whole else set()
        base = [low + length for low, length in zip(base, lengths, strict=True)]
    axes.set_yticks(range(len(figure.groups)), [wrapped(group, _LETTERS_OF_ROW) for group in figure.groups])
    axes.tick_params(axis="y", length=0)
    axes.invert_yaxis()
    axes.set_xlabel(fitted(figure.axis, TITLE))
    axes.margins(x=0.01)
    if len(named) < len(figure.series):
        legend(canvas, colors)
