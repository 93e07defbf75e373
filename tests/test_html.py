"""Tests the page: it has the figures of the markdown report, no active content from names, and loads nothing."""

from __future__ import annotations

import base64
import hashlib
import json
import re
import zlib
from collections.abc import Callable
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from markdown_it import MarkdownIt

from nsys_analyzer.analysis.findings.finding import Place
from nsys_analyzer.report.figures import draw_svg
from nsys_analyzer.report.model import (
    Answer,
    Bar,
    Bars,
    Column,
    Details,
    Listing,
    Paragraph,
    Report,
    Section,
    SignedChange,
    StepBars,
    Table,
    TimelineLink,
    unfold_details,
)
from nsys_analyzer.report.renderers import html
from nsys_analyzer.report.renderers.html import BlockRenderer, inline
from nsys_analyzer.report.renderers.markdown import render_block
from nsys_analyzer.text import code, phrase, visible
from tests.support.hostile import TEXTS, WORST
from tests.support.pages import EXAMPLES, built, unpack_ranks

VOID = ("meta", "wbr", "input", "br")


class Page(HTMLParser):
    """The elements of a page: their names, attributes, and texts, and the cells of its tables as lists."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.tables: list[list[list[str]]] = []
        self.texts: list[str] = []
        self.feed(text)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)
        if tag == "table":
            self.tables.append([])
        elif tag == "tr":
            self.tables[-1].append([])
        elif tag in ("th", "td"):
            self.tables[-1][-1].append("")

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open and self.open[-1] not in ("script", "style"):
            self.texts.append(data)
        if {"th", "td"} & set(self.open) and "summary" not in self.open[:-2] and not self._is_full_name():
            self.tables[-1][-1][-1] += data

    def _is_full_name(self) -> bool:
        """Whether this is what stands behind a short name: ``<details><summary>short</summary><code>``."""
        return "details" in self.open[-3:] and "summary" not in self.open


@pytest.fixture(scope="module")
def late_rank(tmp_path_factory: pytest.TempPathFactory) -> Report:
    """Two ranks, of which one is late."""
    return built(unpack_ranks(tmp_path_factory.mktemp("ranks")))


@pytest.fixture(scope="module")
def train(real_capture: Callable[[str], Path]) -> Report:
    return built(real_capture("train_small256"))


def in_markdown(table: Table) -> list[list[str]]:
    """The rows of a table as a reader of the markdown sees them, without the bars that a page draws."""
    rows: list[list[str]] = []
    for token in MarkdownIt("commonmark").enable("table").parse(render_block(replace(table, caption=""), {})):
        if token.type == "tr_open":
            rows.append([])
        elif token.type == "inline":
            texts = (one.content for one in token.children or () if one.type in ("text", "code_inline", "text_special"))
            rows[-1].append("".join(texts).strip("\N{DARK SHADE}"))
    return rows


@pytest.fixture(scope="module")
def sweep() -> Report:
    return built(EXAMPLES / "sweep")


@pytest.mark.parametrize("name", ["train", "late_rank", "sweep"])
def test_every_table_is_that_of_markdown(request: pytest.FixtureRequest, name: str) -> None:
    report: Report = request.getfixturevalue(name)
    blocks = (block for section in report.sections for block in unfold_details(section.blocks))
    expected = [in_markdown(block) for block in blocks if isinstance(block, Table)]
    assert len(expected) > 10
    assert Page(html.render(report, {})).tables == expected


def test_a_page_holds_all_that_it_needs(train: Report) -> None:
    text = html.render(train, {figure.key: draw_svg(figure) for figure in train.figures if isinstance(figure, Bars)})
    assert len(text) < 1_000_000  # of 3 MB that a capture of 12,000 kernels may take
    page = Page(text)
    assert not page.open
    loading = {"link", "img", "iframe", "object", "embed", "base", "form", "audio", "video"}
    assert loading.isdisjoint(tag for tag, _ in page.tags)
    targets = [value for _, known in page.tags for key, value in known.items() if key in ("src", "href", "xlink:href")]
    assert [target for target in targets if not str(target).startswith("#")] == []
    assert "url(http" not in text
    ids = [known["id"] for _, known in page.tags if "id" in known]
    assert len(ids) == len(set(ids))
    assert {target[1:] for target in map(str, targets) if target.startswith("#")} <= set(ids)
    assert not any(key.startswith("on") for _, known in page.tags for key in known)


def test_the_policy_allows_our_script_alone(train: Report) -> None:
    text = html.render(train, {})
    script = re.findall(r"<script>(.*?)</script>", text, re.DOTALL)[-1]
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    policy = next(known["content"] for tag, known in Page(text).tags if known.get("http-equiv"))
    assert policy == f"default-src 'none'; style-src 'unsafe-inline'; script-src 'sha256-{digest}'"


def data_of(report: Report) -> list[dict[str, Any]]:
    text = html.render(report, {})
    (data,) = re.findall(r'<script type="text/plain" id="data">(.*?)</script>', text, re.DOTALL)
    return [json.loads(zlib.decompress(base64.b64decode(line))) for line in data.split("\n")]


def test_the_data_holds_every_operation(train: Report) -> None:
    shared, capture = data_of(train)
    assert [view["title"] for view in shared["views"]] == ["train_small256"]
    (stream,) = (track for track in capture["tracks"] if track["kind"] == "stream")
    tracks = train.captures[0].tracks
    assert tracks is not None
    (expected,) = (track for track in tracks.tracks if track.kind == "stream")
    start = 0
    for difference, moment in zip(stream["start"], expected.start.tolist(), strict=True):
        start += difference
        assert start == moment
    assert stream["duration"] == expected.duration.tolist()
    matmul = capture["groups"].index("matmul")
    ns = sum(one for one, group in zip(stream["duration"], stream["group"], strict=True) if group == matmul)
    # That of the steps' kernels: three steps, of which nothing overlaps.
    step = train.captures[0].phase("step")
    assert step is not None
    by_class = {one.kernel_class: one.ms_per_instance for one in step.classes}
    assert ns / 3e6 == pytest.approx(by_class["matmul"], abs=1e-6)


def test_ranks_stand_above_each_other_on_one_clock(late_rank: Report) -> None:
    shared, *captures = data_of(late_rank)
    assert [view["title"] for view in shared["views"]] == [
        "late_rank (2 captures): 2 ranks", "late_rank_rank0 rank 0", "late_rank_rank1 rank 1",
    ]  # fmt: skip
    parts = shared["views"][0]["parts"]
    assert [part["label"] for part in parts] == ["rank 0", "rank 1"]

    def find_last_ends(part: dict[str, Any]) -> list[int]:
        """The ends of the all-reduces, on the view's axis."""
        capture = captures[part["capture"]]
        named = {code for code, name in enumerate(capture["names"]) if "AllReduce" in name}
        ends = []
        for track in (one for one in capture["tracks"] if one["kind"] == "stream"):
            start = part["at"]
            for difference, duration, name in zip(track["start"], track["duration"], track["name"], strict=True):
                start += difference
                ends += [start + duration] if name in named else []
        return sorted(ends)

    first, second = map(find_last_ends, parts)
    assert len(first) == len(second) == 6 * 7  # six steps, seven buckets
    apart = sorted(abs(one - other) for one, other in zip(first, second, strict=True))
    assert apart[len(apart) // 2] < 20_000  # ns: a collective ends on both ranks at once


def test_findings_lead_to_the_timeline_where_there_is_one(train: Report) -> None:
    place = TimelineLink(Place("idle", "launch"), "a <b>")
    button = BlockRenderer({}, {}, {"a <b>"}).render(place)
    assert 'data-kind="idle" data-name="launch" data-view="a &lt;b&gt;"' in button
    assert BlockRenderer({}, {}, {"another"}).render(place) == ""
    seen = [known for tag, known in Page(html.render(train, {})).tags if tag == "button" and "data-view" in known]
    findings = train.captures[0].diagnosis
    assert findings is not None
    expected = [(one.place.kind, one.place.name) for one in findings.findings if one.place]
    assert sorted((one["data-kind"], one["data-name"]) for one in seen) == sorted(expected)
    assert len(expected) >= 3


def test_a_short_name_unfolds_to_the_full_one() -> None:
    table = Table((Column("kernel", "code"), Column("ms", "ms")), (("gemm <a>", 1.5), ("other", None)))
    text = BlockRenderer({}, {"gemm <a>": "void gemm<a>(int)"}).render(table)
    assert '<details class="name"><summary><code>gemm &lt;a&gt;</code></summary>' in text
    assert "<code>void gemm&lt;a&gt;(int)</code>" in text
    assert '<td class="number" data-value="1.5">1.500</td>' in text
    assert '<td class="number">–</td>' in text


def test_cells_are_sorted_by_their_figures() -> None:
    table = Table((Column("change", "ms"),), ((SignedChange(-2.5, -3.0, -2.0),), (1250,)))
    text = BlockRenderer({}, {}).render(table)
    assert re.findall(r'data-value="([^"]*)"', text) == ["-2.5", "1250"]


def test_a_share_is_drawn_and_not_read() -> None:
    text = BlockRenderer({}, {}).render(Table((Column("a"), Column("", "bar")), (("x", 0.25),)))
    assert '<td><div class="share" style="width:25.0%" aria-hidden="true"></div></td>' in text
    assert text.count("<th ") == 1  # a heading without words is none
    assert "\N{DARK SHADE}" not in text


def test_what_is_folded_and_empty_is_left_out() -> None:
    assert BlockRenderer({}, {}).render(Details("Figures", (Bars("no drawing", "b", (), (), "ms"),))) == ""


def page_of(text: str) -> Page:
    """A page with a block of each kind, and this text in every place of a text."""
    blocks = (
        Paragraph(phrase("{} and `{}`", text, text), text),
        Answer(text + code(text), text),
        Listing((text, text), "commands", text),
        Listing((text,), capture=text),
        Table((Column(text), Column(text, "code")), ((text, text),), text, text),
        StepBars((text, text), (Bar(text, (1.0, 2.0)),), text, text, text),
        Details(text, (Paragraph(text),), text),
        TimelineLink(Place("kernel", text), text),
    )
    return Page(html.render(Report(text, (Section(text, text, blocks),)), {}))


@given(TEXTS.map("x{}".format))
def test_no_text_acts_on_a_page(text: str) -> None:
    page, plain_page = page_of(text), page_of("word")
    assert not page.open
    assert [tag for tag, _ in page.tags if tag != "wbr"] == [tag for tag, _ in plain_page.tags if tag != "wbr"]


def test_the_worst_text_is_shown_letter_by_letter() -> None:
    shown = "".join(Page(f"<p>{inline(WORST)}</p>").texts)
    assert shown == visible(WORST)


def test_a_drawing_has_the_color_of_the_page(train: Report) -> None:
    figure = next(figure for figure in train.figures if isinstance(figure, Bars))
    drawn = draw_svg(figure)
    assert drawn.startswith("<svg")
    assert "currentColor" in drawn
    assert "#010203" not in drawn
    assert "<metadata" not in drawn or "nsys" not in drawn
    assert draw_svg(figure) == drawn  # the same bytes, whenever it is drawn
