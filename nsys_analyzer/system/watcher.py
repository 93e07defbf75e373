"""Ends what a process has started once that process is gone, even by SIGKILL.

It runs as a program of its own, ``python -I -S watcher.py MARK``, with a pipe from the process it watches as its
standard input, and imports next to nothing. It ends whatever was started with the mark in its environment, and what
belongs to the session of the program or descends from it, for a program may write over its environment, as those do
that set their title. A process ID counts with the time at which its process started, for it may be given again.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import time
from collections.abc import Iterable
from typing import NamedTuple

DONE = b"done\n"
_SESSION, _STARTED = 3, 19  # fields of /proc/PID/stat behind the program's name
_PATIENCE_S = 10.0
_TICK_S = 0.02
_QUIET_ROUNDS = 3  # a process is seen under its parent's environment until it has begun its own program


def processes_with(mark: bytes) -> set[int]:
    """The processes of this user with an environment variable, ``NAME=value``, but for this one and its ancestors."""
    return {pid for pid in _pids() - _self_and_ancestors() if mark in _environment(pid)}


class Leader(NamedTuple):
    """A program that leads a session: its process ID, and when it was started, in the kernel's ticks."""

    pid: int
    started: str

    @staticmethod
    def of(pid: int) -> Leader:
        """The program with this process ID, which has not been waited for."""
        return Leader(pid, _status(pid)[_STARTED])

    def line(self) -> bytes:
        """The line by which the watcher is told of it."""
        return f"{self.pid} {self.started}\n".encode()


def family(leader: Leader) -> set[int]:
    """The processes of a program's session, and all that descend from it, but for this one and its ancestors."""
    statuses = {pid: status for pid in _pids() if (status := _status(pid))}
    own = statuses.get(leader.pid)
    if own and own[_STARTED] != leader.started:
        return set()  # another process has its number now
    found = {pid for pid, status in statuses.items() if int(status[_SESSION]) == leader.pid}
    newest = found
    while newest:
        newest = {pid for pid, status in statuses.items() if int(status[1]) in newest} - found
        found |= newest
    return found - _self_and_ancestors()


def end_all(
    mark: bytes, leader: Leader | None = None, more: Iterable[int] = (), patience_s: float = _PATIENCE_S
) -> set[int]:
    """Kills the processes with a mark and the family of a program, and what they start meanwhile, until all are gone.

    Args:
        mark: ``NAME=value``.
        leader: the program, None where it is not known any more.
        more: further processes to end, its family before it died.

    Returns:
        Those that were not gone in time, as one that waits for a driver.
    """
    deadline, quiet = time.monotonic() + patience_s, 0
    left, first = set[int](), set(more)
    while quiet < _QUIET_ROUNDS and time.monotonic() < deadline:
        found = processes_with(mark) | (family(leader) if leader else set()) | first
        first = set()
        for pid in found:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
        left = {pid for pid in found | left if (_status(pid) or ["X"])[0] not in ("Z", "X")}
        quiet = 0 if left else quiet + 1
        time.sleep(_TICK_S)
    return left


def _pids() -> set[int]:
    with contextlib.suppress(OSError):
        return {int(name) for name in os.listdir("/proc") if name.isdecimal()}  # noqa: PTH208
    return set()


def _environment(pid: int) -> list[bytes]:
    """The environment a process was started with; none where it has ended, or is somebody else's."""
    with contextlib.suppress(OSError), open(f"/proc/{pid}/environ", "rb") as file:  # noqa: PTH123
        return file.read().split(b"\0")
    return []


def _self_and_ancestors() -> set[int]:
    line, pid = {0}, os.getpid()
    while pid not in line:
        line.add(pid)
        status = _status(pid)
        pid = int(status[1]) if status else 0
    return line


def _status(pid: int) -> list[str]:
    """The fields of ``/proc/PID/stat`` behind the program's name: state, parent and others."""
    with contextlib.suppress(OSError), open(f"/proc/{pid}/stat", encoding="utf-8", errors="replace") as file:  # noqa: PTH123
        return file.read().rpartition(")")[2].split()
    return []


def main(mark: str) -> None:
    """Waits until the other end of the pipe is closed, and ends the program and its kin unless told it is done."""
    told = b""
    while part := os.read(0, 100):
        told += part
    if not told.endswith(DONE):
        words = told.decode().split()
        end_all(os.fsencode(mark), Leader(int(words[0]), words[1]) if words else None)


if __name__ == "__main__":
    main(sys.argv[1])
