"""The report as one HTML page that needs nothing else: no network, no other file.

Its styles and scripts stand in it, the timeline's data too. A policy in its head keeps it from loading anything.
"""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Mapping
from functools import cache
from html import escape
from importlib.resources import files

from nsys_analyzer.report.model import Report, Section
from nsys_analyzer.report.renderers.html.blocks import Blocks, anchors
from nsys_analyzer.report.renderers.html.inline import inline
from nsys_analyzer.report.renderers.html.tracks import page_data
from nsys_analyzer.text import plain, visible

_SCRIPTS = ("page.js", "canvas.js", "timeline.js", "flame.js", "start.js")
_TIMELINE = "timeline"


def render(report: Report, figures: Mapping[str, str]) -> str:
    """The report as one page; ``figures`` are key to drawing as SVG, others are left out."""
    views, data = page_data(report)
    names = anchors(report.sections)
    blocks = Blocks(figures, {label: name for name, label in report.labels.items()}, views)
    sections = [_section(section, name, blocks) for section, name in zip(report.sections, names, strict=True)]
    entries = [(name, section.title) for section, name in zip(report.sections, names, strict=True) if section.title]
    if data:  # behind the summary
        sections.insert(1, _part("timeline.html"))
        entries.insert(0, (_TIMELINE, "Timeline"))
    script = '"use strict";\n' + "\n".join(map(_part, _SCRIPTS))
    digest = base64.b64encode(hashlib.sha256(f"\n{script}\n".encode()).digest()).decode()
    return _part("page.html").format(
        # Nothing is loaded, and no script runs but ours: whatever a name holds, it stays text.
        policy=f"default-src 'none'; style-src 'unsafe-inline'; script-src 'sha256-{digest}'",
        title=escape(visible(plain(report.title))),
        heading=inline(report.title),
        style=_part("page.css"),
        contents="\n".join(f'<li><a href="#{name}">{inline(title)}</a></li>' for name, title in entries),
        sections="\n".join(sections),
        data=f'<script type="text/plain" id="data">{data}</script>' if data else "",
        script=script,
    )


def render_fragment(report: Report) -> str:
    """The report's sections for a page of somebody else's, such as a notebook: no script, and styles for them alone."""
    blocks = Blocks({}, {label: name for name, label in report.labels.items()})
    sections = [
        _section(one, name, blocks) for one, name in zip(report.sections, anchors(report.sections), strict=True)
    ]
    # Nested: it is the element around it that has the colors, of the text, too.
    style = _part("page.css").replace(":root", "&").replace("body {", "& { padding: 0.5rem 1rem;", 1)
    heading = f"<h2>{inline(report.title)}</h2>" if report.title else ""
    inner = "\n".join([heading, *sections])
    return f'<div class="nsys-analyze"><style>.nsys-analyze {{\n{style}}}</style>\n{inner}\n</div>'


def _section(section: Section, name: str, blocks: Blocks) -> str:
    inner = "\n".join(blocks.render(block) for block in section.blocks)
    title = f"<h2>{inline(section.title)}</h2>\n" if section.title else ""
    return f'<section id="{name}">{title}{inner}\n</section>'


@cache
def _part(name: str) -> str:
    return files(__package__).joinpath(name).read_text(encoding="utf-8")
