"""Runs two programs at once that take turns: while one has its steps, the other waits.

    python -m nsys_analyzer.verify.side_by_side '[{"command": […], "folder": …, "variables": {…}, "log": …}, …]'

Each program holds one end of a socket, whose number it finds in ``NSYS_ANALYZE_TURN``. It writes a byte there when it
has done its block of steps, and goes on when it reads one. One program alone does not wait.
"""

from __future__ import annotations

import json
import os
import select
import socket
import subprocess
import sys
import threading
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from nsys_analyzer.capture.launcher import end_all
from nsys_analyzer.system.process import CANNOT_RUN, find_failure_line

_TICK_S = 0.2
#: Seconds to wait for the last output of a program that has ended.
_LOG_TIMEOUT_S = 2
#: Bytes of a log at most, and bytes of one read. Of a longer output, the log keeps the last two reads.
_MAX_LOG_BYTES, _READ_BYTES = 10_000_000, 1_000_000


def _keep(output: IO[bytes], log: Path) -> None:
    """Writes the output of a program to its log; of a long output, the log keeps the end."""
    last = b""
    with output, log.open("wb", buffering=0) as file:
        while text := os.read(output.fileno(), _READ_BYTES):
            if file.tell() + len(text) > _MAX_LOG_BYTES:
                file.truncate(file.seek(0))
                file.write(last)
            file.write(text)
            last = text


@dataclass
class _Runner:
    """A program that runs, our end of its socket, its log, and the thread that writes that."""

    process: subprocess.Popen[bytes]
    turns: socket.socket
    log: Path
    logging: threading.Thread

    def waits(self) -> bool:
        """Waits until the program waits for its turn, or has ended; returns whether it waits."""
        while True:
            # What it has started may hold its end of the socket for longer than it lives.
            ended = self.process.poll() is not None
            if select.select([self.turns], [], [], 0 if ended else _TICK_S)[0]:
                return bool(self.turns.recv(1))
            if ended:
                return False

    def goes_on(self) -> None:
        """Gives the program its turn."""
        self.turns.send(b".")


def run(jobs: Sequence[dict[str, Any]]) -> int:
    """Runs the programs to their end; returns the exit code of the first that failed, which is told why, or 0."""
    with ExitStack() as stack:
        runners: list[_Runner] = []
        processes: list[subprocess.Popen[bytes]] = []
        stack.callback(end_all, processes)
        for job in jobs:
            ours, theirs = map(stack.enter_context, socket.socketpair())
            variables = {**os.environ, **job["variables"]}
            if len(jobs) > 1:
                variables["NSYS_ANALYZE_TURN"] = str(theirs.fileno())
            processes.append(
                subprocess.Popen(
                    job["command"], cwd=job["folder"], env=variables, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
                    pass_fds=[theirs.fileno()],
                )
            )  # fmt: skip
            theirs.close()
            logging = threading.Thread(target=_keep, args=(processes[-1].stdout, log := Path(job["log"])), daemon=True)
            logging.start()
            runners.append(_Runner(processes[-1], ours, log, logging))
        left = [runner for runner in runners if runner.waits()]
        while left:  # the one in front has its turn, and goes behind the others
            runner, *left = left
            runner.goes_on()
            if runner.waits():
                left.append(runner)
        for runner in runners:
            code = runner.process.wait()
            runner.logging.join(_LOG_TIMEOUT_S)  # a child process of the program may keep its output open
            if code:
                print(find_failure_line(runner.log), flush=True)
                return 128 - code if code < 0 else code
    return 0


if __name__ == "__main__":
    try:
        sys.exit(run(json.loads(sys.argv[1])))
    except OSError as error:
        print(f"{error.filename} cannot be run ({error.strerror})")
        sys.exit(CANNOT_RUN)
