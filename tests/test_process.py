from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from nsys_analyzer.capture.process import Ended, last_lines, run_logged


def python(code: str) -> list[str]:
    return [sys.executable, "-c", code]


@pytest.mark.parametrize(
    ("code", "ended"),
    [
        ("print('fine')", Ended("ok")),
        (
            "import no_such_module",
            Ended("failed", "exit code 1: ModuleNotFoundError: No module named 'no_such_module'"),
        ),
        ("raise SystemExit(7)", Ended("failed", "exit code 7: it said nothing")),
        ("import os; os.kill(os.getpid(), 11)", Ended("failed", "killed by SIGSEGV: it said nothing")),
        (
            "print('torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2 GiB'); print('bye'); exit(1)",
            Ended("oom", "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2 GiB"),
        ),
    ],
)
def test_how_a_program_ended(code: str, ended: Ended, tmp_path: Path) -> None:
    assert run_logged(python(code), tmp_path / "log", None) == ended


def test_output_is_added_to_the_log_and_only_the_new_is_judged(tmp_path: Path) -> None:
    log = tmp_path / "log"
    log.write_text("CUDA out of memory\n")
    assert run_logged(python("print('one'); exit(2)"), log, None) == Ended("failed", "exit code 2: one")
    assert log.read_text() == "CUDA out of memory\none\n"
    assert last_lines(log) == "CUDA out of memory | one"


def test_a_program_that_is_not_there(tmp_path: Path) -> None:
    ended = run_logged(["/no/such/program"], tmp_path / "log", None)
    assert ended == Ended("failed", "/no/such/program cannot be run (No such file or directory)")


def alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return "Z" not in Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]


def gone(pid: int) -> bool:
    deadline = time.monotonic() + 10
    while alive(pid) and time.monotonic() < deadline:
        time.sleep(0.02)
    return not alive(pid)


#: Starts a child that does not end when it is asked to, as a profiler's target may.
STUBBORN = """
import subprocess, sys, time
ignoring = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('on', flush=True); time.sleep(60)"
child = subprocess.Popen([sys.executable, "-c", ignoring], stdout=subprocess.PIPE)
child.stdout.readline()
print(child.pid, flush=True)
time.sleep(60)
"""


def test_a_time_out_ends_the_children_too(tmp_path: Path) -> None:
    log = tmp_path / "log"
    assert run_logged(python(STUBBORN), log, 1.0) == Ended("timeout", "stopped after 1 s")
    assert gone(int(log.read_text()))


def test_an_interrupt_ends_the_children_too(tmp_path: Path) -> None:
    log = tmp_path / "log"
    code = f"""
from pathlib import Path
from nsys_analyzer.capture.process import run_logged
run_logged({python(STUBBORN)!r}, Path({str(log)!r}), None)
"""
    running = subprocess.Popen(python(code), stderr=subprocess.PIPE)
    deadline = time.monotonic() + 20
    while not (log.exists() and log.read_text().endswith("\n")) and time.monotonic() < deadline:
        time.sleep(0.02)
    running.send_signal(signal.SIGINT)
    _, errors = running.communicate(timeout=20)
    assert b"KeyboardInterrupt" in errors
    assert gone(int(log.read_text()))


def test_what_leaves_the_group_is_ended_too(tmp_path: Path) -> None:
    """As nsys's target does, which gets a session of its own."""
    log = tmp_path / "log"
    leaving = "import os, signal, time; os.setsid(); signal.signal(signal.SIGTERM, signal.SIG_IGN)"
    code = f"""
import subprocess, sys, time
child = subprocess.Popen([sys.executable, "-c", {leaving + "; print('on', flush=True); time.sleep(60)"!r}],
                         stdout=subprocess.PIPE)
child.stdout.readline()
print(child.pid, flush=True)
time.sleep(60)
"""
    assert run_logged(python(code), log, 1.5).status == "timeout"
    assert gone(int(log.read_text()))


@pytest.mark.parametrize(("code", "status"), [("import os; os.kill(os.getpid(), 9)", "oom"), ("exit(1)", "failed")])
def test_only_what_was_killed_was_killed_for_memory(
    code: str, status: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The counter is the whole system's: it rises for others, too."""
    counts = iter([4, 5])
    monkeypatch.setattr("nsys_analyzer.capture.process._oom_kills", lambda: next(counts))
    assert run_logged(python(code), tmp_path / "log", None).status == status
