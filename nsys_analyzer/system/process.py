"""Runs a program until it ends, reaches its time limit, or is interrupted. No process of it outlives this process.

Each program runs below a supervisor, which is this file run as a program:

    python process.py PROCESS_ID first|all PROGRAM ARGUMENTS...

The supervisor ends all processes that the program started when the program fails, when the supervisor is asked to end,
or when its caller, ``PROCESS_ID``, has died. The kernel signals the supervisor when its caller dies, even by SIGKILL.
The supervisor is also the subreaper of its descendants: the kernel makes it the parent of each process whose parent
dies. So the supervisor also finds a process that runs in a session of its own or has overwritten its environment. The
first SIGTERM asks the program to end, and a second SIGTERM kills all processes. If the program succeeds, its background
processes, such as a compiler's server, continue to run with ``first``, and are killed with ``all``.
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

#: The exit code of a program that cannot be run, both of shells and of the supervisor.
CANNOT_RUN = 127
_PARENT_DEATH_SIGNAL, _CHILD_SUBREAPER = 1, 36  # options of prctl(2), which only Linux has
#: A program that was asked to end is killed after this time.
_GRACE_S = 5
#: The supervisor is killed, too, if killed processes take longer than this to end, because they may hang in a driver.
_KILL_TIMEOUT_S = 10
_POLL_INTERVAL_S = 0.2
_KILL_INTERVAL_S = 0.02
#: The exit codes of a process that ends after a request to end (SIGTERM) and after an interrupt (SIGINT).
_STOPPED_EXIT_CODES = (-signal.SIGTERM, 128 + signal.SIGTERM, -signal.SIGINT, 128 + signal.SIGINT)
#: A profiler that was asked to end is killed after this time. It writes the report of a server when it ends.
_REPORT_TIMEOUT_S = 120
#: The reason for a failure is searched in this many bytes at the end of the log.
_TAIL_BYTES = 20_000
_OUT_OF_MEMORY = re.compile(
    r"OutOfMemoryError|CUDA out of memory|CUDA error: out of memory|CUBLAS_STATUS_ALLOC_FAILED|MemoryError"
    r"|DefaultCPUAllocator: (?:can't allocate|not enough) memory"
)
_RANK_PREFIX = re.compile(r"^\[rank\d+\]: ?")
_ERROR_LINE = re.compile(r"[\w.]*(Error|Exception|Interrupt|Exit)\b")


@dataclass(frozen=True)
class Job:
    """A command to run.

    Attributes:
        command: the program and its arguments.
        environment: variables that are added to those of this process.
        timeout_s: time limit in seconds; None for no limit.
        is_server: whether the program runs until it is stopped, as a server does. Such a job succeeds if a signal
            ends the program: the signal may be from the profiler, or follow an interrupt or the time limit.
        folder: working folder; None for the working folder of this process.
        ends_descendants: whether every process that the program started ends with the program.
    """

    command: Sequence[str]
    environment: Mapping[str, str] = field(default_factory=dict)
    timeout_s: float | None = None
    is_server: bool = False
    folder: Path | None = None
    ends_descendants: bool = False


@dataclass(frozen=True)
class JobResult:
    """The outcome of a job: the status ``ok``, ``oom``, ``failed`` or ``timeout``, and one line with the reason."""

    status: str
    message: str | None = None


@dataclass(frozen=True)
class Progress:
    """Callbacks for the progress of jobs.

    Attributes:
        started: called with the job's name and its activity, such as "timing".
        ended: called with the job's name, its result and its duration in seconds.
    """

    started: Callable[[str, str], None]
    ended: Callable[[str, JobResult, float], None]


def run_job(job: Job, log: Path, made_progress: Callable[[], bool] = lambda: False) -> JobResult:
    """Runs a job, appends its output to a log, and returns its result.

    All processes that the job started, including the program under a profiler, are ended at the time limit, on an
    interrupt, if the job fails, and if this process is killed.

    Args:
        job: the job.
        log: the file for its output.
        made_progress: a function that is called a few times per second. The time limit starts again if it returns True.

    Raises:
        KeyboardInterrupt: on an interrupt, after all processes ended. It is not raised for a job with
            ``is_server``, which an interrupt normally ends.
        OSError: the log cannot be written.
    """
    limit_s = math.inf if job.timeout_s is None else job.timeout_s
    with log.open("ab") as output:
        start = output.tell()
        variables = {**os.environ, **job.environment}
        options = {"stdout": output, "stderr": output, "env": variables, "cwd": job.folder}
        with _start_supervised(job.command, ends_descendants=job.ends_descendants, **options) as process:
            deadline = time.monotonic() + limit_s
            try:
                while process.poll() is None:
                    if made_progress():
                        deadline = time.monotonic() + limit_s
                    elif time.monotonic() >= deadline and job.is_server:
                        _end_or_kill(process, _REPORT_TIMEOUT_S)
                    elif time.monotonic() >= deadline:
                        _end_or_kill(process)
                        return JobResult("timeout", f"stopped after {limit_s:g} s")
                    with suppress(subprocess.TimeoutExpired):
                        process.wait(min(_POLL_INTERVAL_S, max(deadline - time.monotonic(), 0)))
            except KeyboardInterrupt:
                if not job.is_server:
                    raise
                _end_or_kill(process, _REPORT_TIMEOUT_S)
    code = process.returncode
    if code == 0 or (job.is_server and code in _STOPPED_EXIT_CODES):
        return JobResult("ok")
    reason = find_failure_line(log, start)
    if _OUT_OF_MEMORY.search(reason):
        return JobResult("oom", reason)
    if code == CANNOT_RUN:
        return JobResult("failed", reason)
    ending = f"killed by {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
    return JobResult("failed", f"{ending}: {reason}")


def run_captured(command: Sequence[str | Path], timeout_s: float | None) -> subprocess.CompletedProcess[str]:
    """Runs a command to its end, and returns its output. A timeout or an interrupt ends all its processes.

    If the command cannot be run, the exit code is 127 and the error output contains the reason.

    Raises:
        subprocess.TimeoutExpired: the command did not end within ``timeout_s`` seconds; None means no limit.
    """
    with _start_supervised(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        output = process.communicate(timeout=timeout_s)
    return subprocess.CompletedProcess(command, process.returncode, *(part.decode(errors="replace") for part in output))


@contextmanager
def _start_supervised(
    command: Sequence[str | Path], *, ends_descendants: bool = False, **options: Any
) -> Iterator[subprocess.Popen[bytes]]:
    """Starts a program below a supervisor for the block. An error in the block, or an interrupt, ends all processes."""
    supervised_command = [sys.executable, __file__, str(os.getpid()), "all" if ends_descendants else "first", *command]
    with subprocess.Popen(supervised_command, stdin=subprocess.DEVNULL, start_new_session=True, **options) as process:
        try:
            yield process
        except BaseException:
            _end_or_kill(process)
            raise


def _end_or_kill(process: subprocess.Popen[bytes], grace_s: float = _GRACE_S) -> None:
    """Asks a program to end, and kills its remaining processes after ``grace_s`` or on a second interrupt."""
    process.terminate()
    try:
        with suppress(subprocess.TimeoutExpired):
            process.wait(grace_s)
    finally:
        process.terminate()
        try:
            process.wait(_KILL_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            process.kill()


def read_last_lines(log: Path) -> str:
    """Returns the last three nonempty lines of a log, joined into one line."""
    return " | ".join(_read_lines(log, 0)[-3:])


def find_failure_line(log: Path, start: int = 0) -> str:
    """Returns the line of a log that says why a program failed.

    It is the last line about memory, else the last line with an error, else the last line. The search begins at the
    byte ``start``.
    """
    lines = _read_lines(log, start)
    memory_lines = [line for line in lines if _OUT_OF_MEMORY.search(line)]
    # Looks for the last error, because a profiler may print more lines after it.
    error_lines = [line for line in lines if _ERROR_LINE.match(line)]
    return (memory_lines or error_lines or lines or ["it printed nothing"])[-1]


def _read_lines(log: Path, start: int) -> list[str]:
    """Returns the nonempty lines near the end of a log, without PyTorch's prefix for ranks."""
    with log.open("rb") as file:
        file.seek(max(start, log.stat().st_size - _TAIL_BYTES))
        text = file.read().decode(errors="replace")
    return [line for raw_line in text.splitlines() if (line := _RANK_PREFIX.sub("", raw_line).strip())]


