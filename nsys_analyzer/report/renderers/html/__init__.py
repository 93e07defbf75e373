"""Renders a report as one self-contained HTML page: it needs no network and no other file.

The page contains its styles, its scripts and the data of its timeline. Its content security policy forbids loading
anything. All text is escaped here, since names in it are foreign input.
"""

from __future__ import annotations

import base64
import hashlib
import json
import re
import zlib
from collections.abc import Container, Mapping, Sequence
from functools import cache
from html import escape
from importlib.resources import files
from typing import Any

import numpy as np

from nsys_analyzer.analysis.intervals import NONE
from nsys_analyzer.analysis.operators.account import describe_shapes
from nsys_analyzer.analysis.operators.pricing import price_signatures
from nsys_analyzer.analysis.ranks.run import ParallelRun, RankFigures
from nsys_analyzer.analysis.steps.process import CAUSES
from nsys_analyzer.analysis.steps.tracks import IdleTrack, Stream, Tracks
from nsys_analyzer.analysis.summary.summary import CaptureSummary
from nsys_analyzer.report.evidence import CAUSE_WORDS
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
    Report,
    Section,
    SignedChange,
    Spread,
    StepBars,
    Table,
    TimelineLink,
)
from nsys_analyzer.report.palette import CAUSE_COLORS, CLASS_COLORS, text_color
from nsys_analyzer.report.renderers.markdown import link_target
from nsys_analyzer.report.renderers.step_bar import legend_entries, part_color
from nsys_analyzer.report.sections.bars import IDLE
from nsys_analyzer.report.units import format_cell, format_ms, shorten_shapes
from nsys_analyzer.text import StrOrText, Text, plain, spans, visible
from nsys_analyzer.trace.arrays import Ints

_SCRIPTS = ("page.js", "canvas.js", "timeline.js", "flame.js", "start.js")
_NOT_IN_ANCHORS = re.compile(r"[^a-z0-9]+")
_TAG_OF_SPAN_KIND = {"code": "code", "strong": "strong", "emphasis": "em"}
#: A long name may break after a character that separates its parts.
_BREAK_OPPORTUNITY = re.compile(r"(?<=[_.:,/>])(?=\w)")


def render(report: Report, figures: Mapping[str, str]) -> str:
    """Returns the report as a page.

    Args:
        report: the report.
        figures: the SVG drawing of each figure, by the figure's key. Other figures are left out.
    """
    views, timeline_data = encode_timeline(report)
    anchors = make_anchors(report.sections)
    renderer = BlockRenderer(figures, {label: name for name, label in report.labels.items()}, views)
    sections = [
        _render_section(section, anchor, renderer) for section, anchor in zip(report.sections, anchors, strict=True)
    ]
    links = [(anchor, section.title) for section, anchor in zip(report.sections, anchors, strict=True) if section.title]
    if timeline_data:  # puts the timeline after the first section, which is the summary
        sections.insert(1, _read_part("timeline.html"))
        links.insert(0, ("timeline", "Timeline"))
    script = '"use strict";\n' + "\n".join(map(_read_part, _SCRIPTS))
    digest = base64.b64encode(hashlib.sha256(f"\n{script}\n".encode()).digest()).decode()
    return _read_part("page.html").format(
        # The policy allows only the page's own script, whatever text a name in the report contains.
        policy=f"default-src 'none'; style-src 'unsafe-inline'; script-src 'sha256-{digest}'",
        title=escape(visible(plain(report.title))),
        heading=inline(report.title),
        style=_read_part("page.css"),
        contents="\n".join(f'<li><a href="#{anchor}">{inline(title)}</a></li>' for anchor, title in links),
        sections="\n".join(sections),
        data=f'<script type="text/plain" id="data">{timeline_data}</script>' if timeline_data else "",
        script=script,
    )


def render_fragment(report: Report) -> str:
    """Returns the sections of a report for another page, such as a notebook: with scoped styles, without scripts."""
    renderer = BlockRenderer({}, {label: name for name, label in report.labels.items()})
    anchors = make_anchors(report.sections)
    sections = [
        _render_section(section, anchor, renderer) for section, anchor in zip(report.sections, anchors, strict=True)
    ]
    # The enclosing element takes the role of the page's root and body, which define the colors.
    style = _read_part("page.css").replace(":root", "&").replace("body {", "& { padding: 0.5rem 1rem;", 1)
    heading = f"<h2>{inline(report.title)}</h2>" if report.title else ""
    content = "\n".join([heading, *sections])
    return f'<div class="nsys-analyze"><style>.nsys-analyze {{\n{style}}}</style>\n{content}\n</div>'


def _render_section(section: Section, anchor: str, renderer: BlockRenderer) -> str:
    content = "\n".join(map(renderer.render, section.blocks))
    title = f"<h2>{inline(section.title)}</h2>\n" if section.title else ""
    return f'<section id="{anchor}">{title}{content}\n</section>'


