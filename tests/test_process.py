from __future__ import annotations

import os
import shlex
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from nsys_analyzer.capture.jobs import locked
from nsys_analyzer.errors import CaptureError
from nsys_analyzer.system.process import Job, Result, last_lines, run_captured, run_job
from tests.support.sweeping import default_signals, wait_for


def python(code: str) -> list[str]:
    return [sys.executable, "-c", code]


@pytest.mark.parametrize(
    ("code", "ended"),
    [
        ("print('fine')", Result("ok")),
        (
            "import no_such_module",
            Result("failed", "exit code 1: ModuleNotFoundError: No module named 'no_such_module'"),
        ),
        (  # PyTorch says on which rank; a profiler goes on to speak
            "print('[rank1]: Traceback\\n[rank1]: ValueError: bad\\n[rank1]: \\nGenerated: a'); exit(1)",
            Result("failed", "exit code 1: ValueError: bad"),
        ),
        ("raise SystemExit(7)", Result("failed", "exit code 7: it printed nothing")),
        ("import os; os.kill(os.getpid(), 11)", Result("failed", "killed by SIGSEGV: it printed nothing")),
        (
            "print('torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2 GiB'); print('bye'); exit(1)",
            Result("oom", "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2 GiB"),
        ),
    ],
)
def test_how_a_program_ended(code: str, ended: Result, tmp_path: Path) -> None:
    assert run_job(Job(python(code)), tmp_path / "log") == ended


def test_output_is_added_to_the_log_and_only_the_new_is_judged(tmp_path: Path) -> None:
    log = tmp_path / "log"
    log.write_text("CUDA out of memory\n")
    assert run_job(Job(python("print('one'); exit(2)")), log) == Result("failed", "exit code 2: one")
    assert log.read_text() == "CUDA out of memory\none\n"
    assert last_lines(log) == "CUDA out of memory | one"


def test_a_program_that_is_not_there(tmp_path: Path) -> None:
    ended = run_job(Job(["/no/such/program"]), tmp_path / "log")
    assert ended == Result("failed", "/no/such/program cannot be run (No such file or directory)")


def alive(pid: int) -> bool:
    try:
        return bool(psutil.Process(pid).status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


def gone(pid: int) -> bool:
    deadline = time.monotonic() + 60
    while alive(pid) and time.monotonic() < deadline:
        time.sleep(0.02)
    return not alive(pid)


#: Starts a child that does not end when it is asked to, as a profiler's target may.
STUBBORN = """
import subprocess, sys, time
ignoring = '''import signal, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
print("on", flush=True)
time.sleep(600)'''
child = subprocess.Popen([sys.executable, "-c", ignoring], stdout=subprocess.PIPE)
child.stdout.readline()
print(child.pid, flush=True)
time.sleep(600)
"""


#: Starts a child as nsys does its target: in a session of its own, deaf to SIGTERM.
LEAVING = STUBBORN.replace("stdout=subprocess.PIPE", "stdout=subprocess.PIPE, start_new_session=True")


@pytest.mark.parametrize("code", [STUBBORN, LEAVING])
def test_a_time_out_ends_the_children_too(code: str, tmp_path: Path) -> None:
    log = tmp_path / "log"
    # The time begins when the child is there.
    result = run_job(Job(python(code), timeout_s=0.1), log, lambda: not log.read_text().endswith("\n"))
    assert result == Result("timeout", "stopped after 0.1 s")
    assert gone(int(log.read_text()))


def test_an_interrupt_ends_the_children_too(tmp_path: Path) -> None:
    tool, pid = tool_with(STUBBORN, tmp_path / "log")
    tool.send_signal(signal.SIGINT)
    tool.wait(60)
    assert "KeyboardInterrupt" in (tmp_path / "errors").read_text()
    assert gone(pid)


#: Runs a command in a folder, with a log, as a tool of its own that can be killed.
TOOL = """
import sys
from pathlib import Path
from nsys_analyzer.capture.jobs import locked
from nsys_analyzer.system.process import Job, run_job
with locked(Path(sys.argv[1])):
    run_job(Job(sys.argv[3:]), Path(sys.argv[2]))
"""
#: Leaves the group, and the session, as nsys's target does, and listens to no signal.
DEAF = "import os, signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print(os.getpid(), flush=True); "
DETACHED = f"""
import subprocess, sys, time
subprocess.Popen([sys.executable, "-c", {DEAF + "time.sleep(600)"!r}], start_new_session=True)
time.sleep(600)
"""


def tool_with(code: str, log: Path) -> tuple[subprocess.Popen[bytes], int]:
    """A tool that runs the code, and the process whose number the code has printed."""
    with log.with_name("errors").open("wb") as errors:
        command = [sys.executable, "-c", TOOL, str(log.parent), str(log), *python(code)]
        tool = subprocess.Popen(command, stderr=errors, preexec_fn=default_signals)
    wait_for(lambda: log.is_file() and log.read_text().endswith("\n"))
    return tool, int(log.read_text().split()[0])


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGQUIT, signal.SIGTERM, signal.SIGHUP, signal.SIGSEGV])
@pytest.mark.parametrize("code", [DEAF + "time.sleep(600)", DETACHED])
def test_nothing_outlives_the_tool_however_it_ends(number: signal.Signals, code: str, tmp_path: Path) -> None:
    tool, pid = tool_with(code, tmp_path / "log")
    tool.send_signal(number)
    tool.wait(60)
    assert gone(pid)


