"""Steps as bars of characters: what computes, class by class, what only copies or communicates, and idle time.

With color each part has its own, as in figures; without, it is a row of its letter.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from nsys_analyzer.report.figures.palette import CLASSES, GRAY, PARTS, text_color
from nsys_analyzer.report.units import about_percent, format_number, milliseconds, milliseconds_between

if TYPE_CHECKING:
    from rich.console import Console
    from rich.text import Text

    from nsys_analyzer.analysis.ranks.run import ParallelRun, RankFigures
    from nsys_analyzer.analysis.steps.step import StepSummary

IDLE = "idle"
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
#: What stands for parts too small to be seen, and for idle time where it can be shown and where it cannot.
_SMALLER, _SHADE, _DOT = "+", "\N{LIGHT SHADE}", "."
#: Parts of a smaller share of every bar are one.
LEAST_SHARE = 0.01
#: Bars of ranks that are shown; of more those with the least and the most own time.
MOST_RANKS = 12
#: What stands before the legend of several bars, whose times stand behind them.
_SEVERAL = "Profiled steps:"
#: Cells that a bar has at least, however long its label.
_LEAST_WIDTH = 10


class Row(NamedTuple):
    """A bar: its label, empty where it is the only one, and the ms of each part."""

    label: str
    ms: tuple[float, ...]


@dataclass(frozen=True)
class StepBars:
    """Bars on one scale, of the same parts; ``title`` says what they are of, ``note`` what they leave out."""

    parts: tuple[str, ...]
    rows: tuple[Row, ...]
    title: str
    note: str = ""


def bars_of_step(step: StepSummary) -> StepBars | None:
    """A bar of each device of a step under the profiler; None where nothing runs on the GPU."""
    times: list[dict[str, float]] = []
    for device in step.devices:
        others = {"exposed copies": device.exposed_copy_ms, "exposed communication": device.exposed_communication_ms}
        times.append({**{one.kernel_class: one.ms for one in device.classes}, **others, IDLE: device.idle_ms})
    classes = {one.kernel_class for device in step.devices for one in device.classes}
    longest_first = sorted(classes, key=lambda name: (-sum(row.get(name, 0.0) for row in times), name))
    names = (*longest_first, "exposed copies", "exposed communication", IDLE)
    several = len(step.devices) > 1
    rows = tuple(
        Row(f"GPU {device.device}" if several else "", tuple(row.get(name, 0.0) for name in names))
        for device, row in zip(step.devices, times, strict=True)
    )
    if not any(any(row.ms[:-1]) for row in rows):
        return None
    of = "The whole capture" if step.is_pass else "A step"
    title = _SEVERAL if several else f"{of}, {format_number(step.length_ms, 'ms')} ms, profiled:"
    return _without_small(StepBars(names, rows, title))


def bars_of_run(run: ParallelRun) -> StepBars | None:
    """A bar of each rank of a run; None of a single one, which its capture's bar shows by kernel class."""
    if len(run.ranks) < 2:
        return None
    shown = _shown_ranks(run)
    names = ("compute", "exposed copies", "waiting", "transferring", "exposed communication", IDLE)
    rows = tuple(Row(one.label, _parts_of(one)) for one in shown)
    left = len(run.ranks) - len(shown)
    between = " between these in own time" if run.slowest is not None else ""
    note = f"{left} more{between}: see the report." if left else ""
    return _without_small(StepBars(names, rows, _SEVERAL, note))


def _shown_ranks(run: ParallelRun) -> Sequence[RankFigures]:
    """The ranks, of many those with the least and the most own time, in their order."""
    if len(run.ranks) <= MOST_RANKS:
        return run.ranks
    if run.slowest is None:
        return run.ranks[:MOST_RANKS]
    fastest_first = sorted(
        range(len(run.ranks)),
        key=lambda i: (own.median or 0.0) if (own := run.ranks[i].own_ms) else 0.0,
    )
    half = MOST_RANKS // 2
    return [run.ranks[i] for i in sorted((*fastest_first[:half], *fastest_first[-half:]))]


def _parts_of(rank: RankFigures) -> tuple[float, ...]:
    """The parts of a rank's step; what is exposed is one part where waiting is not known."""
    waits, transfers, both = rank.exposed_waiting_ms, rank.exposed_transfer_ms, rank.exposed_communication_ms
    known = waits is not None and transfers is not None
    exposed = (waits or 0.0, transfers or 0.0, 0.0) if known else (0.0, 0.0, both)
    return (rank.compute_ms, rank.exposed_copy_ms, *exposed, rank.idle_ms)


