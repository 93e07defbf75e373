"""Draws curves, in one pair of axes or in panels that share them."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from nsys_analyzer.report.figures.bars import legend, log_y
from nsys_analyzer.report.figures.palette import colors_of
from nsys_analyzer.report.figures.words import TITLE, fitted, three_digits
from nsys_analyzer.report.model import Curves, Lines, Panels

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure as Canvas

#: The name of a curve and its points, y NaN where it breaks.
_Curve = tuple[str, list[tuple[float, float]]]

#: Points of a curve that have markers, letters of a panel's title, and those that stand side by side in the width.
_MOST_MARKED, _LONGEST_TITLE, _LETTERS_ACROSS = 32, 30, 95
#: Curves that have their names at their ends, and the share of the axes' height from one name to the next.
_MOST_LABELED, _LINE = 9, 0.06
#: Values that span about a decade or more are drawn on a logarithmic axis where that is asked for.
_DECADE = 8
#: Curves that differ by less at every point are drawn in several widths, so that each is seen.
_COINCIDE = 0.03
_PANELS_ACROSS = 5
#: No label of an axis has room for such a number, and nothing measured is as large.
_BEYOND_AXES = 1e15


def draw_lines(canvas: Canvas, figure: Lines) -> None:
    """Draws curves with their names at their ends, over shaded stretches with theirs on top."""
    axes = canvas.add_subplot()
    logarithmic = figure.log_y and _spans_a_decade([figure.series])
    curves = _drawable(figure.series, log_x=figure.log_x, log_y=logarithmic)
    if figure.steps:
        curves = [(name, _held(points, figure.spans)) for name, points in curves]
    colors = colors_of([*(name for name, _ in curves), *(name for name, _, _ in figure.spans)])
    _plot(axes, curves, colors, steps=figure.steps)
    unnamed = [name for name, _ in curves] if len(curves) > 1 else []
    for name, start, end in figure.spans:
        axes.axvspan(start, end, alpha=0.15, linewidth=0, color=colors[name])
    _scale(axes, curves, log_x=figure.log_x, logarithmic=logarithmic, letters=_LETTERS_ACROSS)
    axes.set_xlabel(fitted(figure.x_axis, TITLE))
    axes.set_ylabel(fitted(figure.y_axis, TITLE))
    if figure.steps and not logarithmic:
        _fill_height(axes, curves)
    if 1 < len(curves) <= _MOST_LABELED and all(len(name) <= _LONGEST_TITLE for name in unnamed):
        _label_ends(axes, curves, colors)
        unnamed = []
    unnamed += _label_spans(axes, figure.spans)
    if unnamed:
        legend(canvas, {name: colors[name] for name in unnamed})


def draw_panels(canvas: Canvas, figure: Panels) -> None:
    """Draws a panel for each title, all of them over the same two axes, and one legend."""
    rows = max(1, math.ceil(len(figure.panels) / _PANELS_ACROSS))
    columns = max(1, math.ceil(len(figure.panels) / rows))
    canvas.set_figheight(1.1 + 2.1 * rows)
    grid = canvas.subplots(rows, columns, sharex=True, sharey=True, squeeze=False).ravel()
    logarithmic = figure.log_y and _spans_a_decade([curves for _, curves in figure.panels])
    drawn = [_drawable(curves, log_x=figure.log_x, log_y=logarithmic) for _, curves in figure.panels]
    colors = colors_of([name for curves in drawn for name, _ in curves])
    for axes, (title, _), curves in zip(grid, figure.panels, drawn, strict=False):
        _plot(axes, curves, colors)
        axes.set_title(fitted(title, _LONGEST_TITLE), loc="left")
        axes.grid(alpha=0.25, linewidth=0.5)
    for axes in grid[len(figure.panels) :]:
        axes.set_visible(False)
    every = [curve for curves in drawn for curve in curves]
    letters = _LETTERS_ACROSS // columns
    _scale(grid[0], every, log_x=figure.log_x, logarithmic=logarithmic, letters=letters)
    grid[(rows - 1) * columns + (columns - 1) // 2].set_xlabel(fitted(figure.x_axis, TITLE))
    canvas.supylabel(fitted(figure.y_axis, TITLE), fontsize=9)
    if len(colors) > 1:
        legend(canvas, colors)


def _spans_a_decade(drawn: Sequence[Curves]) -> bool:
    every = (y for curves in drawn for _, points in curves for _, y in points)
    positive = [y for y in every if y is not None and 0 < y < _BEYOND_AXES]
    return bool(positive) and max(positive) / _DECADE > min(positive)


def _drawable(curves: Curves, *, log_x: bool, log_y: bool) -> list[_Curve]:
    """The curves, NaN where they break, without points that their axes have no place for."""

    def drawable(y: float | None) -> float:
        return y if y is not None and _has_place(y, log=log_y) else math.nan

    return [(name, [(x, drawable(y)) for x, y in points if _has_place(x, log=log_x)]) for name, points in curves]


def _has_place(value: float, *, log: bool) -> bool:
    return (value > 0 or not log) and abs(value) < _BEYOND_AXES


def _held(points: list[tuple[float, float]], spans: Sequence[tuple[str, float, float]]) -> list[tuple[float, float]]:
    """The points of a curve in steps, its last value held until the last stretch ends."""
    end = max((end for _, _, end in spans), default=-math.inf)
    return [*points, (end, points[-1][1])] if points and end > points[-1][0] else points


def _plot(axes: Axes, curves: Sequence[_Curve], colors: Mapping[str, str], *, steps: bool = False) -> None:
    """Plots curves; one that lies below others is wider than they are."""
    marked = not steps and max((len(points) for _, points in curves), default=0) <= _MOST_MARKED
    style = "steps-post" if steps else "default"
    for number, (name, points) in enumerate(curves):
        above = sum(_coincide(points, other) for _, other in curves[number + 1 :])
        x, y = [point[0] for point in points], [point[1] for point in points]
        axes.plot(x, y, color=colors[name], linewidth=1.6 + 1.8 * above, drawstyle=style)
        if marked:
            axes.plot(x, y, "o", color=colors[name], markersize=4.5 + 2 * above)


def _coincide(points: list[tuple[float, float]], others: list[tuple[float, float]]) -> bool:
    """Whether another curve covers most of this one: both have these x, and hardly differ there."""
    known = dict(others)
    both = [(y, known[x]) for x, y in points if x in known]
    return len(both) > len(points) / 2 and all(abs(a - b) <= _COINCIDE * max(abs(a), abs(b)) for a, b in both)


def _scale(axes: Axes, curves: Sequence[_Curve], *, log_x: bool, logarithmic: bool, letters: int) -> None:
    """Sets the scales: ticks where points are on a logarithmic x, plain numbers on y, from zero where it is linear.

    Between whole x, such as counts, there is no tick.
    """
    ticks = sorted({x for _, points in curves for x, _ in points})
    if log_x and ticks:
        axes.set_xscale("log", base=2)
        axes.set_xticks(ticks, _thinned(ticks, letters))
        axes.minorticks_off()
    elif all(float(tick).is_integer() for tick in ticks):
        axes.locator_params(axis="x", integer=True)
    heights = [y for _, points in curves for _, y in points if not math.isnan(y)]
    if logarithmic and heights:
        log_y(axes, heights)
    else:
        axes.set_ylim(bottom=min(0.0, axes.get_ylim()[0]))  # heights that can be compared
    axes.grid(alpha=0.25, linewidth=0.5)


def _thinned(ticks: Sequence[float], letters: int) -> list[str]:
    """The label of each tick, empty where it would touch the one before; so many letters stand side by side."""
    labels: list[str] = []
    free_from, unit = -math.inf, letters / max(1e-9, math.log2(ticks[-1]) - math.log2(ticks[0]))
    for tick in ticks:
        text, at = f"{tick:,.0f}", math.log2(tick) * unit
        labels.append(text if at - len(text) / 2 >= free_from else "")
        free_from = at + len(text) / 2 + 0.5 if labels[-1] else free_from
    return labels


def _fill_height(axes: Axes, curves: Sequence[_Curve]) -> None:
    """Lets steps fill the height, from zero only where they come near it, and writes the highest value of one."""
    known = [(y, x) for _, points in curves for x, y in points if not math.isnan(y)]
    if not known:
        return
    (lowest, _), (highest, x) = min(known), max(known, key=lambda point: point[0])
    bottom = lowest - 0.15 * (highest - lowest) if 0 < highest < 2 * lowest and highest > lowest else min(0.0, lowest)
    axes.set_ylim(bottom, highest + max(0.12 * (highest - bottom), 1e-9))
    axes.margins(x=0.01)
    if len(curves) == 1:
        text = f"highest {three_digits(highest)}"
        axes.annotate(text, (x, highest), xytext=(4, 2), textcoords="offset points", annotation_clip=False)


def _label_ends(axes: Axes, curves: Sequence[_Curve], colors: Mapping[str, str]) -> None:
    """Writes each curve's name right of the axes, as high as its end where no other name is."""
    axes.get_xlim(), axes.get_ylim()  # brings the limits up to date
    to_share = axes.transScale + axes.transLimits
    ends = [(name, [point for point in points if not math.isnan(point[1])]) for name, points in curves]
    last = {name: points[-1] for name, points in ends if points}
    wanted = {name: float(to_share.transform(end)[1]) for name, end in last.items()}
    places: dict[str, float] = {}
    for name in sorted(wanted, key=lambda name: wanted[name]):
        places[name] = max([wanted[name], *(place + _LINE for place in places.values())])
    ceiling = 1.0
    for name in reversed(places):
        place = min(places[name], ceiling)
        ceiling = place - _LINE
        line = {"arrowstyle": "-", "color": colors[name], "linestyle": ":", "shrinkA": 1, "shrinkB": 3}
        axes.annotate(
            fitted(name), last[name], (1.03, place), textcoords="axes fraction", va="center", arrowprops=line,
            annotation_clip=False,
        )  # fmt: skip


def _label_spans(axes: Axes, spans: Sequence[tuple[str, float, float]]) -> list[str]:
    """Writes the names of shaded stretches above them; gives those that no stretch has room for."""
    left, right = axes.get_xlim()
    letters = _LETTERS_ACROSS / max(1e-9, right - left)
    named = set()
    for name, start, end in spans:
        if len(fitted(name)) + 1 <= (end - start) * letters:
            named.add(name)
            middle = (start + end) / 2
            axes.text(middle, 1.01, fitted(name), transform=axes.get_xaxis_transform(), ha="center", va="bottom")
    return list(dict.fromkeys(name for name, _, _ in spans if name not in named))
