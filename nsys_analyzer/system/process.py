"""Runs a program until it ends, times out or is interrupted; none of its processes outlives this one.

A program and all that it starts carry a mark in their environment. A watcher (:mod:`.watcher`) ends what bears the
mark, and the program's session and descendants, when this process is gone. A note beside the log holds the mark while
the program runs, so that the next run into the folder finds what is left where the watcher was killed, too.
"""

from __future__ import annotations

import contextlib
import math
import os
import re
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, TypeVar

from nsys_analyzer.errors import CaptureError
from nsys_analyzer.system import watcher

_Result = TypeVar("_Result")

_GRACE_S = 5
_TICK_S = 0.2
_MARK = "NSYS_ANALYZE_PROCESS"
_NOTES = ".running-*"
_KILLED = (-signal.SIGKILL, 128 + signal.SIGKILL)  # its own end, or what a shell or profiler makes of it
_TAIL_BYTES = 20_000
_OUT_OF_MEMORY = re.compile(
    r"OutOfMemoryError|CUDA out of memory|CUDA error: out of memory|CUBLAS_STATUS_ALLOC_FAILED|MemoryError"
    r"|DefaultCPUAllocator: (?:can't allocate|not enough) memory"
)
_RANK = re.compile(r"^\[rank\d+\]: ?")
_ERROR = re.compile(r"[\w.]*(Error|Exception|Interrupt|Exit)\b")


@dataclass(frozen=True)
class Ended:
    """How a program ended: ``ok``, ``oom``, ``failed`` or ``timeout``, and a line with the reason if not ok."""

    status: str
    message: str | None = None


@dataclass(frozen=True)
class Progress:
    """Who is told: the name of what is run and what is done with it; and how it ended, after how many seconds."""

    started: Callable[[str, str], None]
    ended: Callable[[str, Ended, float], None]


def run_logged(
    command: Sequence[str], log: Path, timeout_s: float | None, *, environment: Mapping[str, str] | None = None,
    made_progress: Callable[[], bool] = lambda: False,
) -> Ended:  # fmt: skip
    """Runs a command in a process group of its own, its output at the end of ``log``, and waits for it.

    When the time is up (None is no limit), on an interrupt, where the command fails or this process is killed, all that
    it started is ended, a profiler's target too. ``environment`` adds variables to those of this process. The time
    begins anew whenever ``made_progress``, asked a few times a second, returns True.

    Raises:
        KeyboardInterrupt: after all of it is gone.
        OSError: the log cannot be written.
    """
    killed_before, mark = _oom_kills(), str(uuid.uuid4())
    with log.open("ab") as output, _noted(mark, log), _watcher(mark) as watch:
        start = output.tell()
        try:
            process = _start(command, mark, output, subprocess.STDOUT, environment)
        except OSError as error:
            return Ended("failed", f"{command[0]} cannot be run ({error.strerror})")
        try:
            code = _to_its_end(process, mark, watch, lambda: _wait(process, timeout_s, made_progress))
        except subprocess.TimeoutExpired:
            return Ended("timeout", f"stopped after {timeout_s:g} s")
    return _ended(code, log, start, starved=_oom_kills() > killed_before)


def run_captured(command: Sequence[str | Path], timeout_s: float | None) -> subprocess.CompletedProcess[str]:
    """Runs a command to its end and returns its output; nothing that it started outlives a time-out or an interrupt.

    Raises:
        OSError: it cannot be run.
        subprocess.TimeoutExpired: it did not end within ``timeout_s`` seconds; None is no limit.
    """
    mark = str(uuid.uuid4())
    with _watcher(mark) as watch:
        process = _start(command, mark, subprocess.PIPE, subprocess.PIPE)
        out, err = _to_its_end(process, mark, watch, lambda: process.communicate(timeout=timeout_s))
    texts = (text.decode(errors="replace") for text in (out, err))
    return subprocess.CompletedProcess(process.args, process.returncode, *texts)


def end_earlier_run(folder: Path) -> None:
    """Ends the programs that an earlier run into a folder, or one below it, left when it and its watcher were killed.

    Raises:
        CaptureError: a process does not end.
    """
    for note in (*folder.glob(_NOTES), *folder.glob(f"*/{_NOTES}")):
        left = watcher.end_all(_variable(mark)) if (mark := _mark_in(note)) else set()
        if left:
            pids = ", ".join(map(str, sorted(left)))
            raise CaptureError(
                f"A program of an earlier run into {folder} is still running (process {pids}), and does not end",
                "Wait for it, or name another --output-dir",
            )
        note.unlink(missing_ok=True)


def _variable(mark: str) -> bytes:
    return f"{_MARK}={mark}".encode()


@contextmanager
def _noted(mark: str, log: Path) -> Iterator[None]:
    """Keeps a note beside a log while the program runs: the mark in its name alone, for the disk may be full."""
    note = log.with_name(f"{_NOTES[:-1]}{mark}_{_identity(log.parent)}")
    note.touch()
    try:
        yield
    finally:
        note.unlink(missing_ok=True)


