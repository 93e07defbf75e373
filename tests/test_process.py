"""Tests the supervisor of processes: how they ended, and that none of them outlives its starter."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from nsys_analyzer.system.process import Job, JobResult, read_last_lines, run_captured, run_job
from tests.support.sweeping import default_signals, wait_for


def python(code: str) -> list[str]:
    return [sys.executable, "-c", code]


@pytest.mark.parametrize(
    ("code", "ended"),
    [
        ("print('fine')", JobResult("ok")),
        (
            "import no_such_module",
            JobResult("failed", "exit code 1: ModuleNotFoundError: No module named 'no_such_module'"),
        ),
        (  # PyTorch says on which rank; a profiler goes on to speak
            "print('[rank1]: Traceback\\n[rank1]: ValueError: bad\\n[rank1]: \\nGenerated: a'); exit(1)",
            JobResult("failed", "exit code 1: ValueError: bad"),
        ),
        ("raise SystemExit(7)", JobResult("failed", "exit code 7: it printed nothing")),
        ("import os; os.kill(os.getpid(), 11)", JobResult("failed", "killed by SIGSEGV: it printed nothing")),
        (
            "print('torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2 GiB'); print('bye'); exit(1)",
            JobResult("oom", "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2 GiB"),
        ),
    ],
)
def test_how_a_program_ended(code: str, ended: JobResult, tmp_path: Path) -> None:
    assert run_job(Job(python(code)), tmp_path / "log") == ended


@pytest.mark.parametrize("handler", ["", "signal.signal(signal.SIGTERM, lambda *_: sys.exit(0));"])
def test_a_program_that_runs_on_ends_well_on_an_interrupt_and_after_its_time(handler: str, tmp_path: Path) -> None:
    log = tmp_path / "log"
    program = python(f"import signal, sys, time; {handler} print('serves', flush=True); time.sleep(99)")
    interrupts = iter([KeyboardInterrupt])

    def interrupt() -> bool:
        if log.read_text() and next(interrupts, None):
            raise KeyboardInterrupt
        return False

    assert run_job(Job(program, is_server=True), log, interrupt) == JobResult("ok")
    assert run_job(Job(program, timeout_s=2, is_server=True), log) == JobResult("ok")
    failed = JobResult("failed", "exit code 1: no port")
    assert run_job(Job(python("raise SystemExit('no port')"), is_server=True), log) == failed


def test_output_is_added_to_the_log_and_only_the_new_is_judged(tmp_path: Path) -> None:
    log = tmp_path / "log"
    log.write_text("CUDA out of memory\n")
    assert run_job(Job(python("print('one'); exit(2)")), log) == JobResult("failed", "exit code 2: one")
    assert log.read_text() == "CUDA out of memory\none\n"
    assert read_last_lines(log) == "CUDA out of memory | one"


def test_a_program_that_is_not_there(tmp_path: Path) -> None:
    ended = run_job(Job(["/no/such/program"]), tmp_path / "log")
    assert ended == JobResult("failed", "/no/such/program cannot be run (No such file or directory)")


def alive(pid: int) -> bool:
    try:
        return bool(psutil.Process(pid).status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


def gone(pid: int) -> bool:
    wait_for(lambda: not alive(pid))
    return True


#: Leaves the group, and the session, as nsys's target does, and listens to no signal.
DEAF = "import os, signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print(os.getpid(), flush=True); "
DETACHED = f"""
import subprocess, sys, time
subprocess.Popen([sys.executable, "-c", {DEAF + "time.sleep(600)"!r}], start_new_session=True)
time.sleep(600)
"""
#: Writes over its environment, as programs do that set their title.
UNMARKED = f"""
import os, sys
os.execve(sys.executable, [sys.executable, "-c", {DEAF + "time.sleep(600)"!r}], {{}})
"""


@pytest.mark.parametrize("code", [DEAF + "time.sleep(600)", DETACHED])
def test_a_time_out_ends_the_children_too(code: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("nsys_analyzer.system.process._GRACE_S", 0.1)
    log = tmp_path / "log"
    # The time begins when the child is there.
    result = run_job(Job(python(code), timeout_s=0.1), log, lambda: not log.read_text().endswith("\n"))
    assert result == JobResult("timeout", "stopped after 0.1 s")
    assert gone(int(log.read_text()))


#: Runs a command with a log, as a tool of its own that can be killed.
TOOL = """
import sys
from pathlib import Path
from nsys_analyzer.system.process import Job, run_job
run_job(Job(sys.argv[2:]), Path(sys.argv[1]))
"""


@pytest.mark.parametrize(
    ("number", "code"),
    [
        (signal.SIGINT, DETACHED),
        (signal.SIGKILL, DETACHED),
        (signal.SIGKILL, UNMARKED),
        (signal.SIGTERM, DEAF + "time.sleep(600)"),
    ],
)
def test_nothing_outlives_the_tool_however_it_ends(number: signal.Signals, code: str, tmp_path: Path) -> None:
    log = tmp_path / "log"
    command = [sys.executable, "-c", TOOL, str(log), *python(code)]
    with subprocess.Popen(command, stderr=subprocess.DEVNULL, preexec_fn=default_signals) as tool:
        wait_for(lambda: log.is_file() and log.read_text().endswith("\n"))
        tool.send_signal(number)
    assert tool.returncode == -number
    assert gone(int(log.read_text().split()[0]))


def detached_until(log: Path, end: str = "") -> str:
    """Code that starts a service and goes on to its end once that has begun."""
    return DETACHED.replace("\ntime.sleep(600)", f"\nwhile not open({str(log)!r}).read(): time.sleep(0.01)\n{end}")


def test_a_profiler_that_is_killed_takes_its_target_along(tmp_path: Path) -> None:
    """nsys dies, and its target lives on in a session of its own."""
    log = tmp_path / "log"
    end = "import os; os.kill(os.getpid(), 9)"
    assert run_job(Job(python(detached_until(log, end))), log).status == "failed"
    assert gone(int(log.read_text()))


def test_what_goes_on_behind_a_run_that_ended_well_is_left_alone(tmp_path: Path) -> None:
    """A service, such as a compiler's server; the supervisor has ended."""
    log = tmp_path / "log"
    assert run_job(Job(python(detached_until(log))), log) == JobResult("ok")
    assert alive(int(log.read_text()))
    os.kill(int(log.read_text()), signal.SIGKILL)
    assert not [child for child in psutil.Process().children() if "process.py" in " ".join(child.cmdline())]


def test_output_that_is_captured() -> None:
    done = run_captured(python("import sys; print('ä'); print('no', file=sys.stderr); sys.exit(3)"), None)
    assert (done.stdout, done.stderr, done.returncode) == ("ä\n", "no\n", 3)
    missing = run_captured(["/no/such/program"], None)
    assert (missing.stderr, missing.returncode) == ("/no/such/program cannot be run (No such file or directory)\n", 127)
