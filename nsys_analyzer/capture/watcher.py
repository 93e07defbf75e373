"""Ends what a process has started once that process is gone, even by SIGKILL.

It runs as a program of its own, ``python -I -S watcher.py MARK``, with a pipe from the process it watches as its
standard input, and imports next to nothing: it is there in some 10 ms. Whatever was started with the mark in its
environment is ended, a profiler's target in a session of its own too. An environment variable is no process ID: it
cannot come to mean another process.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import time

DONE = b"done"
_PATIENCE_S = 10.0
_TICK_S = 0.02
_QUIET_ROUNDS = 3  # a process is seen under its parent's environment until it has begun its own program


def carriers(start: bytes) -> set[int]:
    """The processes with an environment variable that starts so, ``NAME=value``, but for this one and its ancestors.

    Source: ``/proc``, on Linux; those of other users are not seen.
    """
    with contextlib.suppress(OSError):
        pids = {int(name) for name in os.listdir("/proc") if name.isdecimal()} - _own_line()  # noqa: PTH208
        return {pid for pid in pids if any(entry.startswith(start) for entry in _environment(pid))}
    return set()


def end_carriers(start: bytes, patience_s: float = _PATIENCE_S) -> set[int]:
    """Kills these processes and what they start meanwhile, and waits until they are gone.

    Returns:
        Those that were not gone after so many seconds, as one that waits for a driver.
    """
    deadline, quiet, left = time.monotonic() + patience_s, 0, set[int]()
    while quiet < _QUIET_ROUNDS and time.monotonic() < deadline:
        found = carriers(start)
        for pid in found:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
        left = found | {pid for pid in left if _state(pid) not in ("", "Z", "X")}
        quiet = 0 if left else quiet + 1
        time.sleep(_TICK_S)
    return left


def _environment(pid: int) -> list[bytes]:
    """The environment a process was started with; none where it has ended, or is somebody else's."""
    with contextlib.suppress(OSError), open(f"/proc/{pid}/environ", "rb") as file:  # noqa: PTH123
        return file.read().split(b"\0")
    return []


def _own_line() -> set[int]:
    """This process and its ancestors."""
    line, pid = {0}, os.getpid()
    while pid not in line:
        line.add(pid)
        pid = int(_status(pid)[1]) if _status(pid) else 0
    return line


def _state(pid: int) -> str:
    """``R``, ``S``, ``D``, ``Z`` …; empty where there is no such process."""
    status = _status(pid)
    return status[0] if status else ""


def _status(pid: int) -> list[str]:
    """The fields of ``/proc/PID/stat`` behind the program's name: state, parent and others."""
    with contextlib.suppress(OSError), open(f"/proc/{pid}/stat", encoding="utf-8", errors="replace") as file:  # noqa: PTH123
        return file.read().rpartition(")")[2].split()
    return []


def main(mark: str) -> None:
    """Waits until the other end of the pipe is closed, and ends all that carries the mark unless told it is done."""
    told = b""
    while part := os.read(0, len(DONE)):
        told += part
    if told != DONE:
        end_carriers(os.fsencode(mark))


if __name__ == "__main__":
    main(sys.argv[1])
