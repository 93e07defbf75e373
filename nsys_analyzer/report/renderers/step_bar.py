"""Draws steps as bars of characters: in color on a terminal, in letters elsewhere."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, NamedTuple

from nsys_analyzer.analysis.kernels.class_rules import CLASSES
from nsys_analyzer.report.model import StepBars
from nsys_analyzer.report.palette import CLASS_COLORS, GRAY, PART_COLORS, text_color
from nsys_analyzer.report.sections.bars import (
    ATTAINABLE,
    EXCESS,
    IDLE,
    LAUNCHING,
    MIN_PART_MS,
    MIN_PART_SHARE,
    REDUNDANT,
    UNEXPLAINED,
    UNFUSED,
)
from nsys_analyzer.report.units import format_ms, format_ms_range, rounded_percent
from nsys_analyzer.text import NO_BREAK_SPACE

if TYPE_CHECKING:
    from rich.console import Console
    from rich.text import Text

#: The letter of each part of a bar, for kernel classes that have a letter and for other parts.
PART_LETTERS = {name: row.letter for name, row in CLASSES.items() if row.letter} | {
    "compute": "#",
    "exposed copies": "P",
    "exposed communication": "X",
    "waiting": "W",
    "transferring": "T",
    ATTAINABLE: "=",
    EXCESS: "x",
    UNFUSED: "f",
    REDUNDANT: "r",
    LAUNCHING: "w",
    UNEXPLAINED: "u",
}
#: The character of a part without a letter, and of idle time.
_OTHER_LETTER, SHADE = "+", "\N{LIGHT SHADE}"
#: Labels are left out if they would leave fewer cells than this to the bars.
_MIN_BAR_WIDTH = 10


def distribute_cells(values: Sequence[float], width: int) -> list[int]:
    """Distributes ``width`` cells in proportion to the values, by the largest remainder method.

    Every value of at least ``MIN_PART_SHARE`` of the sum gets a cell, the largest values first. If the sum is zero,
    every value gets 0 cells.
    """
    total = sum(values)
    if total <= 0 or width <= 0:
        return [0] * len(values)
    exact_lengths = [value / total * width for value in values]
    cells = list(map(int, exact_lengths))
    largest_first = sorted(range(len(values)), key=lambda i: -values[i])
    for i in largest_first[:width]:
        cells[i] = max(cells[i], 1 if values[i] >= MIN_PART_SHARE * total else 0)
    while sum(cells) < width:
        cells[max(range(len(cells)), key=lambda i: exact_lengths[i] - cells[i])] += 1
    while sum(cells) > width:  # the extra cells of small values are taken from values with several cells
        cells[max((i for i in range(len(cells)) if cells[i] > 1), key=lambda i: cells[i] - exact_lengths[i])] -= 1
    return cells


class Stroke(NamedTuple):
    """Adjacent characters of a line that belong to one part. ``part`` is empty for other text, such as a label."""

    part: str
    text: str


def bar_lines(bars: StepBars, width: int, shade: str = SHADE, *, colored: bool = False) -> Iterator[list[Stroke]]:
    """Yields the lines of the bars, their legend and note; bars and legend fit into ``width`` characters.

    Args:
        bars: the bars.
        width: the number of characters in a line.
        shade: the character of idle time.
        colored: whether each part is drawn as spaces, to be colored by the caller.
    """
    totals = [sum(row.ms) for row in bars.rows]
    labels = [f"{row.label}  " if row.label else "" for row in bars.rows]
    time_texts = [
        f"  {_replace_no_break_spaces(format_ms(total))}" if row.label else ""
        for row, total in zip(bars.rows, totals, strict=True)
    ]
    label_width, time_width = max(map(len, labels)), max(map(len, time_texts))
    if width - label_width - time_width < _MIN_BAR_WIDTH:
        label_width = time_width = 0
    bar_width = width - label_width - time_width
    for row, total, label, time in zip(bars.rows, totals, labels, time_texts, strict=True):
        length = max(round(bar_width * total / max(totals)), 1) if max(totals) else 0
        strokes = [Stroke("", label.ljust(label_width)[:label_width])]
        for part, count in zip(bars.parts, distribute_cells(row.ms, length), strict=True):
            letter = part_letter(part, shade)
            fill = " " if colored and part != IDLE else letter
            text = f" {part} " if len(part) + 4 <= count else letter
            strokes.append(Stroke(part, text.center(count, fill)[:count]))
        yield [
            *strokes,
            Stroke("", " " * (bar_width - length) + time.rjust(time_width)[:time_width] if time_width else ""),
        ]
    line: list[Stroke] = []
    legend_strokes = [
        [Stroke(part, part_letter(part, shade)), Stroke("", f" {_replace_no_break_spaces(text)}")]
        for part, text in legend_entries(bars, totals)
    ]
    for entry in [[Stroke("", _replace_no_break_spaces(bars.title))], *legend_strokes]:
        if line and _measure_line(line) + 2 + _measure_line(entry) > width:
            yield line
            line = []
        line += [*([Stroke("", "  ")] if line else []), *entry]
    yield line
    if bars.note:
        yield [Stroke("", bars.note)]


def _measure_line(line: list[Stroke]) -> int:
    return sum(len(stroke.text) for stroke in line)


def _replace_no_break_spaces(text: str) -> str:
    return text.replace(NO_BREAK_SPACE, " ")


def part_letter(part: str, shade: str = SHADE) -> str:
    """Returns the character that a part is drawn with if there is no color."""
    return shade if part == IDLE else PART_LETTERS.get(part, _OTHER_LETTER)


def part_color(part: str) -> str:
    """Returns the color of a part, which is its color in figures, too."""
    return GRAY if part == IDLE else PART_COLORS.get(part) or CLASS_COLORS.get(part, GRAY)


def legend_entries(bars: StepBars, totals: Sequence[float]) -> Iterator[tuple[str, str]]:
    """Yields each part that takes time, and its legend text: name, ms and share, or the range of ms of several bars."""
    for i, part in enumerate(bars.parts):
        times = [row.ms[i] for row in bars.rows]
        if len(times) > 1 and max(times) >= MIN_PART_MS:
            yield part, f"{part} {format_ms_range(min(times), max(times))}"
        elif times[0] >= MIN_PART_MS:
            yield part, f"{part} {format_ms(times[0])} {rounded_percent(times[0] / totals[0])}"


def draw_bars(bars: StepBars, screen: Console) -> Iterator[Text]:
    """Yields the lines of the bars for a terminal."""
    from rich.text import Text

    colored = screen.color_system is not None and not screen.no_color
    shade = SHADE if screen.encoding.lower().startswith("utf") else "."
    # As numbers, because the theme of a terminal redefines named colors.
    inks = {"black": "#000000", "white": "#ffffff"}
    styles = {part: f"{inks[text_color(part_color(part))]} on {part_color(part)}" for part in bars.parts}
    styles |= {IDLE: GRAY}
    for line in bar_lines(bars, screen.width, shade, colored=colored):
        yield Text.assemble(
            *((stroke.text, styles.get(stroke.part, "") if colored else "") for stroke in line), no_wrap=True
        )