@cache
def _read_part(name: str) -> str:
    return files(__package__).joinpath(name).read_text(encoding="utf-8")


def make_anchors(sections: Sequence[Section]) -> list[str]:
    """Returns a unique ID for each section of a page."""
    uses = {"timeline": 1}
    anchors = []
    for section in sections:
        base = _NOT_IN_ANCHORS.sub("-", section.key.lower()).strip("-") or "section"
        uses[base] = uses.get(base, 0) + 1
        anchors.append(base if uses[base] == 1 else f"{base}-{uses[base]}")
    return anchors


class BlockRenderer:
    """Renders the blocks of one page.

    Args:
        figures: the SVG drawing of each figure, by the figure's key.
        full_names: the full name of each kernel, by its short label.
        views: the captures and runs on the timeline, to which findings link.
    """

    def __init__(
        self,
        figures: Mapping[str, str],
        full_names: Mapping[str, str],
        views: Container[str] = (),
    ) -> None:
        self._figures, self._full_names, self._views = figures, full_names, views

    def render(self, block: Block) -> str:
        """Returns a block as HTML, which is empty for a figure without a drawing."""
        match block:
            case Paragraph(text, capture):
                return f"<p{_make_capture_attribute(capture)}>{inline(text)}</p>"
            case Answer(text, capture):
                return f'<p class="answer"{_make_capture_attribute(capture)}><strong>{inline(text)}</strong></p>'
            case Listing(lines, "bullets", capture):
                items = "".join(f"<li>{inline(line)}</li>" for line in lines)
                return f"<ul{_make_capture_attribute(capture)}>{items}</ul>"
            case Listing(lines, _, capture):
                code = escape("\n".join(visible(plain(line)) for line in lines))
                attribute = _make_capture_attribute(capture)
                return f'<div class="listing"{attribute}><pre tabindex="0"><code>{code}</code></pre></div>'
            case Table():
                return self._table(block)
            case StepBars():
                return _render_bars(block)
            case Details(title, blocks, capture):
                content = "\n".join(filter(None, map(self.render, blocks)))
                if not content:
                    return ""
                summary = f"<summary>{escape(visible(title))}</summary>"
                return f"<details{_make_capture_attribute(capture)}>{summary}\n{content}\n</details>"
            case TimelineLink():
                return self._timeline_link(block)
            case _:
                drawing = self._figures.get(block.key)
                label = escape(visible(block.title))
                return f'<figure role="img" aria-label="{label}">{drawing}</figure>' if drawing else ""

    def _timeline_link(self, link: TimelineLink) -> str:
        view = visible(link.capture)
        if view not in self._views:
            return ""
        name = escape(visible(link.place.name))
        data = f'data-kind="{escape(link.place.kind)}" data-name="{name}" data-view="{escape(view)}"'
        button = f'<button type="button" {data}>Show on the timeline</button>'
        return f'<p class="timeline-link"{_make_capture_attribute(link.capture)}>{button}</p>'

    def _table(self, table: Table) -> str:
        head = "".join(
            f'<th scope="col"{_make_alignment_attribute(column)}>{inline(column.title)}</th>'
            if column.title
            else "<td></td>"
            for column in table.columns
        )
        rows = "\n".join(self._row(table, row) for row in table.rows)
        caption = f"<caption>{inline(table.caption)}</caption>" if table.caption else ""
        return (
            f'<div class="table"{_make_capture_attribute(table.capture)}><table>{caption}'
            f"<thead><tr>{head}</tr></thead>\n<tbody>\n{rows}\n</tbody></table></div>"
        )

    def _row(self, table: Table, row: Sequence[Cell]) -> str:
        cells = [self._cell(column, cell) for column, cell in zip(table.columns, row, strict=True)]
        first_cell = row[0] if row else None
        name = f' data-row="{escape(visible(plain(first_cell)))}"' if isinstance(first_cell, str | Text) else ""
        return f"<tr{name}>{''.join(cells)}</tr>"

    def _cell(self, column: Column, cell: Cell) -> str:
        value = get_sort_value(cell)
        if column.unit == "bar":
            return f'<td><div class="share" style="width:{value or 0.0:.1%}" aria-hidden="true"></div></td>'
        attributes = _make_alignment_attribute(column) + ("" if value is None else f' data-value="{value:.12g}"')
        text = format_cell(cell, column.unit)
        full_name = self._full_names.get(plain(text)) if isinstance(cell, str | Text) else None
        if full_name is None or full_name == plain(text):
            return f"<td{attributes}>{inline(text)}</td>"
        return (
            f'<td{attributes}><details class="name"><summary>{inline(text)}</summary>'
            f"<code>{_escape_breakable(full_name)}</code></details></td>"
        )


