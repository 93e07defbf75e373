"""Runs a job until it ends, times out or is interrupted; nothing that it started outlives this process.

Each program runs below a supervisor, which is this file as a program:

    python process.py PROCESS_ID first|all PROGRAM ARGUMENTS...

It ends all that the program has started once that fails, is asked to end, or whoever started it, ``PROCESS_ID``, is
gone. The kernel signals the supervisor when its caller dies, even by SIGKILL, and hands it every descendant that loses
its own parent (it is their subreaper): a target to which a profiler gave a session of its own is found, and one that
wrote over its environment. SIGTERM asks the program to end, a second one ends all. What goes on behind a program that
ended well, as a compiler's server does, is left alone, unless ``all`` is to end with it.
"""

from __future__ import annotations

import math
import os
import re
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

#: The exit code of a program that cannot be run, as shells and the supervisor have it.
CANNOT_RUN = 127
_PARENT_DEATH_SIGNAL, _CHILD_SUBREAPER = 1, 36  # of prctl(2), which Linux alone has
_GRACE_S = 5
_PATIENCE_S = 10  # for what does not end although it was killed, as one that waits for a driver
_TICK_S = 0.2
_KILL_AGAIN_S = 0.02
#: Being asked to end, and being interrupted.
_ASKED = (-signal.SIGTERM, 128 + signal.SIGTERM, -signal.SIGINT, 128 + signal.SIGINT)
#: Until a profiler has written what it recorded of a server.
_WRITING_S = 120
_TAIL_BYTES = 20_000
_OUT_OF_MEMORY = re.compile(
    r"OutOfMemoryError|CUDA out of memory|CUDA error: out of memory|CUBLAS_STATUS_ALLOC_FAILED|MemoryError"
    r"|DefaultCPUAllocator: (?:can't allocate|not enough) memory"
)
_RANK = re.compile(r"^\[rank\d+\]: ?")
_ERROR = re.compile(r"[\w.]*(Error|Exception|Interrupt|Exit)\b")


@dataclass(frozen=True)
class Job:
    """A command to run.

    Attributes:
        command: the program and its arguments.
        environment: variables that are added to those of this process.
        timeout_s: time limit in seconds; None for no limit.
        runs_on: whether it runs until it is stopped, as a server does. It then succeeds if a signal ends it: from its
            profiler, on an interrupt, or at the time limit.
        folder: working folder; None for that of this process.
        ends_descendants: whether every process that it started ends with it.
    """

    command: Sequence[str]
    environment: Mapping[str, str] = field(default_factory=dict)
    timeout_s: float | None = None
    runs_on: bool = False
    folder: Path | None = None
    ends_descendants: bool = False


@dataclass(frozen=True)
class JobResult:
    """How a job ended: ``ok``, ``oom``, ``failed`` or ``timeout``, and a line with the reason if not ok."""

    status: str
    message: str | None = None


@dataclass(frozen=True)
class Progress:
    """Who is told: the name of what is run and what is done with it; and how it ended, after how many seconds."""

    started: Callable[[str, str], None]
    ended: Callable[[str, JobResult, float], None]


def run_job(job: Job, log: Path, made_progress: Callable[[], bool] = lambda: False) -> JobResult:
    """Runs a job, its output at the end of ``log``, and waits for it.

    When the time is up, on an interrupt, where the program fails or this process is killed, all that it started is
    ended, a profiler's target too. The time begins anew whenever ``made_progress``, asked a few times a second, returns
    True.

    Raises:
        KeyboardInterrupt: after all of it is gone; not where it ``runs_on``, which is how it ends.
        OSError: the log cannot be written.
    """
    limit_s = math.inf if job.timeout_s is None else job.timeout_s
    with log.open("ab") as output:
        start = output.tell()
        variables = {**os.environ, **job.environment}
        options = {"stdout": output, "stderr": output, "env": variables, "cwd": job.folder}
        with _started(job.command, ends_descendants=job.ends_descendants, **options) as process:
            deadline = time.monotonic() + limit_s
            try:
                while process.poll() is None:
                    if made_progress():
                        deadline = time.monotonic() + limit_s
                    elif time.monotonic() >= deadline and job.runs_on:
                        _end(process, _WRITING_S)
                    elif time.monotonic() >= deadline:
                        _end(process)
                        return JobResult("timeout", f"stopped after {limit_s:g} s")
                    with suppress(subprocess.TimeoutExpired):
                        process.wait(min(_TICK_S, max(deadline - time.monotonic(), 0)))
            except KeyboardInterrupt:
                if not job.runs_on:
                    raise
                _end(process, _WRITING_S)
    code = process.returncode
    if code == 0 or (job.runs_on and code in _ASKED):
        return JobResult("ok")
    reason = find_failure_line(log, start)
    if _OUT_OF_MEMORY.search(reason):
        return JobResult("oom", reason)
    if code == CANNOT_RUN:
        return JobResult("failed", reason)
    how = f"killed by {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
    return JobResult("failed", f"{how}: {reason}")