def test_a_profiler_that_is_killed_takes_its_target_along(tmp_path: Path) -> None:
    """nsys dies, and its target lives on in a session of its own."""
    log = tmp_path / "log"
    wait = f"\nwhile not open({str(log)!r}).read(): time.sleep(0.01)\nimport os; os.kill(os.getpid(), 9)"
    assert run_job(Job(python(DETACHED.replace("\ntime.sleep(600)", wait))), log).status == "failed"
    assert gone(int(log.read_text()))


def supervisors_of(pid: int) -> list[psutil.Process]:
    """The supervisors that a process has started."""
    return [
        child for child in psutil.Process(pid).children() if any("supervisor.py" in word for word in child.cmdline())
    ]


def test_what_outlived_its_supervisor_is_ended_by_the_next_run_there(tmp_path: Path) -> None:
    tools = {}
    for name in ("here", "here2"):
        (tmp_path / name).mkdir()
        tool, tools[name] = tool_with(DETACHED, tmp_path / name / "log")
        (supervisor,) = supervisors_of(tool.pid)
        tool.send_signal(signal.SIGSTOP)
        supervisor.kill()
        tool.kill()
        tool.wait(60)
    shutil.copytree(tmp_path / "here", tmp_path / "copy")
    with locked(tmp_path / "copy"), locked(tmp_path):
        assert all(map(alive, tools.values()))  # they are of other folders
    (tmp_path / "link").symlink_to("here")
    with locked(tmp_path / "link"):
        assert gone(tools["here"])
        assert alive(tools["here2"])
    with locked(tmp_path / "here2"):
        assert gone(tools["here2"])


def test_what_goes_on_behind_a_run_that_ended_well_is_left_alone(tmp_path: Path) -> None:
    # A service, such as a compiler's server, that has begun when its parent ends.
    code = DETACHED.replace(
        "\ntime.sleep(600)", f"\nwhile not open({str(tmp_path / 'log')!r}).read(): time.sleep(0.01)"
    )
    assert run_job(Job(python(code)), tmp_path / "log") == Result("ok")
    pid = int((tmp_path / "log").read_text())
    assert alive(pid)
    os.kill(pid, signal.SIGKILL)


#: Writes over its environment, as programs do that set their title.
UNMARKED = f"""
import os, sys
os.execve(sys.executable, [sys.executable, "-c", {DEAF + "time.sleep(600)"!r}], {{}})
"""


@pytest.mark.parametrize("detached", [False, True])
def test_a_target_without_the_mark_is_ended_too(detached: bool, tmp_path: Path) -> None:
    """In the program's session, or in one of its own below it."""
    below = (
        f"import subprocess, sys, time\nsubprocess.Popen([sys.executable, '-c', {UNMARKED!r}], start_new_session=True)"
    )
    tool, pid = tool_with(f"{below}\ntime.sleep(600)" if detached else UNMARKED, tmp_path / "log")
    tool.kill()
    tool.wait(60)
    assert gone(pid)


def test_what_does_not_end_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As a process that waits for a driver."""
    status = tmp_path.stat()
    mark = {"NSYS_ANALYZE_LOCKED_FOLDER": f"{status.st_dev}-{status.st_ino}"}
    with subprocess.Popen(["sleep", "600"], env={**os.environ, **mark}) as waiting:
        with monkeypatch.context() as context:
            context.setattr("psutil.Process.kill", lambda _: None)
            context.setattr("nsys_analyzer.capture.jobs._PATIENCE_S", 0)
            with pytest.raises(CaptureError, match=rf"still running \(process {waiting.pid}\)"), locked(tmp_path):
                pass
        waiting.kill()


def test_the_caller_is_never_ended(tmp_path: Path) -> None:
    """A resume may be typed in a terminal that a target has started."""
    code = "import pathlib; from nsys_analyzer.capture.jobs import locked\n"
    code += f"with locked(pathlib.Path({str(tmp_path)!r})): pass"
    status = tmp_path.stat()
    mark = {"NSYS_ANALYZE_LOCKED_FOLDER": f"{status.st_dev}-{status.st_ino}"}
    shell = f"{sys.executable} -c {shlex.quote(code)}; echo alive"
    done = subprocess.run(["sh", "-c", shell], env={**os.environ, **mark}, capture_output=True, text=True)
    assert (done.stdout, done.stderr) == ("alive\n", "")


def test_a_run_that_ends_well_leaves_no_supervisor(tmp_path: Path) -> None:
    assert run_job(Job(["true"]), tmp_path / "log") == Result("ok")
    assert supervisors_of(os.getpid()) == []


def test_output_that_is_captured() -> None:
    done = run_captured(python("import sys; print('ä'); print('no', file=sys.stderr); sys.exit(3)"), None)
    assert (done.stdout, done.stderr, done.returncode) == ("ä\n", "no\n", 3)
    missing = run_captured(["/no/such/program"], None)
    assert (missing.stderr, missing.returncode) == ("/no/such/program cannot be run (No such file or directory)\n", 127)


@pytest.mark.parametrize(("code", "status"), [("import os; os.kill(os.getpid(), 9)", "oom"), ("exit(1)", "failed")])
def test_only_what_was_killed_was_killed_for_memory(
    code: str, status: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The counter is the whole system's: it rises for others, too."""
    counts = iter([4, 5])
    monkeypatch.setattr("nsys_analyzer.system.process._oom_kills", lambda: next(counts))
    assert run_job(Job(python(code)), tmp_path / "log").status == status