def _render_bars(bars: StepBars) -> str:
    """Returns bars of colored parts, on the scale of the longest bar, and their legend."""
    totals = [sum(row.ms) for row in bars.rows]
    entries = list(legend_entries(bars, totals))
    rows = []
    for row, total in zip(bars.rows, totals, strict=True):
        parts = "".join(
            f'<span style="flex:{ms:.6g};{_style_part(part)}" title="{escape(f"{part} {format_ms(ms)}")}">'
            f"<b>{escape(part)}</b></span>"
            for part, ms in zip(bars.parts, row.ms, strict=True)
            if ms
        )
        label = f"<strong>{escape(visible(row.label))}</strong>" if row.label else ""
        time = f"<i>{escape(format_ms(total))}</i>" if row.label else ""
        share = total / (max(totals) or 1.0)
        bar = f'<div class="bar"><div style="width:{share:.1%}">{parts}</div></div>'
        rows.append(f'<div class="row">{label}{bar}{time}</div>')
    description = escape(visible(f"{bars.title} {', '.join(text for _, text in entries)}"))
    items = "".join(f'<li><i style="{_style_part(part)}"></i> {escape(text)}</li>' for part, text in entries)
    note = f"<p>{escape(bars.note)}</p>" if bars.note else ""
    picture = f'<div role="img" aria-label="{description}">{"".join(rows)}</div>'
    title = f"<figcaption>{escape(bars.title)}</figcaption>"
    parts = f'<ul class="parts">{items}</ul>'
    return f'<figure class="bars"{_make_capture_attribute(bars.capture)}>{title}{picture}{parts}{note}</figure>'


def _style_part(part: str) -> str:
    """Returns the styles of a part: its color, and the color of its name. Idle time has the color of the background."""
    color = part_color(part)
    return "background:var(--track)" if part == IDLE else f"background:{color};color:{text_color(color)}"


def get_sort_value(cell: Cell) -> float | None:
    """Returns the number that a cell is sorted by, or None for a text and for a figure that does not exist."""
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


def _make_alignment_attribute(column: Column) -> str:
    return "" if column.unit in TEXT_UNITS else ' class="number"'


def _make_capture_attribute(capture: str) -> str:
    return f' data-capture="{escape(visible(capture))}"' if capture else ""


def inline(text: StrOrText) -> str:
    """Returns a text as HTML inside a line."""
    parts = []
    for span in spans(text):
        content = escape(visible(span.text)) if span.kind in ("plain", "link") else _escape_breakable(span.text)
        if span.kind == "link":
            content = f'<a href="{escape(link_target(span.target))}">{content}</a>'
        elif span.kind != "plain":
            content = f"<{_TAG_OF_SPAN_KIND[span.kind]}>{content}</{_TAG_OF_SPAN_KIND[span.kind]}>"
        parts.append(content)
    return "".join(parts)


def _escape_breakable(name: str) -> str:
    """Returns a name that may break between its parts."""
    return _BREAK_OPPORTUNITY.sub("<wbr>", escape(visible(name)))


# --- the data of the timeline ---

#: The columns that only the track of a stream has.
_STREAM_COLUMNS = ("phase", "module", "path", "wait", "thread")


def encode_timeline(report: Report) -> tuple[frozenset[str], str]:
    """Returns the captures and runs on the timeline of a page, and its data; both are empty if no capture has tracks.

    The first line of the data belongs to all captures. Each further line belongs to one capture, and is decoded when
    that capture is shown.
    """
    captures = [(capture, capture.tracks) for capture in report.captures if capture.tracks]
    if not captures:
        return frozenset(), ""
    indexes = {(capture.name, tracks.global_pid): i for i, (capture, tracks) in enumerate(captures)}
    capture_views = [
        {"title": visible(capture.title), "parts": [{"capture": i, "label": "", "at": 0}]}
        for i, (capture, _) in enumerate(captures)
    ]
    run_views = [
        view for run in report.runs if (view := _make_run_view(run, indexes, [tracks for _, tracks in captures]))
    ]
    shared_data = {
        "views": run_views + capture_views,
        "classes": CLASS_COLORS,
        "causes": {cause: {"color": CAUSE_COLORS[cause], "text": CAUSE_WORDS[cause]} for cause in CAUSES},
    }
    views = frozenset(str(view.get("name", view["title"])) for view in run_views + capture_views)
    parts = (shared_data, *(_encode_capture(*pair, report.labels) for pair in captures))
    texts = (json.dumps(part, separators=(",", ":"), ensure_ascii=False, allow_nan=False) for part in parts)
    return views, "\n".join(base64.b64encode(zlib.compress(text.encode())).decode() for text in texts)


