"""Draws a roofline: the rate of work over its arithmetic intensity, under the roofs of memory and of arithmetic."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from nsys_analyzer.report.figures.bars import log_y
from nsys_analyzer.report.figures.palette import colors_of
from nsys_analyzer.report.figures.words import TITLE, fitted, in_legend
from nsys_analyzer.report.model import Roofline, WorkPoint

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure as Canvas

_ROOF = "#444455"
#: By phase; work of any other phase is a diamond.
_MARKERS = {"forward": "o", "backward": "s"}
#: Free room around roofs and points, as a factor, and the least that the axes span.
_ROOM, _SPAN = 2.0, 100.0
#: By how much the name of a slope lies above it.
_ABOVE = 1.06
#: Names of the legend that stand side by side, and letters of them.
_ACROSS, _LETTERS = 3, 31
_TERA = 1e12
#: No axis has room for such a number, and nothing measured is as large or as small.
_LARGEST, _SMALLEST = 1e24, 1e-12


def draw_roofline(canvas: Canvas, figure: Roofline) -> None:
    """Draws roofs with their names on them, and points whose names stand in the legend."""
    axes = canvas.add_subplot()
    points = [one for one in figure.points if _has_place(one.flops_per_byte) and _has_place(one.flops_per_s)]
    roofs = [(name, peak) for name, peak in figure.roofs if _has_place(peak)]
    bandwidth = figure.bytes_per_s if _has_place(figure.bytes_per_s) else 0.0
    ridges = [peak / bandwidth for _, peak in roofs] if bandwidth else []
    left, right = _limits([*(one.flops_per_byte for one in points), *ridges])
    rates = [*(one.flops_per_s for one in points), *(peak for _, peak in roofs)]
    bottom, top = _limits(rates)
    bottom, top = bottom * max(rates, default=1.0) * _ROOM / top, max(rates, default=1.0) * _ROOM
    axes.set_xscale("log")
    axes.set_xlim(left, right)
    log_y(axes, [bottom / _TERA, top / _TERA])
    axes.set_ylim(bottom / _TERA, top / _TERA)
    axes.xaxis.set_major_formatter("{x:,.10g}")
    _draw_roofs(axes, roofs, bandwidth)
    colors = colors_of([one.kernel_class for one in points])
    for point in points:
        _draw_point(axes, point, colors[point.kernel_class])
    axes.set_xlabel(fitted(figure.x_axis, TITLE))
    axes.set_ylabel(fitted(f"T{figure.y_axis}", TITLE))
    axes.grid(alpha=0.25, linewidth=0.5)
    if points:
        across = _ACROSS if max(len(_label(one)) for one in points) <= _LETTERS else _ACROSS - 1
        canvas.set_figheight(canvas.get_figheight() + 0.2 * math.ceil(len(points) / across))
        canvas.legend(loc="outside lower left", ncols=across)


def _draw_roofs(axes: Axes, roofs: Sequence[tuple[str, float]], bandwidth: float) -> None:
    """The slope of the memory up to the highest flat roof, and each flat roof from the slope on."""
    left, right = axes.get_xlim()
    bottom, top = axes.get_ylim()
    line: dict[str, Any] = {"color": _ROOF, "linewidth": 1.4, "zorder": 1}
    for name, peak in roofs:
        ridge = peak / bandwidth if bandwidth else left
        axes.plot([max(left, ridge), right], [peak / _TERA] * 2, **line)
        text = f"{fitted(name)} {_rate(peak)}FLOP/s"
        axes.annotate(text, (right, peak / _TERA), (-2, 3), textcoords="offset points", ha="right", va="bottom")
    if not bandwidth:
        return
    end = max((peak for _, peak in roofs), default=right * bandwidth) / bandwidth
    axes.plot([left, end], [left * bandwidth / _TERA, end * bandwidth / _TERA], **line)
    # Named along the slope, in the middle of what is seen of it.
    first = max(left, bottom * _TERA / bandwidth)
    last = min(end, right, top * _TERA / bandwidth)
    if last > first:
        at = math.sqrt(first * last)
        slope = math.degrees(math.atan2(bandwidth / _TERA, 1.0))
        axes.text(
            at, at * bandwidth / _TERA * _ABOVE, f"memory {_rate(bandwidth)}B/s", rotation=slope,
            rotation_mode="anchor", transform_rotates_text=True, ha="center", va="bottom",
        )  # fmt: skip


def _draw_point(axes: Axes, point: WorkPoint, color: str) -> None:
    """A filled mark for forward; a hollow one around it for backward, which mostly lies on the same spot."""
    hollow = point.phase == "backward"
    axes.plot(
        [point.flops_per_byte], [point.flops_per_s / _TERA], _MARKERS.get(point.phase, "D"), color=color,
        markersize=11 if hollow else 7, markeredgewidth=1.8 if hollow else 1.0, fillstyle="none" if hollow else "full",
        linestyle="none", label=_label(point), zorder=3,
    )  # fmt: skip


def _label(point: WorkPoint) -> str:
    return in_legend(f"{point.kernel_class}, {point.phase}: {_rate(point.flops_per_s)}FLOP/s")


def _has_place(value: float) -> bool:
    return _SMALLEST < value < _LARGEST


def _limits(values: Sequence[float]) -> tuple[float, float]:
    """The ends of a logarithmic axis with room around its values."""
    low, high = min(values, default=1.0) / _ROOM, max(values, default=1.0) * _ROOM
    wider = max(1.0, math.sqrt(_SPAN / (high / low)))
    return low / wider, high * wider


def _rate(value: float) -> str:
    """Three digits with the prefix of a unit: 4.8 T."""
    scale, prefix = next(((s, p) for s, p in ((1e12, "T"), (1e9, "G"), (1e6, "M")) if value >= s), (1.0, ""))
    return f"{value / scale:,.3g} {prefix}"
