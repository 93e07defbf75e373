"""Draws the figures of a report as PNG files, readable at the width of a page."""

from __future__ import annotations

import math
import warnings
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nsys_analyzer.report.model import Bars, Figure, Lines
from nsys_analyzer.text import plain, visible

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_WIDTH_INCHES = 8.0
_DPI = 120
_FEWEST_GROUPS = 3
#: Bars that have room for their values, and letters of these that stand side by side.
_MOST_LABELED, _LETTERS_ACROSS = 32, 80
#: No label of an axis has room for such a number, and nothing measured is as large.
_BEYOND_AXES = 1e15
#: Values over bars below this are written out.
_WRITTEN_OUT = 1e9
_PALETTE = (
    "#4269d0", "#efb118", "#ff725c", "#6cc5b0", "#3ca951", "#ff8ab7", "#a463f2", "#97bbf5", "#9c6b4e", "#9498a0",
    "#1f3a7a", "#8a6508", "#993224",
)  # fmt: skip


#: What a PNG file says of the program that made it.
SOFTWARE = "nsys-analyze"


def draw(figure: Figure, path: Path) -> None:
    """Draws one figure into a PNG file, which bears the name of ``SOFTWARE``."""
    shown: Figure
    if isinstance(figure, Bars):
        bars = tuple((_letters(name, 60), values) for name, values in figure.series)
        groups = tuple(_letters(group, 60) for group in figure.groups)
        shown = replace(
            figure, title=_letters(figure.title, 160), groups=groups, series=bars, axis=_letters(figure.axis, 160)
        )
    else:
        curves = tuple((_letters(name, 60), points) for name, points in figure.series)
        spans = tuple((_letters(name, 60), start, end) for name, start, end in figure.spans)
        x_axis, y_axis = _letters(figure.x_axis, 160), _letters(figure.y_axis, 160)
        title = _letters(figure.title, 160)
        shown = replace(figure, title=title, series=curves, spans=spans, x_axis=x_axis, y_axis=y_axis)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Glyph .* missing from", UserWarning)  # a box stands for the letter
        _draw(shown, path)


def _letters(text: str, limit: int) -> str:
    """A text that leaves room for the bars, its dollars themselves and no TeX."""
    whole = visible(plain(text))
    short = whole if len(whole) <= limit else f"{whole[: limit // 2]}…{whole[-limit // 2 + 1 :]}"
    return short.replace("$", r"\$")


def _draw(figure: Figure, path: Path) -> None:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    canvas = Figure(figsize=(_WIDTH_INCHES, _height(figure)), dpi=_DPI, layout="constrained")
    FigureCanvasAgg(canvas)
    axes = canvas.add_subplot()
    if isinstance(figure, Lines):
        _lines(axes, figure)
    else:
        _DRAWERS[figure.kind](axes, figure)
    axes.set_title(figure.title, fontsize=11, loc="left", wrap=True)
    axes.tick_params(labelsize=8)
    axes.spines[["top", "right"]].set_visible(False)
    if len(figure.series) > 1 or (isinstance(figure, Lines) and figure.spans):
        canvas.legend(
            *axes.get_legend_handles_labels(),
            loc="outside lower center",
            ncols=min(_legend_rows(figure), 5),
            fontsize=8,
        )
    canvas.savefig(path, format="png", metadata={"Software": SOFTWARE})