def _make_run_view(
    run: ParallelRun, indexes: dict[tuple[str, int], int], tracks: list[Tracks]
) -> dict[str, Any] | None:
    """Returns the view of a run's captures below each other, or None if fewer than two have tracks.

    ``at`` of each part is the offset of its capture on the common time axis, in ns.
    """
    ranks: dict[int, RankFigures] = {}
    for rank in run.ranks:
        if (index := indexes.get((rank.capture, rank.process))) is not None:
            ranks.setdefault(index, rank)  # one entry per process, also if it has several devices
    if len(ranks) < 2:
        return None
    origins = [tracks[index].origin_ns - rank.shift_ns for index, rank in ranks.items() if rank.shift_ns is not None]
    aligned = len(origins) == len(ranks)
    offsets = [origin - min(origins) for origin in origins] if aligned else [0.0] * len(ranks)
    parts = [
        {"capture": index, "label": visible(rank.label), "at": round(offset)}
        for (index, rank), offset in zip(ranks.items(), offsets, strict=True)
    ]
    name = visible(run.name)
    note = "The clocks of these ranks are not aligned: each rank starts with its own first step."
    return {"title": f"{name}: {len(parts)} ranks", "name": name, "parts": parts, "note": "" if aligned else note}


def _encode_capture(capture: CaptureSummary, tracks: Tracks, labels: Mapping[str, str]) -> dict[str, Any]:
    encoded_tracks = []
    operators, operator_of_call = _list_operators(capture)
    for track in tracks.tracks:
        columns: dict[str, Any] = {"title": visible(track.title), "kind": track.kind}
        columns["start"] = _encode_differences(track.start)
        # Ranges, calls and lines are nested. All their boxes have the same color, so they have no group.
        keys = ["duration", "name", "depth" if track.kind in ("ranges", "calls", "lines") else "group"]
        if isinstance(track, Stream):
            keys += _STREAM_COLUMNS
            if capture.step and capture.step.critical_path:
                columns["critical"] = _encode_differences(np.flatnonzero(track.critical))
            if capture.operators:
                columns["operator"] = operator_of_call[capture.operators.call[track.operation]].tolist()
        elif isinstance(track, IdleTrack):
            keys.append("stack")
        encoded_tracks.append(columns | {key: getattr(track, key).tolist() for key in keys})
    return {
        "duration": tracks.duration_ns,
        "steps": tracks.steps,
        "on_cpu": tracks.on_cpu,
        "left_out": tracks.left_out,
        "names": list(map(visible, tracks.names)),
        "labels": [visible(labels.get(name, "")) for name in tracks.names],
        "groups": tracks.groups,
        "phases": list(map(visible, tracks.phases)),
        "modules": list(map(visible, tracks.modules)),
        "paths": list(map(visible, tracks.paths)),
        "operators": operators,
        "usual": {
            f"{row.cause} {visible(row.range or '')}": visible(f"{row.lines[0].place} in {row.lines[0].function}")
            for row in (capture.step.idle_by_cause if capture.step else ())
            if row.lines
        },
        "stacks": [list(map(visible, stack)) for stack in tracks.stacks],
        "memory": {"time": _encode_differences(tracks.memory[0]), "bytes": _encode_differences(tracks.memory[1])},
        "levels": [
            {
                "title": visible(level.title),
                "unit": level.unit,
                "time": _encode_differences(level.time),
                "value": _encode_differences(level.value),
            }
            for level in tracks.levels
        ],
        "tracks": encoded_tracks,
    }


def _list_operators(capture: CaptureSummary) -> tuple[list[tuple[str, str, str, float | None]], Ints]:
    """Returns the operators of a capture, and the index of the operator of each call, followed by -1 for no call.

    An operator has its name, its shapes, its line, and its attainable time in ns, which is None if it is unknown.
    """
    work = capture.operators
    if work is None:
        return [], np.array([NONE])
    calls = work.calls
    if capture.study:
        _, times_ns = price_signatures(capture.study, work)
    else:
        times_ns = np.full(len(calls.signatures), np.nan)
    signatures_and_lines, operator_of_call = np.unique(
        np.stack([calls.signature, calls.line]), axis=1, return_inverse=True
    )
    operators = [
        (
            visible(calls.signatures[signature].name),
            visible(shorten_shapes(describe_shapes(calls.signatures[signature]))),
            visible(calls.lines[line]) if line >= 0 else "",
            None if np.isnan(times_ns[signature]) else round(times_ns[signature]),
        )
        for signature, line in signatures_and_lines.T.tolist()
    ]
    return operators, np.append(operator_of_call.ravel(), NONE)


def _encode_differences(values: Ints) -> list[int]:
    """Returns the first value and the differences of adjacent values: small numbers, which compress well."""
    differences: list[int] = np.diff(values, prepend=np.int64(0)).tolist()
    return differences
