"""One block of each kind, and the whole text it becomes."""

import re

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
from nsys_analyzer.report.renderers.markdown import render, render_block
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
