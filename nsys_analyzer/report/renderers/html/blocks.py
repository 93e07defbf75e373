"""The blocks of a report as HTML."""

from __future__ import annotations

import re
from collections.abc import Container, Mapping, Sequence
from html import escape

from nsys_analyzer.report.model import (
    TEXT_UNITS,
    Answer,
    Block,
    Cell,
    Column,
    Details,
    Interval,
    Listing,
    MedianRange,
    Paragraph,
    Section,
    SignedChange,
    Spread,
    StepBars,
    Table,
    TimelineLink,
)
from nsys_analyzer.report.palette import text_color
from nsys_analyzer.report.renderers.html.inline import inline, name
from nsys_analyzer.report.renderers.step_bar import color_of, legend
from nsys_analyzer.report.sections.bars import IDLE
from nsys_analyzer.report.units import format_cell, format_ms
from nsys_analyzer.text import Text, plain, visible

_NO_ANCHOR = re.compile(r"[^a-z0-9]+")


def anchors(sections: Sequence[Section]) -> list[str]:
    """A name for each section of a page, each once."""
    taken: dict[str, int] = {"timeline": 1}
    found = []
    for section in sections:
        base = _NO_ANCHOR.sub("-", section.key.lower()).strip("-") or "section"
        taken[base] = taken.get(base, 0) + 1
        found.append(base if taken[base] == 1 else f"{base}-{taken[base]}")
    return found


class Blocks:
    """Renders blocks of one page.

    Args:
        figures: key to drawing, as SVG.
        full_names: short label to the full name of a kernel.
        views: the captures and runs that the page's timeline shows, which findings lead to.
    """

    def __init__(
        self,
        figures: Mapping[str, str],
        full_names: Mapping[str, str],
        views: Container[str] = (),
    ) -> None:
        self._figures, self._full_names, self._views = figures, full_names, views

    def render(self, block: Block) -> str:
        """One block; empty where it is a figure without a drawing."""
        match block:
            case Paragraph(text, capture):
                return f"<p{_of(capture)}>{inline(text)}</p>"
            case Answer(text, capture):
                return f'<p class="answer"{_of(capture)}><strong>{inline(text)}</strong></p>'
            case Listing(lines, "bullets", capture):
                items = "".join(f"<li>{inline(line)}</li>" for line in lines)
                return f"<ul{_of(capture)}>{items}</ul>"
            case Listing(lines, _, capture):
                code = escape("\n".join(visible(plain(line)) for line in lines))
                return f'<div class="listing"{_of(capture)}><pre tabindex="0"><code>{code}</code></pre></div>'
            case Table():
                return self._table(block)
            case StepBars():
                return _bars(block)
            case Details(title, blocks, capture):
                inner = "\n".join(filter(None, map(self.render, blocks)))
                if not inner:
                    return ""
                return f"<details{_of(capture)}><summary>{escape(visible(title))}</summary>\n{inner}\n</details>"
            case TimelineLink(place, capture):
                return self._seen(place.kind, place.name, capture)
            case _:
                drawn = self._figures.get(block.key)
                label = escape(visible(block.title))
                return f'<figure role="img" aria-label="{label}">{drawn}</figure>' if drawn else ""

    def _seen(self, kind: str, what: str, capture: str) -> str:
        if visible(capture) not in self._views:
            return ""
        known = f'data-kind="{escape(kind)}" data-name="{escape(visible(what))}" data-seen="{escape(visible(capture))}"'
        return f'<p class="seen"{_of(capture)}><button type="button" {known}>Show on the timeline</button></p>'

    def _table(self, block: Table) -> str:
        head = "".join(map(_head, block.columns))
        rows = "\n".join(self._row(block, row) for row in block.rows)
        caption = f"<caption>{inline(block.caption)}</caption>" if block.caption else ""
        return (
            f'<div class="table"{_of(block.capture)}><table>{caption}'
            f"<thead><tr>{head}</tr></thead>\n<tbody>\n{rows}\n</tbody></table></div>"
        )

    def _row(self, block: Table, row: Sequence[Cell]) -> str:
        cells = [self._cell(column, cell) for column, cell in zip(block.columns, row, strict=True)]
        first = row[0] if row else None
        known = f' data-row="{escape(visible(plain(first)))}"' if isinstance(first, str | Text) else ""
        return f"<tr{known}>{''.join(cells)}</tr>"

    def _cell(self, column: Column, cell: Cell) -> str:
        value = number(cell)
        known = "" if value is None else f' data-value="{value:.12g}"'
        shown = format_cell(cell, column.unit)
        if column.unit == "bar":
            return f'<td><div class="share" style="width:{value or 0.0:.1%}" aria-hidden="true"></div></td>'
        full = self._full_names.get(plain(shown)) if isinstance(cell, str | Text) else None
        if full is None or full == plain(shown):
            return f"<td{_align(column)}{known}>{inline(shown)}</td>"
        return (
            f'<td{_align(column)}{known}><details class="name"><summary>{inline(shown)}</summary>'
            f"<code>{name(full)}</code></details></td>"
        )


def _head(column: Column) -> str:
    return f'<th scope="col"{_align(column)}>{inline(column.title)}</th>' if column.title else "<td></td>"


def _bars(bars: StepBars) -> str:
    """Bars of parts in their colors, each as long as its part of the longest step, and their legend."""
    totals = [sum(row.ms) for row in bars.rows]
    keys = list(legend(bars, totals))
    drawn = []
    for row, total in zip(bars.rows, totals, strict=True):
        parts = "".join(
            f'<span style="flex:{ms:.6g};{_paint(part)}" title="{escape(f"{part} {format_ms(ms)}")}">'
            f"<b>{escape(part)}</b></span>"
            for part, ms in zip(bars.parts, row.ms, strict=True)
            if ms
        )
        label = f"<strong>{escape(visible(row.label))}</strong>" if row.label else ""
        time = f"<i>{escape(format_ms(total))}</i>" if row.label else ""
        share = total / (max(totals) or 1.0)
        bar = f'<div class="bar"><div style="width:{share:.1%}">{parts}</div></div>'
        drawn.append(f'<div class="row">{label}{bar}{time}</div>')
    description = escape(visible(f"{bars.title} {', '.join(text for _, text in keys)}"))
    items = "".join(f'<li><i style="{_paint(part)}"></i> {escape(text)}</li>' for part, text in keys)
    note = f"<p>{escape(bars.note)}</p>" if bars.note else ""
    picture = f'<div role="img" aria-label="{description}">{"".join(drawn)}</div>'
    title = f"<figcaption>{escape(bars.title)}</figcaption>"
    return f'<figure class="bars"{_of(bars.capture)}>{title}{picture}<ul class="parts">{items}</ul>{note}</figure>'


def _paint(part: str) -> str:
    """The color of a part and of its name on it; idle time has that of what nothing fills."""
    color = color_of(part)
    return "background:var(--track)" if part == IDLE else f"background:{color};color:{text_color(color)}"


def number(cell: Cell) -> float | None:
    """What a cell is sorted by; None of a text, and of a figure that does not exist."""
    match cell:
        case int() | float():
            return float(cell)
        case Spread(mean, _):
            return mean
        case MedianRange(median, _, _):
            return median
        case Interval(low, high):
            return (low + high) / 2
        case SignedChange(value, _, _):
            return value
    return None


def _align(column: Column) -> str:
    return "" if column.unit in TEXT_UNITS else ' class="number"'


def _of(capture: str) -> str:
    return f' data-capture="{escape(visible(capture))}"' if capture else ""
