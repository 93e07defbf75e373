"""Runs two programs that take turns: while one program runs a block of steps, the other program waits.

    python -m nsys_analyzer.verify.side_by_side '[{"command": […], "folder": …, "variables": {…}, "log": …}, …]'

Each program has one end of a socket. The variable ``NSYS_ANALYZE_TURN`` is the file descriptor of this end. After a
block of steps, the program writes a byte to the socket, and continues when it reads a byte. If there is only one
program, it does not wait.
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

from nsys_analyzer.capture.launcher import end_processes
from nsys_analyzer.system.process import CANNOT_RUN, find_failure_line

_POLL_INTERVAL_S = 0.2
#: Seconds to wait for the last output of a program that has ended.
_LOG_TIMEOUT_S = 2
#: The largest size of a log, and the size of one read, in bytes. If the output is longer, the log keeps its end.
_MAX_LOG_BYTES, _READ_BYTES = 10_000_000, 1_000_000


def _write_log(output: IO[bytes], log: Path) -> None:
    """Writes the output of a program to its log; the log keeps the end of a long output."""
    previous_text = b""
    with output, log.open("wb", buffering=0) as file:
        while text := os.read(output.fileno(), _READ_BYTES):
            if file.tell() + len(text) > _MAX_LOG_BYTES:
                file.truncate(file.seek(0))
                file.write(previous_text)
            file.write(text)
            previous_text = text


@dataclass
class _RunningProgram:
    """A running program, our end of its socket, its log, and the thread that writes the log."""

    process: subprocess.Popen[bytes]
    turns: socket.socket
    log: Path
    log_writer: threading.Thread

    def finish_turn(self) -> bool:
        """Waits until the program has finished a block of steps or has ended; returns whether it waits for its turn."""
        while True:
            # A child process of the program may hold the socket open after the program has ended.
            has_ended = self.process.poll() is not None
            if select.select([self.turns], [], [], 0 if has_ended else _POLL_INTERVAL_S)[0]:
                return bool(self.turns.recv(1))
            if has_ended:
                return False

    def give_turn(self) -> None:
        """Lets the program run its next block of steps."""
        self.turns.send(b".")


def run(jobs: Sequence[dict[str, Any]]) -> int:
    """Runs the programs to their end, and returns 0.

    If a program fails, prints the line of its log that names the failure, and returns the exit code of the program.
    """
    with ExitStack() as stack:
        runners: list[_RunningProgram] = []
        processes: list[subprocess.Popen[bytes]] = []
        stack.callback(end_processes, processes)
        for job in jobs:
            our_end, program_end = map(stack.enter_context, socket.socketpair())
            variables = {**os.environ, **job["variables"]}
            if len(jobs) > 1:
                variables["NSYS_ANALYZE_TURN"] = str(program_end.fileno())
            processes.append(
                subprocess.Popen(
                    job["command"], cwd=job["folder"], env=variables, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
                    pass_fds=[program_end.fileno()],
                )
            )  # fmt: skip
            program_end.close()
            log = Path(job["log"])
            log_writer = threading.Thread(target=_write_log, args=(processes[-1].stdout, log), daemon=True)
            log_writer.start()
            runners.append(_RunningProgram(processes[-1], our_end, log, log_writer))
        waiting_runners = [runner for runner in runners if runner.finish_turn()]
        while waiting_runners:
            runner, *waiting_runners = waiting_runners
            runner.give_turn()
            if runner.finish_turn():
                waiting_runners.append(runner)
        for runner in runners:
            code = runner.process.wait()
            # Waits with a limit, because a child process may keep the output open.
            runner.log_writer.join(_LOG_TIMEOUT_S)
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
