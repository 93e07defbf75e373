"""Starts a program once for each rank of a run, as torchrun does on one machine. If one rank fails, all are ended.

    python -m nsys_analyzer.capture.launcher --nproc 2 -- python train.py

Each process has its own ``RANK`` and ``LOCAL_RANK``. The processes share the output of the launcher, unless a folder
for logs is given. The folder for logs then also contains a file with the process IDs.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shlex
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

from nsys_analyzer.system.atomic_write import write_text
from nsys_analyzer.system.process import CANNOT_RUN, find_failure_line

_GRACE_S = 10
"""The seconds that a rank has to end after another rank failed. A profiler needs them to write its recording."""
_PROCESS_IDS = "process_ids.json"


def make_launch_command(program: Sequence[str], count: int, logs: Path | None = None) -> list[str]:
    """Returns the command line that starts a program as ``count`` ranks, with a log for each in the folder ``logs``."""
    log_words = ["--logs", str(logs)] if logs else []
    launcher = [sys.executable, "-m", "nsys_analyzer.capture.launcher"]
    return [*launcher, "--nproc", str(count), *log_words, "--", *program]


def rank_log(folder: Path, rank: int) -> Path:
    """Returns the log of a rank."""
    return folder / f"target_rank{rank}.log"


def take_process_ids(folder: Path) -> tuple[int, ...]:
    """Returns the process IDs of the ranks that last logged into a folder, and removes the file that holds them."""
    path = folder / _PROCESS_IDS
    ids = tuple(json.loads(path.read_bytes())) if path.is_file() else ()
    path.unlink(missing_ok=True)
    return ids


def run(program: Sequence[str], count: int, logs: Path | None) -> int:
    """Runs the ranks to their end, and prints the first rank that fails. Returns its exit code, or 0."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    threads = os.environ.get("OMP_NUM_THREADS", "1")  # like torchrun, since each rank would use all cores
    shared = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "WORLD_SIZE": count, "LOCAL_WORLD_SIZE": count}
    processes: list[subprocess.Popen[bytes]] = []
    with ExitStack() as stack:
        stack.callback(end_processes, processes)
        starts = []
        for rank in range(count):
            output = stack.enter_context(rank_log(logs, rank).open("ab")) if logs else None
            starts.append(output.tell() if output else 0)
            variables = {**shared, "RANK": rank, "LOCAL_RANK": rank, "OMP_NUM_THREADS": threads}
            environment = {**os.environ, **{key: str(value) for key, value in variables.items()}}
            processes.append(subprocess.Popen(program, env=environment, stdout=output, stderr=output))
        if logs:
            write_text(logs / _PROCESS_IDS, json.dumps([process.pid for process in processes]))
        running = {process.pid: rank for rank, process in enumerate(processes)}
        while running:
            # The rank that fails first is reported, because other ranks may fail as a consequence.
            rank = running.pop(os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOWAIT).si_pid)  # type: ignore[union-attr]
            if code := processes[rank].wait():
                reason = find_failure_line(rank_log(logs, rank), starts[rank]) if logs else f"it ended with code {code}"
                print(f"rank {rank}: {reason}", flush=True)
                return 128 - code if code < 0 else code  # a signal's number, as a shell reports it
    return 0


def end_processes(processes: Sequence[subprocess.Popen[bytes]]) -> None:
    """Terminates all running processes, and kills those that do not end in time."""
    for process in processes:
        process.terminate()  # this has no effect on a process that has ended
    deadline = time.monotonic() + _GRACE_S
    for process in processes:
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(max(0.0, deadline - time.monotonic()))
        process.kill()


def main(arguments: Sequence[str]) -> int:
    """Runs the launcher with the arguments of the command line, and returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m nsys_analyzer.capture.launcher")
    parser.add_argument("--nproc", type=int, required=True, metavar="N", help="number of processes to start")
    parser.add_argument("--logs", type=Path, metavar="FOLDER", help="write a log of each process into this folder")
    parser.add_argument("program", nargs="+", metavar="-- PROGRAM ARGUMENTS", help="the program that each process runs")
    options = parser.parse_args(arguments)
    if options.nproc < 1:
        parser.error("--nproc must be at least 1")
    try:
        return run(options.program, options.nproc, options.logs)
    except OSError as error:
        print(f"{shlex.join(options.program)} cannot be run ({error.strerror})")
        return CANNOT_RUN


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
