"""Steps as bars of characters, in color or in letters."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, NamedTuple

from nsys_analyzer.report.model import StepBars
from nsys_analyzer.report.palette import CLASS_COLORS, GRAY, PART_COLORS, text_color
from nsys_analyzer.report.sections.bars import IDLE, LEAST_SHARE, NANOSECOND_MS
from nsys_analyzer.report.units import format_ms, format_ms_range, rounded_percent

if TYPE_CHECKING:
    from rich.console import Console
    from rich.text import Text

#: The letter of each part in a bar: kernel classes, then parts of other kinds.
LETTERS = {
    "matmul": "M",
    "elementwise": "E",
    "reduction": "R",
    "softmax": "S",
    "copy/layout": "C",
    "optimizer": "O",
    "fused attention": "A",
    "normalization": "N",
    "embedding": "B",
    "convolution": "V",
    "sort/scan": "K",
    "random": "D",
    "memset/memcpy": "F",
    "communication": "G",
    "other": "Z",
    "unknown": "?",
    "compute": "#",
    "exposed copies": "P",
    "exposed communication": "X",
    "waiting": "W",
    "transferring": "T",
}
#: What stands for parts too small to be seen, and for idle time.
_SMALLER, SHADE = "+", "\N{LIGHT SHADE}"
#: Cells that a bar has at least, however long its label.
_LEAST_WIDTH = 10


def cells(values: Sequence[float], width: int) -> list[int]:
    """So many of ``width`` cells for each value, in proportion, the largest remainders rounded up: they add up to it.

    A value of at least ``LEAST_SHARE`` of the sum has a cell, as far as there are cells. All are zero where the sum is.
    """
    total = sum(values)
    if total <= 0 or width <= 0:
        return [0] * len(values)
    exact = [value / total * width for value in values]
    found = [int(one) for one in exact]
    largest_first = sorted(range(len(values)), key=lambda i: -values[i])
    for i in largest_first[:width]:
        found[i] = max(found[i], 1 if values[i] >= LEAST_SHARE * total else 0)
    while sum(found) < width:
        found[max(range(len(found)), key=lambda i: exact[i] - found[i])] += 1
    while sum(found) > width:  # a cell that a small part was given comes from one that has several
        found[max((i for i in range(len(found)) if found[i] > 1), key=lambda i: found[i] - exact[i])] -= 1
    return found


class Stroke(NamedTuple):
    """Cells of a bar that stand for one part; what is no part, such as a label, has no name."""

    part: str
    text: str


def lines(bars: StepBars, width: int, shade: str = SHADE, *, colored: bool = False) -> Iterator[list[Stroke]]:
    """The bars and their legend, each line in strokes, none longer than ``width`` characters."""
    totals = [sum(row.ms) for row in bars.rows]
    labels = [f"{row.label}  " if row.label else "" for row in bars.rows]
    behind = [
        f"  {_joined(format_ms(total))}" if row.label else "" for row, total in zip(bars.rows, totals, strict=True)
    ]
    left, right = max(map(len, labels)), max(map(len, behind))
    if width - left - right < _LEAST_WIDTH:
        left = right = 0
    inner = width - left - right
    for row, total, label, time in zip(bars.rows, totals, labels, behind, strict=True):
        length = max(round(inner * total / max(totals)), 1) if max(totals) else 0
        strokes = [Stroke("", label.ljust(left)[:left])]
        for part, count in zip(bars.parts, cells(row.ms, length), strict=True):
            letter = letter_of(part, shade)
            fill = " " if colored and part != IDLE else letter
            text = f" {part} " if len(part) + 4 <= count else letter
            strokes.append(Stroke(part, text.center(count, fill)[:count]))
        yield [*strokes, Stroke("", " " * (inner - length) + time.rjust(right)[:right] if right else "")]
    line: list[Stroke] = []
    parts = legend(bars, totals)
    keys = ([Stroke(part, letter_of(part, shade)), Stroke("", f" {_joined(said)}")] for part, said in parts)
    for item in [[Stroke("", _joined(bars.title))], *keys]:
        if line and _width(line) + 2 + _width(item) > width:
            yield line
            line = []
        line += [*([Stroke("", "  ")] if line else []), *item]
    yield line
    if bars.note:
        yield [Stroke("", bars.note)]


def _width(line: list[Stroke]) -> int:
    return sum(len(stroke.text) for stroke in line)


def letter_of(part: str, shade: str = SHADE) -> str:
    """What a part is drawn with where there is no color."""
    return shade if part == IDLE else LETTERS.get(part, _SMALLER)


def color_of(part: str) -> str:
    """The color of a part, as figures have it."""
    return GRAY if part == IDLE else PART_COLORS.get(part) or CLASS_COLORS.get(part, GRAY)


def legend(bars: StepBars, totals: Sequence[float]) -> Iterator[tuple[str, str]]:
    """Yields each part that takes time, with its name, ms and share in words; of several bars, the range of its ms."""
    for i, part in enumerate(bars.parts):
        times = [row.ms[i] for row in bars.rows]
        if len(times) > 1 and max(times) >= NANOSECOND_MS:
            yield part, f"{part} {format_ms_range(min(times), max(times))}"
        elif times[0] >= NANOSECOND_MS:
            yield part, f"{part} {format_ms(times[0])} {rounded_percent(times[0] / totals[0])}"


def _joined(text: str) -> str:
    """Without the no-break spaces that a row of characters has no use for."""
    return text.replace("\N{NO-BREAK SPACE}", " ")


def draw(bars: StepBars, screen: Console) -> Iterator[Text]:
    """The lines on a terminal."""
    from rich.text import Text

    colored = screen.color_system is not None and not screen.no_color
    shade = SHADE if screen.encoding.lower().startswith("utf") else "."
    for line in lines(bars, screen.width, shade, colored=colored):
        yield Text.assemble(*((one.text, _style(one.part) if colored else "") for one in line), no_wrap=True)


def _style(part: str) -> str:
    if not part or part == IDLE:
        return GRAY if part else ""
    ink = {"black": "#000000", "white": "#ffffff"}[text_color(color_of(part))]  # names are colors of a terminal's theme
    return f"{ink} on {color_of(part)}"