def _height(figure: Figure) -> float:
    """Inches: horizontal bars need a line each, the others a fixed height."""
    if isinstance(figure, Bars) and figure.kind == "horizontal":
        return 1.2 + 0.3 * len(figure.groups)
    return 4.2 + 0.22 * ((_legend_rows(figure) - 1) // 5)


def _legend_rows(figure: Figure) -> int:
    """Entries of the legend: a series each, and each name of a shaded stretch once."""
    spans = {name for name, _, _ in figure.spans} if isinstance(figure, Lines) else ()
    return len(figure.series) + len(spans)


def _grouped(axes: Axes, figure: Bars) -> None:
    width, count = 0.8 / len(figure.series), len(figure.groups) * len(figure.series)
    longest = max((len(_three_digits(v)) for _, values in figure.series for v in values if v is not None), default=0)
    upright = count * longest > _LETTERS_ACROSS
    for number, (name, values) in enumerate(figure.series):
        at = [group + (number - (len(figure.series) - 1) / 2) * width for group in range(len(figure.groups))]
        bars = axes.bar(at, [value or 0.0 for value in values], width, label=name, color=_color(number))
        if count <= _MOST_LABELED:
            texts = ["" if value is None else _three_digits(value) for value in values]
            axes.bar_label(bars, texts, fontsize=7, padding=2, rotation=90 if upright else 0)
    _group_axis(axes, figure, 0.04 * longest if upright else 0.1)  # an upright number is as high as it is long


def _stacked(axes: Axes, figure: Bars) -> None:
    base = [0.0] * len(figure.groups)
    for number, (name, values) in enumerate(figure.series):
        heights = [value or 0.0 for value in values]
        bars = axes.bar(range(len(base)), heights, 0.6, bottom=base, label=name, color=_color(number))
        texts = [f"{height:.0f}" if 4 <= height < _WRITTEN_OUT else "" for height in heights]
        axes.bar_label(bars, texts, label_type="center", fontsize=8, color=_text_color(number))
        base = [low + height for low, height in zip(base, heights, strict=True)]
    _group_axis(axes, figure)


def _horizontal(axes: Axes, figure: Bars) -> None:
    ((_, values),) = figure.series
    at = range(len(figure.groups))
    bars = axes.barh(at, [value or 0.0 for value in values], 0.7, color=_PALETTE[0])
    axes.bar_label(bars, [_three_digits(value) if value else "" for value in values], fontsize=8, padding=2)
    axes.set_yticks(at, figure.groups, fontsize=8)
    axes.invert_yaxis()
    axes.set_xlabel(figure.axis, fontsize=9)
    axes.margins(x=0.1)


def _lines(axes: Axes, figure: Lines) -> None:
    markers = (
        "" if figure.steps or max((len(points) for _, points in figure.series), default=0) > _MOST_LABELED else "o"
    )
    curves = [_drawable(figure, points) for _, points in figure.series]
    for number, ((name, _), points) in enumerate(zip(figure.series, curves, strict=True)):
        x, y = [point[0] for point in points], [point[1] for point in points]
        style = "steps-post" if figure.steps else "default"
        axes.plot(x, y, markers + "-", label=name, color=_color(number), markersize=4, linewidth=1.4, drawstyle=style)
    shades = {name: number for number, name in enumerate(dict.fromkeys(name for name, _, _ in figure.spans))}
    labeled: set[str] = set()
    for name, start, end in figure.spans:
        label = f"_{name}" if name in labeled else name  # a name that starts so stays out of the legend
        axes.axvspan(start, end, alpha=0.15, linewidth=0, color=_color(len(figure.series) + shades[name]), label=label)
        labeled.add(name)
    ticks = sorted({x for points in curves for x, _ in points})
    heights = [y for points in curves for _, y in points if y and not math.isnan(y)]
    if figure.log_x and ticks:
        axes.set_xscale("log", base=2)
        axes.set_xticks(ticks, [f"{tick:,.0f}" for tick in ticks], fontsize=8)
    if figure.log_y and heights:
        _log_y(axes, heights)
    else:
        axes.set_ylim(bottom=min(0.0, axes.get_ylim()[0]))  # heights that can be compared
    axes.grid(alpha=0.25, linewidth=0.5)
    axes.set_xlabel(figure.x_axis, fontsize=9)
    axes.set_ylabel(figure.y_axis, fontsize=9)


def _drawable(figure: Lines, points: Sequence[tuple[float, float | None]]) -> list[tuple[float, float]]:
    """The points of a curve, NaN where it breaks, without those that its axes have no place for."""
    return [
        (x, math.nan if y is None or not _has_place(y, log=figure.log_y) else y)
        for x, y in points
        if _has_place(x, log=figure.log_x)
    ]


def _has_place(value: float, *, log: bool) -> bool:
    return (value > 0 or not log) and abs(value) < _BEYOND_AXES


def _log_y(axes: Axes, values: list[float]) -> None:
    """A logarithmic axis with plain numbers; between the powers of ten where there are few of these."""
    from matplotlib.ticker import FuncFormatter, NullFormatter

    axes.set_yscale("log")
    plain = FuncFormatter(lambda value, _: f"{value:,.10g}")
    axes.yaxis.set_major_formatter(plain)
    range_of = max(values) / min(values) if values else 1.0
    halfway = FuncFormatter(lambda value, _: f"{value:,.10g}" if f"{value:e}"[0] in "25" else "")
    axes.yaxis.set_minor_formatter(plain if range_of < 5 else halfway if range_of < 200 else NullFormatter())
    axes.tick_params(which="minor", labelsize=8)


def _group_axis(axes: Axes, figure: Bars, room: float = 0.1) -> None:
    crowded = sum(len(group) for group in figure.groups) > 80
    alignment: dict[str, Any] = {"rotation": 30, "ha": "right"} if crowded else {}
    axes.set_xticks(range(len(figure.groups)), figure.groups, fontsize=8, **alignment)
    axes.set_ylabel(figure.axis, fontsize=9)
    axes.margins(y=room)
    spare = max(0, _FEWEST_GROUPS - len(figure.groups)) / 2  # a single bar is no wall
    axes.set_xlim(-0.6 - spare, len(figure.groups) - 0.4 + spare)


def _three_digits(value: float) -> str:
    """A value over its bar: 0.0573, 2.00, 20.8, 1,235, 4e+12."""
    if 100 <= abs(value) < _WRITTEN_OUT:
        return f"{value:,.0f}"
    return f"{value:#.3g}" if 1e-4 <= abs(value) < _WRITTEN_OUT or not value else f"{value:.0e}"


def _text_color(number: int) -> str:
    """Black or white, whichever is read better on a color of the palette."""
    red, green, blue = (int(_color(number)[i : i + 2], 16) for i in (1, 3, 5))
    return "black" if 0.299 * red + 0.587 * green + 0.114 * blue > 140 else "white"


def _color(number: int) -> str:
    return _PALETTE[number % len(_PALETTE)]


_DRAWERS = {"grouped": _grouped, "stacked": _stacked, "horizontal": _horizontal}
