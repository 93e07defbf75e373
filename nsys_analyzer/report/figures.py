"""Draws the figures of a report: as PNG files for markdown, and as SVG for an HTML page."""

from __future__ import annotations

import io
import math
import re
import textwrap
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nsys_analyzer.report.model import Bars, Curves, Figure, Lines
from nsys_analyzer.report.palette import assign_colors, text_color
from nsys_analyzer.report.units import rounded
from nsys_analyzer.text import visible

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure as Canvas

#: The software in the metadata of a PNG file, by which the tool recognizes its own files.
SOFTWARE_NAME = "nsys-analyze"

#: A page of GitHub is 821 pixels wide; at this size, text of 9 points is 12.5 pixels high.
_WIDTH_INCHES, _DPI = 8.21, 200
_HEIGHT_INCHES = 4.2
_PAD_INCHES = 0.07
#: A placeholder in an SVG drawing for the text color of the page; no figure uses this color otherwise.
_TEXT_COLOR_PLACEHOLDER = "#010203"
#: The font that the layout is computed with, and a fallback of the same width.
_FONTS = ["DejaVu Sans", "Verdana", "sans-serif"]
#: Matches the ID of an SVG group that nothing refers to.
_NUMBERED_ID = re.compile(r' id="[\w.]+_\d+"')
#: The maximum number of characters of a title and of any other name.
_MAX_TITLE_LENGTH, _MAX_NAME_LENGTH = 160, 60
#: The number of characters in a line of the title.
_TITLE_LINE_LENGTH = 90
_MATPLOTLIB_STYLE: dict[Any, Any] = {
    "text.parse_math": False,  # so that matplotlib shows dollar signs in names
    "font.size": 9.0,
    "axes.labelsize": 9.0,
    "axes.titlesize": 9.5,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "xtick.labelsize": 8.5,
    "ytick.labelsize": 8.5,
    "legend.fontsize": 8.5,
    "legend.frameon": False,
    "figure.titlesize": 11.0,
}

#: A chart with fewer groups has an empty margin on both sides.
_MIN_GROUPS_WITHOUT_MARGIN = 3
#: The values above bars are left out if a chart has more bars.
_MAX_LABELED_BARS = 32
#: The number of characters of values, and of group names, that fit side by side.
_VALUES_LINE_LENGTH, _NAMES_LINE_LENGTH = 80, 100
#: The width of the axis beside the names of rows, and of one character, in inches.
_AXIS_WIDTH_INCHES, _CHARACTER_WIDTH_INCHES = 6.3, 0.075
_MAX_ROW_NAME_LENGTH = 36
#: A part of a bar that is longer than this gets no number, because matplotlib cannot place text that far from 0.
_MAX_NUMBERED_PART_LENGTH = 1e15

#: The name of a curve and its points; y is NaN where the curve is interrupted.
_Curve = tuple[str, list[tuple[float, float]]]
#: A curve with more points has no markers.
_MAX_MARKED_POINTS = 32
#: The number of characters that fit below the x axis.
_TICKS_LINE_LENGTH = 95
#: A requested logarithmic axis is used only if the largest value exceeds the smallest value by this factor.
_MIN_LOGARITHMIC_RATIO = 8
#: A logarithmic axis has labels between the powers of ten if the largest value ÷ the smallest value is below this.
_MAX_MINOR_LABELS_RATIO = 200
#: Larger values are not drawn, because an axis has no room for their labels. No measurement is that large.
_MAX_DRAWN_VALUE = 1e15


def draw_png(figure: Figure, path: Path) -> None:
    """Draws a figure into a PNG file, with ``SOFTWARE_NAME`` in its metadata.

    The background is white on every page, since no text color has enough contrast to a light and to a dark background.
    """
    _save_figure(figure, path, "png", {"Software": SOFTWARE_NAME}, {})


