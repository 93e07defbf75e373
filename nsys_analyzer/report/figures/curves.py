"""Draws curves."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from nsys_analyzer.report.figures.bars import legend
from nsys_analyzer.report.figures.palette import colors_of
from nsys_analyzer.report.figures.words import TITLE, fitted
from nsys_analyzer.report.model import Curves, Lines

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure as Canvas

#: The name of a curve and its points, y NaN where it breaks.
_Curve = tuple[str, list[tuple[float, float]]]

#: Points of a curve that have markers, and letters that stand side by side in the width.
_MOST_MARKED, _LETTERS_ACROSS = 32, 95
#: Values that span about a decade or more are drawn on a logarithmic axis where that is asked for.
_DECADE = 8
#: A logarithmic axis over less has numbers between the powers of ten.
_FEW_POWERS = 200
#: No label of an axis has room for such a number, and nothing measured is as large.
_BEYOND_AXES = 1e15


def draw_lines(canvas: Canvas, figure: Lines) -> None:
    """Draws curves over shaded stretches; the legend names both."""
    axes = canvas.add_subplot()
    logarithmic = figure.log_y and _spans_a_decade(figure.series)
    curves = _drawable(figure.series, log_x=figure.log_x, log_y=logarithmic)
    colors = colors_of([*(name for name, _ in curves), *(name for name, _, _ in figure.spans)])
    _plot(axes, curves, colors, steps=figure.steps)
    for name, start, end in figure.spans:
        axes.axvspan(start, end, alpha=0.15, linewidth=0, color=colors[name])
    _scale(axes, curves, log_x=figure.log_x, logarithmic=logarithmic)
    axes.set_xlabel(fitted(figure.x_axis, TITLE))
    axes.set_ylabel(fitted(figure.y_axis, TITLE))
    if len(colors) > 1:
        legend(canvas, colors)


def _spans_a_decade(curves: Curves) -> bool:
    positive = [y for _, points in curves for _, y in points if y is not None and 0 < y < _BEYOND_AXES]
    return bool(positive) and max(positive) / _DECADE > min(positive)


def _drawable(curves: Curves, *, log_x: bool, log_y: bool) -> list[_Curve]:
    """The curves, NaN where they break, without points that their axes have no place for."""

    def drawable(y: float | None) -> float:
        return y if y is not None and _has_place(y, log=log_y) else math.nan

    return [(name, [(x, drawable(y)) for x, y in points if _has_place(x, log=log_x)]) for name, points in curves]


def _has_place(value: float, *, log: bool) -> bool:
    return (value > 0 or not log) and abs(value) < _BEYOND_AXES


def _plot(axes: Axes, curves: Sequence[_Curve], colors: Mapping[str, str], *, steps: bool = False) -> None:
    """Plots curves, the first ones wider: what lies below others is seen."""
    marked = not steps and max((len(points) for _, points in curves), default=0) <= _MOST_MARKED
    style = "steps-post" if steps else "default"
    for number, (name, points) in enumerate(curves):
        wider = 1 - (number + 1) / len(curves)
        x, y = [point[0] for point in points], [point[1] for point in points]
        axes.plot(x, y, color=colors[name], linewidth=1.6 + 3.2 * wider, drawstyle=style)
        if marked:
            axes.plot(x, y, "o", color=colors[name], markersize=4 + 4 * wider)


def _scale(axes: Axes, curves: Sequence[_Curve], *, log_x: bool, logarithmic: bool) -> None:
    """Sets the scales: ticks where points are on a logarithmic x, plain numbers on y, from zero where it is linear.

    Between whole x, such as counts, there is no tick.
    """
    from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator

    ticks = sorted({x for _, points in curves for x, _ in points})
    if log_x and ticks:
        axes.set_xscale("log", base=2)
        axes.set_xticks(ticks, _thinned(ticks))
        axes.minorticks_off()
    elif all(float(tick).is_integer() for tick in ticks):
        axes.locator_params(axis="x", integer=True)
    heights = [y for _, points in curves for _, y in points if not math.isnan(y)]
    if logarithmic and heights:
        few = max(heights) / min(heights) < _FEW_POWERS
        plain = FuncFormatter(lambda value, _: f"{value:,.10g}")
        axes.set_yscale("log")
        axes.yaxis.set_major_formatter(plain)
        axes.yaxis.set_minor_locator(LogLocator(subs=(2, 5)) if few else NullLocator())
        axes.yaxis.set_minor_formatter(plain)
        axes.tick_params(which="minor", labelsize=8)
    else:
        axes.set_ylim(bottom=min(0.0, axes.get_ylim()[0]))  # heights that can be compared
    axes.grid(alpha=0.25, linewidth=0.5)


def _thinned(ticks: Sequence[float]) -> list[str]:
    """The label of each tick, empty where it would touch the one before."""
    labels: list[str] = []
    free_from, unit = -math.inf, _LETTERS_ACROSS / max(1e-9, math.log2(ticks[-1]) - math.log2(ticks[0]))
    for tick in ticks:
        text, at = f"{tick:,.0f}", math.log2(tick) * unit
        labels.append(text if at - len(text) / 2 >= free_from else "")
        free_from = at + len(text) / 2 + 0.5 if labels[-1] else free_from
    return labels
