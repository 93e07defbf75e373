"""Draws a timeline: lanes of ranges, of calls that block, of GPU streams and of idle time, below each other.

A lane of the GPU holds thousands of kernels, most of them narrower than a pixel. It is drawn in columns of two pixels:
in each, the height of a color is its share of the column's time. So density is seen, and no color fades.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

import numpy as np
from numpy.typing import NDArray

from nsys_analyzer.report.figures.palette import CAUSE_WORDS, CAUSES, CLASSES, text_color
from nsys_analyzer.report.figures.words import TITLE, fitted, wrapped
from nsys_analyzer.report.model import Strip, Timeline

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure as Canvas

Floats: TypeAlias = "NDArray[np.float64]"
Block: TypeAlias = "tuple[str, float, float]"

#: Lengths are inches: the padding, a line of the title and of other text, the space below a lane, and the lanes.
_PAD, _TITLE_LINE, _LINE, _BELOW = 0.07, 0.19, 0.14, 0.07
_HEIGHTS = {"ranges": 0.22, "calls": 0.22, "stream": 0.5, "idle": 0.36}
#: More space between the CPU's lanes and the GPU's; the axis with its numbers and its title.
_BETWEEN, _AXIS = 0.1, 0.48
#: The legend: a row, a patch, and the space behind a name.
_ROW, _PATCH, _BEHIND = 0.19, 0.12, 0.15
_FONT, _LETTERS_OF_LABEL, _NARROWEST_LABEL = 8.5, 22, 1.0
#: Beside a name in its box; a box that is narrower than the other has no room for any.
_BESIDE, _NARROW, _FEWEST_LETTERS = 0.04, 0.2, 5
#: The pixels of a column of a GPU's lane, and the steps of its height.
_COLUMN, _LEVELS = 2, 64
_MOST_COLORS = 10
#: Names are written beside boxes that are too narrow for them, so many at most, in one of the widest stretches.
_MOST_BESIDE, _MOST_TRIED = 3, 8
_TRACK, _INK, _FAINT, _EDGE = "#f0f0f3", "#222233", "#555566", "#5a6a88"
#: The fill of boxes, and those of boxes whose names stand in the legend alone.
_BOX, _FILLS = "#d5dff0", ("#8fa6cf", "#44557a", "#d8b45a")
#: Of more boxes nothing but edges would be seen.
_DENSE = 300
#: Boxes of the first lane whose edges go down through the others.
_MOST_PHASES = 8
#: The rows of the legend.
_RANGES, _STREAMS, _IDLE = "CPU ranges", "kernel class", "idle, by cause"


@dataclass(frozen=True)
class _Scale:
    """The axis of time: its ends in ms, and its width in inches."""

    low: float
    high: float
    width: float

    def inches(self, ms: float) -> float:
        """How wide a time is."""
        return ms / (self.high - self.low) * self.width


class _Ruler:
    """Measures texts as they will be drawn."""

    def __init__(self, canvas: Canvas) -> None:
        self._text, self._dpi = canvas.text(0, 0, "", fontsize=_FONT), canvas.dpi

    def width(self, text: str) -> float:
        """The width of a text of one or more lines, inches."""
        self._text.set_text(text)
        return float(self._text.get_window_extent().width) / self._dpi if text else 0.0

    def remove(self) -> None:
        """Takes the text that was measured off the canvas."""
        self._text.remove()


def draw_timeline(canvas: Canvas, figure: Timeline) -> None:
    """Draws a timeline onto an empty canvas, which becomes as high as its lanes and its legend need."""
    ruler = _Ruler(canvas)
    labels = [wrapped(lane.title, _LETTERS_OF_LABEL) if lane.title else "" for lane in figure.lanes]
    left = 2 * _PAD + max([_NARROWEST_LABEL, *map(ruler.width, labels)])
    scale = _scale(figure, canvas.get_figwidth() - left - 3 * _PAD)
    texts = [_texts(lane, scale, ruler) for lane in figure.lanes]
    for number, (_, unnamed) in enumerate(texts):
        if len({name for name, _, _ in figure.lanes[number].blocks}) == 1 == len(unnamed):  # its name titles the lane
            labels[number] = f"{labels[number]}\n{_fit(unnamed.pop(), left - 2 * _PAD, ruler)}".strip("\n")
    legend = _legend(figure, [unnamed for _, unnamed in texts])
    rows = [row for title, colors in legend.items() for row in _rows(title, colors, scale.width, ruler)]
    ruler.remove()
    tops, depth = _places(figure, labels)
    axes, bottom = _axes(canvas, left, scale.width, depth, len(rows))
    for lane, label, top, (written, _) in zip(figure.lanes, labels, tops, texts, strict=True):
        place = top, _HEIGHTS[lane.kind]
        if lane.kind in _COLORS:
            columns = int(scale.width * canvas.dpi / _COLUMN)
            _draw_shares(axes, lane, legend[_COLORS[lane.kind]], place, scale, columns)
        else:
            _draw_boxes(axes, lane, legend[_RANGES], place, scale, written)
        middle, beside = top + place[1] / 2, axes.get_yaxis_transform()
        axes.text(-_PAD / scale.width, middle, label, transform=beside, ha="right", va="center", fontsize=_FONT)
    if not figure.cpu_ahead:
        _draw_phases(axes, figure, scale, depth)
    shares = any(lane.kind in _COLORS for lane in figure.lanes)
    axes.set_xlabel(fitted(figure.x_axis, TITLE) + (_HEIGHT if shares else ""))
    axes.set(xlim=(scale.low, scale.high), ylim=(depth, 0), yticks=())
    axes.spines["left"].set_visible(False)
    axes.xaxis.set_major_formatter("{x:,.10g}")
    _draw_legend(canvas, rows, left, bottom)


_HEIGHT = "  (GPU: the height of a color is its share of the time)"
#: What stands for classes and causes that have no color.
_REST = {"stream": "other", "idle": "unknown"}
_COLORS = {"stream": _STREAMS, "idle": _IDLE}


def short(name: str) -> str:
    """The last part of a name with dots or colons, and any name without what stands in brackets behind it.

    ``torch.nn.functional.pad`` is ``pad``, ``autograd::engine::evaluate_function: MulBackward0`` is ``MulBackward0``.
    """
    last = name.partition(" (")[0].rpartition("::")[2].rpartition(": ")[2]
    return fitted((last if " " in last else last.rpartition(".")[2]) or name)


def _scale(figure: Timeline, width: float) -> _Scale:
    moments = [0.0, *(moment for lane in figure.lanes for _, *both in lane.blocks for moment in both)]
    low, high = min(moments), max(moments)
    return _Scale(low, high if high > low else low + 1, width)


def _places(figure: Timeline, labels: Sequence[str]) -> tuple[list[float], float]:
    """The top of each lane, and the depth of all of them, inches."""
    tops: list[float] = []
    depth, before = 0.0, None
    for lane, label in zip(figure.lanes, labels, strict=True):
        on_gpu = lane.kind in _COLORS
        depth += _BETWEEN if before not in (None, on_gpu) else 0
        spare = max(0.0, _LINE * (label.count("\n") + 1) - _HEIGHTS[lane.kind]) / 2  # a label higher than its lane
        tops.append(depth + spare)
        depth += _HEIGHTS[lane.kind] + 2 * spare + _BELOW
        before = on_gpu
    return tops, max(depth, _LINE)


def _axes(canvas: Canvas, left: float, width: float, depth: float, rows: int) -> tuple[Axes, float]:
    """Axes of a size in inches between the title and the legend, and the top of the legend from below."""
    canvas.set_layout_engine("none")
    title = canvas.get_suptitle()
    head, legend = 2 * _PAD + _TITLE_LINE * (title.count("\n") + 1), _PAD + _ROW * rows
    height, wide = head + depth + _AXIS + legend, canvas.get_figwidth()
    canvas.set_figheight(height)
    canvas.suptitle(title, x=0.01, y=1 - _PAD / height, ha="left", va="top")
    return canvas.add_axes((left / wide, (legend + _AXIS) / height, width / wide, depth / height)), legend


#: A text in a lane: where it stands in ms, the text, and its alignment.
_Text: TypeAlias = "tuple[float, str, str]"


def _texts(lane: Strip, scale: _Scale, ruler: _Ruler) -> tuple[list[_Text], list[str]]:
    """The texts inside boxes and beside them, and the names that have room nowhere in the lane."""
    if lane.kind in _COLORS:
        return [], []
    texts: list[_Text] = []
    sums: dict[str, float] = {}
    for name, start, end in lane.blocks:
        room = scale.inches(end - start) - 2 * _BESIDE
        sums[name] = sums.get(name, 0.0) + end - start
        if room >= _NARROW and (text := _fit(name, room, ruler)):
            texts.append(((start + end) / 2, text, "center"))
            sums[name] = -math.inf  # named for good
    unnamed = sorted((name for name, ms in sums.items() if ms >= 0), key=lambda name: -sums[name])
    beside, named = _beside(lane, unnamed, scale, ruler) or (None, set())
    return [*texts, *([beside] if beside else [])], [name for name in unnamed if name not in named]


def _fit(name: str, room: float, ruler: _Ruler) -> str:
    """The name, its last part, or what that begins with, as far as there is room; else nothing."""
    last = short(name)
    letters = int(len(last) * room / max(ruler.width(last), 1e-9)) + 1
    starts = (f"{last[:count]}…" for count in range(letters, _FEWEST_LETTERS - 1, -1))
    return next((text for text in (fitted(name), last, *starts) if ruler.width(text) <= room), "")


def _beside(lane: Strip, unnamed: Sequence[str], scale: _Scale, ruler: _Ruler) -> tuple[_Text, set[str]] | None:
    """The names of boxes that are too narrow, in the widest stretch beside one of them, and which names these are."""
    for start, end, left, right in sorted(_free(lane, scale), key=lambda free: free[0] - free[1])[:_MOST_TRIED]:
        if left not in unnamed and right not in unnamed:
            continue
        behind = left in unnamed
        there = {name for name, low, high in lane.blocks if (high <= start if behind else low >= end)}
        names = [name for name in unnamed if name in there]
        for count in range(min(_MOST_BESIDE, len(names)), 0, -1):
            more = f" and {len(names) - count} more" if len(names) > count else ""
            text = ", ".join(map(short, names[:count])) + more
            text = f"◂ {text}" if behind else f"{text} ▸"
            if ruler.width(text) <= scale.inches(end - start) - 2 * _BESIDE:
                return ((start, text, "left") if behind else (end, text, "right")), set(names)
    return None


def _free(lane: Strip, scale: _Scale) -> Iterator[tuple[float, float, str | None, str | None]]:
    """The stretches without a box: start, end, and the names of the boxes on both sides."""
    reached, before = scale.low, None
    for name, start, end in sorted(lane.blocks, key=lambda block: block[1:]):
        if start > reached:
            yield reached, start, before, name
        if end >= reached:
            reached, before = end, name
    yield reached, scale.high, before, None


def _draw_boxes(
    axes: Axes, lane: Strip, fills: Mapping[str, str], place: tuple[float, float], scale: _Scale, texts: list[_Text]
) -> None:
    dense = len(lane.blocks) > _DENSE
    colors = [fills.get(name, _FILLS[0] if dense else _BOX) for name, _, _ in lane.blocks]
    spans = [(start, end - start) for _, start, end in lane.blocks]
    axes.broken_barh(spans, place, facecolors=colors, edgecolors=_EDGE, linewidth=0 if dense else 0.5)
    aside = _BESIDE / scale.inches(1)
    for x, text, side in texts:
        x += {"left": aside, "right": -aside}.get(side, 0)
        middle = place[0] + place[1] / 2
        color = _FAINT if side != "center" else text_color(_BOX)
        box = {"facecolor": "white", "edgecolor": "none", "pad": 0.5} if side != "center" else None
        axes.text(x, middle, text, ha=side, va="center", fontsize=_FONT, color=color, clip_on=True, bbox=box, zorder=4)


def _draw_shares(
    axes: Axes, lane: Strip, colors: Mapping[str, str], place: tuple[float, float], scale: _Scale, columns: int
) -> None:
    """Draws a lane in columns: the height of each color is its share of the column's time, the first one lowest."""
    from matplotlib.colors import to_rgb

    top, height = place
    edges = np.linspace(scale.low, scale.high, columns + 1)
    number = {name: i for i, name in enumerate(colors)}
    spans = np.array([block[1:] for block in lane.blocks], np.float64).reshape(-1, 2)
    code = np.array([number.get(name, number.get(_REST[lane.kind], 0)) for name, _, _ in lane.blocks], np.int64)
    shares = np.array([_covered(spans[code == one], edges) for one in range(len(colors))]).reshape(-1, columns)
    level = np.cumsum(shares, axis=0) * columns / (scale.high - scale.low)
    rows = (np.arange(_LEVELS)[::-1] + 0.5) / _LEVELS
    picked = np.sum(level[:, None, :] < rows[None, :, None], axis=0)  # the first color that reaches so high
    palette = np.array([to_rgb(color) for color in (*colors.values(), _TRACK)])
    extent = (scale.low, scale.high, top + height, top)
    axes.imshow(palette[picked], extent=extent, aspect="auto", interpolation="nearest", zorder=2)


