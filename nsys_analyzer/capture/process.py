"""Running one program to its end, its time-out or an interrupt, and telling how it ended."""

from __future__ import annotations

import contextlib
import math
import os
import re
import signal
import subprocess
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

_GRACE_S = 5
_TICK_S = 0.2
_MARK = "NSYS_ANALYZE_PROCESS"
_KILLED = (-signal.SIGKILL, 128 + signal.SIGKILL)  # its own end, or what a shell or profiler makes of it
_TAIL_BYTES = 20_000
_OUT_OF_MEMORY = re.compile(
    r"OutOfMemoryError|CUDA out of memory|CUDA error: out of memory|CUBLAS_STATUS_ALLOC_FAILED|MemoryError"
    r"|DefaultCPUAllocator: (?:can't allocate|not enough) memory"
)
_ERROR = re.compile(r"[\w.]*(Error|Exception|Interrupt|Exit)\b")


@dataclass(frozen=True)
class Ended:
    """How a program ended: ``ok``, ``oom``, ``failed`` or ``timeout``, and in a line why, where it is not ok."""

    status: str
    message: str | None = None


def run_logged(
    command: Sequence[str], log: Path, timeout_s: float | None, *, environment: Mapping[str, str] | None = None,
    is_ahead: Callable[[], bool] = lambda: False,
) -> Ended:  # fmt: skip
    """Runs a command in a process group of its own, its output at the end of ``log``, and waits for it.

    When the time is up, or on an interrupt, all that it started is ended, a profiler's target too.

    Args:
        command: the command line.
        log: the file.
        timeout_s: seconds until it is ended, None for no limit.
        environment: variables beside those of this process.
        is_ahead: asked a few times a second; the time begins anew whenever it has got ahead.

    Raises:
        KeyboardInterrupt: after all of it is gone.
        OSError: the log cannot be written.
    """
    killed_before, mark = _oom_kills(), str(uuid.uuid4())
    with log.open("ab") as output:
        start = output.tell()
        try:
            process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT,
                env={**os.environ, **(environment or {}), _MARK: mark}, start_new_session=True,
            )  # fmt: skip
        except OSError as error:
            return Ended("failed", f"{command[0]} cannot be run ({error.strerror})")
        try:
            code = _wait(process, timeout_s, is_ahead)
        except subprocess.TimeoutExpired:
            _end(process, mark)
            return Ended("timeout", f"stopped after {timeout_s:g} s")
        except BaseException:  # an interrupt: what was started must not outlive it
            _end(process, mark)
            raise
    return _ended(code, log, start, starved=_oom_kills() > killed_before)


def _wait(process: subprocess.Popen[bytes], timeout_s: float | None, is_ahead: Callable[[], bool]) -> int:
    """The exit code; raises TimeoutExpired when the time has passed since the process last got ahead."""
    limit = math.inf if timeout_s is None else timeout_s
    deadline = time.monotonic() + limit
    while True:
        try:
            return process.wait(min(_TICK_S, max(deadline - time.monotonic(), 0)))
        except subprocess.TimeoutExpired:
            if is_ahead():
                deadline = time.monotonic() + limit
            elif time.monotonic() >= deadline:
                raise


def last_lines(log: Path, lines: int = 3) -> str:
    """The last lines of a log that hold anything, as one."""
    return " | ".join([line.strip() for line in _tail(log, 0).splitlines() if line.strip()][-lines:])


def _end(process: subprocess.Popen[bytes], mark: str) -> None:
    """Terminates the process's group, and kills what does not listen; a second interrupt kills at once.

    nsys puts its target into a session of its own: what carries the mark in its environment is killed, too.
    """
    try:
        _signal_group(process, signal.SIGTERM)
    finally:
        _signal_group(process, signal.SIGKILL)
        for pid in _marked(mark):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


def _marked(mark: str) -> list[int]:
    """The processes that were started with the mark in their environment. Source: ``/proc``, on Linux."""
    pids = []
    for path in Path("/proc").glob("[0-9]*/environ"):
        with contextlib.suppress(OSError):  # it has ended, or is somebody else's
            if mark.encode() in path.read_bytes():
                pids.append(int(path.parent.name))
    return pids


def _signal_group(process: subprocess.Popen[bytes], number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError):  # nobody is left
        os.killpg(process.pid, number)
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(_GRACE_S)


def _ended(code: int, log: Path, start: int, *, starved: bool) -> Ended:
    if code == 0:
        return Ended("ok")
    said = _tail(log, start)
    if starved and code in _KILLED:
        return Ended("oom", "the system ran out of memory and killed it")
    found = [line.strip() for line in said.splitlines() if _OUT_OF_MEMORY.search(line)]
    if found:
        return Ended("oom", found[-1])
    lines = [line.strip() for line in said.splitlines() if line.strip()]
    errors = [line for line in lines if _ERROR.match(line)]  # a profiler goes on to speak after its target has died
    last = (errors or lines or ["it said nothing"])[-1]
    how = f"killed by {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
    return Ended("failed", f"{how}: {last}")


def _tail(log: Path, start: int) -> str:
    with log.open("rb") as file:
        file.seek(max(start, log.stat().st_size - _TAIL_BYTES))
        return file.read().decode(errors="replace")


def _oom_kills() -> int:
    """How many processes this system has killed for want of memory. Source: ``/proc/vmstat``, Linux 4.13 and later."""
    try:
        counters = Path("/proc/vmstat").read_text(encoding="ascii")
    except OSError:
        return 0
    match = re.search(r"^oom_kill (\d+)$", counters, re.MULTILINE)
    return int(match[1]) if match else 0
