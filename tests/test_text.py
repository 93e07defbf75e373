"""Tests the spans of text, and that only they have an effect on a page."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from itertools import cycle, repeat
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from nsys_analyzer.report.model import (
    Answer,
    Bar,
    Bars,
    Block,
    Cell,
    Column,
    Details,
    Listing,
    Paragraph,
    Report,
    Section,
    StepBars,
    Table,
)
from nsys_analyzer.report.renderers.markdown import render
from nsys_analyzer.text import (
    Span,
    StrOrText,
    code,
    emphasis,
    join_texts,
    link,
    phrase,
    plain,
    spans,
    strong,
    visible_lines,
)
from tests.conftest import ROOT
from tests.support.hostile import TEXTS, WORST, controls
from tests.support.page import tree, tree_of

MARKED = st.one_of(TEXTS, TEXTS.map(code), TEXTS.map(strong), TEXTS.map(emphasis), st.builds(link, TEXTS, TEXTS))
SENTENCES = st.lists(MARKED, max_size=4).map(lambda parts: join_texts(" and ", parts))


def test_spans() -> None:
    text = "a " + code("b") + strong("c") + " " + emphasis("d") + ", " + link("e", "f/g") + "."
    assert spans(text) == (
        Span("plain", "a "), Span("code", "b"), Span("strong", "c"), Span("plain", " "), Span("emphasis", "d"),
        Span("plain", ", "), Span("link", "e", "f/g"), Span("plain", "."),
    )  # fmt: skip
    assert str(text) == plain(text) == "a bc d, e."
    assert plain(text, "`") == "a `b`c d, e."


def test_a_phrase() -> None:
    assert spans(phrase("*busy*: a **great** share, `--csv`.")) == (
        Span("emphasis", "busy"), Span("plain", ": a "), Span("strong", "great"), Span("plain", " share, "),
        Span("code", "--csv"), Span("plain", "."),
    )  # fmt: skip


def test_the_values_of_a_phrase() -> None:
    text = phrase("`{}` has **{:,} {{}}**, {}", "*a*", 1234, code("b"))
    assert spans(text) == (
        Span("code", "*a*"), Span("plain", " has "), Span("strong", "1,234 {}"), Span("plain", ", "), Span("code", "b"),
    )  # fmt: skip


@pytest.mark.parametrize(("template", "values"), [("{}", ()), ("{} {}", ("a",)), ("a", ("b",)), ("`a`", ("b",))])
def test_a_phrase_has_a_field_for_each_value(template: str, values: tuple[str, ...]) -> None:
    with pytest.raises(TypeError, match="field"):
        phrase(template, *values)


def test_a_span_around_a_span_is_one() -> None:
    assert spans(strong("a " + code("b"))) == (Span("strong", "a b"),)


def test_no_span_is_lost_in_an_f_string() -> None:
    with pytest.raises(TypeError, match="phrase"):
        f"{code('a')}"


@given(st.lists(MARKED), TEXTS)
def test_joined_texts_keep_their_spans(parts: list[StrOrText], separator: str) -> None:
    text = join_texts(separator, parts)
    assert plain(text) == separator.join(map(plain, parts))
    assert [span for span in spans(text) if span.kind != "plain"] == [
        span for part in parts for span in spans(part) if span.kind != "plain"
    ]


@given(TEXTS)
def test_no_text_of_others_holds_a_span(text: str) -> None:
    assert plain(text) == text
    assert [span.kind for span in spans(text)] == ["plain"] * bool(text)
    assert spans(phrase("`{}` {}", text, text))[0] == Span("code", text)


@given(TEXTS)
def test_what_a_terminal_is_given(text: str) -> None:
    shown = visible_lines(text)
    assert not controls(shown)
    assert shown.count("\n") == text.count("\n")
    shown.encode()  # no half of a surrogate pair


def test_what_may_be_seen_stays() -> None:
    text = "f<float*>(int&) – ±20\N{NO-BREAK SPACE}% ÷ µs 训练 \N{ROCKET}\nline two"
    assert visible_lines(text) == text


def a_report(texts: Iterator[StrOrText]) -> Report:
    """A report with one of the texts in every place that holds one, some 60."""

    def name() -> str:
        return plain(next(texts))

    def table() -> Table:
        columns = (Column(name()), Column(name(), "code"), Column(name(), "count"))
        row: tuple[Cell, ...] = (next(texts), next(texts), 1)
        return Table(columns, (row, (next(texts), None, None)), next(texts), name())

    bars = StepBars((name(), name()), (Bar(name(), (1.0, 2.0)), Bar(name(), (0.0, 1.0))), name(), name())
    blocks: tuple[Block, ...] = (
        Paragraph(next(texts)),
        Answer(next(texts), name()),
        table(),
        bars,
        Paragraph(next(texts)),
        Listing((next(texts), next(texts))),
        Listing((next(texts), next(texts)), "commands"),
        Bars("drawn", name(), (name(),), ((name(), (1.0,)),), name()),
        Details(name(), (Paragraph(next(texts)), table(), Listing((next(texts),), "python"))),
    )
    return Report(name(), (Section("key", name() or "title", blocks), Section("first", "", (Paragraph(next(texts)),))))


def checked(report: Report) -> str:
    """The page of a report, after its tree was found to be that of the report."""
    drawn = {figure.key: f"report_figures/{figure.key}.png" for figure in report.figures}
    page = render(report, drawn)
    assert tree(page) == tree_of(report, drawn)
    assert not controls(page)
    page.encode()
    return page


@given(st.lists(SENTENCES, min_size=1, max_size=7))
@settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
def test_no_text_changes_a_page(texts: list[StrOrText]) -> None:
    checked(a_report(cycle(texts)))


@pytest.mark.parametrize("text", ["", " ", "\n", "\xa0", "\ud800", "`", "|", "\\", WORST, *map(chr, range(0x80))])
def test_no_character_changes_a_page(text: str) -> None:
    one: StrOrText
    for one in (text, f"a{text}b", f"{text}{text} b", code(text), strong(text), emphasis(text), link(text, text)):
        checked(a_report(repeat(one)))


def test_ordinary_names_are_not_touched() -> None:
    """What people call captures, kernels and files is as easily read before it is rendered."""
    names = "small_ctx256_train_fp32, aten::mm, d_model 4,096, 1 < 2 & 3 > 2, 20 % (a; b) ~ÿ – C:\\x, 2 * 3".replace(
        "~", ""
    )
    assert f"\n\n{names}\n" in checked(Report("t", (Section("k", "s", (Paragraph(names),)),)))


def test_a_link_leads_to_the_bytes_of_a_path() -> None:
    path = b"a b/\xff(1).pickle".decode("utf-8", "surrogateescape")
    page = checked(Report("t", (Section("k", "s", (Paragraph(link("x", path)),)),)))
    assert "[x](a%20b/%FF%281%29.pickle)" in page


# --- how sentences are written ---

PACKAGE = ROOT / "nsys_analyzer"
MARKUP = re.compile(r"(?<!`)`[^`\s][^`]*`(?!`)|\*\*?[^\W_][^*\n]*\*")
ROOMS = (
    "report/sections",
    "experiments",
    "analysis/summary",
    "trace/metadata.py",
    "cli",
    "report/renderers/terminal.py",
    "report/renderers/step_bar.py",
)
MODULES = sorted(path for room in ROOMS for path in (PACKAGE / room, *(PACKAGE / room).rglob("*.py")) if path.is_file())


@pytest.mark.parametrize("path", MODULES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_markup_stands_in_templates(path: Path) -> None:
    """A template is a literal, not a text with values in it, and no other sentence has asterisks or backticks."""
    parsed = ast.parse(path.read_text(encoding="utf-8"))
    calls = [node for node in ast.walk(parsed) if isinstance(node, ast.Call) and node.args]
    templates = {id(call.args[0]): call.args[0] for call in calls if ast.unparse(call.func) == "phrase"}
    assert not any(isinstance(node, ast.JoinedStr) for one in templates.values() for node in ast.walk(one))
    constants = {ast.unparse(one).partition(".")[0] for one in templates.values()}
    assigned = [node for node in parsed.body if isinstance(node, ast.Assign)]
    ours = [*templates.values(), *(node.value for node in assigned if ast.unparse(node.targets[0]) in constants)]
    patterns = [call.args[0] for call in calls if ast.unparse(call.func).startswith("re.")]
    docstrings = [node.value for node in ast.walk(parsed) if isinstance(node, ast.Expr)]
    other = {id(part) for node in (*ours, *patterns, *docstrings) for part in ast.walk(node)}
    texts = [node.value for node in ast.walk(parsed) if isinstance(node, ast.Constant) and id(node) not in other]
    assert [text for text in texts if isinstance(text, str) and MARKUP.search(text)] == []