def _covered(spans: Floats, edges: Floats) -> Floats:
    """How much of each stretch between two edges lies in some spans."""

    def before(moments: Floats) -> Floats:
        """The sum of max(0, edge − moment) over the moments, for each edge."""
        moments = np.sort(moments)
        count = np.searchsorted(moments, edges)
        sums: Floats = count * edges - np.append(0, np.cumsum(moments))[count]
        return sums

    covered: Floats = np.diff(before(spans[:, 0]) - before(spans[:, 1]))
    return covered


def _draw_phases(axes: Axes, figure: Timeline, scale: _Scale, depth: float) -> None:
    """Draws the edges of the first lane's boxes down through the other lanes, where these boxes are few."""
    first = figure.lanes[0].blocks if figure.lanes and figure.lanes[0].kind == "ranges" else ()
    wide = [block for block in first if scale.inches(block[2] - block[1]) >= _NARROW]
    moments = sorted(moment for _, *both in wide for moment in both) if len(wide) <= _MOST_PHASES else []
    drawn = -math.inf
    for moment in moments:
        if scale.inches(moment - drawn) >= _BESIDE:  # the end of one and the start of the next are one line
            axes.vlines(moment, 0, depth, color=_INK, linewidth=0.6, linestyle=(0, (2, 3)), zorder=3)
            drawn = moment