def _without_small(bars: StepBars) -> StepBars:
    """The bars without parts that none of them has, and with several small parts as one, before idle time."""
    totals = [sum(row.ms) for row in bars.rows]
    held = [i for i in range(len(bars.parts)) if any(row.ms[i] > 0 for row in bars.rows) or bars.parts[i] == IDLE]
    small = [
        i
        for i in held
        if bars.parts[i] != IDLE
        and all(row.ms[i] < LEAST_SHARE * total for row, total in zip(bars.rows, totals, strict=True))
    ]
    kept = [i for i in held[:-1] if i not in small or len(small) == 1]
    smaller = (f"{len(small)} smaller parts",) if len(small) > 1 else ()

    def ms(row: Row) -> tuple[float, ...]:
        return (*(row.ms[i] for i in kept), *(sum(row.ms[i] for i in small) for _ in smaller), row.ms[held[-1]])

    names = (*(bars.parts[i] for i in kept), *smaller, IDLE)
    return StepBars(names, tuple(Row(row.label, ms(row)) for row in bars.rows), bars.title, bars.note)


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


def draw(bars: StepBars, screen: Console) -> Iterator[Text]:
    """The lines of the bars and of their legend, none longer than the screen is wide."""
    from rich.text import Text

    colored = screen.color_system is not None and not screen.no_color
    shade = _SHADE if screen.encoding.lower().startswith("utf") else _DOT
    brushes = {name: _Brush.of(name, shade, colored=colored) for name in bars.parts}
    totals = [sum(row.ms) for row in bars.rows]
    labels = [f"{row.label}  " if row.label else "" for row in bars.rows]
    behind = [
        f"  {format_number(total, 'ms')} ms" if row.label else "" for row, total in zip(bars.rows, totals, strict=True)
    ]
    left, right = max(map(len, labels)), max(map(len, behind))
    if screen.width - left - right < _LEAST_WIDTH:
        left = right = 0
    width = screen.width - left - right
    for row, total, label, time in zip(bars.rows, totals, labels, behind, strict=True):
        line = Text(label.ljust(left)[:left], no_wrap=True)
        length = max(round(width * total / max(totals)), 1) if max(totals) else 0
        for name, count in zip(bars.parts, cells(row.ms, length), strict=True):
            line.append_text(brushes[name].stroke(name, count))
        line.append(" " * (width - length) + time.rjust(right)[:right] if right else "")
        yield line
    yield from _packed([Text(bars.title, "dim"), *_legend(bars, totals, brushes)], screen.width)
    if bars.note:
        yield Text(bars.note, "dim")


class _Brush(NamedTuple):
    """What a part is drawn with: its letter, what fills it, and its style."""

    letter: str
    fill: str
    style: str

    @classmethod
    def of(cls, name: str, shade: str, *, colored: bool) -> _Brush:
        if name == IDLE:
            return cls(shade, shade, GRAY if colored else "")
        letter, color = LETTERS.get(name, _SMALLER), PARTS.get(name) or CLASSES.get(name, GRAY)
        ink = {"black": "#000000", "white": "#ffffff"}[text_color(color)]  # the names are colors of a terminal's theme
        return cls(letter, " ", f"{ink} on {color}") if colored else cls(letter, letter, "")

    def stroke(self, name: str, count: int) -> Text:
        """So many cells of the part, with its name where there is room, else its letter."""
        from rich.text import Text

        inside = f" {name} " if len(name) + 4 <= count else self.letter
        return Text(inside.center(count, self.fill)[:count], self.style)


def _legend(bars: StepBars, totals: Sequence[float], brushes: dict[str, _Brush]) -> Iterator[Text]:
    """Each part with its letter, ms and share; of several bars the least and the most of them."""
    from rich.text import Text

    for i, name in enumerate(bars.parts):
        times = [row.ms[i] for row in bars.rows]
        shares = [ms / total if total else 0.0 for ms, total in zip(times, totals, strict=True)]
        time = milliseconds(times[0]) if len(times) == 1 else milliseconds_between(min(times), max(times))
        share = f" {about_percent(shares[0])}" if len(times) == 1 else ""
        said = f"{name} {time}{share}".replace("\N{NO-BREAK SPACE}%", "%").replace("\N{NO-BREAK SPACE}", " ")
        yield Text.assemble((brushes[name].letter, brushes[name].style), f" {said}")


def _packed(items: Sequence[Text], width: int) -> Iterator[Text]:
    """The items in lines of so many cells, none of them broken unless it is longer than a line."""
    from rich.text import Text

    line = Text()
    for item in items:
        if line and line.cell_len + 2 + item.cell_len > width:
            yield line
            line = Text()
        line.append("  " if line else "").append_text(item)
    yield line