def run_captured(command: Sequence[str | Path], timeout_s: float | None) -> subprocess.CompletedProcess[str]:
    """Runs a command to its end and returns its output; nothing that it started outlives a time-out or an interrupt.

    One that cannot be run has the exit code 127, and its error output says why.

    Raises:
        subprocess.TimeoutExpired: it did not end within ``timeout_s`` seconds; None is no limit.
    """
    with _started(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        output = process.communicate(timeout=timeout_s)
    return subprocess.CompletedProcess(command, process.returncode, *(part.decode(errors="replace") for part in output))


@contextmanager
def _started(
    command: Sequence[str | Path], *, ends_descendants: bool = False, **options: Any
) -> Iterator[subprocess.Popen[bytes]]:
    """Starts a program below a supervisor, for the block; an error in there, as an interrupt is one, ends all of it."""
    supervised = [sys.executable, __file__, str(os.getpid()), "all" if ends_descendants else "first", *command]
    with subprocess.Popen(supervised, stdin=subprocess.DEVNULL, start_new_session=True, **options) as process:
        try:
            yield process
        except BaseException:
            _end(process)
            raise


def _end(process: subprocess.Popen[bytes], grace_s: float = _GRACE_S) -> None:
    """Asks a program to end, and ends all that is left of it a moment later; a second interrupt does so at once."""
    process.terminate()
    try:
        with suppress(subprocess.TimeoutExpired):
            process.wait(grace_s)
    finally:
        process.terminate()
        try:
            process.wait(_PATIENCE_S)
        except subprocess.TimeoutExpired:
            process.kill()


def last_lines(log: Path, lines: int = 3) -> str:
    """Returns the last lines of a log that are not empty, as one."""
    return " | ".join(_lines(log, 0)[-lines:])


def find_failure_line(log: Path, start: int = 0) -> str:
    """Returns the line of a log, from a position on, that says why a program failed: memory, an error, or its last."""
    lines = _lines(log, start)
    full = [line for line in lines if _OUT_OF_MEMORY.search(line)]
    errors = [line for line in lines if _ERROR.match(line)]  # a profiler goes on to speak after its target has died
    return (full or errors or lines or ["it printed nothing"])[-1]


def _lines(log: Path, start: int) -> list[str]:
    """Returns the last lines of a log that are not empty, without the rank that PyTorch puts before them."""
    with log.open("rb") as file:
        file.seek(max(start, log.stat().st_size - _TAIL_BYTES))
        text = file.read().decode(errors="replace")
    return [line for raw in text.splitlines() if (line := _RANK.sub("", raw).strip())]


# --- the supervisor ---


def signal_when_parent_dies(number: signal.Signals) -> None:
    """Has the kernel send this process a signal when its parent dies."""
    import ctypes  # what runs no program starts without it

    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PARENT_DEATH_SIGNAL, number)


def _supervise(parent: int, what_ends: str, command: list[str]) -> int:
    """Runs a command to its end, and with it ``all`` that it started or itself alone, the ``first``.

    Returns its exit code, negative for a signal.
    """
    import ctypes

    import psutil

    requests, program = 0, None

    def kill_descendants(*_: object) -> None:
        """Kills every process below this one, again and again: one that is being started is seen the next time."""
        for process in psutil.Process().children(recursive=True):
            with suppress(psutil.NoSuchProcess):
                process.kill()
        signal.setitimer(signal.ITIMER_REAL, _KILL_AGAIN_S)

    def end(*_: object) -> None:
        nonlocal requests
        requests += 1
        if requests > 1 or os.getppid() != parent:
            kill_descendants()
        elif program:
            with suppress(ProcessLookupError):
                os.killpg(program.pid, signal.SIGTERM)

    signal.signal(signal.SIGALRM, kill_descendants)
    signal.signal(signal.SIGTERM, end)
    signal_when_parent_dies(signal.SIGTERM)
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_CHILD_SUBREAPER, 1)
    try:
        program = subprocess.Popen(
            command, start_new_session=True, preexec_fn=lambda: signal_when_parent_dies(signal.SIGKILL)
        )
    except OSError as error:
        print(f"{command[0]} cannot be run ({error.strerror})", file=sys.stderr)
        return CANNOT_RUN
    if requests or os.getppid() != parent:  # before there was a program to ask, or the kernel knew of the parent
        kill_descendants()
    code = 0
    with suppress(ChildProcessError):  # until no child is left
        while True:
            ended, status = os.wait()
            if ended == program.pid:
                code = os.waitstatus_to_exitcode(status)
                if code == 0 and not requests and what_ends == "first":
                    break
                kill_descendants()  # a profiler that was killed leaves its target behind
    signal.setitimer(signal.ITIMER_REAL, 0)
    return code


if __name__ == "__main__":
    exit_code = _supervise(int(sys.argv[1]), sys.argv[2], sys.argv[3:])
    if exit_code < 0:  # ends as the program did
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        with suppress(OSError):  # nobody handles SIGKILL
            signal.signal(-exit_code, signal.SIG_DFL)
        os.kill(os.getpid(), -exit_code)
    sys.exit(exit_code)