# --- the supervisor ---


def signal_when_parent_dies(number: signal.Signals) -> None:
    """Asks the kernel to send this process a signal when its parent dies."""
    import ctypes  # imported here to start faster without a supervisor

    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PARENT_DEATH_SIGNAL, number)


def _supervise(parent: int, what_ends: str, command: list[str]) -> int:
    """Runs a command to its end and returns its exit code, negative for a signal.

    Args:
        parent: ID of the process that started the supervisor.
        what_ends: "all" to end all processes that the command started when it ends, "first" to end them only if it
            fails.
        command: the program and its arguments.
    """
    import ctypes

    import psutil

    requests, program = 0, None

    def kill_descendants(*_: object) -> None:
        """Kills all descendants, and does so again soon, because a process may be just being started."""
        for process in psutil.Process().children(recursive=True):
            with suppress(psutil.NoSuchProcess):
                process.kill()
        signal.setitimer(signal.ITIMER_REAL, _KILL_INTERVAL_S)

    def end(*_: object) -> None:
        """Asks the program to end. At the second request, or if the parent has died, it kills all descendants."""
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
    if requests or os.getppid() != parent:  # a request to stop, or the parent's death, came before the start
        kill_descendants()
    code = 0
    with suppress(ChildProcessError):  # os.wait raises this error when no child remains
        while True:
            ended_pid, status = os.wait()
            if ended_pid == program.pid:
                code = os.waitstatus_to_exitcode(status)
                if code == 0 and not requests and what_ends == "first":
                    break
                kill_descendants()  # kills the program, which survives a killed profiler
    signal.setitimer(signal.ITIMER_REAL, 0)
    return code


if __name__ == "__main__":
    exit_code = _supervise(int(sys.argv[1]), sys.argv[2], sys.argv[3:])
    if exit_code < 0:  # ends this process by the signal that ended the program
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        with suppress(OSError):  # SIGKILL has no handler that could be reset
            signal.signal(-exit_code, signal.SIG_DFL)
        os.kill(os.getpid(), -exit_code)
    sys.exit(exit_code)