def _mark_in(note: Path) -> str:
    """The mark in a note; empty where the folder is a copy, whose original may be at work."""
    mark, _, identity = note.name.removeprefix(_NOTES[:-1]).partition("_")
    return mark if identity == _identity(note.parent) else ""


def _identity(folder: Path) -> str:
    status = folder.stat()
    return f"{status.st_dev}-{status.st_ino}"


def _start(
    command: Sequence[str | Path], mark: str, stdout: IO[bytes] | int, stderr: int,
    environment: Mapping[str, str] | None = None,
) -> subprocess.Popen[bytes]:  # fmt: skip
    variables = {**os.environ, **(environment or {}), _MARK: mark}
    return subprocess.Popen(
        command, stdin=subprocess.DEVNULL, stdout=stdout, stderr=stderr, start_new_session=True, env=variables
    )


def _to_its_end(
    process: subprocess.Popen[bytes], mark: str, watch: Callable[[int], watcher.Leader], wait: Callable[[], _Result]
) -> _Result:
    """Returns what waiting for a process returns; where that fails, the process ends with all it started."""
    leader = watch(process.pid)
    with process:
        try:
            result = wait()
        except BaseException:  # a time-out or an interrupt
            _end(process, mark, leader)
            raise
        if process.returncode:  # a profiler that was killed leaves its target behind
            watcher.end_all(_variable(mark), leader)
    return result


@contextmanager
def _watcher(mark: str) -> Iterator[Callable[[int], watcher.Leader]]:
    """Starts the watcher of a mark, for the block; yields a function that tells it the program's process ID."""
    command = [sys.executable, "-I", "-S", watcher.__file__, os.fsdecode(_variable(mark))]
    unmarked = {name: value for name, value in os.environ.items() if name != _MARK}  # of a run around ours
    watching = subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True,
        bufsize=0, cwd="/", env=unmarked,
    )  # fmt: skip

    def tell(line: bytes) -> None:
        if watching.stdin:
            with contextlib.suppress(BrokenPipeError):  # somebody has ended it
                watching.stdin.write(line)

    def watch(pid: int) -> watcher.Leader:
        leader = watcher.Leader.of(pid)
        tell(leader.line())
        return leader

    with watching:
        yield watch
        tell(watcher.DONE)


def _wait(process: subprocess.Popen[bytes], timeout_s: float | None, made_progress: Callable[[], bool]) -> int:
    limit = math.inf if timeout_s is None else timeout_s
    deadline = time.monotonic() + limit
    while True:
        try:
            return process.wait(min(_TICK_S, max(deadline - time.monotonic(), 0)))
        except subprocess.TimeoutExpired:
            if made_progress():
                deadline = time.monotonic() + limit
            elif time.monotonic() >= deadline:
                raise


def last_lines(log: Path, lines: int = 3) -> str:
    """The last lines of a log that are not empty, as one."""
    return " | ".join(_lines(log, 0)[-lines:])


def _end(process: subprocess.Popen[Any], mark: str, leader: watcher.Leader) -> None:
    """Terminates the process's group, and kills what is left of it; a second interrupt kills at once.

    nsys puts its target into a session of its own: what carries the mark in its environment is killed, too.
    """
    family = watcher.family(leader)  # while every parent is still there
    try:
        _signal_group(process, signal.SIGTERM)
    finally:
        _signal_group(process, signal.SIGKILL)
        watcher.end_all(_variable(mark), leader, family)


def _signal_group(process: subprocess.Popen[bytes], number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError):  # nobody is left
        os.killpg(process.pid, number)
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(_GRACE_S)


def _ended(code: int, log: Path, start: int, *, starved: bool) -> Ended:
    if code == 0:
        return Ended("ok")
    if starved and code in _KILLED:
        return Ended("oom", "the system ran out of memory and killed it")
    said = final_words(log, start)
    if _OUT_OF_MEMORY.search(said):
        return Ended("oom", said)
    how = f"killed by {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
    return Ended("failed", f"{how}: {said}")


def final_words(log: Path, start: int = 0) -> str:
    """The line of a log, from a position on, that says why a program failed: memory, its last error, or its last."""
    lines = _lines(log, start)
    full = [line for line in lines if _OUT_OF_MEMORY.search(line)]
    errors = [line for line in lines if _ERROR.match(line)]  # a profiler goes on to speak after its target has died
    return (full or errors or lines or ["it said nothing"])[-1]


def _lines(log: Path, start: int) -> list[str]:
    """The last lines of a log from a position on that are not empty, without the rank that PyTorch puts before them."""
    with log.open("rb") as file:
        file.seek(max(start, log.stat().st_size - _TAIL_BYTES))
        text = file.read().decode(errors="replace")
    return [line for raw in text.splitlines() if (line := _RANK.sub("", raw).strip())]


def _oom_kills() -> int:
    """How many processes this system has killed for want of memory. Source: ``/proc/vmstat``, Linux 4.13 and later."""
    with contextlib.suppress(OSError):
        if match := re.search(r"^oom_kill (\d+)$", Path("/proc/vmstat").read_text(), re.MULTILINE):
            return int(match[1])
    return 0