def draw_svg(figure: Figure) -> str:
    """Returns a figure as an SVG element for an HTML page, with lines and text in the text color of the page."""
    output = io.StringIO()
    # The salt makes IDs unique among the figures of a page.
    style = {"svg.fonttype": "none", "svg.hashsalt": figure.key, "savefig.transparent": True, "font.sans-serif": _FONTS}
    text_colored = ("text.color", "axes.edgecolor", "axes.labelcolor", "xtick.color", "ytick.color")
    no_metadata = dict.fromkeys(("Date", "Creator", "Format", "Type"))
    _save_figure(figure, output, "svg", no_metadata, style | dict.fromkeys(text_colored, _TEXT_COLOR_PLACEHOLDER))
    text = output.getvalue()
    text = text[text.index("<svg") :].replace(_TEXT_COLOR_PLACEHOLDER, "currentColor")
    return _NUMBERED_ID.sub("", text)


def _save_figure(figure: Figure, target: Any, form: str, metadata: dict[str, Any], style: dict[Any, Any]) -> None:
    """Draws a figure with matplotlib and writes it to a path or stream."""
    import matplotlib
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure as Canvas
    from matplotlib.layout_engine import ConstrainedLayoutEngine

    with warnings.catch_warnings(), matplotlib.rc_context(_MATPLOTLIB_STYLE | style):
        # A character that the font lacks becomes a box.
        warnings.filterwarnings("ignore", "Glyph .* missing from", UserWarning)
        layout = ConstrainedLayoutEngine(w_pad=_PAD_INCHES, h_pad=_PAD_INCHES)
        canvas = Canvas(figsize=(_WIDTH_INCHES, _HEIGHT_INCHES), dpi=_DPI, layout=layout)
        FigureCanvasAgg(canvas)
        canvas.suptitle(_wrap_text(figure.title, _TITLE_LINE_LENGTH, _MAX_TITLE_LENGTH), x=0.01, ha="left")
        axes = canvas.add_subplot()
        if isinstance(figure, Lines):
            _draw_lines(canvas, axes, figure)
        elif figure.kind == "stacked":
            _draw_stacked_bars(canvas, axes, figure)
        else:
            _draw_grouped_bars(canvas, axes, figure)
        canvas.savefig(target, format=form, metadata=metadata)


# --- bars