def _legend(figure: Timeline, unnamed: Sequence[Sequence[str]]) -> dict[str, dict[str, str]]:
    """The colors of each part of the legend by name; of ranges those of the lanes that lack the fewest names."""
    names: dict[str, None] = {}
    for lacking in sorted(unnamed, key=len):
        both = names | dict.fromkeys(lacking)
        names = both if len(both) <= len(_FILLS) else names
    return {
        _RANGES: dict(zip(names, _FILLS, strict=False)),
        _STREAMS: _largest(figure, "stream", CLASSES),
        _IDLE: _largest(figure, "idle", CAUSES),
    }


def _largest(figure: Timeline, kind: str, colors: Mapping[str, str]) -> dict[str, str]:
    """The colors of the names that occur in lanes of a kind, the largest first; what is small or not known is last."""
    rest = _REST[kind]
    sums: dict[str, float] = {}
    for lane in figure.lanes:
        for name, start, end in lane.blocks if lane.kind == kind else ():
            name = name if name in colors else rest
            sums[name] = sums.get(name, 0.0) + end - start
    largest = sorted((name for name in sums if name != rest), key=lambda name: -sums[name])
    most = _MOST_COLORS - 1 if rest in sums else _MOST_COLORS
    if len(largest) > most:
        largest, sums[rest] = largest[: _MOST_COLORS - 1], 0.0
    return {name: colors[name] for name in largest} | ({rest: colors[rest]} if rest in sums else {})


