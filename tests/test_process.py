from __future__ import annotations

import os
import shlex
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from nsys_analyzer.errors import CaptureError
from nsys_analyzer.system.process import Ended, end_earlier_run, last_lines, run_captured, run_logged
from tests.support.sweeping import wait_for


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
        (  # PyTorch says on which rank; a profiler goes on to speak
            "print('[rank1]: Traceback\\n[rank1]: ValueError: bad\\n[rank1]: \\nGenerated: a'); exit(1)",
            Ended("failed", "exit code 1: ValueError: bad"),
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
from nsys_analyzer.system.process import run_logged
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


#: Runs a command with the log, as a tool of its own that can be killed.
TOOL = """
import sys
from pathlib import Path
from nsys_analyzer.system.process import run_logged
run_logged(sys.argv[2:], Path(sys.argv[1]), None)
"""
#: Leaves the group, and the session, as nsys's target does, and listens to no signal.
DEAF = "import os, signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print(os.getpid(), flush=True); "
DETACHED = f"""
import subprocess, sys, time
subprocess.Popen([sys.executable, "-c", {DEAF + "time.sleep(60)"!r}], start_new_session=True)
time.sleep(60)
"""


def tool_with(code: str, log: Path) -> tuple[subprocess.Popen[bytes], int]:
    """A tool that runs the code, and the process whose number the code has printed."""
    tool = subprocess.Popen([sys.executable, "-c", TOOL, str(log), *python(code)], stderr=subprocess.DEVNULL)
    wait_for(lambda: log.is_file() and log.read_text().endswith("\n"))
    return tool, int(log.read_text().split()[0])


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGQUIT, signal.SIGTERM, signal.SIGHUP, signal.SIGSEGV])
@pytest.mark.parametrize("code", [DEAF + "time.sleep(60)", DETACHED])
def test_nothing_outlives_the_tool_however_it_ends(number: signal.Signals, code: str, tmp_path: Path) -> None:
    tool, pid = tool_with(code, tmp_path / "log")
    tool.send_signal(number)
    tool.wait(20)
    assert gone(pid)


def test_a_profiler_that_is_killed_takes_its_target_along(tmp_path: Path) -> None:
    """nsys dies, and its target lives on in a session of its own."""
    code = DETACHED.replace("\ntime.sleep(60)", "\ntime.sleep(0.5); import os; os.kill(os.getpid(), 9)")
    assert run_logged(python(code), tmp_path / "log", None).status == "failed"
    assert gone(int((tmp_path / "log").read_text()))


def watchers_of(pid: int) -> list[int]:
    """The watchers that a process has started."""
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return [int(child) for child in children if b"watcher.py" in Path(f"/proc/{child}/cmdline").read_bytes()]


def test_what_outlived_its_watcher_is_ended_by_the_next_run_there(tmp_path: Path) -> None:
    (tmp_path / "here").mkdir()
    (tmp_path / "here2").mkdir()
    tool, pid = tool_with(DETACHED, tmp_path / "here/log")
    other, other_pid = tool_with(DETACHED, tmp_path / "here2/log")
    for one in (tool, other):
        (watcher,) = watchers_of(one.pid)
        os.kill(watcher, signal.SIGKILL)
        one.kill()
        one.wait(20)
    assert alive(pid)
    (tmp_path / "link").symlink_to("here")
    end_earlier_run(tmp_path / "link")
    assert gone(pid)
    assert alive(other_pid)  # another folder's
    end_earlier_run(tmp_path / "here2")
    assert gone(other_pid)


def test_another_run_below_or_beside_is_left_alone(tmp_path: Path) -> None:
    """Of a folder that was copied while it ran, and of a run into a folder far below, nothing is ended."""
    far = tmp_path / "a/b/c"
    far.mkdir(parents=True)
    tool, pid = tool_with(DEAF + "time.sleep(60)", far / "log")
    shutil.copytree(far, tmp_path / "copy")
    end_earlier_run(tmp_path / "copy")
    end_earlier_run(tmp_path)
    assert alive(pid)
    assert not list((tmp_path / "copy").glob(".*"))
    tool.kill()
    tool.wait(20)
    assert gone(pid)


def test_what_goes_on_behind_a_run_that_ended_well_is_left_alone(tmp_path: Path) -> None:
    code = DETACHED.replace("\ntime.sleep(60)", "\ntime.sleep(0.5)")  # a service, such as a compiler's cache
    assert run_logged(python(code), tmp_path / "log", None) == Ended("ok")
    pid = int((tmp_path / "log").read_text())
    end_earlier_run(tmp_path)
    assert alive(pid)
    os.kill(pid, signal.SIGKILL)


#: Writes over its environment, as programs do that set their title.
UNMARKED = f"""
import os, sys
os.execve(sys.executable, [sys.executable, "-c", {DEAF + "time.sleep(60)"!r}], {{}})
"""


@pytest.mark.parametrize("detached", [False, True])
def test_a_target_without_the_mark_is_ended_too(detached: bool, tmp_path: Path) -> None:
    """In the program's session, or in one of its own below it."""
    below = (
        f"import subprocess, sys, time\nsubprocess.Popen([sys.executable, '-c', {UNMARKED!r}], start_new_session=True)"
    )
    tool, pid = tool_with(f"{below}\ntime.sleep(60)" if detached else UNMARKED, tmp_path / "log")
    tool.kill()
    tool.wait(20)
    assert gone(pid)


def test_what_does_not_end_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("nsys_analyzer.system.watcher.end_all", lambda _: {7, 41})
    status = tmp_path.stat()
    (tmp_path / f".running-x_{status.st_dev}-{status.st_ino}").touch()
    with pytest.raises(CaptureError, match=r"A program of an earlier run into .* is still running") as caught:
        end_earlier_run(tmp_path)
    assert "(process 7, 41)" in caught.value.message


def test_the_caller_is_never_ended() -> None:
    """A resume may be typed in a terminal that a target has started."""
    code = "import os; from nsys_analyzer.system.watcher import end_all; print(end_all(b'MINE=1'), flush=True)"
    shell = f"{sys.executable} -c {shlex.quote(code)}; echo alive"
    done = subprocess.run(["sh", "-c", shell], env={**os.environ, "MINE": "1"}, capture_output=True, text=True)
    assert done.stdout == "set()\nalive\n"


def test_a_run_that_ends_well_leaves_no_watcher(tmp_path: Path) -> None:
    assert run_logged(["true"], tmp_path / "log", None) == Ended("ok")
    assert watchers_of(os.getpid()) == []


def test_output_that_is_captured() -> None:
    done = run_captured(python("import sys; print('ä'); print('no', file=sys.stderr); sys.exit(3)"), None)
    assert (done.stdout, done.stderr, done.returncode) == ("ä\n", "no\n", 3)
    with pytest.raises(FileNotFoundError):
        run_captured(["/no/such/program"], None)


@pytest.mark.parametrize(("code", "status"), [("import os; os.kill(os.getpid(), 9)", "oom"), ("exit(1)", "failed")])
def test_only_what_was_killed_was_killed_for_memory(
    code: str, status: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The counter is the whole system's: it rises for others, too."""
    counts = iter([4, 5])
    monkeypatch.setattr("nsys_analyzer.system.process._oom_kills", lambda: next(counts))
    assert run_logged(python(code), tmp_path / "log", None).status == status
