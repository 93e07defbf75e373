"""What a report says first on the terminal: a screen of a capture, of a run, and of many captures."""

from __future__ import annotations

import io
import re
import sys
from collections.abc import Callable
from dataclasses import replace
from itertools import product
from pathlib import Path

import pytest
from hypothesis import given
from rich.cells import cell_len
from rich.text import Text

from nsys_analyzer import Trace
from nsys_analyzer.analysis.summary.summarize import summarize
from nsys_analyzer.analysis.summary.summary import CaptureSummary
from nsys_analyzer.report.evidence import Evidence
from nsys_analyzer.report.model import TEXT_UNITS, Column, Section, Spread, Table, unfold_details
from nsys_analyzer.report.renderers.terminal import print_first_screen, print_section, print_table
from nsys_analyzer.report.screen import SafeStream
from nsys_analyzer.report.sections import build_report, select_first_screen
from nsys_analyzer.report.units import format_cell
from nsys_analyzer.text import plain
from tests.conftest import Main
from tests.support.hostile import TEXTS, WORST, controls
from tests.support.pages import EXAMPLES, built
from tests.support.ranks import Rank, one_capture, own_captures, write
from tests.test_ranks_report import late
from tests.test_report_command import RealCapture, two_steps
from tests.test_screen import Tty
from tests.test_steps_section import DIAGNOSIS, STEP

WIDTHS = [80, 100, 160]
#: Lines of the smallest screen.
ROOM = 24
SHADE = "\N{LIGHT SHADE}"


@pytest.fixture(autouse=True)
def terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    """A terminal with all colors, of 80 × 24."""
    for name in ("NO_COLOR", "FORCE_COLOR", "TTY_COMPATIBLE"):
        monkeypatch.delenv(name, raising=False)
    for name, value in (("TERM", "xterm"), ("COLORTERM", "truecolor"), ("COLUMNS", "80"), ("LINES", "24")):
        monkeypatch.setenv(name, value)


@pytest.fixture(scope="module")
def capture(tmp_path_factory: pytest.TempPathFactory) -> CaptureSummary:
    """A capture with a made up step of 90 ms."""
    trace = Trace.load(two_steps().write(tmp_path_factory.mktemp("t") / "t.sqlite"))
    (summary,) = summarize(trace, "train")
    return replace(summary, step=replace(STEP, busy_share=30 / 90), diagnosis=DIAGNOSIS)


class Utf8Tty(Tty):
    """A terminal that shows every letter."""

    encoding = "utf-8"


def printed(*captures: CaptureSummary, stream: io.StringIO | None = None) -> str:
    """What is printed of the captures, on a terminal unless another stream is given."""
    file = stream or Utf8Tty()
    before = sys.stdout
    sys.stdout = SafeStream(file)  # type: ignore[assignment]
    try:
        report = build_report(Evidence(captures))
        print_first_screen(report, select_first_screen(report))
    finally:
        sys.stdout = before
    return file.getvalue()


def without_colors(printed_text: str) -> str:
    """What is read on a terminal: it starts nothing there."""
    shown = Text.from_ansi(printed_text).plain
    assert not controls(shown)
    return shown