def _draw_grouped_bars(canvas: Canvas, axes: Axes, figure: Bars) -> None:
    """Draws bars side by side with their values above them, which are written upright if there are many."""
    colors, width = assign_colors([name for name, _ in figure.series]), 0.8 / len(figure.series)
    values = [value for _, series in figure.series for value in series if value is not None]
    longest_value_length = max((len(_format_value(value)) for value in values), default=0)
    has_upright_values = len(figure.groups) * len(figure.series) * longest_value_length > _VALUES_LINE_LENGTH
    for number, (name, series) in enumerate(figure.series):
        bar_offset = (number - (len(figure.series) - 1) / 2) * width
        positions = [group + bar_offset for group, value in enumerate(series) if value is not None]
        heights = [value for value in series if value is not None]
        bars = axes.bar(positions, heights, width * 0.92, color=colors[name])
        if len(values) <= _MAX_LABELED_BARS:
            labels = [_format_value(value) for value in heights]
            axes.bar_label(bars, labels, padding=2, fontsize=8, rotation=90 if has_upright_values else 0)
    axes.margins(
        y=0.04 * longest_value_length if has_upright_values else 0.1
    )  # leaves room above the bars for the values
    # Group names are written on up to three lines, or slanted if they are longer.
    line_width = max(8, _NAMES_LINE_LENGTH // len(figure.groups)) if figure.groups else 0
    group_names = [_shorten_name(group) for group in figure.groups]
    wrapped_names = [textwrap.wrap(name, line_width, break_long_words=False) or [" "] for name in group_names]
    fits = all(len(lines) <= 3 and max(map(len, lines)) <= line_width for lines in wrapped_names)
    rotation: dict[str, Any] = {} if fits else {"rotation": 30, "ha": "right"}
    axes.set_xticks(
        range(len(group_names)), ["\n".join(lines) for lines in wrapped_names] if fits else group_names, **rotation
    )
    axes.yaxis.set_major_formatter("{x:,.10g}")
    axes.set_ylabel(_shorten_name(figure.axis, _MAX_TITLE_LENGTH))
    margin = max(0, _MIN_GROUPS_WITHOUT_MARGIN - len(figure.groups)) / 2  # keeps a single bar from filling the chart
    axes.set_xlim(-0.6 - margin, len(figure.groups) - 0.4 + margin)
    if len(figure.series) > 1:
        _draw_legend(canvas, colors)


def _draw_stacked_bars(canvas: Canvas, axes: Axes, figure: Bars) -> None:
    """Draws a horizontal bar for each group, with the name in each part that has room for it.

    If any name has no room, a legend is drawn.
    """
    canvas.set_figheight(1.15 + 0.5 * len(figure.groups))
    colors = assign_colors([name for name, _ in figure.series])
    totals = [sum(max(0.0, values[i] or 0.0) for _, values in figure.series) for i in range(len(figure.groups))]
    characters_per_unit = _AXIS_WIDTH_INCHES / _CHARACTER_WIDTH_INCHES / max([1e-9, *totals])
    bar_starts, named_parts = [0.0] * len(totals), set()
    for name, values in figure.series:
        lengths = [value or 0.0 for value in values]
        axes.barh(
            range(len(bar_starts)), lengths, 0.62, left=bar_starts, color=colors[name], edgecolor="white", linewidth=0.8
        )
        for row, (start, length) in enumerate(zip(bar_starts, lengths, strict=True)):
            number = f"{length:.0f}" if figure.axis.startswith("%") else _format_value(length)
            name_and_number = f"{_shorten_name(name)} {number}"
            candidates = (name_and_number, number)
            text = next((text for text in candidates if len(text) + 1 <= length * characters_per_unit), "")
            if abs(length) < _MAX_NUMBERED_PART_LENGTH:
                axes.text(start + length / 2, row, text, ha="center", va="center", color=text_color(colors[name]))
            named_parts |= {name} if text == name_and_number else set()
        bar_starts = [start + length for start, length in zip(bar_starts, lengths, strict=True)]
    axes.set_yticks(range(len(figure.groups)), [_wrap_text(group, _MAX_ROW_NAME_LENGTH) for group in figure.groups])
    axes.tick_params(axis="y", length=0)
    axes.invert_yaxis()
    axes.set_xlabel(_shorten_name(figure.axis, _MAX_TITLE_LENGTH))
    axes.margins(x=0.01)
    if len(named_parts) < len(figure.series):
        _draw_legend(canvas, colors)


# --- curves


def _draw_lines(canvas: Canvas, axes: Axes, figure: Lines) -> None:
    """Draws curves over shaded intervals, and a legend of both."""
    heights = [y for _, points in figure.series for _, y in points if y is not None and 0 < y < _MAX_DRAWN_VALUE]
    log_y = figure.log_y and bool(heights) and max(heights) / _MIN_LOGARITHMIC_RATIO > min(heights)
    curves = _select_drawable_points(figure.series, log_x=figure.log_x, log_y=log_y)
    colors = assign_colors([*(name for name, _ in curves), *(name for name, _, _ in figure.spans)])
    with_markers = not figure.steps and max((len(points) for _, points in curves), default=0) <= _MAX_MARKED_POINTS
    for number, (name, points) in enumerate(curves):
        extra_width = 1 - (number + 1) / len(curves)  # the first curves are wider, visible behind the later curves
        x, y = [point[0] for point in points], [point[1] for point in points]
        style = "steps-post" if figure.steps else "default"
        axes.plot(x, y, color=colors[name], linewidth=1.6 + 3.2 * extra_width, drawstyle=style)
        if with_markers:
            axes.plot(x, y, "o", color=colors[name], markersize=4 + 4 * extra_width)
    for name, start, end in figure.spans:
        axes.axvspan(start, end, alpha=0.15, linewidth=0, color=colors[name])
    _set_scales(axes, curves, log_x=figure.log_x, log_y=log_y)
    axes.set_xlabel(_shorten_name(figure.x_axis, _MAX_TITLE_LENGTH))
    axes.set_ylabel(_shorten_name(figure.y_axis, _MAX_TITLE_LENGTH))
    if len(colors) > 1:
        _draw_legend(canvas, colors)


def _select_drawable_points(curves: Curves, *, log_x: bool, log_y: bool) -> list[_Curve]:
    """Returns the curves without points that the axes cannot show; y is NaN where a curve is interrupted."""

    def is_drawable(value: float, *, log: bool) -> bool:
        """Returns whether a value can be drawn on the axis."""
        return (value > 0 or not log) and abs(value) < _MAX_DRAWN_VALUE

    def replace_undrawable_y(y: float | None) -> float:
        """Returns the y value of a point, or NaN if the axis cannot show it."""
        return y if y is not None and is_drawable(y, log=log_y) else math.nan

    return [
        (name, [(x, replace_undrawable_y(y)) for x, y in points if is_drawable(x, log=log_x)])
        for name, points in curves
    ]


def _set_scales(axes: Axes, curves: Sequence[_Curve], *, log_x: bool, log_y: bool) -> None:
    """Sets the scales and ticks of both axes.

    A logarithmic x axis has a tick at each point. A linear x axis has no ticks between integers if all x are integers.
    A linear y axis includes zero.
    """
    from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator

    ticks = sorted({x for _, points in curves for x, _ in points})
    if log_x and ticks:
        axes.set_xscale("log", base=2)
        axes.set_xticks(ticks, _make_tick_labels(ticks))
        axes.minorticks_off()
    elif all(float(tick).is_integer() for tick in ticks):
        axes.locator_params(axis="x", integer=True)
    heights = [y for _, points in curves for _, y in points if not math.isnan(y)]
    if log_y and heights:
        with_minor_labels = max(heights) / min(heights) < _MAX_MINOR_LABELS_RATIO
        plain_number = FuncFormatter(lambda value, _: f"{value:,.10g}")
        axes.set_yscale("log")
        axes.yaxis.set_major_formatter(plain_number)
        axes.yaxis.set_minor_locator(LogLocator(subs=(2, 5)) if with_minor_labels else NullLocator())
        axes.yaxis.set_minor_formatter(plain_number)
        axes.tick_params(which="minor", labelsize=8)
    else:
        axes.set_ylim(bottom=min(0.0, axes.get_ylim()[0]))
    axes.grid(alpha=0.25, linewidth=0.5)


def _make_tick_labels(ticks: Sequence[float]) -> list[str]:
    """Returns a label for each tick of a logarithmic axis, which is empty if it would touch the previous label."""
    labels: list[str] = []
    characters_per_octave = _TICKS_LINE_LENGTH / max(1e-9, math.log2(ticks[-1]) - math.log2(ticks[0]))
    free_from = -math.inf
    for tick in ticks:
        text, center = f"{tick:,.0f}", math.log2(tick) * characters_per_octave
        labels.append(text if center - len(text) / 2 >= free_from else "")
        free_from = center + len(text) / 2 + 0.5 if labels[-1] else free_from
    return labels


# --- text


def _draw_legend(canvas: Canvas, colors: Mapping[str, str]) -> None:
    """Draws a legend of at most five columns below the chart, and increases the height of the figure accordingly."""
    from matplotlib.patches import Patch

    longest_name_length = max((len(_shorten_name(name)) for name in colors), default=0)
    columns = max(1, min(5, int(100 / (longest_name_length + 6))))
    canvas.set_figheight(canvas.get_figheight() + 0.2 * math.ceil(len(colors) / columns))
    # matplotlib leaves labels out that start with an underscore.
    labels = {name: f" {_shorten_name(name)}" if name.startswith("_") else _shorten_name(name) for name in colors}
    patches = [Patch(color=color, label=labels[name]) for name, color in colors.items()]
    canvas.legend(handles=patches, loc="outside lower left", ncols=columns)


def _shorten_name(text: str, limit: int = _MAX_NAME_LENGTH) -> str:
    """Returns a text of at most ``limit`` characters, with an ellipsis in place of characters in the middle."""
    text = visible(text)
    return text if len(text) <= limit else f"{text[: limit // 2]}…{text[-limit // 2 + 1 :]}"


def _wrap_text(text: str, width: int, limit: int = _MAX_NAME_LENGTH) -> str:
    """Returns a text, shortened to ``limit`` characters, in lines of at most ``width`` characters."""
    return "\n".join(textwrap.wrap(_shorten_name(text, limit), width)) or " "


def _format_value(value: float) -> str:
    """Returns a value in three digits: 0.0573, 2, 20.8, 1,235, 4e+12."""
    return rounded(value) if 1e-4 <= abs(value) < 1e9 or not value else f"{value:.0e}"
