"""Tests the text of one block of each kind."""

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
    Spread,
    StepBars,
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
        Section("first", "First", (Paragraph("A sentence."), Answer(phrase("It takes `21 ms`."), "small"))),
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

**It takes `21 ms`.**

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


def test_a_long_table_is_not_padded() -> None:
    rows = tuple((f"row {i}", i) for i in range(21))
    assert render_block(Table((Column("a name"), Column("n", "count")), rows), {}).splitlines()[:3] == [
        "| a name | n |", "|:--|--:|", "| row 0 | 0 |",
    ]  # fmt: skip


def test_a_bar_is_letters_in_a_fence() -> None:
    """Of 96 letters 24 are a quarter."""
    bars = StepBars(("matmul", "idle"), (Bar("", (1.0, 3.0)),), "A step:", "One of two.")
    shade = "\N{LIGHT SHADE}"
    assert render_block(bars, {}).splitlines() == [
        "```", f"{'M' * 8} matmul {'M' * 8}{shade * 33} idle {shade * 33}",
        f"A step:  M matmul 1 ms 25 %  {shade} idle 3 ms 75 %", "One of two.", "```",
    ]  # fmt: skip


def test_a_share_is_a_bar_of_letters() -> None:
    """Of 12 letters; a share that is nearly nothing is one."""
    cells = [
        line.split("|")[1].strip()
        for line in render_block(Table((Column("", "bar"),), ((1.0,), (0.5,), (0.001,))), {}).splitlines()
    ]
    assert cells[2:] == ["\N{DARK SHADE}" * count for count in (12, 6, 1)]
