"""What a report says on the terminal: a screen of a capture, a run or a few of them, and of many no more than one."""

from __future__ import annotations

import io
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from rich.cells import cell_len
from rich.text import Text

from nsys_analyzer import Trace
from nsys_analyzer.analysis.summary.summarize import summarize
from nsys_analyzer.analysis.summary.summary import CaptureSummary
from nsys_analyzer.report.evidence import Evidence
from nsys_analyzer.report.renderers.terminal import print_answers
from nsys_analyzer.report.screen import Screen
from nsys_analyzer.report.sections import build_report
from tests.conftest import Main
from tests.support.hostile import TEXTS, WORST, controls
from tests.support.ranks import one_capture, own_captures, write
from tests.test_ranks_report import late
from tests.test_report_command import RealCapture, two_steps
from tests.test_screen import Tty
from tests.test_steps_section import DIAGNOSIS, STEP

WIDTHS = [80, 100, 160]
#: Lines of the smallest screen, less those of the command and of the prompt.
ROOM = 24 - 2
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
    return replace(summary, step=STEP, diagnosis=DIAGNOSIS)


class Utf8Tty(Tty):
    """A terminal that shows every letter."""

    encoding = "utf-8"


def printed(*captures: CaptureSummary, stream: io.StringIO | None = None) -> str:
    """What is printed of the captures, on a terminal unless another stream is given."""
    file = stream or Utf8Tty()
    before = sys.stdout
    sys.stdout = Screen(file)  # type: ignore[assignment]
    try:
        print_answers(build_report(Evidence(captures)))
    finally:
        sys.stdout = before
    return file.getvalue()


def on_terminal(run_main: Main, monkeypatch: pytest.MonkeyPatch, *arguments: object) -> list[str]:
    """The lines that a command prints on a terminal, without colors."""
    stream = Utf8Tty()
    monkeypatch.setattr(sys, "stdout", stream)
    assert run_main(*arguments).code == 0
    plain = Text.from_ansi(stream.getvalue()).plain
    assert not controls(plain)
    return plain.splitlines()


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("name", ["train_small256", "ddp2_small256", "functions_trace_gpt2", "graph_small256"])
def test_one_screen(
    real_capture: RealCapture, run_main: Main, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, name: str, width: int
) -> None:
    monkeypatch.setenv("COLUMNS", str(width))
    lines = on_terminal(
        run_main, monkeypatch, "report", real_capture(name), "--no-figures", "-o", tmp_path / "report.md"
    )
    bars = [line for line in lines if SHADE in line and " ms " not in line]
    assert bars
    assert {cell_len(line) for line in bars} == {width}
    assert all(cell_len(line) <= width for line in lines[:-1])
    assert len(lines) <= ROOM
    assert lines[-1].startswith(f"{tmp_path / 'report.md'}")


def test_the_bar_the_answer_and_three_findings(capture: CaptureSummary) -> None:
    """Of 90 ms 20 are matmuls, 10 elementwise and 60 idle: 17.8, 8.9 and 53.3 of 80 cells."""
    lines = [line.rstrip() for line in Text.from_ansi(printed(capture)).plain.splitlines()]
    assert lines[0] == "train"
    assert lines[1] == f"{' matmul '.center(18)}{'E'.center(9)}{' idle '.center(53, SHADE)}"
    assert lines[2:4] == [
        "A step, 90.00 ms, profiled:  M matmul 20.00 ms 22%  E elementwise 10.00 ms 11%",
        f"{SHADE} idle 60.00 ms 67%",
    ]
    assert lines[4].split()[0] == "step"
    said = " ".join(" ".join(lines).split())
    assert "1. The GPU waits for the input pipeline: saves 41–45 ms" in said
    assert "3. The optimizer is not fused: saves 3.1–7.2 ms" in said
    assert "4. Copies" not in said


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
    shown = Text.from_ansi(text).plain
    assert not controls(shown)
    assert all(cell_len(line) <= 80 for line in shown.splitlines())


@pytest.mark.parametrize("width", WIDTHS)
def test_the_worst_name(capture: CaptureSummary, monkeypatch: pytest.MonkeyPatch, width: int) -> None:
    monkeypatch.setenv("COLUMNS", str(width))
    shown = Text.from_ansi(printed(replace(capture, name=WORST))).plain
    assert not controls(shown)
    assert max(cell_len(line) for line in shown.splitlines()) == width


