"""One block of each kind, and the whole text it becomes."""

import re

from hypothesis import given
from hypothesis import strategies as st

from nsys_analyzer.report.model import (
    Answer,
    Bars,
    Column,
    Details,
    Listing,
    Paragraph,
    Report,
    Section,
    Spread,
    Table,
)
from nsys_analyzer.report.renderers.markdown import fitting, render, render_block
from nsys_analyzer.text import phrase

FIGURE = Bars("one", "Time by phase", ("forward",), (("wall", (1.0,)),), "ms")
TABLE = Table(
    (Column("capture"), Column("kernel", "code"), Column("n", "count"), Column("wall ms", "ms")),
    (
        ("small", "gemm<4>", 1300, Spread(20.9, 0.25)),
        ("medium", None, None, None),
    ),
    phrase("**Times** of one instance:"),
)
REPORT = Report(
    "Where the time goes",
    (
        Section("first", "First", (Paragraph("A sentence."), Answer("small", "it takes 21 ms.", "21 ms"))),
        Section("table", "Table", (TABLE, FIGURE)),
        Section(
            "lists",
            "Lists",
            (
                Listing(("nsys profile python train.py", "# then", "nsys-analyze report"), "commands"),
                Listing((phrase("**small:** one"), "two")),
                Details("1 kernel", (Paragraph("Folded."), Listing(("a",)))),
            ),
        ),
        Section("none", "Nothing", ()),
    ),
)

GOLDEN = """\
# Where the time goes

## First

A sentence.

**small:** it takes 21 ms.

**Contents**

- [First](#first)
- [Table](#table)
- [Lists](#lists)
- [Nothing](#nothing)

## Table

**Times** of one instance:

| capture   | kernel    |     n |      wall ms |
|:----------|:----------|------:|-------------:|
| small     | `gemm<4>` | 1,300 | 20.90 ± 0.25 |
| medium    | –         |     – |            – |

![Time by phase](report_figures/one.png)

## Lists

```sh
nsys profile python train.py
# then
nsys-analyze report
```

- **small:** one
- two

<details><summary>1 kernel</summary>

Folded.

- a

</details>

## Nothing
"""


def test_every_block() -> None:
    text = render(REPORT, {"one": "report_figures/one.png"})
    assert text.replace("\N{NO-BREAK SPACE}", " ") == GOLDEN


def test_a_figure_that_was_not_drawn_is_left_out() -> None:
    expected = GOLDEN.replace("![Time by phase](report_figures/one.png)\n\n", "")
    assert render(REPORT, {}).replace("\N{NO-BREAK SPACE}", " ") == expected


def test_what_would_end_a_cell_is_escaped() -> None:
    table = Table((Column("a|b"), Column("name", "code")), (("x|y", "f(a | b)"), ("two\nlines", "|")))
    lines = render_block(table, {}).splitlines()
    assert [line.split(" | ") for line in lines[2:3]] == [[r"| x\|y     ", r"`f(a \| b)` |"]]
    assert lines[0].startswith(r"| a\|b ")
    assert lines[3] == r"| two lines | `\|`        |"
    assert len(lines) == 4


def test_numbers_in_texts_stay_as_they_are() -> None:
    table = Table((Column("version"), Column("n", "count")), (("13.0", 1), ("1e5", 2)))
    assert render_block(table, {}).splitlines()[2:] == ["| 13.0      |   1 |", "| 1e5       |   2 |"]


def test_a_table_without_rows() -> None:
    lines = render_block(Table((Column("capture"), Column("n", "count")), ()), {}).splitlines()
    assert lines[0].split() == ["|", "capture", "|", "n", "|"]
    assert len(lines) == 2


def test_a_long_cell_widens_no_other() -> None:
    name = "k" * 61
    lines = render_block(Table((Column("a"), Column("name", "code")), (("x", name), ("y", "short"))), {}).splitlines()
    assert lines == ["| a | name |", "|:--|:--|", f"| x | `{name}` |", "| y | `short` |"]


def test_the_contents_name_headings_as_github_does() -> None:
    titles = ("(a) How long, and why?", "Same title", "Same title", "Kernel attribution check")
    page = render(Report("t", tuple(Section(str(i), title, ()) for i, title in enumerate(titles))), {})
    assert re.findall(r"\]\((#.*)\)", page) == [
        "#a-how-long-and-why", "#same-title", "#same-title-1", "#kernel-attribution-check",
    ]  # fmt: skip


@given(
    st.lists(st.lists(st.text("ab <wbr>", max_size=120), min_size=2, max_size=2), min_size=1, max_size=9),
    st.integers(0, 3),
)
def test_a_table_that_is_wider_than_a_page_becomes_several(columns: list[list[str]], names: int) -> None:
    """Each has the columns that name a row; every other column stands in one of them, in order."""
    parts = fitting(columns, names)
    first = list(range(min(names, len(columns))))
    assert all(part[: len(first)] == first for part in parts)
    assert [i for part in parts for i in part[len(first) :]] == list(range(len(first), len(columns)))
    for part in parts:
        letters = [max(len(word) for text in columns[i] for word in re.split(" |<wbr>", text)) for i in part]
        assert sum(letters) * 8.6 + 27 * len(part) <= 821 or len(part) <= len(first) + 1


def test_the_parts_of_a_wide_table() -> None:
    """A column of 40 letters is 40 * 8.6 + 27 = 371 px wide, the name 1 * 8.6 + 27 = 36: two fit into 821 px."""
    columns = [["n", "1"], *([letter * 40, "1"] for letter in "abc")]
    assert fitting(columns, 1) == [[0, 1, 2], [0, 3]]