@pytest.fixture
def report_lines(run_main: Main, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[..., list[str]]:
    """Returns the lines that the report of some captures prints on a terminal, without colors."""

    def run(*captures: Path) -> list[str]:
        stream = Utf8Tty()
        monkeypatch.setattr(sys, "stdout", stream)
        assert run_main("report", *captures, "--no-figures", "-o", tmp_path / "report.md").code == 0
        return without_colors(stream.getvalue()).splitlines()

    return run


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("name", ["train_small256", "ddp2_small256", "functions_trace_gpt2", "graph_small256"])
def test_one_screen(
    real_capture: RealCapture, report_lines: Callable[..., list[str]], monkeypatch: pytest.MonkeyPatch, tmp_path: Path,
    name: str, width: int,
) -> None:  # fmt: skip
    monkeypatch.setenv("COLUMNS", str(width))
    lines = report_lines(real_capture(name))
    bars = [line for line in lines if SHADE in line and " ms " not in line]
    assert bars
    assert {cell_len(line) for line in bars} == {width}
    assert all(cell_len(line) <= width for line in lines[:-1])
    assert len(lines) <= ROOM
    assert lines[-1].startswith(f"{tmp_path / 'report.md'}")


def test_the_bar_the_answer_and_three_findings(capture: CaptureSummary) -> None:
    """Of 90 ms 20 are matmuls, 10 elementwise and 60 idle: 17.8, 8.9 and 53.3 of 80 cells."""
    shown = without_colors(printed(capture)).replace("\N{NO-BREAK SPACE}", " ")
    lines = [line.rstrip() for line in shown.splitlines()]
    assert lines[:6] == [
        "train",
        "NVIDIA H200 · fp32 · 2 training steps · nsys 2025.3",
        "90 ms a step under the profiler · GPU busy 33 % of the step",
        f"{' matmul '.center(18)}{'E'.center(9)}{' idle '.center(53, SHADE)}",
        "In these 90 ms:  M matmul 20 ms 22 %  E elementwise 10 ms 11 %",
        f"{SHADE} idle 60 ms 67 %",
    ]
    first_row = next(place for place, line in enumerate(lines) if line.startswith("1 "))
    said = [" ".join(line.split()[:-1]) for line in lines[first_row : first_row + 3]]
    assert said == [
        "1 The GPU waits for the input pipeline 41 – 45 49 %",
        "2 Attention is not fused 6.0 – 9.0 9 %",
        "3 The optimizer is not fused 3.1 – 7.2 6 %",
    ]
    assert lines[first_row + 3].split()[0] == "matmul,"  # the title above "phase"
    assert len(lines) <= ROOM


@pytest.mark.parametrize("setting", [("NO_COLOR", "1"), ("TERM", "dumb")])
def test_letters_in_place_of_colors(
    capture: CaptureSummary, monkeypatch: pytest.MonkeyPatch, setting: tuple[str, str]
) -> None:
    monkeypatch.setenv(*setting)
    text = printed(capture)
    bar = f"MMMMM matmul MMMMM{'E' * 9}{' idle '.center(53, SHADE)}"
    assert bar in text
    assert "\x1b[38" not in text
    assert "\x1b[48" not in text


def test_a_pipe_has_no_control(capture: CaptureSummary) -> None:
    text = printed(capture, stream=io.StringIO())
    assert not controls(text)
    assert "MMMMM matmul MMMMMEEEEEEEEE" in text


@given(TEXTS)
def test_names_are_text(capture: CaptureSummary, name: str) -> None:
    """No line is longer than the terminal, and none starts what is not ours, whatever a capture is called."""
    text = printed(replace(capture, name=name))
    assert {code[0] for code in text.split("\x1b")[1:]} <= {"["}
    assert all(cell_len(line) <= 80 for line in without_colors(text).splitlines())


@pytest.mark.parametrize("width", WIDTHS)
def test_the_worst_name(capture: CaptureSummary, monkeypatch: pytest.MonkeyPatch, width: int) -> None:
    monkeypatch.setenv("COLUMNS", str(width))
    shown = without_colors(printed(replace(capture, name=WORST)))
    assert max(cell_len(line) for line in shown.splitlines()) == width


def test_many_captures_are_a_row_each(capture: CaptureSummary) -> None:
    """A table has 20 rows, and says how many more there are."""
    for count, left in ((7, 0), (30, 10)):
        captures = [replace(capture, name=f"{WORST} {i}") for i in range(count)]
        text = without_colors(printed(*captures))
        assert max(map(cell_len, text.splitlines())) <= 80
        assert text.startswith(f"{count} captures\n")
        assert (f"{left}\N{NO-BREAK SPACE}rows" in text) == (left > 0)


def side_by_side(monkeypatch: pytest.MonkeyPatch, table: Table, width: int) -> list[str]:
    """The lines of a table on a terminal of this width."""
    stream = Utf8Tty()
    monkeypatch.setattr(sys, "stdout", SafeStream(stream))
    monkeypatch.setenv("COLUMNS", str(width))
    print_table(table)
    return without_colors(stream.getvalue()).splitlines()


def test_a_path_keeps_its_end_and_the_number_of_its_line(monkeypatch: pytest.MonkeyPatch) -> None:
    """The columns take 1, 38 and 7 of 80 letters, and the gaps 6: 80 - 52 = 28 letters remain for the path."""
    stream = Utf8Tty()
    monkeypatch.setattr(sys, "stdout", SafeStream(stream))
    columns = (Column("#"), Column("Do first"), Column("saves a step, ms", "ms"), Column("line", "code"))
    rows = (
        ("1", "A" * 38, 1.5, "/home/somebody/examples/programs/train.py:22"),
        ("2", "B" * 38, 1.5, "/home/an_unusually_long_name_without_a_folder.py:7"),
        ("3", "C" * 38, 1.5, "void a_kernel_of_a_very_long_name_that_is_cut<float>"),
        ("4", "D" * 38, 1.5, "train.py:22"),
    )
    print_section(Section("decision", "", (Table(columns, rows, names=2),)))
    shown = without_colors(stream.getvalue()).splitlines()
    assert max(map(cell_len, shown)) <= 80
    assert [line.split()[-1] for line in shown[-4:]] == [
        "…/programs/train.py:22", "…_name_without_a_folder.py:7", "a_kernel_of_a_very_lon…", "train.py:22"
    ]  # fmt: skip


def test_without_room_a_row_is_a_block(monkeypatch: pytest.MonkeyPatch) -> None:
    """Four names take 9, 9, 9 and 7 letters, three figures 14 each, and six spaces of 2: 34 + 42 + 12 = 88 letters."""
    names = tuple(Column(title, "text") for title in ("precision", "attention", "direction", "masking"))
    figures = tuple(Column(f"time {number} ms", "ms") for number in range(3))
    rows = tuple((name, "unfused", "forward", "on", *[Spread(1234.5, 67.2)] * 2, 5.0) for name in ("bf16", "fp32"))
    table = Table((*names, *figures), rows, names=3)
    wide = side_by_side(monkeypatch, table, 88)
    assert wide[0] == "precision  attention  direction  masking       time 0 ms       time 1 ms  time 2 ms"
    assert len(wide) == 3
    narrow = [line.replace("\N{NO-BREAK SPACE}", " ") for line in side_by_side(monkeypatch, table, 60)]
    assert narrow == [
        line
        for name in ("bf16", "fp32")
        for line in (
            f"{name} · unfused · forward",
            "  masking on  time 0 ms 1,234.5 ± 67.2",
            "  time 1 ms 1,234.5 ± 67.2  time 2 ms 5.000",
        )
    ]
    rows = tuple((*row[:-1], 4.0 + place) for place, row in enumerate(rows))
    assert side_by_side(monkeypatch, replace(table, rows=rows), 60)[0].startswith(
        "In each row: masking on, time 0 ms 1,2"
    )


@pytest.mark.parametrize("name", ["train_small256", "ranks", "benches", "mem_small256", "sweep"])
def test_no_table_breaks_a_number(
    real_capture: RealCapture, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, name: str
) -> None:
    """Each number of every table stands on one line, below a title of three lines at most or behind it."""
    paths = {
        "ranks": lambda: write(late(own_captures(8)), tmp_path),
        "benches": lambda: [path for path in EXAMPLES.glob("benches/*/") if path.name != "report_figures"],
        "sweep": lambda: [EXAMPLES / "sweep"],
    }.get(name, lambda: [real_capture(name)])()
    blocks = [block for section in built(*paths).sections for block in unfold_details(section.blocks)]
    tables = [replace(block, caption="") for block in blocks if isinstance(block, Table)]
    assert len(tables) > 5
    for table, width in product(tables, (60, 80, 120)):
        lines = side_by_side(monkeypatch, table, width)
        assert max(map(cell_len, lines)) <= width
        assert [line for line in lines if line != line.rstrip()] == []
        text = "\n".join(lines)
        for place, column in enumerate(table.columns):
            numbers = [plain(format_cell(row[place], column.unit)) for row in table.rows]
            for number in numbers if column.unit not in TEXT_UNITS else ():
                assert re.search(rf"(?<![\d.,]){re.escape(number)}(?![\d.]|,\d)", text), (table.caption, column.title)
        first = plain(format_cell(table.rows[0][0], table.columns[0].unit)).split()
        if first and not lines[0].startswith("In each row"):
            assert next(i for i, line in enumerate(lines) if first[0] in line) <= 3, table.columns


@pytest.mark.parametrize("made", [one_capture, own_captures])
def test_a_bar_for_each_rank(
    report_lines: Callable[..., list[str]], made: Callable[[int], list[Rank]], tmp_path: Path
) -> None:
    """Rank 0 waits for 0.1 of 1 ms while rank 1 computes; then each rank in short."""
    lines = report_lines(*write(late(made(2)), tmp_path))
    place = next(i for i, line in enumerate(lines) if line.startswith("rank 0"))
    first, second, legend = lines[place : place + 3]
    # Of 80 cells 8 are the label and 6 the time: of 66 cells 0.18 are 11.88, 0.28 are 18.48, and 0.1 are 6.6
    assert first == f"rank 0  {' compute '.center(12)}{'W'.center(7)}{'T'.center(6)}{' idle '.center(41, SHADE)}  1 ms"
    assert second == f"rank 1  {' compute '.center(18)}{'T'.center(7)}{' idle '.center(41, SHADE)}  1 ms"
    assert legend.startswith("Profiled steps:  # compute 0.18–0.28 ms  W waiting 0.00–0.10 ms")
    assert "Rank 1 is late by 0.1 ms" in " ".join(" ".join(lines).split())
    assert len(lines) <= ROOM


def test_of_many_ranks_their_run(report_lines: Callable[..., list[str]], tmp_path: Path) -> None:
    lines = report_lines(*write(late(own_captures(8)), tmp_path))
    assert len([line for line in lines if SHADE * 2 in line]) == 8
    assert "rank2" not in " ".join(lines)  # no capture by itself
    assert len(lines) <= ROOM


def test_of_many_runs_what_each_says(report_lines: Callable[..., list[str]], tmp_path: Path) -> None:
    folders = [tmp_path / f"{number}" for number in range(7)]
    for number, folder in enumerate(folders):
        folder.mkdir()
        write(late(own_captures(2), communicator=number + 1), folder, f"run{number}_rank{{}}")
    lines = report_lines(*folders)
    assert len([line for line in lines if line.startswith("2 ranks, data parallel (DDP). A step takes")]) == 7
    assert not any(SHADE in line for line in lines)