@pytest.mark.parametrize("count", [2, 3])
def test_a_bar_for_each_of_a_few(capture: CaptureSummary, count: int) -> None:
    shown = Text.from_ansi(printed(*(replace(capture, name=f"train {i}") for i in range(count)))).plain
    assert shown.count(" matmul  ") == count
    assert shown.count("3. The optimizer is not fused") == count
    assert shown.count("\n\n") == count - 1


def test_many_fit_a_screen(capture: CaptureSummary, monkeypatch: pytest.MonkeyPatch) -> None:
    """A capture takes 5 lines: 7 of them fit 24 lines less 4 as a line each, and 39 lines less 4 in short."""
    captures = [replace(capture, name=f"train {i}") for i in range(30)]
    header, *rows = Text.from_ansi(printed(*captures[:7])).plain.splitlines()
    assert header.split("  ")[0] == "capture"
    assert [row.split() for row in rows] == [
        f"train {i} 88.0 The GPU waits for the input pipeline 41 – 45".split() for i in range(7)
    ]
    monkeypatch.setenv("LINES", "39")
    assert len(printed(*captures[:7]).splitlines()) == 35
    lines = Text.from_ansi(printed(*captures[:8])).plain.splitlines()
    assert len(lines) == 9


def test_a_line_counts_those_without_room(capture: CaptureSummary) -> None:
    """Of 20 lines the first is the header, and the last says how many are missing."""
    captures = [replace(capture, name=f"{WORST} {i}") for i in range(30)]
    text = Text.from_ansi(printed(*captures)).plain
    assert not controls(text)
    lines = text.splitlines()
    assert len(lines) == 20
    assert lines[-1] == "12 more captures: see the report."
    assert max(map(cell_len, lines)) <= 80
    piped = printed(*captures, stream=io.StringIO())
    assert piped.count("1. The GPU waits") == 30


@pytest.mark.parametrize("together", [True, False])
def test_a_bar_for_each_rank(
    run_main: Main, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, *, together: bool
) -> None:
    """Rank 0 waits for 0.1 of 1 ms while rank 1 computes; then each rank in short."""
    ranks = one_capture(2) if together else own_captures(2)
    paths = write(late(ranks), tmp_path, "both" if together else "rank{}")
    lines = on_terminal(run_main, monkeypatch, "report", *paths, "--no-figures", "-o", tmp_path / "report.md")
    first, second, legend = lines[1:4]
    # Of 80 cells 8 are the label and 10 the time: of 62 cells 0.18 are 11.16, 0.28 are 17.36, and 0.1 are 6.2
    working, waiting, sending = " compute ".center(11), "W".center(6), "T".center(6)
    assert first == f"rank 0  {working}{waiting}{sending}{' idle '.center(39, SHADE)}  1.000 ms"
    assert second == f"rank 1  {' compute '.center(17)}{sending}{' idle '.center(39, SHADE)}  1.000 ms"
    assert legend.startswith("Profiled steps:  # compute 0.18–0.28 ms  W waiting 0.00–0.10 ms")
    assert "rank 1 late by 0.100 ms" in " ".join(" ".join(lines).split())
    assert len(lines) <= ROOM


def test_of_many_ranks_their_run(run_main: Main, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    paths = write(late(own_captures(8)), tmp_path)
    lines = on_terminal(run_main, monkeypatch, "report", *paths, "--no-figures", "-o", tmp_path / "report.md")
    assert len([line for line in lines if SHADE * 2 in line]) == 8
    assert any(line.endswith("captures: see the report.") for line in lines)
    assert len(lines) <= ROOM


def test_of_many_runs_a_line_each(run_main: Main, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """What a run says first, then its captures' lines; of 21 there is room for 18."""
    for number in range(7):
        (tmp_path / f"{number}").mkdir()
        write(late(own_captures(2), communicator=number + 1), tmp_path / f"{number}", f"run{number}_rank{{}}")
    folders = [tmp_path / f"{number}" for number in range(7)]
    lines = on_terminal(run_main, monkeypatch, "report", *folders, "--no-figures", "-o", tmp_path / "report.md")
    assert len([line for line in lines if "data parallel (DDP); rank 1 late by" in line]) == 7
    assert "3 more captures: see the report." in lines
    assert len(lines) <= ROOM
