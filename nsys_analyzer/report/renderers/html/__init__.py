"""Renders a report as one self-contained HTML page: it needs no network and no other file.

The page contains its styles, its scripts and the data of its timeline. Its content security policy forbids loading
anything.
"""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Mapping
from functools import cache
from html import escape
from importlib.resources import files

from nsys_analyzer.report.model import Report, Section
from nsys_analyzer.report.renderers.html.blocks import BlockRenderer, inline, make_anchors
from nsys_analyzer.report.renderers.html.tracks import page_data
from nsys_analyzer.text import plain, visible

_SCRIPTS = ("page.js", "canvas.js", "timeline.js", "flame.js", "start.js")


def render(report: Report, figures: Mapping[str, str]) -> str:
    """Returns the report as a page.

    Args:
        report: the report.
        figures: the SVG drawing of each figure, by the figure's key. Other figures are left out.
    """
    views, data = page_data(report)
    anchors = make_anchors(report.sections)
    renderer = BlockRenderer(figures, {label: name for name, label in report.labels.items()}, views)
    sections = [_section(section, anchor, renderer) for section, anchor in zip(report.sections, anchors, strict=True)]
    contents = [
        (anchor, section.title) for section, anchor in zip(report.sections, anchors, strict=True) if section.title
    ]
    if data:  # the timeline follows the first section, which is the summary
        sections.insert(1, _read_part("timeline.html"))
        contents.insert(0, ("timeline", "Timeline"))
    script = '"use strict";\n' + "\n".join(map(_read_part, _SCRIPTS))
    digest = base64.b64encode(hashlib.sha256(f"\n{script}\n".encode()).digest()).decode()
    return _read_part("page.html").format(
        # No script runs except this one, whatever a name in the report contains.
        policy=f"default-src 'none'; style-src 'unsafe-inline'; script-src 'sha256-{digest}'",
        title=escape(visible(plain(report.title))),
        heading=inline(report.title),
        style=_read_part("page.css"),
        contents="\n".join(f'<li><a href="#{anchor}">{inline(title)}</a></li>' for anchor, title in contents),
        sections="\n".join(sections),
        data=f'<script type="text/plain" id="data">{data}</script>' if data else "",
        script=script,
    )


def render_fragment(report: Report) -> str:
    """Returns the sections of a report for another page, such as a notebook: with scoped styles, without scripts."""
    renderer = BlockRenderer({}, {label: name for name, label in report.labels.items()})
    anchors = make_anchors(report.sections)
    sections = [_section(section, anchor, renderer) for section, anchor in zip(report.sections, anchors, strict=True)]
    # The enclosing element takes the role of the page's root and body, which define the colors.
    style = _read_part("page.css").replace(":root", "&").replace("body {", "& { padding: 0.5rem 1rem;", 1)
    heading = f"<h2>{inline(report.title)}</h2>" if report.title else ""
    content = "\n".join([heading, *sections])
    return f'<div class="nsys-analyze"><style>.nsys-analyze {{\n{style}}}</style>\n{content}\n</div>'


def _section(section: Section, anchor: str, renderer: BlockRenderer) -> str:
    content = "\n".join(map(renderer.render, section.blocks))
    title = f"<h2>{inline(section.title)}</h2>\n" if section.title else ""
    return f'<section id="{anchor}">{title}{content}\n</section>'


@cache
def _read_part(name: str) -> str:
    return files(__package__).joinpath(name).read_text(encoding="utf-8")