#: A row of the legend: its title, and where each name begins, in inches, with its color.
_Row: TypeAlias = "tuple[str, list[tuple[float, str, str]]]"


def _rows(title: str, colors: Mapping[str, str], width: float, ruler: _Ruler) -> list[_Row]:
    """One part of the legend, over as many rows as its names need; only the first has the title."""
    rows: list[_Row] = []
    reached = width
    for name, color in colors.items():
        text = _fit(CAUSE_WORDS.get(name, name) if title == _IDLE else short(name), width - _PATCH - _BESIDE, ruler)
        needed = _PATCH + _BESIDE + ruler.width(text)
        if reached + needed > width:
            rows.append(("" if rows else title, []))
            reached = 0.0
        rows[-1][1].append((reached, text, color))
        reached += needed + _BEHIND
    return rows


def _draw_legend(canvas: Canvas, rows: Sequence[_Row], left: float, top: float) -> None:
    """Writes the legend below the axes: titles below the labels of lanes, patches and names below the lanes."""
    from matplotlib.patches import Rectangle

    wide, high = canvas.get_size_inches()
    for number, (title, names) in enumerate(rows):
        y = (top - (number + 0.5) * _ROW) / high
        canvas.text((left - _PAD) / wide, y, title, ha="right", va="center", fontsize=_FONT, color=_FAINT)
        for x, name, color in names:
            corner = (left + x) / wide, y - _PATCH / 2 / high
            canvas.add_artist(Rectangle(corner, _PATCH / wide, _PATCH / high, color=color, linewidth=0))
            canvas.text((left + x + _PATCH + _BESIDE) / wide, y, name, va="center", fontsize=_FONT)
