"""Tests that the program prints hostile names as text, without control characters."""

from __future__ import annotations

import csv
import io
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from rich.text import Text

from nsys_analyzer.cli.run_progress import show_progress, show_reading
from nsys_analyzer.report.screen import SafeStream, console
from nsys_analyzer.system.process import JobResult
from tests.conftest import Main
from tests.support.export import ADD, AUTOGRAD, GEMM, Export
from tests.support.hostile import WORST, controls

#: Of the worst text what a file can hold: SQLite takes no half of a surrogate pair, a path no NUL and no slash.
IN_SQLITE = "".join(one for one in WORST if not 0xD800 <= ord(one) < 0xE000)
IN_PATH = "".join(one for one in reversed(IN_SQLITE) if one not in "\0/")[:70]
PLACE = "HERE"


@pytest.fixture
def trace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A capture with the worst names everywhere, in a folder of such a name."""
    export = Export().thread(AUTOGRAD, IN_SQLITE).gpu(name=f"GPU {IN_SQLITE}")
    export.range("forward", 0, 100).kernel(GEMM + IN_SQLITE, 10, 20, 60).kernel(ADD, 30, 60, 70)
    export.range(IN_SQLITE, 200, None).kernel(IN_SQLITE, 210, 220, 230, AUTOGRAD)
    export.add("DIAGNOSTIC_EVENT", timestamp=0, severity=2, text=f"CUDA {IN_SQLITE}", globalPid=0)
    for name in ("NvDriverVersion", "OsVersion", "CpuModel"):
        export.add("TARGET_INFO_SYSTEM_ENV", name=name, value=IN_SQLITE)
    folder = tmp_path / IN_PATH
    folder.mkdir()
    monkeypatch.chdir(folder)
    return export.write(folder / f"{IN_PATH}.sqlite")


COMMANDS = {
    "report": ("report", PLACE, "-o", "report.md"),
    "report again": ("report", PLACE, "-o", f"{IN_PATH}\udc80.md"),
    "page": ("report", PLACE, "-o", "-"),
    "info": ("info", PLACE),
    "kernels": ("kernels", PLACE),
    "share": ("share", PLACE, "-o", "shared.sqlite"),
    "a phase of one's own": ("report", PLACE, "--phase-name", f"{WORST}={IN_SQLITE}", "--no-figures"),
    "no such range": ("report", PLACE, "--phase-name", f"{WORST}={WORST}", "--no-figures"),
    "no such phase": ("kernels", PLACE, "--phase", WORST),
    "no such class": ("kernels", PLACE, "--class", WORST),
    "no such file": ("info", f"{IN_PATH}.missing"),
    "no such model": ("report", PLACE, "--model", WORST),
    "no such option": ("report", f"--{WORST}"),
    "no such value": ("run", "--mode", WORST),
    "no such command": (WORST,),
    "a sweep": ("run", "--dry-run", "--device", "cpu", "--profiler", "none", "--target-option", WORST),
    "a program": ("run", "--dry-run", "--profiler", "torch", "--", "python", WORST),
    "an experiment": ("bench", "attention", "--dry-run", "--device", "cpu", "--output-dir", IN_PATH),
    "a place": ("doctor", "--output-dir", IN_PATH),
}
FAIL = tuple(name for name in COMMANDS if name.startswith(("no such", "bad")) and name != "no such range")


@pytest.mark.parametrize("name", COMMANDS)
def test_no_control_reaches_the_terminal(trace: Path, run_main: Main, name: str) -> None:
    exit_code, *both = run_main(*(trace if word == PLACE else word for word in COMMANDS[name]))
    printed = "".join(both)
    assert printed
    assert not controls(printed)
    printed.encode()
    assert "\ufdd0" not in printed
    if name in FAIL:
        assert exit_code in (1, 2)
        assert exit_code == 2 or len(printed.splitlines()) == 1
    elif name != "a place":  # this machine may have nothing to capture with
        assert exit_code == 0, printed


def test_data_is_as_it_was_recorded(trace: Path, run_main: Main) -> None:
    _, text, _ = run_main("kernels", trace, "--format", "csv")
    assert IN_SQLITE in {row["name"] for row in csv.DictReader(io.StringIO(text, newline=""))}
    _, text, _ = run_main("kernels", trace, "--format", "json")
    assert IN_SQLITE in {row["name"] for row in json.loads(text)}
    _, text, _ = run_main("report", trace, "--format", "json")
    assert f"GPU {IN_SQLITE}" in {capture["gpu"] for capture in json.loads(text)["captures"]}


class Tty(io.StringIO):
    """A terminal that keeps what it was given."""

    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize("kind", ["csv", "json"])
def test_data_on_a_terminal_is_text(trace: Path, run_main: Main, monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    terminal = Tty()
    monkeypatch.setattr(sys, "stdout", terminal)
    assert run_main("kernels", trace, "--format", kind)[0] == 0
    assert "sgemm" in terminal.getvalue()
    assert not controls(terminal.getvalue())


def test_colours_are_those_of_the_program(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = Tty()
    monkeypatch.setattr(sys, "stdout", SafeStream(terminal))
    monkeypatch.setenv("TERM", "xterm")
    for name in ("NO_COLOR", "FORCE_COLOR"):
        monkeypatch.delenv(name, raising=False)
    console().print(Text("a\x1b[31mb", "bold"))
    assert terminal.getvalue() == "\x1b[1ma\N{REPLACEMENT CHARACTER}[31mb\x1b[0m\n"


def test_the_bar_of_a_sweep_has_its_moves_and_no_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a bar writes with a tame name is all that it writes with the worst one."""

    def controls_of(name: str) -> set[str]:
        terminal = Tty()
        monkeypatch.setattr(sys, "stderr", SafeStream(terminal))
        monkeypatch.setenv("TERM", "xterm")
        with show_progress(2, 0) as progress:
            progress.started(name, "profiling")
            progress.ended(name, JobResult("failed", name), 1.0)
        assert "failed after 1 s" in terminal.getvalue()
        return controls(terminal.getvalue())

    assert controls_of(WORST) == controls_of("tame") == {"\x1b", "\r"}


def test_captures_that_are_read_are_counted_in_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = Tty()
    monkeypatch.setattr(sys, "stderr", SafeStream(terminal))
    monkeypatch.setenv("TERM", "xterm")
    with show_reading(2) as done:
        done()
        done()
    assert "2/2" in terminal.getvalue()
    assert terminal.getvalue().count("\n") == 1
    with show_reading(1) as done:  # one capture, or no terminal: no bar
        done()
    monkeypatch.setattr(sys, "stderr", other := io.StringIO())
    with show_reading(2) as done:
        done()
    assert other.getvalue() == ""


def test_an_ascii_terminal_is_no_way_around(trace: Path) -> None:
    """click would write to the bytes below a stream whose encoding is ASCII."""
    done = subprocess.run(
        [sys.executable, "-m", "nsys_analyzer", "info", os.fsencode(trace)],
        env={**os.environ, "PYTHONIOENCODING": "ascii"}, capture_output=True, check=True,
    )  # fmt: skip
    assert not controls(done.stdout.decode("ascii"))
    assert done.stderr == b""
